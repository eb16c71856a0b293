//! The kind of a loss: the mean or the sum of its microbatches' losses, or neither.
//!
//! A walk over the graph determines how every value depends on the batch. Some losses are divided by a count over the
//! batch, such as the number of labels that are not ignored or of elements that a mask keeps. Such a loss would be
//! neither, because each microbatch has a count of its own.
//!
//! If the count depends on no parameter, it can be computed for the whole batch before the first microbatch runs. So
//! the walk requests an op that sums it over microbatches ([`Microbatches`]). The microbatches' shares then add up to
//! the loss. Their multiples by the number of microbatches have the loss as their mean, like the terms of any other
//! mean. So gradients accumulate unchanged.

use super::{Coupling, LossKind};
use crate::graph::{Graph, Node, ValueId};
use crate::op::{
    ArgSort, Binary, Cumulative, DotGeneral, GatherDims, Microbatches, Op, ReduceWindow, Reducer, Scatter, ScatterAdd,
    SelectAndScatter, Unary,
};
use std::collections::BTreeMap;

/// The dependence of a value on the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Aggregate {
    /// Independent of the batch.
    None,
    /// One value per sample, along a batch dimension.
    PerSample,
    /// A sum over all samples.
    Sum,
    /// A mean over all samples.
    Mean,
    /// Anything else.
    Mixed,
}

/// The kind of a graph's loss, and the changes that the graph needs for it.
pub(crate) struct Understood {
    pub loss: LossKind,
    pub coupling: Option<Coupling>,
    /// The ops over microbatches that the loss needs, by user and operand.
    needs: BTreeMap<(ValueId, usize), Microbatches>,
    /// True if the loss is the sum of its microbatches' losses although it is a mean, because each is divided by a
    /// total.
    divided: bool,
}

/// Marks the constants that count samples. Returns the kind of the first output as a loss, and the op that couples
/// samples in it.
pub(crate) fn normalise(graph: &mut Graph) -> Understood {
    let mut analysis = Analysis {
        trained: graph.depends_on(|v| matches!(graph.node(v).op, Op::Parameter(_))),
        kinds: Vec::with_capacity(graph.len()),
        counts: Vec::with_capacity(graph.len()),
        totalled: Vec::with_capacity(graph.len()),
        needs: BTreeMap::new(),
    };
    for v in graph.values() {
        let (count, counted) = summed_elements(graph, v, &analysis.counts);
        analysis.counts.push(count);
        if let Some((operand, power)) = counted {
            scale_constant(graph, v, operand, power);
        }
        analysis.visit(graph, v, counted.is_some());
    }
    let Analysis { kinds, totalled, mut needs, .. } = analysis;
    let output = graph.outputs.first().copied();
    let (kind, divided) = output.map_or((Aggregate::None, false), |o| (kinds[o.index()], totalled[o.index()]));
    let (loss, coupling) = match kind {
        Aggregate::Sum if !divided => (LossKind::Sum, None),
        Aggregate::Mean | Aggregate::Sum => (LossKind::Mean, None),
        _ => (LossKind::Other, coupling(graph, &kinds)),
    };
    // Values that the loss does not need stay unchanged.
    let mut live = vec![false; graph.len()];
    output.iter().for_each(|o| live[o.index()] = loss != LossKind::Other);
    for v in graph.values().rev() {
        if live[v.index()] {
            graph.node(v).operands.iter().for_each(|o| live[o.index()] = true);
        }
    }
    needs.retain(|(user, _), _| live[user.index()]);
    Understood { loss, coupling, needs, divided: divided && kind == Aggregate::Sum }
}

