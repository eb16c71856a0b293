//! The search: from a graph and a cluster to a plan, and from a plan to programs.
//!
//! [`plan`] reads top to bottom: layers are cut, each layer's strategies are solved on each mesh
//! ([`intra_op`]), layers are put together to stages and stages to a pipeline ([`inter_op`]), the best candidates are
//! lowered ([`lower`]) and judged ([`predict`]).

pub mod inter_op;
pub mod intra_op;
pub mod layers;
pub mod lower;
pub mod request;

pub use lower::lower;
pub use request::{PlanFailure, Progress, Request, Silent};
