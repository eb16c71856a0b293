//! Ops that compute each result element from the operands' elements at the same index.
//! [`Unary::apply`] and [`Binary::apply`] are the reference that every kernel is compared with.

use super::*;

/// Functions of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unary {
    Negate,
    Exponential,
    ExponentialMinusOne,
    Log,
    LogPlusOne,
    Logistic,
    Tanh,
    Sqrt,
    Rsqrt,
    Cbrt,
    Sine,
    Cosine,
    Tan,
    Erf,
    Erfc,
    Abs,
    Sign,
    Floor,
    Ceil,
    RoundNearestEven,
    RoundNearestAfz,
    Not,
    IsFinite,
    /// The number of one bits of an integer.
    PopulationCount,
    /// The number of leading zero bits of an integer.
    CountLeadingZeros,
    /// The element itself, through which no gradient flows.
    StopGradient,
}

/// Functions of two elements of one type. And, or and xor are bitwise on integers and logical on booleans. Shifts read
/// the second element as unsigned. A shift by the type's width or more shifts everything out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Maximum,
    Minimum,
    Power,
    Remainder,
    Atan2,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRightLogical,
    ShiftRightArithmetic,
}

/// The relation that [`Compare`] tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Direction {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// Compares two tensors of one type elementwise. The result is boolean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Compare {
    pub direction: Direction,
}

/// `select(predicate, on_true, on_false)`, all of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Select {}

/// Conversion to another element type. Float to integer truncates toward zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Convert {
    pub dtype: DType,
}

impl Unary {
    pub const ALL: [Unary; 26] = [
        Unary::Negate,
        Unary::Exponential,
        Unary::ExponentialMinusOne,
        Unary::Log,
        Unary::LogPlusOne,
        Unary::Logistic,
        Unary::Tanh,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Cbrt,
        Unary::Sine,
        Unary::Cosine,
        Unary::Tan,
        Unary::Erf,
        Unary::Erfc,
        Unary::Abs,
        Unary::Sign,
        Unary::Floor,
        Unary::Ceil,
        Unary::RoundNearestEven,
        Unary::RoundNearestAfz,
        Unary::Not,
        Unary::IsFinite,
        Unary::PopulationCount,
        Unary::CountLeadingZeros,
        Unary::StopGradient,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Unary::Negate => "negate",
            Unary::Exponential => "exponential",
            Unary::ExponentialMinusOne => "exponential_minus_one",
            Unary::Log => "log",
            Unary::LogPlusOne => "log_plus_one",
            Unary::Logistic => "logistic",
            Unary::Tanh => "tanh",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Cbrt => "cbrt",
            Unary::Sine => "sine",
            Unary::Cosine => "cosine",
            Unary::Tan => "tan",
            Unary::Erf => "erf",
            Unary::Erfc => "erfc",
            Unary::Abs => "abs",
            Unary::Sign => "sign",
            Unary::Floor => "floor",
            Unary::Ceil => "ceil",
            Unary::RoundNearestEven => "round_nearest_even",
            Unary::RoundNearestAfz => "round_nearest_afz",
            Unary::Not => "not",
            Unary::IsFinite => "is_finite",
            Unary::PopulationCount => "popcnt",
            Unary::CountLeadingZeros => "count_leading_zeros",
            Unary::StopGradient => "stop_gradient",
        }
    }

    /// The function in exact arithmetic. `dtype` is the operand's type, on which `not` depends.
    pub fn apply(self, x: f64, dtype: DType) -> f64 {
        match self {
            Unary::Negate if dtype.is_integer() => dtype.wrap_integer(-dtype.to_integer(x)),
            Unary::Negate => -x,
            Unary::Exponential => x.exp(),
            Unary::ExponentialMinusOne => x.exp_m1(),
            Unary::Log => x.ln(),
            Unary::LogPlusOne => x.ln_1p(),
            Unary::Logistic => 1.0 / (1.0 + (-x).exp()),
            Unary::Tanh => x.tanh(),
            Unary::Sqrt => x.sqrt(),
            Unary::Rsqrt => 1.0 / x.sqrt(),
            Unary::Cbrt => x.cbrt(),
            Unary::Sine => x.sin(),
            Unary::Cosine => x.cos(),
            Unary::Tan => x.tan(),
            Unary::Erf => libm::erf(x),
            Unary::Erfc => libm::erfc(x),
            Unary::Abs if dtype.is_integer() => dtype.wrap_integer(dtype.to_integer(x).abs()),
            Unary::Abs => x.abs(),
            Unary::Sign if x == 0.0 || x.is_nan() => x,
            Unary::Sign => x.signum(),
            Unary::Floor => x.floor(),
            Unary::Ceil => x.ceil(),
            Unary::RoundNearestEven => x.round_ties_even(),
            Unary::RoundNearestAfz => x.round(),
            Unary::Not if dtype == DType::Bool => (x == 0.0) as u8 as f64,
            Unary::Not => dtype.wrap_integer(!dtype.to_integer(x)),
            Unary::IsFinite => x.is_finite() as u8 as f64,
            Unary::PopulationCount => dtype.wrap_integer(dtype.to_bits(x).count_ones().into()),
            Unary::StopGradient => x,
            Unary::CountLeadingZeros => {
                dtype.wrap_integer((dtype.to_bits(x).leading_zeros() + dtype.width() - 64).into())
            }
        }
    }
}

