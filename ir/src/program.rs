//! What devices execute: per submesh one SPMD program, and the transfers between them.
//!
//! A program has bodies (local graphs, run by every device of the submesh with its own coordinates), the buffers
//! through which bodies talk to each other and to the outside, and a schedule of calls. Bodies are written once
//! whatever the number of devices and microbatches, so a program for 16,384 devices is not larger than one for 16.
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

/// What sums over all parameters are called where a parameter's name is asked for: the [`BufferKind::State`] that a step leaves
/// them in for the host, and the [`BufferKind::Accumulator`] in which a stage collects its share. No parameter is called so.
pub const ALL_PARAMETERS: &str = "(all parameters)";

/// Slots of [`ALL_PARAMETERS`]: the square of the norm of the step's gradient, before it is clipped;
pub const GRADIENT_SQUARES: &str = "gradient squares";
/// the variance of that gradient over batches, summed over elements, as parts of the batch tell of it;
pub const GRADIENT_VARIANCE: &str = "gradient variance";
/// and the square of the norm of the gradients of which that is, those seen in parts.
pub const MEASURED_SQUARES: &str = "measured squares";

/// How many elements of the step's gradient were not finite, where the plan scales the loss; then the step was skipped.
pub const OVERFLOWS: &str = "gradients not finite";

/// A transfer of [`Programs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TransferId(pub u32);

/// What a buffer is for, which decides when it lives and who fills it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferKind {
    /// The trained weights that bodies compute with. Lives for the whole run; loaded from outside, and where another program
    /// updates them received from there.
    Parameter { name: String },
    /// Optimizer state of a parameter: `momentum`, `m`, `v`, or `master` (the f32 copy of a half-precision
    /// parameter, which starts as the parameter's value; all others start at zero). Lives for the whole run.
    State { parameter: String, slot: String },
    /// Sum of a parameter's gradient over the microbatches of a step, or of a value of [`Phase::Totals`] ([`ALL_PARAMETERS`]). Zero before the first of them; keeps its value until the
    /// next step, or the one after it ([`Overlap::doubles_accumulators`]), adds its own.
    Accumulator { parameter: String },
    /// An input of the model, one instance per microbatch: the microbatch's rows in each batch dimension,
    /// or all of it where the input has no batch dimension.
    Input { name: String },
    /// A scalar given anew for each step: `learning_rate`, or `step` (counted from 1).
    Scalar { name: String },
    /// The loss of one microbatch, replicated over the submesh; the executor collects it.
    Loss,
    /// One microbatch's part of a result of a model that is run and not trained, by its position among the results. The
    /// host takes it away, as it brings inputs.
    Output { index: u32 },
    /// A value between bodies or transfers, one instance per microbatch (per step where the writing call has no
    /// microbatch). Lives from its writer to the call that frees it.
    Value,
}

impl BufferKind {
    /// Instances are of one step, most of one microbatch of it: they do not outlive the step.
    pub fn is_of_step(&self) -> bool {
        matches!(self, BufferKind::Value | BufferKind::Input { .. } | BufferKind::Loss | BufferKind::Output { .. })
    }
}

/// A buffer: global type and layout over the program's mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    pub name: String,
    /// The plan's stage that it is of.
    pub stage: u32,
    pub kind: BufferKind,
    pub ty: TensorType,
    pub sharding: Sharding,
    /// Where the model's own elements are among zeros, if there are more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extents: Option<Extents>,
    /// It is in the memory of the device's host, where only copies ([`crate::op::HostCopy`]) read and write it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub host: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl Buffer {
    /// The type of what the model has of it.
    pub fn own_type(&self) -> TensorType {
        self.extents.as_ref().map_or_else(|| self.ty.clone(), |extents| self.ty.with_shape(extents.shape()))
    }
}

/// Which part of a training step a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Adds what a microbatch has of values that are summed over all of them ([`crate::op::Microbatches`]). Called for every
    /// microbatch before the first forward body.
    Totals,
    Forward,
    /// All gradients, or under a schedule that runs them apart those that earlier stages wait for.
    Backward,
    /// The gradients of weights, where they are run apart.
    Weights,
    /// Reduces gradients once per step, before they are exchanged between stages.
    Reduce,
    /// A stage's share of sums over all gradients, before these are exchanged between stages.
    Norm,
    Update,
}

/// A straight-line local graph. Its leaves are [`crate::op::Op::Input`] nodes, each bound to a buffer by
/// `reads`; collectives and `axis_index` are ops of the graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Body {
    pub name: String,
    /// The plan's stage that it is of.
    pub stage: u32,
    pub phase: Phase,
    pub graph: Graph,
    /// Leaves of the graph and the buffers whose local part they are.
    pub reads: Vec<(ValueId, BufferId)>,
    /// Buffers that the body leaves a value in. A buffer may be read and written: the value replaces the old one.
    pub writes: Vec<(BufferId, ValueId)>,
    /// Instances of per-microbatch buffers that nothing needs after this call.
    pub frees: Vec<BufferId>,
}

/// One entry of a schedule. `microbatch` is `None` for what happens once per step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    Run {
        body: u32,
        microbatch: Option<u32>,
    },
    /// Never waits for the receiver. `free`: the buffer instance is not needed afterwards.
    Send {
        transfer: TransferId,
        microbatch: Option<u32>,
        free: bool,
    },
    /// Waits for the value; the target buffer instance lives from here.
    Receive {
        transfer: TransferId,
        microbatch: Option<u32>,
    },
}

