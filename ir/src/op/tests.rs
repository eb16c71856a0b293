//! Tests every op against its own reference semantics, from one table of cases.
//!
//! A case is an op and the types of its operands. The tests compare `eval` with the shape function, the sharding rule
//! under every strategy on several meshes, the gradient and the resizing. An op that has a case has all of these tests.

mod gradients;
mod reference;
mod reshards;
mod rules;

use super::*;
use crate::testing::{Case, cases, numbers};
use std::collections::BTreeSet;

/// An index for each variant of [`Op`]. A new variant does not compile until it is listed here, and the next test fails
/// until it has a case.
fn variant(op: &Op) -> usize {
    match op {
        Op::Parameter(_) => 0,
        Op::Input(_) => 1,
        Op::Constant(_) => 2,
        Op::Iota(_) => 3,
        Op::Unary(_) => 4,
        Op::Binary(_) => 5,
        Op::Compare(_) => 6,
        Op::Select(_) => 7,
        Op::Convert(_) => 8,
        Op::BroadcastInDim(_) => 9,
        Op::Reshape(_) => 10,
        Op::Transpose(_) => 11,
        Op::Slice(_) => 12,
        Op::Concatenate(_) => 13,
        Op::Pad(_) => 14,
        Op::Reduce(_) => 15,
        Op::DotGeneral(_) => 16,
        Op::Gather(_) => 17,
        Op::ScatterAdd(_) => 18,
        Op::Collective(_) => 19,
        Op::BitcastConvert(_) => 20,
        Op::ReducePrecision(_) => 21,
        Op::Threefry(_) => 22,
        Op::Reverse(_) => 23,
        Op::Cumulative(_) => 24,
        Op::ArgSort(_) => 25,
        Op::Scatter(_) => 26,
        Op::Convolution(_) => 27,
        Op::ReduceWindow(_) => 28,
        Op::SelectAndScatter(_) => 29,
        Op::Composite(_) => 30,
        Op::AxisIndex(_) => 31,
        Op::Roll(_) => 32,
        Op::GroupedDot(_) => 33,
        Op::GroupedOuter(_) => 34,
        Op::Microbatches(_) => 35,
        Op::HostCopy(_) => NUM_VARIANTS - 1,
    }
}

const NUM_VARIANTS: usize = 37;

#[test]
fn every_op_has_a_case() {
    let cases = cases();
    let variants: BTreeSet<usize> = cases.iter().map(|c| variant(&c.op)).collect();
    assert_eq!(variants, (0..NUM_VARIANTS).collect(), "variants of Op without a case");

    let names: BTreeSet<&str> = cases.iter().map(|c| c.op.name()).collect();
    let unary = Unary::ALL.iter().map(|op| op.name());
    let binary = Binary::ALL.iter().map(|op| op.name());
    for name in unary.chain(binary) {
        assert!(names.contains(name), "no case for '{name}'");
    }
    for reducer in Reducer::ALL {
        let used = |c: &Case| matches!(&c.op, Op::Reduce(r) if r.reducer == reducer);
        assert!(cases.iter().any(used), "no case for a reduction by '{}'", reducer.name());
        let used = |c: &Case| matches!(&c.op, Op::Cumulative(r) if r.reducer == reducer);
        assert!(cases.iter().any(used), "no case for a cumulative '{}'", reducer.name());
    }
    for combine in Combine::ALL {
        let used = |c: &Case| matches!(&c.op, Op::Scatter(s) if s.combine == combine);
        assert!(cases.iter().any(used), "no case for a scatter with '{}'", combine.name());
    }
    let collectives: BTreeSet<&str> =
        cases.iter().filter(|c| matches!(c.op, Op::Collective(_))).map(|c| c.op.name()).collect();
    assert_eq!(collectives.len(), 8, "collectives with a case: {collectives:?}");
}

