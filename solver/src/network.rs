//! A problem while it is being reduced: nodes lose strategies, edges move into node costs, nodes disappear. What was
//! done is kept as a trail, read backwards to give every node of the problem its strategy again.
//!
//! Time is compressed to *rows*: the program points at which more is held than at both their neighbours, of which only
//! those can bind that some choice overfills. A node's bytes are a *profile*: disjoint runs of rows with bytes per
//! strategy, less the least, which every choice holds and which is taken from the row's capacity.

use super::{Problem, SolveError};
use std::borrow::Cow;
use std::sync::Arc;

/// Bytes that a node's strategies hold in rows `first..end`, above the least of them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub first: u32,
    pub end: u32,
    pub bytes: Vec<i64>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct NetNode {
    pub cost: Vec<f64>,
    /// The strategies that are left, as the problem numbers them; ascending.
    pub label: Vec<u32>,
    /// Disjoint and ascending.
    pub profile: Vec<Run>,
    /// Live edges.
    pub edges: Vec<u32>,
    /// True if it has been decided, merged or eliminated.
    pub gone: bool,
    /// True if nothing has changed at it or its neighbours since no reduction applied.
    pub settled: bool,
}

/// Costs of two nodes together, row-major `[a][b]`. No two live edges join the same nodes.
#[derive(Clone, Debug)]
pub(super) struct NetEdge {
    pub a: u32,
    pub b: u32,
    pub cost: Vec<f64>,
    /// True if the costs are known to be no sum of costs of either end.
    pub joint: bool,
}

/// How a node that is gone gets its strategy.
#[derive(Clone, Debug)]
enum Step {
    Decided {
        node: u32,
        label: u32,
    },
    /// By the strategy of another: pairs of labels, ascending.
    Follows {
        node: u32,
        leader: u32,
        labels: Vec<(u32, u32)>,
    },
    /// The best given up to two neighbours, whose labels index the table.
    Best {
        node: u32,
        around: Vec<(u32, Vec<u32>)>,
        best: Vec<u32>,
    },
}

#[derive(Clone, Debug, Default)]
pub(super) struct Network {
    pub nodes: Vec<NetNode>,
    /// Edges that are gone have no costs.
    pub edges: Vec<NetEdge>,
    /// Cost of what has been decided.
    pub constant: f64,
    /// Bytes left in each row for what is above the least.
    pub capacity: Vec<i64>,
    /// A program point of each row.
    pub point: Vec<u32>,
    /// True if strategies that would overfill a row have been removed. The least of the rest may then exceed
    /// the original least.
    pub trimmed: bool,
    trail: Vec<Step>,
    origin: Option<Arc<Origin>>,
}

/// A network before its nodes were renumbered: its trail, and the number and labels of each remaining node.
#[derive(Clone, Debug)]
struct Origin {
    nodes: Vec<(u32, Vec<u32>)>,
    num_nodes: usize,
    trail: Vec<Step>,
    origin: Option<Arc<Origin>>,
}

impl Network {
    /// A network of these nodes, without edges.
    pub(crate) fn bare(capacity: Vec<i64>, point: Vec<u32>) -> Network {
        Network { capacity, point, ..Network::default() }
    }

    /// # Errors
    /// [`SolveError::MemoryInfeasible`] if the least that nodes hold is over the limit somewhere.
    pub(crate) fn new(problem: &Problem) -> Result<Network, SolveError> {
        Network::within(problem, problem.limit_bytes)
    }

