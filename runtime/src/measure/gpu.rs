//! Measures bodies on GPUs and on XLA's devices: matrix products, attention, passes over memory, lookups and collectives.
//!
//! Each is the body of a program that a session runs like a plan's. So the measured kernels are compiled alike, call
//! the same libraries and are launched the same way. A step runs the body many times. The time of a run is the
//! difference to a step that runs it once, which cancels the overhead of a step.

use super::{Harness, Measurements, floats};
use crate::error::RuntimeError;
use crate::session::Session;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Binary, DotGeneral, Gather, GatherDims, Iota, Op, OutOfBounds, Reducer, Unary};
use altiplano_ir::optimizer::leaf;
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Call, Phase, Program, Programs};
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use std::collections::BTreeMap;

/// Times of matrix products by `[rows, columns, terms]`, and of batches by `[products, rows, columns, terms]`.
pub const MATMUL: &str = "gpu_matmul";
pub const BATCHED: &str = "gpu_matmul_batched";
/// Times of fused attention by floating-point operations.
pub const ATTENTION: &str = "gpu_attention";
/// Times of passes over memory and of lookups, by the bytes read and written.
pub const PASS: &str = "gpu_pass";
pub const INDEXED: &str = "gpu_indexed";

/// Target for the seconds of all runs of a step, so that clock resolution and disturbances are negligible.
const WORTH_S: f64 = 5e-3;
/// Maximum number of runs in a step.
const MOST_RUNS: u32 = 400;

/// A measured kernel: a graph whose leaves are its operands, on the devices of a mesh.
struct Subject {
    graph: Graph,
    mesh: Mesh,
    fused_attention: bool,
}

/// The devices to measure, and how a session on them starts.
pub struct Measurable<'a> {
    /// Collectives are measured between up to this many.
    pub devices: u32,
    /// CPU devices share the cores, so that all of them run a body at once, and they take seconds for the sizes that
    /// keep a GPU busy.
    pub are_cpus: bool,
    pub start: &'a dyn Fn(&Programs) -> Result<Session, RuntimeError>,
}

/// Measures devices.
///
/// # Errors
/// Fails if sessions cannot be set up, for example for lack of a library, or if they stop.
pub fn measure_devices(
    of: Measurable<'_>,
    quick: bool,
    tell: &mut dyn FnMut(&str, usize, usize),
) -> Result<Measurements, RuntimeError> {
    let devices = of.devices;
    let mut gauge = Gauge { harness: Harness::new(quick), of };
    let half: &[DType] = if quick { &[DType::BF16] } else { &[DType::BF16, DType::F16] };
    tell("matrix products", 0, 5);
    for &dtype in [DType::F32].iter().chain(half) {
        gauge.products(dtype)?;
    }
    tell("attention", 1, 5);
    for &dtype in half {
        gauge.attention(dtype)?;
    }
    tell("passes over memory", 2, 5);
    gauge.passes()?;
    tell("lookups", 3, 5);
    gauge.lookups()?;
    tell("collectives", 4, 5);
    // Each member has a device.
    let counts = (1..=devices.ilog2()).map(|power| 1 << power).chain([devices]);
    let mut counts: Vec<u32> = counts.filter(|&n| n > 1).collect();
    counts.dedup();
    for members in counts {
        gauge.collectives(members)?;
    }
    Ok(gauge.harness.found)
}

struct Gauge<'a> {
    harness: Harness,
    of: Measurable<'a>,
}

