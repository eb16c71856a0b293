//! Attention over heads, and rotary positions.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, DotGeneral, Op, Unary};
use serde::{Deserialize, Serialize};

/// The options of [`attention`].
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Attention {
    /// The factor of the scores, by default `1 / sqrt(D)`.
    pub scale: Option<f64>,
    /// True if position `s` of the queries sees only positions `0..=s` of the keys.
    pub causal: bool,
    /// A mask that broadcasts to `[B, H, S, T]`: booleans (true: visible), or numbers that are added to the scores.
    pub mask: Option<ValueId>,
}

/// `[S, T]` booleans, true if query `s` sees key `t`, i.e. if `t` is at most `s + offset`.
pub fn causal_mask(g: &mut Graph, queries: u64, keys: u64, offset: i64) -> Built {
    let row = iota(g, &[queries, keys], 0, DType::I32)?;
    let column = iota(g, &[queries, keys], 1, DType::I32)?;
    let row = if offset == 0 { row } else { with_number(g, Binary::Add, row, offset as f64)? };
    compare(g, Direction::Ge, row, column)
}

/// `[B, Hkv, T, D]` to `[B, heads, T, D]`: repeats each head once for each of its query heads.
pub fn repeat_heads(g: &mut Graph, x: ValueId, heads: u64) -> Built {
    let shape = g.shape(x).to_vec();
    let [b, kv, t, d] = shape[..] else { return Err(ShapeError::Attribute("heads are [B, H, T, D]")) };
    if kv == heads {
        return Ok(x);
    }
    if kv == 0 || !heads.is_multiple_of(kv) {
        return Err(ShapeError::SizesDiffer { what: "heads of queries and keys", left: heads, right: kv });
    }
    let each = broadcast_dims(g, x, &[b, kv, heads / kv, t, d], &[0, 1, 3, 4])?;
    reshape(g, each, &[b, heads, t, d])
}

fn broadcast_dims(g: &mut Graph, x: ValueId, shape: &[u64], dims: &[usize]) -> Built {
    let op = crate::op::BroadcastInDim { shape: shape.to_vec(), dims: dims.to_vec() };
    g.push(Op::BroadcastInDim(op), &[x])
}

/// [`attention_of_heads`] with heads before positions: `q` is `[B, H, S, D]`, `k` is `[B, Hkv, T, D]`, `v` is
/// `[B, Hkv, T, Dv]`, and the result is `[B, H, S, Dv]`.
pub fn attention(g: &mut Graph, q: ValueId, k: ValueId, v: ValueId, how: &Attention) -> Built {
    if [q, k, v].iter().any(|&x| g.shape(x).len() != 4) {
        return Err(ShapeError::Attribute("attention takes queries, keys and values of four dimensions"));
    }
    let scale = how.scale.unwrap_or(1.0 / (g.shape(q)[3].max(1) as f64).sqrt());
    let [q, k, v] = [q, k, v].map(|x| permute(g, x, &[0, 2, 1, 3]));
    let mixed = attention_of_heads(g, q?, k?, v?, how.mask, scale, how.causal)?;
    permute(g, mixed, &[0, 2, 1, 3])
}

/// `softmax(q k^T scale + mask) v` for `q` of shape `[B, S, H, D]`, `k` of `[B, T, Hkv, D]` and `v` of
/// `[B, T, Hkv, Dv]`. Each head of the keys serves `H / Hkv` heads of the queries. The mask broadcasts to
/// `[B, H, S, T]`. Booleans are true for visible keys, and numbers are added to the scores. The result is
/// `[B, S, H, Dv]`.
pub fn attention_of_heads(
    g: &mut Graph,
    q: ValueId,
    k: ValueId,
    v: ValueId,
    mask: Option<ValueId>,
    scale: f64,
    causal: bool,
) -> Built {
    let ([b, s, heads, _], [_, _, _, width]) = (four(g, q)?, four(g, v)?);
    let weights = attention_weights(g, q, k, mask, scale, causal)?;
    attend(g, weights, v, [b, s, heads, width])
}

