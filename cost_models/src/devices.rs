//! Known devices with the figures of their vendors.
//!
//! Rates are dense (no structured sparsity) and peak. The cost model decides which share of them is reached in
//! practice. Totals of a machine in a datasheet are divided by the number of devices.

use crate::fitted::{FITTED, with_attention_of};
use altiplano_ir::cluster::Architecture::{self, Amd, Nvidia};
use altiplano_ir::cluster::{Constants, Device, DeviceKind, Reserved};
use altiplano_ir::dtype::DType::{self, BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F16, F32, F64};

/// Seconds that a kernel on a GPU takes at least: it starts, fills the device and drains it. This is an estimate; no
/// vendor states it.
pub const GPU_LAUNCH_S: f64 = 3e-6;

/// Bytes of a CUDA or HIP context with the code of its kernels and the workspaces of its libraries. `nvidia-smi` shows
/// 450 to 600 MiB for a process of PyTorch that has multiplied two matrices.
const CONTEXT_BYTES: u64 = 500_000_000;

/// Bytes of NCCL's or RCCL's buffers: 16 to 32 channels with buffers of 4 to 8 MiB for each of several peers and
/// protocols (NCCL user guide, NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS).
const COMMUNICATION_BYTES: u64 = 600_000_000;

/// Share of the memory that a caching allocator holds and cannot give out.
const ALLOCATOR_PART: f64 = 0.02;

/// A device of the catalogue. `gb` is the memory that its driver reports, in decimal gigabytes; vendors advertise
/// binary ones.
struct DeviceFigures {
    name: &'static str,
    /// `None` if it is no GPU.
    architecture: Option<Architecture>,
    gb: f64,
    gb_per_s: f64,
    /// TFLOP/s by element type of matmul operands. `f32` is IEEE single precision, not TF32, which rounds its operands.
    tflops: &'static [(DType, f64)],
    /// Share of the peak that matmuls of training sizes reach, if measured.
    matmul_efficiency: f64,
    launch_s: f64,
    /// MiB of all dies together.
    l2_mib: u64,
    multiprocessors: u32,
    /// Thermal design power; 0 if unknown.
    watts: f64,
    /// Generation of its NVLink, 0 for a GPU without NVLink; `None` if it is no GPU.
    nvlink: Option<u32>,
}

pub use altiplano_ir::cluster::MATMUL_EFFICIENCY;

