//! Measures the kernels: GFLOP/s of products, and GB/s of fused chains and copies (of the bytes that must be read and
//! written). Run with `cargo run --release -p altiplano-runtime --example kernels [CORES]`.

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::*;
use altiplano_ir::optimizer::{Given, Optimizer};
use altiplano_ir::program::*;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use altiplano_runtime::{HostTensor, Options, RuntimeError, Session, data};
use std::collections::BTreeMap;

/// The unit of a line: operations, or bytes at the kernel's boundary.
enum Work {
    Flop,
    Bytes,
}

fn leaf(graph: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
    graph.emit(Op::Input(Input { name: name.to_string(), ty: TensorType::new(dtype, shape) }), &[])
}

/// Runs a graph many times on one device and prints the rate of the best step.
fn measure(name: &str, cores: usize, graph: Graph, work: Work) -> Result<(), RuntimeError> {
    let mesh = Mesh::new(&[("only", 1)]);
    let mut buffers = Vec::new();
    let buffer = |kind, name: &str, ty: &TensorType| Buffer {
        name: name.to_string(),
        stage: 0,
        host: false,
        extents: None,
        kind,
        ty: ty.clone(),
        sharding: Sharding::replicated(&ty.shape),
    };
    let mut reads = Vec::new();
    for (v, name) in graph.inputs() {
        reads.push((v, BufferId(buffers.len() as u32)));
        buffers.push(buffer(BufferKind::Parameter { name: name.to_string() }, name, graph.ty(v)));
    }
    let mut writes = Vec::new();
    for (i, &o) in graph.outputs.iter().enumerate() {
        // Outputs replace an input of the same type, as parameters do in an update.
        let name = format!("out{i}");
        let replaced = reads.iter().find(|(v, b)| {
            graph.outputs.len() > 1
                && graph.ty(*v) == graph.ty(o)
                && !writes.iter().any(|w: &(BufferId, ValueId)| w.0 == *b)
        });
        match replaced {
            Some(&(_, b)) => writes.push((b, o)),
            None => {
                writes.push((BufferId(buffers.len() as u32), o));
                buffers.push(buffer(BufferKind::Value, &name, graph.ty(o)));
            }
        }
    }
    let types = reads.iter().map(|r| graph.ty(r.0)).chain(graph.outputs.iter().map(|&o| graph.ty(o)));
    let amount = match work {
        Work::Flop => graph.values().map(|v| graph.flop(v)).sum::<u64>() as f64,
        Work::Bytes => types.map(|t| t.bytes()).sum::<u64>() as f64,
    };
    let inputs: Vec<(String, TensorType)> = graph.inputs().map(|(v, n)| (n.to_string(), graph.ty(v).clone())).collect();
    let body =
        Body { name: name.to_string(), stage: 0, phase: Phase::Forward, graph, reads, writes, frees: Vec::new() };
    let program = Program {
        devices: vec![0],
        mesh,
        buffers,
        bodies: vec![body],
        schedule: vec![Call::Run { body: 0, microbatch: None }],
        late: Vec::new(),
        flush: Vec::new(),
        fused_attention: false,
    };
    let programs =
        Programs { programs: vec![program], transfers: vec![], num_microbatches: 1, microbatch: 0, loss_is_mean: true };
    let mut session = Session::new(&programs, &Options { cores: Some(cores), ..Default::default() })?;
    for (name, ty) in &inputs {
        session.load_parameter(name, &data::synthetic(name, ty, 1000, 0))?;
    }
    let none: BTreeMap<String, HostTensor> = BTreeMap::new();
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        best = best.min(session.step(&none, &BTreeMap::new())?.seconds);
    }
    let unit = if matches!(work, Work::Flop) { "GFLOP/s" } else { "GB/s" };
    println!("{name:44} {:9.3} ms {:9.2} {unit}", best * 1e3, amount / best / 1e9);
    Ok(())
}

fn dot(lhs: &[u64], rhs: &[u64], op: DotGeneral, dtype: DType) -> Graph {
    let mut graph = Graph::new("dot");
    let x = leaf(&mut graph, "x", dtype, lhs);
    let y = leaf(&mut graph, "y", dtype, rhs);
    let z = graph.emit(Op::DotGeneral(op), &[x, y]);
    graph.outputs = vec![z];
    graph
}

fn over(batch: usize, lhs: usize, rhs: usize) -> DotGeneral {
    let batch: Vec<usize> = (0..batch).collect();
    DotGeneral { lhs_batch: batch.clone(), rhs_batch: batch, lhs_contract: vec![lhs], rhs_contract: vec![rhs] }
}

fn elementwise(shape: &[u64], f: impl Fn(&mut Graph, ValueId) -> ValueId) -> Graph {
    let mut graph = Graph::new("elementwise");
    let x = leaf(&mut graph, "x", DType::F32, shape);
    let y = f(&mut graph, x);
    graph.outputs = vec![y];
    graph
}

fn row(graph: &mut Graph, x: ValueId, reducer: Reducer) -> ValueId {
    let shape = graph.shape(x).to_vec();
    let last = shape.len() - 1;
    let reduced = graph.reduce(x, reducer, &[last]);
    graph.broadcast(reduced, &shape, &(0..last).collect::<Vec<_>>())
}

