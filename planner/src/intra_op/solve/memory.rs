//! The memory-bound case. Bytes get a price per row, found by subgradient steps on the Lagrangian dual (Held, Wolfe &
//! Crowder, Mathematical Programming 1974; the bound of a fixed price is one elimination), repaired choices give good
//! answers on the way, and the search closes what is left between the two.

use super::eliminate::{Caps, Messages, Plan, first_least};
use super::reduce::{Reduced, Row};
use super::search::{Incumbent, Search};
use super::{Clock, Options, Problem, Solution, SolveError, TOLERANCE, bytes_of, conclude, finish};

/// Solves a problem whose best choice without memory breaks a row; `floor` is a lower bound of its cost.
pub(super) fn solve(problem: &Problem, options: &Options, clock: &Clock, floor: f64) -> Result<Solution, SolveError> {
    // Some node's least bytes may be of a forbidden strategy, which reduction has not dropped yet.
    for (row, memory) in problem.memory.iter().enumerate() {
        let least_bytes: u64 = memory
            .members
            .iter()
            .map(|&v| {
                let node = &problem.nodes[v];
                let allowed = (0..node.cost.len()).filter(|&s| node.cost[s] < f64::INFINITY);
                allowed.map(|s| bytes_of(node, s)).min().unwrap_or(0)
            })
            .sum();
        if least_bytes > memory.limit_bytes {
            return Err(SolveError::MemoryInfeasible { row, limit_bytes: memory.limit_bytes, least_bytes });
        }
    }
    let caps = Caps::for_seconds(options.time_limit_s);
    let mut reduced = Reduced::new(problem, &binding(problem), &[])?;
    let mut plan = Plan::new(&reduced, &[], &caps);
    let mut best = Incumbent::none();
    if let Some(local) = frugal(&reduced, options) {
        settle(&reduced, local, &mut best);
    }
    let mut price = vec![0.0; reduced.rows.len()];
    let mut dual = ascend(&reduced, &plan, &mut price, &mut best, clock);
    for _ in 0..PRUNINGS {
        if !plan.exact || dual.bound >= best.cutoff() || best.choice.is_none() || clock.over() {
            break;
        }
        // A strategy that costs at least the best known even at these prices is in no better choice.
        let keep = (plan.marginals(&dual.unary, &dual.messages).iter())
            .map(|costs| costs.iter().map(|c| c + dual.offset < best.cutoff()).collect())
            .collect::<Vec<Vec<bool>>>();
        if !keep.iter().flatten().any(|keep| !keep) {
            break;
        }
        if keep.iter().any(|keep| !keep.contains(&true)) || reduced.restrict(&keep).is_err() {
            let proven = best.cost;
            return conclude(problem, options, best, proven);
        }
        plan = Plan::new(&reduced, &[], &caps);
        dual = ascend(&reduced, &plan, &mut price, &mut best, clock);
    }
    let search =
        Search { reduced: &reduced, plan: &plan, messages: &dual.messages, unary: &dual.unary, offset: dual.offset };
    // The strategies pruned on the way cost no less than the best known, to which the bound is cut in the end.
    let bound = finish(&search, &mut best, clock).max(floor);
    if best.choice.is_none() && bound == f64::INFINITY {
        // Nothing obeys all rows; name one that cannot be met alone, if there is such a row.
        return Err(impossible_row(&reduced, options).unwrap_or(SolveError::Infeasible));
    }
    conclude(problem, options, best, bound)
}

/// How often strategies are pruned by their bounds and prices found anew.
const PRUNINGS: usize = 3;

/// The rows that can be broken and are not implied by another with more members and no higher limit.
fn binding(problem: &Problem) -> Vec<usize> {
    let most = |v: usize| problem.nodes[v].bytes.iter().copied().max().unwrap_or(0);
    let mut members: Vec<Vec<usize>> = problem.memory.iter().map(|row| row.members.clone()).collect();
    for list in &mut members {
        list.retain(|&v| most(v) > 0);
        list.sort_unstable();
    }
    let limit = |r: usize| problem.memory[r].limit_bytes;
    let within = |a: &[usize], b: &[usize]| {
        let mut b = b.iter();
        a.iter().all(|v| b.any(|w| w == v))
    };
    let mut kept: Vec<usize> = vec![];
    for (row, list) in members.iter().enumerate() {
        if list.iter().map(|&v| most(v)).sum::<u64>() <= limit(row) {
            continue;
        }
        if kept.iter().any(|&k| limit(k) <= limit(row) && within(list, &members[k])) {
            continue;
        }
        kept.retain(|&k| !(limit(row) <= limit(k) && within(&members[k], list)));
        kept.push(row);
    }
    kept
}

/// Prices and the elimination at them.
struct Dual {
    unary: Vec<Vec<f64>>,
    messages: Messages,
    offset: f64,
    bound: f64,
}

