//! Optimizer state in host memory. Results have the same bits, devices hold only a bounded part of the state, the cost
//! is that of the host link, and plans offload if nothing fits otherwise.

use crate::common::offloading::{import, offloaded, ran};
use crate::common::{Scratch, altiplano, planned, succeeds};
use altiplano::ir::plan::{Offload, Plan};
use altiplano::planner::explain::account::{Work, accounts};
use altiplano::planner::features::offload::{of_nodes, only_where_needed};
use altiplano::planner::predict::memory::{cpu_host_peaks, cpu_peaks};
use altiplano::planner::search::memory_bound;
use altiplano::planner::{PlanFailure, Progress, Request, Silent, fits, plan, plan_with, programs};
use altiplano::runtime::tape::host::Host;
use altiplano::runtime::tape::{self, build};
use altiplano::runtime::{Options, Session};
use altiplano::training::{Training, scalars, start};
use altiplano::{ImportOptions, load_cluster, load_model, request};
use altiplano_cost_models::Rooflines;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{HostCopy, HostRoute, Op, Unary};
use altiplano_ir::program::{BufferKind, Phase, Program};
use std::path::Path;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}"#;

/// Bytes of optimizer state of a device of each program, and those of the largest parameter.
fn state_bytes(plan: &Plan) -> Vec<(u64, u64)> {
    let of_program = |program: &altiplano_ir::program::Program| {
        let mut each = std::collections::BTreeMap::<&str, u64>::new();
        for buffer in program.buffers.iter().filter(|b| b.host) {
            let BufferKind::State { parameter, .. } = &buffer.kind else { panic!("{} is in host memory", buffer.name) };
            *each.entry(parameter).or_default() += buffer.sharding.local_bytes(&buffer.ty, &program.mesh);
        }
        (each.values().sum(), each.values().copied().max().unwrap_or(0))
    };
    programs(plan).expect("programs").programs.iter().map(of_program).collect()
}

#[test]
fn state_in_host_memory_changes_no_bit() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    for words in [
        "local:1",
        "local:2 dp2 tp1 pp1 zero1 bf16",
        "local:2 dp1 tp2 pp1 micro2 clip",
        "local:4 dp2 tp1 pp2 micro4 zero3",
        "local:2 dp1 tp1 pp2 micro4 virtual2",
        "local:2 dp1 tp1 pp2 micro4 pipedream",
        "local:1 f16",
    ] {
        let here = planned(Path::new(&file), &import(), words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let away = offloaded(&here, Offload::OPTIMIZER);
        let (expected, found) = (ran(&here), ran(&away));
        assert_eq!(found.losses, expected.losses, "{words}");
        assert!(found.held == expected.held, "{words}: weights or state differ");
        assert!(expected.host.iter().all(|&bytes| bytes == 0), "{words}: {:?}", expected.host);
        // Predicted memory equals held memory, on devices and hosts.
        let programs = programs(&away).expect("programs");
        let predicted = cpu_peaks(&programs);
        for (lane, (state, largest)) in state_bytes(&away).into_iter().enumerate() {
            let in_host = cpu_host_peaks(&programs)[lane];
            assert!(state > 0 && in_host == state, "{words}: {in_host} of {state} in host memory");
            assert_eq!(away.stages[lane].predicted.host_bytes, in_host);
            for &device in &away.stages[lane].devices {
                let device = device as usize;
                assert_eq!((found.own[device], found.host[device]), (predicted[lane], in_host), "{words}");
                // The prefetch window, and an update's results beside the values that they replace.
                let most = expected.own[device] - state + 7 * largest / 2;
                assert!(found.own[device] <= most, "{words}: {} of at most {most}", found.own[device]);
            }
        }
    }
}

/// On GPUs the device's arena shrinks by the state, which moves to the host's.
#[test]
fn arenas_of_gpus_hold_a_window_of_it() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    for words in ["dgx-a100/1 bf16", "dgx-a100/2 dp2 tp1 pp1 zero1", "dgx-h100/2 dp1 tp1 pp2 micro4 bf16"] {
        let here = planned(Path::new(&file), &import(), words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let away = offloaded(&here, Offload::OPTIMIZER);
        let tapes = |plan: &Plan| build(&programs(plan).expect("programs"), &tape::Options::default()).expect("tapes");
        for (rank, (here, now)) in tapes(&here).iter().zip(&tapes(&away)).enumerate() {
            assert_eq!(tape::check(&tapes(&away)), []);
            let (state, largest) = state_bytes(&away)[now.program as usize];
            assert!(here.arena.host_bytes == 0 && now.arena.host_bytes >= state, "{words}, rank {rank}");
            assert_eq!(now.arena.host_bytes, away.stages[now.program as usize].predicted.host_bytes);
            let most = here.arena.bytes - state + 7 * largest / 2;
            assert!(now.arena.bytes <= most, "{words}, rank {rank}: {} of at most {most}", now.arena.bytes);
            let text = now.to_string();
            assert!(text.contains("in the memory of the host"), "{text}");
        }
    }
}

