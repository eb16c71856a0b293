//! Roll: shifts elements along a dimension. Those that leave it at one end come back at the other.
//!
//! If each device has one block of the dimension, a roll by one is a round of a ring: each device gets its neighbour's
//! block. A device computes a roll from its own blocks and the result of a [`Collective::Shift`], so local graphs
//! contain no roll.

use super::*;

/// Element `i` of the `n` in dimension `dim` is element `(i + by) mod n` of the operand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roll {
    pub dim: usize,
    pub by: u64,
}

impl Roll {
    /// Elements `start..limit` of the rolled dimension.
    fn part(&self, graph: &mut Graph, x: ValueId, start: u64, limit: u64) -> ValueId {
        let shape = graph.shape(x).to_vec();
        if limit - start == shape[self.dim] {
            return x;
        }
        let mut slice = Slice { start: vec![0; shape.len()], limit: shape.clone(), stride: vec![1; shape.len()] };
        (slice.start[self.dim], slice.limit[self.dim]) = (start, limit);
        graph.emit(Op::Slice(slice), &[x])
    }
}

impl Operator for Roll {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        expect_dims(&[self.dim], operands[0].rank())?;
        Ok(operands[0].clone())
    }

    /// Splits the dimension into contiguous blocks. Neighbours then exchange some of them.
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule::elementwise(&result.shape, 1, vec![vec![0]]);
        rule.contiguous.push(self.dim as u8);
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Roll(self.clone())
    }

    /// Let `m` be the number of elements per device. The elements from `by mod m` on come from the device `by / m`
    /// places after it, and the others from the next one.
    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let axes = &cx.factor_axes[self.dim];
        let (parts, own) = (cx.mesh.product(axes), cx.result_shape[self.dim]);
        let x = cx.operands[0];
        let by = self.by % (own * parts).max(1);
        let (device, first) = (by / own.max(1), by % own.max(1));
        let shifted = |graph: &mut Graph, x: ValueId, by: u64| match by % parts {
            0 => x,
            by => graph.emit(Op::collective(Collective::Shift { axes: axes.clone(), by }, cx.mesh), &[x]),
        };
        let end = self.part(cx.graph, x, first, own);
        let end = shifted(cx.graph, end, device);
        if first == 0 {
            return end;
        }
        let begin = self.part(cx.graph, x, 0, first);
        let begin = shifted(cx.graph, begin, device + 1);
        cx.graph.emit(Op::Concatenate(Concatenate { dim: self.dim }), &[end, begin])
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let size = cx.graph.shape(cx.operands[0])[self.dim].max(1);
        let back = Roll { dim: self.dim, by: (size - self.by % size) % size };
        vec![Some(cx.graph.emit(Op::Roll(back), &[cx.cotangent]))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut source = Vec::new();
        Tensor::from_fn(result.clone(), |index| {
            source.clear();
            source.extend_from_slice(index);
            let size = result.shape[self.dim];
            source[self.dim] = (index[self.dim] + self.by % size) % size;
            operands[0].at(&source)
        })
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}
