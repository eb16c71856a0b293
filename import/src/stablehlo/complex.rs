//! Lowers ops on complex numbers, stored as pairs of reals along a last dimension of two, and Fourier
//! transforms.

use super::convert::{Converter, Scope};
use super::lower::{Lowered, dims, exactly, result_type, sizes};
use super::report::Reject;
use super::syntax::{Attribute, Operation, TensorType as SyntaxTensor, Type};
use altiplano_ir::array::complex::{self as k, Pair};
use altiplano_ir::array::fourier::{fourier, real_fourier, real_inverse};
use altiplano_ir::array::{self as a, ShapeError};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Direction, Op};

const UNSUPPORTED: Reject = Reject::Unsupported("of complex numbers");

/// True if the text declares a complex type.
pub(super) fn is_complex(ty: &Type<'_>) -> bool {
    matches!(ty, Type::Tensor(SyntaxTensor { element, .. }) if element.starts_with("complex<"))
}

/// True if an op computes with complex numbers. Regions and calls pass complex values on unchanged.
pub(super) fn concerns(operation: &Operation<'_>) -> bool {
    operation.operand_types.iter().chain(&operation.result_types).any(is_complex)
        && !matches!(
            operation.name,
            "while"
                | "if"
                | "case"
                | "optimization_barrier"
                | "tuple"
                | "get_tuple_element"
                | "custom_call"
                | "constant"
        )
}

impl<'t, 'a> Converter<'t, 'a> {
    /// Runs array functions on the graph and records the nodes they append, as if this converter had appended
    /// them.
    pub fn arrays<T>(&mut self, f: impl FnOnce(&mut Graph) -> Result<T, ShapeError>) -> Result<T, Reject> {
        let before = self.graph.len();
        let name = self.module.location_name(self.location).unwrap_or_default().to_owned();
        let done = f(&mut self.graph);
        for node in &mut self.graph.nodes[before..] {
            node.name.clone_from(&name);
            self.knowledge.note(node);
        }
        Ok(done?)
    }

    /// An operand as its two parts. The imaginary part of a real operand is zero.
    fn pair(&mut self, operation: &Operation<'_>, operands: &[ValueId], at: usize) -> Result<Pair, Reject> {
        let x = *operands.get(at).ok_or(super::lower::count(at + 1, operands.len()))?;
        let complex = operation.operand_types.get(at).is_some_and(is_complex);
        self.arrays(|g| if complex { k::parts(g, x) } else { k::of_real(g, x) })
    }

    fn compared(&mut self, operation: &Operation<'_>, x: Pair, y: Pair) -> Result<ValueId, Reject> {
        let (direction, both) = match operation.attribute("comparison_direction").and_then(Attribute::as_word) {
            Some("EQ") => (Direction::Eq, Binary::And),
            Some("NE") => (Direction::Ne, Binary::Or),
            _ => return Err(UNSUPPORTED),
        };
        self.arrays(|g| {
            let (re, im) = (a::compare(g, direction, x[0], y[0])?, a::compare(g, direction, x[1], y[1])?);
            a::binary(g, both, re, im)
        })
    }

    fn complex_product(&mut self, operation: &'t Operation<'a>, x: Pair, y: Pair) -> Result<Pair, Reject> {
        let product = |c: &mut Self, x, y| Ok::<_, Reject>(c.dot(operation, &[x, y])?[0]);
        let (rr, ii) = (product(self, x[0], y[0])?, product(self, x[1], y[1])?);
        let (ri, ir) = (product(self, x[0], y[1])?, product(self, x[1], y[0])?);
        Ok([self.binary(Binary::Subtract, rr, ii)?, self.binary(Binary::Add, ri, ir)?])
    }

