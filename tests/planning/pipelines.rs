//! Pipelines whose stages share devices, and those with separate weight gradients, from the command line: planned,
//! explained, run, and compared with one device.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::cost_models::Rooflines;
use altiplano::ir::graph::Node;
use altiplano::ir::op::Op;
use altiplano::ir::plan::{Placement, Plan, Schedule, Stage};
use altiplano::ir::recompute::{Recomputation, Recompute};
use altiplano::planner::lower::{TrainingGraphs, lower_deduped, lowered_node_by_node, repeated_layers};
use altiplano::planner::predict::predict;
use altiplano::planner::search::fixed_degrees::{Degrees, fixed};
use altiplano::planner::search::layout::Layout;
use altiplano::planner::{Silent, predict_plan, programs};
use altiplano::{ImportOptions, load_cluster, load_model, load_plan, plan, request};
use serde_json::Value;

/// A GPT of sixteen layers.
const GPT: &str =
    r#"{"model_type": "gpt2", "vocab_size": 8192, "n_positions": 512, "n_embd": 1024, "n_layer": 16, "n_head": 16}"#;

/// Eight layers with experts, whose routers each read a bias that is an input.
const BIASED: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1,
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "max_position_embeddings": 256, "routed_scaling_factor": 2.5, "norm_topk_prob": true, "scoring_func": "sigmoid"}"#;

/// The GPT's plan with a pipeline over four pairs of V100, each shared by `virtual_stages` stages.
fn pipeline(schedule: Option<Schedule>, virtual_stages: Option<u32>, num_microbatches: u32) -> Plan {
    let scratch = Scratch::new();
    let file = scratch.file("gpt.json", GPT);
    let import = ImportOptions { batch: Some(32), sequence: Some(512), ..ImportOptions::default() };
    let model = load_model(file.as_ref(), &import).expect("a model");
    let mut request = request(&model, load_cluster("p3.16xlarge:1").expect("a preset"));
    request.baselines = false;
    (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(2), Some(1), Some(4));
    (request.degrees.virtual_stages, request.batch.num_microbatches) = (virtual_stages, Some(num_microbatches));
    request.schedule = schedule;
    plan(&request, &Silent).expect("a plan")
}

/// Equal layers whose experts look rows up are lowered once, to the programs of lowering each of them. The routers of
/// DeepSeek-V3 read inputs of their own.
#[test]
fn layers_with_experts_are_lowered_once() {
    let scratch = Scratch::new();
    let mixtral = r#"{"model_type": "mixtral", "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 256}"#;
    let import = ImportOptions { batch: Some(32), sequence: Some(256), ..ImportOptions::default() };
    let load = |name: &str, config: &str| load_model(scratch.file(name, config).as_ref(), &import).expect("a model");
    for model in [load("experts.json", mixtral), load("biased.json", BIASED)] {
        for (tp, pp, recompute) in [(1, 1, Recompute::None), (2, 1, Recompute::Full), (1, 2, Recompute::None)] {
            let mut request = request(&model, load_cluster("dgx-a100:1").expect("a preset"));
            request.baselines = false;
            (request.degrees.tp, request.degrees.pp, request.recompute) = (Some(tp), Some(pp), Some(recompute));
            request.degrees.virtual_stages = Some(1);
            let plan = plan(&request, &Silent).expect("a plan");
            let (graphs, prices) = (TrainingGraphs::of(&plan).expect("a derivative"), Rooflines::of(&plan.cluster));
            let looks_up = |node: &Node| matches!(node.op, Op::Gather(_));
            let programs = programs(&plan).expect("programs");
            let bodies = programs.programs.iter().flat_map(|program| &program.bodies);
            assert!(bodies.flat_map(|body| &body.graph.nodes).filter(|node| looks_up(node)).count() >= 6);
            assert!(programs == lowered_node_by_node(&plan, &graphs, &prices), "tp {tp}, pp {pp}");
            let [forward, backward] = repeated_layers(&plan, &graphs, &prices);
            assert!(forward > 0 && backward > 0, "tp {tp}, pp {pp}: {forward}, {backward}");
        }
    }
}

