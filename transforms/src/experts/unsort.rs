//! Rows in the order of tokens instead of sorted by expert.
//!
//! A value that permutes the rows of another is computed from that other one. Elementwise ops on rows, lookups for each
//! row, and products of each row with a matrix commute with the order. In the end, rows are restored to their order,
//! summed, or scattered to their tokens. There the order no longer matters. So that result is computed from the
//! original rows, and the sort is dead. If a use of the order remains, that use and the sort stay unchanged.

use super::{counts_along, plain, splat};
use altiplano_ir::array::{self, Built};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::Values;
use altiplano_ir::op::{
    ArgSort, Binary, Combine, Compare, Direction, DotGeneral, Gather, GatherDims, Op, Operator, Reducer, ScatterAdd,
};
use altiplano_ir::simplify::without_dead_nodes;
use altiplano_ir::tensor::Tensor;
use std::collections::BTreeMap;

/// The largest number of elements of an index vector that is computed.
const MOST_ELEMENTS: u64 = 1 << 23;

/// The largest number of ops between a position and an index computed from it.
const MOST_OPS: usize = 48;

/// A value that has, at position `i` of `dim`, the row of `value` at position `order[i]`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Permuted {
    /// The sort, in the new graph.
    order: ValueId,
    dim: usize,
    value: ValueId,
}

struct Unsort {
    to: Graph,
    /// The known permutations among values of the new graph.
    permuted: BTreeMap<ValueId, Permuted>,
    /// Values that are the inverse of an order.
    inverse: BTreeMap<ValueId, ValueId>,
    /// The keys of each order.
    keys: BTreeMap<ValueId, ValueId>,
    /// The smallest and the largest element of each value so far, if known.
    bounds: Vec<Option<(f64, f64)>>,
}

/// The graph without sorts that have no effect.
pub(crate) fn unsorted(graph: &Graph) -> Graph {
    let to = Graph { name: graph.name.clone(), ..Default::default() };
    let (permuted, inverse, keys) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut pass = Unsort { to, permuted, inverse, keys, bounds: Vec::new() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        let before = pass.to.len();
        map.push(pass.value(Node { operands, ..node.clone() }));
        pass.to.nodes[before..].iter_mut().filter(|n| n.name.is_empty()).for_each(|n| n.name.clone_from(&node.name));
    }
    pass.to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    pass.to.take_pins(graph, |v| Some(map[v.index()]));
    without_dead_nodes(&pass.to)
}

impl Unsort {
    fn value(&mut self, node: Node) -> ValueId {
        self.note_bounds();
        if let Some(same) = self.as_known(&node) {
            return same;
        }
        if let Some(value) = self.ended(&node) {
            return value;
        }
        let v = self.to.append(node);
        self.note_bounds();
        if let Some(permuted) = self.permuted(v) {
            self.permuted.insert(v, permuted);
        }
        v
    }

    fn of(&self, v: ValueId) -> Option<Permuted> {
        self.permuted.get(&v).copied()
    }

    // ---- The end of an order.

