//! Grouped products.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Direction, GroupedDot, Op, Transpose};

/// The number of the group that each of `rows` consecutive rows belongs to: `ends` (`[groups]`) has the row behind the last of each.
/// Rows behind all groups have the number of groups.
pub fn group_of_rows(g: &mut Graph, ends: ValueId, rows: u64) -> Built {
    let groups = *g.shape(ends).first().ok_or(ShapeError::DimOutOfRange { dim: 0, rank: 0 })?;
    let row = iota(g, &[rows, groups], 0, g.ty(ends).dtype)?;
    let behind = compare(g, Direction::Ge, row, ends)?;
    let behind = convert(g, behind, DType::I32)?;
    sum(g, behind, &[1], false)
}

/// `x[r] w[group[r]]` for rows `[rows.., K]` and matrices `[groups, K, N]`. Matrices that are transposed ones are taken as they were.
pub fn grouped_dot(g: &mut Graph, x: ValueId, w: ValueId, group: ValueId) -> Built {
    let node = g.node(w);
    let transposed = matches!(&node.op, Op::Transpose(Transpose { permutation }) if *permutation == [0, 2, 1]);
    let (w, contract) = if transposed { (node.operands[0], 2) } else { (w, 1) };
    g.push(Op::GroupedDot(GroupedDot { contract, of: None }), &[x, w, group])
}
