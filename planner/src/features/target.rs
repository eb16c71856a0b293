//! Plans for software other than this project's runtime.
//!
//! A target restricts the search to plans that its users can configure. It also determines how a plan runs:
//! reductions that overlap the backward pass, fused attention, and the type in which gradients are summed.
//! Everything else is the same for all plans.

use super::modules::modules_of;
use super::stacks::stack;
use crate::lower::repeat::grows;
use crate::request::{PlanFailure, Request, SearchKind};
use altiplano_ir::cluster::{Architecture, Cluster, Group};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Composite, Function, Op};
use altiplano_ir::plan::{AttentionKernels, Execution, Target};
use altiplano_ir::recompute::{Module, Modules};
use std::collections::{BTreeMap, BTreeSet};

/// Elements that DeepSpeed reduces together: the default of `reduce_bucket_size`.
const DEEPSPEED_BUCKET: u64 = 500_000_000;

/// Describes how a target runs a model on a device. Megatron-LM: `--overlap-grad-reduce` and
/// `--overlap-param-gather` come with its distributed optimizer, and all gradients of a stage are reduced in
/// one buffer. FSDP: prefetches the next parameters, and reduces in the type that it computes in (PyTorch's
/// `MixedPrecision`). It gathers and reduces each block through one buffer, with copies of parameters and
/// gradients (`foreach_all_gather` and `foreach_reduce`, torch/distributed/fsdp). PyTorch's
/// `scaled_dot_product_attention` prefers FlashAttention-2 on all devices, and torchtitan's selective
/// checkpointing recomputes every second product. torchtitan is FSDP with other degrees beside it. DeepSpeed:
/// `overlap_comm`, and gradients in the type of the model (`communication_data_type`). XLA: schedules collectives asynchronously. In all of them, the
/// loss reads a tensor of log-probabilities, and its gradient is scattered into another: Megatron-LM's
/// `vocab_parallel_cross_entropy`, PyTorch's `nll_loss`, and the scatter that JAX derives from
/// `take_along_axis`.
pub fn execution(target: Target, cluster: &Cluster, graph: &Graph, zero: Option<u8>) -> Execution {
    let half = graph.values().find_map(|v| match graph.node(v).op {
        Op::Parameter(_) if graph.ty(v).dtype.is_half() => Some(graph.ty(v).dtype.cotangent()),
        _ => None,
    });
    let fused_attention = fuses_attention(target, cluster, graph);
    match target {
        Target::Altiplano => Execution { fused_attention, fused_loss: true, ..Execution::default() },
        Target::Megatron => Execution {
            bucket_bytes: u64::MAX,
            overlap: zero != Some(0),
            fused_attention,
            fused_loss: false,
            gradients: half.map(|_| DType::F32),
            ..Execution::default()
        },
        Target::Fsdp | Target::Torchtitan => Execution {
            overlap: true,
            fused_attention,
            gradients: half,
            attention: AttentionKernels::Flash2,
            recompute_modules: Modules::default().with(Module::SecondProducts),
            unit_bytes: unit_bytes(graph),
            ..Execution::default()
        },
        Target::Deepspeed => Execution {
            bucket_bytes: DEEPSPEED_BUCKET * half.unwrap_or(DType::F32).bytes(),
            overlap: true,
            fused_attention,
            gradients: half,
            attention: AttentionKernels::Flash2,
            ..Execution::default()
        },
        Target::Xla => {
            Execution { overlap: true, fused_attention, attention: AttentionKernels::Cudnn, ..Execution::default() }
        }
    }
}

/// The execution of a plan that may recompute whatever frees much memory for few operations: up projections as well, since
/// their factors are compressed. Software that cannot recompute them stays as it is.
pub fn with_up_projections(execution: Execution, target: Target, graph: &Graph) -> Execution {
    let module = Module::UpProjections;
    let possible = stack(target).modules.contains(&module) && modules_of(graph).contains(module);
    let recompute_modules = execution.recompute_modules;
    Execution {
        recompute_modules: if possible { recompute_modules.with(module) } else { recompute_modules },
        ..execution
    }
}

/// The execution of a configuration that shards storage at a level. From ZeRO-2 on, Megatron-LM runs its own FSDP, and
/// at ZeRO-3 DeepSpeed gathers parameters by module; both hold a block at a time, as PyTorch's FSDP does.
pub fn execution_at(request: &Request, level: u8) -> Execution {
    let by_block = match request.target {
        Target::Megatron => level >= 2,
        Target::Deepspeed => level >= 3,
        Target::Altiplano | Target::Fsdp | Target::Xla | Target::Torchtitan => false,
    };
    match by_block {
        true => Execution {
            bucket_bytes: Execution::default().bucket_bytes,
            overlap: true,
            unit_bytes: unit_bytes(&request.graph),
            ..request.execution
        },
        false => request.execution,
    }
}

