//! Ops that move elements, and scalings. The rules cancel them, merge them, or move them next to their like.

use super::super::egraph::Builder;
use super::super::facts::Fact;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Binary, DotGeneral, Function, Op, Reducer, Slice, Unary};
use egg::Id;

/// `(x, permutation)` if the class is a transpose of `x`.
pub(crate) fn transposes(b: &Builder, id: Id) -> Vec<(Id, Vec<usize>)> {
    b.find(id, |op, c| match op {
        Op::Transpose(t) => Some((c[0], t.permutation.clone())),
        _ => None,
    })
}

fn reshapes(b: &Builder, id: Id) -> Vec<Id> {
    b.find(id, |op, c| matches!(op, Op::Reshape(_)).then(|| c[0]))
}

pub(crate) fn broadcasts(b: &Builder, id: Id) -> Vec<(Id, Vec<usize>)> {
    b.find(id, |op, c| match op {
        Op::BroadcastInDim(op) => Some((c[0], op.dims.clone())),
        _ => None,
    })
}

pub(crate) fn transpose_of_transpose(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, outer) in transposes(b, id) {
        for (y, inner) in transposes(b, x) {
            let both: Vec<usize> = outer.iter().map(|&d| inner[d]).collect();
            found.extend(b.transpose(y, &both));
        }
    }
    found
}

/// A transpose of merged dimensions is a transpose of the original dimensions.
pub(crate) fn transpose_of_merged(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    let mut found = Vec::new();
    for y in reshapes(b, id).into_iter().chain([id]) {
        for (merged, permutation) in transposes(b, y) {
            for x in reshapes(b, merged) {
                let Some(groups) = merges(&b.shape(x), &b.shape(merged)) else { continue };
                let order: Vec<usize> = permutation.iter().flat_map(|&d| groups[d].clone()).collect();
                let moved = b.transpose(x, &order);
                found.extend(moved.and_then(|moved| b.reshape(moved, &shape)));
            }
        }
    }
    found
}

/// For each dimension of `to`, the consecutive dimensions of `from` that it merges. Dimensions of size 1 stay with the
/// next.
fn merges(from: &[u64], to: &[u64]) -> Option<Vec<std::ops::Range<usize>>> {
    let mut groups = Vec::with_capacity(to.len());
    let mut at = 0;
    for (i, &size) in to.iter().enumerate() {
        let start = at;
        let mut product = 1;
        while product < size && at < from.len() {
            product *= from[at];
            at += 1;
        }
        if product != size {
            return None;
        }
        if i + 1 == to.len() {
            while at < from.len() && from[at] == 1 {
                at += 1;
            }
        }
        groups.push(start..at);
    }
    (at == from.len()).then_some(groups)
}

/// Unmerges the rows of a matmul: `reshape(x w)` is `reshape(x) w`.
pub(crate) fn reshape_of_dot(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    let mut found = Vec::new();
    for y in reshapes(b, id) {
        let dots = b.find(y, |op, c| match op {
            Op::DotGeneral(dot) => Some((dot.clone(), c[0], c[1])),
            _ => None,
        });
        for (dot, lhs, rhs) in dots {
            let (left, right) = (b.shape(lhs), b.shape(rhs));
            let (rows, inner) = match (left.len(), &dot.lhs_contract[..], dot.lhs_batch.is_empty()) {
                (2, &[1], true) => (left[0], left[1]),
                _ => continue,
            };
            let columns: Vec<u64> = dot.rhs_free(right.len()).into_iter().map(|d| right[d]).collect();
            let Some(split) = shape.len().checked_sub(columns.len()) else { continue };
            if shape[split..] != columns[..] || shape[..split].iter().product::<u64>() != rows || split < 2 {
                continue;
            }
            let whole = [&shape[..split], &[inner]].concat();
            if let Some(lhs) = b.reshape(lhs, &whole) {
                let dot = DotGeneral { lhs_contract: vec![split], ..dot };
                found.extend(b.add(Op::DotGeneral(dot), &[lhs, rhs]));
            }
        }
    }
    found
}