impl Binary {
    pub const ALL: [Binary; 15] = [
        Binary::Add,
        Binary::Subtract,
        Binary::Multiply,
        Binary::Divide,
        Binary::Maximum,
        Binary::Minimum,
        Binary::Power,
        Binary::Remainder,
        Binary::Atan2,
        Binary::And,
        Binary::Or,
        Binary::Xor,
        Binary::ShiftLeft,
        Binary::ShiftRightLogical,
        Binary::ShiftRightArithmetic,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Subtract => "subtract",
            Binary::Multiply => "multiply",
            Binary::Divide => "divide",
            Binary::Maximum => "maximum",
            Binary::Minimum => "minimum",
            Binary::Power => "power",
            Binary::Remainder => "remainder",
            Binary::Atan2 => "atan2",
            Binary::And => "and",
            Binary::Or => "or",
            Binary::Xor => "xor",
            Binary::ShiftLeft => "shift_left",
            Binary::ShiftRightLogical => "shift_right_logical",
            Binary::ShiftRightArithmetic => "shift_right_arithmetic",
        }
    }

    /// The function in exact arithmetic on elements of type `dtype`. Integers wrap. Integer division truncates and
    /// gives -1 for a zero divisor, as StableHLO's reference does.
    pub fn apply(self, a: f64, b: f64, dtype: DType) -> f64 {
        let logical = dtype == DType::Bool;
        match self {
            Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => {
                let (bits, by, width) = (dtype.to_bits(a), dtype.to_bits(b), dtype.width());
                let unused = 64 - width;
                dtype.from_bits(match self {
                    Binary::ShiftRightArithmetic => {
                        ((bits << unused) as i64 >> unused >> by.min(u64::from(width - 1))) as u64
                    }
                    _ if by >= u64::from(width) => 0,
                    Binary::ShiftLeft => bits << by,
                    _ => bits >> by,
                })
            }
            _ if dtype.is_integer() => dtype.wrap_integer(self.on_integers(dtype.to_integer(a), dtype.to_integer(b))),
            Binary::Add | Binary::Or if logical => (a != 0.0 || b != 0.0) as u8 as f64,
            Binary::Multiply | Binary::And if logical => (a != 0.0 && b != 0.0) as u8 as f64,
            Binary::Xor if logical => (a != b) as u8 as f64,
            Binary::Add => a + b,
            Binary::Subtract => a - b,
            Binary::Multiply => a * b,
            Binary::Divide => a / b,
            Binary::Maximum if a.is_nan() || b.is_nan() => f64::NAN,
            Binary::Maximum => a.max(b),
            Binary::Minimum if a.is_nan() || b.is_nan() => f64::NAN,
            Binary::Minimum => a.min(b),
            Binary::Power => a.powf(b),
            Binary::Remainder => a % b,
            Binary::Atan2 => a.atan2(b),
            // Undefined for floats. Shape inference refuses it.
            Binary::And | Binary::Or | Binary::Xor => f64::NAN,
        }
    }

    /// The function on the integers that two elements stand for, before the result wraps.
    fn on_integers(self, a: i128, b: i128) -> i128 {
        match self {
            Binary::Add => a.wrapping_add(b),
            Binary::Subtract => a.wrapping_sub(b),
            Binary::Multiply => a.wrapping_mul(b),
            Binary::Divide => a.checked_div(b).unwrap_or(-1),
            Binary::Remainder => a.checked_rem(b).unwrap_or(a),
            Binary::Maximum => a.max(b),
            Binary::Minimum => a.min(b),
            Binary::Power => power(a, b),
            Binary::And => a & b,
            Binary::Or => a | b,
            Binary::Xor => a ^ b,
            // Undefined on integers, or defined on their bits only, which `apply` handles.
            Binary::Atan2 | Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => 0,
        }
    }
}

