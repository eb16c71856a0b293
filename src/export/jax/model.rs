//! The model of a plan as functions of Python: one for each layer, and one for each stage, which calls them. Layers that
//! differ only in their parameters share a function. Layouts and the values that are kept are part of the text.

use super::{ops, quoted, sayable_spec, summed};
use crate::export::ExportProblem;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Microbatches, Op};
use altiplano_ir::plan::{Plan, Storage};
use altiplano_ir::sharding::Sharding;
use altiplano_planner::lower::forward::{Forward, ForwardStage};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The functions of a model, and the values that they pass between stages.
pub(super) struct Model {
    pub functions: String,
    /// For each stage, the values that it receives.
    pub receives: Vec<Vec<Received>>,
    /// For each stage, the values that it sends to others.
    pub sends: Vec<Vec<ValueId>>,
    /// For each stage, the names of the inputs that it reads.
    pub inputs: Vec<BTreeSet<String>>,
    /// The stage that computes the loss.
    pub loss_stage: usize,
    /// The layouts that no PartitionSpec can say, and that XLA chooses.
    pub unsaid: usize,
}

/// A value from an earlier stage.
pub(super) struct Received {
    pub value: ValueId,
    pub source: usize,
    pub layout: Sharding,
    /// True if its gradient goes back to that stage.
    pub differentiated: bool,
}

/// The key of a value in the dictionaries that stages pass on. No name of an input looks like it.
pub(super) fn key(v: ValueId) -> String {
    format!("%{}", v.0)
}

/// Writes the model of a plan.
pub(super) fn written(plan: &Plan, forward: &Forward) -> Result<Model, ExportProblem> {
    let graph = &forward.graph;
    let loss = graph.outputs[0];
    let stage_of = stage_of(forward);
    let loss_stage = stage_of.get(&loss).copied().ok_or(ExportProblem::LossOutside)?;
    let trained = graph.depends_on(|v| graph.is_trained(v));
    let receives = |stage: &ForwardStage| {
        let received = |(&value, layout): (&ValueId, &Sharding)| {
            let source = *stage_of.get(&value)?;
            let differentiated = trained[value.index()] && graph.ty(value).dtype.is_float();
            Some(Received { value, source, layout: layout.clone(), differentiated })
        };
        stage.stage.receives.iter().filter_map(received).collect::<Vec<_>>()
    };
    let receives: Vec<Vec<Received>> = forward.stages.iter().map(receives).collect();
    let sent_by = |s: usize| {
        let values: BTreeSet<ValueId> = receives.iter().flatten().filter(|r| r.source == s).map(|r| r.value).collect();
        values.into_iter().collect::<Vec<_>>()
    };
    let sends: Vec<Vec<ValueId>> = (0..forward.stages.len()).map(sent_by).collect();
    let mut writer = Writer {
        plan,
        forward,
        users: graph.users(),
        layers: BTreeMap::new(),
        with_totals: BTreeSet::new(),
        text: String::new(),
        unsaid: 0,
    };
    let mut inputs = Vec::new();
    for (s, sent) in sends.iter().enumerate() {
        let mut read = writer.stage(s, sent, (s == loss_stage).then_some(loss))?;
        writer.totals(s, &mut read)?;
        inputs.push(read);
    }
    let each = |name: &str, function: &dyn Fn(usize) -> String| {
        let all: Vec<String> = (0..forward.stages.len()).map(function).collect();
        format!("{name} = [{}]\n", all.join(", "))
    };
    writer.text += &each("STAGES", &|s| format!("_stage{s}"));
    let total = |s: usize| if writer.with_totals.contains(&s) { format!("_totals{s}") } else { "None".to_string() };
    let totals = each("TOTALS", &total);
    let functions = writer.text + &totals + "\n\n";
    Ok(Model { functions, receives, sends, inputs, loss_stage, unsaid: writer.unsaid })
}

fn stage_of(forward: &Forward) -> BTreeMap<ValueId, usize> {
    let of_stage = |(s, stage): (usize, &ForwardStage)| stage.nodes.iter().map(move |&v| (v, s)).collect::<Vec<_>>();
    forward.stages.iter().enumerate().flat_map(of_stage).collect()
}

struct Writer<'a> {
    plan: &'a Plan,
    forward: &'a Forward,
    users: Vec<Vec<ValueId>>,
    /// The names of written layers, by their text.
    layers: BTreeMap<String, String>,
    /// The stages that need values summed over all microbatches.
    with_totals: BTreeSet<usize>,
    text: String,
    unsaid: usize,
}