    /// The node's value if it does not depend on the order, computed from the original rows.
    fn ended(&mut self, node: &Node) -> Option<ValueId> {
        let operands = &node.operands;
        match &node.op {
            Op::Reduce(reduce) => {
                let rows = self.of(operands[0]).filter(|p| reduce.dims.contains(&p.dim))?;
                self.to.push(node.op.clone(), &[rows.value]).ok()
            }
            Op::DotGeneral(dot) => {
                let (lhs, rhs) = (self.of(operands[0])?, self.of(operands[1])?);
                let at = dot.lhs_contract.iter().position(|&d| d == lhs.dim)?;
                let same = lhs.order == rhs.order && dot.rhs_contract[at] == rhs.dim;
                same.then(|| self.to.push(node.op.clone(), &[lhs.value, rhs.value]).ok()).flatten()
            }
            Op::Gather(gather) => {
                let rows = self.of(operands[0])?;
                let index = self.inverse.get(&operands[1]).copied()?;
                let (shape, rank) = (self.to.shape(operands[1]).to_vec(), node.ty.rank());
                let along = takes_rows(&gather.dims, self.to.shape(operands[0]), rows.dim, rank)?;
                let vector = shape.iter().filter(|&&n| n != 1).count() <= 1;
                if index != rows.order || !vector || gather.dims.indices_dims(shape.len()).len() != 1 {
                    return None;
                }
                self.moved(rows, along)
            }
            Op::ScatterAdd(scatter) => {
                let (index, rows) = (self.of(operands[0])?, self.of(operands[1])?);
                let over = self.updates_dim(&scatter.dims, operands[0], index, operands[1])?;
                if index.order != rows.order || over != rows.dim {
                    return None;
                }
                self.added(scatter, index.value, rows).ok()
            }
            Op::Scatter(scatter) if scatter.combine == Combine::Replace => {
                let index = self.of(operands[1])?;
                let over = self.updates_dim(&scatter.dims, operands[1], index, operands[2])?;
                let table = self.to.shape(operands[0]).to_vec();
                let along = takes_rows(&scatter.dims, &table, *scatter.dims.start_index_map.first()?, table.len())?;
                // Every row is written exactly once.
                let rows = table[scatter.dims.start_index_map[0]];
                if !self.counts(index.value) || rows != self.to.shape(operands[1])[index.dim] || along != over {
                    return None;
                }
                if let Some(updates) = self.of(operands[2]).filter(|p| p.order == index.order && p.dim == over) {
                    return self.moved(updates, scatter.dims.start_index_map[0]);
                }
                // Positions scattered to an order are its inverse.
                if table.len() == 1 && counts_along(&self.to, operands[2]) == Some(0) {
                    let v = self.to.append(node.clone());
                    self.note_bounds();
                    self.bounds[v.index()] = Some((0.0, rows.saturating_sub(1) as f64));
                    self.inverse.insert(v, index.order);
                    return Some(v);
                }
                None
            }
            _ => None,
        }
    }

    /// The rows with their dimension moved to another position.
    fn moved(&mut self, rows: Permuted, to: usize) -> Option<ValueId> {
        let rank = self.to.shape(rows.value).len();
        let mut order: Vec<usize> = (0..rank).filter(|&d| d != rows.dim).collect();
        order.insert(to, rows.dim);
        array::permute(&mut self.to, rows.value, &order).ok()
    }

    /// The dimension of a scatter's updates that corresponds to the permuted dimension of its indices.
    fn updates_dim(&self, dims: &GatherDims, indices: ValueId, index: Permuted, updates: ValueId) -> Option<usize> {
        let rank = self.to.shape(indices).len();
        let at = dims.indices_dims(rank).iter().position(|&d| d == index.dim)?;
        dims.batch_dims(self.to.shape(updates).len()).get(at).copied()
    }

    /// A sum of rows at their positions, which may follow from row numbers.
    fn added(&mut self, scatter: &ScatterAdd, index: ValueId, rows: Permuted) -> Built {
        let g = &mut self.to;
        let plain_rows = scatter.dims.indices_dims(g.shape(index).len()).len() == 1 && rows.dim == 0;
        let first = takes_rows(&scatter.dims, &scatter.shape, 0, g.shape(rows.value).len()) == Some(0);
        if let Some(pattern) = positions(g, index).filter(|_| plain_rows && first) {
            let (n, shape) = (g.shape(rows.value)[0], scatter.shape.clone());
            match pattern {
                Pattern::Count if n == shape[0] => return Ok(rows.value),
                Pattern::Each(k) if shape[0] * k == n => {
                    let split = [&[shape[0], k], &shape[1..]].concat();
                    let split = array::reshape(g, rows.value, &split)?;
                    return array::sum(g, split, &[1], false);
                }
                Pattern::Times(k) if shape[0] * k == n => {
                    let split = [&[k, shape[0]], &shape[1..]].concat();
                    let split = array::reshape(g, rows.value, &split)?;
                    return array::sum(g, split, &[0], false);
                }
                _ => {}
            }
        }
        g.push(Op::ScatterAdd(scatter.clone()), &[index, rows.value])
    }

