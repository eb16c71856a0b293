//! Launches of lookups, scatters, sorts, scans and windows.

use super::build::{BLOCK_ROW, Builder, Made, Stop, Unsupported, unsupported};
use super::scalar::{Scalar, Var};
use super::{Fold, Phase, Source, Spread, Store};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::kernels::Kernel;
use altiplano_ir::op::{Binary, Combine, Extremum, GatherDims, Op, Reducer, SelectAndScatter};
use altiplano_ir::types::TensorType;

impl Made<'_> {
    /// Writes to memory which element of each window is selected: the first among equal ones.
    fn selected(&mut self, v: ValueId, op: &SelectAndScatter) -> Result<(), Unsupported> {
        let graph = self.graph;
        let (operand, source) = (graph.node(v).operands[0], graph.node(v).operands[1]);
        let (ty, windows) = (graph.ty(operand), graph.ty(source));
        let sizes: Vec<u64> = op.window.iter().map(|w| w.size).collect();
        let length: u64 = sizes.iter().product();
        let mut b = Builder::new(self, windows.elements());
        let step = b.scalars.counter(Scalar::Step, length);
        let (at, inner) = (b.scalars.unravel(b.row, &windows.shape), b.scalars.unravel(step, &sizes));
        let (mut index, mut guard) = (Vec::new(), None);
        for (d, window) in op.window.iter().enumerate() {
            let (position, inside) = b.scalars.window(window, at[d], inner[d], ty.shape[d]);
            guard = b.scalars.and(guard, inside);
            index.push(position);
        }
        let value = b.guarded(guard, |b| b.element(operand, &index)).map_err(|stop| unsupported(graph, v, stop))?;
        let reducer = if op.select == Extremum::Max { Reducer::Max } else { Reducer::Min };
        let among = b.or_else(guard, value, reducer.neutral(ty.dtype), ty.dtype);
        let (most, first) = (b.next_slot(), b.next_slot());
        let extremum = b.scalars.element(Scalar::Slot(most, ty.dtype));
        let equal = b.is_equal(ty.dtype, value, extremum);
        let is_it = b.scalars.and(Some(equal), guard);
        let here = b.scalars.element(Scalar::AsElement(step, DType::I32));
        let here = b.or_else(is_it, here, length as f64, DType::I32);
        let param = b.param(Source::Selected(v), &windows.with_dtype(DType::I32), true);
        let value = b.scalars.element(Scalar::Slot(first, DType::I32));
        let store = Store { param, index: b.row, value, guard: None, combines: None };
        let folds = [
            Fold { value: among, reducer, dtype: ty.dtype, slot: most },
            Fold { value: here, reducer: Reducer::Min, dtype: DType::I32, slot: first },
        ];
        let mut phases: Vec<Phase> = folds
            .into_iter()
            .map(|fold| Phase { length, folds: vec![fold], stores: Vec::new(), ..Phase::default() })
            .collect();
        phases.push(Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() });
        self.launches.push(b.launch(Spread::Thread, phases));
        Ok(())
    }

    /// Sums, for every element, the values of the windows that selected it.
    fn spread_back(&mut self, v: ValueId, op: &SelectAndScatter) -> Result<(), Unsupported> {
        let graph = self.graph;
        let (ty, source) = (graph.ty(v), graph.node(v).operands[1]);
        let windows = graph.ty(source);
        let sizes: Vec<u64> = op.window.iter().map(|w| w.size).collect();
        let length: u64 = sizes.iter().product();
        let mut b = Builder::new(self, ty.elements());
        let step = b.scalars.counter(Scalar::Step, length);
        let (at, inner) = (b.scalars.unravel(b.row, &ty.shape), b.scalars.unravel(step, &sizes));
        let (mut index, mut guard) = (Vec::new(), None);
        for (d, window) in op.window.iter().enumerate() {
            // The window that has the element at its position `step` starts that far before it.
            let before = b.scalars.times(inner[d], -(window.window_dilation as i64));
            let low = b.scalars.index(window.pad_low);
            let start = b.scalars.add(at[d], before);
            let start = b.scalars.add(start, low);
            let (window, inside) = b.scalars.spread_out(start, window.stride, windows.shape[d]);
            guard = b.scalars.and(guard, inside);
            index.push(window);
        }
        let given = b.guarded(guard, |b| b.element(source, &index)).map_err(|stop| unsupported(graph, v, stop))?;
        let selected = b.guarded(guard, |b| b.load(Source::Selected(v), &windows.with_dtype(DType::I32), &index));
        let here = b.scalars.element(Scalar::AsElement(step, DType::I32));
        let equal = b.is_equal(DType::I32, selected, here);
        let is_it = b.scalars.and(Some(equal), guard);
        let value = b.or_else(is_it, given, 0.0, ty.dtype);
        let slot = b.next_slot();
        let fold = Fold { value, reducer: Reducer::Sum, dtype: ty.dtype, slot };
        let param = b.param(Source::Value(v), ty, true);
        let value = b.scalars.element(Scalar::Slot(slot, ty.dtype));
        let store = Store { param, index: b.row, value, guard: None, combines: None };
        let phases = vec![
            Phase { length, folds: vec![fold], stores: Vec::new(), ..Phase::default() },
            Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() },
        ];
        self.launches.push(b.launch(Spread::Thread, phases));
        self.memory.insert(v);
        Ok(())
    }

    /// Every element finds its place by counting those before it. This is more work than sorting, but takes one launch.
    pub(super) fn sorted(&mut self, v: ValueId) -> Result<(), Unsupported> {
        let graph = self.graph;
        let (node, ty) = (graph.node(v), graph.ty(v));
        let Op::ArgSort(op) = &node.op else {
            return Err(Unsupported { value: v, op: node.op.name() });
        };
        let mut b = Builder::new(self, ty.elements());
        let at = b.scalars.unravel(b.row, &ty.shape);
        let step = b.scalars.counter(Scalar::Step, ty.shape[op.dim]);
        let mut other = at.clone();
        other[op.dim] = step;
        // Among equal elements the earlier one comes first.
        let (back, last) = (b.scalars.times(step, -1), b.scalars.index(-1));
        let distance = b.scalars.add(at[op.dim], back);
        let distance = b.scalars.add(distance, last);
        let mut before = b.scalars.within(distance, ty.shape[op.dim] as i64);
        for (&key, &descending) in node.operands.iter().zip(&op.descending).rev() {
            let dtype = graph.ty(key).dtype;
            let stop = |stop| unsupported(graph, v, stop);
            let (mine, theirs) = (b.element(key, &at).map_err(stop)?, b.element(key, &other).map_err(stop)?);
            let (low, high) = if descending { (mine, theirs) } else { (theirs, mine) };
            let less = b.comes_first(dtype, low, high);
            let equal = b.is_equal(dtype, mine, theirs);
            let later = b.scalars.and(Some(equal), before);
            before = Some(match later {
                Some(later) => b.scalars.element(Scalar::Binary(Binary::Or, DType::Bool, less, later)),
                None => less,
            });
        }
        let Some(before) = before else { return self.elements(&[v]) };
        let count = b.scalars.element(Scalar::Convert { from: DType::Bool, to: DType::I32, value: before });
        let slot = b.next_slot();
        let fold = Fold { value: count, reducer: Reducer::Sum, dtype: DType::I32, slot };
        let place = b.scalars.element(Scalar::Slot(slot, DType::I32));
        let mut to = at.clone();
        to[op.dim] = b.scalars.index_of(place, DType::I32);
        let index = b.scalars.position(&to, &ty.shape);
        let value = b.scalars.element(Scalar::AsElement(at[op.dim], ty.dtype));
        let param = b.param(Source::Value(v), ty, true);
        let store = Store { param, index, value, guard: None, combines: None };
        let length = ty.shape[op.dim];
        let phases = vec![
            Phase { length, folds: vec![fold], stores: Vec::new(), ..Phase::default() },
            Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() },
        ];
        let spread = if length < BLOCK_ROW { Spread::Thread } else { Spread::Block };
        self.launches.push(b.launch(spread, phases));
        self.memory.insert(v);
        Ok(())
    }

    /// Computes each element of a grouped product by its own sum: over its terms, or over all rows, where rows of other
    /// groups contribute zero.
    pub(super) fn grouped(&mut self, v: ValueId) -> Result<(), Unsupported> {
        let graph = self.graph;
        let (node, ty) = (graph.node(v), graph.ty(v));
        let [left, right, group] = [0, 1, 2].map(|k| node.operands[k]);
        let groups = graph.ty(group).clone();
        let stop = |stop| unsupported(graph, v, stop);
        let mut b = Builder::new(self, ty.elements());
        let at = b.scalars.unravel(b.row, &ty.shape);
        let length = match &node.op {
            Op::GroupedDot(op) => graph.shape(right)[op.contract],
            _ => groups.elements(),
        };
        let step = b.scalars.counter(Scalar::Step, length);
        let (row, of_left, mut of_right, guard);
        match &node.op {
            Op::GroupedDot(op) => {
                row = at[..groups.rank()].to_vec();
                let number = b.element(group, &row).map_err(stop)?;
                let number = b.scalars.index_of(number, groups.dtype);
                guard = b.scalars.within(number, graph.shape(right)[0] as i64);
                of_left = [row.as_slice(), &[step]].concat();
                of_right = vec![number; 3];
                of_right[op.contract] = step;
                of_right[3 - op.contract] = at[groups.rank()];
            }
            _ => {
                row = b.scalars.unravel(step, &groups.shape);
                let number = b.element(group, &row).map_err(stop)?;
                let mine = b.scalars.element(Scalar::AsElement(at[0], groups.dtype));
                guard = Some(b.is_equal(groups.dtype, number, mine));
                of_left = [row.as_slice(), &[at[1]]].concat();
                of_right = [row.as_slice(), &[at[2]]].concat();
            }
        }
        // Sums are at least in single precision.
        let dtype = if ty.dtype.bytes() < DType::F32.bytes() { DType::F32 } else { ty.dtype };
        let convert = |b: &mut Builder, value, from: DType, to: DType| match from == to {
            true => value,
            false => b.scalars.element(Scalar::Convert { from, to, value }),
        };
        let mut factors = Vec::with_capacity(2);
        for (side, index) in [left, right].into_iter().zip([&of_left, &of_right]) {
            let value = b.guarded(guard, |b| b.element(side, index)).map_err(stop)?;
            factors.push(convert(&mut b, value, ty.dtype, dtype));
        }
        let product = b.scalars.element(Scalar::Binary(Binary::Multiply, dtype, factors[0], factors[1]));
        let value = b.or_else(guard, product, 0.0, dtype);
        let slot = b.next_slot();
        let fold = Fold { value, reducer: Reducer::Sum, dtype, slot };
        let sum = b.scalars.element(Scalar::Slot(slot, dtype));
        let value = convert(&mut b, sum, dtype, ty.dtype);
        let param = b.param(Source::Value(v), ty, true);
        let store = Store { param, index: b.row, value, guard: None, combines: None };
        let phases = vec![
            Phase { length, folds: vec![fold], stores: Vec::new(), ..Phase::default() },
            Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() },
        ];
        self.launches.push(b.launch(Spread::Thread, phases));
        self.memory.insert(v);
        Ok(())
    }

    pub(super) fn indexed(&mut self, kernel: &Kernel) -> Result<(), Unsupported> {
        let graph = self.graph;
        let v = kernel.nodes[0];
        let node = graph.node(v);
        match &node.op {
            Op::Gather(_) => self.elements(&[v]),
            Op::ReduceWindow(_) | Op::Cumulative(_) => self.reduction(v),
            Op::SelectAndScatter(op) if op.window.iter().all(|w| w.base_dilation == 1 && !w.reversed) => {
                self.selected(v, op)?;
                self.spread_back(v, op)
            }
            Op::ScatterAdd(op) => {
                let zero = |b: &mut Builder, dtype| Ok(b.scalars.element(Scalar::Number(0f64.to_bits(), dtype)));
                self.filled(v, Source::Value(v), graph.ty(v), |b, _| zero(b, graph.ty(v).dtype))?;
                let (indices, updates) = (node.operands[0], node.operands[1]);
                self.scattered(v, &op.dims, [indices, updates], Some(Reducer::Sum))
            }
            Op::Scatter(op) => {
                let [operand, indices, updates] = [0, 1, 2].map(|i| node.operands[i]);
                self.filled(v, Source::Value(v), graph.ty(v), |b, index| b.element(operand, index))?;
                let reducer = match op.combine {
                    Combine::Multiply => Some(Reducer::Product),
                    Combine::Minimum => Some(Reducer::Min),
                    Combine::Maximum => Some(Reducer::Max),
                    Combine::Replace => None,
                };
                if reducer.is_none() {
                    self.last_writers(v, &op.dims, [indices, updates])?;
                }
                self.scattered(v, &op.dims, [indices, updates], reducer)
            }
            op => Err(Unsupported { value: v, op: op.name() }),
        }
    }

    /// Makes a launch that writes every element of a tensor independently.
    fn filled(
        &mut self,
        v: ValueId,
        source: Source,
        ty: &TensorType,
        element: impl FnOnce(&mut Builder, &[Var]) -> Result<Var, Stop>,
    ) -> Result<(), Unsupported> {
        let mut b = Builder::new(self, ty.elements());
        let index = b.scalars.unravel(b.row, &ty.shape);
        let value = element(&mut b, &index).map_err(|stop| unsupported(self.graph, v, stop))?;
        let param = b.param(source, ty, true);
        let store = Store { param, index: b.row, value, guard: None, combines: None };
        let phase = Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() };
        self.launches.push(b.launch(Spread::Thread, vec![phase]));
        Ok(())
    }

    /// The row-major number of the index vector to which an update belongs.
    fn vector(b: &mut Builder, dims: &GatherDims, at: &[Var], updates: &[u64]) -> Var {
        let over = dims.batch_dims(updates.len());
        let index: Vec<Var> = over.iter().map(|&d| at[d]).collect();
        let shape: Vec<u64> = over.iter().map(|&d| updates[d]).collect();
        let number = b.scalars.position(&index, &shape);
        b.scalars.element(Scalar::AsElement(number, DType::I32))
    }

    /// Writes to memory, for every element, the index vector that writes it last.
    fn last_writers(&mut self, v: ValueId, dims: &GatherDims, operands: [ValueId; 2]) -> Result<(), Unsupported> {
        let graph = self.graph;
        let [indices, updates] = operands;
        let ty = graph.ty(v).with_dtype(DType::I32);
        let none = |b: &mut Builder, _: &[Var]| Ok(b.scalars.element(Scalar::Number((-1f64).to_bits(), DType::I32)));
        self.filled(v, Source::Selected(v), &ty, none)?;
        let stop = |stop| unsupported(graph, v, stop);
        let mut b = Builder::new(self, graph.ty(updates).elements());
        let at = b.scalars.unravel(b.row, graph.shape(updates));
        let (index, guard) = b.looked_up(dims, &ty.shape, indices, &at, true).map_err(stop)?;
        let value = Self::vector(&mut b, dims, &at, graph.shape(updates));
        let param = b.param(Source::Selected(v), &ty, true);
        let index = b.scalars.position(&index, &ty.shape);
        let store = Store { param, index, value, guard, combines: Some(Reducer::Max) };
        let phase = Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() };
        self.launches.push(b.launch(Spread::Thread, vec![phase]));
        Ok(())
    }

    /// Applies updates to their elements. A reducer combines them with the existing elements; without one, the last
    /// writer wins.
    fn scattered(
        &mut self,
        v: ValueId,
        dims: &GatherDims,
        operands: [ValueId; 2],
        combines: Option<Reducer>,
    ) -> Result<(), Unsupported> {
        let graph = self.graph;
        let (ty, [indices, updates]) = (graph.ty(v), operands);
        let stop = |stop| unsupported(graph, v, stop);
        let mut b = Builder::new(self, graph.ty(updates).elements());
        let at = b.scalars.unravel(b.row, graph.shape(updates));
        let (index, mut guard) = b.looked_up(dims, &ty.shape, indices, &at, true).map_err(stop)?;
        if combines.is_none() {
            let mine = Self::vector(&mut b, dims, &at, graph.shape(updates));
            let last = b.guarded(guard, |b| b.load(Source::Selected(v), &ty.with_dtype(DType::I32), &index));
            let is_last = b.is_equal(DType::I32, last, mine);
            guard = b.scalars.and(guard, Some(is_last));
        }
        let value = b.element(updates, &at).map_err(stop)?;
        let param = b.param(Source::Value(v), ty, true);
        let index = b.scalars.position(&index, &ty.shape);
        let store = Store { param, index, value, guard, combines };
        let phase = Phase { length: 1, folds: Vec::new(), stores: vec![store], ..Phase::default() };
        self.launches.push(b.launch(Spread::Thread, vec![phase]));
        self.memory.insert(v);
        Ok(())
    }
}
