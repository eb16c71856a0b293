//! From what the search chose to a plan: strategies and storage of every stage, written out.

use crate::inter_op::compose::chains;
use crate::inter_op::search::{ChosenStage, layer_tables};
use crate::inter_op::submesh::place;
use crate::intra_op::layer::LayerTable;
use crate::intra_op::space::{Spaces, batch_factors, batch_layout};
use crate::lower::Prices;
use crate::model::Layered;
use crate::request::{PlanFailure, Request};
use altiplano_cost_models::CostModel;
use altiplano_ir::graph::ValueId;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Op, Reducer};
use altiplano_ir::plan::{
    FORMAT, Plan, Predicted, Schedule, Stage, StagePredicted, Storage, VERSION, ValueSharding, graph_hash,
};
use altiplano_ir::rule::AxisUse;
use altiplano_ir::sharding::Sharding;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What a plan is made of.
pub struct Parts<'a> {
    pub layered: &'a Layered,
    pub num_microbatches: u32,
    pub schedule: Schedule,
    pub stages: &'a [ChosenStage],
}

/// Writes a plan out, predictions left open.
pub fn assemble(request: &Request, parts: &Parts<'_>, cost: &dyn CostModel) -> Result<Plan, PlanFailure> {
    let group = &request.cluster.groups[0];
    let shapes: Vec<_> = parts.stages.iter().map(|s| s.shape).collect();
    let Some(placement) = place(&shapes, group.nodes, group.devices_per_node) else {
        return Err(PlanFailure::NoCombination);
    };
    let stages = parts
        .stages
        .iter()
        .zip(placement)
        .map(|(chosen, devices)| stage(request, parts.layered, cost, chosen, devices))
        .collect::<Option<Vec<Stage>>>()
        .ok_or(PlanFailure::NoCombination)?;
    let graph = parts.layered.graph.clone();
    let unit = if graph.batch == 0 { 1 } else { graph.batch };
    Ok(Plan {
        format: FORMAT.into(),
        version: VERSION,
        model: request.model.clone(),
        graph_hash: graph_hash(&graph),
        cluster: request.cluster.clone(),
        global_batch: unit * parts.num_microbatches as u64,
        num_microbatches: parts.num_microbatches,
        microbatch: unit,
        schedule: parts.schedule,
        optimizer: request.optimizer,
        execution: request.execution,
        loss: request.loss,
        stop_gradients: request.stop_gradients.clone(),
        reduction: request.reduction,
        profile: None,
        predicted: Predicted::default(),
        alternatives: Vec::new(),
        layers: parts.layered.starts.clone(),
        stages,
        graph,
    })
}

