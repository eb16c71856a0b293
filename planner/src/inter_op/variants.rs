//! Pipelines whose calls are in another order than the search has a formula for: several stages on the same devices, and gradients
//! of weights apart. They are made of what the search has found, and the judge says what they are worth.

use super::interleave::interleaved;
use super::search::{Found, Freedom, Searched};
use crate::request::{PlanFailure, Request};
use altiplano_ir::plan::Schedule;
use std::collections::BTreeMap;

/// Pipelines that are judged under `zb-h1` as well, at most.
const MOST_ZERO_BUBBLE: usize = 2;
/// Of the memory of devices, what a pipeline that is judged may take under it by the estimate.
const MOST_OF_MEMORY: f64 = 1.1;

/// What the search found of the kind that was asked for, best first: plain pipelines, unless stages are to share devices.
/// `memory_bytes` is what a device of each group may use at each number of microbatches.
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
    // What is in the way of plain pipelines is in that of these.
    searched.ranked(request, freedom, memory_bytes).and(Err(PlanFailure::NoCombination))
}

/// Pipelines that may be faster than those that were found, where the order of calls is free: the best of them under `zb-h1`, and
/// some whose stages share devices. The search has no formula of its own for `zb-h1`: what it gains depends on which part of a
/// backward others wait for, which lowering decides.
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
    // Gradients of weights that wait keep what they are made of: full devices have no room for them.
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
