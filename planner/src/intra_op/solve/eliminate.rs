//! Bucket elimination (Dechter 1999): nodes go one by one, each replaced by a table over its neighbours of the least it
//! can add. Degrees 0, 1 and 2 are the classic PBQP reductions and any other degree is the same loop. Where a table would
//! pass the cap, the node's tables are split in groups that are minimised apart, which gives a lower bound ("mini-buckets",
//! Dechter & Rish, J. ACM 2003) and, read backwards, the guide of the search (Kask & Dechter, Artificial Intelligence 2001).

use super::reduce::{Reduced, transposed};

/// Entries of the largest table that is built, when time allows.
pub(super) const TABLE_ENTRIES: usize = 4_000_000;

/// What an elimination may use.
#[derive(Clone, Debug)]
pub(super) struct Caps {
    /// Entries of one table when nothing is split.
    pub exact_entries: f64,
    /// Entries of one table when some bucket has to be split.
    pub split_entries: f64,
    /// Additions of one evaluation.
    pub work: f64,
    /// Entries of all tables together.
    pub total_entries: f64,
}

impl Caps {
    /// An elimination is never interrupted, so a short time limit means less work; a core does about 1e9 additions per
    /// second.
    pub fn for_seconds(time_limit_s: f64) -> Caps {
        let work = (2e8 * time_limit_s).clamp(2e7, 1e9);
        Caps {
            exact_entries: TABLE_ENTRIES as f64,
            split_entries: (work / 1e3).min(2.5e5),
            work,
            total_entries: 8.0 * TABLE_ENTRIES as f64,
        }
    }
}

/// The order of an elimination and where each table goes; good for any node costs over the same pairs.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Whether no bucket was split: the bound is then the minimum.
    pub exact: bool,
    sizes: Vec<usize>,
    /// In order of elimination. The nodes to keep have none.
    buckets: Vec<Bucket>,
    /// Tables of the pairs, the node that is eliminated first slowest.
    pairs: Vec<Vec<f64>>,
    /// Where the tables over kept nodes alone (or over none) are.
    rest: Vec<Input>,
    keep: Vec<usize>,
    messages: usize,
}

#[derive(Clone, Debug)]
struct Bucket {
    node: usize,
    groups: Vec<Group>,
}

/// A table and the nodes it is over, in order of elimination.
type Table = (Source, Vec<usize>);

/// Tables that are added and minimised together.
#[derive(Clone, Debug)]
struct Group {
    inputs: Vec<Input>,
    /// The other nodes, in order of elimination.
    scope: Vec<usize>,
    message: usize,
    entries: usize,
    /// Whether the node's own cost is added here: true for the first group only.
    with_unary: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Pair(usize),
    Message(usize),
}

/// A table as a group reads it.
#[derive(Clone, Debug)]
struct Input {
    source: Source,
    /// Entries between two strategies of the eliminated node; zero in `Plan::rest`.
    node_stride: usize,
    /// The nodes of the table that are not eliminated here, with their strides, and their position in the group's scope.
    strides: Vec<(usize, usize, usize)>,
}

/// The tables that replaced the nodes, for one set of node costs.
#[derive(Clone, Debug)]
pub(super) struct Messages {
    tables: Vec<Vec<f64>>,
    /// The least cost (a lower bound of it when the plan is not exact). With kept nodes, what does not depend on them.
    pub value: f64,
}

