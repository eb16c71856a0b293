//! Sizes that scale with the batch.
//!
//! A graph is traced at one batch size; the planner considers others. Which dimensions are proportional to the
//! batch follows from the inputs' batch dimensions and the sharding rules: a factor that indexes one such
//! dimension makes every dimension it indexes one, through the whole graph, forwards and backwards. Constants
//! that count summed samples (the divisor of a mean) are found by following sums over the batch to the division
//! that normalises them. What cannot be decided is said, and a second trace at another size settles it.

use crate::graph::{Graph, Node, ValueId};
use crate::literal::{Literal, Values};
use crate::op::{
    ArgSort, Binary, Composite, Cumulative, DotGeneral, GatherDims, Op, Operator, ReduceWindow, Reducer, Scatter,
    ScatterAdd, SelectAndScatter, Unary,
};
use crate::sample::count_by_sample;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How the loss of a batch relates to the losses of its microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// The mean over samples: the mean of the microbatches' losses.
    Mean,
    /// The sum over samples.
    Sum,
    /// Neither (batch statistics, masked means): a microbatch has its own meaning.
    Other,
}

/// What is in doubt about a graph's batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Doubt {
    NoInputs,
    BatchOfOne { input: String },
    SizesDiffer { first: String, size: u64, second: String, other: u64 },
    ParameterScales { name: String, dim: usize },
    ConstantScales { value: ValueId },
    CannotResize { value: ValueId },
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Doubt::NoInputs => write!(f, "the graph has no input with a batch dimension"),
            Doubt::BatchOfOne { input } => write!(
                f,
                "input '{input}' has a batch of 1, which looks like any dimension of size 1: trace with a larger batch, or give a second trace at another batch size with --also"
            ),
            Doubt::SizesDiffer { first, size, second, other } => write!(
                f,
                "dimension 0 of '{first}' is {size} but that of '{second}' is {other}: name the batch dimension with --batch-dim NAME=DIM (or NAME=none)"
            ),
            Doubt::ParameterScales { name, dim } => {
                write!(
                    f,
                    "parameter '{name}' would have to grow with the batch: export the model with an open batch size, or say what has a batch (for example --inputs '{name}' --batch-dim '{name}={dim}')"
                )
            }
            Doubt::ConstantScales { value } => write!(
                f,
                "constant {value} lists values along the batch dimension: give a second trace at another batch size with --also"
            ),
            Doubt::CannotResize { value } => {
                write!(f, "the op of {value} cannot be rewritten for another batch size")
            }
        }
    }
}

/// What was found out about the batch of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Batched {
    /// The graph with `batch`, `batch_dims` and `batch_power` filled in; as it was where in doubt.
    pub graph: Graph,
    pub loss: LossKind,
    /// The first op that makes samples depend on each other or on their place in the batch, where that is why the loss is
    /// neither mean nor sum.
    pub coupling: Option<Coupling>,
    /// Why the graph keeps to its traced size, if it does.
    pub doubt: Option<Doubt>,
}

/// An op that couples samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coupling {
    pub op: &'static str,
    /// As the model calls the place, if it does.
    pub name: String,
}

impl fmt::Display for Coupling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "an op '{}'", self.op),
            name => write!(f, "the {} at '{name}'", self.op),
        }
    }
}

/// Finds the sizes that scale with the batch. `batch_dim` gives the batch dimension of each input, by position
/// among the inputs (`None`: the input has none).
pub fn find_batch(graph: &Graph, batch_dim: &[Option<usize>]) -> Batched {
    match scaled_dims(graph, batch_dim) {
        Ok((batch, scaled)) => {
            let mut batched = graph.clone();
            batched.batch = batch;
            for (node, dims) in batched.nodes.iter_mut().zip(&scaled) {
                node.batch_dims = dims.iter().enumerate().filter(|(_, s)| **s).map(|(d, _)| 1 << d).sum();
            }
            batched = count_by_sample(&batched);
            let (loss, coupling) = normalise(&mut batched);
            // The proof that all of this is consistent is that the graph can be rebuilt at another size.
            match rebatch(&batched, 2 * batch) {
                Ok(_) => Batched { graph: batched, loss, coupling, doubt: None },
                Err(value) => {
                    Batched { graph: graph.clone(), loss, coupling, doubt: Some(Doubt::CannotResize { value }) }
                }
            }
        }
        Err(doubt) => {
            // Without the batch nothing is known of the loss.
            Batched { graph: graph.clone(), loss: LossKind::Other, coupling: None, doubt: Some(doubt) }
        }
    }
}

