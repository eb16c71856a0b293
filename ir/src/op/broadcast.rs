//! Broadcast: repeats a tensor along new dimensions and along dimensions of size 1.

use super::lookup::sum_of_placed;
use super::*;
use crate::rule::FactorKind;

/// Dimension `i` of the operand becomes dimension `dims[i]` of the result. It must have the result's size or size 1.
/// The operand repeats along all other dimensions of the result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BroadcastInDim {
    pub shape: Vec<u64>,
    pub dims: Vec<usize>,
}

impl Operator for BroadcastInDim {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        if self.dims.len() != operands[0].rank() {
            return Err(ShapeError::Attribute("dims must name one result dimension for each operand dimension"));
        }
        expect_dims(&self.dims, self.shape.len())?;
        for (&size, &dim) in operands[0].shape.iter().zip(&self.dims) {
            if size != 1 && size != self.shape[dim] {
                return Err(ShapeError::SizesDiffer { what: "broadcast", left: size, right: self.shape[dim] });
            }
        }
        Ok(operands[0].with_shape(self.shape.clone()))
    }

    /// Every result dimension is a factor. The operand has the factors along which it does not repeat.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![0]], ..Default::default() };
        rule.result = result.shape.iter().map(|&d| vec![rule.factor(d, FactorKind::Parallel)]).collect();
        let operand_dims = operands[0]
            .shape
            .iter()
            .zip(&self.dims)
            .map(|(&size, &dim)| if size == result.shape[dim] { rule.result[dim].clone() } else { Vec::new() });
        rule.operands = vec![operand_dims.collect()];
        rule
    }

    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::BroadcastInDim(BroadcastInDim { shape: result.to_vec(), dims: self.dims.clone() })
    }

    /// Sums over the repeated dimensions.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let operand = cx.graph.shape(cx.operands[0]).to_vec();
        let kept = |dim: usize| self.dims.iter().position(|&d| d == dim).is_some_and(|i| operand[i] == self.shape[dim]);
        let repeated: Vec<usize> = (0..self.shape.len()).filter(|&d| !kept(d)).collect();
        let sum = match sum_of_placed(cx.graph, cx.cotangent, &repeated) {
            Some(sum) => sum,
            None => cx.graph.reduce(cx.cotangent, Reducer::Sum, &repeated),
        };
        // The sum has the kept dimensions in the result's order, but dims need not be sorted.
        let left: Vec<usize> = (0..self.shape.len()).filter(|&d| kept(d)).collect();
        let wanted: Vec<usize> = self.dims.iter().copied().filter(|&d| kept(d)).collect();
        let permutation: Vec<usize> = wanted.iter().filter_map(|d| left.iter().position(|l| l == d)).collect();
        let sum = cx.graph.transpose(sum, &permutation);
        vec![Some(cx.graph.reshape(sum, &operand))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let from = operands[0];
        let mut source = vec![0; self.dims.len()];
        Tensor::from_fn(result.clone(), |index| {
            for (i, &dim) in self.dims.iter().enumerate() {
                source[i] = if from.shape()[i] == 1 { 0 } else { index[dim] };
            }
            from.at(&source)
        })
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
