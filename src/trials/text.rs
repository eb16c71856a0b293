//! Prints trials as a table, and as JSON.

use super::packing::Placed;
use super::{Model, Trials};
use crate::report::Grid;
use crate::units::{bytes, duration, percent, plural, seconds};
use altiplano_ir::plan::Plan;
use serde_json::{Value, json};

/// Trials of one model on blocks of one size: some that begin together, and others that follow them there.
struct Wave<'a> {
    first: &'a Placed,
    /// Trials at a time.
    together: usize,
    rounds: usize,
    /// One more than the last device; the blocks follow each other.
    end_device: usize,
    end_s: f64,
}

fn time(seconds_of: f64) -> String {
    if seconds_of < 120.0 { seconds(seconds_of) } else { duration(seconds_of / 3600.0) }
}

/// The name of a plan's file among those of the trials.
pub fn plan_name(trials: &Trials, model: usize, devices: usize) -> String {
    let number = if trials.models.len() > 1 { format!("{}-", model + 1) } else { String::new() };
    let fit = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = trials.models[model].name.chars().map(fit).collect();
    format!("{number}{name}-{devices}.json")
}

/// Trials in words: the time for all, and a row for those that begin together.
pub fn trials_text(trials: &Trials) -> String {
    let Trials { cluster, models, end_s, lower_bound_s, in_turn_s, .. } = trials;
    let asked: Vec<String> = models
        .iter()
        .map(|m| format!("{} of {}, {} each", plural(m.count as u64, "trial"), m.name, plural(m.steps, "step")))
        .collect();
    let mut out = vec![
        format!("{} on {} ({})", asked.join("; "), cluster.name, plural(cluster.num_devices().into(), "device")),
        format!("  all are done after {}", time(*end_s)),
    ];
    let less = 1.0 - lower_bound_s / end_s;
    out.push(match less < 1e-6 {
        true => "  no other way to deal out these blocks is done earlier".to_string(),
        false => {
            format!(
                "  no way to deal out these blocks takes less than {}, {} less",
                time(*lower_bound_s),
                percent(less)
            )
        }
    });
    if let Some(in_turn_s) = in_turn_s {
        out.push(format!(
            "  in turn, on all devices each: {}, {:.2} times as long",
            time(*in_turn_s),
            in_turn_s / end_s
        ));
    }
    out.push(String::new());
    let mut table =
        Grid::new(&["begin", "end", "model", "trials", "at a time", "devices", "each", "s/step", "memory", "how"]);
    for Wave { first, together, rounds, end_device, end_s } in waves(trials) {
        let model = &models[first.series];
        let Some(plan) = &model.plans[first.size] else { continue };
        table.row([
            time(first.start_s),
            time(end_s),
            model.name.clone(),
            (together * rounds).to_string(),
            together.to_string(),
            format!("{}-{}", first.first_device, end_device - 1),
            trials.sizes[first.size].to_string(),
            seconds(plan.predicted.step_time_s),
            bytes(peak_bytes(plan)),
            crate::one_line(plan),
        ]);
    }
    out.push(table.right_but_last());
    out.join("\n")
}

fn peak_bytes(plan: &Plan) -> u64 {
    plan.stages.iter().map(|stage| stage.predicted.peak_bytes).max().unwrap_or(0)
}

fn waves(trials: &Trials) -> Vec<Wave<'_>> {
    let alike = |wave: &Wave<'_>, one: &Placed| (wave.first.series, wave.first.size) == (one.series, one.size);
    let mut single: Vec<Wave<'_>> = Vec::new();
    for one in &trials.placed {
        let end_device = one.first_device + trials.sizes[one.size];
        match single.last_mut() {
            Some(wave)
                if alike(wave, one) && wave.end_device == one.first_device && wave.first.start_s == one.start_s =>
            {
                wave.together += 1;
                wave.end_device = end_device;
            }
            _ => single.push(Wave { first: one, together: 1, rounds: 1, end_device, end_s: one.end_s }),
        }
    }
    let mut all: Vec<Wave<'_>> = Vec::new();
    for wave in single {
        let follows = |before: &&mut Wave<'_>| {
            alike(before, wave.first)
                && (before.first.first_device, before.end_device) == (wave.first.first_device, wave.end_device)
                && before.end_s == wave.first.start_s
        };
        match all.iter_mut().find(follows) {
            Some(before) => (before.rounds, before.end_s) = (before.rounds + 1, wave.end_s),
            None => all.push(wave),
        }
    }
    all
}

/// Trials as JSON (`docs/trials.schema.json`).
pub fn trials_json(trials: &Trials) -> String {
    let block = |m: usize, size: usize, plan: &Plan| {
        json!({
            "devices": size,
            "plan": plan_name(trials, m, size),
            "step_s": plan.predicted.step_time_s,
            "peak_bytes": peak_bytes(plan),
            "how": crate::one_line(plan),
        })
    };
    let model = |(m, model): (usize, &Model)| {
        let plans = trials.sizes.iter().zip(&model.plans);
        let blocks: Vec<Value> = plans.filter_map(|(&size, plan)| Some(block(m, size, plan.as_ref()?))).collect();
        json!({ "model": model.name, "count": model.count, "steps": model.steps, "blocks": blocks })
    };
    let placed = |one: &Placed| {
        let size = trials.sizes[one.size];
        json!({
            "model": one.series,
            "plan": plan_name(trials, one.series, size),
            "devices": [one.first_device, one.first_device + size],
            "begin_s": one.start_s,
            "end_s": one.end_s,
        })
    };
    let answer = json!({
        "format": "altiplano.trials",
        "version": 1,
        "cluster": trials.cluster.name,
        "devices": trials.cluster.num_devices(),
        "end_s": trials.end_s,
        "lower_bound_s": trials.lower_bound_s,
        "in_turn_s": trials.in_turn_s,
        "models": trials.models.iter().enumerate().map(model).collect::<Vec<_>>(),
        "trials": trials.placed.iter().map(placed).collect::<Vec<_>>(),
    });
    serde_json::to_string_pretty(&answer).unwrap_or_default()
}
