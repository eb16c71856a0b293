//! Losses whose logits are made in chunks, as another graph of the same model (see [`array::linear_label_losses`]).
//!
//! The logits of long samples with a large vocabulary may need more memory than all else. In chunks they never exist at
//! once, at the price of one more product in the backward pass. The variant is searched if no plan fits and logits need
//! a good part of a device's memory. It is also searched if the best plan recomputes or offloads although logits fill a
//! good part of memory, of which less is enough in a pipeline. The faster plan is kept.
//!
//! [`array::linear_label_losses`]: altiplano_ir::array::linear_label_losses

use crate::request::{PlanFailure, Request, SearchKind};
use altiplano_ir::array::MOST_CHUNKS;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Convert, DotGeneral, Function, Op};
use altiplano_ir::plan::{Plan, Stage, Target};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::types::TensorType;
use std::borrow::Cow;

/// Number of chunks in which the logits of a loss are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossChunks {
    /// The number for which the plan is better.
    #[default]
    Auto,
    /// One: all logits are made at once.
    None,
    /// This many, for every loss that can be cut so.
    Count(u64),
}

/// Share of a device's memory that logits must fill for chunks to be tried.
const WORTH_CHUNKS: f64 = 1.0 / 16.0;
/// The same for pipelines, in which plans of fewer stages would have larger microbatches.
const WORTH_CHUNKS_OF_A_PIPELINE: f64 = 1.0 / 32.0;
/// Most chunks that are chosen automatically. Each adds its nodes to the graph.
const MOST_CHOSEN: u64 = 32;

/// A loss over logits that nothing else reads.
struct Head {
    loss: ValueId,
    product: ValueId,
    /// The product in f32, if it has a narrower type.
    converted: Option<ValueId>,
    /// The contracted dimension of the weight.
    contract: usize,
}

impl Head {
    /// Features, weight and labels.
    fn operands(&self, graph: &Graph) -> [ValueId; 3] {
        let product = &graph.node(self.product).operands;
        [product[0], product[1], graph.node(self.loss).operands[1]]
    }

    /// Bytes of the logits in the type in which they are compared.
    fn logits_bytes(&self, graph: &Graph) -> u64 {
        graph.ty(self.converted.unwrap_or(self.product)).bytes()
    }

    /// Positions of a sample along the last dimension of the labels.
    fn positions(&self, graph: &Graph) -> u64 {
        let labels = self.operands(graph)[2];
        let last = graph.shape(labels).len() - 1;
        let per_sample = if graph.node(labels).batch_dims >> last & 1 == 1 { graph.batch.max(1) } else { 1 };
        graph.shape(labels)[last] / per_sample
    }

    /// Number of chunks whose logits are about as large as all features, so that they no longer decide what fits.
    fn chunks(&self, graph: &Graph) -> u64 {
        let [features, ..] = self.operands(graph);
        let last = |v: ValueId| graph.shape(v).last().copied().unwrap_or(1).max(1);
        let wanted = last(self.product).div_ceil(last(features)).next_power_of_two().clamp(2, MOST_CHOSEN);
        let positions = self.positions(graph);
        (2..=wanted).rev().find(|chunks| positions % chunks == 0).unwrap_or(1)
    }
}

/// The losses of a graph whose logits can be made in chunks.
fn heads(graph: &Graph, stops: &[ValueId]) -> Vec<Head> {
    let users = graph.users();
    let read_once = |v: ValueId| users[v.index()].len() == 1 && !graph.outputs.contains(&v) && !stops.contains(&v);
    let head = |loss: ValueId| {
        let node = graph.node(loss);
        let Op::Composite(op) = &node.op else { return None };
        let Function::CrossEntropy { dim } = op.function else { return None };
        let logits = node.operands[0];
        let converted = matches!(graph.node(logits).op, Op::Convert(_)).then_some(logits);
        let product = converted.map_or(logits, |v| graph.node(v).operands[0]);
        let Op::DotGeneral(dot) = &graph.node(product).op else { return None };
        let narrow = graph.ty(product).dtype.bytes() < 4;
        let compared_in_f32 = narrow == converted.is_some() && (!narrow || graph.ty(logits).dtype == DType::F32);
        let (features, weight) = (graph.node(product).operands[0], graph.node(product).operands[1]);
        let rank = graph.shape(features).len();
        let is_linear = dot.lhs_batch.is_empty()
            && rank > 1
            && dot.lhs_contract == [rank - 1]
            && graph.shape(weight).len() == 2
            && dot.rhs_contract.len() == 1;
        let alone = read_once(logits) && read_once(product) && dim + 1 == graph.shape(product).len();
        (compared_in_f32 && is_linear && alone).then(|| Head {
            loss,
            product,
            converted,
            contract: dot.rhs_contract[0],
        })
    };
    graph.values().filter_map(head).collect()
}

