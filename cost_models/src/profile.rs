//! Measured profiles: the time of a runtime's inner loops on one machine, as series of times over sizes.
//!
//! A profile prices the terms that a runtime says its kernel calls consist of (`altiplano_ir::work`). Times within a
//! series are interpolated, log against log. Beyond the ends, the nearest end is scaled as under a roofline, and the
//! answer says how far outside it lies. The file is JSON, `altiplano.profile` version 1. Any error in it is reported
//! with its line, or with the path of the place.

use altiplano_ir::dtype::DType;
use altiplano_ir::json;
use altiplano_ir::work::Term;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The `format` of a profile.
pub const FORMAT: &str = "altiplano.profile";
/// The `version` of a profile.
pub const VERSION: u32 = 1;

/// A profile in the form of its file.
///
/// **Invariants** (checked by `verify`): no two series have the same family, type, threads and load. Times are positive
/// and never fall along an axis. `slower_shared` rises in both columns from `cores` on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub format: String,
    pub version: u32,
    /// The device of a cluster that the profile prices.
    pub device: String,
    pub machine: Machine,
    /// Time of measurement in UTC: `2026-11-22T01:20:00Z`.
    pub measured_at: String,
    /// The version of Altiplano whose kernels were measured.
    pub altiplano: String,
    /// Seconds that measuring took.
    pub seconds: f64,
    pub outliers: Outliers,
    /// The ranks whose collectives and messages were measured. If absent, they are those of threads of one process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<MeasuredRanks>,
    /// Slowdown by the number of threads that compute at once, for more threads than cores. It is relative to as many
    /// threads as cores.
    pub slower_shared: Vec<(u32, f64)>,
    pub series: Vec<Series>,
}

/// The machine that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub processor: String,
    pub cores: u32,
    /// True if GPUs or devices of XLA were measured and are counted, rather than the cores of a processor.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gpus: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Ranks of MPI whose links were measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRanks {
    pub nodes: u32,
    /// Ranks on a node, of those that took part.
    pub on_node: u32,
    /// Like [`Profile::measured_at`].
    pub measured_at: String,
}

/// Count of samples, and of outliers that took more than twice the median of their point.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outliers {
    pub samples: u64,
    pub outliers: u64,
    /// The largest, as a multiple of the median of its point.
    pub largest: f64,
}

/// Times of one family over a grid of sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    pub family: String,
    pub dtype: DType,
    /// Threads that share one run.
    pub threads: u32,
    /// Threads of all runs that were made at once.
    pub load: u32,
    /// The sizes along each axis, rising.
    pub axes: Vec<Vec<f64>>,
    /// Times of the grid, row major.
    pub seconds: Vec<f64>,
}

/// Longest time of a kernel's run; measuring a longer one would take a week.
const LONGEST_S: f64 = 1e6;

/// Error in a profile.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ProfileError {
    #[error("{line}:{column}: {error}")]
    Json { line: usize, column: usize, error: String },
    #[error("format: expected \"{FORMAT}\", found \"{found}\"")]
    Format { found: String },
    #[error("version: this build reads version {VERSION}, the file has {found}")]
    Version { found: u32 },
    #[error("{path}: {problem}")]
    Invalid { path: String, problem: &'static str },
    #[error("the profile is of {profile}, the cluster has {cluster}")]
    OtherDevice { profile: String, cluster: String },
}

/// A time from a profile, and how far outside of the measured range it lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    pub seconds: f64,
    /// Ratio of the size to the nearest measured one, along the worst axis; 1 within the range.
    pub outside: f64,
}

impl Profile {
    /// Reads and verifies a profile.
    pub fn from_json(text: &str) -> Result<Profile, ProfileError> {
        let json = |e: serde_json::Error| {
            let (line, column) = json::place(&e);
            ProfileError::Json { line, column, error: json::message(&e) }
        };
        #[derive(Deserialize)]
        struct Header {
            format: String,
            version: u32,
        }
        let header: Header = serde_json::from_str(text).map_err(json)?;
        if header.format != FORMAT {
            return Err(ProfileError::Format { found: header.format });
        }
        if header.version != VERSION {
            return Err(ProfileError::Version { found: header.version });
        }
        let profile: Profile = serde_json::from_str(text).map_err(json)?;
        match profile.verify().into_iter().next() {
            None => Ok(profile),
            Some(error) => Err(error),
        }
    }

