//! The ops, one file per family: shape function, sharding rule, gradient and reference semantics together.
//!
//! To add an op, write a struct that implements [`Operator`], add it to the [`Op`] enum below, and give it a case in
//! `op/tests.rs`. Planning, partitioning, text form and JSON follow from the trait.

mod bits;
mod broadcast;
mod composite;
mod concatenate;
mod convolution;
mod cumulative;
mod decomposition;
mod dot;
mod elementwise;
mod gather;
mod grouped;
mod leaf;
mod lookup;
mod microbatches;
mod pad;
mod product;
mod reduce;
mod reduce_window;
mod reshape;
mod reverse;
mod roll;
mod scatter;
mod slice;
mod sort;
mod spmd;
mod transpose;
mod window;

#[cfg(test)]
mod tests;

pub use bits::{BitcastConvert, ReducePrecision, Threefry, ThreefryWord};

pub use broadcast::BroadcastInDim;
pub use composite::{Composite, Function};
pub use concatenate::Concatenate;
pub use convolution::{Convolution, GATHERED_ROWS, ImageDims, KernelDims};
pub use cumulative::Cumulative;
pub use decomposition::Decomposition;
pub use dot::DotGeneral;
pub use elementwise::{Binary, Compare, Convert, Direction, Select, Unary};
pub use gather::{Gather, GatherDims, OutOfBounds, ScatterAdd};
pub use grouped::{GroupedDot, GroupedOuter};
pub use leaf::{Input, Iota, Parameter};
pub use lookup::{lookups_stop_at, may_be_row, takes_few};
pub use microbatches::Microbatches;
pub use pad::Pad;
pub use reduce::{Reduce, Reducer};
pub use reduce_window::{Extremum, ReduceWindow, SelectAndScatter};
pub use reshape::Reshape;
pub use reshape::gcd;
pub use reverse::Reverse;
pub use roll::Roll;
pub use scatter::{Combine, Scatter};
pub use slice::Slice;
pub use sort::ArgSort;
pub use spmd::{AxisIndex, HostCopy, HostRoute};
pub use transpose::Transpose;
pub use window::WindowDim;

use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::literal::Literal;
use crate::mesh::{AxisId, Mesh};
use crate::reshard::Collective;
use crate::rule::{FactorKind, ShardingRule};
use crate::tensor::Tensor;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// The reason why operands and attributes of an op do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("takes {expected} operands, found {found}")]
    OperandCount { expected: usize, found: usize },
    #[error("operands have shapes {left:?} and {right:?}, which must be equal")]
    ShapesDiffer { left: Vec<u64>, right: Vec<u64> },
    #[error("operands have element types {left} and {right}, which must be equal")]
    DTypesDiffer { left: DType, right: DType },
    #[error("is not defined for element type {dtype}")]
    DType { dtype: DType },
    #[error("dimension {dim} is out of range for rank {rank}")]
    DimOutOfRange { dim: u64, rank: usize },
    #[error("{what}: sizes {left} and {right} must be equal")]
    SizesDiffer { what: &'static str, left: u64, right: u64 },
    #[error("{0}")]
    Attribute(&'static str),
    #[error("result of shape {shape:?} is larger than any tensor can be")]
    TooLarge { shape: Vec<u64> },
}

/// Everything that the project must know about an op. Sizes are global unless a method says otherwise.
pub trait Operator {
    /// The type of the result for operands of these types.
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError>;

    /// The factors of the op at these sizes.
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule;

    /// The same op for other sizes of the same ranks. Attributes that contain sizes are rewritten. Used for other batch
    /// sizes and for the local sizes of a device.
    fn resized(&self, operands: &[&[u64]], result: &[u64]) -> Op;

    /// Emits the op on one device's local operands. Ops whose result depends on the device's position (an iota, a
    /// lookup in a split table) override this.
    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let op = {
            let shapes: Vec<&[u64]> = cx.operands.iter().map(|&v| cx.graph.shape(v)).collect();
            self.resized(&shapes, &cx.result_shape)
        };
        cx.graph.emit(op, &cx.operands)
    }

    /// Emits the cotangent of each operand. `None` if it is zero or undefined.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>>;

    /// The result in exact arithmetic (f64).
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor;

    /// The floating-point operations. A transcendental function counts as one.
    fn flop(&self, _operands: &[&TensorType], result: &TensorType) -> u64 {
        result.elements()
    }

    /// The element operations of [`eval`](Operator::eval): all that it reads, combines and writes. They bound what is
    /// evaluated ahead of a run.
    fn work(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        moved(operands, result).saturating_add(self.flop(operands, result))
    }
}

