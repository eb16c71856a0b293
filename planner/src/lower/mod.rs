//! Lowers a plan to programs. Each lane (the devices that one or more stages share) gets one SPMD program with explicit
//! collectives.
//!
//! The forward graph is differentiated once. Each stage then gets four bodies: forward, backward, reduction of
//! gradients and update. Some have more: gradients of weights apart, a norm of all gradients, sums over microbatches. The forward body holds the stage's nodes under the plan's strategies. The backward body holds
//! their backward nodes, under strategies that follow from the forward ones.
//!
//! Forward values that the backward pass needs are saved or recomputed. Results of elementwise ops are cheaper to
//! recompute than to keep; full recomputation repeats everything inside a layer.

pub(crate) mod alike;
mod body;
mod choose;
mod composites;
mod dedup;
pub mod forward;
pub(crate) mod repeat;
mod schedule;
mod servers;
mod split;
mod stage;

use crate::cache::{Digest, Key};
use crate::timings::{Phase, part_of, timed};
use alike::Alike;
use altiplano_cost_models::kernels::{Kernel, KernelKind};
use altiplano_cost_models::pipeline::Order;
use altiplano_cost_models::timeline::Price;
use altiplano_cost_models::{AxisLink, CostModel, Costs, axis_link};
use altiplano_ir::autodiff::{AutodiffError, Differentiated, differentiate_for, undifferentiated};
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::Group;
use altiplano_ir::expand::{Expanded, expand};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Placement, Plan, Stage};
use altiplano_ir::program::{BufferId, Program, Programs, Transfer, TransferId};
use altiplano_ir::recompute::Modules;
use altiplano_ir::reshard::{Collective, Leg, Pattern, Step, legs, reshard};
use altiplano_ir::rule::{AxisUse, OpShardings, ShardingRule, Strategy};
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
pub use composites::{CompositeCost, CompositeCosts, Fusion, KnownComposites};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::OnceLock;

/// The parts of lowering that depend on the model alone: the graph without composites, and its derivative.
pub struct TrainingGraphs {
    expanded: Expanded,
    training: Differentiated,
    /// Values that depend on no leaf. The second list leaves out those that depend on the cotangent of the loss, which
    /// varies if the loss is scaled.
    constant: Vec<bool>,
    constant_if_scaled: Vec<bool>,
    users: Vec<Vec<ValueId>>,
    /// Forward values that the backward pass recomputes under every plan.
    recomputed: Vec<bool>,
    /// For each forward node, the backward nodes that belong to it, without sums.
    owned: Vec<Vec<ValueId>>,
    alike: Alike,
}

impl TrainingGraphs {
    pub fn of(plan: &Plan) -> Result<TrainingGraphs, AutodiffError> {
        TrainingGraphs::new(&plan.graph, &plan.stop_gradients, plan.schedule.trains(), plan.execution.fused_loss)
    }

    /// `trains`: true if there is a derivative at all. `fused_loss`: see `Execution`.
    pub fn new(
        graph: &Graph,
        stop_gradients: &[ValueId],
        trains: bool,
        fused_loss: bool,
    ) -> Result<TrainingGraphs, AutodiffError> {
        timed(Phase::Differentiation, || TrainingGraphs::made(graph, stop_gradients, trains, fused_loss))
    }

    fn made(
        graph: &Graph,
        stop_gradients: &[ValueId],
        trains: bool,
        fused_loss: bool,
    ) -> Result<TrainingGraphs, AutodiffError> {
        let expanded = expand(graph);
        let stops: Vec<ValueId> = stop_gradients.iter().map(|v| expanded.values[v.index()]).collect();
        let training = match trains {
            true => differentiate_for(&expanded.graph, &stops, fused_loss)?,
            false => undifferentiated(&expanded.graph),
        };
        let seed = training.seed();
        let leaf = |v: ValueId| training.graph.node(v).op.is_leaf();
        let constant = training.graph.depends_on(leaf).into_iter().map(|d| !d).collect();
        let of_seed = training.graph.depends_on(|v| leaf(v) || Some(v) == seed);
        let constant_if_scaled = of_seed.into_iter().map(|d| !d).collect();
        let mut owned = vec![Vec::new(); training.num_forward];
        for n in training.graph.values().skip(training.num_forward).filter(|n| !training.is_sum[n.index()]) {
            owned[training.owner[n.index()].index()].push(n);
        }
        let (users, recomputed) = (expanded.graph.users(), expanded.recomputed(graph));
        let alike = Alike::new(&training.graph);
        Ok(TrainingGraphs { constant, constant_if_scaled, users, recomputed, owned, alike, training, expanded })
    }

