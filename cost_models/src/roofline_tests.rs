//! The roofline against formulas worked out by hand, published measurements, and properties of any prices.

use super::*;
use crate::catalogue::{device, device_names};
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::{
    ArgSort, Binary, BitcastConvert, BroadcastInDim, Combine, Concatenate, Convert, Cumulative, DotGeneral, Gather,
    GatherDims, OutOfBounds, Reduce, ReducePrecision, Reducer, Reshape, Reverse, Scatter, ScatterAdd, Threefry,
    ThreefryWord, Transpose, Unary,
};
use proptest::prelude::*;

fn model(name: &str) -> Roofline {
    Roofline::new(device(name).unwrap())
}

/// A model with named constants whose host is never waited for.
fn with_a_fast_host(name: &str) -> Roofline {
    let constants = Constants { dispatch_s: 0.0, ..crate::catalogue::constants(name) };
    Roofline::with_constants(device(name).unwrap(), constants)
}

fn matmul() -> Op {
    Op::DotGeneral(DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![0] })
}

/// Seconds of `[m,k] x [k,n]`.
fn matmul_s(model: &Roofline, dtype: DType, m: u64, n: u64, k: u64) -> f64 {
    let ty = |shape: [u64; 2]| TensorType::new(dtype, shape);
    model.compute_s(&matmul(), &[&ty([m, k]), &ty([k, n])], &ty([m, n]))
}

/// Seconds of `heads` matmuls of `[m,k] x [k,n]`.
fn batched_matmul_s(model: &Roofline, heads: u64, m: u64, n: u64, k: u64) -> f64 {
    let dot = DotGeneral { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![1] };
    let ty = |shape: [u64; 3]| TensorType::new(DType::F16, shape);
    model.compute_s(&Op::DotGeneral(dot), &[&ty([heads, m, k]), &ty([heads, k, n])], &ty([heads, m, n]))
}

fn all_reduce() -> Collective {
    Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Sum }
}

fn collectives() -> Vec<Collective> {
    let axes = || vec![AxisId(0)];
    vec![
        all_reduce(),
        Collective::ReduceScatter { axes: axes(), reducer: Reducer::Sum, dim: 0, outer: 1 },
        Collective::AllGather { axes: axes(), dim: 0, outer: 1 },
        Collective::AllToAll { axes: axes(), split_dim: 0, split_outer: 1, concat_dim: 1, concat_outer: 1 },
        Collective::LocalSlice { axes: axes(), dim: 0, outer: 1 },
        Collective::KeepFirst { axes: axes(), reducer: Reducer::Sum },
    ]
}

/// An op of each kind, with the types that it has for `n` rows.
fn ops(n: u64) -> Vec<(Op, Vec<TensorType>, TensorType)> {
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let rows = ty(&[n, 64]);
    let indices = TensorType::new(DType::I32, [n, 1]);
    let dims = GatherDims {
        offset_dims: vec![1],
        collapsed_slice_dims: vec![0],
        operand_batching_dims: vec![],
        indices_batching_dims: vec![],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![1, 64],
    };
    let broadcast = BroadcastInDim { shape: vec![n, 64], dims: vec![1] };
    let gather = Gather { dims: dims.clone(), out_of_bounds: OutOfBounds::Clamp };
    let scatter = Scatter { dims: dims.clone(), combine: Combine::Replace };
    let cumulative = Cumulative { reducer: Reducer::Sum, dim: 1, reverse: false };
    let reduced = ReducePrecision { exponent_bits: 5, mantissa_bits: 10 };
    let words = rows.with_dtype(DType::U32);
    vec![
        (Op::Unary(Unary::Exponential), vec![rows.clone()], rows.clone()),
        (Op::Binary(Binary::Add), vec![rows.clone(), rows.clone()], rows.clone()),
        (Op::Convert(Convert { dtype: DType::BF16 }), vec![rows.clone()], rows.with_dtype(DType::BF16)),
        (Op::BroadcastInDim(broadcast), vec![ty(&[64])], rows.clone()),
        (Op::Reshape(Reshape { shape: vec![n, 8, 8] }), vec![rows.clone()], ty(&[n, 8, 8])),
        (Op::Transpose(Transpose { permutation: vec![1, 0] }), vec![rows.clone()], ty(&[64, n])),
        (Op::Reduce(Reduce { reducer: Reducer::Sum, dims: vec![1] }), vec![rows.clone()], ty(&[n])),
        (Op::Concatenate(Concatenate { dim: 0 }), vec![rows.clone(), rows.clone()], ty(&[2 * n, 64])),
        (matmul(), vec![rows.clone(), ty(&[64, 32])], ty(&[n, 32])),
        (Op::Gather(gather), vec![ty(&[1000, 64]), indices.clone()], rows.clone()),
        (
            Op::ScatterAdd(ScatterAdd { dims, shape: vec![1000, 64] }),
            vec![indices.clone(), rows.clone()],
            ty(&[1000, 64]),
        ),
        (Op::Reverse(Reverse { dims: vec![1] }), vec![rows.clone()], rows.clone()),
        (Op::Cumulative(cumulative), vec![rows.clone()], rows.clone()),
        (Op::ArgSort(ArgSort { dim: 1, descending: vec![true] }), vec![rows.clone()], rows.with_dtype(DType::I32)),
        (Op::BitcastConvert(BitcastConvert { dtype: DType::U32 }), vec![rows.clone()], words.clone()),
        (Op::ReducePrecision(reduced), vec![rows.clone()], rows.clone()),
        (Op::Threefry(Threefry { word: ThreefryWord::First }), vec![words.clone(); 4], words),
        (Op::Scatter(scatter), vec![ty(&[32000, 64]), indices, rows], ty(&[32000, 64])),
    ]
}

