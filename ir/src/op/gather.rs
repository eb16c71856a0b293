//! Gather and its transpose: table lookups, embeddings, `take_along_axis`, and the scatters of their gradients.
//!
//! Both ops use StableHLO's description of dimensions. A split table is looked up in parts (vocabulary-parallel
//! embedding). Each device finds the rows that it holds and takes zeros for the others, so the result is a partial sum.
//! A scatter into a split table drops updates that belong to other devices.

use super::lookup::{looked_up, once_a_row, placed};
use super::*;
use crate::rule::FactorKind;
use crate::tensor::for_each_index;

/// StableHLO's gather dimension numbers. `indices` holds index vectors along `index_vector_dim`, which is implicit if
/// it equals the rank. Result dimensions in `offset_dims` run within a slice of the operand, and all others run over
/// `indices`. The scatter numbers are the same with operand and result exchanged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatherDims {
    pub offset_dims: Vec<usize>,
    pub collapsed_slice_dims: Vec<usize>,
    #[serde(default)]
    pub operand_batching_dims: Vec<usize>,
    #[serde(default)]
    pub indices_batching_dims: Vec<usize>,
    /// The operand dimension that each component of an index vector indexes.
    pub start_index_map: Vec<usize>,
    pub index_vector_dim: usize,
    /// The size of the slice in each operand dimension.
    pub slice_sizes: Vec<u64>,
}

/// The result of an index beyond the operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutOfBounds {
    /// The nearest slice that lies inside.
    Clamp,
    /// Zeros.
    Zero,
}

/// `gather(operand, indices)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gather {
    #[serde(flatten)]
    pub dims: GatherDims,
    pub out_of_bounds: OutOfBounds,
}

/// `scatter_add(indices, updates)`: zeros of `shape` with every update added at its index. Updates whose slice does not
/// lie inside are dropped. `scatter` into another tensor is that tensor plus this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScatterAdd {
    #[serde(flatten)]
    pub dims: GatherDims,
    pub shape: Vec<u64>,
}

impl ScatterAdd {
    /// Returns true if [`ScatterAdd::compared`] has a value for indices of this shape.
    pub fn is_compared(&self, indices: &[u64]) -> bool {
        once_a_row(&self.dims, &self.shape, indices).is_some()
    }

    /// The same value as a comparison of positions with the index, if each place in the other dimensions has one update.
    /// Its users can compute it on the fly.
    pub fn compared(&self, graph: &mut Graph, indices: ValueId, updates: ValueId) -> Option<ValueId> {
        let dim = once_a_row(&self.dims, &self.shape, graph.shape(indices))?;
        Some(placed(graph, &self.dims, dim, &self.shape, indices, updates))
    }
}

impl GatherDims {
    /// A lookup of rows of a table of this shape, by `batch_rank` dimensions of single indices. These come first in the
    /// result.
    pub fn rows(table: &[u64], batch_rank: usize) -> GatherDims {
        GatherDims {
            offset_dims: (batch_rank..batch_rank + table.len() - 1).collect(),
            collapsed_slice_dims: vec![0],
            operand_batching_dims: Vec::new(),
            indices_batching_dims: Vec::new(),
            start_index_map: vec![0],
            index_vector_dim: batch_rank,
            slice_sizes: [&[1], &table[1..]].concat(),
        }
    }

    /// The dimensions of the gathered result that run over `indices`.
    pub fn batch_dims(&self, result_rank: usize) -> Vec<usize> {
        (0..result_rank).filter(|d| !self.offset_dims.contains(d)).collect()
    }

    /// The dimensions of `indices` other than the index vector.
    pub fn indices_dims(&self, indices_rank: usize) -> Vec<usize> {
        (0..indices_rank).filter(|&d| d != self.index_vector_dim).collect()
    }

