//! The search for NaN: bodies get another result, which says what each value holds.

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Concatenate, Direction, Op, Reducer};
use altiplano_ir::program::Body;

const NAN: i32 = 1;
const INFINITE: i32 = 2;

/// Adds a result to a graph: one integer for each value of floats, which the returned list names. Values that follow from
/// constants alone are left out, because models select among them, and a NaN is one of the choices.
pub(super) fn watch(graph: &mut Graph) -> Vec<ValueId> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let is_watched = |v: &ValueId| varies[v.index()] && graph.ty(*v).dtype.is_float();
    let values: Vec<ValueId> = graph.values().filter(is_watched).collect();
    let mut flags = Vec::new();
    for &v in &values {
        // Masks are full of negative infinities. Only a positive one is a sign of overflow.
        let largest = graph.splat_like(v, f64::INFINITY);
        let nan = graph.compare(Direction::Ne, v, v);
        let infinite = graph.compare(Direction::Eq, v, largest);
        let mut holds = |predicate: ValueId, flag: i32| {
            let dims: Vec<usize> = (0..graph.shape(v).len()).collect();
            let any = graph.convert(predicate, DType::I32);
            let any = graph.reduce(any, Reducer::Max, &dims);
            let any = graph.reshape(any, &[1]);
            let flag = graph.splat_like(any, f64::from(flag));
            graph.mul(any, flag)
        };
        let (nan, infinite) = (holds(nan, NAN), holds(infinite, INFINITE));
        flags.push(graph.add(nan, infinite));
    }
    if flags.len() > 1 {
        flags = vec![graph.emit(Op::Concatenate(Concatenate { dim: 0 }), &flags)];
    }
    graph.outputs.extend(flags);
    values
}

/// The meaning of a body's flags.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A leaf holds a NaN.
    Leaf(ValueId),
    /// An op made a NaN from operands without one.
    Made(ValueId),
}

/// The first value that holds a NaN, and the first op that made a positive infinity.
pub(super) fn found(body: &Body, values: &[ValueId], flags: &[i32]) -> (Option<Found>, Option<ValueId>) {
    let has = |flag: i32| values.iter().zip(flags).filter(move |(_, flags)| *flags & flag != 0).map(|(&v, _)| v);
    let is_leaf = |v: &ValueId| body.graph.node(*v).op.is_leaf();
    let leaf = has(NAN).find(is_leaf).map(Found::Leaf);
    let nan = leaf.or_else(|| has(NAN).next().map(Found::Made));
    (nan, has(INFINITE).find(|v| !is_leaf(v)))
}
