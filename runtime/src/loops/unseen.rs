//! Skips fully masked tiles, if the mask follows from indices, as in causal attention.
//!
//! Bounds of indices decide whether a comparison can hold anywhere in a tile. The text computes them before it loads
//! the tile. If it cannot hold, every value of the tile is masked. If the exponential that scales all sums is then
//! zero, which the text tests, the tile adds nothing and is skipped.

use super::scalar::{Scalar, Scalars, Var};
use super::{Phase, Reducer, Running};
use altiplano_ir::op::{Binary, Direction, Unary};
use std::collections::BTreeSet;

/// The condition that decides whether a tile is skipped.
pub(super) struct Unseen {
    /// A tile is not skipped if this can hold in it.
    pub seen: Var,
    /// The factor of all sums of the phase. Masked elements are computed without the branch for which `seen` holds.
    pub exponential: Var,
}

/// The condition for skipping tiles of a phase, if there is one.
pub(super) fn unseen(scalars: &Scalars, phase: &Phase) -> Option<Unseen> {
    let most = phase.running.as_ref().map(|Running { most, .. }| *most);
    let folds = phase.folds.iter().filter(|f| Some(f.slot) != most);
    if folds.clone().any(|f| f.reducer != Reducer::Sum) {
        return None;
    }
    let values: Vec<Var> = folds.map(|f| f.value).chain(phase.outer.iter().map(|o| o.value)).collect();
    let needed = scalars.with_operands(values.iter().copied());
    let products: BTreeSet<u32> = phase.inner.iter().map(|i| i.slot).collect();
    let of_kind = |kind: fn(&Scalar) -> bool| needed.iter().copied().filter(move |v| kind(scalars.get(*v)));
    let masks: BTreeSet<Var> = of_kind(|s| matches!(s, Scalar::Select(..)))
        .filter_map(|v| if let Scalar::Select(_, [p, ..]) = scalars.get(v) { Some(*p) } else { None })
        .filter(|p| is_bounded(scalars, *p))
        .collect();
    let exponentials: Vec<Var> = of_kind(|s| matches!(s, Scalar::Unary(Unary::Exponential, ..))).collect();
    let all = masks.iter().flat_map(|&seen| exponentials.iter().map(move |&exponential| Unseen { seen, exponential }));
    all.into_iter().find(|Unseen { seen, exponential }| {
        let product = |v: &Var| matches!(scalars.get(*v), Scalar::Slot(slot, _) if products.contains(slot));
        values.iter().all(|&v| vanishes(scalars, v, *exponential))
            && !hidden(scalars, *exponential, *seen).iter().any(product)
    })
}

/// The scalars that a scalar depends on where a mask hides, operands first.
pub(super) fn hidden(scalars: &Scalars, var: Var, seen: Var) -> Vec<Var> {
    let mut needed = BTreeSet::new();
    let mut open = vec![var];
    while let Some(v) = open.pop() {
        if needed.insert(v) {
            match scalars.get(v) {
                Scalar::Select(_, [p, _, other]) if *p == seen => open.push(*other),
                scalar => open.extend(scalar.operands()),
            }
        }
    }
    // Operands have lower numbers.
    needed.into_iter().collect()
}

/// Returns whether a scalar is zero wherever `zero` is, if all other scalars are finite.
fn vanishes(scalars: &Scalars, var: Var, zero: Var) -> bool {
    let also = |v: &Var| vanishes(scalars, *v, zero);
    var == zero
        || match scalars.get(var) {
            Scalar::Number(bits, _) => f64::from_bits(*bits) == 0.0,
            Scalar::Unary(Unary::Negate | Unary::StopGradient, _, a) => also(a),
            Scalar::Convert { from, to, value } => from.is_float() && to.is_float() && also(value),
            Scalar::Binary(Binary::Multiply, _, a, b) => also(a) || also(b),
            Scalar::Binary(Binary::Divide, dtype, a, _) => dtype.is_float() && also(a),
            Scalar::Binary(Binary::Add | Binary::Subtract, _, a, b) => also(a) && also(b),
            Scalar::Select(_, [_, a, b]) => also(a) && also(b),
            _ => false,
        }
}

/// True if the bounds of a scalar in a tile follow from the tile's position. For a condition, true if the position
/// decides whether it can hold. Of two conditions that must both hold one suffices, such as a causal mask beside one of
/// padding.
fn is_bounded(scalars: &Scalars, var: Var) -> bool {
    let scalar = scalars.get(var);
    let both = both_must_hold(scalar);
    has_bounds(scalar)
        && match both {
            Some(parts) => parts.iter().any(|&part| is_bounded(scalars, part)),
            None => scalar.operands().into_iter().all(|v| is_bounded(scalars, v)),
        }
}

