//! One op of a rewritten graph as one op of StableHLO.

use super::types::{array, list, literal, tensor, tensors};
use super::{Printer, Value};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Node;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    Binary, Convolution, Direction, DotGeneral, GatherDims, ImageDims, KernelDims, Op, Slice, Threefry, ThreefryWord,
    Unary, WindowDim,
};
use altiplano_ir::types::TensorType;
use std::fmt::Write;

/// Returns true if factors are f32, which XLA would round to fewer bits on GPUs and TPUs unless it is told not to.
fn is_single(a: &TensorType, b: &TensorType) -> bool {
    [a, b].iter().any(|ty| ty.dtype == DType::F32)
}

impl Printer {
    /// Prints a node. Composites and ops that [`crate::legal`] replaces do not occur.
    pub(super) fn node(&mut self, node: &Node, x: &[Value]) -> Value {
        let ty = &node.ty;
        match &node.op {
            Op::Constant(value) => self.constant(value),
            Op::Iota(iota) => self.op(format!("stablehlo.iota dim = {} : {}", iota.dim, tensor(ty)), ty.clone()),
            Op::Unary(op) => self.unary(*op, &x[0], ty),
            Op::Binary(op) => self.binary(*op, &x[0], &x[1]),
            Op::Compare(op) => self.compare(op.direction, &x[0], &x[1]),
            Op::Select(_) => self.select(&x[0], &x[1], &x[2]),
            Op::Convert(_) => self.typed("convert", &x[0], "", ty),
            Op::BitcastConvert(_) => self.typed("bitcast_convert", &x[0], "", ty),
            Op::ReducePrecision(op) => {
                let format = format!("e{}m{}", op.exponent_bits, op.mantissa_bits);
                let text = format!("stablehlo.reduce_precision {}, format = {format} : {}", x[0].name, tensor(ty));
                self.op(text, ty.clone())
            }
            Op::Threefry(op) => self.threefry(op, x),
            Op::BroadcastInDim(op) => {
                self.typed("broadcast_in_dim", &x[0], &format!(", dims = {}", list(&op.dims)), ty)
            }
            Op::Reshape(_) => self.typed("reshape", &x[0], "", ty),
            Op::Transpose(op) => self.typed("transpose", &x[0], &format!(", dims = {}", list(&op.permutation)), ty),
            Op::Reverse(op) => {
                let text = format!("stablehlo.reverse {}, dims = {} : {}", x[0].name, list(&op.dims), tensor(ty));
                self.op(text, ty.clone())
            }
            Op::Slice(op) => self.typed("slice", &x[0], &ranges(op), ty),
            Op::Concatenate(op) => self.concatenate(x, op.dim, ty),
            Op::Pad(op) => {
                let (low, high, interior) = (list(&op.low), list(&op.high), list(&op.interior));
                self.pad(&x[0], &x[1], &format!("low = {low}, high = {high}, interior = {interior}"), ty)
            }
            Op::Reduce(op) => self.reduce(op.reducer, &op.dims, &x[0], ty),
            Op::Cumulative(op) => self.cumulative(op, &x[0], ty),
            Op::ArgSort(op) => self.arg_sort(op, x, ty),
            Op::DotGeneral(op) => self.dot(op, &x[0], &x[1], ty),
            Op::Convolution(op) => self.convolution(op, &x[0], &x[1], ty),
            Op::ReduceWindow(op) => self.reduce_window(op.reducer, &op.window, &x[0], ty),
            Op::SelectAndScatter(op) => self.select_and_scatter(op, &x[0], &x[1], ty),
            Op::Gather(op) => self.gather(&op.dims, &x[0], &x[1], ty),
            Op::ScatterAdd(op) => self.scatter_add(op, &x[0], &x[1], ty),
            Op::Scatter(op) => self.scatter(op, &x[0], &x[1], &x[2]),
            Op::Collective(op) => self.collective(&op.collective, &op.mesh, &x[0], ty),
            Op::AxisIndex(op) => self.position(&op.axes, &op.mesh, op.dtype),
            other => unreachable!("{} is rewritten before it is printed", other.name()),
        }
    }

