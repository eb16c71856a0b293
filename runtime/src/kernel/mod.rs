//! The kernels: what steps of a compiled body do with stored tensors. Each file is one kind of work.

pub mod chain;
pub mod copy;
pub mod dot;
pub mod gather;
pub mod instruction;
pub mod reduce;
