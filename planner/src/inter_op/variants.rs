//! Pipelines whose order of calls has no formula in the search: several stages on the same devices, and separate
//! gradients of weights. They are derived from the search's candidates, and the prediction decides whether they pay.

use super::interleave::interleaved;
use super::search::{PipelineCandidate, SearchResult};
use crate::request::PlanFailure;
use crate::search::context::SearchContext;
use altiplano_ir::plan::Schedule;
use std::collections::BTreeMap;

/// Most pipelines that are also predicted under `zb-h1`.
const MOST_ZERO_BUBBLE: usize = 2;
/// Largest estimated share of device memory under `zb-h1` for which a pipeline is predicted.
const MOST_OF_MEMORY: f64 = 1.1;

/// Returns the candidates of the requested kind, best first: plain pipelines, unless stages are to share devices.
/// `memory_bytes` is the memory that a device of each group may use at each number of microbatches.
pub fn asked_for<'a>(
    cx: &SearchContext<'_>,
    searched: &'a SearchResult,
    memory_bytes: &BTreeMap<u32, Vec<u64>>,
) -> Result<Vec<PipelineCandidate<'a>>, PlanFailure> {
    let space = cx.space;
    let Some(shared) = space.degrees.virtual_stages.filter(|&v| v > 1) else {
        return searched.ranked(cx, memory_bytes);
    };
    // Without one that fits by its estimate, predictions say how much memory the others need.
    for limits in [memory_bytes, &BTreeMap::new()] {
        let found = interleaved(searched, space, limits, None);
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let layers = searched.candidates.first().map_or(0, |c| c.layered.layers.len()) as u32;
    let stages = space.degrees.pp.unwrap_or(2).saturating_mul(shared);
    if stages > layers {
        return Err(PlanFailure::TooFewLayers { layers, stages });
    }
    // An obstacle to plain pipelines is one to these as well.
    searched.ranked(cx, memory_bytes).and(Err(PlanFailure::NoCombination))
}

/// Returns pipelines that may be faster than those found, if the order of calls is free: the best of them under
/// `zb-h1`, and some whose stages share devices. The search has no formula for `zb-h1`: its gain depends on the part of
/// a backward pass that others wait for, which lowering decides.
pub fn others<'a>(
    cx: &SearchContext<'_>,
    searched: &'a SearchResult,
    found: &[PipelineCandidate<'a>],
    memory_bytes: &BTreeMap<u32, Vec<u64>>,
) -> Vec<PipelineCandidate<'a>> {
    let space = cx.space;
    if space.alpa {
        return Vec::new();
    }
    let is_plain =
        |f: &&PipelineCandidate<'_>| (f.schedule, f.virtual_stages) == (Schedule::OneFOneB, 1) && f.stages.len() > 1;
    // Delayed gradients of weights keep their inputs alive, for which full devices have no room.
    let has_room =
        |f: &&PipelineCandidate<'_>| f.share_of_memory(Schedule::ZbH1, &space.memory_bytes) <= MOST_OF_MEMORY;
    let pipelines = found.iter().filter(|f| space.zero_bubble && is_plain(f) && has_room(f));
    let pipelines = pipelines.take(searched.predicted_at_most(MOST_ZERO_BUBBLE));
    let mut others: Vec<PipelineCandidate<'a>> =
        pipelines.map(|f| PipelineCandidate { schedule: Schedule::ZbH1, ..f.clone() }).collect();
    if space.degrees.virtual_stages.is_none() {
        let shared = interleaved(searched, space, memory_bytes, found.first().map(|f| f.step_s));
        let most = searched.predicted_at_most(shared.len());
        others.extend(shared.into_iter().take(most));
    }
    others
}
