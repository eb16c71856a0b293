//! Writes a sweep as a self-contained HTML page, in the style of a plan's page. It consists of tables and SVG, without
//! a script.

use crate::report::PAGE_STYLE;
use crate::scale::chart::{Chart, Line, Mark};
use crate::scale::text::{advice, batches, exchange_lines, meaning, points};
use crate::scale::{Growth, Point, Row, Scaling, Training};
use crate::units::{bytes, digits, duration, percent, seconds};
use std::fmt::Write;

/// Number of separately drawn parts of a point's time; the others are merged.
const MOST_PARTS: usize = 5;
/// Number of colours for parts in the style.
const HUES: usize = 8;

/// The complete page of a sweep. The same sweep gives the same page.
pub fn scaling_html(scaling: &Scaling) -> String {
    let title = format!("{} on nodes of {}", scaling.model, scaling.cluster);
    let growth = match scaling.question.growth {
        Growth::Weak => "the batch grows with the nodes (weak scaling)",
        Growth::Strong => "the batch stays (strong scaling)",
    };
    let sections = [
        ("What it means", list(&meaning(scaling))),
        ("Counts of nodes", counts(scaling)),
        ("Time and device-hours", time_and_cost(scaling)),
        ("Efficiency", efficiency(scaling)),
        ("Where the time of a sample goes", spent(scaling)),
        ("Without a search", named(scaling)),
        ("Exchanging gradients", exchanges(scaling)),
        ("Batches", of_batches(scaling)),
        ("Learning rate", list(&advice(scaling))),
    ];
    let sections = sections.into_iter().filter(|(_, body)| !body.is_empty());
    let sections: String =
        sections.map(|(head, body)| format!("<section>\n<h2>{head}</h2>\n{body}</section>\n")).collect();
    let stopped = match scaling.stopped {
        true => {
            "<p class=\"warning\">The search was stopped: these are the best plans found by then, of the counts begun.</p>\n"
        }
        false => "",
    };
    format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{PAGE_STYLE}
.chart {{ max-width: 46rem; width: 100%; height: auto; }}
.chart text {{ fill: var(--muted); font-size: 12px; }}
.chart .point {{ fill: var(--ink); }}
.facts {{ max-width: 90ch; }}
</style>
</head>
<body>
<div id="page">
<header><div><h1>{title}</h1><p>{growth}</p></div></header>
{stopped}{tiles}{sections}</div>
</body>
</html>
"#,
        title = escaped(&title),
        tiles = tiles(scaling),
    )
}

/// Escapes text for an element or an attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A table with column names; a row may be marked. All columns but the last are numbers.
fn table<'a>(columns: &[&str], rows: impl IntoIterator<Item = (&'a str, Vec<String>)>) -> String {
    let class = |i: usize| if i + 1 < columns.len() { " class=\"number\"" } else { "" };
    let head: String = columns.iter().enumerate().map(|(i, name)| format!("<th{}>{name}</th>", class(i))).collect();
    let mut out = format!("<div class=\"scroll\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n");
    for (mark, cells) in rows {
        let cells: String =
            cells.iter().enumerate().map(|(i, cell)| format!("<td{}>{}</td>", class(i), escaped(cell))).collect();
        // Writing to a string does not fail.
        _ = writeln!(out, "<tr{mark}>{cells}</tr>");
    }
    out.push_str("</tbody>\n</table></div>\n");
    out
}

fn list(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let lines: String = lines.iter().map(|line| format!("<li>{}</li>\n", escaped(line))).collect();
    format!("<ul class=\"facts\">\n{lines}</ul>\n")
}

/// The key figures of the recommendation.
fn tiles(scaling: &Scaling) -> String {
    let recommended = scaling.recommended.and_then(|r| {
        let (_, point) = points(scaling).find(|(nodes, _)| *nodes == r.nodes)?;
        Some((r.nodes, point, point.training?))
    });
    let Some((nodes, point, training)) = recommended else { return String::new() };
    let tile = |value: String, what: &str| format!("<li><b>{}</b><span>{what}</span></li>\n", escaped(&value));
    let mut out = tile(nodes.to_string(), "nodes recommended");
    out += &tile(duration(training.done_hours()), "until the result is there");
    out += &tile(digits(training.device_hours), "device-hours");
    out += &training.price.map(|price| tile(digits(price), "price")).unwrap_or_default();
    out += &training.kwh.map(|kwh| tile(digits(kwh), "kWh of devices")).unwrap_or_default();
    out += &tile(seconds(point.step_time_s), "a step");
    out += &tile(percent(point.mfu), "of the peak FLOP/s (MFU)");
    format!("<ul class=\"tiles\">\n{out}</ul>\n")
}

