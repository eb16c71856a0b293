//! Attention and rotary positions, by the standard and by ONNX Runtime.

use super::call::{Call, Many, One, attribute, bad_value};
use super::report::Reject;
use altiplano_ir::array::{self, Attention, RotaryHalves};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Unary};

/// Queries, keys and values as `[B, H, S, D]`, and the options of the attention.
struct Parts {
    q: ValueId,
    k: ValueId,
    v: ValueId,
    scale: f64,
    softcap: f64,
    causal: bool,
    /// The number of keys before the one at the position of the first causal query.
    past: u64,
    mask: Option<ValueId>,
}

/// `[B, S, H D]` to `[B, H, S, D]`.
fn heads(c: &mut Call, x: ValueId, count: u64) -> One {
    let [b, s, wide] = <[u64; 3]>::try_from(c.shape(x)).map_err(|_| bad_value(0))?;
    if count == 0 || !wide.is_multiple_of(count) {
        return Err(attribute("num_heads"));
    }
    let split = array::reshape(c.g(), x, &[b, s, count, wide / count])?;
    Ok(array::permute(c.g(), split, &[0, 2, 1, 3])?)
}

/// `[B, H, S, D]` to `[B, S, H D]`.
fn together(c: &mut Call, x: ValueId) -> One {
    let [b, h, s, d] = <[u64; 4]>::try_from(c.shape(x)).map_err(|_| bad_value(0))?;
    let moved = array::permute(c.g(), x, &[0, 2, 1, 3])?;
    Ok(array::reshape(c.g(), moved, &[b, s, h.saturating_mul(d)])?)
}

fn count(c: &Call, name: &'static str) -> Result<Option<u64>, Reject> {
    c.int_opt(name)?.map(|n| u64::try_from(n).map_err(|_| attribute(name))).transpose()
}

/// `x` after the past, if there is one.
fn with_past(c: &mut Call, past: Option<ValueId>, x: ValueId) -> One {
    let some = past.filter(|&p| c.shape(p).get(2).is_some_and(|&length| length > 0));
    match some {
        Some(past) => Ok(array::concat(c.g(), &[past, x], 2)?),
        None => Ok(x),
    }
}

fn weighted(c: &mut Call, parts: &Parts) -> One {
    let Parts { q, k, v, scale, mask, .. } = *parts;
    let plain = parts.softcap == 0.0 && (!parts.causal || parts.past == 0);
    if plain {
        let how = Attention { scale: Some(scale), causal: parts.causal, mask };
        return Ok(array::attention(c.g(), q, k, v, &how)?);
    }
    let (_, _, weights) = stages(c, parts)?;
    let heads = c.shape(q)[1];
    let v = array::repeat_heads(c.g(), v, heads)?;
    Ok(array::matmul(c.g(), weights, v)?)
}

/// The capped scores, the masked scores, and the weights.
fn stages(c: &mut Call, parts: &Parts) -> Result<(ValueId, ValueId, ValueId), Reject> {
    let heads = *c.shape(parts.q).get(1).ok_or(bad_value(0))?;
    let g = c.g();
    let k = array::repeat_heads(g, parts.k, heads)?;
    let k = array::swap_dims(g, k, 2, 3)?;
    let products = array::matmul(g, parts.q, k)?;
    let mut scores = array::with_number(g, Binary::Multiply, products, parts.scale)?;
    if parts.softcap != 0.0 {
        let small = array::with_number(g, Binary::Divide, scores, parts.softcap)?;
        let bent = array::unary(g, Unary::Tanh, small)?;
        scores = array::with_number(g, Binary::Multiply, bent, parts.softcap)?;
    }
    let capped = scores;
    let mut masks = Vec::new();
    if parts.causal {
        let shape = g.shape(scores).to_vec();
        masks.push(array::causal_mask(g, shape[2], shape[3], parts.past as i64)?);
    }
    masks.extend(parts.mask);
    for mask in masks {
        scores = if g.ty(mask).dtype == DType::Bool {
            let hidden = array::full_like(g, scores, f64::NEG_INFINITY)?;
            array::select(g, mask, scores, hidden)?
        } else {
            let mask = array::convert(g, mask, g.ty(scores).dtype)?;
            array::binary(g, Binary::Add, scores, mask)?
        };
    }
    let weights = array::softmax(g, scores, 3)?;
    Ok((capped, scores, weights))
}

