//! A reduced network as flat tables, for everything that goes over it many times, and choices on it.

use super::network::{Network, Run, transposed};
use std::cmp::Reverse;

/// Nodes are numbered as they come in the network; strategies by their positions among those left.
#[derive(Clone, Debug)]
pub(super) struct Compact {
    /// The network's number of each node.
    pub node: Vec<usize>,
    /// Where the strategies of each node begin in flat tables; one more than there are nodes.
    pub offset: Vec<usize>,
    pub cost: Vec<f64>,
    /// The network's label of each strategy, flat.
    pub label: Vec<u32>,
    pub profile: Vec<Vec<Run>>,
    pub edges: Vec<CompactEdge>,
    /// The edges of each node, and whether it is their first end.
    pub incident: Vec<Vec<(u32, bool)>>,
    pub capacity: Vec<i64>,
    pub point: Vec<u32>,
    pub constant: f64,
    /// Entries of all edges.
    pub entries: usize,
}

#[derive(Clone, Debug)]
pub(super) struct CompactEdge {
    pub a: u32,
    pub b: u32,
    /// Costs by strategy of `a`, then of `b`, and the other way round: the inner loop always runs over neighbours in memory.
    pub ab: Vec<f64>,
    pub ba: Vec<f64>,
}

impl CompactEdge {
    pub(crate) fn other(&self, is_first: bool) -> usize {
        if is_first { self.b as usize } else { self.a as usize }
    }

    /// The costs of one end's strategies if the other end has `strategy`. `width` is their number.
    pub(crate) fn given(&self, is_first: bool, strategy: usize, width: usize) -> &[f64] {
        let table = if is_first { &self.ba } else { &self.ab };
        &table[strategy * width..][..width]
    }
}

impl Compact {
    pub(crate) fn new(network: &Network) -> Compact {
        let node: Vec<usize> = network.live().collect();
        let mut place = vec![u32::MAX; network.nodes.len()];
        node.iter().enumerate().for_each(|(i, &v)| place[v] = i as u32);
        let mut offset = vec![0];
        let mut cost = vec![];
        let mut label = vec![];
        for &v in &node {
            label.extend_from_slice(&network.nodes[v].label);
            cost.extend_from_slice(&network.nodes[v].cost);
            offset.push(cost.len());
        }
        let mut incident = vec![vec![]; node.len()];
        let mut edges = vec![];
        for edge in network.edges.iter().filter(|e| !e.cost.is_empty()) {
            let (a, b) = (place[edge.a as usize], place[edge.b as usize]);
            incident[a as usize].push((edges.len() as u32, true));
            incident[b as usize].push((edges.len() as u32, false));
            let ba = transposed(&edge.cost, network.width(edge.b as usize));
            edges.push(CompactEdge { a, b, ab: edge.cost.clone(), ba });
        }
        Compact {
            offset,
            cost,
            label,
            profile: node.iter().map(|&v| network.nodes[v].profile.clone()).collect(),
            entries: edges.iter().map(|e| e.ab.len()).sum(),
            edges,
            incident,
            capacity: network.capacity.clone(),
            point: network.point.clone(),
            constant: network.constant,
            node,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.node.len()
    }

    pub(crate) fn width(&self, u: usize) -> usize {
        self.offset[u + 1] - self.offset[u]
    }

    /// Nodes that a great many share, as the turns of an unrolled loop share its weights; those with most neighbours first. Cycles
    /// through them keep elimination from small tables and messages from good bounds.
    pub(crate) fn hubs(&self) -> Vec<usize> {
        let mut hubs: Vec<usize> = (0..self.len()).filter(|&u| self.incident[u].len() >= HUB).collect();
        hubs.sort_by_key(|&u| (Reverse(self.incident[u].len()), self.width(u), u));
        hubs
    }

    pub(crate) fn labels(&self, u: usize) -> &[u32] {
        &self.label[self.offset[u]..self.offset[u + 1]]
    }

    pub(crate) fn cost_of(&self, x: &[usize]) -> f64 {
        let own: f64 = x.iter().zip(&self.offset).map(|(s, o)| self.cost[o + s]).sum();
        let edge = |e: &CompactEdge| e.ab[x[e.a as usize] * self.width(e.b as usize) + x[e.b as usize]];
        self.constant + own + self.edges.iter().map(edge).sum::<f64>()
    }

    /// The cost of each strategy of `u`, with its neighbours unchanged.
    fn costs_at(&self, x: &[usize], u: usize, into: &mut Vec<f64>) {
        into.clear();
        into.extend_from_slice(&self.cost[self.offset[u]..self.offset[u + 1]]);
        for &(e, is_first) in &self.incident[u] {
            let edge = &self.edges[e as usize];
            let row = edge.given(is_first, x[edge.other(is_first)], into.len());
            into.iter_mut().zip(row).for_each(|(c, add)| *c += add);
        }
    }
}

/// A choice on a [`Compact`] and what follows from it.
#[derive(Clone, Debug)]
pub(super) struct Assignment {
    pub x: Vec<usize>,
    /// Bytes above the capacity of each row, negative where some are left.
    pub over: Vec<i64>,
    pub cost: f64,
}

impl Assignment {
    pub(crate) fn new(of: &Compact, x: Vec<usize>) -> Assignment {
        let mut change = vec![0_i64; of.capacity.len() + 1];
        for (&s, profile) in x.iter().zip(&of.profile) {
            for run in profile {
                change[run.first as usize] += run.bytes[s];
                change[run.end as usize] -= run.bytes[s];
            }
        }
        let mut held = 0;
        let over = of.capacity.iter().zip(&change).map(|(c, change)| {
            held += change;
            held - c
        });
        Assignment { over: over.collect(), cost: of.cost_of(&x), x }
    }

