//! Passes of attention as calls of cuDNN's kernels, which XLA knows for NVIDIA's GPUs.
//!
//! Names, operands, layouts and attributes are those of XLA's custom calls `__cudnn$fmhaSoftmax` and
//! `__cudnn$fmhaSoftmaxBackward`, or `__cudnn$fmhaScaleBiasSoftmax` and its backward pass if a bias hides keys. Tensors
//! are `[batch, position, head, width]`, and results `[batch, head, position, width]` in the same order of memory.
//! Statistics are `[batch, head, query]` in f32.

use super::types::{list, quoted, tensor, tensors};
use super::{Printer, Value};
use crate::legal::Legal;
use altiplano_ir::attention::{Attention, Backward, Dim, Forward, Labelled, Mask, Pass, Sizes, Statistics, order};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::types::TensorType;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};

/// The calls of a module that are not printed yet.
pub(super) struct Calls<'a> {
    legal: &'a Legal,
    passes: BTreeMap<ValueId, Vec<&'a Pass>>,
    /// Values of the rewritten graph that calls have computed.
    pub(super) computed: BTreeSet<ValueId>,
}

/// Dimensions of results, with the heads of a group apart.
const OF_RESULT: [Dim; 5] = [Dim::Batch, Dim::Head, Dim::Group, Dim::Query, Dim::Width];

/// The bias of a key that is not seen. Any score vanishes beside it, and the difference of two is finite.
const HIDDEN: f64 = -2_199_023_255_552.0;

