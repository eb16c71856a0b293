//! Training with parameter servers. Synchronous servers compute, bit by bit, the result of one device that runs the
//! workers' microbatches in sequence. Asynchronous servers update after each push with the weights that the worker had,
//! like a simple loop on one device. Predicted memory equals held memory on workers and servers.

use crate::common::steps::{OneByOne, Tensors, batch_of, difference, trained};
use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::Plan;
use altiplano::planner::{OverServers, Silent};
use altiplano::runtime::{HostData, HostTensor, Options};
use altiplano::simulate::Simulation;
use altiplano::training::{Training, scalars, session, start};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use altiplano_ir::recompute::Recompute;

/// The head shares the token table, so one parameter has gradients from both ends of the model.
const GPT: &str =
    r#"{"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}"#;
const LARGER: &str =
    r#"{"model_type": "gpt2", "vocab_size": 4096, "n_positions": 256, "n_embd": 1024, "n_layer": 8, "n_head": 16}"#;

const STEPS: u64 = 12;
const RATE: f64 = 0.05;

/// A model, and how it is trained.
#[derive(Clone)]
struct Case {
    workers: u32,
    servers: u32,
    asynchronous: bool,
    /// Microbatches of a worker in a step.
    microbatches: u32,
    optimizer: Optimizer,
    clip_norm: Option<f64>,
}

impl Case {
    fn new(workers: u32, servers: u32, microbatches: u32, optimizer: &str) -> Case {
        let optimizer = Optimizer::parse(optimizer).expect("an optimizer");
        Case { workers, servers, asynchronous: false, microbatches, optimizer, clip_norm: None }
    }

    fn asynchronous(self) -> Case {
        Case { asynchronous: true, ..self }
    }

    /// The plan for this number of devices and samples per step.
    fn planned(&self, devices: u32, samples: u64, microbatches: u32, over: Option<OverServers>) -> Plan {
        let scratch = Scratch::new();
        let file = scratch.file("config.json", GPT);
        let import = ImportOptions { batch: Some(samples), sequence: Some(16), ..ImportOptions::default() };
        let model = load_model(file.as_ref(), &import).expect("a model");
        let mut request = request(&model, load_cluster(&format!("local:{devices}")).expect("a cluster"));
        (request.baselines, request.servers) = (false, over);
        (request.batch.num_microbatches, request.recompute) = (Some(microbatches), Some(Recompute::None));
        (request.training.optimizer, request.training.clip_norm) = (self.optimizer, self.clip_norm);
        if over.is_none() {
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(devices), Some(1), Some(1));
            request.degrees.zero = Some(0);
        }
        plan(&request, &Silent).expect("a plan")
    }

    fn samples(&self) -> u64 {
        2 * u64::from(self.workers * self.microbatches)
    }

    fn plan(&self) -> Plan {
        let over = OverServers { count: self.servers, asynchronous: self.asynchronous };
        self.planned(self.workers + self.servers, self.samples(), self.workers * self.microbatches, Some(over))
    }

    /// One device with the same microbatches.
    fn alone(&self) -> Plan {
        self.planned(1, self.samples(), self.workers * self.microbatches, None)
    }

    /// One device with the samples of one worker.
    fn worker(&self) -> Plan {
        self.planned(1, self.samples() / u64::from(self.workers), self.microbatches, None)
    }
}

/// The rows of a batch that belong to worker `w` of `workers`.
fn dealt(batch: &Tensors, w: usize, workers: usize) -> Tensors {
    let part = |tensor: &HostTensor| {
        let mut ty = tensor.ty.clone();
        ty.shape[0] /= workers as u64;
        let bytes = tensor.data.as_bytes();
        let each = bytes.len() / workers;
        HostTensor::new(ty, HostData::from_bytes(tensor.data.class(), &bytes[w * each..][..each])).expect("a part")
    };
    batch.iter().map(|(name, tensor)| (name.clone(), part(tensor))).collect()
}

