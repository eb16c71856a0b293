//! Calls of kernels for attention compute what the ops that they replace compute.
//!
//! XLA for CPUs has no such kernels. Their calls become calls of functions in the same text, which compute attention in
//! f32 as the kernels do.

use crate::common::{Scratch, planned};
use altiplano::ImportOptions;
use altiplano::ir::array::{attention_scores, masked_scores};
use altiplano::ir::attention::{Attention, Mask, Pass, Sizes, WIDEST, find};
use altiplano::ir::dtype::DType;
use altiplano::ir::graph::{Graph, ValueId};
use altiplano::ir::op::{DotGeneral, Input, Op, Reducer, Unary};
use altiplano::ir::program::{Body, BufferId, BufferKind, Phase, Program};
use altiplano::ir::tensor::Tensor;
use altiplano::ir::testing::numbers::{Rng, random};
use altiplano::ir::types::TensorType;
use altiplano_xla::pjrt::{self, Client, Launch, Platform, Plugin};
use altiplano_xla::program::{Printing, arguments, graph_of, graph_text};
use altiplano_xla::text::module;
use std::collections::BTreeMap;
use std::path::PathBuf;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 64, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}"#;
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}"#;
const BERT: &str = r#"{"model_type": "bert", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}"#;
const MISTRAL: &str = r#"{"model_type": "mistral", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "sliding_window": 24}"#;

fn input(g: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
    g.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(dtype, shape) }), &[])
}

fn dot(g: &mut Graph, a: ValueId, b: ValueId, batch: [&[usize]; 2], contract: [usize; 2]) -> ValueId {
    let [lhs_batch, rhs_batch] = batch.map(<[usize]>::to_vec);
    let [lhs, rhs] = contract.map(|dim| vec![dim]);
    g.emit(Op::DotGeneral(DotGeneral { lhs_batch, rhs_batch, lhs_contract: lhs, rhs_contract: rhs }), &[a, b])
}

/// Keys or values, once for each head of queries.
fn repeated(g: &mut Graph, x: ValueId, sizes: &Sizes) -> ValueId {
    let Sizes { batch, key_heads, group, keys, width, .. } = *sizes;
    let each = g.broadcast(x, &[batch, keys, key_heads, group, width], &[0, 1, 2, 4]);
    g.reshape(each, &[batch, keys, key_heads * group, width])
}

