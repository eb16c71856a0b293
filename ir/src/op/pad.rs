//! Pad: surrounds a tensor with a value, crops it, or spreads its elements apart.

use super::*;
use crate::rule::FactorKind;

/// Adds `low` and `high` copies of the second operand (a scalar) at either end of each dimension, and `interior` copies
/// between neighbours. Negative numbers remove elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pad {
    pub low: Vec<i64>,
    pub high: Vec<i64>,
    pub interior: Vec<u64>,
}

impl Pad {
    /// The number of the operand's block, if it is one of `total / size` equal blocks of the result in dimension `dim`.
    fn block(&self, dim: usize, size: u64, total: u64) -> Option<u64> {
        let low = self.low[dim];
        let fits = self.interior[dim] == 0 && low >= 0 && self.high[dim] >= 0 && size > 0;
        (fits && total.is_multiple_of(size) && (low as u64).is_multiple_of(size)).then(|| low as u64 / size)
    }
}

impl Operator for Pad {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        let rank = operands[0].rank();
        if self.low.len() != rank || self.high.len() != rank || self.interior.len() != rank {
            return Err(ShapeError::Attribute("low, high and interior must have an entry for each dimension"));
        }
        if operands[1].rank() != 0 {
            return Err(ShapeError::Attribute("the padding value must be a scalar"));
        }
        if operands[0].dtype != operands[1].dtype {
            return Err(ShapeError::DTypesDiffer { left: operands[0].dtype, right: operands[1].dtype });
        }
        let most = crate::types::MAX_ELEMENTS;
        let in_range = |d: usize| {
            self.low[d].unsigned_abs() <= most && self.high[d].unsigned_abs() <= most && self.interior[d] <= most
        };
        if !(0..rank).all(in_range) {
            return Err(ShapeError::Attribute("low, high and interior must be within the size of any tensor"));
        }
        let mut shape = Vec::with_capacity(rank);
        for d in 0..rank {
            let size = operands[0].shape[d] as i128;
            let between = (size - 1).max(0) * self.interior[d] as i128;
            let total = self.low[d] as i128 + size + between + self.high[d] as i128;
            let total = u64::try_from(total).map_err(|_| ShapeError::Attribute("padding leaves a negative size"))?;
            shape.push(total);
        }
        Ok(operands[0].with_shape(shape))
    }

    /// Padding with zeros is linear in the operand. Padded dimensions that are not equal blocks stay whole.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![0, 1]], ..Default::default() };
        let mut dims = Vec::new();
        for (d, &size) in operands[0].shape.iter().enumerate() {
            let total = result.shape[d];
            if self.block(d, size, total).is_some() {
                let block = rule.factor(total / size, FactorKind::Whole);
                let within = rule.factor(size, FactorKind::Parallel);
                dims.push(vec![within]);
                rule.result.push(if size == total { vec![within] } else { vec![block, within] });
            } else {
                let from = rule.factor(size, FactorKind::Whole);
                let to = rule.factor(total, FactorKind::Whole);
                dims.push(vec![from]);
                rule.result.push(vec![to]);
            }
        }
        rule.operands = vec![dims, Vec::new()];
        rule
    }

    fn resized(&self, operands: &[&[u64]], result: &[u64]) -> Op {
        let mut pad = self.clone();
        for d in 0..result.len() {
            let (size, total) = (operands[0][d], result[d]);
            let old_total = self.low[d] + self.high[d];
            if self.interior[d] == 0 && self.low[d] >= 0 && self.high[d] >= 0 && total != size + old_total as u64 {
                // Equal blocks of another length: keep the block number.
                let blocks = (total / size) as i64;
                let old_size = if blocks > 1 { old_total / (blocks - 1) } else { 1 };
                let number = if old_size == 0 { 0 } else { self.low[d] / old_size };
                pad.low[d] = number * size as i64;
                pad.high[d] = (total - size) as i64 - pad.low[d];
            }
        }
        Op::Pad(pad)
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let size = cx.graph.shape(cx.operands[0]).to_vec();
        let dtype = cx.graph.ty(cx.cotangent).dtype;
        let rank = size.len();
        // Undo the outer padding first (a negative pad crops), then drop the elements in between.
        let zero = cx.graph.constant(Literal::splat(TensorType::scalar(dtype), 0.0));
        let crop = Pad {
            low: self.low.iter().map(|l| -l).collect(),
            high: self.high.iter().map(|h| -h).collect(),
            interior: vec![0; rank],
        };
        let cropped = cx.graph.emit(Op::Pad(crop), &[cx.cotangent, zero]);
        let spread = cx.graph.shape(cropped).to_vec();
        let slice =
            Slice { start: vec![0; rank], limit: spread, stride: self.interior.iter().map(|i| i + 1).collect() };
        let inner = cx.graph.emit(Op::Slice(slice), &[cropped]);
        let value = cx.wanted[1].then(|| {
            let all: Vec<usize> = (0..rank).collect();
            let total = cx.graph.reduce(cx.cotangent, Reducer::Sum, &all);
            let inside = cx.graph.reduce(inner, Reducer::Sum, &all);
            cx.graph.sub(total, inside)
        });
        vec![Some(inner), value]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut padded = Tensor::splat(result.clone(), operands[1].data[0]);
        crate::tensor::for_each_index(operands[0].shape(), |index| {
            let mut target = Vec::with_capacity(index.len());
            for (d, &i) in index.iter().enumerate() {
                let at = self.low[d] + (i * (self.interior[d] + 1)) as i64;
                if at < 0 || at as u64 >= result.shape[d] {
                    return;
                }
                target.push(at as u64);
            }
            let offset = padded.offset(&target);
            padded.data[offset] = operands[0].at(index);
        });
        padded
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