    pub(super) fn constant(&mut self, value: &Literal) -> Value {
        self.op(format!("stablehlo.constant {}", literal(value)), value.ty.clone())
    }

    pub(super) fn splat(&mut self, ty: TensorType, value: f64) -> Value {
        self.constant(&Literal::splat(ty, value))
    }

    /// An op with one operand whose type is written out: `stablehlo.convert %0 : (a) -> b`.
    pub(super) fn typed(&mut self, name: &str, x: &Value, attributes: &str, ty: &TensorType) -> Value {
        let text = format!("stablehlo.{name} {}{attributes} : ({}) -> {}", x.name, tensor(&x.ty), tensor(ty));
        self.op(text, ty.clone())
    }

    /// A reshape, if it changes the shape.
    pub(super) fn reshaped(&mut self, x: &Value, shape: &[u64]) -> Value {
        if x.ty.shape == shape { x.clone() } else { self.typed("reshape", x, "", &x.ty.with_shape(shape)) }
    }

    /// A transposition, if it changes the order.
    pub(super) fn transposed(&mut self, x: &Value, order: &[usize]) -> Value {
        if order.is_sorted() {
            return x.clone();
        }
        let shape: Vec<u64> = order.iter().map(|&d| x.ty.shape[d]).collect();
        self.typed("transpose", x, &format!(", dims = {}", list(order)), &x.ty.with_shape(shape))
    }

    fn unary(&mut self, op: Unary, x: &Value, ty: &TensorType) -> Value {
        match op {
            Unary::Erf | Unary::Erfc => {
                let text = format!("chlo.{} {} : {} -> {}", op.name(), x.name, tensor(&x.ty), tensor(ty));
                self.op(text, ty.clone())
            }
            Unary::IsFinite => self.typed("is_finite", x, "", ty),
            _ => self.op(format!("stablehlo.{} {} : {}", op.name(), x.name, tensor(ty)), ty.clone()),
        }
    }

    pub(super) fn binary(&mut self, op: Binary, a: &Value, b: &Value) -> Value {
        let text = format!("stablehlo.{} {}, {} : {}", op.name(), a.name, b.name, tensor(&a.ty));
        self.op(text, a.ty.clone())
    }

    pub(super) fn compare(&mut self, direction: Direction, a: &Value, b: &Value) -> Value {
        let order = match a.ty.dtype {
            dtype if dtype.is_float() => "FLOAT",
            dtype if dtype.is_signed_integer() => "SIGNED",
            _ => "UNSIGNED",
        };
        self.compare_by(order, direction, a, b)
    }

    pub(super) fn compare_by(&mut self, order: &str, direction: Direction, a: &Value, b: &Value) -> Value {
        let word = match direction {
            Direction::Eq => "EQ",
            Direction::Ne => "NE",
            Direction::Lt => "LT",
            Direction::Le => "LE",
            Direction::Gt => "GT",
            Direction::Ge => "GE",
        };
        let ty = a.ty.with_dtype(DType::Bool);
        let types = tensors([&a.ty, &b.ty]);
        self.op(format!("stablehlo.compare {word}, {}, {}, {order} : ({types}) -> {}", a.name, b.name, tensor(&ty)), ty)
    }

    pub(super) fn select(&mut self, predicate: &Value, on_true: &Value, on_false: &Value) -> Value {
        let names = format!("{}, {}, {}", predicate.name, on_true.name, on_false.name);
        let types = tensors([&predicate.ty, &on_true.ty]);
        self.op(format!("stablehlo.select {names} : {types}"), on_true.ty.clone())
    }

    pub(super) fn concatenate(&mut self, x: &[Value], dim: usize, ty: &TensorType) -> Value {
        let names: Vec<&str> = x.iter().map(|x| x.name.as_str()).collect();
        let types = tensors(x.iter().map(|x| &x.ty));
        let text = format!("stablehlo.concatenate {}, dim = {dim} : ({types}) -> {}", names.join(", "), tensor(ty));
        self.op(text, ty.clone())
    }

