//! `--to torch`: a Python module with a `DeviceMesh`, the placements of every parameter, and functions that apply them
//! to a module and train it under `torchrun`. Its fixed part is `torch.py`.
//!
//! Axes of the plan's mesh are of two kinds. Over *data* axes only samples are split, so processes compute on their own
//! samples, and FSDP2 shards what ZeRO splits. Over *tensor* axes values are DTensors, and ops see whole tensors.

use super::jax::{list, quiet, quoted, table};
use super::{Exported, Input, Layouts, Stack, refused};
use crate::error::{Error, Names};
use crate::units::bytes;
use altiplano_cost_models::Rooflines;
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Stage, Storage};
use altiplano_ir::program::{Buffer, BufferKind, Call, Phase, Programs};
use altiplano_ir::recompute::{Recomputation, Recompute};
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_planner::predict_plan;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const FUNCTIONS: &str = include_str!("torch.py");
/// The version that the module is written for and tested with.
const VERSION: &str = "2.15.0";

/// The reason why a PyTorch module cannot say a plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TorchProblem {
    #[error("'{0}' is no name of a module's parameter; the model must come from torch.export or a Hugging Face config")]
    Name(String),
    #[error("stages 0 and {0} have different meshes, and a DeviceMesh has one shape; plan with --dp and --tp given")]
    Meshes(usize),
    #[error(
        "stages {0} and {1} share some of their devices, and a DeviceMesh has each once; plan with --dp and --tp given"
    )]
    Devices(usize, usize),
    #[error(
        "stage {stage} begins inside the block '{block}', and stages are cut where blocks begin; plan with another --pp"
    )]
    InsideBlock { stage: usize, block: String },
    #[error(
        "stage {0} begins with no module of its own, and stages are cut where modules begin; plan with another --pp"
    )]
    NoModule(usize),
    #[error("stages {first} and {second} lay out their common parameter '{name}' differently; plan with --pp 1")]
    Shared { name: String, first: usize, second: usize },
    #[error(
        "the loss is no mean or sum over samples, so stages cannot compute it for a part of them; plan with --dp 1"
    )]
    Loss,
}

pub(super) fn module(layouts: &Layouts) -> Result<Exported, Error> {
    let of = Torch::of(layouts.plan).map_err(|problem| refused(Stack::Torch, problem.into()))?;
    let splits = of.splits().map_err(|problem| refused(Stack::Torch, problem.into()))?;
    let mut notes = Vec::new();
    notes.extend(of.rounding(layouts.lowered));
    notes.extend(of.displaced());
    notes.extend(of.gathered(layouts.lowered));
    notes.extend(of.halos());
    notes.extend(of.recomputation()?);
    notes.extend(of.stage_at_once());
    notes.extend(of.totals());
    notes.extend(masters(layouts.lowered));
    notes.extend(layouts.update());
    let mut text = header(layouts, &of, &notes);
    of.mesh_tables(&mut text);
    of.parameter_tables(&mut text, layouts);
    of.activation_tables(&mut text, layouts);
    of.pipeline(&mut text, layouts.lowered, &splits);
    Ok(Exported { text: text + FUNCTIONS, notes })
}

/// A plan as PyTorch has it.
struct Torch<'a> {
    plan: &'a Plan,
    /// The mesh of every stage.
    mesh: &'a Mesh,
    /// The devices of each lane.
    lanes: Vec<&'a [u32]>,
    /// Axes over which only samples are split.
    data: Vec<AxisId>,
    /// Those of them over which parameters or their state are stored in parts.
    shard: Vec<AxisId>,
    /// All other axes of several devices.
    tensor: Vec<AxisId>,
    /// All axes in the order of the `DeviceMesh`, which is that in which they split a dimension.
    order: Vec<AxisId>,
    /// Prefixes of names that have several numbered children, such as `model.layers`.
    containers: BTreeSet<String>,
}

