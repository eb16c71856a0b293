#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod ascent;
mod branch;
mod compact;
mod condition;
mod eliminate;
mod explain;
mod messages;
mod neighbourhood;
mod network;
mod program;
mod reduce;
mod search;
mod table;
#[cfg(test)]
mod tests;

pub use explain::{Alternative, alternatives, held, tight_points};
pub use table::{BoundaryTable, boundary_table};

use branch::{Budget, Incumbent};
use compact::Compact;
use network::Network;
use reduce::Reductions;
use std::ops::Range;
use std::time::{Duration, Instant};
use thiserror::Error;

/// One decision: which strategy to take, with the cost of each and what each holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Cost of each strategy, seconds in the planner; `f64::INFINITY` forbids it.
    pub cost: Vec<f64>,
    /// The memory that strategies hold.
    pub holds: Vec<Holding>,
}

/// Bytes held at every program point of `live` (half-open), by strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Holding {
    /// The program points at which they are held.
    pub live: Range<u32>,
    /// The bytes of each strategy.
    pub bytes: Vec<u64>,
}

/// The cost of two decisions together. Parallel edges add; a node has no edge to itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Edge {
    /// The position of one node in [`Problem::nodes`].
    pub from: usize,
    /// The position of the other.
    pub to: usize,
    /// Row-major `[from strategy][to strategy]`; `f64::INFINITY` forbids the pair.
    pub cost: Vec<f64>,
}

/// Choose one strategy per node to minimise node costs plus edge costs, holding at most `limit_bytes` at every point.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Problem {
    /// The decisions.
    pub nodes: Vec<Node>,
    /// The costs of pairs of decisions.
    pub edges: Vec<Edge>,
    /// The memory limit, if there is one.
    pub limit_bytes: Option<u64>,
}

/// The limits of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Seconds after which the best choice found so far is returned with its lower bound; infinite for no limit. Only a search
    /// that reaches it depends on how fast the machine is.
    pub time_limit_s: f64,
    /// Table entries, in billions, that the search may read: about seconds of a core.
    pub effort: f64,
    /// Relative gap at which the answer is good enough.
    pub gap: f64,
}

impl Default for Options {
    fn default() -> Self {
        Options { time_limit_s: f64::INFINITY, effort: 10.0, gap: 1e-9 }
    }
}

/// A choice within the limit at every point.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The strategy of each node.
    pub choice: Vec<usize>,
    /// The cost of the choice, that of nodes and edges.
    pub cost: f64,
    /// No choice costs less than this; at most `cost`.
    pub lower_bound: f64,
}

impl Solution {
    /// How far above the best possible cost this one can be at most, relative to it; zero when proven best.
    pub fn gap(&self) -> f64 {
        if self.cost <= self.lower_bound { 0.0 } else { (self.cost - self.lower_bound) / self.cost.abs() }
    }
}

/// The reason why there is no solution.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum SolveError {
    /// Forbidden strategies and pairs, with the limit where there is one, leave no choice.
    #[error("no choice of strategies is allowed: give some node another strategy or raise the memory limit")]
    Infeasible,
    /// One point alone cannot be met.
    #[error("at program point {point} the least that can be held is {over_bytes} bytes over the limit")]
    MemoryInfeasible { point: u32, over_bytes: u64 },
    /// Neither a choice within the limit nor a proof that there is none.
    #[error("no choice within the memory limit was found: raise the effort, the time or the limit")]
    NotFound,
    #[error("malformed problem: {fault}")]
    Malformed { fault: Fault },
}

/// The error in a malformed problem. Indices are positions in the problem's vectors.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum Fault {
    #[error("node {node} has no strategies")]
    NoStrategies { node: usize },
    #[error("node {node} has {strategies} strategies but {bytes} entries of bytes")]
    BytesLength { node: usize, strategies: usize, bytes: usize },
    #[error("node {node} has a cost that is not a number or is minus infinity")]
    NodeCost { node: usize },
    #[error("edge {edge} names node {node}, which does not exist")]
    EdgeNode { edge: usize, node: usize },
    #[error("edge {edge} joins node {node} to itself")]
    SelfLoop { edge: usize, node: usize },
    #[error("edge {edge} has {entries} costs where {expected} are needed")]
    EdgeLength { edge: usize, entries: usize, expected: usize },
    #[error("edge {edge} has a cost that is not a number or is minus infinity")]
    EdgeCost { edge: usize },
    #[error("the bytes of all nodes together do not fit in 63 bits")]
    BytesOverflow,
    #[error("kept node {node} does not exist or is named twice")]
    Keep { node: usize },
    #[error("the kept nodes have more than {most} joint assignments")]
    KeepTooMany { most: usize },
    #[error("the time limit, the effort or the gap is negative or not a number")]
    Limits,
}

/// How far a search is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// `reduce`, `ascent`, `branch`: what has just been done.
    pub phase: &'static str,
    /// Since the search began.
    pub elapsed_s: f64,
    /// Infinite while nothing is found.
    pub cost: f64,
    /// No choice costs less.
    pub lower_bound: f64,
    /// Nodes left by the reductions.
    pub nodes: usize,
}

/// The best choice, or the best found within the limits, with a lower bound.
///
/// # Errors
/// [`SolveError::Malformed`] before anything is tried; otherwise when there is no choice, or none was found in time.
pub fn solve(problem: &Problem, options: &Options) -> Result<Solution, SolveError> {
    solve_watched(problem, options, &mut |_| {})
}

