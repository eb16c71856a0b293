//! Ops of the IR as expressions of `jax.lax`. Every expression has the shape and the element type of its node.

use super::quoted;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::{Literal, Values};
use altiplano_ir::op::{
    Binary, Combine, Convolution, Direction, Extremum, GatherDims, Microbatches, Op, OutOfBounds, Reducer,
    ThreefryWord, Unary, WindowDim,
};
use std::fmt::Write;

/// The most elements of a constant that is written as a list of numbers. Longer ones are written as bytes.
const LISTED: usize = 64;

/// The expression of a node whose operands are the expressions `x`. `None` if the op has none: it occurs only in local
/// or backward graphs.
pub(super) fn expression(graph: &Graph, v: ValueId, x: &[String], microbatches: u32) -> Option<String> {
    let node = graph.node(v);
    let (dtype, shape) = (node.ty.dtype, tuple(&node.ty.shape));
    let operand = |i: usize| graph.ty(node.operands[i]);
    let first = x.first().map_or("", String::as_str);
    Some(match &node.op {
        Op::Constant(literal) => constant(literal),
        Op::Iota(op) => format!("lax.broadcasted_iota({}, {shape}, {})", name(dtype), op.dim),
        Op::Unary(op) => unary(*op, first),
        Op::Binary(op) => format!("lax.{}({}, {})", binary(*op, dtype), x[0], x[1]),
        Op::Compare(op) => format!("lax.{}({}, {})", direction(op.direction), x[0], x[1]),
        Op::Select(_) => format!("lax.select({})", x.join(", ")),
        Op::Convert(_) => format!("lax.convert_element_type({first}, {})", name(dtype)),
        Op::BitcastConvert(_) => format!("lax.bitcast_convert_type({first}, {})", name(dtype)),
        Op::ReducePrecision(op) => format!("lax.reduce_precision({first}, {}, {})", op.exponent_bits, op.mantissa_bits),
        Op::Threefry(op) => format!("_threefry({}, {})", quoted(word(op.word)), x.join(", ")),
        Op::BroadcastInDim(op) => format!("lax.broadcast_in_dim({first}, {shape}, {})", tuple(&op.dims)),
        Op::Reshape(_) => format!("lax.reshape({first}, {shape})"),
        Op::Transpose(op) => format!("lax.transpose({first}, {})", tuple(&op.permutation)),
        Op::Reverse(op) => format!("lax.rev({first}, {})", tuple(&op.dims)),
        Op::Roll(op) => format!("jnp.roll({first}, -{}, {})", op.by, op.dim),
        Op::Slice(op) => {
            let steps =
                if op.stride.iter().all(|&s| s == 1) { String::new() } else { format!(", {}", tuple(&op.stride)) };
            format!("lax.slice({first}, {}, {}{steps})", tuple(&op.start), tuple(&op.limit))
        }
        Op::Concatenate(op) => format!("lax.concatenate([{}], {})", x.join(", "), op.dim),
        Op::Pad(op) => {
            let dims = op.low.iter().zip(&op.high).zip(&op.interior);
            let dims: Vec<String> = dims.map(|((low, high), inside)| format!("({low}, {high}, {inside})")).collect();
            format!("lax.pad({}, {}, [{}])", x[0], x[1], dims.join(", "))
        }
        Op::Reduce(op) => format!("lax.{}({first}, {})", reduction(op.reducer, dtype), tuple(&op.dims)),
        Op::Cumulative(op) => {
            let reverse = if op.reverse { "True" } else { "False" };
            match running(op.reducer, dtype) {
                Some(function) => format!("lax.{function}({first}, {}, {reverse})", op.dim),
                None => {
                    let combine = binary(op.reducer.combine(), dtype);
                    format!("lax.associative_scan(lax.{combine}, {first}, axis={}, reverse={reverse})", op.dim)
                }
            }
        }
        Op::ArgSort(op) => {
            let keys: Vec<&str> = op.descending.iter().map(|&d| if d { "True" } else { "False" }).collect();
            format!("_arg_sort([{}], [{}], {})", x.join(", "), keys.join(", "), op.dim)
        }
        Op::DotGeneral(op) => format!(
            "lax.dot_general({}, {}, (({}, {}), ({}, {})), preferred_element_type={})",
            x[0],
            x[1],
            tuple(&op.lhs_contract),
            tuple(&op.rhs_contract),
            tuple(&op.lhs_batch),
            tuple(&op.rhs_batch),
            name(dtype)
        ),
        Op::Convolution(op) => convolution(op, x, dtype),
        Op::ReduceWindow(op) => window(op.reducer, &op.window, first, dtype),
        Op::Gather(op) => gather(&op.dims, op.out_of_bounds, x, operand(1).rank()),
        Op::ScatterAdd(op) => {
            let zeros = format!("lax.full({}, 0, {})", tuple(&op.shape), name(dtype));
            scatter("scatter_add", &op.dims, [&zeros, &x[0], &x[1]], operand(0).rank())
        }
        Op::Scatter(op) => scatter(combine(op.combine), &op.dims, [&x[0], &x[1], &x[2]], operand(1).rank()),
        Op::GroupedDot(op) => format!("_grouped_dot({}, {})", x.join(", "), op.contract),
        Op::Microbatches(Microbatches::Times) if microbatches > 1 => format!("{first} * {microbatches}"),
        Op::Microbatches(_) => first.to_string(),
        Op::SelectAndScatter(op) => select_and_scatter(op.select, &op.window, x),
        Op::Parameter(_)
        | Op::Input(_)
        | Op::Composite(_)
        | Op::GroupedOuter(_)
        | Op::Collective(_)
        | Op::AxisIndex(_)
        | Op::HostCopy(_) => return None,
    })
}

