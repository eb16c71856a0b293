//! Bucket elimination (Dechter, Artificial Intelligence 1999): nodes go one by one, each replaced by a table over its
//! neighbours of the least it can add. Exact, and fast because the graphs of layers are nearly series-parallel; where a table would
//! be too large there is no plan.

use super::compact::Compact;
use super::messages::first_least;
use rustc_hash::FxHashMap;

/// Entries of the largest table that is built, and of all tables of an elimination.
pub(super) const TABLE_ENTRIES: usize = 1 << 23;
const ALL_ENTRIES: usize = 1 << 28;

/// The limits of an elimination.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caps {
    /// Entries of one table.
    pub entries: f64,
    /// Additions of one evaluation.
    pub work: f64,
}

/// Node costs, flat.
pub(super) struct Unary<'a> {
    pub offset: &'a [usize],
    pub cost: &'a [f64],
}

impl Unary<'_> {
    fn of(&self, v: usize) -> &[f64] {
        &self.cost[self.offset[v]..self.offset[v + 1]]
    }
}

/// The order of an elimination and where each table goes; good for any node costs over the same edges unless messages are shared.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    sizes: Vec<usize>,
    offset: Vec<usize>,
    /// In order of elimination. The nodes to keep have none.
    buckets: Vec<Bucket>,
    /// Tables of the edges, the node that is eliminated first slowest.
    pairs: Vec<Vec<f64>>,
    /// Where the tables over kept nodes alone are.
    rest: Vec<Input>,
    keep: Vec<usize>,
    /// The first bucket that gives the same message as each.
    first: Vec<usize>,
    work: f64,
}

/// One elimination; its message has the bucket's number.
#[derive(Clone, Debug)]
struct Bucket {
    node: usize,
    inputs: Vec<Input>,
    /// The other nodes, in order of elimination.
    scope: Vec<usize>,
    entries: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Pair(usize),
    Message(usize),
}

/// A table as a bucket reads it.
#[derive(Clone, Debug)]
struct Input {
    source: Source,
    /// Entries between two strategies of the eliminated node; zero in `Plan::rest`.
    node_stride: usize,
    /// The nodes of the table that are not eliminated here, with their strides, and their position in the scope.
    strides: Vec<(usize, usize, usize)>,
}

/// The tables that replaced the nodes, for one set of node costs.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    tables: Vec<Vec<f64>>,
    /// The least cost, without constants. With kept nodes, what does not depend on them.
    pub value: f64,
}

impl Plan {
    /// Orders the elimination of all nodes but `keep`; none if it would pass the caps.
    pub(crate) fn new(of: &Compact, keep: &[usize], caps: &Caps) -> Option<Plan> {
        let order = Order::new(of, keep, caps)?;
        let n = of.len();
        let sizes: Vec<usize> = (0..n).map(|u| of.width(u)).collect();
        let mut position = vec![0; n];
        for (at, &v) in order.nodes.iter().chain(keep).enumerate() {
            position[v] = at;
        }
        // Tables wait at the node of theirs that is eliminated first; those over kept nodes alone wait in `rest`.
        let mut waiting: Vec<Vec<(Source, Vec<usize>)>> = vec![vec![]; n];
        let mut rest: Vec<(Source, Vec<usize>)> = vec![];
        let mut pairs = Vec::with_capacity(of.edges.len());
        let eliminated = order.nodes.len();
        for (p, edge) in of.edges.iter().enumerate() {
            let (a, b) = (edge.a as usize, edge.b as usize);
            let swap = position[a] > position[b];
            let (first, second) = if swap { (b, a) } else { (a, b) };
            pairs.push(if swap { edge.ba.clone() } else { edge.ab.clone() });
            let table = (Source::Pair(p), vec![first, second]);
            if position[first] < eliminated { waiting[first].push(table) } else { rest.push(table) }
        }
        let mut plan = Plan {
            sizes,
            offset: of.offset.clone(),
            buckets: vec![],
            pairs,
            rest: vec![],
            keep: keep.to_vec(),
            first: (0..eliminated).collect(),
            work: order.work,
        };
        for &node in &order.nodes {
            let tables = std::mem::take(&mut waiting[node]);
            let mut scope: Vec<usize> = tables.iter().flat_map(|(_, own)| &own[1..]).copied().collect();
            scope.sort_by_key(|&v| position[v]);
            scope.dedup();
            let inputs = tables.iter().map(|(source, own)| plan.input(*source, own, Some(node), &scope)).collect();
            let entries = scope.iter().map(|&v| plan.sizes[v]).product();
            let table = (Source::Message(plan.buckets.len()), scope.clone());
            match scope.first() {
                Some(&next) if position[next] < eliminated => waiting[next].push(table),
                Some(_) => rest.push(table),
                // A message over nothing is a constant, which `evaluate` adds up.
                None => {}
            }
            plan.buckets.push(Bucket { node, inputs, scope, entries });
        }
        plan.rest = rest.into_iter().map(|(source, scope)| plan.input(source, &scope, None, &scope)).collect();
        Some(plan)
    }

