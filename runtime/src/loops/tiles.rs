//! Kernels around products that stay on the chip, such as attention. Scores are computed tile by tile from rows in
//! memory, and each tile is summed before the next.
//!
//! In such a kernel, inner products make large values, and outer products consume elementwise functions of them. One
//! launch iterates over the rows of the large values and one over their columns, each if something is summed along the
//! other dimension.
//!
//! The code knows nothing of softmax. A reduction that depends on another waits for a phase of its own, unless that
//! other is a maximum that only scales it. Then both share a phase with a running maximum (Milakov and Gimelshein
//! 2018). So attention is one pass over the keys (Dao et al. 2022, FlashAttention). Its backward pass is one pass for
//! the gradient's mean and one for each side's gradients.

use super::build::{Builder, Made, Stop};
use super::scalar::{Scalar, Scalars, Var};
use super::{Fold, Inner, build::Unsupported};
use super::{Launch, Outer, Phase, Running, Source, Spread, Store, Strip};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::kernels::Kernel;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::{Binary, DotGeneral, Op, Reducer, Unary};
use altiplano_ir::reshard::Collective;
use altiplano_ir::storage::view::View;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum strip length that leaves room for the sums of a tile in registers.
const LONGEST: u64 = 256;

/// Dimensions of the large values: batch dimensions, rows and columns.
struct Large {
    batch: Vec<u64>,
    rows: Vec<u64>,
    columns: Vec<u64>,
}

/// A product that sums functions of large values along their rows or columns.
#[derive(Clone, Copy)]
struct Summed<'a> {
    product: ValueId,
    dot: &'a DotGeneral,
    /// The index of the large operand.
    large: usize,
}

/// The layout of an operand.
struct Laid {
    view: View,
    source: Source,
    /// The parts of the source that belong to this device, on top of the view.
    parts: Vec<Parted>,
}

/// One of `count` parts, chosen by a device's position along axes; consecutive parts start `apart` elements apart.
struct Parted {
    axes: Vec<AxisId>,
    count: u64,
    apart: u64,
}

/// The dimensions of an operand that are neither batch nor contracted, in ascending order.
fn kept(rank: usize, batch: &[usize], contract: &[usize]) -> Vec<usize> {
    (0..rank).filter(|d| !batch.contains(d) && !contract.contains(d)).collect()
}

/// The iteration space of a launch over tiles, as scalars of the large values' indices.
struct Walk {
    batch: Vec<Var>,
    /// Indices of the dimensions that rows iterate over, which may be either side of the large values, and of those
    /// that iterations do.
    rows: Vec<Var>,
    steps: Vec<Var>,
    step: Var,
    length: u64,
}

/// The pending reductions and sums of a launch, and the slots of all of them.
struct Open<'a> {
    reductions: Vec<ValueId>,
    sums: Vec<Summed<'a>>,
    slots: BTreeMap<ValueId, u32>,
}

