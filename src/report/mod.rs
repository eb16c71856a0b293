//! Prints a plan as text: the placement, the layouts, the costs, and the alternatives.

mod answer;
mod difference;
mod dot;
mod figures;
mod frontier;
mod held;
mod html;
mod kernels;
mod look;
mod programs;
mod stage;
mod tape;
mod timeline;
mod why;
pub(crate) mod words;

pub use answer::answer;
use answer::{audience, enough, faster, sharded};
pub(crate) use difference::side_by_side_json;
pub use difference::{side, side_by_side};
pub use dot::plan_dot;
pub use figures::figures;
pub use frontier::{frontier_json, frontier_text};
pub use held::held;
pub(crate) use html::STYLE as PAGE_STYLE;
pub use html::page_html;
pub use kernels::kernels_text;
pub use look::Look;
pub use programs::programs;
pub use stage::why_stage;
pub use tape::tape_text;
pub use why::{Asked, why_text};

use crate::advice::Limits;
use crate::certify::certificate_text;
use crate::prove::proof_text;
use crate::simulate::Simulation;
use crate::units::{bytes, count, digits, gibibytes, percent, plural, seconds, smaller};
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::Group;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Function, Op};
use altiplano_ir::padding::Padding;
use altiplano_ir::plan::{
    Alternative, Goal, Memory, MfuConvention, Offload, Placement, Plan, Predicted, Schedule, Stage, StagePredicted,
    Storage, Target, Update,
};
use altiplano_planner::features::offload::of_nodes;
use comfy_table::{CellAlignment, Table, presets};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::Range;

/// The report of a plan, the answer first. Times and rates have three significant digits; equal lines of repeated
/// layers are merged.
pub fn report(plan: &Plan) -> String {
    report_as(plan, Look::PLAIN)
}

/// [`report`] for a terminal.
pub fn report_as(plan: &Plan, look: Look) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_report(&mut out, plan, look);
    format!("{}\n\n{}", answer_as(plan, look), look.shown(&out))
}

/// The first lines of a report: the degrees, the predictions, and the intended user.
pub fn answer_as(plan: &Plan, look: Look) -> String {
    let strong = look.strong(&look.wrapped(&answer(plan)));
    let rest: Vec<String> = enough(plan).into_iter().chain([audience(plan)]).map(|line| look.wrapped(&line)).collect();
    format!("{strong}\n{}", rest.join("\n"))
}

fn write_report(out: &mut String, plan: &Plan, look: Look) -> std::fmt::Result {
    write_summary(out, plan)?;
    let layouts = Layouts::new(plan);
    writeln!(out, "\nStages\n{}", layouts.stages())?;
    let step = if plan.schedule.trains() { "step" } else { "batch" };
    writeln!(out, "\nSeconds of a {step}, on each device of a stage\n{}", times(plan))?;
    // A plan that was predicted by a measured profile needs that profile for simulation (`simulate --profile`), which
    // is not at hand.
    let played = || plan.profile.is_none().then(|| Simulation::new(plan.clone(), None).ok()).flatten();
    let (simulation, listed) = rayon::join(played, || layouts.listed());
    if let Some(simulation) = simulation {
        writeln!(out, "\nThe {step}, from left to right\n{}", timeline::timeline(&simulation, look.width))?;
        writeln!(out, "\nWhat limits this plan (`altiplano advise` searches for what would make it faster)")?;
        Limits::new(&simulation).lines().iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    writeln!(out, "\nBytes on each device of a stage\n{}", memory(plan))?;
    if let Some(certificate) = &plan.certificate {
        writeln!(out, "\nCertificate\n{}", certificate_text(certificate))?;
    }
    if let Some(proof) = &plan.proof {
        writeln!(out, "\nProof\n{}", proof_text(plan, proof))?;
    }
    for Listed { title, parameters, activations } in listed {
        writeln!(out, "\nParameters of {title}\n{parameters}")?;
        writeln!(out, "\nMain activations of {title} (one microbatch)\n{activations}")?;
    }
    writeln!(out, "\nAlternatives, predicted the same way\n{}", alternatives(plan))
}

/// The number of attention rings and of their blocks.
fn rings(graph: &Graph) -> Option<String> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for node in &graph.nodes {
        if let Op::Composite(op) = &node.op
            && let Function::Attention { blocks: blocks @ 2.., .. } = op.function
        {
            *counts.entry(blocks).or_default() += 1;
        }
    }
    let words = |(blocks, count): (&u64, &u64)| format!("{} in {blocks} blocks", plural(*count, "ring"));
    (!counts.is_empty()).then(|| counts.iter().map(words).collect::<Vec<_>>().join(", "))
}

