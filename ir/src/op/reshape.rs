//! Reshape: the same elements in row-major order under another shape.

use super::*;
use crate::rule::FactorKind;

/// Gives the operand a shape with the same number of elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reshape {
    pub shape: Vec<u64>,
}

impl Operator for Reshape {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        let result = operands[0].with_shape(self.shape.clone());
        if !result.check() {
            return Err(ShapeError::TooLarge { shape: self.shape.clone() });
        }
        if result.elements() != operands[0].elements() {
            return Err(ShapeError::SizesDiffer {
                what: "number of elements",
                left: operands[0].elements(),
                right: result.elements(),
            });
        }
        Ok(result)
    }

    /// Cuts both shapes at all boundaries that they share. Within a run of dimensions between two such boundaries, it
    /// cuts at every boundary of either side that divides the others. A run without a common refinement (`[4,6]` to
    /// `[6,4]`) is split along its major common factor only.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![0]], ..Default::default() };
        let (from, to) = (&operands[0].shape, &result.shape);
        rule.operands = vec![vec![Vec::new(); from.len()]];
        rule.result = vec![Vec::new(); to.len()];
        if result.elements() == 0 {
            let mut whole = |dims: &[u64]| -> Vec<Vec<u8>> {
                dims.iter().map(|&d| vec![rule.factor(d, FactorKind::Whole)]).collect()
            };
            let (a, b) = (whole(from), whole(to));
            rule.operands = vec![a];
            rule.result = b;
            return rule;
        }
        // Walk both shapes from the major side. `a` and `b` are the remaining sizes of the current dimensions.
        let (mut i, mut j) = (0, 0);
        let (mut a, mut b) = (1u64, 1u64);
        loop {
            while a == 1 && i < from.len() {
                a = from[i];
                i += 1;
            }
            while b == 1 && j < to.len() {
                b = to[j];
                j += 1;
            }
            if a == 1 || b == 1 {
                return rule;
            }
            let common = gcd(a, b);
            if common == a || common == b {
                let f = rule.factor(common, FactorKind::Parallel);
                rule.operands[0][i - 1].push(f);
                rule.result[j - 1].push(f);
                a /= common;
                b /= common;
                continue;
            }
            // Neither dimension divides the other. Their major common factor is a factor, the rest is opaque.
            if common > 1 {
                let f = rule.factor(common, FactorKind::Parallel);
                rule.operands[0][i - 1].push(f);
                rule.result[j - 1].push(f);
                a /= common;
                b /= common;
            }
            // Take whole dimensions on both sides until the products meet again.
            let f = rule.factor(a, FactorKind::Whole);
            rule.operands[0][i - 1].push(f);
            let f = rule.factor(b, FactorKind::Whole);
            rule.result[j - 1].push(f);
            let (mut left, mut right) = (a as u128, b as u128);
            while left != right {
                if left < right && i < from.len() {
                    left *= from[i] as u128;
                    let f = rule.factor(from[i], FactorKind::Whole);
                    rule.operands[0][i].push(f);
                    i += 1;
                } else if j < to.len() {
                    right *= to[j] as u128;
                    let f = rule.factor(to[j], FactorKind::Whole);
                    rule.result[j].push(f);
                    j += 1;
                } else {
                    return rule;
                }
            }
            a = 1;
            b = 1;
        }
    }

    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::Reshape(Reshape { shape: result.to_vec() })
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        // A reshape that changes no shape is a barrier between kernels, in the backward pass too.
        let shape = cx.graph.shape(cx.operands[0]).to_vec();
        vec![Some(cx.graph.emit(Op::Reshape(Reshape { shape }), &[cx.cotangent]))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        Tensor::new(result.clone(), operands[0].data.clone())
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

/// The greatest common divisor.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