    // ---- The propagation of an order through ops.

    fn permuted(&mut self, v: ValueId) -> Option<Permuted> {
        let node = self.to.node(v).clone();
        let operands = &node.operands;
        match &node.op {
            Op::ArgSort(sort) => self.sorted(v, sort, operands),
            Op::Reduce(reduce) => {
                self.passes_inverse(v, operands);
                if let Some(key) = self.group_key(&node) {
                    return Some(key);
                }
                let rows = self.of(*operands.first()?)?;
                let dim = rows.dim - reduce.dims.iter().filter(|&&d| d < rows.dim).count();
                self.same_op(&node, rows, &[rows.value], dim)
            }
            op if op.is_elementwise() => {
                self.passes_inverse(v, operands);
                let rows = operands.iter().find_map(|&o| self.of(o))?;
                let mut of_rows = Vec::with_capacity(operands.len());
                for &o in operands {
                    of_rows.push(match self.of(o) {
                        Some(p) if p.order == rows.order && p.dim == rows.dim => p.value,
                        None if self.is_same_along(o, rows.dim, 0) => o,
                        _ => return None,
                    });
                }
                self.same_op(&node, rows, &of_rows, rows.dim)
            }
            Op::BroadcastInDim(op) => {
                self.passes_inverse(v, operands);
                let rows = self.of(operands[0])?;
                let dim = op.dims[rows.dim];
                let same = self.to.shape(operands[0])[rows.dim] == op.shape[dim];
                same.then(|| self.same_op(&node, rows, &[rows.value], dim)).flatten()
            }
            Op::Reshape(_) => {
                self.passes_inverse(v, operands);
                let rows = self.of(operands[0])?;
                let dim = super::same_dim(self.to.shape(operands[0]), rows.dim, &node.ty.shape)?;
                self.same_op(&node, rows, &[rows.value], dim)
            }
            Op::Transpose(op) => {
                let rows = self.of(operands[0])?;
                let dim = op.permutation.iter().position(|&d| d == rows.dim)?;
                self.same_op(&node, rows, &[rows.value], dim)
            }
            Op::Slice(op) => {
                let rows = self.of(operands[0])?;
                let whole = op.start[rows.dim] == 0 && op.stride[rows.dim] == 1;
                let whole = whole && op.limit[rows.dim] == self.to.shape(operands[0])[rows.dim];
                whole.then(|| self.same_op(&node, rows, &[rows.value], rows.dim)).flatten()
            }
            Op::Pad(op) => {
                let rows = self.of(operands[0])?;
                let whole = op.low[rows.dim] == 0 && op.high[rows.dim] == 0;
                let whole = whole && op.interior.get(rows.dim).is_none_or(|&i| i == 0);
                whole.then(|| self.same_op(&node, rows, &[rows.value, operands[1]], rows.dim)).flatten()
            }
            Op::Concatenate(op) => {
                let rows = self.of(operands[0]).filter(|p| p.dim != op.dim)?;
                let same = |o: &ValueId| self.of(*o).filter(|p| p.order == rows.order && p.dim == rows.dim);
                let all: Option<Vec<ValueId>> = operands.iter().map(|o| same(o).map(|p| p.value)).collect();
                self.same_op(&node, rows, &all?, rows.dim)
            }
            Op::DotGeneral(dot) => self.product(&node, dot),
            Op::GroupedDot(_) => {
                let (rows, group) = (self.of(operands[0])?, self.of(operands[2])?);
                let same = rows.order == group.order && rows.dim == group.dim && self.of(operands[1]).is_none();
                same.then(|| self.same_op(&node, rows, &[rows.value, operands[1], group.value], rows.dim)).flatten()
            }
            Op::Gather(gather) => self.looked_up(&node, gather),
            _ => None,
        }
    }

