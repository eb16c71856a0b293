//! Lowers ops that read or write parts of tensors at given or computed positions.
//!
//! Positions that follow from constants become slices and concatenations, which can be planned well in any
//! layout. Only computed positions become gathers and scatters.

use super::convert::Converter;
use super::lower::{Lowered, attribute, count, exactly, optional_dim, optional_dims, sizes};
use super::report::Reject;
use super::syntax::{Operation, Region};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{
    Binary, Combine, Concatenate, Gather, GatherDims, Op, OutOfBounds, Reshape, Scatter, ScatterAdd, Unary,
};

/// The operation by which a scatter combines the existing element with an update.
#[derive(Clone, Copy, PartialEq)]
enum Write {
    /// The update is dropped.
    Nothing,
    Add,
    Subtract,
    Combine(Combine),
}

impl<'t, 'a> Converter<'t, 'a> {
    /// The known value of `start`, clamped so that the slice lies inside.
    fn known_start(&mut self, start: ValueId, length: u64, size: u64) -> Option<u64> {
        let most = size.saturating_sub(length);
        if most == 0 {
            return Some(0);
        }
        Some((self.known_scalar(start)?.max(0.0) as u64).min(most))
    }

    /// Concatenates scalars into a vector.
    fn index_vector(&mut self, starts: &[ValueId]) -> Result<ValueId, Reject> {
        let wide = starts.iter().any(|&s| self.graph.ty(s).dtype.bytes() > 4 || self.graph.ty(s).dtype == DType::U32);
        let dtype = if wide { DType::I64 } else { DType::I32 };
        let mut parts = Vec::with_capacity(starts.len());
        for &start in starts {
            let start = self.converted(start, dtype)?;
            parts.push(self.push(Op::Reshape(Reshape { shape: vec![1] }), &[start])?);
        }
        match parts.as_slice() {
            [only] => Ok(*only),
            _ => Ok(self.push(Op::Concatenate(Concatenate { dim: 0 }), &parts)?),
        }
    }

    /// Lowers a slice at computed starts, which are clamped so that the slice lies inside.
    pub fn dynamic_slice(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let lengths = sizes(operation, "slice_sizes")?;
        self.slice_at(operands, lengths)
    }

