//! Tests of the lexer and the parser: one op per case, errors with their places, and corrupted text.

use std::fmt::Write;

use super::parse;
use super::syntax::{Attribute, Attributes, Dense, Elements, Module, Operation, Scalar, Type};

/// Prints an op in a short form that does not depend on whether it was parsed from its own syntax or the
/// generic one.
fn show(operation: &Operation) -> String {
    let mut out = String::new();
    for result in &operation.results {
        write!(out, "%{}:{} ", result.name, result.count).unwrap();
    }
    write!(out, "{}.{}(", operation.dialect, operation.name).unwrap();
    let operands = operation.operands.iter().map(|o| match o.index {
        0 => o.name.to_owned(),
        index => format!("{}#{index}", o.name),
    });
    out += &operands.collect::<Vec<_>>().join(",");
    out += ")";
    out += &show_attributes(&operation.attributes);
    for region in &operation.regions {
        let arguments = region.arguments.iter().map(|a| format!("{}:{}", a.name, show_type(&a.ty)));
        write!(out, " |{}|", arguments.collect::<Vec<_>>().join(",")).unwrap();
        let operations = region.operations.iter().map(show).collect::<Vec<_>>();
        write!(out, " {}", operations.join("; ")).unwrap();
    }
    let types = |types: &[Type]| types.iter().map(show_type).collect::<Vec<_>>().join(",");
    write!(out, " : {} -> {}", types(&operation.operand_types), types(&operation.result_types)).unwrap();
    out
}

fn show_type(ty: &Type) -> String {
    match ty {
        Type::Tensor(tensor) => {
            let dims = tensor.dims.iter().map(|dim| dim.map_or("?x".into(), |dim| format!("{dim}x")));
            let star = if tensor.ranked { "" } else { "*x" };
            let encoding = tensor.encoding.map_or(String::new(), |text| format!(" {text}"));
            format!("{star}{}{}{encoding}", dims.collect::<String>(), tensor.element)
        }
        Type::Tuple(items) => format!("tuple({})", items.iter().map(show_type).collect::<Vec<_>>().join(",")),
        Type::Function(..) => "function".into(),
        Type::Other(text) => (*text).into(),
    }
}

fn show_attributes(attributes: &Attributes) -> String {
    attributes.iter().map(|(name, value)| format!(" {name}={}", show_attribute(value))).collect()
}

fn show_attribute(attribute: &Attribute) -> String {
    match attribute {
        Attribute::Unit => "unit".into(),
        Attribute::Bool(value) => value.to_string(),
        Attribute::Int(value) => value.to_string(),
        Attribute::Float(value) => format!("{value:?}"),
        Attribute::String(value) => format!("{value:?}"),
        Attribute::Array(items) => format!("[{}]", items.iter().map(show_attribute).collect::<Vec<_>>().join(",")),
        Attribute::Dictionary(items) => format!("{{{}}}", show_attributes(items).trim_start()),
        Attribute::DimensionNumbers(items) => format!("<{}>", show_attributes(items).trim_start()),
        Attribute::Dense(Dense { ty, elements }) => {
            let scalar = |scalar: &Scalar| match scalar {
                Scalar::Bool(value) => value.to_string(),
                Scalar::Int(value) => value.to_string(),
                Scalar::Float(value) => format!("{value:?}"),
                Scalar::Bits(value) => format!("{value:#x}"),
                Scalar::Complex(re, im) => format!("({re:?},{im:?})"),
            };
            let elements = match elements {
                Elements::Splat(value) => scalar(value),
                Elements::List { shape, values } => {
                    format!("{shape:?}{}", values.iter().map(scalar).collect::<Vec<_>>().join(","))
                }
                Elements::Hex(digits) => format!("hex {digits}"),
            };
            format!("dense({elements}:{})", show_type(ty))
        }
        Attribute::Enum(word) => format!("`{word}"),
        Attribute::Symbol(name) => format!("@{name}"),
        Attribute::Type(ty) => show_type(ty),
        Attribute::Opaque(text) => format!("?{text}"),
    }
}

fn module_with(line: &str) -> String {
    format!("module @m {{\n  func.func public @main(%arg0: tensor<f32>) {{\n    {line}\n    return\n  }}\n}}\n")
}

