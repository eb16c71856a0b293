//! The Pareto frontier of plans: those that no other beats in seconds, bytes, devices and price at once.
//!
//! The search runs for parts of the cluster, from one device to all nodes, and for shares of the memory that devices
//! have. The best few plans for each are predicted, with the overlaps that their target can run. The plan of
//! [`super::plan`] and its runners-up join them, so that no row is missing that a search for seconds alone finds. The
//! frontier is the rest after every plan is dropped that another one beats.

use super::choice::{fits, peak_bytes};
use super::context::SearchContext;
use super::predictor::predict_candidate;
use super::space::SearchSpace;
use super::sweep::is_uniform;
use super::{needs_expert_mesh, plan_and_others, uniform, with_options};
use crate::features::{overlaps, pins, target};
use crate::inter_op::search::{PipelineCandidate, search};
use crate::inter_op::variants;
use crate::layers::cache::LayeredAtBatch;
use crate::layers::graph::LayeredGraph;
use crate::refine::refine;
use crate::request::{Muted, PlanFailure, Progress, Request};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::Plan;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A Pareto-optimal plan.
#[derive(Clone, Debug)]
pub struct Point {
    pub plan: Plan,
    pub devices: u32,
    /// Bytes of the fullest device.
    pub peak_bytes: u64,
    /// Price of a step, if the cluster says what a node costs.
    pub price: Option<f64>,
}

/// Shares of a device's memory within which plans are searched.
const SHARES: [f64; 6] = [1.0, 0.75, 0.5, 0.35, 0.25, 0.15];

/// Relative differences below this do not count: of two such plans, the one that needs less is enough.
const ALIKE: f64 = 0.01;

/// Returns the frontier, fastest first.
///
/// # Errors
/// Like [`crate::plan`], if there is no plan on the whole cluster either.
pub fn frontier(request: &Request, costs: &dyn Costs, progress: &dyn Progress) -> Result<Vec<Point>, PlanFailure> {
    if request.servers.is_some() {
        let problem = "has no frontier: what devices there are is said by how many of them are servers";
        return Err(PlanFailure::Servers { option: "frontier", problem });
    }
    if let Some(size) = request.batch.per_replica {
        let found = pins::by_micro_batch(request, size, progress, |fixed| frontier(fixed, costs, progress))?;
        return Ok(not_beaten(found.into_iter().flatten().collect()));
    }
    let given = request;
    let request = &target::restrict(&with_options(given)?)?;
    let cache = Arc::default();
    let layered = LayeredAtBatch::among(request, &cache);
    let parts = parts(request);
    let total = parts.len();
    let mut all: Vec<Point> = Vec::new();
    let mut failure = None;
    for (i, (part, only_group)) in parts.iter().enumerate() {
        progress.step(&part.cluster.name, i, total);
        if progress.stopped() && !all.is_empty() {
            break;
        }
        // Degrees that the user fixed are for the whole cluster.
        let space = match SearchSpace::from_request(part) {
            Ok(space) => SearchSpace { only_group: *only_group, ..space },
            Err(error) if i + 1 == total => return Err(error),
            Err(_) => continue,
        };
        let quietly = Muted(progress);
        let alike = || Ok(uniform::all(part, true, costs, &quietly)?.into_iter().map(point).collect());
        let cx = SearchContext { request: part, space: &space, costs, layered: &layered, progress: &quietly };
        let found = match is_uniform(part) {
            true => alike(),
            false => points(&cx).or_else(|why| if needs_expert_mesh(part, &why) { alike() } else { Err(why) }),
        };
        match found {
            Ok(points) => all.extend(points),
            Err(error) => failure = Some(error),
        }
    }
    if !progress.stopped() {
        let found = plan_and_others(given, &cache, costs, &Muted(progress)).ok();
        let found = found.into_iter().flat_map(|(plan, others)| others.into_iter().chain([plan]));
        all.extend(found.filter(fits).map(point));
    }
    match (all.is_empty(), failure) {
        (true, Some(failure)) => Err(failure),
        _ => overlapped(not_beaten(all), costs),
    }
}

/// The frontier of some points and of the same plans with the overlaps that their target can run.
fn overlapped(mut points: Vec<Point>, costs: &dyn Costs) -> Result<Vec<Point>, PlanFailure> {
    let with = |p: &Point| overlaps::with_overlaps(p.plan.clone(), costs).map(point);
    let tried: Vec<Point> = points.par_iter().map(with).collect::<Result<_, _>>()?;
    points.extend(tried);
    Ok(not_beaten(points))
}

/// The request on ever larger parts of its cluster: of one node, then of all nodes. With several groups, each group
/// alone comes with its index. The last part is the whole cluster.
fn parts(request: &Request) -> Vec<(Request, Option<usize>)> {
    let groups = &request.cluster.groups;
    let [group] = groups.as_slice() else {
        let alone = (0..groups.len()).map(|group| (request.clone(), Some(group)));
        return alone.chain([(request.clone(), None)]).collect();
    };
    let mut sizes: Vec<(u32, u32)> = Vec::new();
    let doubled = |most: u32| (0..32).map(|i| 1u32 << i).take_while(move |&n| n < most);
    sizes.extend(doubled(group.devices_per_node).map(|devices| (1, devices)));
    sizes.extend(doubled(group.nodes).map(|nodes| (nodes, group.devices_per_node)));
    sizes.push((group.nodes, group.devices_per_node));
    let part = |(nodes, devices): (u32, u32)| {
        let mut part = request.clone();
        let name = &request.cluster.name;
        if devices < group.devices_per_node {
            part.cluster.name = format!("{devices} of {} devices of a node of {name}", group.devices_per_node);
        } else if nodes < group.nodes {
            part.cluster.name = format!("{nodes} of {} nodes of {name}", group.nodes);
        }
        part.cluster.groups[0].nodes = nodes;
        part.cluster.groups[0].devices_per_node = devices;
        // A node has its full price, whichever part of it works.
        (part, None)
    };
    sizes.into_iter().map(part).collect()
}

