//! Runs a bare graph on one device, without a plan, to inspect the results of single ops.

use crate::error::RuntimeError;
use crate::host::HostTensor;
use crate::session::{Options, Session};
use altiplano_ir::expand::without_composites;
use altiplano_ir::graph::Graph;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Call, Phase, Program, Programs};
use altiplano_ir::sharding::Sharding;
use std::collections::BTreeMap;

/// The graph's outputs in order. `leaves` holds its parameters and inputs by name; those of floats may be of another
/// float type and are rounded, all others must have the types that the graph says.
///
/// ```
/// use altiplano_ir::graph::Graph;
/// use altiplano_ir::op::{Input, Op};
/// use altiplano_runtime::{HostTensor, evaluate};
///
/// let x = HostTensor::f32([2], vec![1.0, 2.0])?;
/// let mut graph = Graph::new("double");
/// let leaf = graph.emit(Op::Input(Input { name: "x".to_string(), ty: x.ty.clone() }), &[]);
/// let sum = graph.add(leaf, leaf);
/// graph.outputs = vec![sum];
/// assert_eq!(evaluate(&graph, &[("x".to_string(), x)].into())?[0].to_f64(), [2.0, 4.0]);
/// # Ok::<(), altiplano_runtime::RuntimeError>(())
/// ```
pub fn evaluate(graph: &Graph, leaves: &BTreeMap<String, HostTensor>) -> Result<Vec<HostTensor>, RuntimeError> {
    let graph = &*without_composites(graph);
    let mut session = Session::new(&programs(graph, 1), &Options::default())?;
    for name in graph.values().filter_map(|v| leaf_name(&graph.node(v).op)) {
        let tensor = leaves.get(name).ok_or(RuntimeError::MissingInput { name: name.to_string() })?;
        session.load_parameter(name, tensor)?;
    }
    session.step(&BTreeMap::new(), &BTreeMap::new())?;
    (0..graph.outputs.len()).map(|i| session.state(&result_name(i), SLOT)).collect()
}

/// Results are stored as optimizer state, which outlives the step and can be read back.
const SLOT: &str = "value";

fn result_name(i: usize) -> String {
    format!("result{i}")
}

fn leaf_name(op: &Op) -> Option<&str> {
    match op {
        Op::Parameter(Parameter { name, .. }) | Op::Input(Input { name, .. }) => Some(name),
        _ => None,
    }
}

/// One program of one body that each of `devices` devices runs whole. Every leaf is a parameter, so that no microbatch
/// is cut from it, and every result is optimizer state.
pub(crate) fn programs(graph: &Graph, devices: u32) -> Programs {
    let mut buffers = Vec::new();
    let mut buffer = |name: String, kind: BufferKind, v| {
        let ty = graph.ty(v).clone();
        let sharding = Sharding::replicated(&ty.shape);
        buffers.push(Buffer { name, stage: 0, kind, ty, sharding, extents: None, host: false });
        BufferId(buffers.len() as u32 - 1)
    };
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for v in graph.values() {
        if let Some(name) = leaf_name(&graph.node(v).op) {
            let name = name.to_string();
            reads.push((v, buffer(name.clone(), BufferKind::Parameter { name }, v)));
        }
    }
    for (i, &v) in graph.outputs.iter().enumerate() {
        let kind = BufferKind::State { parameter: result_name(i), slot: SLOT.to_string() };
        writes.push((buffer(result_name(i), kind, v), v));
    }
    let name = graph.name.clone();
    let body = Body { name, stage: 0, phase: Phase::Forward, graph: graph.clone(), reads, writes, frees: Vec::new() };
    let program = Program {
        devices: (0..devices).collect(),
        mesh: Mesh::new(&[("only", devices)]),
        buffers,
        bodies: vec![body],
        schedule: vec![Call::Run { body: 0, microbatch: None }],
        late: Vec::new(),
        flush: Vec::new(),
        fused_attention: false,
    };
    Programs { programs: vec![program], transfers: Vec::new(), num_microbatches: 1, microbatch: 0, loss_is_mean: true }
}
