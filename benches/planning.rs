//! Seconds to plan the demo model, for small and large clusters: `cargo bench`. Each line is the best of several runs,
//! since everything else on the machine only makes a run slower.

use altiplano::planner::Silent;
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};
use std::time::Instant;

const RUNS: usize = 5;

fn main() -> Result<(), altiplano::Error> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/gpt-small-demo.mlir");
    let model = load_model(model.as_ref(), &ImportOptions::default())?;
    for cluster in ["local:1", "local:4", "local:8", "p3.16xlarge:1", "p3.16xlarge:8"] {
        let request = request(&model, load_cluster(cluster)?);
        let mut best_s = f64::INFINITY;
        for _ in 0..RUNS {
            let start = Instant::now();
            plan(&request, &Silent)?;
            best_s = best_s.min(start.elapsed().as_secs_f64());
        }
        println!("plan gpt-small-demo for {cluster:<15} {best_s:.3} s");
    }
    Ok(())
}
