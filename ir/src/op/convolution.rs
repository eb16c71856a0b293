//! Convolution: strided, padded, dilated, grouped, over any number of spatial dimensions.
//!
//! Both gradients are convolutions: a transposed one for the operand, and one with the cotangent as its window for the
//! kernel. So training needs no other op. If a spatial dimension is split, devices exchange edges with their
//! neighbours.

use super::elementwise::sum_of_products;
use super::window::{WindowDim, window_factors};
use super::*;
use crate::rule::{FactorKind, Window};
use crate::tensor::for_each_index;

/// The positions of batch, feature and spatial dimensions in the operand or the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDims {
    pub batch: usize,
    pub feature: usize,
    pub spatial: Vec<usize>,
}

/// The positions of feature and spatial dimensions in the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelDims {
    pub input: usize,
    pub output: usize,
    pub spatial: Vec<usize>,
}

/// `convolution(lhs, rhs)`. With `feature_groups`, the features of lhs and result are divided into that many groups,
/// and each group of the result sees its own group of lhs. `batch_groups` divides the batch of lhs instead. The window
/// has an entry for each spatial dimension, with the kernel's size. Padding is zeros.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Convolution {
    pub lhs: ImageDims,
    pub rhs: KernelDims,
    pub result: ImageDims,
    pub window: Vec<WindowDim>,
    pub feature_groups: u64,
    pub batch_groups: u64,
}

/// The factors of a convolution.
struct Factors {
    rule: ShardingRule,
    /// The factors of the result's and of the kernel's dimension, for each spatial dimension.
    spatial: Vec<(u8, u8)>,
}

impl ImageDims {
    fn all(&self) -> Vec<usize> {
        [&[self.batch, self.feature], self.spatial.as_slice()].concat()
    }
}

impl KernelDims {
    fn all(&self) -> Vec<usize> {
        [&[self.input, self.output], self.spatial.as_slice()].concat()
    }
}

/// The largest number of results gathered at once when a convolution runs as matrix products.
pub const GATHERED_ROWS: u64 = 256;

/// The approximate number of elements gathered at once for each of these results.
const GATHERED_COLUMNS: u64 = 1024;

impl Convolution {
    /// The workspace in elements of a float convolution that runs as matrix products, beside its operands and its
    /// result. It consists of a tile of gathered inputs, the kernel, and a tile of results. It is zero if each group
    /// has one input and one output, which leaves nothing to multiply. `rhs` and `result` are shapes.
    pub fn workspace(&self, rhs: &[u64], result: &[u64]) -> [u64; 3] {
        let groups = self.feature_groups.max(self.batch_groups);
        let (inputs, outputs) = (rhs[self.rhs.input], rhs[self.rhs.output] / groups.max(1));
        if inputs == 1 && outputs == 1 && groups > 1 {
            return [0; 3];
        }
        let positions: u64 = self.window.iter().map(WindowDim::positions_of_a_result).product();
        let rows = GATHERED_ROWS.min(result.iter().product::<u64>() / (groups * outputs).max(1));
        let at_once = Convolution::gathered_positions(inputs).min(positions);
        [rows * at_once * inputs, positions * inputs * outputs, rows * outputs]
    }

    /// The number of window positions gathered at once for this many inputs.
    pub fn gathered_positions(inputs: u64) -> u64 {
        (GATHERED_COLUMNS / inputs.max(1)).max(1)
    }