impl Made<'_> {
    /// Makes the launches of a kernel whose products stay on the chip.
    pub(super) fn tiled(&mut self, kernel: &Kernel) -> Result<(), Unsupported> {
        let graph = self.graph;
        let refused = |v: ValueId| Unsupported { value: v, op: graph.node(v).op.name() };
        let mut made_of_products = vec![false; graph.len()];
        let (mut inner, mut outer): (Vec<ValueId>, Vec<Summed<'_>>) = (Vec::new(), Vec::new());
        let within: BTreeSet<ValueId> = kernel.nodes.iter().copied().collect();
        for v in graph.values().filter(|v| !self.memory.contains(v)) {
            let node = graph.node(v);
            let operands = node.operands.iter().map(|o| made_of_products[o.index()]);
            match &node.op {
                Op::DotGeneral(dot) if within.contains(&v) => match operands.collect::<Vec<bool>>()[..] {
                    [false, false] => {
                        made_of_products[v.index()] = true;
                        inner.push(v);
                    }
                    [first, second] if first != second => {
                        outer.push(Summed { product: v, dot, large: usize::from(second) });
                    }
                    _ => return Err(refused(v)),
                },
                Op::Reduce(_) => {}
                _ => made_of_products[v.index()] = operands.into_iter().any(|large| large),
            }
        }
        let Some(&first) = inner.first() else { return Err(refused(kernel.nodes[0])) };
        let dims = |v: ValueId| {
            let Op::DotGeneral(dot) = &graph.node(v).op else { return None };
            let [lhs, rhs] = [0, 1].map(|i| graph.shape(graph.node(v).operands[i]));
            let of = |shape: &[u64], dims: Vec<usize>| dims.into_iter().map(|d| shape[d]).collect::<Vec<u64>>();
            Some(Large {
                batch: of(lhs, dot.lhs_batch.clone()),
                rows: of(lhs, kept(lhs.len(), &dot.lhs_batch, &dot.lhs_contract)),
                columns: of(rhs, kept(rhs.len(), &dot.rhs_batch, &dot.rhs_contract)),
            })
        };
        let large = dims(first).ok_or_else(|| refused(first))?;
        let alike = |l: &Large| (&l.batch, &l.rows, &l.columns) == (&large.batch, &large.rows, &large.columns);
        if let Some(&other) = inner.iter().find(|&&v| dims(v).is_none_or(|l| !alike(&l))) {
            return Err(refused(other));
        }
        let reductions: Vec<ValueId> =
            kernel.nodes.iter().copied().filter(|v| matches!(graph.node(*v).op, Op::Reduce(_))).collect();
        // Rows first, since sums along columns read the reductions.
        let (mut of_rows, mut of_columns) = (Vec::new(), Vec::new());
        for &summed in &outer {
            match self.is_along_rows(&large, &inner, summed) {
                Some(true) => of_rows.push(summed),
                Some(false) => of_columns.push(summed),
                None => return Err(refused(summed.product)),
            }
        }
        let done = |v: &ValueId| reductions.contains(v) || outer.iter().any(|o| o.product == *v);
        let others: Vec<ValueId> = kernel.writes.iter().copied().filter(|w| !done(w)).collect();
        let tile = |of: &[Summed<'_>]| of.iter().map(|s| self.width(*s)).sum::<u64>();
        let (of_rows, of_columns) = match [&of_rows, &of_columns].map(|of| tile(of) > LONGEST) {
            [false, false] => (vec![of_rows], vec![of_columns]),
            // Together, their sums would not fit in registers.
            _ => (of_rows.chunks(1).map(Vec::from).collect(), of_columns.chunks(1).map(Vec::from).collect()),
        };
        // Reductions are along rows, and are computed with the first of the row sums.
        let (first, rest) = of_rows.split_first().map_or((&[][..], &[][..]), |(first, rest)| (&first[..], rest));
        if !(first.is_empty() && reductions.is_empty() && others.is_empty()) {
            self.along(&large, &inner, false, &reductions, first, &others)?;
        }
        let rest = rest.iter().map(|part| (false, part)).chain(of_columns.iter().map(|part| (true, part)));
        for (turned, part) in rest.filter(|(_, part)| !part.is_empty()) {
            self.along(&large, &inner, turned, &[], part, &[])?;
        }
        Ok(())
    }

    fn width(&self, Summed { product, dot, large }: Summed<'_>) -> u64 {
        let shape = self.graph.shape(self.graph.node(product).operands[1 - large]);
        let (batch, contract) =
            if large == 0 { (&dot.rhs_batch, &dot.rhs_contract) } else { (&dot.lhs_batch, &dot.lhs_contract) };
        kept(shape.len(), batch, contract).into_iter().map(|d| shape[d]).product()
    }

    /// The layout of an operand, if strides describe it.
    fn strided(&self, v: ValueId) -> Option<Laid> {
        let node = self.graph.node(v);
        let whole = |source: Source| {
            let view = View::whole(v, node.ty.shape.iter().map(|&d| d as usize).collect());
            Some(Laid { view, source, parts: Vec::new() })
        };
        if self.memory.contains(&v) || node.op.is_leaf() {
            return whole(Source::Value(v));
        }
        if !self.varies[v.index()] {
            return whole(Source::Constant(v));
        }
        let operand = *node.operands.first()?;
        let mut laid = self.strided(operand)?;
        match &node.op {
            Op::Collective(op) => {
                // With several blocks, a device has a part of each, which no single view describes.
                let Collective::LocalSlice { axes, dim, outer: 1 } = &op.collective else { return None };
                let (dim, shape) = (usize::from(*dim), &node.ty.shape);
                let count = self.graph.shape(operand)[dim] / shape[dim].max(1);
                laid.parts.push(Parted {
                    axes: axes.clone(),
                    count,
                    apart: shape[dim] * laid.view.strides[dim] as u64,
                });
                laid.view = laid.view.slice(&vec![0; shape.len()], &vec![1; shape.len()], shape);
            }
            op => laid.view = laid.view.through(op, &node.ty.shape)?,
        }
        Some(laid)
    }

    /// `true` if a product sums along the rows of large values, `false` if along their columns, `None` if neither.
    fn is_along_rows(&self, large: &Large, inner: &[ValueId], summed: Summed<'_>) -> Option<bool> {
        [true, false].into_iter().find(|&rows| {
            let own = if rows { &large.rows } else { &large.columns };
            let mut b = Builder::new(self, large.batch.iter().chain(own).product());
            let walk = walk(&mut b, large, !rows);
            self.slots_of(&mut b, large, inner, !rows, &walk);
            b.every_reduction = true;
            let index = self.index_of(summed, &walk);
            index.is_some_and(|index| b.element(self.operand(summed), &index).is_ok())
        })
    }

    fn operand(&self, summed: Summed<'_>) -> ValueId {
        self.graph.node(summed.product).operands[summed.large]
    }

    /// The index of a product's large operand.
    fn index_of(&self, summed: Summed<'_>, walk: &Walk) -> Option<Vec<Var>> {
        let shape = self.graph.shape(self.operand(summed));
        let dot = summed.dot;
        let (batch, contract) =
            if summed.large == 0 { (&dot.lhs_batch, &dot.lhs_contract) } else { (&dot.rhs_batch, &dot.rhs_contract) };
        let sorted = |dims: &[usize]| {
            let mut dims = dims.to_vec();
            dims.sort_unstable();
            dims
        };
        let free = kept(shape.len(), batch, contract);
        let mut index = vec![None; shape.len()];
        for (dims, vars) in [(sorted(batch), &walk.batch), (free, &walk.rows), (sorted(contract), &walk.steps)] {
            if dims.len() != vars.len() {
                return None;
            }
            dims.into_iter().zip(vars).for_each(|(d, &var)| index[d] = Some(var));
        }
        index.into_iter().collect()
    }

    /// Gives the builder the slots of inner products at the walk's index. Their strips are made once it is known which
    /// are needed.
    fn slots_of(&self, b: &mut Builder<'_>, large: &Large, inner: &[ValueId], turned: bool, walk: &Walk) {
        let (rows, columns) = if turned { (&walk.steps, &walk.rows) } else { (&walk.rows, &walk.steps) };
        debug_assert_eq!((rows.len(), columns.len()), (large.rows.len(), large.columns.len()));
        let index: Vec<Var> = walk.batch.iter().chain(rows).chain(columns).copied().collect();
        for &v in inner {
            let slot = b.next_slot();
            b.products.insert(v, (index.clone(), slot));
        }
    }

    /// A strip of an operand. Each of its dimensions is at a given index, except those along which the strip runs.
    fn strip(
        &self,
        b: &mut Builder<'_>,
        v: ValueId,
        index: &BTreeMap<usize, Var>,
        along: &[usize],
    ) -> Result<Strip, Unsupported> {
        let refused = Unsupported { value: v, op: self.graph.node(v).op.name() };
        let Laid { view, source, parts } = self.strided(v).ok_or(refused.clone())?;
        let (length, stride) = match view.transpose(along).runs()[..] {
            [] => (1, 1),
            [(length, stride)] => (length as u64, stride as u64),
            _ => return Err(refused),
        };
        let root = self.graph.ty(view.root);
        if length > LONGEST || !matches!(root.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(refused);
        }
        let mut base = b.scalars.index(view.offset as i64);
        for Parted { axes, count, apart } in &parts {
            let me = b.coordinate(axes, *count);
            let start = b.scalars.times(me, *apart as i64);
            base = b.scalars.add(base, start);
        }
        for (&d, &at) in index {
            let moved = b.scalars.times(at, view.strides[d] as i64);
            base = b.scalars.add(base, moved);
        }
        let param = b.param(source, root, false);
        Ok(Strip { param, base, stride, length })
    }

    /// The strips of an inner product.
    fn inner(&self, b: &mut Builder<'_>, v: ValueId, turned: bool, walk: &Walk) -> Result<[Strip; 2], Unsupported> {
        let node = self.graph.node(v);
        let Op::DotGeneral(dot) = &node.op else {
            return Err(Unsupported { value: v, op: node.op.name() });
        };
        let mut strips = Vec::with_capacity(2);
        for (i, (batch, contract)) in
            [(&dot.lhs_batch, &dot.lhs_contract), (&dot.rhs_batch, &dot.rhs_contract)].into_iter().enumerate()
        {
            let operand = node.operands[i];
            let free = kept(self.graph.shape(operand).len(), batch, contract);
            let of_rows = (i == 0) != turned;
            let vars = if of_rows { &walk.rows } else { &walk.steps };
            let index = batch.iter().copied().zip(walk.batch.iter().copied()).chain(free.into_iter().zip(vars.clone()));
            strips.push(self.strip(b, operand, &index.collect(), contract)?);
        }
        if turned {
            strips.reverse();
        }
        Ok([strips[0], strips[1]])
    }

    /// Makes one launch over the rows of large values or, if `turned`, over their columns.
    fn along(
        &mut self,
        large: &Large,
        inner: &[ValueId],
        turned: bool,
        reductions: &[ValueId],
        outer: &[Summed<'_>],
        others: &[ValueId],
    ) -> Result<(), Unsupported> {
        let graph = self.graph;
        let refused = |v: ValueId| Unsupported { value: v, op: graph.node(v).op.name() };
        let own: u64 = if turned { &large.columns } else { &large.rows }.iter().product();
        let mut b = Builder::new(self, large.batch.iter().product::<u64>() * own);
        let row = b.row;
        let walk = walk(&mut b, large, turned);
        self.slots_of(&mut b, large, inner, turned, &walk);
        let slots: BTreeMap<ValueId, u32> =
            reductions.iter().copied().chain(outer.iter().map(|o| o.product)).map(|v| (v, b.next_slot())).collect();
        let mut phases: Vec<Phase> = Vec::new();
        let mut open = Open { reductions: reductions.to_vec(), sums: outer.to_vec(), slots };
        while !open.reductions.is_empty() || !open.sums.is_empty() {
            let mut phase = Phase { length: walk.length, ..Phase::default() };
            // First the sums of complete values. Then, if there is one maximum among them, those that it only scales.
            let complete = self.summed(&mut b, &walk, &mut open, &mut phase, None)?;
            let floats = |f: &&Fold| f.reducer == Reducer::Max && f.dtype.is_float();
            let most = phase.folds.iter().find(floats).map(|f| f.slot).filter(|_| complete.len() == 1);
            b.slots.extend(complete.iter().copied());
            if let Some(most) = most {
                let running = Running { most, scaled: Vec::new() };
                self.summed(&mut b, &walk, &mut open, &mut phase, Some(running))?;
            }
            if phase.folds.is_empty() && phase.outer.is_empty() {
                let stuck = open.reductions.first().copied().or(open.sums.first().map(|s| s.product));
                return Err(refused(stuck.unwrap_or(inner[0])));
            }
            let needed: BTreeSet<u32> = b
                .scalars
                .with_operands(phase.folds.iter().map(|f| f.value).chain(phase.outer.iter().map(|o| o.value)))
                .into_iter()
                .filter_map(|v| if let Scalar::Slot(slot, _) = b.scalars.get(v) { Some(*slot) } else { None })
                .collect();
            for &v in inner {
                let slot = b.products[&v].1;
                if needed.contains(&slot) {
                    let [of_row, of_step] = self.inner(&mut b, v, turned, &walk)?;
                    phase.inner.push(Inner { of_row, of_step, slot });
                }
            }
            phases.push(phase);
        }
        // The results written to memory: reductions, values that follow from them, and sums.
        let mut stores = Vec::new();
        for &v in reductions {
            let dtype = graph.ty(v).dtype;
            let param = b.param(Source::Value(v), graph.ty(v), true);
            let value = b.scalars.element(Scalar::Slot(open.slots[&v], dtype));
            stores.push(Store { param, index: row, value, guard: None, combines: None });
        }
        for &v in others {
            if graph.ty(v).elements() != b.rows() {
                return Err(refused(v));
            }
            stores.push(b.written(v, row).map_err(|_| refused(v))?);
        }
        if !stores.is_empty() {
            phases.push(Phase { length: 1, stores, ..Phase::default() });
        }
        for &summed in outer {
            phases.push(self.stored(&mut b, summed, &walk, open.slots[&summed.product]));
        }
        let launch: Launch = b.launch(Spread::Tiles(own), phases);
        super::tiles_text::fits(&launch).then_some(()).ok_or_else(|| refused(inner[0]))?;
        self.launches.push(launch);
        self.memory.extend(reductions);
        Ok(())
    }

    /// Moves pending reductions and sums into a phase if they can be computed now. With a running maximum, these are
    /// the ones that only the maximum and one of the phase's sums scale.
    fn summed(
        &self,
        b: &mut Builder<'_>,
        walk: &Walk,
        open: &mut Open<'_>,
        phase: &mut Phase,
        mut running: Option<Running>,
    ) -> Result<Vec<(ValueId, u32)>, Unsupported> {
        let (graph, row) = (self.graph, b.row);
        let Open { reductions: pending, sums, slots } = open;
        let mut done = Vec::new();
        let mut later = Vec::new();
        for &v in pending.iter() {
            let (value, reducer) = match b.reduced(v, row, walk.step) {
                Ok(found) => found,
                Err(Stop::Reduction(_)) => {
                    later.push(v);
                    continue;
                }
                Err(Stop::Unsupported(why)) => return Err(why),
            };
            let slot = slots[&v];
            if graph.ty(v).elements() != b.rows()
                || graph.ty(graph.node(v).operands[0]).elements() != b.rows() * walk.length
            {
                return Err(Unsupported { value: v, op: graph.node(v).op.name() });
            }
            if let Some(running) = &mut running {
                match depends(&b.scalars, value, running.most, Slot::Most) {
                    Some(Part::None) => {}
                    Some(Part::Scaled(-1)) if reducer == Reducer::Sum => running.scaled.push(slot),
                    _ => {
                        later.push(v);
                        continue;
                    }
                }
            }
            phase.folds.push(Fold { value, reducer, dtype: graph.ty(v).dtype, slot });
            done.push((v, slot));
        }
        *pending = later;
        if running.is_some() {
            b.slots.extend(done.iter().copied());
        }
        let mut left = Vec::new();
        for &summed in sums.iter() {
            let refused = Unsupported { value: summed.product, op: graph.node(summed.product).op.name() };
            let index = self.index_of(summed, walk).ok_or(refused)?;
            let value = match b.element(self.operand(summed), &index) {
                Ok(value) => value,
                Err(Stop::Reduction(_)) => {
                    left.push(summed);
                    continue;
                }
                Err(Stop::Unsupported(why)) => return Err(why),
            };
            let slot = slots[&summed.product];
            let mut divided = None;
            if let Some(running) = &mut running {
                let Some(scaling) = scaling(&b.scalars, value, phase, &done, running.most) else {
                    left.push(summed);
                    continue;
                };
                divided = scaling.divided;
                running.scaled.extend(scaling.by_maximum.then_some(slot));
            }
            let of_step = self.summed_strip(b, summed, walk)?;
            phase.outer.push(Outer { value, of_step, slot, divided });
        }
        *sums = left;
        phase.running = running.filter(|_| phase.folds.len() + phase.outer.len() > 1).or(phase.running.take());
        Ok(done)
    }

    /// The strip that a sum adds in each iteration.
    fn summed_strip(&self, b: &mut Builder<'_>, summed: Summed<'_>, walk: &Walk) -> Result<Strip, Unsupported> {
        let dot = summed.dot;
        let other = self.graph.node(summed.product).operands[1 - summed.large];
        let lhs = (&dot.lhs_batch, &dot.lhs_contract);
        let rhs = (&dot.rhs_batch, &dot.rhs_contract);
        let (mine, its) = if summed.large == 0 { (lhs, rhs) } else { (rhs, lhs) };
        // The large operand's dimensions are at the walk's scalars, in ascending order.
        let at = |dims: &[usize], vars: &[Var], d: usize| vars[dims.iter().filter(|&&o| o < d).count()];
        let batch = mine.0.iter().zip(its.0).map(|(&d, &o)| (o, at(mine.0, &walk.batch, d)));
        let contract = mine.1.iter().zip(its.1).map(|(&d, &o)| (o, at(mine.1, &walk.steps, d)));
        let along = kept(self.graph.shape(other).len(), its.0, its.1);
        self.strip(b, other, &batch.chain(contract).collect(), &along)
    }

    /// The phase that writes a sum to memory.
    fn stored(&self, b: &mut Builder<'_>, summed: Summed<'_>, walk: &Walk, slot: u32) -> Phase {
        let (dot, ty) = (summed.dot, self.graph.ty(summed.product));
        let [lhs, rhs] = [0, 1].map(|i| self.graph.shape(self.graph.node(summed.product).operands[i]));
        let length = self.width(summed);
        let step = b.scalars.counter(Scalar::Step, length);
        let batch = if summed.large == 0 { &dot.lhs_batch } else { &dot.rhs_batch };
        let mut index: Vec<Var> = batch.iter().map(|&d| walk.batch[batch.iter().filter(|&&o| o < d).count()]).collect();
        for (i, (shape, batch, contract)) in
            [(lhs, &dot.lhs_batch, &dot.lhs_contract), (rhs, &dot.rhs_batch, &dot.rhs_contract)].into_iter().enumerate()
        {
            match i == summed.large {
                true => index.extend(&walk.rows),
                false => {
                    let free: Vec<u64> = kept(shape.len(), batch, contract).into_iter().map(|d| shape[d]).collect();
                    index.extend(b.scalars.unravel(step, &free));
                }
            }
        }
        let position = b.scalars.position(&index, &ty.shape);
        let param = b.param(Source::Value(summed.product), ty, true);
        let value = b.scalars.element(Scalar::Slot(slot, ty.dtype));
        let store = Store { param, index: position, value, guard: None, combines: None };
        Phase { length, stores: vec![store], ..Phase::default() }
    }
}

/// The indices of large values, with one row of the launch for each of their rows or, if `turned`, for each column.
fn walk(b: &mut Builder<'_>, large: &Large, turned: bool) -> Walk {
    let (own, other) = if turned { (&large.columns, &large.rows) } else { (&large.rows, &large.columns) };
    let row = b.row;
    let mut batch = b.scalars.unravel(row, &[&large.batch[..], &own[..]].concat());
    let rows = batch.split_off(large.batch.len());
    let length = other.iter().product();
    let step = b.scalars.counter(Scalar::Step, length);
    Walk { batch, rows, steps: b.scalars.unravel(step, other), step, length }
}

/// The dependence of a scalar on a slot `s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    None,
    /// The scalar is a value independent of `s`, plus this multiple of `s`.
    Moved(i32),
    /// The scalar is a value independent of `s`, times a power of `exp(s)` for a maximum, or of `s` for a sum.
    Scaled(i32),
}

/// The content of a slot: a maximum, which is subtracted, or a sum, by which values are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Most,
    Sum,
}

