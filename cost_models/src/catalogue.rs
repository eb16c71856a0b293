//! Known machines with the figures of their vendors, so that a plan for them needs no file. They are named by a machine
//! and a count of nodes, or by a count of devices.

pub use crate::devices::{
    GPU_LAUNCH_S, MATMUL_EFFICIENCY, constants, constants_of, device, device_names, host_bytes_per_s, is_fitted,
    matmul_efficiency, nvlink_generation,
};
use crate::error::{ClusterError, nearest};
use crate::node_link::{NodeLink, Wiring};
use altiplano_ir::cluster::{Cluster, Device, Group, InterNode, IntraNode};

/// The most devices that a cluster may have. A larger description is a mistake.
pub const MAX_DEVICES: u64 = 1_000_000;

/// Bytes/s of a link that is sold in Gb/s, per direction.
const GBIT: f64 = 1e9 / 8.0;

/// GB of a binary gigabyte.
const GIB: f64 = 1.073741824;

/// A machine of the catalogue, described by one node.
struct Preset {
    name: &'static str,
    description: &'static str,
    device: &'static str,
    devices_per_node: u32,
    /// Kind, GB/s per device and direction, seconds.
    intra: (&'static str, f64, f64),
    /// Kind, bytes/s per NIC and direction, NICs, seconds.
    inter: (&'static str, f64, u32, f64),
    /// GB of a node's own memory, if stated.
    host_gb: Option<f64>,
    price_per_hour: Option<f64>,
}

// Datasheets do not state latencies. NCCL's tuning tables assume 3.4 us a hop for a ring over NVLink and 14 us over a
// network (src/graph/tuning.cc, protocol for large messages; 0.6 and 2.7 us for small ones). Here a hop takes 3 us over
// NVLink, 8 us over InfiniBand, 15 us over EFA (RDMA over Ethernet) and 30 us over TCP.
//
// Memory of nodes: the same pages and datasheets (for the DGX A100 the one with 80 GB devices, for the DGX B200 the
// smaller configuration), and the sites' own descriptions of Polaris, Perlmutter and Frontier.
const PRESETS: &[Preset] = &[
    // Amazon EC2 P3 page: 8 V100 16 GB, NVLink (6 links x 25 GB/s a direction on each device), 25 Gb/s network (TCP);
    // on demand in us-east-1 (2021).
    Preset {
        name: "p3.16xlarge",
        description: "AWS, 8 x V100 16 GB, NVLink, 25 Gb/s",
        device: "V100-SXM2-16GB",
        devices_per_node: 8,
        intra: ("nvlink", 150.0, 3e-6),
        inter: ("tcp", 25.0 * GBIT, 1, 30e-6),
        host_gb: Some(488.0 * GIB),
        price_per_hour: Some(24.48),
    },
    // NVIDIA DGX-1 datasheet (2019): 8 V100 (256 GB in all), NVLink as above, 4 x InfiniBand EDR (100 Gb/s).
    Preset {
        name: "dgx-1",
        description: "NVIDIA, 8 x V100 32 GB, NVLink, 4 x 100 Gb/s",
        device: "V100-SXM2-32GB",
        devices_per_node: 8,
        intra: ("nvlink", 150.0, 3e-6),
        inter: ("infiniband", 100.0 * GBIT, 4, 8e-6),
        host_gb: Some(512.0),
        price_per_hour: None,
    },
    // NVIDIA DGX-2 datasheet (2019): 16 V100, NVSwitch with the six links of each, 8 x InfiniBand EDR (100 Gb/s).
    Preset {
        name: "dgx-2",
        description: "NVIDIA, 16 x V100 32 GB, NVSwitch, 8 x 100 Gb/s",
        device: "V100-SXM3-32GB",
        devices_per_node: 16,
        intra: ("nvswitch", 150.0, 3e-6),
        inter: ("infiniband", 100.0 * GBIT, 8, 8e-6),
        host_gb: Some(1500.0),
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
        inter: ("efa-p4", 100.0 * GBIT, 4, 15e-6),
        host_gb: Some(1152.0 * GIB),
        price_per_hour: Some(32.77),
    },
    Preset {
        name: "p4de.24xlarge",
        description: "AWS, 8 x A100 80 GB, NVSwitch, 4 x 100 Gb/s",
        device: "A100-SXM-80GB",
        devices_per_node: 8,
        intra: ("nvswitch", 300.0, 3e-6),
        inter: ("efa-p4", 100.0 * GBIT, 4, 15e-6),
        host_gb: Some(1152.0 * GIB),
        price_per_hour: Some(40.97),
    },
    // NVIDIA DGX A100 80GB datasheet (2021): NVSwitch at 600 GB/s both directions together; 8 x InfiniBand HDR (200 Gb/s).
    Preset {
        name: "dgx-a100",
        description: "NVIDIA, 8 x A100 80 GB, NVSwitch, 8 x 200 Gb/s",
        device: "A100-SXM-80GB",
        devices_per_node: 8,
        intra: ("nvswitch", 300.0, 3e-6),
        inter: ("infiniband", 200.0 * GBIT, 8, 8e-6),
        host_gb: Some(2000.0),
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
        inter: ("infiniband", 200.0 * GBIT, 4, 8e-6),
        host_gb: None,
        price_per_hour: None,
    },
    // NVIDIA DGX H100 datasheet (2023): NVSwitch at 900 GB/s both directions together; 8 x InfiniBand NDR (400 Gb/s).
    Preset {
        name: "dgx-h100",
        description: "NVIDIA, 8 x H100 80 GB, NVSwitch, 8 x 400 Gb/s",
        device: "H100-SXM",
        devices_per_node: 8,
        intra: ("nvswitch", 450.0, 3e-6),
        inter: ("infiniband", 400.0 * GBIT, 8, 8e-6),
        host_gb: Some(2000.0),
        price_per_hour: None,
    },
    // NVIDIA DGX H200 datasheet (2024): the DGX H100 with H200.
    Preset {
        name: "dgx-h200",
        description: "NVIDIA, 8 x H200 141 GB, NVSwitch, 8 x 400 Gb/s",
        device: "H200",
        devices_per_node: 8,
        intra: ("nvswitch", 450.0, 3e-6),
        inter: ("infiniband", 400.0 * GBIT, 8, 8e-6),
        host_gb: Some(2000.0),
        price_per_hour: None,
    },
    // NVIDIA DGX B200 datasheet (2024): NVSwitch at 14.4 TB/s of all devices in both directions; 8 x 400 Gb/s InfiniBand.
    Preset {
        name: "dgx-b200",
        description: "NVIDIA, 8 x B200 180 GB, NVSwitch, 8 x 400 Gb/s",
        device: "B200",
        devices_per_node: 8,
        intra: ("nvswitch", 900.0, 3e-6),
        inter: ("infiniband", 400.0 * GBIT, 8, 8e-6),
        host_gb: Some(2000.0),
        price_per_hour: None,
    },
    // Amazon EC2 P5 page: 8 H100, NVSwitch as above, 3200 Gb/s EFA on 32 cards; on demand in us-east-1 (2023).
    Preset {
        name: "p5.48xlarge",
        description: "AWS, 8 x H100 80 GB, NVSwitch, 32 x 100 Gb/s",
        device: "H100-SXM",
        devices_per_node: 8,
        intra: ("nvswitch", 450.0, 3e-6),
        inter: ("efa", 100.0 * GBIT, 32, 15e-6),
        host_gb: Some(2048.0 * GIB),
        price_per_hour: Some(98.32),
    },
    // Amazon EC2 P6 page: 8 B200, NVSwitch as above, 3200 Gb/s EFA on 8 cards.
    Preset {
        name: "p6-b200.48xlarge",
        description: "AWS, 8 x B200 180 GB, NVSwitch, 8 x 400 Gb/s",
        device: "B200",
        devices_per_node: 8,
        intra: ("nvswitch", 900.0, 3e-6),
        inter: ("efa", 400.0 * GBIT, 8, 15e-6),
        host_gb: Some(2048.0 * GIB),
        price_per_hour: None,
    },
    // ALCF, Polaris machine overview (2023): 4 A100 40 GB, wired to each other by four links of 25 GB/s for each pair (NV4 in
    // its topology), 2 Slingshot 11 adapters (200 Gb/s).
    Preset {
        name: "polaris",
        description: "ALCF, 4 x A100 40 GB, NVLink, 2 x 200 Gb/s",
        device: "A100-SXM-40GB",
        devices_per_node: 4,
        intra: ("nvlink-mesh", 300.0, 3e-6),
        inter: ("slingshot", 200.0 * GBIT, 2, 8e-6),
        host_gb: Some(512.0),
        price_per_hour: None,
    },
    // NERSC, Perlmutter architecture (2023): the same GPUs and links, 4 Slingshot 11 adapters.
    Preset {
        name: "perlmutter",
        description: "NERSC, 4 x A100 40 GB, NVLink, 4 x 200 Gb/s",
        device: "A100-SXM-40GB",
        devices_per_node: 4,
        intra: ("nvlink-mesh", 300.0, 3e-6),
        inter: ("slingshot", 200.0 * GBIT, 4, 8e-6),
        host_gb: Some(256.0),
        price_per_hour: None,
    },
    // OLCF, Frontier user guide (2023): 4 MI250X, whose 8 dies are the devices. Dies of different packages have 50 to
    // 100 GB/s between them, dies of one package 200, so a ring finds 100 at most. 4 Slingshot 11 adapters (200 Gb/s).
    Preset {
        name: "frontier",
        description: "OLCF, 8 x MI250X die, Infinity Fabric, 4 x 200 Gb/s",
        device: "MI250X-GCD",
        devices_per_node: 8,
        intra: ("infinity-fabric", 100.0, 3e-6),
        inter: ("slingshot", 200.0 * GBIT, 4, 8e-6),
        host_gb: Some(512.0),
        price_per_hour: None,
    },
    // Eight workers like those of `local`. Several such machines may be joined by a gigabit network.
    Preset {
        name: "laptop",
        description: "8 CPU workers, 1 Gb/s",
        device: "cpu-worker",
        devices_per_node: 8,
        intra: ("shared-memory", 4.0, 5e-6),
        inter: ("tcp", GBIT, 1, 50e-6),
        host_gb: None,
        price_per_hour: None,
    },
];

/// The preset whose count is one of workers, not nodes.
const LOCAL: &str = "local";

/// Name and description of every preset.
pub fn presets() -> Vec<(&'static str, &'static str)> {
    let local = (LOCAL, "workers of this machine on its CPU, with fixed figures");
    std::iter::once(local).chain(PRESETS.iter().map(|p| (p.name, p.description))).collect()
}

/// The cluster that a preset's name and count stand for. Sizes and rates are in bytes and seconds as everywhere.
///
/// `dgx-a100:4` is four nodes, `dgx-a100` one. `dgx-a100:1/2` or `dgx-a100/2` is the first two devices of one node.
/// `local:4` is four workers of one machine. `p4d` is short for `p4d.24xlarge`. `8xA100-80` is a node of eight devices
/// with their most common links, `4x8xA100-80` four such nodes. The cluster is named as it was asked for.
pub fn preset(text: &str) -> Result<Cluster, ClusterError> {
    if let Some(group) = counted(text)? {
        return Ok(Cluster { name: text.to_string(), groups: vec![group], between_groups: None, storage: None });
    }
    let (nodes, part) = match text.split_once('/') {
        Some((nodes, part)) => (nodes, Some(part)),
        None => (text, None),
    };
    let (name, count) = nodes.split_once(':').unwrap_or((nodes, "1"));
    let group = if name == LOCAL {
        local(parse_count(text, count, MAX_DEVICES)?)
    } else if let Some(preset) = PRESETS.iter().find(|p| p.is_called(name)) {
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
            group_part(group, part)
        }
        None => group,
    };
    Ok(Cluster { name: text.to_string(), groups: vec![group], between_groups: None, storage: None })
}

/// The first devices of a node. If devices are wired to each other, those that are left out take their links along.
fn group_part(group: Group, devices: u32) -> Group {
    let mut part = Group { devices_per_node: devices, ..group };
    if NodeLink::of(&part).wiring == Wiring::FullMesh {
        let others = |n: u32| f64::from(n.saturating_sub(1).max(1));
        part.intra_node.bytes_per_s *= others(devices) / others(group.devices_per_node);
    }
    part
}

/// A count from 1 to `most`.
fn parse_count(text: &str, count: &str, most: u64) -> Result<u32, ClusterError> {
    let digits = !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit());
    let value = if digits { count.parse::<u32>().ok() } else { None };
    value
        .filter(|&n| n >= 1 && u64::from(n) <= most)
        .ok_or_else(|| ClusterError::Count { text: text.to_string(), most })
}

