//! The machines: groups of equal nodes, their devices and links. This is the data that a plan carries. The catalogue of
//! known machines and the TOML form are in the cost models.

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// The software that runs programs on a device. It decides which of their values are kept in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// Kernels that a framework launches.
    #[default]
    Gpu,
    /// The kernels of this project's runtime, on CPU cores.
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
    /// The bandwidth of the device memory.
    pub memory_bytes_per_s: f64,
    /// The peak rate in FLOP/s, by the element type of a matmul's operands.
    pub peak_flops: BTreeMap<DType, f64>,
    /// The seconds to launch one kernel.
    #[serde(default)]
    pub launch_s: f64,
    /// The size of the last cache that the whole device shares, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2_bytes: Option<u64>,
    /// The units over which blocks of threads are distributed: NVIDIA's streaming multiprocessors, AMD's compute units,
    /// or cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// The power that the device draws at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watts: Option<f64>,
    /// The power limit that the owner sets, if lower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_watts: Option<f64>,
    /// The instruction set, as compilers name it: `sm_90`, `gfx942`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<Architecture>,
    /// True if the software has attention in one kernel. If absent, [`Device::generation`] decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fused_attention: Option<bool>,
    /// Memory that no tensor of a plan can use. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Reserved>,
    /// The bandwidth of the link to host memory, per direction, while all devices of a node use theirs. If absent, the
    /// catalogue's value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes_per_s: Option<f64>,
    /// Constants fitted for this device. If absent, the catalogue's values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constants: Option<Constants>,
}

/// The device memory in use before a plan stores anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reserved {
    /// The driver's context, the code of kernels, and workspaces of libraries.
    pub context_bytes: u64,
    /// The buffers of the communication library, if there are several devices.
    pub communication_bytes: u64,
    /// Memory that the allocator holds but cannot use, because its free blocks have the wrong sizes.
    pub allocator_bytes: u64,
}

/// The instruction set of a device. Compilers name it, and libraries choose their kernels by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Architecture {
    /// NVIDIA's compute capability times ten: 90 for 9.0.
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
    /// The stated architecture, or the oldest one that supports the element types of the device's peak rates. `None` if
    /// the device is not a GPU.
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

    /// The fraction of its full clock at which the device multiplies within its power limit.
    ///
    /// The power of switching grows with the cube of the clock, since voltage follows the clock. Leakage, memory and
    /// links draw the rest at any clock: three sevenths of the power. The part is that of the A100 of 40 GB, one chip with
    /// one memory, whose clock NVIDIA guarantees under load: 1095 MHz within 400 W (SXM), 765 MHz within 250 W (PCIe).
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

/// Constants that no datasheet states: the fractions of the peaks that kernels reach, and the time to start a kernel.
/// They belong to a kind of device and its software, and are fitted on measured steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Constants {
    /// The fraction of the peak rate that a full wave of the largest tiles reaches.
    pub matmul_efficiency: f64,
    /// The fraction of the peak rate that the forward pass of fused attention reaches on long rows.
    pub attention_efficiency: f64,
    /// The fraction of the peak rate that the backward pass of fused attention reaches, with all five products counted.
    pub attention_backward_efficiency: f64,
    /// The fixed cost of a row of queries, in additional keys of 16 bits. It covers filling pipelines and blocks that end
    /// early.
    pub attention_fill: f64,
    /// The part of an average tile's time that passes while the last tiles of fused attention end and other
    /// multiprocessors are idle.
    pub attention_tail: f64,
    /// The rate of matmuls within a step, as a fraction of their rate when measured alone. In long steps a device runs
    /// at a lower clock, and each product finds other operands in the caches than its own.
    pub sustained_efficiency: f64,
    /// The fraction of the memory bandwidth that streaming kernels reach.
    pub memory_efficiency: f64,
    /// The same for kernels that sum gradients and update parameters. Software that runs other passes op by op moves
    /// more bytes than fused kernels would, and `memory_efficiency` makes up for that. An update is one kernel in all
    /// software.
    pub update_efficiency: f64,
    /// The rate of collectives within a step, as a fraction of their rate when measured alone (nccl-tests). In a step
    /// they run between and beside kernels.
    pub collective_efficiency: f64,
    /// The fraction of the rate that a matmul loses each time the alignment of its rows halves, below 16 bytes.
    pub misaligned_loss: f64,
    /// The seconds of the host to issue each kernel.
    pub dispatch_s: f64,
    /// The additional seconds of the host to issue each collective.
    pub collective_dispatch_s: f64,
    /// The largest number of kernels that the host has issued and the device has not completed. Software that reads
    /// results now and then lets the device wait. 0 if it never waits.
    pub queued_kernels: f64,
    /// The seconds within which devices with equal work arrive at a collective. Arrivals are modelled as uniform, so
    /// the last of `n` devices comes at `n / (n + 1)` of this time.
    pub skew_s: f64,
    /// The number of matmul tiles that run at once. 0 if unknown, or if work is not divided into tiles.
    pub multiprocessors: f64,
    /// The fraction of a partial last wave of tiles that is lost.
    pub tail_loss: f64,
    /// The scalar f32 operations per second outside matmul units. 0 if unknown.
    pub vector_flops: f64,
}

