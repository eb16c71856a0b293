//! Gradients against central finite differences, in f64.

use super::numbers::{Rng, close, random};
use super::*;

/// The loss is the sum of the result times fixed random weights, so these weights are the result's cotangent.
#[test]
fn gradients_agree_with_finite_differences() {
    let (mut checked, mut zero) = (0, 0);
    for (case, mut rng) in cases().into_iter().zip(Rng::sequence(3)) {
        if !case.result.dtype.is_float() || matches!(case.op, Op::Collective(_)) {
            continue;
        }
        if matches!(&case.op, Op::ReducePrecision(r) if r.mantissa_bits < 23) {
            continue; // A staircase, through which the cotangent passes; see below.
        }
        if case.op == Op::Unary(Unary::StopGradient) {
            continue; // Its gradient is zero by definition and not as a limit of differences; see below.
        }
        let operands = case.random_operands(&mut rng);
        let weights = random(&case.result, (-2.0, 2.0), (0, 1), &mut rng);
        let gradients = gradients(&case, &operands, &weights);
        assert_eq!(gradients.len(), operands.len(), "{}", case.label());
        for (i, gradient) in gradients.iter().enumerate() {
            if !case.operands[i].dtype.is_float() {
                assert!(gradient.is_none(), "{}: operand {i} has no cotangent", case.label());
                continue;
            }
            let by_differences = differences(&case, &operands, &weights, i);
            let zeros = vec![0.0; by_differences.len()];
            if let Some(gradient) = gradient {
                assert_eq!(gradient.ty, case.operands[i].cotangent(), "{}: operand {i}", case.label());
                checked += 1;
            } else {
                zero += 1;
            }
            let gradient = gradient.as_ref().map_or(&zeros, |g| &g.data);
            for (at, (&g, &d)) in gradient.iter().zip(&by_differences).enumerate() {
                assert!(close(g, d, 1e-6), "{}: operand {i}, element {at}: {g}, not {d}", case.label());
            }
        }
    }
    assert!(checked > 80 && zero > 3, "{checked} gradients, {zero} zeros");
}

#[test]
fn nothing_flows_back_through_a_stop() {
    let stops: Vec<Case> = cases().into_iter().filter(|c| c.op == Op::Unary(Unary::StopGradient)).collect();
    assert!(!stops.is_empty());
    for (case, mut rng) in stops.into_iter().zip(Rng::sequence(4)) {
        let operands = case.random_operands(&mut rng);
        let weights = random(&case.result, (-2.0, 2.0), (0, 1), &mut rng);
        assert_eq!(case.op.eval(&[&operands[0]], &case.result).data, operands[0].data);
        assert_eq!(gradients(&case, &operands, &weights), [None]);
    }
}

/// The result of [`Operator::gradient`] for each operand, computed by the interpreter.
fn gradients(case: &Case, operands: &[Tensor], weights: &Tensor) -> Vec<Option<Tensor>> {
    let mut graph = Graph::new("gradient");
    let input = |name: String, ty: &TensorType| Op::Input(Input { name, ty: ty.clone() });
    let mut leaves = Vec::new();
    for (i, ty) in case.operands.iter().enumerate() {
        leaves.push(graph.emit(input(format!("x{i}"), ty), &[]));
    }
    let result = graph.emit(case.op.clone(), &leaves);
    let cotangent = graph.emit(input("weights".to_string(), &case.result), &[]);
    let wanted: Vec<bool> = case.operands.iter().map(|t| t.dtype.is_float()).collect();
    let mut cx =
        Gradient { graph: &mut graph, operands: &leaves, result, cotangent, wanted: &wanted, fused_loss: true };
    let gradients = case.op.gradient(&mut cx);
    let values = crate::interpret::run_all(&graph, |v| match operands.get(v.index()) {
        Some(operand) => operand.clone(),
        None if v == cotangent => weights.clone(),
        None => Tensor::splat(graph.ty(v).clone(), 0.0),
    });
    gradients.iter().map(|g| g.map(|v| values[v.index()].clone())).collect()
}

