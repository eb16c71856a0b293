//! Lowers random bits: the cipher that JAX writes out, recognised by its values, and the generator op.

use std::collections::BTreeMap;

use super::convert::Converter;
use super::known::repeats_to;
use super::lower::{Lowered, exactly};
use super::report::{ImportError, Reject};
use super::syntax::{Attribute, Function, Operation};
use altiplano_ir::array::broadcast_shapes;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    Binary, BitcastConvert, Compare, Concatenate, Direction, Op, Operator, Reshape, Threefry, ThreefryWord,
};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// Keys and counters on which a function is compared with the cipher.
const PROBES: [[u32; 4]; 4] = [
    [0, 0, 0, 0],
    [u32::MAX, u32::MAX, u32::MAX, u32::MAX],
    [0x1319_8a2e, 0x0370_7344, 0x243f_6a88, 0x85a3_08d3],
    [7, 0xdead_beef, 0x8000_0000, 123_456_789],
];

/// Functions with fewer elements are tested at their own shape.
const SMALL: u64 = 64;

impl<'t, 'a> Converter<'t, 'a> {
    /// True if the function takes two words of a key and two of a counter, and returns both words of
    /// Threefry-2x32. It is converted once on stand-ins and tested on a few inputs; 128 equal bits are not a
    /// coincidence.
    pub(crate) fn is_threefry(&mut self, function: &'t Function<'a>) -> Result<bool, ImportError> {
        let types = |list: Vec<&super::syntax::Type>| -> Option<Vec<TensorType>> {
            let types: Option<Vec<TensorType>> = list.into_iter().map(super::literal::tensor_type).collect();
            types.filter(|types| types.iter().all(|ty| ty.dtype == DType::U32))
        };
        if function.arguments.len() != 4 || function.results.len() != 2 {
            return Ok(false);
        }
        let arguments = types(function.arguments.iter().map(|argument| &argument.ty).collect());
        let results = types(function.results.iter().map(|result| &result.ty).collect());
        let (Some(arguments), Some(results)) = (arguments, results) else {
            return Ok(false);
        };
        let ty = results[0].clone();
        // If keys are mapped over, keys and counters are repeated to a common shape.
        let fits = |argument: &TensorType| argument.rank() == 0 || repeats_to(&argument.shape, &ty.shape);
        if results[1] != ty || !arguments.iter().all(fits) || ty.elements() == 0 {
            return Ok(false);
        }
        let stand_ins: Vec<ValueId> = arguments.iter().map(|ty| self.probe(ty)).collect();
        let values = self.inline_body(function, stand_ins.clone(), function.place)?;
        // Large tensors are tested with one element in place of all, which does not affect elementwise ops.
        let is_small = ty.elements() <= SMALL;
        let tried = if is_small { ty.clone() } else { ty.with_shape([1]) };
        let shape = if is_small { &[] } else { ty.shape.as_slice() };
        for probe in PROBES {
            let mut given = BTreeMap::new();
            let mut operands = Vec::new();
            for (position, (&stand_in, argument)) in stand_ins.iter().zip(&arguments).enumerate() {
                let n = if is_small { argument.elements() as u32 } else { 1 };
                // All elements differ.
                let elements: Vec<f64> = (0..n).map(|i| f64::from(probe[position].wrapping_add(i))).collect();
                let own = if is_small { argument.shape.as_slice() } else { &[] };
                operands.push(repeated(&elements, own, &tried));
                given.insert(stand_in, elements);
            }
            let operands: Vec<&Tensor> = operands.iter().collect();
            for (value, word) in values.iter().zip([ThreefryWord::First, ThreefryWord::Second]) {
                let expected = Threefry { word }.eval(&operands, &tried).data;
                if self.elements_of(*value, &given, shape, expected.len()).as_ref() != Some(&expected) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Both words of the cipher.
    pub fn threefry(&mut self, operands: &[ValueId]) -> Lowered {
        let given: [ValueId; 4] = exactly(operands)?;
        let mut shape = Vec::new();
        for &operand in &given {
            shape = broadcast_shapes(&shape, self.graph.shape(operand))?;
        }
        let mut operands = Vec::with_capacity(given.len());
        for operand in given {
            let dims = (0..self.graph.ty(operand).rank()).collect();
            operands.push(self.broadcast(operand, shape.clone(), dims)?);
        }
        let first = self.push(Op::Threefry(Threefry { word: ThreefryWord::First }), &operands)?;
        let second = self.push(Op::Threefry(Threefry { word: ThreefryWord::Second }), &operands)?;
        Ok(vec![first, second])
    }

    /// Bits from a state of a key and a counter, and the state with an advanced counter.
    ///
    /// All algorithms use Threefry-2x32 in counter mode. The bits of `THREE_FRY` and `PHILOX` therefore differ
    /// from those of a given XLA version; `DEFAULT` leaves the choice open anyway.
    pub(crate) fn random_bits(&mut self, operation: &Operation, operands: &[ValueId]) -> Lowered {
        let [state] = exactly(operands)?;
        let [_, result] = operation.result_types.as_slice() else {
            return Err(Reject::Invalid(super::report::ProblemKind::ResultCount {
                expected: 2,
                found: operation.result_types.len(),
            }));
        };
        let algorithm = operation.attribute("rng_algorithm").and_then(Attribute::as_word);
        if !matches!(algorithm, Some("DEFAULT" | "THREE_FRY" | "PHILOX")) {
            return Err(super::lower::attribute("rng_algorithm"));
        }
        let result = super::literal::tensor_type(result).ok_or(Reject::Unsupported("with a result of this type"))?;
        let ty = self.graph.ty(state).clone();
        // The last of the three words of a Philox state is the upper half of the counter, which does not
        // change.
        let words = match (ty.dtype, ty.shape.as_slice()) {
            (DType::U64, [2 | 3]) => self.cast(state, DType::U32)?,
            (DType::U32, [4 | 6]) => state,
            _ => return Err(Reject::Unsupported("with a state that is no key and counter")),
        };
        let count = self.graph.ty(words).elements();
        let words = self.reshaped(words, vec![count])?;
        let mut word = |at: u64| -> Result<ValueId, Reject> {
            let row = self.rows(words, 0, at, at + 1)?;
            self.reshaped(row, Vec::new())
        };
        let (key0, key1, low, high) = (word(0)?, word(1)?, word(2)?, word(3)?);
        let wide = result.dtype.bytes() == 8;
        let counters = result.with_dtype(DType::U32);
        let base = self.broadcast(high, counters.shape.clone(), Vec::new())?;
        let start = self.broadcast(low, counters.shape.clone(), Vec::new())?;
        let index = self.linear_index(&counters)?;
        let (count1, carry) = self.add_word(start, index)?;
        let count0 = self.binary(Binary::Add, base, carry)?;
        let [first, second] = self.threefry(&[key0, key1, count0, count1])?[..] else {
            return Err(Reject::Unsupported(""));
        };
        let bits = match wide {
            false => {
                let bits = self.binary(Binary::Xor, first, second)?;
                let unsigned = match result.dtype.bytes() {
                    1 => DType::U8,
                    2 => DType::U16,
                    _ => DType::U32,
                };
                let bits = self.converted(bits, unsigned)?;
                self.cast(bits, result.dtype)?
            }
            true => {
                let mut pair = counters.shape.clone();
                pair.push(1);
                let (first, second) = (self.reshaped(first, pair.clone())?, self.reshaped(second, pair)?);
                let dim = counters.rank();
                let both = self.push(Op::Concatenate(Concatenate { dim }), &[first, second])?;
                self.cast(both, result.dtype)?
            }
        };
        let used = self.word(counters.elements() as u32)?;
        let (moved, carry) = self.add_word(low, used)?;
        let above = self.binary(Binary::Add, high, carry)?;
        let mut parts = vec![self.rows(words, 0, 0, 2)?];
        for word in [moved, above] {
            parts.push(self.push(Op::Reshape(Reshape { shape: vec![1] }), &[word])?);
        }
        if count > 4 {
            parts.push(self.rows(words, 0, 4, count)?);
        }
        let words = self.push(Op::Concatenate(Concatenate { dim: 0 }), &parts)?;
        let state = match ty.dtype {
            DType::U64 => {
                let pairs = self.reshaped(words, vec![count / 2, 2])?;
                self.cast(pairs, DType::U64)?
            }
            _ => words,
        };
        Ok(vec![state, bits])
    }

    /// The sum of two words, and a carry of one if it overflowed.
    fn add_word(&mut self, a: ValueId, b: ValueId) -> Result<(ValueId, ValueId), Reject> {
        let sum = self.binary(Binary::Add, a, b)?;
        let wrapped = self.push(Op::Compare(Compare { direction: Direction::Lt }), &[sum, a])?;
        Ok((sum, self.converted(wrapped, DType::U32)?))
    }

    fn word(&mut self, value: u32) -> Result<ValueId, Reject> {
        Ok(self.push(Op::Constant(Literal::splat(TensorType::scalar(DType::U32), f64::from(value))), &[])?)
    }

    /// The row-major number of each element, modulo 2^32.
    fn linear_index(&mut self, ty: &TensorType) -> Result<ValueId, Reject> {
        let strides = altiplano_ir::types::strides(&ty.shape);
        let mut sum = None;
        for (dim, stride) in strides.into_iter().enumerate() {
            let along = self.iota(ty.clone(), dim)?;
            let stride = self.word(stride as u32)?;
            let stride = self.broadcast_scalar(stride, along)?;
            let part = self.binary(Binary::Multiply, along, stride)?;
            sum = Some(match sum {
                Some(sum) => self.binary(Binary::Add, sum, part)?,
                None => part,
            });
        }
        match sum {
            Some(sum) => Ok(sum),
            None => self.word(0),
        }
    }

    /// Reinterprets the bits as another type. Casting back returns the original value.
    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId, Reject> {
        let node = self.graph.node(x);
        if node.ty.dtype == dtype {
            return Ok(x);
        }
        if let (Op::BitcastConvert(_), [source]) = (&node.op, node.operands.as_slice())
            && self.graph.ty(*source).dtype == dtype
        {
            return Ok(*source);
        }
        Ok(self.push(Op::BitcastConvert(BitcastConvert { dtype }), &[x])?)
    }
}

/// Elements of a tensor of shape `own`, repeated to `ty`.
fn repeated(elements: &[f64], own: &[u64], ty: &TensorType) -> Tensor {
    let strides = altiplano_ir::types::strides(own);
    Tensor::from_fn(ty.clone(), |index| {
        let steps = own.iter().zip(&strides).zip(index);
        let at: u64 = steps.map(|((&size, stride), &i)| if size == 1 { 0 } else { i * stride }).sum();
        elements[at as usize]
    })
}