/// The number of chunks in which logits are computed.
fn loss_chunks(graph: &Graph) -> Option<u64> {
    graph.nodes.iter().find_map(|node| match &node.op {
        Op::Composite(op) => match op.function {
            Function::LinearCrossEntropy { chunks, .. } => Some(chunks),
            _ => None,
        },
        _ => None,
    })
}

fn padded(padding: &Padding) -> String {
    let mut sizes: BTreeMap<(u64, u64), Vec<&str>> = BTreeMap::new();
    for (name, extents) in &padding.parameters {
        for (&size, &padded) in
            extents.shape().iter().zip(&extents.padded_shape()).filter(|(size, padded)| size != padded)
        {
            sizes.entry((size, padded)).or_default().push(name);
        }
    }
    let words = |((size, padded), names): (&(u64, u64), &Vec<&str>)| match names[..] {
        [only] => format!("{size} -> {padded} ({only})"),
        [first, ..] => format!("{size} -> {padded} ({first} and {} more)", names.len() - 1),
        [] => String::new(),
    };
    sizes.iter().map(words).collect::<Vec<_>>().join(", ")
}

fn write_summary(out: &mut String, plan: &Plan) -> std::fmt::Result {
    write_cluster(out, plan)?;
    write_model(out, plan)?;
    write_batch(out, plan)?;
    write_schedule(out, plan)?;
    write_prediction(out, plan)
}

fn write_cluster(out: &mut String, plan: &Plan) -> std::fmt::Result {
    let devices = plan.cluster.num_devices();
    let of_group = |group: &Group| {
        let device = &group.device;
        format!(
            "{} x {}, {} ({}) each",
            group.num_devices(),
            device.name,
            bytes(device.memory_bytes),
            gibibytes(device.memory_bytes)
        )
    };
    let groups: Vec<String> = plan.cluster.groups.iter().map(of_group).collect();
    writeln!(out, "{} on {} ({})\n", plan.model, plan.cluster.name, groups.join("; "))?;
    let used = plan.num_devices();
    if used < devices {
        let more = match faster(plan) {
            Some(_) => "more are hardly faster",
            None => "no plan found that uses more is faster",
        };
        writeln!(out, "  devices used    {used} of {devices}; {more}")?;
    }
    Ok(())
}

fn write_model(out: &mut String, plan: &Plan) -> std::fmt::Result {
    if let Some(reduction) = &plan.reduction {
        writeln!(out, "  reduced         {}", smaller(reduction))?;
    }
    let (mut elements, mut frozen, mut parameter_bytes, mut tensors) = (0u64, 0u64, 0u64, 0u64);
    let graph = plan.own().0;
    for (v, _) in graph.parameters() {
        elements = elements.saturating_add(graph.ty(v).elements());
        frozen = frozen.saturating_add(if graph.is_frozen(v) { graph.ty(v).elements() } else { 0 });
        parameter_bytes = parameter_bytes.saturating_add(graph.ty(v).bytes());
        tensors += 1;
    }
    let trained = match graph.parameters().any(|(v, _)| graph.is_frozen(v)) {
        true if plan.schedule.trains() => {
            format!("; {} trained, {} frozen", count(elements.saturating_sub(frozen)), count(frozen))
        }
        _ => String::new(),
    };
    writeln!(
        out,
        "  parameters      {} in {}, {}{trained}",
        count(elements),
        plural(tensors, "tensor"),
        bytes(parameter_bytes)
    )?;
    if let Some(padding) = &plan.padding {
        writeln!(out, "  padding         {}", padded(padding))?;
    }
    if let Some(rings) = rings(&plan.graph) {
        writeln!(out, "  attention       {rings}")?;
    }
    if let Some(chunks) = loss_chunks(&plan.graph) {
        writeln!(out, "  logits          in {chunks} chunks, recomputed in the backward pass")?;
    }
    Ok(())
}

