//! Writes the search's choice out as a plan: strategies and storage of every stage.

use crate::inter_op::compose::Chain;
use crate::inter_op::search::{ChosenStage, StageConfig};
use crate::inter_op::submesh::{Block, place_blocks};
use crate::inter_op::tables::{Known, layer_table};
use crate::intra_op::ilp::Kept;
use crate::intra_op::layer::{LayerTable, MemoryPrice};
use crate::intra_op::space::{Choice, Spaces, batch_factors, batch_layout};
use crate::layers::graph::{LayeredGraph, Unit};
use crate::lower::{Fusion, Prices};
use crate::request::{PlanFailure, Request};
use crate::timings::{Phase, timed};
use altiplano_cost_models::Costs;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::loss_scale::LossScale;
use altiplano_ir::mesh::{AxisId, CONTEXT_AXIS, Mesh};
use altiplano_ir::op::{Op, Reducer};
use altiplano_ir::plan::{
    FORMAT, Offload, Placement, Plan, Predicted, Schedule, Stage, StagePredicted, Storage, VERSION, ValueSharding,
    is_countable,
};
use altiplano_ir::rule::AxisUse;
use altiplano_ir::sharding::Sharding;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The parts of a plan.
pub struct Parts<'a> {
    pub layered: &'a LayeredGraph,
    pub num_microbatches: u32,
    pub schedule: Schedule,
    /// Stages on the same devices.
    pub virtual_stages: u32,
    pub placement: Placement,
    pub stages: &'a [ChosenStage],
}

/// Writes a plan out, without predictions.
pub fn assemble(request: &Request, parts: &Parts<'_>, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    timed(Phase::Assembly, || assembled(request, parts, costs))
}

fn assembled(request: &Request, parts: &Parts<'_>, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    if !is_countable(parts.num_microbatches, parts.stages.len()) {
        let problem = "times the number of stages is more than a step may have, which is 1048576";
        let value = parts.num_microbatches.into();
        return Err(PlanFailure::Option { option: "num-microbatches", value, problem });
    }
    let sizes: Vec<(u32, u32)> = request.cluster.groups.iter().map(|g| (g.nodes, g.devices_per_node)).collect();
    let lanes = parts.stages.len() / parts.virtual_stages.max(1) as usize;
    let blocks: Vec<Block> = parts.stages[..lanes].iter().map(|s| s.block).collect();
    let Some(devices_of_lanes) = place_blocks(&blocks, &sizes) else {
        return Err(PlanFailure::NoCombination);
    };
    let mut stages: Vec<Stage> = Vec::with_capacity(parts.stages.len());
    for (i, chosen) in parts.stages.iter().enumerate() {
        let devices = &devices_of_lanes[parts.placement.lane_of(i, lanes)];
        let before = parts.stages.iter().zip(&stages);
        let mut copies = before.filter_map(|(other, stage)| copied(parts.layered, other, stage, chosen));
        let stage = match copies.next() {
            Some(copy) => Some(Stage { devices: devices.clone(), ..copy }),
            None => stage(request, parts.layered, costs, chosen, devices.clone()),
        };
        stages.push(stage.ok_or(PlanFailure::NoCombination)?);
    }
    let graph = parts.layered.graph.clone();
    let unit = if graph.batch == 0 { 1 } else { graph.batch };
    let mut plan = Plan {
        format: FORMAT.into(),
        version: VERSION,
        model: request.model.clone(),
        graph_hash: parts.layered.graph_hash().to_string(),
        cluster: request.cluster.clone(),
        global_batch: unit * parts.num_microbatches as u64,
        num_microbatches: parts.num_microbatches,
        microbatch: unit,
        schedule: parts.schedule,
        order: None,
        update: request.training.update,
        servers: None,
        goal: request.goal,
        virtual_stages: parts.virtual_stages,
        placement: parts.placement,
        optimizer: request.training.optimizer,
        clip_norm: request.training.clip_norm,
        loss_scale: None,
        measure_noise: false,
        execution: request.execution,
        target: request.target,
        loss: request.loss,
        stop_gradients: request.stop_gradients.clone(),
        reduction: request.reduction,
        profile: None,
        made_by: None,
        certificate: None,
        proof: None,
        predicted: Predicted { mfu_convention: request.mfu_convention, ..Predicted::default() },
        alternatives: Vec::new(),
        layers: parts.layered.starts.clone(),
        stages,
        graph,
        padding: None,
    };
    let is_possible = |scale: &LossScale| plan.schedule.trains() && scale.is_of_staleness(plan.staleness());
    plan.loss_scale = request.training.loss_scale.filter(is_possible);
    Ok(plan)
}

