//! Questions about a plan from the command line: why a parameter, an op or a stage is as it is, why not another plan,
//! and how two plans differ. The texts are goldens. Invariants of any such text are tested on its numbers.

use crate::common::{DEMO, Scratch, altiplano, golden, succeeds};
use altiplano::cost_models::{Rooflines, preset};
use altiplano::planner::explain::account::{Part, Work, accounts, of_lanes};
use altiplano::planner::{Request, Silent};
use altiplano::{ImportOptions, Look, answer, load_model, load_plan, plan, report, report_as, request};

/// A plan of two stages with two workers each, and one of a single stage.
const PIPELINE: &[&str] = &["--dp", "2", "--pp", "2"];
const TENSOR: &[&str] = &["--dp", "2", "--tp", "2", "--global-batch", "8"];

fn planned(scratch: &Scratch, name: &str, options: &[&str]) -> String {
    let file = scratch.path(name).display().to_string();
    succeeds(&[&["plan", DEMO, "-o", &file], options].concat());
    file
}

#[test]
fn why_a_parameter_is_kept_as_it_is() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    let text = succeeds(&["why", &plan, "--param", "params['h*']['fc']['w']"]);
    golden("why-param.txt", &text);
    // The plan's own layout is among the alternatives, and its cost is that of the plan.
    let taken: Vec<&str> = text.lines().filter(|line| line.contains("<- taken")).collect();
    assert!(!taken.is_empty() && taken.iter().all(|line| line.contains("the same")), "{text}");
    // The memory in the text is that in the plan.
    let json: serde_json::Value = serde_json::from_str(&succeeds(&["inspect", &plan, "--json"])).expect("JSON");
    let peak = altiplano::units::bytes(json["stages"][0]["predicted"]["peak_bytes"].as_u64().expect("bytes"));
    assert!(text.contains(&format!("a device holds {peak} of 6.44 GB")), "{text}");
    let layouts = text.lines().filter(|line| line.trim_start().starts_with('[')).count();
    assert!(layouts > taken.len(), "no other layout is priced:\n{text}");
}

#[test]
fn why_an_op_is_split_as_it_is() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", TENSOR);
    let text = succeeds(&["why", &plan, "--op", "attention"]);
    golden("why-op.txt", &text);
    // Names, numbers and kinds select the same op.
    let number = succeeds(&["show", DEMO]);
    let line = number.lines().find(|l| l.contains(" = attention")).expect("the model has attention");
    let id = line.split_whitespace().next().expect("a number").trim_end_matches(':');
    assert_eq!(succeeds(&["why", &plan, "--op", id]).lines().next(), text.lines().next());
    // With a layer, the op of that layer is selected.
    let of_layer = succeeds(&["why", &plan, "--op", "attention", "--layer", "3"]);
    assert!(of_layer.contains("h2/attention") && !of_layer.contains("h0/attention"), "{of_layer}");
}

#[test]
fn why_a_stage_is_what_it_is() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    for stage in ["0", "1"] {
        golden(&format!("why-stage{stage}.txt"), &succeeds(&["why", &plan, "--stage", stage]));
    }
}

#[test]
fn what_is_not_there_is_said_with_what_is_near() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    let cases = [
        (["--param", "wte"], "similar names are 'params['wte']'"),
        (["--op", "mlp/dot_genral"], "mlp/dot_general'"),
        (["--stage", "2"], "2 is not a stage of the plan, which has 2"),
    ];
    for (question, expected) in cases {
        let refused = altiplano(&[&["why", &plan][..], &question].concat());
        assert_eq!(refused.code, Some(2), "{question:?}: {}", refused.stderr);
        assert!(refused.stderr.contains(expected), "{question:?}: {}", refused.stderr);
    }
    assert_eq!(altiplano(&["why", &plan]).code, Some(2));
    let refused = altiplano(&["why", &plan, "--op", "attention", "--layer", "6"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("6 is not a layer of the plan, which has 6"), "{}", refused.stderr);
}