/// Losses and weights of sequential updates by each worker on one device. Each uses the gradient at the weights after
/// the worker's previous update. Steps in `flushed` give all workers the newest weights.
fn one_after_the_other(case: &Case, whole: &Plan, weights: &Tensors, flushed: &[u64]) -> (Vec<f64>, Tensors) {
    let plan = case.worker();
    let workers = case.workers as usize;
    let mut device = session(&plan, &Options::default()).expect("a session");
    let mut one = OneByOne::new(&plan, weights);
    let mut seen = vec![weights.clone(); workers];
    let mut losses = Vec::new();
    for step in 1..=STEPS {
        let batch = batch_of(whole, step);
        let mut of_step: Vec<f64> = Vec::new();
        for (w, seen) in seen.iter_mut().enumerate() {
            for (name, tensor) in seen.iter() {
                device.load_parameter(name, tensor).expect("loaded");
            }
            let number = (step - 1) * workers as u64 + w as u64 + 1;
            let ran = device.step(&dealt(&batch, w, workers), &scalars(RATE, number)).expect("a step");
            of_step.extend(ran.losses);
            one.update(&plan, &mut device, &scalars(RATE, number));
            *seen = one.weights.clone();
        }
        losses.push(of_step.iter().sum::<f64>() / of_step.len() as f64);
        if flushed.contains(&step) {
            seen.fill(one.weights.clone());
        }
    }
    (losses, one.weights)
}

/// Checks that held memory equals predicted memory everywhere in the plan.
fn check_memory(plan: &Plan, held: &[u64]) {
    let over = plan.servers.as_ref().expect("servers");
    for &worker in &over.workers {
        assert_eq!(held[worker as usize], plan.stages[0].predicted.peak_bytes, "worker {worker}");
    }
    for (&server, predicted) in over.servers.iter().zip(&over.predicted) {
        assert_eq!(held[server as usize], predicted.peak_bytes, "server {server}");
        assert_eq!(predicted.memory.total(), predicted.peak_bytes);
    }
    let simulation = Simulation::new(plan.clone(), None).expect("a simulation");
    let memories = simulation.memory();
    assert_eq!(memories.len(), held.len());
    for (device, memory) in memories.iter().enumerate() {
        assert_eq!(memory.peak_bytes, held[device], "device {device}");
        assert_eq!(memory.by_category().values().sum::<u64>(), memory.peak_bytes, "device {device}");
        assert_eq!(memory.points.iter().map(|p| p.1).max(), Some(memory.peak_bytes), "device {device}");
    }
    // Servers hold weights and state but no activations; workers hold activations and weights but no state.
    let parameters: u64 = plan.graph.parameters().map(|(v, _)| plan.graph.ty(v).bytes()).sum();
    let slots = plan.optimizer.slots(altiplano::ir::dtype::DType::F32).len() as u64;
    let of_servers =
        |of: fn(&altiplano::ir::plan::Memory) -> u64| over.predicted.iter().map(|s| of(&s.memory)).sum::<u64>();
    assert_eq!(of_servers(|m| m.parameters_bytes), parameters);
    // Each server keeps the norm for clipping gradients.
    let norms = if plan.clip_norm.is_some() { 4 * over.servers.len() as u64 } else { 0 };
    assert_eq!(of_servers(|m| m.optimizer_bytes), slots * parameters + norms);
    let pushes = if over.asynchronous || over.workers.len() == 1 { 1 } else { 2 };
    assert!(of_servers(|m| m.gradients_bytes) <= pushes * parameters + 16 * over.servers.len() as u64);
    let worker = plan.stages[0].predicted.memory;
    assert_eq!((worker.parameters_bytes, worker.gradients_bytes), (parameters, parameters));
    assert_eq!(worker.optimizer_bytes, 0);
}