fn softmax(graph: &mut Graph, x: ValueId) -> ValueId {
    let max = row(graph, x, Reducer::Max);
    let shifted = graph.sub(x, max);
    let e = graph.unary(Unary::Exponential, shifted);
    let sum = row(graph, e, Reducer::Sum);
    graph.div(e, sum)
}

fn norm(graph: &mut Graph, x: ValueId) -> ValueId {
    let n = *graph.shape(x).last().unwrap_or(&1) as f64;
    let scale = graph.splat_like(x, 1.0 / n);
    let sum = row(graph, x, Reducer::Sum);
    let mean = graph.mul(sum, scale);
    let centred = graph.sub(x, mean);
    let square = graph.mul(centred, centred);
    let variance = row(graph, square, Reducer::Sum);
    let variance = graph.mul(variance, scale);
    let inverse = graph.unary(Unary::Rsqrt, variance);
    graph.mul(centred, inverse)
}

fn gelu(graph: &mut Graph, x: ValueId) -> ValueId {
    let [c, k, half, one] = [0.044715, 0.797_884_56, 0.5, 1.0].map(|v| graph.splat_like(x, v));
    let square = graph.mul(x, x);
    let cube = graph.mul(square, x);
    let cubic = graph.mul(cube, c);
    let inner = graph.add(x, cubic);
    let inner = graph.mul(inner, k);
    let t = graph.unary(Unary::Tanh, inner);
    let t = graph.add(t, one);
    let scaled = graph.mul(x, half);
    graph.mul(scaled, t)
}

fn adamw(n: u64) -> Graph {
    let mut graph = Graph::new("adamw");
    let ty = DType::F32;
    let [p, g, m, v] = ["p", "g", "m", "v"].map(|name| leaf(&mut graph, name, ty, &[n]));
    let [lr, step] = ["lr", "step"].map(|name| leaf(&mut graph, name, ty, &[]));
    let given = Given {
        parameter: p,
        gradient: g,
        gradient_scale: 0.5,
        factor: None,
        states: &[m, v],
        learning_rate: lr,
        step,
        whole: &|_, x| x,
    };
    let update = altiplano_ir::optimizer::update(&mut graph, &Optimizer::adamw(), &given);
    graph.outputs = [vec![update.parameter], update.states].concat();
    graph
}

fn main() -> Result<(), RuntimeError> {
    let cores = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
    println!("{cores} cores");
    let f32 = DType::F32;
    measure("dot 1024 x 1024 x 1024", cores, dot(&[1024, 1024], &[1024, 1024], over(0, 1, 0), f32), Work::Flop)?;
    measure("dot 512x768 . 768x3072", cores, dot(&[512, 768], &[768, 3072], over(0, 1, 0), f32), Work::Flop)?;
    measure(
        "dot 768x512^T . 512x3072 (weight gradient)",
        cores,
        dot(&[512, 768], &[512, 3072], over(0, 0, 0), f32),
        Work::Flop,
    )?;
    measure(
        "dot 512x3072 . 768x3072^T (input gradient)",
        cores,
        dot(&[512, 3072], &[768, 3072], over(0, 1, 1), f32),
        Work::Flop,
    )?;
    measure(
        "dot 96 x (128x64 . 64x128) (attention)",
        cores,
        dot(&[96, 128, 64], &[96, 128, 64], over(1, 2, 2), f32),
        Work::Flop,
    )?;
    measure(
        "dot 96 x (128x128 . 128x64) (attention)",
        cores,
        dot(&[96, 128, 128], &[96, 128, 64], over(1, 2, 1), f32),
        Work::Flop,
    )?;
    measure(
        "dot 512x768 . 768x3072 bf16",
        cores,
        dot(&[512, 768], &[768, 3072], over(0, 1, 0), DType::BF16),
        Work::Flop,
    )?;
    let big = [4096, 1024];
    measure("add x + x", cores, elementwise(&big, |g, x| g.add(x, x)), Work::Bytes)?;
    for op in [Unary::Exponential, Unary::Tanh, Unary::Log, Unary::Erf, Unary::Logistic] {
        measure(op.name(), cores, elementwise(&big, |g, x| g.unary(op, x)), Work::Bytes)?;
    }
    measure("gelu", cores, elementwise(&big, gelu), Work::Bytes)?;
    measure("softmax of rows of 512", cores, elementwise(&[8192, 512], softmax), Work::Bytes)?;
    measure("softmax of rows of 128", cores, elementwise(&[32768, 128], softmax), Work::Bytes)?;
    measure("norm of rows of 768", cores, elementwise(&[4096, 768], norm), Work::Bytes)?;
    measure(
        "sum over rows (bias gradient)",
        cores,
        elementwise(&[4096, 3072], |g, x| g.reduce(x, Reducer::Sum, &[0])),
        Work::Bytes,
    )?;
    measure("transpose 2048 x 2048", cores, elementwise(&[2048, 2048], |g, x| g.transpose(x, &[1, 0])), Work::Bytes)?;
    let heads = |g: &mut Graph, x| g.transpose(x, &[0, 2, 1, 3]);
    measure("transpose heads 8,128,12,64", cores, elementwise(&[8, 128, 12, 64], heads), Work::Bytes)?;
    measure("adamw update", cores, adamw(4 << 20), Work::Bytes)?;
    Ok(())
}
