//! Compares loop programs with the reference semantics of their nodes.

use altiplano_ir::autodiff::differentiate;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::run_all;
use altiplano_ir::kernels::{KernelKind, kernels};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::*;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use altiplano_runtime::loops::interpret::{Memory, run};
use altiplano_runtime::loops::{Source, launches};
use std::collections::BTreeSet;

fn input(g: &mut Graph, dtype: DType, shape: &[u64]) -> ValueId {
    let name = format!("x{}", g.len());
    g.emit(Op::Input(Input { name, ty: TensorType::new(dtype, shape) }), &[])
}

fn values(ty: &TensorType, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    Tensor::from_fn(ty.clone(), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let unit = (state >> 40) as f64 / (1u64 << 24) as f64;
        match ty.dtype {
            DType::Bool => f64::from(u8::from(unit > 0.5)),
            d if d.is_integer() => (unit * 4.0).floor(),
            _ => 0.25 + unit,
        }
    })
}

/// Runs the launches of every kernel that has some, on synthetic operands. Returns the number of kernels compared.
fn check(graph: &Graph, written: &[ValueId]) -> usize {
    let written: BTreeSet<ValueId> = written.iter().copied().collect();
    let mut compared = 0;
    for kernel in kernels(graph, &written, false) {
        let grouped = matches!(graph.node(kernel.nodes[0]).op, Op::GroupedDot(_) | Op::GroupedOuter(_));
        if !grouped && !matches!(kernel.kind, KernelKind::Fused { .. } | KernelKind::Indexed | KernelKind::Sort { .. })
        {
            continue;
        }
        let made = launches(graph, &kernel).unwrap_or_else(|why| panic!("{why}"));
        let (part, map) = kernel.part(graph);
        let given = |v: ValueId| values(part.ty(v), u64::from(v.0) + 1);
        let expected = run_all(&part, given);
        let mut memory = Memory::new();
        for (&v, &here) in &map {
            if part.node(here).op.is_leaf() {
                memory.insert(Source::Value(v), given(here).data);
            }
            if let Op::Constant(literal) = &graph.node(v).op {
                memory.insert(Source::Constant(v), literal.to_tensor().data);
            }
        }
        for launch in &made {
            assert!(launch.coordinates.is_empty());
            run(launch, &[], &mut memory);
        }
        for &w in &kernel.writes {
            let (expected, got) = (&expected[map[&w].index()].data, &memory[&Source::Value(w)]);
            let near = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-9 * a.abs().max(1.0);
            let wrong = expected.iter().zip(got).position(|(&a, &b)| !near(a, b));
            if let Some(at) = wrong {
                panic!(
                    "{w} = {} [{at}]: {} expected, {} found\n{made:#?}",
                    graph.node(w).op.name(),
                    expected[at],
                    got[at]
                );
            }
            assert_eq!(expected.len(), got.len());
        }
        compared += 1;
    }
    compared
}

fn softmax(g: &mut Graph, x: ValueId) -> ValueId {
    let shape = g.shape(x).to_vec();
    let kept: Vec<usize> = (0..shape.len() - 1).collect();
    let most = g.reduce(x, Reducer::Max, &[shape.len() - 1]);
    let most = g.broadcast(most, &shape, &kept);
    let shifted = g.sub(x, most);
    let exponential = g.unary(Unary::Exponential, shifted);
    let sum = g.reduce(exponential, Reducer::Sum, &[shape.len() - 1]);
    let sum = g.broadcast(sum, &shape, &kept);
    g.div(exponential, sum)
}

#[test]
fn rows_are_one_launch() {
    let mut g = Graph::new("softmax");
    let x = input(&mut g, DType::F32, &[3, 5, 40]);
    let y = softmax(&mut g, x);
    let flat = g.emit(Op::Reshape(Reshape { shape: vec![15, 40] }), &[y]);
    let written: BTreeSet<ValueId> = [flat].into();
    let all = kernels(&g, &written, false);
    assert_eq!(all.len(), 1);
    let made = launches(&g, &all[0]).expect("a loop program");
    assert_eq!(made.len(), 1, "{made:#?}");
    // Two reductions, the second of a function of the first, and the store.
    assert_eq!(made[0].phases.len(), 3);
    assert_eq!(check(&g, &[flat]), 1);
}

/// Values written along rows that are longer than the rows.
#[test]
fn rows_that_are_padded() {
    let mut g = Graph::new("padded");
    let x = input(&mut g, DType::F32, &[4, 1, 16]);
    let y = softmax(&mut g, x);
    let zero = g.constant(Literal::splat(TensorType::scalar(DType::F32), -1.0));
    let pad = Pad { low: vec![0, 1, 0], high: vec![0, 3, 0], interior: vec![0, 0, 0] };
    let padded = g.emit(Op::Pad(pad), &[y, zero]);
    assert_eq!(check(&g, &[padded]), 1);
}

