//! Lowers ops that create tensors.

use super::*;
use Lowering::Function;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("full", Function(|c| filled(c, None))),
    ("zeros", Function(|c| filled(c, Some(0.0)))),
    ("ones", Function(|c| filled(c, Some(1.0)))),
    ("empty", Function(|c| filled(c, Some(0.0)))),
    ("empty_strided", Function(|c| filled(c, Some(0.0)))),
    ("new_full", Function(|c| filled(c, None))),
    ("new_zeros", Function(|c| filled(c, Some(0.0)))),
    ("new_ones", Function(|c| filled(c, Some(1.0)))),
    ("new_empty", Function(|c| filled(c, Some(0.0)))),
    ("new_empty_strided", Function(|c| filled(c, Some(0.0)))),
    ("full_like", Function(|c| filled_like(c, None))),
    ("zeros_like", Function(|c| filled_like(c, Some(0.0)))),
    ("ones_like", Function(|c| filled_like(c, Some(1.0)))),
    ("empty_like", Function(|c| filled_like(c, Some(0.0)))),
    ("scalar_tensor", Function(scalar_tensor)),
    ("arange", Function(arange)),
    ("linspace", Function(linspace)),
    ("eye", Function(eye)),
    ("tril", Function(|c| triangle(c, Direction::Ge))),
    ("triu", Function(|c| triangle(c, Direction::Le))),
    ("tril_indices", Function(|c| triangle_indices(c, false))),
    ("triu_indices", Function(|c| triangle_indices(c, true))),
    ("diag_embed", Function(diag_embed)),
    ("diag", Function(diag)),
    ("one_hot", Function(one_hot)),
];

fn wanted_dtype(c: &Call<'_>) -> Result<DType, Reject> {
    let given = c.dtype("dtype")?;
    Ok(given.unwrap_or_else(|| c.declared_dtype(DEFAULT_FLOAT)))
}

fn filled(c: &mut Call<'_>, with: Option<f64>) -> Lowered {
    let dtype = wanted_dtype(c)?;
    let shape = c.shape("size")?;
    let with = with.map_or_else(|| c.float("fill_value", 0.0), Ok)?;
    value(a::full(c.g(), &shape, with, dtype)?)
}

fn filled_like(c: &mut Call<'_>, with: Option<f64>) -> Lowered {
    let x = c.first()?;
    let dtype = c.dtype("dtype")?.unwrap_or(c.dtype_of(x));
    let shape = c.shape_of(x);
    let with = with.map_or_else(|| c.float("fill_value", 0.0), Ok)?;
    value(a::full(c.g(), &shape, with, dtype)?)
}

fn scalar_tensor(c: &mut Call<'_>) -> Lowered {
    let dtype = wanted_dtype(c)?;
    let x = c.float("s", 0.0)?;
    value(a::scalar(c.g(), x, dtype)?)
}

fn arange(c: &mut Call<'_>) -> Lowered {
    let dtype = wanted_dtype(c)?;
    let (start, end, step) = (c.float("start", 0.0)?, c.float("end", 0.0)?, c.float("step", 1.0)?);
    let count = ((end - start) / step).ceil();
    if !count.is_finite() || !(0.0..=altiplano_ir::types::MAX_ELEMENTS as f64).contains(&count) {
        return problem("counts without end");
    }
    value(a::arange(c.g(), count as u64, start, step, dtype)?)
}

fn linspace(c: &mut Call<'_>) -> Lowered {
    let dtype = wanted_dtype(c)?;
    let (start, end, steps) = (c.float("start", 0.0)?, c.float("end", 0.0)?, c.size("steps")?);
    let step = if steps > 1 { (end - start) / (steps - 1) as f64 } else { 0.0 };
    value(a::arange(c.g(), steps, start, step, dtype)?)
}

