//! Defers updates of parts of a tensor at known positions, as written by loops that stack the results of their
//! iterations.
//!
//! Each update is recorded, not copied. A chain of updates becomes one concatenation, of the last write to each
//! place and the rest of the original, but only if the tensor is used as a whole. A slice finds the value that
//! was written to its place. A loop of `n` iterations therefore costs `n` pieces, not `n` copies of the stack.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;

use super::convert::Converter;
use super::report::Reject;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Concatenate, Input, Op, ShapeError, Slice};

/// `base` with `update` written from `start` on along `dim`. The update spans the other dimensions.
struct Update {
    base: ValueId,
    update: ValueId,
    dim: usize,
    start: u64,
    size: u64,
}

/// `size` rows of `source` from `from` on, at position `at` of the result.
#[derive(Clone, Copy)]
struct Piece {
    at: u64,
    source: ValueId,
    from: u64,
    size: u64,
}

/// An updated tensor, as a concatenation of pieces.
pub(super) struct Pieces {
    dim: usize,
    pieces: Vec<Piece>,
}

#[derive(Default)]
pub(super) struct Updates {
    updates: HashMap<ValueId, Update>,
    resolved: BTreeMap<ValueId, Pieces>,
    /// Cached pieces of tensors that were sliced after many updates.
    tables: HashMap<ValueId, Rc<Vec<Piece>>>,
    table_pieces: usize,
}

/// Chains longer than this are resolved once for all slices.
const SHORT_CHAIN: usize = 16;
/// Limits the memory of the tables.
const MOST_TABLE_PIECES: usize = 1 << 20;

impl Updates {
    pub(crate) fn resolved(&self, value: ValueId) -> Option<&Pieces> {
        self.resolved.get(&value)
    }

    fn dim(&self, value: ValueId) -> Option<usize> {
        Some(self.updates.get(&value)?.dim)
    }

    /// The pieces of `range` of an updated tensor, in order. `None` if that takes more than `steps` updates;
    /// with `known`, the walk ends at a tensor whose pieces are cached.
    fn pieces(
        &self,
        value: ValueId,
        range: Range<u64>,
        steps: usize,
        known: bool,
        is_whole: impl Fn(ValueId) -> bool,
    ) -> Option<Vec<Piece>> {
        let dim = self.dim(value)?;
        let mut pieces = Vec::new();
        let mut open = vec![range];
        let mut at = value;
        let mut step = 0;
        while !open.is_empty() {
            let update = self.updates.get(&at).filter(|u| u.dim == dim && (at == value || !is_whole(at)));
            let Some(&Update { base, update, start, size, .. }) = update else {
                pieces.extend(open.drain(..).map(|r| Piece {
                    at: r.start,
                    source: at,
                    from: r.start,
                    size: r.end - r.start,
                }));
                break;
            };
            // Cached pieces of an earlier tensor of the chain are reused.
            if let Some(table) = self.tables.get(&at).filter(|_| known) {
                pieces.extend(open.drain(..).flat_map(|range| within(table, range)));
                break;
            }
            if step == steps {
                return None;
            }
            step += 1;
            let mut rest = Vec::with_capacity(open.len() + 1);
            for range in open {
                let (from, to) = (range.start.max(start), range.end.min(start + size));
                if from >= to {
                    rest.push(range);
                    continue;
                }
                pieces.push(Piece { at: from, source: update, from: from - start, size: to - from });
                rest.extend([range.start..from, to..range.end].into_iter().filter(|left| !left.is_empty()));
            }
            open = rest;
            at = base;
        }
        pieces.sort_by_key(|piece| piece.at);
        Some(pieces)
    }
}

impl Pieces {
    /// Appends the concatenation. `renumbered` maps the pieces to values of this graph.
    pub(crate) fn emit(&self, graph: &mut Graph, renumbered: &[ValueId], name: &str) -> ValueId {
        let first = graph.len();
        let mut parts = Vec::with_capacity(self.pieces.len());
        for piece in &self.pieces {
            let source = renumbered[piece.source.index()];
            let shape = graph.shape(source).to_vec();
            parts.push(match piece.size == shape[self.dim] {
                true => source,
                false => graph.emit(row_slice(&shape, self.dim, piece.from, piece.size), &[source]),
            });
        }
        let value = match parts.as_slice() {
            [only] => *only,
            _ => graph.emit(Op::Concatenate(Concatenate { dim: self.dim }), &parts),
        };
        graph.nodes[first..].iter_mut().for_each(|node| name.clone_into(&mut node.name));
        value
    }
}

fn row_slice(shape: &[u64], dim: usize, from: u64, size: u64) -> Op {
    let (mut start, mut limit) = (vec![0; shape.len()], shape.to_vec());
    start[dim] = from;
    limit[dim] = from + size;
    Op::Slice(Slice { start, limit, stride: vec![1; shape.len()] })
}