/// One elimination at `price` seconds per limit's worth of bytes of each row.
fn priced(reduced: &Reduced, plan: &Plan, price: &[f64]) -> Dual {
    let mut unary = reduced.cost.clone();
    for (row, price) in reduced.rows.iter().zip(price) {
        if *price > 0.0 {
            for &v in &row.members {
                for (c, bytes) in unary[v].iter_mut().zip(&reduced.bytes[v]) {
                    *c += price * (*bytes as f64 / scale(row));
                }
            }
        }
    }
    let messages = plan.evaluate(&unary);
    let offset =
        -reduced.rows.iter().zip(price).map(|(row, price)| price * (row.limit_bytes as f64 / scale(row))).sum::<f64>();
    let bound = messages.value + offset;
    Dual { unary, messages, offset, bound }
}

/// Bytes are counted in units of their row's limit, so that all prices are of one size.
fn scale(row: &Row) -> f64 {
    row.limit_bytes.max(1) as f64
}

fn used(reduced: &Reduced, row: &Row, local: &[usize]) -> u64 {
    row.members.iter().map(|&v| reduced.bytes[v][local[v]]).sum()
}

/// By how much each row is exceeded, in units of its limit; negative where there is room.
fn excess(reduced: &Reduced, local: &[usize]) -> Vec<f64> {
    let over = |row: &Row| (used(reduced, row, local) as f64 - row.limit_bytes as f64) / scale(row);
    reduced.rows.iter().map(over).collect()
}

/// Elimination runs that look for prices.
const PRICE_STEPS: usize = 200;
/// Part of the time left that they may take.
const PRICE_SHARE: f64 = 0.4;

/// Raises the lower bound by moving prices along the excess of the choice that is best at them, with steps by the
/// distance to the best known cost (Polyak 1969). Choices on the way are repaired and offered to `best`.
fn ascend(reduced: &Reduced, plan: &Plan, price: &mut Vec<f64>, best: &mut Incumbent, clock: &Clock) -> Dual {
    let stop_s = clock.left_s() * (1.0 - PRICE_SHARE);
    let rows = reduced.rows.len();
    if rows == 1 {
        *price = single_price(reduced, plan, best);
    }
    let mut top = priced(reduced, plan, price);
    let mut top_price = price.clone();
    let mut over = excess(reduced, &plan.dive(&top.unary, &top.messages));
    let mut top_over = over.clone();
    let mut stride = 1.0;
    let mut stalled = 0;
    // The price of a single row is already the best one.
    for _ in 0..if rows == 1 { 0 } else { PRICE_STEPS } {
        if top.bound >= best.cutoff() || stride < 1e-3 || clock.left_s() < stop_s {
            break;
        }
        let norm: f64 = over.iter().zip(price.iter()).filter(|(o, p)| **o > 0.0 || **p > 0.0).map(|(o, _)| o * o).sum();
        if norm == 0.0 {
            break;
        }
        let target = if best.cost < f64::INFINITY { best.cost } else { top.bound + 0.1 * top.bound.abs() };
        let length = stride * (target - top.bound) / norm;
        for (p, o) in price.iter_mut().zip(&over) {
            *p = (*p + length * o).max(0.0);
        }
        let dual = priced(reduced, plan, price);
        let local = plan.dive(&dual.unary, &dual.messages);
        over = excess(reduced, &local);
        settle(reduced, local, best);
        if dual.bound > top.bound {
            top = dual;
            top_price.clone_from(price);
            top_over.clone_from(&over);
            stalled = 0;
        } else {
            stalled += 1;
            if stalled == 4 {
                stalled = 0;
                stride *= 0.5;
                price.clone_from(&top_price);
                over.clone_from(&top_over);
            }
        }
    }
    *price = top_price;
    top
}

/// The best price of a single row: where the line through a choice that breaks the row and one that obeys it meets no
/// lower choice. Cost over bytes is a lower convex hull, so each elimination finds a new corner of it or ends the walk.
fn single_price(reduced: &Reduced, plan: &Plan, best: &mut Incumbent) -> Vec<f64> {
    let mut at = |price: f64| {
        let dual = priced(reduced, plan, &[price]);
        let local = plan.dive(&dual.unary, &dual.messages);
        let corner = (reduced.cost_of(&local), excess(reduced, &local)[0]);
        settle(reduced, local, best);
        (corner, dual.bound)
    };
    let (mut breaks, _) = at(0.0);
    if breaks.1 <= 0.0 {
        return vec![0.0];
    }
    let mut price = breaks.0.abs().max(f64::MIN_POSITIVE) / breaks.1;
    let mut obeys = None;
    for _ in 0..DOUBLINGS {
        let (corner, _) = at(price);
        if corner.1 <= 0.0 {
            obeys = Some(corner);
            break;
        }
        breaks = corner;
        price *= 4.0;
    }
    // Without a choice that obeys, the last price is as good as any.
    let Some(mut obeys) = obeys else {
        return vec![price];
    };
    for _ in 0..PRICE_STEPS {
        price = ((obeys.0 - breaks.0) / (breaks.1 - obeys.1)).max(0.0);
        let line = breaks.0 + price * breaks.1;
        let (corner, bound) = at(price);
        if bound >= line - TOLERANCE * line.abs() || corner == breaks || corner == obeys {
            break;
        }
        if corner.1 <= 0.0 { obeys = corner } else { breaks = corner }
    }
    vec![price]
}

