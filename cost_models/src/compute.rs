//! Seconds of a kernel on a device, from its shape.
//!
//! A matmul is cut into tiles that run in waves over the device's multiprocessors, so a last wave that is half empty and
//! rows that do not fill a tile cost as much as full ones; the best of the tile sizes that libraries have is taken, with the
//! contraction cut too where tiles alone leave multiprocessors idle. Everything else takes as long as its memory traffic or
//! its scalar operations. The host needs time to issue each kernel, which is what small ones take.

use crate::catalogue;
use crate::fitted::flash_2;
use crate::kernels::{Attention, Kernel, KernelKind, Matmul};
use crate::roofline::peak_flops;
pub use altiplano_ir::cluster::Constants;
use altiplano_ir::cluster::{Device, DeviceKind};
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::AttentionKernels;
use serde::{Deserialize, Serialize};

/// A tile of a matmul's result, and what part of the best rate it reaches: smaller tiles load more for each multiplication.
/// The sizes are those of CUTLASS's default kernels; the fractions are the ratio of multiplications to loads,
/// `tm tn / (tm + tn)`, relative to the largest's, to the power that fits NVIDIA's figures for tile sizes (Matrix
/// Multiplication Background, 2023: 256x128 as 1, 128x128 slightly below, 64x64 about two thirds).
const TILES: [(u64, u64, f64); 6] =
    [(256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.66)];

/// Elements of the contraction that a tile needs to get going, in which it loads and does not multiply.
const FILL: f64 = 64.0;

/// Seconds of an op's kernel, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    pub seconds: f64,
    pub bound: Bound,
}

/// What a kernel waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Arithmetic,
    Memory,
    Launch,
}

/// Prices kernels on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Compute {
    pub device: Device,
    pub constants: Constants,
}

impl Compute {
    pub fn new(device: Device) -> Self {
        let mut constants = device.constants.unwrap_or_else(|| catalogue::constants_of(&device));
        // What multiplies runs at a lower clock within a power limit; memory has a clock of its own.
        let clock = device.clock_part();
        constants.matmul_efficiency *= clock;
        constants.attention_efficiency *= clock;
        constants.attention_backward_efficiency *= clock;
        constants.vector_flops *= clock;
        Compute { device, constants }
    }

    /// The same for kernels that sum gradients and update parameters.
    pub fn of_updates(&self) -> Compute {
        let constants = Constants { memory_efficiency: self.constants.update_efficiency, ..self.constants };
        Compute { device: self.device.clone(), constants }
    }

    /// Seconds of a kernel on the device, once it is issued and its operands are there. Collectives are priced elsewhere: 0.
    pub fn kernel(&self, kernel: &Kernel) -> KernelTime {
        let memory_s = self.memory_s((kernel.read_bytes + kernel.written_bytes) as f64);
        let arithmetic_s = match kernel.kind {
            KernelKind::Matmul(matmul) => self.matmul_s(&matmul),
            KernelKind::Convolution { flop, dtype } => {
                flop / (peak_flops(&self.device, dtype) * self.constants.matmul_efficiency)
            }
            KernelKind::Attention(attention) => self.attention_s(&attention),
            KernelKind::Fused { .. } if self.constants.vector_flops == 0.0 => 0.0,
            KernelKind::Fused { operations } => operations / self.constants.vector_flops,
            KernelKind::Indexed => 0.0,
            KernelKind::Sort { passes } => (passes as f64 - 1.0) * (memory_s + self.device.launch_s),
            KernelKind::Collective => return KernelTime { seconds: 0.0, bound: Bound::Launch },
            KernelKind::HostCopy(_) => {
                let seconds = self.host_copy_s(kernel.read_bytes as f64) + self.device.launch_s;
                return KernelTime { seconds, bound: Bound::Memory };
            }
        };
        let memory_s = if matches!(kernel.kind, KernelKind::Sort { .. }) { memory_s + arithmetic_s } else { memory_s };
        let busy_s = memory_s.max(arithmetic_s);
        let bound = match () {
            _ if busy_s < self.device.launch_s => Bound::Launch,
            _ if memory_s >= arithmetic_s => Bound::Memory,
            _ => Bound::Arithmetic,
        };
        KernelTime { seconds: busy_s + self.device.launch_s, bound }
    }

