//! Measures a device's overhead beside its kernels: per kernel call (`dispatch`), per tensor that a body reads or
//! writes (`buffer`), and per step (`step`).
//!
//! Sessions run bodies of few and of many short kernels and tensors. The time of the kernels themselves is measured
//! like all others and subtracted.

use super::kernels::of_step;
use super::{Harness, LEAST_S};
use crate::compile::compile;
use crate::element::Class;
use crate::error::RuntimeError;
use crate::evaluate::programs;
use crate::session::{Options, Session};
use crate::step::Step;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{DotGeneral, Input, Op, Reducer, Unary};
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// Repetitions of the kernels in the timed bodies.
const ROUNDS: [usize; 2] = [16, 128];

/// Tensors of the timed bodies: each is read and makes one that is written.
const TENSORS: [usize; 2] = [16, 128];

/// Sizes used in rotation.
const SIDES: [u64; 8] = [8, 20, 12, 32, 16, 24, 10, 28];

/// Measures all overheads with these numbers of devices, the fewest first.
pub(crate) fn measure(harness: &mut Harness, loads: &[usize]) -> Result<(), RuntimeError> {
    // More concurrent devices never take less.
    let (mut dispatch_s, mut buffer_s) = (LEAST_S, LEAST_S);
    for &load in loads {
        harness.load = load;
        let of_kernels = ROUNDS.map(|rounds| (kernels(rounds), rounds / SIDES.len()));
        let of_tensors = TENSORS.map(|n| (sums(n), n));
        let all = of_kernels.into_iter().chain(of_tensors);
        let mut bodies =
            all.map(|(graph, repeats)| Timed::new(&graph, repeats, load)).collect::<Result<Vec<_>, _>>()?;
        // The minimum of both times counts. One is subtracted from the other, and a shared machine is slower at times.
        for _ in 0..if harness.quick { 1 } else { 5 } {
            bodies.iter_mut().try_for_each(|body| body.time(harness))?;
        }
        let beside_s: Vec<f64> = bodies.iter().map(|body| body.step_s - body.kernels_s).collect();
        let each_s = |i: usize| (beside_s[i + 1] - beside_s[i]) / (bodies[i + 1].count - bodies[i].count);
        dispatch_s = dispatch_s.max(each_s(0));
        // One tensor is read and one written.
        buffer_s = buffer_s.max((each_s(2) - dispatch_s) / 2.0);
        let step_s = beside_s[0] - dispatch_s * bodies[0].count - buffer_s * bodies[0].tensors as f64;
        for (family, seconds) in [("dispatch", dispatch_s), ("buffer", buffer_s), ("step", step_s)] {
            harness.add(family, DType::F32, &[1.0], vec![seconds]);
        }
    }
    harness.load = 1;
    Ok(())
}

/// A body in a session, and the minimum times of its kernels and of a step.
struct Timed {
    session: Session,
    steps: Vec<Step>,
    /// Elements of all values.
    elements: HashMap<ValueId, usize>,
    /// Number of tensors that the body reads and writes.
    tensors: usize,
    /// Number of kernels, and repetitions of each of `steps`.
    count: f64,
    repeats: f64,
    kernels_s: f64,
    step_s: f64,
}

impl Timed {
    /// The graph's kernels consist of `repeats` equal sequences.
    fn new(graph: &Graph, repeats: usize, devices: usize) -> Result<Timed, RuntimeError> {
        let programs = programs(graph, devices as u32);
        let body = compile(&programs.programs[0].bodies[0]);
        let mut elements: HashMap<ValueId, usize> =
            body.leaves.iter().map(|l| (l.value, l.bytes as usize / 4)).collect();
        elements.extend(body.steps.iter().flat_map(|step| &step.outputs).map(|o| (o.value, o.elements)));
        let (count, tensors) = (body.steps.len(), body.leaves.len() + body.writes.len());
        // Time one of the equal sequences.
        let steps = body.steps.into_iter().take(count / repeats).collect();
        let session = Session::new(&programs, &Options { record: true, ..Options::default() })?;
        let (count, repeats) = (count as f64, repeats as f64);
        Ok(Timed { session, steps, elements, tensors, count, repeats, kernels_s: f64::INFINITY, step_s: f64::INFINITY })
    }

    fn time(&mut self, harness: &mut Harness) -> Result<(), RuntimeError> {
        let mut kernels_s = 0.0;
        for step in &self.steps {
            let elements = |v: &ValueId| (Class::F32, self.elements.get(v).copied().unwrap_or(0));
            let inputs: Vec<_> = step.inputs.iter().map(elements).collect();
            kernels_s += self.repeats * harness.time(&|| of_step(step, &inputs));
        }
        self.kernels_s = self.kernels_s.min(kernels_s);
        self.step_s = self.step_s.min(self.seconds_of_step(harness)?);
        Ok(())
    }

    /// Mean seconds of a step; each step is issued while the devices run the previous one.
    fn seconds_of_step(&mut self, harness: &mut Harness) -> Result<f64, RuntimeError> {
        let (samples, steps) = if harness.quick { (3, 16) } else { (7, 64) };
        let none = BTreeMap::new();
        let mut taken = Vec::new();
        self.session.begin_step(&none, &BTreeMap::new())?;
        for _ in 0..=samples {
            let start = Instant::now();
            for _ in 0..steps {
                self.session.begin_step(&none, &BTreeMap::new())?;
                self.session.end_step()?;
            }
            taken.push(start.elapsed().as_secs_f64() / f64::from(steps));
        }
        self.session.end_step()?;
        // The first sample warms up.
        Ok(harness.median(taken.split_off(1)))
    }
}

/// Column sums of `tensors` tensors.
fn sums(tensors: usize) -> Graph {
    let mut g = Graph::new("sums");
    for i in 0..tensors {
        let ty = TensorType::new(DType::F32, vec![16, 16]);
        let x = g.emit(Op::Input(Input { name: format!("x{i}"), ty }), &[]);
        let sum = g.reduce(x, Reducer::Sum, &[0]);
        g.outputs.push(sum);
    }
    g
}

/// Products, chains and reductions of small tensors, each dependent on the one before.
fn kernels(rounds: usize) -> Graph {
    const ROWS: u64 = 16;
    let mut g = Graph::new("kernels");
    let mut leaf =
        |name: String, shape: Vec<u64>| g.emit(Op::Input(Input { name, ty: TensorType::new(DType::F32, shape) }), &[]);
    let mut x = leaf("x".to_string(), vec![ROWS, SIDES[0]]);
    let next = |i: usize| SIDES[(i + 1) % SIDES.len()];
    let weights: Vec<ValueId> = (0..SIDES.len()).map(|i| leaf(format!("w{i}"), vec![SIDES[i], next(i)])).collect();
    let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![0] };
    for i in 0..rounds {
        let product = g.emit(Op::DotGeneral(dot.clone()), &[x, weights[i % SIDES.len()]]);
        let bent = g.unary(Unary::Tanh, product);
        let sums = g.reduce(bent, Reducer::Sum, &[0]);
        let sums = g.broadcast(sums, &[ROWS, next(i)], &[1]);
        x = g.add(bent, sums);
    }
    g.outputs = vec![x];
    g
}