fn price(model: &Roofline, (op, operands, result): &(Op, Vec<TensorType>, TensorType)) -> f64 {
    model.compute_s(op, &operands.iter().collect::<Vec<_>>(), result)
}

fn close(found: f64, expect: f64) -> bool {
    (found / expect - 1.0).abs() < 1e-12
}

#[test]
fn a_matmul_by_hand() {
    // 2 * 1024^3 FLOP at a share of 312e12, three tensors of 2 MiB at a share of 2039e9 (matmuls stream as well as
    // any), one launch.
    let Constants { matmul_efficiency, sustained_efficiency, .. } = crate::catalogue::constants("A100-SXM-80GB");
    let rate = matmul_efficiency * sustained_efficiency * 312e12;
    let expect = 2.0 * 1024f64.powi(3) / rate + 6.0 * 1048576.0 / (MEMORY_EFFICIENCY * 2039e9) + 3e-6;
    assert!(close(matmul_s(&with_a_fast_host("A100-SXM-80GB"), DType::BF16, 1024, 1024, 1024), expect));
}

#[test]
fn the_host_issues_what_is_launched() {
    let model = model("A100-SXM-80GB");
    let dispatch_s = crate::catalogue::constants("A100-SXM-80GB").dispatch_s;
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let (small, large) = (ty(&[64, 64]), ty(&[4096, 4096]));
    // However much a kernel computes, the host is done once it has issued it.
    assert_eq!(model.issue_s(&matmul(), &[&small, &small]), dispatch_s);
    assert_eq!(model.issue_s(&matmul(), &[&large, &large]), dispatch_s);
    assert_eq!(model.issue_s(&Op::Unary(Unary::Tanh), &[&small]), dispatch_s / OPS_PER_FUSED_KERNEL);
    let shape = vec![4096];
    assert_eq!(model.issue_s(&Op::Reshape(altiplano_ir::op::Reshape { shape }), &[&small]), 0.0);
}

#[test]
fn traffic_by_hand() {
    let model = with_a_fast_host("A100-SXM-80GB");
    let rate = crate::catalogue::constants("A100-SXM-80GB").memory_efficiency * 2039e9;
    let row_bytes = 64.0 * 4.0;
    let n = 1000.0;
    // In the order of `ops`: bytes, and true if the op is part of a fused kernel.
    let expect = [
        (2.0 * n * row_bytes, true),
        (2.0 * n * row_bytes, true),
        (1.5 * n * row_bytes, true),
        (0.0, true),
        (0.0, true),
        (2.0 * n * row_bytes, true),
        (n * row_bytes + n * 4.0, false),
        (4.0 * n * row_bytes, false),
    ];
    for (case, (bytes, fused)) in ops(1000).iter().zip(expect) {
        let whole = bytes / rate + 3e-6;
        let expect = match (bytes == 0.0, fused) {
            (true, _) => 0.0,
            (false, true) => whole / OPS_PER_FUSED_KERNEL,
            (false, false) => whole,
        };
        let found = price(&model, case);
        assert!(found == expect || close(found, expect), "{}: {found} not {expect}", case.0.name());
    }
    let cases = ops(1000);
    let (gather, scatter) = (price(&model, &cases[9]), price(&model, &cases[10]));
    assert!(close(gather, (n * 4.0 + 2.0 * n * row_bytes) / rate + 3e-6), "the rows, not the table");
    assert!(close(scatter, (n * 4.0 + 3.0 * n * row_bytes + 1000.0 * row_bytes) / rate + 3e-6));
    let named = |name: &str| cases.iter().find(|c| c.0.name() == name).map(|c| price(&model, c)).unwrap();
    assert!(close(named("reverse"), (2.0 * n * row_bytes / rate + 3e-6) / OPS_PER_FUSED_KERNEL));
    assert!(close(named("cumulative"), 2.0 * n * row_bytes / rate + 3e-6));
    assert!(close(named("arg_sort"), 4.0 * (4.0 * n * row_bytes / rate + 3e-6)), "a pass for each byte of the key");
    assert!(close(named("scatter"), (n * 4.0 + 3.0 * n * row_bytes + 2.0 * 32000.0 * row_bytes) / rate + 3e-6));
}

