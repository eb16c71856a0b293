//! Regions: runs of nodes between two places that only one value crosses, which also bypasses a matmul. This is the
//! residual stream between the blocks of a transformer.

use super::egraph::{Builder, Leaf};
use super::extract::extract;
use super::facts::Facts;
use super::rules::saturate;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::types::TensorType;
use std::collections::BTreeSet;
use std::fmt::Write;

/// The largest number of nodes in a region. Longer runs are cut where few values cross.
const MAX_NODES: usize = 800;

/// The number of matmuls beyond which a live value serves more than a block.
const LONG_SPAN: usize = 16;

/// Nodes that are rewritten together, and their surroundings.
pub(crate) struct Region {
    /// The nodes in order. Each depends on a leaf of the graph.
    pub nodes: Vec<ValueId>,
    /// Values from outside, and kept values inside, which their users treat as if they came from outside.
    pub leaves: Vec<ValueId>,
    /// Values with uses outside the region.
    pub outputs: Vec<ValueId>,
    /// Values inside that stay unchanged.
    kept: Vec<ValueId>,
}

/// A rewritten region. Nodes come after their children.
pub(crate) struct Rewritten {
    pub nodes: Vec<New>,
    pub outputs: Vec<Child>,
}

/// A node of a rewritten region.
pub(crate) struct New {
    pub op: Op,
    pub children: Vec<Child>,
    pub ty: TensorType,
    pub batch_dims: u32,
    /// The node of the region that this node takes its name from.
    pub name: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Child {
    Leaf(usize),
    Node(usize),
}

/// Cuts a graph into regions, in order.
pub(crate) fn regions(graph: &Graph, facts: &Facts, kept: impl Fn(ValueId) -> bool) -> Vec<Region> {
    let work: Vec<ValueId> = graph.values().filter(|&v| !facts.is_constant(v) && !graph.node(v).op.is_leaf()).collect();
    let users = graph.users();
    let place = |v: ValueId| work.partition_point(|w| *w < v);
    let contractions: Vec<usize> = work
        .iter()
        .scan(0, |before, &v| {
            *before += usize::from(graph.node(v).op.is_contraction());
            Some(*before)
        })
        .collect();
    // A value that is made before place `i` and used after it crosses that place. Values for the whole model (a mask,
    // positions, an encoder's results) cross everywhere, so they say nothing about where a block ends.
    let mut crossing = vec![0i64; work.len() + 1];
    for (i, &v) in work.iter().enumerate() {
        let last = users[v.index()].iter().map(|&u| place(u)).max().unwrap_or(i);
        let last = if graph.outputs.contains(&v) { work.len() } else { last };
        let spans = contractions.get(last).or(contractions.last()).map_or(0, |c| c - contractions[i]);
        if last > i && spans <= LONG_SPAN {
            crossing[i] += 1;
            crossing[last] -= 1;
        }
    }
    let mut now = 0;
    for c in &mut crossing {
        now += *c;
        *c = now;
    }
    // A value that bypasses a matmul is not part of that matmul's chain. The residual stream is an example.
    let mut cuts = vec![0];
    for (i, v) in work.iter().enumerate() {
        let last = users[v.index()].iter().map(|&u| place(u)).max().unwrap_or(i).min(work.len() - 1);
        let passes = last > i + 1 && contractions[last - 1] > contractions[i];
        if crossing[i] <= 1 && users[v.index()].len() > 1 && passes {
            cuts.push(i + 1);
        }
    }
    cuts.push(work.len());
    cuts.dedup();
    // Cut a region that is too long where the fewest values cross in its second half.
    let mut at = 0;
    while at + 1 < cuts.len() {
        let (from, to) = (cuts[at], cuts[at + 1]);
        if to - from > MAX_NODES {
            let best = (from + MAX_NODES / 2..from + MAX_NODES).min_by_key(|&i| (crossing[i], i)).unwrap_or(from);
            cuts.insert(at + 1, best + 1);
        }
        at += 1;
    }
    let region = |window: &[usize]| Region::new(graph, &users, work[window[0]..window[1]].to_vec(), &kept);
    cuts.windows(2).filter(|w| w[0] < w[1]).map(region).collect()
}

impl Region {
    fn new(graph: &Graph, users: &[Vec<ValueId>], nodes: Vec<ValueId>, kept: &impl Fn(ValueId) -> bool) -> Region {
        let inside: BTreeSet<ValueId> = nodes.iter().copied().collect();
        let kept: Vec<ValueId> = nodes.iter().copied().filter(|&v| kept(v)).collect();
        let mut leaves: Vec<ValueId> = Vec::new();
        for &o in nodes.iter().flat_map(|&v| &graph.node(v).operands) {
            let outside = !inside.contains(&o);
            let source = if outside { source(graph, o) } else { o };
            if (outside || kept.contains(&o)) && !is_number(graph, source) && !leaves.contains(&source) {
                leaves.push(source);
            }
        }
        // Values used outside, and the values that they repeat or reshape: see [`source`].
        let mut used: BTreeSet<ValueId> = BTreeSet::new();
        for &v in nodes.iter().rev() {
            let outside = |u: &ValueId| !inside.contains(u) || used.contains(u) && is_view(graph, *u);
            if users[v.index()].iter().any(outside) || graph.outputs.contains(&v) || kept.contains(&v) {
                used.insert(v);
            }
        }
        let outputs = used.into_iter().collect();
        Region { nodes, leaves, outputs, kept }
    }

