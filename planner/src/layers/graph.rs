//! The forward graph as layers: the values of each layer, and the layers that are alike.

use crate::cache::{Digest, Key};
use crate::features::modules::modules;
use crate::intra_op::dims::{CountedDims, block_counts};
use crate::intra_op::ilp::Model;
use crate::intra_op::stage::gradient_readers;
use crate::lower::TrainingGraphs;
use crate::lower::alike::Alike;
use crate::lower::repeat::Repeats;
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Execution, Offload, Plan, graph_hash};
use altiplano_ir::recompute::{Module, Modules, Recompute};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// A forward graph cut into layers.
pub struct LayeredGraph {
    pub graph: Arc<Graph>,
    /// See [`altiplano_ir::plan::Plan::layers`].
    pub starts: Vec<u32>,
    pub layer_of: Vec<Option<u32>>,
    pub users: Vec<Vec<ValueId>>,
    /// Values that have a cotangent.
    pub needs_gradient: Vec<bool>,
    alike: Alike,
    dims: CountedDims,
    pub blocks: Vec<Vec<Vec<u64>>>,
    pub layers: Vec<Layer>,
    /// See [`LayeredGraph::modules`].
    modules: OnceLock<Vec<Modules>>,
    /// Kind of each layer: layers of one kind have the same program.
    pub kinds: Vec<usize>,
    /// The first layer of each kind.
    pub representatives: Vec<usize>,
    units: Option<Units>,
    stops: Vec<ValueId>,
    trains: bool,
    saved: OnceLock<Arc<Vec<bool>>>,
    /// See [`LayeredGraph::repeated`].
    repeated: OnceLock<Vec<bool>>,
    /// For software without and with fused losses.
    training_graphs: [OnceLock<Result<TrainingGraphs, AutodiffError>>; 2],
    hash: OnceLock<String>,
    /// Keys of each kind of layer, and of each kind of smaller part.
    contents: OnceLock<[Vec<Option<Key>>; 2]>,
}

/// Smaller runs of nodes that layers are made of, if a model has more blocks than layers. Equal blocks are solved once,
/// and layers are put together from them.
struct Units {
    starts: Vec<u32>,
    layers: Vec<Layer>,
    kinds: Vec<usize>,
    representatives: Vec<usize>,
    /// The parts of each layer; `None` if a layer cannot be put together.
    of: Vec<Option<Range<usize>>>,
}

/// One part of a layer: the part itself, the first part of its kind (whose table it uses) with its nodes, and the kind.
pub struct Unit<'a> {
    pub layer: &'a Layer,
    pub model: &'a Layer,
    pub range: Range<u32>,
    pub kind: usize,
}

/// One layer's nodes and parameters in order. Layers of one kind correspond entry by entry.
pub struct Layer {
    pub nodes: Vec<ValueId>,
    pub parameters: Vec<ValueId>,
    /// Values from earlier layers.
    pub entering: Vec<ValueId>,
}

impl LayeredGraph {
    /// The graph of a plan, cut as the plan is.
    pub fn of_plan(plan: &Plan) -> LayeredGraph {
        LayeredGraph::new(plan.graph.clone(), plan.layers.clone(), &plan.stop_gradients, plan.schedule.trains())
    }

    /// `trains`: true if values have gradients at all.
    pub fn new(graph: impl Into<Arc<Graph>>, starts: Vec<u32>, stops: &[ValueId], trains: bool) -> LayeredGraph {
        let graph = graph.into();
        let layer_of = layers_of(&graph, &starts);
        let mut needs_gradient = vec![false; graph.len()];
        for v in graph.values() {
            let node = graph.node(v);
            let source = graph.is_trained(v) || node.operands.iter().any(|o| needs_gradient[o.index()]);
            needs_gradient[v.index()] = trains && source && graph.ty(v).dtype.is_float() && !stops.contains(&v);
        }
        let users = graph.users();
        let layers = layers_between(&graph, &layer_of, &starts);
        let alike = Alike::new(&graph);
        let blocks = block_counts(&graph, &alike);
        let mut layered = LayeredGraph {
            graph,
            starts,
            layer_of,
            users,
            needs_gradient,
            alike,
            dims: CountedDims::default(),
            blocks,
            layers,
            modules: OnceLock::new(),
            kinds: Vec::new(),
            representatives: Vec::new(),
            units: None,
            stops: stops.to_vec(),
            trains,
            saved: OnceLock::new(),
            repeated: OnceLock::new(),
            training_graphs: Default::default(),
            hash: OnceLock::new(),
            contents: OnceLock::new(),
        };
        (layered.kinds, layered.representatives) = layered.kinds_of(&layered.layers, &layered.starts);
        layered
    }