/// The context in which [`Operator::local`] emits one device's part of an op.
pub struct Local<'a> {
    /// The local graph, shared by all devices of the mesh.
    pub graph: &'a mut Graph,
    pub mesh: &'a Mesh,
    /// The local operands, already in the shardings that the strategy asks for.
    pub operands: Vec<ValueId>,
    /// The global types of the operands.
    pub operand_types: Vec<TensorType>,
    pub result_shape: Vec<u64>,
    /// The axes that split each factor of the op's rule, major first.
    pub factor_axes: Vec<Vec<AxisId>>,
    /// See [`crate::plan::Execution::fused_loss`].
    pub fused_loss: bool,
}

/// The context in which [`Operator::gradient`] emits cotangents.
pub struct Gradient<'a> {
    pub graph: &'a mut Graph,
    pub operands: &'a [ValueId],
    pub result: ValueId,
    pub cotangent: ValueId,
    /// For each operand, true if its cotangent is needed.
    pub wanted: &'a [bool],
    /// See [`crate::plan::Execution::fused_loss`].
    pub fused_loss: bool,
}

/// Every op of the IR. `Collective`, `AxisIndex` and `HostCopy` occur only in the local graphs of programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Parameter(Parameter),
    Input(Input),
    Constant(Literal),
    Iota(Iota),
    Unary(Unary),
    Binary(Binary),
    Compare(Compare),
    Select(Select),
    Convert(Convert),
    BitcastConvert(BitcastConvert),
    ReducePrecision(ReducePrecision),
    Threefry(Threefry),
    BroadcastInDim(BroadcastInDim),
    Reshape(Reshape),
    Transpose(Transpose),
    Reverse(Reverse),
    Roll(Roll),
    Slice(Slice),
    Concatenate(Concatenate),
    Pad(Pad),
    Reduce(Reduce),
    Cumulative(Cumulative),
    ArgSort(ArgSort),
    DotGeneral(DotGeneral),
    Convolution(Convolution),
    ReduceWindow(ReduceWindow),
    SelectAndScatter(SelectAndScatter),
    Gather(Gather),
    ScatterAdd(ScatterAdd),
    GroupedDot(GroupedDot),
    GroupedOuter(GroupedOuter),
    Scatter(Scatter),
    Composite(Composite),
    Microbatches(Microbatches),
    Collective(spmd::CollectiveOp),
    AxisIndex(AxisIndex),
    HostCopy(HostCopy),
}

impl Op {
    fn operator(&self) -> &dyn Operator {
        match self {
            Op::Parameter(op) => op,
            Op::Input(op) => op,
            Op::Constant(op) => op,
            Op::Iota(op) => op,
            Op::Unary(op) => op,
            Op::Binary(op) => op,
            Op::Compare(op) => op,
            Op::Select(op) => op,
            Op::Convert(op) => op,
            Op::BitcastConvert(op) => op,
            Op::ReducePrecision(op) => op,
            Op::Threefry(op) => op,
            Op::BroadcastInDim(op) => op,
            Op::Reshape(op) => op,
            Op::Transpose(op) => op,
            Op::Reverse(op) => op,
            Op::Roll(op) => op,
            Op::Slice(op) => op,
            Op::Concatenate(op) => op,
            Op::Pad(op) => op,
            Op::Reduce(op) => op,
            Op::Cumulative(op) => op,
            Op::ArgSort(op) => op,
            Op::DotGeneral(op) => op,
            Op::Convolution(op) => op,
            Op::ReduceWindow(op) => op,
            Op::SelectAndScatter(op) => op,
            Op::Gather(op) => op,
            Op::ScatterAdd(op) => op,
            Op::GroupedDot(op) => op,
            Op::GroupedOuter(op) => op,
            Op::Scatter(op) => op,
            Op::Composite(op) => op,
            Op::Microbatches(op) => op,
            Op::Collective(op) => op,
            Op::AxisIndex(op) => op,
            Op::HostCopy(op) => op,
        }
    }

    /// A collective as an op of a local graph on `mesh`.
    pub fn collective(collective: Collective, mesh: &Mesh) -> Op {
        Op::Collective(spmd::CollectiveOp { collective, mesh: mesh.clone() })
    }

