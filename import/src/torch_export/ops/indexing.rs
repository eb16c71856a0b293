//! Lowers lookups and scatters.

use super::super::call::data_dependent;
use super::super::memory::View;
use super::*;
use Lowering::Function;
use altiplano_ir::op::{Combine, Gather, GatherDims, OutOfBounds, Scatter, ScatterAdd};

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("embedding", Function(embedding)),
    ("embedding_bag", Function(embedding_bag)),
    ("_embedding_bag", Function(embedding_bag)),
    ("_embedding_bag_forward_only", Function(embedding_bag)),
    ("masked_scatter", Function(masked_scatter)),
    ("index", Function(index)),
    ("_unsafe_index", Function(index)),
    ("index_put", Function(index_put)),
    ("_unsafe_index_put", Function(index_put)),
    ("_index_put_impl", Function(index_put)),
    ("gather", Function(gather)),
    ("take_along_dim", Function(take_along_dim)),
    ("index_select", Function(index_select)),
    ("take", Function(take)),
    ("scatter", Function(scatter)),
    ("scatter_add", Function(scatter)),
    ("scatter_reduce", Function(scatter)),
    ("index_add", Function(index_add)),
    ("index_copy", Function(index_copy)),
    ("index_fill", Function(index_fill)),
    ("select_scatter", Function(select_scatter)),
    ("slice_scatter", Function(slice_scatter)),
    ("bucketize", Function(|c| search(c, "boundaries"))),
    ("searchsorted", Function(|c| search(c, "sorted_sequence"))),
    ("nonzero", Function(super::marked::nonzero)),
    ("nonzero_numpy", Function(places_of)),
    ("masked_select", Function(|_| Err(data_dependent()))),
];

fn embedding(c: &mut Call<'_>) -> Lowered {
    let (table, ids) = (c.tensor("weight")?, c.tensor("indices")?);
    let rows = a::embedding(c.g(), table, ids)?;
    let padding = c.int("padding_idx", -1)?;
    if padding < 0 || !c.to.is_trained(table) {
        return value(rows);
    }
    // The padding row is looked up like any other, but gets no gradient.
    let padding = a::full_like(c.g(), ids, padding as f64)?;
    let is_padding = a::compare(c.g(), Direction::Eq, ids, padding)?;
    let is_padding = a::unsqueeze(c.g(), is_padding, -1)?;
    let fixed = a::stop_gradient(c.g(), rows)?;
    value(a::select(c.g(), is_padding, fixed, rows)?)
}

/// A lookup by indices of some dimensions, broadcast together.
struct Lookup {
    dims: GatherDims,
    indices: ValueId,
    /// The shape of the result.
    shape: Vec<u64>,
}

/// An index of a lookup: the dimension that it indexes, its value, and the dimension of the broadcast shape
/// along which it only counts, if any.
struct Index {
    dim: usize,
    value: ValueId,
    counts: Option<usize>,
}

/// The indices as integers, by dimension. Masks that follow from the program alone become the marked positions.
fn whole_indices(c: &mut Call<'_>, x: ValueId) -> Result<Vec<(usize, ValueId)>, Reject> {
    let mut at = 0;
    let mut all = Vec::new();
    for index in c.maybe_tensors("indices")? {
        let Some(index) = index else {
            at += 1;
            continue;
        };
        if !matches!(c.dtype_of(index), DType::Bool | DType::U8) {
            all.push((at, index));
            at += 1;
            continue;
        }
        let shape = c.shape_of(index);
        let marks = c.constant(index).ok_or_else(data_dependent)?;
        let strides = altiplano_ir::types::strides(&shape);
        let places: Vec<u64> = (0u64..).zip(&marks).filter(|(_, m)| **m != 0.0).map(|(i, _)| i).collect();
        for (d, &n) in shape.iter().enumerate() {
            let data = places.iter().map(|&p| (p / strides[d] % n.max(1)) as f64).collect();
            let ty = altiplano_ir::types::TensorType::new(DType::I64, [places.len() as u64]);
            all.push((at + d, c.g().constant(altiplano_ir::literal::Literal::dense(ty, data))));
        }
        at += shape.len();
    }
    let rank = c.rank(x);
    if at > rank || all.is_empty() {
        return Err(other("has more indices than dimensions, or none"));
    }
    Ok(all)
}