#[test]
fn why_not_prices_what_is_asked_for() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    let asked = scratch.path("asked.json").display().to_string();
    let text = succeeds(&["why-not", &plan, "--tp", "2", "--pp", "1", "-o", &asked]);
    golden("why-not.txt", &text);
    // It is the plan that the search finds for the model with these options, and both comparisons agree.
    let planned = planned(&scratch, "tensor.json", TENSOR);
    let step = |file: &str| -> f64 {
        let json: serde_json::Value = serde_json::from_str(&succeeds(&["inspect", file, "--json"])).expect("JSON");
        json["predicted"]["step_time_s"].as_f64().expect("seconds")
    };
    assert_eq!(step(&asked), step(&planned));
    let rows = |text: &str| text.lines().filter(|l| l.contains("matmuls") || l.contains("in all")).count();
    assert_eq!(rows(&text), rows(&succeeds(&["compare", &plan, &asked])));
}

#[test]
fn what_cannot_be_names_the_conflict_and_what_can() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    let refused = altiplano(&["why-not", &plan, "--tp", "3"]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    for part in ["--tp 3", "changes with which there is a plan", "--tp 2: at most", "--tp left free: at most"] {
        assert!(refused.stderr.contains(part), "'{part}': {}", refused.stderr);
    }
    let nothing = altiplano(&["why-not", &plan]);
    assert_eq!(nothing.code, Some(2));
    assert!(nothing.stderr.contains("such as --tp 8"), "{}", nothing.stderr);
}

#[test]
fn two_plans_are_compared_item_by_item() {
    let scratch = Scratch::new();
    let (one, other) = (planned(&scratch, "one.json", PIPELINE), planned(&scratch, "other.json", TENSOR));
    let text = succeeds(&["compare", &one, &other]);
    golden("compare.txt", &text);
    let back = succeeds(&["compare", &other, &one]);
    let sums = |text: &str| text.lines().filter(|l| l.contains("the step ") || l.contains("in all ")).count();
    assert_eq!((sums(&text), sums(&back)), (2, 2));

    let same = succeeds(&["compare", &one, &one]);
    assert!(!same.contains("Layouts that differ") && !same.contains("\nStages"), "{same}");
    assert!(same.contains("as before        52 parameters"), "{same}");
    let larger = planned(&scratch, "larger.json", &["--dp", "4", "--global-batch", "64"]);
    let text = succeeds(&["compare", &one, &larger]);
    assert!(
        text.starts_with("They are not for the same")
            && text.contains("global batch: 8 and 64")
            && text.contains("as before"),
        "{text}"
    );
}

#[test]
fn the_report_draws_the_step_and_what_is_held() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    let text = succeeds(&["inspect", &plan]);
    golden("inspect.txt", &text);
    let lines: Vec<&str> = text.lines().skip_while(|l| !l.starts_with("The step, from left")).skip(1).take(2).collect();
    for (stage, line) in lines.iter().enumerate() {
        let drawn = line.trim_start().strip_prefix(&format!("stage{stage}")).expect("a line for each stage").trim();
        assert_eq!(drawn.len(), 80, "{line}");
        assert!(drawn.chars().all(|c| "FBU.".contains(c)) && line.len() <= 100, "{line}");
    }
    // The last stage waits for the first microbatch, the first for its gradients.
    assert!(lines[0].contains("FF.") && lines[1].contains("  ...."), "{lines:?}");
    golden("inspect-dot.txt", &succeeds(&["inspect", &plan, "--dot"]));
    let fuller = planned(
        &scratch,
        "fuller.json",
        &["--cluster", "1xV100-16", "--global-batch", "2048", "--num-microbatches", "1"],
    );
    let text = succeeds(&["inspect", &fuller]);
    assert!(text.lines().any(|l| l.contains("aaaa") && l.contains('|')), "{text}");
}

