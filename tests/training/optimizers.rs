//! Optimizers and clipping under many plans: one device against several, where norms are sums over shards, replicas and
//! stages.

use crate::common::{Scratch, planned, succeeds};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::Plan;
use altiplano::ir::program::{ALL_PARAMETERS, GRADIENT_SQUARES, GRADIENT_VARIANCE, MEASURED_SQUARES};
use altiplano::runtime::{HostTensor, Options, Session};
use altiplano::training::{Training, scalars, start};
use altiplano::{ImportOptions, planner::programs};
use std::collections::BTreeMap;
use std::path::Path;

/// Embeddings are tied, so that in pipelines the first and the last stage share a parameter.
const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 4, "n_head": 2}"#;

const PLANS: [&str; 9] = [
    "local:2 dp2 zero0",
    "local:2 tp2",
    "local:2 pp2 micro2",
    "local:4 dp2 tp2",
    "local:4 dp4 zero1 micro2",
    "local:4 dp4 zero2",
    "local:4 dp4 zero3",
    "local:4 pp4 micro4 zb",
    "local:4 dp2 pp2 virtual2 micro4",
];

/// Losses, gradient norms, and weights after three steps.
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f64>>,
}

fn trained(plan: &Plan) -> Trained {
    let training = Training { steps: 3, ..Training::default() };
    let mut session = Session::new(&programs(plan).expect("programs"), &Options::default()).expect("a session");
    let (weights, mut batches) = start(plan, &training).expect("weights and batches");
    weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for number in 1..=training.steps {
        let batch = batches.take().expect("a batch");
        losses.push(session.step(&batch, &scalars(0.01, number)).expect("a step").loss);
        if plan.clip_norm.is_some() {
            let squares = session.state(ALL_PARAMETERS, GRADIENT_SQUARES).expect("a sum").to_f64();
            norms.push(squares[0].sqrt());
        }
    }
    let values = |name: &String| (name.clone(), session.parameter(name).expect("a parameter").to_f64());
    Trained { losses, norms, weights: weights.keys().map(values).collect() }
}

/// An optimizer that does not amplify rounding. Without an epsilon, a gradient that is 0 except for rounding is divided
/// by its own size.
fn conditioned(name: &str) -> Optimizer {
    let mut optimizer = Optimizer::parse(name).expect("an optimizer");
    match &mut optimizer {
        Optimizer::Adam { epsilon, .. }
        | Optimizer::Adamw { epsilon, .. }
        | Optimizer::Rmsprop { epsilon, .. }
        | Optimizer::Adagrad { epsilon, .. }
        | Optimizer::Adadelta { epsilon, .. }
        | Optimizer::Lamb { epsilon, .. } => *epsilon = 1e-2,
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } => {}
        Optimizer::Lars { .. } | Optimizer::Larc { .. } => {}
    }
    optimizer
}

fn near(a: &[f64], b: &[f64], tolerance: f64) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance * b.abs().max(1.0))
}

fn plan(file: &str, words: &str, optimizer: Optimizer, clip_norm: Option<f64>) -> Plan {
    let import = ImportOptions { batch: Some(8), sequence: Some(8), ..ImportOptions::default() };
    let mut plan = planned(Path::new(file), &import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
    (plan.optimizer, plan.clip_norm) = (optimizer, clip_norm);
    plan
}

#[test]
fn many_devices_update_as_one() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    for name in Optimizer::NAMES {
        let optimizer = conditioned(name);
        // The gradient norm exceeds this in every step; the tied embedding counts once.
        let clip = Some(0.25);
        let one = trained(&plan(&file, "local:1", optimizer, clip));
        assert!(one.norms.iter().all(|norm| *norm > 0.25), "{name}: {:?}", one.norms);
        let free = trained(&plan(&file, "local:1", optimizer, None));
        assert_ne!(free.losses[1..], one.losses[1..], "{name} is not clipped");
        // The shared plans cover all sums of norms; each optimizer runs some of them.
        let words =
            PLANS.iter().enumerate().filter(|(i, _)| ["lars", "lamb"].contains(&name) || i % 3 == name.len() % 3);
        for (_, words) in words {
            let many = trained(&plan(&file, words, optimizer, clip));
            assert!(near(&many.norms, &one.norms, 1e-5), "{name} {words}: {:?} {:?}", many.norms, one.norms);
            assert!(near(&many.losses, &one.losses, 1e-5), "{name} {words}: {:?} {:?}", many.losses, one.losses);
            for (parameter, expected) in &one.weights {
                assert!(near(&many.weights[parameter], expected, 2e-5), "{name} {words}: {parameter}");
            }
        }
    }
}

/// A model with parameters of three element types.
const MIXED: &str = "
module @jit_loss {
  func.func public @main(%arg0: tensor<4x4xf64>, %arg1: tensor<4xf32>, %arg2: tensor<4x4xbf16>, %arg3: tensor<8x4xf32>) -> tensor<f64> {
    %0 = stablehlo.convert %arg3 : (tensor<8x4xf32>) -> tensor<8x4xf64>
    %1 = stablehlo.dot_general %0, %arg0, contracting_dims = [1] x [0] : (tensor<8x4xf64>, tensor<4x4xf64>) -> tensor<8x4xf64>
    %2 = stablehlo.convert %1 : (tensor<8x4xf64>) -> tensor<8x4xf32>
    %3 = stablehlo.broadcast_in_dim %arg1, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
    %4 = stablehlo.add %2, %3 : tensor<8x4xf32>
    %5 = stablehlo.tanh %4 : tensor<8x4xf32>
    %6 = stablehlo.convert %5 : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    %7 = stablehlo.dot_general %6, %arg2, contracting_dims = [1] x [0] : (tensor<8x4xbf16>, tensor<4x4xbf16>) -> tensor<8x4xbf16>
    %8 = stablehlo.convert %7 : (tensor<8x4xbf16>) -> tensor<8x4xf64>
    %9 = stablehlo.multiply %8, %8 : tensor<8x4xf64>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %10 = stablehlo.reduce(%9 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf64>, tensor<f64>) -> tensor<f64>
    %cst_0 = stablehlo.constant dense<3.200000e+01> : tensor<f64>
    %11 = stablehlo.divide %10, %cst_0 : tensor<f64>
    return %11 : tensor<f64>
  }
}
";

