//! Shared support of the planner's tests: small models, and a plain executor of programs.
//!
//! The executor runs all devices of a program in lock step with the reference interpreter, stages in turns. So the
//! meaning of a plan is checked in f64 without the runtime.
#![allow(dead_code)]

pub mod networks;

use altiplano_ir::autodiff::differentiate;
use altiplano_ir::batch::rebatch;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    Binary, Direction, DotGeneral, Gather, GatherDims, Input, Op, OutOfBounds, Parameter, Reducer, Slice, Unary,
};
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{ALL_PARAMETERS, BufferKind, Call, Programs};
use altiplano_ir::tensor::{Tensor, for_each_index};
use altiplano_ir::types::TensorType;
use altiplano_planner::{Request, Silent, plan, programs};
use std::collections::{BTreeMap, HashMap};

/// Reproducible values: integers below `bound` for integer types, otherwise reals around zero (gains around one).
pub fn value(name: &str, ty: &TensorType, bound: f64) -> Tensor {
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
    let center = if name.contains("gain") { 1.0 } else { 0.0 };
    Tensor::from_fn(ty.clone(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let unit = (state >> 40) as f64 / (1u64 << 24) as f64;
        if ty.dtype.is_integer() { (unit * bound).floor() } else { center + unit - 0.5 }
    })
}

fn parameter(g: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    let ty = TensorType::new(DType::F32, shape);
    g.emit(Op::Parameter(Parameter::new(name, ty)), &[])
}

fn dot(g: &mut Graph, a: ValueId, b: ValueId, batch: &[usize], contract: (usize, usize)) -> ValueId {
    let op = DotGeneral {
        lhs_batch: batch.to_vec(),
        rhs_batch: batch.to_vec(),
        lhs_contract: vec![contract.0],
        rhs_contract: vec![contract.1],
    };
    g.emit(Op::DotGeneral(op), &[a, b])
}

/// Mean over the last dimension, kept as a dimension of size one by broadcasting back.
fn mean_last(g: &mut Graph, x: ValueId) -> ValueId {
    let shape = g.shape(x).to_vec();
    let last = shape.len() - 1;
    let sum = g.reduce(x, Reducer::Sum, &[last]);
    let scale = g.splat_like(sum, 1.0 / shape[last] as f64);
    let mean = g.mul(sum, scale);
    let dims: Vec<usize> = (0..last).collect();
    g.broadcast(mean, &shape, &dims)
}

fn layer_norm(g: &mut Graph, x: ValueId, gain: ValueId) -> ValueId {
    let mean = mean_last(g, x);
    let centered = g.sub(x, mean);
    let square = g.mul(centered, centered);
    let variance = mean_last(g, square);
    let epsilon = g.splat_like(variance, 1e-5);
    let variance = g.add(variance, epsilon);
    let scale = g.unary(Unary::Rsqrt, variance);
    let normal = g.mul(centered, scale);
    let shape = g.shape(x).to_vec();
    let gain = g.broadcast(gain, &shape, &[shape.len() - 1]);
    g.mul(normal, gain)
}

