//! The folder of a run's checkpoints. One run at a time locks it, and opening it removes the leftovers of a run that
//! died.

use crate::error::Error;
use crate::training::checkpoint::{CheckpointProblem, Checkpoints, MANIFEST, Manifest, Shard, hex, wide_hex};
use altiplano_runtime::files;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Suffix of folders that are being written or removed, and are no checkpoints.
const PART: &str = ".part";
const LOCK: &str = "lock";

/// A folder that this process has locked. Others are kept out until it is dropped or the process ends in any way.
pub struct Folder {
    pub options: Checkpoints,
    _lock: File,
}

/// A checkpoint found by its name, not verified yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub step: u64,
    pub place: PathBuf,
}

impl Folder {
    /// Creates the folder if necessary, locks it and removes leftovers.
    pub fn open(options: &Checkpoints) -> Result<Folder, Error> {
        let folder = &options.folder;
        let io = |error| CheckpointProblem::Io(error).at(folder);
        std::fs::create_dir_all(folder).map_err(io)?;
        let file = folder.join(LOCK);
        let opened = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&file);
        let mut lock = opened.map_err(|error| CheckpointProblem::Io(error).at(&file))?;
        // The system releases the lock of a process that ends, so no stale lock remains.
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let read = lock.read_to_string(&mut holder);
                let by = read.ok().and_then(|_| holder.trim().parse::<u32>().ok());
                let by = by.map(|process| format!(" (process {process})")).unwrap_or_default();
                return Err(CheckpointProblem::InUse { by }.at(folder));
            }
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(io)?;
        let entries = std::fs::read_dir(folder).map_err(io)?;
        for entry in entries {
            let entry = entry.map_err(io)?;
            let name = entry.file_name();
            if name.to_string_lossy().strip_suffix(PART).is_some_and(|stem| step_of(stem).is_some()) {
                std::fs::remove_dir_all(entry.path()).map_err(io)?;
            }
        }
        let found = Folder { options: options.clone(), _lock: lock };
        match list(folder)?.last() {
            Some(last) if !options.resume => Err(CheckpointProblem::NotEmpty { step: last.step }.at(folder)),
            _ => Ok(found),
        }
    }

    /// The folder of a checkpoint while it is written.
    pub(super) fn part(folder: &Path, step: u64) -> PathBuf {
        folder.join(format!("{}{PART}", name(step)))
    }

    /// Renames a complete checkpoint to its final name. An existing folder of that name is removed: it was damaged, or
    /// this run would have started after it.
    pub(super) fn publish(folder: &Path, step: u64) -> std::io::Result<PathBuf> {
        let place = folder.join(name(step));
        if place.exists() {
            discard(&place)?;
        }
        std::fs::rename(Folder::part(folder, step), &place)?;
        sync_folder(folder)?;
        Ok(place)
    }

    /// Removes all but the newest `keep` checkpoints up to `step`, once `newest` was read back and is whole.
    pub(super) fn prune(folder: &Path, newest: &Path, step: u64, keep: u64) -> Result<(), Error> {
        let older: Vec<Found> = list(folder)?.into_iter().filter(|found| found.step <= step).collect();
        let surplus = older.len().saturating_sub(usize::try_from(keep.max(1)).unwrap_or(usize::MAX));
        if surplus > 0 {
            verify(newest)?;
        }
        for found in &older[..surplus] {
            discard(&found.place).map_err(|error| CheckpointProblem::Io(error).at(&found.place))?;
        }
        Ok(())
    }
}

/// The checkpoints of a folder, by step.
pub fn list(folder: &Path) -> Result<Vec<Found>, Error> {
    let io = |error| CheckpointProblem::Io(error).at(folder);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        if let Some(step) = step_of(&entry.file_name().to_string_lossy())
            && entry.path().is_dir()
        {
            found.push(Found { step, place: entry.path() });
        }
    }
    found.sort_by_key(|found| found.step);
    Ok(found)
}

/// Reads the manifest of a checkpoint and verifies all of its files.
pub fn verify(place: &Path) -> Result<Manifest, Error> {
    let text = match files::read(&place.join(MANIFEST)) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(CheckpointProblem::Missing { file: MANIFEST.to_string() }.at(place));
        }
        Err(error) => return Err(CheckpointProblem::Io(error).at(place)),
    };
    let manifest = Manifest::from_json(&text).map_err(|problem| problem.at(place))?;
    for shard in &manifest.files {
        check_shard(place, shard).map_err(|problem| problem.at(place))?;
    }
    Ok(manifest)
}

