//! The table of cases: an op, the types of its operands, and the type of its result.
//!
//! Sizes are small, odd and even, divisible by 2, by 3, by both and by neither. So the strategies of each case include
//! valid splits and splits that must be refused.

use super::numbers::{Rng, random};
use crate::array::RotaryHalves;
use crate::dtype::DType;
use crate::literal::Literal;
use crate::literal::Real;
use crate::mesh::{AxisId, Mesh};
use crate::op::*;
use crate::reshard::Collective;
use crate::tensor::Tensor;
use crate::types::TensorType;

/// One row of the table.
#[derive(Clone)]
pub struct Case {
    pub op: Op,
    pub operands: Vec<TensorType>,
    pub result: TensorType,
    /// The range of random floats, in which the function is smooth.
    pub reals: (f64, f64),
    /// The range of random integers, e.g. of indices into a table.
    pub integers: (i64, i64),
}

impl Case {
    pub fn types(&self) -> Vec<&TensorType> {
        self.operands.iter().collect()
    }

    pub fn shapes(&self) -> Vec<&[u64]> {
        self.operands.iter().map(|t| t.shape.as_slice()).collect()
    }

    pub fn random_operands(&self, rng: &mut Rng) -> Vec<Tensor> {
        self.operands.iter().map(|ty| random(ty, self.reals, self.integers, rng)).collect()
    }

    /// The text that a failing test prints.
    pub fn label(&self) -> String {
        let types: Vec<String> = self.operands.iter().map(|t| t.to_string()).collect();
        format!("{:?} ({}) -> {}", self.op, types.join(", "), self.result)
    }

    fn reals(mut self, low: f64, high: f64) -> Self {
        self.reals = (low, high);
        self
    }

    fn integers(mut self, low: i64, high: i64) -> Self {
        self.integers = (low, high);
        self
    }
}

/// Parses a type such as `f32[4,6]`.
pub fn ty(text: &str) -> TensorType {
    let (dtype, dims) = text.trim_end_matches(']').split_once('[').expect("a type");
    let sizes = dims.split(',').filter(|d| !d.is_empty()).map(|d| d.parse().expect("a size"));
    TensorType::new(DType::parse(dtype).expect("an element type"), sizes.collect::<Vec<u64>>())
}

fn case(op: impl Into<Op>, operands: &str, result: &str) -> Case {
    Case {
        op: op.into(),
        operands: operands.split_whitespace().map(ty).collect(),
        result: ty(result),
        reals: (-2.0, 2.0),
        integers: (-3, 4),
    }
}

/// Lets the table name only the payload.
macro_rules! into_op {
    ($($payload:ident => $variant:ident),*) => {$(
        impl From<$payload> for Op {
            fn from(op: $payload) -> Op {
                Op::$variant(op)
            }
        }
    )*};
}
into_op!(Unary => Unary, Binary => Binary, Compare => Compare, Select => Select, Convert => Convert,
    BroadcastInDim => BroadcastInDim, Reshape => Reshape, Transpose => Transpose, Slice => Slice, Pad => Pad,
    Concatenate => Concatenate, Reduce => Reduce, DotGeneral => DotGeneral, Gather => Gather,
    Convolution => Convolution, ReduceWindow => ReduceWindow, SelectAndScatter => SelectAndScatter,
    ScatterAdd => ScatterAdd, GroupedDot => GroupedDot, GroupedOuter => GroupedOuter, Scatter => Scatter, BitcastConvert => BitcastConvert, ReducePrecision => ReducePrecision,
    Threefry => Threefry, Reverse => Reverse, Roll => Roll, Cumulative => Cumulative, ArgSort => ArgSort, Literal => Constant, Iota => Iota, Parameter => Parameter, Input => Input,
    AxisIndex => AxisIndex, HostCopy => HostCopy, Microbatches => Microbatches);

