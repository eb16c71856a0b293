//! Ops over the microbatches of a step: a sum or a mean over all of them, and a multiple by their number.
//!
//! Some losses are divided by a count over the whole batch, such as the labels that are not ignored or the weights of a
//! mask. Such a loss is a sum of microbatch losses only if the count is that of the whole batch.
//! [`crate::batch::find_batch`] inserts these ops where a loss needs them.
//!
//! Lowering sums the operands of sums and means over all microbatches before the first forward pass, so an operand must
//! not depend on a parameter. On an undivided batch every op here is the identity, which is also its reference
//! semantics.

use super::*;

/// One value for all microbatches of a step, or a value times their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Microbatches {
    /// The sum of the operand over the step's microbatches.
    Sum,
    /// The mean of the operand over the step's microbatches.
    Mean,
    /// The operand times the number of microbatches in the step.
    Times,
}

impl Microbatches {
    #[cfg(test)]
    pub(crate) const ALL: [Microbatches; 3] = [Microbatches::Sum, Microbatches::Mean, Microbatches::Times];

    pub fn name(self) -> &'static str {
        match self {
            Microbatches::Sum => "sum_of_microbatches",
            Microbatches::Mean => "mean_of_microbatches",
            Microbatches::Times => "times_microbatches",
        }
    }

    /// Returns true if the value must be known for all microbatches before the first of them runs.
    pub fn is_total(self) -> bool {
        self != Microbatches::Times
    }
}

impl Operator for Microbatches {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        match operands[0].dtype {
            DType::Bool => Err(ShapeError::DType { dtype: DType::Bool }),
            _ => Ok(operands[0].clone()),
        }
    }

    /// Elementwise. A total needs complete values. A multiple of a partial sum is a partial sum.
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = if self.is_total() { Vec::new() } else { vec![vec![0]] };
        ShardingRule::elementwise(&result.shape, 1, linear)
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Microbatches(*self)
    }

    /// The operand, as on an undivided batch. Lowering knows the number of microbatches and emits the rest.
    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        cx.operands[0]
    }

    /// Totals depend on no parameter, so only a multiple passes its cotangent on.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let back = |cx: &mut Gradient<'_>| cx.graph.emit(Op::Microbatches(*self), &[cx.cotangent]);
        vec![(!self.is_total()).then(|| back(cx))]
    }

    fn eval(&self, operands: &[&Tensor], _: &TensorType) -> Tensor {
        operands[0].clone()
    }

    fn flop(&self, _: &[&TensorType], result: &TensorType) -> u64 {
        if self.is_total() { 0 } else { result.elements() }
    }
}
