//! The degrees, storage and schedules that training software offers: one row for each target.
//!
//! A request that asks for more than its target's row is refused, and searches stay within the row.

use super::parallelism::expert_products;
use crate::request::{PlanFailure, Request};
use altiplano_ir::graph::Graph;
use altiplano_ir::plan::{Schedule, Target};
use altiplano_ir::recompute::{Module, Modules};

/// The configurations that a target's software runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    pub tensor: bool,
    pub pipelines: bool,
    pub context: bool,
    pub experts: bool,
    /// Several stages of a pipeline may share devices.
    pub virtual_stages: bool,
    /// Stages may have any number of layers, and the first and last may have none besides embedding and loss.
    pub uneven: bool,
    /// Devices of tensor parallelism may split tokens between products.
    pub sequence: bool,
    /// Beside experts, devices of tensor parallelism always do so.
    pub sequence_with_experts: bool,
    /// Replicas that divide experts among themselves also shard storage.
    pub experts_shard: bool,
    /// Groups of replicas may each hold all that is sharded (hybrid sharding).
    pub groups: bool,
    /// All stages have the same degrees, which a sweep tries one by one.
    pub uniform: bool,
    /// ZeRO levels without tensor parallelism and pipelines.
    pub zero: &'static [u8],
    pub zero_with_tensor: &'static [u8],
    pub zero_in_pipelines: &'static [u8],
    /// Orders of calls in a pipeline.
    pub schedules: &'static [Schedule],
    /// Modules that selective recomputation can repeat.
    pub modules: &'static [Module],
}

const ALL_LEVELS: &[u8] = &[0, 1, 2, 3];
const PRODUCTS: &[Module] = &[Module::AttentionCore, Module::SecondProducts];
const SYNCHRONOUS: &[Schedule] =
    &[Schedule::OneFOneB, Schedule::GPipe, Schedule::ZbH1, Schedule::ZbV, Schedule::DualPipeV];

/// The row of a target:
///
/// * Megatron-LM: `--pipeline-model-parallel-layout` puts any layers on any stage, embedding first and loss last
///   (megatron/core/transformer/pipeline_parallel_layer_layout.py). Pipelines run 1F1B, plain or interleaved.
///   `--use-distributed-optimizer` is ZeRO-1; `--use-megatron-fsdp` shards gradients and parameters as well, beside
///   tensor, context and expert parallelism. A layer of experts does not train with tensor parallelism unless
///   `--sequence-parallel` is set (megatron/core/transformer/moe/moe_layer.py).
/// * PyTorch: `fully_shard` keeps gathered parameters until the backward pass or not (`reshard_after_forward`), and
///   DDP shards nothing. Context parallelism composes with both.
/// * torchtitan: FSDP with tensor, context, pipeline and expert parallelism (`ParallelismConfig`). A pipeline's stages
///   are lists of modules (`module_fqns_per_model_part`), and its schedule may be read from a file. Experts are dealt
///   out to devices that shard, split positions or split features (`ParallelDims`). Sequence parallelism comes with tensor
///   parallelism by default (`enable_sequence_parallel`).
/// * DeepSpeed: AutoTP runs with ZeRO 0 to 2 (its tutorial on training with AutoTP). Its pipelines are 1F1B of stages
///   that it balances itself, and refuse ZeRO 2 and 3 (deepspeed/runtime/pipe/engine.py).
/// * XLA: one program for all devices.
pub fn stack(target: Target) -> Stack {
    let all = Stack {
        tensor: true,
        pipelines: true,
        context: true,
        experts: true,
        virtual_stages: true,
        uneven: false,
        sequence: true,
        sequence_with_experts: false,
        experts_shard: false,
        groups: true,
        uniform: false,
        zero: ALL_LEVELS,
        zero_with_tensor: ALL_LEVELS,
        zero_in_pipelines: ALL_LEVELS,
        schedules: SYNCHRONOUS,
        modules: &[Module::AttentionCore],
    };
    let one_stage = Stack { pipelines: false, virtual_stages: false, ..all };
    let plain = &[Schedule::OneFOneB];
    match target {
        Target::Altiplano => Stack { modules: &Module::ALL, ..all },
        Target::Megatron => {
            let modules =
                &[Module::AttentionCore, Module::UpProjections, Module::Mlp, Module::SharedExperts, Module::Experts];
            let pipelined = Stack { zero_in_pipelines: &[0, 1], schedules: plain, modules, ..all };
            Stack { uneven: true, uniform: true, sequence_with_experts: true, ..pipelined }
        }
        Target::Fsdp => Stack { tensor: false, experts: false, zero: &[0, 2, 3], modules: PRODUCTS, ..one_stage },
        Target::Xla => one_stage,
        Target::Torchtitan => {
            let zero = &[0, 2, 3];
            let [zero_with_tensor, zero_in_pipelines] = [zero; 2];
            let levels = Stack { zero, zero_with_tensor, zero_in_pipelines, ..all };
            let experts = Stack { sequence_with_experts: true, experts_shard: true, ..levels };
            Stack { uneven: true, uniform: true, modules: PRODUCTS, ..experts }
        }
        Target::Deepspeed => Stack {
            context: false,
            virtual_stages: false,
            sequence: false,
            groups: false,
            uniform: true,
            zero_with_tensor: &[0, 1, 2],
            zero_in_pipelines: &[0, 1],
            schedules: plain,
            ..all
        },
    }
}

