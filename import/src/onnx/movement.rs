//! Shapes, and ops that move elements or make them from sizes.

use super::call::{Call, Many, One, attribute, bad_value, sizes};
use super::elementwise::dtype_attribute;
use super::report::{ProblemKind, Reject};
use super::tensor::elements_of;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, BroadcastInDim, Direction, Op, Pad};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// The largest number of elements of a constant. Larger ones belong in an initializer.
const MOST_CONSTANT_ELEMENTS: usize = 1 << 20;

/// A list of integers as a constant.
pub(crate) fn integers(c: &mut Call, list: Vec<f64>) -> ValueId {
    let ty = TensorType::new(DType::I64, [list.len() as u64]);
    c.g().constant(Literal::dense(ty, list))
}

pub(crate) fn constant(c: &mut Call) -> One {
    let list = |dtype, data: Vec<f64>| Tensor::new(TensorType::new(dtype, [data.len() as u64]), data);
    let tensor = if let Some(tensor) = c.attribute("value") {
        elements_of(tensor.t.as_ref().ok_or(attribute("value"))?)?
    } else if let Some(number) = c.float_opt("value_float")? {
        Tensor::scalar(DType::F32, DType::F32.round(number))
    } else if let Some(number) = c.int_opt("value_int")? {
        Tensor::scalar(DType::I64, number as f64)
    } else if let Some(numbers) = c.floats_opt("value_floats")? {
        list(DType::F32, numbers)
    } else if let Some(numbers) = c.ints_opt("value_ints")? {
        list(DType::I64, numbers.iter().map(|&i| i as f64).collect())
    } else {
        return Err(Reject::Unsupported("of strings or without a dense value"));
    };
    if tensor.data.len() > MOST_CONSTANT_ELEMENTS {
        return Err(Reject::Unsupported("with more than a million elements, which is an initializer's work"));
    }
    c.builder.table(c.node, tensor.data.len() as u64)?;
    Ok(c.g().constant(Literal::dense(tensor.ty, tensor.data)))
}

pub(crate) fn constant_of_shape(c: &mut Call) -> One {
    let shape = c.ints_of(0)?;
    let shape = shape.iter().map(|&s| u64::try_from(s).map_err(|_| bad_value(0))).collect::<Result<Vec<_>, _>>()?;
    let (value, dtype) = match c.tensor("value")? {
        None => (0.0, DType::F32),
        Some(tensor) => match tensor.data.as_slice() {
            [only] => (*only, tensor.ty.dtype),
            _ => return Err(attribute("value")),
        },
    };
    Ok(array::full(c.g(), &shape, value, dtype)?)
}

pub(crate) fn shape(c: &mut Call) -> One {
    let x = c.x(0)?;
    let shape = c.shape(x);
    let rank = shape.len() as i64;
    let place = |at: i64| (if at < 0 { at.saturating_add(rank) } else { at }).clamp(0, rank) as usize;
    let (start, end) = (place(c.int("start", 0)?), place(c.int("end", rank)?));
    let wanted = shape.get(start..end.max(start)).unwrap_or_default();
    Ok(integers(c, wanted.iter().map(|&s| s as f64).collect()))
}

pub(crate) fn size(c: &mut Call) -> One {
    let x = c.x(0)?;
    let elements = c.g().ty(x).elements() as f64;
    Ok(array::scalar(c.g(), elements, DType::I64)?)
}

pub(crate) fn range(c: &mut Call) -> One {
    let (start, limit, delta) = (c.number_of(0)?, c.number_of(1)?, c.number_of(2)?);
    if delta == 0.0 {
        return Err(bad_value(2));
    }
    let count = ((limit - start) / delta).ceil().max(0.0);
    let first = c.x(0)?;
    let dtype = c.dtype(first);
    Ok(array::arange(c.g(), count as u64, start, delta, dtype)?)
}

