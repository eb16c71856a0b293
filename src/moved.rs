//! What moved from one plan to another: of two plans of one model, or of a model that was changed, on the same cluster or what is
//! left of it.

use crate::units::{bytes, digits, plural, seconds};
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

/// The difference in words, a line each.
pub fn moved(old: &Plan, new: &Plan) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let mut say = |what: &str, text: String| {
        let _ = writeln!(out, "  {what:<15} {text}");
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
