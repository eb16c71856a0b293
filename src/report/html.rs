//! Writes a plan as a self-contained HTML page: the timeline and memory of each device over a step, the layout of every
//! value, and the alternatives.
//!
//! The page's data are the plan and its predictions, as numbers. A body is written once, as a list of ops with their
//! seconds; the schedule is a list of calls of bodies. The program in `page/`, whose bundle is embedded, draws
//! everything in the browser.
//!
//! Names reach the page as JSON without any `<` and become text nodes; the page's policy lets it load nothing.

mod facts;
mod lanes;
mod layers;
mod parameters;
mod questions;

use crate::Error;
use crate::report::answer;
use altiplano_cost_models::link::axis_link;
use altiplano_cost_models::pipeline::Order;
use altiplano_cost_models::{Costs, Rooflines};
use altiplano_ir::certificate::Certificate;
use altiplano_ir::plan::{Alternative, Plan, Stage};
use altiplano_planner::lower::{DedupedPrograms, Prices};
use altiplano_planner::predict::{lane_memories, played, timings_of, work_of};
use serde::Serialize;
use std::collections::BTreeMap;

/// The program of the page and its style; `src/report/page/README.md` says how to build them.
const SCRIPT: &str = include_str!("page/dist/page.js");
pub(crate) const STYLE: &str = include_str!("page/dist/page.css");

/// The complete page of a plan. The same plan gives the same page.
///
/// # Errors
/// Fails if the plan cannot be lowered.
pub fn page_html(plan: &Plan) -> Result<String, Error> {
    let data = serde_json::to_string(&Page::new(plan)?).unwrap_or_default();
    // In a script element only `<` is special, and in JSON it occurs only in strings.
    let data = data.replace('<', "\\u003c");
    Ok(format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>Plan</title>
<style>
{STYLE}</style>
</head>
<body>
<div id="page"><noscript>This page is drawn by a script, which this browser does not run.</noscript></div>
<script type="application/json" id="data">{data}</script>
<script>
{SCRIPT}</script>
</body>
</html>
"#
    ))
}

/// The data of the page. Seconds and bytes are those of the plan and its predictions.
#[derive(Serialize)]
struct Page {
    format: &'static str,
    version: u32,
    plan: Headline,
    groups: Vec<Group>,
    /// Bandwidth of the link from each group of nodes to the others.
    between_groups_bytes_per_s: Option<f64>,
    stages: Vec<StageFacts>,
    lanes: Vec<lanes::Lane>,
    /// Distinct ops of all bodies.
    ops: Vec<lanes::OpFacts>,
    /// Bodies: ops in the order in which they are issued.
    bodies: Vec<Vec<lanes::Placed>>,
    layers: layers::Layers,
    parameters: parameters::Parameters,
    questions: questions::Questions,
    alternatives: Vec<Other>,
    certificate: Option<Certificate>,
}

/// The plan in figures.
#[derive(Serialize)]
struct Headline {
    model: String,
    cluster: String,
    one_line: String,
    schedule: &'static str,
    target: &'static str,
    trains: bool,
    virtual_stages: u32,
    num_microbatches: u32,
    microbatch: u64,
    global_batch: u64,
    optimizer: &'static str,
    elements: u64,
    parameter_bytes: u64,
    num_devices: u32,
    devices_used: u32,
    step_s: f64,
    lower_bound_s: f64,
    samples_per_s: f64,
    mfu: f64,
    /// The measured profile that predicted the plan; the page simulates it by the cluster's figures.
    profile: Option<String>,
    /// Upper bound on how far the shardings are from optimal, by stage, if it is known.
    gap: Option<f64>,
}

/// Equal nodes of the cluster.
#[derive(Serialize)]
struct Group {
    nodes: u32,
    devices_per_node: u32,
    device: String,
    memory_bytes: u64,
    inside: String,
    inside_bytes_per_s: f64,
    between: String,
    between_bytes_per_s: f64,
    nics: u32,
}

