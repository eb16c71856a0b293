//! The reference interpreter: the semantics of a graph in f64, regardless of speed. It is the oracle of every test.

use crate::graph::{Graph, ValueId};
use crate::mesh::Mesh;
use crate::op::{Op, Operator};
use crate::reshard::Collective;
use crate::tensor::{Tensor, for_each_index};

/// Work that may go into values that are evaluated ahead of a run, in element operations ([`Graph::work`]). The size of
/// a value says little about them: a single sum may have any number of terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    each: u64,
    left: u64,
}

impl Default for Allowance {
    /// The allowance of a reader for all of a model. What it needs to know, such as shapes and conditions, is small.
    fn default() -> Allowance {
        Allowance::new(1 << 22, 1 << 30)
    }
}

impl Allowance {
    /// An allowance of at most `each` for one evaluation and `total` for all.
    pub fn new(each: u64, total: u64) -> Allowance {
        Allowance { each, left: total }
    }

    /// Takes the work of one evaluation, or returns false if it is more than is allowed.
    pub fn take(&mut self, work: u64) -> bool {
        let left = self.left.checked_sub(work).filter(|_| work <= self.each);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

/// The values of all nodes. `leaf` supplies parameters and inputs.
pub fn run_all(graph: &Graph, mut leaf: impl FnMut(ValueId) -> Tensor) -> Vec<Tensor> {
    let mut values: Vec<Tensor> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let value = if node.op.is_leaf() {
            leaf(v)
        } else {
            let operands: Vec<&Tensor> = node.operands.iter().map(|o| &values[o.index()]).collect();
            node.op.eval(&operands, &node.ty)
        };
        values.push(value);
    }
    values
}

/// The values of the graph's outputs.
pub fn run(graph: &Graph, leaf: impl FnMut(ValueId) -> Tensor) -> Vec<Tensor> {
    let values = run_all(graph, leaf);
    graph.outputs.iter().map(|o| values[o.index()].clone()).collect()
}

/// Runs a local graph on all devices of `mesh` in lock step. `leaf(value, device)` supplies each device's leaves. The
/// result is indexed `[value][device]`.
pub fn run_mesh(graph: &Graph, mesh: &Mesh, mut leaf: impl FnMut(ValueId, u32) -> Tensor) -> Vec<Vec<Tensor>> {
    let devices: Vec<u32> = (0..mesh.num_devices()).collect();
    let mut values: Vec<Vec<Tensor>> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let on_each = match &node.op {
            op if op.is_leaf() => devices.iter().map(|&d| leaf(v, d)).collect(),
            Op::AxisIndex(op) => devices
                .iter()
                .map(|&d| Tensor::scalar(op.dtype, mesh.index_along(&op.axes, &mesh.coordinates(d)) as f64))
                .collect(),
            Op::Collective(op) => collective(&op.collective, mesh, &values[node.operands[0].index()]),
            op => devices
                .iter()
                .map(|&d| {
                    let operands: Vec<&Tensor> = node.operands.iter().map(|o| &values[o.index()][d as usize]).collect();
                    op.eval(&operands, &node.ty)
                })
                .collect(),
        };
        values.push(on_each);
    }
    values
}

/// The semantics of a collective: the results of all devices from the operands of all devices.
pub(crate) fn collective(collective: &Collective, mesh: &Mesh, operands: &[Tensor]) -> Vec<Tensor> {
    let result = |device: u32| {
        let group = mesh.group(collective.axes(), device);
        let me = group.iter().position(|&d| d == device).unwrap_or(0) as u64;
        let members: Vec<&Tensor> = group.iter().map(|&d| &operands[d as usize]).collect();
        let n = members.len() as u64;
        match collective {
            Collective::AllReduce { reducer, .. } => reduce(&members, *reducer),
            Collective::ReduceScatter { reducer, dim, outer, .. } => {
                part(&reduce(&members, *reducer), *dim as usize, *outer, me, n)
            }
            Collective::AllGather { dim, outer, .. } => join(&members, *dim as usize, *outer),
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
                let parts: Vec<Tensor> =
                    members.iter().map(|m| part(m, *split_dim as usize, *split_outer, me, n)).collect();
                join(&parts.iter().collect::<Vec<_>>(), *concat_dim as usize, *concat_outer)
            }
            Collective::LocalSlice { dim, outer, .. } => part(&operands[device as usize], *dim as usize, *outer, me, n),
            Collective::KeepFirst { .. } if me == 0 => operands[device as usize].clone(),
            Collective::KeepFirst { reducer, .. } => {
                let ty = operands[device as usize].ty.clone();
                let neutral = reducer.neutral(ty.dtype);
                Tensor::splat(ty, neutral)
            }
            Collective::Shift { by, .. } => members[((me + by % n) % n) as usize].clone(),
            Collective::Halo { dim, low, high, reducer, .. } => {
                let (dim, whole) = (*dim as usize, join(&members, *dim as usize, 1));
                let block = members[0].shape()[dim];
                let mut ty = whole.ty.clone();
                ty.shape[dim] = block + low + high;
                let neutral = reducer.neutral(ty.dtype);
                Tensor::from_fn(ty, |index| {
                    let mut source = index.to_vec();
                    match (me * block + index[dim]).checked_sub(*low) {
                        Some(at) if at < whole.shape()[dim] => {
                            source[dim] = at;
                            whole.at(&source)
                        }
                        _ => neutral,
                    }
                })
            }
        }
    };
    (0..mesh.num_devices()).map(result).collect()
}