/// Tapes with f32 master copies in host memory compute the same bits as those with copies on devices.
#[test]
fn tapes_compute_the_same_bits() {
    let scratch = Scratch::new();
    let config = GPT2.replace("\"n_embd\": 32", "\"n_embd\": 8").replace("\"n_layer\": 4", "\"n_layer\": 2");
    let file = scratch.file("gpt2.json", &config);
    let import = ImportOptions { sequence: Some(4), ..import() };
    let here = planned(Path::new(&file), &import, "local:2 dp2 tp1 pp1 zero1 bf16").expect("a plan");
    let training = Training { steps: 2, learning_rate: 1e-2, ..Training::default() };
    let run = |plan: &Plan, seed: u64| {
        let programs = programs(plan).expect("programs");
        let tapes = build(&programs, &tape::Options::default()).expect("tapes");
        let mut host = Host::new(&programs, &tapes);
        let (weights, mut batches) = start(plan, &training).expect("weights and batches");
        weights.iter().for_each(|(name, tensor)| host.load_parameter(name, tensor).expect("a parameter"));
        for number in 1..=training.steps {
            let batch = batches.take().expect("a batch");
            host.step(&batch, &scalars(training.learning_rate, number), seed).expect("a step");
        }
        weights.keys().map(|name| host.parameter(name).expect("a parameter").data).collect::<Vec<_>>()
    };
    let (expected, away) = (run(&here, 0), offloaded(&here, Offload::OPTIMIZER));
    for seed in 0..4 {
        assert!(run(&away, seed) == expected, "seed {seed}");
    }
}

/// A request for a model on one GPU with fixed degrees, memory and offloading.
fn asked(file: &str, cluster: &str, memory_bytes: Option<u64>, offload: Option<Offload>) -> Request {
    let model = load_model(Path::new(file), &import()).expect("a model");
    let mut request = request(&model, load_cluster(cluster).expect("a cluster"));
    request.baselines = false;
    (request.batch.num_microbatches, request.recompute) = (Some(1), Some(altiplano_ir::recompute::Recompute::None));
    (request.degrees.dp, request.degrees.tp, request.degrees.virtual_stages) = (Some(1), Some(1), Some(1));
    request.offload = offload;
    let device = &mut request.cluster.groups[0].device;
    device.memory_bytes = memory_bytes.unwrap_or(device.memory_bytes);
    // Tensors can use all of the memory.
    device.reserved = None;
    request
}

#[test]
fn what_does_not_fit_otherwise_is_offloaded() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2.replace("\"n_embd\": 32", "\"n_embd\": 64"));
    let ask = |memory: Option<u64>, offload| plan(&asked(&file, "dgx-a100/1", memory, offload), &Silent);
    let here = ask(None, Some(Offload::NONE)).expect("a plan");
    let away = ask(None, Some(Offload::OPTIMIZER)).expect("a plan");
    assert!(away.stages[0].offload == Offload::OPTIMIZER && here.stages[0].offload == Offload::NONE);
    assert!(away.predicted.step_time_s > here.predicted.step_time_s);
    assert!(away.predicted.peak_bytes[0] < here.predicted.peak_bytes[0]);
    // A plan that fits does not offload.
    assert_eq!(ask(None, None).expect("a plan"), here);
    let between = (away.predicted.peak_bytes[0] + here.predicted.peak_bytes[0]) / 2;
    assert!(matches!(ask(Some(between), Some(Offload::NONE)), Err(PlanFailure::Memory { .. })));
    let found = ask(Some(between), None).expect("a plan");
    assert!(fits(&found) && found.stages[0].offload == Offload::OPTIMIZER);
    let all = Plan::from_json(&found.to_json()).expect("it reads back");
    assert_eq!(all, found);
    // If the node lacks memory as well, there is no plan.
    let mut request = asked(&file, "dgx-a100/1", Some(between), Some(Offload::OPTIMIZER));
    request.cluster.groups[0].host_memory_bytes = Some(found.stages[0].predicted.host_bytes - 1);
    let Err(PlanFailure::HostMemory { required_bytes, limit_bytes }) = plan(&request, &Silent) else {
        panic!("the node has too little");
    };
    assert_eq!((required_bytes, limit_bytes + 1), (of_nodes(&found)[&0], found.stages[0].predicted.host_bytes));
}

