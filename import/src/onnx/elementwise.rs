//! Functions of the elements at the same position, with broadcasting.

use super::call::{Call, One, attribute};
use super::report::Reject;
use super::tensor::dtype_of;
use altiplano_ir::array::{self, Built};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Direction, Op, Unary};

pub(crate) fn unary(c: &mut Call, op: Unary) -> One {
    let x = c.x(0)?;
    Ok(array::unary(c.g(), op, x)?)
}

pub(crate) fn binary(c: &mut Call, op: Binary) -> One {
    let (a, b) = (c.x(0)?, c.x(1)?);
    Ok(array::binary(c.g(), op, a, b)?)
}

pub(crate) fn compare(c: &mut Call, direction: Direction) -> One {
    let (a, b) = (c.x(0)?, c.x(1)?);
    Ok(array::compare(c.g(), direction, a, b)?)
}

/// Combines the operands one after the other.
pub(crate) fn fold(c: &mut Call, op: Binary) -> One {
    let operands = c.all()?;
    let mut result = c.x(0)?;
    for &operand in &operands[1..] {
        result = array::binary(c.g(), op, result, operand)?;
    }
    Ok(result)
}

pub(crate) fn mean(c: &mut Call) -> One {
    let total = fold(c, Binary::Add)?;
    let count = c.operands.len() as f64;
    Ok(array::with_number(c.g(), Binary::Divide, total, count)?)
}

pub(crate) fn select(c: &mut Call) -> One {
    let (p, a, b) = (c.x(0)?, c.x(1)?, c.x(2)?);
    Ok(array::select(c.g(), p, a, b)?)
}

/// A power with the type of the base. Squares, cubes and roots become products and roots.
pub(crate) fn power(c: &mut Call) -> One {
    let (x, y) = (c.x(0)?, c.x(1)?);
    let dtype = c.dtype(x);
    let exponent = c.known(1).filter(|t| t.ty.elements() == 1 && t.ty.rank() <= c.rank(x)).map(|t| t.data[0]);
    let g = c.g();
    let square = |g: &mut Graph| array::binary(g, Binary::Multiply, x, x);
    Ok(match exponent {
        Some(1.0) => x,
        Some(2.0) => square(g)?,
        Some(3.0) => {
            let square = square(g)?;
            array::binary(g, Binary::Multiply, square, x)?
        }
        Some(0.5) if dtype.is_float() => array::unary(g, Unary::Sqrt, x)?,
        _ if !dtype.is_float() && g.ty(y).dtype.is_float() => {
            let wide = array::convert(g, x, DType::F64)?;
            let y = array::convert(g, y, DType::F64)?;
            let power = array::binary(g, Binary::Power, wide, y)?;
            array::convert(g, power, dtype)?
        }
        _ => {
            let y = array::convert(g, y, dtype)?;
            array::binary(g, Binary::Power, x, y)?
        }
    })
}

/// The remainder. With `fmod`, its sign is that of the dividend as in C, otherwise that of the divisor as in Python.
pub(crate) fn modulo(c: &mut Call) -> One {
    let fmod = c.flag("fmod", false)?;
    let (a, b) = (c.x(0)?, c.x(1)?);
    let signed = !c.dtype(a).is_unsigned_integer();
    let g = c.g();
    let (a, b) = array::broadcast(g, a, b)?;
    let rest = array::binary(g, Binary::Remainder, a, b)?;
    if fmod || !signed {
        return Ok(rest);
    }
    let zero = array::full_like(g, rest, 0.0)?;
    let some = array::compare(g, Direction::Ne, rest, zero)?;
    let negative = array::compare(g, Direction::Lt, rest, zero)?;
    let divisor_negative = array::compare(g, Direction::Lt, b, zero)?;
    let signs = array::binary(g, Binary::Xor, negative, divisor_negative)?;
    let wrong = array::binary(g, Binary::And, some, signs)?;
    let moved = array::binary(g, Binary::Add, rest, b)?;
    Ok(array::select(g, wrong, moved, rest)?)
}

pub(crate) fn bit_shift(c: &mut Call) -> One {
    match c.text("direction", "")? {
        "LEFT" => binary(c, Binary::ShiftLeft),
        "RIGHT" => {
            let x = c.x(0)?;
            let signed = c.dtype(x).is_signed_integer();
            binary(c, if signed { Binary::ShiftRightArithmetic } else { Binary::ShiftRightLogical })
        }
        _ => Err(attribute("direction")),
    }
}

pub(crate) fn cast(c: &mut Call) -> One {
    let to = c.int_opt("to")?.and_then(|to| i32::try_from(to).ok()).ok_or(attribute("to"))?;
    let dtype = dtype_of(to)?;
    cast_to(c, dtype)
}

pub(crate) fn cast_like(c: &mut Call) -> One {
    let like = c.x(1)?;
    let dtype = c.dtype(like);
    cast_to(c, dtype)
}

/// Converts to `dtype`. Numbers beyond the greatest of an eight-bit float become the greatest, unless `saturate` is
/// off.
fn cast_to(c: &mut Call, dtype: DType) -> One {
    let saturate = c.flag("saturate", true)?;
    let x = c.x(0)?;
    let narrow = dtype.float_format().filter(|f| f.width() == 8 && f.exponent_bits < 8);
    let g = c.g();
    match narrow.filter(|_| saturate && g.ty(x).dtype.is_float()) {
        Some(format) => {
            let most = format.greatest();
            let inside = array::clamp(g, x, Some(-most), Some(most))?;
            Ok(array::convert(g, inside, dtype)?)
        }
        None => Ok(array::convert(g, x, dtype)?),
    }
}

pub(crate) fn is_nan(c: &mut Call) -> One {
    let x = c.x(0)?;
    Ok(array::compare(c.g(), Direction::Ne, x, x)?)
}

pub(crate) fn is_inf(c: &mut Call) -> One {
    let (positive, negative) = (c.flag("detect_positive", true)?, c.flag("detect_negative", true)?);
    let x = c.x(0)?;
    let g = c.g();
    let value = if positive && negative { array::unary(g, Unary::Abs, x)? } else { x };
    let limit = match (positive, negative) {
        (true, _) => f64::INFINITY,
        (false, true) => f64::NEG_INFINITY,
        (false, false) => {
            let shape = g.shape(x).to_vec();
            return Ok(array::full(g, &shape, 0.0, DType::Bool)?);
        }
    };
    let limit = array::full_like(g, x, limit)?;
    Ok(array::compare(g, Direction::Eq, value, limit)?)
}

pub(crate) fn reciprocal(c: &mut Call) -> One {
    let x = c.x(0)?;
    let g = c.g();
    let one = array::full_like(g, x, 1.0)?;
    Ok(g.push(Op::Binary(Binary::Divide), &[one, x])?)
}

/// A function of `array`.
pub(crate) fn function(c: &mut Call, f: impl FnOnce(&mut Graph, ValueId) -> Built) -> One {
    let x = c.x(0)?;
    Ok(f(c.g(), x)?)
}

/// The element type of an attribute, which is a number of the standard's enumeration.
pub(crate) fn dtype_attribute(c: &Call, name: &'static str) -> Result<Option<DType>, Reject> {
    let Some(number) = c.int_opt(name)? else { return Ok(None) };
    let number = i32::try_from(number).map_err(|_| attribute(name))?;
    Ok(if number == 0 { None } else { Some(dtype_of(number)?) })
}
