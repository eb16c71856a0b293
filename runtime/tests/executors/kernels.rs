//! Compares every op's kernel with the op's reference semantics, on random shapes and values.

use crate::common::{Random, check_graph, input};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::*;
use altiplano_ir::types::TensorType;

/// Rounding error of one op on an element type.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        // The reference is rounded too, but may round to the other neighbour.
        d if d.is_float() && d.bytes() == 1 => d.float_format().map_or(0.0, |f| 0.5f64.powi(f.mantissa_bits as i32)),
        _ => 1e-6,
    }
}

/// Types for arithmetic: scales have neither zero nor negative numbers.
fn all_types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|d| *d != DType::F8E8M0FNU)
}

#[test]
fn unary_ops_on_all_types() {
    let mut random = Random(1);
    for dtype in all_types() {
        for op in Unary::ALL {
            let mut graph = Graph::new("unary");
            let x = input(&mut graph, "x", dtype, &[3, 700]);
            // The reference's f64 cannot hold the 64-bit pattern.
            if op == Unary::Not && dtype == DType::U64 {
                continue;
            }
            let Ok(y) = graph.push(Op::Unary(op), &[x]) else { continue };
            graph.outputs = vec![y];
            // Near a pole the reference value is huge, so compare elsewhere.
            let scale = if op == Unary::Tan { 50.0 } else { 2.0 };
            check_graph(&graph, &mut random, scale * tolerance(dtype), &format!("{} on {dtype}", op.name()));
        }
    }
}

#[test]
fn binary_ops_comparisons_and_selections_on_all_types() {
    let mut random = Random(2);
    for dtype in all_types() {
        let ops = Binary::ALL.map(Op::Binary).into_iter();
        let directions = [Direction::Eq, Direction::Ne, Direction::Lt, Direction::Le, Direction::Gt, Direction::Ge];
        let compares = directions.map(|direction| Op::Compare(Compare { direction })).into_iter();
        for op in ops.chain(compares) {
            let mut graph = Graph::new("binary");
            let x = input(&mut graph, "x", dtype, &[1500]);
            let y = input(&mut graph, "y", dtype, &[1500]);
            let Ok(z) = graph.push(op.clone(), &[x, y]) else { continue };
            graph.outputs = vec![z];
            check_graph(&graph, &mut random, 4.0 * tolerance(dtype), &format!("{} on {dtype}", op.name()));
        }
        let mut graph = Graph::new("select");
        let p = input(&mut graph, "p", DType::Bool, &[5, 13]);
        let x = input(&mut graph, "x", dtype, &[5, 13]);
        let y = input(&mut graph, "y", dtype, &[5, 13]);
        let z = graph.select(p, x, y);
        graph.outputs = vec![z];
        check_graph(&graph, &mut random, 0.0, &format!("select on {dtype}"));
    }
}

#[test]
fn conversions_between_all_types() {
    let mut random = Random(3);
    for from in all_types() {
        for to in all_types() {
            let mut graph = Graph::new("convert");
            let x = input(&mut graph, "x", from, &[600]);
            let y = graph.emit(Op::Convert(Convert { dtype: to }), &[x]);
            graph.outputs = vec![y];
            check_graph(&graph, &mut random, tolerance(to), &format!("{from} to {to}"));
        }
    }
}

#[test]
fn integers_wrap() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_integer() && d.bytes() <= 4) {
        let mut graph = Graph::new("wrap");
        let x = input(&mut graph, "x", dtype, &[9]);
        let big = graph.splat_like(x, (1u64 << (dtype.width() - 2)) as f64);
        let sum = graph.add(big, big);
        let sum = graph.add(sum, x);
        let product = graph.mul(sum, x);
        let negative = graph.sub(x, product);
        let square = graph.mul(sum, sum);
        graph.outputs = vec![sum, product, negative, square];
        check_graph(&graph, &mut Random(4), 0.0, &format!("wrapping {dtype}"));
    }
}

