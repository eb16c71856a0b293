//! Checks programs and the inputs of steps before anything runs. A plan file is untrusted data: a fault in it must
//! become an error that names its place, not a hang or a panic of a device. The sessions of all kinds of devices use
//! these checks.

use crate::error::RuntimeError;
use crate::host::HostTensor;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{HostCopy, HostRoute, Op};
use altiplano_ir::program::{Body, BufferId, BufferKind, Call, Program, Programs, TransferId};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the first fault of the programs as an error.
pub fn check(programs: &Programs) -> Result<(), RuntimeError> {
    for (index, program) in programs.programs.iter().enumerate() {
        check_buffers(index as u32, program)?;
        check_bodies(index as u32, program)?;
    }
    for (t, transfer) in programs.transfers.iter().enumerate() {
        let fail = |problem| Err(RuntimeError::Transfer { transfer: TransferId(t as u32), problem });
        let end = |(p, b): (u32, BufferId)| programs.programs.get(p as usize)?.buffers.get(b.0 as usize);
        let (Some(source), Some(target)) = (end(transfer.source), end(transfer.target)) else {
            return fail("names a buffer that does not exist");
        };
        if source.ty != target.ty {
            return fail("source and target have different types");
        }
        if source.sharding.is_partial() || target.sharding.is_partial() {
            return fail("a partial value cannot be transferred");
        }
        if source.host || target.host {
            return fail("a value in host memory cannot be sent or received");
        }
    }
    check_calls(programs)?;
    check_schedules(programs)
}

/// Selects the given inputs that the programs use and casts them to the element types of their buffers. Each input must
/// be whole: its batch dimensions are `num_microbatches` times those of the buffer. Scalars only have to be present.
pub(crate) fn checked_inputs<'a>(
    programs: impl IntoIterator<Item = &'a Program>,
    num_microbatches: u32,
    given: &BTreeMap<String, HostTensor>,
    scalars: &BTreeMap<String, f64>,
) -> Result<BTreeMap<String, HostTensor>, RuntimeError> {
    let mut inputs = BTreeMap::new();
    for buffer in programs.into_iter().flat_map(|program| &program.buffers) {
        match &buffer.kind {
            BufferKind::Scalar { name } if !scalars.contains_key(name) => {
                return Err(RuntimeError::MissingScalar { name: name.clone() });
            }
            BufferKind::Input { name } => {
                let tensor = given.get(name).ok_or_else(|| RuntimeError::MissingInput { name: name.clone() })?;
                tensor.check()?;
                let (expected, found) = (&buffer.ty, &tensor.ty);
                let mut dims = expected.shape.iter().zip(&found.shape);
                let fits = expected.rank() == found.rank()
                    && dims.all(|(&e, &f)| f == e || e.checked_mul(num_microbatches.into()) == Some(f));
                let kinds = |d: DType| (d.is_float(), d.is_integer());
                if !fits || kinds(expected.dtype) != kinds(found.dtype) {
                    return Err(RuntimeError::InputType {
                        name: name.clone(),
                        expected: expected.clone(),
                        found: found.clone(),
                        microbatches: num_microbatches,
                    });
                }
                inputs.entry(name.clone()).or_insert_with(|| tensor.cast(expected.dtype));
            }
            _ => {}
        }
    }
    Ok(inputs)
}

/// Fails if programs use features that GPUs lack: steps that overlap, and weights received from parameter servers.
pub(crate) fn expect_plain(programs: &Programs) -> Result<(), RuntimeError> {
    let fail = |program: u32, problem| Err(RuntimeError::Program { program, problem });
    if let Some(program) = programs.programs.iter().position(|program| !program.late.is_empty()) {
        return fail(program as u32, "has calls that overlap with the next step, which GPUs do not support yet");
    }
    let lasts = |&(p, buffer): &(u32, BufferId)| !programs.programs[p as usize].buffer(buffer).kind.is_of_step();
    match programs.transfers.iter().map(|transfer| transfer.target).find(lasts) {
        Some((program, _)) => fail(program, "gets its weights from parameter servers, which GPUs do not support yet"),
        None => Ok(()),
    }
}

/// Combines the losses of a step's microbatches; NaN if no program computes one.
pub(crate) fn step_loss(losses: &[f64], is_mean: bool) -> f64 {
    let sum: f64 = losses.iter().sum();
    match losses.len() {
        0 => f64::NAN,
        n if is_mean => sum / n as f64,
        _ => sum,
    }
}

