//! Complex numbers as pairs of real ones.
//!
//! The graph has real element types only. A complex tensor is a real one with a last dimension of two, the real and the
//! imaginary part. The functions here take and return the two parts. [`join`] and [`parts`] convert between both forms.
//! Gradients follow from the parts. Like those of PyTorch and JAX, they are the derivatives by both parts.

use super::{Built, ShapeError, binary, compare, convert, full_like, select, slice_dim, stack, unary, with_number};
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, Unary};

/// The real and the imaginary part.
pub type Pair = [ValueId; 2];

/// An operand that is complex, or real if it has no imaginary part.
#[derive(Clone, Copy)]
pub struct Operand {
    pub re: ValueId,
    pub im: Option<ValueId>,
}

impl From<Pair> for Operand {
    fn from([re, im]: Pair) -> Operand {
        Operand { re, im: Some(im) }
    }
}

impl From<ValueId> for Operand {
    fn from(re: ValueId) -> Operand {
        Operand { re, im: None }
    }
}

/// The result of functions of complex numbers.
pub type BuiltPair = Result<Pair, ShapeError>;

/// Joins two `[..]` to one `[.., 2]`.
pub fn join(g: &mut Graph, [re, im]: Pair) -> Built {
    let rank = g.shape(re).len();
    stack(g, &[re, im], rank)
}

/// Splits `[.., 2]` into its two parts of `[..]`.
pub fn parts(g: &mut Graph, x: ValueId) -> BuiltPair {
    let shape = g.shape(x).to_vec();
    let Some((_, own)) = shape.split_last() else { return Err(ShapeError::DimOutOfRange { dim: 0, rank: 0 }) };
    let mut part = |at: i64| {
        let part = slice_dim(g, x, own.len(), at, at + 1, 1)?;
        super::reshape(g, part, own)
    };
    Ok([part(0)?, part(1)?])
}

/// A real number as a complex one.
pub fn of_real(g: &mut Graph, x: ValueId) -> BuiltPair {
    Ok([x, full_like(g, x, 0.0)?])
}

pub fn complex_add(g: &mut Graph, a: Pair, b: Pair) -> BuiltPair {
    Ok([binary(g, Binary::Add, a[0], b[0])?, binary(g, Binary::Add, a[1], b[1])?])
}

pub fn complex_subtract(g: &mut Graph, a: Pair, b: Pair) -> BuiltPair {
    Ok([binary(g, Binary::Subtract, a[0], b[0])?, binary(g, Binary::Subtract, a[1], b[1])?])
}

/// Multiplies both parts by a real tensor.
pub(crate) fn scaled(g: &mut Graph, a: Pair, by: ValueId) -> BuiltPair {
    Ok([binary(g, Binary::Multiply, a[0], by)?, binary(g, Binary::Multiply, a[1], by)?])
}

/// Multiplies both parts by a number.
pub fn scaled_by(g: &mut Graph, a: Pair, by: f64) -> BuiltPair {
    if by == 1.0 {
        return Ok(a);
    }
    Ok([with_number(g, Binary::Multiply, a[0], by)?, with_number(g, Binary::Multiply, a[1], by)?])
}

/// Extends a function that is linear in each of two operands to complex operands.
pub fn bilinear<E: From<ShapeError>>(
    g: &mut Graph,
    a: impl Into<Operand>,
    b: impl Into<Operand>,
    mut f: impl FnMut(&mut Graph, ValueId, ValueId) -> Result<ValueId, E>,
) -> Result<Pair, E> {
    let (a, b) = (a.into(), b.into());
    let mut re = f(g, a.re, b.re)?;
    if let (Some(a), Some(b)) = (a.im, b.im) {
        let product = f(g, a, b)?;
        re = binary(g, Binary::Subtract, re, product)?;
    }
    let mut im: Option<ValueId> = None;
    for (a, b) in [b.im.map(|im| (a.re, im)), a.im.map(|im| (im, b.re))].into_iter().flatten() {
        let product = f(g, a, b)?;
        im = Some(match im {
            Some(sum) => binary(g, Binary::Add, sum, product)?,
            None => product,
        });
    }
    let im = im.map_or_else(|| full_like(g, re, 0.0), Ok)?;
    Ok([re, im])
}