    /// Adds the starts of smaller parts of the layers.
    pub fn with_units(mut self, starts: Vec<u32>) -> LayeredGraph {
        if starts.len() <= self.starts.len() || self.starts.iter().any(|s| starts.binary_search(s).is_err()) {
            return self;
        }
        let layers = layers_between(&self.graph, &self.layer_of, &starts);
        let (kinds, representatives) = self.kinds_of(&layers, &starts);
        let at = |start: u32| starts.partition_point(|&s| s < start);
        let ranges: Vec<Range<usize>> = self.starts.windows(2).map(|w| at(w[0])..at(w[1])).collect();
        let can_join = |kind: usize| {
            let range = &ranges[self.representatives[kind]];
            let mut of_kind = (0..self.layers.len()).filter(|&l| self.kinds[l] == kind);
            // The values that leave a part enter the next part and no other, and no parameter is in several parts.
            let apart = range.clone().skip(1).all(|next| {
                let (begin, end) = (starts[next], starts[next + 1]);
                let later = |v: &ValueId| self.users[v.index()].iter().filter(|u| u.0 >= begin).copied();
                let is_layered = |u: ValueId| self.layer_of[u.index()].is_some();
                let leaves = |v: &&ValueId| later(v).any(is_layered);
                let leaving: Vec<ValueId> = layers[next - 1].nodes.iter().filter(leaves).copied().collect();
                leaving == layers[next].entering && leaving.iter().flat_map(later).all(|u| u.0 < end)
            });
            let mut parameters: Vec<ValueId> =
                layers[range.clone()].iter().flat_map(|unit| unit.parameters.iter().copied()).collect();
            let all = parameters.len();
            parameters.sort_unstable();
            parameters.dedup();
            let alike = of_kind.all(|l| kinds[ranges[l].clone()] == kinds[range.clone()]);
            range.len() > 1 && apart && parameters.len() == all && alike
        };
        let joins: Vec<bool> = (0..self.representatives.len()).map(can_join).collect();
        let of = self.kinds.iter().zip(&ranges).map(|(&kind, range)| joins[kind].then(|| range.clone())).collect();
        self.units = Some(Units { starts, layers, kinds, representatives, of });
        self
    }

