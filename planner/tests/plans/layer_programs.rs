//! A layer's integer program against brute force: the tables that stages are composed of are exact.

use crate::support::{random_steps, transformer};
use altiplano_cost_models::{Roofline, preset};
use altiplano_ir::batch::find_batch;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Reducer;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::simplify::simplify;
use altiplano_planner::intra_op::layer::{LayerTable, MemoryPrice, Variant, solve_layer, state_layer};
use altiplano_planner::intra_op::space::{AxisRoles, Spaces};
use altiplano_planner::layers::cluster_finely;
use altiplano_planner::layers::graph::LayeredGraph;
use altiplano_planner::lower::Prices;
use altiplano_solver::Problem;
use proptest::prelude::*;
use std::rc::Rc;

/// A random graph of a few ops on `[4, 6]` matrices, ending in a scalar.
fn random_graph(steps: &[(u8, u8, u8)]) -> Graph {
    let (mut g, last) = random_steps(steps);
    let loss = g.reduce(last, Reducer::Sum, &[0, 1]);
    g.outputs = vec![loss];
    simplify(&g)
}

/// The least cost over all choices; `None` if there are too many to try.
fn brute_force(problem: &Problem) -> Option<f64> {
    let sizes: Vec<usize> = problem.nodes.iter().map(|n| n.cost.len()).collect();
    let total = sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s).filter(|&n| n <= 400_000))?;
    let mut least = f64::INFINITY;
    let mut choice = vec![0; sizes.len()];
    for _ in 0..total {
        let nodes: f64 = problem.nodes.iter().zip(&choice).map(|(n, &c)| n.cost[c]).sum();
        let edges: f64 = problem.edges.iter().map(|e| e.cost[choice[e.from] * sizes[e.to] + choice[e.to]]).sum();
        least = least.min(nodes + edges);
        for (c, &size) in choice.iter_mut().zip(&sizes) {
            *c += 1;
            if *c < size {
                break;
            }
            *c = 0;
        }
    }
    Some(least)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]
    #[test]
    fn tables_are_exact(steps in prop::collection::vec((0u8..4, 0u8..8, 0u8..8), 1..4), two in any::<bool>(), zero in 0u8..4) {
        let graph = random_graph(&steps);
        let end = graph.len() as u32;
        let layered = LayeredGraph::new(graph, vec![0, end], &[], true);
        let cluster = preset("local:2").expect("a known preset");
        let mesh = if two { Mesh::new(&[("data", 2), ("tensor", 1)]) } else { Mesh::new(&[("data", 1), ("tensor", 2)]) };
        let cost = Roofline::new(cluster.groups[0].device.clone());
        let prices = Prices::new(&cost, &cluster.groups[0], (1, 2), &mesh);
        let optimizer = Optimizer::adamw();
        let model = layered.model(Some(&optimizer));
        let variant = Variant { zero, memory: MemoryPrice::Small, num_microbatches: 2, execution: Default::default() };
        let mut spaces = Spaces::new(&prices, AxisRoles::default());
        let stated = state_layer(&model, 0..end, &mut spaces, variant);
        let Some(expected) = brute_force(&stated.problem) else { return Ok(()) };
        let solved = solve_layer(&model, 0..end, &mut spaces, variant).expect("a layer that can be run");
        let (cost, terms) = solved.boundary.entries[0][0].expect("a finite entry");
        prop_assert!((cost - expected).abs() <= 1e-9 * expected, "{cost} {expected}");
        // The terms add up to the objective.
        let sum = variant.objective_s(&terms, &cluster.groups[0].device);
        prop_assert!((sum - cost).abs() <= 1e-9 * cost, "{sum} {cost}");
    }
}

#[test]
fn enough_random_programs_are_small_enough_to_try_all_choices() {
    let graph = random_graph(&[(2, 0, 0), (0, 0, 1)]);
    let end = graph.len() as u32;
    let layered = LayeredGraph::new(graph, vec![0, end], &[], true);
    let cluster = preset("local:2").expect("a known preset");
    let cost = Roofline::new(cluster.groups[0].device.clone());
    let prices = Prices::new(&cost, &cluster.groups[0], (1, 2), &Mesh::new(&[("data", 2), ("tensor", 1)]));
    let optimizer = Optimizer::adamw();
    let model = layered.model(Some(&optimizer));
    let mut spaces = Spaces::new(&prices, AxisRoles::default());
    let variant = Variant { zero: 0, memory: MemoryPrice::Small, num_microbatches: 1, execution: Default::default() };
    assert!(brute_force(&state_layer(&model, 0..end, &mut spaces, variant).problem).is_some());
}

