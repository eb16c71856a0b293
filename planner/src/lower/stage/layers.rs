//! Equal layers of a stage, of which one is lowered and the others repeat it under other names.
//!
//! Two layers are compared node by node, forward and backward: wherever lowering looks, one must be the other under one
//! renaming of values. When a walk over the stage comes to the second layer, each value that it looks at must also be
//! known in the same layouts as its counterpart was at the first. Then lowering would do the same again, and what it
//! did is copied. A layer that has no such counterpart is lowered node by node.

use super::super::body::{BodyBuilder, Point, Renaming};
use super::passes::Accumulation;
use super::{StageContext, StageLowering, is_of_parameter};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::program::BufferId;
use altiplano_ir::sharding::Sharding;
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::ops::Range;

/// The layers of a stage in the order of a walk.
pub struct Layers<'a> {
    pub nodes: Vec<&'a [ValueId]>,
    /// For each layer, one that the walk meets earlier and that equals it.
    like: Vec<Option<(usize, Pairs)>>,
}

/// Values that lowering looks at in one layer, and their counterparts in another.
#[derive(Default)]
struct Pairs {
    /// In the order in which they are met.
    all: Vec<(ValueId, ValueId)>,
    to: FxHashMap<ValueId, ValueId>,
    /// The reverse of `to`, while pairs are added.
    back: FxHashMap<ValueId, ValueId>,
}

impl Pairs {
    /// Pairs two values. Returns `None` if either has another partner, otherwise true if they are new.
    fn bind(&mut self, x: ValueId, y: ValueId) -> Option<bool> {
        match (self.to.get(&x), self.back.get(&y)) {
            (None, None) => {
                self.all.push((x, y));
                self.to.insert(x, y);
                self.back.insert(y, x);
                Some(true)
            }
            (Some(partner), Some(_)) if *partner == y => Some(false),
            _ => None,
        }
    }

    /// The pairs the other way round, to which none is added.
    fn reversed(self) -> Pairs {
        let all = self.all.into_iter().map(|(x, y)| (y, x)).collect();
        Pairs { all, to: self.back, back: FxHashMap::default() }
    }
}

impl<'a> Layers<'a> {
    /// The layers of a stage in order, with those that the forward pass lowers alike.
    pub fn new(cx: &'a StageContext<'_>) -> Layers<'a> {
        let layer = |v: &ValueId| cx.layer_of[v.index()];
        let nodes: Vec<&[ValueId]> = cx.nodes.chunk_by(|a, b| layer(a) == layer(b)).collect();
        let mut latest: FxHashMap<u64, usize> = FxHashMap::default();
        let mut like = Vec::with_capacity(nodes.len());
        for (i, layer) in nodes.iter().enumerate() {
            let first = latest.insert(signature(cx, layer), i).filter(|_| cx.repeats);
            like.push(first.and_then(|first| Some((first, forward_pairs(cx, nodes[first], layer)?))));
        }
        Layers { nodes, like }
    }

    /// The layers in reverse, with those that the backward pass lowers alike.
    pub fn reversed(self, lowering: &StageLowering<'a>, sums: &Accumulation, seen: &Seen<'_>) -> Layers<'a> {
        let Layers { mut nodes, like } = self;
        let mut reversed: Vec<Option<(usize, Pairs)>> = (0..nodes.len()).map(|_| None).collect();
        let last = nodes.len().saturating_sub(1);
        for (i, like) in like.into_iter().enumerate() {
            // The variance of gradients adds up over layers.
            let Some((first, mut pairs)) = like.filter(|_| sums.variance.is_none()) else { continue };
            if lowering.backward_pairs(seen, &mut pairs, nodes[first], nodes[i]).is_some() {
                reversed[last - first] = Some((last - i, pairs.reversed()));
            }
        }
        nodes.reverse();
        Layers { nodes, like: reversed }
    }
}

/// A hash that layers have in common if they are equal.
fn signature(cx: &StageContext<'_>, layer: &[ValueId]) -> u64 {
    let mut hasher = FxHasher::default();
    for v in layer {
        cx.alike.kind(*v).hash(&mut hasher);
        cx.strategy(*v).hash(&mut hasher);
    }
    hasher.finish()
}

