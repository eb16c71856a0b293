//! Known devices and machines, with the figures of their vendors, so that a plan for them needs no file.
//!
//! Rates are dense (no structured sparsity) and peak; what of them is reached in practice is the cost model's business.
//! Where a datasheet gives a machine's total, it is divided by the number of devices.

use crate::compute::Constants;
use crate::fitted::FITTED;
use crate::error::{ClusterError, nearest};
use altiplano_ir::cluster::{Cluster, Device, Group, InterNode, IntraNode};
use altiplano_ir::dtype::DType::{self, BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F16, F32, F64};

/// The most devices that a cluster may have; beyond that a description is wrong, not large.
pub const MAX_DEVICES: u64 = 1_000_000;

/// Seconds that a kernel on a GPU takes however little it does: starting, filling the device and draining it. An estimate,
/// no vendor states it.
pub const GPU_LAUNCH_S: f64 = 3e-6;

/// Bytes/s of a link that is sold in Gb/s, per direction.
const GBIT: f64 = 1e9 / 8.0;

/// A device of the catalogue. `gb` are decimal gigabytes: packages carry binary ones, 7% more, and that is about what
/// driver contexts, communication buffers and fragmentation take.
struct DeviceFigures {
    name: &'static str,
    gb: f64,
    gb_per_s: f64,
    /// TFLOP/s by element type of matmul operands. `f32` is IEEE single precision, not TF32, which rounds its operands.
    tflops: &'static [(DType, f64)],
    /// Part of the peak that matmuls of training sizes reach, where it was measured.
    matmul_efficiency: f64,
    launch_s: f64,
}

/// Part of the peak rate that matmuls of training sizes reach, for devices without published measurements.
pub const MATMUL_EFFICIENCY: f64 = 0.7;