/// Integer power by squaring, modulo the type's range. A negative exponent gives the reciprocal, truncated.
fn power(base: i128, exponent: i128) -> i128 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut power, mut square, mut left) = (1i128, base, exponent);
    while left > 0 {
        if left % 2 == 1 {
            power = power.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        left /= 2;
    }
    power
}

/// A sum of products. Integer sums are exact until they wrap. For booleans, the sum is true if any pair is true.
pub(super) fn sum_of_products(pairs: impl Iterator<Item = (f64, f64)>, dtype: DType) -> f64 {
    if dtype.is_integer() {
        let product = |(a, b)| dtype.to_integer(a).wrapping_mul(dtype.to_integer(b));
        return dtype.wrap_integer(pairs.map(product).fold(0, i128::wrapping_add));
    }
    let product = |(a, b)| Binary::Multiply.apply(a, b, dtype);
    pairs.map(product).fold(0.0, |sum, x| Binary::Add.apply(sum, x, dtype))
}

/// A reduction in progress. Integers keep all their bits, so only the final value is rounded to an `f64`.
#[derive(Clone, Copy)]
pub(super) struct Running {
    op: Binary,
    dtype: DType,
    real: f64,
    integer: i128,
}

impl Running {
    pub(crate) fn new(reducer: Reducer, dtype: DType) -> Running {
        let neutral = reducer.neutral(dtype);
        Running { op: reducer.combine(), dtype, real: neutral, integer: dtype.to_integer(neutral) }
    }

    pub(crate) fn add(&mut self, x: f64) {
        if self.dtype.is_integer() {
            let wide = self.op.on_integers(self.integer, self.dtype.to_integer(x));
            self.integer = self.dtype.narrow_integer(wide);
        } else {
            self.real = self.op.apply(self.real, x, self.dtype);
        }
    }

    pub(crate) fn value(&self) -> f64 {
        if self.dtype.is_integer() { self.dtype.wrap_integer(self.integer) } else { self.real }
    }
}

impl Direction {
    pub fn holds<T: PartialOrd>(self, a: T, b: T) -> bool {
        match self {
            Direction::Eq => a == b,
            Direction::Ne => a != b,
            Direction::Lt => a < b,
            Direction::Le => a <= b,
            Direction::Gt => a > b,
            Direction::Ge => a >= b,
        }
    }
}

/// Checks that all operands have one shape and, from `first` on, one element type.
pub(super) fn same_shapes(operands: &[&TensorType], first: usize) -> Result<(), ShapeError> {
    for pair in operands.windows(2) {
        if pair[0].shape != pair[1].shape {
            return Err(ShapeError::ShapesDiffer { left: pair[0].shape.clone(), right: pair[1].shape.clone() });
        }
    }
    for pair in operands[first..].windows(2) {
        if pair[0].dtype != pair[1].dtype {
            return Err(ShapeError::DTypesDiffer { left: pair[0].dtype, right: pair[1].dtype });
        }
    }
    Ok(())
}

