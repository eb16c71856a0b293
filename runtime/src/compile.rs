//! Turns the steps of a body into kernel calls. [`altiplano_ir::storage`] decides which values are stored and when;
//! this module decides how each step computes its values.

use crate::element::Class;
use crate::fuse;
use crate::host::HostTensor;
use crate::kernel::bitcast::Bitcast;
use crate::kernel::convolution::Conv;
use crate::kernel::copy::Copy;
use crate::kernel::dot::Dot;
use crate::kernel::gather::Lookup;
use crate::kernel::grouped::Grouped;
use crate::kernel::reduce::Reduction;
use crate::kernel::rows::{Reversal, RowOrder, RowScan};
use crate::kernel::window::Pooling;
use crate::step::{Compiled, Kernel};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Values;
use altiplano_ir::op::{GatherDims, Op, OutOfBounds, Pad};
use altiplano_ir::program::Body;
use altiplano_ir::storage::view::{View, row_major, sizes};
use altiplano_ir::storage::{self, Step, Work};
use std::sync::Arc;

/// Compiles a body whose graph has passed `verify`.
pub fn compile(body: &Body) -> Compiled {
    storage::compile(body).map(|step| kernel(&body.graph, step))
}

/// Peak of the bytes that a body holds beyond those at its start: results, temporaries and workspace.
pub fn body_transient_bytes(body: &Body) -> u64 {
    storage::compile(body).transient_bytes
}

fn kernel(graph: &Graph, step: &Step<Work>) -> Kernel {
    let v = step.node;
    let node = graph.node(v);
    let shape = sizes(&node.ty.shape);
    match (&step.kernel, &node.op) {
        (Work::Chain(group), _) => Kernel::Chain(fuse::build(graph, group, step)),
        (Work::Copy(view), _) => Kernel::Copy(copy_into(view, 0, &row_major(&view.shape))),
        (Work::Fill(value), _) => Kernel::Fill { value: *value, dtype: step.outputs[0].dtype },
        (Work::Dot { lhs, rhs, strides, accumulate }, Op::DotGeneral(op)) => {
            let mut dot = Dot::new(op, class(graph, v), lhs, rhs, strides);
            dot.accumulate = *accumulate;
            debug_assert_eq!(dot.workspace_bytes(), step.workspace_bytes);
            Kernel::Dot(dot)
        }
        (Work::Convolution { lhs, rhs }, Op::Convolution(op)) => {
            let conv = Conv::new(op, class(graph, v), lhs, rhs, &shape, &row_major(&shape));
            debug_assert_eq!(conv.workspace_bytes(), step.workspace_bytes);
            Kernel::Convolution(conv)
        }
        (Work::Reduce(from), Op::Reduce(op)) => {
            Kernel::Reduce(Reduction::new(from, &op.dims, op.reducer, graph.ty(node.operands[0]).dtype))
        }
        (Work::Concatenate(views), Op::Concatenate(op)) => {
            let target = row_major(&shape);
            let mut at = 0;
            let part = |view: &View| {
                let copy = copy_into(view, at * target[op.dim], &target);
                at += view.shape[op.dim];
                copy
            };
            Kernel::Concatenate(views.iter().map(part).collect())
        }
        (Work::Pad(view), Op::Pad(op)) => Kernel::Pad(pad_copy(op, view, &shape)),
        _ => of_node(graph, v, &shape),
    }
}