    /// Values that are the same in every step of a plan.
    fn constant(&self, plan: &Plan) -> &[bool] {
        if plan.loss_scale.is_some() { &self.constant_if_scaled } else { &self.constant }
    }
}

/// A plan's cut through a model: the stage and layer of each node.
struct Cut<'a> {
    plan: &'a Plan,
    training_graphs: &'a TrainingGraphs,
    /// `None` for leaves and constants.
    stage_of: Vec<Option<u32>>,
    layer_of: Vec<Option<u32>>,
    /// The nodes of each stage in order.
    nodes: Vec<Vec<ValueId>>,
    order: Order,
    /// True if equal layers are lowered once and repeated.
    repeats: bool,
    /// See [`crate::features::modules::modules`].
    modules: OnceLock<Vec<Modules>>,
}

impl<'a> Cut<'a> {
    fn new(plan: &'a Plan, training_graphs: &'a TrainingGraphs) -> Cut<'a> {
        let graph = &training_graphs.expanded.graph;
        let starts: Vec<u32> = plan.layers.iter().map(|&start| training_graphs.expanded.start(start)).collect();
        let mut stage_of_layer: Vec<Option<u32>> = vec![None; starts.len()];
        for (s, stage) in (0..).zip(&plan.stages) {
            stage.layers.clone().for_each(|l| stage_of_layer[l as usize] = Some(s));
        }
        let layer = |v: ValueId| {
            let after = starts.partition_point(|&first| first <= v.0);
            let is_inside = !training_graphs.constant[v.index()] && !graph.node(v).op.is_leaf() && after > 0;
            is_inside.then(|| (after - 1) as u32)
        };
        let layer_of: Vec<Option<u32>> = graph.values().map(layer).collect();
        let stage_of: Vec<Option<u32>> = layer_of.iter().map(|l| stage_of_layer[(*l)? as usize]).collect();
        let mut nodes = vec![Vec::new(); plan.stages.len()];
        for (v, stage) in graph.values().zip(&stage_of) {
            if let Some(stage) = stage {
                nodes[*stage as usize].push(v);
            }
        }
        Cut {
            plan,
            training_graphs,
            stage_of,
            layer_of,
            nodes,
            order: Order::of(plan),
            repeats: true,
            modules: OnceLock::new(),
        }
    }

    /// Returns true if other microbatches may run on a stage between the forward and the backward pass of one.
    fn apart(&self, stage: usize) -> bool {
        self.order.in_flight(stage) > 1 || self.plan.staleness() > 0
    }

    fn context(&'a self, index: usize, costs: &'a dyn Costs) -> StageContext<'a> {
        let Cut { plan, training_graphs, .. } = self;
        let stage = &plan.stages[index];
        let nodes = plan.layers[stage.layers.start as usize]..plan.layers[stage.layers.end as usize];
        let alike = &training_graphs.alike;
        let mut known: FxHashMap<u32, Vec<(Strategy, String)>> = FxHashMap::default();
        let mut written = |v: ValueId, strategy: &Strategy| {
            let of_kind = known.entry(alike.kind(v)).or_default();
            if let Some((_, layout)) = of_kind.iter().find(|(other, _)| other == strategy) {
                return layout.clone();
            }
            let rule = alike.rule(&training_graphs.training.graph, v);
            let layout = rule.shardings(strategy, &stage.mesh).result.display(&stage.mesh).to_string();
            of_kind.push((strategy.clone(), layout.clone()));
            layout
        };
        StageContext {
            plan,
            graph: &training_graphs.expanded.graph,
            stage: training_graphs.expanded.stage(stage, nodes, &mut written),
            index: index as u32,
            // Stages that share devices form one program, whose axes have one name each.
            mesh: plan.lanes()[plan.lane_of(index)].mesh.clone(),
            training: &training_graphs.training,
            constant: training_graphs.constant(plan),
            nodes: &self.nodes[index],
            stage_of: &self.stage_of,
            layer_of: &self.layer_of,
            users: &training_graphs.users,
            modules: &self.modules,
            recomputed: &training_graphs.recomputed,
            owned: &training_graphs.owned,
            alike,
            updates: Updates {
                here: plan.schedule.trains() && plan.servers.is_none(),
                peer: index as u32,
                peers: plan.stages.len() as u32,
            },
            apart: self.apart(index),
            prices: Prices::new(costs.of_group(stage.group), plan.group_of(stage), stage.submesh, &stage.mesh),
            choices: RefCell::default(),
            repeats: self.repeats,
            layouts: RefCell::default(),
            steps: RefCell::default(),
        }
    }
}

