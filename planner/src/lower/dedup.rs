//! Lanes of a pipeline that are equal except for the names of their values.
//!
//! Most stages of a deep model run the same layers under the same shardings on equally many devices. Their programs
//! differ only in names, so one prediction serves all of them. Two lanes are compared node by node, forward and
//! backward: wherever lowering looks, one must be the other under one renaming of values. Lanes that cannot be paired
//! are lowered separately.
//!
//! The prediction of deduplicated lanes equals that of all programs together, to the bit
//! (`planner/tests/plans/sketches.rs`).

use super::{Cut, TrainingGraphs};
use altiplano_ir::expand::Expanded;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Stage;
use altiplano_ir::sharding::Sharding;
use rustc_hash::FxHashMap;

/// An earlier lane that equals a lane.
pub struct SameLane {
    pub lane: usize,
    /// Maps each value that lowering looks at in the earlier lane to its counterpart.
    pub values: FxHashMap<ValueId, ValueId>,
}

/// For each lane, the first earlier lane that equals it, if there is one.
pub fn same_lanes(cut: &Cut<'_>) -> Vec<Option<SameLane>> {
    let stages = Stages::new(cut);
    let mut found: Vec<Option<SameLane>> = Vec::new();
    for lane in 0..cut.plan.num_lanes() {
        let mut distinct = (0..lane).filter(|&l| found[l].is_none());
        let same = distinct.find_map(|first| stages.paired(first, lane));
        found.push(same);
    }
    found
}

/// Lookups of stages, in the graph without composites.
struct Stages<'a> {
    cut: &'a Cut<'a>,
    /// The stages that hold each parameter.
    holders: FxHashMap<ValueId, Vec<u32>>,
    /// Values that each stage receives, and their layouts.
    receives: Vec<FxHashMap<ValueId, &'a Sharding>>,
}

impl<'a> Stages<'a> {
    fn new(cut: &'a Cut<'a>) -> Self {
        let Expanded { graph, values, .. } = &cut.training_graphs.expanded;
        let by_name: FxHashMap<&str, ValueId> = graph.parameters().map(|(p, name)| (name, p)).collect();
        let mut holders: FxHashMap<ValueId, Vec<u32>> = FxHashMap::default();
        for (s, stage) in (0..).zip(&cut.plan.stages) {
            for p in stage.parameters.keys().filter_map(|name| by_name.get(name.as_str())) {
                holders.entry(*p).or_default().push(s);
            }
        }
        let received = |stage: &'a Stage| stage.receives.iter().map(|(v, s)| (values[v.index()], s)).collect();
        Stages { cut, holders, receives: cut.plan.stages.iter().map(received).collect() }
    }

    fn paired(&self, first: usize, second: usize) -> Option<SameLane> {
        let plan = self.cut.plan;
        let stages: Vec<(usize, usize)> = plan.stages_of(first).zip(plan.stages_of(second)).collect();
        // A total may be made of other stages' values.
        let graph = &self.cut.training_graphs.expanded.graph;
        if stages.iter().flat_map(|&(a, _)| &self.cut.nodes[a]).any(|&v| graph.is_total(v)) {
            return None;
        }
        if plan.lanes()[first].mesh != plan.lanes()[second].mesh
            || stages.iter().any(|&(a, b)| plan.splits(a) != plan.splits(b))
            || !stages.iter().all(|&(a, b)| self.same_planned(a, b) && self.same_offloaded(a, b))
        {
            return None;
        }
        let mut pairing = Pairing { of: self, to: FxHashMap::default(), back: FxHashMap::default() };
        stages.iter().all(|&(a, b)| pairing.stages(a, b)).then_some(SameLane { lane: first, values: pairing.to })
    }

    /// Returns true if two stages have the same strategies on devices of one kind.
    fn same_planned(&self, a: usize, b: usize) -> bool {
        let plan = self.cut.plan;
        let (a, b) = (&plan.stages[a], &plan.stages[b]);
        let ways = |s: &Stage| (s.group, s.submesh, s.layers.len(), s.parameters.len(), s.receives.len());
        let op = |v: &ValueId| &plan.graph.node(*v).op;
        ways(a) == ways(b)
            && a.recompute == b.recompute
            && a.offload == b.offload
            && a.shardings.len() == b.shardings.len()
            && a.shardings.iter().zip(&b.shardings).all(|((v, s), (w, t))| s.strategy == t.strategy && op(v) == op(w))
    }

    /// Returns true if two stages offload the same activations. With one microbatch in flight, some stay on the device.
    fn same_offloaded(&self, a: usize, b: usize) -> bool {
        !self.cut.plan.stages[a].offload.activations || self.cut.apart(a) == self.cut.apart(b)
    }
}

/// A renaming of values under construction.
struct Pairing<'a> {
    of: &'a Stages<'a>,
    to: FxHashMap<ValueId, ValueId>,
    back: FxHashMap<ValueId, ValueId>,
}

