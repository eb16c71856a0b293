//! Tables over a few kept nodes of the least that all else costs, by which parts of a problem are joined.

use super::branch::{Budget, Incumbent, restrict};
use super::compact::{Assignment, Compact};
use super::condition::{Conditioned, conditioned};
use super::eliminate::{Caps, Plan, TABLE_ENTRIES, Tables, Unary};
use super::messages::Messages;
use super::network::Network;
use super::reduce::Reductions;
use super::{Clock, Fault, Options, Problem, ROUNDING, SolveError, check, cost_of, search};

/// For every assignment of some kept nodes, the least cost of all nodes and edges together.
#[derive(Clone, Debug)]
pub struct BoundaryTable {
    dims: Vec<usize>,
    /// The kept nodes, and how many there are in all.
    keep: Vec<usize>,
    nodes: usize,
    cost: Vec<f64>,
    recover: Recover,
}

#[derive(Clone, Debug)]
enum Recover {
    /// Walk the elimination of one of these backwards from the kept assignment; which, by entry.
    Walks { walks: Vec<Walk>, of: Vec<usize> },
    /// One stored choice per entry; empty where the entry is infinite.
    Stored { choices: Vec<Vec<usize>> },
}

/// An elimination of all but the kept nodes.
#[derive(Clone, Debug)]
pub(super) struct Walk {
    network: Network,
    of: Compact,
    plan: Plan,
    tables: Tables,
    keep: Vec<usize>,
    /// The kept nodes as `of` numbers them.
    kept: Vec<usize>,
}

impl Walk {
    pub(crate) fn new(network: Network, of: Compact, plan: Plan, keep: &[usize], kept: Vec<usize>) -> Walk {
        let tables = plan.evaluate(&Unary { offset: &of.offset, cost: &of.cost });
        Walk { network, of, plan, tables, keep: keep.to_vec(), kept }
    }

    fn unary(&self) -> Unary<'_> {
        Unary { offset: &self.of.offset, cost: &self.of.cost }
    }

    pub(crate) fn cost(&self, entry: usize, dims: &[usize]) -> f64 {
        let mut local = vec![0; self.of.len()];
        unflatten(entry, dims, &self.kept, &mut local);
        self.of.constant + self.plan.rest(&self.unary(), &self.tables, &local)
    }

    /// The strategy of every node of the problem, of the kept ones as given.
    pub(crate) fn choice(&self, kept: &[usize]) -> Vec<usize> {
        let mut local = vec![0; self.of.len()];
        self.kept.iter().zip(kept).for_each(|(&node, &strategy)| local[node] = strategy);
        self.plan.dive_into(&self.unary(), &self.tables, &mut local);
        let mut live = vec![0; self.network.nodes.len()];
        self.of.node.iter().zip(&local).for_each(|(&v, &s)| live[v] = s);
        let mut choice = self.network.lift(&live);
        self.keep.iter().zip(kept).for_each(|(&node, &strategy)| choice[node] = strategy);
        choice
    }
}

impl BoundaryTable {
    /// How many strategies each kept node has, in the order the nodes were named.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Least cost of the whole problem with the kept nodes at these strategies; infinite where nothing is allowed, and
    /// where `kept` does not name one strategy for each kept node.
    pub fn cost(&self, kept: &[usize]) -> f64 {
        self.index(kept).and_then(|i| self.cost.get(i)).copied().unwrap_or(f64::INFINITY)
    }

