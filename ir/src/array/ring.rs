//! Ring attention: keys and values go around a ring (Liu et al. 2023, "Ring Attention with Blockwise Transformers").
//!
//! Positions are divided into blocks. In each round, every block of queries meets one block of keys and values,
//! beginning with its own. The results of rounds are combined by their maxima and sums. So if each device has one
//! block, none ever holds all keys. In the graph this is arithmetic over a dimension of blocks, along which a [`Roll`]
//! brings the keys and values of the next round.
//!
//! Each round scales by its own maximum and is a kernel like attention without blocks. The combined result does not
//! depend on any maximum, which [`crate::softmax_max`] detects. So the backward pass needs only the maximum of each round.

use super::attention::{four, least, masked, scaled};
use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, DotGeneral, Op, Roll, Unary};

/// The largest number of blocks. The graph contains the nodes of a round for each.
pub const MOST_BLOCKS: u64 = 64;

/// The state after some rounds: the maximum of each row of scores, the sum of its exponentials, and the values averaged
/// by them.
struct Mixed {
    most: ValueId,
    sum: ValueId,
    values: ValueId,
}

/// [`attention_of_heads`] in `blocks` rounds. These must divide the positions of queries and of keys. The mask, if any,
/// is the same for all queries: its second to last dimension has size 1.
pub fn ring_attention(
    g: &mut Graph,
    [q, k, v]: [ValueId; 3],
    mask: Option<ValueId>,
    scale: f64,
    causal: bool,
    blocks: u64,
) -> Built {
    let ([b, s, heads, d], [_, t, kv, width], [_, _, _, value_width]) = (four(g, q)?, four(g, k)?, four(g, v)?);
    if blocks > MOST_BLOCKS {
        return Err(ShapeError::Attribute("attention has at most 64 blocks"));
    }
    if blocks == 0 || !s.is_multiple_of(blocks) || !t.is_multiple_of(blocks) {
        return Err(ShapeError::Attribute("blocks of attention must divide the positions of queries and keys"));
    }
    if kv == 0 || !heads.is_multiple_of(kv) {
        return Err(ShapeError::SizesDiffer { what: "heads of queries and keys", left: heads, right: kv });
    }
    let group = heads / kv;
    let (rows, columns) = (s / blocks, t / blocks);
    // Scores are [B, blocks, Hkv, rows, group, columns], or [B, blocks, H, rows, columns] without groups.
    let grouped = |sizes: [u64; 6]| if group > 1 { sizes.to_vec() } else { [&sizes[..4], &sizes[5..]].concat() };
    let q = reshape(g, q, &grouped([b, blocks, rows, kv, group, d]))?;
    let k = reshape(g, k, &[b, blocks, columns, kv, width])?;
    let v = reshape(g, v, &[b, blocks, columns, kv, value_width])?;
    let mut mask = match mask {
        Some(mask) => Some(blocks_of_mask(g, mask, [b, heads, s, t], [kv, group, blocks])?),
        None => None,
    };
    let last = g.shape(q).len() - 1;
    let of_keys = DotGeneral {
        lhs_batch: vec![0, 1, 3],
        rhs_batch: vec![0, 1, 3],
        lhs_contract: vec![last],
        rhs_contract: vec![4],
    };
    let of_values = DotGeneral {
        lhs_batch: vec![0, 1, 2],
        rhs_batch: vec![0, 1, 3],
        lhs_contract: vec![last],
        rhs_contract: vec![2],
    };
    // The block of the neighbour.
    let around = |g: &mut Graph, x: ValueId| g.push(Op::Roll(Roll { dim: 1, by: 1 }), &[x]);
    let mut mixed: Option<Mixed> = None;
    let mut next = (k, v);
    for round in 0..blocks {
        let (keys, values) = next;
        // The transfer of the next keys and values overlaps the computation of this round.
        if round + 1 < blocks {
            next = (around(g, keys)?, around(g, values)?);
        }
        let scores = g.push(Op::DotGeneral(of_keys.clone()), &[q, keys])?;
        let mut scores = scaled(g, scores, scale)?;
        if causal {
            let seen = seen_in_round(g, round, [blocks, rows, columns], group > 1)?;
            scores = masked(g, scores, seen)?;
        }
        let mut bounded = false;
        if let Some(of_block) = mask {
            if round + 1 < blocks && g.shape(of_block)[1] > 1 {
                mask = Some(around(g, of_block)?);
            }
            scores = match g.ty(of_block).dtype {
                DType::Bool => masked(g, scores, of_block)?,
                _ => {
                    bounded = true;
                    let added = g.convert(of_block, g.ty(scores).dtype);
                    binary(g, Binary::Add, scores, added)?
                }
            };
        }
        let mut most = max(g, scores, &[last], true)?;
        if bounded {
            // A mask of infinities may hide a whole block.
            let floor = least(g.ty(most).dtype);
            most = with_number(g, Binary::Maximum, most, floor)?;
        }
        let above = binary(g, Binary::Subtract, scores, most)?;
        let weights = unary(g, Unary::Exponential, above)?;
        let total = sum(g, weights, &[last], true)?;
        let dtype = g.ty(values).dtype;
        let weights = g.convert(weights, dtype);
        let of_round = g.push(Op::DotGeneral(of_values.clone()), &[weights, values])?;
        let of_round = Mixed { most, sum: total, values: g.convert(of_round, g.ty(total).dtype) };
        mixed = Some(match mixed {
            None => of_round,
            Some(before) => combined(g, before, of_round)?,
        });
    }
    let Some(Mixed { sum, values, .. }) = mixed else {
        return Err(ShapeError::Attribute("attention in blocks needs one at least"));
    };
    let normal = binary(g, Binary::Divide, values, sum)?;
    let normal = g.convert(normal, g.ty(v).dtype);
    let order: &[usize] = if group > 1 { &[0, 1, 3, 2, 4, 5] } else { &[0, 1, 3, 2, 4] };
    let normal = permute(g, normal, order)?;
    reshape(g, normal, &[b, s, heads, value_width])
}

