//! The forward graph seen as layers: which values each has, and which layers are alike.

use crate::intra_op::space::block_counts;
use crate::intra_op::statement::Model;
use crate::lower::Derived;
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// A forward graph cut into layers.
pub struct Layered {
    pub graph: Graph,
    /// See [`altiplano_ir::plan::Plan::layers`].
    pub starts: Vec<u32>,
    pub layer_of: Vec<Option<u32>>,
    pub users: Vec<Vec<ValueId>>,
    /// Values that have a cotangent.
    pub needs_gradient: Vec<bool>,
    pub blocks: Vec<Vec<Vec<u64>>>,
    pub layers: Vec<Layer>,
    /// Kind of each layer: layers of one kind have the same program.
    pub kinds: Vec<usize>,
    /// The first layer of each kind.
    pub representatives: Vec<usize>,
    stops: Vec<ValueId>,
    trains: bool,
    derived: OnceLock<Result<Derived, AutodiffError>>,
}

/// One layer's nodes and parameters in order: layers of one kind correspond entry by entry.
pub struct Layer {
    pub nodes: Vec<ValueId>,
    pub parameters: Vec<ValueId>,
    /// Values from earlier layers.
    pub entering: Vec<ValueId>,
}

impl Layered {
    /// `trains`: whether values have gradients at all.
    pub fn new(graph: Graph, starts: Vec<u32>, stops: &[ValueId], trains: bool) -> Layered {
        let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
        let layer_of: Vec<Option<u32>> = graph
            .values()
            .map(|v| {
                let after = starts.partition_point(|&s| s <= v.0);
                (varies[v.index()] && !graph.node(v).op.is_leaf()).then(|| (after - 1) as u32)
            })
            .collect();
        let mut needs_gradient = vec![false; graph.len()];
        for v in graph.values() {
            let node = graph.node(v);
            let source = matches!(node.op, Op::Parameter(_)) || node.operands.iter().any(|o| needs_gradient[o.index()]);
            needs_gradient[v.index()] = trains && source && graph.ty(v).dtype.is_float() && !stops.contains(&v);
        }
        let users = graph.users();
        let layers: Vec<Layer> = starts
            .windows(2)
            .map(|w| {
                let nodes: Vec<ValueId> = (w[0]..w[1]).map(ValueId).filter(|v| layer_of[v.index()].is_some()).collect();
                let (mut parameters, mut entering) = (Vec::new(), Vec::new());
                for &o in nodes.iter().flat_map(|&v| &graph.node(v).operands) {
                    let list = match graph.node(o).op {
                        Op::Parameter(_) => &mut parameters,
                        _ if layer_of[o.index()].is_some() && o.0 < w[0] => &mut entering,
                        _ => continue,
                    };
                    if !list.contains(&o) {
                        list.push(o);
                    }
                }
                Layer { nodes, parameters, entering }
            })
            .collect();
        let blocks = block_counts(&graph);
        let mut layered = Layered {
            graph,
            starts,
            layer_of,
            users,
            needs_gradient,
            blocks,
            layers,
            kinds: Vec::new(),
            representatives: Vec::new(),
            stops: stops.to_vec(),
            trains,
            derived: OnceLock::new(),
        };
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        for l in 0..layered.layers.len() {
            let next = layered.representatives.len();
            let kind = *seen.entry(layered.fingerprint(l)).or_insert(next);
            if kind == next {
                layered.representatives.push(l);
            }
            layered.kinds.push(kind);
        }
        layered
    }

    /// What lowering looks at, made once for all plans.
    pub fn derived(&self) -> Result<&Derived, AutodiffError> {
        let derived = self.derived.get_or_init(|| Derived::new(&self.graph, &self.stops, self.trains));
        derived.as_ref().map_err(Clone::clone)
    }

    /// What the integer programs of layers look at. Without an optimizer nothing is trained.
    pub fn model<'a>(&'a self, optimizer: Option<&'a Optimizer>) -> Model<'a> {
        Model {
            graph: &self.graph,
            layer_of: &self.layer_of,
            users: &self.users,
            needs_gradient: &self.needs_gradient,
            blocks: &self.blocks,
            optimizer,
        }
    }

    /// All that a layer's program depends on, as text.
    fn fingerprint(&self, l: usize) -> String {
        use std::fmt::Write;
        let layer = &self.layers[l];
        let end = self.starts[l + 1];
        let mut text = String::new();
        for &v in &layer.nodes {
            let node = self.graph.node(v);
            let crosses = self.users[v.index()].iter().any(|u| u.0 >= end) || self.graph.outputs.contains(&v);
            let _ =
                write!(text, "{:?} {} {} {crosses} {:?}(", node.op, node.ty, node.batch_dims, self.blocks[v.index()]);
            for pin in self.graph.pins_of(v) {
                let _ = write!(text, "{:?}{:?}", pin.mesh, pin.dims);
            }
            for o in &node.operands {
                let (kind, position) = if let Some(i) = layer.parameters.iter().position(|p| p == o) {
                    ('p', i)
                } else if let Some(i) = layer.entering.iter().position(|e| e == o) {
                    ('e', i)
                } else if let Ok(i) = layer.nodes.binary_search(o) {
                    ('n', i)
                } else {
                    ('c', 0)
                };
                let grad = self.needs_gradient[o.index()];
                let _ = write!(text, "{kind}{position}{grad}{} {:?},", self.graph.ty(*o), self.blocks[o.index()]);
            }
            text.push(')');
        }
        for (i, &p) in layer.parameters.iter().enumerate() {
            for pin in self.graph.pins_of(p) {
                let _ = write!(text, "p{i}{:?}{:?}", pin.mesh, pin.dims);
            }
        }
        for &v in &layer.entering {
            let passes = self.users[v.index()].iter().any(|u| u.0 >= end);
            let _ = write!(text, "e{}{passes}", self.graph.ty(v));
        }
        text
    }

    /// Global bytes of the values that enter layer `l`.
    pub fn entering_bytes(&self, l: usize) -> u64 {
        self.layers[l].entering.iter().map(|&v| self.graph.ty(v).bytes()).sum()
    }
}