/// The two conditions, if a scalar says that both hold.
fn both_must_hold(scalar: &Scalar) -> Option<[Var; 2]> {
    match scalar {
        Scalar::And(a, b) => Some([*a, *b]),
        Scalar::Binary(Binary::And, altiplano_ir::dtype::DType::Bool, a, b) => Some([*a, *b]),
        _ => None,
    }
}

/// True if bounds of a scalar follow from those of its operands.
fn has_bounds(scalar: &Scalar) -> bool {
    match scalar {
        Scalar::Row | Scalar::Step | Scalar::Index(_) | Scalar::Add(..) | Scalar::Times(..) => true,
        Scalar::Quotient(..) | Scalar::Remainder(..) | Scalar::Within(..) | Scalar::And(..) => true,
        Scalar::AsElement(_, dtype) | Scalar::Number(_, dtype) => dtype.is_integer() && dtype.bytes() >= 4,
        Scalar::Binary(Binary::Add | Binary::Subtract, dtype, ..) => dtype.is_integer() && dtype.bytes() >= 4,
        Scalar::Binary(Binary::Or | Binary::And, dtype, ..) => *dtype == altiplano_ir::dtype::DType::Bool,
        Scalar::Compare(_, dtype, ..) => dtype.is_integer(),
        _ => false,
    }
}

/// Prints lines that compute bounds of a scalar and its operands: `lK` and `hK` of scalar K, or `hK` for whether it can
/// be true. Rows are from `l_row` to `h_row`, iterations from `l_step` to `h_step`.
pub(super) fn bounds(scalars: &Scalars, var: Var) -> Vec<String> {
    let mut lines = Vec::new();
    for v in scalars.with_operands([var]).into_iter().filter(|v| is_bounded(scalars, *v)) {
        let (low, high) = (|v: &Var| format!("l{}", v.0), |v: &Var| format!("h{}", v.0));
        let both = |l: String, h: String| format!("const long long l{0} = {l}, h{0} = {h};", v.0);
        let can = |text: String| format!("const bool h{} = {text};", v.0);
        lines.push(match scalars.get(v) {
            Scalar::Row => both("l_row".into(), "h_row".into()),
            Scalar::Step => both("l_step".into(), "h_step".into()),
            Scalar::Index(value) => both(value.to_string(), value.to_string()),
            Scalar::Number(bits, _) => {
                let value = (f64::from_bits(*bits) as i64).to_string();
                both(value.clone(), value)
            }
            Scalar::AsElement(a, _) => both(low(a), high(a)),
            Scalar::Add(a, b) | Scalar::Binary(Binary::Add, _, a, b) => {
                both(format!("{} + {}", low(a), low(b)), format!("{} + {}", high(a), high(b)))
            }
            Scalar::Binary(Binary::Subtract, _, a, b) => {
                both(format!("{} - {}", low(a), high(b)), format!("{} - {}", high(a), low(b)))
            }
            Scalar::Times(a, by) if *by >= 0 => both(format!("{} * {by}", low(a)), format!("{} * {by}", high(a))),
            Scalar::Times(a, by) => both(format!("{} * {by}", high(a)), format!("{} * {by}", low(a))),
            Scalar::Quotient(a, by) => both(format!("{} / {by}", low(a)), format!("{} / {by}", high(a))),
            Scalar::Remainder(a, by) => {
                let (l, h) = (low(a), high(a));
                let one = format!("{l} / {by} == {h} / {by}");
                both(format!("{one} ? {l} % {by} : 0"), format!("{one} ? {h} % {by} : {by} - 1"))
            }
            Scalar::Within(a, n) => can(format!("{} >= 0 && {} < {n}", high(a), low(a))),
            Scalar::And(a, b) | Scalar::Binary(Binary::And, _, a, b) => {
                let known = [a, b].into_iter().filter(|part| is_bounded(scalars, **part));
                can(known.map(high).collect::<Vec<String>>().join(" && "))
            }
            Scalar::Binary(_, _, a, b) => can(format!("{} || {}", high(a), high(b))),
            Scalar::Compare(direction, _, a, b) => can(match direction {
                Direction::Ge => format!("{} >= {}", high(a), low(b)),
                Direction::Gt => format!("{} > {}", high(a), low(b)),
                Direction::Le => format!("{} <= {}", low(a), high(b)),
                Direction::Lt => format!("{} < {}", low(a), high(b)),
                Direction::Eq => format!("{} <= {} && {} >= {}", low(a), high(b), high(a), low(b)),
                Direction::Ne => "true".to_string(),
            }),
            // The others have no bounds and are never requested.
            _ => can("true".to_string()),
        });
    }
    lines
}
