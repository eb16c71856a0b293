//! Scatter: writes updates into a tensor at indexed places, or combines them with the elements there.
//!
//! Addition is not among the combinations. It is the tensor plus a [`ScatterAdd`], which starts from zeros and so may
//! be a partial sum.

use super::product::Factors;
use super::*;
use crate::rule::FactorKind;

/// Combines an update with the element at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// Keeps the update. Among several at one place, the last index vector wins, with `indices` in row-major order.
    Replace,
    Multiply,
    Minimum,
    Maximum,
}

impl Combine {
    pub const ALL: [Combine; 4] = [Combine::Replace, Combine::Multiply, Combine::Minimum, Combine::Maximum];

    pub fn name(self) -> &'static str {
        match self {
            Combine::Replace => "replace",
            Combine::Multiply => "multiply",
            Combine::Minimum => "minimum",
            Combine::Maximum => "maximum",
        }
    }

    /// The elementwise op of the element and the update. `None` if the update replaces it.
    pub fn binary(self) -> Option<Binary> {
        match self {
            Combine::Replace => None,
            Combine::Multiply => Some(Binary::Multiply),
            Combine::Minimum => Some(Binary::Minimum),
            Combine::Maximum => Some(Binary::Maximum),
        }
    }
}

/// `scatter(operand, indices, updates)`. Dimensions are described like those of [`ScatterAdd`]. Updates whose slice
/// does not lie inside are dropped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scatter {
    #[serde(flatten)]
    pub dims: GatherDims,
    pub combine: Combine,
}

impl Scatter {
    /// The effect of splitting the updates. An extremum may be taken over parts that each start from the operand. A
    /// product would count the operand once per part. Replacement needs all updates to find the last one.
    fn kind_of_updates(&self) -> FactorKind {
        match self.combine {
            Combine::Replace | Combine::Multiply => FactorKind::Whole,
            Combine::Minimum => FactorKind::Reduction(Reducer::Min),
            Combine::Maximum => FactorKind::Reduction(Reducer::Max),
        }
    }

    fn gather(&self, graph: &mut Graph, from: ValueId, indices: ValueId) -> ValueId {
        let gather = Gather { dims: self.dims.clone(), out_of_bounds: OutOfBounds::Zero };
        graph.emit(Op::Gather(gather), &[from, indices])
    }

    /// A boolean for each update, true if the result contains it. Each update writes its number, and those that read
    /// theirs back are kept.
    fn kept(&self, graph: &mut Graph, operand: ValueId, indices: ValueId, updates: ValueId) -> ValueId {
        let shape = graph.shape(updates).to_vec();
        let count = graph.ty(updates).elements();
        let dtype = if count <= i32::MAX as u64 { DType::I32 } else { DType::I64 };
        let numbers = graph.emit(Op::Iota(Iota { ty: TensorType::new(dtype, [count]), dim: 0 }), &[]);
        let numbers = graph.reshape(numbers, &shape);
        let none = Literal::splat(graph.ty(operand).with_dtype(dtype), -1.0);
        let none = graph.constant(none);
        let replace = Scatter { combine: Combine::Replace, ..self.clone() };
        let written = graph.emit(Op::Scatter(replace), &[none, indices, numbers]);
        let found = self.gather(graph, written, indices);
        graph.compare(Direction::Eq, found, numbers)
    }
}