/// Everything that lowering one stage needs.
struct StageContext<'a> {
    plan: &'a Plan,
    /// The model without composites.
    graph: &'a Graph,
    /// The plan's stage, in terms of that graph.
    stage: Stage,
    index: u32,
    mesh: Mesh,
    training: &'a Differentiated,
    /// Values that depend on no leaf.
    constant: &'a [bool],
    /// The forward nodes of this stage.
    nodes: &'a [ValueId],
    /// Stage of each forward node; `None` for leaves and constants.
    stage_of: &'a [Option<u32>],
    /// Layer of each forward node.
    layer_of: &'a [Option<u32>],
    users: &'a [Vec<ValueId>],
    modules: &'a OnceLock<Vec<Modules>>,
    recomputed: &'a [bool],
    /// The backward nodes of each forward node.
    owned: &'a [Vec<ValueId>],
    alike: &'a Alike,
    updates: Updates,
    /// True if other microbatches may run between the forward and the backward pass of one.
    apart: bool,
    prices: Prices<'a>,
    choices: RefCell<FxHashMap<ChoiceKey, Chosen>>,
    /// True if equal layers are lowered once and repeated.
    repeats: bool,
    /// Layouts of a kind of nodes under the strategies that were asked for.
    layouts: RefCell<FxHashMap<u32, Vec<(Strategy, Rc<OpShardings>)>>>,
    /// The steps of reshards that were asked for, by layout before and after.
    steps: RefCell<FxHashMap<Sharding, FxHashMap<Sharding, Rc<[Step]>>>>,
}

/// Who updates the parameters of a stage, and the peers that exchange sums over all gradients.
#[derive(Clone, Copy)]
struct Updates {
    /// True if the stage's own devices update them.
    here: bool,
    /// Index of the updating peer among all `peers`.
    peer: u32,
    peers: u32,
}

/// Key of equal situations of a backward op: its kind, available layouts, and the wanted layout of its result.
type ChoiceKey = (u32, Vec<choose::Available>, Option<Sharding>);

/// A strategy and the layouts of operands and result under it.
type Chosen = (Rc<Strategy>, Rc<OpShardings>);

/// Prices of ops and reshards on one mesh of one submesh.
pub struct Prices<'a> {
    pub cost: &'a dyn CostModel,
    pub mesh: Mesh,
    links: Vec<AxisLink>,
    /// Host seconds to issue one collective.
    collective_issue_s: f64,
    /// Seconds of reshards by the bytes of the tensor. They depend on nothing else.
    reshards: RefCell<FxHashMap<(u64, [Pattern; 2]), f64>>,
    composites: Option<&'a CompositeCosts>,
    fusion: Fusion,
}

impl<'a> Prices<'a> {
    pub fn new(cost: &'a dyn CostModel, group: &Group, submesh: (u32, u32), mesh: &Mesh) -> Self {
        // One link for each set of axes, indexed by bit mask.
        let links = (0..1u32 << mesh.axes.len())
            .map(|mask| {
                let axes: Vec<AxisId> = mesh.axis_ids().filter(|a| mask >> a.0 & 1 == 1).collect();
                axis_link(group, submesh.0, submesh.1, mesh, &axes)
            })
            .collect();
        let collective_issue_s = cost.kernel(&Kernel::moving(KernelKind::Collective, 0)).issue_s;
        Prices {
            cost,
            mesh: mesh.clone(),
            links,
            collective_issue_s,
            reshards: RefCell::default(),
            composites: None,
            fusion: Fusion::default(),
        }
    }

