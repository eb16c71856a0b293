//! Turns a kernel of a body's graph into launches.
//!
//! An element of a value is computed from elements of its operands, back to values in memory: by its op or, for a view,
//! by another index. Row reductions that a kernel keeps on the chip become phases of one launch, if all of them reduce
//! the same rows. Otherwise each is written to memory by its own launch. So every kernel has launches, and most have
//! one.

use super::scalar::{Scalar, Scalars, Var};
use super::{Coordinate, Fold, Launch, Param, Phase, Source, Spread, Store};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::kernels::{Kernel, KernelKind, ROW_BYTES};
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::{Binary, Direction, Gather, GatherDims, Op, OutOfBounds, Reducer, Unary};
use altiplano_ir::reshard::{BlockedDim, Collective};
use altiplano_ir::types::TensorType;
use std::collections::{BTreeSet, HashMap};

/// A kernel for which there is no loop program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("no loop program exists for '{op}' ({value})")]
pub struct Unsupported {
    pub value: ValueId,
    pub op: &'static str,
}

/// Reasons why an element cannot be computed here.
pub(super) enum Stop {
    Unsupported(Unsupported),
    /// It needs a reduction that is neither in memory nor of this row.
    Reduction(ValueId),
}

/// Minimum row length for which a block of threads takes a row.
pub(super) const BLOCK_ROW: u64 = 32;

/// The launches of a kernel, in order; none if a library runs it or if it communicates.
pub fn launches(graph: &Graph, kernel: &Kernel) -> Result<Vec<Launch>, Unsupported> {
    let memory: BTreeSet<ValueId> = kernel.reads.iter().map(|r| r.0).collect();
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let mut made = Made { graph, memory, varies, launches: Vec::new() };
    match kernel.kind {
        KernelKind::Fused { .. } => made.fused(kernel)?,
        KernelKind::Indexed => made.indexed(kernel)?,
        KernelKind::Sort { .. } => made.sorted(kernel.nodes[0])?,
        KernelKind::Matmul(_) if is_grouped(&graph.node(kernel.nodes[0]).op) => made.grouped(kernel.nodes[0])?,
        KernelKind::Matmul(_) | KernelKind::Convolution { .. } => {}
        KernelKind::Attention(_) => made.tiled(kernel)?,
        KernelKind::Collective | KernelKind::HostCopy(_) => {}
    }
    Ok(made.launches)
}

fn is_grouped(op: &Op) -> bool {
    matches!(op, Op::GroupedDot(_) | Op::GroupedOuter(_))
}

/// The launches made so far, and the values in memory when the next one runs.
pub(super) struct Made<'a> {
    pub graph: &'a Graph,
    pub memory: BTreeSet<ValueId>,
    /// For each value, whether it depends on a leaf.
    pub varies: Vec<bool>,
    pub launches: Vec<Launch>,
}

/// Ops whose elements are copies of operand elements at other indices, or follow from their index alone.
fn is_view(op: &Op) -> bool {
    match op {
        Op::Constant(_) | Op::Iota(_) | Op::AxisIndex(_) | Op::BroadcastInDim(_) | Op::Reshape(_) => true,
        Op::Transpose(_) | Op::Slice(_) | Op::Reverse(_) | Op::Concatenate(_) | Op::Pad(_) | Op::Gather(_) => true,
        Op::Collective(op) => !op.collective.communicates(),
        Op::Threefry(_) | Op::BitcastConvert(_) | Op::ReducePrecision(_) | Op::Select(_) => true,
        _ => false,
    }
}

/// The number of rows of a reduction and their length, if it reduces the last dimensions.
fn rows_of(graph: &Graph, v: ValueId) -> Option<(u64, u64)> {
    let Op::Reduce(reduce) = &graph.node(v).op else { return None };
    let shape = graph.shape(graph.node(v).operands[0]);
    let last_kept = (0..shape.len()).rev().find(|d| shape[*d] > 1 && !reduce.dims.contains(d));
    let trailing = reduce.dims.iter().all(|&d| shape[d] == 1 || last_kept.is_none_or(|k| k < d));
    let row: u64 = reduce.dims.iter().map(|&d| shape[d]).product();
    trailing.then(|| (graph.ty(v).elements(), row))
}

