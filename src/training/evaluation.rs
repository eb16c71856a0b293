//! The loss on held-out data, between steps: the plan run forward, with the weights that training has come to.
//!
//! What is run is the plan's own stages, layouts and microbatches without a backward, so that it fits where training fits and needs
//! no lowering of its own. Its workers hold the weights once more.

use crate::error::Error;
use crate::training::engine::Engine;
use crate::training::{Batches, DataOptions, Training, session, start};
use altiplano_ir::batch::LossKind;
use altiplano_ir::plan::{Plan, Schedule, Update};
use altiplano_runtime::{Options, Session};

/// What is evaluated, and when.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaluationOptions {
    /// Held-out samples.
    pub data: DataOptions,
    /// Steps between two evaluations; there is one after the last step in any case.
    pub every: u64,
    /// Batches of an evaluation, the first of the file each time.
    pub steps: u64,
}

/// Workers that evaluate.
pub struct Evaluation {
    session: Session,
    plan: Plan,
    batches: Batches,
    steps: u64,
}

impl Evaluation {
    /// `training` says how the model is started, its state above all.
    pub fn new(plan: &Plan, training: &Training, options: &EvaluationOptions) -> Result<Evaluation, Error> {
        let (_, batches) = start(plan, &Training { data: options.data.clone(), ..training.clone() })?;
        let (schedule, update) = (Schedule::Forward, Update::Synchronous);
        let mut plan =
            Plan { schedule, update, measure_noise: false, clip_norm: None, loss_scale: None, ..plan.clone() };
        // The stage of parameter servers' workers is run by one of them.
        plan.servers = None;
        // Results beside the loss are not asked for.
        plan.graph.outputs.truncate(1);
        let session = session(&plan, &Options { check_nan: training.check_nan, ..Options::default() })?;
        Ok(Evaluation { session, plan, batches, steps: options.steps.max(1) })
    }

    /// The mean loss of the held-out batches with the weights of `engine`.
    pub fn loss(&mut self, engine: &mut Engine) -> Result<f64, Error> {
        for name in self.session.parameters() {
            let weights = engine.parameter(&name)?;
            self.session.load_parameter(&name, &weights)?;
        }
        self.batches.seek(Default::default());
        let mut sum = 0.0;
        for _ in 0..self.steps {
            let (_, results) = self.session.evaluate(&self.batches.take()?)?;
            let losses: Vec<f64> = results.values().take(1).flatten().flat_map(|loss| loss.to_f64()).collect();
            let parts = if self.plan.loss == LossKind::Sum { 1.0 } else { losses.len().max(1) as f64 };
            sum += losses.iter().sum::<f64>() / parts;
        }
        Ok(sum / self.steps as f64)
    }
}