/// A layer norm with its gradients: row reductions, and column reductions that depend on them.
#[test]
fn reductions_of_rows_and_columns() {
    let mut g = Graph::new("norm");
    let (x, cotangent) = (input(&mut g, DType::F32, &[4, 6, 48]), input(&mut g, DType::F32, &[4, 6, 48]));
    let gain = input(&mut g, DType::F32, &[48]);
    let shape = [4, 6, 48];
    let mean = |g: &mut Graph, x: ValueId| {
        let sum = g.reduce(x, Reducer::Sum, &[2]);
        let scale = g.splat_like(sum, 1.0 / 48.0);
        let mean = g.mul(sum, scale);
        g.broadcast(mean, &shape, &[0, 1])
    };
    let average = mean(&mut g, x);
    let centered = g.sub(x, average);
    let square = g.mul(centered, centered);
    let variance = mean(&mut g, square);
    let scale = g.unary(Unary::Rsqrt, variance);
    let normal = g.mul(centered, scale);
    let wide = g.broadcast(gain, &shape, &[2]);
    let y = g.mul(normal, wide);
    let each = g.mul(cotangent, normal);
    let of_gain = g.reduce(each, Reducer::Sum, &[0, 1]);
    let of_bias = g.reduce(cotangent, Reducer::Sum, &[0, 1]);
    assert!(check(&g, &[y, of_gain, of_bias]) >= 1);
}

/// Every view and every op that permutes elements, with fused ops before and after.
#[test]
fn views_are_arithmetic_on_indices() {
    let mut g = Graph::new("views");
    let x = input(&mut g, DType::F32, &[4, 6, 10]);
    let e = g.unary(Unary::Exponential, x);
    let turned = g.emit(Op::Transpose(Transpose { permutation: vec![2, 0, 1] }), &[e]);
    let flat = g.emit(Op::Reshape(Reshape { shape: vec![5, 48] }), &[turned]);
    let cut = g.emit(Op::Slice(Slice { start: vec![1, 3], limit: vec![5, 47], stride: vec![1, 4] }), &[flat]);
    let back = g.emit(Op::Reverse(Reverse { dims: vec![1] }), &[cut]);
    let padding = g.constant(Literal::splat(TensorType::scalar(DType::F32), -3.0));
    let pad = Pad { low: vec![1, -2], high: vec![0, 3], interior: vec![1, 2] };
    let padded = g.emit(Op::Pad(pad), &[back, padding]);
    let both = g.emit(Op::Concatenate(Concatenate { dim: 0 }), &[padded, padded]);
    let third = g.unary(Unary::Negate, both);
    let all = g.emit(Op::Concatenate(Concatenate { dim: 1 }), &[both, third]);
    let count = g.emit(Op::Iota(Iota { ty: g.ty(all).clone(), dim: 1 }), &[]);
    let sum = g.add(all, count);
    let table: Vec<f64> = (0..g.ty(sum).elements()).map(|i| i as f64 / 7.0).collect();
    let table = g.constant(Literal::dense(g.ty(sum).clone(), table));
    let sum = g.mul(sum, table);
    assert_eq!(check(&g, &[sum, cut, padded]), 1);
}

#[test]
fn lookups_and_scatters() {
    for out_of_bounds in [OutOfBounds::Clamp, OutOfBounds::Zero] {
        let mut g = Graph::new("lookup");
        let table = input(&mut g, DType::F32, &[3, 8]);
        let rows = input(&mut g, DType::I32, &[2, 5, 1]);
        let dims = GatherDims::rows(&[3, 8], 2);
        let found = g.emit(Op::Gather(Gather { dims: dims.clone(), out_of_bounds }), &[table, rows]);
        let scaled = g.mul(found, found);
        let back = g.emit(Op::ScatterAdd(ScatterAdd { dims, shape: vec![3, 8] }), &[rows, scaled]);
        assert_eq!(check(&g, &[scaled, back]), 3);
    }
}

#[test]
fn grouped_products() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let mut g = Graph::new("grouped");
        let x = input(&mut g, dtype, &[2, 5, 4]);
        let y = input(&mut g, dtype, &[2, 5, 6]);
        let group = input(&mut g, DType::I64, &[2, 5]);
        let mut made = Vec::new();
        // Some rows have a group without a matrix.
        for (contract, shape) in [(1, [3, 4, 6]), (2, [3, 6, 4])] {
            let w = input(&mut g, dtype, &shape);
            made.push(g.emit(Op::GroupedDot(GroupedDot { contract, of: None }), &[x, w, group]));
        }
        made.push(g.emit(Op::GroupedOuter(GroupedOuter { groups: 3, of: None }), &[x, y, group]));
        assert_eq!(check(&g, &made), 3);
    }
}