/// The batch, who holds the weights, and the loss.
fn write_batch(out: &mut String, plan: &Plan) -> std::fmt::Result {
    let samples = match (plan.graph.batch, plan.num_microbatches) {
        (0, 1) => "as traced, in one microbatch".to_string(),
        (0, n) => format!("as traced, in {n} microbatches"),
        (_, 1) => format!("{} samples in one microbatch", plan.global_batch),
        (_, n) => format!("{} samples in {n} microbatches of {}", plan.global_batch, plan.microbatch),
    };
    writeln!(out, "  global batch    {samples}")?;
    if let Some(over) = &plan.servers {
        let each = plural(plan.microbatches_of_worker().into(), "microbatch");
        let (workers, servers) = (over.workers.len() as u64, over.servers.len() as u64);
        let (workers, servers) = (plural(workers, "worker"), plural(servers, "server"));
        writeln!(
            out,
            "  parameters on   {servers}, which {workers} push gradients to, of {each} each, and pull weights from"
        )?;
        match plan.updates_of_step() {
            1 => writeln!(out, "  updates         one a step, by the gradients of all workers, who wait for it")?,
            n => {
                let late = plural(over.staleness().into(), "update");
                writeln!(out, "  updates         {n} a step, one for each push; gradients are {late} late")?;
            }
        }
    }
    let loss = match plan.loss {
        LossKind::Other if plan.graph.batch == 0 => "of each microbatch as traced (the batch was not found)",
        LossKind::Mean if plan.graph.totals().next().is_some() => "mean weighted over the whole batch",
        LossKind::Mean => "mean over samples",
        LossKind::Sum => "sum over samples",
        LossKind::Other => "neither mean nor sum over samples: each microbatch has its own",
    };
    let task = match (plan.schedule.trains(), plan.goal) {
        (true, _) => format!("loss            {loss}"),
        (false, Goal::Latency) => "task            run, not trained".to_string(),
        (false, Goal::Throughput) => {
            "task            run, not trained, batches following each other without a wait".to_string()
        }
    };
    writeln!(out, "  {task}")
}

fn write_schedule(out: &mut String, plan: &Plan) -> std::fmt::Result {
    let trains = plan.schedule.trains();
    let clip = plan.clip_norm.map(|most| format!(", gradients clipped at norm {most}")).unwrap_or_default();
    let scale = plan.loss_scale.map(|scale| format!(", loss scale {scale}")).unwrap_or_default();
    let pairs = if plan.execution.pairs_passes { ", passes of two microbatches side by side" } else { "" };
    let beside = if plan.execution.overlaps_tensor_parallel { ", gathers and reductions beside products" } else { "" };
    let optimizer = match trains {
        true => format!("{pairs}{beside}; optimizer {}{clip}{scale}", plan.optimizer.name()),
        false => String::new(),
    };
    match (plan.stages.len(), plan.virtual_stages) {
        (1, _) => writeln!(out, "  schedule        {}, one stage{optimizer}", plan.schedule)?,
        (n, 1) => writeln!(out, "  schedule        {} over {n} stages{optimizer}", plan.schedule)?,
        (n, v) => {
            let how = if plan.placement == Placement::V { "in a V" } else { "interleaved" };
            writeln!(
                out,
                "  schedule        {} over {n} stages, {v} on the same devices ({how}){optimizer}",
                plan.schedule
            )?;
        }
    }
    if plan.staleness() > 0 {
        let kept = match (plan.schedule, plan.update) {
            (Schedule::PipeDream, Update::Synchronous) => {
                "no flush between steps; two versions of the weights are held where both are in use"
            }
            (Schedule::PipeDream, Update::Stale) => {
                "no flush between steps, and gradients are reduced while the next step runs; two versions of weights, two sums of gradients"
            }
            _ => "gradients are reduced while the next step runs; two sums of gradients are held",
        };
        writeln!(out, "  gradients       {} late: {kept}", plural(plan.staleness().into(), "step"))?;
    }
    Ok(())
}

