//! Lowers factors and inverses of small matrices, unrolled row by row.
//!
//! The graph has no op that solves a system, so each step of the textbook algorithm is a few ops on whole
//! batches of matrices. This suits the small systems of normalising flows, Gaussian processes and whitening;
//! larger ones are refused.

use super::*;
use Lowering::Function;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("linalg_cholesky", Function(cholesky)),
    ("cholesky", Function(cholesky)),
    ("linalg_cholesky_ex", Function(cholesky)),
    ("linalg_solve_triangular", Function(solve_triangular)),
    ("triangular_solve", Function(old_solve_triangular)),
    ("linalg_solve", Function(solve)),
    ("_linalg_solve_ex", Function(solve)),
    ("linalg_inv", Function(inverse)),
    ("linalg_inv_ex", Function(inverse)),
    ("inverse", Function(inverse)),
    ("cholesky_solve", Function(cholesky_solve)),
    ("cholesky_inverse", Function(cholesky_inverse)),
];

fn square(c: &mut Call<'_>, x: ValueId) -> Result<u64, Reject> {
    match c.shape_of(x).as_slice() {
        [.., n, m] if n == m && *n <= altiplano_ir::array::MOST_ROWS => Ok(*n),
        [.., n, m] if n == m => Err(Reject::Unsupported("of matrices with more than 64 rows")),
        _ => Err(other("takes square matrices")),
    }
}

/// Adds placeholders for the status results of an op, which nothing here reads.
fn with_unread(c: &mut Call<'_>, v: ValueId) -> Lowered {
    let first = super::super::call::Item::Tensor(c.to.memory.fresh(v));
    let mut items = vec![first];
    items.resize(c.declared.len().max(1), super::super::call::Item::Opaque);
    Ok(Out::Items(items))
}

fn cholesky(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    square(c, x)?;
    // Only one half is read, but PyTorch's gradient is that of both.
    let turned = a::swap_dims(c.g(), x, -1, -2)?;
    let sum = two(c, Binary::Add, x, turned)?;
    let x = number(c, Binary::Multiply, sum, 0.5)?;
    let factor = a::cholesky(c.g(), x)?;
    let factor = if c.bool("upper", false)? { a::swap_dims(c.g(), factor, -1, -2)? } else { factor };
    with_unread(c, factor)
}

/// Solves a system with a triangular matrix on the left, or on the right.
fn solved(c: &mut Call<'_>, t: ValueId, b: ValueId, upper: bool, left: bool, unit: bool) -> Result<ValueId, Reject> {
    square(c, t)?;
    if left {
        return Ok(a::solve_triangular(c.g(), t, b, upper, unit)?);
    }
    // X T = B is equivalent to T' X' = B'.
    let (t, b) = (a::swap_dims(c.g(), t, -1, -2)?, a::swap_dims(c.g(), b, -1, -2)?);
    let x = a::solve_triangular(c.g(), t, b, !upper, unit)?;
    Ok(a::swap_dims(c.g(), x, -1, -2)?)
}

fn solve_triangular(c: &mut Call<'_>) -> Lowered {
    let (t, b) = (c.first()?, c.tensor("B")?);
    let (upper, left) = (c.bool("upper", false)?, c.bool("left", true)?);
    let unit = c.bool("unitriangular", false)?;
    value(solved(c, t, b, upper, left, unit)?)
}

fn old_solve_triangular(c: &mut Call<'_>) -> Lowered {
    let (b, mut t) = (c.first()?, c.tensor("A")?);
    let mut upper = c.bool("upper", true)?;
    if c.bool("transpose", false)? {
        t = a::swap_dims(c.g(), t, -1, -2)?;
        upper = !upper;
    }
    let unit = c.bool("unitriangular", false)?;
    let x = solved(c, t, b, upper, true, unit)?;
    with_unread(c, x)
}

fn solve(c: &mut Call<'_>) -> Lowered {
    let (x, b) = (c.first()?, c.tensor("B")?);
    square(c, x)?;
    if !c.bool("left", true)? {
        return Err(Reject::Unsupported("from the right"));
    }
    let vector = c.rank(b) == c.rank(x) - 1 || c.rank(b) == 1;
    let b = if vector { a::unsqueeze(c.g(), b, -1)? } else { b };
    let y = a::solve(c.g(), x, b)?;
    let last = c.rank(y) - 1;
    let y = if vector { a::squeeze(c.g(), y, &[last])? } else { y };
    with_unread(c, y)
}

fn identity(c: &mut Call<'_>, like: ValueId) -> Result<ValueId, Reject> {
    let shape = c.shape_of(like);
    let (n, dtype) = (shape[shape.len() - 1], c.dtype_of(like));
    let (row, column) = (a::iota(c.g(), &[n, n], 0, DType::I32)?, a::iota(c.g(), &[n, n], 1, DType::I32)?);
    let on = a::compare(c.g(), Direction::Eq, row, column)?;
    let unit = a::convert(c.g(), on, dtype)?;
    Ok(a::broadcast_to(c.g(), unit, &shape)?)
}

fn inverse(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    square(c, x)?;
    let unit = identity(c, x)?;
    let y = a::solve(c.g(), x, unit)?;
    with_unread(c, y)
}

/// Solves `L L' X = B`.
fn by_factor(c: &mut Call<'_>, factor: ValueId, b: ValueId, upper: bool) -> Lowered {
    square(c, factor)?;
    let factor = if upper { a::swap_dims(c.g(), factor, -1, -2)? } else { factor };
    let y = a::solve_triangular(c.g(), factor, b, false, false)?;
    let turned = a::swap_dims(c.g(), factor, -1, -2)?;
    value(a::solve_triangular(c.g(), turned, y, true, false)?)
}

fn cholesky_solve(c: &mut Call<'_>) -> Lowered {
    let (b, factor, upper) = (c.first()?, c.tensor("input2")?, c.bool("upper", false)?);
    by_factor(c, factor, b, upper)
}

fn cholesky_inverse(c: &mut Call<'_>) -> Lowered {
    let (factor, upper) = (c.first()?, c.bool("upper", false)?);
    let unit = identity(c, factor)?;
    by_factor(c, factor, unit, upper)
}
