//! The kernels: what steps of a compiled body do with stored tensors. Each file is one kind of work.

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
