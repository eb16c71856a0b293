//! Prints a sweep over numbers of nodes as a table with its interpretation, and as JSON.

use crate::report::Grid;
use crate::scale::{
    BatchRow, Change, Exchange, Growth, Named, Point, Recommended, Row, Rule, Scaling, Training, around, batch_rows,
    batch_text, batch_warning, practice_lines,
};
use crate::units::{bytes, count, digits, duration, percent, plural, seconds};
use serde_json::{Value, json};

/// Minimum efficiency that counts as scaling.
const SCALES: f64 = 0.8;

/// Differences of efficiency below this are ignored.
const ALIKE: f64 = 0.01;

fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", bytes(bytes_per_s as u64))
}

/// The complete sweep in words.
pub fn scaling_text(scaling: &Scaling) -> String {
    let question = &scaling.question;
    let what = match question.growth {
        Growth::Weak => "the batch grows with the nodes (weak scaling)",
        Growth::Strong => "the batch stays (strong scaling)",
    };
    let mut out = vec![format!("{} on nodes of {}: {what}\n", scaling.model, scaling.cluster), table(scaling)];
    if scaling.stopped {
        out.push("  the search was stopped: these are the best plans found by then, of the counts begun".to_string());
    }
    let meaning = meaning(scaling);
    if !meaning.is_empty() {
        out.push(String::from("\nWhat it means"));
        out.extend(meaning.into_iter().map(|line| format!("  {line}")));
    }
    if let Some(first) = scaling.exchanges.first() {
        out.push(format!("\nExchanging gradients on {}", plural(first.nodes.into(), "node")));
        out.push(exchange_table(&scaling.exchanges));
        out.extend(exchange_lines(scaling).into_iter().map(|line| format!("  {line}")));
    }
    if question.noise_scale.is_some() || question.base_rate.is_some() {
        out.push(String::from("\nBatches"));
        out.push(batch_text(&batches(scaling), question.noise_scale, question.base_rate));
    }
    let advice = advice(scaling);
    if !advice.is_empty() {
        out.push(String::from("\nLearning rate"));
        out.extend(advice.into_iter().map(|line| format!("  {line}")));
    }
    out.join("\n")
}

fn table(scaling: &Scaling) -> String {
    let trains = scaling.question.length.is_some();
    let some = |has: &dyn Fn(&Training) -> bool| points(scaling).any(|(_, p)| p.training.as_ref().is_some_and(has));
    let (priced, powered) = (some(&|t| t.price.is_some()), some(&|t| t.kwh.is_some()));
    let fed = points(scaling).any(|(_, p)| p.input.is_some());
    let queued = some(&|t| t.wait_hours.is_some());
    let mut columns = vec!["nodes", "devices", "batch", "a device", "s/step", "samples/s", "MFU", "efficiency"];
    columns.extend(fed.then_some("fed"));
    if trains {
        columns.extend(["steps", "time"]);
        columns.extend(queued.then_some(["wait", "done after"]).into_iter().flatten());
        columns.push("device-hours");
        columns.extend(priced.then_some("price"));
        columns.extend(powered.then_some("kWh"));
    }
    columns.push("most goes to");
    let mut table = Grid::new(&columns);
    for Row { nodes, devices, plan, point } in &scaling.rows {
        let head = [nodes.to_string(), devices.to_string()];
        let Some(p) = point else {
            let none = std::iter::repeat_n("-".to_string(), columns.len() - 3);
            let why = plan.as_ref().err().map(ToString::to_string).unwrap_or_default();
            table.row(head.into_iter().chain(none).chain([why]));
            continue;
        };
        let mut cells = vec![p.global_batch.to_string(), digits(p.local_batch), digits(p.step_time_s)];
        cells.extend([digits(p.samples_per_s), percent(p.mfu), percent(p.efficiency)]);
        cells.extend(fed.then(|| p.input.map_or("-".to_string(), |input| percent(input.utilisation))));
        if let Some(t) = &p.training {
            let mark = if p.on_front { "" } else { " (beaten)" };
            cells.extend([digits(t.steps), duration(t.hours)]);
            if queued {
                cells.extend([t.wait_hours.map_or("-".to_string(), duration), duration(t.done_hours())]);
            }
            cells.push(format!("{}{mark}", digits(t.device_hours)));
            cells.extend(priced.then(|| t.price.map_or("-".to_string(), digits)));
            cells.extend(powered.then(|| t.kwh.map_or("-".to_string(), digits)));
        }
        cells.push(limit(p));
        table.row(head.into_iter().chain(cells));
    }
    table.right_but_last()
}

