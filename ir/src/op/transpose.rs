//! Transpose: permutes dimensions.

use super::*;
use crate::rule::FactorKind;

/// Dimension `i` of the result is dimension `permutation[i]` of the operand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transpose {
    pub permutation: Vec<usize>,
}

impl Operator for Transpose {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        if self.permutation.len() != operands[0].rank() {
            return Err(ShapeError::Attribute("the permutation must name each dimension once"));
        }
        expect_dims(&self.permutation, operands[0].rank())?;
        let shape: Vec<u64> = self.permutation.iter().map(|&d| operands[0].shape[d]).collect();
        Ok(operands[0].with_shape(shape))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![0]], ..Default::default() };
        let dims: Vec<Vec<u8>> =
            operands[0].shape.iter().map(|&d| vec![rule.factor(d, FactorKind::Parallel)]).collect();
        rule.result = self.permutation.iter().map(|&d| dims[d].clone()).collect();
        rule.operands = vec![dims];
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Transpose(self.clone())
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let mut inverse = vec![0; self.permutation.len()];
        for (i, &d) in self.permutation.iter().enumerate() {
            inverse[d] = i;
        }
        vec![Some(cx.graph.transpose(cx.cotangent, &inverse))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut source = vec![0; self.permutation.len()];
        Tensor::from_fn(result.clone(), |index| {
            for (i, &d) in self.permutation.iter().enumerate() {
                source[d] = index[i];
            }
            operands[0].at(&source)
        })
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
