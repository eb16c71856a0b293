//! Loss scaling: the sequence of PyTorch's `GradScaler`, many plans, tapes and emulated GPUs, and resumed runs.

use crate::common::{MIXED, Scratch, altiplano, emulator, planned, succeeds};
use altiplano::ir::loss_scale::{LossScale, SCALE, SKIPPED_STEPS, UNCHANGED_STEPS};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::Plan;
use altiplano::ir::program::ALL_PARAMETERS;
use altiplano::planner::programs;
use altiplano::runtime::devices::cuda::CudaOptions;
use altiplano::runtime::tape::check::check;
use altiplano::runtime::tape::host::Host;
use altiplano::runtime::tape::{self, build};
use altiplano::runtime::{HostTensor, Options, Session};
use altiplano::training::scalars;
use altiplano::{Error, ImportOptions};
use std::collections::BTreeMap;
use std::path::Path;

/// Loss, scale of the next step, and skipped steps after each of 12 steps of the model below in PyTorch 2.15 on a CPU:
/// weights and loss in f32, products in f16, `GradScaler(init_scale=2**19, growth_interval=3)`, `AdamW(lr=0.01,
/// betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)`. Then the first weights of both matrices.
const TORCH: [[f64; 3]; 12] = [
    [36.17292022705078, 262144.0, 1.0],
    [36.17292022705078, 131072.0, 2.0],
    [36.17292022705078, 65536.0, 3.0],
    [36.17292022705078, 32768.0, 4.0],
    [36.17292022705078, 16384.0, 5.0],
    [36.17292022705078, 8192.0, 6.0],
    [36.17292022705078, 4096.0, 7.0],
    [36.17292022705078, 4096.0, 7.0],
    [33.06345748901367, 4096.0, 7.0],
    [30.196956634521484, 8192.0, 7.0],
    [27.625032424926758, 4096.0, 8.0],
    [27.625032424926758, 4096.0, 8.0],
];
const TORCH_W1: [f64; 4] = [-0.22660422325134277, 0.2714709937572479, 0.7694360613822937, -0.4581308364868164];
const TORCH_W2: [f64; 4] = [0.5378433465957642, -0.7693524360656738, -0.35060232877731323, 0.22651448845863342];

/// Multiples of a sixteenth, which PyTorch was given too.
fn values(n: u64, seed: u64) -> Vec<f64> {
    (0..n).map(|i| ((i * 37 + seed * 11) % 29) as f64 / 16.0 - 14.0 / 16.0).collect()
}

/// The weights, and the batch of all steps.
fn given(plan: &Plan) -> (BTreeMap<String, HostTensor>, BTreeMap<String, HostTensor>) {
    let graph = &plan.graph;
    let tensor = |name: &str, shape: &[u64], seed| {
        let ty = altiplano::ir::types::TensorType::new(altiplano::ir::dtype::DType::F32, shape);
        (name.to_string(), HostTensor::from_f64(ty, &values(shape.iter().product(), seed)))
    };
    let weights: BTreeMap<_, _> = graph
        .parameters()
        .map(|(v, name)| tensor(name, graph.shape(v), if name.contains("w1") { 1 } else { 2 }))
        .collect();
    (weights, [tensor("x", &[8, 4], 3), tensor("t", &[8, 4], 4)].into())
}

fn mixed(scratch: &Scratch, words: &str) -> Plan {
    let file = scratch.file("mixed.mlir", MIXED);
    let mut plan =
        planned(Path::new(&file), &ImportOptions::default(), words).unwrap_or_else(|e| panic!("{words}: {e}"));
    assert_eq!(
        plan.loss_scale,
        Some(LossScale::default()),
        "{words}: products of f16 are scaled unless it is said otherwise"
    );
    plan.loss_scale = Some(LossScale::Dynamic { initial: f64::from(1 << 19), interval: 3 });
    plan.optimizer =
        Optimizer::Adamw { beta1: 0.9, beta2: 0.95, epsilon: 1e-3, weight_decay: 0.1, bias_correction: true };
    plan
}

