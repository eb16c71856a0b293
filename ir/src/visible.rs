//! The visible fraction of a mask, found without computing the mask.
//!
//! A mask of attention (causal, a sliding window, a prefix, blocks) is a boolean that depends on the positions of its
//! elements. Interval arithmetic over a box of positions shows that the mask is true nowhere in the box, everywhere, or
//! perhaps somewhere. In the last case, the box is halved until it is a tile. Values that depend on data are unknown,
//! so `causal and padding` is hidden where `causal` is false.
//!
//! Only the last dimension is searched completely. In all others, a fixed number of evenly spaced positions is sampled,
//! so that the work does not grow with the sequence length.

use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::literal::Values;
use crate::mesh::{AxisId, Mesh};
use crate::op::{Binary, Composite, Direction, Function, Op, Unary};
use crate::sets::Sets;
use rustc_hash::FxHashMap;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt::Write;

/// The rows and columns of the tiles in which GPU attention kernels process a mask (Dao 2023, FlashAttention-2: blocks
/// of 64 or 128).
pub const TILE: u64 = 128;

/// The number of sampled positions in all dimensions but the last.
const PLACES: u64 = 64;

/// The number of devices whose part of a split mask is sampled.
const DEVICES: u64 = 64;

/// The largest number of nodes evaluated for one mask. Beyond it, the rest counts as visible.
const FUEL: u64 = 1 << 20;

/// The largest depth of ops in a mask. Deeper values are unknown.
const DEPTH: u32 = 128;

/// Bounds of a value's elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
}

impl Range {
    const UNKNOWN: Range = Range { low: f64::NEG_INFINITY, high: f64::INFINITY };
    const EITHER: Range = Range { low: 0.0, high: 1.0 };

    /// The range between two bounds, or unknown if one of them is NaN.
    fn new(low: f64, high: f64) -> Range {
        if low.is_nan() || high.is_nan() { Range::UNKNOWN } else { Range { low, high } }
    }

    fn of(value: f64) -> Range {
        Range::new(value, value)
    }

    fn truth(value: bool) -> Range {
        Range::of(f64::from(u8::from(value)))
    }

    /// The value of the elements, or `None` if they may differ.
    fn known(self) -> Option<f64> {
        (self.low == self.high).then_some(self.low)
    }

    fn joined(self, other: Range) -> Range {
        Range { low: self.low.min(other.low), high: self.high.max(other.high) }
    }

    /// The range of some numbers, or unknown if one of them is NaN.
    fn spanning(values: impl IntoIterator<Item = f64>) -> Range {
        let empty = Range { low: f64::INFINITY, high: f64::NEG_INFINITY };
        values.into_iter().fold(empty, |all, v| all.joined(Range::of(v)))
    }
}

/// The positions of a box: the first and the last along each dimension.
type Bounds = [(u64, u64)];

/// The known range of a leaf's elements within a box.
pub type OfLeaf<'a> = &'a dyn Fn(ValueId, &Bounds) -> Range;

/// A leaf of which nothing is known.
pub fn unknown_leaf(_: ValueId, _: &Bounds) -> Range {
    Range::UNKNOWN
}

/// Evaluates values of a graph over boxes.
pub struct Ranges<'a> {
    graph: &'a Graph,
    of_leaf: OfLeaf<'a>,
    /// The device's positions along the axes that masks depend on.
    coordinates: Vec<(AxisId, u64)>,
    fuel: Cell<u64>,
    depth: Cell<u32>,
}

