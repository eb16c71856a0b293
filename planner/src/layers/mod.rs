//! Cuts the forward graph into layers: runs of consecutive nodes that stages are made of.
//!
//! Models repeat. The sequence of matmuls and convolutions shows the period, and cutting at the same place of each
//! period gives layers that are solved once. The parts before and after are cut in the same way, such as an encoder
//! before a decoder. If blocks repeat within a period, each of them is a layer.
//!
//! If nothing repeats, layers have about equal work and cuts go where the least data crosses. This follows the
//! clustering program of the Alpa paper (section 5.2, equation 6). All places between repeated blocks are cuts, so
//! another number of layers would give no new stages.

pub mod cache;
pub mod graph;

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_transforms::repetition::{Repetition, longest, numbered};
use std::ops::Range;

/// The most layers that planning distinguishes. Longer models have several blocks in a layer.
pub const MAX_LAYERS: usize = 64;

/// Layers as node positions: layer `i` is the nodes `starts[i]..starts[i + 1]`.
pub fn cluster(graph: &Graph) -> Vec<u32> {
    cluster_finely(graph, MAX_LAYERS)
}

/// Like [`cluster`], with at most about `most` layers.
pub fn cluster_finely(graph: &Graph, most: usize) -> Vec<u32> {
    let cuts = cuts(graph);
    let repeated: usize = cuts.iter().map(|c| if let Cuts::Repeated(cuts) = c { cuts.len() - 1 } else { 0 }).sum();
    let group = repeated.div_ceil(most.max(1)).max(1);
    let mut starts = vec![0u32];
    for cuts in cuts {
        let (kept, last) = match cuts {
            Cuts::Repeated(mut cuts) => {
                let last = cuts.pop();
                (cuts.into_iter().step_by(group).collect(), last)
            }
            Cuts::Balanced(cuts) => (cuts, None),
        };
        starts.extend(kept.into_iter().chain(last).filter(|&c| c > 0 && c < graph.len()).map(|c| c as u32));
    }
    starts.push(graph.len() as u32);
    starts.sort_unstable();
    starts.dedup();
    without_empty_layers(graph, starts)
}

/// The first node of each repeated block of a model, in order: of each block of an encoder, and then of a decoder.
pub fn blocks(graph: &Graph) -> Vec<u32> {
    let of_part = |cuts| match cuts {
        Cuts::Repeated(mut cuts) => {
            cuts.pop();
            cuts
        }
        Cuts::Balanced(_) => Vec::new(),
    };
    let mut starts: Vec<u32> = cuts(graph).into_iter().flat_map(of_part).map(|start| start as u32).collect();
    starts.sort_unstable();
    starts
}

/// The cuts of all parts of a model.
fn cuts(graph: &Graph) -> Vec<Cuts> {
    let heavy: Vec<usize> = graph.values().filter(|&v| is_heavy(graph, v)).map(|v| v.index()).collect();
    let signature: Vec<String> = heavy
        .iter()
        .map(|&i| {
            let node = &graph.nodes[i];
            format!("{:?} {:?} {}", node.op, graph.operand_types(ValueId(i as u32)), node.ty)
        })
        .collect();
    let mut before = vec![0u128; graph.len() + 1];
    for v in graph.values() {
        before[v.index() + 1] = before[v.index()] + u128::from(graph.flop(v));
    }
    let of = Sequence { graph, crossing: crossing_bytes(graph), before, ids: numbered(&signature), heavy };
    let mut cuts = Vec::new();
    of.cut(0..of.heavy.len(), 0..graph.len(), None, &mut cuts);
    cuts
}

/// Data by which cuts are found.
struct Sequence<'a> {
    graph: &'a Graph,
    /// See [`crossing_bytes`].
    crossing: Vec<u64>,
    /// FLOPs of all nodes before a position.
    before: Vec<u128>,
    /// Positions of matmuls and convolutions, and a number for each that tells which are equal.
    heavy: Vec<usize>,
    ids: Vec<usize>,
}

/// Cuts of a part of a model.
enum Cuts {
    /// The start of each of several equal runs, and the end of the last one.
    Repeated(Vec<usize>),
    Balanced(Vec<usize>),
}

/// Parts with at most this many times the work of a layer are layers themselves.
const NEARLY_ONE: f64 = 1.5;
/// Least work of a repetition beside another one, as a share of the other's layer.
const SMALL: f64 = 0.25;
/// Least share of the work that a repetition must cover; a smaller one says nothing about the model.
const COVERED: f64 = 0.25;
/// Fewest repetitions within one of several equal runs that are blocks, and the share of its work that they must cover. Two
/// may be the parts of one block, such as the two kinds of attention of a decoder.
const FEWEST_WITHIN: usize = 3;
const MOST_OF_RUN: f64 = 0.5;
/// Number of layers if nothing repeats.
const BALANCED: usize = 16;

