//! The roofline of a described device. An op's time is its arithmetic at a realistic share of the peak rate, its memory
//! traffic at the memory's bandwidth, and the launch of a kernel. The model needs only the figures of a datasheet and a
//! few constants fitted to published measurements. Tile quantisation and occupancy are left to better models.

use crate::collective::{self, Operation};
use crate::compute::{Compute, Constants};
use crate::kernels::{Kernel, KernelKind};
use crate::timeline::Price;
use crate::{AxisLink, CostModel, TransferPath};
pub use altiplano_ir::cluster::MEMORY_EFFICIENCY;
use altiplano_ir::cluster::{Device, DeviceKind};
use altiplano_ir::dtype::DType;
use altiplano_ir::kernels::{PASSES_TO_EIGHT_BITS, converts_to_eight_bits};
use altiplano_ir::op::{Op, Operator};
use altiplano_ir::reshard::Collective;
use altiplano_ir::types::TensorType;

/// Elementwise ops that one fused kernel holds on average.
///
/// A fused kernel reads its inputs and writes its result once, however many ops it holds. But an op cannot know which
/// kernel it will be part of, and a price that depends on neighbours would not be additive. So each op pays this
/// fraction of one read and one write. With 6, the nine ops of a tanh GELU pay for 3 tensors moved (a fused kernel
/// moves 2), the four of a softmax and its two reductions for 3.3 (2), the dozen of an Adam update for 4 (7).
pub const OPS_PER_FUSED_KERNEL: f64 = 6.0;

/// Tensors that could be read in the time that Threefry computes one. Its 20 rounds are about 80 integer operations, of
/// which an A100 does 9.7e12 a second (64 per clock and multiprocessor, its whitepaper of 2020); 4 bytes take 2.6 ps.
pub const THREEFRY_TENSORS: f64 = 3.0;

/// The roofline model of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    compute: Compute,
    updates: Compute,
}

impl Roofline {
    /// The model of a device. The catalogue provides constants that no datasheet states, by the device's name.
    pub fn new(device: Device) -> Self {
        Roofline::of(Compute::new(device))
    }

    /// The model of a device with constants of its own.
    pub fn with_constants(device: Device, constants: Constants) -> Self {
        Roofline::of(Compute::in_steps(device, constants))
    }

    fn of(compute: Compute) -> Self {
        Roofline { updates: compute.of_updates(), compute }
    }

    /// Seconds of a matmul of `flop` that moves `bytes`, without its launch.
    ///
    /// Arithmetic and traffic are added, not overlapped: a matmul's first tiles wait for memory and its last ones for
    /// the write. On a V100, the attention scores of GPT 13B (43e9 FLOP, 380e6 bytes) take 0.98 ms by this and 1.07 ms
    /// as measured; the larger of the two terms alone gives 0.50. The projections differ by 0 to 8 % either way.
    fn matmul_s(&self, flop: f64, bytes: f64, dtype: DType) -> f64 {
        flop / (peak_flops(&self.compute.device, dtype) * self.compute.constants.matmul_efficiency)
            + bytes / (self.compute.device.memory_bytes_per_s * MEMORY_EFFICIENCY)
    }

    /// Seconds to read or write a total of `bytes`.
    fn memory_s(&self, bytes: f64) -> f64 {
        self.compute.memory_s(bytes)
    }

    /// Seconds of a kernel that is busy for `busy_s`, with its launch.
    fn launched(&self, busy_s: f64) -> f64 {
        busy_s + self.compute.device.launch_s
    }

    /// Seconds of an op that is part of a larger fused kernel.
    fn fused_s(&self, bytes: f64) -> f64 {
        self.launched(self.memory_s(bytes)) / OPS_PER_FUSED_KERNEL
    }
}

/// The element type whose rate prices a matmul of `dtype` on a device without units for it (bf16 on a V100 is computed
/// in f32). `None` if the device has units for it, and for types that are not floats, which no model multiplies in
/// bulk.
pub fn fallback(device: &Device, dtype: DType) -> Option<DType> {
    if !dtype.is_float() || device.peak_flops.contains_key(&dtype) {
        return None;
    }
    Some(priced_as(device, dtype))
}

/// `dtype` if the device has a peak for it, else f32, else the slowest type that it has. Eight-bit floats are exact in
/// bf16 and, except for the widest ranges, in f16, so a device without units for them uses those.
fn priced_as(device: &Device, dtype: DType) -> DType {
    let half = [DType::BF16, DType::F16].into_iter().filter(|_| dtype.is_float() && dtype.bytes() == 1);
    let candidates = [dtype].into_iter().chain(half).chain([DType::F32]);
    if let Some(known) = candidates.into_iter().find(|d| device.peak_flops.contains_key(d)) {
        return known;
    }
    device.peak_flops.iter().min_by(|a, b| a.1.total_cmp(b.1)).map_or(dtype, |(d, _)| *d)
}

