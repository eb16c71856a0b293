//! Describes shardings in the terms of machine learning. The op that uses a value determines the term: a weight whose
//! contracted dimension is split is row-parallel, whatever its name.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Stage, Storage};
use altiplano_ir::reshard::split_further;
use altiplano_ir::rule::{AxisUse, FactorKind, ShardingRule};
use altiplano_ir::sharding::Sharding;
use std::collections::BTreeSet;

/// The meaning of splitting a parameter over an axis, by its use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Vocabulary,
    /// Each device holds some of several matrices that are multiplied independently.
    Expert,
    Column,
    Row,
    /// Along the embedding dimension of an embedding table.
    Embedding,
    /// In the same way as the activation with which it is combined elementwise.
    Elementwise,
    /// Each device computes with the whole parameter.
    Whole,
}

/// Describes how a stage stores a parameter, its gradient and its optimizer state.
pub(crate) fn parameter(
    plan: &Plan,
    stage: &Stage,
    value: ValueId,
    storage: &Storage,
    users: &[Vec<ValueId>],
) -> String {
    let mesh = &stage.mesh;
    let mut said: Vec<String> = Vec::new();
    let split: BTreeSet<AxisId> = storage.parameter.split_axes().collect();
    for &axis in split.iter().filter(|&&a| mesh.size(a) > 1) {
        let name = mesh.name(axis);
        said.push(match role(plan, stage, value, axis, users) {
            Role::Vocabulary => format!("vocabulary-parallel over {name}"),
            Role::Expert => format!("expert-parallel over {name}"),
            Role::Column => format!("column-parallel over {name}"),
            Role::Row => format!("row-parallel over {name}"),
            Role::Embedding => format!("embedding dimension over {name}"),
            Role::Elementwise => format!("with the activation over {name}"),
            Role::Whole => format!("sharded over {name}, gathered for use (ZeRO-3)"),
        });
    }
    if said.is_empty() {
        said.push("replicated".to_string());
    }
    let extra = |sharding: &Sharding| {
        let axes = sharding.split_axes().filter(|a| !split.contains(a) && mesh.size(*a) > 1);
        axes.map(|a| mesh.name(a)).collect::<Vec<_>>().join(", ")
    };
    let (gradient, state) = (extra(&storage.gradient), extra(&storage.state));
    match (gradient.is_empty(), state.is_empty()) {
        (false, _) => said.push(format!("gradient and state over {gradient} (ZeRO-2)")),
        (true, false) => said.push(format!("state over {state} (ZeRO-1)")),
        (true, true) => {}
    }
    if plan.graph.is_frozen(value) && plan.schedule.trains() {
        said.push("frozen".to_string());
    }
    said.join("; ")
}

/// The ZeRO level of a parameter; `None` if no axis is left to shard it over.
pub(crate) fn level(
    plan: &Plan,
    stage: &Stage,
    value: ValueId,
    storage: &Storage,
    users: &[Vec<ValueId>],
) -> Option<u8> {
    let mesh = &stage.mesh;
    let axes =
        |sharding: &Sharding| -> BTreeSet<AxisId> { sharding.split_axes().filter(|a| mesh.size(*a) > 1).collect() };
    let (parameter, gradient, state) = (axes(&storage.parameter), axes(&storage.gradient), axes(&storage.state));
    let gathered = |&axis: &AxisId| role(plan, stage, value, axis, users) == Role::Whole;
    if parameter.iter().any(gathered) {
        return Some(3);
    }
    if plan.graph.is_frozen(value) {
        return None;
    }
    let free = |&axis: &AxisId| {
        let dims = 0..storage.state.dims.len();
        mesh.size(axis) > 1 && dims.into_iter().any(|d| split_further(&storage.state, d, axis, mesh).is_some())
    };
    match (gradient.is_subset(&parameter), state.is_subset(&parameter)) {
        (false, _) => Some(2),
        (true, false) => Some(1),
        (true, true) => mesh.axis_ids().any(|axis| free(&axis)).then_some(0),
    }
}

/// The ZeRO level of most bytes of a stage's parameters. The search may give one parameter to all replicas and share
/// another among them, whatever [`Stage::zero`] says of what was asked for.
pub(crate) fn level_of_most(plan: &Plan, stage: &Stage, users: &[Vec<ValueId>]) -> u8 {
    let graph = &plan.graph;
    let mut bytes = [0_u64; 4];
    for (v, name) in graph.parameters() {
        let storage = stage.parameters.get(name);
        if let Some(level) = storage.and_then(|storage| level(plan, stage, v, storage, users)) {
            bytes[usize::from(level)] += graph.ty(v).bytes();
        }
    }
    let most = (0..).zip(bytes).filter(|&(_, bytes)| bytes > 0).max_by_key(|&(level, bytes)| (bytes, level));
    most.map_or(stage.zero, |(level, _)| level)
}