/// Trains with servers and on one device. A tolerance of 0 requires equal weights bit by bit.
fn check(case: &Case, flushed: &[u64], tolerance: f64) {
    let plan = case.plan();
    assert!(plan.verify().is_empty(), "{:?}", plan.verify());
    assert_eq!(Plan::from_json(&plan.to_json()).expect("a plan"), plan);
    assert_eq!(plan.num_devices(), case.workers + case.servers);
    let alone = case.alone();
    let (weights, _) = start(&alone, &Training::default()).expect("weights");
    let (losses, expected) = match case.asynchronous {
        true => one_after_the_other(case, &plan, &weights, flushed),
        false => {
            let (losses, expected, _) = trained(&alone, &weights, STEPS, RATE, flushed);
            (losses, expected)
        }
    };
    let (ours, updated, devices) = trained(&plan, &weights, STEPS, RATE, flushed);
    let what = format!("{} workers, {} servers, {:?}", case.workers, case.servers, case.optimizer);
    if tolerance == 0.0 {
        assert_eq!(ours, losses, "{what}");
        assert!(updated == expected, "{what}: {}", difference(&updated, &expected));
    } else {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * b.abs();
        assert!(ours.iter().zip(&losses).all(near), "{what}: {ours:?} {losses:?}");
        assert!(difference(&updated, &expected) < tolerance, "{what}: {}", difference(&updated, &expected));
    }
    check_memory(&plan, &devices.peak_bytes());
}

#[test]
fn workers_that_wait_compute_what_one_device_computes() {
    // With one microbatch per worker, sums have the order of one device.
    check(&Case::new(2, 1, 1, "sgd"), &[], 0.0);
    check(&Case::new(3, 2, 1, "adamw"), &[4], 0.0);
    check(&Case::new(1, 1, 3, "sgd"), &[], 0.0);
    check(&Case::new(2, 3, 2, "sgd"), &[], 1e-5);
    // Servers exchange their shares of the norm.
    check(&Case { clip_norm: Some(0.5), ..Case::new(2, 2, 1, "sgd") }, &[], 1e-5);
}

#[test]
fn asynchronous_servers_update_by_one_push_after_the_other_to_the_bit() {
    let late = Case::new(3, 2, 1, "sgd").asynchronous();
    check(&late, &[], 0.0);
    check(&Case::new(2, 1, 2, "adamw").asynchronous(), &[], 0.0);
    check(&Case::new(1, 2, 1, "adamw").asynchronous(), &[], 0.0);
    // A flush gives all workers the newest weights, as a checkpoint does.
    check(&Case::new(2, 2, 1, "adamw").asynchronous(), &[1, 5, 6], 0.0);
    // The result differs from synchronous training, and from training without late gradients.
    let plan = late.plan();
    let (weights, _) = start(&plan, &Training::default()).expect("weights");
    let (together, _, _) = trained(&Case { asynchronous: false, ..late.clone() }.plan(), &weights, STEPS, RATE, &[]);
    let always: Vec<u64> = (1..=STEPS).collect();
    let (ours, updated, _) = trained(&plan, &weights, STEPS, RATE, &[]);
    let (_, flushed, _) = trained(&plan, &weights, STEPS, RATE, &always);
    assert_ne!(ours, together);
    assert!(difference(&flushed, &updated) > 1e-4);
    assert_eq!(plan.servers.map(|over| over.staleness()), Some(2));
}

/// Data parallelism over as many devices sums in another order and gives the same result.
#[test]
fn servers_compute_what_an_all_reduce_computes() {
    let case = Case::new(4, 1, 1, "sgd");
    let over = case.plan();
    let replicas = case.planned(4, case.samples(), 1, None);
    let (weights, _) = start(&over, &Training::default()).expect("weights");
    let (ours, updated, _) = trained(&over, &weights, STEPS, RATE, &[]);
    // The batch has the same size but other microbatches.
    let (theirs, expected, _) = trained(&replicas, &weights, STEPS, RATE, &[]);
    assert!(ours.iter().zip(&theirs).all(|(a, b)| (a - b).abs() < 1e-5 * b), "{ours:?} {theirs:?}");
    assert!(difference(&updated, &expected) < 1e-5, "{}", difference(&updated, &expected));
}

