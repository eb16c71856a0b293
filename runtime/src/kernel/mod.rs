//! Kernels: the computations of a compiled body's steps on stored tensors. Each file has one kind.

pub mod bitcast;
pub mod chain;
pub mod convolution;
pub mod copy;
pub mod dot;
pub mod gather;
pub mod grouped;
pub mod instruction;
pub mod matrix;
pub mod reduce;
pub mod rows;
pub mod window;
