//! Seconds and bytes: what an op, a collective, a transfer and a pipeline cost on a described machine.
//!
//! The planner asks through one trait, [`CostModel`], and sees nothing of how an answer came about, so that a
//! measured profile or a model of tile quantisation can replace the [`Roofline`] without a change there. Beside it are
//! the catalogue of machines, the TOML form of a cluster, and the time of a pipeline schedule.

pub mod catalogue;
pub mod collective;
pub mod compute;
pub mod devices;
pub mod error;
pub mod fitted;
pub mod link;
pub mod node_link;
pub mod pipeline;
pub mod probe;
pub mod profile;
pub mod roofline;
pub mod sharing;
pub mod timeline;
pub mod toml_file;

pub use altiplano_ir::kernels;
pub use catalogue::{preset, presets};
pub use compute::Compute;
pub use error::ClusterError;
pub use link::{AxisLink, TransferPath, axis_link, path_between_groups, transfer_path};
pub use roofline::{Roofline, fallback};
pub use toml_file::{Devices, parse, parse_devices, quoted, write_constants};

use crate::timeline::Price;
use altiplano_ir::cluster::{Cluster, Device};
use altiplano_ir::kernels::Kernel;
use altiplano_ir::op::Op;
use altiplano_ir::program::{Body, Program};
use altiplano_ir::reshard::Collective;
use altiplano_ir::types::TensorType;
use altiplano_ir::work::Work;

/// Prices of the parts of a training step on one kind of device. All answers are seconds, finite and at least 0;
/// more bytes or elements never cost less, and more bandwidth never costs more.
pub trait CostModel: Sync {
    /// The device that is priced.
    fn device(&self) -> &Device;

    /// Seconds of one op on one device. Types are local: what this device holds of operands and result.
    /// Leaves, collectives and `axis_index` cost nothing here.
    fn compute_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType) -> f64;

    /// Seconds of the host that issues the op's kernels, which pass while the device is busy with earlier ones.
    fn issue_s(&self, _op: &Op, _operands: &[&TensorType]) -> f64 {
        0.0
    }

    /// Kernels that the host has issued and the device has not done, at most.
    fn queued_kernels(&self) -> usize {
        usize::MAX
    }

    /// Seconds of a kernel on the device and of the host that issues it; of a collective, the host's alone.
    fn kernel(&self, kernel: &Kernel) -> Price;

    /// The same of a kernel that sums gradients or updates parameters.
    fn update_kernel(&self, kernel: &Kernel) -> Price {
        self.kernel(kernel)
    }

    /// Part of the device that sends while a collective runs, and does not compute.
    fn sending_part(&self) -> f64 {
        0.0
    }

    /// Seconds that the first of `devices` waits for the last where they meet in a collective.
    fn waiting_s(&self, devices: u64) -> f64;

    /// Seconds of a collective over the groups of `link`, all of which run at the same time. `operand_bytes` and
    /// `result_bytes` are those of one device's local operand and local result; each collective is priced by the larger,
    /// which is the operand of a reduce-scatter and the result of an all-gather. Zero where a group is one device.
    fn collective_s(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> f64;

    /// Seconds from the start of a transfer until the target submesh holds the value. `bytes` is what crosses between
    /// the submeshes in all: the tensor's global bytes where each element is sent once.
    fn transfer_s(&self, bytes: u64, path: &TransferPath) -> f64;

    /// The runtime of the devices, where it is known what it does and measured how long that takes.
    fn runtime(&self) -> Option<&dyn Runtime> {
        None
    }

    /// All that its prices depend on, in words; nothing where that cannot be said. Models with the same words price alike.
    fn identity(&self) -> Option<String> {
        None
    }
}

/// The prices of a cluster: those of each of its groups. One cost model prices a cluster all of whose devices are alike.
pub trait Costs: Sync {
    fn of_group(&self, group: u32) -> &dyn CostModel;

    /// [`CostModel::runtime`] of a cluster that is one machine.
    fn runtime(&self) -> Option<&dyn Runtime> {
        self.of_group(0).runtime()
    }
}

impl<T: CostModel> Costs for T {
    fn of_group(&self, _: u32) -> &dyn CostModel {
        self
    }
}

/// Each group of a cluster by the figures of its device.
#[derive(Clone, Debug)]
pub struct Rooflines(Vec<Roofline>);

impl Rooflines {
    pub fn of(cluster: &Cluster) -> Rooflines {
        Rooflines(cluster.groups.iter().map(|group| Roofline::new(group.device.clone())).collect())
    }
}

impl Costs for Rooflines {
    fn of_group(&self, group: u32) -> &dyn CostModel {
        &self.0[group as usize]
    }
}

/// What the devices of one machine, or of nodes that are alike, do themselves, priced by what was measured of it. They run a body's
/// kernels one after the other, wait for each other in collectives, and share the cores of their machine.
pub trait Runtime: CostModel {
    /// The same where a plan has so many devices, `busy` of which compute at once.
    fn at(&self, devices: u32, busy: u32) -> Box<dyn Runtime + '_>;

    fn as_cost(&self) -> &dyn CostModel;

    /// The kernels of a body, as the runtime fuses them, collectives among them. [`CostModel::kernel`] prices each in full.
    fn kernels(&self, body: &Body) -> Vec<Kernel>;

    /// What is done for a collective over a link, where bytes are those of one device.
    fn collective_work(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> Work;

    /// Seconds for which so many bytes are on their way between two submeshes, after they were sent and before they are received.
    fn message_s(&self, bytes: u64, path: &TransferPath) -> f64;

    /// Seconds that a device takes to send, or to receive, so many bytes.
    fn send_s(&self, bytes: u64) -> f64;
    fn receive_s(&self, bytes: u64) -> f64;

    /// Seconds of a device outside of the bodies of a stage: once a step, or before each microbatch's forward.
    fn preparation_s(&self, program: &Program, stage: u32, each_microbatch: bool) -> f64;
}