/// True if the indices are in consecutive dimensions. Only then do the indexed dimensions stay in place.
fn are_adjacent(indices: &[(usize, ValueId)]) -> bool {
    indices.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1)
}

/// The shape of the broadcast indices, and for each index the dimension along which only it counts, if any.
fn broadcast_indices(
    c: &mut Call<'_>,
    x: ValueId,
    indices: &[(usize, ValueId)],
) -> Result<(Vec<u64>, Vec<Index>), Reject> {
    let mut shape = Vec::new();
    for (_, index) in indices {
        shape = a::broadcast_shapes(&shape, c.to.graph.shape(*index))?;
    }
    let sizes = c.shape_of(x);
    let mut found: Vec<Index> = Vec::new();
    for &(dim, index) in indices {
        let own = c.shape_of(index);
        let offset = shape.len() - own.len();
        let mut wide = (0..own.len()).filter(|&d| own[d] != 1);
        let along = match (wide.next(), wide.next()) {
            (Some(d), None) if own[d] == sizes[dim] => Some(d + offset),
            // A dimension of one element has only one position.
            (None, None) if sizes[dim] == 1 && !shape.is_empty() => (0..shape.len()).find(|&d| shape[d] == 1),
            _ => None,
        };
        let free = along.filter(|d| !found.iter().any(|i| i.counts == Some(*d)));
        let counts =
            free.filter(|_| c.constant(index).is_some_and(|data| data.iter().enumerate().all(|(i, &x)| x == i as f64)));
        found.push(Index { dim, value: index, counts });
    }
    Ok((shape, found))
}

fn lookup(c: &mut Call<'_>, x: ValueId, indices: &[(usize, ValueId)]) -> Result<Lookup, Reject> {
    let sizes = c.shape_of(x);
    let (shape, found) = broadcast_indices(c, x, indices)?;
    // If all indices count, the first is looked up anyway, since a lookup needs an index.
    let all_count = found.iter().all(|i| i.counts.is_some());
    let (mut vector, mut starts, mut batching) = (Vec::new(), Vec::new(), Vec::new());
    for (position, index) in found.iter().enumerate() {
        match index.counts.filter(|_| !(all_count && position == 0)) {
            Some(along) => batching.push((index.dim, along)),
            None => {
                let wrapped = from_start(c, index.value, sizes[index.dim])?;
                let wrapped = a::convert(c.g(), wrapped, DType::I64)?;
                let wide = a::broadcast_to(c.g(), wrapped, &shape)?;
                vector.push(a::unsqueeze(c.g(), wide, -1)?);
                starts.push(index.dim);
            }
        }
    }
    batching.sort_unstable();
    let indices_value = a::concat(c.g(), &vector, shape.len())?;
    let indexed: Vec<usize> = indices.iter().map(|(d, _)| *d).collect();
    let place = if are_adjacent(indices) { indexed[0] } else { 0 };
    let kept: Vec<usize> = (0..sizes.len()).filter(|d| !indexed.contains(d)).collect();
    let offset_dims = (0..kept.len()).map(|i| if i < place { i } else { i + shape.len() }).collect();
    let slice_sizes = (0..sizes.len()).map(|d| if indexed.contains(&d) { 1 } else { sizes[d] }).collect();
    let dims = GatherDims {
        offset_dims,
        collapsed_slice_dims: {
            let mut dims = starts.clone();
            dims.sort_unstable();
            dims
        },
        operand_batching_dims: batching.iter().map(|b| b.0).collect(),
        indices_batching_dims: batching.iter().map(|b| b.1).collect(),
        start_index_map: starts,
        index_vector_dim: shape.len(),
        slice_sizes,
    };
    let mut result: Vec<u64> = kept.iter().map(|&d| sizes[d]).collect();
    result.splice(place..place, shape.iter().copied());
    Ok(Lookup { dims, indices: indices_value, shape: result })
}