    fn slice_at(&mut self, operands: &[ValueId], lengths: Vec<u64>) -> Lowered {
        let Some((&x, starts)) = operands.split_first() else {
            return Err(count(1, 0));
        };
        let shape = self.graph.shape(x).to_vec();
        if starts.len() != shape.len() || lengths.len() != shape.len() {
            return Err(count(shape.len() + 1, operands.len()));
        }
        if lengths.iter().zip(&shape).any(|(length, size)| length > size) {
            return Err(attribute("slice_sizes"));
        }
        let (mut start, mut limit) = (vec![0; shape.len()], shape.clone());
        let mut computed = Vec::new();
        for (d, &at) in starts.iter().enumerate() {
            match self.known_start(at, lengths[d], shape[d]) {
                Some(known) => {
                    start[d] = known;
                    limit[d] = known + lengths[d];
                }
                None => computed.push(d),
            }
        }
        let x = self.sliced(x, start, limit)?;
        if computed.is_empty() {
            return Ok(vec![x]);
        }
        if let [dim] = computed[..]
            && let Some(slice) = self.local_slice(x, dim, starts[dim], lengths[dim])
        {
            return self.one(slice, &[x]);
        }
        let indices = self.index_vector(&computed.iter().map(|&d| starts[d]).collect::<Vec<_>>())?;
        let dims = window_dims(shape.len(), computed, lengths);
        self.one(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])
    }

    pub fn dynamic_update_slice(&mut self, operands: &[ValueId]) -> Lowered {
        let [x, update, starts @ ..] = operands else {
            return Err(count(2, operands.len()));
        };
        let (shape, lengths) = (self.graph.shape(*x).to_vec(), self.graph.shape(*update).to_vec());
        if starts.len() != shape.len() || lengths.len() != shape.len() {
            return Err(count(shape.len() + 2, operands.len()));
        }
        if lengths.iter().zip(&shape).any(|(length, size)| length > size) {
            return Err(attribute("update"));
        }
        let known: Vec<Option<u64>> =
            (0..shape.len()).map(|d| self.known_start(starts[d], lengths[d], shape[d])).collect();
        if let Some(starts) = known.iter().copied().collect::<Option<Vec<u64>>>() {
            return Ok(vec![self.updated(*x, *update, &starts)?]);
        }
        // The op clamps starts, but a scatter drops updates outside, so starts are clamped first.
        let partial: Vec<usize> = (0..shape.len()).filter(|&d| lengths[d] < shape[d]).collect();
        let mut moved = Vec::with_capacity(partial.len());
        for &d in &partial {
            let (low, high) = (self.scalar(starts[d], 0.0)?, self.scalar(starts[d], (shape[d] - lengths[d]) as f64)?);
            let above = self.binary(Binary::Maximum, starts[d], low)?;
            moved.push(self.binary(Binary::Minimum, above, high)?);
        }
        let indices = self.index_vector(&moved)?;
        let dims = window_dims(shape.len(), partial, lengths);
        self.one(Op::Scatter(Scatter { dims, combine: Combine::Replace }), &[*x, indices, *update])
    }

    pub fn gather(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let slice_sizes = match operation.attribute("slice_sizes") {
            Some(_) => sizes(operation, "slice_sizes")?,
            // `dynamic_gather` has the slice sizes as an operand.
            None => {
                let sizes = operands.get(2).and_then(|&sizes| self.known_ints(sizes));
                let sizes = sizes.ok_or(Reject::Unsupported("with sizes that are computed"))?;
                sizes.into_iter().map(|size| size.max(0) as u64).collect()
            }
        };
        let [x, indices] = exactly(&operands[..operands.len().min(2)])?;
        let dims = GatherDims {
            offset_dims: optional_dims(operation, "offset_dims")?,
            collapsed_slice_dims: optional_dims(operation, "collapsed_slice_dims")?,
            operand_batching_dims: optional_dims(operation, "operand_batching_dims")?,
            indices_batching_dims: optional_dims(operation, "start_indices_batching_dims")?,
            start_index_map: optional_dims(operation, "start_index_map")?,
            index_vector_dim: optional_dim(operation, "index_vector_dim")?,
            slice_sizes,
        };
        // StableHLO clamps indices so that the slice lies inside. Other behaviours are ops around it.
        let lengths = dims.slice_sizes.clone();
        let gather = Op::Gather(Gather { dims: dims.clone(), out_of_bounds: OutOfBounds::Clamp });
        let types = [self.graph.ty(x), self.graph.ty(indices)];
        let shape = altiplano_ir::op::Operator::infer(&gather, &types)?.shape;
        let Some(starts) = self.single_start(x, indices, &dims) else {
            return self.one(gather, &[x, indices]);
        };
        let starts = starts.iter().zip(&lengths).zip(self.graph.shape(x));
        let start: Vec<u64> =
            starts.map(|((at, length), size)| (*at).clamp(0, (size - length) as i64) as u64).collect();
        let limit = start.iter().zip(&lengths).map(|(start, length)| start + length).collect();
        let slice = self.sliced(x, start, limit)?;
        Ok(vec![self.reshaped(slice, shape)?])
    }

    /// The start in each dimension, if there is only one index vector and it is known.
    fn single_start(&mut self, x: ValueId, indices: ValueId, dims: &GatherDims) -> Option<Vec<i64>> {
        let rank = self.graph.ty(x).rank();
        let indexed = dims.start_index_map.iter().all(|&d| d < rank) && dims.slice_sizes.len() == rank;
        let single = self.graph.ty(indices).elements() == dims.start_index_map.len() as u64;
        if !single || !indexed || !dims.operand_batching_dims.is_empty() {
            return None;
        }
        let mut starts = vec![0; rank];
        for (at, &d) in self.known_ints(indices)?.into_iter().zip(&dims.start_index_map) {
            starts[d] = at;
        }
        Some(starts)
    }

    pub fn scatter(&mut self, operation: &'t Operation<'a>, operands: &[ValueId]) -> Lowered {
        let n = operands.len() / 2;
        if operands.len() % 2 == 0 {
            return Err(count(3, operands.len()));
        }
        let [region] = super::control::regions(operation)?;
        let indices = operands[n];
        let mut results = Vec::with_capacity(n);
        for position in 0..n {
            let write = write_of(region, position, n).ok_or(Reject::Unsupported(
                "with another function than add, multiply, minimum, maximum or replacement",
            ))?;
            let (x, updates) = (operands[position], operands[n + 1 + position]);
            results.push(self.scatter_one(operation, x, indices, updates, write)?);
        }
        Ok(results)
    }

    fn scatter_one(
        &mut self,
        operation: &Operation,
        x: ValueId,
        indices: ValueId,
        updates: ValueId,
        write: Write,
    ) -> Result<ValueId, Reject> {
        let shape = self.graph.shape(x).to_vec();
        let updates_shape = self.graph.shape(updates);
        let mut dims = GatherDims {
            offset_dims: optional_dims(operation, "update_window_dims")?,
            collapsed_slice_dims: optional_dims(operation, "inserted_window_dims")?,
            operand_batching_dims: optional_dims(operation, "input_batching_dims")?,
            indices_batching_dims: optional_dims(operation, "scatter_indices_batching_dims")?,
            start_index_map: optional_dims(operation, "scatter_dims_to_operand_dims")?,
            index_vector_dim: optional_dim(operation, "index_vector_dim")?,
            slice_sizes: Vec::new(),
        };
        // Windows have the sizes of the updates; in dimensions without one, a window is a single element.
        let mut windows = dims.offset_dims.iter().map(|&dim| updates_shape.get(dim).copied());
        for dim in 0..shape.len() {
            let single = dims.collapsed_slice_dims.contains(&dim) || dims.operand_batching_dims.contains(&dim);
            let size = if single { Some(1) } else { windows.next().flatten() };
            dims.slice_sizes.push(size.ok_or_else(|| attribute("update_window_dims"))?);
        }
        let updates = match write {
            Write::Nothing => return Ok(x),
            Write::Subtract => self.unary(Unary::Negate, updates)?,
            _ => updates,
        };
        let op = match write {
            Write::Combine(combine) => Op::Scatter(Scatter { dims: dims.clone(), combine }),
            _ => Op::ScatterAdd(ScatterAdd { dims: dims.clone(), shape: shape.clone() }),
        };
        if let Some(starts) = self.single_start(x, indices, &dims)
            && self.graph.ty(updates).elements() == dims.slice_sizes.iter().product::<u64>()
        {
            let mut ends = starts.iter().zip(&dims.slice_sizes).zip(&shape);
            if !ends.all(|((start, length), size)| *start >= 0 && *start as u64 + length <= *size) {
                return Ok(x);
            }
            let start: Vec<u64> = starts.iter().map(|start| *start as u64).collect();
            let limit = start.iter().zip(&dims.slice_sizes).map(|(start, length)| start + length).collect();
            let update = self.reshaped(updates, dims.slice_sizes.clone())?;
            let combine = match write {
                Write::Combine(Combine::Replace) => return self.updated(x, update, &start),
                Write::Combine(Combine::Multiply) => Binary::Multiply,
                Write::Combine(Combine::Minimum) => Binary::Minimum,
                Write::Combine(Combine::Maximum) => Binary::Maximum,
                _ => Binary::Add,
            };
            let there = self.sliced(x, start.clone(), limit)?;
            let update = self.binary(combine, there, update)?;
            return self.updated(x, update, &start);
        }
        if let Op::ScatterAdd(_) = op {
            let sum = self.push(op, &[indices, updates])?;
            if self.splat(x) == Some(0.0) {
                return Ok(sum);
            }
            return self.binary(Binary::Add, x, sum);
        }
        Ok(self.push(op, &[x, indices, updates])?)
    }
}