/// The kernel of a node whose operands are all materialised.
fn of_node(graph: &Graph, v: ValueId, shape: &[usize]) -> Kernel {
    let node = graph.node(v);
    let dtype = node.ty.dtype;
    let operand = |i: usize| node.operands[i];
    let lookup = |dims: &GatherDims, of: [ValueId; 3]| {
        let [table, indices, rows] = of.map(|v| sizes(graph.shape(v)));
        Lookup::new(dims, &table, &indices, &rows)
    };
    match &node.op {
        Op::Constant(literal) => {
            let data: Vec<f64> = match &literal.values {
                Values::Dense(values) => values.iter().map(|r| r.0).collect(),
                Values::Splat(x) => vec![x.0; node.ty.elements() as usize],
            };
            Kernel::Dense(Arc::new(HostTensor::from_f64(node.ty.clone(), &data).data))
        }
        Op::Iota(_) => Kernel::Iota(dtype),
        Op::HostCopy(_) | Op::Microbatches(_) => {
            Kernel::Copy(copy_into(&View::whole(v, shape.to_vec()), 0, &row_major(shape)))
        }
        Op::AxisIndex(op) => Kernel::AxisIndex { axes: op.axes.clone(), dtype: op.dtype },
        Op::BitcastConvert(op) => Kernel::Bitcast(Bitcast { from: graph.ty(operand(0)).dtype, to: op.dtype }),
        Op::Reverse(op) => Kernel::Reverse(Reversal::new(shape, &op.dims)),
        Op::Cumulative(op) => {
            Kernel::Cumulative(RowScan { row: shape[op.dim], reducer: op.reducer, reverse: op.reverse, dtype })
        }
        Op::ArgSort(op) => {
            let dtypes = node.operands.iter().map(|&o| graph.ty(o).dtype);
            Kernel::ArgSort(RowOrder { row: shape[op.dim], keys: dtypes.zip(op.descending.iter().copied()).collect() })
        }
        Op::ReduceWindow(op) => {
            let pooling = Pooling::new(dtype, &op.window, &sizes(graph.shape(operand(0))), shape);
            Kernel::ReduceWindow { pooling, reducer: op.reducer }
        }
        Op::SelectAndScatter(op) => {
            let pooling = Pooling::new(dtype, &op.window, shape, &sizes(graph.shape(operand(1))));
            Kernel::SelectAndScatter { pooling, select: op.select }
        }
        Op::Gather(op) => Kernel::Gather {
            lookup: lookup(&op.dims, [operand(0), operand(1), v]),
            index: class(graph, operand(1)),
            clamp: op.out_of_bounds == OutOfBounds::Clamp,
        },
        Op::ScatterAdd(op) => {
            let lookup = lookup(&op.dims, [v, operand(0), operand(1)]);
            Kernel::ScatterAdd { lookup, index: class(graph, operand(0)), dtype }
        }
        Op::Scatter(op) => Kernel::Scatter {
            lookup: lookup(&op.dims, [operand(0), operand(1), operand(2)]),
            index: class(graph, operand(1)),
            dtype,
            combine: op.combine,
        },
        Op::GroupedDot(op) => Kernel::GroupedDot(Grouped::dot_of(
            op,
            class(graph, v),
            class(graph, operand(2)),
            graph.shape(operand(1)),
            graph.ty(operand(2)),
        )),
        Op::GroupedOuter(op) => Kernel::GroupedOuter(Grouped::outer_of(
            op,
            class(graph, v),
            class(graph, operand(2)),
            shape,
            graph.ty(operand(2)),
        )),
        Op::Collective(op) => Kernel::Collective {
            collective: op.collective.clone(),
            dtype,
            shape: sizes(graph.shape(operand(0))),
            group_size: op.mesh.product(op.collective.axes()) as usize,
        },
        op => unreachable!("{} is part of a chain or a view of its operand", op.name()),
    }
}

fn class(graph: &Graph, v: ValueId) -> Class {
    Class::of(graph.ty(v).dtype)
}

/// Copies a view to a row-major position in a larger tensor.
fn copy_into(view: &View, target_offset: usize, target: &[usize]) -> Copy {
    let dims = view.shape.iter().zip(&view.strides).zip(target).map(|((&n, &s), &t)| (n, s, t));
    Copy::new(view.offset, target_offset, dims)
}

/// The part of a padding's operand that appears in its result.
fn pad_copy(op: &Pad, view: &View, shape: &[usize]) -> Copy {
    let target = row_major(shape);
    let (mut source_offset, mut target_offset) = (view.offset, 0);
    let mut dims = Vec::with_capacity(shape.len());
    for d in 0..shape.len() {
        let (low, pitch) = (op.low[d], op.interior[d] as i64 + 1);
        // Indices i with 0 <= low + i * pitch < shape[d].
        let first = if low >= 0 { 0 } else { (-low + pitch - 1) / pitch };
        let end = (shape[d] as i64 - low + pitch - 1).div_euclid(pitch).clamp(0, view.shape[d] as i64);
        let n = (end - first).max(0) as usize;
        if n > 0 {
            source_offset += first as usize * view.strides[d];
            target_offset += (low + first * pitch) as usize * target[d];
        }
        dims.push((n, view.strides[d], target[d] * pitch as usize));
    }
    Copy::new(source_offset, target_offset, dims)
}
