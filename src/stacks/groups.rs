//! Prices of replicas in groups, each of which holds all that is sharded (hybrid sharding). Gradients are reduced and
//! scattered inside a group and then summed among groups; parameters are gathered inside a group.

use altiplano_cost_models::kernels::{Kernel, KernelKind};
use altiplano_cost_models::timeline::Price;
use altiplano_cost_models::{AxisLink, CostModel, Roofline, TransferPath, axis_link};
use altiplano_ir::cluster::{Device, Group};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::Op;
use altiplano_ir::reshard::Collective;
use altiplano_ir::types::TensorType;

/// The axis of replicas, which comes first in a mesh.
const REPLICAS: AxisId = AxisId(0);

/// The prices of a device whose replicas are in groups.
pub struct Grouped {
    plain: Roofline,
    groups: u32,
    /// For each set of axes besides the replicas, as a bit mask: the links inside a group and these axes.
    inside: Vec<AxisLink>,
    among: AxisLink,
}

impl Grouped {
    /// Prices for a mesh of `degrees`, of which the first is the number of replicas, in `groups` of consecutive ones. `groups`
    /// divides it. All devices of a stage are on one node or on whole nodes.
    pub fn new(group: &Group, groups: u32, degrees: &[(&str, u32)]) -> Grouped {
        let replicas = degrees.first().map_or(1, |degree| degree.1);
        let inside = ("inside", replicas / groups.max(1));
        let axes: Vec<(&str, u32)> =
            [("groups", groups), inside].iter().chain(degrees.iter().skip(1)).copied().collect();
        let mesh = Mesh::new(&axes);
        let each = group.devices_per_node.max(1);
        let devices = mesh.num_devices();
        let [nodes, on_node] = if devices <= each { [1, devices] } else { [devices / each, each] };
        let link = |axes: &[AxisId]| axis_link(group, nodes, on_node, &mesh, axes);
        let others: Vec<AxisId> = mesh.axis_ids().skip(2).collect();
        let with = |mask: u32| {
            let chosen = others.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, axis)| *axis);
            link(&[AxisId(1)].into_iter().chain(chosen).collect::<Vec<_>>())
        };
        let inside = (0..1 << others.len()).map(with).collect();
        Grouped { plain: Roofline::new(group.device.clone()), groups, inside, among: link(&[AxisId(0)]) }
    }

    /// The links inside a group for a collective over replicas and other axes.
    fn inside(&self, axes: &[AxisId]) -> Option<&AxisLink> {
        axes.contains(&REPLICAS).then_some(())?;
        let mask = axes.iter().filter(|axis| **axis != REPLICAS).fold(0, |mask, axis| mask | 1 << (axis.0 - 1));
        self.inside.get(mask as usize)
    }
}

impl CostModel for Grouped {
    fn device(&self) -> &Device {
        self.plain.device()
    }

