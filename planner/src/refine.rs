//! Solves the shardings of each stage of a plan again as one problem.
//!
//! The search composes stages from layers that it solves one by one, with one level of storage for all parameters. Once
//! stages and meshes are settled, every stage is stated as a whole ([`crate::intra_op::stage`]). The solution replaces
//! the shardings of the plan if it is predicted to fit and to be faster, or as fast and leaner. In any case, the plan
//! records how near to the optimum its shardings are.

use crate::assemble::{Shardings, with_shardings};
use crate::cache::{self, Digest};
use crate::intra_op::ilp::{Kept, Model, Variable};
use crate::intra_op::space::{AxisRoles, Spaces};
use crate::intra_op::stage::{Demand, StageProgram, StageSolution, gradient_readers, state_stage};
use crate::layers::graph::LayeredGraph;
use crate::lower::{Fusion, Prices};
use crate::predict::predict_with;
use crate::request::PlanFailure;
use crate::search::choice::{choose, fits};
use crate::search::context::SearchContext;
use crate::timings::{Phase, timed};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Solved, Stage, Target};
use altiplano_solver::Options;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Attempts to find a solution within less memory, if the prediction exceeds the memory.
const TRIES: usize = 3;
/// Relative difference below which two costs are equal.
const EQUAL: f64 = 1e-9;
/// Most stage problems need a small part of this effort. If memory is tight, twelve times as much takes up to twice as long for
/// the whole search, and made plans at most 0.01 % faster (benches/results/search.md).
const OPTIONS: Options = Options { time_limit_s: f64::INFINITY, effort: 0.08, gap: 1e-4 };

/// The result for one stage.
#[derive(Serialize, Deserialize)]
struct Resolved {
    stage: Stage,
    /// Quality of the shardings in `stage`.
    solved: Solved,
    /// Quality of the plan's shardings, if the problem can express them.
    before: Option<Solved>,
    changed: bool,
}

/// Solves every stage of a predicted plan again. Returns the plan itself or a better one, with [`Stage::solved`] filled
/// in.
pub fn refine(cx: &SearchContext<'_>, layered: &LayeredGraph, plan: Plan) -> Result<Plan, PlanFailure> {
    let all: Vec<usize> = (0..plan.stages.len()).collect();
    refine_stages(cx, layered, plan, &all)
}

/// Like [`refine`], for some of the stages.
pub fn refine_stages(
    cx: &SearchContext<'_>,
    layered: &LayeredGraph,
    mut plan: Plan,
    stages: &[usize],
) -> Result<Plan, PlanFailure> {
    let SearchContext { request, space, costs, .. } = *cx;
    if !fits(&plan) {
        return Ok(plan);
    }
    let trains = plan.schedule.trains();
    let readers = match trains {
        true => gradient_readers(&plan.graph, &plan.stop_gradients)?,
        false => Vec::new(),
    };
    let device = |stage: &Stage| space.memory_bytes[stage.group as usize] as f64;
    // The share of its device's memory that each stage may use by the estimate.
    let mut shares = vec![1.0; plan.stages.len()];
    let mut first = true;
    for _ in 0..TRIES {
        let solved: Vec<(usize, Option<Resolved>)> = stages
            .par_iter()
            .map(|&i| {
                let limit_bytes = device(&plan.stages[i]) * shares[i];
                let key = || {
                    let searched = (limit_bytes, i, space.degrees.dp, space.degrees.tp, space.degrees.zero);
                    let peak_bytes = plan.stages[i].predicted.peak_bytes;
                    Digest::new("stage").shown((cache::of_plan(&plan, costs)?, peak_bytes, searched)).key()
                };
                let find = || timed(Phase::Refinement, || solve_stage(cx, layered, &plan, &readers, i, limit_bytes));
                (i, cache::remembered(request.cache.as_deref(), key, find))
            })
            .collect();
        if std::mem::take(&mut first) {
            for (i, solved) in &solved {
                plan.stages[*i].solved = solved.as_ref().and_then(|s| s.before);
            }
        }
        if !solved.iter().filter_map(|(_, solved)| solved.as_ref()).any(|s| s.changed) {
            break;
        }
        let mut other = plan.clone();
        for (i, solved) in solved {
            if let Some(Resolved { stage: new, solved, changed: true, .. }) = solved {
                other.stages[i] = Stage { solved: Some(solved), ..new };
            }
        }
        let other = predict_with(other, layered, costs, request.cache.as_deref())?;
        if fits(&other) {
            return Ok(choose(vec![plan, other]));
        }
        for (share, stage) in shares.iter_mut().zip(&other.stages) {
            let (peak, device) = (stage.predicted.peak_bytes as f64, device(stage));
            if peak > device {
                *share *= (device / peak).min(0.97);
            }
        }
    }
    Ok(plan)
}

/// The levels of storage that a parameter may choose from.
pub fn levels(fixed: Option<u8>, num_devices: u32, trains: bool, target: Target) -> Vec<u8> {
    match fixed {
        Some(level) => vec![level],
        None if num_devices == 1 => vec![0],
        // Without training, only parameters can be sharded.
        None if !trains => vec![0, 3],
        // FSDP shards gradients wherever it shards state.
        None if target.is_fsdp() => vec![0, 2, 3],
        None => vec![0, 1, 2, 3],
    }
}

