//! Matrix products.

use super::convert::Converter;
use super::lower::{Lowered, exactly, optional_dims, result_dtype, result_type};
use super::report::Reject;
use super::syntax::Operation;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{DotGeneral, GroupedOuter, Op};

impl Converter<'_, '_> {
    pub fn dot(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [lhs, rhs] = exactly(operands)?;
        let dot = match operation.name {
            "dot" => DotGeneral {
                lhs_batch: Vec::new(),
                rhs_batch: Vec::new(),
                lhs_contract: vec![self.graph.ty(lhs).rank().saturating_sub(1)],
                rhs_contract: vec![0],
            },
            _ => DotGeneral {
                lhs_batch: optional_dims(operation, "lhs_batching_dimensions")?,
                rhs_batch: optional_dims(operation, "rhs_batching_dimensions")?,
                lhs_contract: optional_dims(operation, "lhs_contracting_dimensions")?,
                rhs_contract: optional_dims(operation, "rhs_contracting_dimensions")?,
            },
        };
        self.product(operation, Op::DotGeneral(dot), lhs, rhs)
    }

    /// Multiplies runs of rows, whose sizes the third operand gives, by one matrix each: `[m, k]` by `[g, k, n]`.
    /// If the rows are contracted, as in `[m, k]` by `[m, n]`, each run has its own result: `[g, k, n]`.
    pub fn ragged_dot(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [lhs, rhs, sizes] = exactly(operands)?;
        let dims = |name| optional_dims(operation, name);
        let (ragged, groups) = (dims("lhs_ragged_dimensions")?, dims("rhs_group_dimensions")?);
        let (of_lhs, of_rhs) = (dims("lhs_contracting_dimensions")?, dims("rhs_contracting_dimensions")?);
        if !dims("lhs_batching_dimensions")?.is_empty() || self.graph.ty(sizes).rank() != 1 {
            return Err(Reject::Unsupported("with batching dimensions; map over single products instead"));
        }
        let (&[ragged], &[of_lhs], &[of_rhs]) = (ragged.as_slice(), of_lhs.as_slice(), of_rhs.as_slice()) else {
            return Err(Reject::Unsupported("with other than one ragged and one contracted dimension"));
        };
        let rank = |v: ValueId| self.graph.ty(v).rank();
        let (left, right) = (rank(lhs), rank(rhs));
        let fits = left == 2 && ragged < 2 && of_lhs < 2 && of_rhs < right;
        let dtype = result_type(operation)?.dtype;
        let (lhs, rhs) = (self.converted(lhs, dtype)?, self.converted(rhs, dtype)?);
        let rows_by = match groups[..] {
            [of_group] if fits && right == 3 && ragged != of_lhs && of_group != of_rhs && of_group < 3 => {
                Some(of_group)
            }
            [] if fits && right == 2 && ragged == of_lhs => None,
            _ => return Err(Reject::Unsupported("of these dimensions")),
        };
        let made = self.arrays(|g| {
            let ends = array::cumulative(g, sizes, altiplano_ir::op::Reducer::Sum, 0, false)?;
            let rows = g.shape(lhs).get(ragged).copied().unwrap_or(0);
            let group = array::group_of_rows(g, ends, rows)?;
            let Some(of_group) = rows_by else {
                let x = array::permute(g, lhs, &[ragged, 1 - ragged])?;
                let y = array::permute(g, rhs, &[of_rhs, 1 - of_rhs])?;
                let groups = g.shape(sizes)[0];
                return g.push(Op::GroupedOuter(GroupedOuter { groups, of: None }), &[x, y, group]);
            };
            let columns = 3 - of_group - of_rhs;
            let x = array::permute(g, lhs, &[ragged, of_lhs])?;
            // Matrices with columns before rows are used without a transposition.
            let swapped = columns < of_rhs;
            let order = if swapped { [of_group, columns, of_rhs] } else { [of_group, of_rhs, columns] };
            let w = array::permute(g, rhs, &order)?;
            let w = if swapped { array::permute(g, w, &[0, 2, 1])? } else { w };
            array::grouped_dot(g, x, w, group)
        })?;
        Ok(vec![made])
    }

    /// Appends a product whose operands and result may differ in element type, such as half precision summed in
    /// single.
    pub fn product(&mut self, operation: &Operation, op: Op, mut lhs: ValueId, mut rhs: ValueId) -> Lowered {
        let dtype = result_dtype(operation)?;
        let in_eight_bits = [lhs, rhs].iter().all(|&v| self.graph.ty(v).dtype.is_eight_bit_float());
        // Products of the graph have one element type, apart from those of 8-bit floats, which give 16 bits. Converting
        // the operands up keeps every digit of the wider sum.
        let is_as_given = in_eight_bits && dtype == DType::PRODUCT_OF_8_BITS;
        let is_wide = dtype.bytes() >= self.graph.ty(lhs).dtype.bytes().max(self.graph.ty(rhs).dtype.bytes());
        if is_wide && !is_as_given {
            lhs = self.converted(lhs, dtype)?;
            rhs = self.converted(rhs, dtype)?;
        }
        let product = self.push(op, &[lhs, rhs])?;
        Ok(vec![self.converted(product, dtype)?])
    }
}
