//! Exact reductions, repeated until none applies: no best choice is lost. Each visit looks at one node and whatever
//! changes makes its neighbours worth another visit.
//!
//! Strategies that a forbidden pair leaves without partner go (arc consistency), and those that another one beats
//! whatever the neighbours choose and at every row (Goldstein, Biophys. J. 1994, with bytes). Edges that are a sum
//! become node costs, nodes with one strategy fold, a node that each live strategy of a neighbour leaves one strategy
//! is merged into it, and nodes that hold nothing and have at most two neighbours are eliminated (Scholz & Eckstein, LCTES
//! 2002).

use super::SolveError;
use super::network::Network;
use std::borrow::Cow;

/// The enabled reductions. Only tests disable any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reductions {
    pub arcs: bool,
    pub dominance: bool,
    pub separable: bool,
    pub followers: bool,
    pub elimination: bool,
}

impl Reductions {
    pub(crate) const ALL: Reductions =
        Reductions { arcs: true, dominance: true, separable: true, followers: true, elimination: true };
}

/// Entries of an edge that an elimination may make.
const MOST_ENTRIES: usize = 1 << 18;

impl Network {
    /// Reduces until nothing changes. `pinned` nodes keep all their strategies and stay. Where a network has been reduced before, only
    /// what has changed since is looked at, and whatever that changes.
    ///
    /// # Errors
    /// A node without strategies, a row that is full.
    pub(crate) fn reduce(&mut self, what: Reductions, pinned: &[bool]) -> Result<(), SolveError> {
        let reducer = Reducer { what, pinned };
        if what != Reductions::ALL {
            self.nodes.iter_mut().for_each(|node| node.settled = false);
        }
        self.reduce_by(&reducer)?;
        // More may be known of these once they are no longer pinned.
        for (node, _) in self.nodes.iter_mut().zip(pinned).filter(|(_, pinned)| **pinned) {
            node.settled = false;
        }
        if what != Reductions::ALL {
            self.nodes.iter_mut().for_each(|node| node.settled = false);
        }
        Ok(())
    }

    fn reduce_by(&mut self, reducer: &Reducer<'_>) -> Result<(), SolveError> {
        loop {
            // Forward and backward in turn, since models are long chains.
            let mut queue: Vec<usize> = self.live().collect();
            let mut forward = true;
            while queue.iter().any(|&v| !self.nodes[v].settled) {
                if forward {
                    queue.iter().try_for_each(|&v| reducer.visit(self, v))?;
                } else {
                    queue.iter().rev().try_for_each(|&v| reducer.visit(self, v))?;
                }
                forward = !forward;
                queue.retain(|&v| !self.nodes[v].gone);
            }
            let slack = self.drop_slack_rows()?;
            let full = self.drop_overfull(reducer.pinned)?;
            if !slack && !full {
                return Ok(());
            }
            if slack {
                // Fewer rows: more nodes hold nothing, more strategies are beaten.
                self.nodes.iter_mut().for_each(|node| node.settled = false);
            }
        }
    }

    /// Drops strategies that overfill a row even where all others hold the least.
    fn drop_overfull(&mut self, pinned: &[bool]) -> Result<bool, SolveError> {
        let mut any = false;
        for v in 0..self.nodes.len() {
            if self.nodes[v].gone || self.nodes[v].profile.is_empty() || pinned.get(v) == Some(&true) {
                continue;
            }
            let mut keep = vec![true; self.width(v)];
            for run in &self.nodes[v].profile {
                let least = self.capacity[run.first as usize..run.end as usize].iter().copied().min().unwrap_or(0);
                run.bytes.iter().zip(&mut keep).for_each(|(&b, k)| *k &= b <= least);
            }
            if keep.contains(&false) {
                if !keep.contains(&true) {
                    return Err(SolveError::Infeasible);
                }
                self.retain(v, &keep);
                self.trimmed = true;
                any = true;
            }
        }
        Ok(any)
    }
}

struct Reducer<'a> {
    what: Reductions,
    pinned: &'a [bool],
}