impl<'a> Torch<'a> {
    fn of(plan: &'a Plan) -> Result<Torch<'a>, TorchProblem> {
        let names = || plan.stages.iter().flat_map(|stage| stage.parameters.keys());
        if let Some(name) = names().find(|name| !is_fqn(name)) {
            return Err(TorchProblem::Name(name.clone()));
        }
        let mesh = &plan.stages[0].mesh;
        if let Some(other) = plan.stages.iter().position(|stage| stage.mesh != *mesh) {
            return Err(TorchProblem::Meshes(other));
        }
        let lanes: Vec<&[u32]> = plan.lanes().iter().map(|stage| stage.devices.as_slice()).collect();
        for (i, lane) in lanes.iter().enumerate() {
            let shares = |other: &&[u32]| other.iter().any(|device| lane.contains(device));
            if let Some(j) = lanes[i + 1..].iter().position(shares) {
                return Err(TorchProblem::Devices(i, i + 1 + j));
            }
        }
        let several = mesh.axis_ids().filter(|&axis| mesh.size(axis) > 1);
        let splits_samples = |axis: &AxisId| plan.stages.iter().all(|stage| only_samples(plan, stage, *axis));
        let of_samples = plan.loss != LossKind::Other;
        let (data, tensor): (Vec<AxisId>, _) = several.partition(|axis| of_samples && splits_samples(axis));
        let order = order(plan, mesh, &tensor);
        let in_order =
            |axes: &[AxisId]| -> Vec<AxisId> { order.iter().copied().filter(|axis| axes.contains(axis)).collect() };
        let (data, tensor) = (in_order(&data), in_order(&tensor));
        let storages = || plan.stages.iter().flat_map(|stage| stage.parameters.values());
        let stores_in_parts = |axis: &AxisId| {
            storages().any(|s| s.parameter.split_axes().chain(s.state.split_axes()).any(|split| split == *axis))
        };
        let shard = data.iter().copied().filter(stores_in_parts).collect();
        let shared = Torch { plan, mesh, lanes, data, shard, tensor, order, containers: containers(names()) };
        if plan.stages.len() > 1 && !of_samples { Err(TorchProblem::Loss) } else { Ok(shared) }
    }

    /// All axes of several devices, data axes and tensor axes.
    fn axes(&self) -> Vec<AxisId> {
        [&self.data[..], &self.tensor].concat()
    }

    /// The dimension that each axis splits where the module stores a parameter. FSDP2 keeps what any ZeRO level splits
    /// in parts.
    fn stored(&self, storage: &Storage) -> BTreeMap<AxisId, usize> {
        let mut found = blocks(&storage.parameter);
        let state = blocks(&storage.state);
        found.retain(|axis, _| self.tensor.contains(axis));
        let of_data = |layout: &BTreeMap<AxisId, usize>| {
            let dims: BTreeSet<Option<usize>> = self.shard.iter().map(|axis| layout.get(axis).copied()).collect();
            if dims.len() == 1 { dims.into_iter().next().flatten() } else { None }
        };
        if let Some(dim) = of_data(&blocks(&storage.parameter)).or_else(|| of_data(&state)) {
            found.extend(self.shard.iter().map(|&axis| (axis, dim)));
        }
        found
    }

    /// `(Shard(0), Replicate())`, with one placement for each of `axes`.
    fn placements(&self, layout: &BTreeMap<AxisId, usize>, axes: &[AxisId]) -> String {
        let of_axis = |axis: &AxisId| layout.get(axis).map_or("Replicate()".to_string(), |dim| format!("Shard({dim})"));
        match axes {
            [axis] => format!("({},)", of_axis(axis)),
            axes => format!("({})", axes.iter().map(of_axis).collect::<Vec<_>>().join(", ")),
        }
    }

    /// The parameters, each once.
    fn parameters(&self) -> BTreeMap<&'a String, &'a Storage> {
        self.plan.stages.iter().rev().flat_map(|stage| &stage.parameters).collect()
    }

    /// The block that a name is in: `model.layers.3` of `model.layers.3.mlp.up_proj`.
    fn block<'n>(&self, name: &'n str) -> Option<&'n str> {
        let ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
        ends.map(|end| &name[..end]).find(|prefix| {
            let (container, number) = prefix.rsplit_once('.').unwrap_or(("", prefix));
            is_number(number) && self.containers.contains(container)
        })
    }

    /// The blocks, each with true if the plan recomputes all of its layers.
    fn blocks(&self) -> BTreeMap<&'a str, bool> {
        let (plan, layer_of) = (self.plan, self.plan.layer_of());
        let mut found: BTreeMap<&str, bool> = BTreeMap::new();
        for name in self.parameters().into_keys() {
            found.extend(self.block(name).map(|block| (block, true)));
        }
        for stage in &plan.stages {
            for v in stage.shardings.keys() {
                let full = layer_of[v.index()].is_some_and(|layer| stage.recomputes(layer) == Recompute::Full);
                let block = self.block(path(plan.graph.node(*v)));
                if let Some(recomputed) = block.and_then(|block| found.get_mut(block)) {
                    *recomputed &= full;
                }
            }
        }
        found
    }

    /// Layouts of the first input and of the result of each module that has parameters of its own, over tensor axes.
    fn activations(&self) -> BTreeMap<&'a str, (Option<Sharding>, Option<Sharding>)> {
        let graph = &self.plan.graph;
        let owners: BTreeSet<&str> =
            self.parameters().into_keys().map(|name| name.rsplit_once('.').map_or("", |(owner, _)| owner)).collect();
        let mut found: BTreeMap<&str, (Option<Sharding>, Option<Sharding>)> = BTreeMap::new();
        let users = graph.users();
        for stage in &self.plan.stages {
            for (&v, value) in &stage.shardings {
                let Some(&owner) = owners.get(path(graph.node(v))) else { continue };
                let layouts = graph.rule(v).shardings(&value.strategy, &stage.mesh);
                let entry = found.entry(owner).or_default();
                let comes_in = |operand: &ValueId| {
                    let node = graph.node(*operand);
                    path(node) != owner && !matches!(node.op, Op::Parameter(_)) && !node.ty.shape.is_empty()
                };
                let first = graph.node(v).operands.iter().position(comes_in);
                if let Some(first) = first.filter(|_| entry.0.is_none()) {
                    entry.0 = Some(layouts.operands[first].clone());
                }
                entry.1 = Some(match layouts.result.is_partial() {
                    false => layouts.result,
                    true => needed(graph, stage, v, &users[v.index()]).unwrap_or_else(|| layouts.result.reduced()),
                });
            }
        }
        found
    }

    fn mesh_tables(&self, text: &mut String) {
        let axes = self.axes();
        let name = |axis: &AxisId| self.mesh.name(*axis);
        let _ = writeln!(text, "# The mesh, major axis first, and the process of each of its devices.");
        let lanes = (self.lanes.len() > 1).then(|| (self.pipeline_axis(), self.lanes.len().to_string()));
        let sizes = self.order.iter().map(|&axis| (self.mesh.name(axis), self.mesh.size(axis).to_string()));
        table(text, "MESH", lanes.into_iter().chain(sizes));
        // The group over all axes lists the positions of a lane's devices with the last axis as the fastest.
        let positions = self.mesh.group(&self.order, 0);
        let places = self.lanes.iter().flat_map(|lane| positions.iter().map(move |&position| lane[position as usize]));
        let places: Vec<u32> = places.collect();
        let used: BTreeSet<u32> = places.iter().copied().collect();
        let processes: Vec<usize> = places.iter().map(|device| used.range(..device).count()).collect();
        let _ = writeln!(text, "DEVICES = {processes:?}");
        let named = |axes: &[AxisId]| list(&axes.iter().map(name).collect::<Vec<_>>());
        let _ = writeln!(
            text,
            "# The axes of several devices. Over those of DATA processes have other samples, and over those of SHARD they also\n# share what they store. Over those of TENSOR they share the work on the same samples, and tensors are DTensors."
        );
        let _ = writeln!(text, "AXES = {}\nDATA = {}\nSHARD = {}", named(&axes), named(&self.data), named(&self.shard));
        let _ = writeln!(text, "TENSOR = {}", named(&self.tensor));
        let _ =
            writeln!(text, "GLOBAL_BATCH = {}\nMICROBATCHES = {}", self.plan.global_batch, self.plan.num_microbatches);
        let _ = writeln!(
            text,
            "# True if the loss of a step is the mean of its microbatches' losses, False if it is their sum."
        );
        let _ = writeln!(text, "LOSS_IS_MEAN = {}", python(self.plan.loss != LossKind::Sum));
    }

    fn parameter_tables(&self, text: &mut String, layouts: &Layouts) {
        let axes = self.axes();
        let of_data = |axis: AxisId| self.data.contains(&axis);
        let in_parts = |storage: &Storage| storage.parameter.split_axes().any(of_data);
        let once = |storage: &Storage| storage.gradient.partial.iter().any(|(axis, _)| of_data(*axis));
        let parameters = self.parameters();
        let _ = writeln!(text, "# True if FSDP2 frees parameters after a block's forward pass (ZeRO-3).");
        let _ = writeln!(text, "RESHARD = {}", python(parameters.values().any(|storage| in_parts(storage))));
        let _ = writeln!(text, "# True if gradients are reduced once a step, False if after each microbatch.");
        let _ = writeln!(text, "REDUCE_ONCE = {}", python(parameters.values().any(|storage| once(storage))));
        let _ = writeln!(
            text,
            "# The placements of each parameter over AXES. Where axes split the same dimension, TENSOR comes first."
        );
        let placed = |storage: &Storage| self.placements(&self.stored(storage), &axes);
        table(text, "PARAMETERS", parameters.iter().map(|(name, storage)| (name.as_str(), placed(storage))));
        let frozen: Vec<&str> = layouts.frozen().collect();
        let _ = writeln!(text, "# Parameters that training does not change.\nFROZEN = {}", list(&frozen));
        let blocks = self.blocks();
        let recomputed: Vec<&str> = blocks.iter().filter(|(_, full)| **full).map(|(name, _)| *name).collect();
        let _ =
            writeln!(text, "# Blocks of the module, which FSDP2 gathers one by one, and those that are recomputed.");
        let _ = writeln!(text, "BLOCKS = {}", list(&blocks.keys().copied().collect::<Vec<_>>()));
        let _ = writeln!(text, "RECOMPUTED = {}", list(&recomputed));
    }

    fn activation_tables(&self, text: &mut String, layouts: &Layouts) {
        let _ = writeln!(text, "# The first input and the result of modules, over TENSOR.");
        let activations = if self.tensor.is_empty() { BTreeMap::new() } else { self.activations() };
        let side = |layout: &Option<Sharding>| {
            layout.as_ref().map_or("None".to_string(), |layout| self.placements(&blocks(layout), &self.tensor))
        };
        let sides = |(of_input, of_result): &(_, _)| format!("({}, {})", side(of_input), side(of_result));
        table(text, "ACTIVATIONS", activations.iter().map(|(name, layouts)| (*name, sides(layouts))));
        let _ = writeln!(text, "# Inputs, over TENSOR. Those without a batch may be buffers of the module.");
        let inputs = inputs(layouts);
        let placed = |input: &Input| self.placements(&blocks(input.sharding), &self.tensor);
        table(text, "INPUTS", inputs.values().map(|input| (input.name, placed(input))));
        let _ = writeln!(text, "# The dimension of each input that grows with the batch, and its size for one sample.");
        let batched = inputs.values().filter_map(|input| Some((input.name, input.batch_dims.first()?)));
        table(text, "BATCH_DIMS", batched.map(|(name, (dim, rows))| (name, format!("({dim}, {rows})"))));
    }

    fn pipeline_axis(&self) -> &'static str {
        if self.mesh.find("pipeline").is_some() { "lanes" } else { "pipeline" }
    }

    /// The stages of a pipeline: where they begin, and their actions as PyTorch's runtime reads them.
    fn pipeline(&self, text: &mut String, lowered: &Programs, splits: &[&str]) {
        let _ = writeln!(
            text,
            "# The pipeline: the modules that stages from the second on begin with, and a line of actions"
        );
        let _ = writeln!(text, "# for each process of an axis. An action is a stage, a pass and a microbatch.");
        let _ = writeln!(text, "STAGES = {}", self.plan.stages.len());
        let _ = writeln!(text, "PIPELINE = {}", quoted(self.pipeline_axis()));
        let _ = writeln!(text, "SPLITS = {}", list(splits));
        let _ = writeln!(
            text,
            "# The input that only the loss takes.\nTARGET = {}",
            self.target().map_or("None".to_string(), quoted)
        );
        let _ = writeln!(text, "# Parameters of several stages, whose gradients are summed.");
        table(text, "TIED", self.tied().iter().map(|(name, stages)| (name.as_str(), format!("{stages:?}"))));
        let _ = writeln!(text, "SCHEDULE = \"\"\"\\");
        for program in lowered.programs.iter().filter(|_| self.plan.stages.len() > 1) {
            let action = |call: &Call| {
                let Call::Run { body, microbatch: Some(microbatch) } = *call else { return None };
                let body = &program.bodies[body as usize];
                let apart = program.body_of(body.stage, Phase::Weights).is_some();
                let pass = match body.phase {
                    Phase::Forward => "F",
                    Phase::Backward if apart => "I",
                    Phase::Backward => "B",
                    Phase::Weights => "W",
                    _ => return None,
                };
                Some(format!("{}{pass}{microbatch}", body.stage))
            };
            let _ = writeln!(text, "{}", program.schedule.iter().filter_map(action).collect::<Vec<_>>().join(","));
        }
        let _ = writeln!(text, "\"\"\"");
    }

    /// Parameters of several stages, with the numbers of these.
    fn tied(&self) -> BTreeMap<&'a String, Vec<usize>> {
        let mut found: BTreeMap<&String, Vec<usize>> = BTreeMap::new();
        for (number, stage) in self.plan.stages.iter().enumerate() {
            stage.parameters.keys().for_each(|name| found.entry(name).or_default().push(number));
        }
        found.retain(|_, stages| stages.len() > 1);
        found
    }

    /// The one input that only the last stage reads.
    fn target(&self) -> Option<&'a str> {
        let (graph, users) = (&self.plan.graph, self.plan.graph.users());
        let last = self.plan.stages.last()?;
        let only_last = |v: &ValueId| users[v.index()].iter().all(|user| last.shardings.contains_key(user));
        let mut found = graph.inputs().filter(|(v, _)| only_last(v));
        found.next().map(|(_, name)| name)
    }

    /// The modules that stages begin with, from the second stage on.
    fn splits(&self) -> Result<Vec<&'a str>, TorchProblem> {
        let (plan, graph) = (self.plan, &self.plan.graph);
        for (name, stages) in self.tied() {
            let of_stage = |stage: &usize| self.stored(&plan.stages[*stage].parameters[name]);
            if let Some(&second) = stages.iter().find(|&stage| of_stage(stage) != of_stage(&stages[0])) {
                return Err(TorchProblem::Shared { name: name.clone(), first: stages[0], second });
            }
        }
        let mut before: BTreeSet<&str> = BTreeSet::new();
        let mut splits = Vec::new();
        for (number, stage) in plan.stages.iter().enumerate() {
            let mut paths = stage.shardings.keys().map(|&v| (v, path(graph.node(v))));
            let split = |(v, path): (ValueId, &'a str)| match prefixes(path).find(|prefix| !before.contains(prefix)) {
                Some(prefix) => Some(Ok(prefix)),
                None if reads_parameters(graph, v) => Some(Err(path)),
                None => None,
            };
            if number > 0 {
                let inside = |block: &str| TorchProblem::InsideBlock { stage: number, block: block.to_string() };
                match paths.find_map(split) {
                    None => return Err(TorchProblem::NoModule(number)),
                    Some(Err(path)) => return Err(self.block(path).map_or(TorchProblem::NoModule(number), inside)),
                    Some(Ok(found)) => match self.block(found) {
                        Some(block) if block != found => return Err(inside(block)),
                        _ => splits.push(found),
                    },
                }
            }
            before.extend(stage.shardings.keys().flat_map(|&v| prefixes(path(graph.node(v)))));
        }
        Ok(splits)
    }

    /// A note on tensors that the module stores in more than the plan's part.
    fn rounding(&self, lowered: &Programs) -> Option<String> {
        let (mut extra, mut names): (u64, Vec<String>) = (0, Vec::new());
        let of_data = |axis: &AxisId| self.data.contains(axis);
        for program in &lowered.programs {
            let mut of_program = 0;
            for buffer in &program.buffers {
                let Some((name, storage)) = self.storage(buffer) else { continue };
                let mut stored = self.stored(storage);
                if matches!(buffer.kind, BufferKind::Accumulator { .. }) && buffer.sharding.is_partial() {
                    stored.retain(|axis, _| !of_data(axis));
                }
                // Storage by FSDP2 between steps has a note of its own.
                let more =
                    self.part(buffer, &stored).saturating_sub(buffer.sharding.local_bytes(&buffer.ty, self.mesh));
                of_program += more;
                if more > 0 && !names.contains(name) {
                    names.push(name.clone());
                }
            }
            extra = extra.max(of_program);
        }
        (!names.is_empty()).then(|| {
            format!(
                "{}: stored in more than the plan's part, since placements split dimensions into contiguous blocks and the optimizer's state lies as its parameter; {} more on each device",
                Names(names),
                bytes(extra)
            )
        })
    }

    /// A note on parameters that axes split in another order than the others.
    fn displaced(&self) -> Option<String> {
        let place = |axis: &AxisId| self.order.iter().position(|other| other == axis);
        let group =
            |axes: &[AxisId], of: &[AxisId]| -> Vec<_> { axes.iter().filter(|a| of.contains(a)).map(place).collect() };
        let sorted = |storage: &Storage| {
            storage.parameter.dims.iter().all(|dim| {
                let axes = &dim.segments()[0].axes;
                [&self.data, &self.tensor].iter().all(|of| group(axes, of).is_sorted())
            })
        };
        let names: Vec<String> =
            self.parameters().into_iter().filter(|(_, s)| !sorted(s)).map(|(name, _)| name.clone()).collect();
        (!names.is_empty())
            .then(|| format!("{}: parts lie on other devices than planned, as many on each device", Names(names)))
    }

    /// A note on ZeRO-1 and ZeRO-2: FSDP2 has the whole parameters only during a step, beside their parts.
    fn gathered(&self, lowered: &Programs) -> Option<String> {
        let twice = |buffer: &Buffer| match (&buffer.kind, self.storage(buffer)) {
            (BufferKind::Parameter { .. }, Some((_, storage))) => {
                let stored = self.stored(storage);
                let planned = blocks(&storage.parameter);
                let apart = stored.keys().any(|axis| !planned.contains_key(axis));
                if apart { self.part(buffer, &stored) } else { 0 }
            }
            _ => 0,
        };
        let of_program = |buffers: &[Buffer]| buffers.iter().map(twice).sum::<u64>();
        let extra = lowered.programs.iter().map(|program| of_program(&program.buffers)).max().unwrap_or(0);
        (extra > 0).then(|| {
            format!(
                "ZeRO-1 and ZeRO-2 are FSDP2 that keeps gathered parameters until the end of a step, beside their parts: {} more on each device",
                bytes(extra)
            )
        })
    }

    fn storage<'b>(&self, buffer: &'b Buffer) -> Option<(&'b String, &'a Storage)> {
        let name = match &buffer.kind {
            BufferKind::Parameter { name } => name,
            BufferKind::State { parameter, .. } | BufferKind::Accumulator { parameter } => parameter,
            _ => return None,
        };
        Some((name, self.plan.stages.get(buffer.stage as usize)?.parameters.get(name)?))
    }

    /// The bytes of a buffer on each device in a layout of the module.
    fn part(&self, buffer: &Buffer, layout: &BTreeMap<AxisId, usize>) -> u64 {
        let axes: Vec<AxisId> = layout.keys().copied().collect();
        let whole = Sharding::replicated(&buffer.ty.shape).local_bytes(&buffer.ty, self.mesh);
        whole.div_ceil(self.mesh.product(&axes).max(1))
    }

    /// A note on convolutions whose samples are split in space: the module gathers them.
    fn halos(&self) -> Option<String> {
        let graph = &self.plan.graph;
        let mut extra = 0;
        for stage in &self.plan.stages {
            for (&v, value) in &stage.shardings {
                let Op::Convolution(op) = &graph.node(v).op else { continue };
                let layout = graph.rule(v).shardings(&value.strategy, self.mesh).operands.swap_remove(0);
                let operand = graph.node(v).operands[0];
                let mut gathered = layout.clone();
                for &dim in &op.lhs.spatial {
                    gathered.dims[dim] = DimLayout::whole(layout.dims[dim].size());
                }
                let bytes = |layout: &Sharding| layout.local_bytes(graph.ty(operand), self.mesh);
                extra += bytes(&gathered) - bytes(&layout);
            }
        }
        (extra > 0).then(|| {
            format!(
                "convolutions of images that are split in space gather them instead of exchanging edges: {} on each device in the forward passes of a microbatch",
                bytes(extra)
            )
        })
    }

    /// A note on ZeRO-3 in pipelines.
    fn stage_at_once(&self) -> Option<String> {
        let of_data = |axis: AxisId| self.data.contains(&axis);
        let in_parts = |stage: &&Stage| stage.parameters.values().any(|s| s.parameter.split_axes().any(of_data));
        let whole = |stage: &Stage| {
            let shapes = self.plan.graph.parameters().filter(|(_, name)| stage.parameters.contains_key(*name));
            let bytes: u64 = shapes
                .map(|(v, _)| {
                    Sharding::replicated(self.plan.graph.shape(v)).local_bytes(self.plan.graph.ty(v), self.mesh)
                })
                .sum();
            bytes / self.mesh.product(&self.tensor).max(1)
        };
        let stages = self.plan.stages.iter().filter(in_parts);
        let most = stages.map(whole).max().filter(|_| self.plan.stages.len() > 1)?;
        Some(format!(
            "PyTorch's pipeline gathers a stage's parameters at once and keeps them while the stage is active: up to {} more on each device",
            bytes(most)
        ))
    }

    /// A note on recomputation that wrapped blocks do not say.
    fn recomputation(&self) -> Result<Option<String>, Error> {
        let (plan, blocks, layer_of) = (self.plan, self.blocks(), self.plan.layer_of());
        let mut said: BTreeSet<u32> = BTreeSet::new();
        for v in plan.graph.values() {
            let block = self.block(path(plan.graph.node(v)));
            if block.is_some_and(|block| blocks.get(block) == Some(&true)) {
                said.extend(layer_of[v.index()]);
            }
        }
        let mut keeping = plan.clone();
        for stage in &mut keeping.stages {
            let level = |layer| if said.contains(&layer) { Recompute::Full } else { Recompute::None };
            stage.recompute = Recomputation::from(stage.layers.clone().map(level).collect::<Vec<_>>());
        }
        if keeping.stages.iter().zip(&plan.stages).all(|(ours, stage)| ours.recompute == stage.recompute) {
            return Ok(None);
        }
        let keeping = predict_plan(keeping, &Rooflines::of(&plan.cluster))?;
        let peaks = keeping.predicted.peak_bytes.iter().zip(&plan.predicted.peak_bytes);
        let extra = peaks.map(|(ours, planned)| ours.saturating_sub(*planned)).max().unwrap_or(0);
        let faster = plan.predicted.step_time_s - keeping.predicted.step_time_s;
        Ok(Some(format!(
            "only whole blocks are recomputed, not part of one, nor what is outside of blocks; without that {} more on each device, and {} a step saved",
            bytes(extra),
            crate::units::seconds(faster.max(0.0))
        )))
    }

    /// A note on losses whose weights are summed over the whole batch.
    fn totals(&self) -> Option<String> {
        let weighted = self.plan.graph.totals().next().is_some();
        let apart = !self.data.is_empty() || self.plan.num_microbatches > 1;
        (weighted && apart).then(|| {
            "the loss is a weighted mean: each process and microbatch takes its own, and their mean is the plan's only if their weights are alike".to_string()
        })
    }
}