/// A small GPT: fused q/k/v projection, causal-free attention, tied embedding, mean cross-entropy. Batch 4.
pub fn transformer(layers: usize) -> Graph {
    let (batch, seq, width, heads, vocab) = (4u64, 4u64, 8u64, 2u64, 12u64);
    let mut g = Graph::new("transformer");
    let tokens_ty = TensorType::new(DType::I32, vec![batch, seq]);
    let tokens = g.emit(Op::Input(Input { name: "tokens".into(), ty: tokens_ty.clone() }), &[]);
    let labels = g.emit(Op::Input(Input { name: "labels".into(), ty: tokens_ty }), &[]);
    let table = parameter(&mut g, "wte", &[vocab, width]);
    let index = g.reshape(tokens, &[batch, seq, 1]);
    let gather = Gather {
        dims: GatherDims {
            offset_dims: vec![2],
            collapsed_slice_dims: vec![0],
            operand_batching_dims: vec![],
            indices_batching_dims: vec![],
            start_index_map: vec![0],
            index_vector_dim: 2,
            slice_sizes: vec![1, width],
        },
        out_of_bounds: OutOfBounds::Clamp,
    };
    let mut x = g.emit(Op::Gather(gather), &[table, index]);
    for l in 0..layers {
        let name = |n: &str| format!("h{l}.{n}");
        let gain = parameter(&mut g, &name("gain1"), &[width]);
        let normal = layer_norm(&mut g, x, gain);
        let qkv = parameter(&mut g, &name("qkv"), &[width, 3 * width]);
        let fused = dot(&mut g, normal, qkv, &[], (2, 0));
        let bias = parameter(&mut g, &name("qkv_bias"), &[3 * width]);
        let bias = g.broadcast(bias, &[batch, seq, 3 * width], &[2]);
        let fused = g.add(fused, bias);
        let mut part = |i: u64| {
            let slice =
                Slice { start: vec![0, 0, i * width], limit: vec![batch, seq, (i + 1) * width], stride: vec![1, 1, 1] };
            let piece = g.emit(Op::Slice(slice), &[fused]);
            let split = g.reshape(piece, &[batch, seq, heads, width / heads]);
            g.transpose(split, &[0, 2, 1, 3])
        };
        let (q, k, v) = (part(0), part(1), part(2));
        let scores = dot(&mut g, q, k, &[0, 1], (3, 3));
        let top = g.reduce(scores, Reducer::Max, &[3]);
        let shape = g.shape(scores).to_vec();
        let top = g.broadcast(top, &shape, &[0, 1, 2]);
        let shifted = g.sub(scores, top);
        let e = g.unary(Unary::Exponential, shifted);
        let total = g.reduce(e, Reducer::Sum, &[3]);
        let total = g.broadcast(total, &shape, &[0, 1, 2]);
        let weights = g.div(e, total);
        let mixed = dot(&mut g, weights, v, &[0, 1], (3, 2));
        let mixed = g.transpose(mixed, &[0, 2, 1, 3]);
        let mixed = g.reshape(mixed, &[batch, seq, width]);
        let projection = parameter(&mut g, &name("projection"), &[width, width]);
        let out = dot(&mut g, mixed, projection, &[], (2, 0));
        x = g.add(x, out);
        let gain = parameter(&mut g, &name("gain2"), &[width]);
        let normal = layer_norm(&mut g, x, gain);
        let up = parameter(&mut g, &name("up"), &[width, 4 * width]);
        let hidden = dot(&mut g, normal, up, &[], (2, 0));
        let hidden = g.unary(Unary::Tanh, hidden);
        let down = parameter(&mut g, &name("down"), &[4 * width, width]);
        let out = dot(&mut g, hidden, down, &[], (2, 0));
        x = g.add(x, out);
    }
    let logits = dot(&mut g, x, table, &[], (2, 1));
    let shape = g.shape(logits).to_vec();
    let top = g.reduce(logits, Reducer::Max, &[2]);
    let top = g.broadcast(top, &shape, &[0, 1]);
    let shifted = g.sub(logits, top);
    let e = g.unary(Unary::Exponential, shifted);
    let total = g.reduce(e, Reducer::Sum, &[2]);
    let log = g.unary(Unary::Log, total);
    let log = g.broadcast(log, &shape, &[0, 1]);
    let log_probability = g.sub(shifted, log);
    let index = g.reshape(labels, &[batch, seq, 1, 1]);
    let pick = Gather {
        dims: GatherDims {
            offset_dims: vec![],
            collapsed_slice_dims: vec![2],
            operand_batching_dims: vec![0, 1],
            indices_batching_dims: vec![0, 1],
            start_index_map: vec![2],
            index_vector_dim: 3,
            slice_sizes: vec![1, 1, 1],
        },
        out_of_bounds: OutOfBounds::Clamp,
    };
    let picked = g.emit(Op::Gather(pick), &[log_probability, index]);
    let sum = g.reduce(picked, Reducer::Sum, &[0, 1, 2]);
    let count = g.constant(Literal::splat(TensorType::scalar(DType::F32), (batch * seq) as f64));
    let mean = g.emit(Op::Binary(Binary::Divide), &[sum, count]);
    let loss = g.unary(Unary::Negate, mean);
    g.outputs = vec![loss];
    g
}