impl<'a> Ranges<'a> {
    pub fn new(graph: &'a Graph, of_leaf: OfLeaf<'a>) -> Ranges<'a> {
        Ranges { graph, of_leaf, coordinates: Vec::new(), fuel: Cell::new(FUEL), depth: Cell::new(0) }
    }

    /// The range of a value's elements within a box.
    pub fn of(&self, v: ValueId, at: &Bounds) -> Range {
        let Some(fuel) = self.fuel.get().checked_sub(1).filter(|_| self.depth.get() < DEPTH) else {
            return Range::UNKNOWN;
        };
        self.fuel.set(fuel);
        self.depth.set(self.depth.get() + 1);
        let range = self.of_node(v, at);
        self.depth.set(self.depth.get() - 1);
        range
    }

    fn of_node(&self, v: ValueId, at: &Bounds) -> Range {
        let node = self.graph.node(v);
        let operand = |i: usize| node.operands[i];
        let shape = |i: usize| self.graph.shape(operand(i));
        match &node.op {
            Op::Iota(iota) => Range { low: at[iota.dim].0 as f64, high: at[iota.dim].1 as f64 },
            Op::Constant(literal) => match &literal.values {
                Values::Splat(value) => Range::of(value.0),
                Values::Dense(values) => self.dense(&node.ty.shape, at, |i| values[i].0),
            },
            Op::AxisIndex(op) => self.position(&op.axes, &op.mesh),
            op if op.is_leaf() => (self.of_leaf)(v, at),
            Op::BroadcastInDim(op) => {
                let place = |(&dim, &size): (&usize, &u64)| if size == 1 { (0, 0) } else { at[dim] };
                let inner: Vec<_> = op.dims.iter().zip(shape(0)).map(place).collect();
                self.of(operand(0), &inner)
            }
            Op::Reshape(_) => match unit_dims_only(shape(0), &node.ty.shape) {
                Some(from) => {
                    let inner: Vec<_> = from.into_iter().map(|dim| dim.map_or((0, 0), |d| at[d])).collect();
                    self.of(operand(0), &inner)
                }
                None => self.of(operand(0), &linear(at, &node.ty.shape, shape(0))),
            },
            Op::Transpose(op) => {
                let mut inner = vec![(0, 0); at.len()];
                op.permutation.iter().zip(at).for_each(|(&from, &bounds)| inner[from] = bounds);
                self.of(operand(0), &inner)
            }
            Op::Reverse(op) => {
                let mut inner = at.to_vec();
                op.dims.iter().for_each(|&d| {
                    let last = node.ty.shape[d] - 1;
                    inner[d] = (last - at[d].1, last - at[d].0);
                });
                self.of(operand(0), &inner)
            }
            Op::Slice(op) => {
                let place = |(d, &(first, last)): (usize, &(u64, u64))| {
                    (op.start[d] + first * op.stride[d], op.start[d] + last * op.stride[d])
                };
                let inner: Vec<_> = at.iter().enumerate().map(place).collect();
                self.of(operand(0), &inner)
            }
            Op::Concatenate(op) => self.concatenated(&node.operands, op.dim, at),
            Op::Convert(op) => converted(self.of(operand(0), at), op.dtype),
            Op::Unary(op) => unary(*op, self.of(operand(0), at), node.ty.dtype),
            Op::Binary(op) => {
                let (a, b) = (self.of(operand(0), at), self.of(operand(1), at));
                binary(*op, a, b, node.ty.dtype)
            }
            Op::Compare(op) => compare(op.direction, self.of(operand(0), at), self.of(operand(1), at)),
            Op::Select(_) => match self.of(operand(0), at).known() {
                Some(0.0) => self.of(operand(2), at),
                Some(_) => self.of(operand(1), at),
                None => self.of(operand(1), at).joined(self.of(operand(2), at)),
            },
            _ => Range::UNKNOWN,
        }
    }

    fn concatenated(&self, pieces: &[ValueId], dim: usize, at: &Bounds) -> Range {
        let (mut begin, mut all) = (0, None::<Range>);
        for &piece in pieces {
            let end = begin + self.graph.shape(piece)[dim];
            let (first, last) = at[dim];
            if first < end && last >= begin {
                let mut inner = at.to_vec();
                inner[dim] = (first.max(begin) - begin, last.min(end - 1) - begin);
                let range = self.of(piece, &inner);
                all = Some(all.map_or(range, |all| all.joined(range)));
            }
            begin = end;
        }
        all.unwrap_or(Range::UNKNOWN)
    }

    /// The range of a table's elements within a box. Unknown if the box is too large for the remaining fuel.
    fn dense(&self, shape: &[u64], at: &Bounds, value: impl Fn(usize) -> f64) -> Range {
        let count: u64 = at.iter().map(|(first, last)| last - first + 1).product();
        let Some(fuel) = self.fuel.get().checked_sub(count / 16) else { return Range::UNKNOWN };
        self.fuel.set(fuel);
        let mut place: Vec<u64> = at.iter().map(|bounds| bounds.0).collect();
        let mut all = Range { low: f64::INFINITY, high: f64::NEG_INFINITY };
        loop {
            let index = place.iter().zip(shape).fold(0, |index, (&p, &size)| index * size + p);
            all = all.joined(Range::of(value(index as usize)));
            let Some(d) = (0..place.len()).rev().find(|&d| place[d] < at[d].1) else { return all };
            place[d] += 1;
            (d + 1..place.len()).for_each(|after| place[after] = at[after].0);
        }
    }

    fn position(&self, axes: &[AxisId], mesh: &Mesh) -> Range {
        let mut all = Some(0);
        for &axis in axes {
            let at = self.coordinates.iter().find(|(a, _)| *a == axis).map(|c| c.1);
            all = all.zip(at).map(|(all, at)| all * mesh.size(axis) + at);
        }
        let last = mesh.product(axes).saturating_sub(1);
        all.map_or(Range { low: 0.0, high: last as f64 }, |at: u64| Range::of(at as f64))
    }

    /// The dimensions of a value along which its elements may differ, as far as they are known.
    fn varying(&self, v: ValueId, depth: u32, known: &mut FxHashMap<ValueId, BTreeSet<usize>>) -> BTreeSet<usize> {
        if depth == DEPTH {
            return BTreeSet::new();
        }
        let depth = depth + 1;
        if let Some(dims) = known.get(&v) {
            return dims.clone();
        }
        let node = self.graph.node(v);
        let all = |shape: &[u64]| (0..shape.len()).filter(|&d| shape[d] > 1).collect::<BTreeSet<usize>>();
        let dims = match &node.op {
            Op::Iota(iota) => BTreeSet::from([iota.dim]),
            Op::Constant(literal) if literal.as_splat().is_some() => BTreeSet::new(),
            // The facts about a leaf depend on positions.
            op if op.is_leaf() || matches!(op, Op::Constant(_)) => all(&node.ty.shape),
            Op::BroadcastInDim(op) => {
                self.varying(node.operands[0], depth, known).into_iter().map(|d| op.dims[d]).collect()
            }
            Op::Reshape(_) => {
                let inner = self.varying(node.operands[0], depth, known);
                match unit_dims_only(self.graph.shape(node.operands[0]), &node.ty.shape) {
                    Some(from) => inner.into_iter().filter_map(|d| from[d]).collect(),
                    None if inner.is_empty() => inner,
                    None => all(&node.ty.shape),
                }
            }
            Op::Transpose(op) => {
                let inner = self.varying(node.operands[0], depth, known);
                (0..op.permutation.len()).filter(|&d| inner.contains(&op.permutation[d])).collect()
            }
            op if op.is_elementwise() => {
                let mut dims = BTreeSet::new();
                for &o in &node.operands {
                    dims.extend(self.varying(o, depth, known));
                }
                dims
            }
            Op::Slice(_) | Op::Reverse(_) => self.varying(node.operands[0], depth, known),
            Op::Concatenate(_) => all(&node.ty.shape),
            // Unknown everywhere.
            _ => BTreeSet::new(),
        };
        known.insert(v, dims.clone());
        dims
    }

    /// The device axes on which a value depends.
    fn axes(&self, v: ValueId) -> Vec<(AxisId, u64)> {
        let mut found: BTreeSet<ValueId> = BTreeSet::from([v]);
        let (mut open, mut axes) = (vec![v], Vec::new());
        while let Some(v) = open.pop() {
            let node = self.graph.node(v);
            if let Op::AxisIndex(op) = &node.op {
                axes.extend(op.axes.iter().map(|&a| (a, op.mesh.size(a))));
            }
            if !is_opaque(&node.op) {
                open.extend(node.operands.iter().filter(|o| found.insert(**o)));
            }
        }
        axes.sort_unstable();
        axes.dedup();
        axes
    }
}