fn write_prediction(out: &mut String, plan: &Plan) -> std::fmt::Result {
    if let Some(profile) = &plan.profile {
        writeln!(out, "  predicted by    {profile}")?;
    }
    if plan.target != Target::Altiplano {
        writeln!(out, "  run by          {}, as far as its options and overlap go", plan.target.name())?;
    }
    let p = &plan.predicted;
    let step = if plan.schedule.trains() { "step " } else { "batch" };
    writeln!(
        out,
        "  predicted {step} {} = {} samples/s, {} of the devices' peak (MFU{})",
        seconds(p.step_time_s),
        digits(p.samples_per_s),
        percent(p.mfu),
        if p.mfu_convention == MfuConvention::Full { ", masked attention counted in full" } else { "" }
    )?;
    if let Some(latency_s) = p.latency_s {
        writeln!(out, "  a batch alone   {} from its arrival to its last result", seconds(latency_s))?;
    }
    let step = step.trim_end();
    writeln!(
        out,
        "  lower bound     {} (the {step}'s FLOPs at peak rate; of masked attention what its masks leave)",
        seconds(p.lower_bound_s)
    )?;
    match proven(plan) {
        Some(proven) => writeln!(out, "  shardings       {proven}, by the prices of the search"),
        None => Ok(()),
    }
}

/// The largest optimality gap of the stages' shardings.
fn proven(plan: &Plan) -> Option<String> {
    let gaps: Option<Vec<f64>> = plan.stages.iter().map(|s| s.solved.map(|s| s.gap())).collect();
    let gap = gaps?.into_iter().fold(0.0, f64::max);
    let of = if plan.stages.len() > 1 { " of each stage" } else { "" };
    Some(match gap {
        gap if !gap.is_finite() => return None,
        gap if gap < PROVEN => format!("proven the best in this space{of}"),
        gap => format!("proven within {} of the best in this space{of}", percent(gap)),
    })
}

/// Gaps below this are rounding errors.
const PROVEN: f64 = 1e-6;

fn times(plan: &Plan) -> String {
    let trains = plan.schedule.trains();
    let step = if trains { "step" } else { "batch" };
    // The last two columns are for training only.
    let columns = if trains { 8 } else { 6 };
    let all = ["stage", "compute", "communication", "bubble", step, "forward", "backward", "update"];
    let mut table = Grid::new(&all[..columns]);
    for (i, stage) in plan.stages.iter().enumerate() {
        let p: &StagePredicted = &stage.predicted;
        let cells = [
            format!("stage{i}"),
            seconds(p.compute_s),
            seconds(p.communication_s),
            seconds(p.bubble_s),
            seconds(plan.predicted.step_time_s),
            seconds(p.forward_s),
            seconds(p.backward_s),
            seconds(p.step_s),
        ];
        table.row(cells.into_iter().take(columns));
    }
    for (s, server) in plan.servers.iter().flat_map(|over| &over.predicted).enumerate() {
        let step_s = plan.predicted.step_time_s;
        let waits_s = (step_s - server.compute_s - server.link_s).max(0.0);
        let [compute, link, waits, step] = [server.compute_s, server.link_s, waits_s, step_s].map(seconds);
        let [forward, backward, update] = [String::new(), String::new(), seconds(server.compute_s)];
        table.row([format!("server{s}"), compute, link, waits, step, forward, backward, update]);
    }
    let note = match trains {
        true if plan.servers.is_some() => {
            "  forward and backward are of one microbatch; a worker's update is what it pushes, waits for and pulls"
        }
        true => {
            "  forward and backward are of one microbatch, update is once per step; all three include communication"
        }
        false => "  forward is of one microbatch and includes communication",
    };
    let shared = match plan.virtual_stages {
        1 => "",
        _ => {
            "\n  stages that share devices compute one after the other: bubble is what is left of the step by all of them"
        }
    };
    format!("{}\n{note}{shared}", table.right())
}