pub fn cases() -> Vec<Case> {
    [
        leaves(),
        elementwise(),
        bits(),
        shapes(),
        reductions(),
        scans(),
        sorts(),
        dots(),
        gathers(),
        scatters(),
        grouped(),
        convolutions(),
        windows(),
        composites(),
        of_microbatches(),
        local_ops(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn leaves() -> Vec<Case> {
    let name = || "w".to_string();
    let dense = |text: &str, values: &[f64]| case(Literal::dense(ty(text), values.to_vec()), "", text);
    vec![
        case(Parameter::new(name(), ty("f32[4,6]")), "", "f32[4,6]"),
        case(Parameter { frozen: true, no_decay: true, ..Parameter::new(name(), ty("f32[4,6]")) }, "", "f32[4,6]"),
        case(Input { name: name(), ty: ty("i32[6]") }, "", "i32[6]"),
        case(Literal::splat(ty("f32[4,6]"), 1.5), "", "f32[4,6]"),
        case(Literal::splat(ty("bool[]"), 1.0), "", "bool[]"),
        case(Literal { batch_power: -1, ..Literal::splat(ty("f32[]"), 0.125) }, "", "f32[]"),
        dense("f32[4]", &[1.0, f64::NAN, f64::NEG_INFINITY, -0.0]),
        dense("i32[2,2]", &[1.0, -2.0, 3.0, 4.0]),
        case(Iota { ty: ty("i32[6]"), dim: 0 }, "", "i32[6]"),
        case(Iota { ty: ty("f32[4,6,12]"), dim: 2 }, "", "f32[4,6,12]"),
        case(Iota { ty: ty("f32[4,6,12]"), dim: 1 }, "", "f32[4,6,12]"),
        case(Iota { ty: ty("u8[300]"), dim: 0 }, "", "u8[300]"),
        case(Iota { ty: ty("i8[258]"), dim: 0 }, "", "i8[258]"),
    ]
}

fn elementwise() -> Vec<Case> {
    let mut all = Vec::new();
    for op in Unary::ALL {
        let of = |operand: &str| {
            let result = if op == Unary::IsFinite { operand.replace("f32", "bool") } else { operand.to_string() };
            case(op, operand, &result)
        };
        all.extend(match op {
            Unary::PopulationCount | Unary::CountLeadingZeros => {
                vec![of("i32[6,2]").integers(-9, 300), of("u8[4]").integers(0, 255), of("i8[6]"), of("u64[4]")]
            }
            Unary::Not => vec![of("bool[4,6]"), of("i32[6,2]"), of("u8[4]"), of("u64[4]"), of("bool[]")],
            Unary::Negate => vec![of("f32[4,6]"), of("i32[6]"), of("u8[6]"), of("f32[]")],
            Unary::Abs | Unary::Sign => vec![of("f32[4,6]"), of("i32[6]"), of("f32[5,3]")],
            Unary::Log | Unary::Sqrt | Unary::Rsqrt | Unary::LogPlusOne => {
                vec![of("f32[4,6]").reals(0.2, 3.0), of("f32[2,3,5,2]").reals(0.2, 3.0)]
            }
            Unary::Tan => vec![of("f32[4,6]").reals(-1.3, 1.3), of("f32[7]").reals(-1.3, 1.3)],
            _ => vec![of("f32[4,6]"), of("f32[2,3,5,2]")],
        });
    }
    for op in Binary::ALL {
        let of = |operand: &str| case(op, &format!("{operand} {operand}"), operand);
        all.extend(match op {
            Binary::And | Binary::Or | Binary::Xor => vec![of("bool[4,6]"), of("i32[6,4]"), of("u64[6]")],
            Binary::ShiftLeft | Binary::ShiftRightLogical | Binary::ShiftRightArithmetic => vec![
                of("i32[4,6]").integers(-40, 40),
                of("u32[6]").integers(0, 40),
                of("i8[12]").integers(-9, 10),
                of("u8[8]").integers(0, 12),
                of("i64[6]").integers(-70, 70),
            ],
            Binary::Add | Binary::Multiply | Binary::Maximum | Binary::Minimum => {
                vec![of("f32[4,6]"), of("i32[6]"), of("bool[6]"), of("u8[4]"), of("f32[]"), of("f32[5,3,2,2]")]
            }
            Binary::Subtract => vec![of("f32[4,6]"), of("i32[6]"), of("u32[6]"), of("f32[2,2,2,3]")],
            Binary::Divide | Binary::Remainder => vec![of("f32[4,6]"), of("i32[12]"), of("u32[6]")],
            Binary::Power => {
                vec![of("f32[4,6]").reals(0.2, 2.0), of("i32[12]").integers(-3, 6), of("u8[8]").integers(0, 30)]
            }
            Binary::Atan2 => vec![of("f32[4,6]"), of("f32[3,5]")],
        });
    }
    for direction in [Direction::Eq, Direction::Ne, Direction::Lt, Direction::Le, Direction::Gt, Direction::Ge] {
        all.push(case(Compare { direction }, "f32[4,6] f32[4,6]", "bool[4,6]"));
        all.push(case(Compare { direction }, "i32[6] i32[6]", "bool[6]"));
    }
    all.push(case(Select {}, "bool[4,6] f32[4,6] f32[4,6]", "f32[4,6]"));
    all.push(case(Select {}, "bool[6] i32[6] i32[6]", "i32[6]"));
    all.push(case(Select {}, "bool[] bool[] bool[]", "bool[]"));
    let convert = |from: &str, dtype: DType, to: &str| case(Convert { dtype }, from, to);
    all.push(convert("f32[4,6]", DType::BF16, "bf16[4,6]"));
    all.push(convert("f32[6]", DType::I32, "i32[6]"));
    all.push(convert("i32[6]", DType::F32, "f32[6]"));
    all.push(convert("i32[6]", DType::U8, "u8[6]"));
    all.push(convert("f32[6]", DType::Bool, "bool[6]"));
    all.push(convert("bool[6]", DType::F32, "f32[6]"));
    all
}

fn bits() -> Vec<Case> {
    let cast = |from: &str, to: &str| case(BitcastConvert { dtype: ty(to).dtype }, from, to).integers(-200, 256);
    let reduce =
        |exponent_bits, mantissa_bits, of: &str| case(ReducePrecision { exponent_bits, mantissa_bits }, of, of);
    let mut all = vec![
        cast("f32[4,6]", "u32[4,6]"),
        cast("u32[6]", "i32[6]"),
        cast("f32[4,6]", "u8[4,6,4]"),
        cast("bf16[6]", "i16[6]"),
        cast("u8[4,6,4]", "i32[4,6]"),
        cast("u16[2]", "f32[]"),
        cast("i64[6]", "u32[6,2]"),
        cast("f32[]", "u16[2]"),
        reduce(11, 52, "f64[4,6]"),
        reduce(8, 23, "f32[6]"),
        reduce(5, 10, "f32[4,6]"),
        reduce(4, 0, "bf16[6]"),
    ];
    for word in ThreefryWord::ALL {
        let words = |shape: &str| case(Threefry { word }, &format!("{shape} {shape} {shape} {shape}"), shape);
        all.extend([words("u32[4,6]").integers(0, 1 << 32), words("u32[]").integers(0, 9)]);
    }
    all
}

fn shapes() -> Vec<Case> {
    let reverse = |of: &str, dims: &[usize]| case(Reverse { dims: dims.to_vec() }, of, of);
    let broadcast = |from: &str, dims: &[usize], to: &str| {
        case(BroadcastInDim { shape: ty(to).shape, dims: dims.to_vec() }, from, to)
    };
    let reshape = |from: &str, to: &str| case(Reshape { shape: ty(to).shape }, from, to);
    let transpose = |from: &str, p: &[usize], to: &str| case(Transpose { permutation: p.to_vec() }, from, to);
    let slice = |from: &str, start: &[u64], limit: &[u64], stride: &[u64], to: &str| {
        case(Slice { start: start.to_vec(), limit: limit.to_vec(), stride: stride.to_vec() }, from, to)
    };
    let roll = |of: &str, dim: usize, by: u64| case(Roll { dim, by }, of, of);
    let concatenate = |from: &str, dim: usize, to: &str| case(Concatenate { dim }, from, to);
    let pad = |from: &str, low: &[i64], high: &[i64], interior: &[u64], to: &str| {
        let scalar = format!("{}[]", ty(from).dtype);
        let op = Pad { low: low.to_vec(), high: high.to_vec(), interior: interior.to_vec() };
        case(op, &format!("{from} {scalar}"), to)
    };
    vec![
        roll("f32[4,6]", 0, 1),
        roll("f32[4,12]", 1, 5),
        roll("i32[6,2]", 0, 9),
        roll("f32[2,6,3]", 1, 0),
        broadcast("f32[6]", &[1], "f32[4,6]"),
        broadcast("f32[]", &[], "f32[4,6]"),
        broadcast("f32[1,6]", &[0, 1], "f32[4,6]"),
        broadcast("f32[4,6]", &[2, 0], "f32[6,5,4]"),
        broadcast("f32[6,1,2]", &[3, 1, 0], "f32[2,3,2,6]"),
        broadcast("i32[1,1]", &[0, 1], "i32[1,4]"),
        broadcast("bool[6]", &[0], "bool[6,2]"),
        reshape("f32[4,6]", "f32[24]"),
        reshape("f32[24]", "f32[2,3,4]"),
        reshape("f32[4,6]", "f32[6,4]"),
        reshape("f32[8,6]", "f32[12,4]"),
        reshape("f32[6,4,2]", "f32[6,8]"),
        reshape("f32[4,1,6]", "f32[1,4,6,1]"),
        reshape("f32[2,6,5]", "f32[4,15]"),
        reshape("f32[12,2]", "f32[2,3,4]"),
        reshape("f32[36]", "f32[6,6]"),
        reshape("f32[4,9,2]", "f32[6,12]"),
        reshape("i32[]", "i32[1]"),
        reshape("f32[0,4]", "f32[2,0]"),
        transpose("f32[4,6]", &[1, 0], "f32[6,4]"),
        transpose("f32[2,3,4,6]", &[2, 0, 3, 1], "f32[4,2,6,3]"),
        transpose("bool[3,2,4]", &[2, 1, 0], "bool[4,2,3]"),
        transpose("f32[]", &[], "f32[]"),
        reverse("f32[4,6]", &[1]),
        reverse("f32[4,6,2]", &[2, 0]),
        reverse("i32[6]", &[0]),
        reverse("bool[2,3]", &[0, 1]),
        reverse("f32[4,0]", &[1]),
        reverse("f32[]", &[]),
        slice("f32[12,4]", &[4, 0], &[8, 4], &[1, 1], "f32[4,4]"),
        slice("f32[18]", &[12], &[18], &[1], "f32[6]"),
        slice("f32[8]", &[1], &[7], &[1], "f32[6]"),
        // As long as a block, but not aligned to one.
        slice("f32[12,6]", &[2, 0], &[6, 6], &[1, 1], "f32[4,6]"),
        slice("f32[12]", &[6], &[12], &[2], "f32[3]"),
        slice("f32[9,6]", &[1, 0], &[8, 6], &[2, 3], "f32[4,2]"),
        slice("f32[4,6]", &[0, 2], &[4, 2], &[1, 1], "f32[4,0]"),
        slice("f32[4]", &[0], &[4], &[1_000_000_000_000_000_000], "f32[1]"),
        slice("i32[6,6]", &[3, 0], &[6, 6], &[1, 1], "i32[3,6]"),
        concatenate("f32[4,6] f32[4,6]", 0, "f32[8,6]"),
        concatenate("f32[4,6] f32[4,6] f32[4,6]", 1, "f32[4,18]"),
        concatenate("f32[4,2] f32[4,6]", 1, "f32[4,8]"),
        concatenate("f32[6]", 0, "f32[6]"),
        concatenate("bool[2,3] bool[2,3]", 1, "bool[2,6]"),
        concatenate("i32[0] i32[6]", 0, "i32[6]"),
        pad("f32[4,6]", &[0, 6], &[4, 0], &[0, 0], "f32[8,12]"),
        pad("f32[4,6]", &[1, 0], &[2, 0], &[0, 0], "f32[7,6]"),
        pad("f32[4,6]", &[0, 1], &[0, -2], &[2, 0], "f32[10,5]"),
        // The length of one block of three, but between two blocks, and a block of one element.
        pad("f32[4,6]", &[2, 0], &[6, 0], &[0, 0], "f32[12,6]"),
        pad("f32[1,4]", &[1, 0], &[1, 0], &[0, 0], "f32[3,4]"),
        pad("f32[6]", &[-2], &[-1], &[0], "f32[3]"),
        pad("f32[6]", &[-3], &[2], &[1], "f32[10]"),
        pad("i32[6,2]", &[6, 0], &[6, 0], &[0, 0], "i32[18,2]"),
        pad("f32[0]", &[2], &[1], &[3], "f32[3]"),
        pad("f32[]", &[], &[], &[], "f32[]"),
    ]
}

fn reductions() -> Vec<Case> {
    let reduce = |reducer, dims: &[usize], from: &str, to: &str| {
        case(Reduce { reducer, dims: dims.to_vec() }, from, to).reals(0.3, 2.0)
    };
    let mut all = Vec::new();
    for reducer in [Reducer::Sum, Reducer::Product, Reducer::Max, Reducer::Min] {
        all.push(reduce(reducer, &[1], "f32[4,6]", "f32[4]"));
        all.push(reduce(reducer, &[2, 0], "f32[2,3,4,6]", "f32[3,6]").reals(-2.0, 2.0));
        all.push(reduce(reducer, &[0, 1], "f32[6,4]", "f32[]"));
        all.push(reduce(reducer, &[0], "i32[6,4]", "i32[4]"));
        all.push(reduce(reducer, &[0], "bool[6,4]", "bool[4]"));
        all.push(reduce(reducer, &[1], "u8[2,12]", "u8[2]").integers(0, 200));
        all.push(reduce(reducer, &[0], "f32[0,4]", "f32[4]"));
        all.push(reduce(reducer, &[], "f32[4,6]", "f32[4,6]"));
    }
    for reducer in [Reducer::And, Reducer::Or] {
        all.push(reduce(reducer, &[1], "bool[4,6]", "bool[4]"));
        all.push(reduce(reducer, &[0, 2], "i32[6,2,4]", "i32[2]"));
        all.push(reduce(reducer, &[0], "u64[6,2]", "u64[2]"));
    }
    all
}

fn scans() -> Vec<Case> {
    let mut all = Vec::new();
    for reverse in [false, true] {
        let scan = |reducer, dim, of: &str| case(Cumulative { reducer, dim, reverse }, of, of);
        for reducer in [Reducer::Sum, Reducer::Product, Reducer::Max, Reducer::Min] {
            all.extend([
                scan(reducer, 1, "f32[4,6]").reals(0.3, 2.0),
                scan(reducer, 0, "f32[6,2,3]"),
                scan(reducer, 0, "i32[12]"),
                scan(reducer, 1, "u8[2,12]").integers(0, 200),
                scan(reducer, 1, "bool[4,6]"),
                scan(reducer, 1, "f32[4,0]"),
                scan(reducer, 1, "f32[4,1,3]"),
            ]);
        }
        for reducer in [Reducer::And, Reducer::Or] {
            all.extend([scan(reducer, 0, "bool[4,6]"), scan(reducer, 1, "i32[4,6]"), scan(reducer, 0, "u64[6]")]);
        }
    }
    all
}

fn sorts() -> Vec<Case> {
    let sort = |dim, descending: &[bool], keys: &str, to: &str| {
        case(ArgSort { dim, descending: descending.to_vec() }, keys, to)
    };
    vec![
        sort(1, &[false], "f32[4,6]", "i32[4,6]"),
        sort(0, &[true], "f32[6,2,3]", "i32[6,2,3]"),
        sort(0, &[true], "i32[12]", "i32[12]"),
        sort(1, &[false, true], "bool[2,12] i8[2,12]", "i32[2,12]"),
        sort(1, &[true, false, false], "u8[4,6] bool[4,6] f32[4,6]", "i32[4,6]"),
        sort(1, &[false], "f32[4,0]", "i32[4,0]"),
    ]
}

fn dots() -> Vec<Case> {
    let dot = |b: [&[usize]; 2], c: [&[usize]; 2], operands: &str, to: &str| {
        let op = DotGeneral {
            lhs_batch: b[0].to_vec(),
            rhs_batch: b[1].to_vec(),
            lhs_contract: c[0].to_vec(),
            rhs_contract: c[1].to_vec(),
        };
        case(op, operands, to)
    };
    vec![
        dot([&[], &[]], [&[1], &[0]], "f32[4,6] f32[6,2]", "f32[4,2]"),
        dot([&[0], &[0]], [&[2], &[1]], "f32[2,3,4] f32[2,4,6]", "f32[2,3,6]"),
        dot([&[0, 2], &[1, 0]], [&[3], &[3]], "f32[2,4,3,6] f32[3,2,2,6]", "f32[2,3,4,2]"),
        dot([&[], &[]], [&[0, 2], &[2, 0]], "f32[4,3,6] f32[6,2,4]", "f32[3,2]"),
        dot([&[1], &[2]], [&[2, 0], &[0, 1]], "f32[4,2,6,3] f32[6,4,2]", "f32[2,3]"),
        dot([&[], &[]], [&[], &[]], "f32[4] f32[6]", "f32[4,6]"),
        dot([&[], &[]], [&[0], &[0]], "f32[12] f32[12]", "f32[]"),
        dot([&[0], &[0]], [&[], &[]], "f32[6] f32[6]", "f32[6]"),
        dot([&[], &[]], [&[1], &[1]], "i32[4,6] i32[2,6]", "i32[4,2]"),
        dot([&[], &[]], [&[0], &[0]], "i8[300,2] i8[300,2]", "i8[2,2]"),
        dot([&[], &[]], [&[1], &[0]], "bool[4,6] bool[6,2]", "bool[4,2]"),
        dot([&[], &[]], [&[1], &[0]], "f32[5,7] f32[7,3]", "f32[5,3]"),
        dot([&[], &[]], [&[1], &[0]], "f8e4m3fn[4,6] f8e5m2[6,2]", "bf16[4,2]"),
        dot([&[0], &[0]], [&[2], &[1]], "f8e4m3fn[2,3,4] f8e4m3fn[2,4,6]", "bf16[2,3,6]"),
    ]
}

/// Dimension numbers, in this order: offset, collapsed, operand batching, indices batching, start map, vector dim,
/// sizes.
fn dims(
    offset: &[usize],
    collapsed: &[usize],
    operand_batching: &[usize],
    indices_batching: &[usize],
    map: &[usize],
    vector: usize,
    sizes: &[u64],
) -> GatherDims {
    GatherDims {
        offset_dims: offset.to_vec(),
        collapsed_slice_dims: collapsed.to_vec(),
        operand_batching_dims: operand_batching.to_vec(),
        indices_batching_dims: indices_batching.to_vec(),
        start_index_map: map.to_vec(),
        index_vector_dim: vector,
        slice_sizes: sizes.to_vec(),
    }
}

/// Dimension numbers, table, indices, gathered values, and the range of the indices.
type Lookup = (GatherDims, &'static str, &'static str, &'static str, (i64, i64));

/// Gathers, which also serve as scatters the other way. Index ranges reach beyond the table at both ends.
fn lookups() -> Vec<Lookup> {
    vec![
        // An embedding, with the index vector implicit and explicit.
        (dims(&[2], &[0], &[], &[], &[0], 2, &[1, 6]), "f32[12,6]", "i32[2,3]", "f32[2,3,6]", (-3, 16)),
        (dims(&[1], &[0], &[], &[], &[0], 1, &[1, 4]), "f32[6,4]", "u32[4,1]", "f32[4,4]", (0, 9)),
        // The table's rows come first in the result.
        (dims(&[0], &[1], &[], &[], &[1], 1, &[4, 1]), "f32[4,6]", "i32[6]", "f32[4,6]", (-2, 8)),
        // take_along_axis: one batching dimension.
        (dims(&[], &[1], &[0], &[0], &[1], 2, &[1, 1]), "f32[4,6]", "i32[4,2]", "f32[4,2]", (-1, 7)),
        (dims(&[], &[0], &[2, 1], &[0, 2], &[0], 3, &[1, 1, 1]), "f32[6,2,4]", "i32[4,3,2]", "f32[4,3,2]", (-1, 7)),
        // One element per row: with any order of the other dimensions, with a window of one, and with rows beyond the
        // indices.
        (dims(&[], &[1], &[0], &[0], &[1], 2, &[1, 1]), "f32[4,6]", "i32[4,1]", "f32[4,1]", (-1, 7)),
        (dims(&[], &[0], &[2, 1], &[0, 2], &[0], 3, &[1, 1, 1]), "f32[6,2,4]", "i32[4,1,2]", "f32[4,1,2]", (-1, 7)),
        (dims(&[], &[0], &[2, 1], &[2, 0], &[0], 3, &[1, 1, 1]), "f32[6,2,4]", "u32[2,1,4]", "f32[2,1,4]", (0, 7)),
        (dims(&[0], &[2], &[1], &[0], &[2], 2, &[1, 1, 1]), "f32[1,4,6]", "i32[4,1,1]", "f32[1,4,1]", (-1, 7)),
        (dims(&[], &[1], &[0], &[0], &[1], 1, &[1, 1]), "f32[2,300]", "i8[2]", "f32[2]", (-100, 127)),
        // Two components: single elements, and a slice that starts anywhere.
        (dims(&[], &[0, 1], &[], &[], &[1, 0], 1, &[1, 1]), "f32[4,6]", "i32[6,2]", "f32[6]", (-2, 8)),
        (dims(&[1, 2], &[], &[], &[], &[0, 1], 1, &[2, 3]), "f32[4,6]", "i32[4,2]", "f32[4,2,3]", (-1, 5)),
        // A truncated dimension that is not indexed, and a collapsed one that is not indexed.
        (dims(&[1], &[0], &[], &[], &[0], 1, &[1, 3]), "f32[6,4]", "i32[4]", "f32[4,3]", (-1, 7)),
        (dims(&[1], &[0, 1], &[], &[], &[0], 1, &[1, 1, 4]), "f32[6,2,4]", "i32[4]", "f32[4,4]", (-1, 7)),
        (dims(&[1], &[0, 1], &[], &[], &[1], 1, &[1, 1, 4]), "f32[2,6,4]", "i32[4]", "f32[4,4]", (-1, 7)),
        // Indices whose type is too narrow for the table.
        (dims(&[1], &[0], &[], &[], &[0], 1, &[1, 2]), "f32[300,2]", "i8[6]", "f32[6,2]", (-100, 127)),
        (dims(&[1], &[0], &[], &[], &[0], 1, &[1, 2]), "f32[600,2]", "u8[6]", "f32[6,2]", (0, 255)),
        // Integer and boolean tables.
        (dims(&[1], &[0], &[], &[], &[0], 1, &[1, 4]), "i32[6,4]", "i64[4]", "i32[4,4]", (-1, 7)),
        (dims(&[1], &[0], &[], &[], &[0], 1, &[1, 4]), "bool[6,4]", "i32[4]", "bool[4,4]", (-1, 7)),
        // One index for all.
        (dims(&[0], &[0], &[], &[], &[0], 0, &[1, 4]), "f32[6,4]", "i32[]", "f32[4]", (-1, 7)),
    ]
}

/// Parses `size stride low high base window` of one dimension.
fn window(text: &str) -> WindowDim {
    let n: Vec<i64> = text.trim_end_matches('r').split_whitespace().map(|n| n.parse().expect("a number")).collect();
    WindowDim {
        size: n[0] as u64,
        stride: n[1] as u64,
        pad_low: n[2],
        pad_high: n[3],
        base_dilation: n[4] as u64,
        window_dilation: n[5] as u64,
        reversed: text.ends_with('r'),
    }
}

fn image(dims: &[usize]) -> ImageDims {
    ImageDims { batch: dims[0], feature: dims[1], spatial: dims[2..].to_vec() }
}

fn kernel(dims: &[usize]) -> KernelDims {
    KernelDims { output: dims[0], input: dims[1], spatial: dims[2..].to_vec() }
}

fn convolutions() -> Vec<Case> {
    let conv = |lhs: &[usize], rhs: &[usize], result: &[usize], groups: (u64, u64), windows: &[&str]| Convolution {
        lhs: image(lhs),
        rhs: kernel(rhs),
        result: image(result),
        window: windows.iter().map(|w| window(w)).collect(),
        feature_groups: groups.0,
        batch_groups: groups.1,
    };
    // One spatial dimension, NWC and WIO, then NCW and OIW.
    let last = |groups, w: &str| conv(&[0, 2, 1], &[2, 1, 0], &[0, 2, 1], groups, &[w]);
    let first = |groups, w: &str| conv(&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], groups, &[w]);
    let nhwc = |groups, w: &[&str]| conv(&[0, 3, 1, 2], &[3, 2, 0, 1], &[0, 3, 1, 2], groups, w);
    let mixed = |w: &str| conv(&[1, 2, 0], &[1, 2, 0], &[2, 1, 0], (1, 1), &[w]);
    vec![
        case(last((1, 1), "3 1 1 1 1 1"), "f32[2,12,3] f32[3,3,4]", "f32[2,12,4]"),
        case(last((1, 1), "3 2 0 1 1 1"), "f32[2,12,4] f32[3,4,6]", "f32[2,6,6]"),
        case(last((1, 1), "4 2 1 1 1 1"), "f32[1,12,2] f32[4,2,2]", "f32[1,6,2]"),
        case(last((1, 1), "5 1 2 2 1 1r"), "f32[2,6,2] f32[5,2,3]", "f32[2,6,3]"),
        case(last((1, 1), "3 1 2 2 1 2"), "f32[2,6,2] f32[3,2,3]", "f32[2,6,3]"),
        case(last((1, 1), "2 1 0 0 1 3"), "f32[2,9,1] f32[2,1,2]", "f32[2,6,2]"),
        // Transposed convolutions: the operand is dilated.
        case(last((1, 1), "3 1 1 2 2 1"), "f32[2,6,2] f32[3,2,4]", "f32[2,12,4]"),
        case(last((1, 1), "4 1 2 2 2 1r"), "f32[1,6,2] f32[4,2,2]", "f32[1,12,2]"),
        case(last((1, 1), "3 3 1 2 2 1"), "f32[2,6,2] f32[3,2,2]", "f32[2,4,2]"),
        // Negative padding, as in gradients, and a window as large as the operand.
        case(last((1, 1), "2 1 -1 -2 1 1"), "f32[2,12,2] f32[2,2,2]", "f32[2,8,2]"),
        case(last((1, 1), "12 1 1 1 1 1"), "f32[2,12,2] f32[12,2,4]", "f32[2,3,4]"),
        case(last((1, 1), "6 1 1 0 1 2"), "f32[2,12,2] f32[6,2,2]", "f32[2,3,2]"),
        case(last((1, 1), "3 1 0 0 1 1"), "f32[2,2,2] f32[3,2,2]", "f32[2,0,2]"),
        // Groups of features (two groups, then one per feature), and groups of the batch.
        case(last((2, 1), "3 1 1 1 1 1"), "f32[2,6,4] f32[3,2,6]", "f32[2,6,6]"),
        case(first((6, 1), "3 2 1 0 1 1"), "f32[2,6,4] f32[12,1,3]", "f32[2,12,2]"),
        case(last((1, 2), "3 1 1 1 1 1"), "f32[4,6,3] f32[3,3,4]", "f32[2,6,4]"),
        case(first((1, 3), "3 2 0 1 2 1"), "f32[6,2,4] f32[6,2,3]", "f32[2,6,3]"),
        case(mixed("3 1 1 1 1 1"), "f32[6,4,3] f32[3,2,3]", "f32[6,2,4]"),
        case(nhwc((1, 1), &["3 1 1 1 1 1", "1 1 0 0 1 1"]), "f32[2,4,6,3] f32[3,1,3,4]", "f32[2,4,6,4]"),
        case(nhwc((1, 1), &["2 2 0 0 1 1", "3 2 0 1 1 1"]), "f32[2,4,4,2] f32[2,3,2,2]", "f32[2,2,2,2]"),
        case(nhwc((2, 1), &["3 1 1 1 1 1", "2 1 1 0 1 1"]), "f32[1,4,4,4] f32[3,2,2,2]", "f32[1,4,4,2]"),
        case(conv(&[0, 1], &[1, 0], &[0, 1], (1, 1), &[]), "f32[4,6] f32[6,2]", "f32[4,2]"),
        case(last((1, 1), "3 1 1 1 1 1"), "i32[2,6,2] i32[3,2,2]", "i32[2,6,2]"),
    ]
}

fn windows() -> Vec<Case> {
    let pool = |reducer, text: &[&str]| ReduceWindow { reducer, window: text.iter().map(|w| window(w)).collect() };
    let select = |select, text: &[&str]| SelectAndScatter { select, window: text.iter().map(|w| window(w)).collect() };
    let one = "1 1 0 0 1 1";
    let mut all = vec![
        case(pool(Reducer::Sum, &[one, "2 2 0 0 1 1"]), "f32[4,12]", "f32[4,6]"),
        case(pool(Reducer::Sum, &["3 1 1 1 1 1", "3 2 0 1 1 1"]), "f32[4,12]", "f32[4,6]"),
        case(pool(Reducer::Sum, &["3 1 2 2 1 2", one]), "f32[6,2]", "f32[6,2]"),
        case(pool(Reducer::Sum, &["3 1 1 2 2 1"]), "f32[6]", "f32[12]"),
        case(pool(Reducer::Sum, &["6 1 5 0 1 1"]), "f32[6]", "f32[6]"),
        case(pool(Reducer::Max, &[one, "3 2 0 1 1 1", "2 1 0 0 1 1"]), "f32[2,12,3]", "f32[2,6,2]"),
        case(pool(Reducer::Max, &["3 1 1 1 1 1"]), "f32[6]", "f32[6]"),
        case(pool(Reducer::Min, &["2 2 0 0 1 1", "2 2 1 1 1 1"]), "f32[4,6]", "f32[2,4]"),
        case(pool(Reducer::Max, &["3 1 1 1 1 1"]), "i32[6]", "i32[6]"),
        case(pool(Reducer::Product, &["2 2 0 0 1 1"]), "f32[12]", "f32[6]").reals(0.5, 2.0),
        case(pool(Reducer::And, &["3 1 1 1 1 1"]), "bool[6]", "bool[6]"),
        case(pool(Reducer::Or, &["3 1 1 1 1 1"]), "i32[6]", "i32[6]"),
    ];
    all.extend([
        case(select(Extremum::Max, &[one, "3 2 0 1 1 1"]), "f32[4,6] f32[4,3]", "f32[4,6]"),
        case(select(Extremum::Max, &["2 2 0 0 1 1", "3 1 1 1 1 1"]), "f32[4,6] f32[2,6]", "f32[4,6]"),
        case(select(Extremum::Min, &["2 1 0 0 1 1", one]), "f32[3,6] f32[2,6]", "f32[3,6]"),
    ]);
    all
}

fn gathers() -> Vec<Case> {
    let mut all = Vec::new();
    for (dims, table, indices, values, range) in lookups() {
        for out_of_bounds in [OutOfBounds::Clamp, OutOfBounds::Zero] {
            let op = Gather { dims: dims.clone(), out_of_bounds };
            all.push(case(op, &format!("{table} {indices}"), values).integers(range.0, range.1));
        }
    }
    all
}

fn scatters() -> Vec<Case> {
    let scatter = |(dims, table, indices, values, range): Lookup| {
        let op = ScatterAdd { dims, shape: ty(table).shape };
        case(op, &format!("{indices} {values}"), table).integers(range.0, range.1)
    };
    let mut all: Vec<Case> = lookups().into_iter().map(scatter).collect();
    for combine in Combine::ALL {
        all.extend(lookups().into_iter().map(|(dims, table, indices, values, range)| {
            let operands = format!("{table} {indices} {values}");
            case(Scatter { dims, combine }, &operands, table).integers(range.0, range.1)
        }));
    }
    all
}

/// Some groups have no matrix.
fn grouped() -> Vec<Case> {
    let dot = |contract| GroupedDot { contract, of: None };
    let outer = |groups, of| GroupedOuter { groups, of };
    vec![
        case(dot(1), "f32[12,4] f32[6,4,2] i32[12]", "f32[12,2]").integers(-1, 7),
        case(dot(2), "f32[4,3,6] f32[4,2,6] i64[4,3]", "f32[4,3,2]").integers(0, 3),
        case(dot(1), "f32[6,2] f32[3,2,4] i8[6]", "f32[6,4]").integers(-2, 4),
        case(GroupedDot { contract: 1, of: Some(8) }, "f32[5,2] f32[2,2,3] i32[5]", "f32[5,3]").integers(0, 7),
        case(dot(2), "bf16[4,6] bf16[2,3,6] i32[4]", "bf16[4,3]").integers(0, 1),
        case(outer(6, None), "f32[12,4] f32[12,2] i32[12]", "f32[6,4,2]").integers(-1, 7),
        case(outer(4, Some(12)), "f32[2,6,3] f32[2,6,6] i32[2,6]", "f32[4,3,6]").integers(0, 11),
        case(outer(3, None), "bf16[6,2] bf16[6,4] i32[6]", "bf16[3,2,4]").integers(0, 2),
        case(dot(1), "f8e4m3fn[4,6] f8e4m3fn[2,6,3] i32[4]", "bf16[4,3]").integers(0, 1),
        case(outer(3, None), "f8e4m3fn[6,2] f8e5m2[6,4] i32[6]", "bf16[3,2,4]").integers(0, 2),
    ]
}

fn composites() -> Vec<Case> {
    let attention = |scale: f64, causal: bool| Function::Attention { scale: Real(scale), causal, blocks: 1 };
    let ring = |blocks: u64, causal: bool| Function::Attention { scale: Real(0.5), causal, blocks };
    let (half, eps) = (Real(0.5), Real(0.1));
    // Larger than any negative variance that is drawn.
    let wide = Real(4.0);
    vec![
        case(Function::Softmax { dim: 1 }, "f32[4,6]", "f32[4,6]"),
        case(Function::Softmax { dim: 0 }, "f32[6,1,5]", "f32[6,1,5]"),
        case(Function::LogSoftmax { dim: 2 }, "f32[2,3,4]", "f32[2,3,4]"),
        case(Function::GeluErf, "f32[4,6]", "f32[4,6]"),
        case(Function::GeluTanh, "f32[4,6]", "f32[4,6]"),
        case(Function::Silu, "f32[4,6]", "f32[4,6]"),
        case(Function::Mean { dims: vec![0] }, "f32[4,6]", "f32[6]"),
        case(Function::Mean { dims: vec![0, 2] }, "f32[4,3,6]", "f32[3]"),
        case(Function::Mean { dims: vec![0, 1] }, "f32[4,6]", "f32[]"),
        case(Function::LayerNorm { eps }, "f32[2,4,6] f32[6] f32[6]", "f32[2,4,6]"),
        case(Function::LayerNorm { eps: half }, "f32[4,2,6] f32[2,6] f32[2,6]", "f32[4,2,6]"),
        case(Function::RmsNorm { eps }, "f32[2,4,6] f32[6]", "f32[2,4,6]"),
        case(Function::BatchNorm { dim: 1, eps }, "f32[4,3,2,6] f32[3] f32[3]", "f32[4,3,2,6]"),
        case(Function::BatchNorm { dim: 2, eps: half }, "f32[2,6,4] f32[4] f32[4]", "f32[2,6,4]"),
        case(Function::BatchNorm { dim: 1, eps }, "bf16[4,6,2] f32[6] f32[6]", "bf16[4,6,2]"),
        case(Function::BatchNorm { dim: 1, eps: wide }, "f32[4,6,2] f32[6] f32[6] f32[6] f32[6]", "f32[4,6,2]"),
        case(Function::BatchNorm { dim: 2, eps: wide }, "f32[4,2,6] f32[6] f32[6] f32[6] f32[6]", "f32[4,2,6]"),
        case(Function::Gates { chosen: 2, normalised: true }, "f32[4,6]", "f32[4,6]"),
        case(Function::Gates { chosen: 1, normalised: false }, "f32[2,4,3]", "f32[2,4,3]"),
        case(attention(0.5, false), "f32[2,4,2,3] f32[2,6,2,3] f32[2,6,2,4]", "f32[2,4,2,4]"),
        case(attention(1.0, true), "f32[2,6,4,2] f32[2,6,2,2] f32[2,6,2,2]", "f32[2,6,4,2]"),
        case(attention(0.5, true), "f32[1,4,6,2] f32[1,4,1,2] f32[1,4,1,2]", "f32[1,4,6,2]"),
        case(attention(0.5, false), "f32[2,4,2,3] f32[2,6,2,3] f32[2,6,2,3] f32[2,1,1,6]", "f32[2,4,2,3]"),
        case(attention(0.5, false), "f32[2,4,4,3] f32[2,6,2,3] f32[2,6,2,3] f32[4,4,6]", "f32[2,4,4,3]"),
        case(attention(0.5, false), "f32[2,2,4,3] f32[2,6,2,3] f32[2,6,2,3] f32[2,1,2,6]", "f32[2,2,4,3]"),
        case(Function::Rotary { halves: RotaryHalves::Split }, "f32[2,4,2,6] f32[4,1,6] f32[4,1,6]", "f32[2,4,2,6]"),
        case(
            Function::Rotary { halves: RotaryHalves::Interleaved },
            "f32[2,4,2,6] f32[4,1,3] f32[4,1,3]",
            "f32[2,4,2,6]",
        ),
        case(ring(2, false), "f32[2,4,2,3] f32[2,6,2,3] f32[2,6,2,4]", "f32[2,4,2,4]"),
        case(ring(3, true), "f32[1,6,4,2] f32[1,6,2,2] f32[1,6,2,3]", "f32[1,6,4,3]"),
        case(ring(2, true), "f32[1,4,4,2] f32[1,6,2,2] f32[1,6,2,3]", "f32[1,4,4,3]"),
        case(ring(4, true), "f32[1,8,2,2] f32[1,8,2,2] f32[1,8,2,2]", "f32[1,8,2,2]"),
        case(ring(2, false), "f32[2,4,4,3] f32[2,6,2,3] f32[2,6,2,3] f32[2,1,1,6]", "f32[2,4,4,3]"),
        case(ring(2, true), "bf16[2,4,2,3] bf16[2,4,1,3] bf16[2,4,1,3]", "bf16[2,4,2,3]"),
        case(attention(0.5, true), "bf16[2,4,2,3] bf16[2,4,1,3] bf16[2,4,1,3]", "bf16[2,4,2,3]"),
        case(Function::Rotary { halves: RotaryHalves::Split }, "bf16[2,4,2,6] f32[4,1,6] f32[4,1,6]", "bf16[2,4,2,6]"),
        case(Function::RmsNorm { eps }, "bf16[2,4,6] bf16[6]", "bf16[2,4,6]"),
        case(Function::CrossEntropy { dim: 1 }, "f32[4,6] i32[4]", "f32[4]").integers(0, 5),
        case(Function::CrossEntropy { dim: 2 }, "f32[2,3,12] i32[2,3]", "f32[2,3]").integers(0, 11),
        case(Function::CrossEntropy { dim: 1 }, "f32[2,4,3] i32[2,3]", "f32[2,3]").integers(0, 3),
        case(Function::LinearCrossEntropy { contract: 0, chunks: 2 }, "f32[2,8,4] f32[4,6] i32[2,8]", "f32[2,8]")
            .integers(0, 5),
        case(Function::LinearCrossEntropy { contract: 1, chunks: 3 }, "f32[12,4] f32[8,4] i32[12]", "f32[12]")
            .integers(0, 7),
        case(Function::SelectiveScan, "f32[2,6,4] f32[2,6,4] f32[4,2] f32[2,6,2] f32[2,6,2]", "f32[2,6,4]")
            .reals(-1.0, 1.0),
        case(Function::SelectiveScan, "f32[7,2] f32[7,2] f32[2,3] f32[7,3] f32[7,3]", "f32[7,2]").reals(-1.0, 1.0),
        case(Function::SelectiveScan, "bf16[4,1,6] f32[4,1,6] f32[6,1] bf16[4,1,1] bf16[4,1,1]", "bf16[4,1,6]"),
    ]
}

/// Ops over the microbatches of a step.
fn of_microbatches() -> Vec<Case> {
    vec![
        case(Microbatches::Sum, "i32[4,6]", "i32[4,6]"),
        case(Microbatches::Mean, "i32[6]", "i32[6]"),
        case(Microbatches::Times, "f32[4,6]", "f32[4,6]"),
    ]
}

fn local_ops() -> Vec<Case> {
    let mesh = Mesh::new(&[("a", 2), ("b", 3)]);
    let (a, b) = (AxisId(0), AxisId(1));
    let on_mesh = |collective: Collective, from: &str, to: &str| case(Op::collective(collective, &mesh), from, to);
    let reducer = Reducer::Sum;
    vec![
        case(AxisIndex { axes: vec![b, a], mesh: mesh.clone(), dtype: DType::I32 }, "", "i32[]"),
        case(HostCopy { route: HostRoute::Load }, "f32[4,6]", "f32[4,6]"),
        case(HostCopy { route: HostRoute::Load }, "f32[4,6] f32[3]", "f32[4,6]"),
        case(HostCopy { route: HostRoute::Store }, "f32[4]", "f32[4]"),
        on_mesh(Collective::AllReduce { axes: vec![a, b], reducer }, "f32[4]", "f32[4]"),
        on_mesh(Collective::ReduceScatter { axes: vec![a], reducer, dim: 1, outer: 3 }, "f32[4,6]", "f32[4,3]"),
        on_mesh(Collective::AllGather { axes: vec![b], dim: 0, outer: 2 }, "f32[4,6]", "f32[12,6]"),
        on_mesh(
            Collective::AllToAll { axes: vec![b], split_dim: 0, split_outer: 2, concat_dim: 1, concat_outer: 1 },
            "f32[6,2]",
            "f32[2,6]",
        ),
        on_mesh(Collective::LocalSlice { axes: vec![a], dim: 0, outer: 1 }, "f32[4,6]", "f32[2,6]"),
        on_mesh(Collective::KeepFirst { axes: vec![b], reducer: Reducer::Max }, "i32[4]", "i32[4]"),
        on_mesh(
            Collective::Halo { axes: vec![b], dim: 1, low: 1, high: 7, reducer: Reducer::Max },
            "f32[2,4]",
            "f32[2,12]",
        ),
        on_mesh(Collective::Shift { axes: vec![b], by: 2 }, "f32[2,4]", "f32[2,4]"),
    ]
}
