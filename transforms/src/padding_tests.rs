//! Padded models compute the same loss and gradients as the original, with no gradient in the padding.

use super::*;
use altiplano_ir::array;
use altiplano_ir::autodiff::differentiate;
use altiplano_ir::interpret;
use altiplano_ir::literal::Real;
use altiplano_ir::op::{DotGeneral, Gather, GatherDims, Input, Parameter};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::testing::numbers::{Rng, random};

fn parameter(graph: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    let ty = TensorType::new(DType::F32, shape);
    graph.emit(Op::Parameter(Parameter::new(name, ty)), &[])
}

fn input(graph: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
    let ty = TensorType::new(dtype, shape);
    graph.emit(Op::Input(Input { name: name.into(), ty }), &[])
}

fn matmul(graph: &mut Graph, x: ValueId, w: ValueId, by: usize) -> ValueId {
    let last = graph.shape(x).len() - 1;
    let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![last], rhs_contract: vec![by] };
    graph.emit(Op::DotGeneral(dot), &[x, w])
}

fn rows(graph: &mut Graph, table: ValueId, ids: ValueId, out_of_bounds: OutOfBounds) -> ValueId {
    let rank = graph.shape(ids).len();
    let dims = GatherDims::rows(graph.shape(table), rank);
    graph.emit(Op::Gather(Gather { dims, out_of_bounds }), &[table, ids])
}

/// The form of a model's loss.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    Composite,
    Spelled,
}

/// A transformer block with 5 heads of 4, a fused projection, 9 hidden units and 11 words.
fn transformer(loss: Loss, out_of_bounds: OutOfBounds) -> Graph {
    let g = &mut Graph::new("transformer");
    let ids = input(g, "ids", DType::I32, &[2, 3]);
    let labels = input(g, "labels", DType::I32, &[2, 3]);
    let wte = parameter(g, "wte", &[11, 20]);
    let x = rows(g, wte, ids, out_of_bounds);
    let (weight, bias) = (parameter(g, "norm.weight", &[20]), parameter(g, "norm.bias", &[20]));
    let normed = g.emit(Function::LayerNorm { eps: Real(1e-5) }.into(), &[x, weight, bias]);
    let wqkv = parameter(g, "wqkv", &[20, 60]);
    let bqkv = parameter(g, "bqkv", &[60]);
    let qkv = matmul(g, normed, wqkv, 0);
    let bias = g.broadcast(bqkv, &[2, 3, 60], &[2]);
    let qkv = g.add(qkv, bias);
    let parts: Vec<ValueId> = (0..3)
        .map(|i| {
            let (start, limit) = (vec![0, 0, 20 * i], vec![2, 3, 20 * (i + 1)]);
            let part = g.emit(Op::Slice(Slice { start, limit, stride: vec![1; 3] }), &[qkv]);
            g.reshape(part, &[2, 3, 5, 4])
        })
        .collect();
    let attended = g.emit(Function::Attention { scale: Real(0.5), causal: true, blocks: 1 }.into(), &parts);
    let attended = g.reshape(attended, &[2, 3, 20]);
    let wo = parameter(g, "wo", &[20, 20]);
    let out = matmul(g, attended, wo, 0);
    let x = g.add(x, out);
    let (up, bias) = (parameter(g, "up", &[20, 9]), parameter(g, "up.bias", &[9]));
    let hidden = matmul(g, x, up, 0);
    let bias = g.broadcast(bias, &[2, 3, 9], &[2]);
    let hidden = g.add(hidden, bias);
    let hidden = match loss {
        Loss::Composite => g.emit(Function::GeluTanh.into(), &[hidden]),
        // The logistic function of zero is not zero.
        Loss::Spelled => g.unary(Unary::Logistic, hidden),
    };
    let down = parameter(g, "down", &[9, 20]);
    let out = matmul(g, hidden, down, 0);
    let x = g.add(x, out);
    let logits = matmul(g, x, wte, 1);
    let of_labels = match loss {
        Loss::Composite => g.emit(Function::CrossEntropy { dim: 2 }.into(), &[logits, labels]),
        Loss::Spelled => {
            let greatest = g.reduce(logits, Reducer::Max, &[2]);
            let greatest = g.broadcast(greatest, &[2, 3, 11], &[0, 1]);
            let shifted = g.sub(logits, greatest);
            let exponentials = g.unary(Unary::Exponential, shifted);
            let sum = g.reduce(exponentials, Reducer::Sum, &[2]);
            let sum = g.unary(Unary::Log, sum);
            let word = g.emit(Op::Iota(Iota { ty: TensorType::new(DType::I32, [2, 3, 11]), dim: 2 }), &[]);
            let label = g.broadcast(labels, &[2, 3, 11], &[0, 1]);
            let is_label = g.compare(Direction::Eq, word, label);
            let hot = g.convert(is_label, DType::F32);
            let picked = g.mul(hot, shifted);
            let picked = g.reduce(picked, Reducer::Sum, &[2]);
            // Label smoothing involves every word.
            let all = g.reduce(shifted, Reducer::Sum, &[2]);
            let little = g.splat_like(all, 0.01);
            let all = g.mul(all, little);
            let picked = g.add(picked, all);
            g.sub(sum, picked)
        }
    };
    let loss = array::mean(g, of_labels, &[0, 1], false).unwrap();
    // A weight decay in the loss involves every element.
    let squares = g.mul(wte, wte);
    let decay = g.reduce(squares, Reducer::Sum, &[0, 1]);
    let loss = g.add(loss, decay);
    g.outputs = vec![loss];
    g.clone()
}

