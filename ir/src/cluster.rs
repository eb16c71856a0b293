//! The machines: groups of equal nodes, their devices and links. The catalogue of known machines and the TOML
//! form live in the cost models; here is the data that a plan carries with it.

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

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
    pub fn is_gpu(&self) -> bool {
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
    /// Power that it draws at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watts: Option<f64>,
    /// Power that its owner lets it draw, where that is less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_watts: Option<f64>,
    /// Instruction set as compilers name it: `sm_90`, `gfx942`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<Architecture>,
    /// True if its software has attention in one kernel, where that is stated; see [`Device::generation`] where it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fused_attention: Option<bool>,
    /// Memory that no tensor of a plan can use; none where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Reserved>,
    /// Bandwidth of the link to the memory of its host, per direction, while all devices of a node use theirs; the catalogue's where
    /// it is not stated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes_per_s: Option<f64>,
    /// What was fitted for this device; the catalogue's where nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constants: Option<Constants>,
}

/// Memory of a device that is taken before a plan stores anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// The driver's context, code of kernels, and workspaces of libraries.
    pub context_bytes: u64,
    /// Buffers of the library that communicates, where there are several devices.
    pub communication_bytes: u64,
    /// What an allocator has of the device and cannot give out, since free blocks have the wrong sizes.
    pub allocator_bytes: u64,
}

/// The instruction set of a device: vendors' compilers name it, and libraries say by it which kernels they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Architecture {
    /// NVIDIA's compute capability, ten times: 90 for 9.0.
    Nvidia(u32),
    /// AMD's name, as a hexadecimal number: `0x942` for `gfx942`.
    Amd(u32),
}

impl TryFrom<String> for Architecture {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // `sm_90a` has instructions beyond those of sm_90.
        let nvidia = text.strip_prefix("sm_").map(|n| n.trim_end_matches(['a', 'f'])).and_then(|n| n.parse().ok());
        let amd = text.strip_prefix("gfx").and_then(|n| u32::from_str_radix(n, 16).ok());
        match (nvidia, amd) {
            (Some(capability), _) => Ok(Architecture::Nvidia(capability)),
            (None, Some(number)) => Ok(Architecture::Amd(number)),
            (None, None) => Err(format!("'{text}' is no architecture; examples are sm_80, sm_90 and gfx942")),
        }
    }
}

impl From<Architecture> for String {
    fn from(architecture: Architecture) -> String {
        architecture.to_string()
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Architecture::Nvidia(capability) => write!(f, "sm_{capability}"),
            Architecture::Amd(number) => write!(f, "gfx{number:x}"),
        }
    }
}

impl Device {
    /// The architecture that is stated, or the oldest that has units for the element types of the device's peak rates; `None` for
    /// what is no GPU.
    pub fn generation(&self) -> Option<Architecture> {
        let has = |dtype: DType| self.peak_flops.contains_key(&dtype);
        let guess = || {
            Some(match () {
                _ if has(DType::F8E4M3FNUZ) => Architecture::Amd(0x942),
                _ if has(DType::F8E4M3FN) => Architecture::Nvidia(89),
                _ if has(DType::BF16) => Architecture::Nvidia(80),
                _ if has(DType::F16) => Architecture::Nvidia(70),
                _ => return None,
            })
        };
        self.kind.is_gpu().then(|| self.architecture.or_else(guess)).flatten()
    }

    /// Part of its full clock at which it multiplies within its power limit.
    ///
    /// What switches draws power that grows with the cube of the clock, since voltage follows the clock. Leakage, memory and links draw
    /// what they draw at any clock: three sevenths of the power, by the clocks that NVIDIA guarantees of one chip with one memory under
    /// load, the A100 of 40 GB: 1095 MHz within 400 W (SXM) and 765 within 250 (PCIe).
    pub fn clock_part(&self) -> f64 {
        const WITHOUT_CLOCK: f64 = 3.0 / 7.0;
        match (self.watts, self.power_limit_watts) {
            (Some(full), Some(limit)) if limit < full => {
                ((limit / full - WITHOUT_CLOCK) / (1.0 - WITHOUT_CLOCK)).max(0.01).cbrt()
            }
            _ => 1.0,
        }
    }
}

/// What no datasheet states: fractions of the peaks that kernels reach, and how long it takes to start one. They belong to a
/// kind of device and the software that drives it, and are fitted on measured steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constants {
    /// Part of the peak rate that a full wave of the largest tiles reaches.
    pub matmul_efficiency: f64,
    /// Part of the peak rate that the forward pass of fused attention reaches on long rows.
    pub attention_efficiency: f64,
    /// The same of its backward pass, whose five products count.
    pub attention_backward_efficiency: f64,
    /// Keys of 16 bits that a row of queries takes as long as, beyond those that it sees: filling pipelines, and blocks that end early.
    pub attention_fill: f64,
    /// Part of the memory's bandwidth that streaming kernels reach.
    pub memory_efficiency: f64,
    /// The same of kernels that sum gradients and update parameters. Software that runs passes op by op moves more in them than fused
    /// kernels would, for which `memory_efficiency` makes up; an update is one kernel everywhere.
    pub update_efficiency: f64,
    /// Part of the rate that collectives measured alone have (nccl-tests) which those of a step reach, between and beside its kernels.
    pub collective_efficiency: f64,
    /// Part of the rate that a matmul loses with each halving of the alignment of its rows below 16 bytes.
    pub misaligned_loss: f64,
    /// Seconds of the host for each kernel that it issues.
    pub dispatch_s: f64,
    /// Seconds of the host for each collective that it issues, beyond a kernel's.
    pub collective_dispatch_s: f64,
    /// Kernels that the host has issued and the device has not done, at most: software that looks at results now and then lets
    /// it wait. 0 where it never waits.
    pub queued_kernels: f64,
    /// Seconds within which devices that work alike come to where they meet in a collective, as if each came at any moment of them: the
    /// last of `n` at `n / (n + 1)` of them.
    pub skew_s: f64,
    /// Matmul tiles that run at once; 0 where it is not known, or where work is not cut into tiles.
    pub multiprocessors: f64,
    /// Part of a last wave of tiles that is lost where they do not fill it.
    pub tail_loss: f64,
    /// Scalar operations a second outside matmul units, in f32; 0 where it is not known.
    pub vector_flops: f64,
}

