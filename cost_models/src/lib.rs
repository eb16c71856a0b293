//! Seconds and bytes: the cost of an op, a collective, a transfer and a pipeline on a described machine.
//!
//! The planner asks through one trait, [`CostModel`], and does not see how an answer came about. So a measured profile
//! or a model of tile quantisation can replace the [`Roofline`] without a change there. This crate also has the
//! catalogue of machines, the TOML form of a cluster, and the time of a pipeline schedule.

#![forbid(unsafe_code)]

mod captured;
pub mod catalogue;
pub mod collective;
pub mod compute;
pub(crate) mod devices;
pub mod error;
pub(crate) mod fitted;
pub mod link;
pub(crate) mod node_link;
pub mod orders;
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

/// Prices of the parts of a training step on one kind of device. All answers are seconds, finite and at least 0. More
/// bytes or elements never cost less, and more bandwidth never costs more.
pub trait CostModel: Sync {
    /// The device that is priced.
    fn device(&self) -> &Device;

    /// Seconds of one op on one device. Types are local: the device's parts of operands and result. Leaves, collectives
    /// and `axis_index` cost nothing here.
    fn compute_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType) -> f64;

    /// Host seconds to issue the op's kernels. They pass while the device is busy with earlier kernels.
    fn issue_s(&self, _op: &Op, _operands: &[&TensorType]) -> f64 {
        0.0
    }

    /// Length of the launch queue: the most kernels that the host has issued and the device has not finished.
    fn queued_kernels(&self) -> usize {
        usize::MAX
    }

    /// Seconds of a kernel on the device, and host seconds to issue it. For a collective, only the host's.
    fn kernel(&self, kernel: &Kernel) -> Price;

    /// Like [`CostModel::kernel`], for a kernel that sums gradients or updates parameters.
    fn update_kernel(&self, kernel: &Kernel) -> Price {
        self.kernel(kernel)
    }

    /// The part of the device that a running collective occupies, and that does not compute.
    fn sending_part(&self) -> f64 {
        0.0
    }

    /// Seconds that the first of `devices` waits for the last when they meet in a collective.
    fn waiting_s(&self, devices: u64) -> f64;

    /// Seconds of a collective over the groups of `link`, all of which run at the same time. `operand_bytes` and
    /// `result_bytes` are those of one device's local operand and result. The larger one prices the collective: the
    /// operand of a reduce-scatter, the result of an all-gather. Zero if a group is one device.
    fn collective_s(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> f64;

    /// Seconds from the start of a transfer until the target submesh holds the value. `bytes` is the total that crosses
    /// between the submeshes: the tensor's global bytes if each element is sent once.
    fn transfer_s(&self, bytes: u64, path: &TransferPath) -> f64;

    /// The runtime of the devices, if its work is known and measured.
    fn runtime(&self) -> Option<&dyn Runtime> {
        None
    }

    /// Everything that the prices depend on, in words; `None` if that cannot be stated. Models with the same words have
    /// equal prices.
    fn identity(&self) -> Option<String> {
        None
    }
}

/// Costs of a cluster, by group. A single cost model serves a cluster whose devices are all alike.
pub trait Costs: Sync {
    fn of_group(&self, group: u32) -> &dyn CostModel;

    /// The [`CostModel::runtime`] of a cluster that is one machine.
    fn runtime(&self) -> Option<&dyn Runtime> {
        self.of_group(0).runtime()
    }
}

impl<T: CostModel> Costs for T {
    fn of_group(&self, _: u32) -> &dyn CostModel {
        self
    }
}

/// A roofline for each group of a cluster, from the figures of its device.
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

/// The runtime of one machine or of nodes that are alike, priced by measurements. Its devices run a body's kernels one
/// after the other, wait for each other in collectives, and share the cores of their machine.
pub trait Runtime: CostModel {
    /// The same runtime for a plan with this many devices, `busy` of which compute at once.
    fn at(&self, devices: u32, busy: u32) -> Box<dyn Runtime + '_>;

    fn as_cost(&self) -> &dyn CostModel;

    /// The kernels of a body as the runtime fuses them, including collectives. [`CostModel::kernel`] prices each in
    /// full.
    fn kernels(&self, body: &Body) -> Vec<Kernel>;

    /// The work of a collective over a link. Bytes are those of one device.
    fn collective_work(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> Work;

    /// Seconds that a message is in transit between two submeshes, after it was sent and before it is received.
    fn message_s(&self, bytes: u64, path: &TransferPath) -> f64;

    /// Seconds that a device takes to send or to receive this many bytes.
    fn send_s(&self, bytes: u64) -> f64;
    fn receive_s(&self, bytes: u64) -> f64;

    /// Seconds of a device outside of a stage's bodies: once a step, or before each microbatch's forward pass.
    fn preparation_s(&self, program: &Program, stage: u32, each_microbatch: bool) -> f64;
}