    /// The prices of composites by software that has these kernels.
    pub fn fused(self, fusion: Fusion) -> Self {
        Prices { fusion, ..self }
    }

    /// Uses known costs of composites, and adds new ones.
    pub fn knowing(self, composites: &'a CompositeCosts) -> Self {
        Prices { composites: Some(composites), ..self }
    }

    /// Key of everything that the prices depend on; `None` if the cost model has no identity.
    pub fn identity(&self) -> Option<Key> {
        let Prices { cost, mesh, links, fusion, .. } = self;
        Digest::new("prices").shown((cost.identity()?, mesh, links, fusion)).key()
    }

    pub fn link(&self, axes: &[AxisId]) -> &AxisLink {
        &self.links[axes.iter().fold(0usize, |m, a| m | 1 << a.0)]
    }

    pub fn collective_s(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64) -> f64 {
        self.cost.collective_s(collective, operand_bytes, result_bytes, self.link(collective.axes()))
    }

    /// Seconds that the next op waits for a collective, which starts when the last device arrives.
    pub fn waited_s(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64) -> f64 {
        let seconds = self.collective_s(collective, operand_bytes, result_bytes);
        match collective.communicates() {
            true => seconds + self.cost.waiting_s(self.link(collective.axes()).devices),
            false => seconds,
        }
    }

    /// Seconds of the collectives of a reshard of `all_bytes` once a step, together with others. A collective that does
    /// not fill `bucket_bytes` alone takes its share of one that does.
    pub fn once_s(&self, all_bytes: u64, legs: &[Leg], bucket_bytes: u64) -> f64 {
        let bucket_bytes = if self.cost.runtime().is_some() { 0 } else { bucket_bytes };
        let mut seconds = 0.0;
        for leg in legs {
            let [operand_parts, result_parts] = leg.parts(&self.mesh);
            let (bytes, result) = (all_bytes / operand_parts, all_bytes / result_parts);
            let parts = (bucket_bytes as f64 / bytes.max(result).max(1) as f64).max(1.0);
            let all = |bytes: u64| (bytes as f64 * parts) as u64;
            seconds += self.waited_s(&leg.collective, all(bytes), all(result)) / parts;
        }
        seconds
    }

    /// Seconds to reshard a value of global type `ty`.
    pub fn reshard_s(&self, ty: &TensorType, from: &Sharding, to: &Sharding) -> f64 {
        if from == to {
            return 0.0;
        }
        let patterns = [Pattern::of(from, &self.mesh), Pattern::of(to, &self.mesh)];
        let key = (ty.bytes(), patterns);
        if let Some(&seconds) = self.reshards.borrow().get(&key) {
            return seconds;
        }
        let seconds = self.legs_price(ty.bytes(), &legs(patterns, from, to, &self.mesh)).seconds;
        self.reshards.borrow_mut().insert(key, seconds);
        seconds
    }

    /// Seconds of the collectives of a reshard of `bytes`, and of the host to issue them.
    pub fn legs_price(&self, bytes: u64, legs: &[Leg]) -> Price {
        let mut price = Price::default();
        for leg in legs {
            let [operand_parts, result_parts] = leg.parts(&self.mesh);
            price.seconds += self.waited_s(&leg.collective, bytes / operand_parts, bytes / result_parts);
            price.issue_s += if leg.collective.communicates() { self.collective_issue_s } else { 0.0 };
        }
        price
    }