/// The shardings of one stage.
pub struct Shardings {
    pub strategies: Vec<(ValueId, Choice)>,
    pub parameters: Vec<(ValueId, Kept)>,
    /// Layouts in which values from earlier stages arrive.
    pub receives: BTreeMap<ValueId, Sharding>,
}

fn stage(
    request: &Request,
    layered: &LayeredGraph,
    costs: &dyn Costs,
    chosen: &ChosenStage,
    devices: Vec<u32>,
) -> Option<Stage> {
    let config = &chosen.config;
    let Block { group, shape } = chosen.block;
    let stage = Stage {
        layers: chosen.layers.start as u32..chosen.layers.end as u32,
        group: group as u32,
        submesh: (shape.nodes, shape.devices),
        devices,
        mesh: config.mesh.clone(),
        recompute: config.fraction.levels(chosen.layers.len()),
        zero: config.variant.zero,
        offload: if request.trains() { request.offload.unwrap_or_default() } else { Offload::NONE },
        shardings: BTreeMap::new(),
        parameters: BTreeMap::new(),
        receives: BTreeMap::new(),
        solved: None,
        predicted: StagePredicted::default(),
    };
    let fusion = match config.variant.memory {
        MemoryPrice::None => Fusion::Ops,
        _ => Fusion::of(&request.execution),
    };
    in_spaces(request, costs, config, chosen.block, fusion, |spaces| {
        let shardings = composed(request, layered, spaces, chosen)?;
        Some(with_shardings(layered, spaces, stage, shardings))
    })
}