    /// The parts that a layer is put together from; the layer itself if it is solved as a whole.
    pub fn units_of(&self, l: usize) -> Vec<Unit<'_>> {
        if let Some(units) = &self.units
            && let Some(of) = &units.of[l]
        {
            let unit = |u: usize| {
                let kind = units.kinds[u];
                let first = units.representatives[kind];
                let range = units.starts[first]..units.starts[first + 1];
                Unit { layer: &units.layers[u], model: &units.layers[first], range, kind }
            };
            return of.clone().map(unit).collect();
        }
        let kind = self.kinds[l];
        let first = self.representatives[kind];
        let range = self.starts[first]..self.starts[first + 1];
        vec![Unit { layer: &self.layers[l], model: &self.layers[first], range, kind }]
    }

    /// The kind of each of these layers, and the first layer of each kind.
    fn kinds_of(&self, layers: &[Layer], starts: &[u32]) -> (Vec<usize>, Vec<usize>) {
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let (mut kinds, mut representatives) = (Vec::new(), Vec::new());
        for (l, layer) in layers.iter().enumerate() {
            let kind = *seen.entry(self.fingerprint(layer, starts[l + 1])).or_insert(representatives.len());
            if kind == representatives.len() {
                representatives.push(l);
            }
            kinds.push(kind);
        }
        (kinds, representatives)
    }

    /// Key of everything in the model that the table of a kind of layer depends on. If `whole` is false, the kind is
    /// one of parts of layers.
    pub fn content(&self, kind: usize, whole: bool) -> Option<Key> {
        let of = |layers: &[Layer], starts: &[u32], representatives: &[usize]| -> Vec<Option<Key>> {
            let content = |&l: &usize| {
                let layer = &layers[l];
                let values = [&layer.nodes, &layer.entering].into_iter().flatten();
                let saved: Vec<(bool, Modules)> =
                    values.map(|v| (self.saved()[v.index()], self.modules()[v.index()])).collect();
                Digest::new("content").shown((self.fingerprint(layer, starts[l + 1]), saved)).key()
            };
            representatives.iter().map(content).collect()
        };
        let contents = self.contents.get_or_init(|| {
            let parts = self.units.as_ref().map(|units| of(&units.layers, &units.starts, &units.representatives));
            [of(&self.layers, &self.starts, &self.representatives), parts.unwrap_or_default()]
        });
        contents[usize::from(!whole)][kind]
    }

    /// The model data that lowering needs. It is made once for all plans with or without fused losses ([`Execution`]).
    pub fn training_graphs(&self, Execution { fused_loss, .. }: Execution) -> Result<&TrainingGraphs, AutodiffError> {
        let training_graphs = &self.training_graphs[usize::from(fused_loss)];
        let training_graphs =
            training_graphs.get_or_init(|| TrainingGraphs::new(&self.graph, &self.stops, self.trains, fused_loss));
        training_graphs.as_ref().map_err(Clone::clone)
    }

    /// [`graph_hash`] of the graph.
    pub fn graph_hash(&self) -> &str {
        self.hash.get_or_init(|| graph_hash(&self.graph))
    }

    /// Input of the layers' integer programs. Without an optimizer nothing is trained. Optimizer state is on the
    /// devices.
    pub fn model<'a>(&'a self, optimizer: Option<&'a Optimizer>) -> Model<'a> {
        Model {
            graph: &self.graph,
            layer_of: &self.layer_of,
            users: &self.users,
            needs_gradient: &self.needs_gradient,
            alike: &self.alike,
            dims: &self.dims,
            blocks: &self.blocks,
            saved: self.saved(),
            repeated: self.repeated(),
            modules: self.modules(),
            optimizer,
            offload: Offload::NONE,
        }
    }

    /// Values kept from the forward pass to the backward, if nothing expensive is recomputed.
    fn saved(&self) -> &[bool] {
        self.saved.get_or_init(|| {
            let LayeredGraph { graph, layer_of, users, stops, trains, .. } = self;
            // A model without a derivative has no plan to train it.
            let readers = if *trains { gradient_readers(graph, stops).unwrap_or_default() } else { Vec::new() };
            Arc::new(saved(graph, layer_of, users, &readers))
        })
    }

    /// Values that full recomputation repeats: all within a layer that values are derived from which the backward pass
    /// reads.
    fn repeated(&self) -> &[bool] {
        self.repeated.get_or_init(|| {
            let LayeredGraph { graph, layer_of, users, .. } = self;
            let mut repeated = vec![false; graph.len()];
            for v in graph.values().rev().filter(|v| layer_of[v.index()].is_some()) {
                let users = &users[v.index()];
                let leaves = users.iter().any(|u| layer_of[u.index()] != layer_of[v.index()]);
                repeated[v.index()] = !leaves && (self.saved()[v.index()] || users.iter().any(|u| repeated[u.index()]));
            }
            repeated
        })
    }

    /// The modules that repeat a value if the backward pass needs what they contain. A value that nothing saved derives
    /// from inside its module is in none.
    fn modules(&self) -> &[Modules] {
        self.modules.get_or_init(|| {
            let LayeredGraph { graph, layer_of, users, .. } = self;
            let mut found = modules(graph, layer_of, users);
            for v in graph.values().rev().filter(|v| !self.saved()[v.index()]) {
                let of_users = users[v.index()].iter().fold(Modules::NONE, |all, u| all.union(found[u.index()]));
                found[v.index()] = found[v.index()].intersection(of_users).without(Module::SecondProducts);
            }
            found
        })
    }

    /// Uses the saved values of the same model at another size.
    pub(crate) fn with_saved(self, saved: &Arc<Vec<bool>>) -> LayeredGraph {
        LayeredGraph { saved: OnceLock::from(saved.clone()), ..self }
    }

    /// Text of everything that the program of a layer that ends before node `end` depends on.
    fn fingerprint(&self, layer: &Layer, end: u32) -> String {
        use std::fmt::Write;
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
            if self.graph.is_frozen(p) {
                let _ = write!(text, "p{i}frozen");
            }
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

/// The layer of each node that does work on devices, given the starts of layers.
fn layers_of(graph: &Graph, starts: &[u32]) -> Vec<Option<u32>> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let layer = |v: ValueId| {
        let after = starts.partition_point(|&s| s <= v.0);
        (varies[v.index()] && !graph.node(v).op.is_leaf()).then(|| (after - 1) as u32)
    };
    graph.values().map(layer).collect()
}

/// Values of a model in layers that a backward pass reads and nothing recomputes. They are the same for every
/// microbatch size.
pub(crate) fn saved_between(graph: &Graph, starts: &[u32], readers: &[Vec<ValueId>]) -> Vec<bool> {
    saved(graph, &layers_of(graph, starts), &graph.users(), readers)
}

/// `readers` are [`gradient_readers`].
fn saved(graph: &Graph, layer_of: &[Option<u32>], users: &[Vec<ValueId>], readers: &[Vec<ValueId>]) -> Vec<bool> {
    let mut read: Vec<bool> = readers.iter().map(|readers| !readers.is_empty()).collect();
    read.resize(graph.len(), false);
    let recompute = &|_| Recompute::None;
    let repeats = Repeats {
        graph,
        layer_of,
        users,
        recompute,
        fused_attention: false,
        always: &[],
        selective: Modules::NONE,
        modules: &[],
    };
    let again = repeats.of(graph.values().filter(|v| layer_of[v.index()].is_some()));
    for v in again.iter().rev() {
        if std::mem::take(&mut read[v.index()]) {
            graph.node(*v).operands.iter().for_each(|o| read[o.index()] = true);
        }
    }
    read
}

/// The layers that start at all but the last of `starts`, where the last layer ends.
fn layers_between(graph: &Graph, layer_of: &[Option<u32>], starts: &[u32]) -> Vec<Layer> {
    let layer = |w: &[u32]| {
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
    };
    starts.windows(2).map(layer).collect()
}