/// Resolves negative indices, which count from the end. Constant indices that are not negative are unchanged.
fn from_start(c: &mut Call<'_>, index: ValueId, size: u64) -> Result<ValueId, Reject> {
    if let Some(data) = c.constant(index)
        && data.iter().all(|&x| x >= 0.0)
    {
        return Ok(index);
    }
    let zero = a::full_like(c.g(), index, 0.0)?;
    let negative = a::compare(c.g(), Direction::Lt, index, zero)?;
    let moved = number(c, Binary::Add, index, size as f64)?;
    Ok(a::select(c.g(), negative, moved, index)?)
}

/// The positions that a mask marks, by dimension.
fn places_of(c: &mut Call<'_>) -> Lowered {
    let mask = c.first()?;
    Ok(Out::Values(super::marked::mark(c, mask)?))
}

fn index(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if let Some(rows) = super::marked::index(c, x)? {
        return value(rows);
    }
    let indices = whole_indices(c, x)?;
    let sizes = c.shape_of(x);
    if let [(dim, only)] = indices[..] {
        // An index with equal steps is a slice.
        if let ([_], Some(data)) = (&c.shape_of(only)[..], c.constant(only))
            && let Some((start, step)) = in_steps(&data, sizes[dim])
        {
            let count = data.len() as u64;
            let view = View::Slice { dim, start, count, step };
            return value(view.apply(c.g(), x)?);
        }
        let only = from_start(c, only, sizes[dim])?;
        return value(a::take(c.g(), x, dim, only, false)?);
    }
    let (shape, found) = broadcast_indices(c, x, &indices)?;
    if found.iter().all(|i| i.counts.is_some()) {
        return value(counted(c, x, &shape, &found, are_adjacent(&indices))?);
    }
    let lookup = lookup(c, x, &indices)?;
    let gather = Gather { dims: lookup.dims, out_of_bounds: OutOfBounds::Clamp };
    value(c.g().push(Op::Gather(gather), &[x, lookup.indices])?)
}

/// A lookup whose indices all count along separate dimensions: a permutation and a broadcast of the operand.
fn counted(c: &mut Call<'_>, x: ValueId, shape: &[u64], indices: &[Index], adjacent: bool) -> Result<ValueId, Reject> {
    let sizes = c.shape_of(x);
    let kept: Vec<usize> = (0..sizes.len()).filter(|d| !indices.iter().any(|i| i.dim == *d)).collect();
    let place = if adjacent { indices[0].dim } else { 0 };
    let mut along: Vec<(usize, usize)> = indices.iter().filter_map(|i| Some((i.counts?, i.dim))).collect();
    along.sort_unstable();
    let before = kept[..place].iter().copied();
    let permutation: Vec<usize> =
        before.chain(along.iter().map(|(_, dim)| *dim)).chain(kept[place..].iter().copied()).collect();
    let moved = a::permute(c.g(), x, &permutation)?;
    let size = |d: usize| if along.iter().any(|(to, _)| *to == d) { shape[d] } else { 1 };
    let mut spread: Vec<u64> = kept.iter().map(|&d| sizes[d]).collect();
    let mut result = spread.clone();
    spread.splice(place..place, (0..shape.len()).map(size));
    result.splice(place..place, shape.iter().copied());
    let moved = a::reshape(c.g(), moved, &spread)?;
    Ok(a::broadcast_to(c.g(), moved, &result)?)
}