impl Gauge<'_> {
    /// The sizes of a series: few in quick mode, and smaller ones for CPUs.
    fn sizes(&self, [quick, of_cpus, of_gpus]: [&'static [usize]; 3]) -> &'static [usize] {
        match (self.harness.quick, self.of.are_cpus) {
            (true, _) => quick,
            (_, true) => of_cpus,
            _ => of_gpus,
        }
    }

    /// Seconds of one run of a graph on each of the devices that run at once.
    fn alone(&mut self, graph: Graph, fused_attention: bool) -> Result<f64, RuntimeError> {
        let at_once = if self.of.are_cpus { self.of.devices } else { 1 };
        self.seconds(&Subject { graph, mesh: Mesh::new(&[("each", at_once)]), fused_attention })
    }

    /// Seconds of one run.
    fn seconds(&mut self, subject: &Subject) -> Result<f64, RuntimeError> {
        let once = self.step_s(subject, 1)?;
        if self.harness.quick {
            return Ok((self.step_s(subject, 3)? - once) / 2.0);
        }
        const FEW: u32 = 8;
        let some = (self.step_s(subject, 1 + FEW)? - once) / f64::from(FEW);
        let runs = (WORTH_S / some.max(1e-9)).min(f64::from(MOST_RUNS)) as u32;
        match runs > FEW {
            true => Ok((self.step_s(subject, 1 + runs)? - once) / f64::from(runs)),
            false => Ok(some),
        }
    }

    /// Seconds of a step with `runs` runs.
    fn step_s(&mut self, subject: &Subject, runs: u32) -> Result<f64, RuntimeError> {
        let (warm, samples) = if self.harness.quick { (1, 3) } else { (2, 7) };
        let mut session = (self.of.start)(&subject.programs(runs))?;
        let mut step = || Ok::<f64, RuntimeError>(session.step(&BTreeMap::new(), &BTreeMap::new())?.seconds);
        for _ in 0..warm {
            step()?;
        }
        let taken = (0..samples).map(|_| step()).collect::<Result<Vec<f64>, RuntimeError>>()?;
        Ok(self.harness.median(taken))
    }

    fn products(&mut self, dtype: DType) -> Result<(), RuntimeError> {
        let axis = self.sizes([&[8, 32], &[16, 128, 512], &[64, 512, 2048, 8192]]);
        let mut seconds = Vec::new();
        for (&m, &n, &k) in grid(axis) {
            seconds.push(self.alone(product(1, m, n, k, dtype), false)?);
        }
        self.harness.grid(MATMUL, dtype, 1, vec![floats(axis, 1.0); 3], seconds);
        let counts = self.sizes([&[2], &[8], &[8, 96]]);
        let axis = self.sizes([&[4, 8], &[16, 64, 256], &[64, 256, 1024]]);
        let mut seconds = Vec::new();
        for &count in counts {
            for (&m, &n, &k) in grid(axis) {
                seconds.push(self.alone(product(count, m, n, k, dtype), false)?);
            }
        }
        let axes = [counts, axis, axis, axis].map(|axis| floats(axis, 1.0));
        self.harness.grid(BATCHED, dtype, 1, axes.to_vec(), seconds);
        Ok(())
    }

    fn attention(&mut self, dtype: DType) -> Result<(), RuntimeError> {
        let lengths = self.sizes([&[16, 32], &[64, 256, 512], &[256, 1024, 4096, 8192]]);
        let (heads, width) = match (self.harness.quick, self.of.are_cpus) {
            (true, _) => (2, 4),
            (_, true) => (8, 64),
            _ => (32, 64),
        };
        let flop = |length: &usize| 4.0 * heads as f64 * (length * length * width) as f64;
        let seconds = lengths.iter().map(|&length| self.alone(attention(heads, length, width, dtype), true));
        let seconds = seconds.collect::<Result<Vec<f64>, RuntimeError>>()?;
        self.harness.add(ATTENTION, dtype, &lengths.iter().map(flop).collect::<Vec<f64>>(), seconds);
        Ok(())
    }

    fn passes(&mut self) -> Result<(), RuntimeError> {
        let of_gpus = &[1 << 8, 1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 27];
        let sizes = self.sizes([&[64, 1024], &[1 << 8, 1 << 14, 1 << 18, 1 << 22], of_gpus]);
        let seconds = sizes.iter().map(|&n| self.alone(pass(n), false)).collect::<Result<Vec<f64>, RuntimeError>>()?;
        self.harness.add(PASS, DType::F32, &floats(sizes, 8.0), seconds);
        Ok(())
    }

    fn lookups(&mut self) -> Result<(), RuntimeError> {
        const WIDTH: usize = 256;
        let rows = self.sizes([&[4, 16], &[16, 1 << 8, 1 << 12], &[16, 1 << 8, 1 << 12, 1 << 16]]);
        let seconds =
            rows.iter().map(|&n| self.alone(lookup(n, WIDTH), false)).collect::<Result<Vec<f64>, RuntimeError>>()?;
        // A row read and written, and its index.
        self.harness.add(INDEXED, DType::F32, &floats(rows, 8.0 * WIDTH as f64 + 4.0), seconds);
        Ok(())
    }

    fn collectives(&mut self, devices: u32) -> Result<(), RuntimeError> {
        let of_gpus = &[1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28];
        let sizes = self.sizes([&[1 << 8, 1 << 12], &[1 << 10, 1 << 16, 1 << 20, 1 << 23], of_gpus]);
        let mesh = Mesh::new(&[("all", devices)]);
        let axes = || vec![AxisId(0)];
        let reducer = Reducer::Sum;
        for (kind, grows) in [
            (Collective::AllReduce { axes: axes(), reducer }, 1),
            (Collective::ReduceScatter { axes: axes(), reducer, dim: 0, outer: 1 }, 1),
            (Collective::AllGather { axes: axes(), dim: 0, outer: 1 }, u64::from(devices)),
        ] {
            let mut seconds = Vec::new();
            for &bytes in sizes {
                // The larger of operand and result has `bytes` bytes, with equally many elements on all devices.
                let elements = (bytes as u64 / 4).next_multiple_of(u64::from(devices)) / grows;
                let mut graph = Graph::new(kind.name());
                let x = leaf(&mut graph, "x", TensorType::new(DType::F32, [elements]));
                graph.outputs = vec![graph.emit(Op::collective(kind.clone(), &mesh), &[x])];
                seconds.push(self.seconds(&Subject { graph, mesh: mesh.clone(), fused_attention: false })?);
            }
            self.harness.grid(kind.name(), DType::F32, devices as usize, vec![floats(sizes, 1.0)], seconds);
        }
        Ok(())
    }
}

/// All points of a grid of three equal axes, row major.
fn grid(axis: &[usize]) -> impl Iterator<Item = (&usize, &usize, &usize)> {
    axis.iter().flat_map(move |x| axis.iter().flat_map(move |y| axis.iter().map(move |z| (x, y, z))))
}

fn tensor(graph: &mut Graph, name: &str, dtype: DType, shape: &[usize]) -> ValueId {
    leaf(graph, name, TensorType::new(dtype, shape.iter().map(|&n| n as u64).collect::<Vec<u64>>()))
}

fn product(count: usize, m: usize, n: usize, k: usize, dtype: DType) -> Graph {
    let mut graph = Graph::new("product");
    let many = if count > 1 { vec![count] } else { Vec::new() };
    let a = tensor(&mut graph, "a", dtype, &[many.as_slice(), &[m, k]].concat());
    let b = tensor(&mut graph, "b", dtype, &[many.as_slice(), &[k, n]].concat());
    let batch: Vec<usize> = (0..many.len()).collect();
    let (lhs_contract, rhs_contract) = (vec![many.len() + 1], vec![many.len()]);
    let dot = DotGeneral { lhs_batch: batch.clone(), rhs_batch: batch, lhs_contract, rhs_contract };
    graph.outputs = vec![graph.emit(Op::DotGeneral(dot), &[a, b])];
    graph
}

fn attention(heads: usize, length: usize, width: usize, dtype: DType) -> Graph {
    let mut graph = Graph::new("attention");
    let [q, k, v] = ["q", "k", "v"].map(|name| tensor(&mut graph, name, dtype, &[1, heads, length, width]));
    let dot = |graph: &mut Graph, a: ValueId, b: ValueId, rhs: usize| {
        let (lhs_contract, rhs_contract) = (vec![3], vec![rhs]);
        let dot = DotGeneral { lhs_batch: vec![0, 1], rhs_batch: vec![0, 1], lhs_contract, rhs_contract };
        graph.emit(Op::DotGeneral(dot), &[a, b])
    };
    // As models have it, with the statistics of the scores in f32.
    let scores = dot(&mut graph, q, k, 3);
    let scores = graph.convert(scores, DType::F32);
    let shape = graph.shape(scores).to_vec();
    let row = |graph: &mut Graph, x: ValueId, reducer: Reducer| {
        let reduced = graph.reduce(x, reducer, &[3]);
        graph.broadcast(reduced, &shape, &[0, 1, 2])
    };
    let most = row(&mut graph, scores, Reducer::Max);
    let shifted = graph.sub(scores, most);
    let weights = graph.unary(Unary::Exponential, shifted);
    let sum = row(&mut graph, weights, Reducer::Sum);
    let weights = graph.div(weights, sum);
    let weights = graph.convert(weights, dtype);
    graph.outputs = vec![dot(&mut graph, weights, v, 2)];
    graph
}

fn pass(elements: usize) -> Graph {
    let mut graph = Graph::new("pass");
    let x = tensor(&mut graph, "x", DType::F32, &[elements]);
    let half = graph.splat_like(x, 0.5);
    let scaled = graph.mul(x, half);
    graph.outputs = vec![graph.add(scaled, half)];
    graph
}

fn lookup(rows: usize, width: usize) -> Graph {
    let mut graph = Graph::new("lookup");
    let table = tensor(&mut graph, "table", DType::F32, &[rows, width]);
    let indices = tensor(&mut graph, "indices", DType::I32, &[rows, 1]);
    let dims = GatherDims::rows(&[rows as u64, width as u64], 1);
    graph.outputs = vec![graph.emit(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[table, indices])];
    graph
}

/// Fills a tensor with ordinary numbers, no two adjacent ones alike: products of zeros take less power than others, and
/// so less time. Integers are below the first dimension's size, in scattered order.
///
/// Adding `zero`, a scalar that is read, keeps the tensor from being a constant, which the host would compute.
fn filled(graph: &mut Graph, ty: &TensorType, zero: ValueId) -> ValueId {
    let dtype = if ty.dtype.is_float() { DType::F32 } else { ty.dtype };
    let zero = graph.convert(zero, dtype);
    let mut sum = graph.broadcast_scalar(zero, &ty.shape);
    for dim in (0..ty.rank()).take(if ty.dtype.is_float() { usize::MAX } else { 1 }) {
        let position = graph.emit(Op::Iota(Iota { ty: ty.with_dtype(dtype), dim }), &[]);
        let step = if ty.dtype.is_float() { 0.7 + 0.37 * dim as f64 } else { 7.0 };
        let step = graph.splat_like(position, step);
        let turned = graph.mul(position, step);
        sum = graph.add(sum, turned);
    }
    if !ty.dtype.is_float() {
        let count = graph.splat_like(sum, ty.shape[0] as f64);
        return graph.emit(Op::Binary(Binary::Remainder), &[sum, count]);
    }
    let wave = graph.unary(Unary::Sine, sum);
    graph.convert(wave, ty.dtype)
}

impl Subject {
    /// A step that makes the operands and runs the graph `runs` times. All tensors belong to one device each and are
    /// state, which stays in place.
    fn programs(&self, runs: u32) -> Programs {
        let mut buffers: Vec<Buffer> = Vec::new();
        let mut buffer = |ty: &TensorType| {
            let name = format!("tensor {}", buffers.len());
            let kind = BufferKind::State { parameter: name.clone(), slot: "value".to_string() };
            buffers.push(Buffer {
                name,
                stage: 0,
                kind,
                ty: ty.clone(),
                sharding: Sharding::replicated(&ty.shape),
                extents: None,
                host: false,
            });
            BufferId(buffers.len() as u32 - 1)
        };
        let graph = self.graph.clone();
        let leaves: Vec<ValueId> = graph.values().filter(|&v| graph.node(v).op.is_leaf()).collect();
        let reads: Vec<(ValueId, BufferId)> = leaves.iter().map(|&v| (v, buffer(graph.ty(v)))).collect();
        let writes = graph.outputs.iter().map(|&v| (buffer(graph.ty(v)), v)).collect();
        let mut operands = Graph::new("operands");
        let scalar = TensorType::scalar(DType::F32);
        let zero = (leaf(&mut operands, "zero", scalar.clone()), buffer(&scalar));
        let made: Vec<ValueId> = leaves.iter().map(|&v| filled(&mut operands, graph.ty(v), zero.0)).collect();
        operands.outputs = made.clone();
        let body = |name: &str, graph, reads, writes| {
            let (name, phase, frees) = (name.to_string(), Phase::Forward, Vec::new());
            Body { name, stage: 0, phase, graph, reads, writes, frees }
        };
        let given = reads.iter().zip(made).map(|(read, made)| (read.1, made)).collect();
        let bodies = vec![body("operands", operands, vec![zero], given), body(&self.graph.name, graph, reads, writes)];
        let calls = std::iter::once(0).chain((0..runs).map(|_| 1));
        let program = Program {
            devices: (0..self.mesh.num_devices()).collect(),
            mesh: self.mesh.clone(),
            buffers,
            bodies,
            schedule: calls.map(|body| Call::Run { body, microbatch: None }).collect(),
            late: Vec::new(),
            flush: Vec::new(),
            fused_attention: self.fused_attention,
        };
        let (programs, transfers) = (vec![program], Vec::new());
        Programs { programs, transfers, num_microbatches: 1, microbatch: 0, loss_is_mean: true }
    }
}
