//! Small networks of other kinds than transformers: convolutions, and a mixture of experts.

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{
    Binary, Convolution, Cumulative, Direction, DotGeneral, Function, ImageDims, Input, Iota, KernelDims, Op,
    Parameter, ReduceWindow, Reducer, Unary, WindowDim,
};
use altiplano_ir::types::TensorType;

fn input(g: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
    g.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(dtype, shape) }), &[])
}

fn parameter(g: &mut Graph, name: String, shape: &[u64]) -> ValueId {
    g.emit(Op::Parameter(Parameter::new(name, TensorType::new(DType::F32, shape))), &[])
}

fn dot(g: &mut Graph, lhs: ValueId, rhs: ValueId, batch: [&[usize]; 2], contract: [&[usize]; 2]) -> ValueId {
    let [lhs_batch, rhs_batch] = batch.map(<[usize]>::to_vec);
    let [lhs_contract, rhs_contract] = contract.map(<[usize]>::to_vec);
    g.emit(Op::DotGeneral(DotGeneral { lhs_batch, rhs_batch, lhs_contract, rhs_contract }), &[lhs, rhs])
}

/// The mean of `x` over `dims`, and the mean broadcast to the shape of `x`.
fn mean(g: &mut Graph, x: ValueId, dims: &[usize]) -> (ValueId, ValueId) {
    let shape = g.shape(x).to_vec();
    let kept: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d)).collect();
    let count: u64 = dims.iter().map(|&d| shape[d]).product();
    let sum = g.reduce(x, Reducer::Sum, dims);
    let count = g.splat_like(sum, count as f64);
    let mean = g.div(sum, count);
    (mean, g.broadcast(mean, &shape, &kept))
}

/// Exponentials over the last dimension with their sums, both in the shape of `x`.
fn exponentials(g: &mut Graph, x: ValueId) -> (ValueId, ValueId) {
    let shape = g.shape(x).to_vec();
    let last = shape.len() - 1;
    let e = g.unary(Unary::Exponential, x);
    let total = g.reduce(e, Reducer::Sum, &[last]);
    let total = g.broadcast(total, &shape, &(0..last).collect::<Vec<_>>());
    (e, total)
}

/// The mean over all rows of the negated log-probability of each row's label.
fn mean_cross_entropy(g: &mut Graph, logits: ValueId, labels: ValueId) -> ValueId {
    let shape = g.shape(logits).to_vec();
    let rows: Vec<usize> = (0..shape.len() - 1).collect();
    let (_, total) = exponentials(g, logits);
    let log = g.unary(Unary::Log, total);
    let log_probability = g.sub(logits, log);
    let classes = Iota { ty: TensorType::new(DType::I32, shape.clone()), dim: rows.len() };
    let classes = g.emit(Op::Iota(classes), &[]);
    let labels = g.broadcast(labels, &shape, &rows);
    let is_label = g.compare(Direction::Eq, classes, labels);
    let zero = g.splat_like(log_probability, 0.0);
    let picked = g.select(is_label, log_probability, zero);
    let picked = g.reduce(picked, Reducer::Sum, &[rows.len()]);
    let mean = mean(g, picked, &rows).0;
    g.unary(Unary::Negate, mean)
}

fn convolved(g: &mut Graph, x: ValueId, kernel: ValueId) -> ValueId {
    let images = || ImageDims { batch: 0, feature: 3, spatial: vec![1, 2] };
    let conv = Convolution {
        lhs: images(),
        rhs: KernelDims { output: 3, input: 2, spatial: vec![0, 1] },
        result: images(),
        feature_groups: 1,
        batch_groups: 1,
        window: vec![WindowDim { size: 3, pad_low: 1, pad_high: 1, ..WindowDim::one() }; 2],
    };
    g.emit(Op::Convolution(conv), &[x, kernel])
}

