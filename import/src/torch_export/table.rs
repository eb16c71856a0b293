//! Maps each op of a program to its lowering. The tables of the op families have one entry per op.

use super::call::{Call, Out};
use super::ops;
use super::report::Reject;
use altiplano_ir::op::{Binary, Direction, Reducer, Unary};

/// The result of a lowering, or the reason that it failed.
pub type Lowered = Result<Out, Reject>;

/// The lowering of an op.
#[derive(Clone, Copy)]
pub enum Lowering {
    Function(fn(&mut Call<'_>) -> Lowered),
    /// A function of floats. Integers are converted to floats.
    OfFloats(Unary),
    /// A function of any number. The result has the same type.
    OfNumbers(Unary),
    /// A function that leaves integers unchanged.
    ToWhole(Unary),
    Binary(Binary),
    /// A comparison of `self` and `other`.
    Compare(Direction),
    /// An op on truth values.
    Logical(Binary),
    /// Reduces over `dim`, or over all dimensions.
    Reduce(Reducer),
    /// A function of sizes.
    Sizes(fn(&[f64]) -> Option<f64>),
    /// An assertion about values that already holds.
    Ignored,
}

const FAMILIES: [&[(&str, Lowering)]; 15] = [
    ops::elementwise::TABLE,
    ops::activation::TABLE,
    ops::reduction::TABLE,
    ops::shape::TABLE,
    ops::creation::TABLE,
    ops::indexing::TABLE,
    ops::contraction::TABLE,
    ops::image::TABLE,
    ops::loss::TABLE,
    ops::random::TABLE,
    ops::recurrent::TABLE,
    ops::program::TABLE,
    ops::spectral::TABLE,
    ops::sampling::TABLE,
    ops::linalg::TABLE,
];

/// The op's name and its lowering. An op in place is lowered as its counterpart that returns a new value.
pub(crate) fn find(target: &str) -> (&str, Option<Lowering>) {
    let lookup = |key: &str| {
        let mut entries = FAMILIES.iter().copied().flatten();
        entries.find(|(name, _)| *name == key).map(|(_, lowering)| *lowering)
    };
    if let Some(rest) = target.strip_prefix("torch.ops.aten.") {
        let name = rest.split('.').next().unwrap_or(rest);
        let in_place = name.ends_with('_') && !name.ends_with("__");
        let key = if in_place { &name[..name.len() - 1] } else { name };
        return (name, lookup(key));
    }
    let name = target.strip_prefix("torch.ops.").or(target.strip_prefix("torch._functorch").map(|_| &target[6..]));
    let name = name.unwrap_or(target).trim_end_matches('_');
    (name, lookup(name))
}
