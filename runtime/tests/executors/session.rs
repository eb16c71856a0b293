//! Whole sessions: a pipeline of two stages on differently shaped meshes, memory, and errors that must end a session
//! without a hang.

use crate::common::{Random, input, programs_of};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::*;
use altiplano_ir::program::*;
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use altiplano_runtime::error::KernelError;
use altiplano_runtime::{HostTensor, Options, RuntimeError, Session};
use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::time::Duration;

const ROWS: u64 = 4;
const LEARNING_RATE: f64 = 0.1;

fn buffer(name: &str, kind: BufferKind, shape: &[u64], sharding: &str, mesh: &Mesh) -> Buffer {
    let sharding = Sharding::parse(sharding, shape, mesh).unwrap();
    let ty = TensorType::new(DType::F32, shape);
    Buffer { name: name.to_string(), stage: 0, kind, ty, sharding, extents: None, host: false }
}

fn dot(graph: &mut Graph, a: ValueId, b: ValueId, lhs: usize, rhs: usize) -> ValueId {
    let op = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![lhs], rhs_contract: vec![rhs] };
    graph.emit(Op::DotGeneral(op), &[a, b])
}

fn body(
    name: &str,
    phase: Phase,
    graph: Graph,
    reads: &[(ValueId, u32)],
    writes: &[(u32, ValueId)],
    frees: &[u32],
) -> Body {
    Body {
        name: name.to_string(),
        stage: 0,
        phase,
        graph,
        reads: reads.iter().map(|&(v, b)| (v, BufferId(b))).collect(),
        writes: writes.iter().map(|&(b, v)| (BufferId(b), v)).collect(),
        frees: frees.iter().map(|&b| BufferId(b)).collect(),
    }
}