/// [`transformer`] with a loss of several means: over all tokens, over those whose label is below 9, and weighted by
/// the token. The divisors of the last two depend on the batch.
pub fn weighted(layers: usize) -> Graph {
    let mut g = transformer(layers);
    let plain = g.outputs[0];
    let operand = |g: &Graph, v: ValueId| g.node(v).operands[0];
    let mean = operand(&g, plain);
    let sum = operand(&g, mean);
    let picked = operand(&g, sum);
    let shape = g.shape(picked).to_vec();
    let all: Vec<usize> = (0..shape.len()).collect();
    let inputs: Vec<ValueId> =
        ["tokens", "labels"].into_iter().map(|name| g.inputs().find(|i| i.1 == name).expect("an input").0).collect();
    let nine = g.splat_like(inputs[1], 9.0);
    let kept = g.compare(Direction::Lt, inputs[1], nine);
    let mut loss = plain;
    for (weights, least) in [(kept, 1.0), (inputs[0], 1e-6)] {
        let weights = g.convert(weights, DType::F32);
        let weights = g.reshape(weights, &shape);
        let losses = g.mul(picked, weights);
        let losses = g.reduce(losses, Reducer::Sum, &all);
        let count = g.reduce(weights, Reducer::Sum, &all);
        let least = g.splat_like(count, least);
        let count = g.emit(Op::Binary(Binary::Maximum), &[count, least]);
        let term = g.div(losses, count);
        loss = g.sub(loss, term);
    }
    g.outputs = vec![loss];
    g
}

/// Loss and gradients of the whole graph, by name.
pub fn reference(graph: &Graph, bound: f64) -> (f64, BTreeMap<String, Tensor>) {
    let training = differentiate(graph, &[]).expect("the test's graph has a gradient");
    let values = interpret::run_all(&training.graph, |v| match &training.graph.node(v).op {
        Op::Parameter(p) => value(&p.name, &p.ty, bound),
        Op::Input(i) => value(&i.name, &i.ty, bound),
        op => panic!("{op:?} is no leaf"),
    });
    let gradients = graph
        .trained_parameters()
        .map(|(p, name)| {
            let mut sum = Tensor::splat(graph.ty(p).clone(), 0.0);
            for (_, c) in &training.contributions[p.index()] {
                sum.data.iter_mut().zip(&values[c.index()].data).for_each(|(s, x)| *s += x);
            }
            (name.to_string(), sum)
        })
        .collect();
    (values[training.loss.index()].data[0], gradients)
}

/// The result of running programs.
pub struct Outcome {
    /// Mean of the microbatches' losses.
    pub loss: f64,
    /// Accumulated gradients over the number of microbatches.
    pub gradients: BTreeMap<String, Tensor>,
    /// Weights after the update, as each holder has them.
    pub weights: Vec<(String, Tensor)>,
}

type Instance = (u32, Option<u32>);

