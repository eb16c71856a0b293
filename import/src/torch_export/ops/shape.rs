//! Lowers views and moves: reshapes, slices and concatenations of tensors.

use super::super::call::Item;
use super::super::memory::View;
use super::*;
use Lowering::Function;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("view", Function(view)),
    ("_unsafe_view", Function(copy_of_view)),
    ("view_copy", Function(copy_of_view)),
    ("_reshape_copy", Function(copy_of_view)),
    ("reshape", Function(|c| reshaped(c, "shape"))),
    ("view_as", Function(view_as)),
    ("reshape_as", Function(view_as)),
    ("flatten", Function(flatten)),
    ("ravel", Function(flatten)),
    ("unflatten", Function(unflatten)),
    ("contiguous", Function(contiguous)),
    ("clone", Function(clone)),
    ("alias", Function(|_| Ok(Out::Same))),
    ("lift_fresh", Function(|_| Ok(Out::Same))),
    ("lift_fresh_copy", Function(clone)),
    ("detach", Function(detach)),
    ("detach_copy", Function(detach)),
    ("to", Function(to)),
    ("_to_copy", Function(to)),
    ("type_as", Function(to)),
    ("expand", Function(expand)),
    ("expand_as", Function(expand)),
    ("broadcast_to", Function(expand)),
    ("expand_copy", Function(expand)),
    ("unsqueeze", Function(unsqueeze)),
    ("squeeze", Function(squeeze)),
    ("transpose", Function(|c| swap(c, "dim0", "dim1"))),
    ("swapdims", Function(|c| swap(c, "dim0", "dim1"))),
    ("swapaxes", Function(|c| swap(c, "axis0", "axis1"))),
    ("t", Function(turn)),
    ("numpy_T", Function(turn)),
    ("mT", Function(turn_last)),
    ("mH", Function(turn_last)),
    ("matrix_H", Function(turn_last)),
    ("adjoint", Function(turn_last)),
    ("permute", Function(permute)),
    ("movedim", Function(movedim)),
    ("moveaxis", Function(movedim)),
    ("select", Function(select)),
    ("slice", Function(slice)),
    ("narrow", Function(narrow)),
    ("split", Function(split)),
    ("split_with_sizes", Function(split)),
    ("unsafe_split", Function(split)),
    ("chunk", Function(chunk)),
    ("unsafe_chunk", Function(chunk)),
    ("tensor_split", Function(tensor_split)),
    ("unbind", Function(unbind)),
    ("unfold", Function(unfold)),
    ("diagonal", Function(diagonal)),
    ("cat", Function(cat)),
    ("concat", Function(cat)),
    ("concatenate", Function(cat)),
    ("stack", Function(stack)),
    ("hstack", Function(hstack)),
    ("vstack", Function(vstack)),
    ("flip", Function(flip)),
    ("fliplr", Function(|c| flip_one(c, 1))),
    ("flipud", Function(|c| flip_one(c, 0))),
    ("roll", Function(roll)),
    ("repeat", Function(|c| repeat(c, "repeats"))),
    ("tile", Function(|c| repeat(c, "dims"))),
    ("repeat_interleave", Function(repeat_interleave)),
    ("meshgrid", Function(meshgrid)),
    ("broadcast_tensors", Function(broadcast_tensors)),
    ("constant_pad_nd", Function(constant_pad)),
    ("pad", Function(pad)),
    ("_pad_circular", Function(circular)),
    ("reflection_pad1d", Function(|c| mirrored(c, true))),
    ("reflection_pad2d", Function(|c| mirrored(c, true))),
    ("reflection_pad3d", Function(|c| mirrored(c, true))),
    ("replication_pad1d", Function(|c| mirrored(c, false))),
    ("replication_pad2d", Function(|c| mirrored(c, false))),
    ("replication_pad3d", Function(|c| mirrored(c, false))),
];

fn seen(view: View) -> Lowered {
    Ok(Out::Views(vec![vec![view]]))
}

/// Resolves a size of -1 to the remaining elements of `x`.
fn sizes(c: &mut Call<'_>, x: ValueId, sizes: &[i64]) -> Result<Vec<u64>, Reject> {
    let reshaped = a::reshape_to(c.g(), x, sizes)?;
    Ok(c.shape_of(reshaped))
}

