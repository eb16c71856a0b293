//! Plans for the day a node dies: for each number of lost nodes the plan on those that are left, what of the trained state
//! may be lost with them, and what the others must receive.

use crate::error::Error;
use crate::report::Grid;
use crate::units::{bytes, plural, seconds};
use altiplano_ir::cluster::Cluster;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::plan::{Plan, Stage};
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_planner::{GivenDegrees, Request};
use std::collections::{BTreeMap, BTreeSet};

/// Some nodes of a group that are lost, and what is done then.
pub struct Loss {
    pub nodes: u32,
    /// The group of the lost nodes.
    pub group: usize,
    /// The plan on the nodes that are left, or the reason why there is none.
    pub plan: Result<Plan, Error>,
    /// Bytes of weights and optimizer state of which all copies lie on so few nodes of the group: if these are lost, a
    /// checkpoint has to have them.
    pub only_there_bytes: u64,
    /// Bytes of weights and optimizer state that devices of the new plan need, and do not hold already. The most over
    /// losses of the first, the middle and the last nodes of the group.
    pub moved_bytes: u64,
}

/// The cluster without some nodes of a group. `None` if nothing is left.
fn without(cluster: &Cluster, group: usize, nodes: u32) -> Option<Cluster> {
    let mut left = cluster.clone();
    left.groups[group].nodes = left.groups[group].nodes.checked_sub(nodes)?;
    left.name = format!("{} without {}", cluster.name, plural(nodes.into(), "node"));
    if left.groups[group].nodes == 0 {
        left.groups.remove(group);
    }
    if left.groups.len() == 1 {
        left.between_groups = None;
    }
    (!left.groups.is_empty()).then_some(left)
}

/// Fails if `most` nodes cannot be lost, before anything is searched.
pub fn expect_spare(request: &Request, most: u32) -> Result<(), Error> {
    let wrong = |problem| Err(Error::Option { option: "--survive", problem });
    match request.cluster.groups.as_slice() {
        _ if request.servers.is_some() => wrong("does not count copies on parameter servers"),
        [only] if only.nodes == 1 => wrong("the cluster has one node, without which nothing is left"),
        [only] if only.nodes <= most => wrong("the cluster has no more nodes than that, and one must be left"),
        _ => Ok(()),
    }
}

/// Plans for the loss of up to `most` nodes, of each group alone. Given degrees hold, but for the number of replicas.
pub fn losses(
    plan: &Plan,
    request: &Request,
    most: u32,
    search: &dyn Fn(&Request) -> Result<Plan, Error>,
) -> Vec<Loss> {
    let tensors = tensors(plan);
    let mut all = Vec::new();
    for group in 0..plan.cluster.groups.len() {
        for nodes in 1..=most {
            let Some(cluster) = without(&plan.cluster, group, nodes) else { break };
            let degrees = GivenDegrees { dp: None, groups: None, ..request.degrees };
            let found = search(&Request { cluster, degrees, baselines: false, ..request.clone() });
            let moved_bytes = found.as_ref().map_or(0, |found| most_moved_bytes(plan, found, group, nodes));
            let only_there_bytes = tensors.iter().map(|tensor| tensor.only_on(plan, group, nodes)).sum();
            all.push(Loss { nodes, group, plan: found, only_there_bytes, moved_bytes });
        }
    }
    all
}

/// A parameter's weights, or its optimizer state, on all stages that store it.
struct Tensor<'a> {
    element_bytes: u64,
    places: Vec<(&'a Stage, &'a Sharding)>,
}

impl Tensor<'_> {
    /// Bytes of which all copies lie on at most so many nodes of a group, and nowhere else.
    fn only_on(&self, plan: &Plan, group: usize, nodes: u32) -> u64 {
        let of_place = |(stage, sharding): &(&Stage, &Sharding)| {
            let split: Vec<_> = sharding.split_axes().collect();
            let mut holders: BTreeMap<u64, BTreeSet<(usize, u32)>> = BTreeMap::new();
            for (position, &device) in stage.devices.iter().enumerate() {
                let coordinates = stage.mesh.coordinates(position as u32);
                let shard = stage.mesh.index_along(&split, &coordinates);
                holders.entry(shard).or_default().insert(node_of(&plan.cluster, device));
            }
            let is_only_there =
                |on: &&BTreeSet<(usize, u32)>| on.len() <= nodes as usize && on.iter().all(|(of, _)| *of == group);
            let shard_bytes = self.element_bytes * sharding.local_shape(&stage.mesh).iter().product::<u64>();
            holders.values().filter(is_only_there).count() as u64 * shard_bytes
        };
        // A tensor that several stages store is lost only if each of them loses it.
        self.places.iter().map(of_place).min().unwrap_or(0)
    }
}

