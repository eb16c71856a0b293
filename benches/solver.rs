//! How the solver's time grows with the number of nodes, 10^2 to 10^6: `cargo bench --bench solver [-- MOST_NODES]`.
//!
//! Two families of synthetic problems with the structure of models. *Chain*: blocks of ten ops in a row, most of which
//! have a neighbour's layouts or pay for another, with a residual edge around each block, as a decoder has. *Branching*: each
//! block splits in four paths that join again, and one block in four is fed by an op some hundred ops before, as a U-Net or
//! a mixture has. Every op holds bytes from itself until its backward op, as activations are, and the limit is nine tenths of
//! what the cheapest choice without one holds.
//! It stops at a gap of 1e-4, or when its effort is spent.
//! One line a size: nodes, edges, seconds to reduce and in all, nodes left, gap.

use altiplano_solver::{Edge, Holding, Node, Options, Problem, SolveError, held, solve_watched};
use std::time::Instant;

/// A small generator of numbers that are the same everywhere (Steele, Lea & Flood 2014).
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

const BLOCK: usize = 10;
/// Layouts of a value: which of them a strategy gives decides what its edges cost.
const LAYOUTS: u64 = 6;

struct Maker {
    random: SplitMix,
    layouts: Vec<Vec<u64>>,
    problem: Problem,
}

impl Maker {
    /// An op with some strategies, each of which computes in one layout; heavy ops are the ones worth splitting.
    fn op(&mut self) -> usize {
        let strategies = 3 + self.random.below(6) as usize;
        let heavy = if self.random.below(4) == 0 { 1000 } else { 20 };
        // All ops have one layout in common, so that there is a choice.
        let layouts: Vec<u64> = (0..strategies).map(|s| if s == 0 { 2 } else { self.random.below(LAYOUTS) }).collect();
        let cost = layouts.iter().map(|&l| (heavy * (1 + l) + self.random.below(heavy)) as f64).collect();
        self.problem.nodes.push(Node { cost, holds: vec![] });
        self.layouts.push(layouts);
        self.problem.nodes.len() - 1
    }

    /// Layouts that agree cost nothing, others a collective; some pairs are not possible at all.
    fn edge(&mut self, from: usize, to: usize, bytes: u64) {
        let strict = self.random.below(3) == 0;
        let mut cost = vec![];
        for &a in &self.layouts[from] {
            for &b in &self.layouts[to] {
                let apart = a.abs_diff(b);
                let impossible = strict && apart > 2;
                cost.push(if impossible { f64::INFINITY } else { (apart * bytes) as f64 });
            }
        }
        self.problem.edges.push(Edge { from, to, cost });
    }

    fn finish(mut self) -> Problem {
        let nodes = self.layouts.len();
        for v in 0..nodes {
            let bytes = self.layouts[v].iter().map(|l| 64 * (8 - l) + self.random.below(8)).collect();
            self.problem.nodes[v].holds = vec![Holding { live: v as u32..(2 * nodes - v) as u32, bytes }];
        }
        self.problem
    }
}

fn chain(nodes: usize) -> Problem {
    let mut maker = Maker { random: SplitMix(1), layouts: vec![], problem: Problem::default() };
    for v in 0..nodes {
        maker.op();
        if v > 0 {
            maker.edge(v - 1, v, 30);
        }
        if v % BLOCK == 0 && v >= BLOCK {
            maker.edge(v - BLOCK, v, 30);
        }
    }
    maker.finish()
}

fn branching(nodes: usize) -> Problem {
    let mut maker = Maker { random: SplitMix(2), layouts: vec![], problem: Problem::default() };
    let mut join = maker.op();
    while maker.problem.nodes.len() + 13 <= nodes {
        let mut ends = vec![];
        for _ in 0..4 {
            let mut last = join;
            for _ in 0..3 {
                let next = maker.op();
                maker.edge(last, next, 20);
                last = next;
            }
            ends.push(last);
        }
        join = maker.op();
        ends.into_iter().for_each(|end| maker.edge(end, join, 20));
        if maker.random.below(4) == 0 && join > 600 {
            let far = join - 1 - maker.random.below(500) as usize;
            maker.edge(far, join, 10);
        }
    }
    maker.finish()
}

fn main() {
    // Cargo passes `--bench`.
    let most = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(1_000_000);
    println!("family,nodes,edges,stated_s,reduce_s,total_s,left,gap");
    for (family, make) in [("chain", chain as fn(usize) -> Problem), ("branching", branching)] {
        for nodes in [100, 316, 1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000] {
            if nodes > most {
                break;
            }
            let start = Instant::now();
            let mut problem = make(nodes);
            let stated_s = start.elapsed().as_secs_f64();
            let options = Options { effort: 5.0, gap: 1e-4, ..Options::default() };
            let free = match solve_watched(&problem, &options, &mut |_| {}) {
                Ok(free) => free,
                Err(error) => {
                    println!("{family},{nodes},{},{stated_s:.4},,,,{error}", problem.edges.len());
                    continue;
                }
            };
            let peak = held(&problem, &free.choice).into_iter().map(|(_, bytes)| bytes).max();
            problem.limit_bytes = peak.map(|peak| peak * 9 / 10);
            let start = Instant::now();
            let (mut reduce_s, mut left) = (0.0, 0);
            let solved = solve_watched(&problem, &options, &mut |now| {
                if now.phase == "reduce" {
                    (reduce_s, left) = (now.elapsed_s, now.nodes);
                }
            });
            let total_s = start.elapsed().as_secs_f64();
            let gap = match solved {
                Ok(solution) => format!("{:.1e}", solution.gap()),
                Err(SolveError::NotFound) => "none".into(),
                Err(error) => error.to_string(),
            };
            let edges = problem.edges.len();
            println!("{family},{nodes},{edges},{stated_s:.4},{reduce_s:.4},{total_s:.4},{left},{gap}");
        }
    }
}