fn stage(
    request: &Request,
    layered: &Layered,
    cost: &dyn CostModel,
    chosen: &ChosenStage,
    devices: Vec<u32>,
) -> Option<Stage> {
    let graph = &layered.graph;
    let group = &request.cluster.groups[0];
    let way = &chosen.way;
    let submesh = (chosen.shape.nodes, chosen.shape.devices);
    let prices = Prices::new(cost, group, submesh, &way.mesh);
    let mut spaces = Spaces::new(&prices, way.roles);
    // Solved again: the search keeps only what it cost. The same input gives the same answer.
    let tables = layer_tables(layered, request, &mut spaces, way.variant)?;
    let kinds = &layered.kinds[chosen.layers.clone()];
    let chain = chains(kinds, &tables).into_iter().next()?.into_iter().next_back()?;
    let of_layers: Vec<_> = kinds.iter().map(|&k| tables[k].clone()).collect();
    let path = chain.path(&of_layers);

    let mesh = named(layered, &of_layers, &path, &way.mesh);
    let mut shardings = BTreeMap::new();
    let mut base: BTreeMap<ValueId, Sharding> = BTreeMap::new();
    let mut partial: BTreeMap<ValueId, BTreeSet<AxisId>> = BTreeMap::new();
    let mut receives = BTreeMap::new();
    for ((l, table), &(i, o)) in chosen.layers.clone().zip(&of_layers).zip(&path) {
        let layer = &layered.layers[l];
        let model_layer = &layered.layers[layered.representatives[layered.kinds[l]]];
        let choice = table.choice(i, o);
        for (v, picked) in choice.strategies {
            let at = model_layer.nodes.binary_search(&v).ok()?;
            let value = layer.nodes[at];
            let rule = graph.rule(value);
            let result = rule.shardings(&picked.strategy, &way.mesh).result;
            for (k, operand) in graph.node(value).operands.iter().enumerate() {
                let axes = spaces.layout(picked.cotangents[k]).partial.iter().map(|p| p.0);
                partial.entry(*operand).or_default().extend(axes);
            }
            shardings.insert(
                value,
                ValueSharding {
                    name: graph.node(value).name.clone(),
                    sharding: result.display(&mesh).to_string(),
                    strategy: picked.strategy,
                },
            );
        }
        for (p, layout) in choice.parameters {
            let at = model_layer.parameters.iter().position(|q| *q == p)?;
            // Where several layers use a parameter, the first decides how it is kept.
            base.entry(layer.parameters[at]).or_insert_with(|| spaces.layout(layout).clone());
        }
        for &v in layer.entering.iter().filter(|v| v.0 < layered.starts[chosen.layers.start]) {
            let main = layer.entering.iter().copied().max_by_key(|&v| (graph.ty(v).bytes(), std::cmp::Reverse(v.0)));
            let sharding = match table.in_layouts.get(i) {
                Some(&layout) if main == Some(v) && l == chosen.layers.start => spaces.layout(layout).clone(),
                _ => batch_layout(graph.ty(v), graph.node(v).batch_dims, &way.mesh),
            };
            receives.entry(v).or_insert(sharding);
        }
    }
    // A sum that is left partial stays so through conversions and the like, on its way to the parameter that they read.
    for (&value, sharding) in shardings.iter().rev() {
        let rule = graph.rule(value);
        let (&[operand], true) = (graph.node(value).operands.as_slice(), rule.linear.iter().any(|set| set == &[0]))
        else {
            continue;
        };
        let passed: Vec<AxisId> = partial.get(&value).into_iter().flatten().copied().collect();
        let idle = |a: &AxisId| sharding.strategy.0.get(a.0 as usize) == Some(&AxisUse::Replicated);
        partial.entry(operand).or_default().extend(passed.into_iter().filter(idle));
    }
    // A parameter that nothing uses is kept by the first stage, so that it is not lost.
    if chosen.layers.start == 0 {
        for (p, _) in graph.parameters().filter(|(p, _)| layered.users[p.index()].is_empty()) {
            base.insert(p, Sharding::replicated(graph.shape(p)));
        }
    }
    let mut parameters = BTreeMap::new();
    for (p, layout) in base {
        let Op::Parameter(parameter) = &graph.node(p).op else { continue };
        let id = spaces.intern(layout.clone());
        let finest = spaces.storage_layout(id);
        let finest = spaces.layout(finest).clone();
        let zero = way.variant.zero;
        let mut gradient = if zero >= 2 { finest.clone() } else { layout.clone() };
        let split: Vec<AxisId> = gradient.split_axes().collect();
        let axes = partial.get(&p).into_iter().flatten().filter(|a| !split.contains(a));
        if zero < 2 {
            gradient.partial = axes.map(|&a| (a, Reducer::Sum)).collect();
        }
        let storage = Storage {
            parameter: if zero == 3 { finest.clone() } else { layout.clone() },
            gradient,
            state: if zero >= 1 { finest } else { layout },
        };
        parameters.insert(parameter.name.clone(), storage);
    }
    Some(Stage {
        layers: chosen.layers.start as u32..chosen.layers.end as u32,
        submesh,
        devices,
        mesh,
        recompute: way.recompute,
        zero: way.variant.zero,
        shardings,
        parameters,
        receives,
        predicted: StagePredicted::default(),
    })
}

/// The mesh with axes named for what they do: `data` where most matmul work on them splits the batch, else `tensor`.
fn named(layered: &Layered, tables: &[Rc<LayerTable>], path: &[(usize, usize)], mesh: &Mesh) -> Mesh {
    let graph = &layered.graph;
    let mut batch_flop = vec![0.0; mesh.axes.len()];
    let mut model_flop = vec![0.0; mesh.axes.len()];
    for (table, &(i, o)) in tables.iter().zip(path) {
        for (v, picked) in table.choice(i, o).strategies {
            if !graph.node(v).op.is_contraction() {
                continue;
            }
            let is_batch = batch_factors(graph, v, &graph.rule(v));
            for (axis, use_) in picked.strategy.0.iter().enumerate() {
                if let AxisUse::Factor { factor, .. } = use_ {
                    let side = if is_batch[*factor as usize] { &mut batch_flop } else { &mut model_flop };
                    side[axis] += graph.flop(v) as f64;
                }
            }
        }
    }
    let mut named = mesh.clone();
    let mut used: BTreeSet<String> = BTreeSet::new();
    let does_nothing = |a: &usize| batch_flop[*a] == 0.0 && model_flop[*a] == 0.0;
    let mut order: Vec<usize> = (0..mesh.axes.len()).collect();
    order.sort_by_key(does_nothing);
    for a in order {
        let is_data = if does_nothing(&a) { !used.contains("data") } else { batch_flop[a] >= model_flop[a] };
        let base = if is_data { "data" } else { "tensor" };
        let free =
            std::iter::once(base.to_string()).chain((2..).map(|i| format!("{base}{i}"))).find(|n| !used.contains(n));
        let name = free.unwrap_or_default();
        used.insert(name.clone());
        named.axes[a].name = name;
    }
    named
}