    /// Additions of one evaluation.
    pub(crate) fn work(&self) -> f64 {
        self.work
    }

    /// Lets buckets that give the same message share it, as those of a block that repeats do. Only good for these node costs. None if it
    /// takes more than `most` additions even so.
    pub(crate) fn shared(mut self, unary: &Unary<'_>, most: f64) -> Option<Plan> {
        let mut contents: FxHashMap<Vec<u64>, u64> = FxHashMap::default();
        let mut content = |table: &[f64]| {
            let new = contents.len() as u64;
            *contents.entry(table.iter().map(|c| c.to_bits()).collect()).or_insert(new)
        };
        let pairs: Vec<u64> = self.pairs.iter().map(|pair| content(pair)).collect();
        let mut known: FxHashMap<Vec<u64>, usize> = FxHashMap::default();
        self.work = 0.0;
        let mut entries = 0;
        for (b, bucket) in self.buckets.iter().enumerate() {
            let own = unary.of(bucket.node);
            let mut key = vec![content(own), bucket.scope.len() as u64];
            key.extend(bucket.scope.iter().map(|&v| self.sizes[v] as u64));
            for input in &bucket.inputs {
                key.extend(match input.source {
                    Source::Pair(p) => [0, pairs[p]],
                    Source::Message(m) => [1, self.first[m] as u64],
                });
                key.extend([input.node_stride as u64, input.strides.len() as u64]);
                key.extend(input.strides.iter().flat_map(|&(_, stride, axis)| [stride as u64, axis as u64]));
            }
            self.first[b] = *known.entry(key).or_insert(b);
            if self.first[b] == b {
                entries += bucket.entries;
                self.work += (bucket.entries * own.len() * bucket.scope.len().max(1)) as f64;
            }
        }
        (entries <= ALL_ENTRIES && self.work <= most).then_some(self)
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
            Source::Message(m) => &messages[self.first[m]],
        }
    }

    /// Eliminates every node that is not kept, with these node costs.
    pub(crate) fn evaluate(&self, unary: &Unary<'_>) -> Tables {
        let mut tables: Vec<Vec<f64>> = Vec::with_capacity(self.buckets.len());
        let mut value = 0.0;
        for (b, bucket) in self.buckets.iter().enumerate() {
            let out = match self.first[b] == b {
                true => self.minimised(bucket, unary.of(bucket.node), &tables),
                false => vec![],
            };
            if bucket.scope.is_empty() {
                value += out.first().unwrap_or_else(|| &tables[self.first[b]][0]);
            }
            tables.push(out);
        }
        Tables { tables, value }
    }

    /// `out[scope] = min over x of unary[x] + sum of inputs[x, scope]`. The last node of the scope is the inner loop: all
    /// tables that have it have it last too, so it runs over consecutive numbers and the compiler vectorises it.
    fn minimised(&self, bucket: &Bucket, unary: &[f64], messages: &[Vec<f64>]) -> Vec<f64> {
        let Some((&last, outer)) = bucket.scope.split_last() else {
            let total = |(x, own): (usize, &f64)| {
                let inputs = bucket.inputs.iter().map(|i| self.table(messages, i.source)[x * i.node_stride]);
                own + inputs.sum::<f64>()
            };
            return vec![unary.iter().enumerate().map(total).fold(f64::INFINITY, f64::min)];
        };
        let width = self.sizes[last];
        let mut out = vec![f64::INFINITY; bucket.entries];
        let mut inner: Vec<Cursor> = vec![];
        let mut fixed: Vec<Cursor> = vec![];
        for input in &bucket.inputs {
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
            for (x, &own) in unary.iter().enumerate() {
                let base = fixed.iter().fold(own, |base, c| base + c.table[c.at + x * c.node_stride]);
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
                    [one, more @ ..] => {
                        sum.copy_from_slice(&one.table[slice(one)]);
                        for c in more {
                            sum.iter_mut().zip(&c.table[slice(c)]).for_each(|(s, a)| *s += a);
                        }
                        row.iter_mut().zip(&sum).for_each(|(r, s)| *r = least(*r, base + s));
                    }
                }
            }
            advance(&mut digits, outer, &self.sizes, &mut inner, &mut fixed);
        }
        out
    }

    /// The least cost at the kept strategies in `local`.
    pub(crate) fn rest(&self, unary: &Unary<'_>, tables: &Tables, local: &[usize]) -> f64 {
        let own: f64 = self.keep.iter().map(|&v| unary.of(v)[local[v]]).sum();
        let shared = self.rest.iter().map(|i| self.table(&tables.tables, i.source)[offset(i, local)]);
        tables.value + own + shared.sum::<f64>()
    }

    /// The least cost with each strategy of each node, flat: tables go back along the elimination, each the least of
    /// everything outside the bucket (the backward pass of Pearl's max-product, 1988). No nodes are kept.
    pub(crate) fn marginals(&self, unary: &Unary<'_>, tables: &Tables) -> Vec<f64> {
        let mut outside: Vec<Vec<f64>> = vec![vec![]; self.buckets.len()];
        let mut marginals = vec![f64::INFINITY; unary.cost.len()];
        let mut local = vec![0; self.sizes.len()];
        let mut offsets: Vec<usize> = vec![];
        for (b, bucket) in self.buckets.iter().enumerate().rev() {
            let mut beyond = std::mem::take(&mut outside[b]);
            if bucket.scope.is_empty() {
                beyond = vec![tables.value - tables.tables[b][0]];
            }
            for input in &bucket.inputs {
                if let Source::Message(m) = input.source {
                    outside[m] = vec![f64::INFINITY; tables.tables[m].len()];
                }
            }
            let own = unary.of(bucket.node);
            let marginals = &mut marginals[self.offset[bucket.node]..][..own.len()];
            for (at, &beyond) in beyond.iter().enumerate() {
                let mut left = at;
                for &v in bucket.scope.iter().rev() {
                    local[v] = left % self.sizes[v];
                    left /= self.sizes[v];
                }
                offsets.clear();
                offsets.extend(bucket.inputs.iter().map(|input| offset(input, &local)));
                for (x, marginal) in marginals.iter_mut().enumerate() {
                    let mut sum = beyond + own[x];
                    for (input, at) in bucket.inputs.iter().zip(&offsets) {
                        sum += self.table(&tables.tables, input.source)[at + x * input.node_stride];
                    }
                    *marginal = least(*marginal, sum);
                    for (input, at) in bucket.inputs.iter().zip(&offsets) {
                        if let Source::Message(m) = input.source {
                            let entry = &mut outside[m][at + x * input.node_stride];
                            *entry = least(*entry, sum);
                        }
                    }
                }
            }
            // Each sum so far holds the message itself, which is not outside its bucket.
            for input in &bucket.inputs {
                if let Source::Message(m) = input.source {
                    for (o, inside) in outside[m].iter_mut().zip(&tables.tables[m]) {
                        *o = if *o < f64::INFINITY { *o - inside } else { f64::INFINITY };
                    }
                }
            }
        }
        marginals
    }

    /// A best choice.
    pub(crate) fn dive(&self, unary: &Unary<'_>, tables: &Tables) -> Vec<usize> {
        let mut local = vec![0; self.sizes.len()];
        self.dive_into(unary, tables, &mut local);
        local
    }

    /// [`dive`](Self::dive) with the kept nodes as they are in `local`.
    pub(crate) fn dive_into(&self, unary: &Unary<'_>, tables: &Tables, local: &mut [usize]) {
        let mut costs = vec![];
        for bucket in self.buckets.iter().rev() {
            costs.clear();
            costs.extend_from_slice(unary.of(bucket.node));
            for input in &bucket.inputs {
                let table = self.table(&tables.tables, input.source);
                let at = offset(input, local);
                costs.iter_mut().enumerate().for_each(|(x, c)| *c += table[at + x * input.node_stride]);
            }
            local[bucket.node] = first_least(&costs);
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

/// Goes on to the next assignment of the outer nodes, the last one fastest.
fn advance<'a>(
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

/// The order in which nodes go: next is always the node whose elimination needs the fewest additions.
struct Order {
    nodes: Vec<usize>,
    /// Additions of all eliminations.
    work: f64,
}

impl Order {
    /// None as soon as a cap is passed.
    fn new(of: &Compact, keep: &[usize], caps: &Caps) -> Option<Order> {
        let n = of.len();
        let mut neighbours: Vec<Vec<usize>> = (0..n)
            .map(|v| {
                let mut other: Vec<usize> =
                    of.incident[v].iter().map(|&(e, is_first)| of.edges[e as usize].other(is_first)).collect();
                other.sort_unstable();
                other
            })
            .collect();
        let size = |v: usize| of.width(v) as f64;
        let work_of = |v: usize, around: &[usize]| around.iter().map(|&w| size(w)).product::<f64>() * size(v);
        // Costs as bits order like numbers, being positive.
        let mut queue: std::collections::BTreeSet<(u64, usize)> = Default::default();
        let mut work: Vec<f64> = (0..n).map(|v| work_of(v, &neighbours[v])).collect();
        queue.extend((0..n).filter(|v| !keep.contains(v)).map(|v| (work[v].to_bits(), v)));
        let mut order = Order { nodes: vec![], work: 0.0 };
        while let Some((_, v)) = queue.pop_first() {
            order.nodes.push(v);
            let around = std::mem::take(&mut neighbours[v]);
            order.work += work[v] * around.len().max(1) as f64;
            if work[v] / size(v) > caps.entries || order.work > caps.work {
                return None;
            }
            for &w in &around {
                let mut joined: Vec<usize> =
                    neighbours[w].iter().chain(&around).copied().filter(|&u| u != v && u != w).collect();
                joined.sort_unstable();
                joined.dedup();
                neighbours[w] = joined;
                if queue.remove(&(work[w].to_bits(), w)) {
                    work[w] = work_of(w, &neighbours[w]);
                    queue.insert((work[w].to_bits(), w));
                }
            }
        }
        Some(order)
    }
}