    pub(crate) fn last(&self) -> ValueId {
        self.nodes[self.nodes.len() - 1]
    }

    /// Everything that the rewriting depends on.
    pub(crate) fn fingerprint(&self, graph: &Graph, facts: &Facts) -> String {
        let mut text = String::new();
        for &v in &self.leaves {
            let _ = write!(text, "{} {} {:?};", graph.ty(v), graph.node(v).batch_dims, facts.of(v));
        }
        for &v in &self.nodes {
            let node = graph.node(v);
            let _ = write!(text, "{:?} {} {}(", node.op, node.ty, node.batch_dims);
            for &o in &node.operands {
                self.write_operand(graph, facts, o, &mut text);
            }
            text.push(if self.outputs.contains(&v) { '!' } else { ')' });
        }
        text
    }

    fn write_operand(&self, graph: &Graph, facts: &Facts, o: ValueId, text: &mut String) {
        let _ = match (self.leaves.iter().position(|l| *l == o), self.nodes.binary_search(&o)) {
            (Some(i), _) => write!(text, "l{i},"),
            (None, Ok(i)) => write!(text, "{i},"),
            (None, Err(_)) => {
                let node = graph.node(o);
                node.operands.iter().for_each(|&inner| self.write_operand(graph, facts, inner, text));
                write!(text, "{:?} {} {:?},", node.op, node.batch_dims, facts.of(o))
            }
        };
    }

    /// The class of an operand: a leaf, an earlier node, or a value outside that is computed from leaves and numbers.
    fn operand(&self, graph: &Graph, facts: &Facts, builder: &mut Builder, classes: &Classes, o: ValueId) -> egg::Id {
        match (self.leaves.iter().position(|l| *l == o), self.nodes.binary_search(&o)) {
            (Some(leaf), _) => classes.leaves[leaf],
            (None, Ok(at)) => classes.nodes[at],
            (None, Err(_)) => {
                let node = graph.node(o);
                let operands: Vec<egg::Id> =
                    node.operands.iter().map(|&i| self.operand(graph, facts, builder, classes, i)).collect();
                builder.original(node, &operands, None, facts.of(o))
            }
        }
    }

    pub(crate) fn rewrite(&self, graph: &Graph, facts: &Facts) -> Rewritten {
        let mut builder = Builder::new();
        let leaf = |&v: &ValueId| Leaf {
            ty: graph.ty(v).clone(),
            batch_dims: graph.node(v).batch_dims,
            fact: facts.of(v).cloned(),
        };
        let leaves = self.leaves.iter().map(|v| builder.leaf(leaf(v))).collect();
        let mut classes = Classes { leaves, nodes: Vec::with_capacity(self.nodes.len()) };
        for (i, &v) in self.nodes.iter().enumerate() {
            let node = graph.node(v);
            let operands: Vec<egg::Id> =
                node.operands.iter().map(|&o| self.operand(graph, facts, &mut builder, &classes, o)).collect();
            classes.nodes.push(builder.original(node, &operands, Some(i), None));
        }
        saturate(&mut builder, self.nodes.len());
        let outputs: Vec<egg::Id> =
            self.outputs.iter().filter_map(|v| self.nodes.binary_search(v).ok()).map(|i| classes.nodes[i]).collect();
        // A kept value is computed by its own node. Only its users see it as a leaf.
        debug_assert!(self.kept.iter().all(|v| self.outputs.contains(v)));
        extract(&builder, &outputs)
    }
}

/// The classes of a region's leaves, and of its nodes so far.
struct Classes {
    leaves: Vec<egg::Id>,
    nodes: Vec<egg::Id>,
}

/// The value that an outside value repeats or reshapes. Rules may need its original form.
fn source(graph: &Graph, mut v: ValueId) -> ValueId {
    while is_view(graph, v) {
        v = graph.node(v).operands[0];
    }
    v
}

fn is_view(graph: &Graph, v: ValueId) -> bool {
    matches!(graph.node(v).op, Op::BroadcastInDim(_) | Op::Reshape(_))
}

/// Returns true for a splat constant, which is written anew at every use.
fn is_number(graph: &Graph, v: ValueId) -> bool {
    matches!(&graph.node(v).op, Op::Constant(literal) if literal.as_splat().is_some())
}
