//! Prices of composites: the kernels of one device's part, forward and backward.
//!
//! A composite is a subgraph with a name, such as attention, a norm or a loss. Under a strategy, each device runs a graph
//! of its own, with collectives where factors are split that the composite combines. The seconds of that graph are those
//! of the kernels that lowering and prediction would find in it, so that the search sees fused attention and fused
//! elementwise work as the prediction does. For the backward pass, the graph is cut at its collectives: what arrives is a
//! leaf, and what is sent a result.
//!
//! Pricing differentiates and divides the graph, which is slow, and composites repeat. So prices are known by op, local
//! types and split, for all meshes and numbers of microbatches of a search ([`KnownComposites`]). Losses in many chunks
//! are priced by two, three and four of them.

use super::repeat::{self, Repeats};
use super::{Prices, is_kept};
use altiplano_cost_models::kernels::kernels;
use altiplano_cost_models::timeline::Price;
use altiplano_cost_models::{CostModel, kernels::KernelKind};
use altiplano_ir::autodiff::{pull_back, varying};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::{Binary, Convert, Function, Input, Local, Op, Operator, Slice};
use altiplano_ir::optimizer::leaf;
use altiplano_ir::plan::{AttentionKernels, Execution};
use altiplano_ir::recompute::{Modules, Recompute};
use altiplano_ir::reshard::Collective;
use altiplano_ir::rule::{OpShardings, ShardingRule, Strategy};
use altiplano_ir::sharding::Sharding;
use altiplano_ir::softmax_max::irrelevant_maxima;
use altiplano_ir::types::TensorType;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The units in which a composite is priced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fusion {
    /// Its ops, one by one. Given degrees keep the layouts that follow from these prices, which were compared with published
    /// steps.
    #[default]
    Ops,
    /// Its kernels, with those of fused attention that software has, if any.
    Kernels(Option<AttentionKernels>),
}

impl Fusion {
    /// The kernels of software.
    pub fn of(execution: &Execution) -> Fusion {
        Fusion::Kernels(execution.fused_attention.then_some(execution.attention))
    }

    fn attention(self) -> Option<AttentionKernels> {
        match self {
            Fusion::Ops => None,
            Fusion::Kernels(attention) => attention,
        }
    }
}

/// Known costs of composites on devices of one kind, by op and local types of the operands.
#[derive(Debug, Default)]
pub struct CompositeCosts(Mutex<FxHashMap<(String, Vec<TensorType>), Splits>>);

/// Known costs of composites by the identity of the cost model that priced them, and by software.
#[derive(Debug, Default)]
pub struct KnownComposites(Mutex<FxHashMap<String, Arc<CompositeCosts>>>);

impl KnownComposites {
    /// Most cost models and most composites of one that are remembered. Beyond it, they are priced anew.
    const MOST: usize = 1 << 14;

    /// The composites that a cost model has priced for software; none yet if the model has no identity.
    pub fn of(&self, cost: &dyn CostModel, fusion: Fusion) -> Arc<CompositeCosts> {
        let Some(identity) = cost.identity() else { return Arc::default() };
        let identity = format!("{identity} {fusion:?}");
        let mut models = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if models.len() >= Self::MOST && !models.contains_key(&identity) {
            models.clear();
        }
        let known = models.entry(identity).or_default();
        if known.0.lock().unwrap_or_else(PoisonError::into_inner).len() >= Self::MOST {
            *known = Arc::default();
        }
        known.clone()
    }
}

/// Known costs of one composite by which factors are split, one for each way to send.
type Splits = FxHashMap<Vec<bool>, Vec<Arc<Parts>>>;

/// The parts of a composite: their cost without communication, and their collectives. Meshes whose axes of the same
/// factors have these sizes share it.
#[derive(Debug)]
struct Parts {
    alone: CompositeCost,
    sent: Vec<Sent>,
    /// The factors over whose axes values are sent or sliced, with the sizes of the axes.
    over: Vec<(usize, Vec<u64>)>,
}

/// A collective of a composite.
#[derive(Debug)]
struct Sent {
    /// Its axes are positions among those of [`Parts::over`].
    collective: Collective,
    /// Local bytes of the operand and the result.
    bytes: [u64; 2],
    times: u64,
}

impl Parts {
    /// The parts of `rounds` rounds from those of 2, 3 and 4. They are sums over rounds, and over pairs of rounds where each
    /// adds to a value of all, such as a gradient. `operand_bytes` are those of the largest operand. `None` if the size of
    /// what is sent depends on the number of rounds.
    fn of_rounds(rounds: u64, operand_bytes: f64, [two, three, four]: [Parts; 3]) -> Option<Parts> {
        let of = [&two, &three, &four].map(|parts| parts.alone);
        let steps = (rounds - 2) as f64;
        let at = |field: fn(&CompositeCost) -> f64| {
            let [a, b, c] = [0, 1, 2].map(|i| field(&of[i]));
            a + steps * (b - a) + steps * (steps - 1.0) / 2.0 * (c - 2.0 * b + a)
        };
        let alone = CompositeCost {
            forward_s: at(|c| c.forward_s),
            backward_s: at(|c| c.backward_s),
            issue_s: at(|c| c.issue_s),
            backward_issue_s: at(|c| c.backward_issue_s),
            kept_bytes: at(|c| c.kept_bytes),
            growing_s: at(|c| c.growing_s),
            growing_bytes: at(|c| c.growing_bytes),
            // A value of one round, or one of all.
            largest_bytes: of[2].largest_bytes.max(operand_bytes),
            largest_fused_bytes: of[2].largest_fused_bytes.max(operand_bytes),
        };
        if two.sent.len() != three.sent.len() {
            return None;
        }
        let mut sent = two.sent;
        for (sent, more) in sent.iter_mut().zip(three.sent) {
            if (&sent.collective, sent.bytes) != (&more.collective, more.bytes) {
                return None;
            }
            sent.times += (rounds - 2) * more.times.checked_sub(sent.times)?;
        }
        Some(Parts { alone, sent, over: two.over })
    }
}

