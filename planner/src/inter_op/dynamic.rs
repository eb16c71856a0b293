//! Cuts a model's layers into stages and gives each stage a submesh and a configuration, exactly.
//!
//! This is the recurrence of Alpa (Zheng et al. 2022, section 5.2) over (stages, layers, devices):
//!
//! ```text
//! F(s, k, d) = min over e and submesh of t(k..e, submesh, s) + F(s - 1, e, d - |submesh|)
//! ```
//!
//! It is computed from the last layer backwards because the memory of a stage depends on the number `s` of stages from
//! it to the end. The paper enumerates the slowest stage's time in increasing order. Here, regions of (slowest stage,
//! largest per-step cost) are searched best bound first. That is as exact, and solves the recurrence for a few dozen
//! limits instead of thousands.
//!
//! In a cluster of several groups, `d` counts the devices of each group, and a stage takes its devices from one of
//! them. A stage's inputs take longer if the previous stage is in another group, so the recurrence also runs over the
//! group of that stage.

mod counts;
mod recurrence;
mod search;

use std::ops::Range;

use self::recurrence::{Space, units, usable_blocks};
use altiplano_ir::plan::Schedule;

use super::submesh::{Block, packable_block_families, place_blocks};

/// Cost of one stage on one submesh in one configuration. Bytes are per device.
///
/// Times must be at least zero and below 1e200: a candidate with other times is never chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Forward and backward of one microbatch, with the transfer of the stage's inputs.
    pub microbatch_s: f64,
    /// Time once per optimizer step that nothing hides: gradient reduction and update.
    pub step_s: f64,
    /// Parameters, gradients, optimizer state.
    pub static_bytes: u64,
    /// Activations kept for each microbatch between its forward and its backward.
    pub bytes_per_inflight_microbatch: u64,
    /// The largest working memory on top of that.
    pub transient_bytes: u64,
    /// Opaque here; returned in the answer.
    pub id: u32,
}

impl Candidate {
    /// Bytes per device while `in_flight` microbatches are between forward and backward.
    pub fn peak_bytes(&self, in_flight: u32) -> u64 {
        self.bytes_per_inflight_microbatch
            .saturating_mul(u64::from(in_flight))
            .saturating_add(self.static_bytes)
            .saturating_add(self.transient_bytes)
    }

    fn has_times(&self) -> bool {
        [self.microbatch_s, self.step_s].iter().all(|seconds| (0.0..1e200).contains(seconds))
    }
}

/// The candidates of every (layer range, block). Combinations that were not pushed do not exist.
#[derive(Debug, Clone)]
pub struct StageTable {
    pub num_layers: usize,
    pub blocks: Vec<Block>,
    /// By range (first layer, then end) and block.
    candidates: Vec<Vec<Candidate>>,
    /// By first layer and block: see [`StageTable::set_crossing`].
    crossing_s: Vec<f64>,
}

impl StageTable {
    pub fn new(num_layers: usize, blocks: Vec<Block>) -> Self {
        let num_ranges = num_layers * (num_layers + 1) / 2;
        let candidates = vec![Vec::new(); num_ranges * blocks.len()];
        let crossing_s = vec![0.0; num_layers * blocks.len()];
        StageTable { num_layers, blocks, candidates, crossing_s }
    }

    /// Adds a configuration for layers `first..end` on a submesh of `blocks[block]`.
    ///
    /// # Panics
    /// If the range is empty or ends after the last layer, or there is no such block.
    pub fn push(&mut self, first: usize, end: usize, block: usize, candidate: Candidate) {
        let cell = self.cell(first, end, block);
        assert!(cell.is_some(), "no layers {first}..{end} or block {block}");
        if let Some(cell) = cell {
            self.candidates[cell].push(candidate);
        }
    }

    /// The configurations for layers `first..end` (`end` exclusive) on `blocks[block]`, in the order they were pushed;
    /// empty for a range or block that does not exist.
    pub fn candidates(&self, first: usize, end: usize, block: usize) -> &[Candidate] {
        self.cell(first, end, block).map_or(&[], |cell| &self.candidates[cell])
    }

    /// Sets the extra seconds per microbatch of a stage that starts at layer `first` on `blocks[block]`, if the
    /// previous stage is in another group. The limits on a candidate's times apply.
    ///
    /// # Panics
    /// If there is no such layer or block.
    pub fn set_crossing(&mut self, first: usize, block: usize, seconds: f64) {
        self.crossing_s[first * self.blocks.len() + block] = seconds;
    }