/// For each value and dimension whether it scales, and the batch.
fn scaled_dims(graph: &Graph, batch_dim: &[Option<usize>]) -> Result<(u64, Vec<Vec<bool>>), Doubt> {
    // Of each dimension that scales, how many elements lie behind one step of the batch inside it: samples may be the digits in
    // the middle of a dimension that others were merged with (positions before samples, or samples before heads).
    let mut scaled: Vec<Vec<Option<u64>>> = graph.values().map(|v| vec![None; graph.shape(v).len()]).collect();
    let mut batch: Option<(u64, &str)> = None;
    for ((v, name), dim) in graph.inputs().zip(batch_dim) {
        let Some(dim) = dim.filter(|&d| d < graph.shape(v).len()) else { continue };
        let size = graph.shape(v)[dim];
        scaled[v.index()][dim] = Some(1);
        match batch {
            None => batch = Some((size, name)),
            Some((first, _)) if first == size => {}
            Some((first, first_name)) => {
                return Err(Doubt::SizesDiffer {
                    first: first_name.to_string(),
                    size: first,
                    second: name.to_string(),
                    other: size,
                });
            }
        }
    }
    let Some((batch, name)) = batch else { return Err(Doubt::NoInputs) };
    if batch <= 1 {
        return Err(Doubt::BatchOfOne { input: name.to_string() });
    }

    // Sweep forwards and backwards until nothing changes; each sweep propagates along whole chains.
    let rules: Vec<_> = graph.values().map(|v| graph.rule(v)).collect();
    let mut forward = true;
    let mut quiet = 0;
    while quiet < 2 {
        let mut changed = false;
        let mut visit = |v: ValueId| {
            let rule = &rules[v.index()];
            let node = graph.node(v);
            // Of each factor that scales, how many of its elements lie behind one step of the batch.
            let mut carries: Vec<Option<u64>> = vec![None; rule.factors.len()];
            let size = |f: u8| rule.factors[f as usize].size;
            let behind = |dim: &[u8], at: usize| dim[at + 1..].iter().fold(1u64, |n, &f| n.saturating_mul(size(f)));
            // A dimension that scales does so by the factor that holds the batch. Where none does (samples that are regrouped:
            // 8 of 64 tokens as 4 groups of 128), by its major-most factor that the batch divides, or else its major-most one.
            let carrier = |dim: &[u8], step: u64| {
                let holds = |at: &usize| {
                    let (behind, own) = (behind(dim, *at), size(dim[*at]));
                    step.is_multiple_of(behind) && behind.saturating_mul(own).is_multiple_of(step.saturating_mul(batch))
                };
                if let Some(at) = (0..dim.len()).find(holds) {
                    return Some((dim[at], step / behind(dim, at)));
                }
                let whole = dim.iter().copied().find(|&f| size(f) % batch == 0);
                let f = whole.or_else(|| dim.iter().copied().find(|&f| size(f) > 1))?;
                Some((f, (size(f) / batch).max(1)))
            };
            let tensors = || node.operands.iter().zip(&rule.operands).chain([(&v, &rule.result)]);
            // What dimensions of one factor say goes before guesses about those of several.
            for several in [false, true] {
                for (value, dims) in tensors() {
                    for (d, dim) in dims.iter().enumerate() {
                        if let Some(step) = scaled[value.index()][d]
                            && (dim.iter().filter(|&&f| size(f) > 1).count() > 1) == several
                            && !dim.iter().any(|&f| carries[f as usize].is_some())
                            && let Some((f, step)) = carrier(dim, step)
                        {
                            carries[f as usize] = Some(step);
                        }
                    }
                }
            }
            for (value, dims) in tensors() {
                for (d, dim) in dims.iter().enumerate() {
                    let step = (0..dim.len())
                        .find_map(|at| carries[dim[at] as usize].map(|step| step.saturating_mul(behind(dim, at))));
                    if step.is_some() && scaled[value.index()][d].is_none() {
                        scaled[value.index()][d] = step;
                        changed = true;
                    }
                }
            }
        };
        if forward {
            graph.values().for_each(&mut visit);
        } else {
            graph.values().rev().for_each(&mut visit);
        }
        forward = !forward;
        quiet = if changed { 0 } else { quiet + 1 };
    }
    let scaled: Vec<Vec<bool>> = scaled.iter().map(|dims| dims.iter().map(Option::is_some).collect()).collect();
    for v in graph.values().filter(|v| scaled[v.index()].contains(&true)) {
        match &graph.node(v).op {
            Op::Parameter(p) => {
                let dim = scaled[v.index()].iter().position(|&s| s).unwrap_or(0);
                return Err(Doubt::ParameterScales { name: p.name.clone(), dim });
            }
            Op::Constant(Literal { values: Values::Dense(_), .. }) => return Err(Doubt::ConstantScales { value: v }),
            _ => {}
        }
    }
    Ok((batch, scaled))
}

