//! A simulated step and the same step recorded: the same tracks and names, accounts that add up, and kernels for
//! fitting constants.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::ir::plan::Plan;
use altiplano::planner::{Request, Silent};
use altiplano::simulate::Simulation;
use altiplano::training::{Training, train};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use serde_json::Value;
use std::collections::BTreeSet;

fn planned(fix: fn(&mut Request)) -> Plan {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("the model");
    let mut request = request(&model, load_cluster("local:4").expect("a cluster"));
    request.baselines = false;
    fix(&mut request);
    plan(&request, &Silent).expect("a plan")
}

/// Pipelines, interleaved ones, zero bubble, tensor parallelism, and fully sharded storage.
const PLANS: [fn(&mut Request); 5] = [
    |r| (r.degrees.dp, r.degrees.pp, r.batch.num_microbatches) = (Some(2), Some(2), Some(4)),
    |r| (r.degrees.pp, r.degrees.virtual_stages, r.batch.num_microbatches) = (Some(2), Some(2), Some(4)),
    |r| (r.degrees.pp, r.schedule) = (Some(2), Some(altiplano::ir::plan::Schedule::ZbH1)),
    |r| (r.degrees.tp, r.degrees.dp) = (Some(2), Some(2)),
    |r| (r.degrees.dp, r.degrees.zero) = (Some(4), Some(3)),
];

/// All event names with their process and track, and the names of these.
fn names(trace: &Value) -> BTreeSet<String> {
    let events = trace["traceEvents"].as_array().expect("events");
    let name = |e: &Value| {
        let called = if e["ph"] == "M" { e["args"]["name"].to_string() } else { String::new() };
        format!("{} {} {} {} {called}", e["ph"], e["pid"], e["tid"], e["name"])
    };
    events.iter().map(name).collect()
}

#[test]
fn what_runs_is_traced_under_the_names_of_what_is_simulated() {
    for fix in PLANS {
        let plan = planned(fix);
        let ran = train(&plan, &Training { steps: 1, ..Training::default() }, |_| Ok(())).expect("it runs");
        let simulation = Simulation::new(plan, None).expect("programs");
        let (simulated, run) = (simulation.trace(), simulation.trace_of(&ran.last));
        assert_eq!(names(&simulated), names(&run));
        let events = run["traceEvents"].as_array().expect("events");
        let end = |e: &Value| e["ts"].as_f64().unwrap_or(0.0) + e["dur"].as_f64().unwrap_or(0.0);
        let step_us = 1e6 * run["otherData"]["step_s"].as_f64().expect("seconds");
        assert!(events.iter().all(|e| end(e) <= step_us), "all of it is within the step");
    }
}

#[test]
fn what_was_measured_adds_up_to_the_step() {
    for fix in PLANS {
        let plan = planned(fix);
        let ran = train(&plan, &Training { steps: 1, ..Training::default() }, |_| Ok(())).expect("it runs");
        let simulation = Simulation::new(plan, None).expect("programs");
        let measured = simulation.measured(&ran.last);
        assert_eq!(measured.len(), simulation.plan().num_lanes());
        for account in &measured {
            assert!((account.sum_s() - ran.last.seconds).abs() <= 1e-6 * ran.last.seconds, "{account:?}");
        }
        // The recorded kinds of work are those predicted, except for negligible ones.
        let table = simulation.measured_text(&ran.last).expect("a plan for workers");
        for what in ["matmuls", "elementwise ops", "the step"] {
            assert!(table.contains(what), "{table}");
        }
    }
}

#[test]
fn constants_are_fitted_on_what_was_run() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let (trace, devices) = (path("run.json"), path("devices.toml"));
    let text = succeeds(&["run", DEMO, "--dp", "2", "--pp", "2", "--steps", "2", "--trace", &trace]);
    assert!(text.contains("measured by predicted"), "{text}");
    let fitted = succeeds(&["calibrate", &trace, "-o", &devices]);
    assert!(fitted.starts_with("cpu-worker: error "), "{fitted}");
    // The fitted constants affect predictions.
    let predicted = |options: &[&str]| -> f64 {
        let text = succeeds(&[&["plan", DEMO, "--dp", "2", "--pp", "2", "--json"], options].concat());
        let plan: Value = serde_json::from_str(&text).expect("JSON");
        plan["predicted"]["step_time_s"].as_f64().expect("seconds")
    };
    assert_ne!(predicted(&[]), predicted(&["--devices", &devices]));

    let wrong = scratch.file(
        "wrong.json",
        r#"{"deviceProperties": [{"name": "cpu-worker"}], "traceEvents": [{"cat": "kernel", "dur": 3,
            "args": {"kernel": {"what": {"elementwise": {"operations": -1}}, "read_bytes": 1, "written_bytes": 1}}}]}"#,
    );
    let refused = altiplano(&["calibrate", &wrong]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("wrong.json"), "{}", refused.stderr);
}