// Caches and multiprocessors: NVIDIA's architecture whitepapers (Volta 2017, Ampere 2020, Hopper 2022, Ada 2022), for
// the B200 its device properties (148 multiprocessors, 126 MB), and AMD's table of hardware specifications (ROCm
// documentation).
//
// Memory: the total that the driver reports (`total_memory` of PyTorch's device properties, or `nvidia-smi` where that
// is not published). V100 16160 MiB and 34,089,730,048 bytes; A100 40,442 MiB and 85,097,971,712; H100 81,559 MiB; H200
// 143,771 MiB; B200 183,359 MiB; L40S 47,697 MB with ECC; RTX 4090 25,393,692,672; MI300X 206,141,652,992; MI250X
// 68,702,699,520 a die.
//
// Watts: the power limits in the same vendors' datasheets; for the MI250X, half of a module's 560 W.
const DEVICES: &[DeviceFigures] = &[
    // NVIDIA Tesla V100 datasheet (2020), SXM2: 125 TFLOP/s tensor, 15.7 single, 7.8 double; HBM2 at 900 GB/s. No bf16.
    // Matmuls of GPT layers run at 72 to 88 TFLOP/s (Aceso's V100 profiles, 2024, SuperScaler repository).
    DeviceFigures {
        name: "V100-SXM2-16GB",
        architecture: Some(Nvidia(70)),
        gb: 16.945,
        gb_per_s: 900.0,
        tflops: &[(F64, 7.8), (F32, 15.7), (F16, 125.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 6,
        multiprocessors: 80,
        watts: 300.0,
        nvlink: Some(2),
    },
    DeviceFigures {
        name: "V100-SXM2-32GB",
        architecture: Some(Nvidia(70)),
        gb: 34.090,
        gb_per_s: 900.0,
        tflops: &[(F64, 7.8), (F32, 15.7), (F16, 125.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 6,
        multiprocessors: 80,
        watts: 300.0,
        nvlink: Some(2),
    },
    // NVIDIA DGX-2 datasheet (2019): the V100 on its other board, at the same rates.
    DeviceFigures {
        name: "V100-SXM3-32GB",
        architecture: Some(Nvidia(70)),
        gb: 34.090,
        gb_per_s: 900.0,
        tflops: &[(F64, 7.8), (F32, 15.7), (F16, 125.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 6,
        multiprocessors: 80,
        watts: 350.0,
        nvlink: Some(2),
    },
    // NVIDIA A100 datasheet (2021): 312 TFLOP/s f16 and bf16 tensor, 19.5 f32, 19.5 f64 tensor; HBM2 at 1555 GB/s (40 GB),
    // HBM2e at 2039 (80 GB SXM) and 1935 (80 GB PCIe).
    // Matmuls of GPT layers run at 235 to 255 TFLOP/s (EleutherAI cookbook, benchmarks/sizing).
    DeviceFigures {
        name: "A100-SXM-40GB",
        architecture: Some(Nvidia(80)),
        gb: 42.406,
        gb_per_s: 1555.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.8,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 40,
        multiprocessors: 108,
        watts: 400.0,
        nvlink: Some(3),
    },
    DeviceFigures {
        name: "A100-SXM-80GB",
        architecture: Some(Nvidia(80)),
        gb: 85.098,
        gb_per_s: 2039.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.8,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 40,
        multiprocessors: 108,
        watts: 400.0,
        nvlink: Some(3),
    },
    DeviceFigures {
        name: "A100-PCIe",
        architecture: Some(Nvidia(80)),
        gb: 85.098,
        gb_per_s: 1935.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.75,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 40,
        multiprocessors: 108,
        watts: 300.0,
        nvlink: Some(0),
    },
    // NVIDIA A100 40GB PCIe product brief (2020): the same rates, HBM2 at 1555 GB/s.
    DeviceFigures {
        name: "A100-PCIe-40GB",
        architecture: Some(Nvidia(80)),
        gb: 42.406,
        gb_per_s: 1555.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.75,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 40,
        multiprocessors: 108,
        watts: 250.0,
        nvlink: Some(0),
    },
    // NVIDIA H100 datasheet (2023), SXM: 1979 TFLOP/s f16 and bf16 with sparsity, so 989.5 dense, and twice that for 8-bit
    // floats; 67 f32, 67 f64 tensor; HBM3 at 3.35 TB/s.
    // The best matmul shape reaches 0.80 (Bekman, ml-engineering, accelerator tables), common ones less under its power limit.
    DeviceFigures {
        name: "H100-SXM",
        architecture: Some(Nvidia(90)),
        gb: 85.520,
        gb_per_s: 3350.0,
        tflops: &[(F64, 67.0), (F32, 67.0), (F16, 989.5), (BF16, 989.5), (F8E4M3FN, 1979.0), (F8E5M2, 1979.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 50,
        multiprocessors: 132,
        watts: 700.0,
        nvlink: Some(4),
    },
    // NVIDIA H100 datasheet (2023), PCIe: 1513 TFLOP/s f16 and bf16 with sparsity, twice that for 8-bit floats; 51 f32 and f64
    // tensor; HBM2e at 2 TB/s.
    DeviceFigures {
        name: "H100-PCIe",
        architecture: Some(Nvidia(90)),
        gb: 85.520,
        gb_per_s: 2000.0,
        tflops: &[(F64, 51.0), (F32, 51.0), (F16, 756.5), (BF16, 756.5), (F8E4M3FN, 1513.0), (F8E5M2, 1513.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 50,
        multiprocessors: 114,
        watts: 350.0,
        nvlink: Some(0),
    },
    // NVIDIA H200 datasheet (2024), SXM: the H100's rates; 141 GB HBM3e at 4.8 TB/s.
    DeviceFigures {
        name: "H200",
        architecture: Some(Nvidia(90)),
        gb: 150.755,
        gb_per_s: 4800.0,
        tflops: &[(F64, 67.0), (F32, 67.0), (F16, 989.5), (BF16, 989.5), (F8E4M3FN, 1979.0), (F8E5M2, 1979.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 50,
        multiprocessors: 132,
        watts: 700.0,
        nvlink: Some(4),
    },
    // NVIDIA HGX B200 datasheet (2025), eight devices: 36 PFLOP/s f16 and bf16 with sparsity, 72 for 8-bit floats, 600 TFLOP/s f32,
    // 296 f64, 1.4 TB HBM3e at 62 TB/s.
    DeviceFigures {
        name: "B200",
        architecture: Some(Nvidia(100)),
        gb: 192.266,
        gb_per_s: 7750.0,
        tflops: &[(F64, 37.0), (F32, 75.0), (F16, 2250.0), (BF16, 2250.0), (F8E4M3FN, 4500.0), (F8E5M2, 4500.0)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 126,
        multiprocessors: 148,
        watts: 1000.0,
        nvlink: Some(5),
    },
    // NVIDIA L40S datasheet (2023): 362 TFLOP/s f16 and bf16 dense, 733 for 8-bit floats; 91.6 f32; f64 at 1/64 of that;
    // GDDR6 at 864 GB/s.
    DeviceFigures {
        name: "L40S",
        architecture: Some(Nvidia(89)),
        gb: 47.697,
        gb_per_s: 864.0,
        tflops: &[(F64, 1.43), (F32, 91.6), (F16, 362.0), (BF16, 362.0), (F8E4M3FN, 733.0), (F8E5M2, 733.0)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 96,
        multiprocessors: 142,
        watts: 350.0,
        nvlink: Some(0),
    },
    // NVIDIA Ada GPU architecture whitepaper (2022), RTX 4090: 165.2 TFLOP/s f16 and bf16 tensor with f32 accumulation,
    // 330.3 for 8-bit floats, 82.6 f32, f64 at 1/64 of that; GDDR6X at 1008 GB/s.
    DeviceFigures {
        name: "RTX-4090",
        architecture: Some(Nvidia(89)),
        gb: 25.394,
        gb_per_s: 1008.0,
        tflops: &[(F64, 1.29), (F32, 82.6), (F16, 165.2), (BF16, 165.2), (F8E4M3FN, 330.3), (F8E5M2, 330.3)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 72,
        multiprocessors: 128,
        watts: 450.0,
        nvlink: Some(0),
    },
    // AMD Instinct MI300X datasheet (2023): 1307.4 TFLOP/s f16 and bf16 matrix, 2614.9 for 8-bit floats (of its `fnuz` kind),
    // 163.4 f32 and f64 matrix; HBM3 at 5.3 TB/s.
    // The best matmul shape reaches 0.51 (Bekman, ml-engineering, accelerator tables).
    DeviceFigures {
        name: "MI300X",
        architecture: Some(Amd(0x942)),
        gb: 206.142,
        gb_per_s: 5300.0,
        tflops: &[
            (F64, 163.4),
            (F32, 163.4),
            (F16, 1307.4),
            (BF16, 1307.4),
            (F8E4M3FNUZ, 2614.9),
            (F8E5M2FNUZ, 2614.9),
        ],
        matmul_efficiency: 0.5,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 32,
        multiprocessors: 304,
        watts: 750.0,
        nvlink: Some(0),
    },
    // AMD Instinct MI250X datasheet (2021), halved for one of its two dies, which are devices of their own: 383 TFLOP/s f16 and
    // bf16 matrix, 95.7 f32 and f64 matrix, 128 GB HBM2e at 3.2768 TB/s.
    DeviceFigures {
        name: "MI250X-GCD",
        architecture: Some(Amd(0x90a)),
        gb: 68.703,
        gb_per_s: 1638.4,
        tflops: &[(F64, 47.85), (F32, 47.85), (F16, 191.5), (BF16, 191.5)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
        l2_mib: 8,
        multiprocessors: 110,
        watts: 280.0,
        nvlink: Some(0),
    },
    // One worker of a desktop or a server: about a core with 256-bit fused multiply-adds at 3 GHz (2 FMA units x 8
    // lanes x 2 operations x 3e9 = 96e9 at most) and its share of memory. The figures are fixed, not measured, so plans
    // are the same everywhere.
    DeviceFigures {
        name: "cpu-worker",
        architecture: None,
        gb: 6.442450944,
        gb_per_s: 8.0,
        tflops: &[(F64, 0.025), (F32, 0.05)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: 1e-6,
        l2_mib: 1,
        multiprocessors: 1,
        watts: 0.0,
        nvlink: None,
    },
];

impl DeviceFigures {
    fn device(&self) -> Device {
        let allocator_bytes = (ALLOCATOR_PART * self.gb * 1e9) as u64;
        let reserved =
            Reserved { context_bytes: CONTEXT_BYTES, communication_bytes: COMMUNICATION_BYTES, allocator_bytes };
        Device {
            name: self.name.to_string(),
            kind: if self.nvlink.is_some() { DeviceKind::Gpu } else { DeviceKind::Cpu },
            memory_bytes: (self.gb * 1e9).round() as u64,
            memory_bytes_per_s: self.gb_per_s * 1e9,
            peak_flops: self.tflops.iter().map(|&(dtype, tflops)| (dtype, tflops * 1e12)).collect(),
            launch_s: self.launch_s,
            l2_bytes: Some(self.l2_mib << 20),
            constants: None,
            host_bytes_per_s: None,
            multiprocessors: Some(self.multiprocessors),
            watts: (self.watts > 0.0).then_some(self.watts),
            power_limit_watts: None,
            architecture: self.architecture,
            fused_attention: None,
            reserved: self.nvlink.map(|_| reserved),
        }
    }
}

/// The device with this exact name.
pub fn device(name: &str) -> Option<Device> {
    DEVICES.iter().find(|d| d.name == name).map(DeviceFigures::device)
}

/// The share of the peak rate that matmuls reach on the device with this name; [`MATMUL_EFFICIENCY`] if unknown.
pub fn matmul_efficiency(name: &str) -> f64 {
    DEVICES.iter().find(|d| d.name == name).map_or(MATMUL_EFFICIENCY, |d| d.matmul_efficiency)
}

/// Returns true if constants of the device with this name were fitted to measured steps.
pub fn is_fitted(name: &str) -> bool {
    FITTED.iter().any(|(device, _)| *device == name)
}

/// Constants of the device with this name that no datasheet states. If nothing was measured, they give the plain
/// roofline.
pub fn constants(name: &str) -> Constants {
    let matmul_efficiency = matmul_efficiency(name);
    let fitted = FITTED.iter().find(|(device, _)| *device == name).map(|(_, constants)| *constants);
    fitted.unwrap_or_else(|| {
        let plain = Constants { matmul_efficiency, ..Constants::default() };
        with_attention_of(device(name).and_then(|device| device.generation()), plain)
    })
}

/// The [`constants`] of a device, which may have figures that the catalogue does not know.
pub fn constants_of(device: &Device) -> Constants {
    match self::device(&device.name) {
        Some(_) => constants(&device.name),
        None => with_attention_of(device.generation(), constants(&device.name)),
    }
}

/// Generation of NVLink of a GPU of the catalogue, 0 for one without NVLink; `None` for all other devices.
pub fn nvlink_generation(name: &str) -> Option<u32> {
    DEVICES.iter().find(|d| d.name == name).and_then(|d| d.nvlink)
}

/// Lanes of the link to a host, for every device below.
const HOST_LANES: f64 = 16.0;

/// Share of that link's rate that copies from pinned memory reach: `nvbandwidth` measures 24.8 of 31.5 GB/s on eight
/// A100-SXM4-80GB (NVIDIA developer forum, thread 352186, 2025).
const HOST_LINK_EFFICIENCY: f64 = 0.787;

/// GPUs, the generation of their PCI Express (from the datasheets named above), and the number of GPUs that share an
/// uplink to the host. On boards for V100 and A100, two GPUs are below each PCI Express switch (NVIDIA DGX-1
/// whitepaper, 2017, figure of the topology; `PXB` pairs in the topology of that thread). On boards for H100 and later,
/// each GPU has its own (DGX H100 user guide, 2023). Polaris and Perlmutter attach each of their four A100 separately,
/// for which this value is too low.
const HOST_LINKS: [(&[&str], i32, f64); 5] = [
    (&["V100-SXM2-16GB", "V100-SXM2-32GB", "V100-SXM3-32GB"], 3, 2.0),
    (&["A100-SXM-40GB", "A100-SXM-80GB"], 4, 2.0),
    (&["A100-PCIe", "A100-PCIe-40GB", "L40S", "RTX-4090", "MI250X-GCD"], 4, 1.0),
    (&["H100-SXM", "H100-PCIe", "H200", "MI300X", "B200"], 5, 1.0),
    // Unknown GPUs are assumed to be old.
    (&[], 3, 1.0),
];

/// Bytes/s between a GPU with this name and the memory of its host, per direction, while all GPUs of a node copy.
pub fn host_bytes_per_s(name: &str) -> f64 {
    let is_it = |(names, ..): &&(&[&str], i32, f64)| names.contains(&name) || names.is_empty();
    let (generation, sharing) = HOST_LINKS.iter().find(is_it).map_or((3, 1.0), |found| (found.1, found.2));
    // Each lane carries 8 GT/s in the third generation and twice that in each later one; 128 bits in 130 are data.
    let lane = 1e9 * f64::from(2.0f32.powi(generation - 3)) * 128.0 / 130.0;
    HOST_LANES * lane * HOST_LINK_EFFICIENCY / sharing
}

/// Names of all devices of the catalogue, in its order.
pub fn device_names() -> Vec<String> {
    DEVICES.iter().map(|d| d.name.to_string()).collect()
}