/// `loss = mean((tanh(x W1) W2 - t)^2)` with `x[rows,3]`, `W1[3,4]`, `W2[4]`. The first stage splits rows over `data`,
/// the second hidden columns over `tensor`.
fn two_stages() -> Programs {
    let data = Mesh::new(&[("data", 2), ("tensor", 1)]);
    let tensor = Mesh::new(&[("tensor", 2)]);
    let sum_all =
        |mesh: &Mesh| Op::collective(Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Sum }, mesh);
    let parameter = |n: &str| BufferKind::Parameter { name: n.to_string() };
    let accumulator = |n: &str| BufferKind::Accumulator { parameter: n.to_string() };
    let rate = || BufferKind::Scalar { name: "learning_rate".to_string() };
    let update = |mesh: Option<&Mesh>, shape: &[u64]| {
        let mut g = Graph::new("update");
        let p = input(&mut g, "p", DType::F32, shape);
        let a = input(&mut g, "a", DType::F32, shape);
        let lr = input(&mut g, "lr", DType::F32, &[]);
        let whole = mesh.map_or(a, |m| g.emit(sum_all(m), &[a]));
        let lr_wide = g.broadcast_scalar(lr, shape);
        let half = g.splat_like(whole, 0.5);
        let mean = g.mul(whole, half);
        let step = g.mul(mean, lr_wide);
        let next = g.sub(p, step);
        (g, [p, a, lr], next)
    };

    let first = {
        let buffers = vec![
            buffer("x", BufferKind::Input { name: "x".to_string() }, &[ROWS, 3], "[{data}, {}]", &data),
            buffer("w1", parameter("w1"), &[3, 4], "[{}, {}]", &data),
            buffer("h", BufferKind::Value, &[ROWS, 4], "[{data}, {}]", &data),
            buffer("dh", BufferKind::Value, &[ROWS, 4], "[{data}, {}]", &data),
            buffer("dw1", accumulator("w1"), &[3, 4], "[{}, {}] partial{sum: data}", &data),
            buffer("lr", rate(), &[], "[]", &data),
        ];
        let mut g = Graph::new("forward");
        let x = input(&mut g, "x", DType::F32, &[ROWS / 2, 3]);
        let w = input(&mut g, "w", DType::F32, &[3, 4]);
        let z = dot(&mut g, x, w, 1, 0);
        let h = g.unary(Unary::Tanh, z);
        let forward = body("forward", Phase::Forward, g, &[(x, 0), (w, 1)], &[(2, h)], &[]);
        let mut g = Graph::new("backward");
        let x = input(&mut g, "x", DType::F32, &[ROWS / 2, 3]);
        let h = input(&mut g, "h", DType::F32, &[ROWS / 2, 4]);
        let dh = input(&mut g, "dh", DType::F32, &[ROWS / 2, 4]);
        let old = input(&mut g, "old", DType::F32, &[3, 4]);
        let one = g.splat_like(h, 1.0);
        let square = g.mul(h, h);
        let slope = g.sub(one, square);
        let dz = g.mul(dh, slope);
        let dw = dot(&mut g, x, dz, 0, 0);
        let new = g.add(old, dw);
        let reads = [(x, 0), (h, 2), (dh, 3), (old, 4)];
        let backward = body("backward", Phase::Backward, g, &reads, &[(4, new)], &[0, 2, 3]);
        let (g, [p, a, lr], next) = update(Some(&data), &[3, 4]);
        let update = body("update", Phase::Update, g, &[(p, 1), (a, 4), (lr, 5)], &[(1, next)], &[]);
        let run = |body, microbatch| Call::Run { body, microbatch };
        let schedule = vec![
            run(0, Some(0)),
            Call::Send { transfer: TransferId(0), microbatch: Some(0), free: false },
            run(0, Some(1)),
            Call::Send { transfer: TransferId(0), microbatch: Some(1), free: false },
            Call::Receive { transfer: TransferId(1), microbatch: Some(1) },
            run(1, Some(1)),
            Call::Receive { transfer: TransferId(1), microbatch: Some(0) },
            run(1, Some(0)),
            run(2, None),
        ];
        Program {
            devices: vec![1, 0],
            mesh: data,
            buffers,
            bodies: vec![forward, backward, update],
            schedule,
            late: vec![],
            flush: vec![],
            fused_attention: false,
        }
    };
    let second = {
        let buffers = vec![
            buffer("h", BufferKind::Value, &[ROWS, 4], "[{}, {tensor}]", &tensor),
            buffer("t", BufferKind::Input { name: "t".to_string() }, &[ROWS], "[{}]", &tensor),
            buffer("w2", parameter("w2"), &[4], "[{tensor}]", &tensor),
            buffer("loss", BufferKind::Loss, &[], "[]", &tensor),
            buffer("dh", BufferKind::Value, &[ROWS, 4], "[{}, {tensor}]", &tensor),
            buffer("dw2", accumulator("w2"), &[4], "[{tensor}]", &tensor),
            buffer("lr", rate(), &[], "[]", &tensor),
        ];
        let mut g = Graph::new("both");
        let h = input(&mut g, "h", DType::F32, &[ROWS, 2]);
        let t = input(&mut g, "t", DType::F32, &[ROWS]);
        let w = input(&mut g, "w", DType::F32, &[2]);
        let old = input(&mut g, "old", DType::F32, &[2]);
        let part = dot(&mut g, h, w, 1, 0);
        let y = g.emit(sum_all(&tensor), &[part]);
        let difference = g.sub(y, t);
        let square = g.mul(difference, difference);
        let sum = g.reduce(square, Reducer::Sum, &[0]);
        let count = g.constant(Literal::splat(TensorType::scalar(DType::F32), ROWS as f64));
        let loss = g.div(sum, count);
        let scale = g.splat_like(difference, 2.0 / ROWS as f64);
        let dy = g.mul(difference, scale);
        let dw = dot(&mut g, h, dy, 0, 0);
        let new = g.add(old, dw);
        let wide = g.broadcast(dy, &[ROWS, 2], &[0]);
        let columns = g.broadcast(w, &[ROWS, 2], &[1]);
        let dh = g.mul(wide, columns);
        let reads = [(h, 0), (t, 1), (w, 2), (old, 5)];
        let both = body("both", Phase::Forward, g, &reads, &[(3, loss), (4, dh), (5, new)], &[0, 1]);
        let (g, [p, a, lr], next) = update(None, &[2]);
        let update = body("update", Phase::Update, g, &[(p, 2), (a, 5), (lr, 6)], &[(2, next)], &[]);
        let mut schedule = Vec::new();
        for m in [0, 1] {
            schedule.extend([
                Call::Receive { transfer: TransferId(0), microbatch: Some(m) },
                Call::Run { body: 0, microbatch: Some(m) },
                Call::Send { transfer: TransferId(1), microbatch: Some(m), free: true },
            ]);
        }
        schedule.push(Call::Run { body: 1, microbatch: None });
        Program {
            devices: vec![2, 3],
            mesh: tensor,
            buffers,
            bodies: vec![both, update],
            schedule,
            late: vec![],
            flush: vec![],
            fused_attention: false,
        }
    };
    Programs {
        programs: vec![first, second],
        transfers: vec![
            Transfer { source: (0, BufferId(2)), target: (1, BufferId(0)) },
            Transfer { source: (1, BufferId(4)), target: (0, BufferId(3)) },
        ],
        num_microbatches: 2,
        microbatch: ROWS,
        loss_is_mean: true,
    }
}

