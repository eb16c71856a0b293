//! Mathematical functions of the `chlo` dialect as compositions of ops of the graph, accurate to single precision.
//!
//! Each formula avoids the cancellation of the textbook one near zero and its overflow for large arguments.

use std::f64::consts::{LN_2, PI};

use super::convert::Converter;
use super::lower::{Lowered, exactly, optional_dims};
use super::report::Reject;
use super::syntax::{Attribute, Operation};
use crate::dtype::DType;
use crate::graph::ValueId;
use crate::literal::Literal;
use crate::op::{Binary, Compare, Direction, Op, Select, Unary};

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

    /// A function of one value by its name.
    pub fn function_named(&mut self, name: &str, operands: &[ValueId]) -> Lowered {
        if let Some(unary) = Unary::ALL.into_iter().find(|unary| unary.name() == name) {
            let [x] = exactly(operands)?;
            return Ok(vec![self.unary(unary, x)?]);
        }
        if name == "next_after" {
            let [x, y] = exactly(operands)?;
            return Ok(vec![self.next_after(x, y)?]);
        }
        let function = match name {
            "square" => Self::square,
            "sinh" => Self::sinh,
            "cosh" => Self::cosh,
            "asin" => Self::asin,
            "acos" => Self::acos,
            "atan" => Self::atan,
            "asinh" => Self::asinh,
            "acosh" => Self::acosh,
            "atanh" => Self::atanh,
            "erf_inv" => Self::erf_inv,
            "lgamma" => Self::lgamma,
            "digamma" => Self::digamma,
            "is_inf" => Self::is_inf,
            "is_pos_inf" => Self::is_pos_inf,
            "is_neg_inf" => Self::is_neg_inf,
            _ => return Err(Reject::Unsupported("")),
        };
        let [x] = exactly(operands)?;
        Ok(vec![function(self, x)?])
    }

    /// `broadcast_add` and the like: operands of lower rank get leading dimensions, sizes of one are repeated.
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

    /// This value in the type of `x`.
    fn like(&mut self, x: ValueId, value: f64) -> Value {
        let ty = self.graph.ty(x).clone();
        Ok(self.push(Op::Constant(Literal::splat(ty, value)), &[])?)
    }

    fn add(&mut self, a: ValueId, b: ValueId) -> Value {
        self.binary(Binary::Add, a, b)
    }

    fn sub(&mut self, a: ValueId, b: ValueId) -> Value {
        self.binary(Binary::Subtract, a, b)
    }

    fn mul(&mut self, a: ValueId, b: ValueId) -> Value {
        self.binary(Binary::Multiply, a, b)
    }

    fn div(&mut self, a: ValueId, b: ValueId) -> Value {
        self.binary(Binary::Divide, a, b)
    }

    fn plus(&mut self, x: ValueId, value: f64) -> Value {
        let value = self.like(x, value)?;
        self.add(x, value)
    }

    fn times(&mut self, x: ValueId, value: f64) -> Value {
        let value = self.like(x, value)?;
        self.mul(x, value)
    }

    /// `value - x`.
    fn from(&mut self, value: f64, x: ValueId) -> Value {
        let value = self.like(x, value)?;
        self.sub(value, x)
    }

    fn test(&mut self, x: ValueId, direction: Direction, value: f64) -> Value {
        let value = self.like(x, value)?;
        Ok(self.push(Op::Compare(Compare { direction }), &[x, value])?)
    }

    fn choose(&mut self, predicate: ValueId, a: ValueId, b: ValueId) -> Value {
        Ok(self.push(Op::Select(Select {}), &[predicate, a, b])?)
    }

    fn square(&mut self, x: ValueId) -> Value {
        self.mul(x, x)
    }

    /// `(e + e / (e + 1)) / 2` with `e = exp(x) - 1` near zero; elsewhere halves are taken inside the exponentials,
    /// which then overflow no sooner than the result.
    fn sinh(&mut self, x: ValueId) -> Value {
        let e = self.unary(Unary::ExponentialMinusOne, x)?;
        let e1 = self.plus(e, 1.0)?;
        let ratio = self.div(e, e1)?;
        let sum = self.add(e, ratio)?;
        let near = self.times(sum, 0.5)?;
        let (up, down) = self.half_exponentials(x)?;
        let far = self.sub(up, down)?;
        let size = self.unary(Unary::Abs, x)?;
        let small = self.test(size, Direction::Lt, 1.0)?;
        self.choose(small, near, far)
    }

    fn cosh(&mut self, x: ValueId) -> Value {
        let (up, down) = self.half_exponentials(x)?;
        self.add(up, down)
    }

    /// `exp(x) / 2` and `exp(-x) / 2`.
    fn half_exponentials(&mut self, x: ValueId) -> Result<(ValueId, ValueId), Reject> {
        let (up, down) = (self.plus(x, -LN_2)?, self.from(-LN_2, x)?);
        Ok((self.unary(Unary::Exponential, up)?, self.unary(Unary::Exponential, down)?))
    }

    /// `sqrt((1 - x)(1 + x))`.
    fn cosine_of(&mut self, x: ValueId) -> Value {
        let (below, above) = (self.from(1.0, x)?, self.plus(x, 1.0)?);
        let product = self.mul(below, above)?;
        self.unary(Unary::Sqrt, product)
    }

    fn asin(&mut self, x: ValueId) -> Value {
        let cosine = self.cosine_of(x)?;
        self.binary(Binary::Atan2, x, cosine)
    }

    fn acos(&mut self, x: ValueId) -> Value {
        let sine = self.cosine_of(x)?;
        self.binary(Binary::Atan2, sine, x)
    }

    fn atan(&mut self, x: ValueId) -> Value {
        let one = self.like(x, 1.0)?;
        self.binary(Binary::Atan2, x, one)
    }

    /// `sign(x) log(1 + a + a^2 / (1 + sqrt(a^2 + 1)))` with `a = |x|`; where `a^2` could overflow, `log(2 a)`.
    fn asinh(&mut self, x: ValueId) -> Value {
        let size = self.unary(Unary::Abs, x)?;
        let square = self.mul(size, size)?;
        let above = self.plus(square, 1.0)?;
        let root = self.unary(Unary::Sqrt, above)?;
        let below = self.plus(root, 1.0)?;
        let ratio = self.div(square, below)?;
        let sum = self.add(size, ratio)?;
        let near = self.unary(Unary::LogPlusOne, sum)?;
        let log = self.unary(Unary::Log, size)?;
        let far = self.plus(log, LN_2)?;
        let bound = self.overflow_of_square(x);
        let large = self.test(size, Direction::Ge, bound)?;
        let value = self.choose(large, far, near)?;
        let sign = self.unary(Unary::Sign, x)?;
        self.mul(sign, value)
    }

    /// `log(1 + t + sqrt(t (t + 2)))` with `t = x - 1`; where squares could overflow, `log(2 x)`.
    fn acosh(&mut self, x: ValueId) -> Value {
        let t = self.plus(x, -1.0)?;
        let t2 = self.plus(t, 2.0)?;
        let product = self.mul(t, t2)?;
        let root = self.unary(Unary::Sqrt, product)?;
        let sum = self.add(t, root)?;
        let near = self.unary(Unary::LogPlusOne, sum)?;
        let log = self.unary(Unary::Log, x)?;
        let far = self.plus(log, LN_2)?;
        let bound = self.overflow_of_square(x);
        let large = self.test(x, Direction::Ge, bound)?;
        self.choose(large, far, near)
    }

    /// Squares of smaller numbers are finite in the type of `x`, and one is lost beside them.
    fn overflow_of_square(&self, x: ValueId) -> f64 {
        match self.graph.ty(x).dtype {
            DType::F64 => 1e150,
            DType::F16 => 200.0,
            _ => 1e18,
        }
    }

    fn atanh(&mut self, x: ValueId) -> Value {
        let minus = self.unary(Unary::Negate, x)?;
        let (up, down) = (self.unary(Unary::LogPlusOne, x)?, self.unary(Unary::LogPlusOne, minus)?);
        let difference = self.sub(up, down)?;
        self.times(difference, 0.5)
    }

    /// `c0 + x (c1 + x (...))` with the highest coefficient first in the list.
    fn polynomial(&mut self, x: ValueId, coefficients: &[f64]) -> Value {
        let (first, rest) = coefficients.split_first().ok_or(Reject::Unsupported(""))?;
        let mut sum = self.like(x, *first)?;
        for coefficient in rest {
            let product = self.mul(sum, x)?;
            sum = self.plus(product, *coefficient)?;
        }
        Ok(sum)
    }

    /// The single-precision polynomials of Giles, "Approximating the erfinv function" (2010). In double precision two
    /// steps of Newton's method follow.
    fn erf_inv(&mut self, x: ValueId) -> Value {
        const CENTRAL: [f64; 9] = [
            2.81022636e-08,
            3.43273939e-07,
            -3.5233877e-06,
            -4.39150654e-06,
            0.00021858087,
            -0.00125372503,
            -0.00417768164,
            0.246640727,
            1.50140941,
        ];
        const TAIL: [f64; 9] = [
            -0.000200214257,
            0.000100950558,
            0.00134934322,
            -0.00367342844,
            0.00573950773,
            -0.0076224613,
            0.00943887047,
            1.00167406,
            2.83297682,
        ];
        let minus = self.unary(Unary::Negate, x)?;
        let square = self.mul(x, minus)?;
        let log = self.unary(Unary::LogPlusOne, square)?;
        let w = self.unary(Unary::Negate, log)?;
        let centre = self.plus(w, -2.5)?;
        let central = self.polynomial(centre, &CENTRAL)?;
        // Where the tail is not taken it is kept away from zero, where the slope of a root has no value.
        let five = self.like(w, 5.0)?;
        let far = self.push(Op::Binary(Binary::Maximum), &[w, five])?;
        let root = self.unary(Unary::Sqrt, far)?;
        let shifted = self.plus(root, -3.0)?;
        let tail = self.polynomial(shifted, &TAIL)?;
        let is_central = self.test(w, Direction::Lt, 5.0)?;
        let factor = self.choose(is_central, central, tail)?;
        let mut y = self.mul(factor, x)?;
        for _ in 0..if self.graph.ty(x).dtype == DType::F64 { 2 } else { 0 } {
            let value = self.unary(Unary::Erf, y)?;
            let error = self.sub(value, x)?;
            let square = self.mul(y, y)?;
            let inverse = self.unary(Unary::Exponential, square)?;
            let step = self.mul(error, inverse)?;
            let step = self.times(step, PI.sqrt() / 2.0)?;
            y = self.sub(y, step)?;
        }
        let size = self.unary(Unary::Abs, x)?;
        let at_one = self.test(size, Direction::Eq, 1.0)?;
        // The sign has no slope, which infinity times anything would spoil.
        let sign = self.unary(Unary::Sign, x)?;
        let infinite = self.times(sign, f64::INFINITY)?;
        self.choose(at_one, infinite, y)
    }

    /// Lanczos' series at `z`: its sum and the sum of its derivative (Lanczos 1964, g = 7 with nine coefficients).
    fn lanczos(&mut self, z: ValueId) -> Result<(ValueId, ValueId), Reject> {
        const FIRST: f64 = 0.999_999_999_999_809_9;
        const COEFFICIENTS: [f64; 8] = [
            676.520_368_121_885_1,
            -1_259.139_216_722_402_8,
            771.323_428_777_653_1,
            -176.615_029_162_140_6,
            12.507_343_278_686_905,
            -0.138_571_095_265_720_12,
            9.984_369_578_019_572e-6,
            1.505_632_735_149_311_6e-7,
        ];
        let (mut sum, mut slope) = (self.like(z, FIRST)?, self.like(z, 0.0)?);
        for (index, coefficient) in COEFFICIENTS.into_iter().enumerate() {
            let below = self.plus(z, index as f64 + 1.0)?;
            let coefficient = self.like(z, coefficient)?;
            let term = self.div(coefficient, below)?;
            sum = self.add(sum, term)?;
            let term = self.div(term, below)?;
            slope = self.sub(slope, term)?;
        }
        Ok((sum, slope))
    }

    /// `x - 1`, or `-x` where the reflection formula is used, and where that is.
    fn reflected(&mut self, x: ValueId) -> Result<(ValueId, ValueId), Reject> {
        let small = self.test(x, Direction::Lt, 0.5)?;
        let (minus, less) = (self.unary(Unary::Negate, x)?, self.plus(x, -1.0)?);
        Ok((self.choose(small, minus, less)?, small))
    }

    /// `log |gamma(x)|`.
    fn lgamma(&mut self, x: ValueId) -> Value {
        let (z, small) = self.reflected(x)?;
        let (sum, _) = self.lanczos(z)?;
        let t = self.plus(z, 7.5)?;
        let ratio = self.times(z, 1.0 / 7.5)?;
        let log = self.unary(Unary::LogPlusOne, ratio)?;
        let log_t = self.plus(log, 7.5f64.ln())?;
        let shifted = self.plus(z, 0.5)?;
        let over = self.div(t, log_t)?;
        let power = self.sub(shifted, over)?;
        let power = self.mul(power, log_t)?;
        let log_sum = self.unary(Unary::Log, sum)?;
        let value = self.add(power, log_sum)?;
        let value = self.plus(value, (2.0 * PI).sqrt().ln())?;
        // log |gamma(x)| = log(pi / |sin(pi x)|) - log gamma(1 - x), with the sine of the distance to an integer.
        let size = self.unary(Unary::Abs, x)?;
        let floor = self.unary(Unary::Floor, size)?;
        let part = self.sub(size, floor)?;
        let rest = self.from(1.0, part)?;
        let part = self.binary(Binary::Minimum, part, rest)?;
        let angle = self.times(part, PI)?;
        let sine = self.unary(Unary::Sine, angle)?;
        let log_sine = self.unary(Unary::Log, sine)?;
        let reflected = self.from(PI.ln(), log_sine)?;
        let reflected = self.sub(reflected, value)?;
        let value = self.choose(small, reflected, value)?;
        let infinite = self.is_inf(x)?;
        let infinity = self.like(x, f64::INFINITY)?;
        self.choose(infinite, infinity, value)
    }

    /// The derivative of `log gamma`.
    fn digamma(&mut self, x: ValueId) -> Value {
        let (z, small) = self.reflected(x)?;
        let (sum, slope) = self.lanczos(z)?;
        let t = self.plus(z, 7.5)?;
        let ratio = self.times(z, 1.0 / 7.5)?;
        let log = self.unary(Unary::LogPlusOne, ratio)?;
        let log_t = self.plus(log, 7.5f64.ln())?;
        let relative = self.div(slope, sum)?;
        let seven = self.like(x, 7.0)?;
        let over = self.div(seven, t)?;
        let value = self.add(log_t, relative)?;
        let value = self.sub(value, over)?;
        // digamma(x) = digamma(1 - x) - pi / tan(pi x), with the tangent of the distance to an integer.
        let half = self.plus(x, 0.5)?;
        let nearest = self.unary(Unary::Floor, half)?;
        let part = self.sub(x, nearest)?;
        let angle = self.times(part, PI)?;
        let tangent = self.unary(Unary::Tan, angle)?;
        let pi = self.like(x, PI)?;
        let correction = self.div(pi, tangent)?;
        let reflected = self.sub(value, correction)?;
        let value = self.choose(small, reflected, value)?;
        // At zero and the negative integers it is not defined.
        let floor = self.unary(Unary::Floor, x)?;
        let whole = self.push(Op::Compare(Compare { direction: Direction::Eq }), &[x, floor])?;
        let negative = self.test(x, Direction::Le, 0.0)?;
        let pole = self.binary(Binary::And, whole, negative)?;
        let undefined = self.like(x, f64::NAN)?;
        self.choose(pole, undefined, value)
    }

    /// The number next to `x` in the direction of `y`: floats are in the order of their bits, which stand for an integer
    /// that counts up from zero on either side.
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
        // From zero of either sign the next number is the least one of the sign of the direction.
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
        // Opposite infinities have no sum either, but are numbers.
        let (x_known, y_known) =
            (self.push(compare(Direction::Eq), &[x, x])?, self.push(compare(Direction::Eq), &[y, y])?);
        let both = self.binary(Binary::And, x_known, y_known)?;
        let missing = self.unary(Unary::Not, both)?;
        let undefined = self.binary(Binary::And, undefined, missing)?;
        self.choose(undefined, sum, value)
    }

    fn is_inf(&mut self, x: ValueId) -> Value {
        let size = self.unary(Unary::Abs, x)?;
        self.is_pos_inf(size)
    }

    fn is_pos_inf(&mut self, x: ValueId) -> Value {
        self.test(x, Direction::Eq, f64::INFINITY)
    }

    fn is_neg_inf(&mut self, x: ValueId) -> Value {
        self.test(x, Direction::Eq, f64::NEG_INFINITY)
    }
}