/// A note on copies of half-precision parameters, which the module's own parameters have to be.
fn masters(lowered: &Programs) -> Option<String> {
    let is_master = |buffer: &Buffer| matches!(&buffer.kind, BufferKind::State { slot, .. } if slot == "master");
    lowered.programs.iter().flat_map(|program| &program.buffers).any(is_master).then(|| {
        "types are those of the module: the plan computes in half precision and updates copies of parameters in f32"
            .to_string()
    })
}

/// The axes of a mesh: tensor axes last, and those first that come first where several split a dimension of a parameter.
fn order(plan: &Plan, mesh: &Mesh, tensor: &[AxisId]) -> Vec<AxisId> {
    let mut before: BTreeMap<(AxisId, AxisId), i64> = BTreeMap::new();
    for storage in plan.stages.iter().flat_map(|stage| stage.parameters.values()) {
        for dim in storage.parameter.dims.iter().chain(&storage.state.dims) {
            let axes = &dim.segments()[0].axes;
            for (i, &first) in axes.iter().enumerate() {
                axes[i + 1..].iter().for_each(|&second| *before.entry((first, second)).or_default() += 1);
            }
        }
    }
    let count = |a, b| before.get(&(a, b)).copied().unwrap_or(0);
    let mut order: Vec<AxisId> = Vec::new();
    for axis in mesh.axis_ids() {
        let later = |&other: &AxisId| {
            let (ours, theirs) = (tensor.contains(&axis), tensor.contains(&other));
            !ours && theirs || ours == theirs && count(axis, other) > count(other, axis)
        };
        order.insert(order.iter().position(later).unwrap_or(order.len()), axis);
    }
    order
}

