//! Branch and bound. Each open problem is reduced again, bounded by its own ascent, loses the strategies that its bound
//! rules out, and is split in two on one node; the one with the least bound is next.

use super::Clock;
use super::ascent::{Ascent, Prices};
use super::compact::{Assignment, Compact};
use super::network::Network;
use super::reduce::Reductions;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The best choice so far, as the problem numbers nodes and strategies.
#[derive(Clone, Debug)]
pub(super) struct Incumbent {
    pub cost: f64,
    /// Relative difference from it that counts as nothing.
    pub gap: f64,
    pub choice: Option<Vec<usize>>,
}

impl Incumbent {
    pub(crate) fn none(gap: f64) -> Incumbent {
        Incumbent { cost: f64::INFINITY, gap, choice: None }
    }

    /// A bound from here on proves that there is nothing better that counts.
    pub(crate) fn cutoff(&self) -> f64 {
        if self.cost == f64::INFINITY { f64::INFINITY } else { self.cost - self.gap * self.cost.abs() }
    }

    /// Takes an assignment that fits, if it is better.
    pub(crate) fn offer(&mut self, network: &Network, of: &Compact, assignment: &Assignment) -> bool {
        let better = assignment.cost < self.cost && assignment.fits();
        if better {
            let mut local = vec![0; network.nodes.len()];
            of.node.iter().zip(&assignment.x).for_each(|(&v, &s)| local[v] = s);
            *self = Incumbent { cost: assignment.cost, gap: self.gap, choice: Some(network.lift(&local)) };
        }
        better
    }
}

/// The remaining budget: table entries to read, and time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget<'a> {
    pub work: f64,
    pub clock: &'a Clock,
}

impl Budget<'_> {
    pub(crate) fn spent(&self) -> bool {
        self.work <= 0.0 || self.clock.over()
    }
}

struct Open {
    network: Network,
    prices: Prices,
    bound: f64,
    depth: usize,
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
    /// The greatest has the least bound, then the greatest depth.
    fn cmp(&self, other: &Open) -> Ordering {
        other.bound.total_cmp(&self.bound).then(self.depth.cmp(&other.depth))
    }
}

/// The problems that are left.
pub(super) struct Tree {
    open: BinaryHeap<Open>,
}

impl Tree {
    pub(crate) fn new(network: Network, prices: Prices, bound: f64) -> Tree {
        Tree { open: BinaryHeap::from([Open { network, prices, bound, depth: 0 }]) }
    }

    /// No choice that is not an incumbent costs less; infinite when nothing is left.
    pub(crate) fn bound(&self) -> f64 {
        self.open.peek().map_or(f64::INFINITY, |open| open.bound)
    }

    pub(crate) fn search(&mut self, best: &mut Incumbent, budget: &mut Budget<'_>) {
        // At least one, so that a search that is tried often ends.
        loop {
            let Some(open) = self.open.pop() else { return };
            if open.bound >= best.cutoff() {
                self.open.clear();
                return;
            }
            self.open.extend(open.branched(best, budget));
            if budget.spent() {
                return;
            }
        }
    }
}

impl Open {
    /// The parts that remain to be searched: none, the node itself if the budget ends, or two halves.
    fn branched(mut self, best: &mut Incumbent, budget: &mut Budget<'_>) -> Vec<Open> {
        loop {
            if self.network.reduce(Reductions::ALL, &[]).is_err() {
                return vec![];
            }
            self.network = self.network.compacted();
            let of = Compact::new(&self.network);
            budget.work -= STATING * (of.entries + of.cost.len() + 30 * of.len() + of.capacity.len()) as f64;
            if of.len() == 0 {
                best.offer(&self.network, &of, &Assignment::new(&of, vec![]));
                return vec![];
            }
            let mut ascent = Ascent::new(&of, &self.prices);
            let steps = match ascent.hub() {
                Some(_) => HUB_STEPS,
                None if self.prices.is_empty() => FIRST_STEPS,
                None => STEPS,
            };
            let kept = climb(&mut ascent, &self.network, best, budget, steps, true);
            self.bound = self.bound.max(ascent.bound);
            self.prices = ascent.prices();
            match kept {
                Climbed::Closed => return vec![],
                Climbed::Fixed(keep) => {
                    if !restrict(&mut self.network, &of, &keep) {
                        return vec![];
                    }
                    if budget.spent() {
                        return vec![self];
                    }
                }
                Climbed::Stuck if budget.spent() => return vec![self],
                Climbed::Stuck => {
                    let (u, side) = ascent.split();
                    let v = of.node[u];
                    let mut other = Open {
                        network: self.network.clone(),
                        prices: self.prices.clone(),
                        bound: self.bound,
                        depth: self.depth + 1,
                    };
                    self.depth += 1;
                    self.network.retain(v, &side);
                    let rest: Vec<bool> = side.iter().map(|s| !s).collect();
                    other.network.retain(v, &rest);
                    return vec![self, other];
                }
            }
        }
    }
}

