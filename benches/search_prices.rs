//! Compares estimates of the search with predictions: `cargo bench --bench search_prices -- FOLDER_OR_MODEL ...`.
//!
//! For each model and cluster, prints the chosen plan and the seconds that planning took, then a line for each
//! combination of data and tensor parallelism at ZeRO 0, 1 and 3: the estimate of the best layout and its predicted
//! step. The last line of a pair is the correlation of the two rankings (Spearman's coefficient).

use altiplano::cost_models::Roofline;
use altiplano::planner::inter_op::search::search;
use altiplano::planner::layers::cache::LayeredAtBatch;
use altiplano::planner::search::context::SearchContext;
use altiplano::planner::search::predictor::predict_candidate;
use altiplano::planner::search::space::SearchSpace;
use altiplano::planner::{GivenDegrees, Request, Silent};
use altiplano::{Error, ImportOptions, load_cluster, load_model, plan, request};
use altiplano_ir::recompute::Recompute;
use std::path::PathBuf;
use std::time::Instant;

const CLUSTERS: [&str; 4] = ["dgx-a100:1", "dgx-h100:1", "p3.16xlarge:2", "local:4"];

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let (clusters, paths): (Vec<String>, Vec<String>) = arguments.into_iter().partition(|a| a.contains(':'));
    let clusters = if clusters.is_empty() { CLUSTERS.map(String::from).to_vec() } else { clusters };
    for file in paths.iter().flat_map(|p| files(p.into())) {
        let name = file.file_name().map(|n| n.to_string_lossy().to_string()).unwrap_or_default();
        let model = match load_model(&file, &ImportOptions::default()) {
            Ok(model) => model,
            Err(error) => {
                println!("{name}: left out: {}", error.to_string().lines().next().unwrap_or_default());
                continue;
            }
        };
        for cluster in &clusters {
            let request = request(&model, load_cluster(cluster)?);
            let start = Instant::now();
            match plan(&request, &Silent) {
                Ok(plan) => {
                    let stage = &plan.stages[0];
                    println!(
                        "{name} {cluster} chosen: {:.6} s, planned in {:.2} s, {} stages, {}, zero {}, {} microbatches",
                        plan.predicted.step_time_s,
                        start.elapsed().as_secs_f64(),
                        plan.stages.len(),
                        stage.mesh,
                        stage.zero,
                        plan.num_microbatches
                    );
                }
                Err(error) => println!("{name} {cluster} chosen: none ({error})"),
            }
            let pairs = sweep(&name, cluster, &request);
            println!("{name} {cluster} rank correlation {:.3} of {}", spearman(&pairs), pairs.len());
        }
    }
    Ok(())
}

/// The models in a folder, or the file itself.
fn files(path: PathBuf) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(&path) else { return vec![path] };
    let is_model = |p: &PathBuf| p.extension().is_some_and(|e| e == "mlir" || e == "onnx" || e == "pt2");
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(is_model).collect();
    found.sort();
    found
}

/// Estimated and predicted seconds of the best layouts of each combination of degrees.
fn sweep(name: &str, cluster: &str, request: &Request) -> Vec<(f64, f64)> {
    let devices = request.cluster.num_devices();
    let cost = Roofline::new(request.cluster.groups[0].device.clone());
    let layered = LayeredAtBatch::new(request);
    let Ok(space) = SearchSpace::from_request(request) else { return Vec::new() };
    let mut pairs = Vec::new();
    for dp in (1..=devices).filter(|dp| devices % dp == 0) {
        for zero in [0, 1, 3] {
            let space = SearchSpace {
                degrees: GivenDegrees {
                    dp: Some(dp),
                    tp: Some(devices / dp),
                    pp: Some(1),
                    zero: Some(zero),
                    ..space.degrees
                },
                recompute: Some(Recompute::None),
                zero_bubble: false,
                num_microbatches: vec![1],
                all_devices: true,
                memory_bytes: vec![u64::MAX],
                ..space.clone()
            };
            let cx = SearchContext { request, space: &space, costs: &cost, layered: &layered, progress: &Silent };
            let found = search(&cx);
            let Ok(ranked) = found.ranked(&cx, &Default::default()) else { continue };
            let Some(candidate) = ranked.first() else { continue };
            let Ok(plan) = predict_candidate(&cx, candidate) else { continue };
            let (estimated_s, predicted_s) = (candidate.step_s, plan.predicted.step_time_s);
            let tp = devices / dp;
            println!("{name} {cluster} dp{dp} tp{tp} zero{zero}: {estimated_s:.6} s, predicted {predicted_s:.6} s");
            pairs.push((estimated_s, predicted_s));
        }
    }
    pairs
}

/// The correlation of ranks; equal values share theirs.
fn spearman(pairs: &[(f64, f64)]) -> f64 {
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        let below = |x: f64| values.iter().filter(|v| **v < x).count() as f64;
        let equal = |x: f64| values.iter().filter(|v| **v == x).count() as f64;
        values.iter().map(|&x| below(x) + (equal(x) - 1.0) / 2.0).collect()
    };
    let (a, b) = (ranks(pairs.iter().map(|p| p.0).collect()), ranks(pairs.iter().map(|p| p.1).collect()));
    let mean = (pairs.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum() };
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}
