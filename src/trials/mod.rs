//! Many trainings on one cluster: how many devices each trial gets, which trials take turns on the same devices, and when
//! all are done.
//!
//! A trial runs on a block of devices that divides the cluster: a part of a node, or some nodes. The planner says what it
//! takes on a block of each size, and [`packing`] deals the blocks out over time.

pub mod packing;
mod text;

pub use text::{plan_name, trials_json, trials_text};

use crate::error::Error;
use crate::units::plural;
use altiplano_ir::cluster::Cluster;
use altiplano_ir::plan::Plan;
use altiplano_planner::Request;
use packing::{Placed, Series, lower_bound_s, pack};

/// Trials that train the same model.
pub struct Asked {
    pub request: Request,
    pub count: usize,
    pub steps: u64,
}

/// A model of the trials, and its plans.
pub struct Model {
    pub name: String,
    pub count: usize,
    pub steps: u64,
    /// A plan for the blocks of each size that have one, in the order of [`Trials::sizes`].
    pub plans: Vec<Option<Plan>>,
}

/// Trials dealt out to a cluster.
pub struct Trials {
    pub cluster: Cluster,
    /// The numbers of devices of blocks, in rising order.
    pub sizes: Vec<usize>,
    pub models: Vec<Model>,
    /// All trials, by their start.
    pub placed: Vec<Placed>,
    /// The end of the last trial.
    pub end_s: f64,
    /// No way to deal out blocks of these sizes, each with one trial at a time, ends earlier.
    pub lower_bound_s: f64,
    /// The end if each trial in turn takes all devices, if all of them have a plan there.
    pub in_turn_s: Option<f64>,
}

/// The most trials of one question.
const MOST: usize = 100_000;

/// The numbers of devices of blocks: divisors of a node's devices, and of the nodes.
fn block_sizes(nodes: u32, devices_per_node: u32) -> Vec<usize> {
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let whole = divisors(nodes).map(|some| some as usize * devices_per_node as usize);
    let parts = divisors(devices_per_node).filter(|&some| some < devices_per_node).map(|some| some as usize);
    parts.chain(whole).collect()
}

/// A cluster of one block.
fn block(cluster: &Cluster, devices: usize) -> Cluster {
    let mut block = cluster.clone();
    let group = &mut block.groups[0];
    let each = group.devices_per_node;
    (group.nodes, group.devices_per_node) = match devices as u32 {
        some if some < each => (1, some),
        all => (all / each, each),
    };
    if group.num_devices() != cluster.num_devices() {
        block.name = format!("{} of {}", plural(devices as u64, "device"), cluster.name);
    }
    block
}

/// Plans every model on blocks of all sizes with `plan`, and deals the trials out.
///
/// # Errors
/// Fails if the cluster has several groups, or if a model has no plan on any block: the error is that of the largest.
pub fn trials(asked: Vec<Asked>, plan: &dyn Fn(&Request) -> Result<Plan, Error>) -> Result<Trials, Error> {
    let wrong = |option, problem| Err(Error::Option { option, problem });
    let Some(cluster) = asked.first().map(|one| one.request.cluster.clone()) else {
        return wrong("MODEL", "there is none");
    };
    let [group] = cluster.groups.as_slice() else {
        return wrong("--cluster", "trials need equal nodes, but the cluster has several groups");
    };
    if asked.iter().any(|one| one.count == 0 || one.steps == 0) {
        return wrong("--count", "trials and their steps are at least 1");
    }
    if asked.iter().map(|one| one.count).fold(0, usize::saturating_add) > MOST {
        return wrong("--count", "more than 100000 trials");
    }
    let sizes = block_sizes(group.nodes, group.devices_per_node);
    let mut models = Vec::new();
    for Asked { request, count, steps } in asked {
        let mut failure = None;
        let mut on = |&size: &usize| {
            let of_block = Request { cluster: block(&cluster, size), fastest: true, ..request.clone() };
            plan(&of_block).map_err(|error| failure = Some(error)).ok()
        };
        let plans: Vec<Option<Plan>> = sizes.iter().map(&mut on).collect();
        if let (true, Some(failure)) = (plans.iter().all(Option::is_none), failure) {
            return Err(failure);
        }
        models.push(Model { name: request.model.clone(), count, steps, plans });
    }
    Ok(dealt_out(cluster, sizes, models))
}

fn dealt_out(cluster: Cluster, sizes: Vec<usize>, models: Vec<Model>) -> Trials {
    let seconds_of = |model: &Model| -> Vec<Option<f64>> {
        let of = |plan: &Plan| plan.predicted.step_time_s * model.steps as f64;
        model.plans.iter().map(|plan| plan.as_ref().map(of)).collect()
    };
    let series: Vec<Series> =
        models.iter().map(|model| Series { count: model.count, seconds: seconds_of(model) }).collect();
    let devices = cluster.num_devices() as usize;
    let mut placed = pack(&sizes, devices, &series);
    placed.sort_by(|a, b| a.start_s.total_cmp(&b.start_s).then(a.first_device.cmp(&b.first_device)));
    let on_all = series.iter().map(|of| Some(of.count as f64 * (*of.seconds.last()?)?));
    Trials {
        end_s: packing::end_s(&placed),
        lower_bound_s: lower_bound_s(&sizes, devices, &series),
        in_turn_s: on_all.sum(),
        cluster,
        sizes,
        models,
        placed,
    }
}

#[cfg(test)]
mod tests;
