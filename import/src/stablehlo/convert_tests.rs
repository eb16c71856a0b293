//! Tests of the conversion to graphs: lowering of each op, errors with their places, literals, and real models.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Write as _;
use std::path::PathBuf;

use super::convert::import_limited;
use super::parse_tests::for_each_damaged;
use super::{Imported, import, parse};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret;
use altiplano_ir::op::Op;
use altiplano_ir::simplify::simplify;
use altiplano_ir::tensor::Tensor;

/// Prints one line per node that is not a leaf: `%2 = {"reduce":{...}} %0 %1 : f32[2]`.
fn show(graph: &Graph) -> String {
    let mut out = String::new();
    for value in graph.values() {
        let node = graph.node(value);
        if node.op.is_leaf() {
            continue;
        }
        let op = serde_json::to_string(&node.op).unwrap().replace('"', "");
        let operands: String = node.operands.iter().map(|operand| format!(" {operand}")).collect();
        writeln!(out, "{value} = {op}{operands} : {}", node.ty).unwrap();
    }
    let outputs = graph.outputs.iter().map(ValueId::to_string).collect::<Vec<_>>();
    write!(out, "return {}", outputs.join(" ")).unwrap();
    out
}

/// Wraps `body` with the arguments that the cases share: `%a %b %v` of floats, `%i` of integers, `%p` of
/// booleans, scalars `%s %z`.
fn function(body: &str, result: &str) -> String {
    format!(
        "func.func public @main(%a: tensor<2x3xf32>, %b: tensor<3x4xf32>, %v: tensor<3xf32>, %i: tensor<5x1xi32>, \
         %p: tensor<i1>, %s: tensor<f32>, %z: tensor<i32>) -> {result} {{\n{body}\n}}"
    )
}

fn imported(text: &str) -> Imported {
    match import(text) {
        Ok(imported) => {
            assert_eq!(imported.graph.verify(), [], "{text}");
            imported
        }
        Err(error) => panic!("{error}\n{text}"),
    }
}

fn check(body: &str, result: &str, expected: &str) {
    let text = function(&format!("{body}\nreturn %r : {result}"), result);
    assert_eq!(show(&imported(&text).graph), expected, "{body}");
}

