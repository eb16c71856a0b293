//! Loop programs: the computation of a fused kernel as scalar loops over rows, before it is printed for a device.
//!
//! A kernel of [`altiplano_ir::kernels`] becomes one or a few [`Launch`]es. Each iterates over independent rows. A row
//! runs through phases, each a loop whose iterations may be spread over threads, and which passes reductions to later
//! phases. Views (reshapes, slices, transposes, broadcasts) are index arithmetic and move no data.
//!
//! [`cuda`] prints a program for a device. [`interpret`] runs it slowly and defines its meaning.

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

/// The data behind a pointer of a launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A value of the body's graph in memory: a leaf, or a value written by this or another kernel.
    Value(ValueId),
    /// The elements of a value that depends on no leaf, known beforehand.
    Constant(ValueId),
    /// For each window of a select-and-scatter, the selected position in it. For each element of a replacing scatter,
    /// the last index vector that writes it, or -1.
    Selected(ValueId),
}

/// A pointer parameter of a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    pub source: Source,
    pub dtype: DType,
    pub elements: u64,
    pub written: bool,
}

/// The distribution of rows over threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spread {
    /// One thread per row.
    Thread,
    /// One block of threads per row.
    Block,
    /// Adjacent rows are adjacent in memory: a block takes some of them, and several threads share each.
    Columns,
    /// A block takes a tile of rows and runs each phase by tiles of iterations, so that the operands of products are
    /// read once for many of them. The number is the count of consecutive rows that read the same data in the same
    /// iterations.
    Tiles(u64),
}

/// Reduces a value over the iterations of a phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fold {
    pub value: Var,
    pub reducer: Reducer,
    pub dtype: DType,
    /// The slot by which later phases read it.
    pub slot: u32,
}

/// Writes a value to memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Store {
    pub param: u32,
    pub index: Var,
    pub value: Var,
    /// Stores only if this is true.
    pub guard: Option<Var>,
    /// Combines with the existing element, in any order.
    pub combines: Option<Reducer>,
}

/// An integer argument of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Coordinate {
    /// The position of the device along mesh axes.
    Along(Vec<AxisId>),
    /// The start of a tile, given by the command.
    Start,
}

/// Elements of a parameter at distance `stride`, the first at `base`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Strip {
    pub param: u32,
    pub base: Var,
    pub stride: u64,
    pub length: u64,
}

/// The sum of products of two strips of equal length. One follows from the row alone. The other follows from the row's
/// group ([`Spread::Tiles`]) and the iteration. Each iteration of the phase reads the sum from the slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Inner {
    pub of_row: Strip,
    pub of_step: Strip,
    pub slot: u32,
}

/// The sum over iterations of a strip times a scalar. In later phases, iteration `i` reads element `i` of the sum from
/// the slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outer {
    pub value: Var,
    pub of_step: Strip,
    pub slot: u32,
    /// The slot of a fold of the same phase, by which the sum is divided at the end of the phase.
    pub divided: Option<u32>,
}

/// Online normalisation: a phase that uses a running maximum (Milakov and Gimelshein 2018, Online normalizer
/// calculation for softmax).
#[derive(Clone, Debug, PartialEq)]
pub struct Running {
    /// The slot of the maximum, a fold of the phase. The phase's other folds and sums use its running value, and treat
    /// all other folds of the phase as 1.
    pub most: u32,
    /// Folds and sums that are multiplied by `exp(before - after)` when the maximum rises.
    pub scaled: Vec<u32>,
}

/// A loop over `length` iterations, which are independent except for folds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Phase {
    pub length: u64,
    pub folds: Vec<Fold>,
    pub stores: Vec<Store>,
    /// This field and those after it require [`Spread::Tiles`].
    pub inner: Vec<Inner>,
    pub outer: Vec<Outer>,
    pub running: Option<Running>,
}

/// A loop over rows, all of which may run in parallel.
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
