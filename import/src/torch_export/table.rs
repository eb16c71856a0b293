//! Which op of a program is lowered how: one entry each, in the tables of the families.

use super::call::{Call, Out};
use super::ops;
use super::report::Reject;
use altiplano_ir::op::{Binary, Direction, Reducer, Unary};

/// What a lowering gives, or why it does not.
pub type Lowered = Result<Out, Reject>;

/// How an op is lowered.
#[derive(Clone, Copy)]
pub enum Lowering {
    Function(fn(&mut Call<'_>) -> Lowered),
    /// A function of floats; integers become floats first.
    OfFloats(Unary),
    /// A function of any number, which keeps its type.
    OfNumbers(Unary),
    /// A function that leaves integers as they are.
    ToWhole(Unary),
    Binary(Binary),
    /// A comparison of `self` and `other`.
    Compare(Direction),
    /// Of truth values.
    Logical(Binary),
    /// Combines the elements of `dim`, or all.
    Reduce(Reducer),
    /// A function of sizes.
    Sizes(fn(&[f64]) -> Option<f64>),
    /// Says something about values that holds already.
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

/// The op's name, and how it is lowered. A change in place is lowered as the op that gives a new value.
pub fn find(target: &str) -> (&str, Option<Lowering>) {
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