#[test]
fn a_report_is_as_wide_as_the_terminal() {
    let scratch = Scratch::new();
    let plan = load_plan(planned(&scratch, "plan.json", PIPELINE).as_ref()).expect("a plan");
    let narrow = Look { width: Some(80), colour: false };
    let text = report_as(&plan, narrow);
    let wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > 80).collect();
    assert!(wide.is_empty(), "{wide:?}");
    // A screen of 24 lines begins with the answer, its intended user, and the question.
    let screen: Vec<&str> = text.lines().take(24).collect();
    for part in ["DP 2", "PP 2", "for Altiplano's own runtime", "gpt-small-demo on local:4"] {
        assert!(screen.iter().take(10).any(|line| line.contains(part)), "'{part}': {screen:?}");
    }
    let plain = report(&plan);
    assert!(plain.starts_with(&answer(&plan)), "{plain}");
    let coloured = report_as(&plan, Look { width: None, colour: true });
    let escapes = ["\u{1b}[0m", "\u{1b}[1m", "\u{1b}[36m"];
    assert!(escapes.iter().all(|escape| coloured.contains(escape)));
    assert_eq!(escapes.iter().fold(coloured, |text, escape| text.replace(escape, "")), plain);
}

#[test]
fn stages_that_differ_are_said_to() {
    let scratch = Scratch::new();
    let mut plan = load_plan(planned(&scratch, "plan.json", PIPELINE).as_ref()).expect("a plan");
    // Parameters are shared among replicas as their optimizer state is.
    for storage in plan.stages[1].parameters.values_mut() {
        storage.parameter = storage.state.clone();
    }
    let text = answer(&plan);
    let expected = "PP 2, stages that differ: stage0 DP 2 (ZeRO-1) x TP 1 x CP 1 x EP 1; stage1 DP 2 (FSDP) x TP 1 x CP 1 x EP 1, micro-batch 1 a worker, ";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn simulations_say_every_stage_and_what_a_tensor_of_a_kind_costs() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    golden("simulate.txt", &succeeds(&["simulate", &plan]));
    golden("simulate-memory.txt", &succeeds(&["simulate", &plan, "--memory"]));
}

/// Measured values differ from run to run; the golden has the rest of a run's output.
#[test]
fn a_run_ends_with_what_was_predicted_beside_what_was_measured() {
    let scratch = Scratch::new();
    let plan = planned(&scratch, "plan.json", PIPELINE);
    let text = succeeds(&["run", &plan, "--steps", "1"]);
    let (head, table) = text.split_at(text.find("seconds of the last step").expect("the table"));
    let head: Vec<&str> = head.lines().filter(|line| !line.starts_with("step ")).collect();
    let seconds = |cell: &str| -> f64 {
        let (number, unit) = cell.split_once(' ').unwrap_or((cell, "s"));
        let of = [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)].into_iter().find(|(u, _)| *u == unit);
        number.parse::<f64>().unwrap_or(0.0) * of.map_or(0.0, |(_, s)| s)
    };
    // Rows are ordered by measured time, and those with a negligible prediction appear if they were measured.
    let mut rows: Vec<String> = Vec::new();
    for line in table.lines().skip(2) {
        let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        assert!((3..=4).contains(&cells.len()), "{line}");
        if seconds(cells[1]) > 1e-4 {
            rows.push(format!("{} | {}", cells[0], cells[1]));
        }
    }
    rows.sort();
    golden("run-measured.txt", &[head.join("\n"), rows.join("\n")].join("\n"));
}

/// Two layers without biases.
const MLP: &str = r#"module @mlp {
  func.func public @main(%arg0: tensor<8x16xf32> loc("params['w1']"), %arg1: tensor<16x4xf32> loc("params['w2']"), %arg2: tensor<4x8xf32> loc("x")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.dot_general %arg2, %arg0, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x16xf32>) -> tensor<4x16xf32>
    %1 = stablehlo.tanh %0 : tensor<4x16xf32>
    %2 = stablehlo.dot_general %1, %arg1, contracting_dims = [1] x [0] : (tensor<4x16xf32>, tensor<16x4xf32>) -> tensor<4x4xf32>
    %3 = stablehlo.multiply %2, %2 : tensor<4x4xf32>
    %4 = stablehlo.reduce(%3 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<4x4xf32>, tensor<f32>) -> tensor<f32>
    return %4 : tensor<f32>
  }
}
"#;