impl Understood {
    /// The graph with the ops over microbatches that its loss needs. Nothing else changes.
    pub(crate) fn applied(&self, graph: &Graph) -> Graph {
        if self.needs.is_empty() && !self.divided {
            return graph.clone();
        }
        let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
        let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
        let mut made: BTreeMap<(ValueId, Microbatches), ValueId> = BTreeMap::new();
        let mut over = |to: &mut Graph, map: &[ValueId], operand: ValueId, op: Microbatches| {
            *made.entry((operand, op)).or_insert_with(|| {
                let node = graph.node(operand);
                let (ty, name) = (node.ty.clone(), node.name.clone());
                let operands = vec![map[operand.index()]];
                to.append(Node { op: Op::Microbatches(op), operands, ty, batch_dims: node.batch_dims, name })
            })
        };
        for v in graph.values() {
            let node = graph.node(v);
            let operand = |(i, &o): (usize, &ValueId)| match self.needs.get(&(v, i)) {
                Some(&op) => over(&mut to, &map, o, op),
                None => map[o.index()],
            };
            let operands = node.operands.iter().enumerate().map(operand).collect();
            map.push(to.append(Node { operands, ..node.clone() }));
        }
        to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
        if let (true, Some(&loss)) = (self.divided, graph.outputs.first()) {
            to.outputs[0] = over(&mut to, &map, loss, Microbatches::Times);
        }
        to.take_pins(graph, |v| Some(map[v.index()]));
        to
    }
}

/// The state of the walk over a graph. Each list has an entry for every value seen so far.
struct Analysis {
    /// True for values that depend on a parameter.
    trained: Vec<bool>,
    kinds: Vec<Aggregate>,
    counts: Vec<Option<u64>>,
    /// True for values that depend on a total over the whole batch.
    totalled: Vec<bool>,
    needs: BTreeMap<(ValueId, usize), Microbatches>,
}

impl Analysis {
    /// Determines the kind of the next value. If it would mix samples, its operands that are sums and means and depend
    /// on no parameter are taken over the whole batch. All microbatches then see one value, like a constant.
    fn visit(&mut self, graph: &Graph, v: ValueId, counted: bool) {
        let operands = &graph.node(v).operands;
        let seen: Vec<Aggregate> = operands.iter().map(|o| self.kinds[o.index()]).collect();
        let mut totalled = operands.iter().any(|o| self.totalled[o.index()]);
        totalled |= matches!(graph.node(v).op, Op::Microbatches(op) if op.is_total());
        let (mut kind, mut times) = self.understand(graph, v, &seen, counted);
        if kind == Aggregate::Mixed && !seen.contains(&Aggregate::Mixed) {
            let total = |(o, kind): (&ValueId, &Aggregate)| match kind {
                Aggregate::Sum if self.is_countable(*o) => Some(Microbatches::Sum),
                Aggregate::Mean if self.is_countable(*o) => Some(Microbatches::Mean),
                _ => None,
            };
            let totals: Vec<Option<Microbatches>> = operands.iter().zip(&seen).map(total).collect();
            let whole = |(total, &kind): (&Option<Microbatches>, &Aggregate)| total.map_or(kind, |_| Aggregate::None);
            let whole: Vec<Aggregate> = totals.iter().zip(&seen).map(whole).collect();
            if totals.iter().any(Option::is_some) {
                (kind, times) = self.understand(graph, v, &whole, counted);
            }
            if kind != Aggregate::Mixed {
                totalled = true;
                self.needs.extend((0..).zip(totals).filter_map(|(i, total)| Some(((v, i), total?))));
            }
        }
        self.needs.extend(times.into_iter().map(|i| ((v, i), Microbatches::Times)));
        self.kinds.push(kind);
        self.totalled.push(totalled);
    }

    /// Returns true if a total of this value can be computed. Totals of totals would each take another pass over the
    /// batch.
    fn is_countable(&self, v: ValueId) -> bool {
        !self.trained[v.index()] && !self.totalled[v.index()]
    }