/// Loss, scale and skipped steps after each step, and the final weights. A skipped step must leave weights and
/// optimizer state unchanged bit by bit, and all others must change them.
fn course(plan: &Plan, steps: usize) -> (Vec<[f64; 3]>, BTreeMap<String, Vec<f64>>) {
    let mut session = Session::new(&programs(plan).expect("programs"), &Options::default()).expect("a session");
    let (weights, batch) = given(plan);
    weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
    let held = |session: &mut Session| {
        let mut held: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for name in weights.keys() {
            held.insert(name.clone(), session.parameter(name).expect("a parameter").to_f64());
            for slot in plan.optimizer.slots(altiplano::ir::dtype::DType::F32) {
                held.insert(format!("{slot} {name}"), session.state(name, slot).expect("state").to_f64());
            }
        }
        held
    };
    let (mut seen, mut before) = (Vec::new(), held(&mut session));
    for number in 1..=steps as u64 {
        let loss = session.step(&batch, &scalars(0.01, number)).expect("a step").loss;
        let [scale, skipped] =
            [SCALE, SKIPPED_STEPS].map(|slot| session.state(ALL_PARAMETERS, slot).expect("state").to_f64()[0]);
        let after = held(&mut session);
        let was_skipped = skipped > seen.last().map_or(0.0, |last: &[f64; 3]| last[2]);
        assert_eq!(after == before, was_skipped, "step {number}");
        assert!(after.values().flatten().all(|x| x.is_finite()), "step {number}");
        (before, seen) = (after, [seen, vec![[loss, scale, skipped]]].concat());
    }
    before.retain(|name, _| weights.contains_key(name));
    (seen, before)
}

fn near(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * b.abs().max(1.0)
}

/// Products round to 11 bits.
const HALF: f64 = 2e-3;

#[test]
fn steps_are_skipped_and_made_as_pytorch_does() {
    let scratch = Scratch::new();
    let (seen, weights) = course(&mixed(&scratch, "local:1"), TORCH.len());
    for (step, (ours, torch)) in seen.iter().zip(TORCH).enumerate() {
        assert_eq!(ours[1..], torch[1..], "step {}: {seen:?}", step + 1);
        assert!(near(ours[0], torch[0], HALF), "step {}: {} {}", step + 1, ours[0], torch[0]);
    }
    for (name, expected) in [("w1", TORCH_W1), ("w2", TORCH_W2)] {
        let ours = weights.iter().find(|(n, _)| n.contains(name)).expect("a weight").1;
        assert!(ours.iter().zip(expected).all(|(a, b)| near(*a, b, HALF)), "{name}: {ours:?} {expected:?}");
    }
}

/// From a scale at which gradients overflow down to one at which they do not, and from a small one up. In between, one
/// device may overflow where several do not, since a sum of more terms leaves the range of f16 first.
#[test]
fn all_devices_skip_the_same_steps() {
    let scratch = Scratch::new();
    for (initial, steps, last) in [(f64::from(1 << 19), 9, [4096.0, 7.0]), (256.0, 10, [2048.0, 0.0])] {
        let trained = |words: &str| {
            let loss_scale = Some(LossScale::Dynamic { initial, interval: 3 });
            course(&Plan { loss_scale, ..mixed(&scratch, words) }, steps)
        };
        let [plain, clipped] = ["local:1", "local:1 clip"].map(trained);
        assert_eq!(plain.0[steps - 1][1..], last);
        assert_ne!(plain.1, clipped.1);
        for words in [
            "local:2 dp2 tp1 pp1 zero0",
            "local:2 dp1 tp2 pp1",
            "local:2 dp1 tp1 pp2 micro2",
            "local:2 dp1 tp1 pp2 micro4 zb",
            "local:2 dp2 tp1 pp1 zero1",
            "local:2 dp2 tp1 pp1 zero3 micro2",
            "local:4 dp2 tp1 pp2 micro2",
            "local:1 micro4 clip",
            "local:4 dp1 tp2 pp2 micro2 clip",
        ] {
            let (expected, weights) = if words.contains("clip") { &clipped } else { &plain };
            let (seen, found) = trained(words);
            for (step, (ours, one)) in seen.iter().zip(expected).enumerate() {
                assert_eq!(ours[1..], one[1..], "{words}, step {}: {seen:?}", step + 1);
                assert!(near(ours[0], one[0], HALF), "{words}, step {}: {ours:?} {one:?}", step + 1);
            }
            for (name, expected) in weights {
                assert!(found[name].iter().zip(expected).all(|(a, b)| near(*a, *b, HALF)), "{words}: {name}");
            }
        }
    }
}