/// The test above iterates over the `ALL` lists, so they must be complete and in order. The matches below do not
/// compile for a new variant until it is named.
#[test]
fn lists_of_all_functions_are_complete() {
    let last_unary = Unary::ALL.map(|op| match op {
        Unary::Negate | Unary::Exponential | Unary::ExponentialMinusOne | Unary::Log => op as usize,
        Unary::LogPlusOne | Unary::Logistic | Unary::Tanh | Unary::Sqrt | Unary::Rsqrt => op as usize,
        Unary::Cbrt | Unary::Sine | Unary::Cosine | Unary::Tan | Unary::Erf | Unary::Erfc => op as usize,
        Unary::Abs | Unary::Sign | Unary::Floor | Unary::Ceil | Unary::RoundNearestEven => op as usize,
        Unary::RoundNearestAfz | Unary::Not | Unary::IsFinite | Unary::PopulationCount => op as usize,
        Unary::CountLeadingZeros => op as usize,
        Unary::StopGradient => Unary::ALL.len() - 1,
    });
    assert_eq!(last_unary.to_vec(), (0..Unary::ALL.len()).collect::<Vec<_>>());
    let last_binary = Binary::ALL.map(|op| match op {
        Binary::Add | Binary::Subtract | Binary::Multiply | Binary::Divide | Binary::Maximum => op as usize,
        Binary::Minimum | Binary::Power | Binary::Remainder | Binary::Atan2 | Binary::And => op as usize,
        Binary::Or | Binary::Xor | Binary::ShiftLeft | Binary::ShiftRightLogical => op as usize,
        Binary::ShiftRightArithmetic => Binary::ALL.len() - 1,
    });
    assert_eq!(last_binary.to_vec(), (0..Binary::ALL.len()).collect::<Vec<_>>());
    let last_reducer = Reducer::ALL.map(|op| match op {
        Reducer::Sum | Reducer::Product | Reducer::Max | Reducer::Min | Reducer::And => op as usize,
        Reducer::Or => Reducer::ALL.len() - 1,
    });
    assert_eq!(last_reducer.to_vec(), (0..Reducer::ALL.len()).collect::<Vec<_>>());
    let last_combine = Combine::ALL.map(|op| match op {
        Combine::Replace | Combine::Multiply | Combine::Minimum => op as usize,
        Combine::Maximum => Combine::ALL.len() - 1,
    });
    assert_eq!(last_combine.to_vec(), (0..Combine::ALL.len()).collect::<Vec<_>>());
    let last_word = ThreefryWord::ALL.map(|op| match op {
        ThreefryWord::First | ThreefryWord::Second => op as usize,
        ThreefryWord::Xor => ThreefryWord::ALL.len() - 1,
    });
    assert_eq!(last_word.to_vec(), (0..ThreefryWord::ALL.len()).collect::<Vec<_>>());
}

#[test]
fn inferred_types_are_the_expected_ones() {
    for case in cases() {
        assert_eq!(case.op.infer(&case.types()), Ok(case.result.clone()), "{}", case.label());
    }
}

#[test]
fn reference_results_have_the_inferred_type() {
    for (case, mut rng) in cases().into_iter().zip(numbers::Rng::sequence(1)) {
        if matches!(case.op, Op::Collective(_)) {
            continue; // Its result depends on all devices; reshard tests run it.
        }
        let operands = case.random_operands(&mut rng);
        let result = case.op.eval(&operands.iter().collect::<Vec<_>>(), &case.result);
        assert_eq!(result.ty, case.result, "{}", case.label());
        assert_eq!(result.data.len() as u64, case.result.elements(), "{}", case.label());
        let in_range = |v: &f64| case.result.dtype.is_float() || case.result.dtype.wrap(*v) == *v;
        assert!(result.data.iter().all(in_range), "{}: {:?}", case.label(), result.data);
    }
}

