//! Support for tests of this crate and of those that build on it: a table with cases of every op, and random tensors.

mod cases;
pub mod numbers;

pub use cases::{Case, cases, ty};
