//! Degrees that say how samples and experts are split: context parallelism, expert parallelism, and micro-batches per
//! replica.
//!
//! The layouts that a degree asks for become pins of the graph, which the search honours like the model's own. Devices
//! that split the positions of samples form a mesh axis of their own, beside replicas and tensor parallelism. Only
//! uniform plans have such an axis.

use crate::features::parallelism::expert_products;
use crate::features::target;
use crate::layers::cluster_finely;
use crate::layers::graph::LayeredGraph;
use crate::request::{BatchSizes, GivenDegrees, PlanFailure, Progress, Request};
use altiplano_ir::graph::{Graph, Pin, PinnedDim, ValueId};
use altiplano_ir::mesh::CONTEXT_AXIS;
use altiplano_ir::op::{Function, Op};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// The dimension of an attention's result that counts positions.
const POSITIONS: usize = 1;

/// Returns the request with the pins that `--ep` and `--cp` ask for.
///
/// # Errors
/// If the model has no experts, or their number is not divisible as asked.
pub fn with_pins(request: &Request) -> Result<Cow<'_, Request>, PlanFailure> {
    let GivenDegrees { ep, cp, .. } = request.degrees;
    if ep.is_none() && cp.is_none() {
        return Ok(Cow::Borrowed(request));
    }
    request.degrees.expect_positive()?;
    let mut graph = Graph::clone(&request.graph);
    if let Some(ep) = ep {
        let refused = |problem| Err(PlanFailure::Option { option: "ep", value: ep.into(), problem });
        let experts = expert_products(&graph);
        if ep > 1 && experts.is_empty() {
            return refused("is for models with experts; no parameter of this one has a dimension that counts them");
        }
        for (value, dim) in experts {
            if !graph.shape(value)[dim].is_multiple_of(ep.into()) {
                return refused("does not divide the number of experts");
            }
            pin(&mut graph, value, dim, "expert", ep);
        }
    }
    if let Some(parts) = cp {
        let attention = |v: &ValueId| match &graph.node(*v).op {
            Op::Composite(op) => matches!(op.function, Function::Attention { .. }),
            _ => false,
        };
        let all: Vec<ValueId> = graph.values().filter(attention).collect();
        all.into_iter().for_each(|v| pin(&mut graph, v, POSITIONS, CONTEXT_AXIS, parts));
    }
    Ok(Cow::Owned(Request { graph: graph.into(), ..request.clone() }))
}

/// Pins the split of a dimension into `parts`, and leaves all other dimensions open.
fn pin(graph: &mut Graph, value: ValueId, dim: usize, axis: &str, parts: u32) {
    let (mesh, axes) = match parts {
        1 => (Vec::new(), Vec::new()),
        _ => (vec![(axis.to_string(), u64::from(parts))], vec![axis.to_string()]),
    };
    let of = |d: usize| match d == dim {
        true => PinnedDim { axes: axes.clone(), open: false },
        false => PinnedDim { axes: Vec::new(), open: true },
    };
    let dims = (0..graph.shape(value).len()).map(of).collect();
    graph.pin(Pin { value, mesh, dims });
}

/// Splits the token dimension of values that pass between layers over `parts` devices of an axis of their own.
pub fn pin_positions(graph: &mut Graph, parts: u32) {
    if parts <= 1 {
        return;
    }
    let layered = LayeredGraph::new(graph.clone(), cluster_finely(graph, usize::MAX), &[], true);
    let passed: BTreeSet<ValueId> = layered.layers.iter().flat_map(|l| l.entering.iter().copied()).collect();
    for value in passed {
        let node = graph.node(value);
        if !node.ty.dtype.is_float() || node.ty.rank() != 3 {
            continue;
        }
        let dims = (0..node.ty.rank()).map(|d| PinnedDim {
            axes: if d == POSITIONS { vec![CONTEXT_AXIS.to_string()] } else { Vec::new() },
            open: node.batch_dims >> d & 1 == 1 || d == POSITIONS,
        });
        let (mesh, dims) = (vec![(CONTEXT_AXIS.to_string(), u64::from(parts))], dims.collect());
        graph.pin(Pin { value, mesh, dims });
    }
}

/// Plans each possible number of replicas with `size` samples per replica and microbatch. Returns what was found for those
/// that have a plan, which is at least one.
pub fn by_micro_batch<T>(
    request: &Request,
    size: u64,
    progress: &dyn Progress,
    planned: impl Fn(&Request) -> Result<T, PlanFailure>,
) -> Result<Vec<T>, PlanFailure> {
    let invalid = |problem| Err(PlanFailure::Option { option: "micro-batch-size", value: size, problem });
    if size == 0 {
        return invalid("must be at least 1");
    }
    let devices = request.cluster.num_devices();
    let global = request.global_batch_size();
    let degree = target::restrict(request)?.degrees.dp;
    let of_replicas = |dp: &u32| {
        let together = size.checked_mul(u64::from(*dp));
        degree.is_none_or(|given| given == *dp)
            && devices.is_multiple_of(*dp)
            && together.is_some_and(|m| global.is_multiple_of(m))
    };
    let replicas: Vec<u32> = (1..=devices).filter(of_replicas).collect();
    if replicas.is_empty() {
        return invalid("times the number of replicas does not divide the global batch");
    }
    let (mut plans, mut failures) = (Vec::new(), Vec::new());
    for dp in replicas {
        if progress.stopped() && !plans.is_empty() {
            break;
        }
        let fixed = Request {
            batch: BatchSizes { per_replica: None, microbatch: Some(size * u64::from(dp)), ..request.batch },
            degrees: GivenDegrees { dp: Some(dp), ..request.degrees },
            ..request.clone()
        };
        match planned(&fixed) {
            Ok(plan) => plans.push(plan),
            Err(why) => failures.push(why),
        }
    }
    match plans.is_empty() {
        true => Err(failures.into_iter().reduce(PlanFailure::nearer).unwrap_or(PlanFailure::NoCombination)),
        false => Ok(plans),
    }
}
