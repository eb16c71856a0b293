//! Tapes of real plans. Run on the host in any order that their events allow, they train as the CPU runtime does. They
//! have no races, and their arenas have the predicted size.

use crate::common::{Scratch, planned, shared_model};
use altiplano::ImportOptions;
use altiplano::ir::cluster::DeviceKind;
use altiplano::ir::kernels::{Kernel, KernelKind};
use altiplano::ir::plan::Plan;
use altiplano::ir::program::{Phase, Programs};
use altiplano::ir::storage::launched;
use altiplano::planner::predict::memory::LaneMemory;
use altiplano::planner::programs;
use altiplano::runtime::loops::{Spread, cuda};
use altiplano::runtime::tape::check::{Flaw, check};
use altiplano::runtime::tape::host::Host;
use altiplano::runtime::tape::{self, CollectiveKind, Stream, Tape, What, build, ordered};
use altiplano::runtime::{Options, Session};
use altiplano::training::{Training, scalars, start};
use std::path::PathBuf;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}"#;
const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2,
    "num_experts_per_tok": 1}"#;

/// A model with its import options.
struct Model {
    file: PathBuf,
    import: ImportOptions,
}

fn transformer(scratch: &Scratch, name: &str, config: &str) -> Model {
    let file = PathBuf::from(scratch.file(&format!("{name}.json"), config));
    Model { file, import: ImportOptions { batch: Some(8), sequence: Some(4), ..ImportOptions::default() } }
}

fn tapes(plan: &Plan) -> Vec<Tape> {
    let tapes = build(&programs(plan).expect("a plan has programs"), &tape::Options::default());
    tapes.unwrap_or_else(|error| panic!("{error}"))
}