/// The signed distance of each element of a matrix to the right of the diagonal.
fn right_of_diagonal(c: &mut Call<'_>, rows: u64, columns: u64) -> Result<(ValueId, ValueId), Reject> {
    let row = a::iota(c.g(), &[rows, columns], 0, DType::I32)?;
    Ok((row, a::iota(c.g(), &[rows, columns], 1, DType::I32)?))
}

fn eye(c: &mut Call<'_>) -> Lowered {
    let dtype = wanted_dtype(c)?;
    let rows = c.size("n")?;
    let columns = if c.has("m") { c.size("m")? } else { rows };
    let (row, column) = right_of_diagonal(c, rows, columns)?;
    let on = a::compare(c.g(), Direction::Eq, row, column)?;
    value(a::convert(c.g(), on, dtype)?)
}

/// Zeros the elements for which the comparison of `row + diagonal` with the column fails.
fn triangle(c: &mut Call<'_>, direction: Direction) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let [.., rows, columns] = shape[..] else { return problem("takes a triangle of what is no matrix") };
    let diagonal = c.int("diagonal", 0)?;
    let (row, column) = right_of_diagonal(c, rows, columns)?;
    let row = if diagonal == 0 { row } else { number(c, Binary::Add, row, diagonal as f64)? };
    let kept = a::compare(c.g(), direction, row, column)?;
    let zero = a::full_like(c.g(), x, 0.0)?;
    value(a::select(c.g(), kept, x, zero)?)
}

fn triangle_indices(c: &mut Call<'_>, upper: bool) -> Lowered {
    let dtype = wanted_dtype(c)?;
    let (rows, columns, offset) = (c.size("row")?, c.size("col")?, c.int("offset", 0)?);
    if rows.saturating_mul(columns) > 1 << 24 {
        return problem("lists too many indices");
    }
    let inside = |r: u64, k: u64| if upper { k as i64 - r as i64 >= offset } else { k as i64 - r as i64 <= offset };
    let pairs: Vec<(u64, u64)> =
        (0..rows).flat_map(|r| (0..columns).map(move |k| (r, k))).filter(|&(r, k)| inside(r, k)).collect();
    let data = pairs.iter().map(|p| p.0 as f64).chain(pairs.iter().map(|p| p.1 as f64)).collect();
    let ty = altiplano_ir::types::TensorType::new(dtype, [2, pairs.len() as u64]);
    value(c.g().constant(altiplano_ir::literal::Literal::dense(ty, data)))
}

/// Matrices with `x` on the diagonal.
fn on_diagonal(c: &mut Call<'_>, x: ValueId) -> Result<ValueId, Reject> {
    let mut shape = c.shape_of(x);
    let Some(&n) = shape.last() else { return Err(other("puts a scalar on a diagonal")) };
    shape.push(n);
    let column = a::unsqueeze(c.g(), x, -1)?;
    let wide = a::broadcast_to(c.g(), column, &shape)?;
    let (row, column) = right_of_diagonal(c, n, n)?;
    let on = a::compare(c.g(), Direction::Eq, row, column)?;
    let zero = a::full_like(c.g(), wide, 0.0)?;
    Ok(a::select(c.g(), on, wide, zero)?)
}

fn diag_embed(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if c.int("offset", 0)? != 0 || c.int("dim1", -2)? != -2 || c.int("dim2", -1)? != -1 {
        return Err(Reject::Unsupported("beside the last diagonal"));
    }
    value(on_diagonal(c, x)?)
}

fn diag(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if c.int("diagonal", 0)? != 0 || c.rank(x) != 1 {
        return Err(Reject::Unsupported("of a matrix, or beside the diagonal"));
    }
    value(on_diagonal(c, x)?)
}

fn one_hot(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let classes = c.int("num_classes", -1)?;
    let Ok(classes) = u64::try_from(classes) else { return Err(super::super::call::data_dependent()) };
    value(a::one_hot(c.g(), x, classes, DType::I64)?)
}
