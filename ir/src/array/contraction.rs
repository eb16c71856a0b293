//! Matrix products and convolutions.

use super::*;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Convolution, DotGeneral, ImageDims, KernelDims, Op, WindowDim};

/// numpy's matmul. The last two dimensions are matrices, and those before them broadcast. A vector is a row on the left
/// and a column on the right.
pub fn matmul(g: &mut Graph, a: ValueId, b: ValueId) -> Built {
    let (left, right) = (g.shape(a).to_vec(), g.shape(b).to_vec());
    if left.is_empty() || right.is_empty() {
        return Err(ShapeError::Attribute("a matrix product needs at least one dimension on each side"));
    }
    // A single matrix on the right serves all on the left, so there is no batch.
    if right.len() <= 2 {
        return contract(g, a, b, left.len() - 1, 0);
    }
    if left.len() == 1 {
        let at = right.len() - 2;
        return contract(g, a, b, 0, at);
    }
    let batch = broadcast_shapes(&left[..left.len() - 2], &right[..right.len() - 2])?;
    let a = broadcast_to(g, a, &[&batch, &left[left.len() - 2..]].concat())?;
    let b = broadcast_to(g, b, &[&batch, &right[right.len() - 2..]].concat())?;
    let n = batch.len();
    let dims: Vec<usize> = (0..n).collect();
    let dot = DotGeneral { lhs_batch: dims.clone(), rhs_batch: dims, lhs_contract: vec![n + 1], rhs_contract: vec![n] };
    g.push(Op::DotGeneral(dot), &[a, b])
}

/// Contracts dimension `left` of `a` with dimension `right` of `b`. The result has the other dimensions of `a`, then
/// those of `b`.
pub fn contract(g: &mut Graph, a: ValueId, b: ValueId, left: usize, right: usize) -> Built {
    let dot = DotGeneral {
        lhs_batch: Vec::new(),
        rhs_batch: Vec::new(),
        lhs_contract: vec![left],
        rhs_contract: vec![right],
    };
    g.push(Op::DotGeneral(dot), &[a, b])
}

/// `x w^T + bias` over the last dimension of `x`, with `w` of shape `[out, in]`.
pub fn linear(g: &mut Graph, x: ValueId, w: ValueId, bias: Option<ValueId>) -> Built {
    if g.shape(x).is_empty() || g.shape(w).is_empty() {
        return Err(ShapeError::Attribute("a linear layer needs at least one dimension on each side"));
    }
    let last = g.shape(x).len() - 1;
    let y = contract(g, x, w, last, g.shape(w).len() - 1)?;
    match bias {
        Some(bias) => binary(g, Binary::Add, y, bias),
        None => Ok(y),
    }
}

/// The movement of a convolution's window over each spatial dimension.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Conv {
    pub stride: Vec<u64>,
    pub pad_low: Vec<i64>,
    pub pad_high: Vec<i64>,
    pub dilation: Vec<u64>,
    pub groups: u64,
    /// True for the gradient of a convolution with respect to its operand, in which strides spread the operand instead.
    pub transposed: bool,
    /// The elements that a transposed convolution adds at the end of each spatial dimension.
    pub output_padding: Vec<u64>,
}

/// A convolution of `x` `[N, C, spatial..]` with `w` `[out, in / groups, spatial..]`, or
/// `[in, out / groups, spatial..]` if transposed.
pub fn convolution(g: &mut Graph, x: ValueId, w: ValueId, bias: Option<ValueId>, conv: &Conv) -> Built {
    let (shape, kernel) = (g.shape(x).to_vec(), g.shape(w).to_vec());
    let n = shape.len().saturating_sub(2);
    let entries = [conv.stride.len(), conv.pad_low.len(), conv.pad_high.len(), conv.dilation.len()];
    if shape.len() < 3 || kernel.len() != shape.len() || entries.iter().any(|&e| e != n) {
        return Err(ShapeError::Attribute("operand, kernel and window must have the same spatial dimensions"));
    }
    let near = |v: i64| v.unsigned_abs() < 1 << 40;
    let small = |v: u64| v > 0 && v < 1 << 40;
    let fits = conv.pad_low.iter().chain(&conv.pad_high).all(|&p| near(p))
        && conv.stride.iter().chain(&conv.dilation).chain(&kernel[2..]).all(|&v| small(v))
        && conv.output_padding.iter().all(|&p| p < 1 << 40);
    if !fits || conv.groups == 0 {
        return Err(ShapeError::Attribute("strides, dilations, padding and groups must be of a sensible size"));
    }
    let window = |i: usize| {
        let (size, dilation) = (kernel[i + 2], conv.dilation[i]);
        let (low, high) = (conv.pad_low[i], conv.pad_high[i]);
        let reach = size.saturating_sub(1).saturating_mul(dilation).min(1 << 40) as i64;
        let more = conv.output_padding.get(i).copied().unwrap_or(0) as i64;
        let plain = WindowDim { size, pad_low: low, pad_high: high, window_dilation: dilation, ..WindowDim::one() };
        if conv.transposed {
            let (pad_low, pad_high) = (reach - low, reach - high + more);
            WindowDim { base_dilation: conv.stride[i], pad_low, pad_high, reversed: true, ..plain }
        } else {
            WindowDim { stride: conv.stride[i], ..plain }
        }
    };
    let mut w = w;
    let (mut input, mut output) = (1, 0);
    if conv.transposed {
        (input, output) = (0, 1);
        if conv.groups > 1 {
            // [groups * in, out, ..] -> [in, groups * out, ..], because the groups belong to the outputs.
            if !kernel[0].is_multiple_of(conv.groups) {
                return Err(ShapeError::Attribute("groups must divide the input features"));
            }
            let split = [&[conv.groups, kernel[0] / conv.groups], &kernel[1..]].concat();
            w = reshape(g, w, &split)?;
            w = move_dim(g, w, 0, 1)?;
            let outputs = kernel[1].saturating_mul(conv.groups);
            w = reshape(g, w, &[&[kernel[0] / conv.groups, outputs], &kernel[2..]].concat())?;
        }
    }
    let spatial: Vec<usize> = (2..n + 2).collect();
    let image = ImageDims { batch: 0, feature: 1, spatial: spatial.clone() };
    let op = Convolution {
        lhs: image.clone(),
        rhs: KernelDims { input, output, spatial },
        result: image,
        window: (0..n).map(window).collect(),
        feature_groups: conv.groups,
        batch_groups: 1,
    };
    let y = g.push(Op::Convolution(op), &[x, w])?;
    match bias {
        Some(bias) => {
            let size = g.ty(bias).elements();
            let bias = reshape(g, bias, &[&[size], vec![1; n].as_slice()].concat())?;
            binary(g, Binary::Add, y, bias)
        }
        None => Ok(y),
    }
}