    fn compute_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType) -> f64 {
        self.plain.compute_s(op, operands, result)
    }

    fn issue_s(&self, op: &Op, operands: &[&TensorType]) -> f64 {
        self.plain.issue_s(op, operands)
    }

    fn queued_kernels(&self) -> usize {
        self.plain.queued_kernels()
    }

    fn kernel(&self, kernel: &Kernel) -> Price {
        self.plain.kernel(kernel)
    }

    /// A device updates as many times the elements as there are groups.
    fn update_kernel(&self, kernel: &Kernel) -> Price {
        let price = self.plain.update_kernel(kernel);
        let is_update = matches!(kernel.kind, KernelKind::Fused { .. }) && !kernel.nodes.is_empty();
        let launch_s = self.device().launch_s.min(price.seconds);
        match is_update {
            true => Price { seconds: launch_s + (price.seconds - launch_s) * f64::from(self.groups), ..price },
            false => price,
        }
    }

    fn sending_part(&self) -> f64 {
        self.plain.sending_part()
    }

    fn waiting_s(&self, devices: u64) -> f64 {
        self.plain.waiting_s(devices)
    }

    fn collective_s(&self, collective: &Collective, operand: u64, result: u64, link: &AxisLink) -> f64 {
        let plain = |collective, operand, result, link| self.plain.collective_s(collective, operand, result, link);
        let Some(inside) = self.inside(collective.axes()) else { return plain(collective, operand, result, link) };
        let parts = inside.devices.max(1);
        match collective {
            Collective::AllGather { .. } => plain(collective, result / parts, result, inside),
            Collective::ReduceScatter { reducer, .. } => {
                let part = operand.div_ceil(parts);
                let sum = Collective::AllReduce { axes: vec![REPLICAS], reducer: *reducer };
                plain(collective, operand, part, inside) + plain(&sum, part, part, &self.among)
            }
            _ => plain(collective, operand, result, link),
        }
    }

    fn transfer_s(&self, bytes: u64, path: &TransferPath) -> f64 {
        self.plain.transfer_s(bytes, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::op::Reducer;

    const BYTES: u64 = 1 << 28;

    fn prices(groups: u32, replicas: u32) -> (Grouped, AxisLink) {
        let cluster = crate::load_cluster("dgx-a100:4").expect("a cluster");
        let group = &cluster.groups[0];
        let mesh = Mesh::new(&[("data", replicas), ("tensor", 32 / replicas)]);
        let link = axis_link(group, 4, 8, &mesh, &[REPLICAS]);
        (Grouped::new(group, groups, &[("data", replicas), ("tensor", 32 / replicas)]), link)
    }

    fn reduce_scatter() -> Collective {
        Collective::ReduceScatter { axes: vec![REPLICAS], reducer: Reducer::Sum, dim: 0, outer: 1 }
    }

    #[test]
    fn one_group_has_the_plain_prices() {
        let (grouped, link) = prices(1, 32);
        let gather = Collective::AllGather { axes: vec![REPLICAS], dim: 0, outer: 1 };
        for (collective, operand, result) in [(gather, BYTES / 32, BYTES), (reduce_scatter(), BYTES, BYTES / 32)] {
            let plain = grouped.plain.collective_s(&collective, operand, result, &link);
            assert_eq!(grouped.collective_s(&collective, operand, result, &link), plain);
        }
    }

    #[test]
    fn groups_within_nodes_gather_there_and_sum_their_parts_among_nodes() {
        // Four groups of eight devices, each on its node.
        let (grouped, link) = prices(4, 32);
        assert_eq!((grouped.inside[0].devices, grouped.inside[0].nodes), (8, 1));
        assert_eq!((grouped.among.devices, grouped.among.nodes), (4, 4));
        let gather = Collective::AllGather { axes: vec![REPLICAS], dim: 0, outer: 1 };
        let inside_s = grouped.plain.collective_s(&gather, BYTES / 8, BYTES, &grouped.inside[0]);
        assert_eq!(grouped.collective_s(&gather, BYTES / 32, BYTES, &link), inside_s);
        assert!(inside_s < grouped.plain.collective_s(&gather, BYTES / 32, BYTES, &link));
        let scattered_s = grouped.plain.collective_s(&reduce_scatter(), BYTES, BYTES / 8, &grouped.inside[0]);
        let sum = Collective::AllReduce { axes: vec![REPLICAS], reducer: Reducer::Sum };
        let summed_s = grouped.plain.collective_s(&sum, BYTES / 8, BYTES / 8, &grouped.among);
        assert_eq!(grouped.collective_s(&reduce_scatter(), BYTES, BYTES / 32, &link), scattered_s + summed_s);
        // All other transfers stay as they are.
        assert_eq!(
            grouped.collective_s(&sum, BYTES, BYTES, &link),
            grouped.plain.collective_s(&sum, BYTES, BYTES, &link)
        );
    }

    #[test]
    fn other_axes_stay() {
        let (grouped, _) = prices(2, 8);
        assert_eq!(grouped.inside.len(), 2);
        assert_eq!(grouped.inside(&[AxisId(0), AxisId(1)]).map(|link| link.devices), Some(16));
        assert_eq!(grouped.inside(&[AxisId(1)]), None);
    }
}
