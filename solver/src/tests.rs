//! The solver against brute force on small random problems, and against what is known of large ones.

use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof};
use proptest::{collection, proptest};

use super::branch::{Budget, Incumbent};
use super::compact::{Assignment, Compact};
use super::condition::conditioned;
use super::eliminate::{Caps, Plan, Unary};
use super::network::Network;
use super::reduce::Reductions;
use super::table::{Eliminations, reduce_around, table_by};
use super::{
    BoundaryTable, Clock, Edge, Fault, Holding, Node, Options, Problem, SolveError, alternatives, boundary_table,
    cost_of, program, solve, tight_points,
};

/// Every assignment of the nodes, in order.
fn assignments(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let dims = dims.to_vec();
    (0..dims.iter().product::<usize>()).map(move |mut at| {
        let mut digits: Vec<usize> = dims.iter().rev().map(|d| (at % d, at /= d).0).collect();
        digits.reverse();
        digits
    })
}

fn dims(problem: &Problem) -> Vec<usize> {
    problem.nodes.iter().map(|node| node.cost.len()).collect()
}

/// Bytes held at a program point.
fn held(problem: &Problem, choice: &[usize], point: u32) -> u64 {
    let holdings = problem.nodes.iter().zip(choice).flat_map(|(node, &s)| node.holds.iter().map(move |h| (h, s)));
    holdings.filter(|(h, _)| h.live.contains(&point)).map(|(h, s)| h.bytes[s]).sum()
}

fn obeys(problem: &Problem, choice: &[usize]) -> bool {
    let last = problem.nodes.iter().flat_map(|n| &n.holds).map(|h| h.live.end).max().unwrap_or(0);
    problem.limit_bytes.is_none_or(|limit| (0..last).all(|point| held(problem, choice, point) <= limit))
}

/// Least cost by trying everything; infinite when there is nothing.
fn brute(problem: &Problem) -> f64 {
    let allowed = assignments(&dims(problem)).filter(|choice| obeys(problem, choice));
    allowed.map(|choice| cost_of(problem, &choice)).fold(f64::INFINITY, f64::min)
}

/// Costs that are not small in themselves may cancel, so that a sum near zero is compared by their size.
#[track_caller]
fn assert_close(a: f64, b: f64) {
    assert!(a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0), "{a} is not {b}");
}

/// Solves and compares with the best cost.
#[track_caller]
fn check(problem: &Problem, best: f64) {
    match solve(problem, &Options::default()) {
        Ok(solution) => {
            assert!(obeys(problem, &solution.choice));
            assert_close(cost_of(problem, &solution.choice), solution.cost);
            assert_close(solution.cost, best);
            // Pruning is within 1e-9 of the best cost, and sums are rounded.
            assert!(solution.gap() <= 1.1e-9 && solution.lower_bound <= best + 1e-12 * best.abs() + 1e-15);
        }
        Err(SolveError::Infeasible) => assert_eq!(best, f64::INFINITY),
        Err(SolveError::MemoryInfeasible { point, over_bytes }) => {
            assert_eq!(best, f64::INFINITY);
            let limit = problem.limit_bytes.expect("a limit that is broken");
            // No allowed choice holds less there.
            let allowed = assignments(&dims(problem)).filter(|choice| cost_of(problem, choice) < f64::INFINITY);
            let least = allowed.map(|choice| held(problem, &choice, point)).min();
            assert!(over_bytes > 0 && least.is_none_or(|least| least >= limit + over_bytes));
        }
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
fn check_alternatives(problem: &Problem, node: usize) {
    let Ok(solution) = solve(problem, &Options::default()) else { return };
    let found = alternatives(problem, &solution.choice, node, &Options::default()).expect("its own solution");
    assert_eq!(found.len(), problem.nodes[node].cost.len());
    for (s, alternative) in found.iter().enumerate() {
        let mut here = solution.choice.clone();
        here[node] = s;
        assert_eq!(alternative.over.is_none(), obeys(problem, &here));
        assert_close(alternative.in_place, cost_of(problem, &here));
        let with = assignments(&dims(problem)).filter(|choice| choice[node] == s && obeys(problem, choice));
        assert_close(alternative.whole, with.map(|choice| cost_of(problem, &choice)).fold(f64::INFINITY, f64::min));
    }
    let limit = problem.limit_bytes.expect("a limit");
    for (point, bytes) in tight_points(problem, &solution.choice, 0.0) {
        assert!(bytes == limit && held(problem, &solution.choice, point) == limit);
    }
}

/// A small generator of numbers that are the same everywhere (Steele, Lea & Flood 2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn table(&mut self, entries: usize) -> Vec<f64> {
        (0..entries).map(|_| self.unit()).collect()
    }
}

