//! A stage's integer program against brute force, against the tables of layers, and against the memory of lowered
//! programs. Also plans in which each parameter is stored in its own way.

use crate::support::{assert_computes_the_same, random_steps, transformer};
use altiplano_cost_models::{Roofline, preset};
use altiplano_ir::batch::{LossKind, find_batch, rebatch};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Op, Parameter, Reducer};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Execution, Plan, Schedule};
use altiplano_ir::recompute::{Recomputation, Recompute};
use altiplano_ir::simplify::simplify;
use altiplano_ir::types::TensorType;
use altiplano_planner::intra_op::layer::{MemoryPrice, Variant, solve_layer};
use altiplano_planner::intra_op::space::{AxisRoles, Spaces};
use altiplano_planner::intra_op::stage::{Demand, StageProgram, StageSolution, gradient_readers, state_stage};
use altiplano_planner::layers::graph::LayeredGraph;
use altiplano_planner::lower::{DedupedPrograms, Prices};
use altiplano_planner::predict::memory::cpu_peaks;
use altiplano_planner::refine::{as_given, levels};
use altiplano_planner::{Request, Silent, plan, predict, programs};
use altiplano_solver::{Node, Options, SolveError};
use proptest::prelude::*;

/// A random graph of a few ops on `[4, 6]` matrices, ending in a scalar.
fn random_graph(steps: &[(u8, u8, u8)]) -> Graph {
    let (mut g, last) = random_steps(steps);
    // The weights come last, so that every graph has a gradient.
    let w = g.emit(Op::Parameter(Parameter::new("last", TensorType::new(DType::F32, vec![4, 6]))), &[]);
    let last = g.mul(last, w);
    let loss = g.reduce(last, Reducer::Sum, &[0, 1]);
    g.outputs = vec![loss];
    simplify(&g)
}

/// Every choice with its cost and peak bytes, counted point by point; `None` if there are too many to try.
fn all_choices(program: &StageProgram) -> Option<Vec<(f64, u64)>> {
    let problem = &program.problem;
    let sizes: Vec<usize> = problem.nodes.iter().map(|n| n.cost.len()).collect();
    let total = sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s).filter(|&n| n <= 60_000))?;
    let mut all = Vec::with_capacity(total);
    let mut choice = vec![0; sizes.len()];
    for _ in 0..total {
        let nodes: f64 = problem.nodes.iter().zip(&choice).map(|(n, &c)| n.cost[c]).sum();
        let edges: f64 = problem.edges.iter().map(|e| e.cost[choice[e.from] * sizes[e.to] + choice[e.to]]).sum();
        all.push((nodes + edges, most_bytes(program, &choice)));
        for (c, &size) in choice.iter_mut().zip(&sizes) {
            *c += 1;
            if *c < size {
                break;
            }
            *c = 0;
        }
    }
    Some(all)
}

fn most_bytes(program: &StageProgram, choice: &[usize]) -> u64 {
    let held = |point: u32| -> u64 {
        let of = |(node, &c): (&Node, &usize)| -> u64 {
            node.holds.iter().filter(|h| h.live.contains(&point)).map(|h| h.bytes[c]).sum()
        };
        program.problem.nodes.iter().zip(choice).map(of).sum()
    };
    (0..program.num_points).map(held).max().unwrap_or(0)
}