pub(crate) fn eye_like(c: &mut Call) -> One {
    let x = c.x(0)?;
    let k = c.int("k", 0)?;
    let dtype = dtype_attribute(c, "dtype")?.unwrap_or(c.dtype(x));
    let shape = c.shape(x);
    if shape.len() != 2 {
        return Err(bad_value(0));
    }
    let g = c.g();
    let (row, column) = (array::iota(g, &shape, 0, DType::I64)?, array::iota(g, &shape, 1, DType::I64)?);
    let row = array::with_number(g, Binary::Add, row, k as f64)?;
    let hit = array::compare(g, Direction::Eq, row, column)?;
    Ok(array::convert(g, hit, dtype)?)
}

/// `sum_k coefficients[k] cos(2 pi k i / n)`.
pub(crate) fn window(c: &mut Call, coefficients: &[f64]) -> One {
    let size = c.number_of(0)?;
    let periodic = c.flag("periodic", true)?;
    let dtype = dtype_attribute(c, "output_datatype")?.unwrap_or(DType::F32);
    if !(0.0..=65536.0).contains(&size) {
        return Err(bad_value(0));
    }
    c.builder.table(c.node, size as u64)?;
    let n = if periodic { size } else { size - 1.0 };
    let angle = |i: f64| 2.0 * std::f64::consts::PI * i / n;
    let value =
        |i: u32| (0..).zip(coefficients).map(|(k, c)| c * libm::cos(angle(f64::from(i) * f64::from(k)))).sum::<f64>();
    let data: Vec<f64> = (0..size as u32).map(|i| dtype.round(value(i))).collect();
    Ok(c.g().constant(Literal::dense(TensorType::new(dtype, [data.len() as u64]), data)))
}

pub(crate) fn reshape(c: &mut Call) -> One {
    let x = c.x(0)?;
    let mut wanted = c.ints_either("shape", 1)?.ok_or(Reject::Invalid(ProblemKind::Operand { index: 1 }))?;
    if !c.flag("allowzero", false)? {
        // Zero stands for the original size.
        let shape = c.shape(x);
        for (d, size) in wanted.iter_mut().enumerate().filter(|(_, size)| **size == 0) {
            *size = *shape.get(d).ok_or(bad_value(1))? as i64;
        }
    }
    Ok(array::reshape_to(c.g(), x, &wanted)?)
}

pub(crate) fn flatten(c: &mut Call) -> One {
    let x = c.x(0)?;
    let shape = c.shape(x);
    let axis = c.int("axis", 1)?;
    let at = if axis == shape.len() as i64 { shape.len() } else { array::axis(axis, shape.len())? };
    let (outer, inner) = shape.split_at(at);
    let flat = [outer, inner].map(|part| part.iter().product::<u64>());
    Ok(array::reshape(c.g(), x, &flat)?)
}

pub(crate) fn squeeze(c: &mut Call) -> One {
    let x = c.x(0)?;
    let shape = c.shape(x);
    let dims = match c.ints_either("axes", 1)? {
        None => (0..shape.len()).filter(|&d| shape[d] == 1).collect(),
        Some(axes) => array::axes(&axes, shape.len())?,
    };
    if dims.iter().any(|&d| shape[d] != 1) {
        return Err(bad_value(1));
    }
    Ok(array::squeeze(c.g(), x, &dims)?)
}

pub(crate) fn unsqueeze(c: &mut Call) -> One {
    let x = c.x(0)?;
    let axes = c.ints_either("axes", 1)?.ok_or(attribute("axes"))?;
    let mut shape = c.shape(x);
    for d in array::axes(&axes, shape.len() + axes.len())? {
        shape.insert(d.min(shape.len()), 1);
    }
    Ok(array::reshape(c.g(), x, &shape)?)
}

pub(crate) fn transpose(c: &mut Call) -> One {
    let x = c.x(0)?;
    let rank = c.rank(x);
    let permutation = match c.ints_opt("perm")? {
        None => (0..rank).rev().collect(),
        Some(perm) => perm.iter().map(|&p| array::axis(p, rank)).collect::<Result<Vec<_>, _>>()?,
    };
    Ok(array::permute(c.g(), x, &permutation)?)
}

