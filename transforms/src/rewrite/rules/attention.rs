//! Attention and rotary positions, for any order of their dimensions.

use super::super::egraph::Builder;
use super::super::facts::Fact;
use super::structure::{broadcasts, transposes};
use altiplano_ir::array::RotaryHalves;
use altiplano_ir::dtype::DType;
use altiplano_ir::literal::Real;
use altiplano_ir::op::{Binary, Concatenate, DotGeneral, Function, Op, Slice, Unary};
use egg::Id;

/// The role of a dimension of scores, or of a product with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Batch,
    Head,
    Query,
    /// Heads of queries that share one head of keys.
    Group,
    Key,
    Width,
}

/// A mask of scores.
#[derive(Clone, Copy)]
enum Mask {
    /// Booleans: `Seen` is true for visible scores, and `Hidden` is true for hidden ones.
    Seen(Id),
    Hidden(Id),
    Added(Id),
}

/// The path from the product of queries and keys to the softmax.
#[derive(Clone)]
struct Scores {
    dot: (DotGeneral, Id, Id),
    scale: f64,
    /// The query and key dimensions, if each query sees only keys up to its own position.
    causal: Option<(usize, usize)>,
    mask: Option<Mask>,
}

/// A number at or below which scores count as hidden.
const HIDDEN: f64 = -1e4;

/// The largest number of ops between a product and the softmax.
const MAX_DEPTH: usize = 8;

fn dots(b: &Builder, id: Id) -> Vec<(DotGeneral, Id, Id)> {
    b.find(id, |op, c| match op {
        Op::DotGeneral(dot) => Some((dot.clone(), c[0], c[1])),
        _ => None,
    })
}

/// Strips scales and masks from scores until it finds the product of queries and keys.
fn scores(b: &Builder, id: Id, outer: &Scores, depth: usize, found: &mut Vec<Scores>) {
    if depth == 0 || found.len() > 16 {
        return;
    }
    for id in b.unrounded(id) {
        for dot in dots(b, id) {
            found.push(Scores { dot, ..outer.clone() });
        }
        for (x, c) in b.scaled(id) {
            if c.is_finite() && b.number(x).is_none() {
                scores(b, x, &Scores { scale: outer.scale * c, ..outer.clone() }, depth - 1, found);
            }
        }
        let selects = b.find(id, |op, c| matches!(op, Op::Select(_)).then(|| (c[0], c[1], c[2])));
        for (p, yes, no) in selects {
            let hides = |x: Id| b.number(x).is_some_and(|n| n <= HIDDEN);
            if hides(no) {
                masked(b, yes, Mask::Seen(p), outer, depth, found);
            } else if hides(yes) {
                masked(b, no, Mask::Hidden(p), outer, depth, found);
            }
        }
        // A later scale would scale the added mask too.
        for (x, m) in b.commuted(id, Binary::Add) {
            let harmless = matches!(b.data(m).fact, Some(Fact::Causal { .. } | Fact::Open));
            if outer.scale == 1.0 || harmless {
                masked(b, x, Mask::Added(m), outer, depth, found);
            }
        }
    }
}

fn masked(b: &Builder, x: Id, mask: Mask, outer: &Scores, depth: usize, found: &mut Vec<Scores>) {
    let fact = match mask {
        Mask::Seen(m) | Mask::Added(m) => b.data(m).fact.clone(),
        Mask::Hidden(_) => None,
    };
    let inner = match (fact, outer.mask) {
        (Some(Fact::Causal { row, column }), _) => Scores { causal: Some((row, column)), ..outer.clone() },
        (Some(Fact::Open), _) => outer.clone(),
        (_, None) => Scores { mask: Some(mask), ..outer.clone() },
        (_, Some(_)) => return,
    };
    scores(b, x, &inner, depth - 1, found);
}

/// The roles of the dimensions of scores, and of both operands of their product.
struct Roles {
    scores: Vec<Role>,
    queries: (Id, Vec<Role>),
    keys: (Id, Vec<Role>),
}

