//! What plans say of time, memory and schedules, and that they hold.

#[path = "../common/mod.rs"]
mod common;

mod kernels;
mod late_gradients;
mod matrix;
mod memory;
mod offload;
mod offload_activations;
mod pipelines;
mod random_pairs;
mod record;
mod search;
mod servers;
mod stage_tables;