/// Forward matmuls of GPT 13B (hidden 5120, 40 heads) and 1.3B (2048, 32 heads) with 2048 positions on a V100, from
/// Aceso's profiles. The model must be within a fifth of each.
#[test]
fn matmuls_near_measured_ones() {
    let v100 = model("V100-SXM2-32GB");
    let table = [
        ("13B qkv", matmul_s(&v100, DType::F16, 2048, 15360, 5120), 4002e-6),
        ("13B dense", matmul_s(&v100, DType::F16, 2048, 5120, 5120), 1275e-6),
        ("13B mlp up", matmul_s(&v100, DType::F16, 2048, 20480, 5120), 5034e-6),
        ("13B mlp down", matmul_s(&v100, DType::F16, 2048, 5120, 20480), 4947e-6),
        ("13B scores", batched_matmul_s(&v100, 40, 2048, 2048, 128), 1072e-6),
        ("13B context", batched_matmul_s(&v100, 40, 2048, 128, 2048), 829e-6),
        ("1.3B qkv", matmul_s(&v100, DType::F16, 2048, 6144, 2048), 709e-6),
        ("1.3B dense", matmul_s(&v100, DType::F16, 2048, 2048, 2048), 231e-6),
        ("1.3B mlp up", matmul_s(&v100, DType::F16, 2048, 8192, 2048), 867e-6),
        ("1.3B mlp down", matmul_s(&v100, DType::F16, 2048, 2048, 8192), 852e-6),
        ("1.3B scores", batched_matmul_s(&v100, 32, 2048, 2048, 64), 532e-6),
        ("1.3B context", batched_matmul_s(&v100, 32, 2048, 64, 2048), 639e-6),
    ];
    for (name, modelled_s, measured_s) in table {
        let error = modelled_s / measured_s - 1.0;
        assert!(
            error.abs() < 0.2,
            "{name}: {modelled_s:.3e} against {measured_s:.3e} measured, {:+.0} %",
            100.0 * error
        );
    }
}

/// NCCL all-reduces within one node from 1 MiB to 1 GiB (published with vTrain): within a factor of 1.5 each.
#[test]
fn all_reduces_near_measured_ones() {
    use altiplano_ir::mesh::Mesh;
    // (machine, devices, [seconds of 1 MiB, 8 MiB, 64 MiB, 1 GiB])
    let table = [
        ("dgx-a100", 2, [44.2e-6, 86.9e-6, 405e-6, 5443e-6]),
        ("dgx-a100", 4, [51.4e-6, 117e-6, 544e-6, 7259e-6]),
        ("dgx-a100", 8, [92.8e-6, 134e-6, 580e-6, 8193e-6]),
        ("p3.16xlarge", 2, [70.1e-6, 393e-6, 2999e-6, 47610e-6]),
        ("p3.16xlarge", 3, [75.0e-6, 272e-6, 2004e-6, 31714e-6]),
        ("p3.16xlarge", 4, [67.3e-6, 178e-6, 1202e-6, 18869e-6]),
        ("p3.16xlarge", 8, [79.9e-6, 238e-6, 911e-6, 13969e-6]),
    ];
    for (machine, devices, measured) in table {
        let cluster = crate::preset(machine).unwrap();
        let group = &cluster.groups[0];
        let mesh = Mesh::new(&[("data", devices)]);
        let link = crate::axis_link(group, 1, devices, &mesh, &[AxisId(0)]);
        let model = Roofline::new(group.device.clone());
        for (mib, measured_s) in [1u64, 8, 64, 1024].into_iter().zip(measured) {
            let modelled_s = model.collective_s(&all_reduce(), mib << 20, mib << 20, &link);
            let ratio = modelled_s / measured_s;
            assert!(
                (1.0 / 1.5..1.5).contains(&ratio),
                "{machine} {devices} devices {mib} MiB: {modelled_s:.3e} against {measured_s:.3e} measured"
            );
        }
    }
}