/// Calls `check` with the problem of a whole graph on a mesh.
fn with_program<T>(
    graph: &Graph,
    mesh: &Mesh,
    demand: &Demand,
    check: impl FnOnce(&StageProgram, &LayeredGraph, &mut Spaces<'_>) -> T,
) -> T {
    let layered = LayeredGraph::new(graph.clone(), vec![0, graph.len() as u32], &[], true);
    let cluster = preset("local:8").expect("a known preset");
    let cost = Roofline::new(cluster.groups[0].device.clone());
    let prices = Prices::new(&cost, &cluster.groups[0], (1, mesh.num_devices()), mesh);
    let optimizer = Optimizer::adamw();
    let mut spaces = Spaces::new(&prices, AxisRoles::default());
    let readers = gradient_readers(graph, &[]).expect("a gradient");
    let model = layered.model(Some(&optimizer));
    let program = state_stage(&model, &readers, 0..graph.len() as u32, &mut spaces, demand);
    check(&program, &layered, &mut spaces)
}

fn demand(levels: Vec<u8>) -> Demand {
    Demand {
        levels,
        num_microbatches: 2,
        in_flight: 2,
        recompute: Recomputation::default(),
        first_layer: 0,
        execution: Execution::default(),
    }
}

/// Compares the solver with the best of all choices within a limit.
fn check_limit(program: &StageProgram, all: &[(f64, u64)], limit: u64) -> Result<(), TestCaseError> {
    let within = all.iter().filter(|(cost, bytes)| cost.is_finite() && *bytes <= limit).map(|c| c.0);
    let best = within.fold(f64::INFINITY, f64::min);
    match program.solve(Some(limit), &Options::default()) {
        Ok(StageSolution { cost_s, lower_bound_s, most_bytes, .. }) => {
            prop_assert!((cost_s - best).abs() <= 1e-9 * best, "{cost_s} {best}");
            // The solver stops at a gap of 1e-9, and sums are rounded.
            prop_assert!(lower_bound_s <= cost_s && lower_bound_s >= best * (1.0 - 2e-9), "{lower_bound_s} {best}");
            prop_assert!(most_bytes <= limit, "{most_bytes} {limit}");
        }
        Err(SolveError::Infeasible | SolveError::MemoryInfeasible { .. }) => prop_assert!(best == f64::INFINITY),
        Err(error) => prop_assert!(false, "{error}"),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]
    #[test]
    fn stages_are_solved_exactly(
        steps in prop::collection::vec((0u8..4, 0u8..8, 0u8..8), 0..3),
        two in any::<bool>(),
        recompute in 0..3usize,
        parts in 0u64..5,
    ) {
        let graph = random_graph(&steps);
        let mesh = if two { Mesh::new(&[("data", 2), ("tensor", 1)]) } else { Mesh::new(&[("data", 1), ("tensor", 2)]) };
        let recompute = Recomputation::Alike(Recompute::ALL[recompute]);
        let demand = Demand { recompute, ..demand(vec![0, 1, 2, 3]) };
        with_program(&graph, &mesh, &demand, |program, _, _| {
            let Some(all) = all_choices(program) else { return Ok(()) };
            // From the bytes of the fastest choice down to the least of any choice, and a byte less.
            let fastest = all.iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("a choice");
            let least = all.iter().filter(|c| c.0.is_finite()).map(|c| c.1).min().expect("an allowed choice");
            check_limit(program, &all, u64::MAX)?;
            check_limit(program, &all, least + (fastest.1.max(least) - least) * parts / 4)?;
            check_limit(program, &all, least.saturating_sub(1))
        })?;
    }

    /// A stage of one layer costs as much as the layer, on meshes of one, two and three axes.
    #[test]
    fn a_stage_of_one_layer_costs_what_the_layer_costs(
        steps in prop::collection::vec((0u8..4, 0u8..8, 0u8..8), 0..8),
        zero in 0u8..4,
        axes in 1usize..4,
    ) {
        let graph = random_graph(&steps);
        let mesh = Mesh::new(&[("data", 2), ("tensor", 2), ("context", 2)][..axes]);
        let variant = Variant { zero, memory: MemoryPrice::None, num_microbatches: 2, execution: Execution::default() };
        with_program(&graph, &mesh, &demand(vec![zero]), |program, layered, spaces| {
            let optimizer = Optimizer::adamw();
            let model = layered.model(Some(&optimizer));
            let table = solve_layer(&model, 0..graph.len() as u32, spaces, variant).expect("a layer that can be run");
            let (cost, _) = table.boundary.entries[0][0].expect("a finite entry");
            let stage = program.solve(None, &Options::default()).expect("a stage that can be run");
            prop_assert!((cost - stage.cost_s).abs() <= 1e-9 * cost, "{cost} {}", stage.cost_s);
            // Storage that each parameter chooses for itself is no worse than one level for all.
            let free = state_stage(&model, &[], 0..graph.len() as u32, spaces, &demand(vec![0, 1, 2, 3]));
            let free = free.solve(None, &Options::default()).expect("a stage that can be run");
            prop_assert!(free.cost_s <= stage.cost_s * (1.0 + 1e-9), "{} {}", free.cost_s, stage.cost_s);
            Ok(())
        })?;
    }
}

#[test]
fn enough_random_stages_are_small_enough_to_try_all_choices() {
    let graph = random_graph(&[(2, 0, 0)]);
    let mesh = Mesh::new(&[("data", 2), ("tensor", 1)]);
    let choices = with_program(&graph, &mesh, &demand(vec![0, 1, 2, 3]), |program, _, _| all_choices(program));
    let choices = choices.expect("few enough to try");
    // Memory matters: the fastest choice is not the one that holds least.
    let fastest = choices.iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("a choice");
    assert!(choices.iter().any(|c| c.0.is_finite() && c.1 < fastest.1));
}

fn request(cluster: &str) -> Request {
    let batched = find_batch(&transformer(2), &[Some(0), Some(0)]);
    let graph = simplify(&batched.graph);
    let mut request = Request::new("transformer", graph, batched.loss, preset(cluster).expect("a known preset"));
    request.training.optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    request.baselines = false;
    assert_eq!(request.loss, LossKind::Mean);
    request
}

fn assert_right(request: &Request, plan: &Plan) {
    assert!(plan.verify().is_empty(), "{:?}", plan.verify());
    let read = Plan::from_json(&plan.to_json()).expect("a plan that was written can be read");
    assert!(read == *plan, "a plan must read back as it was written");
    let lowered = programs(plan).expect("programs");
    let whole = rebatch(&request.graph, plan.global_batch).expect("the traced batch");
    assert_computes_the_same(plan, &lowered, &whole, 12.0);
}

/// In one stage, parameters are in turn whole, with sharded state, with sharded gradients, and sharded themselves.
#[test]
fn every_parameter_may_be_stored_in_its_own_way() {
    for (dp, tp, pp) in [(4, 1, 1), (2, 2, 1), (2, 1, 2)] {
        let mut request = request(&format!("local:{}", dp * tp * pp));
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
        (request.degrees.zero, request.batch.num_microbatches) = (Some(1), Some(2));
        let plan = plan(&request, &Silent).expect("a plan");
        for first in 0..4 {
            let mut mixed = plan.clone();
            for stage in &mut mixed.stages {
                for (i, storage) in stage.parameters.values_mut().enumerate() {
                    match (first + i) % 4 {
                        0 => storage.state = storage.parameter.clone(),
                        1 => {}
                        level => {
                            storage.gradient = storage.state.clone();
                            storage.parameter = if level == 3 { &storage.state } else { &storage.parameter }.clone();
                        }
                    }
                }
            }
            assert_right(&request, &mixed);
        }
    }
}

/// Compares the memory that a stage's problem states with that of the CPU runtime.
#[test]
fn memory_is_estimated() {
    use Recompute::{Full as FULL, None as KEPT, Selective as SELECTIVE};
    let mut ratios = Vec::new();
    for (dp, tp, pp) in [(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 1, 2)] {
        for (zero, recompute) in [(0, KEPT), (1, KEPT), (1, SELECTIVE), (2, FULL), (3, KEPT), (3, SELECTIVE), (3, FULL)]
        {
            let mut request = request(&format!("local:{}", dp * tp * pp));
            (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
            (request.degrees.zero, request.recompute, request.batch.num_microbatches) =
                (Some(zero), Some(recompute), Some(2));
            (request.schedule, request.degrees.virtual_stages) = (Some(Schedule::OneFOneB), Some(1));
            request.training.optimizer = Optimizer::adamw();
            let mut plan = plan(&request, &Silent).expect("a plan");
            let lowered = programs(&plan).expect("programs");
            let cost = Roofline::new(request.cluster.groups[0].device.clone());
            predict::predict(&mut plan, &DedupedPrograms::whole(&lowered), &cost);
            let layered = LayeredGraph::new(plan.graph.clone(), plan.layers.clone(), &[], true);
            let readers = gradient_readers(&plan.graph, &[]).expect("a gradient");
            for ((i, stage), held) in plan.stages.iter().enumerate().zip(cpu_peaks(&lowered)) {
                let prices = Prices::new(&cost, &request.cluster.groups[0], stage.submesh, &stage.mesh);
                let roles = AxisRoles { data_axes: 1, model_axis: Some(AxisId(1)), ..AxisRoles::default() };
                let mut spaces = Spaces::new(&prices, roles);
                let demand = Demand {
                    levels: levels(Some(zero), stage.mesh.num_devices(), true, Default::default()),
                    num_microbatches: 2,
                    in_flight: plan.schedule.in_flight(2, plan.stages.len() as u32, i as u32),
                    recompute: Recomputation::Alike(recompute),
                    first_layer: plan.stages[i].layers.start,
                    execution: plan.execution,
                };
                let model = layered.model(Some(&request.training.optimizer));
                let range = plan.layers[stage.layers.start as usize]..plan.layers[stage.layers.end as usize];
                let program = state_stage(&model, &readers, range, &mut spaces, &demand);
                let given = as_given(&program, &plan.graph, stage, &mut spaces).expect("a plan's own shardings");
                let ratio = given.most_bytes as f64 / held as f64;
                println!(
                    "dp{dp} tp{tp} pp{pp} zero{zero} {recompute} stage{i}: {} of {held}, {ratio:.3}",
                    given.most_bytes
                );
                ratios.push(ratio);
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!("{:.3} to {:.3}, half at most {:.3}", ratios[0], ratios[ratios.len() - 1], ratios[ratios.len() / 2]);
    assert!(ratios[0] >= 0.7 && ratios[ratios.len() - 1] <= 1.4, "{ratios:?}");
}