/// Leaves the strategies marked (flat). Whether each node has one left.
pub(super) fn restrict(network: &mut Network, of: &Compact, keep: &[bool]) -> bool {
    for (u, &v) in of.node.iter().enumerate() {
        let keep = &keep[of.offset[u]..of.offset[u + 1]];
        if !keep.contains(&true) {
            return false;
        }
        if keep.contains(&false) {
            network.retain(v, keep);
        }
    }
    true
}

pub(super) enum Climbed {
    /// Nothing better than the incumbent is left.
    Closed,
    /// Many strategies are ruled out: what is left, flat.
    Fixed(Vec<bool>),
    Stuck,
}

/// Steps of an ascent until it closes, rules out much (or where it is `eager`, ends and rules out anything), or hardly rises;
/// choices on the way are offered.
pub(super) fn climb(
    ascent: &mut Ascent<'_>,
    network: &Network,
    best: &mut Incumbent,
    budget: &mut Budget<'_>,
    steps: usize,
    eager: bool,
) -> Climbed {
    let of = ascent.of;
    let every = if ascent.is_exact() { 5 } else { 25 };
    let mut last = ascent.bound;
    for k in 1..=steps {
        if ascent.bound >= best.cutoff() {
            return Climbed::Closed;
        }
        let gap = if best.cost < f64::INFINITY { best.cost - ascent.bound } else { 0.1 * ascent.bound.abs() };
        let gap = gap.max(1e-6 * ascent.bound.abs()).max(f64::MIN_POSITIVE);
        budget.work -= ascent.work();
        ascent.step(gap);
        if k % 5 == 1 {
            budget.work -= (of.entries + of.cost.len()) as f64;
            propose(ascent, network, best);
        }
        let end = k == steps || budget.spent();
        if k % every == 0 || end {
            let keep = ascent.worth_keeping(best.cutoff());
            let ruled_out = keep.iter().filter(|k| !**k).count();
            let slow = ascent.bound - last < SLOW * gap;
            if ruled_out * 10 > keep.len() || (eager && ruled_out > 0 && (slow || end)) {
                return Climbed::Fixed(keep);
            }
            if slow || end {
                break;
            }
            last = ascent.bound;
        }
    }
    if ascent.bound >= best.cutoff() { Climbed::Closed } else { Climbed::Stuck }
}

/// Offers what the relaxed problem suggests, made to fit.
pub(super) fn propose(ascent: &Ascent<'_>, network: &Network, best: &mut Incumbent) {
    let mut assignment = Assignment::new(ascent.of, ascent.decode());
    if assignment.cost < f64::INFINITY && assignment.repair(ascent.of) {
        assignment.improve(ascent.of);
        best.offer(network, ascent.of, &assignment);
    }
}

/// Work of reducing and laying out a problem, for each entry of its tables: about what it takes beside reading one.
const STATING: f64 = 30.0;
/// Steps of an ascent that starts without prices, and of one that has its parent's.
const FIRST_STEPS: usize = 800;
const STEPS: usize = 150;
/// Steps before a hub is decided.
const HUB_STEPS: usize = 25;
/// Part of the gap that some steps must close to go on.
const SLOW: f64 = 0.003;