/// Tells queries from keys: the softmax runs over the keys.
fn roles(b: &Builder, (dot, lhs, rhs): &(DotGeneral, Id, Id), softmax_dim: usize) -> Option<Roles> {
    let (left, right) = (b.shape(*lhs).len(), b.shape(*rhs).len());
    let (lhs_free, rhs_free) = (dot.lhs_free(left), dot.rhs_free(right));
    let batches = dot.lhs_batch.len();
    if !(1..=2).contains(&batches) || dot.lhs_contract.len() != 1 {
        return None;
    }
    let rank = batches + lhs_free.len() + rhs_free.len();
    let keys_right = softmax_dim >= batches + lhs_free.len();
    let (query_free, key_free) = if keys_right { (&lhs_free, &rhs_free) } else { (&rhs_free, &lhs_free) };
    if key_free.len() != 1 || !(1..=2).contains(&query_free.len()) || softmax_dim < batches || softmax_dim >= rank {
        return None;
    }
    // Either dimension could be the heads. Choose so that the plan sees the batch as batch.
    let marks = |dims: &[usize], id: Id, i: usize| b.data(id).batch_dims >> dims[i] & 1 == 1;
    let second_is_batch = batches == 2 && marks(&dot.lhs_batch, *lhs, 1) && !marks(&dot.lhs_batch, *lhs, 0);
    let batch_role = |i: usize| if (i == 0) != second_is_batch { Role::Batch } else { Role::Head };
    let free_roles: &[Role] = if query_free.len() == 1 { &[Role::Query] } else { &[Role::Query, Role::Group] };
    let operand = |rank: usize, batch: &[usize], free: &[usize], names: &[Role]| {
        let role = |d: usize| match (batch.iter().position(|&x| x == d), free.iter().position(|&x| x == d)) {
            (Some(i), _) => batch_role(i),
            (None, Some(i)) => names[i],
            _ => Role::Width,
        };
        (0..rank).map(role).collect::<Vec<Role>>()
    };
    let (query_names, key_names) = (free_roles, [Role::Key]);
    let left_names: &[Role] = if keys_right { query_names } else { &key_names };
    let right_names: &[Role] = if keys_right { &key_names } else { query_names };
    let of_left = (*lhs, operand(left, &dot.lhs_batch, &lhs_free, left_names));
    let of_right = (*rhs, operand(right, &dot.rhs_batch, &rhs_free, right_names));
    let scores = (0..batches).map(batch_role).chain(left_names.iter().copied()).chain(right_names.iter().copied());
    let scores = scores.collect();
    let (queries, keys) = if keys_right { (of_left, of_right) } else { (of_right, of_left) };
    Some(Roles { scores, queries, keys })
}

/// Transposes `x` to an order of roles. Roles that `x` lacks become dimensions of size 1.
fn arranged(b: &mut Builder, x: Id, roles: &[Role], order: &[Role]) -> Option<Id> {
    let permutation: Vec<usize> = order.iter().filter_map(|r| roles.iter().position(|s| s == r)).collect();
    if permutation.len() != roles.len() {
        return None;
    }
    let moved = b.transpose(x, &permutation)?;
    let mut sizes = b.shape(moved).into_iter();
    let shape: Option<Vec<u64>> =
        order.iter().map(|r| if roles.contains(r) { sizes.next() } else { Some(1) }).collect();
    b.reshape(moved, &shape?)
}

/// The unrepeated form of keys or values `[B, T, H, D]` whose heads repeat fewer heads.
fn unrepeated(b: &mut Builder, x: Id, roles: &[Role]) -> Option<(Id, Vec<Role>)> {
    let head = roles.iter().position(|r| *r == Role::Head)?;
    let from = b.find(x, |op, c| matches!(op, Op::Reshape(_)).then(|| c[0]));
    for y in from {
        let (wide, shape) = (b.shape(y), b.shape(x));
        let merges = wide.len() == shape.len() + 1
            && wide[..head] == shape[..head]
            && wide[head] * wide[head + 1] == shape[head]
            && wide[head + 2..] == shape[head + 1..];
        if !merges {
            continue;
        }
        for (z, dims) in broadcasts(b, y) {
            let sizes = b.shape(z);
            let kept: Vec<usize> = (0..sizes.len()).filter(|&d| sizes[d] != 1).map(|d| dims[d]).collect();
            let wanted: Vec<usize> = (0..wide.len()).filter(|&d| d != head + 1 && wide[d] != 1).collect();
            if kept == wanted && dims.is_sorted() {
                let mut fewer = shape.clone();
                fewer[head] = wide[head];
                return Some((b.reshape(z, &fewer)?, roles.to_vec()));
            }
        }
    }
    None
}

