//! Sharding within a stage: selects each op's strategy on a mesh by integer programming.
//!
//! [`space`] lists the strategies of each node with their prices, and `ilp` states a run of nodes as a
//! pairwise problem. For the search, such a run is a [`layer`], of which all variables except those at its ends
//! are eliminated. The chosen stages are solved again as a [`stage`], with the storage of each parameter and
//! the memory at every point of the step. [`altiplano_solver`] solves these problems.

pub(crate) mod dims;
pub(crate) mod ilp;
pub mod layer;
pub(crate) mod recompute_fraction;
pub mod space;
pub mod stage;
pub(crate) mod stage_cost;
