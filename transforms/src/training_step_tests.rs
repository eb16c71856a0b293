use super::*;
use altiplano_ir::dtype::DType;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Input, Reducer};
use altiplano_ir::optimizer::{Given, clip_factor, squares, update};
use altiplano_ir::types::TensorType;

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
            // Without decay, Adam and AdamW are the same.
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
    // A loss with gradients, and a loss with predictions.
    let (graph, arguments) = step_under(&Optimizer::sgd(), 0.1, false);
    let mut gradients = graph.clone();
    gradients.outputs.truncate(1);
    assert_eq!(recognise(&gradients, &arguments, &[]), None);
    let step = recognise(&graph, &arguments, &[]).expect("a step");
    gradients.outputs = vec![step.loss, step.parameters[0].gradient.expect("a gradient")];
    assert_eq!(recognise(&gradients, &arguments, &[]), None);
}

/// The optimizer of one of the parameters of [`chained`], or `None` if it is not updated.
type Way = Option<Optimizer>;

/// A step on a matrix and a vector, as a framework may write it. The gradients of both are clipped together, and the
/// learning rate is a function of the step count.
fn chained(ways: [Way; 2], clip: Option<f64>, rate: impl Fn(&mut Graph, ValueId) -> ValueId) -> Option<TrainingStep> {
    let mut graph = Graph::new("step");
    let input = |graph: &mut Graph, name: String, dtype, shape: &[u64]| {
        graph.emit(Op::Input(Input { name, ty: TensorType::new(dtype, shape) }), &[])
    };
    let shapes: [&[u64]; 2] = [&[4, 6], &[6]];
    let parameters = shapes.map(|shape| input(&mut graph, format!("w{}", shape.len()), DType::F32, shape));
    let mut states = Vec::new();
    for (way, shape) in ways.iter().zip(shapes) {
        let slots = way.iter().flat_map(|optimizer| optimizer.slots(DType::F32));
        let own: Vec<ValueId> =
            slots.map(|slot| input(&mut graph, format!("{slot}{}", shape.len()), DType::F32, shape)).collect();
        states.push(own);
    }
    let count = input(&mut graph, "count".into(), DType::I32, &[]);
    let batch = [3, 4, 6];
    let x = input(&mut graph, "x".into(), DType::F32, &batch);
    // The loss is the sum of (w * x + v)^2 over a batch of three.
    let weights = graph.broadcast(parameters[0], &batch, &[1, 2]);
    let product = graph.mul(weights, x);
    let rows = graph.broadcast(parameters[1], &batch, &[2]);
    let sum = graph.add(product, rows);
    let square = graph.mul(sum, sum);
    let loss = graph.reduce(square, Reducer::Sum, &[0, 1, 2]);
    let two = graph.splat_like(sum, 2.0);
    let slope = graph.mul(sum, two);
    let of_products = graph.mul(slope, x);
    let gradients = [graph.reduce(of_products, Reducer::Sum, &[0]), graph.reduce(slope, Reducer::Sum, &[0, 1])];
    let factor = clip.map(|most| {
        let [a, b] = gradients.map(|g| squares(&mut graph, g, 1.0));
        let sum = graph.add(a, b);
        clip_factor(&mut graph, sum, most)
    });
    let one = graph.splat_like(count, 1.0);
    let next = graph.add(count, one);
    let step = graph.convert(next, DType::F32);
    let learning_rate = rate(&mut graph, count);
    let (mut updated, mut new_states) = (Vec::new(), Vec::new());
    for (i, way) in ways.iter().enumerate() {
        let Some(optimizer) = way else {
            let nothing = graph.splat_like(parameters[i], 0.0);
            updated.push(graph.add(parameters[i], nothing));
            continue;
        };
        let given = Given {
            parameter: parameters[i],
            gradient: gradients[i],
            gradient_scale: 1.0,
            factor,
            states: &states[i],
            learning_rate,
            step,
            whole: &|_, x| x,
        };
        let new = update(&mut graph, optimizer, &given);
        updated.push(new.parameter);
        new_states.extend(new.states);
    }
    graph.outputs = [updated, new_states, vec![next, loss]].concat();
    let arguments: Vec<ValueId> = graph.values().filter(|&v| graph.node(v).op.is_leaf()).collect();
    recognise(&graph, &arguments, &[])
}