    /// The strategy of every node of the problem that reaches [`cost`](Self::cost). Where the cost is infinite the kept
    /// nodes are as asked and the others mean nothing.
    pub fn choice(&self, kept: &[usize]) -> Vec<usize> {
        let index = self.index(kept);
        let known = match &self.recover {
            Recover::Walks { walks, of } => index.and_then(|i| walks.get(of[i])).map(|walk| walk.choice(kept)),
            Recover::Stored { choices } => index.and_then(|i| choices.get(i)).filter(|c| !c.is_empty()).cloned(),
        };
        known.unwrap_or_else(|| {
            let mut choice = vec![0; self.nodes];
            self.keep.iter().zip(kept).for_each(|(&node, &strategy)| choice[node] = strategy);
            choice
        })
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
/// Memory is ignored: the table is for joining parts of a problem whose memory is checked as a whole. Where eliminating the rest takes
/// more than bounding every entry, and no hubs part it from the kept nodes, entries are bounded first. Those whose bound meets a choice within the gap are done. For the others,
/// strategies that no entry has a use for go, and the rest is eliminated, or, where it is too dense even so, searched entry by
/// entry. One that reaches its share of the limits is the best found, not the least.
///
/// # Errors
/// [`SolveError::Infeasible`] when every entry would be infinite; [`SolveError::Malformed`] also for a kept node that
/// does not exist or is named twice, and for more joint assignments than fit in a table.
pub fn boundary_table(problem: &Problem, keep: &[usize], options: &Options) -> Result<BoundaryTable, SolveError> {
    table_by(problem, keep, options, Eliminations::ALL)
}

/// When eliminations are tried: both times, but in tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Eliminations {
    pub at_once: bool,
    pub once_bounded: bool,
}

impl Eliminations {
    pub(crate) const ALL: Eliminations = Eliminations { at_once: true, once_bounded: true };
}

pub(super) fn table_by(
    problem: &Problem,
    keep: &[usize],
    options: &Options,
    eliminations: Eliminations,
) -> Result<BoundaryTable, SolveError> {
    check(problem)?;
    let clock = Clock::start(options)?;
    let (dims, size) = dims_of_table(problem, keep)?;
    let mut network = Network::within(problem, None)?;
    let mut kept = keep.to_vec();
    reduce_around(&mut network, &mut kept)?;
    let mut of = Compact::new(&network);
    let bounding = (PASSES * size * (of.entries + of.cost.len())) as f64;
    let parts = Parts { problem, keep, dims: &dims, size };
    if eliminations.at_once
        && let Some(plan) = shared_plan(&of, &kept, bounding.max(CHEAP).min(options.effort * 1e9))
    {
        return parts.eliminated(network, of, plan, kept);
    }
    let mut budget = Budget { work: CONDITIONING * options.effort * 1e9, clock: &clock };
    let gap = options.gap.max(ROUNDING);
    if let Some(Conditioned { walks, entries }) = conditioned(&network, &kept, keep, &dims, gap, &mut budget) {
        let cost = entries.iter().map(|entry| entry.map_or(f64::INFINITY, |(cost, _)| cost)).collect();
        // An entry that is infinite is of no walk.
        let of = entries.iter().map(|entry| entry.map_or(walks.len(), |(_, walk)| walk)).collect();
        return parts.table(cost, Recover::Walks { walks, of });
    }
    number(&mut network, &mut kept, &beside_neighbours(&of));
    of = Compact::new(&network);
    let Bounded { entries, mut useful } = bounded(&mut of, &kept, &parts, gap, &clock);
    if entries.iter().all(|entry| entry.closed) {
        return parts.stored(entries.iter().map(|entry| entry.found(&network, &of)).collect());
    }
    for &v in &kept {
        useful[of.offset[v]..of.offset[v + 1]].fill(true);
    }
    let found: Vec<Option<(f64, Vec<usize>)>> = entries.iter().map(|entry| entry.found(&network, &of)).collect();
    if !restrict(&mut network, &of, &useful) {
        return Err(SolveError::Infeasible);
    }
    reduce_around(&mut network, &mut kept)?;
    let of = Compact::new(&network);
    if eliminations.once_bounded
        && let Some(plan) = shared_plan(&of, &kept, options.effort * 1e9)
    {
        return parts.eliminated(network, of, plan, kept);
    }
    let mut left = entries.iter().filter(|entry| !entry.closed).count();
    let mut work = options.effort * 1e9;
    let mut solved = Vec::with_capacity(size);
    let mut local = vec![0; of.len()];
    for (i, (entry, found)) in entries.iter().zip(found).enumerate() {
        if entry.closed {
            solved.push(found);
            continue;
        }
        unflatten(i, &dims, &kept, &mut local);
        let share = work / left as f64;
        let clock = clock.share(left);
        let mut budget = Budget { work: share, clock: &clock };
        left -= 1;
        let mut best = Incumbent::none(gap);
        if let Some((cost, choice)) = found {
            (best.cost, best.choice) = (cost, Some(choice));
        }
        let bound = searched(&network, &kept, &local, &mut best, &mut budget);
        work -= share - budget.work;
        match best.choice {
            Some(choice) => solved.push(Some((best.cost, choice))),
            None if bound == f64::INFINITY => solved.push(None),
            None => return Err(SolveError::NotFound),
        }
    }
    parts.stored(solved)
}

/// The strategies of each kept node, and the number of entries of their table.
fn dims_of_table(problem: &Problem, keep: &[usize]) -> Result<(Vec<usize>, usize), SolveError> {
    let mut pinned = vec![false; problem.nodes.len()];
    for &node in keep {
        match pinned.get_mut(node) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(SolveError::Malformed { fault: Fault::Keep { node } }),
        }
    }
    let dims: Vec<usize> = keep.iter().map(|&v| problem.nodes[v].cost.len()).collect();
    let size = dims.iter().try_fold(1_usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= TABLE_ENTRIES);
    let size = size.ok_or(SolveError::Malformed { fault: Fault::KeepTooMany { most: TABLE_ENTRIES } })?;
    Ok((dims, size))
}

