//! Tests of constructs that exports use besides real ops: complex numbers, symbolic sizes, attention in backend
//! kernels.

use super::meaning_tests::{imported, run};
use super::{import, import_with};

/// Complex numbers are pairs along a last dimension; the transform of (1, 2, 3, 4) is known.
#[test]
fn complex_numbers_are_pairs() {
    let text = "func.func @main(%x: tensor<4xf32>, %z: tensor<2xcomplex<f32>>) -> (tensor<4xf32>, tensor<4xf32>, tensor<2xf32>, tensor<4xf32>) {
        %w = stablehlo.constant dense<(0.0,1.0)> : tensor<4xcomplex<f32>>
        %o = stablehlo.constant dense<0.0> : tensor<4xf32>
        %c = stablehlo.complex %x, %o : tensor<4xcomplex<f32>>
        %f = stablehlo.fft %c, type = FFT, length = [4] : (tensor<4xcomplex<f32>>) -> tensor<4xcomplex<f32>>
        %t = stablehlo.multiply %f, %w : tensor<4xcomplex<f32>>
        %re = stablehlo.real %t : (tensor<4xcomplex<f32>>) -> tensor<4xf32>
        %im = stablehlo.imag %t : (tensor<4xcomplex<f32>>) -> tensor<4xf32>
        %a = stablehlo.abs %z : (tensor<2xcomplex<f32>>) -> tensor<2xf32>
        %h = stablehlo.fft %x, type = RFFT, length = [4] : (tensor<4xf32>) -> tensor<3xcomplex<f32>>
        %b = stablehlo.fft %h, type = IRFFT, length = [4] : (tensor<3xcomplex<f32>>) -> tensor<4xf32>
        return %re, %im, %a, %b : tensor<4xf32>, tensor<4xf32>, tensor<2xf32>, tensor<4xf32>
      }";
    let imported = imported(text);
    assert_eq!(imported.arguments[1].ty.to_string(), "f32[2,2]");
    let results = run(&imported.graph, &[&[1.0, 2.0, 3.0, 4.0], &[3.0, 4.0, 0.0, 0.0]]);
    // Multiplication by i makes the imaginary part real and negative.
    for (found, expected) in results.iter().zip([
        vec![0.0, -2.0, 0.0, 2.0],
        vec![10.0, -2.0, -2.0, -2.0],
        vec![5.0, 0.0],
        vec![1.0, 2.0, 3.0, 4.0],
    ]) {
        let near = found.iter().zip(&expected).all(|(x, y)| (x - y).abs() < 1e-6);
        assert!(near && found.len() == expected.len(), "{found:?} {expected:?}");
    }
}

/// A module as `jax.export` writes it for a symbolic batch.
#[test]
fn symbolic_sizes_are_given_by_name() {
    let text = "module { func.func public @main(%arg0: tensor<3xf32>, %arg1: tensor<?x3xf32>) -> tensor<f32> {
        %0 = stablehlo.get_dimension_size %arg1, dim = 0 : (tensor<?x3xf32>) -> tensor<i32>
        %1 = stablehlo.constant dense<1> : tensor<i32>
        %2 = stablehlo.compare GE, %0, %1, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.custom_call @shape_assertion(%2, %0) {has_side_effect = true} : (tensor<i1>, tensor<i32>) -> ()
        %3 = call @inner(%0, %arg0, %arg1) : (tensor<i32>, tensor<3xf32>, tensor<?x3xf32>) -> tensor<f32>
        return %3 : tensor<f32>
      }
      func.func private @inner(%arg0: tensor<i32> {jax.global_constant = \"b\"}, %arg1: tensor<3xf32> loc(\"params['w']\"), %arg2: tensor<?x3xf32> loc(\"tokens\")) -> tensor<f32> {
        %c = stablehlo.constant dense<3> : tensor<1xi32>
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = stablehlo.reshape %arg0 : (tensor<i32>) -> tensor<1xi32>
        %1 = stablehlo.concatenate %0, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
        %2 = stablehlo.dynamic_broadcast_in_dim %arg1, %1, dims = [1] : (tensor<3xf32>, tensor<2xi32>) -> tensor<?x3xf32>
        %3 = stablehlo.multiply %arg2, %2 : tensor<?x3xf32>
        %4 = stablehlo.dot_general %3, %arg1, contracting_dims = [1] x [0] : (tensor<?x3xf32>, tensor<3xf32>) -> tensor<?xf32>
        %5 = stablehlo.reduce(%4 init: %z) applies stablehlo.add across dimensions = [0] : (tensor<?xf32>, tensor<f32>) -> tensor<f32>
        return %5 : tensor<f32>
      } }";
    let with = |name: &str, n: u64| import_with(text, &[(name.to_string(), n)]);
    for name in ["b", "tokens.0"] {
        let imported = with(name, 5).unwrap_or_else(|e| panic!("{e}"));
        let types: Vec<_> =
            imported.arguments.iter().map(|a| (a.name.as_deref().unwrap_or(""), a.ty.to_string())).collect();
        assert_eq!(types, [("params['w']", "f32[3]".to_string()), ("tokens", "f32[5,3]".to_string())]);
        assert_eq!(imported.open_sizes[0].to_string(), "b (tokens.0)");
        assert!(!imported.open_sizes[0].chosen);
        assert_eq!(run(&imported.graph, &[&[1.0, 2.0, 3.0], &[1.0; 15]])[0], [70.0]);
    }
    assert!(import(text).is_ok_and(|imported| imported.open_sizes[0].chosen));
    let error = with("batch", 5).unwrap_err().to_string();
    assert!(error.contains("'batch'") && error.contains("b (tokens.0)"), "{error}");
}

/// cuDNN's attention has positions before heads, and gives heads before positions.
#[test]
fn fused_attention_is_attention() {
    let call = |target: &str, config: &str, ty: &str, result: &str| {
        format!(
            "func.func @main(%q: {ty}, %k: {ty}, %v: {ty}) -> {result} {{
               %0 = stablehlo.custom_call @\"{target}\"(%q, %k, %v) {{backend_config = \"{config}\", kernel_name = \"flash_attention\"}} : ({ty}, {ty}, {ty}) -> {result}
               return %0 : {result}
             }}"
        )
    };
    let v: Vec<f64> = (0..4).map(f64::from).collect();
    let run_with = |text: &str| run(&imported(text).graph, &[&[0.0; 4], &[0.0; 4], &v])[0].clone();
    // Equal scores give the mean of the values seen so far: two positions of one head of two features.
    let config = "{\\22fmha_scale\\22: 0.5, \\22mask_type\\22: \\22CAUSAL\\22}";
    let causal = call("__cudnn$fmhaSoftmax", config, "tensor<1x2x1x2xf32>", "tensor<1x1x2x2xf32>");
    assert_eq!(run_with(&causal), [0.0, 1.0, 1.0, 2.0]);
    let tpu = call("tpu_custom_call", "", "tensor<1x1x2x2xf32>", "tensor<1x1x2x2xf32>");
    assert_eq!(run_with(&tpu), [1.0, 2.0, 1.0, 2.0]);
    assert_eq!(imported(&tpu).notes.len(), 1);
    let padded = causal.replace("CAUSAL", "PADDING");
    assert!(import(&padded).unwrap_err().to_string().contains("with padding"));
}
