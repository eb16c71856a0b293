//! A model cut into layers, at every size of microbatch that a search asks for. Cutting and what is derived of the layers know
//! nothing of the cluster, so that requests for several clusters share it.

use crate::intra_op::stage::gradient_readers;
use crate::model::{Layered, saved_between};
use crate::request::Request;
use crate::{global_batch, layers};
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::batch::rebatch;
use altiplano_ir::graph::{Graph, ValueId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What was derived of one model, by the size of microbatches: requests that share it differ in cluster and batch alone.
#[derive(Default)]
pub struct Cuts {
    /// Where layers start, and where blocks do.
    starts: OnceLock<[Vec<u32>; 2]>,
    /// For each value the nodes whose gradients read it, where the model is trained.
    readers: OnceLock<Result<Vec<Vec<ValueId>>, AutodiffError>>,
    /// Of the model as it is, whatever size is first asked for.
    saved: OnceLock<Arc<Vec<bool>>>,
    known: Mutex<BTreeMap<u64, Arc<OnceLock<Option<Arc<Layered>>>>>>,
}

/// The cuts of a request's model, by the number of microbatches.
pub(crate) struct Sizes<'a> {
    request: &'a Request,
    cuts: Arc<Cuts>,
}

impl<'a> Sizes<'a> {
    pub(crate) fn new(request: &'a Request) -> Self {
        Sizes::among(request, &Arc::default())
    }

    pub(crate) fn among(request: &'a Request, cuts: &Arc<Cuts>) -> Self {
        Sizes { request, cuts: cuts.clone() }
    }

    /// [`gradient_readers`] of the model.
    ///
    /// # Errors
    /// Where it has no derivative.
    pub(crate) fn readers(&self) -> Result<&[Vec<ValueId>], AutodiffError> {
        let Request { graph, stop_gradients, .. } = self.request;
        let readers = self.cuts.readers.get_or_init(|| gradient_readers(graph, stop_gradients));
        readers.as_ref().map(Vec::as_slice).map_err(Clone::clone)
    }

    /// At so many microbatches; `None` where the batch does not divide.
    pub(crate) fn at(&self, count: u32) -> Option<Arc<Layered>> {
        let Request { graph, stop_gradients, .. } = self.request;
        let samples = match graph.batch {
            0 => 0,
            _ => global_batch(self.request) / u64::from(count),
        };
        let cell = self.cuts.known.lock().unwrap_or_else(PoisonError::into_inner).entry(samples).or_default().clone();
        let new = || {
            let starts = || [layers::cluster(graph), layers::cluster_finely(graph, usize::MAX)];
            let [starts, units] = self.cuts.starts.get_or_init(starts);
            let graph = at_microbatches(self.request, count)?;
            let layered = Layered::new(graph, starts.clone(), stop_gradients, self.request.trains());
            let layered = layered.with_units(units.clone());
            if !self.request.trains() {
                return Some(Arc::new(layered));
            }
            let saved = || {
                let readers = self.readers().unwrap_or_default();
                Arc::new(saved_between(&self.request.graph, starts, readers))
            };
            Some(Arc::new(layered.with_saved(self.cuts.saved.get_or_init(saved))))
        };
        cell.get_or_init(new).clone()
    }
}

/// The graph at the microbatch size that a number of microbatches gives; as it is where nothing is known of its batch.
pub(crate) fn at_microbatches(request: &Request, count: u32) -> Option<Graph> {
    match request.graph.batch {
        0 => Some(request.graph.clone()),
        _ => rebatch(&request.graph, global_batch(request) / u64::from(count)).ok(),
    }
}
