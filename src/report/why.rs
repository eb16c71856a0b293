//! Why a parameter is kept, and an op split, as it is, in words: what each other way would cost, and what stands against it.

use super::{Grid, devices};
use crate::error::{Error, Names};
use crate::pins::{named, near};
use crate::units::{bytes, percent, plural, seconds};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Plan;
use altiplano_planner::why::{Layout, Why, why};

/// Values of a pattern that are explained at most: layers are alike.
const MOST_VALUES: usize = 2;
/// Layouts that are listed at most.
const MOST_LAYOUTS: usize = 12;
/// Of a device's memory, what must be left for memory not to be said to bind.
const SPARE: f64 = 0.05;

/// Of what a microbatch takes, what is no difference.
const ALIKE: f64 = 1e-4;

/// What a question is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Parameter,
    Op,
}

/// For the parameters, or the ops, of a plan's model whose names match, what their other layouts would cost. `*` stands for anything;
/// an op may also be asked for by its number (`%12`) or its kind (`attention`), and either within one layer of the plan.
///
/// # Errors
/// A pattern that matches nothing that the plan decides on, and a layer that it does not have.
pub fn why_text(plan: &Plan, asked: Asked, pattern: &str, layer: Option<u32>) -> Result<String, Error> {
    let graph = &plan.graph;
    if let Some(asked) = layer.filter(|&l| l >= plan.num_layers()) {
        return Err(Error::NoSuchLayer { asked, layers: plan.num_layers() });
    }
    // A parameter is in the layers of the ops that use it.
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
    // Of layers that are alike one each stands for all.
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

/// Whether a stage of the plan lays the value out.
fn decided(plan: &Plan, value: ValueId) -> bool {
    plan.stages.iter().any(|s| match &plan.graph.node(value).op {
        Op::Parameter(p) => s.parameters.contains_key(&p.name),
        _ => s.shardings.contains_key(&value),
    })
}

fn explained(plan: &Plan, why: &Why, asked: Asked, what: &str) -> String {
    let more = |s: f64| match s {
        s if s == f64::INFINITY => "cannot be".to_string(),
        s if s.abs() <= 1e-9 * why.cost_s => "the same".to_string(),
        s => format!("{}{}", if s < 0.0 { "-" } else { "+" }, seconds(s.abs())),
    };
    let plain = |s: f64| if s.is_finite() { seconds(s) } else { "cannot be".to_string() };
    let own = if asked == Asked::Parameter { "kept" } else { "computed" };
    let header = ["layout", own, "sent", "all else as it is", "all else anew", "others change", "memory"];
    let mut table = Grid::new(&header);
    for layout in why.layouts.iter().take(MOST_LAYOUTS) {
        let Layout { layout, chosen, own_s, moving_s, in_place_s, whole_s, others, over_bytes } = layout;
        let taken = if *chosen { "  <- taken" } else { "" };
        let memory = if *over_bytes > 0 { format!("{} too much", bytes(*over_bytes)) } else { "fits".into() };
        let others = if *whole_s == f64::INFINITY { String::new() } else { others.to_string() };
        let cells = [plain(*own_s), plain(*moving_s), more(*in_place_s), more(*whole_s), others, memory];
        table.row([format!("{layout}{taken}")].into_iter().chain(cells));
    }
    let rest = why.layouts.len().saturating_sub(MOST_LAYOUTS);
    let rest = if rest > 0 { format!("\n  and {}", plural(rest as u64, "more layout")) } else { String::new() };
    let steps = f64::from(plan.num_microbatches);
    let best = |s: fn(&Layout) -> f64| {
        let others = why.layouts.iter().filter(|l| !l.chosen && s(l).is_finite());
        others.min_by(|a, b| s(a).total_cmp(&s(b)))
    };
    let mut lines = vec![format!(
        "{what}, on stage{} (devices {}, {})\n  a microbatch of the stage takes {} by the search's prices",
        why.stage,
        devices(&plan.stages[why.stage].devices),
        plan.stages[why.stage].mesh,
        seconds(why.cost_s)
    )];
    match best(|l| l.in_place_s) {
        Some(l) => lines.push(format!(
            "  best other, all else as it is: {}, {} a microbatch, {} a step",
            l.layout,
            more(l.in_place_s),
            more(steps * l.in_place_s)
        )),
        None => lines.push("  no other layout goes with all else as it is".into()),
    }
    match best(|l| l.whole_s) {
        Some(l) => lines.push(format!(
            "  best other, all else anew:     {}, {} a microbatch, {} a step; {} change with it",
            l.layout,
            more(l.whole_s),
            more(steps * l.whole_s),
            plural(l.others as u64, "other choice")
        )),
        None => lines.push("  no other layout goes with anything within memory".into()),
    }
    lines.push(format!("  {}", binding(why)));
    format!("{}\n{}{rest}", lines.join("\n"), table.right())
}

/// Which limit stands against other layouts.
fn binding(why: &Why) -> String {
    if let Some(pin) = &why.pin {
        return format!("what binds: the layout that is asked for ({pin})");
    }
    let cheaper = why.layouts.iter().filter(|l| !l.chosen && l.in_place_s < 0.0 && l.over_bytes > 0);
    let held = format!("{} of {} in {}", bytes(why.most_bytes), bytes(why.limit_bytes), why.fullest);
    let spare = 1.0 - why.most_bytes as f64 / why.limit_bytes.max(1) as f64;
    let anew = why.layouts.iter().filter(|l| !l.chosen).map(|l| l.whole_s).fold(f64::INFINITY, f64::min);
    if anew < -ALIKE * why.cost_s {
        return format!(
            "what binds: the judge; by these prices others are cheaper, and it found the whole no faster or too large (fullest {held})"
        );
    }
    match cheaper.min_by(|a, b| a.in_place_s.total_cmp(&b.in_place_s)) {
        Some(layout) => {
            format!(
                "what binds: memory ({held}); {} would be faster and is {} too much",
                layout.layout,
                bytes(layout.over_bytes)
            )
        }
        None if spare < SPARE => format!("what binds: memory is nearly full ({held}), and time"),
        None => format!("what binds: time alone; the stage's fullest point is {held}, {} are free", percent(spare)),
    }
}