/// Workers of one machine, which communicate through its memory.
fn local(workers: u32) -> Group {
    Group {
        nodes: 1,
        devices_per_node: workers,
        device: known_device("cpu-worker"),
        intra_node: IntraNode { kind: "shared-memory".to_string(), bytes_per_s: 4e9, latency_s: 5e-6 },
        // Never crossed, since there is one node. The figures are those of a gigabit network.
        inter_node: InterNode {
            kind: String::new(),
            bytes_per_s: GBIT,
            nics: 1,
            latency_s: 50e-6,
            oversubscription: 1.0,
        },
        host_memory_bytes: None,
        price_per_hour: None,
        dispatch: None,
    }
}

impl Preset {
    /// Matches the preset's name, or its family, which is the part before the size.
    fn is_called(&self, name: &str) -> bool {
        self.name == name || self.name.split_once('.').is_some_and(|(family, _)| family == name)
    }

    fn group(&self, nodes: u32) -> Group {
        let (kind, gb_per_s, intra_latency_s) = self.intra;
        let (network, bytes_per_s, nics, latency_s) = self.inter;
        Group {
            nodes,
            devices_per_node: self.devices_per_node,
            device: known_device(self.device),
            intra_node: IntraNode { kind: kind.to_string(), bytes_per_s: gb_per_s * 1e9, latency_s: intra_latency_s },
            inter_node: InterNode { kind: network.to_string(), bytes_per_s, nics, latency_s, oversubscription: 1.0 },
            host_memory_bytes: self.host_gb.map(|gb| (gb * 1e9) as u64),
            price_per_hour: self.price_per_hour,
            dispatch: None,
        }
    }
}

