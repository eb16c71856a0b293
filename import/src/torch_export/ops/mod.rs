//! Lowerings of the ops, by family. Each family has a table of names, and functions for ops that need more than
//! one op of the graph.

pub(crate) mod activation;
pub(crate) mod contraction;
pub(crate) mod creation;
pub(crate) mod elementwise;
pub(crate) mod image;
pub(crate) mod indexing;
pub(crate) mod linalg;
pub(crate) mod loss;
pub(crate) mod marked;
pub(crate) mod program;
pub(crate) mod random;
pub(crate) mod recurrent;
pub(crate) mod reduction;
pub(crate) mod sampling;
pub(crate) mod shape;
pub(crate) mod spectral;

use super::call::{Call, Operand, Out, problem};
use super::promote::DEFAULT_FLOAT;
use super::report::{Reject, other};
use super::table::{Lowered, Lowering};
use altiplano_ir::array as a;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Binary, Direction, Op, Reducer, Unary};

impl Lowering {
    pub fn apply(self, c: &mut Call<'_>) -> Lowered {
        match self {
            Lowering::Function(f) => f(c),
            Lowering::OfFloats(op) => {
                let x = c.float_tensor()?;
                Ok(Out::Value(a::unary(c.g(), op, x)?))
            }
            Lowering::OfNumbers(op) => {
                let x = c.first()?;
                Ok(Out::Value(a::unary(c.g(), op, x)?))
            }
            Lowering::ToWhole(op) => {
                let x = c.first()?;
                if !c.dtype_of(x).is_float() {
                    return Ok(Out::Value(x));
                }
                Ok(Out::Value(a::unary(c.g(), op, x)?))
            }
            Lowering::Binary(op) => {
                let both = c.promoted(&["self", "other"], false)?;
                Ok(Out::Value(a::binary(c.g(), op, both[0], both[1])?))
            }
            Lowering::Compare(direction) => {
                let both = c.promoted(&["self", "other"], false)?;
                Ok(Out::Value(a::compare(c.g(), direction, both[0], both[1])?))
            }
            Lowering::Logical(op) => {
                let mut both = Vec::new();
                for name in ["self", "other"] {
                    let operand = c.operand(name)?;
                    both.push(c.as_tensor(operand, DType::Bool)?);
                }
                Ok(Out::Value(a::binary(c.g(), op, both[0], both[1])?))
            }
            Lowering::Reduce(reducer) => reduction::reduce(c, reducer),
            Lowering::Sizes(f) => program::sizes(c, f),
            Lowering::Ignored => Ok(Out::Nothing),
        }
    }
}

/// Applies `op` to `x` and a number, in the type of `x`.
fn number(c: &mut Call<'_>, op: Binary, x: ValueId, value: f64) -> Result<ValueId, Reject> {
    Ok(a::with_number(c.g(), op, x, value)?)
}

/// Applies `op` to two operands of one type, with broadcasting.
fn two(c: &mut Call<'_>, op: Binary, x: ValueId, y: ValueId) -> Result<ValueId, Reject> {
    Ok(a::binary(c.g(), op, x, y)?)
}

fn one(c: &mut Call<'_>, op: Unary, x: ValueId) -> Result<ValueId, Reject> {
    Ok(a::unary(c.g(), op, x)?)
}

fn value(v: ValueId) -> Lowered {
    Ok(Out::Value(v))
}