/// Intermediate values of more than 53 bits keep all bits until they wrap.
#[test]
fn integers_are_exact_until_they_wrap() {
    let of = |op: Op, operands: &[(&str, &[f64])]| -> Vec<f64> {
        let tensors: Vec<Tensor> =
            operands.iter().map(|(t, data)| Tensor::new(crate::testing::ty(t), data.to_vec())).collect();
        let types: Vec<&TensorType> = tensors.iter().map(|t| &t.ty).collect();
        let result = op.infer(&types).expect("a type");
        op.eval(&tensors.iter().collect::<Vec<_>>(), &result).data
    };
    let (a, b) = (2147483647.0, 1234567891.0);
    let binary = |op: Binary, ty: &str, x: f64, y: f64| of(Op::Binary(op), &[(ty, &[x]), (ty, &[y])])[0];
    // (2^31 - 1) * b = 2^31 * b - b, and b is odd.
    assert_eq!(binary(Binary::Multiply, "i32[1]", a, b), 2147483648.0 - b);
    assert_eq!(binary(Binary::Multiply, "u32[1]", a, b), 2147483648.0 - b);
    assert_eq!(binary(Binary::Power, "u32[1]", 3.0, 41.0), f64::from(3u32.wrapping_pow(41)));
    assert_eq!(binary(Binary::Power, "i64[1]", 3.0, 64.0), 3i64.wrapping_pow(64) as f64);
    assert_eq!(binary(Binary::Add, "i64[1]", 2f64.powi(62), 2f64.powi(62)), -(2f64.powi(63)));
    assert_eq!(binary(Binary::Divide, "i32[1]", -2147483648.0, -1.0), -2147483648.0);
    let rows: (&str, &[f64]) = ("u64[3]", &[4294967295.0, 4294967295.0, 2.0]);
    let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![0], rhs_contract: vec![0] };
    // 2 (2^32 - 1)^2 + 4 = 2^65 - 2^34 + 6.
    assert_eq!(of(Op::DotGeneral(dot), &[rows, rows]), [18446744056529682438u64 as f64]);
    let product = Op::Reduce(Reduce { reducer: Reducer::Product, dims: vec![0] });
    let x: (&str, &[f64]) = ("i64[4]", &[3037000501.0, 3037000501.0, 4294967296.0, 0.0]);
    assert_eq!(of(product.clone(), &[x]), [0.0]);
    let x: (&str, &[f64]) = ("i64[3]", &[3037000501.0, 3037000501.0, 4294967296.0]);
    let wrapped = 3037000501i64.wrapping_mul(3037000501).wrapping_mul(1 << 32);
    assert_eq!(of(product, &[x]), [wrapped as f64]);
    let running = Op::Cumulative(Cumulative { reducer: Reducer::Product, dim: 0, reverse: false });
    assert_eq!(of(running, &[x])[2], wrapped as f64);
    assert_eq!(of(Op::Unary(Unary::Not), &[("u64[1]", &[0.0])]), [u64::MAX as f64]);
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    for case in cases() {
        let mut more: Vec<&TensorType> = case.types();
        let extra = TensorType::new(DType::F32, [7, 5, 3, 2, 2]);
        more.push(&extra);
        // The second operand, which the copy waits for, is optional.
        let waits = |operands: usize| matches!(case.op, Op::HostCopy(_)) && case.operands.len() == operands;
        assert!(waits(1) || case.op.infer(&more).is_err(), "{} took one operand more", case.label());
        let masked = matches!(&case.op, Op::Composite(_) if case.op.name() == "attention" && case.operands.len() == 4);
        if !case.operands.is_empty() && !matches!(case.op, Op::Concatenate(_)) && !masked && !waits(2) {
            let fewer = &more[..case.operands.len() - 1];
            assert!(case.op.infer(fewer).is_err(), "{} took one operand less", case.label());
        }
    }
}

#[test]
fn an_op_resized_to_its_own_shapes_is_unchanged() {
    for case in cases() {
        assert_eq!(case.op.resized(&case.shapes(), &case.result.shape), case.op, "{}", case.label());
    }
}

