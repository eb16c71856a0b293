//! Plans with given degrees: every stage on equally many devices, layers dealt out by a rule, and one mesh. Only
//! the shardings of each layer are solved. Frameworks are configured this way, and measured tables state such
//! configurations.

use crate::assemble::{Parts, assemble};
use crate::inter_op::search::{ChosenStage, StageConfig};
use crate::inter_op::submesh::{Block, SubmeshShape};
use crate::intra_op::layer::{MemoryPrice, Variant};
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::intra_op::space::AxisRoles;
use crate::layers::cluster_finely;
use crate::layers::graph::LayeredGraph;
use crate::request::{PlanFailure, Request};
use crate::search::choice::{fits, peak_bytes};
use crate::search::layout::Layout;
use altiplano_cost_models::Costs;
use altiplano_cost_models::pipeline::Order;
use altiplano_ir::cluster::Cluster;
use altiplano_ir::mesh::{AxisId, CONTEXT_AXIS, Mesh};
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::recompute::Recompute;
use std::ops::Range;

/// The degrees of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Degrees {
    pub dp: u32,
    pub tp: u32,
    /// Devices over which the tokens of a sample are split.
    pub cp: u32,
    /// Pipeline stages, where stages that share devices count one by one.
    pub stages: u32,
    /// Number of stages that share devices.
    pub virtual_stages: u32,
    pub num_microbatches: u32,
    pub zero: u8,
    pub recompute: Recompute,
    /// How layers are dealt out to stages.
    pub layout: Layout,
    /// Replicas that may divide the experts among themselves; a divisor of those of a group. 1 if each has all experts.
    pub experts: u32,
    /// Groups of replicas, each of which holds all that is sharded (hybrid sharding); a divisor of `dp`.
    pub groups: u32,
    /// Devices of tensor parallelism split tokens between products.
    pub sequence: bool,
}

/// Names of mesh axes that hold replicas, outermost first.
const DATA_AXES: [&str; 3] = ["data", "data2", "data3"];

impl Degrees {
    /// Sizes of the mesh axes that hold replicas, outermost first: groups that hold all state, the replicas of such a
    /// group, and of these the ones that divide the experts. `None` if one does not divide the other.
    fn data_axes(&self) -> Option<Vec<u32>> {
        let [groups, experts] = [self.groups.max(1), self.experts.max(1)];
        let inside = self.dp.is_multiple_of(groups).then(|| self.dp / groups)?;
        let between = inside.is_multiple_of(experts).then(|| inside / experts)?;
        let mut sizes: Vec<u32> = [groups, between, experts].into_iter().filter(|&size| size > 1).collect();
        if sizes.is_empty() {
            sizes.push(1);
        }
        Some(sizes)
    }

    /// Numbers of replicas that may divide the experts among themselves so that these are in `ep` parts. The other
    /// devices of a stage may divide them further.
    pub(crate) fn replicas_of_experts(&self, ep: u32) -> Vec<u32> {
        let inside = self.dp / self.groups.max(1);
        let further = [1, self.tp, self.cp, self.tp.saturating_mul(self.cp)];
        let divides = |parts: u32| (parts > 0 && ep.is_multiple_of(parts)).then(|| ep / parts);
        let mut found: Vec<u32> =
            further.into_iter().filter_map(divides).filter(|&n| inside.is_multiple_of(n)).collect();
        found.sort_unstable_by_key(|&n| std::cmp::Reverse(n));
        found.dedup();
        found
    }

    /// Groups of replicas if each has its devices of a stage on one node; 1 if all replicas do.
    pub(super) fn groups_of_nodes(&self, cluster: &Cluster) -> u32 {
        let replica = self.tp.saturating_mul(self.cp).max(1);
        let on_node = cluster.groups[0].devices_per_node / replica;
        let inside = (1..=on_node.max(1)).rev().find(|n| self.dp.is_multiple_of(*n)).unwrap_or(1);
        self.dp / inside
    }