/// How a value depends on the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Aggregate {
    /// Not at all.
    None,
    /// Each sample separately, along a batch dimension.
    PerSample,
    /// A sum over all samples.
    Sum,
    /// A mean over all samples.
    Mean,
    /// Anything else.
    Mixed,
}

/// Marks the constants that count samples, and says what kind of loss the first output is, and what couples samples in it.
fn normalise(graph: &mut Graph) -> (LossKind, Option<Coupling>) {
    let mut kinds: Vec<Aggregate> = Vec::with_capacity(graph.len());
    let mut counts: Vec<Option<u64>> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let (count, counted) = summed_elements(graph, v, &counts);
        counts.push(count);
        if let Some((operand, power)) = counted {
            scale_constant(graph, v, operand, power);
        }
        let kind = aggregate(graph, v, &kinds, &counts, counted.is_some());
        kinds.push(kind);
    }
    match graph.outputs.first().map(|o| kinds[o.index()]) {
        Some(Aggregate::Mean) => (LossKind::Mean, None),
        Some(Aggregate::Sum) => (LossKind::Sum, None),
        _ => (LossKind::Other, coupling(graph, &kinds)),
    }
}

/// Where mixing begins on the way to the first output.
fn coupling(graph: &Graph, kinds: &[Aggregate]) -> Option<Coupling> {
    let is_mixed = |v: &&ValueId| kinds[v.index()] == Aggregate::Mixed;
    let mut at = graph.outputs.first().filter(is_mixed)?;
    while let Some(operand) = graph.node(*at).operands.iter().find(is_mixed) {
        at = operand;
    }
    let node = graph.node(*at);
    Some(Coupling { op: node.op.name(), name: node.name.clone() })
}

/// The number of elements, those of all samples included, that were summed into each element of `v` and not yet divided
/// by; and where `v` divides by it, the operand that is this count and the power of the batch with which it scales. Batch
/// statistics are found here as well as losses.
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

