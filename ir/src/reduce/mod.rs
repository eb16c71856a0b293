//! A small twin of a large model: fewer layers and smaller sizes, the same structure.
//!
//! What a plan of the twin computes can be compared with one device on any machine, whatever the model's size. Of equal
//! layers two stay. Sizes follow from the sharding rules: dimensions that one factor of an op indexes have one size, so each
//! class of them is made smaller at once, and every op is rewritten with [`Operator::resized`](crate::op::Operator::resized),
//! as for another batch.

pub(crate) mod atoms;
mod layers;
mod means;
pub(crate) mod sizes;

#[cfg(test)]
mod tests;

use crate::batch::rebatch;
use crate::graph::{Graph, ValueId};
use layers::FewerLayers;
use serde::{Deserialize, Serialize};
use sizes::Sizes;

/// How small a twin is to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Elements of all parameters, at most.
    pub parameters: u64,
    /// Floating-point operations of a forward pass, at most.
    pub flop: u64,
    /// Samples of the batch, at most.
    pub batch: u64,
}

/// What a laptop trains in a second.
impl Default for Goal {
    fn default() -> Goal {
        Goal { parameters: 4_000_000, flop: 1_000_000_000, batch: 8 }
    }
}

/// What became smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduction {
    /// Layers of all runs of equal layers of which some went, now and before.
    pub layers: (usize, usize),
    /// Elements of all parameters, now and before.
    pub parameters: (u64, u64),
}

/// A twin.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduced {
    pub graph: Graph,
    /// For each value of the model its value here, or that of its counterpart in another layer; `None` where it went.
    pub map: Vec<Option<ValueId>>,
    pub reduction: Reduction,
}

/// The twin of a graph whose batch was found; itself where it is small enough already. Where the goal is not in reach, the twin is as small as it gets.
pub fn reduce(graph: &Graph, goal: &Goal) -> Reduced {
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
    Reduced {
        map: fewer.map.iter().map(|v| v.map(|v| moved[v.index()])).collect(),
        reduction: Reduction { layers: fewer.layers, parameters: (elements(&reduced), elements(graph)) },
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