    /// The kind of a value for operands of these kinds, and the operands that must be multiplied by the number of
    /// microbatches. A mean is the mean of the microbatches' values, whereas values divided by a total are summed.
    fn understand(&self, graph: &Graph, v: ValueId, kinds: &[Aggregate], counted: bool) -> (Aggregate, Vec<usize>) {
        let kind = aggregate(graph, v, kinds, &self.counts, counted);
        let node = graph.node(v);
        let terms = match node.op {
            Op::Binary(Binary::Add | Binary::Subtract) => [0, 1],
            // All microbatches select the same of two values.
            Op::Select(_) if kinds[0] == Aggregate::None && node.batch_dims == 0 => [1, 2],
            _ => return (kind, Vec::new()),
        };
        let is_part = |i: &usize| kinds[*i] == Aggregate::Sum && self.totalled[node.operands[*i].index()];
        let is_mean = |i: &usize| matches!(kinds[*i], Aggregate::Mean | Aggregate::None) || is_part(i);
        let is_zero = |i: &usize| splat(graph, node.operands[*i]) == Some(0.0);
        let [a, b] = terms;
        let alike = kinds[a] == kinds[b] || is_zero(&a) || is_zero(&b);
        match kind {
            Aggregate::Mixed if matches!(node.op, Op::Select(_)) && alike => {
                (if is_zero(&a) { kinds[b] } else { kinds[a] }, Vec::new())
            }
            Aggregate::Mixed if terms.iter().all(is_mean) => {
                (Aggregate::Mean, terms.into_iter().filter(is_part).collect())
            }
            kind => (kind, Vec::new()),
        }
    }
}

/// The op where mixing begins on the way to the first output.
fn coupling(graph: &Graph, kinds: &[Aggregate]) -> Option<Coupling> {
    let is_mixed = |v: &&ValueId| kinds[v.index()] == Aggregate::Mixed;
    let mut at = graph.outputs.first().filter(is_mixed)?;
    while let Some(operand) = graph.node(*at).operands.iter().find(is_mixed) {
        at = operand;
    }
    let node = graph.node(*at);
    Some(Coupling { op: node.op.name(), name: node.name.clone() })
}

/// The number of elements that were summed into each element of `v` and not yet divided by, including those of all
/// samples. If `v` divides by it, also the operand that holds this count, and the power of the batch with which it
/// scales. This finds batch statistics as well as losses.
fn summed_elements(graph: &Graph, v: ValueId, counts: &[Option<u64>]) -> (Option<u64>, Option<(usize, i8)>) {
    let node = graph.node(v);
    let of = |i: usize| counts[node.operands[i].index()];
    let contracted = |operand: usize, dims: &[usize]| {
        let from = graph.node(node.operands[operand]);
        let over_batch = dims.iter().any(|&d| from.batch_dims >> d & 1 == 1);
        let product = dims.iter().fold(1u64, |n, &d| n.saturating_mul(from.ty.shape[d]));
        (over_batch && node.batch_dims == 0).then_some(product)
    };
    let count = match &node.op {
        Op::Reduce(r) if r.reducer == Reducer::Sum => contracted(0, &r.dims).or_else(|| {
            let reduced = r.dims.iter().fold(1u64, |n, &d| n.saturating_mul(graph.shape(node.operands[0])[d]));
            of(0).map(|count| count.saturating_mul(reduced))
        }),
        Op::DotGeneral(dot) => contracted(0, &dot.lhs_contract),
        Op::Binary(op @ (Binary::Divide | Binary::Multiply)) => {
            let other = match (of(0), of(1), op) {
                (Some(count), None, _) => Some((count, 1)),
                (None, Some(count), Binary::Multiply) => Some((count, 0)),
                _ => None,
            };
            let Some((count, other)) = other else { return (None, None) };
            let divisor = splat(graph, node.operands[other]);
            let divisor = divisor.map(|c| if *op == Binary::Divide { c } else { 1.0 / c });
            let is_count = |n: u64| divisor.is_some_and(|d| (d - n as f64).abs() <= 1e-6 * n as f64);
            if is_count(count) || is_count(graph.batch) {
                let power = if *op == Binary::Divide { 1 } else { -1 };
                return (None, Some((other, power)));
            }
            divisor.map(|_| count)
        }
        Op::Binary(Binary::Add | Binary::Subtract) if of(0) == of(1) => of(0),
        Op::Unary(Unary::Negate) | Op::Convert(_) | Op::Reshape(_) | Op::Transpose(_) => of(0),
        Op::BroadcastInDim(_) if node.batch_dims == 0 => of(0),
        _ => None,
    };
    (count, None)
}

