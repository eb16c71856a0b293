//! The tape of a device: everything that it does in a step, decided before the step runs.
//!
//! A tape is a list of commands in the order in which a host issues them, each on a stream of the device, with the events that
//! it waits for. All memory is one arena, in which every tensor has its range of bytes, so that nothing is allocated while a
//! step runs; what of it is in the memory of the host comes last. The one idea: whoever executes a tape decides nothing, and needs only the arena's address, the table of launches,
//! a matmul, the communicators and copies from and to the host.

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
use altiplano_ir::storage::BLOCK_BYTES;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::sync::Arc;

/// Offsets of regions are multiples of this many bytes.
pub const ALIGNMENT: u64 = BLOCK_BYTES;

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

/// What a stream is for. Commands of one stream run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    Compute,
    /// Collectives among devices of the mesh, in an order that is the same on all of them.
    Collectives,
    /// What goes to the device of this rank. A send waits for its receiver, so every direction has a stream of its own.
    Send(u32),
    /// What comes from the device of this rank.
    Receive(u32),
    /// From the host, and from its memory.
    Upload,
    /// To the host, and to its memory.
    Download,
}

/// Devices that exchange something in an order that they agree on. Those of equal ranks and streams are one communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Communicator {
    /// Ranks of the members in the group's order; of a channel the sender's, then the receiver's.
    pub ranks: Vec<u32>,
    pub purpose: Purpose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    Collectives,
    /// One direction between two devices of different submeshes, or of stages.
    Channel,
}

/// What the bytes of a region are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// An instance of a buffer of the program, the device's local part of it.
    Buffer { buffer: BufferId, microbatch: Option<u32> },
    /// A value of a body, in a call of the schedule.
    Value { call: u32, body: u32, value: ValueId },
    /// A value that depends on no leaf.
    Constant { body: u32, value: ValueId },
    /// Something rearranged for a library or for sending.
    Staging { call: u32 },
}

/// A tensor's place in the arena, while it lives.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    pub content: Content,
    pub dtype: DType,
    pub elements: u64,
    /// From the start of the arena.
    pub offset: u64,
    pub bytes: u64,
    /// It is there before the step and after it.
    pub lasts: bool,
}

/// A run of elements within a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    pub region: RegionId,
    /// The first element.
    pub from: u64,
    pub elements: u64,
}

/// A matrix of `rows` by `columns` elements, of which [`MatmulCall`] says how many, or one of each batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    pub region: RegionId,
    pub dtype: DType,
    /// The first element of it in the region.
    pub from: u64,
    /// Elements between neighbouring rows, or where it is transposed, between neighbouring columns; neighbours in the other
    /// direction are neighbours in memory.
    pub leading: u64,
    pub transposed: bool,
}

/// So many products with elements between one's operands and the next one's.
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
    /// Never transposed.
    pub result: Matrix,
    /// Major first. A library takes the last as a strided batch; where there are more, it is called for each index of the others.
    pub batches: Vec<Batch>,
    /// The product is added to what the result's region holds.
    pub accumulate: bool,
}

/// What the members of a group do together, on contiguous elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// `to` is the reduction of all `from`; `elements` of each.
    AllReduce(Reducer),
    /// `from` has `elements` for each member; `to` are those of this member, reduced.
    ReduceScatter(Reducer),
    /// `to` has the `elements` of each member, in their order.
    AllGather,
}

/// Sent to a member of a communicator, or received from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Position among the communicator's ranks.
    pub member: u32,
    pub part: Part,
}

/// What the host gives.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Given {
    /// This device's part of a microbatch's rows of an input; of all of it where it has no batch dimension.
    Input { buffer: BufferId, microbatch: Option<u32> },
    /// A scalar of the step: `learning_rate` or `step`.
    Scalar { buffer: BufferId },
}

/// What the host takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Taken {
    /// The loss of a microbatch, by the first device of the program.
    Loss { microbatch: Option<u32> },
    /// This device's part of a result of a model that is not trained.
    Output { buffer: BufferId, microbatch: Option<u32> },
}

/// What a command does.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A loop program with its parameters in order, and what its [`Launch::coordinates`] are.
    Launch {
        launch: LaunchId,
        regions: Vec<RegionId>,
        coordinates: Vec<u64>,
    },
    Matmul(Box<MatmulCall>),
    /// Sets every element.
    Fill {
        region: RegionId,
        value: f64,
    },
    /// All elements of a region, which the target has as many of.
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
    /// Messages to and from members, which all go at once: a group of sends and receives.
    Exchange {
        communicator: CommunicatorId,
        dtype: DType,
        sends: Vec<Message>,
        receives: Vec<Message>,
    },
}

impl What {
    /// What the command does, in a word.
    pub fn verb(&self) -> &'static str {
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

/// One thing that a device does.
#[derive(Clone, Debug, PartialEq)]
pub struct Command {
    pub stream: StreamId,
    /// Recorded by commands of other streams before this one in the tape.
    pub waits: Vec<EventId>,
    /// Recorded when it is done, where some command waits for that.
    pub records: Option<EventId>,
    /// The call of the program's schedule that it belongs to; none where it prepares the step.
    pub call: Option<u32>,
    pub what: What,
}

/// Filled once, when the device is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    pub region: RegionId,
    pub value: Arc<Tensor>,
}

/// The memory of a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Arena {
    /// What has to be allocated on the device.
    pub bytes: u64,
    /// Of it what lasts from step to step, which comes first.
    pub lasting_bytes: u64,
    /// The most bytes that live at once, below which no layout could come.
    pub live_bytes: u64,
    /// What has to be allocated in the memory of the host. Regions there have offsets from `bytes` on.
    pub host_bytes: u64,
}

impl Arena {
    /// Of both memories.
    pub fn all_bytes(&self) -> u64 {
        self.bytes + self.host_bytes
    }
}

/// What one device does in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Tape {
    pub program: u32,
    /// The device's position in the program's mesh.
    pub position: u32,
    /// Its number among the devices of all programs, counted in order.
    pub rank: u32,
    pub arena: Arena,
    pub regions: Vec<Region>,
    pub constants: Vec<Constant>,
    /// Distinct loop programs. Parameters are by position: their sources say only where the first launch of the kind had them.
    pub launches: Vec<Arc<Launch>>,
    pub streams: Vec<Stream>,
    pub communicators: Vec<Communicator>,
    /// Events are numbered below this.
    pub num_events: u32,
    /// In the order in which the host issues them.
    pub commands: Vec<Command>,
}

impl Tape {
    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id.0 as usize]
    }

    /// Where in the host's part of the arena a region begins, if it is there.
    pub fn in_host(&self, id: RegionId) -> Option<u64> {
        let region = self.region(id);
        // What has no bytes is nowhere.
        region.offset.checked_sub(self.arena.bytes).filter(|_| region.bytes > 0)
    }

    /// The region of a buffer that lasts from step to step.
    pub fn lasting(&self, buffer: BufferId) -> Option<RegionId> {
        let wanted = Content::Buffer { buffer, microbatch: None };
        let found = self.regions.iter().position(|r| r.lasts && r.content == wanted)?;
        Some(RegionId(found as u32))
    }
}
