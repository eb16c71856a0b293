//! Modules of layers that selective recomputation can repeat, in models of the families that have them.

use crate::common::Scratch;
use altiplano::ir::dtype::DType;
use altiplano::ir::graph::{Graph, ValueId};
use altiplano::ir::op::Op;
use altiplano::ir::recompute::{Module, Modules};

use altiplano::planner::features::modules::{modules, modules_of};
use altiplano::{ImportOptions, Model, load_model};

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}"#;
pub const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
pub const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2}"#;
/// The first of three layers has no experts.
pub const DEEPSEEK: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
    "moe_intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "n_shared_experts": 1,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}"#;
const BERT: &str = r#"{"model_type": "bert", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}"#;
const VIT: &str = r#"{"model_type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "id2label": {"0": "a", "1": "b", "2": "c"}}"#;
/// Attention and feed-forward layers side by side.
const FALCON: &str = r#"{"model_type": "falcon", "vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": true}"#;

/// The model of a config, with 4 samples of 8 tokens.
pub fn model(config: &str, precision: Option<DType>) -> Model {
    let scratch = Scratch::new();
    let file = scratch.file("config.json", config.as_bytes());
    let sequence = Some(8).filter(|_| config != VIT);
    let import = ImportOptions { sequence, batch: Some(4), precision, ..ImportOptions::default() };
    load_model(file.as_ref(), &import).expect("a model")
}

fn graph(config: &str) -> Graph {
    model(config, None).graph
}

/// The products with weights in each module, by the parameter's name.
fn weights(graph: &Graph, module: Module) -> Vec<String> {
    let found = modules(graph, &vec![None; graph.len()], &graph.users());
    let is_product = |v: &ValueId| graph.node(*v).op.is_contraction() && found[v.index()].contains(module);
    let mut names: Vec<String> = Vec::new();
    for v in graph.values().filter(is_product) {
        // Weights may be transposed or converted on the way.
        let mut open: Vec<ValueId> = graph.node(v).operands.to_vec();
        while let Some(o) = open.pop() {
            match &graph.node(o).op {
                Op::Parameter(parameter) => names.push(parameter.name.clone()),
                Op::Transpose(_) | Op::Reshape(_) | Op::Convert(_) | Op::BroadcastInDim(_) => {
                    open.extend(graph.node(o).operands.iter());
                }
                _ => {}
            }
        }
    }
    names.sort();
    names
}

#[test]
fn families_have_the_modules_that_their_layers_are_made_of() {
    use Module::{AttentionCore, Experts, Mlp, SharedExperts, UpProjections};
    for (config, expected) in [
        (GPT2, vec![AttentionCore, Mlp]),
        (LLAMA, vec![AttentionCore, Mlp]),
        (BERT, vec![AttentionCore, Mlp]),
        (VIT, vec![AttentionCore, Mlp]),
        (FALCON, vec![AttentionCore, Mlp]),
        (MIXTRAL, vec![AttentionCore, Experts]),
        (DEEPSEEK, vec![AttentionCore, UpProjections, Mlp, SharedExperts, Experts]),
    ] {
        assert_eq!(modules_of(&graph(config)), expected.into_iter().collect::<Modules>(), "{config}");
    }
}

#[test]
fn modules_have_the_weights_of_their_layers() {
    let all = [
        (GPT2, Module::Mlp, vec!["c_fc", "mlp.c_proj"], 2),
        (LLAMA, Module::Mlp, vec!["gate_proj", "up_proj", "down_proj"], 2),
        (BERT, Module::Mlp, vec!["intermediate.dense", "output.dense"], 2),
        (DEEPSEEK, Module::UpProjections, vec!["q_b_proj", "kv_b_proj"], 3),
        (DEEPSEEK, Module::Mlp, vec!["gate_proj", "up_proj", "down_proj"], 1),
        (DEEPSEEK, Module::SharedExperts, vec!["shared_experts"; 3], 2),
    ];
    for (config, module, parts, layers) in all {
        let found = weights(&graph(config), module);
        assert_eq!(found.len(), parts.len() * layers, "{module:?}: {found:?}");
        assert!(found.iter().all(|name| parts.iter().any(|part| name.contains(part))), "{module:?}: {found:?}");
    }
    let experts = weights(&graph(DEEPSEEK), Module::Experts);
    assert!(experts.iter().all(|name| name.contains("mlp")), "{experts:?}");
    assert!(experts.iter().any(|name| name.contains("gate.weight")), "{experts:?}");
}
