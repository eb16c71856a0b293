//! Pooling: reductions over windows, and the op that carries the cotangent of a maximum back to its element.

use super::elementwise::Running;
use super::product::Factors;
use super::window::{WindowDim, window_factors};
use super::*;
use crate::rule::FactorKind;
use crate::tensor::for_each_index;

/// Combines the elements of each window. Padding and the gaps of a dilation hold the reducer's neutral element.
/// `window` has one entry for each dimension.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReduceWindow {
    pub reducer: Reducer,
    pub window: Vec<WindowDim>,
}

/// Selects an element of a window: the first in row-major order among equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extremum {
    Max,
    Min,
}

/// `select_and_scatter(operand, source)`: zeros in the shape of the operand. Each element of `source` is added at the
/// extremum of its window of the operand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SelectAndScatter {
    pub select: Extremum,
    pub window: Vec<WindowDim>,
}

impl Extremum {
    /// Returns true if `candidate` replaces `best`. A value that compares with nothing (NaN) is always replaced.
    fn replaces(self, best: f64, candidate: f64) -> bool {
        match self {
            Extremum::Max => best.partial_cmp(&candidate).is_none_or(std::cmp::Ordering::is_lt),
            Extremum::Min => best.partial_cmp(&candidate).is_none_or(std::cmp::Ordering::is_gt),
        }
    }
}

fn pooled(window: &[WindowDim], operand: &TensorType) -> Result<TensorType, ShapeError> {
    if window.len() != operand.rank() {
        return Err(ShapeError::Attribute("the window must have an entry for each dimension of the operand"));
    }
    let sizes: Result<Vec<u64>, ShapeError> =
        window.iter().zip(&operand.shape).map(|(w, &n)| w.result_size(n)).collect();
    Ok(operand.with_shape(sizes?))
}

/// The operand's elements at each window position, for all results, in row-major order of window positions. Each is a
/// strided slice of the operand padded with `neutral`.
fn positions(graph: &mut Graph, x: ValueId, window: &[WindowDim], neutral: f64, shape: &[u64]) -> Vec<ValueId> {
    let ty = graph.ty(x).clone();
    let padding = graph.constant(Literal::splat(TensorType::scalar(ty.dtype), neutral));
    let pad = Pad {
        low: window.iter().map(|w| w.pad_low).collect(),
        high: window.iter().map(|w| w.pad_high).collect(),
        interior: window.iter().map(|w| w.base_dilation - 1).collect(),
    };
    let padded = graph.emit(Op::Pad(pad), &[x, padding]);
    let sizes: Vec<u64> = window.iter().map(|w| w.size).collect();
    let mut all = Vec::new();
    for_each_index(&sizes, |k| {
        let start: Vec<u64> = k.iter().zip(window).map(|(k, w)| k * w.window_dilation).collect();
        let limit = start.iter().zip(window).zip(shape).map(|((s, w), &n)| s + (n - 1) * w.stride + 1).collect();
        let stride = window.iter().map(|w| w.stride).collect();
        all.push(graph.emit(Op::Slice(Slice { start, limit, stride }), &[padded]));
    });
    all
}

impl Operator for ReduceWindow {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 1)?;
        let dtype = operands[0].dtype;
        if matches!(self.reducer, Reducer::And | Reducer::Or) && dtype.is_float() {
            return Err(ShapeError::DType { dtype });
        }
        pooled(&self.window, operands[0])
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        let linear = if self.reducer == Reducer::Sum { vec![vec![0]] } else { Vec::new() };
        let mut rule = ShardingRule { linear, ..Default::default() };
        let mut dims = Vec::new();
        for ((window, &n), &m) in self.window.iter().zip(&operands[0].shape).zip(&result.shape) {
            let (operand, follower) = window_factors(&mut rule, window, n, m);
            dims.push(vec![operand]);
            rule.result.push(vec![follower]);
        }
        rule.operands = vec![dims];
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::ReduceWindow(self.clone())
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let shape = &cx.operand_types[0].shape;
        let global = pooled(&self.window, &cx.operand_types[0]).map_or_else(|_| shape.clone(), |ty| ty.shape);
        let rule = self.rule(&[&cx.operand_types[0].clone()], &cx.operand_types[0].with_shape(global));
        let mut op = self.clone();
        for (dim, factors) in rule.result.iter().enumerate() {
            let axes = cx.factor_axes[factors[0] as usize].clone();
            if !axes.is_empty() && !self.window[dim].is_one() {
                let result = cx.result_shape[dim];
                op.window[dim] = cx.with_halo(dim, &axes, &self.window[dim], result, self.reducer);
            }
        }
        cx.graph.emit(Op::ReduceWindow(op), &cx.operands)
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (x, g) = (cx.operands[0], cx.cotangent);
        let (from, to) = (cx.graph.shape(x).to_vec(), cx.graph.shape(g).to_vec());
        // Each element gets the cotangents of the windows that contain it.
        let spread = |graph: &mut Graph, g: ValueId| {
            let sizes = self.window.iter().zip(from.iter().zip(&to));
            let window = sizes.map(|(w, (&n, &m))| w.transposed(n, m)).collect();
            graph.emit(Op::ReduceWindow(ReduceWindow { reducer: Reducer::Sum, window }), &[g])
        };
        let dx = match self.reducer {
            Reducer::Sum => spread(cx.graph, g),
            Reducer::Product => {
                let factors = Factors::new(cx.graph, x);
                let products = cx.graph.emit(Op::ReduceWindow(self.clone()), &[factors.others]);
                let sum = ReduceWindow { reducer: Reducer::Sum, window: self.window.clone() };
                let zeros = cx.graph.emit(Op::ReduceWindow(sum), &[factors.zeros]);
                factors.cotangent(cx.graph, g, products, zeros, spread)
            }
            Reducer::Max | Reducer::Min => {
                let select = if self.reducer == Reducer::Max { Extremum::Max } else { Extremum::Min };
                let op = SelectAndScatter { select, window: self.window.clone() };
                cx.graph.emit(Op::SelectAndScatter(op), &[x, g])
            }
            Reducer::And | Reducer::Or => return vec![None],
        };
        vec![Some(dx)]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let x = operands[0];
        let sizes: Vec<u64> = self.window.iter().map(|w| w.size).collect();
        let mut from = vec![0; x.ty.rank()];
        Tensor::from_fn(result.clone(), |to| {
            let mut running = Running::new(self.reducer, result.dtype);
            for_each_index(&sizes, |k| {
                if source(&self.window, to, k, x.shape(), &mut from) {
                    running.add(x.at(&from));
                }
            });
            running.value()
        })
    }

    fn flop(&self, _: &[&TensorType], result: &TensorType) -> u64 {
        self.window.iter().fold(result.elements(), |n, w| n.saturating_mul(w.size))
    }
}

