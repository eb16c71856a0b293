//! Kinds of links between the devices of a node. Each has constants for its collectives beyond the figures of a
//! datasheet: the start of a call, hops, and the share of the bandwidth that is reached.
//!
//! The constants of a kind were fitted together to all rows of one node of that kind in published tables of measured
//! collectives, with the formulas of [`crate::collective`]. The fit minimises the mean absolute logarithm of the ratio.
//! Sizes above 4 MiB are weighted by 1 / bytes, those below 1 MiB by 0.3.
//!
//! The tables are `nccl-allreduce-a100-v100.csv` (all-reduces of 1 MiB to 1 GiB over 2 to 8 A100 and V100; published
//! with vTrain, Bang et al. 2024) and `nccl-a100-h200-b200.csv` (Bekman, ml-engineering, network chapter). Constants
//! fitted to 2, 4 and 8 A100 alone are as near to the rows of 3, 5, 6 and 7. A kind without rows has the constants of
//! the nearest kind that has rows, and its comment says so.

use crate::{captured, catalogue};
use altiplano_ir::cluster::{Architecture, Group};

/// How a message is split and acknowledged, after NCCL's protocols. Small units with a flag each have low latency and
/// waste bandwidth; large chunks behind a barrier do the reverse. Each message takes the faster one for its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// NCCL's LL: four bytes of flag for four of data.
    LowLatency,
    /// NCCL's LL128: eight bytes of flag for 120 of data.
    LowLatency128,
    /// Chunks, with a synchronisation for each.
    Simple,
}

/// The constants of one protocol.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProtocolFigures {
    pub protocol: Protocol,
    /// Seconds before the first byte moves, launch included.
    pub start_s: f64,
    /// Time of a hop inside a node, as a multiple of `intra_node.latency_s`.
    pub hop: f64,
    /// Share of `intra_node.bytes_per_s` that a ring reaches.
    pub efficiency: f64,
    /// Time of a hop between nodes, as a multiple of `inter_node.latency_s`.
    pub network_hop: f64,
    /// Share of the bytes sent over a network that are data.
    pub network_part: f64,
}

/// Reduction inside a node's switches (NVLink-SHARP, which NCCL calls NVLS).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharp {
    pub start_s: f64,
    /// Share of `intra_node.bytes_per_s` at which a device sends `bytes` and receives its share of them back.
    pub efficiency: f64,
}

/// How a library sends the messages of an all-to-all inside a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    pub protocol: Protocol,
    /// Seconds before the first byte moves, launch included.
    pub start_s: f64,
    /// Time of each message of a device, as a multiple of `intra_node.latency_s`.
    pub message: f64,
    /// Share of `intra_node.bytes_per_s` that is reached.
    pub efficiency: f64,
    /// Part of a message's wire time that the copy of a device's own part adds, from 0 to 1.
    pub exposed: f64,
}

/// The library that runs the collectives, which determines the available algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// NCCL and RCCL: rings, double binary trees between nodes, in-switch reduction.
    Nccl,
    /// Threads and MPI: rings, recursive halving and doubling, binomial trees.
    Mpi,
}

/// The wiring of a node's devices, which determines the share of its links that a ring over some devices can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wiring {
    /// A device has all of its bandwidth for any peer: switches, memory.
    Switched,
    /// The hybrid cube mesh of a DGX-1: the six links of each of eight V100 go to four different neighbours.
    HybridCube,
    /// Every device has equally many links to every other.
    FullMesh,
}

/// A kind of link inside a node with its constants.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeLink {
    /// Name in messages.
    pub name: &'static str,
    pub wiring: Wiring,
    pub library: Library,
    pub protocols: &'static [ProtocolFigures],
    /// Rounds of a ring that do not overlap with the others: the first reads and the last writes a device's own memory.
    /// A ring of `r` rounds takes as long as `r + exposed_rounds` of them.
    pub exposed_rounds: f64,
    /// Seconds before the first byte of a message between two devices moves.
    pub send_start_s: f64,
    pub sharp: Option<Sharp>,
    /// How all-to-alls inside a node are sent. Empty: at the rates of a ring's protocols.
    pub exchanges: &'static [Exchange],
    /// The same links for collectives that are recorded in a CUDA graph, which no host starts one by one. `None`: no
    /// table has any.
    pub captured: Option<&'static NodeLink>,
}