fn memory(plan: &Plan) -> String {
    // Columns, and whether each is for training only.
    let columns = [
        ("stage", false),
        ("parameters", false),
        ("gradients", true),
        ("optimizer state", true),
        ("activations", false),
        ("in all", false),
        ("of the device", false),
        ("", false),
    ];
    let shown = |&(_, of_training): &(&str, bool)| plan.schedule.trains() || !of_training;
    let mut table = Grid::new(&columns.iter().filter(|c| shown(c)).map(|c| c.0).collect::<Vec<_>>());
    for (i, stage) in plan.lanes().iter().enumerate() {
        let m = &stage.predicted.memory;
        let limit = plan.usable_bytes(stage);
        let cells = [
            plan.lane_name(i),
            bytes(m.parameters_bytes),
            bytes(m.gradients_bytes),
            bytes(m.optimizer_bytes),
            bytes(m.activations_bytes),
            bytes(stage.predicted.peak_bytes),
            percent(stage.predicted.peak_bytes as f64 / limit.max(1) as f64),
            bar(m, limit),
        ];
        table.row(cells.into_iter().zip(&columns).filter(|(_, c)| shown(c)).map(|(cell, _)| cell));
    }
    for (s, server) in plan.servers.iter().flat_map(|over| &over.predicted).enumerate() {
        let (m, limit) = (&server.memory, plan.cluster.usable_bytes(&plan.cluster.groups[0]));
        let held = [m.parameters_bytes, m.gradients_bytes, m.optimizer_bytes, m.activations_bytes, server.peak_bytes];
        let cells = held.map(bytes).into_iter();
        let cells = std::iter::once(format!("server{s}")).chain(cells);
        table.row(cells.chain([percent(server.peak_bytes as f64 / limit.max(1) as f64), bar(m, limit)]));
    }
    let classes = if plan.schedule.trains() {
        "p parameters, g gradients, o optimizer state, a activations and all else"
    } else {
        "p parameters, a activations and all else"
    };
    let rows = table.right_but_last();
    format!("{rows}\n  {classes}; up to | is what a device has{}{}", usable(plan), in_hosts(plan))
}

/// The memory that tensors can use on each kind of device, and what takes the rest.
fn usable(plan: &Plan) -> String {
    let mut lines: Vec<String> = Vec::new();
    for group in &plan.cluster.groups {
        let (device, [context, communication, allocator]) = (&group.device, plan.cluster.taken_bytes(group));
        let usable_bytes = plan.cluster.usable_bytes(group);
        let terms = [("context", context), ("to communicate", communication), ("kept by the allocator", allocator)];
        let terms = terms.into_iter().filter(|term| term.1 > 0);
        let terms: Vec<String> = terms.map(|(what, taken)| format!("{what} {}", bytes(taken))).collect();
        if terms.is_empty() {
            continue;
        }
        let line = format!(
            "\n  of the {} ({}) of a {} tensors can use {} ({}): {}",
            bytes(device.memory_bytes),
            gibibytes(device.memory_bytes),
            device.name,
            bytes(usable_bytes),
            gibibytes(usable_bytes),
            terms.join(", ")
        );
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.concat()
}

/// Everything that any stage offloads to host memory.
fn offloaded(plan: &Plan) -> Offload {
    let any = |is: &dyn Fn(Offload) -> bool| plan.stages.iter().any(|stage| is(stage.offload));
    Offload { optimizer: any(&|o| o.optimizer), activations: any(&|o| o.activations) }
}

/// The offloaded bytes of devices and nodes; empty if nothing is offloaded.
fn in_hosts(plan: &Plan) -> String {
    let Some((&node, &held)) = of_nodes(plan).iter().max_by_key(|node| node.1) else { return String::new() };
    let has = plan.cluster.groups.iter().enumerate().find(|(g, _)| plan.cluster.devices_of(*g).contains(&node));
    let has =
        has.and_then(|(_, group)| group.host_memory_bytes).map_or(String::new(), |has| format!(" of {}", bytes(has)));
    let each = plan.stages.iter().map(|s| s.predicted.host_bytes).max().unwrap_or(0);
    let what = offloaded(plan).words();
    let (each, held) = (bytes(each), bytes(held));
    format!("\n  in host memory: {each} of {what} for a device, {held}{has} on a node at most")
}

/// A bar of memory by content, scaled to the device's memory; the excess stands behind its end.
fn bar(memory: &Memory, limit: u64) -> String {
    const WIDTH: u64 = 32;
    let classes = [
        ('p', memory.parameters_bytes),
        ('g', memory.gradients_bytes),
        ('o', memory.optimizer_bytes),
        ('a', memory.activations_bytes),
    ];
    let mut line = String::new();
    let mut sum = 0u64;
    for (letter, bytes) in classes {
        sum = sum.saturating_add(bytes);
        // Rounds end positions instead of lengths, so that the bar has its full length; it is at most twice as long as
        // the device's.
        let end = (sum as f64 / limit.max(1) as f64 * WIDTH as f64).round().min(2.0 * WIDTH as f64) as usize;
        line.extend(std::iter::repeat_n(letter, end.saturating_sub(line.len())));
    }
    let width = WIDTH as usize;
    let (inside, beyond) = line.split_at(line.len().min(width));
    format!("{inside:width$}|{beyond}")
}

/// The layouts on the stages of a plan, with lookup tables for describing them.
struct Layouts<'a> {
    plan: &'a Plan,
    words: words::Activations<'a>,
    parameters: BTreeMap<&'a str, ValueId>,
}

