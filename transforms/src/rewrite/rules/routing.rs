//! Routing of a mixture of experts. The weights of a token's experts become one op of the router's logits.

use super::super::egraph::Builder;
use altiplano_ir::op::{ArgSort, Binary, Direction, Function, GatherDims, Op, Reducer, Slice};
use egg::Id;

fn of_function<T>(b: &Builder, id: Id, wanted: impl Fn(&Function) -> Option<T>) -> Vec<(Id, T)> {
    b.find(id, |op, c| match op {
        Op::Composite(composite) => wanted(&composite.function).map(|t| (c[0], t)),
        _ => None,
    })
}

/// The values whose softmax along the last dimension is the class.
fn scores(b: &Builder, id: Id) -> Vec<Id> {
    let last = b.shape(id).len().checked_sub(1);
    let of = |f: &Function| match f {
        Function::Softmax { dim } if Some(*dim) == last => Some(()),
        _ => None,
    };
    of_function(b, id, of).into_iter().map(|(x, ())| x).collect()
}

/// The values that the class orders along the last dimension.
fn ordered(b: &Builder, id: Id, descending: bool) -> Vec<Id> {
    let last = b.shape(id).len().checked_sub(1);
    b.find(id, |op, c| match op {
        Op::ArgSort(ArgSort { dim, descending: d }) if Some(*dim) == last && *d == [descending] => Some(c[0]),
        _ => None,
    })
}

/// Softmax keeps the order of its argument.
pub(crate) fn order_of_softmax(b: &mut Builder, id: Id) -> Vec<Id> {
    let orders = b.find(id, |op, c| match op {
        Op::ArgSort(sort) if c.len() == 1 => Some((sort.clone(), c[0])),
        _ => None,
    });
    let mut found = Vec::new();
    for (sort, scores) in orders {
        let along = |f: &Function| matches!(f, Function::Softmax { dim } if *dim == sort.dim).then_some(());
        for (x, ()) in of_function(b, scores, along) {
            found.extend(b.add(Op::ArgSort(sort.clone()), &[x]));
        }
    }
    found
}

/// `(x, k)` if the class is true exactly for the elements that are among the `k` greatest of `x` in their row.
fn among_greatest(b: &Builder, id: Id) -> Vec<(Id, u64)> {
    let bounds = b.find(id, |op, c| match op {
        Op::Compare(compare) if compare.direction == Direction::Lt => Some((c[0], c[1])),
        _ => None,
    });
    let mut all = Vec::new();
    for (place, end) in bounds {
        let Some(k) = b.number(end).filter(|k| *k >= 0.0 && k.fract() == 0.0) else { continue };
        for order in ordered(b, place, false) {
            all.extend(ordered(b, order, true).into_iter().map(|x| (x, k as u64)));
        }
    }
    all
}

/// A softmax for the greatest elements, and zero elsewhere.
pub(crate) fn gates(b: &mut Builder, id: Id) -> Vec<Id> {
    let selects = b.find(id, |op, c| matches!(op, Op::Select(_)).then(|| (c[0], c[1], c[2])));
    let mut found = Vec::new();
    for (chosen, p, zero) in selects {
        if b.number(zero) != Some(0.0) {
            continue;
        }
        for x in scores(b, p) {
            for (ranked, chosen) in among_greatest(b, chosen) {
                if b.same(ranked, x) || b.same(ranked, p) {
                    found.extend(b.add(Function::Gates { chosen, normalised: false }, &[x]));
                }
            }
        }
    }
    found
}

/// Returns true if a class repeats the sums of another over the last dimension.
fn is_total(b: &Builder, total: Id, of: Id) -> bool {
    let Some(last) = b.shape(total).len().checked_sub(1) else { return false };
    let sums = b.statistics(total, &[last]).into_iter().flat_map(|s| b.reduced(s, Reducer::Sum));
    sums.into_iter().any(|(x, dims)| dims == [last] && b.same(x, of))
}

/// Gates divided by their sum.
pub(crate) fn normalised(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (gates, total) in b.binary(id, Binary::Divide) {
        let of = |f: &Function| match f {
            Function::Gates { chosen, normalised: false } => Some(*chosen),
            _ => None,
        };
        for (x, chosen) in of_function(b, gates, of) {
            if is_total(b, total, gates) {
                found.extend(b.add(Function::Gates { chosen, normalised: true }, &[x]));
            }
        }
    }
    found
}

/// The dimension numbers of a lookup within each row: every index selects an element of its own row.
fn along_last(rank: usize) -> GatherDims {
    let others: Vec<usize> = (0..rank.saturating_sub(1)).collect();
    GatherDims {
        offset_dims: Vec::new(),
        collapsed_slice_dims: vec![rank.saturating_sub(1)],
        operand_batching_dims: others.clone(),
        indices_batching_dims: others,
        start_index_map: vec![rank.saturating_sub(1)],
        index_vector_dim: rank,
        slice_sizes: vec![1; rank],
    }
}

/// The values whose greatest elements in each row have the class as positions. It selects as many as it has columns.
fn greatest(b: &Builder, id: Id) -> Vec<Id> {
    let whole = |slice: &Slice, from: &[u64]| {
        let last = from.len() - 1;
        let rows = (0..last).all(|d| slice.start[d] == 0 && slice.limit[d] == from[d]);
        rows && slice.start[last] == 0 && slice.stride.iter().all(|s| *s == 1)
    };
    let slices = b.find(id, |op, c| match op {
        Op::Slice(slice) if !slice.start.is_empty() && whole(slice, &b.shape(c[0])) => Some(c[0]),
        _ => None,
    });
    slices.into_iter().flat_map(|order| ordered(b, order, true)).collect()
}

/// The greatest elements of a softmax divided by their sum are normalised gates at the same positions.
pub(crate) fn looked_up(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (values, total) in b.binary(id, Binary::Divide) {
        if !is_total(b, total, values) {
            continue;
        }
        let lookups = b.find(values, |op, c| match op {
            Op::Gather(gather) => Some((gather.clone(), c[0], c[1])),
            _ => None,
        });
        for (gather, p, places) in lookups {
            if gather.dims != along_last(b.shape(p).len()) {
                continue;
            }
            // Each index may be a vector of one element.
            for at in b.unsqueezed(places) {
                let (ranked, chosen) = (greatest(b, at), b.shape(at).last().copied().unwrap_or(0));
                for x in scores(b, p) {
                    let is_ranked = ranked.iter().any(|&y| b.same(x, y) || b.same(p, y));
                    if is_ranked && let Some(gates) = b.add(Function::Gates { chosen, normalised: true }, &[x]) {
                        found.extend(b.add(Op::Gather(gather.clone()), &[gates, places]));
                    }
                }
            }
        }
    }
    found
}