/// A reshape, which shares the memory if that is in row-major order.
fn in_order(c: &mut Call<'_>, shape: Vec<u64>) -> Lowered {
    if c.row_major {
        return seen(View::Reshape(shape));
    }
    let x = c.first()?;
    Ok(Out::Maybe(a::reshape(c.g(), x, &shape)?))
}

fn view(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if let Some(dtype) = c.dtype("dtype")? {
        let cast = Op::BitcastConvert(altiplano_ir::op::BitcastConvert { dtype });
        return Ok(Out::Maybe(c.g().push(cast, &[x])?));
    }
    let wanted = c.ints("size")?;
    seen(View::Reshape(sizes(c, x, &wanted)?))
}

fn copy_of_view(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let wanted = c.ints("size")?;
    value(a::reshape_to(c.g(), x, &wanted)?)
}

fn reshaped(c: &mut Call<'_>, name: &str) -> Lowered {
    let x = c.first()?;
    let wanted = c.ints(name)?;
    let shape = sizes(c, x, &wanted)?;
    in_order(c, shape)
}

fn view_as(c: &mut Call<'_>) -> Lowered {
    let like = c.tensor("other")?;
    let shape = c.shape_of(like);
    in_order(c, shape)
}

fn flatten(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let (from, to) = (c.int("start_dim", 0)?, c.int("end_dim", -1)?);
    if c.rank(x) == 0 {
        return in_order(c, vec![1]);
    }
    let flat = a::flatten(c.g(), x, from, to)?;
    let shape = c.shape_of(flat);
    in_order(c, shape)
}

fn unflatten(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let mut shape: Vec<i64> = c.shape_of(x).iter().map(|&n| n as i64).collect();
    let dim = c.dim("dim", 0, shape.len())?;
    if shape.is_empty() {
        return problem("splits a scalar");
    }
    let mut parts = c.ints("sizes")?;
    if let Some(left) = parts.iter().position(|&n| n == -1) {
        let known: i64 = parts.iter().filter(|&&n| n != -1).try_fold(1i64, |p, &n| p.checked_mul(n)).unwrap_or(0);
        parts[left] = if known > 0 { shape[dim] / known } else { 0 };
    }
    shape.splice(dim..=dim, parts);
    seen(View::Reshape(sizes(c, x, &shape)?))
}

fn contiguous(c: &mut Call<'_>) -> Lowered {
    if c.row_major { Ok(Out::Same) } else { clone(c) }
}

fn clone(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    value(x)
}

fn detach(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    // Only a value that follows from a parameter has a gradient to stop.
    if c.dtype_of(x).is_float() && c.to.is_trained(x) { seen(View::Stop) } else { Ok(Out::Same) }
}

/// Converts to another element type. A change of device alone leaves a tensor unchanged.
fn to(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let dtype = match (c.dtype("dtype")?, c.maybe_tensor("other")?) {
        (Some(dtype), _) => dtype,
        (None, Some(like)) => c.dtype_of(like),
        (None, None) => c.dtype_of(x),
    };
    let copies = c.name == "_to_copy" || c.bool("copy", false)?;
    if dtype == c.dtype_of(x) && !copies {
        return Ok(Out::Same);
    }
    value(a::convert(c.g(), x, dtype)?)
}

fn expand(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let own = c.shape_of(x);
    if let Some(like) = c.maybe_tensor("other")? {
        let shape = c.shape_of(like);
        return if shape == own { Ok(Out::Same) } else { seen(View::Expand(shape)) };
    }
    let wanted = c.ints("size")?;
    let Some(offset) = wanted.len().checked_sub(own.len()) else { return problem("expands to fewer dimensions") };
    let size = |(d, &n): (usize, &i64)| match (n, d.checked_sub(offset)) {
        (-1, Some(at)) => Some(own[at]),
        (n, _) => u64::try_from(n).ok(),
    };
    let shape: Option<Vec<u64>> = wanted.iter().enumerate().map(size).collect();
    let Some(shape) = shape else { return problem("expands to a size that is none") };
    if !altiplano_ir::types::TensorType::new(c.dtype_of(x), shape.as_slice()).check() {
        return Err(altiplano_ir::op::ShapeError::TooLarge { shape }.into());
    }
    if shape == own { Ok(Out::Same) } else { seen(View::Expand(shape)) }
}

