//! Experts without a capacity, converted from the forms that frameworks write to one form.
//!
//! In this form, every token has a row for each of its experts, in the order of tokens. A row's expert is a number
//! beside it, and products are grouped by it ([`GroupedDot`](altiplano_ir::op::GroupedDot)):
//!
//! ```text
//! x      [tokens, hidden]            gate   [tokens, chosen]         expert [tokens, chosen]
//! rows   = x for each expert chosen  inner  = act(grouped_dot(rows, w_in, expert))
//! result = sum over chosen of gate * grouped_dot(inner, w_out, expert)
//! ```
//!
//! Its results are those of the export, except for the order of additions within a token. Tokens split like samples or
//! positions, hidden and inner sizes as in any product, and experts as partial sums. Its gradient consists of grouped
//! products again. Its cost is that of the products of the chosen experts.
//!
//! Nothing is sorted and nothing is dropped, so samples stay apart and a batch can be divided into microbatches. CPU
//! workers multiply all rows of an expert together.
//!
//! Frameworks sort rows by expert, multiply runs of rows, and restore the order of results (`unsort`). Or they look
//! up a matrix for each row, or mask rows for each expert (`products`). Or they loop over experts (`stacked`).

mod products;
mod stacked;
mod unsort;

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;

/// The graph with experts in the form above, if it has any. Leaves and outputs are those of the given graph.
pub fn recognise(graph: &Graph) -> Graph {
    // A graph with marked batch dimensions would lose its marks, and has constants for a certain batch.
    if graph.batch != 0 {
        return graph.clone();
    }
    let found = products::grouped(graph);
    let found = stacked::joined(found.as_ref().unwrap_or(graph)).or(found);
    let found = found.as_ref().unwrap_or(graph);
    let has_experts = found.nodes.iter().any(|n| matches!(n.op, Op::GroupedDot(_)));
    if has_experts { unsort::unsorted(found) } else { found.clone() }
}

/// The value before conversions between integers and reshapes.
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

/// The number that all elements of a value equal.
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

/// The dimension along which a value counts `0, 1, ..` while it is constant along all others.
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

/// The dimension of a reshaped tensor that corresponds to dimension `dim` of the original.
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