fn reduce(members: &[&Tensor], reducer: crate::op::Reducer) -> Tensor {
    let combine = reducer.combine();
    let mut sum = members[0].clone();
    for member in &members[1..] {
        for (a, &b) in sum.data.iter_mut().zip(&member.data) {
            *a = combine.apply(*a, b, sum.ty.dtype);
        }
    }
    sum
}

/// Part `which` of `n` of dimension `dim`, cut within each of its `outer` blocks.
fn part(tensor: &Tensor, dim: usize, outer: u64, which: u64, n: u64) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    shape[dim] /= n;
    let inner = shape[dim] / outer;
    let mut source = Vec::new();
    Tensor::from_fn(tensor.ty.with_shape(shape), |index| {
        source.clear();
        source.extend_from_slice(index);
        source[dim] = index[dim] / inner * inner * n + which * inner + index[dim] % inner;
        tensor.at(&source)
    })
}

/// The inverse of [`part`].
fn join(parts: &[&Tensor], dim: usize, outer: u64) -> Tensor {
    let n = parts.len() as u64;
    let mut shape = parts[0].shape().to_vec();
    let inner = shape[dim] / outer;
    shape[dim] *= n;
    let mut joined = Tensor::splat(parts[0].ty.with_shape(shape), 0.0);
    for (which, tensor) in parts.iter().enumerate() {
        for_each_index(tensor.shape(), |index| {
            let mut target = index.to_vec();
            target[dim] = index[dim] / inner * inner * n + which as u64 * inner + index[dim] % inner;
            let at = joined.offset(&target);
            joined.data[at] = tensor.at(index);
        });
    }
    joined
}

/// One device's part of a global tensor, laid out by `sharding`. For partial values, the first device along the partial
/// axes holds everything and the others hold the neutral element.
pub fn shard(tensor: &Tensor, sharding: &crate::sharding::Sharding, mesh: &Mesh, device: u32) -> Tensor {
    let coordinates = mesh.coordinates(device);
    let indices: Vec<Vec<u64>> = sharding.dims.iter().map(|d| d.global_indices(mesh, &coordinates)).collect();
    let ty = sharding.local_type(&tensor.ty, mesh);
    let neutral = sharding.partial.iter().find(|(a, _)| coordinates[a.0 as usize] != 0).map(|&(_, r)| r);
    let mut source = Vec::new();
    Tensor::from_fn(ty, |index| {
        if let Some(reducer) = neutral {
            return reducer.neutral(tensor.ty.dtype);
        }
        source.clear();
        source.extend(index.iter().zip(&indices).map(|(&i, map)| map[i as usize]));
        tensor.at(&source)
    })
}

/// The global tensor from all devices' parts, with partial values reduced. The inverse of [`shard`].
pub fn unshard(
    parts: &[Tensor],
    global: &crate::types::TensorType,
    sharding: &crate::sharding::Sharding,
    mesh: &Mesh,
) -> Tensor {
    let mut whole = Tensor::splat(global.clone(), 0.0);
    let mut seen = vec![false; whole.data.len()];
    for device in 0..mesh.num_devices() {
        let coordinates = mesh.coordinates(device);
        let replicated = mesh.axis_ids().any(|a| {
            coordinates[a.0 as usize] != 0
                && !sharding.split_axes().any(|s| s == a)
                && !sharding.partial.iter().any(|p| p.0 == a)
        });
        if replicated {
            continue;
        }
        let indices: Vec<Vec<u64>> = sharding.dims.iter().map(|d| d.global_indices(mesh, &coordinates)).collect();
        let local = &parts[device as usize];
        for_each_index(local.shape(), |index| {
            let target: Vec<u64> = index.iter().zip(&indices).map(|(&i, map)| map[i as usize]).collect();
            let at = whole.offset(&target);
            whole.data[at] = match sharding.partial.first() {
                Some(&(_, reducer)) if seen[at] => {
                    reducer.combine().apply(whole.data[at], local.at(index), global.dtype)
                }
                _ => local.at(index),
            };
            seen[at] = true;
        });
    }
    whole
}