    /// The best plan of those in which different numbers of replicas divide the experts, so that they are in `ep` parts.
    pub(super) fn best_for_experts(
        &self,
        ep: Option<u32>,
        predicted: impl Fn(&Degrees) -> Result<Plan, PlanFailure>,
    ) -> Result<Plan, PlanFailure> {
        let Some(ep) = ep.filter(|&ep| ep > 1) else { return predicted(self) };
        let tried = self.replicas_of_experts(ep).into_iter().map(|experts| predicted(&Degrees { experts, ..*self }));
        let better = |a: &Plan, b: &Plan| {
            let rank =
                |plan: &Plan| if fits(plan) { (0, plan.predicted.step_time_s) } else { (1, peak_bytes(plan) as f64) };
            rank(a) <= rank(b)
        };
        let either = |a, b| match (a, b) {
            (Ok(a), Ok(b)) => Ok(if better(&a, &b) { a } else { b }),
            (Ok(plan), Err(_)) | (Err(_), Ok(plan)) => Ok(plan),
            (Err(a), Err(_)) => Err(a),
        };
        tried.reduce(either).unwrap_or(Err(PlanFailure::NoCombination))
    }
}

/// The devices and the configuration that all stages have.
pub(super) struct Uniform {
    pub block: Block,
    pub config: StageConfig,
}

impl Uniform {
    pub fn of(request: &Request, degrees: &Degrees, memory: MemoryPrice) -> Result<Uniform, PlanFailure> {
        let group = &request.cluster.groups[0];
        let devices = degrees.dp * degrees.tp * degrees.cp;
        // Stages on several nodes use all devices of each.
        if devices > group.devices_per_node && devices % group.devices_per_node != 0 {
            return Err(PlanFailure::NoCombination);
        }
        let of_data = degrees.data_axes().ok_or(PlanFailure::NoCombination)?;
        let data_axes = of_data.len() as u8;
        let mut axes: Vec<(&str, u32)> = DATA_AXES.into_iter().zip(of_data).collect();
        if degrees.cp > 1 {
            axes.push((CONTEXT_AXIS, degrees.cp));
        }
        axes.push(("tensor", degrees.tp));
        let shape = match devices <= group.devices_per_node {
            true => SubmeshShape { nodes: 1, devices },
            false => SubmeshShape { nodes: devices / group.devices_per_node, devices: group.devices_per_node },
        };
        let block = Block { group: 0, shape };
        let config = StageConfig {
            mesh: Mesh::new(&axes),
            roles: AxisRoles {
                data_axes,
                experts: (degrees.experts > 1).then_some(AxisId(data_axes - 1)),
                model_axis: (degrees.cp <= 1).then_some(AxisId(data_axes)),
                context_axis: (degrees.cp > 1).then_some(AxisId(data_axes)),
                group_axes: u8::from(degrees.groups > 1),
                features_axis: (degrees.tp > 1).then_some(AxisId(axes.len() as u8 - 1)),
                tokens_between: degrees.sequence,
            },
            variant: Variant {
                zero: degrees.zero,
                memory,
                num_microbatches: degrees.num_microbatches,
                execution: request.execution,
            },
            fraction: RecomputeFraction::uniform(degrees.recompute),
        };
        Ok(Uniform { block, config })
    }
}

/// Assembles the plan with these degrees, without predictions. `request.graph` is at the size of one microbatch.
///
/// The cluster's first group must have room for every stage; stages that share devices count once.
pub fn fixed(request: &Request, degrees: &Degrees, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    fixed_of(request, &finely_layered(request), degrees, MemoryPrice::None, costs)
}

/// The model of a request, cut at every useful place.
pub fn finely_layered(request: &Request) -> LayeredGraph {
    let starts = cluster_finely(&request.graph, usize::MAX);
    LayeredGraph::new(request.graph.clone(), starts, &request.stop_gradients, request.trains())
}

/// Like [`fixed`], for a model whose layers are known, and with a price of memory.
pub fn fixed_of(
    request: &Request,
    layered: &LayeredGraph,
    degrees: &Degrees,
    memory: MemoryPrice,
    costs: &dyn Costs,
) -> Result<Plan, PlanFailure> {
    let runs = degrees
        .layout
        .stages(layered, degrees.stages)
        .ok_or(PlanFailure::TooFewLayers { layers: layered.kinds.len() as u32, stages: degrees.stages })?;
    let alike = RecomputeFraction::uniform(degrees.recompute);
    let stages: Vec<_> = runs.into_iter().map(|layers| (layers, alike)).collect();
    of_stages(request, layered, degrees, stages, memory, costs)
}

