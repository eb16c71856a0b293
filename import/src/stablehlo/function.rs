//! Mathematical functions of the `chlo` dialect as compositions of ops of the graph.

use super::convert::Converter;
use super::lower::{Lowered, exactly, optional_dims};
use super::report::Reject;
use super::syntax::{Attribute, Operation};
use altiplano_ir::array::{self, Built};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Binary, Compare, Direction, Op, Select, Unary};

type Value = Result<ValueId, Reject>;

impl Converter<'_, '_> {
    pub fn function(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        if let Some(name) = operation.name.strip_prefix("broadcast_") {
            return self.broadcasting(operation, name, operands);
        }
        if operation.name == "constant_like" {
            let [x] = exactly(operands)?;
            let value = match operation.attribute("value") {
                Some(Attribute::Float(value)) => *value,
                Some(Attribute::Int(value)) => *value as f64,
                _ => return Err(super::lower::attribute("value")),
            };
            return Ok(vec![self.like(x, value)?]);
        }
        self.function_named(operation.name, operands)
    }

    /// Applies a named function of one value.
    pub(crate) fn function_named(&mut self, name: &str, operands: &[ValueId]) -> Lowered {
        if let Some(unary) = Unary::ALL.into_iter().find(|unary| unary.name() == name) {
            let [x] = exactly(operands)?;
            return Ok(vec![self.unary(unary, x)?]);
        }
        if name == "next_after" {
            let [x, y] = exactly(operands)?;
            return Ok(vec![self.next_after(x, y)?]);
        }
        let function: fn(&mut Graph, ValueId) -> Built = match name {
            "square" => |g, x| array::binary(g, Binary::Multiply, x, x),
            "sinh" => array::sinh,
            "cosh" => array::cosh,
            "asin" => array::asin,
            "acos" => array::acos,
            "atan" => array::atan,
            "asinh" => array::asinh,
            "acosh" => array::acosh,
            "atanh" => array::atanh,
            "erf_inv" => array::erf_inv,
            "lgamma" => array::lgamma,
            "digamma" => array::digamma,
            "is_inf" => is_inf,
            "is_pos_inf" => |g, x| is_equal(g, x, f64::INFINITY),
            "is_neg_inf" => |g, x| is_equal(g, x, f64::NEG_INFINITY),
            _ => return Err(Reject::Unsupported("")),
        };
        let [x] = exactly(operands)?;
        Ok(vec![self.arrays(|g| function(g, x))?])
    }

    /// Lowers `broadcast_add` and the like: operands of lower rank get leading dimensions, and sizes of one are
    /// repeated.
    fn broadcasting(&mut self, operation: &Operation, name: &str, operands: &[ValueId]) -> Lowered {
        let rank = operands.iter().map(|&o| self.graph.ty(o).rank()).max().unwrap_or(0);
        let said = optional_dims(operation, "broadcast_dimensions")?;
        let mut shape = vec![1; rank];
        let mut placed = Vec::with_capacity(operands.len());
        for &operand in operands {
            let own = self.graph.shape(operand).to_vec();
            let dims: Vec<usize> = match said.len() == own.len() && own.len() < rank {
                true => said.clone(),
                false => (rank - own.len()..rank).collect(),
            };
            for (&d, &size) in dims.iter().zip(&own) {
                match shape.get_mut(d) {
                    Some(known) if *known == 1 => *known = size,
                    Some(_) => {}
                    None => return Err(super::lower::attribute("broadcast_dimensions")),
                }
            }
            placed.push(dims);
        }
        let mut wide = Vec::with_capacity(operands.len());
        for (&operand, dims) in operands.iter().zip(placed) {
            wide.push(self.broadcast(operand, shape.clone(), dims)?);
        }
        if name == "compare" {
            return self.compare(operation, &wide);
        }
        if name == "select" {
            return self.one(Op::Select(Select {}), &wide);
        }
        let binary = Binary::ALL.into_iter().find(|binary| binary.name() == name);
        self.one(Op::Binary(binary.ok_or(Reject::Unsupported(""))?), &wide)
    }

    /// A tensor filled with `value`, in the type of `x`.
    fn like(&mut self, x: ValueId, value: f64) -> Value {
        let ty = self.graph.ty(x).clone();
        Ok(self.push(Op::Constant(Literal::splat(ty, value)), &[])?)
    }

    fn add(&mut self, a: ValueId, b: ValueId) -> Value {
        self.binary(Binary::Add, a, b)
    }

    fn plus(&mut self, x: ValueId, value: f64) -> Value {
        let value = self.like(x, value)?;
        self.add(x, value)
    }

    fn choose(&mut self, predicate: ValueId, a: ValueId, b: ValueId) -> Value {
        Ok(self.push(Op::Select(Select {}), &[predicate, a, b])?)
    }

    /// The number next to `x` in the direction of `y`. The bits of a float, read as an integer, count up from
    /// zero on either side.
    fn next_after(&mut self, x: ValueId, y: ValueId) -> Value {
        let ty = self.graph.ty(x).clone();
        let bits = match ty.dtype.bytes() {
            8 => DType::I64,
            4 => DType::I32,
            2 => DType::I16,
            _ => return Err(Reject::Unsupported("of this type")),
        };
        let word = self.cast(x, bits)?;
        let (grown, shrunk) = (self.plus(word, 1.0)?, self.plus(word, -1.0)?);
        let (grown, shrunk) = (self.cast(grown, ty.dtype)?, self.cast(shrunk, ty.dtype)?);
        let zero = self.like(x, 0.0)?;
        let compare = |direction| Op::Compare(Compare { direction });
        let above = self.push(compare(Direction::Gt), &[y, x])?;
        let positive = self.push(compare(Direction::Gt), &[x, zero])?;
        let outwards = self.push(compare(Direction::Eq), &[above, positive])?;
        let moved = self.choose(outwards, grown, shrunk)?;
        // From a zero of either sign, the next number is the smallest one with the sign of the direction.
        let least = self.like(word, 1.0)?;
        let least = self.cast(least, ty.dtype)?;
        let minus = self.unary(Unary::Negate, least)?;
        let from_zero = self.choose(above, least, minus)?;
        let at_zero = self.push(compare(Direction::Eq), &[x, zero])?;
        let moved = self.choose(at_zero, from_zero, moved)?;
        let same = self.push(compare(Direction::Eq), &[x, y])?;
        let value = self.choose(same, y, moved)?;
        let sum = self.add(x, y)?;
        let undefined = self.push(compare(Direction::Ne), &[sum, sum])?;
        // Opposite infinities sum to NaN too, but are numbers.
        let (x_known, y_known) =
            (self.push(compare(Direction::Eq), &[x, x])?, self.push(compare(Direction::Eq), &[y, y])?);
        let both = self.binary(Binary::And, x_known, y_known)?;
        let missing = self.unary(Unary::Not, both)?;
        let undefined = self.binary(Binary::And, undefined, missing)?;
        self.choose(undefined, sum, value)
    }
}

fn is_inf(g: &mut Graph, x: ValueId) -> Built {
    let size = array::unary(g, Unary::Abs, x)?;
    is_equal(g, size, f64::INFINITY)
}

fn is_equal(g: &mut Graph, x: ValueId, number: f64) -> Built {
    let number = array::full_like(g, x, number)?;
    array::compare(g, Direction::Eq, x, number)
}
