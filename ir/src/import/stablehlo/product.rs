//! Matrix products.

use super::convert::Converter;
use super::lower::{Lowered, exactly, optional_dims, result_dtype};
use super::syntax::Operation;
use crate::graph::ValueId;
use crate::op::{DotGeneral, Op};

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

    /// Element types of operands and result may differ: a product of half precision that is summed in single.
    pub fn product(&mut self, operation: &Operation, op: Op, mut lhs: ValueId, mut rhs: ValueId) -> Lowered {
        let dtype = result_dtype(operation)?;
        // The graph's products have one element type. Converting the operands up keeps every digit of the wider sum.
        if dtype.bytes() >= self.graph.ty(lhs).dtype.bytes().max(self.graph.ty(rhs).dtype.bytes()) {
            lhs = self.converted(lhs, dtype)?;
            rhs = self.converted(rhs, dtype)?;
        }
        let product = self.push(op, &[lhs, rhs])?;
        Ok(vec![self.converted(product, dtype)?])
    }
}
