//! How the search's estimates stand to the judge's: `cargo bench --bench search_prices -- FOLDER_OR_MODEL ...`.
//!
//! For each model and cluster, one line for the plan that is chosen and the seconds that took, and one for each way of dealing
//! the devices out to data and tensor parallelism at ZeRO 0, 1 and 3: the best layout's estimate and its judged step. The last
//! line of a pair says how the two rank these ways alike (Spearman's coefficient).

use altiplano::cost_models::Roofline;
use altiplano::planner::assemble::{Parts, assemble};
use altiplano::planner::inter_op::search::{Freedom, search};
use altiplano::planner::lower::Sketch;
use altiplano::planner::model::Layered;
use altiplano::planner::predict::predict;
use altiplano::planner::{Request, Silent, layers};
use altiplano::{Error, ImportOptions, load_cluster, load_model, plan, programs, request};
use altiplano_ir::recompute::Recompute;
use std::path::PathBuf;
use std::sync::Arc;
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

/// Estimated and judged seconds of the best layouts of each combination of degrees.
fn sweep(name: &str, cluster: &str, request: &Request) -> Vec<(f64, f64)> {
    let devices = request.cluster.num_devices();
    let cost = Roofline::new(request.cluster.groups[0].device.clone());
    let starts = layers::cluster(&request.graph);
    let layered = Arc::new(Layered::new(request.graph.clone(), starts, &request.stop_gradients, request.trains()));
    let mut pairs = Vec::new();
    for dp in (1..=devices).filter(|dp| devices % dp == 0) {
        for zero in [0, 1, 3] {
            let freedom = Freedom {
                streams: false,
                dp: Some(dp),
                tp: Some(devices / dp),
                pp: Some(1),
                zero: Some(zero),
                recompute: Some(Recompute::None),
                schedules: vec![request.schedule.unwrap_or(altiplano::ir::plan::Schedule::OneFOneB)],
                virtual_stages: request.virtual_stages,
                zero_bubble: false,
                num_microbatches: vec![1],
                all_devices: true,
                memory_bytes: vec![u64::MAX],
                only_group: None,
                lean: false,
                alpa: false,
            };
            let searched = search(request, &freedom, &cost, &|_| Some(layered.clone()), &Silent);
            let Ok(found) = searched.ranked(request, &freedom, &Default::default()) else { continue };
            let Some(found) = found.first() else { continue };
            let parts = Parts {
                layered: &found.candidates.layered,
                num_microbatches: 1,
                schedule: found.schedule,
                virtual_stages: found.virtual_stages,
                stages: &found.stages,
            };
            let Ok(mut plan) = assemble(request, &parts, &cost) else { continue };
            let Ok(programs) = programs(&plan) else { continue };
            predict(&mut plan, &Sketch::whole(&programs), &cost);
            let (search_s, judge_s) = (found.step_s, plan.predicted.step_time_s);
            println!("{name} {cluster} dp{dp} tp{} zero{zero}: {search_s:.6} s, judged {judge_s:.6} s", devices / dp);
            pairs.push((search_s, judge_s));
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
