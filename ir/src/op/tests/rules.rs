//! Tests sharding rules against semantics: every strategy that a rule offers, on several meshes.
//!
//! Random operands are split as the strategy says, including partial sums. All devices run the local ops. Their results
//! must combine to the result of the whole op.

use super::numbers::{Rng, difference, shard_randomly};
use super::*;
use crate::reshard::Collective;
use crate::rule::{AxisUse, FactorKind, Strategy};
use crate::sharding::Sharding;

fn meshes() -> Vec<Mesh> {
    vec![
        Mesh::new(&[("a", 2)]),
        Mesh::new(&[("a", 2), ("b", 2)]),
        Mesh::new(&[("a", 3)]),
        Mesh::new(&[("a", 2), ("b", 3)]),
    ]
}

/// The block counts to try for each factor.
fn outers(rule: &ShardingRule) -> Vec<Vec<u64>> {
    rule.factors.iter().map(|f| [2, 3].into_iter().filter(|o| f.size % o == 0).collect()).collect()
}

#[test]
fn factors_multiply_to_the_sizes_of_dimensions() {
    for case in cases().iter().filter(|c| !matches!(c.op, Op::Collective(_) | Op::HostCopy(_))) {
        let rule = case.op.rule(&case.types(), &case.result);
        assert_eq!(rule.operands.len(), case.operands.len(), "{}", case.label());
        let tensors = rule.operands.iter().zip(&case.operands).chain([(&rule.result, &case.result)]);
        for (dims, ty) in tensors {
            assert_eq!(dims.len(), ty.rank(), "{}", case.label());
            for (factors, &size) in dims.iter().zip(&ty.shape) {
                let product: u64 = factors.iter().map(|&f| rule.factors[f as usize].size).product();
                assert_eq!(product, size, "{}", case.label());
            }
        }
        for set in &rule.linear {
            assert!(set.iter().all(|&o| (o as usize) < case.operands.len()), "{}", case.label());
        }
        for &f in &rule.contiguous {
            assert!((f as usize) < rule.factors.len(), "{}", case.label());
        }
        // A reduction factor is not in the result, and a parallel one is.
        for (f, factor) in rule.factors.iter().enumerate() {
            let in_result = rule.result.iter().flatten().any(|&g| g as usize == f);
            match factor.kind {
                FactorKind::Parallel => assert!(in_result, "{}: factor {f}", case.label()),
                FactorKind::Reduction(_) => assert!(!in_result, "{}: factor {f}", case.label()),
                FactorKind::Whole => {}
            }
        }
    }
}

/// Runs one strategy and returns the difference between its result and the whole op's.
fn run_strategy(case: &Case, rule: &ShardingRule, strategy: &Strategy, mesh: &Mesh, rng: &mut Rng) -> Option<String> {
    let whole = case.random_operands(rng);
    let expected = case.op.eval(&whole.iter().collect::<Vec<_>>(), &case.result);
    let shardings = rule.shardings(strategy, mesh);
    let tensors = shardings.operands.iter().zip(&case.operands).chain([(&shardings.result, &case.result)]);
    for (sharding, ty) in tensors {
        if !sharding.is_valid(&ty.shape, mesh) {
            return Some(format!("{} is not valid for {ty}", sharding.display(mesh)));
        }
    }

    let mut graph = Graph::new("local");
    let mut parts: Vec<Vec<Tensor>> = Vec::new();
    for (tensor, sharding) in whole.iter().zip(&shardings.operands) {
        let ty = sharding.local_type(&tensor.ty, mesh);
        graph.emit(Op::Input(Input { name: format!("x{}", parts.len()), ty }), &[]);
        parts.push(shard_randomly(tensor, sharding, mesh, rng));
    }
    let mut cx = Local {
        operands: graph.values().collect(),
        graph: &mut graph,
        mesh,
        operand_types: case.operands.clone(),
        result_shape: shardings.result.local_shape(mesh),
        factor_axes: strategy.factor_axes(rule.factors.len()),
        fused_loss: true,
    };
    let result = case.op.local(&mut cx);
    let local_type = shardings.result.local_type(&case.result, mesh);
    if graph.ty(result) != &local_type {
        return Some(format!("local type {}, but the sharding says {local_type}", graph.ty(result)));
    }
    let values = crate::interpret::run_mesh(&graph, mesh, |v, device| match parts.get(v.index()) {
        Some(part) => part[device as usize].clone(),
        // The op itself is a leaf: a parameter or an input.
        None => crate::interpret::shard(&expected, &shardings.result, mesh, device),
    });
    let on_devices = &values[result.index()];
    for device in 0..mesh.num_devices() {
        let first = first_replica(&shardings.result, mesh, device);
        let pair = (&on_devices[device as usize], &on_devices[first as usize]);
        if let Some(difference) = difference(pair.0, pair.1, 1e-9) {
            return Some(format!("devices {device} and {first} should hold the same, but {difference}"));
        }
    }
    let together = crate::interpret::unshard(on_devices, &case.result, &shardings.result, mesh);
    difference(&together, &expected, 1e-9)
}

