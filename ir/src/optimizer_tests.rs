//! Compares every optimizer with its formulas, written here again over plain numbers.

use super::*;
use crate::interpret;
use crate::tensor::Tensor;

/// The state of each optimizer, as plain numbers.
#[derive(Default)]
struct Kept {
    first: Vec<f64>,
    second: Vec<f64>,
}

fn length(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Step number `t`, straight from the papers.
fn by_hand(optimizer: &Optimizer, p: &mut [f64], g: &[f64], kept: &mut Kept, lr: f64, (t, has_ratio): (i32, bool)) {
    let n = p.len();
    kept.first.resize(n, 0.0);
    kept.second.resize(n, 0.0);
    let (p_norm, g_norm) = (length(p), length(g));
    let mut direction = vec![0.0; n];
    for i in 0..n {
        let (a, b) = (&mut kept.first[i], &mut kept.second[i]);
        match *optimizer {
            Optimizer::Sgd { momentum, weight_decay } => {
                *a = momentum * *a + g[i] + weight_decay * p[i];
                p[i] -= lr * *a;
            }
            Optimizer::Nesterov { momentum, weight_decay } => {
                let g = g[i] + weight_decay * p[i];
                *a = momentum * *a + g;
                p[i] -= lr * (g + momentum * *a);
            }
            Optimizer::Adam { beta1, beta2, epsilon, .. }
            | Optimizer::Adamw { beta1, beta2, epsilon, .. }
            | Optimizer::Lamb { beta1, beta2, epsilon, .. } => {
                *a = beta1 * *a + (1.0 - beta1) * g[i];
                *b = beta2 * *b + (1.0 - beta2) * g[i] * g[i];
                let m = *a / (1.0 - beta1.powi(t));
                let v = *b / (1.0 - beta2.powi(t));
                let decay = match *optimizer {
                    Optimizer::Adamw { weight_decay, .. } | Optimizer::Lamb { weight_decay, .. } => weight_decay,
                    _ => 0.0,
                };
                direction[i] = m / (v.sqrt() + epsilon) + decay * p[i];
            }
            Optimizer::Rmsprop { decay, epsilon, momentum, weight_decay, epsilon_in_root } => {
                let g = g[i] + weight_decay * p[i];
                *a = decay * *a + (1.0 - decay) * g * g;
                *b = momentum * *b + g / if epsilon_in_root { (*a + epsilon).sqrt() } else { a.sqrt() + epsilon };
                p[i] -= lr * *b;
            }
            Optimizer::Adagrad { epsilon, epsilon_in_root, .. } => {
                *a += g[i] * g[i];
                p[i] -= lr * g[i] / if epsilon_in_root { (*a + epsilon).sqrt() } else { a.sqrt() + epsilon };
            }
            Optimizer::Adadelta { rho, epsilon, .. } => {
                *a = rho * *a + (1.0 - rho) * g[i] * g[i];
                let d = (*b + epsilon).sqrt() / (*a + epsilon).sqrt() * g[i];
                *b = rho * *b + (1.0 - rho) * d * d;
                p[i] -= lr * d;
            }
            Optimizer::Lars { momentum, weight_decay, trust, ratio_of_all } => {
                let local = trust * p_norm / (g_norm + weight_decay * p_norm);
                let local = if (has_ratio || ratio_of_all) && p_norm > 0.0 && g_norm > 0.0 { local } else { 1.0 };
                *a = momentum * *a + lr * local * (g[i] + weight_decay * p[i]);
                p[i] -= *a;
            }
            Optimizer::Larc { momentum, weight_decay, trust } => {
                let local = trust * p_norm / (g_norm + weight_decay * p_norm);
                let local = if p_norm > 0.0 && g_norm > 0.0 { local.min(lr) } else { lr.min(1.0) };
                let local = if has_ratio { local } else { lr };
                *a = momentum * *a + local * (g[i] + weight_decay * p[i]);
                p[i] -= *a;
            }
        }
    }
    let ratio = match optimizer {
        Optimizer::Adam { .. } | Optimizer::Adamw { .. } => 1.0,
        Optimizer::Lamb { ratio_of_all, .. }
            if (has_ratio || *ratio_of_all) && p_norm > 0.0 && length(&direction) > 0.0 =>
        {
            p_norm / length(&direction)
        }
        Optimizer::Lamb { .. } => 1.0,
        _ => return,
    };
    p.iter_mut().zip(&direction).for_each(|(p, d)| *p -= lr * ratio * d);
}

/// Checks five steps of an optimizer as a graph. With a clip, every number is a shard of its own.
fn check(optimizer: &Optimizer, start: [f64; 3], rate: f64, clip: Option<f64>) {
    for shape in [&[3u64][..], &[1, 3]] {
        check_shape(optimizer, shape, start, rate, clip);
    }
}

/// Checks one shape. Parameters of one dimension have no ratio of norms.
fn check_shape(optimizer: &Optimizer, shape: &[u64], start: [f64; 3], rate: f64, clip: Option<f64>) {
    let has_ratio = shape.len() > 1;
    let ty = TensorType::new(DType::F32, shape.to_vec());
    let scalar = TensorType::scalar(DType::F32);
    let slots = optimizer.slots(DType::F32).len();
    let mut graph = Graph::new("update");
    let [p, g] = ["p", "g"].map(|name| leaf(&mut graph, name, ty.clone()));
    let [lr, step] = ["lr", "step"].map(|name| leaf(&mut graph, name, scalar.clone()));
    let states: Vec<ValueId> = (0..slots).map(|i| leaf(&mut graph, i.to_string(), ty.clone())).collect();
    let clip_factor = clip.map(|most| {
        let sum = squares(&mut graph, g, 0.5);
        clip_factor(&mut graph, sum, most)
    });
    let given = Given {
        parameter: p,
        gradient: g,
        gradient_scale: 0.5,
        factor: clip_factor,
        states: &states,
        learning_rate: lr,
        step,
        whole: &|_, x| x,
    };
    let new = update(&mut graph, optimizer, &given);
    graph.outputs = [vec![new.parameter], new.states].concat();
    assert_eq!(graph.verify(), vec![]);

    let (mut kept, mut by_paper) = (Kept::default(), start);
    let mut values = vec![start.to_vec()];
    values.extend(vec![vec![0.0; 3]; slots]);
    for t in 1..=5 {
        let gradient: Vec<f64> = (0..3).map(|i| f64::from((i * 5 + t * 3) % 7) - 2.5).collect();
        let leaf_value = |v: ValueId| match v.index() {
            0 => Tensor::new(ty.clone(), values[0].clone()),
            1 => Tensor::new(ty.clone(), gradient.clone()),
            2 => Tensor::scalar(DType::F32, rate),
            3 => Tensor::scalar(DType::F32, f64::from(t)),
            i => Tensor::new(ty.clone(), values[i - 3].clone()),
        };
        values = interpret::run(&graph, leaf_value).into_iter().map(|t| t.data).collect();
        let mut mean: Vec<f64> = gradient.iter().map(|g| g * 0.5).collect();
        if let Some(most) = clip {
            let factor = (most / (length(&mean) + 1e-6)).min(1.0);
            mean.iter_mut().for_each(|g| *g *= factor);
        }
        by_hand(optimizer, &mut by_paper, &mean, &mut kept, rate, (t, has_ratio));
        for (x, expected) in values[0].iter().zip(by_paper) {
            assert!((x - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{optimizer:?} step {t}: {x} {expected}");
        }
    }
}

#[test]
fn optimizers_compute_what_their_papers_say() {
    for name in Optimizer::NAMES {
        let optimizer = Optimizer::parse(name).expect("an optimizer");
        assert_eq!(optimizer.name(), name);
        for start in [[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]] {
            for rate in [0.1, 2.0] {
                check(&optimizer, start, rate, None);
                check(&optimizer, start, rate, Some(1.25));
            }
        }
    }
    let further = [
        Optimizer::Nesterov { momentum: 0.8, weight_decay: 0.1 },
        Optimizer::Rmsprop { decay: 0.9, epsilon: 1e-6, momentum: 0.8, weight_decay: 0.1, epsilon_in_root: false },
        Optimizer::Rmsprop { decay: 0.9, epsilon: 1e-2, momentum: 0.8, weight_decay: 0.1, epsilon_in_root: true },
        Optimizer::Adagrad { epsilon: 1e-2, weight_decay: 0.0, epsilon_in_root: true },
        Optimizer::Lars { momentum: 0.9, weight_decay: 0.1, trust: 0.02, ratio_of_all: true },
        Optimizer::Lamb { beta1: 0.9, beta2: 0.99, epsilon: 1e-6, weight_decay: 0.1, ratio_of_all: true },
    ];
    for optimizer in further {
        check(&optimizer, [1.0, 2.0, 3.0], 0.1, None);
    }
}

/// State has the type [`Optimizer::state_type`], and the new parameter has that of the old one, whatever type the
/// gradient is summed in.
#[test]
fn parameters_of_every_float_type_are_updated() {
    let floats = DType::ALL.into_iter().filter(|dtype| dtype.is_float());
    for (dtype, name) in floats.flat_map(|dtype| Optimizer::NAMES.map(|name| (dtype, name))) {
        let optimizer = Optimizer::parse(name).expect("an optimizer");
        let ty = TensorType::new(dtype, [2, 3]);
        let state = ty.with_dtype(Optimizer::state_type(dtype));
        for sum in [dtype, DType::F32, DType::F64] {
            let mut graph = Graph::new("update");
            let parameter = leaf(&mut graph, "p", ty.clone());
            let gradient = leaf(&mut graph, "g", ty.with_dtype(sum));
            let [learning_rate, step, factor] =
                ["lr", "step", "clip"].map(|name| leaf(&mut graph, name, TensorType::scalar(DType::F32)));
            let states: Vec<ValueId> =
                optimizer.slots(dtype).into_iter().map(|slot| leaf(&mut graph, slot, state.clone())).collect();
            let given = Given {
                parameter,
                gradient,
                gradient_scale: 0.5,
                factor: Some(factor),
                states: &states,
                learning_rate,
                step,
                whole: &|_, x| x,
            };
            let new = update(&mut graph, &optimizer, &given);
            assert_eq!(graph.ty(new.parameter), &ty, "{name} of {dtype}");
            assert_eq!(new.states.len(), states.len());
            assert!(new.states.iter().all(|v| *graph.ty(*v) == state), "{name} of {dtype}");
        }
    }
}