impl Default for Constants {
    fn default() -> Self {
        Constants {
            matmul_efficiency: MATMUL_EFFICIENCY,
            attention_efficiency: 0.5,
            attention_backward_efficiency: 0.5,
            attention_fill: 0.0,
            attention_tail: 0.0,
            sustained_efficiency: 1.0,
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

/// The fraction of the peak rate that matmuls of training sizes reach, for devices without published measurements.
pub const MATMUL_EFFICIENCY: f64 = 0.7;

/// The fraction of the memory bandwidth that streaming kernels reach, for such devices. Fused GELU and softmax on a
/// V100 move 0.8 to 0.97 of 900 GB/s (Aceso's V100 profiles, 2024, SuperScaler repository).
pub const MEMORY_EFFICIENCY: f64 = 0.85;

impl Constants {
    pub const NAMES: [&str; 17] = [
        "matmul_efficiency",
        "attention_efficiency",
        "attention_backward_efficiency",
        "attention_fill",
        "attention_tail",
        "sustained_efficiency",
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
            "attention_tail" => &mut self.attention_tail,
            "sustained_efficiency" => &mut self.sustained_efficiency,
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
    /// The bandwidth of the nodes below a switch over that of its links to the rest. 1 if all nodes can communicate at
    /// full rate.
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
    /// The host memory of a node, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<u64>,
    /// The price of one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<f64>,
    /// How tokens are routed to experts, if the software on these nodes sends each token once to a node (DeepEP).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch: Option<Routing>,
}

/// How tokens are routed to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Routing {
    /// The experts that a token goes to.
    pub chosen: u64,
    /// Equal groups of all experts.
    pub groups: u64,
    /// The groups that the experts of a token are in, at most.
    pub chosen_groups: u64,
}

impl Routing {
    /// More groups than this limit the nodes no more than choices of single experts do.
    const MOST_GROUPS: u64 = 256;

    /// The part of the copies of tokens that cross to other nodes if each token is sent once to a node, and passed on there
    /// to all experts that it goes to. Experts lie on the nodes in order and evenly. All groups are chosen equally often, and so
    /// are the experts in them, one independently of another.
    pub fn sent_once(&self, nodes: u64) -> f64 {
        let (nodes, chosen) = (nodes.max(1) as f64, self.chosen.max(1) as f64);
        let groups = if self.groups <= Self::MOST_GROUPS { self.groups.max(1) } else { 1 };
        let kept = self.chosen_groups.clamp(1, groups);
        let of_choices = |share: f64| (1.0 - share).max(0.0).powf(chosen);
        let missed = if nodes >= groups as f64 {
            // The node has a part of one group.
            let chance = kept as f64 / groups as f64;
            1.0 - chance + chance * of_choices(groups as f64 / nodes / kept as f64)
        } else {
            // Of the groups on the node, any number may be kept.
            let here = ((groups as f64 / nodes).round() as u64).max(1);
            let with = |count: u64| {
                let ways = choose(here, count) * choose(groups - here, kept - count) / choose(groups, kept);
                ways * of_choices(count as f64 / kept as f64)
            };
            (0..=here.min(kept)).map(with).sum()
        };
        (nodes * (1.0 - missed) / chosen).min(1.0)
    }
}

/// The number of ways to choose `k` of `n`.
fn choose(n: u64, k: u64) -> f64 {
    if k > n { 0.0 } else { (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product() }
}

/// The link from each group of nodes to the others, per direction. All traffic between two groups uses it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BetweenGroups {
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

/// The storage that samples are read from: a file system that all nodes share, and disks of each node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataStorage {
    /// The bandwidth of the file system to all nodes together.
    pub bytes_per_s: f64,
    /// The bandwidth of the file system to one node.
    pub node_bytes_per_s: f64,
    /// The files that can be opened per second, by all nodes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_ops_per_s: Option<f64>,
    /// The disks of a node, to which data can be copied before training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_disk: Option<NodeDisk>,
}

/// The disks of a node together.
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
    /// The link between groups, if there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_groups: Option<BetweenGroups>,
    /// The storage that samples are read from, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<DataStorage>,
}

impl Group {
    pub fn num_devices(&self) -> u32 {
        self.nodes * self.devices_per_node
    }
}

impl Cluster {
    /// The bytes of a device of a group that tensors can use: its memory minus the [`Reserved`] part.
    pub fn usable_bytes(&self, group: &Group) -> u64 {
        self.taken_bytes(group).into_iter().fold(group.device.memory_bytes, u64::saturating_sub)
    }

    /// The [`Reserved`] bytes of a device of a group: for the context, for communication, and in the allocator.
    pub fn taken_bytes(&self, group: &Group) -> [u64; 3] {
        let Some(Reserved { context_bytes, communication_bytes, allocator_bytes }) = group.device.reserved else {
            return [0; 3];
        };
        [context_bytes, if self.num_devices() > 1 { communication_bytes } else { 0 }, allocator_bytes]
    }

    pub fn num_devices(&self) -> u32 {
        self.groups.iter().map(Group::num_devices).sum()
    }

    /// The global ids of a group's devices.
    pub fn devices_of(&self, group: usize) -> Range<u32> {
        let first = self.groups[..group].iter().map(Group::num_devices).sum();
        first..first + self.groups[group].num_devices()
    }
}
