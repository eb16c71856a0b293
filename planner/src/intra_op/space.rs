//! The strategies of each node on one mesh, and the prices between their layouts.
//!
//! Layouts are interned, so that the cost tables of the integer program are filled by index. The backward pass
//! mirrors the forward pass: axes that split a factor of the op also split it in the gradients. An operand's
//! cotangent therefore has the layout of the operand, and is partial over axes that split factors that the
//! operand does not have.

use super::dims::factors_among;
use super::ilp::{Model, Table, TableKey};
use crate::lower::{CompositeCost, Prices};
use altiplano_cost_models::timeline::Price;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Op, Reducer};
use altiplano_ir::plan::Stage;
use altiplano_ir::reshard::{Collective, Leg, Pattern, legs};
use altiplano_ir::rule::{AxisUse, FactorKind, ShardingRule, Strategy};
use altiplano_ir::sharding::{DimLayout, Segment, Sharding};
use altiplano_ir::types::TensorType;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// Constraints on the axes of a mesh, from the user or from a baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AxisRoles {
    /// So many first axes hold replicas: they split only factors of the batch, and those of experts as `experts` says.
    pub data_axes: u8,
    /// Replicas distribute the experts among themselves: axes of replicas from this one on may split factors that count
    /// experts.
    pub experts: Option<AxisId>,
    /// This axis splits no factors of the batch.
    pub model_axis: Option<AxisId>,
    /// This axis splits no features: only samples, their positions, and what counts experts (context parallelism).
    pub context_axis: Option<AxisId>,
    /// State is not distributed over so many first axes: each of these groups of replicas holds all of it (hybrid
    /// sharding).
    pub group_axes: u8,
    /// This axis splits only features, and only as weights split them. It never splits samples or tokens. No
    /// reshard splits activations over it, so partial sums are all-reduced. This is tensor parallelism as
    /// introduced by Megatron-LM (Shoeybi et al. 2019).
    pub features_axis: Option<AxisId>,
    /// Between contractions, `features_axis` may split tokens as well. Partial sums are then reduce-scattered, and
    /// gathered before the next contraction: sequence parallelism (Korthikanti et al. 2022).
    pub tokens_between: bool,
}

impl AxisRoles {
    /// Returns true if an axis may split a factor, which is of the batch, or counts experts that this axis may split.
    fn may_split(&self, axis: AxisId, batch: bool, experts: bool) -> bool {
        let of_data = axis.0 < self.data_axes;
        !(of_data && !batch && !experts || batch && self.model_axis == Some(axis))
    }

    fn may_split_experts(&self, axis: AxisId) -> bool {
        self.experts.is_some_and(|first| axis >= first)
    }
}

/// The number of an interned layout.
pub type LayoutId = u32;

/// A strategy of a node, with its layouts and prices.
#[derive(Clone, Debug)]
pub struct Choice {
    pub strategy: Strategy,
    /// The required layout of each operand.
    pub operands: Vec<LayoutId>,
    /// The layout in which each operand's cotangent is produced.
    pub cotangents: Vec<LayoutId>,
    /// The layout of the result, and the same layout without partial sums, in which the cotangent is needed.
    pub result: LayoutId,
    pub resting: LayoutId,
    /// Seconds of the op on the device, and of the host to issue it.
    pub forward_s: f64,
    pub issue_s: f64,
    /// Costs inside a composite, if the node is one.
    pub inside: Option<CompositeCost>,
}

/// All strategies of nodes of one kind.
#[derive(Debug)]
pub struct Space {
    pub choices: Vec<Choice>,
}

/// All inputs of a [`Space`], on one mesh.
#[derive(PartialEq, Eq, Hash)]
struct SpaceKey {
    /// See [`Model::alike`].
    kind: u32,
    /// See [`factor_blocks`].
    blocks: Vec<Vec<u64>>,
    /// For each operand and the result, bit masks of the dimensions that scale with the batch, of those that come from the
    /// model's inputs, and of those that count experts.
    dims: Vec<[u32; 3]>,
}

/// An interned layout.
struct Layout {
    sharding: Sharding,
    pattern: Pattern,
    local_elements: u64,
}

