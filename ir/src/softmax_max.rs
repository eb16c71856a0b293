//! Maxima that are subtracted only for numerical range.
//!
//! Softmax, log-softmax and log-sum-exp subtract the maximum of their operand. Their value does not depend on what is
//! subtracted, so the gradient through the maximum is exactly zero and need not be computed. Frameworks stop that
//! gradient, but an exported graph no longer says so.
//!
//! This module detects such maxima by following the derivative with respect to the maximum forwards. It is a constant
//! along differences. It is a constant times the value itself through an exponential, its sums and products. It is a
//! constant again after a logarithm. If it cancels on every path, it is zero.
//!
//! The same holds for maxima of maxima, which bring parts of a softmax to one scale before they are added. A dependence
//! through an irrelevant maximum does not count.

use crate::graph::{Graph, Node, ValueId};
use crate::op::{Binary, DotGeneral, Op, Reducer, Unary};
use std::collections::BTreeMap;

/// The derivative of a value `y` with respect to the maximum of its row.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Slope {
    /// `c`
    Constant(f64),
    /// `c y`
    Proportional(f64),
}

impl Slope {
    fn is_zero(self) -> bool {
        matches!(self, Slope::Constant(c) | Slope::Proportional(c) if c == 0.0)
    }
}

/// A value that depends on the maximum, with its derivative. `rows` has, for each of its dimensions, the dimension of
/// the maximum that it runs along with. `None` means that all its elements belong to one row.
#[derive(Clone, Debug)]
struct Dependent {
    slope: Slope,
    rows: Vec<Option<usize>>,
}

/// For each value, true if it is a maximum with respect to which the derivative of every result is zero.
pub fn irrelevant_maxima(graph: &Graph) -> Vec<bool> {
    let users = graph.users();
    let is_maximum = |v: ValueId| match &graph.node(v).op {
        Op::Reduce(r) => r.reducer == Reducer::Max,
        Op::Binary(op) => *op == Binary::Maximum,
        _ => false,
    };
    let mut irrelevant = vec![false; graph.len()];
    for v in graph.values().rev().filter(|&v| is_maximum(v) && graph.ty(v).dtype.is_float()) {
        irrelevant[v.index()] = cancels(graph, &users, v, &irrelevant);
    }
    irrelevant
}

/// Returns true if the derivative with respect to `maximum` vanishes on every path. `irrelevant` marks later maxima
/// that are known not to matter.
fn cancels(graph: &Graph, users: &[Vec<ValueId>], maximum: ValueId, irrelevant: &[bool]) -> bool {
    // A dimension of size 1 has one row.
    let rows = graph.shape(maximum).iter().enumerate().map(|(d, &size)| (size > 1).then_some(d)).collect();
    let mut dependents = BTreeMap::from([(maximum, Dependent { slope: Slope::Constant(1.0), rows })]);
    // Users come after their operands, so all dependent operands of the next one in order are decided.
    let mut pending: std::collections::BTreeSet<ValueId> = users[maximum.index()].iter().copied().collect();
    if graph.outputs.contains(&maximum) {
        return false;
    }
    while let Some(v) = pending.pop_first() {
        if irrelevant[v.index()] {
            continue;
        }
        match derivative(graph, &dependents, graph.node(v)) {
            None => return false,
            Some(d) if d.slope.is_zero() => {}
            Some(_) if graph.outputs.contains(&v) => return false,
            Some(d) => {
                dependents.insert(v, d);
                pending.extend(&users[v.index()]);
            }
        }
    }
    true
}