/// How `v` depends on the batch; `counted` says that it divides a sum by the number of its elements.
fn aggregate(graph: &Graph, v: ValueId, kinds: &[Aggregate], counts: &[Option<u64>], counted: bool) -> Aggregate {
    let node = graph.node(v);
    let of = |i: usize| kinds[node.operands[i].index()];
    let all: Vec<Aggregate> = (0..node.operands.len()).map(of).collect();
    let has_batch = node.batch_dims != 0;
    match &node.op {
        _ if all.contains(&Aggregate::Mixed) => Aggregate::Mixed,
        // Two batch dimensions pair samples with each other; a count along the batch tells them apart.
        _ if node.batch_dims.count_ones() > 1 => Aggregate::Mixed,
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
        // Ops that look along whole dimensions or windows of them: samples stay apart unless it is the batch's.
        Op::DotGeneral(DotGeneral { lhs_contract: dims, .. }) if over_batch(graph, v, dims) => Aggregate::Mixed,
        Op::Convolution(op) if over_batch(graph, v, &[&[op.lhs.feature], op.lhs.spatial.as_slice()].concat()) => {
            Aggregate::Mixed
        }
        Op::ReduceWindow(ReduceWindow { window, .. }) | Op::SelectAndScatter(SelectAndScatter { window, .. })
            if over_batch(graph, v, &(0..window.len()).filter(|&d| !window[d].is_one()).collect::<Vec<_>>()) =>
        {
            Aggregate::Mixed
        }
        Op::Binary(Binary::Divide | Binary::Multiply) => {
            let sum = |kind: Aggregate| matches!(kind, Aggregate::Sum | Aggregate::Mean);
            let divides = matches!(node.op, Op::Binary(Binary::Divide));
            match (of(0), of(1)) {
                (kind, Aggregate::None) if sum(kind) => {
                    if counted {
                        Aggregate::Mean
                    } else {
                        kind
                    }
                }
                (Aggregate::None, kind) if sum(kind) && !divides => {
                    if counted {
                        Aggregate::Mean
                    } else {
                        kind
                    }
                }
                _ => elementwise(&all),
            }
        }
        Op::Binary(Binary::Add | Binary::Subtract) => match all.as_slice() {
            [Aggregate::Mean, Aggregate::Mean] => Aggregate::Mean,
            [Aggregate::Sum, Aggregate::Sum] => {
                let [a, b] = [0, 1].map(|i| counts[node.operands[i].index()]);
                if a == b { Aggregate::Sum } else { Aggregate::Mixed }
            }
            [Aggregate::Mean, Aggregate::None] | [Aggregate::None, Aggregate::Mean] => Aggregate::Mean,
            _ => elementwise(&all),
        },
        Op::Unary(Unary::Negate) | Op::Convert(_) | Op::Reshape(_) | Op::Transpose(_) => all[0],
        Op::BroadcastInDim(_) => match all[0] {
            Aggregate::None if has_batch => Aggregate::PerSample,
            Aggregate::Sum | Aggregate::Mean if has_batch => Aggregate::Mixed,
            kind => kind,
        },
        // Along the batch these make one sample's value depend on others, or on its place among them.
        Op::ArgSort(ArgSort { dim, .. }) | Op::Cumulative(Cumulative { dim, .. })
            if node.batch_dims >> dim & 1 == 1 =>
        {
            Aggregate::Mixed
        }
        Op::Roll(op) if node.batch_dims >> op.dim & 1 == 1 => Aggregate::Mixed,
        Op::Reverse(op) if op.dims.iter().any(|&d| node.batch_dims >> d & 1 == 1) => Aggregate::Mixed,
        // Looking up one sample's value at a place that another says (the edges of a graph).
        Op::Gather(op) if indexes_batch(&op.dims, graph.node(node.operands[0])) => Aggregate::Mixed,
        Op::ScatterAdd(ScatterAdd { dims, .. }) | Op::Scatter(Scatter { dims, .. }) if indexes_batch(dims, node) => {
            Aggregate::Mixed
        }
        Op::ScatterAdd(_) | Op::Scatter(_) if !has_batch && all.contains(&Aggregate::PerSample) => Aggregate::Mixed,
        _ => elementwise(&all),
    }
}

/// Whether a lookup chooses among the samples of a table.
fn indexes_batch(dims: &GatherDims, table: &Node) -> bool {
    let chosen = |d: &&usize| dims.slice_sizes[**d] < table.ty.shape[**d];
    dims.start_index_map.iter().filter(chosen).any(|&d| table.batch_dims >> d & 1 == 1)
}

/// Whether one of these dimensions of the first operand scales with the batch.
fn over_batch(graph: &Graph, v: ValueId, dims: &[usize]) -> bool {
    let from = graph.node(graph.node(v).operands[0]);
    dims.iter().any(|&d| from.batch_dims >> d & 1 == 1)
}

/// Any op that treats samples separately if its operands do.
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

/// Gives the constant behind an operand of `user` a power of the batch. A constant that other nodes use too scales for
/// all of them: importers give each use of a number its own constant, and sharing comes after this pass.
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

