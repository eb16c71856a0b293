//! What earlier searches found, kept on disk by content: tables of layers, what the judge said of plans, stages solved as wholes. A
//! key is made of all that an answer depends on, so that a search with a cache finds the plan that it finds without one, and a
//! model or cluster that changed in part is searched in that part alone. What another build wrote, or what is not whole, is left
//! unread.

use altiplano_cost_models::Costs;
use altiplano_ir::plan::{Plan, Stage};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Of a file, the most that is kept: what was asked for last stays.
const MOST_BYTES: usize = 256 << 20;
/// The name of the file in its folder.
const FILE: &str = "altiplano-searches";

/// Answers by what they depend on.
#[derive(Debug)]
pub struct Cache {
    file: PathBuf,
    /// What the file begins with: who can read it.
    header: Vec<u8>,
    read: Vec<u8>,
    /// Where answers are in what was read, in its order.
    places: Vec<(Key, Range<usize>)>,
    index: FxHashMap<Key, usize>,
    learned: Mutex<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    new: BTreeMap<Key, Vec<u8>>,
    /// Of those that were read, which were asked for.
    used: FxHashSet<Key>,
}

/// What an answer depends on, in 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key([u64; 2]);

/// Takes in what an answer depends on.
pub struct Digest {
    halves: [DefaultHasher; 2],
    /// Whether all of it could be taken in.
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

    /// One part: where it ends is part of the key.
    fn part(&mut self, bytes: &[u8]) {
        for hasher in &mut self.halves {
            hasher.write(bytes);
            hasher.write_usize(bytes.len());
        }
    }

    /// With what a value is when it is printed.
    pub fn shown(mut self, value: impl fmt::Debug) -> Digest {
        self.part(format!("{value:?}").as_bytes());
        self
    }

    /// With a value as it is stored.
    pub fn stored(mut self, value: &impl Serialize) -> Digest {
        match rmp_serde::to_vec_named(value) {
            Ok(bytes) => self.part(&bytes),
            Err(_) => self.whole = false,
        }
        self
    }

    /// Nothing where something could not be taken in.
    pub fn key(self) -> Option<Key> {
        self.whole.then(|| Key(self.halves.map(|hasher| hasher.finish())))
    }
}

/// Runs a search for what is not known.
///
/// `key` is asked only where there is a cache, and says nothing where the answer depends on what has no name.
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

/// All that the judge's word on a plan depends on; nothing where prices have no name.
pub(crate) fn of_plan(plan: &Plan, costs: &dyn Costs) -> Option<Key> {
    let prices: Option<Vec<String>> =
        (0..plan.cluster.groups.len()).map(|group| costs.of_group(group as u32).identity()).collect();
    // Named one by one, so that whoever adds a field says here what becomes of it.
    let Plan {
        graph_hash,
        cluster,
        global_batch,
        num_microbatches,
        microbatch,
        schedule,
        update,
        servers,
        goal,
        virtual_stages,
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
        // Of the graph the hash says all but what is asked of layouts.
        graph,
        // What the graph was made of changes nothing that is predicted of it.
        padding: _,
        made_by: _,
        // How it is called, and what was predicted of it before.
        format: _,
        version: _,
        model: _,
        reduction: _,
        profile: _,
        predicted: _,
        alternatives: _,
    } = plan;
    let size = (global_batch, num_microbatches, microbatch, schedule, update, servers, goal, virtual_stages);
    let training = (optimizer, clip_norm, loss_scale, measure_noise, execution, loss, stop_gradients, target);
    let mut digest =
        Digest::new("plan").shown((prices?, graph_hash, &graph.pins, size, training, layers)).stored(cluster);
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
    /// The cache of a folder, which is made where there is none. `build` says which program it is that asks: what another kept is of
    /// no use.
    ///
    /// # Errors
    /// Where the folder cannot be made, or what is in it cannot be read.
    pub fn open(folder: &Path, build: &str) -> io::Result<Cache> {
        std::fs::create_dir_all(folder)?;
        let file = folder.join(FILE);
        let read = match std::fs::read(&file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let header = format!("altiplano searches of {build}\n").into_bytes();
        let places = places(&read, &header).unwrap_or_default();
        let index = places.iter().enumerate().map(|(i, (key, _))| (*key, i)).collect();
        Ok(Cache { file, header, read, places, index, learned: Mutex::default() })
    }

    /// What is known by a key.
    pub fn get<T: DeserializeOwned>(&self, key: Key) -> Option<T> {
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(&at) = self.index.get(&key) else {
            // What this process has learned itself is asked for by other requests of it.
            return rmp_serde::from_slice(learned.new.get(&key)?).ok();
        };
        learned.used.insert(key);
        drop(learned);
        rmp_serde::from_slice(&self.read[self.places[at].1.clone()]).ok()
    }

    /// Keeps an answer for [`Cache::save`].
    pub fn keep<T: Serialize>(&self, key: Key, value: &T) {
        let Ok(bytes) = rmp_serde::to_vec_named(value) else { return };
        self.learned.lock().unwrap_or_else(PoisonError::into_inner).new.insert(key, bytes);
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Writes what was learned beside what was known, whole or not at all. Where that is too much, what was not asked for goes first.
    ///
    /// # Errors
    /// Where the file cannot be written. What was there stays.
    pub fn save(&self) -> io::Result<()> {
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
        let part = self.file.with_extension(format!("{}.part", std::process::id()));
        let replaced = std::fs::write(&part, &written).and_then(|()| std::fs::rename(&part, &self.file));
        replaced.inspect_err(|_| drop(std::fs::remove_file(&part)))
    }
}

/// Of a file that is whole and of this build, where its answers are.
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