/// The value that a layer hands on is kept, so that the backward pass needs nothing that leads only there.
#[test]
fn full_recomputation_repeats_no_product_that_only_leaves_its_layer() {
    let graph = simplify(&find_batch(&transformer(3), &[Some(0), Some(0)]).graph);
    let starts = cluster_finely(&graph, usize::MAX);
    let layered = LayeredGraph::new(graph, starts, &[], true);
    let model = layered.model(None);
    let products = |repeated: bool| {
        let is_product = |v: &ValueId| layered.graph.node(*v).op.is_contraction();
        layered.graph.values().filter(is_product).filter(|v| model.repeated[v.index()] == repeated).collect::<Vec<_>>()
    };
    let adds = |v: &ValueId| layered.users[v.index()].iter().all(|u| layered.graph.node(*u).op.name() == "add");
    let (again, once) = (products(true), products(false));
    assert!(again.len() > once.len() && once.len() >= 3, "{again:?} {once:?}");
    let leaves = |v: &ValueId| {
        let layer = |v: &ValueId| layered.layer_of[v.index()];
        layered.users[v.index()].iter().any(|u| layered.users[u.index()].iter().any(|user| layer(user) != layer(v)))
    };
    assert!(once.iter().filter(|v| adds(v) && leaves(v)).count() >= 3, "{once:?}");
}

/// One value passes between blocks of a transformer, so solving each block alone loses nothing.
#[test]
fn tables_of_blocks_make_those_of_layers() {
    let graph = simplify(&find_batch(&transformer(6), &[Some(0), Some(0)]).graph);
    let blocks = cluster_finely(&graph, usize::MAX);
    let starts = cluster_finely(&graph, 3);
    let layered = LayeredGraph::new(graph, starts.clone(), &[], true).with_units(blocks);
    let cluster = preset("local:4").expect("a known preset");
    let cost = Roofline::new(cluster.groups[0].device.clone());
    let optimizer = Optimizer::adamw();
    let model = layered.model(Some(&optimizer));
    for (data, tensor, zero) in [(4, 1, 1), (2, 2, 1), (2, 2, 3), (1, 4, 0)] {
        let mesh = Mesh::new(&[("data", data), ("tensor", tensor)]);
        let prices = Prices::new(&cost, &cluster.groups[0], (1, 4), &mesh);
        let mut spaces = Spaces::new(&prices, AxisRoles::default());
        let variant = Variant { zero, memory: MemoryPrice::Small, num_microbatches: 2, execution: Default::default() };
        let mut joined_layers = 0;
        for l in 0..layered.layers.len() {
            let units = layered.units_of(l);
            if units.len() == 1 {
                continue;
            }
            joined_layers += 1;
            let table = |range| Rc::new(solve_layer(&model, range, &mut spaces, variant).expect("a table"));
            let parts: Vec<Rc<LayerTable>> = units.iter().map(|unit| unit.range.clone()).map(table).collect();
            let joined = LayerTable::joined(parts).expect("blocks that follow each other");
            let whole = solve_layer(&model, starts[l]..starts[l + 1], &mut spaces, variant).expect("a table");
            assert_eq!(
                (&joined.boundary.in_layouts, &joined.boundary.out_layouts),
                (&whole.boundary.in_layouts, &whole.boundary.out_layouts)
            );
            for (i, (of_joined, of_whole)) in joined.boundary.entries.iter().zip(&whole.boundary.entries).enumerate() {
                for (o, (joined_entry, whole_entry)) in of_joined.iter().zip(of_whole).enumerate() {
                    let (Some((cost, terms)), Some((expected, of_whole))) = (joined_entry, whole_entry) else {
                        assert_eq!(joined_entry.is_some(), whole_entry.is_some(), "{mesh}: {i} to {o}");
                        continue;
                    };
                    assert!((cost - expected).abs() <= 1e-9 * expected, "{mesh}: {i} to {o}: {cost} {expected}");
                    let sum = variant.objective_s(terms, &cluster.groups[0].device);
                    assert!((sum - cost).abs() <= 1e-9 * cost, "{sum} {cost}");
                    assert_eq!(terms.entering_bytes, of_whole.entering_bytes);
                    // If several strategies have the same cost, either may be chosen.
                    let off = (terms.kept_bytes - of_whole.kept_bytes).abs();
                    assert!(off <= 0.02 * of_whole.kept_bytes, "{} {}", terms.kept_bytes, of_whole.kept_bytes);
                    let choices = joined.choices(i, o);
                    let chosen = choices.iter().zip(&units).all(|(c, u)| c.strategies.len() == u.layer.nodes.len());
                    assert!(choices.len() == units.len() && chosen);
                }
            }
        }
        assert!(joined_layers > 0);
    }
}
