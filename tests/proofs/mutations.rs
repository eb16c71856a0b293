//! Programs with one planted bug each: every way in which a program can be changed without breaking its types.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::{run_mesh, shard};
use altiplano_ir::literal::Literal;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Binary, Compare, Direction, Op, Reducer, Slice};
use altiplano_ir::program::{Body, BufferId, BufferKind, Call, Program, Programs};
use altiplano_ir::reshard::Collective;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// The place of a planted bug.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// A value of a body of a program.
    Value { program: usize, body: usize, value: ValueId },
    /// A buffer that a body reads or writes, and the one that it is confused with.
    Buffer { program: usize, body: usize, buffer: BufferId, other: Option<BufferId> },
    /// A call of a program, or a transfer that it takes part in.
    Schedule { program: usize },
}

/// A planted bug.
pub struct Mutant {
    pub what: &'static str,
    pub place: Place,
    pub programs: Programs,
}

/// All mutants of some programs. At most `most` of each kind and body, spread evenly.
pub fn mutants(programs: &Programs, most: usize, mut each: impl FnMut(Mutant)) {
    for (p, program) in programs.programs.iter().enumerate() {
        for (b, body) in program.bodies.iter().enumerate() {
            let mut of_body = of_values(program, body);
            of_body.extend(of_buffers(program, body));
            let mut kinds: Vec<&'static str> = of_body.iter().map(|m| m.what).collect();
            kinds.sort_unstable();
            kinds.dedup();
            for kind in kinds {
                let of_kind: Vec<&Change> = of_body.iter().filter(|m| m.what == kind).collect();
                let step = of_kind.len().div_ceil(most.max(1));
                for change in of_kind.into_iter().step_by(step) {
                    let mut changed = programs.clone();
                    changed.programs[p].bodies[b] = change.body.clone();
                    let place = match change.at {
                        Ok(value) => Place::Value { program: p, body: b, value },
                        Err((buffer, other)) => Place::Buffer { program: p, body: b, buffer, other },
                    };
                    each(Mutant { what: kind, place, programs: changed });
                }
            }
        }
        of_schedule(programs, p, most, &mut each);
    }
}

/// A changed body.
struct Change {
    what: &'static str,
    at: Result<ValueId, (BufferId, Option<BufferId>)>,
    body: Body,
}

/// Changes of single ops.
fn of_values(program: &Program, body: &Body) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut change = |what: &'static str, at: ValueId, edit: &dyn Fn(&mut Body)| {
        let mut body = body.clone();
        edit(&mut body);
        changes.push(Change { what, at: Ok(at), body });
    };
    let graph = &body.graph;
    for v in graph.values() {
        let node = graph.node(v);
        let with_op = |op: Op| move |body: &mut Body| body.graph.nodes[v.index()].op = op.clone();
        match &node.op {
            Op::Collective(of) => {
                let operand = node.operands[0];
                if graph.ty(operand) == &node.ty && of.collective.communicates() {
                    change("a collective dropped", v, &|body| replace(body, v, operand));
                }
                for (what, collective) in others(&of.collective, &program.mesh) {
                    change(what, v, &with_op(Op::collective(collective, &program.mesh)));
                }
                if let Collective::AllReduce { .. } = &of.collective {
                    let op = node.op.clone();
                    change("a collective doubled", v, &move |body| insert_after(body, v, op.clone()));
                }
            }
            Op::Constant(literal) => {
                if let Some(value) = literal.as_splat().filter(|_| node.ty.dtype.is_float()) {
                    let scaled = Literal::splat(literal.ty.clone(), if value == 0.0 { 1.0 } else { value * 2.0 });
                    change("a wrong scale", v, &with_op(Op::Constant(scaled)));
                } else if let Some(value) = literal.as_splat().filter(|_| node.ty.dtype.is_integer()) {
                    let other = Literal::splat(literal.ty.clone(), value + 1.0);
                    change("a wrong offset", v, &with_op(Op::Constant(other)));
                }
            }
            Op::Slice(slice) => {
                let shape = graph.shape(node.operands[0]);
                for other in (0..shape.len()).filter_map(|d| shifted(slice, d, shape[d])) {
                    change("a shifted slice", v, &with_op(Op::Slice(other)));
                }
            }
            Op::Compare(compare) => {
                let direction = other_direction(compare.direction);
                change("a wrong mask", v, &with_op(Op::Compare(Compare { direction })));
            }
            Op::AxisIndex(index) => {
                for axis in program.mesh.axis_ids().filter(|a| !index.axes.contains(a)) {
                    let other = altiplano_ir::op::AxisIndex { axes: vec![axis], ..index.clone() };
                    change("an index over the wrong axis", v, &with_op(Op::AxisIndex(other)));
                }
            }
            Op::Binary(op) => {
                let other = match op {
                    Binary::Add => Binary::Subtract,
                    Binary::Subtract => Binary::Add,
                    Binary::Multiply if node.ty.dtype.is_float() => Binary::Divide,
                    Binary::Maximum => Binary::Minimum,
                    _ => continue,
                };
                change("another op", v, &with_op(Op::Binary(other)));
                let first = node.operands[0];
                if *op == Binary::Add {
                    change("a summand dropped", v, &|body| replace(body, v, first));
                }
            }
            _ => {}
        }
    }
    changes
}

