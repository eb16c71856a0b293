//! Training with gradients that are one step late: pipelines without a flush, and reductions that overlap with the next
//! step. Results equal those of one device that gets the previous step's weights, bit by bit if sums have the same
//! order. Predicted memory equals held memory.

use crate::common::steps::{OneByOne, Tensors, batch_of, difference, trained};
use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::{Plan, Schedule, Update};
use altiplano::planner::{Silent, programs};
use altiplano::runtime::Options;
use altiplano::runtime::recording::{Span, What};
use altiplano::simulate::Simulation;
use altiplano::training::{Training, scalars, session, start};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{BufferKind, Call, Phase, Program};
use altiplano_ir::recompute::Recompute;

/// No parameter is on two stages, so a pipeline sums its gradients in the order of one device.
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": false}"#;
/// The token table is on the first stage and on the last.
const GPT: &str =
    r#"{"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2}"#;

/// Its gradients take long to send.
const LARGER: &str =
    r#"{"model_type": "gpt2", "vocab_size": 4096, "n_positions": 256, "n_embd": 1024, "n_layer": 8, "n_head": 16}"#;

const STEPS: u64 = 20;
const RATE: f64 = 0.05;

/// A model, and how it is trained.
#[derive(Clone)]
struct Case {
    model: &'static str,
    dp: u32,
    pp: u32,
    zero: u8,
    microbatches: u32,
    schedule: Schedule,
    update: Update,
    optimizer: Optimizer,
    clip_norm: Option<f64>,
}

impl Case {
    fn new(pp: u32, microbatches: u32) -> Case {
        Case {
            model: LLAMA,
            dp: 1,
            pp,
            zero: 0,
            microbatches,
            schedule: Schedule::PipeDream,
            update: Update::Synchronous,
            optimizer: Optimizer::parse("sgd").expect("an optimizer"),
            clip_norm: None,
        }
    }

    fn plan(&self) -> Plan {
        let scratch = Scratch::new();
        let file = scratch.file("config.json", self.model);
        let import = ImportOptions { batch: Some(8), sequence: Some(16), ..ImportOptions::default() };
        let model = load_model(file.as_ref(), &import).expect("a model");
        let mut request = request(&model, load_cluster(&format!("local:{}", self.dp * self.pp)).expect("a cluster"));
        request.baselines = false;
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(self.dp), Some(1), Some(self.pp));
        (request.degrees.zero, request.batch.num_microbatches) = (Some(self.zero), Some(self.microbatches));
        (request.schedule, request.training.update) = (Some(self.schedule), self.update);
        (request.training.optimizer, request.training.clip_norm) = (self.optimizer, self.clip_norm);
        (request.degrees.virtual_stages, request.recompute) = (Some(1), Some(Recompute::None));
        plan(&request, &Silent).expect("a plan")
    }

    /// One device with the same microbatches.
    fn alone(&self) -> Plan {
        let synchronous = (Schedule::OneFOneB, Update::Synchronous);
        let (schedule, update) = synchronous;
        Case { dp: 1, pp: 1, zero: 0, schedule, update, ..self.clone() }.plan()
    }
}

/// Losses and weights of `w[t+1] = w[t] - f(g(w[t - 1]))` on one device: a step's gradients are those of the weights
/// with which the previous step started. Steps in `flushed` end before the next begins, which then is not late.
fn delayed(plan: &Plan, weights: &Tensors, flushed: &[u64]) -> (Vec<f64>, Tensors) {
    let mut device = session(plan, &Options::default()).expect("a session");
    let (mut older, mut one) = (weights.clone(), OneByOne::new(plan, weights));
    let mut losses = Vec::new();
    for step in 1..=STEPS {
        for (name, tensor) in &older {
            device.load_parameter(name, tensor).expect("loaded");
        }
        losses.push(device.step(&batch_of(plan, step), &scalars(RATE, step)).expect("a step").loss);
        let before = one.weights.clone();
        one.update(plan, &mut device, &scalars(RATE, step));
        older = if flushed.contains(&step) { one.weights.clone() } else { before };
    }
    (losses, one.weights)
}