/// If the gradients of a single device overflow, because of one sample, all devices skip the step.
#[test]
fn one_device_that_overflows_stops_all() {
    let scratch = Scratch::new();
    for words in ["local:2 dp2 tp1 pp1 zero0", "local:2 dp1 tp1 pp2 micro4"] {
        let mut plan = mixed(&scratch, words);
        plan.loss_scale = Some(LossScale::Fixed(1024.0));
        let mut session = Session::new(&programs(&plan).expect("programs"), &Options::default()).expect("a session");
        let (weights, mut batch) = given(&plan);
        weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
        session.step(&batch, &scalars(0.01, 1)).expect("a step");
        let name = weights.keys().next().expect("a weight");
        let before = session.parameter(name).expect("a parameter").to_f64();
        assert_ne!(before, weights[name].to_f64(), "{words}: the first step is made");
        let target = batch.get_mut("t").expect("an input");
        let mut rows = target.to_f64();
        rows[31] = 1e4;
        *target = HostTensor::from_f64(target.ty.clone(), &rows);
        session.step(&batch, &scalars(0.01, 2)).expect("a step");
        assert_eq!(session.parameter(name).expect("a parameter").to_f64(), before, "{words}");
        assert_eq!(session.state(ALL_PARAMETERS, SKIPPED_STEPS).expect("state").to_f64(), [1.0], "{words}");
    }
}

/// Without scaling, gradients too small for f16 become zero; with it they do not.
#[test]
fn scaling_keeps_small_gradients() {
    let scratch = Scratch::new();
    let gradient = |scale: Option<LossScale>| {
        let plan = Plan { loss_scale: scale, ..mixed(&scratch, "local:1") };
        let mut session = Session::new(&programs(&plan).expect("programs"), &Options::default()).expect("a session");
        let (weights, mut batch) = given(&plan);
        weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
        // The network's own outputs, almost.
        for value in batch.values_mut() {
            *value =
                HostTensor::from_f64(value.ty.clone(), &value.to_f64().iter().map(|x| x * 3e-5).collect::<Vec<_>>());
        }
        session.step(&batch, &scalars(0.0, 1)).expect("a step");
        let name = weights.keys().find(|name| name.contains("w2")).expect("a weight");
        session.accumulator(name).expect("a gradient").to_f64()
    };
    let (plain, scaled) = (gradient(None), gradient(Some(LossScale::Fixed(4096.0))));
    assert!(plain.iter().all(|g| *g == 0.0), "{plain:?}");
    assert!(scaled.iter().filter(|g| **g != 0.0).count() > scaled.len() / 2, "{scaled:?}");
}