/// The same step in f64: loss, gradients (summed over microbatches) and new parameters.
fn expected(x: &[f64], t: &[f64], w1: &[f64], w2: &[f64]) -> (f64, Vec<f64>, Vec<f64>, Vec<f64>, Vec<f64>) {
    let rows = t.len();
    let (mut loss, mut g1, mut g2) = (0.0, vec![0.0; 12], vec![0.0; 4]);
    for r in 0..rows {
        let h: Vec<f64> = (0..4).map(|j| (0..3).map(|i| x[r * 3 + i] * w1[i * 4 + j]).sum::<f64>().tanh()).collect();
        let y: f64 = h.iter().zip(w2).map(|(a, b)| a * b).sum();
        loss += (y - t[r]).powi(2) / rows as f64;
        let dy = 2.0 * (y - t[r]) / ROWS as f64;
        for j in 0..4 {
            g2[j] += dy * h[j];
            for i in 0..3 {
                g1[i * 4 + j] += x[r * 3 + i] * dy * w2[j] * (1.0 - h[j] * h[j]);
            }
        }
    }
    let next = |w: &[f64], g: &[f64]| w.iter().zip(g).map(|(w, g)| w - LEARNING_RATE * g / 2.0).collect::<Vec<f64>>();
    let (n1, n2) = (next(w1, &g1), next(w2, &g2));
    (loss, g1, g2, n1, n2)
}

fn tensor(shape: &[u64], data: &[f64]) -> HostTensor {
    HostTensor::from_f64(TensorType::new(DType::F32, shape), data)
}

fn near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() < 1e-5, "{what}: {found:?} is not {expected:?}");
    }
}

fn batch(random: &mut Random) -> (Vec<f64>, Vec<f64>, BTreeMap<String, HostTensor>) {
    let rows = 2 * ROWS as usize;
    let x: Vec<f64> = (0..rows * 3).map(|_| random.unit()).collect();
    let t: Vec<f64> = (0..rows).map(|_| random.unit()).collect();
    let inputs =
        BTreeMap::from([("x".to_string(), tensor(&[2 * ROWS, 3], &x)), ("t".to_string(), tensor(&[2 * ROWS], &t))]);
    (x, t, inputs)
}

fn scalars() -> BTreeMap<String, f64> {
    BTreeMap::from([("learning_rate".to_string(), LEARNING_RATE)])
}

#[test]
fn a_pipeline_trains_as_one_device_does() {
    let mut session = Session::new(&two_stages(), &Options::default()).unwrap();
    let mut random = Random(21);
    let mut w1: Vec<f64> = (0..12).map(|_| random.unit()).collect();
    let mut w2: Vec<f64> = (0..4).map(|_| random.unit()).collect();
    session.load_parameter("w1", &tensor(&[3, 4], &w1)).unwrap();
    session.load_parameter("w2", &tensor(&[4], &w2)).unwrap();
    for step in 0..3 {
        let (x, t, inputs) = batch(&mut random);
        let report = session.step(&inputs, &scalars()).unwrap();
        let (loss, g1, g2, n1, n2) = expected(&x, &t, &w1, &w2);
        near(&[report.loss], &[loss], &format!("loss of step {step}"));
        assert_eq!(report.losses.len(), 2);
        near(&session.accumulator("w1").unwrap().to_f64(), &g1, "gradient of w1");
        near(&session.accumulator("w2").unwrap().to_f64(), &g2, "gradient of w2");
        near(&session.parameter("w1").unwrap().to_f64(), &n1, "w1");
        near(&session.parameter("w2").unwrap().to_f64(), &n2, "w2");
        (w1, w2) = (n1, n2);
        assert_eq!(report.peak_bytes.len(), 4);
    }
    assert_eq!(session.parameters().into_iter().collect::<Vec<_>>(), ["w1", "w2"]);
}

