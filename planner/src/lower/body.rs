//! Builds one local graph: ops emitted under strategies, operands resharded on demand.
//!
//! Every value of the training graph may exist here in several layouts. `want` returns a value in a layout: an existing
//! one, a constant made in place, or the cheapest reshard of an existing one. Each step of a reshard is kept, so that
//! one all-gather serves all users.

use super::StageContext;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Local, Microbatches, Op, Operator, lookups_stop_at, may_be_row, takes_few};
use altiplano_ir::program::BufferId;
use altiplano_ir::rule::{OpShardings, ShardingRule, Strategy};
use altiplano_ir::sharding::Sharding;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// A local graph under construction.
pub struct BodyBuilder<'a> {
    pub stage: &'a StageContext<'a>,
    pub graph: Graph,
    /// For each value of the training graph, its layouts in this graph, oldest first.
    have: FxHashMap<ValueId, Vec<(Sharding, ValueId)>>,
    pub reads: Vec<(ValueId, BufferId)>,
    leaves: FxHashMap<BufferId, ValueId>,
    /// Each value that came to exist in another layout, and the position of that among its layouts.
    defined: Vec<(ValueId, u32)>,
    /// Local values that have the name of a value of the training graph.
    named: Vec<(ValueId, ValueId)>,
}

/// A point in the making of a local graph.
#[derive(Clone, Copy)]
pub struct Point {
    nodes: usize,
    reads: usize,
    defined: usize,
    named: usize,
}

/// Names of one part of a local graph, in terms of another part.
pub struct Renaming<'r> {
    /// Values of the training graph.
    pub values: &'r FxHashMap<ValueId, ValueId>,
    /// Local values from before the part.
    pub locals: FxHashMap<ValueId, ValueId>,
    pub buffers: FxHashMap<BufferId, BufferId>,
}

impl<'a> BodyBuilder<'a> {
    /// `num_nodes`: number of nodes of the training graph that will be emitted.
    pub fn new(stage: &'a StageContext<'a>, name: String, num_nodes: usize) -> Self {
        let mut graph = Graph::new(name);
        graph.nodes.reserve(num_nodes + num_nodes / 2);
        BodyBuilder {
            stage,
            graph,
            have: FxHashMap::default(),
            reads: Vec::new(),
            leaves: FxHashMap::default(),
            defined: Vec::new(),
            named: Vec::new(),
        }
    }

    /// The end of what is made so far.
    pub fn point(&self) -> Point {
        Point { nodes: self.graph.len(), reads: self.reads.len(), defined: self.defined.len(), named: self.named.len() }
    }