#[test]
fn tapes_skip_the_same_steps() {
    let scratch = Scratch::new();
    for words in
        ["local:1", "local:2 dp2 tp1 pp1 zero1 micro2", "local:2 dp1 tp2 pp1", "local:2 dp1 tp1 pp2 micro2 clip"]
    {
        let plan = mixed(&scratch, words);
        let (seen, expected) = course(&plan, 9);
        assert!(seen[8][2] == 7.0, "two of the steps are made: {seen:?}");
        let programs = programs(&plan).expect("programs");
        let tapes = build(&programs, &tape::Options::default()).expect("tapes");
        let flaws = check(&tapes);
        assert!(flaws.is_empty(), "{words}: {flaws:?}");
        let (weights, batch) = given(&plan);
        let mut host = Host::new(&programs, &tapes);
        weights.iter().for_each(|(name, tensor)| host.load_parameter(name, tensor).expect("a parameter"));
        for (number, [loss, ..]) in (1u64..).zip(&seen) {
            let stepped = host.step(&batch, &scalars(0.01, number), number).unwrap_or_else(|e| panic!("{words}: {e}"));
            assert!(near(stepped.loss, *loss, HALF), "{words}, step {number}: {} {loss}", stepped.loss);
        }
        for (name, expected) in &expected {
            let found = host.parameter(name).expect("a parameter").data;
            assert!(found.iter().zip(expected).all(|(a, b)| near(*a, *b, HALF)), "{words}: {name}");
        }
    }
}

#[test]
fn gpus_skip_the_same_steps() {
    let scratch = Scratch::new();
    let Some(search) = emulator(&scratch, 2) else { return };
    let options = CudaOptions { search, cache: Some(scratch.path("kernels")), ..CudaOptions::default() };
    for words in ["local:1 micro2", "local:2 dp2 tp1 pp1 zero1", "local:2 dp1 tp1 pp2 micro2 clip"] {
        let plan = mixed(&scratch, words);
        let (seen, expected) = course(&plan, 9);
        let mut gpu = Session::on_gpus(&programs(&plan).expect("programs"), &options).expect("it starts");
        let (weights, batch) = given(&plan);
        weights.iter().for_each(|(name, tensor)| gpu.load_parameter(name, tensor).expect("a parameter"));
        for (number, cpu) in (1u64..).zip(&seen) {
            let loss = gpu.step(&batch, &scalars(0.01, number)).expect("a step").loss;
            let [scale, skipped] =
                [SCALE, SKIPPED_STEPS].map(|slot| gpu.state(ALL_PARAMETERS, slot).expect("state").to_f64()[0]);
            assert_eq!([scale, skipped], cpu[1..], "{words}, step {number}");
            assert!(near(loss, cpu[0], HALF), "{words}, step {number}: {loss} {}", cpu[0]);
        }
        for (name, expected) in &expected {
            let found = gpu.parameter(name).expect("a parameter").to_f64();
            assert!(found.iter().zip(expected).all(|(a, b)| near(*a, *b, HALF)), "{words}: {name}");
        }
    }
}

/// The lines of a run's metrics, without times.
fn lines(file: &Path) -> Vec<[f64; 4]> {
    let text = std::fs::read_to_string(file).expect("metrics");
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        ["step", "loss", "loss_scale", "skipped_steps"].map(|key| line[key].as_f64().expect("a number"))
    };
    text.lines().map(line).collect()
}