/// Normalizes each feature to mean zero and variance one over the batch and all positions, then scales it.
fn batch_norm(g: &mut Graph, x: ValueId, gain: ValueId) -> ValueId {
    let (_, center) = mean(g, x, &[0, 1, 2]);
    let centered = g.sub(x, center);
    let square = g.mul(centered, centered);
    let (_, variance) = mean(g, square, &[0, 1, 2]);
    let epsilon = g.splat_like(variance, 1e-3);
    let variance = g.add(variance, epsilon);
    let scale = g.unary(Unary::Rsqrt, variance);
    let normal = g.mul(centered, scale);
    let shape = g.shape(x).to_vec();
    let gain = g.broadcast(gain, &shape, &[3]);
    g.mul(normal, gain)
}

/// Residual blocks of 3x3 convolutions with max-pooling in between, then a mean over positions and a classifier. With
/// batch norm, the loss is no mean over samples. Batch 4.
pub fn convolutional(blocks: usize, with_batch_norm: bool) -> Graph {
    let (batch, classes) = (4u64, 6u64);
    let mut g = Graph::new("convolutional");
    let images = input(&mut g, "images", DType::F32, &[batch, 8, 8, 2]);
    let labels = input(&mut g, "labels", DType::I32, &[batch]);
    let stem = parameter(&mut g, "stem".into(), &[3, 3, 2, 4]);
    let mut x = convolved(&mut g, images, stem);
    for block in 0..blocks {
        let kernel = parameter(&mut g, format!("block{block}.kernel"), &[3, 3, 4, 4]);
        let mut y = convolved(&mut g, x, kernel);
        if with_batch_norm {
            let gain = parameter(&mut g, format!("block{block}.gain"), &[4]);
            y = batch_norm(&mut g, y, gain);
        }
        let zero = g.splat_like(y, 0.0);
        let y = g.emit(Op::Binary(Binary::Maximum), &[y, zero]);
        x = g.add(x, y);
        if block % 2 == 0 {
            // Overlapping windows, as in ResNets.
            let wide = WindowDim { size: 3, stride: 2, pad_low: 0, pad_high: 1, ..WindowDim::one() };
            let window = vec![WindowDim::one(), wide, wide, WindowDim::one()];
            x = g.emit(Op::ReduceWindow(ReduceWindow { reducer: Reducer::Max, window }), &[x]);
        }
    }
    let (pooled, _) = mean(&mut g, x, &[1, 2]);
    let head = parameter(&mut g, "head".into(), &[4, classes]);
    let logits = dot(&mut g, pooled, head, [&[], &[]], [&[1], &[0]]);
    let loss = mean_cross_entropy(&mut g, logits, labels);
    g.outputs = vec![loss];
    g
}

