//! Activations in host memory: the same bits are computed under every schedule, both memories hold what is predicted, and devices
//! hold a bounded part of what forward passes leave for backward passes.

mod common;

use altiplano::ir::plan::{Offload, Plan};
use altiplano::planner::memory::{cpu_host_peaks, cpu_peaks};
use altiplano::planner::{judged_again, programs};
use altiplano::runtime::{Options, Session};
use altiplano::training::{Training, scalars, start};
use altiplano::{ImportOptions, runtime::HostTensor};
use altiplano_cost_models::Rooflines;
use common::{Scratch, planned};
use std::path::Path;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 6, "n_head": 4}"#;

fn import() -> ImportOptions {
    ImportOptions { batch: Some(8), sequence: Some(16), ..ImportOptions::default() }
}

/// The same plan with some of it in host memory.
fn offloaded(plan: &Plan, what: Offload) -> Plan {
    let mut plan = plan.clone();
    plan.stages.iter_mut().for_each(|stage| stage.offload = what);
    let costs = Rooflines::of(&plan.cluster);
    judged_again(plan, &costs).expect("it is judged")
}

/// What some steps of a plan give, and what devices held of their own memory and their hosts'.
struct Ran {
    losses: Vec<f64>,
    held: Vec<(String, String, HostTensor)>,
    own: Vec<u64>,
    host: Vec<u64>,
}

fn ran(plan: &Plan) -> Ran {
    let training = Training { steps: 3, learning_rate: 1e-2, ..Training::default() };
    let programs = programs(plan).expect("programs");
    let (weights, mut batches) = start(plan, &training).expect("weights and batches");
    let mut session = Session::new(&programs, &Options::default()).expect("the programs run");
    weights.iter().for_each(|(name, tensor)| session.load_parameter(name, tensor).expect("a parameter"));
    let mut losses = Vec::new();
    for number in 1..=training.steps {
        let batch = batches.take().expect("a batch");
        losses.push(session.step(&batch, &scalars(training.learning_rate, number)).expect("a step").loss);
    }
    session.flush().expect("the last step ends");
    let parameters = session.parameters().into_iter().map(|name| (name, String::new()));
    let names: Vec<(String, String)> = parameters.chain(session.states()).collect();
    let mut held = Vec::new();
    for (name, slot) in names {
        let tensor = if slot.is_empty() { session.parameter(&name) } else { session.state(&name, &slot) };
        held.push((name, slot, tensor.expect("it is held")));
    }
    Ran { losses, held, own: session.peak_bytes(), host: session.host_peak_bytes() }
}

#[test]
fn activations_in_host_memory_change_no_bit() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    for words in [
        "local:1",
        "local:1 micro4 clip",
        "local:1 recompute",
        "local:2 dp2 tp1 pp1 zero1 bf16",
        "local:2 dp2 tp1 pp1 zero3 selective",
        "local:2 dp1 tp2 pp1 micro2",
        "local:2 dp1 tp1 pp2 micro4 gpipe",
        "local:4 dp2 tp1 pp2 micro4 zero2",
        "local:2 dp1 tp1 pp2 micro4 virtual2 recompute",
        "local:2 dp1 tp1 pp2 micro4 zb",
        "local:3 dp1 tp1 pp3 micro8 zb selective f16",
        "local:2 dp1 tp1 pp2 micro4 pipedream",
    ] {
        let here = planned(Path::new(&file), &import(), words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let expected = ran(&here);
        for what in [Offload::ACTIVATIONS, Offload::ALL] {
            let away = offloaded(&here, what);
            let words = format!("{words} {}", what.name());
            let found = ran(&away);
            assert_eq!(found.losses, expected.losses, "{words}");
            assert!(found.held == expected.held, "{words}: weights or state differ");
            // What is predicted is what is held, in both memories.
            let programs = programs(&away).expect("programs");
            let (own, host) = (cpu_peaks(&programs), cpu_host_peaks(&programs));
            for (lane, stage) in away.lanes().iter().enumerate() {
                assert_eq!(
                    (stage.predicted.peak_bytes, stage.predicted.host_bytes),
                    (own[lane], host[lane]),
                    "{words}"
                );
                for &device in &stage.devices {
                    let device = device as usize;
                    assert_eq!((found.own[device], found.host[device]), (own[lane], host[lane]), "{words}");
                    assert!(host[lane] > 0, "{words}: nothing is in host memory");
                    assert!(expected.own[device] > own[lane], "{words}: {} of {}", own[lane], expected.own[device]);
                }
            }
        }
    }
}

/// Names of offloads are read as they are written, in any order, and nothing else is.
#[test]
fn names_say_what_is_offloaded() {
    for what in Offload::EACH {
        assert_eq!(what.name().parse(), Ok(what));
    }
    assert_eq!("activations, optimizer".parse(), Ok(Offload::ALL));
    assert_eq!("all".parse(), Ok(Offload::ALL));
    for wrong in ["", "everything", "optimizer,none", "optimizer,,activations"] {
        assert!(wrong.parse::<Offload>().is_err(), "{wrong}");
    }
}

/// More microbatches in flight take memory of the host, and none of the device.
#[test]
fn microbatches_in_flight_are_in_the_host() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    // Of one size, as many as there are.
    let held = |batch: u32| {
        let import = ImportOptions { batch: Some(u64::from(batch)), ..import() };
        let words = format!("local:2 dp1 tp1 pp2 micro{batch} gpipe away");
        let plan = planned(Path::new(&file), &import, &words).expect("a plan");
        assert_eq!(plan.graph.batch, 1, "samples in a microbatch");
        let predicted = &plan.stages[0].predicted;
        (predicted.peak_bytes - predicted.memory.parameters_bytes, predicted.host_bytes)
    };
    let [(few, few_in_host), (many, many_in_host)] = [2, 8].map(held);
    assert_eq!(many_in_host, 4 * few_in_host);
    // What is small stays on the device.
    assert!((many as f64) < 1.1 * few as f64, "{many} of {few}");
}

/// Deeper models hold no more of what is loaded at once.
#[test]
fn devices_hold_a_window() {
    let scratch = Scratch::new();
    let activations = |layers: u32, what: Offload| {
        let file = scratch.file("gpt2.json", GPT2.replace("\"n_layer\": 6", &format!("\"n_layer\": {layers}")));
        let plan = planned(Path::new(&file), &import(), "local:1").expect("a plan");
        offloaded(&plan, what).stages[0].predicted.memory.activations_bytes as f64
    };
    let [here, deeper] = [6, 12].map(|layers| activations(layers, Offload::NONE));
    let [away, deeper_away] = [6, 12].map(|layers| activations(layers, Offload::ACTIVATIONS));
    assert!(deeper > 1.7 * here && deeper_away < 1.1 * away, "{here} and {deeper}, {away} and {deeper_away}");
}