/// Solves a stage as one problem within `limit_bytes` of a device; `None` if there is no solution.
fn solve_stage(
    cx: &SearchContext<'_>,
    layered: &LayeredGraph,
    plan: &Plan,
    readers: &[Vec<ValueId>],
    index: usize,
    limit_bytes: f64,
) -> Option<Resolved> {
    let SearchContext { request, space, costs, .. } = *cx;
    let stage = &plan.stages[index];
    let trains = plan.schedule.trains();
    let roles = AxisRoles {
        // If either degree is given, the first axis holds replicas and the second splits features.
        data_axes: u8::from(space.degrees.dp.is_some() || space.degrees.tp.is_some()),
        model_axis: space.degrees.tp.map(|_| AxisId(1)),
        experts: request.degrees.ep.filter(|&ep| ep > 1).map(|_| AxisId(0)),
        ..AxisRoles::default()
    };
    let cost = costs.of_group(stage.group);
    let fusion = Fusion::of(&plan.execution);
    let composites = request.composites.of(cost, fusion);
    let prices = Prices::new(cost, plan.group_of(stage), stage.submesh, &stage.mesh).fused(fusion).knowing(&composites);
    let mut spaces = Spaces::new(&prices, roles).including(stage);
    let demand = Demand::of(plan, index, levels(space.degrees.zero, stage.mesh.num_devices(), trains, plan.target));
    let model = Model { offload: stage.offload, ..layered.model(trains.then_some(&request.training.optimizer)) };
    let range = plan.layers[stage.layers.start as usize]..plan.layers[stage.layers.end as usize];
    let program = state_stage(&model, readers, range, &mut spaces, &demand);
    let before = as_given(&program, &plan.graph, stage, &mut spaces);
    // The ratio of estimated to predicted memory of the plan's shardings corrects the limit for errors of the estimate.
    let scale = before.as_ref().map_or(1.0, |b| b.most_bytes as f64 / stage.predicted.peak_bytes.max(1) as f64);
    let found = program.solve(Some((limit_bytes * scale) as u64), &OPTIONS).ok()?;
    let bound = found.lower_bound_s;
    let before = before.map(|b| Solved { cost_s: b.cost_s, lower_bound_s: bound.min(b.cost_s) });
    let solved = Solved { cost_s: found.cost_s, lower_bound_s: bound };
    let changed = before.is_none_or(|b| found.cost_s < b.cost_s * (1.0 - EQUAL));
    Some(Resolved { stage: with_solution(layered, &mut spaces, stage, found), solved, before, changed })
}

/// Expresses a stage's shardings in the terms of its problem.
pub fn as_given(
    program: &StageProgram,
    graph: &Graph,
    stage: &Stage,
    spaces: &mut Spaces<'_>,
) -> Option<StageSolution> {
    as_given_but(program, graph, stage, spaces, None)
}

/// Like [`as_given`], but one variable of the problem takes another choice. `change` holds the indices of both.
pub fn as_given_but(
    program: &StageProgram,
    graph: &Graph,
    stage: &Stage,
    spaces: &mut Spaces<'_>,
    change: Option<(usize, usize)>,
) -> Option<StageSolution> {
    // The plan's storage of a parameter is known before the problem is solved.
    let kept = |p: ValueId, kept: Kept, spaces: &mut Spaces<'_>| {
        let Op::Parameter(parameter) = &graph.node(p).op else { return false };
        let rests = kept.rests(spaces);
        stage.parameters.get(&parameter.name).is_some_and(|storage| {
            *spaces.layout(rests.parameter) == storage.parameter
                && (graph.is_frozen(p)
                    || *spaces.layout(rests.state) == storage.state
                        && spaces.layout(rests.gradient).dims == storage.gradient.dims)
        })
    };
    let mut allowed: Vec<(ValueId, Kept)> = program.kept().filter(|&(p, k)| kept(p, k, spaces)).collect();
    let mut other = None;
    match change.map(|(at, choice)| (&program.ilp.variables[at], choice)) {
        Some((Variable::Node(v, space), choice)) => other = Some((*v, space.choices[choice].strategy.clone())),
        Some((Variable::Parameter(p, kept), choice)) => {
            allowed.retain(|(known, _)| known != p);
            allowed.push((*p, kept[choice]));
        }
        _ => {}
    }
    let strategy = |v: ValueId| match &other {
        Some((changed, strategy)) if *changed == v => Some(strategy.clone()),
        _ => stage.shardings.get(&v).map(|s| s.strategy.clone()),
    };
    program.solve_given(strategy, |p, kept| allowed.contains(&(p, kept)), &OPTIONS).ok()
}

/// Writes the shardings of a solution into a stage.
pub fn with_solution(layered: &LayeredGraph, spaces: &mut Spaces<'_>, stage: &Stage, found: StageSolution) -> Stage {
    let graph = &layered.graph;
    let StageSolution { strategies, parameters, receives, .. } = found;
    let mut bytes = [0u64; 4];
    // Levels below 3 do not apply to a frozen parameter.
    for (p, kept) in parameters.iter().filter(|(p, kept)| kept.level >= 3 || !graph.is_frozen(*p)) {
        bytes[usize::from(kept.level)] += graph.ty(*p).bytes();
    }
    let zero = (0u8..).zip(bytes).max_by_key(|&(level, bytes)| (bytes, level)).map_or(stage.zero, |most| most.0);
    let receives = receives.into_iter().map(|(v, layout)| (v, spaces.layout(layout).clone())).collect();
    let shardings = Shardings { strategies, parameters, receives };
    let old = &stage.parameters;
    let stage = Stage { zero, predicted: Default::default(), solved: None, ..stage.clone() };
    let mut stage = with_shardings(layered, spaces, stage, shardings);
    // Parameters that no op of the stage uses stay as they are.
    for (name, storage) in old {
        stage.parameters.entry(name.clone()).or_insert_with(|| storage.clone());
    }
    stage
}