/// The lists of stages with equal texts.
struct Listed {
    title: String,
    parameters: String,
    activations: String,
}

impl<'a> Layouts<'a> {
    fn new(plan: &'a Plan) -> Self {
        let parameters = plan.graph.parameters().map(|(v, name)| (name, v)).collect();
        Layouts { plan, words: words::Activations::new(plan), parameters }
    }

    /// The parameters of a stage, by name.
    fn stored<'s>(&'s self, stage: &'s Stage) -> impl Iterator<Item = (ValueId, &'s str, &'s Storage)> {
        stage.parameters.iter().filter_map(|(name, s)| Some((*self.parameters.get(name.as_str())?, name.as_str(), s)))
    }

    fn stages(&self) -> String {
        let plan = self.plan;
        let several = plan.cluster.groups.len() > 1;
        // The column for the kind of device is shown only with several groups.
        let columns = ["stage", "layers", "submesh", "of", "devices", "mesh", "recompute", "storage"];
        let shown = |column: usize| several || columns[column] != "of";
        let mut table = Grid::new(&(0..columns.len()).filter(|&c| shown(c)).map(|c| columns[c]).collect::<Vec<_>>());
        for (i, stage) in plan.stages.iter().enumerate() {
            let levels = self.stored(stage).filter_map(|(v, _, s)| words::level(plan, stage, v, s, self.words.users()));
            let levels: BTreeSet<u8> = levels.collect();
            let zero = match (levels.first(), levels.last()) {
                (Some(&least), Some(&most)) if least < most => {
                    format!("{} to {}, by parameter", sharded(plan.target, least), sharded(plan.target, most))
                }
                (level, _) => match (level.copied().unwrap_or(stage.zero), plan.target) {
                    (0, target) if !target.is_fsdp() => "not sharded (ZeRO-0)".to_string(),
                    (level, target) => sharded(target, level),
                },
            };
            let away = match stage.offload.is_none() {
                true => String::new(),
                false => format!(", {} in host memory", stage.offload.words()),
            };
            let cells = [
                format!("stage{i}"),
                range(stage.layers.start, stage.layers.end),
                format!("{}x{}", stage.submesh.0, stage.submesh.1),
                format!("group{}, {}", stage.group, plan.group_of(stage).device.name),
                match &plan.servers {
                    Some(over) => format!("each of {}", devices(&over.workers)),
                    None => devices(&stage.devices),
                },
                stage.mesh.to_string(),
                stage.recompute.to_string(),
                zero + &away,
            ];
            table.row(cells.into_iter().enumerate().filter(|(c, _)| shown(*c)).map(|(_, cell)| cell));
        }
        table.left()
    }

    /// The lists of all stages, with equal ones under one title.
    fn listed(&self) -> Vec<Listed> {
        let list = |stage: &Stage| (self.of_parameters(stage), self.of_activations(stage));
        let lists: Vec<(String, String)> = self.plan.stages.par_iter().map(list).collect();
        let mut groups: Vec<(Range<usize>, (String, String))> = Vec::new();
        for (i, texts) in lists.into_iter().enumerate() {
            match groups.last_mut() {
                Some((members, same)) if *same == texts => members.end = i + 1,
                _ => groups.push((i..i + 1, texts)),
            }
        }
        let named = |(members, (parameters, activations)): (Range<usize>, (String, String))| {
            let (first, last) = (members.start, members.end - 1);
            let title =
                if first == last { format!("stage{first}") } else { format!("stage{first} to stage{last}, each") };
            Listed { title, parameters, activations }
        };
        groups.into_iter().map(named).collect()
    }

    fn of_parameters(&self, stage: &Stage) -> String {
        let plan = self.plan;
        let mut lines = Lines::default();
        let mut by_value: Vec<_> = self.stored(stage).collect();
        by_value.sort_by_key(|(v, ..)| *v);
        for (v, name, storage) in by_value {
            let layout = words::parameter(plan, stage, v, storage, self.words.users());
            lines.add(name, [plan.graph.ty(v).to_string(), layout, storage.parameter.display(&stage.mesh).to_string()]);
        }
        lines.print(["parameter", "type", "layout", "sharding"])
    }

    fn of_activations(&self, stage: &Stage) -> String {
        let plan = self.plan;
        let mut lines = Lines::default();
        for (&v, value) in &stage.shardings {
            let node = plan.graph.node(v);
            let is_main = (node.op.is_contraction() || matches!(node.op, Op::Gather(_))) && node.ty.rank() > 0;
            if !is_main {
                continue;
            }
            let name = if value.name.is_empty() { &node.name } else { &value.name };
            let name = name.split_once(")/").map_or(name.as_str(), |(_, rest)| rest);
            let name = if name.is_empty() { node.op.name() } else { name };
            let sharding = plan.graph.rule(v).shardings(&value.strategy, &stage.mesh).result;
            lines.add(name, [node.ty.to_string(), self.words.of(v, &sharding, &stage.mesh), value.sharding.clone()]);
        }
        lines.print(["value", "type", "layout", "sharding"])
    }
}