/// Trains by workers and by the delayed rule on one device. A tolerance of 0 requires equal bits.
fn check(case: &Case, flushed: &[u64], tolerance: f64) -> Plan {
    let plan = case.plan();
    assert_eq!(plan.staleness(), 1);
    assert_eq!((plan.num_lanes() as u32, plan.num_microbatches), (case.pp, case.microbatches));
    let alone = case.alone();
    let (weights, _) = start(&alone, &Training::default()).expect("weights");
    let (losses, expected) = delayed(&alone, &weights, flushed);
    let (ours, updated, workers) = trained(&plan, &weights, STEPS, RATE, flushed);
    let what = format!("{} dp {} pp {} {:?}", plan.schedule, case.dp, case.pp, case.update);
    if tolerance == 0.0 {
        assert_eq!(ours, losses, "{what}");
        assert!(updated == expected, "{what}: {}", difference(&updated, &expected));
    } else {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * b.abs();
        assert!(ours.iter().zip(&losses).all(near), "{what}: {ours:?} {losses:?}");
        assert!(difference(&updated, &expected) < tolerance, "{what}: {}", difference(&updated, &expected));
    }
    for (lane, stage) in plan.lanes().iter().enumerate() {
        for &device in &stage.devices {
            let held = workers.peak_bytes()[device as usize];
            assert_eq!(held, stage.predicted.peak_bytes, "{what}: bytes of a device of lane {lane}");
        }
    }
    for (memory, stage) in Simulation::new(plan.clone(), None).expect("programs").memory().iter().zip(plan.lanes()) {
        let peak = stage.predicted.peak_bytes;
        assert_eq!(memory.peak_bytes, peak, "{what}");
        assert_eq!(memory.by_category().values().sum::<u64>(), peak, "{what}");
        assert_eq!(memory.points.iter().map(|p| p.1).max(), Some(peak), "{what}");
    }
    plan
}

/// Pipelines of two and more stages without a flush, with as many microbatches as stages, more, and fewer.
#[test]
fn pipedream_is_training_with_gradients_one_step_late_to_the_bit() {
    for (pp, microbatches) in [(2, 4), (2, 1), (4, 4), (4, 8), (4, 2)] {
        check(&Case::new(pp, microbatches), &[], 0.0);
    }
    // The result differs from synchronous training.
    let alone = Case::new(1, 4).alone();
    let (weights, _) = start(&alone, &Training::default()).expect("weights");
    let always: Vec<u64> = (1..=STEPS).collect();
    let (late, at_once) = (delayed(&alone, &weights, &[]), delayed(&alone, &weights, &always));
    assert_ne!(late.0, at_once.0);
    assert!(difference(&at_once.1, &late.1) > 1e-3);
    let adamw = Optimizer::parse("adamw").expect("an optimizer");
    check(&Case { optimizer: adamw, ..Case::new(2, 4) }, &[5], 0.0);
}

#[test]
fn stale_gradients_are_one_step_late_to_the_bit() {
    let stale = |schedule| Case { schedule, update: Update::Stale, ..Case::new(2, 4) };
    for schedule in [Schedule::OneFOneB, Schedule::GPipe, Schedule::ZbH1, Schedule::PipeDream] {
        check(&stale(schedule), &[], 0.0);
    }
    check(&Case { pp: 1, ..stale(Schedule::OneFOneB) }, &[], 0.0);
}

