//! Runs local graphs through a session and through the reference interpreter, and compares. The values of a leaf on all
//! devices form one parameter whose first dimension runs over the devices; results are stacked in the same way.

#![allow(dead_code)]

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::run_mesh;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Input, Op};
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Call, Phase, Program, Programs};
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use altiplano_runtime::{HostTensor, Options, Session};
use std::collections::BTreeMap;

/// A small deterministic generator (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }

    /// Uniform in [-1, 1), exactly representable in f32.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 41) as f64 / (1u64 << 22) as f64 - 1.0
    }

    /// Values of a type: floats in [-2, 2), small integers, booleans.
    pub fn tensor(&mut self, ty: &TensorType) -> Tensor {
        let data = (0..ty.elements()).map(|_| self.value(ty.dtype)).collect();
        // Rounded to their storage format, so that both sides start from the same numbers.
        HostTensor::from_reference(&Tensor::new(ty.clone(), data)).to_reference()
    }

    pub fn value(&mut self, dtype: DType) -> f64 {
        match dtype {
            d if d.is_float() => 2.0 * self.unit(),
            DType::Bool => self.below(2) as f64,
            d if d.is_unsigned_integer() => self.below(7) as f64,
            _ => self.below(13) as f64 - 6.0,
        }
    }
}

pub fn input(graph: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
    graph.emit(Op::Input(Input { name: name.to_string(), ty: TensorType::new(dtype, shape) }), &[])
}

fn stacked(ty: &TensorType, mesh: &Mesh, local: bool) -> (TensorType, Sharding) {
    let n = if local { 1 } else { mesh.num_devices() as u64 };
    let mut shape = vec![n];
    shape.extend(&ty.shape);
    let mut sharding = Sharding::replicated(&shape);
    sharding.dims[0] = DimLayout::split(n, mesh.axis_ids());
    (ty.with_shape(shape), sharding)
}

/// One program of one body. Its leaves are parameters and its outputs states, stacked over devices.
pub fn programs_of(graph: &Graph, mesh: &Mesh) -> Programs {
    let mut local = Graph::new(graph.name.clone());
    let mut buffers = Vec::new();
    let mut reads = Vec::new();
    let mut new_id = Vec::new();
    for v in graph.values() {
        let node = graph.node(v);
        let id = if let Op::Input(op) = &node.op {
            let (ty, sharding) = stacked(&op.ty, mesh, false);
            let leaf = input(&mut local, &op.name, op.ty.dtype, &stacked(&op.ty, mesh, true).0.shape);
            reads.push((leaf, BufferId(buffers.len() as u32)));
            let kind = BufferKind::Parameter { name: op.name.clone() };
            let name = op.name.clone();
            buffers.push(Buffer { name, stage: 0, kind, ty, sharding, extents: None, host: false });
            local.reshape(leaf, &op.ty.shape)
        } else {
            let operands: Vec<ValueId> = node.operands.iter().map(|o| new_id[o.index()]).collect();
            local.emit(node.op.clone(), &operands)
        };
        new_id.push(id);
    }
    let mut writes = Vec::new();
    for (i, o) in graph.outputs.iter().enumerate() {
        let (ty, sharding) = stacked(graph.ty(*o), mesh, false);
        let value = local.reshape(new_id[o.index()], &stacked(graph.ty(*o), mesh, true).0.shape);
        local.outputs.push(value);
        writes.push((BufferId(buffers.len() as u32), value));
        let kind = BufferKind::State { parameter: format!("out{i}"), slot: "value".to_string() };
        buffers.push(Buffer { name: format!("out{i}"), stage: 0, kind, ty, sharding, extents: None, host: false });
    }
    let body = Body {
        name: "body".to_string(),
        stage: 0,
        phase: Phase::Forward,
        graph: local,
        reads,
        writes,
        frees: Vec::new(),
    };
    let program = Program {
        devices: (0..mesh.num_devices()).collect(),
        mesh: mesh.clone(),
        buffers,
        bodies: vec![body],
        schedule: vec![Call::Run { body: 0, microbatch: None }],
        late: Vec::new(),
        flush: Vec::new(),
        fused_attention: false,
    };
    Programs { programs: vec![program], transfers: Vec::new(), num_microbatches: 1, microbatch: 0, loss_is_mean: true }
}

/// Results of a graph on all devices, `[output][device]`, by the runtime and by the interpreter.
pub fn run_both(graph: &Graph, mesh: &Mesh, leaves: &[Vec<Tensor>]) -> (Vec<Vec<Tensor>>, Vec<Vec<Tensor>>) {
    let n = mesh.num_devices() as usize;
    let programs = programs_of(graph, mesh);
    let mut session = Session::new(&programs, &Options::default()).unwrap();
    let leaf_ids: Vec<ValueId> = graph.inputs().map(|i| i.0).collect();
    for ((_, name), values) in graph.inputs().zip(leaves) {
        let ty = stacked(&values[0].ty, mesh, false).0;
        let data = values.iter().flat_map(|t| t.data.clone()).collect();
        session.load_parameter(name, &HostTensor::from_reference(&Tensor::new(ty, data))).unwrap();
    }
    session.step(&BTreeMap::new(), &BTreeMap::new()).unwrap();
    let results = (0..graph.outputs.len())
        .map(|i| {
            let whole = session.state(&format!("out{i}"), "value").unwrap().to_f64();
            let ty = graph.ty(graph.outputs[i]).clone();
            let size = ty.elements() as usize;
            (0..n).map(|d| Tensor::new(ty.clone(), whole[d * size..(d + 1) * size].to_vec())).collect()
        })
        .collect();
    let all = run_mesh(graph, mesh, |v, d| {
        let i = leaf_ids.iter().position(|l| *l == v).unwrap();
        leaves[i][d as usize].clone()
    });
    let expected = graph.outputs.iter().map(|o| all[o.index()].clone()).collect();
    (results, expected)
}

/// Compares within a tolerance relative to the largest element; integers and booleans exactly. Narrow types round the
/// expected values first, and many cannot hold 100.
pub fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    let narrow = |dtype: DType| dtype.is_float() && dtype.bytes() == 1;
    let mut expected = expected.clone();
    if narrow(expected.ty.dtype) {
        let dtype = expected.ty.dtype;
        expected.data.iter_mut().for_each(|x| *x = dtype.round(*x));
    }
    assert_eq!(found.ty, expected.ty, "{what}");
    let finite = |x: &f64| if x.is_finite() { x.abs() } else { 0.0 };
    let scale = expected.data.iter().map(finite).fold(1.0, f64::max);
    let allowed = if expected.ty.dtype.is_float() { tolerance * scale } else { 0.0 };
    for (i, (f, e)) in found.data.iter().zip(&expected.data).enumerate() {
        let same = f == e || f.is_nan() && e.is_nan() || (f - e).abs() <= allowed;
        assert!(same, "{what}: element {i} is {f}, expected {e} (allowed {allowed:e})");
    }
}

/// Runs a graph on one device with random leaves and compares all outputs with the interpreter.
pub fn check_graph(graph: &Graph, random: &mut Random, tolerance: f64, what: &str) {
    let mesh = Mesh::new(&[("only", 1)]);
    let leaves: Vec<Vec<Tensor>> = graph.inputs().map(|(v, _)| vec![random.tensor(graph.ty(v))]).collect();
    let (found, expected) = run_both(graph, &mesh, &leaves);
    for (i, (f, e)) in found.iter().zip(&expected).enumerate() {
        assert_close(&f[0], &e[0], tolerance, &format!("{what}, output {i} ({:?})", graph.node(graph.outputs[i]).op));
    }
}
