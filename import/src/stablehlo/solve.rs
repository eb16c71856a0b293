//! Lowers triangular factors and solves: ops of the dialect, and the LAPACK calls that JAX uses on CPUs.

use super::convert::Converter;
use super::lower::{Lowered, attribute, exactly};
use super::report::Reject;
use super::syntax::{Attribute, Operation, find};
use altiplano_ir::array;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::Op;

/// The layout of a triangular system.
struct System {
    /// True if the matrix is to the left of the unknown.
    left: bool,
    lower: bool,
    unit: bool,
    turned: bool,
}

impl Converter<'_, '_> {
    /// The triangular factor of a matrix. Only one half of the matrix is read.
    pub fn cholesky(&mut self, x: ValueId, lower: bool) -> Result<ValueId, Reject> {
        self.arrays(|g| {
            let x = if lower { x } else { array::swap_dims(g, x, -1, -2)? };
            let factor = array::cholesky(g, x)?;
            if lower { Ok(factor) } else { array::swap_dims(g, factor, -1, -2) }
        })
    }

    pub(crate) fn triangular_solve(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let flag = |name: &str| operation.attribute(name) == Some(&Attribute::Bool(true));
        let turned = match operation.attribute("transpose_a").and_then(Attribute::as_word) {
            Some("TRANSPOSE" | "ADJOINT") => true,
            Some("NO_TRANSPOSE") | None => false,
            Some(_) => return Err(attribute("transpose_a")),
        };
        let (left, lower, unit) = (flag("left_side"), flag("lower"), flag("unit_diagonal"));
        self.solved(operands, &System { left, lower, unit, turned })
    }

    fn solved(&mut self, operands: &[ValueId], system: &System) -> Lowered {
        let [t, b] = exactly(operands)?;
        let solution = self.arrays(|g| {
            // X T = B is equivalent to T' X' = B'.
            let swaps = system.turned == system.left;
            let t = if swaps { array::swap_dims(g, t, -1, -2)? } else { t };
            let lower = system.lower != swaps;
            if system.left {
                return array::solve_triangular(g, t, b, !lower, system.unit);
            }
            let b = array::swap_dims(g, b, -1, -2)?;
            let x = array::solve_triangular(g, t, b, !lower, system.unit)?;
            array::swap_dims(g, x, -1, -2)
        });
        Ok(vec![solution?])
    }

    /// The factor, and a status of zero, which means success.
    pub(crate) fn lapack_cholesky(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [x] = exactly(operands)?;
        let factor = self.cholesky(x, letter(operation, "uplo") != Some('U'))?;
        let mut results = vec![factor];
        for ty in operation.result_types.iter().skip(1) {
            let ty = super::literal::tensor_type(ty).ok_or(Reject::Unsupported("with a result of this type"))?;
            results.push(self.push(Op::Constant(Literal::splat(ty, 0.0)), &[])?);
        }
        Ok(results)
    }

    pub(crate) fn lapack_solve(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let is = |name, wanted| letter(operation, name) == Some(wanted);
        let system = System {
            left: is("side", 'L'),
            lower: is("uplo", 'L'),
            unit: is("diag", 'U'),
            turned: !is("trans_x", 'N'),
        };
        self.solved(operands, &system)
    }
}

/// A letter of a call's configuration, stored as its character code.
fn letter(operation: &Operation, name: &str) -> Option<char> {
    let Some(Attribute::Dictionary(config)) = operation.attribute("mhlo.backend_config") else { return None };
    match find(config, name)? {
        Attribute::Int(code) => u8::try_from(*code).ok().map(char::from),
        _ => None,
    }
}