/// A slice of another place of a dimension.
fn shifted(slice: &Slice, d: usize, size: u64) -> Option<Slice> {
    let mut other = slice.clone();
    if slice.limit[d] < size {
        (other.start[d], other.limit[d]) = (slice.start[d] + 1, slice.limit[d] + 1);
    } else {
        (other.start[d], other.limit[d]) = (slice.start[d].checked_sub(1)?, slice.limit[d] - 1);
    }
    Some(other)
}

/// A comparison that differs from one in few places.
fn other_direction(of: Direction) -> Direction {
    match of {
        Direction::Ge => Direction::Gt,
        Direction::Gt => Direction::Ge,
        Direction::Le => Direction::Lt,
        Direction::Lt => Direction::Le,
        Direction::Eq => Direction::Ne,
        Direction::Ne => Direction::Eq,
    }
}

/// The collectives that could be confused with one.
fn others(of: &Collective, mesh: &Mesh) -> Vec<(&'static str, Collective)> {
    let mut others = Vec::new();
    let n = mesh.product(of.axes());
    for axis in mesh.axis_ids().filter(|&a| !of.axes().contains(&a) && mesh.size(a) == n) {
        let mut other = of.clone();
        *other.axes_mut() = vec![axis];
        others.push(("a collective over the wrong axis", other));
    }
    match of.clone() {
        Collective::AllReduce { axes, reducer: Reducer::Sum } => {
            others.push(("a reduction of the wrong kind", Collective::AllReduce { axes, reducer: Reducer::Max }));
        }
        Collective::AllReduce { axes, reducer: Reducer::Max } => {
            others.push(("a reduction of the wrong kind", Collective::AllReduce { axes, reducer: Reducer::Sum }));
        }
        Collective::ReduceScatter { axes, dim, outer, .. } => {
            others.push(("a reduction dropped", Collective::LocalSlice { axes, dim, outer }));
        }
        Collective::LocalSlice { axes, dim, outer } => {
            let reducer = Reducer::Sum;
            others.push(("a reduction too many", Collective::ReduceScatter { axes, reducer, dim, outer }));
        }
        Collective::KeepFirst { axes, reducer } => {
            others.push(("a sum of copies", Collective::AllReduce { axes, reducer }));
        }
        Collective::Shift { axes, by } => others.push(("a shift too far", Collective::Shift { axes, by: by + 1 })),
        Collective::Halo { axes, dim, low, high, reducer } if low != high => {
            others.push(("a halo of the other side", Collective::Halo { axes, dim, low: high, high: low, reducer }));
        }
        _ => {}
    }
    others
}

