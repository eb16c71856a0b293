//! Stage candidates from layer tables.
//!
//! A run of layers on one mesh costs the cheapest path through its layers' boundary layouts: a min-plus product of
//! their tables. Runs of equal layers are equal, so each product is computed once per sequence of layer kinds, not per
//! pair of ends ([`Runs`]).

use crate::intra_op::layer::Boundary;
use crate::intra_op::stage_cost::StageCost;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// The cheapest paths through a run of layers, by the layout in which the last layer leaves its result.
pub struct Chain {
    /// Objective, terms and the layout in which the last layer is entered.
    ends: Vec<Option<(f64, StageCost, usize)>>,
    /// The run without its last layer.
    prefix: Option<Rc<Chain>>,
    /// Largest temporary of any layer.
    pub transient_bytes: f64,
}

impl Chain {
    fn first(table: &Boundary) -> Chain {
        let outs = table.out_layouts.len().max(1);
        let ends = (0..outs)
            .map(|o| {
                let entries = table.entries.iter().enumerate();
                entries
                    .filter_map(|(i, row)| row[o].map(|(cost, terms)| (cost, terms, i)))
                    .min_by(|a, b| a.0.total_cmp(&b.0))
            })
            .collect();
        Chain { ends, prefix: None, transient_bytes: table.transient_bytes }
    }

    fn extend(self: &Rc<Chain>, last: &Boundary, table: &Boundary) -> Chain {
        let outs = table.out_layouts.len().max(1);
        // If the boundary values agree, one layer's leaving layout is the next layer's entering layout.
        let joined = last.out_layouts == table.in_layouts;
        let free = self.best().map(|(cost, terms, _)| (cost, terms));
        let before =
            |i: usize| if joined { self.ends[i].as_ref().map(|(cost, terms, _)| (*cost, terms)) } else { free };
        let ends = (0..outs)
            .map(|o| {
                let step = |(i, row): (usize, &Vec<Option<(f64, StageCost)>>)| Some((before(i)?.0 + row[o]?.0, i));
                let steps = table.entries.iter().enumerate().filter_map(step);
                let (cost, i) = steps.min_by(|a, b| a.0.total_cmp(&b.0))?;
                Some((cost, *before(i)?.1 + table.entries[i][o]?.1, i))
            })
            .collect();
        Chain { ends, prefix: Some(self.clone()), transient_bytes: self.transient_bytes.max(table.transient_bytes) }
    }

    /// The chain of layers with these tables, of which there is at least one.
    pub fn through(tables: &[Rc<Boundary>]) -> Rc<Chain> {
        let first = Rc::new(Chain::first(&tables[0]));
        tables.windows(2).fold(first, |chain, pair| Rc::new(chain.extend(&pair[0], &pair[1])))
    }

    /// Objective, terms and leaving layout of the cheapest path.
    pub fn best(&self) -> Option<(f64, &StageCost, usize)> {
        let ends = self.ends.iter().enumerate();
        ends.filter_map(|(o, e)| e.as_ref().map(|(c, t, _)| (*c, t, o))).min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// The (entering, leaving) layouts of each layer on the cheapest path, first layer first. `tables` are those of the
    /// run's layers.
    pub fn path(&self, tables: &[Rc<Boundary>]) -> Vec<(usize, usize)> {
        let mut path = Vec::new();
        let Some((_, _, mut out)) = self.best() else { return path };
        let mut chain = self;
        for l in (0..tables.len()).rev() {
            let Some((_, _, entered)) = chain.ends[out] else { break };
            path.push((entered, out));
            let Some(prefix) = &chain.prefix else { break };
            let joined = l > 0 && tables[l - 1].out_layouts == tables[l].in_layouts;
            out = if joined { entered } else { prefix.best().map_or(0, |(_, _, o)| o) };
            chain = prefix;
        }
        path.reverse();
        path
    }
}

/// The distinct sequences of layer kinds among all runs of layers.
pub struct Runs {
    /// The sequence of layers `first..first + length`, at `[first][length - 1]`.
    of: Vec<Vec<usize>>,
    /// For each sequence: itself without its last layer, the kind of that layer, and the kind of the layer before it.
    sequences: Vec<(Option<usize>, usize, Option<usize>)>,
    /// Kind of the first layer and number of layers.
    heads: Vec<(usize, usize)>,
}

impl Runs {
    /// `kinds` has a kind per layer.
    pub fn new(kinds: &[usize]) -> Runs {
        let mut runs = Runs { of: Vec::new(), sequences: Vec::new(), heads: Vec::new() };
        let mut known: FxHashMap<(Option<usize>, usize), usize> = FxHashMap::default();
        for first in 0..kinds.len() {
            let mut row = Vec::with_capacity(kinds.len() - first);
            let mut prefix = None;
            for end in first..kinds.len() {
                let id = *known.entry((prefix, kinds[end])).or_insert_with(|| {
                    runs.sequences.push((prefix, kinds[end], prefix.map(|_| kinds[end - 1])));
                    runs.heads.push((kinds[first], end + 1 - first));
                    runs.sequences.len() - 1
                });
                row.push(id);
                prefix = Some(id);
            }
            runs.of.push(row);
        }
        runs
    }

    /// Number of sequences.
    pub fn count(&self) -> usize {
        self.sequences.len()
    }

    /// The sequence of layers `first..end`.
    pub fn of(&self, first: usize, end: usize) -> usize {
        self.of[first][end - first - 1]
    }

    /// The kind of a sequence's first layer, and how many layers it has.
    pub fn head(&self, sequence: usize) -> (usize, usize) {
        self.heads[sequence]
    }

    /// The chains of all sequences; `tables` holds one table per kind.
    pub fn chains(&self, tables: &[Rc<Boundary>]) -> Vec<Rc<Chain>> {
        let mut chains: Vec<Rc<Chain>> = Vec::with_capacity(self.count());
        for &(prefix, kind, before) in &self.sequences {
            let chain = match (prefix, before) {
                (Some(prefix), Some(before)) => chains[prefix].extend(&tables[before], &tables[kind]),
                _ => Chain::first(&tables[kind]),
            };
            chains.push(Rc::new(chain));
        }
        chains
    }
}