/// The kind of `v` if its operands are of the kinds `all`. `counted` is true if it divides a sum by the number of its
/// elements.
fn aggregate(graph: &Graph, v: ValueId, all: &[Aggregate], counts: &[Option<u64>], counted: bool) -> Aggregate {
    let node = graph.node(v);
    let of = |i: usize| all[i];
    let has_batch = node.batch_dims != 0;
    match &node.op {
        _ if all.contains(&Aggregate::Mixed) => Aggregate::Mixed,
        // Two batch dimensions pair samples with each other. A count along the batch distinguishes samples.
        _ if node.batch_dims.count_ones() > 1 => Aggregate::Mixed,
        _ if mixes_samples(graph, node) => Aggregate::Mixed,
        Op::Iota(iota) if node.batch_dims >> iota.dim & 1 == 1 => Aggregate::Mixed,
        op if op.is_leaf() || matches!(op, Op::Constant(_) | Op::Iota(_)) => {
            if has_batch {
                Aggregate::PerSample
            } else {
                Aggregate::None
            }
        }
        Op::Reduce(r) => {
            let from = graph.node(node.operands[0]);
            let over_batch = r.dims.iter().any(|&d| from.batch_dims >> d & 1 == 1);
            match (of(0), over_batch, r.reducer) {
                (Aggregate::PerSample, true, Reducer::Sum) if !has_batch => Aggregate::Sum,
                (Aggregate::PerSample, true, _) => Aggregate::Mixed,
                (kind @ (Aggregate::None | Aggregate::PerSample), false, _) => kind,
                (kind @ (Aggregate::Sum | Aggregate::Mean), false, Reducer::Sum) => kind,
                _ => Aggregate::Mixed,
            }
        }
        // A sum of products of per-sample values, such as losses and weights.
        Op::DotGeneral(DotGeneral { lhs_contract: dims, .. })
            if over_batch(graph, v, dims) && !has_batch && all == [Aggregate::PerSample; 2] =>
        {
            Aggregate::Sum
        }
        // Ops along whole dimensions or windows of them. Samples stay apart unless the dimension is the batch.
        Op::DotGeneral(DotGeneral { lhs_contract: dims, .. }) if over_batch(graph, v, dims) => Aggregate::Mixed,
        Op::Convolution(op) if over_batch(graph, v, &[&[op.lhs.feature], op.lhs.spatial.as_slice()].concat()) => {
            Aggregate::Mixed
        }
        Op::ReduceWindow(ReduceWindow { window, .. }) | Op::SelectAndScatter(SelectAndScatter { window, .. })
            if over_batch(graph, v, &(0..window.len()).filter(|&d| !window[d].is_one()).collect::<Vec<_>>()) =>
        {
            Aggregate::Mixed
        }
        Op::Binary(Binary::Divide) => quotient(of(0), of(1), counted).unwrap_or_else(|| elementwise(all)),
        Op::Binary(Binary::Multiply) => {
            let product = quotient(of(0), of(1), counted).or_else(|| quotient(of(1), of(0), counted));
            product.unwrap_or_else(|| elementwise(all))
        }
        Op::Binary(Binary::Add | Binary::Subtract) => match all {
            [Aggregate::Mean, Aggregate::Mean] => Aggregate::Mean,
            [Aggregate::Sum, Aggregate::Sum] => {
                let [a, b] = [0, 1].map(|i| counts[node.operands[i].index()]);
                if a == b { Aggregate::Sum } else { Aggregate::Mixed }
            }
            [Aggregate::Mean, Aggregate::None] | [Aggregate::None, Aggregate::Mean] => Aggregate::Mean,
            _ => elementwise(all),
        },
        Op::Microbatches(Microbatches::Times) => match all[0] {
            Aggregate::Sum => Aggregate::Mean,
            Aggregate::None => Aggregate::None,
            _ => Aggregate::Mixed,
        },
        Op::Microbatches(_) => match all[0] {
            Aggregate::Sum | Aggregate::Mean | Aggregate::None => Aggregate::None,
            _ => Aggregate::Mixed,
        },
        Op::Unary(Unary::Negate) | Op::Convert(_) | Op::Reshape(_) | Op::Transpose(_) => all[0],
        Op::BroadcastInDim(_) => match all[0] {
            Aggregate::None if has_batch => Aggregate::PerSample,
            Aggregate::Sum | Aggregate::Mean if has_batch => Aggregate::Mixed,
            kind => kind,
        },
        Op::ScatterAdd(_) | Op::Scatter(_) if !has_batch && all.contains(&Aggregate::PerSample) => Aggregate::Mixed,
        _ => elementwise(all),
    }
}