    fn factors(&self, lhs: &[u64], rhs: &[u64], result: &[u64]) -> Factors {
        let mut rule = ShardingRule { linear: vec![vec![0], vec![1]], ..Default::default() };
        let mut left = vec![Vec::new(); lhs.len()];
        let mut right = vec![Vec::new(); rhs.len()];
        let mut to = vec![Vec::new(); result.len()];
        let batch = rule.factor(result[self.result.batch], FactorKind::Parallel);
        let input = rule.factor(rhs[self.rhs.input], FactorKind::Reduction(Reducer::Sum));
        let groups = self.feature_groups.max(self.batch_groups).max(1);
        let output = rule.factor(rhs[self.rhs.output] / groups, FactorKind::Parallel);
        left[self.lhs.batch] = vec![batch];
        left[self.lhs.feature] = vec![input];
        right[self.rhs.input] = vec![input];
        right[self.rhs.output] = vec![output];
        to[self.result.batch] = vec![batch];
        to[self.result.feature] = vec![output];
        if groups > 1 {
            let group = rule.factor(groups, FactorKind::Parallel);
            let of_lhs = if self.feature_groups > 1 { self.lhs.feature } else { self.lhs.batch };
            left[of_lhs].insert(0, group);
            right[self.rhs.output].insert(0, group);
            to[self.result.feature].insert(0, group);
        }
        let mut spatial = Vec::new();
        for (i, window) in self.window.iter().enumerate() {
            let (l, r, t) = (self.lhs.spatial[i], self.rhs.spatial[i], self.result.spatial[i]);
            let (operand, follower) = window_factors(&mut rule, window, lhs[l], result[t]);
            let sums = window.size > 1 && window.follows_window(lhs[l]);
            let kind = if sums { FactorKind::Reduction(Reducer::Sum) } else { FactorKind::Whole };
            let kernel = rule.factor(rhs[r], kind);
            if sums {
                match rule.windows.iter_mut().find(|w| w.factor == operand) {
                    Some(window) => window.followers.push(kernel),
                    None => rule.windows.push(Window { factor: operand, followers: vec![kernel] }),
                }
            }
            left[l] = vec![operand];
            right[r] = vec![kernel];
            to[t] = vec![follower];
            spatial.push((follower, kernel));
        }
        rule.operands = vec![left, right];
        rule.result = to;
        Factors { rule, spatial }
    }

    /// The cotangent of lhs: a convolution of the result's cotangent, dilated by the stride, with the reversed kernel.
    fn gradient_of_lhs(&self, graph: &mut Graph, lhs: ValueId, rhs: ValueId, g: ValueId) -> ValueId {
        let groups = self.feature_groups.max(self.batch_groups);
        let (lhs_shape, result_shape) = (graph.shape(lhs).to_vec(), graph.shape(g).to_vec());
        // Each group's kernel now maps its outputs to its inputs, so the groups belong to the inputs.
        let kernel = move_groups(graph, rhs, self.rhs.output, self.rhs.input, groups);
        let dims = KernelDims { input: self.rhs.output, output: self.rhs.input, spatial: self.rhs.spatial.clone() };
        let window = self.window.iter().enumerate();
        let back = Convolution {
            lhs: self.result.clone(),
            rhs: dims,
            result: self.lhs.clone(),
            window: window
                .map(|(i, w)| w.transposed(lhs_shape[self.lhs.spatial[i]], result_shape[self.result.spatial[i]]))
                .collect(),
            feature_groups: groups,
            batch_groups: 1,
        };
        let dx = graph.emit(Op::Convolution(back), &[g, kernel]);
        // Groups of the batch come out as groups of features.
        move_groups(graph, dx, self.lhs.feature, self.lhs.batch, self.batch_groups)
    }

    /// The cotangent of rhs: a convolution of lhs, with batch and features exchanged. Its window is the result's
    /// cotangent.
    fn gradient_of_rhs(&self, graph: &mut Graph, lhs: ValueId, rhs: ValueId, g: ValueId) -> ValueId {
        let (lhs_shape, result_shape) = (graph.shape(lhs).to_vec(), graph.shape(g).to_vec());
        if result_shape.contains(&0) {
            return graph.splat_like(rhs, 0.0);
        }
        let exchange =
            |dims: &ImageDims| ImageDims { batch: dims.feature, feature: dims.batch, spatial: dims.spatial.clone() };
        let window = self.window.iter().enumerate();
        let back = Convolution {
            lhs: exchange(&self.lhs),
            rhs: KernelDims {
                input: self.result.batch,
                output: self.result.feature,
                spatial: self.result.spatial.clone(),
            },
            result: ImageDims { batch: self.rhs.input, feature: self.rhs.output, spatial: self.rhs.spatial.clone() },
            window: window
                .map(|(i, w)| w.exchanged(lhs_shape[self.lhs.spatial[i]], result_shape[self.result.spatial[i]]))
                .collect(),
            feature_groups: self.batch_groups,
            batch_groups: self.feature_groups,
        };
        let dw = graph.emit(Op::Convolution(back), &[lhs, g]);
        debug_assert_eq!(graph.shape(dw), graph.shape(rhs));
        let reversed: Vec<usize> =
            self.rhs.spatial.iter().zip(&self.window).filter(|(_, w)| w.reversed).map(|(&d, _)| d).collect();
        if reversed.is_empty() { dw } else { graph.emit(Op::Reverse(Reverse { dims: reversed }), &[dw]) }
    }
}