/// Lanes between the first and the last are equal if their layers are, even if each layer reads an input of its own.
#[test]
fn lanes_whose_layers_have_inputs_of_their_own_are_lowered_once() {
    let scratch = Scratch::new();
    let import = ImportOptions { batch: Some(32), sequence: Some(256), ..ImportOptions::default() };
    let model = load_model(scratch.file("biased.json", BIASED).as_ref(), &import).expect("a model");
    assert!(model.graph.inputs().count() > 6);
    let mut request = request(&model, load_cluster("dgx-a100:1").expect("a preset"));
    request.baselines = false;
    (request.degrees.pp, request.degrees.virtual_stages, request.recompute) = (Some(4), Some(1), Some(Recompute::None));
    let plan = plan(&request, &Silent).expect("a plan");
    let (graphs, costs) = (TrainingGraphs::of(&plan).expect("a derivative"), Rooflines::of(&plan.cluster));
    let deduped = lower_deduped(&plan, &graphs, &costs, true);
    assert_eq!(deduped.same_as, [0, 1, 1, 3]);
    let (mut by_all, mut by_distinct) = (plan.clone(), plan.clone());
    predict(&mut by_all, &lower_deduped(&plan, &graphs, &costs, false), &costs);
    predict(&mut by_distinct, &deduped, &costs);
    assert_eq!(by_all.predicted, by_distinct.predicted);
}

/// Between two blocks of attention, a hybrid has several of a state-space model, each of which can begin a stage.
#[test]
fn hybrids_are_cut_between_all_blocks() {
    let scratch = Scratch::new();
    let hybrid = r#"{"model_type": "bamba", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 14,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [4, 9], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1}"#;
    let import = ImportOptions { batch: Some(32), sequence: Some(256), ..ImportOptions::default() };
    let model = load_model(scratch.file("hybrid.json", hybrid).as_ref(), &import).expect("a model");
    let mut request = request(&model, load_cluster("dgx-a100:1").expect("a preset"));
    request.baselines = false;
    request.degrees.pp = Some(8);
    let plan = plan(&request, &Silent).expect("a plan");
    assert!((14..=16).contains(&(plan.layers.len() - 1)), "{:?}", plan.layers);
    assert_eq!(plan.stages.len() % 8, 0);
}

/// Frameworks recompute blocks but no head: its backward pass follows at once, so recomputation would only cost time.
#[test]
fn plans_of_given_degrees_compute_no_head_twice() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt.json", GPT);
    let import = ImportOptions { batch: Some(32), sequence: Some(512), ..ImportOptions::default() };
    let model = load_model(file.as_ref(), &import).expect("a model");
    for (schedule, keeps) in [(Schedule::OneFOneB, true), (Schedule::GPipe, false)] {
        let mut request = request(&model, load_cluster("p3.16xlarge:1").expect("a preset"));
        request.schedule = Some(schedule);
        let degrees = Degrees {
            dp: 1,
            tp: 2,
            cp: 1,
            stages: 4,
            virtual_stages: 1,
            num_microbatches: 4,
            zero: 0,
            recompute: Recompute::Full,
            layout: Layout::Even,
            experts: 1,
            groups: 1,
            sequence: false,
        };
        let costs = Rooflines::of(&request.cluster);
        let plan = predict_plan(fixed(&request, &degrees, &costs).expect("a plan"), &costs).expect("a prediction");
        let levels = |stage: &Stage| (0..stage.layers.len()).map(|l| stage.recompute.of(l)).collect::<Vec<_>>();
        let last = levels(&plan.stages[3]);
        assert!(plan.stages[..3].iter().all(|stage| levels(stage).iter().all(|&l| l == Recompute::Full)));
        let (head, blocks) = last.split_last().expect("layers");
        assert!(blocks.iter().all(|&l| l == Recompute::Full));
        assert_eq!(*head, if keeps { Recompute::None } else { Recompute::Full });
        let mut twice = plan.clone();
        twice.stages.iter_mut().for_each(|stage| stage.recompute = Recomputation::Alike(Recompute::Full));
        let twice = predict_plan(twice, &costs).expect("a prediction");
        assert_eq!(plan.predicted.step_time_s < twice.predicted.step_time_s, keeps);
    }
}

