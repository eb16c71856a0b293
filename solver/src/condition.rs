//! Tables of problems with hubs, such as unrolled loops. With the hubs decided messages bound well what is left, and the kept nodes
//! often hang on little but hubs, so that one search over the strategies of hubs, least bound first, serves all entries.

use super::branch::{Budget, Incumbent};
use super::compact::Compact;
use super::eliminate::{Caps, Plan, TABLE_ENTRIES};
use super::messages::Messages;
use super::network::Network;
use super::reduce::Reductions;
use super::table::{Walk, reduce_around};
use super::{SolveError, search};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// For each entry which of the parts gives it, none where it is infinite.
pub(super) struct Conditioned {
    pub walks: Vec<Walk>,
    pub entries: Vec<Option<(f64, usize)>>,
}

/// The table of a reduced network, if hubs part most of it from the `kept` nodes and the budget suffices. `keep` are the kept nodes
/// as the problem numbers them, `dims` the strategies of each.
pub(super) fn conditioned(
    network: &Network,
    kept: &[usize],
    keep: &[usize],
    dims: &[usize],
    gap: f64,
    budget: &mut Budget<'_>,
) -> Option<Conditioned> {
    let of = Compact::new(network);
    let hubs: Vec<usize> = of.hubs().into_iter().filter(|u| !kept.contains(u)).collect();
    if hubs.is_empty() || PARTED * beside(&of, kept, &hubs).iter().filter(|beside| **beside).count() > of.len() {
        return None;
    }
    let hubs = hubs.into_iter().map(|u| of.node[u]).collect();
    let size = dims.iter().product();
    let mut search = Search { keep, dims, gap, walks: vec![], entries: vec![None; size] };
    let least = f64::NEG_INFINITY;
    let root = Open { bound: least, rank: least, number: 0, network: network.clone(), kept: kept.to_vec(), hubs };
    let mut number = root.number;
    let mut open = BinaryHeap::from([root]);
    while let Some(mut next) = open.pop() {
        if next.bound >= search.cutoff() {
            continue;
        }
        if budget.spent() {
            return None;
        }
        let Some(hub) = next.hubs.first().copied() else {
            search.finish(next, budget)?;
            continue;
        };
        next.hubs.remove(0);
        for s in 0..next.network.width(hub) {
            number += 1;
            open.extend(next.with(hub, s, number, search.cutoff(), budget));
        }
    }
    Some(Conditioned { walks: search.walks, entries: search.entries })
}

/// Which nodes a path without hubs joins to a kept one.
fn beside(of: &Compact, kept: &[usize], hubs: &[usize]) -> Vec<bool> {
    let mut seen = vec![false; of.len()];
    let mut next = kept.to_vec();
    kept.iter().for_each(|&u| seen[u] = true);
    while let Some(u) = next.pop() {
        for &(e, is_first) in &of.incident[u] {
            let w = of.edges[e as usize].other(is_first);
            if !seen[w] && !hubs.contains(&w) {
                seen[w] = true;
                next.push(w);
            }
        }
    }
    seen
}

/// Some hubs decided.
struct Open {
    bound: f64,
    /// The bound, or with all hubs decided the cost of a choice: a good one soon spares the search of many others.
    rank: f64,
    /// In order of making.
    number: usize,
    network: Network,
    kept: Vec<usize>,
    /// Those that are not decided, in the order in which they will be.
    hubs: Vec<usize>,
}

impl PartialEq for Open {
    fn eq(&self, other: &Open) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Open {}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Open) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Open {
    /// The greatest has the least rank, then the fewest hubs left.
    fn cmp(&self, other: &Open) -> Ordering {
        let by_rank = other.rank.total_cmp(&self.rank);
        by_rank.then(other.hubs.len().cmp(&self.hubs.len())).then(other.number.cmp(&self.number))
    }
}

impl Open {
    /// With a hub at a strategy, unless there is nothing below the cutoff.
    fn with(&self, hub: usize, s: usize, number: usize, cutoff: f64, budget: &mut Budget<'_>) -> Option<Open> {
        let Open { mut bound, .. } = *self;
        let mut network = self.network.clone();
        let only: Vec<bool> = (0..network.width(hub)).map(|other| other == s).collect();
        network.retain(hub, &only);
        let mut pinned = vec![false; network.nodes.len()];
        self.kept.iter().for_each(|&v| pinned[v] = true);
        network.reduce(Reductions::ALL, &pinned).ok()?;
        let live: Vec<usize> = network.live().collect();
        let mut place = vec![usize::MAX; network.nodes.len()];
        live.iter().enumerate().for_each(|(u, &v)| place[v] = u);
        let placed =
            |nodes: &[usize]| -> Vec<usize> { nodes.iter().map(|&v| place[v]).filter(|&u| u != usize::MAX).collect() };
        let (kept, hubs) = (placed(&self.kept), placed(&self.hubs));
        let network = network.numbered(&live);
        let of = Compact::new(&network);
        budget.work -= STATING * (of.entries + of.cost.len()) as f64;
        let mut messages = Messages::new(&of);
        let mut hat = vec![0.0; of.cost.len()];
        // A good choice tells how far the bound can rise; with all hubs decided it mostly rises all the way.
        let mut found = f64::INFINITY;
        for _ in 0..if hubs.is_empty() { LAST_ROUNDS } else { ROUNDS } {
            budget.work -= 3.0 * (of.entries + of.cost.len()) as f64;
            let forward = messages.pass(&of, &of.cost, &mut hat, true);
            let risen = of.constant + forward.max(messages.pass(&of, &of.cost, &mut hat, false));
            found = found.min(of.cost_of(&messages.decode(&of, &of.cost)));
            let slow = risen - bound < WORTH_A_ROUND * (cutoff.min(found) - bound);
            bound = bound.max(risen);
            if bound >= cutoff {
                return None;
            }
            if slow {
                break;
            }
        }
        let rank = if hubs.is_empty() { bound.max(found) } else { bound };
        Some(Open { bound, rank, number, network, kept, hubs })
    }
}