impl<'a> Calls<'a> {
    pub(super) fn new(legal: &'a Legal, passes: &'a [Pass]) -> Calls<'a> {
        let mut at: BTreeMap<ValueId, Vec<&Pass>> = BTreeMap::new();
        for pass in passes {
            at.entry(legal.values[pass.position().index()]).or_default().push(pass);
        }
        Calls { legal, passes: at, computed: BTreeSet::new() }
    }

    /// The values in an order in which arguments come first, operands before what is made of them, and all that a call
    /// reads before what it computes. `None` if there is no such order.
    pub(super) fn order(&self) -> Option<Vec<ValueId>> {
        let graph = self.graph();
        let of_pass = |at: ValueId, pass: &Pass| pass.computes().into_iter().map(move |v| (self.at(v), at));
        let calls = self.passes.iter().flat_map(|(&at, passes)| passes.iter().map(move |pass| (at, pass)));
        let called: BTreeMap<ValueId, ValueId> = calls.flat_map(|(at, pass)| of_pass(at, pass)).collect();
        let needed = |v: ValueId| match (called.get(&v), self.passes.get(&v)) {
            (_, Some(passes)) => passes.iter().flat_map(|pass| pass.reads()).map(|read| self.at(read)).collect(),
            (Some(&at), None) => vec![at],
            (None, None) => graph.node(v).operands.clone(),
        };
        let is_argument = |v: &ValueId| matches!(graph.node(*v).op, Op::Input(_) | Op::Parameter(_));
        let (mut begun, mut placed) = (vec![false; graph.len()], vec![false; graph.len()]);
        let mut order = Vec::with_capacity(graph.len());
        let mut open: Vec<ValueId> = Vec::new();
        for v in graph.values().filter(is_argument).chain(graph.values()) {
            open.push(v);
            while let Some(&next) = open.last() {
                if std::mem::replace(&mut begun[next.index()], true) {
                    open.pop();
                    if !std::mem::replace(&mut placed[next.index()], true) {
                        order.push(next);
                    }
                    continue;
                }
                for before in needed(next) {
                    match (begun[before.index()], placed[before.index()]) {
                        (true, false) => return None,
                        (false, _) => open.push(before),
                        _ => {}
                    }
                }
            }
        }
        Some(order)
    }

    /// Marks the values that have to be printed: those that results depend on and no kernel computes.
    pub(super) fn live(&self) -> Vec<bool> {
        let graph = self.graph();
        let mut live = vec![self.passes.is_empty(); graph.len()];
        let mut computed: BTreeMap<ValueId, &Pass> = BTreeMap::new();
        for pass in self.passes.values().flatten() {
            computed.extend(pass.computes().into_iter().map(|v| (self.at(v), *pass)));
        }
        let mut open = if self.passes.is_empty() { Vec::new() } else { graph.outputs.clone() };
        while let Some(v) = open.pop() {
            if std::mem::replace(&mut live[v.index()], true) {
                continue;
            }
            match computed.get(&v) {
                Some(pass) => open.extend(pass.reads().into_iter().map(|read| self.at(read))),
                None => open.extend(&graph.node(v).operands),
            }
        }
        computed.keys().for_each(|v| live[v.index()] = false);
        live
    }

    /// Prints the calls that come before a value, and puts their results among the values.
    pub(super) fn print_at(&mut self, v: ValueId, printer: &mut Printer, values: &mut [Value]) {
        for pass in self.passes.remove(&v).unwrap_or_default() {
            printer.location = String::new();
            let results = match pass {
                Pass::Forward(pass) => self.forward(pass, printer, values),
                Pass::Backward(pass) => self.backward(pass, printer, values),
            };
            for (value, result) in results {
                values[value.index()] = result;
                self.computed.insert(value);
            }
        }
    }

    fn graph(&self) -> &'a Graph {
        &self.legal.graph
    }

    fn at(&self, value: ValueId) -> ValueId {
        self.legal.values[value.index()]
    }

    fn found(&self, value: ValueId, values: &[Value]) -> Value {
        values[self.at(value).index()].clone()
    }

    /// A tensor as kernels take it: `[batch, position, head, width]`.
    fn operand(&self, x: &Labelled, shape: [u64; 4], printer: &mut Printer, values: &[Value]) -> Value {
        let value = self.found(x.value, values);
        let mut by_order: Vec<usize> = (0..x.dims.len()).collect();
        by_order.sort_by_key(|&d| order(x.dims[d]));
        let ordered = printer.transposed(&value, &by_order);
        printer.reshaped(&ordered, &shape)
    }

    /// A mask as kernels take it: what is added to the scores, `[batch or 1, heads or 1, query, key]`.
    fn bias(&self, of: &Attention, printer: &mut Printer, values: &[Value]) -> Option<Value> {
        let Mask::Seen { of: Labelled { value, dims }, varies } = &of.mask else { return None };
        let seen = self.found(*value, values);
        let of_head = |dim: Dim| matches!(dim, Dim::Head | Dim::Group);
        let by_head = dims.iter().zip(varies).any(|(&dim, varies)| of_head(dim) && *varies);
        let is_whole = |at: usize| match dims[at] {
            Dim::Query | Dim::Key => true,
            dim => varies[at] || of_head(dim) && by_head,
        };
        // One element speaks for a dimension along which none differs.
        let shape: Vec<u64> = (0..dims.len()).map(|at| if is_whole(at) { seen.ty.shape[at] } else { 1 }).collect();
        let ranges: Vec<String> = shape.iter().map(|size| format!("0:{size}")).collect();
        let part =
            printer.typed("slice", &seen, &format!(" [{}]", ranges.join(", ")), &seen.ty.with_shape(shape.as_slice()));
        let order = [Dim::Batch, Dim::Head, Dim::Group, Dim::Query, Dim::Key];
        let place = |dim: Dim| dims.iter().position(|d| *d == dim);
        let part = printer.transposed(&part, &order.into_iter().filter_map(place).collect::<Vec<_>>());
        let size = |dim: Dim| place(dim).map_or(1, |at| shape[at]);
        let [batch, heads, group, queries, keys] = order.map(size);
        let part = printer.reshaped(&part, &[batch, heads * group, queries, keys]);
        let ty = part.ty.with_dtype(of.dtype);
        let (shown, hidden) = (printer.splat(ty.clone(), 0.0), printer.splat(ty, HIDDEN));
        Some(printer.select(&part, &shown, &hidden))
    }

    /// The results of a forward pass: its output, and statistics in the form of the body.
    fn forward(&self, pass: &Forward, printer: &mut Printer, values: &[Value]) -> Vec<(ValueId, Value)> {
        let (output, statistic) = self.call_forward(&pass.of, printer, values);
        let dims: Vec<Dim> = OF_RESULT.to_vec();
        let output = printer.result(&output, &dims, &pass.of.sizes, pass.of.sizes.queries, &pass.output.dims);
        let Statistics { maximum, sum } = pass.statistics;
        let ty = self.graph().ty(self.at(maximum)).clone();
        let grouped = [pass.of.sizes.batch, pass.of.sizes.key_heads, pass.of.sizes.group, pass.of.sizes.queries];
        let statistic = printer.reshaped(&statistic, &grouped);
        let statistic = printer.transposed(&statistic, &[0, 1, 3, 2]);
        let maximum_of = printer.reshaped(&statistic, &ty.shape);
        let ones = printer.splat(self.graph().ty(self.at(sum)).clone(), 1.0);
        vec![(self.at(pass.output.value), output), (self.at(maximum), maximum_of), (self.at(sum), ones)]
    }

    /// The output and the statistic of a forward pass, as the kernel gives them.
    fn call_forward(&self, of: &Attention, printer: &mut Printer, values: &[Value]) -> (Value, Value) {
        let Sizes { batch, key_heads, group, queries, keys, width } = of.sizes;
        let heads = key_heads * group;
        let mut operands = vec![
            self.operand(&of.q, [batch, queries, heads, width], printer, values),
            self.operand(&of.k, [batch, keys, key_heads, width], printer, values),
            self.operand(&of.v, [batch, keys, key_heads, width], printer, values),
        ];
        operands.extend(self.bias(of, printer, values));
        let output = TensorType::new(of.dtype, [batch, heads, queries, width]);
        let statistic = TensorType::new(DType::F32, [batch, heads, queries]);
        let results = printer.kernel(&target(of, ""), &configuration(of, false), &operands, &[output, statistic]);
        (results[0].clone(), results[1].clone())
    }

    /// The results of a backward pass: the gradients of queries, keys and values.
    fn backward(&self, pass: &Backward, printer: &mut Printer, values: &[Value]) -> Vec<(ValueId, Value)> {
        let of = &pass.of;
        let Sizes { batch, key_heads, group, queries, keys, width } = of.sizes;
        let heads = key_heads * group;
        let shape = [batch, queries, heads, width];
        let (output, statistic) = match &pass.forward {
            Some((output, Statistics { maximum, sum })) => {
                let [maximum, sum] = [maximum, sum].map(|&v| self.found(v, values));
                let log = printer.op(format!("stablehlo.log {} : {}", sum.name, tensor(&sum.ty)), sum.ty.clone());
                let log = printer.reshaped(&log, &maximum.ty.shape);
                let text = format!("stablehlo.add {}, {} : {}", maximum.name, log.name, tensor(&maximum.ty));
                let statistic = printer.op(text, maximum.ty.clone());
                let statistic = printer.reshaped(&statistic, &[batch, key_heads, queries, group]);
                let statistic = printer.transposed(&statistic, &[0, 1, 3, 2]);
                (self.operand(output, shape, printer, values), printer.reshaped(&statistic, &[batch, heads, queries]))
            }
            None => {
                let (output, statistic) = self.call_forward(of, printer, values);
                (printer.transposed(&output, &[0, 2, 1, 3]), statistic)
            }
        };
        let mut operands = vec![
            self.operand(&of.q, shape, printer, values),
            self.operand(&of.k, [batch, keys, key_heads, width], printer, values),
            self.operand(&of.v, [batch, keys, key_heads, width], printer, values),
            statistic,
            self.operand(&pass.gradient, shape, printer, values),
        ];
        operands.extend(self.bias(of, printer, values));
        operands.push(output);
        let of_queries = TensorType::new(of.dtype, [batch, heads, queries, width]);
        let of_keys = TensorType::new(of.dtype, [batch, key_heads, keys, width]);
        let types = [of_queries, of_keys.clone(), of_keys];
        let results = printer.kernel(&target(of, "Backward"), &configuration(of, true), &operands, &types);
        let of_keys = [Dim::Batch, Dim::Head, Dim::Key, Dim::Width];
        let dims = [OF_RESULT.to_vec(), of_keys.to_vec(), of_keys.to_vec()];
        let positions = [queries, keys, keys];
        let all = pass.results.iter().zip(results.iter().zip(dims.iter().zip(positions)));
        let result = |(x, (value, (dims, positions))): (&Labelled, (&Value, (&Vec<Dim>, u64)))| {
            (self.at(x.value), printer.result(value, dims, &of.sizes, positions, &x.dims))
        };
        all.map(result).collect()
    }
}