/// Layers in which each token goes to one of four experts. Each expert takes two tokens of a sample, counted by a
/// running sum; other tokens pass by. Batch 4.
pub fn mixture_of_experts(layers: usize) -> Graph {
    let (batch, tokens, width, experts, capacity, classes) = (4u64, 6u64, 8u64, 4u64, 2u64, 6u64);
    let mut g = Graph::new("experts");
    let mut x = input(&mut g, "x", DType::F32, &[batch, tokens, width]);
    let labels = input(&mut g, "labels", DType::I32, &[batch, tokens]);
    for layer in 0..layers {
        let weight = |g: &mut Graph, name: &str, shape: &[u64]| parameter(g, format!("h{layer}.{name}"), shape);
        let router = weight(&mut g, "router", &[width, experts]);
        let scores = dot(&mut g, x, router, [&[], &[]], [&[2], &[0]]);
        let (e, total) = exponentials(&mut g, scores);
        let gates = g.div(e, total);
        let shape = [batch, tokens, experts];
        let top = g.reduce(gates, Reducer::Max, &[2]);
        let top = g.broadcast(top, &shape, &[0, 1]);
        let chosen = g.compare(Direction::Eq, gates, top);
        let chosen = g.convert(chosen, DType::F32);
        let sum = Cumulative { reducer: Reducer::Sum, dim: 1, reverse: false };
        let place = g.emit(Op::Cumulative(sum), &[chosen]);
        let place = g.mul(place, chosen);
        // Places count from one, so zero means that the token goes elsewhere. Dimensions are [batch, token, expert,
        // place].
        let shape = [batch, tokens, experts, capacity];
        let places = g.emit(Op::Iota(Iota { ty: TensorType::new(DType::F32, shape), dim: 3 }), &[]);
        let one = g.splat_like(places, 1.0);
        let places = g.add(places, one);
        let place = g.broadcast(place, &shape, &[0, 1, 2]);
        let dispatch = g.compare(Direction::Eq, places, place);
        let dispatch = g.convert(dispatch, DType::F32);
        let inputs = dot(&mut g, dispatch, x, [&[0], &[0]], [&[1], &[1]]);
        let up = weight(&mut g, "up", &[experts, width, 2 * width]);
        let hidden = dot(&mut g, inputs, up, [&[1], &[0]], [&[3], &[1]]);
        let hidden = g.unary(Unary::Tanh, hidden);
        let down = weight(&mut g, "down", &[experts, 2 * width, width]);
        let outputs = dot(&mut g, hidden, down, [&[0], &[0]], [&[3], &[1]]);
        let gates = g.broadcast(gates, &shape, &[0, 1, 2]);
        let combine = g.mul(dispatch, gates);
        let back = dot(&mut g, combine, outputs, [&[0], &[1]], [&[2, 3], &[0, 2]]);
        x = g.add(x, back);
    }
    let head = parameter(&mut g, "head".into(), &[width, classes]);
    let logits = dot(&mut g, x, head, [&[], &[]], [&[2], &[0]]);
    let loss = mean_cross_entropy(&mut g, logits, labels);
    g.outputs = vec![loss];
    g
}

/// A perceptron of `layers` layers in which the first layer's result is added to that of every later one. Batch 4.
pub fn skipping(layers: usize) -> Graph {
    const WIDTH: u64 = 12;
    let mut g = Graph::new("skipping");
    let mut x = input(&mut g, "x", DType::F32, &[4, WIDTH]);
    let labels = input(&mut g, "labels", DType::I32, &[4]);
    let mut first = None;
    for l in 0..layers {
        let w = parameter(&mut g, format!("w{l}"), &[WIDTH, WIDTH]);
        let product = dot(&mut g, x, w, [&[], &[]], [&[1], &[0]]);
        x = g.unary(Unary::Tanh, product);
        let early = *first.get_or_insert(x);
        if early != x {
            x = g.add(x, early);
        }
    }
    let loss = mean_cross_entropy(&mut g, x, labels);
    g.outputs = vec![loss];
    g
}

/// A layer of `[8, 12, 6]` features and a cross-entropy over 24 classes. Dimension `contract` of the weight has the
/// features. Batch 8.
pub fn language_head(contract: usize) -> Graph {
    let (batch, positions, width, classes) = (8, 12, 6, 24);
    let mut g = Graph::new("head");
    let x = input(&mut g, "x", DType::F32, &[batch, positions, width]);
    let labels = input(&mut g, "labels", DType::I32, &[batch, positions]);
    let w = parameter(&mut g, "w".into(), &[width, width]);
    let head = parameter(&mut g, "head".into(), &if contract == 0 { [width, classes] } else { [classes, width] });
    let hidden = dot(&mut g, x, w, [&[], &[]], [&[2], &[0]]);
    let hidden = g.unary(Unary::Tanh, hidden);
    let logits = dot(&mut g, hidden, head, [&[], &[]], [&[2], &[contract]]);
    let losses = g.emit(Function::CrossEntropy { dim: 2 }.into(), &[logits, labels]);
    let loss = g.emit(Function::Mean { dims: vec![0, 1] }.into(), &[losses]);
    g.outputs = vec![loss];
    g
}
