//! Options that fix parts of a plan: degrees, batches, and how training runs. Everything else is searched.

use crate::commands::options::OF_TRAINING;
use altiplano::Error;
use altiplano::ir::plan::{self, Offload, Schedule, UnknownOffload, Update};
use altiplano::pins::{NamedPin, apply as apply_pins};
use altiplano::planner::features::stages::{GivenStages, StageBlocks};
use altiplano::planner::{PlanFailure, Request};
use altiplano_ir::recompute::{Module, Recompute};
use clap::{Args, ValueEnum};
use std::sync::Arc;

/// Fixed choices of plans, such as degrees.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub(crate) struct FixedOptions {
    /// Samples per microbatch, over all replicas
    #[arg(long, value_name = "N", help_heading = "Cluster and batch")]
    microbatch: Option<u64>,
    /// Number of microbatches: the global batch divided by --microbatch
    #[arg(long, value_name = "N", help_heading = "Cluster and batch")]
    num_microbatches: Option<u32>,
    /// Samples per microbatch and replica: --microbatch divided by the data-parallel degree
    #[arg(long, value_name = "N", conflicts_with = "microbatch", help_heading = "Cluster and batch")]
    micro_batch_size: Option<u64>,
    /// Degree of data parallelism
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    dp: Option<u32>,
    /// Devices that shard parameters and have their own samples: --dp N --zero 3, in each group of --dp-replicate
    #[arg(long, value_name = "N", hide = true, conflicts_with_all = ["dp", "zero"])]
    data_parallel_shard_degree: Option<u32>,
    /// Groups of replicas, each of which holds all state that --zero shards (hybrid sharding, HSDP)
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    dp_replicate: Option<u32>,
    /// Degree of tensor parallelism
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pub tp: Option<u32>,
    /// Degree of pipeline parallelism: blocks of devices, with one stage each unless --virtual-stages is given
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    pp: Option<u32>,
    /// Degree of context parallelism: devices that split the positions of samples, in addition to the other degrees
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    cp: Option<u32>,
    /// Degree of expert parallelism: parts over which experts are distributed, within the devices of the other degrees
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    ep: Option<u32>,
    /// Blocks of the model in each pipeline stage, by number or by the name of a parameter: 0-11,12-23 or h.0-h.11,h.12-h.23
    #[arg(long, value_name = "FIRST-LAST,..", help_heading = "Parallelism")]
    stages: Option<StageBlocks>,
    /// Number of devices of each pipeline stage: 1,2
    #[arg(long, value_name = "N,..", value_delimiter = ',', help_heading = "Parallelism")]
    stage_devices: Vec<u32>,
    /// Stages that share each block of devices (interleaved 1f1b, or zb-v and dualpipe-v with 2); 1 turns it off
    #[arg(long, value_name = "N", help_heading = "Parallelism")]
    virtual_stages: Option<u32>,
    /// Layout of parameters and values by name pattern: `params*['w']=[{}, {tensor}]`, with axes sized by --dp and --tp
    #[arg(long, value_name = "PATTERN=SHARDING", help_heading = "Parallelism")]
    pub pin: Vec<NamedPin>,
    /// Shard over the data axis: 1 optimizer state, 2 also gradients, 3 also parameters
    #[arg(long, value_name = "0..3", help_heading = "Memory")]
    zero: Option<u8>,
    /// Offload to host memory: optimizer (its state), activations, both with a comma between, or all; auto offloads
    /// only what is needed to fit, or where it beats recomputation, on GPUs [default: none]
    #[arg(long, value_name = "auto|none|all|PART,..", value_parser = OffloadName::parse, help_heading = "Memory")]
    offload: Option<OffloadName>,
    /// Recompute activations in the backward pass instead of keeping them
    #[arg(long, help_heading = "Memory")]
    recompute: Option<RecomputeName>,
    /// Modules that selective recomputation repeats: attention-core, second-products, up-projections, mlp, shared-experts,
    /// experts, or Megatron-LM's names for them [default: those of the target's software]
    #[arg(long, value_name = "MODULE,..", value_parser = module, value_delimiter = ',', help_heading = "Memory")]
    recompute_modules: Option<Vec<Module>>,
    /// Pipeline schedule; pipedream has no flush between steps, and gradients are one step late; found searches for the
    /// order of calls
    #[arg(long, help_heading = "Schedule")]
    schedule: Option<ScheduleName>,
    /// When gradients update the weights; stale: one step late, reduced while the next step runs [default: synchronous]
    #[arg(long, help_heading = "Schedule")]
    update: Option<UpdateName>,
    /// Objective for a model that is run without training (--loss none): latency of a batch, or throughput of a stream of
    /// batches [default: latency]
    #[arg(long, value_enum, help_heading = "Schedule")]
    goal: Option<GoalName>,
}