/// Compares two steps on the CPU runtime and on tapes, in the orders of several seeds.
fn trains_alike(model: &Model, words: &str, seeds: std::ops::Range<u64>) {
    let plan = planned(&model.file, &model.import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
    let programs = programs(&plan).expect("a plan has programs");
    let tapes = tapes(&plan);
    let flaws = check(&tapes);
    assert!(flaws.is_empty(), "{words}: {:?}", &flaws[..flaws.len().min(3)]);
    let training = Training { steps: 2, learning_rate: 1e-2, ..Training::default() };
    let (weights, mut batches) = start(&plan, &training).expect("weights and batches");
    let batches = [batches.take().expect("a batch"), batches.take().expect("a batch")];
    let mut session = Session::new(&programs, &Options::default()).expect("the programs run");
    weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
    let mut losses = Vec::new();
    for (number, batch) in (1u64..).zip(&batches) {
        losses.push(session.step(batch, &scalars(training.learning_rate, number)).expect("a step").loss);
    }
    for seed in seeds {
        let mut host = Host::new(&programs, &tapes);
        weights.iter().for_each(|(name, tensor)| host.load_parameter(name, tensor).expect("a parameter"));
        for ((number, batch), expected) in (1u64..).zip(&batches).zip(&losses) {
            let stepped = host.step(batch, &scalars(training.learning_rate, number), seed);
            let loss = stepped.unwrap_or_else(|error| panic!("{words}, seed {seed}: {error}")).loss;
            let near = (loss - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(near, "{words}, seed {seed}, step {number}: loss {loss}, expected {expected}");
        }
        for (name, before) in &weights {
            let expected = session.parameter(name).expect("a parameter").to_f64();
            let found = host.parameter(name).expect("a parameter").data;
            let most = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
            let worst = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0f64, f64::max);
            assert!(worst <= 1e-4 * most.max(1.0), "{words}, seed {seed}: {name} is {worst:e} off");
            let wrong = expected.iter().zip(&found).find(|(_, x)| !x.is_finite());
            assert!(wrong.is_none(), "{words}, seed {seed}: {name}: {wrong:?}");
            assert!(found.len() == before.to_f64().len());
        }
    }
}

#[test]
fn transformers_train_as_on_the_cpu_runtime() {
    let scratch = Scratch::new();
    let gpt2 = transformer(&scratch, "gpt2", GPT2);
    for words in [
        "local:1 sgd",
        "local:1 micro2 recompute",
        "local:2 dp2 tp1 pp1 sgd",
        "local:2 dp1 tp2 pp1",
        "local:2 dp1 tp1 pp2 micro4 sgd",
        "local:2 dp2 tp1 pp1 zero3 micro2",
        "local:4 dp2 tp2 pp1 zero3 micro2 recompute",
        "local:4 dp1 tp2 pp2 micro2",
        "local:2 dp1 tp1 pp2 micro4 virtual2 sgd",
        "local:2 dp1 tp1 pp2 micro4 zb",
        "local:2 dp2 tp1 pp1 zero2 sgd",
        "local:1 offload",
        "local:2 dp2 tp1 pp1 zero3 offload",
        "local:2 dp1 tp2 pp1 offload",
        "local:2 dp1 tp1 pp2 micro4 virtual2 offload",
        "local:1 micro2 away",
        "local:2 dp1 tp2 pp1 recompute away",
        "local:2 dp1 tp1 pp2 micro4 zb away",
        "local:2 dp1 tp1 pp2 micro4 gpipe offload away",
        "local:2 dp2 tp1 pp1 sgd clip",
        "local:4 dp1 tp2 pp2 micro2 sgd clip",
    ] {
        trains_alike(&gpt2, words, 0..3);
    }
}

/// The batch's totals are summed before the first microbatch.
#[test]
fn weighted_means_train_as_on_the_cpu_runtime() {
    let file = PathBuf::from("tests/models/weighted.mlir");
    let weighted = Model { file, import: ImportOptions::default() };
    for words in ["local:1 micro4 sgd", "local:2 dp2 tp1 pp1 micro2 zero3", "local:2 dp1 tp1 pp2 micro4 sgd clip"] {
        trains_alike(&weighted, words, 0..2);
    }
}

/// Sequences longer than heads are wide, on devices with fused attention: no tensor of the size of the scores is in
/// memory.
#[test]
fn fused_attention_trains_as_on_the_cpu_runtime() {
    let scratch = Scratch::new();
    let long = |name: &str, config: String| Model {
        file: PathBuf::from(scratch.file(&format!("{name}.json"), &config)),
        import: ImportOptions { batch: Some(4), sequence: Some(24), ..ImportOptions::default() },
    };
    let gpt2 = long("gpt2", GPT2.replace("\"n_positions\": 4", "\"n_positions\": 24"));
    let llama = r#"{"model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}"#;
    let llama = long("llama", llama.to_string());
    for (model, words) in [
        (&gpt2, "dgx-h100/1 sgd"),
        (&gpt2, "dgx-h100/1 micro2 recompute"),
        (&gpt2, "dgx-h100/2 dp1 tp2 pp1 sgd"),
        (&gpt2, "dgx-h100/2 dp1 tp1 pp2 micro2 zb"),
        (&llama, "dgx-h100/1 sgd recompute"),
        (&llama, "dgx-h100/4 dp2 tp2 pp1 zero3 micro2"),
    ] {
        trains_alike(model, words, 0..2);
        let plan = planned(&model.file, &model.import, words).expect("a plan");
        let programs = programs(&plan).expect("a plan has programs");
        for tape in tapes(&plan) {
            let over_tiles = tape.launches.iter().filter(|l| matches!(l.spread, Spread::Tiles(_))).count();
            assert!(over_tiles >= 3, "{words}: {over_tiles} launches go over tiles");
            // Scores of a microbatch's samples and heads on this device.
            let program = &programs.programs[tape.program as usize];
            let split: u64 = program.mesh.axes.iter().map(|axis| u64::from(axis.size)).product();
            let heads = if std::ptr::eq(model, &gpt2) { 2 } else { 4 };
            let scores = programs.microbatch * heads * 24 * 24 / split;
            let large = tape.regions.iter().filter(|r| !r.lasts && r.elements >= scores);
            assert_eq!(large.count(), 0, "{words}: {scores} scores are in memory");
        }
    }
}

/// Every round of a ring is a kernel of its own, which never writes its scores, with a message beside the previous round.
#[test]
fn rings_of_attention_train_as_on_the_cpu_runtime() {
    let scratch = Scratch::new();
    let one_head = GPT2.replace("\"n_positions\": 4", "\"n_positions\": 96").replace("\"n_head\": 2", "\"n_head\": 1");
    let import = ImportOptions { batch: Some(2), sequence: Some(96), ..ImportOptions::default() };
    let model = Model { file: PathBuf::from(scratch.file("gpt2.json", &one_head)), import };
    for (words, rounds) in [("dgx-h100/2 dp1 tp2 pp1 ring2 sgd", 2), ("dgx-h100/4 dp1 tp4 pp1 ring4 sgd", 4)] {
        trains_alike(&model, words, 0..2);
        let plan = planned(&model.file, &model.import, words).expect("a plan");
        for program in &programs(&plan).expect("programs").programs {
            let ordered = ordered(program, 1);
            let in_phase = |phase: Phase, fits: &dyn Fn(&Kernel) -> bool| {
                let of_phase = program.bodies.iter().zip(&ordered).filter(|(b, _)| b.phase == phase);
                of_phase.flat_map(|(_, kernels)| kernels).filter(|k| fits(k)).count()
            };
            let attends = |k: &Kernel| matches!(k.kind, KernelKind::Attention(_));
            assert_eq!(in_phase(Phase::Forward, &attends), 2 * rounds, "{words}");
            assert_eq!(in_phase(Phase::Backward, &attends), 2 * rounds, "{words}");
        }
        for tape in tapes(&plan) {
            let exchanges = tape.commands.iter().filter(|c| matches!(c.what, What::Exchange { .. })).count();
            // Keys and values forward and backward, and the gradients of both.
            assert_eq!(exchanges, 2 * 3 * 2 * (rounds - 1), "{words}");
        }
    }
}

#[test]
#[ignore = "slow: the host interprets each product of 512 tokens"]
fn experts_that_are_split_train_as_on_the_cpu_runtime() {
    let Some(file) = shared_model("moe-tiny.mlir") else { return };
    let model = Model { file: file.into(), import: ImportOptions::default() };
    let words = "dgx-h100/2 dp1 tp2 pp1 sgd";
    trains_alike(&model, words, 0..1);
    let plan = planned(&model.file, &model.import, words).expect("a plan");
    for tape in tapes(&plan) {
        let takes_part =
            tape.launches.iter().any(|l| matches!(l.spread, Spread::Tiles(_)) && !l.coordinates.is_empty());
        assert!(takes_part, "no launch over tiles takes a part");
    }
}

/// Experts that are split over devices take their part of a shared tensor, inside kernels over tiles.
#[test]
fn experts_train_as_on_the_cpu_runtime() {
    let scratch = Scratch::new();
    let mixtral = transformer(&scratch, "mixtral", MIXTRAL);
    for words in ["local:1 sgd", "local:2 dp1 tp2 pp1 sgd", "local:4 dp2 tp2 pp1 zero1 micro2 sgd"] {
        trains_alike(&mixtral, words, 0..2);
    }
}

fn recorded(name: &str) -> Model {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    Model { file: folder.join(format!("{name}.mlir")), import: ImportOptions::default() }
}

/// Convolutions with their gradients, windows, sorts, scatters, recurrences and random bits, as exported by JAX.
#[test]
fn models_of_all_kinds_train_as_on_the_cpu_runtime() {
    for (name, plans) in [
        ("resnet", &["local:1 sgd", "local:2 dp2 tp1 pp1 sgd", "local:2 dp1 tp2 pp1 sgd"][..]),
        ("unet", &["local:1 sgd", "local:2 dp1 tp1 pp2 micro2 sgd"]),
        ("moe-sorted", &["local:1 sgd", "local:2 dp1 tp2 pp1 sgd"]),
        ("scanned-remat", &["local:1 sgd"]),
        ("flax-dropout", &["local:2 dp2 tp1 pp1 sgd"]),
        ("state-space", &["local:1 sgd"]),
    ] {
        for words in plans {
            println!("{name} {words}");
            trains_alike(&recorded(name), words, 0..1);
        }
    }
}

/// Checks the given models under plans for one device and for several: all have tapes whose kernels have texts, and
/// none has races. Returns the models without any plan.
fn have_tapes(models: &[PathBuf], plans: &[&str]) -> Vec<PathBuf> {
    let (mut failures, mut planless) = (Vec::new(), Vec::new());
    for file in models {
        let mut tried = 0;
        for words in plans {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let plan = match planned(file, &ImportOptions::default(), words) {
                Ok(plan) => plan,
                Err(error) => {
                    println!("{name} {words}: no plan: {}", error.lines().next().unwrap_or_default());
                    continue;
                }
            };
            tried += 1;
            match build(&programs(&plan).expect("a plan has programs"), &tape::Options::default()) {
                Err(error) => failures.push(format!("{name} {words}: {error}")),
                Ok(tapes) => {
                    let launches = tapes.iter().flat_map(|t| &t.launches);
                    failures
                        .extend(launches.filter_map(|l| cuda::text(l).err()).map(|e| format!("{name} {words}: {e}")));
                    failures.extend(check(&tapes).first().map(|flaw| format!("{name} {words}: {flaw:?}")));
                    let commands: Vec<usize> = tapes.iter().map(|t| t.commands.len()).collect();
                    println!("{name} {words}: {commands:?} commands");
                }
            }
        }
        planless.extend((tried == 0).then(|| file.clone()));
    }
    assert!(failures.is_empty(), "{failures:#?}");
    planless
}

#[test]
fn recorded_models_have_tapes() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let files = std::fs::read_dir(folder).expect("the folder").map(|f| f.expect("a file").path());
    let mut files: Vec<PathBuf> = files.filter(|f| f.extension().is_some_and(|e| e == "mlir")).collect();
    files.sort();
    let planless = have_tapes(&files, &["dgx-a100/1", "dgx-a100/1 bf16", "dgx-a100/4 dp2 tp2 pp1"]);
    assert_eq!(planless, Vec::<PathBuf>::new());
}