/// The weight of each key for each query, as input of [`attend`]: `[B, H, S, T]`, or in groups of heads
/// `[B, Hkv, S, H / Hkv, T]`.
pub fn attention_weights(
    g: &mut Graph,
    q: ValueId,
    k: ValueId,
    mask: Option<ValueId>,
    scale: f64,
    causal: bool,
) -> Built {
    let scores = attention_scores(g, q, k, scale)?;
    let scores = masked_scores(g, scores, mask, causal)?;
    let last = g.shape(scores).len() - 1;
    softmax(g, scores, last)
}

/// The scaled products of queries and keys, in the shape of [`attention_weights`].
pub fn attention_scores(g: &mut Graph, q: ValueId, k: ValueId, scale: f64) -> Built {
    let ([b, s, heads, d], [_, _, kv, _]) = (four(g, q)?, four(g, k)?);
    if kv == 0 || !heads.is_multiple_of(kv) {
        return Err(ShapeError::SizesDiffer { what: "heads of queries and keys", left: heads, right: kv });
    }
    let group = heads / kv;
    // Queries are grouped by the head of their keys. Scores are [B, Hkv, S, group, T], or [B, H, S, T] without groups.
    let q = if group > 1 { reshape(g, q, &[b, s, kv, group, d])? } else { q };
    let rank = g.shape(q).len();
    let dot = DotGeneral {
        lhs_batch: vec![0, 2],
        rhs_batch: vec![0, 2],
        lhs_contract: vec![rank - 1],
        rhs_contract: vec![3],
    };
    let scores = g.push(Op::DotGeneral(dot), &[q, k])?;
    scaled(g, scores, scale)
}

/// [`attention_scores`] under a causal mask, and a mask that broadcasts to `[B, H, S, T]`.
pub fn masked_scores(g: &mut Graph, scores: ValueId, mask: Option<ValueId>, causal: bool) -> Built {
    let (b, kv, s, group, t) = match *g.shape(scores) {
        [b, heads, s, t] => (b, heads, s, 1, t),
        [b, kv, s, group, t] => (b, kv, s, group, t),
        _ => return Err(ShapeError::Attribute("scores have four dimensions, or five in groups of heads")),
    };
    let (heads, mut scores) = (kv * group, scores);
    if causal {
        let seen = causal_mask(g, s, t, 0)?;
        let seen = if group > 1 { reshape(g, seen, &[s, 1, t])? } else { seen };
        scores = masked(g, scores, seen)?;
    }
    let Some(mask) = mask else { return Ok(scores) };
    let shape = broadcast_shapes(g.shape(mask), &[b, heads, s, t])?;
    if shape != [b, heads, s, t] {
        return Err(ShapeError::ShapesDiffer { left: g.shape(mask).to_vec(), right: shape });
    }
    let sizes = [vec![1; 4 - g.shape(mask).len()].as_slice(), g.shape(mask)].concat();
    let mut mask = reshape(g, mask, &sizes)?;
    if group > 1 {
        let (each, groups) = if sizes[1] == 1 { (1, 1) } else { (kv, group) };
        mask = reshape(g, mask, &[sizes[0], each, groups, sizes[2], sizes[3]])?;
        mask = permute(g, mask, &[0, 1, 3, 2, 4])?;
    }
    if g.ty(mask).dtype == DType::Bool {
        masked(g, scores, mask)
    } else {
        let mask = g.convert(mask, g.ty(scores).dtype);
        binary(g, Binary::Add, scores, mask)
    }
}

/// The values, averaged by [`attention_weights`]: `[B, S, H, Dv]`.
pub fn attend(g: &mut Graph, weights: ValueId, v: ValueId, shape: [u64; 4]) -> Built {
    let last = g.shape(weights).len().saturating_sub(1);
    let dtype = g.ty(v).dtype;
    let weights = g.convert(weights, dtype);
    let dot =
        DotGeneral { lhs_batch: vec![0, 1], rhs_batch: vec![0, 2], lhs_contract: vec![last], rhs_contract: vec![1] };
    let mixed = g.push(Op::DotGeneral(dot), &[weights, v])?;
    if last == 3 {
        return permute(g, mixed, &[0, 2, 1, 3]);
    }
    let mixed = permute(g, mixed, &[0, 2, 1, 3, 4])?;
    reshape(g, mixed, &shape)
}