/// Interned layouts and memoised prices of one graph on one mesh.
pub struct Spaces<'a> {
    pub prices: &'a Prices<'a>,
    pub roles: AxisRoles,
    layouts: Vec<Layout>,
    ids: FxHashMap<Sharding, LayoutId>,
    /// See [`Spaces::storage_layout`] and [`Spaces::with_partial_of`].
    storage: FxHashMap<LayoutId, LayoutId>,
    partial: FxHashMap<(LayoutId, LayoutId), LayoutId>,
    /// Prices of reshards by the bytes of the tensor, and true for those that split over the axis of features. They depend
    /// on nothing else.
    reshards: FxHashMap<(u64, Pattern, Pattern), (Price, bool)>,
    spaces: FxHashMap<SpaceKey, Rc<Space>>,
    of_values: FxHashMap<ValueId, Rc<Space>>,
    /// Strategies that nodes always have.
    given: FxHashMap<ValueId, Strategy>,
    /// Cached cost tables between pairs of choices, see [`super::ilp`].
    pub(super) tables: FxHashMap<TableKey, Rc<Table>>,
}

impl<'a> Spaces<'a> {
    pub fn new(prices: &'a Prices<'a>, roles: AxisRoles) -> Self {
        Spaces {
            prices,
            roles,
            layouts: Vec::new(),
            ids: FxHashMap::default(),
            storage: FxHashMap::default(),
            partial: FxHashMap::default(),
            reshards: FxHashMap::default(),
            spaces: FxHashMap::default(),
            of_values: FxHashMap::default(),
            given: FxHashMap::default(),
            tables: FxHashMap::default(),
        }
    }

    /// Adds the strategies of a stage to those of its nodes, even if the search would not try them.
    pub fn including(mut self, stage: &Stage) -> Self {
        self.given = stage.shardings.iter().map(|(&v, s)| (v, s.strategy.clone())).collect();
        self
    }