/// With every kind of communication once per step: between replicas, shards, two stages that share a table, and for the
/// global gradient norm.
#[test]
fn what_is_exchanged_once_a_step_is_late_too() {
    let replicas = Case { dp: 2, ..Case::new(2, 2) };
    let late = [
        (Schedule::PipeDream, Update::Synchronous),
        (Schedule::PipeDream, Update::Stale),
        (Schedule::OneFOneB, Update::Stale),
    ];
    for (schedule, update) in late {
        let replicas = Case { schedule, update, ..replicas.clone() };
        check(&Case { zero: 3, ..replicas.clone() }, &[], 1e-5);
        check(&Case { model: GPT, clip_norm: Some(0.5), ..replicas }, &[], 1e-5);
    }
    check(&Case { dp: 4, pp: 1, schedule: Schedule::OneFOneB, update: Update::Stale, ..replicas }, &[], 1e-5);
}

/// Devices that send copies, as processes do, reduce a step's gradients while they run the calls of the next. The
/// reductions begin before any of these and end before the update. Losses and weights are those of devices without
/// overlap, bit by bit.
#[test]
fn late_reductions_go_on_behind_the_calls_of_the_next_step() {
    let stale = |dp, pp, zero, schedule| Case { dp, pp, zero, schedule, update: Update::Stale, ..Case::new(2, 2) };
    let cases = [
        stale(2, 1, 0, Schedule::OneFOneB),
        stale(4, 1, 1, Schedule::OneFOneB),
        stale(2, 2, 1, Schedule::PipeDream),
        Case { model: GPT, clip_norm: Some(0.5), ..stale(2, 2, 0, Schedule::OneFOneB) },
    ];
    for case in cases {
        let plan = case.plan();
        let what = format!("{} dp {} pp {} zero {}", plan.schedule, case.dp, case.pp, case.zero);
        let programs = programs(&plan).expect("programs");
        let (weights, _) = start(&plan, &Training::default()).expect("weights");
        let run = |by_messages: bool| {
            let options = Options { record: true, by_messages, ..Options::default() };
            let mut workers = session(&plan, &options).expect("a session");
            for (name, tensor) in &weights {
                workers.load_parameter(name, tensor).expect("loaded");
            }
            let (mut losses, mut behind) = (Vec::new(), 0);
            for step in 1..=5 {
                workers.begin_step(&batch_of(&plan, step), &scalars(RATE, step)).expect("begun");
                let report = workers.end_step().expect("a step");
                losses.push(report.loss);
                for recording in &report.recordings {
                    let program = &programs.programs[recording.program as usize];
                    behind += reduced_behind(program, &recording.spans, &what);
                }
                if step == 3 {
                    workers.flush().expect("a flush");
                }
            }
            workers.flush().expect("a flush");
            let updated: Tensors =
                weights.keys().map(|name| (name.clone(), workers.parameter(name).expect("a parameter"))).collect();
            let held = workers.peak_bytes();
            for (stage, &device) in plan.lanes().iter().flat_map(|stage| stage.devices.iter().map(move |d| (stage, d)))
            {
                let (held, predicted) = (held[device as usize], stage.predicted.peak_bytes);
                assert!(held <= predicted, "{what}: device {device} held {held} bytes of {predicted}");
            }
            (losses, updated, behind)
        };
        let (in_turns, overlapped) = (run(false), run(true));
        assert_eq!(in_turns.0, overlapped.0, "{what}");
        assert!(in_turns.1 == overlapped.1, "{what}: {}", difference(&in_turns.1, &overlapped.1));
        // The first step has no late gradients, and neither has the one after the flush.
        let sums: usize = programs.programs.iter().map(sums_over_devices).sum();
        assert!(sums >= plan.graph.parameters().count() / 2, "{what}: {sums}");
        assert_eq!((in_turns.2, overlapped.2), (0, 3 * sums), "{what}");
    }
}

/// Number of gradient sums that are reduced over devices once per step.
fn sums_over_devices(program: &Program) -> usize {
    let once = program.bodies.iter().filter(|body| !body.phase.is_of_microbatch());
    let sums = once.flat_map(|body| {
        let is_sum = |v: &ValueId| {
            let read = body.reads.iter().find(|(leaf, _)| leaf == v);
            read.is_some_and(|&(_, b)| matches!(program.buffer(b).kind, BufferKind::Accumulator { .. }))
        };
        let reduces = |name: &str| name == "all_reduce" || name == "reduce_scatter";
        body.graph.nodes.iter().filter(move |node| reduces(node.op.name()) && node.operands.first().is_some_and(is_sum))
    });
    sums.count()
}