#[test]
fn ops_become_nodes() {
    let cases = [
        ("%r = stablehlo.tanh %a : tensor<2x3xf32>", "tensor<2x3xf32>", "%7 = {unary:tanh} %0 : f32[2,3]\nreturn %7"),
        (
            "%r = stablehlo.add %a, %a : tensor<2x3xf32>",
            "tensor<2x3xf32>",
            "%7 = {binary:add} %0 %0 : f32[2,3]\nreturn %7",
        ),
        (
            "%r = chlo.square %a : tensor<2x3xf32> -> tensor<2x3xf32>",
            "tensor<2x3xf32>",
            "%7 = {binary:multiply} %0 %0 : f32[2,3]\nreturn %7",
        ),
        (
            "%r = stablehlo.compare LE, %a, %a, FLOAT : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xi1>",
            "tensor<2x3xi1>",
            "%7 = {compare:{direction:LE}} %0 %0 : bool[2,3]\nreturn %7",
        ),
        (
            "%r = stablehlo.select %p, %a, %a : tensor<i1>, tensor<2x3xf32>",
            "tensor<2x3xf32>",
            "%7 = {broadcast_in_dim:{shape:[2,3],dims:[]}} %4 : bool[2,3]\n\
             %8 = {select:{}} %7 %0 %0 : f32[2,3]\nreturn %8",
        ),
        (
            "%r = stablehlo.clamp %s, %v, %s : (tensor<f32>, tensor<3xf32>, tensor<f32>) -> tensor<3xf32>",
            "tensor<3xf32>",
            "%7 = {broadcast_in_dim:{shape:[3],dims:[]}} %5 : f32[3]\n\
             %8 = {broadcast_in_dim:{shape:[3],dims:[]}} %5 : f32[3]\n\
             %9 = {binary:maximum} %2 %7 : f32[3]\n%10 = {binary:minimum} %9 %8 : f32[3]\nreturn %10",
        ),
        (
            "%r = stablehlo.convert %a : (tensor<2x3xf32>) -> tensor<2x3xbf16>",
            "tensor<2x3xbf16>",
            "%7 = {convert:{dtype:bf16}} %0 : bf16[2,3]\nreturn %7",
        ),
        ("%r = stablehlo.convert %a : tensor<2x3xf32>", "tensor<2x3xf32>", "return %0"),
        (
            "%r = stablehlo.broadcast_in_dim %v, dims = [1] : (tensor<3xf32>) -> tensor<2x3xf32>",
            "tensor<2x3xf32>",
            "%7 = {broadcast_in_dim:{shape:[2,3],dims:[1]}} %2 : f32[2,3]\nreturn %7",
        ),
        (
            "%r = \"stablehlo.broadcast\"(%v) {broadcast_sizes = dense<2> : tensor<1xi64>} : (tensor<3xf32>) -> tensor<2x3xf32>",
            "tensor<2x3xf32>",
            "%7 = {broadcast_in_dim:{shape:[2,3],dims:[1]}} %2 : f32[2,3]\nreturn %7",
        ),
        (
            "%r = stablehlo.reshape %a : (tensor<2x3xf32>) -> tensor<6xf32>",
            "tensor<6xf32>",
            "%7 = {reshape:{shape:[6]}} %0 : f32[6]\nreturn %7",
        ),
        (
            "%r = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>",
            "tensor<3x2xf32>",
            "%7 = {transpose:{permutation:[1,0]}} %0 : f32[3,2]\nreturn %7",
        ),
        (
            "%r = \"stablehlo.transpose\"(%a) {permutation = dense<[1, 0]> : tensor<2xi64>} : (tensor<2x3xf32>) -> tensor<3x2xf32>",
            "tensor<3x2xf32>",
            "%7 = {transpose:{permutation:[1,0]}} %0 : f32[3,2]\nreturn %7",
        ),
        (
            "%r = stablehlo.slice %a [0:1, 0:3:2] : (tensor<2x3xf32>) -> tensor<1x2xf32>",
            "tensor<1x2xf32>",
            "%7 = {slice:{start:[0,0],limit:[1,3],stride:[1,2]}} %0 : f32[1,2]\nreturn %7",
        ),
        (
            "%c = stablehlo.constant dense<7> : tensor<i32>
             %r = stablehlo.dynamic_slice %v, %c, sizes = [2] : (tensor<3xf32>, tensor<i32>) -> tensor<2xf32>",
            "tensor<2xf32>",
            "%7 = {slice:{start:[1],limit:[3],stride:[1]}} %2 : f32[2]\nreturn %7",
        ),
        (
            "%r = stablehlo.concatenate %a, %a, dim = 0 : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<4x3xf32>",
            "tensor<4x3xf32>",
            "%7 = {concatenate:{dim:0}} %0 %0 : f32[4,3]\nreturn %7",
        ),
        (
            "%r = stablehlo.pad %v, %s, low = [-1], high = [2], interior = [1] : (tensor<3xf32>, tensor<f32>) -> tensor<6xf32>",
            "tensor<6xf32>",
            "%7 = {pad:{low:[-1],high:[2],interior:[1]}} %2 %5 : f32[6]\nreturn %7",
        ),
        (
            "%r = stablehlo.iota dim = 1 : tensor<2x3xi32>",
            "tensor<2x3xi32>",
            "%7 = {iota:{ty:{dtype:i32,shape:[2,3]},dim:1}} : i32[2,3]\nreturn %7",
        ),
        (
            "%r = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<2x3xf32>, tensor<3x4xf32>) -> tensor<2x4xf32>",
            "tensor<2x4xf32>",
            "%7 = {dot_general:{lhs_batch:[],rhs_batch:[],lhs_contract:[1],rhs_contract:[0]}} %0 %1 : f32[2,4]\nreturn %7",
        ),
        (
            "%r = \"stablehlo.dot_general\"(%a, %b) <{dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>, precision_config = [#stablehlo<precision DEFAULT>]}> : (tensor<2x3xf32>, tensor<3x4xf32>) -> tensor<2x4xf32>",
            "tensor<2x4xf32>",
            "%7 = {dot_general:{lhs_batch:[],rhs_batch:[],lhs_contract:[1],rhs_contract:[0]}} %0 %1 : f32[2,4]\nreturn %7",
        ),
        (
            "%r = stablehlo.dot %v, %v : (tensor<3xf32>, tensor<3xf32>) -> tensor<f64>",
            "tensor<f64>",
            "%7 = {convert:{dtype:f64}} %2 : f64[3]\n%8 = {convert:{dtype:f64}} %2 : f64[3]\n\
             %9 = {dot_general:{lhs_batch:[],rhs_batch:[],lhs_contract:[0],rhs_contract:[0]}} %7 %8 : f64[]\nreturn %9",
        ),
        (
            "%r = \"stablehlo.gather\"(%b, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1, 4>}> : (tensor<3x4xf32>, tensor<5x1xi32>) -> tensor<5x4xf32>",
            "tensor<5x4xf32>",
            "%7 = {gather:{offset_dims:[1],collapsed_slice_dims:[0],operand_batching_dims:[],indices_batching_dims:[],start_index_map:[0],index_vector_dim:1,slice_sizes:[1,4],out_of_bounds:clamp}} %1 %3 : f32[5,4]\nreturn %7",
        ),
        (
            "%r, %q = stablehlo.optimization_barrier %a, %b : tensor<2x3xf32>, tensor<3x4xf32>",
            "tensor<2x3xf32>",
            "return %0",
        ),
        (
            "%r = stablehlo.custom_call @Sharding(%a) {backend_config = \"\"} : (tensor<2x3xf32>) -> tensor<2x3xf32>",
            "tensor<2x3xf32>",
            "return %0",
        ),
        ("%r = sdy.sharding_constraint %a <@mesh, [{}, {}]> : tensor<2x3xf32>", "tensor<2x3xf32>", "return %0"),
    ];
    for (body, result, expected) in cases {
        check(body, result, expected);
    }
}