/// A mixture of 5 experts with 3 units each, and 7 classes.
fn others() -> Graph {
    let g = &mut Graph::new("others");
    let x = input(g, "x", DType::F32, &[4, 6]);
    let route = parameter(g, "route", &[6, 5]);
    let logits = matmul(g, x, route, 0);
    let gates = g.emit(Function::Gates { chosen: 2, normalised: true }.into(), &[logits]);
    let experts = parameter(g, "experts", &[5, 6, 3]);
    let hidden = matmul(g, x, experts, 1);
    // [4, 5, 3]
    let hidden = g.unary(Unary::Tanh, hidden);
    let out = parameter(g, "out", &[5, 3, 7]);
    let dot = DotGeneral { lhs_batch: vec![1], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![1] };
    let each = g.emit(Op::DotGeneral(dot), &[hidden, out]);
    let gates = g.transpose(gates, &[1, 0]);
    let gates = g.broadcast(gates, &[5, 4, 7], &[0, 1]);
    let gated = g.mul(gates, each);
    let y = g.reduce(gated, Reducer::Sum, &[0]);
    // A normalisation, and functions that are not smooth at zero.
    let squares = g.mul(y, y);
    let one = g.splat_like(squares, 0.5);
    let root = g.unary(Unary::Sqrt, squares);
    let root = g.add(root, one);
    let ratio = g.div(y, root);
    let inverse = g.div(one, ratio);
    let log = g.unary(Unary::LogPlusOne, squares);
    let power = g.emit(Op::Binary(Binary::Power), &[root, one]);
    let sum = [ratio, log, power, inverse].into_iter().reduce(|a, b| g.add(a, b)).unwrap();
    let greatest = g.reduce(sum, Reducer::Max, &[1]);
    let loss = g.reduce(greatest, Reducer::Sum, &[0]);
    let all = g.reduce(sum, Reducer::Sum, &[0, 1]);
    let loss = g.add(loss, all);
    g.outputs = vec![loss];
    g.clone()
}

/// The loss and the gradient of each parameter, with these parameters and inputs.
fn trained(graph: &Graph, leaf: impl Fn(&str) -> Tensor) -> (f64, BTreeMap<String, Tensor>) {
    let training = differentiate(graph, &[]).unwrap();
    let wanted: Vec<(String, ValueId)> =
        graph.parameters().filter_map(|(v, name)| Some((name.to_string(), training.cotangents[v.index()]?))).collect();
    let mut all = training.graph.clone();
    all.outputs = [graph.outputs[0]].into_iter().chain(wanted.iter().map(|w| w.1)).collect();
    let results = interpret::run(&all, |v| match &all.node(v).op {
        Op::Parameter(p) => leaf(&p.name),
        Op::Input(i) => leaf(&i.name),
        op => panic!("{op:?} is no leaf"),
    });
    let gradients = wanted.into_iter().map(|w| w.0).zip(results[1..].iter().cloned()).collect();
    (results[0].data[0], gradients)
}

/// A tensor embedded in zeros, as in the padded graph.
fn embedded(tensor: &Tensor, extents: &Extents) -> Tensor {
    let ty = tensor.ty.with_shape(extents.padded_shape());
    let mut larger = Tensor::splat(ty, 0.0);
    let mut from = 0;
    for (at, count) in extents.runs() {
        let (at, count) = (at as usize, count as usize);
        larger.data[at..at + count].copy_from_slice(&tensor.data[from..from + count]);
        from += count;
    }
    larger
}

/// Compares a padded graph with the model on random numbers.
fn assert_computes_the_same(graph: &Graph, padded: &Padded, integers: (i64, i64)) {
    assert_eq!(padded.graph.verify(), []);
    let rng = &mut Rng::new(11);
    let leaves = graph.parameters().chain(graph.inputs());
    let values: BTreeMap<&str, Tensor> =
        leaves.map(|(v, name)| (name, random(graph.ty(v), (-1.0, 1.0), integers, rng))).collect();
    let larger = |name: &str| match padded.parameters.get(name) {
        Some(extents) => embedded(&values[name], extents),
        None => values[name].clone(),
    };
    let (loss, gradients) = trained(graph, |name| values[name].clone());
    let (other, others) = trained(&padded.graph, larger);
    assert!(loss.is_finite() && (loss - other).abs() <= 1e-12 * loss.abs(), "{loss} and {other}");
    assert_eq!(gradients.len(), others.len());
    for (name, gradient) in gradients {
        let expected = match padded.parameters.get(&name) {
            Some(extents) => embedded(&gradient, extents),
            None => gradient,
        };
        // The padding must be zero too, because no gradient reaches it.
        let scale = expected.data.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        for (x, y) in expected.data.iter().zip(&others[&name].data) {
            assert!((x - y).abs() <= 1e-11 * scale, "{name}: {x} and {y}");
            assert!(*x != 0.0 || y.abs() <= 1e-14 * scale, "{name}: {y} where there is nothing");
        }
    }
}