pub(super) fn points(scaling: &Scaling) -> impl DoubleEndedIterator<Item = (u32, &Point)> {
    scaling.rows.iter().filter_map(|row| Some((row.nodes, row.point.as_ref()?)))
}

/// The two largest parts of a sample's device-seconds.
pub(super) fn limit(point: &Point) -> String {
    let parts = point.parts.iter().take(2).map(|s| format!("{} {}", s.what, percent(s.part)));
    parts.collect::<Vec<_>>().join(", ")
}

/// The interpretation of the table, one statement per line.
pub(super) fn meaning(scaling: &Scaling) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(Recommended { nodes, rule }) = scaling.recommended
        && let Some((point, training)) =
            points(scaling).find(|p| p.0 == nodes).and_then(|(_, p)| Some((p, p.training?)))
    {
        lines.push(advised(scaling, nodes, rule, point, &training));
        let front: Vec<String> =
            points(scaling).filter(|(_, p)| p.on_front).map(|(nodes, _)| nodes.to_string()).collect();
        lines.push(format!("no count beats {} nodes in both time and device-hours", front.join(", ")));
        if let Some(hours) = training.formula_hours {
            let factor = if point.recomputed { "8" } else { "6" };
            lines.push(format!(
                "by {factor} T P / (n X) of {} parameters it is {} (Narayanan et al. 2021, of dense transformers, at the rate predicted here)",
                count(scaling.parameters),
                duration(hours)
            ));
        }
    }
    lines.extend(queued(scaling));
    lines.extend(named(scaling));
    lines.extend(limits(scaling));
    lines.extend(fewer(scaling));
    lines.extend(above_one(scaling));
    lines.extend(storage(scaling));
    lines.extend(small_batches(scaling));
    let in_epoch = scaling.question.length.and_then(|length| length.in_epoch);
    let largest = points(scaling).map(|(_, p)| p.global_batch).max();
    lines.extend(largest.and_then(|batch| batch_warning(batch, in_epoch)));
    lines
}

/// Conventional plans without a search, beside the plan for the same number of nodes.
fn named(scaling: &Scaling) -> Vec<String> {
    let line = |named: &Named| {
        let (_, point) = points(scaling).find(|(nodes, _)| *nodes == named.nodes)?;
        let times = digits(named.step_time_s / point.step_time_s);
        let (nodes, takes) = (plural(named.nodes.into(), "node"), seconds(named.step_time_s));
        Some(format!(
            "on {nodes} the rule of thumb takes {takes} a step, {times} times as long ({}: {})",
            named.name, named.how
        ))
    };
    scaling.named.iter().filter_map(line).collect()
}

/// The source of the waits for nodes, and the numbers of nodes at which they cost more time than the nodes save.
fn queued(scaling: &Scaling) -> Vec<String> {
    let Some(waits) = &scaling.question.queue_waits else { return Vec::new() };
    let between: Vec<String> =
        points(scaling).filter(|(nodes, _)| waits.is_between(*nodes)).map(|(nodes, _)| nodes.to_string()).collect();
    let mut lines = Vec::new();
    if !between.is_empty() {
        let between = between.join(", ");
        lines.push(format!("the wait for {between} nodes is read off a line between rows of --queue-waits"));
    }
    let done = points(scaling).filter_map(|(nodes, p)| Some((nodes, p.training?.done_hours())));
    let done: Vec<(u32, f64)> = done.collect();
    let soonest = done.iter().min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    if let Some(&(nodes, hours)) = soonest
        && let Some((more, after)) = done.last().filter(|last| last.0 > nodes)
    {
        lines.push(format!(
            "waiting for more than {} takes longer than it saves: done after {} there, after {} on {more}",
            plural(nodes.into(), "node"),
            duration(hours),
            duration(*after)
        ));
    }
    lines
}

fn exchange_table(exchanges: &[Exchange]) -> String {
    let mut table = Grid::new(&["way", "s/step", "staleness", "workers", "how"]);
    for way in exchanges {
        let cells = [way.name.to_string(), digits(way.step_time_s), digits(way.staleness), way.workers.to_string()];
        table.row(cells.into_iter().chain([way.how.clone()]));
    }
    table.right_but_last()
}

