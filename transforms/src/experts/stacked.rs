//! Unrolled loops over experts: each expert computes all rows and keeps those that chose it.
//!
//! Some terms of a sum differ only in their weights, and a mask keeps each where a selection equals a number of its
//! own. These terms are merged into one, whose products are grouped by the selection. Separate weights are stacked to
//! one tensor, which is made each time. Slices of one tensor are replaced by that tensor.

use super::{plain, splat};
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Binary, Compare, Concatenate, Direction, GroupedDot, Op, Operator, Reducer, Slice};
use altiplano_ir::simplify::without_dead_nodes;
use std::collections::BTreeMap;

/// The graph with such terms merged. `None` if there are none.
pub(crate) fn joined(graph: &Graph) -> Option<Graph> {
    if graph.nodes.iter().filter(|n| matches!(n.op, Op::Select(_))).count() < 2 {
        return None;
    }
    let users = graph.users();
    let mut classes: Option<Vec<u32>> = None;
    let is_add = |v: ValueId| matches!(graph.node(v).op, Op::Binary(Binary::Add)) && graph.ty(v).dtype.is_float();
    let is_inner =
        |v: ValueId| is_add(v) && matches!(users[v.index()][..], [only] if is_add(only)) && !graph.outputs.contains(&v);
    let mut to = Graph { name: graph.name.clone(), ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut any = false;
    for v in graph.values() {
        let node = graph.node(v);
        let before = to.len();
        let made = (is_add(v) && !is_inner(v)).then(|| -> Option<ValueId> {
            let mut addends = Vec::new();
            collect(graph, v, &|o| is_inner(o), &mut addends);
            if addends.iter().filter(|&&o| term(graph, o).is_some() || is_masked_product(graph, o)).count() < 2 {
                return None;
            }
            let (classes, map) = (classes.get_or_insert_with(|| numbered(graph)).as_slice(), map.as_slice());
            sum(graph, classes, map, &mut to, &addends).or_else(|| runs(graph, classes, map, &mut to, &addends))
        });
        let made = made.flatten().filter(|&m| to.ty(m) == graph.ty(v));
        any |= made.is_some();
        to.nodes[before..].iter_mut().filter(|n| n.name.is_empty()).for_each(|n| n.name.clone_from(&node.name));
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        map.push(made.unwrap_or_else(|| to.append(Node { operands, ..node.clone() })));
    }
    if !any {
        return None;
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| Some(map[v.index()]));
    Some(without_dead_nodes(&to))
}

/// The terms of nested additions, in order.
fn collect(graph: &Graph, v: ValueId, is_inner: &dyn Fn(ValueId) -> bool, found: &mut Vec<ValueId>) {
    // Sums are as deep as they have terms.
    let mut pending = vec![(v, true)];
    while let Some((v, is_root)) = pending.pop() {
        match graph.node(v).operands[..] {
            [a, b] if is_root || is_inner(v) => pending.extend([(b, false), (a, false)]),
            _ => found.push(v),
        }
    }
}

/// A number for each value. Equal computations from the same leaves have equal numbers.
fn numbered(graph: &Graph) -> Vec<u32> {
    let mut known: BTreeMap<(String, Vec<u32>), u32> = BTreeMap::new();
    let mut classes: Vec<u32> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| classes[o.index()]).collect();
        let next = known.len() as u32;
        classes.push(*known.entry((format!("{:?}", node.op), operands)).or_insert(next));
    }
    classes
}

/// A term that is masked by comparing a selection with a number.
struct Term {
    /// The ops from the masked rows to the term, last first.
    above: Vec<ValueId>,
    /// The rows before masking.
    rows: ValueId,
    mask: Mask,
}

/// A mask that is true where integers equal a number.
struct Mask {
    selection: ValueId,
    number: u64,
    /// The dimensions of the selection, in the order in which the mask has them.
    order: Vec<usize>,
    /// True if the mask combines the last dimension by `or`. It is then a mask of tokens, each of which has several
    /// integers.
    any: bool,
}

