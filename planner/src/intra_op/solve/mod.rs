//! Exact solver for pairwise choice problems with memory limits: one strategy per node, node costs plus edge costs
//! minimised, and at every program point the chosen bytes within a limit.
//!
//! The pairwise part is a partitioned Boolean quadratic problem (PBQP). It is reduced in the manner of Scholz & Eckstein
//! ("Register Allocation for Irregular Architectures", LCTES 2002) and then solved by bucket elimination (Dechter,
//! "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 1999), which is fast because the
//! graphs of a layer are nearly series-parallel. What does not fit, and memory, is handled by bounds from the same
//! elimination and a search guided by them; every answer carries a true lower bound.

mod eliminate;
mod memory;
mod program;
mod reduce;
mod search;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use thiserror::Error;

use eliminate::{Caps, Plan};
use reduce::Reduced;
use search::{Budget, Incumbent, Search};

/// One decision: which strategy to take, with the cost and the bytes of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Seconds of each strategy; `f64::INFINITY` forbids it.
    pub cost: Vec<f64>,
    /// Bytes each strategy holds where the node is a member of a [`MemoryRow`]. Empty means zero for all.
    pub bytes: Vec<u64>,
}

/// The cost of two decisions together. Parallel edges add; a node has no edge to itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Edge {
    pub from: usize,
    pub to: usize,
    /// Seconds, row-major `[from strategy][to strategy]`; `f64::INFINITY` forbids the pair.
    pub cost: Vec<f64>,
}

/// One program point: the chosen bytes of `members` sum to at most `limit_bytes`.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryRow {
    pub limit_bytes: u64,
    /// Nodes that hold memory at this point, each at most once.
    pub members: Vec<usize>,
}

/// Choose one strategy per node to minimise node costs plus edge costs subject to the memory rows.
///
/// ```
/// use altiplano_planner::intra_op::solve::{Edge, Node, Options, Problem, solve};
///
/// let node = |cost: [f64; 2]| Node { cost: cost.to_vec(), bytes: vec![] };
/// let problem = Problem {
///     nodes: vec![node([1.0, 2.0]), node([3.0, 1.0])],
///     // Two strategies that differ cost 5 s of resharding.
///     edges: vec![Edge { from: 0, to: 1, cost: vec![0.0, 5.0, 5.0, 0.0] }],
///     memory: vec![],
/// };
/// let solution = solve(&problem, &Options::default())?;
/// assert_eq!((solution.choice, solution.cost), (vec![1, 1], 3.0));
/// # Ok::<(), altiplano_planner::intra_op::solve::SolveError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Problem {
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
    pub memory: Vec<MemoryRow>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Seconds after which the best choice found so far is returned with its lower bound. The first elimination always
    /// runs to its end; `f64::INFINITY` means no limit.
    pub time_limit_s: f64,
}

impl Default for Options {
    fn default() -> Self {
        Options { time_limit_s: 10.0 }
    }
}

/// A choice that obeys every memory row.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The strategy of each node.
    pub choice: Vec<usize>,
    /// Seconds of this choice.
    pub cost: f64,
    /// No choice costs less than this. Equal to `cost` when the choice is proven best (to about 1e-9 relative).
    pub lower_bound: f64,
}

impl Solution {
    /// How far above the best possible cost this one can be at most, relative to it; zero when proven best.
    pub fn gap(&self) -> f64 {
        if self.cost <= self.lower_bound { 0.0 } else { (self.cost - self.lower_bound) / self.cost.abs() }
    }
}

#[derive(Clone, Debug, Error, PartialEq)]
pub enum SolveError {
    /// Forbidden strategies and pairs (with all the memory rows together, where there are any) leave no choice.
    #[error("no choice of strategies is allowed: give some node another strategy or raise the memory limits")]
    Infeasible,
    /// One row alone cannot be met.
    #[error("memory row {row} needs at least {least_bytes} bytes and its limit is {limit_bytes}")]
    MemoryInfeasible { row: usize, limit_bytes: u64, least_bytes: u64 },
    /// Neither a choice within the memory rows nor a proof that there is none.
    #[error("no choice within the memory rows was found in {time_limit_s} s: raise the time or memory limit")]
    NotFound { time_limit_s: f64 },
    #[error("malformed problem: {fault}")]
    Malformed { fault: Fault },
}

