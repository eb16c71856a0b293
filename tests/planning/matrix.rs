//! Plans compute what one device computes: six kinds of models on ten clusters, including odd numbers of devices and
//! two kinds of GPU, each small enough for the host. The search sees the devices and networks of the real machines.

use crate::common::{Scratch, altiplano};
use serde_json::{Value, json};

fn models() -> [(&'static str, Value); 6] {
    let gpt2 = json!({
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
    });
    let llama = json!({
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    });
    let mixtral = json!({
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    });
    let bert = json!({
        "model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
        "architectures": ["BertForMaskedLM"],
    });
    let t5 = json!({
        "model_type": "t5", "num_layers": 6, "num_decoder_layers": 6, "d_model": 512, "num_heads": 8, "d_kv": 64,
        "d_ff": 2048, "vocab_size": 32128, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu",
    });
    let vit = json!({
        "model_type": "vit", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_channels": 3,
        "architectures": ["ViTForImageClassification"], "num_labels": 1000,
    });
    [("gpt2", gpt2), ("llama", llama), ("mixtral", mixtral), ("bert", bert), ("t5", t5), ("vit", vit)]
}

const CLUSTERS: [&str; 10] = [
    "local:3",
    "local:6",
    "local:7",
    "local:12",
    "p3.16xlarge:1",
    "p3.16xlarge:2",
    "dgx-a100:1",
    "3x4xA100-80",
    "2x3xH100",
    concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/two-kinds.toml"),
];

/// Plans a downscaled model for the cluster and compares the plan's results with one device.
fn verified(name: &str, config: &Value, cluster: &str, options: &[&str]) {
    let scratch = Scratch::new();
    let file = scratch.file("config.json", config.to_string());
    let fixed = ["verify", &file, "--cluster", cluster, "--reduce=200k", "--global-batch", "24"];
    // The size of an image determines its tokens.
    let tokens: &[&str] = if name == "vit" { &[] } else { &["--seq", "32"] };
    let arguments = [&fixed[..], tokens, options].concat();
    let output = altiplano(&arguments);
    assert_eq!(output.code, Some(0), "{name} on {cluster} {options:?}\n{}{}", output.stdout, output.stderr);
}

/// Each cluster once, and each model.
#[test]
fn every_cluster_has_plans_that_compute() {
    let models = models();
    for (i, cluster) in CLUSTERS.into_iter().enumerate() {
        let (name, config) = &models[i % models.len()];
        verified(name, config, cluster, &[]);
    }
}

#[test]
#[ignore = "slow: all models on all clusters, free and with pipelines"]
fn every_model_on_every_cluster_computes() {
    for (name, config) in &models() {
        for cluster in CLUSTERS {
            verified(name, config, cluster, &[]);
            let devices = ["local:3", "local:6", "local:12", "2x3xH100"].contains(&cluster);
            if devices {
                verified(name, config, cluster, &["--pp", "3"]);
            }
        }
    }
}
