//! The page of a plan. Its data equal the plan and the simulation; the test assembles them as the browser does. Names
//! from a model are escaped, and plans with many calls stay small.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::ir::plan::{Plan, Schedule};
use altiplano::planner::Silent;
use altiplano::simulate::Simulation;
use altiplano::{ImportOptions, load_cluster, load_model, page_html, programs, request};
use serde_json::Value;
use std::collections::BTreeMap;

/// The demo on a cluster with fixed degrees.
fn planned(cluster: &str, pp: u32, num_microbatches: u32, schedule: Schedule, virtual_stages: u32) -> Plan {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("the demo is a model");
    let mut request = request(&model, load_cluster(cluster).expect("a preset"));
    (request.degrees.pp, request.batch.num_microbatches) = (Some(pp), Some(num_microbatches));
    (request.schedule, request.degrees.virtual_stages) = (Some(schedule), Some(virtual_stages));
    altiplano::plan(&request, &Silent).expect("the demo fits anywhere")
}

/// The data in a page.
fn told(page: &str) -> Value {
    let (_, rest) = page.split_once(r#"<script type="application/json" id="data">"#).expect("the page has data");
    let (data, _) = rest.split_once("</script>").expect("the data ends");
    serde_json::from_str(data).expect("the data is JSON")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn index(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no index")) as usize
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()) + 1e-15
}

/// Compares all data that the page and the plan share.
fn check(plan: &Plan) {
    let page = told(&page_html(plan).expect("a page"));
    let simulated = Simulation::new(plan.clone(), None).expect("a simulation").json();
    assert_eq!(number(&page["plan"]["step_s"]), plan.predicted.step_time_s);
    assert_eq!(number(&page["plan"]["lower_bound_s"]), plan.predicted.lower_bound_s);
    assert_eq!(list(&page["stages"]).len(), plan.stages.len());
    for (told, stage) in list(&page["stages"]).iter().zip(&plan.stages) {
        let p = &stage.predicted;
        for (name, seconds) in [
            ("forward_s", p.forward_s),
            ("backward_s", p.backward_s),
            ("step_s", p.step_s),
            ("compute_s", p.compute_s),
            ("communication_s", p.communication_s),
            ("bubble_s", p.bubble_s),
        ] {
            assert_eq!(number(&told[name]), seconds, "{name}");
        }
        for (name, bytes) in [
            ("parameters_bytes", p.memory.parameters_bytes),
            ("gradients_bytes", p.memory.gradients_bytes),
            ("optimizer_bytes", p.memory.optimizer_bytes),
            ("activations_bytes", p.memory.activations_bytes),
            ("peak_bytes", p.peak_bytes),
        ] {
            assert_eq!(told[name], bytes, "{name}");
        }
    }
    let mut ends = Vec::new();
    for (i, lane) in list(&page["lanes"]).iter().enumerate() {
        ends.push(check_calls(lane, &page, plan));
        check_memory(lane, &simulated["stages"][i]["memory"]);
        assert_eq!(lane["busy_s"], simulated["stages"][i]["busy_s"]);
        assert_eq!(lane["bubble_s"], simulated["stages"][i]["bubble_s"]);
    }
    let last = ends.into_iter().fold(0.0, f64::max);
    assert!(close(last, plan.predicted.step_time_s), "the last lane ends at {last}");
    check_parameters(&page, plan);
    assert_eq!(list(&page["alternatives"]).len(), plan.alternatives.len());
    for (told, line) in list(&page["alternatives"]).iter().zip(&plan.alternatives) {
        assert_eq!(told["name"], line.name);
        assert_eq!(told["detail"], line.detail);
        assert_eq!(told["step_s"].as_f64(), line.predicted.as_ref().map(|p| p.step_time_s));
    }
    assert_eq!(list(&page["layers"]["class_of"]).len(), plan.num_layers() as usize);
}

/// Assembles a lane's calls and returns the end of the last.
fn check_calls(lane: &Value, page: &Value, plan: &Plan) -> f64 {
    let kinds = list(&lane["kinds"]);
    let (mut free_s, mut busy_s) = (0.0, 0.0);
    let mut seen: BTreeMap<(u64, String), Vec<u64>> = BTreeMap::new();
    for call in list(&lane["calls"]) {
        let kind = &kinds[index(&call[0])];
        assert!(number(&call[2]) >= 0.0, "a lane starts before it is free");
        free_s += number(&call[2]) + number(&kind["seconds"]);
        busy_s += number(&kind["seconds"]);
        let key = (kind["stage"].as_u64().expect("a stage"), kind["phase"].as_str().expect("a phase").to_string());
        seen.entry(key).or_default().push(call[1].as_u64().expect("a microbatch"));
    }
    assert!(close(busy_s, number(&lane["busy_s"])), "{busy_s} against {}", lane["busy_s"]);
    for ((stage, phase), mut microbatches) in seen {
        microbatches.sort();
        let all: Vec<u64> = (0..u64::from(plan.num_microbatches)).collect();
        assert_eq!(microbatches, if phase == "finish" { vec![0] } else { all }, "{phase} of stage{stage}");
    }
    for kind in kinds {
        let (mut end_s, mut sends_s) = (0.0, 0.0);
        for placed in list(&page["bodies"][index(&kind["body"])]) {
            let op = &page["ops"][index(&placed[0])];
            let end = if op["sends"].as_bool().expect("a flag") { &mut sends_s } else { &mut end_s };
            *end += number(&placed[2]) + number(&op["seconds"]);
        }
        // Overlap with the next step's forward pass ends after the call does.
        if kind["phase"] != "finish" {
            let (end, seconds) = (f64::max(end_s, sends_s), number(&kind["seconds"]));
            assert!(end <= seconds + 1e-9, "{} has ops until {end} of {seconds}", kind["phase"]);
        }
    }
    free_s
}

/// Follows a lane's memory: its maximum is the peak, where every share equals the simulation's.
fn check_memory(lane: &Value, simulated: &Value) {
    let bytes = |value: &Value| -> Vec<i64> { list(value).iter().map(|b| b.as_i64().expect("bytes")).collect() };
    let plus = |a: &[i64], b: &[i64]| -> Vec<i64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
    let lasting = bytes(&lane["lasting"]);
    let mut now = lasting.clone();
    let mut fullest = now.clone();
    for call in list(&lane["calls"]) {
        let before = now.clone();
        for moment in list(&lane["kinds"][index(&call[0])]["memory"]) {
            assert!((0.0..=1.0).contains(&number(&moment[0])));
            now = plus(&before, &bytes(&moment[1]));
            assert!(now.iter().all(|b| *b >= 0), "less than nothing is held: {now:?}");
            if now.iter().sum::<i64>() > fullest.iter().sum() {
                fullest = now.clone();
            }
        }
    }
    assert_eq!(fullest.iter().sum::<i64>(), lane["peak_bytes"].as_i64().expect("bytes"));
    assert_eq!(lane["peak_bytes"], simulated["peak_bytes"]);
    let mut expected = vec![0; lasting.len()];
    for (category, bytes) in simulated["categories"].as_object().expect("categories") {
        let shares = ["parameters", "gradients", "optimizer state", "activations"];
        let share = shares.iter().position(|s| s == category).unwrap_or(shares.len());
        expected[share] += bytes.as_i64().expect("bytes");
    }
    assert_eq!(fullest, expected);
}

fn check_parameters(page: &Value, plan: &Plan) {
    let texts = &page["parameters"]["texts"];
    let rows = list(&page["parameters"]["rows"]);
    assert_eq!(rows.len(), plan.stages.iter().map(|s| s.parameters.len()).sum::<usize>());
    let lowered = programs(plan).expect("programs");
    for row in rows {
        let (name, stage) = (row["name"].as_str().expect("a name"), index(&row["stage"]));
        let storage = &plan.stages[stage].parameters[name];
        let mesh = &plan.stages[stage].mesh;
        let (v, _) = plan.graph.parameters().find(|(_, n)| *n == name).expect("a parameter");
        assert_eq!(texts[index(&row["sharding"])], storage.parameter.display(mesh).to_string());
        assert_eq!(row["local_bytes"], storage.parameter.local_bytes(plan.graph.ty(v), mesh));
    }
    // The rows of a lane's stages add up to its buffers.
    for (lane, program) in lowered.programs.iter().enumerate() {
        let of_lane = |row: &&Value| plan.lane_of(index(&row["stage"])) == lane;
        let sum = |of: &str| rows.iter().filter(of_lane).map(|row| row[of].as_u64().expect("bytes")).sum::<u64>();
        let held = |word: &str| -> u64 {
            let ids = (0u32..).map(altiplano::ir::program::BufferId).zip(&program.buffers);
            let kind = |b: &altiplano::ir::program::Buffer| format!("{:?}", b.kind);
            ids.filter(|(_, b)| kind(b).starts_with(word)).map(|(id, _)| program.local_bytes(id)).sum()
        };
        assert_eq!(sum("local_bytes"), held("Parameter"));
        assert_eq!(sum("gradient_bytes"), held("Accumulator"));
        assert_eq!(sum("state_bytes"), held("State"));
    }
}

#[test]
fn the_page_says_what_the_plan_says() {
    check(&planned("local:1", 1, 1, Schedule::OneFOneB, 1));
    check(&planned("local:4", 2, 4, Schedule::OneFOneB, 1));
    check(&planned("p3.16xlarge:1/4", 2, 8, Schedule::GPipe, 1));
    check(&planned("local:4", 4, 8, Schedule::ZbH1, 1));
    check(&planned("p3.16xlarge:1/2", 2, 4, Schedule::OneFOneB, 2));
}

#[test]
fn names_are_text_and_pages_repeat() {
    let mut plan = planned("local:4", 2, 4, Schedule::OneFOneB, 1);
    let hostile = "</script><script>alert(1)</script><!--<b>&amp;";
    plan.model = hostile.into();
    for stage in &mut plan.stages {
        for value in stage.shardings.values_mut() {
            value.name = format!("{hostile}{}", value.name);
        }
    }
    let page = page_html(&plan).expect("a page");
    assert!(!page.contains("alert(1)</script>") && !page.contains("<!--"), "a name is markup");
    assert!(!page.contains("<script>alert"), "a name is a script");
    let data = told(&page);
    assert_eq!(data["plan"]["model"], hostile);
    assert!(list(&data["layers"]["classes"])[0]["ops"][0]["name"].as_str().is_some_and(|n| n.starts_with(hostile)));
    assert_eq!(page, page_html(&plan).expect("a page"));
}

#[test]
fn a_page_needs_no_network() {
    let page = page_html(&planned("local:1", 1, 1, Schedule::OneFOneB, 1)).expect("a page");
    assert!(page.contains("default-src 'none'"));
    for way in [" src=", "<link", "@import", "url(http", "fetch(", "XMLHttpRequest"] {
        assert!(!page.contains(way), "the page has {way}");
    }
}

#[test]
fn pages_of_many_calls_are_small() {
    let scratch = Scratch::new();
    let config =
        r#"{"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 64, "n_head": 4}"#;
    let config = scratch.file("config.json", config);
    let options = ImportOptions { sequence: Some(64), ..ImportOptions::default() };
    let model = load_model(config.as_ref(), &options).expect("a config");
    let mut request = request(&model, load_cluster("dgx-a100:8").expect("a preset"));
    (request.degrees.pp, request.batch.num_microbatches, request.batch.global) = (Some(64), Some(512), Some(512));
    (request.schedule, request.degrees.virtual_stages, request.baselines) = (Some(Schedule::OneFOneB), Some(1), false);
    let plan = altiplano::plan(&request, &Silent).expect("it fits");
    assert_eq!((plan.stages.len(), plan.num_microbatches), (64, 512));
    check(&plan);
    let size = page_html(&plan).expect("a page").len();
    assert!(size < 5_000_000, "{size} bytes");
}

#[test]
fn a_file_that_cannot_be_written_is_one_error() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let (plan, page) = (path("plan.json"), path("page.html"));
    succeeds(&["plan", DEMO, "--cluster", "local:2", "-o", &plan, "--html", &page]);
    let written = std::fs::read_to_string(&page).expect("plan writes a page");
    assert!(written.starts_with("<!doctype html>"));
    let said = succeeds(&["inspect", &plan, "--html", &page]);
    assert!(said.starts_with(&page) && said.lines().count() == 1, "{said}");
    assert_eq!(std::fs::read_to_string(&page).expect("it is written over"), written);
    for file in [path("nowhere/page.html"), path("")] {
        let output = altiplano(&["inspect", &plan, "--html", &file]);
        assert_eq!(output.code, Some(2), "{}", output.stderr);
        assert!(output.stderr.contains(&file) && output.stdout.is_empty(), "{}", output.stderr);
    }
}