/// Copies a graph with nodes dropped or replaced, and maps `stops` to the copy. `replace` gets the new graph, the new
/// values of old nodes, and a node. It may add nodes and return the value that takes the node's place.
pub(super) fn rebuilt(
    graph: &Graph,
    stops: &[ValueId],
    is_dropped: impl Fn(ValueId) -> bool,
    replace: impl Fn(&mut Graph, &[ValueId], ValueId) -> Option<ValueId>,
) -> (Graph, Vec<ValueId>) {
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        if is_dropped(v) {
            map.push(ValueId(u32::MAX));
            continue;
        }
        let value = replace(&mut to, &map, v).unwrap_or_else(|| {
            let node = graph.node(v);
            let operands = node.operands.iter().map(|o| map[o.index()]).collect();
            to.append(Node { operands, ..node.clone() })
        });
        map.push(value);
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    (to, stops.iter().map(|s| map[s.index()]).collect())
}

/// The request with these losses in chunks; `None` if that changes nothing.
fn in_chunks(request: &Request, heads: &[Head], chunks: impl Fn(&Head) -> u64) -> Option<Request> {
    let graph = &request.graph;
    let cut: Vec<(&Head, u64)> = heads
        .iter()
        .map(|head| (head, chunks(head)))
        .filter(|(head, chunks)| *chunks > 1 && head.positions(graph).is_multiple_of(*chunks))
        .collect();
    if cut.is_empty() {
        return None;
    }
    let dropped = |v: ValueId| cut.iter().any(|(head, _)| head.product == v || head.converted == Some(v));
    let (graph, stop_gradients) = rebuilt(graph, &request.stop_gradients, dropped, |to, map, v| {
        let (head, chunks) = cut.iter().find(|(head, _)| head.loss == v)?;
        let operands = head.operands(graph).iter().map(|o| map[o.index()]).collect();
        let op = Function::LinearCrossEntropy { contract: head.contract, chunks: *chunks }.into();
        Some(to.append(Node { op, operands, ..graph.node(v).clone() }))
    });
    Some(Request { graph: graph.into(), stop_gradients, ..request.clone() })
}

/// The request with as many chunks as it asks for; an error if no loss can be cut so.
pub fn with_chunks(request: &Request) -> Result<Cow<'_, Request>, PlanFailure> {
    let LossChunks::Count(chunks) = request.loss_chunks else { return Ok(Cow::Borrowed(request)) };
    let refused = |problem| Err(PlanFailure::Option { option: "loss-chunks", value: chunks, problem });
    if !(2..=MOST_CHUNKS).contains(&chunks) {
        return refused("must be between 2 and 256, or 'auto' or 'none'");
    }
    if !request.graph.pins.is_empty() {
        return refused("chunks are not made of a loss beside pinned layouts");
    }
    let heads = heads(&request.graph, &request.stop_gradients);
    match in_chunks(request, &heads, |_| chunks) {
        Some(cut) => Ok(Cow::Owned(Request { loss_chunks: LossChunks::None, ..cut })),
        None => refused("chunks are what no cross-entropy over a linear layer of the model can be cut into"),
    }
}

/// The same request with losses in chunks, if no plan fits or the plan pays for memory that logits fill.
pub fn variant(request: &Request, plan: &Result<Plan, PlanFailure>) -> Option<Request> {
    let searches = request.loss_chunks == LossChunks::Auto
        && request.trains()
        && request.target == Target::Altiplano
        && request.search != SearchKind::Alpa
        && request.graph.pins.is_empty();
    if !searches {
        return None;
    }
    let heads = heads(&request.graph, &request.stop_gradients);
    let worth = match plan {
        Ok(plan) if plan.stages.len() > 1 => pays_for_memory(plan) && filled(plan) >= WORTH_CHUNKS_OF_A_PIPELINE,
        Ok(plan) => pays_for_memory(plan) && filled(plan) >= WORTH_CHUNKS,
        Err(PlanFailure::Memory { .. }) => filled_by_sample(request, &heads) >= WORTH_CHUNKS,
        Err(_) => false,
    };
    // Baselines stay: their plans are candidates, and with whole logits some of them do not fit.
    worth.then(|| in_chunks(request, &heads, |head| head.chunks(&request.graph)))?
}