/// Peak FLOP/s of a matmul of `dtype` operands, after [`fallback`]. Infinite if the device states no rate at all, so
/// that only memory traffic is priced.
pub fn peak_flops(device: &Device, dtype: DType) -> f64 {
    device.peak_flops.get(&priced_as(device, dtype)).copied().unwrap_or(f64::INFINITY)
}

/// Number of kernels that an op adds to those around it.
fn launches(op: &Op, operands: &[&TensorType]) -> f64 {
    match op {
        Op::Parameter(_) | Op::Input(_) | Op::Constant(_) | Op::Iota(_) => 0.0,
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Collective(_) | Op::AxisIndex(_) | Op::Microbatches(_) => 0.0,
        Op::Composite(composite) => composite.body(operands).map_or(0.0, |body| {
            let graph = &body.graph;
            let inside = graph.values().filter(|&v| !body.is_constant(v));
            inside.map(|v| launches(&graph.node(v).op, &graph.operand_types(v))).sum()
        }),
        Op::Transpose(_) | Op::Reverse(_) | Op::Roll(_) | Op::Slice(_) | Op::Pad(_) => 1.0 / OPS_PER_FUSED_KERNEL,
        op if op.is_elementwise() => 1.0 / OPS_PER_FUSED_KERNEL,
        Op::ArgSort(_) => operands.iter().map(|t| t.dtype.bytes()).sum::<u64>() as f64,
        _ => 1.0,
    }
}

impl CostModel for Roofline {
    fn device(&self) -> &Device {
        &self.compute.device
    }

    fn identity(&self) -> Option<String> {
        Some(format!("{self:?}"))
    }

    fn kernel(&self, kernel: &Kernel) -> Price {
        let constants = &self.compute.constants;
        let collective_s = match kernel.kind {
            KernelKind::Collective => constants.collective_dispatch_s,
            _ => 0.0,
        };
        Price { seconds: self.compute.kernel(kernel).seconds, issue_s: constants.dispatch_s + collective_s }
    }

    fn update_kernel(&self, kernel: &Kernel) -> Price {
        Price { seconds: self.updates.kernel(kernel).seconds, ..self.kernel(kernel) }
    }