    /// Extra time of a stage on top of its candidate's, after a stage in group `before`.
    pub fn entering_s(&self, first: usize, block: usize, before: usize) -> f64 {
        let same = first == 0 || self.blocks[block].group == before;
        if same { 0.0 } else { self.crossing_s[first * self.blocks.len() + block] }
    }

    fn cell(&self, first: usize, end: usize, block: usize) -> Option<usize> {
        if first >= end || end > self.num_layers || block >= self.blocks.len() {
            return None;
        }
        // There are `num_layers - f` ranges that start at layer `f`.
        let before = first * self.num_layers - first * first.saturating_sub(1) / 2;
        Some((before + end - first - 1) * self.blocks.len() + block)
    }
}

/// Resources of one group that a query may use; no nodes means none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Room {
    pub nodes: u32,
    pub devices_per_node: u32,
    pub device_memory_bytes: u64,
}

impl Room {
    fn num_devices(&self) -> u64 {
        u64::from(self.nodes) * u64::from(self.devices_per_node)
    }
}

/// A query for [`plan_stages`].
#[derive(Debug, Clone, PartialEq)]
pub struct Query {
    /// Resources by group.
    pub rooms: Vec<Room>,
    /// `B`; zero counts as one.
    pub num_microbatches: u32,
    /// Its step time must be `sum t + (B - 1) max t`. The memory of a stage may depend on its position only through the
    /// distance from the last stage, and must never fall with that distance.
    pub schedule: Schedule,
    /// Fixed by the user; `None` leaves it to the search.
    pub num_stages: Option<u32>,
    /// Devices of each stage, first to last, of which there are `num_stages`; empty if stages may have any number.
    pub devices: Vec<u64>,
    /// Every device of the rooms must be used; otherwise some may be left idle.
    pub all_devices: bool,
    /// Stop when no plan can be faster by more than this fraction. Zero finds an optimum; 0.01 saves time on
    /// tables with many distinct times.
    pub relative_tolerance: f64,
}

/// The stages found, first to last.
#[derive(Debug, Clone, PartialEq)]
pub struct Stages {
    /// Layers, index of the block in the table, id of the candidate.
    pub stages: Vec<(Range<usize>, usize, u32)>,
    /// `sum microbatch_s + (B - 1) max microbatch_s + max step_s`.
    pub step_s: f64,
    /// No plan from this table is faster than this. Equals `step_s` unless a tolerance was given, or
    /// the fastest stages do not pack into the nodes (see [`super::submesh::place`]).
    pub bound_s: f64,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NoStages {
    /// Even the plan whose fullest stage needs the least part of its device's memory does not fit; this is that stage.
    #[error(
        "stage {stage} of {num_stages} (layers {}..{} on {}) needs at least {required_bytes} bytes per device with \
         {in_flight} microbatches in flight, {} more than the limit of {limit_bytes}",
        layers.start, layers.end, block.shape, required_bytes - limit_bytes
    )]
    Memory {
        required_bytes: u64,
        limit_bytes: u64,
        layers: Range<usize>,
        block: Block,
        stage: u32,
        num_stages: u32,
        in_flight: u32,
    },
    #[error(
        "no combination of submeshes gives {} on {}{}",
        num_stages.map_or("any stages".to_string(), |n| format!("{n} stages")),
        sizes.iter().map(|(nodes, devices)| format!("{nodes} nodes of {devices} devices")).collect::<Vec<_>>().join(" and "),
        if *all_devices { " and uses every device" } else { "" }
    )]
    NoTiling { sizes: Vec<(u32, u32)>, num_stages: Option<u32>, all_devices: bool },
    #[error("{num_stages} stages were asked for, but there are only {num_layers} layers to put into them")]
    MoreStagesThanLayers { num_stages: u32, num_layers: usize },
    /// Submeshes fit the cluster, but the table has no candidates for the layer ranges that would need them.
    #[error("the stage candidates do not cover layers 0..{num_layers} on any combination of submeshes")]
    NoCandidates { num_layers: usize },
}