/// The mask in the shape `[B, H, S, T]`, with size 1 where it repeats.
fn mask_of(b: &mut Builder, mask: Mask, roles: &[Role]) -> Option<Id> {
    let (id, hidden) = match mask {
        Mask::Seen(m) | Mask::Added(m) => (m, false),
        Mask::Hidden(m) => (m, true),
    };
    let order = [Role::Batch, Role::Head, Role::Group, Role::Query, Role::Key];
    // Use the value that the mask repeats, if it is visible.
    let mut small = None;
    for (x, dims) in broadcasts(b, id) {
        if dims.is_sorted() {
            let of = dims.iter().map(|&d| roles[d]).collect::<Vec<_>>();
            small = arranged(b, x, &of, &order);
        }
    }
    let arranged = match small {
        Some(small) => small,
        None => arranged(b, id, roles, &order)?,
    };
    // Groups are the minor part of the heads, unless the mask is the same for all of them.
    let [batch, heads, group, queries, keys] = b.shape(arranged)[..] else { return None };
    let arranged = match (heads, group) {
        (1, _) | (_, 1) if roles.contains(&Role::Group) && heads * group != 1 => return None,
        _ => b.reshape(arranged, &[batch, heads * group, queries, keys])?,
    };
    if hidden { b.add(Op::Unary(Unary::Not), &[arranged]) } else { Some(arranged) }
}

/// `softmax(q k^T scale + mask) v`.
pub(crate) fn attention(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (dot, lhs, rhs) in dots(b, id) {
        for weights_left in [true, false] {
            let (weights, values) = if weights_left { (lhs, rhs) } else { (rhs, lhs) };
            let mixing = Mixing { dot: &dot, values, weights_left };
            for weights in b.unrounded(weights) {
                let softmaxes = b.find(weights, |op, c| match op {
                    Op::Composite(f) => match f.function {
                        Function::Softmax { dim } => Some((c[0], dim)),
                        _ => None,
                    },
                    _ => None,
                });
                for (x, dim) in softmaxes {
                    let plain = Scores { dot: (dot.clone(), lhs, rhs), scale: 1.0, causal: None, mask: None };
                    let mut all = Vec::new();
                    scores(b, x, &plain, MAX_DEPTH, &mut all);
                    for scores in all {
                        found.extend(assembled(b, id, &scores, dim, &mixing));
                    }
                }
            }
        }
    }
    found
}

/// A product of attention's weights with the values.
struct Mixing<'a> {
    dot: &'a DotGeneral,
    values: Id,
    /// True if the weights are the first factor.
    weights_left: bool,
}

impl Mixing<'_> {
    fn weights_batch(&self) -> &[usize] {
        if self.weights_left { &self.dot.lhs_batch } else { &self.dot.rhs_batch }
    }

    /// The roles of the values' dimensions. `None` if this is not the product of attention.
    fn value_roles(&self, b: &Builder, roles: &Roles, softmax_dim: usize) -> Option<Vec<Role>> {
        let (weights_contract, values_batch, values_contract) = if self.weights_left {
            (&self.dot.lhs_contract, &self.dot.rhs_batch, &self.dot.rhs_contract)
        } else {
            (&self.dot.rhs_contract, &self.dot.lhs_batch, &self.dot.lhs_contract)
        };
        let is_batch = |r: &Role| matches!(r, Role::Batch | Role::Head);
        if weights_contract[..] != [softmax_dim]
            || self.weights_batch().len() != roles.scores.iter().filter(|r| is_batch(r)).count()
        {
            return None;
        }
        // The batch dimensions of the second product are those of the first.
        let mut value_roles = vec![Role::Width; b.shape(self.values).len()];
        for (&w, &v) in self.weights_batch().iter().zip(values_batch) {
            if !is_batch(&roles.scores[w]) {
                return None;
            }
            value_roles[v] = roles.scores[w];
        }
        value_roles[values_contract[0]] = Role::Key;
        (value_roles.iter().filter(|r| **r == Role::Width).count() == 1).then_some(value_roles)
    }

    /// The roles of the result's dimensions.
    fn result_roles(&self, scores: &[Role], softmax_dim: usize) -> Vec<Role> {
        let batch = self.weights_batch().iter().map(|&w| scores[w]);
        let is_free = |d: &usize| !self.weights_batch().contains(d) && *d != softmax_dim;
        let rest = (0..scores.len()).filter(is_free).map(|d| scores[d]);
        match self.weights_left {
            true => batch.chain(rest).chain([Role::Width]).collect(),
            false => batch.chain([Role::Width]).chain(rest).collect(),
        }
    }
}