/// True if an axis splits nothing but samples: no other dimension of a value, and no parameter where it is used.
fn only_samples(plan: &Plan, stage: &Stage, axis: AxisId) -> bool {
    let graph = &plan.graph;
    let fits = |node: &Node, layout: &Sharding| {
        layout.dims.iter().enumerate().all(|(dim, of_dim)| {
            let first = of_dim.segments().first().is_some_and(|segment| segment.axes.contains(&axis));
            !of_dim.axes().any(|other| other == axis) || first && node.batch_dims >> dim & 1 == 1
        })
    };
    let mut splits = false;
    let every = stage.shardings.iter().all(|(&v, value)| {
        let layouts = graph.rule(v).shardings(&value.strategy, &stage.mesh);
        splits |= layouts.result.split_axes().any(|other| other == axis);
        let operands = graph.node(v).operands.iter().zip(&layouts.operands);
        fits(graph.node(v), &layouts.result) && operands.into_iter().all(|(&v, layout)| fits(graph.node(v), layout))
    });
    every && splits
}

/// The layout in which the first user of a value reads it.
fn needed(graph: &Graph, stage: &Stage, v: ValueId, users: &[ValueId]) -> Option<Sharding> {
    let user = *users.first()?;
    let position = graph.node(user).operands.iter().position(|&operand| operand == v)?;
    let strategy = &stage.shardings.get(&user)?.strategy;
    Some(graph.rule(user).shardings(strategy, &stage.mesh).operands.swap_remove(position))
}

