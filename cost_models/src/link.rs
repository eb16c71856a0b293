//! Links as a collective or a transfer sees them: the physical links of a cluster's nodes, shared among all that use
//! them at the same time. This is where the shape of a mesh meets the shape of the machine; what is sent over a link
//! is priced in [`crate::collective`].

use altiplano_ir::cluster::{Group, IntraNode};
use altiplano_ir::mesh::{AxisId, Mesh};

/// The links of one collective's group of devices, while every other group of the same axes runs the same collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AxisLink {
    /// Devices in a group.
    pub devices: u64,
    /// Bytes/s at which each device passes data to its neighbour in a ring, in each direction.
    pub bytes_per_s: f64,
    /// Bytes/s at which each device sends when every device sends to every other of its group at once. Lower than
    /// `bytes_per_s` where a node holds several devices of a group: a ring leaves the node once, an exchange once a pair.
    pub all_to_all_bytes_per_s: f64,
    /// Seconds of latency of a hop in the ring, averaged over its hops.
    pub latency_s: f64,
}

/// The links between two submeshes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferPath {
    /// Bytes/s between the submeshes in all, when every device of the smaller side sends or receives its share.
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

impl AxisLink {
    /// A link of plain numbers, alike for rings and exchanges.
    pub fn new(devices: u64, bytes_per_s: f64, latency_s: f64) -> Self {
        AxisLink { devices, bytes_per_s, all_to_all_bytes_per_s: bytes_per_s, latency_s }
    }
}

/// The links of collectives over `axes` of a mesh on a submesh of `submesh_nodes` nodes with
/// `submesh_devices_per_node` devices of each; the mesh's devices fill one node after the other (row major).
///
/// Groups inside a node use `intra_node`. A ring that spans nodes visits them one after the other, so it leaves each node
/// once; its bottleneck is the node's network, `nics * bytes_per_s`, shared by all groups that leave the node, and never
/// more than the link inside the node. A submesh that has only some of a node's devices gets that share of its
/// network, since its neighbours on the node do like work at the same time.
///
/// Example: `mesh<data=2, tensor=8>` on two p3.16xlarge (8 V100 each, one 25 Gb/s NIC: 3.125e9 bytes/s). `tensor` stays
/// inside a node: NVLink. Each of the 8 groups of `data` has one device in either node, so 8 rings share a NIC:
/// 0.39e9 bytes/s each. On `mesh<data=16>` the one ring of 16 devices has the whole NIC: 3.125e9 bytes/s.
pub fn axis_link(
    cluster_group: &Group,
    submesh_nodes: u32,
    submesh_devices_per_node: u32,
    mesh: &Mesh,
    axes: &[AxisId],
) -> AxisLink {
    let intra = &cluster_group.intra_node;
    let devices = mesh.product(axes);
    let inside = AxisLink::new(devices, intra_bytes_per_s(intra, devices), intra.latency_s);
    if devices <= 1 || submesh_nodes <= 1 {
        return inside;
    }
    let crossing = crossings(mesh, axes, submesh_devices_per_node.max(1));
    if crossing.max_groups_leaving == 0 {
        return inside;
    }
    let share = f64::from(submesh_devices_per_node) / f64::from(cluster_group.devices_per_node.max(1));
    let node_bytes_per_s =
        f64::from(cluster_group.inter_node.nics) * cluster_group.inter_node.bytes_per_s * share.min(1.0);
    let n = devices as f64;
    let hops_between = crossing.max_nodes_of_group as f64;
    let exchange_bytes_per_s = node_bytes_per_s * (n - 1.0) / crossing.max_devices_times_away;
    // A device that is alone on its node reaches the network over any of its links.
    let intra_bytes_per_s = match crossing.max_devices_on_node {
        1 => intra.bytes_per_s,
        here => intra_bytes_per_s(intra, here),
    };
    AxisLink {
        devices,
        bytes_per_s: (node_bytes_per_s / crossing.max_groups_leaving as f64).min(intra_bytes_per_s),
        all_to_all_bytes_per_s: exchange_bytes_per_s.min(intra_bytes_per_s),
        // A chunk on its way round the ring passes every hop once, so the average hop is what counts.
        latency_s: (hops_between * cluster_group.inter_node.latency_s + (n - hops_between) * intra.latency_s) / n,
    }
}