#[test]
fn reductions() {
    let reduce = |constant: &str, applies: &str| {
        let body = format!(
            "%c = stablehlo.constant dense<{constant}> : tensor<f32>
             %r = stablehlo.reduce(%a init: %c) applies stablehlo.{applies} across dimensions = [1] : (tensor<2x3xf32>, tensor<f32>) -> tensor<2xf32>"
        );
        let text = function(&format!("{body}\nreturn %r : tensor<2xf32>"), "tensor<2xf32>");
        show(&imported(&text).graph)
    };
    for (constant, applies, reducer) in [
        ("0.0", "add", "sum"),
        ("-0.0", "add", "sum"),
        ("1.0", "multiply", "product"),
        ("0xFF800000", "maximum", "max"),
        ("0x7F800000", "minimum", "min"),
    ] {
        let expected = format!("%7 = {{reduce:{{reducer:{reducer},dims:[1]}}}} %0 : f32[2]\nreturn %7");
        assert_eq!(reduce(constant, applies), expected);
    }
    assert_eq!(
        reduce("2.0", "maximum"),
        "%7 = {constant:{ty:{dtype:f32,shape:[]},values:{splat:2.0}}} : f32[]\n\
         %8 = {reduce:{reducer:max,dims:[1]}} %0 : f32[2]\n\
         %9 = {broadcast_in_dim:{shape:[2],dims:[]}} %7 : f32[2]\n\
         %10 = {binary:maximum} %8 %9 : f32[2]\nreturn %10"
    );
    // The long form, with the two arguments in the other order.
    check(
        "%c = stablehlo.constant dense<0> : tensor<i32>
         %r = stablehlo.reduce(%i init: %c) across dimensions = [0, 1] : (tensor<5x1xi32>, tensor<i32>) -> tensor<i32>
          reducer(%x: tensor<i32>, %y: tensor<i32>) {
            %0 = stablehlo.add %y, %x : tensor<i32>
            stablehlo.return %0 : tensor<i32>
          }",
        "tensor<i32>",
        "%7 = {reduce:{reducer:sum,dims:[0,1]}} %3 : i32[]\nreturn %7",
    );
    check(
        "%c = stablehlo.constant dense<false> : tensor<i1>
         %q = stablehlo.compare LT, %v, %v : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xi1>
         %r = stablehlo.reduce(%q init: %c) applies stablehlo.add across dimensions = [0] : (tensor<3xi1>, tensor<i1>) -> tensor<i1>",
        "tensor<i1>",
        "%7 = {compare:{direction:LT}} %2 %2 : bool[3]\n%8 = {reduce:{reducer:or,dims:[0]}} %7 : bool[]\nreturn %8",
    );
}

#[test]
fn scatters() {
    let scatter = |target: &str| {
        let body = format!(
            "{target}
             %u = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<5x4xf32>
             %r = \"stablehlo.scatter\"(%t, %i, %u) <{{indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, unique_indices = false}}> ({{
             ^bb0(%x: tensor<f32>, %y: tensor<f32>):
               %0 = stablehlo.add %x, %y : tensor<f32>
               stablehlo.return %0 : tensor<f32>
             }}) : (tensor<3x4xf32>, tensor<5x1xi32>, tensor<5x4xf32>) -> tensor<3x4xf32>"
        );
        let text = function(&format!("{body}\nreturn %r : tensor<3x4xf32>"), "tensor<3x4xf32>");
        show(&imported(&text).graph)
    };
    let dims = "offset_dims:[1],collapsed_slice_dims:[0],operand_batching_dims:[],indices_batching_dims:[],\
                start_index_map:[0],index_vector_dim:1,slice_sizes:[1,4],shape:[3,4]";
    let update = "%7 = {broadcast_in_dim:{shape:[5,4],dims:[]}} %5 : f32[5,4]";
    assert_eq!(
        scatter("%t = stablehlo.constant dense<0.0> : tensor<3x4xf32>"),
        format!("{update}\n%8 = {{scatter_add:{{{dims}}}}} %3 %7 : f32[3,4]\nreturn %8")
    );
    assert_eq!(
        scatter("%t = stablehlo.reshape %b : (tensor<3x4xf32>) -> tensor<3x4xf32>"),
        format!(
            "{update}\n%8 = {{scatter_add:{{{dims}}}}} %3 %7 : f32[3,4]\n%9 = {{binary:add}} %1 %8 : f32[3,4]\nreturn %9"
        )
    );
}