fn reads_parameters(graph: &Graph, v: ValueId) -> bool {
    graph.node(v).operands.iter().any(|&operand| matches!(graph.node(operand).op, Op::Parameter(_)))
}

/// The dimension that each axis splits into contiguous blocks. Other parts of a layout are whole.
fn blocks(layout: &Sharding) -> BTreeMap<AxisId, usize> {
    let of_dim = |dim: usize| layout.dims[dim].segments().first().map(|segment| (dim, segment));
    let dims = (0..layout.dims.len()).filter_map(of_dim);
    dims.flat_map(|(dim, segment)| segment.axes.iter().map(move |&axis| (axis, dim))).collect()
}

/// The module that a node comes from: `h.0.attn` of `h.0.attn/view`.
fn path(node: &Node) -> &str {
    node.name.split('/').next().unwrap_or_default()
}

/// `a`, `a.b` and `a.b.c` of `a.b.c`.
fn prefixes(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    ends.map(move |end| &path[..end]).filter(|prefix| !prefix.is_empty())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_fqn(name: &str) -> bool {
    let word = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || c == '_');
    name.split('.').all(word)
}

/// Prefixes with several numbered children.
fn containers<'n>(names: impl Iterator<Item = &'n String>) -> BTreeSet<String> {
    let mut numbers: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for name in names {
        for prefix in prefixes(name) {
            let (container, number) = prefix.rsplit_once('.').unwrap_or(("", prefix));
            if is_number(number) {
                numbers.entry(container).or_default().insert(number);
            }
        }
    }
    numbers.into_iter().filter(|(_, numbers)| numbers.len() > 1).map(|(name, _)| name.to_string()).collect()
}