impl Plan {
    /// Orders the elimination of all nodes but `keep`.
    pub fn new(reduced: &Reduced, keep: &[usize], caps: &Caps) -> Plan {
        let order = Order::new(reduced, keep);
        let fits = order.largest <= caps.exact_entries && order.work <= caps.work && order.total <= caps.total_entries;
        let cap = if fits { f64::INFINITY } else { caps.split_entries };
        let n = reduced.cost.len();
        let sizes: Vec<usize> = reduced.cost.iter().map(Vec::len).collect();
        let mut position = vec![0; n];
        for (at, &v) in order.nodes.iter().chain(keep).enumerate() {
            position[v] = at;
        }
        // Tables wait at the node of theirs that is eliminated first; those over kept nodes alone wait in `rest`.
        let mut waiting: Vec<Vec<Table>> = vec![vec![]; n];
        let mut rest: Vec<Table> = vec![];
        let mut pairs = Vec::with_capacity(reduced.pairs.len());
        let eliminated = order.nodes.len();
        for (p, pair) in reduced.pairs.iter().enumerate() {
            let swap = position[pair.a] > position[pair.b];
            let (first, second) = if swap { (pair.b, pair.a) } else { (pair.a, pair.b) };
            pairs.push(if swap { transposed(&pair.cost, sizes[pair.b]) } else { pair.cost.clone() });
            let table = (Source::Pair(p), vec![first, second]);
            if position[first] < eliminated { waiting[first].push(table) } else { rest.push(table) }
        }
        let mut plan =
            Plan { exact: true, sizes, buckets: vec![], pairs, rest: vec![], keep: keep.to_vec(), messages: 0 };
        for &node in &order.nodes {
            let tables = std::mem::take(&mut waiting[node]);
            let groups = plan.groups(node, tables, &position, cap);
            plan.exact &= groups.len() == 1;
            for group in &groups {
                let table = (Source::Message(group.message), group.scope.clone());
                match group.scope.first() {
                    Some(&next) if position[next] < eliminated => waiting[next].push(table),
                    Some(_) => rest.push(table),
                    // A message over nothing is a constant, which `evaluate` adds up.
                    None => {}
                }
            }
            plan.buckets.push(Bucket { node, groups });
        }
        plan.rest = rest.into_iter().map(|(source, scope)| plan.input(source, &scope, None, &scope)).collect();
        plan
    }

    /// Splits the tables that wait at a node in groups within the cap, widest first, each in the first group it fits.
    fn groups(&mut self, node: usize, mut tables: Vec<Table>, position: &[usize], cap: f64) -> Vec<Group> {
        let mut split: Vec<(Vec<usize>, Vec<Table>)> = vec![];
        tables.sort_by_key(|(_, scope)| std::cmp::Reverse(scope.len()));
        for (source, scope) in tables {
            let joined = |with: &[usize]| {
                let mut union: Vec<usize> = with.iter().chain(&scope[1..]).copied().collect();
                union.sort_by_key(|&v| position[v]);
                union.dedup();
                union
            };
            let fitting = split.iter().position(|(with, _)| {
                let union = joined(with);
                union.len() == with.len() || self.entries(&union) * self.sizes[node] as f64 <= cap
            });
            match fitting {
                Some(at) => {
                    split[at].0 = joined(&split[at].0);
                    split[at].1.push((source, scope));
                }
                None => split.push((joined(&[]), vec![(source, scope)])),
            }
        }
        if split.is_empty() {
            split.push((vec![], vec![]));
        }
        let groups = split.into_iter().enumerate().map(|(at, (scope, members))| {
            self.messages += 1;
            Group {
                inputs: members.iter().map(|(source, own)| self.input(*source, own, Some(node), &scope)).collect(),
                message: self.messages - 1,
                entries: scope.iter().map(|&v| self.sizes[v]).product(),
                with_unary: at == 0,
                scope,
            }
        });
        groups.collect()
    }

    fn entries(&self, scope: &[usize]) -> f64 {
        scope.iter().map(|&v| self.sizes[v] as f64).product()
    }

    /// How a table over `own` is read where the nodes of `scope` vary, after `node` where one is eliminated.
    fn input(&self, source: Source, own: &[usize], node: Option<usize>, scope: &[usize]) -> Input {
        let mut stride = 1;
        let mut strides = vec![];
        let mut node_stride = 0;
        for &v in own.iter().rev() {
            if Some(v) == node {
                node_stride = stride;
            } else {
                let axis = scope.iter().position(|&w| w == v).unwrap_or(0);
                strides.push((v, stride, axis));
            }
            stride *= self.sizes[v];
        }
        Input { source, node_stride, strides }
    }

    fn table<'a>(&'a self, messages: &'a [Vec<f64>], source: Source) -> &'a [f64] {
        match source {
            Source::Pair(p) => &self.pairs[p],
            Source::Message(m) => &messages[m],
        }
    }

