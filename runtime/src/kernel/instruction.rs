//! Instructions of fused chains, and the loops that execute them on blocks of elements.
//!
//! Floats and booleans (0 and 1) are computed in f32 registers. All integers are computed in i64 registers and wrapped
//! to their type after each op. A register is a block that stays in the L1 cache, so the cost of interpreting an
//! instruction is amortised over hundreds of elements.

use crate::element::{Element, integer_from_f64, integer_to_f64, round_float, wrap};
use crate::kernel::bitcast::{bits_of, element_of};
use crate::math;
use altiplano_ir::dtype::DType;
use altiplano_ir::float::reduce_precision;
use altiplano_ir::op::{Binary, Direction, ReducePrecision, Reducer, ThreefryWord, Unary};
use half::{bf16, f16};

/// Maximum number of operands of an instruction.
pub(crate) const MAX_OPERANDS: usize = 4;

/// The operation of an instruction. `F` reads and writes f32 registers, `I` i64 registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Code {
    FUnary(Unary),
    FBinary(Binary),
    FCompare(Direction),
    FSelect,
    /// Rounds to a narrower type.
    FRound(DType),
    /// Reduces the precision to fewer digits.
    FReduce(ReducePrecision, DType),
    /// `x != 0`.
    FToBool,
    IUnary(Unary, DType),
    IBinary(Binary, DType),
    /// Reads i64 registers, writes an f32 register.
    ICompare(Direction, DType),
    /// An f32 predicate, i64 alternatives.
    ISelect,
    IToBool,
    IToF(DType),
    FToI(DType),
    IWrap(DType),
    /// Reinterprets the bits as another type.
    FToFBits(DType, DType),
    FToIBits(DType, DType),
    IToFBits(DType, DType),
    /// The two words of the key, then those of the counter.
    IThreefry(ThreefryWord),
}

impl Code {
    /// Returns whether the result is in an i64 register.
    pub(crate) fn writes_integers(self) -> bool {
        let unary = matches!(self, Code::IUnary(..) | Code::FToI(_) | Code::IWrap(_) | Code::FToIBits(..));
        unary || matches!(self, Code::IBinary(..) | Code::ISelect | Code::IThreefry(_))
    }

    /// For each of the operands `a`, `b`, `c`, `d`, whether it is an i64 register.
    pub(crate) fn reads_integers(self) -> [bool; MAX_OPERANDS] {
        match self {
            Code::IUnary(..) | Code::IToBool | Code::IToF(_) | Code::IWrap(_) | Code::IToFBits(..) => {
                [true, false, false, false]
            }
            Code::IBinary(..) | Code::ICompare(..) => [true, true, false, false],
            Code::ISelect => [false, true, true, false],
            Code::IThreefry(_) => [true; MAX_OPERANDS],
            _ => [false; MAX_OPERANDS],
        }
    }

    /// The family of instructions with the same kind of loop, by its name in profiles, and the type of its registers.
    pub fn family(self) -> (&'static str, DType) {
        match self {
            Code::FUnary(op) => (op.name(), DType::F32),
            Code::FBinary(op) => (op.name(), DType::F32),
            Code::FCompare(_) | Code::FToBool => ("compare", DType::F32),
            Code::FSelect => ("select", DType::F32),
            Code::FRound(dtype) => ("round", dtype),
            Code::FReduce(..) => ("reduce_precision", DType::F32),
            Code::IUnary(..) => ("integer_unary", DType::I64),
            Code::IBinary(Binary::Add | Binary::Subtract | Binary::Multiply, _) => ("integer_add", DType::I64),
            Code::IBinary(..) => ("integer_binary", DType::I64),
            Code::ICompare(..) | Code::IToBool => ("compare", DType::I64),
            Code::ISelect => ("select", DType::I64),
            Code::IToF(_) => ("convert", DType::I64),
            Code::FToI(_) => ("convert", DType::F32),
            Code::IWrap(_) => ("wrap", DType::I64),
            Code::FToFBits(..) | Code::FToIBits(..) => ("bits", DType::F32),
            Code::IToFBits(..) => ("bits", DType::I64),
            Code::IThreefry(_) => ("threefry", DType::I64),
        }
    }

    pub fn operands(self) -> usize {
        match self {
            Code::IThreefry(_) => 4,
            Code::FSelect | Code::ISelect => 3,
            Code::FBinary(_) | Code::FCompare(_) | Code::IBinary(..) | Code::ICompare(..) => 2,
            _ => 1,
        }
    }
}

