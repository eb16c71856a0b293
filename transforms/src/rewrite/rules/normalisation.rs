//! Means, layer norm, RMS norm and batch norm.

use super::super::egraph::Builder;
use super::super::facts::Fact;
use super::near;
use super::structure::broadcasts;
use altiplano_ir::literal::Real;
use altiplano_ir::op::{Binary, Function, Op, Reducer, Unary};
use egg::Id;

/// A mean: a sum divided by the number of its terms. That number must scale with the batch as the terms do.
pub(crate) fn mean(b: &mut Builder, id: Id) -> Vec<Id> {
    if !b.ty(id).dtype.is_float() {
        return Vec::new();
    }
    let number = |b: &Builder, c: Id| match b.data(c).fact {
        Some(Fact::Number { value, batch_power }) => Some((value, batch_power)),
        _ => None,
    };
    let quotients = b.binary(id, Binary::Divide).into_iter().map(|(s, c)| (s, number(b, c)));
    let inverse = |(value, power): (f64, i8)| (1.0 / value, -power);
    let products = b.commuted(id, Binary::Multiply).into_iter().map(|(s, c)| (s, number(b, c).map(inverse)));
    let mut found = Vec::new();
    for (sum, counted) in quotients.chain(products).collect::<Vec<_>>() {
        let Some((n, power)) = counted else { continue };
        // Reduced dimensions may remain with size 1.
        let sums: Vec<(Id, Vec<usize>)> =
            b.unsqueezed(sum).into_iter().flat_map(|s| b.reduced(s, Reducer::Sum)).collect();
        for (x, dims) in sums {
            let shape = b.shape(x);
            let terms: u64 = dims.iter().map(|&d| shape[d]).product();
            let scaling = dims.iter().filter(|&&d| b.data(x).batch_dims >> d & 1 == 1).count();
            if near(n, terms as f64, 1e-6) && power as usize == scaling {
                let (mean, shape) = (b.add(Function::Mean { dims: dims.clone() }, &[x]), b.shape(id));
                found.extend(mean.and_then(|mean| b.reshape(mean, &shape)));
            }
        }
    }
    found
}

/// `(x, dims)` if the class is the mean of `x` over `dims`.
fn means(b: &Builder, id: Id) -> Vec<(Id, Vec<usize>)> {
    b.find(id, |op, c| match op {
        Op::Composite(composite) => match &composite.function {
            Function::Mean { dims } => Some((c[0], dims.clone())),
            _ => None,
        },
        _ => None,
    })
}

