//! The difference between two plans of one model, or of a changed model, on the same cluster or on what is left of it.

use crate::report::words::parameter;
use crate::report::{Grid, pattern};
use crate::units::{bytes, count, digits, plural, seconds};
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::{Plan, Stage, Storage};
use altiplano_planner::explain::alternatives::shape;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// The placement of each parameter: its devices, and its layouts there in words.
fn places<'a>(plan: &'a Plan) -> BTreeMap<&'a str, (u64, Vec<(&'a Stage, &'a Storage)>)> {
    let values: Vec<(ValueId, &str)> = plan.graph.parameters().collect();
    let of = |(v, name): (ValueId, &'a str)| {
        let kept = plan.stages.iter().filter_map(|s| Some((s, s.parameters.get(name)?))).collect();
        (name, (plan.graph.ty(v).bytes(), kept))
    };
    values.into_iter().map(of).collect()
}

/// A stage's layout of a parameter. Mesh axes are named by their purpose, so the text is complete.
fn layout((stage, storage): &(&Stage, &Storage)) -> String {
    let of = |s: &altiplano_ir::sharding::Sharding| s.display(&stage.mesh).to_string();
    format!("{} {} {} on {}", of(&storage.parameter), of(&storage.gradient), of(&storage.state), stage.mesh)
}

/// The delay of a plan's gradients.
fn late(plan: &Plan) -> String {
    match plan.updates_of_step() {
        1 => format!("{} steps late", plan.staleness()),
        updates => format!("{} updates late", updates - 1),
    }
}

/// The parameter servers of a plan: `none`, `2 for 6 workers`, `2 asynchronous for 6 workers`.
fn servers(plan: &Plan) -> String {
    plan.servers.as_ref().map_or("none".to_string(), |over| {
        let how = if over.asynchronous { " asynchronous" } else { "" };
        format!("{}{how} for {}", over.servers.len(), plural(over.workers.len() as u64, "worker"))
    })
}

/// Differences between the problems of two plans, which make their step times incomparable.
pub(crate) fn posed_differently(one: &Plan, other: &Plan) -> Vec<(&'static str, [String; 2])> {
    let optimizer = |p: &Plan| match p.schedule.trains() {
        true => match p.clip_norm {
            Some(most) => format!("{}, clipped at {most}", p.optimizer.name()),
            None => p.optimizer.name().to_string(),
        },
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
            ("gradients", late(p)),
            ("target", p.target.name().to_string()),
        ]
    };
    let pairs = of(one).into_iter().zip(of(other));
    pairs.filter(|(a, b)| a.1 != b.1).map(|(a, b)| (a.0, [a.1, b.1])).collect()
}

/// Values that two plans lay out differently, grouped over equal layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LayoutsDiffer {
    /// A name, or the pattern of several.
    pub value: String,
    pub count: usize,
    /// The layout in each plan: in words for parameters, as shardings for results of ops.
    pub layouts: [String; 2],
}

/// The layouts that differ, of parameters and of the results of matmuls and lookups, in the order of the model.
pub(crate) fn layouts(one: &Plan, other: &Plan) -> Vec<LayoutsDiffer> {
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
    // Node names are not unique, but equal models have equal nodes in the same places.
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
    let line = |((pattern, a, b), (_, name, count)): ((String, String, String), (usize, String, usize))| {
        LayoutsDiffer { value: if count == 1 { name } else { pattern }, count, layouts: [a, b] }
    };
    ordered.into_iter().map(line).collect()
}

/// [`layouts`] as a table; empty if none differ.
pub(crate) fn layouts_table(names: [&str; 2], differ: &[LayoutsDiffer]) -> String {
    const SHOWN: usize = 24;
    if differ.is_empty() {
        return String::new();
    }
    let mut table = Grid::new(&["value", names[0], names[1]]);
    let more = differ.len().saturating_sub(SHOWN);
    for LayoutsDiffer { value, count, layouts: [a, b] } in &differ[..differ.len() - more] {
        let value = if *count == 1 { value.clone() } else { format!("{value} x {count}") };
        table.row([value, a.clone(), b.clone()]);
    }
    let more = if more > 0 { format!("\n  and {}", plural(more as u64, "more line")) } else { String::new() };
    format!("{}{more}", table.left())
}

/// The storage of each parameter in words. The stages give the sizes of axes.
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

/// The stages of each plan, with equal adjacent ones on one line; empty if all are the same.
pub(crate) fn stages(names: [&str; 2], one: &Plan, other: &Plan) -> String {
    let of = |p: &Plan| {
        let mut lines: Vec<(usize, usize, [String; 4])> = Vec::new();
        for (i, s) in p.stages.iter().enumerate() {
            let layers = plural(u64::from(s.layers.end - s.layers.start), "layer");
            let devices = format!("{} x {}", s.devices.len(), p.group_of(s).device.name);
            let away =
                if s.offload.is_none() { String::new() } else { format!(", {} in host memory", s.offload.words()) };
            let like = [layers, devices, s.mesh.to_string(), s.recompute.to_string() + &away];
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

/// Describes the difference in words, one aspect per line.
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
    differ("goal", old.goal.name().to_string(), new.goal.name().to_string(), &mut say);
    differ("updates", old.update.name().to_string(), new.update.name().to_string(), &mut say);
    differ("servers", servers(old), servers(new), &mut say);
    differ("stages", shape(old), shape(new), &mut say);
    let peak = |p: &Plan| bytes(p.predicted.peak_bytes.iter().copied().max().unwrap_or(0));
    differ("fullest device", peak(old), peak(new), &mut say);
    let _ = write!(out, "{}", Moves::new(old, new));
    out
}

/// A number of parameters, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tensors {
    pub count: u64,
    pub bytes: u64,
}

impl Tensors {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The parameters that move between two plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Moves {
    pub to_other_devices: Tensors,
    /// On the same devices, in other layouts.
    pub laid_out_anew: Tensors,
    pub new: Tensors,
    pub gone: Tensors,
    pub as_before: Tensors,
}

impl Moves {
    pub(crate) fn new(old: &Plan, new: &Plan) -> Moves {
        let mut moves = Moves::default();
        let (before, after) = (places(old), places(new));
        for (name, (size, kept)) in &after {
            let on = |kept: &[(&Stage, &Storage)]| kept.iter().flat_map(|(s, _)| s.devices.clone()).collect::<Vec<_>>();
            let as_laid = |kept: &[(&Stage, &Storage)]| kept.iter().map(layout).collect::<Vec<_>>();
            let way = match before.get(name) {
                None => &mut moves.new,
                Some((_, was)) if on(was) != on(kept) => &mut moves.to_other_devices,
                Some((_, was)) if as_laid(was) != as_laid(kept) => &mut moves.laid_out_anew,
                Some(_) => &mut moves.as_before,
            };
            way.add(*size);
        }
        before.iter().filter(|(name, _)| !after.contains_key(*name)).for_each(|(_, (size, _))| moves.gone.add(*size));
        moves
    }
}

/// One line per kind of move.
impl fmt::Display for Moves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = [
            ("to other devices", self.to_other_devices),
            ("laid out anew", self.laid_out_anew),
            ("new", self.new),
            ("gone", self.gone),
        ];
        for (what, tensors) in lines.into_iter().filter(|(_, t)| t.count > 0) {
            let size =
                if matches!(what, "new" | "gone") { String::new() } else { format!(", {}", bytes(tensors.bytes)) };
            writeln!(f, "  {what:<16} {}{size}", plural(tensors.count, "parameter"))?;
        }
        write!(f, "  {:<16} {}", "as before", plural(self.as_before.count, "parameter"))
    }
}