fn extent(size: u64, padded: u64) -> Extent {
    Extent { size, padded }
}

#[test]
fn a_transformer_of_odd_sizes_becomes_even() {
    for loss in [Loss::Composite, Loss::Spelled] {
        // Some word ids lie outside the table. Their results must be the same too.
        for (out_of_bounds, integers) in [(OutOfBounds::Clamp, (0, 14)), (OutOfBounds::Zero, (-2, 14))] {
            let words = if loss == Loss::Composite { (0, 11) } else { integers };
            let graph = transformer(loss, out_of_bounds);
            let [padded] = &variants(&graph, [1, 2, 2])[..] else { panic!("one variant") };
            let shape = |name: &str| padded.parameters[name].padded_shape();
            assert_eq!(shape("wte"), [12, 20]);
            assert_eq!(padded.parameters["wqkv"].0[1], [extent(3, 3), extent(20, 24)]);
            assert_eq!(shape("bqkv"), [72]);
            assert_eq!(shape("wo"), [24, 20]);
            assert_eq!([shape("up"), shape("down")], [[20, 10], [10, 20]]);
            assert!(!padded.parameters.contains_key("norm.weight"));
            assert_computes_the_same(&graph, padded, words);
        }
    }
}

#[test]
fn experts_and_classes_become_even() {
    let graph = others();
    let variants = variants(&graph, [1, 2, 2]);
    let [padded] = &variants[..] else { panic!("one variant") };
    assert_eq!(padded.parameters["experts"].padded_shape(), [6, 6, 3]);
    assert_eq!(padded.parameters["out"].padded_shape(), [6, 3, 8]);
    assert_eq!(padded.parameters["route"].padded_shape(), [6, 6]);
    assert_computes_the_same(&graph, padded, (0, 5));
}

/// Sizes that grow slightly become multiples of all devices. Others become multiples of the devices of a node, and only
/// if nothing else divides.
#[test]
fn little_is_added() {
    let graph = transformer(Loss::Composite, OutOfBounds::Clamp);
    assert_eq!(variants(&graph, [1, 1, 1]), []);
    // For 4 devices, 5 heads would become 8 and 9 units 12, which is too much. 11 words become 12.
    let [padded] = &variants(&graph, [1, 4, 4])[..] else { panic!("one variant") };
    assert_eq!(padded.parameters.keys().collect::<Vec<_>>(), ["wte"]);
    // For 5 devices, 9 units become 10. 11 words would become 15, which is too much, and 5 heads divide already.
    let grown = |near: u64, all: u64| -> Vec<Vec<String>> {
        variants(&graph, [1, near, all]).into_iter().map(|p| p.parameters.into_keys().collect()).collect()
    };
    assert_eq!(grown(5, 5), [["down", "up", "up.bias"].map(String::from)]);
    let table = |rows: u64| {
        let g = &mut Graph::new("table");
        let ids = input(g, "ids", DType::I32, &[8]);
        let wte = parameter(g, "wte", &[rows, 4]);
        let x = rows_of(g, wte, ids);
        let loss = g.reduce(x, Reducer::Sum, &[0, 1]);
        g.outputs = vec![loss];
        let padded = variants(g, [8, 8, 64]);
        padded.iter().map(|p| p.parameters["wte"].padded_shape()[0]).collect::<Vec<_>>()
    };
    assert_eq!(table(50257), [50304]);
    // A multiple of 64 would be 2 % more, and 8 is all that one device wants.
    assert_eq!(table(2001), [2008]);
    assert!(table(1024).is_empty());
    assert!(table(1000).is_empty());
    assert!(table(12).is_empty());
}

fn rows_of(graph: &mut Graph, table: ValueId, ids: ValueId) -> ValueId {
    rows(graph, table, ids, OutOfBounds::Clamp)
}

#[test]
fn runs_cover_all_elements_in_order() {
    let extents = Extents(vec![vec![extent(2, 3)], vec![extent(3, 3), extent(2, 4)]]);
    assert_eq!((extents.shape(), extents.padded_shape()), (vec![2, 6], vec![3, 12]));
    assert_eq!(extents.positions(1), [0, 1, 4, 5, 8, 9]);
    let at: Vec<u64> = extents.runs().flat_map(|(at, count)| at..at + count).collect();
    assert_eq!(at, [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21]);
    let whole = Extents(vec![vec![extent(2, 3)], vec![extent(4, 4)]]);
    assert_eq!(whole.runs().collect::<Vec<_>>(), [(0, 4), (4, 4)]);
}