fn differences(case: &Case, operands: &[Tensor], weights: &Tensor, which: usize) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut operands = operands.to_vec();
    let loss = |operands: &[Tensor]| -> f64 {
        let result = case.op.eval(&operands.iter().collect::<Vec<_>>(), &case.result);
        result.data.iter().zip(&weights.data).map(|(r, w)| if *w == 0.0 { 0.0 } else { r * w }).sum()
    };
    (0..operands[which].data.len())
        .map(|at| {
            let here = operands[which].data[at];
            operands[which].data[at] = here + STEP;
            let above = loss(&operands);
            operands[which].data[at] = here - STEP;
            let below = loss(&operands);
            operands[which].data[at] = here;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

/// The maximum occurs twice in one row. Both elements get half of the cotangent, as in JAX.
#[test]
fn ties_share_the_cotangent() {
    let tie = Case {
        op: Op::Reduce(Reduce { reducer: Reducer::Max, dims: vec![1] }),
        operands: vec![crate::testing::ty("f32[2,3]")],
        result: crate::testing::ty("f32[2]"),
        reals: (0.0, 1.0),
        integers: (0, 1),
    };
    let x = Tensor::new(crate::testing::ty("f32[2,3]"), vec![1.0, 3.0, 3.0, 5.0, 4.0, 2.0]);
    let weights = Tensor::new(crate::testing::ty("f32[2]"), vec![2.0, 7.0]);
    let gradient = gradients(&tie, &[x], &weights).remove(0).map(|g| g.data);
    assert_eq!(gradient, Some(vec![0.0, 1.0, 1.0, 7.0, 0.0, 0.0]));

    let maximum = Case {
        op: Op::Binary(Binary::Maximum),
        operands: vec![crate::testing::ty("f32[3]"); 2],
        result: crate::testing::ty("f32[3]"),
        reals: (0.0, 1.0),
        integers: (0, 1),
    };
    let a = Tensor::new(crate::testing::ty("f32[3]"), vec![1.0, 2.0, 3.0]);
    let b = Tensor::new(crate::testing::ty("f32[3]"), vec![1.0, 5.0, -3.0]);
    let weights = Tensor::new(crate::testing::ty("f32[3]"), vec![2.0, 7.0, 9.0]);
    let found: Vec<_> = gradients(&maximum, &[a, b], &weights).into_iter().map(|g| g.map(|g| g.data)).collect();
    assert_eq!(found, [Some(vec![1.0, 0.0, 9.0]), Some(vec![1.0, 7.0, 0.0])]);
}

#[test]
fn reduced_precision_rounds_the_cotangent() {
    let ty = crate::testing::ty("f32[3]");
    let case = Case {
        op: Op::ReducePrecision(ReducePrecision { exponent_bits: 5, mantissa_bits: 2 }),
        operands: vec![ty.clone()],
        result: ty.clone(),
        reals: (0.0, 1.0),
        integers: (0, 1),
    };
    let weights = Tensor::new(ty.clone(), vec![1.25, 1.1, 1e9]);
    let found = gradients(&case, &[Tensor::splat(ty, 0.3)], &weights).remove(0).map(|g| g.data);
    assert_eq!(found, Some(vec![1.25, 1.0, f64::INFINITY]));
}

/// Cotangents that finite differences cannot show: elements are equal, or several meet at one place.
#[test]
fn cotangents_go_to_the_elements_that_were_taken() {
    let of = |op: Op, operands: &[(&str, &[f64])], weights: &[f64]| -> Vec<Option<Vec<f64>>> {
        let tensors: Vec<Tensor> =
            operands.iter().map(|(t, data)| Tensor::new(crate::testing::ty(t), data.to_vec())).collect();
        let types: Vec<TensorType> = tensors.iter().map(|t| t.ty.clone()).collect();
        let result = op.infer(&types.iter().collect::<Vec<_>>()).expect("a type");
        let weights = Tensor::new(result.clone(), weights.to_vec());
        let case = Case { op, operands: types, result, reals: (0.0, 1.0), integers: (0, 1) };
        gradients(&case, &tensors, &weights).into_iter().map(|g| g.map(|g| g.data)).collect()
    };
    let running = |reverse| Op::Cumulative(Cumulative { reducer: Reducer::Max, dim: 0, reverse });
    let x: (&str, &[f64]) = ("f32[5]", &[2.0, 1.0, 2.0, 3.0, 0.0]);
    let weights = [1.0, 10.0, 100.0, 1000.0, 10000.0];
    assert_eq!(of(running(false), &[x], &weights), [Some(vec![11.0, 0.0, 100.0, 11000.0, 0.0])]);
    assert_eq!(of(running(true), &[x], &weights), [Some(vec![0.0, 0.0, 0.0, 1111.0, 10000.0])]);

    let dims = GatherDims {
        offset_dims: vec![],
        collapsed_slice_dims: vec![0],
        operand_batching_dims: vec![],
        indices_batching_dims: vec![],
        start_index_map: vec![0],
        index_vector_dim: 1,
        slice_sizes: vec![1],
    };
    let scatter = |combine| Op::Scatter(Scatter { dims: dims.clone(), combine });
    // Two updates at place 1, one equal to the operand at place 0, and one that is dropped.
    let operands: [(&str, &[f64]); 3] =
        [("f32[3]", &[4.0, 2.0, 5.0]), ("i32[4]", &[1.0, 0.0, 9.0, 1.0]), ("f32[4]", &[3.0, 4.0, 7.0, 3.0])];
    let weights = [1.0, 10.0, 100.0];
    let found = |combine| of(scatter(combine), &operands, &weights);
    let expected = |x: [f64; 3], u: [f64; 4]| vec![Some(x.to_vec()), None, Some(u.to_vec())];
    assert_eq!(found(Combine::Replace), expected([0.0, 0.0, 100.0], [0.0, 1.0, 0.0, 10.0]));
    assert_eq!(found(Combine::Maximum), expected([0.5, 0.0, 100.0], [5.0, 0.5, 0.0, 5.0]));
    assert_eq!(found(Combine::Minimum), expected([0.5, 10.0, 100.0], [0.0, 0.5, 0.0, 0.0]));
    assert_eq!(found(Combine::Multiply), expected([4.0, 90.0, 100.0], [60.0, 4.0, 0.0, 60.0]));

    // No zero factor, one, and several in a product.
    let product = |dims: &[usize]| Op::Reduce(Reduce { reducer: Reducer::Product, dims: dims.to_vec() });
    let x: (&str, &[f64]) = ("f32[3,2]", &[2.0, 3.0, 0.0, 5.0, 0.0, 0.0]);
    assert_eq!(of(product(&[1]), &[x], &[1.0, 10.0, 100.0]), [Some(vec![3.0, 2.0, 50.0, 0.0, 0.0, 0.0])]);
    let x: (&str, &[f64]) = ("f32[3,2]", &[2.0, 3.0, 0.0, 5.0, 1e-200, 1e-200]);
    assert_eq!(
        of(product(&[1, 0]), &[("f32[3,2]", &[2.0, 3.0, 0.0, 5.0, 7.0, 1.0])], &[1.0]),
        [Some(vec![0.0, 0.0, 210.0, 0.0, 0.0, 0.0])]
    );
    // The product of the last row underflows, but those of the other factors do not.
    assert_eq!(of(product(&[1]), &[x], &[0.0, 0.0, 1.0]), [Some(vec![0.0, 0.0, 0.0, 0.0, 1e-200, 1e-200])]);
    let running = |reverse| Op::Cumulative(Cumulative { reducer: Reducer::Product, dim: 0, reverse });
    let x: (&str, &[f64]) = ("f32[4]", &[2.0, 0.0, 3.0, 0.0]);
    assert_eq!(of(running(false), &[x], &[1.0, 10.0, 100.0, 1000.0]), [Some(vec![1.0, 620.0, 0.0, 0.0])]);
    assert_eq!(of(running(true), &[x], &[1.0, 10.0, 100.0, 1000.0]), [Some(vec![0.0, 0.0, 0.0, 1300.0])]);
    let window = vec![WindowDim { size: 2, ..WindowDim::one() }];
    let pooled = Op::ReduceWindow(ReduceWindow { reducer: Reducer::Product, window });
    let x: (&str, &[f64]) = ("f32[5]", &[2.0, 0.0, 3.0, 0.0, 0.0]);
    assert_eq!(of(pooled, &[x], &[1.0, 10.0, 100.0, 1000.0]), [Some(vec![0.0, 32.0, 0.0, 300.0, 0.0])]);
    let operands: [(&str, &[f64]); 3] =
        [("f32[3]", &[4.0, 2.0, 0.0]), ("i32[4]", &[1.0, 0.0, 2.0, 1.0]), ("f32[4]", &[0.0, 0.0, 7.0, 3.0])];
    assert_eq!(of(scatter(Combine::Multiply), &operands, &weights), expected([0.0, 0.0, 700.0], [60.0, 4.0, 0.0, 0.0]));
}
