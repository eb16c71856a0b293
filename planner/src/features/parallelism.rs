//! The degrees of a plan, as users who configure training by hand name them: data, tensor, context and expert
//! parallelism.
//!
//! A plan states for each op the factors that its mesh axes split. The degree of a kind is the product of the axes that
//! split factors of that kind in the products of a stage, which do nearly all of its work. An axis may do different
//! things in different ops. It counts as what it does in most of the work, and the answer includes that share of the
//! work. An axis that splits the positions of attention counts as context parallelism, since no other degree does that.

use crate::features::stacks::stack;
use crate::intra_op::dims::{CountedDims, factors_among};
use crate::intra_op::space::{AxisRoles, batch_factors};
use crate::lower::alike::Alike;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::{AxisId, CONTEXT_AXIS};
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Stage, ValueSharding};
use altiplano_ir::rule::{AxisUse, ShardingRule};
use std::collections::BTreeMap;

/// How the work of a stage is split over its devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parallelism {
    /// Devices, or groups of devices, that have samples of their own.
    pub data: u32,
    /// Devices that split features: columns, rows and heads.
    pub tensor: u32,
    /// Devices that split a sample: its positions, or the height and width of an image.
    pub context: u32,
    /// Devices that have experts of their own. They also count in the other degrees.
    pub expert: u32,
    /// Devices that split the features of an expert.
    pub within_expert: u32,
    /// Groups of replicas, each of which holds all that is sharded.
    pub groups: u32,
    /// Devices that repeat each other's work.
    pub repeated: u32,
    /// The least share of the stage's work in which an axis does what it counts as.
    pub agreement: f64,
}

/// The kind of parallelism that splits a factor of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Data,
    Tensor,
    Context,
    Expert,
    /// Tokens on their way to experts and back.
    Routing,
    Repeated,
}

/// The degrees of each stage of a plan, in order.
pub fn parallelism(plan: &Plan) -> Vec<Parallelism> {
    let graph = &plan.graph;
    let dims = Dims::of(graph);
    let kinds: BTreeMap<ValueId, Vec<Kind>> =
        graph.values().filter(|&v| graph.node(v).op.is_contraction()).map(|v| (v, kinds_of(graph, v, &dims))).collect();
    plan.stages.iter().map(|stage| of_stage(graph, stage, &kinds)).collect()
}

fn of_stage(graph: &Graph, stage: &Stage, kinds: &BTreeMap<ValueId, Vec<Kind>>) -> Parallelism {
    let mut found = Parallelism {
        data: 1,
        tensor: 1,
        context: 1,
        expert: 1,
        within_expert: 1,
        groups: groups(stage),
        repeated: 1,
        agreement: 1.0,
    };
    let products = stage.shardings.iter().filter_map(|(v, sharding)| Some((*v, &sharding.strategy, kinds.get(v)?)));
    let mut work: Vec<BTreeMap<Kind, f64>> = vec![BTreeMap::new(); stage.mesh.axes.len()];
    let mut of_attention = work.clone();
    for (v, strategy, kinds) in products {
        for (axis, use_) in strategy.0.iter().enumerate() {
            let kind = match use_ {
                AxisUse::Factor { factor, .. } => kinds[usize::from(*factor)],
                AxisUse::Replicated | AxisUse::Partial { .. } => Kind::Repeated,
            };
            *work[axis].entry(kind).or_default() += graph.flop(v) as f64;
            if matches!(graph.node(v).op, Op::Composite(_)) {
                *of_attention[axis].entry(kind).or_default() += graph.flop(v) as f64;
            }
        }
    }
    for (axis, mut work) in (0..).map(AxisId).zip(work) {
        let size = stage.mesh.size(axis) as u32;
        if size == 1 {
            continue;
        }
        // Experts are split within their layers, besides what the axis does everywhere else.
        let of_experts = work.remove(&Kind::Expert).unwrap_or(0.0);
        work.remove(&Kind::Routing);
        if of_experts > 0.0 {
            found.expert *= size;
        }
        let most = |work: &BTreeMap<Kind, f64>| {
            let most = work.iter().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(a.0)));
            most.map_or(Kind::Data, |(kind, _)| *kind)
        };
        let kind = match most(&of_attention[usize::from(axis.0)]) {
            Kind::Context => Kind::Context,
            _ => most(&work),
        };
        if kind == Kind::Tensor && of_experts == 0.0 {
            found.within_expert *= size;
        }
        let (all, of_kind) = (work.values().sum::<f64>(), work.get(&kind).copied().unwrap_or(0.0));
        let part = if all > 0.0 { of_kind / all } else { 1.0 };
        found.agreement = found.agreement.min(part);
        *match kind {
            Kind::Data | Kind::Expert | Kind::Routing => &mut found.data,
            Kind::Tensor => &mut found.tensor,
            Kind::Context => &mut found.context,
            Kind::Repeated => &mut found.repeated,
        } *= size;
    }
    found
}