/// Runs one step. `whole` is the graph at the global batch.
pub fn run(programs: &Programs, whole: &Graph, bound: f64, learning_rate: f64) -> Outcome {
    let mut store: Vec<HashMap<Instance, Vec<Tensor>>> = vec![HashMap::new(); programs.programs.len()];
    for (s, program) in programs.programs.iter().enumerate() {
        let shards = |t: &Tensor, i: usize| -> Vec<Tensor> {
            let sharding = &program.buffers[i].sharding;
            (0..program.mesh.num_devices()).map(|d| interpret::shard(t, sharding, &program.mesh, d)).collect()
        };
        for (i, buffer) in program.buffers.iter().enumerate() {
            let start = match &buffer.kind {
                BufferKind::Parameter { name } => value(name, &buffer.ty, bound),
                BufferKind::State { .. } | BufferKind::Accumulator { .. } => Tensor::splat(buffer.ty.clone(), 0.0),
                BufferKind::Scalar { name } if name == "learning_rate" => Tensor::scalar(DType::F32, learning_rate),
                BufferKind::Scalar { .. } => Tensor::scalar(DType::F32, 1.0),
                BufferKind::Input { name } => {
                    let (v, _) = whole.inputs().find(|(_, n)| n == name).expect("a known input");
                    let full = value(name, whole.ty(v), bound);
                    for m in 0..programs.num_microbatches {
                        let rows = buffer.ty.shape[0];
                        let part = Tensor::from_fn(buffer.ty.clone(), |index| {
                            let mut at = index.to_vec();
                            at[0] += m as u64 * rows;
                            full.at(&at)
                        });
                        store[s].insert((i as u32, Some(m)), shards(&part, i));
                    }
                    continue;
                }
                BufferKind::Loss | BufferKind::Output { .. } | BufferKind::Value => continue,
            };
            store[s].insert((i as u32, None), shards(&start, i));
        }
    }

    let mut at = vec![0usize; programs.programs.len()];
    let mut mail: HashMap<Instance, Vec<Tensor>> = HashMap::new();
    let mut loss = 0.0;
    while (0..at.len()).any(|s| at[s] < programs.programs[s].schedule.len()) {
        let before = at.clone();
        for s in 0..at.len() {
            let program = &programs.programs[s];
            while let Some(call) = program.schedule.get(at[s]) {
                match *call {
                    Call::Run { body, microbatch } => {
                        let body = &program.bodies[body as usize];
                        let results = interpret::run_mesh(&body.graph, &program.mesh, |v, device| {
                            let (_, b) = body.reads.iter().find(|(leaf, _)| *leaf == v).expect("a bound leaf");
                            let held = store[s].get(&(b.0, microbatch)).or_else(|| store[s].get(&(b.0, None)));
                            held.unwrap_or_else(|| panic!("{} reads {b} before it is there", body.name))
                                [device as usize]
                                .clone()
                        });
                        for (b, v) in &body.writes {
                            let per_call = program.buffer(*b).kind.is_of_step();
                            let value = results[v.index()].clone();
                            if program.buffer(*b).kind == BufferKind::Loss {
                                loss += value[0].data[0];
                            } else {
                                store[s].insert((b.0, microbatch.filter(|_| per_call)), value);
                            }
                        }
                        for b in &body.frees {
                            assert!(store[s].remove(&(b.0, microbatch)).is_some(), "{} frees {b} twice", body.name);
                        }
                    }
                    Call::Send { transfer, microbatch, free } => {
                        let t = &programs.transfers[transfer.0 as usize];
                        let target = &programs.programs[t.target.0 as usize];
                        let buffer = target.buffer(t.target.1);
                        let local = buffer.sharding.local_type(&buffer.ty, &target.mesh);
                        let mut parts = vec![Tensor::splat(local, f64::NAN); target.mesh.num_devices() as usize];
                        let source = &store[s][&(t.source.1.0, microbatch)];
                        for message in programs.messages(transfer) {
                            let shape: Vec<u64> = message.source_indices.iter().map(|i| i.len() as u64).collect();
                            for_each_index(&shape, |index| {
                                let pick = |lists: &[Vec<u64>]| -> Vec<u64> {
                                    index.iter().zip(lists).map(|(&i, l)| l[i as usize]).collect()
                                };
                                let part = &mut parts[message.target as usize];
                                let to = part.offset(&pick(&message.target_indices));
                                part.data[to] = source[message.source as usize].at(&pick(&message.source_indices));
                            });
                        }
                        mail.insert((transfer.0, microbatch), parts);
                        if free {
                            store[s].remove(&(t.source.1.0, microbatch));
                        }
                    }
                    Call::Receive { transfer, microbatch } => {
                        let Some(value) = mail.remove(&(transfer.0, microbatch)) else { break };
                        let target = programs.transfers[transfer.0 as usize].target.1;
                        store[s].insert((target.0, microbatch), value);
                    }
                }
                at[s] += 1;
            }
        }
        assert_ne!(before, at, "the programs wait for each other");
    }

    let mut gradients: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut weights = Vec::new();
    for (s, program) in programs.programs.iter().enumerate() {
        let leaked = store[s].keys().filter(|k| k.1.is_some()).count();
        assert_eq!(leaked, 0, "stage {s} keeps values of a microbatch");
        for (i, buffer) in program.buffers.iter().enumerate() {
            let whole = || {
                let parts = &store[s][&(i as u32, None)];
                interpret::unshard(parts, &buffer.ty, &buffer.sharding, &program.mesh)
            };
            match &buffer.kind {
                // Totals are summed in accumulators as well, but are no gradients.
                BufferKind::Accumulator { parameter } if parameter != ALL_PARAMETERS => {
                    let sum =
                        gradients.entry(parameter.clone()).or_insert_with(|| Tensor::splat(buffer.ty.clone(), 0.0));
                    let scale = 1.0 / programs.num_microbatches as f64;
                    sum.data.iter_mut().zip(&whole().data).for_each(|(s, x)| *s += scale * x);
                }
                BufferKind::Parameter { name } => weights.push((name.clone(), whole())),
                _ => {}
            }
        }
    }
    Outcome { loss: loss / programs.num_microbatches as f64, gradients, weights }
}

