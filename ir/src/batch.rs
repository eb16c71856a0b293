//! Sizes that scale with the batch.
//!
//! A graph is traced at one batch size, and the planner considers others. The inputs' batch dimensions and the sharding
//! rules determine which dimensions are proportional to the batch. If a factor indexes one such dimension, every
//! dimension that it indexes is one too, through the whole graph, forwards and backwards.
//!
//! Some constants count summed samples, such as the divisor of a mean. They are found by following sums over the batch
//! to the division that normalises them. Undecidable cases are reported, and a second trace at another size settles
//! them.
//!
//! Sizes in a graph are those of one microbatch. Nodes and literals carry marks of the dimensions and constants that scale, and [`rebatch`]
//! rewrites them.

mod loss;

use crate::graph::{Graph, Node, ValueId};
use crate::literal::{Literal, Values};
use crate::op::{Composite, Op, Operator};
use crate::rng::count_by_sample;
use crate::rule::ShardingRule;
use loss::{Understood, normalise};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The relation between the loss of a batch and the losses of its microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// The mean over samples, possibly with weights that depend on no parameter. It is the mean of the microbatches'
    /// losses.
    Mean,
    /// The sum over samples.
    Sum,
    /// Neither, e.g. with batch statistics. The loss of a microbatch has a meaning of its own.
    Other,
}

/// The reason why the batch of a graph is in doubt.
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

/// The results about the batch of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Batched {
    /// The graph with `batch`, `batch_dims` and `batch_power` filled in. Unchanged if in doubt.
    pub graph: Graph,
    pub loss: LossKind,
    /// The first op that makes samples depend on each other or on their place in the batch. Present if this is why the
    /// loss is neither mean nor sum.
    pub coupling: Option<Coupling>,
    /// The reason why the graph keeps its traced size, if it does.
    pub doubt: Option<Doubt>,
}

/// An op that couples samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coupling {
    pub op: &'static str,
    /// The model's name for the place, or empty.
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

/// Finds the sizes that scale with the batch. `batch_dim` has the batch dimension of each input, by position among the
/// inputs, or `None` if the input has none.
pub fn find_batch(graph: &Graph, batch_dim: &[Option<usize>]) -> Batched {
    match scaled_dims(graph, batch_dim) {
        Ok((batch, scaled)) => {
            let mut batched = graph.clone();
            batched.batch = batch;
            for (node, dims) in batched.nodes.iter_mut().zip(&scaled) {
                node.batch_dims = dims.iter().enumerate().filter(|(_, s)| **s).map(|(d, _)| 1 << d).sum();
            }
            batched = count_by_sample(&batched);
            let understood = normalise(&mut batched);
            batched = understood.applied(&batched);
            let Understood { loss, coupling, .. } = understood;
            // A graph that can be rebuilt at another size is consistent.
            match rebatch(&batched, 2 * batch) {
                Ok(_) => Batched { graph: batched, loss, coupling, doubt: None },
                Err(value) => {
                    Batched { graph: graph.clone(), loss, coupling, doubt: Some(Doubt::CannotResize { value }) }
                }
            }
        }
        Err(doubt) => {
            // Without the batch, nothing is known about the loss.
            Batched { graph: graph.clone(), loss: LossKind::Other, coupling: None, doubt: Some(doubt) }
        }
    }
}

