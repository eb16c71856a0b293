use super::*;
use crate::dtype::DType;
use crate::op::{Input, Reducer};

/// A step of linear regression under an optimizer: `(loss, weights, states)` from `(weights, states, x, y)`.
fn step_under(optimizer: &Optimizer, learning_rate: f64, states_first: bool) -> (Graph, Vec<ValueId>) {
    let mut graph = Graph::new("step");
    let input = |graph: &mut Graph, name: &str, shape: &[u64]| {
        let ty = TensorType::new(DType::F32, shape);
        graph.emit(Op::Input(Input { name: name.into(), ty }), &[])
    };
    let w = input(&mut graph, "w", &[6]);
    let b = input(&mut graph, "b", &[]);
    let slots = optimizer.slots(DType::F32).len();
    let states: Vec<[ValueId; 2]> = (0..slots)
        .map(|i| [input(&mut graph, &format!("s{i}"), &[6]), input(&mut graph, &format!("t{i}"), &[])])
        .collect();
    let count = input(&mut graph, "count", &[]);
    let (x, y) = (input(&mut graph, "x", &[4, 6]), input(&mut graph, "y", &[4]));
    let rows = graph.broadcast(w, &[4, 6], &[1]);
    let product = graph.mul(rows, x);
    let dot = graph.reduce(product, Reducer::Sum, &[1]);
    let offset = graph.broadcast_scalar(b, &[4]);
    let guess = graph.add(dot, offset);
    let error = graph.sub(guess, y);
    let square = graph.mul(error, error);
    let loss = graph.reduce(square, Reducer::Sum, &[0]);
    let two = graph.splat_like(error, 2.0);
    let slope = graph.mul(error, two);
    let spread = graph.broadcast(slope, &[4, 6], &[0]);
    let terms = graph.mul(spread, x);
    let gradients = [graph.reduce(terms, Reducer::Sum, &[0]), graph.reduce(slope, Reducer::Sum, &[0])];
    let one = graph.splat_like(count, 1.0);
    let step = graph.emit(Op::Binary(Binary::Add), &[count, one]);
    let rate = graph.splat_like(count, learning_rate);
    let mut updated = Vec::new();
    let mut updated_states = vec![Vec::new(); 2];
    for (i, (parameter, gradient)) in [w, b].into_iter().zip(gradients).enumerate() {
        let own: Vec<ValueId> = states.iter().map(|s| s[i]).collect();
        let given = Given {
            parameter,
            gradient,
            gradient_scale: 1.0,
            factor: None,
            states: &own,
            learning_rate: rate,
            step,
            whole: &|_, x| x,
        };
        let new = update(&mut graph, optimizer, &given);
        updated.push(new.parameter);
        updated_states[i] = new.states;
    }
    let states_out = (0..slots).flat_map(|s| [updated_states[0][s], updated_states[1][s]]);
    graph.outputs = if states_first {
        states_out.chain(updated).chain([step, loss]).collect()
    } else {
        [loss].into_iter().chain(updated).chain(states_out).chain([step]).collect()
    };
    let arguments = graph.values().filter(|&v| graph.node(v).op.is_leaf()).collect();
    (graph, arguments)
}

#[test]
fn optimizers_are_read_off_their_updates() {
    let all = [
        Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 },
        Optimizer::Sgd { momentum: 0.0, weight_decay: 0.1 },
        Optimizer::sgd(),
        Optimizer::Sgd { momentum: 0.8, weight_decay: 0.05 },
        Optimizer::adam(),
        Optimizer::Adam { beta1: 0.8, beta2: 0.95, epsilon: 1e-6, weight_decay: 0.1, bias_correction: false },
        Optimizer::adamw(),
        Optimizer::Adamw { beta1: 0.9, beta2: 0.98, epsilon: 1e-5, weight_decay: 0.2, bias_correction: false },
    ];
    for optimizer in all {
        for states_first in [false, true] {
            let (graph, arguments) = step_under(&optimizer, 3e-4, states_first);
            let coupled = matches!(optimizer, Optimizer::Adam { weight_decay, .. } | Optimizer::Sgd { weight_decay, .. } if weight_decay != 0.0);
            if states_first && coupled {
                continue; // Each state's update is made of the weights too, so only the order tells them apart.
            }
            let step = recognise(&graph, &arguments, &[]).unwrap_or_else(|| panic!("{optimizer:?} {states_first}"));
            let fitted = step.optimizer.unwrap_or_else(|| panic!("{optimizer:?} {states_first} was not fitted"));
            assert!((fitted.learning_rate - 3e-4).abs() < 1e-9, "{optimizer:?}: {fitted:?}");
            let near = |a: &str, b: &str| {
                a == b
                    || (a.parse::<f64>().ok())
                        .zip(b.parse::<f64>().ok())
                        .is_some_and(|(a, b)| (a - b).abs() <= 1e-6 * b.abs().max(1e-4))
            };
            let words = |o: &Optimizer| format!("{o:?}").replace([',', '}'], " ");
            let (found, meant) = (words(&fitted.optimizer), words(&optimizer));
            // Without decay the two kinds of Adam are one.
            let skip = if meant.contains("weight_decay: 0.0") { 1 } else { 0 };
            let pairs = found.split_whitespace().zip(meant.split_whitespace()).skip(skip);
            assert!(pairs.clone().all(|(a, b)| near(a, b)), "{found} is not {meant}");
            assert_eq!(step.parameters.len(), 2);
            let reduced = |v: ValueId| matches!(graph.node(v).op, Op::Reduce(_));
            assert!(step.parameters.iter().all(|p| p.gradient.is_some_and(reduced)), "{optimizer:?}");
        }
    }
}

#[test]
fn what_only_looks_like_a_step_is_none() {
    // A loss and gradients, and a loss and predictions.
    let (graph, arguments) = step_under(&Optimizer::sgd(), 0.1, false);
    let mut gradients = graph.clone();
    gradients.outputs.truncate(1);
    assert_eq!(recognise(&gradients, &arguments, &[]), None);
    let step = recognise(&graph, &arguments, &[]).expect("a step");
    gradients.outputs = vec![step.loss, step.parameters[0].gradient.expect("a gradient")];
    assert_eq!(recognise(&gradients, &arguments, &[]), None);
}
