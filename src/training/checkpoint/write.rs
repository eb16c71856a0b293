//! Writes a checkpoint in the background. Tensors are copied between two steps and passed file by file to a thread,
//! which holds few of them at a time.

use crate::error::Error;
use crate::training::checkpoint::folder::sync_folder;
use crate::training::checkpoint::{
    CheckpointProblem, Checkpoints, Folder, MANIFEST, Manifest, Shard, TensorOf, tensors_of, wide_hex,
};
use altiplano_ir::plan::Plan;
use altiplano_runtime::data::encode_safetensors;
use altiplano_runtime::{HostTensor, Session};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use xxhash_rust::xxh3::xxh3_128;

/// Maximum number of files waiting to be written; training blocks beyond it.
const WAITING: usize = 2;

/// Writes the checkpoints of a run, one at a time.
pub struct Writer {
    /// `None` if another process writes, to which this one contributes its parts.
    folder: Option<Folder>,
    options: Checkpoints,
    in_flight: Option<(u64, JoinHandle<Result<PathBuf, Error>>)>,
}

/// The outcome of a checkpoint.
pub struct Written {
    pub step: u64,
    pub result: Result<PathBuf, Error>,
}

enum Part {
    Tensors(Vec<(String, HostTensor)>),
    Manifest(Box<Manifest>),
}

impl Writer {
    pub fn new(folder: Folder) -> Writer {
        let options = folder.options.clone();
        Writer { folder: Some(folder), options, in_flight: None }
    }

    /// A writer for a process that only contributes its parts.
    pub fn contributing(options: Checkpoints) -> Writer {
        Writer { folder: None, options, in_flight: None }
    }

    /// Copies the session's tensors and starts to write them. The previous checkpoint must be [`Self::finish`]ed.
    pub fn start(&mut self, plan: &Plan, session: &mut Session, manifest: Manifest) -> Result<(), Error> {
        let options = self.options.clone();
        if self.folder.is_none() {
            return hand_over(plan, session, options.shard_bytes, None);
        }
        let step = manifest.step;
        let (sender, receiver) = sync_channel(WAITING);
        let place = options.folder.clone();
        let thread = std::thread::Builder::new()
            .name(format!("checkpoint {step}"))
            .spawn(move || write(&options.folder, step, options.keep, &receiver))
            .map_err(|error| CheckpointProblem::Io(error).at(&place))?;
        self.in_flight = Some((step, thread));
        hand_over(plan, session, self.options.shard_bytes, Some(&sender))?;
        // If the thread ended early, `finish` returns its error.
        let _ = sender.send(Part::Manifest(Box::new(manifest)));
        Ok(())
    }

    /// The outcome of the checkpoint in progress, once it is known.
    pub fn poll(&mut self) -> Option<Written> {
        if self.in_flight.as_ref().is_some_and(|(_, thread)| thread.is_finished()) { self.finish() } else { None }
    }

    /// Waits for the checkpoint in progress.
    pub fn finish(&mut self) -> Option<Written> {
        let (step, thread) = self.in_flight.take()?;
        let abandoned = |_| Err(CheckpointProblem::Abandoned.at(&self.options.folder));
        Some(Written { step, result: thread.join().unwrap_or_else(abandoned) })
    }
}

impl Drop for Writer {
    /// The folder stays locked until nothing writes to it.
    fn drop(&mut self) {
        self.finish();
    }
}

/// Copies all parameters and state of a session, in files of about `shard_bytes`.
fn hand_over(
    plan: &Plan,
    session: &mut Session,
    shard_bytes: u64,
    sender: Option<&SyncSender<Part>>,
) -> Result<(), Error> {
    // If the writer ended early, drop the tensors. All processes of a run must gather all tensors nevertheless.
    let give = |tensors| sender.map_or(Ok(()), |sender| sender.send(Part::Tensors(tensors)).map_err(drop));
    let mut gone = false;
    let (mut tensors, mut bytes) = (Vec::new(), 0);
    for of in tensors_of(plan) {
        let gathered = match of {
            TensorOf::Parameter { name } => session.gather_parameter(name)?,
            TensorOf::State { parameter, slot } => session.gather_state(parameter, slot)?,
        };
        let Some(tensor) = gathered else { continue };
        if gone {
            continue;
        }
        if bytes > 0 && bytes + tensor.ty.bytes() > shard_bytes {
            gone = give(std::mem::take(&mut tensors)).is_err();
            bytes = 0;
        }
        bytes += tensor.ty.bytes();
        tensors.push((of.key(), tensor));
    }
    let _ = give(tensors);
    Ok(())
}

/// Writes the received parts to a temporary folder, and renames it when it is complete.
fn write(folder: &Path, step: u64, keep: Option<u64>, parts: &Receiver<Part>) -> Result<PathBuf, Error> {
    let part = Folder::part(folder, step);
    let written = write_part(folder, &part, step, parts);
    if written.is_err() {
        // If even this fails, the next run removes it.
        let _ = std::fs::remove_dir_all(&part);
    }
    let place = written?;
    if let Some(keep) = keep {
        Folder::prune(folder, &place, step, keep)?;
    }
    Ok(place)
}

fn write_part(folder: &Path, part: &Path, step: u64, parts: &Receiver<Part>) -> Result<PathBuf, Error> {
    let io = |error| CheckpointProblem::Io(error).at(part);
    if part.exists() {
        std::fs::remove_dir_all(part).map_err(io)?;
    }
    std::fs::create_dir(part).map_err(io)?;
    let mut files = Vec::new();
    for received in parts {
        match received {
            Part::Tensors(tensors) => {
                let name = format!("tensors-{:05}.safetensors", files.len());
                let bytes = encode_safetensors(&part.join(&name), tensors)?;
                write_synced(&part.join(&name), &bytes)?;
                let xxh3 = Some(wide_hex(xxh3_128(&bytes)));
                files.push(Shard { name, bytes: bytes.len() as u64, xxh3, crc32: None });
            }
            Part::Manifest(manifest) => {
                let manifest = Manifest { files, ..*manifest };
                write_synced(&part.join(MANIFEST), manifest.to_json().as_bytes())?;
                sync_folder(part).map_err(io)?;
                return Folder::publish(folder, step).map_err(|error| CheckpointProblem::Io(error).at(folder));
            }
        }
    }
    Err(CheckpointProblem::Abandoned.at(part))
}

fn write_synced(file: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = File::create_new(file).and_then(|mut open| open.write_all(bytes).and_then(|()| open.sync_all()));
    written.map_err(|error| CheckpointProblem::Io(error).at(file))
}