/// Sums of narrow integers wrap.
const PRODUCTS: [DType; 9] =
    [DType::F32, DType::F32, DType::BF16, DType::I32, DType::F16, DType::I64, DType::I8, DType::U4, DType::Bool];

const REDUCED: [DType; 10] = [
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F8E5M2,
    DType::I32,
    DType::U8,
    DType::I4,
    DType::I64,
    DType::U64,
    DType::Bool,
];

#[test]
fn reductions_of_all_kinds() {
    let mut random = Random(5);
    for reducer in Reducer::ALL {
        for dtype in REDUCED {
            for (shape, dims) in [
                (vec![4, 5, 6], vec![2]),
                (vec![4, 5, 6], vec![0]),
                (vec![4, 5, 6], vec![1]),
                (vec![4, 5, 6], vec![0, 2]),
                (vec![4, 5, 6], vec![0, 1, 2]),
                (vec![3, 700], vec![1]),
                (vec![3, 1300], vec![0]),
                (vec![40, 7, 3], vec![1, 2]),
                (vec![3, 0, 2], vec![1]),
                (vec![3, 1, 2], vec![1]),
                (vec![1, 600], vec![0]),
            ] {
                let mut graph = Graph::new("reduce");
                let x = input(&mut graph, "x", dtype, &shape);
                let op = Op::Reduce(Reduce { reducer, dims: dims.clone() });
                let Ok(y) = graph.push(op, &[x]) else { continue };
                graph.outputs = vec![y];
                let what = format!("{} of {dtype}{shape:?} over {dims:?}", reducer.name());
                // Results of half precision are rounded once.
                check_graph(&graph, &mut random, 2.0 * tolerance(dtype), &what);
            }
        }
    }
}

#[test]
fn products_with_any_dimension_numbers() {
    let mut random = Random(6);
    for round in 0..180 {
        // Random roles: each dimension is batch, contracted, or free on one side. Then each side is shuffled.
        let sizes = [1u64, 2, 3, 5, 8];
        let (mut left, mut right) = (Vec::new(), Vec::new());
        for role in 0..5usize {
            for _ in 0..random.below(3) {
                let size = random.pick(&sizes);
                let id = left.len() + right.len();
                match role {
                    0 | 1 => {
                        left.push((id, role, size));
                        right.push((id, role, size));
                    }
                    2 => left.push((id, role, size)),
                    3 => right.push((id, role, size)),
                    _ => {}
                }
            }
        }
        for list in [&mut left, &mut right] {
            for i in (1..list.len()).rev() {
                let j = random.below(i + 1);
                list.swap(i, j);
            }
        }
        let find = |list: &[(usize, usize, u64)], id: usize| list.iter().position(|d| d.0 == id).unwrap();
        let mut op = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![], rhs_contract: vec![] };
        for (l, &(id, role, _)) in left.iter().enumerate() {
            match role {
                0 => {
                    op.lhs_batch.push(l);
                    op.rhs_batch.push(find(&right, id));
                }
                1 => {
                    op.lhs_contract.push(l);
                    op.rhs_contract.push(find(&right, id));
                }
                _ => {}
            }
        }
        let dtype = PRODUCTS[round % PRODUCTS.len()];
        let mut graph = Graph::new("dot");
        let shape = |list: &[(usize, usize, u64)]| list.iter().map(|d| d.2).collect::<Vec<_>>();
        let x = input(&mut graph, "x", dtype, &shape(&left));
        let y = input(&mut graph, "y", dtype, &shape(&right));
        let z = graph.emit(Op::DotGeneral(op.clone()), &[x, y]);
        graph.outputs = vec![z];
        if round % 2 == 0 {
            // Only a transposed read exists, so the result is written transposed.
            let mut permutation: Vec<usize> = (0..graph.shape(z).len()).collect();
            permutation.reverse();
            let t = graph.transpose(z, &permutation);
            graph.outputs = vec![t];
        }
        check_graph(&graph, &mut random, 4.0 * tolerance(dtype), &format!("{op:?} on {left:?} x {right:?} {dtype}"));
    }
}