fn constant(graph: &mut Graph, _: ValueId) -> ValueId {
    graph.constant(Literal::splat(TensorType::scalar(DType::F32), 0.01))
}

/// A hundredth of the step count, which is zero in the first step.
fn rising(graph: &mut Graph, count: ValueId) -> ValueId {
    let count = graph.convert(count, DType::F32);
    let share = graph.splat_like(count, 0.01);
    graph.mul(count, share)
}

#[test]
fn chains_of_updates_are_read_off() {
    let adamw = Optimizer::Adamw { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, bias_correction: true };
    let all = [
        adamw,
        Optimizer::sgd(),
        Optimizer::Nesterov { momentum: 0.9, weight_decay: 0.0 },
        Optimizer::Nesterov { momentum: 0.8, weight_decay: 0.01 },
        Optimizer::Rmsprop { decay: 0.9, epsilon: 1e-8, momentum: 0.0, weight_decay: 0.0, epsilon_in_root: true },
        Optimizer::Rmsprop { decay: 0.9, epsilon: 1e-6, momentum: 0.0, weight_decay: 0.0, epsilon_in_root: false },
        Optimizer::Rmsprop { decay: 0.99, epsilon: 1e-8, momentum: 0.9, weight_decay: 0.0, epsilon_in_root: true },
        Optimizer::Adagrad { epsilon: 1e-7, weight_decay: 0.0, epsilon_in_root: true },
        Optimizer::Adadelta { rho: 0.9, epsilon: 1e-6, weight_decay: 0.0 },
        Optimizer::Lars { momentum: 0.9, weight_decay: 0.01, trust: 0.001, ratio_of_all: true },
        Optimizer::Lars { momentum: 0.9, weight_decay: 0.01, trust: 0.001, ratio_of_all: false },
        Optimizer::Lamb { beta1: 0.9, beta2: 0.99, epsilon: 1e-6, weight_decay: 0.01, ratio_of_all: true },
        Optimizer::Lamb { beta1: 0.9, beta2: 0.99, epsilon: 1e-6, weight_decay: 0.01, ratio_of_all: false },
    ];
    for optimizer in all {
        for clip in [None, Some(0.5)] {
            let step = chained([Some(optimizer); 2], clip, constant).unwrap_or_else(|| panic!("{optimizer:?}"));
            let expected = Fitted { optimizer, learning_rate: 0.01, scheduled: false, clip_norm: clip };
            assert_eq!(step.optimizer, Some(expected), "{optimizer:?} {clip:?}");
            assert!(!step.changed && step.no_decay.is_empty() && step.frozen.is_empty());
        }
        // LARS has the learning rate in its momentum, so a schedule looks like another update.
        if !matches!(optimizer, Optimizer::Lars { .. }) {
            let step = chained([Some(optimizer); 2], None, rising).unwrap_or_else(|| panic!("{optimizer:?}"));
            let fitted = step.optimizer.unwrap_or_else(|| panic!("{optimizer:?} on a schedule"));
            assert_eq!((fitted.optimizer, fitted.scheduled), (optimizer, true));
        }
    }
    let plain = Optimizer::Adamw { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, bias_correction: true };
    let masked = chained([Some(adamw), Some(plain)], Some(1.0), rising).expect("a step");
    assert_eq!(masked.optimizer.map(|f| (f.optimizer, f.clip_norm)), Some((adamw, Some(1.0))));
    assert_eq!(masked.no_decay, [masked.parameters[1].parameter]);
    let partly = chained([None, Some(adamw)], None, constant).expect("a step");
    assert_eq!((partly.optimizer.map(|f| f.optimizer), partly.parameters.len()), (Some(adamw), 1));
    assert_eq!(partly.frozen.len(), 1);
    // Two different optimizers are not recognised.
    let mixed = chained([Some(adamw), Some(Optimizer::sgd())], None, constant).expect("a step");
    assert_eq!(mixed.optimizer, None);
    let slower = Optimizer::Adamw { beta1: 0.8, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, bias_correction: true };
    assert_eq!(chained([Some(adamw), Some(slower)], None, constant).expect("a step").optimizer, None);
}
