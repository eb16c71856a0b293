//! A small residue that branching leaves open, as a 0/1 program for `good_lp`: one binary per strategy and one non-negative
//! variable per pair of strategies on an edge, whose sums are the binaries (the local polytope, Werner, IEEE TPAMI 2007).
//! Memory rows enter only once a solution breaks them. It proves by other means than the search, so it is also its check.

use std::time::Instant;

use good_lp::solvers::microlp::microlp;
use good_lp::solvers::{SolutionStatus, WithInitialSolution, WithTimeLimit};
use good_lp::{Expression, Solution as _, SolverModel, Variable, VariableDefinition, variables};

use super::branch::Incumbent;
use super::compact::{Assignment, Compact};
use super::network::Network;

/// Looks for something better than `best` for at most `time_limit_s`. Returns a lower bound of everything but the incumbent.
pub(super) fn solve(network: &Network, best: &mut Incumbent, time_limit_s: f64) -> f64 {
    let start = Instant::now();
    let of = Compact::new(network);
    let mut bound = f64::NEG_INFINITY;
    let mut stated: Vec<usize> = vec![];
    loop {
        let left_s = time_limit_s - start.elapsed().as_secs_f64();
        if left_s <= 0.0 {
            return bound;
        }
        let hint = best.choice.as_deref().and_then(|choice| network.lowered(choice));
        let (local, least, proven) = match relaxed(&of, &stated, hint.as_deref(), left_s) {
            Some(Relaxed::Choice { local, least, proven }) => (local, least, proven),
            // With an incumbent this is a numerical failure, which proves nothing.
            Some(Relaxed::Infeasible) if best.choice.is_none() => return f64::INFINITY,
            _ => return bound,
        };
        bound = bound.max(of.constant + least);
        let assignment = Assignment::new(&of, local);
        let broken: Vec<usize> = (0..of.capacity.len()).filter(|&r| assignment.over[r] > 0).collect();
        if broken.is_empty() {
            best.offer(network, &of, &assignment);
            return if proven { f64::INFINITY } else { bound };
        }
        // A stated row may be exceeded by the solver's tolerance; such a choice is of no use.
        let new: Vec<usize> = broken.into_iter().filter(|r| !stated.contains(r)).collect();
        if new.is_empty() {
            return bound;
        }
        stated.extend(new);
    }
}

enum Relaxed {
    Choice { local: Vec<usize>, least: f64, proven: bool },
    Infeasible,
}

/// Solves the program with only the memory rows in `stated`, without constants. None when the solver ends without an answer.
fn relaxed(of: &Compact, stated: &[usize], hint: Option<&[usize]>, time_limit_s: f64) -> Option<Relaxed> {
    // The solver's tolerances are absolute, so costs are brought to one size; they are times down to nanoseconds.
    let largest = (of.cost.iter())
        .chain(of.edges.iter().flat_map(|edge| &edge.ab))
        .filter(|c| c.is_finite())
        .fold(0.0_f64, |most, c| most.max(c.abs()));
    let unit = if largest > 0.0 { 1e3 / largest } else { 1.0 };
    let mut vars = variables!();
    let mut hints: Vec<(Variable, f64)> = vec![];
    let mut objective = Expression::default();
    let mut equalities: Vec<Expression> = vec![];
    let mut strategies: Vec<Vec<Variable>> = Vec::with_capacity(of.len());
    for u in 0..of.len() {
        let mut one = Expression::from(-1.0);
        let mut list = Vec::with_capacity(of.width(u));
        for (s, &c) in of.cost[of.offset[u]..of.offset[u + 1]].iter().enumerate() {
            let most = if c < f64::INFINITY { 1.0 } else { 0.0 };
            let x = vars.add(VariableDefinition::new().integer().min(0).max(most));
            if most > 0.0 {
                objective.add_mul(c * unit, x);
            }
            one.add_mul(1.0, x);
            list.push(x);
            hints.extend(hint.map(|h| (x, if h[u] == s { 1.0 } else { 0.0 })));
        }
        equalities.push(one);
        strategies.push(list);
    }
    for edge in &of.edges {
        let (a, b) = (edge.a as usize, edge.b as usize);
        let (from, to) = (&strategies[a], &strategies[b]);
        let mut rows: Vec<Expression> = from.iter().map(|&x| -1.0 * x).collect();
        let mut columns: Vec<Expression> = to.iter().map(|&x| -1.0 * x).collect();
        for (at, &c) in edge.ab.iter().enumerate() {
            // A forbidden pair has no variable.
            if c < f64::INFINITY {
                let (i, j) = (at / to.len(), at % to.len());
                let y = vars.add(VariableDefinition::new().min(0).max(1));
                objective.add_mul(c * unit, y);
                rows[i].add_mul(1.0, y);
                columns[j].add_mul(1.0, y);
                hints.extend(hint.map(|h| (y, if h[a] == i && h[b] == j { 1.0 } else { 0.0 })));
            }
        }
        equalities.extend(rows);
        equalities.extend(columns);
    }
    let mut model = vars.minimise(objective).using(microlp).with_time_limit(time_limit_s.min(1e6));
    for expression in equalities {
        model.add_constraint(expression.eq(0.0));
    }
    for &r in stated {
        let scale = of.capacity[r].max(1) as f64;
        let mut sum = Expression::default();
        for (list, profile) in strategies.iter().zip(&of.profile) {
            let at = profile.partition_point(|run| run.end as usize <= r);
            if let Some(run) = profile.get(at).filter(|run| run.first as usize <= r) {
                list.iter().zip(&run.bytes).for_each(|(&x, &bytes)| sum.add_mul(bytes as f64 / scale, x));
            }
        }
        model.add_constraint(sum.leq(of.capacity[r] as f64 / scale));
    }
    if !hints.is_empty() {
        model = model.with_initial_solution(hints);
    }
    match model.solve() {
        Ok(solution) => {
            let local =
                strategies.iter().map(|list| list.iter().position(|&x| solution.value(x) > 0.5).unwrap_or(0)).collect();
            let proven = matches!(solution.status(), SolutionStatus::Optimal);
            let least = solution.into_inner().stats().best_bound.unwrap_or(f64::NEG_INFINITY) / unit;
            // The solver prunes within 1e-9 and reads feasibility within 1e-7 of numbers up to 1e3.
            Some(Relaxed::Choice { local, least: least - 1e-9 * least.abs(), proven })
        }
        Err(good_lp::ResolutionError::Infeasible) => Some(Relaxed::Infeasible),
        Err(_) => None,
    }
}