    /// Seconds of an op under a strategy with these shardings, including data fetched from neighbours.
    pub fn op_s(
        &self,
        op: &Op,
        operands: &[&TensorType],
        result: &TensorType,
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> f64 {
        if let Op::Composite(_) = op {
            return self.inside(op, operands, rule, strategy, shardings).forward_s;
        }
        let follows = |f: &u8| rule.windows.iter().any(|w| w.followers.contains(f));
        let rolls = |f: u8| matches!(op, Op::Roll(roll) if rule.operands[0][roll.dim].contains(&f));
        let fetches =
            strategy.0.iter().any(|u| matches!(u, AxisUse::Factor { factor, .. } if follows(factor) || rolls(*factor)));
        let compute_s = self.compute_s(op, operands, result, shardings);
        if !fetches {
            return compute_s;
        }
        let graph = self.local_graph(op, operands, rule, strategy, shardings);
        compute_s + graph.values().map(|v| self.exchange_s(&graph, v)).sum::<f64>()
    }

    /// Seconds of a node of a local graph if it is a collective; otherwise 0.
    fn exchange_s(&self, graph: &Graph, v: ValueId) -> f64 {
        match &graph.node(v).op {
            Op::Collective(c) => {
                let operand = graph.ty(graph.node(v).operands[0]).bytes();
                self.waited_s(&c.collective, operand, graph.ty(v).bytes())
            }
            _ => 0.0,
        }
    }

    /// Seconds of an op whose operands and result have the given shardings.
    pub fn compute_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType, s: &OpShardings) -> f64 {
        let locals: Vec<TensorType> =
            operands.iter().zip(&s.operands).map(|(ty, s)| s.local_type(ty, &self.mesh)).collect();
        self.cost.compute_s(op, &locals.iter().collect::<Vec<_>>(), &s.result.local_type(result, &self.mesh))
    }
}

/// Returns true if an op's result is worth keeping for the backward pass. Elementwise ops are repeated instead.
pub fn is_kept(op: &Op) -> bool {
    op.is_contraction() || matches!(op, Op::Gather(_) | Op::Reduce(_) | Op::ReduceWindow(_))
}

impl StageContext<'_> {
    pub fn is_constant(&self, value: ValueId) -> bool {
        self.constant[value.index()]
    }

    pub fn reshard_s(&self, ty: &TensorType, from: &Sharding, to: &Sharding) -> f64 {
        self.prices.reshard_s(ty, from, to)
    }

    /// See [`reshard`].
    pub fn reshard_steps(&self, from: &Sharding, to: &Sharding) -> Rc<[Step]> {
        let mut steps = self.steps.borrow_mut();
        if let Some(known) = steps.get(from).and_then(|of_from| of_from.get(to)) {
            return known.clone();
        }
        let new: Rc<[Step]> = reshard(from, to, &self.mesh).into();
        steps.entry(from.clone()).or_default().insert(to.clone(), new.clone());
        new
    }

    pub fn op_s(&self, value: ValueId, rule: &ShardingRule, strategy: &Strategy, shardings: &OpShardings) -> f64 {
        let graph = &self.training.graph;
        let (op, operands) = (&graph.node(value).op, graph.operand_types(value));
        self.prices.op_s(op, &operands, graph.ty(value), rule, strategy, shardings)
    }

    /// The strategy of a forward node of this stage.
    pub fn strategy(&self, value: ValueId) -> &Strategy {
        &self.stage.shardings[&value].strategy
    }

    /// The layout of a forward value at rest on this stage, with nothing left to reduce. Its cotangent is brought to
    /// this layout, and so is a value that leaves or enters the stage.
    pub fn resting(&self, value: ValueId) -> Sharding {
        match self.stage.receives.get(&value) {
            Some(sharding) => sharding.clone(),
            None => self.shardings(value).result.reduced(),
        }
    }

    /// The sharding rule of a node of the training graph.
    pub fn rule(&self, value: ValueId) -> &ShardingRule {
        self.alike.rule(&self.training.graph, value)
    }

    /// The layouts of a forward node of this stage under its strategy.
    pub fn shardings(&self, value: ValueId) -> Rc<OpShardings> {
        self.shardings_under(value, self.strategy(value))
    }

    fn shardings_under(&self, value: ValueId, strategy: &Strategy) -> Rc<OpShardings> {
        let mut layouts = self.layouts.borrow_mut();
        let of_kind = layouts.entry(self.alike.kind(value)).or_default();
        if let Some((_, known)) = of_kind.iter().find(|(other, _)| other == strategy) {
            return known.clone();
        }
        let new = Rc::new(self.rule(value).shardings(strategy, &self.mesh));
        of_kind.push((strategy.clone(), new.clone()));
        new
    }

    /// Like [`choose::choose`], but only once for equal situations, and with the layouts of the strategy.
    fn choose(&self, value: ValueId, operands: Vec<choose::Available>, wanted: Option<Sharding>) -> Chosen {
        let key = (self.alike.kind(value), operands, wanted);
        if let Some(chosen) = self.choices.borrow().get(&key) {
            return chosen.clone();
        }
        let strategy = choose::choose(self, value, &key.1, key.2.as_ref());
        let shardings = self.shardings_under(value, &strategy);
        let chosen = (Rc::new(strategy), shardings);
        self.choices.borrow_mut().insert(key, chosen.clone());
        chosen
    }
}

