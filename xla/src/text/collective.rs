//! Collectives among the replicas of a program. Replica `i` is device `i` of the mesh.

use super::types::{list, tensor, tensors};
use super::{Printer, Value};
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Binary, Direction, Reducer};
use altiplano_ir::reshard::{BlockedDim, Collective};
use altiplano_ir::types::TensorType;

impl Printer {
    pub(super) fn collective(&mut self, op: &Collective, mesh: &Mesh, x: &Value, ty: &TensorType) -> Value {
        let n = mesh.product(op.axes());
        if n == 1 && !matches!(op, Collective::Halo { .. }) {
            return x.clone();
        }
        let groups = groups(mesh, op.axes());
        match op {
            Collective::AllReduce { reducer, .. } => {
                let attributes = format!("replica_groups = {groups}");
                self.reducing("all_reduce", &attributes, *reducer, x, ty)
            }
            Collective::ReduceScatter { reducer, dim, outer, .. } => {
                let dim = usize::from(*dim);
                let mut shape = blocks(&x.ty.shape, BlockedDim { dim, outer: *outer });
                let x = self.reshaped(x, &shape);
                let attributes = format!("replica_groups = {groups}, scatter_dimension = {} : i64", dim + 1);
                shape[dim + 1] /= n;
                let part = self.reducing("reduce_scatter", &attributes, *reducer, &x, &ty.with_shape(shape));
                self.reshaped(&part, &ty.shape)
            }
            Collective::AllGather { dim, outer, .. } => {
                let dim = usize::from(*dim);
                let mut shape = blocks(&x.ty.shape, BlockedDim { dim, outer: *outer });
                let x = self.reshaped(x, &shape);
                let attributes = format!("all_gather_dim = {} : i64, replica_groups = {groups}", dim + 1);
                shape[dim + 1] *= n;
                let all = self.communicating("all_gather", &attributes, &x, &ty.with_shape(shape));
                self.reshaped(&all, &ty.shape)
            }
            Collective::AllToAll { split_dim, split_outer, concat_dim, concat_outer, .. } => {
                let split = BlockedDim::new(*split_dim, *split_outer);
                self.exchanged(x, n, split, BlockedDim::new(*concat_dim, *concat_outer), &groups, ty)
            }
            Collective::LocalSlice { axes, dim, outer } => {
                self.local_slice(x, mesh, axes, BlockedDim::new(*dim, *outer), ty)
            }
            Collective::KeepFirst { axes, reducer } => {
                let here = self.position(axes, mesh, DType::I32);
                let zero = self.splat(here.ty.clone(), 0.0);
                let first = self.compare(Direction::Eq, &here, &zero);
                let neutral = self.splat(ty.clone(), reducer.neutral(ty.dtype));
                self.select(&first, x, &neutral)
            }
            Collective::Shift { axes, by } => {
                let from = |i: u64| Some((i + by % n) % n);
                self.permuted(x, mesh, axes, from)
            }
            Collective::Halo { axes, dim, low, high, reducer } => {
                self.halo(x, mesh, axes, usize::from(*dim), [*low, *high], *reducer, ty)
            }
        }
    }

    fn reducing(&mut self, name: &str, attributes: &str, reducer: Reducer, x: &Value, ty: &TensorType) -> Value {
        let scalar = TensorType::scalar(ty.dtype);
        let combine = reducer.combine();
        let region = self.region(&[scalar.clone(), scalar], |p, x| p.binary(combine, &x[0], &x[1]));
        let types = format!("({}) -> {}", tensor(&x.ty), tensor(ty));
        self.op(
            format!("\"stablehlo.{name}\"({}) <{{{attributes}}}> ({{\n{region}    }}) : {types}", x.name),
            ty.clone(),
        )
    }