fn unsqueeze(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let at = c.needed_int("dim")?;
    let y = a::unsqueeze(c.g(), x, at)?;
    seen(View::Reshape(c.shape_of(y)))
}

fn squeeze(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let dims = c.dims("dim", rank)?;
    let y = a::squeeze(c.g(), x, &dims)?;
    seen(View::Reshape(c.shape_of(y)))
}

fn exchange(c: &mut Call<'_>, first: i64, second: i64) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    if rank == 0 {
        return Ok(Out::Same);
    }
    let mut permutation: Vec<usize> = (0..rank).collect();
    permutation.swap(a::axis(first, rank)?, a::axis(second, rank)?);
    seen(View::Permute(permutation))
}

fn swap(c: &mut Call<'_>, first: &str, second: &str) -> Lowered {
    let (first, second) = (c.needed_int(first)?, c.needed_int(second)?);
    exchange(c, first, second)
}

fn turn(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    seen(View::Permute((0..rank).rev().collect()))
}

fn turn_last(c: &mut Call<'_>) -> Lowered {
    exchange(c, -1, -2)
}

fn permute(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let dims = c.ints("dims")?;
    a::axes(&dims, rank)?;
    let permutation = dims.iter().map(|&d| a::axis(d, rank)).collect::<Result<Vec<_>, _>>()?;
    if permutation.len() != rank {
        return problem("permutes other dimensions than it has");
    }
    seen(View::Permute(permutation))
}

fn movedim(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let (from, to) = (c.ints("source")?, c.ints("destination")?);
    a::axes(&from, rank)?;
    a::axes(&to, rank)?;
    if from.len() != to.len() {
        return problem("moves dimensions to as many other places");
    }
    let from = from.iter().map(|&d| a::axis(d, rank)).collect::<Result<Vec<_>, _>>()?;
    let to = to.iter().map(|&d| a::axis(d, rank)).collect::<Result<Vec<_>, _>>()?;
    let mut others = (0..rank).filter(|d| !from.contains(d));
    let place = |at: usize| match to.iter().position(|&t| t == at) {
        Some(i) => Some(from[i]),
        None => others.next(),
    };
    let permutation: Vec<usize> = (0..rank).filter_map(place).collect();
    seen(View::Permute(permutation))
}

fn select(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dim", 0, shape.len())?;
    let Some(&size) = shape.get(dim) else { return problem("selects from a scalar") };
    let at = c.needed_int("index")?;
    let from_start = if at < 0 { at + size as i64 } else { at };
    let Some(start) = u64::try_from(from_start).ok().filter(|&s| s < size) else {
        return problem("selects what lies outside");
    };
    let left = shape.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, &n)| n).collect();
    Ok(Out::Views(vec![vec![View::Slice { dim, start, count: 1, step: 1 }, View::Reshape(left)]]))
}

/// The slice of a dimension for the bounds of a Python slice.
pub(crate) fn part(dim: usize, size: u64, start: Option<i64>, end: Option<i64>, step: i64) -> Result<View, Reject> {
    let step = u64::try_from(step).ok().filter(|&s| s > 0).ok_or_else(|| other("slices with a step below one"))?;
    let inside = |at: i64| if at < 0 { at.saturating_add(size as i64).max(0) } else { at.min(size as i64) } as u64;
    let (start, end) = (inside(start.unwrap_or(0)), inside(end.unwrap_or(i64::MAX)));
    Ok(View::Slice { dim, start, count: end.saturating_sub(start).div_ceil(step), step })
}

fn slice(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dim", 0, shape.len())?;
    let Some(&size) = shape.get(dim) else { return problem("slices a scalar") };
    let view = part(dim, size, c.maybe_int("start")?, c.maybe_int("end")?, c.int("step", 1)?)?;
    match view {
        View::Slice { start: 0, count, step: 1, .. } if count == size => Ok(Out::Same),
        view => seen(view),
    }
}

