//! What a compiled body consists of: kernel calls in order, with the stored values that they read, make and release.

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

/// What a step does.
#[derive(Clone, Debug)]
pub enum Kernel {
    Chain(Chain),
    Copy(Copy),
    /// One value for all elements.
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
    /// Each operand's copy into the result.
    Concatenate(Vec<Copy>),
    /// The second operand everywhere, then the copy of the first.
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
    /// The first input, unless the output took over its storage, with the updates in it.
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
    /// Whether results are computed in the format in which they are stored, so that they may not be of their type yet.
    pub fn adds_or_multiplies(&self) -> bool {
        match self {
            Kernel::Dot(_) | Kernel::Convolution(_) | Kernel::ReduceWindow { .. } | Kernel::SelectAndScatter { .. } => {
                true
            }
            Kernel::GroupedDot(_) | Kernel::GroupedOuter(_) => true,
            Kernel::Reduce(_) | Kernel::ScatterAdd { .. } | Kernel::Scatter { .. } => true,
            Kernel::Iota(_) | Kernel::AxisIndex { .. } | Kernel::Fill { .. } | Kernel::Dense(_) => false,
            Kernel::Copy(_) | Kernel::Concatenate(_) | Kernel::Pad(_) | Kernel::Gather { .. } => false,
            Kernel::Bitcast(_) | Kernel::Reverse(_) | Kernel::ArgSort(_) => false,
            // These round as they go.
            Kernel::Chain(_) | Kernel::Cumulative(_) | Kernel::Collective { .. } => false,
        }
    }
}

/// One kernel call.
pub type Step = altiplano_ir::storage::Step<Kernel>;

/// A body ready to run.
pub type Compiled = altiplano_ir::storage::Steps<Kernel>;
