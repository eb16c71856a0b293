//! Grouped products: every row selects the matrix that it is multiplied with (MegaBlocks, Gale et al. 2023).
//!
//! Experts without a capacity consist of these products. Rows are tokens, one for each expert that a token goes to, and
//! matrices are experts. A row's result depends on that row alone, wherever the rows of other experts are. So nothing
//! is sorted, and samples stay apart. The work is that of the rows and does not grow with the number of matrices.
//!
//! Rows, terms and columns split as in any product. If the matrices are split (expert parallelism), a device multiplies
//! the rows that select its own matrices and gives zeros for the others. The result is a partial sum.

use super::dot::{factor_of_products, product_dtype};
use super::gather::local_indices;
use super::*;
use crate::rule::FactorKind;

/// `grouped_dot(x, w, group)`: `result[r, n] = sum_k x[r, k] w[group[r], k, n]`, and zeros if no matrix has that
/// number.
///
/// Shapes: `x` is `[rows.., K]`, `group` is `[rows..]` of integers, `w` is `[G, K, N]`, or `[G, N, K]` if `contract` is
/// 2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedDot {
    /// The dimension of `w` that is contracted: 1 or 2.
    pub contract: usize,
    /// The number of matrices among which rows are spread, if `w` holds only some of them. It affects FLOP counts and
    /// not results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<u64>,
}

/// `grouped_outer(x, y, group)`: `result[g, k, n]` is the sum of `x[r, k] y[r, n]` over the rows with `group[r] = g`.
/// Rows of other groups are ignored. Shapes: `x` is `[rows.., K]`, `y` is `[rows.., N]`, `group` is `[rows..]` of
/// integers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupedOuter {
    pub groups: u64,
    /// See [`GroupedDot::of`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<u64>,
}

/// Counts a multiplication and an addition per row, term and column, for the rows of `here` of the `of` groups.
fn flop(rows: u64, terms: u64, columns: u64, here: u64, of: Option<u64>) -> u64 {
    let all = 2 * u128::from(rows) * u128::from(terms) * u128::from(columns);
    let of = u128::from(of.unwrap_or(here).max(1));
    u64::try_from(all * u128::from(here).min(of) / of).unwrap_or(u64::MAX)
}

/// Checks that `rows` is a float tensor with one dimension more than `group`.
fn check_rows(rows: &TensorType, group: &TensorType) -> Result<u64, ShapeError> {
    if !group.dtype.is_integer() {
        return Err(ShapeError::DType { dtype: group.dtype });
    }
    if !rows.dtype.is_float() {
        return Err(ShapeError::DType { dtype: rows.dtype });
    }
    match rows.shape.split_last() {
        Some((&width, outer)) if *outer == group.shape[..] => Ok(width),
        _ => Err(ShapeError::ShapesDiffer { left: rows.shape.to_vec(), right: group.shape.to_vec() }),
    }
}

/// `group` relative to the first of this device's matrices.
fn local_group(cx: &mut Local<'_>, operand: usize, factor: usize, groups: u64) -> (ValueId, Option<u64>) {
    let axes = cx.factor_axes[factor].clone();
    let group = cx.operands[operand];
    if axes.is_empty() {
        return (group, None);
    }
    let local = groups / cx.mesh.product(&axes);
    (local_indices(cx, group, &axes, local, groups, false), Some(groups))
}

impl GroupedDot {
    fn free(&self) -> usize {
        3 - self.contract
    }

    /// The index of the groups factor. The rows' factors come first, then terms, columns and groups.
    fn groups_factor(group: &TensorType) -> usize {
        group.rank() + 2
    }
}

