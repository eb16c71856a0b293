//! `--to stablehlo`: the loss of one microbatch and its gradients as a StableHLO module, with the plan's layouts as
//! Shardy's shardings. XLA compiles it for the plan's mesh.

use super::{ExportProblem, Exported, Layouts, Stack};
use crate::error::Error;
use altiplano_ir::autodiff::differentiate_for;
use altiplano_ir::expand::expand;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::sharding::Sharding;
use altiplano_xla::text::{self, Options, contiguous};
use std::collections::BTreeMap;

pub(super) fn module(layouts: &Layouts) -> Result<Exported, Error> {
    let (plan, mesh) = (layouts.plan, layouts.mesh());
    let mut notes: Vec<String> = Vec::new();
    notes.extend(layouts.rounding(contiguous, "Shardy splits a dimension into contiguous blocks only"));
    notes.extend(layouts.recomputation()?);
    notes.extend(layouts.update());
    if plan.num_microbatches > 1 {
        notes.push(format!(
            "the module computes one of {} microbatches of {} samples; the caller adds up their gradients",
            plan.num_microbatches, plan.microbatch
        ));
    }
    let refused = |problem| Error::Export { to: Stack::StableHlo.name(), problem: Box::new(problem) };
    let step = step(layouts).map_err(refused)?;
    let options = Options {
        layouts: Some(text::Layouts { mesh, values: step.layouts }),
        results: step.results,
        ..Options::default()
    };
    let mut text = format!("// The loss and the gradients of one microbatch. Written by {}.\n", layouts.origin());
    for note in &notes {
        // A line break would end the comment.
        text.push_str(&format!("// {}\n", note.replace(|c: char| c.is_control(), " ")));
    }
    text.push_str(&text::module(&step.graph, &options));
    Ok(Exported { text, notes })
}

/// The graph of a microbatch's loss and gradients.
struct Step {
    graph: Graph,
    results: Vec<String>,
    layouts: BTreeMap<ValueId, Sharding>,
}

fn step(layouts: &Layouts) -> Result<Step, ExportProblem> {
    let (plan, stage) = (layouts.plan, layouts.stage);
    let expanded = expand(&plan.graph);
    let stops: Vec<ValueId> = plan.stop_gradients.iter().map(|v| expanded.values[v.index()]).collect();
    let differentiated =
        differentiate_for(&expanded.graph, &stops, plan.execution.fused_loss).map_err(ExportProblem::Gradients)?;
    let mut of_values = BTreeMap::new();
    for (&v, value) in &stage.shardings {
        let node = plan.graph.node(v);
        let sharding = plan.graph.rule(v).shardings(&value.strategy, &stage.mesh).result;
        if !node.op.is_leaf() && !matches!(node.op, Op::Constant(_) | Op::Iota(_)) && !sharding.is_partial() {
            of_values.insert(expanded.values[v.index()], sharding);
        }
    }
    for input in &layouts.inputs {
        let named = expanded.graph.inputs().find(|(_, name)| *name == input.name);
        of_values.extend(named.map(|(v, _)| (v, input.sharding.clone())));
    }
    let mut graph = differentiated.graph;
    let mut outputs = vec![differentiated.loss];
    let mut results = vec!["loss".to_string()];
    for (v, name) in expanded.graph.parameters() {
        let storage = &stage.parameters[name];
        of_values.insert(v, storage.parameter.clone());
        let contributions: Vec<ValueId> = differentiated.contributions[v.index()].iter().map(|c| c.1).collect();
        let Some(sum) = contributions.into_iter().reduce(|a, b| graph.add(a, b)) else { continue };
        of_values.insert(sum, storage.gradient.reduced());
        outputs.push(sum);
        results.push(format!("gradient of {name}"));
    }
    graph.outputs = outputs;
    Ok(Step { graph, results, layouts: of_values })
}