/// A kernel as a graph: from `[batch, position, head, width]` to `[batch, head, position, width]`.
fn kernel(of: &Attention, is_backward: bool) -> Graph {
    let sizes = of.sizes;
    let Sizes { batch, key_heads, group, queries, keys, width } = sizes;
    let heads = key_heads * group;
    let mut graph = Graph::new("kernel");
    let g = &mut graph;
    let q = input(g, "q", of.dtype, &[batch, queries, heads, width]);
    let k = input(g, "k", of.dtype, &[batch, keys, key_heads, width]);
    let v = input(g, "v", of.dtype, &[batch, keys, key_heads, width]);
    let [q, k, v] = [q, k, v].map(|x| g.convert(x, DType::F32));
    let (k, v) = (repeated(g, k, &sizes), repeated(g, v, &sizes));
    let scores = attention_scores(g, q, k, of.scale).expect("scores");
    let full = [batch, heads, queries, keys];
    let of_backward = is_backward.then(|| {
        let statistic = input(g, "statistic", DType::F32, &[batch, heads, queries]);
        [statistic, input(g, "gradient", of.dtype, &[batch, queries, heads, width])]
    });
    // All masks of these models are alike for samples and heads.
    let bias = matches!(of.mask, Mask::Seen { .. }).then(|| input(g, "bias", of.dtype, &[1, 1, queries, keys]));
    let output = is_backward.then(|| input(g, "output", of.dtype, &[batch, queries, heads, width]));
    let mut scores = masked_scores(g, scores, None, of.mask == Mask::Causal).expect("masked scores");
    if let Some(bias) = bias {
        let wide = g.convert(bias, DType::F32);
        let wide = g.reshape(wide, &[queries, keys]);
        let wide = g.broadcast(wide, &full, &[2, 3]);
        scores = g.add(scores, wide);
    }
    let rows = |g: &mut Graph, x: ValueId| g.broadcast(x, &full, &[0, 1, 2]);
    let (Some([statistic, gradient]), Some(output)) = (of_backward, output) else {
        let maximum = g.reduce(scores, Reducer::Max, &[3]);
        let spread = rows(g, maximum);
        let below = g.sub(scores, spread);
        let powers = g.unary(Unary::Exponential, below);
        let sum = g.reduce(powers, Reducer::Sum, &[3]);
        let spread = rows(g, sum);
        let weights = g.div(powers, spread);
        let output = dot(g, weights, v, [&[0, 1], &[0, 2]], [3, 1]);
        let log = g.unary(Unary::Log, sum);
        let statistic = g.add(maximum, log);
        graph.outputs = vec![graph.convert(output, of.dtype), statistic];
        return graph;
    };
    let [gradient, output] = [gradient, output].map(|x| g.convert(x, DType::F32));
    let spread = rows(g, statistic);
    let below = g.sub(scores, spread);
    let weights = g.unary(Unary::Exponential, below);
    let of_weights = dot(g, gradient, v, [&[0, 2], &[0, 2]], [3, 3]);
    let products = g.mul(gradient, output);
    let mean = g.reduce(products, Reducer::Sum, &[3]);
    let mean = g.transpose(mean, &[0, 2, 1]);
    let spread = rows(g, mean);
    let centred = g.sub(of_weights, spread);
    let of_scores = g.mul(weights, centred);
    let scale = g.splat_like(of_scores, of.scale);
    let of_scores = g.mul(of_scores, scale);
    let dq = dot(g, of_scores, k, [&[0, 1], &[0, 2]], [3, 1]);
    let dk = dot(g, of_scores, q, [&[0, 1], &[0, 2]], [2, 1]);
    let dv = dot(g, weights, gradient, [&[0, 1], &[0, 2]], [2, 1]);
    let [dk, dv] = [dk, dv].map(|x| {
        let by_group = g.reshape(x, &[batch, key_heads, group, keys, width]);
        g.reduce(by_group, Reducer::Sum, &[2])
    });
    graph.outputs = [dq, dk, dv].map(|x| graph.convert(x, of.dtype)).to_vec();
    graph
}

/// The text with functions for the kernels that it calls.
fn emulated(text: &str, passes: &[Pass]) -> String {
    let mut functions = BTreeMap::new();
    let line = |line: &str| {
        let Some((result, call)) = line.split_once(" = stablehlo.custom_call @__cudnn$") else {
            return line.to_string();
        };
        let (name, given) = call.split_once('(').expect("operands");
        let (is_backward, has_bias) = (name.ends_with("Backward"), name.contains("Bias"));
        let (operands, _) = given.split_once(')').expect("operands");
        let (_, types) = call.rsplit_once(" : (").expect("types");
        let types = types.replace(", tensor<0xui8>)", ")");
        let mut of = passes.iter().filter_map(|pass| match pass {
            Pass::Forward(pass) if !is_backward => Some(&pass.of),
            Pass::Backward(pass) => Some(&pass.of),
            Pass::Forward(_) => None,
        });
        let of = of.find(|of| matches!(of.mask, Mask::Seen { .. }) == has_bias).expect("a pass");
        let function = module(&kernel(of, is_backward), &Default::default());
        let (_, function) = function.split_once('\n').expect("a module");
        let function = function
            .trim_end()
            .trim_end_matches('}')
            .replace("func.func public @main", &format!("func.func private @{name}"));
        functions.insert(name.to_string(), function);
        let (result, count) = result.split_once(':').expect("several results");
        let count: u32 = count.parse().expect("a number of results");
        format!("{result}:{} = call @{name}({operands}) : ({types}", count - 1)
    };
    let lines: Vec<String> = text.lines().map(line).collect();
    assert!(!functions.is_empty(), "no kernel is called:\n{text}");
    let body = lines.join("\n");
    let body = body.trim_end().trim_end_matches('}');
    format!("{body}{}}}\n", functions.into_values().collect::<String>())
}

