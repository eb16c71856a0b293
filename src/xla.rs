//! One step of a plan on XLA's devices, through a PJRT plugin.

use crate::error::Error;
use crate::training::{Batch, scalars};
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::plan::Plan;
use altiplano_ir::tensor::Tensor;
use altiplano_planner::programs;
use altiplano_runtime::HostTensor;
use altiplano_xla::pjrt::{ClientOption, Plugin};
use altiplano_xla::program::Engine;
use std::collections::BTreeMap;
use std::path::Path;

/// The results of a step.
pub(crate) struct Stepped {
    pub loss: f64,
    /// The gradients of the step's loss, by parameter.
    pub gradients: BTreeMap<String, Vec<f64>>,
    pub weights: BTreeMap<String, Vec<f64>>,
}

/// Runs a plan's step on as many devices as it needs, from these weights. The plugin is one for CPUs, which makes them.
pub(crate) fn step(
    plan: &Plan,
    plugin: &Path,
    weights: &BTreeMap<String, HostTensor>,
    batch: &Batch,
    learning_rate: f64,
) -> Result<Stepped, Error> {
    let devices = plan.stages.first().map_or(1, |stage| stage.mesh.num_devices());
    let count = ClientOption::Number("cpu_device_count".to_string(), i64::from(devices));
    let client = Plugin::open(plugin)?.client(&[count])?;
    let mut engine = Engine::new(&client, &programs(plan)?)?;
    for (name, value) in weights {
        engine.load(name, &value.to_reference())?;
    }
    let scalars = scalars(learning_rate, 1);
    let input = |name: &str, microbatch: u32| rows(&plan.graph, batch, name, microbatch);
    let loss = engine.step(&input, &|name| scalars.get(name).copied())?;
    // Accumulators hold sums over microbatches.
    let scale = if plan.loss == LossKind::Sum { 1.0 } else { 1.0 / f64::from(plan.num_microbatches) };
    let (mut gradients, mut updated) = (BTreeMap::new(), BTreeMap::new());
    for name in weights.keys() {
        updated.insert(name.clone(), engine.parameter(name)?.data);
    }
    for (_, name) in plan.graph.trained_parameters() {
        let sum = engine.accumulator(name)?.data;
        gradients.insert(name.to_string(), sum.into_iter().map(|g| g * scale).collect());
    }
    Ok(Stepped { loss, gradients, weights: updated })
}

/// A microbatch's rows of an input. `None` if the batch has no such input.
fn rows(graph: &Graph, batch: &Batch, name: &str, microbatch: u32) -> Option<Tensor> {
    let is_it = |&(_, input): &(ValueId, &str)| input == name;
    let node = graph.node(graph.inputs().find(is_it)?.0);
    let range = |(d, &size): (usize, &u64)| {
        let first = if node.batch_dims >> d & 1 == 1 { u64::from(microbatch) * size } else { 0 };
        (first..first + size).collect()
    };
    let indices: Vec<Vec<u64>> = node.ty.shape.iter().enumerate().map(range).collect();
    Some(batch.get(name)?.at(&indices).to_reference())
}
