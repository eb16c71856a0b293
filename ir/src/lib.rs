//! The data types of Altiplano and their semantics.
//!
//! A [`Graph`](graph::Graph) is a list of ops in topological order. Each op (see [`op`]) defines its shape function,
//! its sharding rule, its gradient and its reference semantics in one file. Planning, pricing, partitioning and
//! execution follow from these.
//!
//! The planner hands a [`Plan`](plan::Plan) and a [`Program`](program::Program) to the runtime. Both are plain data,
//! verified before use.

#![forbid(unsafe_code)]

pub mod array;
pub mod attention;
pub mod autodiff;
pub mod batch;
pub mod certificate;
pub mod cluster;
pub mod dot;
pub mod dtype;
pub mod expand;
pub mod float;
pub mod graph;
pub mod interpret;
pub mod json;
pub mod kernels;
pub mod literal;
pub mod loss_scale;
pub mod mesh;
pub mod names;
pub mod op;
pub mod optimizer;
pub mod order;
pub mod padding;
pub mod plan;
pub mod program;
pub mod recompute;
pub mod reshard;
pub mod rng;
pub mod rule;
pub mod servers;
mod sets;
pub mod sharding;
pub mod simplify;
pub mod softmax_max;
pub mod storage;
pub(crate) mod target;
pub mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod types;
pub mod visible;
pub mod work;