/// Builds the composite, in the layout of the product with the values.
fn assembled(b: &mut Builder, id: Id, scores: &Scores, softmax_dim: usize, mixing: &Mixing) -> Option<Id> {
    let roles = roles(b, &scores.dot, softmax_dim)?;
    let mut value_roles = mixing.value_roles(b, &roles, softmax_dim)?;
    let dtype = b.ty(id).dtype;
    let typed = |b: &mut Builder, x: Id| match b.unrounded(x).into_iter().find(|&x| b.ty(x).dtype == dtype) {
        Some(x) => Some(x),
        None => b.convert(x, dtype),
    };
    let grouped = roles.scores.contains(&Role::Group);
    let (mut keys, mut key_roles) = roles.keys;
    let mut values = mixing.values;
    if !grouped
        && let (Some(k), Some(v)) = (unrepeated(b, keys, &key_roles), unrepeated(b, values, &value_roles))
        && b.shape(k.0)[k.1.iter().position(|r| *r == Role::Head)?]
            == b.shape(v.0)[v.1.iter().position(|r| *r == Role::Head)?]
    {
        (keys, key_roles) = k;
        (values, value_roles) = v;
    }
    let q_order: &[Role] = if grouped {
        &[Role::Batch, Role::Query, Role::Head, Role::Group, Role::Width]
    } else {
        &[Role::Batch, Role::Query, Role::Head, Role::Width]
    };
    let queries = typed(b, roles.queries.0)?;
    let mut q = arranged(b, queries, &roles.queries.1, q_order)?;
    let k_order = [Role::Batch, Role::Key, Role::Head, Role::Width];
    let keys = typed(b, keys)?;
    let k = arranged(b, keys, &key_roles, &k_order)?;
    let values = typed(b, values)?;
    let v = arranged(b, values, &value_roles, &k_order)?;
    let mut shape = b.shape(q);
    if grouped {
        q = b.reshape(q, &[shape[0], shape[1], shape[2] * shape[3], shape[4]])?;
    }
    let mut operands = vec![q, k, v];
    if let Some(mask) = scores.mask {
        let mask = mask_of(b, mask, &roles.scores)?;
        let mask = if b.ty(mask).dtype == DType::Bool { mask } else { typed(b, mask)? };
        operands.push(mask);
    }
    let query_dim = roles.scores.iter().position(|r| *r == Role::Query);
    let causal = scores.causal.is_some();
    if causal && scores.causal.map(|(row, column)| (Some(row), column)) != Some((query_dim, softmax_dim)) {
        return None;
    }
    // Narrow floats are scaled in f32, as in the decomposition.
    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
    let function = Function::Attention { scale: Real(wide.round(scores.scale)), causal, blocks: 1 };
    let mixed = b.add(function, &operands)?;
    *shape.last_mut()? = b.shape(mixed)[3];
    let mixed = b.reshape(mixed, &shape)?;
    let result = in_order(b, mixed, q_order.to_vec(), &mixing.result_roles(&roles.scores, softmax_dim))?;
    (b.ty(result) == b.ty(id)).then_some(result)
}

/// Brings a value with dimensions of the roles `order` into the order `wanted`. A product without a head or batch
/// dimension has none in its result.
fn in_order(b: &mut Builder, mut x: Id, mut order: Vec<Role>, wanted: &[Role]) -> Option<Id> {
    for gone in [Role::Head, Role::Batch] {
        if !wanted.contains(&gone) {
            let at = order.iter().position(|r| *r == gone)?;
            let mut shape = b.shape(x);
            if shape.remove(at) != 1 {
                return None;
            }
            order.remove(at);
            x = b.reshape(x, &shape)?;
        }
    }
    let permutation: Option<Vec<usize>> = wanted.iter().map(|r| order.iter().position(|o| o == r)).collect();
    b.transpose(x, &permutation?)
}

