//! Small exact clean-ups for every graph. Constants are folded into their broadcasts. Chains of broadcasts, reshapes,
//! slices and transposes become one op. Neutral elements vanish, equal nodes are shared, and dead ones are removed.
//!
//! The result computes the same values bit for bit (constants are folded in the precision of their own type).

use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::literal::Literal;
use crate::op::{Binary, BroadcastInDim, Op, Slice, Threefry, ThreefryWord, Transpose};
use crate::rng::is_sample_index;
use crate::types::TensorType;
use std::collections::BTreeMap;

/// The simplified graph. All leaves stay in order, used or not.
pub fn simplify(graph: &Graph) -> Graph {
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut seen: BTreeMap<(String, Vec<ValueId>, u32), ValueId> = BTreeMap::new();
    // Counts of random bits are computed where they are used, which is cheaper than keeping and sending them.
    let mut is_count: Vec<bool> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        let mut node = Node { operands, ..node.clone() };
        let value = loop {
            match rewrite(&to, &node) {
                Rewrite::Keep => {
                    let key = (format!("{:?} {}", node.op, node.ty), node.operands.clone(), node.batch_dims);
                    break match seen.get(&key) {
                        Some(&same) if !node.op.is_leaf() => same,
                        _ => {
                            let counted = |o: &ValueId| is_count[o.index()] || is_sample_index(&to, *o);
                            let only = node.operands.iter().all(|o| counted(o) || literal(&to, *o).is_some());
                            let count = only && node.operands.iter().any(counted);
                            let value = to.append(node);
                            is_count.push(count);
                            if !count {
                                seen.insert(key, value);
                            }
                            value
                        }
                    };
                }
                Rewrite::Value(value) => break value,
                Rewrite::Node(op, operands) => {
                    node.op = op;
                    node.operands = operands;
                }
            }
        };
        map.push(value);
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| Some(map[v.index()]));
    without_dead_nodes(&to)
}

/// The graph without nodes that no output needs. Leaves stay.
pub fn without_dead_nodes(graph: &Graph) -> Graph {
    let mut live = vec![false; graph.len()];
    graph.outputs.iter().for_each(|o| live[o.index()] = true);
    for v in graph.values().rev() {
        if live[v.index()] {
            graph.node(v).operands.iter().for_each(|o| live[o.index()] = true);
        } else if graph.node(v).op.is_leaf() {
            live[v.index()] = true;
        }
    }
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map = vec![ValueId(u32::MAX); graph.len()];
    for v in graph.values().filter(|v| live[v.index()]) {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        map[v.index()] = to.append(Node { operands, ..node.clone() });
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| live[v.index()].then(|| map[v.index()]));
    to
}

enum Rewrite {
    Keep,
    /// The node equals an existing value.
    Value(ValueId),
    /// The node equals another op on existing values.
    Node(Op, Vec<ValueId>),
}