fn alternatives(plan: &Plan) -> String {
    let step = if plan.schedule.trains() { "s/step" } else { "s/batch" };
    let mut table = Grid::new(&["plan", step, "samples/s", "MFU", "GB/device", "fits", "how"]);
    let mut row = |name: &str, predicted: Option<&Predicted>, fits: bool, detail: &str| {
        let number = |f: &dyn Fn(&Predicted) -> String| predicted.map_or("-".to_string(), f);
        table.row([
            name.to_string(),
            number(&|p| digits(p.step_time_s)),
            number(&|p| digits(p.samples_per_s)),
            number(&|p| percent(p.mfu)),
            number(&|p| digits(p.peak_bytes.iter().copied().max().unwrap_or(0) as f64 / 1e9)),
            match predicted {
                None => "-",
                Some(_) if fits => "yes",
                Some(_) => "no",
            }
            .to_string(),
            detail.to_string(),
        ]);
    };
    for Alternative { name, predicted, fits, detail } in &plan.alternatives {
        row(name, predicted.as_ref(), *fits, detail);
    }
    if !plan.alternatives.iter().any(|a| a.name == "chosen") {
        let fits = plan.stages.iter().all(|s| s.predicted.peak_bytes <= plan.usable_bytes(s));
        row("chosen", Some(&plan.predicted), fits, &one_line(plan));
    }
    table.right_but_last()
}

/// The plan in one line: `2 stages of mesh<data=2, tensor=1>, 4 microbatches of 2, 1f1b`. If stages share devices, `4
/// stages of mesh<data=2, tensor=1>, 2 on the same devices, 4 microbatches of 2, 1f1b`.
pub fn one_line(plan: &Plan) -> String {
    let mut meshes: Vec<String> = plan.stages.iter().map(|s| s.mesh.to_string()).collect();
    meshes.dedup();
    let stages = plural(plan.stages.len() as u64, "stage");
    let microbatches = plural(plan.num_microbatches.into(), "microbatch");
    let meshes = meshes.join(" + ");
    let shared = match plan.virtual_stages {
        1 => String::new(),
        v => format!(", {v} on the same devices"),
    };
    let late = if plan.update == Update::Stale { ", stale gradients" } else { "" };
    let over = plan.servers.as_ref().map_or(String::new(), |over| {
        let how = if over.asynchronous { "asynchronous " } else { "" };
        let servers = format!("{how}server{}", if over.servers.len() == 1 { "" } else { "s" });
        format!(" on each of {}, {} {servers}", plural(over.workers.len() as u64, "worker"), over.servers.len())
    });
    format!("{stages} of {meshes}{shared}{over}, {microbatches} of {}, {}{late}", plan.microbatch, plan.schedule)
}