/// `(x, start, limit)` if the class is elements `start..limit` of the last dimension of `x`.
fn parts(b: &Builder, id: Id) -> Vec<(Id, u64, u64)> {
    b.find(id, |op, c| match op {
        Op::Slice(Slice { start, limit, stride }) => {
            let shape = b.shape(c[0]);
            let last = shape.len().checked_sub(1)?;
            let whole = (0..last).all(|d| start[d] == 0 && limit[d] == shape[d]);
            (whole && stride.iter().all(|s| *s == 1)).then(|| (c[0], start[last], limit[last]))
        }
        _ => None,
    })
}

/// `(x, y)` if the class is a concatenation of `x` and `y` along the last dimension.
fn joined(b: &Builder, id: Id) -> Vec<(Id, Id)> {
    let last = b.shape(id).len().saturating_sub(1);
    b.find(id, |op, c| match op {
        Op::Concatenate(Concatenate { dim }) if *dim == last && c.len() == 2 => Some((c[0], c[1])),
        _ => None,
    })
}

/// The values whose last dimension has `first` and `second` as its halves.
fn halves(b: &Builder, first: Id, second: Id) -> Vec<Id> {
    let mut all = Vec::new();
    for first in b.unrounded(first) {
        for (x, start, limit) in parts(b, first) {
            let width = b.shape(x).last().copied().unwrap_or(0);
            let other = |y: &Id| parts(b, *y).into_iter().any(|(z, s, l)| b.same(x, z) && s == limit && l == width);
            if start == 0 && 2 * limit == width && b.unrounded(second).iter().any(other) {
                all.push(x);
            }
        }
    }
    all
}

/// The cosine or sine of an angle in the rank of `x`, with size 1 where it repeats.
fn angles(b: &mut Builder, id: Id) -> Option<Id> {
    for (y, dims) in broadcasts(b, id) {
        let rank = b.shape(id).len();
        if dims.is_sorted() {
            let sizes = b.shape(y);
            let mut shape = vec![1; rank];
            dims.iter().zip(sizes).for_each(|(&d, size)| shape[d] = size);
            return b.reshape(y, &shape);
        }
    }
    Some(id)
}

/// The values whose even elements along the last dimension are `first` and whose odd ones are `second`.
fn pairs(b: &Builder, first: Id, second: Id) -> Vec<Id> {
    let mut all = Vec::new();
    for (p, start, limit) in b.unsqueezed(first).into_iter().flat_map(|x| parts(b, x)) {
        let other = |&(q, s, l): &(Id, u64, u64)| b.same(p, q) && (s, l) == (1, 2);
        let both = b.unsqueezed(second).into_iter().flat_map(|x| parts(b, x)).any(|part| other(&part));
        let shape = b.shape(p);
        if (start, limit) == (0, 1) && shape.last() == Some(&2) && both {
            let whole = |x: &Id| {
                let from = b.shape(*x);
                from.len() + 1 == shape.len() && from[..from.len() - 1] == shape[..shape.len() - 2]
            };
            let from = b.find(p, |op, c| matches!(op, Op::Reshape(_)).then(|| c[0]));
            all.extend(from.into_iter().filter(whole));
        }
    }
    all
}

/// The composite on a value of the class's element type, or on one converted to it.
fn rotated(b: &mut Builder, id: Id, x: Id, cosine: Id, sine: Id, halves: RotaryHalves) -> Option<Id> {
    let dtype = b.ty(id).dtype;
    let x = match b.unrounded(x).into_iter().find(|&x| b.ty(x).dtype == dtype) {
        Some(x) => x,
        None => b.convert(x, dtype)?,
    };
    // Angles keep their type, in which the rotation is computed.
    let wide = |id: Id| b.ty(id).dtype;
    if wide(cosine) != wide(sine) || !wide(cosine).is_float() || wide(cosine).bytes() < dtype.bytes() {
        return None;
    }
    let result = b.add(Function::Rotary { halves }, &[x, cosine, sine])?;
    (b.ty(result) == b.ty(id)).then_some(result)
}

