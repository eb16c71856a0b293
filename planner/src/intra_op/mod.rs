//! Sharding within a stage: each op's strategy on a mesh, by integer programming.
//!
//! [`space`] lists what each node may do and prices it, [`statement`] states a run of nodes as a pairwise problem. For the
//! search such a run is a [`layer`], of which all but the ends is eliminated; what the search has chosen is solved again as a
//! [`stage`], with the storage of each parameter and memory at every point of the step in it. [`altiplano_solver`] solves such problems.

pub mod layer;
pub mod space;
pub mod stage;
pub mod statement;
