//! Sequential tree-reweighted message passing (Kolmogorov, IEEE TPAMI 2006): a lower bound of pairwise costs that rises
//! with every pass over the nodes, by moving costs between the nodes and edges of the local polytope's dual.

use super::compact::Compact;
use rustc_hash::FxHashMap;

#[derive(Clone, Debug)]
pub(super) struct Messages {
    /// The message of each edge to either end.
    to_a: Vec<Vec<f64>>,
    to_b: Vec<Vec<f64>>,
    /// One over the chains through a node.
    gamma: Vec<f64>,
    scratch: Vec<f64>,
}

impl Messages {
    pub(crate) fn new(of: &Compact) -> Messages {
        let gamma = |list: &Vec<(u32, bool)>| {
            let after = list.iter().filter(|(_, is_first)| *is_first).count();
            1.0 / after.max(list.len() - after).max(1) as f64
        };
        Messages {
            to_a: of.edges.iter().map(|e| vec![0.0; of.width(e.a as usize)]).collect(),
            to_b: of.edges.iter().map(|e| vec![0.0; of.width(e.b as usize)]).collect(),
            gamma: of.incident.iter().map(gamma).collect(),
            scratch: vec![],
        }
    }

    /// Takes over the messages from before strategies and nodes of the same network were removed. If the sums
    /// are close, so is the bound.
    pub(crate) fn inherit(&mut self, of: &Compact, old: &Messages, old_of: &Compact) {
        let ends = |of: &Compact, e: usize| {
            let edge = &of.edges[e];
            (of.node[edge.a as usize], of.node[edge.b as usize])
        };
        let known: FxHashMap<(usize, usize), usize> = (0..old_of.edges.len()).map(|e| (ends(old_of, e), e)).collect();
        let mapped = |new: &[u32], old: &[u32], told: &[f64], into: &mut Vec<f64>| {
            let found: Option<Vec<f64>> = new.iter().map(|l| old.binary_search(l).ok().map(|at| told[at])).collect();
            if let Some(found) = found {
                *into = found;
            }
        };
        for (e, edge) in of.edges.iter().enumerate() {
            let Some(&o) = known.get(&ends(of, e)) else { continue };
            let (a, b) = (old_of.edges[o].a as usize, old_of.edges[o].b as usize);
            mapped(of.labels(edge.a as usize), old_of.labels(a), &old.to_a[o], &mut self.to_a[e]);
            mapped(of.labels(edge.b as usize), old_of.labels(b), &old.to_b[o], &mut self.to_b[e]);
        }
    }

    /// One pass under node costs `theta`, and the bound after it (without constants). `hat` becomes what each strategy adds
    /// to the bound at least: a chain's least cost through it (every chain through a node has its exact marginals there
    /// when the pass comes by).
    pub(crate) fn pass(&mut self, of: &Compact, theta: &[f64], hat: &mut [f64], forward: bool) -> f64 {
        let n = of.len();
        let mut bound = 0.0;
        for step in 0..n {
            let u = if forward { step } else { n - 1 - step };
            let range = of.offset[u]..of.offset[u + 1];
            let hat = &mut hat[range.clone()];
            hat.copy_from_slice(&theta[range]);
            for &(e, is_first) in &of.incident[u] {
                let told = if is_first { &self.to_a[e as usize] } else { &self.to_b[e as usize] };
                hat.iter_mut().zip(told).for_each(|(h, m)| *h += m);
            }
            bound += subtract_least(hat);
            if bound == f64::INFINITY {
                return bound;
            }
            for &(e, is_first) in &of.incident[u] {
                if is_first != forward {
                    continue;
                }
                let edge = &of.edges[e as usize];
                let (table, own, told) = match is_first {
                    true => (&edge.ab, &self.to_a[e as usize], &mut self.to_b[e as usize]),
                    false => (&edge.ba, &self.to_b[e as usize], &mut self.to_a[e as usize]),
                };
                self.scratch.clear();
                let gamma = self.gamma[u];
                // A forbidden strategy stays forbidden, whatever its messages.
                let rest = |(&h, m): (&f64, &f64)| if h < f64::INFINITY { gamma * h - m } else { h };
                self.scratch.extend(hat.iter().zip(own).map(rest));
                told.fill(f64::INFINITY);
                lower_to_sums(told, &self.scratch, table);
                bound += subtract_least(told);
            }
        }
        bound
    }

    /// A choice read off first node to last, each given those before it.
    pub(crate) fn decode(&self, of: &Compact, theta: &[f64]) -> Vec<usize> {
        let mut x = vec![0; of.len()];
        let mut costs: Vec<f64> = vec![];
        for u in 0..of.len() {
            costs.clear();
            costs.extend_from_slice(&theta[of.offset[u]..of.offset[u + 1]]);
            for &(e, is_first) in &of.incident[u] {
                let edge = &of.edges[e as usize];
                let add = match is_first {
                    true => self.to_a[e as usize].as_slice(),
                    false => edge.given(false, x[edge.a as usize], costs.len()),
                };
                costs.iter_mut().zip(add).for_each(|(c, a)| *c += a);
            }
            x[u] = first_least(&costs);
        }
        x
    }
}

/// Lowers each entry to the least of its column of `table`, to whose rows `bases` are added.
fn lower_to_sums(least: &mut [f64], bases: &[f64], table: &[f64]) {
    let width = least.len();
    let min = |a: f64, b: f64| if a < b { a } else { b };
    // Several rows at once, since each pass over `least` reads and writes it.
    let (bases, last_bases) = bases.as_chunks::<4>();
    let (rows, last_rows) = table.split_at(4 * width * bases.len());
    for ([b0, b1, b2, b3], rows) in bases.iter().zip(rows.chunks_exact(4 * width)) {
        let (first, second) = rows.split_at(2 * width);
        let ((r0, r1), (r2, r3)) = (first.split_at(width), second.split_at(width));
        for ((((least, c0), c1), c2), c3) in least.iter_mut().zip(r0).zip(r1).zip(r2).zip(r3) {
            *least = min(min(min(b0 + c0, b1 + c1), min(b2 + c2, b3 + c3)), *least);
        }
    }
    for (base, row) in last_bases.iter().zip(last_rows.chunks_exact(width)) {
        least.iter_mut().zip(row).for_each(|(least, c)| *least = min(base + c, *least));
    }
}

fn subtract_least(values: &mut [f64]) -> f64 {
    let least = values.iter().copied().fold(f64::INFINITY, |a, b| if b < a { b } else { a });
    if least < f64::INFINITY {
        values.iter_mut().for_each(|v| *v -= least);
    }
    least
}

pub(super) fn first_least(values: &[f64]) -> usize {
    (0..values.len()).fold(0, |best, at| if values[at] < values[best] { at } else { best })
}
