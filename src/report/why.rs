//! Explains in words why a parameter is stored, or an op split, as it is: the cost of each alternative, and the
//! constraints against it.

use super::{Grid, devices};
use crate::error::{Error, Names};
use crate::pins::{named, near};
use crate::units::{bytes, percent, plural, seconds};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Plan;
use altiplano_planner::UNDECIDED;
use altiplano_planner::explain::layouts::{Layout, Why, why};

/// Maximum number of explained values per pattern, since layers are alike.
const MOST_VALUES: usize = 2;
/// Maximum number of listed layouts.
const MOST_LAYOUTS: usize = 12;
/// Fraction of a device's memory that must be free for memory not to count as binding.
const SPARE: f64 = 0.05;

/// Relative differences of step time below this are ignored.
const ALIKE: f64 = 1e-4;

/// The subject of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Parameter,
    Op,
}

/// Explains what other layouts would cost, for the parameters or ops of a plan's model whose names match. `*` matches
/// anything. An op can also be selected by number (`%12`) or kind (`attention`), and either within one layer of the
/// plan.
///
/// # Errors
/// Fails if the pattern matches nothing that the plan decides on, or if the plan has no such layer.
pub fn why_text(plan: &Plan, asked: Asked, pattern: &str, layer: Option<u32>) -> Result<String, Error> {
    let graph = &plan.graph;
    if let Some(asked) = layer.filter(|&l| l >= plan.num_layers()) {
        return Err(Error::NoSuchLayer { asked, layers: plan.num_layers() });
    }
    // A parameter belongs to the layers of the ops that use it.
    let (layer_of, users) = (plan.layer_of(), graph.users());
    let inside = |v: ValueId| {
        let is = |v: &ValueId| layer_of[v.index()] == layer;
        layer.is_none() || is(&v) || matches!(graph.node(v).op, Op::Parameter(_)) && users[v.index()].iter().any(is)
    };
    let of_kind = |v: ValueId| matches!(graph.node(v).op, Op::Parameter(_)) == (asked == Asked::Parameter);
    let mut found: Vec<(ValueId, String)> =
        named(graph, pattern).into_iter().filter(|(v, _)| of_kind(*v) && inside(*v) && decided(plan, *v)).collect();
    if found.is_empty() && asked == Asked::Op {
        let is_it = |v: &ValueId| v.to_string() == pattern || graph.node(*v).op.name() == pattern;
        let name = |v: ValueId| match graph.node(v).name.as_str() {
            "" => format!("{v} ({})", graph.node(v).op.name()),
            name => name.to_string(),
        };
        found =
            graph.values().filter(is_it).filter(|v| inside(*v) && decided(plan, *v)).map(|v| (v, name(v))).collect();
    }
    let mut parts = Vec::new();
    let mut explained_values = 0;
    // One layer stands for all layers that are alike.
    let mut seen: Vec<String> = Vec::new();
    for (value, name) in &found {
        let like = super::pattern(name);
        if explained_values == MOST_VALUES || seen.contains(&like) {
            continue;
        }
        let heading = format!("{name}: {} = {}", graph.ty(*value), graph.node(*value).op.name());
        let texts: Vec<String> = why(plan, *value)?.iter().map(|why| explained(plan, why, asked, &heading)).collect();
        if !texts.is_empty() {
            explained_values += 1;
            seen.push(like);
            parts.extend(texts);
        }
    }
    if parts.is_empty() {
        let all = named(graph, "*");
        let names =
            all.iter().filter(|(v, _)| of_kind(*v) && inside(*v) && decided(plan, *v)).map(|(_, name)| name.as_str());
        let option = if asked == Asked::Parameter { "--param" } else { "--op" };
        return Err(Error::NoSuchName { option, name: pattern.to_string(), near: Names(near(names, pattern)) });
    }
    let rest = found.len() - explained_values;
    if rest > 0 {
        parts.push(format!("{} of that name are left out: of those that differ in a number the first is shown", rest));
    }
    Ok(parts.join("\n\n"))
}

/// Returns whether a stage of the plan decides the layout of the value.
fn decided(plan: &Plan, value: ValueId) -> bool {
    plan.stages.iter().any(|s| match &plan.graph.node(value).op {
        Op::Parameter(p) => s.parameters.contains_key(&p.name),
        _ => s.shardings.contains_key(&value),
    })
}

/// A change in seconds, as tables show it.
fn more(change_s: f64, of_s: f64) -> String {
    match change_s {
        s if s == f64::INFINITY => "cannot be".to_string(),
        s if s.abs() <= 1e-9 * of_s => "the same".to_string(),
        s => format!("{}{}", if s < 0.0 { "-" } else { "+" }, seconds(s.abs())),
    }
}