/// One instruction. Float and integer registers are numbered separately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Instruction {
    pub code: Code,
    pub target: u16,
    pub a: u16,
    pub b: u16,
    pub c: u16,
    pub d: u16,
}

/// The registers of one thread.
pub(crate) struct Registers {
    pub floats: Vec<Vec<f32>>,
    pub integers: Vec<Vec<i64>>,
}

macro_rules! map {
    ($target:expr, $a:expr, $x:ident => $result:expr) => {
        for (t, &$x) in $target.iter_mut().zip($a.iter()) {
            *t = $result;
        }
    };
    ($target:expr, $a:expr, $b:expr, $x:ident, $y:ident => $result:expr) => {
        for ((t, &$x), &$y) in $target.iter_mut().zip($a.iter()).zip($b.iter()) {
            *t = $result;
        }
    };
}

impl Registers {
    /// Executes one instruction on the first `n` elements.
    #[inline(always)]
    pub(crate) fn execute<const FMA: bool>(&mut self, i: &Instruction, n: usize) {
        if i.code.writes_integers() {
            let mut target = std::mem::take(&mut self.integers[i.target as usize]);
            self.integer_result(i, &mut target[..n], n);
            self.integers[i.target as usize] = target;
        } else {
            let mut target = std::mem::take(&mut self.floats[i.target as usize]);
            self.float_result::<FMA>(i, &mut target[..n], n);
            self.floats[i.target as usize] = target;
        }
    }

    #[inline(always)]
    fn float_result<const FMA: bool>(&self, i: &Instruction, target: &mut [f32], n: usize) {
        let float = |r: u16| &self.floats[r as usize][..n];
        let integer = |r: u16| &self.integers[r as usize][..n];
        match i.code {
            Code::FUnary(op) => unary::<FMA>(op, target, float(i.a)),
            Code::FBinary(op) => binary(op, target, float(i.a), float(i.b)),
            Code::FCompare(direction) => {
                let (a, b) = (float(i.a), float(i.b));
                match direction {
                    Direction::Eq => map!(target, a, b, x, y => if x == y { 1.0 } else { 0.0 }),
                    Direction::Ne => map!(target, a, b, x, y => if x != y { 1.0 } else { 0.0 }),
                    Direction::Lt => map!(target, a, b, x, y => if x < y { 1.0 } else { 0.0 }),
                    Direction::Le => map!(target, a, b, x, y => if x <= y { 1.0 } else { 0.0 }),
                    Direction::Gt => map!(target, a, b, x, y => if x > y { 1.0 } else { 0.0 }),
                    Direction::Ge => map!(target, a, b, x, y => if x >= y { 1.0 } else { 0.0 }),
                }
            }
            Code::FSelect => {
                let (p, a, b) = (float(i.a), float(i.b), float(i.c));
                for (((t, &p), &x), &y) in target.iter_mut().zip(p).zip(a).zip(b) {
                    *t = if p != 0.0 { x } else { y };
                }
            }
            Code::FRound(DType::F16) => map!(target, float(i.a), x => f16::from_f32(x).to_f32()),
            Code::FRound(DType::BF16) => map!(target, float(i.a), x => bf16::from_f32(x).to_f32()),
            Code::FRound(dtype) => map!(target, float(i.a), x => round_float(x, dtype)),
            Code::FReduce(op, dtype) => {
                if let Some(source) = dtype.float_format() {
                    let (exponent, mantissa) = (op.exponent_bits, op.mantissa_bits);
                    map!(target, float(i.a), x => reduce_precision(f64::from(x), exponent, mantissa, source) as f32);
                }
            }
            Code::IToFBits(DType::U32 | DType::I32, DType::F32) => {
                map!(target, integer(i.a), x => f32::from_bits(x as u32))
            }
            Code::IToFBits(_, to) => map!(target, integer(i.a), x => element_of(x as u64, to)),
            Code::FToFBits(from, to) => map!(target, float(i.a), x => element_of(bits_of(x, from), to)),
            Code::FToBool => map!(target, float(i.a), x => if x != 0.0 { 1.0 } else { 0.0 }),
            Code::IToBool => map!(target, integer(i.a), x => if x != 0 { 1.0 } else { 0.0 }),
            Code::IToF(DType::U64) => map!(target, integer(i.a), x => x as u64 as f32),
            Code::IToF(_) => map!(target, integer(i.a), x => x as f32),
            Code::ICompare(direction, dtype) => {
                // Flipping the sign bit orders unsigned numbers as signed ones.
                let flip = if dtype == DType::U64 { i64::MIN } else { 0 };
                let (a, b) = (integer(i.a), integer(i.b));
                match direction {
                    Direction::Eq => map!(target, a, b, x, y => if x == y { 1.0 } else { 0.0 }),
                    Direction::Ne => map!(target, a, b, x, y => if x != y { 1.0 } else { 0.0 }),
                    Direction::Lt => map!(target, a, b, x, y => if (x ^ flip) < (y ^ flip) { 1.0 } else { 0.0 }),
                    Direction::Le => map!(target, a, b, x, y => if (x ^ flip) <= (y ^ flip) { 1.0 } else { 0.0 }),
                    Direction::Gt => map!(target, a, b, x, y => if (x ^ flip) > (y ^ flip) { 1.0 } else { 0.0 }),
                    Direction::Ge => map!(target, a, b, x, y => if (x ^ flip) >= (y ^ flip) { 1.0 } else { 0.0 }),
                }
            }
            Code::IUnary(..) | Code::IBinary(..) | Code::ISelect | Code::FToI(_) | Code::IWrap(_) => {}
            Code::IThreefry(_) | Code::FToIBits(..) => {}
        }
    }