#[test]
fn steps_are_deterministic_in_values_and_memory() {
    let run = || {
        let mut session = Session::new(&two_stages(), &Options::default()).unwrap();
        let mut random = Random(22);
        session.load_parameter("w1", &tensor(&[3, 4], &[0.3; 12])).unwrap();
        session.load_parameter("w2", &tensor(&[4], &[0.2, -0.4, 0.1, 0.9])).unwrap();
        let (_, _, inputs) = batch(&mut random);
        let reports: Vec<_> = (0..4).map(|_| session.step(&inputs, &scalars()).unwrap()).collect();
        let losses: Vec<u64> = reports.iter().map(|r| r.loss.to_bits()).collect();
        (losses, session.peak_bytes())
    };
    let first = run();
    for _ in 0..5 {
        assert_eq!(run(), first);
    }
}

/// The memory that liveness predicts for a body equals what a device holds, to the byte.
#[test]
fn predicted_memory_is_held_memory() {
    let mesh = Mesh::new(&[("data", 2)]);
    for seed in 0..60 {
        let mut random = Random(3000 + seed);
        let mut graph = Graph::new("memory");
        let x = input(&mut graph, "x", DType::F32, &[40, 64]);
        let y = input(&mut graph, "y", DType::BF16, &[64, 64]);
        let mut values = vec![x, graph.convert(y, DType::F32)];
        for _ in 0..random.below(20) + 3 {
            let v = random.pick(&values);
            let next = match random.below(9) {
                0 => graph.unary(Unary::Tanh, v),
                1 => graph.add(v, v),
                2 => dot(&mut graph, v, values[1], 1, 0),
                3 => {
                    let op = Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Max };
                    graph.emit(Op::collective(op, &mesh), &[v])
                }
                4 => {
                    let max = graph.reduce(v, Reducer::Max, &[1]);
                    let shape = graph.shape(v).to_vec();
                    let wide = graph.broadcast(max, &shape, &[0]);
                    graph.sub(v, wide)
                }
                5 => {
                    let dim = random.below(2);
                    let (reducer, reverse) = (Reducer::Max, random.below(2) == 1);
                    let scan = graph.emit(Op::Cumulative(Cumulative { reducer, dim, reverse }), &[v]);
                    graph.emit(Op::Reverse(Reverse { dims: vec![dim] }), &[scan])
                }
                6 => {
                    let op = ArgSort { dim: random.below(2), descending: vec![false, true] };
                    let order = graph.emit(Op::ArgSort(op), &[v, v]);
                    graph.convert(order, DType::F32)
                }
                7 => {
                    let row = graph.reduce(v, Reducer::Max, &[0]);
                    let index = graph.constant(Literal::splat(TensorType::scalar(DType::I32), 3.0));
                    let dims = GatherDims::rows(&[64, 64], 0);
                    graph.emit(Op::Scatter(Scatter { dims, combine: Combine::Replace }), &[v, index, row])
                }
                _ => {
                    let half = graph.convert(v, DType::BF16);
                    let t = graph.transpose(half, &[1, 0]);
                    let back = graph.transpose(t, &[1, 0]);
                    graph.convert(back, DType::F32)
                }
            };
            values.push(next);
        }
        graph.outputs = vec![values[values.len() - 1], random.pick(&values)];
        let programs = programs_of(&graph, &mesh);
        let mut session = Session::new(&programs, &Options::default()).unwrap();
        session.step(&BTreeMap::new(), &BTreeMap::new()).unwrap();
        let program = &programs.programs[0];
        let lasting: u64 = (0..program.buffers.len() as u32).map(|b| program.local_bytes(BufferId(b))).sum();
        let transient = altiplano_runtime::body_transient_bytes(&program.bodies[0]);
        assert_eq!(session.peak_bytes(), [lasting + transient; 2], "seed {seed}");
    }
}