impl Reducer<'_> {
    fn is_pinned(&self, v: usize) -> bool {
        self.pinned.get(v) == Some(&true)
    }

    fn visit(&self, network: &mut Network, v: usize) -> Result<(), SolveError> {
        if network.nodes[v].gone || std::mem::replace(&mut network.nodes[v].settled, true) {
            return Ok(());
        }
        let mark =
            |network: &mut Network, nodes: &[usize]| nodes.iter().for_each(|&v| network.nodes[v].settled = false);
        if !self.is_pinned(v) && (self.what.arcs || self.what.dominance) && network.width(v) > 1 {
            let keep = worth_keeping(network, v, self.what);
            if !keep.contains(&true) {
                return Err(SolveError::Infeasible);
            }
            if keep.contains(&false) {
                network.retain(v, &keep);
                network.nodes[v].settled = true;
            }
        }
        if !self.is_pinned(v) && network.width(v) == 1 {
            if network.nodes[v].cost[0] == f64::INFINITY {
                return Err(SolveError::Infeasible);
            }
            let around = network.decide(v, 0);
            mark(network, &around);
            return Ok(());
        }
        if self.what.separable {
            for at in (0..network.nodes[v].edges.len()).rev() {
                let e = network.nodes[v].edges[at];
                let edge = &network.edges[e as usize];
                let (a, b) = (edge.a as usize, edge.b as usize);
                let width = network.width(b);
                if edge.joint {
                    continue;
                }
                let separable = is_separable(&edge.cost, width);
                network.edges[e as usize].joint = !separable;
                if separable {
                    let cost = network.detach(e);
                    for (i, c) in network.nodes[a].cost.iter_mut().enumerate() {
                        *c += cost[i * width];
                    }
                    for (j, c) in network.nodes[b].cost.iter_mut().enumerate() {
                        *c += cost[j] - cost[0];
                    }
                    mark(network, &[a, b]);
                }
            }
        }
        if self.what.followers && !self.is_pinned(v) {
            for at in 0..network.nodes[v].edges.len() {
                let e = network.nodes[v].edges[at];
                let leader = network.other(e, v);
                let of = match network.edges[e as usize].a as usize == v {
                    true => followed(&network.edges[e as usize].cost, network.width(leader), true),
                    false => followed(&network.edges[e as usize].cost, network.width(v), false),
                };
                if let Some(of) = of {
                    let around = network.follow(v, leader, &of);
                    mark(network, &around);
                    return Ok(());
                }
            }
        }
        if self.what.elimination
            && !self.is_pinned(v)
            && network.nodes[v].profile.is_empty()
            && network.nodes[v].edges.len() <= 2
        {
            let entries: usize = network.nodes[v].edges.iter().map(|&e| network.width(network.other(e, v))).product();
            if entries <= MOST_ENTRIES {
                let around = network.eliminate(v);
                if around.is_empty() && network.constant == f64::INFINITY {
                    return Err(SolveError::Infeasible);
                }
                mark(network, &around);
            }
        }
        Ok(())
    }
}

/// For each strategy of the leader the only one of the follower that its row allows; none where a row allows more.
/// Rows that allow nothing follow anywhere: they are infinite either way.
fn followed(cost: &[f64], width: usize, follower_is_row: bool) -> Option<Vec<usize>> {
    let height = cost.len() / width;
    let finite = |s: usize, f: usize| {
        let at = if follower_is_row { f * width + s } else { s * width + f };
        cost[at] < f64::INFINITY
    };
    let (leaders, followers) = if follower_is_row { (width, height) } else { (height, width) };
    (0..leaders)
        .map(|s| {
            let mut allowed = (0..followers).filter(|&f| finite(s, f));
            let only = allowed.next().unwrap_or(0);
            allowed.next().is_none().then_some(only)
        })
        .collect()
}

/// True if `table[i][j] = table[i][0] + table[0][j] - table[0][0]`, up to the rounding of these three
/// operations.
fn is_separable(table: &[f64], width: usize) -> bool {
    let first = &table[..width];
    let rounding = 4.0 * f64::EPSILON;
    first[0] < f64::INFINITY
        && table.chunks_exact(width).all(|row| {
            row.iter().zip(first).all(|(&c, &f)| {
                let expected = row[0] + f - first[0];
                // An infinity on either side makes this false.
                (c - expected).abs() <= rounding * (c.abs() + row[0].abs() + f.abs() + first[0].abs())
                    && c < f64::INFINITY
            })
        })
}

