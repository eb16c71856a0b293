//! Cuts the forward graph into layers: runs of consecutive nodes that stages are made of.
//!
//! Models repeat. The sequence of matmuls and convolutions shows the period, and cutting at the same place of each period gives
//! layers that are solved once. Where nothing repeats, layers have about equal work and cuts go where the
//! least data crosses, as in the clustering program of the Alpa paper (section 5.2, equation 6).

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::repetition::{Repetition, longest, numbered};

/// The most layers that planning distinguishes; longer models have several blocks in a layer.
pub const MAX_LAYERS: usize = 64;

/// Layers as node positions: layer `i` is the nodes `starts[i]..starts[i + 1]`.
pub fn cluster(graph: &Graph) -> Vec<u32> {
    cluster_finely(graph, MAX_LAYERS)
}

/// [`cluster`] into at most about `most` layers.
pub fn cluster_finely(graph: &Graph, most: usize) -> Vec<u32> {
    let crossing = crossing_bytes(graph);
    let heavy: Vec<usize> = graph.values().filter(|&v| is_heavy(graph, v)).map(|v| v.index()).collect();
    let signature: Vec<String> = heavy
        .iter()
        .map(|&i| {
            let node = &graph.nodes[i];
            format!("{:?} {:?} {}", node.op, graph.operand_types(ValueId(i as u32)), node.ty)
        })
        .collect();
    let cuts = match longest(&numbered(&signature), |_| true) {
        Some(Repetition { first, period, count }) => {
            // Where each repetition begins, and where the last one ends.
            let boundaries = (0..=count).map(|r| first + r * period);
            let mut cuts: Vec<usize> = boundaries
                .map(|h| {
                    let from = if h == 0 { 0 } else { heavy[h - 1] };
                    let to = heavy.get(h).copied().unwrap_or(graph.len() - 1);
                    best_cut(&crossing, from, to)
                })
                .collect();
            // Before the first repetition there may be cheaper places (the tokens alone cross there), but a layer of
            // its own is worth only what is cut off the other repetitions as well.
            let lead = works(graph, cuts[1], heavy[first + period]).len();
            let before = works(graph, if first == 0 { 0 } else { heavy[first - 1] + 1 }, heavy[first]);
            cuts[0] = before.len().checked_sub(lead).and_then(|i| before.get(i)).copied().unwrap_or(cuts[0]);
            let group = count.div_ceil(most.max(1));
            let last = cuts.pop();
            let mut grouped: Vec<usize> = cuts.into_iter().step_by(group).collect();
            grouped.extend(last);
            grouped
        }
        _ => balanced(graph, &crossing, 8.min(heavy.len().max(1))),
    };
    let mut starts = vec![0u32];
    starts.extend(cuts.into_iter().filter(|&c| c > 0 && c < graph.len()).map(|c| c as u32));
    starts.push(graph.len() as u32);
    starts.dedup();
    without_empty_layers(graph, starts)
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

/// Bytes of values that depend on a leaf, are made before position `i` and used at or after it, by position.
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

/// The first position after `from`, at most `to`, where least crosses. Nothing crossing at all means that the model has
/// not begun: such positions do not count.
fn best_cut(crossing: &[u64], from: usize, to: usize) -> usize {
    (from + 1..=to).filter(|&i| crossing[i] > 0).min_by_key(|&i| (crossing[i], i)).unwrap_or(from)
}

/// At most `layers` runs of about equal work, cut where least crosses: dynamic programming over positions, each run
/// at most 1.5 times its share of the work.
fn balanced(graph: &Graph, crossing: &[u64], layers: usize) -> Vec<usize> {
    let work: Vec<u64> = graph.values().map(|v| graph.flop(v)).collect();
    let mut before = vec![0u128; graph.len() + 1];
    for (i, w) in work.iter().enumerate() {
        before[i + 1] = before[i] + *w as u128;
    }
    let total = before[graph.len()];
    let limit = total * 3 / 2 / layers as u128;
    // Cuts are tried only at the cheapest position of each small window, which keeps this quadratic in a few hundred.
    let window = (graph.len() / 256).max(1);
    let mut positions: Vec<usize> = (1..graph.len())
        .step_by(window)
        .map(|i| (i..(i + window).min(graph.len())).min_by_key(|&j| (crossing[j], j)).unwrap_or(i))
        .filter(|&i| crossing[i] > 0)
        .collect();
    positions.push(graph.len());
    let mut best: Vec<Option<(u128, usize)>> = vec![None; positions.len()];
    for i in 0..positions.len() {
        let cost = if positions[i] == graph.len() { 0 } else { crossing[positions[i]] as u128 + 1 };
        // What lies before the first position cannot be cut any finer.
        if before[positions[i]] <= limit || i == 0 {
            best[i] = Some((cost, usize::MAX));
        }
        for j in 0..i {
            let fits = before[positions[i]] - before[positions[j]] <= limit || j + 1 == i;
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
