//! Bounds on the values of inputs. For integers, it is the number of rows of the tables that they index, found in the
//! graph. So synthetic batches are meaningful, and wrong data is rejected instead of clamped.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Direction, Op, Unary};
use std::collections::BTreeSet;

/// An exclusive upper bound on the values of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The table that the values index: a parameter's name, or else the value. `None` if they index nothing, so that
    /// larger ones are allowed.
    pub table: Option<String>,
    pub rows: u64,
}

/// The smallest dimension that the values of a leaf index, through a lookup or by equality with an iota (a one-hot).
/// Values that are only ordered against an iota, such as lengths for a mask, index nothing: all values up to the size
/// itself differ in effect.
pub fn bound(graph: &Graph, leaf: ValueId) -> Option<Bound> {
    let users = graph.users();
    let mut best: Option<Bound> = None;
    let mut ordered: Option<u64> = None;
    let mut consider = |table: String, rows: u64| {
        if best.as_ref().is_none_or(|b| rows < b.rows) {
            best = Some(Bound { table: Some(table), rows });
        }
    };
    // Values that hold the leaf's, and their position in an index vector.
    let mut pending = vec![(leaf, 0usize)];
    let mut seen = BTreeSet::new();
    while let Some((value, component)) = pending.pop() {
        if !seen.insert((value, component)) {
            continue;
        }
        for &user in &users[value.index()] {
            let node = graph.node(user);
            let position = node.operands.iter().position(|&o| o == value).unwrap_or(0);
            match &node.op {
                Op::Gather(gather) if position == 1 => {
                    let table = node.operands[0];
                    if let Some(&dim) = gather.dims.start_index_map.get(component) {
                        consider(name(graph, table), graph.shape(table)[dim]);
                    }
                }
                Op::Compare(compare) => {
                    let equality = matches!(compare.direction, Direction::Eq | Direction::Ne);
                    match counted(graph, node.operands[1 - position]) {
                        Some(rows) if equality => consider(user.to_string(), rows),
                        Some(rows) => ordered = Some(ordered.map_or(rows, |least| least.min(rows))),
                        None => {}
                    }
                }
                Op::Concatenate(concatenate) => {
                    let before = &node.operands[..position];
                    let offset: u64 = before.iter().map(|&o| graph.shape(o)[concatenate.dim]).sum();
                    pending.push((user, component + offset as usize));
                }
                Op::Select(_) if position > 0 => pending.push((user, component)),
                Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Transpose(_) | Op::Slice(_) => {
                    pending.push((user, component));
                }
                _ => {}
            }
        }
    }
    best.or(ordered.map(|count| Bound { table: None, rows: count.saturating_add(1) }))
}

/// The transformation of normal numbers into an input's floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Floats {
    Any,
    /// Their absolute values.
    Positive,
    /// Close to 1, as a variance or a gain.
    NearOne,
    /// Close to 0, as a mean or a bias.
    NearZero,
}

/// Spread around 1 or 0. The values are not exactly 1 and 0, because an error in a plan's use of them would not show.
const NEAR: f64 = 0.1;

impl Floats {
    /// Chooses an input's floats. A sample's floats may be any numbers, but are positive under a root. Missing inputs
    /// that are the same for all samples are statistics: arbitrary values would make activations grow from layer to
    /// layer.
    pub(crate) fn of(graph: &Graph, input: ValueId) -> Floats {
        let of_samples = graph.node(input).batch_dims != 0;
        match is_under_root(graph, input) {
            true if of_samples => Floats::Positive,
            true => Floats::NearOne,
            false if of_samples => Floats::Any,
            false => first_meeting(graph, input),
        }
    }

    pub(crate) fn made_of(self, normal: f64) -> f64 {
        match self {
            Floats::Any => normal,
            Floats::Positive => normal.abs(),
            Floats::NearOne => (1.0 + NEAR * normal).abs(),
            Floats::NearZero => NEAR * normal,
        }
    }
}

/// A factor of samples is close to one, and a summand close to zero. A factor of another such input, like the mean in
/// `x gain + (bias - mean gain)`, is classified like their product.
fn first_meeting(graph: &Graph, leaf: ValueId) -> Floats {
    let users = graph.users();
    let mut v = leaf;
    while let [user, ..] = users[v.index()][..] {
        let node = graph.node(user);
        match &node.op {
            Op::Binary(Binary::Multiply) if node.batch_dims != 0 => return Floats::NearOne,
            Op::Binary(Binary::Add | Binary::Subtract) => return Floats::NearZero,
            Op::Binary(Binary::Multiply) | Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Convert(_) => v = user,
            _ => return Floats::Any,
        }
    }
    Floats::Any
}

/// Returns whether a root is taken of an input, alone or with a constant added, as for a variance.
fn is_under_root(graph: &Graph, leaf: ValueId) -> bool {
    let users = graph.users();
    let mut pending = vec![leaf];
    while let Some(value) = pending.pop() {
        for &user in &users[value.index()] {
            let node = graph.node(user);
            let constant = |o: &ValueId| *o == value || matches!(graph.node(*o).op, Op::Constant(_));
            match &node.op {
                Op::Unary(Unary::Sqrt | Unary::Rsqrt) => return true,
                Op::Binary(Binary::Add) if node.operands.iter().all(constant) => pending.push(user),
                Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_) => pending.push(user),
                _ => {}
            }
        }
    }
    false
}