    /// The operand dimensions that appear in the result, in order.
    pub fn window_dims(&self) -> Vec<usize> {
        let gone = |d: &usize| self.collapsed_slice_dims.contains(d) || self.operand_batching_dims.contains(d);
        (0..self.slice_sizes.len()).filter(|d| !gone(d)).collect()
    }

    pub(super) fn check(&self, operand: &[u64], indices: &[u64]) -> Result<Vec<u64>, ShapeError> {
        if self.slice_sizes.len() != operand.len() {
            return Err(ShapeError::Attribute("slice_sizes must have an entry for each operand dimension"));
        }
        if self.index_vector_dim > indices.len() {
            return Err(ShapeError::DimOutOfRange { dim: self.index_vector_dim as u64, rank: indices.len() });
        }
        let gone = [self.collapsed_slice_dims.as_slice(), &self.operand_batching_dims].concat();
        expect_dims(&gone, operand.len())?;
        expect_dims(&self.start_index_map, operand.len())?;
        expect_dims(&self.indices_batching_dims, indices.len())?;
        if self.operand_batching_dims.len() != self.indices_batching_dims.len() {
            return Err(ShapeError::Attribute("operand and indices must name equally many batching dimensions"));
        }
        for (d, (&slice, &size)) in self.slice_sizes.iter().zip(operand).enumerate() {
            if slice > size || gone.contains(&d) && slice != 1 {
                return Err(ShapeError::SizesDiffer { what: "slice size", left: slice, right: size });
            }
        }
        let vector = indices.get(self.index_vector_dim).copied().unwrap_or(1);
        if vector != self.start_index_map.len() as u64 {
            return Err(ShapeError::SizesDiffer {
                what: "index vector",
                left: vector,
                right: self.start_index_map.len() as u64,
            });
        }
        for (&o, &i) in self.operand_batching_dims.iter().zip(&self.indices_batching_dims) {
            if i == self.index_vector_dim || operand[o] != indices[i] || self.start_index_map.contains(&o) {
                return Err(ShapeError::Attribute("batching dimensions of operand and indices must agree"));
            }
        }
        let mut windows = self.window_dims().into_iter().map(|d| self.slice_sizes[d]);
        let mut batches = self.indices_dims(indices.len()).into_iter().map(|d| indices[d]);
        let rank = self.window_dims().len() + self.indices_dims(indices.len()).len();
        if self.offset_dims.len() != self.window_dims().len() || !self.offset_dims.is_sorted() {
            return Err(ShapeError::Attribute("offset_dims must name one result dimension for each slice dimension"));
        }
        expect_dims(&self.offset_dims, rank)?;
        let size = |d| if self.offset_dims.contains(&d) { windows.next() } else { batches.next() };
        Ok((0..rank).filter_map(size).collect())
    }