impl Writer<'_> {
    /// Writes a stage and its layers. Returns the names of the inputs that it reads.
    fn stage(&mut self, s: usize, sends: &[ValueId], loss: Option<ValueId>) -> Result<BTreeSet<String>, ExportProblem> {
        let (forward, mut inputs) = (self.forward, BTreeSet::new());
        let stage = &forward.stages[s];
        let mut body = String::new();
        let mut known: BTreeSet<ValueId> = BTreeSet::new();
        for layer in stage.stage.layers.clone() {
            let here = |v: &&ValueId| forward.layer_of[v.index()] == Some(layer);
            let nodes: Vec<ValueId> = stage.nodes.iter().filter(here).copied().collect();
            let leaves = |v: &&ValueId| {
                let elsewhere = |u: &ValueId| forward.layer_of[u.index()] != Some(layer);
                sends.contains(v) || loss == Some(**v) || self.users[v.index()].iter().any(elsewhere)
            };
            let results: Vec<ValueId> = nodes.iter().filter(leaves).copied().collect();
            if results.is_empty() {
                continue;
            }
            let mut written = Layer::new(self.plan, forward, stage);
            written.write(&nodes, &results)?;
            self.unsaid += written.unsaid;
            let operands: Vec<String> =
                written.arguments.iter().map(|&v| self.operand(v, &known, &mut inputs)).collect();
            let function = self.layer(written.function(&results));
            let names: Vec<String> = results.iter().map(|v| format!("v{}", v.0)).collect();
            let operands = operands.join(", ");
            let _ = writeln!(body, "    {}, = _layer({function}, at, {operands})", names.join(", "));
            known.extend(results);
        }
        let sent = sends.iter().map(|&v| format!("{}: v{}", quoted(&key(v)), v.0));
        let results: Vec<String> = sent.chain(loss.map(|v| format!("\"loss\": v{}", v.0))).collect();
        let layers = &stage.stage.layers;
        let _ = writeln!(self.text, "def _stage{s}(at, p, x):");
        let _ = writeln!(self.text, "    \"\"\"Layers {} to {}.\"\"\"", layers.start, layers.end.saturating_sub(1));
        let _ = writeln!(self.text, "{body}    return {{{}}}\n\n", results.join(", "));
        Ok(inputs)
    }

    /// Writes a function of a microbatch's inputs that gives its share of the values that stage `s` needs summed over
    /// all microbatches, before the first of them runs.
    fn totals(&mut self, s: usize, inputs: &mut BTreeSet<String>) -> Result<(), ExportProblem> {
        let (graph, microbatches) = (&self.forward.graph, self.plan.num_microbatches);
        let here: Vec<ValueId> = self.forward.stages[s].nodes.iter().copied().filter(|&v| graph.is_total(v)).collect();
        if here.is_empty() || microbatches == 1 {
            return Ok(());
        }
        let mut needed: BTreeSet<ValueId> = here.iter().map(|&v| graph.node(v).operands[0]).collect();
        for v in graph.values().rev() {
            if needed.contains(&v) {
                needed.extend(&graph.node(v).operands);
            }
        }
        let mut lines = String::new();
        for &v in &needed {
            let node = graph.node(v);
            let text = match &node.op {
                Op::Input(op) => {
                    inputs.insert(op.name.clone());
                    format!("x[{}]", quoted(&op.name))
                }
                _ => {
                    let operands: Vec<String> = node.operands.iter().map(|o| format!("v{}", o.0)).collect();
                    let written = ops::expression(graph, v, &operands, microbatches);
                    written.ok_or_else(|| ExportProblem::Op(node.op.name()))?
                }
            };
            let _ = writeln!(lines, "    v{} = {text}", v.0);
        }
        let share = |&v: &ValueId| {
            let (of, dtype) = (graph.node(v).operands[0].0, graph.ty(v).dtype);
            let wide = if dtype.is_half() { ops::name(DType::F32) } else { ops::name(dtype) };
            let is_mean = matches!(graph.node(v).op, Op::Microbatches(Microbatches::Mean));
            let over = if is_mean { format!(" / {microbatches}") } else { String::new() };
            format!("{}: lax.convert_element_type(v{of}, {wide}){over}", quoted(&key(v)))
        };
        let shares: Vec<String> = here.iter().map(share).collect();
        let _ = writeln!(self.text, "def _totals{s}(x):\n{lines}    return {{{}}}\n\n", shares.join(", "));
        self.with_totals.insert(s);
        Ok(())
    }

    /// A value outside a layer, as its stage calls it.
    fn operand(&self, v: ValueId, known: &BTreeSet<ValueId>, inputs: &mut BTreeSet<String>) -> String {
        match &self.forward.graph.node(v).op {
            Op::Parameter(op) => format!("p[{}]", quoted(&op.name)),
            Op::Input(op) => {
                inputs.insert(op.name.clone());
                format!("x[{}]", quoted(&op.name))
            }
            _ if known.contains(&v) => format!("v{}", v.0),
            _ => format!("x[{}]", quoted(&key(v))),
        }
    }

    /// The name of the function with this text, which is written if there is none yet.
    fn layer(&mut self, function: String) -> String {
        if let Some(name) = self.layers.get(&function) {
            return name.clone();
        }
        let name = format!("_layer{}", self.layers.len());
        let _ = writeln!(self.text, "def {name}{function}\n");
        self.layers.insert(function, name.clone());
        name
    }
}