    fn compute_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType) -> f64 {
        let written = result.bytes() as f64;
        let read: f64 = operands.iter().map(|t| t.bytes() as f64).sum();
        let largest = operands.iter().map(|t| t.bytes()).max().unwrap_or(0) as f64;
        match op {
            // Leaves exist already; the others are folded into their readers.
            Op::Parameter(_) | Op::Input(_) | Op::Constant(_) | Op::Iota(_) => 0.0,
            Op::BroadcastInDim(_) | Op::Reshape(_) => 0.0,
            // Scalars of a step.
            Op::Microbatches(_) => 0.0,
            // The sum over its ops.
            Op::Composite(composite) => composite.body(operands).map_or(0.0, |body| {
                let graph = &body.graph;
                let inside = graph.values().filter(|&v| !body.is_constant(v));
                inside.map(|v| self.compute_s(&graph.node(v).op, &graph.operand_types(v), graph.ty(v))).sum()
            }),
            // `collective_s` prices collectives; a device knows its axis index.
            Op::Collective(_) | Op::AxisIndex(_) => 0.0,
            Op::HostCopy(_) => self.compute.host_copy_s(written),
            op if converts_to_eight_bits(op, operands) => {
                self.launched(self.memory_s(PASSES_TO_EIGHT_BITS as f64 * (largest + written)))
            }
            // One read and one write. Further operands are mostly broadcasts or come from the same kernel.
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Convert(_) => {
                self.fused_s(largest + written)
            }
            Op::BitcastConvert(_) | Op::ReducePrecision(_) => self.fused_s(largest + written),
            Op::Threefry(_) => self.memory_s(THREEFRY_TENSORS * written) + self.fused_s(written),
            // Matmuls read operands in either order, and other readers index through a transpose, a slice or a pad.
            Op::Transpose(_) | Op::Reverse(_) | Op::Roll(_) | Op::Slice(_) | Op::Pad(_) => self.fused_s(2.0 * written),
            Op::Reduce(_) | Op::Cumulative(_) => self.launched(self.memory_s(read + written)),
            // A radix sort: each byte of a key is a pass that reads and writes keys and positions.
            Op::ArgSort(_) => {
                let passes: u64 = operands.iter().map(|t| t.dtype.bytes()).sum();
                passes as f64 * self.launched(self.memory_s(2.0 * (largest + written)))
            }
            Op::Concatenate(_) => self.launched(self.memory_s(2.0 * written)),
            Op::DotGeneral(dot) => {
                // In f64, since the count of a matmul too large for any device does not fit into 64 bits.
                let lhs = operands.first();
                let terms: f64 = lhs.map_or(0.0, |t| dot.lhs_contract.iter().map(|&d| t.shape[d] as f64).product());
                let flop = 2.0 * terms * result.elements() as f64;
                self.launched(self.matmul_s(flop, read + written, lhs.map_or(result.dtype, |t| t.dtype)))
            }
            // A convolution is a matmul over the elements of its windows, and a grouped product one for each group.
            Op::Convolution(_) | Op::GroupedDot(_) | Op::GroupedOuter(_) => {
                let dtype = operands.first().map_or(result.dtype, |t| t.dtype);
                self.launched(self.matmul_s(op.flop(operands, result) as f64, read + written, dtype))
            }
            // Windows overlap in caches; memory sees each element once.
            Op::ReduceWindow(_) | Op::SelectAndScatter(_) => self.launched(self.memory_s(read + written)),
            // The rows read, not the table that they are read from.
            Op::Gather(_) => {
                let indices = operands.get(1).map_or(0, |t| t.bytes()) as f64;
                self.launched(self.memory_s(indices + 2.0 * written))
            }
            // Zeros everywhere. Then each update is read, and its target read and written.
            Op::ScatterAdd(_) => {
                let indices = operands.first().map_or(0, |t| t.bytes()) as f64;
                let updates = operands.get(1).map_or(0, |t| t.bytes()) as f64;
                self.launched(self.memory_s(written + indices + 3.0 * updates))
            }
            // The tensor is copied, then updated likewise.
            Op::Scatter(_) => {
                let [indices, updates] = [1, 2].map(|i| operands.get(i).map_or(0, |t| t.bytes()) as f64);
                self.launched(self.memory_s(2.0 * written + indices + 3.0 * updates))
            }
        }
    }

    fn issue_s(&self, op: &Op, operands: &[&TensorType]) -> f64 {
        launches(op, operands) * self.compute.constants.dispatch_s
    }

    fn queued_kernels(&self) -> usize {
        match self.compute.constants.queued_kernels {
            most if most >= 1.0 => most as usize,
            _ => usize::MAX,
        }
    }

    /// NCCL's kernels occupy a multiprocessor for each channel: 24 in an all-gather on eight H100 (NVIDIA developer forum, thread 337991,
    /// 2025: a product beside it loses what they have, and more where it filled the device).
    fn sending_part(&self) -> f64 {
        const CHANNELS: f64 = 24.0;
        match self.compute.device.multiprocessors {
            Some(all) if self.compute.device.kind == DeviceKind::Gpu => (CHANNELS / f64::from(all.max(1))).min(0.5),
            _ => 0.0,
        }
    }

    fn waiting_s(&self, devices: u64) -> f64 {
        self.compute.waiting_s(devices)
    }

    fn collective_s(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> f64 {
        if link.devices <= 1 {
            return 0.0;
        }
        let bytes = operand_bytes.max(result_bytes);
        let efficiency = self.compute.constants.collective_efficiency;
        let seconds = |operation, bytes| collective::best(operation, bytes, link).seconds / efficiency;
        match collective {
            Collective::AllReduce { .. } => seconds(Operation::AllReduce, bytes),
            Collective::ReduceScatter { .. } => seconds(Operation::ReduceScatter, bytes),
            Collective::AllGather { .. } => seconds(Operation::AllGather, bytes),
            Collective::AllToAll { .. } => seconds(Operation::AllToAll, bytes),
            // Every device sends everything to one other. A ring between nodes has the network for one device of a
            // node. If several devices of a node send to other nodes, they share it.
            Collective::Shift { by, .. } => {
                let by = by % link.devices;
                let leave_node = by.min(link.devices - by).min(link.devices_on_node);
                let sharing = if link.nodes > 1 { leave_node.max(1) } else { 1 };
                seconds(Operation::SendReceive, bytes.saturating_mul(sharing))
            }
            // Only the edges are sent, to neighbours, all at once. The block is copied.
            Collective::Halo { .. } => {
                let edges = result_bytes.saturating_sub(operand_bytes);
                let sent_s = seconds(Operation::SendReceive, edges);
                sent_s + self.fused_s(2.0 * result_bytes as f64)
            }
            // The slice is read and written, in about half the cases by the kernel that reads it.
            Collective::LocalSlice { .. } => self.fused_s(2.0 * result_bytes as f64),
            Collective::KeepFirst { .. } => self.fused_s(2.0 * result_bytes as f64),
        }
    }

    fn transfer_s(&self, bytes: u64, path: &TransferPath) -> f64 {
        path.transfer_s(bytes)
    }
}

#[cfg(test)]
#[path = "roofline_tests.rs"]
mod tests;