/// The start and the step of the slice with these positions.
fn in_steps(data: &[f64], size: u64) -> Option<(u64, u64)> {
    let first = *data.first()?;
    let step = data.get(1).map_or(1.0, |second| second - first);
    let inside = |&x: &f64| x >= 0.0 && x < size as f64;
    let fits = step >= 1.0 && data.iter().all(inside);
    let equal = data.windows(2).all(|pair| pair[1] - pair[0] == step);
    (fits && equal).then_some((first as u64, step as u64))
}

fn index_put(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let dtype = c.dtype_of(x);
    let put = c.tensor("values")?;
    let put = a::convert(c.g(), put, dtype)?;
    let adds = c.bool("accumulate", false)?;
    // A mask with a single value for all marked elements needs no positions.
    let given = c.maybe_tensors("indices")?;
    if let [Some(mask)] = given[..]
        && c.dtype_of(mask) == DType::Bool
        && c.to.graph.ty(put).elements() == 1
    {
        let rank = c.rank(x);
        let mut shape = c.shape_of(mask);
        shape.resize(rank, 1);
        let mask = a::reshape(c.g(), mask, &shape)?;
        let put = a::reshape(c.g(), put, &[])?;
        let put = if adds { two(c, Binary::Add, x, put)? } else { put };
        return value(a::select(c.g(), mask, put, x)?);
    }
    if let Some(written) = super::marked::index_put(c, x, put, adds)? {
        return value(written);
    }
    let indices = whole_indices(c, x)?;
    let lookup = lookup(c, x, &indices)?;
    let put = a::broadcast_to(c.g(), put, &lookup.shape)?;
    value(scattered(c, x, lookup.dims, lookup.indices, put, if adds { None } else { Some(Combine::Replace) })?)
}

/// Combines `updates` into `x`, or adds them.
fn scattered(
    c: &mut Call<'_>,
    x: ValueId,
    dims: GatherDims,
    indices: ValueId,
    updates: ValueId,
    combine: Option<Combine>,
) -> Result<ValueId, Reject> {
    match combine {
        Some(combine) => Ok(c.g().push(Op::Scatter(Scatter { dims, combine }), &[x, indices, updates])?),
        None => {
            let shape = c.shape_of(x);
            let sum = c.g().push(Op::ScatterAdd(ScatterAdd { dims, shape }), &[indices, updates])?;
            two(c, Binary::Add, x, sum)
        }
    }
}

fn gather(c: &mut Call<'_>) -> Lowered {
    let (x, at) = (c.first()?, c.tensor("index")?);
    along(c, x, at)
}

fn along(c: &mut Call<'_>, x: ValueId, at: ValueId) -> Lowered {
    let rank = c.rank(x);
    let dim = c.dim("dim", 0, rank)?;
    if rank == 0 {
        let shape = c.shape_of(at);
        return value(a::broadcast_to(c.g(), x, &shape)?);
    }
    value(a::take_along(c.g(), x, dim, at, false)?)
}

fn take_along_dim(c: &mut Call<'_>) -> Lowered {
    let (mut x, mut at) = (c.first()?, c.tensor("indices")?);
    if !c.has("dim") {
        let (n, m) = (c.to.graph.ty(x).elements(), c.to.graph.ty(at).elements());
        x = a::reshape(c.g(), x, &[n])?;
        at = a::reshape(c.g(), at, &[m])?;
        return value(a::take_along(c.g(), x, 0, at, true)?);
    }
    let (own, wanted) = (c.shape_of(x), c.shape_of(at));
    let dim = c.dim("dim", 0, own.len())?;
    if own.len() != wanted.len() || own.is_empty() {
        return problem("looks up along a dimension of another rank");
    }
    // The other dimensions broadcast.
    let (mut of_x, mut of_at) = (own.clone(), wanted.clone());
    (of_x[dim], of_at[dim]) = (1, 1);
    let mut shape = a::broadcast_shapes(&of_x, &of_at)?;
    shape[dim] = own[dim];
    x = a::broadcast_to(c.g(), x, &shape)?;
    shape[dim] = wanted[dim];
    at = a::broadcast_to(c.g(), at, &shape)?;
    value(a::take_along(c.g(), x, dim, at, true)?)
}