/// Returns true if an op's result is always unknown, whatever its operands are.
fn is_opaque(op: &Op) -> bool {
    let looks_into = op.is_elementwise() && !matches!(op, Op::ReducePrecision(_) | Op::Threefry(_))
        || matches!(op, Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Reverse(_))
        || matches!(op, Op::Slice(_) | Op::Concatenate(_) | Op::Iota(_) | Op::Constant(_) | Op::AxisIndex(_));
    !looks_into
}

/// A boolean value, and which of its two values makes elements visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Mask {
    pub value: ValueId,
    pub shows: bool,
}

impl Mask {
    /// The mask of a select between a value and the constant that replaces hidden elements.
    pub(crate) fn of_select(graph: &Graph, select: ValueId, is_constant: impl Fn(ValueId) -> bool) -> Mask {
        let operands = &graph.node(select).operands;
        Mask { value: operands[0], shows: !is_constant(operands[1]) || is_constant(operands[2]) }
    }
}

/// A description of everything that [`Ranges`] uses of a value. It numbers values independently of their position in
/// the graph, so values with the same form have the same ranges.
pub fn form(graph: &Graph, value: ValueId) -> String {
    let mut number: FxHashMap<ValueId, usize> = FxHashMap::from_iter([(value, 0)]);
    let (mut open, mut form) = (vec![value], String::new());
    while let Some(v) = open.pop() {
        let node = graph.node(v);
        let _ = write!(form, " {}", node.ty);
        if is_opaque(&node.op) {
            continue;
        }
        let _ = write!(form, " {:?}", node.op);
        for &o in &node.operands {
            let next = number.len();
            let is_new = !number.contains_key(&o);
            let _ = write!(form, " {}", *number.entry(o).or_insert(next));
            if is_new {
                open.push(o);
            }
        }
    }
    form
}

