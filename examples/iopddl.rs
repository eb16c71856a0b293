//! Solves an instance of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl, which
//! describes the format). It chooses one strategy per op, minimises node and edge costs, and keeps memory within a
//! limit at every time.
//!
//! `cargo run --release --example iopddl -- INSTANCE.json[.gz] --time-limit SECONDS`
//!
//! The limit covers the whole run, reading included. Lines on stdout: `cost:`, `lower_bound:`, `gap:`, `peak_usage:`,
//! seconds by phase, and last `solution:` with one strategy index per node.

use altiplano_solver::{Edge, Holding, Node, Options, Problem, SolveError, held, solve_watched};
use clap::Parser;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Parser)]
struct Arguments {
    /// A `.json` file, or one compressed as `.json.gz`.
    instance: PathBuf,
    /// Time limit of the whole run in seconds
    #[arg(long, default_value_t = 60.0)]
    time_limit: f64,
    /// Print the progress of the search to stderr
    #[arg(long)]
    verbose: bool,
}

#[derive(Deserialize)]
struct Instance {
    problem: Fields,
}

#[derive(Deserialize)]
struct Fields {
    nodes: NodeFields,
    edges: EdgeFields,
    usage_limit: Option<u64>,
}

#[derive(Deserialize)]
struct NodeFields {
    intervals: Vec<(u32, u32)>,
    costs: Vec<Vec<Cost>>,
    usages: Vec<Vec<u64>>,
}

#[derive(Deserialize)]
struct EdgeFields {
    nodes: Vec<Vec<usize>>,
    costs: Vec<Vec<Cost>>,
}

/// A cost; 10^18 and more stand for infinity.
#[derive(Clone, Copy, Deserialize)]
#[serde(from = "u64")]
struct Cost(f64);

impl From<u64> for Cost {
    fn from(cost: u64) -> Cost {
        Cost(if cost >= 1_000_000_000_000_000_000 { f64::INFINITY } else { cost as f64 })
    }
}

fn floats(costs: Vec<Cost>) -> Vec<f64> {
    costs.into_iter().map(|c| c.0).collect()
}

/// Reads an instance without holding its text in memory.
fn read(path: &PathBuf) -> Result<Problem, String> {
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let mut file = BufReader::with_capacity(1 << 20, std::fs::File::open(path).map_err(|e| told(&e))?);
    let mut magic = [0; 2];
    let started = file.read(&mut magic).map_err(|e| told(&e))?;
    let start = std::io::Cursor::new(magic).take(started as u64);
    let bytes: Box<dyn Read> = match magic == [0x1f, 0x8b] {
        true => Box::new(BufReader::with_capacity(1 << 20, flate2::read::MultiGzDecoder::new(start.chain(file)))),
        false => Box::new(start.chain(file)),
    };
    let Instance { problem } = serde_json::from_reader(bytes).map_err(|e| told(&e))?;
    let NodeFields { intervals, costs, usages } = problem.nodes;
    if intervals.len() != costs.len()
        || usages.len() != costs.len()
        || problem.edges.nodes.len() != problem.edges.costs.len()
    {
        return Err(told(&"intervals, costs and usages of nodes, or nodes and costs of edges, differ in number"));
    }
    let mut nodes: Vec<Node> = Vec::with_capacity(costs.len());
    for ((cost, bytes), (first, end)) in costs.into_iter().zip(usages).zip(intervals) {
        nodes.push(Node { cost: floats(cost), holds: vec![Holding { live: first..end.max(first), bytes }] });
    }
    let mut edges = Vec::with_capacity(problem.edges.nodes.len());
    for (e, (ends, cost)) in problem.edges.nodes.into_iter().zip(problem.edges.costs).enumerate() {
        match ends[..] {
            [from, to] => edges.push(Edge { from, to, cost: floats(cost) }),
            _ => return Err(told(&format_args!("edge {e} joins {} nodes, not two", ends.len()))),
        }
    }
    Ok(Problem { nodes, edges, limit_bytes: problem.usage_limit })
}

fn main() -> ExitCode {
    let start = Instant::now();
    let arguments = Arguments::parse();
    let problem = match read(&arguments.instance) {
        Ok(problem) => problem,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    let read_s = start.elapsed().as_secs_f64();
    // Writing the answer and freeing memory take a moment.
    let left_s = (0.96 * arguments.time_limit - read_s - 0.3).max(0.0);
    let options = Options { time_limit_s: left_s, effort: f64::MAX / 1e10, ..Options::default() };
    let mut phases: BTreeMap<&str, f64> = BTreeMap::new();
    let mut last_s = 0.0;
    let solved = solve_watched(&problem, &options, &mut |now| {
        *phases.entry(now.phase).or_default() += now.elapsed_s - last_s;
        last_s = now.elapsed_s;
        if arguments.verbose {
            let told = format!("{:9.2} s {:7} nodes {:6}", read_s + now.elapsed_s, now.phase, now.nodes);
            eprintln!("{told} cost {:.0} bound {:.0}", now.cost, now.lower_bound);
        }
    });
    match solved {
        Ok(solution) => {
            println!("cost: {}", solution.cost + 0.0);
            println!("lower_bound: {:.3}", solution.lower_bound);
            println!("gap: {:.3e}", solution.gap());
            let peak = held(&problem, &solution.choice).into_iter().map(|(_, bytes)| bytes).max();
            println!("peak_usage: {}", peak.unwrap_or(0));
            println!("read_s: {read_s:.3}");
            phases.iter().for_each(|(phase, s)| println!("{phase}_s: {s:.3}"));
            println!("total_s: {:.3}", start.elapsed().as_secs_f64());
            println!("solution: {:?}", solution.choice);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {}: {error}", arguments.instance.display());
            ExitCode::from(if matches!(error, SolveError::Malformed { .. }) { 2 } else { 1 })
        }
    }
}