/// With few microbatches most of a step is bubble, and sharing devices reduces it. The search finds that by itself.
#[test]
fn the_search_shares_devices_where_the_bubble_is_large() {
    let plain = Some(Schedule::OneFOneB);
    let (alone, free) = (pipeline(plain, Some(1), 4), pipeline(plain, None, 4));
    assert_eq!((alone.virtual_stages, alone.stages.len()), (1, 4));
    assert!(free.virtual_stages > 1 && free.num_lanes() == 4, "{} of {}", free.virtual_stages, free.stages.len());
    let bubble = |plan: &Plan| plan.stages.iter().map(|s| s.predicted.bubble_s).fold(0.0, f64::max);
    let gained = alone.predicted.step_time_s - free.predicted.step_time_s;
    assert!(gained > 0.0 && bubble(&free) < bubble(&alone), "{gained} {} {}", bubble(&free), bubble(&alone));
    // With equal stages, the bubble is that of one stage per lane divided by their number (Narayanan et al. 2021,
    // section 2.2.2). Communication between more stages, and the layers at the ends, add to it.
    let ratio = bubble(&free) / bubble(&alone);
    assert!(ratio < 1.0 / f64::from(free.virtual_stages) + 0.35, "{ratio} with {}", free.virtual_stages);
}

/// Separate weight gradients reduce the bubble without more stages. The free search gives the best plan of all.
#[test]
fn the_search_runs_gradients_of_weights_apart_where_the_bubble_is_large() {
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let plain = pipeline(Some(Schedule::OneFOneB), Some(1), 4);
    let apart = pipeline(Some(Schedule::ZbH1), None, 4);
    let chosen = pipeline(None, Some(1), 4);
    assert_eq!((apart.schedule, apart.virtual_stages, apart.stages.len()), (Schedule::ZbH1, 1, 4));
    assert_eq!(chosen.schedule, Schedule::ZbH1);
    assert!(step_s(&apart) < step_s(&plain) && step_s(&chosen) < step_s(&plain));
    // The fullest stage holds hardly more than otherwise, except for the data between the two parts of a backward pass.
    let fullest = |plan: &Plan| plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0) as f64;
    assert!(fullest(&apart) < 1.2 * fullest(&plain), "{} {}", fullest(&apart), fullest(&plain));
    let free = pipeline(None, None, 4);
    assert!(step_s(&free) <= step_s(&chosen) * 1.02, "{} {}", step_s(&free), step_s(&chosen));
}

#[test]
fn gradients_of_weights_apart_give_the_same_as_one_device() {
    let said = succeeds(&["verify", DEMO, "--dp", "2", "--pp", "2", "--num-microbatches", "4", "--schedule", "zb-h1"]);
    assert!(said.contains(", zb-h1") && said.contains("the numbers agree"), "{said}");
    let output = altiplano(&["plan", DEMO, "--pp", "2", "--schedule", "zb-h1", "--virtual-stages", "2"]);
    assert!(output.code == Some(2) && output.stderr.contains("1f1b, zb-v and dualpipe-v only"), "{}", output.stderr);
}