/// The fraction of a mask's tiles of `tile` by `tile` elements that may be visible, on the device that sees most. With
/// tiles of one element, it is the fraction of elements.
pub(crate) fn visible(graph: &Graph, mask: Mask, tile: u64, of_leaf: OfLeaf<'_>) -> f64 {
    let Mask { value: mask, shows } = mask;
    let shape = graph.shape(mask);
    let mut ranges = Ranges::new(graph, of_leaf);
    let Some((&columns, _)) = shape.split_last() else { return 1.0 };
    if shape.contains(&0) {
        return 1.0;
    }
    let varying = ranges.varying(mask, 0, &mut FxHashMap::default());
    let axes = ranges.axes(mask);
    let devices = axes.iter().map(|a| a.1).product::<u64>();
    let looked_at = devices.min(DEVICES);
    // Rows are divided into tiles along the longest dimension that matters.
    let last = shape.len() - 1;
    let rows: Vec<usize> = varying.iter().copied().filter(|&d| d < last).collect();
    let longest = rows.iter().copied().max_by_key(|&d| (shape[d], d));
    let height = |d: usize| if Some(d) == longest { tile.min(shape[d]) } else { 1 };
    let bands: u64 = rows.iter().map(|&d| shape[d].div_ceil(height(d))).product();
    let places = bands.min((PLACES / looked_at).max(4));
    let mut most = 0.0f64;
    for device in 0..looked_at {
        // The last device sees most of a causal mask.
        let mut at = devices - 1 - device * devices / looked_at;
        ranges.coordinates.clear();
        for &(axis, size) in &axes {
            ranges.coordinates.push((axis, at % size));
            at /= size;
        }
        let mut sum = 0.0;
        for place in 0..places {
            let mut band = ((2 * place + 1) * bands / (2 * places)).min(bands - 1);
            let mut bounds: Vec<(u64, u64)> = shape.iter().map(|_| (0, 0)).collect();
            for &d in rows.iter().rev() {
                let number = shape[d].div_ceil(height(d));
                let first = band % number * height(d);
                bounds[d] = (first, (first + height(d)).min(shape[d]) - 1);
                band /= number;
            }
            // Along a dimension that does not matter, the mask is constant.
            let width = if varying.contains(&last) { tile.min(columns) } else { columns };
            bounds[last] = (0, columns - 1);
            sum += visible_columns(&ranges, Mask { value: mask, shows }, &mut bounds, width) as f64;
        }
        most = most.max(sum / places as f64 / columns as f64);
    }
    most.min(1.0)
}

/// The columns of a band that lie in tiles of `width` that may be visible.
fn visible_columns(ranges: &Ranges<'_>, mask: Mask, bounds: &mut [(u64, u64)], width: u64) -> u64 {
    let last = bounds.len() - 1;
    let (first, end) = (bounds[last].0, bounds[last].1 + 1);
    let seen = ranges.of(mask.value, bounds).known().map(|value| (value != 0.0) == mask.shows);
    if seen == Some(false) {
        return 0;
    }
    let tiles = (end - first).div_ceil(width);
    if tiles <= 1 || seen == Some(true) {
        return end - first;
    }
    let middle = first + tiles / 2 * width;
    bounds[last] = (first, middle - 1);
    let before = visible_columns(ranges, mask, bounds, width);
    bounds[last] = (middle, end - 1);
    let after = visible_columns(ranges, mask, bounds, width);
    bounds[last] = (first, end - 1);
    before + after
}