/// The inputs, each once, in the order of the model.
fn inputs<'a>(layouts: &'a Layouts) -> BTreeMap<ValueId, &'a Input<'a>> {
    let order: BTreeMap<&str, ValueId> = layouts.plan.graph.inputs().map(|(v, name)| (name, v)).collect();
    layouts.inputs.iter().rev().filter_map(|input| Some((*order.get(input.name)?, input))).collect()
}

fn python(flag: bool) -> &'static str {
    if flag { "True" } else { "False" }
}

fn header(layouts: &Layouts, of: &Torch, notes: &[String]) -> String {
    let (plan, stages) = (layouts.plan, of.plan.stages.len());
    let devices: usize = of.lanes.iter().map(|lane| lane.len()).sum();
    let usage = if stages > 1 { PIPELINE_USAGE } else { USAGE };
    let mut text = format!(
        r#""""The layouts of '{}' on {}, for PyTorch {VERSION}.

Written by {}.

Start a job of {devices} processes, process `i` on device `i` of the plan's cluster:

    torchrun --nproc-per-node {} train.py

With the module that the plan was made for, and its inputs by their names in the plan ({}):

{usage}
The plan and this module differ in:
"#,
        quiet(&plan.model),
        quiet(&plan.cluster.name),
        layouts.origin(),
        launched(plan, devices),
        inputs(layouts).values().map(|input| quiet(input.name)).collect::<Vec<_>>().join(", "),
    );
    for note in notes {
        let _ = writeln!(text, "  * {}", quiet(note));
    }
    text + IMPORTS
}

/// The arguments of `torchrun` for the plan's nodes.
fn launched(plan: &Plan, devices: usize) -> String {
    let per_node = plan.cluster.groups.first().map_or(1, |group| group.devices_per_node as usize).max(1);
    match devices.div_ceil(per_node) {
        1 => devices.to_string(),
        nodes => format!("{per_node} --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"),
    }
}

const USAGE: &str = "    import MODULE as plan
    mesh = plan.mesh()
    module = plan.parallelize(module, mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = plan.shard_inputs(inputs, mesh)
    value = plan.train_step(module, optimizer, inputs, mesh, loss)

`loss(module, **inputs)` gives the loss of a batch. Without it, `module(**inputs)` does.
";

const PIPELINE_USAGE: &str = "    import MODULE as plan
    mesh = plan.mesh()
    pipeline = plan.Pipeline(module, mesh, inputs, loss)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    value = plan.train_step(pipeline, optimizer, plan.shard_inputs(inputs, mesh), mesh)

`loss(result, target)` gives the loss of a microbatch from what the module returns and the input `TARGET`.
";

const IMPORTS: &str = r#""""

import contextlib
import csv
import difflib
import io
import math
import operator
import os
import re
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

"#;

#[cfg(test)]
mod tests;