/// The bound of memory is never above what a plan needs, and a request beyond it fails without a search.
#[test]
fn every_plan_holds_the_bound_of_memory() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    for words in ["dgx-a100/1 bf16", "dgx-a100/4 dp4 tp1 pp1 zero3", "dgx-a100/4 dp1 tp2 pp2 micro4 bf16", "dgx-a100/2"]
    {
        let here = planned(Path::new(&file), &import(), words).unwrap_or_else(|error| panic!("{words}: {error}"));
        for plan in [offloaded(&here, Offload::OPTIMIZER), here] {
            let what = plan.stages[0].offload;
            let mut request = Request::of_plan(&plan);
            let devices = u64::from(request.cluster.num_devices());
            let (on_devices, on_hosts) = memory_bound::lasting_bytes(&request, what);
            let group = &mut request.cluster.groups[0];
            group.device.reserved = None;
            group.device.memory_bytes = *plan.predicted.peak_bytes.iter().max().expect("a device");
            group.host_memory_bytes = of_nodes(&plan).get(&0).copied();
            assert!(memory_bound::failure(&request, what).is_none(), "{words}");
            let held: u64 = plan.stages.iter().map(|s| s.predicted.peak_bytes * s.devices.len() as u64).sum();
            assert!(on_devices > 0 && on_devices <= held, "{words}: {on_devices} of {held} bytes");
            assert!(on_hosts <= of_nodes(&plan).values().sum(), "{words}: {on_hosts} bytes in host memory");

            request.cluster.groups[0].device.memory_bytes = on_devices / devices - 1;
            request.cluster.groups[0].host_memory_bytes = Some(on_hosts.saturating_sub(1));
            (request.offload, request.baselines) = (None, false);
            let failed = plan_with(&request, &Rooflines::of(&request.cluster), &NoSearch);
            assert!(matches!(failed, Err(PlanFailure::Memory { closest: None, .. })), "{words}: {failed:?}");
        }
    }
}

/// Fails when a search begins.
struct NoSearch;

impl Progress for NoSearch {
    fn step(&self, what: &str, _: usize, _: usize) {
        panic!("{what} is searched");
    }
}

/// Only the stage that lacks memory offloads.
#[test]
fn stages_with_room_keep_their_state() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2.replace("\"n_layer\": 4", "\"n_layer\": 9"));
    let mut away = planned(Path::new(&file), &import(), "dgx-a100/2 dp1 tp1 pp2 micro2 offload").expect("a plan");
    let needs = |plan: &Plan, stage: usize| {
        let predicted = &plan.stages[stage].predicted;
        predicted.peak_bytes + predicted.host_bytes
    };
    let (small, large) = if needs(&away, 0) < needs(&away, 1) { (0, 1) } else { (1, 0) };
    assert!(needs(&away, small) < needs(&away, large));
    let limit = (needs(&away, small) + needs(&away, large)) / 2;
    away.cluster.groups[0].device.memory_bytes = limit;
    away.cluster.groups[0].device.reserved = None;
    assert!(fits(&away));
    let costs = Rooflines::of(&away.cluster);
    let found = only_where_needed(away.clone(), &costs).expect("a prediction");
    assert_eq!((found.stages[small].offload, found.stages[large].offload), (Offload::NONE, Offload::OPTIMIZER));
    assert!(fits(&found) && found.stages[small].predicted.host_bytes == 0);
    assert!(found.predicted.step_time_s <= away.predicted.step_time_s);
    // If both have enough memory, neither offloads.
    away.cluster.groups[0].device.memory_bytes = 1 << 30;
    let found = only_where_needed(away, &costs).expect("a prediction");
    assert!(found.stages.iter().all(|stage| stage.offload == Offload::NONE));
}

/// The update takes as long as the slower of its own work and the link, in each direction separately.
#[test]
fn copies_cost_what_the_link_takes() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2.replace("\"n_embd\": 32", "\"n_embd\": 256"));
    let step = |rate: f64| {
        let mut request = asked(&file, "dgx-a100/1", None, Some(Offload::OPTIMIZER));
        request.cluster.groups[0].device.host_bytes_per_s = Some(rate);
        plan(&request, &Silent).expect("a plan")
    };
    let [slow, slower] = [1e9, 5e8].map(step);
    let bytes = slow.stages[0].predicted.host_bytes as f64;
    let more_s = slower.predicted.step_time_s - slow.predicted.step_time_s;
    assert!((more_s / (bytes / 1e9) - 1.0).abs() < 0.1, "{more_s} for {bytes} bytes");
    let account = &accounts(&slow, &Rooflines::of(&slow.cluster)).expect("accounts")[0];
    let copies_s = account.0[&Work::HostCopies];
    assert!((copies_s / (bytes / 1e9) - 1.0).abs() < 0.2, "{copies_s} for {bytes} bytes");
    // Over a fast link, only the launch of each copy remains.
    let update_s = |plan: &Plan| plan.stages[0].predicted.step_s;
    assert!(update_s(&step(1e15)) < update_s(&slow) / 4.0);
}

