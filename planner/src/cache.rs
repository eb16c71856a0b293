//! A cache of earlier searches on disk, by content: tables of layers, predictions of plans, and stages solved as
//! wholes.
//!
//! A key covers everything that an answer depends on. So a search with a cache finds the same plan as one without. If a
//! model or cluster changed in part, only that part is searched again. Files of another build and damaged files are
//! ignored.

use altiplano_cost_models::Costs;
use altiplano_ir::plan::{Plan, Stage};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::Permissions;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Largest size of the file. Answers that were used last stay.
const MOST_BYTES: usize = 256 << 20;
/// Largest size of answers that are kept in memory alone.
const MOST_BYTES_IN_MEMORY: usize = 64 << 20;
/// The name of the file in its folder.
const FILE: &str = "altiplano-searches";

/// Answers by key.
#[derive(Debug)]
pub struct Cache {
    /// `None` if answers are kept in memory alone.
    file: Option<PathBuf>,
    /// The beginning of the file, which names the build that can read it.
    header: Vec<u8>,
    read: Vec<u8>,
    /// Keys and positions of the answers in `read`, in its order.
    places: Vec<(Key, Range<usize>)>,
    index: FxHashMap<Key, usize>,
    learned: Mutex<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    new: BTreeMap<Key, Vec<u8>>,
    /// Bytes of `new`.
    bytes: usize,
    /// Keys from the file that were asked for.
    used: FxHashSet<Key>,
}

/// A 128-bit hash of everything that an answer depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key([u64; 2]);

/// Hashes the parts that an answer depends on.
pub struct Digest {
    halves: [DefaultHasher; 2],
    /// True if all parts could be hashed.
    whole: bool,
}

impl Digest {
    /// `kind` keeps answers of different kinds apart.
    pub fn new(kind: &str) -> Digest {
        let mut digest = Digest { halves: [DefaultHasher::new(), DefaultHasher::new()], whole: true };
        digest.halves[1].write_u8(1);
        digest.part(kind.as_bytes());
        digest
    }

    /// Adds one part. Its length is part of the key.
    fn part(&mut self, bytes: &[u8]) {
        for hasher in &mut self.halves {
            hasher.write(bytes);
            hasher.write_usize(bytes.len());
        }
    }

    /// Adds the debug output of a value.
    pub fn shown(mut self, value: impl fmt::Debug) -> Digest {
        self.part(format!("{value:?}").as_bytes());
        self
    }

    /// Adds a value in its stored form.
    pub fn stored(mut self, value: &impl Serialize) -> Digest {
        match rmp_serde::to_vec_named(value) {
            Ok(bytes) => self.part(&bytes),
            Err(_) => self.whole = false,
        }
        self
    }

    /// Returns the key; `None` if some part could not be hashed.
    pub fn key(self) -> Option<Key> {
        self.whole.then(|| Key(self.halves.map(|hasher| hasher.finish())))
    }
}

/// Returns a cached answer, or runs a search and caches its answer.
///
/// `key` is called only if there is a cache. It returns `None` if the answer depends on something without an identity.
pub fn remembered<T: Serialize + DeserializeOwned>(
    cache: Option<&Cache>,
    key: impl FnOnce() -> Option<Key>,
    find: impl FnOnce() -> T,
) -> T {
    let Some((cache, key)) = cache.and_then(|cache| Some((cache, key()?))) else { return find() };
    if let Some(known) = cache.get(key) {
        return known;
    }
    let found = find();
    cache.keep(key, &found);
    found
}

/// Key of everything that the prediction of a plan depends on; `None` if its costs have no identity.
pub(crate) fn of_plan(plan: &Plan, costs: &dyn Costs) -> Option<Key> {
    let prices: Option<Vec<String>> =
        (0..plan.cluster.groups.len()).map(|group| costs.of_group(group as u32).identity()).collect();
    // Fields are named one by one, so that a new field must be handled here.
    let Plan {
        graph_hash,
        cluster,
        global_batch,
        num_microbatches,
        microbatch,
        schedule,
        order,
        update,
        servers,
        goal,
        virtual_stages,
        placement,
        optimizer,
        clip_norm,
        loss_scale,
        measure_noise,
        execution,
        target,
        loss,
        stop_gradients,
        layers,
        stages,
        // The hash covers the graph except for its pins.
        graph,
        // The original graph does not change predictions of the padded one.
        padding: _,
        made_by: _,
        certificate: _,
        proof: _,
        // Names, and earlier predictions.
        format: _,
        version: _,
        model: _,
        reduction: _,
        profile: _,
        predicted: _,
        alternatives: _,
    } = plan;
    let size = (global_batch, num_microbatches, microbatch, schedule, update, servers, goal, virtual_stages, order);
    let training = (optimizer, clip_norm, loss_scale, measure_noise, execution, loss, stop_gradients, target);
    let shown = (prices?, graph_hash, &graph.pins, size, placement, training, layers);
    let mut digest = Digest::new("plan").shown(shown).stored(cluster);
    for stage in stages {
        let Stage {
            layers,
            group,
            submesh,
            devices,
            mesh,
            recompute,
            zero,
            offload,
            shardings,
            parameters,
            receives,
            solved: _,
            predicted: _,
        } = stage;
        digest =
            digest.shown((layers, group, submesh, devices, mesh, zero, offload)).stored(recompute).stored(parameters);
        digest = digest.stored(receives).stored(shardings);
    }
    digest.key()
}