fn tensors(plan: &Plan) -> Vec<Tensor<'_>> {
    let mut all = Vec::new();
    for (v, name) in plan.graph.parameters() {
        let dtype = plan.graph.ty(v).dtype;
        let stored = || plan.stages.iter().filter_map(|stage| Some((stage, stage.parameters.get(name)?)));
        let weights = stored().map(|(stage, storage)| (stage, &storage.parameter)).collect();
        all.push(Tensor { element_bytes: dtype.bytes(), places: weights });
        let state = stored().map(|(stage, storage)| (stage, &storage.state)).collect();
        all.push(Tensor { element_bytes: state_bytes(plan, v), places: state });
    }
    all
}

/// The bytes of optimizer state per element of a parameter.
fn state_bytes(plan: &Plan, parameter: ValueId) -> u64 {
    match plan.schedule.trains() && plan.graph.is_trained(parameter) {
        true => plan.optimizer.state_bytes_per_element(plan.graph.ty(parameter).dtype),
        false => 0,
    }
}

/// The group of a device, and its node in the group.
fn node_of(cluster: &Cluster, device: u32) -> (usize, u32) {
    let holds = |group: &usize| cluster.devices_of(*group).contains(&device);
    let group = (0..cluster.groups.len()).find(holds).unwrap_or(0);
    (group, (device - cluster.devices_of(group).start) / cluster.groups[group].devices_per_node)
}

/// The most bytes that a new plan's devices lack, over losses of the first, the middle and the last nodes of a group.
fn most_moved_bytes(old: &Plan, new: &Plan, group: usize, nodes: u32) -> u64 {
    let lost_devices = nodes * old.cluster.groups[group].devices_per_node;
    let of_group = old.cluster.devices_of(group);
    let last = of_group.end - lost_devices;
    let per_node = old.cluster.groups[group].devices_per_node;
    let middle = of_group.start + (last - of_group.start) / 2 / per_node * per_node;
    let (old_tensors, new_tensors) = (by_device(old), by_device(new));
    let starts = BTreeSet::from([of_group.start, middle, last]);
    let moved = |start: u32| {
        // Devices keep their order.
        let before = |device: u32| if device < start { device } else { device + lost_devices };
        let lacks = |(device, needed): (&u32, &Vec<Shard>)| {
            let held = old_tensors.get(&before(*device));
            needed.iter().map(|shard| shard.lacking_bytes(held)).sum::<u64>()
        };
        new_tensors.iter().map(lacks).sum()
    };
    starts.into_iter().map(moved).max().unwrap_or(0)
}

/// A device's part of a tensor.
struct Shard {
    /// The parameter's position in the model, and whether this is its optimizer state.
    tensor: (usize, bool),
    element_bytes: u64,
    /// Runs of indices of each dimension, as starts and lengths.
    runs: Vec<Vec<(u64, u64)>>,
}

impl Shard {
    fn elements(&self) -> u64 {
        self.runs.iter().map(|runs| runs.iter().map(|run| run.1).sum::<u64>()).product()
    }

    /// The bytes of the shard that are not among those held, which are sorted by tensor.
    fn lacking_bytes(&self, held: Option<&Vec<Shard>>) -> u64 {
        let held = held.map_or(&[][..], Vec::as_slice);
        let first = held.partition_point(|shard| shard.tensor < self.tensor);
        let same = held[first..].iter().take_while(|shard| shard.tensor == self.tensor);
        let common = |shard: &Shard| shard.runs.iter().zip(&self.runs).map(|(a, b)| overlap(a, b)).product::<u64>();
        self.element_bytes * (self.elements() - same.map(common).max().unwrap_or(0))
    }
}

