//! The next batches are read while steps run.

use crate::error::Error;
use crate::training::checkpoint::Position;
use crate::training::data::{Batch, Batches};
use crate::training::{MAX_AHEAD, Training};
use altiplano_ir::plan::Plan;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

/// Small batches are read ahead up to so many bytes; of others, one.
const AHEAD_BYTES: u64 = 1 << 20;

/// Batches that a thread reads ahead. The thread ends with the loader.
pub struct Loader {
    batches: Receiver<Result<Loaded, Error>>,
}

/// A batch, and how much was taken with it.
pub struct Loaded {
    pub batch: Batch,
    pub position: Position,
}

/// How fast batches are read.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSpeed {
    pub description: Option<String>,
    pub files: u64,
    /// Until all files were open.
    pub open_s: f64,
    pub batches: u64,
    /// As the model takes them.
    pub bytes: u64,
    pub seconds: f64,
}

/// Reads `training.steps` batches as training does, with nothing done in between.
pub fn input_speed(plan: &Plan, training: &Training) -> Result<InputSpeed, Error> {
    let begun = Instant::now();
    let batches = Batches::with_state(plan, &training.data, training.seed, &BTreeMap::new())?;
    let (files, description, open_s) = (batches.num_files(), batches.description(), begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    let mut loader = Loader::new(batches, training.steps)?;
    let (mut count, mut bytes) = (0, 0);
    while let Some((Loaded { batch, .. }, _)) = loader.next()? {
        count += 1;
        bytes += batch.values().map(|tensor| tensor.ty.bytes()).sum::<u64>();
    }
    Ok(InputSpeed { description, files, open_s, batches: count, bytes, seconds: begun.elapsed().as_secs_f64() })
}

impl Loader {
    /// Reads `count` batches at most.
    pub fn new(mut batches: Batches, count: u64) -> Result<Loader, Error> {
        let file = batches.file().map(std::path::Path::to_path_buf).unwrap_or_default();
        let ahead = AHEAD_BYTES / batches.bytes().max(1);
        let (sender, receiver) = sync_channel(ahead.clamp(1, MAX_AHEAD as u64) as usize);
        std::thread::Builder::new()
            .name("data".to_string())
            .spawn(move || {
                for _ in 0..count {
                    let loaded = batches.take().map(|batch| Loaded { batch, position: batches.position() });
                    let failed = loaded.is_err();
                    if sender.send(loaded).is_err() || failed {
                        return;
                    }
                }
            })
            .map_err(|error| Error::Read { file, error })?;
        Ok(Loader { batches: receiver })
    }

    /// The next batch, and the seconds that it was waited for. None when there are no more.
    pub fn next(&mut self) -> Result<Option<(Loaded, f64)>, Error> {
        let start = Instant::now();
        match self.batches.recv() {
            Ok(loaded) => Ok(Some((loaded?, start.elapsed().as_secs_f64()))),
            Err(_) => Ok(None),
        }
    }
}