    /// Eliminates every node that is not kept, with these node costs.
    pub fn evaluate(&self, unary: &[Vec<f64>]) -> Messages {
        let mut tables: Vec<Vec<f64>> = vec![vec![]; self.messages];
        let mut value = 0.0;
        for bucket in &self.buckets {
            for group in &bucket.groups {
                let out = self.minimised(bucket.node, group, &unary[bucket.node], &tables);
                if group.scope.is_empty() {
                    value += out[0];
                }
                tables[group.message] = out;
            }
        }
        Messages { tables, value }
    }

    /// `out[scope] = min over x of unary[x] + sum of inputs[x, scope]`. The last node of the scope is the inner loop: all
    /// tables that have it have it last too, so it runs over consecutive numbers and the compiler vectorises it.
    fn minimised(&self, node: usize, group: &Group, unary: &[f64], messages: &[Vec<f64>]) -> Vec<f64> {
        let count = self.sizes[node];
        let own = |x: usize| if group.with_unary { unary[x] } else { 0.0 };
        let Some((&last, outer)) = group.scope.split_last() else {
            let total = |x: usize| {
                let inputs = group.inputs.iter().map(|i| self.table(messages, i.source)[x * i.node_stride]);
                own(x) + inputs.sum::<f64>()
            };
            return vec![(0..count).map(total).fold(f64::INFINITY, f64::min)];
        };
        let width = self.sizes[last];
        let mut out = vec![f64::INFINITY; group.entries];
        let mut inner: Vec<Cursor> = vec![];
        let mut fixed: Vec<Cursor> = vec![];
        for input in &group.inputs {
            let mut strides = vec![0; outer.len()];
            let mut has_last = false;
            for &(_, stride, axis) in &input.strides {
                if axis == outer.len() { has_last = true } else { strides[axis] = stride }
            }
            let table = self.table(messages, input.source);
            let cursor = Cursor { table, node_stride: input.node_stride, strides, at: 0 };
            if has_last { inner.push(cursor) } else { fixed.push(cursor) }
        }
        let mut digits = vec![0; outer.len()];
        let mut sum = vec![0.0; width];
        for row in out.chunks_exact_mut(width) {
            for x in 0..count {
                let base = fixed.iter().fold(own(x), |base, c| base + c.table[c.at + x * c.node_stride]);
                if base == f64::INFINITY {
                    continue;
                }
                let slice = |c: &Cursor<'_>| c.at + x * c.node_stride..c.at + x * c.node_stride + width;
                match inner.as_slice() {
                    [] => row.iter_mut().for_each(|r| *r = least(*r, base)),
                    [one] => {
                        for (r, a) in row.iter_mut().zip(&one.table[slice(one)]) {
                            *r = least(*r, base + a);
                        }
                    }
                    [one, two] => {
                        let second = &two.table[slice(two)];
                        for ((r, a), b) in row.iter_mut().zip(&one.table[slice(one)]).zip(second) {
                            *r = least(*r, base + (a + b));
                        }
                    }
                    [one, more @ ..] => {
                        sum.copy_from_slice(&one.table[slice(one)]);
                        for c in more {
                            for (s, a) in sum.iter_mut().zip(&c.table[slice(c)]) {
                                *s += a;
                            }
                        }
                        for (r, s) in row.iter_mut().zip(&sum) {
                            *r = least(*r, base + s);
                        }
                    }
                }
            }
            step(&mut digits, outer, &self.sizes, &mut inner, &mut fixed);
        }
        out
    }

    /// The least cost at the kept strategies in `local`.
    pub fn rest(&self, unary: &[Vec<f64>], messages: &Messages, local: &[usize]) -> f64 {
        let own: f64 = self.keep.iter().map(|&v| unary[v][local[v]]).sum();
        let tables = self.rest.iter().map(|i| self.table(&messages.tables, i.source)[offset(i, local)]);
        messages.value + own + tables.sum::<f64>()
    }

    /// Nodes in the order a search decides them: the reverse of their elimination.
    pub fn decisions(&self) -> impl Iterator<Item = usize> {
        self.buckets.iter().rev().map(|bucket| bucket.node)
    }

