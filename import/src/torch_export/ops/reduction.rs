//! Lowers reductions, cumulative sums and orders.

use super::*;
use Lowering::Function;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("sum", Lowering::Reduce(Reducer::Sum)),
    ("prod", Lowering::Reduce(Reducer::Product)),
    ("amax", Lowering::Reduce(Reducer::Max)),
    ("amin", Lowering::Reduce(Reducer::Min)),
    ("any", Lowering::Reduce(Reducer::Or)),
    ("all", Lowering::Reduce(Reducer::And)),
    ("_is_all_true", Lowering::Reduce(Reducer::And)),
    ("_is_any_true", Lowering::Reduce(Reducer::Or)),
    ("nansum", Function(nansum)),
    ("cdist", Function(cdist)),
    ("_cdist_forward", Function(cdist)),
    ("pairwise_distance", Function(pairwise_distance)),
    ("_weight_norm", Function(weight_norm)),
    ("_weight_norm_interface", Function(weight_norm)),
    ("mean", Function(mean)),
    ("max", Function(|c| extremum(c, Reducer::Max))),
    ("min", Function(|c| extremum(c, Reducer::Min))),
    ("argmax", Function(|c| position(c, false))),
    ("argmin", Function(|c| position(c, true))),
    ("aminmax", Function(aminmax)),
    ("logsumexp", Function(logsumexp)),
    ("special_logsumexp", Function(logsumexp)),
    ("var", Function(|c| spread(c, false, false))),
    ("std", Function(|c| spread(c, true, false))),
    ("var_mean", Function(|c| spread(c, false, true))),
    ("std_mean", Function(|c| spread(c, true, true))),
    ("norm", Function(norm)),
    ("linalg_vector_norm", Function(norm)),
    ("linalg_norm", Function(norm)),
    ("frobenius_norm", Function(norm)),
    ("count_nonzero", Function(count_nonzero)),
    ("cumsum", Function(|c| cumulative(c, Reducer::Sum))),
    ("cumprod", Function(|c| cumulative(c, Reducer::Product))),
    ("diff", Function(diff)),
    ("topk", Function(topk)),
    ("sort", Function(sort)),
    ("argsort", Function(argsort)),
    ("trace", Function(trace)),
    ("histc", Function(histc)),
];

/// Widens integers to `i64`, in which PyTorch computes their sums and products.
fn widened(c: &mut Call<'_>, x: ValueId) -> Result<ValueId, Reject> {
    let dtype = match c.dtype("dtype")? {
        Some(dtype) => dtype,
        None if c.dtype_of(x).is_float() => return Ok(x),
        None => DType::I64,
    };
    Ok(a::convert(c.g(), x, dtype)?)
}

pub(crate) fn reduce(c: &mut Call<'_>, reducer: Reducer) -> Lowered {
    let x = c.first()?;
    let x = match reducer {
        Reducer::Sum | Reducer::Product => widened(c, x)?,
        Reducer::And | Reducer::Or => a::convert(c.g(), x, DType::Bool)?,
        _ => x,
    };
    let rank = c.rank(x);
    let dims = c.dims("dim", rank)?;
    let keep = c.bool("keepdim", false)?;
    value(a::reduce(c.g(), x, reducer, &dims, keep)?)
}

fn nansum(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let hit = a::compare(c.g(), Direction::Ne, x, x)?;
    let zero = a::full_like(c.g(), x, 0.0)?;
    let x = a::select(c.g(), hit, zero, x)?;
    let rank = c.rank(x);
    let (dims, keep) = (c.dims("dim", rank)?, c.bool("keepdim", false)?);
    value(a::sum(c.g(), x, &dims, keep)?)
}

fn mean(c: &mut Call<'_>) -> Lowered {
    let mut x = c.first()?;
    if let Some(dtype) = c.dtype("dtype")? {
        x = a::convert(c.g(), x, dtype)?;
    }
    let rank = c.rank(x);
    let (dims, keep) = (c.dims("dim", rank)?, c.bool("keepdim", false)?);
    // Narrow floats are summed in f32, as in PyTorch.
    value(a::in_f32(c.g(), x, |g, x| a::mean(g, x, &dims, keep))?)
}