impl Operator for Unary {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        let dtype = operands[0].dtype;
        let defined = match self {
            Unary::Negate | Unary::Abs | Unary::Sign => dtype != DType::Bool,
            Unary::Not => !dtype.is_float(),
            Unary::PopulationCount | Unary::CountLeadingZeros => dtype.is_integer(),
            _ => dtype.is_float(),
        };
        match (defined, self) {
            (false, _) => Err(ShapeError::DType { dtype }),
            (true, Unary::IsFinite) => Ok(operands[0].with_dtype(DType::Bool)),
            (true, _) => Ok(operands[0].clone()),
        }
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = if matches!(self, Unary::Negate | Unary::StopGradient) { vec![vec![0]] } else { Vec::new() };
        ShardingRule::elementwise(&result.shape, 1, linear)
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Unary(*self)
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (x, y, g) = (cx.operands[0], cx.result, cx.cotangent);
        let graph = &mut *cx.graph;
        let slope = match self {
            Unary::Negate => return vec![Some(graph.unary(Unary::Negate, g))],
            Unary::Exponential => y,
            Unary::ExponentialMinusOne => {
                let one = graph.splat_like(y, 1.0);
                graph.add(y, one)
            }
            Unary::Log => return vec![Some(graph.div(g, x))],
            Unary::LogPlusOne => {
                let one = graph.splat_like(x, 1.0);
                let d = graph.add(x, one);
                return vec![Some(graph.div(g, d))];
            }
            Unary::Logistic => {
                let one = graph.splat_like(y, 1.0);
                let rest = graph.sub(one, y);
                graph.mul(y, rest)
            }
            Unary::Tanh => {
                let one = graph.splat_like(y, 1.0);
                let square = graph.mul(y, y);
                graph.sub(one, square)
            }
            Unary::Sqrt => {
                let half = graph.splat_like(y, 0.5);
                graph.div(half, y)
            }
            Unary::Rsqrt => {
                let minus_half = graph.splat_like(y, -0.5);
                let over_x = graph.div(y, x);
                graph.mul(minus_half, over_x)
            }
            Unary::Cbrt => {
                let third = graph.splat_like(y, 1.0 / 3.0);
                let over_x = graph.div(y, x);
                graph.mul(third, over_x)
            }
            Unary::Sine => graph.unary(Unary::Cosine, x),
            Unary::Cosine => {
                let sine = graph.unary(Unary::Sine, x);
                graph.unary(Unary::Negate, sine)
            }
            Unary::Tan => {
                let one = graph.splat_like(y, 1.0);
                let square = graph.mul(y, y);
                graph.add(one, square)
            }
            Unary::Erf | Unary::Erfc => {
                let sign = if *self == Unary::Erf { 1.0 } else { -1.0 };
                let square = graph.mul(x, x);
                let minus = graph.unary(Unary::Negate, square);
                let bell = graph.unary(Unary::Exponential, minus);
                let scale = graph.splat_like(x, sign * std::f64::consts::FRAC_2_SQRT_PI);
                graph.mul(scale, bell)
            }
            Unary::Abs => graph.unary(Unary::Sign, x),
            Unary::Sign
            | Unary::Floor
            | Unary::Ceil
            | Unary::RoundNearestEven
            | Unary::RoundNearestAfz
            | Unary::Not
            | Unary::IsFinite
            | Unary::PopulationCount
            | Unary::CountLeadingZeros
            | Unary::StopGradient => return vec![None],
        };
        vec![Some(graph.mul(g, slope))]
    }
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let dtype = operands[0].ty.dtype;
        Tensor::new(result.clone(), operands[0].data.iter().map(|&x| self.apply(x, dtype)).collect())
    }
}

impl Operator for Binary {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        same_shapes(operands, 0)?;
        let dtype = operands[0].dtype;
        let defined = match self {
            Binary::And | Binary::Or | Binary::Xor => !dtype.is_float(),
            Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => dtype.is_integer(),
            Binary::Atan2 => dtype.is_float(),
            Binary::Subtract | Binary::Divide | Binary::Power | Binary::Remainder => dtype != DType::Bool,
            _ => true,
        };
        if defined { Ok(operands[0].clone()) } else { Err(ShapeError::DType { dtype }) }
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = match self {
            _ if !result.dtype.is_float() => Vec::new(),
            Binary::Add | Binary::Subtract => vec![vec![0, 1]],
            Binary::Multiply => vec![vec![0], vec![1]],
            Binary::Divide => vec![vec![0]],
            _ => Vec::new(),
        };
        ShardingRule::elementwise(&result.shape, 2, linear)
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Binary(*self)
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (a, b, y, g) = (cx.operands[0], cx.operands[1], cx.result, cx.cotangent);
        let graph = &mut *cx.graph;
        let (want_a, want_b) = (cx.wanted[0], cx.wanted[1]);
        let mut da = None;
        let mut db = None;
        match self {
            Binary::Add => {
                da = Some(g);
                db = Some(g);
            }
            Binary::Subtract => {
                da = Some(g);
                db = want_b.then(|| graph.unary(Unary::Negate, g));
            }
            Binary::Multiply => {
                da = want_a.then(|| graph.mul(g, b));
                db = want_b.then(|| graph.mul(g, a));
            }
            Binary::Divide => {
                let over_b = graph.div(g, b);
                da = Some(over_b);
                db = want_b.then(|| {
                    let slope = graph.mul(over_b, y);
                    graph.unary(Unary::Negate, slope)
                });
            }
            Binary::Maximum | Binary::Minimum => {
                let (da_, db_) = graph.extremum_gradients(a, b, y, g, want_a, want_b);
                da = da_;
                db = db_;
            }
            Binary::Power => {
                da = want_a.then(|| {
                    let one = graph.splat_like(b, 1.0);
                    let less = graph.sub(b, one);
                    let power = graph.emit(Op::Binary(Binary::Power), &[a, less]);
                    let slope = graph.mul(b, power);
                    graph.mul(g, slope)
                });
                db = want_b.then(|| {
                    let log = graph.unary(Unary::Log, a);
                    let slope = graph.mul(y, log);
                    graph.mul(g, slope)
                });
            }
            Binary::Atan2 => {
                let aa = graph.mul(a, a);
                let bb = graph.mul(b, b);
                let norm = graph.add(aa, bb);
                let scaled = graph.div(g, norm);
                da = want_a.then(|| graph.mul(scaled, b));
                db = want_b.then(|| {
                    let minus = graph.unary(Unary::Negate, scaled);
                    graph.mul(minus, a)
                });
            }
            Binary::Remainder => {
                da = Some(g);
                db = want_b.then(|| {
                    let ratio = graph.div(a, b);
                    let down = graph.unary(Unary::Floor, ratio);
                    let up = graph.unary(Unary::Ceil, ratio);
                    let zero = graph.splat_like(ratio, 0.0);
                    let positive = graph.compare(Direction::Ge, ratio, zero);
                    let whole = graph.select(positive, down, up);
                    let slope = graph.unary(Unary::Negate, whole);
                    graph.mul(g, slope)
                });
            }
            Binary::And | Binary::Or | Binary::Xor => {}
            Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => {}
        }
        vec![da, db]
    }
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let pairs = operands[0].data.iter().zip(&operands[1].data);
        Tensor::new(result.clone(), pairs.map(|(&a, &b)| self.apply(a, b, result.dtype)).collect())
    }
}

