//! The tape of a device: all of its work in a step, decided before the step runs.
//!
//! A tape is a list of commands in the order in which a host issues them. Each has a stream of the device and the
//! events that it waits for. All memory is one arena, in which every tensor has its range of bytes, so that a step
//! allocates nothing. The part in host memory comes last.
//!
//! The executor of a tape decides nothing. It needs only the arena's address, the table of launches, a matmul, the
//! communicators, and copies from and to the host.

pub mod access;
mod build;
pub mod check;
mod convolved;
mod events;
mod halo;
pub mod host;
mod order;
mod overlap;
mod place;
mod prepare;
mod ranges;
mod strided;
mod text;

pub use build::{BuildError, Options, build};
pub use check::check;
pub use overlap::ordered;
pub use prepare::{Launched, Unprepared, launched_by};

use crate::loops::Launch;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Reducer;
use altiplano_ir::program::BufferId;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::sync::Arc;

/// A region of a [`Tape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u32);

/// A stream of a [`Tape`]: an index of [`Tape::streams`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u32);

/// An event of a [`Tape`], which one command records once in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u32);

/// A communicator of a [`Tape`]: an index of [`Tape::communicators`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommunicatorId(pub u32);

/// A launch of a [`Tape`]: an index of [`Tape::launches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaunchId(pub u32);

/// The purpose of a stream. Commands of one stream run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    Compute,
    /// Collectives among devices of the mesh, in the same order on all of them.
    Collectives,
    /// Sends to the device of this rank. A send waits for its receiver, so every direction has its own stream.
    Send(u32),
    /// Receives from the device of this rank.
    Receive(u32),
    /// Copies from the host and from its memory.
    Upload,
    /// Copies to the host and to its memory.
    Download,
}

/// Devices that communicate in an agreed order. Devices with equal ranks and purpose share one communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Communicator {
    /// Ranks of the members in the group's order; for a channel, the sender, then the receiver.
    pub ranks: Vec<u32>,
    pub purpose: Purpose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    Collectives,
    /// One direction between two devices of different submeshes or stages.
    Channel,
}

/// The content of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// The device's local part of an instance of a program buffer.
    Buffer { buffer: BufferId, microbatch: Option<u32> },
    /// A value of a body, in a call of the schedule.
    Value { call: u32, body: u32, value: ValueId },
    /// A value that depends on no leaf.
    Constant { body: u32, value: ValueId },
    /// Data rearranged for a library or for sending.
    Staging { call: u32 },
}

/// A tensor's place in the arena during its lifetime.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    pub content: Content,
    pub dtype: DType,
    pub elements: u64,
    /// Position from the start of the arena.
    pub offset: u64,
    pub bytes: u64,
    /// True if it exists before and after the step.
    pub lasts: bool,
}

/// A run of elements within a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    pub region: RegionId,
    /// Index of the first element.
    pub from: u64,
    pub elements: u64,
}

/// A matrix of `rows` by `columns` elements, or one for each batch; [`MatmulCall`] gives the sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    pub region: RegionId,
    pub dtype: DType,
    /// Index of its first element in the region.
    pub from: u64,
    /// Stride between rows or, if transposed, between columns. The other direction is contiguous.
    pub leading: u64,
    pub transposed: bool,
}

/// A batch dimension: `count` products, with the strides between consecutive operands and results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    pub count: u64,
    pub lhs: u64,
    pub rhs: u64,
    pub result: u64,
}

/// `[m, k] x [k, n] -> [m, n]`, row major, for each index of the batches. Sums are kept in single precision or better.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatmulCall {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub lhs: Matrix,
    pub rhs: Matrix,
    /// The result is never transposed.
    pub result: Matrix,
    /// Batch dimensions, major first. A library takes the last as a strided batch and is called once for each index of
    /// the others.
    pub batches: Vec<Batch>,
    /// Adds the product to the contents of the result's region.
    pub accumulate: bool,
}

/// A collective of the members of a group, on contiguous elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// `to` is the reduction of all `from`, each of `elements` elements.
    AllReduce(Reducer),
    /// `from` has `elements` for each member; `to` are those of this member, reduced.
    ReduceScatter(Reducer),
    /// `to` has the `elements` of each member, in their order.
    AllGather,
}

/// A message to or from a member of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Position among the communicator's ranks.
    pub member: u32,
    pub part: Part,
}