impl<'a> Prices<'a> {
    /// One device's work for an op, as a graph.
    pub(super) fn local_graph(
        &self,
        op: &Op,
        operands: &[&TensorType],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> Graph {
        let mut graph = Graph::new("local");
        let leaves: Vec<ValueId> = operands
            .iter()
            .zip(&shardings.operands)
            .map(|(ty, s)| leaf(&mut graph, String::new(), s.local_type(ty, &self.mesh)))
            .collect();
        let result = op.local(&mut Local {
            graph: &mut graph,
            mesh: &self.mesh,
            operands: leaves,
            operand_types: operands.iter().map(|&ty| ty.clone()).collect(),
            result_shape: shardings.result.local_shape(&self.mesh),
            factor_axes: self.factor_axes(rule, strategy),
            fused_loss: true,
        });
        graph.outputs = vec![result];
        graph
    }

    /// Cost of a composite's decomposition on one device.
    pub fn inside(
        &self,
        op: &Op,
        operands: &[&TensorType],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> CompositeCost {
        let Some(CompositeCosts(composites)) = self.composites else {
            let parts = self.inside_of(op, operands, rule, strategy, shardings);
            return self.with_sent(&parts, &self.factor_axes(rule, strategy));
        };
        let locals: Vec<TensorType> =
            operands.iter().zip(&shardings.operands).map(|(ty, s)| s.local_type(ty, &self.mesh)).collect();
        let axes = self.factor_axes(rule, strategy);
        let split: Vec<bool> = axes.iter().map(|axes| !axes.is_empty()).collect();
        let key = (format!("{op:?}"), locals);
        let is_alike =
            |parts: &&Arc<Parts>| parts.over.iter().all(|(factor, sizes)| self.sizes(&axes[*factor]) == *sizes);
        let of_split = |known: &Splits| known.get(&split)?.iter().find(is_alike).cloned();
        let known = composites.lock().unwrap_or_else(PoisonError::into_inner).get(&key).and_then(of_split);
        if let Some(parts) = known {
            return self.with_sent(&parts, &axes);
        }
        let parts = Arc::new(self.inside_of(op, operands, rule, strategy, shardings));
        let inside = self.with_sent(&parts, &axes);
        let mut composites = composites.lock().unwrap_or_else(PoisonError::into_inner);
        composites.entry(key).or_default().entry(split).or_default().push(parts);
        inside
    }

    /// For each factor, the axes that split it into more than one part.
    fn factor_axes(&self, rule: &ShardingRule, strategy: &Strategy) -> Vec<Vec<AxisId>> {
        let mut axes = strategy.factor_axes(rule.factors.len());
        axes.iter_mut().for_each(|axes| axes.retain(|&axis| self.mesh.size(axis) > 1));
        axes
    }

    fn sizes(&self, axes: &[AxisId]) -> Vec<u64> {
        axes.iter().map(|&axis| self.mesh.size(axis)).collect()
    }

    /// Cost of a composite including its communication over the links of this mesh, where `axes` split its factors.
    fn with_sent(&self, Parts { alone, sent, over }: &Parts, axes: &[Vec<AxisId>]) -> CompositeCost {
        let axes: Vec<AxisId> = over.iter().flat_map(|(factor, _)| axes[*factor].iter().copied()).collect();
        let mut inside = *alone;
        let mut shifts_s = 0.0;
        for Sent { collective, bytes: [operand, result], times } in sent {
            let here = collective.renamed(|axis| axes[usize::from(axis.0)]);
            let seconds = *times as f64 * self.waited_s(&here, *operand, *result);
            let issue_s = if seconds > 0.0 { *times as f64 * self.collective_issue_s } else { 0.0 };
            inside.issue_s += issue_s;
            inside.backward_issue_s += issue_s;
            if matches!(collective, Collective::Shift { .. }) {
                shifts_s += seconds;
                inside.backward_issue_s += issue_s;
                continue;
            }
            inside.forward_s += seconds;
            inside.backward_s += seconds;
        }
        // Sending a ring's next block overlaps with computation, if the device can do both at once. The backward pass
        // sends the blocks again, together with their gradients.
        let exposed_s = |shifts_s: f64, compute_s: f64| match self.cost.runtime() {
            Some(_) => shifts_s,
            None => (shifts_s - compute_s).max(0.0),
        };
        inside.forward_s += exposed_s(shifts_s, alone.forward_s);
        inside.backward_s += exposed_s(2.0 * shifts_s, alone.backward_s);
        inside
    }

    /// Costs of a composite. Those of many equal rounds follow from those of few.
    fn inside_of(
        &self,
        op: &Op,
        operands: &[&TensorType],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> Parts {
        self.of_few_rounds(op, operands, rule, strategy, shardings)
            .unwrap_or_else(|| self.priced(op, operands, rule, strategy, shardings))
    }

    /// Costs of a composite of many rounds; `None` if it has few, or if fewer rounds are split or send otherwise.
    fn of_few_rounds(
        &self,
        op: &Op,
        operands: &[&TensorType],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> Option<Parts> {
        let rounds = num_rounds(op).filter(|&rounds| rounds > MANY_ROUNDS)?;
        let few = |rounds: u64| {
            let graph = in_rounds(op, operands, rounds)?;
            let v = graph.outputs[0];
            let fewer = graph.rule(v);
            let alike = (&fewer.operands, &fewer.result) == (&rule.operands, &rule.result);
            let shardings = || fewer.shardings(strategy, &self.mesh);
            alike.then(|| self.priced(&graph.node(v).op, &graph.operand_types(v), &fewer, strategy, &shardings()))
        };
        let local = |(ty, s): (&&TensorType, &Sharding)| s.local_type(ty, &self.mesh).bytes();
        let largest = operands.iter().zip(&shardings.operands).map(local).max().unwrap_or(0);
        Parts::of_rounds(rounds, largest as f64, [few(2)?, few(3)?, few(4)?])
    }

    /// Costs of a composite's local graph.
    fn priced(
        &self,
        op: &Op,
        operands: &[&TensorType],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> Parts {
        let graph = &self.local_graph(op, operands, rule, strategy, shardings);
        let recomputes = matches!(op, Op::Composite(op) if op.function.recomputes_inside());
        let mut inside = self.held(graph);
        if recomputes {
            (inside.kept_bytes, inside.growing_bytes, inside.growing_s) = (0.0, 0.0, 0.0);
        }
        let of_ops = self.price_ops(graph, recomputes);
        // A runtime has kernels of its own, and its ops are measured one by one. On other devices, the elementwise work of a
        // composite may join the kernels of its neighbours. Then kernels of its own are too much.
        let may_join = !graph.nodes.iter().any(|node| node.op.is_contraction());
        let [forward, backward] = match (self.cost.runtime(), self.fusion) {
            (Some(_), _) | (_, Fusion::Ops) => of_ops,
            (None, Fusion::Kernels(_)) => {
                let of_kernels = self.price_kernels(graph, recomputes);
                std::array::from_fn(|pass| match may_join && of_ops[pass].seconds < of_kernels[pass].seconds {
                    true => of_ops[pass],
                    false => of_kernels[pass],
                })
            }
        };
        (inside.forward_s, inside.issue_s) = (forward.seconds, forward.issue_s);
        (inside.backward_s, inside.backward_issue_s) = (backward.seconds, backward.issue_s);
        let axes = self.factor_axes(rule, strategy);
        let collective = |v: ValueId| match &graph.node(v).op {
            Op::Collective(op) => Some((v, &op.collective)),
            _ => None,
        };
        let collectives = || graph.values().filter_map(collective);
        let is_sent =
            |factor: &usize| collectives().any(|(_, c)| c.axes().iter().any(|axis| axes[*factor].contains(axis)));
        let over: Vec<usize> = (0..axes.len()).filter(is_sent).collect();
        let numbered: Vec<AxisId> = over.iter().flat_map(|&factor| axes[factor].iter().copied()).collect();
        let number =
            |axis: AxisId| AxisId(numbered.iter().position(|&a| a == axis).expect("an axis of a factor") as u8);
        let mut sent: Vec<Sent> = Vec::new();
        for (v, c) in collectives().filter(|(_, c)| c.communicates()) {
            let collective = c.renamed(number);
            let bytes = [graph.node(v).operands[0], v].map(|v| graph.ty(v).bytes());
            match sent.iter_mut().find(|s| s.collective == collective && s.bytes == bytes) {
                Some(same) => same.times += 1,
                None => sent.push(Sent { collective, bytes, times: 1 }),
            }
        }
        Parts {
            alone: inside,
            sent,
            over: over.into_iter().map(|factor| (factor, self.sizes(&axes[factor]))).collect(),
        }
    }

    /// The bytes that a local graph keeps and needs, and the seconds of its products that are larger than their factors.
    fn held(&self, graph: &Graph) -> CompositeCost {
        let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
        let mut inside = CompositeCost::default();
        let mut in_kernel = vec![false; graph.len()];
        let only_scaled = only_scaled(graph);
        for v in graph.values().filter(|v| varies[v.index()] && !graph.node(*v).op.is_leaf()) {
            let node = graph.node(v);
            inside.kept_bytes +=
                if is_kept(&node.op) && !only_scaled[v.index()] { node.ty.bytes() as f64 } else { 0.0 };
            if repeat::grows(graph, v) {
                inside.growing_s += self.cost.compute_s(&node.op, &graph.operand_types(v), &node.ty);
                inside.growing_bytes += node.ty.bytes() as f64;
            }
            in_kernel[v.index()] = repeat::grows(graph, v)
                || !node.op.is_contraction() && node.operands.iter().any(|o| in_kernel[o.index()]);
            inside.largest_bytes = inside.largest_bytes.max(node.ty.bytes() as f64);
        }
        // Values used only elementwise inside a kernel, such as a mask broadcast over heads, are made in that kernel.
        let users = graph.users();
        for v in graph.values().rev().filter(|v| !graph.node(*v).op.is_leaf()) {
            let in_it = |u: &ValueId| in_kernel[u.index()] && !graph.node(*u).op.is_contraction();
            let of = &users[v.index()];
            in_kernel[v.index()] |= !graph.node(v).op.is_contraction() && !of.is_empty() && of.iter().all(in_it);
        }
        let stored = graph.values().filter(|v| varies[v.index()] && !in_kernel[v.index()]);
        let stored = stored.filter(|v| !graph.node(*v).op.is_leaf());
        inside.largest_fused_bytes = stored.map(|v| graph.ty(v).bytes() as f64).fold(0.0, f64::max);
        inside
    }

    /// The forward and the backward pass of a local graph as the sums of its ops.
    fn price_ops(&self, graph: &Graph, recomputes: bool) -> [Price; 2] {
        let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
        let [mut forward, mut backward] = [Price::default(); 2];
        for v in graph.values().filter(|v| varies[v.index()] && !graph.node(*v).op.is_leaf()) {
            let node = graph.node(v);
            let seconds = self.cost.compute_s(&node.op, &graph.operand_types(v), &node.ty);
            let issue_s = self.cost.issue_s(&node.op, &graph.operand_types(v));
            let wanted = |o: &&ValueId| varies[o.index()] && graph.ty(**o).dtype.is_float();
            let wanted = if node.ty.dtype.is_float() { node.operands.iter().filter(wanted).count() } else { 0 };
            forward.seconds += seconds;
            forward.issue_s += issue_s;
            let times = (wanted + usize::from(recomputes)) as f64;
            backward.seconds += seconds * times;
            backward.issue_s += issue_s * times;
        }
        [forward, backward]
    }

    /// The forward and the backward pass of a local graph as the sums of their kernels. Where devices see different parts
    /// of a mask, they are those of the slower of the first and the last device.
    fn price_kernels(&self, graph: &Graph, recomputes: bool) -> [Price; 2] {
        let (first, differ) = of_device(graph, End::First);
        let of_first = self.price_passes(&first, recomputes);
        if !differ {
            return of_first;
        }
        let of_last = self.price_passes(&of_device(graph, End::Last).0, recomputes);
        std::array::from_fn(|pass| match of_first[pass].seconds < of_last[pass].seconds {
            true => of_last[pass],
            false => of_first[pass],
        })
    }

    /// The forward and the backward pass of one device's graph, without the time of its collectives.
    fn price_passes(&self, graph: &Graph, recomputes: bool) -> [Price; 2] {
        let part = &cut_at_collectives(graph);
        let depends = part.depends_on(|v| part.node(v).op.is_leaf());
        let computes = |v: ValueId| depends[v.index()] && !part.node(v).op.is_leaf();
        let layer_of: Vec<Option<u32>> = part.values().map(|v| computes(v).then_some(0)).collect();
        let repeats = Repeats {
            graph: part,
            layer_of: &layer_of,
            users: &part.users(),
            recompute: &|_| if recomputes { Recompute::Full } else { Recompute::None },
            fused_attention: self.fusion.attention().is_some(),
            always: &[],
            selective: Modules::NONE,
            modules: &[],
        };
        let again = repeats.of(part.values().filter(|&v| computes(v)));
        let reads = |v: ValueId| part.node(v).op.is_leaf() || computes(v) && !again.contains(&v);
        let Backward { graph: backward, read } = Backward::new(part, &varying_beyond(graph), reads);
        let kept = read.into_iter().chain(part.outputs.iter().copied()).filter(|&v| computes(v));
        let cotangents = backward.outputs.iter().copied();
        // In the forward pass, what a collective sends is computed in a kernel before those that use what arrives.
        [self.price_part(graph, &kept.collect()), self.price_part(&backward, &cotangents.collect())]
    }

    /// The sum of the kernels of a graph that writes some of its values to memory, without its collectives.
    fn price_part(&self, graph: &Graph, written: &BTreeSet<ValueId>) -> Price {
        let mut sum = Price::default();
        for mut kernel in kernels(graph, written, self.fusion.attention().is_some()) {
            match &mut kernel.kind {
                KernelKind::Collective => continue,
                KernelKind::Attention(attention) => attention.software = self.fusion.attention().unwrap_or_default(),
                _ => {}
            }
            let price = self.cost.kernel(&kernel);
            sum.seconds += price.seconds;
            sum.issue_s += price.issue_s;
        }
        sum
    }
}

/// More rounds of a composite are not priced one by one.
const MANY_ROUNDS: u64 = 8;

/// The number of equal rounds of a composite, one after the other.
fn num_rounds(op: &Op) -> Option<u64> {
    match op {
        Op::Composite(op) => match op.function {
            Function::LinearCrossEntropy { chunks, .. } => Some(chunks),
            _ => None,
        },
        _ => None,
    }
}

/// A composite with fewer rounds of the same size, on leaves; `None` if it has no rounds.
fn in_rounds(op: &Op, operands: &[&TensorType], rounds: u64) -> Option<Graph> {
    let Op::Composite(op) = op else { return None };
    let Function::LinearCrossEntropy { contract, chunks } = op.function else { return None };
    let mut types: Vec<TensorType> = operands.iter().map(|&ty| ty.clone()).collect();
    let last = types[2].shape.len().checked_sub(1)?;
    for i in [0, 2] {
        types[i].shape[last] = types[i].shape[last] / chunks * rounds;
    }
    let mut graph = Graph::new("rounds");
    let leaves: Vec<ValueId> = types.into_iter().map(|ty| leaf(&mut graph, String::new(), ty)).collect();
    graph.outputs = vec![graph.emit(Function::LinearCrossEntropy { contract, chunks: rounds }.into(), &leaves)];
    Some(graph)
}

/// The first or the last device of those that split a constant.
#[derive(Clone, Copy)]
enum End {
    First,
    Last,
}

/// The graph of the device at this end: its part of each constant that devices split. Returns true if the parts may differ.
fn of_device(graph: &Graph, end: End) -> (Graph, bool) {
    let (mut own, mut differ) = (graph.clone(), false);
    let depends = graph.depends_on(|v| graph.node(v).op.is_leaf());
    for v in graph.values().filter(|v| !depends[v.index()]) {
        let node = graph.node(v);
        if let Op::Collective(op) = &node.op
            && let Collective::LocalSlice { dim, .. } = op.collective
        {
            let (dim, shape) = (usize::from(dim), &node.ty.shape);
            differ |= !is_constant_along(graph, node.operands[0], dim);
            let mut start = vec![0; shape.len()];
            if let End::Last = end {
                start[dim] = graph.shape(node.operands[0])[dim] - shape[dim];
            }
            let limit = start.iter().zip(shape).map(|(start, size)| start + size).collect();
            own.nodes[v.index()].op = Op::Slice(Slice { start, limit, stride: vec![1; shape.len()] });
        }
    }
    (own, differ)
}

/// The collectives of values that a device computes or receives.
fn collectives(graph: &Graph) -> impl Iterator<Item = ValueId> + '_ {
    let depends = graph.depends_on(|v| graph.node(v).op.is_leaf());
    graph.values().filter(move |v| depends[v.index()] && matches!(graph.node(*v).op, Op::Collective(_)))
}

/// The graph with a leaf in place of each collective, and what it sends among the outputs. Values keep their numbers.
fn cut_at_collectives(graph: &Graph) -> Graph {
    let mut part = graph.clone();
    for v in collectives(graph) {
        let node = graph.node(v);
        let received = Input { name: format!("received {v}"), ty: node.ty.clone() };
        part.outputs.push(node.operands[0]);
        part.nodes[v.index()] = Node { op: Op::Input(received), operands: Vec::new(), ..node.clone() };
    }
    part
}

/// For each value, true if it has a derivative that can matter. A maximum of all devices does not where one device's would
/// not.
fn varying_beyond(graph: &Graph) -> Vec<bool> {
    let mut alone = graph.clone();
    for v in collectives(graph) {
        let node = graph.node(v);
        if graph.ty(node.operands[0]) == &node.ty {
            alone.nodes[v.index()].op = Op::Convert(Convert { dtype: node.ty.dtype });
        }
    }
    varying(&alone)
}

/// True if the elements of a constant are known to be equal along a dimension.
fn is_constant_along(graph: &Graph, v: ValueId, dim: usize) -> bool {
    let node = graph.node(v);
    match &node.op {
        Op::Constant(literal) => literal.as_splat().is_some(),
        Op::Iota(iota) => iota.dim != dim,
        Op::BroadcastInDim(op) => match op.dims.iter().position(|&d| d == dim) {
            Some(from) => graph.shape(node.operands[0])[from] == 1 || is_constant_along(graph, node.operands[0], from),
            None => true,
        },
        Op::Collective(op) if !op.collective.communicates() => is_constant_along(graph, node.operands[0], dim),
        op if op.is_elementwise() => node.operands.iter().all(|&o| is_constant_along(graph, o, dim)),
        _ => false,
    }
}

/// The backward pass of a part.
struct Backward {
    /// Its outputs are the cotangents of the part's leaves that have one, in their order.
    graph: Graph,
    /// The values of the part that it reads.
    read: Vec<ValueId>,
}

impl Backward {
    /// `reads` is true for values of the part that are in memory. Others are computed again.
    fn new(part: &Graph, varies: &[bool], reads: impl Fn(ValueId) -> bool) -> Backward {
        let training = pull_back(part, varies, true);
        let (all, num_forward) = (&training.graph, training.num_forward);
        let in_memory = |v: ValueId| if v.index() < num_forward { reads(v) } else { all.node(v).op.is_leaf() };
        let wanted = part.values().filter(|&v| part.node(v).op.is_leaf());
        let wanted: Vec<ValueId> = wanted.filter_map(|v| training.cotangents[v.index()]).collect();
        let mut needed = vec![false; all.len()];
        wanted.iter().for_each(|v| needed[v.index()] = true);
        for v in all.values().rev().filter(|&v| !in_memory(v)) {
            if needed[v.index()] {
                all.node(v).operands.iter().for_each(|o| needed[o.index()] = true);
            }
        }
        let (mut graph, mut read) = (Graph::new(part.name.clone()), Vec::new());
        let mut of: Vec<ValueId> = vec![ValueId(0); all.len()];
        for v in all.values().filter(|v| needed[v.index()]) {
            let node = all.node(v);
            of[v.index()] = match in_memory(v) {
                true => leaf(&mut graph, String::new(), node.ty.clone()),
                false => graph
                    .append(Node { operands: node.operands.iter().map(|o| of[o.index()]).collect(), ..node.clone() }),
            };
            if in_memory(v) && v.index() < num_forward {
                read.push(v);
            }
        }
        graph.outputs = wanted.iter().map(|v| of[v.index()]).collect();
        Backward { graph, read }
    }
}

/// Cost of a composite on one device. Bytes are per device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CompositeCost {
    pub forward_s: f64,
    /// Includes the cotangents of all operands.
    pub backward_s: f64,
    /// Host seconds to issue the kernels, forward and backward.
    pub issue_s: f64,
    pub backward_issue_s: f64,
    /// Bytes kept from forward to backward if nothing is recomputed.
    pub kept_bytes: f64,
    /// Share of the forward seconds and of the kept bytes due to products larger than their factors.
    pub growing_s: f64,
    pub growing_bytes: f64,
    pub largest_bytes: f64,
    /// The largest value if products larger than their factors stay in one kernel, together with what is computed from
    /// them up to the next product.
    pub largest_fused_bytes: f64,
}

impl CompositeCost {
    /// Bytes of the largest value in memory while the composite runs.
    pub fn largest(&self, fused_attention: bool) -> f64 {
        if fused_attention { self.largest_fused_bytes } else { self.largest_bytes }
    }
}

/// Values that are only multiplied by factors that depend on irrelevant maxima, such as the result of each round of a
/// ring. Their cotangents need the factor and not the value.
fn only_scaled(graph: &Graph) -> Vec<bool> {
    let irrelevant = irrelevant_maxima(graph);
    let mut varies = vec![false; graph.len()];
    for v in graph.values() {
        let node = graph.node(v);
        let source = node.op.is_leaf() || node.operands.iter().any(|o| varies[o.index()]);
        varies[v.index()] = source && node.ty.dtype.is_float() && !irrelevant[v.index()];
    }
    let depends = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let by_maxima = |o: ValueId| depends[o.index()] && !varies[o.index()];
    let mut scaled = vec![false; graph.len()];
    let users = graph.users();
    for v in graph.values().rev().filter(|v| !users[v.index()].is_empty() && varies[v.index()]) {
        scaled[v.index()] = users[v.index()].iter().all(|&u| {
            let node = graph.node(u);
            match &node.op {
                Op::Convert(_) | Op::Reshape(_) => scaled[u.index()],
                Op::Binary(Binary::Multiply) => node.operands.iter().any(|o| by_maxima(*o)),
                _ => false,
            }
        });
    }
    scaled
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_cost_models::{Roofline, preset};
    use altiplano_ir::dtype::DType;
    use altiplano_ir::expand::expand;
    use altiplano_ir::interpret::run;
    use altiplano_ir::literal::Real;
    use altiplano_ir::mesh::Mesh;
    use altiplano_ir::op::Function;
    use altiplano_ir::rule::AxisUse;
    use altiplano_ir::tensor::Tensor;

    /// One composite on leaves of these shapes.
    fn alone(function: Function, dtype: DType, shapes: &[&[u64]]) -> Graph {
        let mut graph = Graph::new("composite");
        let leaves: Vec<ValueId> =
            shapes.iter().map(|&shape| leaf(&mut graph, String::new(), TensorType::new(dtype, shape))).collect();
        graph.outputs = vec![graph.emit(function.into(), &leaves)];
        graph
    }

    fn attention(causal: bool) -> Function {
        Function::Attention { scale: Real(0.5), causal, blocks: 1 }
    }

    /// Attention of 4,096 positions, causal or open.
    fn attending(causal: bool) -> Graph {
        let shape: &[u64] = &[8, 4096, 16, 128];
        alone(attention(causal), DType::BF16, &[shape; 3])
    }

    /// The price of a graph's last node where the two devices split the factor of `dim` of the first operand.
    fn price(graph: &Graph, dim: Option<usize>, fused_attention: bool) -> CompositeCost {
        let rule = graph.rule(graph.outputs[0]);
        let split = dim.map_or(AxisUse::Replicated, |d| AxisUse::Factor { factor: rule.operands[0][d][0], outer: 1 });
        price_under(graph, split, fused_attention)
    }

    fn price_under(graph: &Graph, split: AxisUse, fused_attention: bool) -> CompositeCost {
        let cluster = preset("dgx-h100:1").expect("a known preset");
        let cost = Roofline::new(cluster.groups[0].device.clone());
        let execution = Execution { fused_attention, ..Execution::default() };
        let mesh = Mesh::new(&[("data", 2)]);
        let prices = Prices::new(&cost, &cluster.groups[0], (1, 2), &mesh).fused(Fusion::of(&execution));
        let v = graph.outputs[0];
        let rule = graph.rule(v);
        let strategy = Strategy(vec![split]);
        prices.inside(&graph.node(v).op, &graph.operand_types(v), &rule, &strategy, &rule.shardings(&strategy, &mesh))
    }

    #[test]
    fn the_backward_pass_of_a_part_gives_its_gradients() {
        let tests =
            [(attention(true), vec![[2, 4, 2, 3]; 3]), (Function::RmsNorm { eps: Real(1e-3) }, vec![[2, 4, 2, 3]])];
        for (function, shapes) in tests {
            let name = function.name();
            let mut shapes: Vec<&[u64]> = shapes.iter().map(|shape| shape.as_slice()).collect();
            shapes.extend((shapes.len() == 1).then_some(&[3][..]));
            let part = expand(&alone(function, DType::F32, &shapes)).graph;
            let leaves: Vec<ValueId> = part.values().filter(|v| part.node(*v).op.is_leaf()).collect();
            let value = |of: usize, i: usize| (1.3 * i as f64 + 0.7 * of as f64).sin();
            let tensor = |of: usize, ty: &TensorType| {
                Tensor::new(ty.clone(), (0..ty.elements() as usize).map(|i| value(of, i)).collect())
            };
            let result = part.ty(part.outputs[0]).clone();
            let weights = tensor(9, &result);
            let loss = |leaves: &[Tensor]| -> f64 {
                let mut next = leaves.iter().cloned();
                let out = run(&part, |_| next.next().expect("a leaf")).remove(0);
                out.data.iter().zip(&weights.data).map(|(x, w)| x * w).sum()
            };
            let at: Vec<Tensor> = leaves.iter().enumerate().map(|(i, &v)| tensor(i, part.ty(v))).collect();
            let backward = Backward::new(&part, &varying(&part), |v| part.node(v).op.is_leaf());
            let mut read =
                backward.read.iter().map(|v| at[leaves.iter().position(|l| l == v).expect("a leaf")].clone());
            // The cotangent is the last leaf.
            let gradients = run(&backward.graph, |_| read.next().unwrap_or_else(|| weights.clone()));
            assert_eq!(gradients.len(), leaves.len(), "{name}");
            for (k, gradient) in gradients.iter().enumerate() {
                for i in 0..gradient.data.len() {
                    let moved = |by: f64| {
                        let mut leaves = at.clone();
                        leaves[k].data[i] += by;
                        loss(&leaves)
                    };
                    let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    let error = (gradient.data[i] - expected).abs();
                    assert!(error < 1e-6 * expected.abs().max(1.0), "{name} {k} {i}: {} {expected}", gradient.data[i]);
                }
            }
        }
    }

    /// Scores of 4,096 x 4,096 never leave the chip, and half of them are hidden by a causal mask.
    #[test]
    fn fused_attention_costs_what_its_kernel_does() {
        let [fused, apart] = [true, false].map(|fused| price(&attending(true), None, fused));
        assert!(5.0 * fused.forward_s < apart.forward_s, "{fused:?} {apart:?}");
        assert!(3.0 * fused.backward_s < apart.backward_s, "{fused:?} {apart:?}");
        let open = price(&attending(false), None, true);
        let shares = [fused.forward_s / open.forward_s, fused.backward_s / open.backward_s];
        assert!(shares.iter().all(|share| (0.4..0.7).contains(share)), "{shares:?}");
    }

    /// The last device sees three quarters of the scores, and the others wait for it.
    #[test]
    fn devices_that_split_queries_take_as_long_as_the_last() {
        let (whole, split) = (price(&attending(true), None, true), price(&attending(true), Some(1), true));
        let shares = [split.forward_s / whole.forward_s, split.backward_s / whole.backward_s];
        assert!(shares.iter().all(|share| (0.65..0.85).contains(share)), "{shares:?}");
    }

    /// The mask does not change along the batch, so that each device has half of the work that the mask leaves.
    #[test]
    fn devices_that_split_the_batch_share_what_a_mask_leaves() {
        let whole = price(&attending(true), None, true);
        for dim in [0, 2] {
            let split = price(&attending(true), Some(dim), true);
            for (half, whole) in [(split.forward_s, whole.forward_s), (split.backward_s, whole.backward_s)] {
                assert!((0.45..0.55).contains(&(half / whole)), "dimension {dim}: {half} of {whole}");
            }
        }
    }

    /// Devices that split the keys need the largest score of all before they can sum, and compute theirs twice.
    #[test]
    fn a_kernel_does_not_wait_for_what_it_sends() {
        let shape: &[u64] = &[1, 32768, 3, 128];
        let open = alone(attention(false), DType::F32, &[shape; 3]);
        let rule = open.rule(open.outputs[0]);
        let of_keys = price_under(&open, AxisUse::Factor { factor: rule.operands[1][1][0], outer: 1 }, true);
        let of_queries = price(&open, Some(1), true);
        let share = of_keys.forward_s / of_queries.forward_s;
        assert!((1.5..2.1).contains(&share), "{of_keys:?} {of_queries:?}");
    }

    /// Prices of one mesh hold for others whose axes split and send alike, over their own links.
    #[test]
    fn known_costs_are_those_of_pricing_anew() {
        let cluster = preset("dgx-h100:2").expect("a known preset");
        let cost = Roofline::new(cluster.groups[0].device.clone());
        let shape: &[u64] = &[8, 1024, 8, 64];
        let functions: [(Function, Vec<&[u64]>); 3] = [
            (attention(true), vec![shape; 3]),
            (Function::RmsNorm { eps: Real(1e-6) }, vec![&[8, 1024, 512], &[512]]),
            (Function::LogSoftmax { dim: 2 }, vec![&[8, 1024, 512]]),
        ];
        let known = CompositeCosts::default();
        let mut sending = 0;
        for (function, shapes) in functions {
            let graph = alone(function, DType::BF16, &shapes);
            let v = graph.outputs[0];
            let (op, types, rule) = (&graph.node(v).op, graph.operand_types(v), graph.rule(v));
            for sizes in [[2, 8], [8, 2], [4, 4], [1, 16], [2, 2]] {
                let mesh = Mesh::new(&[("data", sizes[0]), ("tensor", sizes[1])]);
                let on_mesh = || {
                    let all = Prices::new(&cost, &cluster.groups[0], (2, mesh.num_devices() / 2), &mesh);
                    all.fused(Fusion::Kernels(None))
                };
                let (prices, knowing) = (on_mesh(), on_mesh().knowing(&known));
                for strategy in rule.strategies(&mesh, &[], false) {
                    let shardings = rule.shardings(&strategy, &mesh);
                    let anew = prices.inside(op, &types, &rule, &strategy, &shardings);
                    let alone = prices.inside_of(op, &types, &rule, &strategy, &shardings).alone;
                    sending += usize::from(anew.forward_s > alone.forward_s);
                    assert_eq!(
                        knowing.inside(op, &types, &rule, &strategy, &shardings),
                        anew,
                        "{op:?} {strategy:?} {sizes:?}"
                    );
                }
            }
        }
        assert!(sending > 10, "{sending}");
    }

    #[test]
    fn many_rounds_cost_what_pricing_all_of_them_gives() {
        let cluster = preset("dgx-h100:1").expect("a known preset");
        let cost = Roofline::new(cluster.groups[0].device.clone());
        let mut graph = Graph::new("loss");
        let types = [(DType::BF16, vec![4, 2048, 512]), (DType::BF16, vec![32000, 512]), (DType::I32, vec![4, 2048])];
        let leaves: Vec<ValueId> =
            types.into_iter().map(|(dtype, s)| leaf(&mut graph, String::new(), TensorType::new(dtype, s))).collect();
        let v = graph.emit(Function::LinearCrossEntropy { contract: 1, chunks: 16 }.into(), &leaves);
        let (op, types, rule) = (&graph.node(v).op, graph.operand_types(v), graph.rule(v));
        let mesh = Mesh::new(&[("data", 2), ("tensor", 4)]);
        let prices = Prices::new(&cost, &cluster.groups[0], (1, 8), &mesh).fused(Fusion::Kernels(None));
        let strategies = rule.strategies(&mesh, &[], false);
        assert!(strategies.len() > 8, "{strategies:?}");
        for strategy in strategies {
            let shardings = rule.shardings(&strategy, &mesh);
            let short = prices.of_few_rounds(op, &types, &rule, &strategy, &shardings).expect("equal rounds");
            let whole = prices.priced(op, &types, &rule, &strategy, &shardings);
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-3 * b;
            let (a, b) = (short.alone, whole.alone);
            assert!(near(a.forward_s, b.forward_s) && near(a.backward_s, b.backward_s), "{strategy:?} {a:?} {b:?}");
            assert!(near(a.issue_s, b.issue_s) && near(a.backward_issue_s, b.backward_issue_s), "{a:?} {b:?}");
            assert_eq!((a.largest_bytes, a.largest_fused_bytes), (b.largest_bytes, b.largest_fused_bytes));
            assert_eq!((a.kept_bytes, a.growing_bytes), (b.kept_bytes, b.growing_bytes));
            assert_eq!(short.over, whole.over);
            let axes = prices.factor_axes(&rule, &strategy);
            let [a, b] = [&short, &whole].map(|parts| prices.with_sent(parts, &axes));
            assert!(near(a.forward_s, b.forward_s) && near(a.issue_s, b.issue_s), "{strategy:?} {short:?} {whole:?}");
        }
    }

    #[test]
    fn work_beyond_a_collective_is_priced() {
        let scaled = |shape: &[u64]| alone(Function::RmsNorm { eps: Real(1e-6) }, DType::BF16, &[shape, &shape[1..]]);
        let graph = scaled(&[1 << 14, 8192]);
        let (whole, split) = (price(&graph, None, true), price(&graph, Some(1), true));
        assert!(split.forward_s > 0.5 * whole.forward_s && split.backward_s > 0.5 * whole.backward_s, "{split:?}");
    }
}