/// A stage and its predictions.
#[derive(Serialize)]
struct StageFacts {
    lane: usize,
    /// First layer, and the one after the last.
    layers: (u32, u32),
    mesh: String,
    axes: Vec<AxisFacts>,
    recompute: String,
    zero: u8,
    forward_s: f64,
    backward_s: f64,
    weights_s: f64,
    step_s: f64,
    compute_s: f64,
    communication_s: f64,
    bubble_s: f64,
    transfer_forward_s: f64,
    transfer_backward_s: f64,
    parameters_bytes: u64,
    gradients_bytes: u64,
    optimizer_bytes: u64,
    activations_bytes: u64,
    peak_bytes: u64,
}

/// An axis of a mesh, and the links of its collectives.
#[derive(Serialize)]
struct AxisFacts {
    name: String,
    size: u32,
    /// Number of nodes that a group of devices along the axis spans.
    nodes: u64,
    bytes_per_s: f64,
}

/// A line of the table of alternatives.
#[derive(Serialize)]
struct Other {
    name: String,
    step_s: Option<f64>,
    samples_per_s: Option<f64>,
    mfu: Option<f64>,
    peak_bytes: Option<u64>,
    fits: bool,
    detail: String,
}

impl Page {
    fn new(plan: &Plan) -> Result<Page, Error> {
        let programs = crate::programs(plan)?;
        let costs = Rooflines::of(&plan.cluster);
        let whole = DedupedPrograms::whole(&programs);
        let work = work_of(plan, &whole, &costs);
        let timings = timings_of(plan, &whole, &work, &costs);
        let memories = lane_memories(plan, &whole, &work);
        let mut calls: Vec<Vec<lanes::Played>> = vec![Vec::new(); plan.num_lanes()];
        let timeline = played(plan, &timings, &Order::of(plan), &mut |stage, call, start, end| {
            calls[plan.lane_of(stage)].push((stage, call, start, end));
        });
        let mut bodies = lanes::Bodies::default();
        let prices: Vec<Prices<'_>> = plan.stages.iter().map(|s| prices(plan, s, &costs)).collect();
        let played = lanes::PlayedPlan { plan, programs: &programs, work: &work, timings: &timings, prices: &prices };
        let lanes = (0..plan.num_lanes())
            .map(|lane| played.lane(lane, &calls[lane], &memories[lane], &timeline.stages[lane], &mut bodies))
            .collect();
        let questions = questions::Questions::new(plan)?;
        let facts = facts::Facts::new(plan, &programs)?;
        let stage = |(i, stage): (usize, &Stage)| {
            let (p, times) = (&stage.predicted, &timings[i].0);
            StageFacts {
                lane: plan.lane_of(i),
                layers: (stage.layers.start, stage.layers.end),
                mesh: stage.mesh.to_string(),
                axes: axes(plan, stage),
                recompute: stage.recompute.to_string(),
                zero: stage.zero,
                forward_s: p.forward_s,
                backward_s: p.backward_s,
                weights_s: times.weights_s,
                step_s: p.step_s,
                compute_s: p.compute_s,
                communication_s: p.communication_s,
                bubble_s: p.bubble_s,
                transfer_forward_s: times.transfer_forward_s,
                transfer_backward_s: times.transfer_backward_s,
                parameters_bytes: p.memory.parameters_bytes,
                gradients_bytes: p.memory.gradients_bytes,
                optimizer_bytes: p.memory.optimizer_bytes,
                activations_bytes: p.memory.activations_bytes,
                peak_bytes: p.peak_bytes,
            }
        };
        Ok(Page {
            format: "altiplano.page",
            version: 1,
            plan: headline(plan),
            groups: groups(plan),
            between_groups_bytes_per_s: plan.cluster.between_groups.map(|link| link.bytes_per_s),
            stages: plan.stages.iter().enumerate().map(stage).collect(),
            lanes,
            layers: layers::Layers::new(plan, &prices, &questions, &facts),
            parameters: parameters::Parameters::new(plan, &programs, &questions),
            questions,
            alternatives: plan.alternatives.iter().map(other).collect(),
            certificate: plan.certificate.clone(),
            ops: bodies.ops.all,
            bodies: bodies.lists.all,
        })
    }
}

/// The prices on a stage's mesh.
fn prices<'a>(plan: &Plan, stage: &Stage, costs: &'a Rooflines) -> Prices<'a> {
    Prices::new(costs.of_group(stage.group), plan.group_of(stage), stage.submesh, &stage.mesh)
}