/// The graph at another batch size: sizes and counting constants are rewritten. `Err` names the node whose op
/// cannot be.
pub fn rebatch(graph: &Graph, batch: u64) -> Result<Graph, ValueId> {
    if batch == graph.batch || graph.batch == 0 {
        return Ok(graph.clone());
    }
    let mut to = Graph {
        name: graph.name.clone(),
        batch,
        outputs: graph.outputs.clone(),
        pins: graph.pins.clone(),
        ..Default::default()
    };
    to.nodes.reserve_exact(graph.len());
    // Layers repeat: what a function is made of at these sizes is built once.
    let mut composites: Vec<Composite> = Vec::new();
    for v in graph.values() {
        let node = graph.node(v);
        let scale = |(d, &size): (usize, &u64)| {
            if node.batch_dims >> d & 1 == 1 {
                let scaled = size as u128 * batch as u128;
                let whole = scaled.is_multiple_of(graph.batch as u128).then_some(scaled / graph.batch as u128);
                whole.and_then(|s| u64::try_from(s).ok())
            } else {
                Some(size)
            }
        };
        // Some sizes are whole only for multiples of a part of the batch.
        let shape: Option<Vec<u64>> = node.ty.shape.iter().enumerate().map(scale).collect();
        let shape = shape.ok_or(v)?;
        let operands: Vec<&[u64]> = node.operands.iter().map(|&o| to.shape(o)).collect();
        let mut op = node.op.resized(&operands, &shape);
        if let Op::Constant(literal) = &mut op
            && literal.batch_power != 0
            && let Values::Splat(value) = &mut literal.values
        {
            value.0 *= (batch as f64 / graph.batch as f64).powi(literal.batch_power as i32);
        }
        let types: Vec<_> = node.operands.iter().map(|&o| to.ty(o)).collect();
        if let Op::Composite(composite) = &mut op {
            match composites.iter().find(|known| *known == composite && known.is_built_for(&types)) {
                Some(known) => *composite = known.clone(),
                None => composites.push(composite.clone()),
            }
        }
        let ty = op.infer(&types).map_err(|_| v)?;
        if ty.shape != shape {
            return Err(v);
        }
        to.append(Node {
            op,
            ty,
            operands: node.operands.clone(),
            batch_dims: node.batch_dims,
            name: node.name.clone(),
        });
    }
    Ok(to)
}

/// Why two traces do not belong to one model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SettleError {
    #[error("the second trace has {second} ops, the first {first}")]
    Length { first: usize, second: usize },
    #[error("{value} is {first} in the first trace and {second} in the second")]
    Op { value: ValueId, first: &'static str, second: &'static str },
    #[error(
        "dimension {dim} of {value} is {first} in the first trace and {second} in the second, which is not in proportion to the batch"
    )]
    Dim { value: ValueId, dim: usize, first: u64, second: u64 },
    #[error("the constant {value} differs between the traces, but not in proportion to the batch")]
    Constant { value: ValueId },
    #[error("both traces have the same sizes")]
    SameSize,
    #[error("{value} cannot be rewritten for another batch size")]
    CannotResize { value: ValueId },
}