/// The batch, and for each value and dimension whether it scales.
fn scaled_dims(graph: &Graph, batch_dim: &[Option<usize>]) -> Result<(u64, Vec<Vec<bool>>), Doubt> {
    // For each dimension that scales, the number of elements after one step of the batch in it. Samples may be a middle
    // factor of a merged dimension (positions before samples, or samples before heads).
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

    // Sweep forwards and backwards until nothing changes. Each sweep propagates along whole chains.
    let rules: Vec<_> = graph.values().map(|v| graph.rule(v)).collect();
    let mut forward = true;
    let mut quiet = 0;
    while quiet < 2 {
        let mut changed = false;
        let mut visit = |v: ValueId| changed |= spread(graph, v, &rules[v.index()], batch, &mut scaled);
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

/// Marks the dimensions of a node's operands and result that scale because others do. `scaled` has, for each dimension
/// that scales, the number of elements after one step of the batch in it. Returns true if this marks a dimension.
fn spread(graph: &Graph, v: ValueId, rule: &ShardingRule, batch: u64, scaled: &mut [Vec<Option<u64>>]) -> bool {
    // For each factor that scales, the number of its elements after one step of the batch.
    let mut carries: Vec<Option<u64>> = vec![None; rule.factors.len()];
    let size = |f: u8| rule.factors[f as usize].size;
    let behind = |dim: &[u8], at: usize| dim[at + 1..].iter().fold(1u64, |n, &f| n.saturating_mul(size(f)));
    // A dimension scales by the factor that holds the batch. Regrouped samples (8 of 64 tokens as 4 groups of 128) have
    // no such factor. Then it is the major-most factor that the batch divides, or else the major-most one.
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
    let tensors = || graph.node(v).operands.iter().zip(&rule.operands).chain([(&v, &rule.result)]);
    // Dimensions of one factor are certain, so they go before guesses about dimensions of several.
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
    let mut changed = false;
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
    changed
}

/// The graph at another batch size, with rewritten sizes and counting constants. `Err` names a node whose op cannot be
/// resized.
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
    // Layers repeat, so each composite is decomposed once at these sizes.
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
        // Some sizes are whole numbers only for certain multiples of the batch.
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

/// The reason why two traces do not belong to one model.
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

/// Determines the sizes that scale with the batch by comparing two traces of one model at different batch sizes.
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
    let understood = normalise(&mut marked);
    let batched = understood.applied(&batched);
    let Understood { loss, coupling, .. } = understood;
    rebatch(&batched, second_batch).map_err(|value| SettleError::CannotResize { value })?;
    Ok(Batched { graph: batched, loss, coupling, doubt: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    /// A graph on `x` of 8 samples of 4 numbers, and the kind of its loss.
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
        // A mean per sample, then a mean over samples.
        let nested = "%1: f32[8] = reduce(%0) {\"reducer\":\"sum\",\"dims\":[1]}\n%2: f32[8] = tanh(%1)\n%3: f32[] = reduce(%2) {\"reducer\":\"sum\",\"dims\":[0]}\n%4: f32[] = constant {\"value\":0.125}\n%5: f32[] = multiply(%3, %4)\n%6: f32[] = negate(%5)";
        assert_eq!(understood(nested, 6).0, LossKind::Mean);
    }

    #[test]
    fn samples_are_followed_inside_of_merged_dimensions() {
        // Positions come before samples in the rows of a product. There are as many positions as samples, or more, as a
        // multiple of the batch.
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
            // Every sample paired with every other.
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
            // A batch statistic of trained values, applied to each sample.
            (
                format!(
                    "%1: f32[4] = parameter \"w\"\n%2: f32[8,4] = broadcast_in_dim(%1) {{\"dims\":[1]}}\n%3: f32[8,4] = multiply(%0, %2)\n%4: f32[4] = reduce(%3) {{\"reducer\":\"sum\",\"dims\":[0]}}\n%5: f32[8,4] = broadcast_in_dim(%4) {{\"dims\":[1]}}\n%6: f32[8,4] = subtract(%3, %5)\n%7: f32[] = reduce(%6) {ALL}"
                ),
                7,
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
        // Two traces give the same result, even if one of them has a batch of one.
        let one = find_batch(&at(1), &[Some(0)]);
        assert!(matches!(one.doubt, Some(Doubt::BatchOfOne { .. })));
        let settled = settle(&at(1), &at(8)).expect("two traces of one model");
        assert_eq!(settled.loss, LossKind::Mean);
        assert_eq!(rebatch(&settled.graph, 8).map(|g| g.nodes[4].clone()), Ok(at(8).nodes[4].clone()));
        assert_eq!(settle(&at(8), &at(8)), Err(SettleError::SameSize));
    }
}
