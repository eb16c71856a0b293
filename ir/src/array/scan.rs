//! Linear recurrences along a dimension, in a number of passes that grows with the logarithm of its size.

use super::{Built, ShapeError, binary, concat, convert, pad, reshape, slice_dim, sum, unary, unsqueeze};
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Unary};

/// `state[t] = decay[t] state[t - 1] + inflow[t]` along dimension `dim`, with zero before the first. Both operands
/// have the same shape.
///
/// Pairs of steps are joined to one step each, whose states are found in the same way (Blelloch 1990). No number is
/// divided by a decay, so that states stay finite however small decays are.
pub(crate) fn linear_recurrence(g: &mut Graph, decay: ValueId, inflow: ValueId, dim: usize) -> Built {
    let shape = g.shape(inflow).to_vec();
    if g.shape(decay) != shape || dim >= shape.len() {
        return Err(ShapeError::Attribute("decays and inflows of a recurrence have the same shape"));
    }
    let steps = shape[dim] as i64;
    if steps < 2 {
        return Ok(inflow);
    }
    let half = steps / 2;
    let every_other = |g: &mut Graph, x, first: i64, end: i64| slice_dim(g, x, dim, first, end, 2);
    let first_inflow = every_other(g, inflow, 0, 2 * half)?;
    let (second_decay, second_inflow) = (every_other(g, decay, 1, steps)?, every_other(g, inflow, 1, steps)?);
    let carried = binary(g, Binary::Multiply, second_decay, first_inflow)?;
    let joined_inflow = binary(g, Binary::Add, carried, second_inflow)?;
    let mut after_second = joined_inflow;
    if half > 1 {
        let first_decay = every_other(g, decay, 0, 2 * half)?;
        let joined_decay = binary(g, Binary::Multiply, second_decay, first_decay)?;
        after_second = linear_recurrence(g, joined_decay, joined_inflow, dim)?;
    }

    let mut after_first = slice_dim(g, inflow, dim, 0, 1, 1)?;
    if steps > 2 {
        let before = slice_dim(g, after_second, dim, 0, (steps - 1) / 2, 1)?;
        let (decay, inflow) = (every_other(g, decay, 2, steps)?, every_other(g, inflow, 2, steps)?);
        let carried = binary(g, Binary::Multiply, decay, before)?;
        let rest = binary(g, Binary::Add, carried, inflow)?;
        after_first = concat(g, &[after_first, rest], dim)?;
    }
    // Both in turns. With an odd number of steps, the last pair lacks its second.
    if steps % 2 == 1 {
        let (low, mut high) = (vec![0; shape.len()], vec![0; shape.len()]);
        high[dim] = 1;
        after_second = pad(g, after_second, &low, &high, 0.0)?;
    }
    let first = unsqueeze(g, after_first, dim as i64 + 1)?;
    let second = unsqueeze(g, after_second, dim as i64 + 1)?;
    let both = concat(g, &[first, second], dim + 1)?;
    let mut whole = shape;
    whole[dim] = ((steps + 1) / 2 * 2) as u64;
    let both = reshape(g, both, &whole)?;
    slice_dim(g, both, dim, 0, steps, 1)
}

/// The selective scan of Mamba (Gu and Dao 2023): every feature has a state of a few numbers, which decay and take up
/// the feature, and which each token reads.
///
/// `x` and `step` are `[.., tokens, features]`, `rate` is `[features, numbers]`, `taken` and `asked` are
/// `[.., tokens, numbers]`:
///
/// ```text
/// state[t, f, n] = exp(step[t, f] rate[f, n]) state[t - 1, f, n] + step[t, f] x[t, f] taken[t, n]
/// result[t, f] = sum over n of state[t, f, n] asked[t, n]
/// ```
///
/// States are at least f32. The result has the type of `x`.
pub fn selective_scan(g: &mut Graph, [x, step, rate, taken, asked]: [ValueId; 5]) -> Built {
    let (shape, numbers) = (g.shape(x).to_vec(), g.shape(taken).last().copied().unwrap_or(0));
    let Some((&features, tokens)) = shape.split_last().filter(|(_, tokens)| !tokens.is_empty()) else {
        return Err(ShapeError::Attribute("a selective scan takes tokens and features"));
    };
    let read = [tokens, &[numbers]].concat();
    if g.shape(step) != shape
        || g.shape(rate) != [features, numbers]
        || g.shape(taken) != read
        || g.shape(asked) != read
    {
        return Err(ShapeError::Attribute("the operands of a selective scan differ in tokens, features or numbers"));
    }
    let dtype = g.ty(x).dtype;
    let wide = if dtype.bytes() < DType::F32.bytes() { DType::F32 } else { dtype };
    let [x, step, rate, taken, asked] = {
        let mut all = [x, step, rate, taken, asked];
        for v in &mut all {
            *v = convert(g, *v, wide)?;
        }
        all
    };
    let of_features = |g: &mut Graph, v| unsqueeze(g, v, shape.len() as i64);
    let of_numbers = |g: &mut Graph, v| unsqueeze(g, v, shape.len() as i64 - 1);
    let long = of_features(g, step)?;
    let decay = binary(g, Binary::Multiply, long, rate)?;
    let decay = unary(g, Unary::Exponential, decay)?;
    let moved = binary(g, Binary::Multiply, step, x)?;
    let (moved, taken) = (of_features(g, moved)?, of_numbers(g, taken)?);
    let inflow = binary(g, Binary::Multiply, moved, taken)?;
    let states = linear_recurrence(g, decay, inflow, shape.len() - 2)?;
    let asked = of_numbers(g, asked)?;
    let read = binary(g, Binary::Multiply, states, asked)?;
    let read = sum(g, read, &[shape.len()], false)?;
    convert(g, read, dtype)
}