#[test]
fn a_run_that_goes_on_does_so_with_its_scale() {
    let scratch = Scratch::new();
    let model = scratch.file("mixed.mlir", MIXED);
    let run = |name: &str, steps: &str, words: &[&str]| {
        let (folder, metrics) = (scratch.path(name), scratch.path(name).with_extension("jsonl"));
        let (folder, metrics) = (folder.display().to_string(), metrics.display().to_string());
        let all = ["run", &model, "--steps", steps, "--checkpoint", &folder, "--metrics", &metrics, "--resume"];
        altiplano(&[&all, words].concat())
    };
    let scaled = ["--cluster", "local:2", "--dp", "2", "--loss-scale", "dynamic:1e7:2"];
    let whole = run("whole", "30", &scaled);
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);
    assert!(whole.stdout.contains("skipped: gradients overflow, loss scale now 5000000"), "{}", whole.stdout);
    let parted = run("parted", "20", &scaled);
    assert_eq!(parted.code, Some(0), "{}", parted.stderr);
    // With another loss scale, the state would have another meaning.
    let other = run("parted", "30", &["--cluster", "local:2", "--dp", "2", "--loss-scale", "128"]);
    assert_eq!(other.code, Some(2), "{}", other.stdout);
    assert!(other.stderr.contains("use the same --loss-scale"), "{}", other.stderr);
    assert_eq!(run("parted", "30", &scaled).code, Some(0));
    let [whole, parted] = ["whole", "parted"].map(|name| lines(&scratch.path(name).with_extension("jsonl")));
    assert_eq!(whole, parted);
    let skipped = whole.last().expect("steps")[3];
    assert!(skipped > 0.0 && skipped < 30.0 && whole.iter().any(|line| line[2] != whole[0][2]), "{whole:?}");
}

#[test]
fn what_cannot_be_scaled_is_said() {
    let scratch = Scratch::new();
    let model = scratch.file("mixed.mlir", MIXED);
    for (words, said) in [
        (vec!["plan", &model, "--loss-scale", "many"], "expected dynamic"),
        (vec!["plan", &model, "--loss-scale=-2"], "expected dynamic"),
        (vec!["plan", &model, "--loss-scale", "dynamic:2:0"], "interval"),
        (vec!["plan", &model, "--precision", "f16", "--loss-scale", "65536"], "largest power of two"),
        (vec!["plan", &model, "--update", "stale", "--loss-scale", "dynamic"], "gradients are late"),
        (vec!["plan", &model, "--loss", "none", "--loss-scale", "2"], "--loss-scale"),
        (vec!["run", &model, "--check-nan"], "--loss-scale off"),
    ] {
        let output = altiplano(&words);
        assert_eq!(output.code, Some(2), "{words:?}: {}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(said), "{words:?}: {}", output.stderr);
    }
    let off = succeeds(&["run", &model, "--cluster", "local:1", "--steps", "2", "--loss-scale", "off", "--check-nan"]);
    assert!(off.contains("step    2"), "{off}");
    // Late gradients require a fixed scale.
    let late = ["--cluster", "local:2", "--dp", "2", "--update", "stale", "--loss-scale", "64", "--steps", "3"];
    let late = succeeds(&[&["run", &model], late.as_slice()].concat());
    assert!(late.contains("step    3"), "{late}");
    let plain = succeeds(&["plan", crate::common::DEMO, "--cluster", "local:1"]);
    assert!(!plain.contains("loss scale"), "{plain}");
    let scaled = succeeds(&["plan", &model, "--cluster", "local:1"]);
    assert!(scaled.contains("loss scale dynamic from 65536"), "{scaled}");
}

/// A plan file states the loss scale; an invalid one is rejected.
#[test]
fn plans_say_what_scales_them() -> Result<(), Error> {
    let scratch = Scratch::new();
    let plan = mixed(&scratch, "local:2 dp1 tp1 pp2 micro2");
    let text = plan.to_json();
    assert_eq!(Plan::from_json(&text).expect("a plan").loss_scale, plan.loss_scale);
    for (found, other) in [("\"interval\": 3", "\"interval\": 0"), ("\"initial\": 524288.0", "\"initial\": -1.0")] {
        assert!(text.contains(found), "{text}");
        let error = Plan::from_json(&text.replace(found, other)).expect_err("no such scale").to_string();
        assert!(error.contains("loss_scale"), "{error}");
    }
    let states = Session::new(&programs(&plan)?, &Options::default()).expect("a session").states();
    for slot in [SCALE, SKIPPED_STEPS, UNCHANGED_STEPS] {
        assert!(states.contains(&(ALL_PARAMETERS.to_string(), slot.to_string())), "{states:?}");
    }
    Ok(())
}
