//! Exact reductions of a problem before it is solved: forbidden strategies, parallel and separable edges, decided nodes
//! and dominated strategies go (Scholz & Eckstein 2002, and the value elimination of Goldstein 1994). They cost little
//! and every table of the elimination shrinks with each strategy dropped.

use super::{Problem, SolveError, bytes_of};

/// The cost of two nodes together, row-major `[a][b]`, with `a < b`; at most one per pair of nodes.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub a: usize,
    pub b: usize,
    pub cost: Vec<f64>,
}

/// A memory row over the strategies that remain.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Position in the problem's rows.
    pub row: usize,
    pub limit_bytes: u64,
    pub members: Vec<usize>,
}

/// A problem with the same nodes and fewer strategies. A node with one strategy left has no pairs.
#[derive(Clone, Debug)]
pub(super) struct Reduced {
    /// The strategies that remain of each node, as numbered in the problem, ascending.
    pub alive: Vec<Vec<usize>>,
    pub cost: Vec<Vec<f64>>,
    pub bytes: Vec<Vec<u64>>,
    pub pairs: Vec<Pair>,
    /// The pairs of each node.
    pub incident: Vec<Vec<usize>>,
    pub rows: Vec<Row>,
}

impl Reduced {
    /// Reduces `problem`, minding the memory rows listed in `rows` and leaving every strategy of the `pinned` nodes (none
    /// are pinned when it is empty).
    pub fn new(problem: &Problem, rows: &[usize], pinned: &[bool]) -> Result<Reduced, SolveError> {
        let n = problem.nodes.len();
        let rows: Vec<Row> = rows
            .iter()
            .map(|&row| Row {
                row,
                limit_bytes: problem.memory[row].limit_bytes,
                members: problem.memory[row].members.clone(),
            })
            .collect();
        let mut counted = vec![false; n];
        for &member in rows.iter().flat_map(|row| &row.members) {
            counted[member] = true;
        }
        let mut reduced = Reduced {
            alive: problem.nodes.iter().map(|node| (0..node.cost.len()).collect()).collect(),
            cost: problem.nodes.iter().map(|node| node.cost.clone()).collect(),
            // Bytes that no row counts are zero, so that they do not stand in the way of dominance.
            bytes: (problem.nodes.iter().zip(&counted))
                .map(|(node, &counted)| {
                    (0..node.cost.len()).map(|s| if counted { bytes_of(node, s) } else { 0 }).collect()
                })
                .collect(),
            pairs: merged(problem),
            incident: vec![vec![]; n],
            rows,
        };
        for (p, pair) in reduced.pairs.iter().enumerate() {
            reduced.incident[pair.a].push(p);
            reduced.incident[pair.b].push(p);
        }
        reduced.run(|v| pinned.get(v).copied().unwrap_or(false))?;
        reduced.compact();
        Ok(reduced)
    }

    /// Leaves only the strategies marked, and reduces again. At least one of each node is marked.
    pub fn restrict(&mut self, keep: &[Vec<bool>]) -> Result<(), SolveError> {
        let mut dirty = vec![false; self.cost.len()];
        for (v, keep) in keep.iter().enumerate().filter(|(_, keep)| keep.contains(&false)) {
            self.retain(v, keep, &mut dirty);
        }
        self.run(|_| false)?;
        self.compact();
        Ok(())
    }

    /// A choice of strategies as numbered in the problem among those that remain; none if some strategy does not.
    pub fn lower(&self, choice: &[usize]) -> Option<Vec<usize>> {
        let place = |(alive, s): (&Vec<usize>, &usize)| alive.binary_search(s).ok();
        self.alive.iter().zip(choice).map(place).collect()
    }

    /// The strategies, as numbered in the problem, of a choice among those that remain.
    pub fn lift(&self, local: &[usize]) -> Vec<usize> {
        self.alive.iter().zip(local).map(|(alive, &s)| alive[s]).collect()
    }

    pub fn cost_of(&self, local: &[usize]) -> f64 {
        let nodes: f64 = self.cost.iter().zip(local).map(|(cost, &s)| cost[s]).sum();
        let pair = |p: &Pair| p.cost[local[p.a] * self.cost[p.b].len() + local[p.b]];
        nodes + self.pairs.iter().map(pair).sum::<f64>()
    }

    /// What the cost becomes more by when node `v` goes to strategy `to`.
    pub fn change(&self, local: &[usize], v: usize, to: usize) -> f64 {
        let mut change = self.cost[v][to] - self.cost[v][local[v]];
        for &p in &self.incident[v] {
            let Pair { a, b, cost } = &self.pairs[p];
            let width = self.cost[*b].len();
            change += if *a == v {
                cost[to * width + local[*b]] - cost[local[v] * width + local[*b]]
            } else {
                cost[local[*a] * width + to] - cost[local[*a] * width + local[v]]
            };
        }
        change
    }