/// The roles of the axes of each stage, as a sweep over degrees assigns them to its plans: replicas first, then context
/// parallelism, and tensor parallelism last. `None` if the plan comes from a search that leaves axes free.
pub(crate) fn uniform_roles(plan: &Plan) -> Option<Vec<AxisRoles>> {
    let has_roles = |stage: &Stage| stage.mesh.axes.len() > 2 || stage.mesh.find(CONTEXT_AXIS).is_some();
    if !stack(plan.target).uniform && !plan.stages.iter().any(has_roles) {
        return None;
    }
    let dims = Dims::of(&plan.graph);
    plan.stages.iter().map(|stage| roles_of_stage(&plan.graph, stage, &dims)).collect()
}

/// `None` if the stage has no axis of replicas before that of tensor parallelism.
fn roles_of_stage(graph: &Graph, stage: &Stage, dims: &Dims) -> Option<AxisRoles> {
    let tensor = stage.mesh.axis_ids().last()?;
    let context = stage.mesh.find(CONTEXT_AXIS);
    let data_axes = context.unwrap_or(tensor).0;
    let last = AxisId(data_axes.checked_sub(1)?);
    let splits_experts = |(&v, sharding): (&ValueId, &ValueSharding)| match sharding.strategy.0.get(usize::from(last.0))
    {
        Some(AxisUse::Factor { factor, .. }) if graph.node(v).op.is_contraction() => {
            kinds_of(graph, v, dims)[usize::from(*factor)] == Kind::Expert
        }
        _ => false,
    };
    Some(AxisRoles {
        data_axes,
        experts: stage.shardings.iter().any(splits_experts).then_some(last),
        model_axis: context.is_none().then_some(tensor),
        context_axis: context,
        group_axes: u8::from(groups(stage) > 1),
        features_axis: (stage.mesh.size(tensor) > 1).then_some(tensor),
        tokens_between: splits_tokens_between_products(graph, std::slice::from_ref(stage)),
    })
}

/// Returns true if tensor-parallel devices, the last mesh axis, split the tokens of most values between products:
/// sequence parallelism. To split samples in place of positions sends and holds the same bytes.
pub fn splits_tokens_between_products(graph: &Graph, stages: &[Stage]) -> bool {
    let [mut split, mut whole] = [0u64; 2];
    for stage in stages {
        let Some(tensor) = stage.mesh.axis_ids().last() else { continue };
        for (&v, sharding) in &stage.shardings {
            let node = graph.node(v);
            // Norms, residuals and the like: values of samples, positions and features.
            if node.ty.rank() != 3 || !node.ty.dtype.is_float() || node.op.is_contraction() {
                continue;
            }
            let layout = graph.rule(v).shardings(&sharding.strategy, &stage.mesh).result;
            let [samples, positions, features] = &layout.dims[..] else { continue };
            // Inside a block, features are split either way.
            if features.axes().any(|axis| axis == tensor) {
                continue;
            }
            let is_split = samples.axes().chain(positions.axes()).any(|axis| axis == tensor);
            let of = if is_split { &mut split } else { &mut whole };
            *of += node.ty.bytes();
        }
    }
    split > whole
}

