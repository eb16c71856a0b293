//! Ops on the bits of elements: reinterpretation, rounding to fewer digits, and counter-based random numbers.

use super::*;
use crate::float::reduce_precision;
use crate::rule::FactorKind;

/// The same bits, read as elements of another type. If the new type is narrower, an extra last dimension holds the
/// parts of an element, lowest bits first. If it is wider, the last dimension is joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BitcastConvert {
    pub dtype: DType,
}

/// Rounds floats to the given bits of exponent and mantissa, and keeps their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReducePrecision {
    pub exponent_bits: u32,
    pub mantissa_bits: u32,
}

/// Random bits of Threefry-2x32 with 20 rounds (Salmon et al. 2011), JAX's default generator. The op is elementwise on
/// the key's two words and the counter's two words, all `u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Threefry {
    pub word: ThreefryWord,
}

/// Selects one of the two words that Threefry makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThreefryWord {
    First,
    Second,
    /// The bitwise xor of both.
    Xor,
}

impl ThreefryWord {
    pub const ALL: [ThreefryWord; 3] = [ThreefryWord::First, ThreefryWord::Second, ThreefryWord::Xor];

    pub fn name(self) -> &'static str {
        match self {
            ThreefryWord::First => "first",
            ThreefryWord::Second => "second",
            ThreefryWord::Xor => "xor",
        }
    }

    /// The selected word of the block for a key and a counter.
    #[inline]
    pub fn of(self, key: [u32; 2], count: [u32; 2]) -> u32 {
        let [first, second] = threefry2x32(key, count);
        match self {
            ThreefryWord::First => first,
            ThreefryWord::Second => second,
            ThreefryWord::Xor => first ^ second,
        }
    }
}

/// The block cipher: 20 rounds, with a part of the key added after each four.
#[inline]
fn threefry2x32(key: [u32; 2], count: [u32; 2]) -> [u32; 2] {
    const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
    let keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1bd1_1bda];
    let [mut a, mut b] = [count[0].wrapping_add(keys[0]), count[1].wrapping_add(keys[1])];
    for group in 0..5 {
        for rotation in ROTATIONS[group % 2] {
            a = a.wrapping_add(b);
            b = b.rotate_left(rotation) ^ a;
        }
        a = a.wrapping_add(keys[(group + 1) % 3]);
        b = b.wrapping_add(keys[(group + 2) % 3]).wrapping_add(group as u32 + 1);
    }
    [a, b]
}

impl Operator for BitcastConvert {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        let from = operands[0].dtype;
        for dtype in [from, self.dtype] {
            if dtype == DType::Bool {
                return Err(ShapeError::DType { dtype });
            }
        }
        let mut shape = operands[0].shape.clone();
        if self.dtype.width() < from.width() {
            shape.push(u64::from(from.width() / self.dtype.width()));
        } else if self.dtype.width() > from.width() {
            let parts = u64::from(self.dtype.width() / from.width());
            let last = shape.pop().ok_or(ShapeError::Attribute("a scalar cannot be cast to a wider type"))?;
            if last != parts {
                return Err(ShapeError::SizesDiffer { what: "parts of an element", left: last, right: parts });
            }
        }
        Ok(TensorType::new(self.dtype, shape))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule::default();
        let common = operands[0].rank().min(result.rank());
        let mut dims = |shape: &[u64]| -> Vec<Vec<u8>> {
            let f = |(d, &size): (usize, &u64)| match rule.factors.get(d) {
                Some(_) => vec![d as u8],
                None if d < common => vec![rule.factor(size, FactorKind::Parallel)],
                None => vec![rule.factor(size, FactorKind::Whole)],
            };
            shape.iter().enumerate().map(f).collect()
        };
        let (operand, result) = (dims(&operands[0].shape), dims(&result.shape));
        ShardingRule { operands: vec![operand], result, ..rule }
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::BitcastConvert(*self)
    }

    /// Zero, as in JAX: neither the bits of a number nor a number of its bits is a smooth function.
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![None]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (from, to) = (operands[0].ty.dtype, self.dtype);
        let bits = operands[0].data.iter().map(|&x| from.to_bits(x));
        let data = if to.width() <= from.width() {
            bits.flat_map(|b| (0..from.width()).step_by(to.width() as usize).map(move |at| to.from_bits(b >> at)))
                .collect()
        } else {
            let parts: Vec<u64> = bits.collect();
            let join = |parts: &[u64]| parts.iter().rev().fold(0, |all, part| all << from.width() | part);
            parts.chunks((to.width() / from.width()) as usize).map(|p| to.from_bits(join(p))).collect()
        };
        Tensor::new(result.clone(), data)
    }

    fn flop(&self, _: &[&TensorType], _: &TensorType) -> u64 {
        0
    }
}