/// One layer while it is written. Its names do not depend on its place in the model.
struct Layer<'a> {
    plan: &'a Plan,
    forward: &'a Forward,
    stage: &'a ForwardStage,
    lines: String,
    /// The values from outside, in the order of the function's arguments.
    arguments: Vec<ValueId>,
    /// The name of each known value, and its layout unless it is a constant.
    names: BTreeMap<ValueId, (String, Option<Sharding>)>,
    /// The names of values in other layouts.
    moved: BTreeMap<(ValueId, Sharding), String>,
    count: usize,
    unsaid: usize,
}

impl<'a> Layer<'a> {
    fn new(plan: &'a Plan, forward: &'a Forward, stage: &'a ForwardStage) -> Layer<'a> {
        let (lines, arguments) = (String::new(), Vec::new());
        let (names, moved) = (BTreeMap::new(), BTreeMap::new());
        Layer { plan, forward, stage, lines, arguments, names, moved, count: 0, unsaid: 0 }
    }

    fn write(&mut self, nodes: &[ValueId], results: &[ValueId]) -> Result<(), ExportProblem> {
        for &v in nodes {
            self.node(v, results.contains(&v))?;
        }
        Ok(())
    }

    /// The function without its name.
    fn function(&self, results: &[ValueId]) -> String {
        let arguments: Vec<String> = (0..self.arguments.len()).map(|i| format!(", a{i}")).collect();
        let results: Vec<String> = results.iter().map(|v| format!("{},", self.names[v].0)).collect();
        format!("(at{}):\n{}    return {}\n", arguments.concat(), self.lines, results.join(" "))
    }

    fn line(&mut self, expression: &str) -> String {
        let name = format!("v{}", self.count);
        self.count += 1;
        let _ = writeln!(self.lines, "    {name} = {expression}");
        name
    }

    fn node(&mut self, v: ValueId, is_result: bool) -> Result<(), ExportProblem> {
        let (forward, stage) = (self.forward, self.stage);
        let graph = &forward.graph;
        let node = graph.node(v);
        let shardings = graph.rule(v).shardings(&stage.stage.shardings[&v].strategy, &stage.mesh);
        // A total is known before the microbatch runs.
        if graph.is_total(v) && self.plan.num_microbatches > 1 {
            let text = format!("lax.convert_element_type({}, {})", self.argument(v), ops::name(node.ty.dtype));
            let name = self.line(&text);
            self.names.insert(v, (name, None));
            return Ok(());
        }
        let mut operands = Vec::new();
        for (&o, layout) in node.operands.iter().zip(&shardings.operands) {
            operands.push(self.operand(o, layout)?);
        }
        let mut text = self.expression(v, &operands)?;
        if forward.stopped[v.index()] {
            text = format!("lax.stop_gradient({text})");
        }
        let varies = |o: ValueId| forward.layer_of[o.index()].is_some() || graph.node(o).op.is_leaf();
        let same = |(o, layout): (&ValueId, &Sharding)| *layout == shardings.result && varies(*o);
        // The result of an elementwise op lies as its operands do.
        let follows = node.op.is_elementwise() && node.operands.iter().zip(&shardings.operands).any(same);
        if !shardings.result.is_partial() && (!follows || is_result) {
            text = self.laid_out(&text, &shardings.result);
        }
        if !stage.recomputed.contains(&v) && !shardings.result.is_partial() {
            text = format!("keep({text})");
        }
        let name = self.line(&text);
        self.names.insert(v, (name, Some(shardings.result)));
        Ok(())
    }

    fn expression(&self, v: ValueId, operands: &[String]) -> Result<String, ExportProblem> {
        let graph = &self.forward.graph;
        let written = ops::expression(graph, v, operands, self.plan.num_microbatches);
        written.ok_or_else(|| ExportProblem::Op(graph.node(v).op.name()))
    }

    /// The layout of a value where this layer has it.
    fn layout(&self, v: ValueId) -> Option<Sharding> {
        if let Some((_, layout)) = self.names.get(&v) {
            return layout.clone();
        }
        let (graph, stage) = (&self.forward.graph, &self.stage.stage);
        match &graph.node(v).op {
            Op::Parameter(op) => stage.parameters.get(&op.name).map(|storage| storage.parameter.clone()),
            // Inputs are laid out where they are read.
            Op::Input(_) => None,
            _ => stage.receives.get(&v).cloned().or_else(|| {
                let value = stage.shardings.get(&v)?;
                Some(graph.rule(v).shardings(&value.strategy, &self.stage.mesh).result)
            }),
        }
    }

    fn argument(&mut self, v: ValueId) -> String {
        let at = self.arguments.iter().position(|&known| known == v).unwrap_or_else(|| {
            self.arguments.push(v);
            self.arguments.len() - 1
        });
        format!("a{at}")
    }

    /// The name of an operand in the layout that an op reads.
    fn operand(&mut self, v: ValueId, to: &Sharding) -> Result<String, ExportProblem> {
        let (graph, layout) = (&self.forward.graph, self.layout(v));
        if !self.names.contains_key(&v) {
            let is_constant = self.forward.layer_of[v.index()].is_none() && !graph.node(v).op.is_leaf();
            let name = if is_constant { self.constant(v)? } else { self.argument(v) };
            self.names.insert(v, (name, layout.clone()));
        }
        let name = self.names[&v].0.clone();
        let is_input = matches!(graph.node(v).op, Op::Input(_));
        let stays = layout.as_ref().is_none_or(|layout| layout == to) && !is_input;
        if stays || to.is_partial() {
            return Ok(name);
        }
        let place = (v, to.clone());
        if let Some(known) = self.moved.get(&place) {
            return Ok(known.clone());
        }
        // A cotangent goes straight to the layout of its value, or of the parameter's gradients.
        let has_none = is_input || !graph.ty(v).dtype.is_float();
        let back = match (has_none, self.parameter(v), &layout) {
            (true, _, _) => None,
            (false, Some(storage), _) => Some(summed(&storage).clone()),
            (false, None, layout) => layout.as_ref().map(Sharding::reduced),
        };
        let mut text = self.relaid(&name, to, back);
        if text == name {
            return Ok(name);
        }
        let was_partial = layout.is_some_and(|layout| layout.is_partial());
        if was_partial && !self.stage.recomputed.contains(&v) {
            text = format!("keep({text})");
        }
        let moved = self.line(&text);
        self.moved.insert(place, moved.clone());
        Ok(moved)
    }

    /// Writes a value that depends on no leaf, with all that it depends on.
    fn constant(&mut self, v: ValueId) -> Result<String, ExportProblem> {
        let mut operands = Vec::new();
        for &o in &self.forward.graph.node(v).operands {
            let name = match self.names.get(&o) {
                Some((name, _)) => name.clone(),
                None => self.constant(o)?,
            };
            operands.push(name);
        }
        let text = self.expression(v, &operands)?;
        let name = self.line(&text);
        self.names.insert(v, (name.clone(), None));
        Ok(name)
    }

    fn parameter(&self, v: ValueId) -> Option<Storage> {
        match &self.forward.graph.node(v).op {
            Op::Parameter(op) => self.stage.stage.parameters.get(&op.name).cloned(),
            _ => None,
        }
    }

    /// A value in another layout. Its cotangent goes to layout `back`.
    fn relaid(&mut self, name: &str, to: &Sharding, back: Option<Sharding>) -> String {
        let laid_out = self.laid_out(name, to);
        let (Some(back), Some(to)) = (back, sayable_spec(to, &self.stage.mesh)) else { return laid_out };
        let back = sayable_spec(&back, &self.stage.mesh).unwrap_or_else(|| "None".to_string());
        if laid_out == name { laid_out } else { format!("move(at, {name}, {to}, {back})") }
    }

    /// An expression in a layout, if a PartitionSpec can say it.
    fn laid_out(&mut self, text: &str, layout: &Sharding) -> String {
        if layout.dims.is_empty() || self.stage.mesh.num_devices() == 1 {
            return text.to_string();
        }
        match sayable_spec(layout, &self.stage.mesh) {
            Some(spec) => format!("at({text}, {spec})"),
            None => {
                self.unsaid += 1;
                text.to_string()
            }
        }
    }
}
