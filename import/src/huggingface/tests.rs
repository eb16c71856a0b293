//! Published sizes give the published numbers of weights, errors in configs are reported, and small models are complete
//! graphs.

use super::{ConfigOptions, Imported, Note, import};
use altiplano_ir::autodiff::differentiate;
use altiplano_ir::batch::{LossKind, find_batch, rebatch};
use altiplano_ir::graph::Graph;
use altiplano_ir::op::Op;
use altiplano_transforms::rewrite::rewrite;

fn built(config: &str, sequence: Option<u64>) -> Imported {
    let options = ConfigOptions { batch: 2, sequence, ..Default::default() };
    import(config, &options).unwrap_or_else(|error| panic!("{error}: {config}"))
}

fn count(graph: &Graph) -> u64 {
    graph.parameters().map(|(v, _)| graph.ty(v).elements()).sum()
}

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}"#;
const GPT2_XL: &str =
    r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 48, "n_head": 25}"#;
const LLAMA_2_7B: &str = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32}"#;
const LLAMA_3_8B: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "rope_scaling": null,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": false}"#;
const LLAMA_3_2_1B: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": true,
    "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "max_position_embeddings": 131072}"#;
const MISTRAL_7B: &str = r#"{"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096}"#;
const QWEN2_7B: &str = r#"{"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "use_sliding_window": false,
    "sliding_window": 131072, "max_window_layers": 28}"#;
const QWEN3_8B: &str = r#"{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}"#;
const MIXTRAL_8X7B: &str = r#"{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": null}"#;
const DEEPSEEK_V3: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_theta": 10000, "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096}}"#;
const BERT_BASE: &str = r#"{"model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512, "type_vocab_size": 2}"#;
const T5_SMALL: &str = r#"{"model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
    "num_heads": 8, "relative_attention_num_buckets": 32, "n_positions": 512}"#;
const VIT_BASE: &str = r#"{"model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_labels": 1000}"#;

const NEMOTRON_4_15B: &str = r#"{"model_type": "nemotron", "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
    "num_hidden_layers": 32, "num_attention_heads": 48, "num_key_value_heads": 8, "max_position_embeddings": 4096}"#;

#[test]
fn numbers_of_weights_are_the_published_ones() {
    let cases = [
        (GPT2, 124_439_808),
        (GPT2_XL, 1_557_611_200),
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_3_2_1B, 1_235_814_400),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_8B, 8_190_735_360),
        (MIXTRAL_8X7B, 46_702_792_704),
        // 12.5 billion plus 3.1 billion of embeddings (Parmar et al. 2024, table 1). The exact number is two tables,
        // and per layer the four matrices of attention, two of the perceptron and two norms with biases.
        (
            NEMOTRON_4_15B,
            2 * 256_000 * 6144 + 32 * (2 * 6144 * 6144 + 2 * 6144 * 1024 + 2 * 6144 * 24_576 + 4 * 6144) + 2 * 6144,
        ),
        // Without the biases that balance the experts, one each in 58 layers. No gradient changes them.
        (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
        // The model without a head has 109,482,240 weights, including a pooler but not the head for masked tokens.
        (BERT_BASE, 109_482_240 - (768 * 768 + 768) + (768 * 768 + 3 * 768 + 30_522)),
        (T5_SMALL, 60_506_624),
        (VIT_BASE, 86_567_656),
    ];
    for (config, expected) in cases {
        let graph = built(config, None).graph;
        assert_eq!(graph.verify(), [], "{config}");
        assert_eq!(count(&graph), expected, "{config}");
    }
}

/// Counts by Transformers, for configs of all families.
#[test]
fn numbers_of_weights_are_those_of_transformers() {
    let listed = include_str!("../../../benches/configs/huggingface.jsonl");
    let mut families = std::collections::BTreeSet::new();
    for line in listed.lines() {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        let (name, config) = (&case["name"], &case["config"]);
        let graph = built(&config.to_string(), None).graph;
        let frozen = case["frozen"].as_u64().unwrap_or(0);
        assert_eq!(Some(count(&graph) + frozen), case["parameters"].as_u64(), "{name}");
        families.insert(config["model_type"].to_string());
    }
    assert!(listed.lines().count() >= 60 && families.len() >= 40, "{families:?}");
}

