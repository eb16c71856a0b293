//! Pipelines whose stages share devices. Each lane has several stages, which interleaved 1F1B runs in turns, so that the
//! bubble shrinks from the length of a lane to that of one of its stages (Narayanan et al. 2021, section 2.2.2). Under
//! ZB-V it has two, the first of one and the last of the other half, and the bubble vanishes.
//!
//! All lanes get equal submeshes. All stages get one mesh and configuration, or one that dominates it. Layers are cut
//! where the longest stage is shortest, and the schedule is simulated with the search's estimates. The few best
//! candidates are predicted.

use super::dynamic::Candidate;
use super::search::{CandidatesAtMicrobatch, ChosenStage, PipelineCandidate, SearchResult, StageConfig};
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::search::space::SearchSpace;
use altiplano_cost_models::pipeline::{Order, StageTimes, simulate_order};
use altiplano_ir::plan::Schedule;
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most pipelines that are predicted: of those whose stages take turns, and of those whose lanes form a V.
const MOST_JUDGED: usize = 5;
const MOST_IN_A_V: usize = 2;
/// Estimates above the best without shared devices by more than this factor are not worth predicting.
const WORTH_JUDGING: f64 = 1.1;
/// Most stages on the same devices to try, if their number is free.
const MOST_VIRTUAL: usize = 8;
/// Most calls to simulate while cuts are moved.
const MOST_PLAYED: u64 = 4_000_000;

/// Returns the most promising pipelines whose stages share devices, best first. `least_s` is the best estimate of a
/// pipeline without shared devices, if there is one. `memory_bytes` is the memory that a device may use at each number
/// of microbatches.
pub fn interleaved<'a>(
    searched: &'a SearchResult,
    space: &SearchSpace,
    memory_bytes: &BTreeMap<u32, Vec<u64>>,
    least_s: Option<f64>,
) -> Vec<PipelineCandidate<'a>> {
    if space.shared.is_empty() {
        return Vec::new();
    }
    let at_size = |candidates: &'a CandidatesAtMicrobatch| {
        let memory_bytes = memory_bytes.get(&candidates.num_microbatches);
        candidates.interleaved(space, memory_bytes.map(Vec::as_slice))
    };
    let mut found: Vec<(PipelineCandidate<'a>, &StageConfig)> =
        searched.candidates.par_iter().flat_map_iter(at_size).collect();
    found.sort_by(|a, b| a.0.step_s.total_cmp(&b.0.step_s));
    // A requested number of stages is honoured, however slow.
    let most_s = match (space.degrees.virtual_stages, least_s) {
        (None, Some(least_s)) => WORTH_JUDGING * least_s,
        _ => f64::INFINITY,
    };
    found.retain(|(f, _)| f.step_s <= most_s);
    let [mut in_turn, mut in_a_v] = [0; 2];
    found.retain(|(f, _)| {
        let (count, most) = match f.schedule {
            Schedule::ZbV | Schedule::DualPipeV => (&mut in_a_v, MOST_IN_A_V),
            _ => (&mut in_turn, MOST_JUDGED),
        };
        *count += 1;
        *count <= most
    });
    for (found, config) in &mut found {
        let block = found.candidates.blocks.iter().position(|b| *b == found.stages[0].block);
        block.into_iter().for_each(|block| Runs::new(found.candidates, block, config).move_cuts(found));
    }
    let mut found: Vec<PipelineCandidate<'a>> = found.into_iter().map(|(found, _)| found).collect();
    found.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    found
}