fn check_shard(place: &Path, shard: &Shard) -> Result<(), CheckpointProblem> {
    let file = shard.name.clone();
    // Only files in the folder itself belong to the checkpoint.
    if Path::new(&file).file_name().is_none_or(|name| name != file.as_str()) {
        return Err(CheckpointProblem::Missing { file });
    }
    let mut open = match files::open(&place.join(&file)) {
        Ok(open) => open,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(CheckpointProblem::Missing { file }),
        Err(error) => return Err(CheckpointProblem::Io(error)),
    };
    let found = open.metadata().map_err(CheckpointProblem::Io)?.len();
    if found != shard.bytes {
        return Err(CheckpointProblem::Length { file, expected: shard.bytes, found });
    }
    let (mut crc, mut wide) = (crc32fast::Hasher::new(), Xxh3::new());
    let is_wide = shard.xxh3.is_some();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match open.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) if is_wide => wide.update(&chunk[..n]),
            Ok(n) => crc.update(&chunk[..n]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(CheckpointProblem::Io(error)),
        }
    }
    let holds = match (&shard.xxh3, &shard.crc32) {
        (Some(expected), _) => *expected == wide_hex(wide.digest128()),
        (None, Some(expected)) => *expected == hex(crc.finalize()),
        (None, None) => false,
    };
    if holds { Ok(()) } else { Err(CheckpointProblem::Checksum { file }) }
}

/// Renames before it removes, so that no half-removed folder has a checkpoint's name.
fn discard(place: &Path) -> std::io::Result<()> {
    let mut part = place.as_os_str().to_owned();
    part.push(PART);
    let part = PathBuf::from(part);
    // The temporary name is taken by the checkpoint about to be published, or by a leftover.
    let part = if part.exists() { part.with_extension(format!("old{PART}")) } else { part };
    std::fs::rename(place, &part)?;
    std::fs::remove_dir_all(&part)
}

/// Flushes a folder, which makes renames and new files in it durable.
pub(super) fn sync_folder(folder: &Path) -> std::io::Result<()> {
    // Other systems cannot open folders, and flush them with the files.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

fn name(step: u64) -> String {
    format!("step-{step:06}")
}

/// The step in the name of a checkpoint, or of one being replaced (`step-000120.old`).
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let digits = digits.strip_suffix(".old").unwrap_or(digits);
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::checkpoint::DataState;
    use crate::{ImportOptions, load_cluster, load_model, request};
    use altiplano_planner::{Silent, plan};

    #[test]
    fn a_checkpoint_goes_only_after_a_newer_one_was_read_back() {
        let place = std::env::temp_dir().join(format!("altiplano-prune-{}", std::process::id()));
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/gpt-small-demo.mlir");
        let model = load_model(Path::new(model), &ImportOptions::default()).expect("a model");
        let plan = plan(&request(&model, load_cluster("local:1").expect("a cluster")), &Silent).expect("a plan");
        for step in [1, 2] {
            let folder = place.join(name(step));
            std::fs::create_dir_all(&folder).expect("a folder");
            let manifest = Manifest::new(&plan, step, DataState::default());
            std::fs::write(folder.join(MANIFEST), manifest.to_json()).expect("a file");
        }
        let newest = place.join(name(2));
        let text = std::fs::read_to_string(newest.join(MANIFEST)).expect("a manifest");
        std::fs::write(newest.join(MANIFEST), text.replace("gpt", "gqt")).expect("a file");
        assert!(Folder::prune(&place, &newest, 2, 1).is_err());
        assert_eq!(list(&place).expect("checkpoints").len(), 2);
        std::fs::write(newest.join(MANIFEST), text).expect("a file");
        Folder::prune(&place, &newest, 2, 1).expect("it is whole");
        assert_eq!(list(&place).expect("checkpoints").iter().map(|found| found.step).collect::<Vec<_>>(), [2]);
        std::fs::remove_dir_all(place).expect("it goes");
    }
}