/// The number of indices in both of two rising lists of runs.
fn overlap(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut i, mut j, mut sum) = (0, 0, 0);
    while let (Some(&(a_start, a_size)), Some(&(b_start, b_size))) = (a.get(i), b.get(j)) {
        let (a_end, b_end) = (a_start + a_size, b_start + b_size);
        sum += a_end.min(b_end).saturating_sub(a_start.max(b_start));
        if a_end <= b_end { i += 1 } else { j += 1 }
    }
    sum
}

/// The shards of each device, sorted by tensor.
fn by_device(plan: &Plan) -> BTreeMap<u32, Vec<Shard>> {
    let mut all: BTreeMap<u32, Vec<Shard>> = BTreeMap::new();
    for (number, (v, name)) in plan.graph.parameters().enumerate() {
        let dtype = plan.graph.ty(v).dtype;
        for stage in &plan.stages {
            let Some(storage) = stage.parameters.get(name) else { continue };
            for (position, &device) in stage.devices.iter().enumerate() {
                let coordinates = stage.mesh.coordinates(position as u32);
                let of = |sharding: &Sharding| {
                    sharding.dims.iter().map(|dim| runs(dim, &stage.mesh, &coordinates)).collect()
                };
                let shards = all.entry(device).or_default();
                shards.push(Shard {
                    tensor: (number, false),
                    element_bytes: dtype.bytes(),
                    runs: of(&storage.parameter),
                });
                shards.push(Shard {
                    tensor: (number, true),
                    element_bytes: state_bytes(plan, v),
                    runs: of(&storage.state),
                });
            }
        }
    }
    all.values_mut().for_each(|shards| shards.sort_by_key(|shard| shard.tensor));
    all
}

/// The indices of a dimension that a device holds.
fn runs(dim: &DimLayout, mesh: &Mesh, coordinates: &[u32]) -> Vec<(u64, u64)> {
    if let [only] = dim.segments() {
        let local = only.size / mesh.product(&only.axes).max(1);
        return vec![(mesh.index_along(&only.axes, coordinates) * local, local)];
    }
    let mut all: Vec<(u64, u64)> = Vec::new();
    for index in dim.global_indices(mesh, coordinates) {
        match all.last_mut() {
            Some((start, size)) if *start + *size == index => *size += 1,
            _ => all.push((index, 1)),
        }
    }
    all
}

/// The losses as a table.
pub fn losses_text(plan: &Plan, losses: &[Loss]) -> String {
    let whole = |(v, _)| plan.graph.ty(v).elements() * (plan.graph.ty(v).dtype.bytes() + state_bytes(plan, v));
    let all_bytes: u64 = plan.graph.parameters().map(whole).sum();
    let kinds = plan.cluster.groups.len() > 1;
    let mut table = Grid::new(&["lost", "left", "s/step", "as long", "only there", "moved", "how"]);
    let now_s = plan.predicted.step_time_s;
    for Loss { nodes, group, plan: found, only_there_bytes, moved_bytes } in losses {
        let of = &plan.cluster.groups[*group];
        let lost = match kinds {
            true => format!("{} of {}", plural((*nodes).into(), "node"), of.device.name),
            false => plural((*nodes).into(), "node"),
        };
        let left = plan.cluster.num_devices() - nodes * of.devices_per_node;
        let only_there = if *only_there_bytes == 0 { "nothing".to_string() } else { bytes(*only_there_bytes) };
        match found {
            Ok(found) => table.row([
                lost,
                plural(left.into(), "device"),
                seconds(found.predicted.step_time_s),
                format!("{:.2} x", found.predicted.step_time_s / now_s),
                only_there,
                bytes(*moved_bytes),
                crate::one_line(found),
            ]),
            Err(error) => table.row([
                lost,
                plural(left.into(), "device"),
                "-".into(),
                "-".into(),
                only_there,
                "-".into(),
                error.to_string(),
            ]),
        }
    }
    format!(
        "If nodes are lost, of {} of weights and optimizer state\n{}\n  only there: all copies lie on as many nodes, so that a checkpoint has to have them; moved: what devices lack then",
        bytes(all_bytes),
        table.right_but_last()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_counted_run_by_run() {
        assert_eq!(overlap(&[(0, 10)], &[(5, 10)]), 5);
        assert_eq!(overlap(&[(0, 2), (4, 2), (8, 2)], &[(1, 8)]), 4);
        assert_eq!(overlap(&[(0, 2)], &[(2, 2)]), 0);
        assert_eq!(overlap(&[], &[(2, 2)]), 0);
    }
}