impl CandidatesAtMicrobatch {
    /// Pipelines whose stages share devices at this number of microbatches, in no order, each with the configuration of
    /// most of its stages.
    fn interleaved(
        &self,
        space: &SearchSpace,
        memory_bytes: Option<&[u64]>,
    ) -> Vec<(PipelineCandidate<'_>, &StageConfig)> {
        let on_block = |(block, lanes): (usize, usize)| {
            let limit = memory_bytes.map_or(u64::MAX, |bytes| bytes[self.blocks[block].group]);
            let of_way = move |config| {
                let runs = Runs::new(self, block, config);
                let pipelines = runs.pipelines(&space.shared, lanes, space.degrees.virtual_stages, limit);
                pipelines.into_iter().map(move |found| (found, config))
            };
            self.configs_of_layers(block).into_iter().flat_map(of_way).collect::<Vec<_>>()
        };
        self.lanes(space).into_par_iter().flat_map_iter(on_block).collect()
    }

    /// Step time of the best of [`CandidatesAtMicrobatch::interleaved`], if the order of calls is free and there is one.
    pub(super) fn interleaved_s(&self, space: &SearchSpace) -> Option<f64> {
        if space.alpa || space.degrees.virtual_stages.is_some() {
            return None;
        }
        let found = self.interleaved(space, Some(&space.memory_bytes));
        found.into_iter().map(|(found, _)| found.step_s).min_by(f64::total_cmp)
    }

    /// Blocks, and the number of lanes that make up their group, or the part of it that the user's degrees leave.
    fn lanes(&self, space: &SearchSpace) -> Vec<(usize, usize)> {
        let lanes = |(i, block): (usize, &super::submesh::Block)| {
            let (total, devices) = (self.num_devices[block.group], block.shape.num_devices());
            let lanes = space.degrees.pp.map_or(total / devices, u64::from);
            let fits =
                lanes * devices == total || !space.all_devices && space.degrees.pp.is_some() && lanes * devices < total;
            (lanes > 1 && fits).then_some((i, lanes as usize))
        };
        self.blocks.iter().enumerate().filter_map(lanes).collect()
    }

    /// For each recomputation level, the configuration on a submesh that is fastest for all layers together. Most layers
    /// have candidates on its mesh: the price of a faster one says little about it.
    fn configs_of_layers(&self, block: usize) -> Vec<&StageConfig> {
        let layers = self.layered.layers.len();
        let mut configs: Vec<&StageConfig> = Vec::new();
        let mut seen = vec![false; self.configs.len()];
        for candidate in (0..layers).flat_map(|l| self.table.candidates(l, l + 1, block)) {
            let config = &self.configs[candidate.id as usize];
            if !std::mem::replace(&mut seen[candidate.id as usize], true) && !configs.contains(&config) {
                configs.push(config);
            }
        }
        let on_mesh = |config: &StageConfig, l: &usize| {
            self.table.candidates(*l, l + 1, block).iter().any(|c| self.configs[c.id as usize].mesh == config.mesh)
        };
        configs.retain(|config| 2 * (0..layers).filter(|l| on_mesh(config, l)).count() > layers);
        let seconds = |config: &StageConfig| -> f64 {
            (0..layers).map(|l| self.run(l..l + 1, block, config).map_or(f64::INFINITY, |c| c.microbatch_s)).sum()
        };
        let mut timed: Vec<(f64, &StageConfig)> = configs.into_iter().map(|config| (seconds(config), config)).collect();
        timed.retain(|(seconds, _)| seconds.is_finite());
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        // The fastest configuration of each recomputation level.
        let fastest =
            |level: Recompute| timed.iter().find(|t| t.1.fraction == RecomputeFraction::uniform(level)).map(|t| t.1);
        Recompute::ALL.into_iter().filter_map(fastest).collect()
    }

    /// The candidate of a run of layers under a configuration. If the table dropped it for a dominating one, takes the
    /// fastest on the same mesh that recomputes as much, or else on any.
    pub(super) fn run(&self, layers: Range<usize>, block: usize, config: &StageConfig) -> Option<Candidate> {
        let is_same = |c: &Candidate| self.configs[c.id as usize] == *config;
        self.nearest(layers, block, is_same, |c| self.configs[c.id as usize].is_like(config))
    }