    /// The rule of gathers and scatters, with factors of (operand-shaped, indices, result-shaped) tensors. An indexed
    /// dimension is a factor of its own if it is the only component of the index. Its kind differs between the two ops.
    /// `updates` is the effect of splitting a scatter's updates, and `None` for a gather.
    pub(super) fn rule(
        &self,
        operand: &[u64],
        indices: &[u64],
        result_rank: usize,
        updates: Option<FactorKind>,
    ) -> GatherRule {
        let mut rule = ShardingRule::default();
        let mut operand_dims = vec![Vec::new(); operand.len()];
        let mut indices_dims = vec![Vec::new(); indices.len()];
        let mut result_dims = vec![Vec::new(); result_rank];
        let mut lookup = None;
        for (&i, &r) in self.indices_dims(indices.len()).iter().zip(&self.batch_dims(result_rank)) {
            let batching = self.indices_batching_dims.iter().position(|&b| b == i);
            let kind = updates.filter(|_| batching.is_none()).unwrap_or(FactorKind::Parallel);
            let f = rule.factor(indices[i], kind);
            indices_dims[i].push(f);
            result_dims[r].push(f);
            if let Some(b) = batching {
                operand_dims[self.operand_batching_dims[b]].push(f);
            }
        }
        for (&o, &r) in self.window_dims().iter().zip(&self.offset_dims) {
            if self.slice_sizes[o] == operand[o] && !self.start_index_map.contains(&o) {
                let f = rule.factor(operand[o], FactorKind::Parallel);
                operand_dims[o].push(f);
                result_dims[r].push(f);
            } else {
                let f = rule.factor(operand[o], FactorKind::Whole);
                operand_dims[o].push(f);
                let f = rule.factor(self.slice_sizes[o], FactorKind::Whole);
                result_dims[r].push(f);
            }
        }
        for &o in &self.collapsed_slice_dims {
            let alone = self.start_index_map == [o];
            let kind = match (alone, updates.is_some()) {
                (false, _) => FactorKind::Whole,
                (true, false) => FactorKind::Reduction(Reducer::Sum),
                (true, true) => FactorKind::Parallel,
            };
            let f = rule.factor(operand[o], kind);
            operand_dims[o].push(f);
            if alone {
                lookup = Some((o, f));
                rule.contiguous.push(f);
            }
        }
        if self.index_vector_dim < indices.len() {
            indices_dims[self.index_vector_dim].push(rule.factor(indices[self.index_vector_dim], FactorKind::Whole));
        }
        GatherRule { rule, operand: operand_dims, indices: indices_dims, result: result_dims, lookup }
    }

    /// The same lookups for another shape of the gathered tensor. Slices take the size of the dimensions that run
    /// within them.
    pub(super) fn resized(&self, gathered: &[u64]) -> GatherDims {
        let mut dims = self.clone();
        for (&o, &r) in self.window_dims().iter().zip(&self.offset_dims) {
            dims.slice_sizes[o] = gathered[r];
        }
        dims
    }

    /// The last index in each indexed dimension at which a slice lies inside.
    fn last_starts(&self, operand: &[u64]) -> Vec<u64> {
        self.start_index_map.iter().map(|&o| operand[o] - self.slice_sizes[o]).collect()
    }

    /// Calls `visit` for each element of the result, with its index and the operand's index. The latter is `None`
    /// outside the operand.
    pub(super) fn for_each(
        &self,
        indices: &Tensor,
        operand: &[u64],
        result: &[u64],
        clamp: bool,
        mut visit: impl FnMut(&[u64], Option<&[u64]>),
    ) {
        let batch_dims = self.batch_dims(result.len());
        let indices_dims = self.indices_dims(indices.ty.rank());
        let window_dims = self.window_dims();
        let mut at = vec![0; indices.ty.rank()];
        let mut source = vec![0u64; operand.len()];
        for_each_index(result, |index| {
            for (&i, &r) in indices_dims.iter().zip(&batch_dims) {
                at[i] = index[r];
            }
            source.iter_mut().for_each(|s| *s = 0);
            let mut inside = true;
            for (component, &o) in self.start_index_map.iter().enumerate() {
                if let Some(c) = at.get_mut(self.index_vector_dim) {
                    *c = component as u64;
                }
                let start = indices.at(&at) as i64;
                let last = (operand[o] - self.slice_sizes[o]) as i64;
                inside &= clamp || (0..=last).contains(&start);
                source[o] = start.clamp(0, last) as u64;
            }
            for (&o, &i) in self.operand_batching_dims.iter().zip(&self.indices_batching_dims) {
                source[o] = at[i];
            }
            for (&o, &r) in window_dims.iter().zip(&self.offset_dims) {
                source[o] += index[r];
            }
            visit(index, inside.then_some(&source));
        });
    }
}

/// A rule over the three tensors, before they are put in the op's operand order.
pub(super) struct GatherRule {
    pub rule: ShardingRule,
    pub operand: Vec<Vec<u8>>,
    pub indices: Vec<Vec<u8>>,
    pub result: Vec<Vec<u8>>,
    /// The indexed operand dimension that may be split, and its factor.
    lookup: Option<(usize, u8)>,
}