    pub(super) fn pad(&mut self, x: &Value, value: &Value, amounts: &str, ty: &TensorType) -> Value {
        let types = tensors([&x.ty, &value.ty]);
        let text = format!("stablehlo.pad {}, {}, {amounts} : ({types}) -> {}", x.name, value.name, tensor(ty));
        self.op(text, ty.clone())
    }

    fn dot(&mut self, op: &DotGeneral, a: &Value, b: &Value, ty: &TensorType) -> Value {
        let batch = match op.lhs_batch.is_empty() {
            true => String::new(),
            false => format!("batching_dims = {} x {}, ", list(&op.lhs_batch), list(&op.rhs_batch)),
        };
        let precision = if is_single(&a.ty, &b.ty) { ", precision = [HIGHEST, HIGHEST]" } else { "" };
        let contract = format!("contracting_dims = {} x {}{precision}", list(&op.lhs_contract), list(&op.rhs_contract));
        let types = tensors([&a.ty, &b.ty]);
        let text =
            format!("stablehlo.dot_general {}, {}, {batch}{contract} : ({types}) -> {}", a.name, b.name, tensor(ty));
        self.op(text, ty.clone())
    }

    fn convolution(&mut self, op: &Convolution, a: &Value, b: &Value, ty: &TensorType) -> Value {
        let numbers = format!("{}x{}->{}", image(&op.lhs), kernel(&op.rhs), image(&op.result));
        let every = |value: fn(&WindowDim) -> u64| list(op.window.iter().map(value));
        let pad: Vec<String> = op.window.iter().map(|w| format!("[{}, {}]", w.pad_low, w.pad_high)).collect();
        let mut window = String::new();
        if !op.window.is_empty() {
            let _ = write!(
                window,
                "stride = {}, pad = [{}], lhs_dilate = {}, rhs_dilate = {}, reverse = {}",
                every(|w| w.stride),
                pad.join(", "),
                every(|w| w.base_dilation),
                every(|w| w.window_dilation),
                list(op.window.iter().map(|w| w.reversed))
            );
        }
        let precision = match is_single(&a.ty, &b.ty) {
            true => ", precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]",
            false => "",
        };
        let groups = format!(
            "batch_group_count = {} : i64, feature_group_count = {} : i64{precision}",
            op.batch_groups.max(1),
            op.feature_groups.max(1)
        );
        let types = tensors([&a.ty, &b.ty]);
        let text = format!(
            "stablehlo.convolution({}, {}) dim_numbers = {numbers}, window = {{{window}}} {{{groups}}} : ({types}) -> {}",
            a.name,
            b.name,
            tensor(ty)
        );
        self.op(text, ty.clone())
    }

    fn gather(&mut self, dims: &GatherDims, x: &Value, indices: &Value, ty: &TensorType) -> Value {
        let names = [
            "offset_dims",
            "collapsed_slice_dims",
            "operand_batching_dims",
            "start_indices_batching_dims",
            "start_index_map",
        ];
        let numbers = dimension_numbers("gather", names, dims);
        let sizes = array(&dims.slice_sizes);
        let text = format!(
            "\"stablehlo.gather\"({}, {}) <{{dimension_numbers = {numbers}, indices_are_sorted = false, slice_sizes = {sizes}}}> : ({}) -> {}",
            x.name,
            indices.name,
            tensors([&x.ty, &indices.ty]),
            tensor(ty)
        );
        self.op(text, ty.clone())
    }

    /// A call of the function that computes both words. The function is printed once for each shape.
    fn threefry(&mut self, op: &Threefry, x: &[Value]) -> Value {
        let ty = &x[0].ty;
        let sizes: String = ty.shape.iter().map(|size| format!("_{size}")).collect();
        let name = format!("threefry2x32{sizes}");
        if !self.functions.contains_key(&name) {
            let function = threefry_function(&name, ty);
            self.functions.insert(name.clone(), function);
        }
        let both = self.fresh();
        let names: Vec<&str> = x.iter().map(|x| x.name.as_str()).collect();
        let types = tensors(x.iter().map(|x| &x.ty));
        let _ = writeln!(
            self.body,
            "    {both}:2 = func.call @{name}({}) : ({types}) -> ({}){}",
            names.join(", "),
            tensors([ty, ty]),
            self.location
        );
        let word = |at: usize| Value { name: format!("{both}#{at}"), ty: ty.clone() };
        match op.word {
            ThreefryWord::First => word(0),
            ThreefryWord::Second => word(1),
            ThreefryWord::Xor => self.binary(Binary::Xor, &word(0), &word(1)),
        }
    }
}