/// Pairs the values that the forward pass looks at in two layers, unless it lowers them differently.
fn forward_pairs(cx: &StageContext<'_>, first: &[ValueId], second: &[ValueId]) -> Option<Pairs> {
    let mut pairs = Pairs::default();
    if first.len() != second.len() {
        return None;
    }
    for (&v, &w) in first.iter().zip(second) {
        if cx.strategy(v) != cx.strategy(w) || v == cx.training.loss || w == cx.training.loss {
            return None;
        }
        same_nodes(cx, &mut pairs, v, w)?;
    }
    Some(pairs)
}

/// Pairs two nodes that run the same op, with their operands.
fn same_nodes(cx: &StageContext<'_>, pairs: &mut Pairs, v: ValueId, w: ValueId) -> Option<()> {
    let (p, q) = (cx.training.graph.node(v), cx.training.graph.node(w));
    if cx.alike.kind(v) != cx.alike.kind(w) || cx.is_constant(v) != cx.is_constant(w) {
        return None;
    }
    for (&o, &r) in p.operands.iter().zip(&q.operands) {
        same_values(cx, pairs, o, r)?;
    }
    pairs.bind(v, w).map(|_| ())
}

/// Pairs two values, made within the layers or outside of them.
fn same_values(cx: &StageContext<'_>, pairs: &mut Pairs, v: ValueId, w: ValueId) -> Option<()> {
    if !pairs.bind(v, w)? {
        return Some(());
    }
    let graph = &cx.training.graph;
    let received = |v: &ValueId| cx.stage.receives.get(v);
    let same = match (&graph.node(v).op, &graph.node(w).op) {
        _ if graph.ty(v) != graph.ty(w) || received(&v) != received(&w) || cx.is_constant(v) != cx.is_constant(w) => {
            false
        }
        // Inputs of equal types differ in their names alone.
        (Op::Input(_), Op::Input(_)) => graph.node(v).batch_dims == graph.node(w).batch_dims,
        (Op::Input(_), _) | (_, Op::Input(_)) => false,
        (Op::Parameter(_), Op::Parameter(_)) => true,
        (Op::Parameter(_), _) | (_, Op::Parameter(_)) => false,
        _ if cx.is_constant(v) => return same_nodes(cx, pairs, v, w),
        _ => true,
    };
    same.then_some(())
}

/// Tables that the backward pass of a stage reads beside its nodes.
pub struct Seen<'s> {
    /// See [`super::parts_of`].
    pub parts: &'s FxHashMap<ValueId, ValueId>,
    /// The parameters that each node is the first to use.
    pub first_used: &'s FxHashMap<ValueId, Vec<ValueId>>,
}

/// The traces of a walk through one layer.
struct Section {
    part: Range<Point>,
    /// For each pair with the layer that repeats it: the numbers of layouts and of saved layouts at the start.
    known: Vec<[usize; 2]>,
    buffers: Range<usize>,
    made: Range<usize>,
    writes: Range<usize>,
}

impl<'a> StageLowering<'a> {
    /// Lowers the layers in order, equal ones once. `forward` is the forward body if the walk is the backward pass.
    pub(super) fn walk(
        &mut self,
        b: &mut BodyBuilder<'a>,
        layers: &Layers<'a>,
        forward: Option<&BodyBuilder<'a>>,
        sums: &mut Accumulation,
        lower: &mut dyn FnMut(&mut Self, &mut BodyBuilder<'a>, &mut Accumulation, &[ValueId]),
    ) {
        let mut repeated_by: Vec<Option<&Pairs>> = vec![None; layers.nodes.len()];
        for (first, pairs) in layers.like.iter().flatten() {
            repeated_by[*first] = Some(pairs);
        }
        let mut sections: FxHashMap<usize, Section> = FxHashMap::default();
        for (i, nodes) in layers.nodes.iter().enumerate() {
            let end = |lowering: &Self, b: &BodyBuilder<'a>, sums: &Accumulation| {
                (b.point(), lowering.buffers.len(), lowering.made_in_order.len(), sums.writes.len())
            };
            let start = repeated_by[i].map(|pairs| (self.known(b, pairs), end(self, b, sums)));
            let same = layers.like[i].as_ref().and_then(|(first, pairs)| Some((sections.remove(first)?, pairs)));
            match same.is_some_and(|(section, pairs)| self.repeat(b, forward, &section, pairs, sums)) {
                true => self.repeated[usize::from(forward.is_some())] += 1,
                false => lower(self, b, sums, nodes),
            }
            if let Some((known, start)) = start {
                let end = end(self, b, sums);
                let (part, buffers) = (start.0..end.0, start.1..end.1);
                let (made, writes) = (start.2..end.2, start.3..end.3);
                sections.insert(i, Section { part, known, buffers, made, writes });
            }
        }
    }