const DEVICES: &[DeviceFigures] = &[
    // NVIDIA Tesla V100 datasheet (2020), SXM2: 125 TFLOP/s tensor, 15.7 single, 7.8 double; HBM2 at 900 GB/s. No bf16.
    // Matmuls of GPT layers run at 72 to 88 TFLOP/s (Aceso's V100 profiles, 2024, SuperScaler repository).
    DeviceFigures {
        name: "V100-SXM2-16GB",
        gb: 16.0,
        gb_per_s: 900.0,
        tflops: &[(F64, 7.8), (F32, 15.7), (F16, 125.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
    },
    DeviceFigures {
        name: "V100-SXM2-32GB",
        gb: 32.0,
        gb_per_s: 900.0,
        tflops: &[(F64, 7.8), (F32, 15.7), (F16, 125.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
    },
    // NVIDIA A100 datasheet (2021): 312 TFLOP/s f16 and bf16 tensor, 19.5 f32, 19.5 f64 tensor; HBM2 at 1555 GB/s (40 GB),
    // HBM2e at 2039 (80 GB SXM) and 1935 (80 GB PCIe).
    // Matmuls of GPT layers run at 235 to 255 TFLOP/s (EleutherAI cookbook, benchmarks/sizing).
    DeviceFigures {
        name: "A100-SXM-40GB",
        gb: 40.0,
        gb_per_s: 1555.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.8,
        launch_s: GPU_LAUNCH_S,
    },
    DeviceFigures {
        name: "A100-SXM-80GB",
        gb: 80.0,
        gb_per_s: 2039.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.8,
        launch_s: GPU_LAUNCH_S,
    },
    DeviceFigures {
        name: "A100-PCIe",
        gb: 80.0,
        gb_per_s: 1935.0,
        tflops: &[(F64, 19.5), (F32, 19.5), (F16, 312.0), (BF16, 312.0)],
        matmul_efficiency: 0.75,
        launch_s: GPU_LAUNCH_S,
    },
    // NVIDIA H100 datasheet (2023), SXM: 1979 TFLOP/s f16 and bf16 with sparsity, so 989.5 dense, and twice that for 8-bit
    // floats; 67 f32, 67 f64 tensor; HBM3 at 3.35 TB/s.
    // The best matmul shape reaches 0.80 (Bekman, ml-engineering, accelerator tables), common ones less under its power limit.
    DeviceFigures {
        name: "H100-SXM",
        gb: 80.0,
        gb_per_s: 3350.0,
        tflops: &[(F64, 67.0), (F32, 67.0), (F16, 989.5), (BF16, 989.5), (F8E4M3FN, 1979.0), (F8E5M2, 1979.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
    },
    // NVIDIA H200 datasheet (2024), SXM: the H100's rates; 141 GB HBM3e at 4.8 TB/s.
    DeviceFigures {
        name: "H200",
        gb: 141.0,
        gb_per_s: 4800.0,
        tflops: &[(F64, 67.0), (F32, 67.0), (F16, 989.5), (BF16, 989.5), (F8E4M3FN, 1979.0), (F8E5M2, 1979.0)],
        matmul_efficiency: 0.72,
        launch_s: GPU_LAUNCH_S,
    },
    // NVIDIA HGX B200 datasheet (2025), eight devices: 36 PFLOP/s f16 and bf16 with sparsity, 72 for 8-bit floats, 600 TFLOP/s f32,
    // 296 f64, 1.4 TB HBM3e at 62 TB/s.
    DeviceFigures {
        name: "B200",
        gb: 180.0,
        gb_per_s: 7750.0,
        tflops: &[(F64, 37.0), (F32, 75.0), (F16, 2250.0), (BF16, 2250.0), (F8E4M3FN, 4500.0), (F8E5M2, 4500.0)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
    },
    // NVIDIA L40S datasheet (2023): 362 TFLOP/s f16 and bf16 dense, 733 for 8-bit floats; 91.6 f32; f64 at 1/64 of that;
    // GDDR6 at 864 GB/s.
    DeviceFigures {
        name: "L40S",
        gb: 48.0,
        gb_per_s: 864.0,
        tflops: &[(F64, 1.43), (F32, 91.6), (F16, 362.0), (BF16, 362.0), (F8E4M3FN, 733.0), (F8E5M2, 733.0)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
    },
    // NVIDIA Ada GPU architecture whitepaper (2022), RTX 4090: 165.2 TFLOP/s f16 and bf16 tensor with f32 accumulation,
    // 330.3 for 8-bit floats, 82.6 f32, f64 at 1/64 of that; GDDR6X at 1008 GB/s.
    DeviceFigures {
        name: "RTX-4090",
        gb: 24.0,
        gb_per_s: 1008.0,
        tflops: &[(F64, 1.29), (F32, 82.6), (F16, 165.2), (BF16, 165.2), (F8E4M3FN, 330.3), (F8E5M2, 330.3)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: GPU_LAUNCH_S,
    },
    // AMD Instinct MI300X datasheet (2023): 1307.4 TFLOP/s f16 and bf16 matrix, 2614.9 for 8-bit floats (of its `fnuz` kind),
    // 163.4 f32 and f64 matrix; HBM3 at 5.3 TB/s.
    // The best matmul shape reaches 0.51 (Bekman, ml-engineering, accelerator tables).
    DeviceFigures {
        name: "MI300X",
        gb: 192.0,
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
    },
    // One worker of a desktop or a server: about a core with 256-bit fused multiply-adds at 3 GHz (2 FMA units x 8 lanes x
    // 2 operations x 3e9 = 96e9 at most) and its share of memory. Fixed, not measured: plans are the same everywhere.
    DeviceFigures {
        name: "cpu-worker",
        gb: 6.442450944,
        gb_per_s: 8.0,
        tflops: &[(F64, 0.025), (F32, 0.05)],
        matmul_efficiency: MATMUL_EFFICIENCY,
        launch_s: 1e-6,
    },
];

impl DeviceFigures {
    fn device(&self) -> Device {
        Device {
            name: self.name.to_string(),
            memory_bytes: (self.gb * 1e9) as u64,
            memory_bytes_per_s: self.gb_per_s * 1e9,
            peak_flops: self.tflops.iter().map(|&(dtype, tflops)| (dtype, tflops * 1e12)).collect(),
            launch_s: self.launch_s,
        }
    }
}

/// The device of this name; names are exact.
pub fn device(name: &str) -> Option<Device> {
    DEVICES.iter().find(|d| d.name == name).map(DeviceFigures::device)
}

/// Part of the peak rate that matmuls reach on the device of this name; [`MATMUL_EFFICIENCY`] where it is not known.
pub fn matmul_efficiency(name: &str) -> f64 {
    DEVICES.iter().find(|d| d.name == name).map_or(MATMUL_EFFICIENCY, |d| d.matmul_efficiency)
}

/// What no datasheet states of the device of this name. Where nothing was measured, the plain roofline.
pub fn constants(name: &str) -> Constants {
    let matmul_efficiency = matmul_efficiency(name);
    let fitted = FITTED.iter().find(|(device, _)| *device == name).map(|(_, constants)| *constants);
    fitted.unwrap_or(Constants { matmul_efficiency, ..Constants::default() })
}

/// Names of all devices of the catalogue, in its order.
pub fn device_names() -> Vec<String> {
    DEVICES.iter().map(|d| d.name.to_string()).collect()
}

/// A machine of the catalogue: what one node is.
struct Preset {
    name: &'static str,
    description: &'static str,
    device: &'static str,
    devices_per_node: u32,
    /// Kind, GB/s per device and direction, seconds.
    intra: (&'static str, f64, f64),
    /// Bytes/s per NIC and direction, NICs, seconds.
    inter: (f64, u32, f64),
    price_per_hour: Option<f64>,
}

// Latencies are not in datasheets. NCCL's tuning tables assume 3.4 us a hop for a ring over NVLink and 14 us over a network
// (src/graph/tuning.cc, protocol for large messages; 0.6 and 2.7 us for small ones). Here a hop takes 3 us over NVLink,
// 8 us over InfiniBand, 15 us over EFA (RDMA over Ethernet) and 30 us over TCP.
const PRESETS: &[Preset] = &[
    // Amazon EC2 P3 page: 8 V100 16 GB, NVLink (6 links x 25 GB/s a direction on each device), 25 Gb/s network (TCP);
    // on demand in us-east-1 (2021).
    Preset {
        name: "p3.16xlarge",
        description: "AWS, 8 x V100 16 GB, NVLink, 25 Gb/s",
        device: "V100-SXM2-16GB",
        devices_per_node: 8,
        intra: ("nvlink", 150.0, 3e-6),
        inter: (25.0 * GBIT, 1, 30e-6),
        price_per_hour: Some(24.48),
    },
    // NVIDIA DGX-1 datasheet (2019): 8 V100 (256 GB in all), NVLink as above, 4 x InfiniBand EDR (100 Gb/s).
    Preset {
        name: "dgx-1",
        description: "NVIDIA, 8 x V100 32 GB, NVLink, 4 x 100 Gb/s",
        device: "V100-SXM2-32GB",
        devices_per_node: 8,
        intra: ("nvlink", 150.0, 3e-6),
        inter: (100.0 * GBIT, 4, 8e-6),
        price_per_hour: None,
    },
    // Amazon EC2 P4 page: 8 A100 40 GB, NVSwitch (600 GB/s both directions together), 400 Gb/s EFA on 4 cards;
    // on demand in us-east-1 (2023).
    Preset {
        name: "p4d.24xlarge",
        description: "AWS, 8 x A100 40 GB, NVSwitch, 4 x 100 Gb/s",
        device: "A100-SXM-40GB",
        devices_per_node: 8,
        intra: ("nvswitch", 300.0, 3e-6),
        inter: (100.0 * GBIT, 4, 15e-6),
        price_per_hour: Some(32.77),
    },
    Preset {
        name: "p4de.24xlarge",
        description: "AWS, 8 x A100 80 GB, NVSwitch, 4 x 100 Gb/s",
        device: "A100-SXM-80GB",
        devices_per_node: 8,
        intra: ("nvswitch", 300.0, 3e-6),
        inter: (100.0 * GBIT, 4, 15e-6),
        price_per_hour: Some(40.97),
    },
    // NVIDIA DGX A100 80GB datasheet (2021): NVSwitch at 600 GB/s both directions together; 8 x InfiniBand HDR (200 Gb/s).
    Preset {
        name: "dgx-a100",
        description: "NVIDIA, 8 x A100 80 GB, NVSwitch, 8 x 200 Gb/s",
        device: "A100-SXM-80GB",
        devices_per_node: 8,
        intra: ("nvswitch", 300.0, 3e-6),
        inter: (200.0 * GBIT, 8, 8e-6),
        price_per_hour: None,
    },
    // The A100 cluster of the vTrain measurements (Bang et al., "vTrain: A Simulation Framework for Evaluating
    // Cost-effective and Compute-optimal Large Language Model Training", 2024): 4 x InfiniBand HDR (200 Gb/s) a node.
    Preset {
        name: "a100-800gbps",
        description: "8 x A100 80 GB, NVSwitch, 4 x 200 Gb/s",
        device: "A100-SXM-80GB",
        devices_per_node: 8,
        intra: ("nvswitch", 300.0, 3e-6),
        inter: (200.0 * GBIT, 4, 8e-6),
        price_per_hour: None,
    },
    // NVIDIA DGX H100 datasheet (2023): NVSwitch at 900 GB/s both directions together; 8 x InfiniBand NDR (400 Gb/s).
    Preset {
        name: "dgx-h100",
        description: "NVIDIA, 8 x H100 80 GB, NVSwitch, 8 x 400 Gb/s",
        device: "H100-SXM",
        devices_per_node: 8,
        intra: ("nvswitch", 450.0, 3e-6),
        inter: (400.0 * GBIT, 8, 8e-6),
        price_per_hour: None,
    },
    // Amazon EC2 P5 page: 8 H100, NVSwitch as above, 3200 Gb/s EFA on 32 cards; on demand in us-east-1 (2023).
    Preset {
        name: "p5.48xlarge",
        description: "AWS, 8 x H100 80 GB, NVSwitch, 32 x 100 Gb/s",
        device: "H100-SXM",
        devices_per_node: 8,
        intra: ("nvswitch", 450.0, 3e-6),
        inter: (100.0 * GBIT, 32, 15e-6),
        price_per_hour: Some(98.32),
    },
];

/// The preset whose count is of workers, not nodes.
const LOCAL: &str = "local";

/// Name and description of every preset.
pub fn presets() -> Vec<(&'static str, &'static str)> {
    let local = (LOCAL, "workers of this machine on its CPU, with fixed figures");
    std::iter::once(local).chain(PRESETS.iter().map(|p| (p.name, p.description))).collect()
}

/// The cluster that a preset's name and count stand for. Sizes and rates are in bytes and seconds as everywhere.
///
/// `dgx-a100:4` is four nodes, `dgx-a100` one; `dgx-a100:1/2` or `dgx-a100/2` the first two devices of one; `local:4`
/// four workers of one machine. The cluster is named as it was asked for.
pub fn preset(text: &str) -> Result<Cluster, ClusterError> {
    let (nodes, part) = match text.split_once('/') {
        Some((nodes, part)) => (nodes, Some(part)),
        None => (text, None),
    };
    let (name, count) = nodes.split_once(':').unwrap_or((nodes, "1"));
    let group = if name == LOCAL {
        local(parse_count(text, count, MAX_DEVICES)?)
    } else if let Some(preset) = PRESETS.iter().find(|p| p.name == name) {
        preset.group(parse_count(text, count, MAX_DEVICES / u64::from(preset.devices_per_node))?)
    } else {
        let known: Vec<String> = presets().iter().map(|p| p.0.to_string()).collect();
        return Err(ClusterError::UnknownPreset { name: name.to_string(), nearest: nearest(name, &known), known });
    };
    let group = match part {
        Some(_) if group.nodes > 1 => return Err(ClusterError::PartOfSeveralNodes { text: text.to_string() }),
        Some(part) => {
            let devices = group.devices_per_node;
            let part = parse_count(text, part, u64::from(devices))
                .map_err(|_| ClusterError::PartOfNode { text: text.to_string(), devices })?;
            Group { devices_per_node: part, ..group }
        }
        None => group,
    };
    Ok(Cluster { name: text.to_string(), groups: vec![group] })
}

/// A count from 1 to `most`.
fn parse_count(text: &str, count: &str, most: u64) -> Result<u32, ClusterError> {
    let digits = !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit());
    let value = if digits { count.parse::<u32>().ok() } else { None };
    value
        .filter(|&n| n >= 1 && u64::from(n) <= most)
        .ok_or_else(|| ClusterError::Count { text: text.to_string(), most })
}

/// Workers of one machine, which talk through its memory.
fn local(workers: u32) -> Group {
    Group {
        nodes: 1,
        devices_per_node: workers,
        device: known_device("cpu-worker"),
        intra_node: IntraNode { kind: "shared-memory".to_string(), bytes_per_s: 4e9, latency_s: 5e-6 },
        // Never crossed, since there is one node; a gigabit network, if anything.
        inter_node: InterNode { bytes_per_s: GBIT, nics: 1, latency_s: 50e-6 },
        price_per_hour: None,
    }
}

impl Preset {
    fn group(&self, nodes: u32) -> Group {
        let (kind, gb_per_s, intra_latency_s) = self.intra;
        let (bytes_per_s, nics, latency_s) = self.inter;
        Group {
            nodes,
            devices_per_node: self.devices_per_node,
            device: known_device(self.device),
            intra_node: IntraNode { kind: kind.to_string(), bytes_per_s: gb_per_s * 1e9, latency_s: intra_latency_s },
            inter_node: InterNode { bytes_per_s, nics, latency_s },
            price_per_hour: self.price_per_hour,
        }
    }
}

/// A device that this file names itself.
fn known_device(name: &str) -> Device {
    device(name).expect("presets name devices of the catalogue; a test builds them all")
}

#[cfg(test)]
#[path = "catalogue_tests.rs"]
mod tests;
