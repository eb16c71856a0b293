//! Softmax, its logarithm, and the loss that takes one element of the latter.

use super::super::egraph::Builder;
use altiplano_ir::op::{Binary, Direction, Function, Op, Reducer, Unary};
use egg::Id;

/// The argument of an exponential, with and without the subtraction of a number for each row, which cancels.
fn arguments(b: &Builder, x: Id, dim: usize) -> Vec<Id> {
    let shifted = b.binary(x, Binary::Subtract).into_iter().filter(|(_, m)| b.is_statistic(*m, &[dim]));
    shifted.map(|(y, _)| y).chain([x]).collect()
}

/// `(exp(x), x, dim)` if the class is the sum of `exp(x)` over `dim`.
fn sums_of_powers(b: &Builder, sum: Id) -> Vec<(Id, Id, usize)> {
    let mut all = Vec::new();
    for (powers, dims) in b.reduced(sum, Reducer::Sum) {
        let [dim] = dims[..] else { continue };
        all.extend(b.unary(powers, Unary::Exponential).into_iter().map(|x| (powers, x, dim)));
    }
    all
}

/// Each dimension along which the class repeats a value, with that value.
fn repeated(b: &Builder, id: Id) -> Vec<(usize, Id)> {
    let dims = 0..b.shape(id).len();
    dims.flat_map(|d| b.statistics(id, &[d]).into_iter().map(move |s| (d, s))).collect()
}

/// `exp(x) / sum(exp(x))`, whatever is subtracted from each row before.
pub(crate) fn softmax(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (powers, total) in b.binary(id, Binary::Divide) {
        for (dim, sum) in repeated(b, total) {
            for (summed, x, over) in sums_of_powers(b, sum) {
                if over == dim && b.same(summed, powers) {
                    for x in arguments(b, x, dim) {
                        found.extend(b.add(Function::Softmax { dim }, &[x]));
                    }
                }
            }
        }
    }
    found
}

/// The values `x` whose log-sum-exp over `dim` is the class: `log(sum(exp(x - m))) + m`, or without `m`.
fn log_sums(b: &Builder, lse: Id) -> Vec<(Id, usize)> {
    let mut all = Vec::new();
    let log = |all: &mut Vec<(Id, usize)>, log: Id, most: Option<Id>| {
        for y in b.unsqueezed(log) {
            for sum in b.unary(y, Unary::Log) {
                for (_, x, dim) in b.unsqueezed(sum).into_iter().flat_map(|s| sums_of_powers(b, s)) {
                    match most {
                        None => all.push((x, dim)),
                        Some(most) => {
                            let unshifted = b.binary(x, Binary::Subtract).into_iter().filter(|(_, m)| {
                                b.statistics(*m, &[dim])
                                    .iter()
                                    .any(|&s| b.unsqueezed(most).iter().any(|&t| b.same(s, t)))
                            });
                            all.extend(unshifted.map(|(x, _)| (x, dim)));
                        }
                    }
                }
            }
        }
    };
    log(&mut all, lse, None);
    for y in b.unsqueezed(lse) {
        for (l, m) in b.commuted(y, Binary::Add) {
            log(&mut all, l, Some(m));
        }
    }
    all
}

/// `x - log(sum(exp(x)))`, or the logarithm of a softmax.
pub(crate) fn log_softmax(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, repeats) in b.binary(id, Binary::Subtract) {
        for (dim, lse) in repeated(b, repeats) {
            for (y, over) in log_sums(b, lse) {
                if over == dim && b.same(x, y) {
                    for x in arguments(b, x, dim) {
                        found.extend(b.add(Function::LogSoftmax { dim }, &[x]));
                    }
                }
            }
        }
    }
    for p in b.unary(id, Unary::Log) {
        for (x, dim) in of_function(b, p, |f| match f {
            Function::Softmax { dim } => Some(*dim),
            _ => None,
        }) {
            found.extend(b.add(Function::LogSoftmax { dim }, &[x]));
        }
    }
    found
}