/// Sets `from` to the index of the element at window position `k` of result position `to`. Returns false for padding.
fn source(window: &[WindowDim], to: &[u64], k: &[u64], shape: &[u64], from: &mut [u64]) -> bool {
    for (d, w) in window.iter().enumerate() {
        match w.source(to[d], k[d], shape[d]) {
            Some(at) => from[d] = at,
            None => return false,
        }
    }
    true
}

impl Operator for SelectAndScatter {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        let pooled = pooled(&self.window, operands[0])?;
        if pooled.shape != operands[1].shape {
            return Err(ShapeError::ShapesDiffer { left: pooled.shape, right: operands[1].shape.clone() });
        }
        if operands[0].dtype != operands[1].dtype {
            return Err(ShapeError::DTypesDiffer { left: operands[0].dtype, right: operands[1].dtype });
        }
        Ok(operands[0].clone())
    }

    fn rule(&self, operands: &[&TensorType], _: &TensorType) -> ShardingRule {
        let mut rule = ShardingRule { linear: vec![vec![1]], ..Default::default() };
        let (mut dims, mut source) = (Vec::new(), Vec::new());
        for ((window, &n), &m) in self.window.iter().zip(&operands[0].shape).zip(&operands[1].shape) {
            let kind = if window.is_one() { FactorKind::Parallel } else { FactorKind::Whole };
            let f = rule.factor(n, kind);
            dims.push(vec![f]);
            source.push(vec![if window.is_one() { f } else { rule.factor(m, FactorKind::Whole) }]);
        }
        rule.result.clone_from(&dims);
        rule.operands = vec![dims, source];
        rule
    }

    fn resized(&self, _: &[&[u64]], _: &[u64]) -> Op {
        Op::SelectAndScatter(self.clone())
    }

    /// The cotangent of each element of `source` is the cotangent at the element that its window selected.
    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        if !cx.wanted[1] {
            return vec![None, None];
        }
        let shape = cx.graph.shape(cx.operands[1]).to_vec();
        let (reducer, keeps) = match self.select {
            Extremum::Max => (Reducer::Max, Direction::Ge),
            Extremum::Min => (Reducer::Min, Direction::Le),
        };
        let neutral = reducer.neutral(cx.graph.ty(cx.operands[0]).dtype);
        let values = positions(cx.graph, cx.operands[0], &self.window, neutral, &shape);
        let cotangents = positions(cx.graph, cx.cotangent, &self.window, 0.0, &shape);
        let (mut best, mut selected) = (values[0], cotangents[0]);
        for (&value, &cotangent) in values.iter().zip(&cotangents).skip(1) {
            let stays = cx.graph.compare(keeps, best, value);
            best = cx.graph.select(stays, best, value);
            selected = cx.graph.select(stays, selected, cotangent);
        }
        vec![None, Some(selected)]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (x, updates) = (operands[0], operands[1]);
        let sizes: Vec<u64> = self.window.iter().map(|w| w.size).collect();
        let mut scattered = Tensor::splat(result.clone(), 0.0);
        let mut from = vec![0; x.ty.rank()];
        for_each_index(updates.shape(), |to| {
            let mut best: Option<(f64, usize)> = None;
            for_each_index(&sizes, |k| {
                if source(&self.window, to, k, x.shape(), &mut from) {
                    let at = x.offset(&from);
                    if best.is_none_or(|(value, _)| self.select.replaces(value, x.data[at])) {
                        best = Some((x.data[at], at));
                    }
                }
            });
            if let Some((_, at)) = best {
                let sum = Binary::Add.apply(scattered.data[at], updates.at(to), result.dtype);
                scattered.data[at] = sum;
            }
        });
        scattered
    }

    fn flop(&self, operands: &[&TensorType], _: &TensorType) -> u64 {
        self.window.iter().fold(operands[1].elements(), |n, w| n.saturating_mul(w.size))
    }
}