struct Search<'a> {
    keep: &'a [usize],
    dims: &'a [usize],
    gap: f64,
    walks: Vec<Walk>,
    entries: Vec<Option<(f64, usize)>>,
}

impl Search<'_> {
    fn cutoff_of(&self, entry: usize) -> f64 {
        self.entries[entry].map_or(f64::INFINITY, |(cost, _)| cost - self.gap * cost.abs())
    }

    /// Bounds from here on better no entry.
    fn cutoff(&self) -> f64 {
        (0..self.entries.len()).map(|entry| self.cutoff_of(entry)).fold(f64::NEG_INFINITY, f64::max)
    }

    /// Takes what is best with all hubs decided where it betters an entry. None where the kept nodes still hang on too much.
    fn finish(&mut self, open: Open, budget: &mut Budget<'_>) -> Option<()> {
        let Open { network, kept, .. } = open;
        let of = Compact::new(&network);
        let beside = beside(&of, &kept, &[]);
        // Parts that hang on the kept nodes, and all others.
        let mut ends = network.clone();
        let mut core = network.clone();
        core.constant = 0.0;
        for (u, &v) in of.node.iter().enumerate() {
            let part = if beside[u] { &mut core } else { &mut ends };
            while let Some(&e) = part.nodes[v].edges.last() {
                part.detach(e);
            }
            part.nodes[v].cost.fill(0.0);
            part.nodes[v].settled = false;
        }
        let ends = match self.walk(ends, &kept) {
            Ok(ends) => ends?,
            Err(_) => return Some(()),
        };
        // Where the core costs this or more no entry has a use of it.
        let needs = |entry: usize| self.cutoff_of(entry) - ends.cost(entry, self.dims);
        let most = (0..self.entries.len()).map(needs).filter(|need| !need.is_nan()).fold(f64::NEG_INFINITY, f64::max);
        let mut best = Incumbent { cost: most, gap: 0.0, choice: None };
        if most == f64::NEG_INFINITY || core.reduce(Reductions::ALL, &[]).is_err() {
            return Some(());
        }
        best.gap = self.gap;
        search::search(&core.compacted(), &mut best, budget, &mut |_, _, _| {});
        let Some(choice) = best.choice else { return Some(()) };
        let local = network.lowered(&choice)?;
        let mut network = network;
        for (u, &v) in of.node.iter().enumerate().filter(|(u, _)| !beside[*u]) {
            let only: Vec<bool> = (0..network.width(v)).map(|s| s == local[u]).collect();
            network.retain(v, &only);
        }
        let walk = self.walk(network, &kept).ok()??;
        let mut any = false;
        for entry in 0..self.entries.len() {
            let cost = walk.cost(entry, self.dims);
            if cost < self.cutoff_of(entry) {
                self.entries[entry] = Some((cost, self.walks.len()));
                any = true;
            }
        }
        if any {
            self.walks.push(walk);
        }
        Some(())
    }

    /// The table of a network of which little is left to eliminate; none where that is too dense.
    fn walk(&self, mut network: Network, kept: &[usize]) -> Result<Option<Walk>, SolveError> {
        let mut kept = kept.to_vec();
        reduce_around(&mut network, &mut kept)?;
        let of = Compact::new(&network);
        let caps = Caps { entries: TABLE_ENTRIES as f64, work: ENDS_WORK };
        let plan = Plan::new(&of, &kept, &caps);
        Ok(plan.map(|plan| Walk::new(network, of, plan, self.keep, kept)))
    }
}

/// The share of nodes, one in this many, that hubs may leave beside the kept ones.
const PARTED: usize = 4;
/// Work of reducing and laying out a problem, for each entry of its tables.
const STATING: f64 = 30.0;
/// Passes of messages forward and back over a problem with some hubs decided.
const ROUNDS: usize = 4;
/// The same with all of them decided.
const LAST_ROUNDS: usize = 12;
/// Part of the gap that a pass must close to go on.
const WORTH_A_ROUND: f64 = 0.1;
/// Additions of eliminating what hangs on the kept nodes.
const ENDS_WORK: f64 = 1e7;