impl Graph {
    /// The cotangents of `y = max(a, b)` (or min). Where both are equal, each gets half, as in JAX.
    fn extremum_gradients(
        &mut self,
        a: ValueId,
        b: ValueId,
        y: ValueId,
        g: ValueId,
        want_a: bool,
        want_b: bool,
    ) -> (Option<ValueId>, Option<ValueId>) {
        let zero = self.splat_like(g, 0.0);
        let half = self.splat_like(g, 0.5);
        let halved = self.mul(g, half);
        let ties = self.compare(Direction::Eq, a, b);
        let shared = self.select(ties, halved, g);
        let mut part = |x| {
            let chosen = self.compare(Direction::Eq, x, y);
            self.select(chosen, shared, zero)
        };
        (want_a.then(|| part(a)), want_b.then(|| part(b)))
    }
}

impl Operator for Compare {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        same_shapes(operands, 0)?;
        Ok(operands[0].with_dtype(DType::Bool))
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        ShardingRule::elementwise(&result.shape, 2, Vec::new())
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Compare(*self)
    }
    fn gradient(&self, _: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        vec![None, None]
    }
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let pairs = operands[0].data.iter().zip(&operands[1].data);
        Tensor::new(result.clone(), pairs.map(|(a, b)| self.direction.holds(a, b) as u8 as f64).collect())
    }
}

impl Operator for Select {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 3)?;
        same_shapes(operands, 1)?;
        if operands[0].dtype != DType::Bool {
            return Err(ShapeError::DType { dtype: operands[0].dtype });
        }
        Ok(operands[1].clone())
    }
    fn rule(&self, _: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = if result.dtype.is_float() { vec![vec![1, 2]] } else { Vec::new() };
        ShardingRule::elementwise(&result.shape, 3, linear)
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Select(*self)
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (predicate, g) = (cx.operands[0], cx.cotangent);
        let zero = cx.graph.splat_like(g, 0.0);
        let on_true = cx.wanted[1].then(|| cx.graph.select(predicate, g, zero));
        let on_false = cx.wanted[2].then(|| cx.graph.select(predicate, zero, g));
        vec![None, on_true, on_false]
    }
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let value = |i| if operands[0].data[i] != 0.0 { operands[1].data[i] } else { operands[2].data[i] };
        Tensor::new(result.clone(), (0..operands[0].data.len()).map(value).collect())
    }
}

impl Operator for Convert {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        Ok(operands[0].with_dtype(self.dtype))
    }
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = if operands[0].dtype.is_float() && result.dtype.is_float() { vec![vec![0]] } else { Vec::new() };
        ShardingRule::elementwise(&result.shape, 1, linear)
    }
    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::Convert(*self)
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let from = cx.graph.ty(cx.operands[0]).dtype;
        let both_float = from.is_float() && self.dtype.is_float();
        vec![both_float.then(|| cx.graph.convert(cx.cotangent, from))]
    }
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let from = operands[0].ty.dtype;
        let convert = |&x: &f64| match self.dtype {
            DType::Bool => (x != 0.0) as u8 as f64,
            d if d.is_integer() && from.is_float() => d.wrap(x.trunc()),
            d => d.wrap(x),
        };
        Tensor::new(result.clone(), operands[0].data.iter().map(convert).collect())
    }
}
