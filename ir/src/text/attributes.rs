//! An op as a name and attributes, the form shared by the text form and the JSON form.
//!
//! Properties that follow from the operands and the result's type are omitted, so a reshape prints no shape. Every
//! attribute is a number, a word or a list of these, so that both forms can be written by hand.

use crate::array::RotaryHalves;
use crate::dtype::DType;
use crate::literal::{Literal, Real, Values};
use crate::mesh::{Axis, AxisId, Mesh};
use crate::op::{
    ArgSort, AxisIndex, Binary, BitcastConvert, BroadcastInDim, Combine, Compare, Concatenate, Convert, Convolution,
    Cumulative, Direction, DotGeneral, Extremum, Function, Gather, GatherDims, GroupedDot, GroupedOuter, HostCopy,
    HostRoute, ImageDims, Input, Iota, KernelDims, Microbatches, Op, OutOfBounds, Pad, Parameter, Reduce,
    ReducePrecision, ReduceWindow, Reducer, Reshape, Reverse, Roll, Scatter, ScatterAdd, Select, SelectAndScatter,
    Slice, Threefry, ThreefryWord, Transpose, Unary, WindowDim,
};
use crate::reshard::Collective;
use crate::types::TensorType;
use serde_json::{Map, Value};

/// The reason why a name and attributes do not form an op. Keys are paths within the attributes, e.g. `dims[2]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributeError {
    #[error("there is no op '{name}'; the nearest is '{nearest}'")]
    UnknownOp { name: String, nearest: &'static str },
    #[error("'{op}' has no attribute '{key}'{}", hint(.nearest))]
    Unknown { op: &'static str, key: String, nearest: Option<&'static str> },
    #[error("'{op}' needs the attribute '{key}'")]
    Missing { op: &'static str, key: &'static str },
    #[error("'{op}' needs a type, or the attribute '{key}'")]
    MissingTypeOr { op: &'static str, key: &'static str },
    #[error("'{op}' needs a type")]
    MissingType { op: &'static str },
    #[error("attribute '{key}' must be {expected}")]
    Expected { key: String, expected: &'static str },
}

/// The end of a message about an unknown word, if a known one is close.
pub(crate) fn hint(nearest: &Option<&'static str>) -> String {
    nearest.map(|n| format!("; did you mean '{n}'?")).unwrap_or_default()
}

/// The names of all ops that are neither [`Unary`] nor [`Binary`].
const OTHERS: [&str; 59] = [
    "host_load",
    "host_store",
    "softmax",
    "log_softmax",
    "gelu_erf",
    "gelu_tanh",
    "silu",
    "mean",
    "layer_norm",
    "rms_norm",
    "attention",
    "rotary",
    "batch_norm",
    "gates",
    "cross_entropy",
    "linear_cross_entropy",
    "selective_scan",
    "convolution",
    "reduce_window",
    "select_and_scatter",
    "halo",
    "parameter",
    "input",
    "constant",
    "iota",
    "compare",
    "select",
    "convert",
    "bitcast_convert",
    "reduce_precision",
    "threefry",
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "reverse",
    "roll",
    "sum_of_microbatches",
    "mean_of_microbatches",
    "times_microbatches",
    "slice",
    "concatenate",
    "pad",
    "reduce",
    "cumulative",
    "arg_sort",
    "dot_general",
    "gather",
    "scatter_add",
    "scatter",
    "grouped_dot",
    "grouped_outer",
    "axis_index",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "local_slice",
    "keep_first",
    "shift",
];

/// All op names, sorted.
pub(crate) fn op_names() -> Vec<&'static str> {
    let unary = Unary::ALL.iter().map(|u| u.name());
    let mut names: Vec<&str> = unary.chain(Binary::ALL.iter().map(|b| b.name())).chain(OTHERS).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The known word with the fewest edits from `word`.
pub(crate) fn nearest(word: &str, known: &[&'static str]) -> Option<&'static str> {
    // Truncate long words, which are close to no known one.
    let word: Vec<char> = word.chars().take(64).collect();
    known.iter().copied().min_by_key(|k| edits(&word, &k.chars().collect::<Vec<_>>()))
}

/// [`nearest`], if it is close enough to be what was meant.
pub(crate) fn near(word: &str, known: &[&'static str]) -> Option<&'static str> {
    let best = nearest(word, known)?;
    let distance = edits(&word.chars().take(64).collect::<Vec<_>>(), &best.chars().collect::<Vec<_>>());
    (distance <= 1 + best.len() / 3).then_some(best)
}

/// The Levenshtein distance.
fn edits(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replace = diagonal + (x != y) as usize;
            diagonal = row[j + 1];
            row[j + 1] = replace.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The name and value of an attribute.
pub(crate) type Attribute = (&'static str, Value);

/// The attributes of `op` in a node of type `ty`, in print order.
pub(crate) fn attributes(op: &Op, ty: &TensorType) -> Vec<Attribute> {
    let shape_unless_typed =
        |shape: &Vec<u64>| (*shape != ty.shape).then(|| ("shape", list(shape))).into_iter().collect::<Vec<_>>();
    let dtype_unless_typed =
        |dtype: DType| (dtype != ty.dtype).then(|| ("dtype", word(dtype.name()))).into_iter().collect::<Vec<_>>();
    match op {
        Op::Parameter(op) => {
            let marks = [("frozen", op.frozen), ("no_decay", op.no_decay)].into_iter().filter(|(_, marked)| *marked);
            [("name", word(&op.name))].into_iter().chain(marks.map(|(mark, _)| (mark, true.into()))).collect()
        }
        Op::Input(Input { name, .. }) => vec![("name", word(name))],
        Op::Constant(literal) => {
            let mut all = vec![match &literal.values {
                Values::Splat(v) => ("value", real(*v)),
                Values::Dense(v) => ("values", Value::Array(v.iter().map(|&r| real(r)).collect())),
            }];
            if literal.batch_power != 0 {
                all.push(("batch_power", literal.batch_power.into()));
            }
            all
        }
        Op::Iota(op) => vec![("dim", op.dim.into())],
        Op::Unary(_) | Op::Binary(_) | Op::Select(Select {}) => Vec::new(),
        Op::Compare(op) => vec![("direction", word(direction_name(op.direction)))],
        Op::Convert(op) => dtype_unless_typed(op.dtype),
        Op::BitcastConvert(op) => dtype_unless_typed(op.dtype),
        Op::ReducePrecision(op) => {
            vec![("exponent_bits", op.exponent_bits.into()), ("mantissa_bits", op.mantissa_bits.into())]
        }
        Op::Threefry(op) => vec![("word", word(op.word.name()))],
        Op::BroadcastInDim(op) => [shape_unless_typed(&op.shape), vec![("dims", list(&op.dims))]].concat(),
        Op::Reshape(op) => shape_unless_typed(&op.shape),
        Op::Transpose(op) => vec![("permutation", list(&op.permutation))],
        Op::Reverse(op) => vec![("dims", list(&op.dims))],
        Op::Roll(op) => vec![("dim", op.dim.into()), ("by", op.by.into())],
        Op::Slice(op) => {
            let mut all = vec![("start", list(&op.start)), ("limit", list(&op.limit))];
            if op.stride.len() != op.start.len() || op.stride.iter().any(|&s| s != 1) {
                all.push(("stride", list(&op.stride)));
            }
            all
        }
        Op::Concatenate(op) => vec![("dim", op.dim.into())],
        Op::Pad(op) => {
            let mut all = vec![("low", list(&op.low)), ("high", list(&op.high))];
            if op.interior.len() != op.low.len() || op.interior.iter().any(|&i| i != 0) {
                all.push(("interior", list(&op.interior)));
            }
            all
        }
        Op::Reduce(op) => vec![("reducer", word(op.reducer.name())), ("dims", list(&op.dims))],
        Op::Cumulative(op) => {
            let mut all = vec![("reducer", word(op.reducer.name())), ("dim", op.dim.into())];
            if op.reverse {
                all.push(("reverse", true.into()));
            }
            all
        }
        Op::ArgSort(op) => vec![("dim", op.dim.into()), ("descending", list(&op.descending))],
        Op::Convolution(op) => {
            let image = |dims: &ImageDims| list(&[&[dims.batch, dims.feature], dims.spatial.as_slice()].concat());
            let kernel = list(&[&[op.rhs.output, op.rhs.input], op.rhs.spatial.as_slice()].concat());
            let mut all = vec![("lhs", image(&op.lhs)), ("rhs", kernel), ("result", image(&op.result))];
            all.extend(window(&op.window));
            let groups = [("feature_groups", op.feature_groups), ("batch_groups", op.batch_groups)];
            all.extend(groups.into_iter().filter(|g| g.1 != 1).map(|(name, n)| (name, n.into())));
            all
        }
        Op::ReduceWindow(op) => [vec![("reducer", word(op.reducer.name()))], window(&op.window)].concat(),
        Op::SelectAndScatter(op) => {
            let select = if op.select == Extremum::Max { "max" } else { "min" };
            [vec![("select", word(select))], window(&op.window)].concat()
        }
        Op::DotGeneral(op) => {
            let all = [
                ("lhs_batch", &op.lhs_batch),
                ("rhs_batch", &op.rhs_batch),
                ("lhs_contract", &op.lhs_contract),
                ("rhs_contract", &op.rhs_contract),
            ];
            all.into_iter().filter(|(_, dims)| !dims.is_empty()).map(|(key, dims)| (key, list(dims))).collect()
        }
        Op::Gather(op) => {
            let mode = match op.out_of_bounds {
                OutOfBounds::Clamp => "clamp",
                OutOfBounds::Zero => "zero",
            };
            [gather_dims(&op.dims), vec![("out_of_bounds", word(mode))]].concat()
        }
        Op::ScatterAdd(op) => [gather_dims(&op.dims), shape_unless_typed(&op.shape)].concat(),
        Op::Scatter(op) => [gather_dims(&op.dims), vec![("combine", word(op.combine.name()))]].concat(),
        Op::GroupedDot(op) => [vec![("contract", op.contract.into())], spread(op.of)].concat(),
        Op::GroupedOuter(op) => [vec![("groups", op.groups.into())], spread(op.of)].concat(),
        Op::Composite(op) => function(&op.function),
        Op::Collective(op) => [collective(&op.collective), vec![("mesh", mesh(&op.mesh))]].concat(),
        Op::HostCopy(_) | Op::Microbatches(_) => Vec::new(),
        Op::AxisIndex(op) => {
            [vec![("axes", axes(&op.axes)), ("mesh", mesh(&op.mesh))], dtype_unless_typed(op.dtype)].concat()
        }
    }
}

fn list<T: Clone + Into<Value>>(items: &[T]) -> Value {
    Value::Array(items.iter().cloned().map(Into::into).collect())
}

/// The number of groups among which rows are spread, if given.
fn spread(of: Option<u64>) -> Vec<(&'static str, Value)> {
    of.map(|of| ("of", of.into())).into_iter().collect()
}

fn word(text: &str) -> Value {
    Value::String(text.to_string())
}

fn real(value: Real) -> Value {
    match value.0 {
        v if v.is_nan() => word("nan"),
        f64::INFINITY => word("inf"),
        f64::NEG_INFINITY => word("-inf"),
        v => v.into(),
    }
}

fn axes(ids: &[AxisId]) -> Value {
    Value::Array(ids.iter().map(|a| a.0.into()).collect())
}

fn mesh(mesh: &Mesh) -> Value {
    Value::Array(mesh.axes.iter().map(|a| Value::Array(vec![word(&a.name), a.size.into()])).collect())
}

fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Eq => "EQ",
        Direction::Ne => "NE",
        Direction::Lt => "LT",
        Direction::Le => "LE",
        Direction::Gt => "GT",
        Direction::Ge => "GE",
    }
}

fn gather_dims(dims: &GatherDims) -> Vec<Attribute> {
    let mut all =
        vec![("offset_dims", list(&dims.offset_dims)), ("collapsed_slice_dims", list(&dims.collapsed_slice_dims))];
    if !dims.operand_batching_dims.is_empty() || !dims.indices_batching_dims.is_empty() {
        all.push(("operand_batching_dims", list(&dims.operand_batching_dims)));
        all.push(("indices_batching_dims", list(&dims.indices_batching_dims)));
    }
    all.push(("start_index_map", list(&dims.start_index_map)));
    all.push(("index_vector_dim", dims.index_vector_dim.into()));
    all.push(("slice_sizes", list(&dims.slice_sizes)));
    all
}

fn function(function: &Function) -> Vec<Attribute> {
    match function {
        Function::Softmax { dim } | Function::LogSoftmax { dim } | Function::CrossEntropy { dim } => {
            vec![("dim", (*dim).into())]
        }
        Function::LinearCrossEntropy { contract, chunks } => {
            vec![("contract", (*contract).into()), ("chunks", (*chunks).into())]
        }
        Function::GeluErf | Function::GeluTanh | Function::Silu | Function::SelectiveScan => Vec::new(),
        Function::Mean { dims } => vec![("dims", list(dims))],
        Function::LayerNorm { eps } | Function::RmsNorm { eps } => vec![("eps", real(*eps))],
        Function::BatchNorm { dim, eps } => vec![("dim", (*dim).into()), ("eps", real(*eps))],
        Function::Gates { chosen, normalised } => {
            let normalised = normalised.then(|| ("normalised", true.into()));
            [("chosen", (*chosen).into())].into_iter().chain(normalised).collect()
        }
        Function::Attention { scale, causal, blocks } => {
            let causal = causal.then(|| ("causal", true.into()));
            let blocks = (*blocks != 1).then(|| ("blocks", (*blocks).into()));
            [("scale", real(*scale))].into_iter().chain(causal).chain(blocks).collect()
        }
        Function::Rotary { halves: RotaryHalves::Split } => Vec::new(),
        Function::Rotary { halves: RotaryHalves::Interleaved } => vec![("interleaved", true.into())],
    }
}

/// Only the differences from windows that slide by one over an unmodified operand.
fn window(window: &[WindowDim]) -> Vec<Attribute> {
    let sizes = |of: fn(&WindowDim) -> u64| window.iter().map(of).collect::<Vec<u64>>();
    let pads = |of: fn(&WindowDim) -> i64| window.iter().map(of).collect::<Vec<i64>>();
    let mut all = vec![("size", list(&sizes(|w| w.size)))];
    let mut positive = |name, values: Vec<u64>| {
        if values.iter().any(|&v| v != 1) {
            all.push((name, list(&values)));
        }
    };
    positive("stride", sizes(|w| w.stride));
    positive("base_dilation", sizes(|w| w.base_dilation));
    positive("window_dilation", sizes(|w| w.window_dilation));
    for (name, values) in [("pad_low", pads(|w| w.pad_low)), ("pad_high", pads(|w| w.pad_high))] {
        if values.iter().any(|&v| v != 0) {
            all.push((name, list(&values)));
        }
    }
    let reversed: Vec<usize> = (0..window.len()).filter(|&i| window[i].reversed).collect();
    if !reversed.is_empty() {
        all.push(("reversed", list(&reversed)));
    }
    all
}

fn collective(collective: &Collective) -> Vec<Attribute> {
    let mut all = vec![("axes", axes(collective.axes()))];
    match collective {
        Collective::AllReduce { reducer, .. } | Collective::KeepFirst { reducer, .. } => {
            all.push(("reducer", word(reducer.name())));
        }
        Collective::ReduceScatter { reducer, dim, outer, .. } => {
            all.extend([("reducer", word(reducer.name())), ("dim", (*dim).into()), ("outer", (*outer).into())]);
        }
        Collective::AllGather { dim, outer, .. } | Collective::LocalSlice { dim, outer, .. } => {
            all.extend([("dim", (*dim).into()), ("outer", (*outer).into())]);
        }
        Collective::Halo { dim, low, high, reducer, .. } => {
            all.extend([("dim", (*dim).into()), ("low", (*low).into()), ("high", (*high).into())]);
            all.push(("reducer", word(reducer.name())));
        }
        Collective::Shift { by, .. } => all.push(("by", (*by).into())),
        Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
            all.extend([("split_dim", (*split_dim).into()), ("split_outer", (*split_outer).into())]);
            all.extend([("concat_dim", (*concat_dim).into()), ("concat_outer", (*concat_outer).into())]);
        }
    }
    all
}

/// The op with this name and these attributes. `ty` is the node's type, if written.
pub(crate) fn op_from(
    name: &str,
    attributes: &Map<String, Value>,
    ty: Option<&TensorType>,
) -> Result<Op, AttributeError> {
    if let Some(op) = Unary::ALL.into_iter().find(|u| u.name() == name) {
        return Fields::new(op.name(), attributes).end(Op::Unary(op));
    }
    if let Some(op) = Binary::ALL.into_iter().find(|b| b.name() == name) {
        return Fields::new(op.name(), attributes).end(Op::Binary(op));
    }
    let Some(&name) = OTHERS.iter().find(|&&o| o == name) else {
        let names = op_names();
        let nearest = nearest(name, &names).unwrap_or("add");
        return Err(AttributeError::UnknownOp { name: name.chars().take(80).collect(), nearest });
    };
    let mut f = Fields::new(name, attributes);
    let typed = || ty.cloned().ok_or(AttributeError::MissingType { op: name });
    let op = match name {
        "parameter" => {
            let (name, ty) = (f.text("name")?, typed()?);
            Op::Parameter(Parameter { name, ty, frozen: f.flag("frozen")?, no_decay: f.flag("no_decay")? })
        }
        "input" => Op::Input(Input { name: f.text("name")?, ty: typed()? }),
        "iota" => Op::Iota(Iota { dim: f.size("dim")?, ty: typed()? }),
        "compare" => Op::Compare(Compare { direction: f.direction()? }),
        "select" => Op::Select(Select {}),
        "convert" => Op::Convert(Convert { dtype: f.dtype(ty)? }),
        "bitcast_convert" => Op::BitcastConvert(BitcastConvert { dtype: f.dtype(ty)? }),
        "reduce_precision" => Op::ReducePrecision(ReducePrecision {
            exponent_bits: f.number("exponent_bits")?,
            mantissa_bits: f.number("mantissa_bits")?,
        }),
        "threefry" => {
            let find = |text: &str| ThreefryWord::ALL.into_iter().find(|w| w.name() == text);
            let word = find(&f.text("word")?);
            Op::Threefry(Threefry { word: word.ok_or_else(|| expected("word", "\"first\", \"second\" or \"xor\""))? })
        }
        "broadcast_in_dim" => Op::BroadcastInDim(BroadcastInDim { dims: f.dims("dims")?, shape: f.shape(ty)? }),
        "reshape" => Op::Reshape(Reshape { shape: f.shape(ty)? }),
        "transpose" => Op::Transpose(Transpose { permutation: f.dims("permutation")? }),
        "reverse" => Op::Reverse(Reverse { dims: f.dims("dims")? }),
        "roll" => Op::Roll(Roll { dim: f.size("dim")?, by: f.number("by")? }),
        "slice" => {
            let start = f.sizes("start")?;
            let stride = f.sizes_or("stride", || vec![1; start.len()])?;
            Op::Slice(Slice { limit: f.sizes("limit")?, start, stride })
        }
        "concatenate" => Op::Concatenate(Concatenate { dim: f.size("dim")? }),
        "pad" => {
            let low = f.integers("low")?;
            let interior = f.sizes_or("interior", || vec![0; low.len()])?;
            Op::Pad(Pad { high: f.integers("high")?, low, interior })
        }
        "reduce" => Op::Reduce(Reduce { reducer: f.reducer()?, dims: f.dims("dims")? }),
        "cumulative" => {
            let (reducer, dim) = (f.reducer()?, f.size("dim")?);
            Op::Cumulative(Cumulative { reducer, dim, reverse: f.flag("reverse")? })
        }
        "arg_sort" => {
            let (dim, descending) = (f.size("dim")?, f.required("descending")?);
            let descending = Fields::items(descending, "descending", "true or false", Value::as_bool)?;
            Op::ArgSort(ArgSort { dim, descending })
        }
        "convolution" => {
            let (lhs, result) = (f.image_dims("lhs")?, f.image_dims("result")?);
            let ImageDims { batch: output, feature: input, spatial } = f.image_dims("rhs")?;
            let window = f.window()?;
            if [&lhs.spatial, &spatial, &result.spatial].iter().any(|s| s.len() != window.len()) {
                return Err(expected("size", "a list with an entry for each spatial dimension"));
            }
            let rhs = KernelDims { input, output, spatial };
            let (feature_groups, batch_groups) = (f.number_or("feature_groups", 1)?, f.number_or("batch_groups", 1)?);
            Op::Convolution(Convolution { lhs, rhs, result, window, feature_groups, batch_groups })
        }
        "reduce_window" => Op::ReduceWindow(ReduceWindow { reducer: f.reducer()?, window: f.window()? }),
        "select_and_scatter" => {
            let select = match f.text("select")?.as_str() {
                "max" => Extremum::Max,
                "min" => Extremum::Min,
                _ => return Err(expected("select", "\"max\" or \"min\"")),
            };
            Op::SelectAndScatter(SelectAndScatter { select, window: f.window()? })
        }
        "dot_general" => Op::DotGeneral(DotGeneral {
            lhs_batch: f.dims_or_none("lhs_batch")?,
            rhs_batch: f.dims_or_none("rhs_batch")?,
            lhs_contract: f.dims_or_none("lhs_contract")?,
            rhs_contract: f.dims_or_none("rhs_contract")?,
        }),
        "gather" => {
            let mode = f.text("out_of_bounds")?;
            let out_of_bounds = match mode.as_str() {
                "clamp" => OutOfBounds::Clamp,
                "zero" => OutOfBounds::Zero,
                _ => return Err(expected("out_of_bounds", "\"clamp\" or \"zero\"")),
            };
            Op::Gather(Gather { dims: f.gather_dims()?, out_of_bounds })
        }
        "scatter_add" => Op::ScatterAdd(ScatterAdd { dims: f.gather_dims()?, shape: f.shape(ty)? }),
        "scatter" => {
            let find = |text: &str| Combine::ALL.into_iter().find(|c| c.name() == text);
            let combine = find(&f.text("combine")?);
            let words = "\"replace\", \"multiply\", \"minimum\" or \"maximum\"";
            let combine = combine.ok_or_else(|| expected("combine", words))?;
            Op::Scatter(Scatter { dims: f.gather_dims()?, combine })
        }
        "grouped_dot" => Op::GroupedDot(GroupedDot { contract: f.number("contract")?, of: f.number_if_any("of")? }),
        "grouped_outer" => Op::GroupedOuter(GroupedOuter { groups: f.number("groups")?, of: f.number_if_any("of")? }),
        "softmax" => Function::Softmax { dim: f.size("dim")? }.into(),
        "log_softmax" => Function::LogSoftmax { dim: f.size("dim")? }.into(),
        "cross_entropy" => Function::CrossEntropy { dim: f.size("dim")? }.into(),
        "linear_cross_entropy" => {
            Function::LinearCrossEntropy { contract: f.size("contract")?, chunks: f.number("chunks")? }.into()
        }
        "gelu_erf" => Function::GeluErf.into(),
        "gelu_tanh" => Function::GeluTanh.into(),
        "silu" => Function::Silu.into(),
        "selective_scan" => Function::SelectiveScan.into(),
        "mean" => Function::Mean { dims: f.dims("dims")? }.into(),
        "layer_norm" => Function::LayerNorm { eps: f.real("eps")? }.into(),
        "rms_norm" => Function::RmsNorm { eps: f.real("eps")? }.into(),
        "batch_norm" => Function::BatchNorm { dim: f.size("dim")?, eps: f.real("eps")? }.into(),
        "gates" => Function::Gates { chosen: f.number("chosen")?, normalised: f.flag("normalised")? }.into(),
        "attention" => {
            let (scale, causal) = (f.real("scale")?, f.flag("causal")?);
            Function::Attention { scale, causal, blocks: f.number_or("blocks", 1)? }.into()
        }
        "rotary" if f.flag("interleaved")? => Function::Rotary { halves: RotaryHalves::Interleaved }.into(),
        "rotary" => Function::Rotary { halves: RotaryHalves::Split }.into(),
        "sum_of_microbatches" => Op::Microbatches(Microbatches::Sum),
        "mean_of_microbatches" => Op::Microbatches(Microbatches::Mean),
        "times_microbatches" => Op::Microbatches(Microbatches::Times),
        "host_load" => Op::HostCopy(HostCopy { route: HostRoute::Load }),
        "host_store" => Op::HostCopy(HostCopy { route: HostRoute::Store }),
        "axis_index" => Op::AxisIndex(AxisIndex { axes: f.axes()?, mesh: f.mesh()?, dtype: f.dtype(ty)? }),
        "constant" => {
            let ty = typed()?;
            Op::Constant(Literal { ty, values: f.values()?, batch_power: f.batch_power()? })
        }
        _ => {
            let collective = f.collective(name)?;
            let mesh = f.mesh()?;
            Op::collective(collective, &mesh)
        }
    };
    f.end(op)
}

const A_NUMBER: &str = "a number, \"inf\", \"-inf\" or \"nan\"";

fn read_real(value: &Value) -> Option<Real> {
    match (value.as_f64(), value.as_str()) {
        (Some(v), _) => Some(Real(v)),
        (None, Some("inf")) => Some(Real(f64::INFINITY)),
        (None, Some("-inf")) => Some(Real(f64::NEG_INFINITY)),
        (None, Some("nan")) => Some(Real(f64::NAN)),
        _ => None,
    }
}

fn expected(key: impl Into<String>, expected: &'static str) -> AttributeError {
    AttributeError::Expected { key: key.into(), expected }
}

/// Reads attributes one by one and records the known ones.
struct Fields<'a> {
    op: &'static str,
    map: &'a Map<String, Value>,
    known: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    fn new(op: &'static str, map: &'a Map<String, Value>) -> Self {
        Fields { op, map, known: Vec::new() }
    }

    /// Returns the op, unless there are attributes that it does not have.
    fn end(self, op: Op) -> Result<Op, AttributeError> {
        match self.map.keys().find(|k| !self.known.contains(&k.as_str())) {
            None => Ok(op),
            Some(key) => {
                let nearest = near(key, &self.known);
                Err(AttributeError::Unknown { op: self.op, key: key.chars().take(80).collect(), nearest })
            }
        }
    }

    fn optional(&mut self, key: &'static str) -> Option<&'a Value> {
        self.known.push(key);
        self.map.get(key)
    }

    fn required(&mut self, key: &'static str) -> Result<&'a Value, AttributeError> {
        self.optional(key).ok_or(AttributeError::Missing { op: self.op, key })
    }

    fn text(&mut self, key: &'static str) -> Result<String, AttributeError> {
        let value = self.required(key)?;
        value.as_str().map(str::to_string).ok_or_else(|| expected(key, "a string"))
    }

    /// A number that fits `T`.
    fn number<T: TryFrom<u64>>(&mut self, key: &'static str) -> Result<T, AttributeError> {
        let value = self.required(key)?.as_u64().and_then(|v| T::try_from(v).ok());
        value.ok_or_else(|| expected(key, "a small whole number"))
    }

    fn size(&mut self, key: &'static str) -> Result<usize, AttributeError> {
        self.number(key)
    }

    fn items<T>(
        value: &Value,
        key: &str,
        what: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, AttributeError> {
        let items = value.as_array().ok_or_else(|| expected(key, "a list"))?;
        let item = |(i, v): (usize, &Value)| read(v).ok_or_else(|| expected(format!("{key}[{i}]"), what));
        items.iter().enumerate().map(item).collect()
    }

    /// `true` or `false`, which is the default.
    fn flag(&mut self, key: &'static str) -> Result<bool, AttributeError> {
        self.optional(key).map_or(Ok(false), |v| v.as_bool().ok_or_else(|| expected(key, "true or false")))
    }

    fn dims(&mut self, key: &'static str) -> Result<Vec<usize>, AttributeError> {
        let read = |v: &Value| v.as_u64().and_then(|d| usize::try_from(d).ok());
        Fields::items(self.required(key)?, key, "a dimension", read)
    }

    fn dims_or_none(&mut self, key: &'static str) -> Result<Vec<usize>, AttributeError> {
        if self.map.contains_key(key) {
            return self.dims(key);
        }
        self.known.push(key);
        Ok(Vec::new())
    }

    fn sizes(&mut self, key: &'static str) -> Result<Vec<u64>, AttributeError> {
        Fields::items(self.required(key)?, key, "a size", Value::as_u64)
    }

    fn sizes_or(&mut self, key: &'static str, default: impl Fn() -> Vec<u64>) -> Result<Vec<u64>, AttributeError> {
        match self.optional(key) {
            Some(value) => Fields::items(value, key, "a size", Value::as_u64),
            None => Ok(default()),
        }
    }

    fn integers(&mut self, key: &'static str) -> Result<Vec<i64>, AttributeError> {
        Fields::items(self.required(key)?, key, "an integer", Value::as_i64)
    }

    fn shape(&mut self, ty: Option<&TensorType>) -> Result<Vec<u64>, AttributeError> {
        match (self.optional("shape"), ty) {
            (Some(value), _) => Fields::items(value, "shape", "a size", Value::as_u64),
            (None, Some(ty)) => Ok(ty.shape.clone()),
            (None, None) => Err(AttributeError::MissingTypeOr { op: self.op, key: "shape" }),
        }
    }

    fn dtype(&mut self, ty: Option<&TensorType>) -> Result<DType, AttributeError> {
        match (self.optional("dtype"), ty) {
            (Some(value), _) => {
                let dtype = value.as_str().and_then(DType::parse);
                dtype.ok_or_else(|| expected("dtype", "an element type such as \"f32\""))
            }
            (None, Some(ty)) => Ok(ty.dtype),
            (None, None) => Err(AttributeError::MissingTypeOr { op: self.op, key: "dtype" }),
        }
    }

    fn direction(&mut self) -> Result<Direction, AttributeError> {
        let all = [Direction::Eq, Direction::Ne, Direction::Lt, Direction::Le, Direction::Gt, Direction::Ge];
        let text = self.text("direction")?;
        let found = all.into_iter().find(|&d| direction_name(d) == text);
        found.ok_or_else(|| expected("direction", "\"EQ\", \"NE\", \"LT\", \"LE\", \"GT\" or \"GE\""))
    }

    fn reducer(&mut self) -> Result<Reducer, AttributeError> {
        let text = self.text("reducer")?;
        let words = "\"sum\", \"product\", \"max\", \"min\", \"and\" or \"or\"";
        Reducer::parse(&text).ok_or_else(|| expected("reducer", words))
    }

    fn number_or(&mut self, key: &'static str, default: u64) -> Result<u64, AttributeError> {
        if self.map.contains_key(key) {
            return self.number(key);
        }
        self.known.push(key);
        Ok(default)
    }

    fn number_if_any(&mut self, key: &'static str) -> Result<Option<u64>, AttributeError> {
        self.known.push(key);
        self.map.contains_key(key).then(|| self.number(key)).transpose()
    }

    /// The batch, feature and spatial dimensions.
    fn image_dims(&mut self, key: &'static str) -> Result<ImageDims, AttributeError> {
        match self.dims(key)?.as_slice() {
            [batch, feature, spatial @ ..] => {
                Ok(ImageDims { batch: *batch, feature: *feature, spatial: spatial.to_vec() })
            }
            _ => Err(expected(key, "a list of at least two dimensions")),
        }
    }

    fn window(&mut self) -> Result<Vec<WindowDim>, AttributeError> {
        let size = self.sizes("size")?;
        let n = size.len();
        let [stride, base_dilation, window_dilation] =
            ["stride", "base_dilation", "window_dilation"].map(|key| self.sizes_or(key, || vec![1; n]));
        let [pad_low, pad_high] = ["pad_low", "pad_high"].map(|key| match self.map.contains_key(key) {
            true => self.integers(key),
            false => {
                self.known.push(key);
                Ok(vec![0; n])
            }
        });
        let reversed = self.dims_or_none("reversed")?;
        let (stride, base_dilation, window_dilation) = (stride?, base_dilation?, window_dilation?);
        let (pad_low, pad_high) = (pad_low?, pad_high?);
        let lengths = [stride.len(), base_dilation.len(), window_dilation.len(), pad_low.len(), pad_high.len()];
        if lengths.iter().any(|&l| l != n) {
            return Err(expected("size", "a list as long as the window's other attributes"));
        }
        let dim = |i: usize| WindowDim {
            size: size[i],
            stride: stride[i],
            pad_low: pad_low[i],
            pad_high: pad_high[i],
            base_dilation: base_dilation[i],
            window_dilation: window_dilation[i],
            reversed: reversed.contains(&i),
        };
        Ok((0..n).map(dim).collect())
    }

    fn gather_dims(&mut self) -> Result<GatherDims, AttributeError> {
        Ok(GatherDims {
            offset_dims: self.dims("offset_dims")?,
            collapsed_slice_dims: self.dims("collapsed_slice_dims")?,
            operand_batching_dims: self.dims_or_none("operand_batching_dims")?,
            indices_batching_dims: self.dims_or_none("indices_batching_dims")?,
            start_index_map: self.dims("start_index_map")?,
            index_vector_dim: self.size("index_vector_dim")?,
            slice_sizes: self.sizes("slice_sizes")?,
        })
    }

    fn real(&mut self, key: &'static str) -> Result<Real, AttributeError> {
        read_real(self.required(key)?).ok_or_else(|| expected(key, A_NUMBER))
    }

    fn values(&mut self) -> Result<Values, AttributeError> {
        let (what, read) = (A_NUMBER, read_real);
        match (self.optional("value"), self.optional("values")) {
            (Some(_), Some(_)) => Err(expected("values", "absent where 'value' is given")),
            (Some(one), None) => read(one).map(Values::Splat).ok_or_else(|| expected("value", what)),
            (None, Some(all)) => Ok(Values::Dense(Fields::items(all, "values", what, read)?.into())),
            (None, None) => Err(AttributeError::Missing { op: self.op, key: "value" }),
        }
    }

    fn batch_power(&mut self) -> Result<i8, AttributeError> {
        let Some(value) = self.optional("batch_power") else { return Ok(0) };
        let power = value.as_i64().and_then(|v| i8::try_from(v).ok());
        power.ok_or_else(|| expected("batch_power", "a small integer"))
    }

    fn axes(&mut self) -> Result<Vec<AxisId>, AttributeError> {
        let read = |v: &Value| v.as_u64().and_then(|a| u8::try_from(a).ok()).map(AxisId);
        Fields::items(self.required("axes")?, "axes", "the number of an axis", read)
    }

    fn mesh(&mut self) -> Result<Mesh, AttributeError> {
        let read = |v: &Value| match v.as_array()?.as_slice() {
            [name, size] => {
                let size = u32::try_from(size.as_u64()?).ok()?;
                Some(Axis { name: name.as_str()?.to_string(), size })
            }
            _ => None,
        };
        let what = "an axis such as [\"data\", 2]";
        Ok(Mesh { axes: Fields::items(self.required("mesh")?, "mesh", what, read)? })
    }

    fn collective(&mut self, name: &str) -> Result<Collective, AttributeError> {
        let axes = self.axes()?;
        Ok(match name {
            "all_reduce" => Collective::AllReduce { axes, reducer: self.reducer()? },
            "reduce_scatter" => Collective::ReduceScatter {
                axes,
                reducer: self.reducer()?,
                dim: self.number("dim")?,
                outer: self.number("outer")?,
            },
            "all_gather" => Collective::AllGather { axes, dim: self.number("dim")?, outer: self.number("outer")? },
            "all_to_all" => Collective::AllToAll {
                axes,
                split_dim: self.number("split_dim")?,
                split_outer: self.number("split_outer")?,
                concat_dim: self.number("concat_dim")?,
                concat_outer: self.number("concat_outer")?,
            },
            "halo" => Collective::Halo {
                axes,
                dim: self.number("dim")?,
                low: self.number("low")?,
                high: self.number("high")?,
                reducer: self.reducer()?,
            },
            "shift" => Collective::Shift { axes, by: self.number("by")? },
            "local_slice" => Collective::LocalSlice { axes, dim: self.number("dim")?, outer: self.number("outer")? },
            _ => Collective::KeepFirst { axes, reducer: self.reducer()? },
        })
    }
}