/// Bytes/s per device and direction of a ring over `devices` of a node.
///
/// Through a switch (or over PCIe or memory) a device has all of its link to whoever it talks to. Where `kind` is
/// `nvlink`, devices are wired to each other: the six links of each of a DGX-1's V100 (the hybrid cube mesh, as in
/// p3.16xlarge) go to four different neighbours, and a ring over some of the eight devices finds only the links among
/// them: 1 of 6 for two devices, 4 of 6 for four. NCCL all-reduces over 2 to 8 devices reach 22, 45, 85, 37, 46, 87 and
/// 134 GB/s there (measurements published with vTrain).
fn intra_bytes_per_s(intra: &IntraNode, devices: u64) -> f64 {
    let links_of_six = match devices {
        _ if intra.kind != "nvlink" => 6.0,
        2 => 1.0,
        3 | 5 | 6 => 2.0,
        4 | 7 => 4.0,
        _ => 6.0,
    };
    intra.bytes_per_s * links_of_six / 6.0
}

/// How the groups of some axes lie across nodes; each number is that of the node or group where it is largest.
struct Crossings {
    /// Groups with devices on a node and elsewhere.
    max_groups_leaving: u64,
    /// Nodes that one group has devices on.
    max_nodes_of_group: u64,
    /// Devices of one group on one node.
    max_devices_on_node: u64,
    /// Sum over a node's devices of the devices of their groups on other nodes.
    max_devices_times_away: f64,
}

fn crossings(mesh: &Mesh, axes: &[AxisId], devices_per_node: u32) -> Crossings {
    let n = mesh.product(axes);
    // A group is named by its member with coordinate 0 along all of the group's axes.
    let group_of = |position: u32| -> u32 {
        axes.iter().fold(position, |p, &axis| {
            let stride = mesh.stride(axis);
            p - position / stride % mesh.size(axis) as u32 * stride
        })
    };
    let mut members: Vec<(u32, u32)> = (0..mesh.num_devices()).map(|p| (p / devices_per_node, group_of(p))).collect();
    members.sort_unstable();
    let mut nodes_of_group = vec![0u64; mesh.num_devices() as usize];
    let mut found =
        Crossings { max_groups_leaving: 0, max_nodes_of_group: 1, max_devices_on_node: 1, max_devices_times_away: 0.0 };
    for node in members.chunk_by(|a, b| a.0 == b.0) {
        let mut leaving = 0;
        let mut devices_times_away = 0.0;
        for group in node.chunk_by(|a, b| a.1 == b.1) {
            let here = group.len() as u64;
            found.max_devices_on_node = found.max_devices_on_node.max(here);
            if here < n {
                leaving += 1;
                devices_times_away += (here * (n - here)) as f64;
            }
            let nodes = &mut nodes_of_group[group[0].1 as usize];
            *nodes += 1;
            found.max_nodes_of_group = found.max_nodes_of_group.max(*nodes);
        }
        found.max_groups_leaving = found.max_groups_leaving.max(leaving);
        found.max_devices_times_away = found.max_devices_times_away.max(devices_times_away);
    }
    found
}

/// The links from one submesh to another, each given as (nodes, devices per node). `same_node`: both lie on one node.
///
/// A transfer is cut into as many parts as the smaller side has devices, each between one pair. Between nodes, a device
/// drives its share of the node's NICs but at least one: of two p3.16xlarge, one device reaches 3.125e9 bytes/s (the only
/// NIC), as do all eight; of two DGX A100 (8 NICs at 25e9), one device reaches 25e9 bytes/s and eight reach 200e9.
pub fn transfer_path(group: &Group, source: (u32, u32), target: (u32, u32), same_node: bool) -> TransferPath {
    let intra = &group.intra_node;
    if same_node {
        let devices = source.0.saturating_mul(source.1).min(target.0.saturating_mul(target.1)).max(1);
        let bytes_per_s = f64::from(devices) * intra_bytes_per_s(intra, 2);
        return TransferPath { bytes_per_s, latency_s: intra.latency_s };
    }
    let inter = &group.inter_node;
    let side = |(nodes, devices_per_node): (u32, u32)| {
        let devices_per_node = devices_per_node.max(1);
        let nics_per_device = inter.nics.div_ceil(group.devices_per_node.max(1));
        let nics = inter.nics.min(devices_per_node.saturating_mul(nics_per_device));
        let by_network = f64::from(nics) * inter.bytes_per_s;
        f64::from(nodes.max(1)) * by_network.min(f64::from(devices_per_node) * intra.bytes_per_s)
    };
    TransferPath { bytes_per_s: side(source).min(side(target)), latency_s: inter.latency_s }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