fn headline(plan: &Plan) -> Headline {
    let (mut elements, mut parameter_bytes) = (0u64, 0u64);
    for (v, _) in plan.own().0.parameters() {
        elements = elements.saturating_add(plan.own().0.ty(v).elements());
        parameter_bytes = parameter_bytes.saturating_add(plan.own().0.ty(v).bytes());
    }
    let gaps: Option<Vec<f64>> = plan.stages.iter().map(|s| s.solved.map(|s| s.gap())).collect();
    let p = &plan.predicted;
    Headline {
        model: plan.model.clone(),
        cluster: plan.cluster.name.clone(),
        one_line: answer(plan),
        schedule: plan.schedule.name(),
        target: plan.target.name(),
        trains: plan.schedule.trains(),
        virtual_stages: plan.virtual_stages,
        num_microbatches: plan.num_microbatches,
        microbatch: plan.microbatch,
        global_batch: plan.global_batch,
        optimizer: plan.optimizer.name(),
        elements,
        parameter_bytes,
        num_devices: plan.cluster.num_devices(),
        devices_used: plan.num_devices(),
        step_s: p.step_time_s,
        lower_bound_s: p.lower_bound_s,
        samples_per_s: p.samples_per_s,
        mfu: p.mfu,
        profile: plan.profile.clone(),
        gap: gaps.map(|g| g.into_iter().fold(0.0, f64::max)).filter(|g| g.is_finite()),
    }
}

fn groups(plan: &Plan) -> Vec<Group> {
    let group = |g: &altiplano_ir::cluster::Group| Group {
        nodes: g.nodes,
        devices_per_node: g.devices_per_node,
        device: g.device.name.clone(),
        memory_bytes: g.device.memory_bytes,
        inside: g.intra_node.kind.clone(),
        inside_bytes_per_s: g.intra_node.bytes_per_s,
        between: g.inter_node.kind.clone(),
        between_bytes_per_s: g.inter_node.bytes_per_s,
        nics: g.inter_node.nics,
    };
    plan.cluster.groups.iter().map(group).collect()
}

fn axes(plan: &Plan, stage: &Stage) -> Vec<AxisFacts> {
    let axis = |a| {
        let link = axis_link(plan.group_of(stage), stage.submesh.0, stage.submesh.1, &stage.mesh, &[a]);
        let inside = link.nodes <= 1;
        AxisFacts {
            name: stage.mesh.name(a).to_string(),
            size: stage.mesh.size(a) as u32,
            nodes: link.nodes,
            bytes_per_s: if inside { link.inside_bytes_per_s } else { link.across_bytes_per_s },
        }
    };
    stage.mesh.axis_ids().map(axis).collect()
}

fn other(line: &Alternative) -> Other {
    let p = line.predicted.as_ref();
    Other {
        name: line.name.clone(),
        step_s: p.map(|p| p.step_time_s),
        samples_per_s: p.map(|p| p.samples_per_s),
        mfu: p.map(|p| p.mfu),
        peak_bytes: p.and_then(|p| p.peak_bytes.iter().copied().max()),
        fits: line.fits,
        detail: line.detail.clone(),
    }
}

/// Replaces each number in a name by `*`, for what equal layers have in common.
fn numberless(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        match c.is_ascii_digit() {
            true if out.ends_with('*') => {}
            true => out.push('*'),
            false => out.push(c),
        }
    }
    out
}

/// A table that stores equal values once and refers to them by number.
struct Table<T> {
    all: Vec<T>,
    numbers: BTreeMap<String, usize>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table { all: Vec::new(), numbers: BTreeMap::new() }
    }
}

impl<T: Serialize> Table<T> {
    /// The number of a value; values with equal JSON are equal.
    fn number(&mut self, thing: T) -> usize {
        let key = serde_json::to_string(&thing).unwrap_or_default();
        if let Some(&number) = self.numbers.get(&key) {
            return number;
        }
        self.all.push(thing);
        self.numbers.insert(key, self.all.len() - 1);
        self.all.len() - 1
    }
}