    /// Visits nodes until nothing changes, or each has been visited often enough that more would cost more than it saves.
    fn run(&mut self, pinned: impl Fn(usize) -> bool) -> Result<(), SolveError> {
        let n = self.cost.len();
        let mut dirty = vec![true; n];
        for _ in 0..ROUNDS {
            if !dirty.contains(&true) {
                break;
            }
            for v in 0..n {
                if std::mem::take(&mut dirty[v]) {
                    self.visit(v, pinned(v), &mut dirty)?;
                }
            }
        }
        // Nodes that became decided or strategies that became forbidden in the last round still have to be settled,
        // because the rest relies on decided nodes having no pairs.
        while let Some(v) = (0..n).find(|&v| self.cost[v].len() == 1 && !self.incident[v].is_empty()) {
            self.fold(v, &mut dirty);
        }
        Ok(())
    }

    fn visit(&mut self, v: usize, pinned: bool, dirty: &mut [bool]) -> Result<(), SolveError> {
        self.separate(v, dirty);
        if !pinned {
            let keep = self.worth_keeping(v);
            if !keep.contains(&true) {
                return Err(SolveError::Infeasible);
            }
            if keep.contains(&false) {
                self.retain(v, &keep, dirty);
            }
        }
        if self.cost[v].len() == 1 {
            self.fold(v, dirty);
        }
        Ok(())
    }

    /// Moves the edges of `v` that are a sum `f(i) + g(j)` into the node costs.
    fn separate(&mut self, v: usize, dirty: &mut [bool]) {
        for at in (0..self.incident[v].len()).rev() {
            let p = self.incident[v][at];
            let Pair { a, b, ref cost } = self.pairs[p];
            let width = self.cost[b].len();
            if !is_separable(cost, width) {
                continue;
            }
            let cost = std::mem::take(&mut self.pairs[p].cost);
            for (i, c) in self.cost[a].iter_mut().enumerate() {
                *c += cost[i * width];
            }
            for (j, c) in self.cost[b].iter_mut().enumerate() {
                *c += cost[j] - cost[0];
            }
            self.detach(p);
            dirty[a] = true;
            dirty[b] = true;
        }
    }

    /// Which strategies of `v` are allowed and not dominated: strategy `d` goes when some other costs no more than `d`
    /// whatever the neighbours choose, and holds no more bytes. Of two that are alike the first stays.
    fn worth_keeping(&self, v: usize) -> Vec<bool> {
        let cost = &self.cost[v];
        let bytes = &self.bytes[v];
        let count = cost.len();
        let tables: Vec<(usize, Vec<f64>)> = self.incident[v].iter().map(|&p| self.seen_from(p, v)).collect();
        let least: Vec<Vec<f64>> = (tables.iter())
            .map(|(width, table)| {
                table.chunks_exact(*width).map(|r| r.iter().copied().fold(f64::INFINITY, f64::min)).collect()
            })
            .collect();
        let mut keep: Vec<bool> =
            (0..count).map(|s| cost[s] < f64::INFINITY && least.iter().all(|l| l[s] < f64::INFINITY)).collect();
        // The least cost a strategy can have. Dominance needs this to be no more, because the largest difference of two
        // rows is at least the difference of their minima.
        let floor: Vec<f64> = (0..count).map(|s| cost[s] + least.iter().map(|l| l[s]).sum::<f64>()).collect();
        for dropped in (0..count).rev() {
            keep[dropped] = keep[dropped]
                && !(0..count).any(|other| {
                    let slack = 1e-12 * (floor[other].abs() + floor[dropped].abs());
                    other != dropped
                        && keep[other]
                        && bytes[other] <= bytes[dropped]
                        && floor[other] <= floor[dropped] + slack
                        && dominates(cost, &tables, &least, other, dropped)
                });
        }
        keep
    }

    /// The table of pair `p` with the strategies of `v` as its rows, and its width.
    pub fn seen_from(&self, p: usize, v: usize) -> (usize, Vec<f64>) {
        let Pair { a, b, cost } = &self.pairs[p];
        let (rows, width) = (self.cost[*a].len(), self.cost[*b].len());
        if *a == v { (width, cost.clone()) } else { (rows, transposed(cost, width)) }
    }