fn rewrite(graph: &Graph, node: &Node) -> Rewrite {
    let operand = |i: usize| node.operands[i];
    let splat = |i: usize| literal(graph, operand(i)).and_then(|l| l.as_splat().filter(|_| l.batch_power == 0));
    let is_empty = |v: ValueId| graph.ty(v).elements() == 0;
    match &node.op {
        // Values without elements are all the same, and what is made of them needs none of them.
        op if node.ty.elements() == 0 && !op.is_leaf() && !matches!(op, Op::Constant(_)) => constant(&node.ty, 0.0),
        Op::Concatenate(_) if node.operands.iter().any(|&o| is_empty(o)) => {
            let rest = node.operands.iter().copied().filter(|&o| !is_empty(o)).collect();
            Rewrite::Node(node.op.clone(), rest)
        }
        Op::Reduce(op) if is_empty(operand(0)) => constant(&node.ty, op.reducer.neutral(node.ty.dtype)),
        Op::DotGeneral(_) if is_empty(operand(0)) => constant(&node.ty, 0.0),
        Op::Pad(_) if is_empty(operand(0)) => {
            let spread = BroadcastInDim { shape: node.ty.shape.clone(), dims: Vec::new() };
            Rewrite::Node(Op::BroadcastInDim(spread), vec![operand(1)])
        }
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Convert(_)
            if *graph.ty(operand(0)) == node.ty && keeps_order(&node.op) =>
        {
            Rewrite::Value(operand(0))
        }
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Convert(_)
            if literal(graph, operand(0)).is_some_and(|l| l.as_splat().is_some()) =>
        {
            match literal(graph, operand(0)) {
                Some(l) => {
                    let value = rounded(l.as_splat().unwrap_or(0.0), l.ty.dtype, node.ty.dtype);
                    let folded = Literal { batch_power: l.batch_power, ..Literal::splat(node.ty.clone(), value) };
                    Rewrite::Node(Op::Constant(folded), Vec::new())
                }
                None => Rewrite::Keep,
            }
        }
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) => merged(&node.op, graph.node(operand(0))),
        Op::Unary(op) => match splat(0) {
            Some(x) => constant(&node.ty, op.apply(x, graph.ty(operand(0)).dtype)),
            None => Rewrite::Keep,
        },
        Op::Binary(Binary::Xor) if both_words(graph, operand(0), operand(1)) => {
            let operands = graph.node(operand(0)).operands.clone();
            Rewrite::Node(Op::Threefry(Threefry { word: ThreefryWord::Xor }), operands)
        }
        Op::Slice(slice) if *graph.ty(operand(0)) == node.ty && slice.stride.iter().all(|s| *s == 1) => {
            Rewrite::Value(operand(0))
        }
        Op::Slice(slice) => match graph.node(operand(0)) {
            Node { op: Op::Slice(inner), operands, .. } => {
                Rewrite::Node(Op::Slice(nested(inner, slice)), operands.clone())
            }
            Node { op: Op::Concatenate(joined), operands, .. } => match within_part(graph, joined.dim, operands, slice)
            {
                Some((slice, part)) => Rewrite::Node(Op::Slice(slice), vec![part]),
                None => Rewrite::Keep,
            },
            _ => Rewrite::Keep,
        },
        Op::Concatenate(_) if node.operands.len() == 1 => Rewrite::Value(operand(0)),
        Op::Binary(op) => match (splat(0), splat(1)) {
            (Some(a), Some(b)) => constant(&node.ty, op.apply(a, b, node.ty.dtype)),
            (a, b) => neutral(*op, node.ty.dtype, a, b).map_or(Rewrite::Keep, |i| Rewrite::Value(operand(i))),
        },
        Op::Compare(op) => match (splat(0), splat(1)) {
            (Some(a), Some(b)) => constant(&node.ty, op.direction.holds(a, b) as u8 as f64),
            _ => Rewrite::Keep,
        },
        Op::Select(_) => match splat(0) {
            Some(predicate) => Rewrite::Value(operand(if predicate != 0.0 { 1 } else { 2 })),
            None if operand(1) == operand(2) => Rewrite::Value(operand(1)),
            None => Rewrite::Keep,
        },
        _ => Rewrite::Keep,
    }
}

/// A repetition, reshape or transposition of the same as a single one.
fn merged(outer: &Op, inner: &Node) -> Rewrite {
    let op = match (outer, &inner.op) {
        (Op::BroadcastInDim(outer), Op::BroadcastInDim(inner)) => {
            let dims = inner.dims.iter().map(|&d| outer.dims[d]).collect();
            Op::BroadcastInDim(BroadcastInDim { shape: outer.shape.clone(), dims })
        }
        (Op::Reshape(_), Op::Reshape(_)) => outer.clone(),
        (Op::Transpose(outer), Op::Transpose(inner)) => {
            let permutation = outer.permutation.iter().map(|&d| inner.permutation[d]).collect();
            Op::Transpose(Transpose { permutation })
        }
        _ => return Rewrite::Keep,
    };
    Rewrite::Node(op, inner.operands.clone())
}