fn check_buffers(index: u32, program: &Program) -> Result<(), RuntimeError> {
    let devices = program.mesh.axes.iter().try_fold(1u32, |n, a| n.checked_mul(a.size));
    if devices != Some(program.devices.len() as u32) || program.devices.is_empty() {
        return Err(RuntimeError::Program {
            program: index,
            problem: "must have as many devices as its mesh has positions",
        });
    }
    for (b, buffer) in program.buffers.iter().enumerate() {
        let fail = |problem| Err(RuntimeError::Buffer { program: index, buffer: BufferId(b as u32), problem });
        if buffer.extents.as_ref().is_some_and(|extents| extents.padded_shape() != buffer.ty.shape) {
            return fail("has a size that does not match its padding");
        }
        let in_mesh = |a: altiplano_ir::mesh::AxisId| (a.0 as usize) < program.mesh.axes.len();
        let axes = buffer.sharding.split_axes().chain(buffer.sharding.partial.iter().map(|p| p.0));
        if !buffer.ty.check() {
            return fail("is larger than any tensor can be");
        }
        if !axes.into_iter().all(in_mesh) || !buffer.sharding.is_valid(&buffer.ty.shape, &program.mesh) {
            return fail("its sharding does not fit its type and the mesh");
        }
        let scalar = matches!(buffer.kind, BufferKind::Scalar { .. } | BufferKind::Loss);
        if scalar && buffer.ty.elements() != 1 {
            return fail("must be a scalar");
        }
        if buffer.host && !matches!(buffer.kind, BufferKind::State { .. } | BufferKind::Value) {
            return fail("is in host memory, which only optimizer state and values between bodies may use");
        }
    }
    Ok(())
}

fn check_bodies(index: u32, program: &Program) -> Result<(), RuntimeError> {
    for body in &program.bodies {
        let errors = body.graph.verify();
        // A body's results are its writes; its graph need not list them again.
        let serious = |e: &altiplano_ir::graph::GraphError| !matches!(e, altiplano_ir::graph::GraphError::NoOutputs);
        if let Some(error) = errors.into_iter().find(serious) {
            return Err(RuntimeError::Graph { program: index, body: body.name.clone(), error });
        }
        let fail = |value, problem| Err(RuntimeError::Body { program: index, body: body.name.clone(), value, problem });
        let local = |b: BufferId| {
            let buffer = program.buffers.get(b.0 as usize)?;
            Some(buffer.sharding.local_type(&buffer.ty, &program.mesh))
        };
        let mut bound = BTreeSet::new();
        for &(v, b) in &body.reads {
            let is_leaf = body.graph.nodes.get(v.index()).is_some_and(|n| n.op.is_leaf());
            if !is_leaf || !bound.insert(v) {
                return fail(v, "is read from a buffer but is not a leaf, or is bound twice");
            }
            if local(b).as_ref() != Some(body.graph.ty(v)) {
                return fail(v, "has another type than the local part of its buffer");
            }
        }
        let mut written = BTreeSet::new();
        for &(b, v) in &body.writes {
            if v.index() >= body.graph.len() {
                return fail(v, "is written but not defined");
            }
            if local(b).as_ref() != Some(body.graph.ty(v)) {
                return fail(v, "has another type than the local part of its buffer");
            }
            if !written.insert(b) {
                return fail(v, "goes to a buffer that the body writes twice");
            }
        }
        for v in body.graph.values() {
            match &body.graph.node(v).op {
                op if op.is_leaf() && !bound.contains(&v) => return fail(v, "is a leaf that no buffer is bound to"),
                Op::Composite(_) => return fail(v, "is a composite; programs must be expanded"),
                Op::Collective(op) if op.mesh != program.mesh => return fail(v, "is on another mesh than the program"),
                Op::AxisIndex(op) if op.mesh != program.mesh => return fail(v, "is on another mesh than the program"),
                _ => {}
            }
        }
        check_host_copies(program, body).or_else(|(value, problem)| fail(value, problem))?;
        if let Some(&b) = body.frees.iter().find(|b| b.0 as usize >= program.buffers.len()) {
            return Err(RuntimeError::Buffer { program: index, buffer: b, problem: "is freed but does not exist" });
        }
        let lasting = |b: &&BufferId| !program.buffer(**b).kind.is_of_step();
        if let Some(&b) = body.frees.iter().find(lasting) {
            return Err(RuntimeError::Buffer {
                program: index,
                buffer: b,
                problem: "lives for the whole run or step, but is freed",
            });
        }
    }
    Ok(())
}