/// The start of a ring of `Simple` in NCCL's tuner (NVIDIA/nccl, src/graph/tuning.cc, baseLatencies): a message between
/// two devices is one kernel without rounds. The fitted starts are those of whole collectives.
const NCCL_SEND_START_S: f64 = 8.4e-6;

/// A kind of network between nodes with its constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// Name in messages.
    pub name: &'static str,
    /// Protocols whose messages the network may carry.
    pub protocols: &'static [Protocol],
    /// Share of `inter_node.bytes_per_s` that chunks reach.
    pub efficiency: f64,
}

/// The 400 Gb/s NICs of InfiniBand reach 46 to 48 of 50 GB/s (NVIDIA/nccl-tests issue 290); 4 x 200 Gb/s reach 0.86 of
/// their sum (issue 175).
static INFINIBAND: Network = Network {
    name: "InfiniBand, Ethernet or Slingshot",
    protocols: &[Protocol::LowLatency, Protocol::LowLatency128, Protocol::Simple],
    efficiency: 0.92,
};

/// AWS's network since P5. All-reduces over 4 x P6-B200 reach 382 of 400 GB/s.
static EFA: Network = Network { name: "EFA", efficiency: 0.955, ..INFINIBAND };

/// AWS's network of P4. It may deliver the parts of a message in any order, so flags among the data mean nothing, and
/// only `Simple` is safe (aws/aws-ofi-nccl issue 76; the limit was lifted for P5 in pull request 280).
static EFA_OF_P4: Network = Network { name: "EFA of P4", protocols: &[Protocol::Simple], efficiency: 0.955 };

impl Network {
    /// The kind of network between the nodes of a group, by `inter_node.kind`: `efa`, `efa-p4`, or anything else.
    pub fn of(group: &Group) -> &'static Network {
        match group.inter_node.kind.as_str() {
            "efa" => &EFA,
            "efa-p4" => &EFA_OF_P4,
            _ => &INFINIBAND,
        }
    }

    /// A network for which only the figures are known.
    pub fn any() -> &'static Network {
        &INFINIBAND
    }
}

// NCCL's tuner assumes 2.7, 4.0 and 14.0 us for a hop of a ring between nodes with its three protocols (NVIDIA/nccl,
// src/graph/tuning.cc, hwLat NET Ring). These are multiples of 8 us, the catalogue's InfiniBand.
const NETWORK_HOPS: [f64; 3] = [2.7 / 8.0, 4.0 / 8.0, 14.0 / 8.0];

// LL sends as many bytes of flags as of data, LL128 one flag byte in sixteen.
const NETWORK_PARTS: [f64; 3] = [0.5, 15.0 / 16.0, 1.0];

pub(crate) const fn protocol(i: usize, start_s: f64, hop_s: f64, efficiency: f64) -> ProtocolFigures {
    ProtocolFigures {
        protocol: [Protocol::LowLatency, Protocol::LowLatency128, Protocol::Simple][i],
        start_s,
        // Fitted hops are in seconds; 3 us is the catalogue's latency of NVLink.
        hop: hop_s / 3e-6,
        efficiency,
        network_hop: NETWORK_HOPS[i],
        network_part: NETWORK_PARTS[i],
    }
}

/// Fitted to the V100 rows (8 x V100, NVLink, 2 to 8 devices), with bandwidth relative to the rings of
/// [`Wiring::HybridCube`].
const VOLTA: [ProtocolFigures; 3] =
    [protocol(0, 23e-6, 1.0e-6, 0.25), protocol(1, 13e-6, 3.2e-6, 0.56), protocol(2, 13e-6, 5.0e-6, 0.905)];

/// Fitted to the A100 rows of both tables (8 x A100, NVSwitch, 2 to 8 devices). Rows below 1 MiB are for 8 devices
/// only.
const AMPERE: [ProtocolFigures; 3] =
    [protocol(0, 28e-6, 1.0e-6, 0.081), protocol(1, 33.5e-6, 2.3e-6, 0.695), protocol(2, 54.5e-6, 2.55e-6, 0.78)];

/// Fitted to the H200 rows (8 x H200, NVSwitch). Rings of `Simple` were measured only with 8 GiB and more, where the
/// start is not visible; it is the A100's.
const HOPPER: [ProtocolFigures; 3] =
    [protocol(0, 29.5e-6, 0.58e-6, 0.426), protocol(1, 31e-6, 1.14e-6, 0.756), protocol(2, 54.5e-6, 2.55e-6, 0.823)];

