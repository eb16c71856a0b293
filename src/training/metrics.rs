//! Writes a line of JSON for each step and each evaluation. A resumed run continues its file.

use crate::error::Error;
use crate::training::Step;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The file of a run's metrics.
pub(crate) struct Metrics {
    file: PathBuf,
    open: File,
}

#[derive(Serialize)]
struct Line {
    step: u64,
    loss: f64,
    learning_rate: f64,
    seconds: f64,
    samples_per_s: f64,
    data_wait_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    gradient_norm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    noise_scale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped_steps: Option<u64>,
}

#[derive(Serialize)]
struct EvaluationLine {
    step: u64,
    eval_loss: f64,
}

/// The field that identifies a line.
#[derive(Deserialize)]
struct Number {
    step: u64,
}

impl Metrics {
    /// Creates a file, or continues one after the line of step `done`, so that repeated steps do not appear twice.
    /// Later lines are lost from it, so it is copied first, and `on_copy` gets the copy's name.
    pub(crate) fn open(
        file: &Path,
        done: u64,
        on_copy: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<Metrics, Error> {
        let write = |error| Error::Write { file: file.to_path_buf(), error };
        let kept = if done == 0 { 0 } else { kept_bytes(file, done).map_err(write)? };
        let open = OpenOptions::new().create(true).append(true).open(file).map_err(write)?;
        let metadata = open.metadata().map_err(write)?;
        // A pipe cannot be truncated.
        if metadata.is_file() && metadata.len() > kept {
            let copy = copied(file)?;
            open.set_len(kept).map_err(write)?;
            on_copy(&copy)?;
        }
        Ok(Metrics { file: file.to_path_buf(), open })
    }

    /// Writes the line of a step and flushes it.
    pub(crate) fn write(&mut self, step: &Step) -> Result<(), Error> {
        let Step {
            number,
            loss,
            learning_rate,
            seconds,
            samples_per_s,
            data_wait_s,
            gradient_norm,
            noise_scale,
            scaling,
        } = *step;
        let step = number;
        let (loss_scale, skipped_steps) = (scaling.map(|s| s.scale), scaling.map(|s| s.skipped_steps));
        self.append(&Line {
            step,
            loss,
            learning_rate,
            seconds,
            samples_per_s,
            data_wait_s,
            gradient_norm,
            noise_scale,
            loss_scale,
            skipped_steps,
        })
    }

    /// Writes the loss on held-out data after a step.
    pub(crate) fn write_evaluation(&mut self, step: u64, eval_loss: f64) -> Result<(), Error> {
        self.append(&EvaluationLine { step, eval_loss })
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), Error> {
        // Numbers always have a JSON form.
        let text = serde_json::to_string(line).unwrap_or_default() + "\n";
        let written = self.open.write_all(text.as_bytes()).and_then(|()| self.open.flush());
        written.map_err(|error| Error::Write { file: self.file.clone(), error })
    }
}

/// Copies a file to its name with the first free number: `metrics.jsonl.1`.
fn copied(file: &Path) -> Result<PathBuf, Error> {
    let numbered = |number: u64| {
        let mut name = file.as_os_str().to_os_string();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let mut number = 1;
    loop {
        let copy = numbered(number);
        match OpenOptions::new().write(true).create_new(true).open(&copy) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(Error::Write { file: copy, error }),
            Ok(mut to) => {
                let bytes = File::open(file).and_then(|mut from| std::io::copy(&mut from, &mut to));
                return bytes
                    .and_then(|_| to.sync_all())
                    .map(|()| copy.clone())
                    .map_err(|error| Error::Write { file: copy, error });
            }
        }
    }
}

/// Length of the lines of the first `done` steps. Anything after an incomplete line is dropped with it.
fn kept_bytes(file: &Path, done: u64) -> std::io::Result<u64> {
    // A pipe keeps no lines, and opening it would wait for a writer.
    if !std::fs::metadata(file).is_ok_and(|found| found.is_file()) {
        return Ok(0);
    }
    let mut reader = BufReader::new(File::open(file)?);
    let (mut kept, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let length = reader.read_until(b'\n', &mut line)?;
        let number: Option<Number> = serde_json::from_slice(&line).ok();
        if line.last() != Some(&b'\n') || number.is_none_or(|number| number.step > done) {
            return Ok(kept);
        }
        kept += length as u64;
    }
}
