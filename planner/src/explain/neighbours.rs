//! The neighbours of a plan: one of its stages has a layer more or less, another mesh, or another level of
//! recomputation. A stage with other layers or another mesh is solved as in the search. The whole is predicted like any plan.

use crate::assemble::{Parts, assemble};
use crate::features::parallelism::uniform_roles;
use crate::features::target;
use crate::inter_op::search::{ChosenStage, StageConfig};
use crate::inter_op::submesh::{Block, SubmeshShape};
use crate::intra_op::layer::{MemoryPrice, Variant};
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::intra_op::space::AxisRoles;
use crate::layers::cache::LayeredAtBatch;
use crate::layers::graph::LayeredGraph;
use crate::predict::predict_with;
use crate::refine::refine_stages;
use crate::request::{PlanFailure, Request, Silent};
use crate::search::choice::{fits, peak_bytes};
use crate::search::context::SearchContext;
use crate::search::space::SearchSpace;
use altiplano_cost_models::Rooflines;
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
    let request = &target::restrict(&Request { graph, stop_gradients, ..Request::of_plan(plan) })?;
    let space = SearchSpace::from_request(request)?;
    let layered = LayeredGraph::of_plan(plan);
    let costs = Rooflines::of(&plan.cluster);
    let at_batch = LayeredAtBatch::new(request);
    let cx = SearchContext { request, space: &space, costs: &costs, layered: &at_batch, progress: &Silent };
    let roles = uniform_roles(plan);
    let is_swept = roles.is_some();
    let roles = roles.unwrap_or_else(|| vec![AxisRoles::default(); plan.stages.len()]);
    let as_is: Vec<ChosenStage> =
        plan.stages.iter().zip(roles).map(|(stage, roles)| chosen(plan, stage, roles)).collect();
    let predict = |stages: &[ChosenStage], memory: MemoryPrice| {
        let mut stages = stages.to_vec();
        stages.iter_mut().for_each(|s| s.config.variant.memory = memory);
        let parts = Parts {
            layered: &layered,
            num_microbatches: plan.num_microbatches,
            schedule: plan.schedule,
            virtual_stages: plan.virtual_stages,
            placement: plan.placement,
            stages: &stages,
        };
        let mut new = assemble(request, &parts, &costs)?;
        new.order.clone_from(&plan.order);
        new.execution.pairs_passes = plan.execution.pairs_passes;
        new.execution.overlaps_tensor_parallel = plan.execution.overlaps_tensor_parallel;
        // A stage with the same layers and mesh keeps its shardings.
        let mut changed = Vec::new();
        for (i, (new, old)) in new.stages.iter_mut().zip(&plan.stages).enumerate() {
            let ([a, b], devices) = ([&stages[i], &as_is[i]], std::mem::take(&mut new.devices));
            let same_recompute = a.config.fraction == b.config.fraction;
            let same_place = (&a.layers, &a.config.mesh) == (&b.layers, &b.config.mesh);
            let recompute = if same_recompute { old.recompute.clone() } else { new.recompute.clone() };
            match same_place {
                true => *new = Stage { devices, recompute, ..old.clone() },
                false => (new.devices, new.offload) = (devices, old.offload),
            }
            if !(same_place && same_recompute) {
                changed.push(i);
            }
        }
        new.padding.clone_from(&plan.padding);
        let new = predict_with(new, &layered, &costs, None)?;
        // Sweeps leave the layers of their plans as they are solved.
        if is_swept { Ok(new) } else { refine_stages(&cx, &layered, new, &changed) }
    };
    // Lean layouts are tried if the others do not fit, as in the search.
    let neighbour = |(change, stages): (String, Vec<ChosenStage>)| {
        if is_swept {
            return Neighbour { change, plan: predict(&stages, MemoryPrice::None) };
        }
        let first = predict(&stages, MemoryPrice::Small);
        let plan = match &first {
            Ok(plan) if fits(plan) => first,
            _ => match (predict(&stages, MemoryPrice::Large), first) {
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
fn chosen(plan: &Plan, stage: &Stage, roles: AxisRoles) -> ChosenStage {
    let shape = SubmeshShape { nodes: stage.submesh.0, devices: stage.submesh.1 };
    let variant = Variant {
        zero: stage.zero,
        memory: MemoryPrice::Small,
        num_microbatches: plan.num_microbatches,
        execution: plan.execution,
    };
    ChosenStage {
        layers: stage.layers.start as usize..stage.layers.end as usize,
        block: Block { group: stage.group as usize, shape },
        config: StageConfig {
            mesh: stage.mesh.clone(),
            roles,
            variant,
            fraction: RecomputeFraction::of(&stage.recompute, stage.layers.len()),
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
            change(mesh.to_string(), &|s| lane.iter().for_each(|&l| s[l].config.mesh = mesh.clone()));
        }
    }
    if plan.schedule.trains() {
        let now = as_is[stage].config.fraction;
        for level in Recompute::ALL {
            // If attention recomputes its products anyway, selective recomputation may be no choice.
            let possible = level != Recompute::Selective || plan.execution.has_selective();
            if possible && RecomputeFraction::uniform(level) != now {
                let text = match level {
                    Recompute::None => "recomputing nothing".to_string(),
                    Recompute::Selective => format!("recomputing {}", plan.execution.recomputed().words()),
                    Recompute::Full => "recomputing all".to_string(),
                };
                change(text, &|s| s[stage].config.fraction = RecomputeFraction::uniform(level));
            }
        }
    }
    changes
}
