//! The solver against brute force on small random problems, and against what is known of large ones.

use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof};
use proptest::{collection, proptest};

use super::eliminate::{Caps, Plan};
use super::reduce::Reduced;
use super::search::{Budget, Incumbent, Search};
use super::{
    BoundaryTable, Clock, Edge, Fault, MemoryRow, Node, Options, Problem, SolveError, boundary_table, cost_of, obeys,
    program, solve,
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

/// Least cost by trying everything; infinite when there is nothing.
fn brute(problem: &Problem) -> f64 {
    let allowed = assignments(&dims(problem)).filter(|choice| obeys(problem, choice));
    allowed.map(|choice| cost_of(problem, &choice)).fold(f64::INFINITY, f64::min)
}

#[track_caller]
fn assert_close(a: f64, b: f64) {
    assert!(a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} is not {b}");
}

/// Solves and compares with the best cost.
#[track_caller]
fn check(problem: &Problem, best: f64) {
    match solve(problem, &Options::default()) {
        Ok(solution) => {
            assert!(obeys(problem, &solution.choice));
            assert_close(cost_of(problem, &solution.choice), solution.cost);
            assert_close(solution.cost, best);
            assert_close(solution.lower_bound, best);
            assert!(solution.gap() <= 1e-9);
        }
        Err(SolveError::Infeasible) => assert_eq!(best, f64::INFINITY),
        Err(SolveError::MemoryInfeasible { row, limit_bytes, least_bytes }) => {
            assert_eq!(best, f64::INFINITY);
            assert_eq!(problem.memory[row].limit_bytes, limit_bytes);
            assert!(least_bytes > limit_bytes);
            // Some allowed choice needs these bytes or more in that row, and none needs less.
            let held =
                |choice: &[usize]| problem.memory[row].members.iter().map(|&v| problem.nodes[v].bytes[choice[v]]).sum();
            let allowed = assignments(&dims(problem)).filter(|choice| cost_of(problem, choice) < f64::INFINITY);
            let least: Option<u64> = allowed.map(|choice| held(&choice)).min();
            assert!(least.is_none_or(|least| least >= least_bytes));
        }
        Err(error) => panic!("{error}"),
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
        nodes: (0..nodes).map(|_| Node { cost: random.table(strategies), bytes: vec![] }).collect(),
        edges: edges
            .into_iter()
            .map(|(from, to)| Edge { from, to, cost: random.table(strategies * strategies) })
            .collect(),
        memory: vec![],
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

fn problem(rows: std::ops::Range<usize>) -> impl Strategy<Value = Problem> {
    let sizes = collection::vec(1..=4_usize, 1..=7);
    sizes.prop_flat_map(move |sizes| {
        let n = sizes.len();
        let nodes: Vec<_> = (sizes.iter())
            .map(|&k| {
                (collection::vec(cost(), k), collection::vec(0..6_u64, k))
                    .prop_map(|(cost, bytes)| Node { cost, bytes })
            })
            .collect();
        let edge = {
            let sizes = sizes.clone();
            (0..n, 1..n.max(2), any::<bool>()).prop_flat_map(move |(from, step, separable)| {
                let to = (from + step) % n;
                let (rows, width) = (sizes[from], sizes[to]);
                collection::vec(cost(), rows * width).prop_map(move |mut cost| {
                    if separable && cost.iter().all(|c| c.is_finite()) {
                        for at in 0..cost.len() {
                            cost[at] = cost[at / width * width] + cost[at % width];
                        }
                    }
                    Edge { from, to, cost }
                })
            })
        };
        let edges = collection::vec(edge, if n > 1 { 0..=12 } else { 0..=0 });
        let row = (0..16_u64, collection::vec(any::<bool>(), n)).prop_map(|(limit_bytes, on)| MemoryRow {
            limit_bytes,
            members: (0..on.len()).filter(|&v| on[v]).collect(),
        });
        (nodes, edges, collection::vec(row, rows.clone())).prop_map(|(nodes, edges, memory)| Problem {
            nodes,
            edges,
            memory,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_brute_force(problem in problem(0..1)) {
        check(&problem, brute(&problem));
    }

    #[test]
    fn equals_brute_force_within_memory(problem in problem(1..5)) {
        check(&problem, brute(&problem));
    }

    #[test]
    fn table_equals_brute_force(problem in problem(0..1), first in 0..7_usize, more in 0..4_usize) {
        let n = problem.nodes.len();
        let keep: Vec<usize> = (0..more.min(n)).map(|i| (first + i * 2) % n).collect();
        let keep: Vec<usize> = (0..keep.len()).filter(|&i| !keep[..i].contains(&keep[i])).map(|i| keep[i]).collect();
        check_table(&problem, &keep);
    }
}

/// Compares the least cost with each strategy with brute force.
#[track_caller]
fn check_marginals(problem: &Problem) {
    let Ok(reduced) = Reduced::new(problem, &[], &vec![true; problem.nodes.len()]) else {
        return assert_eq!(brute(problem), f64::INFINITY);
    };
    let plan = Plan::new(&reduced, &[], &Caps::for_seconds(1.0));
    let marginals = plan.marginals(&reduced.cost, &plan.evaluate(&reduced.cost));
    for (v, costs) in marginals.iter().enumerate() {
        assert_eq!(costs.len(), problem.nodes[v].cost.len());
        for (s, &least) in costs.iter().enumerate() {
            let with = assignments(&dims(problem)).filter(|choice| choice[v] == s);
            let expect = with.map(|choice| cost_of(problem, &choice)).fold(f64::INFINITY, f64::min);
            assert_close_to(least, expect);
        }
    }
}

/// As [`assert_close`], with room for the cancellation of sums that were added and taken away again.
#[track_caller]
fn assert_close_to(a: f64, b: f64) {
    assert!(a == b || (a - b).abs() <= 1e-9, "{a} is not {b}");
}

/// Solves with tables of at most `cap` entries, so that buckets are split, and compares with the best cost.
#[track_caller]
fn check_split(problem: &Problem, cap: f64) {
    let best = brute(problem);
    let rows: Vec<usize> = (0..problem.memory.len()).collect();
    let reduced = match Reduced::new(problem, &rows, &[]) {
        Ok(reduced) => reduced,
        Err(error) => return assert_eq!((error, best), (SolveError::Infeasible, f64::INFINITY)),
    };
    let caps = Caps { exact_entries: 0.0, split_entries: cap, work: 0.0, total_entries: 0.0 };
    let plan = Plan::new(&reduced, &[], &caps);
    let messages = plan.evaluate(&reduced.cost);
    // The bound is of the problem without memory, so it is also below the best within memory.
    assert!(messages.value <= best + 1e-9 * best.abs());
    let search = Search { reduced: &reduced, plan: &plan, messages: &messages, unary: &reduced.cost, offset: 0.0 };
    let clock = Clock::start(&Options { time_limit_s: f64::INFINITY }).expect("no limit is a limit");
    let mut found = Incumbent::none();
    let outcome = search.run(&mut found, &Budget { expansions: u64::MAX, clock: &clock });
    assert!(outcome.complete);
    assert_close(found.cost, best);
    // A search that is cut short has a bound below the best cost and not below where it started.
    let mut found = Incumbent { cost: best, choice: Some(vec![]) };
    let outcome = search.run(&mut found, &Budget { expansions: 1, clock: &clock });
    assert!(outcome.bound <= best && outcome.bound >= messages.value.min(best) - 1e-9);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn marginals_equal_brute_force(problem in problem(0..1)) {
        check_marginals(&problem);
    }

    #[test]
    fn split_search_equals_brute_force(problem in problem(0..4), cap in 1..100_u32) {
        check_split(&problem, f64::from(cap));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn program_equals_brute_force(problem in problem(0..4)) {
        let rows: Vec<usize> = (0..problem.memory.len()).collect();
        let best = brute(&problem);
        match Reduced::new(&problem, &rows, &[]) {
            Ok(reduced) => {
                let mut found = Incumbent::none();
                let outcome = program::solve(&reduced, &mut found, 60.0);
                assert_close(found.cost, best);
                assert!(outcome.complete);
                assert!(outcome.bound <= best + 1e-6 && (best == f64::INFINITY || outcome.bound >= best - 1e-6));
            }
            Err(error) => assert_eq!((error, best), (SolveError::Infeasible, f64::INFINITY)),
        }
    }
}

#[track_caller]
fn check_table(problem: &Problem, keep: &[usize]) {
    let all = dims(problem);
    let kept_dims: Vec<usize> = keep.iter().map(|&v| all[v]).collect();
    let table = match boundary_table(problem, keep, &Options::default()) {
        Ok(table) => table,
        Err(error) => {
            assert_eq!((error, brute(problem)), (SolveError::Infeasible, f64::INFINITY));
            return;
        }
    };
    assert_eq!(table.dims(), kept_dims);
    for kept in assignments(&kept_dims) {
        let agrees = |choice: &Vec<usize>| keep.iter().zip(&kept).all(|(&v, &s)| choice[v] == s);
        let costs = assignments(&all).filter(agrees).map(|choice| cost_of(problem, &choice));
        assert_close(table.cost(&kept), costs.fold(f64::INFINITY, f64::min));
        check_choice(problem, keep, &table, &kept);
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
        Node { cost: (0..9).map(cost).collect(), bytes: vec![] }
    };
    let along = |r: usize| {
        let rail = |v: usize| &problem.edges[v].cost;
        let cost = |at: usize| {
            let ((a, b), (c, d)) = (split(at / 9), split(at % 9));
            rail(2 * r)[a * 3 + c] + rail(2 * r + 1)[b * 3 + d]
        };
        Edge { from: r, to: r + 1, cost: (0..81).map(cost).collect() }
    };
    let chain =
        Problem { nodes: (0..rungs).map(rung).collect(), edges: (0..rungs - 1).map(along).collect(), memory: vec![] };
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
        node.bytes = (0..5).map(|s| (s * 7 + v as u64) % 5).collect();
    }
    for limit_bytes in [8, 30, 60] {
        problem.memory = vec![MemoryRow { limit_bytes, members: (0..60).collect() }];
        check(&problem, chain_cost_within(&problem, limit_bytes as usize));
    }
}

fn chain_cost_within(problem: &Problem, limit: usize) -> f64 {
    let first = &problem.nodes[0];
    let strategies = first.cost.len();
    let mut reach = vec![vec![f64::INFINITY; limit + 1]; strategies];
    for s in 0..strategies {
        if first.bytes[s] as usize <= limit {
            reach[s][first.bytes[s] as usize] = first.cost[s];
        }
    }
    for (edge, node) in problem.edges.iter().zip(&problem.nodes[1..]) {
        let mut next = vec![vec![f64::INFINITY; limit + 1]; strategies];
        for (j, row) in next.iter_mut().enumerate() {
            let bytes = node.bytes[j] as usize;
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
fn memory_infeasible_names_the_row() {
    let node = |bytes: [u64; 2]| Node { cost: vec![0.0, f64::INFINITY], bytes: bytes.to_vec() };
    let row = |limit_bytes| MemoryRow { limit_bytes, members: vec![0, 1] };
    let problem = Problem { nodes: vec![node([3, 0]), node([4, 0])], edges: vec![], memory: vec![row(9), row(6)] };
    let error = solve(&problem, &Options::default());
    assert_eq!(error, Err(SolveError::MemoryInfeasible { row: 1, limit_bytes: 6, least_bytes: 7 }));
}

#[test]
fn memory_infeasible_minds_forbidden_pairs() {
    // Each node alone could hold 1 byte, but not both.
    let node = Node { cost: vec![0.0, 0.0], bytes: vec![1, 2] };
    let edge = Edge { from: 0, to: 1, cost: vec![f64::INFINITY, 0.0, 0.0, 0.0] };
    let memory = vec![MemoryRow { limit_bytes: 2, members: vec![0, 1] }];
    let problem = Problem { nodes: vec![node.clone(), node], edges: vec![edge], memory };
    let error = solve(&problem, &Options::default());
    assert_eq!(error, Err(SolveError::MemoryInfeasible { row: 0, limit_bytes: 2, least_bytes: 3 }));
}

#[test]
fn time_limit_is_data() {
    let problem = random(8, 30, 8, complete(30));
    let solution = solve(&problem, &Options { time_limit_s: 0.0 }).expect("a first choice is always found");
    assert_close(cost_of(&problem, &solution.choice), solution.cost);
    assert!(solution.lower_bound > 0.0 && solution.lower_bound < solution.cost);
    assert!(solution.gap() > 0.0 && solution.gap() < 1.0);
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
    assert_eq!(with(&|_| {}), None);
    assert_eq!(with(&|p| p.nodes[1].cost.clear()), Some(Fault::NoStrategies { node: 1 }));
    assert_eq!(with(&|p| p.nodes[2].bytes = vec![1]), Some(Fault::BytesLength { node: 2, strategies: 2, bytes: 1 }));
    assert_eq!(with(&|p| p.nodes[0].cost[1] = f64::NAN), Some(Fault::NodeCost { node: 0 }));
    assert_eq!(with(&|p| p.edges[1].to = 3), Some(Fault::EdgeNode { edge: 1, node: 3 }));
    assert_eq!(with(&|p| p.edges[1].to = 1), Some(Fault::SelfLoop { edge: 1, node: 1 }));
    assert_eq!(with(&|p| p.edges[0].cost = vec![0.0; 3]), Some(Fault::EdgeLength { edge: 0, entries: 3, expected: 4 }));
    assert_eq!(with(&|p| p.edges[0].cost[3] = f64::NEG_INFINITY), Some(Fault::EdgeCost { edge: 0 }));
    let row = |members: &[usize]| vec![MemoryRow { limit_bytes: 1, members: members.to_vec() }];
    assert_eq!(with(&|p| p.memory = row(&[0, 5])), Some(Fault::RowNode { row: 0, node: 5 }));
    assert_eq!(with(&|p| p.memory = row(&[2, 0, 2])), Some(Fault::RowRepeats { row: 0, node: 2 }));
    assert_eq!(with(&|p| p.nodes.iter_mut().for_each(|n| n.bytes = vec![u64::MAX; 2])), Some(Fault::BytesOverflow));
    let keep = |keep: &[usize]| boundary_table(&good, keep, &Options::default()).err();
    assert_eq!(keep(&[1, 1]), Some(SolveError::Malformed { fault: Fault::Keep { node: 1 } }));
    assert_eq!(keep(&[3]), Some(SolveError::Malformed { fault: Fault::Keep { node: 3 } }));
    let many = random(10, 30, 2, []);
    let all: Vec<usize> = (0..30).collect();
    let error = boundary_table(&many, &all, &Options::default()).err();
    assert!(matches!(error, Some(SolveError::Malformed { fault: Fault::KeepTooMany { .. } })));
    let error = solve(&good, &Options { time_limit_s: -1.0 }).err();
    assert_eq!(error, Some(SolveError::Malformed { fault: Fault::TimeLimit }));
}
