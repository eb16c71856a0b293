//! Links as a collective or a transfer sees them: the physical links of a cluster's nodes, shared among all
//! simultaneous users. Here the shape of a mesh meets the shape of the machine. [`crate::collective`] prices the data
//! sent over a link.

use crate::collective::{self, Operation};
use crate::node_link::{Network, NodeLink};
use altiplano_ir::cluster::{BetweenGroups, Group};
use altiplano_ir::mesh::{AxisId, Mesh};

/// The links of one collective's group of devices, while every other group of the same axes runs the same collective.
/// Bandwidths are those of datasheets; `kind` has the share that is reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AxisLink {
    /// Devices in a group.
    pub devices: u64,
    /// Nodes on which a group has devices.
    pub nodes: u64,
    /// Devices of a group on one node.
    pub devices_on_node: u64,
    /// Bytes/s at which a device passes data to its neighbour in a ring inside the node, in each direction.
    pub inside_bytes_per_s: f64,
    /// Seconds of latency of a hop inside a node.
    pub inside_latency_s: f64,
    /// Bytes/s of a group's share of its node's network, in each direction; infinite if no group leaves a node.
    pub across_bytes_per_s: f64,
    /// Bytes/s at which the network lets each device send when every device sends to every other of its group at once.
    /// It is lower than `across_bytes_per_s` if a node holds several devices of a group: a ring leaves the node once,
    /// an exchange once per pair, or once per node where the group says that tokens are dispatched so.
    pub exchange_bytes_per_s: f64,
    /// Seconds of latency of a hop between nodes.
    pub across_latency_s: f64,
    pub kind: &'static NodeLink,
    pub network: &'static Network,
}

/// The links between two submeshes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferPath {
    /// Total bytes/s between the submeshes, when every device of the smaller side sends or receives its share.
    pub bytes_per_s: f64,
    pub latency_s: f64,
    /// True if it leaves a node.
    pub across: bool,
    pub kind: &'static NodeLink,
    pub network: &'static Network,
}

impl AxisLink {
    /// A link of plain numbers between the devices of one node.
    pub fn new(devices: u64, bytes_per_s: f64, latency_s: f64) -> Self {
        AxisLink {
            devices,
            nodes: 1,
            devices_on_node: devices,
            inside_bytes_per_s: bytes_per_s,
            inside_latency_s: latency_s,
            across_bytes_per_s: f64::INFINITY,
            exchange_bytes_per_s: f64::INFINITY,
            across_latency_s: 0.0,
            kind: NodeLink::shared_memory(),
            network: Network::any(),
        }
    }

    /// Bytes/s of a ring over all devices: that of the slower kind of link on its way.
    pub fn ring_bytes_per_s(&self) -> f64 {
        self.inside_bytes_per_s.min(self.across_bytes_per_s)
    }

    /// Bytes/s at which each device sends when every device sends to every other.
    pub fn all_to_all_bytes_per_s(&self) -> f64 {
        self.inside_bytes_per_s.min(self.exchange_bytes_per_s)
    }
}

impl TransferPath {
    /// Seconds from the start of a transfer until the last of `bytes` has arrived.
    pub fn transfer_s(&self, bytes: u64) -> f64 {
        let link =
            AxisLink { kind: self.kind, network: self.network, ..AxisLink::new(2, self.bytes_per_s, self.latency_s) };
        let link = match self.across {
            false => link,
            // The devices of either side do not communicate with each other, so the network is the only link.
            true => AxisLink {
                nodes: 2,
                devices_on_node: 1,
                inside_bytes_per_s: f64::INFINITY,
                across_bytes_per_s: self.bytes_per_s,
                exchange_bytes_per_s: self.bytes_per_s,
                across_latency_s: self.latency_s,
                inside_latency_s: 0.0,
                ..link
            },
        };
        collective::best(Operation::SendReceive, bytes, &link).seconds
    }
}