#[test]
fn weights_are_named_and_shaped_as_in_checkpoints() {
    let check = |config: &str, name: &str, shape: &[u64]| {
        let graph = built(config, None).graph;
        let found = graph.parameters().find(|(_, n)| *n == name).map(|(v, _)| graph.shape(v).to_vec());
        assert_eq!(found.as_deref(), Some(shape), "{name}");
    };
    check(GPT2, "transformer.h.11.attn.c_attn.weight", &[768, 2304]);
    check(LLAMA_3_8B, "model.layers.31.self_attn.k_proj.weight", &[1024, 4096]);
    check(LLAMA_3_8B, "lm_head.weight", &[128_256, 4096]);
    check(QWEN2_7B, "model.layers.0.self_attn.q_proj.bias", &[3584]);
    check(QWEN3_8B, "model.layers.0.self_attn.q_norm.weight", &[128]);
    check(MIXTRAL_8X7B, "model.layers.0.mlp.experts.gate_up_proj", &[8, 28_672, 4096]);
    check(DEEPSEEK_V3, "model.layers.60.mlp.shared_experts.down_proj.weight", &[7168, 2048]);
    check(BERT_BASE, "bert.encoder.layer.0.attention.self.query.weight", &[768, 768]);
    check(T5_SMALL, "decoder.block.5.layer.1.EncDecAttention.q.weight", &[512, 512]);
    check(VIT_BASE, "vit.encoder.layer.0.attention.attention.query.weight", &[768, 768]);
    for (family, name, shape) in [
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", &[4, 24][..]),
        ("gpt_oss", "model.layers.1.self_attn.sinks", &[4]),
        ("llama4_text", "model.layers.1.feed_forward.experts.gate_up_proj", &[4, 8, 24]),
        ("llama4_text", "model.layers.0.feed_forward.gate_proj.weight", &[10, 8]),
        ("falcon", "transformer.h.0.self_attention.query_key_value.weight", &[20, 12]),
        ("mamba2", "backbone.layers.0.mixer.conv1d.weight", &[28, 1, 4]),
        ("mamba", "backbone.layers.1.mixer.x_proj.weight", &[7, 16]),
        ("mamba", "backbone.layers.1.mixer.A_log", &[16, 3]),
        ("jamba", "model.layers.0.mamba.dt_layernorm.weight", &[1]),
        ("jamba", "model.layers.1.feed_forward.experts.down_proj", &[4, 8, 12]),
        ("zamba2", "model.layers.0.shared_transformer.self_attn.o_proj.weight", &[8, 16]),
        ("zamba2", "model.layers.0.shared_transformer.feed_forward.gate_up_proj_adapter_list.1.1.weight", &[64, 2]),
        ("zamba2", "model.layers.1.mamba_decoder.mamba.in_proj.weight", &[42, 8]),
        ("granitemoehybrid", "model.layers.0.mamba.in_proj.weight", &[42, 8]),
        ("nemotron_h", "model.layers.0.mixer.in_proj.weight", &[48, 8]),
        ("nemotron_h", "model.layers.1.mixer.o_proj.weight", &[8, 16]),
        ("nemotron_h", "model.layers.2.mixer.experts.up_proj", &[4, 6, 8]),
        ("nemotron_h", "model.layers.2.mixer.shared_experts.down_proj.weight", &[8, 10]),
        ("nemotron_h", "model.layers.3.mixer.up_proj.weight", &[12, 8]),
        ("granitemoehybrid", "model.layers.1.shared_mlp.input_linear.weight", &[20, 8]),
        ("modernbert", "model.layers.1.attn.Wqkv.weight", &[24, 8]),
        ("whisper", "model.decoder.layers.1.encoder_attn.v_proj.bias", &[8]),
    ] {
        let config = SMALL.iter().find(|config| config.contains(&format!("\"{family}\"")));
        let graph = built(config.expect(family), Some(8)).graph;
        let found = graph.parameters().find(|(_, n)| *n == name).map(|(v, _)| graph.shape(v).to_vec());
        assert_eq!(found.as_deref(), Some(shape), "{name}");
    }
}

