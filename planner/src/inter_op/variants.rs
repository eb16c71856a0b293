//! Pipelines whose order of calls has no formula in the search: several stages on the same devices, and separate
//! gradients of weights. They are derived from the search's candidates, and the prediction decides whether they pay.

use super::interleave::interleaved;
use super::search::{Found, Freedom, Searched};
use crate::request::{PlanFailure, Request};
use altiplano_ir::plan::Schedule;
use std::collections::BTreeMap;

/// Most pipelines that are also predicted under `zb-h1`.
const MOST_ZERO_BUBBLE: usize = 2;
/// Largest estimated share of device memory under `zb-h1` for which a pipeline is predicted.
const MOST_OF_MEMORY: f64 = 1.1;

/// Returns the candidates of the requested kind, best first: plain pipelines, unless stages are to share devices.
/// `memory_bytes` is the memory that a device of each group may use at each number of microbatches.
pub fn asked_for<'a>(
    searched: &'a Searched,
    request: &Request,
    freedom: &Freedom,
    memory_bytes: &BTreeMap<u32, Vec<u64>>,
) -> Result<Vec<Found<'a>>, PlanFailure> {
    let Some(shared) = freedom.virtual_stages.filter(|&v| v > 1) else {
        return searched.ranked(request, freedom, memory_bytes);
    };
    let found = interleaved(searched, freedom, memory_bytes, None);
    if !found.is_empty() {
        return Ok(found);
    }
    let layers = searched.candidates.first().map_or(0, |c| c.layered.layers.len()) as u32;
    let stages = freedom.pp.unwrap_or(2).saturating_mul(shared);
    if stages > layers {
        return Err(PlanFailure::TooFewLayers { layers, stages });
    }
    // An obstacle to plain pipelines is one to these as well.
    searched.ranked(request, freedom, memory_bytes).and(Err(PlanFailure::NoCombination))
}

/// Returns pipelines that may be faster than those found, if the order of calls is free: the best of them under
/// `zb-h1`, and some whose stages share devices. The search has no formula for `zb-h1`: its gain depends on the part of
/// a backward pass that others wait for, which lowering decides.
pub fn others<'a>(
    searched: &'a Searched,
    freedom: &Freedom,
    found: &[Found<'a>],
    memory_bytes: &BTreeMap<u32, Vec<u64>>,
) -> Vec<Found<'a>> {
    if freedom.alpa {
        return Vec::new();
    }
    let is_plain = |f: &&Found<'_>| (f.schedule, f.virtual_stages) == (Schedule::OneFOneB, 1) && f.stages.len() > 1;
    // Delayed gradients of weights keep their inputs alive, for which full devices have no room.
    let has_room = |f: &&Found<'_>| f.share_of_memory(Schedule::ZbH1, &freedom.memory_bytes) <= MOST_OF_MEMORY;
    let pipelines = found.iter().filter(|f| freedom.zero_bubble && is_plain(f) && has_room(f));
    let pipelines = pipelines.take(searched.judged_at_most(MOST_ZERO_BUBBLE));
    let mut others: Vec<Found<'a>> = pipelines.map(|f| Found { schedule: Schedule::ZbH1, ..f.clone() }).collect();
    if freedom.virtual_stages.is_none() {
        let shared = interleaved(searched, freedom, memory_bytes, found.first().map(|f| f.step_s));
        let most = searched.judged_at_most(shared.len());
        others.extend(shared.into_iter().take(most));
    }
    others
}