fn explained(plan: &Plan, why: &Why, asked: Asked, what: &str) -> String {
    let step_s = plan.predicted.step_time_s;
    let plain = |s: f64| if s.is_finite() { seconds(s) } else { "cannot be".to_string() };
    let own = if asked == Asked::Parameter { "kept" } else { "computed" };
    let header = ["layout", "a step", "memory", own, "sent", "all else anew", "others change"];
    let mut table = Grid::new(&header);
    for layout in why.layouts.iter().take(MOST_LAYOUTS) {
        let Layout { own_s, moving_s, in_place_s, whole_s, others, .. } = layout;
        let taken = if layout.chosen { "  <- taken" } else { "" };
        let step = match layout.predicted {
            _ if layout.chosen => "the same".to_string(),
            Some(predicted) => more(predicted.step_s - step_s, step_s),
            None if in_place_s.is_finite() => "-".to_string(),
            None => "cannot be".to_string(),
        };
        let memory = match over_bytes(why, layout) {
            0 => "fits".to_string(),
            over => format!("{} too much", bytes(over)),
        };
        let others = if *whole_s == f64::INFINITY { String::new() } else { others.to_string() };
        let cells = [step, memory, plain(*own_s), plain(*moving_s), more(*whole_s, why.cost_s), others];
        table.row([format!("{}{taken}", layout.layout)].into_iter().chain(cells));
    }
    let rest = why.layouts.len().saturating_sub(MOST_LAYOUTS);
    let rest = if rest > 0 { format!("\n  and {}", plural(rest as u64, "more layout")) } else { String::new() };
    let stage = &plan.stages[why.stage];
    let mut lines = vec![
        format!("{what}, on stage{} (devices {}, {})", why.stage, devices(&stage.devices), stage.mesh),
        format!(
            "  a microbatch of the stage takes {}, and a device holds {} of {} when it holds most",
            seconds(why.microbatch_s),
            bytes(why.peak_bytes),
            bytes(why.device_bytes)
        ),
    ];
    let predicted = why.layouts.iter().filter_map(|l| Some((l, l.predicted?)));
    lines.push(match predicted.min_by(|a, b| a.1.step_s.total_cmp(&b.1.step_s)) {
        Some((layout, predicted)) => format!(
            "  best other, all else as it is: {}, {} a step{}",
            layout.layout,
            more(predicted.step_s - step_s, step_s),
            match over_bytes(why, layout) {
                0 => String::new(),
                over => format!(", {} too much", bytes(over)),
            }
        ),
        None => "  no other layout goes with all else as it is".into(),
    });
    let others = why.layouts.iter().filter(|l| !l.chosen && l.whole_s.is_finite());
    lines.push(match others.min_by(|a, b| a.whole_s.total_cmp(&b.whole_s)) {
        Some(l) => format!(
            "  best other, all else anew: {}, estimated at {} a microbatch; {} change with it",
            l.layout,
            more(l.whole_s, why.cost_s),
            plural(l.others as u64, "other choice")
        ),
        None => "  no other layout goes with anything within memory".into(),
    });
    lines.push(format!("  {}", binding(plan, why)));
    let note = format!(
        "  {own}, sent and all else anew are the search's estimates of a microbatch, which leave out what overlaps"
    );
    format!("{}\n{}{rest}\n{note}", lines.join("\n"), table.right())
}

/// Bytes by which a layout exceeds a device's memory.
fn over_bytes(why: &Why, layout: &Layout) -> u64 {
    layout.predicted.map_or(layout.over_bytes, |predicted| predicted.peak_bytes.saturating_sub(why.device_bytes))
}

/// The constraint that rules out other layouts.
fn binding(plan: &Plan, why: &Why) -> String {
    if let Some(pin) = &why.pin {
        return format!("limit: the pinned layout ({pin})");
    }
    let step_s = plan.predicted.step_time_s;
    let faster = |l: &&Layout| match l.predicted {
        Some(predicted) => predicted.step_s < step_s * (1.0 - ALIKE),
        None => l.in_place_s < 0.0,
    };
    let too_large = why.layouts.iter().filter(|l| !l.chosen && over_bytes(why, l) > 0).filter(faster);
    let held = format!("{} of {}, fullest in {}", bytes(why.peak_bytes), bytes(why.device_bytes), why.fullest);
    let spare = 1.0 - why.peak_bytes as f64 / why.device_bytes.max(1) as f64;
    let fitting = why.layouts.iter().filter(|l| !l.chosen && over_bytes(why, l) == 0);
    let gains = fitting.filter_map(|l| Some((l, step_s - l.predicted?.step_s))).filter(|(_, s)| *s > ALIKE * step_s);
    let better = gains.max_by(|a, b| a.1.total_cmp(&b.1));
    match too_large.min_by(|a, b| a.in_place_s.total_cmp(&b.in_place_s)) {
        Some(layout) => format!(
            "limit: memory ({held}); {} would be faster and is {} too much",
            layout.layout,
            bytes(over_bytes(why, layout))
        ),
        None if better.is_some() => better.map_or(String::new(), |(layout, gain_s)| {
            format!(
                "limit: none; {} would be {} a step ({}) faster{} (a device holds {held})",
                layout.layout,
                seconds(gain_s),
                percent(gain_s / step_s),
                if gain_s < UNDECIDED * step_s { ", which is less than predictions are worth" } else { "" }
            )
        }),
        None if spare < SPARE => format!("limit: memory, nearly full ({held}), and time"),
        None => format!("limit: time; a device holds {held}, {} are free", percent(spare)),
    }
}
