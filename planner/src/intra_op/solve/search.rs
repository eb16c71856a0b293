//! Depth-first branch and bound in the reverse order of an elimination, whose tables give the lower bound of every
//! partial choice for the price of a look-up (Kask & Dechter, Artificial Intelligence 2001). Memory rows cut branches
//! whose least remaining bytes no longer fit.

use super::eliminate::{Messages, Plan};
use super::reduce::Reduced;
use super::{Clock, TOLERANCE};

/// The best choice so far.
#[derive(Clone, Debug)]
pub(super) struct Incumbent {
    pub cost: f64,
    /// Strategies as numbered in the problem.
    pub choice: Option<Vec<usize>>,
}

impl Incumbent {
    pub fn none() -> Incumbent {
        Incumbent { cost: f64::INFINITY, choice: None }
    }

    /// Takes a choice among the strategies of `reduced` that obeys every row, if it is better.
    pub fn offer(&mut self, reduced: &Reduced, local: &[usize]) {
        let cost = reduced.cost_of(local);
        if cost < self.cost {
            *self = Incumbent { cost, choice: Some(reduced.lift(local)) };
        }
    }

    /// A bound from here on proves that there is nothing better, within rounding.
    pub fn cutoff(&self) -> f64 {
        if self.cost == f64::INFINITY { f64::INFINITY } else { self.cost - TOLERANCE * self.cost.abs() }
    }
}

pub(super) struct Budget<'a> {
    pub expansions: u64,
    pub clock: &'a Clock,
}

/// How a search ended.
pub(super) struct Outcome {
    /// Whether everything was searched or cut.
    pub complete: bool,
    /// No choice costs less than the lesser of this and the incumbent. Infinite when complete without an incumbent.
    pub bound: f64,
}

pub(super) struct Search<'a> {
    pub reduced: &'a Reduced,
    pub plan: &'a Plan,
    pub messages: &'a Messages,
    /// The node costs that `messages` were made from, with the weights of memory in them.
    pub unary: &'a [Vec<f64>],
    /// What to add to those costs for a lower bound of the true cost: minus the weighted limits.
    pub offset: f64,
}

/// The strategies still to try for one decision, the most promising last.
#[derive(Default)]
struct Frame {
    open: Vec<(f64, usize)>,
    taken: bool,
}

impl Search<'_> {
    /// Searches for something better than `best`. The first choice is reached whatever the clock says.
    pub fn run(&self, best: &mut Incumbent, budget: &Budget) -> Outcome {
        let order: Vec<usize> = self.plan.decisions().collect();
        let mut rows = Rows::new(self.reduced);
        let mut local = vec![0; order.len()];
        let mut frames: Vec<Frame> = order.iter().map(|_| Frame::default()).collect();
        let mut regrets = vec![];
        let mut expansions = 0_u64;
        let root = self.messages.value + self.offset;
        if order.is_empty() {
            best.offer(self.reduced, &[]);
            return Outcome { complete: true, bound: best.cost };
        }
        if root >= best.cutoff() {
            return Outcome { complete: true, bound: best.cost };
        }
        let from = Opening { depth: 0, bound: root, cutoff: best.cutoff() };
        self.open(&from, &local, &mut regrets, &mut frames[0]);
        let mut depth = 0;
        loop {
            let node = order[depth];
            let frame = &mut frames[depth];
            if std::mem::take(&mut frame.taken) {
                rows.give_back(self.reduced, node, local[node]);
            }
            let next = frame.open.pop().filter(|&(bound, _)| bound < best.cutoff());
            let Some((bound, strategy)) = next else {
                if depth == 0 {
                    return Outcome { complete: true, bound: best.cost };
                }
                depth -= 1;
                continue;
            };
            local[node] = strategy;
            frame.taken = true;
            if !rows.take(self.reduced, node, strategy) {
                continue;
            }
            if depth + 1 == order.len() {
                best.offer(self.reduced, &local);
                continue;
            }
            expansions += 1;
            let spent = expansions >= budget.expansions || (expansions.is_multiple_of(512) && budget.clock.over());
            if spent && (best.choice.is_some() || expansions > STUBBORN) {
                let open = frames[..=depth].iter().filter_map(|frame| frame.open.last());
                let bound = open.fold(bound, |least, &(bound, _)| least.min(bound));
                return Outcome { complete: false, bound: bound.min(best.cost) };
            }
            depth += 1;
            let from = Opening { depth, bound, cutoff: best.cutoff() };
            self.open(&from, &local, &mut regrets, &mut frames[depth]);
        }
    }

    fn open(&self, from: &Opening, local: &[usize], regrets: &mut Vec<f64>, frame: &mut Frame) {
        self.plan.regrets(from.depth, self.unary, self.messages, local, regrets);
        frame.taken = false;
        frame.open.clear();
        let bounds = regrets.iter().enumerate().map(|(s, r)| (from.bound + r, s));
        frame.open.extend(bounds.filter(|&(bound, _)| bound < from.cutoff));
        // The lowest index is last among equals, hence first to be taken.
        frame.open.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    }
}

/// The decision a frame is opened for, with the bound of those before it.
struct Opening {
    depth: usize,
    bound: f64,
    /// Strategies with a bound from here on are of no use.
    cutoff: f64,
}

/// Expansions for which a search goes on past its budget while it has found nothing.
const STUBBORN: u64 = 100_000;

/// Bytes at each program point: what is taken and the least that is still to come.
struct Rows {
    bytes: Vec<u64>,
    of_node: Vec<Vec<usize>>,
    least: Vec<u64>,
}

impl Rows {
    fn new(reduced: &Reduced) -> Rows {
        let least: Vec<u64> = reduced.bytes.iter().map(|b| b.iter().copied().min().unwrap_or(0)).collect();
        let mut of_node = vec![vec![]; least.len()];
        for (r, row) in reduced.rows.iter().enumerate() {
            row.members.iter().for_each(|&v| of_node[v].push(r));
        }
        let bytes = reduced.rows.iter().map(|row| row.members.iter().map(|&v| least[v]).sum()).collect();
        Rows { bytes, of_node, least }
    }

    /// Whether all rows can still be met once `node` takes `strategy`.
    fn take(&mut self, reduced: &Reduced, node: usize, strategy: usize) -> bool {
        let more = reduced.bytes[node][strategy] - self.least[node];
        let mut fits = true;
        for &r in &self.of_node[node] {
            self.bytes[r] += more;
            fits &= self.bytes[r] <= reduced.rows[r].limit_bytes;
        }
        fits
    }

    fn give_back(&mut self, reduced: &Reduced, node: usize, strategy: usize) {
        let more = reduced.bytes[node][strategy] - self.least[node];
        for &r in &self.of_node[node] {
            self.bytes[r] -= more;
        }
    }
}
