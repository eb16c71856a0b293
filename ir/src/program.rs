//! The programs that devices execute: one SPMD program per submesh, and the transfers between them.
//!
//! A program has bodies, buffers and a schedule of calls. Bodies are local graphs that every device of the submesh runs
//! with its own coordinates. Buffers connect bodies to each other and to the outside. Each body is written once, for
//! any number of devices and microbatches, so a program for 16,384 devices is not larger than one for 16.
//!
//! A schedule has each call of a step once; the last of them may run among those of the next step ([`Program::late`]). Inputs, values,
//! scalars, sums of gradients and the weights that a step began with are kept by step. One rule, [`Program::turns`], serves executors,
//! checks and the planner's memory. A flush runs the late calls alone, and then those that update copies of weights
//! ([`Program::flush`]).
//!
//! Stages that share devices are one program, which sends to itself as stages send to each other. A buffer may be in the memory of its
//! device's host ([`Buffer::host`]). Bodies copy it by ops of their graphs, so storage, time and races follow as for any op.

use crate::graph::{Graph, ValueId};
use crate::mesh::Mesh;
use crate::padding::Extents;
use crate::sharding::Sharding;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A buffer of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BufferId(pub u32);

/// Stands for a parameter's name in buffers of sums over all parameters: the [`BufferKind::State`] that a step leaves
/// for the host, and the [`BufferKind::Accumulator`] that collects a stage's share. No parameter has this name.
pub const ALL_PARAMETERS: &str = "(all parameters)";

/// Slot of [`ALL_PARAMETERS`]: the squared norm of the step's gradient, before clipping.
pub const GRADIENT_SQUARES: &str = "gradient squares";
/// Slot of [`ALL_PARAMETERS`]: the variance of the gradient over batches, summed over elements, as estimated from parts
/// of the batch.
pub const GRADIENT_VARIANCE: &str = "gradient variance";
/// Slot of [`ALL_PARAMETERS`]: the squared norm of the gradients that contribute to [`GRADIENT_VARIANCE`], those seen
/// in parts.
pub const MEASURED_SQUARES: &str = "measured squares";

/// Slot of [`ALL_PARAMETERS`]: the number of non-finite elements in the step's gradient, if the plan scales the loss.
/// If there are any, the step was skipped.
pub const OVERFLOWS: &str = "gradients not finite";

/// A transfer of [`Programs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TransferId(pub u32);

/// The purpose of a buffer. It decides how long the buffer lives and who fills it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferKind {
    /// The weights that bodies compute with. Lives for the whole run. The host loads it. If another program updates the
    /// parameter, this one receives the new values from there.
    Parameter { name: String },
    /// Optimizer state of a parameter: `momentum`, `m`, `v`, or `master` (the f32 copy of a half-precision parameter).
    /// Lives for the whole run. `master` starts as the parameter's value, all others start at zero.
    State { parameter: String, slot: String },
    /// Sum over the microbatches of a step of a parameter's gradient, or of a value of [`Phase::Totals`] (with the name
    /// [`ALL_PARAMETERS`]). It is zero before the first microbatch. It keeps its value until the next step adds its
    /// own, or the step after that ([`Overlap::doubles_accumulators`]).
    Accumulator { parameter: String },
    /// An input of the model, with one instance per microbatch: the microbatch's rows in each batch dimension, or the
    /// whole input if it has no batch dimension.
    Input { name: String },
    /// A scalar that each step sets anew: `learning_rate`, or `step` (counted from 1).
    Scalar { name: String },
    /// The loss of one microbatch, replicated over the submesh. The executor collects it.
    Loss,
    /// One microbatch's part of an output of a model that is run rather than trained. `index` is its position among the
    /// outputs. The host collects it.
    Output { index: u32 },
    /// A value between bodies or transfers, with one instance per microbatch, or per step if the writing call has no
    /// microbatch. Lives from its writer to the call that frees it.
    Value,
}