/// From the command line: the output mentions servers, verification passes, and checkpoints resume under other plans,
/// and bit by bit under the same plan.
#[test]
fn servers_are_asked_for_said_and_resumed() {
    let scratch = Scratch::new();
    let waiting = ["--cluster", "local:6", "--parameter-servers", "2"];
    let asynchronous = ["--cluster", "local:6", "--parameter-servers", "2", "--asynchronous"];
    for options in [&waiting[..], &asynchronous[..]] {
        let is_late = options.contains(&"--asynchronous");
        let file = scratch.path("plan.json").display().to_string();
        let said = succeeds(&[&["plan", DEMO, "-o", &file], options].concat());
        assert!(said.contains("2 servers, which 4 workers push gradients to"), "{said}");
        assert!(said.contains("server1") && said.contains("data parallel"), "{said}");
        assert_eq!(said.contains("gradients are 3 updates late"), is_late, "{said}");
        let said = succeeds(&["simulate", &file, "--trace", &scratch.path("trace.json").display().to_string()]);
        assert!(said.contains("server0: "), "{said}");
        assert_eq!(said.contains("3 updates late"), is_late, "{said}");
        let said = succeeds(&["simulate", &file, "--memory"]);
        assert!(said.contains("worker0: ") && said.contains("server1: "), "{said}");
        let said = succeeds(&["verify", &file]);
        assert!(said.contains("the numbers agree"), "{said}");
        assert_eq!(said.contains("updated weights"), !is_late, "{said}");

        let run = |folder: &str, steps: &str, more: &[&str]| {
            let folder = scratch.path(folder).display().to_string();
            let words = ["run", DEMO, "--steps", steps, "--checkpoint", &folder, "--checkpoint-every", "2"];
            let rate = ["--lr-steps", "6", "--lr-schedule", "cosine"];
            let said = succeeds(&[&words[..], &rate, more].concat());
            let weights = scratch.path("w.safetensors").display().to_string();
            succeeds(&["checkpoint", &folder, "-o", &weights]);
            (said, std::fs::read(weights).expect("weights"))
        };
        let name = |what: &str| format!("{what}-{is_late}");
        let resumed = [options, &["--resume"]].concat();
        let (_, whole) = run(&name("whole"), "6", options);
        run(&name("parts"), "4", options);
        let (said, parts) = run(&name("parts"), "6", &resumed);
        assert!(said.contains("resuming after step 4") && said.contains("server0"), "{said}");
        assert!(whole == parts, "{options:?}");
        // To a pipeline and back.
        run(&name("other"), "2", options);
        run(&name("other"), "4", &["--dp", "2", "--pp", "2", "--resume"]);
        let (said, _) = run(&name("other"), "6", &resumed);
        assert!(said.contains("resuming after step 4"), "{said}");
    }
}

#[test]
fn what_does_not_go_with_servers_is_refused() {
    let refused = |more: &[&str], why: &str| {
        let output = altiplano(&[&["plan", DEMO, "--cluster", "local:6", "--parameter-servers", "2"], more].concat());
        assert!(output.code == Some(2) && output.stderr.contains(why), "{more:?}: {}", output.stderr);
    };
    refused(&["--tp", "2"], "every worker holds all of the model");
    refused(&["--pp", "2"], "every worker holds all of the model");
    refused(&["--zero", "1"], "servers hold all state");
    refused(&["--dp", "6"], "not the number of workers");
    refused(&["--update", "stale"], "--asynchronous");
    refused(&["--schedule", "gpipe"], "1f1b");
    refused(&["--target", "megatron"], "its own runtime");
    refused(&["--loss-scale", "128"], "must be off");
    refused(&["--global-batch", "6"], "no multiple of the number of workers");
    refused(&["--num-microbatches", "2"], "no multiple of the number of workers");
    refused(&["--asynchronous", "--clip-norm", "1"], "norm of all gradients");
    refused(&["--frontier"], "no frontier");
    refused(&["--search", "alpa"], "--search");
    let output = altiplano(&["plan", DEMO, "--parameter-servers", "4"]);
    assert!(output.code == Some(2) && output.stderr.contains("no device"), "{}", output.stderr);
    let output = altiplano(&["plan", DEMO, "--asynchronous"]);
    assert!(output.code == Some(2) && output.stderr.contains("--parameter-servers"), "{}", output.stderr);
    let words = ["run", DEMO, "--cluster", "local:6", "--parameter-servers", "2", "--measure-noise-scale"];
    let output = altiplano(&words);
    assert!(output.code == Some(2) && output.stderr.contains("--measure-noise-scale"), "{}", output.stderr);
}

