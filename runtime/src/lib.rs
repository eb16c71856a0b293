//! Executes programs on the CPU.
pub mod arena;
pub mod compile;
pub mod element;
pub mod error;
pub mod host;
pub mod kernel;
pub mod math;
pub mod view;

mod fuse;
mod liveness;