#[test]
fn a_large_product_is_spread_over_threads() {
    let mut graph = Graph::new("dot");
    let x = input(&mut graph, "x", DType::F32, &[4, 65, 40]);
    let y = input(&mut graph, "y", DType::F32, &[4, 33, 40]);
    let op = DotGeneral { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![2] };
    let z = graph.emit(Op::DotGeneral(op), &[x, y]);
    graph.outputs = vec![z];
    check_graph(&graph, &mut Random(7), 1e-6, "batched");
}

#[test]
fn data_movement() {
    let mut random = Random(8);
    for dtype in [DType::F32, DType::BF16, DType::I64, DType::Bool, DType::U8] {
        for round in 0..20 {
            let rank = 1 + random.below(4);
            let shape: Vec<u64> = (0..rank).map(|_| 1 + random.below(7) as u64).collect();
            let mut graph = Graph::new("movement");
            let x = input(&mut graph, "x", dtype, &shape);
            let value = input(&mut graph, "value", dtype, &[]);
            let mut permutation: Vec<usize> = (0..rank).collect();
            for i in (1..rank).rev() {
                permutation.swap(i, random.below(i + 1));
            }
            let transposed = graph.transpose(x, &permutation);
            let start: Vec<u64> = shape.iter().map(|&d| random.below(d as usize) as u64).collect();
            let limit =
                start.iter().zip(&shape).map(|(&s, &d)| s + random.below((d - s) as usize + 1) as u64).collect();
            let stride = (0..rank).map(|_| 1 + random.below(3) as u64).collect();
            let sliced = graph.emit(Op::Slice(Slice { start, limit, stride }), &[x]);
            let mut wide = vec![2];
            wide.extend(&shape);
            let broadcast = graph.broadcast(x, &wide, &(1..=rank).collect::<Vec<_>>());
            let dim = random.below(rank);
            let joined = graph.emit(Op::Concatenate(Concatenate { dim }), &[x, x, x]);
            let pad = Pad {
                low: (0..rank).map(|_| random.below(5) as i64 - 2).collect(),
                high: (0..rank).map(|_| random.below(5) as i64 - 2).collect(),
                interior: (0..rank).map(|_| random.below(3) as u64).collect(),
            };
            let flat = graph.reshape(transposed, &[shape.iter().product()]);
            graph.outputs = vec![transposed, sliced, broadcast, joined, flat];
            if let Ok(padded) = graph.push(Op::Pad(pad), &[x, value]) {
                graph.outputs.push(padded);
            }
            check_graph(&graph, &mut random, 0.0, &format!("{dtype}{shape:?} round {round}"));
        }
    }
}

#[test]
fn iota_and_constants() {
    for dtype in DType::ALL.into_iter().filter(|d| d.bytes() > 1 || d.is_integer() && d.width() == 8) {
        let mut graph = Graph::new("leaves");
        let ty = TensorType::new(dtype, [4, 5]);
        let rows = graph.emit(Op::Iota(Iota { ty: ty.clone(), dim: 0 }), &[]);
        let columns = graph.emit(Op::Iota(Iota { ty: ty.clone(), dim: 1 }), &[]);
        let sum = graph.add(rows, columns);
        let dense = graph.constant(Literal::dense(ty.clone(), (0..20).map(|i| (i % 7) as f64).collect()));
        let splat = graph.constant(Literal::splat(ty, 3.0));
        let folded = graph.mul(splat, splat);
        let product = graph.mul(dense, folded);
        graph.outputs = vec![rows, columns, sum, dense, splat, folded, product];
        check_graph(&graph, &mut Random(9), 0.0, &format!("{dtype}"));
    }
}