    /// [`Network::new`] with another limit.
    ///
    /// # Errors
    /// As [`Network::new`].
    pub(crate) fn within(problem: &Problem, limit_bytes: Option<u64>) -> Result<Network, SolveError> {
        let mut points: Vec<u32> = vec![];
        let mut opens: Vec<u32> = vec![];
        let mut closes: Vec<u32> = vec![];
        if limit_bytes.is_some() {
            for holding in problem.nodes.iter().flat_map(|node| &node.holds) {
                if holding.live.start < holding.live.end && holding.bytes.iter().any(|&b| b > 0) {
                    opens.push(holding.live.start);
                    closes.push(holding.live.end);
                }
            }
        }
        opens.sort_unstable();
        opens.dedup();
        closes.sort_unstable();
        closes.dedup();
        // The held bytes grow between an opening and the next closing, so the last opening before each closing
        // has the most.
        let mut at = 0;
        for &close in &closes {
            let before = opens[at..].partition_point(|&open| open < close);
            if before > 0 {
                points.push(opens[at + before - 1]);
                at += before;
            }
        }
        let limit = limit_bytes.map_or(i64::MAX, |b| i64::try_from(b).unwrap_or(i64::MAX));
        let mut network = Network { capacity: vec![limit; points.len()], point: points, ..Network::default() };
        for node in &problem.nodes {
            let mut new =
                NetNode { cost: node.cost.clone(), label: (0..node.cost.len() as u32).collect(), ..NetNode::default() };
            for holding in &node.holds {
                let first = network.point.partition_point(|&p| p < holding.live.start) as u32;
                let end = network.point.partition_point(|&p| p < holding.live.end) as u32;
                if first < end {
                    let bytes = holding.bytes.iter().map(|&b| b as i64).collect();
                    new.profile = overlaid(&new.profile, &[Run { first, end, bytes }]);
                }
            }
            network.nodes.push(new);
        }
        for v in 0..network.nodes.len() {
            network.normalise(v);
        }
        let mut order: Vec<usize> = (0..problem.edges.len()).collect();
        let ends = |e: usize| {
            let edge = &problem.edges[e];
            (edge.from.min(edge.to), edge.from.max(edge.to))
        };
        order.sort_by_key(|&e| ends(e));
        for e in order {
            let edge = &problem.edges[e];
            let (a, b) = ends(e);
            let cost = if edge.from == a {
                edge.cost.clone()
            } else {
                transposed(&edge.cost, problem.nodes[edge.to].cost.len())
            };
            let again = network.edges.last_mut().filter(|last| (last.a as usize, last.b as usize) == (a, b));
            match again {
                Some(last) => last.cost.iter_mut().zip(cost).for_each(|(sum, c)| *sum += c),
                None => {
                    let id = network.edges.len() as u32;
                    network.nodes[a].edges.push(id);
                    network.nodes[b].edges.push(id);
                    network.edges.push(NetEdge { a: a as u32, b: b as u32, cost, joint: false });
                }
            }
        }
        network.drop_slack_rows()?;
        Ok(network)
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|&v| !self.nodes[v].gone)
    }

    pub(crate) fn width(&self, v: usize) -> usize {
        self.nodes[v].cost.len()
    }

    pub(crate) fn other(&self, edge: u32, v: usize) -> usize {
        let edge = &self.edges[edge as usize];
        (edge.a + edge.b) as usize - v
    }

    /// The costs of an edge with the strategies of `v` as rows.
    pub(crate) fn seen_from(&self, edge: u32, v: usize) -> Cow<'_, [f64]> {
        let edge = &self.edges[edge as usize];
        match edge.a as usize == v {
            true => Cow::Borrowed(&edge.cost),
            false => Cow::Owned(transposed(&edge.cost, self.width(edge.b as usize))),
        }
    }

    fn edge_between(&self, u: usize, w: usize) -> Option<u32> {
        let (few, far) = if self.nodes[u].edges.len() <= self.nodes[w].edges.len() { (u, w) } else { (w, u) };
        self.nodes[few].edges.iter().copied().find(|&e| self.other(e, few) == far)
    }

    /// Adds costs `[u][w]`, to the edge that is there or as a new one.
    fn add_edge(&mut self, u: usize, w: usize, cost: Vec<f64>) {
        let (a, b) = (u.min(w), u.max(w));
        let cost = if u == a { cost } else { transposed(&cost, self.width(w)) };
        match self.edge_between(a, b) {
            Some(e) => {
                let edge = &mut self.edges[e as usize];
                edge.joint = false;
                edge.cost.iter_mut().zip(cost).for_each(|(sum, c)| *sum += c);
            }
            None => {
                let id = self.edges.len() as u32;
                self.nodes[a].edges.push(id);
                self.nodes[b].edges.push(id);
                self.edges.push(NetEdge { a: a as u32, b: b as u32, cost, joint: false });
            }
        }
    }

    pub(crate) fn detach(&mut self, e: u32) -> Vec<f64> {
        let (a, b) = (self.edges[e as usize].a as usize, self.edges[e as usize].b as usize);
        self.nodes[a].edges.retain(|&x| x != e);
        self.nodes[b].edges.retain(|&x| x != e);
        std::mem::take(&mut self.edges[e as usize].cost)
    }

    /// Leaves the strategies marked.
    pub(crate) fn retain(&mut self, v: usize, keep: &[bool]) {
        self.nodes[v].settled = false;
        for at in 0..self.nodes[v].edges.len() {
            let e = self.nodes[v].edges[at] as usize;
            let other = self.other(e as u32, v);
            self.nodes[other].settled = false;
            let width = self.width(self.edges[e].b as usize);
            let by_row = self.edges[e].a as usize == v;
            self.edges[e].joint = false;
            let mut at = 0;
            self.edges[e].cost.retain(|_| {
                at += 1;
                keep[if by_row { (at - 1) / width } else { (at - 1) % width }]
            });
        }
        let node = &mut self.nodes[v];
        retain_marked(&mut node.cost, keep);
        retain_marked(&mut node.label, keep);
        node.profile.iter_mut().for_each(|run| retain_marked(&mut run.bytes, keep));
        self.normalise(v);
    }

    /// Takes what every strategy holds from the capacity, and joins runs that are alike.
    fn normalise(&mut self, v: usize) {
        let mut profile = std::mem::take(&mut self.nodes[v].profile);
        for run in &mut profile {
            let least = run.bytes.iter().copied().min().unwrap_or(0);
            if least != 0 {
                run.bytes.iter_mut().for_each(|b| *b -= least);
                self.capacity[run.first as usize..run.end as usize].iter_mut().for_each(|c| *c -= least);
            }
        }
        profile.retain(|run| run.bytes.iter().any(|&b| b != 0));
        profile.dedup_by(|next, last| {
            let alike = last.end == next.first && last.bytes == next.bytes;
            if alike {
                last.end = next.end;
            }
            alike
        });
        self.nodes[v].profile = profile;
    }

    /// Settles a node on a strategy (a position among those left): its edges become node costs.
    pub(crate) fn decide(&mut self, v: usize, strategy: usize) -> Vec<usize> {
        if self.width(v) > 1 {
            let keep: Vec<bool> = (0..self.width(v)).map(|s| s == strategy).collect();
            self.retain(v, &keep);
        }
        self.normalise(v);
        let mut around = vec![];
        while let Some(&e) = self.nodes[v].edges.last() {
            let other = self.other(e, v);
            let cost = self.detach(e);
            self.nodes[other].cost.iter_mut().zip(cost).for_each(|(c, add)| *c += add);
            around.push(other);
        }
        self.constant += self.nodes[v].cost[0];
        self.trail.push(Step::Decided { node: v as u32, label: self.nodes[v].label[0] });
        self.nodes[v].gone = true;
        around
    }

    /// Merges `v` into `leader`, whose strategies each leave it one: `of[s]`. The edge between them goes.
    pub(crate) fn follow(&mut self, v: usize, leader: usize, of: &[usize]) -> Vec<usize> {
        let mut around = vec![leader];
        let width = self.width(v);
        while let Some(&e) = self.nodes[v].edges.last() {
            let other = self.other(e, v);
            let table = self.seen_from(e, v).into_owned();
            self.detach(e);
            if other == leader {
                let costs: Vec<f64> = of.iter().enumerate().map(|(s, &f)| table[f * of.len() + s]).collect();
                self.nodes[leader].cost.iter_mut().zip(costs).for_each(|(c, add)| *c += add);
                continue;
            }
            let columns = table.len() / width;
            let rows = of.iter().flat_map(|&f| table[f * columns..][..columns].iter().copied()).collect();
            self.add_edge(leader, other, rows);
            around.push(other);
        }
        let node = std::mem::take(&mut self.nodes[v]);
        self.nodes[leader].cost.iter_mut().zip(of).for_each(|(c, &f)| *c += node.cost[f]);
        let runs: Vec<Run> =
            node.profile.iter().map(|run| Run { bytes: of.iter().map(|&f| run.bytes[f]).collect(), ..*run }).collect();
        self.nodes[leader].profile = overlaid(&self.nodes[leader].profile, &runs);
        let labels = self.nodes[leader].label.iter().zip(of).map(|(&l, &f)| (l, node.label[f])).collect();
        self.trail.push(Step::Follows { node: v as u32, leader: leader as u32, labels });
        self.nodes[v].gone = true;
        self.normalise(leader);
        around
    }

    /// Eliminates a node that holds nothing and has at most two neighbours, which get the least it can cost.
    pub(crate) fn eliminate(&mut self, v: usize) -> Vec<usize> {
        let around: Vec<usize> = self.nodes[v].edges.iter().map(|&e| self.other(e, v)).collect();
        let tables: Vec<Vec<f64>> = self.nodes[v].edges.iter().map(|&e| self.seen_from(e, v).into_owned()).collect();
        while let Some(&e) = self.nodes[v].edges.last() {
            self.detach(e);
        }
        let widths: Vec<usize> = around.iter().map(|&u| self.width(u)).collect();
        let (wu, ww) = (widths.first().copied().unwrap_or(1), widths.get(1).copied().unwrap_or(1));
        let mut least = vec![f64::INFINITY; wu * ww];
        let mut best = vec![0_u32; wu * ww];
        let nothing = [0.0];
        for (s, (&own, &label)) in self.nodes[v].cost.iter().zip(&self.nodes[v].label).enumerate() {
            let of_u = tables.first().map_or(&nothing[..], |t| &t[s * wu..][..wu]);
            let of_w = tables.get(1).map_or(&nothing[..], |t| &t[s * ww..][..ww]);
            let rows = least.chunks_exact_mut(ww).zip(best.chunks_exact_mut(ww));
            for ((least, best), add) in rows.zip(of_u) {
                let first = own + add;
                if first == f64::INFINITY {
                    continue;
                }
                for ((least, best), add) in least.iter_mut().zip(best).zip(of_w) {
                    let total = first + add;
                    if total < *least {
                        (*least, *best) = (total, label);
                    }
                }
            }
        }
        match around[..] {
            [] => self.constant += least[0],
            [u] => self.nodes[u].cost.iter_mut().zip(&least).for_each(|(c, l)| *c += l),
            [u, w, ..] => self.add_edge(u, w, least),
        }
        let labels = around.iter().map(|&u| (u as u32, self.nodes[u].label.clone())).collect();
        self.trail.push(Step::Best { node: v as u32, around: labels, best });
        self.nodes[v].gone = true;
        around
    }

    /// Forgets rows that no choice can overfill, and rows in which another is held to as much.
    ///
    /// # Errors
    /// A row that the least already overfills.
    pub(crate) fn drop_slack_rows(&mut self) -> Result<bool, SolveError> {
        let rows = self.capacity.len();
        let mut most = vec![0_i64; rows + 1];
        for node in self.nodes.iter().filter(|n| !n.gone) {
            for run in &node.profile {
                let b = run.bytes.iter().copied().max().unwrap_or(0);
                most[run.first as usize] += b;
                most[run.end as usize] -= b;
            }
        }
        let mut sum = 0;
        let mut keep = vec![false; rows];
        for r in 0..rows {
            sum += most[r];
            keep[r] = sum > self.capacity[r];
            if self.capacity[r] < 0 {
                if self.trimmed {
                    return Err(SolveError::Infeasible);
                }
                return Err(SolveError::MemoryInfeasible {
                    point: self.point[r],
                    over_bytes: self.capacity[r].unsigned_abs(),
                });
            }
        }
        self.drop_implied_rows(&mut keep);
        if keep.iter().all(|&k| k) {
            return Ok(false);
        }
        let mut place = vec![0_u32; rows + 1];
        for r in 0..rows {
            place[r + 1] = place[r] + keep[r] as u32;
        }
        retain_marked(&mut self.capacity, &keep);
        retain_marked(&mut self.point, &keep);
        for v in 0..self.nodes.len() {
            for run in &mut self.nodes[v].profile {
                run.first = place[run.first as usize];
                run.end = place[run.end as usize];
            }
            self.nodes[v].profile.retain(|run| run.first < run.end);
            self.normalise(v);
        }
        Ok(true)
    }

    /// Unmarks rows that another one implies: what is held at `r` is at most what is held at `k` and the sum of the largest
    /// differences between neighbouring rows on the way, so `k` implies `r` where the capacities differ by that much.
    fn drop_implied_rows(&self, keep: &mut [bool]) {
        let rows = self.capacity.len();
        // By how much any choice can hold more before than after the step from row `i` to `i + 1`, and the other way round.
        let mut falls = vec![0_i128; rows + 1];
        let mut rises = vec![0_i128; rows + 1];
        for node in self.nodes.iter().filter(|n| !n.gone) {
            let most = |run: &Run| i128::from(run.bytes.iter().copied().max().unwrap_or(0));
            let mut last: Option<&Run> = None;
            for run in &node.profile {
                match last.filter(|last| last.end == run.first) {
                    Some(last) => {
                        let differences = || last.bytes.iter().zip(&run.bytes);
                        falls[run.first as usize] += i128::from(differences().map(|(b, a)| b - a).max().unwrap_or(0));
                        rises[run.first as usize] += i128::from(differences().map(|(b, a)| a - b).max().unwrap_or(0));
                    }
                    None => {
                        if let Some(last) = last {
                            falls[last.end as usize] += most(last);
                        }
                        rises[run.first as usize] += most(run);
                    }
                }
                last = Some(run);
            }
            if let Some(last) = last {
                falls[last.end as usize] += most(last);
            }
        }
        // `r` is implied by a later `k` where the falls up to `k` and its capacity are no more than those at `r`.
        for (steps, backward) in [(&falls, false), (&rises, true)] {
            let mut least = i128::MAX;
            let mut sum = 0_i128;
            for at in 0..rows {
                let (r, step) = if backward { (at, at) } else { (rows - 1 - at, rows - at) };
                // Counted from the end that is looked at first, the sum falls on the way.
                if at > 0 {
                    sum -= steps[step];
                }
                if !keep[r] {
                    continue;
                }
                let reach = sum + i128::from(self.capacity[r]);
                if least <= reach {
                    keep[r] = false;
                } else {
                    least = reach;
                }
            }
        }
    }

    /// The same problem with only the nodes that are left, which are numbered anew.
    pub(crate) fn compacted(self) -> Network {
        let live: Vec<usize> = self.live().collect();
        if 2 * live.len() >= self.nodes.len() { self } else { self.numbered(&live) }
    }

    /// The same problem with only the nodes that are left, which are numbered in the order given.
    pub(crate) fn numbered(self, live: &[usize]) -> Network {
        let mut place = vec![u32::MAX; self.nodes.len()];
        live.iter().enumerate().for_each(|(i, &v)| place[v] = i as u32);
        let mut edge_place = vec![u32::MAX; self.edges.len()];
        let mut edges = vec![];
        for (e, edge) in self.edges.iter().enumerate().filter(|(_, edge)| !edge.cost.is_empty()) {
            edge_place[e] = edges.len() as u32;
            let (a, b) = (place[edge.a as usize], place[edge.b as usize]);
            edges.push(match a < b {
                true => NetEdge { a, b, cost: edge.cost.clone(), joint: edge.joint },
                false => {
                    let cost = transposed(&edge.cost, self.width(edge.b as usize));
                    NetEdge { a: b, b: a, cost, joint: false }
                }
            });
        }
        let nodes = live.iter().map(|&v| {
            let node = &self.nodes[v];
            NetNode {
                cost: node.cost.clone(),
                label: (0..node.cost.len() as u32).collect(),
                profile: node.profile.clone(),
                edges: node.edges.iter().map(|&e| edge_place[e as usize]).collect(),
                gone: false,
                settled: node.settled,
            }
        });
        let origin = Origin {
            nodes: live.iter().map(|&v| (v as u32, self.nodes[v].label.clone())).collect(),
            num_nodes: self.nodes.len(),
            trail: self.trail,
            origin: self.origin,
        };
        Network {
            nodes: nodes.collect(),
            edges,
            constant: self.constant,
            capacity: self.capacity,
            point: self.point,
            trimmed: self.trimmed,
            trail: vec![],
            origin: Some(Arc::new(origin)),
        }
    }

    /// The strategies (positions among those left) of the live nodes in a choice of the whole problem, in their order; none if
    /// it takes one that has been dropped.
    pub(crate) fn lowered(&self, choice: &[usize]) -> Option<Vec<usize>> {
        let labels = renumbered(self.origin.as_deref(), choice)?;
        self.live().map(|v| place_of(labels[v], &self.nodes[v].label, |&l| l)).collect()
    }

    /// Strategies of every node of the problem, given those of the live nodes (positions among those left).
    pub(crate) fn lift(&self, local: &[usize]) -> Vec<usize> {
        let mut choice: Vec<u32> = vec![0; self.nodes.len()];
        for v in self.live() {
            choice[v] = self.nodes[v].label[local[v]];
        }
        walk_back(&self.trail, &mut choice);
        let mut before = self.origin.as_deref();
        while let Some(origin) = before {
            let mut earlier: Vec<u32> = vec![0; origin.num_nodes];
            for ((v, labels), &at) in origin.nodes.iter().zip(&choice) {
                earlier[*v as usize] = labels[at as usize];
            }
            walk_back(&origin.trail, &mut earlier);
            choice = earlier;
            before = origin.origin.as_deref();
        }
        choice.into_iter().map(|s| s as usize).collect()
    }
}