fn check(line: &str, expected: &str) {
    let text = module_with(line);
    match parse(&text) {
        Ok(module) => assert_eq!(show(&module.functions[0].operations[0]), expected, "{line}"),
        Err(error) => panic!("{line}\n{error}"),
    }
}

#[test]
fn ops_in_their_own_syntax() {
    let cases = [
        ("%0 = stablehlo.add %a, %b : tensor<2xf32>", "%0:1 stablehlo.add(a,b) : 2xf32,2xf32 -> 2xf32"),
        ("%0 = stablehlo.negate %a#1 : tensor<f32>", "%0:1 stablehlo.negate(a#1) : f32 -> f32"),
        (
            "%0 = stablehlo.convert %a : (tensor<2xi32>) -> tensor<2xf32>",
            "%0:1 stablehlo.convert(a) : 2xi32 -> 2xf32",
        ),
        (
            "%0 = stablehlo.broadcast_in_dim %a, dims = [] : (tensor<f32>) -> tensor<4xf32>",
            "%0:1 stablehlo.broadcast_in_dim(a) broadcast_dimensions=[] : f32 -> 4xf32",
        ),
        (
            "%0 = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>",
            "%0:1 stablehlo.transpose(a) permutation=[1,0] : 2x3xf32 -> 3x2xf32",
        ),
        (
            "%0 = stablehlo.slice %a [1:3, 4:8:2] : (tensor<3x8xf32>) -> tensor<2x2xf32>",
            "%0:1 stablehlo.slice(a) start_indices=[1,4] limit_indices=[3,8] strides=[1,2] : 3x8xf32 -> 2x2xf32",
        ),
        (
            "%0 = stablehlo.concatenate %a, %b, dim = 1 : (tensor<4x1xf32>, tensor<4x2xf32>) -> tensor<4x3xf32>",
            "%0:1 stablehlo.concatenate(a,b) dimension=1 : 4x1xf32,4x2xf32 -> 4x3xf32",
        ),
        (
            "%0 = stablehlo.pad %a, %b, low = [-4], high = [4], interior = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<8xf32>",
            "%0:1 stablehlo.pad(a,b) edge_padding_low=[-4] edge_padding_high=[4] interior_padding=[0] : 8xf32,f32 -> 8xf32",
        ),
        (
            "%0 = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [2] x [1], precision = [DEFAULT, HIGH] : (tensor<2x2x2xi8>, tensor<2x2x3xi8>) -> tensor<2x2x3xi32>",
            "%0:1 stablehlo.dot_general(a,b) lhs_batching_dimensions=[0] rhs_batching_dimensions=[0] lhs_contracting_dimensions=[2] rhs_contracting_dimensions=[1] precision_config=[`DEFAULT,`HIGH] : 2x2x2xi8,2x2x3xi8 -> 2x2x3xi32",
        ),
        (
            "%0 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0], algorithm = <lhs_precision_type = tf32, n = 1> : (tensor<2xf32>, tensor<2xf32>) -> tensor<f32>",
            "%0:1 stablehlo.dot_general(a,b) lhs_contracting_dimensions=[0] rhs_contracting_dimensions=[0] algorithm=?<lhs_precision_type = tf32, n = 1> : 2xf32,2xf32 -> f32",
        ),
        (
            "%0 = stablehlo.compare LT, %a, %b, SIGNED : (tensor<2xi32>, tensor<2xi32>) -> tensor<2xi1>",
            "%0:1 stablehlo.compare(a,b) comparison_direction=`LT compare_type=`SIGNED : 2xi32,2xi32 -> 2xi1",
        ),
        (
            "%0 = stablehlo.select %p, %a, %b : tensor<2xi1>, tensor<2xf32>",
            "%0:1 stablehlo.select(p,a,b) : 2xi1,2xf32,2xf32 -> 2xf32",
        ),
        ("%0 = stablehlo.iota dim = 1 : tensor<2x3xi32>", "%0:1 stablehlo.iota() iota_dimension=1 :  -> 2x3xi32"),
        (
            "%0 = stablehlo.reduce(%a init: %i) applies stablehlo.add across dimensions = [0, 2] : (tensor<2x3x4xf32>, tensor<f32>) -> tensor<3xf32>",
            "%0:1 stablehlo.reduce(a,i) applies=`add dimensions=[0,2] : 2x3x4xf32,f32 -> 3xf32",
        ),
        (
            "%0:2 = stablehlo.reduce(%a init: %i), (%b init: %j) across dimensions = [0] : (tensor<2xf32>, tensor<2xi32>, tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>)
             reducer(%c: tensor<f32> loc(unknown), %d: tensor<f32>) (%e: tensor<i32>, %f: tensor<i32>)  {
               stablehlo.return %c, %e : tensor<f32>, tensor<i32>
             }",
            "%0:2 stablehlo.reduce(a,b,i,j) dimensions=[0] |c:f32,e:i32,d:f32,f:i32| stablehlo.return(c,e) : f32,i32 ->  : 2xf32,2xi32,f32,i32 -> f32,i32",
        ),
        (
            "%0:2 = stablehlo.while(%i = %a, %j = %b) : tensor<i32>, tensor<f32>
             cond { stablehlo.return %i : tensor<i32> } do { stablehlo.return %i, %j : tensor<i32>, tensor<f32> }",
            "%0:2 stablehlo.while(a,b) |i:i32,j:f32| stablehlo.return(i) : i32 ->  |i:i32,j:f32| stablehlo.return(i,j) : i32,f32 ->  : i32,f32 -> i32,f32",
        ),
        (
            "%0 = stablehlo.convolution(%a, %b) dim_numbers = [b, 1, 0, f]x[0, 1, i, o]->[b, 0, 1, f], window = {stride = [2, 2], pad = [[2, 3], [2, 3]], lhs_dilate = [1, 1], rhs_dilate = [1, 1], reverse = [false, false]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64, precision_config = [#stablehlo<precision DEFAULT>, #stablehlo<precision DEFAULT>]} : (tensor<8x32x32x3xf32>, tensor<7x7x3x16xf32>) -> tensor<8x16x16x16xf32>",
            "%0:1 stablehlo.convolution(a,b) dimension_numbers=<input_batch_dimension=0 input_feature_dimension=3 input_spatial_dimensions=[2,1] kernel_input_feature_dimension=2 kernel_output_feature_dimension=3 kernel_spatial_dimensions=[0,1] output_batch_dimension=0 output_feature_dimension=3 output_spatial_dimensions=[1,2]> window_strides=[2,2] padding=[[2,3],[2,3]] lhs_dilation=[1,1] rhs_dilation=[1,1] window_reversal=[false,false] batch_group_count=1 feature_group_count=1 precision_config=[`DEFAULT,`DEFAULT] : 8x32x32x3xf32,7x7x3x16xf32 -> 8x16x16x16xf32",
        ),
        (
            "%1:2 = call @f(%a, %b#1) : (tensor<f32>, tensor<f32>) -> (tensor<f32>, tensor<f32>)",
            "%1:2 func.call(a,b#1) callee=@f : f32,f32 -> f32,f32",
        ),
        ("%1 = func.call @outer::@f() : () -> tensor<f32>", "%1:1 func.call() callee=@f :  -> f32"),
        (
            "%0 = stablehlo.custom_call @Sharding(%a) {backend_config = \"\", mhlo.sharding = \"{devices=[2,1]<=[2]}\"} : (tensor<4xf32>) -> tensor<4xf32>",
            "%0:1 stablehlo.custom_call(a) call_target_name=\"Sharding\" backend_config=\"\" mhlo.sharding=\"{devices=[2,1]<=[2]}\" : 4xf32 -> 4xf32",
        ),
        (
            "%0 = stablehlo.custom_call @\"a-b\"(%a) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>",
            "%0:1 stablehlo.custom_call(a) call_target_name=\"a-b\" has_side_effect=true : 4xf32 -> 4xf32",
        ),
        (
            "%0 = sdy.sharding_constraint %a <@mesh, [{\"x\"}, {?}]> : tensor<2x4xf32>",
            "%0:1 sdy.sharding_constraint(a) sharding=?<@mesh, [{\"x\"}, {?}]> : 2x4xf32 -> 2x4xf32",
        ),
        ("%0 = chlo.square %a : tensor<2xf32> -> tensor<2xf32>", "%0:1 chlo.square(a) : 2xf32 -> 2xf32"),
        (
            "%s, %o = stablehlo.rng_bit_generator %a, algorithm = THREE_FRY : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui32>)",
            "%s:1 %o:1 stablehlo.rng_bit_generator(a) rng_algorithm=`THREE_FRY : 2xui64 -> 2xui64,4xui32",
        ),
        (
            "%1:2 = stablehlo.optimization_barrier %a, %b : tensor<4xf32>, tensor<f32>",
            "%1:2 stablehlo.optimization_barrier(a,b) : 4xf32,f32 -> 4xf32,f32",
        ),
        ("stablehlo.optimization_barrier()", "stablehlo.optimization_barrier() :  -> "),
        (
            "%0 = stablehlo.dynamic_slice %a, %i, sizes = [1] : (tensor<3xi32>, tensor<i32>) -> tensor<1xi32>",
            "%0:1 stablehlo.dynamic_slice(a,i) slice_sizes=[1] : 3xi32,i32 -> 1xi32",
        ),
        (
            "%0 = stablehlo.reduce_precision %a, format = e8m10 : tensor<3xf32>",
            "%0:1 stablehlo.reduce_precision(a) format=`e8m10 : 3xf32 -> 3xf32",
        ),
        (
            "%0 = stablehlo.get_tuple_element %a[1] : (tuple<tensor<i32>, tensor<f32>>) -> tensor<f32>",
            "%0:1 stablehlo.get_tuple_element(a) index=1 : tuple(i32,f32) -> f32",
        ),
        ("stablehlo.trace %a, \"tag\" : tensor<3xi64>", "stablehlo.trace(a) text=\"tag\" : 3xi64 -> "),
        (
            "%0 = stablehlo.composite \"my.op\" %a {decomposition = @f, version = 1 : i32} : (tensor<f32>) -> tensor<f32>",
            "%0:1 stablehlo.composite(a) text=\"my.op\" decomposition=@f version=1 : f32 -> f32",
        ),
        ("%0 = stablehlo.create_token : !stablehlo.token", "%0:1 stablehlo.create_token() :  -> !stablehlo.token"),
        ("%0 = stablehlo.abs %a : tensor<?x*xf32>", "%0:1 stablehlo.abs(a) : *x?xf32 -> *x?xf32"),
        (
            "%0 = stablehlo.abs %a : tensor<?x4xcomplex<f32>, #stablehlo.bounds<3, ?>>",
            "%0:1 stablehlo.abs(a) : ?x4xcomplex<f32> #stablehlo.bounds<3, ?> -> ?x4xcomplex<f32> #stablehlo.bounds<3, ?>",
        ),
    ];
    for (line, expected) in cases {
        check(line, expected);
    }
}