/// The device with the same values as `device` that has position 0 along all replicated axes.
fn first_replica(sharding: &Sharding, mesh: &Mesh, device: u32) -> u32 {
    let coordinates = mesh.coordinates(device);
    let used = |axis: AxisId| sharding.split_axes().any(|a| a == axis) || sharding.partial.iter().any(|p| p.0 == axis);
    mesh.axis_ids().filter(|&a| used(a)).map(|a| coordinates[a.0 as usize] * mesh.stride(a)).sum()
}

#[test]
fn every_strategy_computes_what_the_whole_op_does() {
    let (mut strategies, mut partial, mut blocked) = (0, 0, 0);
    let mut failures = Vec::new();
    for (case, mut rng) in cases().into_iter().zip(Rng::sequence(2)) {
        if matches!(case.op, Op::Collective(_) | Op::AxisIndex(_) | Op::HostCopy(_)) {
            continue; // Local already: they have no rule.
        }
        let rule = case.op.rule(&case.types(), &case.result);
        for mesh in meshes() {
            for strategy in rule.strategies(&mesh, &outers(&rule), true) {
                strategies += 1;
                partial += strategy.0.iter().any(|u| matches!(u, AxisUse::Partial { .. })) as usize;
                blocked += strategy.0.iter().any(|u| matches!(u, AxisUse::Factor { outer: 2.., .. })) as usize;
                if let Some(difference) = run_strategy(&case, &rule, &strategy, &mesh, &mut rng) {
                    failures.push(format!("{} with {strategy:?} on {mesh}: {difference}", case.label()));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures[..failures.len().min(20)].join("\n"));
    // Guards against changes elsewhere that would leave this test without cases.
    assert!(strategies > 10_000 && partial > 1_000 && blocked > 1_000, "{strategies}, {partial}, {blocked}");
}

/// The strategies that rules offer for well-known ops: Megatron's splits, vocabulary-parallel embedding, fused q/k/v.
#[test]
fn well_known_splits_are_offered() {
    let mesh = Mesh::new(&[("tensor", 2)]);
    let offers = |op: Op, operands: &[&str], expected: &str| {
        let types: Vec<TensorType> = operands.iter().map(|t| crate::testing::ty(t)).collect();
        let types: Vec<&TensorType> = types.iter().collect();
        let result = op.infer(&types).unwrap_or_else(|e| panic!("{op:?} {e}"));
        let rule = op.rule(&types, &result);
        let printed = |s: &Strategy| {
            let shardings = rule.shardings(s, &mesh);
            let operands: Vec<String> = shardings.operands.iter().map(|o| o.display(&mesh).to_string()).collect();
            format!("{} -> {}", operands.join(" "), shardings.result.display(&mesh))
        };
        let offered: Vec<String> = rule.strategies(&mesh, &[], false).iter().map(printed).collect();
        assert!(offered.iter().any(|o| o == expected), "{expected} is not in\n{}", offered.join("\n"));
    };
    let dot = || {
        Op::DotGeneral(DotGeneral {
            lhs_batch: vec![],
            rhs_batch: vec![],
            lhs_contract: vec![1],
            rhs_contract: vec![0],
        })
    };
    offers(dot(), &["f32[4,6]", "f32[6,8]"], "[{}, {}] [{}, {tensor}] -> [{}, {tensor}]");
    offers(dot(), &["f32[4,6]", "f32[6,8]"], "[{}, {tensor}] [{tensor}, {}] -> [{}, {}] partial{sum: tensor}");
    let third = Op::Slice(Slice { start: vec![0, 4], limit: vec![2, 8], stride: vec![1, 1] });
    offers(third, &["f32[2,12]"], "[{}, {3, 4: tensor}] -> [{}, {tensor}]");
    let heads = Op::Reshape(Reshape { shape: vec![2, 3, 4, 8] });
    offers(heads, &["f32[2,96]"], "[{}, {3, 32: tensor}] -> [{}, {}, {tensor}, {}]");
    // Neither side's dimensions divide the other's, but the major common factor can be split.
    offers(Op::Reshape(Reshape { shape: vec![6, 4] }), &["f32[4,6]"], "[{tensor}, {}] -> [{tensor}, {}]");
    let last = Op::Pad(Pad { low: vec![0, 8], high: vec![0, 0], interior: vec![0, 0] });
    offers(last, &["f32[2,4]", "f32[]"], "[{}, {tensor}] [] -> [{}, {3, 4: tensor}]");
    let joined = Op::Concatenate(Concatenate { dim: 0 });
    offers(joined, &["f32[4]", "f32[4]"], "[{tensor}] [{tensor}] -> [{2, 4: tensor}]");
    let embedding = GatherDims {
        offset_dims: vec![1],
        collapsed_slice_dims: vec![0],
        operand_batching_dims: vec![],
        indices_batching_dims: vec![],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![1, 6],
    };
    let gather = Op::Gather(Gather { dims: embedding, out_of_bounds: OutOfBounds::Clamp });
    offers(gather, &["f32[12,6]", "i32[4]"], "[{tensor}, {}] [{}] -> [{}, {}] partial{sum: tensor}");
}

/// Rules number factors and operands by `u8`. Whatever exceeds that is refused or not offered, and never wraps.
#[test]
fn long_concatenations_keep_to_the_limits_of_rules() {
    let piece = crate::testing::ty("f32[2]");
    let many = vec![&piece; 300];
    let concatenate = Op::Concatenate(Concatenate { dim: 0 });
    let result = concatenate.infer(&many).expect("300 equal pieces");
    let rule = concatenate.rule(&many, &result);
    assert_eq!((rule.factors.len(), rule.linear.len(), rule.operands.len()), (2, 0, 300));
    let sizes: Vec<TensorType> = (1..=300).map(|n| crate::testing::ty(&format!("f32[{n}]"))).collect();
    let all: Vec<&TensorType> = sizes.iter().collect();
    assert!(matches!(concatenate.infer(&all), Err(ShapeError::Attribute(_))));
    let some = concatenate.infer(&all[..200]).expect("200 pieces");
    assert_eq!(concatenate.rule(&all[..200], &some).factors.len(), 201);
}

/// Sizes and attributes at the ends of their ranges are refused or counted, and never overflow.
#[test]
fn extreme_attributes_do_not_overflow() {
    let square = crate::testing::ty("f32[16777216,16777216]");
    let dot = Op::DotGeneral(DotGeneral {
        lhs_batch: vec![],
        rhs_batch: vec![],
        lhs_contract: vec![1],
        rhs_contract: vec![0],
    });
    let result = dot.infer(&[&square, &square]).expect("a product");
    assert_eq!(dot.flop(&[&square, &square], &result), u64::MAX);

    let (one, scalar) = (crate::testing::ty("f32[1]"), crate::testing::ty("f32[]"));
    for pad in [
        Pad { low: vec![i64::MIN], high: vec![i64::MAX], interior: vec![0] },
        Pad { low: vec![0], high: vec![0], interior: vec![u64::MAX] },
    ] {
        assert!(matches!(Op::Pad(pad).infer(&[&one, &scalar]), Err(ShapeError::Attribute(_))));
    }

    let mesh = Mesh::new(&[("a", u32::MAX)]);
    let axes = vec![AxisId(0)];
    let gather = Op::collective(Collective::AllGather { axes: axes.clone(), dim: 0, outer: 1 }, &mesh);
    assert!(matches!(gather.infer(&[&square]), Err(ShapeError::TooLarge { .. })));
    let slice = Op::collective(Collective::LocalSlice { axes, dim: 0, outer: u64::MAX }, &mesh);
    assert!(matches!(slice.infer(&[&square]), Err(ShapeError::SizesDiffer { .. })));
    for (axes, mesh) in [
        (vec![AxisId(1)], Mesh::new(&[("a", 2)])),
        (vec![AxisId(0), AxisId(0)], Mesh::new(&[("a", 2)])),
        (vec![AxisId(0)], Mesh::new(&[("a", 0)])),
        (vec![AxisId(0)], Mesh::new(&[("a", u32::MAX), ("b", 2)])),
    ] {
        let reduce = Op::collective(Collective::AllReduce { axes: axes.clone(), reducer: Reducer::Sum }, &mesh);
        assert!(reduce.infer(&[&one]).is_err(), "{reduce:?}");
        assert!(Op::AxisIndex(AxisIndex { axes, mesh, dtype: DType::I32 }).infer(&[]).is_err());
    }
}

/// Integer functions on values at which an `f64` is close to its limits.
#[test]
fn integers_wrap_exactly() {
    let power = |a, b, dtype| Binary::Power.apply(a, b, dtype);
    assert_eq!(power(3.0, 40.0, DType::I32), 3u64.wrapping_pow(40) as i32 as f64);
    assert_eq!(power(7.0, 255.0, DType::U8), 7u8.wrapping_pow(255) as f64);
    assert_eq!(power(-1.0, -3.0, DType::I32), -1.0);
    assert_eq!(power(0.0, 0.0, DType::I32), 1.0);
    assert_eq!(power(2.0, -1.0, DType::I32), 0.0);
    let ones = Reducer::And.neutral(DType::U64);
    assert_eq!(Binary::And.apply(ones, 12.0, DType::U64), 12.0);
    assert_eq!(Unary::Not.apply(Unary::Not.apply(5.0, DType::U8), DType::U8), 5.0);
}