#[test]
fn programs_kernels_tapes_and_frontiers_are_printed_alike_each_time() {
    let scratch = Scratch::new();
    let model = scratch.file("mlp.mlir", MLP);
    let plan = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", &model, "--cluster", "2xA100-80", "--dp", "2", "-o", &plan]);
    golden("inspect-programs.txt", &succeeds(&["inspect", &plan, "--programs"]));
    golden("inspect-tape.txt", &succeeds(&["inspect", &plan, "--programs", "--tape", "1"]));
    // The text before the kernels is the same for all plans.
    let kernels = succeeds(&["inspect", &plan, "--programs", "--kernels"]);
    let first = kernels.find("\n// stage").expect("kernels with the bodies that launch them");
    golden("inspect-kernels.txt", &kernels[first..]);
    golden("frontier.txt", &succeeds(&["plan", DEMO, "--cluster", "p3.16xlarge:1", "--frontier"]));
}

#[test]
fn advice_plans_for_what_it_advises() {
    let scratch = Scratch::new();
    let file = planned(&scratch, "plan.json", PIPELINE);
    let text = succeeds(&["advise", &file, "--noise-scale", "16", "--within", "1000"]);
    golden("advise.txt", &text);
    // The table's row for a larger batch equals the result of planning for it.
    let row = text.lines().find(|l| l.trim_start().starts_with("batch x2")).expect("a row");
    let planned = succeeds(&["plan", DEMO, "--global-batch", "16"]);
    let chosen = planned.lines().find(|l| l.trim_start().starts_with("chosen")).expect("the chosen plan");
    let word = |line: &str, n: usize| line.split_whitespace().nth(n).map(str::to_string);
    assert_eq!(word(row, 2), word(chosen, 1), "{row}\n{chosen}");
    for wrong in ["0", "-3", "many"] {
        assert_eq!(altiplano(&["advise", &file, &format!("--noise-scale={wrong}")]).code, Some(2), "{wrong}");
    }
}

#[test]
fn shells_complete_and_manuals_say_every_command() {
    let scratch = Scratch::new();
    let folder = scratch.path("man");
    succeeds(&["man", "-o", &folder.display().to_string()]);
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let text = succeeds(&["completions", shell]);
        for command in ["plan", "why-not", "simulate"] {
            assert!(text.contains(command), "{shell}: {command}");
            let page = std::fs::read_to_string(folder.join(format!("altiplano-{command}.1"))).expect("a page");
            assert!(page.contains(".SH SYNOPSIS"), "{command}");
        }
    }
}

#[test]
fn accounts_are_what_is_predicted_taken_apart() {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("the model");
    let cases: [(&str, fn(&mut Request)); 4] = [
        ("local:4", |r| (r.degrees.dp, r.degrees.pp) = (Some(2), Some(2))),
        ("p3.16xlarge:1", |r| (r.degrees.dp, r.degrees.tp, r.degrees.zero) = (Some(4), Some(2), Some(3))),
        ("p3.16xlarge:2", |r| {
            (r.degrees.pp, r.degrees.virtual_stages, r.batch.num_microbatches) = (Some(2), Some(2), Some(8))
        }),
        ("dgx-a100:2", |r| r.target = altiplano::ir::plan::Target::Megatron),
    ];
    for (cluster, fix) in cases {
        let mut request = request(&model, preset(cluster).expect("a cluster"));
        request.batch.global = Some(64);
        request.baselines = false;
        fix(&mut request);
        let plan = plan(&request, &Silent).expect("a plan");
        let accounts = accounts(&plan, &Rooflines::of(&plan.cluster)).expect("programs");
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * plan.predicted.step_time_s;
        for (account, stage) in accounts.iter().zip(&plan.stages) {
            let p = &stage.predicted;
            let parts = Part::ALL.map(|part| account.part_s(part));
            // Transfers count in full there, and here without the part that overlaps with computing.
            let overlapping_s = account.0.get(&Work::Overlapping).copied().unwrap_or(0.0);
            let predicted = [p.compute_s, p.communication_s + overlapping_s, p.bubble_s];
            assert!(parts.iter().all(|&part_s| part_s > -1e-12), "{cluster}: {parts:?}");
            assert!(parts.into_iter().zip(predicted).all(|(a, b)| near(a, b)), "{cluster}: {parts:?} {predicted:?}");
        }
        for lane in of_lanes(&plan, &accounts) {
            assert!(near(lane.sum_s(), plan.predicted.step_time_s), "{cluster}: {lane:?}");
        }
    }
}
