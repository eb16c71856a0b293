//! Describes the work of a compiled body for time estimates: its kernel calls in order, each as terms that a measured
//! profile can price. Outside of bodies, a device also cuts inputs and zeroes accumulators, which counts as work too.

use crate::compile::compile;
use crate::element::Class;
use crate::kernel::{bitcast, rows};
use crate::step::{Kernel, Step};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{Body, BufferKind, Phase, Program};
use altiplano_ir::reshard::Collective;
use altiplano_ir::work::{Called, Term, Work};
use std::collections::BTreeMap;

/// Number of threads of each of `devices` devices on a machine with `cores` cores.
pub fn threads_of_device(cores: usize, devices: usize) -> usize {
    (cores / devices.max(1)).max(1)
}

/// The kernel calls of a body, in order, on a device with `threads` threads.
pub fn body_work(body: &Body, threads: usize) -> Vec<Called> {
    let compiled = compile(body);
    let mut bytes: BTreeMap<ValueId, u64> = compiled.leaves.iter().map(|l| (l.value, l.bytes)).collect();
    let mut calls = Vec::with_capacity(compiled.steps.len());
    for step in &compiled.steps {
        bytes.extend(step.outputs.iter().map(|o| (o.value, o.bytes)));
        let reads = step.inputs.iter().map(|v| (*v, bytes.get(v).copied().unwrap_or(0)));
        let nodes = if step.members.is_empty() { vec![step.node] } else { step.members.clone() };
        calls.push(Called {
            nodes,
            reads: reads.collect(),
            writes: step.outputs.iter().map(|o| (o.value, o.bytes)).collect(),
            work: step_work(step, threads),
        });
    }
    calls
}

/// The work of a device outside of bodies, once per step or before each microbatch's forward body. It zeroes
/// accumulators, cuts inputs out of the batch, looks up the buffers that bodies read, and stores those that they write.
pub fn preparation(program: &Program, stage: u32, each_microbatch: bool) -> Work {
    let mut work = Work::new(1);
    let forward = program.bodies.iter().find(|b| b.stage == stage && b.phase == Phase::Forward);
    let is_read = |b: u32| forward.is_some_and(|f| f.reads.iter().any(|r| r.1.0 == b));
    for (b, buffer) in (0u32..).zip(&program.buffers).filter(|(_, buffer)| buffer.stage == stage) {
        let elements: u64 = buffer.sharding.local_shape(&program.mesh).iter().product();
        let bytes = elements as f64 * Class::of(buffer.ty.dtype).bytes() as f64;
        match buffer.kind {
            BufferKind::Accumulator { .. } if !each_microbatch => work.once("fill", DType::F32, bytes),
            BufferKind::Input { .. } if each_microbatch && is_read(b) => work.once("copy", DType::F32, bytes),
            _ => continue,
        }
        work.once("dispatch", DType::F32, 1.0);
    }
    let tensors = |body: &Body| (body.reads.len() + body.writes.len()) as f64;
    let bodies = program.bodies.iter().filter(|b| b.stage == stage && b.phase.is_of_microbatch() == each_microbatch);
    work.add(Term { times: bodies.map(tensors).sum(), ..Term::once("buffer", DType::F32, [1.0]) });
    // A step begins once for all stages of a device.
    if !each_microbatch && program.bodies.first().is_some_and(|b| b.stage == stage) {
        work.once("step", DType::F32, 1.0);
    }
    work
}

