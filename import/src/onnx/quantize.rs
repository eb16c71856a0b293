//! Narrow integers that represent floats.

use super::call::{Call, Many, One, attribute, bad_value};
use super::contraction::convolved;
use super::elementwise::dtype_attribute;
use super::report::Reject;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Direction, Unary};

/// The smallest and the largest number of a type.
fn bounds(dtype: DType) -> (f64, f64) {
    match dtype.float_format() {
        Some(format) => (-format.greatest(), format.greatest()),
        None if dtype.is_signed_integer() => {
            let half = 2f64.powi(dtype.width() as i32 - 1);
            (-half, half - 1.0)
        }
        None => (0.0, 2f64.powi(dtype.width() as i32) - 1.0),
    }
}

/// A value for all elements, for each slice of the dimension `axis`, or for each block of it. The result has the shape
/// of `x` or broadcasts to it.
fn spread(c: &mut Call, x: ValueId, value: ValueId) -> One {
    let (shape, given) = (c.shape(x), c.shape(value));
    if given.is_empty() || given == [1] {
        return Ok(array::reshape(c.g(), value, &[])?);
    }
    let dim = c.axis("axis", 1, x)?;
    let block = c.int("block_size", 0)?;
    if given.len() == 1 && block == 0 {
        let mut column = vec![1; shape.len()];
        column[dim] = given[0];
        return Ok(array::reshape(c.g(), value, &column)?);
    }
    if given.len() != shape.len() || given[dim] == 0 {
        return Err(bad_value(1));
    }
    let block = if block > 0 { block as u64 } else { shape[dim].div_ceil(given[dim]) };
    let mut wide = given.clone();
    wide.insert(dim + 1, block);
    let g = c.g();
    let value = array::unsqueeze(g, value, dim as i64 + 1)?;
    let value = array::broadcast_to(g, value, &wide)?;
    wide.remove(dim + 1);
    wide[dim] = wide[dim].checked_mul(block).ok_or(attribute("block_size"))?;
    let value = array::reshape(g, value, &wide)?;
    Ok(array::slice_dim(g, value, dim, 0, shape[dim] as i64, 1)?)
}

/// `round(x / scale) + zero`, clamped to the type's bounds.
fn quantized(c: &mut Call, x: ValueId, scale: ValueId, zero: Option<ValueId>, dtype: DType) -> One {
    let wide = c.dtype(scale);
    let scale = spread(c, x, scale)?;
    let zero = zero.map(|zero| spread(c, x, zero)).transpose()?;
    let g = c.g();
    let x = array::convert(g, x, wide)?;
    let mut y = array::binary(g, Binary::Divide, x, scale)?;
    if !dtype.is_float() {
        y = array::unary(g, Unary::RoundNearestEven, y)?;
    }
    if let Some(zero) = zero {
        let zero = array::convert(g, zero, wide)?;
        y = array::binary(g, Binary::Add, y, zero)?;
    }
    let (low, high) = bounds(dtype);
    let y = array::clamp(g, y, Some(low), Some(high))?;
    Ok(array::convert(g, y, dtype)?)
}

/// `(x - zero) scale`, in the type of the scale.
fn dequantized(c: &mut Call, x: ValueId, scale: ValueId, zero: Option<ValueId>) -> One {
    let wide = c.dtype(scale);
    let scale = spread(c, x, scale)?;
    let zero = zero.map(|zero| spread(c, x, zero)).transpose()?;
    let g = c.g();
    let mut y = array::convert(g, x, wide)?;
    if let Some(zero) = zero {
        let zero = array::convert(g, zero, wide)?;
        y = array::binary(g, Binary::Subtract, y, zero)?;
    }
    Ok(array::binary(g, Binary::Multiply, y, scale)?)
}

pub(crate) fn quantize(c: &mut Call) -> One {
    let (x, scale, zero) = (c.x(0)?, c.x(1)?, c.opt(2));
    let said = dtype_attribute(c, "output_dtype")?;
    let dtype = said.or(zero.map(|zero| c.dtype(zero))).unwrap_or(DType::U8);
    quantized(c, x, scale, zero, dtype)
}

pub(crate) fn dequantize(c: &mut Call) -> One {
    let (x, scale, zero) = (c.x(0)?, c.x(1)?, c.opt(2));
    dequantized(c, x, scale, zero)
}