fn narrow(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dim", 0, shape.len())?;
    let Some(&size) = shape.get(dim) else { return problem("narrows a scalar") };
    let at = c.needed_int("start")?;
    let start = u64::try_from(if at < 0 { at + size as i64 } else { at }).unwrap_or(u64::MAX);
    let count = c.size("length")?;
    if start.checked_add(count).is_none_or(|end| end > size) {
        return problem("narrows to what lies outside");
    }
    seen(View::Slice { dim, start, count, step: 1 })
}

/// Views of consecutive parts of a dimension.
fn parts(dim: usize, sizes: impl IntoIterator<Item = u64>) -> Lowered {
    let mut start = 0;
    let view = |count: u64| {
        let view = View::Slice { dim, start, count, step: 1 };
        start += count;
        vec![view]
    };
    Ok(Out::Views(sizes.into_iter().map(view).collect()))
}

/// Sizes of parts of `each` elements. The last part has the remaining elements.
fn equal_parts(size: u64, each: u64) -> Result<Vec<u64>, Reject> {
    const MOST: u64 = 1 << 16;
    match each {
        0 if size == 0 => Ok(vec![0]),
        each if each == 0 || size.div_ceil(each) > MOST => Err(other("splits into too many parts")),
        each => Ok((0..size.div_ceil(each).max(1)).map(|i| each.min(size - i * each)).collect()),
    }
}

fn split_dim(c: &mut Call<'_>) -> Result<(usize, u64), Reject> {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dim", 0, shape.len())?;
    shape.get(dim).map(|&size| (dim, size)).ok_or_else(|| other("splits a scalar"))
}

fn split(c: &mut Call<'_>) -> Lowered {
    let (dim, size) = split_dim(c)?;
    let name = if c.has("split_sizes") { "split_sizes" } else { "split_size" };
    if let Some(Item::Int(_)) = c.get(name) {
        return parts(dim, equal_parts(size, c.size(name)?)?);
    }
    let sizes = c.shape(name)?;
    if sizes.iter().try_fold(0u64, |sum, &n| sum.checked_add(n)) != Some(size) {
        return problem("splits into sizes that do not add up");
    }
    parts(dim, sizes)
}

fn chunk(c: &mut Call<'_>) -> Lowered {
    let (dim, size) = split_dim(c)?;
    let chunks = c.size("chunks")?.max(1);
    parts(dim, equal_parts(size, size.div_ceil(chunks))?)
}

fn tensor_split(c: &mut Call<'_>) -> Lowered {
    let (dim, size) = split_dim(c)?;
    if let Some(at) = c.maybe_ints("indices")? {
        let mut sizes = Vec::new();
        let mut from = 0;
        for at in at {
            let to = if at < 0 { (at + size as i64).max(0) } else { at.min(size as i64) } as u64;
            sizes.push(to.saturating_sub(from));
            from = from.max(to);
        }
        sizes.push(size - from);
        return parts(dim, sizes);
    }
    let n = c.size("sections")?;
    if n == 0 || n > 1 << 16 {
        return problem("splits into too many parts");
    }
    parts(dim, (0..n).map(|i| size / n + u64::from(i < size % n)))
}

fn unbind(c: &mut Call<'_>) -> Lowered {
    let (dim, size) = split_dim(c)?;
    if size > 1 << 16 {
        return problem("splits into too many parts");
    }
    let x = c.first()?;
    let left: Vec<u64> = c.shape_of(x).iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, &n)| n).collect();
    let view = |start: u64| vec![View::Slice { dim, start, count: 1, step: 1 }, View::Reshape(left.clone())];
    Ok(Out::Views((0..size).map(view).collect()))
}

