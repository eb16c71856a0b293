//! Plans that carry the order of their calls: any verified order trains as one device does, in the memory that is
//! predicted, and the search's orders are no slower than named ones.

use crate::common::steps::{Tensors, difference, trained};
use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::cost_models::Rooflines;
use altiplano::export::{Stack, export};
use altiplano::ir::order::{Call, CallOrder, Pass};
use altiplano::ir::plan::{Placement, Plan, Schedule, Stage, Update};
use altiplano::ir::recompute::Recompute;
use altiplano::planner::explain::neighbours::neighbours;
use altiplano::planner::lower::TrainingGraphs;
use altiplano::planner::search::ordered::ordered;
use altiplano::planner::{Silent, predict_plan};
use altiplano::simulate::Simulation;
use altiplano::training::{Training, start};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use std::sync::Arc;

/// No parameter is on two stages, so a pipeline sums its gradients in the order of one device.
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": false}"#;
/// A GPT of sixteen layers.
const GPT: &str =
    r#"{"model_type": "gpt2", "vocab_size": 8192, "n_positions": 512, "n_embd": 1024, "n_layer": 16, "n_head": 16}"#;

const MICROBATCHES: u32 = 4;

/// The small model's plan over workers in a pipeline, whose lanes have `shared` stages each.
fn small(pp: u32, shared: u32, placement: Placement) -> Plan {
    let scratch = Scratch::new();
    let file = scratch.file("config.json", LLAMA);
    let import = ImportOptions { batch: Some(8), sequence: Some(16), ..ImportOptions::default() };
    let model = load_model(file.as_ref(), &import).expect("a model");
    let mut request = request(&model, load_cluster(&format!("local:{pp}")).expect("a cluster"));
    request.baselines = false;
    (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(1), Some(1), Some(pp));
    (request.degrees.virtual_stages, request.batch.num_microbatches) = (Some(shared), Some(MICROBATCHES));
    request.schedule = Some(if placement == Placement::V { Schedule::ZbV } else { Schedule::OneFOneB });
    let plan = plan(&request, &Silent).expect("a plan");
    assert_eq!(plan.placement, placement);
    plan
}

/// The plan under an order, with its prediction.
fn under(plan: &Plan, order: CallOrder) -> Plan {
    let plan = Plan { schedule: Schedule::Found, order: Some(Arc::new(order)), ..plan.clone() };
    let costs = Rooflines::of(&plan.cluster);
    let plan = predict_plan(plan, &costs).expect("a prediction");
    assert_eq!(plan.verify().len(), 0, "{:?}", plan.verify());
    plan
}

/// An order that is drawn by chance: lanes take turns at any call whose operand is there. `splits` are the stages that
/// compute gradients of weights apart.
fn drawn(plan: &Plan, splits: &[bool], seed: u64) -> CallOrder {
    let mut state = seed;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let stages = plan.stages.len();
    let mut done = vec![[0u32; 3]; stages];
    let mut order = CallOrder { lanes: vec![Vec::new(); plan.num_lanes()] };
    loop {
        let mut ready = Vec::new();
        for s in 0..stages {
            let [f, b, w] = done[s];
            let possible = [
                f < MICROBATCHES && (s == 0 || done[s - 1][0] > f),
                b < f && (s + 1 == stages || done[s + 1][1] > b),
                splits[s] && w < b,
            ];
            let passes = [Pass::Forward, Pass::Backward, Pass::Weights].into_iter().zip(possible);
            ready.extend(passes.filter(|p| p.1).map(|(pass, _)| Call { stage: s as u32, pass }));
        }
        if ready.is_empty() {
            return order;
        }
        let call = ready[below(ready.len())];
        done[call.stage as usize][call.pass as usize] += 1;
        order.lanes[plan.lane_of(call.stage as usize)].push(call);
    }
}

