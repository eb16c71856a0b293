//! Stage candidates from layer tables.
//!
//! A run of layers on one mesh costs the cheapest path through its layers' boundary layouts: a min-plus product of
//! their tables. Runs of equal layers are equal, so a product is made once for each sequence of layer kinds, not for
//! each pair of ends.

use crate::intra_op::layer::LayerTable;
use crate::intra_op::statement::Terms;
use std::collections::HashMap;
use std::rc::Rc;

/// The cheapest ways through a run of layers, by the layout in which the last one is left.
pub struct Chain {
    /// Objective, terms and the layout in which the last layer is entered.
    ends: Vec<Option<(f64, Terms, usize)>>,
    /// The run without its last layer.
    prefix: Option<Rc<Chain>>,
    /// Largest temporary of any layer.
    pub transient_bytes: f64,
}

impl Chain {
    fn first(table: &LayerTable) -> Chain {
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

    fn extend(self: &Rc<Chain>, last: &LayerTable, table: &LayerTable) -> Chain {
        let outs = table.out_layouts.len().max(1);
        // Where the boundary values agree, the layout left is the layout entered.
        let joined = last.out_layouts == table.in_layouts;
        let free = self.best().map(|(cost, terms, _)| (cost, terms));
        let ends = (0..outs)
            .map(|o| {
                let step = |i: usize, row: &Vec<Option<(f64, Terms)>>| {
                    let (cost, terms) = row[o]?;
                    let (before, so_far) = match joined {
                        true => self.ends[i].map(|(c, t, _)| (c, t))?,
                        false => free?,
                    };
                    Some((before + cost, so_far + terms, i))
                };
                table.entries.iter().enumerate().filter_map(|(i, row)| step(i, row)).min_by(|a, b| a.0.total_cmp(&b.0))
            })
            .collect();
        Chain { ends, prefix: Some(self.clone()), transient_bytes: self.transient_bytes.max(table.transient_bytes) }
    }

    /// Objective, terms and leaving layout of the cheapest way.
    pub fn best(&self) -> Option<(f64, Terms, usize)> {
        let ends = self.ends.iter().enumerate();
        ends.filter_map(|(o, e)| e.map(|(c, t, _)| (c, t, o))).min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// The (entering, leaving) layouts of each layer on the cheapest way, first layer first. `tables` are those of
    /// the run's layers.
    pub fn path(&self, tables: &[Rc<LayerTable>]) -> Vec<(usize, usize)> {
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

/// The chains of all runs of `kinds` (a kind per layer), made once for each sequence of kinds:
/// `chains[first][length - 1]`.
pub fn chains(kinds: &[usize], tables: &[Rc<LayerTable>]) -> Vec<Vec<Rc<Chain>>> {
    let mut known: HashMap<Vec<(usize, usize)>, Rc<Chain>> = HashMap::new();
    (0..kinds.len())
        .map(|first| {
            let mut runs: Vec<(usize, usize)> = Vec::new();
            let mut row: Vec<Rc<Chain>> = Vec::new();
            for end in first..kinds.len() {
                match runs.last_mut() {
                    Some((kind, count)) if *kind == kinds[end] => *count += 1,
                    _ => runs.push((kinds[end], 1)),
                }
                let chain = match known.get(&runs) {
                    Some(chain) => chain.clone(),
                    None => {
                        let table = &tables[kinds[end]];
                        let chain = match row.last() {
                            None => Chain::first(table),
                            Some(before) => before.extend(&tables[kinds[end - 1]], table),
                        };
                        let chain = Rc::new(chain);
                        known.insert(runs.clone(), chain.clone());
                        chain
                    }
                };
                row.push(chain);
            }
            row
        })
        .collect()
}
