//! Grouped products.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Direction, GroupedDot, Op, Transpose};

/// The group of each of `rows` consecutive rows. `ends` (`[groups]`) has, for each group, the index after its last row.
/// Rows after all groups get the number of groups.
pub fn group_of_rows(g: &mut Graph, ends: ValueId, rows: u64) -> Built {
    let groups = *g.shape(ends).first().ok_or(ShapeError::DimOutOfRange { dim: 0, rank: 0 })?;
    let row = iota(g, &[rows, groups], 0, g.ty(ends).dtype)?;
    let behind = compare(g, Direction::Ge, row, ends)?;
    let behind = convert(g, behind, DType::I32)?;
    sum(g, behind, &[1], false)
}

/// `x[r] w[group[r]]` for rows `[rows.., K]` and matrices `[groups, K, N]`. If `w` is a transpose of matrices, the
/// product reads its operand instead.
pub fn grouped_dot(g: &mut Graph, x: ValueId, w: ValueId, group: ValueId) -> Built {
    let node = g.node(w);
    let transposed = matches!(&node.op, Op::Transpose(Transpose { permutation }) if *permutation == [0, 2, 1]);
    let (w, contract) = if transposed { (node.operands[0], 2) } else { (w, 1) };
    g.push(Op::GroupedDot(GroupedDot { contract, of: None }), &[x, w, group])
}