/// Overlapping windows of a dimension, each a row of a new last dimension.
fn unfold(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dimension", 0, shape.len())?;
    let (window, step) = (c.size("size")?, c.size("step")?);
    let Some(&size) = shape.get(dim) else { return problem("unfolds a scalar") };
    if step == 0 || window > size {
        return problem("unfolds into windows that do not fit");
    }
    let count = (size - window) / step + 1;
    let start = a::arange(c.g(), count, 0.0, step as f64, DType::I32)?;
    let start = a::unsqueeze(c.g(), start, 1)?;
    let within = a::arange(c.g(), window, 0.0, 1.0, DType::I32)?;
    let at = two(c, Binary::Add, start, within)?;
    let windows = a::take(c.g(), x, dim, at, false)?;
    Ok(Out::Maybe(a::move_dim(c.g(), windows, dim + 1, shape.len())?))
}

fn diagonal(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let (first, second) = (c.dim("dim1", 0, rank)?, c.dim("dim2", 1, rank)?);
    let offset = c.int("offset", 0)?;
    if rank < 2 || first == second {
        return problem("takes the diagonal of what has none");
    }
    let others = (0..rank).filter(|&d| d != first && d != second);
    let permutation: Vec<usize> = others.chain([first, second]).collect();
    let x = a::permute(c.g(), x, &permutation)?;
    let shape = c.shape_of(x);
    let (rows, columns) = (shape[rank - 2], shape[rank - 1]);
    let (row, column) = ((-offset).max(0) as u64, offset.max(0) as u64);
    let count = rows.saturating_sub(row).min(columns.saturating_sub(column));
    let flat = a::flatten(c.g(), x, -2, -1)?;
    let first = row.saturating_mul(columns).saturating_add(column);
    let at = a::arange(c.g(), count, first as f64, (columns + 1) as f64, DType::I64)?;
    Ok(Out::Maybe(a::take(c.g(), flat, rank - 2, at, false)?))
}

/// Converts all values to their common type.
fn alike(c: &mut Call<'_>, values: Vec<ValueId>) -> Result<Vec<ValueId>, Reject> {
    let operands: Vec<Operand> = values.iter().map(|&v| Operand::Tensor(v)).collect();
    let dtype = c.common_type(&operands);
    operands.into_iter().map(|o| c.as_tensor(o, dtype)).collect()
}

fn cat(c: &mut Call<'_>) -> Lowered {
    let mut parts = c.tensors("tensors")?;
    // A part of shape [0] is skipped, for any shape of the others.
    if parts.len() > 1 && parts.iter().any(|&p| c.to.graph.shape(p) != [0]) {
        parts.retain(|&p| c.to.graph.shape(p) != [0]);
    }
    let parts = alike(c, parts)?;
    let Some(&first) = parts.first() else { return problem("joins nothing") };
    let rank = c.rank(first);
    let dim = c.dim("dim", 0, rank)?;
    value(a::concat(c.g(), &parts, dim)?)
}

fn stack(c: &mut Call<'_>) -> Lowered {
    let parts = c.tensors("tensors")?;
    let parts = alike(c, parts)?;
    let Some(&first) = parts.first() else { return problem("joins nothing") };
    let rank = c.rank(first);
    let dim = c.dim("dim", 0, rank + 1)?;
    value(a::stack(c.g(), &parts, dim)?)
}

fn hstack(c: &mut Call<'_>) -> Lowered {
    let parts = c.tensors("tensors")?;
    let parts = alike(c, parts)?;
    let rank = parts.first().map_or(0, |&p| c.to.graph.shape(p).len());
    value(a::concat(c.g(), &parts, usize::from(rank > 1))?)
}

fn vstack(c: &mut Call<'_>) -> Lowered {
    let parts = c.tensors("tensors")?;
    let mut rows = Vec::new();
    for part in alike(c, parts)? {
        rows.push(if c.rank(part) < 2 { a::unsqueeze(c.g(), part, 0)? } else { part });
    }
    value(a::concat(c.g(), &rows, 0)?)
}

fn flip(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let dims = a::axes(&c.ints("dims")?, rank)?;
    value(a::flip(c.g(), x, &dims)?)
}

fn flip_one(c: &mut Call<'_>, dim: usize) -> Lowered {
    let x = c.first()?;
    value(a::flip(c.g(), x, &[dim])?)
}