/// The buffers after a body.
fn run(client: &Client, program: &Program, body: &Body, passes: &[Pass], buffers: &mut BTreeMap<BufferId, Tensor>) {
    let mut text = graph_text(graph_of(body), &program.mesh, &Printing { attention: passes, ..Printing::default() });
    if !passes.is_empty() {
        text = emulated(&text, passes);
    }
    let executable = client.compile(&text, Launch::default()).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let given = arguments(body).into_iter().map(|id| &buffers[&id]);
    let given: Vec<_> = given.map(|x| client.buffer(&pjrt::to_bytes(x), &x.ty, 0).expect("a buffer")).collect();
    let results = executable.execute(&[given.iter().collect()]).expect("it runs").remove(0);
    for ((id, value), result) in body.writes.iter().zip(results) {
        let ty = body.graph.ty(*value);
        buffers.insert(*id, pjrt::from_bytes(ty, &result.to_host().expect("it is copied")));
    }
}

/// The sums of gradients after a step in which the forward and the backward body call kernels or not.
fn gradients(client: &Client, program: &Program, kernels: [bool; 2], largest_weight: f64) -> Vec<Tensor> {
    let passes = find(program, WIDEST);
    assert!(passes.iter().flatten().count() >= 4, "forward and backward passes of both layers");
    let mut rng = Rng::new(7);
    let mut buffers = BTreeMap::new();
    for (at, buffer) in program.buffers.iter().enumerate() {
        let tensor = match buffer.kind {
            BufferKind::Accumulator { .. } => Tensor::from_fn(buffer.ty.clone(), |_| 0.0),
            _ => {
                let most = if buffer.name.ends_with("bias") { 0.1 } else { largest_weight };
                random(&buffer.ty, (-most, most), (0, 63), &mut rng)
            }
        };
        buffers.insert(BufferId(at as u32), tensor);
    }
    for (body, passes) in program.bodies.iter().zip(&passes) {
        let calls = match body.phase {
            Phase::Forward => kernels[0],
            Phase::Backward => kernels[1],
            _ => continue,
        };
        run(client, program, body, if calls { passes } else { &[] }, &mut buffers);
    }
    let is_sum = |id: &BufferId| matches!(program.buffer(*id).kind, BufferKind::Accumulator { .. });
    buffers.into_iter().filter(|(id, _)| is_sum(id)).map(|(_, tensor)| tensor).collect()
}

fn largest(x: &Tensor) -> f64 {
    x.data.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
}

/// The largest difference of two tensors, relative to the largest element.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let apart = a.data.iter().zip(&b.data).map(|(a, b)| if a.is_finite() { (a - b).abs() } else { f64::INFINITY });
    apart.fold(0.0, f64::max) / largest(b).max(f64::MIN_POSITIVE)
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn kernels_for_attention_give_the_gradients_of_the_ops_that_they_replace() {
    let plugin =
        Plugin::open(&pjrt::find(None, Platform::Cpu).expect("a plugin for CPUs")).expect("a plugin that opens");
    let client = plugin.client(&[]).expect("a client");
    let scratch = Scratch::new();
    for (config, words, largest_weight) in [
        (GPT2, "dgx-h100:1/1 bf16", 0.3),
        (LLAMA, "dgx-h100:1/1 bf16", 0.3),
        (LLAMA, "dgx-h100:1/1 bf16 selective", 0.3),
        (MISTRAL, "dgx-h100:1/1 bf16", 0.3),
        (GPT2, "dgx-h100:1/1 bf16 recompute", 0.3),
        // After norms positions are much alike, and gradients of scores near their rounding in bf16.
        (BERT, "dgx-h100:1/1 f16", 0.6),
    ] {
        let file = PathBuf::from(scratch.file("model.json", config));
        let import = ImportOptions { batch: Some(4), sequence: Some(128), ..ImportOptions::default() };
        let plan = planned(&file, &import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let programs = altiplano::programs(&plan).expect("programs");
        let program = &programs.programs[0];
        let expected = gradients(&client, program, [false, false], largest_weight);
        for kernels in [[true, true], [true, false], [false, true]] {
            let found = gradients(&client, program, kernels, largest_weight);
            let most = expected.iter().map(largest).fold(0.0, f64::max);
            let pairs = found.iter().zip(&expected).map(|(a, b)| match largest(b) < 1e-3 * most {
                // All scores of a query change alike with a bias of keys, whose gradient is 0 but for rounding.
                true => largest(a) / most,
                false => distance(a, b),
            });
            let worst = pairs.fold(0.0, f64::max);
            println!("{words} {kernels:?}: {worst:.1e}");
            assert!(worst < 3e-2, "{words} {kernels:?}: off by {worst}");
        }
    }
}
