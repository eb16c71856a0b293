//! Explains a stage in words: its contents, its time account, its memory, and the neighbouring plans.

use super::{Grid, devices, range};
use crate::error::Error;
use crate::simulate::{HeldTensor, Simulation};
use crate::units::{bytes, percent, seconds};
use altiplano_ir::plan::Plan;
use altiplano_ir::recompute::{Recomputation, Recompute};
use altiplano_planner::explain::account::{Account, Part};
use altiplano_planner::explain::neighbours::{Neighbour, neighbours};
use std::fmt::Write;

/// Number of tensors listed by name.
const NAMED: usize = 4;
/// Kinds of work below this fraction of a step are left out.
const SHOWN: f64 = 1e-4;

/// Explains a stage.
///
/// # Errors
/// Fails if the plan has no such stage.
pub fn why_stage(plan: &Plan, number: usize) -> Result<String, Error> {
    let Some(stage) = plan.stages.get(number) else {
        return Err(Error::NoSuchStage { option: "--stage", asked: number, stages: plan.stages.len() });
    };
    let simulation = Simulation::new(plan.clone(), None)?;
    let mut out = String::new();
    let group = plan.group_of(stage);
    let (first, last) = (stage.devices.first().copied().unwrap_or(0), stage.devices.last().copied().unwrap_or(0));
    let start = plan.cluster.devices_of(stage.group as usize).start;
    let node = |device: u32| (device - start) / group.devices_per_node.max(1);
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "stage{number} of {}: layers {} of {} on {} x {}",
        plan.stages.len(),
        range(stage.layers.start, stage.layers.end),
        plan.num_layers(),
        stage.devices.len(),
        group.device.name,
    );
    let _ = writeln!(
        out,
        "  devices {} (nodes {}), {}; {}\n",
        devices(&stage.devices),
        range(node(first), node(last) + 1),
        stage.mesh,
        match &stage.recompute {
            Recomputation::Alike(Recompute::None) => "activations are kept".to_string(),
            Recomputation::Alike(Recompute::Full) => "activations are computed again in the backward".to_string(),
            Recomputation::Alike(Recompute::Selective) =>
                format!("the backward recomputes {}", plan.execution.recomputed().words()),
            mixed => format!("activations are computed again in the backward: {mixed}"),
        },
    );
    let account = &simulation.accounts()[number];
    let step_s = plan.predicted.step_time_s;
    let _ = writeln!(out, "Seconds of a step, on each device\n{}\n", times(account, step_s));
    let _ = writeln!(out, "{}\n", memory(plan, &simulation, number));
    let all = neighbours(plan, number)?;
    if !all.is_empty() {
        let _ = write!(out, "What is next to it, the rest of the plan as it is\n{}", beside(plan, number, &all));
    }
    Ok(out.trim_end().to_string())
}

/// A time account as a table.
fn times(account: &Account, step_s: f64) -> String {
    let mut table = Grid::new(&["what", "seconds", "of a step"]);
    for part in Part::ALL {
        let part_s = account.part_s(part);
        if part_s <= 0.0 {
            continue;
        }
        table.row([part.name().to_string(), seconds(part_s), percent(part_s / step_s)]);
        let of_part = account.sorted().into_iter().filter(|(work, s)| work.part() == part && *s > SHOWN * step_s);
        for (work, s) in of_part.filter(|_| part != Part::Waiting) {
            table.row([format!("  {work}"), seconds(s), percent(s / step_s)]);
        }
    }
    table.right()
}

fn memory(plan: &Plan, simulation: &Simulation, number: usize) -> String {
    let lane = plan.lane_of(number);
    let memory = simulation.memory().swap_remove(lane);
    let limit = plan.usable_bytes(&plan.stages[number]);
    let shared = match plan.virtual_stages {
        1 => String::new(),
        _ => format!(" ({} together)", plan.lane_name(lane)),
    };
    let free = match limit.checked_sub(memory.peak_bytes) {
        Some(free) => format!("{} ({}) are free", bytes(free), percent(free as f64 / limit.max(1) as f64)),
        None => format!("{} too much", bytes(memory.peak_bytes - limit)),
    };
    let mut out = format!(
        "Bytes on each device{shared} when it holds most, in {}: {} of {}, {free}\n",
        simulation.moment(lane),
        bytes(memory.peak_bytes),
        bytes(limit)
    );
    let mut table = Grid::new(&["class", "bytes", "of the limit", "largest"]);
    let mut sums: Vec<_> = memory.by_category().into_iter().collect();
    sums.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    for (category, sum) in sums.into_iter().filter(|(_, sum)| *sum > 0) {
        let largest = memory.held.iter().find(|t| t.category == category).map(named).unwrap_or_default();
        let part = percent(sum as f64 / limit.max(1) as f64);
        table.row([category.name().to_string(), bytes(sum), part, largest]);
    }
    out.push_str(&table.right_but_last());
    let largest: Vec<String> = memory.held.iter().take(NAMED).map(named).collect();
    let _ = write!(out, "\n  largest of all: {}", largest.join("; "));
    out
}

fn named(tensor: &HeldTensor) -> String {
    let times = if tensor.count > 1 { format!(", {} microbatches", tensor.count) } else { String::new() };
    format!("{} ({}{times})", tensor.name, bytes(tensor.total_bytes()))
}

fn beside(plan: &Plan, number: usize, all: &[Neighbour]) -> String {
    let step_s = plan.predicted.step_time_s;
    let mut table = Grid::new(&["change", "s/step", "more", "bytes", "why not"]);
    for Neighbour { change, plan: other } in all {
        let Ok(other) = other else {
            let why = "there is no such plan".to_string();
            table.row([change.clone(), "-".into(), "-".into(), "-".into(), why]);
            continue;
        };
        let more_s = other.predicted.step_time_s - step_s;
        let peak = other.stages[number].predicted.peak_bytes;
        let over = |s: &altiplano_ir::plan::Stage| s.predicted.peak_bytes > other.usable_bytes(s);
        let why = match other.stages.iter().position(over) {
            Some(i) => {
                let s = &other.stages[i];
                let too_much = s.predicted.peak_bytes - other.usable_bytes(s);
                format!("stage{i} holds {} too much", bytes(too_much))
            }
            None if more_s > 0.0 => altiplano_planner::explain::alternatives::reason(plan, other),
            None => "as fast, or faster by less than predictions are worth".to_string(),
        };
        let sign = if more_s < 0.0 { "-" } else { "+" };
        let more = format!("{sign}{} ({sign}{})", seconds(more_s.abs()), percent(more_s.abs() / step_s));
        table.row([change.clone(), seconds(other.predicted.step_time_s), more, bytes(peak), why]);
    }
    table.right_but_last()
}