/// Lowers a verified plan.
pub fn lower(plan: &Plan, costs: &dyn Costs) -> Result<Programs, AutodiffError> {
    let training_graphs = TrainingGraphs::of(plan)?;
    Ok(lowered(plan, &training_graphs, costs))
}

/// Like [`lower()`], for a model whose derivative is known.
pub fn lowered(plan: &Plan, training_graphs: &TrainingGraphs, costs: &dyn Costs) -> Programs {
    let cut = Cut::new(plan, training_graphs);
    match &plan.servers {
        Some(over) => servers::programs(&cut, over, costs, false),
        None => lower_distinct(&cut, costs, &(0..plan.num_lanes()).map(|_| None).collect::<Vec<_>>()),
    }
}

/// Like [`lowered`], with all layers lowered node by node, for tests of what equal layers share.
pub fn lowered_node_by_node(plan: &Plan, training_graphs: &TrainingGraphs, costs: &dyn Costs) -> Programs {
    let cut = Cut { repeats: false, ..Cut::new(plan, training_graphs) };
    lower_distinct(&cut, costs, &(0..plan.num_lanes()).map(|_| None).collect::<Vec<_>>())
}

/// The numbers of layers whose forward pass, and whose backward pass, repeats that of an equal layer of its stage.
pub fn repeated_layers(plan: &Plan, training_graphs: &TrainingGraphs, costs: &dyn Costs) -> [usize; 2] {
    let cut = Cut::new(plan, training_graphs);
    let of_stages = (0..plan.stages.len()).map(|i| stage::lower_stage(&cut.context(i, costs)).repeated);
    of_stages.fold([0; 2], |[f, b], [forward, backward]| [f + forward, b + backward])
}

/// Deduplicated programs. A lane that equals an earlier one has only its schedule, which refers to the earlier one's
/// bodies and buffers.
pub struct DedupedPrograms<'a> {
    pub programs: Cow<'a, Programs>,
    /// For each lane, the first lane that equals it.
    pub same_as: Vec<usize>,
    placement: Placement,
    num_lanes: usize,
}

impl<'a> DedupedPrograms<'a> {
    /// Programs with every lane written out.
    pub fn whole(programs: &'a Programs) -> Self {
        let num_lanes = programs.programs.len();
        let same_as = (0..num_lanes).collect();
        DedupedPrograms { same_as, programs: Cow::Borrowed(programs), placement: Placement::Loop, num_lanes }
    }

    /// The program with a lane's bodies and buffers.
    pub fn program_of(&self, lane: usize) -> &Program {
        &self.programs.programs[self.same_as[lane]]
    }

    /// The source and target stage of a transfer.
    pub fn stages_of(&self, transfer: TransferId) -> (u32, u32) {
        let Transfer { source, target } = &self.programs.transfers[transfer.0 as usize];
        let stage = |(lane, buffer): (u32, BufferId)| {
            let lane = lane as usize;
            self.stage_on(lane, self.program_of(lane).buffer(buffer).stage)
        };
        (stage(*source), stage(*target))
    }

    /// The stage of a lane that a stage of its program stands for.
    pub fn stage_on(&self, lane: usize, written: u32) -> u32 {
        self.placement.moved(written as usize, self.same_as[lane], lane, self.num_lanes) as u32
    }
}

