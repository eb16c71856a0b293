//! What options fix of a plan: degrees, batches, and how training goes. What is not given is searched.

use crate::commands::options::OF_TRAINING;
use altiplano::Error;
use altiplano::ir::plan::{self, Offload, Schedule, UnknownOffload, Update};
use altiplano::pins::{NamedPin, apply as apply_pins};
use altiplano::planner::Request;
use altiplano_ir::recompute::Recompute;
use clap::{Args, ValueEnum};

/// What is fixed of the plans that are looked at, degrees and the like.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct FixedOptions {
    /// Samples of the global batch that go through the pipeline at once
    #[arg(long, value_name = "N")]
    microbatch: Option<u64>,
    /// The same as a count: the global batch divided by --microbatch
    #[arg(long, value_name = "N")]
    num_microbatches: Option<u32>,
    /// Samples that each replica takes at a time: --microbatch over the degree of data parallelism
    #[arg(long, value_name = "N", conflicts_with = "microbatch")]
    micro_batch_size: Option<u64>,
    /// Degree of data parallelism
    #[arg(long, value_name = "N")]
    dp: Option<u32>,
    /// Devices over which parameters are sharded and each of which has samples of its own: --dp N --zero 3
    #[arg(long, value_name = "N", hide = true, conflicts_with_all = ["dp", "zero"])]
    data_parallel_shard_degree: Option<u32>,
    /// Degree of tensor parallelism
    #[arg(long, value_name = "N")]
    pub tp: Option<u32>,
    /// Blocks of devices that the stages of a pipeline are on, one stage each unless --virtual-stages says more
    #[arg(long, value_name = "N")]
    pp: Option<u32>,
    /// Degree of context parallelism: devices that split the positions of samples, beside those of the other degrees
    #[arg(long, value_name = "N")]
    cp: Option<u32>,
    /// Degree of expert parallelism: parts that experts are dealt out to, among the devices of the other degrees
    #[arg(long, value_name = "N")]
    ep: Option<u32>,
    /// Stages of a pipeline that share each block of devices (interleaved 1f1b); 1: none do
    #[arg(long, value_name = "N")]
    virtual_stages: Option<u32>,
    /// Lay out parameters and values whose names match: `params*['w']=[{}, {tensor}]`, axes as --dp and --tp size them
    #[arg(long, value_name = "PATTERN=SHARDING")]
    pub pin: Vec<NamedPin>,
    /// Shard over the data axis: 1 optimizer state, 2 gradients too, 3 parameters too
    #[arg(long, value_name = "0..3")]
    zero: Option<u8>,
    /// What is in the memory of the hosts while the devices do not need it: optimizer: its state, activations: what forward passes
    /// leave for backward passes, or both with a comma between, or all; auto: what it takes where nothing fits otherwise, on GPUs
    /// [default: none]
    #[arg(long, value_name = "auto|none|all|PART,..", value_parser = OffloadName::parse)]
    offload: Option<OffloadName>,
    /// Compute activations again in the backward pass instead of keeping them
    #[arg(long)]
    recompute: Option<RecomputeName>,
    /// Order of forward and backward work on the stages of a pipeline; pipedream: without a flush between steps, with gradients that
    /// are one step late
    #[arg(long)]
    schedule: Option<ScheduleName>,
    /// When gradients change the weights; stale: one step late, reduced while the next step runs [default: synchronous]
    #[arg(long)]
    update: Option<UpdateName>,
    /// What a model that is run, not trained (--loss none), is planned for: that a batch is soon done, or, where batches follow each
    /// other, that many are [default: latency]
    #[arg(long, value_enum)]
    goal: Option<GoalName>,
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
    /// Products larger than their factors, as attention scores are
    Selective,
    /// Everything that does not leave its layer
    Full,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum ScheduleName {
    Gpipe,
    #[value(name = "1f1b")]
    OneFOneB,
    ZbH1,
    #[value(name = "pipedream")]
    PipeDream,
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
    /// Whether anything is fixed.
    pub fn is_empty(&self) -> bool {
        *self == FixedOptions::default()
    }

    /// The degree of data parallelism, by whichever option.
    pub fn replicas(&self) -> Option<u32> {
        self.dp.or(self.data_parallel_shard_degree)
    }

    /// Samples that go through the pipeline at once, where they are given or follow.
    pub fn together(&self) -> Option<u64> {
        let of_replicas = || self.micro_batch_size?.checked_mul(u64::from(self.replicas()?));
        self.microbatch.or_else(of_replicas)
    }

    /// Fixes it, pins aside.
    pub fn fix(&self, request: &mut Request) -> Result<(), Error> {
        // Options that are of training make no sense where nothing is trained.
        let of_training = [
            ("--schedule", self.schedule.is_some()),
            ("--update", self.update.is_some()),
            ("--virtual-stages", self.virtual_stages.is_some_and(|v| v > 1)),
            ("--recompute", self.recompute.is_some()),
            ("--offload", matches!(self.offload, Some(OffloadName::These(these)) if !these.is_none())),
            ("--zero", matches!(self.zero, Some(1 | 2))),
        ];
        if let Some((option, _)) = of_training.into_iter().find(|(_, given)| *given && !request.trains()) {
            return Err(Error::Option { option, problem: OF_TRAINING });
        }
        if self.goal.is_some() && request.trains() {
            return Err(Error::Option {
                option: "--goal",
                problem: "is of models that are run, not trained (--loss none)",
            });
        }
        request.goal = match self.goal {
            Some(GoalName::Throughput) => plan::Goal::Throughput,
            Some(GoalName::Latency) | None => plan::Goal::Latency,
        };
        request.microbatch = self.together();
        request.micro_batch = self.micro_batch_size.filter(|_| request.microbatch.is_none());
        request.num_microbatches = self.num_microbatches;
        request.dp = self.replicas();
        request.tp = self.tp;
        request.pp = self.pp;
        request.cp = self.cp;
        request.ep = self.ep;
        request.virtual_stages = self.virtual_stages;
        request.zero = self.zero.or(self.data_parallel_shard_degree.map(|_| 3));
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
        let schedule = self.schedule.map(|s| match s {
            ScheduleName::Gpipe => Schedule::GPipe,
            ScheduleName::OneFOneB => Schedule::OneFOneB,
            ScheduleName::ZbH1 => Schedule::ZbH1,
            ScheduleName::PipeDream => Schedule::PipeDream,
        });
        request.update = match self.update {
            Some(UpdateName::Stale) => Update::Stale,
            Some(UpdateName::Synchronous) | None => Update::Synchronous,
        };
        request.schedule = schedule.or(request.schedule);
        Ok(())
    }

    /// [`Self::fix`] for the model of a plan, whose names the pins are of.
    pub fn fix_all(&self, request: &mut Request) -> Result<(), Error> {
        self.fix(request)?;
        apply_pins(&mut request.graph, &self.pin, [self.replicas(), self.tp])
    }
}
