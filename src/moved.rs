//! What moved from one plan to another: of two plans of one model, or of a model that was changed, on the same cluster or what is
//! left of it.

use crate::report::words::parameter;
use crate::report::{Grid, pattern};
use crate::units::{bytes, count, digits, plural, seconds};
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::{Plan, Stage, Storage};
use altiplano_planner::lost::shape;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Where a plan keeps a parameter: the devices of its stages, and the layouts there in words.
fn places<'a>(plan: &'a Plan) -> BTreeMap<&'a str, (u64, Vec<(&'a Stage, &'a Storage)>)> {
    let values: Vec<(ValueId, &str)> = plan.graph.parameters().collect();
    let of = |(v, name): (ValueId, &'a str)| {
        let kept = plan.stages.iter().filter_map(|s| Some((s, s.parameters.get(name)?))).collect();
        (name, (plan.graph.ty(v).bytes(), kept))
    };
    values.into_iter().map(of).collect()
}

/// How a stage lays out a parameter: its meshes' axes are named by what they do, so the text says all.
fn layout((stage, storage): &(&Stage, &Storage)) -> String {
    let of = |s: &altiplano_ir::sharding::Sharding| s.display(&stage.mesh).to_string();
    format!("{} {} {} on {}", of(&storage.parameter), of(&storage.gradient), of(&storage.state), stage.mesh)
}

/// What two plans are for, where it is not the same: seconds of one then say little of the other.
pub fn posed_differently(one: &Plan, other: &Plan) -> Vec<String> {
    let optimizer = |p: &Plan| match p.schedule.trains() {
        true => p.optimizer.name().to_string(),
        false => "none, it is run and not trained".to_string(),
    };
    let elements = |p: &Plan| p.graph.parameters().fold(0u64, |n, (v, _)| n.saturating_add(p.graph.ty(v).elements()));
    let of = |p: &Plan| {
        [
            ("model", p.model.clone()),
            ("parameters", count(elements(p))),
            ("cluster", p.cluster.name.clone()),
            ("devices", p.cluster.num_devices().to_string()),
            ("global batch", p.global_batch.to_string()),
            ("optimizer", optimizer(p)),
            ("target", p.target.name().to_string()),
        ]
    };
    let pairs = of(one).into_iter().zip(of(other));
    pairs.filter(|(a, b)| a.1 != b.1).map(|(a, b)| format!("{}: {} and {}", a.0, a.1, b.1)).collect()
}

/// The layouts that differ, of parameters and of what matmuls and lookups give, alike layers in one line; empty where none do.
pub fn layouts(names: [&str; 2], one: &Plan, other: &Plan) -> String {
    const SHOWN: usize = 24;
    let mut lines: BTreeMap<(String, String, String), (usize, String, usize)> = BTreeMap::new();
    let mut add = |name: &str, a: &str, b: &str| {
        let position = lines.len();
        let key = (pattern(name), a.to_string(), b.to_string());
        lines.entry(key).or_insert((position, name.to_string(), 0)).2 += 1;
    };
    let (a, b) = (kept_in_words(one), kept_in_words(other));
    for (name, a) in &a {
        if let Some(b) = b.get(name).filter(|b| *b != a) {
            add(name, a, b);
        }
    }
    // Nodes have no names that are theirs alone; those of one model are the same in the same places.
    let of = |p: &Plan| p.graph.values().map(|v| p.graph.node(v).op.name()).collect::<Vec<_>>();
    if of(one) == of(other) {
        for v in one.graph.values().filter(|&v| one.graph.node(v).op.is_contraction()) {
            let text = |p: &Plan| {
                let stage = p.stages.iter().find(|s| s.shardings.contains_key(&v))?;
                Some(stage.shardings[&v].sharding.clone())
            };
            if let (Some(a), Some(b)) = (text(one), text(other))
                && a != b
            {
                let node = one.graph.node(v);
                add(if node.name.is_empty() { node.op.name() } else { &node.name }, &a, &b);
            }
        }
    }
    let mut ordered: Vec<_> = lines.into_iter().collect();
    ordered.sort_by_key(|(_, (position, ..))| *position);
    if ordered.is_empty() {
        return String::new();
    }
    let mut table = Grid::new(&["value", names[0], names[1]]);
    let more = ordered.len().saturating_sub(SHOWN);
    for ((pattern, a, b), (_, name, count)) in ordered.into_iter().take(SHOWN) {
        table.row([if count == 1 { name } else { format!("{pattern} x {count}") }, a, b]);
    }
    let more = if more > 0 { format!("\n  and {}", plural(more as u64, "more line")) } else { String::new() };
    format!("{}{more}", table.left())
}

