//! Parameter servers of a plan (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server").
//! Servers are devices that hold and update the weights and the optimizer state. Workers each have a replica of the
//! whole model, push gradients to the servers and pull weights back.
//!
//! The microbatches of a step are dealt to the workers in runs. With `m` of them each, worker `w` has those from `w m`
//! on, so all workers together compute the gradient of the batch.

use crate::graph::Graph;
use crate::plan::{Memory, Plan, Schedule, Target, Update};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The devices that compute gradients and those that update.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterServers {
    /// The global ids of the devices that compute gradients. The first is the device of the plan's one stage, and all
    /// others equal it.
    pub workers: Vec<u32>,
    /// The global ids of the devices that hold weights and state.
    pub servers: Vec<u32>,
    /// True if each push is an update of its own, after which only its worker gets the new weights. Pushes are taken in
    /// the order of workers, round robin. If false, the pushes of a step are summed in that order for a single update,
    /// and all workers wait for it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub asynchronous: bool,
    /// The server of each trained parameter by name, as a position in `servers`.
    pub holds: BTreeMap<String, u32>,
    /// The prediction for each server.
    pub predicted: Vec<ServerPredicted>,
}

/// The prediction for one server.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerPredicted {
    /// The seconds per step that the server spends on sums and updates.
    pub compute_s: f64,
    /// The seconds per step that pushes or pulls, whichever take longer, occupy the server's link.
    pub link_s: f64,
    /// The memory of the server. A push and the sum of pushes count as gradients.
    pub memory: Memory,
    pub peak_bytes: u64,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl ParameterServers {
    /// Deals trained parameters to servers. Workers hold all other parameters. The largest come first, each to the
    /// server that holds least.
    pub fn dealt(graph: &Graph, workers: Vec<u32>, servers: Vec<u32>, asynchronous: bool) -> ParameterServers {
        let mut parameters: Vec<(u64, &str)> =
            graph.trained_parameters().map(|(v, name)| (graph.ty(v).bytes(), name)).collect();
        parameters.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
        let mut held = vec![0u64; servers.len()];
        let mut holds = BTreeMap::new();
        for (bytes, name) in parameters {
            let Some(least) = (0..held.len()).min_by_key(|&s| held[s]) else { break };
            held[least] = held[least].saturating_add(bytes);
            holds.insert(name.to_string(), least as u32);
        }
        let predicted = vec![ServerPredicted::default(); servers.len()];
        ParameterServers { workers, servers, asynchronous, holds, predicted }
    }

    /// The number of updates between the weights that a worker computes a gradient with and the update by that
    /// gradient.
    pub fn staleness(&self) -> u32 {
        if self.asynchronous { self.workers.len().saturating_sub(1) as u32 } else { 0 }
    }
}

impl Plan {
    /// The number of model replicas with a program of their own. It is 1 without parameter servers.
    pub fn num_workers(&self) -> u32 {
        self.servers.as_ref().map_or(1, |servers| servers.workers.len().max(1) as u32)
    }

    /// The microbatches of a step that pass through the stages. With parameter servers, those of one worker.
    pub fn microbatches_of_worker(&self) -> u32 {
        self.num_microbatches / self.num_workers()
    }

    /// The microbatches whose gradients are in one update.
    pub fn microbatches_of_update(&self) -> u32 {
        if self.updates_of_step() > 1 { self.microbatches_of_worker() } else { self.num_microbatches }
    }

    /// The updates per step: one, or one for each push if servers do not wait for workers.
    pub fn updates_of_step(&self) -> u32 {
        let asynchronous = self.servers.as_ref().is_some_and(|servers| servers.asynchronous);
        if asynchronous { self.num_workers() } else { 1 }
    }

    /// The problems of a plan's servers, each with the path within them.
    pub(crate) fn problems_of_servers(&self) -> Vec<(String, &'static str)> {
        let Some(servers) = &self.servers else { return Vec::new() };
        let mut problems = Vec::new();
        let mut fail = |path: &str, problem| problems.push((path.to_string(), problem));
        let ParameterServers { workers, servers: of_weights, holds, predicted, .. } = servers;
        if workers.is_empty() || of_weights.is_empty() {
            fail("", "must have a worker and a server or more");
            return problems;
        }
        let ids: BTreeSet<u32> = workers.iter().chain(of_weights).copied().collect();
        if ids.len() != workers.len() + of_weights.len() || ids.iter().any(|&id| id >= self.cluster.num_devices()) {
            fail("", "must be different devices of the cluster");
        }
        if self.cluster.groups.len() != 1 {
            fail("", "must be on a cluster of one group");
        }
        if self.stages.len() != 1 || self.stages[0].devices[..] != workers[..1] {
            fail("workers", "must begin with the one device of the plan's one stage");
        }
        let trains = self.schedule == Schedule::OneFOneB && self.update == Update::Synchronous;
        if !trains || self.target != Target::Altiplano {
            fail("", "go with the schedule 1f1b, synchronous updates of a step, and this project's runtime");
        }
        if self.loss_scale.is_some() {
            fail("", "do not scale the loss");
        }
        if self.measure_noise {
            fail("", "do not measure the gradient's noise");
        }
        if self.clip_norm.is_some() && servers.asynchronous {
            fail("asynchronous", "knows no norm of all gradients to clip by");
        }
        if !self.num_microbatches.is_multiple_of(workers.len() as u32) {
            fail("workers", "must divide num_microbatches, which are dealt to them");
        }
        let whole = |stage: &crate::plan::Stage| stage.parameters.values().all(|s| !s.gradient.is_partial());
        if !self.stages.iter().all(whole) {
            fail("workers", "push whole gradients, and one of the stage's is partial");
        }
        let named: BTreeSet<&str> = self.graph.trained_parameters().map(|(_, name)| name).collect();
        let held: BTreeSet<&str> = holds.keys().map(String::as_str).collect();
        if named != held || holds.values().any(|&server| server as usize >= of_weights.len()) {
            fail("holds", "must name a server for each parameter of the graph that is trained");
        }
        if predicted.len() != of_weights.len() {
            fail("predicted", "must say something of each server");
        }
        problems
    }
}
