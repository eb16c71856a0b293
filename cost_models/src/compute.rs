//! Predicts the seconds of a kernel on a device, from its shape.
//!
//! A matmul is cut into tiles that run in waves over the device's multiprocessors. A half-empty last wave and
//! rows that do not fill a tile cost as much as full ones. The model takes the best of the tile sizes that
//! libraries have, and splits the contraction if the tiles alone leave multiprocessors idle. Other kernels take
//! the time of their memory traffic or of their scalar operations. The host takes time to issue each kernel,
//! which dominates small ones.

use crate::catalogue;
use crate::fitted::flash_2;
use crate::kernels::{Attention, Kernel, KernelKind, Matmul};
use crate::roofline::peak_flops;
pub use altiplano_ir::cluster::Constants;
use altiplano_ir::cluster::{Architecture, Device, DeviceKind};
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::AttentionKernels;
use serde::{Deserialize, Serialize};

/// How a device generation tiles the result of a matmul. The sizes are those of CUTLASS's default kernels: 256 x 128,
/// 128 x 128, 128 x 64 and 64 x 64, each also turned.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tiling {
    /// The fraction of the best rate that each size reaches, since smaller tiles load more per multiplication.
    parts: [f64; 4],
    /// The start-up cost of a tile, in elements of the contraction: it loads operands and does not multiply yet.
    fill: f64,
    /// The bytes moved to add up a result whose contraction is split, relative to one f32 read and one written for
    /// each cut.
    joins: f64,
    /// The fraction of the memory bandwidth at which operands are loaded. `None`: as in other kernels.
    loads: Option<f64>,
    /// The same for fused attention, of which short rows wait for memory.
    attention_loads: Option<f64>,
}

/// Sizes of tiles with the index of their part.
const SIZES: [(u64, u64, usize); 6] =
    [(256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2), (64, 64, 3)];

/// Until sm_89. The parts derive from the ratio of multiplications to loads, `tm tn / (tm + tn)`, relative to that of
/// the largest tile. Its exponent fits NVIDIA's figures for tile sizes (Matrix Multiplication Background, 2023: 256x128
/// as 1, 128x128 slightly below, 64x64 about two thirds).
const AMPERE: Tiling =
    Tiling { parts: [1.0, 0.93, 0.8, 0.66], fill: 64.0, joins: 1.0, loads: None, attention_loads: None };

/// From sm_90 on, whose units load tiles themselves, so that 64 columns suffice. Fitted to half of the bf16 products
/// published with NVIDIA's AIConfigurator (2025; H100, 4,522 rows of at least 128). The median errors of the halves are
/// 4.6 and 4.6 %.
const HOPPER: Tiling =
    Tiling { parts: [1.0, 0.99, 0.99, 0.72], fill: 128.0, joins: 3.0, loads: Some(0.8), attention_loads: Some(0.42) };

/// From sm_100 on. Same source (B200, 4,513 rows), median errors of 6.5 and 6.6 %.
const BLACKWELL: Tiling = Tiling { fill: 50.0, joins: 4.5, loads: Some(0.7), attention_loads: Some(0.3), ..HOPPER };

impl Tiling {
    fn of(generation: Option<Architecture>) -> Tiling {
        match generation {
            Some(Architecture::Nvidia(90..100)) => HOPPER,
            Some(Architecture::Nvidia(100..)) => BLACKWELL,
            _ => AMPERE,
        }
    }
}

/// Seconds before fused attention multiplies and after, beyond those of any kernel. The shortest kernels of the tables
/// named in [`crate::fitted`] take 9 us on an H100, 12 on an A100 and 8 to 11 on a B200.
const ATTENTION_START_S: f64 = 6e-6;

/// The seconds of an op's kernel, and their cause.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    pub seconds: f64,
    pub bound: Bound,
}

/// The resource that bounds a kernel's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Arithmetic,
    Memory,
    Launch,
}

/// Predicts the time of kernels on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Compute {
    pub device: Device,
    pub constants: Constants,
}

impl Compute {
    pub fn new(device: Device) -> Self {
        let mut constants = device.constants.unwrap_or_else(|| catalogue::constants_of(&device));
        // A power limit lowers the clock of the multiplying units. The memory has a separate clock.
        let clock = device.clock_part();
        constants.matmul_efficiency *= clock * constants.sustained_efficiency;
        constants.attention_efficiency *= clock;
        constants.attention_backward_efficiency *= clock;
        constants.vector_flops *= clock;
        Compute { device, constants }
    }

    /// Prices of kernels that are measured alone, outside any step.
    pub fn alone(device: Device, constants: Constants) -> Self {
        Compute { device, constants }
    }

    /// Prices of kernels in steps, with constants other than the device's.
    pub fn in_steps(device: Device, mut constants: Constants) -> Self {
        constants.matmul_efficiency *= constants.sustained_efficiency;
        Compute { device, constants }
    }

    /// The same prices for kernels that sum gradients and update parameters.
    pub fn of_updates(&self) -> Compute {
        let constants = Constants { memory_efficiency: self.constants.update_efficiency, ..self.constants };
        Compute { device: self.device.clone(), constants }
    }