/// Marks the strategies of `v` that are allowed and not dominated by another. Of two equal strategies, the
/// first stays.
fn worth_keeping(network: &Network, v: usize, what: Reductions) -> Vec<bool> {
    let node = &network.nodes[v];
    let count = node.cost.len();
    let sides: Vec<Side<'_>> = node.edges.iter().map(|&e| Side::new(network, e, v)).collect();
    let mut keep = vec![true; count];
    if what.arcs {
        for (s, (keep, &cost)) in keep.iter_mut().zip(&node.cost).enumerate() {
            *keep = cost < f64::INFINITY && sides.iter().all(|side| side.least[s].cost < f64::INFINITY);
        }
    }
    if !what.dominance {
        return keep;
    }
    // The least a strategy can cost: the largest difference of two rows is at least the difference of their minima.
    let floor = |s: usize| node.cost[s] + sides.iter().map(|side| side.least[s].cost).sum::<f64>();
    let floor: Vec<f64> = (0..count).map(floor).collect();
    let lighter = |other: usize, dropped: usize| node.profile.iter().all(|run| run.bytes[other] <= run.bytes[dropped]);
    for dropped in (0..count).rev() {
        if !keep[dropped] || floor[dropped] == f64::INFINITY {
            continue;
        }
        keep[dropped] = !(0..count).any(|other| {
            let slack = 1e-12 * (floor[other].abs() + floor[dropped].abs());
            other != dropped
                && keep[other]
                && floor[other] <= floor[dropped] + slack
                && lighter(other, dropped)
                && beats(&node.cost, &sides, other, dropped)
        });
    }
    keep
}

/// An edge as one of its ends sees it.
struct Side<'a> {
    /// The strategies of the other end.
    width: usize,
    /// Costs by strategy of this end, then of the other.
    table: Cow<'a, [f64]>,
    /// The least of each row.
    least: Vec<Least>,
}

/// The first of the least entries of a row.
#[derive(Clone, Copy)]
struct Least {
    cost: f64,
    at: usize,
}

impl<'a> Side<'a> {
    fn new(network: &'a Network, e: u32, v: usize) -> Side<'a> {
        let (width, table) = (network.width(network.other(e, v)), network.seen_from(e, v));
        let least = |row: &[f64]| {
            let none = Least { cost: f64::INFINITY, at: 0 };
            row.iter().enumerate().fold(none, |l, (at, &cost)| if cost < l.cost { Least { cost, at } } else { l })
        };
        let least = table.chunks_exact(width).map(least).collect();
        Side { width, table, least }
    }

    fn row(&self, strategy: usize) -> &[f64] {
        &self.table[strategy * self.width..][..self.width]
    }

    /// A lower bound on the largest difference of two rows: that where the row of `dropped` is least.
    fn lead(&self, other: usize, dropped: usize) -> f64 {
        let least = self.least[dropped];
        self.table[other * self.width + least.at] - least.cost
    }
}

/// True if `other` costs no more than `dropped` for any choice of the neighbours: the sum over edges of the
/// largest difference of their rows does not exceed zero. Every row has a finite entry.
fn beats(cost: &[f64], sides: &[Side<'_>], other: usize, dropped: usize) -> bool {
    let mut worst = cost[other] - cost[dropped];
    // A lower bound on the sum over the remaining edges. Most strategies lose by it.
    let (mut rest, mut magnitude) = (0.0, 0.0);
    for side in sides {
        let lead = side.lead(other, dropped);
        rest += lead;
        magnitude += lead.abs() + side.least[dropped].cost.abs();
    }
    let slack = 1e-12 * magnitude;
    if rest == f64::INFINITY || worst + rest > slack {
        return false;
    }
    for side in sides {
        rest -= side.lead(other, dropped);
        let mut largest = f64::NEG_INFINITY;
        for (m, t) in side.row(other).iter().zip(side.row(dropped)) {
            // Where both are forbidden the difference is not a number and compares false, as it should.
            let difference = m - t;
            if difference > largest {
                largest = difference;
                if worst + largest + rest > slack {
                    return false;
                }
            }
        }
        worst += largest;
    }
    worst <= 0.0
}