/// The labels that a choice of the whole problem gives to nodes numbered anew; none if it takes what has been dropped.
fn renumbered(origin: Option<&Origin>, choice: &[usize]) -> Option<Vec<u32>> {
    let Some(origin) = origin else { return Some(choice.iter().map(|&s| s as u32).collect()) };
    let before = renumbered(origin.origin.as_deref(), choice)?;
    let at = |(v, labels): &(u32, Vec<u32>)| place_of(before[*v as usize], labels, |&l| l).map(|at| at as u32);
    origin.nodes.iter().map(at).collect()
}

/// The position of the item with a label in a list in the order of labels. Without gaps before it, that is the label itself.
fn place_of<T>(label: u32, items: &[T], label_of: impl Fn(&T) -> u32) -> Option<usize> {
    match items.get(label as usize) {
        Some(item) if label_of(item) == label => Some(label as usize),
        _ => items.binary_search_by_key(&label, label_of).ok(),
    }
}

fn walk_back(trail: &[Step], choice: &mut [u32]) {
    for step in trail.iter().rev() {
        match step {
            Step::Decided { node, label } => choice[*node as usize] = *label,
            Step::Follows { node, leader, labels } => {
                let at = place_of(choice[*leader as usize], labels, |l| l.0);
                choice[*node as usize] = at.map_or(0, |at| labels[at].1);
            }
            Step::Best { node, around, best } => {
                let index = around.iter().fold(0, |index, (u, labels)| {
                    index * labels.len() + place_of(choice[*u as usize], labels, |&l| l).unwrap_or(0)
                });
                choice[*node as usize] = best[index];
            }
        }
    }
}

