//! Overlaps that software can switch on, whatever the degrees.
//!
//! Passes side by side: a forward pass runs beside the backward pass of another microbatch, and one computes while the other
//! waits for an exchange between experts. Software that does so gives both passes' ops to the device in turn:
//!
//! * Megatron-LM's `--overlap-moe-expert-parallel-comm`, with `1f1b` of several stages a lane or without a pipeline, and
//!   without full recomputation (megatron/core/transformer/transformer_config.py).
//! * torchtitan's `pipeline_parallel_expert_parallel_overlap`, with DualPipeV and without recomputation
//!   (torchtitan/distributed/dual_pipe_v.py).
//!
//! Transfers beside products: devices that split features exchange activations in parts, each beside a part of a product
//! ([`Execution::overlaps_tensor_parallel`]). Software overlaps them with sequence parallelism only.

use super::parallelism::{parallelism, splits_tokens_between_products};
use crate::predict::predict_overlaps;
use crate::request::PlanFailure;
use crate::search::choice::{UNDECIDED, fits};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::{Execution, Plan, Schedule, Target};
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;

/// Plans that are tried with overlaps beside the one that is best without: those that are fast without, and others that would be
/// fast if all communication were hidden.
const RUNNERS_UP: usize = 7;
const HIDING: usize = 5;

/// The most recomputation with which software runs passes side by side under a schedule; `None` if it never does.
pub fn most_recomputed(schedule: Schedule) -> Option<Recompute> {
    match schedule {
        Schedule::OneFOneB => Some(Recompute::Selective),
        Schedule::DualPipeV => Some(Recompute::None),
        _ => None,
    }
}

/// The plan with the overlaps that its target can run, if it then fits and is faster by more than the prediction error.
/// Otherwise the plan.
///
/// # Errors
/// If the plan has no derivative.
pub fn with_overlaps(plan: Plan, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let most_s = plan.predicted.step_time_s / (1.0 + UNDECIDED);
    let tried = predict_overlaps(&plan, &overlapping(&plan), costs)?;
    let tried = tried.into_iter().filter(|tried| fits(tried) && tried.predicted.step_time_s < most_s);
    let fastest = tried.min_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    Ok(fastest.unwrap_or(plan))
}

/// Plans, the best one first, with the overlaps that their target can run; again the best one first. Others are tried only
/// where less communication could make them the best.
///
/// # Errors
/// If a plan has no derivative.
pub fn best_with_overlaps(mut plans: Vec<Plan>, costs: &dyn Costs) -> Result<Vec<Plan>, PlanFailure> {
    if plans.is_empty() {
        return Ok(plans);
    }
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    plans[0] = with_overlaps(plans[0].clone(), costs)?;
    let best_s = step_s(&plans[0]);
    // The step if all communication is hidden.
    let least_s = |plan: &Plan| {
        let exposed_s = plan.stages.iter().map(|stage| stage.predicted.communication_s).fold(0.0, f64::max);
        step_s(plan) - exposed_s
    };
    let may_win = |plan: &Plan| least_s(plan) < best_s && !overlapping(plan).is_empty();
    let mut tried: Vec<usize> = (1..plans.len()).filter(|&i| may_win(&plans[i])).collect();
    let mut hiding = tried.split_off(RUNNERS_UP.min(tried.len()));
    hiding.sort_by(|&a, &b| least_s(&plans[a]).total_cmp(&least_s(&plans[b])));
    tried.extend(hiding.into_iter().take(HIDING));
    let with = |&i: &usize| Ok((i, with_overlaps(plans[i].clone(), costs)?));
    for (i, plan) in tried.par_iter().map(with).collect::<Result<Vec<_>, PlanFailure>>()? {
        plans[i] = plan;
    }
    let fastest = tried.into_iter().min_by(|&a, &b| step_s(&plans[a]).total_cmp(&step_s(&plans[b])));
    if let Some(fastest) = fastest.filter(|&i| step_s(&plans[i]) < best_s) {
        plans[..=fastest].rotate_right(1);
    }
    Ok(plans)
}

/// How the target could run the plan otherwise, with one overlap more or both.
fn overlapping(plan: &Plan) -> Vec<Execution> {
    if !matches!(plan.target, Target::Megatron | Target::Torchtitan) {
        return Vec::new();
    }
    let stages = parallelism(plan);
    let can_pair = can_pair(plan) && stages.iter().any(|stage| stage.expert > 1);
    let splits_tokens = splits_tokens_between_products(&plan.graph, &plan.stages);
    let can_send_beside = splits_tokens && stages.iter().any(|stage| stage.tensor > 1);
    let choices = [(can_pair, false), (false, can_send_beside), (can_pair, can_send_beside)];
    let with = |(pairs, sends): (bool, bool)| Execution {
        pairs_passes: plan.execution.pairs_passes || pairs,
        overlaps_tensor_parallel: plan.execution.overlaps_tensor_parallel || sends,
        ..plan.execution
    };
    let mut executions: Vec<Execution> = Vec::new();
    for execution in choices.map(with) {
        if execution != plan.execution && !executions.contains(&execution) {
            executions.push(execution);
        }
    }
    executions
}

/// Returns true if the target runs passes side by side under the plan's schedule and recomputation.
fn can_pair(plan: &Plan) -> bool {
    let of_target = match plan.target {
        Target::Megatron => plan.schedule == Schedule::OneFOneB,
        Target::Torchtitan => plan.schedule == Schedule::DualPipeV,
        _ => false,
    };
    let Some(most) = most_recomputed(plan.schedule).filter(|_| of_target) else { return false };
    plan.schedule.can_pair(plan.virtual_stages, plan.num_lanes() as u32)
        && plan.stages.iter().all(|stage| stage.recompute.most() <= most)
}