/// The ways in which folds of a phase scale a sum in it. They are complete only at the end of the phase.
struct Scaling {
    /// The sum by which it is divided.
    divided: Option<u32>,
    /// True if it is scaled by the running maximum.
    by_maximum: bool,
}

/// The scaling of a sum of `value` by the folds `done` of a phase, the maximum in the slot `most` among them. `None` if
/// it depends on them in another way.
fn scaling(scalars: &Scalars, value: Var, phase: &Phase, done: &[(ValueId, u32)], most: u32) -> Option<Scaling> {
    let mut divided = None;
    for &(_, other) in done {
        match depends(scalars, value, other, Slot::Sum) {
            Some(Part::None) => {}
            Some(Part::Scaled(-1)) if divided.is_none() => divided = Some(other),
            _ => return None,
        }
    }
    if divided.is_some_and(|d| !phase.folds.iter().any(|f| f.slot == d && f.dtype.is_float())) {
        return None;
    }
    match depends(scalars, value, most, Slot::Most) {
        Some(Part::None) => Some(Scaling { divided, by_maximum: false }),
        Some(Part::Scaled(-1)) => Some(Scaling { divided, by_maximum: true }),
        _ => None,
    }
}

/// The dependence of a scalar on a slot, if it has one of these forms.
fn depends(scalars: &Scalars, var: Var, slot: u32, holds: Slot) -> Option<Part> {
    let mut known: BTreeMap<Var, Option<Part>> = BTreeMap::new();
    for v in scalars.with_operands([var]) {
        let part = part_of(scalars, v, slot, holds, &known);
        known.insert(v, part);
    }
    known[&var]
}