/// Lanes whose two stages form a V have no bubble if all calls take equally long, and hold what a first stage holds under
/// `1f1b`. The search finds them where few microbatches make a long bubble.
#[test]
fn stages_in_a_v_wait_least_and_hold_no_more_than_a_first_stage() {
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let bubble = |plan: &Plan| plan.stages.iter().map(|s| s.predicted.bubble_s).fold(0.0, f64::max);
    let fullest = |plan: &Plan| plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0) as f64;
    let plain = pipeline(Some(Schedule::OneFOneB), Some(1), 8);
    let folded = pipeline(Some(Schedule::ZbV), None, 8);
    assert_eq!((folded.num_lanes(), folded.virtual_stages, folded.placement), (4, 2, Placement::V));
    assert!(step_s(&folded) < step_s(&plain) && bubble(&folded) < 0.5 * bubble(&plain));
    assert!(fullest(&folded) < 1.3 * fullest(&plain), "{} {}", fullest(&folded), fullest(&plain));
    let free = pipeline(None, None, 8);
    assert!(step_s(&free) <= step_s(&folded) * 1.02, "{} {}", step_s(&free), step_s(&folded));
}

#[test]
fn stages_in_a_v_are_said_and_give_the_same_as_one_device() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let asked = ["--dp", "2", "--pp", "2", "--schedule", "zb-v", "--num-microbatches", "4"];
    let report = succeeds(&[&["plan", DEMO, "-o", &file], &asked[..]].concat());
    assert!(report.contains("zb-v over 4 stages, 2 on the same devices (in a V)"), "{report}");
    assert!(report.contains("stage0, stage3"), "{report}");
    assert!(succeeds(&["verify", &file]).contains("the numbers agree"));
    let plan = Plan::from_json(&std::fs::read_to_string(&file).expect("the file")).expect("the plan");
    let refusal = |change: fn(&mut Plan)| {
        let mut wrong = plan.clone();
        change(&mut wrong);
        Plan::from_json(&wrong.to_json()).expect_err("a refusal").to_string()
    };
    assert!(refusal(|plan| plan.placement = Placement::Loop).contains("with the placement v"));
    assert!(refusal(|plan| plan.virtual_stages = 4).contains("must be 2 under the schedules zb-v"));
    assert!(refusal(|plan| plan.execution.pairs_passes = true).contains("needs the schedule dualpipe-v"));
    // Whole backward passes in turn with forward passes need a microbatch for each stage.
    let asked = ["--dp", "2", "--pp", "2", "--schedule", "dualpipe-v", "--num-microbatches"];
    assert!(succeeds(&[&["verify", DEMO], &asked[..], &["4"]].concat()).contains("the numbers agree"));
    for few in [
        &["--pp", "2", "--num-microbatches", "2"][..],
        &["--num-microbatches", "2"],
        &["--pp", "2", "--microbatch", "8"],
    ] {
        let output = altiplano(&[&["plan", DEMO, "--schedule", "dualpipe-v"], few].concat());
        assert!(output.code == Some(2) && output.stderr.contains("at least the number of stages"), "{}", output.stderr);
    }
    // The search finds a number that is enough.
    assert!(succeeds(&["plan", DEMO, "--cluster", "local:4", "--schedule", "dualpipe-v"]).contains("dualpipe-v over"));
    assert!(refusal(|plan| plan.schedule = Schedule::OneFOneB).contains("must be loop"));
    for alone in [&["--cluster", "local:1"][..], &["--cluster", "local:4", "--pp", "1"]] {
        let output = altiplano(&[&["plan", DEMO, "--schedule", "zb-v"], alone].concat());
        assert!(output.code == Some(2) && output.stderr.contains("--pp: 1 must be 2 or more"), "{}", output.stderr);
    }
}

#[test]
fn a_number_of_stages_that_is_asked_for_is_what_there_is() {
    for shared in [2, 3] {
        let plan = pipeline(None, Some(shared), 8);
        assert_eq!((plan.virtual_stages, plan.stages.len() as u32), (shared, 4 * shared));
        assert_eq!(plan.num_devices(), 8);
    }
}