impl Printer {
    /// A kernel's result of dimensions `from` in the order of the body, `to`.
    fn result(&mut self, x: &Value, from: &[Dim], sizes: &Sizes, positions: u64, to: &[Dim]) -> Value {
        let size = |dim: &Dim| match dim {
            Dim::Batch => sizes.batch,
            Dim::Head => sizes.key_heads,
            Dim::Group => sizes.group,
            Dim::Query | Dim::Key => positions,
            Dim::Width => sizes.width,
        };
        let kept: Vec<Dim> = from.iter().copied().filter(|dim| to.contains(dim)).collect();
        let split = self.reshaped(x, &kept.iter().map(size).collect::<Vec<_>>());
        let permutation: Vec<usize> = to.iter().filter_map(|dim| kept.iter().position(|from| from == dim)).collect();
        self.transposed(&split, &permutation)
    }

    /// A call of a kernel with results `[batch, head, position, width]` that lie in memory by position and then by head,
    /// or `[batch, head, query]`.
    fn kernel(&mut self, target: &str, configuration: &Json, operands: &[Value], results: &[TensorType]) -> Vec<Value> {
        let layout = |order: &[usize]| format!("dense<{}> : tensor<{}xindex>", list(order), order.len());
        let row_major = |ty: &TensorType| layout(&(0..ty.rank()).rev().collect::<Vec<_>>());
        let by_position = |ty: &TensorType| if ty.rank() == 4 { layout(&[3, 1, 2, 0]) } else { row_major(ty) };
        let mut layouts: Vec<String> = results.iter().map(by_position).collect();
        let mut types: Vec<TensorType> = results.to_vec();
        // Scratch, whose size XLA finds.
        types.push(TensorType::new(DType::U8, [0]));
        layouts.push("dense<0> : tensor<1xindex>".to_string());
        let names: Vec<&str> = operands.iter().map(|x| x.name.as_str()).collect();
        let name = self.fresh();
        let text = format!(
            "    {name}:{} = stablehlo.custom_call @{target}({}) {{api_version = 2 : i32, backend_config = {}, operand_layouts = {}, result_layouts = {}}} : ({}) -> ({})\n",
            types.len(),
            names.join(", "),
            quoted(&configuration.to_string()),
            list(operands.iter().map(|x| row_major(&x.ty))),
            list(layouts),
            tensors(operands.iter().map(|x| &x.ty)),
            tensors(&types)
        );
        self.body.push_str(&text);
        results.iter().enumerate().map(|(at, ty)| Value { name: format!("{name}#{at}"), ty: ty.clone() }).collect()
    }
}

