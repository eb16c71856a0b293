//! Chooses between predicted plans.

use crate::features::offload;
use altiplano_ir::plan::Plan;

/// Relative difference of predictions below which no plan is preferred. On published step times, the errors of similar
/// plans differ by about as much (benches/results/fidelity.md).
pub const UNDECIDED: f64 = 0.02;

/// The index of the plan to choose: among plans as fast as the fastest within the prediction error, those on the fewest
/// devices, and of these the one with the least memory. Among plans with about the same memory, the fastest wins.
fn leanest_of_the_fastest<T>(all: &[T], plan: impl Fn(&T) -> &Plan) -> usize {
    let step_s = |i: &usize| plan(&all[*i]).predicted.step_time_s;
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by(|a, b| step_s(a).total_cmp(&step_s(b)));
    let most_s = order.first().map_or(0.0, step_s) * (1.0 + UNDECIDED);
    order.retain(|i| step_s(i) <= most_s);
    let fewest = order.iter().map(|&i| plan(&all[i]).num_devices()).min();
    order.retain(|&i| Some(plan(&all[i]).num_devices()) == fewest);
    let least = order.iter().map(|&i| peak_bytes(plan(&all[i]))).min().unwrap_or(0);
    let about = least.saturating_add(least / 50);
    order.into_iter().find(|&i| peak_bytes(plan(&all[i])) <= about).unwrap_or(0)
}

/// Takes the plan that `leanest_of_the_fastest` picks. `plans` must not be empty.
pub fn choose(mut plans: Vec<Plan>) -> Plan {
    let at = leanest_of_the_fastest(&plans, |plan| plan);
    plans.swap_remove(at)
}

/// Peak bytes of the fullest device.
pub fn peak_bytes(plan: &Plan) -> u64 {
    plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0)
}

/// Returns true if every device has the memory that its stage is predicted to need, and every node the host memory for
/// offloaded state.
pub fn fits(plan: &Plan) -> bool {
    let of_servers = plan.servers.iter().flat_map(|over| &over.predicted);
    plan.stages.iter().all(|s| s.predicted.peak_bytes <= plan.usable_bytes(s))
        && of_servers.into_iter().all(|s| s.peak_bytes <= plan.cluster.usable_bytes(&plan.cluster.groups[0]))
        && offload::short_node(plan).is_none()
}

/// Most plans whose stages are solved again before one is chosen. The gain differs from plan to plan.
const MOST_REFINED: usize = 5;
/// Plans up to this many times slower than the fastest are worth solving again.
const WORTH_REFINING: f64 = 1.05;

/// Splits baselines and plans of the search, of a model of `num_nodes` nodes, into finalists and the search's other
/// plans. Finalists are the plan to choose by its prediction so far, and plans that may be faster once their stages are
/// solved again.
pub fn finalists(baselines: Vec<Plan>, plans: Vec<Plan>, num_nodes: usize) -> (Vec<Plan>, Vec<Plan>) {
    /// Graph nodes of all finalists together.
    const NODES_REFINED: usize = 3_600;
    let most = MOST_REFINED.min(NODES_REFINED / num_nodes.max(1)).max(1);
    let of_search = baselines.len()..;
    let mut all: Vec<(usize, Plan)> = baselines.into_iter().chain(plans).enumerate().collect();
    let step_s = |of: &(usize, Plan)| of.1.predicted.step_time_s;
    all.sort_by(|a, b| (!fits(&a.1)).cmp(&!fits(&b.1)).then(step_s(a).total_cmp(&step_s(b))));
    let num_fitting = all.partition_point(|(_, plan)| fits(plan));
    if num_fitting > 0 {
        let (at, most_s) = (leanest_of_the_fastest(&all[..num_fitting], |of| &of.1), step_s(&all[0]) * WORTH_REFINING);
        let chosen = all.remove(at);
        all.insert(0, chosen);
        let near = all[..num_fitting].iter().filter(|of| step_s(of) <= most_s).count();
        let others = all.split_off(near.min(most));
        let others = others.into_iter().filter(|(i, _)| of_search.contains(i)).map(|(_, plan)| plan).collect();
        return (all.into_iter().map(|(_, plan)| plan).collect(), others);
    }
    let others = all.split_off(all.len().min(1));
    (all.into_iter().map(|(_, plan)| plan).collect(), others.into_iter().map(|(_, plan)| plan).collect())
}
