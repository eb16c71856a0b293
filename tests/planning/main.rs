//! Checks the time, memory and schedules that plans state.

#[path = "../common/mod.rs"]
mod common;

mod attention_kernels;
mod found_orders;
mod given_stages;
mod joined_bodies;
mod kernels;
mod late_gradients;
mod matrix;
mod memory;
mod modules;
mod offload;
mod offload_activations;
mod pipelines;
mod random_pairs;
mod record;
mod scaled_products;
mod search;
mod servers;
mod stage_tables;
mod targets;