/// Moves a reshape before an elementwise op, where it may meet another reshape or a matmul. A vector that is repeated
/// along the split dimensions is repeated along their parts.
pub(crate) fn reshape_of_elementwise(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    let mut found = Vec::new();
    for y in reshapes(b, id) {
        let merged = b.shape(y);
        let Some(groups) = merges(&shape, &merged) else { continue };
        for (op, operands) in elementwise(b, y) {
            let meets = |op: &Op, _: &[Id]| matches!(op, Op::Reshape(_) | Op::DotGeneral(_)).then_some(());
            if !operands.iter().any(|&o| !b.find(o, meets).is_empty()) {
                continue;
            }
            let mut moved = Vec::with_capacity(operands.len());
            for &o in &operands {
                let repeated = broadcasts(b, o).into_iter().find_map(|(x, dims)| {
                    let whole = |&d: &usize| groups[d].len() == 1;
                    dims.iter().all(whole).then(|| (x, dims.iter().map(|&d| groups[d].start).collect::<Vec<_>>()))
                });
                moved.extend(match (b.number(o), repeated) {
                    (Some(_), _) => None,
                    (None, Some((x, dims))) => b.broadcast(x, id, &dims),
                    (None, None) => b.reshape(o, &shape),
                });
            }
            // Numbers take the shape of the reshaped operands.
            let Some(&like) = moved.first() else { continue };
            let mut moved = moved.into_iter();
            let operands: Option<Vec<Id>> = operands
                .iter()
                .map(|&o| match b.number(o) {
                    Some(n) => Some(b.filled(like, b.ty(o).dtype, n)),
                    None => moved.next(),
                })
                .collect();
            found.extend(operands.and_then(|operands| b.add(op, &operands)));
        }
    }
    found
}

/// A transpose of a broadcast is a broadcast of a transpose.
pub(crate) fn transpose_of_broadcast(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, permutation) in transposes(b, id) {
        for (y, dims) in broadcasts(b, x) {
            let to: Vec<usize> = dims.iter().filter_map(|d| permutation.iter().position(|p| p == d)).collect();
            let mut order: Vec<usize> = (0..to.len()).collect();
            order.sort_by_key(|&i| to[i]);
            let sorted: Vec<usize> = order.iter().map(|&i| to[i]).collect();
            let moved = b.transpose(y, &order);
            found.extend(moved.and_then(|moved| b.broadcast(moved, id, &sorted)));
        }
    }
    found
}

/// Moving dimensions of size 1 moves no element. A batch of one sample is excepted, since other batches have more.
pub(crate) fn transpose_of_ones(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, permutation) in transposes(b, id) {
        let (shape, marks) = (b.shape(x), b.data(x).batch_dims);
        if permutation.iter().filter(|&&d| shape[d] != 1 || marks >> d & 1 == 1).is_sorted() {
            let to = b.shape(id);
            found.extend(b.reshape(x, &to));
        }
    }
    found
}

pub(crate) fn reshape_of_reshape(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    let mut found = Vec::new();
    for x in reshapes(b, id) {
        for y in reshapes(b, x).into_iter().chain([x]) {
            if !b.same(y, x) || b.shape(x) == shape {
                found.extend(b.reshape(y, &shape));
            }
        }
    }
    found
}

/// A broadcast that only adds dimensions of size 1 is a reshape.
pub(crate) fn broadcast_of_ones(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    let mut found = Vec::new();
    for (x, dims) in broadcasts(b, id) {
        if b.ty(x).elements() == b.ty(id).elements() && dims.is_sorted() {
            found.extend(b.reshape(x, &shape));
        }
    }
    found
}

/// A broadcast of a broadcast, or of a value that only gained dimensions of size 1, is a single broadcast.
pub(crate) fn broadcast_of_broadcast(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, outer) in broadcasts(b, id) {
        for (y, inner) in broadcasts(b, x) {
            let both: Vec<usize> = inner.iter().map(|&d| outer[d]).collect();
            found.extend(b.broadcast(y, id, &both));
        }
        for y in b.unsqueezed(x).into_iter().skip(1) {
            // Dimensions larger than 1 come in the same order on both sides.
            let (from, to) = (b.shape(y), b.shape(x));
            let mut kept = (0..to.len()).filter(|&d| to[d] != 1).map(|d| outer[d]);
            let ones: Vec<usize> = (0..to.len()).filter(|&d| to[d] == 1).map(|d| outer[d]).collect();
            let mut ones = ones.into_iter();
            let dims: Option<Vec<usize>> =
                from.iter().map(|&s| if s == 1 { ones.next() } else { kept.next() }).collect();
            match dims {
                Some(dims) => found.extend(b.broadcast(y, id, &dims)),
                None => {
                    // There are more dimensions of size 1 than on the other side, so drop them all.
                    let bare: Vec<u64> = from.iter().copied().filter(|&s| s != 1).collect();
                    let dims: Vec<usize> = (0..to.len()).filter(|&d| to[d] != 1).map(|d| outer[d]).collect();
                    let y = b.reshape(y, &bare);
                    found.extend(y.and_then(|y| b.broadcast(y, id, &dims)));
                }
            }
        }
    }
    found
}

/// The elementwise ops of a class, with their operands.
fn elementwise(b: &Builder, id: Id) -> Vec<(Op, Vec<Id>)> {
    let of = |op: &Op, c: &[Id]| {
        matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Convert(_)).then(|| (op.clone(), c.to_vec()))
    };
    b.find(id, of)
}