/// Scales one parallel factor at a time, as another batch size does.
#[test]
fn an_op_resized_along_a_parallel_factor_gives_the_resized_type() {
    let mut checked = 0;
    for case in cases() {
        let rule = case.op.rule(&case.types(), &case.result);
        for (f, factor) in rule.factors.iter().enumerate() {
            let follows = rule.windows.iter().any(|w| w.followers.contains(&(f as u8)));
            if factor.kind != crate::rule::FactorKind::Parallel || factor.size == 0 || follows {
                continue;
            }
            for scale in [2, 3] {
                let resize = |dims: &Vec<Vec<u8>>, shape: &[u64]| -> Vec<u64> {
                    let power = |dim: &Vec<u8>| dim.iter().filter(|&&g| g as usize == f).count() as u32;
                    dims.iter().zip(shape).map(|(d, &size)| size * u64::pow(scale, power(d))).collect()
                };
                let operands: Vec<TensorType> = rule
                    .operands
                    .iter()
                    .zip(&case.operands)
                    .map(|(dims, ty)| ty.with_shape(resize(dims, &ty.shape)))
                    .collect();
                let result = case.result.with_shape(resize(&rule.result, &case.result.shape));
                let shapes: Vec<&[u64]> = operands.iter().map(|t| t.shape.as_slice()).collect();
                let op = case.op.resized(&shapes, &result.shape);
                let types: Vec<&TensorType> = operands.iter().collect();
                assert_eq!(op.infer(&types), Ok(result), "{}: factor {f} times {scale}", case.label());
                checked += 1;
            }
        }
    }
    assert!(checked > 200, "only {checked} resizes were checked");
}

/// Some operations are not counted as floating-point ones, but take time where an op is evaluated.
#[test]
fn work_counts_all_that_is_evaluated() {
    for case in cases() {
        let (work, flop) = (case.op.work(&case.types(), &case.result), case.op.flop(&case.types(), &case.result));
        assert!(work >= flop.max(case.result.elements()), "{}", case.label());
    }
    let dim = WindowDim { size: 1 << 10, pad_low: 1 << 9, pad_high: (1 << 9) - 1, ..WindowDim::one() };
    let image = ImageDims { batch: 0, feature: 1, spatial: vec![2, 3] };
    let dilated = Op::Convolution(Convolution {
        lhs: image.clone(),
        rhs: KernelDims { input: 1, output: 0, spatial: vec![2, 3] },
        result: image,
        window: vec![WindowDim { base_dilation: 1 << 39, ..dim }; 2],
        feature_groups: 1,
        batch_groups: 1,
    });
    let f32s = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let groups = TensorType::new(DType::I32, [1 << 10]);
    let spread = Op::GroupedDot(GroupedDot { contract: 1, of: Some(1 << 20) });
    let taken = Op::GroupedOuter(GroupedOuter { groups: 1, of: Some(1 << 20) });
    for (op, operands) in [
        (dilated, vec![f32s(&[1, 1, 1, 1]), f32s(&[1, 1, 1 << 10, 1 << 10])]),
        (spread, vec![f32s(&[1 << 10, 32]), f32s(&[1, 32, 32]), groups.clone()]),
        (taken, vec![f32s(&[1 << 10, 32]), f32s(&[1 << 10, 32]), groups]),
    ] {
        let operands: Vec<&TensorType> = operands.iter().collect();
        let result = op.infer(&operands).expect("a result");
        assert!(op.flop(&operands, &result) < 1 << 10, "{}", op.name());
        assert!(op.work(&operands, &result) >= 1 << 20, "{}", op.name());
    }
}

#[test]
fn groups_without_elements_take_no_memory() {
    let op = Op::GroupedOuter(GroupedOuter { groups: 1 << 40, of: None });
    let ty = |dtype, shape: &[u64]| TensorType::new(dtype, shape);
    let operands = [ty(DType::F32, &[3, 0]), ty(DType::F32, &[3, 2]), ty(DType::I32, &[3])];
    let result = op.infer(&operands.iter().collect::<Vec<_>>()).expect("a result");
    let tensors = operands.map(|ty| Tensor::splat(ty, 0.0));
    assert!(op.eval(&tensors.iter().collect::<Vec<_>>(), &result).data.is_empty());
}