    /// A product of which a free dimension, or a batch dimension of both factors, is permuted.
    fn product(&mut self, node: &Node, dot: &DotGeneral) -> Option<Permuted> {
        let operands = &node.operands;
        let batch = dot.lhs_batch.len();
        let lhs_free = dot.lhs_free(self.to.shape(operands[0]).len());
        match (self.of(operands[0]), self.of(operands[1])) {
            (Some(rows), None) => {
                let dim = batch + lhs_free.iter().position(|&d| d == rows.dim)?;
                self.same_op(node, rows, &[rows.value, operands[1]], dim)
            }
            (None, Some(rows)) => {
                let free = dot.rhs_free(self.to.shape(operands[1]).len());
                let dim = batch + lhs_free.len() + free.iter().position(|&d| d == rows.dim)?;
                self.same_op(node, rows, &[operands[0], rows.value], dim)
            }
            (Some(lhs), Some(rhs)) if lhs.order == rhs.order => {
                let dim = dot.lhs_batch.iter().position(|&d| d == lhs.dim)?;
                let same = dot.rhs_batch[dim] == rhs.dim;
                same.then(|| self.same_op(node, lhs, &[lhs.value, rhs.value], dim)).flatten()
            }
            _ => None,
        }
    }

    /// The same op on the original rows.
    fn same_op(&mut self, node: &Node, rows: Permuted, operands: &[ValueId], dim: usize) -> Option<Permuted> {
        let value = self.to.push(node.op.clone(), operands).ok()?;
        self.note_bounds();
        Some(Permuted { value, dim, ..rows })
    }

    fn passes_inverse(&mut self, v: ValueId, operands: &[ValueId]) {
        let keeps = matches!(self.to.node(v).op, Op::Convert(_) | Op::Reshape(_) | Op::BroadcastInDim(_));
        let same = |o: ValueId| self.to.ty(o).elements() == self.to.ty(v).elements();
        if let &[o] = operands
            && keeps
            && same(o)
            && self.to.ty(v).dtype.is_integer()
            && let Some(&order) = self.inverse.get(&o)
        {
            self.inverse.insert(v, order);
        }
    }

    /// An order of one row of keys, or the inverse of an order, which is obtained by sorting it.
    fn sorted(&mut self, v: ValueId, sort: &ArgSort, operands: &[ValueId]) -> Option<Permuted> {
        let (&[key], &[rows]) = (operands, self.to.shape(v)) else { return None };
        if let Some(of) = self.of(key).filter(|p| self.counts(p.value)) {
            if sort.descending == [false] {
                self.inverse.insert(v, of.order);
            }
            return None;
        }
        // Rows sorted by the same keys have the same order.
        let same = |(order, known): (&ValueId, &ValueId)| {
            let twin = matches!(&self.to.node(*order).op, Op::ArgSort(s) if s == sort);
            (twin && plain(&self.to, *known) == plain(&self.to, key)).then_some(*order)
        };
        let order = self.keys.iter().find_map(same).unwrap_or(v);
        self.keys.entry(order).or_insert(key);
        let dtype = self.to.ty(v).dtype;
        let value = array::iota(&mut self.to, &[rows], 0, dtype).ok()?;
        self.note_bounds();
        Some(Permuted { order, dim: 0, value })
    }