/// Random windows, dilations, strides, paddings, groups and layouts of up to three spatial dimensions.
#[test]
fn convolutions_of_all_kinds() {
    let mut random = Random(20);
    for case in 0..180 {
        let mut below = |n: usize| random.below(n);
        let rank = 1 + below(3);
        let order = |below: &mut dyn FnMut(usize) -> usize| {
            let mut dims: Vec<usize> = (0..rank + 2).collect();
            (0..rank + 2).for_each(|i| dims.swap(i, i + below(rank + 2 - i)));
            dims
        };
        let [l, r, t] = [order(&mut below), order(&mut below), order(&mut below)];
        let window: Vec<WindowDim> = (0..rank)
            .map(|_| WindowDim {
                size: 1 + below(4) as u64,
                stride: 1 + below(3) as u64,
                pad_low: below(4) as i64 - 1,
                pad_high: below(4) as i64 - 1,
                base_dilation: 1 + below(3) as u64,
                window_dilation: 1 + below(2) as u64,
                reversed: below(4) == 0,
            })
            .collect();
        let groups = if below(2) == 0 { 1 } else { 1 + below(4) as u64 };
        let of_batch = below(3) == 0;
        let image = |d: &[usize]| ImageDims { batch: d[0], feature: d[1], spatial: d[2..].to_vec() };
        let conv = Convolution {
            lhs: image(&l),
            rhs: KernelDims { output: r[0], input: r[1], spatial: r[2..].to_vec() },
            result: image(&t),
            feature_groups: if of_batch { 1 } else { groups },
            batch_groups: if of_batch { groups } else { 1 },
            window,
        };
        let (inputs, outputs, images) = (1 + below(5) as u64, 1 + below(6) as u64, 1 + below(4) as u64);
        let (mut lhs, mut rhs) = (vec![0; rank + 2], vec![0; rank + 2]);
        lhs[l[0]] = images * conv.batch_groups;
        lhs[l[1]] = inputs * conv.feature_groups;
        rhs[r[0]] = outputs * groups;
        rhs[r[1]] = inputs;
        for i in 0..rank {
            lhs[l[2 + i]] = 1 + below(9) as u64;
            rhs[r[2 + i]] = conv.window[i].size;
        }
        let dtype = PRODUCTS[case % PRODUCTS.len()];
        let mut graph = Graph::new("convolution");
        let x = input(&mut graph, "x", dtype, &lhs);
        let w = input(&mut graph, "w", dtype, &rhs);
        let Ok(y) = graph.push(Op::Convolution(conv.clone()), &[x, w]) else { continue };
        graph.outputs = vec![y];
        check_graph(&graph, &mut random, 20.0 * tolerance(dtype), &format!("{conv:?} on {lhs:?} {dtype}"));
    }
}

/// Large enough for several tiles of the gathered matrix, in both of its orders.
#[test]
fn large_convolutions_run_in_tiles() {
    let mut random = Random(21);
    let square = |size, stride, pad| WindowDim { size, stride, pad_low: pad, pad_high: pad, ..WindowDim::one() };
    let nhwc = || ImageDims { batch: 0, feature: 3, spatial: vec![1, 2] };
    let hwio = KernelDims { input: 2, output: 3, spatial: vec![0, 1] };
    let nchw = || ImageDims { batch: 0, feature: 1, spatial: vec![2, 3] };
    let oihw = KernelDims { input: 1, output: 0, spatial: vec![2, 3] };
    // The gradient of a kernel swaps features and batch, and its window is as large as the image.
    let chwn = ImageDims { batch: 3, feature: 0, spatial: vec![1, 2] };
    let hwnc = KernelDims { input: 0, output: 3, spatial: vec![1, 2] };
    let conv = |lhs, rhs, result, w: WindowDim| Convolution {
        lhs,
        rhs,
        result,
        window: vec![w, w],
        feature_groups: 1,
        batch_groups: 1,
    };
    let cases = [
        (conv(nhwc(), hwio.clone(), nhwc(), square(3, 1, 1)), [2, 20, 21, 150], [3, 3, 150, 17]),
        (conv(nchw(), oihw, nchw(), square(5, 2, 2)), [2, 9, 33, 30], [24, 9, 5, 5]),
        (conv(chwn, hwnc, nhwc(), square(20, 1, 1)), [4, 20, 20, 70], [4, 20, 20, 9]),
    ];
    for (conv, lhs, rhs) in cases {
        let mut graph = Graph::new("convolution");
        let x = input(&mut graph, "x", DType::F32, &lhs);
        let w = input(&mut graph, "w", DType::F32, &rhs);
        let y = graph.emit(Op::Convolution(conv.clone()), &[x, w]);
        graph.outputs = vec![y];
        check_graph(&graph, &mut random, 1e-4, &format!("{conv:?}"));
    }
}