    pub fn mesh(&self) -> &'a Mesh {
        &self.prices.mesh
    }

    pub fn intern(&mut self, sharding: Sharding) -> LayoutId {
        if let Some(&id) = self.ids.get(&sharding) {
            return id;
        }
        let id = self.layouts.len() as LayoutId;
        let (pattern, local_elements) = (Pattern::of(&sharding, self.mesh()), sharding.local_elements(self.mesh()));
        self.layouts.push(Layout { sharding: sharding.clone(), pattern, local_elements });
        self.ids.insert(sharding, id);
        id
    }

    pub fn layout(&self, id: LayoutId) -> &Sharding {
        &self.layouts[id as usize].sharding
    }

    /// The price to reshard a value of `bytes`.
    pub fn reshard(&mut self, bytes: u64, from: LayoutId, to: LayoutId) -> Price {
        match self.priced(bytes, from, to) {
            (_, true) if !self.roles.tokens_between => Price { seconds: f64::INFINITY, issue_s: 0.0 },
            (price, _) => price,
        }
    }

    /// The price to reduce a gradient in every microbatch into the layout in which it is stored. Unlike that of other
    /// reshards, it may split over any axis.
    pub fn reduced_into_storage(&mut self, bytes: u64, from: LayoutId, to: LayoutId) -> Price {
        self.priced(bytes, from, to).0
    }

    /// The price of a reshard, and true if it splits over the axis of features.
    fn priced(&mut self, bytes: u64, from: LayoutId, to: LayoutId) -> (Price, bool) {
        if from == to {
            return (Price::default(), false);
        }
        let [before, after] = [from, to].map(|id| self.layouts[id as usize].pattern);
        let key = (bytes, before, after);
        if let Some(&known) = self.reshards.get(&key) {
            return known;
        }
        let legs = self.legs(from, to);
        let cuts = self.roles.features_axis.is_some_and(|axis| legs.iter().any(|leg| cuts(&leg.collective, axis)));
        let new = (self.prices.legs_price(bytes, &legs), cuts);
        self.reshards.insert(key, new);
        new
    }

    /// Seconds to reshard a stored tensor of `bytes` once per step. Unlike other reshards, it may split over any axis.
    pub fn stored_s(&mut self, bytes: u64, from: LayoutId, to: LayoutId, bucket_bytes: u64) -> f64 {
        if from == to {
            return 0.0;
        }
        let legs = self.legs(from, to);
        self.prices.once_s(bytes, &legs, bucket_bytes)
    }

    fn legs(&self, from: LayoutId, to: LayoutId) -> Rc<[Leg]> {
        let [before, after] = [from, to].map(|id| &self.layouts[id as usize]);
        legs([before.pattern, after.pattern], &before.sharding, &after.sharding, self.mesh())
    }

    /// The strategies of a node.
    pub fn of(&mut self, model: &Model<'_>, v: ValueId) -> Rc<Space> {
        if let Some(space) = self.of_values.get(&v) {
            return space.clone();
        }
        let (graph, rule) = (model.graph, model.alike.rule(model.graph, v));
        let mut space = self.of_kind(model, v, rule);
        let unknown = |s: &&Strategy| !space.choices.iter().any(|c| c.strategy == **s);
        if let Some(strategy) = self.given.get(&v).filter(unknown).cloned() {
            let mut choices = space.choices.clone();
            choices.push(self.choice(graph, v, rule, strategy));
            space = Rc::new(Space { choices });
        }
        self.of_values.insert(v, space.clone());
        space
    }

    /// The strategies of a node, shared by all nodes of its kind.
    fn of_kind(&mut self, model: &Model<'_>, v: ValueId, rule: &ShardingRule) -> Rc<Space> {
        let graph = model.graph;
        let values = graph.node(v).operands.iter().chain([&v]);
        let dims_of =
            |o: ValueId| [graph.node(o).batch_dims, self.dims_of_inputs(model, o), self.dims_of_experts(model, o)];
        let dims = values.map(|&o| dims_of(o)).collect();
        let blocks = factor_blocks(graph, v, rule, model.blocks);
        let key = SpaceKey { kind: model.alike.kind(v), blocks, dims };
        if let Some(space) = self.spaces.get(&key) {
            return space.clone();
        }
        let space = Rc::new(self.enumerate(model, v, rule, &key.blocks));
        self.spaces.insert(key, space.clone());
        space
    }

    fn enumerate(&mut self, model: &Model<'_>, v: ValueId, rule: &ShardingRule, outers: &[Vec<u64>]) -> Space {
        let (mesh, graph) = (self.mesh(), model.graph);
        let node = graph.node(v);
        let is_batch = batch_factors(graph, v, rule);
        let of_inputs = factors_among(graph, v, rule, |o| self.dims_of_inputs(model, o));
        let of_experts = factors_among(graph, v, rule, |o| self.dims_of_experts(model, o));
        let whole = self.roles.features_axis.filter(|_| !self.roles.tokens_between || node.op.is_contraction());
        let mut strategies = rule.strategies(mesh, outers, false);
        strategies.retain(|s| self.allowed_by_roles(s, whole, &is_batch, &of_inputs, &of_experts));
        // Contractions use every axis where possible, since an idle axis multiplies their work. An axis for
        // features only may have nothing to split, for example with an odd vocabulary size.
        if node.op.is_contraction() {
            let features = self.roles.features_axis;
            let splits = |a: AxisId| mesh.size(a) > 1 && features != Some(a);
            let idle = |s: &Strategy| {
                s.0.iter().zip(mesh.axis_ids()).filter(|(u, a)| splits(*a) && **u == AxisUse::Replicated).count()
            };
            let least = strategies.iter().map(idle).min().unwrap_or(0);
            strategies.retain(|s| idle(s) == least);
        }
        Space { choices: strategies.into_iter().map(|strategy| self.choice(graph, v, rule, strategy)).collect() }
    }

    /// The prices of a node with a strategy.
    fn choice(&mut self, graph: &Graph, v: ValueId, rule: &ShardingRule, strategy: Strategy) -> Choice {
        let mesh = self.mesh();
        let (node, types) = (graph.node(v), graph.operand_types(v));
        let shardings = rule.shardings(&strategy, mesh);
        let inside = match &node.op {
            Op::Composite(_) => Some(self.prices.inside(&node.op, &types, rule, &strategy, &shardings)),
            _ => None,
        };
        let forward_s = match &inside {
            Some(inside) => inside.forward_s,
            None => self.prices.op_s(&node.op, &types, &node.ty, rule, &strategy, &shardings),
        };
        let issue_s = inside.map_or_else(|| self.prices.cost.issue_s(&node.op, &types), |inside| inside.issue_s);
        let cotangents = (0..shardings.operands.len())
            .map(|k| {
                let mut sharding = shardings.operands[k].clone();
                for (use_, axis) in strategy.0.iter().zip(mesh.axis_ids()) {
                    if let AxisUse::Factor { factor, .. } = use_
                        && !rule.splits_operand(k, *factor)
                    {
                        sharding.partial.push((axis, Reducer::Sum));
                    }
                }
                sharding.partial.sort();
                self.intern(sharding)
            })
            .collect();
        let operands = shardings.operands.into_iter().map(|s| self.intern(s)).collect();
        let resting = self.intern(shardings.result.reduced());
        let result = self.intern(shardings.result);
        Choice { strategy, operands, cotangents, result, resting, forward_s, issue_s, inside }
    }

    /// A bit mask of the dimensions of a value that come from the model's inputs; 0 if no role asks.
    fn dims_of_inputs(&self, model: &Model<'_>, v: ValueId) -> u32 {
        let asks = self.roles.features_axis.is_some() || self.roles.context_axis.is_some();
        if asks { model.dims.of_inputs(model.graph, model.alike)[v.index()] } else { 0 }
    }

    /// A bit mask of the dimensions of a value that count experts; 0 if no role asks.
    pub fn dims_of_experts(&self, model: &Model<'_>, v: ValueId) -> u32 {
        let asks = self.roles.experts.is_some() || self.roles.context_axis.is_some();
        if asks { model.dims.of_experts(model.graph, model.alike)[v.index()] } else { 0 }
    }

    /// `whole`: the axis that splits neither samples nor positions in this op.
    fn allowed_by_roles(
        &self,
        strategy: &Strategy,
        whole: Option<AxisId>,
        is_batch: &[bool],
        of_inputs: &[bool],
        of_experts: &[bool],
    ) -> bool {
        strategy.0.iter().zip((0..).map(AxisId)).all(|(use_, axis)| match use_ {
            AxisUse::Factor { factor, .. } => {
                let factor = usize::from(*factor);
                let experts = of_experts[factor] && self.roles.may_split_experts(axis);
                let features = !is_batch[factor] && !of_inputs[factor] && !of_experts[factor];
                self.roles.may_split(axis, is_batch[factor], experts)
                    && !(of_inputs[factor] && whole == Some(axis))
                    && !(features && self.roles.context_axis == Some(axis))
            }
            _ => true,
        })
    }

    /// Layouts in which a value may rest between layers: each axis splits one dimension or none.
    pub fn boundary_layouts(&mut self, ty: &TensorType, batch_dims: u32) -> Vec<LayoutId> {
        let mesh = self.mesh();
        let mut all = vec![Sharding::replicated(&ty.shape)];
        for axis in mesh.axis_ids().filter(|&a| mesh.size(a) > 1) {
            let mut next = Vec::new();
            for sharding in &all {
                next.push(sharding.clone());
                for dim in 0..ty.rank() {
                    let batch = batch_dims >> dim & 1 == 1;
                    if self.roles.may_split(axis, batch, false)
                        && let Some(finer) = altiplano_ir::reshard::split_further(sharding, dim, axis, mesh)
                    {
                        next.push(finer);
                    }
                }
            }
            all = next;
        }
        all.into_iter().map(|s| self.intern(s)).collect()
    }

    /// Layouts in which a parameter may be kept, before storage sharding. They are like
    /// [`Spaces::boundary_layouts`], with splits within blocks for dimensions that have them. `experts` is the
    /// bit mask of dimensions that count experts.
    pub fn parameter_layouts(&mut self, ty: &TensorType, outers: &[Vec<u64>], experts: u32) -> Vec<LayoutId> {
        let mesh = self.mesh();
        let mut rule = ShardingRule::default();
        rule.result = ty.shape.iter().map(|&d| vec![rule.factor(d, FactorKind::Parallel)]).collect();
        let mut strategies = rule.strategies(mesh, outers, false);
        // Axes of replicas and of context parallelism split parameters only as storage, except dimensions that count
        // experts.
        let AxisRoles { data_axes, context_axis, .. } = self.roles;
        let stores = |axis: AxisId| axis.0 < data_axes || context_axis == Some(axis);
        strategies.retain(|s| {
            s.0.iter().zip((0..).map(AxisId)).filter(|(_, axis)| stores(*axis)).all(|(use_, axis)| match *use_ {
                AxisUse::Replicated => true,
                // Factors are in the order of the dimensions.
                AxisUse::Factor { factor, .. } => {
                    experts >> factor & 1 == 1 && (axis.0 >= data_axes || self.roles.may_split_experts(axis))
                }
                AxisUse::Partial { .. } => false,
            })
        });
        let mut ids: Vec<LayoutId> =
            strategies.iter().map(|s| rule.shardings(s, mesh).result).map(|s| self.intern(s)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Splits a layout further over every axis that it does not use and that state is distributed over, each in the
    /// largest dimension that it divides. Optimizer state, gradients or parameters rest in this layout under ZeRO.
    pub fn storage_layout(&mut self, id: LayoutId) -> LayoutId {
        if let Some(&known) = self.storage.get(&id) {
            return known;
        }
        let mesh = self.mesh();
        let mut sharding = self.layout(id).reduced();
        let mut dims: Vec<usize> = (0..sharding.dims.len()).collect();
        dims.sort_by_key(|&d| std::cmp::Reverse(sharding.dims[d].size()));
        let distributes = |a: &AxisId| mesh.size(*a) > 1 && a.0 >= self.roles.group_axes;
        for axis in mesh.axis_ids().filter(distributes) {
            let finer = dims.iter().find_map(|&d| altiplano_ir::reshard::split_further(&sharding, d, axis, mesh));
            sharding = finer.unwrap_or(sharding);
        }
        let stored = self.intern(sharding);
        self.storage.insert(id, stored);
        stored
    }

    /// Adds those partial axes of `partial` to `dims` that do not split it.
    pub fn with_partial_of(&mut self, dims: LayoutId, partial: LayoutId) -> LayoutId {
        if let Some(&known) = self.partial.get(&(dims, partial)) {
            return known;
        }
        let mut sharding = self.layout(dims).reduced();
        let split: Vec<AxisId> = sharding.split_axes().collect();
        sharding.partial = self.layout(partial).partial.iter().copied().filter(|(a, _)| !split.contains(a)).collect();
        let new = self.intern(sharding);
        self.partial.insert((dims, partial), new);
        new
    }

    /// The elements of a tensor that one device holds.
    pub fn local_elements(&self, id: LayoutId) -> u64 {
        self.layouts[id as usize].local_elements
    }

    pub fn local_bytes(&self, dtype: DType, id: LayoutId) -> u64 {
        self.local_elements(id).saturating_mul(dtype.bytes())
    }
}

/// True if a collective splits a value over `axis`.
fn cuts(collective: &Collective, axis: AxisId) -> bool {
    let cuts = matches!(
        collective,
        Collective::LocalSlice { .. } | Collective::ReduceScatter { .. } | Collective::AllToAll { .. }
    );
    cuts && collective.axes().contains(&axis)
}

/// Marks the factors of a node that are the batch: the major factor of each dimension that scales with it.
pub fn batch_factors(graph: &Graph, v: ValueId, rule: &ShardingRule) -> Vec<bool> {
    let node = graph.node(v);
    let mut is_batch = vec![false; rule.factors.len()];
    let tensors = node.operands.iter().zip(&rule.operands).chain([(&v, &rule.result)]);
    for (&value, dims) in tensors {
        for (d, factors) in dims.iter().enumerate() {
            if graph.node(value).batch_dims >> d & 1 == 1
                && let Some(&f) = factors.iter().find(|&&f| rule.factors[f as usize].size > 1)
            {
                is_batch[f as usize] = true;
            }
        }
    }
    is_batch
}

/// Block counts of a node's factors, from those of its operands and result.
fn factor_blocks(graph: &Graph, v: ValueId, rule: &ShardingRule, counts: &[Vec<Vec<u64>>]) -> Vec<Vec<u64>> {
    let node = graph.node(v);
    let mut of_factor: Vec<Vec<u64>> = vec![Vec::new(); rule.factors.len()];
    let tensors = node.operands.iter().zip(&rule.operands).chain([(&v, &rule.result)]);
    for (value, dims) in tensors {
        for (d, factors) in dims.iter().enumerate() {
            if let [single] = factors.as_slice() {
                let list = &mut of_factor[*single as usize];
                let size = rule.factors[*single as usize].size;
                let new = counts[value.index()][d].iter().filter(|o| size % **o == 0);
                list.extend(new);
                list.sort_unstable();
                list.dedup();
            }
        }
    }
    of_factor
}

/// The layout with the batch dimension split over as many axes as divide it. Values other than the main one
/// rest in it where they cross layers.
pub fn batch_layout(ty: &TensorType, batch_dims: u32, mesh: &Mesh) -> Sharding {
    let mut sharding = Sharding::replicated(&ty.shape);
    if let Some(dim) = (0..ty.rank()).find(|d| batch_dims >> d & 1 == 1) {
        let mut axes = Vec::new();
        let mut left = ty.shape[dim];
        for axis in mesh.axis_ids().filter(|&a| mesh.size(a) > 1) {
            if left % mesh.size(axis) == 0 {
                left /= mesh.size(axis);
                axes.push(axis);
            }
        }
        sharding.dims[dim] = DimLayout::from_segments([Segment { size: ty.shape[dim], axes: axes.into() }], mesh);
    }
    sharding
}
