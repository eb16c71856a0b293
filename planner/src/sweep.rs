//! Plans of stacks that run a few uniform configurations: every one of them, judged.
//!
//! Megatron-LM and its kin split a model by degrees: so many replicas, tensor-parallel devices and pipeline stages, a size of
//! microbatch, with activations recomputed or not and the optimizer's state sharded or not. There are some hundreds of these on a
//! cluster, few enough to lower and judge all that may fit. What comes out is what such a stack can do at its best, and what a
//! search over more must not be slower than.

use crate::fixed::{Degrees, fixed};
use crate::request::{PlanFailure, Progress, Request};
use crate::target::one_group;
use crate::{at_microbatches, fits, global_batch, judged_again, peak_bytes};
use altiplano_cost_models::Costs;
use altiplano_ir::batch::LossKind;
use altiplano_ir::plan::{Plan, Schedule};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The degrees that a sweep goes through.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    /// Samples that one replica takes at a time.
    pub micro_batches: Vec<u64>,
    pub recompute: Vec<bool>,
    pub zero: Vec<u8>,
    /// Stages on the same devices.
    pub virtual_stages: Vec<u32>,
}

impl Default for Space {
    fn default() -> Self {
        Space {
            micro_batches: vec![1, 2, 3, 4, 6, 8, 12, 16],
            recompute: vec![false, true],
            zero: vec![0, 1],
            virtual_stages: vec![1, 2],
        }
    }
}

/// A configuration and its plan.
#[derive(Clone, Debug)]
pub struct Swept {
    pub degrees: Degrees,
    pub plan: Plan,
}

/// The plan of a configuration, judged. `request.graph` may be of any batch; it is brought to the microbatch that the degrees say.
pub fn configured(request: &Request, degrees: &Degrees, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    one_group(request, "--baseline", request.target.name())?;
    let graph = at_microbatches(request, degrees.num_microbatches).ok_or(PlanFailure::NoCombination)?;
    let at_size = Request { graph, ..request.clone() };
    let plan = fixed(&at_size, degrees, costs)?;
    judged_again(plan, costs)
}

/// All configurations on all devices that fit, fastest first. Degrees that the request fixes are kept; tensor parallelism stays
/// within a node.
///
/// # Errors
/// [`PlanFailure::Memory`] with the least that any of them needs, or [`PlanFailure::NoCombination`] where there is none.
pub fn sweep(
    request: &Request,
    space: &Space,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Vec<Swept>, PlanFailure> {
    // By stages and replicas: where the leanest does not fit, no other needs to be tried.
    let mut alike: BTreeMap<(u32, u32, u32), Vec<Degrees>> = BTreeMap::new();
    for degrees in configurations(request, space) {
        alike.entry((degrees.dp, degrees.tp, degrees.stages / degrees.virtual_stages)).or_default().push(degrees);
    }
    let (done, total) = (AtomicUsize::new(0), alike.len());
    let tried: Vec<(Vec<Swept>, Option<u64>)> = alike
        .into_par_iter()
        .map(|((dp, tp, pp), mut list)| {
            let i = done.fetch_add(1, Ordering::Relaxed);
            progress.step(&format!("dp{dp} tp{tp} pp{pp}"), i, total);
            list.sort_by_key(|d| {
                let lean = (std::cmp::Reverse(d.recompute), std::cmp::Reverse(d.zero), u32::MAX - d.num_microbatches);
                (d.virtual_stages, lean)
            });
            let mut fitting = Vec::new();
            let mut least: Option<u64> = None;
            for (k, degrees) in list.into_iter().enumerate() {
                if progress.stopped() {
                    break;
                }
                let Ok(plan) = configured(request, &degrees, costs) else { continue };
                if fits(&plan) {
                    fitting.push(Swept { degrees, plan });
                    continue;
                }
                least = Some(least.unwrap_or(u64::MAX).min(peak_bytes(&plan)));
                if k == 0 {
                    break;
                }
            }
            (fitting, least)
        })
        .collect();
    let least = tried.iter().filter_map(|t| t.1).min();
    let mut found: Vec<Swept> = tried.into_iter().flat_map(|t| t.0).collect();
    found.sort_by(|a, b| a.plan.predicted.step_time_s.total_cmp(&b.plan.predicted.step_time_s));
    if !found.is_empty() {
        return Ok(found);
    }
    let device = &request.cluster.groups[0].device;
    Err(least.map_or(PlanFailure::NoCombination, |required_bytes| PlanFailure::Memory {
        required_bytes,
        limit_bytes: device.memory_bytes,
        over_bytes: required_bytes.saturating_sub(device.memory_bytes),
        device: device.name.clone(),
        detail: format!("the leanest of {total} combinations of dp, tp and pp"),
    }))
}

/// The configurations that use every device.
fn configurations(request: &Request, space: &Space) -> Vec<Degrees> {
    let group = &request.cluster.groups[0];
    let devices = request.cluster.num_devices();
    let global = global_batch(request);
    let divisors = |n: u32| (1..=n).filter(move |d| n % d == 0);
    let whole = request.loss == LossKind::Other && !request.allow_microbatch_semantics && request.graph.batch != 0;
    let given = |degree: Option<u32>, value: u32| degree.is_none_or(|d| d == value);
    let shared = request.virtual_stages.map_or(space.virtual_stages.clone(), |v| vec![v.max(1)]);
    let mut all = Vec::new();
    for tp in divisors(group.devices_per_node).filter(|&tp| given(request.tp, tp)) {
        for stages in divisors(devices / tp).filter(|&pp| given(request.pp, pp)) {
            let dp = devices / tp / stages;
            if !given(request.dp, dp) {
                continue;
            }
            // A graph that keeps to the batch it was traced at goes through as often as is asked for.
            let sizes: &[u64] = if request.graph.batch == 0 { &[1] } else { &space.micro_batches };
            let one = [global / u64::from(dp).max(1)];
            let sizes: &[u64] = if whole { &one } else { sizes };
            for &size in sizes.iter().filter(|&&size| size > 0) {
                let together = if request.graph.batch == 0 { 1 } else { size * u64::from(dp) };
                if global % together != 0 || request.microbatch.is_some_and(|m| m != together) {
                    continue;
                }
                let Ok(num_microbatches) = u32::try_from(global / together) else { continue };
                // Where the loss is no mean over samples, more microbatches would train something else.
                if whole && num_microbatches != 1 {
                    continue;
                }
                if request.num_microbatches.is_some_and(|n| n != num_microbatches) {
                    continue;
                }
                for &recompute in space.recompute.iter().filter(|&&r| request.recompute.is_none_or(|given| given == r))
                {
                    let levels = space.zero.iter().filter(|&&z| request.zero.is_none_or(|given| given == z));
                    for &zero in levels.filter(|&&z| z == 0 || dp > 1) {
                        // Interleaving goes by groups of as many microbatches as there are lanes.
                        let turns = request.schedule.is_none_or(|s| s == Schedule::OneFOneB);
                        let fills = |v: u32| v == 1 || turns && stages > 1 && num_microbatches.is_multiple_of(stages);
                        for &virtual_stages in shared.iter().filter(|&&v| fills(v)) {
                            let stages = stages.saturating_mul(virtual_stages);
                            let of =
                                Degrees { dp, tp, cp: 1, stages, virtual_stages, num_microbatches, zero, recompute };
                            all.push(of);
                        }
                    }
                }
            }
        }
    }
    all
}