/// Values that the host provides.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Given {
    /// This device's part of a microbatch's rows of an input, or of the whole input if it has no batch dimension.
    Input { buffer: BufferId, microbatch: Option<u32> },
    /// A scalar of the step: `learning_rate` or `step`.
    Scalar { buffer: BufferId },
}

/// Values that the host takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Taken {
    /// The loss of a microbatch, from the first device of the program.
    Loss { microbatch: Option<u32> },
    /// This device's part of a result of a model that is not trained.
    Output { buffer: BufferId, microbatch: Option<u32> },
}

/// The operation of a command.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A loop program with its parameters in order, and the values of its [`Launch::coordinates`].
    Launch {
        launch: LaunchId,
        regions: Vec<RegionId>,
        coordinates: Vec<u64>,
    },
    Matmul(Box<MatmulCall>),
    /// Sets every element to a value.
    Fill {
        region: RegionId,
        value: f64,
    },
    /// Copies all elements of a region to one of the same length.
    Copy {
        from: RegionId,
        to: RegionId,
    },
    Upload {
        given: Given,
        to: RegionId,
    },
    Download {
        taken: Taken,
        from: RegionId,
    },
    Collective {
        communicator: CommunicatorId,
        kind: CollectiveKind,
        dtype: DType,
        elements: u64,
        from: RegionId,
        to: RegionId,
    },
    /// Messages to and from members that run concurrently: a group of sends and receives.
    Exchange {
        communicator: CommunicatorId,
        dtype: DType,
        sends: Vec<Message>,
        receives: Vec<Message>,
    },
}

impl What {
    /// The name of the operation.
    pub(crate) fn verb(&self) -> &'static str {
        match self {
            What::Launch { .. } => "launch",
            What::Matmul(_) => "matmul",
            What::Fill { .. } => "fill",
            What::Copy { .. } => "copy",
            What::Upload { .. } => "upload",
            What::Download { .. } => "download",
            What::Collective { .. } => "collective",
            What::Exchange { .. } => "exchange",
        }
    }
}

/// One operation of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    pub stream: StreamId,
    /// Events that this command waits for; commands of other streams record them earlier in the tape.
    pub waits: Vec<EventId>,
    /// The event that this command records when it is done, if another command waits for it.
    pub records: Option<EventId>,
    /// The call of the program's schedule to which it belongs; none if it prepares the step.
    pub call: Option<u32>,
    pub what: What,
}

/// A region that is filled once, when the device is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    pub region: RegionId,
    pub value: Arc<Tensor>,
}

/// The memory of a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Arena {
    /// Bytes to allocate on the device.
    pub bytes: u64,
    /// Bytes of the regions that last between steps, which come first.
    pub lasting_bytes: u64,
    /// Peak of the live bytes, a lower bound on any layout.
    pub live_bytes: u64,
    /// Bytes to allocate in host memory. Regions there have offsets from `bytes` on.
    pub host_bytes: u64,
}

impl Arena {
    /// Bytes of both memories.
    pub(crate) fn all_bytes(&self) -> u64 {
        self.bytes + self.host_bytes
    }
}

/// The work of one device in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Tape {
    pub program: u32,
    /// The device's position in the program's mesh.
    pub position: u32,
    /// Its number among the devices of all programs, in order.
    pub rank: u32,
    pub arena: Arena,
    pub regions: Vec<Region>,
    pub constants: Vec<Constant>,
    /// Distinct loop programs. Parameters are by position: their sources only describe the first launch of the kind.
    pub launches: Vec<Arc<Launch>>,
    pub streams: Vec<Stream>,
    pub communicators: Vec<Communicator>,
    /// Number of events.
    pub num_events: u32,
    /// The commands, in the order in which the host issues them.
    pub commands: Vec<Command>,
}

impl Tape {
    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id.0 as usize]
    }

    /// The offset of a region within the host's part of the arena, if it is there.
    pub fn in_host(&self, id: RegionId) -> Option<u64> {
        let region = self.region(id);
        // A region without bytes is in neither memory.
        region.offset.checked_sub(self.arena.bytes).filter(|_| region.bytes > 0)
    }

    /// The region of a buffer that lasts between steps.
    pub fn lasting(&self, buffer: BufferId) -> Option<RegionId> {
        let wanted = Content::Buffer { buffer, microbatch: None };
        let found = self.regions.iter().position(|r| r.lasts && r.content == wanted)?;
        Some(RegionId(found as u32))
    }
}