/// Lowers a plan. If `dedup`, equal lanes are lowered once.
pub fn lower_deduped(plan: &Plan, graphs: &TrainingGraphs, costs: &dyn Costs, dedup: bool) -> DedupedPrograms<'static> {
    let cut = Cut::new(plan, graphs);
    if let Some(over) = &plan.servers {
        let programs = servers::programs(&cut, over, costs, dedup);
        let workers = over.workers.len();
        let same_as = (0..programs.programs.len()).map(|p| if dedup && p < workers { 0 } else { p }).collect();
        return DedupedPrograms { programs: Cow::Owned(programs), same_as, placement: Placement::Loop, num_lanes: 1 };
    }
    let same = match dedup {
        true => dedup::same_lanes(&cut),
        false => (0..plan.num_lanes()).map(|_| None).collect(),
    };
    let programs = Cow::Owned(lower_distinct(&cut, costs, &same));
    let first = |(lane, same): (usize, Option<dedup::SameLane>)| same.map_or(lane, |a| a.lane);
    let same_as = same.into_iter().enumerate().map(first).collect();
    DedupedPrograms { programs, same_as, placement: plan.placement, num_lanes: plan.num_lanes() }
}

/// Lowers each lane that does not equal an earlier one.
fn lower_distinct(cut: &Cut<'_>, costs: &dyn Costs, same: &[Option<dedup::SameLane>]) -> Programs {
    let plan = cut.plan;
    let stages: Vec<usize> = (0..plan.stages.len()).filter(|&s| same[plan.lane_of(s)].is_none()).collect();
    let lower = |&i: &usize| (i, part_of(Phase::Lowering, || stage::lower_stage(&cut.context(i, costs))));
    let lowered = stages.par_iter().map(lower);
    let mut lowered: BTreeMap<usize, stage::Lowered> = lowered.collect();
    let mut lanes: Vec<Vec<stage::Lowered>> = Vec::new();
    for lane in 0..plan.num_lanes() {
        let mut of_lane: Vec<stage::Lowered> = plan.stages_of(lane).filter_map(|s| lowered.remove(&s)).collect();
        let mut first = 0;
        for stage in &mut of_lane {
            stage.number_from(first);
            first += stage.buffers.len() as u32;
        }
        lanes.push(of_lane);
    }
    let boundary = |stage: usize| {
        let (lane, at) = (plan.lane_of(stage), stage / plan.num_lanes());
        match &same[lane] {
            None => lanes[lane][at].boundary.clone(),
            Some(same) => {
                let first = plan.placement.moved(stage, lane, same.lane, plan.num_lanes());
                lanes[same.lane][at].boundary.moved(|v| same.values[&v], stage as i32 - first as i32)
            }
        }
    };
    let boundaries: Vec<stage::Boundary> = (0..plan.stages.len()).map(boundary).collect();
    let mut transfers: Vec<Transfer> = Vec::new();
    let links = stage::connect(cut, &boundaries, &mut transfers);
    let program = |lane: usize| {
        let of_stages: Vec<stage::Boundary> = plan.stages_of(lane).map(|s| boundaries[s].clone()).collect();
        let distinct = same[lane].as_ref().map_or(lane, |a| a.lane);
        schedule::program(cut, lane, &lanes[distinct], &of_stages, &links)
    };
    let mut programs: Vec<Program> = (0..plan.num_lanes()).map(program).collect();
    for (program, stages) in programs.iter_mut().zip(lanes) {
        for stage in stages {
            program.buffers.extend(stage.buffers);
            program.bodies.extend([stage.forward, stage.backward, stage.reduce, stage.update]);
            program.bodies.extend(stage.weights);
            program.bodies.extend(stage.norm);
            program.bodies.extend(stage.totals);
        }
    }
    Programs {
        programs,
        transfers,
        num_microbatches: plan.num_microbatches,
        microbatch: plan.graph.batch,
        loss_is_mean: plan.loss != LossKind::Sum,
    }
}

/// Groups equal layouts.
fn by_layout<T>(items: impl IntoIterator<Item = (Sharding, T)>) -> BTreeMap<Sharding, Vec<T>> {
    let mut groups: BTreeMap<Sharding, Vec<T>> = BTreeMap::new();
    for (sharding, item) in items {
        groups.entry(sharding).or_default().push(item);
    }
    groups
}