/// A tuple of Python.
pub(super) fn tuple<T: ToString>(items: &[T]) -> String {
    match items {
        [one] => format!("({},)", one.to_string()),
        _ => format!("({})", items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// The name of an element type, as a string of Python.
pub(super) fn name(dtype: DType) -> String {
    quoted(match dtype {
        DType::F64 => "float64",
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        DType::F8E4M3FN => "float8_e4m3fn",
        DType::F8E5M2 => "float8_e5m2",
        DType::F8E4M3 => "float8_e4m3",
        DType::F8E3M4 => "float8_e3m4",
        DType::F8E4M3FNUZ => "float8_e4m3fnuz",
        DType::F8E5M2FNUZ => "float8_e5m2fnuz",
        DType::F8E4M3B11FNUZ => "float8_e4m3b11fnuz",
        DType::F8E8M0FNU => "float8_e8m0fnu",
        DType::I64 => "int64",
        DType::I32 => "int32",
        DType::I16 => "int16",
        DType::I8 => "int8",
        DType::I4 => "int4",
        DType::I2 => "int2",
        DType::U64 => "uint64",
        DType::U32 => "uint32",
        DType::U16 => "uint16",
        DType::U8 => "uint8",
        DType::U4 => "uint4",
        DType::U2 => "uint2",
        DType::Bool => "bool",
    })
}

fn number(x: f64, dtype: DType) -> String {
    match x {
        _ if dtype == DType::Bool => if x == 0.0 { "False" } else { "True" }.to_string(),
        x if x.is_nan() => "float('nan')".to_string(),
        f64::INFINITY => "float('inf')".to_string(),
        f64::NEG_INFINITY => "float('-inf')".to_string(),
        x if dtype.is_integer() => format!("{x:.0}"),
        x => format!("{x:?}"),
    }
}

fn constant(literal: &Literal) -> String {
    let (dtype, shape) = (literal.ty.dtype, tuple(&literal.ty.shape));
    match &literal.values {
        Values::Splat(value) => format!("lax.full({shape}, {}, {})", number(value.0, dtype), name(dtype)),
        Values::Dense(values) if values.len() <= LISTED => {
            let numbers: Vec<String> = values.iter().map(|v| number(v.0, dtype)).collect();
            format!("_array([{}], {shape}, {})", numbers.join(", "), name(dtype))
        }
        Values::Dense(values) => {
            let mut hex = String::with_capacity(16 * values.len());
            for byte in values.iter().flat_map(|v| v.0.to_le_bytes()) {
                let _ = write!(hex, "{byte:02x}");
            }
            format!("_array(numpy.frombuffer(bytes.fromhex(\"{hex}\"), '<f8'), {shape}, {})", name(dtype))
        }
    }
}

fn unary(op: Unary, x: &str) -> String {
    let function = match op {
        Unary::Negate => "neg",
        Unary::Exponential => "exp",
        Unary::ExponentialMinusOne => "expm1",
        Unary::Log => "log",
        Unary::LogPlusOne => "log1p",
        Unary::Logistic => "logistic",
        Unary::Tanh => "tanh",
        Unary::Sqrt => "sqrt",
        Unary::Rsqrt => "rsqrt",
        Unary::Cbrt => "cbrt",
        Unary::Sine => "sin",
        Unary::Cosine => "cos",
        Unary::Tan => "tan",
        Unary::Erf => "erf",
        Unary::Erfc => "erfc",
        Unary::Abs => "abs",
        Unary::Sign => "sign",
        Unary::Floor => "floor",
        Unary::Ceil => "ceil",
        Unary::RoundNearestEven => return format!("lax.round({x}, lax.RoundingMethod.TO_NEAREST_EVEN)"),
        Unary::RoundNearestAfz => return format!("lax.round({x}, lax.RoundingMethod.AWAY_FROM_ZERO)"),
        Unary::Not => "bitwise_not",
        Unary::IsFinite => "is_finite",
        Unary::PopulationCount => "population_count",
        Unary::CountLeadingZeros => "clz",
        Unary::StopGradient => "stop_gradient",
    };
    format!("lax.{function}({x})")
}

fn binary(op: Binary, dtype: DType) -> &'static str {
    match op {
        // Sums and products of truth values.
        Binary::Add if dtype == DType::Bool => "bitwise_or",
        Binary::Multiply if dtype == DType::Bool => "bitwise_and",
        Binary::Add => "add",
        Binary::Subtract => "sub",
        Binary::Multiply => "mul",
        Binary::Divide => "div",
        Binary::Maximum => "max",
        Binary::Minimum => "min",
        Binary::Power => "pow",
        Binary::Remainder => "rem",
        Binary::Atan2 => "atan2",
        Binary::And => "bitwise_and",
        Binary::Or => "bitwise_or",
        Binary::Xor => "bitwise_xor",
        Binary::ShiftLeft => "shift_left",
        Binary::ShiftRightLogical => "shift_right_logical",
        Binary::ShiftRightArithmetic => "shift_right_arithmetic",
    }
}

fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::Eq => "eq",
        Direction::Ne => "ne",
        Direction::Lt => "lt",
        Direction::Le => "le",
        Direction::Gt => "gt",
        Direction::Ge => "ge",
    }
}

