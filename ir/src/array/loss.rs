//! Losses: means over everything that is compared.

use super::*;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Op, Unary};

/// The mean of `-log softmax(logits)[label]` over all labels; `logits` has one dimension more, `dim`, of classes. Narrow floats
/// are compared in f32, and the loss is one.
pub fn cross_entropy(g: &mut Graph, logits: ValueId, labels: ValueId, dim: usize) -> Built {
    let dtype = g.ty(logits).dtype;
    let wide = if dtype.is_float() && dtype.bytes() < 4 { g.convert(logits, crate::dtype::DType::F32) } else { logits };
    let log = log_softmax(g, wide, dim)?;
    let labels = unsqueeze(g, labels, dim as i64)?;
    let hit = take_along(g, log, dim, labels, false)?;
    let all: Vec<usize> = (0..g.shape(hit).len()).collect();
    let average = mean(g, hit, &all, false)?;
    unary(g, Unary::Negate, average)
}

/// The mean square difference.
pub fn mse(g: &mut Graph, values: ValueId, targets: ValueId) -> Built {
    let difference = binary(g, Binary::Subtract, values, targets)?;
    let square = g.push(Op::Binary(Binary::Multiply), &[difference, difference])?;
    let all: Vec<usize> = (0..g.shape(square).len()).collect();
    mean(g, square, &all, false)
}