fn range(start: u32, end: u32) -> String {
    if start + 1 == end { start.to_string() } else { format!("{start}-{}", end.saturating_sub(1)) }
}

/// `0-3` or `0, 2`.
fn devices(ids: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &id in ids {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == id => *last = id,
            _ => parts.push((id, id)),
        }
    }
    parts.iter().map(|&(a, b)| range(a, b + 1)).collect::<Vec<_>>().join(", ")
}

/// Merges lines that differ only in a layer's number.
#[derive(Default)]
struct Lines {
    /// By pattern and columns: position and name of the first line, and the number of lines.
    groups: BTreeMap<(String, [String; 3]), (usize, String, usize)>,
}

impl Lines {
    fn add(&mut self, name: &str, columns: [String; 3]) {
        let position = self.groups.len();
        let group = self.groups.entry((pattern(name), columns)).or_insert((position, name.to_string(), 0));
        group.2 += 1;
    }

    fn print(&self, header: [&str; 4]) -> String {
        let mut ordered: Vec<_> = self.groups.iter().collect();
        ordered.sort_by_key(|(_, (position, ..))| *position);
        let mut table = Grid::new(&header);
        for ((pattern, columns), (_, name, count)) in ordered {
            let name = if *count == 1 { name.clone() } else { format!("{pattern} x {count}") };
            let [ty, layout, sharding] = columns.clone();
            table.row([name, ty, layout, sharding]);
        }
        table.left()
    }
}

/// Replaces the first number of a name, which is a layer's, by `*`: `params['h*']['fc']['w']`.
pub(crate) fn pattern(name: &str) -> String {
    let Some(start) = name.find(|c: char| c.is_ascii_digit()) else { return name.to_string() };
    let rest = name[start..].trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{}*{rest}", &name[..start])
}

/// A table without rules, indented by two spaces.
pub(crate) struct Grid(Table);

impl Grid {
    pub(crate) fn new(header: &[&str]) -> Self {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(header);
        Grid(table)
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.add_row(cells.into_iter().collect::<Vec<_>>());
    }

    pub(crate) fn left(self) -> String {
        self.aligned(0)
    }

    /// Aligns all columns but the first to the right.
    pub(crate) fn right(mut self) -> String {
        let columns = self.0.column_count();
        self.aligned(columns)
    }

    pub(crate) fn right_but_last(mut self) -> String {
        let columns = self.0.column_count();
        self.aligned(columns.saturating_sub(1))
    }

    fn aligned(mut self, right_until: usize) -> String {
        for (i, column) in self.0.column_iter_mut().enumerate() {
            column.set_padding((if i == 0 { 2 } else { 1 }, 1));
            column.set_cell_alignment(if i > 0 && i < right_until {
                CellAlignment::Right
            } else {
                CellAlignment::Left
            });
        }
        self.0.lines().map(|line| line.trim_end().to_string()).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_what_is_held() {
        let of = |p: u64, g: u64, o: u64, a: u64| {
            let memory = Memory { parameters_bytes: p, gradients_bytes: g, optimizer_bytes: o, activations_bytes: a };
            bar(&memory, 320)
        };
        assert_eq!(
            of(80, 40, 80, 40),
            format!("{}{}{}{}        |", "p".repeat(8), "g".repeat(4), "o".repeat(8), "a".repeat(4))
        );
        assert_eq!(of(320, 0, 0, 100), format!("{}|{}", "p".repeat(32), "a".repeat(10)));
        assert_eq!(of(0, 0, 0, 0), format!("{}|", " ".repeat(32)));
    }

    #[test]
    fn only_the_layer_number_is_left_out() {
        assert_eq!(pattern("params['h003']['ln2']['g']"), "params['h*']['ln2']['g']");
        assert_eq!(pattern("wte"), "wte");
        assert_eq!(devices(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
    }
}
