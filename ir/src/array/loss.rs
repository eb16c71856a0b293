//! Losses: means over everything that is compared.

use super::*;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Op, Unary};

/// `-log softmax(logits)[label]` for each label; `logits` has one dimension more, `dim`, of classes.
pub fn label_losses(g: &mut Graph, logits: ValueId, labels: ValueId, dim: usize) -> Built {
    let log = log_softmax(g, logits, dim)?;
    let labels = unsqueeze(g, labels, dim as i64)?;
    let hit = take_along(g, log, dim, labels, false)?;
    let hit = squeeze(g, hit, &[dim])?;
    unary(g, Unary::Negate, hit)
}

/// The mean of [`label_losses`]. Narrow floats are compared in f32, and the loss is one.
pub fn cross_entropy(g: &mut Graph, logits: ValueId, labels: ValueId, dim: usize) -> Built {
    let dtype = g.ty(logits).dtype;
    let wide = if dtype.is_float() && dtype.bytes() < 4 { g.convert(logits, crate::dtype::DType::F32) } else { logits };
    let losses = label_losses(g, wide, labels, dim)?;
    let all: Vec<usize> = (0..g.shape(losses).len()).collect();
    mean(g, losses, &all, false)
}

/// The mean square difference.
pub fn mse(g: &mut Graph, values: ValueId, targets: ValueId) -> Built {
    let difference = binary(g, Binary::Subtract, values, targets)?;
    let square = g.push(Op::Binary(Binary::Multiply), &[difference, difference])?;
    let all: Vec<usize> = (0..g.shape(square).len()).collect();
    mean(g, square, &all, false)
}