fn word(word: ThreefryWord) -> &'static str {
    match word {
        ThreefryWord::First => "first",
        ThreefryWord::Second => "second",
        ThreefryWord::Xor => "xor",
    }
}

fn reduction(reducer: Reducer, dtype: DType) -> &'static str {
    match reducer {
        Reducer::Sum if dtype == DType::Bool => "reduce_or",
        Reducer::Product if dtype == DType::Bool => "reduce_and",
        Reducer::Sum => "reduce_sum",
        Reducer::Product => "reduce_prod",
        Reducer::Max => "reduce_max",
        Reducer::Min => "reduce_min",
        Reducer::And => "reduce_and",
        Reducer::Or => "reduce_or",
    }
}

/// The function that combines all that comes before, if there is one.
fn running(reducer: Reducer, dtype: DType) -> Option<&'static str> {
    match reducer {
        _ if dtype == DType::Bool => None,
        Reducer::Sum => Some("cumsum"),
        Reducer::Product => Some("cumprod"),
        Reducer::Max => Some("cummax"),
        Reducer::Min => Some("cummin"),
        Reducer::And | Reducer::Or => None,
    }
}

fn combine(combine: Combine) -> &'static str {
    match combine {
        Combine::Replace => "scatter",
        Combine::Multiply => "scatter_mul",
        Combine::Minimum => "scatter_min",
        Combine::Maximum => "scatter_max",
    }
}

fn padding(window: &[WindowDim]) -> String {
    let dims: Vec<String> = window.iter().map(|w| format!("({}, {})", w.pad_low, w.pad_high)).collect();
    format!("[{}]", dims.join(", "))
}

fn each(window: &[WindowDim], of: impl Fn(&WindowDim) -> u64) -> String {
    tuple(&window.iter().map(of).collect::<Vec<_>>())
}