    /// The candidate of a run of layers that is the same; otherwise the fastest that is like it, or else of any.
    fn nearest(
        &self,
        layers: Range<usize>,
        block: usize,
        is_same: impl Fn(&Candidate) -> bool,
        is_like: impl Fn(&Candidate) -> bool,
    ) -> Option<Candidate> {
        let all = self.table.candidates(layers.start, layers.end, block);
        let same = all.iter().find(|c| is_same(c));
        let fastest = |a: &&Candidate, b: &&Candidate| a.microbatch_s.total_cmp(&b.microbatch_s);
        let alike = || all.iter().filter(|c| is_like(c)).min_by(fastest);
        same.or_else(alike).or_else(|| all.iter().min_by(fastest)).copied()
    }
}

/// All runs of layers on one submesh under one configuration.
struct Runs<'a> {
    candidates: &'a CandidatesAtMicrobatch,
    block: usize,
    config: StageConfig,
    /// Candidates by first layer and number of layers minus one.
    rows: Vec<Vec<Option<Candidate>>>,
}

impl<'a> Runs<'a> {
    fn new(candidates: &'a CandidatesAtMicrobatch, block: usize, config: &StageConfig) -> Runs<'a> {
        let layers = candidates.layered.layers.len();
        // Each configuration is compared once, for all runs.
        let same: Vec<bool> = candidates.configs.iter().map(|other| other == config).collect();
        let alike: Vec<bool> = candidates.configs.iter().map(|other| other.is_like(config)).collect();
        let run = |layers| candidates.nearest(layers, block, |c| same[c.id as usize], |c| alike[c.id as usize]);
        let row = |first: usize| (first + 1..=layers).map(|end| run(first..end)).collect();
        Runs { candidates, block, config: config.clone(), rows: (0..layers).map(row).collect() }
    }

    fn get(&self, first: usize, end: usize) -> Option<&Candidate> {
        self.rows[first][end - first - 1].as_ref()
    }

    /// The configuration that was priced, unless it is on another mesh, where stages that share devices have one, or
    /// recomputes more or less: then the table dropped this one for a better mesh.
    fn config_of(&self, first: usize, end: usize) -> StageConfig {
        let priced = self.get(first, end).map(|c| &self.candidates.configs[c.id as usize]);
        priced.filter(|config| config.is_like(&self.config)).unwrap_or(&self.config).clone()
    }

    fn seconds(&self, first: usize, end: usize) -> f64 {
        self.get(first, end).map_or(f64::INFINITY, |c| c.microbatch_s)
    }

    /// The best cuts for each schedule and number of stages on the same devices.
    fn pipelines(
        &self,
        schedules: &[Schedule],
        lanes: usize,
        fixed: Option<u32>,
        limit_bytes: u64,
    ) -> Vec<PipelineCandidate<'a>> {
        let layers = self.rows.len();
        let numbers = |&schedule: &Schedule| {
            let numbers = match schedule.virtual_stages().or(fixed) {
                Some(count) => count as usize..=count as usize,
                None => 2..=MOST_VIRTUAL,
            };
            let microbatches = u64::from(self.candidates.num_microbatches);
            let follows = move |v: usize| {
                schedule == Schedule::OneFOneB || schedule.can_share(v as u32, microbatches, lanes as u32)
            };
            let allowed = move |v: &usize| {
                fixed.is_none_or(|f| f as usize == *v) && v.saturating_mul(lanes) <= layers && follows(*v)
            };
            numbers.filter(allowed).map(move |v| (schedule, v))
        };
        let numbers: Vec<(Schedule, usize)> = schedules.iter().flat_map(numbers).collect();
        let Some(most) = numbers.iter().map(|(_, v)| *v).max() else { return Vec::new() };
        let cuts = even_cuts(layers, most * lanes, |first, end| self.seconds(first, end));
        let mut found = Vec::new();
        for (schedule, v) in numbers {
            let Some(bounds) = &cuts[v * lanes - 1] else { continue };
            let order = self.order(schedule, v * lanes, v);
            if self.fits(bounds, &order, limit_bytes) {
                let stage = |w: &[usize]| ChosenStage {
                    layers: w[0]..w[1],
                    block: self.candidates.blocks[self.block],
                    config: self.config_of(w[0], w[1]),
                };
                found.push(PipelineCandidate {
                    candidates: self.candidates,
                    schedule,
                    virtual_stages: v as u32,
                    stages: bounds.windows(2).map(stage).collect(),
                    step_s: self.played_s(bounds, &order),
                });
            }
        }
        found
    }