    fn communicating(&mut self, name: &str, attributes: &str, x: &Value, ty: &TensorType) -> Value {
        let types = format!("({}) -> {}", tensor(&x.ty), tensor(ty));
        self.op(format!("\"stablehlo.{name}\"({}) <{{{attributes}}}> : {types}", x.name), ty.clone())
    }

    /// An exchange of parts: the parts are made dimension 0, which all devices exchange, and are then joined.
    fn exchanged(
        &mut self,
        x: &Value,
        n: u64,
        split: BlockedDim,
        concat: BlockedDim,
        groups: &str,
        ty: &TensorType,
    ) -> Value {
        let parts = self.reshaped(x, &parts(&x.ty.shape, split, n));
        let (rank, split) = (parts.ty.rank(), split.dim);
        let order: Vec<usize> = [split + 1].into_iter().chain((0..rank).filter(|&d| d != split + 1)).collect();
        let parts = self.transposed(&parts, &order);
        let mut shape = x.ty.shape.clone();
        shape[split] /= n;
        shape.insert(0, n);
        let parts = self.reshaped(&parts, &shape);
        let attributes = format!(
            "concat_dimension = 0 : i64, replica_groups = {groups}, split_count = {n} : i64, split_dimension = 0 : i64"
        );
        let received = self.communicating("all_to_all", &attributes, &parts, &parts.ty.clone());
        let BlockedDim { dim: concat, outer } = concat;
        let shape = blocks(&received.ty.shape, BlockedDim { dim: concat + 1, outer });
        let received = self.reshaped(&received, &shape);
        let order: Vec<usize> = (1..concat + 2).chain([0]).chain(concat + 2..shape.len()).collect();
        let joined = self.transposed(&received, &order);
        self.reshaped(&joined, &ty.shape)
    }

    fn local_slice(&mut self, x: &Value, mesh: &Mesh, axes: &[AxisId], along: BlockedDim, ty: &TensorType) -> Value {
        let x = self.reshaped(x, &parts(&x.ty.shape, along, mesh.product(axes)));
        let dim = along.dim;
        let here = self.position(axes, mesh, DType::I32);
        let zero = self.splat(here.ty.clone(), 0.0);
        let mut shape = x.ty.shape.clone();
        shape[dim + 1] = 1;
        let starts: Vec<&Value> = (0..shape.len()).map(|d| if d == dim + 1 { &here } else { &zero }).collect();
        let names: Vec<&str> = starts.iter().map(|start| start.name.as_str()).collect();
        let types = tensors([&x.ty].into_iter().chain(starts.iter().map(|start| &start.ty)));
        let part = ty.with_shape(shape);
        let text = format!(
            "stablehlo.dynamic_slice {}, {}, sizes = {} : ({types}) -> {}",
            x.name,
            names.join(", "),
            list(&part.shape),
            tensor(&part)
        );
        let part = self.op(text, part);
        self.reshaped(&part, &ty.shape)
    }

    /// The value of the device at position `from(i)` along `axes`, for the device at position `i`. Zeros without one.
    fn permuted(&mut self, x: &Value, mesh: &Mesh, axes: &[AxisId], from: impl Fn(u64) -> Option<u64>) -> Value {
        let mut routes: Vec<(u32, u32)> = Vec::new();
        for group in members(mesh, axes) {
            let route = |(i, &to): (usize, &u32)| Some((*group.get(from(i as u64)? as usize)?, to));
            routes.extend(group.iter().enumerate().filter_map(route));
        }
        let attributes = format!("source_target_pairs = {}", super::types::pairs(&routes));
        self.communicating("collective_permute", &attributes, x, &x.ty.clone())
    }

