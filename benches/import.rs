//! Seconds to import and to simplify models, and the most memory held: `cargo bench --bench import -- FILE.mlir ...`, by
//! default the demo model. Each line is the median of several runs in one process.

use altiplano::ir::simplify::simplify;
use altiplano_import::stablehlo::import;
use std::time::Instant;

const RUNS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/gpt-small-demo.mlir");
    let mut files: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    if files.is_empty() {
        files.push(demo.to_string());
    }
    for file in files {
        let text = std::fs::read_to_string(&file)?;
        let (mut import_s, mut simplify_s, mut nodes) = (Vec::new(), Vec::new(), 0);
        for _ in 0..RUNS {
            let start = Instant::now();
            let imported = import(&text)?;
            import_s.push(start.elapsed().as_secs_f64());
            nodes = imported.graph.len();
            let start = Instant::now();
            simplify(&imported.graph);
            simplify_s.push(start.elapsed().as_secs_f64());
        }
        println!(
            "{file}: {nodes} nodes, import {:.3} s, simplify {:.3} s, most memory so far {} MB",
            median(&mut import_s),
            median(&mut simplify_s),
            peak_memory_kb() / 1000
        );
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Linux says how much a process has held at most; elsewhere 0.
fn peak_memory_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse().ok()).unwrap_or(0)
}