/// What is wrong with a malformed problem. Indices are positions in the problem's vectors.
#[derive(Clone, Debug, Error, PartialEq)]
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
    #[error("memory row {row} names node {node}, which does not exist")]
    RowNode { row: usize, node: usize },
    #[error("memory row {row} names node {node} twice")]
    RowRepeats { row: usize, node: usize },
    #[error("the bytes of all nodes together do not fit in 64 bits")]
    BytesOverflow,
    #[error("kept node {node} does not exist or is named twice")]
    Keep { node: usize },
    #[error("the kept nodes have more than {most} joint assignments")]
    KeepTooMany { most: usize },
    #[error("the time limit is negative or not a number")]
    TimeLimit,
}

/// The best choice, or the best found within the time limit with a lower bound.
///
/// # Errors
/// [`SolveError::Malformed`] before anything is tried; otherwise when there is no choice, or none was found in time.
pub fn solve(problem: &Problem, options: &Options) -> Result<Solution, SolveError> {
    check(problem)?;
    let clock = Clock::start(options)?;
    // Without memory first: what obeys the rows by itself is the best.
    let reduced = Reduced::new(problem, &[], &[])?;
    let plan = Plan::new(&reduced, &[], &Caps::for_seconds(options.time_limit_s));
    let messages = plan.evaluate(&reduced.cost);
    if messages.value == f64::INFINITY {
        return Err(SolveError::Infeasible);
    }
    let choice = reduced.lift(&plan.dive(&reduced.cost, &messages));
    let cost = cost_of(problem, &choice);
    let obeys = obeys(problem, &choice);
    if plan.exact && obeys {
        return Ok(Solution { choice, cost, lower_bound: cost });
    }
    // An inexact elimination proves nothing about the choice it dived to, so the rows stay in force even if it obeys.
    if !problem.memory.is_empty() {
        return memory::solve(problem, options, &clock, messages.value);
    }
    let mut best = Incumbent::none();
    let search = Search { reduced: &reduced, plan: &plan, messages: &messages, unary: &reduced.cost, offset: 0.0 };
    let bound = finish(&search, &mut best, &clock);
    conclude(problem, options, best, bound)
}

/// Searches with a budget, then hands what is small enough to the integer program, then searches on to the time limit.
/// Returns a lower bound, which is infinite when there is nothing below the incumbent.
fn finish(search: &Search, best: &mut Incumbent, clock: &Clock) -> f64 {
    let first = search.run(best, &Budget { expansions: SEARCH_EXPANSIONS, clock });
    if first.complete || clock.over() {
        return first.bound;
    }
    let mut bound = first.bound;
    if program::entries(search.reduced) <= PROGRAM_ENTRIES {
        let outcome = program::solve(search.reduced, best, clock.left_s() * PROGRAM_SHARE);
        bound = bound.max(outcome.bound);
        if outcome.complete || clock.over() {
            return bound;
        }
    }
    bound.max(search.run(best, &Budget { expansions: u64::MAX, clock }).bound)
}

fn conclude(problem: &Problem, options: &Options, best: Incumbent, bound: f64) -> Result<Solution, SolveError> {
    match &best.choice {
        Some(choice) => {
            let choice = choice.clone();
            let cost = cost_of(problem, &choice);
            // The bound was reached by sums in another order: within the rounding of those it is the cost itself.
            let lower_bound = if bound >= best.cutoff() { cost } else { bound.min(cost) };
            Ok(Solution { choice, cost, lower_bound })
        }
        None if bound == f64::INFINITY => Err(SolveError::Infeasible),
        None => Err(SolveError::NotFound { time_limit_s: options.time_limit_s }),
    }
}

/// For every assignment of some kept nodes, the least cost of all nodes and edges together.
#[derive(Clone, Debug)]
pub struct BoundaryTable {
    dims: Vec<usize>,
    cost: Vec<f64>,
    recover: Recover,
}

#[derive(Clone, Debug)]
enum Recover {
    /// Walk the elimination backwards from the kept assignment.
    Walk { reduced: Box<Reduced>, plan: Box<Plan>, messages: Box<eliminate::Messages>, keep: Vec<usize> },
    /// One stored choice per entry; empty where the entry is infinite.
    Stored { choices: Vec<Vec<usize>>, keep: Vec<usize>, nodes: usize },
}

