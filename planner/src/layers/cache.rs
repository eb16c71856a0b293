//! A model cut into layers, at every microbatch size that a search asks for. The cut and the data derived from its
//! layers do not depend on the cluster, so requests for several clusters share them.

use crate::features::stages;
use crate::intra_op::stage::gradient_readers;
use crate::layers;
use crate::layers::graph::{LayeredGraph, saved_between};
use crate::request::Request;
use crate::timings::{Phase, timed};
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::batch::rebatch;
use altiplano_ir::graph::{Graph, ValueId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Data derived from one model, by microbatch size. Requests that share it differ only in cluster and batch.
#[derive(Default)]
pub struct LayeredCache {
    /// Starts of layers, and starts of blocks.
    starts: OnceLock<[Vec<u32>; 2]>,
    /// For each value, the nodes whose gradients read it, if the model is trained.
    readers: OnceLock<Result<Vec<Vec<ValueId>>, AutodiffError>>,
    /// Saved values, computed from the model as given, whatever microbatch size is asked for first.
    saved: OnceLock<Arc<Vec<bool>>>,
    known: Mutex<BTreeMap<u64, Arc<OnceLock<Option<Arc<LayeredGraph>>>>>>,
}

/// The cuts of a request's model, by number of microbatches.
pub struct LayeredAtBatch<'a> {
    request: &'a Request,
    cache: Arc<LayeredCache>,
}

impl<'a> LayeredAtBatch<'a> {
    pub fn new(request: &'a Request) -> Self {
        LayeredAtBatch::among(request, &Arc::default())
    }

    pub fn among(request: &'a Request, cache: &Arc<LayeredCache>) -> Self {
        LayeredAtBatch { request, cache: cache.clone() }
    }

    /// Returns the [`gradient_readers`] of the model.
    ///
    /// # Errors
    /// If the model has no derivative.
    pub fn readers(&self) -> Result<&[Vec<ValueId>], AutodiffError> {
        let Request { graph, stop_gradients, .. } = self.request;
        let readers = self.cache.readers.get_or_init(|| gradient_readers(graph, stop_gradients));
        readers.as_ref().map(Vec::as_slice).map_err(Clone::clone)
    }

    /// The cut at `count` microbatches; `None` if that does not divide the batch.
    pub fn at(&self, count: u32) -> Option<Arc<LayeredGraph>> {
        let Request { graph, stop_gradients, .. } = self.request;
        let samples = match graph.batch {
            0 => 0,
            _ => self.request.global_batch_size() / u64::from(count),
        };
        let cell = self.cache.known.lock().unwrap_or_else(PoisonError::into_inner).entry(samples).or_default().clone();
        let new = || {
            let starts = || {
                [stages::with_starts(self.request, layers::cluster(graph)), layers::cluster_finely(graph, usize::MAX)]
            };
            let [starts, units] = self.cache.starts.get_or_init(starts);
            let graph = at_microbatches(self.request, count)?;
            let layered = LayeredGraph::new(graph, starts.clone(), stop_gradients, self.request.trains());
            let layered = layered.with_units(units.clone());
            if !self.request.trains() {
                return Some(Arc::new(layered));
            }
            let saved = || {
                let readers = self.readers().unwrap_or_default();
                Arc::new(saved_between(&self.request.graph, starts, readers))
            };
            Some(Arc::new(layered.with_saved(self.cache.saved.get_or_init(saved))))
        };
        cell.get_or_init(|| timed(Phase::Cuts, new)).clone()
    }
}

/// The graph at the microbatch size that follows from the number of microbatches; unchanged if its batch is unknown.
pub fn at_microbatches(request: &Request, count: u32) -> Option<Arc<Graph>> {
    match request.graph.batch {
        0 => Some(request.graph.clone()),
        _ => rebatch(&request.graph, request.global_batch_size() / u64::from(count)).ok().map(Arc::new),
    }
}