/// Number of the previous step's collectives that overlapped with a step's calls; also checks when each ran.
fn reduced_behind(program: &Program, spans: &[Span], what: &str) -> usize {
    let phase = |position: usize| match program.schedule[position] {
        Call::Run { body, .. } => Some(program.bodies[body as usize].phase),
        Call::Send { .. } | Call::Receive { .. } => None,
    };
    let called = |wanted: Phase| {
        let is_it = move |span: &&Span| matches!(span.what, What::Call { position } if phase(position) == Some(wanted));
        spans.iter().filter(is_it)
    };
    let behind: Vec<&Span> = spans.iter().filter(|span| matches!(span.what, What::AsyncCollective { .. })).collect();
    // Late backward passes run before the body whose gradients it reduces.
    let prompt = program.num_prompt();
    let is_first = !(prompt..program.schedule.len()).any(|p| phase(p) == Some(Phase::Backward));
    let calls = called(if is_first { Phase::Forward } else { Phase::Backward }).map(|call| call.start_s);
    let reference = if is_first { calls.fold(f64::INFINITY, f64::min) } else { calls.fold(0.0, f64::max) };
    for (number, span) in behind.iter().enumerate() {
        let What::AsyncCollective { position, .. } = span.what else { continue };
        assert!(matches!(phase(position), Some(Phase::Reduce | Phase::Norm | Phase::Update)), "{what}");
        assert!(number > 0 || span.start_s <= reference, "{what}: begun at {} after {reference}", span.start_s);
        assert!(called(Phase::Update).all(|call| span.end_s <= call.end_s), "{what}: ended at {}", span.end_s);
    }
    behind.len()
}

/// After a flush, as for a checkpoint, the next step is like a first one.
#[test]
fn a_flush_makes_weights_new() {
    for update in [Update::Synchronous, Update::Stale] {
        let case = Case { update, ..Case::new(4, 4) };
        check(&case, &[1, 7, 8, 13], 0.0);
    }
}

/// From the command line: the output says that gradients are late, a single step equals one device, and a resumed run
/// continues bit by bit.
#[test]
fn late_gradients_are_asked_for_said_and_resumed() {
    let scratch = Scratch::new();
    let pipeline = ["--dp", "1", "--pp", "4", "--num-microbatches", "4", "--schedule", "pipedream"];
    let stale = ["--dp", "2", "--pp", "2", "--num-microbatches", "2", "--update", "stale"];
    for options in [pipeline, stale] {
        let said = succeeds(&[&["plan", DEMO], &options[..]].concat());
        assert!(said.contains("1 step late"), "{said}");
        let said = succeeds(&[&["verify", DEMO], &options[..]].concat());
        assert!(said.contains("the numbers agree"), "{said}");
        // In both runs, the step of a checkpoint is flushed.
        let run = |folder: &str, steps: &str, resume: bool| {
            let folder = scratch.path(folder).display().to_string();
            let words =
                ["run", DEMO, "--steps", steps, "--checkpoint", &folder, "--checkpoint-every", "3", "--lr-steps", "8"];
            let resume: &[&str] = if resume { &["--resume"] } else { &[] };
            let said = succeeds(&[&words[..], resume, &options[..]].concat());
            let checkpoint =
                succeeds(&["checkpoint", &folder, "-o", &scratch.path("w.safetensors").display().to_string()]);
            assert!(checkpoint.contains("after step"), "{checkpoint}");
            (said, std::fs::read(scratch.path("w.safetensors")).expect("weights"))
        };
        let name = |what: &str| format!("{what}-{}", options[6]);
        let (_, whole) = run(&name("whole"), "8", false);
        run(&name("parts"), "6", false);
        let (said, resumed) = run(&name("parts"), "8", true);
        assert!(
            said.contains("resuming after step 6") && said.contains("1f1b") != said.contains("pipedream"),
            "{said}"
        );
        assert!(whole == resumed, "{options:?}");
        assert_ne!(whole, run(&name("never"), "7", false).1);
    }
    let output = altiplano(&[&["plan", DEMO, "--target", "megatron"], &pipeline[..]].concat());
    assert!(output.code == Some(2) && output.stderr.contains("late gradients"), "{}", output.stderr);
    let output = altiplano(&[&["run", DEMO, "--measure-noise-scale"], &stale[..]].concat());
    assert!(output.code == Some(2) && output.stderr.contains("--measure-noise-scale"), "{}", output.stderr);
    let output = altiplano(&[&["plan", DEMO, "--virtual-stages", "2"], &pipeline[..]].concat());
    assert!(output.code == Some(2) && output.stderr.contains("1f1b, zb-v and dualpipe-v only"), "{}", output.stderr);
}