    pub(crate) fn fits(&self) -> bool {
        self.over.iter().all(|&o| o <= 0)
    }

    /// True if node `u` can take strategy `s` without adding bytes to a row that is, or would become, overfull.
    fn allows(&self, of: &Compact, u: usize, s: usize) -> bool {
        of.profile[u].iter().all(|run| {
            let more = run.bytes[s] - run.bytes[self.x[u]];
            more <= 0 || self.over[run.first as usize..run.end as usize].iter().all(|o| o + more <= 0)
        })
    }

    fn set(&mut self, of: &Compact, u: usize, s: usize, change: f64) {
        for run in &of.profile[u] {
            let more = run.bytes[s] - run.bytes[self.x[u]];
            self.over[run.first as usize..run.end as usize].iter_mut().for_each(|o| *o += more);
        }
        self.x[u] = s;
        self.cost += change;
    }

    /// Changes one node at a time to what costs less and fits, until nothing does.
    pub(crate) fn improve(&mut self, of: &Compact) {
        let mut costs = vec![];
        let mut dirty = vec![true; self.x.len()];
        while dirty.contains(&true) {
            let mut any = false;
            for u in 0..self.x.len() {
                if !std::mem::take(&mut dirty[u]) {
                    continue;
                }
                of.costs_at(&self.x, u, &mut costs);
                let now = costs[self.x[u]];
                let mut order: Vec<usize> = (0..costs.len()).filter(|&s| costs[s] < now).collect();
                order.sort_by(|&a, &b| costs[a].total_cmp(&costs[b]));
                if let Some(&s) = order.iter().find(|&&s| self.allows(of, u, s)) {
                    self.set(of, u, s, costs[s] - now);
                    any = true;
                    of.incident[u].iter().for_each(|&(e, first)| dirty[of.edges[e as usize].other(first)] = true);
                }
            }
            if !any {
                break;
            }
        }
        // Differences of large costs: once more from the tables.
        self.cost = of.cost_of(&self.x);
    }

    /// Makes room in overfull rows, fullest first, by the changes of one node that cost least per byte. Whether all fits.
    pub(crate) fn repair(&mut self, of: &Compact) -> bool {
        let mut costs = vec![];
        for _ in 0..4 * REPAIR_ROWS {
            let Some((row, &most)) = self.over.iter().enumerate().max_by_key(|&(r, &o)| (o, Reverse(r))) else {
                return true;
            };
            if most <= 0 {
                self.cost = of.cost_of(&self.x);
                return true;
            }
            let mut moves: Vec<(f64, usize, usize, f64)> = vec![];
            for u in 0..self.x.len() {
                let at = of.profile[u].partition_point(|run| run.end as usize <= row);
                let Some(run) = of.profile[u].get(at).filter(|run| run.first as usize <= row) else { continue };
                let held = run.bytes[self.x[u]];
                if held == 0 {
                    continue;
                }
                of.costs_at(&self.x, u, &mut costs);
                let now = costs[self.x[u]];
                let better = (0..costs.len()).filter(|&s| run.bytes[s] < held && costs[s] < f64::INFINITY);
                let rated = better.map(|s| ((costs[s] - now) / (held - run.bytes[s]) as f64, u, s, costs[s] - now));
                moves.extend(rated.min_by(|a, b| a.0.total_cmp(&b.0)));
            }
            moves.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let mut any = false;
            // Neighbours change one another's prices, so few at a time.
            let few = moves.len().div_ceil(8);
            for &(_, u, s, change) in moves.iter().take(few) {
                if self.over[row] <= 0 {
                    break;
                }
                if self.allows(of, u, s) {
                    self.set(of, u, s, change);
                    any = true;
                }
            }
            if !any {
                // Nothing without filling another row: the first that helps here, for what it costs there.
                let Some(&(_, u, s, change)) = moves.first() else { return false };
                self.set(of, u, s, change);
            }
        }
        false
    }
}

/// Neighbours that make a hub.
const HUB: usize = 16;
/// Rows that are mended at most, by four times.
const REPAIR_ROWS: usize = 100;