/// How each parameter is kept, in words; how large the axes are stages say.
fn kept_in_words(plan: &Plan) -> BTreeMap<&str, String> {
    let users = plan.graph.users();
    let words = |(v, name): (ValueId, &str)| {
        let on = |s: &Stage| {
            let storage = s.parameters.get(name)?;
            Some(parameter(plan, s, v, storage, &users))
        };
        let mut texts: Vec<String> = plan.stages.iter().filter_map(on).collect();
        texts.dedup();
        texts.join("; ")
    };
    plan.graph.parameters().map(|(v, name)| (name, words((v, name)))).collect()
}

/// The stages of each plan, neighbours that are alike in one line; empty where they are the same.
pub fn stages(names: [&str; 2], one: &Plan, other: &Plan) -> String {
    let of = |p: &Plan| {
        let mut lines: Vec<(usize, usize, [String; 4])> = Vec::new();
        for (i, s) in p.stages.iter().enumerate() {
            let layers = plural(u64::from(s.layers.end - s.layers.start), "layer");
            let devices = format!("{} x {}", s.devices.len(), p.group_of(s).device.name);
            let like = [layers, devices, s.mesh.to_string(), if s.recompute { "full" } else { "none" }.to_string()];
            match lines.last_mut() {
                Some((_, last, same)) if *same == like => *last = i,
                _ => lines.push((i, i, like)),
            }
        }
        lines
    };
    let all = [of(one), of(other)];
    if all[0] == all[1] {
        return String::new();
    }
    let mut table = Grid::new(&["plan", "stage", "each of", "on", "mesh", "recompute"]);
    for (name, lines) in names.iter().zip(all) {
        for (first, last, cells) in lines {
            let stage = if first == last { format!("stage{first}") } else { format!("stage{first}-{last}") };
            table.row([name.to_string(), stage].into_iter().chain(cells));
        }
    }
    table.left()
}

/// The difference in words, a line each.
pub fn moved(old: &Plan, new: &Plan) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let mut say = |what: &str, text: String| {
        let _ = writeln!(out, "  {what:<16} {text}");
    };
    let (was, is) = (&old.predicted, &new.predicted);
    say("step", format!("{} -> {}", seconds(was.step_time_s), seconds(is.step_time_s)));
    say(
        "samples/s",
        format!(
            "{} -> {} ({} times as many)",
            digits(was.samples_per_s),
            digits(is.samples_per_s),
            digits(is.samples_per_s / was.samples_per_s)
        ),
    );
    let differ = |what: &str, a: String, b: String, say: &mut dyn FnMut(&str, String)| {
        if a != b {
            say(what, format!("{a} -> {b}"));
        }
    };
    differ("model", old.model.clone(), new.model.clone(), &mut say);
    differ("cluster", old.cluster.name.clone(), new.cluster.name.clone(), &mut say);
    differ("global batch", old.global_batch.to_string(), new.global_batch.to_string(), &mut say);
    differ("schedule", old.schedule.to_string(), new.schedule.to_string(), &mut say);
    differ("stages", shape(old), shape(new), &mut say);
    let peak = |p: &Plan| bytes(p.predicted.peak_bytes.iter().copied().max().unwrap_or(0));
    differ("fullest device", peak(old), peak(new), &mut say);
    out.push_str(&placed(old, new));
    out
}

/// Which parameters are elsewhere, laid out anew, new or gone, a line each.
pub fn placed(old: &Plan, new: &Plan) -> String {
    let mut out = String::new();
    let mut say = |what: &str, text: String| {
        let _ = writeln!(out, "  {what:<16} {text}");
    };
    let (before, after) = (places(old), places(new));
    let (mut devices, mut layouts, mut stay) = ((0u64, 0u64), (0u64, 0u64), 0u64);
    for (name, (size, kept)) in &after {
        let Some((_, was)) = before.get(name) else { continue };
        let on = |kept: &[(&Stage, &Storage)]| kept.iter().flat_map(|(s, _)| s.devices.clone()).collect::<Vec<_>>();
        let as_laid = |kept: &[(&Stage, &Storage)]| kept.iter().map(layout).collect::<Vec<_>>();
        if on(was) != on(kept) {
            devices = (devices.0 + 1, devices.1 + size);
        } else if as_laid(was) != as_laid(kept) {
            layouts = (layouts.0 + 1, layouts.1 + size);
        } else {
            stay += 1;
        }
    }
    let added = after.keys().filter(|name| !before.contains_key(*name)).count() as u64;
    let gone = before.keys().filter(|name| !after.contains_key(*name)).count() as u64;
    let tensors = |(count, size): (u64, u64)| format!("{}, {}", plural(count, "parameter"), bytes(size));
    if devices.0 > 0 {
        say("to other devices", tensors(devices));
    }
    if layouts.0 > 0 {
        say("laid out anew", tensors(layouts));
    }
    if added > 0 {
        say("new", plural(added, "parameter"));
    }
    if gone > 0 {
        say("gone", plural(gone, "parameter"));
    }
    say("as before", plural(stay, "parameter"));
    out.trim_end().to_string()
}
