//! Normalisations by mean and variance. Narrow floats are normalised in f32, as frameworks do.

use super::*;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Op, Unary};

/// `(x - mean) / sqrt(variance + eps)` over `dims`.
fn standardised(g: &mut Graph, x: ValueId, dims: &[usize], eps: f64) -> Built {
    let centre = mean(g, x, dims, true)?;
    let distance = binary(g, Binary::Subtract, x, centre)?;
    let square = g.push(Op::Binary(Binary::Multiply), &[distance, distance])?;
    let spread = mean(g, square, dims, true)?;
    let scale = inverse_root(g, spread, eps)?;
    binary(g, Binary::Multiply, distance, scale)
}

fn inverse_root(g: &mut Graph, spread: ValueId, eps: f64) -> Built {
    let safe = with_number(g, Binary::Add, spread, eps)?;
    unary(g, Unary::Rsqrt, safe)
}

/// `x weight + bias`, with broadcasting, in the type of `x`.
fn affine(g: &mut Graph, x: ValueId, weight: Option<ValueId>, bias: Option<ValueId>) -> Built {
    let mut y = x;
    if let Some(weight) = weight {
        y = binary(g, Binary::Multiply, y, weight)?;
    }
    match bias {
        Some(bias) => binary(g, Binary::Add, y, bias),
        None => Ok(y),
    }
}

fn last_dims(g: &Graph, x: ValueId, count: usize) -> Result<Vec<usize>, ShapeError> {
    let rank = g.shape(x).len();
    let first = rank.checked_sub(count).ok_or(ShapeError::DimOutOfRange { dim: count as u64, rank })?;
    Ok((first..rank).collect())
}

/// Converts a value to the float type of `like`, in which the norm is computed.
fn as_wide(g: &mut Graph, value: Option<ValueId>, like: ValueId) -> Option<ValueId> {
    let dtype = g.ty(like).dtype;
    value.map(|v| g.convert(v, dtype))
}

/// Layer norm over the last `num_dims` dimensions, which are those of weight and bias.
pub fn layer_norm(
    g: &mut Graph,
    x: ValueId,
    num_dims: usize,
    weight: Option<ValueId>,
    bias: Option<ValueId>,
    eps: f64,
) -> Built {
    let dims = last_dims(g, x, num_dims)?;
    in_f32(g, x, |g, x| {
        let (weight, bias) = (as_wide(g, weight, x), as_wide(g, bias, x));
        let y = standardised(g, x, &dims, eps)?;
        affine(g, y, weight, bias)
    })
}

/// `x / sqrt(mean(x^2) + eps)` over the last `num_dims` dimensions, converted back to the type of `x`, times the
/// weight.
pub fn rms_norm(g: &mut Graph, x: ValueId, num_dims: usize, weight: Option<ValueId>, eps: f64) -> Built {
    let dims = last_dims(g, x, num_dims)?;
    let y = in_f32(g, x, |g, x| {
        let square = g.push(Op::Binary(Binary::Multiply), &[x, x])?;
        let spread = mean(g, square, &dims, true)?;
        let scale = inverse_root(g, spread, eps)?;
        binary(g, Binary::Multiply, x, scale)
    })?;
    let weight = as_wide(g, weight, y);
    affine(g, y, weight, None)
}

/// Reshapes one value per feature to `[features, 1, ..]`, which broadcasts if features are dimension `dim` of `rank`.
fn per_feature(g: &mut Graph, value: Option<ValueId>, dim: usize, rank: usize) -> Result<Option<ValueId>, ShapeError> {
    let Some(value) = value else { return Ok(None) };
    let size = g.ty(value).elements();
    let ones = vec![1; rank.saturating_sub(dim + 1)];
    reshape(g, value, &[&[size], ones.as_slice()].concat()).map(Some)
}