/// A problem with random costs over the given edges, every node with `strategies` strategies.
fn random(seed: u64, nodes: usize, strategies: usize, edges: impl IntoIterator<Item = (usize, usize)>) -> Problem {
    let mut random = SplitMix(seed);
    Problem {
        nodes: (0..nodes).map(|_| Node { cost: random.table(strategies), holds: vec![] }).collect(),
        edges: edges
            .into_iter()
            .map(|(from, to)| Edge { from, to, cost: random.table(strategies * strategies) })
            .collect(),
        limit_bytes: None,
    }
}

/// Costs of which some are forbidden, some tie and some are far apart.
fn cost() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => (0..1000_u32).prop_map(|c| f64::from(c) * 1e-6),
        4 => (0..4_u32).prop_map(f64::from),
        2 => Just(f64::INFINITY),
        1 => (-3..0_i32).prop_map(f64::from),
    ]
}

/// Up to 8 nodes of up to 5 strategies, held over up to three stretches of 12 points.
fn problem(limited: bool) -> impl Strategy<Value = Problem> {
    let sizes = collection::vec(1..=5_usize, 1..=8)
        .prop_filter("few enough to try", |sizes| sizes.iter().product::<usize>() <= 3000);
    sizes.prop_flat_map(move |sizes| {
        let n = sizes.len();
        let nodes: Vec<_> = (sizes.iter())
            .map(|&k| {
                let holding = (0..12_u32, 0..8_u32, collection::vec(0..6_u64, k))
                    .prop_map(|(first, length, bytes)| Holding { live: first..first + length, bytes });
                (collection::vec(cost(), k), collection::vec(holding, 0..=3))
                    .prop_map(|(cost, holds)| Node { cost, holds })
            })
            .collect();
        let edge = {
            let sizes = sizes.clone();
            (0..n, 1..n.max(2), 0..3_u8).prop_flat_map(move |(from, step, kind)| {
                let to = (from + step) % n;
                let (rows, width) = (sizes[from], sizes[to]);
                collection::vec(cost(), rows * width).prop_map(move |mut cost| {
                    for at in 0..cost.len() {
                        let (i, j) = (at / width, at % width);
                        if kind == 1 && cost.iter().all(|c| c.is_finite()) {
                            // A sum.
                            cost[at] = cost[i * width] + cost[j];
                        } else if kind == 2 && j != i % width {
                            // One node follows the other.
                            cost[at] = f64::INFINITY;
                        }
                    }
                    Edge { from, to, cost }
                })
            })
        };
        let edges = collection::vec(edge, if n > 1 { 0..=12 } else { 0..=0 });
        (nodes, edges, 0..24_u64).prop_map(move |(nodes, edges, limit)| Problem {
            nodes,
            edges,
            limit_bytes: limited.then_some(limit),
        })
    })
}

/// Each reduction alone, and all together.
fn reductions() -> Vec<Reductions> {
    let none = Reductions { arcs: false, dominance: false, separable: false, followers: false, elimination: false };
    vec![
        none,
        Reductions { arcs: true, ..none },
        Reductions { dominance: true, ..none },
        Reductions { separable: true, ..none },
        Reductions { followers: true, ..none },
        Reductions { elimination: true, ..none },
        Reductions::ALL,
    ]
}