/// The derivative of a node with dependent operands. `None` if it has neither form.
fn derivative(graph: &Graph, dependents: &BTreeMap<ValueId, Dependent>, node: &Node) -> Option<Dependent> {
    use Slope::{Constant, Proportional};
    let of = |i: usize| dependents.get(&node.operands[i]);
    let with = |d: &Dependent, slope| Some(Dependent { slope, rows: d.rows.clone() });
    match &node.op {
        Op::BroadcastInDim(b) => {
            let d = of(0)?;
            let from = graph.shape(node.operands[0]);
            let mut rows = vec![None; b.shape.len()];
            for (i, &dim) in b.dims.iter().enumerate() {
                if from[i] == b.shape[dim] {
                    rows[dim] = d.rows[i];
                }
            }
            // Repeating a dimension of one row would give several copies of it.
            let kept = d.rows.iter().zip(from).filter(|(r, s)| r.is_some() && **s > 1).count();
            let now = rows.iter().zip(&b.shape).filter(|(r, s)| r.is_some() && **s > 1).count();
            (kept == now).then_some(Dependent { slope: d.slope, rows })
        }
        Op::Reshape(_) => {
            let d = of(0)?;
            let rows = reshaped(&d.rows, graph.shape(node.operands[0]), &node.ty.shape)?;
            Some(Dependent { slope: d.slope, rows })
        }
        Op::Convert(_) if node.ty.dtype.is_float() => of(0).cloned(),
        Op::Reduce(r) if r.reducer == Reducer::Sum => {
            let d = of(0)?;
            let within_rows = r.dims.iter().all(|&dim| d.rows[dim].is_none());
            let rows = (0..d.rows.len()).filter(|dim| !r.dims.contains(dim)).map(|dim| d.rows[dim]).collect();
            match d.slope {
                Proportional(_) if within_rows => Some(Dependent { slope: d.slope, rows }),
                _ => None,
            }
        }
        Op::DotGeneral(dot) => of_products(dot, [of(0), of(1)], [0, 1].map(|i| graph.shape(node.operands[i]).len())),
        Op::Unary(op) => {
            let d = of(0)?;
            match (op, d.slope) {
                (Unary::Negate, Constant(c)) => with(d, Constant(-c)),
                (Unary::Negate, slope) => with(d, slope),
                (Unary::Exponential, Constant(c)) => with(d, Proportional(c)),
                (Unary::Log, Proportional(c)) => with(d, Constant(c)),
                // A shift does not change which numbers are finite.
                (Unary::IsFinite | Unary::StopGradient, _) => with(d, Constant(0.0)),
                _ => None,
            }
        }
        Op::Binary(op) => {
            let rows = merged(of(0), of(1))?;
            let zero = Constant(0.0);
            let (a, b) = (of(0).map_or(zero, |d| d.slope), of(1).map_or(zero, |d| d.slope));
            let hides = |i: usize| is_splat(graph, node.operands[i], f64::NEG_INFINITY);
            let slope = match (op, a, b) {
                // `max(-inf, m)` is `m`.
                (Binary::Maximum, slope, Constant(0.0)) if hides(1) => slope,
                (Binary::Maximum, Constant(0.0), slope) if hides(0) => slope,
                _ => of_binary(*op, a, b)?,
            };
            Some(Dependent { slope, rows })
        }
        // `m` if it is finite, else zero. Wherever it matters, this is `m`.
        Op::Select(_) => {
            let finite = match graph.node(node.operands[0]) {
                Node { op: Op::Unary(Unary::IsFinite), operands, .. } => operands[0] == node.operands[1],
                _ => false,
            };
            let guarded = finite && is_splat(graph, node.operands[2], 0.0) && of(2).is_none();
            of(1).filter(|_| guarded).cloned()
        }
        _ => None,
    }
}

/// The rows after a reshape. Only dimensions of size 1 may be added or removed.
fn reshaped(rows: &[Option<usize>], from: &[u64], to: &[u64]) -> Option<Vec<Option<usize>>> {
    let mut left = rows.iter().zip(from).filter(|(_, size)| **size != 1);
    let row = |&size: &u64| match size {
        1 => Some(None),
        _ => left.next().filter(|(_, from)| **from == size).map(|(row, _)| *row),
    };
    let rows = to.iter().map(row).collect::<Option<Vec<_>>>()?;
    left.next().is_none().then_some(rows)
}

/// The slope of an elementwise result whose operands have these slopes. A constant slope of zero is that of a factor
/// that does not depend on the maximum.
fn of_binary(op: Binary, a: Slope, b: Slope) -> Option<Slope> {
    use Slope::{Constant, Proportional};
    Some(match (op, a, b) {
        (Binary::Add, Constant(x), Constant(y)) => Constant(x + y),
        (Binary::Subtract, Constant(x), Constant(y)) => Constant(x - y),
        (Binary::Add | Binary::Subtract, Proportional(x), Proportional(y)) if x == y => Proportional(x),
        (Binary::Multiply, Proportional(x), Proportional(y)) => Proportional(x + y),
        (Binary::Multiply, Proportional(x), Constant(0.0)) | (Binary::Multiply, Constant(0.0), Proportional(x)) => {
            Proportional(x)
        }
        (Binary::Divide, Proportional(x), Proportional(y)) => Proportional(x - y),
        (Binary::Divide, Proportional(x), Constant(0.0)) => Proportional(x),
        (Binary::Divide, Constant(0.0), Proportional(y)) => Proportional(-y),
        _ => return None,
    })
}

