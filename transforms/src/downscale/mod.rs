//! Downscaling of a large model: fewer layers and smaller sizes, with the same structure.
//!
//! The results of a plan of the small twin can be compared with one device on any machine, whatever the model's size.
//! Two of a run of equal layers stay. Sizes follow from the sharding rules. Dimensions that one factor of an op indexes
//! have one size, so each class of them shrinks at once. Every op is rewritten with
//! [`Operator::resized`](altiplano_ir::op::Operator::resized), as for another batch.

pub(crate) mod atoms;
mod layers;
mod means;
pub(crate) mod sizes;

#[cfg(test)]
mod tests;

use altiplano_ir::batch::rebatch;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::plan::Downscaling;
use layers::FewerLayers;
use sizes::Sizes;

/// The limits of a twin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// The largest number of elements of all parameters.
    pub parameters: u64,
    /// The largest number of floating-point operations of a forward pass.
    pub flop: u64,
    /// The largest number of samples in the batch.
    pub batch: u64,
}

/// A model that a laptop trains in about a second.
impl Default for Goal {
    fn default() -> Goal {
        Goal { parameters: 4_000_000, flop: 1_000_000_000, batch: 8 }
    }
}

/// A twin.
#[derive(Clone, Debug, PartialEq)]
pub struct Downscaled {
    /// The small graph.
    pub graph: Graph,
    /// For each value of the model, its value here or that of its counterpart in another layer. `None` if it was
    /// removed.
    pub map: Vec<Option<ValueId>>,
    /// The sizes before and after.
    pub downscaling: Downscaling,
}

/// The twin of a graph with a known batch. It is the graph itself if that is small enough. If the goal is out of reach,
/// the twin is as small as possible.
pub fn downscale(graph: &Graph, goal: &Goal) -> Downscaled {
    let mut fewer = FewerLayers::all(graph);
    if !fits(graph, goal) {
        fewer.shorten();
    }
    let batch = fewer.graph.batch.min(goal.batch);
    let whole = rebatch(&fewer.graph, batch).unwrap_or(fewer.graph);
    let mut sizes = Sizes::of(&whole);
    let mut most = 1 << 12;
    let mut reduced = whole.clone();
    while most > 1 && !fits(&reduced, goal) {
        reduced = sizes.capped(&whole, most);
        most /= 2;
    }
    let (reduced, moved) = means::with_means(&whole, &reduced);
    Downscaled {
        map: fewer.map.iter().map(|v| v.map(|v| moved[v.index()])).collect(),
        downscaling: Downscaling { layers: fewer.layers, parameters: (elements(&reduced), elements(graph)) },
        graph: reduced,
    }
}

fn elements(graph: &Graph) -> u64 {
    graph.parameters().fold(0, |sum, (v, _)| sum.saturating_add(graph.ty(v).elements()))
}

fn fits(graph: &Graph, goal: &Goal) -> bool {
    let flop = graph.values().fold(0u64, |sum, v| sum.saturating_add(graph.flop(v)));
    flop <= goal.flop && elements(graph) <= goal.parameters
}