impl GatherRule {
    /// Returns true if the strategy splits the indexed dimension of the table.
    fn is_split(&self, cx: &Local<'_>) -> bool {
        self.lookup.is_some_and(|(_, factor)| !cx.factor_axes[factor as usize].is_empty())
    }

    /// `indices` relative to this device's part of a table of shape `table`. Unchanged if the table is not split.
    pub(crate) fn local_indices(&self, cx: &mut Local<'_>, indices: ValueId, table: &[u64], clamp: bool) -> ValueId {
        let Some((dim, factor)) = self.lookup.filter(|_| self.is_split(cx)) else { return indices };
        let axes = cx.factor_axes[factor as usize].clone();
        let local = table[dim] / cx.mesh.product(&axes);
        local_indices(cx, indices, &axes, local, table[dim], clamp)
    }
}

/// Indices relative to this device's part of a table split over `axes`. Clamping needs global indices, so it comes
/// first. Indices into other parts then fall outside.
pub(super) fn local_indices(
    cx: &mut Local<'_>,
    indices: ValueId,
    axes: &[AxisId],
    local: u64,
    global: u64,
    clamp: bool,
) -> ValueId {
    let mut index = indices;
    if greatest(cx.graph.ty(index).dtype) < global as f64 {
        // Offsets into the table do not fit the element type, such as `i8` indices into 300 rows.
        index = cx.graph.convert(index, if global <= i32::MAX as u64 { DType::I32 } else { DType::I64 });
    }
    let ty = cx.graph.ty(index).clone();
    if clamp {
        index = clamp_indices(cx.graph, index, &[global - 1], ty.rank());
    }
    let offset = cx.shard_offset(axes, local, ty.dtype);
    let offset = cx.graph.broadcast_scalar(offset, &ty.shape);
    cx.graph.sub(index, offset)
}

/// The largest value of an integer type.
pub(super) fn greatest(dtype: DType) -> f64 {
    Reducer::Min.neutral(dtype)
}

/// Clamps component `i` of each index vector to `0..=last[i]`, unless the element type does not reach beyond it.
fn clamp_indices(graph: &mut Graph, indices: ValueId, last: &[u64], index_vector_dim: usize) -> ValueId {
    let ty = graph.ty(indices).clone();
    let zero = graph.splat_like(indices, 0.0);
    let last: Vec<f64> = last.iter().map(|&l| (l as f64).min(greatest(ty.dtype))).collect();
    let last = match last.as_slice() {
        [] => return indices,
        [only] => graph.splat_like(indices, *only),
        _ => {
            let vector = TensorType::new(ty.dtype, [last.len() as u64]);
            let vector = graph.constant(Literal::dense(vector, last));
            graph.broadcast(vector, &ty.shape, &[index_vector_dim])
        }
    };
    let above = graph.emit(Op::Binary(Binary::Maximum), &[indices, zero]);
    graph.emit(Op::Binary(Binary::Minimum), &[above, last])
}

