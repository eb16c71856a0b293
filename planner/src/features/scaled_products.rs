//! Products of experts whose results gates scale, with the scale moved to the factor.
//!
//! The gradient of a scale reads what it scales. The result of a product is kept for nothing else, while its factor is kept anyway
//! for the gradient of the weight. So `(s x) w` keeps less than `s (x w)`, by as many values as the tokens of all experts have
//! features. Megatron-LM computes it so (`TEGroupedMLP`, megatron/core/transformer/moe/experts.py). In return scales travel with
//! tokens to their experts.

use super::chunked_loss::rebuilt;
use crate::request::Request;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Binary, BroadcastInDim, DotGeneral, Op, Reshape, Transpose};
use altiplano_ir::plan::{Execution, Target};
use altiplano_ir::types::TensorType;
use std::borrow::Cow;

/// Share of a device's memory that a product's result of one sample must fill to be spared, for software that is free to choose.
const WORTH_MOVING: f64 = 1.0 / 2048.0;

/// A product whose result is scaled by rows.
struct Scaled {
    /// The multiplication by the scale.
    product: ValueId,
    dot: ValueId,
    /// The factor in the product's type, and its conversion to 8 bits if there is one, which nothing else reads.
    factor: ValueId,
    narrowed: Option<ValueId>,
    /// The transpositions between the two, from the product's on. Nothing else reads them.
    between: Vec<ValueId>,
    /// The repeated scale, if nothing else reads it.
    repeated: Option<ValueId>,
    /// The scale before it is repeated, and the dimension of the factor for each of its own; `None` for those of size 1.
    scale: ValueId,
    dims: Vec<Option<usize>>,
}

/// The dimension of the first factor that becomes each dimension of a product; `None` for those of the second.
fn dims_of_factor(dot: &DotGeneral, lhs_rank: usize, rank: usize) -> Vec<Option<usize>> {
    let is_free = |d: &usize| !dot.lhs_batch.contains(d) && !dot.lhs_contract.contains(d);
    let of_lhs = dot.lhs_batch.iter().copied().chain((0..lhs_rank).filter(is_free));
    let mut dims: Vec<Option<usize>> = of_lhs.map(Some).collect();
    dims.resize(rank, None);
    dims
}

fn scaled(graph: &Graph, stops: &[ValueId]) -> Vec<Scaled> {
    let users = graph.users();
    let depends = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let trains = graph.depends_on(|v| graph.is_trained(v));
    let read_once = |v: ValueId| users[v.index()].len() == 1 && !graph.outputs.contains(&v) && !stops.contains(&v);
    let of_operands = |product: ValueId, from: ValueId, by: ValueId| {
        let Op::BroadcastInDim(repeat) = &graph.node(by).op else { return None };
        let scale = graph.node(by).operands[0];
        // Only the gradient of a scale keeps the result.
        if !trains[scale.index()] || !depends[scale.index()] {
            return None;
        }
        let (mut at, mut between) = (from, Vec::new());
        // The dimension of the value under `at` for each dimension of the result.
        let mut dims: Vec<usize> = (0..graph.shape(product).len()).collect();
        while let Op::Transpose(transpose) = &graph.node(at).op {
            if !read_once(at) {
                return None;
            }
            dims.iter_mut().for_each(|d| *d = transpose.permutation[*d]);
            between.push(at);
            at = graph.node(at).operands[0];
        }
        let (node, dot) = (graph.node(at), at);
        let Op::DotGeneral(op) = &node.op else { return None };
        let [x, w] = node.operands[..] else { return None };
        // Gates of other layers scale their results everywhere.
        if op.lhs_batch.is_empty() {
            return None;
        }
        let narrowed = Some(x).filter(|&x| matches!(graph.node(x).op, Op::Convert(_)) && read_once(x));
        let narrowed = narrowed.filter(|&x| graph.ty(x).dtype.bytes() < graph.ty(product).dtype.bytes());
        let factor = narrowed.map_or(x, |x| graph.node(x).operands[0]);
        let same_type = graph.ty(factor).dtype == graph.ty(product).dtype;
        if !read_once(at) || !same_type || !depends[x.index()] || depends[w.index()] {
            return None;
        }
        let of_factor = dims_of_factor(op, graph.shape(x).len(), node.ty.shape.len());
        let dim = |(size, &d): (&u64, &usize)| match size {
            1 => Some(None),
            _ => of_factor[dims[d]].map(Some),
        };
        let dims = graph.shape(scale).iter().zip(&repeat.dims).map(dim).collect::<Option<Vec<_>>>()?;
        between.reverse();
        Some(Scaled {
            product,
            dot,
            factor,
            narrowed,
            between,
            repeated: Some(by).filter(|&by| read_once(by)),
            scale,
            dims,
        })
    };
    let find = |v: ValueId| match (&graph.node(v).op, &graph.node(v).operands[..]) {
        (Op::Binary(Binary::Multiply), &[a, b]) => of_operands(v, a, b).or_else(|| of_operands(v, b, a)),
        _ => None,
    };
    graph.values().filter_map(find).collect()
}