    /// The buffers first read in a part.
    pub fn read_in(&self, part: &Range<Point>) -> impl Iterator<Item = BufferId> + '_ {
        self.reads[part.start.reads..part.end.reads].iter().map(|read| read.1)
    }

    /// Returns true if the names that a part takes from outside are renamed.
    pub fn is_closed(&self, part: &Range<Point>, names: &Renaming<'_>) -> bool {
        let is_renamed = |v: &ValueId| v.index() >= part.start.nodes || names.locals.contains_key(v);
        let (start, end) = (&part.start, &part.end);
        self.graph.nodes[start.nodes..end.nodes].iter().all(|node| node.operands.iter().all(is_renamed))
            && self.read_in(part).all(|buffer| names.buffers.contains_key(&buffer))
            && self.named[start.named..end.named]
                .iter()
                .all(|(local, value)| local.index() >= start.nodes && names.values.contains_key(value))
            && self.defined[start.defined..end.defined]
                .iter()
                .all(|(value, at)| names.values.contains_key(value) && is_renamed(&self.have[value][*at as usize].1))
    }

    /// Returns true if the lookups of a part would be the same under other names. They move behind elementwise ops that
    /// compute their table, wherever these were lowered.
    pub fn looks_up_alike(&self, part: &Range<Point>, names: &Renaming<'_>) -> bool {
        let (graph, start) = (&self.graph, part.start.nodes);
        let table = |node: &Node| match &node.op {
            Op::Gather(op) if takes_few(op, graph.ty(node.operands[0]), &node.ty) => Some(node.operands[0]),
            _ => None,
        };
        let mut met: Vec<ValueId> = graph.nodes[start..part.end.nodes].iter().filter_map(table).collect();
        let is_same = |(&a, &b): (&ValueId, &ValueId)| {
            !(may_be_row(graph, a) || may_be_row(graph, b)) || graph.node(a).op == graph.node(b).op
        };
        if !met.is_empty() && !names.locals.iter().all(is_same) {
            return false;
        }
        let stops = |v: ValueId| {
            names.locals.get(&v).is_some_and(|&other| [v, other].iter().all(|&v| lookups_stop_at(graph, v)))
        };
        let mut seen: FxHashSet<ValueId> = met.iter().copied().collect();
        while let Some(v) = met.pop() {
            let node = graph.node(v);
            if v.index() < start {
                if !stops(v) {
                    return false;
                }
            } else if node.op.is_elementwise() {
                met.extend(node.operands.iter().filter(|o| seen.insert(**o)));
            }
        }
        true
    }

    /// Appends a closed part again under other names. Returns the local value that a local value of the part becomes.
    pub fn repeat<'r>(
        &mut self,
        part: &Range<Point>,
        names: &'r Renaming<'r>,
    ) -> impl Fn(ValueId) -> ValueId + use<'r> {
        let (start, end) = (part.start, part.end);
        let further = (self.graph.len() - start.nodes) as u32;
        let local = move |v: ValueId| if v.index() < start.nodes { names.locals[&v] } else { ValueId(v.0 + further) };
        let mut reads = start.reads..end.reads;
        let mut next_read = reads.next();
        for at in start.nodes..end.nodes {
            let node = &self.graph.nodes[at];
            if let Some(read) = next_read
                && self.reads[read].0.index() == at
            {
                let (buffer, ty) = (names.buffers[&self.reads[read].1], node.ty.clone());
                let leaf = altiplano_ir::optimizer::leaf(&mut self.graph, buffer.to_string(), ty);
                self.reads.push((leaf, buffer));
                self.leaves.insert(buffer, leaf);
                next_read = reads.next();
                continue;
            }
            let operands = node.operands.iter().map(|o| local(*o)).collect();
            let Node { op, ty, batch_dims, name, .. } = node;
            let node = Node { op: op.clone(), operands, ty: ty.clone(), batch_dims: *batch_dims, name: name.clone() };
            self.graph.append(node);
        }
        for at in start.named..end.named {
            let (of, value) = self.named[at];
            let (of, value) = (local(of), names.values[&value]);
            self.graph.nodes[of.index()].name.clone_from(&self.stage.training.graph.node(value).name);
            self.named.push((of, value));
        }
        for at in start.defined..end.defined {
            let (value, position) = self.defined[at];
            let (sharding, of) = self.have[&value][position as usize].clone();
            self.define(names.values[&value], sharding, local(of));
        }
        local
    }

    /// Records that `value` exists as `local` in this layout.
    pub fn define(&mut self, value: ValueId, sharding: Sharding, local: ValueId) {
        let entries = self.have.entry(value).or_default();
        if !entries.iter().any(|(s, _)| *s == sharding) {
            self.defined.push((value, entries.len() as u32));
            entries.push((sharding, local));
        }
    }

    /// The layouts that `value` exists in.
    pub fn layouts(&self, value: ValueId) -> &[(Sharding, ValueId)] {
        self.have.get(&value).map_or(&[], |e| e.as_slice())
    }

    /// Emits a leaf for the local part of a buffer.
    pub fn read(&mut self, buffer: BufferId, sharding: &Sharding, ty: &altiplano_ir::types::TensorType) -> ValueId {
        if let Some(&v) = self.leaves.get(&buffer) {
            return v;
        }
        let local = sharding.local_type(ty, &self.stage.mesh);
        let leaf = altiplano_ir::optimizer::leaf(&mut self.graph, buffer.to_string(), local);
        self.reads.push((leaf, buffer));
        self.leaves.insert(buffer, leaf);
        leaf
    }

    /// Reshards a local value.
    pub fn reshard(&mut self, local: ValueId, from: &Sharding, to: &Sharding) -> ValueId {
        let mut value = local;
        for step in self.stage.reshard_steps(from, to).iter() {
            value = self.graph.emit(Op::collective(step.collective.clone(), &self.stage.mesh), &[value]);
        }
        value
    }

    /// Returns `value` in layout `to`. It must exist here in some layout, or depend on no leaf.
    pub fn want(&mut self, value: ValueId, to: &Sharding) -> ValueId {
        if let Some((_, local)) = self.layouts(value).iter().find(|(s, _)| s == to) {
            return *local;
        }
        if self.stage.is_constant(value) {
            return self.constant(value, to);
        }
        let ty = self.stage.training.graph.ty(value);
        let priced = self.layouts(value).iter().map(|known| (self.stage.reshard_s(ty, &known.0, to), known));
        let best = priced.min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((_, (from, mut local))) = best.map(|(seconds, known)| (seconds, known.clone())) else {
            unreachable!("{value} is used before it is fetched");
        };
        for step in self.stage.reshard_steps(&from, to).iter() {
            local = self.graph.emit(Op::collective(step.collective.clone(), &self.stage.mesh), &[local]);
            self.define(value, step.result.clone(), local);
        }
        local
    }

    /// Makes a value that depends on no leaf in layout `to`, without communication.
    fn constant(&mut self, value: ValueId, to: &Sharding) -> ValueId {
        let local = if to.is_partial() {
            let whole = self.want(value, &to.reduced());
            self.reshard(whole, &to.reduced(), to)
        } else {
            let rule = self.stage.rule(value);
            match self.strategy_for(rule, to) {
                Some(strategy) => {
                    let shardings = rule.shardings(&strategy, &self.stage.mesh);
                    self.apply(value, rule, &strategy, &shardings)
                }
                None => {
                    let replicated = Sharding::replicated(self.stage.training.graph.shape(value));
                    let whole = self.want(value, &replicated);
                    self.reshard(whole, &replicated, to)
                }
            }
        };
        self.define(value, to.clone(), local);
        local
    }

    /// A strategy whose result has layout `to`.
    fn strategy_for(&self, rule: &ShardingRule, to: &Sharding) -> Option<Strategy> {
        let mesh = &self.stage.mesh;
        let outers: Vec<Vec<u64>> = rule
            .factors
            .iter()
            .map(|f| {
                let outer = |s: &altiplano_ir::sharding::DimLayout| s.segments()[0].size;
                to.dims.iter().filter(|d| d.segments().len() > 1).map(outer).filter(|o| f.size % o == 0).collect()
            })
            .collect();
        rule.strategies(mesh, &outers, false).into_iter().find(|s| rule.shardings(s, mesh).result == *to)
    }

    /// Emits a node of the training graph under `strategy` and records its result. `shardings` follow from the strategy
    /// by the node's rule.
    pub fn emit(&mut self, value: ValueId, rule: &ShardingRule, strategy: &Strategy, shardings: &OpShardings) {
        let local = self.apply(value, rule, strategy, shardings);
        self.define(value, shardings.result.clone(), local);
    }

    /// Like [`BodyBuilder::emit`], with another op and operands of the same types that make the same value.
    pub fn emit_as(
        &mut self,
        value: ValueId,
        op: &Op,
        operands: &[ValueId],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) {
        let local = self.applied(value, op, operands, rule, strategy, shardings);
        self.define(value, shardings.result.clone(), local);
    }

    fn apply(&mut self, value: ValueId, rule: &ShardingRule, strategy: &Strategy, shardings: &OpShardings) -> ValueId {
        let node = self.stage.training.graph.node(value);
        self.applied(value, &node.op, &node.operands, rule, strategy, shardings)
    }

    fn applied(
        &mut self,
        value: ValueId,
        op: &Op,
        operands: &[ValueId],
        rule: &ShardingRule,
        strategy: &Strategy,
        shardings: &OpShardings,
    ) -> ValueId {
        let stage = self.stage;
        let node = stage.training.graph.node(value);
        let operands: Vec<ValueId> = operands.iter().zip(&shardings.operands).map(|(&o, s)| self.want(o, s)).collect();
        let mut cx = Local {
            graph: &mut self.graph,
            mesh: &stage.mesh,
            operands: operands.clone(),
            operand_types: stage.training.graph.operand_types(value).into_iter().cloned().collect(),
            result_shape: shardings.result.local_shape(&stage.mesh),
            factor_axes: strategy.factor_axes(rule.factors.len()),
            fused_loss: stage.plan.execution.fused_loss,
        };
        let mut local = op.local(&mut cx);
        if let Op::Microbatches(Microbatches::Times) = op
            && stage.plan.num_microbatches > 1
        {
            // Only lowering knows the number of microbatches.
            let count = self.graph.splat_like(local, f64::from(stage.plan.num_microbatches));
            local = self.graph.mul(local, count);
        }
        if !operands.contains(&local) {
            self.graph.nodes[local.index()].name.clone_from(&node.name);
            self.named.push((local, value));
        }
        local
    }

    /// Finishes the graph, keeping only what the writes need. Returns the graph, its reads and its writes.
    pub fn finish(
        self,
        writes: Vec<(BufferId, ValueId)>,
    ) -> (Graph, Vec<(ValueId, BufferId)>, Vec<(BufferId, ValueId)>) {
        let mut graph = self.graph;
        graph.outputs = writes.iter().map(|&(_, v)| v).collect();
        let mut live = vec![false; graph.len()];
        graph.outputs.iter().for_each(|o| live[o.index()] = true);
        for v in graph.values().rev() {
            if live[v.index()] {
                graph.node(v).operands.iter().for_each(|o| live[o.index()] = true);
            }
        }
        let mut map = vec![ValueId(u32::MAX); graph.len()];
        let (mut at, mut kept) = (0, 0);
        graph.nodes.retain_mut(|node| {
            let lives = live[at];
            if lives {
                node.operands.iter_mut().for_each(|o| *o = map[o.index()]);
                map[at] = ValueId(kept);
                kept += 1;
            }
            at += 1;
            lives
        });
        graph.outputs.iter_mut().for_each(|o| *o = map[o.index()]);
        let reads = self.reads.into_iter().filter(|(v, _)| live[v.index()]).map(|(v, b)| (map[v.index()], b)).collect();
        let writes = writes.into_iter().map(|(b, v)| (b, map[v.index()])).collect();
        (graph, reads, writes)
    }
}