impl Operator for Gather {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        if !operands[1].dtype.is_integer() {
            return Err(ShapeError::DType { dtype: operands[1].dtype });
        }
        Ok(operands[0].with_shape(self.dims.check(&operands[0].shape, &operands[1].shape)?))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let parts = self.dims.rule(&operands[0].shape, &operands[1].shape, result.rank(), None);
        let linear = if result.dtype.is_float() { vec![vec![0]] } else { Vec::new() };
        ShardingRule { operands: vec![parts.operand, parts.indices], result: parts.result, linear, ..parts.rule }
    }

    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::Gather(Gather { dims: self.dims.resized(result), out_of_bounds: self.out_of_bounds })
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let [table, indices] = [0, 1].map(|i| cx.operand_types[i].shape.clone());
        let parts = self.dims.rule(&table, &indices, cx.result_shape.len(), None);
        let mut operands = cx.operands.clone();
        let clamp = self.out_of_bounds == OutOfBounds::Clamp;
        operands[1] = parts.local_indices(cx, operands[1], &table, clamp);
        let out_of_bounds = if parts.is_split(cx) { OutOfBounds::Zero } else { self.out_of_bounds };
        let dims = self.dims.resized(&cx.result_shape);
        let gather = Gather { dims, out_of_bounds };
        match cx.fused_loss {
            true => looked_up(cx.graph, &gather, operands[0], operands[1]),
            false => cx.graph.emit(Op::Gather(gather), &operands),
        }
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let shape = cx.graph.shape(cx.operands[0]).to_vec();
        let mut indices = cx.operands[1];
        // The scatter drops what the gather clamped, so clamp its indices too.
        if self.out_of_bounds == OutOfBounds::Clamp {
            let last = self.dims.last_starts(&shape);
            indices = clamp_indices(cx.graph, indices, &last, self.dims.index_vector_dim);
        }
        let once = once_a_row(&self.dims, &shape, cx.graph.shape(indices));
        if let Some(dim) = once.filter(|_| cx.fused_loss) {
            return vec![Some(placed(cx.graph, &self.dims, dim, &shape, indices, cx.cotangent)), None];
        }
        let scatter = ScatterAdd { dims: self.dims.clone(), shape };
        vec![Some(cx.graph.emit(Op::ScatterAdd(scatter), &[indices, cx.cotangent])), None]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let clamp = self.out_of_bounds == OutOfBounds::Clamp;
        let mut data = Vec::with_capacity(result.elements() as usize);
        self.dims.for_each(operands[1], operands[0].shape(), &result.shape, clamp, |_, source| {
            data.push(source.map_or(0.0, |s| operands[0].at(s)));
        });
        Tensor::new(result.clone(), data)
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for ScatterAdd {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        if !operands[0].dtype.is_integer() {
            return Err(ShapeError::DType { dtype: operands[0].dtype });
        }
        let updates = self.dims.check(&self.shape, &operands[0].shape)?;
        if updates != operands[1].shape {
            return Err(ShapeError::ShapesDiffer { left: updates, right: operands[1].shape.clone() });
        }
        Ok(operands[1].with_shape(self.shape.clone()))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        let kind = Some(FactorKind::Reduction(Reducer::Sum));
        let parts = self.dims.rule(&self.shape, &operands[0].shape, operands[1].rank(), kind);
        let linear = vec![vec![1]];
        ShardingRule { operands: vec![parts.indices, parts.result], result: parts.operand, linear, ..parts.rule }
    }

    fn resized(&self, operands: &[&[u64]], result: &[u64]) -> Op {
        Op::ScatterAdd(ScatterAdd { dims: self.dims.resized(operands[1]), shape: result.to_vec() })
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let [indices, updates] = [0, 1].map(|i| cx.operand_types[i].shape.clone());
        let kind = Some(FactorKind::Reduction(Reducer::Sum));
        let parts = self.dims.rule(&self.shape, &indices, updates.len(), kind);
        let mut operands = cx.operands.clone();
        operands[0] = parts.local_indices(cx, operands[0], &self.shape, false);
        let dims = self.dims.resized(cx.graph.shape(operands[1]));
        cx.graph.emit(Op::ScatterAdd(ScatterAdd { dims, shape: cx.result_shape.clone() }), &operands)
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let gather = Gather { dims: self.dims.clone(), out_of_bounds: OutOfBounds::Zero };
        vec![None, Some(cx.graph.emit(Op::Gather(gather), &[cx.cotangent, cx.operands[0]]))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut sum = Tensor::splat(result.clone(), 0.0);
        let updates = operands[1];
        self.dims.for_each(operands[0], &self.shape, updates.shape(), false, |index, target| {
            if let Some(target) = target {
                let at = sum.offset(target);
                sum.data[at] = Binary::Add.apply(sum.data[at], updates.at(index), result.dtype);
            }
        });
        sum
    }

    fn flop(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        operands[1].elements()
    }
}