    /// The file, with one series per line.
    pub fn to_json(&self) -> String {
        // Quotes inside of strings are escaped, so only the start of a series matches.
        serde_json::to_string(self).unwrap_or_default().replace("{\"family\"", "\n{\"family\"") + "\n"
    }

    /// Everything that is inconsistent.
    pub fn verify(&self) -> Vec<ProfileError> {
        let mut errors = Vec::new();
        let mut fail = |path: String, problem: &'static str| errors.push(ProfileError::Invalid { path, problem });
        if self.machine.cores == 0 {
            fail("machine.cores".into(), "must be at least 1");
        }
        if !(self.seconds.is_finite() && self.seconds >= 0.0) {
            fail("seconds".into(), "must be finite and not negative");
        }
        let rises = self.slower_shared.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1);
        let beyond = |s: &(u32, f64)| s.0 > self.machine.cores && (1.0..=1e6).contains(&s.1);
        if !rises || !self.slower_shared.iter().all(beyond) {
            fail("slower_shared".into(), "must rise, from more threads than cores and a factor of at least 1");
        }
        if self.series.is_empty() {
            fail("series".into(), "must hold at least one series");
        }
        let mut known = BTreeSet::new();
        for (i, series) in self.series.iter().enumerate() {
            if let Some((place, problem)) = series.problem() {
                fail(format!("series[{i}].{place}"), problem);
            }
            if !known.insert((&series.family, series.dtype, series.threads, series.load)) {
                fail(format!("series[{i}]"), "is of the same family, type, threads and load as one before it");
            }
        }
        errors
    }

    /// The description by which plans name the profile.
    pub fn label(&self) -> String {
        let day = self.measured_at.split('T').next().unwrap_or_default();
        let each = if self.machine.gpus { "devices" } else { "cores" };
        let label = format!("measured profile of {}, {} {each}, {day}", self.machine.processor, self.machine.cores);
        match &self.ranks {
            None => label,
            Some(ranks) => format!("{label}, with links of {} x {} ranks", ranks.nodes, ranks.on_node),
        }
    }
}

impl Series {
    fn problem(&self) -> Option<(String, &'static str)> {
        let is_size = |x: &f64| (1e-18..=1e18).contains(x);
        let is_time = |x: &f64| (1e-15..=LONGEST_S).contains(x);
        if self.threads == 0 || self.load < self.threads {
            return Some(("load".into(), "must be at least `threads`, and that at least 1"));
        }
        if self.axes.is_empty() || self.axes.len() > 4 {
            return Some(("axes".into(), "must be one to four"));
        }
        for (a, axis) in self.axes.iter().enumerate() {
            if axis.is_empty() {
                return Some((format!("axes[{a}]"), "must hold at least one size"));
            }
            if !axis.iter().all(is_size) || axis.windows(2).any(|w| w[0] >= w[1]) {
                return Some((format!("axes[{a}]"), "must be positive sizes of at most 1e18 that rise"));
            }
        }
        if self.axes.iter().map(Vec::len).product::<usize>() != self.seconds.len() {
            return Some(("seconds".into(), "must hold a time for each point of the grid"));
        }
        if let Some(i) = self.seconds.iter().position(|s| !is_time(s)) {
            return Some((format!("seconds[{i}]"), "must be positive and at most 1e6"));
        }
        let falls = |i: usize| self.below(i).any(|j| self.seconds[i] < self.seconds[j]);
        let at = (0..self.seconds.len()).find(|&i| falls(i))?;
        Some((format!("seconds[{at}]"), "is less than that of a smaller size"))
    }

    /// Points of the grid that are one step smaller along one axis.
    fn below(&self, point: usize) -> impl Iterator<Item = usize> {
        let mut stride = 1;
        let mut smaller = Vec::with_capacity(self.axes.len());
        for axis in self.axes.iter().rev() {
            if point / stride % axis.len() > 0 {
                smaller.push(point - stride);
            }
            stride *= axis.len();
        }
        smaller.into_iter()
    }

    /// Raises times that noise made fall, so that more work never takes less time.
    pub fn make_monotone(&mut self) {
        for i in 0..self.seconds.len() {
            let least = self.below(i).map(|j| self.seconds[j]).fold(0.0, f64::max);
            self.seconds[i] = self.seconds[i].max(least);
        }
    }