    /// How much each strategy of the `depth`-th decision raises the lower bound, given the decisions before it in `local`.
    /// In an exact plan some strategy raises it by nothing.
    pub fn regrets(&self, depth: usize, unary: &[Vec<f64>], messages: &Messages, local: &[usize], into: &mut Vec<f64>) {
        let bucket = &self.buckets[self.buckets.len() - 1 - depth];
        let count = self.sizes[bucket.node];
        into.clear();
        into.resize(count, 0.0);
        let add = |group: &Group, sum: &mut [f64]| {
            if group.with_unary {
                sum.copy_from_slice(&unary[bucket.node]);
            } else {
                sum.fill(0.0);
            }
            for input in &group.inputs {
                let table = self.table(&messages.tables, input.source);
                let at = offset(input, local);
                for (x, s) in sum.iter_mut().enumerate() {
                    *s += table[at + x * input.node_stride];
                }
            }
            let lowest = sum.iter().copied().fold(f64::INFINITY, least);
            for s in sum.iter_mut() {
                *s = if *s < f64::INFINITY { *s - lowest } else { f64::INFINITY };
            }
        };
        let Some((first, others)) = bucket.groups.split_first() else {
            return;
        };
        add(first, into);
        // Only a split bucket has others, so the usual case allocates nothing.
        for group in others {
            let mut sum = vec![0.0; count];
            add(group, &mut sum);
            into.iter_mut().zip(sum).for_each(|(total, s)| *total += s);
        }
    }

    /// The least cost with each strategy of each node, in an exact plan: tables go back along the elimination, each the
    /// least of everything outside the bucket (the backward pass of Pearl's max-product, 1988).
    pub fn marginals(&self, unary: &[Vec<f64>], messages: &Messages) -> Vec<Vec<f64>> {
        let mut outside: Vec<Vec<f64>> = vec![vec![]; self.messages];
        let mut marginals: Vec<Vec<f64>> = self.sizes.iter().map(|&k| vec![f64::INFINITY; k]).collect();
        for bucket in self.buckets.iter().rev() {
            let [group] = bucket.groups.as_slice() else {
                continue;
            };
            let mut beyond = std::mem::take(&mut outside[group.message]);
            if group.scope.is_empty() {
                beyond = vec![messages.value - messages.tables[group.message][0]];
            }
            for input in &group.inputs {
                if let Source::Message(m) = input.source {
                    outside[m] = vec![f64::INFINITY; messages.tables[m].len()];
                }
            }
            let mut local = vec![0; self.sizes.len()];
            for (at, &beyond) in beyond.iter().enumerate() {
                let mut left = at;
                for &v in group.scope.iter().rev() {
                    local[v] = left % self.sizes[v];
                    left /= self.sizes[v];
                }
                let offsets: Vec<usize> = group.inputs.iter().map(|input| offset(input, &local)).collect();
                for (x, marginal) in marginals[bucket.node].iter_mut().enumerate() {
                    let mut sum = beyond + unary[bucket.node][x];
                    for (input, at) in group.inputs.iter().zip(&offsets) {
                        sum += self.table(&messages.tables, input.source)[at + x * input.node_stride];
                    }
                    *marginal = least(*marginal, sum);
                    for (input, at) in group.inputs.iter().zip(&offsets) {
                        if let Source::Message(m) = input.source {
                            let entry = &mut outside[m][at + x * input.node_stride];
                            *entry = least(*entry, sum);
                        }
                    }
                }
            }
            // Each sum so far holds the message itself, which is not outside its bucket.
            for input in &group.inputs {
                if let Source::Message(m) = input.source {
                    for (o, inside) in outside[m].iter_mut().zip(&messages.tables[m]) {
                        *o = if *o < f64::INFINITY { *o - inside } else { f64::INFINITY };
                    }
                }
            }
        }
        marginals
    }

    /// The first strategy of least regret for each node in turn: a best choice when the plan is exact.
    pub fn dive(&self, unary: &[Vec<f64>], messages: &Messages) -> Vec<usize> {
        let mut local = vec![0; self.sizes.len()];
        self.dive_into(unary, messages, &mut local);
        local
    }