fn retain_marked<T>(list: &mut Vec<T>, keep: &[bool]) {
    let mut marks = keep.iter();
    list.retain(|_| marks.next() == Some(&true));
}

/// A row-major table of the given width with rows and columns exchanged.
pub(super) fn transposed(table: &[f64], width: usize) -> Vec<f64> {
    let height = table.len() / width.max(1);
    let mut out = Vec::with_capacity(table.len());
    for j in 0..width {
        out.extend((0..height).map(|i| table[i * width + j]));
    }
    out
}

/// The sum of two profiles over the same strategies.
fn overlaid(one: &[Run], two: &[Run]) -> Vec<Run> {
    let mut cuts: Vec<u32> = one.iter().chain(two).flat_map(|run| [run.first, run.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let (mut i, mut j) = (0, 0);
    let mut out: Vec<Run> = vec![];
    for pair in cuts.windows(2) {
        let (first, end) = (pair[0], pair[1]);
        while i < one.len() && one[i].end <= first {
            i += 1;
        }
        while j < two.len() && two[j].end <= first {
            j += 1;
        }
        let a = one.get(i).filter(|run| run.first <= first);
        let b = two.get(j).filter(|run| run.first <= first);
        let bytes: Vec<i64> = match (a, b) {
            (Some(a), Some(b)) => a.bytes.iter().zip(&b.bytes).map(|(x, y)| x + y).collect(),
            (Some(only), None) | (None, Some(only)) => only.bytes.clone(),
            (None, None) => continue,
        };
        match out.last_mut() {
            Some(last) if last.end == first && last.bytes == bytes => last.end = end,
            _ => out.push(Run { first, end, bytes }),
        }
    }
    out
}