/// Groups of replicas that each hold all that the replicas of a group share: outer axes of replicas that split no stored
/// tensor, while an inner one does.
fn groups(stage: &Stage) -> u32 {
    let splits = |axis: AxisId| {
        let storages = stage.parameters.values().flat_map(|storage| [&storage.parameter, &storage.state]);
        storages.into_iter().any(|stored| stored.split_axes().any(|a| a == axis))
    };
    let is_data = |axis: &AxisId| stage.mesh.axes[usize::from(axis.0)].name.starts_with("data");
    let axes: Vec<AxisId> = stage.mesh.axis_ids().filter(|axis| stage.mesh.size(*axis) > 1).filter(is_data).collect();
    if stage.zero == 0 || !axes.iter().any(|&axis| splits(axis)) {
        return 1;
    }
    axes.iter().take_while(|axis| !splits(**axis)).map(|&axis| stage.mesh.size(axis) as u32).product()
}

/// The kind of parallelism that splits each factor of a product.
fn kinds_of(graph: &Graph, v: ValueId, dims: &Dims) -> Vec<Kind> {
    let (node, rule) = (graph.node(v), dims.alike.rule(graph, v));
    let is_batch = batch_factors(graph, v, rule);
    let has_weights = node.operands.iter().any(|o| !dims.depends[o.index()]);
    let (alike, counted) = (&dims.alike, &dims.counted);
    let of_inputs = factors_among(graph, v, rule, |o| counted.of_inputs(graph, alike)[o.index()]);
    let of_experts = factors_among(graph, v, rule, |o| counted.of_experts(graph, alike)[o.index()]);
    let kind = |f: usize| match () {
        () if is_batch[f] => Kind::Data,
        () if has_weights && is_expert(rule, f as u8) => Kind::Expert,
        () if of_experts[f] => Kind::Routing,
        () if of_inputs[f] => Kind::Context,
        () => Kind::Tensor,
    };
    (0..rule.factors.len()).map(kind).collect()
}

/// Properties of a model's values by which the factors of its products are classified.
struct Dims {
    alike: Alike,
    counted: CountedDims,
    /// True for values that depend on inputs.
    depends: Vec<bool>,
}

impl Dims {
    fn of(graph: &Graph) -> Dims {
        let depends = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
        Dims { alike: Alike::new(graph), counted: CountedDims::default(), depends }
    }
}

/// Returns true if a factor of a product with weights indexes both operands and the result, as in independent products
/// side by side.
fn is_expert(rule: &ShardingRule, factor: u8) -> bool {
    rule.operands.len() == 2
        && rule.factors[usize::from(factor)].size > 1
        && rule.operands.iter().chain([&rule.result]).all(|dims| dims.iter().any(|d| d.contains(&factor)))
}

/// The products with expert parameters, each with the dimension of its result that counts experts.
pub fn expert_products(graph: &Graph) -> Vec<(ValueId, usize)> {
    let depends = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let of_experts = |v: ValueId| {
        let (node, rule) = (graph.node(v), graph.rule(v));
        let has_weights = node.operands.iter().any(|o| !depends[o.index()]);
        let is_batch = batch_factors(graph, v, &rule);
        let counts = |factors: &Vec<u8>| factors.iter().any(|&f| is_expert(&rule, f) && !is_batch[usize::from(f)]);
        Some((v, rule.result.iter().position(counts).filter(|_| has_weights)?))
    };
    let products = graph.values().filter(|&v| matches!(graph.node(v).op, Op::DotGeneral(_)));
    products.filter_map(of_experts).collect()
}