/// For each node of a graph, the fraction of its elements, or of the terms that it sums, that masks leave. It applies
/// to products larger than their factors and to products that contract these again, such as the two of attention. It is
/// 1 for all others.
///
/// `of_leaf` gives the known ranges of leaves. For a composite, the caller examines the decomposition, because it knows
/// the operands.
pub fn visible_parts(graph: &Graph, of_leaf: OfLeaf<'_>) -> Vec<f64> {
    // The growing product that a large value is computed from, identified by the first product that it is joined with.
    let mut made_of: Vec<Option<usize>> = vec![None; graph.len()];
    let mut joined = Sets::new(graph.len());
    let mut part = vec![1.0f64; graph.len()];
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let mut masked: Vec<(usize, f64)> = Vec::new();
    for v in graph.values() {
        let node = graph.node(v);
        let shape = |i: usize| graph.shape(node.operands[i]);
        if let Op::DotGeneral(dot) = &node.op {
            if dot.grows(shape(0), shape(1), &node.ty.shape) {
                made_of[v.index()] = Some(v.index());
            }
            continue;
        }
        let is_map = node.op.is_elementwise()
            || matches!(node.op, Op::Reshape(_) | Op::Transpose(_))
            || matches!(&node.op, Op::Composite(Composite { function: Function::Softmax { .. }, .. }));
        if !is_map {
            continue;
        }
        let large = node.operands.iter().filter(|o| graph.ty(**o).elements() == node.ty.elements());
        let of: Vec<usize> = large.filter_map(|o| made_of[o.index()]).collect();
        let Some(&first) = of.first() else { continue };
        made_of[v.index()] = Some(first);
        of[1..].iter().for_each(|&other| joined.merge(first, other));
        if let Op::Select(_) = node.op
            && made_of[node.operands[0].index()].is_none()
        {
            let mask = Mask::of_select(graph, v, |o| !varies[o.index()]);
            masked.push((first, visible(graph, mask, 1, of_leaf)));
        }
    }
    if masked.is_empty() {
        return part;
    }
    let mut of_product: FxHashMap<usize, f64> = FxHashMap::default();
    for (product, share) in masked {
        let known = of_product.entry(joined.find(product)).or_insert(1.0);
        *known = known.min(share);
    }
    for v in graph.values().filter(|v| matches!(graph.node(*v).op, Op::DotGeneral(_))) {
        let own = made_of[v.index()];
        let read = graph.node(v).operands.iter().find_map(|o| made_of[o.index()]);
        if let Some(product) = own.or(read) {
            part[v.index()] = of_product.get(&joined.find(product)).copied().unwrap_or(1.0);
        }
    }
    part
}

fn converted(range: Range, dtype: DType) -> Range {
    let is_small = range.low.abs().max(range.high.abs()) < 16_777_216.0;
    let is_bool = dtype == DType::Bool;
    match range.known() {
        // Every type of masks can represent small numbers. A number is true if it is not zero.
        Some(value) if is_bool => Range::truth(value != 0.0),
        None if is_bool && (range.low > 0.0 || range.high < 0.0) => Range::truth(true),
        None if is_bool => Range::EITHER,
        _ if is_small && dtype.is_integer() => Range { low: range.low.trunc(), high: range.high.trunc() },
        _ if is_small && dtype.bytes() >= 4 => range,
        _ => Range::UNKNOWN,
    }
}

fn unary(op: Unary, a: Range, dtype: DType) -> Range {
    match op {
        Unary::Negate => Range { low: -a.high, high: -a.low },
        Unary::Not if dtype == DType::Bool => Range { low: 1.0 - a.high.min(1.0), high: 1.0 - a.low.max(0.0) },
        Unary::Abs if a.low >= 0.0 => a,
        Unary::Abs if a.high <= 0.0 => Range { low: -a.high, high: -a.low },
        Unary::Abs => Range { low: 0.0, high: a.high.max(-a.low) },
        Unary::Floor => Range { low: a.low.floor(), high: a.high.floor() },
        Unary::Ceil => Range { low: a.low.ceil(), high: a.high.ceil() },
        Unary::StopGradient => a,
        _ => Range::UNKNOWN,
    }
}