impl Operator for Scatter {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 3)?;
        if !operands[1].dtype.is_integer() {
            return Err(ShapeError::DType { dtype: operands[1].dtype });
        }
        if operands[0].dtype != operands[2].dtype {
            return Err(ShapeError::DTypesDiffer { left: operands[0].dtype, right: operands[2].dtype });
        }
        let updates = self.dims.check(&operands[0].shape, &operands[1].shape)?;
        if updates != operands[2].shape {
            return Err(ShapeError::ShapesDiffer { left: updates, right: operands[2].shape.clone() });
        }
        Ok(operands[0].clone())
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let kind = Some(self.kind_of_updates());
        let parts = self.dims.rule(&operands[0].shape, &operands[1].shape, operands[2].rank(), kind);
        let linear = match self.combine {
            _ if !result.dtype.is_float() => Vec::new(),
            Combine::Replace => vec![vec![0, 2]],
            Combine::Multiply => vec![vec![0]],
            Combine::Minimum | Combine::Maximum => Vec::new(),
        };
        let operands = vec![parts.operand.clone(), parts.indices, parts.result];
        ShardingRule { operands, result: parts.operand, linear, ..parts.rule }
    }

    fn resized(&self, operands: &[&[u64]], _: &[u64]) -> Op {
        Op::Scatter(Scatter { dims: self.dims.resized(operands[2]), combine: self.combine })
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let [table, indices, updates] = [0, 1, 2].map(|i| cx.operand_types[i].shape.clone());
        let parts = self.dims.rule(&table, &indices, updates.len(), Some(self.kind_of_updates()));
        let mut operands = cx.operands.clone();
        operands[1] = parts.local_indices(cx, operands[1], &table, false);
        let dims = self.dims.resized(cx.graph.shape(operands[2]));
        cx.graph.emit(Op::Scatter(Scatter { dims, combine: self.combine }), &operands)
    }

    /// An update that is dropped, or that a later one replaces, does not affect the result and gets zero. Equal extrema
    /// share the cotangent, as in JAX. The cotangent of a factor is divided by it. If the factor is zero, the product
    /// of the others is computed instead.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let [x, indices, updates] = [0, 1, 2].map(|i| cx.operands[i]);
        let (y, g, wanted) = (cx.result, cx.cotangent, cx.wanted);
        let graph = &mut *cx.graph;
        let (dx, du) = match self.combine {
            Combine::Replace => {
                let dx = wanted[0].then(|| {
                    let zeros = graph.splat_like(updates, 0.0);
                    graph.emit(Op::Scatter(self.clone()), &[g, indices, zeros])
                });
                let du = wanted[2].then(|| {
                    let kept = self.kept(graph, x, indices, updates);
                    let there = self.gather(graph, g, indices);
                    let zeros = graph.splat_like(there, 0.0);
                    graph.select(kept, there, zeros)
                });
                (dx, du)
            }
            Combine::Multiply => {
                let dx = wanted[0].then(|| {
                    let ones = graph.splat_like(x, 1.0);
                    let factors = graph.emit(Op::Scatter(self.clone()), &[ones, indices, updates]);
                    graph.mul(g, factors)
                });
                let du = wanted[2].then(|| {
                    let (operand, factors) = (Factors::new(graph, x), Factors::new(graph, updates));
                    let scatter = Op::Scatter(self.clone());
                    let products = graph.emit(scatter, &[operand.others, indices, factors.others]);
                    let add = ScatterAdd { dims: self.dims.clone(), shape: graph.shape(x).to_vec() };
                    let zeros = graph.emit(Op::ScatterAdd(add), &[indices, factors.zeros]);
                    let zeros = graph.add(zeros, operand.zeros);
                    factors.cotangent(graph, g, products, zeros, |graph, g| self.gather(graph, g, indices))
                });
                (dx, du)
            }
            Combine::Minimum | Combine::Maximum => {
                let dtype = graph.ty(x).dtype;
                let extremum = self.gather(graph, y, indices);
                let is_update = graph.compare(Direction::Eq, updates, extremum);
                let is_update = graph.convert(is_update, dtype);
                let is_operand = graph.compare(Direction::Eq, x, y);
                let is_operand = graph.convert(is_operand, dtype);
                let add = ScatterAdd { dims: self.dims.clone(), shape: graph.shape(x).to_vec() };
                let count = graph.emit(Op::ScatterAdd(add), &[indices, is_update]);
                let count = graph.add(is_operand, count);
                let share = graph.div(g, count);
                let dx = wanted[0].then(|| graph.mul(share, is_operand));
                let du = wanted[2].then(|| {
                    let there = self.gather(graph, share, indices);
                    graph.mul(there, is_update)
                });
                (dx, du)
            }
        };
        vec![dx, None, du]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut all = operands[0].clone();
        let updates = operands[2];
        let over_indices = self.dims.batch_dims(updates.ty.rank());
        let mut kept: Vec<(Vec<u64>, usize, f64)> = Vec::new();
        self.dims.for_each(operands[1], &result.shape, updates.shape(), false, |index, target| {
            let vector = over_indices.iter().map(|&d| index[d]).collect();
            kept.extend(target.map(|target| (vector, all.offset(target), updates.at(index))));
        });
        // Apply one window after the other, wherever its dimensions are among those of the updates.
        kept.sort_by(|a, b| a.0.cmp(&b.0));
        for (_, at, update) in kept {
            let combined = self.combine.binary().map(|op| op.apply(all.data[at], update, result.dtype));
            all.data[at] = combined.unwrap_or(update);
        }
        all
    }

    fn flop(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        if self.combine == Combine::Replace { 0 } else { operands[2].elements() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two windows of two elements overlap by one. The second index vector wins, although its first element precedes
    /// the other window's last one in row-major order of the updates.
    #[test]
    fn the_last_window_is_on_top() {
        let dims = GatherDims {
            offset_dims: vec![0],
            collapsed_slice_dims: vec![],
            operand_batching_dims: vec![],
            indices_batching_dims: vec![],
            start_index_map: vec![0],
            index_vector_dim: 1,
            slice_sizes: vec![2],
        };
        let tensor = |dtype, shape: &[u64], data: &[f64]| Tensor::new(TensorType::new(dtype, shape), data.to_vec());
        let operand = tensor(DType::F32, &[4], &[0.0; 4]);
        let indices = tensor(DType::I32, &[2], &[0.0, 1.0]);
        let updates = tensor(DType::F32, &[2, 2], &[1.0, 3.0, 2.0, 4.0]);
        let op = Scatter { dims, combine: Combine::Replace };
        let found = op.eval(&[&operand, &indices, &updates], &operand.ty);
        assert_eq!(found.data, [1.0, 3.0, 4.0, 0.0]);
    }
}
