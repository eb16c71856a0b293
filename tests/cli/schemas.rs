//! JSON output conforms to its schema in `docs/`, and the schemas reject invalid documents.

#[path = "../../ir/src/json/schema.rs"]
mod schema;

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use schema::violations;
use serde_json::{Value, json};
use std::path::Path;

fn read(file: impl AsRef<Path>) -> Value {
    let text = std::fs::read_to_string(&file).expect("a file");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", file.as_ref().display()))
}

fn schema_of(name: &str) -> Value {
    read(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/{name}.schema.json")))
}

/// The violations of a schema. A union only reports that none of its parts holds.
fn broken(schema: &Value, document: &Value) -> Vec<String> {
    violations(schema, schema, document, "$")
}

#[test]
fn plans_simulations_and_traces_are_as_their_schemas_say() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let (plan, simulation, trace) = (schema_of("plan"), schema_of("simulation"), schema_of("trace"));
    let cases: [&[&str]; 13] = [
        &["--dp", "2", "--pp", "2"],
        &["--pp", "2", "--virtual-stages", "2", "--num-microbatches", "4"],
        &["--pp", "2", "--schedule", "zb-h1", "--optimizer", "sgd"],
        &["--pp", "2", "--schedule", "zb-v", "--num-microbatches", "2"],
        &["--pp", "2", "--schedule", "pipedream", "--update", "stale"],
        &["--cluster", "p3.16xlarge:1", "--global-batch", "64", "--zero", "3", "--recompute", "full"],
        &["--cluster", "dgx-a100:1", "--target", "megatron", "--precision", "bf16"],
        &["--dp", "2", "--tp", "2", "--pin", "params['wte']=[{tensor}, {}]", "--reduce=200k"],
        &["--optimizer", "lamb", "--clip-norm", "1", "--pp", "2"],
        &["--loss", "none"],
        &["--cluster", "local:6", "--parameter-servers", "2", "--clip-norm", "1"],
        &["--cluster", "dgx-a100:1", "--parameter-servers", "4", "--asynchronous"],
        &["--cluster", concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/two-kinds.toml")],
    ];
    for options in cases {
        let (file, drawn) = (path("plan.json"), path("trace.json"));
        let planned = [&["plan", DEMO, "-o", &file], options].concat();
        succeeds(&planned);
        assert_eq!(broken(&plan, &read(&file)), Vec::<String>::new(), "{options:?}");
        let said = succeeds(&["simulate", &file, "--json", "--trace", &drawn]);
        let said = serde_json::from_str(&said).expect("JSON");
        assert_eq!(broken(&simulation, &said), Vec::<String>::new(), "{options:?}");
        assert_eq!(broken(&trace, &read(&drawn)), Vec::<String>::new(), "{options:?}");
    }
    let certified = path("certified.json");
    let text = crate::certificates::certified(&certified).to_json();
    assert_eq!(broken(&plan, &serde_json::from_str(&text).expect("JSON")), Vec::<String>::new());
    let run = path("run.json");
    succeeds(&["run", DEMO, "--steps", "1", "--trace", &run]);
    assert_eq!(broken(&trace, &read(&run)), Vec::<String>::new());
}

#[test]
fn checkpoints_are_as_their_schema_says() {
    let scratch = Scratch::new();
    let folder = scratch.path("checkpoints");
    let schema = schema_of("checkpoint");
    succeeds(&["run", DEMO, "--steps", "1", "--checkpoint", &folder.display().to_string()]);
    let mut manifest = read(folder.join("step-000001/manifest.json"));
    assert_eq!(broken(&schema, &manifest), Vec::<String>::new());
    assert_eq!(manifest.get("clip_norm"), None);
    let clipped = scratch.path("clipped");
    let options = ["--clip-norm", "0.5", "--optimizer", "lars", "--trust", "0.01", "--cluster", "local:1"];
    succeeds(&[&["run", DEMO, "--steps", "1", "--checkpoint", &clipped.display().to_string()][..], &options].concat());
    let of_clip = read(clipped.join("step-000001/manifest.json"));
    assert_eq!(broken(&schema, &of_clip), Vec::<String>::new());
    assert_eq!((&of_clip["clip_norm"], &of_clip["optimizer"]["lars"]["trust"]), (&json!(0.5), &json!(0.01)));
    manifest["files"][0]["xxh3"] = json!(7);
    assert_ne!(broken(&schema, &manifest), Vec::<String>::new());
}

#[test]
fn devices_are_as_their_schema_says() {
    let said = serde_json::from_str(&succeeds(&["devices", "--json"])).expect("JSON");
    assert_eq!(broken(&schema_of("devices"), &said), Vec::<String>::new());
}

#[test]
fn frontiers_are_as_their_schema_says() {
    let schema = schema_of("frontier");
    for cluster in ["local:2", "p3.16xlarge:1"] {
        let text = succeeds(&["plan", DEMO, "--cluster", cluster, "--frontier", "--json"]);
        assert_eq!(broken(&schema, &serde_json::from_str(&text).expect("JSON")), Vec::<String>::new(), "{cluster}");
    }
}

#[test]
fn failures_are_as_their_schema_says() {
    let schema = schema_of("failure");
    let scratch = Scratch::new();
    let cluster = scratch.file(
        "small.toml",
        "name = \"small\"\n[[group]]\nnodes = 1\ndevices_per_node = 2\ndevice = \"small\"\n\
         intra_node = { kind = \"nvlink\", bytes_per_s = 1e11, latency_s = 5e-6 }\n\
         inter_node = { bytes_per_s = 1e10, nics = 1, latency_s = 5e-6 }\n\
         [device.small]\nlike = \"A100-SXM-40GB\"\nmemory_bytes = 6000000\n",
    );
    let failed = |arguments: &[&str], code: i32| {
        let said = altiplano(arguments);
        assert_eq!(said.code, Some(code), "{}", said.stderr);
        let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
        assert_eq!(broken(&schema, &document), Vec::<String>::new());
        let error = document["error"].as_str().expect("a message");
        assert!(said.stderr.contains(error), "{} has no {error}", said.stderr);
        document
    };
    let short = failed(&["plan", DEMO, "--cluster", &cluster, "--json"], 1);
    let of = |key: &str| short["shortage"][key].as_u64().expect("a number");
    let tensors = short["shortage"]["tensors"].as_array().expect("tensors");
    let held: u64 = tensors.iter().map(|t| t["bytes"].as_u64().unwrap_or(0) * t["count"].as_u64().unwrap_or(0)).sum();
    assert!(held > of("limit_bytes") && of("peak_bytes") > of("limit_bytes"), "{short}");
    assert!(short["changes"].as_array().is_some_and(|changes| !changes.is_empty()), "{short}");

    let plan = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--dp", "2", "--pp", "2", "-o", &plan]);
    let refused = failed(&["why-not", &plan, "--tp", "3", "--json"], 2);
    assert!(refused["shortage"].is_null());
    let changes = refused["changes"].as_array().expect("changes");
    assert!(changes.iter().any(|c| c["change"] == "--tp 2"), "{refused}");
}

#[test]
fn comparisons_and_advice_are_as_their_schemas_say() {
    let scratch = Scratch::new();
    let [one, other] = ["one.json", "other.json"].map(|name| scratch.path(name).display().to_string());
    succeeds(&["plan", DEMO, "--dp", "2", "--pp", "2", "-o", &one]);
    succeeds(&["plan", DEMO, "--cluster", "p3.16xlarge:1", "--global-batch", "64", "-o", &other]);
    let json = |arguments: &[&str]| -> Value {
        let text = succeeds(&[arguments, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{arguments:?}: {e}"))
    };
    let schema = schema_of("comparison");
    let cases: [&[&str]; 4] = [
        &["compare", &one, &other],
        &["compare", &one, &one],
        &["compare", &one, "--baseline", "tp=2", "--measured", "1s"],
        &["why-not", &one, "--tp", "2", "--pp", "1"],
    ];
    for case in cases {
        let found = json(case);
        assert_eq!(broken(&schema, &found), Vec::<String>::new(), "{case:?}");
        // Items add up to their totals.
        for i in 0..2 {
            let sum = |list: &str, of: &str| -> f64 {
                found[list].as_array().expect("items").iter().map(|item| item[of][i].as_f64().expect("a number")).sum()
            };
            let plan = &found["plans"][i];
            let step_s = plan["step_time_s"].as_f64().expect("seconds");
            assert!((sum("seconds", "seconds") - step_s).abs() <= 1e-9 * step_s, "{case:?}: plan {i}");
            assert_eq!(sum("bytes", "bytes"), plan["peak_bytes"].as_f64().expect("bytes"), "{case:?}: plan {i}");
        }
        // Parameters move only between plans on the same devices.
        assert_eq!(found["parameters"].is_object(), case[..2] != ["compare", &one] || case[2] != other, "{case:?}");
    }
    let schema = schema_of("advice");
    for more in [&["--noise-scale", "16"][..], &["--tp", "2"]] {
        let found = json(&[&["advise", &one, "--within", "1000"], more].concat());
        assert_eq!(broken(&schema, &found), Vec::<String>::new(), "{more:?}");
        assert!(found["scenarios"].as_array().is_some_and(|s| s.len() >= 4), "{more:?}");
    }
}

#[test]
fn judgements_are_as_their_schema_says() {
    let scratch = Scratch::new();
    let text = "torchrun --nproc-per-node 8 train.py --num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 512 \\
        --seq-length 64 --micro-batch-size 1 --global-batch-size 32 --bf16 --tensor-model-parallel-size 8";
    let file = scratch.file("run.sh", text);
    let schema = schema_of("judgement");
    for more in [&[][..], &["--measured", "1s"], &["--within", "0", "--cluster", "dgx-a100:1"]] {
        let said = succeeds(&[&["judge", &file, "--json"], more].concat());
        let found: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(broken(&schema, &found), Vec::<String>::new(), "{more:?}");
        assert!(found["changes"].as_array().is_some_and(|changes| !changes.is_empty()), "{found}");
    }
}

#[test]
fn sweeps_over_nodes_are_as_their_schema_says() {
    let schema = schema_of("scale");
    let cases: [&[&str]; 3] = [
        &["--cluster", "p3.16xlarge", "--nodes", "1,2", "--global-batch", "64"],
        &[
            "--cluster",
            "dgx-a100",
            "--nodes",
            "1,2",
            "--weak",
            "--tokens",
            "1e6",
            "--noise-scale",
            "8",
            "--max-hours",
            "1",
        ],
        &["--nodes", "1", "--samples", "100", "--epochs", "3", "--learning-rate", "1", "--base-batch", "8"],
    ];
    for case in cases {
        let text = succeeds(&[&["scale", DEMO, "--json"], case].concat());
        assert_eq!(broken(&schema, &serde_json::from_str(&text).expect("JSON")), Vec::<String>::new(), "{case:?}");
    }
}

#[test]
fn trials_are_as_their_schema_says() {
    let said = succeeds(&["trials", DEMO, "--count", "3", "--steps", "5", "--cluster", "local:2", "--json"]);
    assert_eq!(broken(&schema_of("trials"), &serde_json::from_str(&said).expect("JSON")), Vec::<String>::new());
}

#[test]
fn schemas_refuse_what_they_should() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--dp", "2", "--pp", "2", "-o", &file]);
    let (schema, good) = (schema_of("plan"), read(&file));
    let refuses = |change: &dyn Fn(&mut Value), place: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        let found = broken(&schema, &bad);
        assert!(found.iter().any(|f| f.starts_with(place)), "{place}: {found:?}");
    };
    refuses(&|p| p["version"] = json!(2), "$.version: const");
    refuses(&|p| p["schedule"] = json!("2f2b"), "$.schedule: enum");
    refuses(&|p| p["stages"][0]["zero"] = json!(4), "$.stages[0].zero: enum");
    refuses(&|p| p["stages"][1]["predicted"]["peak_bytes"] = json!(-1), "$.stages[1].predicted.peak_bytes: minimum");
    refuses(&|p| p["stages"][0]["more"] = json!(1), "$.stages[0]: unknown key");
    refuses(&|p| p["optimizer"] = json!("adamw"), "$.optimizer: oneOf");
    let mut bare = good.clone();
    bare.as_object_mut().expect("an object").remove("graph");
    assert!(broken(&schema, &bare).iter().any(|f| f.starts_with("$: required")));
    let trace = schema_of("trace");
    let event = |ph: &str| json!({"traceEvents": [{"name": "forward 0", "ph": ph, "pid": 0, "tid": 0, "ts": 0, "dur": 1}], "displayTimeUnit": "ms", "otherData": {"step_s": 1}});
    assert_eq!(broken(&trace, &event("X")), Vec::<String>::new());
    assert!(!broken(&trace, &event("B")).is_empty());
}