/// The derivative of a sum of products. One factor must not depend on the maximum. `ranks` are those of the operands.
fn of_products(dot: &DotGeneral, operands: [Option<&Dependent>; 2], ranks: [usize; 2]) -> Option<Dependent> {
    let (d, batch, contract, first) = match operands {
        [Some(d), None] => (d, &dot.lhs_batch, &dot.lhs_contract, true),
        [None, Some(d)] => (d, &dot.rhs_batch, &dot.rhs_contract, false),
        _ => return None,
    };
    let free = |dims: Vec<usize>, own: bool| dims.into_iter().map(move |dim| if own { d.rows[dim] } else { None });
    let mut rows: Vec<Option<usize>> = batch.iter().map(|&dim| d.rows[dim]).collect();
    rows.extend(free(dot.lhs_free(ranks[0]), first));
    rows.extend(free(dot.rhs_free(ranks[1]), !first));
    let within_rows = contract.iter().all(|&dim| d.rows[dim].is_none());
    (within_rows && matches!(d.slope, Slope::Proportional(_))).then_some(Dependent { slope: d.slope, rows })
}

/// The rows of an elementwise result. `None` if the operands' rows differ.
fn merged(a: Option<&Dependent>, b: Option<&Dependent>) -> Option<Vec<Option<usize>>> {
    match (a, b) {
        (Some(d), None) | (None, Some(d)) => Some(d.rows.clone()),
        (Some(a), Some(b)) if a.rows == b.rows => Some(a.rows.clone()),
        _ => None,
    }
}

fn is_splat(graph: &Graph, v: ValueId, value: f64) -> bool {
    match &graph.node(v).op {
        Op::Constant(c) => c.as_splat() == Some(value),
        Op::BroadcastInDim(_) => is_splat(graph, graph.node(v).operands[0], value),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The irrelevant maxima of a graph in text form.
    fn found(text: &str) -> Vec<u32> {
        let graph = crate::text::parse(text).expect("a graph");
        let irrelevant = irrelevant_maxima(&graph);
        graph.values().filter(|v| irrelevant[v.index()]).map(|v| v.0).collect()
    }

    const HEAD: &str = "graph \"g\" batch=0 {
      %0: f32[4,4] = parameter \"x\"
      %1: f32[4] = reduce(%0) {\"reducer\":\"max\",\"dims\":[1]}
      %2: f32[4,4] = broadcast_in_dim(%1) {\"dims\":[0]}
      %3: f32[4,4] = subtract(%0, %2)
      %4: f32[4,4] = exponential(%3)
      %5: f32[4] = reduce(%4) {\"reducer\":\"sum\",\"dims\":[1]}\n";

    #[test]
    fn normalisations_do_not_depend_on_what_they_subtract() {
        let softmax = "%6: f32[4,4] = broadcast_in_dim(%5) {\"dims\":[0]}\n%7: f32[4,4] = divide(%4, %6)\n} -> (%7)";
        assert_eq!(found(&format!("{HEAD}{softmax}")), [1]);
        let log_softmax = "%6: f32[4] = log(%5)\n%7: f32[4,4] = broadcast_in_dim(%6) {\"dims\":[0]}\n%8: f32[4,4] = subtract(%3, %7)\n} -> (%8)";
        assert_eq!(found(&format!("{HEAD}{log_softmax}")), [1]);
        let log_sum_exp = "%6: f32[4] = log(%5)\n%7: f32[4] = add(%6, %1)\n} -> (%7)";
        assert_eq!(found(&format!("{HEAD}{log_sum_exp}")), [1]);
    }

    #[test]
    fn other_uses_of_a_maximum_are_kept() {
        // The sum alone, the maximum alone, a sum over rows, and rows used as columns.
        assert_eq!(found(&format!("{HEAD}}} -> (%5)")), [0u32; 0]);
        assert_eq!(found(&format!("{HEAD}%6: f32[4] = log(%5)\n}} -> (%6)")), [0u32; 0]);
        let across = "%6: f32[4] = reduce(%4) {\"reducer\":\"sum\",\"dims\":[0]}\n%7: f32[4,4] = broadcast_in_dim(%6) {\"dims\":[1]}\n%8: f32[4,4] = divide(%4, %7)\n} -> (%8)";
        assert_eq!(found(&format!("{HEAD}{across}")), [0u32; 0]);
        let transposed = "%6: f32[4,4] = broadcast_in_dim(%5) {\"dims\":[1]}\n%7: f32[4,4] = divide(%4, %6)\n} -> (%7)";
        assert_eq!(found(&format!("{HEAD}{transposed}")), [0u32; 0]);
    }
}
