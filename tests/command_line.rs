//! The command line where all is well: each subcommand end to end on the model that ships with the project.

mod common;

use common::{DEMO, Scratch, altiplano, succeeds};
use serde_json::Value;

#[test]
fn a_plan_is_written_inspected_and_the_same_twice() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let (first, second) = (path("first.json"), path("second.json"));
    let report = succeeds(&["plan", DEMO, "-o", &first]);
    assert_eq!(succeeds(&["plan", DEMO, "-o", &second]), report);
    let read = |file: &str| std::fs::read_to_string(file).expect("the plan file");
    assert_eq!(read(&first), read(&second));

    assert_eq!(succeeds(&["inspect", &first]), report);
    assert_eq!(succeeds(&["show", &first]), report);
    for part in ["data parallel", "ZeRO-1", "FSDP", "tensor parallel", "pipeline", "chosen", "mesh<", "optimizer state"]
    {
        assert!(report.contains(part), "the report should mention '{part}':\n{report}");
    }
    let json: Value = serde_json::from_str(&succeeds(&["inspect", &first, "--json"])).expect("one JSON document");
    let keys = [
        "format",
        "version",
        "graph_hash",
        "cluster",
        "global_batch",
        "num_microbatches",
        "schedule",
        "optimizer",
        "graph",
        "stages",
        "predicted",
    ];
    for key in keys {
        assert!(!json[key].is_null(), "{key}");
    }
    assert!(json["predicted"]["step_time_s"].as_f64() >= json["predicted"]["lower_bound_s"].as_f64());
    assert!(json["predicted"]["step_time_s"].as_f64() <= json["predicted"]["lower_bound_s"].as_f64().map(|s| 10.0 * s));
    assert_eq!(json, serde_json::from_str::<Value>(&succeeds(&["plan", DEMO, "--json"])).expect("JSON"));
    let programs = succeeds(&["inspect", &first, "--programs"]);
    assert!(programs.contains("schedule") && programs.contains("dot_general"));
}

#[test]
fn what_is_fixed_stays_fixed() {
    let options = ["--dp", "2", "--tp", "1", "--pp", "2", "--num-microbatches", "4", "--schedule", "gpipe"];
    let more = ["--recompute", "full", "--zero", "0", "--optimizer", "sgd", "--global-batch", "16", "--json"];
    let arguments: Vec<&str> = ["plan", DEMO].into_iter().chain(options).chain(more).collect();
    let plan: Value = serde_json::from_str(&succeeds(&arguments)).expect("JSON");
    assert_eq!(plan["stages"].as_array().map(Vec::len), Some(2));
    assert_eq!(plan["num_microbatches"], 4);
    assert_eq!(plan["global_batch"], 16);
    assert_eq!(plan["schedule"], "gpipe");
    for stage in plan["stages"].as_array().into_iter().flatten() {
        assert_eq!(stage["mesh"]["axes"][0]["size"], 2);
        assert_eq!(stage["recompute"], true);
        assert_eq!(stage["zero"], 0);
    }
}

#[test]
fn a_model_survives_the_graph_format() {
    let scratch = Scratch::new();
    let graph = scratch.path("graph.json").display().to_string();
    succeeds(&["import", DEMO, "-o", &graph]);
    assert_eq!(succeeds(&["show", DEMO]), succeeds(&["show", &graph]));
    let plan = |model: &str| -> Value {
        let mut plan: Value = serde_json::from_str(&succeeds(&["plan", model, "--json"])).expect("JSON");
        plan["model"] = Value::Null;
        plan
    };
    assert_eq!(plan(DEMO), plan(&graph));
}

#[test]
fn clusters_are_listed_and_shown() {
    let list = succeeds(&["clusters"]);
    for name in ["local", "p3.16xlarge", "dgx-a100", "dgx-h100"] {
        assert!(list.contains(name));
    }
    let scratch = Scratch::new();
    let file = scratch.file("cluster.toml", succeeds(&["show", "dgx-a100:2"]));
    assert_eq!(succeeds(&["show", &file]), succeeds(&["show", "dgx-a100:2"]));
}

#[test]
fn training_lowers_the_loss() {
    let text = succeeds(&["run", DEMO, "--steps", "4", "--lr", "0.003"]);
    let losses: Vec<f64> =
        text.lines().filter_map(|l| l.split_once("loss ")?.1.split_whitespace().next()?.parse().ok()).collect();
    assert_eq!(losses.len(), 4, "{text}");
    assert!(text.contains("samples/s") && text.contains("peak memory"), "{text}");
    assert!((losses[0] - 1024f64.ln()).abs() < 0.2, "an untrained model guesses: {losses:?}");
    assert!(losses[3] < losses[0], "the loss should fall: {losses:?}");
}

#[test]
fn no_memory_is_exit_code_1_and_says_how_much() {
    let scratch = Scratch::new();
    let tiny = succeeds(&["show", "local:4"])
        + "\n[device.\"tiny\"]\nmemory_bytes = 1e6\nmemory_bytes_per_s = 1e9\npeak_flops = { f32 = 1e9 }\n";
    let file = scratch.file("tiny.toml", tiny.replace("\"cpu-worker\"", "\"tiny\""));
    let output = altiplano(&["plan", DEMO, "--cluster", &file]);
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    for part in ["memory", "more than", "tiny"] {
        assert!(output.stderr.contains(part), "{}", output.stderr);
    }
}