/// Like [`fixed_of`], with the layers of each stage and the part of them that is recomputed.
pub(crate) fn of_stages(
    request: &Request,
    layered: &LayeredGraph,
    degrees: &Degrees,
    stages: Vec<(Range<usize>, RecomputeFraction)>,
    memory: MemoryPrice,
    costs: &dyn Costs,
) -> Result<Plan, PlanFailure> {
    let Uniform { block, config } = Uniform::of(request, degrees, memory)?;
    let config = |fraction| StageConfig { fraction, ..config.clone() };
    let chosen = |(layers, fraction)| ChosenStage { layers, block, config: config(fraction) };
    let stages: Vec<ChosenStage> = stages.into_iter().map(chosen).collect();
    let schedule = request.schedule.unwrap_or(Schedule::OneFOneB);
    let parts = Parts {
        layered,
        num_microbatches: degrees.num_microbatches,
        schedule,
        virtual_stages: degrees.virtual_stages,
        placement: schedule.placement(),
        stages: &stages,
    };
    let mut plan = assemble(request, &parts, costs)?;
    let ends_in_head =
        layered.kinds.last().is_some_and(|head| layered.kinds.iter().filter(|&k| k == head).count() == 1);
    keep_what_is_needed_next(&mut plan, ends_in_head);
    Ok(plan)
}

/// Frameworks that recompute do so within blocks. The head and its loss come after the last block, and are kept if
/// their backward pass follows their forward pass. `ends_in_head`: the last layer is no block.
fn keep_what_is_needed_next(plan: &mut Plan, ends_in_head: bool) {
    let order = Order::of(plan);
    let several = plan.stages.len() > 1;
    if let Some(last) = plan.stages.last_mut()
        && plan.schedule.trains()
        && (last.layers.len() > 1 || several && ends_in_head)
        && order.in_flight(order.num_stages - 1) == 1
    {
        last.recompute = last.recompute.keeping_last(last.layers.len());
    }
}

/// Deals the layers of the most common kind out to stages. If the number is uneven, the first stages get one more.
/// Layers between two of them go with the earlier one, layers before the first with the first.
pub fn evenly(kinds: &[usize], stages: usize) -> Option<Vec<Range<usize>>> {
    dealt_evenly(kinds.len(), &repeated(kinds), stages)
}

/// Like [`evenly`], with the positions of the layers that count.
pub(crate) fn dealt_evenly(num_layers: usize, repeated: &[usize], stages: usize) -> Option<Vec<Range<usize>>> {
    if stages == 0 || repeated.len() < stages {
        return None;
    }
    let (each, more) = (repeated.len() / stages, repeated.len() % stages);
    let counts: Vec<usize> = (0..stages).map(|s| each + usize::from(s < more)).collect();
    dealt(num_layers, repeated, &counts)
}

/// The positions of the layers of the most common kind.
pub(crate) fn repeated(kinds: &[usize]) -> Vec<usize> {
    let count = |kind: usize| kinds.iter().filter(|k| **k == kind).count();
    let all = 0..=kinds.iter().copied().max().unwrap_or(0);
    let common = all.max_by_key(|&k| (count(k), std::cmp::Reverse(k))).unwrap_or(0);
    (0..kinds.len()).filter(|&l| kinds[l] == common).collect()
}

/// Cuts `num_layers` layers into stages, each with so many of the `repeated` ones. `None` if the counts do not cover
/// them, or if a stage gets no layer.
pub(crate) fn dealt(num_layers: usize, repeated: &[usize], counts: &[usize]) -> Option<Vec<Range<usize>>> {
    if counts.iter().sum::<usize>() != repeated.len() {
        return None;
    }
    let mut bounds = vec![0];
    let mut taken = 0;
    for count in &counts[..counts.len().checked_sub(1)?] {
        taken += count;
        // Nothing of the kind may be left for the last stages, which then have what follows it.
        bounds.push(repeated.get(taken).copied().or(repeated.last().map(|last| last + 1))?);
    }
    bounds.push(num_layers);
    let runs: Vec<_> = bounds.windows(2).map(|w| w[0]..w[1]).collect();
    runs.iter().all(|run| !run.is_empty()).then_some(runs)
}