/// Operands Q, K, V, mask, past keys, past values. Results Y, keys, values, and scores of a selected stage.
pub(crate) fn attention(c: &mut Call) -> Many {
    let mut operands = [c.x(0)?, c.x(1)?, c.x(2)?];
    if c.opt(6).is_some() {
        return Err(Reject::Unsupported("over padded keys"));
    }
    if c.int("left_window_size", -1)? != -1 || c.int("right_window_size", -1)? != -1 {
        return Err(Reject::Unsupported("within a window"));
    }
    let flat = c.rank(operands[0]) == 3;
    if flat {
        let q = count(c, "q_num_heads")?.ok_or(attribute("q_num_heads"))?;
        let kv = count(c, "kv_num_heads")?.unwrap_or(q);
        for (x, heads_of) in operands.iter_mut().zip([q, kv, kv]) {
            *x = heads(c, *x, heads_of)?;
        }
    }
    let [q, k, v] = operands;
    let (past_k, past_v) = (c.opt(4), c.opt(5));
    let (k, v) = (with_past(c, past_k, k)?, with_past(c, past_v, v)?);
    let past = past_k.and_then(|p| c.shape(p).get(2).copied()).unwrap_or(0);
    if c.rank(q) != 4 || c.rank(k) != 4 || c.rank(v) != 4 {
        return Err(bad_value(0));
    }
    let width = c.shape(q)[3].max(1) as f64;
    let scale = c.float_opt("scale")?.unwrap_or(1.0 / width.sqrt());
    let parts = Parts {
        q,
        k,
        v,
        scale,
        softcap: c.float("softcap", 0.0)?,
        causal: c.flag("is_causal", false)?,
        past,
        mask: c.opt(3),
    };
    let y = weighted(c, &parts)?;
    let y = if flat { together(c, y)? } else { y };
    let mut results = vec![y, k, v];
    if c.wants(3) {
        let (capped, masked, weights) = stages(c, &parts)?;
        results.push(match c.int("qk_matmul_output_mode", 0)? {
            0 => stages(c, &Parts { softcap: 0.0, causal: false, mask: None, ..parts })?.0,
            1 => capped,
            2 => masked,
            3 => weights,
            _ => return Err(attribute("qk_matmul_output_mode")),
        });
    }
    Ok(results)
}

/// The cosines and sines, `[B or 1, S, D / 2]`, at these positions.
fn angles(c: &mut Call, positions: Option<ValueId>, tables: [ValueId; 2]) -> Result<[ValueId; 2], Reject> {
    let Some(positions) = positions else { return Ok(tables) };
    let g = c.g();
    let [cosine, sine] = tables.map(|table| array::take(g, table, 0, positions, false));
    Ok([cosine?, sine?])
}

/// Rotates the first `width` elements of each head of `[B, H, S, D]` by their angles.
fn turned(c: &mut Call, x: ValueId, angles: [ValueId; 2], interleaved: bool, width: u64) -> One {
    let last = c.shape(x)[3];
    let width = if width == 0 { last } else { width };
    let mut tables = angles;
    for table in &mut tables {
        // The angles are the same for all heads. Take only as many as are rotated.
        let cut = array::slice_dim(c.g(), *table, 2, 0, (width / 2) as i64, 1)?;
        *table = array::unsqueeze(c.g(), cut, 1)?;
        if !interleaved {
            *table = array::concat(c.g(), &[*table, *table], 3)?;
        }
    }
    let halves = if interleaved { RotaryHalves::Interleaved } else { RotaryHalves::Split };
    if width == last {
        return Ok(array::rotary(c.g(), x, tables[0], tables[1], halves)?);
    }
    let parts = array::split(c.g(), x, 3, &[width, last.saturating_sub(width)])?;
    let first = array::rotary(c.g(), parts[0], tables[0], tables[1], halves)?;
    Ok(array::concat(c.g(), &[first, parts[1]], 3)?)
}

/// Operands X, cosines, sines, positions.
pub(crate) fn rotary_embedding(c: &mut Call) -> One {
    let (tables, positions) = ([c.x(1)?, c.x(2)?], c.opt(3));
    embedded(c, tables, positions)
}

/// Operands X, positions, cosines, sines.
pub(crate) fn contributed_rotary(c: &mut Call) -> One {
    let (positions, tables) = (c.x(1)?, [c.x(2)?, c.x(3)?]);
    let mut positions = positions;
    if c.g().ty(positions).elements() == 1 {
        // The first position of all sequences.
        let x = c.x(0)?;
        let shape = c.shape(x);
        let length = if shape.len() == 3 { shape[1] } else { *shape.get(2).ok_or(bad_value(0))? };
        let dtype = c.dtype(positions);
        let g = c.g();
        let count = array::iota(g, &[1, length], 1, dtype)?;
        positions = array::reshape(g, positions, &[1, 1])?;
        positions = array::binary(g, Binary::Add, count, positions)?;
    }
    embedded(c, tables, Some(positions))
}

fn embedded(c: &mut Call, tables: [ValueId; 2], positions: Option<ValueId>) -> One {
    let x = c.x(0)?;
    let (interleaved, width) = (c.flag("interleaved", false)?, count(c, "rotary_embedding_dim")?.unwrap_or(0));
    let angles = angles(c, positions, tables)?;
    if angles.iter().any(|&a| c.rank(a) != 3) {
        return Err(bad_value(1));
    }
    match c.rank(x) {
        4 => turned(c, x, angles, interleaved, width),
        3 => {
            let wide = c.shape(x)[2];
            let half = c.shape(angles[0])[2];
            let said = count(c, "num_heads")?.filter(|&n| n > 0);
            let number = said.or((half > 0).then(|| wide / (2 * half))).ok_or(attribute("num_heads"))?;
            let split = heads(c, x, number)?;
            let y = turned(c, split, angles, interleaved, width)?;
            together(c, y)
        }
        _ => Err(bad_value(0)),
    }
}