impl Sequence<'_> {
    fn work(&self, from: usize, to: usize) -> f64 {
        (self.before[to] - self.before[from.min(to)]) as f64
    }

    /// Cuts the nodes `nodes`, whose matmuls and convolutions are `heavy`, at the longest repetition among these. The
    /// parts before and after it are cut in the same way: encoders and decoders, and the stages of convolutional
    /// networks, repeat separately. `around` is the FLOPs of a layer of the repetition beside this part.
    fn cut(&self, heavy: Range<usize>, nodes: Range<usize>, around: Option<f64>, cuts: &mut Vec<Cuts>) {
        let whole = self.work(nodes.start, nodes.end);
        let layer = around.unwrap_or(0.0);
        if around.is_some() && heavy.len() < 2 || whole < NEARLY_ONE * layer {
            return;
        }
        let of_heavy = |h: &usize| self.work(*h, h + 1);
        let of_one = |r: Repetition| self.heavy[heavy.start + r.first..][..r.period].iter().map(of_heavy).sum::<f64>();
        let accepted = |r: Repetition| of_one(r) >= SMALL * layer && of_one(r) * r.count as f64 >= COVERED * whole;
        let Some(Repetition { first, period, count }) = longest(&self.ids[heavy.clone()], accepted) else {
            let layers = if layer > 0.0 { (whole / layer).round() as usize } else { BALANCED };
            let layers = layers.min(BALANCED).min(heavy.len()).max(1);
            cuts.push(Cuts::Balanced(self.balanced(nodes, layers)));
            return;
        };
        let first = heavy.start + first;
        // The start of each repetition, and the end of the last one.
        let boundary = |r: usize| {
            let h = first + r * period;
            let from = if h == heavy.start { nodes.start } else { self.heavy[h - 1] };
            let to = if h < heavy.end { self.heavy[h] } else { nodes.end - 1 };
            best_cut(&self.crossing, from, to)
        };
        let mut found: Vec<usize> = (0..=count).map(boundary).collect();
        // Before the first repetition there may be cheaper places (only the tokens cross there). A separate layer is
        // worth only the part that is cut off the other repetitions as well.
        let lead = works(self.graph, found[1], self.heavy[first + period]).len();
        let start = if first == heavy.start { nodes.start } else { self.heavy[first - 1] + 1 };
        let before = works(self.graph, start, self.heavy[first]);
        found[0] = before.len().checked_sub(lead).and_then(|i| before.get(i)).copied().unwrap_or(found[0]);
        let (begin, end) = (found[0], found[count]);
        found.extend(self.within(Repetition { first, period, count }, &found));
        found.sort_unstable();
        found.dedup();
        let of_layer = self.work(begin, found[1]).max(layer);
        cuts.push(Cuts::Repeated(found));
        self.cut(heavy.start..first, nodes.start..begin, Some(of_layer), cuts);
        self.cut(first + count * period..heavy.end, end..nodes.end, Some(of_layer), cuts);
    }

    /// Cuts within each of several equal runs, which begin and end at `boundaries`: where blocks repeat in it, as several
    /// blocks of a state-space model do between two of attention, if no more crosses there than between runs.
    fn within(&self, run: Repetition, boundaries: &[usize]) -> Vec<usize> {
        let heavy = &self.heavy[run.first..];
        let work = |products: &[usize]| products.iter().map(|&h| self.work(h, h + 1)).sum::<f64>();
        let whole = work(&heavy[..run.period]);
        let is_most = |r: Repetition| {
            let all = r.period * r.count;
            r.count >= FEWEST_WITHIN && all <= run.period && work(&heavy[r.first..][..all]) >= MOST_OF_RUN * whole
        };
        // Blocks may repeat across the end of a run.
        let Some(inner) = longest(&self.ids[run.first..][..2 * run.period], is_most) else { return Vec::new() };
        let starts = (0..=inner.count).map(|r| (inner.first + r * inner.period) % run.period).filter(|&at| at > 0);
        let all = starts.flat_map(|at| (0..run.count).map(move |r| r * run.period + at));
        let cuts: Vec<usize> = all.map(|at| best_cut(&self.crossing, heavy[at - 1], heavy[at])).collect();
        let most = boundaries[1..].iter().map(|&cut| self.crossing[cut]).max().unwrap_or(0);
        if cuts.iter().all(|&cut| self.crossing[cut] <= most) { cuts } else { Vec::new() }
    }

    /// Cuts these nodes into at most `layers` runs of about equal work, where the least data crosses. Dynamic
    /// programming over positions; each run has at most 1.5 times its share of the work.
    fn balanced(&self, nodes: Range<usize>, layers: usize) -> Vec<usize> {
        let Sequence { crossing, before, .. } = self;
        let before = |i: usize| before[i] - self.before[nodes.start];
        let limit = before(nodes.end) * 3 / 2 / layers as u128;
        let is_heavy = |i: &usize| nodes.contains(i);
        let (first, last) = (self.heavy.iter().find(|i| is_heavy(i)), self.heavy.iter().rfind(|i| is_heavy(i)));
        // A layer without a product would do no work.
        let between = |i: usize| first.is_none_or(|&first| first < i) && last.is_none_or(|&last| i <= last);
        // Cuts are tried only at the cheapest position of each small window, so the quadratic search has a few hundred.
        let window = (nodes.len() / 256).max(1);
        let mut positions: Vec<usize> = (nodes.start + 1..nodes.end)
            .step_by(window)
            .map(|i| (i..(i + window).min(nodes.end)).min_by_key(|&j| (crossing[j], j)).unwrap_or(i))
            .filter(|&i| crossing[i] > 0 && between(i))
            .collect();
        positions.push(nodes.end);
        let mut best: Vec<Option<(u128, usize)>> = vec![None; positions.len()];
        for i in 0..positions.len() {
            let cost = if positions[i] == nodes.end { 0 } else { crossing[positions[i]] as u128 + 1 };
            // Nodes before the first position cannot be cut any finer.
            if before(positions[i]) <= limit || i == 0 {
                best[i] = Some((cost, usize::MAX));
            }
            for j in 0..i {
                let fits = before(positions[i]) - before(positions[j]) <= limit || j + 1 == i;
                if let (true, Some((so_far, _))) = (fits, best[j])
                    && best[i].is_none_or(|(b, _)| so_far + cost < b)
                {
                    best[i] = Some((so_far + cost, j));
                }
            }
        }
        let mut cuts = Vec::new();
        let mut at = positions.len() - 1;
        while let Some((_, previous)) = best[at] {
            if previous == usize::MAX {
                break;
            }
            cuts.push(positions[previous]);
            at = previous;
        }
        cuts.reverse();
        cuts
    }
}