pub(crate) fn expand(c: &mut Call) -> One {
    let x = c.x(0)?;
    let wanted = sizes(&c.ints_of(1)?, "shape")?;
    let shape = array::broadcast_shapes(&c.shape(x), &wanted)?;
    Ok(array::broadcast_to(c.g(), x, &shape)?)
}

pub(crate) fn tile(c: &mut Call) -> One {
    let x = c.x(0)?;
    let repeats = sizes(&c.ints_of(1)?, "repeats")?;
    let shape = c.shape(x);
    if repeats.len() != shape.len() {
        return Err(bad_value(1));
    }
    // Insert a dimension before each repeated one, along which it is broadcast.
    let (mut wide, mut kept, mut result) = (Vec::new(), Vec::new(), Vec::new());
    for (&size, &times) in shape.iter().zip(&repeats) {
        if times != 1 {
            wide.push(times);
        }
        kept.push(wide.len());
        wide.push(size);
        result.push(size.checked_mul(times).ok_or(bad_value(1))?);
    }
    if result == shape {
        return Ok(x);
    }
    let repeated = c.g().push(Op::BroadcastInDim(BroadcastInDim { shape: wide, dims: kept }), &[x])?;
    Ok(array::reshape(c.g(), repeated, &result)?)
}

/// Concatenates parts. Empty parts add nothing, but one is kept if all are empty, so that its type is checked.
pub(crate) fn concat(c: &mut Call) -> One {
    let parts = c.all()?;
    let first = c.x(0)?;
    let dim = c.axis("axis", 0, first)?;
    let some: Vec<ValueId> = parts.iter().copied().filter(|&p| c.shape(p).get(dim) != Some(&0)).collect();
    let parts = if some.is_empty() { &parts[..1] } else { &some[..] };
    Ok(array::concat(c.g(), parts, dim)?)
}

pub(crate) fn split(c: &mut Call) -> Many {
    let x = c.x(0)?;
    let dim = c.axis("axis", 0, x)?;
    let size = c.shape(x)[dim];
    let parts = match c.ints_either("split", 1)? {
        Some(parts) => sizes(&parts, "split")?,
        None => {
            // Parts of equal size, with a shorter last one. The node lists an output for each.
            let outputs = c.node.output.len() as u64;
            let count = c.int("num_outputs", outputs as i64)?;
            let count = u64::try_from(count).ok().filter(|&n| n > 0 && n <= outputs.min(size.max(1)));
            let count = count.ok_or(attribute("num_outputs"))?;
            let part = size.div_ceil(count);
            (0..count).map(|i| part.min(size.saturating_sub(i * part))).collect()
        }
    };
    Ok(array::split(c.g(), x, dim, &parts)?)
}

