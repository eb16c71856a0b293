//! Models whose sizes devices do not divide: sizes are padded if that pays, and results, checkpoints and reports are
//! those of the original model.

use crate::common::{Scratch, altiplano, succeeds};
use altiplano::ir::plan::Plan;
use altiplano::training::checkpoint::{for_each_tensor, newest};
use std::collections::BTreeMap;

/// 5 heads, 290 hidden units and 257 words.
const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 70, "n_head": 5, "n_layer": 2, "n_positions": 16, "vocab_size": 257,
    "n_inner": 290}"#;
/// Grouped heads, and an untied output matrix.
const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 60, "num_attention_heads": 15, "num_key_value_heads": 5,
    "num_hidden_layers": 2, "intermediate_size": 101, "vocab_size": 509, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": false}"#;
const BERT: &str = r#"{"model_type": "bert", "hidden_size": 66, "num_attention_heads": 11, "num_hidden_layers": 2,
    "intermediate_size": 131, "vocab_size": 1009, "max_position_embeddings": 16, "type_vocab_size": 2, "hidden_act": "gelu"}"#;

fn planned(config: &str, words: &str) -> Plan {
    let words = ["plan", config, "--json", "--global-batch", "4"].into_iter().chain(words.split_whitespace());
    Plan::from_json(&succeeds(&words.collect::<Vec<_>>())).expect("a plan")
}

/// The shape of each padded parameter.
fn larger(plan: &Plan) -> BTreeMap<String, Vec<u64>> {
    let parameters = plan.padding.iter().flat_map(|padding| &padding.parameters);
    parameters.map(|(name, extents)| (name.clone(), extents.padded_shape())).collect()
}

#[test]
fn what_is_computed_is_the_model_as_it_is() {
    let scratch = Scratch::new();
    for (name, config) in [("gpt2.json", GPT2), ("llama.json", LLAMA), ("bert.json", BERT)] {
        let config = scratch.file(name, config);
        for words in ["--cluster local:3 --tp 3 --pp 1", "--cluster local:4 --dp 2 --tp 2 --pp 1"] {
            let plan = planned(&config, words);
            assert!(!larger(&plan).is_empty(), "{name} {words}: {:?}", larger(&plan));
            let file = scratch.file("plan.json", plan.to_json());
            // One device gets the model without padding.
            let said = succeeds(&["verify", &file]);
            assert!(said.contains("the numbers agree"), "{name} {words}: {said}");
        }
    }
}

#[test]
fn sizes_grow_to_what_devices_divide() {
    let scratch = Scratch::new();
    let config = scratch.file("gpt2.json", GPT2);
    let plan = planned(&config, "--cluster local:3 --tp 3 --pp 1");
    let larger = larger(&plan);
    // 5 heads of 14 become 6, in each of the three parts of the fused projection; 257 words become 258; 290 units
    // become 291.
    assert_eq!(larger["transformer.wte.weight"], [258, 70]);
    assert_eq!(larger["transformer.h.1.attn.c_attn.weight"], [70, 252]);
    assert_eq!(larger["transformer.h.1.attn.c_proj.weight"], [84, 70]);
    assert_eq!(larger["transformer.h.1.mlp.c_fc.bias"], [291]);
    assert!(!larger.contains_key("transformer.h.1.ln_1.weight"));
    let said = succeeds(&["plan", &config, "--global-batch", "4", "--cluster", "local:3", "--tp", "3", "--pp", "1"]);
    assert!(said.contains("257 -> 258 (transformer.wte.weight)"), "{said}");
    for words in ["--cluster local:3 --tp 3 --pp 1 --pad none", "--cluster local:3 --search alpa", "--cluster local:1"]
    {
        assert_eq!(planned(&config, words).padding, None, "{words}");
    }
    // Tensor cores are faster with multiples of 8, even without a split.
    let small = scratch.file("small.json", GPT2.replace("257", "50257").replace("70", "640").replace("290", "2560"));
    let plan = planned(&small, "--cluster dgx-a100:1 --precision bf16");
    assert_eq!(self::larger(&plan)["transformer.wte.weight"], [50304, 640]);
}