pub(super) fn four(g: &Graph, x: ValueId) -> Result<[u64; 4], ShapeError> {
    let error = ShapeError::Attribute("attention takes queries, keys and values of four dimensions");
    <[u64; 4]>::try_from(g.shape(x)).map_err(|_| error)
}

/// Scales the products of queries and keys, in a type that can represent large scores.
pub(super) fn scaled(g: &mut Graph, scores: ValueId, scale: f64) -> Built {
    // Narrow floats lose too much precision in large scores.
    let narrow = g.ty(scores).dtype.is_float() && g.ty(scores).dtype.bytes() < DType::F32.bytes();
    let scores = if narrow { g.convert(scores, DType::F32) } else { scores };
    if scale == 1.0 { Ok(scores) } else { with_number(g, Binary::Multiply, scores, scale) }
}

/// The smallest number of the type of scores.
pub(super) fn least(dtype: DType) -> f64 {
    if dtype == DType::F64 { f64::MIN } else { f64::from(f32::MIN) }
}

/// Hidden scores become the smallest number of their type, so that a row without visible keys stays finite.
pub(super) fn masked(g: &mut Graph, scores: ValueId, seen: ValueId) -> Built {
    let hidden = full_like(g, scores, least(g.ty(scores).dtype))?;
    select(g, seen, scores, hidden)
}

/// The arrangement of the rotated pairs in the last dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotaryHalves {
    /// Pairs element `i` with element `i + D / 2`, as GPT-NeoX and Hugging Face's Llama do.
    Split,
    /// Pairs element `2 i` with element `2 i + 1`, as GPT-J and the original do.
    Interleaved,
}

/// Rotary positions (Su et al. 2021): rotates pairs in the last dimension of `x` by angles. The cosines and sines of
/// these broadcast to `x`, with full width for [`RotaryHalves::Split`] and half width for interleaved pairs. If they
/// have a wider float type than `x`, the rotation is computed in that type.
pub fn rotary(g: &mut Graph, x: ValueId, cosine: ValueId, sine: ValueId, halves: RotaryHalves) -> Built {
    let (dtype, wide) = (g.ty(x).dtype, g.ty(cosine).dtype);
    if dtype.is_float() && wide.is_float() && wide.bytes() > dtype.bytes() && g.ty(sine).dtype == wide {
        let x = g.convert(x, wide);
        let turned = rotary(g, x, cosine, sine, halves)?;
        return Ok(g.convert(turned, dtype));
    }
    let shape = g.shape(x).to_vec();
    let Some(last) = shape.len().checked_sub(1) else {
        return Err(ShapeError::Attribute("rotary positions need a dimension of pairs"));
    };
    let half = shape[last] / 2;
    if !shape[last].is_multiple_of(2) {
        return Err(ShapeError::Attribute("rotary positions need a dimension of pairs"));
    }
    match halves {
        RotaryHalves::Split => {
            let parts = split(g, x, last, &[half, half])?;
            let negative = unary(g, Unary::Negate, parts[1])?;
            let turned = concat(g, &[negative, parts[0]], last)?;
            let along = binary(g, Binary::Multiply, x, cosine)?;
            let across = binary(g, Binary::Multiply, turned, sine)?;
            g.push(Op::Binary(Binary::Add), &[along, across])
        }
        RotaryHalves::Interleaved => {
            let pairs = reshape(g, x, &[&shape[..last], &[half, 2]].concat())?;
            let first = select_dim(g, pairs, last + 1, 0)?;
            let second = select_dim(g, pairs, last + 1, 1)?;
            let [fc, fs, sc, ss] = [(first, cosine), (first, sine), (second, cosine), (second, sine)]
                .map(|(x, angle)| binary(g, Binary::Multiply, x, angle));
            let real = g.push(Op::Binary(Binary::Subtract), &[fc?, ss?])?;
            let imaginary = g.push(Op::Binary(Binary::Add), &[fs?, sc?])?;
            let both = stack(g, &[real, imaginary], last + 1)?;
            reshape(g, both, &shape)
        }
    }
}