/// Optimizer updates and gradient sums need no memory beyond their operands.
#[test]
fn updates_are_in_place() {
    for program in two_stages().programs {
        for body in program.bodies.iter().filter(|b| b.phase == Phase::Update) {
            let reduced = body.graph.nodes.iter().any(|n| matches!(n.op, Op::Collective(_)));
            let transient = altiplano_runtime::body_transient_bytes(body);
            assert_eq!(transient > 0, reduced, "{} needs {transient}", body.name);
        }
    }
}

/// The product itself adds a weight gradient to its accumulator, without extra memory.
#[test]
fn gradients_are_accumulated_in_place() {
    let mesh = Mesh::new(&[("only", 1)]);
    for dtype in [DType::F32, DType::BF16] {
        let mut g = Graph::new("accumulate");
        let x = input(&mut g, "x", dtype, &[7, 6]);
        let y = input(&mut g, "y", dtype, &[7, 20]);
        let old = input(&mut g, "old", dtype, &[20, 3, 2]);
        let product = dot(&mut g, x, y, 0, 0);
        let transposed = g.transpose(product, &[1, 0]);
        let shaped = g.reshape(transposed, &[20, 3, 2]);
        let new = g.add(old, shaped);
        g.outputs = vec![new];
        let mut random = Random(26);
        let leaves: Vec<_> = [x, y, old].iter().map(|&v| random.tensor(g.ty(v))).collect();
        let expected = altiplano_ir::interpret::run(&g, |v| leaves[v.index()].clone()).remove(0);
        let named = |name: &str, v: ValueId| Buffer {
            name: name.to_string(),
            stage: 0,
            extents: None,
            host: false,
            kind: BufferKind::Parameter { name: name.to_string() },
            ty: g.ty(v).clone(),
            sharding: Sharding::replicated(g.shape(v)),
        };
        let buffers = vec![named("x", x), named("y", y), named("sum", old)];
        let body = body("accumulate", Phase::Backward, g.clone(), &[(x, 0), (y, 1), (old, 2)], &[(2, new)], &[]);
        let workspace = if dtype == DType::F32 { 0 } else { 4 * (7 * 6 + 7 * 20 + 6 * 20) };
        assert_eq!(altiplano_runtime::body_transient_bytes(&body), workspace);
        let schedule = vec![Call::Run { body: 0, microbatch: None }];
        let program = Program {
            devices: vec![0],
            mesh: mesh.clone(),
            buffers,
            bodies: vec![body],
            schedule,
            late: vec![],
            flush: vec![],
            fused_attention: false,
        };
        let programs = Programs {
            programs: vec![program],
            transfers: vec![],
            num_microbatches: 1,
            microbatch: 0,
            loss_is_mean: true,
        };
        let mut session = Session::new(&programs, &Options::default()).unwrap();
        for (name, leaf) in ["x", "y", "sum"].iter().zip(&leaves) {
            session.load_parameter(name, &HostTensor::from_reference(leaf)).unwrap();
        }
        let lasting = session.peak_bytes()[0];
        session.step(&BTreeMap::new(), &BTreeMap::new()).unwrap();
        let found = session.parameter("sum").unwrap().to_reference();
        crate::common::assert_close(&found, &expected, if dtype == DType::F32 { 1e-6 } else { 0.01 }, "sum");
        assert_eq!(session.peak_bytes()[0], lasting + workspace);
    }
}

/// Runs `work` on another thread and fails if it takes longer than any of these tests should.
fn within_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    std::thread::spawn(move || send.send(work()));
    receive.recv_timeout(Duration::from_secs(60)).expect("the session hangs")
}

