//! The loss on held-out data between steps: the plan runs forward with the current weights.
//!
//! It uses the plan's own stages, layouts and microbatches without a backward pass. So it fits if training fits, and
//! needs no planning of its own. Devices evaluate with the weights that they train, and with those that they pull from
//! servers that have newer ones.

use crate::error::Error;
use crate::training::{Batches, DataOptions, Training, start};
use altiplano_ir::batch::LossKind;
use altiplano_ir::plan::{Plan, Schedule, Update};
use altiplano_planner::programs;
use altiplano_runtime::Session;
use std::sync::Arc;

/// Options of evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaluationOptions {
    /// Held-out samples.
    pub data: DataOptions,
    /// Steps between two evaluations. There is always one after the last step.
    pub every: u64,
    /// Batches per evaluation, always the first ones of the file.
    pub steps: u64,
}

/// Held-out batches, and the number of them per evaluation.
pub struct Evaluation {
    loss: LossKind,
    batches: Batches,
    steps: u64,
}

impl Evaluation {
    /// `training` describes the model's initial state, `session` trains it.
    pub fn new(
        trained: &Plan,
        training: &Training,
        options: &EvaluationOptions,
        session: &mut Session,
    ) -> Result<Evaluation, Error> {
        let (_, mut batches) = start(trained, &Training { data: options.data.clone(), ..training.clone() })?;
        if training.cuda.is_some() {
            let problem = "only CPU workers evaluate held-out data so far";
            return Err(Error::Option { option: "--eval-data", problem });
        }
        let (schedule, update) = (Schedule::Forward, Update::Synchronous);
        let mut plan = Plan {
            schedule,
            order: None,
            update,
            measure_noise: false,
            clip_norm: None,
            loss_scale: None,
            ..trained.clone()
        };
        // Only the loss is needed.
        Arc::make_mut(&mut plan.graph).outputs.truncate(1);
        session.prepare_evaluation(&programs(&plan)?)?;
        batches.read_only(|input, dim, rows| session.rows_evaluated(input, dim, rows));
        Ok(Evaluation { loss: plan.loss, batches, steps: options.steps.max(1) })
    }

    /// The mean loss of the held-out batches with the weights of `session`.
    pub fn loss(&mut self, session: &mut Session) -> Result<f64, Error> {
        self.batches.seek(Default::default());
        let mut sum = 0.0;
        for _ in 0..self.steps {
            let losses = session.evaluate_weights(&self.batches.take()?)?;
            let parts = if self.loss == LossKind::Sum { 1.0 } else { losses.len().max(1) as f64 };
            sum += losses.iter().sum::<f64>() / parts;
        }
        Ok(sum / self.steps as f64)
    }
}