fn roll(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let shape = c.shape_of(x);
    let shifts = c.ints("shifts")?;
    let dims = c.maybe_ints("dims")?.unwrap_or_default();
    let flat = dims.is_empty();
    let mut y = if flat {
        let n = c.to.graph.ty(x).elements();
        a::reshape(c.g(), x, &[n])?
    } else {
        x
    };
    let dims = if flat { vec![0] } else { dims };
    if dims.len() != shifts.len() {
        return problem("rolls other dimensions than it names");
    }
    for (&by, &dim) in shifts.iter().zip(&dims) {
        let rank = c.rank(y);
        let dim = a::axis(dim, rank)?;
        let size = c.shape_of(y)[dim] as i64;
        if size == 0 || by.rem_euclid(size) == 0 {
            continue;
        }
        let cut = size - by.rem_euclid(size);
        let back = a::slice_dim(c.g(), y, dim, cut, size, 1)?;
        let front = a::slice_dim(c.g(), y, dim, 0, cut, 1)?;
        y = a::concat(c.g(), &[back, front], dim)?;
    }
    value(a::reshape(c.g(), y, &shape)?)
}

fn repeat(c: &mut Call<'_>, name: &str) -> Lowered {
    let x = c.first()?;
    let mut times = c.shape(name)?;
    let mut shape = c.shape_of(x);
    let rank = times.len().max(shape.len());
    times.splice(0..0, vec![1; rank - times.len()]);
    shape.splice(0..0, vec![1; rank - shape.len()]);
    let x = a::reshape(c.g(), x, &shape)?;
    // Repeats each dimension by broadcasting along a new one before it.
    let (mut spread, mut dims, mut joined) = (Vec::new(), Vec::new(), Vec::new());
    for (&n, &t) in shape.iter().zip(&times) {
        if t != 1 {
            spread.push(t);
        }
        dims.push(spread.len());
        spread.push(n);
        joined.push(n.saturating_mul(t));
    }
    let op = altiplano_ir::op::BroadcastInDim { shape: spread, dims };
    let y = c.g().push(Op::BroadcastInDim(op), &[x])?;
    value(a::reshape(c.g(), y, &joined)?)
}

fn repeat_interleave(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if c.is_tensor("repeats") || !c.has("self") {
        return Err(super::super::call::data_dependent());
    }
    let times = c.size("repeats")?;
    let elements = c.to.graph.ty(x).elements();
    let (x, dim) = match c.has("dim") {
        true => {
            let rank = c.rank(x);
            (x, c.dim("dim", 0, rank)?)
        }
        false => (a::reshape(c.g(), x, &[elements])?, 0),
    };
    let shape = c.shape_of(x);
    let mut spread = shape.clone();
    spread.insert(dim + 1, times);
    let dims = (0..shape.len()).map(|d| if d <= dim { d } else { d + 1 }).collect();
    let y = c.g().push(Op::BroadcastInDim(altiplano_ir::op::BroadcastInDim { shape: spread, dims }), &[x])?;
    value(a::flatten(c.g(), y, dim as i64, dim as i64 + 1)?)
}

fn meshgrid(c: &mut Call<'_>) -> Lowered {
    let parts = c.tensors("tensors")?;
    let swapped = c.text("indexing") == Some("xy") && parts.len() > 1;
    let place = |i: usize| if swapped && i < 2 { 1 - i } else { i };
    let mut shape = vec![1; parts.len()];
    for (i, &part) in parts.iter().enumerate() {
        shape[place(i)] = c.to.graph.ty(part).elements();
    }
    let mut grids = Vec::new();
    for (i, &part) in parts.iter().enumerate() {
        let mut own = vec![1; parts.len()];
        own[place(i)] = shape[place(i)];
        let part = a::reshape(c.g(), part, &own)?;
        grids.push(a::broadcast_to(c.g(), part, &shape)?);
    }
    Ok(Out::Values(grids))
}

fn broadcast_tensors(c: &mut Call<'_>) -> Lowered {
    let parts = c.tensors("tensors")?;
    let mut shape = Vec::new();
    for &part in &parts {
        shape = a::broadcast_shapes(&shape, c.to.graph.shape(part))?;
    }
    let wide = parts.into_iter().map(|p| a::broadcast_to(c.g(), p, &shape)).collect::<Result<Vec<_>, _>>()?;
    Ok(Out::Values(wide))
}

