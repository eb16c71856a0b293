//! Activations in host memory. Results have the same bits under every schedule, both memories have the predicted size,
//! and devices hold a bounded part of the activations.

use crate::common::offloading::{import, offloaded, ran};
use crate::common::{Scratch, planned};
use altiplano::ir::plan::{Offload, Plan};
use altiplano::planner::explain::account::{Work, accounts};
use altiplano::planner::predict::memory::{cpu_host_peaks, cpu_peaks};
use altiplano::planner::{Request, Silent, fits, plan, programs};
use altiplano::runtime::tape::{self, build};
use altiplano::runtime::{Options, Session};
use altiplano::{ImportOptions, load_cluster, load_model, request};
use altiplano_cost_models::Rooflines;
use altiplano_ir::program::{BufferId, Programs};
use altiplano_ir::recompute::Recompute;
use std::path::Path;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 6, "n_head": 4}"#;

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
        // With optimizer state as well, if the two interact beyond a single device.
        let both = words.contains("zero") || words.contains("pp2");
        for what in [Some(Offload::ACTIVATIONS), both.then_some(Offload::ALL)].into_iter().flatten() {
            let away = offloaded(&here, what);
            let words = format!("{words} {}", what.name());
            let found = ran(&away);
            assert_eq!(found.losses, expected.losses, "{words}");
            assert!(found.held == expected.held, "{words}: weights or state differ");
            // Predicted memory equals held memory, on devices and hosts.
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

/// Names of offloads round-trip in any order, and other names are rejected.
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

/// More microbatches in flight take host memory, but no device memory.
#[test]
fn microbatches_in_flight_are_in_the_host() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    // The same microbatch size, with varying numbers of microbatches.
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
    // Small activations stay on the device.
    assert!((many as f64) < 1.1 * few as f64, "{many} of {few}");
}

/// Deeper models do not prefetch more at a time.
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

/// A request for a model on one GPU with a single microbatch, optionally with limited memory.
fn asked(file: &str, memory_bytes: Option<u64>, offload: Option<Offload>) -> Request {
    asked_of(file, &import(), memory_bytes, offload)
}

fn asked_of(file: &str, import: &ImportOptions, memory_bytes: Option<u64>, offload: Option<Offload>) -> Request {
    let model = load_model(Path::new(file), import).expect("a model");
    let mut request = request(&model, load_cluster("dgx-a100/1").expect("a cluster"));
    request.baselines = false;
    (request.batch.num_microbatches, request.degrees.virtual_stages) = (Some(1), Some(1));
    request.offload = offload;
    let device = &mut request.cluster.groups[0].device;
    device.memory_bytes = memory_bytes.unwrap_or(device.memory_bytes);
    // Tensors can use all of the memory.
    device.reserved = None;
    request
}

/// `auto` finds the fastest plan that fits, if nothing fits without offloading, or only with recomputation.
#[test]
fn auto_takes_the_fastest_that_fits() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let ask = |memory: Option<u64>, offload| plan(&asked(&file, memory, offload), &Silent);
    let peak = |offload| {
        let mut request = asked(&file, None, Some(offload));
        request.recompute = Some(Recompute::Full);
        plan(&request, &Silent).expect("a plan").predicted.peak_bytes[0]
    };
    let least = Offload::EACH.map(peak);
    assert!(least[1] < least[0] && least[2] < least[0] && least[3] < least[1].min(least[2]), "{least:?}");
    let mut memories = least.to_vec();
    memories.push(least[0].midpoint(least[1].max(least[2])));
    for memory in memories {
        let fixed = Offload::EACH.map(|what| ask(Some(memory), Some(what)).ok().filter(fits));
        let found = ask(Some(memory), None).expect("a plan");
        assert!(fits(&found), "{memory}");
        let step_s = |plan: &Plan| plan.predicted.step_time_s;
        let best_s = fixed.iter().flatten().map(step_s).fold(f64::INFINITY, f64::min);
        // Among equally fast plans the one with the least memory is taken.
        assert!(step_s(&found) <= best_s * 1.02, "{memory}: {} and {best_s}", step_s(&found));
        if let Some(here) = &fixed[0] {
            let offloads = step_s(&found) < step_s(here);
            assert_eq!(found.stages[0].offload.is_none(), !offloads, "{memory}");
            let recomputes = here.stages[0].recompute.most() > Recompute::None;
            assert!(recomputes || !offloads, "{memory}: nothing was to be gained");
        }
        let read = Plan::from_json(&found.to_json()).expect("it reads back");
        assert_eq!(read, found);
    }
}

/// A pass takes as long as the slower of its computation and the link: out in the forward pass, back in the backward
/// pass.
#[test]
fn copies_cost_what_the_link_takes() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2.replace("\"n_embd\": 32", "\"n_embd\": 256"));
    let step = |rate: f64| {
        let mut request = asked(&file, None, Some(Offload::ACTIVATIONS));
        request.recompute = Some(Recompute::None);
        request.cluster.groups[0].device.host_bytes_per_s = Some(rate);
        plan(&request, &Silent).expect("a plan")
    };
    let [slow, slower] = [1e8, 5e7].map(step);
    let bytes = slow.stages[0].predicted.host_bytes as f64;
    for (pass, of) in [("forward", 0), ("backward", 1)] {
        let seconds = |plan: &Plan| [plan.stages[0].predicted.forward_s, plan.stages[0].predicted.backward_s][of];
        let more_s = seconds(&slower) - seconds(&slow);
        assert!((more_s / (bytes / 1e8) - 1.0).abs() < 0.1, "{pass}: {more_s} for {bytes} bytes");
    }
    let account = &accounts(&slow, &Rooflines::of(&slow.cluster)).expect("accounts")[0];
    let copies_s = account.0[&Work::HostCopies];
    assert!((copies_s / (2.0 * bytes / 1e8) - 1.0).abs() < 0.2, "{copies_s} for {bytes} bytes");
}