impl BoundaryTable {
    /// How many strategies each kept node has, in the order the nodes were named.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Least seconds of the whole problem with the kept nodes at these strategies; infinite where nothing is allowed, and
    /// where `kept` does not name one strategy for each kept node.
    pub fn cost(&self, kept: &[usize]) -> f64 {
        self.index(kept).and_then(|i| self.cost.get(i)).copied().unwrap_or(f64::INFINITY)
    }

    /// The strategy of every node of the problem that reaches [`cost`](Self::cost). Where the cost is infinite the kept
    /// nodes are as asked and the others mean nothing.
    pub fn choice(&self, kept: &[usize]) -> Vec<usize> {
        let place = |choice: &mut Vec<usize>, keep: &[usize]| {
            for (&node, &strategy) in keep.iter().zip(kept) {
                choice[node] = strategy;
            }
        };
        match &self.recover {
            Recover::Walk { reduced, plan, messages, keep } => {
                let mut local = vec![0; reduced.cost.len()];
                if self.index(kept).is_some() {
                    place(&mut local, keep);
                    plan.dive_into(&reduced.cost, messages, &mut local);
                }
                let mut choice = reduced.lift(&local);
                place(&mut choice, keep);
                choice
            }
            Recover::Stored { choices, keep, nodes } => {
                let stored = self.index(kept).and_then(|i| choices.get(i)).filter(|c| !c.is_empty());
                stored.cloned().unwrap_or_else(|| {
                    let mut choice = vec![0; *nodes];
                    place(&mut choice, keep);
                    choice
                })
            }
        }
    }

    fn index(&self, kept: &[usize]) -> Option<usize> {
        if kept.len() != self.dims.len() || kept.iter().zip(&self.dims).any(|(&s, &d)| s >= d) {
            return None;
        }
        Some(kept.iter().zip(&self.dims).fold(0, |at, (&s, &d)| at * d + s))
    }
}

/// For every assignment of the `keep` nodes the least cost of all the rest, and how to recover the choices.
///
/// The memory rows are ignored: the table is for joining parts of a problem whose memory is checked as a whole. Where the
/// rest is too dense to eliminate, each entry is solved on its own and an entry that reaches its share of the time limit
/// is the best found, not the least.
///
/// # Errors
/// [`SolveError::Infeasible`] when every entry would be infinite; [`SolveError::Malformed`] also for a kept node that
/// does not exist or is named twice, and for more joint assignments than fit in a table.
pub fn boundary_table(problem: &Problem, keep: &[usize], options: &Options) -> Result<BoundaryTable, SolveError> {
    check(problem)?;
    let clock = Clock::start(options)?;
    let mut pinned = vec![false; problem.nodes.len()];
    for &node in keep {
        match pinned.get_mut(node) {
            Some(seen) if !*seen => *seen = true,
            _ => {
                return Err(SolveError::Malformed { fault: Fault::Keep { node } });
            }
        }
    }
    let dims: Vec<usize> = keep.iter().map(|&v| problem.nodes[v].cost.len()).collect();
    let size = dims.iter().try_fold(1_usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= eliminate::TABLE_ENTRIES);
    let Some(size) = size else {
        return Err(SolveError::Malformed { fault: Fault::KeepTooMany { most: eliminate::TABLE_ENTRIES } });
    };
    let reduced = Reduced::new(problem, &[], &pinned)?;
    let plan = Plan::new(&reduced, keep, &Caps::for_seconds(options.time_limit_s));
    let table = if plan.exact {
        let messages = plan.evaluate(&reduced.cost);
        let mut local = vec![0; problem.nodes.len()];
        let cost = (0..size)
            .map(|entry| {
                unflatten(entry, &dims, keep, &mut local);
                plan.rest(&reduced.cost, &messages, &local)
            })
            .collect();
        let recover = Recover::Walk {
            reduced: Box::new(reduced),
            plan: Box::new(plan),
            messages: Box::new(messages),
            keep: keep.to_vec(),
        };
        BoundaryTable { dims, cost, recover }
    } else {
        let mut cost = Vec::with_capacity(size);
        let mut choices = Vec::with_capacity(size);
        let mut kept = vec![0; problem.nodes.len()];
        for entry in 0..size {
            unflatten(entry, &dims, keep, &mut kept);
            let mut one = Problem { nodes: problem.nodes.clone(), edges: problem.edges.clone(), memory: vec![] };
            for &v in keep {
                for (s, c) in one.nodes[v].cost.iter_mut().enumerate() {
                    *c = if s == kept[v] { *c } else { f64::INFINITY };
                }
            }
            let share_s = clock.left_s() / (size - entry) as f64;
            match solve(&one, &Options { time_limit_s: share_s }) {
                Ok(solution) => {
                    cost.push(solution.cost);
                    choices.push(solution.choice);
                }
                Err(SolveError::Infeasible) => {
                    cost.push(f64::INFINITY);
                    choices.push(vec![]);
                }
                Err(error) => return Err(error),
            }
        }
        BoundaryTable { dims, cost, recover: Recover::Stored { choices, keep: keep.to_vec(), nodes: kept.len() } }
    };
    if table.cost.iter().all(|&c| c == f64::INFINITY) { Err(SolveError::Infeasible) } else { Ok(table) }
}