/// Fitted to the B200 rows of one node (8 x B200, NVSwitch).
const BLACKWELL: [ProtocolFigures; 3] =
    [protocol(0, 38e-6, 0.48e-6, 0.227), protocol(1, 72e-6, 1.27e-6, 0.578), protocol(2, 31e-6, 4.5e-6, 0.769)];

/// No table: the starts of the A100, and the hops over PCIe of NCCL's tuner (hwLat PCI Ring 1.0, 2.5 and 5.7 us). These
/// are for a path of about 5 us, the catalogue's latency of PCIe. NCCL does not use LL128 there. The share of the
/// bandwidth is that of a ring of `Simple` over NVLink.
const PCIE: [ProtocolFigures; 2] = [
    ProtocolFigures { hop: 1.0 / 5.0, ..protocol(0, 28e-6, 0.0, 0.39) },
    ProtocolFigures { hop: 5.7 / 5.0, ..protocol(2, 54.5e-6, 0.0, 0.78) },
];

/// No table: a hop takes the file's latency, the start is that of a few function calls, and the share of the bandwidth
/// is that of rings elsewhere.
const HOST: [ProtocolFigures; 1] = [ProtocolFigures {
    protocol: Protocol::Simple,
    start_s: 7e-6,
    hop: 1.0,
    efficiency: 0.8,
    network_hop: 1.0,
    network_part: 1.0,
}];

static HYBRID_CUBE: NodeLink = NodeLink {
    name: "NVLink 2, hybrid cube mesh",
    wiring: Wiring::HybridCube,
    library: Library::Nccl,
    protocols: &VOLTA,
    exposed_rounds: 0.0,
    send_start_s: NCCL_SEND_START_S,
    sharp: None,
    exchanges: &[],
    captured: None,
};

/// A DGX-2. No table: the constants of the V100's rings, which use the same links.
static SWITCH_2: NodeLink =
    NodeLink { name: "NVLink 2, switched", wiring: Wiring::Switched, ..constants(&VOLTA, 0.0, None) };

static SWITCH_3: NodeLink = NodeLink {
    name: "NVLink 3, switched",
    wiring: Wiring::Switched,
    captured: Some(&captured::SWITCH_3),
    ..constants(&AMPERE, 0.425, None)
};

/// Four A100 wired to each other. No table: the constants of the A100's rings through switches.
static MESH_3: NodeLink =
    NodeLink { name: "NVLink, full mesh", wiring: Wiring::FullMesh, ..constants(&AMPERE, 0.425, None) };

static SWITCH_4: NodeLink = NodeLink {
    name: "NVLink 4, switched",
    wiring: Wiring::Switched,
    captured: Some(&captured::SWITCH_4),
    ..constants(&HOPPER, 0.07, Some(Sharp { start_s: 89.5e-6, efficiency: 0.679 }))
};

/// The start of in-switch reduction is larger than that of any call. Two tables were fitted together that differ by 12
/// % at 4 to 8 GiB. In both, rings are as fast up to 512 MiB.
static SWITCH_5: NodeLink = NodeLink {
    name: "NVLink 5, switched",
    wiring: Wiring::Switched,
    captured: Some(&captured::SWITCH_5),
    ..constants(&BLACKWELL, 0.146, Some(Sharp { start_s: 406e-6, efficiency: 0.612 }))
};

/// AMD's links between devices. No table: starts and hops of the A100, whose library RCCL is derived from.
static XGMI: NodeLink =
    NodeLink { name: "xGMI, full mesh", wiring: Wiring::FullMesh, ..constants(&AMPERE, 0.425, None) };

static INFINITY_FABRIC: NodeLink =
    NodeLink { name: "Infinity Fabric", wiring: Wiring::Switched, ..constants(&AMPERE, 0.425, None) };

static PCI_EXPRESS: NodeLink = NodeLink { name: "PCIe", wiring: Wiring::Switched, ..constants(&PCIE, 0.425, None) };

static MEMORY: NodeLink = NodeLink {
    name: "shared memory",
    wiring: Wiring::Switched,
    library: Library::Mpi,
    protocols: &HOST,
    exposed_rounds: 0.0,
    send_start_s: 0.0,
    sharp: None,
    exchanges: &[],
    captured: None,
};