fn index_select(c: &mut Call<'_>) -> Lowered {
    let (x, at) = (c.first()?, c.tensor("index")?);
    let rank = c.rank(x);
    let dim = c.dim("dim", 0, rank)?;
    if rank == 0 {
        return value(x);
    }
    let count = c.to.graph.ty(at).elements();
    let at = a::reshape(c.g(), at, &[count])?;
    value(a::take(c.g(), x, dim, at, false)?)
}

fn take(c: &mut Call<'_>) -> Lowered {
    let (x, at) = (c.first()?, c.tensor("index")?);
    let elements = c.to.graph.ty(x).elements();
    let x = a::reshape(c.g(), x, &[elements])?;
    value(a::take(c.g(), x, 0, at, true)?)
}

/// Writes single elements. Each keeps its position except in `dim`, where the index gives it.
fn scatter(c: &mut Call<'_>) -> Lowered {
    let (x, at) = (c.first()?, c.tensor("index")?);
    let (own, wanted) = (c.shape_of(x), c.shape_of(at));
    let dim = c.dim("dim", 0, own.len())?;
    let dtype = c.dtype_of(x);
    if own.len() != wanted.len() || own.is_empty() {
        return problem("scatters into another rank");
    }
    let source = c.operand(if c.has("src") { "src" } else { "value" })?;
    let mut source = c.as_tensor(source, dtype)?;
    if c.rank(source) == 0 {
        source = a::broadcast_to(c.g(), source, &wanted)?;
    }
    for (d, &n) in wanted.iter().enumerate() {
        source = a::slice_dim(c.g(), source, d, 0, n as i64, 1)?;
    }
    let adds = c.name.trim_end_matches('_') == "scatter_add";
    let mean = c.text("reduce") == Some("mean");
    let (combine, neutral) = match c.text("reduce") {
        _ if adds => (None, Reducer::Sum),
        None => (Some(Combine::Replace), Reducer::Sum),
        Some("add" | "sum") => (None, Reducer::Sum),
        Some("mean") if dtype.is_float() => (None, Reducer::Sum),
        Some("multiply" | "prod") => (Some(Combine::Multiply), Reducer::Product),
        Some("amax") => (Some(Combine::Maximum), Reducer::Max),
        Some("amin") => (Some(Combine::Minimum), Reducer::Min),
        Some(_) => return Err(Reject::Unsupported("with this reduction")),
    };
    let (dims, at) = places(c, &own, dim, at)?;
    let themselves = c.bool("include_self", true)?;
    if themselves && !mean {
        return value(scattered(c, x, dims, at, source, combine)?);
    }
    // The number of elements written to each position.
    let (zeros, ones) = (a::full_like(c.g(), x, 0.0)?, a::full_like(c.g(), source, 1.0)?);
    let mut counts = scattered(c, zeros, dims.clone(), at, ones, None)?;
    let start = if themselves {
        counts = number(c, Binary::Add, counts, 1.0)?;
        x
    } else {
        let untouched = a::compare(c.g(), Direction::Eq, counts, zeros)?;
        let neutral = a::full_like(c.g(), x, neutral.neutral(dtype))?;
        a::select(c.g(), untouched, x, neutral)?
    };
    let y = scattered(c, start, dims, at, source, combine)?;
    if !mean {
        return value(y);
    }
    let counts = number(c, Binary::Maximum, counts, 1.0)?;
    value(two(c, Binary::Divide, y, counts)?)
}