fn is_on_chip(row: (u64, u64)) -> bool {
    row.1.saturating_mul(4) <= ROW_BYTES
}

impl<'a> Made<'a> {
    fn fused(&mut self, kernel: &Kernel) -> Result<(), Unsupported> {
        let graph = self.graph;
        let is_reduction = |v: &&ValueId| matches!(graph.node(**v).op, Op::Reduce(_));
        let reductions: Vec<ValueId> = kernel.nodes.iter().filter(is_reduction).copied().collect();
        let on_chip = |v: &ValueId| rows_of(graph, *v).filter(|rows| is_on_chip(*rows));
        let of_rows: Vec<ValueId> = reductions.iter().copied().filter(|v| on_chip(v).is_some()).collect();
        let all_rows: BTreeSet<(u64, u64)> = of_rows.iter().filter_map(on_chip).collect();
        let others = kernel.writes.iter().copied().filter(|w| !reductions.contains(w));
        let mut others: Vec<ValueId> = others.collect();
        let together = match all_rows.first() {
            Some(&(rows, length)) if all_rows.len() == 1 => self.rows(kernel, rows, length, &of_rows, &mut others)?,
            _ => false,
        };
        // Missing values, in the order of the graph. Reductions come first, since the others may need them.
        for &v in reductions.iter().filter(|v| !together || !of_rows.contains(v)) {
            self.reduction(v)?;
        }
        // Each launch writes values of one size.
        let mut sizes: Vec<u64> = others.iter().map(|&v| graph.ty(v).elements()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            let of_size: Vec<ValueId> = others.iter().copied().filter(|&v| graph.ty(v).elements() == size).collect();
            self.elements(&of_size)?;
        }
        Ok(())
    }

    /// Makes one launch for reductions of equal rows and the values written along these rows. Values that it cannot
    /// write stay in `others`. Returns false if there is no such launch.
    fn rows(
        &mut self,
        kernel: &Kernel,
        rows: u64,
        length: u64,
        reductions: &[ValueId],
        others: &mut Vec<ValueId>,
    ) -> Result<bool, Unsupported> {
        let graph = self.graph;
        let mut b = Builder::new(self, rows);
        let row = b.row;
        let Some(mut phases) = b.folded(reductions, length)? else { return Ok(false) };
        // Values written along the rows.
        let mut stores: Vec<(u64, Store)> = Vec::new();
        let mut left = Vec::new();
        for &v in others.iter() {
            let elements = graph.ty(v).elements();
            // The reductions' indices were simplified for steps within the row, so a longer value needs another launch.
            if elements % rows != 0 || elements / rows > length {
                left.push(v);
                continue;
            }
            let each = elements / rows;
            let step = b.scalars.counter(Scalar::Step, each);
            let start = b.scalars.times(row, each as i64);
            let position = b.scalars.add(start, step);
            match b.written(v, position) {
                Ok(store) => stores.push((each, store)),
                Err(Stop::Reduction(_)) => left.push(v),
                Err(Stop::Unsupported(why)) => return Err(why),
            }
        }
        // Reductions that must be written, and those that the remaining values may need.
        let wanted = |v: &&ValueId| {
            kernel.writes.contains(v)
                || !left.is_empty()
                || kernel.nodes.iter().any(|n| matches!(graph.node(*n).op, Op::Reduce(_)) && !reductions.contains(n))
        };
        let mut left_in_memory = Vec::new();
        for &v in reductions.iter().filter(wanted) {
            let (slot, dtype) = (b.slots[&v], graph.ty(v).dtype);
            let param = b.param(Source::Value(v), graph.ty(v), true);
            let value = b.scalars.element(Scalar::Slot(slot, dtype));
            stores.push((1, Store { param, index: row, value, guard: None, combines: None }));
            left_in_memory.push(v);
        }
        let mut lengths: Vec<u64> = stores.iter().map(|s| s.0).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        for length in lengths {
            let of_length = stores.iter().filter(|s| s.0 == length).map(|s| s.1).collect();
            phases.push(Phase { length, folds: Vec::new(), stores: of_length, ..Phase::default() });
        }
        *others = left;
        let spread = if length >= BLOCK_ROW { Spread::Block } else { Spread::Thread };
        self.launches.push(b.launch(spread, phases));
        self.memory.extend(left_in_memory);
        Ok(true)
    }

