//! Bodies of programs as text that plugins compile.
//!
//! A body becomes a program with one replica for each device of its mesh. A result that replaces a buffer takes the
//! memory of the argument that it replaces.

use crate::text::{Options, module};
use altiplano_ir::attention::Pass;
use altiplano_ir::graph::Graph;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::program::{Body, BufferId, BufferKind, Call, Program};
use std::collections::BTreeSet;

/// The buffers that a body reads, in the order of its arguments.
pub fn arguments(body: &Body) -> Vec<BufferId> {
    let mut reads: Vec<(u32, BufferId)> = body.reads.iter().map(|(leaf, id)| (leaf.0, *id)).collect();
    reads.sort_unstable();
    reads.into_iter().map(|(_, id)| id).collect()
}

/// Pairs of an argument and the result that replaces it, and takes its memory.
pub fn donated(program: &Program, body: &Body) -> Vec<(usize, usize)> {
    let reads = arguments(body);
    let replaces = |(result, (id, _)): (usize, &(BufferId, _))| {
        let argument = reads.iter().position(|read| read == id)?;
        let once = reads.iter().filter(|read| *read == id).count() == 1;
        (once && !program.buffer(*id).kind.is_of_step()).then_some((argument, result))
    };
    body.writes.iter().enumerate().filter_map(replaces).collect()
}

/// The sums that each body begins: those that it reads first in a step, in its only call of a step. It finds zeros there
/// whatever the buffer holds.
pub fn begun_sums(program: &Program) -> Vec<BTreeSet<BufferId>> {
    let mut begun = vec![BTreeSet::new(); program.bodies.len()];
    let mut seen = BTreeSet::new();
    let runs = program.schedule.iter().filter_map(|call| match call {
        Call::Run { body, .. } => Some(*body as usize),
        _ => None,
    });
    let mut calls = vec![0; program.bodies.len()];
    runs.clone().for_each(|body| calls[body] += 1);
    for body in runs {
        let sums = program.bodies[body].reads.iter().map(|(_, id)| *id);
        for id in sums.filter(|&id| matches!(program.buffer(id).kind, BufferKind::Accumulator { .. })) {
            if seen.insert(id) && calls[body] == 1 {
                begun[body].insert(id);
            }
        }
    }
    begun
}

/// The text of a body. Its results are the body's writes.
pub fn body_text(program: &Program, body: &Body, begun: &BTreeSet<BufferId>, attention: &[Pass]) -> String {
    graph_text(graph_of(body), &program.mesh, &Printing::of(program, body, begun, attention))
}

/// The arguments of a body that are sums which it begins.
pub fn zeros(body: &Body, begun: &BTreeSet<BufferId>) -> Vec<usize> {
    let sums = arguments(body).into_iter().enumerate().filter(|(_, id)| begun.contains(id));
    sums.map(|(argument, _)| argument).collect()
}

/// How a local graph is printed.
#[derive(Clone, Debug, Default)]
pub struct Printing<'a> {
    /// See [`Options::donated`].
    pub donated: Vec<(usize, usize)>,
    /// See [`Options::zeros`].
    pub zeros: Vec<usize>,
    /// See [`Options::in_turn`].
    pub in_turn: Vec<usize>,
    /// See [`Options::attention`].
    pub attention: &'a [Pass],
}

impl<'a> Printing<'a> {
    /// `begun` are the sums that the body begins.
    pub fn of(program: &Program, body: &Body, begun: &BTreeSet<BufferId>, attention: &'a [Pass]) -> Printing<'a> {
        let (donated, zeros) = (donated(program, body), zeros(body, begun));
        // Values that other bodies leave for this one.
        let is_kept = |id: &BufferId| program.buffer(*id).kind == BufferKind::Value;
        let reads = arguments(body);
        let in_turn = (0..reads.len()).filter(|&argument| is_kept(&reads[argument])).collect();
        Printing { donated, zeros, in_turn, attention }
    }
}

/// The graph of a body, whose outputs are the body's writes.
pub fn graph_of(body: &Body) -> Graph {
    let mut graph = body.graph.clone();
    graph.name = body.name.clone();
    graph.outputs = body.writes.iter().map(|(_, value)| *value).collect();
    graph
}

/// The text of a local graph with a replica for each device of the mesh.
pub fn graph_text(graph: Graph, mesh: &Mesh, printing: &Printing) -> String {
    let Printing { donated, zeros, in_turn, attention } = printing.clone();
    module(&graph, &Options { replicas: Some(mesh), donated, zeros, in_turn, attention, ..Options::default() })
}

/// A body without names, so that equal bodies of different layers have equal texts.
pub fn anonymous(body: &Body) -> Body {
    let mut body = body.clone();
    body.name = format!("{:?}", body.phase).to_lowercase();
    for (at, node) in body.graph.nodes.iter_mut().enumerate() {
        node.name.clear();
        if let Op::Input(Input { name, .. }) | Op::Parameter(Parameter { name, .. }) = &mut node.op {
            *name = at.to_string();
        }
    }
    body
}
