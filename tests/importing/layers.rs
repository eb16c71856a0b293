//! Stage boundaries in models of several shapes: every repeated part is cut between its blocks, and no layer has most
//! of the work.

use altiplano::ir::graph::{Graph, ValueId};
use altiplano::planner::layers::{MAX_LAYERS, cluster, cluster_finely};
use altiplano::{ImportOptions, load_model, model_of};
use serde_json::json;
use std::path::Path;

/// FLOPs of each layer as fractions of the total.
fn shares(graph: &Graph, starts: &[u32]) -> Vec<f64> {
    let flop = |w: &[u32]| (w[0]..w[1]).map(|v| graph.flop(ValueId(v)) as f64).sum::<f64>();
    let all: Vec<f64> = starts.windows(2).map(flop).collect();
    let total: f64 = all.iter().sum();
    all.into_iter().map(|flop| flop / total).collect()
}

fn of_config(config: serde_json::Value) -> Graph {
    let options = ImportOptions { sequence: Some(32), ..ImportOptions::default() };
    model_of(Path::new("config.json"), config.to_string().as_bytes(), &options).expect("a model").graph
}

#[test]
fn encoders_are_cut_as_decoders_are() {
    let graph = of_config(json!({
        "model_type": "t5", "num_layers": 7, "num_decoder_layers": 5, "d_model": 64, "d_kv": 16, "d_ff": 256,
        "num_heads": 4, "vocab_size": 128, "feed_forward_proj": "relu", "decoder_start_token_id": 0,
    }));
    let shares = shares(&graph, &cluster(&graph));
    assert!(shares.len() >= 12, "{shares:?}");
    assert!(shares.iter().all(|&share| share < 0.2), "{shares:?}");
}

#[test]
fn convolutional_networks_are_cut_between_blocks() {
    for name in ["resnet", "unet"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/models/{name}.mlir"));
        let graph = load_model(&file, &ImportOptions::default()).expect("a model").graph;
        let shares = shares(&graph, &cluster(&graph));
        // The first convolution of such a small network may be most of it, and cannot be split.
        let flop = |v| graph.flop(v) as f64;
        let largest = graph.values().map(flop).fold(0.0, f64::max) / graph.values().map(flop).sum::<f64>();
        let most = largest.max(0.3) + 0.05;
        assert!(shares.len() >= 4 && shares.iter().all(|&share| share < most), "{name}: {shares:?}");
    }
}

#[test]
fn of_more_blocks_than_layers_each_layer_has_as_many() {
    let blocks = 2 * MAX_LAYERS as u32 + 9;
    let graph = of_config(json!({
        "model_type": "gpt2", "n_layer": blocks, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64,
    }));
    let (starts, finely) = (cluster(&graph), cluster_finely(&graph, usize::MAX));
    assert!(starts.len() <= MAX_LAYERS + 2, "{}", starts.len());
    assert!(finely.len() as u32 > blocks && starts.iter().all(|start| finely.contains(start)));
    let shares = shares(&graph, &starts);
    let middle = &shares[1..shares.len() - 2];
    assert!(middle.iter().all(|share| (share - middle[0]).abs() < 1e-9), "{shares:?}");
}

/// A network of realistic size.
#[test]
fn wide_resnets_are_cut_in_every_stage() {
    let Some(file) = crate::common::shared_model("wresnet50-1b.mlir") else { return };
    let graph = load_model(Path::new(&file), &ImportOptions::default()).expect("a model").graph;
    let shares = shares(&graph, &cluster(&graph));
    assert!(shares.len() >= 12 && shares.iter().all(|&share| share < 0.2), "{shares:?}");
}