/// A config of each family that is small enough to be computed.
const SMALL: &[&str] = &[
    r#"{"model_type": "gpt2", "vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.1}"#,
    r#"{"model_type": "mistral", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3}"#,
    r#"{"model_type": "mixtral", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16"}"#,
    r#"{"model_type": "deepseek_v3", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4,
        "num_hidden_layers": 2, "num_attention_heads": 2, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 6, "kv_lora_rank": 6,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 3}"#,
    r#"{"model_type": "bert", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 16}"#,
    r#"{"model_type": "t5", "vocab_size": 50, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "feed_forward_proj": "gated-gelu"}"#,
    r#"{"model_type": "vit", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4, "id2label": {"0": "a", "1": "b", "2": "c"}}"#,
    r#"{"model_type": "gemma2", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3}"#,
    r#"{"model_type": "gpt_oss", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3, "num_local_experts": 4,
        "num_experts_per_tok": 2}"#,
    r#"{"model_type": "llama4_text", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4,
        "intermediate_size_mlp": 10, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4,
        "attention_chunk_size": 3, "interleave_moe_layer_step": 2, "floor_scale": 2}"#,
    r#"{"model_type": "falcon", "vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_kv_heads": 2, "new_decoder_architecture": true}"#,
    r#"{"model_type": "bloom", "vocab_size": 50, "hidden_size": 12, "n_layer": 2, "n_head": 3}"#,
    r#"{"model_type": "mamba2", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 4,
        "state_size": 3, "n_groups": 2, "chunk_size": 3, "time_step_limit": [0.0, Infinity]}"#,
    r#"{"model_type": "mamba", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 3}"#,
    r#"{"model_type": "jamba", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
        "mamba_d_state": 3}"#,
    r#"{"model_type": "zamba2", "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
        "layers_block_type": ["hybrid", "hybrid", "mamba"], "n_mamba_heads": 4, "mamba_d_state": 3, "adapter_rank": 2}"#,
    r#"{"model_type": "granitemoehybrid", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
        "shared_intermediate_size": 10, "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 3, "mamba_chunk_size": 8}"#,
    r#"{"model_type": "nemotron_h", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "hybrid_override_pattern": "M*E-",
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "mamba_num_heads": 4, "mamba_head_dim": 4,
        "n_groups": 2, "ssm_state_size": 3, "chunk_size": 3, "n_routed_experts": 4, "moe_intermediate_size": 6,
        "moe_shared_expert_intermediate_size": 10}"#,
    r#"{"model_type": "modernbert", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "local_attention": 4}"#,
    r#"{"model_type": "whisper", "vocab_size": 50, "d_model": 8, "num_mel_bins": 3, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12,
        "max_source_positions": 5, "max_target_positions": 8}"#,
];

const CLIP: &str = r#"{"model_type": "clip", "projection_dim": 6, "text_config": {"vocab_size": 50, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8},
    "vision_config": {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4}}"#;

#[test]
fn losses_are_means_over_samples_that_can_be_cut_and_differentiated() {
    for config in SMALL {
        let sequence = (!config.contains("vit")).then_some(8);
        let graph = built(config, sequence).graph;
        let dims: Vec<_> = graph.inputs().map(|(v, _)| (graph.node(v).batch_dims != 0).then_some(0)).collect();
        let batched = find_batch(&graph, &dims);
        assert_eq!((batched.loss, &batched.doubt), (LossKind::Mean, &None), "{config}");
        for batch in [1, 6] {
            let at = rebatch(&batched.graph, batch).unwrap_or_else(|v| panic!("{v} of {config}"));
            assert_eq!(at.verify(), [], "{config}");
        }
        let names: Vec<&str> = graph.nodes.iter().map(|n| n.name.as_str()).collect();
        assert!(names.iter().all(|name| !name.is_empty()), "{config}");
        let gradients = differentiate(&batched.graph, &[]);
        assert!(gradients.is_ok(), "{config}");
    }
}

