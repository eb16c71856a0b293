//! The candidates of a search that are worth predicting.

use super::dynamic::NoStages;
use super::search::{CandidatesAtMicrobatch, PipelineCandidate, SearchResult, WORTH_A_LOOK, explain, num_devices};
use crate::request::PlanFailure;
use crate::search::context::SearchContext;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Candidates slower than the best estimate by more than this factor are not worth predicting.
const WORTH_PREDICTING: f64 = 1.5;
/// Meshes for the whole model as one stage that are predicted as well.
const MOST_MESHES: usize = 3;
/// Candidates that are predicted, besides the simplest and the smallest.
const MOST_PREDICTED: usize = 5;
/// Total nodes of all predicted candidates, if there are more than one.
const NODES_PREDICTED: usize = 40_000;

impl SearchResult {
    /// Number of `wanted` plans to predict: at least one, and fewer for very large models, since prediction time grows
    /// with the model.
    pub fn predicted_at_most(&self, wanted: usize) -> usize {
        let num_nodes = self.candidates.first().map_or(1, |c| c.layered.graph.len());
        wanted.min(NODES_PREDICTED / num_nodes.max(1)).max(1)
    }

    /// The candidates to predict, within the `memory_bytes` per device of each group for each number of microbatches.
    /// These are the few best whose estimates are near the best, best first; the best without a pipeline; the one on
    /// fewest devices; and the best meshes for one stage. The search does not model everything that the prediction does
    /// (the exchange of tied gradients, the host's run-ahead), so its second choice may be the better one.
    pub fn ranked(
        &self,
        cx: &SearchContext<'_>,
        memory_bytes: &BTreeMap<u32, Vec<u64>>,
    ) -> Result<Vec<PipelineCandidate<'_>>, PlanFailure> {
        let SearchContext { request, space, .. } = *cx;
        let unlimited = vec![u64::MAX; request.cluster.groups.len()];
        let limits = Limits { memory_bytes, unlimited: &unlimited };
        let best_of = self.candidates.par_iter().map(|candidates| {
            let found = candidates.best(cx, limits.of(candidates), space.degrees.pp)?;
            let single = match found.stages.len() > 1 && space.degrees.pp.is_none() {
                true => candidates.best(cx, limits.of(candidates), Some(1)).ok(),
                false => None,
            };
            Ok(single.into_iter().chain([found]).collect())
        });
        let best: Vec<Result<Vec<PipelineCandidate<'_>>, NoStages>> = best_of.collect();
        let (mut all, mut failures) = (Vec::new(), Vec::new());
        for result in best {
            match result {
                Ok(found) => all.extend(found),
                Err(error) => failures.push(explain(error, request)),
            }
        }
        all.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        let Some(least) = all.first().map(|f| f.step_s) else {
            return Err(failures.into_iter().reduce(PlanFailure::nearer).unwrap_or(PlanFailure::NoCombination));
        };
        // A baseline's degrees are fixed, so little is left to predict. Prediction time grows with the model.
        let most_predicted = if space.all_devices { 2 } else { MOST_PREDICTED };
        let most_predicted = self.predicted_at_most(most_predicted);
        // One stage of a very large model takes as long to predict as many pipelines.
        let worth = if self.predicted_at_most(2) == 1 { WORTH_PREDICTING } else { WORTH_A_LOOK };
        let simplest = all.iter().position(|f| f.stages.len() == 1 && f.step_s <= worth * least);
        let mut rank = 0;
        all.retain(|f| {
            rank += 1;
            rank <= most_predicted && f.step_s <= WORTH_PREDICTING * least || Some(rank - 1) == simplest
        });
        let most_s = WORTH_PREDICTING * least;
        if (!space.all_devices || space.alpa) && space.degrees.dp.is_none() && space.degrees.tp.is_none() {
            let mut uniform = self.uniform(cx, limits, most_s);
            uniform.retain(|f| !all.iter().any(|known| known.is(f)));
            uniform.truncate(most_predicted);
            all.extend(uniform);
        }
        if space.degrees.pp.is_none_or(|pp| pp == 1) {
            for single in self.singles(cx, limits, most_s, most_predicted.min(MOST_MESHES)) {
                let same = |f: &PipelineCandidate<'_>| {
                    f.candidates.num_microbatches == single.candidates.num_microbatches
                        && f.stages.len() == 1
                        && f.stages[0].block == single.stages[0].block
                        && f.stages[0].config.mesh == single.stages[0].config.mesh
                };
                if !all.iter().any(same) {
                    all.push(single);
                }
            }
        }
        Ok(all)
    }

    /// The best pipeline of equal stages for each number of microbatches, if it takes at most `most_s`, fastest first.
    fn uniform(&self, cx: &SearchContext<'_>, limits: Limits<'_>, most_s: f64) -> Vec<PipelineCandidate<'_>> {
        // Estimates are off by amounts that differ most between microbatch sizes.
        let best = self.candidates.iter().filter_map(|c| {
            let uniform = c.uniform(cx, limits.of(c)).into_iter();
            uniform.min_by(|a, b| a.step_s.total_cmp(&b.step_s))
        });
        let mut best: Vec<PipelineCandidate<'_>> = best.filter(|f| f.step_s <= most_s).collect();
        best.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        best
    }

    /// Plans of one stage that take at most `most_s`: the one on fewest devices, and the fastest `most` meshes.
    fn singles(
        &self,
        cx: &SearchContext<'_>,
        limits: Limits<'_>,
        most_s: f64,
        most: usize,
    ) -> Vec<PipelineCandidate<'_>> {
        let space = cx.space;
        let singles: Vec<PipelineCandidate<'_>> =
            self.candidates.iter().flat_map(|c| c.singles(space, limits.of(c), most_s)).collect();
        let devices = |f: &PipelineCandidate<'_>| f.stages[0].block.shape.num_devices();
        let fewest = singles.iter().map(devices).min();
        let total = num_devices(cx);
        let mut near = singles.clone();
        near.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        let smallest = singles.into_iter().find(|s| !space.all_devices && Some(devices(s)) == fewest);
        let near = near.into_iter().filter(|s| !space.all_devices || devices(s) == total).take(most);
        smallest.into_iter().chain(near).collect()
    }
}

/// Memory of a device that stages may use, by group, for each number of microbatches.
#[derive(Clone, Copy)]
struct Limits<'a> {
    memory_bytes: &'a BTreeMap<u32, Vec<u64>>,
    unlimited: &'a [u64],
}

impl<'a> Limits<'a> {
    fn of(self, candidates: &CandidatesAtMicrobatch) -> &'a [u64] {
        self.memory_bytes.get(&candidates.num_microbatches).map_or(self.unlimited, Vec::as_slice)
    }
}
