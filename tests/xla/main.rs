//! Plans on XLA's devices, through the PJRT plugin for CPUs that `ALTIPLANO_PJRT_PLUGIN` names. The oracle runs these
//! tests (`tests/oracle/run xla`).

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod command_line;
mod processes;

use altiplano::ImportOptions;
use altiplano::ir::plan::Plan;
use altiplano::planner::{Silent, programs};
use altiplano::runtime::devices::xla::XlaOptions;
use altiplano::runtime::{HostTensor, Options, Session};
use altiplano::training::{Batch, Training, scalars, start};
use altiplano::verify::verify;
use altiplano_xla::pjrt::{Platform, find};
use common::{MIXED, Scratch, planned};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 4, "n_head": 4}"#;

fn plugin() -> XlaOptions {
    let plugin = find(None, Platform::Cpu).expect("a plugin for CPUs");
    XlaOptions {
        plugin,
        platform: Some(Platform::Cpu),
        check_nan: false,
        record: false,
        memory_bytes: None,
        cache: None,
    }
}

fn gpt2(scratch: &Scratch, words: &str) -> Plan {
    let file = PathBuf::from(scratch.file("gpt2.json", GPT2));
    let import = ImportOptions { batch: Some(16), sequence: Some(4), ..ImportOptions::default() };
    planned(&file, &import, words).unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// Compares a plan's step with one device by the tolerances of `verify`.
fn agrees(name: &str, plan: &Plan) {
    let training = Training { xla: Some(plugin()), learning_rate: 1e-2, ..Training::default() };
    let verified = verify(plan, &training, None, None, &Silent).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(verified.failure(), None, "{name}");
    assert!(!verified.no_gradient, "{name} has no gradient");
    let worst = verified.one_device.iter().map(|c| format!("{} {:.1e}", c.quantity.name(), c.worst.amount));
    println!(
        "ok {name}: loss {:.6}; off by: {}",
        verified.loss.unwrap_or_default(),
        worst.collect::<Vec<_>>().join(", ")
    );
}

/// Bodies that communicate are compiled in another order where they would hold too much.
#[test]
#[ignore = "needs a PJRT plugin"]
fn programs_that_would_not_fit_are_compiled_to_hold_less() {
    let scratch = Scratch::new();
    let plan = gpt2(&scratch, "local:4 dp2 tp2 pp1 micro4");
    let cache = scratch.path("programs");
    let compiled = |memory_bytes: u64| {
        let xla = XlaOptions { memory_bytes: Some(memory_bytes), cache: Some(cache.clone()), ..plugin() };
        let training = Training { xla: Some(xla), learning_rate: 1e-2, ..Training::default() };
        let verified = verify(&plan, &training, None, None, &Silent).expect("it runs");
        assert_eq!(verified.failure(), None);
        files(&cache).len()
    };
    let with_room = compiled(1 << 40);
    assert!(compiled(1) > with_room, "the order is another program");
}

/// The files of a folder with their times and sizes.
fn files(folder: &Path) -> BTreeMap<PathBuf, (SystemTime, u64)> {
    let all = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let known = |file: PathBuf| {
        let of = std::fs::metadata(&file).expect("a file");
        (file, (of.modified().expect("a time"), of.len()))
    };
    all.map(known).collect()
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn compiled_programs_are_found_again_unless_they_are_damaged() {
    let scratch = Scratch::new();
    let plan = gpt2(&scratch, "local:4 dp2 tp1 pp2 micro4");
    let cache = scratch.path("programs");
    let loss = || {
        let xla = XlaOptions { cache: Some(cache.clone()), ..plugin() };
        let training = Training { xla: Some(xla), learning_rate: 1e-2, ..Training::default() };
        let verified = verify(&plan, &training, None, None, &Silent).expect("it runs");
        assert_eq!(verified.failure(), None);
        verified.loss
    };
    let first = loss();
    let compiled = files(&cache);
    assert!(compiled.len() > 4, "{compiled:?}");
    assert_eq!(loss(), first);
    assert_eq!(files(&cache), compiled, "nothing is compiled again");
    let mut names = compiled.keys();
    let (cut, changed) = (names.next().expect("a file"), names.next().expect("another"));
    let mut bytes = std::fs::read(changed).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(changed, bytes).expect("a file");
    std::fs::File::options().write(true).open(cut).and_then(|file| file.set_len(100)).expect("a file");
    assert_eq!(loss(), first);
    let again = files(&cache);
    for (file, of) in &compiled {
        let is_damaged = [cut, changed].contains(&file);
        // XLA does not write the same bytes each time.
        assert!(again[file].1.abs_diff(of.1) < of.1 / 50, "{} is complete", file.display());
        assert_eq!(again[file].0 != of.0, is_damaged, "{}", file.display());
    }
}

/// Returns whether all plans are to be tried, which takes minutes, and not a part of them.
fn is_thorough() -> bool {
    std::env::var_os("ALTIPLANO_ORACLE_ALL").is_some()
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn plans_of_all_kinds_compute_what_one_device_computes() {
    let scratch = Scratch::new();
    let kinds = [
        "local:4 dp1 tp4 pp1",
        "local:3 dp1 tp1 pp3 micro4",
        "local:2 dp1 tp1 pp2 virtual2 micro4",
        "local:4 dp2 tp2 pp1 zero3",
        "local:4 dp2 tp1 pp2 zero3 zb micro4",
        "local:2 dp1 tp1 pp2 micro4 selective",
        // The vocabulary of 13 is padded.
        "local:6 dp1 tp3 pp2 micro2",
        "local:4 dp2 tp1 pp2 micro4 pipedream zero1",
        "local:2 dp2 tp1 pp1 micro2 bf16",
    ];
    let further = [
        "local:4 dp4 tp1 pp1",
        "local:2 dp1 tp1 pp2 micro4 gpipe",
        "local:2 dp1 tp1 pp2 micro4 zb",
        "local:8 dp2 tp2 pp2 micro2 clip",
        "local:8 dp2 tp2 pp2 virtual2 micro2 zero1",
        "local:4 dp4 tp1 pp1 zero2 micro2",
        "local:2 dp2 tp1 pp1 micro4 recompute",
        "local:1 dp1 tp1 pp1 micro8",
        "local:2 dp1 tp1 pp2 micro4 pipedream",
        "local:2 dp2 tp1 pp1 stale",
    ];
    for words in kinds.into_iter().chain(further.into_iter().filter(|_| is_thorough())) {
        agrees(words, &gpt2(&scratch, words));
    }
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn models_of_many_kinds_compute_what_one_device_computes() {
    let plans =
        ["local:4 dp4 tp1 pp1", "local:4 dp1 tp4 pp1", "local:4 dp2 tp2 pp1 zero3", "local:4 dp2 tp1 pp2 micro2"];
    let models = ["scanned-remat.mlir", "moe-switch.mlir", "moe-sorted.mlir", "state-space.mlir", "unet.mlir"];
    let mut seen = 0;
    for (m, model) in models.into_iter().enumerate() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
        let one = &plans[m % plans.len()..][..1];
        for words in if is_thorough() { &plans[..] } else { one } {
            let name = format!("{model} {words}");
            match planned(&file, &ImportOptions::default(), words) {
                Ok(plan) => agrees(&name, &plan),
                Err(error) => {
                    println!("no plan: {name}: {error}");
                    continue;
                }
            }
            seen += 1;
        }
    }
    assert!(seen >= if is_thorough() { 12 } else { 4 }, "only {seen} plans");
}

type Tensors = BTreeMap<String, HostTensor>;

/// Losses and weights after steps, each of which begins before the previous one has ended if steps overlap.
fn trained(mut session: Session, weights: &Tensors, batches: &[Batch], rate: f64) -> (Vec<f64>, Tensors) {
    for (name, tensor) in weights {
        session.load_parameter(name, tensor).expect("a parameter");
    }
    let mut losses = Vec::new();
    for (number, batch) in (1..).zip(batches) {
        session.begin_step(batch, &scalars(rate, number)).expect("a step begins");
        if number > 1 {
            losses.push(session.end_step().expect("a step").loss);
        }
    }
    losses.push(session.end_step().expect("a step").loss);
    session.flush().expect("it is flushed");
    let after = weights.keys().map(|name| (name.clone(), session.parameter(name).expect("a parameter"))).collect();
    (losses, after)
}

/// Several steps in a row, where some begin before others have ended.
#[test]
#[ignore = "needs a PJRT plugin"]
fn steps_follow_each_other_as_on_cpu_workers() {
    let scratch = Scratch::new();
    let mixed = PathBuf::from(scratch.file("mixed.mlir", MIXED));
    let mut plans: Vec<(&str, Plan)> = [
        "local:4 dp2 tp1 pp2 micro4 clip",
        "local:2 dp1 tp1 pp2 micro4 pipedream",
        "local:4 dp2 tp1 pp2 micro4 pipedream zero1",
        "local:2 dp2 tp1 pp1 stale sgd",
        "local:2 dp1 tp1 pp2 virtual2 micro4",
    ]
    .into_iter()
    .map(|words| (words, gpt2(&scratch, words)))
    .collect();
    let words = "local:2 dp2 tp1 pp1";
    plans.push((words, planned(&mixed, &ImportOptions::default(), words).expect("a plan")));
    for (words, plan) in plans {
        let programs = programs(&plan).expect("programs");
        let training = Training { learning_rate: 1e-2, ..Training::default() };
        let (weights, mut batches) = start(&plan, &training).expect("weights and batches");
        let batches: Vec<Batch> = (0..5).map(|_| batches.take().expect("a batch")).collect();
        let cpu = Session::new(&programs, &Options::default()).expect("it runs");
        let xla = Session::on_xla(&programs, &plugin()).unwrap_or_else(|error| panic!("{words}: {error}"));
        let (expected, weights_expected) = trained(cpu, &weights, &batches, 1e-2);
        let (losses, after) = trained(xla, &weights, &batches, 1e-2);
        for (loss, expected) in losses.iter().zip(&expected) {
            let near = (loss - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(near, "{words}: losses {losses:?}, expected {expected:?}");
        }
        let off = common::steps::difference(&after, &weights_expected);
        assert!(off <= 1e-3, "{words}: weights are {off:e} off");
        println!("ok {words}: loss {:?}, weights {off:.1e} off", losses.last());
    }
}

/// A model that is not trained has the same results.
#[test]
#[ignore = "needs a PJRT plugin"]
fn models_run_as_on_cpu_workers() {
    let scratch = Scratch::new();
    for words in ["local:2 inference dp1 tp2 pp1", "local:4 inference dp2 tp1 pp2 micro2 throughput"] {
        let plan = gpt2(&scratch, words);
        let training = Training { xla: Some(plugin()), ..Training::default() };
        let verified = verify(&plan, &training, None, None, &Silent).unwrap_or_else(|error| panic!("{words}: {error}"));
        assert_eq!((verified.failure(), verified.one_device[0].tensors), (None, plan.graph.outputs.len()), "{words}");
    }
}
