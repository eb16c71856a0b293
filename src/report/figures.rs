//! The figures of a plan for programs that ask one question after another.

use super::{answer, one_line, side};
use altiplano_ir::plan::{Plan, Stage};
use altiplano_planner::features::parallelism::{Parallelism, parallelism};
use serde_json::{Value, json};

/// The figures of a plan as JSON: those of comparisons, with the degrees of each stage, the memory of each, and the
/// lower bound of any plan on these devices. Times are in seconds, memory in bytes.
pub fn figures(plan: &Plan) -> Value {
    let p = &plan.predicted;
    let stage = |(stage, of): (&Stage, &Parallelism)| {
        json!({
            "dp": of.data,
            "tp": of.tensor,
            "cp": of.context,
            "ep": of.expert,
            "zero": stage.zero,
            "recompute": stage.recompute.to_string(),
            "devices": stage.devices.len(),
            "peak_bytes": stage.predicted.peak_bytes,
            "limit_bytes": plan.usable_bytes(stage),
            "compute_s": stage.predicted.compute_s,
            "communication_s": stage.predicted.communication_s,
            "bubble_s": stage.predicted.bubble_s,
        })
    };
    let all = parallelism(plan);
    let mut figures = side(plan);
    figures["one_line"] = json!(one_line(plan));
    figures["answer"] = json!(answer::answer_of(plan, &all));
    figures["pp"] = json!(plan.num_lanes());
    figures["virtual_stages"] = json!(plan.virtual_stages);
    figures["schedule"] = json!(plan.schedule.to_string());
    figures["lower_bound_s"] = json!(p.lower_bound_s);
    figures["model_flop"] = json!(p.model_flop);
    figures["of_stages"] = json!(plan.stages.iter().zip(&all).map(stage).collect::<Vec<_>>());
    figures
}
