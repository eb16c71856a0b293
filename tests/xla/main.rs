//! Plans on XLA's devices, through the PJRT plugin for CPUs that `ALTIPLANO_PJRT_PLUGIN` names. The oracle runs these
//! tests (`tests/oracle/run xla`).

use altiplano::ir::autodiff::differentiate;
use altiplano::ir::expand::expand;
use altiplano::ir::graph::{Graph, ValueId};
use altiplano::ir::interpret::run;
use altiplano::ir::op::Op;
use altiplano::ir::tensor::Tensor;
use altiplano::planner::{Request, Silent, programs};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use altiplano_xla::pjrt::{self, ClientOption, Platform, Plugin};
use altiplano_xla::program::Engine;
use std::collections::BTreeMap;
use std::path::Path;

/// Numbers between -0.2 and 0.2, the same for a name everywhere.
fn value(name: &str, ty: &altiplano::ir::types::TensorType, largest: f64) -> Tensor {
    let mut state = name.bytes().fold(0x9e37_79b9_7f4a_7c15u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
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

/// Plans the demo for four devices, runs one step through the plugin, and compares with the interpreter.
fn agrees(name: &str, fix: impl Fn(&mut Request)) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/gpt-small-demo.mlir");
    let model = load_model(&file, &ImportOptions::default()).expect("the demo");
    let mut request = request(&model, load_cluster("local:4").expect("a cluster"));
    request.degrees.pp = Some(1);
    fix(&mut request);
    let plan = plan(&request, &Silent).expect("a plan");
    let file = pjrt::find(None, Platform::Cpu).expect("a plugin for CPUs");
    let plugin = Plugin::open(&file).expect("a plugin that opens");
    let client = plugin.client(&[ClientOption::Number("cpu_device_count".into(), 4)]).expect("a client");
    let programs = programs(&plan).expect("programs");
    let mut engine = Engine::new(&client, &programs).unwrap_or_else(|e| panic!("{name}: {e}"));
    let whole = altiplano::ir::batch::rebatch(&plan.graph, plan.global_batch).expect("the whole batch");
    let mut leaves = BTreeMap::new();
    for (v, leaf) in whole.parameters().chain(whole.inputs()) {
        leaves.insert(leaf.to_string(), value(leaf, whole.ty(v), 200.0));
    }
    for (_, leaf) in whole.parameters() {
        engine.load(leaf, &leaves[leaf]).expect("it is loaded");
    }
    let rows = |leaf: &str, microbatch: u32| {
        let (v, _) = plan.graph.inputs().find(|(_, name)| *name == leaf)?;
        let node = plan.graph.node(v);
        let all = leaves.get(leaf)?;
        let first = |d: usize| if node.batch_dims >> d & 1 == 1 { u64::from(microbatch) * node.ty.shape[d] } else { 0 };
        Some(Tensor::from_fn(node.ty.clone(), |i| all.at(&i.iter().enumerate().map(|(d, i)| first(d) + i).collect::<Vec<_>>())))
    };
    let scalar = |name: &str| Some(if name == "step" { 1.0 } else { 1e-3 });
    let loss = engine.step(&rows, &scalar).unwrap_or_else(|e| panic!("{name}: {e}"));
    let (expected, gradients) = reference(&whole, &leaves);
    assert!((loss - expected).abs() <= 1e-5 * expected.abs(), "{name}: loss {loss}, expected {expected}");
    let scale = if programs.loss_is_mean { 1.0 / f64::from(plan.num_microbatches) } else { 1.0 };
    let mut worst: f64 = 0.0;
    for (parameter, expected) in &gradients {
        let mut found = engine.accumulator(parameter).expect("a gradient");
        found.data.iter_mut().for_each(|x| *x *= scale);
        let error = relative(&found, expected);
        assert!(error <= 1e-4, "{name}: the gradient of {parameter} is {error:.1e} off");
        worst = worst.max(error);
        let updated = engine.parameter(parameter).expect("a parameter");
        assert_ne!(updated.data, leaves[parameter].data, "{name}: {parameter} is not updated");
    }
    println!("{name}: loss {loss:.6}, {:.1e} off; gradients at most {worst:.1e} off", (loss / expected - 1.0).abs());
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn plans_of_one_stage_compute_what_one_device_computes() {
    let degrees = |dp, tp| {
        move |request: &mut Request| (request.degrees.dp, request.degrees.tp) = (Some(dp), Some(tp))
    };
    agrees("dp 4", degrees(4, 1));
    agrees("tp 4", degrees(1, 4));
    agrees("dp 2, tp 2", degrees(2, 2));
    agrees("dp 2, tp 2, zero 3", |request| {
        degrees(2, 2)(request);
        request.degrees.zero = Some(3);
    });
    agrees("dp 4, zero 3, 2 microbatches", |request| {
        degrees(4, 1)(request);
        request.degrees.zero = Some(3);
        request.batch.num_microbatches = Some(2);
    });
}