    /// Lookups with an index for each row.
    fn looked_up(&mut self, node: &Node, gather: &Gather) -> Option<Permuted> {
        let (table, indices) = (node.operands[0], node.operands[1]);
        let index = self.of(indices)?;
        let rank = self.to.shape(indices).len();
        let at = gather.dims.indices_dims(rank).iter().position(|&d| d == index.dim)?;
        let dim = gather.dims.batch_dims(node.ty.rank())[at];
        let batching = gather.dims.indices_batching_dims.iter().position(|&d| d == index.dim);
        let table = match (batching, self.of(table)) {
            (None, None) => table,
            (Some(b), Some(p)) if p.order == index.order && p.dim == gather.dims.operand_batching_dims[b] => p.value,
            _ => return None,
        };
        let plain_rows = gather.dims.indices_dims(rank).len() == 1 && batching.is_none();
        if plain_rows && let Some(value) = self.repeated(gather, table, index.value, node, dim) {
            return Some(Permuted { value, dim, ..index });
        }
        self.same_op(node, index, &[table, index.value], dim)
    }

    /// Rows of a table at positions that follow from row numbers: all rows, each a few times, or all a few times.
    fn repeated(
        &mut self,
        gather: &Gather,
        table: ValueId,
        index: ValueId,
        node: &Node,
        dim: usize,
    ) -> Option<ValueId> {
        let from = *gather.dims.start_index_map.first()?;
        let g = &mut self.to;
        let shape = g.shape(table).to_vec();
        if takes_rows(&gather.dims, &shape, from, node.ty.rank())? != dim || dim != from {
            return None;
        }
        let (rows, wanted) = (shape[from], node.ty.shape[dim]);
        let spread = |before: bool, k: u64| {
            let mut wide = shape.clone();
            wide.insert(if before { from } else { from + 1 }, k);
            let dims: Vec<usize> = (0..wide.len()).filter(|&d| d != if before { from } else { from + 1 }).collect();
            (wide, dims)
        };
        let (wide, dims) = match positions(g, index)? {
            Pattern::Count if rows == wanted => return Some(table),
            Pattern::Each(k) if rows * k == wanted => spread(false, k),
            Pattern::Times(k) if rows * k == wanted => spread(true, k),
            _ => return None,
        };
        let value =
            g.push(Op::BroadcastInDim(altiplano_ir::op::BroadcastInDim { shape: wide, dims }), &[table]).ok()?;
        let value = array::reshape(g, value, &node.ty.shape).ok()?;
        self.note_bounds();
        Some(value)
    }

    /// Returns true if a value counts `0, 1, ..`.
    fn counts(&self, v: ValueId) -> bool {
        positions(&self.to, v) == Some(Pattern::Count)
    }

    /// Returns true if a value is constant along a dimension.
    fn is_same_along(&self, v: ValueId, dim: usize, depth: usize) -> bool {
        let node = self.to.node(v);
        match &node.op {
            Op::Constant(literal) => literal.as_splat().is_some(),
            Op::Iota(iota) => iota.dim != dim,
            Op::BroadcastInDim(op) => match op.dims.iter().position(|&d| d == dim) {
                None => true,
                Some(from) => self.to.shape(node.operands[0])[from] == 1 && op.shape[dim] >= 1,
            },
            _ if node.ty.rank() == 0 => true,
            op if op.is_elementwise() && depth < 8 => {
                node.operands.iter().all(|&o| self.is_same_along(o, dim, depth + 1))
            }
            _ => false,
        }
    }

    // ---- Groups of sorted rows.

    /// The group of each row, computed from the ends of groups, is the sorted key if group sizes are the frequencies of
    /// keys.
    fn group_key(&mut self, node: &Node) -> Option<Permuted> {
        let ends = group_ends(&self.to, node)?;
        let counted = plain(&self.to, ends);
        let Op::Cumulative(running) = &self.to.node(counted).op else { return None };
        if running.reducer != Reducer::Sum || running.reverse {
            return None;
        }
        let (key, groups) = self.counted_key(self.to.node(counted).operands[0])?;
        let (_, order) =
            self.keys.iter().map(|(o, k)| (plain(&self.to, *k), *o)).find(|(k, _)| *k == plain(&self.to, key))?;
        let key = self.keys[&order];
        let ascends = matches!(&self.to.node(order).op, Op::ArgSort(s) if s.descending == [false]);
        let (low, high) = self.bounds[key.index()]?;
        if !ascends || self.to.shape(key) != node.ty.shape || low < 0.0 || high >= groups as f64 {
            return None;
        }
        let value = self.to.convert(key, node.ty.dtype);
        self.note_bounds();
        Some(Permuted { order, dim: 0, value })
    }