    fn retain(&mut self, v: usize, keep: &[bool], dirty: &mut [bool]) {
        for &p in &self.incident[v] {
            let width = self.cost[self.pairs[p].b].len();
            let pair = &mut self.pairs[p];
            let mut at = 0;
            let by_row = pair.a == v;
            pair.cost.retain(|_| {
                at += 1;
                keep[if by_row { (at - 1) / width } else { (at - 1) % width }]
            });
            dirty[pair.a + pair.b - v] = true;
        }
        let mut kept = keep.iter();
        self.cost[v].retain(|_| kept.next() == Some(&true));
        let mut kept = keep.iter();
        self.alive[v].retain(|_| kept.next() == Some(&true));
        let mut kept = keep.iter();
        self.bytes[v].retain(|_| kept.next() == Some(&true));
    }

    /// Adds the pairs of a decided node to its neighbours' costs.
    fn fold(&mut self, v: usize, dirty: &mut [bool]) {
        while let Some(&p) = self.incident[v].last() {
            let pair = &mut self.pairs[p];
            let other = pair.a + pair.b - v;
            let cost = std::mem::take(&mut pair.cost);
            for (c, add) in self.cost[other].iter_mut().zip(cost) {
                *c += add;
            }
            self.detach(p);
            dirty[other] = true;
        }
    }

    fn detach(&mut self, p: usize) {
        for v in [self.pairs[p].a, self.pairs[p].b] {
            self.incident[v].retain(|&q| q != p);
        }
    }

    /// Drops the pairs that were moved into node costs.
    fn compact(&mut self) {
        self.pairs.retain(|pair| !pair.cost.is_empty());
        self.incident.iter_mut().for_each(Vec::clear);
        for (p, pair) in self.pairs.iter().enumerate() {
            self.incident[pair.a].push(p);
            self.incident[pair.b].push(p);
        }
    }
}

/// How often all nodes are visited at most. Late rounds rarely find much.
const ROUNDS: usize = 6;

/// One pair per two nodes that are joined, in order.
fn merged(problem: &Problem) -> Vec<Pair> {
    let mut order: Vec<usize> = (0..problem.edges.len()).collect();
    let ends = |e: usize| {
        let edge = &problem.edges[e];
        (edge.from.min(edge.to), edge.from.max(edge.to))
    };
    order.sort_by_key(|&e| ends(e));
    let mut pairs: Vec<Pair> = vec![];
    for e in order {
        let edge = &problem.edges[e];
        let (a, b) = ends(e);
        let cost =
            if edge.from == a { edge.cost.clone() } else { transposed(&edge.cost, problem.nodes[edge.to].cost.len()) };
        match pairs.last_mut() {
            Some(last) if (last.a, last.b) == (a, b) => {
                last.cost.iter_mut().zip(cost).for_each(|(sum, c)| *sum += c);
            }
            _ => pairs.push(Pair { a, b, cost }),
        }
    }
    pairs
}

/// A row-major table of the given width with rows and columns exchanged.
pub(super) fn transposed(table: &[f64], width: usize) -> Vec<f64> {
    (0..width).flat_map(|j| table.iter().skip(j).step_by(width).copied()).collect()
}

/// Whether `table[i][j] = table[i][0] + table[0][j] - table[0][0]` up to the rounding of these three operations.
fn is_separable(table: &[f64], width: usize) -> bool {
    let first = &table[..width];
    let rounding = 4.0 * f64::EPSILON;
    first[0] < f64::INFINITY
        && table.chunks_exact(width).all(|row| {
            row.iter().zip(first).all(|(&c, &f)| {
                let expected = row[0] + f - first[0];
                // An infinity on either side makes this false.
                (c - expected).abs() <= rounding * (c.abs() + row[0].abs() + f.abs() + first[0].abs())
                    && c < f64::INFINITY
            })
        })
}

/// Whether `other` costs no more than `dropped` whatever the neighbours choose: the sum over edges of the largest
/// difference of their rows does not exceed zero. Every row has a finite entry.
fn dominates(cost: &[f64], tables: &[(usize, Vec<f64>)], least: &[Vec<f64>], other: usize, dropped: usize) -> bool {
    let mut worst = cost[other] - cost[dropped];
    // What the edges not yet summed add at least.
    let mut rest: f64 = least.iter().map(|l| l[other] - l[dropped]).sum();
    let slack = 1e-12 * least.iter().map(|l| l[other].abs() + l[dropped].abs()).sum::<f64>();
    for ((width, table), l) in tables.iter().zip(least) {
        rest -= l[other] - l[dropped];
        let mine = &table[other * width..][..*width];
        let theirs = &table[dropped * width..][..*width];
        let mut largest = f64::NEG_INFINITY;
        for (m, t) in mine.iter().zip(theirs) {
            // Where both are forbidden the difference is not a number and compares false, as it should.
            let difference = m - t;
            if difference > largest {
                largest = difference;
                if worst + largest + rest > slack {
                    return false;
                }
            }
        }
        worst += largest;
    }
    worst <= 0.0
}