impl Default for Constants {
    fn default() -> Self {
        Constants {
            matmul_efficiency: MATMUL_EFFICIENCY,
            attention_efficiency: 0.5,
            attention_backward_efficiency: 0.5,
            attention_fill: 0.0,
            memory_efficiency: MEMORY_EFFICIENCY,
            update_efficiency: MEMORY_EFFICIENCY,
            collective_efficiency: 1.0,
            misaligned_loss: 0.3,
            dispatch_s: 0.0,
            collective_dispatch_s: 0.0,
            queued_kernels: 0.0,
            skew_s: 0.0,
            multiprocessors: 0.0,
            tail_loss: 1.0,
            vector_flops: 0.0,
        }
    }
}

/// Part of the peak rate that matmuls of training sizes reach, for devices without published measurements.
pub const MATMUL_EFFICIENCY: f64 = 0.7;

/// Part of the memory's bandwidth that streaming kernels reach, for such devices: fused GELU and softmax on a V100 move 0.8 to
/// 0.97 of 900 GB/s (Aceso's V100 profiles, 2024, SuperScaler repository).
pub const MEMORY_EFFICIENCY: f64 = 0.85;

impl Constants {
    pub const NAMES: [&str; 15] = [
        "matmul_efficiency",
        "attention_efficiency",
        "attention_backward_efficiency",
        "attention_fill",
        "memory_efficiency",
        "update_efficiency",
        "collective_efficiency",
        "misaligned_loss",
        "dispatch_s",
        "collective_dispatch_s",
        "queued_kernels",
        "skew_s",
        "multiprocessors",
        "tail_loss",
        "vector_flops",
    ];

    /// A constant by its name in files, one of [`Constants::NAMES`].
    pub fn by_name(&mut self, name: &str) -> Option<&mut f64> {
        Some(match name {
            "matmul_efficiency" => &mut self.matmul_efficiency,
            "attention_efficiency" => &mut self.attention_efficiency,
            "attention_backward_efficiency" => &mut self.attention_backward_efficiency,
            "attention_fill" => &mut self.attention_fill,
            "memory_efficiency" => &mut self.memory_efficiency,
            "update_efficiency" => &mut self.update_efficiency,
            "collective_efficiency" => &mut self.collective_efficiency,
            "misaligned_loss" => &mut self.misaligned_loss,
            "dispatch_s" => &mut self.dispatch_s,
            "collective_dispatch_s" => &mut self.collective_dispatch_s,
            "queued_kernels" => &mut self.queued_kernels,
            "skew_s" => &mut self.skew_s,
            "multiprocessors" => &mut self.multiprocessors,
            "tail_loss" => &mut self.tail_loss,
            "vector_flops" => &mut self.vector_flops,
            _ => return None,
        })
    }
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
    /// Memory of a node beyond its devices', where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    /// Price of one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<f64>,
}

/// The link from each group of nodes to the others, per direction: all that two groups send each other goes over it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BetweenGroups {
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

/// Where samples are read from: a file system that all nodes share, and disks of each node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataStorage {
    /// Of the file system, to all nodes together.
    pub bytes_per_s: f64,
    /// Of the file system, to one node.
    pub node_bytes_per_s: f64,
    /// Files that can be opened a second, by all nodes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_ops_per_s: Option<f64>,
    /// The disks of a node that data can be copied to before training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_disk: Option<NodeDisk>,
}

/// The disks of a node, together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeDisk {
    pub bytes: u64,
    pub bytes_per_s: f64,
}

/// A cluster. Global device ids count through groups, nodes and devices in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    pub name: String,
    pub groups: Vec<Group>,
    /// Where there are several groups, how they reach each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_groups: Option<BetweenGroups>,
    /// Where samples are read from, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<DataStorage>,
}

impl Group {
    pub fn num_devices(&self) -> u32 {
        self.nodes * self.devices_per_node
    }
}

impl Cluster {
    /// Bytes of a device of a group that tensors can use: its memory less what is [`Reserved`].
    pub fn usable_bytes(&self, group: &Group) -> u64 {
        self.taken_bytes(group).into_iter().fold(group.device.memory_bytes, u64::saturating_sub)
    }

    /// What is [`Reserved`] on a device of a group: for the context, to communicate, and by the allocator.
    pub fn taken_bytes(&self, group: &Group) -> [u64; 3] {
        let Some(Reserved { context_bytes, communication_bytes, allocator_bytes }) = group.device.reserved else {
            return [0; 3];
        };
        [context_bytes, if self.num_devices() > 1 { communication_bytes } else { 0 }, allocator_bytes]
    }

    pub fn num_devices(&self) -> u32 {
        self.groups.iter().map(Group::num_devices).sum()
    }

    /// Global ids of a group's devices.
    pub fn devices_of(&self, group: usize) -> Range<u32> {
        let first = self.groups[..group].iter().map(Group::num_devices).sum();
        first..first + self.groups[group].num_devices()
    }
}