/// `x cos + (-x2, x1) sin`.
pub(crate) fn rotary(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    let sums = b.unrounded(id).into_iter().flat_map(|whole| b.commuted(whole, Binary::Add));
    for (along, across) in sums.collect::<Vec<_>>() {
        for (turned, sine) in b.commuted(across, Binary::Multiply) {
            let turned = b.unrounded(turned).into_iter().flat_map(|t| joined(b, t)).collect::<Vec<_>>();
            for (negative, first) in turned {
                for second in b.unary(negative, Unary::Negate) {
                    for x in halves(b, first, second) {
                        for (y, cosine) in b.commuted(along, Binary::Multiply) {
                            let same = b.unrounded(y).iter().any(|&y| b.unrounded(x).iter().any(|&x| b.same(x, y)));
                            if same && let (Some(c), Some(s)) = (angles(b, cosine), angles(b, sine)) {
                                found.extend(rotated(b, id, x, c, s, RotaryHalves::Split));
                            }
                        }
                    }
                }
            }
        }
    }
    found
}

/// `(first, second, cosine, sine)` if one class is `first cos - second sin` and the other is `second cos + first sin`.
fn turned(b: &Builder, low: Id, high: Id) -> Vec<[Id; 4]> {
    let is =
        |p: Id, u: Id, v: Id| b.commuted(p, Binary::Multiply).into_iter().any(|(s, t)| b.same(s, u) && b.same(t, v));
    let mut all = Vec::new();
    for (minuend, subtrahend) in b.binary(low, Binary::Subtract) {
        for (first, cosine) in b.commuted(minuend, Binary::Multiply) {
            for (second, sine) in b.commuted(subtrahend, Binary::Multiply) {
                let sums = b.commuted(high, Binary::Add);
                if sums.into_iter().any(|(p, q)| is(p, second, cosine) && is(q, first, sine)) {
                    all.push([first, second, cosine, sine]);
                }
            }
        }
    }
    all
}

/// `(x1 cos - x2 sin, x2 cos + x1 sin)`.
pub(crate) fn rotary_of_halves(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (low, high) in b.unrounded(id).into_iter().flat_map(|j| joined(b, j)).collect::<Vec<_>>() {
        for [first, second, cosine, sine] in turned(b, low, high) {
            for x in halves(b, first, second) {
                let (Some(c), Some(s)) = (angles(b, cosine), angles(b, sine)) else { continue };
                let dim = b.shape(c).len() - 1;
                let both = |b: &mut Builder, half: Id| b.add(Op::Concatenate(Concatenate { dim }), &[half, half]);
                if let (Some(c), Some(s)) = (both(b, c), both(b, s)) {
                    found.extend(rotated(b, id, x, c, s, RotaryHalves::Split));
                }
            }
        }
    }
    found
}

/// `(x1 cos - x2 sin, x2 cos + x1 sin)` for even and odd elements.
pub(crate) fn rotary_of_pairs(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    let flattened =
        b.unrounded(id).into_iter().flat_map(|x| b.find(x, |op, c| matches!(op, Op::Reshape(_)).then(|| c[0])));
    for (low, high) in flattened.collect::<Vec<_>>().into_iter().flat_map(|j| joined(b, j)).collect::<Vec<_>>() {
        for (low, high) in b.unsqueezed(low).into_iter().zip(b.unsqueezed(high)).collect::<Vec<_>>() {
            for [first, second, cosine, sine] in turned(b, low, high) {
                for x in pairs(b, first, second) {
                    let (Some(c), Some(s)) = (angles(b, cosine), angles(b, sine)) else { continue };
                    found.extend(rotated(b, id, x, c, s, RotaryHalves::Interleaved));
                }
            }
        }
    }
    found
}

/// Moves a transpose of positions and heads from after a rotation to before it.
pub(crate) fn transpose_of_rotary(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (y, permutation) in transposes(b, id) {
        let rotations = b.find(y, |op, c| match op {
            Op::Composite(f) => match f.function {
                Function::Rotary { .. } => Some((op.clone(), c.to_vec())),
                _ => None,
            },
            _ => None,
        });
        let rank = permutation.len();
        if permutation[rank - 1] != rank - 1 {
            continue;
        }
        for (op, c) in rotations {
            if c.iter().any(|&x| b.shape(x).len() != rank) {
                continue;
            }
            let moved: Option<Vec<Id>> = c.iter().map(|&x| b.transpose(x, &permutation)).collect();
            found.extend(moved.and_then(|moved| b.add(op, &moved)));
        }
    }
    found
}