/// The assumptions behind the table of exchanges.
pub(super) fn exchange_lines(scaling: &Scaling) -> Vec<String> {
    let mut lines = vec![
        "staleness is in updates, on average: workers that wait for none are as many behind as there are others; what that costs in steps is not priced"
            .to_string(),
    ];
    lines.push(match scaling.question.jitter {
        0.0 => "all steps of workers take as long; --jitter says by how much they differ".to_string(),
        jitter => format!(
            "steps of workers differ by {} of what they compute: who waits for all takes as long as the slowest of normal ones is expected to (Tippett 1925), others the mean",
            percent(jitter)
        ),
    });
    if scaling.exchanges.iter().any(|way| way.servers.is_some()) {
        lines.push(
            "servers are as many as make the shortest step; what all workers send at once shares the servers' network cards (incast)"
                .to_string(),
        );
    }
    lines
}

fn advised(scaling: &Scaling, nodes: u32, rule: Rule, point: &Point, training: &Training) -> String {
    let nodes = plural(nodes.into(), "node");
    let waited = training
        .wait_hours
        .filter(|hours| *hours > 0.0)
        .map(|hours| format!(" and {} of waiting for them", duration(hours)));
    let trains = format!("{}{}", duration(training.hours), waited.unwrap_or_default());
    let takes = format!("{trains}, {} device-hours, {}", digits(training.device_hours), point.how);
    let within = scaling.question.max_hours.map(duration).unwrap_or_default();
    match rule {
        Rule::WithinHours => {
            format!("within {within}: {nodes}, with the fewest device-hours of those done by then ({takes})")
        }
        Rule::Fastest => format!("none is done within {within}; {nodes} come nearest ({takes})"),
        Rule::Knee => format!(
            "{nodes}: the knee, where time x device-hours is least (Eager, Zahorjan and Lazowska 1989) ({takes})"
        ),
    }
}

/// The largest number of nodes that still scales, and the bottleneck beyond it.
fn limits(scaling: &Scaling) -> Option<String> {
    let mut all = points(scaling);
    let (first, _) = all.next()?;
    let (last, at_last) = all.next_back()?;
    let scales = |(_, p): &(u32, &Point)| p.efficiency >= SCALES;
    let until = points(scaling).take_while(scales).last().map_or(first, |(nodes, _)| nodes);
    let lost = |change: &Change| format!("{} of what is lost goes to {}", percent(change.part), change.what);
    match &at_last.change {
        _ if until == last && at_last.efficiency >= 1.0 - ALIKE => {
            Some(format!("a device does as much on {last} nodes as on {}", plural(first.into(), "node")))
        }
        Some(change) if until == last => Some(format!(
            "up to {last} nodes a device does at least {} of what it does on {first}; {}",
            percent(SCALES),
            lost(change)
        )),
        Some(change) => Some(format!(
            "beyond {} a device does less than {} of what it does on {first}: on {last} nodes {}, and {}",
            plural(until.into(), "node"),
            percent(SCALES),
            percent(at_last.efficiency),
            lost(change)
        )),
        None => None,
    }
}

/// Numbers of nodes of which some are unused.
fn fewer(scaling: &Scaling) -> Vec<String> {
    let line = |(nodes, p): (u32, &Point)| {
        let own = scaling.rows.iter().find(|row| row.nodes == nodes).map(|row| &row.plan)?;
        let why = match own {
            Err(failure) => format!("there is no plan for all of them ({failure})"),
            Ok(_) => "no plan found for more of them is faster".to_string(),
        };
        (p.nodes_used < nodes).then(|| format!("{nodes} nodes: {} used, the rest idle; {why}", p.nodes_used))
    };
    points(scaling).filter_map(line).collect()
}

/// The reason why efficiency exceeds one, if it does.
fn above_one(scaling: &Scaling) -> Vec<String> {
    let Some((first, base)) = points(scaling).next() else { return Vec::new() };
    let line = |(nodes, p): (u32, &Point)| {
        let change = p.change.as_ref().filter(|_| p.efficiency > 1.0 + ALIKE)?;
        let again = if base.recomputed && !p.recomputed { ", since nothing is computed again" } else { "" };
        Some(format!(
            "{nodes} nodes: a device does more than on {first}: a sample takes {} device-seconds less of {}{again} ({} here, {} there)",
            digits(-change.device_s),
            change.what,
            p.how,
            base.how
        ))
    };
    points(scaling).filter_map(line).collect()
}