    /// The key whose numbers a value counts, and how many numbers there are.
    fn counted_key(&self, v: ValueId) -> Option<(ValueId, u64)> {
        let g = &self.to;
        let v = converted(g, v);
        let node = g.node(v);
        let &[groups] = node.ty.shape.as_slice() else { return None };
        match &node.op {
            Op::Reduce(reduce) if reduce.reducer == Reducer::Sum => {
                let hit = converted(g, node.operands[0]);
                let (Op::Compare(Compare { direction: Direction::Eq }), &[a, b]) =
                    (&g.node(hit).op, g.node(hit).operands.as_slice())
                else {
                    return None;
                };
                let kept = (0..g.shape(hit).len()).find(|d| !reduce.dims.contains(d))?;
                let key = if counts_along(g, a) == Some(kept) { b } else { a };
                let numbers = if key == a { b } else { a };
                let varies = counts_along(g, numbers) == Some(kept) && self.is_same_along(key, kept, 0);
                let key = repeated_key(g, key)?;
                let all: u64 = reduce.dims.iter().map(|&d| g.shape(hit)[d]).product();
                (varies && g.ty(key).elements() == all).then_some((key, groups))
            }
            Op::ScatterAdd(scatter) => {
                let rows = takes_rows(&scatter.dims, &scatter.shape, 0, 1) == Some(0);
                (rows && splat(g, node.operands[1]) == Some(1.0)).then_some((node.operands[0], groups))
            }
            Op::Binary(Binary::Add) => {
                // Added to zeros.
                let [a, b] = [node.operands[0], node.operands[1]];
                match (splat(g, a), splat(g, b)) {
                    (Some(0.0), _) => self.counted_key(b),
                    (_, Some(0.0)) => self.counted_key(a),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    // ---- Known bounds of integers.

    /// An existing value that equals the node, if bounds prove it. The node wraps negative indices, or clamps indices.
    fn as_known(&self, node: &Node) -> Option<ValueId> {
        let bound = |i: usize| self.bounds[node.operands[i].index()];
        match &node.op {
            Op::Select(_) => {
                let p = self.to.node(node.operands[0]);
                let Op::Compare(Compare { direction }) = p.op else { return None };
                let (a, b) = (self.bounds[p.operands[0].index()]?, self.bounds[p.operands[1].index()]?);
                let (always, never) = match direction {
                    Direction::Lt => (a.1 < b.0, a.0 >= b.1),
                    Direction::Ge => (a.0 >= b.1, a.1 < b.0),
                    Direction::Gt => (a.0 > b.1, a.1 <= b.0),
                    Direction::Le => (a.1 <= b.0, a.0 > b.1),
                    _ => (false, false),
                };
                let found = if always { Some(1) } else { never.then_some(2) };
                found.map(|i| node.operands[i]).filter(|&v| *self.to.ty(v) == node.ty)
            }
            Op::Binary(op @ (Binary::Maximum | Binary::Minimum)) if node.ty.dtype.is_integer() => {
                let (a, b) = (bound(0)?, bound(1)?);
                let first = if *op == Binary::Maximum { a.0 >= b.1 } else { a.1 <= b.0 };
                let second = if *op == Binary::Maximum { b.0 >= a.1 } else { b.1 <= a.0 };
                if first { Some(node.operands[0]) } else { second.then_some(node.operands[1]) }
            }
            _ => None,
        }
    }

    /// Computes the bounds of values that have none yet.
    fn note_bounds(&mut self) {
        for i in self.bounds.len()..self.to.len() {
            let found = self.bounds_of(ValueId(i as u32));
            self.bounds.push(found);
        }
    }

    fn bounds_of(&self, v: ValueId) -> Option<(f64, f64)> {
        let node = self.to.node(v);
        if !node.ty.dtype.is_integer() {
            return None;
        }
        let of = |i: usize| self.bounds[node.operands[i].index()];
        let union = |a: (f64, f64), b: (f64, f64)| (a.0.min(b.0), a.1.max(b.1));
        let found = match &node.op {
            Op::Constant(literal) => match &literal.values {
                Values::Splat(x) => (x.0, x.0),
                Values::Dense(all) => all.iter().map(|x| (x.0, x.0)).reduce(union)?,
            },
            Op::Iota(iota) => (0.0, node.ty.shape[iota.dim].saturating_sub(1) as f64),
            Op::ArgSort(sort) => (0.0, node.ty.shape[sort.dim].saturating_sub(1) as f64),
            Op::Convert(_)
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::BroadcastInDim(_)
            | Op::Slice(_)
            | Op::Reverse(_) => of(0)?,
            Op::Gather(gather) => match gather.out_of_bounds {
                altiplano_ir::op::OutOfBounds::Clamp => of(0)?,
                altiplano_ir::op::OutOfBounds::Zero => union(of(0)?, (0.0, 0.0)),
            },
            Op::Select(_) => union(of(1)?, of(2)?),
            Op::Concatenate(_) => {
                let all: Option<Vec<(f64, f64)>> = (0..node.operands.len()).map(of).collect();
                all?.into_iter().reduce(union)?
            }
            Op::Binary(op) => {
                let (a, b) = (of(0)?, of(1)?);
                match op {
                    Binary::Add => (a.0 + b.0, a.1 + b.1),
                    Binary::Subtract => (a.0 - b.1, a.1 - b.0),
                    Binary::Maximum => (a.0.max(b.0), a.1.max(b.1)),
                    Binary::Minimum => (a.0.min(b.0), a.1.min(b.1)),
                    Binary::Multiply if a.0 >= 0.0 && b.0 >= 0.0 => (a.0 * b.0, a.1 * b.1),
                    Binary::Divide if a.0 >= 0.0 && b.0 >= 1.0 => ((a.0 / b.1).trunc(), (a.1 / b.0).trunc()),
                    Binary::Remainder if a.0 >= 0.0 && b.0 >= 1.0 => (0.0, a.1.min(b.1 - 1.0)),
                    _ => return None,
                }
            }
            _ => return None,
        };
        // A value that wraps around has no bounds.
        let fits = |x: f64| x.abs() < 2f64.powi(52) && node.ty.dtype.wrap(x) == x;
        (fits(found.0) && fits(found.1)).then_some(found)
    }
}

/// The value before conversions.
fn converted(g: &Graph, mut v: ValueId) -> ValueId {
    while matches!(g.node(v).op, Op::Convert(_)) {
        v = g.node(v).operands[0];
    }
    v
}

/// The key that a value repeats for each number, before conversions of integers.
fn repeated_key(g: &Graph, mut v: ValueId) -> Option<ValueId> {
    loop {
        let node = g.node(v);
        match &node.op {
            Op::BroadcastInDim(_) | Op::Reshape(_) => v = node.operands[0],
            Op::Convert(_) => {
                v = node.operands[0];
                if g.ty(v).dtype.is_float() {
                    return None;
                }
            }
            Op::Binary(Binary::Subtract) if splat(g, node.operands[1]) == Some(0.0) => v = node.operands[0],
            _ => return Some(v),
        }
    }
}

/// The ends of groups, if the node counts for each row the groups that end at it or before it.
fn group_ends(g: &Graph, node: &Node) -> Option<ValueId> {
    let Op::Reduce(reduce) = &node.op else { return None };
    if reduce.reducer != Reducer::Sum || reduce.dims != [1] || node.ty.rank() != 1 {
        return None;
    }
    let behind = g.node(converted(g, node.operands[0]));
    let (Op::Compare(Compare { direction: Direction::Ge }), &[row, ends]) = (&behind.op, behind.operands.as_slice())
    else {
        return None;
    };
    let Op::BroadcastInDim(op) = &g.node(ends).op else { return None };
    (counts_along(g, row) == Some(0) && op.dims == [1]).then(|| g.node(ends).operands[0])
}

/// The dimension of the result along which rows are taken from dimension `from` of a table. All other dimensions must
/// be taken whole and in order.
fn takes_rows(dims: &GatherDims, table: &[u64], from: usize, result_rank: usize) -> Option<usize> {
    let whole =
        (0..table.len()).all(|d| if d == from { dims.slice_sizes[d] == 1 } else { dims.slice_sizes[d] == table[d] });
    let rows =
        dims.start_index_map == [from] && dims.collapsed_slice_dims == [from] && dims.operand_batching_dims.is_empty();
    let over = dims.batch_dims(result_rank);
    (whole && rows && over.len() == 1).then(|| over[0])
}

/// Positions that follow from row numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pattern {
    /// `0, 1, ..`
    Count,
    /// Each number `k` times in a row: `0, 0, 1, 1, ..`
    Each(u64),
    /// All numbers in a row, `k` times: `0, 1, .., 0, 1, ..`
    Times(u64),
}

/// The pattern of an index vector that depends on no leaf.
fn positions(g: &Graph, v: ValueId) -> Option<Pattern> {
    let mut needed = std::collections::BTreeSet::new();
    let mut pending = vec![v];
    while let Some(at) = pending.pop() {
        let node = g.node(at);
        let cheap = node.op.is_elementwise()
            || matches!(
                node.op,
                Op::Constant(_)
                    | Op::Iota(_)
                    | Op::Reshape(_)
                    | Op::BroadcastInDim(_)
                    | Op::Slice(_)
                    | Op::Transpose(_)
            );
        if needed.insert(at) {
            if !cheap || needed.len() > MOST_OPS || node.ty.elements() > MOST_ELEMENTS {
                return None;
            }
            pending.extend(&node.operands);
        }
    }
    let ty = g.ty(v);
    // A single row of numbers.
    if !ty.dtype.is_integer() || ty.shape.iter().filter(|&&n| n != 1).count() > 1 {
        return None;
    }
    if counts_along(g, v).is_some_and(|d| ty.shape[d] == ty.elements()) {
        return Some(Pattern::Count);
    }
    let mut known: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    for at in needed {
        let node = g.node(at);
        let operands: Vec<&Tensor> = node.operands.iter().filter_map(|o| known.get(o)).collect();
        let tensor = node.op.eval(&operands, &node.ty);
        known.insert(at, tensor);
    }
    pattern(&known.get(&v)?.data)
}

fn pattern(data: &[f64]) -> Option<Pattern> {
    let n = data.len() as u64;
    let is = |f: &dyn Fn(u64) -> u64| (0..n).zip(data).all(|(i, &x)| x == f(i) as f64);
    if n == 0 {
        return None;
    }
    if is(&|i| i) {
        return Some(Pattern::Count);
    }
    let run = data.iter().take_while(|&&x| x == 0.0).count() as u64;
    if run > 1 && n.is_multiple_of(run) && is(&|i| i / run) {
        return Some(Pattern::Each(run));
    }
    let period = data.iter().skip(1).position(|&x| x == 0.0).map_or(n, |p| p as u64 + 1);
    (period > 0 && n.is_multiple_of(period) && is(&|i| i % period)).then_some(Pattern::Times(n / period))
}