/// Moves the major factor `groups` of dimension `from` to become the major factor of dimension `to`.
fn move_groups(graph: &mut Graph, x: ValueId, from: usize, to: usize, groups: u64) -> ValueId {
    if groups <= 1 {
        return x;
    }
    let mut shape = graph.shape(x).to_vec();
    shape[from] /= groups;
    let mut moved = shape.clone();
    moved[to] *= groups;
    shape.insert(from, groups);
    let split = graph.reshape(x, &shape);
    let mut order: Vec<usize> = (0..shape.len()).filter(|&d| d != from).collect();
    order.insert(to, from);
    let transposed = graph.transpose(split, &order);
    graph.reshape(transposed, &moved)
}

impl Operator for Convolution {
    fn infer(&self, operands: &[&TensorType]) -> Result<TensorType, ShapeError> {
        expect_operands(operands, 2)?;
        let (lhs, rhs) = (operands[0], operands[1]);
        let rank = self.window.len() + 2;
        for (ty, dims) in [(lhs, self.lhs.all()), (rhs, self.rhs.all()), (lhs, self.result.all())] {
            if ty.rank() != rank || dims.len() != rank {
                return Err(ShapeError::Attribute("lhs, rhs and result must have two dimensions more than the window"));
            }
            expect_dims(&dims, rank)?;
        }
        if lhs.dtype != rhs.dtype {
            return Err(ShapeError::DTypesDiffer { left: lhs.dtype, right: rhs.dtype });
        }
        let (features, batch) = (lhs.shape[self.lhs.feature], lhs.shape[self.lhs.batch]);
        let (inputs, outputs) = (rhs.shape[self.rhs.input], rhs.shape[self.rhs.output]);
        let groups = self.feature_groups.max(self.batch_groups);
        if self.feature_groups == 0 || self.batch_groups == 0 || self.feature_groups > 1 && self.batch_groups > 1 {
            return Err(ShapeError::Attribute("there must be groups, and only features or the batch may have several"));
        }
        if !batch.is_multiple_of(self.batch_groups) || !outputs.is_multiple_of(groups) {
            return Err(ShapeError::Attribute("groups must divide the batch and the output features"));
        }
        if inputs.checked_mul(self.feature_groups) != Some(features) {
            return Err(ShapeError::SizesDiffer { what: "features of lhs and rhs", left: features, right: inputs });
        }
        let mut shape = vec![0; rank];
        shape[self.result.batch] = batch / self.batch_groups;
        shape[self.result.feature] = outputs;
        for (i, window) in self.window.iter().enumerate() {
            let size = rhs.shape[self.rhs.spatial[i]];
            if size != window.size {
                return Err(ShapeError::SizesDiffer { what: "window and kernel", left: window.size, right: size });
            }
            shape[self.result.spatial[i]] = window.result_size(lhs.shape[self.lhs.spatial[i]])?;
        }
        Ok(lhs.with_shape(shape))
    }

    fn rule(&self, operands: &[&TensorType], result: &TensorType) -> ShardingRule {
        self.factors(&operands[0].shape, &operands[1].shape, &result.shape).rule
    }

    fn resized(&self, operands: &[&[u64]], result: &[u64]) -> Op {
        let mut op = self.clone();
        let (lhs, rhs) = (operands[0], operands[1]);
        if self.feature_groups > 1 {
            op.feature_groups = lhs[self.lhs.feature] / rhs[self.rhs.input].max(1);
        }
        if self.batch_groups > 1 {
            op.batch_groups = lhs[self.lhs.batch] / result[self.result.batch].max(1);
        }
        for (window, &d) in op.window.iter_mut().zip(&self.rhs.spatial) {
            window.size = rhs[d];
        }
        Op::Convolution(op)
    }