/// Scales both by the greater maximum and adds them.
fn combined(g: &mut Graph, before: Mixed, more: Mixed) -> Result<Mixed, ShapeError> {
    let most = g.push(Op::Binary(Binary::Maximum), &[before.most, more.most])?;
    let mut scale = |of: ValueId| {
        let below = g.push(Op::Binary(Binary::Subtract), &[of, most])?;
        unary(g, Unary::Exponential, below)
    };
    let scales = [scale(before.most)?, scale(more.most)?];
    let mut added = |parts: [ValueId; 2]| {
        let [a, b] = [0, 1].map(|i| binary(g, Binary::Multiply, parts[i], scales[i]));
        g.push(Op::Binary(Binary::Add), &[a?, b?])
    };
    let sum = added([before.sum, more.sum])?;
    Ok(Mixed { most, sum, values: added([before.values, more.values])? })
}

/// The keys that the queries of causal attention see in a round, in which block `i` meets block
/// `(i + round) mod blocks`. In their own block they see the keys that are not ahead, in earlier blocks all keys, and
/// in later blocks none. Blocks of different lengths are compared position by position.
fn seen_in_round(g: &mut Graph, round: u64, [blocks, rows, columns]: [u64; 3], groups: bool) -> Built {
    let spread = |g: &mut Graph, seen: ValueId, [blocks, rows, columns]: [u64; 3]| match groups {
        true => reshape(g, seen, &[blocks, 1, rows, 1, columns]),
        false => reshape(g, seen, &[blocks, 1, rows, columns]),
    };
    if rows == columns && round == 0 {
        let seen = causal_mask(g, rows, columns, 0)?;
        return spread(g, seen, [1, rows, columns]);
    }
    let first_wrapped = blocks - round;
    if rows == columns {
        let block = iota(g, &[blocks], 0, DType::I32)?;
        let first = full_like(g, block, first_wrapped as f64)?;
        let seen = compare(g, Direction::Ge, block, first)?;
        return spread(g, seen, [blocks, 1, 1]);
    }
    let shape = [blocks, rows, columns];
    let block = iota(g, &shape, 0, DType::I32)?;
    let met = with_number(g, Binary::Add, block, round as f64)?;
    let back = with_number(g, Binary::Subtract, met, blocks as f64)?;
    let first = full_like(g, block, first_wrapped as f64)?;
    let wrapped = compare(g, Direction::Ge, block, first)?;
    let met = select(g, wrapped, back, met)?;
    let mut position = |block: ValueId, length: u64, dim: usize| {
        let begin = with_number(g, Binary::Multiply, block, length as f64)?;
        let within = iota(g, &shape, dim, DType::I32)?;
        binary(g, Binary::Add, begin, within)
    };
    let (row, column) = (position(block, rows, 1)?, position(met, columns, 2)?);
    let seen = compare(g, Direction::Ge, row, column)?;
    spread(g, seen, shape)
}

/// A mask that all queries share, with an extra dimension for blocks of keys after the batch. Block dimensions have
/// size 1 if the mask is the same along them.
fn blocks_of_mask(g: &mut Graph, mask: ValueId, whole: [u64; 4], [kv, group, blocks]: [u64; 3]) -> Built {
    let shape = broadcast_shapes(g.shape(mask), &whole)?;
    if shape != whole {
        return Err(ShapeError::ShapesDiffer { left: g.shape(mask).to_vec(), right: whole.to_vec() });
    }
    let sizes = [vec![1; 4 - g.shape(mask).len()].as_slice(), g.shape(mask)].concat();
    if sizes[2] != 1 {
        return Err(ShapeError::Attribute("a mask of attention in blocks must be the same for all queries"));
    }
    let (of_keys, columns) = if sizes[3] == 1 { (1, 1) } else { (blocks, sizes[3] / blocks) };
    let (each, groups) = if sizes[1] == 1 { (1, 1) } else { (kv, group) };
    let mask = reshape(g, mask, &[sizes[0], each, groups, of_keys, columns])?;
    let mask = permute(g, mask, &[0, 3, 1, 2, 4])?;
    match group > 1 {
        true => reshape(g, mask, &[sizes[0], of_keys, each, 1, groups, columns]),
        false => reshape(g, mask, &[sizes[0], of_keys, each, 1, columns]),
    }
}