fn convolution(op: &Convolution, x: &[String], dtype: DType) -> String {
    let dims = |first: usize, second: usize, spatial: &[usize]| tuple(&[&[first, second], spatial].concat());
    let turned: Vec<usize> =
        op.window.iter().zip(&op.rhs.spatial).filter(|(w, _)| w.reversed).map(|(_, &d)| d).collect();
    let kernel = if turned.is_empty() { x[1].clone() } else { format!("lax.rev({}, {})", x[1], tuple(&turned)) };
    format!(
        "lax.conv_general_dilated({}, {kernel}, {}, {}, {}, {}, lax.ConvDimensionNumbers({}, {}, {}), {}, {}, \
         preferred_element_type={})",
        x[0],
        each(&op.window, |w| w.stride),
        padding(&op.window),
        each(&op.window, |w| w.base_dilation),
        each(&op.window, |w| w.window_dilation),
        dims(op.lhs.batch, op.lhs.feature, &op.lhs.spatial),
        dims(op.rhs.output, op.rhs.input, &op.rhs.spatial),
        dims(op.result.batch, op.result.feature, &op.result.spatial),
        op.feature_groups,
        op.batch_groups,
        name(dtype),
    )
}

fn window(reducer: Reducer, window: &[WindowDim], x: &str, dtype: DType) -> String {
    // JAX differentiates windows of maxima that begin with minus infinity, and of sums that begin with zero.
    let start = match reducer {
        Reducer::Max if dtype.is_float() => f64::NEG_INFINITY,
        Reducer::Min if dtype.is_float() => f64::INFINITY,
        _ => reducer.neutral(dtype),
    };
    format!(
        "lax.reduce_window({x}, _scalar({}, {}), lax.{}, {}, {}, {}, {}, {})",
        number(start, dtype),
        name(dtype),
        binary(reducer.combine(), dtype),
        each(window, |w| w.size),
        each(window, |w| w.stride),
        padding(window),
        each(window, |w| w.base_dilation),
        each(window, |w| w.window_dilation),
    )
}

/// `x` are the operand and the source.
fn select_and_scatter(select: Extremum, window: &[WindowDim], x: &[String]) -> String {
    let best = match select {
        Extremum::Max => "ge",
        Extremum::Min => "le",
    };
    let (size, stride) = (each(window, |w| w.size), each(window, |w| w.stride));
    format!("_select_and_scatter({}, {}, lax.{best}, {size}, {stride}, {})", x[0], x[1], padding(window))
}

/// Index vectors lie in the last dimension in JAX.
fn indices(dims: &GatherDims, x: &str, rank: usize) -> String {
    match dims.index_vector_dim {
        at if at == rank => format!("lax.expand_dims({x}, ({rank},))"),
        at if at + 1 == rank => x.to_string(),
        at => format!("jnp.moveaxis({x}, {at}, -1)"),
    }
}

/// The batching dimensions of indices once their vectors lie in the last dimension.
fn batching(dims: &GatherDims) -> String {
    let moved = |&d: &usize| if d > dims.index_vector_dim { d - 1 } else { d };
    tuple(&dims.indices_batching_dims.iter().map(moved).collect::<Vec<_>>())
}

fn gather(dims: &GatherDims, out_of_bounds: OutOfBounds, x: &[String], rank: usize) -> String {
    let mode = match out_of_bounds {
        OutOfBounds::Clamp => "mode=\"clip\"",
        OutOfBounds::Zero => "mode=\"fill\", fill_value=0",
    };
    format!(
        "lax.gather({}, {}, lax.GatherDimensionNumbers({}, {}, {}, {}, {}), {}, {mode})",
        x[0],
        indices(dims, &x[1], rank),
        tuple(&dims.offset_dims),
        tuple(&dims.collapsed_slice_dims),
        tuple(&dims.start_index_map),
        tuple(&dims.operand_batching_dims),
        batching(dims),
        tuple(&dims.slice_sizes),
    )
}

/// `x` are the operand, the indices and the updates.
fn scatter(function: &str, dims: &GatherDims, x: [&str; 3], rank: usize) -> String {
    format!(
        "lax.{function}({}, {}, {}, lax.ScatterDimensionNumbers({}, {}, {}, {}, {}), mode=\"drop\")",
        x[0],
        indices(dims, x[1], rank),
        x[2],
        tuple(&dims.offset_dims),
        tuple(&dims.collapsed_slice_dims),
        tuple(&dims.start_index_map),
        tuple(&dims.operand_batching_dims),
        batching(dims),
    )
}