#[test]
fn reports_say_what_is_where() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let cluster = scratch.file(
        "small.toml",
        "name = \"small\"\n[[group]]\nnodes = 1\ndevices_per_node = 1\ndevice = \"little\"\nhost_memory_bytes = 1e9\n\
         [device.little]\nlike = \"A100-SXM-80GB\"\nmemory_bytes = MEMORY\n",
    );
    let with = |memory: u64| {
        let text = std::fs::read_to_string(&cluster).expect("the cluster").replace("MEMORY", &memory.to_string());
        scratch.file("cluster.toml", &text)
    };
    let roomy = with(1_000_000_000);
    let saved = scratch.path("plan.json").display().to_string();
    let fixed = ["--seq", "16", "--global-batch", "8", "--num-microbatches", "1", "--recompute", "none"];
    let run =
        |cluster: &str, more: &[&str]| altiplano(&[&["plan", &file, "--cluster", cluster], &fixed[..], more].concat());
    let output = run(&roomy, &["--offload", "optimizer", "-o", &saved]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    for part in ["optimizer state in host memory", "in host memory: ", "of 1.00 GB on a node"] {
        assert!(output.stdout.contains(part), "{part}\n{}", output.stdout);
    }
    let said = succeeds(&["simulate", &saved, "--memory"]);
    assert!(said.contains("in the memory of its host: optimizer state"), "{said}");
    let away = Plan::from_json(&std::fs::read_to_string(&saved).expect("the plan")).expect("it reads");
    let here = {
        assert_eq!(run(&roomy, &["-o", &saved]).code, Some(0));
        Plan::from_json(&std::fs::read_to_string(&saved).expect("the plan")).expect("it reads")
    };
    let between = (away.predicted.peak_bytes[0] + here.predicted.peak_bytes[0]) / 2;
    let cramped = with(between);
    let output = run(&cramped, &[]);
    assert_eq!(output.code, Some(1), "{}", output.stdout);
    let remedy = output.stderr.lines().find(|line| line.contains("--offload optimizer"));
    assert!(remedy.is_some_and(|line| line.contains("per step") && line.contains("per device")), "{}", output.stderr);
    let output = run(&cramped, &["--offload", "auto"]);
    assert!(output.code == Some(0) && output.stdout.contains("optimizer state in host memory"), "{}", output.stderr);
    let arguments = ["plan", &file, "--cluster", &roomy, "--seq", "16", "--loss", "none", "--offload", "optimizer"];
    let output = altiplano(&arguments);
    assert!(output.code == Some(2) && output.stderr.contains("--offload"), "{}", output.stderr);
}

/// Programs whose ops other than copies touch host memory are rejected.
#[test]
fn only_copies_reach_host_memory() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let here = planned(Path::new(&file), &import(), "local:1").expect("a plan");
    let good = programs(&offloaded(&here, Offload::OPTIMIZER)).expect("programs");
    assert!(Session::new(&good, &Options::default()).is_ok());
    let state = good.programs[0].buffers.iter().position(|b| b.host).expect("state");
    let weight = good.programs[0].buffers.iter().position(|b| matches!(b.kind, BufferKind::Parameter { .. }));
    let update = good.programs[0].body_of(0, Phase::Update).expect("an update") as usize;
    let node = |route: HostRoute| {
        let graph = &good.programs[0].bodies[update].graph;
        let is_it = |v: &ValueId| graph.node(*v).op == Op::HostCopy(HostCopy { route });
        graph.values().find(is_it).expect("a copy").index()
    };
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut programs = good.clone();
        change(&mut programs.programs[0]);
        match Session::new(&programs, &Options::default()) {
            Ok(_) => panic!("it starts"),
            Err(error) => error.to_string(),
        }
    };
    let said = refused(&|p| p.buffers[state].host = false);
    assert!(said.contains("a buffer outside host memory") || said.contains("another memory"), "{said}");
    let said = refused(&|p| p.buffers[weight.expect("a parameter")].host = true);
    assert!(said.contains("only optimizer state and values"), "{said}");
    // A copy that computes as well.
    for route in [HostRoute::Load, HostRoute::Store] {
        let said = refused(&|p| {
            let node = &mut p.bodies[update].graph.nodes[node(route)];
            node.op = Op::Unary(Unary::Negate);
            node.operands.truncate(1);
        });
        assert!(said.contains("which only copies may read") || said.contains("another memory"), "{said}");
    }
}
