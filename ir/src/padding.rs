//! The original of a padded model, and the positions of its elements in the padded one.
//!
//! A padded plan also carries the model as it is, for everything that loads, saves, compares or reports.

use crate::graph::{Graph, ValueId};
use crate::types::{MAX_ELEMENTS, TensorType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A factor of a dimension: its size in the model, and its padded size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    pub size: u64,
    pub padded: u64,
}

/// The positions of a tensor's elements within its padded form: for each dimension its factors, major first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Extents(pub Vec<Vec<Extent>>);

impl Extents {
    /// The shape without padding.
    pub fn shape(&self) -> Vec<u64> {
        self.0.iter().map(|dim| dim.iter().fold(1, |n: u64, e| n.saturating_mul(e.size))).collect()
    }

    pub fn padded_shape(&self) -> Vec<u64> {
        self.0.iter().map(|dim| dim.iter().fold(1, |n: u64, e| n.saturating_mul(e.padded))).collect()
    }

    /// For each element along a dimension, its position in the padded tensor.
    pub fn positions(&self, dim: usize) -> Vec<u64> {
        let within = |all: Vec<u64>, e: &Extent| {
            all.iter().flat_map(|&at| (0..e.size).map(move |i| at * e.padded + i)).collect()
        };
        self.0[dim].iter().fold(vec![0], within)
    }

    /// The positions in the padded tensor, row major, of all elements in order. Each comes with the number of elements
    /// that follow contiguously.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        let dims: Vec<Vec<u64>> = (0..self.0.len()).map(|d| self.positions(d)).collect();
        let shape = self.padded_shape();
        let along = dims.last().map_or(1, |last| {
            let together = last.iter().zip(0..).take_while(|(at, i)| **at == *i).count();
            if together == last.len() { together as u64 } else { 1 }
        });
        let mut index = vec![0usize; dims.len()];
        let mut left = dims.iter().map(|d| d.len() as u64).product::<u64>() / along.max(1);
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let at = index.iter().zip(&dims).zip(&shape).fold(0, |at, ((&i, dim), &size)| at * size + dim[i]);
            let mut step = along as usize;
            for (i, dim) in index.iter_mut().zip(&dims).rev() {
                *i += step;
                step = 1;
                if *i < dim.len() {
                    break;
                }
                *i = 0;
            }
            Some((at, along))
        })
    }

    /// True if any dimension is padded.
    pub fn is_padded(&self) -> bool {
        self.0.iter().any(|dim| is_padded(dim))
    }
}

/// True if any factor of a dimension is padded.
pub fn is_padded(dim: &[Extent]) -> bool {
    dim.iter().any(|e| e.size != e.padded)
}

/// The original of a plan's padded graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Padding {
    /// The model without padding.
    pub graph: Arc<Graph>,
    /// Values of the model through which no gradient flows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_gradients: Vec<ValueId>,
    /// The padded parameters.
    pub parameters: BTreeMap<String, Extents>,
}

impl Padding {
    /// The growth of a size that counts as slight.
    pub const SLIGHT: f64 = 0.005;

    /// Returns true if all padding is slight.
    pub fn is_slight(&self) -> bool {
        let grows = |e: &Extent| e.padded as f64 > e.size as f64 * (1.0 + Self::SLIGHT);
        !self.parameters.values().flat_map(|extents| &extents.0).flatten().any(grows)
    }

    /// The reason why this cannot be the original of `graph`, if there is one.
    pub fn problem(&self, graph: &Graph) -> Option<&'static str> {
        let own = &self.graph;
        if !own.verify().is_empty() {
            return Some("the model's graph is not valid");
        }
        if self.stop_gradients.iter().any(|v| v.index() >= own.len()) {
            return Some("stop_gradients names no value of the model's graph");
        }
        let inputs = |g: &Graph| g.inputs().map(|(v, name)| (String::from(name), g.ty(v).clone())).collect::<Vec<_>>();
        let outputs = |g: &Graph| g.outputs.iter().map(|&v| g.ty(v).clone()).collect::<Vec<_>>();
        if own.batch != graph.batch || inputs(own) != inputs(graph) || outputs(own) != outputs(graph) {
            return Some("the model's batch, inputs and outputs are not those of the plan's graph");
        }
        let types = |g: &Graph| g.parameters().map(|(v, name)| (String::from(name), g.ty(v).clone())).collect();
        let (here, there): (BTreeMap<_, _>, BTreeMap<_, _>) = (types(own), types(graph));
        let fits = |(name, ty): (&String, &TensorType)| {
            let larger = there.get(name);
            match self.parameters.get(name) {
                None => larger == Some(ty),
                Some(extents) => {
                    let grows = |e: &Extent| 0 < e.size && e.size <= e.padded && e.padded <= MAX_ELEMENTS;
                    extents.0.iter().flatten().all(grows)
                        && extents.shape() == ty.shape
                        && larger.is_some_and(|l| *l == ty.with_shape(extents.padded_shape()))
                }
            }
        };
        let known = |name: &String| here.contains_key(name);
        if here.len() != there.len() || !here.iter().all(fits) || !self.parameters.keys().all(known) {
            return Some("the model's parameters are not those of the plan's graph without padding");
        }
        None
    }
}
