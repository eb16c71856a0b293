//! The Lagrangian dual: memory becomes a price per byte in a few rows, raised where the relaxed choice holds too much and
//! lowered where it holds less (Geoffrion 1974), in steps of each price's own that grow while its sign stays (Riedmiller &
//! Braun 1993). Between steps the rest is bounded by one pass of messages, or exactly where an elimination costs as little.
//! Every value on the way is a lower bound, whatever the prices.

use super::compact::Compact;
use super::eliminate::{Caps, Plan, Unary};
use super::messages::Messages;

/// Prices of bytes by program point.
pub(super) type Prices = Vec<(u32, f64)>;

pub(super) struct Ascent<'a> {
    pub of: &'a Compact,
    inner: Inner,
    /// Node costs with the prices of what they hold.
    theta: Vec<f64>,
    price: Vec<f64>,
    step: Vec<f64>,
    rising: Vec<bool>,
    /// Step that new prices start with.
    unit: f64,
    /// Minus what the priced capacities are worth, and the constant.
    constant: f64,
    /// A lower bound on the amount that each strategy adds to `floor`, from before the last pass.
    pub hat: Vec<f64>,
    /// The bound that `hat` adds to.
    floor: f64,
    pub current: f64,
    pub bound: f64,
    /// The prices of `bound`.
    pub best_price: Vec<f64>,
    /// Running mean of the relaxed choice: near what the relaxed problem's solution is.
    pub mean: Vec<f64>,
    soft: Vec<f64>,
    steps: usize,
}

enum Inner {
    Messages(Messages),
    Exact { plan: Box<Plan>, decoded: Vec<usize> },
}