#[test]
fn one_failing_device_stops_all() {
    let error = within_time(|| {
        let mut programs = two_stages();
        // The second stage needs more memory than allowed, while the first waits for its message.
        let both = &mut programs.programs[1].bodies[0];
        let w = both.reads[2].0;
        let big = both.graph.broadcast(w, &[2, 1000], &[0]);
        let more = dot(&mut both.graph, big, big, 1, 1);
        let flat = both.graph.reduce(big, Reducer::Max, &[0]);
        let sum = both.graph.reduce(flat, Reducer::Sum, &[0]);
        let all = both.graph.reduce(more, Reducer::Sum, &[0, 1]);
        let product = both.graph.mul(all, sum);
        both.writes[0].1 = product;
        let options = Options { memory_limit_bytes: Some(2000), ..Default::default() };
        let mut session = Session::new(&programs, &options).unwrap();
        let (_, _, inputs) = batch(&mut Random(23));
        let error = session.step(&inputs, &scalars()).unwrap_err();
        assert!(matches!(session.step(&inputs, &scalars()), Err(RuntimeError::Stopped)));
        error
    });
    let RuntimeError::Device { place, error } = &error else { panic!("{error}") };
    assert!(matches!(error, KernelError::MemoryLimit { limit_bytes: 2000, .. }), "{error}");
    assert_eq!(place.program, 1);
    let text = RuntimeError::Device { place: place.clone(), error: error.clone() }.to_string();
    for part in ["device ", "program 1", "body 'both'", "microbatch 0", "reduce"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_read_of_what_was_never_written_is_an_error() {
    let error = within_time(|| {
        let mut programs = two_stages();
        programs.programs[0].bodies[0].frees = vec![BufferId(2)];
        let mut session = Session::new(&programs, &Options::default()).unwrap();
        let (_, _, inputs) = batch(&mut Random(24));
        // The forward body writes after it frees, so sends succeed. If sending frees the buffer, the backward body
        // fails.
        session.step(&inputs, &scalars()).unwrap();
        for call in &mut programs.programs[0].schedule {
            if let Call::Send { free, .. } = call {
                *free = true;
            }
        }
        let mut session = Session::new(&programs, &Options::default()).unwrap();
        session.step(&inputs, &scalars()).unwrap_err()
    });
    let RuntimeError::Device { error, .. } = &error else { panic!("{error}") };
    assert_eq!(*error, KernelError::MissingValue { buffer: BufferId(2), microbatch: Some(1) });
}

#[test]
fn wrong_programs_are_refused() {
    let broken = |change: &dyn Fn(&mut Programs)| {
        let mut programs = two_stages();
        change(&mut programs);
        match Session::new(&programs, &Options::default()) {
            Ok(_) => panic!("accepted"),
            Err(error) => error,
        }
    };
    let error = broken(&|p| p.programs[0].schedule.swap(0, 4));
    assert!(matches!(error, RuntimeError::Deadlock { program: 0, call: 0 }), "{error}");
    let error =
        broken(&|p| p.programs[0].schedule.push(Call::Receive { transfer: TransferId(1), microbatch: Some(0) }));
    assert!(matches!(error, RuntimeError::Deadlock { program: 0, call: 9 }), "{error}");
    let error = broken(&|p| p.programs[0].schedule.push(Call::Run { body: 7, microbatch: None }));
    assert!(matches!(error, RuntimeError::Call { program: 0, call: 9, .. }), "{error}");
    let error = broken(&|p| p.programs[1].buffers[0].ty.shape[0] = 5);
    assert!(matches!(error, RuntimeError::Buffer { program: 1, buffer: BufferId(0), .. }), "{error}");
    let error = broken(&|p| p.programs[1].devices.push(9));
    assert!(matches!(error, RuntimeError::Program { program: 1, .. }), "{error}");
    let error = broken(&|p| p.programs[0].bodies[0].reads[0].1 = BufferId(1));
    assert!(matches!(error, RuntimeError::Body { program: 0, .. }), "{error}");
    let error = broken(&|p| p.programs[0].bodies[0].reads.truncate(1));
    assert!(matches!(error, RuntimeError::Body { program: 0, .. }), "{error}");
    let error = broken(&|p| p.programs[0].bodies[0].graph.nodes[2].ty.shape[0] = 77);
    assert!(matches!(error, RuntimeError::Graph { program: 0, .. }), "{error}");
    let error = broken(&|p| p.transfers[0].target.1 = BufferId(1));
    assert!(matches!(error, RuntimeError::Transfer { transfer: TransferId(0), .. }), "{error}");
    let error = broken(&|p| p.programs[0].bodies[2].frees.push(BufferId(1)));
    assert!(matches!(error, RuntimeError::Buffer { program: 0, .. }), "{error}");
}

#[test]
fn wrong_tensors_are_refused_and_the_session_goes_on() {
    let mut session = Session::new(&two_stages(), &Options::default()).unwrap();
    let w1 = tensor(&[3, 4], &[0.0; 12]);
    let error = session.load_parameter("w9", &w1).unwrap_err();
    assert!(matches!(&error, RuntimeError::UnknownParameter { name } if name == "w9"), "{error}");
    let error = session.load_parameter("w2", &w1).unwrap_err();
    assert!(error.to_string().contains("'w2' has type f32[3,4], expected f32[4]"), "{error}");
    let integers = HostTensor::i32([3, 4], vec![0; 12]).unwrap();
    assert!(matches!(session.load_parameter("w1", &integers), Err(RuntimeError::TensorType { .. })));
    let false_count = HostTensor { data: w1.data.clone(), ty: TensorType::new(DType::F32, [4]) };
    assert!(matches!(session.load_parameter("w2", &false_count), Err(RuntimeError::ValueCount { .. })));
    assert!(matches!(session.load_state("w1", "m", &w1), Err(RuntimeError::UnknownState { .. })));
    let (_, _, mut inputs) = batch(&mut Random(25));
    assert!(matches!(session.step(&inputs, &BTreeMap::new()), Err(RuntimeError::MissingScalar { .. })));
    let t = inputs.remove("t").unwrap();
    assert!(matches!(session.step(&inputs, &scalars()), Err(RuntimeError::MissingInput { .. })));
    inputs.insert("t".to_string(), tensor(&[7], &[0.0; 7]));
    let error = session.step(&inputs, &scalars()).unwrap_err();
    assert!(matches!(&error, RuntimeError::InputType { microbatches: 2, .. }), "{error}");
    inputs.insert("t".to_string(), t);
    assert!(session.step(&inputs, &scalars()).unwrap().loss.is_finite());
}

#[test]
fn the_op_that_makes_a_nan_is_named() {
    let options = Options { check_nan: true, ..Options::default() };
    let mesh = Mesh::new(&[("data", 2)]);
    let programs = |infinite: bool| {
        let mut graph = Graph::new("nan");
        let x = input(&mut graph, "x", DType::F32, &[2, 3]);
        // 0 / 0, or infinity minus infinity once x is large.
        let y = if infinite { graph.emit(Op::Unary(Unary::Exponential), &[x]) } else { graph.sub(x, x) };
        let sum = graph.reduce(y, Reducer::Sum, &[1]);
        let op = if infinite { Binary::Subtract } else { Binary::Divide };
        let z = graph.emit(Op::Binary(op), &[sum, sum]);
        graph.outputs = vec![z];
        programs_of(&graph, &mesh)
    };
    let stopped = |infinite: bool, value: f64| {
        let mut session = Session::new(&programs(infinite), &options).expect("it starts");
        let ty = TensorType::new(DType::F32, [2, 2, 3]);
        session.load_parameter("x", &HostTensor::from_f64(ty, &[value; 12])).expect("it loads");
        match session.step(&BTreeMap::new(), &BTreeMap::new()) {
            Err(error @ RuntimeError::Device { .. }) => Some(error.to_string()),
            other => other.map(|_| None).expect("no other failure"),
        }
    };
    let text = stopped(false, 1.0).expect("0 / 0 is noticed");
    assert!(text.contains("divide") && text.contains("made a NaN from inputs without NaN"), "{text}");
    assert!(!text.contains("infinity"), "{text}");
    let text = stopped(true, 100.0).expect("infinity - infinity is noticed");
    assert!(text.contains("subtract") && text.contains("the first infinity was made by"), "{text}");
    assert_eq!(stopped(true, 1.0), None, "numbers pass");
    let text = stopped(true, f64::NAN).expect("a NaN in a parameter is noticed");
    assert!(text.contains("'x' holds a NaN"), "{text}");
}
