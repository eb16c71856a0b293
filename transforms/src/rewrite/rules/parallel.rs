//! Joins matmuls of one value with weights of one shape into a single matmul with stacked weights. Examples are
//! queries, keys and values, or both halves of a gated perceptron.
//!
//! The stack is a new dimension, so an axis that splits the columns of each weight splits those of the stack. This pays
//! if the value is large compared to its products, because the weights are copied. Extraction decides for all of the
//! products together.

use super::super::egraph::{Builder, Stack};
use altiplano_ir::op::{Concatenate, DotGeneral, Op, Slice};
use egg::Id;

fn matmuls(b: &Builder, id: Id) -> Vec<(DotGeneral, Id, Id)> {
    b.find(id, |op, c| match op {
        Op::DotGeneral(dot) => Some((dot.clone(), c[0], c[1])),
        _ => None,
    })
}

/// The classes that are this matmul of `x` with a weight of the type of `weight`, each with its weight.
fn alike(b: &Builder, dot: &DotGeneral, x: Id, weight: Id) -> Vec<(Id, Id)> {
    let ty = b.ty(weight);
    let mut all: Vec<(Id, Id)> = Vec::new();
    for user in b.users(x) {
        for (other, lhs, rhs) in matmuls(b, user) {
            let rhs = b.egraph.find(rhs);
            let known = all.iter().any(|(id, w)| *id == user || *w == rhs);
            if !known && other == *dot && b.same(lhs, x) && b.ty(rhs) == ty && b.data(rhs).batch_dims == 0 {
                all.push((user, rhs));
            }
        }
    }
    all
}

/// `x w1`, `x w2`, .. are parts of `x [w1, w2, ..]`.
pub(crate) fn parallel_matmuls(b: &mut Builder, id: Id) -> Vec<Id> {
    let id = b.egraph.find(id);
    let mut found = Vec::new();
    for (dot, x, weight) in matmuls(b, id) {
        if b.data(weight).batch_dims != 0 {
            continue;
        }
        let parts = alike(b, &dot, x, weight);
        if parts.len() < 2 || !parts.iter().any(|(part, _)| *part == id) {
            continue;
        }
        let of_stack = |stack: &Stack| {
            let at = stack.parts.iter().position(|(part, _)| b.same(*part, id))?;
            let all = stack.parts.len() == parts.len()
                && parts.iter().all(|(p, _)| stack.parts.iter().any(|(q, _)| b.same(*p, *q)));
            (all && stack.matmul == dot && b.same(stack.x, x)).then(|| stack.parts[at].1)
        };
        let known = b.stacks.iter().find_map(of_stack);
        let slice = match known {
            Some(slice) => Some(slice),
            None => stacked(b, &dot, x, &parts).and_then(|stack| {
                let slice = stack.parts.iter().find(|(part, _)| *part == id).map(|(_, slice)| *slice);
                b.stacks.push(stack);
                slice
            }),
        };
        let shape = b.shape(id);
        found.extend(slice.and_then(|slice| b.reshape(slice, &shape)));
    }
    found
}

fn stacked(b: &mut Builder, dot: &DotGeneral, x: Id, parts: &[(Id, Id)]) -> Option<Stack> {
    let mut weights = Vec::with_capacity(parts.len());
    for &(_, weight) in parts {
        let one = [&[1], b.shape(weight).as_slice()].concat();
        weights.push(b.reshape(weight, &one)?);
    }
    let weights = b.add(Op::Concatenate(Concatenate { dim: 0 }), &weights)?;
    let behind = |dims: &[usize]| dims.iter().map(|d| d + 1).collect::<Vec<usize>>();
    let matmul =
        DotGeneral { rhs_batch: behind(&dot.rhs_batch), rhs_contract: behind(&dot.rhs_contract), ..dot.clone() };
    let product = b.add(Op::DotGeneral(matmul), &[x, weights])?;
    // Its dimensions are the batch, the free ones of `x`, the stack, and the free ones of the weights.
    let stack = dot.lhs_batch.len() + dot.lhs_free(b.shape(x).len()).len();
    let whole = b.shape(product);
    let mut slices = Vec::with_capacity(parts.len());
    for (i, &(part, _)) in parts.iter().enumerate() {
        let (mut start, mut limit) = (vec![0; whole.len()], whole.clone());
        (start[stack], limit[stack]) = (i as u64, i as u64 + 1);
        let slice = b.add(Op::Slice(Slice { start, limit, stride: vec![1; whole.len()] }), &[product])?;
        slices.push((part, slice));
    }
    Some(Stack { matmul: dot.clone(), x, parts: slices })
}