#[test]
fn windows_are_reduced_and_scattered_into() {
    let mut random = Random(22);
    for case in 0..210 {
        let mut below = |n: usize| random.below(n);
        let rank = 1 + below(4);
        let shape: Vec<u64> = (0..rank).map(|_| 2 + below(7) as u64).collect();
        let window: Vec<WindowDim> = (0..rank)
            .map(|_| match below(3) {
                0 => WindowDim::one(),
                _ => WindowDim {
                    size: 1 + below(3) as u64,
                    stride: 1 + below(3) as u64,
                    pad_low: below(3) as i64,
                    pad_high: below(3) as i64,
                    base_dilation: 1 + below(2) as u64,
                    window_dilation: 1 + below(2) as u64,
                    reversed: false,
                },
            })
            .collect();
        let dtype = [DType::F32, DType::BF16, DType::I32, DType::Bool, DType::I64, DType::I8, DType::U4][case % 7];
        let reducer = Reducer::ALL[below(6)];
        let select = if below(2) == 0 { Extremum::Max } else { Extremum::Min };
        let mut graph = Graph::new("windows");
        let x = input(&mut graph, "x", dtype, &shape);
        let Ok(y) = graph.push(Op::ReduceWindow(ReduceWindow { reducer, window: window.clone() }), &[x]) else {
            continue;
        };
        let pooled = graph.shape(y).to_vec();
        let source = input(&mut graph, "source", dtype, &pooled);
        graph.outputs = vec![y];
        if dtype != DType::Bool {
            let op = SelectAndScatter { select, window: window.clone() };
            let scattered = graph.emit(Op::SelectAndScatter(op), &[x, source]);
            graph.outputs.push(scattered);
        }
        let label = format!("{reducer:?} {select:?} {window:?} on {shape:?} {dtype}");
        check_graph(&graph, &mut random, 30.0 * tolerance(dtype), &label);
    }
}

#[test]
fn narrow_types_count_and_convert() {
    for dtype in DType::ALL.into_iter().filter(|d| d.bytes() == 1 && *d != DType::Bool) {
        let mut graph = Graph::new("narrow");
        let rows = graph.emit(Op::Iota(Iota { ty: TensorType::new(dtype, [20, 3]), dim: 0 }), &[]);
        let x = input(&mut graph, "x", DType::F32, &[600]);
        let x = graph.unary(Unary::Exponential, x);
        let there = graph.convert(x, dtype);
        let bits = BitcastConvert { dtype: if dtype.is_float() { DType::U8 } else { dtype } };
        let bits = graph.emit(Op::BitcastConvert(bits), &[there]);
        graph.outputs = vec![there, bits];
        if dtype != DType::F8E8M0FNU {
            graph.outputs.push(rows);
        }
        check_graph(&graph, &mut Random(11), 0.0, &format!("{dtype}"));
    }
}

