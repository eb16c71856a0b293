//! The search from the command line: restricted spaces, plans for other software, the Pareto frontier, and comparisons.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::planner::Progress;
use altiplano::{ImportOptions, load_cluster, load_model, request};
use serde_json::Value;
use std::sync::Mutex;

const TWO_NODES: [&str; 5] = ["plan", DEMO, "--cluster", "p3.16xlarge:2", "--json"];

fn plan(more: &[&str]) -> Value {
    let arguments: Vec<&str> = TWO_NODES.iter().chain(more).copied().collect();
    serde_json::from_str(&succeeds(&arguments)).expect("JSON")
}

fn step_s(plan: &Value) -> f64 {
    plan["predicted"]["step_time_s"].as_f64().expect("seconds")
}

fn stages(plan: &Value) -> &[Value] {
    plan["stages"].as_array().expect("stages")
}

#[test]
fn what_alpa_searches_is_a_part_of_the_whole() {
    let batch = ["--global-batch", "256"];
    let (whole, alpas) = (plan(&batch), plan(&[&batch[..], &["--search", "alpa"]].concat()));
    // Plans within this tolerance count as equally fast.
    assert!(step_s(&whole) <= 1.02 * step_s(&alpas));
    let devices =
        |plan: &Value| stages(plan).iter().map(|s| s["devices"].as_array().map_or(0, Vec::len)).sum::<usize>();
    assert_eq!(devices(&alpas), 16);
    for stage in stages(&alpas) {
        assert_eq!(stage["recompute"], "full");
        let count = stage["devices"].as_array().map_or(0, Vec::len);
        assert!(count.is_power_of_two() || count % 8 == 0);
    }
}

/// Records the progress that it receives.
#[derive(Default)]
struct Told(Mutex<Vec<f64>>);

impl Progress for Told {
    fn step(&self, _: &str, _: usize, _: usize) {}

    fn best(&self, step_s: f64, bound_s: f64) {
        assert!(bound_s <= step_s, "{bound_s} {step_s}");
        self.0.lock().expect("nobody panicked").push(step_s);
    }
}

#[test]
fn progress_tells_steps_of_plans_that_were_judged() {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("the demo");
    for cluster in ["local:4", "p3.16xlarge:2"] {
        let mut request = request(&model, load_cluster(cluster).expect("a preset"));
        (request.batch.global, request.baselines) = (Some(256), false);
        let told = Told::default();
        let plan = altiplano::plan(&request, &told).expect("a plan");
        let best_s = told.0.lock().expect("nobody panicked").iter().copied().fold(f64::INFINITY, f64::min);
        // Among equally fast plans, the one with the least memory is chosen.
        let step_s = plan.predicted.step_time_s;
        assert!(best_s <= step_s && step_s <= 1.02 * best_s, "{cluster}: {best_s} {step_s}");
    }
}