    /// Seconds of a kernel on the device after it is issued and its operands have arrived. Collectives are
    /// priced elsewhere, so they take 0 here.
    pub fn kernel(&self, kernel: &Kernel) -> KernelTime {
        let moved = (kernel.read_bytes + kernel.written_bytes) as f64;
        let memory_s = moved / (self.device.memory_bytes_per_s * self.memory_part(&kernel.kind));
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

    /// The fraction of the memory bandwidth that a kernel of this kind reaches.
    pub fn memory_part(&self, kind: &KernelKind) -> f64 {
        let tiling = Tiling::of(self.device.generation());
        let own = match kind {
            KernelKind::Matmul(_) => tiling.loads,
            KernelKind::Attention(_) => tiling.attention_loads,
            _ => None,
        };
        own.unwrap_or(self.constants.memory_efficiency)
    }

    /// Seconds that the first of `devices` waits for the last at a synchronisation.
    pub fn waiting_s(&self, devices: u64) -> f64 {
        match devices {
            0..=1 => 0.0,
            n => self.constants.skew_s * n as f64 / (n as f64 + 1.0),
        }
    }

    /// Seconds to read and write `bytes`.
    pub fn memory_s(&self, bytes: f64) -> f64 {
        bytes / (self.device.memory_bytes_per_s * self.constants.memory_efficiency)
    }

    /// Seconds to copy `bytes` from or to the host's memory. For CPU workers, that is their only memory.
    pub fn host_copy_s(&self, bytes: f64) -> f64 {
        match (self.device.host_bytes_per_s, self.device.kind) {
            (Some(rate), _) => bytes / rate,
            (None, DeviceKind::Cpu) => self.memory_s(2.0 * bytes),
            (None, DeviceKind::Gpu) => bytes / catalogue::host_bytes_per_s(&self.device.name),
        }
    }

    /// Seconds of the matrix products in fused attention. The time of a row of queries is proportional to the
    /// keys in the tiles that it sees, plus [`Constants::attention_fill`]. The additional time is spent on
    /// loads and stores, so it scales with the bytes of the type and not with its multiplication rate.
    pub fn attention_s(&self, attention: &Attention) -> f64 {
        let Attention { flop, share, keys, tiles, backward, dtype, software } = *attention;
        if share <= 0.0 {
            return 0.0;
        }
        let [forward_part, backward_part, fill] = self.attention(software);
        let efficiency = if backward { backward_part } else { forward_part };
        let peak = peak_flops(&self.device, dtype);
        let of_halves =
            [DType::F16, DType::BF16].map(|half| peak_flops(&self.device, half)).into_iter().fold(peak, f64::max);
        let width = dtype.bytes() as f64 / DType::BF16.bytes() as f64;
        let row_s = width * fill / keys.max(1) as f64 / of_halves;
        let spread_s = flop / efficiency * (share / peak + row_s);
        // A tile runs on one multiprocessor. The last tile of a causal mask sees all keys, and is started first.
        let slots = self.constants.multiprocessors;
        if slots < 1.0 {
            return spread_s;
        }
        let of_a_tile = slots / tiles.max(1) as f64;
        let longest_s = flop / efficiency * (1.0 / peak + row_s) * of_a_tile;
        let tail_s = self.constants.attention_tail * (spread_s * of_a_tile).min(spread_s);
        longest_s.max(spread_s + tail_s) + ATTENTION_START_S
    }

    /// The fractions of the peak rate that a fused attention kernel reaches forward and backward, and the fixed
    /// cost of a row in keys. No kernel is faster than the device's constants.
    pub fn attention(&self, software: AttentionKernels) -> [f64; 3] {
        let c = &self.constants;
        let clock = self.device.clock_part();
        let newest = [c.attention_efficiency, c.attention_backward_efficiency, c.attention_fill];
        let older = match software {
            AttentionKernels::Newest | AttentionKernels::Cudnn => None,
            AttentionKernels::Flash2 => flash_2(self.device.generation()),
        };
        let older = older.map(|[forward, backward, fill]| [clock * forward, clock * backward, fill]);
        older.filter(|older| older[0] < newest[0]).unwrap_or(newest)
    }

    /// Seconds of a matmul's multiplications, with the best of the tiles of the device's generation.
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
        let Tiling { parts, fill, joins, .. } = Tiling::of(self.device.generation());
        let tiled = |&(tm, tn, part): &(u64, u64, usize)| {
            let tiles = batch as f64 * m.div_ceil(tm) as f64 * n.div_ceil(tn) as f64;
            // If there are few tiles, each contraction is split to occupy all multiprocessors.
            let cuts = (slots / tiles).floor().min(k as f64 / (4.0 * fill)).max(1.0);
            let full = tiles * cuts / slots;
            let waves = (full + c.tail_loss * (full.ceil() - full)).max(1.0);
            let joined = if cuts > 1.0 { self.memory_s(joins * 8.0 * cuts * (batch * m * n) as f64) } else { 0.0 };
            let per_tile = 2.0 * (tm * tn) as f64 * (k as f64 / cuts + fill);
            waves * per_tile / (rate * parts[part] / slots) + joined
        };
        SIZES.iter().map(tiled).fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
#[path = "compute_tests.rs"]
mod tests;