impl<'a> Ascent<'a> {
    pub(crate) fn new(of: &'a Compact, prices: &Prices) -> Ascent<'a> {
        Ascent::after(of, prices, None)
    }

    /// Goes on where an ascent on the same network ended that had more strategies, with its messages.
    pub(crate) fn after(of: &'a Compact, prices: &Prices, before: Option<(&Compact, &Messages)>) -> Ascent<'a> {
        let rows = of.capacity.len();
        let mut price = vec![0.0; rows];
        for &(point, p) in prices {
            // The row of the point, or what it has become part of.
            let at = of.point.partition_point(|&q| q <= point);
            if rows > 0 {
                price[at.saturating_sub(1)] += p;
            }
        }
        let caps = Caps { entries: EXACT_ENTRIES, work: EXACT_WORK * (of.entries + of.cost.len()) as f64 };
        let plan = if of.len() <= EXACT_NODES { Plan::new(of, &[], &caps) } else { None };
        let inner = match plan {
            Some(plan) => Inner::Exact { plan: Box::new(plan), decoded: vec![] },
            None => {
                let mut messages = Messages::new(of);
                if let Some((old_of, old)) = before {
                    messages.inherit(of, old, old_of);
                }
                Inner::Messages(messages)
            }
        };
        let strategies = of.cost.len();
        let mut ascent = Ascent {
            of,
            inner,
            theta: vec![0.0; strategies],
            best_price: price.clone(),
            step: vec![0.0; rows],
            rising: vec![false; rows],
            unit: 0.0,
            constant: 0.0,
            hat: vec![0.0; strategies],
            floor: f64::NEG_INFINITY,
            current: f64::NEG_INFINITY,
            bound: f64::NEG_INFINITY,
            mean: vec![0.0; strategies],
            soft: vec![0.0; strategies],
            steps: 0,
            price,
        };
        ascent.settle(if ascent.is_exact() { 1 } else { FIRST_PASSES });
        let most = of.capacity.iter().copied().max().unwrap_or(1).max(1) as f64;
        ascent.unit = if prices.is_empty() { 0.02 } else { 0.002 } * ascent.current.abs().max(f64::MIN_POSITIVE) / most;
        for (step, price) in ascent.step.iter_mut().zip(&ascent.price) {
            *step = if *price > 0.0 { 0.3 * ascent.unit } else { 0.0 };
        }
        ascent
    }

    pub(crate) fn is_exact(&self) -> bool {
        matches!(self.inner, Inner::Exact { .. })
    }

    /// The messages, for an ascent after this one.
    pub(crate) fn into_messages(self) -> Option<Messages> {
        match self.inner {
            Inner::Messages(messages) => Some(messages),
            Inner::Exact { .. } => None,
        }
    }

    /// Table entries that one step reads, about.
    pub(crate) fn work(&self) -> f64 {
        match &self.inner {
            Inner::Messages(_) => 2.0 * (self.of.entries + self.of.cost.len()) as f64,
            Inner::Exact { plan, .. } => 8.0 * plan.work() + 50.0 * self.of.cost.len() as f64,
        }
    }

    /// Prices the node costs and passes over them.
    fn settle(&mut self, passes: usize) {
        let of = self.of;
        self.theta.copy_from_slice(&of.cost);
        let mut sum = Vec::with_capacity(self.price.len() + 1);
        sum.push(0.0);
        self.constant = of.constant;
        for (price, &capacity) in self.price.iter().zip(&of.capacity) {
            sum.push(sum[sum.len() - 1] + price);
            if *price > 0.0 {
                self.constant -= price * capacity as f64;
            }
        }
        for (u, profile) in of.profile.iter().enumerate() {
            let theta = &mut self.theta[of.offset[u]..of.offset[u + 1]];
            for run in profile {
                let price = sum[run.end as usize] - sum[run.first as usize];
                if price != 0.0 {
                    theta.iter_mut().zip(&run.bytes).for_each(|(t, &b)| *t += price * b as f64);
                }
            }
        }
        for _ in 0..passes {
            match &mut self.inner {
                Inner::Messages(messages) => {
                    self.floor = self.constant + messages.pass(of, &self.theta, &mut self.hat, true);
                    self.current = self.constant + messages.pass(of, &self.theta, &mut self.hat, false);
                }
                Inner::Exact { plan, decoded } => {
                    let unary = Unary { offset: &of.offset, cost: &self.theta };
                    let tables = plan.evaluate(&unary);
                    self.current = self.constant + tables.value;
                    self.floor = self.current;
                    *decoded = plan.dive(&unary, &tables);
                    self.hat = plan.marginals(&unary, &tables);
                    self.hat.iter_mut().for_each(|h| *h -= tables.value);
                }
            }
        }
        if self.current > self.bound {
            self.bound = self.current;
            self.best_price.clone_from(&self.price);
        }
    }

    /// Moves the prices and passes once. `gap` is about how far the bound is from the best: strategies within a small part
    /// of it count as chosen in part.
    pub(crate) fn step(&mut self, gap: f64) {
        self.steps += 1;
        let over = self.relaxed_over(SOFTNESS * gap / self.of.len() as f64);
        let peak = (0..over.len()).reduce(|best, r| if over[r] > over[best] { r } else { best });
        if let Some(peak) = peak.filter(|&r| over[r] > 0.0 && self.step[r] == 0.0) {
            self.step[peak] = self.unit;
        }
        for (r, over) in over.into_iter().enumerate() {
            if self.step[r] == 0.0 {
                continue;
            }
            let rising = over > 0.0;
            let factor = if rising == self.rising[r] { 1.2 } else { 0.5 };
            self.step[r] = (self.step[r] * factor).clamp(self.unit * 1e-6, self.unit * 10.0);
            self.rising[r] = rising;
            let change = if rising { self.step[r] } else { -self.step[r] };
            self.price[r] = (self.price[r] + change).max(0.0);
            if self.price[r] == 0.0 {
                self.step[r] = 0.0;
            }
        }
        self.settle(1);
    }

    /// Bytes above each row's capacity where every node takes its strategies in proportion to `exp(-hat / temperature)`.
    fn relaxed_over(&mut self, temperature: f64) -> Vec<f64> {
        let of = self.of;
        let rate = (1.0 / self.steps as f64).max(0.03);
        let mut change = vec![0.0; of.capacity.len() + 1];
        for (u, profile) in of.profile.iter().enumerate() {
            let range = of.offset[u]..of.offset[u + 1];
            let soft = &mut self.soft[range.clone()];
            let mut total = 0.0;
            for (p, h) in soft.iter_mut().zip(&self.hat[range.clone()]) {
                *p = if *h <= 0.0 { 1.0 } else { (-h / temperature).exp() };
                total += *p;
            }
            for (p, mean) in soft.iter_mut().zip(&mut self.mean[range]) {
                *p /= total;
                *mean += rate * (*p - *mean);
            }
            for run in profile {
                let bytes: f64 = run.bytes.iter().zip(soft.iter()).map(|(&b, p)| b as f64 * p).sum();
                change[run.first as usize] += bytes;
                change[run.end as usize] -= bytes;
            }
        }
        let mut held = 0.0;
        let over = of.capacity.iter().zip(change).map(|(&capacity, change)| {
            held += change;
            held - capacity as f64
        });
        over.collect()
    }

    /// A choice of about the relaxed problem's cost, which may hold too much.
    pub(crate) fn decode(&self) -> Vec<usize> {
        match &self.inner {
            Inner::Messages(messages) => messages.decode(self.of, &self.theta),
            Inner::Exact { decoded, .. } => decoded.clone(),
        }
    }

    /// For each strategy whether it can be part of a choice that costs less than `cutoff`.
    pub(crate) fn worth_keeping(&mut self, cutoff: f64) -> Vec<bool> {
        let mut keep: Vec<bool> = self.hat.iter().map(|h| h + self.floor < cutoff).collect();
        if let Inner::Messages(messages) = &mut self.inner {
            // The other direction sees other chains.
            let before = self.current;
            self.floor = self.constant + messages.pass(self.of, &self.theta, &mut self.hat, true);
            keep.iter_mut().zip(&self.hat).for_each(|(k, h)| *k &= h + before < cutoff);
            self.current = self.constant + messages.pass(self.of, &self.theta, &mut self.hat, false);
            if self.current > self.bound {
                self.bound = self.current;
                self.best_price.clone_from(&self.price);
            }
        }
        keep
    }

    pub(crate) fn prices(&self) -> Prices {
        let priced = self.of.point.iter().zip(&self.best_price).filter(|(_, p)| **p > 0.0);
        priced.map(|(&point, &p)| (point, p)).collect()
    }

    /// The greatest hub where memory binds nowhere. What is left once it is decided has fewer cycles, and bounds that much nearer.
    pub(crate) fn hub(&self) -> Option<usize> {
        if self.of.capacity.is_empty() { self.of.hubs().first().copied() } else { None }
    }

    /// The node to branch on, with the strategies that go to one side: the node whose relaxed choice is spread widest over
    /// priced bytes, split at their mean; else a hub or the least decided one, its likeliest strategy against all others.
    pub(crate) fn split(&self) -> (usize, Vec<bool>) {
        let of = self.of;
        let likeliest = |p: &[f64]| (0..p.len()).fold(0, |best, at| if p[at] > p[best] { at } else { best });
        if let Some(hub) = self.hub() {
            let p = &self.mean[of.offset[hub]..of.offset[hub + 1]];
            let top = likeliest(p);
            return (hub, (0..p.len()).map(|s| s == top).collect());
        }
        let mut sum = vec![0.0];
        for price in &self.best_price {
            sum.push(sum[sum.len() - 1] + price);
        }
        let small = 1e-9 * self.bound.abs();
        let mut best = (f64::NEG_INFINITY, 0, vec![]);
        for u in 0..of.len() {
            let p = &self.mean[of.offset[u]..of.offset[u + 1]];
            let mut worth = vec![0.0; p.len()];
            for run in &of.profile[u] {
                let price = sum[run.end as usize] - sum[run.first as usize];
                worth.iter_mut().zip(&run.bytes).for_each(|(w, &b)| *w += price * b as f64);
            }
            let mean: f64 = worth.iter().zip(p).map(|(w, p)| w * p).sum();
            let spread: f64 = worth.iter().zip(p).map(|(w, p)| (w - mean).abs() * p).sum();
            let mut side: Vec<bool> = worth.iter().map(|&w| w < mean).collect();
            let mut score = spread;
            if spread <= small || !side.contains(&true) || !side.contains(&false) {
                let top = likeliest(p);
                side = (0..p.len()).map(|s| s == top).collect();
                score = (1.0 - p[top]) * small;
            }
            if score > best.0 {
                best = (score, u, side);
            }
        }
        (best.1, best.2)
    }
}

/// Part of the gap, shared among all nodes, within which a strategy counts as chosen in part.
const SOFTNESS: f64 = 0.03;
/// Passes of messages before prices move.
const FIRST_PASSES: usize = 10;
/// Entries of the largest table of an exact elimination, its work as a multiple of a pass of messages, and the nodes up
/// to which its order is looked for.
const EXACT_ENTRIES: f64 = 3e5;
const EXACT_WORK: f64 = 30.0;
const EXACT_NODES: usize = 600;