/// A graph and its `stops` with the scales of these products at their factors.
fn moved(graph: &Graph, stops: &[ValueId], all: &[Scaled]) -> (Graph, Vec<ValueId>) {
    let is_dropped = |v: ValueId| {
        let is_of = |s: &Scaled| s.dot == v || [s.narrowed, s.repeated].contains(&Some(v)) || s.between.contains(&v);
        all.iter().any(is_of)
    };
    rebuilt(graph, stops, is_dropped, |to, map, v| {
        let Scaled { dot, factor, narrowed, between, scale, dims, .. } = all.iter().find(|s| s.product == v)?;
        let of_factor = graph.node(*factor);
        let of_scale = graph.node(*scale);
        // The scale's dimensions of more than one element, in their own order and in the factor's.
        let own: Vec<usize> = (0..dims.len()).filter(|&i| dims[i].is_some()).collect();
        let mut sorted = own.clone();
        sorted.sort_by_key(|&i| dims[i]);
        let chosen = |of: &[usize], op: Op, operand: ValueId| {
            let shape = of.iter().map(|&i| of_scale.ty.shape[i]).collect();
            let batch_dims = of.iter().zip(0..).fold(0, |mask, (i, new)| mask | (of_scale.batch_dims >> i & 1) << new);
            let ty = TensorType { shape, ..of_scale.ty.clone() };
            Node { op, operands: vec![operand], ty, batch_dims, ..of_scale.clone() }
        };
        let mut value = map[scale.index()];
        if own.len() < dims.len() {
            let shape = own.iter().map(|&i| of_scale.ty.shape[i]).collect();
            value = to.append(chosen(&own, Op::Reshape(Reshape { shape }), value));
        }
        if own != sorted {
            let permutation = sorted.iter().filter_map(|i| own.iter().position(|o| o == i)).collect();
            value = to.append(chosen(&sorted, Op::Transpose(Transpose { permutation }), value));
        }
        let at = sorted.iter().filter_map(|&i| dims[i]).collect();
        let repeat = Op::BroadcastInDim(BroadcastInDim { shape: of_factor.ty.shape.clone(), dims: at });
        let repeated = to.append(Node { op: repeat, operands: vec![value], ..of_factor.clone() });
        let operands = vec![map[factor.index()], repeated];
        let mut x = to.append(Node { op: Op::Binary(Binary::Multiply), operands, ..of_factor.clone() });
        if let Some(narrowed) = narrowed {
            x = to.append(Node { operands: vec![x], ..graph.node(*narrowed).clone() });
        }
        let operands = vec![x, map[graph.node(*dot).operands[1].index()]];
        let mut result = to.append(Node { operands, ..graph.node(*dot).clone() });
        for t in between {
            result = to.append(Node { operands: vec![result], ..graph.node(*t).clone() });
        }
        Some(result)
    })
}

/// A product whose factor is scaled.
struct ScaledFactor {
    dot: ValueId,
    /// The last of the transpositions that alone read the product; the product itself if there is none.
    last: ValueId,
    after: Vec<ValueId>,
    factor: ValueId,
    /// The factor in the product's own type, if that has 8 bits.
    narrowed: Option<ValueId>,
    scale: ValueId,
    /// The dimension of `last` for each of the scale's.
    dims: Vec<usize>,
    /// Values that nothing else reads.
    dropped: Vec<ValueId>,
}

/// The products that [`moved`] makes, and those that a model has so by itself.
fn scaled_factors(graph: &Graph, stops: &[ValueId]) -> Vec<ScaledFactor> {
    let users = graph.users();
    let depends = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let read_once = |v: ValueId| users[v.index()].len() == 1 && !graph.outputs.contains(&v) && !stops.contains(&v);
    let find = |dot: ValueId| {
        let node = graph.node(dot);
        let Op::DotGeneral(op) = &node.op else { return None };
        let [x, w] = node.operands[..] else { return None };
        let narrowed = Some(x).filter(|&x| matches!(graph.node(x).op, Op::Convert(_)));
        let product = narrowed.map_or(x, |x| graph.node(x).operands[0]);
        let (Op::Binary(Binary::Multiply), &[factor, by]) =
            (&graph.node(product).op, &graph.node(product).operands[..])
        else {
            return None;
        };
        let Op::BroadcastInDim(repeat) = &graph.node(by).op else { return None };
        if op.lhs_batch.is_empty() || depends[w.index()] || ![x, product, by].into_iter().all(read_once) {
            return None;
        }
        let mut dropped = vec![product, by, dot];
        dropped.extend(narrowed);
        let (mut scale, mut of_factor) = (graph.node(by).operands[0], repeat.dims.clone());
        if let Op::Transpose(transpose) = &graph.node(scale).op
            && read_once(scale)
        {
            dropped.push(scale);
            scale = graph.node(scale).operands[0];
            let mut dims = of_factor.clone();
            transpose.permutation.iter().zip(&of_factor).for_each(|(&from, &to)| dims[from] = to);
            of_factor = dims;
        }
        let mut after = Vec::new();
        let mut last = dot;
        let dims = dims_of_factor(op, graph.shape(x).len(), node.ty.shape.len());
        let mut at =
            of_factor.iter().map(|of| dims.iter().position(|d| d == &Some(*of))).collect::<Option<Vec<_>>>()?;
        while read_once(last)
            && let Op::Transpose(transpose) = &graph.node(users[last.index()][0]).op
        {
            last = users[last.index()][0];
            at.iter_mut().for_each(|d| *d = transpose.permutation.iter().position(|p| p == d).unwrap_or(*d));
            after.push(last);
        }
        dropped.extend(after.iter().filter(|&&v| v != last));
        Some(ScaledFactor { dot, last, after, factor, narrowed, scale, dims: at, dropped })
    };
    graph.values().filter_map(find).collect()
}

