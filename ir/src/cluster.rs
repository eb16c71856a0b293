//! The machines: groups of equal nodes, their devices and links. The catalogue of known machines and the TOML
//! form live in the cost models; here is the data that a plan carries with it.

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What runs programs on a device, which decides what of them is kept in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// Kernels that a framework launches.
    #[default]
    Gpu,
    /// The kernels of this project's runtime, on cores of a machine.
    Cpu,
}

impl DeviceKind {
    fn is_gpu(&self) -> bool {
        *self == DeviceKind::Gpu
    }
}

/// A kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    pub name: String,
    #[serde(default, skip_serializing_if = "DeviceKind::is_gpu")]
    pub kind: DeviceKind,
    pub memory_bytes: u64,
    /// Bandwidth of that memory.
    pub memory_bytes_per_s: f64,
    /// Peak rate in FLOP/s by the element type of a matmul's operands.
    pub peak_flops: BTreeMap<DType, f64>,
    /// Seconds to launch one kernel.
    #[serde(default)]
    pub launch_s: f64,
    /// Size of the last cache that all of the device shares, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2_bytes: Option<u64>,
    /// Units that blocks of threads are distributed over: NVIDIA's streaming multiprocessors, AMD's compute units, cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
}

/// The link from one device to the others of its node, per device and direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntraNode {
    #[serde(default)]
    pub kind: String,
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

/// The links from one node to the others, per NIC and direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterNode {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    pub bytes_per_s: f64,
    pub nics: u32,
    pub latency_s: f64,
    /// Bandwidth of the nodes below a switch over that of its links to the rest: 1 where all nodes can talk at full rate.
    #[serde(default = "not_oversubscribed", skip_serializing_if = "is_not_oversubscribed")]
    pub oversubscription: f64,
}

fn not_oversubscribed() -> f64 {
    1.0
}

fn is_not_oversubscribed(factor: &f64) -> bool {
    *factor == 1.0
}

/// Equal nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub nodes: u32,
    pub devices_per_node: u32,
    pub device: Device,
    pub intra_node: IntraNode,
    pub inter_node: InterNode,
    /// Price of one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<f64>,
}

/// A cluster. Global device ids count through groups, nodes and devices in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    pub name: String,
    pub groups: Vec<Group>,
}

impl Group {
    pub fn num_devices(&self) -> u32 {
        self.nodes * self.devices_per_node
    }
}

impl Cluster {
    pub fn num_devices(&self) -> u32 {
        self.groups.iter().map(Group::num_devices).sum()
    }
}