fn of_function<T>(b: &Builder, id: Id, wanted: impl Fn(&Function) -> Option<T>) -> Vec<(Id, T)> {
    b.find(id, |op, c| match op {
        Op::Composite(composite) => wanted(&composite.function).map(|t| (c[0], t)),
        _ => None,
    })
}

/// `(values, dim, labels)` if the class takes one element of each row of `values` along `dim`. A NaN that stands for an
/// index out of range is ignored, because the loss is defined only for valid labels.
fn taken(b: &mut Builder, id: Id) -> Vec<(Id, usize, Id)> {
    let mut candidates = b.unsqueezed(id);
    let mut at = 0;
    while at < candidates.len() {
        let filled = b.find(candidates[at], |op, c| matches!(op, Op::Select(_)).then(|| (c[1], c[2])));
        for (x, fill) in filled {
            if b.number(fill).is_some_and(f64::is_nan) {
                for x in b.unsqueezed(x) {
                    if !candidates.iter().any(|&known| b.same(known, x)) {
                        candidates.push(x);
                    }
                }
            }
        }
        at += 1;
    }
    let mut all = Vec::new();
    for id in candidates {
        let gathers = b.find(id, |op, c| match op {
            Op::Gather(g) => Some((g.clone(), c[0], c[1])),
            _ => None,
        });
        for (gather, values, indices) in gathers {
            let (shape, dims) = (b.shape(values), &gather.dims);
            let [dim] = dims.start_index_map[..] else { continue };
            let others: Vec<usize> = (0..shape.len()).filter(|&d| d != dim && shape[d] != 1).collect();
            let along: Vec<usize> = dims.operand_batching_dims.iter().copied().filter(|&d| shape[d] != 1).collect();
            let in_order = along == others && dims.indices_batching_dims.is_sorted();
            let one = dims.slice_sizes[dim] == 1;
            let labels: Vec<u64> = (0..shape.len()).filter(|&d| d != dim).map(|d| shape[d]).collect();
            if in_order && one && b.ty(indices).elements() == labels.iter().product::<u64>() {
                all.extend(b.reshape(indices, &labels).map(|labels| (values, dim, labels)));
            }
        }
    }
    all
}

/// `log_softmax(x)[label]`, which is the negative loss, and `log(sum(exp(x))) - x[label]`.
pub(crate) fn cross_entropy(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    let mut found = Vec::new();
    for (values, dim, labels) in taken(b, id) {
        let of = |f: &Function| match f {
            Function::LogSoftmax { dim } => Some(*dim),
            _ => None,
        };
        for (x, along) in of_function(b, values, of) {
            if along == dim {
                let loss = b.add(Function::CrossEntropy { dim }, &[x, labels]);
                let loss = loss.and_then(|loss| b.reshape(loss, &shape));
                found.extend(loss.and_then(|loss| b.add(Op::Unary(Unary::Negate), &[loss])));
            }
        }
    }
    for (lse, hit) in b.binary(id, Binary::Subtract) {
        for (values, dim, labels) in taken(b, hit) {
            let alike = log_sums(b, lse).into_iter().any(|(x, over)| over == dim && b.same(x, values));
            if alike {
                let loss = b.add(Function::CrossEntropy { dim }, &[values, labels]);
                found.extend(loss.and_then(|loss| b.reshape(loss, &shape)));
            }
        }
    }
    found
}

/// A softmax is never NaN, so the value that would replace a NaN is never used.
pub(crate) fn guarded(b: &mut Builder, id: Id) -> Vec<Id> {
    let selects = b.find(id, |op, c| matches!(op, Op::Select(_)).then(|| (c[0], c[2])));
    let is_softmax =
        |b: &Builder, p: Id| !of_function(b, p, |f| matches!(f, Function::Softmax { .. }).then_some(())).is_empty();
    let mut found = Vec::new();
    for (guard, p) in selects {
        let unequal = b.find(guard, |op, c| match op {
            Op::Compare(compare) if compare.direction == Direction::Ne => Some((c[0], c[1])),
            _ => None,
        });
        let never = unequal.into_iter().any(|(x, y)| b.same(x, p) && b.same(y, p));
        if never && b.unrounded(p).into_iter().any(|p| is_softmax(b, p)) {
            found.push(p);
        }
    }
    found
}