/// Rewriting finds the same ops for a batch of one sample as for any other.
#[test]
fn one_sample_is_rewritten_as_many_are() {
    for config in SMALL {
        let sequence = (!config.contains("vit")).then_some(8);
        let graph = built(config, sequence).graph;
        let dims: Vec<_> = graph.inputs().map(|(v, _)| (graph.node(v).batch_dims != 0).then_some(0)).collect();
        let batched = find_batch(&graph, &dims).graph;
        let composites = |batch: u64| -> Vec<String> {
            let graph = rewrite(&rebatch(&batched, batch).unwrap(), &[]);
            graph.nodes.iter().filter(|n| matches!(n.op, Op::Composite(_))).map(|n| n.op.name().to_string()).collect()
        };
        let (one, six) = (composites(1), composites(6));
        assert!(!one.is_empty() && one == six, "{config}: {one:?}, {six:?}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let check = |config: &str, expected: &str| {
        let options = ConfigOptions { batch: 2, sequence: Some(8), ..Default::default() };
        let error = import(config, &options).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let gpt2 = |key: &str, value: &str| {
        let mut config: serde_json::Value = serde_json::from_str(SMALL[0]).unwrap();
        config[key] = serde_json::from_str(value).unwrap();
        config.to_string()
    };
    let mixtral = |key: &str, value: &str| {
        let mut config: serde_json::Value = serde_json::from_str(SMALL[2]).unwrap();
        config[key] = serde_json::from_str(value).unwrap();
        config.to_string()
    };
    check("{", "EOF");
    check("{}", "model_type: is missing");
    check(r#"{"model_type": "gpt2", "n_embd": 8, "n_embd": 16}"#, "n_embd: is there twice");
    check(
        r#"{"model_type": "qwen3_mo"}"#,
        "model_type: 'qwen3_mo' is not known; the nearest of those known are qwen3_moe, qwen3",
    );
    check(r#"{"model_type": "llava", "text_config": {"model_type": "rwkv"}}"#, "model_type: 'rwkv' is not known");
    check(r#"{"model_type": "gemma3", "text_config": {"hidden_size": "wide"}}"#, "text_config.hidden_size: expected");
    check(&gpt2("n_embd", "0"), "n_embd: expected a whole number from 1 to 2147483648, found 0");
    check(&gpt2("n_embd", "-4"), "n_embd: expected a whole number");
    check(&gpt2("n_embd", "\"eight\""), "n_embd: expected a whole number from 1 to 2147483648, found \"eight\"");
    check(&gpt2("n_embd", "7"), "n_embd: 7 is not a multiple of n_head (2)");
    check(&gpt2("n_embd", "2147483648"), "larger than any tensor");
    check(&gpt2("n_layer", "1000000000000"), "n_layer: expected a whole number from 1 to 4096");
    check(&gpt2("n_positions", "4"), "--seq: 8 tokens are more than the 4 positions");
    check(&gpt2("layer_norm_epsilon", "\"small\""), "layer_norm_epsilon: expected a number above 0");
    check(&gpt2("activation_function", "\"sine\""), "activation_function: \"sine\" is not supported");
    check(&gpt2("torch_dtype", "\"int8\""), "torch_dtype: \"int8\" is not supported");
    check(&mixtral("num_key_value_heads", "3"), "num_attention_heads: 4 is not a multiple of num_key_value_heads (3)");
    check(&mixtral("head_dim", "3"), "head_dim: 3 is not a multiple of a pair (2)");
    check(&mixtral("head_dim", "1000000000"), "head_dim: 1000000000 is more than");
    check(&mixtral("num_experts_per_tok", "5"), "num_experts_per_tok: 5 is more than num_local_experts (4)");
    check(
        &mixtral("rope_scaling", "{\"rope_type\": \"spiral\"}"),
        "rope_scaling.rope_type: \"spiral\" is not supported",
    );
    check(&mixtral("rope_scaling", "{\"type\": \"linear\"}"), "rope_scaling.factor: is missing");
    check(&mixtral("rope_scaling", "7"), "rope_scaling: expected an object, found 7");
    check(SMALL[6], "--seq: this model takes images");
    // Constants per head are limited to the number of heads that models have.
    let many = r#"{"model_type": "bloom", "hidden_size": 2147483648, "n_head": 2147483648}"#;
    check(many, "n_head: 2147483648 is more than the most heads of such a model");
    let wide = r#"{"model_type": "mamba2", "hidden_size": 2147483648, "expand": 2147483648, "num_heads": 2147483648,
        "head_dim": 2147483648}"#;
    check(wide, "expand: 4611686018427387904 is more than the widest layer");
}

/// A loss over pairs cannot be divided, but still scales with the batch.
#[test]
fn pairs_are_compared_with_all_of_the_batch() {
    let graph = built(CLIP, Some(8)).graph;
    assert_eq!(graph.verify(), []);
    let dims: Vec<_> = graph.inputs().map(|(v, _)| (graph.node(v).batch_dims != 0).then_some(0)).collect();
    let batched = find_batch(&graph, &dims);
    assert_eq!((batched.loss, &batched.doubt), (LossKind::Other, &None));
    let six = rebatch(&batched.graph, 6).unwrap();
    assert_eq!(six.verify(), []);
    assert!(differentiate(&batched.graph, &[]).is_ok());
}

#[test]
fn what_is_assumed_is_what_transformers_takes() {
    let notes = |config: &str| -> Vec<String> {
        let notes = built(config, Some(8)).notes.into_iter();
        notes.filter(|n| matches!(n, Note::Assumed { .. } | Note::Part { .. })).map(|n| n.to_string()).collect()
    };
    assert_eq!(
        notes(
            r#"{"model_type": "gemma3", "vision_config": {"hidden_size": 16}, "text_config": {"hidden_size": 64,
            "intermediate_size": 96, "num_hidden_layers": 2}}"#
        ),
        [
            "the model has several parts; what is planned is the text model of text_config (gemma3_text), without vision_config",
            "not in the config, and taken as Transformers does: text_config.num_attention_heads 8, text_config.vocab_size 262208",
        ]
    );
    assert_eq!(notes(LLAMA_3_8B), [""; 0]);
    let flat = LLAMA_3_8B.replace("\"llama\"", "\"qwen2_5_vl\", \"vision_config\": {\"depth\": 2}");
    let planned = "what is planned is the text model of the config (qwen2_5_vl_text), without vision_config";
    assert_eq!(notes(&flat), [format!("the model has several parts; {planned}")]);
    let silent = built(r#"{"model_type": "llama"}"#, Some(8)).graph;
    assert_eq!(count(&silent), 6_738_415_616);
    // A text decoder gets the precision of the whole model.
    let whole = r#"{"model_type": "llava", "torch_dtype": "bfloat16", "text_config": {"num_hidden_layers": 1}}"#;
    let graph = built(whole, Some(8)).graph;
    let (weight, _) = graph.parameters().next().unwrap();
    assert_eq!(graph.ty(weight).dtype, altiplano_ir::dtype::DType::BF16);
}

#[test]
fn words_that_are_numbers_of_python_are_read() {
    assert_eq!(
        super::finite_numbers(r#"["Infinity", Infinity, "\"Infinity"]"#),
        r#"["Infinity", 1.7e+308, "\"Infinity"]"#
    );
    assert_eq!(super::finite_numbers("[-Infinity]"), "[-1.7e+308]");
}

/// Slopes as computed by the models' own code.
#[test]
fn slopes_of_linear_biases() {
    use super::attention::Alibi;
    let check = |found: Vec<f64>, powers: &[f64]| {
        let expected: Vec<f64> = powers.iter().map(|p| libm::exp2(-p)).collect();
        assert!(found.len() == expected.len(), "{found:?}");
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}, {expected:?}");
    };
    check(Alibi::slopes(4), &[2.0, 4.0, 6.0, 8.0]);
    check(Alibi::slopes(3), &[4.0, 8.0, 2.0]);
    check(Alibi::slopes_to(4, 8.0), &[2.0, 4.0, 6.0, 8.0]);
    check(Alibi::slopes_to(3, 8.0), &[4.0, 8.0, 2.0]);
}

/// Notes about settings of the config that are not built.
#[test]
fn what_is_left_out_is_said() {
    let notes = |config: &str, key: &str, value: &str| -> Vec<String> {
        let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
        config[key] = serde_json::from_str(value).unwrap();
        let notes = built(&config.to_string(), None).notes.into_iter();
        notes
            .filter(|n| matches!(n, Note::Head { .. } | Note::Unread { .. } | Note::Quantised { .. }))
            .map(|n| n.to_string())
            .collect()
    };
    // A type that nobody names is float32, as in Transformers; on GPUs hardly anybody wants that.
    let is_of_type = |config: &str| built(config, None).notes.contains(&Note::Precision);
    assert!(is_of_type(SMALL[0]) && !is_of_type(SMALL[2]));
    let (gpt2, llama) = (SMALL[0], LLAMA_3_2_1B);
    let other_head = "has another head and loss; what is planned is a model of next tokens";
    for head in ["LlamaForSequenceClassification", "GPT2DoubleHeadsModel"] {
        let architectures = format!("[\"{head}\"]");
        assert_eq!(notes(llama, "architectures", &architectures), [format!("architectures: a {head} {other_head}")]);
    }
    for head in ["LlamaForCausalLM", "LlamaModel", "GPT2LMHeadModel"] {
        assert_eq!(notes(llama, "architectures", &format!("[\"{head}\"]")), [""; 0], "{head}");
    }
    assert_eq!(notes(SMALL[4], "is_decoder", "true"), ["the field is not known here and left out: is_decoder"]);
    let quantised = notes(llama, "quantization_config", r#"{"quant_method": "fp8"}"#);
    let said = "quantization_config: the checkpoint's weights are quantised (fp8); the plan has them in f32";
    assert_eq!(quantised, [said]);
    for (key, value) in [("is_decoder", "false"), ("pruned_heads", "{}"), ("use_cache", "true"), ("n_inner", "null")] {
        assert_eq!(notes(gpt2, key, value), [""; 0], "{key}");
    }
}

#[test]
fn options_have_bounds() {
    let check = |options: ConfigOptions, expected: &str| {
        let error = import(SMALL[2], &options).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(ConfigOptions { sequence: Some(0), ..Default::default() }, "--seq: expected more than 0");
    check(ConfigOptions { sequence: Some(u64::MAX), ..Default::default() }, "--seq: expected more than 0");
    check(ConfigOptions { batch: u64::MAX, ..Default::default() }, "the batch: expected more than 0");
    let factor = |x| ConfigOptions { capacity_factor: Some(x), ..Default::default() };
    check(factor(f64::NAN), "--capacity-factor: expected more than 0");
    check(factor(-1.0), "--capacity-factor: expected more than 0");
    // The largest allowed values are either built or refused, without exhausting memory.
    let largest = ConfigOptions { batch: 1 << 31, sequence: Some(1 << 24), ..Default::default() };
    check(largest, "larger than any tensor");
}

/// Angles as Transformers 5.23 computes them for these fields.
#[test]
fn frequencies_are_stretched() {
    let check = |scaling: &str, expected: &[f64], factor: f64| {
        let config = format!(r#"{{"max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": {scaling}}}"#);
        let map = serde_json::from_str(&config).unwrap();
        let (rope, _) =
            super::rope::Rope::read_part(&super::Fields::new(&map, &[]), "head_dim", 8, 10_000.0, 1.0).unwrap();
        for (found, expected) in rope.frequencies.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-6 * expected, "{scaling}: {:?}", rope.frequencies);
        }
        assert!((rope.attention_factor - factor).abs() < 1e-9, "{scaling}: {}", rope.attention_factor);
    };
    check("null", &[1.0, 0.1, 0.01, 0.001], 1.0);
    check(r#"{"type": "linear", "factor": 4.0}"#, &[0.25, 0.025, 0.0025, 0.00025], 1.0);
    check(
        r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128}"#,
        LLAMA3,
        1.0,
    );
    check(r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#, YARN, 1.138629436111989);
}

const LLAMA3: &[f64] = &[1.0, 0.042751178, 0.00125, 0.000125];
const YARN: &[f64] = &[1.0, 0.0625, 0.0025, 0.00025];
