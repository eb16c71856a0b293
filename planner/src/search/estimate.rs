//! Estimates of uniform configurations, from the costs of their layers.
//!
//! To lower a configuration and follow its programs takes a hundred times as long as to add up its layers, whose tables
//! are common to configurations that differ only in recomputation and in the layers of stages. Seconds are 0.75 to 1.41 of
//! a prediction's, and nearer when configurations of the same devices are compared.

use super::fixed_degrees::{Degrees, Uniform};
use crate::assemble::in_spaces;
use crate::inter_op::compose::Chain;
use crate::inter_op::tables::boundaries;
use crate::intra_op::layer::{Boundary, MemoryPrice, Variant};
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::layers::graph::LayeredGraph;
use crate::lower::Fusion;
use crate::predict::timing::queue_s;
use crate::request::Request;
use altiplano_cost_models::Costs;
use altiplano_cost_models::pipeline::{Order, StageTimes, simulate_order};
use altiplano_ir::plan::Schedule;
use altiplano_ir::recompute::Recompute;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The step of a configuration by the costs of its layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub step_s: f64,
    /// Bytes that the fullest device surely holds: parameters, gradients, optimizer state and the larger part of the
    /// activations that wait for a backward pass.
    pub held_bytes: u64,
}

/// The part of the activations by the ops of a layer that its kernels keep at least. A small model in f32 keeps 0.84 of them.
const SURELY_KEPT: f64 = 0.8;

/// Estimates configurations with the same devices, microbatches and sequence parallelism. `request.graph` is at the size of
/// one microbatch. `None` for configurations that cannot be.
pub(super) fn estimates(
    request: &Request,
    layered: &LayeredGraph,
    alike: &[Degrees],
    memory: MemoryPrice,
    costs: &dyn Costs,
) -> Vec<Option<Estimate>> {
    let of_uniform = |uniform: Uniform| {
        let Uniform { block, config } = &uniform;
        in_spaces(request, costs, config, *block, Fusion::of(&request.execution), |spaces| {
            let mut chains: BTreeMap<u8, Option<Chains<'_>>> = BTreeMap::new();
            let estimated = alike.iter().map(|degrees| {
                let variant = Variant { zero: degrees.zero, ..config.variant };
                let of_level = chains.entry(degrees.zero).or_insert_with(|| {
                    let tables = boundaries(layered, request, spaces, variant)?;
                    Some(Chains { layered, tables, known: FxHashMap::default() })
                });
                estimate(request, degrees, of_level.as_mut()?, costs)
            });
            estimated.collect()
        })
    };
    let uniform = alike.first().and_then(|degrees| Uniform::of(request, degrees, memory).ok());
    uniform.map(of_uniform).unwrap_or_else(|| vec![None; alike.len()])
}

/// The cheapest paths through runs of layers, by the kinds of these.
struct Chains<'a> {
    layered: &'a LayeredGraph,
    tables: Vec<Rc<Boundary>>,
    known: FxHashMap<&'a [usize], Rc<Chain>>,
}

impl<'a> Chains<'a> {
    fn of(&mut self, kinds: &'a [usize]) -> Rc<Chain> {
        let new = || Chain::through(&kinds.iter().map(|&kind| self.tables[kind].clone()).collect::<Vec<_>>());
        self.known.entry(kinds).or_insert_with(new).clone()
    }
}

fn estimate(request: &Request, degrees: &Degrees, chains: &mut Chains<'_>, costs: &dyn Costs) -> Option<Estimate> {
    let cost = costs.of_group(0);
    let (in_order, queue_s) = (cost.runtime().is_some(), queue_s(cost));
    let schedule = request.schedule.unwrap_or(Schedule::OneFOneB);
    let fraction = RecomputeFraction::uniform(degrees.recompute);
    // Software differs in what selective recomputation frees, which is never more than full recomputation does.
    let frees =
        if degrees.recompute == Recompute::None { fraction } else { RecomputeFraction::uniform(Recompute::Full) };
    let away = request.offload.is_some_and(|offload| offload.activations);
    let layered = chains.layered;
    let runs = degrees.layout.stages(layered, degrees.stages)?;
    let (mut times, mut static_bytes, mut kept_bytes) = (Vec::new(), Vec::new(), Vec::new());
    for run in runs {
        let chain = chains.of(&layered.kinds[run.clone()]);
        let (_, terms, _) = chain.best()?;
        let (forward_s, backward_s) = terms.passes_s(fraction, run.len(), in_order, queue_s);
        let splits = matches!(schedule, Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV);
        let weights_s = if splits { forward_s.min(backward_s) } else { 0.0 };
        let backward_s = backward_s - weights_s;
        times.push(StageTimes { forward_s, backward_s, weights_s, step_s: terms.step_s, ..StageTimes::default() });
        static_bytes.push(terms.static_bytes as u64);
        kept_bytes.push(if away { 0 } else { (SURELY_KEPT * terms.in_flight_bytes(frees, run.len())) as u64 });
    }
    let order = Order::new(schedule, times.len(), degrees.num_microbatches).sharing(degrees.virtual_stages as usize);
    let of_lane = |lane: usize| {
        let stages = || order.stages_of(lane);
        let each: Vec<u64> = stages().map(|stage| kept_bytes[stage]).collect();
        stages().map(|stage| static_bytes[stage]).fold(order.held_bytes(lane, &each), u64::saturating_add)
    };
    let held_bytes = (0..order.num_lanes()).map(of_lane).max()?;
    let step_s = simulate_order(&times, &order, &mut |_, _, _, _| {}).step_s;
    Some(Estimate { step_s, held_bytes })
}