fn is_heavy(graph: &Graph, v: ValueId) -> bool {
    graph.node(v).op.is_contraction()
}

/// Positions in a range of nodes that compute something from a leaf.
fn works(graph: &Graph, from: usize, to: usize) -> Vec<usize> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    (from..to).filter(|&i| varies[i] && !graph.nodes[i].op.is_leaf()).collect()
}

/// Merges layers without work of their own (nothing but leaves and constants) into the next one.
fn without_empty_layers(graph: &Graph, starts: Vec<u32>) -> Vec<u32> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let works = |from: u32, to: u32| (from..to).any(|i| varies[i as usize] && !graph.nodes[i as usize].op.is_leaf());
    let mut kept = vec![0];
    for window in starts.windows(2).skip(1) {
        let (from, to) = (window[0], window[1]);
        let last = kept[kept.len() - 1];
        if works(last, from) && works(from, to) {
            kept.push(from);
        }
    }
    kept.push(graph.len() as u32);
    kept
}

/// By position `i`, the bytes of values that depend on a leaf, are made before `i`, and are used at or after it.
fn crossing_bytes(graph: &Graph) -> Vec<u64> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let mut last_use = vec![0usize; graph.len()];
    for v in graph.values() {
        graph.node(v).operands.iter().for_each(|o| last_use[o.index()] = v.index());
    }
    let mut change = vec![0i128; graph.len() + 2];
    for v in graph.values().filter(|v| varies[v.index()] && !graph.node(*v).op.is_leaf()) {
        if last_use[v.index()] > v.index() {
            change[v.index() + 1] += graph.ty(v).bytes() as i128;
            change[last_use[v.index()] + 1] -= graph.ty(v).bytes() as i128;
        }
    }
    let mut bytes = Vec::with_capacity(graph.len() + 1);
    let mut now = 0i128;
    for c in &change[..=graph.len()] {
        now += c;
        bytes.push(now.max(0) as u64);
    }
    bytes
}

/// The first position after `from`, at most `to`, where the least data crosses. Positions where nothing crosses lie
/// before the model begins, and do not count.
fn best_cut(crossing: &[u64], from: usize, to: usize) -> usize {
    (from + 1..=to).filter(|&i| crossing[i] > 0).min_by_key(|&i| (crossing[i], i)).unwrap_or(from)
}