#[test]
fn calls_are_inlined_and_unused_ops_dropped() {
    let text = r#"
        module @jit_f {
          func.func public @main(%x: tensor<2xf32> loc("params['w']"), %unused: tensor<3xf32>, %y: tensor<2xf32> loc("y")) -> (tensor<f32>, tensor<2xf32>) {
            %0:2 = call @twice(%x, %y) : (tensor<2xf32>, tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) loc("outer")
            %1:2 = call @twice(%0#1, %0#0) : (tensor<2xf32>, tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)
            %c = stablehlo.constant dense<0.0> : tensor<f32>
            %dead = stablehlo.tanh %1#0 : tensor<2xf32>
            %key = "stablehlo.uniform_quantize"(%dead) : (tensor<2xf32>) -> tensor<2xf32>
            %2 = stablehlo.reduce(%1#1 init: %c) applies stablehlo.add across dimensions = [0] : (tensor<2xf32>, tensor<f32>) -> tensor<f32> loc("sum")
            return %2, %x : tensor<f32>, tensor<2xf32>
          }
          func.func private @twice(%x: tensor<2xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>) {
            %0 = stablehlo.add %x, %y : tensor<2xf32> loc("inner")
            %1 = stablehlo.composite "my.tanh" %0 {decomposition = @g} : (tensor<2xf32>) -> tensor<2xf32>
            return %1, %0 : tensor<2xf32>, tensor<2xf32>
          }
          func.func private @g(%x: tensor<2xf32>) -> tensor<2xf32> {
            %0 = stablehlo.tanh %x : tensor<2xf32>
            return %0 : tensor<2xf32>
          }
        }"#;
    let imported = imported(text);
    assert_eq!(
        show(&imported.graph),
        "%3 = {binary:add} %0 %2 : f32[2]\n%4 = {unary:tanh} %3 : f32[2]\n%5 = {binary:add} %3 %4 : f32[2]\n\
         %6 = {reduce:{reducer:sum,dims:[0]}} %5 : f32[]\nreturn %6 %0"
    );
    let names: Vec<&str> = imported.graph.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["params['w']", "arg1", "y", "inner", "outer", "inner", "sum"]);
    let arguments: Vec<_> = imported.arguments.iter().map(|a| (a.name.as_deref(), a.ty.to_string())).collect();
    assert_eq!(
        arguments,
        [(Some("params['w']"), "f32[2]".into()), (None, "f32[3]".into()), (Some("y"), "f32[2]".into())]
    );
    assert_eq!(imported.graph.name, "jit_f");
    assert_eq!(import(text), import(text));
}

/// Sums `(table[tokens] . w)` and adds a half.
const SMALL: &str = r#"
    func.func public @main(%table: tensor<3x2xf32>, %tokens: tensor<4xi32>) -> tensor<f32> {
      %0 = stablehlo.broadcast_in_dim %tokens, dims = [0] : (tensor<4xi32>) -> tensor<4x1xi32>
      %1 = "stablehlo.gather"(%table, %0) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 2>}> : (tensor<3x2xf32>, tensor<4x1xi32>) -> tensor<4x2xf32>
      %w = stablehlo.constant dense<[1.0, -1.0]> : tensor<2xf32>
      %2 = call @f(%1, %w) : (tensor<4x2xf32>, tensor<2xf32>) -> tensor<4xf32>
      %c = stablehlo.constant dense<0.5> : tensor<f32>
      %3 = stablehlo.reduce(%2 init: %c) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      return %3 : tensor<f32>
    }
    func.func private @f(%0: tensor<4x2xf32>, %1: tensor<2xf32>) -> tensor<4xf32> {
      %2 = stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : (tensor<4x2xf32>, tensor<2xf32>) -> tensor<4xf32>
      %3 = stablehlo.slice %2 [0:4] : (tensor<4xf32>) -> tensor<4xf32>
      return %3 : tensor<4xf32>
    }"#;

/// Conversion preserves the value of a small model.
#[test]
fn a_small_model_computes() {
    let Imported { graph, arguments, .. } = imported(SMALL);
    let data = [vec![10.0, 1.0, 20.0, 2.0, 30.0, 3.0], vec![0.0, 2.0, 2.0, 9.0]];
    let loss = interpret::run(&graph, |leaf| {
        let argument = arguments.iter().position(|argument| argument.value == leaf).unwrap();
        Tensor::new(arguments[argument].ty.clone(), data[argument].clone())
    });
    // Rows 0, 2, 2, and 2 again for the index that is clamped.
    assert_eq!(loss[0].data, [9.0 + 3.0 * 27.0 + 0.5]);
}