/// Uses `by` wherever `value` was used.
fn replace(body: &mut Body, value: ValueId, by: ValueId) {
    let change = |v: &mut ValueId| *v = if *v == value { by } else { *v };
    body.graph.nodes.iter_mut().flat_map(|n| &mut n.operands).for_each(change);
    body.graph.outputs.iter_mut().for_each(change);
    body.writes.iter_mut().for_each(|w| change(&mut w.1));
}

/// Applies a unary op to a value once more.
fn insert_after(body: &mut Body, value: ValueId, op: Op) {
    let moved = |v: &mut ValueId| v.0 += u32::from(v.0 >= value.0);
    let node = altiplano_ir::graph::Node { op, operands: vec![value], ..body.graph.node(value).clone() };
    for at in value.index() + 1..body.graph.len() {
        body.graph.nodes[at].operands.iter_mut().for_each(moved);
    }
    body.graph.nodes.insert(value.index() + 1, node);
    body.graph.outputs.iter_mut().for_each(moved);
    body.writes.iter_mut().for_each(|w| moved(&mut w.1));
    body.reads.iter_mut().filter(|r| r.0 > value).for_each(|r| r.0.0 += 1);
}

/// Changes of what a body reads and writes.
fn of_buffers(program: &Program, body: &Body) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut change = |what: &'static str, at: (BufferId, Option<BufferId>), edit: &dyn Fn(&mut Body)| {
        let mut body = body.clone();
        edit(&mut body);
        body.graph.outputs = body.writes.iter().map(|w| w.1).collect();
        changes.push(Change { what, at: Err(at), body });
    };
    for (i, &(buffer, v)) in body.writes.iter().enumerate() {
        let old = body.reads.iter().find(|r| r.1 == buffer).map(|r| r.0);
        let node = body.graph.node(v);
        match (&program.buffer(buffer).kind, old) {
            (BufferKind::Accumulator { .. }, Some(old)) if node.operands.contains(&old) => {
                if let Some(&added) = node.operands.iter().find(|o| **o != old) {
                    change("a missing accumulation", (buffer, None), &|body| body.writes[i].1 = added);
                    change("a gradient summed twice", (buffer, None), &|body| {
                        body.writes[i].1 = body.graph.add(v, added);
                    });
                }
                change("a gradient that is not added", (buffer, None), &|body| body.writes[i].1 = old);
            }
            (BufferKind::Parameter { .. } | BufferKind::State { .. }, Some(old)) if body.graph.ty(old) == &node.ty => {
                change("a stale weight", (buffer, None), &|body| body.writes[i].1 = old);
            }
            _ => {}
        }
        let same = |(j, (other, w)): (usize, &(BufferId, ValueId))| {
            let types = (program.buffer(*other), program.buffer(buffer));
            (j > i && *w != v && types.0.ty == types.1.ty && types.0.sharding == types.1.sharding).then_some(j)
        };
        if let Some(j) = body.writes.iter().enumerate().find_map(same) {
            let other = Some(body.writes[j].0);
            change("a swapped result", (buffer, other), &|body| {
                let other = body.writes[j].1;
                body.writes[j].1 = v;
                body.writes[i].1 = other;
            });
        }
    }
    for (i, &(_, buffer)) in body.reads.iter().enumerate() {
        let same = |(j, (_, other)): (usize, &(ValueId, BufferId))| {
            let types = (program.buffer(*other), program.buffer(buffer));
            let accumulates = matches!(types.0.kind, BufferKind::Accumulator { .. });
            (j > i && !accumulates && types.0.ty == types.1.ty && types.0.sharding == types.1.sharding).then_some(j)
        };
        if let Some(j) = body.reads.iter().enumerate().find_map(same) {
            let other = Some(body.reads[j].1);
            change("a swapped operand", (buffer, other), &|body| {
                let other = body.reads[j].1;
                body.reads[j].1 = buffer;
                body.reads[i].1 = other;
            });
        }
    }
    changes
}