impl Cache {
    /// Opens the cache of a folder, which is created if needed. `build` identifies the program, which cannot use
    /// answers of another build.
    ///
    /// # Errors
    /// If the folder cannot be created, or its file cannot be read.
    pub fn open(folder: &Path, build: &str) -> io::Result<Cache> {
        std::fs::create_dir_all(folder)?;
        let file = folder.join(FILE);
        let read = match std::fs::metadata(&file) {
            // To read a pipe waits for a writer, and a device may never end.
            Ok(found) if !found.is_file() => {
                let problem = format!("its file {FILE} is not a regular file");
                return Err(io::Error::new(ErrorKind::InvalidInput, problem));
            }
            // No build writes a file of this size.
            Ok(found) if found.len() > 2 * MOST_BYTES as u64 => Vec::new(),
            Ok(_) => std::fs::read(&file)?,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let header = format!("altiplano searches of {build}\n").into_bytes();
        let places = places(&read, &header).unwrap_or_default();
        let index = places.iter().enumerate().map(|(i, (key, _))| (*key, i)).collect();
        Ok(Cache { file: Some(file), header, read, places, index, learned: Mutex::default() })
    }

    /// A cache that ends with the process. Above its limit of bytes it starts anew.
    pub fn in_memory() -> Cache {
        Cache {
            file: None,
            header: Vec::new(),
            read: Vec::new(),
            places: Vec::new(),
            index: FxHashMap::default(),
            learned: Mutex::default(),
        }
    }

    /// The answer for a key, if it is known.
    pub fn get<T: DeserializeOwned>(&self, key: Key) -> Option<T> {
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(&at) = self.index.get(&key) else {
            // Other requests of this process may ask for new answers.
            return rmp_serde::from_slice(learned.new.get(&key)?).ok();
        };
        learned.used.insert(key);
        drop(learned);
        rmp_serde::from_slice(&self.read[self.places[at].1.clone()]).ok()
    }

    /// Keeps an answer for [`Cache::save`].
    pub fn keep<T: Serialize>(&self, key: Key, value: &T) {
        let Ok(bytes) = rmp_serde::to_vec_named(value) else { return };
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        if self.file.is_none() && learned.bytes + bytes.len() > MOST_BYTES_IN_MEMORY {
            learned.new.clear();
            learned.bytes = 0;
        }
        learned.bytes += bytes.len();
        learned.new.insert(key, bytes);
    }

    /// The file of the answers; `None` if they are kept in memory alone.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Writes new and old answers, completely or not at all. If they are too large, answers that were not asked for are
    /// dropped first.
    ///
    /// # Errors
    /// If the file cannot be written. The old file stays.
    pub fn save(&self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        if learned.new.is_empty() {
            return Ok(());
        }
        let new = learned.new.iter().map(|(key, bytes)| (*key, bytes.as_slice()));
        let learned = &*learned;
        let old = |used: bool| {
            let wanted = self.places.iter().filter(move |(key, _)| learned.used.contains(key) == used);
            wanted.map(|(key, place)| (*key, &self.read[place.clone()]))
        };
        let mut seen: FxHashSet<Key> = FxHashSet::default();
        let mut written = self.header.clone();
        for (key, bytes) in new.chain(old(true)).chain(old(false)) {
            if written.len() + bytes.len() > MOST_BYTES || !seen.insert(key) {
                continue;
            }
            written.extend(key.0.iter().flat_map(|half| half.to_le_bytes()));
            written.extend((bytes.len() as u64).to_le_bytes());
            written.extend(bytes);
        }
        let sum = checksum(&written);
        written.extend(sum);
        let folder = file.parent().unwrap_or(Path::new("."));
        // As any new file, as far as the user's mask leaves it.
        let new = Permissions::from_mode(0o666);
        let mut part = tempfile::Builder::new().prefix(".searches.").permissions(new).tempfile_in(folder)?;
        part.write_all(&written)?;
        part.persist(file).map(drop).map_err(|error| error.error)
    }
}

/// Keys and positions of the answers in a complete file of this build.
fn places(read: &[u8], header: &[u8]) -> Option<Vec<(Key, Range<usize>)>> {
    let end = read.len().checked_sub(CHECKSUM)?;
    let (content, sum) = read.split_at(end);
    if !content.starts_with(header) || sum != checksum(content) {
        return None;
    }
    let (mut found, mut at) = (Vec::new(), header.len());
    while at < end {
        let word = |i: usize| {
            let bytes = content.get(at + 8 * i..at + 8 * (i + 1))?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let (key, length) = (Key([word(0)?, word(1)?]), usize::try_from(word(2)?).ok()?);
        let start = at + 24;
        let stop = start.checked_add(length).filter(|&stop| stop <= end)?;
        found.push((key, start..stop));
        at = stop;
    }
    Some(found)
}

const CHECKSUM: usize = 8;

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM] {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish().to_le_bytes()
}
