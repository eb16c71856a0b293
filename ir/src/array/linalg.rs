//! Triangular factors and solutions of linear systems, row by row.
//!
//! Each step multiplies the part that is known so far by a row or column, for whole batches of matrices at once.
//! Systems with more rows than [`MOST_ROWS`] would become graphs that are too large to plan.

use super::{Built, ShapeError, binary, concat, matmul, slice_dim, unary};
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Unary};

/// The largest number of rows that these functions accept.
pub const MOST_ROWS: u64 = 64;

fn rows(g: &Graph, x: ValueId) -> Result<(i64, usize), ShapeError> {
    match g.shape(x) {
        [.., n, m] if n == m && *n <= MOST_ROWS => Ok((*n as i64, g.shape(x).len())),
        shape => Err(ShapeError::TooLarge { shape: shape.to_vec() }),
    }
}

fn block(g: &mut Graph, x: ValueId, rank: usize, rows: (i64, i64), columns: (i64, i64)) -> Built {
    let x = slice_dim(g, x, rank - 2, rows.0, rows.1, 1)?;
    slice_dim(g, x, rank - 1, columns.0, columns.1, 1)
}

/// Pads dimension `dim` of `x` with zeros: `low` rows or columns before it and `high` after it.
fn zeros_behind(g: &mut Graph, x: ValueId, dim: usize, low: i64, high: i64) -> Built {
    let rank = g.shape(x).len();
    let at = |n: i64| (0..rank).map(|d| if d == dim { n } else { 0 }).collect::<Vec<i64>>();
    super::pad(g, x, &at(low), &at(high), 0.0)
}

/// The lower triangular `L` with `L L' = x`, column by column, for symmetric positive definite `[.., n, n]`.
pub fn cholesky(g: &mut Graph, x: ValueId) -> Built {
    let (n, rank) = rows(g, x)?;
    let mut columns: Vec<ValueId> = Vec::new();
    for j in 0..n {
        // The rest of the column, from the diagonal down.
        let mut column = block(g, x, rank, (j, n), (j, j + 1))?;
        if !columns.is_empty() {
            let known = concat(g, &columns, rank - 1)?;
            let (below, own) = (block(g, known, rank, (j, n), (0, j))?, block(g, known, rank, (j, j + 1), (0, j))?);
            let own = super::swap_dims(g, own, -1, -2)?;
            let product = matmul(g, below, own)?;
            column = binary(g, Binary::Subtract, column, product)?;
        }
        let pivot = slice_dim(g, column, rank - 2, 0, 1, 1)?;
        let pivot = unary(g, Unary::Sqrt, pivot)?;
        // The diagonal is the root, and the rest is divided by it.
        let mut whole = pivot;
        if j + 1 < n {
            let rest = slice_dim(g, column, rank - 2, 1, n - j, 1)?;
            let rest = binary(g, Binary::Divide, rest, pivot)?;
            whole = concat(g, &[pivot, rest], rank - 2)?;
        }
        columns.push(zeros_behind(g, whole, rank - 2, j, 0)?);
    }
    concat(g, &columns, rank - 1)
}

/// The solution `x` of `t x = b` for a triangular `t`. With `unit`, the diagonal is taken to be ones. Elements on the
/// other side of the diagonal are not read.
pub fn solve_triangular(g: &mut Graph, t: ValueId, b: ValueId, upper: bool, unit: bool) -> Built {
    let (n, rank) = rows(g, t)?;
    let of_b = g.shape(b).len();
    if of_b < 2 || g.shape(b)[of_b - 2] != n as u64 {
        return Err(ShapeError::ShapesDiffer { left: g.shape(t).to_vec(), right: g.shape(b).to_vec() });
    }
    let order: Vec<i64> = if upper { (0..n).rev().collect() } else { (0..n).collect() };
    let mut known: Vec<ValueId> = Vec::new();
    for i in order {
        let mut row = slice_dim(g, b, of_b - 2, i, i + 1, 1)?;
        if !known.is_empty() {
            let span = if upper { (i + 1, n) } else { (0, i) };
            let factors = block(g, t, rank, (i, i + 1), span)?;
            let last = g.shape(known[0]).len() - 2;
            let found = concat(g, &known, last)?;
            let product = matmul(g, factors, found)?;
            row = binary(g, Binary::Subtract, row, product)?;
        }
        if !unit {
            let pivot = block(g, t, rank, (i, i + 1), (i, i + 1))?;
            row = binary(g, Binary::Divide, row, pivot)?;
        }
        if known.is_empty() && g.shape(row).len() < rank {
            let mut wide = g.shape(t).to_vec();
            (wide[rank - 2], wide[rank - 1]) = (1, g.shape(row)[g.shape(row).len() - 1]);
            row = super::broadcast_to(g, row, &wide)?;
        }
        if upper { known.insert(0, row) } else { known.push(row) }
    }
    let last = known.first().map_or(0, |&row| g.shape(row).len() - 2);
    concat(g, &known, last)
}