    #[inline(always)]
    fn integer_result(&self, i: &Instruction, target: &mut [i64], n: usize) {
        let float = |r: u16| &self.floats[r as usize][..n];
        let integer = |r: u16| &self.integers[r as usize][..n];
        match i.code {
            Code::IUnary(op, dtype) => map!(target, integer(i.a), x => integer_unary(op, x, dtype)),
            Code::IBinary(op, dtype) => {
                let (a, b) = (integer(i.a), integer(i.b));
                match op {
                    Binary::Add => map!(target, a, b, x, y => wrap(x.wrapping_add(y), dtype)),
                    Binary::Subtract => map!(target, a, b, x, y => wrap(x.wrapping_sub(y), dtype)),
                    Binary::Multiply => map!(target, a, b, x, y => wrap(x.wrapping_mul(y), dtype)),
                    _ => map!(target, a, b, x, y => integer_binary(op, x, y, dtype)),
                }
            }
            Code::ISelect => {
                let (p, a, b) = (float(i.a), integer(i.b), integer(i.c));
                for (((t, &p), &x), &y) in target.iter_mut().zip(p).zip(a).zip(b) {
                    *t = if p != 0.0 { x } else { y };
                }
            }
            Code::FToI(DType::U64) => map!(target, float(i.a), x => if x < 0.0 { x as i64 } else { x as u64 as i64 }),
            Code::FToI(dtype) => map!(target, float(i.a), x => wrap(x as i64, dtype)),
            Code::IWrap(dtype) => map!(target, integer(i.a), x => wrap(x, dtype)),
            Code::FToIBits(DType::F32, DType::U32) => map!(target, float(i.a), x => i64::from(x.to_bits())),
            Code::FToIBits(from, to) => map!(target, float(i.a), x => element_of(bits_of(x, from), to)),
            Code::IThreefry(word) => {
                let [a, b, c, d] = [i.a, i.b, i.c, i.d].map(integer);
                for (k, t) in target.iter_mut().enumerate() {
                    let [key, count] = [[a[k], b[k]], [c[k], d[k]]].map(|words| words.map(|x| x as u32));
                    *t = i64::from(word.of(key, count));
                }
            }
            _ => {}
        }
    }
}

