//! The element type in which PyTorch computes an op with several operands.

use super::call::{Call, Operand};
use super::report::Reject;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;

/// The type of float numbers, unless a tensor determines another.
pub(crate) const DEFAULT_FLOAT: DType = DType::F32;

/// The type that holds values of both. An integer and a float give the float; two integers give a type that
/// holds both.
pub(crate) fn common(a: DType, b: DType) -> DType {
    let class = |d: DType| (d.is_float() as u8, (d != DType::Bool) as u8);
    match (a, b) {
        (a, b) if a == b => a,
        (a, b) if class(a) > class(b) => a,
        (a, b) if class(a) < class(b) => b,
        (a, b) if a.is_float() => match (a.bytes(), b.bytes()) {
            (m, n) if m > n => a,
            (m, n) if m < n => b,
            // f16 and bf16 each hold values that the other does not.
            _ => DType::F32,
        },
        (a, b) if a.is_signed_integer() == b.is_signed_integer() => {
            if a.bytes() >= b.bytes() {
                a
            } else {
                b
            }
        }
        (a, b) => {
            let (signed, unsigned) = if a.is_signed_integer() { (a, b) } else { (b, a) };
            match unsigned.bytes().max(signed.bytes() / 2) {
                _ if signed.bytes() > unsigned.bytes() => signed,
                1 => DType::I16,
                2 => DType::I32,
                _ => DType::I64,
            }
        }
    }
}

/// The element type of an op on these operands. Tensors with dimensions have priority, then scalar tensors,
/// then numbers. A later group counts only if it is of a higher kind (float over integer over boolean).
pub(crate) fn result_type(operands: &[(Operand, Option<(DType, usize)>)]) -> DType {
    let kind = |d: DType| if d.is_float() { 2 } else { u8::from(d != DType::Bool) };
    let mut groups: [Option<DType>; 3] = [None; 3];
    for (operand, ty) in operands {
        let (at, dtype) = match (operand, ty) {
            (_, Some((dtype, rank))) => (usize::from(*rank == 0), *dtype),
            (Operand::Float(_), _) => (2, DEFAULT_FLOAT),
            (Operand::Bool(_), _) => (2, DType::Bool),
            _ => (2, DType::I64),
        };
        groups[at] = Some(groups[at].map_or(dtype, |known| common(known, dtype)));
    }
    let higher = |known: Option<DType>, next: Option<DType>| match (known, next) {
        (Some(known), Some(next)) if kind(next) > kind(known) => Some(next),
        (None, next) => next,
        (known, _) => known,
    };
    groups.into_iter().fold(None, higher).unwrap_or(DEFAULT_FLOAT)
}

impl Call<'_> {
    fn with_types(&self, operands: &[Operand]) -> Vec<(Operand, Option<(DType, usize)>)> {
        let ty = |o: &Operand| match o {
            Operand::Tensor(v) => Some((self.to.graph.ty(*v).dtype, self.to.graph.shape(*v).len())),
            _ => None,
        };
        operands.iter().map(|o| (*o, ty(o))).collect()
    }

    pub(crate) fn common_type(&self, operands: &[Operand]) -> DType {
        result_type(&self.with_types(operands))
    }

    /// An operand as a tensor of this type. Numbers become scalars.
    pub(crate) fn as_tensor(&mut self, operand: Operand, dtype: DType) -> Result<ValueId, Reject> {
        let g = self.g();
        Ok(match operand {
            Operand::Tensor(v) => array::convert(g, v, dtype)?,
            Operand::Int(n) => array::scalar(g, n as f64, dtype)?,
            Operand::Float(x) => array::scalar(g, x, dtype)?,
            Operand::Bool(b) => array::scalar(g, f64::from(u8::from(b)), dtype)?,
        })
    }

    /// The named arguments in their common type, which must be a float if `floats` is true.
    pub(crate) fn promoted(&mut self, names: &[&str], floats: bool) -> Result<Vec<ValueId>, Reject> {
        let operands = names.iter().map(|name| self.operand(name)).collect::<Result<Vec<_>, _>>()?;
        let dtype = self.common_type(&operands);
        let dtype = if floats && !dtype.is_float() { DEFAULT_FLOAT } else { dtype };
        operands.into_iter().map(|o| self.as_tensor(o, dtype)).collect()
    }

    /// The first argument, as a float.
    pub(crate) fn float_tensor(&mut self) -> Result<ValueId, Reject> {
        let x = self.first()?;
        let dtype = self.dtype_of(x);
        if dtype.is_float() { Ok(x) } else { Ok(array::convert(self.g(), x, DEFAULT_FLOAT)?) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_that_hold_both() {
        use DType::*;
        for (a, b, expect) in [
            (F32, I64, F32),
            (F16, F32, F32),
            (F16, BF16, F32),
            (I64, Bool, I64),
            (U8, I8, I16),
            (U8, I64, I64),
            (I32, I8, I32),
            (Bool, Bool, Bool),
            (F64, BF16, F64),
        ] {
            assert_eq!(common(a, b), expect, "{a} {b}");
            assert_eq!(common(b, a), expect, "{b} {a}");
        }
    }

    #[test]
    fn tensors_with_dimensions_decide_before_scalars_and_numbers() {
        let tensor = |dtype: DType, rank: usize| (Operand::Int(0), Some((dtype, rank)));
        let number = (Operand::Float(0.5), None);
        let whole = (Operand::Int(2), None);
        let truth = (Operand::Bool(true), None);
        for (operands, expect) in [
            (vec![tensor(DType::F16, 1), tensor(DType::F32, 0)], DType::F16),
            (vec![tensor(DType::I32, 1), tensor(DType::F64, 0)], DType::F64),
            (vec![tensor(DType::I32, 1), number], DType::F32),
            (vec![tensor(DType::BF16, 2), number], DType::BF16),
            (vec![tensor(DType::I8, 0), whole], DType::I8),
            (vec![tensor(DType::Bool, 3), whole], DType::I64),
            (vec![tensor(DType::Bool, 3), truth], DType::Bool),
            (vec![whole, truth], DType::I64),
        ] {
            assert_eq!(result_type(&operands), expect, "{operands:?}");
        }
    }
}