/// Two or three values whose product is the class, up to rounding.
fn factors(b: &Builder, id: Id) -> Vec<Vec<Id>> {
    let products = |id: Id| {
        let sides = b.unrounded(id).into_iter().flat_map(|x| b.binary(x, Binary::Multiply));
        sides.collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    for (x, y) in products(id) {
        all.push(vec![x, y]);
        all.extend(products(x).into_iter().map(|(p, q)| vec![p, q, y]));
        all.extend(products(y).into_iter().map(|(p, q)| vec![x, p, q]));
    }
    all
}

/// `(v, n)` if the class repeats `v` and its last `n` dimensions are those of `v`.
fn suffixes(b: &Builder, id: Id) -> Vec<(Id, usize)> {
    let shape = b.shape(id);
    let mut all = Vec::new();
    for x in b.unrounded(id) {
        for (v, dims) in broadcasts(b, x) {
            let n = dims.len();
            if n > 0
                && n < shape.len()
                && dims.iter().copied().eq(shape.len() - n..shape.len())
                && b.shape(v) == shape[shape.len() - n..]
            {
                all.push((v, n));
            }
        }
    }
    all
}

/// Values `v` and numbers `eps` if the class repeats `1 / sqrt(v + eps)` along `dims`.
fn inverse_roots(b: &Builder, id: Id, dims: &[usize]) -> Vec<(Id, f64)> {
    let mut all = Vec::new();
    for repeated in b.unrounded(id) {
        for s in b.statistics(repeated, dims) {
            for u in b.unary(s, Unary::Rsqrt) {
                for (v, eps) in b.commuted(u, Binary::Add) {
                    all.extend(b.number(eps).map(|eps| (v, eps)));
                }
            }
        }
    }
    all
}

/// Returns true if a class is `x x`, up to rounding.
fn is_square(b: &Builder, id: Id, x: Id) -> bool {
    let is_x = |y: Id| b.unrounded(y).iter().any(|&y| b.same(y, x)) || b.unrounded(x).iter().any(|&x| b.same(y, x));
    let squares = b.unrounded(id).into_iter().flat_map(|s| b.binary(s, Binary::Multiply));
    squares.into_iter().any(|(p, q)| is_x(p) && is_x(q))
}

/// Returns true if a class is the mean of `x` over `dims`, whether these remain with size 1 or not.
fn is_mean(b: &Builder, id: Id, x: Id, dims: &[usize]) -> bool {
    let alike = |y: Id| b.unrounded(y).iter().any(|&y| b.unrounded(x).iter().any(|&x| b.same(x, y)));
    let candidates = b.unsqueezed(id).into_iter().flat_map(|m| b.unrounded(m)).flat_map(|m| means(b, m));
    candidates.into_iter().any(|(y, over)| over == dims && alike(y))
}

/// Returns true if a class is the variance of `x` over `dims`. `centred` is `x` minus its mean.
fn is_variance(b: &Builder, id: Id, x: Id, centred: Id, dims: &[usize]) -> bool {
    b.unsqueezed(id).into_iter().any(|v| {
        let of_centred = means(b, v).into_iter().any(|(s, over)| over == dims && is_square(b, s, centred));
        // The mean square minus the squared mean. Rounding could make it negative, so it may be clamped at 0.
        let not_negative = b.commuted(v, Binary::Maximum).into_iter().filter(|(_, c)| b.number(*c) == Some(0.0));
        let differences = not_negative.map(|(d, _)| d).chain([v]).flat_map(|d| b.binary(d, Binary::Subtract));
        let of_squares = differences.into_iter().any(|(s, m)| {
            let mean_square = b
                .unsqueezed(s)
                .into_iter()
                .flat_map(|s| means(b, s))
                .any(|(s, over)| over == dims && is_square(b, s, x));
            let squared_mean = b.unsqueezed(m).into_iter().flat_map(|m| b.binary(m, Binary::Multiply));
            mean_square && squared_mean.into_iter().any(|(p, q)| b.same(p, q) && is_mean(b, p, x, dims))
        });
        of_centred || of_squares
    })
}

/// The form of a value, rounded or not, that has the element type of `like`.
fn in_type_of(b: &Builder, x: Id, like: Id) -> Option<Id> {
    b.unrounded(x).into_iter().find(|&x| b.ty(x).dtype == b.ty(like).dtype)
}

pub(crate) fn layer_norm(b: &mut Builder, id: Id) -> Vec<Id> {
    if !b.ty(id).dtype.is_float() {
        return Vec::new();
    }
    let mut found = Vec::new();
    // With a bias, and without one.
    let mut sums: Vec<(Id, Option<(Id, usize)>)> = vec![(id, None)];
    for whole in b.unrounded(id) {
        for (y, bias) in b.commuted(whole, Binary::Add) {
            sums.extend(suffixes(b, bias).into_iter().map(|bias| (y, Some(bias))));
        }
    }
    for (y, bias) in sums {
        for triple in factors(b, y).into_iter().filter(|f| f.len() == 3) {
            for [d, r, w] in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
                let (centred, root, weight) = (triple[d], triple[r], triple[w]);
                for (weight, n) in suffixes(b, weight) {
                    if bias.is_some_and(|(_, m)| m != n) {
                        continue;
                    }
                    let rank = b.shape(id).len();
                    let dims: Vec<usize> = (rank - n..rank).collect();
                    for centred in b.unrounded(centred) {
                        for (x, mu) in b.binary(centred, Binary::Subtract) {
                            let is_centre = b.statistics(mu, &dims).into_iter().any(|m| is_mean(b, m, x, &dims));
                            let roots = if is_centre { inverse_roots(b, root, &dims) } else { Vec::new() };
                            for (v, eps) in roots {
                                if !is_variance(b, v, x, centred, &dims) {
                                    continue;
                                }
                                let bias = match bias {
                                    Some((bias, _)) => Some(bias),
                                    None => Some(b.filled(weight, b.ty(weight).dtype, 0.0)),
                                };
                                let x = in_type_of(b, x, id);
                                if let (Some(x), Some(bias)) = (x, bias) {
                                    found.extend(b.add(Function::LayerNorm { eps: Real(eps) }, &[x, weight, bias]));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    found
}

pub(crate) fn rms_norm(b: &mut Builder, id: Id) -> Vec<Id> {
    if !b.ty(id).dtype.is_float() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for triple in factors(b, id).into_iter().filter(|f| f.len() == 3) {
        for [i, r, w] in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (x, root) = (triple[i], triple[r]);
            for (weight, n) in suffixes(b, triple[w]) {
                let rank = b.shape(id).len();
                let dims: Vec<usize> = (rank - n..rank).collect();
                for (v, eps) in inverse_roots(b, root, &dims) {
                    let of_square = |(s, over): (Id, Vec<usize>)| over == dims && is_square(b, s, x);
                    let is_mean_square = b.unsqueezed(v).into_iter().flat_map(|v| means(b, v)).any(of_square);
                    if is_mean_square && let Some(x) = in_type_of(b, x, id) {
                        found.extend(b.add(Function::RmsNorm { eps: Real(eps) }, &[x, weight]));
                    }
                }
            }
        }
    }
    found
}

/// Values that the class repeats along all dimensions but one, rounded or not, with dimensions of size 1 or without.
fn features(b: &Builder, id: Id, others: &[usize]) -> Vec<Id> {
    let mut all: Vec<Id> = Vec::new();
    for v in b.unrounded(id).into_iter().flat_map(|x| b.statistics(x, others)) {
        let v = b.egraph.find(v);
        if !all.contains(&v) {
            all.push(v);
        }
    }
    all
}

/// `(v, eps)` if the class is `1 / sqrt(v + eps)`.
fn roots(b: &Builder, id: Id) -> Vec<(Id, f64)> {
    let inner = b.unrounded(id).into_iter().flat_map(|x| b.unary(x, Unary::Rsqrt));
    let sums = inner.flat_map(|u| b.commuted(u, Binary::Add)).collect::<Vec<_>>();
    sums.into_iter().filter_map(|(v, eps)| b.number(eps).map(|eps| (v, eps))).collect()
}

/// The factor that a batch norm multiplies by: `1 / sqrt(v + eps)`, and the weight if there is one.
struct Factor {
    variance: Id,
    eps: f64,
    weight: Option<Id>,
    /// The product of root and weight, if it is a single value.
    whole: Option<Id>,
}

/// The factors in one or two values, each constant along `others`.
fn feature_factors(b: &Builder, values: &[Id], others: &[usize]) -> Vec<Factor> {
    let of = |root: Id, weight: Option<Id>, whole: Option<Id>| {
        let roots = roots(b, root).into_iter();
        roots.map(move |(variance, eps)| Factor { variance, eps, weight, whole })
    };
    let each: Vec<Vec<Id>> = values.iter().map(|&v| features(b, v, others)).collect();
    let mut all = Vec::new();
    match each.as_slice() {
        [both] => {
            for &s in both {
                all.extend(of(s, None, Some(s)));
                for (root, weight) in b.commuted(s, Binary::Multiply) {
                    all.extend(of(root, Some(weight), Some(s)));
                }
            }
        }
        [one, other] => {
            for (&x, &y) in one.iter().flat_map(|x| other.iter().map(move |y| (x, y))) {
                all.extend(of(x, Some(y), None));
                all.extend(of(y, Some(x), None));
            }
        }
        _ => {}
    }
    all
}

/// `(x - mean) / sqrt(variance + eps) weight + bias` for each feature, or `x scale + shift` with scale and shift
/// computed from these. Mean and variance are those of `x`, or any others.
pub(crate) fn batch_norm(b: &mut Builder, id: Id) -> Vec<Id> {
    let shape = b.shape(id);
    if !b.ty(id).dtype.is_float() || shape.len() < 2 {
        return Vec::new();
    }
    let mut found = Vec::new();
    for dim in (0..shape.len()).filter(|&d| shape[d] != 1) {
        let others: Vec<usize> = (0..shape.len()).filter(|&d| d != dim).collect();
        let mut sums: Vec<(Id, Option<Id>)> = vec![(id, None)];
        for whole in b.unrounded(id) {
            for (y, bias) in b.commuted(whole, Binary::Add) {
                sums.extend(features(b, bias, &others).into_iter().map(|bias| (y, Some(bias))));
            }
        }
        for (y, shift) in sums {
            for factors in factors(b, y) {
                for i in 0..factors.len() {
                    let rest: Vec<Id> = (0..factors.len()).filter(|&j| j != i).map(|j| factors[j]).collect();
                    for factor in feature_factors(b, &rest, &others) {
                        found.extend(centred(b, id, factors[i], dim, &factor, shift));
                        found.extend(moved(b, id, factors[i], dim, &factor, shift));
                    }
                }
            }
        }
    }
    found
}

/// The composite if `x` is a value minus its mean.
fn centred(b: &mut Builder, id: Id, x: Id, dim: usize, factor: &Factor, bias: Option<Id>) -> Vec<Id> {
    let others: Vec<usize> = (0..b.shape(id).len()).filter(|&d| d != dim).collect();
    let mut found = Vec::new();
    for centred in b.unrounded(x) {
        for (x, mean) in b.binary(centred, Binary::Subtract) {
            for mean in features(b, mean, &others) {
                let own = is_mean(b, mean, x, &others) && is_variance(b, factor.variance, x, centred, &others);
                let given = if own { None } else { Some(mean) };
                found.extend(normed(b, id, x, dim, factor, bias, given));
            }
        }
    }
    found
}

/// The composite if the mean is subtracted after the product: `shift` is `bias - mean scale`.
fn moved(b: &mut Builder, id: Id, x: Id, dim: usize, factor: &Factor, shift: Option<Id>) -> Vec<Id> {
    let (Some(shift), Some(scale)) = (shift, factor.whole) else { return Vec::new() };
    let scales = b.unsqueezed(scale);
    let mut moves: Vec<(Id, Option<Id>)> = Vec::new();
    for shift in b.unsqueezed(shift) {
        moves.extend(b.unary(shift, Unary::Negate).into_iter().map(|m| (m, None)));
        moves.extend(b.binary(shift, Binary::Subtract).into_iter().map(|(bias, m)| (m, Some(bias))));
    }
    let mut found = Vec::new();
    for (product, bias) in moves {
        for (mean, s) in b.commuted(product, Binary::Multiply) {
            if b.unsqueezed(s).iter().any(|&s| scales.iter().any(|&t| b.same(s, t))) {
                found.extend(normed(b, id, x, dim, factor, bias, Some(mean)));
            }
        }
    }
    found
}

fn normed(
    b: &mut Builder,
    id: Id,
    x: Id,
    dim: usize,
    factor: &Factor,
    bias: Option<Id>,
    given: Option<Id>,
) -> Option<Id> {
    let x = in_type_of(b, x, id)?;
    if b.shape(x) != b.shape(id) {
        return None;
    }
    let size = [b.shape(id)[dim]];
    let variance = b.reshape(factor.variance, &size)?;
    let mut operands = vec![x];
    for (value, none) in [(factor.weight, 1.0), (bias, 0.0)] {
        operands.push(match value {
            Some(value) => b.reshape(value, &size)?,
            None => b.filled(variance, b.ty(variance).dtype, none),
        });
    }
    if let Some(mean) = given {
        operands.extend([b.reshape(mean, &size)?, variance]);
    }
    let result = b.add(Function::BatchNorm { dim, eps: Real(factor.eps) }, &operands)?;
    (b.ty(result) == b.ty(id)).then_some(result)
}
