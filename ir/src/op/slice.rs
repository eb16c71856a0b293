//! Slice: a rectangular part of a tensor, with a stride.

use super::*;
use crate::rule::FactorKind;

/// Elements `start[i], start[i] + stride[i], ..` below `limit[i]` of each dimension.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    pub start: Vec<u64>,
    pub limit: Vec<u64>,
    pub stride: Vec<u64>,
}

impl Slice {
    /// Returns true if dimension `dim` of size `size` is cut into equal blocks and one of them is kept.
    fn is_block(&self, dim: usize, size: u64) -> bool {
        let length = self.limit[dim] - self.start[dim];
        let aligned = |n: u64| n.is_multiple_of(length);
        self.stride[dim] == 1 && length > 0 && aligned(size) && aligned(self.start[dim])
    }
}

impl Operator for Slice {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        let rank = operands[0].rank();
        if self.start.len() != rank || self.limit.len() != rank || self.stride.len() != rank {
            return Err(ShapeError::Attribute("start, limit and stride must have an entry for each dimension"));
        }
        let mut shape = Vec::with_capacity(rank);
        for d in 0..rank {
            if self.start[d] > self.limit[d] || self.limit[d] > operands[0].shape[d] || self.stride[d] == 0 {
                return Err(ShapeError::Attribute("start <= limit <= size and stride >= 1 must hold"));
            }
            shape.push((self.limit[d] - self.start[d]).div_ceil(self.stride[d]));
        }
        Ok(operands[0].with_shape(shape))
    }

    /// A dimension cut into `k` equal blocks is `{k, length}` with `length` parallel, as in fused q/k/v.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![0]], ..Default::default() };
        let mut dims = Vec::new();
        for (d, &size) in operands[0].shape.iter().enumerate() {
            if self.is_block(d, size) {
                let length = result.shape[d];
                let block = rule.factor(size / length, FactorKind::Whole);
                let within = rule.factor(length, FactorKind::Parallel);
                dims.push(if size == length { vec![within] } else { vec![block, within] });
                rule.result.push(vec![within]);
            } else {
                dims.push(vec![rule.factor(size, FactorKind::Whole)]);
                let kept = rule.factor(result.shape[d], FactorKind::Whole);
                rule.result.push(vec![kept]);
            }
        }
        rule.operands = vec![dims];
        rule
    }

    fn resized(&self, operands: &[&[u64]], result: &[u64]) -> Op {
        let mut slice = self.clone();
        for (d, (&kept, &size)) in result.iter().zip(operands[0]).enumerate() {
            let length = self.limit[d] - self.start[d];
            if length == 0 || kept == 0 {
                continue;
            }
            if self.stride[d] != 1 {
                if kept != length.div_ceil(self.stride[d]) {
                    slice.limit[d] = self.start[d] + (kept - 1) * self.stride[d] + 1;
                }
                continue;
            }
            // Take the same block if blocks have another length. Otherwise keep the start, as far as the size allows.
            let block = self.start[d].is_multiple_of(length);
            let start = if block { self.start[d] / length * kept } else { self.start[d] };
            slice.start[d] = start.min(size.saturating_sub(kept));
            slice.limit[d] = slice.start[d] + kept;
        }
        Op::Slice(slice)
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let size = cx.graph.shape(cx.operands[0]).to_vec();
        let kept = cx.graph.shape(cx.result).to_vec();
        let dtype = cx.graph.ty(cx.cotangent).dtype;
        let high = |d: usize| {
            let used = if kept[d] == 0 { self.start[d] } else { self.start[d] + (kept[d] - 1) * self.stride[d] + 1 };
            (size[d] - used) as i64
        };
        let pad = Pad {
            low: self.start.iter().map(|&s| s as i64).collect(),
            high: (0..size.len()).map(high).collect(),
            // If only one element is kept, the stride has no effect.
            interior: (0..size.len()).map(|d| if kept[d] > 1 { self.stride[d] - 1 } else { 0 }).collect(),
        };
        let zero = cx.graph.constant(Literal::splat(TensorType::scalar(dtype), 0.0));
        vec![Some(cx.graph.emit(Op::Pad(pad), &[cx.cotangent, zero]))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut source = vec![0; self.start.len()];
        Tensor::from_fn(result.clone(), |index| {
            for (d, &i) in index.iter().enumerate() {
                source[d] = self.start[d] + i * self.stride[d];
            }
            operands[0].at(&source)
        })
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