/// `max(x)`, `max(x, other)`, or `max(x, dim)` with the positions.
fn extremum(c: &mut Call<'_>, reducer: Reducer) -> Lowered {
    if c.is_tensor("other") {
        return Lowering::Binary(reducer.combine()).apply(c);
    }
    if !c.has("dim") {
        return reduce(c, reducer);
    }
    let x = c.first()?;
    let rank = c.rank(x);
    let keep = c.bool("keepdim", false)?;
    if rank == 0 {
        let zero = a::scalar(c.g(), 0.0, DType::I64)?;
        return Ok(Out::Values(vec![x, zero]));
    }
    let dim = c.dim("dim", -1, rank)?;
    let most = a::reduce(c.g(), x, reducer, &[dim], keep)?;
    let at = a::arg_max(c.g(), x, dim, keep, reducer == Reducer::Min)?;
    let at = a::convert(c.g(), at, DType::I64)?;
    Ok(Out::Values(vec![most, at]))
}

fn position(c: &mut Call<'_>, least: bool) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let keep = c.bool("keepdim", false)?;
    let at = if c.has("dim") && !shape.is_empty() {
        let dim = c.dim("dim", -1, shape.len())?;
        a::arg_max(c.g(), x, dim, keep, least)?
    } else {
        let elements = c.to.graph.ty(x).elements();
        let flat = a::reshape(c.g(), x, &[elements])?;
        let at = a::arg_max(c.g(), flat, 0, false, least)?;
        let kept = vec![1; if keep { shape.len() } else { 0 }];
        a::reshape(c.g(), at, &kept)?
    };
    value(a::convert(c.g(), at, DType::I64)?)
}

fn aminmax(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let (dims, keep) = (c.dims("dim", rank)?, c.bool("keepdim", false)?);
    let (least, most) = (a::min(c.g(), x, &dims, keep)?, a::max(c.g(), x, &dims, keep)?);
    Ok(Out::Values(vec![least, most]))
}

fn logsumexp(c: &mut Call<'_>) -> Lowered {
    let x = c.float_tensor()?;
    let rank = c.rank(x);
    let (dims, keep) = (c.dims("dim", rank)?, c.bool("keepdim", false)?);
    value(a::log_sum_exp(c.g(), x, &dims, keep)?)
}

fn spread(c: &mut Call<'_>, root: bool, with_mean: bool) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let (dims, keep) = (c.dims("dim", rank)?, c.bool("keepdim", false)?);
    let unbiased = if c.bool("unbiased", true)? { 1.0 } else { 0.0 };
    let correction = c.float("correction", unbiased)?;
    let variance = a::variance(c.g(), x, &dims, correction, keep)?;
    let spread = if root { one(c, Unary::Sqrt, variance)? } else { variance };
    if !with_mean {
        return value(spread);
    }
    let mean = a::mean(c.g(), x, &dims, keep)?;
    Ok(Out::Values(vec![spread, mean]))
}

fn norm(c: &mut Call<'_>) -> Lowered {
    let x = c.float_tensor()?;
    let x = match c.dtype("dtype")? {
        Some(dtype) => a::convert(c.g(), x, dtype)?,
        None => x,
    };
    let rank = c.rank(x);
    let (dims, keep) = (c.dims("dim", rank)?, c.bool("keepdim", false)?);
    // `linalg_norm` of a matrix is a matrix norm if its order is given.
    if c.name == "linalg_norm" && c.has("ord") && dims.len() > 1 {
        return Err(Reject::Unsupported("of matrices"));
    }
    let order = if c.has("p") { c.float("p", 2.0)? } else { c.float("ord", 2.0)? };
    let size = one(c, Unary::Abs, x)?;
    if order == f64::INFINITY {
        return value(a::max(c.g(), size, &dims, keep)?);
    }
    if order == f64::NEG_INFINITY {
        return value(a::min(c.g(), size, &dims, keep)?);
    }
    if order == 1.0 {
        return value(a::sum(c.g(), size, &dims, keep)?);
    }
    if order == 0.0 {
        let there = a::convert(c.g(), x, DType::Bool)?;
        let dtype = c.dtype_of(x);
        let there = a::convert(c.g(), there, dtype)?;
        return value(a::sum(c.g(), there, &dims, keep)?);
    }
    if order == 2.0 {
        let square = two(c, Binary::Multiply, x, x)?;
        let total = a::sum(c.g(), square, &dims, keep)?;
        return value(one(c, Unary::Sqrt, total)?);
    }
    let power = number(c, Binary::Power, size, order)?;
    let total = a::sum(c.g(), power, &dims, keep)?;
    value(number(c, Binary::Power, total, 1.0 / order)?)
}

fn count_nonzero(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let there = a::convert(c.g(), x, DType::Bool)?;
    let there = a::convert(c.g(), there, DType::I64)?;
    let rank = c.rank(x);
    let dims = c.dims("dim", rank)?;
    value(a::sum(c.g(), there, &dims, false)?)
}