    fn order(&self, schedule: Schedule, num_stages: usize, virtual_stages: usize) -> Order {
        Order::new(schedule, num_stages, self.candidates.num_microbatches).sharing(virtual_stages)
    }

    /// Step time with stages cut at these layers.
    fn played_s(&self, bounds: &[usize], order: &Order) -> f64 {
        // Share of the forward pass: a backward pass does two matmuls' work for one in the forward, and repeats a
        // forward pass if it recomputes.
        let part = 1.0 / (3.0 + self.config.fraction.shares(1).0);
        let times = |w: &[usize]| {
            let candidate = self.get(w[0], w[1])?;
            let forward_s = part * candidate.microbatch_s;
            let weights_s = if order.schedule.virtual_stages().is_some() { forward_s } else { 0.0 };
            let backward_s = candidate.microbatch_s - forward_s - weights_s;
            Some(StageTimes { forward_s, backward_s, weights_s, step_s: candidate.step_s, ..StageTimes::default() })
        };
        let times: Option<Vec<StageTimes>> = bounds.windows(2).map(times).collect();
        times.map_or(f64::INFINITY, |times| simulate_order(&times, order, &mut |_, _, _, _| {}).step_s)
    }

    /// True if no lane takes more than `limit_bytes`: static memory and activations in flight of all its stages, and the
    /// largest working memory of one.
    fn fits(&self, bounds: &[usize], order: &Order, limit_bytes: u64) -> bool {
        let fits = |lane: usize| {
            let (mut sum, mut transient) = (0u64, 0u64);
            let mut each = Vec::with_capacity(order.virtual_stages);
            for s in order.stages_of(lane) {
                let Some(c) = self.get(bounds[s], bounds[s + 1]) else { return false };
                sum = sum.saturating_add(c.static_bytes);
                transient = transient.max(c.transient_bytes);
                each.push(c.bytes_per_inflight_microbatch);
            }
            // Some stage holds a microbatch at some time, and counting how many takes a walk over all calls.
            let fits = |kept: u64| sum.saturating_add(transient).saturating_add(kept) <= limit_bytes;
            fits(each.iter().copied().max().unwrap_or(0)) && fits(order.held_bytes(lane, &each))
        };
        (0..order.num_lanes()).all(fits)
    }

    /// Moves one cut at a time as long as the step gets shorter.
    fn move_cuts(&self, found: &mut PipelineCandidate<'a>) {
        let order = self.order(found.schedule, found.stages.len(), found.virtual_stages as usize);
        let mut bounds: Vec<usize> = found.stages.iter().map(|s| s.layers.start).chain([self.rows.len()]).collect();
        let calls = 2 * u64::from(order.num_microbatches) * order.num_stages as u64;
        let mut left = MOST_PLAYED / calls.max(1);
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for cut in 1..bounds.len() - 1 {
                for to in [bounds[cut] - 1, bounds[cut] + 1] {
                    let from = bounds[cut];
                    if left == 0 || to <= bounds[cut - 1] || to >= bounds[cut + 1] {
                        continue;
                    }
                    left -= 1;
                    bounds[cut] = to;
                    let step_s = self.played_s(&bounds, &order);
                    if step_s < found.step_s * (1.0 - 1e-9) {
                        (found.step_s, moved) = (step_s, true);
                    } else {
                        bounds[cut] = from;
                    }
                }
            }
        }
        for (stage, w) in found.stages.iter_mut().zip(bounds.windows(2)) {
            (stage.layers, stage.config) = (w[0]..w[1], self.config_of(w[0], w[1]));
        }
    }
}