impl BufferKind {
    /// Returns true if instances belong to a step, most of them to one microbatch, and do not outlive it.
    pub fn is_of_step(&self) -> bool {
        matches!(self, BufferKind::Value | BufferKind::Input { .. } | BufferKind::Loss | BufferKind::Output { .. })
    }
}

/// A buffer, with its global type and its layout over the program's mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    pub name: String,
    /// The plan's stage that the buffer belongs to.
    pub stage: u32,
    pub kind: BufferKind,
    pub ty: TensorType,
    pub sharding: Sharding,
    /// The positions of the model's own elements, if the buffer is padded with zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extents: Option<Extents>,
    /// True if the buffer is in host memory, where only copies ([`crate::op::HostCopy`]) read and write it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub host: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl Buffer {
    /// The type of the buffer without padding.
    pub fn own_type(&self) -> TensorType {
        self.extents.as_ref().map_or_else(|| self.ty.clone(), |extents| self.ty.with_shape(extents.shape()))
    }
}

/// The part of a training step that a body computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Adds a microbatch's share of values that are summed over all microbatches ([`crate::op::Microbatches`]). Called
    /// for every microbatch before the first forward body.
    Totals,
    Forward,
    /// All gradients. If the schedule computes weight gradients apart, only the gradients that earlier stages wait for.
    Backward,
    /// The weight gradients, if the schedule computes them apart.
    Weights,
    /// Reduces gradients once per step, before stages exchange them.
    Reduce,
    /// A stage's share of sums over all gradients, before stages exchange these sums.
    Norm,
    Update,
}

impl Phase {
    /// `forward`, `backward` and so on.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Totals => "totals",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Weights => "weights",
            Phase::Reduce => "reduce",
            Phase::Norm => "norm",
            Phase::Update => "update",
        }
    }
}

/// A straight-line local graph. Its leaves are [`crate::op::Op::Input`] nodes, and `reads` binds each to a buffer.
/// Collectives and `axis_index` are ops of the graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Body {
    pub name: String,
    /// The plan's stage that the body belongs to.
    pub stage: u32,
    pub phase: Phase,
    pub graph: Graph,
    /// The leaves of the graph, each with the buffer whose local part it reads.
    pub reads: Vec<(ValueId, BufferId)>,
    /// The buffers that the body writes, each with its value. A buffer may be both read and written, which replaces its
    /// value.
    pub writes: Vec<(BufferId, ValueId)>,
    /// The per-microbatch buffers whose instance is not needed after this call.
    pub frees: Vec<BufferId>,
}

/// One entry of a schedule. `microbatch` is `None` for calls that happen once per step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    Run {
        body: u32,
        microbatch: Option<u32>,
    },
    /// Never waits for the receiver. `free` means that the buffer instance is not needed afterwards.
    Send {
        transfer: TransferId,
        microbatch: Option<u32>,
        free: bool,
    },
    /// Waits for the value. The target buffer instance lives from here.
    Receive {
        transfer: TransferId,
        microbatch: Option<u32>,
    },
}

/// The program of one submesh, with one stage or all stages that share its devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The global ids of the devices, in mesh order (row major).
    pub devices: Vec<u32>,
    pub mesh: Mesh,
    pub buffers: Vec<Buffer>,
    pub bodies: Vec<Body>,
    /// The calls of one step, in order.
    pub schedule: Vec<Call>,
    /// The last calls of a step that overlap the next step. Each entry is the number of calls of the next step that run
    /// first, and entries never decrease. Empty if a step ends before the next begins. See [`Program::turns`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late: Vec<u32>,
    /// The calls after the last step, before anything reads the weights. They bring this program's copy of the weights
    /// up to date with the updates of other programs. If any program has such calls, devices begin a step without
    /// waiting for others to end the previous one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flush: Vec<Call>,
    /// True if GPUs run the products around large values as one kernel ([`crate::plan::Execution::fused_attention`]).
    pub fused_attention: bool,
}