pub(crate) fn slice(c: &mut Call) -> One {
    let x = c.x(0)?;
    let required = |found: Option<Vec<i64>>, index| found.ok_or(Reject::Invalid(ProblemKind::Operand { index }));
    let starts = c.ints_either("starts", 1)?;
    let starts = required(starts, 1)?;
    let ends = c.ints_either("ends", 2)?;
    let ends = required(ends, 2)?;
    let axes = c.ints_either("axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = if c.opt(4).is_some() { c.ints_of(4)? } else { vec![1; starts.len()] };
    if [ends.len(), axes.len(), steps.len()].iter().any(|&n| n != starts.len()) {
        return Err(bad_value(2));
    }
    let shape = c.shape(x);
    let mut result = x;
    for (((start, end), axis), step) in starts.into_iter().zip(ends).zip(axes).zip(steps) {
        let dim = array::axis(axis, shape.len())?;
        if step > 0 {
            result = array::slice_dim(c.g(), result, dim, start, end, step as u64)?;
            continue;
        }
        if step == 0 {
            return Err(bad_value(4));
        }
        // A backward slice takes the same positions, counted from the other end.
        let size = shape[dim] as i64;
        let place = |at: i64, least: i64| {
            let at = if at < 0 { at.saturating_add(size) } else { at };
            size - 1 - at.clamp(least, size - 1)
        };
        let (from, to) = (place(start, -1), place(end, -1));
        let flipped = array::flip(c.g(), result, &[dim])?;
        result = array::slice_dim(c.g(), flipped, dim, from, to, step.unsigned_abs())?;
    }
    Ok(result)
}

pub(crate) fn pad(c: &mut Call) -> One {
    let x = c.x(0)?;
    let shape = c.shape(x);
    let rank = shape.len();
    let pads = match c.ints_opt("paddings")? {
        Some(pads) => pads.to_vec(),
        None => c.ints_either("pads", 1)?.ok_or(attribute("pads"))?,
    };
    let dims: Vec<usize> = match c.opt(3) {
        None => (0..rank).collect(),
        Some(_) => c.ints_of(3)?.iter().map(|&a| array::axis(a, rank)).collect::<Result<_, _>>()?,
    };
    if pads.len() != 2 * dims.len() {
        return Err(bad_value(1));
    }
    let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
    for (i, &d) in dims.iter().enumerate() {
        (low[d], high[d]) = (pads[i], pads[dims.len() + i]);
    }
    if pads.iter().any(|p| p.unsigned_abs() > 1 << 40) {
        return Err(bad_value(1));
    }
    match c.text("mode", "constant")? {
        "constant" => {}
        mode => {
            let mut result = x;
            for d in 0..rank {
                result = pad_from_inside(c, result, d, low[d], high[d], mode)?;
            }
            return Ok(result);
        }
    }
    let said = c.float_opt("value")?;
    let dtype = c.dtype(x);
    let value = match (said, c.opt(2)) {
        (None, Some(value)) => array::reshape(c.g(), value, &[])?,
        (said, _) => array::scalar(c.g(), said.unwrap_or(0.0), dtype)?,
    };
    if low.iter().chain(&high).all(|&n| n == 0) {
        return Ok(x);
    }
    Ok(c.g().push(Op::Pad(Pad { low, high, interior: vec![0; rank] }), &[x, value])?)
}

/// Pads dimension `d` with elements of `x` itself: mirrored, from the edge, or from the other end.
fn pad_from_inside(c: &mut Call, x: ValueId, d: usize, low: i64, high: i64, mode: &str) -> One {
    let whole = c.shape(x)[d] as i64;
    let cut = |n: i64| n.min(0).unsigned_abs() as i64;
    let x = array::slice_dim(c.g(), x, d, cut(low), (whole - cut(high)).max(cut(low)), 1)?;
    let mut shape = c.shape(x);
    let size = shape[d] as i64;
    let (low, high) = (low.max(0), high.max(0));
    let most = match mode {
        "reflect" => size - 1,
        "wrap" => size,
        "edge" if size > 0 => i64::MAX,
        "edge" => 0,
        _ => return Err(attribute("mode")),
    };
    if low.max(high) > most {
        return Err(Reject::Unsupported("by more than there is"));
    }
    let mut parts = Vec::new();
    for (count, before) in [(low, true), (high, false)] {
        if !before {
            parts.push(x);
        }
        if count == 0 {
            continue;
        }
        let g = c.g();
        let (start, end) = match (mode, before) {
            ("reflect", true) => (1, 1 + count),
            ("reflect", false) => (size - 1 - count, size - 1),
            ("wrap", true) => (size - count, size),
            ("wrap", false) => (0, count),
            (_, true) => (0, 1),
            (_, false) => (size - 1, size),
        };
        let mut part = array::slice_dim(g, x, d, start, end, 1)?;
        match mode {
            "reflect" => part = array::flip(g, part, &[d])?,
            "edge" => {
                shape[d] = count as u64;
                part = array::broadcast_to(g, part, &shape)?;
            }
            _ => {}
        }
        parts.push(part);
    }
    Ok(array::concat(c.g(), &parts, d)?)
}

pub(crate) fn center_crop_pad(c: &mut Call) -> One {
    let x = c.x(0)?;
    let wanted = c.ints_of(1)?;
    let shape = c.shape(x);
    let axes = c.ints_opt("axes")?.map_or_else(|| (0..shape.len() as i64).collect(), <[i64]>::to_vec);
    if axes.len() != wanted.len() || wanted.iter().any(|w| !(0..1 << 40).contains(w)) {
        return Err(bad_value(1));
    }
    let (mut low, mut high) = (vec![0; shape.len()], vec![0; shape.len()]);
    for (&axis, &wanted) in axes.iter().zip(&wanted) {
        let d = array::axis(axis, shape.len())?;
        let more = wanted - shape[d] as i64;
        low[d] = if more < 0 { -(-more / 2) } else { more / 2 };
        high[d] = more - low[d];
    }
    Ok(array::pad(c.g(), x, &low, &high, 0.0)?)
}

/// The triangle on one side of a diagonal, diagonal included.
pub(crate) fn trilu(c: &mut Call) -> One {
    let x = c.x(0)?;
    let upper = c.flag("upper", true)?;
    let k = if c.opt(1).is_some() { c.number_of(1)? as i64 } else { 0 };
    let shape = c.shape(x);
    let [.., rows, columns] = shape[..] else { return Err(bad_value(0)) };
    // All distances beyond the matrix have the same result.
    let k = k.clamp(-(rows as i64) - 1, columns as i64 + 1);
    let g = c.g();
    let zero = array::full_like(g, x, 0.0)?;
    let below = array::causal_mask(g, rows, columns, if upper { k - 1 } else { k })?;
    Ok(if upper { array::select(g, below, zero, x)? } else { array::select(g, below, x, zero)? })
}

/// `[n, c, h, w]`, and the size of blocks.
fn blocks(c: &mut Call) -> Result<(ValueId, [u64; 4], u64), Reject> {
    let x = c.x(0)?;
    let shape = <[u64; 4]>::try_from(c.shape(x)).map_err(|_| bad_value(0))?;
    let block = c.int("blocksize", 0)?;
    let block = u64::try_from(block).ok().filter(|b| (1..1 << 20).contains(b)).ok_or(attribute("blocksize"))?;
    Ok((x, shape, block))
}

pub(crate) fn depth_to_space(c: &mut Call) -> One {
    let (x, [n, channels, h, w], b) = blocks(c)?;
    if !channels.is_multiple_of(b * b) {
        return Err(attribute("blocksize"));
    }
    let depth = channels / (b * b);
    let (split, order) = match c.text("mode", "DCR")? {
        "DCR" => ([n, b, b, depth, h, w], [0, 3, 4, 1, 5, 2]),
        "CRD" => ([n, depth, b, b, h, w], [0, 1, 4, 2, 5, 3]),
        _ => return Err(attribute("mode")),
    };
    let g = c.g();
    let split = array::reshape(g, x, &split)?;
    let moved = array::permute(g, split, &order)?;
    Ok(array::reshape(g, moved, &[n, depth, h * b, w * b])?)
}

pub(crate) fn space_to_depth(c: &mut Call) -> One {
    let (x, [n, channels, h, w], b) = blocks(c)?;
    if !h.is_multiple_of(b) || !w.is_multiple_of(b) {
        return Err(attribute("blocksize"));
    }
    let order = match c.text("mode", "DCR")? {
        "DCR" => &[0, 3, 5, 1, 2, 4],
        "CRD" => &[0, 1, 3, 5, 2, 4],
        _ => return Err(attribute("mode")),
    };
    let g = c.g();
    let split = array::reshape(g, x, &[n, channels, h / b, b, w / b, b])?;
    let moved = array::permute(g, split, order)?;
    Ok(array::reshape(g, moved, &[n, channels.saturating_mul(b * b), h / b, w / b])?)
}
