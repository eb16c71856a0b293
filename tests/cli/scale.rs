//! Sweeps over numbers of nodes from the command line. The text is a golden; invariants of any sweep are tested on its
//! numbers.

use crate::common::{DEMO, Scratch, altiplano, golden, shared_model, succeeds};
use altiplano::cost_models::preset;
use altiplano::planner::Silent;
use altiplano::{ImportOptions, load_model, plan, request};
use serde_json::Value;

/// Nodes of eight A100, with storage for samples.
const LAB: &str = r#"
name = "lab"
[[group]]
nodes = 1
devices_per_node = 8
device = "A100-SXM-80GB"
intra_node = { kind = "nvswitch", bytes_per_s = 300e9, latency_s = 3e-6 }
inter_node = { bytes_per_s = 25e9, nics = 8, latency_s = 8e-6 }
price_per_hour = 32.0
[storage]
bytes_per_s = 1e12
node_bytes_per_s = 5e10
metadata_ops_per_s = 5e8
node_disk = { bytes = 7e12, bytes_per_s = 3e13 }
"#;

fn sweep(options: &[&str]) -> Value {
    let text = succeeds(&[&["scale", DEMO, "--json"], options].concat());
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{options:?}: {e}"))
}

fn points(sweep: &Value) -> Vec<&Value> {
    sweep["rows"].as_array().expect("rows").iter().map(|row| &row["point"]).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn said(sweep: &Value, part: &str) -> bool {
    sweep["meaning"].as_array().expect("lines").iter().any(|line| line.as_str().is_some_and(|l| l.contains(part)))
}

#[test]
fn a_sweep_says_what_to_take() {
    let options = ["--cluster", "p3.16xlarge", "--nodes", "1,2,4", "--global-batch", "512"];
    let training = ["--samples", "1000000", "--epochs", "90", "--noise-scale", "300"];
    let rates = ["--learning-rate", "1e-3", "--base-batch", "256"];
    golden("scale.txt", &succeeds(&[&["scale", DEMO][..], &options, &training, &rates].concat()));
}

#[test]
fn what_holds_of_every_sweep() {
    let cases: [&[&str]; 4] = [
        &["--cluster", "p3.16xlarge", "--nodes", "1,2,4", "--global-batch", "512"],
        &["--cluster", "dgx-a100", "--nodes", "1,3,...,6", "--weak", "--global-batch", "48"],
        &["--cluster", "dgx-a100", "--nodes", "1,2,4", "--weak", "--global-batch", "256", "--noise-scale", "128"],
        &["--cluster", "p3.16xlarge", "--nodes", "1,2", "--global-batch", "64", "--dp", "8"],
    ];
    for case in cases {
        let found = sweep(&[case, &["--samples", "100000"]].concat());
        let points = points(&found);
        let mut last = f64::INFINITY;
        for point in &points {
            // Additional nodes may always stay idle.
            let hours = number(&point["training"]["hours"]);
            assert!(hours <= last, "{case:?}: {hours} h after {last} h");
            last = hours;
            let (devices, samples_per_s) = (number(&point["devices"]), number(&point["samples_per_s"]));
            let sum: f64 = point["parts"].as_array().expect("parts").iter().map(|p| number(&p["device_s"])).sum();
            assert!((sum * samples_per_s / devices - 1.0).abs() < 1e-6, "{case:?}: parts are {sum}");
            let device_hours = number(&point["training"]["device_hours"]);
            assert!((device_hours / (hours * devices) - 1.0).abs() < 1e-12, "{case:?}");
            // A superlinear speedup has an explanation.
            let gained = point["change"]["device_s"].as_f64().is_some_and(|s| s < 0.0);
            assert!(number(&point["efficiency"]) <= 1.0 + 1e-9 || gained, "{case:?}: {point}");
        }
        assert_eq!(number(&points[0]["efficiency"]), 1.0, "{case:?}");
        let take = number(&found["recommended"]["nodes"]);
        let rows = found["rows"].as_array().expect("rows");
        let row = rows.iter().find(|row| number(&row["nodes"]) == take).expect("the row");
        assert_eq!(row["point"]["on_front"], true, "{case:?}: what is beaten is recommended");
    }
}

/// Rows share analyses of the model, whatever their batch, and equal the separate plans of each number of nodes.
#[test]
fn rows_are_the_plans_of_their_counts() {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("the model");
    for (growth, batches) in [(&["--strong"][..], [64, 64]), (&["--weak"], [64, 192])] {
        let options = ["--cluster", "p3.16xlarge", "--nodes", "1,3", "--global-batch", "64"];
        let found = sweep(&[&options[..], growth].concat());
        for ((point, nodes), batch) in points(&found).into_iter().zip([1, 3]).zip(batches) {
            let mut request = request(&model, preset(&format!("p3.16xlarge:{nodes}")).expect("a cluster"));
            request.batch.global = Some(batch);
            let plan = plan(&request, &Silent).expect("a plan");
            assert_eq!(number(&point["global_batch"]), batch as f64);
            assert!(number(&point["step_time_s"]) <= plan.predicted.step_time_s, "{nodes} nodes: {point}");
            if number(&point["nodes_used"]) == f64::from(nodes) {
                assert_eq!(number(&point["step_time_s"]), plan.predicted.step_time_s, "{nodes} nodes");
            }
        }
    }
}

#[test]
fn counts_without_a_plan_say_why() {
    let scratch = Scratch::new();
    let small = scratch.file(
        "small.toml",
        format!(
            "{}[device.own]\nlike = \"A100-SXM-80GB\"\nmemory_bytes = 2e6\n",
            LAB.replace("device = \"A100-SXM-80GB\"", "device = \"own\"")
        ),
    );
    let options = ["--nodes", "1,4", "--global-batch", "256", "--samples", "100000"];
    let text = succeeds(&[&["scale", DEMO, "--cluster", &small][..], &options].concat());
    let row = text.lines().find(|line| line.trim_start().starts_with("1 ")).expect("a row");
    assert!(row.contains("no plan fits in memory"), "{text}");
    assert!(text.contains("4 nodes"), "{text}");
}

#[test]
fn storage_limits_large_samples_and_not_text() {
    let scratch = Scratch::new();
    let lab = scratch.file("lab.toml", LAB);
    let options = ["--cluster", &lab, "--nodes", "1,2", "--weak", "--global-batch", "256", "--samples", "30000"];
    let volumes = sweep(&[&options[..], &["--sample-bytes", "140e6"]].concat());
    assert!(said(&volumes, "storage limits 1 node and more") && said(&volumes, "on the nodes' own disks it does not"));
    let text = sweep(&options);
    assert!(said(&text, "storage limits nothing"), "{text}");
    for (bound, free) in points(&volumes).into_iter().zip(points(&text)) {
        let fed = |point: &Value| number(&point["input"]["utilisation"]);
        let staged = |point: &Value| number(&point["input"]["staged"]["utilisation"]);
        assert!(fed(bound) < 0.5 && fed(free) == 1.0);
        assert_eq!(
            (staged(bound), staged(free)),
            (1.0, 1.0),
            "staging removes the limit of the one, the other has none"
        );
        let rate = |point: &Value| number(&point["samples_per_s"]);
        assert!((rate(bound) / fed(bound) / rate(free) - 1.0).abs() < 1e-9);
        assert_eq!(number(&bound["step_time_s"]), number(&free["step_time_s"]));
    }
    let price = number(&points(&text)[1]["training"]["price"]);
    assert!((price / (64.0 * number(&points(&text)[1]["training"]["hours"])) - 1.0).abs() < 1e-9);
}

#[test]
fn what_cannot_be_asked_is_refused() {
    let two = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/two-kinds.toml");
    let cases: [(&[&str], &str); 13] = [
        (&["--nodes", "0,1"], "0 nodes"),
        (&["--nodes", "2,2"], "twice"),
        (&["--nodes", "4294967296"], "counts of nodes"),
        (&["--nodes", "4294967295"], "more than 1000000 devices"),
        (&["--nodes", "1", "--max-hours", "3"], "--samples or --tokens"),
        (&["--nodes", "1", "--weak", "--strong"], "--strong"),
        (&["--nodes", "1", "--samples", "5", "--tokens", "7"], "--tokens"),
        (&["--nodes", "1", "--epochs", "5"], "--samples"),
        (&["--nodes", "1", "--samples", "0"], "--samples"),
        (&["--nodes", "2,3", "--weak", "--global-batch", "7"], "whole"),
        (&["--nodes", "1", "--learning-rate", "0.1"], "--base-batch"),
        (&["--nodes", "1", "--sample-bytes", "5"], "[storage]"),
        (&["--nodes", "1,2", "--cluster", two], "several groups"),
    ];
    for (options, part) in cases {
        let refused = altiplano(&[&["scale", DEMO, "--cluster", "p3.16xlarge"][..], options].concat());
        // Clap rejects a second cluster, so it replaces the first.
        let refused = match options.contains(&"--cluster") {
            true => altiplano(&[&["scale", DEMO][..], options].concat()),
            false => refused,
        };
        assert_eq!(refused.code, Some(2), "{options:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(part) && refused.stdout.is_empty(), "{options:?}: {}", refused.stderr);
    }
}

#[test]
fn waits_for_nodes_are_added_and_told() {
    let scratch = Scratch::new();
    let waits = scratch.file("waits.csv", "nodes,hours\n1,0\n4,3\n");
    let options = ["--cluster", "p3.16xlarge", "--nodes", "1,2,4", "--global-batch", "512", "--samples", "90000000"];
    let (plain, queued) = (sweep(&options), sweep(&[&options[..], &["--queue-waits", &waits]].concat()));
    for ((plain, queued), wait) in points(&plain).into_iter().zip(points(&queued)).zip([0.0, 1.0, 3.0]) {
        assert_eq!(plain["training"]["hours"], queued["training"]["hours"]);
        assert!(plain["training"]["wait_hours"].is_null() && number(&queued["training"]["wait_hours"]) == wait);
    }
    // More nodes save minutes and wait hours.
    assert_eq!(number(&queued["recommended"]["nodes"]), 1.0);
    assert!(said(&queued, "the wait for 2 nodes is read off a line") && said(&queued, "takes longer than it saves"));
    let text = succeeds(&[&["scale", DEMO, "--queue-waits", &waits][..], &options].concat());
    assert!(text.contains("done after") && text.contains("3.00 hours"), "{text}");
    let cases: [(&[&str], &str); 3] = [
        (&["--nodes", "1,8", "--samples", "9", "--queue-waits", &waits], "the wait for 8 nodes is unknown"),
        (&["--nodes", "1,2", "--queue-waits", &waits], "--samples or --tokens"),
        (&["--nodes", "1,2", "--samples", "9", "--jitter=-1"], "--jitter"),
    ];
    for (options, part) in cases {
        let refused = altiplano(&[&["scale", DEMO, "--cluster", "p3.16xlarge"][..], options].concat());
        assert_eq!(refused.code, Some(2), "{options:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(part), "{options:?}: {}", refused.stderr);
    }
}

#[test]
fn exchanges_are_side_by_side() {
    let options = ["--cluster", "p3.16xlarge", "--nodes", "1,4", "--global-batch", "64"];
    let found = sweep(&options);
    let of = |sweep: &Value| sweep["exchanges"].as_array().expect("ways").clone();
    let ways = of(&found);
    assert_eq!(ways.len(), 4, "{ways:?}");
    // The first is the plan, up to the order of additions.
    let plan = number(&points(&found)[1]["step_time_s"]);
    assert!((number(&ways[0]["step_time_s"]) / plan - 1.0).abs() < 1e-12);
    assert!(number(&ways[1]["step_time_s"]) < number(&ways[0]["step_time_s"]));
    let shaken = of(&sweep(&[&options[..], &["--jitter", "0.2"]].concat()));
    for (still, shaken) in ways.iter().zip(&shaken) {
        let (still_s, shaken_s) = (number(&still["step_time_s"]), number(&shaken["step_time_s"]));
        match still["name"].as_str() {
            Some("asynchronous servers") => assert_eq!(still_s, shaken_s, "the mean is the mean"),
            _ => assert!(shaken_s >= still_s, "{shaken}"),
        }
    }
    assert!(number(&shaken[0]["step_time_s"]) > plan * 1.001);
}

/// The page has everything that the text has, and loads nothing from elsewhere.
#[test]
fn the_page_has_every_point_and_no_script() {
    let scratch = Scratch::new();
    let (file, waits) =
        (scratch.path("scale.html").display().to_string(), scratch.file("w.csv", "nodes,hours\n1,1\n4,2\n"));
    let text = std::fs::read_to_string(DEMO).expect("the model");
    let hostile = scratch.file("<script src='a'>&b.mlir", text);
    let options = ["--cluster", "p3.16xlarge", "--nodes", "1,2,4", "--global-batch", "512", "--samples", "1000000"];
    let more = ["--noise-scale", "300", "--learning-rate", "1e-3", "--base-batch", "256", "--queue-waits", &waits];
    for model in [DEMO, &hostile] {
        let all = [&["scale", model, "--json", "--html", &file][..], &options, &more].concat();
        let found: Value = serde_json::from_str(&succeeds(&all)).expect("JSON");
        let page = std::fs::read_to_string(&file).expect("the page");
        assert!(
            !page.contains("<script")
                && !page.contains("http:")
                && !page.contains("https:")
                && !page.contains("src=\"")
        );
        assert_eq!((page.matches("<svg").count(), page.matches("class=\"taken\"").count()), (3, 2));
        let escape = |text: &str| {
            let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            text.replace('"', "&quot;").replace('\'', "&#39;")
        };
        for point in points(&found) {
            assert!(page.contains(&escape(point["how"].as_str().expect("words"))), "{point}");
            for part in point["parts"].as_array().expect("parts") {
                assert!(page.contains(&escape(part["what"].as_str().expect("a name"))), "{part}");
            }
        }
        for list in ["named", "exchanges"] {
            for way in found[list].as_array().expect("ways") {
                assert!(page.contains(way["name"].as_str().expect("a name")), "{way}");
                assert!(page.contains(&escape(way["how"].as_str().expect("words"))), "{way}");
            }
        }
        let lines = ["meaning", "practice"].map(|list| found[list].as_array().expect("lines"));
        for line in lines.into_iter().flatten() {
            assert!(page.contains(&escape(line.as_str().expect("a line"))), "{line}");
        }
        assert!(page.contains(&escape(found["model"].as_str().expect("a name"))));
        for (open, close) in [("<table>", "</table>"), ("<section>", "</section>"), ("<tr", "</tr>"), ("<ul", "</ul>")]
        {
            assert_eq!(page.matches(open).count(), page.matches(close).count(), "{open}");
        }
    }
}

#[test]
fn each_optimizer_has_its_custom() {
    let options = ["--cluster", "p3.16xlarge", "--nodes", "1", "--global-batch", "64"];
    for (optimizer, part) in [("lamb", "6.25e-4"), ("adadelta", "take unchanged"), ("rmsprop", "0.94 every two epochs")]
    {
        let found = sweep(&[&options[..], &["--optimizer", optimizer]].concat());
        let lines = found["practice"].as_array().expect("lines");
        assert!(lines.iter().any(|line| line.as_str().is_some_and(|l| l.contains(part))), "{optimizer}: {lines:?}");
    }
    assert_eq!(sweep(&[&options[..], &["--loss", "none"]].concat())["practice"], Value::Array(Vec::new()));
}

#[test]
fn the_example_says_where_samples_come_from() {
    let lab = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/with-storage.toml");
    let options = ["--cluster", lab, "--nodes", "1", "--global-batch", "64", "--samples", "1000"];
    let volumes = sweep(&[&options[..], &["--sample-bytes", "140e6"]].concat());
    assert!(said(&volumes, "storage limits 1 node and more") && said(&volumes, "from the file system gives 20.0 GB/s"));
    let training = &points(&volumes)[0]["training"];
    let (hours, kwh) = (number(&training["hours"]), number(&training["kwh"]));
    assert!((kwh / (0.35 * 8.0 * hours) - 1.0).abs() < 1e-9, "{training}");
}

/// A dense language model on one node and on eight: predictions match common knowledge of such training.
#[test]
fn language_models_scale_as_they_are_known_to() {
    let Some(model) = shared_model("gpt2-tiny.mlir") else { return };
    let options =
        ["--cluster", "dgx-a100", "--nodes", "1,8", "--weak", "--global-batch", "64", "--tokens", "1e8", "--json"];
    let text = succeeds(&[&["scale", model.as_str()][..], &options].concat());
    let found: Value = serde_json::from_str(&text).expect("JSON");
    for point in points(&found) {
        let training = &point["training"];
        let ratio = number(&training["formula_hours"]) / number(&training["hours"]);
        // The formula counts only parameters, which are mostly embeddings in a tiny model.
        assert!((0.2..5.0).contains(&ratio), "{ratio}");
    }
}