#[test]
fn literals_keep_their_values() {
    let value = |literal: &str, ty: &str| {
        let text = format!("func.func @f() -> {ty} {{ %c = stablehlo.constant {literal} : {ty}\n return %c : {ty} }}");
        match import(&text) {
            Ok(imported) => match &imported.graph.node(imported.graph.outputs[0]).op {
                Op::Constant(literal) => literal.to_tensor().data,
                op => panic!("{op:?}"),
            },
            Err(error) => panic!("{error}\n{text}"),
        }
    };
    let third = 1.0 / 3.0;
    let cases: &[(&str, &str, &[f64])] = &[
        ("dense<0.333333343>", "tensor<f32>", &[f64::from(third as f32)]),
        ("dense<3.333740e-01>", "tensor<f16>", &[0.333_251_953_125]),
        ("dense<3.339840e-01>", "tensor<bf16>", &[0.333_984_375]),
        ("dense<0.33333333333333331>", "tensor<f64>", &[third]),
        ("dense<0x7FF0000000000000>", "tensor<f64>", &[f64::INFINITY]),
        ("dense<0xFF800000>", "tensor<f32>", &[f64::NEG_INFINITY]),
        ("dense<0xFC00>", "tensor<f16>", &[f64::NEG_INFINITY]),
        ("dense<0xFF80>", "tensor<bf16>", &[f64::NEG_INFINITY]),
        ("dense<[1.015630e-01, -3.250000e+00]>", "tensor<2xf8E4M3FN>", &[0.1015625, -3.25]),
        ("dense<0x7C>", "tensor<f8E5M2>", &[f64::INFINITY]),
        ("dense<\"0x387F\">", "tensor<2xf8E8M0FNU>", &[f64::powi(2.0, 0x38 - 127), 1.0]),
        ("dense<1.000000e+00>", "tensor<f8E4M3FNUZ>", &[1.0]),
        ("dense<1.0>", "tensor<2xf8E5M2FNUZ>", &[1.0, 1.0]),
        ("dense<\"0x08\">", "tensor<f8E4M3B11FNUZ>", &[f64::powi(2.0, -10)]),
        ("dense<[0x38, 0x39]>", "tensor<2xf8E4M3>", &[1.0, 1.125]),
        ("dense<1.55e+01>", "tensor<f8E3M4>", &[15.5]),
        ("dense<[1, -2, 7, -8]>", "tensor<4xi4>", &[1.0, -2.0, 7.0, -8.0]),
        ("dense<\"0x0F01\">", "tensor<2xi4>", &[-1.0, 1.0]),
        ("dense<[3, 0]>", "tensor<2xui2>", &[3.0, 0.0]),
        ("dense<15>", "tensor<ui4>", &[15.0]),
        ("dense<[-2, 1]>", "tensor<2xi2>", &[-2.0, 1.0]),
        ("dense<-9007199254740992>", "tensor<i64>", &[-9_007_199_254_740_992.0]),
        ("dense<[-2147483648, 2147483647]>", "tensor<2xi32>", &[-2_147_483_648.0, 2_147_483_647.0]),
        ("dense<4294967295>", "tensor<i32>", &[-1.0]),
        ("dense<-32768>", "tensor<i16>", &[-32768.0]),
        ("dense<-128>", "tensor<i8>", &[-128.0]),
        ("dense<0xFF>", "tensor<i8>", &[-1.0]),
        ("dense<9223372036854775808>", "tensor<ui64>", &[9_223_372_036_854_775_808.0]),
        ("dense<4294967295>", "tensor<ui32>", &[4_294_967_295.0]),
        ("dense<65535>", "tensor<ui16>", &[65535.0]),
        ("dense<255>", "tensor<ui8>", &[255.0]),
        ("dense<[true, false]>", "tensor<2xi1>", &[1.0, 0.0]),
        ("dense<[[1.0, 2.0], [3.0, 4.0]]>", "tensor<2x2xf32>", &[1.0, 2.0, 3.0, 4.0]),
        ("dense<5>", "tensor<3xi32>", &[5.0, 5.0, 5.0]),
        ("dense<>", "tensor<0x3xf32>", &[]),
        ("dense<\"0x0000803F000000C0\">", "tensor<2xf32>", &[1.0, -2.0]),
        ("dense<\"0x0000803F\">", "tensor<2xf32>", &[1.0, 1.0]),
        ("dense<\"0x803F00C0\">", "tensor<2xbf16>", &[1.0, -2.0]),
        ("dense<\"0x003C00C0\">", "tensor<2xf16>", &[1.0, -2.0]),
        ("dense<\"0x000000000000F03F\">", "tensor<f64>", &[1.0]),
        ("dense<\"0x01000000FFFFFFFF\">", "tensor<2xi32>", &[1.0, -1.0]),
        ("dense<\"0x01000000FFFFFFFF\">", "tensor<2xui32>", &[1.0, 4_294_967_295.0]),
        ("dense<\"0xFEFFFFFFFFFFFFFF\">", "tensor<i64>", &[-2.0]),
        ("dense<\"0x0500000000000000\">", "tensor<ui64>", &[5.0]),
        ("dense<\"0x0100FFFF\">", "tensor<2xi16>", &[1.0, -1.0]),
        ("dense<\"0x0100FFFF\">", "tensor<2xui16>", &[1.0, 65535.0]),
        ("dense<\"0x01FF\">", "tensor<2xi8>", &[1.0, -1.0]),
        ("dense<\"0x01FF\">", "tensor<2xui8>", &[1.0, 255.0]),
        ("dense<\"0x0502\">", "tensor<10xi1>", &[1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    ];
    for (literal, ty, expected) in cases {
        assert_eq!(value(literal, ty), *expected, "{literal} : {ty}");
    }
    assert!(value("dense<0x7FC00000>", "tensor<f32>")[0].is_nan());
}

#[test]
fn refusals_name_the_place() {
    let f32 = "tensor<f32>";
    let cases = [
        // Names.
        ("%r = stablehlo.tanh %q : tensor<f32>\nreturn %r : tensor<f32>", f32, "2:21: %q is not defined before this"),
        ("%r = stablehlo.tanh %r : tensor<f32>\nreturn %r : tensor<f32>", f32, "2:21: %r is not defined before this"),
        ("%s = stablehlo.tanh %s : tensor<f32>\nreturn %s : tensor<f32>", f32, "2:1: %s is defined twice"),
        ("return %s#1 : tensor<f32>", f32, "2:8: %s is not defined before this"),
        ("%r = call @g(%s) : (tensor<f32>) -> tensor<f32>\nreturn %r : tensor<f32>", f32, "2:1: there is no function @g"),
        // Shapes.
        (
            "%r = stablehlo.add %a, %b : (tensor<2x3xf32>, tensor<3x4xf32>) -> tensor<2x3xf32>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.add: operands have shapes [2, 3] and [3, 4], which must be equal",
        ),
        (
            "  %r = stablehlo.tanh %s : (tensor<f32>) -> tensor<7xf32>\nreturn %s : tensor<f32>",
            f32,
            "2:3: stablehlo.tanh: is declared to give tensor<7xf32>, but gives f32[]",
        ),
        (
            "%r = stablehlo.tanh %s : tensor<f64>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.tanh: operand 0 is declared as tensor<f64>, but is f32[]\n\
             2:1: stablehlo.tanh: is declared to give tensor<f64>, but gives f32[]",
        ),
        // A region of scalars that returns an outer tensor, which is never reduced.
        (
            "%r = stablehlo.reduce(%v init: %s) across dimensions = [0] : (tensor<3xf32>, tensor<f32>) -> tensor<f32>\n\
             reducer(%x: tensor<f32>, %y: tensor<f32>) {\n%0 = stablehlo.add %y, %x : tensor<f32>\n\
             stablehlo.return %v : tensor<f32>\n}\nreturn %r : tensor<f32>",
            f32,
            "2:1: stablehlo.reduce: is declared to give a scalar, but gives f32[3]",
        ),
        // Ops are converted after one that was given up halfway.
        (
            "%n = stablehlo.constant dense<2> : tensor<1xi32>\n\
             %w = stablehlo.reshape %a : (tensor<2x3xf32>) -> tensor<1x6x1xf32>\n\
             %0 = \"chlo.ragged_dot\"(%a, %w, %n) <{ragged_dot_dimension_numbers = #chlo.ragged_dot<\
             lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0], \
             rhs_group_dimensions = [0]>}> : (tensor<2x3xf32>, tensor<1x6x1xf32>, tensor<1xi32>) -> tensor<2x1xf32>\n\
             %r = stablehlo.tanh %s : tensor<f32>\nreturn %r : tensor<f32>",
            f32,
            "4:1: chlo.ragged_dot: dimensions that run together: sizes 3 and 6 must be equal",
        ),
        (
            "%r = stablehlo.reshape %a : (tensor<2x3xf32>) -> tensor<7xf32>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.reshape: number of elements: sizes 6 and 7 must be equal",
        ),
        (
            "%r = \"stablehlo.transpose\"(%a) : (tensor<2x3xf32>) -> tensor<3x2xf32>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.transpose: attribute 'permutation' is missing or has another form",
        ),
        (
            "%r = \"stablehlo.tanh\"(%s, %s) : (tensor<f32>, tensor<f32>) -> tensor<f32>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.tanh: takes 1 operands, found 2",
        ),
        (
            "%r = stablehlo.constant dense<[1, 2]> : tensor<3xi32>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.constant: the literal does not have as many elements as its type",
        ),
        (
            "%r = stablehlo.constant dense<256> : tensor<i8>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.constant: the literal has an element that its type cannot hold",
        ),
        (
            "%r = stablehlo.constant dense<1.5> : tensor<i8>\nreturn %s : tensor<f32>",
            f32,
            "2:1: stablehlo.constant: the literal has an element that its type cannot hold",
        ),
        ("return %a : tensor<2x3xf32>", f32, "2:1: func.return: operand 0 is declared as tensor<f32>, but is f32[2,3]"),
        ("return", f32, "1:1: @main does not end with a return of 1 results"),
        ("return", "()", "1:1: @main returns nothing; a model returns its loss first"),
        // Constructs that the graph does not have.
        (
            "%r = stablehlo.constant dense_resource<__elided__> : tensor<f32>\nreturn %r : tensor<f32>",
            f32,
            "these operations are not supported:\n  stablehlo.constant (whose values are not in the text): 1 at 2:1",
        ),
        (
            "%r = sdy.manual_computation(%s) in_shardings=[<@mesh, []>] out_shardings=[<@mesh, []>] manual_axes={\"x\"} (%q: tensor<f32>) {
               sdy.return %q : tensor<f32>
             } : (tensor<f32>) -> tensor<f32>
             return %r : tensor<f32>",
            f32,
            "these operations are not supported:\n  sdy.manual_computation (written for several devices; a plan starts from the program of one): 1 at 2:1",
        ),
        (
            "%0 = \"stablehlo.uniform_quantize\"(%s) : (tensor<f32>) -> tensor<f32>
             %1:2 = \"stablehlo.uniform_quantize\"(%0, %s) : (tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<f32>)
             %2 = stablehlo.add %1#0, %1#1 : tensor<f32>
             %3 = \"stablehlo.uniform_quantize\"(%2) : (tensor<f32>) -> tensor<f32>
             %4 = \"stablehlo.uniform_quantize\"(%3) : (tensor<f32>) -> tensor<f32>
             %5 = stablehlo.custom_call @foo(%4) : (tensor<f32>) -> tensor<f32>
             %6 = stablehlo.complex %5, %5 : tensor<complex<f32>>
             %7 = stablehlo.tanh %6 : tensor<complex<f32>>
             %8 = stablehlo.real %7 : (tensor<complex<f32>>) -> tensor<f32>
             %9 = \"stablehlo.infeed\"(%8) : (tensor<f32>) -> tensor<f32>
             return %8 : tensor<f32>",
            f32,
            "these operations are not supported:\n  stablehlo.uniform_quantize (quantized numbers): 4 at 2:1, 3:14, 5:14, ...\n  \
             stablehlo.custom_call @foo: 1 at 7:14\n  stablehlo.tanh (of complex numbers): 1 at 9:14",
        ),
    ];
    for (body, result, expected) in cases {
        match import(&function(body, result)) {
            Ok(imported) => panic!("{body}\n{}", show(&imported.graph)),
            Err(error) => assert_eq!(error.to_string(), expected, "{body}"),
        }
    }
    let modules = [
        ("", "found 0 functions, but none is named @main and there is not just one public function"),
        (
            "func.func @f() { return }\nfunc.func @g() { return }",
            "found 2 functions, but none is named @main and there is not just one public function",
        ),
        ("module {", "1:9: expected a function or a module, found the end of the file"),
        (
            "func.func @f(%a: tensor<f32>, %b: tensor<*xf32>) { return }",
            "1:31: argument 1 has type tensor<*xf32>; supported are tensors of known sizes of f64, f32, f16, bf16, the 8-bit floats, i64 to i2, ui64 to ui2 or i1",
        ),
        (
            "func.func @f(%a: tensor<1000000000000000000x2xf32>) { return }",
            "1:14: argument 0 has type tensor<1000000000000000000x2xf32>; supported are tensors of known sizes of f64, f32, f16, bf16, the 8-bit floats, i64 to i2, ui64 to ui2 or i1",
        ),
        ("func.func @f(%a: tensor<f32>, %a: tensor<f32>) { return }", "1:31: %a is defined twice"),
        (
            "func.func @f(%a: tensor<f32>) -> tensor<f32> {\n%0 = call @g(%a) : (tensor<f32>) -> tensor<f32>\nreturn %0 : tensor<f32>\n}\n\
             func.func private @g(%a: tensor<f32>) -> tensor<f32> {\n%0 = call @f(%a) : (tensor<f32>) -> tensor<f32>\nreturn %0 : tensor<f32>\n}",
            "6:1: @f calls itself",
        ),
        (
            "func.func @f(%a: tensor<f32>) -> tensor<f32> {\n%0 = call @g(%a, %a) : (tensor<f32>, tensor<f32>) -> tensor<f32>\nreturn %0 : tensor<f32>\n}\n\
             func.func private @g(%a: tensor<f32>) -> tensor<f32> {\nreturn %a : tensor<f32>\n}",
            "2:1: @g takes 1 arguments and gives 1 results, which this call does not match",
        ),
    ];
    for (text, expected) in modules {
        match import(text) {
            Ok(imported) => panic!("{text}\n{}", show(&imported.graph)),
            Err(error) => assert_eq!(error.to_string(), expected, "{text}"),
        }
    }
}

/// Each function calls the next one twice: 2^60 ops once inlined.
#[test]
fn inlining_is_limited() {
    let mut text = String::new();
    for level in 0..60 {
        let visibility = if level == 0 { "public" } else { "private" };
        let call = |operand| format!("call @f{}({operand}) : (tensor<f32>) -> tensor<f32>", level + 1);
        writeln!(
            text,
            "func.func {visibility} @f{level}(%a: tensor<f32>) -> tensor<f32> {{\n%0 = {}\n%1 = {}\nreturn %1 : tensor<f32>\n}}",
            call("%a"),
            call("%0")
        )
        .unwrap();
    }
    text += "func.func private @f60(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> }";
    let error = import_limited(&text, &[], 10_000).unwrap_err().to_string();
    assert!(
        error.ends_with("the module has more than 10000 operations once its calls and loops are unrolled"),
        "{error}"
    );

    let mut chain = String::new();
    for level in 0..300 {
        let call = format!("call @f{}(%a) : (tensor<f32>) -> tensor<f32>", level + 1);
        let visibility = if level == 0 { "public" } else { "private" };
        writeln!(chain, "func.func {visibility} @f{level}(%a: tensor<f32>) -> tensor<f32> {{\n%0 = {call}\nreturn %0 : tensor<f32>\n}}").unwrap();
    }
    chain += "func.func private @f300(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> }";
    assert_eq!(import(&chain).unwrap_err().to_string(), "510:1: calls are nested more than 128 levels deep");
}

/// Files of the models that this project is measured on; empty if they are not available.
fn models() -> BTreeMap<String, String> {
    let default = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared"));
    let shared = std::env::var_os("ALTIPLANO_SHARED").map_or(default, PathBuf::from);
    let mut models = BTreeMap::new();
    for entry in std::fs::read_dir(shared.join("models")).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "mlir") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            models.insert(name, std::fs::read_to_string(&path).unwrap());
        }
    }
    if models.is_empty() {
        // Written directly to stderr, since the test harness hides the output of passing tests.
        let skipped = format!("SKIPPED: no model files in {}; set ALTIPLANO_SHARED\n", shared.display());
        let _ = std::io::stderr().write_all(skipped.as_bytes());
    }
    models
}