/// Good plans on one part of the cluster, within every share of memory.
fn points(cx: &SearchContext<'_>) -> Result<Vec<Point>, PlanFailure> {
    let mut found: Vec<Plan> = Vec::new();
    let mut failure = None;
    for lean in [false, true] {
        let space = SearchSpace { lean, ..cx.space.clone() };
        let cx = &cx.within(&space);
        let searched = search(cx);
        let within: Vec<Result<Vec<PipelineCandidate<'_>>, PlanFailure>> = SHARES
            .par_iter()
            .map(|share| {
                let limit: Vec<u64> = space.memory_bytes.iter().map(|&bytes| (bytes as f64 * share) as u64).collect();
                let limits: BTreeMap<u32, Vec<u64>> =
                    searched.candidates.iter().map(|c| (c.num_microbatches, limit.clone())).collect();
                let ranked = variants::asked_for(cx, &searched, &limits)?;
                let others = variants::others(cx, &searched, &ranked, &limits).into_iter().take(MOST_OF_A_SHARE);
                Ok(ranked.iter().take(MOST_OF_A_SHARE).cloned().chain(others).collect())
            })
            .collect();
        // Plans that need little memory are among the best within several shares.
        let mut distinct: Vec<PipelineCandidate<'_>> = Vec::new();
        for result in within {
            match result {
                Ok(candidates) => candidates.into_iter().for_each(|new| {
                    if !distinct.iter().any(|known| known.is(&new)) {
                        distinct.push(new);
                    }
                }),
                Err(error) => failure = Some(error),
            }
        }
        let predicted: Vec<Result<Plan, PlanFailure>> =
            distinct.par_iter().map(|candidate| predict_candidate(cx, candidate)).collect();
        for result in predicted {
            match result {
                Ok(plan) => found.extend(Some(plan).filter(fits)),
                Err(error) => failure = Some(error),
            }
        }
        if cx.progress.stopped() {
            break;
        }
    }
    match (found.is_empty(), failure) {
        (true, Some(failure)) => return Err(failure),
        (true, None) => return Err(PlanFailure::NoCombination),
        _ => {}
    }
    let kept = not_beaten(found.into_iter().map(point).collect());
    // The remaining plans are worth solving again as a whole, within the memory that they need.
    let refined = |p: Point| {
        let memory_bytes = cx.space.memory_bytes.iter().map(|&bytes| bytes.min(p.peak_bytes)).collect();
        let within = SearchSpace { memory_bytes, ..cx.space.clone() };
        match refine(&cx.within(&within), &LayeredGraph::of_plan(&p.plan), p.plan.clone()) {
            Ok(plan) if peak_bytes(&plan) <= p.peak_bytes => point(plan),
            _ => p,
        }
    };
    Ok(kept.into_par_iter().map(refined).collect())
}

/// Plain pipelines that are predicted for each share of memory, and pipelines whose order of calls has no formula.
const MOST_OF_A_SHARE: usize = 3;

fn point(plan: Plan) -> Point {
    let devices = plan.num_devices();
    let node = |group: u32, device: u32| device / plan.cluster.groups[group as usize].devices_per_node.max(1);
    let nodes: BTreeSet<(u32, u32)> = plan
        .stages
        .iter()
        .flat_map(|s| {
            let first = plan.cluster.devices_of(s.group as usize).start;
            s.devices.iter().map(move |&device| (s.group, node(s.group, device - first)))
        })
        .collect();
    let prices: Option<f64> = nodes.iter().map(|&(group, _)| plan.cluster.groups[group as usize].price_per_hour).sum();
    let price = prices.map(|an_hour| an_hour / 3600.0 * plan.predicted.step_time_s);
    Point { devices, peak_bytes: peak_bytes(&plan), price, plan }
}

/// Drops every point that another one matches in all respects. The rest is sorted, fastest first.
fn not_beaten(mut all: Vec<Point>) -> Vec<Point> {
    let step = |p: &Point| p.plan.predicted.step_time_s;
    all.sort_by(|a, b| {
        step(a).total_cmp(&step(b)).then(a.devices.cmp(&b.devices)).then(a.peak_bytes.cmp(&b.peak_bytes))
    });
    let mut kept: Vec<Point> = Vec::new();
    for new in all {
        let as_good = |old: &Point| {
            let price = match (old.price, new.price) {
                (Some(old), Some(new)) => old <= new * (1.0 + ALIKE),
                _ => true,
            };
            old.devices <= new.devices && old.peak_bytes as f64 <= new.peak_bytes as f64 * (1.0 + ALIKE) && price
        };
        if !kept.iter().any(as_good) {
            kept.push(new);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beaten_in_everything_goes() {
        let at = |seconds: f64, devices: u32, gigabytes: u64, price: f64| {
            let mut plan = crate::explain::alternatives::tests::empty();
            plan.predicted.step_time_s = seconds;
            Point { plan, devices, peak_bytes: gigabytes << 30, price: Some(price) }
        };
        let all = vec![
            at(1.0, 8, 40, 1.0),
            at(2.0, 8, 40, 0.5),
            at(2.0, 8, 50, 2.0),
            at(4.0, 4, 60, 1.0),
            at(5.0, 4, 60, 1.1),
            at(6.0, 8, 20, 3.0),
        ];
        let kept: Vec<f64> = not_beaten(all).iter().map(|p| p.plan.predicted.step_time_s).collect();
        assert_eq!(kept, [1.0, 2.0, 4.0, 6.0]);
    }
}