    fn known(&self, b: &BodyBuilder<'a>, pairs: &Pairs) -> Vec<[usize; 2]> {
        pairs.all.iter().map(|(v, _)| [b.layouts(*v).len(), self.saved_of(*v).len()]).collect()
    }

    fn saved_of(&self, v: ValueId) -> &[(Sharding, BufferId)] {
        self.saved.get(&v).map_or(&[], |saved| saved.as_slice())
    }

    /// Does what was done in a section for the layer that it is paired with. Returns false, and does nothing, if the
    /// layer starts from other layouts.
    fn repeat(
        &mut self,
        b: &mut BodyBuilder<'a>,
        forward: Option<&BodyBuilder<'a>>,
        section: &Section,
        pairs: &Pairs,
        sums: &mut Accumulation,
    ) -> bool {
        // Every new buffer must be that of a saved value, or of an input that is new here as well.
        let Section { part, buffers, made, writes, .. } = section;
        let Some(mut names) = self.renaming(b, forward, section, pairs, sums) else { return false };
        let made: Vec<(ValueId, Sharding, BufferId)> = self.made_in_order[made.clone()].to_vec();
        let is_new = |(v, sharding, _): &(ValueId, Sharding, BufferId)| {
            pairs.to.get(v).is_some_and(|w| !self.inputs.contains_key(&(*w, sharding.clone())))
        };
        if made.len() != buffers.len() || !made.iter().all(is_new) {
            return false;
        }
        let new = (self.buffers.len() as u32..).map(BufferId);
        names.buffers.extend(made.iter().map(|(_, _, buffer)| *buffer).zip(new));
        let writes = sums.writes[writes.clone()].to_vec();
        if !b.is_closed(part, &names)
            || !b.looks_up_alike(part, &names)
            || !writes.iter().all(|(buffer, _)| names.buffers.contains_key(buffer))
        {
            return false;
        }
        for (v, sharding, _) in made {
            match self.cx.graph.node(v).op {
                Op::Input(_) => self.input(pairs.to[&v], sharding),
                _ => self.save(pairs.to[&v], sharding),
            };
        }
        let local = b.repeat(part, &names);
        sums.writes.extend(writes.into_iter().map(|(buffer, v)| (names.buffers[&buffer], local(v))));
        true
    }