/// Settles what scales with the batch by comparing two traces of one model at different batch sizes.
pub fn settle(graph: &Graph, other: &Graph) -> Result<Batched, SettleError> {
    if graph.len() != other.len() {
        return Err(SettleError::Length { first: graph.len(), second: other.len() });
    }
    let sizes = graph.inputs().find_map(|(v, _)| {
        let pairs = graph.shape(v).iter().zip(other.shape(v));
        pairs.map(|(&a, &b)| (a, b)).find(|(a, b)| a != b)
    });
    let Some((batch, second_batch)) = sizes else { return Err(SettleError::SameSize) };
    let mut batched = graph.clone();
    batched.batch = batch;
    for v in graph.values() {
        let (a, b) = (graph.node(v), other.node(v));
        if a.op.name() != b.op.name() || a.operands != b.operands || a.ty.rank() != b.ty.rank() {
            return Err(SettleError::Op { value: v, first: a.op.name(), second: b.op.name() });
        }
        for (d, (&m, &n)) in a.ty.shape.iter().zip(&b.ty.shape).enumerate() {
            if m as u128 * second_batch as u128 == n as u128 * batch as u128 && m != n {
                batched.nodes[v.index()].batch_dims |= 1 << d;
            } else if m != n {
                return Err(SettleError::Dim { value: v, dim: d, first: m, second: n });
            }
        }
        if let (Op::Constant(x), Op::Constant(y)) = (&a.op, &b.op) {
            match (x.as_splat(), y.as_splat()) {
                (Some(m), Some(n)) if m == n || m.is_nan() && n.is_nan() => {}
                (Some(m), Some(n)) => {
                    let ratio = second_batch as f64 / batch as f64;
                    let near = |x: f64| (n / m - x).abs() <= 1e-6 * x;
                    let power = if near(ratio) {
                        1
                    } else if near(1.0 / ratio) {
                        -1
                    } else {
                        0
                    };
                    if power == 0 {
                        return Err(SettleError::Constant { value: v });
                    }
                    if let Op::Constant(literal) = &mut batched.nodes[v.index()].op {
                        literal.batch_power = power;
                    }
                }
                _ if x.values == y.values => {}
                _ => return Err(SettleError::Constant { value: v }),
            }
        }
    }
    let batched = count_by_sample(&batched);
    let mut marked = batched.clone();
    let (loss, coupling) = normalise(&mut marked);
    rebatch(&batched, second_batch).map_err(|value| SettleError::CannotResize { value })?;
    Ok(Batched { graph: batched, loss, coupling, doubt: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    /// A graph on `x` of 8 samples of 4 numbers, and how its loss is understood.
    fn understood(body: &str, output: u32) -> (LossKind, Graph) {
        let text = format!("graph \"g\" batch=0 {{\n%0: f32[8,4] = input \"x\"\n{body}\n}} -> (%{output})");
        let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let batched = find_batch(&graph, &[Some(0)]);
        assert_eq!(batched.doubt, None, "{text}");
        (batched.loss, batched.graph)
    }

    const ALL: &str = "{\"reducer\":\"sum\",\"dims\":[0,1]}";

    #[test]
    fn means_and_sums_over_samples_are_recognised() {
        let mean = |count: f64| {
            format!(
                "%1: f32[] = reduce(%0) {ALL}\n%2: f32[] = constant {{\"value\":{count:?}}}\n%3: f32[] = divide(%1, %2)"
            )
        };
        assert_eq!(understood(&mean(32.0), 3).0, LossKind::Mean);
        assert_eq!(understood(&mean(8.0), 3).0, LossKind::Mean);
        assert_eq!(understood(&mean(3.0), 3).0, LossKind::Sum);
        assert_eq!(understood(&format!("%1: f32[] = reduce(%0) {ALL}"), 1).0, LossKind::Sum);
        // A mean per sample, then over samples.
        let nested = "%1: f32[8] = reduce(%0) {\"reducer\":\"sum\",\"dims\":[1]}\n%2: f32[8] = tanh(%1)\n%3: f32[] = reduce(%2) {\"reducer\":\"sum\",\"dims\":[0]}\n%4: f32[] = constant {\"value\":0.125}\n%5: f32[] = multiply(%3, %4)\n%6: f32[] = negate(%5)";
        assert_eq!(understood(nested, 6).0, LossKind::Mean);
    }

    #[test]
    fn samples_are_followed_inside_of_merged_dimensions() {
        // Positions come before samples in the rows of a product, and there are as many heads as samples, or more positions
        // that the batch divides.
        for (samples, positions) in [(4u64, 12u64), (4, 4), (2, 8), (3, 12)] {
            let rows = samples * positions;
            let text = format!(
                "graph \"g\" batch=0 {{\n%0: f32[{samples},{positions},8] = input \"x\"\n%1: f32[{positions},{samples},8] = transpose(%0) {{\"permutation\":[1,0,2]}}\n%2: f32[{rows},8] = reshape(%1)\n%3: f32[{rows},8] = tanh(%2)\n%4: f32[{positions},{samples},8] = reshape(%3)\n%5: f32[{samples},{positions},8] = transpose(%4) {{\"permutation\":[1,0,2]}}\n}} -> (%5)"
            );
            let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            let batched = find_batch(&graph, &[Some(0)]);
            assert_eq!(batched.doubt, None, "{samples} {positions}");
            let again = rebatch(&batched.graph, 2 * samples).expect("another size");
            assert_eq!(again.nodes[5].ty.shape, [2 * samples, positions, 8]);
        }
    }

    #[test]
    fn losses_that_mix_samples_are_neither() {
        let dot = "{\"lhs_contract\":[1],\"rhs_contract\":[1]}";
        for (body, output) in [
            // Every sample against every other.
            (format!("%1: f32[8,8] = dot_general(%0, %0) {dot}\n%2: f32[] = reduce(%1) {ALL}"), 2),
            // Samples weighted by their position.
            (
                format!(
                    "%1: f32[8,4] = iota {{\"dim\":0}}\n%2: f32[8,4] = multiply(%0, %1)\n%3: f32[] = reduce(%2) {ALL}"
                ),
                3,
            ),
            // A maximum over the batch.
            ("%1: f32[] = reduce(%0) {\"reducer\":\"max\",\"dims\":[0,1]}".to_string(), 1),
            // A batch statistic applied to each sample.
            (
                format!(
                    "%1: f32[4] = reduce(%0) {{\"reducer\":\"sum\",\"dims\":[0]}}\n%2: f32[8,4] = broadcast_in_dim(%1) {{\"dims\":[1]}}\n%3: f32[8,4] = subtract(%0, %2)\n%4: f32[] = reduce(%3) {ALL}"
                ),
                4,
            ),
            // A function of the sum.
            (format!("%1: f32[] = reduce(%0) {ALL}\n%2: f32[] = tanh(%1)"), 2),
        ] {
            assert_eq!(understood(&body, output).0, LossKind::Other, "{body}");
        }
    }

    #[test]
    fn what_couples_samples_is_named() {
        let text = format!(
            "graph \"g\" batch=0 {{\n%0: f32[8,4] = input \"x\"\n%1: f32[8,4] = tanh(%0)\n%2: f32[8,4] = reverse(%1) {{\"dims\":[0]}} @\"mixer\"\n%3: f32[8,4] = exponential(%2)\n%4: f32[] = reduce(%3) {ALL}\n}} -> (%4)"
        );
        let graph = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let coupling = find_batch(&graph, &[Some(0)]).coupling.map(|c| c.to_string());
        assert_eq!(coupling.as_deref(), Some("the reverse at 'mixer'"));
    }

    #[test]
    fn another_batch_size_is_what_a_trace_at_that_size_says() {
        let body = |b: u64| {
            let n = b * 4;
            format!(
                "graph \"g\" batch=0 {{\n%0: f32[{b},4] = input \"x\"\n%1: f32[{n}] = reshape(%0)\n%2: f32[] = reduce(%1) {{\"reducer\":\"sum\",\"dims\":[0]}}\n%3: f32[] = constant {{\"value\":{n}.0}}\n%4: f32[] = divide(%2, %3)\n}} -> (%4)"
            )
        };
        let at = |b: u64| parse(&body(b)).expect("a graph");
        let batched = find_batch(&at(8), &[Some(0)]);
        assert_eq!(batched.loss, LossKind::Mean);
        for b in [1, 2, 24] {
            let again = rebatch(&batched.graph, b).expect("another size");
            let value = |g: &Graph| match &g.nodes[3].op {
                Op::Constant(l) => l.as_splat(),
                _ => None,
            };
            assert_eq!(value(&again), Some(4.0 * b as f64));
            let shapes = |g: &Graph| g.nodes.iter().map(|n| n.ty.clone()).collect::<Vec<_>>();
            assert_eq!(shapes(&again), shapes(&at(b)));
        }
        // Two traces say the same, also where one of them has a batch of one.
        let one = find_batch(&at(1), &[Some(0)]);
        assert!(matches!(one.doubt, Some(Doubt::BatchOfOne { .. })));
        let settled = settle(&at(1), &at(8)).expect("two traces of one model");
        assert_eq!(settled.loss, LossKind::Mean);
        assert_eq!(rebatch(&settled.graph, 8).map(|g| g.nodes[4].clone()), Ok(at(8).nodes[4].clone()));
        assert_eq!(settle(&at(8), &at(8)), Err(SettleError::SameSize));
    }
}