    /// Makes a launch that writes one reduction to memory.
    pub(crate) fn reduction(&mut self, v: ValueId) -> Result<(), Unsupported> {
        let graph = self.graph;
        let ty = graph.ty(v);
        let length = match &graph.node(v).op {
            Op::ReduceWindow(op) => op.window.iter().map(|w| w.size).product(),
            Op::Cumulative(op) => ty.shape[op.dim],
            _ => graph.ty(graph.node(v).operands[0]).elements() / ty.elements().max(1),
        };
        let mut b = Builder::new(self, ty.elements());
        let (row, step) = (b.row, b.scalars.counter(Scalar::Step, length));
        let (value, reducer) = b.reduced(v, row, step).map_err(|stop| unsupported(graph, v, stop))?;
        let slot = b.next_slot();
        let fold = Fold { value, reducer, dtype: ty.dtype, slot };
        let param = b.param(Source::Value(v), ty, true);
        let value = b.scalars.element(Scalar::Slot(slot, ty.dtype));
        let store = Store { param, index: row, value, guard: None, combines: None };
        let spread = match rows_of(graph, v) {
            _ if length < BLOCK_ROW => Spread::Thread,
            Some(_) => Spread::Block,
            None if matches!(graph.node(v).op, Op::Cumulative(_)) => Spread::Block,
            None => Spread::Columns,
        };
        let phases = vec![
            Phase { length, folds: vec![fold], stores: Vec::new(), ..Phase::default() },
            Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() },
        ];
        self.launches.push(b.launch(spread, phases));
        self.memory.insert(v);
        Ok(())
    }

    /// Makes a launch that writes values of one size element by element.
    pub(crate) fn elements(&mut self, values: &[ValueId]) -> Result<(), Unsupported> {
        let Some(&first) = values.first() else { return Ok(()) };
        let mut b = Builder::new(self, self.graph.ty(first).elements());
        let mut stores = Vec::new();
        for &v in values {
            let row = b.row;
            stores.push(b.written(v, row).map_err(|stop| unsupported(self.graph, v, stop))?);
        }
        let phases = vec![Phase { length: 1, folds: Vec::new(), stores, ..Phase::default() }];
        self.launches.push(b.launch(Spread::Thread, phases));
        self.memory.extend(values);
        Ok(())
    }
}

pub(super) fn unsupported(graph: &Graph, v: ValueId, stop: Stop) -> Unsupported {
    match stop {
        Stop::Unsupported(why) => why,
        Stop::Reduction(_) => Unsupported { value: v, op: graph.node(v).op.name() },
    }
}

