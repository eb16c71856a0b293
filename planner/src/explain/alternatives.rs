//! The alternatives to a plan, and why they were not chosen.
//!
//! The best few plans of the search are predicted. Those that are not chosen stay in the plan as alternatives. Each
//! says where its time goes that the chosen plan saves, for the busiest stage, which decides the step time of a
//! pipeline.

use crate::count;
use crate::explain::account::{Account, Part, Work};
use crate::search::choice::{choose, fits, peak_bytes};
use altiplano_ir::plan::{Alternative, Plan, Schedule};
use altiplano_ir::recompute::Recompute;
use std::collections::BTreeSet;

/// Runners-up that a plan keeps.
const KEPT: usize = 3;

/// Attaches the alternatives to a plan: the baselines, the best of the `others`, and the plan itself.
pub fn attach(mut plan: Plan, mut baselines: Vec<Alternative>, others: &mut [Plan]) -> Plan {
    others.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    baselines.extend(alternatives(&plan, others));
    baselines.push(Alternative {
        name: "chosen".into(),
        predicted: Some(plan.predicted.clone()),
        fits: fits(&plan),
        detail: shape(&plan),
    });
    plan.alternatives = baselines;
    plan
}

/// The fastest plans that lost to `chosen`, with the reason of each. All look different from it and from each other.
pub fn alternatives(chosen: &Plan, others: &[Plan]) -> Vec<Alternative> {
    let mut shown = vec![shape(chosen)];
    let mut kept = Vec::new();
    for plan in others {
        if kept.len() < KEPT && !shown.contains(&shape(plan)) {
            shown.push(shape(plan));
            kept.push(Alternative {
                name: format!("runner-up {}", kept.len() + 1),
                predicted: Some(plan.predicted.clone()),
                fits: true,
                detail: format!("{}; {}", shape(plan), reason(chosen, plan)),
            });
        }
    }
    kept
}

/// `2 stages, 8 microbatches, mesh<data=2, tensor=4>, recomputed`.
pub fn shape(plan: &Plan) -> String {
    let mut meshes: Vec<String> = plan.stages.iter().map(|s| s.mesh.to_string()).collect();
    meshes.dedup();
    const SHOWN: usize = 3;
    if meshes.len() > SHOWN {
        let more = meshes.len() - SHOWN;
        meshes.truncate(SHOWN);
        meshes.push(format!("{more} more"));
    }
    let over = plan.servers.as_ref().map_or(String::new(), |over| {
        let each = |n: usize, one, many| count(n as u32, one, many);
        format!(
            "{}, {}, ",
            each(over.workers.len(), "worker", "workers"),
            each(over.servers.len(), "server", "servers")
        )
    });
    format!(
        "{over}{}, {}, {}{}",
        stages(plan),
        count(plan.num_microbatches, "microbatch", "microbatches"),
        meshes.join(" + "),
        recomputed(plan)
    )
}

/// The overlaps that the plan's software is asked for: `, passes side by side`, `, transfers beside products`, both or nothing.
pub fn overlaps(plan: &Plan) -> String {
    let pairs = if plan.execution.pairs_passes { ", passes side by side" } else { "" };
    let beside = if plan.execution.overlaps_tensor_parallel { ", transfers beside products" } else { "" };
    format!("{pairs}{beside}")
}

/// The recomputed share of all layers: `, recomputed`, `, 3 of 48 layers recomputed, the others selectively`, or
/// nothing.
pub fn recomputed(plan: &Plan) -> String {
    let levels = plan.stages.iter().flat_map(|s| s.layers.clone().map(|l| s.recomputes(l)));
    let (mut full, mut selective, mut all) = (0, 0, 0);
    for level in levels {
        all += 1;
        full += u32::from(level == Recompute::Full);
        selective += u32::from(level == Recompute::Selective);
    }
    let layers = |n: u32| if n == all { String::new() } else { format!("{n} of {all} layers ") };
    match (full, selective) {
        (0, 0) => String::new(),
        (0, n) => format!(", {}selectively recomputed", layers(n)),
        (n, 0) => format!(", {}recomputed", layers(n)),
        (n, m) if n + m == all => format!(", {}recomputed, the others selectively", layers(n)),
        (n, m) => format!(", {}recomputed and {m} selectively", layers(n)),
    }
}

/// `8 stages (2 on the same devices)`, `4 stages under zb-h1`.
fn stages(plan: &Plan) -> String {
    let stages = count(plan.stages.len() as u32, "stage", "stages") + &overlaps(plan);
    match (plan.virtual_stages, plan.schedule) {
        (1, Schedule::ZbH1 | Schedule::Found) => format!("{stages} under {}", plan.schedule),
        (1, _) => stages,
        (v, Schedule::ZbV | Schedule::DualPipeV | Schedule::Found) => {
            format!("{stages} ({v} on the same devices) under {}", plan.schedule)
        }
        (v, _) => format!("{stages} ({v} on the same devices)"),
    }
}

/// Seconds of a step by activity, of one plan and of another, with the largest difference first.
pub fn difference(one: &Account, other: &Account) -> Vec<(Work, f64, f64)> {
    let works: BTreeSet<&Work> = one.0.keys().chain(other.0.keys()).collect();
    let of = |account: &Account, work: &Work| account.0.get(work).copied().unwrap_or(0.0);
    let mut rows: Vec<(Work, f64, f64)> =
        works.into_iter().map(|work| (work.clone(), of(one, work), of(other, work))).collect();
    rows.sort_by(|a, b| (b.2 - b.1).abs().total_cmp(&(a.2 - a.1).abs()).then(a.0.cmp(&b.0)));
    rows
}