fn binary(op: Binary, a: Range, b: Range, dtype: DType) -> Range {
    let is_bool = dtype == DType::Bool;
    match op {
        Binary::Add => Range::new(a.low + b.low, a.high + b.high),
        Binary::Subtract => Range::new(a.low - b.high, a.high - b.low),
        Binary::Multiply => Range::spanning([a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high]),
        Binary::Maximum => Range { low: a.low.max(b.low), high: a.high.max(b.high) },
        Binary::Minimum => Range { low: a.low.min(b.low), high: a.high.min(b.high) },
        Binary::Divide => match b.known() {
            Some(by) if by > 0.0 && dtype.is_integer() => Range::new((a.low / by).trunc(), (a.high / by).trunc()),
            Some(by) if by > 0.0 => Range::new(a.low / by, a.high / by),
            _ => Range::UNKNOWN,
        },
        Binary::Remainder => match b.known() {
            Some(by) if by > 0.0 && a.low >= 0.0 && (a.low / by).floor() == (a.high / by).floor() => {
                Range { low: a.low % by, high: a.high % by }
            }
            Some(by) if by > 0.0 && a.low >= 0.0 && dtype.is_integer() => Range { low: 0.0, high: by - 1.0 },
            _ => Range::UNKNOWN,
        },
        // Booleans as numbers. An unknown one is either.
        Binary::And if is_bool => Range { low: a.low.min(b.low).max(0.0), high: a.high.min(b.high).min(1.0) },
        Binary::Or if is_bool => Range { low: a.low.max(b.low).max(0.0), high: a.high.max(b.high).min(1.0) },
        Binary::Xor if is_bool => match (a.known(), b.known()) {
            (Some(a), Some(b)) => Range::truth(a != b),
            _ => Range::EITHER,
        },
        _ => Range::UNKNOWN,
    }
}

fn compare(direction: Direction, a: Range, b: Range) -> Range {
    let (always, never) = match direction {
        Direction::Ge => (a.low >= b.high, a.high < b.low),
        Direction::Gt => (a.low > b.high, a.high <= b.low),
        Direction::Le => (a.high <= b.low, a.low > b.high),
        Direction::Lt => (a.high < b.low, a.low >= b.high),
        Direction::Eq => (a.known().is_some() && a.known() == b.known(), a.high < b.low || b.high < a.low),
        Direction::Ne => (a.high < b.low || b.high < a.low, a.known().is_some() && a.known() == b.known()),
    };
    match (always, never) {
        (true, false) => Range::truth(true),
        (false, true) => Range::truth(false),
        _ => Range::EITHER,
    }
}

/// For each dimension of `from`, the dimension of `to` that it becomes, if a reshape only adds and removes dimensions
/// of size 1.
fn unit_dims_only(from: &[u64], to: &[u64]) -> Option<Vec<Option<usize>>> {
    let mut rest = (0..to.len()).filter(|&d| to[d] != 1);
    let dims = from.iter().map(|&size| match size {
        1 => Some(None),
        size => rest.next().filter(|&d| to[d] == size).map(Some),
    });
    let dims = dims.collect::<Option<Vec<_>>>()?;
    rest.next().is_none().then_some(dims)
}

/// A box of another shape that contains all elements of a box. The elements have the same order in both shapes.
fn linear(at: &Bounds, shape: &[u64], other: &[u64]) -> Vec<(u64, u64)> {
    let place =
        |of: fn(&(u64, u64)) -> u64| at.iter().zip(shape).fold(0, |all, (bounds, &size)| all * size + of(bounds));
    let (mut first, mut last) = (place(|b| b.0), place(|b| b.1));
    let mut inner: Vec<(u64, u64)> = vec![(0, 0); other.len()];
    for d in (0..other.len()).rev() {
        let size = other[d].max(1);
        inner[d] = if first / size == last / size { (first % size, last % size) } else { (0, size - 1) };
        (first, last) = (first / size, last / size);
    }
    inner
}

#[cfg(test)]
#[path = "visible_tests.rs"]
mod tests;
