//! Extraction of the cheapest way to compute a region's results from its e-graph.

use super::egraph::{Builder, Term};
use super::region::{Child, New, Rewritten};
use altiplano_ir::op::{Op, Operator};
use altiplano_ir::types::TensorType;
use egg::Id;
use std::collections::{BTreeMap, HashMap};

/// The approximate work of a device per byte that it moves: 10^14 FLOP/s at 10^12 bytes/s.
const FLOP_PER_BYTE: f64 = 100.0;

/// The fixed cost of every op beside its work, in bytes.
const OVERHEAD: f64 = 4096.0;

/// The estimated cost of an op, in bytes moved. Ops that move nothing cost a little, so that fewer of them are better.
fn cost(op: &Op, operands: &[&TensorType], result: &TensorType) -> f64 {
    let bytes = operands.iter().map(|t| t.bytes()).sum::<u64>() as f64 + result.bytes() as f64;
    match op {
        Op::Constant(_) | Op::Iota(_) => 1.0,
        Op::BroadcastInDim(_) | Op::Reshape(_) => OVERHEAD / 4.0,
        Op::Slice(_) => 2.0 * result.bytes() as f64 + OVERHEAD,
        Op::DotGeneral(_) | Op::Convolution(_) | Op::GroupedDot(_) | Op::GroupedOuter(_) => {
            bytes + op.flop(operands, result) as f64 / FLOP_PER_BYTE + OVERHEAD
        }
        // A composite reads its operands and writes its result, and values inside stay on the chip. Only the work of
        // its matmuls counts, as it does in the decomposition.
        Op::Composite(composite) => {
            let work = composite.body(operands).map_or(0, |body| {
                let products = body.graph.values().filter(|v| body.graph.node(*v).op.is_contraction());
                products.map(|v| body.graph.flop(v)).fold(0, u64::saturating_add)
            });
            bytes + work as f64 / FLOP_PER_BYTE + OVERHEAD
        }
        _ => bytes + OVERHEAD,
    }
}

/// The choice for a class: a term, its total cost, and all classes that it needs with the costs of their own terms.
struct Best {
    total: f64,
    term: Term,
    needs: Vec<(Id, f64)>,
}

/// Finds the cheapest term of each class in rounds, until none gets cheaper. A class that is needed twice is paid once,
/// so costs are sums over sets of classes. The choice is greedy, because the cheapest set of all is hard to find. A
/// term that needs its own class cannot compute it. The classes in `from` are computed from the class that they map to.
fn cheapest(builder: &Builder, from: &BTreeMap<Id, Id>) -> HashMap<Id, Best> {
    let egraph = &builder.egraph;
    let mut ids: Vec<Id> = egraph.classes().map(|c| c.id).collect();
    ids.sort_unstable();
    let mut own: HashMap<&Term, f64> = HashMap::new();
    for &id in &ids {
        for term in &egraph[id].nodes {
            let types: Vec<_> = term.children.iter().map(|&c| builder.ty(c)).collect();
            let types: Vec<&TensorType> = types.iter().map(|t| &**t).collect();
            own.insert(term, builder.meaning(term).map_or(0.0, |op| cost(&op, &types, &builder.ty(id))));
        }
    }
    let mut best: HashMap<Id, Best> = HashMap::new();
    for _ in 0..MAX_ROUNDS {
        let mut changed = false;
        for &id in &ids {
            for term in &egraph[id].nodes {
                let children: Vec<Id> = term.children.iter().map(|&c| egraph.find(c)).collect();
                let barred = from.get(&id).is_some_and(|source| !children.contains(source));
                if barred || !children.iter().all(|c| best.contains_key(c)) {
                    continue;
                }
                let mut needs = vec![(id, own[term])];
                for child in &children {
                    needs = union(&needs, &best[child].needs);
                }
                // A class that needs itself would appear there with another term's cost.
                if children.iter().any(|c| best[c].needs.binary_search_by_key(&id, |n| n.0).is_ok()) {
                    continue;
                }
                let total: f64 = needs.iter().map(|n| n.1).sum();
                let better = match best.get(&id) {
                    None => true,
                    Some(known) => total < known.total * (1.0 - 1e-9),
                };
                if better {
                    best.insert(id, Best { total, term: term.clone(), needs });
                    changed = true;
                }
            }
        }
        if !changed {
            break;
        }
    }
    best
}