/// A graph and its `stops` with the scales of these factors at the products.
fn restored(graph: &Graph, stops: &[ValueId], all: &[ScaledFactor]) -> (Graph, Vec<ValueId>) {
    let is_dropped = |v: ValueId| all.iter().any(|s| s.last != v && s.dropped.contains(&v));
    rebuilt(graph, stops, is_dropped, |to, map, v| {
        let ScaledFactor { dot, last, after, factor, narrowed, scale, dims, .. } = all.iter().find(|s| s.last == v)?;
        let mut x = map[factor.index()];
        if let Some(narrowed) = narrowed {
            x = to.append(Node { operands: vec![x], ..graph.node(*narrowed).clone() });
        }
        let operands = vec![x, map[graph.node(*dot).operands[1].index()]];
        let mut result = to.append(Node { operands, ..graph.node(*dot).clone() });
        for t in after {
            result = to.append(Node { operands: vec![result], ..graph.node(*t).clone() });
        }
        let node = graph.node(*last);
        let repeat = Op::BroadcastInDim(BroadcastInDim { shape: node.ty.shape.clone(), dims: dims.clone() });
        let repeated = to.append(Node { op: repeat, operands: vec![map[scale.index()]], ..node.clone() });
        Some(to.append(Node { op: Op::Binary(Binary::Multiply), operands: vec![result, repeated], ..node.clone() }))
    })
}

/// The request as software runs it that scales results, whether it comes from a model or from a plan with scaled factors. Both have
/// the same nodes in the same order then.
pub fn with_scaled_results(request: &Request) -> Cow<'_, Request> {
    if !request.graph.pins.is_empty() {
        return Cow::Borrowed(request);
    }
    let stops = &request.stop_gradients;
    let (mut graph, mut stops) = (Cow::Borrowed(&*request.graph), Cow::Borrowed(stops));
    if !request.execution.scales_factors {
        let all = scaled(&graph, &stops);
        if all.is_empty() {
            return Cow::Borrowed(request);
        }
        let (new, new_stops) = moved(&graph, &stops, &all);
        (graph, stops) = (Cow::Owned(new), Cow::Owned(new_stops));
    }
    let (graph, stop_gradients) = restored(&graph, &stops, &scaled_factors(&graph, &stops));
    let execution = Execution { scales_factors: false, ..request.execution };
    Cow::Owned(Request { graph: graph.into(), stop_gradients, execution, ..request.clone() })
}

/// The request as software computes it that is configured by hand: Megatron-LM scales factors, and others results.
pub fn as_run_by(target: Target, request: &Request) -> Cow<'_, Request> {
    match target {
        Target::Megatron => {
            let of_megatron = Request { target, ..request.clone() };
            Cow::Owned(with_scaled_factors(&of_megatron).into_owned())
        }
        _ => with_scaled_results(request),
    }
}

/// The request as its target runs it: Megatron-LM always scales factors. Where this project compiles the programs, scales move from
/// large results to factors that are no larger. Other software computes what the model says.
pub fn with_scaled_factors(request: &Request) -> Cow<'_, Request> {
    let graph = &request.graph;
    let always = request.target == Target::Megatron;
    let can_choose = matches!(request.target, Target::Altiplano | Target::Xla);
    if !request.trains() || !graph.pins.is_empty() || !(always || can_choose) {
        return Cow::Borrowed(request);
    }
    let groups = request.cluster.groups.iter();
    let memory = groups.map(|group| request.cluster.usable_bytes(group)).max().unwrap_or(0) as f64;
    let is_worth = |s: &Scaled| {
        let result = graph.ty(s.dot);
        graph.ty(s.factor).elements() <= result.elements()
            && result.bytes() as f64 / graph.batch.max(1) as f64 >= WORTH_MOVING * memory
    };
    let mut all = scaled(graph, &request.stop_gradients);
    all.retain(|s| always || is_worth(s));
    if all.is_empty() {
        return Cow::Borrowed(request);
    }
    let (graph, stop_gradients) = moved(graph, &request.stop_gradients, &all);
    let execution = Execution { scales_factors: true, ..request.execution };
    Cow::Owned(Request { graph: graph.into(), stop_gradients, execution, ..request.clone() })
}