/// On GPUs the host arena has the predicted size, and only copies access it.
#[test]
fn arenas_of_gpus_are_as_predicted() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    for words in ["dgx-a100/1 bf16", "dgx-a100/2 dp1 tp1 pp2 micro4 gpipe", "dgx-h100/2 dp1 tp1 pp2 micro4 zb bf16"] {
        let here = planned(Path::new(&file), &import(), words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let away = offloaded(&here, Offload::ACTIVATIONS);
        let tapes = build(&programs(&away).expect("programs"), &tape::Options::default()).expect("tapes");
        assert_eq!(tape::check(&tapes), [], "{words}");
        for tape in &tapes {
            let predicted = &away.stages[tape.program as usize].predicted;
            let (held, said) = (tape.arena.host_bytes as f64, predicted.host_bytes as f64);
            assert!(said > 0.0 && held >= said && held <= 1.02 * said, "{words}: {held} and {said}");
        }
    }
}

/// Errors in hand-modified plans name their place.
#[test]
fn wrong_plans_say_where() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let good = planned(Path::new(&file), &import(), "local:2 dp1 tp1 pp2 micro2 away").expect("a plan").to_json();
    assert!(good.contains("\"offload\": \"activations\""), "the plan says what is offloaded");
    let said = |text: &str| Plan::from_json(text).map_or_else(|error| error.to_string(), |_| "nothing".into());
    assert_eq!(said(&good), "nothing");
    let named = said(&good.replacen("\"activations\"", "\"weights\"", 1));
    assert!(named.contains("`weights` is none of"), "{named}");
    let serving = said(&good.replace("\"schedule\": \"1f1b\"", "\"schedule\": \"forward\""));
    assert!(serving.contains("stages[0].offload"), "{serving}");
}

/// Programs that send host memory, or access it by ops other than copies, are rejected.
#[test]
fn only_copies_reach_activations_in_the_host() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let plan = planned(Path::new(&file), &import(), "local:2 dp1 tp1 pp2 micro2 away").expect("a plan");
    let good = programs(&plan).expect("programs");
    assert!(Session::new(&good, &Options::default()).is_ok());
    let refused = |change: &dyn Fn(&mut Programs)| {
        let mut programs = good.clone();
        change(&mut programs);
        Session::new(&programs, &Options::default()).err().map_or_else(String::new, |error| error.to_string())
    };
    // A buffer of the sent value's type.
    let (program, sent) = good.transfers[0].source;
    let buffers = &good.programs[program as usize].buffers;
    let ty = &buffers[sent.0 as usize].ty;
    let other = buffers.iter().position(|b| b.host && b.ty == *ty).expect("an activation as large as what is sent");
    let said = refused(&|p| p.transfers[0].source.1 = BufferId(other as u32));
    assert!(said.contains("cannot be sent or received"), "{said}");
    let away = good.programs[0].buffers.iter().position(|b| b.host).expect("an activation");
    let said = refused(&|p| p.programs[0].buffers[away].host = false);
    assert!(said.contains("another memory") || said.contains("a buffer outside host memory"), "{said}");
}

/// Over a fast link, copying long sequences is faster than recomputing them, and `auto` does so; over a slow link it
/// does not.
#[test]
fn auto_copies_what_takes_longer_to_recompute() {
    let scratch = Scratch::new();
    // Large enough that kernels take longer than their launches; it is only planned.
    let config =
        GPT2.replace("\"n_embd\": 32", "\"n_embd\": 1024").replace("\"n_positions\": 16", "\"n_positions\": 1024");
    let file = scratch.file("gpt2.json", config);
    let import = ImportOptions { sequence: Some(1024), ..import() };
    let ask = |memory: u64, rate: f64, offload| {
        let mut request = asked_of(&file, &import, Some(memory), offload);
        request.cluster.groups[0].device.host_bytes_per_s = Some(rate);
        plan(&request, &Silent).expect("a plan")
    };
    let mut roomy = asked_of(&file, &import, None, Some(Offload::NONE));
    roomy.recompute = Some(Recompute::None);
    let all = plan(&roomy, &Silent).expect("a plan").predicted.peak_bytes[0];
    roomy.recompute = Some(Recompute::Full);
    let full = plan(&roomy, &Silent).expect("a plan").predicted.peak_bytes[0];
    let memory = all.midpoint(full);
    let recomputed = ask(memory, 1e6, None);
    assert_eq!(recomputed, ask(memory, 1e6, Some(Offload::NONE)));
    assert!(recomputed.stages[0].recompute.most() > Recompute::None);
    let copied = ask(memory, 1e15, None);
    assert!(fits(&copied) && copied.predicted.step_time_s < recomputed.predicted.step_time_s);
    assert_eq!(copied.stages[0].offload, Offload::ACTIVATIONS);
}