#[test]
fn a_type_without_units_is_priced_as_its_fallback() {
    let v100 = device("V100-SXM2-16GB").unwrap();
    assert_eq!(fallback(&v100, DType::BF16), Some(DType::F32));
    assert_eq!(fallback(&v100, DType::F16), None);
    assert_eq!(fallback(&v100, DType::I32), None, "no warning for what is not computed in bulk");
    assert_eq!(fallback(&device("A100-SXM-40GB").unwrap(), DType::BF16), None);
    let cpu = device("cpu-worker").unwrap();
    assert_eq!(fallback(&cpu, DType::F16), Some(DType::F32));
    // Eight-bit types become sixteen-bit if there are units for those.
    for (name, dtype, expected) in [
        ("H100-SXM", DType::F8E4M3FN, None),
        ("H100-SXM", DType::F8E4M3FNUZ, Some(DType::BF16)),
        ("MI300X", DType::F8E5M2FNUZ, None),
        ("A100-SXM-80GB", DType::F8E5M2, Some(DType::BF16)),
        ("V100-SXM2-16GB", DType::F8E5M2, Some(DType::F16)),
        ("cpu-worker", DType::F8E5M2, Some(DType::F32)),
    ] {
        assert_eq!(fallback(&device(name).unwrap(), dtype), expected, "{dtype} on {name}");
    }
    let h100 = Roofline::new(device("H100-SXM").unwrap());
    let speedup = matmul_s(&h100, DType::BF16, 8192, 8192, 8192) / matmul_s(&h100, DType::F8E4M3FN, 8192, 8192, 8192);
    assert!((1.9..2.1).contains(&speedup), "{speedup}");
    assert_eq!(peak_flops(&v100, DType::BF16), 15.7e12);
    let model = Roofline::new(v100.clone());
    assert!(matmul_s(&model, DType::BF16, 4096, 4096, 4096) > 5.0 * matmul_s(&model, DType::F16, 4096, 4096, 4096));
    // Devices from elsewhere may state little: the slowest type stands in, or only memory is priced.
    let mut odd = v100;
    odd.peak_flops = [(DType::F16, 2e12), (DType::BF16, 1e12)].into();
    assert_eq!(fallback(&odd, DType::F32), Some(DType::BF16));
    odd.peak_flops.clear();
    assert_eq!(peak_flops(&odd, DType::F32), f64::INFINITY);
    assert!(matmul_s(&Roofline::new(odd), DType::F32, 64, 64, 64).is_finite());
}

/// A GPT layer of hidden size 4096 with four sequences of 2048: between its FLOP at peak and three times that, on every
/// device with tensor units.
#[test]
fn a_transformer_layer_is_bound_by_its_matmuls() {
    let (rows, hidden, heads, seq) = (8192, 4096, 32, 2048);
    for name in device_names().iter().filter(|n| *n != "cpu-worker") {
        let model = model(name);
        let elementwise = |shape: &[u64], count: f64| {
            let ty = TensorType::new(DType::F16, shape);
            count * model.compute_s(&Op::Unary(Unary::Tanh), &[&ty], &ty)
        };
        let matmuls_s = matmul_s(&model, DType::F16, rows, 3 * hidden, hidden)
            + matmul_s(&model, DType::F16, rows, hidden, hidden)
            + matmul_s(&model, DType::F16, rows, 4 * hidden, hidden)
            + matmul_s(&model, DType::F16, rows, hidden, 4 * hidden)
            + batched_matmul_s(&model, 4 * heads, seq, seq, hidden / heads)
            + batched_matmul_s(&model, 4 * heads, seq, hidden / heads, seq);
        // Two normalisations, residuals and biases; a GELU; a masked softmax and its two reductions.
        let others_s = elementwise(&[rows, hidden], 24.0)
            + elementwise(&[rows, 4 * hidden], 10.0)
            + elementwise(&[4 * heads, seq, seq], 5.0 + 2.0 * OPS_PER_FUSED_KERNEL / 2.0);
        let flop = (rows * (12 * hidden * hidden + 2 * seq * hidden) * 2) as f64;
        let at_peak_s = flop / peak_flops(model.device(), DType::F16);
        let ratio = (matmuls_s + others_s) / at_peak_s;
        assert!(ratio > 1.0 && ratio < 3.0, "{name}: {ratio:.2} times the time at peak");
    }
}