fn module(name: &str) -> Result<Module, String> {
    Module::parse(name).ok_or_else(|| {
        let names: Vec<&str> = Module::ALL.into_iter().map(Module::name).collect();
        format!("must be one of {}", names.join(", "))
    })
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum OffloadName {
    Auto,
    These(Offload),
}

impl OffloadName {
    fn parse(text: &str) -> Result<OffloadName, UnknownOffload> {
        match text {
            "auto" => Ok(OffloadName::Auto),
            _ => text.parse().map(OffloadName::These),
        }
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum RecomputeName {
    None,
    /// Modules within a layer, see --recompute-modules
    Selective,
    /// Everything that stays within a layer
    Full,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum ScheduleName {
    Gpipe,
    #[value(name = "1f1b")]
    OneFOneB,
    ZbH1,
    /// zb-h1 on lanes of two stages, the first of one and the last of the other half
    ZbV,
    /// The lanes of zb-v, on which a forward and a backward pass take turns
    #[value(name = "dualpipe-v")]
    DualPipeV,
    #[value(name = "pipedream")]
    PipeDream,
    /// The order that a search finds, if it is faster than every named one
    Found,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum UpdateName {
    Synchronous,
    Stale,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum GoalName {
    Latency,
    Throughput,
}

impl FixedOptions {
    /// Returns whether nothing is fixed.
    pub(crate) fn is_empty(&self) -> bool {
        *self == FixedOptions::default()
    }

    /// The data-parallel degree, by either option.
    pub(crate) fn replicas(&self) -> Option<u32> {
        let groups = self.dp_replicate.unwrap_or(1);
        self.dp.or(self.data_parallel_shard_degree.map(|inside| inside.saturating_mul(groups)))
    }

    /// Samples per microbatch, if given or implied.
    pub(crate) fn together(&self) -> Option<u64> {
        let of_replicas = || self.micro_batch_size?.checked_mul(u64::from(self.replicas()?));
        self.microbatch.or_else(of_replicas)
    }

    /// Applies the fixed choices to a request, except pins.
    pub(crate) fn fix(&self, request: &mut Request) -> Result<(), Error> {
        // Training options are errors if nothing is trained.
        let of_training = [
            ("--schedule", self.schedule.is_some()),
            ("--update", self.update.is_some()),
            ("--virtual-stages", self.virtual_stages.is_some_and(|v| v > 1)),
            ("--recompute", self.recompute.is_some()),
            ("--recompute-modules", self.recompute_modules.is_some()),
            ("--offload", matches!(self.offload, Some(OffloadName::These(these)) if !these.is_none())),
            ("--zero", matches!(self.zero, Some(1 | 2))),
        ];
        if let Some((option, _)) = of_training.into_iter().find(|(_, given)| *given && !request.trains()) {
            return Err(Error::Option { option, problem: OF_TRAINING });
        }
        if self.goal.is_some() && request.trains() {
            return Err(Error::Option {
                option: "--goal",
                problem: "applies only to models that are run without training (--loss none)",
            });
        }
        request.goal = match self.goal {
            Some(GoalName::Throughput) => plan::Goal::Throughput,
            Some(GoalName::Latency) | None => plan::Goal::Latency,
        };
        let together = self.together();
        if let (Some(value), None, Some(together)) = (self.micro_batch_size, self.microbatch, together)
            && together != 0
            && request.batch.global.is_some_and(|global| !global.is_multiple_of(together))
        {
            let problem = "times the number of replicas does not divide the global batch";
            return Err(PlanFailure::Option { option: "micro-batch-size", value, problem }.into());
        }
        request.batch.microbatch = together;
        request.batch.per_replica = self.micro_batch_size.filter(|_| request.batch.microbatch.is_none());
        request.batch.num_microbatches = self.num_microbatches;
        request.degrees.dp = self.replicas();
        request.degrees.tp = self.tp;
        request.degrees.pp = self.pp;
        request.degrees.cp = self.cp;
        request.degrees.ep = self.ep;
        request.degrees.groups = self.dp_replicate;
        request.degrees.virtual_stages = self.virtual_stages;
        request.stages =
            GivenStages { blocks: self.stages.clone().unwrap_or_default(), devices: self.stage_devices.clone() };
        request.degrees.zero = self.zero.or(self.data_parallel_shard_degree.map(|_| 3));
        request.offload = match self.offload {
            None => request.offload,
            Some(OffloadName::Auto) => None,
            Some(OffloadName::These(these)) => Some(these),
        };
        request.recompute = self.recompute.map(|r| match r {
            RecomputeName::None => Recompute::None,
            RecomputeName::Selective => Recompute::Selective,
            RecomputeName::Full => Recompute::Full,
        });
        if let Some(modules) = &self.recompute_modules {
            if matches!(self.recompute, Some(RecomputeName::None | RecomputeName::Full)) {
                return Err(Error::Option { option: "--recompute-modules", problem: "needs --recompute selective" });
            }
            request.recompute_modules = Some(modules.iter().copied().collect());
        }
        request.searches_order |= self.schedule == Some(ScheduleName::Found);
        let schedule = self.schedule.and_then(|s| match s {
            ScheduleName::Gpipe => Some(Schedule::GPipe),
            ScheduleName::OneFOneB => Some(Schedule::OneFOneB),
            ScheduleName::ZbH1 => Some(Schedule::ZbH1),
            ScheduleName::ZbV => Some(Schedule::ZbV),
            ScheduleName::DualPipeV => Some(Schedule::DualPipeV),
            ScheduleName::PipeDream => Some(Schedule::PipeDream),
            ScheduleName::Found => None,
        });
        request.training.update = match self.update {
            Some(UpdateName::Stale) => Update::Stale,
            Some(UpdateName::Synchronous) | None => Update::Synchronous,
        };
        request.schedule = schedule.or(request.schedule);
        Ok(())
    }

    /// As [`Self::fix`], with pins, which name values of the plan's model.
    pub(crate) fn fix_all(&self, request: &mut Request) -> Result<(), Error> {
        self.fix(request)?;
        apply_pins(Arc::make_mut(&mut request.graph), &self.pin, [self.replicas(), self.tp])
    }
}