fn cumulative(c: &mut Call<'_>, reducer: Reducer) -> Lowered {
    let x = c.first()?;
    let x = widened(c, x)?;
    let rank = c.rank(x);
    let dim = c.dim("dim", 0, rank)?;
    if rank == 0 { value(x) } else { value(a::cumulative(c.g(), x, reducer, dim, false)?) }
}

fn diff(c: &mut Call<'_>) -> Lowered {
    let mut x = c.first()?;
    let rank = c.rank(x);
    let dim = c.dim("dim", -1, rank)?;
    let dtype = c.dtype_of(x);
    let before = c.maybe_tensor("prepend")?;
    let behind = c.maybe_tensor("append")?;
    let parts: Vec<ValueId> = [before, Some(x), behind].into_iter().flatten().collect();
    x = a::concat(c.g(), &parts, dim)?;
    let times = c.int("n", 1)?;
    if !(0..=64).contains(&times) {
        return problem("takes differences of a strange order");
    }
    for _ in 0..times {
        let Some(&size) = c.shape_of(x).get(dim) else { return problem("takes differences of a scalar") };
        let next = a::slice_dim(c.g(), x, dim, 1, size as i64, 1)?;
        let last = a::slice_dim(c.g(), x, dim, 0, size as i64 - 1, 1)?;
        x = match dtype {
            DType::Bool => two(c, Binary::Xor, next, last)?,
            _ => two(c, Binary::Subtract, next, last)?,
        };
    }
    value(x)
}

fn topk(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let dim = c.dim("dim", -1, rank)?;
    let (k, least) = (c.size("k")?, !c.bool("largest", true)?);
    let (values, at) = a::top_k(c.g(), x, dim, k, least)?;
    let at = a::convert(c.g(), at, DType::I64)?;
    Ok(Out::Values(vec![values, at]))
}

fn sorted(c: &mut Call<'_>) -> Result<(ValueId, ValueId), Reject> {
    let x = c.first()?;
    let rank = c.rank(x);
    let dim = c.dim("dim", -1, rank)?;
    let descending = c.bool("descending", false)?;
    let (values, at) = a::sort(c.g(), x, dim, descending)?;
    Ok((values, a::convert(c.g(), at, DType::I64)?))
}

fn sort(c: &mut Call<'_>) -> Lowered {
    let (values, at) = sorted(c)?;
    Ok(Out::Values(vec![values, at]))
}

fn argsort(c: &mut Call<'_>) -> Lowered {
    value(sorted(c)?.1)
}

fn trace(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let [rows, columns] = c.shape_of(x)[..] else { return problem("takes the trace of what is no matrix") };
    let row = a::iota(c.g(), &[rows, columns], 0, DType::I32)?;
    let column = a::iota(c.g(), &[rows, columns], 1, DType::I32)?;
    let on = a::compare(c.g(), Direction::Eq, row, column)?;
    let x = widened(c, x)?;
    let zero = a::full_like(c.g(), x, 0.0)?;
    let kept = a::select(c.g(), on, x, zero)?;
    value(a::sum(c.g(), kept, &[0, 1], false)?)
}

/// Counts the elements in each of `bins` equal parts of the range from `min` to `max`. The last part includes
/// `max`.
fn histc(c: &mut Call<'_>) -> Lowered {
    let (x, bins) = (c.first()?, c.int("bins", 100)?);
    let (min, max) = (c.float("min", 0.0)?, c.float("max", 0.0)?);
    if min == max {
        return Err(Reject::Unsupported("over the range of the data"));
    }
    if bins <= 0 || max < min {
        return problem("has no bins or a range that ends before it begins");
    }
    let dtype = c.dtype_of(x);
    let count = c.shape_of(x).iter().product();
    let x = a::reshape(c.g(), x, &[count])?;
    // Integers fall into parts of length one.
    let whole = match &c.g().node(x).op {
        Op::Convert(_) => c.to.graph.ty(c.to.graph.node(x).operands[0]).dtype.is_integer(),
        _ => dtype.is_integer(),
    };
    if whole && max - min == bins as f64 - 1.0 && min.fract() == 0.0 {
        let part = number(c, Binary::Subtract, x, min)?;
        let own = a::one_hot(c.g(), part, bins as u64, dtype)?;
        return value(a::sum(c.g(), own, &[0], false)?);
    }
    let x = if dtype.is_float() { x } else { a::convert(c.g(), x, DEFAULT_FLOAT)? };
    let from_min = number(c, Binary::Subtract, x, min)?;
    let scaled = number(c, Binary::Multiply, from_min, bins as f64)?;
    let scaled = number(c, Binary::Divide, scaled, max - min)?;
    let part = one(c, Unary::Floor, scaled)?;
    let (end, last) = (a::full_like(c.g(), x, max)?, a::full_like(c.g(), x, bins as f64 - 1.0)?);
    let at_end = a::compare(c.g(), Direction::Eq, x, end)?;
    let part = a::select(c.g(), at_end, last, part)?;
    // Elements outside the range do not equal the number of any part.
    let own = a::one_hot(c.g(), part, bins as u64, dtype)?;
    value(a::sum(c.g(), own, &[0], false)?)
}