/// True if tensor-parallel devices of a target always split tokens between the products of this model.
pub fn splits_tokens_beside_experts(target: Target, graph: &Graph) -> bool {
    stack(target).sequence_with_experts && !expert_products(graph).is_empty()
}

impl Stack {
    /// True if storage may be sharded at a level beside these degrees.
    pub fn shards(&self, level: u8, tp: u32, pp: u32) -> bool {
        self.zero.contains(&level)
            && (tp == 1 || self.zero_with_tensor.contains(&level))
            && (pp == 1 || self.zero_in_pipelines.contains(&level))
    }

    /// Refuses what a request fixes and the software does not run.
    ///
    /// # Errors
    /// [`PlanFailure::Lacks`] with the option, its value and what runs instead.
    pub fn check(&self, request: &Request) -> Result<(), PlanFailure> {
        let degrees = &request.degrees;
        let target = request.target.name();
        let refused =
            |option, given: String, problem: String| Err(PlanFailure::Lacks { target, option, given, problem });
        let lacks = [
            ("cp", degrees.cp, self.context, "context parallelism"),
            ("ep", degrees.ep, self.experts, "expert parallelism"),
            ("dp-replicate", degrees.groups, self.groups, "groups of replicas that each hold all state"),
            ("virtual-stages", degrees.virtual_stages, self.virtual_stages, "stages that share devices"),
        ];
        for (option, degree, has, what) in lacks {
            if let Some(degree) = degree.filter(|&degree| degree > 1 && !has) {
                return refused(option, degree.to_string(), format!("runs no {what}"));
            }
        }
        let (tp, pp) = (degrees.tp.unwrap_or(1), degrees.pp.unwrap_or(1));
        if let Some(level) = degrees.zero.filter(|&level| level <= 3 && !self.shards(level, tp, pp)) {
            let levels = ALL_LEVELS.iter().filter(|&&level| self.shards(level, tp, pp));
            let levels = levels.map(u8::to_string).collect::<Vec<_>>();
            let beside = match (self.zero.contains(&level), pp > 1) {
                (false, _) => "",
                (true, true) => " in pipelines",
                (true, false) => " with tensor parallelism",
            };
            return refused("zero", level.to_string(), format!("runs ZeRO {}{beside}", listed(&levels)));
        }
        if let Some(schedule) = request.schedule.filter(|s| s.trains() && !self.schedules.contains(s)) {
            let schedules = self.schedules.iter().map(ToString::to_string).collect::<Vec<_>>();
            return refused("schedule", schedule.to_string(), format!("runs {}", listed(&schedules)));
        }
        let lacking = |modules: Modules| modules.iter().find(|module| !self.modules.contains(module));
        if let Some(module) = request.recompute_modules.and_then(lacking) {
            let modules = self.modules.iter().map(|module| module.name().to_string()).collect::<Vec<_>>();
            return refused("recompute-modules", module.name().to_string(), format!("repeats {}", listed(&modules)));
        }
        if request.searches_order && request.target != Target::Altiplano {
            return refused("schedule", Schedule::Found.to_string(), "runs named schedules only".to_string());
        }
        Ok(())
    }
}

/// `0, 1 or 2`.
fn listed(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_storage_depend_on_the_other_degrees() {
        // (target, tp, pp, levels)
        let table: [(Target, u32, u32, &[u8]); 9] = [
            (Target::Altiplano, 8, 8, &[0, 1, 2, 3]),
            (Target::Megatron, 8, 1, &[0, 1, 2, 3]),
            (Target::Megatron, 8, 2, &[0, 1]),
            (Target::Fsdp, 1, 1, &[0, 2, 3]),
            (Target::Torchtitan, 2, 2, &[0, 2, 3]),
            (Target::Deepspeed, 1, 1, &[0, 1, 2, 3]),
            (Target::Deepspeed, 2, 1, &[0, 1, 2]),
            (Target::Deepspeed, 1, 2, &[0, 1]),
            (Target::Xla, 8, 1, &[0, 1, 2, 3]),
        ];
        for (target, tp, pp, expect) in table {
            let found: Vec<u8> = (0..=3).filter(|&level| stack(target).shards(level, tp, pp)).collect();
            assert_eq!(found, expect, "{} tp{tp} pp{pp}", target.name());
        }
    }
}
