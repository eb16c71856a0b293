//! Cumulative: running sums, products and extrema along a dimension.

use super::elementwise::Running;
use super::product::Factors;
use super::*;

/// Element `i` of the result combines elements `0..=i` of the operand along `dim`, or elements `i..` with `reverse`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cumulative {
    pub reducer: Reducer,
    pub dim: usize,
    pub reverse: bool,
}

impl Operator for Cumulative {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        expect_dims(&[self.dim], operands[0].rank())?;
        let dtype = operands[0].dtype;
        if matches!(self.reducer, Reducer::And | Reducer::Or) && dtype.is_float() {
            return Err(ShapeError::DType { dtype });
        }
        Ok(operands[0].clone())
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = if self.reducer == Reducer::Sum { vec![vec![0]] } else { Vec::new() };
        rule_along(&result.shape, 1, &[self.dim], linear)
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Cumulative(*self)
    }

    /// The cotangent of a running extremum goes to the element that it was taken from, the latest of equal ones. That
    /// of a running product is divided by the element. If the element is zero, the product of the others is computed
    /// instead.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (x, y, g) = (cx.operands[0], cx.result, cx.cotangent);
        let graph = &mut *cx.graph;
        let back = Op::Cumulative(Cumulative { reducer: Reducer::Sum, reverse: !self.reverse, ..*self });
        let dx = match self.reducer {
            _ if graph.ty(x).elements() == 0 => g,
            Reducer::Sum => graph.emit(back, &[g]),
            Reducer::Product => {
                let factors = Factors::new(graph, x);
                let products = graph.emit(Op::Cumulative(*self), &[factors.others]);
                let sum = Op::Cumulative(Cumulative { reducer: Reducer::Sum, ..*self });
                let zeros = graph.emit(sum, &[factors.zeros]);
                factors.cotangent(graph, g, products, zeros, |graph, g| graph.emit(back.clone(), &[g]))
            }
            Reducer::Max | Reducer::Min => {
                let taken = self.taken_from(graph, x, y);
                let shape = graph.shape(x).to_vec();
                let others: Vec<usize> = (0..shape.len()).filter(|&d| d != self.dim).collect();
                let dims = GatherDims {
                    offset_dims: Vec::new(),
                    collapsed_slice_dims: vec![self.dim],
                    operand_batching_dims: others.clone(),
                    indices_batching_dims: others,
                    start_index_map: vec![self.dim],
                    index_vector_dim: shape.len(),
                    slice_sizes: vec![1; shape.len()],
                };
                graph.emit(Op::ScatterAdd(ScatterAdd { dims, shape }), &[taken, g])
            }
            Reducer::And | Reducer::Or => return vec![None],
        };
        vec![Some(dx)]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut all = operands[0].clone();
        for_each_line(&result.shape, self.dim, |line| {
            let mut running = Running::new(self.reducer, result.dtype);
            let mut step = |&at: &usize| {
                running.add(all.data[at]);
                all.data[at] = running.value();
            };
            match self.reverse {
                false => line.iter().for_each(&mut step),
                true => line.iter().rev().for_each(&mut step),
            }
        });
        all
    }
}

impl Cumulative {
    /// For each element of a running extremum `y` of `x`, the position along the dimension that it was taken from. It
    /// is the latest position so far whose element equals the extremum.
    fn taken_from(&self, graph: &mut Graph, x: ValueId, y: ValueId) -> ValueId {
        let ty = graph.ty(x).with_dtype(DType::I32);
        let (latest, never) = match self.reverse {
            false => (Reducer::Max, 0.0),
            true => (Reducer::Min, ty.shape[self.dim] as f64 - 1.0),
        };
        let here = graph.compare(Direction::Eq, x, y);
        let position = graph.emit(Op::Iota(Iota { ty, dim: self.dim }), &[]);
        let never = graph.splat_like(position, never);
        let candidates = graph.select(here, position, never);
        graph.emit(Op::Cumulative(Cumulative { reducer: latest, ..*self }), &[candidates])
    }
}