#[test]
fn ops_in_the_generic_form() {
    let cases = [
        (
            "%1 = \"stablehlo.gather\"(%a, %b) <{dimension_numbers = #stablehlo.gather<offset_dims = [0, 1], collapsed_slice_dims = [2], index_vector_dim = 3>, indices_are_sorted = false, slice_sizes = array<i64: 8, 64, 1>}> : (tensor<8x64x1xf32>, tensor<1xi32>) -> tensor<8x64xf32> loc(#loc145)",
            "%1:1 stablehlo.gather(a,b) dimension_numbers=<offset_dims=[0,1] collapsed_slice_dims=[2] index_vector_dim=3> indices_are_sorted=false slice_sizes=[8,64,1] : 8x64x1xf32,1xi32 -> 8x64xf32",
        ),
        (
            "%1 = \"stablehlo.reduce_window\"(%a, %b) <{padding = dense<[[0, 0], [127, 0]]> : tensor<2x2xi64>, window_dimensions = array<i64>}> ({
             ^bb0(%c: tensor<f32> loc(\"x:\"(#loc166)), %d: tensor<f32>):
               %2 = stablehlo.add %c, %d : tensor<f32> loc(#loc166)
               stablehlo.return %2 : tensor<f32>
             }) : (tensor<4x4xf32>, tensor<f32>) -> tensor<4x4xf32>",
            "%1:1 stablehlo.reduce_window(a,b) padding=dense([2, 2]0,0,127,0:2x2xi64) window_dimensions=[] |c:f32,d:f32| %2:1 stablehlo.add(c,d) : f32,f32 -> f32; stablehlo.return(2) : f32 ->  : 4x4xf32,f32 -> 4x4xf32",
        ),
        (
            "%0 = \"stablehlo.case\"(%a) ({ stablehlo.return %b : tensor<f32> }, { stablehlo.return %c : tensor<f32> }) : (tensor<i32>) -> tensor<f32>",
            "%0:1 stablehlo.case(a) || stablehlo.return(b) : f32 ->  || stablehlo.return(c) : f32 ->  : i32 -> f32",
        ),
        (
            "%0 = \"stablehlo.compare\"(%a, %b) {comparison_direction = #stablehlo<comparison_direction LT>, \"q\" = 0x10 : i64} : (tensor<f32>, tensor<f32>) -> tensor<i1>",
            "%0:1 stablehlo.compare(a,b) comparison_direction=`LT q=16 : f32,f32 -> i1",
        ),
        (
            "%0 = \"x.y\"() {a = [1 : i64, -2.5e+00 : f32, \"s\\22\\n\"], b = {c, d = unit}, e = @f, g = i32, h = #sdy.sharding<@m, [{\"x\"}]>, i = affine_map<(d0) -> (d0)>, j = (i1) -> i1, k = #unknown} : () -> tensor<f32>",
            "%0:1 x.y() a=[1,-2.5,\"s\\\"\\n\"] b={c=unit d=unit} e=@f g=i32 h=?#sdy.sharding<@m, [{\"x\"}]> i=?affine_map<(d0) -> (d0)> j=function k=?unknown :  -> f32",
        ),
        (
            "%0 = \"stablehlo.convolution\"(%a, %b) <{dimension_numbers = #stablehlo.conv<[b, f]x[o, i]->[f, b]>}> : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>",
            "%0:1 stablehlo.convolution(a,b) dimension_numbers=<input_batch_dimension=0 input_feature_dimension=1 input_spatial_dimensions=[] kernel_input_feature_dimension=1 kernel_output_feature_dimension=0 kernel_spatial_dimensions=[] output_batch_dimension=1 output_feature_dimension=0 output_spatial_dimensions=[]> : 2x2xf32,2x2xf32 -> 2x2xf32",
        ),
        (
            "%0 = \"stablehlo.convolution\"(%a, %b) <{dimension_numbers = #stablehlo.conv<raw input_batch_dimension = 0, input_spatial_dimensions = [1]>}> : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>",
            "%0:1 stablehlo.convolution(a,b) dimension_numbers=<input_batch_dimension=0 input_spatial_dimensions=[1]> : 2x2xf32,2x2xf32 -> 2x2xf32",
        ),
    ];
    for (line, expected) in cases {
        check(line, expected);
    }
}

#[test]
fn literals() {
    let cases = [
        ("dense<1.0> : tensor<f32>", "1.0:f32"),
        ("dense<-1.500000e-05> : tensor<2xbf16>", "-1.5e-5:2xbf16"),
        ("dense<0xFF800000> : tensor<f32>", "0xff800000:f32"),
        ("dense<0xFC00> : tensor<f16>", "0xfc00:f16"),
        ("dense<true> : tensor<i1>", "true:i1"),
        ("dense<[true, false]> : tensor<2xi1>", "[2]true,false:2xi1"),
        ("dense<[[1, 2], [3, -4]]> : tensor<2x2xi32>", "[2, 2]1,2,3,-4:2x2xi32"),
        ("dense<18446744073709551615> : tensor<ui64>", "18446744073709551615:ui64"),
        ("dense<\"0x0000803F00000040\"> : tensor<2xf32>", "hex 0000803F00000040:2xf32"),
        ("dense<> : tensor<0xf32>", "[0]:0xf32"),
        ("dense<[[], []]> : tensor<2x0xf32>", "[2, 0]:2x0xf32"),
        ("dense<(1.0,-2.0)> : tensor<complex<f32>>", "(1.0,-2.0):complex<f32>"),
    ];
    for (literal, expected) in cases {
        let ty = expected.rsplit_once(':').unwrap().1;
        check(
            &format!("%c = stablehlo.constant {literal}"),
            &format!("%c:1 stablehlo.constant() value=dense({expected}) :  -> {ty}"),
        );
    }
}

#[test]
fn modules_and_functions() {
    let text = r#"
        #loc = loc(unknown)
        #loc1 = loc("params['w']")
        #loc9 = loc("models.py":7:8 to :28)
        // a comment
        module @jit_f attributes {mhlo.num_partitions = 1 : i32} {
          sdy.mesh @mesh = <["x"=2]> {stablehlo.mesh = {axes = []}} loc(#loc)
          func.func public @main(%arg0: tensor<2xf32> {jax.buffer_donor = true} loc("params['w']"), %arg1: !t loc("a"(#loc))) -> (tensor<2xf32> {jax.result_info = "result"}, tensor<f32>) attributes {x} {
            %0 = stablehlo.add %arg0, %arg0 : tensor<2xf32> loc(#loc2)
            %1 = stablehlo.add %0, %arg0 : tensor<2xf32> loc(#loc3)
            %2 = stablehlo.add %1, %arg0 : tensor<2xf32> loc(#loc4)
            %3 = stablehlo.add %2, %arg0 : tensor<2xf32> loc(#loc9)
            %4 = stablehlo.add %3, %arg0 : tensor<2xf32> loc(callsite("callee" at #loc9))
            %5 = stablehlo.add %3, %arg0 : tensor<2xf32> loc(fused<"m">[#loc, "part"])
            %6 = stablehlo.add %3, %arg0 : tensor<2xf32> loc(#cycle)
            return %0, %arg1 : tensor<2xf32>, tensor<f32> loc(#loc)
          } loc(#loc)
          func.func private @declared(tensor<f32>) -> tensor<f32>
        } loc(#loc)
        #loc2 = loc("jit(f)/dot_general"(#loc9))
        #loc3 = loc("jit:"(#loc2))
        #loc4 = loc("jit:"(#loc))
        #cycle = loc(callsite(#cycle at #loc))
        !t = tensor<f32>
        {-# dialect_resources: { builtin: { x: "0x00" } } #-}
    "#;
    let module = parse(text).unwrap();
    assert_eq!(module.name.as_deref(), Some("jit_f"));
    let names: Vec<_> = module.functions.iter().map(|f| (&*f.name, f.visibility)).collect();
    assert_eq!(names, [("main", "public"), ("declared", "private")]);
    let main = module.function("main").unwrap();
    let arguments: Vec<_> = main.arguments.iter().map(|a| (a.name, module.location_name(a.location))).collect();
    assert_eq!(arguments, [("arg0", Some("params['w']")), ("arg1", Some("a"))]);
    let places: Vec<_> = main.operations.iter().map(|op| module.location_name(op.location)).collect();
    assert_eq!(
        places,
        [
            Some("jit(f)/dot_general"),
            Some("jit(f)/dot_general"),
            Some("jit"),
            Some("models.py:7:8"),
            Some("callee"),
            Some("part"),
            None,
            None
        ]
    );
    assert_eq!(main.operations[0].place.to_string(), "9:13");
    assert_eq!(show_attributes(&main.arguments[0].attributes), " jax.buffer_donor=true");
    assert_eq!(main.results.len(), 2);

    let generic = parse(
        r#""builtin.module"() <{sym_name = "m"}> ({
          "func.func"() <{function_type = (tensor<f32>) -> tensor<f32>, sym_name = "main", sym_visibility = "private"}> ({
          ^bb0(%arg0: tensor<f32>):
            "func.return"(%arg0) : (tensor<f32>) -> ()
          }) : () -> ()
        }) : () -> ()"#,
    );
    let generic = generic.unwrap();
    assert_eq!(generic.name.as_deref(), Some("m"));
    assert_eq!(show(&generic.functions[0].operations[0]), "func.return(arg0) : f32 -> ");
    assert_eq!((generic.functions[0].visibility, generic.functions[0].results.len()), ("private", 1));

    assert_eq!(parse("").unwrap().functions, []);
    assert_eq!(parse("func.func @f() { return }").unwrap().functions[0].operations.len(), 1);
}

#[test]
fn errors_name_the_place() {
    // The op stands on line 3, column 5.
    let cases = [
        ("%0 = stablehlo.add %a, %b : }", "3:33: expected a type, found '}'"),
        ("%0 = stablehlo.add %a, %b : tensor<4xf32", "4:5: expected '>', found 'return'"),
        ("%0 = stablehlo.slice %a [1;3] : tensor<f32>", "3:31: expected MLIR text, found ';'"),
        ("%0 = stablehlo.slice %a [1 3] : tensor<f32>", "3:32: expected ':', found '3'"),
        ("%0 = = %a", "3:10: expected an operation, found '='"),
        ("%0 %1", "3:8: expected '=', found '%1'"),
        ("%0:2 = stablehlo.add %a, %b : tensor<f32>", "3:5: 2 results are named, but the type has 1"),
        ("%0:99999999999 = stablehlo.add %a, %b : tensor<f32>", "3:8: this number is too large"),
        ("%0 = \"stablehlo.add(%a", "3:10: this string has no closing quote on its line"),
        ("%0 = \"stablehlo.add\"(%a) {} (", "3:33: expected ':' and the type of the operation, found '('"),
        ("%0 = stablehlo.add %a : tensor<99999999999999999999xf32>", "3:36: this number is too large"),
        ("%0 = stablehlo.constant dense<99999999999999999999> : tensor<i64>", "3:35: this number is too large"),
        ("%0 = stablehlo.constant dense<1.0e999> : tensor<f64>", "3:35: this number is too large"),
        (
            "%0 = stablehlo.constant dense<[[1, 2], [3]]> : tensor<2x2xi32>",
            "3:46: the rows of this literal have different lengths",
        ),
        (
            "%0 = stablehlo.constant dense<[1, [2]]> : tensor<2x2xi32>",
            "3:40: the rows of this literal have different lengths",
        ),
        (
            "%0 = stablehlo.constant dense<\"0xABC\"> : tensor<2xi32>",
            "3:35: expected a string of hexadecimal digits, found a string",
        ),
        ("%0 = stablehlo.constant dense<x> : tensor<i32>", "3:35: expected a number, found 'x'"),
        ("%é = stablehlo.abs %a : tensor<f32>", "3:6: expected a name, found 'é'"),
        (
            "%0 = stablehlo.reduce(%a init: %b) over [0] : (tensor<f32>) -> tensor<f32>",
            "3:40: expected 'across dimensions = [...]', found 'over'",
        ),
        (
            "%0 = \"a.b\"() ({ ^bb0: %1 = \"c.d\"() : () -> i1 ^bb1: }) : () -> i1",
            "3:51: expected an operation, found '^bb1'",
        ),
        ("%0 = stablehlo.abs %a : i1 loc(1)", "3:36: expected a location, found '1'"),
        (
            "%0 = stablehlo.add %a abcdefghijklmnopqrstuvwxyz_abcdefghijklmnopqrstuvwxyz",
            "3:27: expected ':' and the type of the operation, found 'abcdefghijklmnopqrstuvwxyz_abcdefghijklm...'",
        ),
        ("}", "6:1: expected a function or a module, found '}'"),
    ];
    for (line, expected) in cases {
        match parse(&module_with(line)) {
            Err(error) => assert_eq!(error.to_string(), expected, "{line}"),
            Ok(_) => panic!("{line} parses"),
        }
    }
    let twice = "func.func @f() { return }\nfunc.func @f() { return }";
    assert_eq!(parse(twice).unwrap_err().to_string(), "2:1: function @f is defined twice");
    assert_eq!(
        parse("module {").unwrap_err().to_string(),
        "1:9: expected a function or a module, found the end of the file"
    );
    assert_eq!(parse("\u{0}").unwrap_err().to_string(), "1:1: expected MLIR text, found '\\0'");
}

#[test]
fn nesting_is_limited() {
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("{a = ", "}"),
        ("dense<[", "]>"),
        ("tuple<", ">"),
        ("tensor<", ">"),
        ("loc(\"a\"(", "))"),
        ("loc(fused[", "])"),
        ("module {", "}"),
        ("\"a.b\"() ({", "}) : () -> ()"),
        ("#a = [", "]"),
        ("<", ">"),
        ("#x<", ">"),
        ("#x.y<a = ", ">"),
    ] {
        let nested = format!("{}{}", open.repeat(100_000), close.repeat(100_000));
        for prefix in ["", "#a = ", "!a = ", "#a = loc(", "\"a.b\"() {a = ", "func.func @f() {"] {
            // Some combinations are bracketed text that is skipped. None may overflow the stack.
            let _ = parse(&format!("{prefix}{nested}"));
        }
    }
    let deep = |levels: usize| {
        let regions = "\"a.b\"() ({".repeat(levels) + &"}) : () -> ()\n".repeat(levels);
        parse(&format!("func.func @f() {{ {regions} }}")).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(deep(60), Ok(()));
    assert_eq!(deep(70), Err("1:657: nested more than 128 levels deep".into()));
}

const SMALL: &str = r#"#loc1 = loc("params['w']")
module @jit_f attributes {mhlo.num_partitions = 1 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%arg0: tensor<8x4xf32> loc("params['w']"), %arg1: tensor<3x8xi32> loc("x\22y")) -> (tensor<f32> {jax.result_info = "result"}) {
    %cst = stablehlo.constant dense<[[1.0, -2.5e+01], [0xFF800000, 3.0]]> : tensor<2x2xf32> loc(#loc2)
    %c = stablehlo.constant dense<"0x0000803F"> : tensor<f32>
    %0 = "stablehlo.gather"(%arg0, %arg1) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], index_vector_dim = 2>, slice_sizes = array<i64: 1, 4>}> : (tensor<8x4xf32>, tensor<3x8xi32>) -> tensor<3x8x4xf32> loc(#loc2)
    %1:2 = stablehlo.while(%i = %c, %j = %0) : tensor<f32>, tensor<3x8x4xf32>
    cond {
      %5 = stablehlo.compare LT, %i, %c, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %5 : tensor<i1>
    } do {
      %6:2 = func.call @g(%i, %j) : (tensor<f32>, tensor<3x8x4xf32>) -> (tensor<f32>, tensor<3x8x4xf32>)
      stablehlo.return %6#0, %6#1 : tensor<f32>, tensor<3x8x4xf32>
    } loc(#loc2)
    %2 = stablehlo.reduce(%1#1 init: %c) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<3x8x4xf32>, tensor<f32>) -> tensor<f32>
    %3 = sdy.sharding_constraint %2 <@mesh, []> : tensor<f32>
    return %3 : tensor<f32>
  } loc(#loc1)
}
#loc2 = loc("jit(f)/é"(callsite(#loc1 at "f.py":1:2 to :3)))
"#;

/// A fast, deterministic random number generator (xorshift, Marsaglia 2003).
fn random(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 33) as usize
}

#[test]
fn damaged_text_never_panics() {
    assert!(parse(SMALL).is_ok());
    for_each_damaged(SMALL, |text| drop(parse(text)));
}

/// Calls `read` with every prefix of a text, with changed and repeated pieces, and with noise.
pub(super) fn for_each_damaged(text: &str, read: impl Fn(&str)) {
    for (end, _) in text.char_indices() {
        read(&text[..end]);
    }
    let mut state = 0x9E37_79B9_7F4A_7C15;
    let alphabet = b"%#@!^\"(){}[]<>,:=-x?*/.0123456789eab \n\\\0\x7f";
    for _ in 0..10_000 {
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..=random(&mut state) % 4 {
            let place = random(&mut state) % bytes.len();
            match random(&mut state) % 3 {
                0 => bytes[place] = alphabet[random(&mut state) % alphabet.len()],
                1 => drop(bytes.remove(place)),
                _ => {
                    let end = bytes.len().min(place + random(&mut state) % 40);
                    let copy = bytes[place..end].to_vec();
                    let to = random(&mut state) % bytes.len();
                    bytes.splice(to..to, copy);
                }
            }
        }
        read(&String::from_utf8_lossy(&bytes));
    }
    for _ in 0..2_000 {
        let bytes: Vec<u8> = (0..200).map(|_| alphabet[random(&mut state) % alphabet.len()]).collect();
        read(&String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn aliases_cannot_fill_the_memory() {
    let mut text = "#a0 = [1]\n!a0 = tensor<f32>\n#l0 = loc(\"x\")\n".to_owned();
    for i in 1..200 {
        let before = i - 1;
        writeln!(text, "#a{i} = [#a{before}, #a{before}]").unwrap();
        writeln!(text, "!a{i} = tuple<!a{before}, !a{before}>").unwrap();
        writeln!(text, "#l{i} = loc(fused[#l{before}, #l{before}])").unwrap();
    }
    text += "func.func @f(%a: !a199 loc(#l199)) { \"x.y\"() {a = #a199} : () -> () }";
    let module: Module = parse(&text).unwrap();
    assert_eq!(show_type(&module.functions[0].arguments[0].ty), "tuple(!a198,!a198)");
}