impl Converter<'_, '_> {
    /// `base` with `update` written at `starts`, which must be inside.
    pub fn updated(&mut self, base: ValueId, update: ValueId, starts: &[u64]) -> Result<ValueId, Reject> {
        let (shape, part) = (self.graph.shape(base).to_vec(), self.graph.shape(update).to_vec());
        let (left, right) = (self.graph.ty(base).dtype, self.graph.ty(update).dtype);
        if left != right {
            return Err(ShapeError::DTypesDiffer { left, right }.into());
        }
        let mut partial = (0..shape.len()).filter(|&d| part[d] != shape[d]);
        let Some(dim) = partial.next() else {
            return Ok(update);
        };
        if part.contains(&0) {
            return Ok(base);
        }
        let mut update = update;
        if partial.next().is_some() {
            // Cuts out the rows that change, updates the other dimensions, and puts them back.
            let (mut start, mut limit) = (vec![0; shape.len()], shape.clone());
            start[dim] = starts[dim];
            limit[dim] = starts[dim] + part[dim];
            let rows = self.sliced(base, start, limit)?;
            let mut inner = starts.to_vec();
            inner[dim] = 0;
            update = self.updated(rows, update, &inner)?;
        }
        let (ty, known) = (self.graph.ty(base).clone(), (self.known(base), self.known(update)));
        let op = Op::Input(Input { name: String::new(), ty: ty.clone() });
        let name = self.module.location_name(self.location).unwrap_or_default().to_owned();
        let value = self.append(Node { op, operands: vec![base, update], ty, batch_dims: 0, name });
        let (start, size) = (starts[dim], part[dim]);
        if let (Some(base), Some(update)) = known {
            let mut tensor = (*base).clone();
            altiplano_ir::tensor::for_each_index(update.shape(), |index| {
                let mut target = index.to_vec();
                target[dim] += start;
                let at = tensor.offset(&target);
                tensor.data[at] = update.at(index);
            });
            self.knowledge.note_value(value, tensor);
        }
        self.updates.updates.insert(value, Update { base, update, dim, start, size });
        Ok(value)
    }

    /// A slice of a tensor, taken from the latest writes to that part.
    pub fn sliced(&mut self, x: ValueId, mut start: Vec<u64>, mut limit: Vec<u64>) -> Result<ValueId, Reject> {
        let mut x = x;
        while let Some(dim) = self.updates.dim(x) {
            let range = start[dim]..limit[dim];
            let pieces = match self.updates.tables.get(&x) {
                Some(table) => Some(within(table, range.clone())),
                None => self.updates.pieces(x, range.clone(), SHORT_CHAIN, true, |_| false),
            };
            let pieces = match pieces {
                Some(pieces) => pieces,
                None => {
                    let all = 0..self.graph.shape(x)[dim];
                    let table = self.updates.pieces(x, all, usize::MAX, true, |_| false).unwrap_or_default();
                    if self.updates.table_pieces + table.len() > MOST_TABLE_PIECES {
                        self.updates.tables.clear();
                        self.updates.table_pieces = 0;
                    }
                    let pieces = within(&table, range);
                    self.updates.table_pieces += table.len();
                    self.updates.tables.insert(x, Rc::new(table));
                    pieces
                }
            };
            let [piece] = pieces.as_slice() else { break };
            x = piece.source;
            start[dim] = piece.from;
            limit[dim] = piece.from + piece.size;
        }
        if start.iter().all(|s| *s == 0) && limit == self.graph.shape(x) {
            return Ok(x);
        }
        let stride = vec![1; start.len()];
        Ok(self.push(Op::Slice(Slice { start, limit, stride }), &[x])?)
    }

    /// Marks the values that the outputs need, and turns each updated tensor that is used as a whole into a
    /// concatenation.
    pub(crate) fn resolve_updates(&mut self) -> Vec<bool> {
        let outputs = self.graph.outputs.clone();
        let mut reached = vec![false; self.graph.len()];
        outputs.iter().for_each(|o| reached[o.index()] = true);
        let mut whole: HashSet<ValueId> = outputs.iter().copied().collect();
        for v in self.graph.values().rev().filter(|_| !self.updates.updates.is_empty()) {
            if !reached[v.index()] {
                continue;
            }
            let dim = self.updates.dim(v);
            for (position, operand) in self.graph.node(v).operands.iter().enumerate() {
                reached[operand.index()] = true;
                if dim.is_none() || position != 0 || self.updates.dim(*operand) != dim {
                    whole.insert(*operand);
                }
            }
        }
        let mut live = vec![false; self.graph.len()];
        outputs.iter().for_each(|o| live[o.index()] = true);
        for v in self.graph.values().rev() {
            if !live[v.index()] {
                continue;
            }
            let Some(dim) = self.updates.dim(v) else {
                self.graph.node(v).operands.iter().for_each(|o| live[o.index()] = true);
                continue;
            };
            let all = 0..self.graph.shape(v)[dim];
            let pieces = self.updates.pieces(v, all, usize::MAX, false, |at| whole.contains(&at)).unwrap_or_default();
            pieces.iter().for_each(|piece| live[piece.source.index()] = true);
            self.updates.resolved.insert(v, Pieces { dim, pieces });
        }
        live
    }
}

/// The pieces of a table that lie in `range`.
fn within(table: &[Piece], range: Range<u64>) -> Vec<Piece> {
    let first = table.partition_point(|piece| piece.at + piece.size <= range.start);
    let inside = table[first..].iter().take_while(|piece| piece.at < range.end);
    inside
        .map(|piece| {
            let (a, b) = (piece.at.max(range.start), (piece.at + piece.size).min(range.end));
            Piece { at: a, source: piece.source, from: piece.from + (a - piece.at), size: b - a }
        })
        .collect()
}