/// One launch under construction.
pub(super) struct Builder<'a> {
    graph: &'a Graph,
    memory: &'a BTreeSet<ValueId>,
    /// For each value, whether it depends on a leaf.
    varies: &'a [bool],
    pub scalars: Scalars,
    rows: u64,
    pub row: Var,
    params: Vec<Param>,
    coordinates: Vec<Coordinate>,
    /// Slots of the reductions of this row.
    pub slots: HashMap<ValueId, u32>,
    /// Slots of products, each with its index.
    pub products: HashMap<ValueId, (Vec<Var>, u32)>,
    /// True if every reduction counts as one of this row. This is used to find where elements would come from.
    pub every_reduction: bool,
    num_slots: u32,
    /// The condition under which an element exists.
    guard: Option<Var>,
    known: HashMap<(ValueId, Vec<Var>, Option<Var>), Var>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(made: &'a Made<'_>, rows: u64) -> Self {
        let Made { graph, memory, varies, .. } = made;
        let mut scalars = Scalars::default();
        let row = scalars.counter(Scalar::Row, rows);
        Builder {
            graph,
            memory,
            varies,
            scalars,
            rows,
            row,
            params: Vec::new(),
            coordinates: Vec::new(),
            slots: HashMap::new(),
            products: HashMap::new(),
            every_reduction: false,
            num_slots: 0,
            guard: None,
            known: HashMap::new(),
        }
    }

    pub(crate) fn launch(self, spread: Spread, phases: Vec<Phase>) -> Launch {
        let Builder { params, coordinates, scalars, rows, .. } = self;
        Launch { params, coordinates, scalars, rows, spread, phases }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn next_slot(&mut self) -> u32 {
        self.num_slots += 1;
        self.num_slots - 1
    }

    pub(crate) fn param(&mut self, source: Source, ty: &TensorType, written: bool) -> u32 {
        if let Some(at) = self.params.iter().position(|p| p.source == source) {
            self.params[at].written |= written;
            return at as u32;
        }
        self.params.push(Param { source, dtype: ty.dtype, elements: ty.elements(), written });
        (self.params.len() - 1) as u32
    }

    /// The element of a value at a position, and the store that writes it.
    pub(crate) fn written(&mut self, v: ValueId, position: Var) -> Result<Store, Stop> {
        let ty = self.graph.ty(v);
        let index = self.scalars.unravel(position, &ty.shape);
        let value = self.computed(v, &index)?;
        let param = self.param(Source::Value(v), ty, true);
        Ok(Store { param, index: position, value, guard: None, combines: None })
    }

    /// The term that a reduction takes from its operand for result `row` at iteration `step`.
    pub(crate) fn reduced(&mut self, v: ValueId, row: Var, step: Var) -> Result<(Var, Reducer), Stop> {
        let graph = self.graph;
        let node = graph.node(v);
        let operand = node.operands[0];
        let shape = graph.shape(operand);
        match &node.op {
            Op::Reduce(reduce) => {
                let within: Vec<u64> = reduce.dims.iter().map(|&d| shape[d]).collect();
                let inner = self.scalars.unravel(step, &within);
                let outer = self.scalars.unravel(row, &node.ty.shape);
                let mut kept = outer.into_iter();
                let mut index = Vec::with_capacity(shape.len());
                for d in 0..shape.len() {
                    let reduced = reduce.dims.iter().position(|&r| r == d).map(|k| inner[k]);
                    index.extend(reduced.or_else(|| kept.next()));
                }
                Ok((self.element(operand, &index)?, reduce.reducer))
            }
            Op::ReduceWindow(op) => {
                let sizes: Vec<u64> = op.window.iter().map(|w| w.size).collect();
                let (at, inner) = (self.scalars.unravel(row, &node.ty.shape), self.scalars.unravel(step, &sizes));
                let mut guard = None;
                let mut index = Vec::with_capacity(shape.len());
                for (d, window) in op.window.iter().enumerate() {
                    let (position, inside) = self.scalars.window(window, at[d], inner[d], shape[d]);
                    guard = self.scalars.and(guard, inside);
                    index.push(position);
                }
                let value = self.guarded(guard, |b| b.element(operand, &index))?;
                let neutral = op.reducer.neutral(node.ty.dtype);
                Ok((self.or_else(guard, value, neutral, node.ty.dtype), op.reducer))
            }
            // A scan computes every element independently from all before it: more work than in sequence, but parallel.
            Op::Cumulative(op) => {
                let at = self.scalars.unravel(row, &node.ty.shape);
                let (back, size) = (self.scalars.times(step, -1), shape[op.dim] as i64);
                let mut distance = self.scalars.add(at[op.dim], back);
                if op.reverse {
                    distance = self.scalars.times(distance, -1);
                }
                let guard = self.scalars.within(distance, size);
                let mut index = at;
                index[op.dim] = step;
                let value = self.guarded(guard, |b| b.element(operand, &index))?;
                let neutral = op.reducer.neutral(node.ty.dtype);
                Ok((self.or_else(guard, value, neutral, node.ty.dtype), op.reducer))
            }
            op => Err(Stop::Unsupported(Unsupported { value: v, op: op.name() })),
        }
    }

    pub(crate) fn is_nan(&mut self, dtype: DType, a: Var) -> Option<Var> {
        dtype.is_float().then(|| self.scalars.element(Scalar::Compare(Direction::Ne, dtype, a, a)))
    }

    /// Returns whether `a` precedes `b` in ascending order, with NaNs last.
    pub(crate) fn comes_first(&mut self, dtype: DType, a: Var, b: Var) -> Var {
        let less = self.scalars.element(Scalar::Compare(Direction::Lt, dtype, a, b));
        let (Some(no_a), Some(no_b)) = (self.is_nan(dtype, a), self.is_nan(dtype, b)) else { return less };
        let number = self.scalars.element(Scalar::Unary(Unary::Not, DType::Bool, no_a));
        let last = self.scalars.element(Scalar::And(number, no_b));
        self.scalars.element(Scalar::Binary(Binary::Or, DType::Bool, less, last))
    }

    pub(crate) fn is_equal(&mut self, dtype: DType, a: Var, b: Var) -> Var {
        let equal = self.scalars.element(Scalar::Compare(Direction::Eq, dtype, a, b));
        let (Some(no_a), Some(no_b)) = (self.is_nan(dtype, a), self.is_nan(dtype, b)) else { return equal };
        let both = self.scalars.element(Scalar::And(no_a, no_b));
        self.scalars.element(Scalar::Binary(Binary::Or, DType::Bool, equal, both))
    }

    pub(crate) fn guarded<T>(&mut self, guard: Option<Var>, make: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.guard;
        self.guard = self.scalars.and(outer, guard);
        let made = make(self);
        self.guard = outer;
        made
    }

    /// `value` if the guard holds, and `other` otherwise.
    pub(crate) fn or_else(&mut self, guard: Option<Var>, value: Var, other: f64, dtype: DType) -> Var {
        let Some(guard) = guard else { return value };
        let other = self.scalars.element(Scalar::Number(other.to_bits(), dtype));
        self.scalars.element(Scalar::Select(dtype, [guard, value, other]))
    }

    /// The element of a value at an index: loaded from memory, read from a slot, or computed.
    pub(crate) fn element(&mut self, v: ValueId, index: &[Var]) -> Result<Var, Stop> {
        let node = self.graph.node(v);
        let in_memory = self.memory.contains(&v) || node.op.is_leaf();
        match &node.op {
            _ if in_memory => Ok(self.load(Source::Value(v), &node.ty, index)),
            // A value without leaves is known beforehand.
            op if !self.varies[v.index()] && !op.is_elementwise() && !is_view(op) => {
                Ok(self.load(Source::Constant(v), &node.ty, index))
            }
            Op::DotGeneral(_) => match self.products.get(&v) {
                Some((at, slot)) if at == index => Ok(self.scalars.element(Scalar::Slot(*slot, node.ty.dtype))),
                _ => Err(Stop::Unsupported(Unsupported { value: v, op: node.op.name() })),
            },
            Op::Reduce(_) => {
                let position = self.scalars.position(index, &node.ty.shape);
                if self.every_reduction {
                    return Ok(self.scalars.element(Scalar::Slot(u32::MAX, node.ty.dtype)));
                }
                match self.slots.get(&v) {
                    Some(&slot) if position == self.row => Ok(self.scalars.element(Scalar::Slot(slot, node.ty.dtype))),
                    _ => Err(Stop::Reduction(v)),
                }
            }
            _ => self.computed(v, index),
        }
    }

    pub(crate) fn load(&mut self, source: Source, ty: &TensorType, index: &[Var]) -> Var {
        let param = self.param(source, ty, false);
        let index = self.scalars.position(index, &ty.shape);
        self.scalars.element(Scalar::Load { param, index, guard: self.guard, dtype: ty.dtype })
    }

    /// The phases that compute reductions of rows of this length. `None` if they need reductions of other rows.
    fn folded(&mut self, reductions: &[ValueId], length: u64) -> Result<Option<Vec<Phase>>, Unsupported> {
        let row = self.row;
        let mut phases: Vec<Phase> = Vec::new();
        let mut pending: Vec<ValueId> = reductions.to_vec();
        while !pending.is_empty() {
            let step = self.scalars.counter(Scalar::Step, length);
            let (mut folds, mut later) = (Vec::new(), Vec::new());
            let mut known = Vec::new();
            for &v in &pending {
                match self.reduced(v, row, step) {
                    Ok((value, reducer)) => {
                        let slot = self.next_slot();
                        folds.push(Fold { value, reducer, dtype: self.graph.ty(v).dtype, slot });
                        known.push((v, slot));
                    }
                    Err(Stop::Reduction(needed)) if pending.contains(&needed) && needed != v => later.push(v),
                    Err(Stop::Reduction(_)) => return Ok(None),
                    Err(Stop::Unsupported(why)) => return Err(why),
                }
            }
            if folds.is_empty() {
                return Ok(None);
            }
            self.slots.extend(known);
            phases.push(Phase { length, folds, stores: Vec::new(), ..Phase::default() });
            pending = later;
        }
        Ok(Some(phases))
    }

    /// Computes the element of a value at an index by its op.
    fn computed(&mut self, v: ValueId, index: &[Var]) -> Result<Var, Stop> {
        let key = (v, index.to_vec(), self.guard);
        if let Some(&known) = self.known.get(&key) {
            return Ok(known);
        }
        let made = self.by_op(v, index)?;
        self.known.insert(key, made);
        Ok(made)
    }

    fn by_op(&mut self, v: ValueId, index: &[Var]) -> Result<Var, Stop> {
        let graph = self.graph;
        let node = graph.node(v);
        let (operands, dtype) = (&node.operands, node.ty.dtype);
        let of = |k: usize| graph.ty(operands[k]);
        Ok(match &node.op {
            Op::Constant(literal) => match literal.as_splat() {
                Some(value) => self.scalars.element(Scalar::Number(value.to_bits(), dtype)),
                None => self.load(Source::Constant(v), &node.ty, index),
            },
            Op::Iota(iota) => self.scalars.element(Scalar::AsElement(index[iota.dim], dtype)),
            Op::AxisIndex(op) => {
                let at = self.coordinate(&op.axes, op.axes.iter().map(|&a| op.mesh.size(a)).product());
                self.scalars.element(Scalar::AsElement(at, dtype))
            }
            Op::Unary(op) => {
                let value = self.element(operands[0], index)?;
                self.scalars.element(Scalar::Unary(*op, of(0).dtype, value))
            }
            Op::Binary(op) => {
                let (a, b) = (self.element(operands[0], index)?, self.element(operands[1], index)?);
                self.scalars.element(Scalar::Binary(*op, dtype, a, b))
            }
            Op::Compare(op) => {
                let (a, b) = (self.element(operands[0], index)?, self.element(operands[1], index)?);
                self.scalars.element(Scalar::Compare(op.direction, of(0).dtype, a, b))
            }
            Op::Select(_) => {
                let predicate = if of(0).shape.is_empty() { &[] } else { index };
                let predicate = self.element(operands[0], predicate)?;
                let (a, b) = (self.element(operands[1], index)?, self.element(operands[2], index)?);
                self.scalars.element(Scalar::Select(dtype, [predicate, a, b]))
            }
            Op::Convert(op) => {
                let value = self.element(operands[0], index)?;
                self.scalars.element(Scalar::Convert { from: of(0).dtype, to: op.dtype, value })
            }
            Op::BitcastConvert(op) if of(0).dtype.bytes() == op.dtype.bytes() && of(0).dtype.width() >= 8 => {
                let value = self.element(operands[0], index)?;
                self.scalars.element(Scalar::Bitcast { from: of(0).dtype, to: op.dtype, value })
            }
            Op::ReducePrecision(op) => {
                let value = self.element(operands[0], index)?;
                let (exponent_bits, mantissa_bits) = (op.exponent_bits, op.mantissa_bits);
                self.scalars.element(Scalar::ReducePrecision { exponent_bits, mantissa_bits, dtype, value })
            }
            Op::Threefry(op) => {
                let mut words = [Var(0); 4];
                for (word, &operand) in words.iter_mut().zip(operands) {
                    *word = self.element(operand, index)?;
                }
                self.scalars.element(Scalar::Threefry(op.word, words))
            }
            _ => return self.by_view(v, index),
        })
    }

    /// Computes an element that is a copy of an operand's element at another index.
    fn by_view(&mut self, v: ValueId, index: &[Var]) -> Result<Var, Stop> {
        let graph = self.graph;
        let node = graph.node(v);
        let (operands, dtype) = (&node.operands, node.ty.dtype);
        let of = |k: usize| graph.ty(operands[k]);
        Ok(match &node.op {
            Op::BroadcastInDim(op) => {
                let zero = self.scalars.index(0);
                let from = of(0).shape.iter().zip(&op.dims).map(|(&n, &d)| if n == 1 { zero } else { index[d] });
                let from: Vec<Var> = from.collect();
                self.element(operands[0], &from)?
            }
            Op::Reshape(_) => {
                let position = self.scalars.position(index, &node.ty.shape);
                let from = self.scalars.unravel(position, &of(0).shape);
                self.element(operands[0], &from)?
            }
            Op::Transpose(op) => {
                let mut from = vec![Var(0); index.len()];
                op.permutation.iter().zip(index).for_each(|(&d, &i)| from[d] = i);
                self.element(operands[0], &from)?
            }
            Op::Slice(op) => {
                let mut from = Vec::with_capacity(index.len());
                for (d, &i) in index.iter().enumerate() {
                    let (start, moved) = (self.scalars.index(op.start[d] as i64), op.stride[d] as i64);
                    let moved = self.scalars.times(i, moved);
                    from.push(self.scalars.add(start, moved));
                }
                self.element(operands[0], &from)?
            }
            Op::Reverse(op) => {
                let mut from = index.to_vec();
                for &d in &op.dims {
                    let (last, back) = (self.scalars.index(node.ty.shape[d] as i64 - 1), from[d]);
                    let back = self.scalars.times(back, -1);
                    from[d] = self.scalars.add(last, back);
                }
                self.element(operands[0], &from)?
            }
            Op::Concatenate(op) => self.concatenated(v, op.dim, index)?,
            Op::Pad(op) => {
                let (mut from, mut guard) = (Vec::with_capacity(index.len()), None);
                for (d, &i) in index.iter().enumerate() {
                    let low = self.scalars.index(-op.low[d]);
                    let position = self.scalars.add(i, low);
                    let (position, inside) = self.scalars.spread_out(position, op.interior[d] + 1, of(0).shape[d]);
                    guard = self.scalars.and(guard, inside);
                    from.push(position);
                }
                let value = self.guarded(guard, |b| b.element(operands[0], &from))?;
                let padding = self.element(operands[1], &[])?;
                match guard {
                    Some(guard) => self.scalars.element(Scalar::Select(dtype, [guard, value, padding])),
                    None => value,
                }
            }
            Op::Gather(op) => self.gathered(op, operands, index, dtype)?,
            Op::Collective(op) => match &op.collective {
                Collective::LocalSlice { axes, dim, outer } => {
                    let parts = of(0).shape[usize::from(*dim)] / node.ty.shape[usize::from(*dim)].max(1);
                    let from = self.own_part(axes, BlockedDim::new(*dim, *outer), &node.ty.shape, parts, index);
                    self.element(operands[0], &from)?
                }
                Collective::KeepFirst { axes, reducer } => {
                    let me = self.coordinate(axes, u64::MAX);
                    let first = self.scalars.within(me, 1);
                    let value = self.element(operands[0], index)?;
                    self.or_else(first, value, reducer.neutral(dtype), dtype)
                }
                _ => return Err(Stop::Unsupported(Unsupported { value: v, op: node.op.name() })),
            },
            op => return Err(Stop::Unsupported(Unsupported { value: v, op: op.name() })),
        })
    }

    /// The index in a whole tensor of an index in this device's part of it, one of `parts`, which has this shape. The
    /// dimension has blocks, each with one part per device.
    fn own_part(&mut self, axes: &[AxisId], along: BlockedDim, shape: &[u64], parts: u64, index: &[Var]) -> Vec<Var> {
        let me = self.coordinate(axes, parts);
        let BlockedDim { dim, outer } = along;
        let part = shape[dim] as i64 / (outer as i64).max(1);
        let (block, rest) = (self.scalars.quotient(index[dim], part), self.scalars.remainder(index[dim], part));
        let block = self.scalars.times(block, part * parts as i64);
        let mine = self.scalars.times(me, part);
        let at = self.scalars.add(block, mine);
        let mut from = index.to_vec();
        from[dim] = self.scalars.add(at, rest);
        from
    }

    fn concatenated(&mut self, v: ValueId, dim: usize, index: &[Var]) -> Result<Var, Stop> {
        let graph = self.graph;
        let node = graph.node(v);
        let mut from = index.to_vec();
        let mut start = 0i64;
        let mut whole: Option<Var> = None;
        for &operand in &node.operands {
            let size = graph.shape(operand)[dim] as i64;
            let offset = self.scalars.index(-start);
            from[dim] = self.scalars.add(index[dim], offset);
            let inside = self.scalars.within(from[dim], size);
            let part = self.guarded(inside, |b| b.element(operand, &from))?;
            whole = Some(match (inside, whole) {
                (Some(inside), Some(before)) => {
                    self.scalars.element(Scalar::Select(node.ty.dtype, [inside, part, before]))
                }
                _ => part,
            });
            start += size;
        }
        whole.ok_or(Stop::Unsupported(Unsupported { value: v, op: node.op.name() }))
    }

    /// This device's position along axes with at most `parts` positions.
    pub(crate) fn coordinate(&mut self, axes: &[AxisId], parts: u64) -> Var {
        let wanted = Coordinate::Along(axes.to_vec());
        let known = self.coordinates.iter().position(|known| *known == wanted);
        let at = known.unwrap_or_else(|| {
            self.coordinates.push(wanted);
            self.coordinates.len() - 1
        });
        self.scalars.counter(Scalar::Coordinate(at as u32), parts.min(1 << 31))
    }

    fn gathered(&mut self, op: &Gather, operands: &[ValueId], index: &[Var], dtype: DType) -> Result<Var, Stop> {
        let shape = self.graph.shape(operands[0]).to_vec();
        let zeros = op.out_of_bounds == OutOfBounds::Zero;
        let (from, guard) = self.looked_up(&op.dims, &shape, operands[1], index, zeros)?;
        let value = self.guarded(guard, |b| b.element(operands[0], &from))?;
        Ok(self.or_else(guard, value, 0.0, dtype))
    }

    /// Index in a table of `shape` of the element that a lookup returns at `index`. With `exact`, also the condition
    /// under which it is in bounds; otherwise an out-of-bounds slice is clamped.
    pub(crate) fn looked_up(
        &mut self,
        dims: &GatherDims,
        shape: &[u64],
        indices: ValueId,
        index: &[Var],
        exact: bool,
    ) -> Result<(Vec<Var>, Option<Var>), Stop> {
        let indices_ty = self.graph.ty(indices).clone();
        let zero = self.scalars.index(0);
        let mut from = vec![zero; shape.len()];
        for (&o, &r) in dims.window_dims().iter().zip(&dims.offset_dims) {
            from[o] = index[r];
        }
        let mut at = vec![zero; indices_ty.rank()];
        for (&i, &r) in dims.indices_dims(indices_ty.rank()).iter().zip(&dims.batch_dims(index.len())) {
            at[i] = index[r];
        }
        for (&o, &i) in dims.operand_batching_dims.iter().zip(&dims.indices_batching_dims) {
            from[o] = at[i];
        }
        let mut guard = None;
        for (k, &o) in dims.start_index_map.iter().enumerate() {
            if dims.index_vector_dim < at.len() {
                at[dims.index_vector_dim] = self.scalars.index(k as i64);
            }
            let start = self.element(indices, &at)?;
            let start = self.scalars.index_of(start, indices_ty.dtype);
            let most = shape[o] as i64 - dims.slice_sizes[o] as i64;
            let start = match exact {
                true => {
                    let inside = self.scalars.within(start, most + 1);
                    guard = self.scalars.and(guard, inside);
                    start
                }
                false => self.scalars.clamp(start, most),
            };
            from[o] = self.scalars.add(start, from[o]);
        }
        Ok((from, guard))
    }
}
