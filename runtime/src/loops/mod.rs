//! Loop programs: what a fused kernel computes, as scalar loops over rows, before it is text for a device.
//!
//! A kernel of [`altiplano_ir::kernels`] becomes one or a few [`Launch`]es. Each goes over rows, which are independent; a row
//! goes through phases, each a loop whose iterations may be spread over threads, and which leaves reductions for the phases after
//! it. Views (reshapes, slices, transposes, broadcasts) are arithmetic on indices and move nothing. The same program is printed
//! for a device ([`cuda`]) and run by a slow interpreter ([`interpret`]) that says what it means.

mod build;
mod convolution;
pub mod cuda;
mod indexed;
pub mod interpret;
mod scalar;
mod tiles;
mod tiles_text;
mod unseen;

pub use build::{Unsupported, launches};
pub use convolution::{direct, gather, rounded};
pub use scalar::{Scalar, Scalars, Var};

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::Reducer;

/// What a pointer of a launch points at.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A value of the body's graph that is in memory: a leaf, or what this or another kernel writes.
    Value(ValueId),
    /// The elements of a value that depends on no leaf, known beforehand.
    Constant(ValueId),
    /// For each window of a select-and-scatter the position in it that is selected; for each element of a scatter that replaces, the
    /// last index vector that writes it, or -1.
    Selected(ValueId),
}

/// A pointer that a launch takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    pub source: Source,
    pub dtype: DType,
    pub elements: u64,
    pub written: bool,
}

/// How rows are spread over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spread {
    /// A thread takes a whole row.
    Thread,
    /// A block of threads takes a row together.
    Block,
    /// Neighbouring rows are neighbours in memory: a block takes some of them, and several threads share each.
    Columns,
    /// A block takes a tile of rows and goes through phases by tiles of iterations, so that what products read of memory is read
    /// once for many of them. So many rows, one after the other, read the same of it in the same iterations.
    Tiles(u64),
}

/// Reduces a value over the iterations of a phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fold {
    pub value: Var,
    pub reducer: Reducer,
    pub dtype: DType,
    /// What later phases call it.
    pub slot: u32,
}

/// Leaves a value in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Store {
    pub param: u32,
    pub index: Var,
    pub value: Var,
    /// Only where this is true.
    pub guard: Option<Var>,
    /// Combined with what is there, by whoever comes first.
    pub combines: Option<Reducer>,
}

/// A number that a launch is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Coordinate {
    /// The position of the device along mesh axes.
    Along(Vec<AxisId>),
    /// What the command says: where a tile starts.
    Start,
}

/// Elements of a parameter that lie `stride` apart, the first of them where `base` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Strip {
    pub param: u32,
    pub base: Var,
    pub stride: u64,
    pub length: u64,
}

/// The sum of products of two strips of equal length, one that follows from the row alone and one that follows from the row's
/// group ([`Spread::Tiles`]) and the iteration. Each iteration of the phase finds it in the slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Inner {
    pub of_row: Strip,
    pub of_step: Strip,
    pub slot: u32,
}

/// The sum over iterations of a strip times a scalar. In later phases the slot holds at each iteration the element of that number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outer {
    pub value: Var,
    pub of_step: Strip,
    pub slot: u32,
    /// At the end of its phase it is divided by this slot, a fold of the same phase.
    pub divided: Option<u32>,
}

/// How a phase goes on with a maximum that is not complete (Milakov and Gimelshein 2018, Online normalizer calculation for softmax).
#[derive(Clone, Debug, PartialEq)]
pub struct Running {
    /// A fold of the phase, which its other folds and sums take as it is so far. They take all other folds of the phase for 1.
    pub most: u32,
    /// Folds and sums that are multiplied by `exp(before - after)` where the maximum rises.
    pub scaled: Vec<u32>,
}

/// A loop over `length` iterations, which are independent but for folds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Phase {
    pub length: u64,
    pub folds: Vec<Fold>,
    pub stores: Vec<Store>,
    /// With [`Spread::Tiles`] only, as is all that follows.
    pub inner: Vec<Inner>,
    pub outer: Vec<Outer>,
    pub running: Option<Running>,
}

/// A loop over rows, all of which may run at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub params: Vec<Param>,
    pub coordinates: Vec<Coordinate>,
    pub scalars: Scalars,
    pub rows: u64,
    pub spread: Spread,
    pub phases: Vec<Phase>,
}

impl Launch {
    /// The scalars that a phase computes in each iteration, operands first.
    pub fn needs(&self, phase: &Phase) -> Vec<Var> {
        let stores = phase.stores.iter().flat_map(|s| [s.index, s.value].into_iter().chain(s.guard));
        let summed = phase.folds.iter().map(|f| f.value).chain(phase.outer.iter().map(|o| o.value));
        let strips = phase.inner.iter().flat_map(|i| [i.of_row.base, i.of_step.base]);
        let strips = strips.chain(phase.outer.iter().map(|o| o.of_step.base));
        self.scalars.with_operands(stores.chain(summed).chain(strips))
    }
}