#[test]
fn bits_are_reinterpreted() {
    let mut random = Random(12);
    for (from, to) in [
        (DType::F32, DType::U32),
        (DType::U32, DType::F32),
        (DType::F32, DType::I32),
        (DType::F32, DType::U8),
        (DType::F16, DType::U16),
        (DType::F16, DType::BF16),
        (DType::I32, DType::F32),
        (DType::U8, DType::F8E4M3FN),
        (DType::I64, DType::U64),
        (DType::F8E3M4, DType::F8E4M3),
        (DType::BF16, DType::I8),
        (DType::U16, DType::F32),
        (DType::I8, DType::I32),
        (DType::I8, DType::F16),
        (DType::I64, DType::U32),
        (DType::F64, DType::U32),
        (DType::U8, DType::I4),
        (DType::U2, DType::I8),
        (DType::I16, DType::F8E4M3FN),
        (DType::F8E5M2FNUZ, DType::U8),
    ] {
        let parts = u64::from(to.width() / from.width()).max(1);
        for shape in [vec![parts], vec![7, parts], vec![40, 300, parts], vec![0, parts]] {
            let mut graph = Graph::new("bits");
            let x = input(&mut graph, "x", from, &shape);
            let y = graph.emit(Op::BitcastConvert(BitcastConvert { dtype: to }), &[x]);
            graph.outputs = vec![y];
            check_graph(&graph, &mut random, 0.0, &format!("{from}{shape:?} as {to}"));
        }
    }
}

#[test]
fn precision_is_reduced_and_random_bits_are_made() {
    let mut random = Random(13);
    for dtype in all_types().filter(|d| d.is_float()) {
        for (exponent_bits, mantissa_bits) in [(5, 10), (8, 7), (4, 3), (3, 0), (2, 20), (11, 52)] {
            let mut graph = Graph::new("reduce");
            let x = input(&mut graph, "x", dtype, &[3, 700]);
            let y = graph.emit(Op::ReducePrecision(ReducePrecision { exponent_bits, mantissa_bits }), &[x]);
            graph.outputs = vec![y];
            check_graph(&graph, &mut random, 0.0, &format!("{dtype} to {exponent_bits}, {mantissa_bits}"));
        }
    }
    for shape in [vec![], vec![7], vec![5, 0], vec![3, 700]] {
        let mut graph = Graph::new("threefry");
        let scalar = |graph: &mut Graph, name: &str| input(graph, name, DType::U32, &[]);
        let keys = [scalar(&mut graph, "k0"), scalar(&mut graph, "k1")];
        let keys = keys.map(|k| graph.broadcast(k, &shape, &[]));
        let counts = ["c0", "c1"].map(|name| input(&mut graph, name, DType::U32, &shape));
        // Large counters, so that all bits take part.
        let large = graph.splat_like(counts[0], 4.0e9);
        let high = graph.sub(large, counts[0]);
        for word in ThreefryWord::ALL {
            let bits = graph.emit(Op::Threefry(Threefry { word }), &[keys[0], keys[1], high, counts[1]]);
            // A uniform number as in JAX, fused with its users.
            let nine = graph.splat_like(bits, 9.0);
            let mantissa = graph.emit(Op::Binary(Binary::ShiftRightLogical), &[bits, nine]);
            let one = graph.splat_like(bits, f64::from(1f32.to_bits()));
            let number = graph.emit(Op::Binary(Binary::Or), &[mantissa, one]);
            let number = graph.emit(Op::BitcastConvert(BitcastConvert { dtype: DType::F32 }), &[number]);
            graph.outputs.extend([bits, number]);
        }
        check_graph(&graph, &mut random, 0.0, &format!("threefry of {shape:?}"));
    }
}

#[test]
fn shifts_keep_to_the_bits_of_the_type() {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_integer()) {
        let mut graph = Graph::new("shift");
        let x = input(&mut graph, "x", dtype, &[900]);
        let by = input(&mut graph, "by", dtype, &[900]);
        // An `f64` holds only the upper half of 64 bits, so 64-bit operands stay unchanged.
        let ones = graph.unary(Unary::Not, x);
        let operands = if dtype.width() == 64 { vec![x] } else { vec![x, ones] };
        for x in operands {
            for op in [Binary::ShiftLeft, Binary::ShiftRightLogical, Binary::ShiftRightArithmetic] {
                if dtype == DType::I64 && op == Binary::ShiftRightLogical {
                    continue;
                }
                let shifted = graph.emit(Op::Binary(op), &[x, by]);
                graph.outputs.push(shifted);
            }
            for op in [Unary::PopulationCount, Unary::CountLeadingZeros] {
                let counted = graph.unary(op, x);
                graph.outputs.push(counted);
            }
        }
        check_graph(&graph, &mut Random(14), 0.0, &format!("shifted {dtype}"));
    }
}