/// The positions of the elements of an index of single elements. Full dimensions become batch dimensions, so
/// that they can be split. In the others, the position is an iota.
fn places(c: &mut Call<'_>, own: &[u64], dim: usize, at: ValueId) -> Result<(GatherDims, ValueId), Reject> {
    let wanted = c.shape_of(at);
    let rank = own.len();
    let whole: Vec<usize> = (0..rank).filter(|&d| d != dim && wanted[d] == own[d]).collect();
    let starts: Vec<usize> = (0..rank).filter(|d| !whole.contains(d)).collect();
    let dtype = c.dtype_of(at);
    let mut vector = Vec::new();
    for &d in &starts {
        let component = if d == dim { at } else { a::iota(c.g(), &wanted, d, dtype)? };
        vector.push(a::unsqueeze(c.g(), component, -1)?);
    }
    let indices = a::concat(c.g(), &vector, rank)?;
    let dims = GatherDims {
        offset_dims: Vec::new(),
        collapsed_slice_dims: starts.clone(),
        operand_batching_dims: whole.clone(),
        indices_batching_dims: whole,
        start_index_map: starts,
        index_vector_dim: rank,
        slice_sizes: vec![1; rank],
    };
    Ok((dims, indices))
}

/// Writes slices of `source` to positions along a dimension.
fn write_slices(c: &mut Call<'_>, source: ValueId, combine: Option<Combine>) -> Result<ValueId, Reject> {
    let (x, at) = (c.first()?, c.tensor("index")?);
    let own = c.shape_of(x);
    let dim = c.dim("dim", 0, own.len())?;
    if own.is_empty() {
        return Err(other("writes slices of a scalar"));
    }
    let count = c.to.graph.ty(at).elements();
    let at = a::reshape(c.g(), at, &[count, 1])?;
    let mut slice_sizes = own.clone();
    slice_sizes[dim] = 1;
    let dims = GatherDims {
        offset_dims: (0..own.len()).filter(|&d| d != dim).collect(),
        collapsed_slice_dims: vec![dim],
        operand_batching_dims: Vec::new(),
        indices_batching_dims: Vec::new(),
        start_index_map: vec![dim],
        index_vector_dim: 1,
        slice_sizes,
    };
    let mut shape = own;
    shape[dim] = count;
    let source = a::broadcast_to(c.g(), source, &shape)?;
    scattered(c, x, dims, at, source, combine)
}

fn typed_source(c: &mut Call<'_>, name: &str) -> Result<ValueId, Reject> {
    let x = c.first()?;
    let dtype = c.dtype_of(x);
    let source = c.operand(name)?;
    c.as_tensor(source, dtype)
}

fn index_add(c: &mut Call<'_>) -> Lowered {
    let source = typed_source(c, "source")?;
    let alpha = c.float("alpha", 1.0)?;
    let source = if alpha == 1.0 { source } else { number(c, Binary::Multiply, source, alpha)? };
    if let Some(sum) = super::marked::index_add(c, source)? {
        return value(sum);
    }
    value(write_slices(c, source, None)?)
}

fn index_copy(c: &mut Call<'_>) -> Lowered {
    let source = typed_source(c, "source")?;
    value(write_slices(c, source, Some(Combine::Replace))?)
}

fn index_fill(c: &mut Call<'_>) -> Lowered {
    let source = typed_source(c, "value")?;
    value(write_slices(c, source, Some(Combine::Replace))?)
}

/// Replaces a view of `x` with `source`.
fn written(c: &mut Call<'_>, views: &[View], source: ValueId) -> Lowered {
    let x = c.first()?;
    let copy = c.to.memory.fresh(x);
    let mut part = copy;
    for view in views {
        part = c.to.memory.view(&mut c.to.graph, part, view.clone())?;
    }
    c.to.memory.write(&mut c.to.graph, part, source)?;
    value(c.to.memory.read(&mut c.to.graph, copy)?)
}

