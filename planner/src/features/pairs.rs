//! Passes side by side. Where the software runs a forward pass beside the backward pass of another microbatch, one computes
//! while the other waits for an exchange between experts. Software that does so gives both passes' ops to the device in turn:
//!
//! * Megatron-LM's `--overlap-moe-expert-parallel-comm`, with `1f1b` of several stages a lane or without a pipeline, and
//!   without full recomputation (megatron/core/transformer/transformer_config.py).
//! * torchtitan's `pipeline_parallel_expert_parallel_overlap`, with DualPipeV and without recomputation
//!   (torchtitan/distributed/dual_pipe_v.py).

use super::parallelism::parallelism;
use crate::predict::predict_plan;
use crate::request::PlanFailure;
use crate::search::choice::{UNDECIDED, fits};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::{Execution, Plan, Schedule, Target};
use altiplano_ir::recompute::Recompute;

/// The most recomputation with which software runs passes side by side under a schedule; `None` if it never does.
pub fn most_recomputed(schedule: Schedule) -> Option<Recompute> {
    match schedule {
        Schedule::OneFOneB => Some(Recompute::Selective),
        Schedule::DualPipeV => Some(Recompute::None),
        _ => None,
    }
}

/// The plan with its passes side by side, if its target can do that, the plan then fits, and it is faster by more than the
/// prediction error. Otherwise the plan.
///
/// # Errors
/// If the plan has no derivative.
pub fn with_pairs(plan: Plan, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    if !can_pair(&plan) {
        return Ok(plan);
    }
    let most_s = plan.predicted.step_time_s / (1.0 + UNDECIDED);
    let execution = Execution { pairs_passes: true, ..plan.execution };
    let paired = predict_plan(Plan { execution, ..plan.clone() }, costs)?;
    Ok(if fits(&paired) && paired.predicted.step_time_s < most_s { paired } else { plan })
}

fn can_pair(plan: &Plan) -> bool {
    let of_target = match plan.target {
        Target::Megatron => plan.schedule == Schedule::OneFOneB,
        Target::Torchtitan => plan.schedule == Schedule::DualPipeV,
        _ => false,
    };
    let Some(most) = most_recomputed(plan.schedule).filter(|_| of_target) else { return false };
    plan.schedule.can_pair(plan.virtual_stages, plan.num_lanes() as u32)
        && plan.stages.iter().all(|stage| stage.recompute.most() <= most)
        && parallelism(plan).iter().any(|stage| stage.expert > 1)
}