#[test]
fn orders_scans_and_reversals() {
    let mut random = Random(15);
    for dtype in REDUCED.into_iter().chain([DType::U32, DType::F8E4M3FNUZ]) {
        for (shape, dim) in [
            (vec![9], 0),
            (vec![4, 5, 6], 0),
            (vec![4, 5, 6], 1),
            (vec![4, 5, 6], 2),
            (vec![3, 0], 1),
            (vec![0, 3], 1),
            (vec![1, 1, 7], 0),
            (vec![50, 700], 1),
            (vec![700, 50], 0),
        ] {
            let what = format!("{dtype}{shape:?} along {dim}");
            let mut graph = Graph::new("rows");
            let x = input(&mut graph, "x", dtype, &shape);
            let second = input(&mut graph, "y", DType::Bool, &shape);
            for descending in [vec![false], vec![true]] {
                let order = graph.emit(Op::ArgSort(ArgSort { dim, descending }), &[x]);
                graph.outputs.push(order);
            }
            let op = Op::ArgSort(ArgSort { dim, descending: vec![true, false] });
            let both = graph.emit(op, &[second, x]);
            let reversed = graph.emit(Op::Reverse(Reverse { dims: vec![dim] }), &[x]);
            let others = (0..shape.len()).filter(|&d| d != dim).collect();
            let others = graph.emit(Op::Reverse(Reverse { dims: others }), &[x]);
            let all = graph.emit(Op::Reverse(Reverse { dims: (0..shape.len()).collect() }), &[x]);
            graph.outputs.extend([both, reversed, others, all]);
            check_graph(&graph, &mut random, 0.0, &what);

            for (reducer, reverse) in Reducer::ALL.into_iter().flat_map(|r| [(r, false), (r, true)]) {
                let mut graph = Graph::new("scan");
                let x = input(&mut graph, "x", dtype, &shape);
                // Read through a transpose as well as in storage order.
                let permutation: Vec<usize> = (0..shape.len()).rev().collect();
                let turned = graph.transpose(x, &permutation);
                let op = Cumulative { reducer, dim: shape.len() - 1 - dim, reverse };
                let Ok(scan) = graph.push(Op::Cumulative(op), &[turned]) else { continue };
                let straight = graph.emit(Op::Cumulative(Cumulative { dim, ..op }), &[x]);
                graph.outputs = vec![scan, straight];
                let what = format!("{} {reverse} {what}", reducer.name());
                check_graph(&graph, &mut random, 2.0 * tolerance(dtype), &what);
            }
        }
    }
}

/// NaNs and signed zeros have their place in an order, in every format.
#[test]
fn orders_of_special_numbers() {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F8E5M2] {
        let mut graph = Graph::new("specials");
        let x = input(&mut graph, "x", dtype, &[40]);
        let zero = graph.splat_like(x, 0.0);
        let rounded = graph.unary(Unary::RoundNearestEven, x);
        let over = graph.div(rounded, zero);
        let negative = graph.unary(Unary::Negate, rounded);
        for key in [over, rounded, negative] {
            for descending in [false, true] {
                let order = graph.emit(Op::ArgSort(ArgSort { dim: 0, descending: vec![descending] }), &[key]);
                graph.outputs.push(order);
            }
        }
        check_graph(&graph, &mut Random(16), 0.0, &format!("{dtype}"));
    }
}