/// Fails if anything but a copy touches a value in host memory.
fn check_host_copies(program: &Program, body: &Body) -> Result<(), (ValueId, &'static str)> {
    let of_host: BTreeMap<ValueId, bool> = body.reads.iter().map(|&(v, b)| (v, program.buffer(b).host)).collect();
    let in_host = |v: ValueId| of_host.get(&v).copied().unwrap_or_else(|| body.graph.node(v).op.stores_in_host());
    for v in body.graph.values() {
        let node = body.graph.node(v);
        for (position, &operand) in node.operands.iter().enumerate() {
            match (&node.op, position) {
                (Op::HostCopy(_), 1) => {}
                (Op::HostCopy(HostCopy { route: HostRoute::Load }), _) if of_host.get(&operand) != Some(&true) => {
                    return Err((v, "is loaded from a buffer outside host memory"));
                }
                (Op::HostCopy(HostCopy { route: HostRoute::Load }), _) => {}
                _ if in_host(operand) => return Err((operand, "is in host memory, which only copies may read")),
                _ => {}
            }
        }
    }
    for &(b, v) in &body.writes {
        if program.buffer(b).host != body.graph.node(v).op.stores_in_host() {
            return Err((v, "is in another memory than the buffer to which it is written"));
        }
    }
    Ok(())
}

/// Checks that each call of the schedules names bodies, transfers and microbatches of its program.
fn check_calls(programs: &Programs) -> Result<(), RuntimeError> {
    for (p, program) in programs.programs.iter().enumerate() {
        for (c, call) in program.schedule.iter().chain(&program.flush).enumerate() {
            let fail = |problem| Err(RuntimeError::Call { program: p as u32, call: c, problem });
            if c >= program.schedule.len() && matches!(call, Call::Run { .. }) {
                return fail("runs a body in a flush, which may only send and receive");
            }
            let transfer = |id: TransferId| programs.transfers.get(id.0 as usize);
            let microbatch = match *call {
                Call::Run { body, .. } if body as usize >= program.bodies.len() => {
                    return fail("runs a body that does not exist");
                }
                Call::Send { transfer: id, .. } if transfer(id).is_none_or(|t| t.source.0 as usize != p) => {
                    return fail("sends a transfer that is not from this program");
                }
                Call::Receive { transfer: id, .. } if transfer(id).is_none_or(|t| t.target.0 as usize != p) => {
                    return fail("receives a transfer that is not to this program");
                }
                Call::Run { microbatch, .. } | Call::Send { microbatch, .. } | Call::Receive { microbatch, .. } => {
                    microbatch
                }
            };
            if microbatch.is_some_and(|m| m >= programs.num_microbatches) {
                return fail("names a microbatch beyond the last");
            }
        }
    }
    Ok(())
}

/// Simulates all schedules together: each program advances until it waits for a message that was not sent.
fn check_schedules(programs: &Programs) -> Result<(), RuntimeError> {
    for (p, program) in programs.programs.iter().enumerate() {
        let rises = program.late.windows(2).all(|w| w[0] <= w[1]);
        let counted = program.late.last().is_none_or(|&last| last as usize <= program.num_prompt());
        if program.late.len() > program.schedule.len() || !rises || !counted {
            let problem = "has late calls that are out of order among those of the next step";
            return Err(RuntimeError::Program { program: p as u32, problem });
        }
    }
    // Two steps suffice to show every wait between overlapping steps.
    let overlap = programs.programs.iter().any(Program::runs_ahead);
    let run = |program: &Program| -> Vec<usize> {
        let (prompt, end) = (program.num_prompt(), program.schedule.len());
        let second = program.turns().map(|(position, _)| position).take(if overlap { usize::MAX } else { 0 });
        (0..prompt).chain(second).chain(prompt..end + program.flush.len()).collect()
    };
    let runs: Vec<Vec<usize>> = programs.programs.iter().map(run).collect();
    let mut at = vec![0; runs.len()];
    let mut sent: BTreeMap<(TransferId, Option<u32>), u32> = BTreeMap::new();
    loop {
        let mut moved = false;
        for (p, program) in programs.programs.iter().enumerate() {
            while let Some(&position) = runs[p].get(at[p]) {
                // Calls of a flush are numbered after those of the schedule.
                let end = program.schedule.len();
                let call = program.schedule.get(position).or_else(|| program.flush.get(position - end));
                let Some(call) = call else { break };
                match *call {
                    Call::Send { transfer, microbatch, .. } => *sent.entry((transfer, microbatch)).or_default() += 1,
                    Call::Receive { transfer, microbatch } => match sent.get_mut(&(transfer, microbatch)) {
                        Some(waiting) if *waiting > 0 => *waiting -= 1,
                        _ => break,
                    },
                    Call::Run { .. } => {}
                }
                at[p] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match (0..runs.len()).find(|&p| at[p] < runs[p].len()) {
        Some(p) => Err(RuntimeError::Deadlock { program: p as u32, call: runs[p][at[p]] }),
        None => Ok(()),
    }
}