/// For each number of runs up to `most`, cuts the layers into that many consecutive runs. The longest run is as short
/// as possible, and among such cuts the sum of squares is least. `None` where no run is possible.
fn even_cuts(layers: usize, most: usize, seconds: impl Fn(usize, usize) -> f64) -> Vec<Option<Vec<usize>>> {
    // By number of runs minus one and end: the longest run, the squares so far, and the start of the last run.
    let mut rows: Vec<Vec<(f64, f64, usize)>> = Vec::new();
    for runs in 1..=most.min(layers) {
        let row = (0..=layers).map(|end| {
            let mut best = (f64::INFINITY, f64::INFINITY, 0);
            let starts = if runs == 1 { 0..1 } else { runs - 1..end.max(runs - 1) };
            for start in starts.filter(|&start| start < end) {
                let (longest, squares) = match runs {
                    1 => (0.0, 0.0),
                    _ => (rows[runs - 2][start].0, rows[runs - 2][start].1),
                };
                let last = seconds(start, end);
                let new = (last.max(longest), squares + last * last);
                if new.0 < best.0 || new.0 == best.0 && new.1 < best.1 {
                    best = (new.0, new.1, start);
                }
            }
            best
        });
        let row = row.collect();
        rows.push(row);
    }
    let bounds = |runs: usize| {
        rows[runs][layers].0.is_finite().then(|| {
            let mut bounds = vec![layers];
            for row in rows[..=runs].iter().rev() {
                bounds.push(row[bounds[bounds.len() - 1]].2);
            }
            bounds.reverse();
            bounds
        })
    };
    let mut cuts: Vec<Option<Vec<usize>>> = (0..rows.len()).map(bounds).collect();
    cuts.resize(most, None);
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest run of the best way of cutting, by exhaustive search.
    fn least_longest(times: &[f64], runs: usize) -> f64 {
        if runs == 1 {
            return times.iter().sum();
        }
        let cut = |at: usize| times[..at].iter().sum::<f64>().max(least_longest(&times[at..], runs - 1));
        (1..=times.len() - (runs - 1)).map(cut).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn cuts_are_as_even_as_can_be() {
        let mut state = 7u64;
        for layers in 1..9 {
            let mut next = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                f64::from((state >> 60) as u32 + 1)
            };
            let times: Vec<f64> = (0..layers).map(|_| next()).collect();
            let cuts = even_cuts(layers, layers + 2, |first, end| times[first..end].iter().sum());
            assert_eq!(cuts.len(), layers + 2);
            for (runs, bounds) in (1..).zip(&cuts) {
                let Some(bounds) = bounds else {
                    assert!(runs > layers, "{layers} layers can be cut into {runs}");
                    continue;
                };
                assert_eq!((bounds[0], bounds[runs], bounds.len()), (0, layers, runs + 1));
                assert!(bounds.windows(2).all(|w| w[0] < w[1]), "{bounds:?}");
                let longest = bounds.windows(2).map(|w| times[w[0]..w[1]].iter().sum()).fold(0.0, f64::max);
                assert_eq!(longest, least_longest(&times, runs), "{times:?} in {runs}");
            }
        }
    }

    #[test]
    fn layers_that_cannot_be_run_are_not_cut() {
        let cuts = even_cuts(3, 3, |first, end| if end - first == 2 { f64::INFINITY } else { 1.0 });
        assert_eq!(cuts, [Some(vec![0, 3]), None, Some(vec![0, 1, 2, 3])]);
    }
}
