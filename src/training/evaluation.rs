//! The loss on held-out data between steps: the plan runs forward with the current weights.
//!
//! It uses the plan's own stages, layouts and microbatches without a backward pass. So it fits if training fits, and
//! needs no planning of its own. Workers that are threads hold a second copy of the weights. Ranks evaluate with the
//! weights that they train, and with those that they pull from servers that have newer ones.

use crate::error::Error;
use crate::training::engine::Engine;
use crate::training::{Batches, DataOptions, Training, session, start};
use altiplano_ir::batch::LossKind;
use altiplano_ir::plan::{Plan, Schedule, Update};
#[cfg(feature = "mpi")]
use altiplano_planner::programs;
use altiplano_runtime::{Options, Session};
#[cfg(feature = "mpi")]
use altiplano_runtime::{RuntimeError, mpi::RankEvaluation};
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

/// The devices that evaluate.
enum Devices {
    /// Separate workers, which receive the weights.
    Own(Box<Session>),
    /// The ranks that train, with their own weights.
    #[cfg(feature = "mpi")]
    Ranks(Box<RankEvaluation>),
}

/// Workers that evaluate.
pub struct Evaluation {
    devices: Devices,
    plan: Plan,
    batches: Batches,
    steps: u64,
}

impl Evaluation {
    /// `training` describes the model's initial state, `engine` trains it.
    pub fn new(
        trained: &Plan,
        training: &Training,
        options: &EvaluationOptions,
        engine: &Engine,
    ) -> Result<Evaluation, Error> {
        let (_, batches) = start(trained, &Training { data: options.data.clone(), ..training.clone() })?;
        let (schedule, update) = (Schedule::Forward, Update::Synchronous);
        let mut plan =
            Plan { schedule, update, measure_noise: false, clip_norm: None, loss_scale: None, ..trained.clone() };
        // Only the loss is needed.
        Arc::make_mut(&mut plan.graph).outputs.truncate(1);
        let devices = match engine {
            Engine::Cpu(_) => {
                let options = Options { check_nan: training.check_nan, ..Options::default() };
                Devices::Own(Box::new(session(&plan, &options)?))
            }
            Engine::Cuda(_) => {
                let problem = "only CPU workers evaluate held-out data so far";
                return Err(Error::Option { option: "--eval-data", problem });
            }
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => Devices::Ranks(Box::new(session.evaluation(&programs(&plan)?)?)),
        };
        #[cfg(feature = "mpi")]
        let mut batches = batches;
        #[cfg(feature = "mpi")]
        if let Devices::Ranks(evaluation) = &devices {
            batches.read_only(|input, dim, rows| {
                let mut read = vec![false; rows];
                evaluation.mark_rows(input, dim, &mut read);
                Some(read)
            });
        }
        Ok(Evaluation { devices, plan, batches, steps: options.steps.max(1) })
    }

    /// The mean loss of the held-out batches with the weights of `engine`.
    pub fn loss(&mut self, engine: &mut Engine) -> Result<f64, Error> {
        match &mut self.devices {
            Devices::Own(session) => {
                for name in session.parameters() {
                    let weights = engine.parameter(&name)?;
                    session.load_parameter(&name, &weights)?;
                }
            }
            #[cfg(feature = "mpi")]
            Devices::Ranks(_) => {}
        }
        self.batches.seek(Default::default());
        let mut sum = 0.0;
        for _ in 0..self.steps {
            let batch = self.batches.take()?;
            let losses: Vec<f64> = match (&mut self.devices, &mut *engine) {
                #[cfg(feature = "mpi")]
                (Devices::Ranks(evaluation), Engine::Ranks(session)) => session.evaluate(evaluation, &batch)?,
                #[cfg(feature = "mpi")]
                (Devices::Ranks(_), _) => return Err(RuntimeError::NoStep.into()),
                (Devices::Own(session), _) => {
                    let (_, results) = session.evaluate(&batch)?;
                    results.values().take(1).flatten().flat_map(|loss| loss.to_f64()).collect()
                }
            };
            let parts = if self.plan.loss == LossKind::Sum { 1.0 } else { losses.len().max(1) as f64 };
            sum += losses.iter().sum::<f64>() / parts;
        }
        Ok(sum / self.steps as f64)
    }
}