/// [`solve`], telling how far it is.
///
/// # Errors
/// As [`solve`].
pub fn solve_watched(
    problem: &Problem,
    options: &Options,
    watch: &mut dyn FnMut(Progress),
) -> Result<Solution, SolveError> {
    check(problem)?;
    let clock = Clock::start(options)?;
    let mut network = Network::new(problem)?;
    network.reduce(Reductions::ALL, &[])?;
    let network = network.compacted();
    let nodes = network.live().count();
    let elapsed = || clock.start.elapsed().as_secs_f64();
    watch(Progress {
        phase: "reduce",
        elapsed_s: elapsed(),
        cost: f64::INFINITY,
        lower_bound: f64::NEG_INFINITY,
        nodes,
    });
    let mut best = Incumbent::none(options.gap.max(ROUNDING));
    let mut budget = Budget { work: options.effort * 1e9, clock: &clock };
    let bound = search::search(&network, &mut best, &mut budget, &mut |phase, cost, lower_bound| {
        watch(Progress { phase, elapsed_s: elapsed(), cost, lower_bound: lower_bound.min(cost), nodes });
    });
    let bound = match bound < best.cutoff() && options.time_limit_s < f64::INFINITY && !clock.over() {
        // The work is spent and time is left.
        true if Compact::new(&network).entries <= PROGRAM_ENTRIES => {
            bound.max(program::solve(&network, &mut best, clock.left_s()))
        }
        _ => bound,
    };
    match best.choice {
        Some(choice) => {
            let cost = cost_of(problem, &choice);
            // Pruned choices are within the gap of the incumbent.
            let cutoff = cost - options.gap.max(ROUNDING) * cost.abs();
            let exact = network.live().next().is_none();
            Ok(Solution { choice, cost, lower_bound: if exact { cost } else { bound.min(cutoff) } })
        }
        None if bound == f64::INFINITY => Err(SolveError::Infeasible),
        None => Err(SolveError::NotFound),
    }
}

/// Edge entries up to which the integer program is worth its dense-ish simplex.
const PROGRAM_ENTRIES: usize = 4_000;

/// Relative difference below which two costs count as equal: bounds are sums of many rounded numbers.
const ROUNDING: f64 = 1e-9;

/// When the time limit is reached.
#[derive(Clone, Copy, Debug)]
struct Clock {
    start: Instant,
    deadline: Option<Instant>,
}

impl Clock {
    fn start(options: &Options) -> Result<Clock, SolveError> {
        let bad = |limit: f64| limit.is_nan() || limit < 0.0;
        if bad(options.time_limit_s) || bad(options.effort) || bad(options.gap) {
            return Err(SolveError::Malformed { fault: Fault::Limits });
        }
        let start = Instant::now();
        // A limit too long for the clock is no limit.
        let limit = Duration::try_from_secs_f64(options.time_limit_s).ok();
        Ok(Clock { start, deadline: limit.and_then(|limit| start.checked_add(limit)) })
    }

    fn over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// With a share of the time that is left.
    fn share(&self, of: usize) -> Clock {
        let now = Instant::now();
        let parts = u32::try_from(of).unwrap_or(u32::MAX).max(1);
        let deadline = self.deadline.map(|deadline| now + deadline.saturating_duration_since(now) / parts);
        Clock { deadline, ..*self }
    }

    fn left_s(&self) -> f64 {
        self.deadline.map_or(f64::INFINITY, |d| d.saturating_duration_since(Instant::now()).as_secs_f64())
    }
}

fn check(problem: &Problem) -> Result<(), SolveError> {
    check_fault(problem).map_err(|fault| SolveError::Malformed { fault })
}

fn check_fault(problem: &Problem) -> Result<(), Fault> {
    let bad = |c: &f64| c.is_nan() || *c == f64::NEG_INFINITY;
    let mut most_bytes = 0_u64;
    for (node, Node { cost, holds }) in problem.nodes.iter().enumerate() {
        if cost.is_empty() {
            return Err(Fault::NoStrategies { node });
        }
        for Holding { bytes, .. } in holds {
            if bytes.len() != cost.len() {
                return Err(Fault::BytesLength { node, strategies: cost.len(), bytes: bytes.len() });
            }
            let most = bytes.iter().copied().max().unwrap_or(0);
            let sum = most_bytes.checked_add(most).filter(|&sum| sum <= i64::MAX as u64);
            most_bytes = sum.ok_or(Fault::BytesOverflow)?;
        }
        if cost.iter().any(bad) {
            return Err(Fault::NodeCost { node });
        }
    }
    for (edge, Edge { from, to, cost }) in problem.edges.iter().enumerate() {
        for &node in [from, to] {
            if node >= problem.nodes.len() {
                return Err(Fault::EdgeNode { edge, node });
            }
        }
        if from == to {
            return Err(Fault::SelfLoop { edge, node: *from });
        }
        let expected = problem.nodes[*from].cost.len() * problem.nodes[*to].cost.len();
        if cost.len() != expected {
            return Err(Fault::EdgeLength { edge, entries: cost.len(), expected });
        }
        if cost.iter().any(bad) {
            return Err(Fault::EdgeCost { edge });
        }
    }
    Ok(())
}

/// Cost of a choice in the problem as given.
fn cost_of(problem: &Problem, choice: &[usize]) -> f64 {
    let nodes: f64 = problem.nodes.iter().zip(choice).map(|(node, &s)| node.cost[s]).sum();
    let edge = |e: &Edge| e.cost[choice[e.from] * problem.nodes[e.to].cost.len() + choice[e.to]];
    nodes + problem.edges.iter().map(edge).sum::<f64>()
}
