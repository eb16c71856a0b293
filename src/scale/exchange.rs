//! Compares ways to exchange gradients in seconds and staleness: synchronously as the plan does, one step late, and
//! over parameter servers with or without waiting.
//!
//! Staleness is the mean number of updates between the read of the parameters for a gradient and the update by that
//! gradient. Its cost in steps depends on the model, and is not priced.

use crate::scale::Point;
use crate::scale::arithmetic::{expected_maximum, server_bytes_per_s};
use crate::units::{plural, seconds};
use altiplano_ir::cluster::Group;
use altiplano_planner::explain::account::Part;
use serde::Serialize;

/// The name of data-parallel axes, followed by a number if there are several.
const DATA_AXIS: &str = "data";

/// One way to exchange gradients.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exchange {
    pub name: &'static str,
    pub nodes: u32,
    /// Number of devices that compute gradients.
    pub workers: u32,
    /// Number of nodes that hold parameters, out of all nodes.
    pub servers: Option<u32>,
    /// Seconds for the gradients of a global batch.
    pub step_time_s: f64,
    /// Staleness in updates.
    pub staleness: f64,
    pub how: String,
}

/// All ways on a number of nodes, the plan's first. Worker step times vary by `jitter`, a standard deviation as a
/// fraction of their computing time.
///
/// Workers that wait for each other take as long as the slowest ([`expected_maximum`]); others take the mean. The
/// plan's exposed communication over the data-parallel axis could overlap with the next step.
pub(crate) fn exchanges(group: &Group, nodes: u32, point: &Point, gradient_bytes: u64, jitter: f64) -> Vec<Exchange> {
    let of_step = |chosen: &dyn Fn(&str) -> bool| {
        let parts = point.parts.iter().filter(|part| chosen(&part.what)).map(|part| part.device_s);
        parts.sum::<f64>() * point.global_batch as f64
    };
    let computing_s = of_step(&|what| what == Part::Computing.name());
    let workers = point.devices_used.max(1);
    let slowest = |workers: u32, mean_s: f64| jitter * expected_maximum(workers.into()) * mean_s;
    let late_s = slowest(workers, computing_s / f64::from(workers));
    let exchange_s = of_step(&is_over_data) / f64::from(workers);
    let rest_s = (point.step_time_s - exchange_s).max(0.0) + late_s;
    let plan = |name, step_time_s, staleness, how| Exchange {
        name,
        nodes,
        workers,
        servers: None,
        step_time_s,
        staleness,
        how,
    };
    let mut all = vec![plan("synchronous", rest_s + exchange_s, 0.0, "the plan".to_string())];
    if exchange_s > 0.0 {
        let how = format!("the plan, with {} of its exchange behind the next step", seconds(exchange_s.min(rest_s)));
        all.push(plan("one step late", rest_s.max(exchange_s), 1.0, how));
    }
    let price = Servers { group, nodes, gradient_bytes, computing_s };
    all.extend(price.best("synchronous servers", |workers, compute_s, sent| {
        (compute_s + slowest(workers, compute_s) + 2.0 * sent.at_once_s, 0.0)
    }));
    all.extend(price.best("asynchronous servers", |workers, compute_s, sent| {
        ((compute_s + 2.0 * sent.of_node_s).max(sent.at_servers_s), f64::from(workers - 1))
    }));
    all
}

/// Returns whether a part of a step is a collective over a data-parallel axis, in the notation of `account`.
fn is_over_data(what: &str) -> bool {
    let axes = what.split_once(" over ").map(|(_, axes)| axes.split([',', ' ']).next().unwrap_or(axes));
    axes.is_some_and(|axes| axes.split('+').any(|axis| axis.starts_with(DATA_AXIS)))
}

/// Data-parallel training with servers on some of the nodes, each with its share of the parameters.
struct Servers<'a> {
    group: &'a Group,
    nodes: u32,
    gradient_bytes: u64,
    /// Device-seconds of computation per step.
    computing_s: f64,
}

/// Seconds for one direction of all workers' messages.
struct Sent {
    /// Out of a worker node.
    of_node_s: f64,
    /// Into the servers, which share the messages of all workers (incast).
    at_servers_s: f64,
    /// The longer of the two, since all send at the same time.
    at_once_s: f64,
}

impl Servers<'_> {
    /// The number of servers with the shortest step; `None` with one node. `predict` gets the number of workers, the
    /// computing time of each and the communication times, and returns seconds and staleness. Network cards send and
    /// receive at the same time.
    fn best(&self, name: &'static str, predict: impl Fn(u32, f64, &Sent) -> (f64, f64)) -> Option<Exchange> {
        let each = self.group.devices_per_node;
        let node_bytes_per_s = f64::from(self.group.inter_node.nics) * self.group.inter_node.bytes_per_s;
        let with = |servers: u32| {
            let workers = (self.nodes - servers) * each;
            let out_of =
                |workers: u32| server_bytes_per_s(workers.into(), self.gradient_bytes as f64, node_bytes_per_s);
            let (of_node_s, at_servers_s) = (out_of(each), out_of(workers) / f64::from(servers));
            let sent = Sent { of_node_s, at_servers_s, at_once_s: of_node_s.max(at_servers_s) };
            let (step_time_s, staleness) = predict(workers, self.computing_s / f64::from(workers), &sent);
            let how = format!(
                "{} on {} and {}, where the model fits a device",
                plural(workers.into(), "worker"),
                plural((self.nodes - servers).into(), "node"),
                match servers {
                    1 => "a server on one".to_string(),
                    n => format!("servers on {n}"),
                }
            );
            Exchange { name, nodes: self.nodes, workers, servers: Some(servers), step_time_s, staleness, how }
        };
        (1..self.nodes).map(with).min_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s).then(a.servers.cmp(&b.servers)))
    }
}