#[inline(always)]
fn unary<const FMA: bool>(op: Unary, target: &mut [f32], a: &[f32]) {
    match op {
        Unary::Negate => map!(target, a, x => -x),
        Unary::Exponential => map!(target, a, x => math::exp::<FMA>(x)),
        Unary::ExponentialMinusOne => map!(target, a, x => math::exp_m1::<FMA>(x)),
        Unary::Log => map!(target, a, x => math::ln::<FMA>(x)),
        Unary::LogPlusOne => map!(target, a, x => math::ln_1p::<FMA>(x)),
        Unary::Logistic => map!(target, a, x => math::logistic::<FMA>(x)),
        Unary::Tanh => map!(target, a, x => math::tanh::<FMA>(x)),
        Unary::Sqrt => map!(target, a, x => x.sqrt()),
        Unary::Rsqrt => map!(target, a, x => 1.0 / x.sqrt()),
        Unary::Erf => map!(target, a, x => math::erf::<FMA>(x)),
        Unary::Erfc => map!(target, a, x => math::erfc::<FMA>(x)),
        Unary::Abs => map!(target, a, x => x.abs()),
        Unary::Sign => map!(target, a, x => if x == 0.0 || x.is_nan() { x } else { 1.0f32.copysign(x) }),
        Unary::Floor => map!(target, a, x => x.floor()),
        Unary::Ceil => map!(target, a, x => x.ceil()),
        Unary::RoundNearestEven => map!(target, a, x => x.round_ties_even()),
        Unary::RoundNearestAfz => map!(target, a, x => x.round()),
        Unary::Not => map!(target, a, x => if x == 0.0 { 1.0 } else { 0.0 }),
        Unary::IsFinite => map!(target, a, x => if x.is_finite() { 1.0 } else { 0.0 }),
        Unary::StopGradient => map!(target, a, x => x),
        // Rare, or only needed for tables of angles: the library's functions in double precision.
        Unary::Cbrt | Unary::Sine | Unary::Cosine | Unary::Tan => {
            map!(target, a, x => op.apply(x as f64, DType::F32) as f32)
        }
        // Integer ops only.
        Unary::PopulationCount | Unary::CountLeadingZeros => {}
    }
}

#[inline(always)]
fn binary(op: Binary, target: &mut [f32], a: &[f32], b: &[f32]) {
    match op {
        Binary::Add => map!(target, a, b, x, y => x + y),
        Binary::Subtract => map!(target, a, b, x, y => x - y),
        Binary::Multiply => map!(target, a, b, x, y => x * y),
        Binary::Divide => map!(target, a, b, x, y => x / y),
        // A NaN on either side is propagated.
        Binary::Maximum => map!(target, a, b, x, y => if x > y || x.is_nan() { x } else { y }),
        Binary::Minimum => map!(target, a, b, x, y => if x < y || x.is_nan() { x } else { y }),
        Binary::Power => map!(target, a, b, x, y => x.powf(y)),
        Binary::Remainder => map!(target, a, b, x, y => x % y),
        Binary::Atan2 => map!(target, a, b, x, y => x.atan2(y)),
        // Only booleans among the elements of f32 registers have these ops.
        Binary::And => map!(target, a, b, x, y => x * y),
        Binary::Or => map!(target, a, b, x, y => x.max(y)),
        Binary::Xor => map!(target, a, b, x, y => (x - y).abs()),
        // Integer ops only.
        Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => {}
    }
}

fn integer_unary(op: Unary, x: i64, dtype: DType) -> i64 {
    match op {
        Unary::Negate => wrap(x.wrapping_neg(), dtype),
        Unary::Not => wrap(!x, dtype),
        Unary::Abs if dtype.is_unsigned_integer() => x,
        Unary::Abs => wrap(x.wrapping_abs(), dtype),
        Unary::Sign if dtype.is_unsigned_integer() => (x != 0) as i64,
        Unary::Sign => x.signum(),
        Unary::PopulationCount => wrap(i64::from(low_bits(x, dtype).count_ones()), dtype),
        Unary::CountLeadingZeros => wrap(i64::from(low_bits(x, dtype).leading_zeros() + dtype.width() - 64), dtype),
        _ => x,
    }
}

/// The bits of a stored integer that belong to its type.
#[inline(always)]
fn low_bits(x: i64, dtype: DType) -> u64 {
    x as u64 & (u64::MAX >> (64 - dtype.width()))
}

