use super::*;
use crate::training_step::recognise;
use altiplano_ir::autodiff::differentiate;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Input, Op, Reducer, Reverse, Unary};
use altiplano_ir::tensor::Tensor;
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

/// `sum tanh(reversed(a) b)`, and its derivative by `a`.
fn loss_and_gradient(g: &mut Graph, a: ValueId, b: ValueId) -> [ValueId; 2] {
    let reversed = |g: &mut Graph, x| g.emit(Op::Reverse(Reverse { dims: vec![0] }), &[x]);
    let turned = reversed(g, a);
    let product = g.mul(turned, b);
    let y = g.unary(Unary::Tanh, product);
    let square = g.mul(y, y);
    let one = g.splat_like(y, 1.0);
    let slope = g.sub(one, square);
    let slope = g.mul(slope, b);
    let gradient = reversed(g, slope);
    [g.reduce(y, Reducer::Sum, &[0]), gradient]
}

fn descended(g: &mut Graph, p: ValueId, gradient: ValueId) -> ValueId {
    let rate = g.splat_like(gradient, 0.1);
    let change = g.mul(gradient, rate);
    g.sub(p, change)
}

/// The step by the sum of all losses, and its graph.
fn joined_of(graph: &Graph) -> Option<(Graph, TrainingStep)> {
    let arguments: Vec<ValueId> = graph.values().filter(|&v| graph.node(v).op.is_leaf()).collect();
    let step = recognise(graph, &arguments, &[]).expect("a step");
    joined(graph, &arguments, &step, &other_losses(graph, &arguments, &step))
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

/// The sum of both losses has the gradients that the step computes, for each parameter of its own loss.
#[test]
fn losses_with_parameters_of_their_own_are_one_step() {
    let adversarial = step(|graph, [d, g, x, z]| {
        let fake = graph.mul(g, z);
        let both = graph.add(fake, x);
        let [first, by_d] = loss_and_gradient(graph, d, both);
        let scaled = graph.mul(d, z);
        let [second, by_g] = loss_and_gradient(graph, g, scaled);
        let updated = [(d, by_d), (g, by_g)].map(|(p, gradient)| descended(graph, p, gradient));
        vec![first, updated[0], updated[1], second]
    });
    let (sum, joined) = joined_of(&adversarial).expect("both losses");
    assert_eq!(sum.verify(), []);
    assert_eq!(joined.parameters.len(), 2);
    assert!(joined.optimizer.is_some_and(|f| (f.learning_rate - 0.1).abs() < 1e-6), "{joined:?}");
    let run = |graph: &Graph| {
        let mut leaf = 0.0;
        altiplano_ir::interpret::run(graph, |v| {
            leaf += 1.0;
            Tensor::new(graph.ty(v).clone(), (0..4).map(|i| 0.3 * leaf - 0.2 * i as f64).collect())
        })
    };
    let given = run(&joined.gradient_graph(&sum));
    let differentiated = differentiate(&joined.loss_graph(&sum), &[]).expect("gradients");
    let mut own = differentiated.graph.clone();
    let parameters: Vec<ValueId> = own.parameters().map(|(v, _)| v).collect();
    for parameter in parameters {
        let terms: Vec<ValueId> = differentiated.contributions[parameter.index()].iter().map(|(_, c)| *c).collect();
        let gradient = terms.into_iter().reduce(|a, b| own.add(a, b)).expect("a gradient");
        own.outputs.push(gradient);
    }
    let own = run(&own);
    assert_eq!((given.len(), own.len()), (3, 3));
    for (given, own) in given.iter().zip(&own) {
        assert!(given.data.iter().zip(&own.data).all(|(a, b)| (a - b).abs() < 1e-9), "{given:?}, not {own:?}");
    }

    // The second loss is computed with the weights that the first has updated.
    let alternating = step(|graph, [d, g, x, z]| {
        let [first, by_d] = loss_and_gradient(graph, d, x);
        let new = descended(graph, d, by_d);
        let scaled = graph.mul(new, z);
        let [second, by_g] = loss_and_gradient(graph, g, scaled);
        let updated = descended(graph, g, by_g);
        vec![new, updated, first, second]
    });
    assert_eq!(joined_of(&alternating).map(|(_, step)| step), None);
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