pub fn complex_multiply(g: &mut Graph, a: Pair, b: Pair) -> BuiltPair {
    bilinear(g, a, b, |g, x, y| binary(g, Binary::Multiply, x, y))
}

pub fn conjugate(g: &mut Graph, [re, im]: Pair) -> BuiltPair {
    Ok([re, unary(g, Unary::Negate, im)?])
}

/// The square of the absolute value.
fn squared_abs(g: &mut Graph, [re, im]: Pair) -> Built {
    let (x, y) = (binary(g, Binary::Multiply, re, re)?, binary(g, Binary::Multiply, im, im)?);
    binary(g, Binary::Add, x, y)
}

/// The absolute value. Its derivative at zero is zero.
pub fn complex_abs(g: &mut Graph, x: Pair) -> Built {
    let square = squared_abs(g, x)?;
    root(g, square)
}

/// The square root of nonnegative numbers, with a derivative of zero at zero.
pub fn root(g: &mut Graph, square: ValueId) -> Built {
    let zero = full_like(g, square, 0.0)?;
    let none = compare(g, Direction::Eq, square, zero)?;
    let one = full_like(g, square, 1.0)?;
    let safe = select(g, none, one, square)?;
    let root = unary(g, Unary::Sqrt, safe)?;
    select(g, none, zero, root)
}

/// The angle in `[-pi, pi]`.
pub fn angle(g: &mut Graph, [re, im]: Pair) -> Built {
    binary(g, Binary::Atan2, im, re)
}

/// The number with this absolute value and angle.
pub fn polar(g: &mut Graph, radius: ValueId, angle: ValueId) -> BuiltPair {
    let (cosine, sine) = (unary(g, Unary::Cosine, angle)?, unary(g, Unary::Sine, angle)?);
    scaled(g, [cosine, sine], radius)
}

pub fn complex_exp(g: &mut Graph, [re, im]: Pair) -> BuiltPair {
    let radius = unary(g, Unary::Exponential, re)?;
    polar(g, radius, im)
}

/// The principal logarithm.
pub fn complex_log(g: &mut Graph, x: Pair) -> BuiltPair {
    let square = squared_abs(g, x)?;
    let log = unary(g, Unary::Log, square)?;
    Ok([with_number(g, Binary::Multiply, log, 0.5)?, angle(g, x)?])
}

/// The principal square root, computed from half the angle.
pub fn complex_sqrt(g: &mut Graph, x: Pair) -> BuiltPair {
    let size = complex_abs(g, x)?;
    let radius = root(g, size)?;
    let angle = angle(g, x)?;
    let half = with_number(g, Binary::Multiply, angle, 0.5)?;
    polar(g, radius, half)
}

pub fn complex_divide(g: &mut Graph, a: Pair, b: Pair) -> BuiltPair {
    let conjugate = conjugate(g, b)?;
    let product = complex_multiply(g, a, conjugate)?;
    let square = squared_abs(g, b)?;
    Ok([binary(g, Binary::Divide, product[0], square)?, binary(g, Binary::Divide, product[1], square)?])
}

/// An integer power by repeated squaring.
pub fn complex_power(g: &mut Graph, x: Pair, power: u32) -> BuiltPair {
    let one = full_like(g, x[0], 1.0)?;
    let mut result = of_real(g, one)?;
    let (mut square, mut left, mut first) = (x, power, true);
    while left > 0 {
        if left & 1 == 1 {
            result = if first { square } else { complex_multiply(g, result, square)? };
            first = false;
        }
        left >>= 1;
        if left > 0 {
            square = complex_multiply(g, square, square)?;
        }
    }
    Ok(result)
}

/// Converts both parts to another real type.
pub fn complex_convert(g: &mut Graph, x: Pair, dtype: crate::dtype::DType) -> BuiltPair {
    Ok([convert(g, x[0], dtype)?, convert(g, x[1], dtype)?])
}