#[test]
fn targets_have_the_plans_that_they_can_run() {
    let fsdp = plan(&["--global-batch", "256", "--target", "fsdp"]);
    assert_eq!(fsdp["target"], "fsdp");
    assert_eq!(stages(&fsdp).len(), 1);
    assert_eq!(stages(&fsdp)[0]["mesh"]["axes"][0]["size"], 16);
    let xla = plan(&["--global-batch", "256", "--target", "xla"]);
    assert_eq!(stages(&xla).len(), 1);
    let megatron = plan(&["--global-batch", "256", "--target", "megatron"]);
    let meshes: Vec<&Value> = stages(&megatron).iter().map(|s| &s["mesh"]).collect();
    assert!(meshes.windows(2).all(|pair| pair[0] == pair[1]), "{meshes:?}");

    let refused = altiplano(&["plan", DEMO, "--cluster", "p3.16xlarge:2", "--target", "fsdp", "--tp", "2"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("--tp 2 is not 1, which is what fsdp runs"), "{}", refused.stderr);
}

#[test]
fn the_frontier_is_beaten_by_nothing_on_it() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let frontier = |more: &[&str]| {
        let options = ["plan", DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64", "--frontier"];
        succeeds(&[&options[..], more].concat())
    };
    let points: Vec<Value> = serde_json::from_str(&frontier(&["--json", "-o", &file])).expect("JSON");
    assert!(points.len() > 1);
    let of = |p: &Value| ["step_time_s", "peak_bytes", "devices", "price_per_step"].map(|k| p[k].as_f64().expect(k));
    for (i, a) in points.iter().enumerate() {
        for b in points.iter().skip(i + 1) {
            let worse_in_all = of(a).into_iter().zip(of(b)).all(|(a, b)| a >= b);
            let better_in_all = of(a).into_iter().zip(of(b)).all(|(a, b)| a <= b);
            assert!(!worse_in_all && !better_in_all, "{a} and {b}");
        }
        // Each is a plan that can be inspected.
        let written = scratch.path(&format!("plan.{}.json", i + 1)).display().to_string();
        let plan: Value = serde_json::from_str(&succeeds(&["inspect", &written, "--json"])).expect("JSON");
        assert_eq!(plan["predicted"]["step_time_s"], a["step_time_s"]);
    }
    assert!(frontier(&[]).contains("price/step"));
}

const EXPERTS: &str = r#"{"model_type": "mixtral", "vocab_size": 100, "max_position_embeddings": 32, "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_local_experts": 4, "num_experts_per_tok": 2}"#;

#[test]
fn plans_of_a_frontier_have_the_options_that_were_given() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let frontier = |more: &[&str]| {
        let options = ["plan", DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64", "--frontier"];
        altiplano(&[&options[..], more].concat())
    };
    let of_target: fn(&Value) -> bool = |plan| stages(plan).iter().all(|s| s["mesh"] == stages(plan)[0]["mesh"]);
    let cases: [(&[&str], &str, fn(&Value) -> bool); 3] = [
        (&["--cp", "2"], "x CP 2 x", |_| true),
        (&["--micro-batch-size", "2"], "micro-batch 2 a ", |_| true),
        (&["--target", "megatron"], "", of_target),
    ];
    for (given, said, holds) in cases {
        let found = frontier(&[given, &["--json", "-o", &file]].concat());
        assert_eq!(found.code, Some(0), "{given:?}: {}", found.stderr);
        let points: Vec<Value> = serde_json::from_str(&found.stdout).expect("JSON");
        assert!(!points.is_empty());
        for i in 1..=points.len() {
            let written = scratch.path(&format!("plan.{i}.json")).display().to_string();
            let text = succeeds(&["inspect", &written]);
            assert!(text.contains(said), "{given:?}: {text}");
            let plan = serde_json::from_str(&succeeds(&["inspect", &written, "--json"])).expect("JSON");
            assert!(holds(&plan), "{given:?}: {text}");
        }
    }
    // Half of the replicas divide the experts, on a mesh of their own.
    let experts = scratch.file("experts.json", EXPERTS);
    let degrees = ["--ep", "2", "--dp", "4", "--tp", "1", "--pp", "1", "--frontier"];
    succeeds(&[&["plan", &experts, "--cluster", "local:4", "--global-batch", "16"], &degrees[..]].concat());
    for degree in ["--cp", "--dp-replicate", "--virtual-stages"] {
        let refused = frontier(&[degree, "0"]);
        assert_eq!(refused.code, Some(2), "{degree}: {}", refused.stderr);
        assert!(refused.stderr.contains("0 must be at least 1"), "{degree}: {}", refused.stderr);
    }
}

/// Padding, overlaps and other layouts are among the plans of a frontier, since the plain search finds them.
#[test]
fn the_fastest_plan_of_a_frontier_is_the_plan() {
    let scratch = Scratch::new();
    let experts = scratch.file("experts.json", EXPERTS);
    let node = ["--cluster", "dgx-h100:1", "--global-batch", "64", "--json"];
    for (model, target) in [(DEMO, "altiplano"), (&experts, "megatron"), (&experts, "torchtitan")] {
        let options = [&["plan", model, "--target", target][..], &node].concat();
        let json =
            |more: &[&str]| -> Value { serde_json::from_str(&succeeds(&[&options[..], more].concat())).expect("JSON") };
        let (plan, frontier) = (json(&[]), json(&["--frontier"]));
        let fastest = frontier[0]["step_time_s"].as_f64().expect("seconds");
        assert!(fastest <= step_s(&plan) * (1.0 + 1e-9), "{target}: {fastest} s, the plan takes {} s", step_s(&plan));
    }
}

#[test]
fn a_plan_is_set_beside_what_runs_today() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64", "-o", &file]);
    let baseline = "tp=2 pp=2 mbs=4 recompute";
    let text = succeeds(&["compare", &file, "--baseline", baseline, "--measured", "30ms"]);
    for part in [
        "  plan  ",
        "  baseline",
        "for megatron",
        "2 stages, 8 microbatches",
        "times as fast",
        "takes 30.0 ms a step measured",
    ] {
        assert!(text.contains(part), "'{part}':\n{text}");
    }
    let bad = [
        ("tp=3", "tp x pp must divide its devices"),
        ("tp=8 pp=8", "too large"),
        ("mbs=3", "mbs x dp must"),
        ("ep=2", "not one of tp, pp, dp, mbs, zero, recompute, target"),
        ("pp=8", "too few for 8 pipeline stages"),
    ];
    for (baseline, problem) in bad {
        let refused = altiplano(&["compare", &file, "--baseline", baseline]);
        assert_eq!(refused.code, Some(2), "{baseline}: {}", refused.stderr);
        assert!(refused.stderr.contains(problem), "{baseline}: {}", refused.stderr);
    }
}

#[test]
fn what_moved_is_told() {
    let scratch = Scratch::new();
    let file = scratch.path("old.json").display().to_string();
    let options = ["plan", DEMO, "--global-batch", "64", "--tp", "1"];
    succeeds(&[&options[..], &["--dp", "4", "-o", &file]].concat());
    let same = succeeds(&[&options[..], &["--dp", "4", "--from", &file]].concat());
    assert!(same.contains("as before        52 parameters"), "{same}");
    let other = succeeds(&[&options[..], &["--dp", "2", "--pp", "2", "--from", &file]].concat());
    assert!(other.contains("to other devices"), "{other}");
    assert!(other.contains("1 stage, ") && other.contains(" -> 2 stages, "), "{other}");
}
