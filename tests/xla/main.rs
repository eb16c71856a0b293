//! Plans on XLA's devices, through the PJRT plugin for CPUs that `ALTIPLANO_PJRT_PLUGIN` names. The oracle runs these
//! tests (`tests/oracle/run xla`).

use altiplano::ir::autodiff::differentiate;
use altiplano::ir::batch::rebatch;
use altiplano::ir::expand::expand;
use altiplano::ir::graph::{Graph, ValueId};
use altiplano::ir::interpret::run;
use altiplano::ir::op::Op;
use altiplano::ir::plan::Plan;
use altiplano::ir::tensor::Tensor;
use altiplano::planner::{Request, Silent, programs};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use altiplano_xla::pjrt::{self, ClientOption, Platform, Plugin};
use altiplano_xla::program::Engine;
use std::collections::BTreeMap;
use std::path::Path;

/// Numbers between -0.2 and 0.2, the same for a name everywhere.
fn value(name: &str, ty: &altiplano::ir::types::TensorType, largest: f64) -> Tensor {
    let mut state =
        name.bytes().fold(0x9e37_79b9_7f4a_7c15u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    Tensor::from_fn(ty.clone(), |_| match ty.dtype.is_float() {
        true => ty.dtype.round(0.4 * next() - 0.2),
        false => (largest * next()).floor(),
    })
}

/// Loss and gradients of the whole batch by the reference interpreter.
fn reference(graph: &Graph, leaves: &BTreeMap<String, Tensor>) -> (f64, BTreeMap<String, Tensor>) {
    let expanded = expand(graph).graph;
    let of = differentiate(&expanded, &[]).expect("it is differentiable");
    let mut all = of.graph;
    let mut outputs = vec![of.loss];
    let names: Vec<String> = expanded.trained_parameters().map(|(_, name)| name.to_string()).collect();
    for (v, _) in expanded.trained_parameters() {
        let parts: Vec<ValueId> = of.contributions[v.index()].iter().map(|c| c.1).collect();
        outputs.push(parts.into_iter().reduce(|a, b| all.add(a, b)).expect("a gradient"));
    }
    all.outputs = outputs;
    let leaf = |v: ValueId| match &all.node(v).op {
        Op::Parameter(op) => leaves[&op.name].clone(),
        Op::Input(op) => leaves[&op.name].clone(),
        op => unreachable!("{op:?} is no leaf"),
    };
    let mut results = run(&all, leaf).into_iter();
    let loss = results.next().expect("a loss").data[0];
    (loss, names.into_iter().zip(results).collect())
}

fn relative(found: &Tensor, expected: &Tensor) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut found.data.iter().zip(&expected.data).map(|(a, b)| a - b));
    apart / norm(&mut expected.data.iter().copied()).max(1e-6)
}

/// The values of a model's leaves, and its loss and gradients on one device for the whole batch.
struct Known {
    leaves: BTreeMap<String, Tensor>,
    loss: f64,
    gradients: BTreeMap<String, Tensor>,
}

fn known(plan: &Plan) -> Known {
    let whole = rebatch(&plan.graph, plan.global_batch).expect("the whole batch");
    let mut leaves = BTreeMap::new();
    for (v, leaf) in whole.parameters().chain(whole.inputs()) {
        leaves.insert(leaf.to_string(), value(leaf, whole.ty(v), 8.0));
    }
    let (loss, gradients) = reference(&whole, &leaves);
    Known { leaves, loss, gradients }
}

/// Runs one step of a plan through the plugin and compares with one device.
fn compare(name: &str, plan: &Plan, known: &Known) {
    let file = pjrt::find(None, Platform::Cpu).expect("a plugin for CPUs");
    let plugin = Plugin::open(&file).expect("a plugin that opens");
    let client = plugin.client(&[ClientOption::Number("cpu_device_count".into(), 4)]).expect("a client");
    let programs = programs(plan).expect("programs");
    let mut engine = Engine::new(&client, &programs).unwrap_or_else(|e| panic!("{name}: {e}"));
    for (_, leaf) in plan.graph.parameters() {
        engine.load(leaf, &known.leaves[leaf]).expect("it is loaded");
    }
    let rows = |leaf: &str, microbatch: u32| {
        let (v, _) = plan.graph.inputs().find(|(_, name)| *name == leaf)?;
        let (node, all) = (plan.graph.node(v), known.leaves.get(leaf)?);
        let first = |d: usize| if node.batch_dims >> d & 1 == 1 { u64::from(microbatch) * node.ty.shape[d] } else { 0 };
        let at = |i: &[u64]| all.at(&i.iter().enumerate().map(|(d, i)| first(d) + i).collect::<Vec<_>>());
        Some(Tensor::from_fn(node.ty.clone(), at))
    };
    let scalar = |name: &str| Some(if name == "step" { 1.0 } else { 1e-3 });
    let loss = engine.step(&rows, &scalar).unwrap_or_else(|e| panic!("{name}: {e}"));
    let error = (loss - known.loss).abs() / known.loss.abs();
    assert!(error <= 1e-5, "{name}: loss {loss}, expected {}", known.loss);
    let scale = if programs.loss_is_mean { 1.0 / f64::from(plan.num_microbatches) } else { 1.0 };
    let mut worst: f64 = 0.0;
    for (parameter, expected) in &known.gradients {
        let mut found = engine.accumulator(parameter).expect("a gradient");
        found.data.iter_mut().for_each(|x| *x *= scale);
        let error = relative(&found, expected);
        assert!(error <= 1e-4, "{name}: the gradient of {parameter} is {error:.1e} off");
        worst = worst.max(error);
        let updated = engine.parameter(parameter).expect("a parameter");
        assert_ne!(updated.data, known.leaves[parameter].data, "{name}: {parameter} is not updated");
    }
    println!(
        "ok {name}: loss {loss:.6}, {error:.1e} off; {} gradients, at most {worst:.1e} off",
        known.gradients.len()
    );
}

/// A plan of one stage on four devices. `None` if the model cannot be split so.
fn planned(file: &str, fix: &dyn Fn(&mut Request)) -> Option<Plan> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(file);
    let model = load_model(&file, &ImportOptions::default()).expect("a model");
    let mut request = request(&model, load_cluster("local:4").expect("a cluster"));
    (request.degrees.pp, request.pad) = (Some(1), false);
    fix(&mut request);
    plan(&request, &Silent).ok()
}

fn split(dp: u32, tp: u32, zero: u8, microbatches: u32) -> impl Fn(&mut Request) {
    move |request| {
        (request.degrees.dp, request.degrees.tp, request.degrees.zero) = (Some(dp), Some(tp), Some(zero));
        request.batch.num_microbatches = Some(microbatches);
    }
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn plans_of_one_stage_compute_what_one_device_computes() {
    let plans = [
        ("dp 4", split(4, 1, 0, 1)),
        ("tp 4", split(1, 4, 0, 1)),
        ("dp 2, tp 2, zero 3", split(2, 2, 3, 1)),
        ("dp 2, tp 2, zero 1, 2 microbatches", split(2, 2, 1, 2)),
    ];
    let mut seen = 0;
    for model in ["scanned-remat.mlir", "moe-switch.mlir", "state-space.mlir", "unet.mlir"] {
        let mut values = None;
        for (name, fix) in &plans {
            let name = format!("{model} {name}");
            let Some(plan) = planned(model, fix) else {
                println!("no plan: {name}");
                continue;
            };
            let values = values.get_or_insert_with(|| known(&plan));
            compare(&name, &plan, values);
            seen += 1;
        }
    }
    assert!(seen >= 8, "only {seen} plans");
}