fn part_of(scalars: &Scalars, v: Var, slot: u32, holds: Slot, known: &BTreeMap<Var, Option<Part>>) -> Option<Part> {
    use Part::{Moved, None as Free, Scaled};
    let scalar = scalars.get(v);
    let of = |v: &Var| known[v];
    let is_zero = |v: &Var| matches!(scalars.get(*v), Scalar::Number(bits, _) if f64::from_bits(*bits) == 0.0);
    let normal = |part: Part| match part {
        Moved(0) | Scaled(0) => Free,
        part => part,
    };
    if let Scalar::Slot(s, _) = scalar {
        return Some(match holds {
            _ if *s != slot => Free,
            Slot::Most => Moved(1),
            Slot::Sum => Scaled(1),
        });
    }
    if scalar.operands().iter().all(|o| known[o] == Some(Free)) {
        return Some(Free);
    }
    let moved = |v: &Var| match of(v)? {
        Moved(n) => Some(n),
        Free => Some(0),
        Scaled(_) => None,
    };
    let scaled = |v: &Var| match of(v)? {
        Scaled(n) => Some(n),
        Free => Some(0),
        Moved(_) => None,
    };
    match scalar {
        Scalar::Unary(Unary::Exponential, _, a) => moved(a).map(|n| normal(Scaled(n))),
        Scalar::Unary(Unary::Negate, _, a) => match of(a)? {
            Moved(n) => Some(Moved(-n)),
            part => Some(part),
        },
        Scalar::Unary(Unary::StopGradient, _, a) => of(a),
        Scalar::Convert { from, to, value } if from.is_float() && to.is_float() => of(value),
        Scalar::Binary(Binary::Multiply, d, a, b) if d.is_float() => Some(normal(Scaled(scaled(a)? + scaled(b)?))),
        Scalar::Binary(Binary::Divide, d, a, b) if d.is_float() => Some(normal(Scaled(scaled(a)? - scaled(b)?))),
        Scalar::Binary(op @ (Binary::Add | Binary::Subtract), d, a, b) if d.is_float() => {
            let sign = if *op == Binary::Add { 1 } else { -1 };
            match (of(a)?, of(b)?) {
                (Scaled(a), Scaled(b)) if a == b => Some(Scaled(a)),
                _ => Some(normal(Moved(moved(a)? + sign * moved(b)?))),
            }
        }
        Scalar::Select(_, [p, a, b]) if of(p) == Some(Free) => match (of(a)?, of(b)?) {
            (x, y) if x == y => Some(x),
            (Scaled(n), Free) if is_zero(b) => Some(Scaled(n)),
            (Free, Scaled(n)) if is_zero(a) => Some(Scaled(n)),
            _ => None,
        },
        _ => None,
    }
}
