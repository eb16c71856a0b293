//! General dot product: batched contraction of two tensors. It covers every matmul and most einsums.

use super::elementwise::sum_of_products;
use super::*;
use crate::rule::FactorKind;
use crate::tensor::for_each_index;

/// Dimensions `lhs_batch[i]` and `rhs_batch[i]` run together, and `lhs_contract[i]` and `rhs_contract[i]` are summed
/// over. The result's dimensions are the batch dimensions, then the free ones of lhs, then those of rhs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DotGeneral {
    pub lhs_batch: Vec<usize>,
    pub rhs_batch: Vec<usize>,
    pub lhs_contract: Vec<usize>,
    pub rhs_contract: Vec<usize>,
}

impl DotGeneral {
    /// Returns true if this is a product like attention scores, which is better recomputed than written to memory. Such
    /// a product is batched, sums over few terms, and has more elements than both factors. With more terms than
    /// `Self::FEW_TERMS`, tiles of both factors would not fit on a chip (FlashAttention, Dao et al. 2022, goes to
    /// heads of 256).
    pub fn grows(&self, lhs: &[u64], rhs: &[u64], result: &[u64]) -> bool {
        let size = |shape: &[u64]| shape.iter().map(|&d| u128::from(d)).product::<u128>();
        let terms: u64 = self.lhs_contract.iter().filter_map(|&d| lhs.get(d)).product();
        !self.lhs_batch.is_empty() && terms <= Self::FEW_TERMS && size(result) > size(lhs) + size(rhs)
    }

    /// See [`Self::grows`].
    const FEW_TERMS: u64 = 256;

    /// The dimensions of lhs that are neither batch nor contracted, in order.
    pub fn lhs_free(&self, rank: usize) -> Vec<usize> {
        (0..rank).filter(|d| !self.lhs_batch.contains(d) && !self.lhs_contract.contains(d)).collect()
    }

    pub fn rhs_free(&self, rank: usize) -> Vec<usize> {
        (0..rank).filter(|d| !self.rhs_batch.contains(d) && !self.rhs_contract.contains(d)).collect()
    }
}

/// The element type of products of these types. They are equal, or any two floats of 8 bits.
pub(super) fn product_dtype(left: DType, right: DType) -> Result<DType, ShapeError> {
    match left.is_eight_bit_float() && right.is_eight_bit_float() {
        true => Ok(DType::PRODUCT_OF_8_BITS),
        false if left == right => Ok(left),
        false => Err(ShapeError::DTypesDiffer { left, right }),
    }
}

/// The cotangent of a product as the gradients of its factors multiply it: in 8 bits if `factor` has 8 bits, with the
/// exponents of `f8e5m2`, since gradients need range more than precision (Micikevicius et al. 2022).
pub(super) fn factor_of_products(graph: &mut Graph, cotangent: ValueId, factor: ValueId) -> ValueId {
    match graph.ty(factor).dtype.is_eight_bit_float() {
        true => graph.convert(cotangent, DType::F8E5M2),
        false => cotangent,
    }
}

impl Operator for DotGeneral {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        let (lhs, rhs) = (operands[0], operands[1]);
        if self.lhs_batch.len() != self.rhs_batch.len() || self.lhs_contract.len() != self.rhs_contract.len() {
            return Err(ShapeError::Attribute("lhs and rhs must name equally many batch and contracted dimensions"));
        }
        let all = |batch: &[usize], contract: &[usize]| [batch, contract].concat();
        expect_dims(&all(&self.lhs_batch, &self.lhs_contract), lhs.rank())?;
        expect_dims(&all(&self.rhs_batch, &self.rhs_contract), rhs.rank())?;
        let pairs = self.lhs_batch.iter().zip(&self.rhs_batch).chain(self.lhs_contract.iter().zip(&self.rhs_contract));
        for (&l, &r) in pairs {
            if lhs.shape[l] != rhs.shape[r] {
                return Err(ShapeError::SizesDiffer {
                    what: "dimensions that run together",
                    left: lhs.shape[l],
                    right: rhs.shape[r],
                });
            }
        }
        let dtype = product_dtype(lhs.dtype, rhs.dtype)?;
        let batch = self.lhs_batch.iter().map(|&d| lhs.shape[d]);
        let left = self.lhs_free(lhs.rank()).into_iter().map(|d| lhs.shape[d]);
        let right = self.rhs_free(rhs.rank()).into_iter().map(|d| rhs.shape[d]);
        Ok(TensorType::new(dtype, batch.chain(left).chain(right).collect::<Vec<_>>()))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        let (lhs, rhs) = (operands[0], operands[1]);
        let mut rule = ShardingRule { linear: vec![vec![0], vec![1]], ..Default::default() };
        let mut left = vec![Vec::new(); lhs.rank()];
        let mut right = vec![Vec::new(); rhs.rank()];
        for (&l, &r) in self.lhs_batch.iter().zip(&self.rhs_batch) {
            let f = rule.factor(lhs.shape[l], FactorKind::Parallel);
            left[l] = vec![f];
            right[r] = vec![f];
            rule.result.push(vec![f]);
        }
        for d in self.lhs_free(lhs.rank()) {
            let f = rule.factor(lhs.shape[d], FactorKind::Parallel);
            left[d] = vec![f];
            rule.result.push(vec![f]);
        }
        for d in self.rhs_free(rhs.rank()) {
            let f = rule.factor(rhs.shape[d], FactorKind::Parallel);
            right[d] = vec![f];
            rule.result.push(vec![f]);
        }
        for (&l, &r) in self.lhs_contract.iter().zip(&self.rhs_contract) {
            let f = rule.factor(lhs.shape[l], FactorKind::Reduction(Reducer::Sum));
            left[l] = vec![f];
            right[r] = vec![f];
        }
        rule.operands = vec![left, right];
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::DotGeneral(self.clone())
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (lhs, rhs) = (cx.operands[0], cx.operands[1]);
        let g = factor_of_products(cx.graph, cx.cotangent, lhs);
        let (lhs_rank, rhs_rank) = (cx.graph.shape(lhs).len(), cx.graph.shape(rhs).len());
        let batch = self.lhs_batch.len();
        let (lhs_free, rhs_free) = (self.lhs_free(lhs_rank), self.rhs_free(rhs_rank));
        let g_batch: Vec<usize> = (0..batch).collect();
        let g_lhs: Vec<usize> = (batch..batch + lhs_free.len()).collect();
        let g_rhs: Vec<usize> = (batch + lhs_free.len()..batch + lhs_free.len() + rhs_free.len()).collect();