/// An elimination of all but the kept nodes, unless it takes more than `most` additions.
fn shared_plan(of: &Compact, kept: &[usize], most: f64) -> Option<Plan> {
    let caps = Caps { entries: TABLE_ENTRIES as f64, work: f64::INFINITY };
    Plan::new(of, kept, &caps)?.shared(&Unary { offset: &of.offset, cost: &of.cost }, most)
}

/// Searches one entry. Returns a lower bound of everything but the incumbent.
fn searched(network: &Network, kept: &[usize], local: &[usize], best: &mut Incumbent, budget: &mut Budget<'_>) -> f64 {
    let mut one = network.clone();
    for &v in kept {
        let only: Vec<bool> = (0..one.width(v)).map(|s| s == local[v]).collect();
        one.retain(v, &only);
    }
    if one.reduce(Reductions::ALL, &[]).is_err() {
        return f64::INFINITY;
    }
    search::search(&one.compacted(), best, budget, &mut |_, _, _| {})
}

/// Reduces all but the kept nodes, and numbers what is left anew.
pub(super) fn reduce_around(network: &mut Network, kept: &mut [usize]) -> Result<(), SolveError> {
    let mut pinned = vec![false; network.nodes.len()];
    kept.iter().for_each(|&v| pinned[v] = true);
    network.reduce(Reductions::ALL, &pinned)?;
    let live: Vec<usize> = network.live().collect();
    number(network, kept, &live);
    Ok(())
}

/// Numbers the nodes that are left in the order given.
fn number(network: &mut Network, kept: &mut [usize], order: &[usize]) {
    let mut place = vec![0; network.nodes.len()];
    order.iter().enumerate().for_each(|(u, &v)| place[v] = u);
    kept.iter_mut().for_each(|v| *v = place[*v]);
    *network = std::mem::take(network).numbered(order);
}

/// Nodes with those that come after all their neighbours behind the first of them: messages go over nodes in their order, and a node at
/// the end would pass on what it is told a whole pass later.
fn beside_neighbours(of: &Compact) -> Vec<usize> {
    let place = |&u: &usize| {
        let around = of.incident[u].iter().map(|&(e, is_first)| of.edges[e as usize].other(is_first));
        let (first, last) = around.fold((usize::MAX, 0), |(first, last), w| (first.min(w), last.max(w)));
        if first <= last && last < u { (first, 1) } else { (u, 0) }
    };
    let mut order: Vec<usize> = (0..of.len()).collect();
    order.sort_by_key(place);
    order
}

/// The subject of a table.
struct Parts<'a> {
    problem: &'a Problem,
    keep: &'a [usize],
    dims: &'a [usize],
    /// Entries.
    size: usize,
}

impl Parts<'_> {
    fn eliminated(
        &self,
        network: Network,
        of: Compact,
        plan: Plan,
        kept: Vec<usize>,
    ) -> Result<BoundaryTable, SolveError> {
        let walk = Walk::new(network, of, plan, self.keep, kept);
        let cost = (0..self.size).map(|entry| walk.cost(entry, self.dims)).collect();
        self.table(cost, Recover::Walks { walks: vec![walk], of: vec![0; self.size] })
    }

    fn stored(&self, found: Vec<Option<(f64, Vec<usize>)>>) -> Result<BoundaryTable, SolveError> {
        let cost = found.iter().map(|f| f.as_ref().map_or(f64::INFINITY, |(_, choice)| cost_of(self.problem, choice)));
        let cost = cost.collect();
        let choices = found.into_iter().map(|f| f.map_or_else(Vec::new, |(_, choice)| choice)).collect();
        self.table(cost, Recover::Stored { choices })
    }

    fn table(&self, cost: Vec<f64>, recover: Recover) -> Result<BoundaryTable, SolveError> {
        let (dims, keep, nodes) = (self.dims.to_vec(), self.keep.to_vec(), self.problem.nodes.len());
        match cost.iter().all(|&c| c == f64::INFINITY) {
            true => Err(SolveError::Infeasible),
            false => Ok(BoundaryTable { dims, keep, nodes, cost, recover }),
        }
    }
}

/// The bounds of a table's entries.
struct Bounded {
    entries: Vec<Entry>,
    /// Strategies that an entry which is not closed may need, and those of all choices found, flat.
    useful: Vec<bool>,
}

/// The best choice found for an entry.
#[derive(Default)]
struct Entry {
    x: Option<Vec<usize>>,
    cost: f64,
    /// Nothing better that counts is left.
    closed: bool,
}

