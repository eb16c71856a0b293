//! Writes the recommendation as an options file for `altiplano run --config`.
//!
//! The file states what published rules say about the batch, with their sources. Options that no rule covers are left
//! out, with a comment.

use crate::scale::practice::advised;
use crate::scale::{Length, Scaling};
use altiplano_ir::optimizer::Optimizer;
use std::fmt::Write;

/// Epochs of SGD's warm-up, and between drops of its rate (Goyal et al. 2017, sections 2.2 and 5.1).
const SGD_WARM_UP_EPOCHS: f64 = 5.0;
const SGD_FALL_EPOCHS: f64 = 30.0;

/// Options of a run on the recommended number of nodes, else the largest with a plan; `None` if none has one.
pub fn train_config(found: &Scaling) -> Option<String> {
    let with_plan = || found.rows.iter().filter(|row| row.point.is_some()).map(|row| row.nodes).next_back();
    let nodes = found.recommended.map(|r| r.nodes).or_else(with_plan)?;
    let point = found.rows.iter().find(|row| row.nodes == nodes)?.point.as_ref()?;
    let batch = point.global_batch;
    let (optimizer, rule) = advised(batch, &found.optimizer);
    let steps = point.training.map(|training| training.steps.ceil().max(1.0));
    let epoch = found.question.length.and_then(|length: Length| Some(length.in_epoch? as f64 / batch.max(1) as f64));
    let mut text =
        format!("# '{}' on {nodes} nodes of {}, as `altiplano scale` recommends.\n", found.model, found.cluster);
    // Writing to a string does not fail.
    let mut line = |text_of: String| _ = writeln!(text, "{text_of}");
    line(format!("global-batch = {batch}"));
    line(format!("optimizer = \"{}\"", optimizer.name()));
    match steps {
        Some(steps) => line(format!("steps = {steps:.0}")),
        None => line("# steps: say --samples or --tokens to `altiplano scale`, and they follow".to_string()),
    }
    match found.question.base_rate {
        Some(base) => {
            let growth = batch as f64 / base.batch.max(1) as f64;
            let rate = base.rate * rule.factor(growth);
            line(format!("lr = {rate:?} # {} from {:?} at {} samples", rule.words(), base.rate, base.batch));
        }
        None => line("# lr: say --learning-rate and --base-batch to `altiplano scale`, and it follows".to_string()),
    }
    match (&optimizer, steps, epoch) {
        (Optimizer::Sgd { .. } | Optimizer::Nesterov { .. }, Some(steps), Some(epoch)) => {
            let warm_up = (SGD_WARM_UP_EPOCHS * epoch).ceil().min((steps / 2.0).floor());
            line(format!("lr-warmup = {warm_up:.0} # 5 epochs (Goyal et al. 2017)"));
            line("lr-schedule = \"step\" # a tenth after each 30 epochs (Goyal et al. 2017)".to_string());
            line(format!("lr-every = {:.0}", (SGD_FALL_EPOCHS * epoch).ceil().max(1.0)));
        }
        (Optimizer::Lars { .. }, Some(steps), Some(epoch)) => {
            let warm_up = (SGD_WARM_UP_EPOCHS * epoch).ceil().min((steps / 2.0).floor());
            line(format!("lr-warmup = {warm_up:.0} # 5 epochs, and a polynomial of power 2 (You et al. 2017)"));
            line("lr-schedule = \"polynomial\"\nlr-power = 2".to_string());
        }
        // The steps of these optimizers shrink by themselves, or have no rate of their own.
        (Optimizer::Adagrad { .. } | Optimizer::Adadelta { .. }, Some(_), _) => {
            line("lr-schedule = \"constant\"".to_string());
        }
        (_, Some(steps), _) => {
            let warm_up = (steps * warm_up_part(batch)).ceil();
            line(format!("lr-warmup = {warm_up:.0} # a part of the steps that grows with the batch (You et al. 2020)"));
            line("lr-schedule = \"linear\"".to_string());
        }
        (_, None, _) => {}
    }
    Some(text)
}

/// Fraction of all steps in the warm-up: 1/320 at 512 samples, proportional to the batch, and at most a fifth (You et
/// al. 2020, on BERT).
fn warm_up_part(batch: u64) -> f64 {
    (batch as f64 / 512.0 / 320.0).min(0.2)
}
