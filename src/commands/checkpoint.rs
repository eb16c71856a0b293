//! `altiplano checkpoint DIR`: lists and verifies checkpoints, and exports their weights as one file.

use crate::commands::say;
use altiplano::runtime::data::write_safetensors;
use altiplano::training::checkpoint::{CheckpointProblem, MANIFEST, list, verify, weights};
use altiplano::units::{bytes, plural};
use altiplano::{Error, expect_writable};
use clap::Args;
use std::path::PathBuf;

/// Verify the checkpoints of a run, or export the weights of one
#[derive(Args)]
pub(crate) struct Checkpoint {
    /// The folder of a run's checkpoints, or one of them
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Write the weights of the newest complete checkpoint (.safetensors, for --weights)
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Checkpoint {
    pub(crate) fn run(self) -> Result<(), Error> {
        if let Some(file) = &self.output {
            expect_writable(file)?;
            let damaged = |error: &Error| {
                complain!("warning: {error}; trying the previous one");
                Ok(())
            };
            let (manifest, weights) = weights(&self.folder, damaged)?;
            write_safetensors(file, &weights)?;
            let tensors = plural(weights.len() as u64, "tensor");
            return say(format!("{}: {tensors} of '{}' after step {}", file.display(), manifest.model, manifest.step));
        }
        let places: Vec<PathBuf> = match self.folder.join(MANIFEST).exists() {
            true => vec![self.folder.clone()],
            false => list(&self.folder)?.into_iter().map(|found| found.place).collect(),
        };
        if places.is_empty() {
            return Err(CheckpointProblem::None.at(&self.folder));
        }
        let mut damaged = None;
        for place in places {
            match verify(&place) {
                Ok(manifest) => {
                    let size: u64 = manifest.files.iter().map(|file| file.bytes).sum();
                    let files = plural(manifest.files.len() as u64, "file");
                    let (model, optimizer) = (&manifest.model, manifest.optimizer.name());
                    let samples = manifest.data.position.samples;
                    say(format!(
                        "{}: complete; '{model}' after step {} and {samples} samples, {optimizer}, {} in {files}",
                        place.display(),
                        manifest.step,
                        bytes(size)
                    ))?;
                }
                Err(error) => {
                    say(&error)?;
                    damaged = Some(error);
                }
            }
        }
        damaged.map_or(Ok(()), Err)
    }
}
