//! Gates of experts weigh the factor of the last product where the software does so: the loss is the same, and less is kept.

use crate::common::{Scratch, succeeds};
use crate::modules::{DEEPSEEK, LLAMA, MIXTRAL, model};
use altiplano::ir::dtype::DType;
use altiplano::ir::graph::Graph;
use altiplano::ir::plan::Target;
use altiplano::planner::Request;
use altiplano::planner::features::scaled_products::{with_scaled_factors, with_scaled_results};
use altiplano::runtime::data::synthetic;
use altiplano::runtime::evaluate;
use altiplano::{load_cluster, request};

/// Results of experts with a bias are weighed themselves.
const GPT_OSS: &str = r#"{"model_type": "gpt_oss", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3,
    "num_local_experts": 4, "num_experts_per_tok": 2}"#;
/// A model's graph as it is imported, and as a target runs it.
fn graphs(config: &str, precision: Option<DType>, target: Target) -> [Graph; 2] {
    requests(config, precision, target).map(|request| Graph::clone(&request.graph))
}

fn requests(config: &str, precision: Option<DType>, target: Target) -> [Request; 2] {
    let model = model(config, precision);
    let mut request = request(&model, load_cluster("dgx-h100:1").expect("a cluster"));
    request.target = target;
    let run = with_scaled_factors(&request).into_owned();
    assert_eq!(run.graph.verify(), []);
    [request, run]
}

fn loss(graph: &Graph) -> f64 {
    let leaves = graph.inputs().chain(graph.parameters());
    let leaves = leaves.map(|(v, name)| (name.to_string(), synthetic(name, graph.ty(v), 50, 1))).collect();
    evaluate(graph, &leaves).expect("a loss")[0].to_f64()[0]
}

#[test]
fn losses_are_the_same_with_gates_at_the_factor() {
    for (config, moves) in [(MIXTRAL, true), (DEEPSEEK, true), (GPT_OSS, false), (LLAMA, false)] {
        let requests = requests(config, None, Target::Megatron);
        assert_eq!(requests[1].execution.scales_factors, moves, "{config}");
        let [imported, run] = requests.map(|request| Graph::clone(&request.graph));
        assert_eq!(imported != run, moves, "{config}");
        let [before, after] = [loss(&imported), loss(&run)];
        assert!((before - after).abs() <= 1e-5 * before.abs(), "{before} {after}");
        // Where gates travel is not worth it for so few tokens, and other software computes what the model says.
        for target in [Target::Altiplano, Target::Fsdp, Target::Torchtitan] {
            let [imported, run] = graphs(config, None, target);
            assert_eq!(imported, run);
        }
    }
}

/// Software that scales results runs the same graph whether it comes from the model or from a plan with scaled factors.
#[test]
fn scaled_factors_are_restored_for_software_that_scales_results() {
    for (config, precision) in [(MIXTRAL, None), (DEEPSEEK, None), (MIXTRAL, Some(DType::F8E4M3FN)), (GPT_OSS, None)] {
        let [of_model, of_megatron] = requests(config, precision, Target::Megatron);
        let [ours, theirs] = [&of_model, &of_megatron].map(with_scaled_results);
        assert_eq!(ours.graph.verify(), []);
        assert_eq!(ours.graph, theirs.graph, "{config}");
        assert_eq!(ours.graph.len(), of_model.graph.len());
        assert_eq!(ours.graph != of_megatron.graph, of_megatron.execution.scales_factors, "{config}");
        assert!(!ours.execution.scales_factors && !theirs.execution.scales_factors);
        let [before, after] = [loss(&of_model.graph), loss(&ours.graph)];
        assert!((before - after).abs() <= 1e-6 * before.abs(), "{before} {after}");
    }
}

/// Factors in 8 bits are scaled before they are narrowed.
#[test]
fn factors_in_8_bits_are_scaled_in_16() {
    let [imported, run] = graphs(MIXTRAL, Some(DType::F8E4M3FN), Target::Megatron);
    let narrowed = |graph: &Graph| graph.nodes.iter().filter(|n| n.ty.dtype == DType::F8E4M3FN).count();
    assert!(imported != run && narrowed(&imported) == narrowed(&run));
    let [before, after] = [loss(&imported), loss(&run)];
    assert!((before - after).abs() <= 0.02 * before.abs(), "{before} {after}");
}

#[test]
fn plans_with_gates_at_the_factor_train_as_one_device_does() {
    let scratch = Scratch::new();
    for config in [MIXTRAL, DEEPSEEK] {
        let model = scratch.file("config.json", config.as_bytes());
        let plan = scratch.path("plan.json").display().to_string();
        let words = ["--seq", "8", "--global-batch", "8", "--cluster", "local:4", "--target", "megatron"];
        for degrees in [&["--dp", "4", "--ep", "4"][..], &["--dp", "2", "--tp", "2"], &["--pp", "2", "--dp", "2"]] {
            succeeds(&[&["plan", &model, "-o", &plan][..], &words, degrees].concat());
            assert!(altiplano::load_plan(plan.as_ref()).expect("a plan").execution.scales_factors, "{degrees:?}");
            let said = succeeds(&["verify", &plan]);
            assert!(said.contains("the numbers agree"), "{said}");
        }
    }
}
