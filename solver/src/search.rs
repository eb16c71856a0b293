//! The whole solver after the first reduction. Two sides work in turns of equal work, side by side: the dual side raises the
//! bound and rules strategies out (an ascent on ever smaller problems, then branch and bound), the primal side improves the
//! best choice by neighbourhoods. What either finds helps the other at the next turn, so answers do not depend on timing.

use super::ascent::{Ascent, Prices};
use super::branch::{Budget, Climbed, Incumbent, Tree, climb, restrict};
use super::compact::{Assignment, Compact};
use super::messages::Messages;
use super::neighbourhood::Neighbourhoods;
use super::network::Network;
use super::reduce::Reductions;

/// Searches `base`, which is reduced. Returns a lower bound of everything but the incumbent.
pub(super) fn search(
    base: &Network,
    best: &mut Incumbent,
    budget: &mut Budget<'_>,
    watch: &mut dyn FnMut(&'static str, f64, f64),
) -> f64 {
    let whole = Compact::new(base);
    if whole.len() == 0 {
        best.offer(base, &whole, &Assignment::new(&whole, vec![]));
        return f64::INFINITY;
    }
    let mut sides = Sides { base, whole: &whole, local: None };
    let mut network = base.clone();
    let mut prices = vec![];
    let mut bound = f64::NEG_INFINITY;
    let mut before: Option<(Compact, Messages)> = None;
    // While the problem is large: one ascent, begun anew when enough is ruled out.
    loop {
        let of = Compact::new(&network);
        let most = if of.capacity.is_empty() { FREE_TREE_ENTRIES } else { TREE_ENTRIES };
        if of.entries <= most {
            break;
        }
        let mut ascent = Ascent::after(&of, &prices, before.as_ref().map(|(of, messages)| (of, messages)));
        let mut turns = std::collections::VecDeque::new();
        let kept = loop {
            let climbed = sides.turn(best, budget, &ascent.prices(), |best, budget| {
                climb(&mut ascent, &network, best, budget, TURN_STEPS, false)
            });
            bound = bound.max(ascent.bound);
            watch("ascent", best.cost, bound);
            match climbed {
                Climbed::Closed => return f64::INFINITY,
                Climbed::Fixed(keep) => break Some(keep),
                Climbed::Stuck => turns.push_back(bound),
            }
            if budget.spent() {
                return bound;
            }
            // Risen by next to nothing for some turns: branching is what is left.
            let before = if turns.len() > TURNS_STUCK { turns.pop_front() } else { None };
            if before.is_some_and(|before| bound - before < SLOW * (best.cost - bound)) {
                break None;
            }
        };
        prices = ascent.prices();
        let messages = ascent.into_messages();
        let Some(keep) = kept else { break };
        if !restrict(&mut network, &of, &keep) || network.reduce(Reductions::ALL, &[]).is_err() {
            return f64::INFINITY;
        }
        before = messages.map(|messages| (of, messages));
    }
    let mut tree = Tree::new(network, prices.clone(), bound);
    loop {
        sides.turn(best, budget, &prices, |best, budget| tree.search(best, budget));
        watch("branch", best.cost, tree.bound());
        if tree.bound() >= best.cutoff() {
            return f64::INFINITY;
        }
        if budget.spent() {
            return tree.bound();
        }
    }
}

struct Sides<'a> {
    base: &'a Network,
    whole: &'a Compact,
    local: Option<Neighbourhoods<'a>>,
}

impl Sides<'_> {
    /// One turn of both sides with a share of the budget each.
    fn turn<T: Send>(
        &mut self,
        best: &mut Incumbent,
        budget: &mut Budget<'_>,
        prices: &Prices,
        dual: impl FnOnce(&mut Incumbent, &mut Budget<'_>) -> T + Send,
    ) -> T {
        let share = budget.work.min(TURN_WORK);
        let mut of_dual = Budget { work: share, clock: budget.clock };
        let mut of_primal = Budget { work: share, clock: budget.clock };
        let Some(local) = &mut self.local else {
            let result = dual(best, &mut of_dual);
            budget.work -= share - of_dual.work;
            // Small problems are done by now.
            if let Some(choice) = best.choice.as_ref().filter(|_| self.whole.len() >= MANY) {
                let start = self.base.lowered(choice).map(|x| Assignment::new(self.whole, x));
                if let Some(start) = start.filter(Assignment::fits) {
                    self.local = Some(Neighbourhoods::new(self.base, self.whole, start));
                }
            }
            return result;
        };
        if let Some(choice) = &best.choice {
            local.adopt(choice);
        }
        let (result, ()) = rayon::join(|| dual(best, &mut of_dual), || local.search(prices, &mut of_primal));
        budget.work -= 2.0 * share - of_dual.work - of_primal.work;
        best.offer(self.base, self.whole, &local.current);
        result
    }
}

/// Entries of all edges up to which branching is worth it.
const TREE_ENTRIES: usize = 150_000;
/// The same where memory binds nowhere, so that no prices have to be found first.
const FREE_TREE_ENTRIES: usize = 500_000;
/// Table entries that one turn of one side reads.
const TURN_WORK: f64 = 3e8;
/// Steps of an ascent in one turn.
const TURN_STEPS: usize = 100;
/// Turns in which an ascent closes less than a part of the gap before it is left.
const TURNS_STUCK: usize = 8;
const SLOW: f64 = 0.003;
/// Nodes from which neighbourhoods are searched; fewer are one neighbourhood.
const MANY: usize = 200;