/// The solution `y` of `x y = b`, by Gaussian elimination with the largest pivot of each column.
pub fn solve(g: &mut Graph, x: ValueId, b: ValueId) -> Built {
    use super::{arg_max, broadcast_to, compare, convert, iota, select};
    use crate::op::Direction;
    let (n, rank) = rows(g, x)?;
    let of_b = g.shape(b).len();
    let mut wide = g.shape(x).to_vec();
    wide[rank - 1] = g.shape(b)[of_b - 1];
    let b = broadcast_to(g, b, &wide)?;
    let width = n + wide[rank - 1] as i64;
    // The matrix and the right side together, since the same rows of both are exchanged and subtracted.
    let mut both = concat(g, &[x, b], rank - 1)?;
    let mut done: Vec<ValueId> = Vec::new();
    for j in 0..n {
        // Rows from j on remain. The one with the largest pivot comes first.
        let left = n - j;
        let column = slice_dim(g, both, rank - 1, 0, 1, 1)?;
        let size = unary(g, Unary::Abs, column)?;
        let at = arg_max(g, size, rank - 2, true, false)?;
        let mut shape = g.shape(column).to_vec();
        shape[rank - 1] = 1;
        let dtype = g.ty(at).dtype;
        let row = iota(g, &shape, rank - 2, dtype)?;
        let at = broadcast_to(g, at, &shape)?;
        let is_pivot = compare(g, Direction::Eq, row, at)?;
        let dtype = g.ty(both).dtype;
        let share = convert(g, is_pivot, dtype)?;
        let picked = binary(g, Binary::Multiply, both, share)?;
        let pivot = super::sum(g, picked, &[rank - 2], true)?;
        let first = slice_dim(g, both, rank - 2, 0, 1, 1)?;
        done.push(pivot);
        if left == 1 {
            break;
        }
        // The first row takes the place of the pivot row. A multiple of the pivot row is subtracted from all others.
        let wide = g.shape(both).to_vec();
        let (first, is_pivot) = (broadcast_to(g, first, &wide)?, broadcast_to(g, is_pivot, &wide)?);
        let rest = select(g, is_pivot, first, both)?;
        let rest = slice_dim(g, rest, rank - 2, 1, left, 1)?;
        let head = slice_dim(g, rest, rank - 1, 0, 1, 1)?;
        let of_pivot = slice_dim(g, pivot, rank - 1, 0, 1, 1)?;
        let share = binary(g, Binary::Divide, head, of_pivot)?;
        let product = binary(g, Binary::Multiply, share, pivot)?;
        let rest = binary(g, Binary::Subtract, rest, product)?;
        both = slice_dim(g, rest, rank - 1, 1, width - j, 1)?;
    }
    // The rows of an upper triangle, each without the zeros before its diagonal.
    let mut upper = Vec::new();
    let mut right = Vec::new();
    for (j, row) in (0..n).zip(done) {
        let own = n - j;
        let triangle = slice_dim(g, row, rank - 1, 0, own, 1)?;
        upper.push(zeros_behind(g, triangle, rank - 1, j, 0)?);
        right.push(slice_dim(g, row, rank - 1, own, width - j, 1)?);
    }
    let (upper, right) = (concat(g, &upper, rank - 2)?, concat(g, &right, rank - 2)?);
    solve_triangular(g, upper, right, true, false)
}