impl Operator for GroupedDot {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 3)?;
        let (x, w, group) = (operands[0], operands[1], operands[2]);
        if !matches!(self.contract, 1 | 2) || w.rank() != 3 {
            return Err(ShapeError::Attribute(
                "a grouped product takes matrices of three dimensions, summed over 1 or 2",
            ));
        }
        let terms = check_rows(x, group)?;
        let dtype = product_dtype(x.dtype, w.dtype)?;
        let right = w.shape[self.contract];
        if terms != right {
            return Err(ShapeError::SizesDiffer { what: "dimensions that run together", left: terms, right });
        }
        let columns = w.shape[self.free()];
        Ok(TensorType::new(dtype, group.shape.iter().copied().chain([columns]).collect::<Vec<_>>()))
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        let (w, group) = (operands[1], operands[2]);
        let mut rule = ShardingRule { linear: vec![vec![0], vec![1]], ..Default::default() };
        let rows: Vec<Vec<u8>> = group.shape.iter().map(|&n| vec![rule.factor(n, FactorKind::Parallel)]).collect();
        let terms = rule.factor(w.shape[self.contract], FactorKind::Reduction(Reducer::Sum));
        let columns = rule.factor(w.shape[self.free()], FactorKind::Parallel);
        let groups = rule.factor(w.shape[0], FactorKind::Reduction(Reducer::Sum));
        rule.contiguous.push(groups);
        let with = |last: u8| rows.iter().cloned().chain([vec![last]]).collect::<Vec<_>>();
        let mut matrices = vec![vec![groups], Vec::new(), Vec::new()];
        matrices[self.contract] = vec![terms];
        matrices[self.free()] = vec![columns];
        rule.result = with(columns);
        rule.operands = vec![with(terms), matrices, rows];
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::GroupedDot(self.clone())
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let (factor, groups) = (Self::groups_factor(&cx.operand_types[2]), cx.operand_types[1].shape[0]);
        let (group, of) = local_group(cx, 2, factor, groups);
        let op = GroupedDot { of: of.or(self.of), ..self.clone() };
        cx.graph.emit(Op::GroupedDot(op), &[cx.operands[0], cx.operands[1], group])
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (x, w, group) = (cx.operands[0], cx.operands[1], cx.operands[2]);
        let g = factor_of_products(cx.graph, cx.cotangent, x);
        let dx = cx.wanted[0].then(|| {
            let back = GroupedDot { contract: self.free(), of: self.of };
            cx.graph.emit(Op::GroupedDot(back), &[g, w, group])
        });
        let dw = cx.wanted[1].then(|| {
            let outer = GroupedOuter { groups: cx.graph.shape(w)[0], of: self.of };
            let sides = if self.contract == 1 { [x, g] } else { [g, x] };
            cx.graph.emit(Op::GroupedOuter(outer), &[sides[0], sides[1], group])
        });
        vec![dx, dw, None]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (x, w, group) = (operands[0], operands[1], operands[2]);
        let (terms, columns) = (w.shape()[self.contract] as usize, w.shape()[self.free()] as usize);
        let (by_term, by_column) = if self.contract == 1 { (columns, 1) } else { (1, terms) };
        let mut data = Vec::with_capacity(result.elements() as usize);
        for (r, &g) in group.data.iter().enumerate() {
            let start = (g >= 0.0 && g < w.shape()[0] as f64).then_some(g as usize * terms * columns);
            for n in 0..columns {
                let pairs = |start: usize| {
                    (0..terms).map(move |k| (x.data[r * terms + k], w.data[start + k * by_term + n * by_column]))
                };
                data.push(start.map_or(0.0, |s| elementwise::sum_of_products(pairs(s), result.dtype)));
            }
        }
        Tensor::new(result.clone(), data)
    }

    fn flop(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        let (w, group) = (operands[1], operands[2]);
        flop(group.elements(), w.shape[1], w.shape[2], w.shape[0], self.of)
    }

    /// Counts all rows, wherever their matrices are.
    fn work(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        let whole = GroupedDot { of: None, ..*self };
        moved(operands, result).saturating_add(whole.flop(operands, result))
    }
}

impl Operator for GroupedOuter {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 3)?;
        let (x, y, group) = (operands[0], operands[1], operands[2]);
        let (terms, columns) = (check_rows(x, group)?, check_rows(y, group)?);
        Ok(TensorType::new(product_dtype(x.dtype, y.dtype)?, vec![self.groups, terms, columns]))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![0], vec![1]], ..Default::default() };
        let sum = FactorKind::Reduction(Reducer::Sum);
        let rows: Vec<Vec<u8>> = operands[2].shape.iter().map(|&n| vec![rule.factor(n, sum)]).collect();
        let terms = rule.factor(result.shape[1], FactorKind::Parallel);
        let columns = rule.factor(result.shape[2], FactorKind::Parallel);
        let groups = rule.factor(self.groups, FactorKind::Parallel);
        rule.contiguous.push(groups);
        let with = |last: u8| rows.iter().cloned().chain([vec![last]]).collect::<Vec<_>>();
        rule.result = vec![vec![groups], vec![terms], vec![columns]];
        rule.operands = vec![with(terms), with(columns), rows];
        rule
    }

    fn resized(&self, _: &[&[u64]], result: &[u64]) -> Op {
        Op::GroupedOuter(GroupedOuter { groups: result[0], of: self.of })
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let factor = GroupedDot::groups_factor(&cx.operand_types[2]);
        let (group, of) = local_group(cx, 2, factor, self.groups);
        let op = GroupedOuter { groups: cx.result_shape[0], of: of.or(self.of) };
        cx.graph.emit(Op::GroupedOuter(op), &[cx.operands[0], cx.operands[1], group])
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (x, y, group) = (cx.operands[0], cx.operands[1], cx.operands[2]);
        let g = factor_of_products(cx.graph, cx.cotangent, x);
        let mut back = |wanted: bool, rows: ValueId, contract: usize| {
            let op = Op::GroupedDot(GroupedDot { contract, of: self.of });
            wanted.then(|| cx.graph.emit(op, &[rows, g, group]))
        };
        vec![back(cx.wanted[0], y, 2), back(cx.wanted[1], x, 1), None]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (x, y, group) = (operands[0], operands[1], operands[2]);
        // Any number of groups may have no elements.
        if result.elements() == 0 {
            return Tensor::splat(result.clone(), 0.0);
        }
        let (terms, columns) = (result.shape[1] as usize, result.shape[2] as usize);
        let mut rows_of: Vec<Vec<usize>> = vec![Vec::new(); self.groups as usize];
        for (r, &g) in group.data.iter().enumerate() {
            if g >= 0.0 && g < self.groups as f64 {
                rows_of[g as usize].push(r);
            }
        }
        let mut data = Vec::with_capacity(result.elements() as usize);
        for rows in &rows_of {
            for (k, n) in (0..terms).flat_map(|k| (0..columns).map(move |n| (k, n))) {
                let pairs = rows.iter().map(|r| (x.data[r * terms + k], y.data[r * columns + n]));
                data.push(elementwise::sum_of_products(pairs, result.dtype));
            }
        }
        Tensor::new(result.clone(), data)
    }

    fn flop(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        flop(operands[2].elements(), result.shape[1], result.shape[2], self.groups, self.of)
    }

    /// Counts all rows, wherever their matrices are.
    fn work(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        let whole = GroupedOuter { of: None, ..*self };
        moved(operands, result).saturating_add(whole.flop(operands, result))
    }
}