/// The `p`-norm over the last dimension. Its gradient is zero where the norm is zero.
fn distance(c: &mut Call<'_>, apart: ValueId, p: f64) -> Result<ValueId, Reject> {
    let last = c.rank(apart) - 1;
    let size = one(c, Unary::Abs, apart)?;
    if p == 1.0 {
        return Ok(a::sum(c.g(), size, &[last], false)?);
    }
    if p == f64::INFINITY {
        return Ok(a::max(c.g(), size, &[last], false)?);
    }
    if p == 0.0 {
        let zero = a::full_like(c.g(), size, 0.0)?;
        let differs = a::compare(c.g(), Direction::Ne, size, zero)?;
        let dtype = c.dtype_of(apart);
        let differs = a::convert(c.g(), differs, dtype)?;
        return Ok(a::sum(c.g(), differs, &[last], false)?);
    }
    if p == 2.0 {
        let square = two(c, Binary::Multiply, apart, apart)?;
        let sum = a::sum(c.g(), square, &[last], false)?;
        return Ok(a::complex::root(c.g(), sum)?);
    }
    // Powers have no gradient at zero, so the power is taken of one there and then discarded.
    let safely = |c: &mut Call<'_>, x: ValueId, power: f64| -> Result<ValueId, Reject> {
        let zero = a::full_like(c.g(), x, 0.0)?;
        let none = a::compare(c.g(), Direction::Eq, x, zero)?;
        let unit = a::full_like(c.g(), x, 1.0)?;
        let safe = a::select(c.g(), none, unit, x)?;
        let power = number(c, Binary::Power, safe, power)?;
        Ok(a::select(c.g(), none, zero, power)?)
    };
    let powers = safely(c, size, p)?;
    let sum = a::sum(c.g(), powers, &[last], false)?;
    safely(c, sum, 1.0 / p)
}

/// The distance of each row of one matrix to each row of another.
fn cdist(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["x1", "x2"], true)?;
    if c.rank(both[0]) < 2 || c.rank(both[1]) < 2 {
        return problem("takes matrices");
    }
    let (x, y) = (a::unsqueeze(c.g(), both[0], -2)?, a::unsqueeze(c.g(), both[1], -3)?);
    let apart = two(c, Binary::Subtract, x, y)?;
    let p = c.float("p", 2.0)?;
    value(distance(c, apart, p)?)
}

fn pairwise_distance(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["x1", "x2"], true)?;
    let apart = two(c, Binary::Subtract, both[0], both[1])?;
    let apart = number(c, Binary::Add, apart, c.float("eps", 1e-6)?)?;
    let p = c.float("p", 2.0)?;
    let y = distance(c, apart, p)?;
    value(if c.bool("keepdim", false)? { a::unsqueeze(c.g(), y, -1)? } else { y })
}

/// `g v / |v|`, with the norm over all dimensions but one.
fn weight_norm(c: &mut Call<'_>) -> Lowered {
    let (v, g) = (c.tensor("v")?, c.tensor("g")?);
    let rank = c.rank(v);
    let dims: Vec<usize> = match c.int("dim", 0)? {
        -1 => (0..rank).collect(),
        dim => {
            let kept = a::axis(dim, rank)?;
            (0..rank).filter(|&d| d != kept).collect()
        }
    };
    let square = two(c, Binary::Multiply, v, v)?;
    let sum = a::sum(c.g(), square, &dims, true)?;
    let norm = one(c, Unary::Sqrt, sum)?;
    let share = two(c, Binary::Divide, g, norm)?;
    let y = two(c, Binary::Multiply, v, share)?;
    Ok(if c.name == "_weight_norm_interface" { Out::Values(vec![y, norm]) } else { Out::Value(y) })
}