/// Writes the strategies of the kept nodes at table entry `entry`, the last node fastest.
fn unflatten(mut entry: usize, dims: &[usize], keep: &[usize], into: &mut [usize]) {
    for (&node, &dim) in keep.iter().zip(dims).rev() {
        into[node] = entry % dim;
        entry /= dim;
    }
}

/// Search steps before the integer program is tried: a second or two. A count and not a time, so that answers repeat.
const SEARCH_EXPANSIONS: u64 = 3_000_000;
/// Edge entries up to which the integer program is worth its dense-ish simplex.
const PROGRAM_ENTRIES: usize = 4_000;
/// Part of the time left that the integer program may take.
const PROGRAM_SHARE: f64 = 0.5;
/// Relative difference below which two costs count as equal.
const TOLERANCE: f64 = 1e-11;

/// When the time limit is reached.
struct Clock {
    deadline: Option<Instant>,
}

impl Clock {
    fn start(options: &Options) -> Result<Clock, SolveError> {
        if options.time_limit_s.is_nan() || options.time_limit_s < 0.0 {
            return Err(SolveError::Malformed { fault: Fault::TimeLimit });
        }
        // A limit too long for the clock is no limit.
        let limit = Duration::try_from_secs_f64(options.time_limit_s).ok();
        Ok(Clock { deadline: limit.and_then(|limit| Instant::now().checked_add(limit)) })
    }

    fn over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
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
    for (node, Node { cost, bytes }) in problem.nodes.iter().enumerate() {
        if cost.is_empty() {
            return Err(Fault::NoStrategies { node });
        }
        if !bytes.is_empty() && bytes.len() != cost.len() {
            return Err(Fault::BytesLength { node, strategies: cost.len(), bytes: bytes.len() });
        }
        if cost.iter().any(bad) {
            return Err(Fault::NodeCost { node });
        }
        let most = bytes.iter().copied().max().unwrap_or(0);
        most_bytes = most_bytes.checked_add(most).ok_or(Fault::BytesOverflow)?;
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
    let mut last_row = vec![usize::MAX; problem.nodes.len()];
    for (row, MemoryRow { members, .. }) in problem.memory.iter().enumerate() {
        for &node in members {
            match last_row.get_mut(node) {
                None => return Err(Fault::RowNode { row, node }),
                Some(seen) if *seen == row => return Err(Fault::RowRepeats { row, node }),
                Some(seen) => *seen = row,
            }
        }
    }
    Ok(())
}

/// Seconds of a choice in the problem as given.
fn cost_of(problem: &Problem, choice: &[usize]) -> f64 {
    let nodes: f64 = problem.nodes.iter().zip(choice).map(|(node, &s)| node.cost[s]).sum();
    let edge = |e: &Edge| e.cost[choice[e.from] * problem.nodes[e.to].cost.len() + choice[e.to]];
    nodes + problem.edges.iter().map(edge).sum::<f64>()
}

fn bytes_of(node: &Node, strategy: usize) -> u64 {
    node.bytes.get(strategy).copied().unwrap_or(0)
}

fn obeys(problem: &Problem, choice: &[usize]) -> bool {
    problem
        .memory
        .iter()
        .all(|row| row.members.iter().map(|&v| bytes_of(&problem.nodes[v], choice[v])).sum::<u64>() <= row.limit_bytes)
}