/// Every value of a proved plan has its steps, which go back to parameters, inputs, constants and other layers.
#[test]
fn values_of_a_proved_plan_have_steps() {
    let mut plan = planned("local:4", 2, 2, Schedule::OneFOneB, 1);
    let facts_of = |plan: &Plan| list(&told(&page_html(plan).expect("a page"))["layers"]["classes"]).to_vec();
    assert!(facts_of(&plan).iter().all(|class| list(&class["facts"]).is_empty()));
    let proved = altiplano::prove::prove(&plan).expect("programs").expect("a proof");
    plan.proof = Some(proved.certificate);
    let (mut values, mut parameters) = (0, 0);
    for class in facts_of(&plan) {
        let facts = list(&class["facts"]);
        for (at, fact) in facts.iter().enumerate() {
            assert!(list(&fact["from"]).iter().all(|from| index(from) < at), "{fact}");
            let of = fact["of"].as_str().expect("a name");
            let is_parameter = of.starts_with("parameter ");
            assert!(!is_parameter || fact["rule"] == "declared", "{fact}");
            parameters += usize::from(is_parameter);
        }
        for op in list(&class["ops"]) {
            let fact = &facts[index(&op["fact"])];
            let computed = fact["rule"] != "declared" && fact["rule"] != "another layer";
            assert!(!computed || fact["rule"] == "free dimensions" || !list(&fact["from"]).is_empty(), "{op} {fact}");
            values += 1;
        }
    }
    assert!(values > 20 && parameters > 10, "{values} values, {parameters} parameters");
}
