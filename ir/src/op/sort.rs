//! Arg-sort: the order of elements along a dimension. Sorting several tensors together is an arg-sort and gathers.

use super::*;
use std::cmp::Ordering;

/// The stable permutation that sorts along `dim` by one or more keys of one shape, the most significant first. Place
/// `i` of the result holds the position of the element that comes `i`-th.
///
/// Floats are in total order, except that zeros are equal whatever their sign. Every NaN comes after infinity, so NaNs
/// are last if a key ascends and first if it descends. Equal elements keep their order either way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArgSort {
    pub dim: usize,
    /// For each key, true if its greatest element comes first.
    pub descending: Vec<bool>,
}

/// The order of two elements of an ascending key.
fn compare(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

impl Operator for ArgSort {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        if self.descending.is_empty() {
            return Err(ShapeError::Attribute("sorting needs at least one key"));
        }
        expect_operands(operands, self.descending.len())?;
        for other in &operands[1..] {
            if other.shape != operands[0].shape {
                return Err(ShapeError::ShapesDiffer { left: operands[0].shape.clone(), right: other.shape.clone() });
            }
        }
        expect_dims(&[self.dim], operands[0].rank())?;
        if operands[0].shape[self.dim] > i32::MAX as u64 {
            return Err(ShapeError::Attribute("positions in the sorted dimension must fit into an i32"));
        }
        Ok(operands[0].with_dtype(DType::I32))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        rule_along(&result.shape, operands.len(), &[self.dim], Vec::new())
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::ArgSort(self.clone())
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![None; cx.operands.len()]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let mut sorted = Tensor::splat(result.clone(), 0.0);
        for_each_line(&result.shape, self.dim, |line| {
            let mut order: Vec<usize> = (0..line.len()).collect();
            order.sort_by(|&a, &b| {
                let by_key = operands.iter().zip(&self.descending).map(|(key, &descending)| {
                    let order = compare(key.data[line[a]], key.data[line[b]]);
                    if descending { order.reverse() } else { order }
                });
                by_key.fold(Ordering::Equal, Ordering::then)
            });
            line.iter().zip(order).for_each(|(&to, from)| sorted.data[to] = from as f64);
        });
        sorted
    }

    /// Counts a comparison for each of the `log2(n)` merges of an element.
    fn flop(&self, _: &[&TensorType], result: &TensorType) -> u64 {
        result.elements().saturating_mul(u64::from(result.shape[self.dim].max(1).ilog2()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_nans_and_zeros_have_their_order() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let order = |keys: &[(&[f64], bool)]| {
            let ty = TensorType::new(DType::F32, [keys[0].0.len() as u64]);
            let operands: Vec<Tensor> = keys.iter().map(|k| Tensor::new(ty.clone(), k.0.to_vec())).collect();
            let op = ArgSort { dim: 0, descending: keys.iter().map(|k| k.1).collect() };
            op.eval(&operands.iter().collect::<Vec<_>>(), &ty.with_dtype(DType::I32)).data
        };
        assert_eq!(order(&[(&[nan, 1.0, -inf, nan, inf], false)]), [2.0, 1.0, 4.0, 0.0, 3.0]);
        assert_eq!(order(&[(&[nan, 1.0, -inf, nan, inf], true)]), [0.0, 3.0, 4.0, 1.0, 2.0]);
        assert_eq!(order(&[(&[0.0, -0.0, 0.0, -1.0], false)]), [3.0, 0.0, 1.0, 2.0]);
        assert_eq!(order(&[(&[2.0, 1.0, 2.0, 1.0], true)]), [0.0, 2.0, 1.0, 3.0]);
        assert_eq!(order(&[(&[2.0, 1.0, 2.0, 1.0], false), (&[0.0, 5.0, 1.0, 6.0], true)]), [3.0, 1.0, 2.0, 0.0]);
    }
}
