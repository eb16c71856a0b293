//! Transformations from a graph to a graph.
//!
//! [`rewrite`] and [`experts`] recognise composites. [`training_step`] and [`accumulation`] turn a whole training step into the
//! loss that it trains. [`padding`], [`unstack`], [`downscale`] and [`eight_bit`] give other graphs of the same model: with
//! sizes that devices divide, without stacked layers, small enough for a laptop, or with products in 8 bits.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod accumulation;
pub mod downscale;
pub mod eight_bit;
pub mod experts;
pub mod losses_of_step;
pub mod padding;
pub mod repetition;
pub mod rewrite;
pub mod training_step;
pub mod unstack;
