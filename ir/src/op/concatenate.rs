//! Concatenate: joins tensors along one dimension.

use super::*;
use crate::rule::FactorKind;

/// Joins the operands along `dim`. All other dimensions must agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Concatenate {
    pub dim: usize,
}

/// The largest number of pieces of unequal size. Each takes a factor of the rule, which has at most 256.
const MAX_UNEQUAL_PIECES: usize = 200;

impl Operator for Concatenate {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        let Some(first) = operands.first() else {
            return Err(ShapeError::OperandCount { expected: 1, found: 0 });
        };
        expect_dims(&[self.dim], first.rank())?;
        let equal = operands.iter().all(|o| o.shape.get(self.dim) == first.shape.get(self.dim));
        if !equal && operands.len() > MAX_UNEQUAL_PIECES {
            return Err(ShapeError::Attribute("joins at most 200 tensors of different sizes at once; join in steps"));
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for operand in operands {
            if operand.dtype != first.dtype {
                return Err(ShapeError::DTypesDiffer { left: first.dtype, right: operand.dtype });
            }
            let fits = operand.rank() == first.rank()
                && (0..first.rank()).all(|d| d == self.dim || operand.shape[d] == first.shape[d]);
            if !fits {
                return Err(ShapeError::ShapesDiffer { left: first.shape.clone(), right: operand.shape.clone() });
            }
            shape[self.dim] = shape[self.dim].saturating_add(operand.shape[self.dim]);
        }
        Ok(first.with_shape(shape))
    }

    /// Pieces of equal size `n` join to `{number of pieces, n}` with `n` parallel. Pieces of unequal size stay whole.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        // A rule's sets number operands by `u8`. With more operands, partial sums do not pass.
        let linear = u8::try_from(operands.len()).map(|n| vec![(0..n).collect()]).unwrap_or_default();
        let mut rule = ShardingRule { linear, ..Default::default() };
        rule.operands = vec![Vec::new(); operands.len()];
        for (d, &size) in result.shape.iter().enumerate() {
            if d != self.dim {
                let f = rule.factor(size, FactorKind::Parallel);
                rule.operands.iter_mut().for_each(|dims| dims.push(vec![f]));
                rule.result.push(vec![f]);
                continue;
            }
            let piece = operands[0].shape[d];
            if operands.iter().all(|o| o.shape[d] == piece) {
                let which = rule.factor(operands.len() as u64, FactorKind::Whole);
                let within = rule.factor(piece, FactorKind::Parallel);
                rule.operands.iter_mut().for_each(|dims| dims.push(vec![within]));
                rule.result.push(vec![which, within]);
            } else {
                let pieces: Vec<u8> = operands.iter().map(|o| rule.factor(o.shape[d], FactorKind::Whole)).collect();
                rule.operands.iter_mut().zip(pieces).for_each(|(dims, f)| dims.push(vec![f]));
                let all = rule.factor(size, FactorKind::Whole);
                rule.result.push(vec![all]);
            }
        }
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Concatenate(self.clone())
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let shape = cx.graph.shape(cx.cotangent).to_vec();
        let mut at = 0;
        let mut parts = Vec::new();
        for (&operand, &wanted) in cx.operands.iter().zip(cx.wanted) {
            let size = cx.graph.shape(operand)[self.dim];
            parts.push(wanted.then(|| {
                let mut slice =
                    Slice { start: vec![0; shape.len()], limit: shape.clone(), stride: vec![1; shape.len()] };
                slice.start[self.dim] = at;
                slice.limit[self.dim] = at + size;
                cx.graph.emit(Op::Slice(slice), &[cx.cotangent])
            }));
            at += size;
        }
        parts
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let pieces: Vec<&[f64]> = operands.iter().map(|o| &o.data[..]).filter(|data| !data.is_empty()).collect();
        if pieces.is_empty() {
            return Tensor::splat(result.clone(), f64::NAN);
        }
        let outer = result.shape[..self.dim].iter().product::<u64>() as usize;
        let mut data = Vec::with_capacity(result.elements() as usize);
        for at in 0..outer {
            for piece in &pieces {
                let block = piece.len() / outer;
                data.extend_from_slice(&piece[at * block..(at + 1) * block]);
            }
        }
        Tensor::new(result.clone(), data)
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