    /// Seconds that the first of `devices` waits for the last where they meet.
    pub fn waiting_s(&self, devices: u64) -> f64 {
        match devices {
            0..=1 => 0.0,
            n => self.constants.skew_s * n as f64 / (n as f64 + 1.0),
        }
    }

    /// Seconds for `bytes` read and written.
    pub fn memory_s(&self, bytes: f64) -> f64 {
        bytes / (self.device.memory_bytes_per_s * self.constants.memory_efficiency)
    }

    /// Seconds for `bytes` from the host's memory, or to it. Workers on cores have no other memory than that.
    pub fn host_copy_s(&self, bytes: f64) -> f64 {
        match (self.device.host_bytes_per_s, self.device.kind) {
            (Some(rate), _) => bytes / rate,
            (None, DeviceKind::Cpu) => self.memory_s(2.0 * bytes),
            (None, DeviceKind::Gpu) => bytes / catalogue::host_bytes_per_s(&self.device.name),
        }
    }

    /// Seconds that the products of fused attention take. A row of queries takes as long as the keys in the tiles that it sees, and
    /// [`Constants::attention_fill`] more. In these a tile waits for what it loads and stores, so that wider types take longer by their
    /// bytes, and not by how much slower they are multiplied.
    pub fn attention_s(&self, attention: &Attention) -> f64 {
        let Attention { flop, share, keys, backward, dtype, software } = *attention;
        if share <= 0.0 {
            return 0.0;
        }
        let [forward_part, backward_part, fill] = self.attention(software);
        let efficiency = if backward { backward_part } else { forward_part };
        let peak = peak_flops(&self.device, dtype);
        let of_halves =
            [DType::F16, DType::BF16].map(|half| peak_flops(&self.device, half)).into_iter().fold(peak, f64::max);
        let width = dtype.bytes() as f64 / DType::BF16.bytes() as f64;
        flop / efficiency * (share / peak + width * fill / keys.max(1) as f64 / of_halves)
    }

    /// Fused attention of some software: the parts of the peak rate that it reaches forward and backward, and the keys that a row
    /// takes as long as beyond those it sees. No software is faster than the device's constants say.
    pub fn attention(&self, software: AttentionKernels) -> [f64; 3] {
        let c = &self.constants;
        let clock = self.device.clock_part();
        let newest = [c.attention_efficiency, c.attention_backward_efficiency, c.attention_fill];
        let older = match software {
            AttentionKernels::Newest => None,
            AttentionKernels::Flash2 => flash_2(self.device.generation()),
        };
        let older = older.map(|[forward, backward, fill]| [clock * forward, clock * backward, fill]);
        older.filter(|older| older[0] < newest[0]).unwrap_or(newest)
    }

    /// Seconds that a matmul's multiplications take, in the best of [`TILES`].
    pub fn matmul_s(&self, matmul: &Matmul) -> f64 {
        let Matmul { batch, m, n, k, dtype, aligned } = *matmul;
        let c = &self.constants;
        if batch == 0 || m == 0 || n == 0 || k == 0 {
            return 0.0;
        }
        let aligned = (1.0 - c.misaligned_loss).powi(3 - aligned.clamp(1, 8).ilog2() as i32);
        let rate = peak_flops(&self.device, dtype) * c.matmul_efficiency * aligned;
        let slots = c.multiprocessors;
        if slots < 1.0 {
            return matmul.flop() / rate;
        }
        let tiled = |&(tm, tn, part): &(u64, u64, f64)| {
            let tiles = batch as f64 * m.div_ceil(tm) as f64 * n.div_ceil(tn) as f64;
            // Of few tiles, each contraction is cut so that all multiprocessors work.
            let cuts = (slots / tiles).floor().min(k as f64 / (4.0 * FILL)).max(1.0);
            let full = tiles * cuts / slots;
            let waves = (full + c.tail_loss * (full.ceil() - full)).max(1.0);
            let joined = if cuts > 1.0 { self.memory_s(8.0 * cuts * (batch * m * n) as f64) } else { 0.0 };
            let per_tile = 2.0 * (tm * tn) as f64 * (k as f64 / cuts + FILL);
            waves * per_tile / (rate * part / slots) + joined
        };
        TILES.iter().map(tiled).fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
#[path = "compute_tests.rs"]
mod tests;