/// A plan file is untrusted data: an error in its servers names its place.
#[test]
fn damaged_plans_are_refused() {
    let plan = Case::new(2, 2, 1, "sgd").asynchronous().plan();
    let refused = |damage: &dyn Fn(&mut Plan), place: &str| {
        let mut damaged = plan.clone();
        damage(&mut damaged);
        let said = Plan::from_json(&damaged.to_json()).expect_err("it is refused").to_string();
        assert!(said.contains(place), "{said}");
    };
    fn over(plan: &mut Plan) -> &mut altiplano::ir::servers::ParameterServers {
        plan.servers.as_mut().expect("servers")
    }
    refused(&|p| over(p).workers.clear(), "servers: must have a worker");
    refused(&|p| over(p).servers[1] = 0, "servers: must be different devices");
    refused(&|p| over(p).servers[1] = 99, "servers: must be different devices");
    refused(&|p| over(p).workers.swap(0, 1), "servers.workers: must begin");
    refused(&|p| drop(over(p).holds.pop_first()), "servers.holds");
    refused(&|p| over(p).holds.values_mut().for_each(|server| *server = 2), "servers.holds");
    refused(&|p| over(p).predicted.truncate(1), "servers.predicted");
    refused(&|p| p.clip_norm = Some(1.0), "servers.asynchronous");
    refused(&|p| (p.num_microbatches, p.global_batch) = (3, 6), "servers.workers: must divide");
    refused(&|p| p.update = altiplano::ir::plan::Update::Stale, "servers: go with");
}

/// Messages of all workers to one server queue up. More servers, and asynchronous updates, shorten the queue.
#[test]
fn what_servers_take_is_predicted() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt.json", LARGER);
    let import = ImportOptions { batch: Some(60), sequence: Some(256), ..ImportOptions::default() };
    let model = load_model(file.as_ref(), &import).expect("a model");
    let planned = |count: u32, asynchronous: bool| {
        let mut request = request(&model, load_cluster("dgx-a100:2").expect("a preset"));
        request.baselines = false;
        request.servers = Some(OverServers { count, asynchronous });
        (request.recompute, request.batch.num_microbatches) = (Some(Recompute::None), Some(16 - count));
        plan(&request, &Silent).expect("a plan")
    };
    let of_server = |plan: &Plan| plan.servers.as_ref().map(|over| over.predicted[0]).expect("servers");
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let computed_s = |plan: &Plan| plan.stages[0].predicted.forward_s + plan.stages[0].predicted.backward_s;
    let one = planned(1, false);
    // The eight workers of the other node push all gradients through the server's network card, which then sends as
    // much.
    let sent: u64 = one.graph.parameters().map(|(v, _)| one.graph.ty(v).bytes()).sum();
    let line_s = 8.0 * sent as f64 / one.cluster.groups[0].inter_node.bytes_per_s;
    let link_s = of_server(&one).link_s;
    assert!(link_s >= line_s && link_s < 1.5 * line_s, "{link_s} {line_s}");
    assert!(step_s(&one) >= computed_s(&one) + 2.0 * link_s, "{} {link_s}", step_s(&one));
    let several = planned(4, false);
    let exchanged_s = |plan: &Plan| step_s(plan) - computed_s(plan);
    assert!(exchanged_s(&several) < 0.5 * exchanged_s(&one), "{} {}", exchanged_s(&several), exchanged_s(&one));
    // Asynchronous workers compute while the server's links are busy, so only the links count.
    let late = planned(1, true);
    let (ours, server) = (step_s(&late), of_server(&late));
    assert!(ours < 0.6 * step_s(&one), "{ours} {}", step_s(&one));
    let least = server.link_s.max(server.compute_s).max(computed_s(&late));
    assert!(ours >= 0.999 * least && ours < 1.2 * least, "{ours} {server:?}");
}