/// Batch norm with given statistics for each feature (dimension `dim`). It is one factor and one offset per feature.
pub fn batch_norm(
    g: &mut Graph,
    x: ValueId,
    dim: usize,
    weight: Option<ValueId>,
    bias: Option<ValueId>,
    mean: ValueId,
    variance: ValueId,
    eps: f64,
) -> Built {
    let rank = g.shape(x).len();
    if dim >= rank {
        return Err(ShapeError::DimOutOfRange { dim: dim as u64, rank });
    }
    in_f32(g, x, |g, x| {
        let dtype = g.ty(x).dtype;
        let [weight, bias] = [weight, bias].map(|v| v.map(|v| g.convert(v, dtype)));
        let (mean, variance) = (g.convert(mean, dtype), g.convert(variance, dtype));
        let mut scale = inverse_root(g, variance, eps)?;
        if let Some(weight) = weight {
            scale = g.push(Op::Binary(Binary::Multiply), &[weight, scale])?;
        }
        let shift = g.push(Op::Binary(Binary::Multiply), &[mean, scale])?;
        let offset = match bias {
            Some(bias) => g.push(Op::Binary(Binary::Subtract), &[bias, shift])?,
            None => unary(g, Unary::Negate, shift)?,
        };
        let (scale, offset) = (per_feature(g, Some(scale), dim, rank)?, per_feature(g, Some(offset), dim, rank)?);
        affine(g, x, scale, offset)
    })
}

/// Batch norm with the statistics of this batch: for each feature (dimension `dim`), over all other dimensions.
pub fn batch_norm_training(
    g: &mut Graph,
    x: ValueId,
    dim: usize,
    weight: Option<ValueId>,
    bias: Option<ValueId>,
    eps: f64,
) -> Built {
    let rank = g.shape(x).len();
    if rank < 2 {
        return Err(ShapeError::Attribute("a batch norm needs a batch and features"));
    }
    if dim >= rank {
        return Err(ShapeError::DimOutOfRange { dim: dim as u64, rank });
    }
    let dims: Vec<usize> = (0..rank).filter(|&d| d != dim).collect();
    in_f32(g, x, |g, x| {
        let (weight, bias) = (as_wide(g, weight, x), as_wide(g, bias, x));
        let y = standardised(g, x, &dims, eps)?;
        let (weight, bias) = (per_feature(g, weight, dim, rank)?, per_feature(g, bias, dim, rank)?);
        affine(g, y, weight, bias)
    })
}

/// Group norm of `[N, C, spatial..]`. Each group of features is standardised over its features and all positions of a
/// sample.
pub fn group_norm(
    g: &mut Graph,
    x: ValueId,
    groups: u64,
    weight: Option<ValueId>,
    bias: Option<ValueId>,
    eps: f64,
) -> Built {
    let shape = g.shape(x).to_vec();
    if shape.len() < 2 || groups == 0 || !shape[1].is_multiple_of(groups) {
        return Err(ShapeError::Attribute("groups must divide the features"));
    }
    in_f32(g, x, |g, x| {
        let (weight, bias) = (as_wide(g, weight, x), as_wide(g, bias, x));
        let split = [&[shape[0], groups, shape[1] / groups], &shape[2..]].concat();
        let y = reshape(g, x, &split)?;
        let y = standardised(g, y, &(2..split.len()).collect::<Vec<_>>(), eps)?;
        let y = reshape(g, y, &shape)?;
        let (weight, bias) = (per_feature(g, weight, 1, shape.len())?, per_feature(g, bias, 1, shape.len())?);
        affine(g, y, weight, bias)
    })
}

/// Standardises each feature of each sample over its positions.
pub fn instance_norm(g: &mut Graph, x: ValueId, weight: Option<ValueId>, bias: Option<ValueId>, eps: f64) -> Built {
    let rank = g.shape(x).len();
    if rank < 3 {
        return Err(ShapeError::Attribute("an instance norm needs a batch, features and positions"));
    }
    in_f32(g, x, |g, x| {
        let (weight, bias) = (as_wide(g, weight, x), as_wide(g, bias, x));
        let y = standardised(g, x, &(2..rank).collect::<Vec<_>>(), eps)?;
        let (weight, bias) = (per_feature(g, weight, 1, rank)?, per_feature(g, bias, 1, rank)?);
        affine(g, y, weight, bias)
    })
}