/// The operand that equals the result, because the other is neutral: `a` or `b`, if it is the same number everywhere.
fn neutral(op: Binary, dtype: DType, a: Option<f64>, b: Option<f64>) -> Option<usize> {
    let is = |x: Option<f64>, number: f64| x == Some(number);
    match op {
        Binary::Add | Binary::Or if is(a, 0.0) => Some(1),
        Binary::Add | Binary::Subtract | Binary::Or if is(b, 0.0) => Some(0),
        Binary::Multiply if is(a, 1.0) => Some(1),
        Binary::Multiply | Binary::Divide if is(b, 1.0) => Some(0),
        Binary::Maximum if dtype.is_float() && is(a, f64::NEG_INFINITY) => Some(1),
        Binary::Maximum if dtype.is_float() && is(b, f64::NEG_INFINITY) => Some(0),
        Binary::Minimum if dtype.is_float() && is(a, f64::INFINITY) => Some(1),
        Binary::Minimum if dtype.is_float() && is(b, f64::INFINITY) => Some(0),
        Binary::And if dtype == DType::Bool && is(a, 1.0) => Some(1),
        Binary::And if dtype == DType::Bool && is(b, 1.0) => Some(0),
        _ => None,
    }
}

/// Returns true if the values are the two words of one cipher, in either order.
fn both_words(graph: &Graph, a: ValueId, b: ValueId) -> bool {
    let word = |v: ValueId| match &graph.node(v).op {
        Op::Threefry(Threefry { word }) => Some(*word),
        _ => None,
    };
    let words = [word(a), word(b)];
    let both = words == [Some(ThreefryWord::First), Some(ThreefryWord::Second)]
        || words == [Some(ThreefryWord::Second), Some(ThreefryWord::First)];
    both && graph.node(a).operands == graph.node(b).operands
}

/// A slice of a slice as a single slice.
fn nested(inner: &Slice, outer: &Slice) -> Slice {
    let mut slice = inner.clone();
    for d in 0..slice.start.len() {
        slice.start[d] = inner.start[d] + outer.start[d] * inner.stride[d];
        slice.stride[d] = inner.stride[d] * outer.stride[d];
        let kept = (outer.limit[d] - outer.start[d]).div_ceil(outer.stride[d]);
        // The limit is just after the last element, so that it stays inside the operand.
        slice.limit[d] = slice.start[d] + if kept == 0 { 0 } else { (kept - 1) * slice.stride[d] + 1 };
        if kept <= 1 {
            slice.stride[d] = 1;
        }
        if kept == 0 {
            (slice.start[d], slice.limit[d]) = (0, 0);
        }
    }
    slice
}

/// The slice within the single part of a concatenation that contains it, and that part.
fn within_part(graph: &Graph, dim: usize, parts: &[ValueId], slice: &Slice) -> Option<(Slice, ValueId)> {
    let mut from = 0;
    for &part in parts {
        let to = from + graph.shape(part)[dim];
        if slice.start[dim] >= from && slice.limit[dim] <= to && slice.start[dim] < slice.limit[dim] {
            let mut slice = slice.clone();
            slice.start[dim] -= from;
            slice.limit[dim] -= from;
            return Some((slice, part));
        }
        from = to;
    }
    None
}

fn literal(graph: &Graph, v: ValueId) -> Option<&Literal> {
    match &graph.node(v).op {
        Op::Constant(l) => Some(l),
        _ => None,
    }
}

fn constant(ty: &TensorType, value: f64) -> Rewrite {
    let value = rounded(value, DType::F64, ty.dtype);
    Rewrite::Node(Op::Constant(Literal::splat(ty.clone(), value)), Vec::new())
}

/// Returns true if an op whose operand has the result's type is the identity, i.e. moves no elements.
fn keeps_order(op: &Op) -> bool {
    match op {
        Op::Transpose(t) => t.permutation.is_sorted(),
        Op::BroadcastInDim(b) => b.dims.is_sorted(),
        _ => true,
    }
}

