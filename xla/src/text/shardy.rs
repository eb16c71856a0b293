//! Layouts as Shardy's attributes.

use super::types::quoted;
use crate::legal::Legal;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::sharding::{DimLayout, Sharding};
use std::collections::BTreeMap;

/// Layouts of some values of a graph. XLA chooses those of all others.
#[derive(Clone, Debug)]
pub struct Layouts<'a> {
    pub mesh: &'a Mesh,
    pub values: BTreeMap<ValueId, Sharding>,
}

impl Layouts<'_> {
    /// The same layouts of a rewritten graph.
    pub(super) fn of(&self, legal: &Legal) -> Self {
        let values = self.values.iter().map(|(v, sharding)| (legal.values[v.index()], sharding.clone()));
        Layouts { mesh: self.mesh, values: values.collect() }
    }

    /// `<@mesh, [{"data"}, {}]>`. `None` if the value has no layout.
    pub(super) fn attribute(&self, value: ValueId) -> Option<String> {
        let sharding = self.values.get(&value)?;
        let dim = |dim: &DimLayout| {
            let axes: Vec<String> = dim.axes().map(|axis| quoted(self.mesh.name(axis))).collect();
            format!("{{{}}}", axes.join(", "))
        };
        let dims: Vec<String> = contiguous(sharding).dims.iter().map(dim).collect();
        Some(format!("<@mesh, [{}]>", dims.join(", ")))
    }
}

/// The layout that Shardy can say: of each dimension only the outermost contiguous blocks, and no partial sums.
pub fn contiguous(sharding: &Sharding) -> Sharding {
    let outermost = |dim: &DimLayout| match dim.segments() {
        [first, _, ..] => DimLayout::split(dim.size(), first.axes.iter().copied()),
        _ => dim.clone(),
    };
    Sharding { dims: sharding.dims.iter().map(outermost).collect(), partial: Vec::new() }
}

/// `sdy.mesh @mesh = <["data"=2, "tensor"=4]>`
pub(super) fn mesh(mesh: &Mesh) -> String {
    let axes: Vec<String> = mesh.axes.iter().map(|axis| format!("{}={}", quoted(&axis.name), axis.size)).collect();
    format!("  sdy.mesh @mesh = <[{}]>\n", axes.join(", "))
}