/// An entry for names like `8xA100-80`: the short name, the device, and the most common links of its nodes.
struct Counted {
    short: &'static str,
    device: &'static str,
    /// Kind, GB/s per device and direction, or per link in a full mesh.
    intra: (&'static str, f64),
    /// Gb/s per NIC and direction, and the devices that share one.
    inter: (f64, u32),
}

const fn counted_as(
    short: &'static str,
    device: &'static str,
    intra: (&'static str, f64),
    inter: (f64, u32),
) -> Counted {
    Counted { short, device, intra, inter }
}

// The links are those of the DGX of each generation. Nodes on PCIe 4.0 or 5.0 have 16 lanes and one 100 Gb/s NIC. An
// MI300X platform has seven links of 64 GB/s and 8 x 400 Gb/s (AMD Instinct MI300X platform datasheet, 2023).
const COUNTED: &[Counted] = &[
    counted_as("V100-16", "V100-SXM2-16GB", ("nvlink", 150.0), (100.0, 2)),
    counted_as("V100-32", "V100-SXM2-32GB", ("nvlink", 150.0), (100.0, 2)),
    counted_as("V100-SXM3", "V100-SXM3-32GB", ("nvswitch", 150.0), (100.0, 2)),
    counted_as("A100-40", "A100-SXM-40GB", ("nvswitch", 300.0), (200.0, 1)),
    counted_as("A100-80", "A100-SXM-80GB", ("nvswitch", 300.0), (200.0, 1)),
    counted_as("A100-PCIe-80", "A100-PCIe", ("pcie", 31.5), (100.0, u32::MAX)),
    counted_as("A100-PCIe-40", "A100-PCIe-40GB", ("pcie", 31.5), (100.0, u32::MAX)),
    counted_as("H100", "H100-SXM", ("nvswitch", 450.0), (400.0, 1)),
    counted_as("H100-80", "H100-SXM", ("nvswitch", 450.0), (400.0, 1)),
    counted_as("H100-PCIe-80", "H100-PCIe", ("pcie", 63.0), (100.0, u32::MAX)),
    counted_as("H200-141", "H200", ("nvswitch", 450.0), (400.0, 1)),
    counted_as("B200-180", "B200", ("nvswitch", 900.0), (400.0, 1)),
    counted_as("L40S-48", "L40S", ("pcie", 31.5), (100.0, u32::MAX)),
    counted_as("4090", "RTX-4090", ("pcie", 31.5), (100.0, u32::MAX)),
    counted_as("MI300X-192", "MI300X", ("xgmi", 64.0), (400.0, 1)),
    counted_as("MI250X", "MI250X-GCD", ("infinity-fabric", 100.0), (200.0, 2)),
    counted_as("CPU", "cpu-worker", ("shared-memory", 4.0), (1.0, u32::MAX)),
];

/// The group of `8xA100-80` and the like; `None` for text that does not start like that.
fn counted(text: &str) -> Result<Option<Group>, ClusterError> {
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let Some((first, rest)) = text.split_once('x').filter(|(first, _)| digits(first)) else { return Ok(None) };
    let (nodes, devices, name) = match rest.split_once('x').filter(|(second, _)| digits(second)) {
        Some((second, name)) => (first, second, name),
        None => ("1", first, rest),
    };
    let called = |c: &&Counted| [c.short, c.device].iter().any(|n| n.eq_ignore_ascii_case(name));
    let Some(kind) = COUNTED.iter().find(called) else {
        let known: Vec<String> = COUNTED.iter().map(|c| c.short.to_string()).collect();
        return Err(ClusterError::UnknownCounted { name: name.to_string(), nearest: nearest(name, &known), known });
    };
    let devices_per_node = parse_count(text, devices, MAX_DEVICES)?;
    let nodes = parse_count(text, nodes, MAX_DEVICES / u64::from(devices_per_node))?;
    let (gbit_per_s, sharing) = kind.inter;
    let preset = Preset {
        name: kind.short,
        description: "",
        device: kind.device,
        devices_per_node,
        intra: (
            kind.intra.0,
            kind.intra.1,
            if kind.intra.0 == "pcie" || kind.intra.0 == "shared-memory" { 5e-6 } else { 3e-6 },
        ),
        inter: ("", gbit_per_s * GBIT, devices_per_node.div_ceil(sharing), 8e-6),
        host_gb: None,
        price_per_hour: None,
    };
    let mut group = preset.group(nodes);
    if NodeLink::of(&group).wiring == Wiring::FullMesh {
        group.intra_node.bytes_per_s *= f64::from(devices_per_node.saturating_sub(1).max(1));
    }
    Ok(Some(group))
}

/// A device that this file names.
fn known_device(name: &str) -> Device {
    device(name).expect("presets name devices of the catalogue; a test builds them all")
}

#[cfg(test)]
#[path = "catalogue_tests.rs"]
mod tests;