#[test]
fn parameters_of_several_element_types_train_together() {
    let scratch = Scratch::new();
    let file = scratch.file("mixed.mlir", MIXED);
    for name in Optimizer::NAMES {
        for words in [&["--cluster", "local:1"][..], &["--dp", "2", "--zero", "3", "--clip-norm", "1"], &["--pp", "2"]]
        {
            let all = [&["verify", &file, "--params", "0-2", "--optimizer", name], words].concat();
            assert!(succeeds(&all).contains("the numbers agree"), "{name} {words:?}");
        }
    }
}

/// Gradients of each part of a batch, measured one by one, agree with the measurement of every plan, whether parts are
/// microbatches or replicas.
#[test]
fn every_plan_measures_the_same_noise() {
    let scratch = Scratch::new();
    let untied = GPT2.replace("\"n_head\": 2", "\"n_head\": 2, \"tie_word_embeddings\": false");
    let file = scratch.file("gpt2.json", untied);
    let sgd = Optimizer::parse("sgd").expect("an optimizer");
    let measured = |words: &str| {
        let plan = Plan { measure_noise: true, ..plan(&file, words, sgd, None) };
        let mut session = Session::new(&programs(&plan).expect("programs"), &Options::default()).expect("a session");
        let (weights, mut batches) = start(&plan, &Training::default()).expect("weights and batches");
        weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
        // Twice, to test that sums start at zero in each step.
        let batch = batches.take().expect("a batch");
        [1, 2].iter().for_each(|&step| _ = session.step(&batch, &scalars(0.0, step)).expect("a step"));
        [MEASURED_SQUARES, GRADIENT_VARIANCE, GRADIENT_SQUARES]
            .map(|slot| session.state(ALL_PARAMETERS, slot).expect("a sum").to_f64()[0])
    };
    // By hand: one gradient for every two of the eight samples.
    let plan_of_all = plan(&file, "local:1 micro4", sgd, None);
    let mut session = Session::new(&programs(&plan_of_all).expect("programs"), &Options::default()).expect("a session");
    let (weights, mut batches) = start(&plan_of_all, &Training::default()).expect("weights and batches");
    let batch = batches.take().expect("a batch");
    let mut parts: Vec<Vec<f64>> = Vec::new();
    for part in 0..4u64 {
        // The same two samples four times form a batch whose mean gradient is that of the part.
        let repeated = batch.iter().map(|(name, tensor)| {
            let (ids, width) = (tensor.to_f64(), tensor.ty.shape[1..].iter().product::<u64>() as usize);
            let rows = &ids[part as usize * 2 * width..(part as usize * 2 + 2) * width];
            (name.clone(), HostTensor::from_f64(tensor.ty.clone(), &rows.repeat(4)))
        });
        weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
        session.step(&repeated.collect(), &scalars(0.0, 1)).expect("a step");
        let gradient = weights.keys().flat_map(|name| session.accumulator(name).expect("a gradient").to_f64());
        parts.push(gradient.map(|g| g / 4.0).collect());
    }
    let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let mut mean = (0..parts[0].len()).map(|i| parts.iter().map(|part| part[i]).sum::<f64>() / 4.0);
    let of_all = square(&mut mean);
    let of_parts = parts.iter().map(|part| square(&mut part.iter().copied())).sum::<f64>() / 4.0;
    // Four parts of two samples give |G|^2 + S / 2 and |G|^2 + S / 8; the measured variance is S / 8.
    let expected = [of_all, (of_parts - of_all) / (1.0 / 2.0 - 1.0 / 8.0) / 8.0, of_all];
    for words in [
        "local:1 micro4",
        "local:2 dp2 zero0 micro2",
        "local:4 dp4 zero1 micro1",
        "local:2 tp2 micro4",
        "local:4 dp2 tp2 zero0 micro2",
        "local:2 pp2 micro4",
        "local:2 pp2 micro4 zb",
    ] {
        let found = measured(words);
        let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-4 * b);
        assert!(close, "{words}: {found:?}, expected {expected:?}");
    }
}

/// The prediction includes the cost of clipping: another read of the gradients, an exchange, and the wait for the last
/// stage.
#[test]
fn clipping_is_priced() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let import = ImportOptions { batch: Some(8), sequence: Some(8), ..ImportOptions::default() };
    let predicted = |words: &str| {
        let plan = planned(Path::new(&file), &import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
        plan.predicted.step_time_s
    };
    for words in ["p3.16xlarge:1 dp8 tp1 pp1 zero1", "p3.16xlarge:1 dp2 tp2 pp2 micro2", "local:2 pp2 micro2"] {
        let (free, clipped) = (predicted(words), predicted(&format!("{words} clip")));
        assert!(clipped > free && clipped < 2.0 * free, "{words}: {clipped} s, {free} s without");
    }
}