fn compare(plan: &Plan, weights: &Tensors, losses: &[f64], expected: &Tensors) {
    let (ours, updated, workers) = trained(plan, weights, 4, 0.05, &[1, 2, 3, 4]);
    let order = plan.order.as_deref();
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * b.abs();
    assert!(ours.iter().zip(losses).all(near), "{order:?}: {ours:?} {losses:?}");
    assert!(difference(&updated, expected) < 1e-6, "{order:?}: {}", difference(&updated, expected));
    for (lane, stage) in plan.lanes().iter().enumerate() {
        for &device in &stage.devices {
            let held = workers.peak_bytes()[device as usize];
            assert_eq!(held, stage.predicted.peak_bytes, "{order:?}: bytes of a device of lane {lane}");
        }
    }
    let simulation = Simulation::new(plan.clone(), None).expect("programs");
    for (memory, stage) in simulation.memory().iter().zip(plan.lanes()) {
        assert_eq!(memory.peak_bytes, stage.predicted.peak_bytes);
    }
    let (step_s, calls) = simulation.calls();
    assert!((step_s - plan.predicted.step_time_s).abs() <= 1e-9 * step_s);
    assert_eq!(calls.len(), plan.num_lanes());
}

#[test]
fn any_order_trains_as_one_device_does() {
    let one = small(1, 1, Placement::Loop);
    let (weights, _) = start(&one, &Training::default()).expect("weights");
    let (losses, expected, _) = trained(&one, &weights, 4, 0.05, &[1, 2, 3, 4]);
    for (pp, shared, placement) in [
        (2, 1, Placement::Loop),
        (3, 1, Placement::Loop),
        (2, 2, Placement::Loop),
        (2, 2, Placement::V),
        (3, 2, Placement::V),
    ] {
        let plain = small(pp, shared, placement);
        for seed in 0..4u64 {
            let splits: Vec<bool> = (0..plain.stages.len()).map(|s| (seed + s as u64) % 3 > 0).collect();
            let plan = under(&plain, drawn(&plain, &splits, seed));
            for (stage, &splits) in splits.iter().enumerate() {
                assert_eq!(plan.splits(stage), splits);
            }
            assert_eq!(Plan::from_json(&plan.to_json()).expect("the plan"), plan);
            // Neighbours of the plan have its lanes and its order.
            for next in neighbours(&plan, 1).expect("neighbours").into_iter().filter_map(|next| next.plan.ok()) {
                assert_eq!((&next.order, next.placement, next.verify().len()), (&plan.order, placement, 0));
            }
            compare(&plan, &weights, &losses, &expected);
        }
    }
}

#[test]
fn wrong_orders_in_files_are_refused() {
    let plain = small(2, 1, Placement::Loop);
    let plan = under(&plain, drawn(&plain, &[true, false], 1));
    let refused = |change: &dyn Fn(&mut Plan), path: &str, problem: &str| {
        let mut wrong = plan.clone();
        change(&mut wrong);
        let error = Plan::from_json(&wrong.to_json()).expect_err("a refusal").to_string();
        assert!(error.starts_with(path) && error.contains(problem), "{error}");
    };
    let order = |plan: &mut Plan, change: &dyn Fn(&mut CallOrder)| {
        change(Arc::make_mut(plan.order.as_mut().expect("an order")));
    };
    refused(&|plan| plan.order = None, "order", "under the schedule found");
    refused(&|plan| plan.schedule = Schedule::OneFOneB, "order", "under no other");
    refused(&|plan| plan.update = Update::Stale, "update", "synchronous");
    refused(&|plan| order(plan, &|o| o.lanes[0].truncate(1)), "order", "once for each microbatch");
    refused(&|plan| order(plan, &|o| o.lanes.swap(0, 1)), "order", "not on its lane");
    refused(&|plan| order(plan, &|o| o.lanes[1].reverse()), "order", "in a circle");
    refused(&|plan| order(plan, &|o| o.lanes[0][0].stage = u32::MAX), "order", "not on its lane");
    let text = plan.to_json().replacen("\"F0 ", "\"G0 ", 1);
    let error = Plan::from_json(&text).expect_err("a refusal").to_string();
    assert!(error.contains("`G0` is not a call"), "{error}");
}

