//! Takes the cheapest way to compute a region's results out of its e-graph.

use super::egraph::{Builder, Term};
use super::region::{Child, New, Rewritten};
use crate::op::{Op, Operator};
use crate::types::TensorType;
use egg::Id;
use std::collections::{BTreeMap, HashMap};

/// Work that a device does in the time in which it moves a byte, about: 10^14 FLOP/s at 10^12 bytes/s.
const FLOP_PER_BYTE: f64 = 100.0;

/// What every op costs beside its work, in bytes.
const OVERHEAD: f64 = 4096.0;

/// Estimated cost of an op, in bytes moved. Ops that move nothing cost a little, so that fewer of them are better.
fn cost(op: &Op, operands: &[&TensorType], result: &TensorType) -> f64 {
    let bytes = operands.iter().map(|t| t.bytes()).sum::<u64>() as f64 + result.bytes() as f64;
    match op {
        Op::Constant(_) | Op::Iota(_) => 1.0,
        Op::BroadcastInDim(_) | Op::Reshape(_) => OVERHEAD / 4.0,
        // A composite reads its operands and writes its result; what is inside stays near the device's units.
        Op::DotGeneral(_) | Op::Convolution(_) | Op::Composite(_) => {
            bytes + op.flop(operands, result) as f64 / FLOP_PER_BYTE + OVERHEAD
        }
        _ => bytes + OVERHEAD,
    }
}

/// The cheapest term of each class, costs of shared parts counted where they are used: by rounds, until none gets cheaper.
fn cheapest(builder: &Builder) -> HashMap<Id, (f64, Term)> {
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
    let mut best: HashMap<Id, (f64, Term)> = HashMap::new();
    loop {
        let mut changed = false;
        for &id in &ids {
            for term in &egraph[id].nodes {
                let children: Option<f64> =
                    term.children.iter().map(|&c| best.get(&egraph.find(c)).map(|(cost, _)| *cost)).sum();
                let Some(total) = children.map(|c| c + own[term]) else { continue };
                let better = match best.get(&id) {
                    None => true,
                    Some((known, old)) => total < known * (1.0 - 1e-12) || total == *known && term < old,
                };
                if better {
                    best.insert(id, (total, term.clone()));
                    changed = true;
                }
            }
        }
        if !changed {
            return best;
        }
    }
}

pub fn extract(builder: &Builder, outputs: &[Id]) -> Rewritten {
    let best = cheapest(builder);
    let mut rewritten = Rewritten { nodes: Vec::new(), outputs: Vec::new() };
    let mut done: BTreeMap<Id, Child> = BTreeMap::new();
    for &output in outputs {
        let child = visit(builder, &best, output, &mut rewritten.nodes, &mut done);
        rewritten.outputs.push(child);
    }
    rewritten
}

/// Writes a class after its children. The stack is explicit: chains may be long.
fn visit(
    builder: &Builder,
    best: &HashMap<Id, (f64, Term)>,
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
        let term = &best[&id].1;
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
