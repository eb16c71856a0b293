//! The memory of a device that runs a body: which values are stored, in which order they are made, when they die, and
//! which results take over the storage of a dying operand.
//!
//! The CPU runtime executes the steps that [`compile`](compile()) produces, and the planner predicts memory from the same steps.
//! So predicted and actual memory have one source. GPUs store other values. For them, [`launched`] makes steps from
//! kernels, which go through the same `liveness`.

pub(crate) mod compile;
pub mod gathered;
mod launched;
mod liveness;
pub mod view;

pub use compile::compile;
pub use launched::{BLOCK_BYTES, block_bytes, launched};
pub use liveness::assign;

use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{HostCopy, HostRoute, Op};
use crate::program::BufferId;
use std::collections::BTreeMap;
use view::View;

/// The storage formats of the CPU runtime, which the types of the IR share. `f64` is stored as `f32`, since the runtime
/// trains in at most single precision. Eight-bit floats are stored as `bf16`, which represents them exactly. Narrow
/// integers are stored as `i32`, and wide and unsigned ones as `i64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    F32,
    F16,
    BF16,
    I32,
    I64,
    Bool,
}

impl Class {
    pub fn of(dtype: DType) -> Class {
        match dtype {
            DType::F64 | DType::F32 => Class::F32,
            DType::F16 => Class::F16,
            DType::Bool => Class::Bool,
            DType::I64 | DType::U64 | DType::U32 => Class::I64,
            _ if dtype.is_integer() => Class::I32,
            _ => Class::BF16,
        }
    }

    /// The bytes of one stored element.
    pub fn bytes(self) -> usize {
        match self {
            Class::I64 => 8,
            Class::F32 | Class::I32 => 4,
            Class::F16 | Class::BF16 => 2,
            Class::Bool => 1,
        }
    }

    pub fn is_integer(self) -> bool {
        matches!(self, Class::I32 | Class::I64)
    }

    /// The element type that the format is named after.
    pub fn dtype(self) -> DType {
        match self {
            Class::F32 => DType::F32,
            Class::F16 => DType::F16,
            Class::BF16 => DType::BF16,
            Class::I32 => DType::I32,
            Class::I64 => DType::I64,
            Class::Bool => DType::Bool,
        }
    }

    pub fn is_half(self) -> bool {
        matches!(self, Class::F16 | Class::BF16)
    }
}

/// The location of the elements of a node's value.
#[derive(Clone, Debug)]
pub enum Place {
    /// One number for all elements, known beforehand.
    Splat(f64),
    View(View),
}

/// Elementwise nodes computed in one pass, and reductions of their rows.
#[derive(Clone, Debug, Default)]
pub struct Group {
    pub elements: usize,
    pub members: Vec<ValueId>,
    /// The reduction nodes, each with the length of a row.
    pub reductions: Vec<(ValueId, usize)>,
    /// The places of the operands of members and reductions when the group is computed.
    pub places: BTreeMap<ValueId, Place>,
}

/// The work of a step of the CPU runtime.
#[derive(Clone, Debug)]
pub enum Work {
    Chain(Group),
    /// A row-major copy.
    Copy(View),
    /// One number for all elements.
    Fill(f64),
    /// A product whose result is written with these strides. With `accumulate`, it is added to the third input, whose
    /// storage the result takes over.
    Dot {
        lhs: View,
        rhs: View,
        strides: Vec<usize>,
        accumulate: bool,
    },
    Convolution {
        lhs: View,
        rhs: View,
    },
    Reduce(View),
    /// A concatenation of these operands.
    Concatenate(Vec<View>),
    /// The second operand everywhere, overwritten by the first at its positions.
    Pad(View),
    /// The node's op, on operands that are stored whole and in order.
    Node,
}

/// A stored result of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Output {
    pub value: ValueId,
    pub dtype: DType,
    pub elements: usize,
    /// The bytes in device memory.
    pub bytes: u64,
    /// True if the result is in host memory.
    pub host: bool,
}

impl Output {
    /// An output in the format of the CPU runtime.
    pub fn new(value: ValueId, dtype: DType, elements: usize) -> Output {
        Output { value, dtype, elements, bytes: (elements * Class::of(dtype).bytes()) as u64, host: false }
    }

    pub fn class(&self) -> Class {
        Class::of(self.dtype)
    }
}

/// One call of a kernel, which `kernel` describes.
#[derive(Clone, Debug)]
pub struct Step<K> {
    /// The node that the step computes, for messages. For a chain, it is the last one.
    pub node: ValueId,
    /// All nodes of a chain, in order.
    pub members: Vec<ValueId>,
    pub kernel: K,
    /// The stored values that the step reads.
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<Output>,
    /// The bytes that the step needs while it runs, beyond its inputs and outputs.
    pub workspace_bytes: u64,
    /// Outputs with inputs whose storage they could take over, in order of preference.
    pub replaceable: Vec<(usize, ValueId)>,
    /// Outputs that take over the storage of an input that dies here.
    pub in_place: Vec<(usize, ValueId)>,
    /// Stored values that nothing needs after this step.
    pub dies: Vec<ValueId>,
}

/// A leaf and its buffer. `owned` is true if the body may take over the buffer's storage, because it replaces or frees
/// the buffer. `bytes` are in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaf {
    pub value: ValueId,
    pub buffer: BufferId,
    pub owned: bool,
    pub bytes: u64,
}

/// For each value of a graph, true if it is in host memory. These are leaves that are loaded from there, and values
/// that are stored there.
pub(crate) fn in_host(graph: &Graph) -> Vec<bool> {
    let mut host = vec![false; graph.len()];
    for v in graph.values() {
        match &graph.node(v).op {
            Op::HostCopy(HostCopy { route: HostRoute::Store }) => host[v.index()] = true,
            Op::HostCopy(HostCopy { route: HostRoute::Load }) => host[graph.node(v).operands[0].index()] = true,
            _ => {}
        }
    }
    host
}

/// A body as steps in order.
#[derive(Clone, Debug)]
pub struct Steps<K> {
    pub name: String,
    pub steps: Vec<Step<K>>,
    pub leaves: Vec<Leaf>,
    pub writes: Vec<(BufferId, ValueId)>,
    pub frees: Vec<BufferId>,
    /// The stored values are numbered below this. Those of nodes come first.
    pub num_values: usize,
    /// The largest number of bytes held during the body beyond those held at its start.
    pub transient_bytes: u64,
}

impl<K> Steps<K> {
    /// The same steps with other kernels.
    pub fn map<L>(self, mut kernel: impl FnMut(&Step<K>) -> L) -> Steps<L> {
        let step = |step: Step<K>| Step {
            kernel: kernel(&step),
            node: step.node,
            members: step.members,
            inputs: step.inputs,
            outputs: step.outputs,
            workspace_bytes: step.workspace_bytes,
            replaceable: step.replaceable,
            in_place: step.in_place,
            dies: step.dies,
        };
        Steps {
            steps: self.steps.into_iter().map(step).collect(),
            name: self.name,
            leaves: self.leaves,
            writes: self.writes,
            frees: self.frees,
            num_values: self.num_values,
            transient_bytes: self.transient_bytes,
        }
    }
}