fn counts(scaling: &Scaling) -> String {
    let columns = [
        "nodes",
        "devices",
        "used",
        "batch",
        "a device",
        "s/step",
        "samples/s",
        "MFU",
        "efficiency",
        "fed",
        "memory",
        "steps",
        "time",
        "wait",
        "done after",
        "device-hours",
        "price",
        "kWh",
        "on the front",
        "most goes to",
        "how",
    ];
    let taken = scaling.recommended.map(|r| r.nodes);
    let row = |row: &Row| {
        let mark = if taken == Some(row.nodes) { " class=\"chosen\"" } else { "" };
        let mut cells = vec![row.nodes.to_string(), row.devices.to_string()];
        match &row.point {
            Some(point) => cells.extend(cells_of(point)),
            None => {
                cells.resize(columns.len() - 1, "-".to_string());
                cells.push(row.plan.as_ref().err().map(ToString::to_string).unwrap_or_default());
            }
        }
        (mark, cells)
    };
    let rows: Vec<(&str, Vec<String>)> = scaling.rows.iter().map(row).collect();
    // Omit columns that are empty in all rows.
    let told: Vec<usize> = (0..columns.len()).filter(|&c| rows.iter().any(|(_, cells)| cells[c] != "-")).collect();
    let names: Vec<&str> = told.iter().map(|&c| columns[c]).collect();
    table(&names, rows.into_iter().map(|(mark, cells)| (mark, told.iter().map(|&c| cells[c].clone()).collect())))
}

fn cells_of(p: &Point) -> Vec<String> {
    let none = || "-".to_string();
    let t = p.training.as_ref();
    let of = |what: &dyn Fn(&Training) -> Option<String>| t.and_then(what).unwrap_or_else(none);
    let most = p.parts.iter().take(2).map(|s| format!("{} {}", s.what, percent(s.part))).collect::<Vec<_>>();
    vec![
        p.devices_used.to_string(),
        p.global_batch.to_string(),
        digits(p.local_batch),
        digits(p.step_time_s),
        digits(p.samples_per_s),
        percent(p.mfu),
        percent(p.efficiency),
        p.input.map_or_else(none, |input| percent(input.utilisation)),
        bytes(p.peak_bytes),
        of(&|t| Some(digits(t.steps))),
        of(&|t| Some(duration(t.hours))),
        of(&|t| t.wait_hours.map(duration)),
        of(&|t| Some(duration(t.done_hours()))),
        of(&|t| Some(digits(t.device_hours))),
        of(&|t| t.price.map(digits)),
        of(&|t| t.kwh.map(digits)),
        of(&|_| Some(if p.on_front { "yes" } else { "no" }.to_string())),
        most.join(", "),
        p.how.clone(),
    ]
}

/// Chart of time against device-hours, with the Pareto front and the recommendation.
fn time_and_cost(scaling: &Scaling) -> String {
    let all = points(scaling).filter_map(|(nodes, p)| Some((nodes, p.on_front, p.training?)));
    let all: Vec<(u32, bool, Training)> = all.collect();
    let place = |t: &Training| (t.device_hours, t.done_hours());
    let taken = scaling.recommended.map(|r| r.nodes);
    let mark = |(nodes, on_front, t): &(u32, bool, Training)| Mark {
        at: place(t),
        label: nodes.to_string(),
        chosen: taken == Some(*nodes),
        hollow: !on_front,
    };
    let mut front: Vec<(f64, f64)> = all.iter().filter(|a| a.1).map(|a| place(&a.2)).collect();
    front.sort_by(|a, b| a.0.total_cmp(&b.0));
    let chart = Chart {
        title: "Hours until the result is there against device-hours, by nodes",
        axes: ["device-hours", "hours"],
        logarithmic: [true, true],
        lines: vec![Line { name: "no count is faster for less (Pareto front)", hue: 0, points: front }],
        marks: all.iter().map(mark).collect(),
    };
    let note = "<p class=\"note\">Numbers are counts of nodes; a ring is the one to take, hollow ones are beaten in both.</p>\n";
    chart.svg().map(|svg| format!("{svg}{note}")).unwrap_or_default()
}

fn efficiency(scaling: &Scaling) -> String {
    let line: Vec<(f64, f64)> = points(scaling).map(|(nodes, p)| (f64::from(nodes), p.efficiency)).collect();
    let mark = |(nodes, p): (u32, &Point)| Mark {
        at: (f64::from(nodes), p.efficiency),
        label: percent(p.efficiency),
        chosen: scaling.recommended.is_some_and(|r| r.nodes == nodes),
        hollow: false,
    };
    let chart = Chart {
        title: "Samples a second and device beside those of the smallest count, by nodes",
        axes: ["nodes", "efficiency"],
        logarithmic: [true, false],
        marks: points(scaling).map(mark).collect(),
        lines: vec![Line { name: "efficiency", hue: 0, points: line }],
    };
    chart.svg().unwrap_or_default()
}