#[test]
fn stages_that_share_devices_are_said_run_and_the_same_as_one_device() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    let asked = ["--dp", "2", "--pp", "2", "--schedule", "1f1b", "--virtual-stages", "2", "--num-microbatches", "4"];
    let mut arguments = vec!["plan", DEMO, "-o", &file];
    arguments.extend(asked);
    let report = succeeds(&arguments);
    assert!(report.contains("1f1b over 4 stages, 2 on the same devices"), "{report}");
    assert!(report.contains("stage0, stage2"), "{report}");
    let said = succeeds(&["inspect", &file, "--programs"]);
    for body in ["stage0 forward", "stage3 backward"] {
        assert!(said.contains(&format!("run {body}")), "{body}");
    }
    assert!(succeeds(&["verify", &file]).contains("the numbers agree"));
    let run = succeeds(&["run", &file, "--steps", "2"]);
    let table = run.lines().skip_while(|l| !l.starts_with("peak memory")).skip(2);
    for line in table.take_while(|line| !line.starts_with("seconds of")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[3..5], words[5..7], "held is predicted: {line}");
    }

    let trace = scratch.path("trace.json").display().to_string();
    let said: Value = serde_json::from_str(&succeeds(&["simulate", &file, "--json", "--trace", &trace])).expect("JSON");
    let plan = load_plan(file.as_ref()).expect("the plan");
    assert_eq!(said["virtual_stages"], 2);
    assert_eq!(said["step_s"], plan.predicted.step_time_s);
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(&trace).expect("a trace")).expect("a trace is JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    // Calls of stages that share devices are on one track and never overlap.
    for lane in 0..2 {
        let calls = events.iter().filter(|e| e["ph"] == "X" && e["pid"] == lane && e["tid"] == 0);
        let span = |e: &Value| (e["ts"].as_f64().expect("a time"), e["dur"].as_f64().expect("a time"));
        let mut spans: Vec<(f64, f64)> = calls.map(span).collect();
        assert_eq!(
            spans.len(),
            2 * (2 * 4 + 1),
            "forward and backward of four microbatches, and an update, of two stages"
        );
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0 + 1e-6), "{spans:?}");
    }
}

#[test]
fn plans_with_shared_devices_are_checked() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&[
        "plan",
        DEMO,
        "--pp",
        "2",
        "--dp",
        "2",
        "--schedule",
        "1f1b",
        "--virtual-stages",
        "2",
        "--num-microbatches",
        "4",
        "-o",
        &file,
    ]);
    let text = std::fs::read_to_string(&file).expect("the plan");
    let refused = |change: &dyn Fn(&mut Value), place: &str| {
        let mut plan: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut plan);
        let wrong = scratch.file("wrong.json", plan.to_string());
        let output = altiplano(&["inspect", &wrong]);
        assert!(output.code == Some(2) && output.stderr.contains(place), "{place}\n{}", output.stderr);
    };
    refused(&|plan| plan["virtual_stages"] = 0.into(), "virtual_stages");
    refused(&|plan| plan["virtual_stages"] = 3.into(), "virtual_stages");
    refused(&|plan| plan["virtual_stages"] = 1.into(), "stages[2].devices");
    refused(&|plan| plan["stages"][2]["devices"] = vec![2, 3].into(), "stages[2].devices");
    refused(&|plan| plan["stages"][3]["submesh"] = vec![2, 1].into(), "stages[3].devices");

    for (option, value, problem) in [
        ("--virtual-stages", "0", "at least 1"),
        ("--virtual-stages", "9", "too few"),
        ("--virtual-stages", "x", "invalid"),
    ] {
        let output = altiplano(&["plan", DEMO, "--pp", "2", option, value]);
        assert!(output.code == Some(2) && output.stderr.contains(problem), "{value}\n{}", output.stderr);
    }
}
