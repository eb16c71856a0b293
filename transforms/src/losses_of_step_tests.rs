use super::*;
use crate::training_step::recognise;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Input, Op, Reducer, Unary};
use altiplano_ir::types::TensorType;

/// A step with leaves `d`, `g`, `x` and `z` of four numbers, whose outputs `build` makes.
fn step(build: impl FnOnce(&mut Graph, [ValueId; 4]) -> Vec<ValueId>) -> Graph {
    let mut graph = Graph::new("step");
    let input = |graph: &mut Graph, name: &str| {
        let ty = TensorType::new(DType::F32, [4]);
        graph.emit(Op::Input(Input { name: name.into(), ty }), &[])
    };
    let leaves = ["d", "g", "x", "z"].map(|name| input(&mut graph, name));
    graph.outputs = build(&mut graph, leaves);
    graph
}

/// `sum tanh(a b)`, and its derivative by `a`.
fn loss_and_gradient(g: &mut Graph, a: ValueId, b: ValueId) -> [ValueId; 2] {
    let product = g.mul(a, b);
    let y = g.unary(Unary::Tanh, product);
    let square = g.mul(y, y);
    let one = g.splat_like(y, 1.0);
    let slope = g.sub(one, square);
    let spread = g.reduce(slope, Reducer::Sum, &[0]);
    let spread = g.broadcast_scalar(spread, &[4]);
    let gradient = g.mul(spread, b);
    [g.reduce(y, Reducer::Sum, &[0]), gradient]
}

fn descended(g: &mut Graph, p: ValueId, gradient: ValueId) -> ValueId {
    let rate = g.splat_like(gradient, 0.1);
    let change = g.mul(gradient, rate);
    g.sub(p, change)
}

/// The other losses, each with its output and the leaves that it trains.
fn found(graph: &Graph) -> Vec<(usize, Vec<ValueId>)> {
    let arguments: Vec<ValueId> = graph.values().filter(|&v| graph.node(v).op.is_leaf()).collect();
    let step = recognise(graph, &arguments, &[]).expect("a step");
    other_losses(graph, &arguments, &step).into_iter().map(|other| (other.output, other.parameters)).collect()
}

#[test]
fn a_second_loss_that_trains_is_found() {
    // Both losses depend on `d` and `g`. The first trains `d`, the second `g`.
    let adversarial = step(|graph, [d, g, x, z]| {
        let fake = graph.mul(g, z);
        let both = graph.add(fake, x);
        let [first, by_d] = loss_and_gradient(graph, d, both);
        let scaled = graph.mul(d, z);
        let [second, by_g] = loss_and_gradient(graph, g, scaled);
        let updated = [(d, by_d), (g, by_g)].map(|(p, gradient)| descended(graph, p, gradient));
        vec![updated[0], updated[1], first, second]
    });
    assert_eq!(found(&adversarial), [(3, vec![ValueId(1)])]);

    // The second loss is computed with the weights that the first has updated.
    let alternating = step(|graph, [d, g, x, z]| {
        let fake = graph.mul(g, z);
        let both = graph.add(fake, x);
        let [first, by_d] = loss_and_gradient(graph, d, both);
        let new = descended(graph, d, by_d);
        let scaled = graph.mul(new, z);
        let [second, by_g] = loss_and_gradient(graph, g, scaled);
        let updated = descended(graph, g, by_g);
        vec![new, updated, first, second]
    });
    assert_eq!(found(&alternating), [(3, vec![ValueId(1)])]);

    // An actor and a critic that share nothing.
    let apart = step(|graph, [d, g, x, z]| {
        let [first, by_d] = loss_and_gradient(graph, d, x);
        let [second, by_g] = loss_and_gradient(graph, g, z);
        let updated = [(d, by_d), (g, by_g)].map(|(p, gradient)| descended(graph, p, gradient));
        vec![updated[0], updated[1], first, second]
    });
    assert_eq!(found(&apart), [(3, vec![ValueId(1)])]);
}

#[test]
fn numbers_that_are_only_reported_are_no_losses() {
    let reporting = step(|graph, [d, _, x, z]| {
        let [first, by_d] = loss_and_gradient(graph, d, x);
        let [on_others, _] = loss_and_gradient(graph, d, z);
        let square = graph.mul(by_d, by_d);
        let norm = graph.reduce(square, Reducer::Sum, &[0]);
        let doubled = graph.add(first, first);
        let updated = descended(graph, d, by_d);
        vec![updated, first, on_others, norm, doubled]
    });
    assert_eq!(found(&reporting), []);
}