/// Bytes of the largest block of a model. A block consists of parameters with the same name up to the first
/// number, as in a list of modules. If no name has a number, all parameters are one block.
fn unit_bytes(graph: &Graph) -> u64 {
    let mut blocks: BTreeMap<&str, u64> = BTreeMap::new();
    let mut all = 0;
    for (p, name) in graph.parameters() {
        let bytes = graph.ty(p).bytes();
        all += bytes;
        let Some(first) = name.find(|c: char| c.is_ascii_digit()) else { continue };
        let digits = name[first..].find(|c: char| !c.is_ascii_digit()).unwrap_or(name.len() - first);
        *blocks.entry(&name[..first + digits]).or_default() += bytes;
    }
    blocks.into_values().max().unwrap_or(all)
}

/// True if a target's software has fused attention for a model on every device of a cluster, since lowering is
/// the same for all stages. A device that declares fused attention is trusted.
pub fn fuses_attention(target: Target, cluster: &Cluster, graph: &Graph) -> bool {
    let heads = heads(graph);
    let fuses = |group: &Group| {
        let device = &group.device;
        let by_software = || {
            let Some(generation) = device.generation() else { return false };
            heads.iter().all(|head| has_kernel(target, generation, *head))
        };
        device.kind.is_gpu() && device.fused_attention.unwrap_or_else(by_software)
    };
    cluster.groups.iter().all(fuses)
}

/// The type and size of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    dtype: DType,
    size: u64,
}

/// The heads of a model: those of recognised attention, or else of products that are larger than their factors.
fn heads(graph: &Graph) -> BTreeSet<Head> {
    let head = |v: ValueId| {
        let ty = graph.ty(v);
        Some(Head { dtype: ty.dtype, size: *ty.shape.last()? })
    };
    let of_node = |v: ValueId| -> Vec<Head> {
        let node = graph.node(v);
        match &node.op {
            Op::Composite(Composite { function: Function::Attention { .. }, .. }) => {
                node.operands.iter().take(3).filter_map(|&o| head(o)).collect()
            }
            Op::DotGeneral(dot) if grows(graph, v) => {
                let lhs = graph.ty(node.operands[0]);
                let size = dot.lhs_contract.iter().map(|&d| lhs.shape[d]).product();
                vec![Head { dtype: lhs.dtype, size }]
            }
            _ => Vec::new(),
        }
    };
    graph.values().flat_map(of_node).collect()
}

/// True if a target's software has a fused attention kernel for such heads on devices of a generation:
///
/// * This project's kernels use `mma.sync` of sm_80, also in single precision, and support heads of up to 256
///   elements. The runtime supports no other vendor's devices, but plans may target a future one.
/// * Megatron-LM uses Transformer Engine: FlashAttention-2 (16 bits, sm_80 and later, heads up to 256), or its port
///   to gfx90a and gfx942.
/// * PyTorch's `scaled_dot_product_attention` uses FlashAttention-2 under the same conditions. Otherwise, on NVIDIA
///   devices, it uses a memory-efficient kernel: for f16 and f32 everywhere, for bf16 from sm_80 on. Both need rows
///   aligned to 16 bytes.
/// * XLA calls cuDNN: 16 bits, sm_80 and later, heads up to 128, and up to 256 from sm_90 on. On AMD devices it
///   materialises the scores.
fn has_kernel(target: Target, generation: Architecture, head: Head) -> bool {
    let Head { dtype, size } = head;
    let aligned = (size * dtype.bytes()).is_multiple_of(16);
    let is_flash = match generation {
        Architecture::Nvidia(capability) => capability >= 80,
        Architecture::Amd(number) => (0x90a..0x1000).contains(&number),
    };
    let flash = is_flash && dtype.is_half() && size <= 256 && aligned;
    match (target, generation) {
        (Target::Altiplano, _) => is_flash && (dtype.is_half() || dtype == DType::F32) && size <= 256,
        (Target::Megatron, _) | (Target::Fsdp | Target::Torchtitan | Target::Deepspeed, Architecture::Amd(_)) => flash,
        (Target::Fsdp | Target::Torchtitan | Target::Deepspeed, Architecture::Nvidia(capability)) => {
            let efficient = dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16 && capability >= 80;
            efficient && aligned
        }
        (Target::Xla, Architecture::Nvidia(capability)) => flash && (size <= 128 || capability >= 90),
        (Target::Xla, Architecture::Amd(_)) => false,
    }
}