/// The op applied to the sources of its operands. Each operand must be a number or have a source with the same key.
fn on_sources<K: PartialEq + Clone>(
    b: &mut Builder,
    op: &Op,
    operands: &[Id],
    source: impl Fn(&Builder, Id) -> Vec<(Id, K)>,
) -> Option<(Id, K)> {
    let first = operands.iter().find(|&&o| b.number(o).is_none())?;
    for (x, key) in source(b, *first) {
        let shape = b.shape(x);
        let mut sources = Vec::with_capacity(operands.len());
        for &o in operands {
            let dtype = b.ty(o).dtype;
            let of = source(b, o).into_iter().find(|(y, k)| *k == key && b.shape(*y) == shape);
            match (b.number(o), of) {
                (Some(n), _) => sources.push(b.filled(x, dtype, n)),
                (None, Some((y, _))) => sources.push(y),
                (None, None) => break,
            }
        }
        if sources.len() == operands.len()
            && let Some(result) = b.add(op.clone(), &sources)
        {
            return Some((result, key));
        }
    }
    None
}

/// An op on operands that are repeated alike repeats its result on the originals.
pub(crate) fn elementwise_of_broadcasts(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (op, operands) in elementwise(b, id) {
        if let Some((result, dims)) = on_sources(b, &op, &operands, broadcasts) {
            found.extend(b.broadcast(result, id, &dims));
        }
    }
    found
}

/// Adds dimensions of size 1 after an elementwise op rather than before it.
pub(crate) fn elementwise_of_reshapes(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    if !shape.contains(&1) {
        return Vec::new();
    }
    let source = |b: &Builder, x: Id| {
        let fewer = |y: &Id| b.shape(*y).len() < b.shape(x).len();
        b.unsqueezed(x).into_iter().skip(1).filter(fewer).map(|y| (y, ())).collect()
    };
    let mut found = Vec::new();
    for (op, operands) in elementwise(b, id) {
        if let Some((result, ())) = on_sources(b, &op, &operands, source) {
            found.extend(b.reshape(result, &shape));
        }
    }
    found
}

/// Moves a transpose before an op of one value, where it may meet another transpose.
pub(crate) fn transpose_of_elementwise(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, permutation) in transposes(b, id) {
        for (op, operands) in elementwise(b, x) {
            let values: Vec<Id> = operands.iter().copied().filter(|&o| b.number(o).is_none()).collect();
            let [value] = values[..] else { continue };
            // This helps only if it meets another transpose, or an op that lets it pass.
            let passes = |op: &Op, _: &[Id]| match op {
                Op::Composite(f) => matches!(f.function, Function::Rotary { .. }).then_some(()),
                _ => None,
            };
            if transposes(b, value).is_empty() && b.find(value, passes).is_empty() {
                continue;
            }
            let Some(moved) = b.transpose(value, &permutation) else { continue };
            let operand = |&o: &Id| match b.number(o) {
                Some(n) => b.filled(moved, b.ty(o).dtype, n),
                None => moved,
            };
            let operands: Vec<Id> = operands.iter().map(operand).collect();
            found.extend(b.add(op, &operands));
        }
    }
    found
}

/// A conversion to a wider float type has no effect if another conversion follows it.
pub(crate) fn convert_of_convert(b: &mut Builder, id: Id) -> Vec<Id> {
    let converts = |b: &Builder, id: Id| b.find(id, |op, c| matches!(op, Op::Convert(_)).then(|| c[0]));
    let holds = |wide: DType, narrow: DType| match (wide.float_format(), narrow.float_format()) {
        (Some(_), Some(_)) => {
            wide == narrow || wide == DType::F64 || wide == DType::F32 && (narrow.is_half() || narrow.bytes() == 1)
        }
        _ => false,
    };
    let mut found = Vec::new();
    for x in converts(b, id) {
        for y in converts(b, x) {
            if holds(b.ty(x).dtype, b.ty(y).dtype) {
                let dtype = b.ty(id).dtype;
                found.extend(b.convert(y, dtype));
            }
        }
    }
    found
}

/// A matmul can read transposed operands directly if the free dimensions keep their order.
pub(crate) fn dot_of_transpose(b: &mut Builder, id: Id) -> Vec<Id> {
    let dots = b.find(id, |op, c| match op {
        Op::DotGeneral(dot) => Some((dot.clone(), c[0], c[1])),
        _ => None,
    });
    let mut found = Vec::new();
    for (dot, lhs, rhs) in dots {
        let through = |dims: &[usize], permutation: &[usize]| dims.iter().map(|&d| permutation[d]).collect::<Vec<_>>();
        for (x, permutation) in transposes(b, lhs) {
            if through(&dot.lhs_free(permutation.len()), &permutation).is_sorted() {
                let lhs_batch = through(&dot.lhs_batch, &permutation);
                let lhs_contract = through(&dot.lhs_contract, &permutation);
                found.extend(b.add(Op::DotGeneral(DotGeneral { lhs_batch, lhs_contract, ..dot.clone() }), &[x, rhs]));
            }
        }
        for (x, permutation) in transposes(b, rhs) {
            if through(&dot.rhs_free(permutation.len()), &permutation).is_sorted() {
                let rhs_batch = through(&dot.rhs_batch, &permutation);
                let rhs_contract = through(&dot.rhs_contract, &permutation);
                found.extend(b.add(Op::DotGeneral(DotGeneral { rhs_batch, rhs_contract, ..dot.clone() }), &[lhs, x]));
            }
        }
    }
    found
}

