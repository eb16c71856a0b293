//! Plans for other software than this project's runtime.
//!
//! A target narrows what is searched to what its users can configure, and says how it runs that: which reductions hide behind the
//! backward pass, whether attention is one kernel, in which type gradients are summed. Everything else is as for any plan.

use crate::request::{PlanFailure, Request, SearchKind};
use altiplano_cost_models::catalogue::fuses_attention;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Execution, Target};

/// How a target runs a model on a device. Sources: Megatron-LM's `--overlap-grad-reduce` and `--overlap-param-gather` come with its
/// distributed optimizer, and it reduces all of a stage's gradients in one buffer; FSDP prefetches the next parameters and reduces
/// in the type that it computes in (PyTorch's `MixedPrecision`); XLA schedules collectives asynchronously and writes attention's scores.
/// All three have losses whose lookup reads a tensor of log-probabilities and whose gradient is scattered into another: Megatron-LM's
/// `vocab_parallel_cross_entropy`, PyTorch's `nll_loss`, and the scatter that JAX derives of `take_along_axis`.
pub fn execution(target: Target, device: &str, graph: &Graph, zero: Option<u8>) -> Execution {
    let half = graph.values().find_map(|v| match graph.node(v).op {
        Op::Parameter(_) if graph.ty(v).dtype.is_half() => Some(graph.ty(v).dtype),
        _ => None,
    });
    let fused_attention = fuses_attention(device);
    match target {
        Target::Altiplano => Execution { fused_attention, fused_loss: true, ..Execution::default() },
        Target::Megatron => Execution {
            bucket_bytes: u64::MAX,
            overlap: zero != Some(0),
            fused_attention,
            fused_loss: false,
            gradients: half.map(|_| DType::F32),
        },
        Target::Fsdp => Execution { overlap: true, fused_attention, gradients: half, ..Execution::default() },
        Target::Xla => Execution { overlap: true, fused_attention: false, ..Execution::default() },
    }
}

/// Refuses what is uniform over all devices where those are of several groups.
pub fn one_group(request: &Request, option: &'static str, value: &'static str) -> Result<(), PlanFailure> {
    match request.cluster.groups.len() {
        1 => Ok(()),
        groups => Err(PlanFailure::OneGroup { option, value, groups }),
    }
}

/// A request with what its target leaves no choice in.
///
/// # Errors
/// [`PlanFailure::Target`] where the request fixes a degree that the target does not have, and [`PlanFailure::OneGroup`] where
/// the target or the search is for devices that are all alike, and the cluster's are not.
pub fn aimed(request: &Request) -> Result<Request, PlanFailure> {
    if request.target != Target::Altiplano {
        one_group(request, "--target", request.target.name())?;
    }
    if request.search == SearchKind::Alpa {
        one_group(request, "--search", "alpa")?;
    }
    let mut aimed = request.clone();
    let devices = request.cluster.num_devices();
    let [dp, tp, pp] = match request.target {
        Target::Altiplano | Target::Megatron => [None, None, None],
        Target::Fsdp => [Some(devices / request.cp.unwrap_or(1).max(1)), Some(1), Some(1)],
        Target::Xla => [None, None, Some(1)],
    };
    let degrees = [("dp", &mut aimed.dp, dp), ("tp", &mut aimed.tp, tp), ("pp", &mut aimed.pp, pp)];
    for (option, degree, only) in degrees {
        match (*degree, only) {
            (Some(given), Some(allowed)) if given != allowed => {
                return Err(PlanFailure::Target { target: request.target.name(), option, given, allowed });
            }
            (_, Some(_)) => *degree = only,
            (_, None) => {}
        }
    }
    if request.target != Target::Altiplano {
        let device = &request.cluster.groups[0].device.name;
        aimed.execution = execution(request.target, device, &request.graph, request.zero);
    }
    Ok(aimed)
}
