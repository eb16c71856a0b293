//! Preserves means: if a sum over elements is divided by their number, fewer elements are divided by a smaller number.

use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::{Literal, Real, Values};
use altiplano_ir::op::{Binary, Op, Reducer, Unary};

/// The number of elements that were summed into each element of a value and not yet divided by, after and before.
type Count = Option<(u64, u64)>;

/// `reduced`, which has the nodes of `graph` at other sizes, with adapted constants that count summed elements. Also
/// returns the new place of its values.
pub(crate) fn with_means(graph: &Graph, reduced: &Graph) -> (Graph, Vec<ValueId>) {
    let mut to = Graph { name: reduced.name.clone(), batch: reduced.batch, ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut counts: Vec<Count> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let mut node = reduced.node(v).clone();
        let (count, divisor) = summed(graph, reduced, v, &counts);
        counts.push(count);
        node.operands.iter_mut().for_each(|o| *o = map[o.index()]);
        if let Some((operand, factor)) = divisor.filter(|(_, factor)| *factor != 1.0)
            && let Op::Constant(literal) = &to.node(node.operands[operand]).op
            && let Values::Splat(Real(value)) = literal.values
        {
            let adapted = Literal { values: Values::Splat(Real(value * factor)), ..literal.clone() };
            let constant = to.node(node.operands[operand]).clone();
            node.operands[operand] = to.append(Node { op: Op::Constant(adapted), ..constant });
        }
        map.push(to.append(node));
    }
    to.outputs = reduced.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(reduced, |v| Some(map[v.index()]));
    (to, map)
}

/// The count of a value. If it divides by the count, also the operand with the count and the factor to multiply it by.
fn summed(graph: &Graph, reduced: &Graph, v: ValueId, counts: &[Count]) -> (Count, Option<(usize, f64)>) {
    let node = graph.node(v);
    let of = |i: usize| counts[node.operands[i].index()];
    let count = match &node.op {
        Op::Reduce(op) if op.reducer == Reducer::Sum => {
            let elements = |g: &Graph| op.dims.iter().map(|&d| g.shape(node.operands[0])[d]).product::<u64>();
            let (now, before) = of(0).unwrap_or((1, 1));
            Some((now.saturating_mul(elements(reduced)), before.saturating_mul(elements(graph))))
        }
        Op::Binary(op @ (Binary::Divide | Binary::Multiply)) => {
            let found = match (of(0), of(1), op) {
                (Some(count), None, _) => Some((count, 1)),
                (None, Some(count), Binary::Multiply) => Some((count, 0)),
                _ => None,
            };
            let Some(((now, before), other)) = found else { return (None, None) };
            let Op::Constant(literal) = &graph.node(node.operands[other]).op else { return (None, None) };
            let Some(value) = literal.as_splat() else { return (None, None) };
            let divisor = if *op == Binary::Divide { value } else { 1.0 / value };
            if (divisor - before as f64).abs() > 1e-6 * before as f64 {
                return (Some((now, before)), None);
            }
            let factor = now as f64 / before as f64;
            return (None, Some((other, if *op == Binary::Divide { factor } else { 1.0 / factor })));
        }
        Op::Binary(Binary::Add | Binary::Subtract) if of(0) == of(1) => of(0),
        Op::Unary(Unary::Negate)
        | Op::Convert(_)
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::BroadcastInDim(_)
        | Op::Slice(_) => of(0),
        _ => None,
    };
    (count, None)
}