/// The search of a larger model on GPUs: the order is never slower than any named schedule for the same stages. On
/// devices without room for `zb-h1`, it is faster than `1f1b`.
#[test]
fn found_orders_are_no_slower_than_named_ones() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt.json", GPT);
    let import = ImportOptions { batch: Some(32), sequence: Some(512), ..ImportOptions::default() };
    let model = load_model(file.as_ref(), &import).expect("a model");
    let planned = |found: bool, schedule: Option<Schedule>, microbatches: u32| {
        let mut request = request(&model, load_cluster("p3.16xlarge:1").expect("a preset"));
        request.baselines = false;
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(2), Some(1), Some(4));
        (request.degrees.virtual_stages, request.batch.num_microbatches) = (Some(1), Some(microbatches));
        (request.recompute, request.degrees.zero) = (Some(Recompute::None), Some(0));
        (request.schedule, request.searches_order) = (schedule, found);
        plan(&request, &Silent).expect("a plan")
    };
    for microbatches in [4, 8] {
        let free = planned(true, None, microbatches);
        assert_eq!(free.verify().len(), 0);
        let named = [Schedule::OneFOneB, Schedule::GPipe, Schedule::ZbH1]
            .map(|schedule| planned(false, Some(schedule), microbatches));
        for named in &named {
            let (ours_s, named_s) = (free.predicted.step_time_s, named.predicted.step_time_s);
            assert!(ours_s <= named_s * (1.0 + 1e-5), "{}: {ours_s} against {named_s}", named.schedule);
        }
        let [plain, _, apart] = named;
        let peak = |plan: &Plan| plan.predicted.peak_bytes.iter().copied().max().expect("a stage");
        assert!(peak(&plain) < peak(&apart));
        let usable = (peak(&plain) + peak(&apart)) / 2;
        let mut tight = plain.clone();
        let group = &mut tight.cluster.groups[0];
        group.device.memory_bytes -= plain.cluster.usable_bytes(group) - usable;
        // Other devices have other prices.
        let plain = predict_plan(tight.clone(), &Rooflines::of(&tight.cluster)).expect("a prediction");
        let graphs = TrainingGraphs::of(&tight).expect("gradients");
        let found = ordered(&tight, &graphs, &Rooflines::of(&tight.cluster)).expect("an order");
        let (ours_s, plain_s) = (found.plan.predicted.step_time_s, plain.predicted.step_time_s);
        assert!(found.bound_s <= ours_s && ours_s < 0.99 * plain_s, "{} {ours_s} {plain_s}", found.bound_s);
        let fits = |stage: &Stage| stage.predicted.peak_bytes <= found.plan.usable_bytes(stage);
        assert!(found.plan.stages.iter().all(fits));
    }
}

#[test]
fn found_orders_are_asked_for_said_exported_and_verified() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let asked = ["--dp", "1", "--pp", "2", "--num-microbatches", "4", "--schedule", "found"];
    let mut arguments = vec!["plan", DEMO, "-o", &file];
    arguments.extend(asked);
    let said = succeeds(&arguments);
    assert!(said.contains("over 2 stages"), "{said}");
    assert!(succeeds(&["verify", &file]).contains("the numbers agree"));
    assert!(succeeds(&["simulate", &file]).contains("stage"));
    let output = altiplano(&["plan", DEMO, "--target", "megatron", "--schedule", "found"]);
    assert!(output.code == Some(2) && output.stderr.contains("named schedules only"), "{}", output.stderr);
    // PyTorch's runtime reads the calls of each stage.
    let plain = small(2, 1, Placement::Loop);
    let plan = under(&plain, drawn(&plain, &[true, false], 3));
    let text = export(&plan, Stack::Torch).expect("a module").text;
    let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("SCHEDULE = ")).skip(1).take(2).collect();
    let mut made = [[0u32; 3]; 2];
    let mut row = |lane: &Vec<Call>| {
        let action = |call: &Call| {
            let count = &mut made[call.stage as usize][call.pass as usize];
            *count += 1;
            // A backward call that leaves gradients of weights to another is one for inputs.
            let pass = if call.pass == Pass::Backward && call.stage == 0 { 'I' } else { call.pass.letter() };
            format!("{}{pass}{}", call.stage, *count - 1)
        };
        lane.iter().map(action).collect::<Vec<_>>().join(",")
    };
    let order = plan.order.as_ref().expect("an order");
    assert_eq!(rows, order.lanes.iter().map(&mut row).collect::<Vec<_>>());
}
