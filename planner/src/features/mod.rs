//! Choices of a plan beyond sharding and stages: forms of the model, and where and by what a plan runs.

pub mod chunked_loss;
pub mod modules;
pub mod offload;
pub mod one_device;
pub mod overlaps;
pub(crate) mod padding;
pub mod parallelism;
pub(crate) mod pins;
pub mod rings;
pub mod scaled_products;
pub(crate) mod servers;
pub mod stacks;
pub mod stages;
pub mod target;
