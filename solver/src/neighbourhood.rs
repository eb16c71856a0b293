//! Large neighbourhood search (Shaw 1998): a region of some ten to some hundred nodes is freed, everything around it held
//! fixed, and solved by branch and bound, which for so few nodes mostly means to the end. Regions of one round are solved side by side and
//! put in place one after another, each if it still fits and still costs less.

use super::ascent::Prices;
use super::branch::{Budget, Incumbent, Tree};
use super::compact::{Assignment, Compact};
use super::network::{NetEdge, NetNode, Network};
use rayon::prelude::*;
use std::collections::VecDeque;

pub(super) struct Neighbourhoods<'a> {
    pub network: &'a Network,
    pub of: &'a Compact,
    pub current: Assignment,
    random: Random,
    /// The recent gain and work of each size of region.
    rates: Vec<(f64, f64)>,
}

/// A small generator of numbers that are the same everywhere (Steele, Lea & Flood 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

impl<'a> Neighbourhoods<'a> {
    pub(crate) fn new(network: &'a Network, of: &'a Compact, current: Assignment) -> Neighbourhoods<'a> {
        Neighbourhoods { network, of, current, random: Random(1), rates: vec![(1.0, 1.0); SIZES.len()] }
    }

    /// Goes on from another choice (of the whole problem) if that is better.
    pub(crate) fn adopt(&mut self, choice: &[usize]) {
        if let Some(x) = self.network.lowered(choice) {
            let new = Assignment::new(self.of, x);
            if new.fits() && new.cost < self.current.cost {
                self.current = new;
            }
        }
    }

    /// Rounds of regions until the budget is spent.
    pub(crate) fn search(&mut self, prices: &Prices, budget: &mut Budget<'_>) {
        while !budget.spent() {
            let jobs: Vec<(Vec<usize>, usize)> = (0..ROUND).map(|_| self.region()).collect();
            let clock = budget.clock;
            let solved: Vec<(Option<Vec<usize>>, f64)> = jobs
                .par_iter()
                .map(|(region, _)| {
                    let (network, cost) = self.freed(region);
                    let mut best = Incumbent { cost, gap: CLOSE, choice: None };
                    let mut own = Budget { work: REGION_WORK, clock };
                    Tree::new(network, prices.clone(), f64::NEG_INFINITY).search(&mut best, &mut own);
                    (best.choice, REGION_WORK - own.work + (20 * self.of.capacity.len() + self.of.len()) as f64)
                })
                .collect();
            for ((region, size), (choice, work)) in jobs.iter().zip(solved) {
                let before = self.current.cost;
                if let Some(choice) = choice {
                    self.place(region, &choice);
                }
                let (gained, spent) = &mut self.rates[*size];
                *gained = FORGETTING * *gained + (before - self.current.cost) / before.abs().max(f64::MIN_POSITIVE);
                *spent = FORGETTING * *spent + 1e-9 * work;
                budget.work -= work;
            }
        }
    }

    /// A random region, and the index of its size: the one that gains most for its work, or now and then any. It grows from one
    /// node over edges; or from several that hold bytes at the same time, since they can make room for one another.
    fn region(&mut self) -> (Vec<usize>, usize) {
        let rate = |k: &usize| self.rates[*k].0 / self.rates[*k].1;
        let size = match self.random.below(3) {
            0 => self.random.below(SIZES.len()),
            _ => (0..SIZES.len()).max_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap_or(0),
        };
        let n = self.of.len();
        let mut seeds = vec![self.random.below(n)];
        let more = [0, 0, 1, 3][self.random.below(4)];
        if let Some(run) = self.of.profile[seeds[0]].first() {
            let row = run.first + self.random.below((run.end - run.first) as usize) as u32;
            for _ in 0..TRIES {
                if seeds.len() > more {
                    break;
                }
                let u = self.random.below(n);
                if self.of.profile[u].iter().any(|r| r.first <= row && row < r.end) {
                    seeds.push(u);
                }
            }
        }
        let share = SIZES[size].div_ceil(seeds.len());
        let mut inside = std::collections::BTreeSet::new();
        for seed in seeds {
            let mut seen = std::collections::BTreeSet::from([seed]);
            let mut next = VecDeque::from([seed]);
            let mut grown = 0;
            while let Some(u) = next.pop_front().filter(|_| grown < share) {
                inside.insert(u);
                grown += 1;
                // A hub contributes only a few of its neighbours.
                let around = &self.of.incident[u];
                let start = self.random.below(around.len());
                for k in 0..around.len().min(FEW) {
                    let (e, is_first) = around[(start + k) % around.len()];
                    let w = self.of.edges[e as usize].other(is_first);
                    if seen.insert(w) {
                        next.push_back(w);
                    }
                }
            }
        }
        (inside.into_iter().collect(), size)
    }

    /// The problem of a region with all else as it is, and what the region costs now.
    fn freed(&self, region: &[usize]) -> (Network, f64) {
        let (of, x) = (self.of, &self.current.x);
        let place = |u: usize| region.binary_search(&u).ok();
        let mut network = Network::bare(self.current.over.iter().map(|o| -o).collect(), of.point.clone());
        let mut now = 0.0;
        for &u in region {
            let mut cost = of.cost[of.offset[u]..of.offset[u + 1]].to_vec();
            for &(e, is_first) in &of.incident[u] {
                let edge = &of.edges[e as usize];
                let other = edge.other(is_first);
                if place(other).is_none() {
                    let row = edge.given(is_first, x[other], cost.len());
                    cost.iter_mut().zip(row).for_each(|(c, add)| *c += add);
                }
            }
            now += cost[x[u]];
            for run in &of.profile[u] {
                let held = run.bytes[x[u]];
                network.capacity[run.first as usize..run.end as usize].iter_mut().for_each(|c| *c += held);
            }
            let label = (0..cost.len() as u32).collect();
            network.nodes.push(NetNode { cost, label, profile: of.profile[u].clone(), ..NetNode::default() });
        }
        for (a, &u) in region.iter().enumerate() {
            for &(e, _) in of.incident[u].iter().filter(|(_, is_first)| *is_first) {
                let edge = &of.edges[e as usize];
                if let Some(b) = place(edge.b as usize) {
                    let id = network.edges.len() as u32;
                    network.nodes[a].edges.push(id);
                    network.nodes[b].edges.push(id);
                    now += edge.given(false, x[u], of.width(edge.b as usize))[x[edge.b as usize]];
                    network.edges.push(NetEdge { a: a as u32, b: b as u32, cost: edge.ab.clone(), joint: false });
                }
            }
        }
        (network, now)
    }

    fn place(&mut self, region: &[usize], choice: &[usize]) {
        let mut x = self.current.x.clone();
        region.iter().zip(choice).for_each(|(&u, &s)| x[u] = s);
        let new = Assignment::new(self.of, x);
        if new.fits() && new.cost < self.current.cost {
            self.current = new;
        }
    }
}

/// Nodes of a region.
const SIZES: [usize; 6] = [15, 30, 60, 120, 240, 480];
/// Regions of a round.
const ROUND: usize = 8;
/// Gap at which a region is as good as solved.
const CLOSE: f64 = 1e-7;
/// Table entries that the solution of one region may read.
const REGION_WORK: f64 = 3e7;
/// Nodes looked at for one that holds bytes at a given time.
const TRIES: usize = 100;
/// Neighbours of a node that its region grows to.
const FEW: usize = 12;
/// The decay of earlier gains per update.
const FORGETTING: f64 = 0.98;