#[test]
fn damaged_models_never_panic() {
    for text in [SMALL, include_str!("modules/layers.mlir"), include_str!("modules/uniform.mlir")] {
        for_each_damaged(text, |text| drop(import(text)));
    }
    if let Some(text) = models().get("gpt2-tiny") {
        for end in (0..text.len()).step_by(997) {
            let _ = import(text.get(..end).unwrap_or(text));
        }
    }
}

#[test]
fn real_models_parse() {
    for (name, text) in models() {
        if let Err(error) = parse(&text) {
            panic!("{name}.mlir:{error}");
        }
    }
}

/// Counts follow from the layers: a GPT layer has four matmuls with weights and two of attention, Llama seven and two.
#[test]
fn real_models_convert() {
    let models = models();
    // Name, layers, matmuls per layer, arguments.
    let cases = [
        ("gpt2-tiny", 4, 6, 54),
        ("gpt2-small", 12, 6, 150),
        ("gpt3-2.6b", 32, 6, 390),
        ("gpt3-39b", 48, 6, 582),
        ("llama-tiny", 4, 9, 41),
        ("llama3-8b", 32, 9, 293),
    ];
    for (name, layers, matmuls, arguments) in cases {
        let Some(text) = models.get(name) else {
            continue;
        };
        let imported = match import(text) {
            Ok(imported) => imported,
            Err(error) => panic!("{name}.mlir:{error}"),
        };
        let graph = &imported.graph;
        assert_eq!(graph.verify(), [], "{name}");
        let count = |name: &str| graph.nodes.iter().filter(|node| node.op.name() == name).count();
        // One more matmul makes the logits; tokens and labels are looked up once each.
        assert_eq!((count("dot_general"), count("gather")), (layers * matmuls + 1, 2), "{name}");
        assert_eq!(imported.arguments.len(), arguments, "{name}");
        assert_eq!(graph.ty(graph.outputs[0]).rank(), 0, "{name}");
        assert!(imported.arguments.iter().all(|argument| argument.name.is_some()), "{name}");
        assert_eq!(graph.nodes.iter().filter(|node| node.name.is_empty()).count(), 0, "{name}");
    }
}

/// Each mask of a dropout is one op of random bits; nothing of the cipher is left.
#[test]
fn dropout_masks_are_single_ops() {
    let models = models();
    for name in ["flax-dropout", "flax-dropout-unnamed"] {
        let Some(text) = models.get(name) else {
            continue;
        };
        let graph = simplify(&import(text).unwrap_or_else(|error| panic!("{name}.mlir:{error}")).graph);
        assert_eq!(graph.verify(), [], "{name}");
        let count = |name: &str| graph.nodes.iter().filter(|node| node.op.name() == name).count();
        let masks = graph.nodes.iter().filter(|node| node.op.name() == "threefry" && node.ty.elements() > 1);
        // Three blocks of three masks; from each mask's key two words are made.
        assert_eq!((masks.count(), count("threefry")), (9, 27), "{name}");
        assert_eq!((count("xor"), count("shift_left")), (0, 0), "{name}");
    }
}
