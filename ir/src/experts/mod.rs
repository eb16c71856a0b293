//! Experts without a capacity, as frameworks write them, brought to one form.
//!
//! The form: every token has a row for each expert that it goes to, in the order of tokens; a row's expert is a number
//! beside it, and products are grouped by it ([`GroupedDot`](crate::op::GroupedDot)). So
//!
//! ```text
//! x      [tokens, hidden]            gate   [tokens, chosen]         expert [tokens, chosen]
//! rows   = x for each expert chosen  inner  = act(grouped_dot(rows, w_in, expert))
//! result = sum over chosen of gate * grouped_dot(inner, w_out, expert)
//! ```
//!
//! What it means: the numbers of the export, but for the order of additions within a token. How it splits: tokens as samples
//! or positions, hidden and inner sizes as in any product, experts as partial sums. Its gradient is made of grouped products
//! again. It costs the products of the experts that are chosen; nothing is sorted and nothing is dropped, so samples are
//! apart and a batch can be cut into microbatches. CPU workers multiply the rows of each expert at once.
//!
//! Frameworks sort rows by expert, multiply runs of rows, and put the results back ([`unsort`]); they look up a matrix for
//! each row, or mask rows for each expert ([`products`]); or they go over experts in a loop ([`stacked`]).

mod products;
mod stacked;
mod unsort;

use crate::graph::{Graph, ValueId};
use crate::op::Op;

/// The graph with experts in the form above, where it has any. It has the leaves and outputs of the given one.
pub fn recognise(graph: &Graph) -> Graph {
    // What is marked already would lose its marks, and numbers a batch for which it was made.
    if graph.batch != 0 {
        return graph.clone();
    }
    let found = products::grouped(graph);
    let found = stacked::joined(found.as_ref().unwrap_or(graph)).or(found);
    let found = found.as_ref().unwrap_or(graph);
    let has_experts = found.nodes.iter().any(|n| matches!(n.op, Op::GroupedDot(_)));
    if has_experts { unsort::unsorted(found) } else { found.clone() }
}

/// The value behind conversions between integers and reshapes.
fn plain(graph: &Graph, mut v: ValueId) -> ValueId {
    loop {
        let node = graph.node(v);
        let same_order = match &node.op {
            Op::Reshape(_) => true,
            Op::Convert(_) => {
                let from = graph.ty(node.operands[0]).dtype;
                from == node.ty.dtype || from.is_integer()
            }
            Op::BroadcastInDim(op) => {
                graph.ty(node.operands[0]).elements() == node.ty.elements() && op.dims.is_sorted()
            }
            _ => false,
        };
        if !same_order {
            return v;
        }
        v = node.operands[0];
    }
}

/// The number that all elements of a value are.
fn splat(graph: &Graph, mut v: ValueId) -> Option<f64> {
    loop {
        let node = graph.node(v);
        match &node.op {
            Op::Constant(literal) => return literal.as_splat(),
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Convert(_) => v = node.operands[0],
            _ => return None,
        }
    }
}

/// The dimension along which a value counts `0, 1, ..`, being the same along all others.
fn counts_along(graph: &Graph, v: ValueId) -> Option<usize> {
    let node = graph.node(v);
    match &node.op {
        Op::Iota(op) => Some(op.dim),
        Op::Convert(_) => counts_along(graph, node.operands[0]),
        Op::BroadcastInDim(op) => {
            let dim = counts_along(graph, node.operands[0])?;
            let to = *op.dims.get(dim)?;
            (graph.shape(node.operands[0])[dim] == node.ty.shape[to]).then_some(to)
        }
        Op::Reshape(_) => {
            let from = node.operands[0];
            let dim = counts_along(graph, from)?;
            same_dim(graph.shape(from), dim, &node.ty.shape)
        }
        _ => None,
    }
}

/// The dimension of a reshaped tensor that is dimension `dim` of it as it was.
fn same_dim(from: &[u64], dim: usize, to: &[u64]) -> Option<usize> {
    let (before, size): (u64, u64) = (from[..dim].iter().product(), from[dim]);
    let mut product = 1;
    for (d, &n) in to.iter().enumerate() {
        if product == before && n == size {
            return Some(d);
        }
        product *= n;
    }
    None
}

#[cfg(test)]
mod tests;
