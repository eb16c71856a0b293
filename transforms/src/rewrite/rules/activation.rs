//! Elementwise functions, recognised by their values rather than by their form.

use super::super::egraph::Builder;
use super::structure::broadcasts;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Binary, Function, Op, Unary};
use egg::Id;
use std::collections::BTreeMap;

/// Rewrites small powers as products and roots.
pub(crate) fn power(b: &mut Builder, id: Id) -> Vec<Id> {
    if !b.ty(id).dtype.is_float() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (x, exponent) in b.binary(id, Binary::Power) {
        match b.number(exponent) {
            Some(1.0) => found.push(x),
            Some(2.0) => found.extend(b.add(Op::Binary(Binary::Multiply), &[x, x])),
            Some(0.5) => found.extend(b.add(Op::Unary(Unary::Sqrt), &[x])),
            Some(-0.5) => found.extend(b.add(Op::Unary(Unary::Rsqrt), &[x])),
            _ => {}
        }
    }
    found
}

/// `x / sqrt(y)` is `x rsqrt(y)`, with `y` repeated or not. `1 / sqrt(y)` is `rsqrt(y)`.
pub(crate) fn division_by_root(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    for (x, y) in b.binary(id, Binary::Divide) {
        let mut inverses = Vec::new();
        for u in b.unary(y, Unary::Sqrt) {
            inverses.extend(b.add(Op::Unary(Unary::Rsqrt), &[u]));
        }
        for (z, dims) in broadcasts(b, y) {
            for u in b.unary(z, Unary::Sqrt) {
                let root = b.add(Op::Unary(Unary::Rsqrt), &[u]);
                inverses.extend(root.and_then(|root| b.broadcast(root, id, &dims)));
            }
        }
        for inverse in inverses {
            match b.number(x) {
                Some(1.0) => found.push(inverse),
                _ => found.extend(b.add(Op::Binary(Binary::Multiply), &[x, inverse])),
            }
        }
    }
    found
}

/// `x (1 / y)` is `x / y`.
pub(crate) fn product_with_reciprocal(b: &mut Builder, id: Id) -> Vec<Id> {
    let mut found = Vec::new();
    if !b.ty(id).dtype.is_float() {
        return found;
    }
    for (x, inverse) in b.commuted(id, Binary::Multiply) {
        for (one, y) in b.binary(inverse, Binary::Divide) {
            if b.number(one) == Some(1.0) {
                found.extend(b.add(Op::Binary(Binary::Divide), &[x, y]));
            }
        }
        for (z, dims) in broadcasts(b, inverse) {
            for (one, y) in b.binary(z, Binary::Divide) {
                if b.number(one) == Some(1.0) {
                    let y = b.broadcast(y, id, &dims);
                    found.extend(y.and_then(|y| b.add(Op::Binary(Binary::Divide), &[x, y])));
                }
            }
        }
    }
    found
}

/// A known op, and the function that it computes.
type Known = (fn() -> Op, fn(f64) -> f64);

/// The functions to recognise.
const FUNCTIONS: [Known; 4] = [
    (|| Op::Unary(Unary::Logistic), logistic),
    (|| Function::Silu.into(), |x| x * logistic(x)),
    (|| Function::GeluErf.into(), |x| 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))),
    (
        || Function::GeluTanh.into(),
        |x| 0.5 * x * (1.0 + libm::tanh((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x))),
    ),
];

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// The arguments at which functions are compared.
const PROBES: [f64; 13] = [-7.3, -4.1, -2.9, -1.7, -0.9, -0.31, 0.0, 0.17, 0.63, 1.1, 2.3, 3.7, 6.9];

/// The largest number of classes between a function's argument and its value.
const MAX_CONE: usize = 24;

