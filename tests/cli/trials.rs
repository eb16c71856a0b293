//! Many trainings on one cluster.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use serde_json::Value;

const SMALL: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}"#;

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn trials_are_packed_and_their_plans_run() {
    let scratch = Scratch::new();
    let small = scratch.file("small.json", SMALL);
    let wide = scratch.file("wide.json", SMALL.replace("\"n_embd\": 8", "\"n_embd\": 32"));
    let folder = scratch.path("trials").display().to_string();
    let command = [
        "trials",
        &small,
        &wide,
        "--seq",
        "4",
        "--global-batch",
        "8",
        "--cluster",
        "local:4",
        "--count",
        "5,2",
        "--steps",
        "100,20",
        "-o",
        &folder,
    ];
    let said = succeeds(&command);
    assert!(said.starts_with("5 trials of small, 100 steps each; 2 trials of "), "{said}");
    assert!(said.contains(" on local:4 (4 devices)\n  all are done after "), "{said}");
    let text = std::fs::read_to_string(format!("{folder}/trials.json")).expect("trials.json");
    let found: Value = serde_json::from_str(&text).expect("JSON");
    let trials = found["trials"].as_array().expect("trials");
    assert_eq!(trials.len(), 7);
    let of = |trial: &Value| {
        let device = |i: usize| trial["devices"][i].as_u64().expect("a device");
        (device(0), device(1), number(&trial["begin_s"]), number(&trial["end_s"]))
    };
    for (i, a) in trials.iter().enumerate() {
        let (first, end, begin_s, end_s) = of(a);
        assert!(first < end && end <= 4 && end_s <= number(&found["end_s"]) && begin_s < end_s, "{a}");
        let model = &found["models"][a["model"].as_u64().expect("a model") as usize];
        let block =
            model["blocks"].as_array().expect("blocks").iter().find(|b| b["devices"] == end - first).expect("a block");
        assert_eq!(block["plan"], a["plan"]);
        let lasts_s = number(&block["step_s"]) * number(&model["steps"]);
        assert!((end_s - begin_s - lasts_s).abs() <= 1e-9 * end_s, "{a}");
        for b in &trials[i + 1..] {
            let (other, other_end, other_begin_s, other_end_s) = of(b);
            let is_apart = other >= end || other_end <= first;
            assert!(is_apart || other_begin_s >= end_s - 1e-9 || begin_s >= other_end_s - 1e-9, "{a} {b}");
        }
    }
    assert!(number(&found["lower_bound_s"]) <= number(&found["end_s"]));
    assert!(number(&found["end_s"]) <= number(&found["in_turn_s"]) * (1.0 + 1e-9));
    // Every plan computes what one device computes.
    let mut plans: Vec<&str> = trials.iter().map(|trial| trial["plan"].as_str().expect("a name")).collect();
    plans.sort_unstable();
    plans.dedup();
    for plan in plans {
        let said = succeeds(&["verify", &format!("{folder}/{plan}")]);
        assert!(said.ends_with("the numbers agree\n"), "{plan}: {said}");
    }
}

#[test]
fn trials_that_cannot_be_packed_are_refused_with_the_reason() {
    let two = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/two-kinds.toml");
    let refused = |options: &[&str], code: i32, said: &str| {
        let output = altiplano(&[&["trials", DEMO], options].concat());
        assert_eq!(output.code, Some(code), "{}", output.stderr);
        assert!(output.stderr.contains(said), "{}", output.stderr);
    };
    refused(&["--cluster", "local:2"], 2, "--count <K>");
    refused(&["--cluster", "local:2", "--count", "2,3"], 2, "error: --count: give one number, or one for each model\n");
    refused(&["--cluster", "local:2", "--count", "0"], 2, "error: --count: trials and their steps are at least 1\n");
    refused(&["--cluster", "local:2", "--count", "100001"], 2, "error: --count: more than 100000 trials\n");
    refused(&["--cluster", two, "--count", "2"], 2, "error: --cluster: trials need equal nodes, ");
    refused(
        &["--cluster", "p3.16xlarge:1/2", "--count", "2", "--global-batch", "99999999", "--num-microbatches", "1"],
        1,
        "error: no plan fits in memory",
    );
}
