//! What elimination and search leave open, as a 0/1 program for `good_lp`: one binary per strategy and one non-negative
//! variable per pair of strategies on an edge, whose sums are the binaries (the local polytope, Werner, IEEE TPAMI 2007).
//! Memory rows enter only once a solution breaks them. It proves by other means than the search, so it is also its check.

use std::time::Instant;

use good_lp::solvers::microlp::microlp;
use good_lp::solvers::{SolutionStatus, WithInitialSolution, WithTimeLimit};
use good_lp::{Expression, Solution as _, SolverModel, Variable, VariableDefinition, variables};

use super::reduce::Reduced;
use super::search::{Incumbent, Outcome};

/// Edge entries of the program, by which its size goes.
pub(super) fn entries(reduced: &Reduced) -> usize {
    reduced.pairs.iter().map(|pair| pair.cost.len()).sum()
}

/// Looks for something better than `best` for at most `time_limit_s`.
pub(super) fn solve(reduced: &Reduced, best: &mut Incumbent, time_limit_s: f64) -> Outcome {
    let start = Instant::now();
    let mut bound = f64::NEG_INFINITY;
    let mut stated: Vec<usize> = vec![];
    loop {
        let left_s = time_limit_s - start.elapsed().as_secs_f64();
        if left_s <= 0.0 {
            return Outcome { complete: false, bound };
        }
        let Some(answer) = relaxed(reduced, &stated, best, left_s) else {
            return Outcome { complete: false, bound };
        };
        let Relaxed::Choice { local, least, proven } = answer else {
            // With an incumbent this is a numerical failure, which proves nothing.
            let complete = best.choice.is_none();
            return Outcome { complete, bound: if complete { f64::INFINITY } else { bound } };
        };
        bound = bound.max(least);
        let broken: Vec<usize> = (0..reduced.rows.len())
            .filter(|r| !stated.contains(r))
            .filter(|&r| {
                let row = &reduced.rows[r];
                row.members.iter().map(|&v| reduced.bytes[v][local[v]]).sum::<u64>() > row.limit_bytes
            })
            .collect();
        if broken.is_empty() {
            // A stated row may be exceeded by the solver's tolerance; such a choice is of no use.
            let kept = stated.iter().all(|&r| {
                let row = &reduced.rows[r];
                row.members.iter().map(|&v| reduced.bytes[v][local[v]]).sum::<u64>() <= row.limit_bytes
            });
            if kept {
                best.offer(reduced, &local);
            }
            let complete = proven && kept;
            let bound = if complete { best.cost } else { bound };
            return Outcome { complete, bound };
        }
        stated.extend(broken);
    }
}

enum Relaxed {
    Choice { local: Vec<usize>, least: f64, proven: bool },
    Infeasible,
}

/// Solves the program with only the memory rows in `stated`. None when the solver ends without an answer.
fn relaxed(reduced: &Reduced, stated: &[usize], best: &Incumbent, time_limit_s: f64) -> Option<Relaxed> {
    // The solver's tolerances are absolute, so costs are brought to one size; they are times down to nanoseconds.
    let largest = (reduced.cost.iter().flatten())
        .chain(reduced.pairs.iter().flat_map(|pair| &pair.cost))
        .filter(|c| c.is_finite())
        .fold(0.0_f64, |most, c| most.max(c.abs()));
    let unit = if largest > 0.0 { 1e3 / largest } else { 1.0 };
    let hint = best.choice.as_deref().and_then(|choice| reduced.lower(choice));
    let hint = hint.as_deref();
    let mut vars = variables!();
    let mut hints: Vec<(Variable, f64)> = vec![];
    let mut objective = Expression::default();
    let mut equalities: Vec<Expression> = vec![];
    let mut strategies: Vec<Vec<Variable>> = Vec::with_capacity(reduced.cost.len());
    for (v, cost) in reduced.cost.iter().enumerate() {
        let mut one = Expression::from(-1.0);
        let mut list = Vec::with_capacity(cost.len());
        for (s, &c) in cost.iter().enumerate() {
            let most = if c < f64::INFINITY { 1.0 } else { 0.0 };
            let x = vars.add(VariableDefinition::new().integer().min(0).max(most));
            if most > 0.0 {
                objective.add_mul(c * unit, x);
            }
            one.add_mul(1.0, x);
            list.push(x);
            hints.extend(hint.map(|h| (x, if h[v] == s { 1.0 } else { 0.0 })));
        }
        equalities.push(one);
        strategies.push(list);
    }
    for pair in &reduced.pairs {
        let (from, to) = (&strategies[pair.a], &strategies[pair.b]);
        let mut rows: Vec<Expression> = from.iter().map(|&x| -1.0 * x).collect();
        let mut columns: Vec<Expression> = to.iter().map(|&x| -1.0 * x).collect();
        for (at, &c) in pair.cost.iter().enumerate() {
            // A forbidden pair has no variable.
            if c < f64::INFINITY {
                let (i, j) = (at / to.len(), at % to.len());
                let y = vars.add(VariableDefinition::new().min(0).max(1));
                objective.add_mul(c * unit, y);
                rows[i].add_mul(1.0, y);
                columns[j].add_mul(1.0, y);
                let both = |h: &[usize]| h[pair.a] == i && h[pair.b] == j;
                hints.extend(hint.map(|h| (y, if both(h) { 1.0 } else { 0.0 })));
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
        let row = &reduced.rows[r];
        let scale = row.limit_bytes.max(1) as f64;
        let mut sum = Expression::default();
        for &v in &row.members {
            for (&x, &bytes) in strategies[v].iter().zip(&reduced.bytes[v]) {
                sum.add_mul(bytes as f64 / scale, x);
            }
        }
        model.add_constraint(sum.leq(row.limit_bytes as f64 / scale));
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
