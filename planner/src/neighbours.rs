//! The neighbours of a plan: one of its stages has a layer more or less, another mesh, or another level of
//! recomputation. The changed stage is solved as in the search, and the whole is predicted like any plan.

use crate::again::Again;
use crate::assemble::{Parts, assemble};
use crate::inter_op::search::{ChosenStage, Way};
use crate::inter_op::submesh::{Block, SubmeshShape};
use crate::intra_op::layer::Variant;
use crate::intra_op::space::AxisRoles;
use crate::model::Layered;
use crate::request::{PlanFailure, Request};
use crate::{fits, freedom, peak_bytes, predicted, refine, target};
use altiplano_cost_models::{Costs, Rooflines};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::plan::{Plan, Stage};
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;

/// A plan that differs in one respect.
#[derive(Debug)]
pub struct Neighbour {
    /// `one layer more, from stage1`.
    pub change: String,
    pub plan: Result<Plan, PlanFailure>,
}

/// The neighbours of a plan at one of its stages.
///
/// # Errors
/// Like [`crate::plan`]. A failure of one neighbour alone is stored in that neighbour.
pub fn neighbours(plan: &Plan, stage: usize) -> Result<Vec<Neighbour>, PlanFailure> {
    // Use the sizes that the plan has.
    let (graph, stop_gradients) = (plan.graph.clone(), plan.stop_gradients.clone());
    let request = &target::aimed(&Request { graph, stop_gradients, ..Request::of_plan(plan) })?;
    let freedom = freedom(request)?;
    let trains = plan.schedule.trains();
    let layered = Layered::new(plan.graph.clone(), plan.layers.clone(), &plan.stop_gradients, trains);
    let costs = Rooflines::of(&plan.cluster);
    let as_is: Vec<ChosenStage> = plan.stages.iter().map(|stage| chosen(plan, stage)).collect();
    let judged = |stages: &[ChosenStage], lean: bool| {
        let mut stages = stages.to_vec();
        stages.iter_mut().for_each(|s| s.way.variant.lean = lean);
        let parts = Parts {
            layered: &layered,
            num_microbatches: plan.num_microbatches,
            schedule: plan.schedule,
            virtual_stages: plan.virtual_stages,
            stages: &stages,
        };
        let mut new = assemble(request, &parts, &costs as &dyn Costs)?;
        // A stage that does not change keeps its shardings.
        for ((new, old), (a, b)) in new.stages.iter_mut().zip(&plan.stages).zip(stages.iter().zip(&as_is)) {
            let same = (&a.layers, &a.way.mesh, a.way.again) == (&b.layers, &b.way.mesh, b.way.again);
            new.offload = old.offload;
            if same {
                *new = Stage { devices: new.devices.clone(), ..old.clone() };
            }
        }
        new.padding.clone_from(&plan.padding);
        let new = predicted(new, &layered, &costs, None)?;
        if fits(&new) { refine::refined(request, &freedom, &layered, new, &costs) } else { Ok(new) }
    };
    // Lean layouts are tried if the others do not fit, as in the search.
    let neighbour = |(change, stages): (String, Vec<ChosenStage>)| {
        let first = judged(&stages, false);
        let plan = match &first {
            Ok(plan) if fits(plan) => first,
            _ => match (judged(&stages, true), first) {
                (Ok(lean), Ok(first)) if !fits(&lean) && peak_bytes(&lean) > peak_bytes(&first) => Ok(first),
                (Err(_), first) => first,
                (lean, _) => lean,
            },
        };
        Neighbour { change, plan }
    };
    Ok(changes(plan, stage, &as_is).into_par_iter().map(neighbour).collect())
}

/// A stage in the search's terms.
fn chosen(plan: &Plan, stage: &Stage) -> ChosenStage {
    let shape = SubmeshShape { nodes: stage.submesh.0, devices: stage.submesh.1 };
    let variant =
        Variant { zero: stage.zero, lean: false, num_microbatches: plan.num_microbatches, execution: plan.execution };
    ChosenStage {
        layers: stage.layers.start as usize..stage.layers.end as usize,
        block: Block { group: stage.group as usize, shape },
        way: Way {
            mesh: stage.mesh.clone(),
            roles: AxisRoles::default(),
            variant,
            again: Again::of(&stage.recompute, stage.layers.len()),
        },
    }
}

/// Possible changes of a stage, in words and in the search's terms.
fn changes(plan: &Plan, stage: usize, as_is: &[ChosenStage]) -> Vec<(String, Vec<ChosenStage>)> {
    let mut changes = Vec::new();
    let mut change = |text: String, apply: &dyn Fn(&mut Vec<ChosenStage>)| {
        let mut stages = as_is.to_vec();
        apply(&mut stages);
        if stages.iter().all(|s| !s.layers.is_empty()) {
            changes.push((text, stages));
        }
    };
    if let Some(before) = stage.checked_sub(1) {
        change(format!("one layer more, from stage{before}"), &|s| {
            s[before].layers.end -= 1;
            s[stage].layers.start -= 1;
        });
        change(format!("one layer less, to stage{before}"), &|s| {
            s[before].layers.end += 1;
            s[stage].layers.start += 1;
        });
    }
    let after = stage + 1;
    if after < as_is.len() {
        change(format!("one layer more, from stage{after}"), &|s| {
            s[stage].layers.end += 1;
            s[after].layers.start += 1;
        });
        change(format!("one layer less, to stage{after}"), &|s| {
            s[stage].layers.end -= 1;
            s[after].layers.start -= 1;
        });
    }
    // Stages that share devices have one mesh.
    let lane: Vec<usize> = plan.stages_of(plan.lane_of(stage)).collect();
    let now = &plan.stages[stage].mesh;
    for (i, axis) in now.axes.iter().enumerate() {
        for (j, other) in now.axes.iter().enumerate().filter(|(j, _)| *j != i) {
            // The smallest step from one axis to another is a prime factor.
            let Some(by) = (2..=other.size).find(|by| other.size % by == 0) else { continue };
            let mut sizes: Vec<(&str, u32)> = now.axes.iter().map(|a| (a.name.as_str(), a.size)).collect();
            sizes[i].1 = axis.size * by;
            sizes[j].1 = other.size / by;
            let mesh = Mesh::new(&sizes);
            change(mesh.to_string(), &|s| lane.iter().for_each(|&l| s[l].way.mesh = mesh.clone()));
        }
    }
    if plan.schedule.trains() {
        let now = as_is[stage].way.again;
        for level in Recompute::ALL {
            // If attention recomputes its products anyway, selective recomputation may be no choice.
            let possible = level != Recompute::Selective || plan.execution.has_selective();
            if possible && Again::alike(level) != now {
                let text = match level {
                    Recompute::None => "recomputing nothing".to_string(),
                    level => {
                        let selective = match plan.execution.recomputes_products {
                            true => "every second product",
                            false => "attention scores",
                        };
                        format!("recomputing {}", if level == Recompute::Full { "all" } else { selective })
                    }
                };
                change(text, &|s| s[stage].way.again = Again::alike(level));
            }
        }
    }
    changes
}
