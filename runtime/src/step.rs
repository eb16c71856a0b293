//! The parts of a compiled body: kernel calls in order, with the stored values that they read, make and release.

use crate::element::Class;
use crate::host::HostData;
use crate::kernel::bitcast::Bitcast;
use crate::kernel::chain::Chain;
use crate::kernel::convolution::Conv;
use crate::kernel::copy::Copy;
use crate::kernel::dot::Dot;
use crate::kernel::gather::Lookup;
use crate::kernel::grouped::Grouped;
use crate::kernel::reduce::Reduction;
use crate::kernel::rows::{Reversal, RowOrder, RowScan};
use crate::kernel::window::Pooling;
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::{Combine, Extremum, Reducer};
use altiplano_ir::reshard::Collective;
use std::sync::Arc;

/// The operation of a step.
#[derive(Clone, Debug)]
pub enum Kernel {
    Chain(Chain),
    Copy(Copy),
    /// Sets all elements to one value.
    Fill {
        value: f64,
        dtype: DType,
    },
    Dense(Arc<HostData>),
    Iota(DType),
    AxisIndex {
        axes: Vec<AxisId>,
        dtype: DType,
    },
    Dot(Dot),
    Convolution(Conv),
    ReduceWindow {
        pooling: Pooling,
        reducer: Reducer,
    },
    SelectAndScatter {
        pooling: Pooling,
        select: Extremum,
    },
    Reduce(Reduction),
    /// Copies each operand into the result.
    Concatenate(Vec<Copy>),
    /// Fills the result with the second operand, then copies the first.
    Pad(Copy),
    Gather {
        lookup: Lookup,
        index: Class,
        clamp: bool,
    },
    ScatterAdd {
        lookup: Lookup,
        index: Class,
        dtype: DType,
    },
    /// Copies the first input, unless the output took over its storage, and applies the updates.
    Scatter {
        lookup: Lookup,
        index: Class,
        dtype: DType,
        combine: Combine,
    },
    GroupedDot(Grouped),
    GroupedOuter(Grouped),
    Bitcast(Bitcast),
    Reverse(Reversal),
    Cumulative(RowScan),
    ArgSort(RowOrder),
    Collective {
        collective: Collective,
        dtype: DType,
        shape: Vec<usize>,
        group_size: usize,
    },
}

impl Kernel {
    /// Returns whether results are computed in their storage format, so that they may still need rounding to their
    /// type.
    pub(crate) fn adds_or_multiplies(&self) -> bool {
        match self {
            Kernel::Dot(_) | Kernel::Convolution(_) | Kernel::ReduceWindow { .. } | Kernel::SelectAndScatter { .. } => {
                true
            }
            Kernel::GroupedDot(_) | Kernel::GroupedOuter(_) => true,
            Kernel::Reduce(_) | Kernel::ScatterAdd { .. } | Kernel::Scatter { .. } => true,
            Kernel::Iota(_) | Kernel::AxisIndex { .. } | Kernel::Fill { .. } | Kernel::Dense(_) => false,
            Kernel::Copy(_) | Kernel::Concatenate(_) | Kernel::Pad(_) | Kernel::Gather { .. } => false,
            Kernel::Bitcast(_) | Kernel::Reverse(_) | Kernel::ArgSort(_) => false,
            // These kernels round their results themselves.
            Kernel::Chain(_) | Kernel::Cumulative(_) | Kernel::Collective { .. } => false,
        }
    }
}

/// One kernel call.
pub type Step = altiplano_ir::storage::Step<Kernel>;

/// A body ready to run.
pub type Compiled = altiplano_ir::storage::Steps<Kernel>;