impl<'a> Pairing<'a> {
    /// Pairs the values that lowering two stages looks at. Stages that they exchange values with must be as far from each
    /// other as these are.
    fn stages(&mut self, a: usize, b: usize) -> bool {
        let Cut { plan, training_graphs, nodes, .. } = self.of.cut;
        let TrainingGraphs { training, owned, .. } = training_graphs;
        let forward = || nodes[a].iter().copied().zip(nodes[b].iter().copied());
        if nodes[a].len() != nodes[b].len() {
            return false;
        }
        let same_forward = forward().all(|(x, y)| {
            (x == training.loss) == (y == training.loss)
                && self.same_leave(x, y)
                && self.bind(x, y)
                && self.same_nodes(x, y, (a, b))
        });
        let same_backward = same_forward
            && forward().rev().all(|(x, y)| {
                let cotangents = match (training.cotangents[x.index()], training.cotangents[y.index()]) {
                    (Some(c), Some(d)) => self.bind(c, d),
                    (c, d) => c.is_none() && d.is_none(),
                };
                let (own, others) = (&owned[x.index()], &owned[y.index()]);
                let mut pairs = own.iter().copied().zip(others.iter().copied());
                cotangents
                    && own.len() == others.len()
                    && pairs.all(|(n, m)| self.bind(n, m) && self.same_nodes(n, m, (a, b)))
            });
        if !same_backward || !forward().all(|(x, y)| self.same_contributions(x, y, (a, b))) {
            return false;
        }
        // The stage uses all that it receives and holds, so these values are paired. Their cotangents must match as
        // well.
        let held = |v: &ValueId| match &training.graph.node(*v).op {
            Op::Parameter(p) => plan.stages[a].parameters.contains_key(&p.name),
            _ => false,
        };
        let held: Vec<ValueId> = self.to.keys().copied().filter(held).collect();
        held.len() == plan.stages[a].parameters.len()
            && self.of.receives[a].keys().chain(&held).all(|v| {
                let other = self.to.get(v).copied();
                other.is_some_and(|other| self.same_contributions(*v, other, (a, b)))
            })
    }

    /// Pairs two values. Returns false if either has another partner.
    fn bind(&mut self, x: ValueId, y: ValueId) -> bool {
        match (self.to.get(&x), self.back.get(&y)) {
            (None, None) => {
                self.to.insert(x, y);
                self.back.insert(y, x);
                true
            }
            (Some(partner), Some(_)) => *partner == y,
            _ => false,
        }
    }

    /// Returns true if two nodes run the same op on paired operands.
    fn same_nodes(&mut self, x: ValueId, y: ValueId, stages: (usize, usize)) -> bool {
        let Cut { plan, training_graphs, .. } = self.of.cut;
        let (TrainingGraphs { training, .. }, constant) = (training_graphs, training_graphs.constant(plan));
        let (p, q) = (training.graph.node(x), training.graph.node(y));
        p.op == q.op
            && p.ty == q.ty
            && constant[x.index()] == constant[y.index()]
            && p.operands.len() == q.operands.len()
            && p.operands.iter().zip(&q.operands).all(|(&v, &w)| self.same_operands(v, w, stages))
    }

    fn same_operands(&mut self, v: ValueId, w: ValueId, stages: (usize, usize)) -> bool {
        let (a, b) = stages;
        let known = self.to.contains_key(&v);
        if !self.bind(v, w) {
            return false;
        }
        let Cut { plan, training_graphs, .. } = self.of.cut;
        let (TrainingGraphs { training, .. }, constant) = (training_graphs, training_graphs.constant(plan));
        let (p, q) = (training.graph.node(v), training.graph.node(w));
        let received = (self.of.receives[a].get(&v), self.of.receives[b].get(&w));
        match (&p.op, &q.op) {
            _ if p.ty != q.ty || received.0 != received.1 => false,
            (Op::Parameter(p), Op::Parameter(q)) => {
                let holders = |v: ValueId| self.of.holders.get(&v).into_iter().flatten().copied();
                (p.frozen, p.no_decay) == (q.frozen, q.no_decay)
                    && plan.stages[a].parameters.get(&p.name) == plan.stages[b].parameters.get(&q.name)
                    && holders(v).map(|s| moved(s, stages)).eq(holders(w))
            }
            // Inputs of equal types differ in their names alone.
            (Op::Input(_), Op::Input(_)) => p.batch_dims == q.batch_dims,
            (Op::Input(_), _) | (_, Op::Input(_)) => false,
            _ if known => true,
            _ if constant[v.index()] => self.same_nodes(v, w, stages),
            // Values made in this stage are paired before they are used.
            _ => received.0.is_some(),
        }
    }

    /// Returns true if both values leave their layers, and their stages, or neither does.
    fn same_leave(&self, x: ValueId, y: ValueId) -> bool {
        let Cut { training_graphs, stage_of, layer_of, .. } = self.of.cut;
        let leaves = |v: ValueId, of: &[Option<u32>]| {
            training_graphs.users[v.index()].iter().any(|u| of[u.index()] != of[v.index()])
        };
        let is_output = |v: ValueId| training_graphs.expanded.graph.outputs.contains(&v);
        leaves(x, stage_of) == leaves(y, stage_of)
            && leaves(x, layer_of) == leaves(y, layer_of)
            && is_output(x) == is_output(y)
    }

    /// Returns true if the cotangents of two values sum the same contributions, local and remote.
    fn same_contributions(&mut self, x: ValueId, y: ValueId, stages: (usize, usize)) -> bool {
        let a = stages.0;
        let Cut { training_graphs, stage_of, .. } = self.of.cut;
        let all = &training_graphs.training.contributions;
        let (mine, others) = (&all[x.index()], &all[y.index()]);
        mine.len() == others.len()
            && mine.iter().zip(others).all(|(&(user, value), &(other_user, other_value))| {
                let (from, other_from) = (stage_of[user.index()], stage_of[other_user.index()]);
                let here = from == Some(a as u32);
                from.map(|s| moved(s, stages)) == other_from
                    && (!here
                        || self.to.get(&user) == Some(&other_user) && self.same_operands(value, other_value, stages))
            })
    }
}

/// A stage that lies from `stage` as far as the second of two stages from the first.
fn moved(stage: u32, (from, to): (usize, usize)) -> u32 {
    stage.wrapping_add_signed(to as i32 - from as i32)
}