pub(crate) const fn constants(
    protocols: &'static [ProtocolFigures],
    exposed_rounds: f64,
    sharp: Option<Sharp>,
) -> NodeLink {
    NodeLink {
        name: "",
        wiring: Wiring::Switched,
        library: Library::Nccl,
        protocols,
        exposed_rounds,
        send_start_s: NCCL_SEND_START_S,
        sharp,
        exchanges: &[],
        captured: None,
    }
}

impl NodeLink {
    /// The kind of link in the nodes of a group, by `intra_node.kind`:
    ///
    /// | kind | devices are |
    /// | --- | --- |
    /// | `nvlink` | wired as in a DGX-1 |
    /// | `nvlink-mesh`, `xgmi` | each wired to every other alike; `bytes_per_s` is all links of a device together |
    /// | `nvswitch` | connected by switches, of the generation of the device's NVLink |
    /// | `infinity-fabric` | of unspecified wiring; `bytes_per_s` is the bandwidth of a ring |
    /// | `pcie` | on PCIe |
    /// | `shared-memory` | CPU workers of one machine |
    ///
    /// Any other kind means switches if the device is a GPU of the catalogue, and shared memory otherwise.
    pub fn of(group: &Group) -> &'static NodeLink {
        let generation = catalogue::nvlink_generation(&group.device.name);
        // A switch has the generation of its devices.
        let of_its_time = || match group.device.generation() {
            Some(Architecture::Nvidia(0..80)) => 2,
            Some(Architecture::Nvidia(90..100)) => 4,
            Some(Architecture::Nvidia(100..)) => 5,
            _ => 3,
        };
        match group.intra_node.kind.as_str() {
            "nvlink" => &HYBRID_CUBE,
            "nvlink-mesh" => &MESH_3,
            "xgmi" => &XGMI,
            "infinity-fabric" => &INFINITY_FABRIC,
            "pcie" => &PCI_EXPRESS,
            "shared-memory" => &MEMORY,
            "nvswitch" => NodeLink::switched(generation.unwrap_or_else(of_its_time)),
            _ => generation.map_or(&MEMORY, NodeLink::switched),
        }
    }

    /// The links of devices on switches of a generation of NVLink; 0 stands for a device without NVLink.
    pub fn switched(nvlink_generation: u32) -> &'static NodeLink {
        match nvlink_generation {
            0 => &PCI_EXPRESS,
            1 | 2 => &SWITCH_2,
            3 => &SWITCH_3,
            4 => &SWITCH_4,
            _ => &SWITCH_5,
        }
    }

    /// These links for collectives that a CUDA graph starts, or as they are where no table has any.
    pub fn captured(&'static self) -> &'static NodeLink {
        self.captured.unwrap_or(self)
    }

    /// Links of CPU workers, and links for which only the figures are known.
    pub fn shared_memory() -> &'static NodeLink {
        &MEMORY
    }

    /// The share of a device's bandwidth that a ring over `devices` of the `devices_per_node` of a node can use.
    ///
    /// In a hybrid cube mesh, a ring over some of the eight devices finds only the links among them: 1 of 6 for two
    /// devices, 4 of 6 for four. All-reduces over 2 to 8 V100 reach 22.6, 45.1, 85.4, 37.2, 45.7, 87.0 and 134.5 GB/s,
    /// with links of 25 GB/s. The fifth of five devices is wired to only one other, so its ring passes through a
    /// neighbour twice; that is worth 1.65 links. A full mesh has `devices - 1` of `devices_per_node - 1` links.
    pub fn ring_part(&self, devices: u64, devices_per_node: u64) -> f64 {
        match self.wiring {
            Wiring::Switched => 1.0,
            Wiring::HybridCube => {
                let links = match devices {
                    0..=2 => 1.0,
                    3 | 6 => 2.0,
                    5 => 1.65,
                    4 | 7 => 4.0,
                    _ => 6.0,
                };
                links / 6.0
            }
            Wiring::FullMesh => {
                let others = devices_per_node.saturating_sub(1).max(1) as f64;
                (devices.saturating_sub(1).max(1) as f64 / others).min(1.0)
            }
        }
    }
}

#[cfg(test)]
#[path = "node_link_tests.rs"]
mod tests;
