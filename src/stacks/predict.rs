//! Predictions of configurations: the plan that a stack runs with a configuration, for a model and a cluster.

use super::{Configuration, Stack, StackProblem, Unsayable};
use crate::error::Error;
use altiplano_cost_models::Rooflines;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Execution, Plan, Target};
use altiplano_ir::recompute::{Modules, Recompute};
use altiplano_planner::features::modules::modules_of;
use altiplano_planner::features::overlaps::most_recomputed;
use altiplano_planner::features::scaled_products::as_run_by;
use altiplano_planner::features::stacks::stack;
use altiplano_planner::features::target::execution;
use altiplano_planner::search::stated::{Stated, num_blocks, predict_stated};
use altiplano_planner::{PlanFailure, Request};
use std::sync::Arc;

/// True if a stack that is told to run passes side by side does so with this configuration: it deals out experts, and recomputes
/// no more than [`most_recomputed`] says.
fn can_pair(c: &Configuration, stated: &Stated) -> bool {
    let Some(most) = most_recomputed(c.order()) else { return false };
    let level = match stated.full_blocks {
        Some(1..) => Recompute::Full,
        _ => stated.degrees.recompute,
    };
    stated.ep > 1 && level <= most && c.order().can_pair(stated.degrees.virtual_stages, c.pp())
}

/// A predicted configuration.
#[derive(Clone, Debug)]
pub struct Prediction {
    pub plan: Plan,
}

impl Prediction {
    pub fn step_s(&self) -> f64 {
        self.plan.predicted.step_time_s
    }

    /// Peak bytes of the fullest device.
    pub fn peak_bytes(&self) -> u64 {
        self.plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0)
    }

    /// Bytes of a device that tensors can use.
    pub fn usable_bytes(&self) -> u64 {
        self.plan.cluster.usable_bytes(&self.plan.cluster.groups[0])
    }

    pub fn fits(&self) -> bool {
        altiplano_planner::fits(&self.plan) && self.peak_bytes() <= self.usable_bytes()
    }
}

/// A model and a cluster for which configurations of a stack are predicted.
pub struct Predictor<'a> {
    pub stack: &'a Stack,
    pub request: Request,
    blocks: u32,
}

impl<'a> Predictor<'a> {
    pub fn new(stack: &'a Stack, mut request: Request) -> Predictor<'a> {
        // Stacks do not read the layouts that a model's file states.
        Arc::make_mut(&mut request.graph).pins.clear();
        let request = as_run_by(stack.target, &request).into_owned();
        let blocks = num_blocks(&request);
        Predictor { stack, request, blocks }
    }

    /// The modules of the model that the stack's selective recomputation can repeat, and that `execution` keeps otherwise.
    pub fn modules(&self, execution: Execution) -> Modules {
        if self.stack.target != Target::Megatron {
            return Modules::NONE;
        }
        let can: Modules = stack(self.stack.target).modules.iter().copied().collect();
        let all = Execution { recompute_modules: can, ..execution };
        all.recomputed().intersection(modules_of(&self.request.graph))
    }

    /// Predicts a configuration, whether it fits or not.
    pub fn predict(&self, c: &Configuration) -> Result<Prediction, Error> {
        let mut c = c.clone();
        let devices = self.request.cluster.num_devices();
        let of = |problem: StackProblem| Error::Stack { file: None, problem: Box::new(problem) };
        if c.shards_by_node {
            let dp = c.replicas(devices).map_err(|m| of(m.into()))?;
            let inside = self.request.cluster.groups[0].devices_per_node / (c.tp() * c.cp()).max(1);
            let shard = (1..=inside.max(1)).rev().find(|shard| dp % shard == 0).unwrap_or(1);
            (c.shard, c.replicate) = (Some(shard), Some(dp / shard));
        }
        let settled = c.settled(devices, self.blocks).map_err(|misfit| of(misfit.into()))?;
        let mut request = self.request.clone();
        if c.sends_tokens_once != Some(true) || settled.stated.ep <= 1 {
            request.cluster.groups.iter_mut().for_each(|group| group.dispatch = None);
        }
        let zero = settled.stated.degrees.zero;
        request.execution = Execution {
            scales_factors: self.request.execution.scales_factors,
            ..execution(self.stack.target, &request.cluster, &request.graph, Some(zero))
        };
        // Stacks that run as FSDP or XLA have degrees that a plan for these targets alone may not have.
        request.target = match self.stack.target {
            Target::Megatron => Target::Megatron,
            _ => Target::Altiplano,
        };
        request.execution.overlap = match self.stack.target {
            Target::Megatron | Target::Fsdp | Target::Torchtitan => c.overlap.unwrap_or(request.execution.overlap),
            _ => request.execution.overlap,
        };
        if self.stack.target == Target::Megatron {
            request.execution.recompute_modules = c.recompute_modules.unwrap_or_default();
        }
        request.execution.pairs_passes = c.pairs_passes == Some(true) && can_pair(&c, &settled.stated);
        request.execution.overlaps_tensor_parallel = c.overlaps_tensor_parallel == Some(true);
        if let Some(fused) = c.fused_attention.or(request.fused_attention) {
            let possible = request.cluster.groups.iter().all(|group| group.device.kind.is_gpu());
            request.execution.fused_attention = fused && possible;
        }
        request.schedule = Some(c.order());
        request.allow_microbatch_semantics = true;
        request.batch.global = Some(settled.global_batch);
        request.offload = Some(c.offload);
        request.training.clip_norm = c.clip_norm;
        if let Some(optimizer) = c.optimizer.as_deref().filter(|name| *name != request.training.optimizer.name()) {
            request.training.optimizer = Optimizer::parse(optimizer).unwrap_or(request.training.optimizer);
        }
        let costs = Rooflines::of(&request.cluster);
        let mut plan = predict_stated(&request, &settled.stated, &costs);
        if matches!(plan, Err(PlanFailure::NoCombination)) && !settled.stated.splits_positions {
            // With gradients sharded over replicas, no layout may keep all values whole: the search decides.
            let stated = Stated { splits_positions: true, ..settled.stated.clone() };
            plan = predict_stated(&request, &stated, &costs);
        }
        let plan = plan.map_err(|failure| match (failure, (self.stack.limit)(&c)) {
            (PlanFailure::NoCombination, Some(Unsayable { problem, option })) => {
                of(StackProblem::Unsayable { problem, option })
            }
            (PlanFailure::NoCombination, None) if settled.stated.ep > 1 => of(StackProblem::Experts {
                ep: settled.stated.ep,
                dp: settled.stated.degrees.dp,
                tp: settled.stated.degrees.tp,
            }),
            (PlanFailure::NoCombination, None) => of(StackProblem::Plan(
                "the devices of a stage must be within a node, or whole nodes; layouts must be possible with these degrees",
            )),
            (failure, _) => failure.into(),
        })?;
        Ok(Prediction { plan })
    }
}
