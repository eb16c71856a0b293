//! Losses: means over all compared elements.

use super::*;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Op, Reshape, Unary};

/// `-log softmax(logits)[label]` for each label. `logits` has one more dimension, the classes, at `dim`.
pub(crate) fn label_losses(g: &mut Graph, logits: ValueId, labels: ValueId, dim: usize) -> Built {
    let log = log_softmax(g, logits, dim)?;
    let labels = unsqueeze(g, labels, dim as i64)?;
    let hit = take_along(g, log, dim, labels, false)?;
    let hit = squeeze(g, hit, &[dim])?;
    unary(g, Unary::Negate, hit)
}

/// The largest number of chunks of a loss. The graph contains the nodes of each.
pub const MOST_CHUNKS: u64 = 256;

/// `label_losses` of the logits of features `x` `[.., positions, features]` with weight `w`. Dimension `contract` of
/// `w` is the features, and its other one the classes. `labels` and the result are `[.., positions]`.
///
/// Positions are processed in `chunks`, which must divide them. Chunk `i` has every position that is `i` modulo
/// `chunks`, so a device with a block of positions has a part of every chunk. Only the logits of one chunk exist at a
/// time, because the backward pass recomputes them (see [`Function::recomputes_inside`]).
///
/// Every chunk reads `x` and `w` through an extra reshape that changes nothing. It keeps the kernels of chunks apart
/// ([`crate::kernels`]). It also makes the gradients of chunks join one after the other, so that their sum never waits
/// for the last chunk.
///
/// Narrow floats are compared in f32.
///
/// [`Function::recomputes_inside`]: crate::op::Function::recomputes_inside
pub fn linear_label_losses(g: &mut Graph, [x, w, labels]: [ValueId; 3], contract: usize, chunks: u64) -> Built {
    let (shape, weight) = (g.shape(x).to_vec(), g.shape(w).to_vec());
    let Some((&features, positions)) = shape.split_last().filter(|(_, positions)| !positions.is_empty()) else {
        return Err(ShapeError::Attribute("features of a loss have a dimension of positions and one of features"));
    };
    if weight.len() != 2 || contract > 1 {
        return Err(ShapeError::Attribute("the weight of a loss is a matrix"));
    }
    if weight[contract] != features {
        return Err(ShapeError::SizesDiffer {
            what: "features and the weight",
            left: features,
            right: weight[contract],
        });
    }
    if g.shape(labels) != positions {
        return Err(ShapeError::Attribute("there is a label for each position"));
    }
    let (last, num_positions) = (positions.len() - 1, positions[positions.len() - 1]);
    if chunks == 0 || chunks > MOST_CHUNKS || num_positions % chunks != 0 {
        return Err(ShapeError::Attribute("chunks of a loss must divide its positions, and be 256 at most"));
    }
    let rows = num_positions / chunks;
    let in_chunks: Vec<u64> = positions[..last].iter().copied().chain([rows, chunks]).collect();
    let of_features: Vec<u64> = in_chunks.iter().copied().chain([features]).collect();
    let mut x = reshape(g, x, &of_features)?;
    let labels = reshape(g, labels, &in_chunks)?;
    let mut w = w;
    let mut losses = Vec::with_capacity(chunks as usize);
    for chunk in 0..chunks as i64 {
        if chunk > 0 {
            (x, w) = (passed_on(g, x)?, passed_on(g, w)?);
        }
        let of_chunk = select_dim(g, x, last + 1, chunk)?;
        let logits = super::contract(g, of_chunk, w, last + 1, contract)?;
        let dtype = g.ty(logits).dtype;
        let logits = if dtype.bytes() < 4 { g.convert(logits, crate::dtype::DType::F32) } else { logits };
        let labels = select_dim(g, labels, last + 1, chunk)?;
        losses.push(label_losses(g, logits, labels, last + 1)?);
    }
    let losses = stack(g, &losses, last + 1)?;
    reshape(g, losses, positions)
}

/// The same value, as a node of its own.
fn passed_on(g: &mut Graph, x: ValueId) -> Built {
    let shape = g.shape(x).to_vec();
    g.push(Op::Reshape(Reshape { shape }), &[x])
}

/// The mean of `label_losses`. Narrow floats are compared in f32, and the loss is then an f32.
pub fn cross_entropy(g: &mut Graph, logits: ValueId, labels: ValueId, dim: usize) -> Built {
    let dtype = g.ty(logits).dtype;
    let wide = if dtype.is_float() && dtype.bytes() < 4 { g.convert(logits, crate::dtype::DType::F32) } else { logits };
    let losses = label_losses(g, wide, labels, dim)?;
    let all: Vec<usize> = (0..g.shape(losses).len()).collect();
    mean(g, losses, &all, false)
}

/// The mean squared difference.
pub fn mse(g: &mut Graph, values: ValueId, targets: ValueId) -> Built {
    let difference = binary(g, Binary::Subtract, values, targets)?;
    let square = g.push(Op::Binary(Binary::Multiply), &[difference, difference])?;
    let all: Vec<usize> = (0..g.shape(square).len()).collect();
    mean(g, square, &all, false)
}