        // d lhs = g . rhs over the free dimensions of rhs. Its dimensions are [batch, lhs free, contracted].
        let d_lhs = cx.wanted[0].then(|| {
            let dot = DotGeneral {
                lhs_batch: g_batch.clone(),
                rhs_batch: self.rhs_batch.clone(),
                lhs_contract: g_rhs.clone(),
                rhs_contract: rhs_free.clone(),
            };
            let product = cx.graph.emit(Op::DotGeneral(dot), &[g, rhs]);
            // The contracted dimensions come in rhs's order. Find the place of each in lhs.
            let contracted = in_order(&self.rhs_contract).into_iter().map(|i| self.lhs_contract[i]);
            let order: Vec<usize> =
                self.lhs_batch.iter().copied().chain(lhs_free.iter().copied()).chain(contracted).collect();
            cx.graph.transpose(product, &inverse(&order))
        });
        // d rhs = lhs . g over the free dimensions of lhs. Its dimensions are [batch, contracted, rhs free].
        let d_rhs = cx.wanted[1].then(|| {
            let dot = DotGeneral {
                lhs_batch: self.lhs_batch.clone(),
                rhs_batch: g_batch.clone(),
                lhs_contract: lhs_free.clone(),
                rhs_contract: g_lhs.clone(),
            };
            let product = cx.graph.emit(Op::DotGeneral(dot), &[lhs, g]);
            let contracted = in_order(&self.lhs_contract).into_iter().map(|i| self.rhs_contract[i]);
            let order: Vec<usize> =
                self.rhs_batch.iter().copied().chain(contracted).chain(rhs_free.iter().copied()).collect();
            cx.graph.transpose(product, &inverse(&order))
        });
        vec![d_lhs, d_rhs]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (lhs, rhs) = (operands[0], operands[1]);
        // Without a sum there are no terms; an operand without elements may have any number of them.
        if result.elements() == 0 {
            return Tensor::from_fn(result.clone(), |_| 0.0);
        }
        let (left, right) = (crate::types::strides(lhs.shape()), crate::types::strides(rhs.shape()));
        let lhs_free = self.lhs_free(lhs.ty.rank());
        let rhs_free = self.rhs_free(rhs.ty.rank());
        let sum_shape: Vec<u64> = self.lhs_contract.iter().map(|&d| lhs.shape()[d]).collect();
        let mut terms = Vec::new();
        for_each_index(&sum_shape, |k| {
            let l: u64 = k.iter().zip(&self.lhs_contract).map(|(i, &d)| i * left[d]).sum();
            let r: u64 = k.iter().zip(&self.rhs_contract).map(|(i, &d)| i * right[d]).sum();
            terms.push((l as usize, r as usize));
        });
        let batch = self.lhs_batch.len();
        Tensor::from_fn(result.clone(), |index| {
            let (b, rest) = index.split_at(batch);
            let (i, j) = rest.split_at(lhs_free.len());
            let at = |ids: &[u64], dims: &[usize], strides: &[u64]| -> u64 {
                ids.iter().zip(dims).map(|(x, &d)| x * strides[d]).sum()
            };
            let l = (at(b, &self.lhs_batch, &left) + at(i, &lhs_free, &left)) as usize;
            let r = (at(b, &self.rhs_batch, &right) + at(j, &rhs_free, &right)) as usize;
            let pairs = terms.iter().map(|&(dl, dr)| (lhs.data[l + dl], rhs.data[r + dr]));
            sum_of_products(pairs, result.dtype)
        })
    }

    /// Counts a multiplication and an addition per term.
    fn flop(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        let terms = self.lhs_contract.iter().fold(2u64, |n, &d| n.saturating_mul(operands[0].shape[d]));
        terms.saturating_mul(result.elements())
    }
}

/// The positions of `dims`, sorted by dimension.
fn in_order(dims: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|&i| dims[i]);
    order
}

/// The inverse of a permutation.
fn inverse(permutation: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; permutation.len()];
    for (i, &p) in permutation.iter().enumerate() {
        inverse[p] = i;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn operands_without_elements_have_no_terms() {
        let ty = |shape: &[u64]| TensorType { dtype: DType::F32, shape: shape.to_vec() };
        let [lhs_batch, rhs_batch] = [Vec::new(), Vec::new()];
        let dot = DotGeneral { lhs_batch, rhs_batch, lhs_contract: vec![1], rhs_contract: vec![0] };
        let operands = [&[0, 1 << 40][..], &[1 << 40, 0]].map(|shape| Tensor { ty: ty(shape), data: Vec::new() });
        assert!(dot.eval(&[&operands[0], &operands[1]], &ty(&[0, 0])).data.is_empty());
    }
}
