//! What the numbers of an input may be. Of integers how large: the rows of the tables that it indexes. Found in the graph, so that made-up
//! batches mean something and wrong data is refused instead of clamped.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op, Unary};
use std::collections::BTreeSet;

/// A dimension that an input's values index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// What is indexed: a parameter's name, else the value.
    pub table: String,
    pub rows: u64,
}

/// The smallest dimension that the values of a leaf index, through a lookup or by comparison with a count (a one-hot).
pub fn bound(graph: &Graph, leaf: ValueId) -> Option<Bound> {
    let users = graph.users();
    let mut best: Option<Bound> = None;
    let mut consider = |bound: Bound| {
        if best.as_ref().is_none_or(|b| bound.rows < b.rows) {
            best = Some(bound);
        }
    };
    // Values that hold the leaf's, and the position in an index vector that these have taken.
    let mut pending = vec![(leaf, 0usize)];
    let mut seen = BTreeSet::new();
    while let Some((value, component)) = pending.pop() {
        if !seen.insert((value, component)) {
            continue;
        }
        for &user in &users[value.index()] {
            let node = graph.node(user);
            let position = node.operands.iter().position(|&o| o == value).unwrap_or(0);
            match &node.op {
                Op::Gather(gather) if position == 1 => {
                    let table = node.operands[0];
                    if let Some(&dim) = gather.dims.start_index_map.get(component) {
                        consider(Bound { table: name(graph, table), rows: graph.shape(table)[dim] });
                    }
                }
                Op::Compare(_) => {
                    if let Some(rows) = counted(graph, node.operands[1 - position]) {
                        consider(Bound { table: user.to_string(), rows });
                    }
                }
                Op::Concatenate(concatenate) => {
                    let before = &node.operands[..position];
                    let offset: u64 = before.iter().map(|&o| graph.shape(o)[concatenate.dim]).sum();
                    pending.push((user, component + offset as usize));
                }
                Op::Select(_) if position > 0 => pending.push((user, component)),
                Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Transpose(_) | Op::Slice(_) => {
                    pending.push((user, component));
                }
                _ => {}
            }
        }
    }
    best
}

/// Whether a root is drawn of an input, alone or with a number added, as of a variance: it is made up without negative
/// numbers then.
pub fn is_under_root(graph: &Graph, leaf: ValueId) -> bool {
    let users = graph.users();
    let mut pending = vec![leaf];
    while let Some(value) = pending.pop() {
        for &user in &users[value.index()] {
            let node = graph.node(user);
            let constant = |o: &ValueId| *o == value || matches!(graph.node(*o).op, Op::Constant(_));
            match &node.op {
                Op::Unary(Unary::Sqrt | Unary::Rsqrt) => return true,
                Op::Binary(Binary::Add) if node.operands.iter().all(constant) => pending.push(user),
                Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_) => pending.push(user),
                _ => {}
            }
        }
    }
    false
}

/// The size that a value counts up to, where it is an iota in other clothes.
fn counted(graph: &Graph, value: ValueId) -> Option<u64> {
    match &graph.node(value).op {
        Op::Iota(iota) => Some(iota.ty.shape[iota.dim]),
        Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Transpose(_) => {
            counted(graph, graph.node(value).operands[0])
        }
        _ => None,
    }
}

fn name(graph: &Graph, value: ValueId) -> String {
    match &graph.node(value).op {
        Op::Parameter(p) => format!("'{}'", p.name),
        Op::Convert(_) => name(graph, graph.node(value).operands[0]),
        _ => value.to_string(),
    }
}