/// Quantises to unsigned bytes over the range of all elements, which includes zero.
pub(crate) fn dynamic(c: &mut Call) -> Many {
    let x = c.x(0)?;
    let all: Vec<usize> = (0..c.rank(x)).collect();
    let dtype = c.dtype(x);
    let g = c.g();
    let high = array::max(g, x, &all, false)?;
    let high = array::with_number(g, Binary::Maximum, high, 0.0)?;
    let low = array::min(g, x, &all, false)?;
    let low = array::with_number(g, Binary::Minimum, low, 0.0)?;
    let range = array::binary(g, Binary::Subtract, high, low)?;
    let scale = array::with_number(g, Binary::Divide, range, 255.0)?;
    // If all elements are zero, any scale works.
    let nothing = array::full_like(g, scale, 0.0)?;
    let one = array::full_like(g, scale, 1.0)?;
    let flat = array::compare(g, Direction::Eq, scale, nothing)?;
    let safe = array::select(g, flat, one, scale)?;
    let start = array::binary(g, Binary::Divide, low, safe)?;
    let start = array::unary(g, Unary::Negate, start)?;
    let start = array::clamp(g, start, Some(0.0), Some(255.0))?;
    let start = array::unary(g, Unary::RoundNearestEven, start)?;
    let zero = array::convert(g, start, DType::U8)?;
    debug_assert_eq!(g.ty(safe).dtype, dtype);
    let y = quantized(c, x, safe, Some(zero), DType::U8)?;
    Ok(vec![y, scale, zero])
}

/// An operand as `i32` minus its zero point, which has one element or one for each slice of `dim`.
fn centred(c: &mut Call, index: usize, zero: usize, dim: usize) -> One {
    let x = c.x(index)?;
    let wide = array::convert(c.g(), x, DType::I32)?;
    let Some(zero) = c.opt(zero) else { return Ok(wide) };
    let mut shape = vec![1; c.rank(x)];
    let given = c.shape(zero);
    let g = c.g();
    let mut zero = array::convert(g, zero, DType::I32)?;
    if given.len() <= 1 {
        let count = given.first().copied().unwrap_or(1);
        if count != 1 {
            *shape.get_mut(dim).ok_or(bad_value(index))? = count;
        }
        zero = array::reshape(g, zero, &shape)?;
    }
    Ok(array::binary(g, Binary::Subtract, wide, zero)?)
}

pub(crate) fn mat_mul_integer(c: &mut Call) -> One {
    let (a, b) = (c.x(0)?, c.x(1)?);
    let (rows, columns) = (c.rank(a).saturating_sub(2), c.rank(b).saturating_sub(1));
    let (a, b) = (centred(c, 0, 2, rows)?, centred(c, 1, 3, columns)?);
    Ok(array::matmul(c.g(), a, b)?)
}

pub(crate) fn conv_integer(c: &mut Call) -> One {
    let (x, w) = (centred(c, 0, 2, 1)?, centred(c, 1, 3, 0)?);
    convolved(c, x, w, None)
}

/// The operands, scales and zero points of both sides, then those of the result. The product is computed in floats.
pub(crate) fn linear_mat_mul(c: &mut Call) -> One {
    let a = scaled(c, 0, None)?;
    let b = scaled(c, 3, None)?;
    let y = array::matmul(c.g(), a, b)?;
    rescaled(c, y)
}

pub(crate) fn linear_conv(c: &mut Call) -> One {
    let x = scaled(c, 0, None)?;
    let w = scaled(c, 3, Some(0))?;
    let mut bias = c.opt(8);
    if let Some(integers) = bias {
        // The bias is in units of both scales.
        let (left, right) = (c.x(1)?, c.x(4)?);
        let g = c.g();
        let left = array::reshape(g, left, &[])?;
        let unit = array::binary(g, Binary::Multiply, right, left)?;
        let wide = array::convert(g, integers, g.ty(unit).dtype)?;
        bias = Some(array::binary(g, Binary::Multiply, wide, unit)?);
    }
    let y = convolved(c, x, w, bias)?;
    rescaled(c, y)
}

/// Operand `index` as floats. Its scale and its zero point are the next operands.
fn scaled(c: &mut Call, index: usize, dim: Option<usize>) -> One {
    let (x, scale, zero) = (c.x(index)?, c.x(index + 1)?, c.x(index + 2)?);
    let mut shape = vec![1; c.rank(x)];
    let count = c.g().ty(scale).elements();
    match dim {
        Some(dim) if count != 1 => *shape.get_mut(dim).ok_or(bad_value(index))? = count,
        _ if count != 1 => return Err(Reject::Unsupported("with a scale for each row or column")),
        _ => {}
    }
    let g = c.g();
    let (scale, wide) = (array::reshape(g, scale, &shape)?, g.ty(scale).dtype);
    if g.ty(zero).elements() == 1 {
        shape.fill(1);
    }
    let zero = array::reshape(g, zero, &shape)?;
    let (x, zero) = (array::convert(g, x, wide)?, array::convert(g, zero, wide)?);
    let centred = array::binary(g, Binary::Subtract, x, zero)?;
    Ok(array::binary(g, Binary::Multiply, centred, scale)?)
}

fn rescaled(c: &mut Call, y: ValueId) -> One {
    let (scale, zero) = (c.x(6)?, c.x(7)?);
    let dtype = c.dtype(zero);
    quantized(c, y, scale, Some(zero), dtype)
}