/// The name of a kernel.
fn target(of: &Attention, pass: &str) -> String {
    let bias = if matches!(of.mask, Mask::Seen { .. }) { "ScaleBias" } else { "" };
    format!("__cudnn$fmha{bias}Softmax{pass}")
}

/// The description of a kernel that XLA asks for.
fn configuration(of: &Attention, backward: bool) -> Json {
    let Sizes { batch, key_heads, group, queries, keys, .. } = of.sizes;
    let text = |numbers: &[u64]| numbers.iter().map(|n| n.to_string()).collect::<Vec<_>>();
    let dot = |lhs: u64, rhs: u64, lhs_batch: [u64; 2]| {
        json!({
            "lhs_contracting_dimensions": text(&[lhs]),
            "rhs_contracting_dimensions": text(&[rhs]),
            "lhs_batch_dimensions": text(&lhs_batch),
            "rhs_batch_dimensions": text(&[0, 2]),
        })
    };
    let mut kernel = json!({
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": true,
            "workspace_size": "0",
        },
        "fmha_scale": of.scale,
        "intermediate_tensor_shape": {
            "element_type": if of.dtype == DType::BF16 { "BF16" } else { "F16" },
            "dimensions": text(&[batch, key_heads * group, queries, keys]),
            "tuple_shapes": [],
            "layout": {"minor_to_major": text(&[3, 2, 1, 0])},
            "is_dynamic_dimension": [false, false, false, false],
        },
        "is_flash_attention": true,
        "mask_type": if of.mask == Mask::Causal { "CAUSAL" } else { "NO_MASK" },
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": false,
    });
    let (scores, weighted, summed) = (dot(3, 3, [0, 2]), dot(3, 1, [0, 1]), dot(2, 1, [0, 1]));
    let products = match backward {
        false => vec![("bmm1_dot_dimension_numbers", scores), ("bmm2_dot_dimension_numbers", weighted)],
        true => vec![
            ("bmm1_grad_gemm1_dot_dimension_numbers", summed.clone()),
            ("bmm1_grad_gemm2_dot_dimension_numbers", weighted),
            ("bmm2_grad_gemm1_dot_dimension_numbers", summed),
            ("bmm2_grad_gemm2_dot_dimension_numbers", scores),
        ],
    };
    products.into_iter().for_each(|(name, numbers)| kernel[name] = numbers);
    json!({"operation_queue_id": "0", "cudnn_fmha_backend_config": kernel})
}
