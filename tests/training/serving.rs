//! Models that are run without training, planned for the latency of a batch or the throughput of a stream of batches.

use crate::common::{DEMO, Scratch, altiplano, planned, succeeds};
use altiplano::ir::plan::{Goal, Plan};
use altiplano::{ImportOptions, load_plan};
use std::path::Path;

/// Results are logits, so a batch may be split.
const CONFIG: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 8, "n_head": 4}"#;

fn plan(words: &str, goal: Goal) -> Plan {
    let scratch = Scratch::new();
    let words = format!("{words} inference {}", goal.name());
    planned(Path::new(&scratch.file("config.json", CONFIG)), &ImportOptions::default(), &words).expect("a plan")
}

/// In a stream, a batch takes the time of the busiest stage. A single batch takes as long as under a plan for latency.
#[test]
fn batches_that_follow_each_other_take_what_the_busiest_stage_does() {
    for (words, lanes) in
        [("p3.16xlarge:1 pp4 batch8", 4), ("p3.16xlarge:1 pp2 micro2 batch16", 2), ("dgx-a100:1 pp8 micro8 batch64", 8)]
    {
        let (one, many) = (plan(words, Goal::Latency), plan(words, Goal::Throughput));
        assert_eq!((one.num_lanes(), many.num_lanes(), one.predicted.latency_s), (lanes, lanes, None));
        let busy = |p: &Plan| {
            let of_stage = p.stages.iter().map(|s| s.predicted.forward_s * f64::from(p.num_microbatches));
            of_stage.fold(0.0, f64::max)
        };
        let (step_s, latency_s) = (many.predicted.step_time_s, many.predicted.latency_s.expect("of a batch alone"));
        assert!(step_s >= busy(&many) * (1.0 - 1e-9), "{words}: {step_s} {}", busy(&many));
        // Communication overlaps with computation.
        assert!(step_s <= busy(&many) * 1.25, "{words}: {step_s} {}", busy(&many));
        assert!(step_s < latency_s && one.predicted.step_time_s <= latency_s * (1.0 + 1e-9), "{words}");
        let again = plan(words, Goal::Throughput);
        assert_eq!(again.to_json(), many.to_json());
    }
}

/// A plan for throughput has at least the throughput of a plan for latency, and vice versa.
#[test]
fn each_goal_is_reached_best_by_who_asks_for_it() {
    for words in ["p3.16xlarge:1 batch64", "dgx-h100:2 batch512", "local:4 batch16"] {
        let (one, many) = (plan(words, Goal::Latency), plan(words, Goal::Throughput));
        let latency_s = many.predicted.latency_s.expect("of a batch alone");
        // Memory decides between plans within two percent of each other.
        assert!(one.predicted.step_time_s <= 1.02 * latency_s, "{words}");
        assert!(many.predicted.step_time_s <= 1.02 * one.predicted.step_time_s, "{words}");
    }
}

#[test]
fn results_are_the_same_whether_batches_wait_or_not() {
    let scratch = Scratch::new();
    let config = scratch.file("config.json", CONFIG);
    let results = |goal: &str, more: &[&str]| {
        let (file, out) = (scratch.path("p.json").display().to_string(), scratch.path("out.safetensors"));
        let model = ["plan", &config, "--cluster", "local:4", "--loss", "none", "--global-batch", "8"];
        let fixed = [&model[..], &["-o", &file, "--goal", goal]].concat();
        succeeds(&[&fixed[..], more].concat());
        assert_eq!(load_plan(Path::new(&file)).expect("a plan").goal.name(), goal);
        let said = succeeds(&["run", &file, "--steps", "7", "--output", &out.display().to_string()]);
        assert_eq!(said.lines().filter(|line| line.contains("samples/s")).count(), 7, "{said}");
        std::fs::read(&out).expect("results")
    };
    for more in [&["--pp", "4"][..], &["--pp", "2", "--dp", "2", "--num-microbatches", "2"], &["--tp", "4"]] {
        assert_eq!(results("throughput", more), results("latency", more), "{more:?}");
    }
}

#[test]
fn a_goal_is_of_models_that_are_run() {
    let said = altiplano(&["plan", DEMO, "--goal", "throughput"]);
    assert_eq!(said.code, Some(2));
    assert!(said.stderr.contains("--goal") && said.stderr.contains("--loss none"), "{}", said.stderr);

    let scratch = Scratch::new();
    let file = scratch.path("p.json").display().to_string();
    succeeds(&["plan", DEMO, "--cluster", "local:2", "-o", &file]);
    let text = std::fs::read_to_string(&file).expect("a plan");
    let edited = text.replacen("\"optimizer\"", "\"goal\": \"throughput\", \"optimizer\"", 1);
    let said = altiplano(&["inspect", &scratch.file("edited.json", edited)]);
    assert_eq!(said.code, Some(2));
    assert!(said.stderr.contains("goal: is of models that are run alone"), "{}", said.stderr);
}
