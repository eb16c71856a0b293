//! The difference between two plans in words: step seconds by kind of work, on the devices that determine the step
//! time, and bytes of the fullest device by content.

use super::Grid;
use crate::simulate::Simulation;
use crate::units::{bytes, digits, percent, seconds};
use altiplano_ir::plan::Plan;
use altiplano_planner::explain::account::{Account, busiest, of_lanes};
use altiplano_planner::explain::alternatives::{difference, shape};
use altiplano_planner::fits;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Differences below this fraction of a step share one line.
const SHOWN: f64 = 1e-3;

/// Two plans side by side, each under a name: their figures, their differences, and totals.
pub fn side_by_side(names: [&str; 2], plans: [&Simulation; 2]) -> String {
    let mut out = String::new();
    let mut table = Grid::new(&["plan", "s/step", "samples/s", "MFU", "GB/device", "fits", "how"]);
    for (name, simulation) in names.iter().zip(plans) {
        let plan = simulation.plan();
        let p = &plan.predicted;
        table.row([
            name.to_string(),
            digits(p.step_time_s),
            digits(p.samples_per_s),
            percent(p.mfu),
            digits(p.peak_bytes.iter().copied().max().unwrap_or(0) as f64 / 1e9),
            if fits(plan) { "yes" } else { "no" }.to_string(),
            shape(plan),
        ]);
    }
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{}\n", table.right_but_last());
    let [(of_one, one), (of_other, other)] = &least_waiting(plans);
    let _ = writeln!(
        out,
        "Seconds of a step, on the devices that wait least ({of_one} of {}, {of_other} of {})\n{}\n",
        names[0],
        names[1],
        times(names, one, other)
    );
    let _ = write!(out, "Bytes of the fullest device\n{}", memory(names, plans));
    out
}

/// For each plan, the devices that wait least, and their time account.
fn least_waiting(plans: [&Simulation; 2]) -> [(String, Account); 2] {
    plans.map(|s| {
        let lanes = of_lanes(s.plan(), &s.accounts());
        let at = busiest(&lanes);
        (s.plan().lane_name(at), lanes.into_iter().nth(at).unwrap_or_default())
    })
}

/// The figures of a plan for comparisons, as JSON.
pub fn side(plan: &Plan) -> Value {
    let p = &plan.predicted;
    json!({
        "model": plan.model,
        "cluster": plan.cluster.name,
        "target": plan.target.name(),
        "devices": plan.num_devices(),
        "global_batch": plan.global_batch,
        "microbatch": plan.microbatch,
        "num_microbatches": plan.num_microbatches,
        "stages": plan.stages.len(),
        "step_time_s": p.step_time_s,
        "samples_per_s": p.samples_per_s,
        "mfu": p.mfu,
        "peak_bytes": p.peak_bytes.iter().copied().max().unwrap_or(0),
        "fits": fits(plan),
        "how": shape(plan),
    })
}

/// All rows of [`side_by_side`] as JSON.
pub(crate) fn side_by_side_json(names: [&str; 2], plans: [&Simulation; 2]) -> Value {
    let lanes = least_waiting(plans);
    let plan = |i: usize| {
        let mut side = side(plans[i].plan());
        side["name"] = json!(names[i]);
        side["waits_least"] = json!(lanes[i].0);
        side
    };
    let seconds = difference(&lanes[0].1, &lanes[1].1);
    let seconds = seconds.into_iter().map(|(work, a, b)| json!({"what": work.to_string(), "seconds": [a, b]}));
    let bytes = held(plans).into_iter().map(|(class, a, b)| json!({"class": class, "bytes": [a, b]}));
    json!({
        "plans": [plan(0), plan(1)],
        "seconds": seconds.collect::<Vec<_>>(),
        "bytes": bytes.collect::<Vec<_>>(),
    })
}

fn more(difference: f64, unit: impl Fn(f64) -> String) -> String {
    match difference {
        0.0 => "the same".to_string(),
        d if d < 0.0 => format!("-{}", unit(-d)),
        d => format!("+{}", unit(d)),
    }
}

/// The rows add up to the step time of each plan.
fn times(names: [&str; 2], one: &Account, other: &Account) -> String {
    let mut table = Grid::new(&["what", names[0], names[1], "more"]);
    let mut row = |what: String, a: f64, b: f64| {
        let plain = |s: f64| match s {
            0.0 => "-".to_string(),
            s if s < 0.0 => format!("-{}", seconds(-s)),
            s => seconds(s),
        };
        table.row([what, plain(a), plain(b), more(b - a, seconds)]);
    };
    let least = SHOWN * one.sum_s().max(other.sum_s());
    let (shown, rest): (Vec<_>, Vec<_>) =
        difference(one, other).into_iter().partition(|(_, a, b)| (b - a).abs() > least);
    for (work, a, b) in shown {
        row(work.to_string(), a, b);
    }
    if !rest.is_empty() {
        let (a, b) = rest.iter().fold((0.0, 0.0), |sums, (_, a, b)| (sums.0 + a, sums.1 + b));
        row("nearly equal".into(), a, b);
    }
    row("the step".into(), one.sum_s(), other.sum_s());
    table.right()
}

/// Bytes of the fullest device of each plan by content, the largest difference first.
fn held(plans: [&Simulation; 2]) -> Vec<(&'static str, u64, u64)> {
    let fullest = plans.map(|s| s.memory().into_iter().max_by_key(|m| m.peak_bytes));
    let sums = fullest.each_ref().map(|m| m.as_ref().map(|m| m.by_category()).unwrap_or_default());
    let categories: BTreeSet<_> = sums.iter().flat_map(|s| s.keys().copied()).collect();
    let of = |i: usize, c| sums[i].get(&c).copied().unwrap_or(0);
    let mut rows: Vec<_> = categories.into_iter().map(|c| (c.name(), of(0, c), of(1, c))).collect();
    rows.sort_by_key(|&(name, a, b)| (std::cmp::Reverse(a.abs_diff(b)), name));
    rows
}

/// The rows add up to the peak of each plan.
fn memory(names: [&str; 2], plans: [&Simulation; 2]) -> String {
    let mut table = Grid::new(&["class", names[0], names[1], "more"]);
    let mut row = |what: &str, a: u64, b: u64| {
        let plain = |n: u64| if n > 0 { bytes(n) } else { "-".to_string() };
        table.row([what.to_string(), plain(a), plain(b), more(b as f64 - a as f64, |d| bytes(d as u64))]);
    };
    let rows = held(plans);
    rows.iter().for_each(|&(name, a, b)| row(name, a, b));
    row("in all", rows.iter().map(|r| r.1).sum(), rows.iter().map(|r| r.2).sum());
    table.right()
}