/// The state that a device holds for two steps at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Values that belong to a step from its beginning, such as scalars.
    pub steps: bool,
    /// Parameters, both as a step began with them and as updated since.
    pub stashes_parameters: bool,
    /// Gradient sums: a step adds to its own before those of the previous step have been used.
    pub doubles_accumulators: bool,
}

impl Phase {
    /// Returns true if the body works on one microbatch with the weights of its step, rather than on the results of a
    /// whole step.
    pub fn is_of_microbatch(self) -> bool {
        matches!(self, Phase::Totals | Phase::Forward | Phase::Backward | Phase::Weights)
    }
}

impl Program {
    /// Returns true if a device may begin a step before all others have ended the previous one. Those then end at a
    /// flush.
    pub fn runs_ahead(&self) -> bool {
        !self.late.is_empty() || !self.flush.is_empty()
    }

    /// Returns true if some body writes the buffer.
    pub fn writes(&self, buffer: BufferId) -> bool {
        self.bodies.iter().any(|body| body.writes.iter().any(|(written, _)| *written == buffer))
    }

    /// The number of the schedule's calls that run before the next step begins.
    pub fn num_prompt(&self) -> usize {
        self.schedule.len() - self.late.len().min(self.schedule.len())
    }

    /// The calls that a device runs between the beginning of one step and that of the next. Each is a position in the
    /// schedule, and true if the call belongs to the previous step. The first step has no calls of a previous one.
    /// After the last step, its remaining calls run alone.
    ///
    /// Calls of different steps share parameters and optimizer state. Each step has its own inputs, scalars, values and
    /// gradient sums. Bodies that work on microbatches read the parameters as they were when their step began, even if
    /// an update has changed them since. All other bodies read and write the newest parameters.
    pub fn turns(&self) -> impl Iterator<Item = (usize, bool)> + '_ {
        let prompt = self.num_prompt();
        let (mut now, mut before) = (0, 0);
        std::iter::from_fn(move || {
            if self.late.get(before).is_some_and(|&after| after as usize <= now || now == prompt) {
                before += 1;
                return Some((prompt + before - 1, true));
            }
            (now < prompt).then(|| {
                now += 1;
                (now - 1, false)
            })
        })
    }

    /// The state that is held for two steps at once. `bodies` may come from another program of the same form.
    pub fn overlap(&self, bodies: &[Body]) -> Overlap {
        let mut overlap = Overlap { steps: !self.late.is_empty(), ..Overlap::default() };
        let (mut updated, mut added) = (false, false);
        for (position, late) in self.turns().take(if overlap.steps { usize::MAX } else { 0 }) {
            let Call::Run { body, .. } = self.schedule[position] else { continue };
            let Some(phase) = bodies.get(body as usize).map(|body| body.phase) else { continue };
            overlap.stashes_parameters |= phase.is_of_microbatch() && (late || updated);
            overlap.doubles_accumulators |= !phase.is_of_microbatch() && late && added;
            updated |= late && phase == Phase::Update;
            added |= !late && matches!(phase, Phase::Backward | Phase::Weights);
        }
        overlap
    }

    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The position of a stage's body for a phase.
    pub fn body_of(&self, stage: u32, phase: Phase) -> Option<u32> {
        self.bodies.iter().position(|b| (b.stage, b.phase) == (stage, phase)).map(|b| b as u32)
    }

    /// The local bytes of one buffer instance on one device.
    pub fn local_bytes(&self, id: BufferId) -> u64 {
        let buffer = self.buffer(id);
        buffer.sharding.local_bytes(&buffer.ty, &self.mesh)
    }
}

/// A value that moves from one stage to another: the same global tensor in two layouts. If both stages are on the same
/// devices, a program sends it to itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    pub source: (u32, BufferId),
    pub target: (u32, BufferId),
}