    /// [`dive`](Self::dive) with the kept nodes as they are in `local`.
    pub fn dive_into(&self, unary: &[Vec<f64>], messages: &Messages, local: &mut [usize]) {
        let mut regrets = vec![];
        for (depth, node) in self.decisions().enumerate() {
            self.regrets(depth, unary, messages, local, &mut regrets);
            local[node] = first_least(&regrets);
        }
    }
}

/// A table and where the current row starts in it.
struct Cursor<'a> {
    table: &'a [f64],
    node_stride: usize,
    strides: Vec<usize>,
    at: usize,
}

/// Advances to the next assignment of the outer nodes, the last one fastest.
fn step<'a>(
    digits: &mut [usize],
    outer: &[usize],
    sizes: &[usize],
    inner: &mut [Cursor<'a>],
    fixed: &mut [Cursor<'a>],
) {
    for axis in (0..digits.len()).rev() {
        digits[axis] += 1;
        let wrapped = digits[axis] == sizes[outer[axis]];
        for cursor in inner.iter_mut().chain(fixed.iter_mut()) {
            if wrapped {
                cursor.at -= cursor.strides[axis] * (digits[axis] - 1);
            } else {
                cursor.at += cursor.strides[axis];
            }
        }
        if !wrapped {
            return;
        }
        digits[axis] = 0;
    }
}

/// One machine instruction, unlike `f64::min`, which minds what is not a number.
fn least(a: f64, b: f64) -> f64 {
    if b < a { b } else { a }
}

fn offset(input: &Input, local: &[usize]) -> usize {
    input.strides.iter().map(|&(v, stride, _)| local[v] * stride).sum()
}

pub(super) fn first_least(values: &[f64]) -> usize {
    let mut best = 0;
    for (at, value) in values.iter().enumerate() {
        if *value < values[best] {
            best = at;
        }
    }
    best
}

/// The order in which nodes go: next is always the node whose elimination needs the fewest additions.
struct Order {
    nodes: Vec<usize>,
    /// Entries of the largest table.
    largest: f64,
    /// Entries of all tables.
    total: f64,
    /// Additions of all eliminations.
    work: f64,
}

impl Order {
    fn new(reduced: &Reduced, keep: &[usize]) -> Order {
        let n = reduced.cost.len();
        let mut neighbours: Vec<Vec<usize>> = (0..n)
            .map(|v| {
                let mut other: Vec<usize> =
                    reduced.incident[v].iter().map(|&p| reduced.pairs[p].a + reduced.pairs[p].b - v).collect();
                other.sort_unstable();
                other
            })
            .collect();
        let size = |v: usize| reduced.cost[v].len() as f64;
        let work_of = |v: usize, neighbours: &[Vec<usize>]| {
            let entries: f64 = neighbours[v].iter().map(|&w| size(w)).product();
            entries * size(v)
        };
        let mut work: Vec<f64> = (0..n).map(|v| work_of(v, &neighbours)).collect();
        let mut left = vec![true; n];
        for &v in keep {
            left[v] = false;
        }
        let mut order = Order { nodes: vec![], largest: 1.0, total: 0.0, work: 0.0 };
        let cheapest = |left: &[bool], work: &[f64]| {
            (0..n).filter(|&v| left[v]).reduce(|best, v| if work[v] < work[best] { v } else { best })
        };
        while let Some(v) = cheapest(&left, &work) {
            left[v] = false;
            order.nodes.push(v);
            let around = std::mem::take(&mut neighbours[v]);
            order.work += work[v] * around.len().max(1) as f64;
            order.largest = order.largest.max(work[v] / size(v));
            order.total += work[v] / size(v);
            for &w in &around {
                let mut joined: Vec<usize> =
                    neighbours[w].iter().chain(&around).copied().filter(|&u| u != v && u != w).collect();
                joined.sort_unstable();
                joined.dedup();
                neighbours[w] = joined;
                work[w] = work_of(w, &neighbours);
            }
        }
        order
    }
}