/// The largest number of rounds of choosing. The choice so far is always valid.
const MAX_ROUNDS: usize = 40;

/// The union of both sets, which are sorted.
fn union(a: &[(Id, f64)], b: &[(Id, f64)]) -> Vec<(Id, f64)> {
    let mut all = Vec::with_capacity(a.len() + b.len());
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        match a[i].0.cmp(&b[j].0) {
            std::cmp::Ordering::Less => {
                all.push(a[i]);
                i += 1;
            }
            order => {
                all.push(b[j]);
                j += 1;
                i += usize::from(order.is_eq());
            }
        }
    }
    all.extend_from_slice(&a[i..]);
    all.extend_from_slice(&b[j..]);
    all
}

/// The total cost of all `outputs`, or `None` if they cannot be computed.
fn total(builder: &Builder, best: &HashMap<Id, Best>, outputs: &[Id]) -> Option<f64> {
    let mut needs = Vec::new();
    for output in outputs {
        needs = union(&needs, &best.get(&builder.egraph.find(*output))?.needs);
    }
    Some(needs.iter().map(|n| n.1).sum())
}

/// The cheapest terms for these outputs. A term that pays only if several classes share it is never the cheapest for
/// one of them. So parallel matmuls are tried as a single one, stack by stack.
fn chosen(builder: &Builder, outputs: &[Id]) -> HashMap<Id, Best> {
    let mut from = BTreeMap::new();
    let mut best = cheapest(builder, &from);
    for stack in &builder.stacks {
        let mut with = from.clone();
        with.extend(stack.parts.iter().map(|&(part, slice)| (builder.egraph.find(part), builder.egraph.find(slice))));
        let other = cheapest(builder, &with);
        let costs = [&best, &other].map(|b| total(builder, b, outputs));
        if let [Some(now), Some(then)] = costs
            && then < now * (1.0 - 1e-9)
        {
            (best, from) = (other, with);
        }
    }
    best
}

pub(crate) fn extract(builder: &Builder, outputs: &[Id]) -> Rewritten {
    let best = chosen(builder, outputs);
    let mut rewritten = Rewritten { nodes: Vec::new(), outputs: Vec::new() };
    let mut done: BTreeMap<Id, Child> = BTreeMap::new();
    for &output in outputs {
        let child = visit(builder, &best, output, &mut rewritten.nodes, &mut done);
        rewritten.outputs.push(child);
    }
    rewritten
}

/// Writes a class after its children. The stack is explicit, because chains may be long.
fn visit(
    builder: &Builder,
    best: &HashMap<Id, Best>,
    root: Id,
    nodes: &mut Vec<New>,
    done: &mut BTreeMap<Id, Child>,
) -> Child {
    let root = builder.egraph.find(root);
    let mut stack = vec![root];
    while let Some(&id) = stack.last() {
        if done.contains_key(&id) {
            stack.pop();
            continue;
        }
        let term = &best[&id].term;
        let children: Vec<Id> = term.children.iter().map(|&c| builder.egraph.find(c)).collect();
        let open: Vec<Id> = children.iter().copied().filter(|c| !done.contains_key(c)).collect();
        if !open.is_empty() {
            stack.extend(open.into_iter().rev());
            continue;
        }
        stack.pop();
        let data = builder.data(id);
        let child = match builder.meaning(term) {
            Err(leaf) => Child::Leaf(leaf),
            Ok(op) => {
                nodes.push(New {
                    op: (*op).clone(),
                    children: children.iter().map(|c| done[c]).collect(),
                    ty: (*data.ty).clone(),
                    batch_dims: data.batch_dims,
                    name: data.name,
                });
                Child::Node(nodes.len() - 1)
            }
        };
        done.insert(id, child);
    }
    done[&root]
}
