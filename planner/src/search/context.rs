//! The inputs that all steps of a search read.

use super::space::SearchSpace;
use crate::layers::cache::LayeredAtBatch;
use crate::request::{Progress, Request};
use altiplano_cost_models::Costs;

/// A request, the part of its search space to search, and what prices and cuts it.
#[derive(Clone, Copy)]
pub struct SearchContext<'a> {
    pub request: &'a Request,
    pub space: &'a SearchSpace,
    pub costs: &'a dyn Costs,
    pub layered: &'a LayeredAtBatch<'a>,
    pub progress: &'a dyn Progress,
}

impl SearchContext<'_> {
    /// The same search within another space.
    pub fn within<'b>(&'b self, space: &'b SearchSpace) -> SearchContext<'b> {
        SearchContext { space, ..*self }
    }
}