/// Moves a scale from an operand of a matmul to its product.
pub(crate) fn dot_of_scaled(b: &mut Builder, id: Id) -> Vec<Id> {
    let dots = b.find(id, |op, c| match op {
        Op::DotGeneral(_) => Some((op.clone(), c[0], c[1])),
        _ => None,
    });
    let mut found = Vec::new();
    for (dot, lhs, rhs) in dots {
        if !b.ty(lhs).dtype.is_float() {
            continue;
        }
        for (x, c) in b.scaled(lhs) {
            found.extend(b.add(dot.clone(), &[x, rhs]).and_then(|product| b.times(product, c)));
        }
        for (x, c) in b.scaled(rhs) {
            found.extend(b.add(dot.clone(), &[lhs, x]).and_then(|product| b.times(product, c)));
        }
    }
    found
}

pub(crate) fn scale_of_scale(b: &mut Builder, id: Id) -> Vec<Id> {
    if !b.ty(id).dtype.is_float() || b.number(id).is_some() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (x, outer) in b.scaled(id) {
        for (y, inner) in b.scaled(x) {
            if b.number(y).is_none() && (outer * inner).is_finite() && b.find(id, |op, _| Some(op.clone())).len() < 6 {
                found.extend(b.times(y, outer * inner));
            }
        }
    }
    found
}

/// Moves a sign out of sums and means. Two signs cancel.
pub(crate) fn negation(b: &mut Builder, id: Id) -> Vec<Id> {
    let negated = |b: &Builder, x: Id| b.unary(x, Unary::Negate);
    let mut found: Vec<Id> = negated(b, id).into_iter().flat_map(|x| negated(b, x)).collect();
    let linear = |op: &Op, c: &[Id]| match op {
        Op::Reduce(r) if r.reducer == Reducer::Sum => Some((op.clone(), c.to_vec())),
        Op::Composite(f) if matches!(f.function, Function::Mean { .. }) => Some((op.clone(), c.to_vec())),
        Op::Binary(Binary::Divide) | Op::Reshape(_) => Some((op.clone(), c.to_vec())),
        _ => None,
    };
    if !b.ty(id).dtype.is_float() {
        return found;
    }
    for (op, operands) in b.find(id, linear) {
        for x in negated(b, operands[0]) {
            let operands = [&[x], &operands[1..]].concat();
            let result = b.add(op.clone(), &operands);
            found.extend(result.and_then(|result| b.add(Op::Unary(Unary::Negate), &[result])));
        }
    }
    found
}

/// A lookup of each row at its own position is a slice of the table.
pub(crate) fn lookup_in_order(b: &mut Builder, id: Id) -> Vec<Id> {
    let lookups = b.find(id, |op, c| match op {
        Op::Gather(gather) => Some((gather.dims.clone(), c[0], c[1])),
        _ => None,
    });
    let mut found = Vec::new();
    for (dims, table, indices) in lookups {
        let (rows, wanted, shape) = (b.shape(table), b.shape(indices), b.shape(id));
        // One index per row, with whole rows after the indices' dimensions.
        let plain = dims.start_index_map == [0]
            && dims.collapsed_slice_dims == [0]
            && dims.operand_batching_dims.is_empty()
            && dims.slice_sizes[1..] == rows[1..]
            && dims.offset_dims.iter().copied().eq(shape.len() + 1 - rows.len()..shape.len());
        let count = match b.data(indices).fact {
            Some(Fact::Count { dim }) if plain && dims.index_vector_dim != dim => Some(dim),
            _ => None,
        };
        let Some(dim) = count.filter(|&d| wanted[d] <= rows[0]) else { continue };
        let at = if dims.index_vector_dim < dim { dim - 1 } else { dim };
        let slice = Slice {
            start: vec![0; rows.len()],
            limit: [&[wanted[dim]], &rows[1..]].concat(),
            stride: vec![1; rows.len()],
        };
        let taken = if wanted[dim] == rows[0] { Some(table) } else { b.add(Op::Slice(slice), &[table]) };
        let to: Vec<usize> = std::iter::once(at).chain(dims.offset_dims.iter().copied()).collect();
        found.extend(taken.and_then(|taken| b.broadcast(taken, id, &to)));
    }
    found
}