    /// Applies an op to each part alike.
    fn by_parts(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Result<Pair, Reject> {
        let mut parts = Vec::with_capacity(2);
        let pairs: Vec<Pair> = (0..operands.len())
            .map(|at| match operation.operand_types.get(at).is_some_and(is_complex) {
                true => self.pair(operation, operands, at),
                false => Ok([operands[at]; 2]),
            })
            .collect::<Result<_, _>>()?;
        for part in 0..2 {
            let own: Vec<ValueId> = pairs.iter().map(|pair| pair[part]).collect();
            match self.lower_real(operation, &own, scope)?.as_slice() {
                [only] => parts.push(*only),
                _ => return Err(UNSUPPORTED),
            }
        }
        Ok([parts[0], parts[1]])
    }

    pub(crate) fn complex_op(
        &mut self,
        operation: &'t Operation<'a>,
        operands: &[ValueId],
        scope: &Scope<'_, 't>,
    ) -> Lowered {
        let joined = |c: &mut Self, pair: Pair| Ok(vec![c.arrays(|g| k::join(g, pair))?]);
        let x = |c: &mut Self| c.pair(operation, operands, 0);
        let pair = match operation.name {
            "complex" => {
                let [re, im] = exactly(operands)?;
                return joined(self, [re, im]);
            }
            "real" => return Ok(vec![x(self)?[0]]),
            "imag" => return Ok(vec![x(self)?[1]]),
            "abs" => {
                let x = x(self)?;
                return Ok(vec![self.arrays(|g| k::complex_abs(g, x))?]);
            }
            "add" | "subtract" | "multiply" | "divide" => {
                let (x, y) = (x(self)?, self.pair(operation, operands, 1)?);
                self.arrays(|g| match operation.name {
                    "add" => k::complex_add(g, x, y),
                    "subtract" => k::complex_subtract(g, x, y),
                    "multiply" => k::complex_multiply(g, x, y),
                    _ => k::complex_divide(g, x, y),
                })?
            }
            "negate" | "conj" | "exponential" | "log" | "sqrt" | "square" => {
                let x = x(self)?;
                self.arrays(|g| match operation.name {
                    "negate" => k::scaled_by(g, x, -1.0),
                    "conj" => k::conjugate(g, x),
                    "exponential" => k::complex_exp(g, x),
                    "log" => k::complex_log(g, x),
                    "square" => k::complex_multiply(g, x, x),
                    _ => k::complex_sqrt(g, x),
                })?
            }
            "convert" => {
                let x = x(self)?;
                let ty = result_type(operation)?;
                if !operation.result_types.first().is_some_and(is_complex) {
                    return Ok(vec![self.converted(x[0], ty.dtype)?]);
                }
                [self.converted(x[0], ty.dtype)?, self.converted(x[1], ty.dtype)?]
            }
            "compare" => {
                let (x, y) = (x(self)?, self.pair(operation, operands, 1)?);
                return Ok(vec![self.compared(operation, x, y)?]);
            }
            "select" => {
                let [predicate, ..] = exactly::<3>(operands)?;
                let (x, y) = (self.pair(operation, operands, 1)?, self.pair(operation, operands, 2)?);
                self.arrays(|g| Ok([a::select(g, predicate, x[0], y[0])?, a::select(g, predicate, x[1], y[1])?]))?
            }
            "broadcast_in_dim" => {
                let (x, mut shape) = (x(self)?, result_type(operation)?.shape);
                shape.pop();
                let dims = dims(operation, "broadcast_dimensions")?;
                [self.broadcast(x[0], shape.clone(), dims.clone())?, self.broadcast(x[1], shape, dims)?]
            }
            "reshape" => {
                let (x, mut shape) = (x(self)?, result_type(operation)?.shape);
                shape.pop();
                [self.reshaped(x[0], shape.clone())?, self.reshaped(x[1], shape)?]
            }
            "dot_general" | "dot" => {
                let (x, y) = (x(self)?, self.pair(operation, operands, 1)?);
                self.complex_product(operation, x, y)?
            }
            "reduce" => self.complex_sum(operation, operands)?,
            "fft" => return self.fft(operation, operands),
            // Ops that only move or add elements apply to each part alike.
            "transpose"
            | "slice"
            | "concatenate"
            | "reverse"
            | "pad"
            | "gather"
            | "dynamic_slice"
            | "dynamic_update_slice"
            | "scatter" => self.by_parts(operation, operands, scope)?,
            _ => return Err(UNSUPPORTED),
        };
        joined(self, pair)
    }

    /// A reduction that adds, starting from zero.
    fn complex_sum(&mut self, operation: &'t Operation<'a>, operands: &[ValueId]) -> Result<Pair, Reject> {
        let adds = |region: &super::syntax::Region<'_>| matches!(region.operations.as_slice(), [add, end] if add.name == "add" && end.name == "return");
        if operands.len() != 2 || !operation.regions.first().is_some_and(adds) {
            return Err(UNSUPPORTED);
        }
        let (x, start) = (self.pair(operation, operands, 0)?, self.pair(operation, operands, 1)?);
        let dims = dims(operation, "dimensions")?;
        self.arrays(|g| {
            let sum = [a::sum(g, x[0], &dims, false)?, a::sum(g, x[1], &dims, false)?];
            k::complex_add(g, sum, start)
        })
    }

    fn fft(&mut self, operation: &Operation<'_>, operands: &[ValueId]) -> Lowered {
        let [x] = exactly(operands)?;
        let lengths = sizes(operation, "fft_length")?;
        let kind = operation.attribute("fft_type").and_then(Attribute::as_word).unwrap_or_default().to_owned();
        let pair = match kind.as_str() {
            "RFFT" => [x, x],
            _ => self.pair(operation, operands, 0)?,
        };
        let rank = self.graph.shape(pair[0]).len();
        let first = rank.checked_sub(lengths.len()).ok_or(super::lower::attribute("fft_length"))?;
        let Some((&last, _)) = lengths.split_last() else { return Err(super::lower::attribute("fft_length")) };
        let total: u64 = lengths.iter().product();
        let result = self.arrays(|g| {
            let mut pair = pair;
            Ok(match kind.as_str() {
                "FFT" | "IFFT" => {
                    let inverse = kind == "IFFT";
                    for dim in first..rank {
                        pair = fourier(g, pair, dim, inverse)?;
                    }
                    let pair = k::scaled_by(g, pair, if inverse { 1.0 / total as f64 } else { 1.0 })?;
                    Some(k::join(g, pair)?)
                }
                "RFFT" => {
                    pair = real_fourier(g, pair[0], rank - 1)?;
                    for dim in first..rank - 1 {
                        pair = fourier(g, pair, dim, false)?;
                    }
                    Some(k::join(g, pair)?)
                }
                "IRFFT" => {
                    for dim in first..rank - 1 {
                        pair = fourier(g, pair, dim, true)?;
                    }
                    let y = real_inverse(g, pair, rank - 1, last)?;
                    Some(a::with_number(g, Binary::Multiply, y, 1.0 / total as f64)?)
                }
                _ => None,
            })
        })?;
        result.map(|v| vec![v]).ok_or(super::lower::attribute("fft_type"))
    }

    /// Lowers an op on one part of its operands, without its declared result type, which is complex.
    fn lower_real(&mut self, operation: &'t Operation<'a>, operands: &[ValueId], scope: &Scope<'_, 't>) -> Lowered {
        match operation.name {
            "concatenate" => {
                let dim = super::lower::dim(operation, "dimension")?;
                self.one(Op::Concatenate(altiplano_ir::op::Concatenate { dim }), operands)
            }
            _ => self.lower_op(operation, operands, scope),
        }
    }
}