fn select_scatter(c: &mut Call<'_>) -> Lowered {
    let source = typed_source(c, "src")?;
    match super::shape::TABLE.iter().find(|(name, _)| *name == "select").map(|(_, lowering)| lowering.apply(c)) {
        Some(Ok(Out::Views(views))) if views.len() == 1 => written(c, &views[0], source),
        Some(Err(reject)) => Err(reject),
        _ => problem("selects nothing"),
    }
}

fn slice_scatter(c: &mut Call<'_>) -> Lowered {
    let source = typed_source(c, "src")?;
    let x = c.first()?;
    let shape = c.shape_of(x);
    let dim = c.dim("dim", 0, shape.len())?;
    let Some(&size) = shape.get(dim) else { return problem("slices a scalar") };
    let view = super::shape::part(dim, size, c.maybe_int("start")?, c.maybe_int("end")?, c.int("step", 1)?)?;
    written(c, &[view], source)
}

/// Counts the ascending boundaries before each element.
fn search(c: &mut Call<'_>, boundaries: &str) -> Lowered {
    let both = c.promoted(&[boundaries, "self"], false)?;
    let (edges, x) = (both[0], both[1]);
    if c.rank(edges) != 1 || c.has("sorter") {
        return Err(Reject::Unsupported("in several rows, or with a sorter"));
    }
    let right = c.bool("right", false)? || c.text("side") == Some("right");
    let direction = if right { Direction::Le } else { Direction::Lt };
    let x = a::unsqueeze(c.g(), x, -1)?;
    let before = a::compare(c.g(), direction, edges, x)?;
    let dtype = if c.bool("out_int32", false)? { DType::I32 } else { DType::I64 };
    let before = a::convert(c.g(), before, dtype)?;
    let last = c.rank(before) - 1;
    value(a::sum(c.g(), before, &[last], false)?)
}

/// Combines rows of a table by bag. The bags must follow from the program alone, and all have the same size.
fn embedding_bag(c: &mut Call<'_>) -> Lowered {
    let (table, ids) = (c.tensor("weight")?, c.tensor("indices")?);
    let offsets = c.tensor("offsets")?;
    let starts = c.constant(offsets).ok_or_else(data_dependent)?;
    let total = c.to.graph.ty(ids).elements();
    let mut edges: Vec<f64> = starts;
    if !c.bool("include_last_offset", false)? {
        edges.push(total as f64);
    }
    let bags = edges.len().saturating_sub(1) as u64;
    let each = if bags > 0 { edges[1] - edges[0] } else { 0.0 };
    if bags == 0 || edges[0] != 0.0 || edges.windows(2).any(|pair| pair[1] - pair[0] != each) {
        return Err(Reject::Unsupported("with bags of several sizes"));
    }
    if each * bags as f64 != total as f64 {
        return problem("has bags that do not add up");
    }
    let ids = a::reshape(c.g(), ids, &[bags, each as u64])?;
    let mut rows = a::embedding(c.g(), table, ids)?;
    let dtype = c.dtype_of(rows);
    if let Some(weights) = c.maybe_tensor("per_sample_weights")? {
        let weights = a::reshape(c.g(), weights, &[bags, each as u64, 1])?;
        rows = two(c, Binary::Multiply, rows, weights)?;
    }
    let padding = c.int("padding_idx", -1)?;
    let padding = if padding < 0 && padding != -1 { padding + c.shape_of(table)[0] as i64 } else { padding };
    let kept = match padding {
        -1 => None,
        padding => {
            let padding = a::full_like(c.g(), ids, padding as f64)?;
            let kept = a::compare(c.g(), Direction::Ne, ids, padding)?;
            Some(a::unsqueeze(c.g(), kept, -1)?)
        }
    };
    let mode = c.int("mode", 0)?;
    let missing = if mode == 2 { f64::NEG_INFINITY } else { 0.0 };
    if let Some(kept) = kept {
        let none = a::full_like(c.g(), rows, missing)?;
        rows = a::select(c.g(), kept, rows, none)?;
    }
    let bag = match mode {
        0 => a::sum(c.g(), rows, &[1], false)?,
        1 => {
            let sum = a::sum(c.g(), rows, &[1], false)?;
            match kept {
                None => number(c, Binary::Multiply, sum, 1.0 / each.max(1.0))?,
                Some(kept) => {
                    let kept = a::convert(c.g(), kept, dtype)?;
                    let count = a::sum(c.g(), kept, &[1], false)?;
                    let count = a::clamp(c.g(), count, Some(1.0), None)?;
                    two(c, Binary::Divide, sum, count)?
                }
            }
        }
        2 => {
            let most = a::max(c.g(), rows, &[1], false)?;
            match kept {
                None => most,
                // An empty bag is zero.
                Some(kept) => {
                    let some = a::reduce(c.g(), kept, altiplano_ir::op::Reducer::Or, &[1], false)?;
                    let zero = a::full_like(c.g(), most, 0.0)?;
                    a::select(c.g(), some, most, zero)?
                }
            }
        }
        _ => return problem("has a mode that is none"),
    };
    let first = super::super::call::Item::Tensor(c.to.memory.fresh(bag));
    let mut items = vec![first];
    items.resize(c.declared.len().max(1), super::super::call::Item::Opaque);
    Ok(Out::Items(items))
}

