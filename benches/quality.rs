//! How good chosen plans are beside what simpler searches find, all predicted the same way: every Megatron-style configuration (replicas x
//! tensor-parallel devices x stages x microbatch x recomputation x ZeRO-0 and ZeRO-1), and Alpa's search.
//!
//!     cargo bench --bench quality -- FOLDER_OF_MODELS [NAME...]

use altiplano::planner::search::sweep::{Space, sweep};
use altiplano::planner::{PlanFailure, SearchKind, Silent, plan};
use altiplano::{Error, ImportOptions, Model, cost_models::Roofline, load_cluster, load_model, model_of, request};
use altiplano_ir::recompute::Recompute;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Model, cluster and global batch.
const CASES: [(&str, &str, u64); 16] = [
    ("gpt2-small.mlir", "dgx-a100:1", 64),
    ("gpt2-small.mlir", "p3.16xlarge:4", 256),
    ("gpt3-2.6b.mlir", "p3.16xlarge:1", 128),
    ("gpt3-2.6b.mlir", "p3.16xlarge:2", 256),
    ("gpt3-2.6b.mlir", "p3.16xlarge:8", 1024),
    ("gpt3-2.6b.mlir", "dgx-h100:64", 1024),
    ("gpt3-39b.mlir", "p3.16xlarge:8", 1024),
    ("gpt3-39b.mlir", "dgx-a100:16", 1024),
    ("gpt3-39b.mlir", "dgx-h100:64", 2048),
    ("llama3-8b", "dgx-a100:1", 64),
    ("llama3-8b", "dgx-h100:8", 512),
    ("llama3-8b", "dgx-h100:64", 1024),
    ("moe-2.4b.mlir", "p3.16xlarge:2", 256),
    ("moe-2.4b.mlir", "dgx-a100:8", 1024),
    ("wresnet50-1b.mlir", "p3.16xlarge:1", 256),
    ("wresnet50-1b.mlir", "p3.16xlarge:2", 1536),
];

/// The sizes of Llama 3 8B (Meta 2024).
const LLAMA3_8B: &str = r#"{
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16"
}"#;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|a| a != "--bench");
    let Some(folder) = arguments.next().map(PathBuf::from) else {
        println!("give the folder with the models; nothing was measured");
        return;
    };
    let only: Vec<String> = arguments.collect();
    println!(
        "| model | cluster | batch | chosen s | search s | Megatron's best s | of | which | ratio | Alpa's search s | ratio |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|---|--:|--:|--:|");
    for (model, cluster, batch) in CASES {
        if only.is_empty() || only.iter().any(|name| model.contains(name) || cluster.contains(name)) {
            match load(&folder, model) {
                Ok(loaded) => println!("{}", row(model, &loaded, cluster, batch)),
                Err(error) => println!("skipped: {error}"),
            }
        }
    }
}

fn load(folder: &Path, model: &str) -> Result<Model, Error> {
    match model {
        "llama3-8b" => {
            let options = ImportOptions { sequence: Some(4096), ..ImportOptions::default() };
            model_of(model.as_ref(), LLAMA3_8B.as_bytes(), &options)
        }
        file => load_model(&folder.join(file), &ImportOptions::default()),
    }
}

/// Plans a model, and compares with uniform configurations and with Alpa's search.
fn row(model: &str, loaded: &Model, cluster: &str, batch: u64) -> String {
    let mut wanted = match load_cluster(cluster) {
        Ok(cluster) => request(loaded, cluster),
        Err(error) => panic!("{error}"),
    };
    wanted.batch.global = Some(batch);
    // Batch statistics of a microbatch, as everybody trains who splits the batch of such a net.
    wanted.allow_microbatch_semantics = model.starts_with("wresnet");
    let start = Instant::now();
    let chosen = plan(&wanted, &Silent);
    let search_s = start.elapsed().as_secs_f64();
    let cost = Roofline::new(wanted.cluster.groups[0].device.clone());
    let swept = sweep(&wanted, &Space::default(), &cost, &Silent);
    let mut alpas = wanted.clone();
    alpas.search = SearchKind::Alpa;
    alpas.baselines = false;
    let alpa = plan(&alpas, &Silent);
    let seconds =
        |plan: &Result<_, PlanFailure>| plan.as_ref().ok().map(|p: &altiplano::ir::plan::Plan| p.predicted.step_time_s);
    let ours = seconds(&chosen);
    let ratio = |theirs: Option<f64>| match (ours, theirs) {
        (Some(ours), Some(theirs)) => format!("{:.3}", ours / theirs),
        _ => "-".into(),
    };
    let number = |s: Option<f64>| s.map_or("does not fit".into(), |s| format!("{s:.4}"));
    let (best, count, which) = match &swept {
        Ok(found) => {
            let d = &found[0].degrees;
            let recompute = match d.recompute {
                Recompute::None => String::new(),
                level => format!(" recomputed ({level})"),
            };
            let v = d.virtual_stages;
            let shared = if v > 1 { format!(", {v} stages a device") } else { String::new() };
            let which = format!(
                "dp{} tp{} pp{}, {} microbatches, ZeRO-{}{recompute}{shared}",
                d.dp,
                d.tp,
                d.stages / v,
                d.num_microbatches,
                d.zero
            );
            (Some(found[0].plan.predicted.step_time_s), found.len(), which)
        }
        Err(_) => (None, 0, "-".into()),
    };
    format!(
        "| {model} | {cluster} | {batch} | {} | {search_s:.1} | {} | {count} | {which} | {} | {} | {} |",
        number(ours),
        number(best),
        ratio(best),
        number(seconds(&alpa)),
        ratio(seconds(&alpa)),
    )
}