/// How often the price of a single row is raised fourfold before it is held to be impossible.
const DOUBLINGS: usize = 40;

/// The problem with nothing left of its costs but what they forbid.
fn forbidding(reduced: &Reduced) -> Reduced {
    let mut bare = reduced.clone();
    let clear = |c: &mut f64| *c = if *c < f64::INFINITY { 0.0 } else { *c };
    bare.cost.iter_mut().flatten().for_each(clear);
    bare.pairs.iter_mut().flat_map(|pair| &mut pair.cost).for_each(clear);
    bare
}

/// A choice that holds few bytes: least in the sum of the rows, each in units of its limit.
fn frugal(reduced: &Reduced, options: &Options) -> Option<Vec<usize>> {
    let bare = forbidding(reduced);
    let plan = Plan::new(&bare, &[], &Caps::for_seconds(options.time_limit_s));
    let dual = priced(&bare, &plan, &vec![1.0; bare.rows.len()]);
    let local = plan.dive(&dual.unary, &dual.messages);
    (reduced.cost_of(&local) < f64::INFINITY).then_some(local)
}

/// A row whose least bytes over all allowed choices are above its limit.
fn impossible_row(reduced: &Reduced, options: &Options) -> Option<SolveError> {
    let mut bare = forbidding(reduced);
    let rows = std::mem::take(&mut bare.rows);
    let plan = Plan::new(&bare, &[], &Caps::for_seconds(options.time_limit_s));
    rows.into_iter().filter(|_| plan.exact).find_map(|row| {
        bare.rows = vec![row];
        let dual = priced(&bare, &plan, &[1.0]);
        let local = plan.dive(&dual.unary, &dual.messages);
        let row = &bare.rows[0];
        let least_bytes = used(&bare, row, &local);
        (bare.cost_of(&local) < f64::INFINITY && least_bytes > row.limit_bytes)
            .then_some(SolveError::MemoryInfeasible { row: row.row, limit_bytes: row.limit_bytes, least_bytes })
    })
}

/// Repairs a choice until it obeys every row, betters it one node at a time, and offers it. Does nothing when stuck.
fn settle(reduced: &Reduced, mut local: Vec<usize>, best: &mut Incumbent) {
    let mut bytes: Vec<u64> = reduced.rows.iter().map(|row| used(reduced, row, &local)).collect();
    let mut of_node = vec![vec![]; local.len()];
    for (r, row) in reduced.rows.iter().enumerate() {
        row.members.iter().for_each(|&v| of_node[v].push(r));
    }
    let apply = |local: &mut [usize], bytes: &mut [u64], v: usize, to: usize| {
        for &r in &of_node[v] {
            bytes[r] = bytes[r] - reduced.bytes[v][local[v]] + reduced.bytes[v][to];
        }
        local[v] = to;
    };
    let over =
        |r: usize, bytes: u64| bytes.saturating_sub(reduced.rows[r].limit_bytes) as f64 / scale(&reduced.rows[r]);
    // Each move takes bytes from rows that are over, where a byte costs the fewest seconds.
    while (0..bytes.len()).any(|r| over(r, bytes[r]) > 0.0) {
        let mut cheapest: Option<(f64, usize, usize)> = None;
        for v in 0..local.len() {
            let now = reduced.bytes[v][local[v]];
            if of_node[v].iter().all(|&r| over(r, bytes[r]) == 0.0) {
                continue;
            }
            for (to, &then) in reduced.bytes[v].iter().enumerate().filter(|(_, then)| **then < now) {
                let less = |r: usize| over(r, bytes[r]) - over(r, bytes[r] - now + then);
                let relief: f64 = of_node[v].iter().map(|&r| less(r)).sum();
                let rate = reduced.change(&local, v, to) / relief;
                if relief > 0.0 && rate < f64::INFINITY && cheapest.is_none_or(|(known, ..)| rate < known) {
                    cheapest = Some((rate, v, to));
                }
            }
        }
        let Some((_, v, to)) = cheapest else { return };
        apply(&mut local, &mut bytes, v, to);
    }
    for _ in 0..SWEEPS {
        let mut better = false;
        for v in 0..local.len() {
            let now = reduced.bytes[v][local[v]];
            let fits = |to: usize| {
                let then = reduced.bytes[v][to];
                of_node[v].iter().all(|&r| bytes[r] - now + then <= reduced.rows[r].limit_bytes)
            };
            let changes: Vec<f64> = (0..reduced.cost[v].len())
                .map(|to| if fits(to) { reduced.change(&local, v, to) } else { f64::INFINITY })
                .collect();
            let to = first_least(&changes);
            if changes[to] < 0.0 {
                apply(&mut local, &mut bytes, v, to);
                better = true;
            }
        }
        if !better {
            break;
        }
    }
    best.offer(reduced, &local);
}

/// How often all nodes are tried for a better strategy.
const SWEEPS: usize = 10;