/// Finds the stages with the least `sum t_i + (B - 1) max t_i + max step_i` that fit in memory and on the cluster.
///
/// The `step_s` of stages overlap, since each stage reduces its gradients and updates its own parameters on its own
/// devices: hence the maximum. Of equally fast plans (within 1e-10) the one with fewer stages is
/// returned, then the one whose first stage ends earliest, and so on.
///
/// Devices are counted, not placed, during the search. This loses nothing if the sizes of the shapes divide one another
/// (see [`super::submesh::place`]). If they do not, the fastest stages may be impossible to place. Then the answer is
/// the best plan from one family of shapes that can always be placed (see [`super::submesh::packable_families`]), and
/// `bound_s` tells how much this may have cost.
///
/// # Errors
/// [`NoStages`] if nothing fits; all of it is about the input.
pub fn plan_stages(table: &StageTable, query: &Query) -> Result<Stages, NoStages> {
    let every_block: Vec<usize> = (0..table.blocks.len()).collect();
    let unrestricted = search_stages(table, query, &every_block)?;
    let sizes = sizes(query);
    let blocks: Vec<Block> = unrestricted.stages.iter().map(|(_, block, _)| table.blocks[*block]).collect();
    if place_blocks(&blocks, &sizes).is_some() {
        return Ok(unrestricted);
    }
    let mut best: Result<Stages, NoStages> = Err(no_tiling(query));
    for family in packable_block_families(&table.blocks, &sizes) {
        let found = search_stages(table, query, &family);
        best = match (best, found) {
            (Ok(best), Ok(found)) if found.step_s < best.step_s => Ok(found),
            (Err(_), Ok(found)) => Ok(found),
            (Err(NoStages::NoTiling { .. }), Err(error)) => Err(error),
            (best, _) => best,
        };
    }
    best.map(|found| Stages { bound_s: unrestricted.bound_s, ..found })
}

fn sizes(query: &Query) -> Vec<(u32, u32)> {
    query.rooms.iter().map(|room| (room.nodes, room.devices_per_node)).collect()
}

fn no_tiling(query: &Query) -> NoStages {
    let sizes = sizes(query).into_iter().filter(|&(nodes, _)| nodes > 0).collect();
    NoStages::NoTiling { sizes, num_stages: query.num_stages, all_devices: query.all_devices }
}

/// Like [`plan_stages`] with only some of the table's blocks, counting devices without placing them.
fn search_stages(table: &StageTable, query: &Query, blocks: &[usize]) -> Result<Stages, NoStages> {
    let space = Space::new(table, query, blocks, true);
    let Some(found) = space.as_ref().and_then(|space| space.search()) else {
        return Err(explain_failure(table, query, blocks));
    };
    let bound_s = found.step_s * (1.0 - tolerance(query));
    Ok(Stages {
        stages: found.legs.iter().map(|leg| (leg.first..leg.end, leg.block, leg.choice.id)).collect(),
        step_s: found.step_s,
        bound_s,
    })
}

fn tolerance(query: &Query) -> f64 {
    if query.relative_tolerance > 0.0 { query.relative_tolerance.min(1.0) } else { 0.0 }
}

/// Explains why the search found nothing.
fn explain_failure(table: &StageTable, query: &Query, blocks: &[usize]) -> NoStages {
    let num_layers = table.num_layers;
    if let Some(num_stages) = query.num_stages
        && usize::try_from(num_stages).map_or(true, |n| n > num_layers)
    {
        return NoStages::MoreStagesThanLayers { num_stages, num_layers };
    }
    if num_layers > 0 && !tiles(table, query, blocks) {
        return no_tiling(query);
    }
    let no_candidates = NoStages::NoCandidates { num_layers };
    let Some(space) = Space::new(table, query, blocks, false) else {
        return no_candidates;
    };
    space.least_memory(table, query).unwrap_or(no_candidates)
}

/// Returns true if some number of blocks that the query allows covers the cluster, by counting devices.
fn tiles(table: &StageTable, query: &Query, blocks: &[usize]) -> bool {
    let blocks = usable_blocks(table, query, blocks);
    let Some((units, counts)) = units(table, query, &blocks) else {
        return false;
    };
    let taken = |&i: &usize| {
        let block = table.blocks[i];
        (block.group, (block.shape.num_devices() / units[block.group]) as usize)
    };
    let mut takes: Vec<(usize, usize)> = blocks.iter().map(taken).collect();
    takes.sort_unstable();
    takes.dedup();
    let (at_least, at_most) = match query.num_stages {
        Some(n) => (n as usize, n as usize),
        None => (1, table.num_layers),
    };
    let mut reached = vec![false; counts.width()];
    reached[0] = true;
    for count in 1..=at_most.min(counts.sum()) {
        let mut next = vec![false; counts.width()];
        for &(group, taken) in &takes {
            counts.for_each_run(group, taken, 0..counts.width(), |from, shift| {
                for at in from {
                    next[at + shift] |= reached[at];
                }
            });
        }
        reached = next;
        let done = if query.all_devices { reached[counts.width() - 1] } else { reached.contains(&true) };
        if done && count >= at_least {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests;