/// Updates that collide, in overlapping windows, some of which are out of bounds.
#[test]
fn scatters_that_replace_and_combine() {
    for combine in Combine::ALL {
        for dtype in [DType::F32, DType::BF16, DType::I32, DType::Bool] {
            let mut g = Graph::new("scatter");
            let table = input(&mut g, dtype, &[3, 5]);
            let indices = input(&mut g, DType::I32, &[4, 2]);
            let updates = input(&mut g, dtype, &[2, 4]);
            let dims = GatherDims {
                offset_dims: vec![0],
                collapsed_slice_dims: vec![0],
                operand_batching_dims: Vec::new(),
                indices_batching_dims: Vec::new(),
                start_index_map: vec![0, 1],
                index_vector_dim: 1,
                slice_sizes: vec![1, 2],
            };
            let back = g.emit(Op::Scatter(Scatter { dims, combine }), &[table, indices, updates]);
            assert_eq!(check(&g, &[back]), 1);
        }
    }
}

#[test]
fn windows() {
    let one = WindowDim::one();
    let sliding = |size, stride, pad_low, pad_high, base_dilation, window_dilation| WindowDim {
        size,
        stride,
        pad_low,
        pad_high,
        base_dilation,
        window_dilation,
        reversed: false,
    };
    for reducer in [Reducer::Max, Reducer::Sum] {
        let mut g = Graph::new("pool");
        let x = input(&mut g, DType::F32, &[2, 7, 9, 3]);
        let window = vec![one, sliding(3, 2, 1, 1, 1, 1), sliding(2, 1, 0, 2, 2, 2), one];
        let y = g.emit(Op::ReduceWindow(ReduceWindow { reducer, window }), &[x]);
        assert_eq!(check(&g, &[y]), 1);
    }
}

/// The selected positions of maxima, with overlapping windows and ties.
#[test]
fn gradients_of_pooling() {
    for select in [Extremum::Max, Extremum::Min] {
        let sliding = |size, stride, pad_low, pad_high| WindowDim {
            size,
            stride,
            pad_low,
            pad_high,
            base_dilation: 1,
            window_dilation: 1,
            reversed: false,
        };
        let window = vec![WindowDim::one(), sliding(3, 2, 1, 1), sliding(2, 1, 0, 1)];
        let mut g = Graph::new("pool");
        let x = input(&mut g, DType::I32, &[2, 7, 9]);
        let x = g.convert(x, DType::F32);
        let y = input(&mut g, DType::F32, &[2, 4, 9]);
        let back = g.emit(Op::SelectAndScatter(SelectAndScatter { select, window }), &[x, y]);
        assert_eq!(check(&g, &[back]), 2);
    }
}

#[test]
fn running_reductions() {
    for (dim, reverse) in [(0, false), (1, true), (2, false)] {
        let mut g = Graph::new("running");
        let x = input(&mut g, DType::F32, &[3, 4, 37]);
        let y = g.emit(Op::Cumulative(Cumulative { reducer: Reducer::Sum, dim, reverse }), &[x]);
        assert_eq!(check(&g, &[y]), 1);
    }
}

/// Sorting orders by one key and by two, with ties.
#[test]
fn orders() {
    for (dim, length) in [(1, 7), (0, 50)] {
        let mut g = Graph::new("order");
        let shape = if dim == 0 { [length, 3] } else { [3, length] };
        let (x, ties) = (input(&mut g, DType::F32, &shape), input(&mut g, DType::I32, &shape));
        let one = g.emit(Op::ArgSort(ArgSort { dim, descending: vec![true] }), &[ties]);
        let two = g.emit(Op::ArgSort(ArgSort { dim, descending: vec![false, true] }), &[ties, x]);
        let zero = g.splat_like(x, 0.0);
        let few = g.emit(Op::Binary(Binary::Divide), &[zero, zero]);
        let limit = g.splat_like(x, 2.0 / 3.0);
        let odd = g.emit(Op::Compare(Compare { direction: Direction::Gt }), &[x, limit]);
        let some = g.emit(Op::Select(Select {}), &[odd, few, x]);
        let three = g.emit(Op::ArgSort(ArgSort { dim, descending: vec![true] }), &[some]);
        assert!(check(&g, &[one, two, three, some]) >= 3);
    }
}