/// `value` rounded to the nearest value of type `to`.
pub fn rounded(value: f64, from: DType, to: DType) -> f64 {
    to.round(if from.is_float() && to.is_integer() { value.trunc() } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: &str) {
        let graph = |body: &str| {
            let lines: Vec<String> =
                body.lines().enumerate().map(|(i, line)| format!("%{i}: {}", line.trim())).collect();
            let text = format!("graph \"g\" {{\n{}\n}} -> (%{})", lines.join("\n"), lines.len() - 1);
            crate::text::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
        };
        let (before, after) = (graph(body), graph(expected));
        assert_eq!(simplify(&before).to_string(), after.to_string(), "{body}");
    }

    #[test]
    fn slices_find_what_they_take() {
        let leaves = "f32[6] = input \"x\"\nf32[4] = input \"y\"";
        let slice = |start: u64, limit: u64, stride: u64| {
            format!("{{\"start\":[{start}],\"limit\":[{limit}],\"stride\":[{stride}]}}")
        };
        let joined = format!("{leaves}\nf32[10] = concatenate(%0, %1) {{\"dim\":0}}");
        for (body, expected) in [
            (
                format!("{leaves}\nf32[5] = slice(%0) {}\nf32[2] = slice(%2) {}", slice(1, 6, 1), slice(1, 5, 2)),
                format!("{leaves}\nf32[2] = slice(%0) {}", slice(2, 5, 2)),
            ),
            (
                format!("{leaves}\nf32[3] = slice(%0) {}\nf32[1] = slice(%2) {}", slice(1, 6, 2), slice(1, 2, 1)),
                format!("{leaves}\nf32[1] = slice(%0) {}", slice(3, 4, 1)),
            ),
            (
                format!("{joined}\nf32[3] = slice(%2) {}", slice(7, 10, 1)),
                format!("{leaves}\nf32[3] = slice(%1) {}", slice(1, 4, 1)),
            ),
            (
                format!("{joined}\nf32[4] = slice(%2) {}", slice(4, 8, 1)),
                format!("{joined}\nf32[4] = slice(%2) {}", slice(4, 8, 1)),
            ),
            (
                format!("{joined}\nf32[6] = slice(%2) {}\nf32[6] = negate(%3)", slice(0, 6, 1)),
                format!("{leaves}\nf32[6] = negate(%0)"),
            ),
        ] {
            check(&body, &expected);
        }
    }

    #[test]
    fn values_without_elements_are_not_computed() {
        let leaves = "f32[2,4] = input \"x\"\nf32[] = input \"y\"";
        let none = "f32[2,0] = slice(%0) {\"start\":[0,4],\"limit\":[2,4]}\nf32[2,0] = negate(%2)";
        for (op, expected) in [
            ("f32[2,4] = concatenate(%3, %0, %2) {\"dim\":1}\nf32[2,4] = negate(%4)", "f32[2,4] = negate(%0)"),
            ("f32[2] = reduce(%3) {\"reducer\":\"max\",\"dims\":[1]}", "f32[2] = constant {\"value\":\"-inf\"}"),
            (
                "f32[2,3] = pad(%3, %1) {\"low\":[0,1],\"high\":[0,2],\"interior\":[0,0]}",
                "f32[2,3] = broadcast_in_dim(%1) {\"dims\":[]}",
            ),
        ] {
            check(&format!("{leaves}\n{none}\n{op}"), &format!("{leaves}\n{expected}"));
        }
    }

    #[test]
    fn both_words_of_the_cipher_are_one_op() {
        let leaves = "u32[2] = input \"a\"\nu32[2] = input \"b\"";
        let cipher = |word: &str, operands: &str| format!("u32[2] = threefry({operands}) {{\"word\":\"{word}\"}}");
        let (first, second) = (cipher("first", "%0, %1, %0, %1"), cipher("second", "%0, %1, %0, %1"));
        let one = format!("{leaves}\n{}", cipher("xor", "%0, %1, %0, %1"));
        for operands in ["%2, %3", "%3, %2"] {
            check(&format!("{leaves}\n{first}\n{second}\nu32[2] = xor({operands})"), &one);
        }
        let others = format!("{leaves}\n{first}\n{}\nu32[2] = xor(%2, %3)", cipher("second", "%0, %1, %1, %0"));
        check(&others, &others);
        let same = format!("{leaves}\n{first}\nu32[2] = xor(%2, %2)");
        check(&same, &same);
    }
}
