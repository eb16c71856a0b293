//! The array functions of frameworks, composed of ops.
//!
//! PyTorch, ONNX and Hugging Face configs use softmax, layer norm and attention, with numpy's broadcasting and negative
//! axes. Each such function is written here once, so that a model becomes the same ops from every source. Functions
//! append to a graph and never panic. If operands do not fit, they return the [`ShapeError`] of the op that refused
//! them.

mod activation;
mod attention;
pub mod complex;
mod contraction;
pub mod fourier;
mod grouped;
mod linalg;
mod lookup;
mod loss;
mod norm;
mod pool;
mod recurrent;
mod reduction;
mod ring;
mod scan;
mod shape;
mod special;

#[cfg(test)]
mod tests;

pub use activation::*;
pub use attention::{
    Attention, RotaryHalves, attend, attention, attention_of_heads, attention_scores, attention_weights, causal_mask,
    masked_scores, repeat_heads, rotary,
};
pub use contraction::{Conv, contract, convolution, linear, matmul};
pub use grouped::{group_of_rows, grouped_dot};
pub use linalg::{MOST_ROWS, cholesky, solve, solve_triangular};
pub use lookup::{among_greatest, embedding, gates, one_hot, sort, take, take_along, top_k};
pub(crate) use loss::label_losses;
pub use loss::{MOST_CHUNKS, cross_entropy, linear_label_losses, mse};
pub use norm::{batch_norm, batch_norm_training, group_norm, instance_norm, layer_norm, rms_norm};
pub use pool::{Pool, adaptive_avg_pool, avg_pool, max_pool};
pub use recurrent::{Cell, Gate, MOST_STEPS, Recurrent};
pub use reduction::{arg_max, cumulative, log_sum_exp, max, mean, min, prod, reduce, sum, variance};
pub use ring::{MOST_BLOCKS, ring_attention};
pub use scan::selective_scan;
pub use shape::*;
pub use special::{
    acos, acosh, asin, asinh, atan, atanh, cosh, digamma, erf_inv, lgamma, normal_cdf, normal_quantile, sinh,
};

pub use crate::op::ShapeError;

/// The result of these functions: a value of the graph, or the reason why operands do not fit.
pub type Built = Result<crate::graph::ValueId, ShapeError>;