/// Reduces, tries everything that is left, and compares with trying everything before: in cost, and as choices.
#[track_caller]
fn check_reduction(problem: &Problem, what: Reductions, best: f64) {
    let reduced = Network::new(problem).and_then(|mut network| network.reduce(what, &[]).map(|()| network.compacted()));
    let Ok(network) = reduced else {
        return assert_eq!(best, f64::INFINITY);
    };
    let of = Compact::new(&network);
    let sizes: Vec<usize> = (0..of.len()).map(|u| of.width(u)).collect();
    let mut found = Incumbent::none(1e-9);
    for x in assignments(&sizes) {
        found.offer(&network, &of, &Assignment::new(&of, x));
    }
    assert_close(found.cost, best);
    if let Some(choice) = found.choice {
        assert!(obeys(problem, &choice));
        assert_close(cost_of(problem, &choice), best);
        let there = network.lowered(&choice).expect("what was left is left");
        assert_close(of.cost_of(&there), best);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_brute_force(problem in problem(false)) {
        check(&problem, brute(&problem));
    }

    #[test]
    fn alternatives_equal_brute_force(problem in problem(true), node in 0..8_usize) {
        check_alternatives(&problem, node % problem.nodes.len());
    }

    #[test]
    fn table_equals_brute_force(problem in problem(false), first in 0..8_usize, more in 0..4_usize) {
        let n = problem.nodes.len();
        let keep: Vec<usize> = (0..more.min(n)).map(|i| (first + i * 2) % n).collect();
        let keep: Vec<usize> = (0..keep.len()).filter(|&i| !keep[..i].contains(&keep[i])).map(|i| keep[i]).collect();
        check_table(&problem, &keep);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_brute_force_within_memory(problem in problem(true)) {
        let best = brute(&problem);
        check(&problem, best);
        for what in reductions() {
            check_reduction(&problem, what, best);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn program_equals_brute_force(problem in problem(true), any in any::<bool>()) {
        let problem = Problem { limit_bytes: problem.limit_bytes.filter(|_| any), ..problem };
        let best = brute(&problem);
        let network = Network::new(&problem).and_then(|mut network| {
            let arcs = reductions()[1];
            network.reduce(arcs, &[]).map(|()| network)
        });
        match network {
            Ok(network) => {
                let mut found = Incumbent::none(1e-9);
                let bound = program::solve(&network, &mut found, 60.0);
                assert_close(found.cost, best);
                assert_eq!(bound, f64::INFINITY);
            }
            Err(_) => assert_eq!(best, f64::INFINITY),
        }
    }
}

#[track_caller]
fn check_table(problem: &Problem, keep: &[usize]) {
    let all = dims(problem);
    let kept_dims: Vec<usize> = keep.iter().map(|&v| all[v]).collect();
    let least = |kept: &[usize]| {
        let agrees = |choice: &Vec<usize>| keep.iter().zip(kept).all(|(&v, &s)| choice[v] == s);
        let costs = assignments(&all).filter(agrees).map(|choice| cost_of(problem, &choice));
        costs.fold(f64::INFINITY, f64::min)
    };
    let expected: Vec<(Vec<usize>, f64)> = assignments(&kept_dims).map(|kept| (kept.clone(), least(&kept))).collect();
    // Eliminated, eliminated once strategies of no use are gone, searched entry by entry.
    for (at_once, once_bounded) in [(true, true), (false, true), (false, false)] {
        let table = match table_by(problem, keep, &Options::default(), Eliminations { at_once, once_bounded }) {
            Ok(table) => table,
            Err(error) => {
                assert!(error == SolveError::Infeasible && expected.iter().all(|(_, least)| *least == f64::INFINITY));
                continue;
            }
        };
        assert_eq!(table.dims(), kept_dims);
        for (kept, least) in &expected {
            assert_close(table.cost(kept), *least);
            check_choice(problem, keep, &table, kept);
        }
    }
}

#[test]
fn table_of_a_dense_problem() {
    // Elimination would take more than bounding every entry, and bounds alone do not close what has no structure.
    check_table(&random(5, 8, 4, complete(8)), &[0, 7]);
    // Two leaves go before, so that what is left is numbered otherwise.
    let edges = complete(6).map(|(a, b)| (a + 2, b + 2)).chain([(0, 3), (1, 4)]);
    check_table(&random(6, 8, 4, edges), &[2, 7]);
}

#[test]
fn table_of_an_unrolled_loop() {
    // A state and a gate a turn, with one weight for all turns; entered by the first state, left by the last.
    let turns = 100;
    let (weight, state, gate) = (0, |t: usize| 1 + 2 * t, |t: usize| 2 + 2 * t);
    let turn = |t: usize| [(weight, gate(t)), (state(t), gate(t)), (state(t), state(t + 1)), (gate(t), state(t + 1))];
    let problem = random(11, 2 * turns + 2, 5, (0..turns).flat_map(turn));
    let keep = [state(0), state(turns)];
    let by = |at_once| {
        let eliminations = Eliminations { at_once, once_bounded: true };
        table_by(&problem, &keep, &Options::default(), eliminations).expect("everything is allowed")
    };
    let (eliminated, bounded) = (by(true), by(false));
    for kept in assignments(&[5, 5]) {
        assert_close(bounded.cost(&kept), eliminated.cost(&kept));
        check_choice(&problem, &keep, &bounded, &kept);
    }
}

/// Turns that share three nodes, of which two are all that the first and the last node meet.
fn loop_of_turns(seed: u64, turns: usize) -> (Problem, [usize; 2]) {
    let (weight, entering, leaving) = (1, 2, 3);
    let (state, gate) = (|t: usize| 4 + 2 * t, |t: usize| 5 + 2 * t);
    let turn = |t: usize| {
        let own = [(weight, gate(t)), (entering, gate(t)), (state(t), gate(t)), (state(t), leaving)];
        let on = [(state(t), state(t + 1)), (gate(t), state(t + 1))];
        own.into_iter().chain(if t + 1 < turns { &on[..] } else { &[] }.to_vec())
    };
    let last = 2 * turns + 4;
    let ends = [(0, entering), (leaving, last)];
    let mut problem = random(seed, last + 1, 4, (0..turns).flat_map(turn).chain(ends));
    // Every turn is like the first, and a pair is forbidden.
    for at in 6..6 * turns - 2 {
        problem.edges[at].cost = problem.edges[at % 6].cost.clone();
    }
    problem.edges[0].cost[5] = f64::INFINITY;
    (problem, [0, last])
}

#[test]
fn table_of_turns_that_share_hubs() {
    for (seed, turns) in [(21, 30), (22, 40), (23, 17)] {
        let (problem, keep) = loop_of_turns(seed, turns);
        let eliminated = boundary_table(&problem, &keep, &Options::default()).expect("little is forbidden");
        let mut network = Network::new(&problem).expect("nothing is held");
        let mut kept = keep.to_vec();
        reduce_around(&mut network, &mut kept).expect("little is forbidden");
        let clock = Clock::start(&Options::default()).expect("the limits are none");
        let mut budget = Budget { work: 1e9, clock: &clock };
        let found =
            conditioned(&network, &kept, &keep, &[4, 4], 1e-9, &mut budget).expect("hubs part the turns from the ends");
        for (ends, entry) in assignments(&[4, 4]).zip(&found.entries) {
            let (cost, walk) = entry.expect("nothing is infinite");
            assert_close(cost, eliminated.cost(&ends));
            assert_close(cost_of(&problem, &found.walks[walk].choice(&ends)), cost);
        }
        let bounded = Eliminations { at_once: false, once_bounded: false };
        let conditioned = table_by(&problem, &keep, &Options::default(), bounded).expect("little is forbidden");
        for ends in assignments(&[4, 4]) {
            assert_close(conditioned.cost(&ends), eliminated.cost(&ends));
            check_choice(&problem, &keep, &conditioned, &ends);
        }
        let least = assignments(&[4, 4]).map(|kept| eliminated.cost(&kept)).fold(f64::INFINITY, f64::min);
        check(&problem, least);
    }
}

#[test]
fn blocks_that_repeat_are_eliminated_once() {
    // A chain of equal blocks, each a complete graph of five nodes, of which the next has the last.
    let blocks = 20;
    let block = |b: usize| complete(5).map(move |(i, j)| (4 * b + i, 4 * b + j));
    let mut problem = random(31, 4 * blocks + 1, 6, (0..blocks).flat_map(block));
    for at in 10..problem.edges.len() {
        problem.edges[at].cost = problem.edges[at % 10].cost.clone();
    }
    for v in 5..problem.nodes.len() {
        problem.nodes[v].cost = problem.nodes[1 + (v - 1) % 4].cost.clone();
    }
    let mut kept = vec![0, 4 * blocks];
    let mut network = Network::new(&problem).expect("nothing is held");
    reduce_around(&mut network, &mut kept).expect("everything is allowed");
    let of = Compact::new(&network);
    let unary = Unary { offset: &of.offset, cost: &of.cost };
    let caps = Caps { entries: 1e6, work: f64::INFINITY };
    let each = Plan::new(&of, &kept, &caps).expect("blocks are small");
    let shared = each.clone().shared(&unary, f64::INFINITY).expect("so are their tables");
    assert!(4.0 * shared.work() < each.work(), "{} of {}", shared.work(), each.work());
    let (tables, shared_tables) = (each.evaluate(&unary), shared.evaluate(&unary));
    for ends in assignments(&[6, 6]) {
        let mut local = vec![0; of.len()];
        kept.iter().zip(&ends).for_each(|(&v, &s)| local[v] = s);
        assert_eq!(shared.rest(&unary, &shared_tables, &local), each.rest(&unary, &tables, &local));
        let mut other = local.clone();
        each.dive_into(&unary, &tables, &mut local);
        shared.dive_into(&unary, &shared_tables, &mut other);
        assert_eq!(local, other);
    }
}

#[track_caller]
fn check_choice(problem: &Problem, keep: &[usize], table: &BoundaryTable, kept: &[usize]) {
    let choice = table.choice(kept);
    assert!(keep.iter().zip(kept).all(|(&v, &s)| choice[v] == s));
    if table.cost(kept) < f64::INFINITY {
        assert_close(cost_of(problem, &choice), table.cost(kept));
    }
}

/// Viterbi's recursion, for problems whose edges join consecutive nodes.
fn chain_cost(problem: &Problem) -> f64 {
    let mut reach = problem.nodes[0].cost.clone();
    for (edge, node) in problem.edges.iter().zip(&problem.nodes[1..]) {
        let width = node.cost.len();
        let into = |j: usize| {
            reach.iter().enumerate().map(|(i, r)| r + edge.cost[i * width + j]).fold(f64::INFINITY, f64::min)
        };
        reach = (0..width).map(|j| node.cost[j] + into(j)).collect();
    }
    reach.into_iter().fold(f64::INFINITY, f64::min)
}

#[test]
fn long_chain() {
    let problem = random(1, 500, 6, (1..500).map(|v| (v - 1, v)));
    check(&problem, chain_cost(&problem));
    let table = boundary_table(&problem, &[499, 0], &Options::default()).expect("a chain can be eliminated");
    let least = assignments(&[6, 6]).map(|kept| table.cost(&kept)).fold(f64::INFINITY, f64::min);
    assert_close(least, chain_cost(&problem));
    check_choice(&problem, &[499, 0], &table, &[2, 3]);
}

#[test]
fn ladder() {
    // The same ladder as a chain of its rungs: two nodes of 3 strategies are one node of 9.
    let rungs = 40;
    let rails = (2..2 * rungs).map(|v| (v - 2, v));
    let problem = random(2, 2 * rungs, 3, rails.chain((0..rungs).map(|r| (2 * r, 2 * r + 1))));
    let split = |s: usize| (s / 3, s % 3);
    let rung = |r: usize| {
        let across =
            problem.edges.iter().find(|e| (e.from, e.to) == (2 * r, 2 * r + 1)).expect("every rung has an edge");
        let cost = |s| {
            let (a, b) = split(s);
            problem.nodes[2 * r].cost[a] + problem.nodes[2 * r + 1].cost[b] + across.cost[s]
        };
        Node { cost: (0..9).map(cost).collect(), holds: vec![] }
    };
    let along = |r: usize| {
        let rail = |v: usize| &problem.edges[v].cost;
        let cost = |at: usize| {
            let ((a, b), (c, d)) = (split(at / 9), split(at % 9));
            rail(2 * r)[a * 3 + c] + rail(2 * r + 1)[b * 3 + d]
        };
        Edge { from: r, to: r + 1, cost: (0..81).map(cost).collect() }
    };
    let chain = Problem {
        nodes: (0..rungs).map(rung).collect(),
        edges: (0..rungs - 1).map(along).collect(),
        limit_bytes: None,
    };
    check(&problem, chain_cost(&chain));
}

fn complete(nodes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..nodes).flat_map(move |a| (a + 1..nodes).map(move |b| (a, b)))
}

#[test]
fn dense() {
    // Elimination alone would need a table of 6^11 entries. The optimum is hidden: its pairs are the cheapest.
    let mut problem = random(3, 12, 6, complete(12));
    let planted: Vec<usize> = (0..12).map(|v| v * 5 % 6).collect();
    for edge in &mut problem.edges {
        edge.cost.iter_mut().for_each(|c| *c += 0.2);
        edge.cost[planted[edge.from] * 6 + planted[edge.to]] = 0.1;
    }
    problem.nodes.iter_mut().flat_map(|node| &mut node.cost).for_each(|c| *c = 0.0);
    check(&problem, 6.6);
}

#[test]
fn dense_without_structure() {
    // Any solution is within its own bound, and no single change betters a proven best one.
    let problem = random(4, 12, 6, complete(12));
    let solution = solve(&problem, &Options::default()).expect("everything is allowed");
    assert_close(cost_of(&problem, &solution.choice), solution.cost);
    assert!(solution.lower_bound <= solution.cost && solution.gap() < 0.2);
    for v in 0..12 {
        for s in 0..6 {
            let mut other = solution.choice.clone();
            other[v] = s;
            assert!(cost_of(&problem, &other) >= solution.lower_bound);
        }
    }
}

#[test]
fn memory_of_a_chain() {
    // A knapsack over time by dynamic programming on (strategy, bytes), for one row over the whole chain.
    let mut problem = random(5, 60, 5, (1..60).map(|v| (v - 1, v)));
    for (v, node) in problem.nodes.iter_mut().enumerate() {
        let bytes = (0..5).map(|s| (s * 7 + v as u64) % 5).collect();
        node.holds = vec![Holding { live: 0..1, bytes }];
    }
    for limit_bytes in [8, 30, 60] {
        problem.limit_bytes = Some(limit_bytes);
        check(&problem, chain_cost_within(&problem, limit_bytes as usize));
    }
}

fn chain_cost_within(problem: &Problem, limit: usize) -> f64 {
    let first = &problem.nodes[0];
    let strategies = first.cost.len();
    let mut reach = vec![vec![f64::INFINITY; limit + 1]; strategies];
    for s in 0..strategies {
        if first.holds[0].bytes[s] as usize <= limit {
            reach[s][first.holds[0].bytes[s] as usize] = first.cost[s];
        }
    }
    for (edge, node) in problem.edges.iter().zip(&problem.nodes[1..]) {
        let mut next = vec![vec![f64::INFINITY; limit + 1]; strategies];
        for (j, row) in next.iter_mut().enumerate() {
            let bytes = node.holds[0].bytes[j] as usize;
            for held in bytes..=limit {
                row[held] = (0..strategies)
                    .map(|i| reach[i][held - bytes] + edge.cost[i * strategies + j] + node.cost[j])
                    .fold(f64::INFINITY, f64::min);
            }
        }
        reach = next;
    }
    reach.into_iter().flatten().fold(f64::INFINITY, f64::min)
}

#[test]
fn same_answer_each_time() {
    // All costs tie, so the lowest strategies win.
    let mut problem = random(6, 20, 4, (1..20).map(|v| (v / 2, v)));
    problem.nodes.iter_mut().flat_map(|node| &mut node.cost).for_each(|c| *c = 1.0);
    problem.edges.iter_mut().flat_map(|edge| &mut edge.cost).for_each(|c| *c = 0.5);
    let solution = solve(&problem, &Options::default()).expect("everything is allowed");
    assert_eq!((solution.choice, solution.cost), (vec![0; 20], 20.0 + 0.5 * 19.0));
}

#[test]
fn nothing_to_choose() {
    let solution = solve(&Problem::default(), &Options::default());
    let solution = solution.expect("no node has nothing to pay");
    assert_eq!((solution.choice, solution.cost, solution.lower_bound), (vec![], 0.0, 0.0));
    let table = boundary_table(&random(7, 3, 2, [(0, 1), (1, 2)]), &[], &Options::default()).expect("allowed");
    assert_eq!(table.dims(), &[] as &[usize]);
    assert_close(table.cost(&[]), brute(&random(7, 3, 2, [(0, 1), (1, 2)])));
    assert_eq!(table.cost(&[0]), f64::INFINITY);
}

#[test]
fn memory_infeasible_names_the_point() {
    let node = |bytes: [u64; 2], live| Node {
        cost: vec![0.0, f64::INFINITY],
        holds: vec![Holding { live, bytes: bytes.to_vec() }],
    };
    let nodes = vec![node([3, 0], 0..4), node([4, 0], 2..6)];
    let problem = Problem { nodes, edges: vec![], limit_bytes: Some(6) };
    assert_eq!(solve(&problem, &Options::default()), Err(SolveError::MemoryInfeasible { point: 2, over_bytes: 1 }));
}

#[test]
fn memory_infeasible_minds_forbidden_pairs() {
    // Each node alone could hold 1 byte, but not both.
    let node = Node { cost: vec![0.0, 0.0], holds: vec![Holding { live: 0..1, bytes: vec![1, 2] }] };
    let edge = Edge { from: 0, to: 1, cost: vec![f64::INFINITY, 0.0, 0.0, 0.0] };
    let problem = Problem { nodes: vec![node.clone(), node], edges: vec![edge], limit_bytes: Some(2) };
    assert!(solve(&problem, &Options::default()).is_err());
}

/// A long graph whose cheap strategies hold more than fits together.
fn crowded(seed: u64, nodes: usize) -> Problem {
    let mut problem = random(seed, nodes, 6, (1..nodes).flat_map(|v| [(v - 1, v), (v.saturating_sub(5), v)]));
    problem.edges.retain(|e| e.from != e.to);
    let mut numbers = SplitMix(seed + 1);
    for (v, node) in problem.nodes.iter_mut().enumerate() {
        let bytes = node.cost.iter().map(|c| 1000 - (900.0 * c) as u64 + numbers.next() % 50).collect();
        let live = v as u32..(v as u64 + 5 + numbers.next() % 40) as u32;
        node.holds = vec![Holding { live, bytes }];
    }
    problem.limit_bytes = Some(12_000);
    problem
}

#[test]
fn answers_do_not_depend_on_threads() {
    let problem = crowded(11, 400);
    let options = Options { effort: 1.0, ..Options::default() };
    let solved = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
        pool.install(|| solve(&problem, &options)).expect("room for the least")
    };
    let one = solved(1);
    assert_eq!(one, solved(3));
    assert!(obeys(&problem, &one.choice) && one.lower_bound <= one.cost);
}

#[test]
fn limits_are_data() {
    let problem = random(8, 30, 8, complete(30));
    for options in [Options { time_limit_s: 0.0, ..Options::default() }, Options { effort: 0.0, ..Options::default() }]
    {
        let solution = solve(&problem, &options).expect("a first choice is always found");
        assert_close(cost_of(&problem, &solution.choice), solution.cost);
        assert!(solution.lower_bound > 0.0 && solution.lower_bound < solution.cost);
        assert!(solution.gap() > 0.0 && solution.gap() < 1.0);
    }
}

#[test]
fn malformed() {
    let good = random(9, 3, 2, [(0, 1), (1, 2)]);
    let with = |change: &dyn Fn(&mut Problem)| {
        let mut problem = good.clone();
        change(&mut problem);
        let table = boundary_table(&problem, &[0], &Options::default()).err();
        let error = solve(&problem, &Options::default()).err();
        assert_eq!(error, table);
        error.map(|error| match error {
            SolveError::Malformed { fault } => fault,
            other => panic!("{other}"),
        })
    };
    let held = |bytes: &[u64]| vec![Holding { live: 0..1, bytes: bytes.to_vec() }];
    assert_eq!(with(&|_| {}), None);
    assert_eq!(with(&|p| p.nodes[1].cost.clear()), Some(Fault::NoStrategies { node: 1 }));
    assert_eq!(with(&|p| p.nodes[2].holds = held(&[1])), Some(Fault::BytesLength { node: 2, strategies: 2, bytes: 1 }));
    assert_eq!(with(&|p| p.nodes[0].cost[1] = f64::NAN), Some(Fault::NodeCost { node: 0 }));
    assert_eq!(with(&|p| p.edges[1].to = 3), Some(Fault::EdgeNode { edge: 1, node: 3 }));
    assert_eq!(with(&|p| p.edges[1].to = 1), Some(Fault::SelfLoop { edge: 1, node: 1 }));
    assert_eq!(with(&|p| p.edges[0].cost = vec![0.0; 3]), Some(Fault::EdgeLength { edge: 0, entries: 3, expected: 4 }));
    assert_eq!(with(&|p| p.edges[0].cost[3] = f64::NEG_INFINITY), Some(Fault::EdgeCost { edge: 0 }));
    assert_eq!(with(&|p| p.nodes[0].holds = held(&[0, u64::MAX])), Some(Fault::BytesOverflow));
    let keep = |keep: &[usize]| boundary_table(&good, keep, &Options::default()).err();
    assert_eq!(keep(&[1, 1]), Some(SolveError::Malformed { fault: Fault::Keep { node: 1 } }));
    assert_eq!(keep(&[3]), Some(SolveError::Malformed { fault: Fault::Keep { node: 3 } }));
    let many = random(10, 30, 2, []);
    let all: Vec<usize> = (0..30).collect();
    let error = boundary_table(&many, &all, &Options::default()).err();
    assert!(matches!(error, Some(SolveError::Malformed { fault: Fault::KeepTooMany { .. } })));
    for options in
        [Options { time_limit_s: -1.0, ..Options::default() }, Options { effort: f64::NAN, ..Options::default() }]
    {
        assert_eq!(solve(&good, &options).err(), Some(SolveError::Malformed { fault: Fault::Limits }));
    }
}