/// The program of one submesh: of one stage, or of all stages that share its devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Global ids of the devices, in mesh order (row major).
    pub devices: Vec<u32>,
    pub mesh: Mesh,
    pub buffers: Vec<Buffer>,
    pub bodies: Vec<Body>,
    /// The calls of one step, first to last.
    pub schedule: Vec<Call>,
    /// The last calls of a step that are run among those of the next step: of each, after how many calls of the next step, which
    /// never falls. Empty where a step ends before the next begins. See [`Program::turns`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late: Vec<u32>,
    /// Calls that are made once no step is left to run, before the weights are looked at: they bring this program's copy of the weights
    /// up to date with those that others have updated since. Where any program has such calls, devices begin a step without waiting
    /// for others to end the one before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flush: Vec<Call>,
    /// Whether GPUs run products around large values as one kernel ([`crate::plan::Execution::fused_attention`]).
    pub fused_attention: bool,
}

/// What a device holds of two steps at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// What is a step's own from its beginning, as scalars.
    pub steps: bool,
    /// Parameters: as a step began with them, and updated.
    pub stashes_parameters: bool,
    /// Sums of gradients: some of a step are added up before those of the step before were used.
    pub doubles_accumulators: bool,
}

impl Phase {
    /// Whether a body works on a microbatch with the weights of its step, rather than on what all of a step gave.
    pub fn is_of_microbatch(self) -> bool {
        matches!(self, Phase::Totals | Phase::Forward | Phase::Backward | Phase::Weights)
    }
}

impl Program {
    /// Whether a device may begin a step before all others have ended the one before it, which then are not done with until a flush.
    pub fn runs_ahead(&self) -> bool {
        !self.late.is_empty() || !self.flush.is_empty()
    }

    /// Whether some body writes a buffer.
    pub fn writes(&self, buffer: BufferId) -> bool {
        self.bodies.iter().any(|body| body.writes.iter().any(|(written, _)| *written == buffer))
    }

    /// How many of the schedule's calls are run before the next step begins.
    pub fn num_prompt(&self) -> usize {
        self.schedule.len() - self.late.len().min(self.schedule.len())
    }

    /// The calls that a device runs between the beginning of one step and that of the next: positions in the schedule, and
    /// whether the call is of the step before. In the first step there are no calls of one before, and after the last those that
    /// are left of it run alone.
    ///
    /// Calls of different steps share parameters and optimizer state. All else they have of their own: inputs, scalars, values, the
    /// sums of gradients. Bodies of microbatches read the parameters as they were when their step began, even where an update
    /// has changed them since; all other bodies read and write the newest.
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

    /// What is held of two steps at once, with bodies that may be those of a program that is as this one.
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

    /// The position of a stage's body of some phase.
    pub fn body_of(&self, stage: u32, phase: Phase) -> Option<u32> {
        self.bodies.iter().position(|b| (b.stage, b.phase) == (stage, phase)).map(|b| b as u32)
    }

    /// Local bytes of one instance of a buffer on one device.
    pub fn local_bytes(&self, id: BufferId) -> u64 {
        let buffer = self.buffer(id);
        buffer.sharding.local_bytes(&buffer.ty, &self.mesh)
    }
}

/// A value that moves from one stage to another: the same global tensor in two layouts. Where both are on the same devices, it
/// goes from a program to itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    pub source: (u32, BufferId),
    pub target: (u32, BufferId),
}

/// All programs of a plan and what passes between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Programs {
    pub programs: Vec<Program>,
    pub transfers: Vec<Transfer>,
    pub num_microbatches: u32,
    /// Samples in one microbatch (global, not per device); 0 where the graph has no batch.
    pub microbatch: u64,
    /// Whether the loss of a step is the mean (else the sum) of its microbatches' losses.
    pub loss_is_mean: bool,
}

/// One device-to-device part of a transfer: the sender's local elements at the cross product of
/// `source_indices` go, in row-major order, to the receiver's at the cross product of `target_indices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Positions within the source's and the target's submesh.
    pub source: u32,
    pub target: u32,
    /// Per dimension, the local indices taken.
    pub source_indices: Vec<Vec<u64>>,
    pub target_indices: Vec<Vec<u64>>,
}

impl Programs {
    /// The stages between which a transfer goes.
    pub fn stages_of(&self, transfer: TransferId) -> (u32, u32) {
        let Transfer { source, target } = &self.transfers[transfer.0 as usize];
        let stage = |(program, buffer): (u32, BufferId)| self.programs[program as usize].buffer(buffer).stage;
        (stage(*source), stage(*target))
    }

    /// The messages of a transfer: a pure function of the two layouts, used alike by the simulator and every executor.
    /// Where several source devices hold the same part, receivers are spread over them.
    pub fn messages(&self, transfer: TransferId) -> Vec<Message> {
        let Transfer { source, target } = &self.transfers[transfer.0 as usize];
        let (from, to) = (&self.programs[source.0 as usize], &self.programs[target.0 as usize]);
        messages(&from.buffer(source.1).sharding, &from.mesh, &to.buffer(target.1).sharding, &to.mesh)
    }
}

/// See [`Programs::messages`]. Neither sharding may be partial.
pub fn messages(from: &Sharding, from_mesh: &Mesh, to: &Sharding, to_mesh: &Mesh) -> Vec<Message> {
    // Source devices grouped by what they hold: distinct parts, each with its replicas.
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

/// Positions in two increasing lists of the values they share.
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
