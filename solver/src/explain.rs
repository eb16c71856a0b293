//! Questions to a solution: why this strategy and not another? Each strategy of a node is priced twice, with everything else
//! as it is, and with everything else chosen anew for it.

use super::{Options, Problem, SolveError, check, cost_of, solve};
use rayon::prelude::*;

/// The effects of another strategy of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The position of the strategy in the node's costs.
    pub strategy: usize,
    /// Cost of the whole choice with this strategy and all else as it is; infinite where a neighbour forbids it.
    pub in_place: f64,
    /// Where that would hold most above the limit: the program point and the bytes.
    pub over: Option<(u32, u64)>,
    /// Cost of the best choice that has this strategy; infinite where there is none.
    pub whole: f64,
    /// No choice that has it costs less than this.
    pub whole_bound: f64,
    /// How many other nodes differ in that choice.
    pub others: usize,
}

/// Program points at which a choice holds as much as allowed, within a part of the limit: a point and the bytes held there,
/// fullest first. They are why a cheaper strategy that holds more is not taken.
pub fn tight_points(problem: &Problem, choice: &[usize], within: f64) -> Vec<(u32, u64)> {
    let Some(limit) = problem.limit_bytes else { return vec![] };
    let mut tight: Vec<(u32, u64)> =
        held(problem, choice).into_iter().filter(|&(_, bytes)| bytes as f64 >= (1.0 - within) * limit as f64).collect();
    tight.sort_by_key(|&(point, bytes)| (std::cmp::Reverse(bytes), point));
    tight
}

/// Bytes that a choice holds from each program point at which that changes.
pub fn held(problem: &Problem, choice: &[usize]) -> Vec<(u32, u64)> {
    let mut change: std::collections::BTreeMap<u32, i128> = Default::default();
    for (node, &s) in problem.nodes.iter().zip(choice) {
        for holding in node.holds.iter().filter(|holding| !holding.live.is_empty()) {
            *change.entry(holding.live.start).or_default() += i128::from(holding.bytes[s]);
            *change.entry(holding.live.end).or_default() -= i128::from(holding.bytes[s]);
        }
    }
    let mut bytes = 0;
    let sums = change.into_iter().map(|(point, change)| {
        bytes += change;
        (point, bytes.max(0) as u64)
    });
    sums.collect()
}

/// Every strategy of `node`, the chosen one too, beside the choice. Each is solved for within `options`.
///
/// # Errors
/// [`SolveError::Malformed`]; a choice or node that is none of the problem's.
pub fn alternatives(
    problem: &Problem,
    choice: &[usize],
    node: usize,
    options: &Options,
) -> Result<Vec<Alternative>, SolveError> {
    check(problem)?;
    let fits = |(node, &s): (&super::Node, &usize)| s < node.cost.len();
    if choice.len() != problem.nodes.len() || !problem.nodes.iter().zip(choice).all(fits) || node >= choice.len() {
        return Err(SolveError::Infeasible);
    }
    let of = |strategy: usize| {
        let mut here = choice.to_vec();
        here[node] = strategy;
        let limit = problem.limit_bytes.unwrap_or(u64::MAX);
        let fullest = held(problem, &here).into_iter().max_by_key(|&(point, bytes)| (bytes, std::cmp::Reverse(point)));
        let over = fullest.filter(|&(_, bytes)| bytes > limit).map(|(point, bytes)| (point, bytes - limit));
        let mut pinned = problem.clone();
        let costs = pinned.nodes[node].cost.iter_mut().enumerate();
        costs.filter(|(s, _)| *s != strategy).for_each(|(_, c)| *c = f64::INFINITY);
        let (whole, whole_bound, others) = match solve(&pinned, options) {
            Ok(best) => {
                let differs = best.choice.iter().zip(choice).enumerate().filter(|(v, (a, b))| *v != node && a != b);
                (best.cost, best.lower_bound, differs.count())
            }
            Err(SolveError::NotFound) => (f64::INFINITY, f64::NEG_INFINITY, 0),
            Err(_) => (f64::INFINITY, f64::INFINITY, 0),
        };
        Alternative { strategy, in_place: cost_of(problem, &here), over, whole, whole_bound, others }
    };
    Ok((0..problem.nodes[node].cost.len()).into_par_iter().map(of).collect())
}
