//! Products that are equivalent to grouped ones: with a matrix looked up for each row, and over rows that a mask
//! assigns to groups.

use super::{counts_along, plain, splat};
use altiplano_ir::array::{self, Built, ShapeError};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Binary, Compare, Direction, DotGeneral, Op};
use altiplano_ir::simplify::without_dead_nodes;

/// The graph with such products grouped. `None` if there are none.
pub(crate) fn grouped(graph: &Graph) -> Option<Graph> {
    let mut to = Graph { name: graph.name.clone(), ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut any = false;
    for v in graph.values() {
        let node = graph.node(v);
        let operands: Vec<ValueId> = node.operands.iter().map(|o| map[o.index()]).collect();
        let before = to.len();
        let found = match &node.op {
            Op::DotGeneral(dot) => of_looked_up(&mut to, dot, operands[0], operands[1])
                .or_else(|| of_masked(&mut to, dot, operands[0], operands[1])),
            _ => None,
        };
        let found = found.filter(|f| *to.ty(*f) == node.ty);
        any |= found.is_some();
        if found.is_some() {
            to.nodes[before..].iter_mut().for_each(|n| n.name.clone_from(&node.name));
        }
        map.push(found.unwrap_or_else(|| to.append(Node { operands, ..node.clone() })));
    }
    if !any {
        return None;
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| Some(map[v.index()]));
    Some(without_dead_nodes(&to))
}

/// A product in which one side consists of matrices of a table, one for each index.
fn of_looked_up(g: &mut Graph, dot: &DotGeneral, lhs: ValueId, rhs: ValueId) -> Option<ValueId> {
    if let Some((w, index)) = looked_up(g, rhs) {
        return with_matrices(g, dot, [lhs, rhs], w, index).ok().flatten();
    }
    let (w, index) = looked_up(g, lhs)?;
    let swapped = DotGeneral {
        lhs_batch: dot.rhs_batch.clone(),
        rhs_batch: dot.lhs_batch.clone(),
        lhs_contract: dot.rhs_contract.clone(),
        rhs_contract: dot.lhs_contract.clone(),
    };
    let made = with_matrices(g, &swapped, [rhs, lhs], w, index).ok().flatten()?;
    // The free dimensions of the other side come last.
    let (batch, rank) = (dot.lhs_batch.len(), g.shape(made).len());
    let own = dot.rhs_free(g.shape(rhs).len()).len();
    let order: Vec<usize> = (0..batch).chain(batch + own..rank).chain(batch..batch + own).collect();
    array::permute(g, made, &order).ok()
}

/// The table `[groups, .., ..]` and the indices, if a value `[indices.., .., ..]` is a lookup of whole matrices. A
/// transpose after the lookup is moved to the table.
fn looked_up(g: &mut Graph, v: ValueId) -> Option<(ValueId, ValueId)> {
    let node = g.node(v);
    if let Op::Transpose(op) = &node.op {
        let rank = op.permutation.len();
        let swaps = rank > 2 && op.permutation[rank - 2..] == [rank - 1, rank - 2];
        if !swaps || op.permutation[..rank - 2].iter().enumerate().any(|(i, &p)| i != p) {
            return None;
        }
        let (w, index) = looked_up(g, node.operands[0])?;
        return Some((array::permute(g, w, &[0, 2, 1]).ok()?, index));
    }
    let Op::Gather(gather) = &node.op else { return None };
    let (w, index) = (node.operands[0], node.operands[1]);
    let (table, rank) = (g.shape(w), g.shape(v).len());
    let dims = &gather.dims;
    let whole = table.len() == 3 && dims.slice_sizes == [1, table[1], table[2]] && dims.start_index_map == [0];
    let last = rank >= 2 && dims.offset_dims == [rank - 2, rank - 1];
    let vector = dims.index_vector_dim == g.shape(index).len() || dims.index_vector_dim + 1 == g.shape(index).len();
    if !whole || !last || !vector || dims.collapsed_slice_dims != [0] || !dims.operand_batching_dims.is_empty() {
        return None;
    }
    let shape = g.shape(v)[..rank - 2].to_vec();
    Some((w, array::reshape(g, index, &shape).ok()?))
}

/// `lhs` times matrices `w[index]`. These have the dimensions of the index, followed by two of their own.
fn with_matrices(
    g: &mut Graph,
    dot: &DotGeneral,
    [lhs, rhs]: [ValueId; 2],
    w: ValueId,
    index: ValueId,
) -> Result<Option<ValueId>, ShapeError> {
    let (left, right) = (g.shape(lhs).to_vec(), g.shape(rhs).to_vec());
    let own = right.len() - 2;
    let (&[terms], &[of_lhs]) = (dot.rhs_contract.as_slice(), dot.lhs_contract.as_slice()) else { return Ok(None) };
    if terms < own || dot.rhs_batch.iter().any(|&d| d >= own) || own == 0 || !g.ty(lhs).dtype.is_float() {
        return Ok(None);
    }
    let columns = own + 1 - (terms - own);
    let free = dot.lhs_free(left.len());
    // Rows have the dimensions of the index, then the free ones of lhs.
    let along = |d: usize| dot.rhs_batch.iter().position(|&b| b == d).map(|i| dot.lhs_batch[i]);
    let mut from: Vec<usize> = (0..own).filter_map(along).collect();
    from.extend(&free);
    from.push(of_lhs);
    let x = array::permute(g, lhs, &from)?;
    let mut spread: Vec<u64> = (0..own).map(|d| along(d).map_or(1, |l| left[l])).collect();
    spread.extend(free.iter().map(|&d| left[d]).chain([left[of_lhs]]));
    let x = array::reshape(g, x, &spread)?;
    let rows: Vec<u64> = right[..own].iter().copied().chain(free.iter().map(|&d| left[d])).collect();
    let x = array::broadcast_to(g, x, &[rows.as_slice(), &[left[of_lhs]]].concat())?;
    let ones = [&right[..own], &vec![1; free.len()]].concat();
    let group = array::reshape(g, index, &ones)?;
    let group = array::broadcast_to(g, group, &rows)?;
    let w = if terms > columns { array::permute(g, w, &[0, 2, 1])? } else { w };
    let y = array::grouped_dot(g, x, w, group)?;
    // From index dimensions, free dimensions of lhs and columns, to batch, free dimensions of lhs, and those of rhs in
    // its order.
    let mut order: Vec<usize> = dot.rhs_batch.clone();
    order.extend(own..own + free.len());
    let rest = (0..right.len()).filter(|d| !dot.rhs_batch.contains(d) && *d != terms);
    order.extend(rest.map(|d| if d == columns { own + free.len() } else { d }));
    array::permute(g, y, &order).map(Some)
}

/// A product that also sums over groups, where a mask keeps each row in one of them:
/// `sum over g, k of x[r, k] mask[g, r] w[g, k, n]`.
fn of_masked(g: &mut Graph, dot: &DotGeneral, lhs: ValueId, rhs: ValueId) -> Option<ValueId> {
    if dot.lhs_contract.len() != 2 || !dot.lhs_batch.is_empty() || !g.ty(lhs).dtype.is_float() {
        return None;
    }
    let masked = masked_rows(g, lhs)?;
    let at = |dim: usize| dot.lhs_contract.iter().position(|&d| d == dim).map(|i| dot.rhs_contract[i]);
    let of_group = at(masked.group_dim)?;
    let term_dim = *dot.lhs_contract.iter().find(|d| **d != masked.group_dim)?;
    let (of_term, free) = (at(term_dim)?, dot.rhs_free(g.shape(rhs).len()));
    if g.shape(rhs).len() != 3 || free.len() != 1 {
        return None;
    }
    let built = |g: &mut Graph| -> Built {
        let w = array::permute(g, rhs, &[of_group, of_term, free[0]])?;
        // Rows without the dimension of groups, and with terms last.
        let rank = g.shape(lhs).len();
        let shape = g.shape(lhs).to_vec();
        let kept: Vec<usize> = (0..rank).filter(|&d| d != masked.group_dim && d != term_dim).collect();
        let own = |d: usize| if d > masked.group_dim { d - 1 } else { d };
        let order: Vec<usize> = kept.iter().map(|&d| own(d)).chain([own(term_dim)]).collect();
        let x = array::permute(g, masked.rows, &order)?;
        let rows: Vec<u64> = kept.iter().map(|&d| shape[d]).collect();
        let group = array::broadcast_to(g, masked.group, &rows)?;
        array::grouped_dot(g, x, w, group)
    };
    // There is one group for each index of the only row dimension, or of all of them.
    let rows = g.shape(lhs).len() - 2;
    (g.shape(masked.group).len() == rows).then(|| built(g).ok()).flatten()
}

struct Masked {
    rows: ValueId,
    group: ValueId,
    group_dim: usize,
}

/// The value that `v` repeats along one dimension, and that dimension.
fn repeated(g: &Graph, v: ValueId) -> Option<(ValueId, usize)> {
    let node = g.node(v);
    let Op::BroadcastInDim(op) = &node.op else { return None };
    let x = node.operands[0];
    let missing: Vec<usize> = (0..op.shape.len()).filter(|d| !op.dims.contains(d)).collect();
    let whole = op.dims.is_sorted() && op.dims.iter().zip(g.shape(x)).all(|(&d, &n)| op.shape[d] == n);
    match missing[..] {
        [dim] if whole => Some((x, dim)),
        _ => None,
    }
}

/// Rows that are repeated for each group and zero outside their own group.
fn masked_rows(g: &mut Graph, v: ValueId) -> Option<Masked> {
    let node = g.node(v).clone();
    let (mask, rows) = match (&node.op, node.operands.as_slice()) {
        (Op::Select(_), &[mask, rows, zero]) if splat(g, zero) == Some(0.0) => (mask, rows),
        (Op::Binary(Binary::Multiply), &[a, b]) => {
            let of = |v: ValueId| match &g.node(v).op {
                Op::Convert(_) => Some(g.node(v).operands[0]),
                _ => None,
            };
            match (of(a), of(b)) {
                (Some(mask), _) if is_bool(g, mask) => (mask, b),
                (_, Some(mask)) if is_bool(g, mask) => (mask, a),
                _ => return None,
            }
        }
        _ => return None,
    };
    let (rows, group_dim) = repeated(g, rows)?;
    let group = group_of_mask(g, mask, group_dim)?;
    Some(Masked { rows, group, group_dim })
}

fn is_bool(g: &Graph, v: ValueId) -> bool {
    g.ty(v).dtype == altiplano_ir::dtype::DType::Bool
}

/// The groups of the rows of a mask that is `group == g` along dimension `dim`. The last dimension is the terms. The
/// mask may also be written as `start[g] <= row < end[g]`.
fn group_of_mask(g: &mut Graph, mask: ValueId, dim: usize) -> Option<ValueId> {
    let node = g.node(mask).clone();
    match (&node.op, node.operands.as_slice()) {
        (Op::BroadcastInDim(op), &[x]) => {
            let from = op.dims.iter().position(|&d| d == dim)?;
            (g.shape(x)[from] == node.ty.shape[dim]).then(|| group_of_mask(g, x, from)).flatten()
        }
        (Op::Reshape(_), &[x]) => {
            let from = super::same_dim(&node.ty.shape, dim, g.shape(x))?;
            group_of_mask(g, x, from)
        }
        (Op::Compare(Compare { direction: Direction::Eq }), &[a, b]) => {
            let group = if counts_along(g, a) == Some(dim) { b } else { a };
            let numbers = if group == a { b } else { a };
            if counts_along(g, numbers) != Some(dim) {
                return None;
            }
            rows_alone(g, group)
        }
        (Op::Binary(Binary::And), &[a, b]) => {
            let (first, second) = (order(g, a)?, order(g, b)?);
            // `low <= row` and `row < high`.
            let ((low, row), (other, high)) = match (first.2, second.2) {
                (false, true) => ((first.0, first.1), (second.0, second.1)),
                (true, false) => ((second.0, second.1), (first.0, first.1)),
                _ => return None,
            };
            let along = counts_along(g, row)?;
            if counts_along(g, other) != Some(along) || along == dim {
                return None;
            }
            let (low, high) = (vector_along(g, low, dim)?, vector_along(g, high, dim)?);
            if !is_moved_by_one(g, low, high) {
                return None;
            }
            let rows = node.ty.shape[along];
            array::group_of_rows(g, high, rows).ok()
        }
        _ => None,
    }
}

/// `(less, greater, strict)` of a comparison.
fn order(g: &Graph, v: ValueId) -> Option<(ValueId, ValueId, bool)> {
    let node = g.node(v);
    let (Op::Compare(Compare { direction }), &[a, b]) = (&node.op, node.operands.as_slice()) else { return None };
    match direction {
        Direction::Le => Some((a, b, false)),
        Direction::Lt => Some((a, b, true)),
        Direction::Ge => Some((b, a, false)),
        Direction::Gt => Some((b, a, true)),
        _ => None,
    }
}

/// The vector that a value repeats along all dimensions but one.
fn vector_along(g: &Graph, v: ValueId, dim: usize) -> Option<ValueId> {
    let node = g.node(v);
    match &node.op {
        Op::BroadcastInDim(op) => {
            let from = op.dims.iter().position(|&d| d == dim)?;
            let x = node.operands[0];
            (g.shape(x)[from] == node.ty.shape[dim]).then(|| vector_along(g, x, from)).flatten()
        }
        Op::Reshape(_) => {
            let x = node.operands[0];
            vector_along(g, x, super::same_dim(&node.ty.shape, dim, g.shape(x))?)
        }
        _ => (g.shape(v).len() == 1).then_some(v),
    }
}

/// The value before it is repeated, with row dimensions only.
fn rows_alone(g: &Graph, v: ValueId) -> Option<ValueId> {
    let node = g.node(v);
    match &node.op {
        Op::BroadcastInDim(_) | Op::Reshape(_) => rows_alone(g, node.operands[0]),
        _ => Some(v),
    }
}

/// Returns true if `low` is zero followed by `high` without its last element.
fn is_moved_by_one(g: &Graph, low: ValueId, high: ValueId) -> bool {
    let node = g.node(low);
    let (Op::Concatenate(_), &[first, rest]) = (&node.op, node.operands.as_slice()) else { return false };
    let Op::Slice(slice) = &g.node(rest).op else { return false };
    let from = g.node(rest).operands[0];
    let whole = g.shape(high).first().copied().unwrap_or(0);
    let zero = match &g.node(first).op {
        Op::Slice(_) => splat(g, g.node(first).operands[0]),
        _ => splat(g, first),
    };
    plain(g, from) == plain(g, high)
        && zero == Some(0.0)
        && g.shape(first) == [1]
        && slice.start == [0]
        && slice.stride == [1]
        && slice.limit == [whole.saturating_sub(1)]
}