/// Returns true if a plan spends time to save memory.
fn pays_for_memory(plan: &Plan) -> bool {
    let pays = |s: &Stage| !s.offload.is_none() || s.layers.clone().any(|l| s.recomputes(l) != Recompute::None);
    plan.stages.iter().any(pays)
}

/// The largest share of a device's memory that the logits of a microbatch and their cotangent fill.
fn filled(plan: &Plan) -> f64 {
    let part = |head: &Head| {
        let stage = plan.stages.iter().find_map(|stage| Some((stage, stage.shardings.get(&head.product)?)));
        let Some((stage, sharding)) = stage else { return 0.0 };
        let rule = plan.graph.rule(head.product);
        let layout = rule.shardings(&sharding.strategy, &stage.mesh).result;
        let ty = TensorType { dtype: DType::F32, ..plan.graph.ty(head.product).clone() };
        2.0 * layout.local_bytes(&ty, &stage.mesh) as f64 / plan.usable_bytes(stage) as f64
    };
    heads(&plan.graph, &plan.stop_gradients).iter().map(part).fold(0.0, f64::max)
}

/// The share of a device's memory that the logits of one sample and their cotangent fill, split over all devices of a
/// group.
fn filled_by_sample(request: &Request, heads: &[Head]) -> f64 {
    let graph = &request.graph;
    let of_sample = |head: &Head| 2.0 * head.logits_bytes(graph) as f64 / graph.batch.max(1) as f64;
    let largest = heads.iter().map(of_sample).fold(0.0, f64::max);
    let memory = |g: &altiplano_ir::cluster::Group| f64::from(g.num_devices()) * request.cluster.usable_bytes(g) as f64;
    request.cluster.groups.iter().map(|g| largest / memory(g)).fold(0.0, f64::max)
}

/// A graph and its `stops` without chunks, for which a plan with chunks was requested.
pub fn without(graph: &Graph, stops: &[ValueId]) -> (Graph, Vec<ValueId>) {
    let cut = |v: ValueId| match &graph.node(v).op {
        Op::Composite(op) => match op.function {
            Function::LinearCrossEntropy { contract, .. } => Some(contract),
            _ => None,
        },
        _ => None,
    };
    if graph.values().all(|v| cut(v).is_none()) {
        return (graph.clone(), stops.to_vec());
    }
    let (mut whole, stops) = rebuilt(
        graph,
        stops,
        |_| false,
        |to, map, v| {
            let contract = cut(v)?;
            let node = graph.node(v);
            let [x, weight, labels] = node.operands[..] else { return None };
            let rank = graph.shape(x).len();
            let dot = DotGeneral {
                lhs_batch: Vec::new(),
                rhs_batch: Vec::new(),
                lhs_contract: vec![rank - 1],
                rhs_contract: vec![contract],
            };
            let mut shape = graph.shape(x).to_vec();
            shape[rank - 1] = graph.shape(weight)[1 - contract];
            let ty = TensorType { shape, ..graph.ty(x).clone() };
            let product = Node {
                op: Op::DotGeneral(dot),
                operands: vec![map[x.index()], map[weight.index()]],
                ty,
                ..node.clone()
            };
            let mut logits = to.append(product.clone());
            if product.ty.dtype.bytes() < 4 {
                let ty = TensorType { dtype: DType::F32, ..product.ty.clone() };
                let op = Op::Convert(Convert { dtype: DType::F32 });
                logits = to.append(Node { op, operands: vec![logits], ty, ..product });
            }
            let op = Function::CrossEntropy { dim: rank - 1 }.into();
            Some(to.append(Node { op, operands: vec![logits, map[labels.index()]], ..node.clone() }))
        },
    );
    whole.pins.clone_from(&graph.pins);
    (whole, stops)
}