#[test]
fn matmuls_too_large_for_any_machine_have_a_finite_price() {
    let huge = 1 << 24;
    let seconds = matmul_s(&model("H100-SXM"), DType::BF16, huge, huge, huge);
    assert!(seconds.is_finite() && seconds > 1e6);
    let link = AxisLink::new(8, 1e9, 1e-6);
    assert!(model("H100-SXM").collective_s(&all_reduce(), u64::MAX, u64::MAX, &link).is_finite());
}

#[test]
fn a_gather_and_a_scatter_are_priced_by_their_whole_side() {
    let model = model("A100-SXM-80GB");
    let link = AxisLink::new(8, 100e9, 1e-6);
    let [_, scatter, gather, ..] = &collectives()[..] else { unreachable!() };
    let whole = model.collective_s(gather, 1 << 20, 1 << 23, &link);
    assert_eq!(whole, model.collective_s(scatter, 1 << 23, 1 << 20, &link));
    // Together they equal an all-reduce, except for the second start, at the share of its rate that a step's
    // collectives reach.
    let part = model.compute.constants.collective_efficiency;
    let both = 2.0 * part * whole - collective::best(Operation::AllGather, 1 << 23, &link).start_s;
    let ring = collective::candidates(Operation::AllReduce, 1 << 23, &link);
    let ring = ring.iter().find(|p| p.algorithm == collective::Algorithm::HalvingDoubling).unwrap();
    assert!(close(both, ring.seconds));
}

proptest! {
    #[test]
    fn more_rows_never_cost_less(n in 1u64..1_000_000, more in 1u64..1_000_000, which in 0usize..12) {
        let model = model(&device_names()[which]);
        for (small, large) in ops(n).iter().zip(&ops(n + more)) {
            let (a, b) = (price(&model, small), price(&model, large));
            prop_assert!(a.is_finite() && a >= 0.0);
            prop_assert!(b >= a, "{}", small.0.name());
        }
    }

    #[test]
    fn a_faster_device_never_takes_longer(n in 1u64..1_000_000, faster in 1.0f64..10.0) {
        let slow = device("L40S").unwrap();
        let mut fast = slow.clone();
        fast.memory_bytes_per_s *= faster;
        fast.peak_flops.values_mut().for_each(|p| *p *= faster);
        let (slow, fast) = (Roofline::new(slow), Roofline::new(fast));
        for case in ops(n) {
            prop_assert!(price(&fast, &case) <= price(&slow, &case), "{}", case.0.name());
        }
    }

    #[test]
    fn collectives_grow_with_bytes_and_shrink_with_bandwidth(
        bytes in 0u64..1 << 40,
        more in 0u64..1 << 40,
        devices in 2u64..20_000,
        rate in 1e6f64..1e12,
        faster in 1.0f64..100.0,
        latency_s in 0.0f64..1e-3,
    ) {
        let model = model("A100-SXM-80GB");
        let link = AxisLink::new(devices, rate, latency_s);
        let wide = AxisLink::new(devices, rate * faster, latency_s);
        for collective in collectives() {
            let at = |bytes: u64, link: &AxisLink| model.collective_s(&collective, bytes, bytes, link);
            prop_assert!(at(bytes, &link).is_finite() && at(bytes, &link) > 0.0);
            prop_assert!(at(bytes + more, &link) >= at(bytes, &link), "{}", collective.name());
            prop_assert!(at(bytes, &wide) <= at(bytes, &link), "{}", collective.name());
            prop_assert_eq!(at(bytes, &AxisLink { devices: 1, ..link }), 0.0);
        }
        let path = |bytes_per_s: f64| TransferPath { bytes_per_s, latency_s, across: false, kind: link.kind, network: link.network };
        prop_assert!(model.transfer_s(bytes + more, &path(rate)) >= model.transfer_s(bytes, &path(rate)));
        prop_assert!(model.transfer_s(bytes, &path(rate * faster)) <= model.transfer_s(bytes, &path(rate)));
    }
}