/// Operands Q, K, V, bias of all three, mask of padded keys, bias of the scores, past keys, past values.
pub(crate) fn multi_head(c: &mut Call) -> Many {
    let number = count(c, "num_heads")?.ok_or(attribute("num_heads"))?;
    if c.opt(4).is_some() {
        return Err(Reject::Unsupported("with a mask of padded keys"));
    }
    let (Some(k), Some(v)) = (c.opt(1), c.opt(2)) else {
        return Err(Reject::Unsupported("of packed operands"));
    };
    let mut operands = [c.x(0)?, k, v];
    if let Some(bias) = c.opt(3) {
        let mut sizes = Vec::new();
        for &x in &operands {
            sizes.push(*c.shape(x).get(2).filter(|_| c.rank(x) == 3).ok_or(bad_value(0))?);
        }
        let biases = array::split(c.g(), bias, 0, &sizes)?;
        for (x, bias) in operands.iter_mut().zip(biases) {
            *x = array::binary(c.g(), Binary::Add, *x, bias)?;
        }
    }
    for x in &mut operands {
        if c.rank(*x) == 3 {
            *x = heads(c, *x, number)?;
        }
    }
    let [q, k, v] = operands;
    let (past_k, past_v) = (c.opt(6), c.opt(7));
    let (k, v) = (with_past(c, past_k, k)?, with_past(c, past_v, v)?);
    let past = past_k.and_then(|p| c.shape(p).get(2).copied()).unwrap_or(0);
    contributed(c, q, k, v, past, c.flag("unidirectional", false)?, c.opt(5))
}

/// The result, keys and values of ONNX Runtime's attention ops.
fn contributed(
    c: &mut Call,
    q: ValueId,
    k: ValueId,
    v: ValueId,
    past: u64,
    causal: bool,
    mask: Option<ValueId>,
) -> Many {
    if c.rank(q) != 4 {
        return Err(bad_value(0));
    }
    let width = c.shape(q)[3].max(1) as f64;
    // Zero stands for the default.
    let scale = c.float_opt("scale")?.filter(|&s| s != 0.0).unwrap_or(1.0 / width.sqrt());
    let parts = Parts { q, k, v, scale, softcap: c.float("softcap", 0.0)?, causal, past, mask };
    let y = weighted(c, &parts)?;
    Ok(vec![together(c, y)?, k, v])
}

/// Operands Q, K, V, past keys, past values, lengths, the total length, cosines, sines. Without a past, all sequences
/// are complete.
pub(crate) fn group_query(c: &mut Call) -> Many {
    let number = count(c, "num_heads")?.ok_or(attribute("num_heads"))?;
    let kv = count(c, "kv_num_heads")?.ok_or(attribute("kv_num_heads"))?;
    let past = c.opt(3).is_some_and(|p| c.shape(p).get(2).is_some_and(|&length| length > 0));
    if past {
        return Err(Reject::Unsupported("with a past"));
    }
    if c.int("local_window_size", -1)? > 0 {
        return Err(Reject::Unsupported("within a window"));
    }
    let (q, k, v) = match (c.opt(1), c.opt(2)) {
        (Some(k), Some(v)) => (c.x(0)?, k, v),
        _ => {
            let packed = c.x(0)?;
            let wide = *c.shape(packed).get(2).ok_or(bad_value(0))?;
            let each = wide / number.saturating_add(kv.saturating_mul(2)).max(1);
            let sizes = [each.saturating_mul(number), each.saturating_mul(kv), each.saturating_mul(kv)];
            let parts = array::split(c.g(), packed, 2, &sizes)?;
            (parts[0], parts[1], parts[2])
        }
    };
    let [mut q, mut k, v] = [heads(c, q, number)?, heads(c, k, kv)?, heads(c, v, kv)?];
    if c.flag("do_rotary", false)? {
        let tables = [c.x(7)?, c.x(8)?];
        let interleaved = c.flag("rotary_interleaved", false)?;
        let length = c.shape(q)[2];
        let half = *c.shape(tables[0]).get(1).ok_or(bad_value(7))?;
        let mut rows = tables;
        for table in &mut rows {
            let rows = array::slice_dim(c.g(), *table, 0, 0, length as i64, 1)?;
            *table = array::unsqueeze(c.g(), rows, 0)?;
        }
        q = turned(c, q, rows, interleaved, half.saturating_mul(2))?;
        k = turned(c, k, rows, interleaved, half.saturating_mul(2))?;
    }
    contributed(c, q, k, v, 0, true, None)
}
