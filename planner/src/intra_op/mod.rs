//! Sharding within a stage: each op's strategy on a mesh, by integer programming.
//!
//! [`space`] lists what each node may do and prices it, [`layer`] states the program of one layer, [`solve`]
//! solves such programs exactly.

pub mod layer;
pub mod solve;
pub mod space;