/// The most telling role among the uses of a parameter on this stage.
fn role(plan: &Plan, stage: &Stage, value: ValueId, axis: AxisId, users: &[Vec<ValueId>]) -> Role {
    let graph = &plan.graph;
    let mut best = Role::Whole;
    let mut pending = vec![value];
    let mut seen = BTreeSet::new();
    while let Some(from) = pending.pop() {
        for &user in &users[from.index()] {
            if !seen.insert((from, user)) {
                continue;
            }
            let node = graph.node(user);
            if passes_on(&node.op) {
                pending.push(user);
                continue;
            }
            let Some(strategy) = stage.shardings.get(&user).map(|s| &s.strategy) else { continue };
            let Some(AxisUse::Factor { factor, .. }) = strategy.0.get(axis.0 as usize) else { continue };
            let rule = graph.rule(user);
            let indexes = |dims: &Vec<Vec<u8>>| dims.iter().any(|d| d.contains(factor));
            let here = node.operands.iter().zip(&rule.operands).any(|(o, dims)| *o == from && indexes(dims));
            if !here {
                continue;
            }
            let reduced = matches!(rule.factors[*factor as usize].kind, FactorKind::Reduction(_));
            best = best.min(match (&node.op, reduced) {
                (Op::Gather(_), true) => Role::Vocabulary,
                (Op::Gather(_), false) => Role::Embedding,
                (op, true) if op.is_contraction() => Role::Row,
                (Op::DotGeneral(_), false) if node.operands.len() == 2 && in_all(&rule, *factor) => Role::Expert,
                (op, false) if op.is_contraction() => Role::Column,
                _ => Role::Elementwise,
            });
        }
    }
    best
}

/// Returns whether a factor indexes every operand and the result.
fn in_all(rule: &ShardingRule, factor: u8) -> bool {
    rule.operands.iter().chain([&rule.result]).all(|dims| dims.iter().any(|d| d.contains(&factor)))
}

/// Ops that only change the form of a parameter.
fn passes_on(op: &Op) -> bool {
    matches!(op, Op::Convert(_) | Op::Transpose(_) | Op::Reshape(_) | Op::BroadcastInDim(_))
}

/// Sizes of a model that name the dimensions of its activations.
pub(crate) struct Activations<'a> {
    graph: &'a Graph,
    users: Vec<Vec<ValueId>>,
    /// Sizes of the dimension after the batch of integer inputs: sequence lengths.
    sequences: BTreeSet<u64>,
}

impl<'a> Activations<'a> {
    pub(crate) fn new(plan: &'a Plan) -> Self {
        let graph = &plan.graph;
        let ids = graph.inputs().filter(|&(v, _)| graph.ty(v).dtype.is_integer() && graph.ty(v).rank() == 2);
        let sequences = ids.map(|(v, _)| graph.shape(v)[1]).collect();
        Activations { graph, users: graph.users(), sequences }
    }

    /// The nodes that use each value.
    pub(crate) fn users(&self) -> &[Vec<ValueId>] {
        &self.users
    }

    /// Returns whether labels are looked up in the value, possibly after a softmax, so that it holds a score for each
    /// word.
    fn is_scores(&self, value: ValueId) -> bool {
        let shape = self.graph.shape(value);
        let mut pending = vec![value];
        let mut seen = BTreeSet::new();
        while let Some(v) = pending.pop().filter(|_| seen.len() < 64) {
            for &user in &self.users[v.index()] {
                let node = self.graph.node(user);
                if matches!(node.op, Op::Gather(_)) && node.operands[0] == v {
                    return true;
                }
                if node.op.is_elementwise() && node.ty.shape == shape && seen.insert(user) {
                    pending.push(user);
                }
            }
        }
        false
    }

    /// Describes the layout of a value.
    pub(crate) fn of(&self, value: ValueId, sharding: &Sharding, mesh: &Mesh) -> String {
        let mut said = Vec::new();
        for (d, layout) in sharding.dims.iter().enumerate() {
            let axes: Vec<&str> = layout.axes().filter(|&a| mesh.size(a) > 1).map(|a| mesh.name(a)).collect();
            if !axes.is_empty() {
                said.push(format!("{} over {}", self.dimension(value, d), axes.join(", ")));
            }
        }
        let partial: Vec<&str> =
            sharding.partial.iter().filter(|(a, _)| mesh.size(*a) > 1).map(|(a, _)| mesh.name(*a)).collect();
        if !partial.is_empty() {
            said.push(format!("partial sums over {}", partial.join(", ")));
        }
        if said.is_empty() { "replicated".to_string() } else { said.join("; ") }
    }

    /// Names a dimension of an activation.
    fn dimension(&self, value: ValueId, dim: usize) -> String {
        let node = self.graph.node(value);
        let (size, rank) = (node.ty.shape[dim], node.ty.rank());
        let is_last = dim + 1 == rank;
        if node.batch_dims >> dim & 1 == 1 {
            "batch".to_string()
        } else if let Op::Convolution(conv) = &node.op {
            match conv.result.spatial.iter().position(|&d| d == dim) {
                Some(i) if conv.window.len() <= 3 => {
                    ["depth", "height", "width"][3 - conv.window.len() + i].to_string()
                }
                Some(i) => format!("spatial dimension {i}"),
                None => "channels".to_string(),
            }
        } else if is_last && self.is_scores(value) {
            "vocabulary".to_string()
        } else if self.sequences.contains(&size) && (!is_last || rank == 4) {
            "sequence".to_string()
        } else if is_last {
            "features".to_string()
        } else if rank >= 4 {
            "heads".to_string()
        } else {
            format!("dimension {dim}")
        }
    }
}