impl Operator for ReducePrecision {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        let dtype = operands[0].dtype;
        if !dtype.is_float() {
            return Err(ShapeError::DType { dtype });
        }
        if !(1..=11).contains(&self.exponent_bits) || self.mantissa_bits > 52 {
            return Err(ShapeError::Attribute("exponent_bits must be 1 to 11, mantissa_bits at most 52"));
        }
        Ok(operands[0].clone())
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        ShardingRule::elementwise(&result.shape, 1, Vec::new())
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::ReducePrecision(*self)
    }

    /// Rounds the cotangent alike, as JAX does. The derivative of the rounding itself is zero almost everywhere.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![Some(cx.graph.emit(Op::ReducePrecision(*self), &[cx.cotangent]))]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let Some(source) = result.dtype.float_format() else { return operands[0].clone() };
        let round = |&x: &f64| reduce_precision(x, self.exponent_bits, self.mantissa_bits, source);
        Tensor::new(result.clone(), operands[0].data.iter().map(round).collect())
    }
}

impl Operator for Threefry {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 4)?;
        elementwise::same_shapes(operands, 0)?;
        match operands[0].dtype {
            DType::U32 => Ok(operands[0].clone()),
            dtype => Err(ShapeError::DType { dtype }),
        }
    }

    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        ShardingRule::elementwise(&result.shape, 4, Vec::new())
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Threefry(*self)
    }

    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![None; 4]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let word = |i: usize| {
            let at = |operand: usize| operands[operand].data[i] as u32;
            f64::from(self.word.of([at(0), at(1)], [at(2), at(3)]))
        };
        Tensor::new(result.clone(), (0..operands[0].data.len()).map(word).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors published with Random123 (`threefry2x32 20`).
    #[test]
    fn threefry_gives_the_published_answers() {
        let max = u32::MAX;
        for (count, key, expected) in [
            ([0, 0], [0, 0], [0x6b20_0159, 0x99ba_4efe]),
            ([max, max], [max, max], [0x1cb9_96fc, 0xbb00_2be7]),
            ([0x243f_6a88, 0x85a3_08d3], [0x1319_8a2e, 0x0370_7344], [0xc492_3a9c, 0x483d_f7a0]),
        ] {
            assert_eq!(threefry2x32(key, count), expected);
        }
    }

    #[test]
    fn bits_are_those_of_the_type() {
        let cast = |from: DType, values: &[f64], to: DType, expected: &[f64]| {
            let operand = Tensor::new(TensorType::new(from, [values.len() as u64]), values.to_vec());
            let op = BitcastConvert { dtype: to };
            let ty = op.infer(&[&operand.ty]).expect("a type");
            assert_eq!(op.eval(&[&operand], &ty).data, expected, "{from} to {to}");
        };
        cast(DType::F32, &[1.0, -2.0], DType::U32, &[0x3f80_0000 as f64, 0xc000_0000u32 as f64]);
        cast(DType::F32, &[1.0], DType::U16, &[0.0, 0x3f80 as f64]);
        cast(DType::U8, &[0.0, 0x3c as f64], DType::F16, &[1.0]);
        cast(DType::I32, &[-1.0], DType::I8, &[-1.0; 4]);
        cast(DType::U32, &[0x7fc0_0001 as f64, 1.0], DType::U64, &[(1u64 << 32 | 0x7fc0_0001) as f64]);
        cast(DType::BF16, &[f64::INFINITY], DType::I16, &[0x7f80 as f64]);
    }
}