/// The links of collectives over `axes` of a mesh on a submesh of `submesh_nodes` nodes with `submesh_devices_per_node`
/// devices of each. The mesh's devices fill one node after the other (row major).
///
/// Groups inside a node use `intra_node`. A ring that spans nodes visits them one after the other, so it leaves each
/// node once. Its bottleneck is the node's network, `nics * bytes_per_s / oversubscription`, which all groups that
/// leave the node share, and which is never more than the link inside the node. A submesh with only some of a node's
/// devices gets that share of its network, since its neighbours on the node do similar work at the same time.
///
/// Example: `mesh<data=2, tensor=8>` on two p3.16xlarge (8 V100 each, one 25 Gb/s NIC: 3.125e9 bytes/s). `tensor` stays
/// inside a node: NVLink. Each of the 8 groups of `data` has one device in either node, so 8 rings share a NIC: 0.39e9
/// bytes/s each. On `mesh<data=16>` the one ring of 16 devices has the whole NIC: 3.125e9 bytes/s.
pub fn axis_link(
    cluster_group: &Group,
    submesh_nodes: u32,
    submesh_devices_per_node: u32,
    mesh: &Mesh,
    axes: &[AxisId],
) -> AxisLink {
    let intra = &cluster_group.intra_node;
    let kind = NodeLink::of(cluster_group);
    let in_node = u64::from(cluster_group.devices_per_node);
    let devices = mesh.product(axes);
    let inside = AxisLink {
        kind,
        network: Network::of(cluster_group),
        ..AxisLink::new(devices, intra.bytes_per_s * kind.ring_part(devices, in_node), intra.latency_s)
    };
    if devices <= 1 || submesh_nodes <= 1 {
        return inside;
    }
    let crossing = crossings(mesh, axes, submesh_devices_per_node.max(1));
    if crossing.max_groups_leaving == 0 {
        return inside;
    }
    let node_bytes_per_s = network_bytes_per_s(cluster_group, submesh_devices_per_node);
    let n = devices as f64;
    let nodes = crossing.max_nodes_of_group;
    let sent = cluster_group.dispatch.map_or(1.0, |routing| routing.sent_once(nodes));
    let inside_bytes_per_s = match crossing.max_devices_on_node {
        // A device that is alone on its node reaches the network over any of its links.
        1 => intra.bytes_per_s,
        here => intra.bytes_per_s * kind.ring_part(here, in_node),
    };
    AxisLink {
        nodes,
        devices_on_node: crossing.max_devices_on_node,
        inside_bytes_per_s,
        across_bytes_per_s: node_bytes_per_s / crossing.max_groups_leaving as f64,
        exchange_bytes_per_s: node_bytes_per_s * (n - 1.0) / (sent * crossing.max_devices_times_away),
        across_latency_s: cluster_group.inter_node.latency_s,
        ..inside
    }
}

/// Bytes/s between a node and the others for some of its devices, in each direction. If more nodes share a switch than
/// it has uplinks, each gets its share of those, since the groups of an axis all run at the same time.
fn network_bytes_per_s(group: &Group, devices: u32) -> f64 {
    let share = f64::from(devices) / f64::from(group.devices_per_node.max(1));
    let inter = &group.inter_node;
    f64::from(inter.nics) * inter.bytes_per_s * share.min(1.0) / inter.oversubscription.max(1.0)
}

/// How the groups of some axes lie across nodes. Each number is the maximum over nodes or groups.
struct Crossings {
    /// Groups with devices on a node and elsewhere.
    max_groups_leaving: u64,
    /// Nodes on which one group has devices.
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
/// drives its share of the node's NICs but at least one. Between two p3.16xlarge, one device reaches 3.125e9 bytes/s
/// (the only NIC), as do all eight. Between two DGX A100 (8 NICs at 25e9), one device reaches 25e9 bytes/s and eight
/// reach 200e9.
pub fn transfer_path(group: &Group, source: (u32, u32), target: (u32, u32), same_node: bool) -> TransferPath {
    let intra = &group.intra_node;
    let (kind, network) = (NodeLink::of(group), Network::of(group));
    if same_node {
        let devices = source.0.saturating_mul(source.1).min(target.0.saturating_mul(target.1)).max(1);
        let pair_bytes_per_s = intra.bytes_per_s * kind.ring_part(2, u64::from(group.devices_per_node));
        let bytes_per_s = f64::from(devices) * pair_bytes_per_s;
        return TransferPath { bytes_per_s, latency_s: intra.latency_s, across: false, kind, network };
    }
    let bytes_per_s = network_side(group, source).min(network_side(group, target));
    TransferPath { bytes_per_s, latency_s: group.inter_node.latency_s, across: true, kind, network }
}

/// The links from a submesh of one group to one of another, each given as its group and (nodes, devices per node). Both
/// sides drive their share of their own nodes' NICs, and everything crosses the link between the groups.
pub fn path_between_groups(
    source: (&Group, (u32, u32)),
    target: (&Group, (u32, u32)),
    between: &BetweenGroups,
) -> TransferPath {
    let sides = network_side(source.0, source.1).min(network_side(target.0, target.1));
    TransferPath {
        bytes_per_s: sides.min(between.bytes_per_s),
        latency_s: between.latency_s,
        across: true,
        kind: NodeLink::of(source.0),
        network: Network::of(source.0),
    }
}

/// Bytes/s between a submesh and other nodes for a transfer.
fn network_side(group: &Group, submesh: (u32, u32)) -> f64 {
    let (nodes, devices_per_node) = submesh;
    let inter = &group.inter_node;
    let devices_per_node = devices_per_node.max(1);
    let nics_per_device = inter.nics.div_ceil(group.devices_per_node.max(1));
    let nics = inter.nics.min(devices_per_node.saturating_mul(nics_per_device));
    let by_network = f64::from(nics) * inter.bytes_per_s / inter.oversubscription.max(1.0);
    f64::from(nodes.max(1)) * by_network.min(f64::from(devices_per_node) * group.intra_node.bytes_per_s)
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