/// A bar for each number of nodes: a sample's device-seconds by kind of work.
fn spent(scaling: &Scaling) -> String {
    let mut names: Vec<&str> = Vec::new();
    for (_, point) in points(scaling) {
        for part in point.parts.iter().take(MOST_PARTS) {
            if !names.contains(&part.what.as_str()) && names.len() + 1 < HUES {
                names.push(&part.what);
            }
        }
    }
    let hue = |what: &str| names.iter().position(|name| *name == what).unwrap_or(HUES - 1);
    let mut out = String::from("<ul class=\"legend\">\n");
    let legend = names.iter().enumerate().map(|(i, name)| (i, *name)).chain([(HUES - 1, "anything else")]);
    for (i, name) in legend {
        _ = writeln!(out, "<li><i style=\"background: var(--hue{i})\"></i>{}</li>", escaped(name));
    }
    out.push_str("</ul>\n<div class=\"scroll\"><table>\n<thead><tr><th class=\"number\">nodes</th><th>parts</th>");
    out.push_str("<th>more than on the smallest count</th></tr></thead>\n<tbody>\n");
    for (nodes, point) in points(scaling) {
        let bar = |part: &crate::scale::Spent| {
            let says = escaped(&format!("{}: {}", part.what, percent(part.part)));
            let (width, hue) = (part.part * 100.0, hue(&part.what));
            format!("<i title=\"{says}\" style=\"width: {width:.3}%; background: var(--hue{hue})\"></i>")
        };
        let bars: String = point.parts.iter().map(bar).collect();
        let words = point.parts.iter().take(MOST_PARTS).map(|s| format!("{} {}", s.what, percent(s.part)));
        let words = escaped(&words.collect::<Vec<_>>().join(", "));
        let change = point.change.as_ref().map(|c| format!("{} {}", c.what, percent(c.part))).unwrap_or_default();
        _ = writeln!(
            out,
            "<tr><td class=\"number\">{nodes}</td><td class=\"wide\"><span class=\"bar\">{bars}</span><span class=\"from\">{words}</span></td><td>{}</td></tr>",
            escaped(&change)
        );
    }
    out.push_str("</tbody>\n</table></div>\n");
    out
}

fn named(scaling: &Scaling) -> String {
    if scaling.named.is_empty() {
        return String::new();
    }
    let row = |named: &crate::scale::Named| {
        let own = points(scaling).find(|(nodes, _)| *nodes == named.nodes).map(|(_, p)| p.step_time_s);
        let times = own.map_or("-".to_string(), |own| digits(named.step_time_s / own));
        ("", vec![named.nodes.to_string(), digits(named.step_time_s), times, format!("{}: {}", named.name, named.how)])
    };
    table(&["nodes", "s/step", "times the plan's", "how"], scaling.named.iter().map(row))
}

fn exchanges(scaling: &Scaling) -> String {
    if scaling.exchanges.is_empty() {
        return String::new();
    }
    let row = |way: &crate::scale::Exchange| {
        let servers = way.servers.map_or("-".to_string(), |n| n.to_string());
        let how = format!("{}: {}", way.name, way.how);
        let cells = [way.nodes.to_string(), digits(way.step_time_s), digits(way.staleness), way.workers.to_string()];
        ("", cells.into_iter().chain([servers, how]).collect())
    };
    let columns = ["nodes", "s/step", "staleness", "workers", "servers", "way"];
    table(&columns, scaling.exchanges.iter().map(row)) + &list(&exchange_lines(scaling))
}

/// Charts of steps and samples to a result, and of rates, against the batch.
fn of_batches(scaling: &Scaling) -> String {
    let question = &scaling.question;
    if question.noise_scale.is_none() && question.base_rate.is_none() {
        return String::new();
    }
    let rows = batches(scaling);
    let line = |what: &dyn Fn(&crate::scale::BatchRow) -> Option<f64>| -> Vec<(f64, f64)> {
        rows.iter().filter_map(|row| Some((row.batch as f64, what(row)?))).collect()
    };
    let chart = Chart {
        title: "Steps and samples to a result as multiples of the fewest, against the batch",
        axes: ["batch", "over the fewest"],
        logarithmic: [true, true],
        lines: vec![
            Line { name: "steps", hue: 0, points: line(&|row| row.steps) },
            Line { name: "samples", hue: 1, points: line(&|row| row.samples) },
        ],
        marks: Vec::new(),
    };
    let cell = |value: Option<f64>| value.map_or("-".to_string(), digits);
    // Rates are small, so print their significant digits.
    let rate = |value: Option<f64>| value.map_or("-".to_string(), |rate| format!("{rate:.2e}"));
    let row = |row: &crate::scale::BatchRow| {
        let rates = [rate(row.rate_linear), rate(row.rate_square_root)];
        ("", [row.batch.to_string(), cell(row.steps), cell(row.samples)].into_iter().chain(rates).collect())
    };
    let columns = ["batch", "steps / fewest", "samples / fewest", "rate, linear", "rate, square root"];
    chart.svg().unwrap_or_default() + &table(&columns, rows.iter().map(row))
}