#[test]
#[ignore = "takes minutes: the models of the collection are large"]
fn collected_models_have_tapes() {
    let Some(folder) = crate::common::shared_models() else { return };
    let files = std::fs::read_dir(folder).expect("the folder").map(|f| f.expect("a file").path());
    let is_model = |f: &PathBuf| f.extension().is_some_and(|e| e == "mlir" || e == "onnx" || e == "pt2");
    let mut files: Vec<PathBuf> = files.filter(is_model).collect();
    files.sort();
    let named = std::env::var("MODEL").unwrap_or_default();
    files.retain(|f| f.display().to_string().contains(&named));
    have_tapes(&files, &["dgx-h100/1", "dgx-h100/8 dp1 tp8 pp1", "dgx-h100:8 dp4 tp8 pp2 micro4"]);
}

/// Every breaking change to a valid tape is detected.
#[test]
fn broken_tapes_are_found() {
    let scratch = Scratch::new();
    let gpt2 = transformer(&scratch, "gpt2", GPT2);
    let plan = |words| planned(&gpt2.file, &gpt2.import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
    let (mut waits, mut swaps, mut moves) = (0, 0, 0);
    for words in [
        "local:4 dp2 tp2 pp1 zero3 micro2",
        "local:4 dp1 tp2 pp2 micro2",
        "local:2 dp1 tp2 pp1 offload",
        "local:2 dp1 tp1 pp2 micro4 away",
    ] {
        let good = tapes(&plan(words));
        assert_eq!(check(&good), []);
        let changed = |change: &dyn Fn(&mut Vec<Tape>)| {
            let mut broken = good.clone();
            change(&mut broken);
            check(&broken)
        };
        let commands = good[0].commands.len();
        let rank = 1;
        for at in 0..good[rank].commands.len() {
            for wait in 0..good[rank].commands[at].waits.len() {
                let flaws = changed(&|tapes| {
                    tapes[rank].commands[at].waits.remove(wait);
                });
                assert!(
                    flaws.iter().any(|f| matches!(f, Flaw::Race { .. })),
                    "{words}: wait {wait} of {at}: {flaws:?}"
                );
                waits += 1;
            }
        }
        let meets = |at: &usize| matches!(good[rank].commands[*at].what, What::Collective { .. });
        let collectives: Vec<usize> = (0..good[rank].commands.len()).filter(meets).collect();
        let group = |at: usize| match good[rank].commands[at].what {
            What::Collective { communicator, .. } => Some(communicator),
            _ => None,
        };
        for pair in collectives.windows(2).filter(|pair| group(pair[0]) == group(pair[1])) {
            let flaws = changed(&|tapes| tapes[rank].commands.swap(pair[0], pair[1]));
            assert!(!flaws.is_empty(), "{words}: {pair:?} swapped");
            let flaws = changed(&|tapes| drop(tapes[rank].commands.remove(pair[0])));
            assert!(!flaws.is_empty(), "{words}: {pair:?} without the first");
            swaps += 1;
        }
        let used = |tape: &Tape, region: usize| {
            let of = |c| tape.accesses(c).iter().any(|a| a.region.0 as usize == region && a.from < a.to);
            tape.commands.iter().any(|c| of(&c.what))
        };
        for region in (0..good[0].regions.len()).filter(|&r| used(&good[0], r)) {
            let flaws = changed(&|tapes| tapes[0].regions[region].bytes /= 2);
            assert!(flaws.iter().any(|f| matches!(f, Flaw::Outside { .. })), "{words}: region {region} halved");
        }
        // A region that is written, and another that is written before the first is read again, at the same offset.
        let accesses: Vec<_> = good[0].commands.iter().map(|c| good[0].accesses(&c.what)).collect();
        for at in (0..commands - 1).step_by(7) {
            let written = |at: usize| accesses[at].iter().find(|a| a.writes && a.from < a.to).map(|a| a.region);
            let (Some(first), Some(second)) = (written(at), written(at + 1)) else { continue };
            let reads = |c: usize| accesses[c].iter().any(|a| a.region == first && !a.writes);
            let next = (at + 1..commands).find(|&c| reads(c) || accesses[c].iter().any(|a| a.region == first));
            if first == second || !next.is_some_and(|c| c > at + 1 && reads(c)) {
                continue;
            }
            let flaws = changed(&|tapes| tapes[0].regions[second.0 as usize].offset = good[0].region(first).offset);
            assert!(!flaws.is_empty(), "{words}: {second:?} over {first:?}");
            moves += 1;
        }
    }
    assert!(waits > 100 && swaps > 20 && moves > 10, "{waits} waits, {swaps} swaps, {moves} moves");
}

/// The memory model's prediction for each device of a program with these tapes' kernels.
fn predicted(programs: &Programs, lane: usize) -> u64 {
    let program = &programs.programs[lane];
    let kernels = ordered(program, tape::Options::default().gathers_ahead);
    let bodies = program.bodies.iter().zip(&kernels);
    let steps: Vec<_> = bodies.map(|(body, kernels)| launched(program, body, kernels).map(|_| ())).collect();
    LaneMemory::new(programs, lane, &steps, DeviceKind::Gpu).peak_bytes
}

/// Arenas are little larger than the peak of the live bytes, and than the prediction.
#[test]
fn arenas_are_as_large_as_predicted() {
    let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let mut models: Vec<PathBuf> = ["resnet", "unet", "moe-sorted", "scanned-remat", "flax-dropout"]
        .iter()
        .map(|n| models.join(format!("{n}.mlir")))
        .collect();
    models.extend(
        ["gpt2-tiny", "moe-tiny", "wresnet-tiny"]
            .iter()
            .filter_map(|n| Some(shared_model(&format!("{n}.mlir"))?.into())),
    );
    let (mut worst_packing, mut worst_prediction, mut worst_planned) = (1f64, 1f64, 1f64);
    for file in models {
        for words in [
            "dgx-a100/1",
            "dgx-a100/2 dp2 tp1 pp1",
            "dgx-a100/2 dp2 tp1 pp1 zero3 micro2",
            "dgx-a100/2 dp1 tp2 pp1",
            "dgx-a100/2 dp1 tp1 pp2 micro4",
            "dgx-a100/4 dp2 tp2 pp1 zero1 recompute",
            "dgx-h100/1",
            "dgx-h100/2 dp1 tp2 pp1",
            "dgx-h100/2 dp1 tp1 pp2 micro4 f16",
            "dgx-h100/4 dp2 tp2 pp1 zero1 recompute",
            "dgx-h100/1 offload",
            "dgx-h100/2 dp2 tp1 pp1 zero1 f16 offload",
            "dgx-a100/2 dp1 tp1 pp2 micro4 away",
        ] {
            let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let plan = match planned(&file, &ImportOptions::default(), words) {
                Ok(plan) => plan,
                Err(error) => {
                    println!("{name} {words}: {}", error.lines().next().unwrap_or_default());
                    continue;
                }
            };
            let programs = programs(&plan).expect("a plan has programs");
            let tapes = match build(&programs, &tape::Options::default()) {
                Ok(tapes) => tapes,
                Err(error) => {
                    println!("{name} {words}: {error}");
                    continue;
                }
            };
            let texts = tapes.iter().flat_map(|t| &t.launches).map(|l| cuda::text(l));
            assert!(texts.into_iter().all(|text| text.is_ok()), "{name} {words}: a launch has no text");
            let flaws = check(&tapes);
            assert!(flaws.is_empty(), "{name} {words}: {:?}", &flaws[..flaws.len().min(3)]);
            for lane in 0..programs.programs.len() {
                let Some(tape) = tapes.iter().find(|t| t.program as usize == lane) else { continue };
                let predicted = predicted(&programs, lane);
                let packing = tape.arena.bytes as f64 / tape.arena.live_bytes as f64;
                let prediction = tape.arena.bytes as f64 / predicted as f64;
                println!(
                    "{name} {words} lane {lane}: arena {}, live {} ({packing:.3}), predicted {predicted} ({prediction:.3}), plan {:?}, {} commands",
                    tape.arena.bytes,
                    tape.arena.live_bytes,
                    plan.predicted.peak_bytes,
                    tape.commands.len()
                );
                let stage = programs.programs[lane].bodies.first().map_or(0, |b| b.stage);
                let planned = tape.arena.bytes as f64 / plan.predicted.peak_bytes[stage as usize] as f64;
                worst_planned = worst_planned.max(planned.max(1.0 / planned));
                worst_packing = worst_packing.max(packing);
                worst_prediction = worst_prediction.max(prediction.max(1.0 / prediction));
            }
        }
    }
    println!(
        "worst: {worst_packing:.3} of what lives at once, {worst_prediction:.3} of what is predicted of these kernels, \
         {worst_planned:.3} of what plans say"
    );
    assert!(worst_packing <= 1.02 && worst_prediction <= 1.05 && worst_planned <= 1.05);
}

/// Gradients are reduced before the backward pass ends, and gathers are prefetched.
#[test]
fn what_is_sent_overlaps_with_what_is_computed() {
    let scratch = Scratch::new();
    let gpt2 = transformer(&scratch, "gpt2", GPT2);
    let plan = |words| planned(&gpt2.file, &gpt2.import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
    let stream = |tape: &Tape, at: usize| tape.streams[tape.commands[at].stream.0 as usize];
    let tape = &tapes(&plan("local:2 dp2 tp1 pp1 zero3 sgd"))[0];
    let recorder = |event| tape.commands.iter().position(|c| c.records == Some(event)).expect("it is recorded");
    let collectives: Vec<usize> =
        (0..tape.commands.len()).filter(|&at| stream(tape, at) == Stream::Collectives).collect();
    // Computation issued before a collective for which the collective does not wait.
    let free = |at: usize| {
        let waited = tape.commands[at].waits.iter().map(|e| recorder(*e)).max().unwrap_or(0);
        (waited + 1..at).filter(|&c| stream(tape, c) == Stream::Compute).count()
    };
    let most = collectives.iter().map(|&at| free(at)).max().unwrap_or(0);
    assert!(most >= 5, "a collective overlaps with {most} commands at most");
    let text = tape.to_string();
    assert_eq!(text.lines().count(), tape.commands.len() + 2);
    assert!(text.contains("reduce_scatter sum") && text.contains(" after e"), "{text}");

    let plan = plan("local:2 dp2 tp1 pp1 zero3 micro2");
    let programs = programs(&plan).expect("a plan has programs");
    let distance = |gathers_ahead| {
        let tape = &build(&programs, &tape::Options { gathers_ahead }).expect("tapes")[0];
        let mut sum = 0;
        for (at, command) in tape.commands.iter().enumerate() {
            let What::Collective { kind: CollectiveKind::AllGather, to, .. } = command.what else { continue };
            let reads = |c: &tape::Command| tape.accesses(&c.what).iter().any(|a| a.region == to && !a.writes);
            sum += tape.commands[at + 1..].iter().position(reads).unwrap_or(0);
        }
        sum
    };
    let (none, one, three) = (distance(0), distance(1), distance(3));
    assert!(none < one && one < three, "{none}, {one}, {three}");
}