/// Replaces elements where a mask is true with elements of `source`, in order. If the mask does not vary along
/// the last dimension, it takes whole rows.
fn masked_scatter(c: &mut Call<'_>) -> Lowered {
    let (x, mask, source) = (c.first()?, c.tensor("mask")?, c.tensor("source")?);
    let shape = c.shape_of(x);
    let mask = a::broadcast_to(c.g(), mask, &shape)?;
    let row = shape.last().copied().unwrap_or(1);
    let elements = c.to.graph.ty(source).elements();
    if elements == 0 {
        return value(x);
    }
    let by_row = row > 1 && elements.is_multiple_of(row) && repeats_last(c, mask);
    let width = if by_row { row } else { 1 };
    let outer = if by_row { shape[..shape.len() - 1].to_vec() } else { shape.clone() };
    let count: u64 = outer.iter().product();
    let marks = if by_row {
        let last = shape.len() - 1;
        let marks = a::slice_dim(c.g(), mask, last, 0, 1, 1)?;
        a::reshape(c.g(), marks, &[count])?
    } else {
        a::reshape(c.g(), mask, &[count])?
    };
    let marks = a::convert(c.g(), marks, DType::I32)?;
    let places = a::cumulative(c.g(), marks, altiplano_ir::op::Reducer::Sum, 0, false)?;
    let places = number(c, Binary::Subtract, places, 1.0)?;
    let rows = elements / width;
    let places = a::clamp(c.g(), places, Some(0.0), Some(rows as f64 - 1.0))?;
    let places = a::reshape(c.g(), places, &outer)?;
    let table = if by_row { vec![rows, width] } else { vec![rows] };
    let source = a::reshape(c.g(), source, &table)?;
    let dtype = c.dtype_of(x);
    let source = a::convert(c.g(), source, dtype)?;
    let found = a::take(c.g(), source, 0, places, false)?;
    value(a::select(c.g(), mask, found, x)?)
}

/// True if the ops that made a value show that it does not vary along its last dimension.
fn repeats_last(c: &Call<'_>, x: ValueId) -> bool {
    let node = c.to.graph.node(x);
    let Some(last) = node.ty.rank().checked_sub(1) else { return false };
    match &node.op {
        Op::BroadcastInDim(op) => match op.dims.iter().position(|&d| d == last) {
            None => true,
            Some(at) => {
                let of = node.operands[0];
                c.to.graph.shape(of)[at] == 1 || (at + 1 == c.to.graph.shape(of).len() && repeats_last(c, of))
            }
        },
        Op::Convert(_) | Op::Unary(_) => repeats_last(c, node.operands[0]),
        _ => false,
    }
}