#[test]
fn plans_of_larger_sizes_answer_questions() {
    let scratch = Scratch::new();
    let config = scratch.file("gpt2.json", GPT2);
    let plan = scratch.file("plan.json", planned(&config, "--cluster local:3 --tp 3 --pp 1").to_json());
    let questions: [&[&str]; 7] = [
        &["inspect", &plan],
        &["inspect", &plan, "--programs"],
        &["why", &plan, "--stage", "0"],
        &["why", &plan, "--param", "transformer.wte.weight"],
        &["why-not", &plan, "--dp", "3"],
        &["simulate", &plan, "--memory"],
        &["compare", &plan, "--baseline", "tp=1 pp=1 mbs=1 dp=1"],
    ];
    for question in questions {
        assert!(!succeeds(question).is_empty(), "{question:?}");
    }
}

/// A padded model is stored in its original sizes, and resumes from them.
#[test]
fn checkpoints_are_of_the_model() {
    let scratch = Scratch::new();
    let config = scratch.file("gpt2.json", GPT2);
    let padded = planned(&config, "--cluster local:3 --tp 3 --pp 1");
    let plain = planned(&config, "--cluster local:2 --dp 2 --tp 1 --pp 1 --pad none");
    assert!(padded.padding.is_some() && plain.padding.is_none());
    let padded_file = scratch.file("padded.json", padded.to_json());
    let plain_file = scratch.file("plain.json", plain.to_json());
    let folder = scratch.path("checkpoints");
    let folder_text = folder.display().to_string();
    let run = |plan: &str, words: &[&str]| {
        let metrics = scratch.path("metrics.jsonl").display().to_string();
        let _ = std::fs::remove_file(&metrics);
        succeeds(&[&["run", plan, "--metrics", &metrics], words].concat());
        let lines = std::fs::read_to_string(&metrics).expect("metrics");
        let loss = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).expect("JSON");
            value["loss"].as_f64()
        };
        lines.lines().filter_map(loss).collect::<Vec<f64>>()
    };
    let expected = run(&plain_file, &["--steps", "4"]);
    let first = run(&padded_file, &["--steps", "2", "--checkpoint", &folder_text]);
    let (manifest, place) = newest(&folder, |_| Ok(())).expect("it is read").expect("there is one");
    let (own, _) = plain.own();
    let mut seen = 0;
    for_each_tensor(&manifest, &place, |of, tensor| {
        let altiplano::training::checkpoint::TensorOf::Parameter { name } = of else { return Ok(()) };
        let (v, _) = own.parameters().find(|(_, n)| *n == name).expect("a parameter of the model");
        assert_eq!(tensor.ty, *own.ty(v), "{name}");
        seen += 1;
        Ok(())
    })
    .expect("it is read");
    assert_eq!(seen, own.parameters().count());
    // Unpads and pads again.
    let second = run(&plain_file, &["--steps", "3", "--checkpoint", &folder_text, "--resume"]);
    let third = run(&padded_file, &["--steps", "4", "--checkpoint", &folder_text, "--resume"]);
    let found: Vec<f64> = [first, second, third].concat();
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5 * expected.abs(), "{found} and {expected}");
    }
}

#[test]
fn a_plan_that_contradicts_itself_is_refused() {
    let scratch = Scratch::new();
    let config = scratch.file("gpt2.json", GPT2);
    let plan = planned(&config, "--cluster local:3 --tp 3 --pp 1");
    let mut json: serde_json::Value = serde_json::from_str(&plan.to_json()).expect("JSON");
    let refused = |json: &serde_json::Value, problem: &str| {
        let file = scratch.file("bad.json", json.to_string());
        let output = altiplano(&["verify", &file]);
        assert_eq!(output.code, Some(2), "{}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(problem), "{}", output.stderr);
    };
    let good = json.clone();
    json["padding"]["parameters"]["transformer.wte.weight"][0][0]["size"] = 256.into();
    refused(&json, "padding: the model's parameters are not those of the plan's graph without padding");
    json = good.clone();
    json["padding"]["stop_gradients"] = serde_json::json!([1_000_000]);
    refused(&json, "padding: stop_gradients names no value of the model's graph");
    json = good;
    json["padding"]["graph"]["outputs"] = serde_json::json!([0]);
    refused(&json, "padding: the model's batch, inputs and outputs are not those of the plan's graph");
}
