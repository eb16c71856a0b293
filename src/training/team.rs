//! The processes that run a plan together, and their sessions: CPU workers, GPUs or XLA's devices of one process, this
//! process's share of the GPUs or of XLA's devices of many, or one device of many ranks.

use crate::error::Error;
use crate::training::{Training, programs_here, session, with_memory, xla_session};
use altiplano_ir::plan::Plan;
use altiplano_planner::programs;
use altiplano_runtime::devices::cuda::CudaOptions;
#[cfg(feature = "mpi")]
use altiplano_runtime::mpi::{Communicator, RankOptions};
use altiplano_runtime::ranks::{Layout, World};
use altiplano_runtime::{Options, Session};
use altiplano_xla::pjrt::Platform;
#[cfg(feature = "mpi")]
use std::sync::Arc;

/// The processes that run a plan.
pub enum Team {
    /// This process alone.
    Alone,
    /// All processes that were started together, regardless of nodes if `anywhere`. If they are MPI ranks, CPU devices
    /// communicate over MPI.
    Ranks {
        world: World,
        anywhere: bool,
        #[cfg(feature = "mpi")]
        mpi: Option<(Arc<Communicator>, RankOptions)>,
    },
}

impl Team {
    /// Returns whether this process leads.
    pub fn leads(&self) -> bool {
        match self {
            Team::Alone => true,
            Team::Ranks { world, .. } => world.leads(),
        }
    }

    /// Fails if the processes would run different plans or options.
    pub fn expect_same(&self, plan: &Plan, training: &Training) -> Result<(), Error> {
        let Team::Ranks { world, anywhere, .. } = self else { return Ok(()) };
        world.expect_same("another version", env!("CARGO_PKG_VERSION"))?;
        world.expect_same("another plan", &fingerprint(&plan.to_json()))?;
        // Library locations differ between hosts, and free GPU memory is no option.
        let cuda = training.cuda.as_ref().map(|options| options.running);
        let xla = training.xla.as_ref().map(|options| options.platform);
        let alike = Training { cuda: None, xla: None, ..training.clone() };
        let said = format!("{alike:?} {cuda:?} {xla:?} {anywhere}{}", self.of_mpi());
        Ok(world.expect_same("other options", &fingerprint(&said))?)
    }

    #[cfg(feature = "mpi")]
    fn of_mpi(&self) -> String {
        match self {
            Team::Ranks { mpi: Some((_, options)), .. } => format!(" {options:?}"),
            _ => String::new(),
        }
    }

    #[cfg(not(feature = "mpi"))]
    fn of_mpi(&self) -> String {
        String::new()
    }

    /// Creates the session of this process's part, with nothing loaded.
    pub fn session(self, plan: &Plan, training: &Training) -> Result<Session, Error> {
        let (world, anywhere) = match self {
            Team::Alone => {
                return match (&training.cuda, &training.xla) {
                    (_, Some(options)) => xla_session(plan, options),
                    (Some(options), None) => Ok(Session::on_gpus(&programs(plan)?, &of_plan(plan, options))?),
                    (None, None) => {
                        let check_nan = training.check_nan;
                        session(plan, &Options { record: true, check_nan, ..Options::default() })
                    }
                };
            }
            #[cfg(feature = "mpi")]
            Team::Ranks { world, anywhere, mpi: Some((all, options)) }
                if training.cuda.is_none() && training.xla.is_none() =>
            {
                let options = RankOptions { check_nan: training.check_nan, ..options };
                let layout = Layout { nodes: nodes(plan), anywhere };
                return Ok(Session::on_ranks(world, &all, &programs(plan)?, &layout, &options)?);
            }
            Team::Ranks { world, anywhere, .. } => (world, anywhere),
        };
        let layout = Layout { nodes: nodes(plan), anywhere };
        match (&training.cuda, &training.xla) {
            (_, Some(options)) => {
                // Processes of one machine share its memory.
                let here = options.platform == Some(Platform::Cpu) && world.local() == world.size();
                let programs = if here { programs_here(plan)? } else { programs(plan)? };
                Ok(Session::on_xla_of(world, &programs, &layout, &with_memory(plan, options))?)
            }
            (Some(options), None) => {
                Ok(Session::on_gpus_of(world, &programs(plan)?, &layout, &of_plan(plan, options))?)
            }
            (None, None) => {
                let problem = "needs --device cuda or xla; CPU workers of several processes communicate over MPI, with --engine mpi";
                Err(Error::Option { option: "--engine processes", problem })
            }
        }
    }
}

/// Adds the plan's predicted memory to the options of GPUs.
fn of_plan(plan: &Plan, options: &CudaOptions) -> CudaOptions {
    let predicted_bytes = plan.lanes().iter().map(|lane| lane.predicted.peak_bytes).collect();
    CudaOptions { predicted_bytes, ..options.clone() }
}

/// The devices that a plan uses, by node of its cluster.
fn nodes(plan: &Plan) -> Vec<Vec<u32>> {
    let used: std::collections::BTreeSet<u32> = plan.devices().into_iter().collect();
    let mut next = 0;
    let mut nodes: Vec<Vec<u32>> = Vec::new();
    for group in &plan.cluster.groups {
        for _ in 0..group.nodes {
            let devices = next..next + group.devices_per_node;
            next = devices.end;
            nodes.push(devices.filter(|device| used.contains(device)).collect());
        }
    }
    nodes.retain(|node| !node.is_empty());
    nodes
}

/// A short hash of a text.
fn fingerprint(text: &str) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}