/// Changes of the order and the instances of calls.
fn of_schedule(programs: &Programs, p: usize, most: usize, each: &mut impl FnMut(Mutant)) {
    let calls = &programs.programs[p].schedule;
    let step = calls.len().div_ceil(most.max(1)).max(1);
    let mut change = |what: &'static str, edit: &dyn Fn(&mut Vec<Call>)| {
        let mut changed = programs.clone();
        edit(&mut changed.programs[p].schedule);
        each(Mutant { what, place: Place::Schedule { program: p }, programs: changed });
    };
    for at in (0..calls.len()).step_by(step) {
        change("a call dropped", &|calls| {
            calls.remove(at);
        });
        change("a call doubled", &|calls| calls.insert(at, calls[at]));
        let of = |call: Call, m: u32| match call {
            Call::Run { body, .. } => Call::Run { body, microbatch: Some(m) },
            Call::Send { transfer, free, .. } => Call::Send { transfer, microbatch: Some(m), free },
            Call::Receive { transfer, .. } => Call::Receive { transfer, microbatch: Some(m) },
        };
        let (Call::Run { microbatch, .. } | Call::Send { microbatch, .. } | Call::Receive { microbatch, .. }) =
            calls[at];
        if let Some(m) = microbatch.filter(|_| programs.num_microbatches > 1) {
            let other = (m + 1) % programs.num_microbatches;
            change("a swapped microbatch", &|calls| calls[at] = of(calls[at], other));
        }
    }
    for t in 0..programs.transfers.len() {
        let (program, source) = programs.transfers[t].source;
        if program as usize != p {
            continue;
        }
        let of = |id: u32| &programs.programs[p].buffers[id as usize];
        let like = |id: &u32| *id != source.0 && of(*id).kind == BufferKind::Value && of(*id).ty == of(source.0).ty;
        if let Some(other) = (0..programs.programs[p].buffers.len() as u32).find(like) {
            let mut changed = programs.clone();
            changed.transfers[t].source.1 = BufferId(other);
            each(Mutant {
                what: "a transfer of the wrong value",
                place: Place::Schedule { program: p },
                programs: changed,
            });
        }
    }
}

/// Pseudo-random numbers in `-1..1`.
fn numbers(seed: &mut u64) -> f64 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn random(ty: &TensorType, seed: &mut u64) -> Tensor {
    let data = (0..ty.elements()).map(|_| {
        let x = numbers(seed);
        if ty.dtype.is_float() { x } else { (x.abs() * 4.0).floor() }
    });
    Tensor::new(ty.clone(), data.collect())
}

/// The results of a body on all devices, with buffers that hold random values in their layouts.
pub fn results(program: &Program, body: &Body) -> Vec<Vec<Tensor>> {
    let graph: &Graph = &body.graph;
    let leaf = |v: ValueId, device: u32| {
        let Some(&(_, id)) = body.reads.iter().find(|r| r.0 == v) else {
            return Tensor::splat(graph.ty(v).clone(), 0.0);
        };
        let buffer = program.buffer(id);
        let mut seed = 1 + u64::from(id.0);
        let whole = random(&buffer.ty, &mut seed);
        let local = shard(&whole, &buffer.sharding, &program.mesh, device);
        if local.ty == *graph.ty(v) { local } else { random(graph.ty(v), &mut (seed + u64::from(device))) }
    };
    let values = run_mesh(graph, &program.mesh, leaf);
    body.writes.iter().map(|(_, v)| values[v.index()].clone()).collect()
}

/// Returns true if two results of a body are equal on all devices, but for rounding.
pub fn equal(a: &[Vec<Tensor>], b: &[Vec<Tensor>]) -> bool {
    let close = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-9 * (1.0 + x.abs() + y.abs()) || x.is_nan() && y.is_nan();
    a.iter().flatten().zip(b.iter().flatten()).all(|(a, b)| a.ty == b.ty && a.data.iter().zip(&b.data).all(close))
}