/// `[0:4, 0:6:2]`
fn ranges(slice: &Slice) -> String {
    let range = |d: usize| match slice.stride[d] {
        1 => format!("{}:{}", slice.start[d], slice.limit[d]),
        stride => format!("{}:{}:{stride}", slice.start[d], slice.limit[d]),
    };
    format!(" [{}]", (0..slice.start.len()).map(range).collect::<Vec<_>>().join(", "))
}

/// `[b, 0, 1, f]`
fn image(dims: &ImageDims) -> String {
    labels(&[(dims.batch, "b"), (dims.feature, "f")], &dims.spatial)
}

/// `[0, 1, i, o]`
fn kernel(dims: &KernelDims) -> String {
    labels(&[(dims.input, "i"), (dims.output, "o")], &dims.spatial)
}

fn labels(named: &[(usize, &str)], spatial: &[usize]) -> String {
    let label = |d: usize| match named.iter().find(|(dim, _)| *dim == d) {
        Some((_, name)) => name.to_string(),
        None => spatial.iter().position(|s| *s == d).unwrap_or_default().to_string(),
    };
    list((0..named.len() + spatial.len()).map(label))
}

/// The cipher that [`Threefry`] describes: 20 rounds, with a part of the key added after each four.
fn threefry_function(name: &str, ty: &TensorType) -> String {
    const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
    let mut p = Printer::default();
    let argument = |name: &str| Value { name: name.into(), ty: ty.clone() };
    let [k0, k1, c0, c1] = ["%k0", "%k1", "%c0", "%c1"].map(argument);
    let parity = p.splat(ty.clone(), f64::from(0x1bd1_1bda_u32));
    let both = p.binary(Binary::Xor, &k0, &k1);
    let k2 = p.binary(Binary::Xor, &both, &parity);
    let keys = [k0.clone(), k1.clone(), k2];
    let mut a = p.binary(Binary::Add, &c0, &keys[0]);
    let mut b = p.binary(Binary::Add, &c1, &keys[1]);
    for group in 0..5 {
        for rotation in ROTATIONS[group % 2] {
            a = p.binary(Binary::Add, &a, &b);
            let left = p.splat(ty.clone(), f64::from(rotation));
            let right = p.splat(ty.clone(), f64::from(32 - rotation));
            let high = p.binary(Binary::ShiftLeft, &b, &left);
            let low = p.binary(Binary::ShiftRightLogical, &b, &right);
            let rotated = p.binary(Binary::Or, &high, &low);
            b = p.binary(Binary::Xor, &rotated, &a);
        }
        a = p.binary(Binary::Add, &a, &keys[(group + 1) % 3]);
        b = p.binary(Binary::Add, &b, &keys[(group + 2) % 3]);
        let round = p.splat(ty.clone(), group as f64 + 1.0);
        b = p.binary(Binary::Add, &b, &round);
    }
    let t = tensor(ty);
    let body = p.body;
    format!(
        "  func.func private @{name}(%k0: {t}, %k1: {t}, %c0: {t}, %c1: {t}) -> ({t}, {t}) {{\n{body}    return {}, {} : {t}, {t}\n  }}\n",
        a.name, b.name
    )
}

/// The dimensions of a lookup, as an attribute whose fields have these names.
pub(super) fn dimension_numbers(op: &str, names: [&str; 5], dims: &GatherDims) -> String {
    let (operands, indices) = (&dims.operand_batching_dims, &dims.indices_batching_dims);
    let all = [&dims.offset_dims, &dims.collapsed_slice_dims, operands, indices, &dims.start_index_map];
    let fields: Vec<String> = names.iter().zip(all).map(|(name, dims)| format!("{name} = {}", list(dims))).collect();
    format!("#stablehlo.{op}<{}, index_vector_dim = {}>", fields.join(", "), dims.index_vector_dim)
}