/// Calls `then` with the strategies of a configuration's mesh, whose composites are priced in units of `fusion`.
pub(crate) fn in_spaces<T>(
    request: &Request,
    costs: &dyn Costs,
    config: &StageConfig,
    block: Block,
    fusion: Fusion,
    then: impl FnOnce(&mut Spaces<'_>) -> T,
) -> T {
    let Block { group, shape } = block;
    let cost = costs.of_group(group as u32);
    let composites = request.composites.of(cost, fusion);
    let prices = Prices::new(cost, &request.cluster.groups[group], (shape.nodes, shape.devices), &config.mesh);
    let prices = prices.fused(fusion).knowing(&composites);
    then(&mut Spaces::new(&prices, config.roles))
}

/// Copies `stage`, which was made of `other`, if both run the same layers in the same config.
fn copied(layered: &LayeredGraph, other: &ChosenStage, stage: &Stage, chosen: &ChosenStage) -> Option<Stage> {
    let (group, shape) = (chosen.block.group, chosen.block.shape);
    let runs_alike = (other.block.group, other.block.shape) == (group, shape)
        && other.config == chosen.config
        // The first stage also keeps parameters that nothing uses.
        && other.layers.start != 0
        && layered.kinds[other.layers.clone()] == layered.kinds[chosen.layers.clone()];
    if !runs_alike {
        return None;
    }
    let graph = &layered.graph;
    let name = |p: ValueId| match &graph.node(p).op {
        Op::Parameter(parameter) => parameter.name.clone(),
        _ => String::new(),
    };
    // Layers of one kind correspond entry by entry. Values that enter them must come from corresponding places too.
    let mut partner: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let (mut shardings, mut parameters, mut receives) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for (a, b) in other.layers.clone().zip(chosen.layers.clone()) {
        let (a, b) = (&layered.layers[a], &layered.layers[b]);
        let outer = a.parameters.iter().chain(&a.entering).zip(b.parameters.iter().chain(&b.entering));
        for (&v, &w) in outer.chain(a.nodes.iter().zip(&b.nodes)) {
            if *partner.entry(v).or_insert(w) != w {
                return None;
            }
        }
        for (v, w) in a.nodes.iter().zip(&b.nodes) {
            let ValueSharding { sharding, strategy, .. } = stage.shardings.get(v)?;
            let (sharding, strategy) = (sharding.clone(), strategy.clone());
            shardings.insert(*w, ValueSharding { name: graph.node(*w).name.clone(), sharding, strategy });
        }
        for (&p, &q) in a.parameters.iter().zip(&b.parameters) {
            parameters.insert(name(q), stage.parameters.get(&name(p))?.clone());
        }
    }
    for (v, layout) in &stage.receives {
        receives.insert(*partner.get(v)?, layout.clone());
    }
    let from_elsewhere = |v: &&ValueId| v.0 < layered.starts[chosen.layers.start];
    let entering = chosen.layers.clone().flat_map(|l| layered.layers[l].entering.iter().filter(from_elsewhere));
    if !entering.into_iter().all(|v| receives.contains_key(v)) || parameters.len() != stage.parameters.len() {
        return None;
    }
    let layers = chosen.layers.start as u32..chosen.layers.end as u32;
    Some(Stage { layers, shardings, parameters, receives, ..stage.clone() })
}

/// Composes the shardings of a stage from the tables of its layers.
fn composed(
    request: &Request,
    layered: &LayeredGraph,
    spaces: &mut Spaces<'_>,
    chosen: &ChosenStage,
) -> Option<Shardings> {
    let graph = &layered.graph;
    let config = &chosen.config;
    // The search keeps only costs, so the layers are solved again. The same input gives the same answer.
    let mut tables: BTreeMap<usize, Rc<LayerTable>> = BTreeMap::new();
    let mut known = Known::default();
    let mut of_layers = Vec::with_capacity(chosen.layers.len());
    for l in chosen.layers.clone() {
        let kind = layered.kinds[l];
        let table = match tables.get(&kind) {
            Some(table) => table.clone(),
            None => {
                let first = layered.representatives[kind];
                layer_table(layered, request, spaces, config.variant, first, &mut known)?
            }
        };
        tables.insert(kind, table.clone());
        of_layers.push(table);
    }
    let boundaries: Vec<_> = of_layers.iter().map(|table| table.boundary.clone()).collect();
    let path = Chain::through(&boundaries).path(&boundaries);
    // If the demands on the axes leave some layer without a strategy, no path goes through all layers.
    if path.len() != of_layers.len() {
        return None;
    }

    let mut strategies = Vec::new();
    let mut parameters: BTreeMap<ValueId, Kept> = BTreeMap::new();
    let mut receives = BTreeMap::new();
    for ((l, table), &(i, o)) in chosen.layers.clone().zip(&of_layers).zip(&path) {
        let layer = &layered.layers[l];
        for (Unit { layer, model, .. }, choice) in layered.units_of(l).into_iter().zip(table.choices(i, o)) {
            for (v, picked) in choice.strategies {
                strategies.push((layer.nodes[model.nodes.binary_search(&v).ok()?], picked));
            }
            for (p, kept) in choice.parameters {
                let at = model.parameters.iter().position(|q| *q == p)?;
                // If several layers use a parameter, the first decides how it is stored.
                parameters.entry(layer.parameters[at]).or_insert(kept);
            }
        }
        for &v in layer.entering.iter().filter(|v| v.0 < layered.starts[chosen.layers.start]) {
            let main = layer.entering.iter().copied().max_by_key(|&v| (graph.ty(v).bytes(), std::cmp::Reverse(v.0)));
            let sharding = match table.boundary.in_layouts.get(i) {
                Some(&layout) if main == Some(v) && l == chosen.layers.start => spaces.layout(layout).clone(),
                _ => batch_layout(graph.ty(v), graph.node(v).batch_dims, &config.mesh),
            };
            receives.entry(v).or_insert(sharding);
        }
    }
    // The first stage keeps parameters that nothing uses, so that they are not lost.
    if chosen.layers.start == 0 {
        for (p, _) in graph.parameters().filter(|(p, _)| layered.users[p.index()].is_empty()) {
            let layout = spaces.intern(Sharding::replicated(graph.shape(p)));
            parameters.insert(p, Kept { layout, level: config.variant.zero });
        }
    }
    Some(Shardings { strategies, parameters: parameters.into_iter().collect(), receives })
}

/// Writes shardings out into the stage whose mesh they are for.
pub fn with_shardings(layered: &LayeredGraph, spaces: &mut Spaces<'_>, stage: Stage, chosen: Shardings) -> Stage {
    let graph = &layered.graph;
    let Shardings { strategies, parameters: kept, receives } = chosen;
    let mesh = named(graph, &strategies, &stage.mesh);
    let mut shardings = BTreeMap::new();
    let mut partial: BTreeMap<ValueId, BTreeSet<AxisId>> = BTreeMap::new();
    for (value, picked) in strategies {
        let result = graph.rule(value).shardings(&picked.strategy, &mesh).result;
        for (k, operand) in graph.node(value).operands.iter().enumerate() {
            let axes = spaces.layout(picked.cotangents[k]).partial.iter().map(|p| p.0);
            partial.entry(*operand).or_default().extend(axes);
        }
        let name = graph.node(value).name.clone();
        let sharding = result.display(&mesh).to_string();
        shardings.insert(value, ValueSharding { name, sharding, strategy: picked.strategy });
    }
    // A partial sum stays partial through conversions and other linear ops on the way to the parameter that they read.
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
    let mut parameters = BTreeMap::new();
    for (p, kept) in kept {
        let Op::Parameter(parameter) = &graph.node(p).op else { continue };
        let rests = kept.rests(spaces);
        let at_rest = spaces.layout(rests.parameter).clone();
        if parameter.frozen {
            let [gradient, state] = [at_rest.clone(), at_rest.clone()];
            parameters.insert(parameter.name.clone(), Storage { parameter: at_rest, gradient, state });
            continue;
        }
        let mut gradient = spaces.layout(rests.gradient).clone();
        if kept.level < 2 {
            let split: Vec<AxisId> = gradient.split_axes().collect();
            let axes = partial.get(&p).into_iter().flatten().filter(|a| !split.contains(a));
            gradient.partial = axes.map(|&a| (a, Reducer::Sum)).collect();
        }
        let state = spaces.layout(rests.state).clone();
        parameters.insert(parameter.name.clone(), Storage { parameter: at_rest, gradient, state });
    }
    Stage { mesh, shardings, parameters, receives, ..stage }
}

/// Names the axes of a mesh after their use: `data` if most matmul work on an axis splits the batch, otherwise
/// `tensor`. An axis of context parallelism keeps its name, since tensor-parallel devices may split positions too.
fn named(graph: &Graph, strategies: &[(ValueId, Choice)], mesh: &Mesh) -> Mesh {
    let mut batch_flop = vec![0.0; mesh.axes.len()];
    let mut model_flop = vec![0.0; mesh.axes.len()];
    for (v, picked) in strategies.iter().filter(|(v, _)| graph.node(*v).op.is_contraction()) {
        let is_batch = batch_factors(graph, *v, &graph.rule(*v));
        for (axis, use_) in picked.strategy.0.iter().enumerate() {
            if let AxisUse::Factor { factor, .. } = use_ {
                let side = if is_batch[*factor as usize] { &mut batch_flop } else { &mut model_flop };
                side[axis] += graph.flop(*v) as f64;
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
        let base = match mesh.axes[a].name.as_str() {
            CONTEXT_AXIS => CONTEXT_AXIS,
            _ if is_data => "data",
            _ => "tensor",
        };
        let free =
            std::iter::once(base.to_string()).chain((2..).map(|i| format!("{base}{i}"))).find(|n| !used.contains(n));
        let name = free.unwrap_or_default();
        used.insert(name.clone());
        named.axes[a].name = name;
    }
    named
}