/// The nodes at which storage is the bottleneck, or a statement that it is not.
fn storage(scaling: &Scaling) -> Vec<String> {
    let fed = || points(scaling).filter_map(|(nodes, p)| Some((nodes, p.input?)));
    let Some((most, at_most)) = fed().next_back() else { return Vec::new() };
    let Some((nodes, input)) = fed().find(|(_, input)| input.is_bound()) else {
        return vec![format!(
            "storage limits nothing: on {most} nodes {} are read of {}",
            rate(at_most.needed_bytes_per_s),
            rate(at_most.given_bytes_per_s)
        )];
    };
    let mut line = format!(
        "storage limits {} and more: devices train {} of the time there, since {} gives {} of {}",
        plural(nodes.into(), "node"),
        percent(input.utilisation),
        input.limit,
        rate(input.given_bytes_per_s),
        rate(input.needed_bytes_per_s)
    );
    let Some(staged) = input.staged else { return vec![line] };
    let share = match (staged.node_bytes, staged.copy_s) {
        (Some(bytes_each), Some(copy_s)) => {
            format!(" ({} a node, copied once in {})", bytes(bytes_each as u64), duration(copy_s / 3600.0))
        }
        _ => " (if a node's share fits there)".to_string(),
    };
    line.push_str(&match (input.staging_helps(), staged.fits) {
        (true, _) => format!("; on the nodes' own disks it does not{share}"),
        (_, Some(false)) => format!("; a node's share does not fit on its disks{share}"),
        _ => format!("; from the nodes' own disks they train {}{share}", percent(staged.utilisation)),
    });
    vec![line]
}

/// The first number of nodes whose devices have too few samples to be busy.
fn small_batches(scaling: &Scaling) -> Option<String> {
    const BUSY: f64 = 0.7;
    let known: Vec<(f64, f64)> =
        points(scaling).map(|(_, p)| (p.local_batch, p.mfu)).chain(scaling.larger_batch).collect();
    points(scaling).find_map(|(nodes, p)| {
        let larger = known.iter().filter(|(batch, _)| *batch > p.local_batch * 1.5);
        let (batch, mfu) = larger.max_by(|a, b| a.1.total_cmp(&b.1))?;
        (p.mfu < BUSY * mfu && !p.input.is_some_and(|input| input.is_bound())).then(|| {
            format!(
                "from {} on the batch is too small to keep devices busy: {} samples on each reach an MFU of {}, {} reach {}",
                plural(nodes.into(), "node"),
                digits(p.local_batch),
                percent(p.mfu),
                digits(*batch),
                percent(*mfu)
            )
        })
    })
}

/// The batches of the rows, or batches around the only one.
pub(super) fn batches(scaling: &Scaling) -> Vec<BatchRow> {
    let mut all: Vec<u64> = points(scaling).map(|(_, p)| p.global_batch).collect();
    all.sort_unstable();
    all.dedup();
    if let [one] = all[..] {
        all = around(one);
    }
    batch_rows(&all, scaling.question.noise_scale, scaling.question.base_rate)
}

/// Customary practice with the optimizer, if something is trained.
pub(super) fn advice(scaling: &Scaling) -> Vec<String> {
    let largest = batches(scaling).iter().map(|row| row.batch).max();
    match largest.filter(|_| !scaling.exchanges.is_empty()) {
        Some(largest) => practice_lines(largest, scaling.question.base_rate, &scaling.optimizer),
        None => Vec::new(),
    }
}

/// The sweep as JSON (`docs/scale.schema.json`).
pub fn scaling_json(scaling: &Scaling) -> Value {
    let row = |row: &Row| {
        json!({
            "nodes": row.nodes,
            "devices": row.devices,
            "point": row.point,
            "why": row.plan.as_ref().err().map(ToString::to_string),
        })
    };
    json!({
        "format": "altiplano.scale",
        "version": 1,
        "model": scaling.model,
        "cluster": scaling.cluster,
        "growth": scaling.question.growth,
        "parameters": scaling.parameters,
        "stopped": scaling.stopped,
        "rows": scaling.rows.iter().map(row).collect::<Vec<_>>(),
        "recommended": scaling.recommended,
        "named": scaling.named,
        "jitter": scaling.question.jitter,
        "exchanges": scaling.exchanges,
        "batches": batches(scaling),
        "practice": advice(scaling),
        "meaning": meaning(scaling),
    })
}