#[test]
fn lookups_and_scatters() {
    let dims = |offset: &[usize], collapsed: &[usize], map: &[usize], vector: usize, sizes: &[u64]| GatherDims {
        offset_dims: offset.to_vec(),
        collapsed_slice_dims: collapsed.to_vec(),
        operand_batching_dims: vec![],
        indices_batching_dims: vec![],
        start_index_map: map.to_vec(),
        index_vector_dim: vector,
        slice_sizes: sizes.to_vec(),
    };
    // Table, indices, dimensions: an embedding; windows; two components; batching (take_along_axis).
    let cases: Vec<(Vec<u64>, Vec<u64>, GatherDims)> = vec![
        (vec![5, 8], vec![3, 4], dims(&[2], &[0], &[0], 2, &[1, 8])),
        (vec![5, 8], vec![3, 4, 1], dims(&[0], &[0], &[0], 2, &[1, 8])),
        (vec![5, 8], vec![6], dims(&[1, 2], &[], &[1], 1, &[5, 3])),
        (vec![4, 5, 6], vec![7, 2], dims(&[1], &[0, 1], &[1, 0], 1, &[1, 1, 6])),
        (vec![4, 5, 6], vec![2, 7], dims(&[1, 2], &[1], &[1, 2], 0, &[2, 1, 3])),
        (
            vec![3, 9],
            vec![3, 4],
            GatherDims {
                operand_batching_dims: vec![0],
                indices_batching_dims: vec![0],
                ..dims(&[], &[1], &[1], 2, &[1, 1])
            },
        ),
    ];
    let mut random = Random(10);
    for (table, indices, dims) in cases {
        for dtype in [DType::F32, DType::BF16, DType::I32, DType::F8E4M3FN, DType::U4, DType::Bool] {
            for index in [DType::I32, DType::I64] {
                // Indices from -6 to 6: some are out of bounds at either end.
                let mut graph = Graph::new("lookup");
                let t = input(&mut graph, "table", dtype, &table);
                let i = input(&mut graph, "indices", index, &indices);
                for out_of_bounds in [OutOfBounds::Clamp, OutOfBounds::Zero] {
                    let op = Gather { dims: dims.clone(), out_of_bounds };
                    let rows = graph.emit(Op::Gather(op), &[t, i]);
                    graph.outputs.push(rows);
                }
                let rows = graph.outputs[0];
                let scatter = ScatterAdd { dims: dims.clone(), shape: table.clone() };
                let sum = graph.emit(Op::ScatterAdd(scatter), &[i, rows]);
                graph.outputs.push(sum);
                let updates = graph.add(rows, rows);
                for combine in Combine::ALL {
                    let op = Op::Scatter(Scatter { dims: dims.clone(), combine });
                    let merged = graph.emit(op.clone(), &[t, i, updates]);
                    // In place, in the storage of a value that nothing else reads.
                    let fresh = graph.add(t, t);
                    let replaced = graph.emit(op, &[fresh, i, updates]);
                    graph.outputs.extend([merged, replaced]);
                }
                check_graph(&graph, &mut random, 2.0 * tolerance(dtype), &format!("{dims:?} {dtype} by {index}"));
            }
        }
    }
}

/// Rows of existing and of missing groups, and groups without rows.
#[test]
fn grouped_products() {
    let mut random = Random(11);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (rows, groups, terms, columns) in
            [(vec![24u64], 3u64, 4u64, 6u64), (vec![3, 5], 8, 6, 1), (vec![1], 2, 1, 5), (vec![2, 7], 4, 8, 8)]
        {
            let mut graph = Graph::new("grouped");
            let with = |last: u64| [rows.as_slice(), &[last]].concat();
            let x = input(&mut graph, "x", dtype, &with(terms));
            let y = input(&mut graph, "y", dtype, &with(columns));
            let group = input(&mut graph, "group", DType::I32, &rows);
            for (contract, shape) in [(1, [groups, terms, columns]), (2, [groups, columns, terms])] {
                let w = input(&mut graph, &format!("w{contract}"), dtype, &shape);
                let dot = graph.emit(Op::GroupedDot(GroupedDot { contract, of: None }), &[x, w, group]);
                graph.outputs.push(dot);
            }
            let outer = graph.emit(Op::GroupedOuter(GroupedOuter { groups, of: Some(2 * groups) }), &[x, y, group]);
            graph.outputs.push(outer);
            check_graph(&graph, &mut random, 8.0 * tolerance(dtype), &format!("{rows:?} of {groups} {dtype}"));
        }
    }
}