    /// The op's name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Parameter(_) => "parameter",
            Op::Input(_) => "input",
            Op::Constant(_) => "constant",
            Op::Iota(_) => "iota",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Compare(_) => "compare",
            Op::Select(_) => "select",
            Op::Convert(_) => "convert",
            Op::BitcastConvert(_) => "bitcast_convert",
            Op::ReducePrecision(_) => "reduce_precision",
            Op::Threefry(_) => "threefry",
            Op::BroadcastInDim(_) => "broadcast_in_dim",
            Op::Reshape(_) => "reshape",
            Op::Transpose(_) => "transpose",
            Op::Reverse(_) => "reverse",
            Op::Roll(_) => "roll",
            Op::Slice(_) => "slice",
            Op::Concatenate(_) => "concatenate",
            Op::Pad(_) => "pad",
            Op::Reduce(_) => "reduce",
            Op::Cumulative(_) => "cumulative",
            Op::ArgSort(_) => "arg_sort",
            Op::DotGeneral(_) => "dot_general",
            Op::Convolution(_) => "convolution",
            Op::ReduceWindow(_) => "reduce_window",
            Op::SelectAndScatter(_) => "select_and_scatter",
            Op::Gather(_) => "gather",
            Op::ScatterAdd(_) => "scatter_add",
            Op::GroupedDot(_) => "grouped_dot",
            Op::GroupedOuter(_) => "grouped_outer",
            Op::Scatter(_) => "scatter",
            Op::Composite(op) => op.function.name(),
            Op::Microbatches(op) => op.name(),
            Op::Collective(op) => op.collective.name(),
            Op::AxisIndex(_) => "axis_index",
            Op::HostCopy(HostCopy { route: HostRoute::Load }) => "host_load",
            Op::HostCopy(HostCopy { route: HostRoute::Store }) => "host_store",
        }
    }

    /// Returns true if the result is in host memory.
    pub fn stores_in_host(&self) -> bool {
        matches!(self, Op::HostCopy(HostCopy { route: HostRoute::Store }))
    }

    /// Returns true if the op has no operands and names a value from outside the graph.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Parameter(_) | Op::Input(_))
    }

    /// Returns true for matmuls, convolutions and attention (which consists of matmuls). They do most of a model's
    /// work.
    pub fn is_contraction(&self) -> bool {
        match self {
            Op::DotGeneral(_) | Op::Convolution(_) | Op::GroupedDot(_) | Op::GroupedOuter(_) => true,
            Op::Composite(op) => matches!(op.function, Function::Attention { .. }),
            _ => false,
        }
    }

    /// Returns true if each result element depends only on the operands' elements at the same index.
    pub fn is_elementwise(&self) -> bool {
        matches!(
            self,
            Op::Unary(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Select(_)
                | Op::Convert(_)
                | Op::ReducePrecision(_)
                | Op::Threefry(_)
        )
    }
}

impl Operator for Op {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        let ty = self.operator().infer(operands)?;
        if ty.check() { Ok(ty) } else { Err(ShapeError::TooLarge { shape: ty.shape }) }
    }
    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        self.operator().rule(operands, result)
    }
    fn resized(&self, operands: &[&[u64]], result: &[u64]) -> Op {
        self.operator().resized(operands, result)
    }
    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        self.operator().local(cx)
    }
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        self.operator().gradient(cx)
    }
    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        self.operator().eval(operands, result)
    }
    fn flop(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        self.operator().flop(operands, result)
    }
    fn work(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        self.operator().work(operands, result)
    }
}

/// The elements of the operands and of the result.
fn moved(operands: &[&TensorType], result: &TensorType) -> u64 {
    operands.iter().fold(result.elements(), |sum, ty| sum.saturating_add(ty.elements()))
}

fn expect_operands(operands: &[&TensorType], expected: usize) -> Result<(), ShapeError> {
    if operands.len() == expected { Ok(()) } else { Err(ShapeError::OperandCount { expected, found: operands.len() }) }
}

/// Checks that dimensions are distinct and less than `rank`.
fn expect_dims(dims: &[usize], rank: usize) -> Result<(), ShapeError> {
    for (i, &dim) in dims.iter().enumerate() {
        if dim >= rank {
            return Err(ShapeError::DimOutOfRange { dim: dim as u64, rank });
        }
        if dims[..i].contains(&dim) {
            return Err(ShapeError::Attribute("a dimension is named twice"));
        }
    }
    Ok(())
}

/// Calls `visit` with the row-major positions of each line of elements along `dim`.
fn for_each_line(shape: &[u64], dim: usize, mut visit: impl FnMut(&[usize])) {
    let strides = crate::types::strides(shape);
    let mut starts = shape.to_vec();
    starts[dim] = shape[dim].min(1);
    crate::tensor::for_each_index(&starts, |index| {
        let start: u64 = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
        let line: Vec<usize> = (0..shape[dim]).map(|i| (start + i * strides[dim]) as usize).collect();
        visit(&line);
    });
}

/// The rule of an op that needs each of `dims` whole and is elementwise otherwise.
fn rule_along(shape: &[u64], num_operands: usize, dims: &[usize], linear: Vec<Vec<u8>>) -> ShardingRule {
    let mut rule = ShardingRule::elementwise(shape, num_operands, linear);
    for &d in dims {
        rule.factors[d].kind = FactorKind::Whole;
    }
    rule
}
