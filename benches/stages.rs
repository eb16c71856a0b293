//! Seconds to state and to solve the sharding of whole models on one mesh as one problem, and how near to the best the answer is:
//! `cargo bench --bench stages -- FOLDER`, with the models that are measured in FOLDER. Each model is solved as fast as it can be
//! and then within the memory of its devices; a whole training step is also taken as it is written, gradients and updates as ops
//! like any others.

use altiplano::ir::graph::Graph;
use altiplano::ir::mesh::Mesh;
use altiplano::ir::op::{Input, Op, Parameter};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::Execution;
use altiplano::ir::simplify::simplify;
use altiplano::planner::intra_op::space::{AxisRoles, Spaces};
use altiplano::planner::intra_op::stage::{Demand, gradient_readers, state_stage};
use altiplano::planner::layers::cluster;
use altiplano::planner::layers::graph::LayeredGraph;
use altiplano::planner::lower::Prices;
use altiplano::planner::refine::levels;
use altiplano::{ImportOptions, load_all_results, load_cluster, load_model};
use altiplano_cost_models::Roofline;
use altiplano_solver::Options;
use altiplano_transforms::training_step::updated_leaves;
use std::path::Path;
use std::time::Instant;

/// A model, the nodes and the devices of each of the mesh that it is put on, and whether its results are all planned as written.
const CASES: [(&str, u32, u32, bool); 5] = [
    ("gpt3-39b.mlir", 8, 8, false),
    ("moe-2.4b.mlir", 2, 8, false),
    ("wresnet50-1b.mlir", 2, 8, false),
    ("gpt2-small-train-step.mlir", 2, 8, false),
    ("gpt2-small-train-step.mlir", 2, 8, true),
];

/// A tenth of the gap that is asked of whole models.
const OPTIONS: Options = Options { time_limit_s: f64::INFINITY, effort: 10.0, gap: 1e-4 };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let Some(folder) = arguments.first() else {
        println!("no folder of models is given, so nothing is measured");
        return Ok(());
    };
    println!("| model | mesh | memory | ops | nodes | edges | entries | state s | solve s | cost s | bound s | gap |");
    println!("|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let wanted = |name: &str| arguments.len() == 1 || arguments[1..].iter().any(|a| name.contains(a.as_str()));
    for (name, nodes, devices, as_written) in CASES.into_iter().filter(|c| wanted(c.0)) {
        let file = Path::new(folder).join(name);
        let graph = match as_written {
            true => whole_step(&file)?,
            false => load_model(&file, &ImportOptions::default())?.graph,
        };
        measure(name, graph, nodes, devices, !as_written)?;
    }
    Ok(())
}

/// A training step with all its results, in which what is updated is a parameter.
fn whole_step(file: &Path) -> Result<Graph, Box<dyn std::error::Error>> {
    let options = ImportOptions { as_written: true, ..ImportOptions::default() };
    let mut graph = load_all_results(file, &options)?.graph;
    for v in updated_leaves(&graph) {
        let op = &mut graph.nodes[v.index()].op;
        if let Op::Input(Input { name, ty }) = op.clone() {
            *op = Op::Parameter(Parameter::new(name, ty));
        }
    }
    Ok(simplify(&graph))
}

fn measure(name: &str, graph: Graph, nodes: u32, devices: u32, trains: bool) -> Result<(), Box<dyn std::error::Error>> {
    let cluster_of = load_cluster(&format!("p3.16xlarge:{nodes}"))?;
    let group = &cluster_of.groups[0];
    let starts = cluster(&graph);
    let layered = LayeredGraph::new(graph, starts, &[], trains);
    let readers = if trains { gradient_readers(&layered.graph, &[])? } else { Vec::new() };
    let cost = Roofline::new(group.device.clone());
    let mesh = Mesh::new(&[("data", nodes), ("tensor", devices)]);
    let prices = Prices::new(&cost, group, (nodes, devices), &mesh);
    let optimizer = Optimizer::adamw();
    let model = layered.model(trains.then_some(&optimizer));
    let demand = Demand {
        levels: levels(None, mesh.num_devices(), trains, Default::default()),
        num_microbatches: 1,
        in_flight: 1,
        recompute: Default::default(),
        first_layer: 0,
        execution: Execution::default(),
    };
    let start = Instant::now();
    let mut spaces = Spaces::new(&prices, AxisRoles::default());
    let range = 0..layered.graph.len() as u32;
    let program = state_stage(&model, &readers, range.clone(), &mut spaces, &demand);
    let state_s = start.elapsed().as_secs_f64();
    for (limit, memory) in [(None, "any"), (Some(group.device.memory_bytes), "16 GB")] {
        let start = Instant::now();
        let solved = program.solve(limit, &OPTIONS);
        let solve_s = start.elapsed().as_secs_f64();
        let answer = match solved {
            Ok(s) => {
                let gap = (s.cost_s - s.lower_bound_s).max(0.0) / s.cost_s;
                let held = s.most_bytes as f64 / 1e9;
                format!("{:.6} | {:.6} | {:.4} % ({held:.2} GB)", s.cost_s, s.lower_bound_s, 100.0 * gap)
            }
            Err(error) => format!("{error} | | "),
        };
        println!(
            "| {name}{} | {nodes}x{devices} | {memory} | {} | {} | {} | {} | {state_s:.3} | {solve_s:.3} | {answer} |",
            if trains { "" } else { ", as written" },
            model.nodes(&range).len(),
            program.problem.nodes.len(),
            program.problem.edges.len(),
            program.num_entries(),
        );
    }
    Ok(())
}