/// The kind of a sum or mean over samples that is divided or multiplied by a value without samples. `counted` is as for
/// [`aggregate`]. `None` for other operands.
fn quotient(sum: Aggregate, by: Aggregate, counted: bool) -> Option<Aggregate> {
    match (sum, by) {
        (Aggregate::Sum | Aggregate::Mean, Aggregate::None) => Some(if counted { Aggregate::Mean } else { sum }),
        _ => None,
    }
}

/// True if an op along the batch makes a sample's value depend on others, or on its place among them.
fn mixes_samples(graph: &Graph, node: &Node) -> bool {
    let is_batch = |d: usize| node.batch_dims >> d & 1 == 1;
    match &node.op {
        Op::ArgSort(ArgSort { dim, .. }) | Op::Cumulative(Cumulative { dim, .. }) => is_batch(*dim),
        Op::Roll(op) => is_batch(op.dim),
        Op::Reverse(op) => op.dims.iter().any(|&d| is_batch(d)),
        // A lookup of one sample's value at an index from another (the edges of a graph).
        Op::Gather(op) => indexes_batch(&op.dims, graph.node(node.operands[0])),
        Op::ScatterAdd(ScatterAdd { dims, .. }) | Op::Scatter(Scatter { dims, .. }) => indexes_batch(dims, node),
        _ => false,
    }
}

/// True if a lookup chooses among the samples of a table.
fn indexes_batch(dims: &GatherDims, table: &Node) -> bool {
    let chosen = |d: &&usize| dims.slice_sizes[**d] < table.ty.shape[**d];
    dims.start_index_map.iter().filter(chosen).any(|&d| table.batch_dims >> d & 1 == 1)
}

/// True if one of these dimensions of the first operand scales with the batch.
fn over_batch(graph: &Graph, v: ValueId, dims: &[usize]) -> bool {
    let from = graph.node(graph.node(v).operands[0]);
    dims.iter().any(|&d| from.batch_dims >> d & 1 == 1)
}

/// The kind of an op that treats samples separately if its operands do.
fn elementwise(operands: &[Aggregate]) -> Aggregate {
    if operands.iter().all(|k| *k == Aggregate::None) {
        Aggregate::None
    } else if operands.iter().all(|k| matches!(k, Aggregate::None | Aggregate::PerSample)) {
        Aggregate::PerSample
    } else {
        Aggregate::Mixed
    }
}

fn splat(graph: &Graph, v: ValueId) -> Option<f64> {
    match &graph.node(v).op {
        Op::Constant(l) => l.as_splat(),
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Convert(_) => splat(graph, graph.node(v).operands[0]),
        _ => None,
    }
}

/// Gives the constant of an operand of `user` a power of the batch. If other nodes use the constant too, it scales for
/// all of them. But importers give each use of a number its own constant, and deduplication comes after this pass.
fn scale_constant(graph: &mut Graph, user: ValueId, operand: usize, power: i8) {
    let mut v = graph.node(user).operands[operand];
    loop {
        let node = &mut graph.nodes[v.index()];
        match &mut node.op {
            Op::Constant(literal) => {
                literal.batch_power = power;
                return;
            }
            _ => v = node.operands[0],
        }
    }
}

#[cfg(test)]
#[path = "loss_tests.rs"]
mod tests;
