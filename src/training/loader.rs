//! Prefetches batches while steps run.

use crate::error::Error;
use crate::training::checkpoint::Position;
use crate::training::data::{Batch, Batches};
use crate::training::{MAX_AHEAD, Training};
use altiplano_ir::plan::Plan;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

/// Limit on the bytes of batches read ahead; larger batches are read one ahead.
const AHEAD_BYTES: u64 = 1 << 20;

/// A thread that reads batches ahead, and ends with the loader.
pub(crate) struct Loader {
    batches: Receiver<Result<Loaded, Error>>,
}

/// A batch, and the position in the data after it.
pub(crate) struct Loaded {
    pub batch: Batch,
    pub position: Position,
}

/// The throughput of reading batches.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSpeed {
    pub description: Option<String>,
    pub files: u64,
    /// Seconds until all files were open.
    pub open_s: f64,
    pub batches: u64,
    /// Bytes in the model's types.
    pub bytes: u64,
    pub seconds: f64,
}

/// Reads `training.steps` batches as training does, with no work in between.
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
    /// Starts to read at most `count` batches.
    pub(crate) fn new(mut batches: Batches, count: u64) -> Result<Loader, Error> {
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

    /// Returns the next batch and the seconds spent waiting for it; `None` after the last.
    pub(crate) fn next(&mut self) -> Result<Option<(Loaded, f64)>, Error> {
        let start = Instant::now();
        match self.batches.recv() {
            Ok(loaded) => Ok(Some((loaded?, start.elapsed().as_secs_f64()))),
            Err(_) => Ok(None),
        }
    }
}