impl Entry {
    /// Takes a choice, with what changes of one node better it, where it costs less.
    fn offer(&mut self, of: &Compact, x: Vec<usize>) {
        let mut assignment = Assignment::new(of, x);
        if assignment.cost == f64::INFINITY {
            return;
        }
        assignment.improve(of);
        if assignment.cost < self.cost {
            (self.cost, self.x) = (assignment.cost, Some(assignment.x));
        }
    }

    fn found(&self, network: &Network, of: &Compact) -> Option<(f64, Vec<usize>)> {
        let x = self.x.as_ref()?;
        let mut live = vec![0; network.nodes.len()];
        of.node.iter().zip(x).for_each(|(&v, &s)| live[v] = s);
        Some((self.cost, network.lift(&live)))
    }
}

/// Bounds every entry by messages, each beginning with those of the entry before: neighbours in a table differ at the ends of the
/// problem, and what its middle says is the same.
fn bounded(of: &mut Compact, kept: &[usize], parts: &Parts<'_>, gap: f64, clock: &Clock) -> Bounded {
    let own = of.cost.clone();
    let infinite = own.iter().chain(of.edges.iter().flat_map(|e| &e.ab)).any(|&c| c == f64::INFINITY);
    let mut messages = Messages::new(of);
    let mut hat = vec![0.0; own.len()];
    let mut back = vec![0.0; own.len()];
    let mut useful = vec![false; own.len()];
    let mut entries: Vec<Entry> = Vec::with_capacity(parts.size);
    let mut local = vec![0; of.len()];
    let mut last: Option<Vec<usize>> = None;
    for entry in 0..parts.size {
        unflatten(entry, parts.dims, kept, &mut local);
        for &v in kept {
            for s in 0..of.width(v) {
                let at = of.offset[v] + s;
                of.cost[at] = if s == local[v] { own[at] } else { f64::INFINITY };
            }
        }
        // A strategy forbidden for one entry may be allowed for the next.
        if infinite {
            messages = Messages::new(of);
        }
        let mut best = Entry { cost: f64::INFINITY, ..Entry::default() };
        if let Some(mut x) = last.take() {
            kept.iter().for_each(|&v| x[v] = local[v]);
            best.offer(of, x);
        }
        let mut bound = f64::NEG_INFINITY;
        for round in 0..ROUNDS {
            let forward = messages.pass(of, &of.cost, &mut hat, true);
            let backward = messages.pass(of, &of.cost, &mut back, false);
            let risen = of.constant + forward.max(backward) - bound;
            bound = bound.max(of.constant + forward.max(backward));
            if bound == f64::INFINITY {
                break;
            }
            best.offer(of, messages.decode(of, &of.cost));
            let left = best.cost - bound;
            best.closed = left < f64::INFINITY && left <= gap * best.cost.abs();
            let slow = round > 0 && risen < WORTH_A_ROUND * left;
            if best.closed || slow || round + 1 == ROUNDS || clock.over() {
                // The cost that a strategy adds counts from the bound before the pass.
                let floor = of.constant + forward;
                back.iter_mut().for_each(|b| *b += floor);
                break;
            }
        }
        if bound == f64::INFINITY {
            best = Entry { x: None, cost: f64::INFINITY, closed: true };
        } else if !best.closed {
            let cutoff = if best.x.is_some() { best.cost - gap * best.cost.abs() } else { f64::INFINITY };
            useful.iter_mut().zip(&back).for_each(|(u, b)| *u |= *b < cutoff);
        }
        if let Some(x) = &best.x {
            x.iter().zip(&of.offset).for_each(|(&s, &o)| useful[o + s] = true);
        }
        last.clone_from(&best.x);
        entries.push(best);
    }
    of.cost = own;
    Bounded { entries, useful }
}

/// Writes the strategies of the kept nodes at table entry `entry`, the last node fastest.
pub(super) fn unflatten(mut entry: usize, dims: &[usize], keep: &[usize], into: &mut [usize]) {
    for (&node, &dim) in keep.iter().zip(dims).rev() {
        into[node] = entry % dim;
        entry /= dim;
    }
}

/// Additions of an elimination that are not worth saving.
const CHEAP: f64 = 1e6;
/// Part of the effort after which a search over hubs is given up.
const CONDITIONING: f64 = 0.25;
/// Times that bounding an entry reads all tables, about.
const PASSES: usize = 8;
/// Passes forward and back over an entry at most.
const ROUNDS: usize = 12;
/// Part of the gap that a pass forward and back must close to go on.
const WORTH_A_ROUND: f64 = 0.1;