    /// A block between the edges of its neighbours.
    fn halo(
        &mut self,
        x: &Value,
        mesh: &Mesh,
        axes: &[AxisId],
        dim: usize,
        [low, high]: [u64; 2],
        reducer: Reducer,
        ty: &TensorType,
    ) -> Value {
        let (block, n) = (x.ty.shape[dim], mesh.product(axes));
        let here = self.position(axes, mesh, DType::I32);
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for (edge, sign, found) in [(low, -1, &mut before), (high, 1, &mut after)] {
            for distance in 1..=edge.div_ceil(block.max(1)) {
                let wanted = (edge - (distance - 1) * block).min(block);
                let mut shape = x.ty.shape.clone();
                shape[dim] = wanted;
                let neutral = self.splat(x.ty.with_shape(shape.clone()), reducer.neutral(ty.dtype));
                if distance >= n {
                    found.push(neutral);
                    continue;
                }
                let first = if sign < 0 { block - wanted } else { 0 };
                let range = |d: usize| match d == dim {
                    true => format!("{first}:{}", first + wanted),
                    false => format!("0:{}", x.ty.shape[d]),
                };
                let ranges: Vec<String> = (0..shape.len()).map(range).collect();
                let edge = self.typed("slice", x, &format!(" [{}]", ranges.join(", ")), &x.ty.with_shape(shape));
                let from = |i: u64| i.checked_add_signed(sign * distance as i64).filter(|from| *from < n);
                let edge = self.permuted(&edge, mesh, axes, from);
                // Only devices that have such a neighbour have received something.
                let limit = if sign < 0 { distance } else { n - distance };
                let limit = self.splat(here.ty.clone(), limit as f64);
                let direction = if sign < 0 { Direction::Ge } else { Direction::Lt };
                let has = self.compare(direction, &here, &limit);
                found.push(self.select(&has, &edge, &neutral));
            }
        }
        before.reverse();
        let all: Vec<Value> = before.into_iter().chain([x.clone()]).chain(after).collect();
        self.concatenate(&all, dim, ty)
    }

    /// This replica's position along `axes`, major first.
    pub(super) fn position(&mut self, axes: &[AxisId], mesh: &Mesh, dtype: DType) -> Value {
        let id = self.op("stablehlo.replica_id : tensor<ui32>", TensorType::scalar(DType::U32));
        let number = |p: &mut Printer, value: u64| p.splat(TensorType::scalar(DType::U32), value as f64);
        let mut position = number(self, 0);
        for &axis in axes {
            let stride = number(self, u64::from(mesh.stride(axis)));
            let size = number(self, mesh.size(axis));
            let along = self.binary(Binary::Divide, &id, &stride);
            let along = self.binary(Binary::Remainder, &along, &size);
            let scaled = self.binary(Binary::Multiply, &position, &size);
            position = self.binary(Binary::Add, &scaled, &along);
        }
        if dtype == DType::U32 { position } else { self.typed("convert", &position, "", &TensorType::scalar(dtype)) }
    }
}

/// The shape with a dimension in front of `along` for its blocks.
fn blocks(shape: &[u64], along: BlockedDim) -> Vec<u64> {
    let mut blocks = shape.to_vec();
    blocks[along.dim] /= along.outer;
    blocks.insert(along.dim, along.outer);
    blocks
}

/// The same, with a further dimension for the `n` parts of a block.
fn parts(shape: &[u64], along: BlockedDim, n: u64) -> Vec<u64> {
    let mut parts = blocks(shape, along);
    parts[along.dim + 1] /= n;
    parts.insert(along.dim + 1, n);
    parts
}

/// The groups of a collective over `axes`, each in the order of positions along them.
fn members(mesh: &Mesh, axes: &[AxisId]) -> Vec<Vec<u32>> {
    let groups = (0..mesh.num_devices()).map(|device| mesh.group(axes, device));
    groups.enumerate().filter(|(device, group)| group[0] as usize == *device).map(|(_, group)| group).collect()
}

/// `dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>`
fn groups(mesh: &Mesh, axes: &[AxisId]) -> String {
    let groups = members(mesh, axes);
    let size = groups.first().map_or(0, Vec::len);
    format!("dense<{}> : tensor<{}x{size}xi64>", list(groups.iter().map(list)), groups.len())
}