/// Follows a term down to its mask. The ops in between must be linear and the same for all rows.
fn term(graph: &Graph, v: ValueId) -> Option<Term> {
    let (mut at, mut above) = (v, Vec::new());
    loop {
        let node = graph.node(at);
        match (&node.op, node.operands.as_slice()) {
            (Op::Select(_), &[mask, rows, zero]) if splat(graph, zero) == Some(0.0) => {
                return Some(Term { above, rows, mask: selection(graph, mask)? });
            }
            (Op::Reduce(reduce), _) if reduce.reducer != Reducer::Sum => return None,
            (Op::Reduce(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Convert(_), &[x]) => {
                above.push(at);
                at = x;
            }
            _ => return None,
        }
    }
}

/// The mask that compares integers with a number, if `mask` is one and is constant along all further dimensions.
fn selection(graph: &Graph, mut mask: ValueId) -> Option<Mask> {
    let mut any = false;
    loop {
        let node = graph.node(mask);
        match (&node.op, node.operands.as_slice()) {
            (Op::Compare(Compare { direction: Direction::Eq }), &[a, b]) => {
                let (selection, number) = match (splat(graph, a), splat(graph, b)) {
                    (None, Some(n)) => (a, n),
                    (Some(n), None) => (b, n),
                    _ => return None,
                };
                let whole = number >= 0.0 && number.fract() == 0.0 && graph.ty(selection).dtype.is_integer();
                let order = (0..graph.shape(selection).len()).collect();
                return whole.then_some(Mask { selection, number: number as u64, order, any });
            }
            // Booleans that were converted to numbers.
            (Op::Compare(Compare { direction: Direction::Ne }), &[x, zero]) if splat(graph, zero) == Some(0.0) => {
                mask = x
            }
            (Op::Convert(_) | Op::Reshape(_), &[x]) if !any => mask = x,
            (Op::Reduce(reduce), &[x]) if !any && matches!(reduce.reducer, Reducer::Or | Reducer::Max) => {
                any = reduce.dims == [graph.shape(x).len().checked_sub(1)?];
                if !any {
                    return None;
                }
                mask = x;
            }
            (Op::BroadcastInDim(op), &[x]) if !any => {
                // The leading dimensions are those of the selection.
                let kept = op.dims.iter().copied().eq(0..op.dims.len());
                let whole = graph.shape(x).iter().zip(&op.shape).all(|(a, b)| a == b || *a == 1);
                let trailing = graph.shape(x).iter().zip(&op.shape).skip_while(|(a, b)| a == b).all(|(a, _)| *a == 1);
                if !kept || !whole || !trailing {
                    return None;
                }
                mask = x;
            }
            (Op::Slice(slice), &[x]) if !any => return one_of_hot(graph, slice, x),
            _ => return None,
        }
    }
}

/// One slice of `x`, which has a boolean for each integer and number, true if they are equal.
fn one_of_hot(graph: &Graph, slice: &Slice, x: ValueId) -> Option<Mask> {
    let shape = graph.shape(x);
    let part = |d: &usize| slice.limit[*d] - slice.start[*d] != shape[*d];
    let dim = (0..shape.len()).find(part)?;
    let others: Vec<usize> = (0..shape.len()).filter(|d| *d != dim).collect();
    if slice.limit[dim] != slice.start[dim] + 1 || others.iter().any(part) {
        return None;
    }
    let (mut v, mut order) = (x, (0..shape.len()).collect::<Vec<usize>>());
    loop {
        let node = graph.node(v);
        match (&node.op, node.operands.as_slice()) {
            (Op::Convert(_), &[x]) => v = x,
            (Op::Transpose(op), &[x]) => {
                order.iter_mut().for_each(|d| *d = op.permutation[*d]);
                v = x;
            }
            (Op::Compare(Compare { direction: Direction::Eq }), &[a, b]) => {
                let numbers = order[dim];
                let chosen = if super::counts_along(graph, a) == Some(numbers) { b } else { a };
                let counter = if chosen == a { b } else { a };
                let Op::BroadcastInDim(op) = &graph.node(chosen).op else { return None };
                let selection = graph.node(chosen).operands[0];
                let repeats = !op.dims.contains(&numbers) && op.shape.len() == op.dims.len() + 1;
                if super::counts_along(graph, counter) != Some(numbers) || !repeats {
                    return None;
                }
                let order: Option<Vec<usize>> =
                    others.iter().map(|&d| op.dims.iter().position(|&o| o == order[d])).collect();
                return Some(Mask { selection, number: slice.start[dim], order: order?, any: false });
            }
            _ => return None,
        }
    }
}

/// The sum of values, with the terms of experts merged.
fn sum(graph: &Graph, classes: &[u32], map: &[ValueId], to: &mut Graph, addends: &[ValueId]) -> Option<ValueId> {
    let terms: Vec<(ValueId, Option<Term>)> = addends.iter().map(|&v| (v, term(graph, v))).collect();
    let first = terms.iter().find_map(|(_, t)| t.as_ref())?;
    let of = |t: &Term| (classes[plain(graph, t.mask.selection).index()], t.mask.order.clone(), t.mask.any);
    let chosen = of(first);
    let mut experts: Vec<&Term> = Vec::new();
    let mut rest = Vec::new();
    for (v, term) in &terms {
        match term {
            Some(t) if of(t) == chosen => experts.push(t),
            _ => rest.push(*v),
        }
    }
    experts.sort_by_key(|t| t.mask.number);
    let numbered = experts.iter().enumerate().all(|(i, t)| t.mask.number == i as u64);
    let alike = |t: &&Term| {
        t.above.len() == first.above.len()
            && t.above.iter().zip(&first.above).all(|(a, b)| graph.node(*a).op == graph.node(*b).op)
    };
    if experts.len() < 2 || !numbered || !experts.iter().all(alike) {
        return None;
    }
    let (count, selection) = (experts.len() as u64, first.mask.selection);
    // A token has a row for each of its experts, which must be distinct.
    let each = if first.mask.any { *graph.shape(selection).last()? } else { 1 };
    if first.mask.any && !are_different(graph, selection) {
        return None;
    }
    let rows = graph.ty(selection).elements();
    let group = array::permute(to, map[selection.index()], &first.mask.order).ok()?;
    let group = array::reshape(to, group, &[rows]).ok()?;
    let mut join =
        Join { graph, classes, map, to, rows: rows / each.max(1), each, count, group, known: BTreeMap::new() };
    let mut values: Vec<ValueId> = experts.iter().map(|t| t.rows).collect();
    // Unfold rows to the shape of the selection.
    let mut unfold = Vec::new();
    while let Op::Reshape(op) = &graph.node(values[0]).op {
        let same = |v: &ValueId| matches!(&graph.node(*v).op, Op::Reshape(other) if other == op);
        if !values.iter().all(same) {
            return None;
        }
        unfold.push(graph.node(values[0]).op.clone());
        values.iter_mut().for_each(|v| *v = graph.node(*v).operands[0]);
    }
    let mut value = join.rows(&values)?;
    if !is_below(graph, selection, count) {
        value = join.inside(value)?;
    }
    if first.mask.any {
        let split = [&[rows / each, each], &to.shape(value)[1..]].concat();
        value = array::reshape(to, value, &split).ok()?;
        value = array::sum(to, value, &[1], false).ok()?;
    }
    for op in unfold.into_iter().rev() {
        value = to.push(op, &[value]).ok()?;
    }
    for &v in first.above.iter().rev() {
        value = to.push(graph.node(v).op.clone(), &[value]).ok()?;
    }
    for v in rest.into_iter().rev() {
        value = to.push(Op::Binary(Binary::Add), &[map[v.index()], value]).ok()?;
    }
    Some(value)
}

/// Returns true if the integers of each row are distinct positions in an order.
fn are_different(graph: &Graph, v: ValueId) -> bool {
    let mut v = v;
    while matches!(graph.node(v).op, Op::Convert(_) | Op::Slice(_)) {
        v = graph.node(v).operands[0];
    }
    let rank = graph.shape(v).len();
    matches!(&graph.node(v).op, Op::ArgSort(sort) if sort.dim + 1 == rank)
}

/// The sum of products of masked rows, each of which keeps one run of rows. A run begins where the previous one ends,
/// and the elements of a vector are the lengths of the runs.
fn runs(graph: &Graph, classes: &[u32], map: &[ValueId], to: &mut Graph, addends: &[ValueId]) -> Option<ValueId> {
    let first = graph.node(*addends.first()?);
    let (Op::DotGeneral(dot), true) = (&first.op, addends.len() > 1) else { return None };
    if !dot.lhs_batch.is_empty() || dot.lhs_contract != [1] {
        return None;
    }
    let mut before: Option<u32> = None;
    let mut counts: Option<ValueId> = None;
    let (mut weights, mut rows) = (Vec::new(), None);
    for (number, &v) in (0u64..).zip(addends) {
        let node = graph.node(v);
        let &[masked, w] = node.operands.as_slice() else { return None };
        let (Op::Select(_), &[mask, x, zero]) = (&graph.node(masked).op, graph.node(masked).operands.as_slice()) else {
            return None;
        };
        let same = rows.is_none_or(|r: ValueId| classes[r.index()] == classes[x.index()]);
        if node.op != first.op || !same || splat(graph, zero) != Some(0.0) || graph.shape(x).len() != 2 {
            return None;
        }
        let (low, high) = interval(graph, mask)?;
        let begins = match before {
            None => splat(graph, low) == Some(0.0),
            Some(end) => classes[plain_scalar(graph, low).index()] == end,
        };
        let count = added(graph, plain_scalar(graph, high), before.map(|end| (classes, end)))?;
        let of = element(graph, count, number)?;
        if !begins || counts.is_some_and(|c| classes[c.index()] != classes[of.index()]) {
            return None;
        }
        (rows, counts, before) = (Some(x), Some(of), Some(classes[plain_scalar(graph, high).index()]));
        weights.push(w);
    }
    let (x, counts) = (rows?, counts?);
    let n = graph.shape(x)[0];
    if graph.shape(counts) != [weights.len() as u64] || graph.shape(weights[0]).len() != 2 {
        return None;
    }
    let ends = array::cumulative(to, map[counts.index()], Reducer::Sum, 0, false).ok()?;
    let group = array::group_of_rows(to, ends, n).ok()?;
    let count = weights.len() as u64;
    let mut join = Join { graph, classes, map, to, rows: n, each: 1, count, group, known: BTreeMap::new() };
    let w = join.stacked(&weights)?;
    let op = GroupedDot { contract: dot.rhs_contract[0] + 1, of: None };
    to.push(Op::GroupedDot(op), &[map[x.index()], w, group]).ok()
}

/// Returns true if a value is a product whose left factor is masked.
fn is_masked_product(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    matches!(node.op, Op::DotGeneral(_)) && matches!(graph.node(node.operands[0]).op, Op::Select(_))
}

/// The bounds of `low <= row` and `row < high`, if rows are counted along the first dimension.
fn interval(graph: &Graph, mask: ValueId) -> Option<(ValueId, ValueId)> {
    let node = graph.node(mask);
    let (Op::Binary(Binary::And), &[a, b]) = (&node.op, node.operands.as_slice()) else { return None };
    let bound = |v: ValueId, direction: Direction| {
        let node = graph.node(v);
        let (Op::Compare(compare), &[row, bound]) = (&node.op, node.operands.as_slice()) else { return None };
        (compare.direction == direction && super::counts_along(graph, row) == Some(0)).then_some(bound)
    };
    Some((bound(a, Direction::Ge)?, bound(b, Direction::Lt)?))
}

/// The scalar that a value repeats, before conversions.
fn plain_scalar(graph: &Graph, mut v: ValueId) -> ValueId {
    loop {
        let node = graph.node(v);
        match &node.op {
            Op::BroadcastInDim(_) | Op::Reshape(_) if graph.ty(node.operands[0]).elements() == 1 => {
                v = node.operands[0]
            }
            Op::Convert(_) if node.ty.elements() == 1 => v = node.operands[0],
            _ => return v,
        }
    }
}

/// The length that is added to the end of the previous run. For the first run, it is the run's end.
fn added(graph: &Graph, end: ValueId, before: Option<(&[u32], u32)>) -> Option<ValueId> {
    let node = graph.node(end);
    let Some((classes, before)) = before else {
        return Some(match (&node.op, node.operands.as_slice()) {
            (Op::Binary(Binary::Add), &[a, b]) if splat(graph, a) == Some(0.0) => b,
            (Op::Binary(Binary::Add), &[a, b]) if splat(graph, b) == Some(0.0) => a,
            _ => end,
        });
    };
    let (Op::Binary(Binary::Add), &[a, b]) = (&node.op, node.operands.as_slice()) else { return None };
    let is_before = |v: ValueId| classes[plain_scalar(graph, v).index()] == before;
    if is_before(a) { Some(b) } else { is_before(b).then_some(a) }
}

/// The vector whose element `number` is the scalar `v`.
fn element(graph: &Graph, v: ValueId, number: u64) -> Option<ValueId> {
    let node = graph.node(plain_scalar(graph, v));
    let Op::Slice(slice) = &node.op else { return None };
    (slice.start == [number] && slice.limit == [number + 1]).then(|| node.operands[0])
}

/// Returns true if integers are positions in an order of at most `count` elements.
fn is_below(graph: &Graph, mut v: ValueId, count: u64) -> bool {
    loop {
        v = plain(graph, v);
        let node = graph.node(v);
        match &node.op {
            Op::Slice(_) | Op::Transpose(_) | Op::BroadcastInDim(_) => v = node.operands[0],
            Op::ArgSort(sort) => return node.ty.shape[sort.dim] <= count,
            _ => return false,
        }
    }
}

struct Join<'a> {
    graph: &'a Graph,
    classes: &'a [u32],
    map: &'a [ValueId],
    to: &'a mut Graph,
    /// The size of the first dimension of each expert's rows.
    rows: u64,
    /// The number of rows of the joined value for each of those.
    each: u64,
    count: u64,
    /// The expert of each row.
    group: ValueId,
    known: BTreeMap<Vec<ValueId>, Option<ValueId>>,
}