/// The size that a value counts up to, if it is equivalent to an iota.
fn counted(graph: &Graph, value: ValueId) -> Option<u64> {
    match &graph.node(value).op {
        Op::Iota(iota) => Some(iota.ty.shape[iota.dim]),
        Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Transpose(_) => {
            counted(graph, graph.node(value).operands[0])
        }
        _ => None,
    }
}

fn name(graph: &Graph, value: ValueId) -> String {
    match &graph.node(value).op {
        Op::Parameter(p) => format!("'{}'", p.name),
        Op::Convert(_) => name(graph, graph.node(value).operands[0]),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::op::{Gather, GatherDims, Input, Iota, OutOfBounds};
    use altiplano_ir::types::TensorType;

    fn input(g: &mut Graph, name: &str, shape: &[u64], batch_dims: u32) -> ValueId {
        let ty = TensorType::new(DType::F32, shape);
        let v = g.emit(Op::Input(Input { name: name.into(), ty }), &[]);
        g.nodes[v.index()].batch_dims = batch_dims;
        v
    }

    /// Lengths may be as large as their limit; indices may not.
    #[test]
    fn lengths_are_told_from_indices() {
        for (direction, expected) in [
            (Direction::Lt, Bound { table: None, rows: 6 }),
            (Direction::Ge, Bound { table: None, rows: 6 }),
            (Direction::Eq, Bound { table: Some("%3".into()), rows: 5 }),
        ] {
            let mut g = Graph::new("lengths");
            let ty = TensorType::new(DType::I32, [4]);
            let lengths = g.emit(Op::Input(Input { name: "lengths".into(), ty: ty.clone() }), &[]);
            let places = g.emit(Op::Iota(Iota { ty: ty.with_shape(vec![4, 5]), dim: 1 }), &[]);
            let of_each = g.broadcast(lengths, &[4, 5], &[0]);
            g.compare(direction, places, of_each);
            assert_eq!(bound(&g, lengths), Some(expected), "{direction:?}");
            // A lookup gives a tighter bound.
            let table = input(&mut g, "table", &[7, 2], 0);
            let dims = GatherDims::rows(&[7, 2], 1);
            let at = g.reshape(lengths, &[4, 1]);
            g.emit(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[table, at]);
            let rows = if direction == Direction::Eq { 5 } else { 7 };
            assert_eq!(bound(&g, lengths).map(|b| (b.table.is_some(), b.rows)), Some((true, rows)), "{direction:?}");
        }
    }

    /// Broadcasts `v` to each sample.
    fn rows(g: &mut Graph, v: ValueId) -> ValueId {
        marked(g, |g| g.broadcast(v, &[4, 3], &[1]))
    }

    fn marked(g: &mut Graph, build: impl FnOnce(&mut Graph) -> ValueId) -> ValueId {
        let v = build(g);
        g.nodes[v.index()].batch_dims = 1;
        v
    }

    /// `(x - mean) gain` and `x gain + (bias - mean gain)`, where `gain = table / sqrt(variance)`.
    #[test]
    fn statistics_are_told_from_samples() {
        for folded in [false, true] {
            let mut g = Graph::new("norm");
            let [x, spread] = ["x", "spread"].map(|name| input(&mut g, name, &[4, 3], 1));
            let [mean, variance, table, bias] =
                ["mean", "variance", "table", "bias"].map(|name| input(&mut g, name, &[3], 0));
            let other = input(&mut g, "other", &[3, 3], 0);
            let root = g.unary(Unary::Rsqrt, variance);
            let gain = g.mul(table, root);
            let of_each = rows(&mut g, gain);
            if folded {
                let scaled = marked(&mut g, |g| g.mul(x, of_each));
                let moved = g.mul(mean, gain);
                let shift = g.sub(bias, moved);
                let of_each = rows(&mut g, shift);
                marked(&mut g, |g| g.add(scaled, of_each));
            } else {
                let of_mean = rows(&mut g, mean);
                let centred = marked(&mut g, |g| g.sub(x, of_mean));
                let scaled = marked(&mut g, |g| g.mul(centred, of_each));
                let of_bias = rows(&mut g, bias);
                marked(&mut g, |g| g.add(scaled, of_bias));
            }
            marked(&mut g, |g| g.unary(Unary::Sqrt, spread));
            let expected = [
                (x, Floats::Any),
                (spread, Floats::Positive),
                (mean, Floats::NearZero),
                (variance, Floats::NearOne),
                (table, Floats::NearOne),
                (bias, Floats::NearZero),
                (other, Floats::Any),
            ];
            for (v, floats) in expected {
                assert_eq!(Floats::of(&g, v), floats, "{v}, folded: {folded}");
            }
        }
        let made = [Floats::NearOne, Floats::NearZero, Floats::Positive].map(|f| f.made_of(-2.0));
        assert!(made.iter().zip([0.8, -0.2, 2.0]).all(|(a, b)| (a - b).abs() < 1e-12), "{made:?}");
    }
}