/// The padding of each dimension, from pairs that begin with the last dimension.
fn padding(c: &Call<'_>, name: &str, rank: usize) -> Result<(Vec<i64>, Vec<i64>), Reject> {
    let pairs = c.ints(name)?;
    if !pairs.len().is_multiple_of(2) || pairs.len() / 2 > rank {
        return Err(other("pads other dimensions than it has"));
    }
    let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
    for (i, pair) in pairs.chunks_exact(2).enumerate() {
        (low[rank - 1 - i], high[rank - 1 - i]) = (pair[0], pair[1]);
    }
    Ok((low, high))
}

fn constant_pad(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let rank = c.rank(x);
    let (low, high) = padding(c, "pad", rank)?;
    let put = c.float("value", 0.0)?;
    value(a::pad(c.g(), x, &low, &high, put)?)
}

fn pad(c: &mut Call<'_>) -> Lowered {
    match c.text("mode").unwrap_or("constant") {
        "constant" => constant_pad(c),
        "reflect" => mirrored(c, true),
        "replicate" => mirrored(c, false),
        "circular" => circular(c),
        _ => Err(Reject::Unsupported("in this mode")),
    }
}

/// Pads with elements mirrored at the edge, or with the edge itself.
fn mirrored(c: &mut Call<'_>, reflect: bool) -> Lowered {
    let mut x = c.first()?;
    let rank = c.rank(x);
    let (low, high) = padding(c, if c.has("pad") { "pad" } else { "padding" }, rank)?;
    for dim in 0..rank {
        let size = c.shape_of(x)[dim] as i64;
        for (behind, by) in [(false, low[dim]), (true, high[dim])] {
            if by < 0 {
                let now = c.shape_of(x)[dim] as i64;
                x = if behind {
                    a::slice_dim(c.g(), x, dim, 0, now + by, 1)?
                } else {
                    a::slice_dim(c.g(), x, dim, -by, now, 1)?
                };
                continue;
            }
            if by == 0 {
                continue;
            }
            if size < 1 || (reflect && by >= size) {
                return problem("is padded by more than it has");
            }
            let now = c.shape_of(x)[dim] as i64;
            let edge = match (reflect, behind) {
                (true, false) => a::slice_dim(c.g(), x, dim, 1, by + 1, 1)?,
                (true, true) => a::slice_dim(c.g(), x, dim, now - 1 - by, now - 1, 1)?,
                (false, false) => a::slice_dim(c.g(), x, dim, 0, 1, 1)?,
                (false, true) => a::slice_dim(c.g(), x, dim, now - 1, now, 1)?,
            };
            let edge = if reflect {
                a::flip(c.g(), edge, &[dim])?
            } else {
                let mut wide = c.shape_of(edge);
                wide[dim] = by as u64;
                a::broadcast_to(c.g(), edge, &wide)?
            };
            let parts = if behind { [x, edge] } else { [edge, x] };
            x = a::concat(c.g(), &parts, dim)?;
        }
    }
    value(x)
}

/// Pads with elements from the opposite end.
fn circular(c: &mut Call<'_>) -> Lowered {
    let mut x = c.first()?;
    let rank = c.rank(x);
    let (low, high) = padding(c, "pad", rank)?;
    for dim in 0..rank {
        let size = c.shape_of(x)[dim] as i64;
        let (before, behind) = (low[dim], high[dim]);
        if before > size || behind > size || before < -size || behind < -size {
            return problem("is padded by more than it has");
        }
        let inner = a::slice_dim(c.g(), x, dim, (-before).max(0), size - (-behind).max(0), 1)?;
        let mut parts = vec![inner];
        if before > 0 {
            parts.insert(0, a::slice_dim(c.g(), x, dim, size - before, size, 1)?);
        }
        if behind > 0 {
            parts.push(a::slice_dim(c.g(), x, dim, 0, behind, 1)?);
        }
        x = a::concat(c.g(), &parts, dim)?;
    }
    value(x)
}