/// The reason why a plan that fits was not chosen.
pub fn reason(chosen: &Plan, other: &Plan) -> String {
    let (ours, theirs) = (chosen.predicted.step_time_s, other.predicted.step_time_s);
    if theirs <= ours {
        // The other plan was no slower: devices or memory decided.
        let both = vec![other.clone(), chosen.clone()];
        return match choose(both) {
            leaner if leaner.num_devices() < other.num_devices() => {
                format!("as fast, on {} devices", other.num_devices())
            }
            _ => format!("as fast, with {:.1} GB on a device", peak_bytes(other) as f64 / 1e9),
        };
    }
    let (a, b) = (busiest(chosen), busiest(other));
    let of = |parts: [f64; 3], part: Part| match part {
        Part::Computing => parts[0],
        Part::Communicating => parts[1],
        Part::Waiting => parts[2],
    };
    let parts = Part::ALL.map(|part| (part.name(), of(b, part) - of(a, part)));
    let most = parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((Part::Computing.name(), 0.0));
    let slower = 100.0 * (theirs / ours - 1.0);
    let share = 100.0 * most.1 / ours;
    match most.1 > 0.0 {
        true => format!("{slower:.1} % slower: {} takes {share:.1} % of a step more", most.0),
        false => format!("{slower:.1} % slower"),
    }
}

/// Seconds of a step in which the busiest devices compute, communicate and wait. Devices that several stages share do
/// the work of all of them.
fn busiest(plan: &Plan) -> [f64; 3] {
    let of_lane = |lane: usize| {
        plan.stages_of(lane).map(|i| &plan.stages[i].predicted).fold([0.0; 3], |[compute_s, sends_s, _], stage| {
            [compute_s + stage.compute_s, sends_s + stage.communication_s, stage.bubble_s]
        })
    };
    let lanes = (0..plan.num_lanes()).map(of_lane);
    lanes.max_by(|a, b| (a[0] + a[1]).total_cmp(&(b[0] + b[1]))).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use altiplano_ir::mesh::Mesh;
    use altiplano_ir::plan::Stage;

    /// An empty plan, whose predictions a test fills in.
    pub(crate) fn empty() -> Plan {
        let graph = altiplano_ir::graph::Graph::new("nothing");
        Plan {
            format: String::new(),
            version: 1,
            model: String::new(),
            graph_hash: String::new(),
            cluster: altiplano_cost_models::preset("local:4").unwrap(),
            global_batch: 1,
            num_microbatches: 1,
            microbatch: 1,
            schedule: Schedule::OneFOneB,
            order: None,
            update: Default::default(),
            servers: None,
            goal: Default::default(),
            virtual_stages: 1,
            placement: Default::default(),
            optimizer: altiplano_ir::optimizer::Optimizer::adamw(),
            clip_norm: None,
            loss_scale: None,
            measure_noise: false,
            execution: Default::default(),
            target: Default::default(),
            loss: altiplano_ir::batch::LossKind::Mean,
            stop_gradients: Vec::new(),
            reduction: None,
            profile: None,
            made_by: None,
            certificate: None,
            proof: None,
            predicted: Default::default(),
            alternatives: Vec::new(),
            layers: vec![0, 1],
            stages: Vec::new(),
            graph: graph.into(),
            padding: None,
        }
    }

    fn with_stage(data: u32, compute_s: f64, communication_s: f64, bubble_s: f64) -> Plan {
        let mut plan = empty();
        let predicted =
            altiplano_ir::plan::StagePredicted { compute_s, communication_s, bubble_s, ..Default::default() };
        plan.predicted.step_time_s = compute_s + communication_s + bubble_s;
        plan.stages.push(Stage {
            layers: 0..1,
            group: 0,
            submesh: (1, 4),
            devices: (0..4).collect(),
            mesh: Mesh::new(&[("data", data), ("tensor", 4 / data)]),
            recompute: Default::default(),
            zero: 0,
            offload: Default::default(),
            shardings: Default::default(),
            parameters: Default::default(),
            receives: Default::default(),
            solved: None,
            predicted,
        });
        plan
    }

    #[test]
    fn stages_that_share_devices_count_together() {
        // Two stages of 0.5 s on the same devices take 1 s of each, like the one stage of the other plan.
        let mut chosen = with_stage(4, 0.5, 0.1, 0.0);
        chosen.stages.push(chosen.stages[0].clone());
        chosen.virtual_stages = 2;
        chosen.predicted.step_time_s = 1.2;
        let other = with_stage(2, 1.01, 0.25, 0.0);
        assert_eq!(reason(&chosen, &other), "5.0 % slower: communicating takes 4.2 % of a step more");
    }

    #[test]
    fn the_reason_names_what_takes_longer() {
        let chosen = with_stage(4, 1.0, 0.2, 0.0);
        let others = vec![with_stage(2, 1.1, 0.7, 0.0), with_stage(4, 1.3, 0.2, 0.0), with_stage(1, 1.0, 0.3, 0.5)];
        let kept = alternatives(&chosen, &others);
        let details: Vec<&str> = kept.iter().map(|a| a.detail.as_str()).collect();
        assert_eq!(
            details,
            [
                "1 stage, 1 microbatch, mesh<data=2, tensor=2>; 50.0 % slower: communicating takes 41.7 % of a step more",
                "1 stage, 1 microbatch, mesh<data=1, tensor=4>; 50.0 % slower: waiting takes 41.7 % of a step more",
            ]
        );
    }
}