impl Join<'_> {
    fn are_same(&self, values: &[ValueId]) -> bool {
        let class = |v: &ValueId| self.classes[v.index()];
        values.iter().all(|v| class(v) == class(&values[0]))
    }

    fn has_rows(&self, v: ValueId) -> bool {
        self.graph.shape(v).first() == Some(&self.rows)
    }

    /// The joined value with each expert's own rows. All values have rows along their first dimension.
    fn rows(&mut self, values: &[ValueId]) -> Option<ValueId> {
        if let Some(known) = self.known.get(values) {
            return *known;
        }
        let made = if self.are_same(values) { self.repeated(values[0]) } else { self.made(values) };
        self.known.insert(values.to_vec(), made);
        made
    }

    /// A value that all experts share, with as many rows as the joined one.
    fn repeated(&mut self, v: ValueId) -> Option<ValueId> {
        let value = self.map[v.index()];
        if self.each == 1 {
            return Some(value);
        }
        if !self.has_rows(v) {
            return None;
        }
        let shape = self.graph.shape(v);
        let wide = [&[self.rows, self.each], &shape[1..]].concat();
        let dims: Vec<usize> = (0..wide.len()).filter(|&d| d != 1).collect();
        let wide = self.to.broadcast(value, &wide, &dims);
        array::reshape(self.to, wide, &[&[self.rows * self.each], &shape[1..]].concat()).ok()
    }

    /// The number of each row's expert, if each value is its expert's number.
    fn numbers(&mut self, values: &[ValueId]) -> Option<ValueId> {
        let graph = self.graph;
        let ty = graph.ty(values[0]);
        let own = (0u64..).zip(values).all(|(number, &v)| splat(graph, v) == Some(number as f64));
        if !own || !self.has_rows(values[0]) {
            return None;
        }
        let number = self.to.convert(self.group, ty.dtype);
        let wide = [&[self.rows * self.each], &ty.shape[1..]].concat();
        Some(self.to.broadcast(number, &wide, &[0]))
    }

    fn made(&mut self, values: &[ValueId]) -> Option<ValueId> {
        let graph = self.graph;
        let node = graph.node(values[0]);
        if let Some(numbers) = self.numbers(values) {
            return Some(numbers);
        }
        let same_op =
            |v: &ValueId| graph.node(*v).op == node.op && graph.node(*v).operands.len() == node.operands.len();
        if node.operands.is_empty() || !values.iter().all(same_op) || !self.has_rows(values[0]) {
            return None;
        }
        let operand = |k: usize| -> Vec<ValueId> { values.iter().map(|v| graph.node(*v).operands[k]).collect() };
        let all = || -> Vec<Vec<ValueId>> { (0..node.operands.len()).map(operand).collect() };
        match &node.op {
            Op::DotGeneral(dot) => {
                let [x, w] = [operand(0), operand(1)];
                let plain = dot.lhs_batch.is_empty() && dot.lhs_contract == [1] && graph.shape(x[0]).len() == 2;
                if !plain || graph.shape(w[0]).len() != 2 {
                    return None;
                }
                let (x, w) = (self.rows(&x)?, self.stacked(&w)?);
                let op = GroupedDot { contract: dot.rhs_contract[0] + 1, of: None };
                self.to.push(Op::GroupedDot(op), &[x, w, self.group]).ok()
            }
            Op::BroadcastInDim(op) => {
                let x = operand(0);
                if op.dims.first() == Some(&0) {
                    return self.same_op(node, &[x]);
                }
                // A value that each expert has of its own, the same for all its rows.
                if op.dims.contains(&0) || op.dims != (1..op.shape.len()).collect::<Vec<_>>() {
                    return None;
                }
                let table = self.stacked(&x)?;
                array::take(self.to, table, 0, self.group, false).ok()
            }
            op if op.is_elementwise() => self.same_op(node, &all()),
            Op::Reshape(_) => self.same_op(node, &[operand(0)]),
            Op::Transpose(op) if op.permutation[0] == 0 => self.same_op(node, &[operand(0)]),
            Op::Slice(op) if op.start[0] == 0 && op.limit[0] == self.rows && op.stride[0] == 1 => {
                self.same_op(node, &[operand(0)])
            }
            Op::Reduce(op) if !op.dims.contains(&0) => self.same_op(node, &[operand(0)]),
            Op::Concatenate(op) if op.dim != 0 => self.same_op(node, &all()),
            _ => None,
        }
    }

    fn same_op(&mut self, node: &Node, operands: &[Vec<ValueId>]) -> Option<ValueId> {
        if !operands.iter().all(|o| self.has_rows(o[0])) {
            return None;
        }
        let joined: Option<Vec<ValueId>> = operands.iter().map(|o| self.rows(o)).collect();
        let joined = joined?;
        let shape = [&[self.rows * self.each], &node.ty.shape[1..]].concat();
        let shapes: Vec<&[u64]> = joined.iter().map(|&v| self.to.shape(v)).collect();
        let op = node.op.resized(&shapes, &shape);
        self.to.push(op, &joined).ok()
    }

    /// Stacks each expert's value to `[experts, ..]`.
    fn stacked(&mut self, values: &[ValueId]) -> Option<ValueId> {
        let graph = self.graph;
        let node = graph.node(values[0]);
        // Each may be a part of one tensor, selected by its number.
        if let Some(whole) = self.parts_of_one(values) {
            return Some(whole);
        }
        // Each may have the same transpose.
        if let Op::Transpose(op) = &node.op
            && values.iter().all(|v| graph.node(*v).op == node.op)
        {
            let order: Vec<usize> = std::iter::once(0).chain(op.permutation.iter().map(|d| d + 1)).collect();
            let from: Vec<ValueId> = values.iter().map(|v| graph.node(*v).operands[0]).collect();
            let stacked = self.stacked(&from)?;
            return array::permute(self.to, stacked, &order).ok();
        }
        if values.iter().any(|v| *graph.ty(*v) != node.ty)
            || node.ty.shape.contains(&self.rows) && depends_on_input(graph, values[0])
        {
            return None;
        }
        let shape = [&[1], node.ty.shape.as_slice()].concat();
        let parts: Option<Vec<ValueId>> =
            values.iter().map(|v| array::reshape(self.to, self.map[v.index()], &shape).ok()).collect();
        self.to.push(Op::Concatenate(Concatenate { dim: 0 }), &parts?).ok()
    }

    fn parts_of_one(&mut self, values: &[ValueId]) -> Option<ValueId> {
        let graph = self.graph;
        let mut table = None;
        for (number, &v) in (0u64..).zip(values) {
            let part = plain(graph, v);
            let Op::Slice(Slice { start, limit, stride }) = &graph.node(part).op else { return None };
            let from = graph.node(part).operands[0];
            let shape = graph.shape(from);
            let whole = (1..shape.len()).all(|d| start[d] == 0 && limit[d] == shape[d] && stride[d] == 1);
            let one = start.first() == Some(&number) && limit.first() == Some(&(number + 1));
            let fits = shape.first() == Some(&self.count) && shape[1..] == *graph.shape(v);
            if !whole || !one || !fits || table.is_some_and(|t| t != from) {
                return None;
            }
            table = Some(from);
        }
        table.map(|t| self.map[t.index()])
    }

    /// Zeroes rows that chose no existing expert.
    fn inside(&mut self, value: ValueId) -> Option<ValueId> {
        let (group, g) = (self.group, &mut *self.to);
        let low = array::full_like(g, group, 0.0).ok()?;
        let high = array::full_like(g, group, self.count as f64).ok()?;
        let (above, below) =
            (array::compare(g, Direction::Ge, group, low).ok()?, array::compare(g, Direction::Lt, group, high).ok()?);
        let inside = g.push(Op::Binary(Binary::And), &[above, below]).ok()?;
        debug_assert_eq!(g.ty(inside).dtype, DType::Bool);
        let ones = [&[self.rows * self.each], vec![1; g.shape(value).len() - 1].as_slice()].concat();
        let inside = array::reshape(g, inside, &ones).ok()?;
        let zero = array::full_like(g, value, 0.0).ok()?;
        array::select(g, inside, value, zero).ok()
    }
}

fn depends_on_input(graph: &Graph, v: ValueId) -> bool {
    let mut seen = std::collections::BTreeSet::new();
    let mut pending = vec![v];
    while let Some(at) = pending.pop() {
        if seen.insert(at) {
            if matches!(graph.node(at).op, Op::Input(_)) {
                return true;
            }
            pending.extend(&graph.node(at).operands);
        }
    }
    false
}
