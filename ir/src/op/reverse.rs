//! Reverse: reverses the order of elements along dimensions.

use super::*;

/// The elements in opposite order along each of `dims`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reverse {
    pub dims: Vec<usize>,
}

impl Operator for Reverse {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        expect_dims(&self.dims, operands[0].rank())?;
        Ok(operands[0].clone())
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        rule_along(&result.shape, 1, &self.dims, vec![vec![0]])
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Reverse(self.clone())
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![Some(cx.graph.emit(Op::Reverse(self.clone()), &[cx.cotangent]))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut source = Vec::new();
        Tensor::from_fn(result.clone(), |index| {
            source.clear();
            source.extend_from_slice(index);
            for &d in &self.dims {
                source[d] = result.shape[d] - 1 - index[d];
            }
            operands[0].at(&source)
        })
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