    fn local(&self, cx: &mut Local<'_>) -> ValueId {
        let [lhs, rhs] = [0, 1].map(|i| cx.operand_types[i].shape.clone());
        let mut global_result = vec![0; self.window.len() + 2];
        for (i, window) in self.window.iter().enumerate() {
            global_result[self.result.spatial[i]] = window.result_size(lhs[self.lhs.spatial[i]]).unwrap_or(0);
        }
        global_result[self.result.batch] = lhs[self.lhs.batch] / self.batch_groups;
        global_result[self.result.feature] = rhs[self.rhs.output];
        let factors = self.factors(&lhs, &rhs, &global_result);
        let mut op = {
            let shapes: Vec<&[u64]> = cx.operands.iter().map(|&v| cx.graph.shape(v)).collect();
            match self.resized(&shapes, &cx.result_shape) {
                Op::Convolution(op) => op,
                other => unreachable!("a convolution was resized to {other:?}"),
            }
        };
        for (i, &(result, kernel)) in factors.spatial.iter().enumerate() {
            let axes = [result, kernel].map(|f| cx.factor_axes[f as usize].clone());
            let axes = if axes[0].is_empty() { &axes[1] } else { &axes[0] };
            if !axes.is_empty() && !self.window[i].is_one() {
                let result = cx.result_shape[self.result.spatial[i]];
                op.window[i] = cx.with_halo(self.lhs.spatial[i], axes, &op.window[i], result, Reducer::Sum);
            }
        }
        cx.graph.emit(Op::Convolution(op), &cx.operands)
    }

    fn gradient(&self, cx: &mut Gradient<'_>) -> Vec<Option<ValueId>> {
        let (lhs, rhs, g) = (cx.operands[0], cx.operands[1], cx.cotangent);
        let d_lhs = cx.wanted[0].then(|| self.gradient_of_lhs(cx.graph, lhs, rhs, g));
        let d_rhs = cx.wanted[1].then(|| self.gradient_of_rhs(cx.graph, lhs, rhs, g));
        vec![d_lhs, d_rhs]
    }

    fn eval(&self, operands: &[&Tensor], result: &TensorType) -> Tensor {
        let (lhs, rhs) = (operands[0], operands[1]);
        let inputs = rhs.shape()[self.rhs.input];
        let groups = self.feature_groups.max(self.batch_groups);
        let outputs = rhs.shape()[self.rhs.output] / groups;
        let batch = result.shape[self.result.batch];
        let window: Vec<u64> = self.window.iter().map(|w| w.size).collect();
        let (mut from, mut with) = (vec![0; lhs.ty.rank()], vec![0; rhs.ty.rank()]);
        let mut pairs = Vec::new();
        Tensor::from_fn(result.clone(), |to| {
            let output = to[self.result.feature];
            let group = output / outputs.max(1);
            with[self.rhs.output] = output;
            from[self.lhs.batch] = to[self.result.batch] + if self.batch_groups > 1 { group * batch } else { 0 };
            let first = if self.feature_groups > 1 { group * inputs } else { 0 };
            pairs.clear();
            for_each_index(&window, |k| {
                for (i, w) in self.window.iter().enumerate() {
                    let n = lhs.shape()[self.lhs.spatial[i]];
                    match w.source(to[self.result.spatial[i]], k[i], n) {
                        Some(at) => from[self.lhs.spatial[i]] = at,
                        None => return,
                    }
                    with[self.rhs.spatial[i]] = k[i];
                }
                for input in 0..inputs {
                    from[self.lhs.feature] = first + input;
                    with[self.rhs.input] = input;
                    pairs.push((lhs.at(&from), rhs.at(&with)));
                }
            });
            sum_of_products(pairs.iter().copied(), result.dtype)
        })
    }

    /// Counts a multiplication and an addition per term, without terms that meet the zeros of a dilation.
    fn flop(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        let rhs = &operands[1].shape;
        let terms = self.window.iter().fold(rhs[self.rhs.input], |n, w| n.saturating_mul(w.size));
        let zeros = self.window.iter().fold(1u64, |n, w| n.saturating_mul(w.base_dilation));
        (terms.saturating_mul(result.elements()) / zeros.max(1)).saturating_mul(2)
    }

    /// Counts all places of the window, also those that meet zeros.
    fn work(&self, operands: &[&TensorType], result: &TensorType) -> u64 {
        let inputs = operands[1].shape[self.rhs.input].max(1);
        let terms = self.window.iter().fold(inputs.saturating_mul(2), |n, w| n.saturating_mul(w.size));
        moved(operands, result).saturating_add(terms.saturating_mul(result.elements()))
    }
}