    /// The time of a size. Between points it is multilinear in the logarithms, so it is exact at the points, and
    /// monotone because they are. Beyond the largest size of an axis, time is proportional to the size, as under a
    /// roofline. Below the smallest size it is constant.
    pub fn time(&self, size: &[f64]) -> Priced {
        let mut outside = 1.0f64;
        let mut beyond = 1.0;
        // The cell's lower corner along each axis, and the position of the size in the cell.
        let mut cell: Vec<(usize, f64)> = Vec::with_capacity(self.axes.len());
        for (d, axis) in self.axes.iter().enumerate() {
            let x = size.get(d).copied().unwrap_or(axis[0]);
            let (first, last) = (axis[0], axis[axis.len() - 1]);
            if x > last {
                beyond *= x / last;
                outside = outside.max(x / last);
            } else if x < first {
                outside = outside.max(first / x.max(f64::MIN_POSITIVE));
            }
            let x = x.clamp(first, last);
            let upper = axis.partition_point(|&a| a <= x).min(axis.len() - 1);
            let lower = upper.saturating_sub(1);
            let along = if upper == lower { 0.0 } else { (x / axis[lower]).ln() / (axis[upper] / axis[lower]).ln() };
            cell.push((lower, along.clamp(0.0, 1.0)));
        }
        let mut logarithm = 0.0;
        let mut exact = None;
        for corner in 0..1usize << cell.len() {
            let (mut weight, mut at) = (1.0, 0);
            for (d, &(lower, along)) in cell.iter().enumerate() {
                let up = corner >> d & 1;
                weight *= if up == 1 { along } else { 1.0 - along };
                at = at * self.axes[d].len() + (lower + up).min(self.axes[d].len() - 1);
            }
            if weight == 1.0 {
                exact = Some(self.seconds[at]);
            }
            if weight > 0.0 {
                logarithm += weight * self.seconds[at].ln();
            }
        }
        Priced { seconds: beyond * exact.unwrap_or_else(|| logarithm.exp()), outside }
    }
}

/// A profile prepared for lookups.
#[derive(Clone, Debug)]
pub struct Lookup {
    profile: Profile,
    /// By family, type and threads: load and index of each series, in order of load.
    found: BTreeMap<(String, DType, u32), Vec<(u32, usize)>>,
}

impl Lookup {
    pub fn new(profile: Profile) -> Lookup {
        let mut found: BTreeMap<(String, DType, u32), Vec<(u32, usize)>> = BTreeMap::new();
        for (i, s) in profile.series.iter().enumerate() {
            found.entry((s.family.clone(), s.dtype, s.threads)).or_default().push((s.load, i));
        }
        found.values_mut().for_each(|list| list.sort_unstable());
        Lookup { profile, found }
    }

    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Seconds of a term if `load` threads of the machine compute at once, including the term's own. `None` if the
    /// profile does not have the term's family in its type.
    pub fn price(&self, term: &Term, load: u32) -> Option<Priced> {
        if term.size.contains(&0.0) || term.times == 0.0 {
            return Some(Priced { seconds: 0.0, outside: 1.0 });
        }
        let key = |threads: u32| (term.family.to_string(), term.dtype, threads);
        // If this number of threads was not measured, use the next larger one, or else the largest.
        let larger = || self.found.range(key(term.threads)..=key(u32::MAX)).next();
        let (known, by_load) = larger().or_else(|| self.found.range(key(0)..key(term.threads)).next_back())?;
        let threads = f64::from(known.2) / f64::from(term.threads.max(1));
        let &(measured, at) = by_load.iter().find(|s| s.0 >= load).or(by_load.last())?;
        if self.profile.series[at].axes.len() != term.size.len() {
            return None;
        }
        let Priced { seconds, outside } = self.profile.series[at].time(&term.size);
        let slower = (self.slower(load) / self.slower(measured)).max(1.0);
        Some(Priced { seconds: seconds * term.times * slower, outside: outside.max(threads).max(1.0 / threads) })
    }

    /// Slowdown with this many threads at once, relative to as many threads as cores.
    pub fn slower(&self, load: u32) -> f64 {
        let cores = self.profile.machine.cores;
        if load <= cores {
            return 1.0;
        }
        let all = std::iter::once((cores, 1.0)).chain(self.profile.slower_shared.iter().copied());
        let points: Vec<(f64, f64)> = all.map(|(n, s)| (f64::from(n), s)).collect();
        let n = f64::from(load);
        let (last, slowest) = points[points.len() - 1];
        match points.windows(2).find(|w| n <= w[1].0) {
            Some(w) => w[0].1 + (w[1].1 - w[0].1) * (n - w[0].0) / (w[1].0 - w[0].0),
            // Threads take turns.
            None => slowest * n / last,
        }
    }
}

#[cfg(test)]
#[path = "profile_tests.rs"]
mod tests;