/// All programs of a plan, and the transfers between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Programs {
    pub programs: Vec<Program>,
    pub transfers: Vec<Transfer>,
    pub num_microbatches: u32,
    /// The number of samples in one microbatch (global, not per device). 0 if the graph has no batch.
    pub microbatch: u64,
    /// True if the loss of a step is the mean of its microbatches' losses, false if it is their sum.
    pub loss_is_mean: bool,
}

/// One device-to-device part of a transfer. The sender's local elements at the cross product of `source_indices` go, in
/// row-major order, to the receiver's elements at the cross product of `target_indices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Positions within the source and the target submesh.
    pub source: u32,
    pub target: u32,
    /// The local indices taken, per dimension.
    pub source_indices: Vec<Vec<u64>>,
    pub target_indices: Vec<Vec<u64>>,
}

impl Programs {
    /// The source and the target stage of a transfer.
    pub fn stages_of(&self, transfer: TransferId) -> (u32, u32) {
        let Transfer { source, target } = &self.transfers[transfer.0 as usize];
        let stage = |(program, buffer): (u32, BufferId)| self.programs[program as usize].buffer(buffer).stage;
        (stage(*source), stage(*target))
    }

    /// The messages of a transfer. They depend only on the two layouts, and the simulator and every executor use them.
    /// If several source devices hold the same part, receivers are spread over them.
    pub fn messages(&self, transfer: TransferId) -> Vec<Message> {
        let Transfer { source, target } = &self.transfers[transfer.0 as usize];
        let (from, to) = (&self.programs[source.0 as usize], &self.programs[target.0 as usize]);
        messages(&from.buffer(source.1).sharding, &from.mesh, &to.buffer(target.1).sharding, &to.mesh)
    }
}

/// The messages between two layouts (see [`Programs::messages`]). Neither sharding may be partial.
pub fn messages(from: &Sharding, from_mesh: &Mesh, to: &Sharding, to_mesh: &Mesh) -> Vec<Message> {
    // Group the source devices by the part that they hold: distinct parts, each with its replicas.
    let mut parts: Vec<(Vec<Vec<u64>>, Vec<u32>)> = Vec::new();
    for device in 0..from_mesh.num_devices() {
        let coordinates = from_mesh.coordinates(device);
        let held: Vec<Vec<u64>> = from.dims.iter().map(|d| d.global_indices(from_mesh, &coordinates)).collect();
        match parts.iter_mut().find(|(h, _)| *h == held) {
            Some((_, replicas)) => replicas.push(device),
            None => parts.push((held, vec![device])),
        }
    }
    let mut messages = Vec::new();
    for device in 0..to_mesh.num_devices() {
        let coordinates = to_mesh.coordinates(device);
        let wanted: Vec<Vec<u64>> = to.dims.iter().map(|d| d.global_indices(to_mesh, &coordinates)).collect();
        for (held, replicas) in &parts {
            let shared: Vec<(Vec<u64>, Vec<u64>)> = held.iter().zip(&wanted).map(|(h, w)| common(h, w)).collect();
            if shared.iter().any(|(s, _)| s.is_empty()) {
                continue;
            }
            let (source_indices, target_indices) = shared.into_iter().unzip();
            let source = replicas[device as usize % replicas.len()];
            messages.push(Message { source, target: device, source_indices, target_indices });
        }
    }
    messages
}

/// The positions, in two increasing lists, of the values that they share.
fn common(a: &[u64], b: &[u64]) -> (Vec<u64>, Vec<u64>) {
    let (mut i, mut j) = (0, 0);
    let (mut in_a, mut in_b) = (Vec::new(), Vec::new());
    while i < a.len() && j < b.len() {
        match a[i].cmp(&b[j]) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                in_a.push(i as u64);
                in_b.push(j as u64);
                i += 1;
                j += 1;
            }
        }
    }
    (in_a, in_b)
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b{}", self.0)
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}