/// A function of one value whose values equal those of a known one.
pub(crate) fn activation(b: &mut Builder, id: Id) -> Vec<Id> {
    let dtype = b.ty(id).dtype;
    if !dtype.is_float() || b.number(id).is_some() {
        return Vec::new();
    }
    let outermost = |op: &Op, _: &[Id]| matches!(op, Op::Binary(Binary::Multiply | Binary::Divide)).then_some(());
    if b.find(id, outermost).is_empty() {
        return Vec::new();
    }
    let cone = cone(b, id);
    let bends = |x: &Id| {
        let curved = |op: &Op, _: &[Id]| {
            matches!(op, Op::Unary(Unary::Exponential | Unary::Logistic | Unary::Tanh | Unary::Erf | Unary::Erfc))
                .then_some(())
        };
        !b.find(*x, curved).is_empty()
    };
    if !cone.iter().any(bends) {
        return Vec::new();
    }
    // Constants are rounded to the type in which they are written.
    let tolerance = match dtype {
        DType::F32 | DType::F64 => 2e-6,
        _ => 4e-3,
    };
    for &x in cone.iter().filter(|&&x| !b.same(x, id) && b.ty(x) == b.ty(id)) {
        let values: Option<Vec<f64>> = PROBES.iter().map(|&p| value(b, id, x, p, &mut BTreeMap::new())).collect();
        let Some(values) = values else { continue };
        let error = |f: fn(f64) -> f64| {
            PROBES.iter().zip(&values).map(|(&p, v)| (f(p) - v).abs() / (1.0 + f(p).abs())).fold(0.0, f64::max)
        };
        let best = FUNCTIONS.iter().map(|(op, f)| (error(*f), op)).min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((error, op)) = best
            && error <= tolerance
        {
            return b.add(op(), &[x]).into_iter().collect();
        }
    }
    Vec::new()
}

/// The oldest elementwise op of a class.
fn step(b: &Builder, id: Id) -> Option<(Op, Vec<Id>)> {
    let of = |op: &Op, c: &[Id]| match op {
        // A stopped gradient is the same value with another gradient.
        Op::Unary(Unary::StopGradient) => None,
        Op::Unary(_) | Op::Binary(_) => Some((op.clone(), c.to_vec())),
        Op::Convert(_) if b.ty(c[0]).dtype.is_float() => Some((op.clone(), c.to_vec())),
        _ => None,
    };
    b.find(id, of).into_iter().next()
}

/// The classes that an elementwise value is computed from, up to a limit.
fn cone(b: &Builder, id: Id) -> Vec<Id> {
    let mut all = vec![b.egraph.find(id)];
    let mut at = 0;
    while at < all.len() && all.len() <= MAX_CONE {
        for child in step(b, all[at]).map(|(_, c)| c).unwrap_or_default() {
            let child = b.egraph.find(child);
            if b.number(child).is_none() && !all.contains(&child) {
                all.push(child);
            }
        }
        at += 1;
    }
    all
}

/// The value of a class if `x` is `p`. `None` if it depends on anything else.
fn value(b: &Builder, id: Id, x: Id, p: f64, known: &mut BTreeMap<Id, Option<f64>>) -> Option<f64> {
    let id = b.egraph.find(id);
    if b.same(id, x) {
        return Some(p);
    }
    if let Some(number) = b.number(id) {
        return Some(number);
    }
    if let Some(known) = known.get(&id) {
        return *known;
    }
    // Mark it unknown first, because classes may contain themselves.
    known.insert(id, None);
    if known.len() > 2 * MAX_CONE {
        return None;
    }
    let (op, children) = step(b, id)?;
    let dtype = b.ty(id).dtype;
    let operands: Option<Vec<f64>> = children.iter().map(|&c| value(b, c, x, p, known)).collect();
    let result = operands.and_then(|v| match op {
        Op::Unary(op) => Some(op.apply(v[0], dtype)),
        Op::Binary(op) => Some(op.apply(v[0], v[1], dtype)),
        _ => v.first().copied(),
    });
    known.insert(id, result);
    result
}