/// A maximum that is written in 16 bits equals its element when that is recomputed in single precision.
#[test]
fn what_is_computed_again_equals_what_was_written() {
    let mut g = Graph::new("equal");
    let (x, y) = (input(&mut g, DType::BF16, &[5, 40]), input(&mut g, DType::BF16, &[5, 40]));
    let most = input(&mut g, DType::BF16, &[5]);
    let sum = g.add(x, y);
    let wide = g.broadcast(most, &[5, 40], &[0]);
    let equal = g.emit(Op::Compare(Compare { direction: Direction::Eq }), &[sum, wide]);
    let is_it = g.convert(equal, DType::F32);
    let count = g.reduce(is_it, Reducer::Sum, &[1]);
    let kernel = &kernels(&g, &[count].into(), false)[0];
    // Sums need more bits than bf16 has.
    let part = |seed: u64| -> Vec<f64> {
        (0..200u64).map(|i| DType::BF16.round(((i * 37 + seed) % 101) as f64 / 8.0 + seed as f64 / 512.0)).collect()
    };
    let (a, b) = (part(3), part(70).iter().map(|y| y / 32.0).collect::<Vec<f64>>());
    let most_of = |(a, b): (&[f64], &[f64])| a.iter().zip(b).map(|(x, y)| x + y).fold(f64::MIN, f64::max);
    let exact: Vec<f64> = a.chunks(40).zip(b.chunks(40)).map(most_of).collect();
    let written: Vec<f64> = exact.iter().map(|&m| DType::BF16.round(m)).collect();
    assert_ne!(exact, written, "no maximum is rounded");
    let mut memory: Memory =
        [(Source::Value(x), a), (Source::Value(y), b), (Source::Value(most), written)].into_iter().collect();
    launches(&g, kernel).expect("a loop program").iter().for_each(|launch| run(launch, &[], &mut memory));
    let found = &memory[&Source::Value(count)];
    assert!(found.iter().all(|&n| n >= 1.0), "{found:?}");
}

/// Random bits, conversions, integers and booleans.
#[test]
fn elements_of_all_kinds() {
    let mut g = Graph::new("elements");
    let words: Vec<ValueId> = (0..4).map(|_| input(&mut g, DType::U32, &[33])).collect();
    let bits = g.emit(Op::Threefry(Threefry { word: ThreefryWord::Xor }), &words);
    let nine = g.splat_like(bits, 9.0);
    let shifted = g.emit(Op::Binary(Binary::ShiftRightLogical), &[bits, nine]);
    let one = g.splat_like(shifted, f64::from(0x3f80_0000u32));
    let mantissa = g.emit(Op::Binary(Binary::Or), &[shifted, one]);
    let real = g.emit(Op::BitcastConvert(BitcastConvert { dtype: DType::F32 }), &[mantissa]);
    let half = g.splat_like(real, 1.5);
    let above = g.emit(Op::Compare(Compare { direction: Direction::Gt }), &[real, half]);
    let other = g.unary(Unary::Sine, real);
    let chosen = g.emit(Op::Select(Select {}), &[above, real, other]);
    let whole = g.convert(chosen, DType::I32);
    let wide = g.convert(whole, DType::I64);
    let low = g.emit(Op::ReducePrecision(ReducePrecision { exponent_bits: 8, mantissa_bits: 7 }), &[chosen]);
    assert_eq!(check(&g, &[bits, chosen, above, wide, low]), 1);
}

/// A small network and its derivative.
#[test]
fn a_network_with_its_gradients() {
    let mut g = Graph::new("network");
    let x = input(&mut g, DType::F32, &[8, 12]);
    let parameter = |g: &mut Graph, name: &str, shape: &[u64]| {
        g.emit(Op::Parameter(Parameter::new(name, TensorType::new(DType::F32, shape))), &[])
    };
    let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![0] };
    let w = parameter(&mut g, "w", &[12, 40]);
    let bias = parameter(&mut g, "b", &[40]);
    let h = g.emit(Op::DotGeneral(dot), &[x, w]);
    let wide = g.broadcast(bias, &[8, 40], &[1]);
    let h = g.add(h, wide);
    let h = g.unary(Unary::Tanh, h);
    let p = softmax(&mut g, h);
    let l = g.unary(Unary::Log, p);
    let loss = g.reduce(l, Reducer::Sum, &[0, 1]);
    g.outputs = vec![loss];
    let d = differentiate(&g, &[]).expect("differentiable");
    let gradients = g.parameters().filter_map(|(p, _)| d.contributions[p.index()].first().map(|c| c.1));
    let written: Vec<ValueId> = gradients.chain([loss]).collect();
    assert!(check(&d.graph, &written) >= 1);
}