/// Refuses an option that requires identical devices if the cluster has several groups.
pub fn one_group(request: &Request, option: &'static str, value: &'static str) -> Result<(), PlanFailure> {
    match request.cluster.groups.len() {
        1 => Ok(()),
        groups => Err(PlanFailure::OneGroup { option, value, groups }),
    }
}

/// Applies the restrictions of the request's target.
///
/// # Errors
/// [`PlanFailure::Target`] or [`PlanFailure::Lacks`] if the request fixes a degree that the target does not have.
/// [`PlanFailure::OneGroup`] if the target or the search requires identical devices and the cluster has several
/// groups.
pub fn restrict(request: &Request) -> Result<Request, PlanFailure> {
    if request.target != Target::Altiplano {
        one_group(request, "--target", request.target.name())?;
    }
    if request.search == SearchKind::Alpa {
        one_group(request, "--search", "alpa")?;
    }
    let mut restricted = request.clone();
    let devices = request.cluster.num_devices();
    let [dp, tp, pp] = match request.target {
        Target::Altiplano | Target::Megatron | Target::Torchtitan | Target::Deepspeed => [None, None, None],
        Target::Fsdp => [Some(devices / request.degrees.cp.unwrap_or(1).max(1)), Some(1), Some(1)],
        Target::Xla => [None, None, Some(1)],
    };
    let degrees = [
        ("dp", &mut restricted.degrees.dp, dp),
        ("tp", &mut restricted.degrees.tp, tp),
        ("pp", &mut restricted.degrees.pp, pp),
    ];
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
        stack(request.target).check(&restricted)?;
        let execution = execution(request.target, &request.cluster, &request.graph, request.degrees.zero);
        let scales_factors = request.execution.scales_factors;
        restricted.execution =
            Execution { scales_factors, ..with_up_projections(execution, request.target, &request.graph) };
    }
    if let Some(fused_attention) = request.fused_attention {
        restricted.execution.fused_attention = fused_attention;
    }
    if let Some(modules) = request.recompute_modules {
        restricted.execution.recompute_modules = modules;
    }
    Ok(restricted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_the_largest_block() {
        let bytes = |parameters: &[(&str, u64)]| {
            let mut g = Graph::new("blocks");
            for &(name, size) in parameters {
                let ty = altiplano_ir::types::TensorType::new(DType::BF16, [size]);
                g.emit(Op::Parameter(altiplano_ir::op::Parameter::new(name, ty)), &[]);
            }
            unit_bytes(&g)
        };
        let blocks =
            [("embed", 900), ("h.0.fc1", 20), ("h.0.fc2", 20), ("h.1.fc1", 30), ("h.10.fc1", 60), ("head", 900)];
        assert_eq!(bytes(&blocks), 120);
        assert_eq!(bytes(&[("up", 8), ("down", 16)]), 48);
        assert_eq!(bytes(&[]), 0);
    }

    #[test]
    fn software_has_attention_in_one_kernel_by_generation_type_and_head() {
        use Architecture::{Amd, Nvidia};
        use Target::{Altiplano, Fsdp, Megatron, Xla};
        let table = [
            // (generation, type, head, targets that have a kernel)
            (Nvidia(90), DType::BF16, 128, vec![Altiplano, Megatron, Fsdp, Xla]),
            (Nvidia(80), DType::BF16, 128, vec![Altiplano, Megatron, Fsdp, Xla]),
            (Nvidia(89), DType::F16, 64, vec![Altiplano, Megatron, Fsdp, Xla]),
            (Nvidia(80), DType::BF16, 256, vec![Altiplano, Megatron, Fsdp]),
            (Nvidia(90), DType::BF16, 256, vec![Altiplano, Megatron, Fsdp, Xla]),
            (Nvidia(80), DType::BF16, 512, vec![Fsdp]),
            (Nvidia(80), DType::F32, 64, vec![Altiplano, Fsdp]),
            (Nvidia(80), DType::F64, 64, vec![]),
            (Nvidia(80), DType::BF16, 25, vec![Altiplano]),
            (Nvidia(70), DType::F16, 128, vec![Fsdp]),
            (Nvidia(75), DType::BF16, 128, vec![]),
            (Amd(0x942), DType::BF16, 128, vec![Altiplano, Megatron, Fsdp]),
            (Amd(0x90a), DType::BF16, 128, vec![Altiplano, Megatron, Fsdp]),
            (Amd(0x906), DType::F16, 128, vec![]),
        ];
        for (generation, dtype, size, expect) in table {
            let all = [Altiplano, Megatron, Fsdp, Xla].into_iter();
            let found: Vec<Target> = all.filter(|&t| has_kernel(t, generation, Head { dtype, size })).collect();
            assert_eq!(found, expect, "{generation} {dtype} heads of {size}");
        }
    }
}