fn step_work(step: &Step, threads: usize) -> Work {
    let output = step.outputs.first();
    let class = output.map_or(Class::F32, |o| o.class());
    let (elements, bytes) = output.map_or((0.0, 0.0), |o| (o.elements as f64, o.bytes as f64));
    let spread_over = |row: usize, visits: usize| rows::parts(elements as usize, row, visits, threads) as u32;
    let mut work = Work::new(1);
    match &step.kernel {
        Kernel::Chain(chain) => work = chain.work(threads),
        Kernel::Copy(copy) => work = copy.work(class.bytes(), threads),
        Kernel::Dot(dot) => work = dot.work(threads),
        Kernel::Convolution(conv) => work = conv.work(threads),
        Kernel::ReduceWindow { pooling, .. } => work = pooling.work("reduce_window", threads),
        Kernel::SelectAndScatter { pooling, .. } => {
            work = pooling.work("select_and_scatter", threads);
            work.once("fill", DType::F32, bytes);
        }
        Kernel::Reduce(reduction) => work = reduction.work(threads),
        Kernel::Concatenate(copies) => {
            for term in copies.iter().flat_map(|c| c.work(class.bytes(), 1).terms) {
                work.add(term);
            }
        }
        Kernel::Pad(copy) => {
            work = copy.work(class.bytes(), 1);
            work.once("fill", DType::F32, bytes);
        }
        Kernel::Gather { lookup, .. } => work = lookup.gather_work(class),
        Kernel::ScatterAdd { lookup, dtype, .. } => {
            work = lookup.scatter_work(*dtype);
            work.once("fill", DType::F32, bytes);
        }
        Kernel::Scatter { lookup, dtype, .. } => {
            work = lookup.scatter_work(*dtype);
            if step.in_place.is_empty() {
                work.once("copy", DType::F32, bytes);
            }
        }
        Kernel::GroupedDot(grouped) => work = grouped.dot_work(threads),
        Kernel::GroupedOuter(grouped) => work = grouped.outer_work(threads),
        Kernel::Fill { .. } | Kernel::AxisIndex { .. } => work.once("fill", DType::F32, bytes),
        Kernel::Dense(_) => work.once("copy", DType::F32, bytes),
        Kernel::Iota(_) => work.once("iota", class.dtype(), elements),
        Kernel::Bitcast(_) => {
            work.parts = spread_over(bitcast::PART, 1);
            work.once("bits", DType::F32, elements);
        }
        Kernel::Reverse(reversal) => {
            work.parts = spread_over(reversal.row(), 1);
            work.once("copy_strided", class.dtype(), elements);
        }
        Kernel::Cumulative(scan) => {
            work.parts = spread_over(scan.row, 1);
            work.once("cumulative", class.dtype(), elements);
        }
        Kernel::ArgSort(order) => {
            work.parts = spread_over(order.row, order.visits());
            // The number of comparisons is that of the elements times the logarithm of a row.
            work.once("argsort", DType::F32, elements * (order.row as f64).log2().max(1.0));
        }
        Kernel::Collective { collective, shape, group_size, .. } => match collective {
            Collective::LocalSlice { .. } => work.once("copy", DType::F32, bytes),
            Collective::KeepFirst { .. } if step.in_place.is_empty() => work.once("copy", DType::F32, bytes),
            Collective::KeepFirst { .. } => work.once("fill", DType::F32, bytes),
            _ if *group_size < 2 => {}
            _ => {
                let operand = shape.iter().product::<usize>() as f64 * class.bytes() as f64;
                // The cost of a move does not depend on the element type.
                let term = Term::once(collective.name(), DType::F32, [operand.max(bytes)]);
                work.add(Term { threads: *group_size as u32, ..term });
            }
        },
    }
    let parts = work.parts as f64;
    work.terms.iter_mut().for_each(|t| t.times /= parts);
    if work.parts > 1 {
        work.once("fork", DType::F32, parts);
    }
    work.once("dispatch", DType::F32, 1.0);
    work
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::graph::Graph;
    use altiplano_ir::op::{DotGeneral, Op, Reduce, Reducer, Unary};
    use altiplano_ir::optimizer::leaf;
    use altiplano_ir::program::BufferId;
    use altiplano_ir::types::TensorType;

    /// The terms, as text, of all calls of a body that reads `leaves` and writes `result`.
    fn terms(graph: Graph, leaves: &[ValueId], result: ValueId, threads: usize) -> Vec<String> {
        let reads = (0..).map(BufferId).zip(leaves).map(|(b, &v)| (v, b)).collect();
        let writes = vec![(BufferId(100), result)];
        let body =
            Body { name: String::new(), stage: 0, phase: Phase::Forward, graph, reads, writes, frees: Vec::new() };
        let calls = body_work(&body, threads);
        let text = |t: &Term| format!("{} x {} {} {:?} on {}", t.times, t.family, t.dtype, t.size, t.threads);
        calls.iter().flat_map(|c| c.work.terms.iter().map(text).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn fused_ops_are_one_call() {
        let mut g = Graph::new("g");
        let x = leaf(&mut g, "x", TensorType::new(DType::F32, vec![16, 64]));
        let e = g.push(Op::Unary(Unary::Exponential), &[x]).unwrap();
        let n = g.push(Op::Unary(Unary::Negate), &[e]).unwrap();
        let s = g.push(Op::Reduce(Reduce { reducer: Reducer::Sum, dims: vec![1] }), &[n]).unwrap();
        let found = terms(g, &[x], s, 1);
        let expected = [
            "1 x exponential f32 [1024.0] on 1",
            "1 x negate f32 [1024.0] on 1",
            "1 x reduce_row f32 [1024.0] on 1",
            "1 x row f32 [16.0] on 1",
            "1 x load f32 [4096.0] on 1",
            "1 x dispatch f32 [1.0] on 1",
        ];
        assert!(expected.iter().all(|e| found.iter().any(|f| f == e)), "{found:#?}");
        assert_eq!(found.iter().filter(|f| f.contains("dispatch")).count(), 1);
        assert!(!found.iter().any(|f| f.contains("store")), "what stays in registers is not stored: {found:#?}");
    }

    #[test]
    fn products_say_how_their_operands_lie_and_who_shares_them() {
        for (lhs, rhs, family) in [(1, 0, "matmul_nn"), (1, 1, "matmul_nt"), (0, 0, "matmul_tn"), (0, 1, "matmul_tt")] {
            let mut g = Graph::new("g");
            let shape = |contract: usize, inner: u64, outer: u64| {
                TensorType::new(DType::F32, if contract == 1 { vec![outer, inner] } else { vec![inner, outer] })
            };
            let (a, b) = (leaf(&mut g, "a", shape(lhs, 512, 32)), leaf(&mut g, "b", shape(rhs, 512, 256)));
            let (lhs_contract, rhs_contract) = (vec![lhs], vec![rhs]);
            let dot = DotGeneral { lhs_batch: Vec::new(), rhs_batch: Vec::new(), lhs_contract, rhs_contract };
            let v = g.push(Op::DotGeneral(dot), &[a, b]).unwrap();
            let found = terms(g, &[a, b], v, 2);
            assert_eq!(found[0], format!("1 x {family} f32 [32.0, 256.0, 512.0] on 2"));
        }
    }

    #[test]
    fn half_of_it_each_on_two_threads() {
        let mut g = Graph::new("g");
        let x = leaf(&mut g, "x", TensorType::new(DType::F32, vec![1 << 18]));
        let e = g.push(Op::Unary(Unary::Tanh), &[x]).unwrap();
        let found = terms(g, &[x], e, 2);
        assert!(found.contains(&"0.5 x tanh f32 [262144.0] on 1".to_string()), "{found:#?}");
        assert!(found.contains(&"1 x fork f32 [2.0] on 1".to_string()), "{found:#?}");
    }
}