/// On a cluster whose stages have their own devices no bubble remains, and sums over a slow link are no longer waited
/// for.
#[test]
fn what_is_waited_for_is_predicted() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt.json", LARGER);
    let import = ImportOptions { batch: Some(32), sequence: Some(256), ..ImportOptions::default() };
    let model = load_model(file.as_ref(), &import).expect("a model");
    let planned = |cluster: &str, (dp, pp): (u32, u32), schedule: Schedule, update: Update| {
        let mut request = request(&model, load_cluster(cluster).expect("a preset"));
        request.baselines = false;
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(1), Some(pp));
        (request.schedule, request.training.update, request.degrees.zero) = (Some(schedule), update, Some(0));
        (request.degrees.virtual_stages, request.recompute) = (Some(1), Some(Recompute::None));
        request.batch.num_microbatches = Some(if dp > 2 { 2 } else { 4 });
        plan(&request, &Silent).expect("a plan")
    };
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let flushing = planned("p3.16xlarge:1", (2, 4), Schedule::OneFOneB, Update::Synchronous);
    let endless = planned("p3.16xlarge:1", (2, 4), Schedule::PipeDream, Update::Synchronous);
    let worked = endless.stages.iter().map(|s| s.predicted.compute_s + s.predicted.communication_s);
    let least = worked.fold(0.0, f64::max);
    assert!(step_s(&endless) < 0.75 * step_s(&flushing), "{} {}", step_s(&endless), step_s(&flushing));
    assert!((step_s(&endless) / least - 1.0).abs() < 0.02, "{} {least}", step_s(&endless));
    // The first and the last stage share the token table and exchange its gradient. So their updates wait, and each
    // holds a second sum of gradients. If an update waits and all backward passes are prompt, no weights change while
    // they are in use.
    for (stage, (ours, flushed)) in endless.stages.iter().zip(&flushing.stages).enumerate() {
        let (ours, flushed) = (ours.predicted.memory, flushed.predicted.memory);
        let (versions, sums) = ([2, 2, 2, 1][stage], [2, 1, 1, 2][stage]);
        assert_eq!(ours.parameters_bytes, versions * flushed.parameters_bytes);
        assert_eq!(ours.gradients_bytes, sums * flushed.gradients_bytes);
    }

    let waits = planned("p3.16xlarge:2", (16, 1), Schedule::OneFOneB, Update::Synchronous);
    let late = planned("p3.16xlarge:2", (16, 1), Schedule::OneFOneB, Update::Stale);
    assert!(step_s(&late) < 0.95 * step_s(&waits), "{} {}", step_s(&late), step_s(&waits));
    let (late, waits) = (late.stages[0].predicted.memory, waits.stages[0].predicted.memory);
    assert_eq!((late.gradients_bytes, late.parameters_bytes), (2 * waits.gradients_bytes, waits.parameters_bytes));
}