/// Asserts that a plan computes the loss, gradients and (under plain SGD) weights of one device.
pub fn assert_computes_the_same(plan: &Plan, programs: &Programs, whole: &Graph, bound: f64) {
    let learning_rate = 0.25;
    let (loss, gradients) = reference(whole, bound);
    let outcome = run(programs, whole, bound, learning_rate);
    let describe =
        || plan.stages.iter().map(|s| format!("{} zero{} {:?}", s.mesh, s.zero, s.layers)).collect::<Vec<_>>();
    assert!((outcome.loss - loss).abs() <= 1e-9 * loss.abs().max(1e-3), "{} {loss} {:?}", outcome.loss, describe());
    let far = |a: &Tensor, b: &Tensor| {
        let difference: f64 = a.data.iter().zip(&b.data).map(|(x, y)| (x - y).powi(2)).sum();
        let norm: f64 = b.data.iter().map(|y| y * y).sum();
        // NaN is far from everything.
        difference.is_nan() || difference.sqrt() > 1e-9 * norm.sqrt().max(1e-6)
    };
    let names = |of: &BTreeMap<String, Tensor>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&outcome.gradients), names(&gradients), "gradients under {:?}", describe());
    for (name, expected) in &gradients {
        assert!(!far(&outcome.gradients[name], expected), "gradient of {name} under {:?}", describe());
    }
    for (name, updated) in &outcome.weights {
        let (v, _) = whole.parameters().find(|(_, n)| n == name).expect("a known parameter");
        let mut expected = value(name, whole.ty(v), bound);
        let gradient = gradients.get(name).map_or(&[][..], |g| &g.data);
        expected.data.iter_mut().zip(gradient).for_each(|(w, g)| *w -= learning_rate * g);
        assert!(!far(updated, &expected), "updated {name} under {:?}", describe());
    }
}

/// A random graph of a few ops on `[4, 6]` matrices without outputs yet, and its last value.
pub fn random_steps(steps: &[(u8, u8, u8)]) -> (Graph, ValueId) {
    let mut g = Graph::new("random");
    let ty = TensorType::new(DType::F32, vec![4, 6]);
    let mut values = vec![g.emit(Op::Input(Input { name: "x".into(), ty }), &[])];
    for (i, &(kind, a, b)) in steps.iter().enumerate() {
        let a = values[a as usize % values.len()];
        let b = values[b as usize % values.len()];
        let value = match kind % 4 {
            0 => g.add(a, b),
            1 => g.unary(Unary::Tanh, a),
            2 => {
                let w = Parameter::new(format!("w{i}"), TensorType::new(DType::F32, vec![6, 6]));
                let w = g.emit(Op::Parameter(w), &[]);
                let dot =
                    DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![0] };
                g.emit(Op::DotGeneral(dot), &[a, w])
            }
            _ => g.mul(a, b),
        };
        values.push(value);
    }
    (g, values[values.len() - 1])
}

/// Plans a request. Checks that the plan reads back as it was written and computes what one device computes.
pub fn check(request: &Request) -> Plan {
    let plan = plan(request, &Silent).expect("a plan");
    check_plan(request, &plan);
    plan
}

/// Checks that a plan of a request is sound and computes the same as one device.
pub fn check_plan(request: &Request, plan: &Plan) {
    assert!(plan.verify().is_empty(), "{:?}", plan.verify());
    let read = Plan::from_json(&plan.to_json()).expect("a plan that was written can be read");
    assert!(read == *plan, "a plan must read back as it was written");
    let programs = programs(plan).expect("programs");
    let whole = rebatch(&request.graph, plan.global_batch).expect("the traced batch");
    assert_computes_the_same(plan, &programs, &whole, 12.0);
}