/// Dimension numbers for one index vector over the dimensions `indexed`, with windows that keep all dimensions.
fn window_dims(rank: usize, indexed: Vec<usize>, slice_sizes: Vec<u64>) -> GatherDims {
    GatherDims {
        offset_dims: (0..rank).collect(),
        collapsed_slice_dims: Vec::new(),
        operand_batching_dims: Vec::new(),
        indices_batching_dims: Vec::new(),
        start_index_map: indexed,
        index_vector_dim: 0,
        slice_sizes,
    }
}

/// The operation that a scatter of `n` operands applies to the one at `position`. Its region takes the existing
/// elements first, then the updates.
fn write_of(region: &Region, position: usize, n: usize) -> Option<Write> {
    let end = region.operations.last()?;
    let (there, update) = (region.arguments.get(position)?.name, region.arguments.get(n + position)?.name);
    let returned = end.operands.get(position).filter(|_| end.name == "return" && region.arguments.len() == 2 * n)?;
    if returned.name == update {
        return Some(Write::Combine(Combine::Replace));
    }
    if returned.name == there {
        return Some(Write::Nothing);
    }
    let apply = region.operations.iter().find(|op| op.results.iter().any(|r| r.name == returned.name))?;
    let [first, second] = apply.operands.as_slice() else { return None };
    let straight = [first.name, second.name] == [there, update];
    if apply.dialect != "stablehlo" || !straight && [first.name, second.name] != [update, there] {
        return None;
    }
    let ty = apply.result_types.first()?;
    let boolean = matches!(ty, super::syntax::Type::Tensor(ty) if ty.element == "i1");
    // Parts of complex numbers are written separately, which only sums allow.
    if super::complex::is_complex(ty) && !matches!(apply.name, "add" | "subtract") {
        return None;
    }
    Some(match apply.name {
        "or" if boolean => Write::Combine(Combine::Maximum),
        "and" if boolean => Write::Combine(Combine::Minimum),
        "add" if boolean => Write::Combine(Combine::Maximum),
        "multiply" if boolean => Write::Combine(Combine::Minimum),
        "add" => Write::Add,
        "subtract" if straight => Write::Subtract,
        "multiply" => Write::Combine(Combine::Multiply),
        "minimum" => Write::Combine(Combine::Minimum),
        "maximum" => Write::Combine(Combine::Maximum),
        _ => return None,
    })
}