    /// The names in a layer of all that a section takes from outside, if it was known in the same layouts there.
    fn renaming<'p>(
        &self,
        b: &BodyBuilder<'a>,
        forward: Option<&BodyBuilder<'a>>,
        section: &Section,
        pairs: &'p Pairs,
        sums: &Accumulation,
    ) -> Option<Renaming<'p>> {
        let (mut locals, mut buffers) = (FxHashMap::default(), FxHashMap::default());
        let alike = |mine: &[(Sharding, ValueId)], others: &[(Sharding, ValueId)]| {
            mine.iter().map(|m| &m.0).eq(others.iter().map(|o| &o.0))
        };
        for (&(v, w), &[layouts, saved]) in pairs.all.iter().zip(&section.known) {
            let (mine, others) = (&b.layouts(v)[..layouts], b.layouts(w));
            let (my_saved, other_saved) = (&self.saved_of(v)[..saved], self.saved_of(w));
            if !alike(mine, others) || !my_saved.iter().map(|m| &m.0).eq(other_saved.iter().map(|o| &o.0)) {
                return None;
            }
            for ((_, mine), (_, other)) in mine.iter().zip(others) {
                if *locals.entry(*mine).or_insert(*other) != *other {
                    return None;
                }
            }
            if v.index() >= self.cx.training.num_forward {
                continue;
            }
            if forward.is_some_and(|forward| !alike(forward.layouts(v), forward.layouts(w))) {
                return None;
            }
            if let Op::Input(_) = self.cx.graph.node(v).op {
                for ((_, sharding), &mine) in self.inputs.iter().filter(|((input, _), _)| *input == v) {
                    buffers.extend(self.inputs.get(&(w, sharding.clone())).map(|&other| (mine, other)));
                }
            }
            for of in [&self.parameters, &self.received, &sums.accumulators] {
                match (of.get(&v), of.get(&w)) {
                    (None, None) => {}
                    (Some(mine), Some(other)) if self.same_buffers(*mine, *other) => {
                        buffers.insert(*mine, *other);
                    }
                    _ => return None,
                }
            }
        }
        Some(Renaming { values: &pairs.to, locals, buffers })
    }

    fn same_buffers(&self, a: BufferId, b: BufferId) -> bool {
        let [a, b] = [a, b].map(|id| &self.buffers[id.0 as usize]);
        a.ty == b.ty && a.sharding == b.sharding
    }

    /// Adds to pairs the values that the backward pass looks at in two layers, unless it lowers them differently.
    fn backward_pairs(&self, seen: &Seen<'_>, pairs: &mut Pairs, first: &[ValueId], second: &[ValueId]) -> Option<()> {
        let (cx, training) = (self.cx, self.cx.training);
        let elsewhere = |v: ValueId| cx.users[v.index()].iter().any(|u| cx.stage_of[u.index()] != Some(cx.index));
        for (&v, &w) in first.iter().zip(second).rev() {
            if is_of_parameter(cx, v) != is_of_parameter(cx, w) || elsewhere(v) != elsewhere(w) {
                return None;
            }
            match (training.cotangents[v.index()], training.cotangents[w.index()]) {
                (Some(c), Some(d)) => same_values(cx, pairs, c, d)?,
                (None, None) => {}
                _ => return None,
            }
            self.same_contributions(pairs, v, w)?;
            let (mine, others) = (&cx.owned[v.index()], &cx.owned[w.index()]);
            if mine.len() != others.len() {
                return None;
            }
            let wanted = |n: &ValueId| seen.parts.get(n).map(|&of| cx.resting(of));
            for (n, m) in mine.iter().zip(others) {
                if wanted(n) != wanted(m) {
                    return None;
                }
                same_nodes(cx, pairs, *n, *m)?;
            }
            let first_used = |v: ValueId| seen.first_used.get(&v).map_or(&[][..], |used| used);
            let (mine, others) = (first_used(v), first_used(w));
            if mine.len() != others.len() {
                return None;
            }
            for (&p, &q) in mine.iter().zip(others) {
                same_values(cx, pairs, p, q)?;
                self.same_contributions(pairs, p, q)?;
            }
        }
        // The backward pass computes nothing of other layers again.
        let layer = cx.layer_of[first.first()?.index()];
        let forward = pairs.all.iter().filter(|(v, _)| v.index() < training.num_forward);
        let mut again = forward.map(|&(v, w)| (v, self.again.contains(&v), self.again.contains(&w)));
        again.all(|(v, mine, other)| mine == other && (!mine || cx.layer_of[v.index()] == layer)).then_some(())
    }

    /// Pairs the contributions to the cotangents of two values. All must come from this stage.
    fn same_contributions(&self, pairs: &mut Pairs, v: ValueId, w: ValueId) -> Option<()> {
        let (cx, all) = (self.cx, &self.cx.training.contributions);
        let (mine, others) = (&all[v.index()], &all[w.index()]);
        if mine.len() != others.len() {
            return None;
        }
        for (&(user, c), &(other, d)) in mine.iter().zip(others) {
            let (from, other_from) = (cx.stage_of[user.index()], cx.stage_of[other.index()]);
            if from != other_from || from.is_some_and(|stage| stage != cx.index) {
                return None;
            }
            same_values(cx, pairs, c, d)?;
        }
        Some(())
    }
}