/// Integer ops on stored integers of `dtype`, as StableHLO's reference defines them.
pub(crate) fn integer_binary(op: Binary, x: i64, y: i64, dtype: DType) -> i64 {
    let unsigned = dtype == DType::U64;
    let below = if unsigned { (x as u64) < y as u64 } else { x < y };
    match op {
        Binary::Add => wrap(x.wrapping_add(y), dtype),
        Binary::Subtract => wrap(x.wrapping_sub(y), dtype),
        Binary::Multiply => wrap(x.wrapping_mul(y), dtype),
        Binary::Divide if y == 0 => wrap(-1, dtype),
        Binary::Divide if unsigned => (x as u64 / y as u64) as i64,
        Binary::Divide => wrap(x.wrapping_div(y), dtype),
        Binary::Remainder if y == 0 => x,
        Binary::Remainder if unsigned => (x as u64 % y as u64) as i64,
        Binary::Remainder => wrap(x.wrapping_rem(y), dtype),
        Binary::Maximum => {
            if below {
                y
            } else {
                x
            }
        }
        Binary::Minimum => {
            if below {
                x
            } else {
                y
            }
        }
        Binary::And => x & y,
        Binary::Or => x | y,
        Binary::Xor => x ^ y,
        Binary::ShiftLeft | Binary::ShiftRightLogical => {
            let by = low_bits(y, dtype);
            match op {
                _ if by >= u64::from(dtype.width()) => 0,
                Binary::ShiftLeft => wrap(x << by, dtype),
                _ => wrap((low_bits(x, dtype) >> by) as i64, dtype),
            }
        }
        Binary::ShiftRightArithmetic => {
            // An arithmetic shift treats the highest bit as the sign, even in unsigned types.
            let unused = 64 - dtype.width();
            wrap(x << unused >> unused >> low_bits(y, dtype).min(u64::from(dtype.width() - 1)), dtype)
        }
        Binary::Power | Binary::Atan2 => {
            integer_from_f64(op.apply(integer_to_f64(x, dtype), integer_to_f64(y, dtype), dtype), dtype)
        }
    }
}

/// The reducer on f32 that combines two operands; booleans are 0 and 1.
pub(crate) fn float_reducer(reducer: Reducer, dtype: DType) -> Reducer {
    match reducer {
        Reducer::Sum | Reducer::Or if dtype == DType::Bool => Reducer::Max,
        Reducer::Product | Reducer::And if dtype == DType::Bool => Reducer::Min,
        other => other,
    }
}

/// Combines two partial results of a float reduction.
#[inline(always)]
pub(crate) fn combine(reducer: Reducer, x: f64, y: f64) -> f64 {
    match reducer {
        Reducer::Sum => x + y,
        Reducer::Product => x * y,
        Reducer::Max | Reducer::Or => {
            if x > y || x.is_nan() {
                x
            } else {
                y
            }
        }
        Reducer::Min | Reducer::And => {
            if x < y || x.is_nan() {
                x
            } else {
                y
            }
        }
    }
}

/// The neutral element of a float reduction.
pub(crate) fn neutral(reducer: Reducer) -> f64 {
    match reducer {
        Reducer::Sum => 0.0,
        Reducer::Product => 1.0,
        Reducer::Max | Reducer::Or => f64::NEG_INFINITY,
        Reducer::Min | Reducer::And => f64::INFINITY,
    }
}

/// Reduces a row of floats. Sums run in 16 lanes for at most 1024 elements before they move to f64, so that their error
/// does not grow with the row.
#[inline(always)]
pub(crate) fn reduce_row(reducer: Reducer, row: &[f32]) -> f64 {
    const LANES: usize = 16;
    macro_rules! lanes {
        ($neutral:expr, $part:expr, $x:ident, $y:ident => $combined:expr) => {{
            let mut sums = [$neutral; LANES];
            let chunks = $part.chunks_exact(LANES);
            let rest = chunks.remainder();
            for chunk in chunks {
                for (s, &$y) in sums.iter_mut().zip(chunk) {
                    let $x = *s;
                    *s = $combined;
                }
            }
            for (s, &$y) in sums.iter_mut().zip(rest) {
                let $x = *s;
                *s = $combined;
            }
            sums
        }};
    }
    let mut total = neutral(reducer);
    for part in row.chunks(1024) {
        let sums = match reducer {
            Reducer::Sum => lanes!(0.0f32, part, x, y => x + y),
            Reducer::Max | Reducer::Or => {
                lanes!(f32::NEG_INFINITY, part, x, y => if x > y || x.is_nan() { x } else { y })
            }
            Reducer::Min | Reducer::And => {
                lanes!(f32::INFINITY, part, x, y => if x < y || x.is_nan() { x } else { y })
            }
            Reducer::Product => {
                total = part.iter().fold(total, |t, &x| t * x as f64);
                continue;
            }
        };
        total = sums.iter().fold(total, |t, &s| combine(reducer, t, s as f64));
    }
    total
}

/// Reads elements of a format into a float register.
#[inline(always)]
pub(crate) fn load_floats<T: Element>(target: &mut [f32], source: &[T]) {
    map!(target, source, x => x.to_f32());
}

#[inline(always)]
pub(crate) fn load_integers<T: Element>(target: &mut [i64], source: &[T]) {
    map!(target, source, x => x.to_i64());
}
