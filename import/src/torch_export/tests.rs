//! Tests with programs that are built here: JSON in a stored zip file, as `torch.export.save` writes it.

use super::*;
use altiplano_ir::tensor::Tensor;
use serde_json::{Value, json};
use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;

fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, bytes) in entries {
        zip.start_file(*name, stored).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn size(n: i64) -> Value {
    json!({ "as_int": n })
}

/// An open size, with the value 6 in the example.
fn open(text: &str) -> Value {
    json!({ "as_expr": { "expr_str": text, "hint": { "as_int": 6 } } })
}

fn tensor(dtype: u32, sizes: &[Value]) -> Value {
    json!({ "dtype": dtype, "sizes": sizes, "strides": [], "storage_offset": size(0) })
}

fn named(name: &str) -> Value {
    json!({ "as_tensor": { "name": name } })
}

fn node(target: &str, inputs: &[(&str, Value)], output: &str) -> Value {
    let inputs: Vec<Value> = inputs.iter().map(|(name, arg)| json!({ "name": name, "arg": arg, "kind": 1 })).collect();
    let stack = "L__self__,,Model;L__self__layer,layer.0,Layer";
    json!({ "target": target, "inputs": inputs, "outputs": [named(output)], "metadata": { "nn_module_stack": stack } })
}

/// A program with the parameter `w` and the input `x`, both of `sizes`, and the result `output`.
fn program(sizes: &[Value], nodes: Vec<Value>, output: &str) -> Value {
    let leaf = tensor(7, sizes);
    json!({
        "graph_module": {
            "graph": {
                "inputs": [named("p_w"), named("x")],
                "outputs": [named(output)],
                "nodes": nodes,
                "tensor_values": { "p_w": leaf, "x": leaf },
            },
            "signature": {
                "input_specs": [
                    { "parameter": { "arg": { "name": "p_w" }, "parameter_name": "layer.w" } },
                    { "user_input": { "arg": named("x") } },
                ],
                "output_specs": [{ "user_output": { "arg": named(output) } }],
            },
            "module_call_graph": [],
        },
        "range_constraints": { "s0": { "min_val": 2, "max_val": 64 } },
    })
}

fn packed(program: &Value) -> Vec<u8> {
    archive(&[("m/models/model.json", program.to_string().as_bytes())])
}

fn imported(program: &Value) -> Result<Imported, ImportError> {
    import(&packed(program), &Options::default())
}

fn add(a: &str, b: &str, output: &str) -> Value {
    node("torch.ops.aten.add.Tensor", &[("self", named(a)), ("other", named(b))], output)
}

/// The result of the program for `x` = 0, 1, 2, .. and `w` = 10, 20, 30, ...
fn values(program: &Value) -> Vec<f64> {
    let imported = imported(program).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(imported.graph.verify(), []);
    let results = altiplano_ir::interpret::run(&imported.graph, |v| {
        let ty = imported.graph.ty(v).clone();
        let scale = if matches!(imported.graph.node(v).op, altiplano_ir::op::Op::Parameter(_)) { 10.0 } else { 1.0 };
        let first = if scale == 1.0 { 0.0 } else { 10.0 };
        let data = (0..ty.elements()).map(|i| first + scale * i as f64).collect();
        Tensor::new(ty, data)
    });
    results[0].data.clone()
}

#[test]
fn names_come_from_modules() {
    let program = program(&[size(2), size(3)], vec![add("x", "p_w", "add")], "add");
    let imported = imported(&program).unwrap();
    let parameters: Vec<&str> = imported.graph.parameters().map(|(_, name)| name).collect();
    assert_eq!(parameters, ["layer.w"]);
    let last = imported.graph.nodes.last().unwrap();
    assert_eq!((last.op.name(), last.name.as_str()), ("add", "layer.0/add"));
    assert_eq!(values(&program), [10.0, 21.0, 32.0, 43.0, 54.0, 65.0]);
}

#[test]
fn parameters_without_requires_grad_are_frozen() {
    let mut program = program(&[size(2), size(3)], vec![add("x", "p_w", "add")], "add");
    let frozen = |program: &Value| {
        imported(program).unwrap().graph.parameters().count()
            - imported(program).unwrap().graph.trained_parameters().count()
    };
    // Older files do not have the field.
    assert_eq!(frozen(&program), 0);
    for requires_grad in [true, false] {
        program["graph_module"]["graph"]["tensor_values"]["p_w"]["requires_grad"] = json!(requires_grad);
        assert_eq!(frozen(&program), usize::from(!requires_grad));
    }
}

#[test]
fn changes_in_place_reach_whatever_shares_memory() {
    let select = |x: &str, dim: i64, at: i64, output: &str| {
        node(
            "torch.ops.aten.select.int",
            &[("self", named(x)), ("dim", json!({ "as_int": dim })), ("index", json!({ "as_int": at }))],
            output,
        )
    };
    let fill = |x: &str, value: f64| {
        node("torch.ops.aten.fill_.Scalar", &[("self", named(x)), ("value", json!({ "as_float": value }))], "filled")
    };
    let copy = node("torch.ops.aten.clone.default", &[("self", named("x"))], "copy");
    let column = select("copy", 1, 1, "column");
    let row = select("copy", 0, 0, "row");
    let sizes = [size(2), size(3)];
    // A column of a copy is filled. The copy and a row taken earlier change, but the original does not.
    let nodes = vec![copy.clone(), row.clone(), column.clone(), fill("column", 7.0)];
    assert_eq!(values(&program(&sizes, nodes.clone(), "copy")), [0.0, 7.0, 2.0, 3.0, 7.0, 5.0]);
    assert_eq!(values(&program(&sizes, nodes.clone(), "row")), [0.0, 7.0, 2.0]);
    assert_eq!(values(&program(&sizes, nodes, "x")), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    // A reshape of a non-contiguous tensor may or may not copy, so a read after a change is refused.
    let turned = node("torch.ops.aten.t.default", &[("self", named("copy"))], "turned");
    let flat = node(
        "torch.ops.aten.reshape.default",
        &[("self", named("turned")), ("shape", json!({ "as_ints": [6] }))],
        "flat",
    );
    let nodes = vec![copy, turned, flat, column, fill("column", 7.0), add("flat", "flat", "late")];
    let error = imported(&program(&sizes, nodes, "late")).unwrap_err().to_string();
    assert!(error.contains("late (layer.0/add)") && error.contains("share memory"), "{error}");
}

/// Autograd does not see changes in place under `no_grad`, or through `detach`. The new value gets the gradient
/// of the old one.
#[test]
fn changes_in_place_that_are_not_recorded_keep_the_gradient() {
    let scalar = |value: f64| json!({ "as_float": value });
    let op = |name: &str, x: &str, inputs: &[(&str, Value)], output: &str| {
        let inputs: Vec<(&str, Value)> = [("self", named(x))].into_iter().chain(inputs.iter().cloned()).collect();
        node(&format!("torch.ops.aten.{name}"), &inputs, output)
    };
    let times = |a: &str, b: &str, output: &str| op("mul.Tensor", a, &[("other", named(b))], output);
    let inner = json!({
        "inputs": [named("v")], "outputs": [named("clamped")], "tensor_values": { "v": tensor(7, &[size(3)]) },
        "nodes": [op("clamp_", "v", &[("max", scalar(15.0))], "clamped")],
    });
    let wrap = "torch.ops.higher_order.wrap_with_set_grad_enabled";
    let wrapped = |argument: &str| {
        let graph = json!({ "as_graph": { "name": "submod_1", "graph": inner } });
        node(wrap, &[("", json!({ "as_bool": false })), ("", graph), ("", named(argument))], "new")
    };
    let doubled = op("mul.Scalar", "p_w", &[("other", scalar(2.0))], "doubled");
    for (what, nodes, expected, slope) in [
        ("a parameter", vec![wrapped("p_w"), times("new", "x", "y")], [0.0, 15.0, 30.0], [0.0, 1.0, 2.0]),
        ("what is read again", vec![wrapped("p_w"), times("p_w", "x", "y")], [0.0, 15.0, 30.0], [0.0, 1.0, 2.0]),
        (
            "an activation",
            vec![doubled, wrapped("doubled"), times("new", "x", "y")],
            [0.0, 15.0, 30.0],
            [0.0, 2.0, 4.0],
        ),
        (
            "a detached parameter",
            vec![
                op("detach", "p_w", &[], "detached"),
                op("clamp_", "detached", &[("max", scalar(15.0))], "clamped"),
                times("p_w", "x", "y"),
            ],
            [0.0, 15.0, 30.0],
            [0.0, 1.0, 2.0],
        ),
        (
            "a buffer",
            vec![
                op("clone", "x", &[], "state"),
                node(
                    wrap,
                    &[
                        ("", json!({ "as_bool": false })),
                        (
                            "",
                            json!({ "as_graph": { "name": "submod_2", "graph": {
                    "inputs": [named("a"), named("b")], "outputs": [named("copied")],
                    "tensor_values": { "a": tensor(7, &[size(3)]), "b": tensor(7, &[size(3)]) },
                    "nodes": [op("copy_", "a", &[("src", named("b"))], "copied")],
                } } }),
                        ),
                        ("", named("state")),
                        ("", named("p_w")),
                    ],
                    "new",
                ),
                times("new", "x", "y"),
            ],
            [0.0, 20.0, 60.0],
            [0.0, 0.0, 0.0],
        ),
    ] {
        let summed = op("sum.default", "y", &[], "total");
        assert_eq!(values(&program(&[size(3)], nodes.clone(), "y")), expected, "{what}");
        let graph = imported(&program(&[size(3)], [nodes, vec![summed]].concat(), "total")).expect("a program").graph;
        let found = match altiplano_ir::autodiff::differentiate(&graph, &[]) {
            Err(altiplano_ir::autodiff::AutodiffError::NoParameters) => vec![0.0; 3],
            Err(error) => panic!("{what}: {error}"),
            Ok(training) => {
                let values = altiplano_ir::interpret::run_all(&training.graph, |v| {
                    let ty = training.graph.ty(v).clone();
                    let is_parameter = matches!(training.graph.node(v).op, altiplano_ir::op::Op::Parameter(_));
                    Tensor::new(
                        ty,
                        (0..3).map(|i| if is_parameter { 10.0 * (i + 1) as f64 } else { i as f64 }).collect(),
                    )
                });
                let (p, _) = graph.parameters().next().expect("the parameter");
                let parts = &training.contributions[p.index()];
                (0..3).map(|i| parts.iter().map(|part| values[part.1.index()].data[i]).sum()).collect()
            }
        };
        assert_eq!(found, slope, "{what}");
    }
}

#[test]
fn open_sizes_are_those_of_the_example_or_given() {
    let twice = open("2*s0");
    let view = node(
        "torch.ops.aten.view.default",
        &[("self", named("x")), ("size", json!({ "as_sym_ints": [{ "as_name": "n" }, { "as_int": -1 }] }))],
        "view",
    );
    let n = json!({
        "target": "_operator.mul", "metadata": {},
        "inputs": [
            { "name": "a", "arg": { "as_sym_int": { "as_name": "size" } } },
            { "name": "b", "arg": { "as_int": 2 } },
        ],
        "outputs": [{ "as_sym_int": { "as_name": "n" } }],
    });
    let mut ask = node("torch.ops.aten.sym_size.int", &[("self", named("x")), ("dim", json!({ "as_int": 0 }))], "size");
    ask["outputs"] = json!([{ "as_sym_int": { "as_name": "size" } }]);
    let mut program = program(&[open("s0"), size(4)], vec![ask, n, view], "view");
    program["graph_module"]["graph"]["tensor_values"]["view"] = tensor(7, &[twice, size(2)]);
    let shape = |options: &[(&str, u64)]| {
        let sizes = options.iter().map(|(name, n)| (name.to_string(), *n)).collect();
        import(&packed(&program), &Options { sizes }).map(|i| i.graph.shape(i.graph.outputs[0]).to_vec())
    };
    assert_eq!(shape(&[]), Ok(vec![12, 2]));
    assert_eq!(shape(&[("s0", 8)]), Ok(vec![16, 2]));
    assert_eq!(shape(&[("x.0", 3)]), Ok(vec![6, 2]));
    let known = imported(&program).unwrap().open_sizes;
    assert_eq!(known[0].dims, [("p_w".to_string(), 0), ("x".to_string(), 0)]);
    let error = |name: &str, n: u64| shape(&[(name, n)]).unwrap_err().to_string();
    assert!(error("s1", 8).contains("s0 (p_w.0, x.0)"), "{}", error("s1", 8));
    assert!(error("s0", 65).contains("2 to 64"), "{}", error("s0", 65));
    assert!(error("s0", u64::MAX).contains("2 to 64"));
}

#[test]
fn constants_are_read_in_any_order_of_memory() {
    let mut program = program(&[size(2), size(3)], vec![add("x", "c_k", "add")], "add");
    let graph = &mut program["graph_module"]["graph"];
    graph["inputs"].as_array_mut().unwrap().push(named("c_k"));
    graph["tensor_values"]["c_k"] = tensor(7, &[size(2), size(3)]);
    let spec = json!({ "tensor_constant": { "arg": { "name": "c_k" }, "tensor_constant_name": "k" } });
    program["graph_module"]["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    let with = |strides: [i64; 2], offset: i64, floats: usize| {
        let meta = json!({
            "dtype": 7, "sizes": [size(2), size(3)], "strides": strides.map(size), "storage_offset": size(offset)
        });
        let config =
            json!({ "config": { "k": { "path_name": "tensor_0", "use_pickle": false, "tensor_meta": meta } } });
        let data: Vec<u8> = (0..floats).flat_map(|i| (100.0 * i as f32).to_le_bytes()).collect();
        let bytes = archive(&[
            ("m/models/model.json", program.to_string().as_bytes()),
            ("m/data/constants/model_constants_config.json", config.to_string().as_bytes()),
            ("m/data/constants/tensor_0", &data),
        ]);
        import(&bytes, &Options::default())
    };
    let sums = |strides: [i64; 2], offset: i64| {
        let imported = with(strides, offset, 8).unwrap_or_else(|e| panic!("{e}"));
        let count = |ty: &altiplano_ir::types::TensorType| (0..ty.elements()).map(|i| i as f64).collect();
        let leaf = |v| Tensor::new(imported.graph.ty(v).clone(), count(imported.graph.ty(v)));
        altiplano_ir::interpret::run(&imported.graph, leaf)[0].data.clone()
    };
    assert_eq!(sums([3, 1], 0), [0.0, 101.0, 202.0, 303.0, 404.0, 505.0]);
    assert_eq!(sums([3, 1], 2), [200.0, 301.0, 402.0, 503.0, 604.0, 705.0]);
    assert_eq!(sums([1, 2], 0), [0.0, 201.0, 402.0, 103.0, 304.0, 505.0]);
    for (strides, offset, floats) in [([3, 1], 0, 5), ([1 << 40, 1 << 40], 0, 8), ([i64::MAX, 1], i64::MAX, 8)] {
        let error = with(strides, offset, floats).unwrap_err().to_string();
        assert!(error.contains("'k'"), "{error}");
    }
}

/// Float state of a model becomes inputs, since training may change it elsewhere. A mask that nothing changes
/// keeps the file's values.
#[test]
fn masks_are_constants_and_statistics_inputs() {
    let buffers = |dtype: u32, changed: bool| {
        let mut program = program(&[size(2)], vec![add("x", "b_k", "add")], "add");
        let module = &mut program["graph_module"];
        module["graph"]["inputs"].as_array_mut().unwrap().push(named("b_k"));
        module["graph"]["tensor_values"]["b_k"] = tensor(dtype, &[size(2)]);
        let spec = json!({ "buffer": { "arg": { "name": "b_k" }, "buffer_name": "k", "persistent": true } });
        module["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
        if changed {
            let spec = json!({ "buffer_mutation": { "arg": { "name": "add" }, "buffer_name": "k" } });
            module["signature"]["output_specs"].as_array_mut().unwrap().insert(0, spec);
            module["graph"]["outputs"].as_array_mut().unwrap().insert(0, named("add"));
        }
        let meta = json!({ "dtype": dtype, "sizes": [size(2)], "strides": [size(1)], "storage_offset": size(0) });
        let config =
            json!({ "config": { "k": { "path_name": "weight_0", "use_pickle": false, "tensor_meta": meta } } });
        let bytes = archive(&[
            ("m/models/model.json", program.to_string().as_bytes()),
            ("m/data/weights/model_weights_config.json", config.to_string().as_bytes()),
            ("m/data/weights/weight_0", &[0; 8]),
        ]);
        import(&bytes, &Options::default()).unwrap_or_else(|e| panic!("{e}")).buffers
    };
    let (float, int) = (7, 4);
    assert_eq!([buffers(int, false), buffers(int, true), buffers(float, false)], [vec![], vec!["k"], vec!["k"]]);
}

#[test]
fn a_newer_format_is_said_to_be_one() {
    let mut program = program(&[size(2)], vec![add("x", "p_w", "add")], "add");
    let newer = |program: &Value| imported(program).unwrap().newer;
    assert_eq!(newer(&program), None);
    for (major, expected) in [(NEWEST, None), (NEWEST + 1, Some(NEWEST + 1))] {
        program["schema_version"] = json!({ "major": major, "minor": 1 });
        assert_eq!(newer(&program), expected);
    }
}

/// Adds `i` to `x` for `i` from 1 while `i < 4`, and selects one of two graphs by the sign of the sum of `x`.
#[test]
fn branches_and_loops_are_written_out() {
    let int = |n: i64| json!({ "as_int": n });
    let scalar = tensor(5, &[]);
    let vector = || tensor(7, &[size(3)]);
    let graph = |name: &str, inputs: &[&str], outputs: &[&str], nodes: Vec<Value>| {
        let mut values = serde_json::Map::new();
        for (input, ty) in inputs.iter().zip([scalar.clone(), vector()]) {
            values.insert(input.to_string(), if inputs.len() == 1 { vector() } else { ty });
        }
        let named: fn(&&str) -> Value = |n| named(n);
        let graph = json!({
            "inputs": inputs.iter().map(named).collect::<Vec<_>>(),
            "outputs": outputs.iter().map(named).collect::<Vec<_>>(), "nodes": nodes, "tensor_values": values
        });
        json!({ "as_graph": { "name": name, "graph": graph } })
    };
    let tensors =
        |names: &[&str]| json!({ "as_tensors": names.iter().map(|n| json!({ "name": n })).collect::<Vec<_>>() });
    let scalar_op = |op: &str, x: &str, other: Value, output: &str| {
        node(&format!("torch.ops.aten.{op}.Scalar"), &[("self", named(x)), ("other", other)], output)
    };
    let start =
        node("torch.ops.aten.full.default", &[("size", json!({ "as_ints": [] })), ("fill_value", int(1))], "one");
    let condition = graph("while_cond", &["i", "y"], &["again"], vec![scalar_op("lt", "i", int(4), "again")]);
    let body_nodes = vec![scalar_op("add", "i", int(1), "next"), add("y", "i", "sum")];
    let body = graph("while_body", &["i", "y"], &["next", "sum"], body_nodes);
    let mut turns = node(
        "torch.ops.higher_order.while_loop",
        &[("", condition), ("", body), ("", tensors(&["one", "x"])), ("", tensors(&[]))],
        "last",
    );
    turns["outputs"] = json!([named("count"), named("last")]);
    let looped = program(&[size(3)], vec![start, turns], "last");
    assert_eq!(values(&looped), [6.0, 7.0, 8.0]);

    let all = node("torch.ops.aten.sum.default", &[("self", named("x"))], "all");
    for (limit, expected) in [(2.0, [0.0, 10.0, 20.0]), (3.0, [1.0, 2.0, 3.0])] {
        let positive = scalar_op("gt", "all", json!({ "as_float": limit }), "positive");
        let tenfold = graph("yes", &["y"], &["z"], vec![scalar_op("mul", "y", int(10), "z")]);
        let more = graph("no", &["y"], &["z"], vec![scalar_op("add", "y", int(1), "z")]);
        let inputs = [("", named("positive")), ("", tenfold), ("", more), ("", tensors(&["x"]))];
        let branch = node("torch.ops.higher_order.cond", &inputs, "chosen");
        let branched = program(&[size(3)], vec![all.clone(), positive, branch], "chosen");
        assert_eq!(values(&branched), expected);
    }
}

#[test]
fn all_that_is_not_supported_is_said_at_once() {
    let svd = |output: &str| node("torch.ops.aten.linalg_svd.default", &[("self", named("x"))], output);
    let other = node("torch.ops.custom.mine.default", &[("self", named("x"))], "d");
    let mut bad = add("x", "p_w", "e");
    bad["inputs"][1]["arg"] = json!({ "as_string": "text" });
    let mut program = program(&[size(2)], vec![svd("a"), svd("b"), svd("c"), svd("f"), other, bad], "e");
    program["graph_module"]["graph"]["tensor_values"]["e"] = tensor(7, &[size(2)]);
    let error = imported(&program).unwrap_err().to_string();
    for part in [
        "e (layer.0/add): torch.ops.aten.add.Tensor: argument 'other' is missing or is not a tensor or a number",
        "torch.ops.aten.linalg_svd.default: 4 at a (layer.0/linalg_svd), b (layer.0/linalg_svd), c (layer.0/linalg_svd), ...",
        "torch.ops.custom.mine.default: 1 at d",
    ] {
        assert!(error.contains(part), "{part}\n{error}");
    }
}

#[test]
fn what_is_wrong_with_an_archive_is_said() {
    let good = program(&[size(2), size(3)], vec![add("x", "p_w", "add")], "add");
    let text = good.to_string();
    let whole = packed(&good);
    let check = |bytes: &[u8], part: &str| {
        let error = import(bytes, &Options::default()).unwrap_err().to_string();
        assert!(error.contains(part), "{part}\n{error}");
    };
    check(&whole[..whole.len() / 2], "cut off");
    check(b"PK\x03\x04", "cut off");
    check(b"PK\x03\x04PK\x05\x06", "cannot be read");
    check(&archive(&[("m/readme", b"")]), "no exported program");
    check(&archive(&[("m/code/x.py", b""), ("m/constants.pkl", b"")]), "TorchScript");
    check(&archive(&[("m/data.pkl", b"")]), "checkpoint");
    check(&archive(&[("m/models/a.json", b"{}"), ("m/models/b.json", b"{}")]), "several programs");
    check(&archive(&[("m/models/model.json", b"{\n  \"graph")]), "m/models/model.json:2:");
    check(&archive(&[("m/models/model.json", b"{}")]), "graph_module");
    check(&archive(&[("../models/model.json", text.as_bytes())]), "leads out");
    check(&archive(&[("/models/model.json", text.as_bytes())]), "leads out");
    // JSON that is truncated, or has a part of another kind, gives an error or another program, but never
    // panics.
    for cut in (0..text.len()).step_by(37) {
        assert!(import(&archive(&[("m/models/model.json", &text.as_bytes()[..cut])]), &Options::default()).is_err());
    }
    let change = |path: &str, value: Value| {
        let mut changed = good.clone();
        *changed.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value;
        imported(&changed)
    };
    for (path, value, part) in [
        ("/graph_module/graph/tensor_values/x/sizes", json!([size(1 << 40), size(1 << 40)]), "input 'x'"),
        ("/graph_module/graph/tensor_values/x/sizes", json!([size(-1)]), "input 'x'"),
        ("/graph_module/graph/tensor_values/x/dtype", json!(20), "input 'x'"),
        ("/graph_module/graph/tensor_values/x/sizes", json!([size(5)]), "must be equal"),
        ("/graph_module/graph/nodes/0/inputs/0/arg", named("nothing"), "'nothing' is not defined"),
        ("/graph_module/graph/nodes/0/outputs", json!([]), "no tensor"),
        ("/graph_module/signature/output_specs", json!([]), "no tensor"),
    ] {
        let error = change(path, value).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(part), "{path}: {part}\n{error}");
    }
}

#[test]
fn archives_within_the_archive_are_left_alone() {
    let program = program(&[size(2)], vec![add("x", "p_w", "add")], "add");
    let example = archive(&[("data.txt", b"example")]);
    let text = program.to_string();
    for first in [true, false] {
        let mut entries: Vec<(&str, &[u8])> =
            vec![("m/models/model.json", text.as_bytes()), ("m/data/sample_inputs/model.pt", &example)];
        if first {
            entries.reverse();
        }
        assert_eq!(import(&archive(&entries), &Options::default()).map(|i| i.graph.len()), Ok(3));
    }
}

#[test]
fn declared_types_are_checked() {
    let mut program = program(&[size(2), size(3)], vec![add("x", "p_w", "add")], "add");
    program["graph_module"]["graph"]["tensor_values"]["add"] = tensor(6, &[size(2), size(3)]);
    let error = imported(&program).unwrap_err().to_string();
    assert!(error.contains("is declared to give f16[2,3], but gives f32[2,3]"), "{error}");
}

#[test]
fn older_archives_have_the_program_at_their_root() {
    let program = program(&[size(2)], vec![add("x", "p_w", "add")], "add");
    let bytes = archive(&[("version", b"5.3"), ("serialized_exported_program.json", program.to_string().as_bytes())]);
    assert_eq!(import(&bytes, &Options::default()).map(|i| i.graph.len()), Ok(3));
}

/// A program that marks the elements of `x` (`[2, 3]`) above 2.5, and uses the rows of `w` that the marked rows
/// select.
fn marked(uses: Vec<Value>, types: &[(&str, &[Value])], output: &str) -> Value {
    let marks =
        node("torch.ops.aten.gt.Scalar", &[("self", named("x")), ("other", json!({ "as_float": 2.5 }))], "marks");
    let mut places = node("torch.ops.aten.where.default", &[("condition", named("marks"))], "");
    places["outputs"] = json!([{ "as_tensors": [{ "name": "row" }, { "name": "column" }] }]);
    let rows = node(
        "torch.ops.aten.index.Tensor",
        &[("self", named("p_w")), ("indices", json!({ "as_optional_tensors": [{ "as_tensor": { "name": "row" } }] }))],
        "rows",
    );
    let mut program = program(&[size(2), size(3)], [vec![marks, places, rows], uses].concat(), output);
    let many = json!({ "as_expr": { "expr_str": "u0" } });
    let known = &mut program["graph_module"]["graph"]["tensor_values"];
    known["row"] = tensor(5, std::slice::from_ref(&many));
    known["column"] = tensor(5, std::slice::from_ref(&many));
    known["rows"] = tensor(7, &[many, size(3)]);
    types.iter().for_each(|(name, sizes)| known[*name] = tensor(7, sizes));
    program
}

#[test]
fn marked_rows_are_added_where_they_come_from() {
    let many = || json!({ "as_expr": { "expr_str": "u0" } });
    let arguments = |source: &str| {
        [("self", named("x")), ("dim", json!({ "as_int": 0 })), ("index", named("row")), ("source", named(source))]
    };
    // The whole second row is marked, so its row of `w` is added three times.
    let sum = node("torch.ops.aten.index_add.default", &arguments("rows"), "sum");
    assert_eq!(values(&marked(vec![sum], &[], "sum")), [0.0, 1.0, 2.0, 123.0, 154.0, 185.0]);
    // An elementwise op on the rows.
    let twice = add("rows", "rows", "twice");
    let sum = node("torch.ops.aten.index_add.default", &arguments("twice"), "sum");
    let program = marked(vec![twice, sum], &[("twice", &[many(), size(3)])], "sum");
    assert_eq!(values(&program), [0.0, 1.0, 2.0, 243.0, 304.0, 365.0]);
    // Elements of the mask's own shape are written. Unmarked elements keep their values.
    let both =
        json!({ "as_optional_tensors": [{ "as_tensor": { "name": "row" } }, { "as_tensor": { "name": "column" } }] });
    let element = node("torch.ops.aten.index.Tensor", &[("self", named("p_w")), ("indices", both.clone())], "element");
    let put = node(
        "torch.ops.aten.index_put.default",
        &[("self", named("x")), ("indices", both), ("values", named("element"))],
        "put",
    );
    assert_eq!(
        values(&marked(vec![element, put], &[("element", &[many()])], "put")),
        [0.0, 1.0, 2.0, 40.0, 50.0, 60.0]
    );
}

#[test]
fn marked_rows_that_mix_are_refused() {
    let dim = |name: &'static str| (name, json!({ "as_ints": [0] }));
    let total = node("torch.ops.aten.sum.dim_IntList", &[("self", named("rows")), dim("dim")], "total");
    let running =
        node("torch.ops.aten.cumsum.default", &[("self", named("rows")), ("dim", json!({ "as_int": 0 }))], "running");
    let many = json!({ "as_expr": { "expr_str": "u0" } });
    for (op, name, sizes) in [(total, "total", vec![size(3)]), (running, "running", vec![many, size(3)])] {
        let error = imported(&marked(vec![op], &[(name, &sizes)], name)).unwrap_err().to_string();
        assert!(error.contains("depends on data"), "{name}: {error}");
    }
}

/// On the meta device all parameters share one path and have no values, so their names distinguish them.
#[test]
fn parameters_without_values_are_told_apart() {
    let mut program = program(&[size(2)], vec![add("x", "p_w", "a"), add("a", "p_v", "b"), add("b", "c_k", "c")], "c");
    let module = &mut program["graph_module"];
    for (argument, spec) in [
        ("p_v", json!({ "parameter": { "arg": { "name": "p_v" }, "parameter_name": "layer.v" } })),
        ("c_k", json!({ "tensor_constant": { "arg": { "name": "c_k" }, "tensor_constant_name": "k" } })),
    ] {
        module["graph"]["inputs"].as_array_mut().unwrap().push(named(argument));
        module["graph"]["tensor_values"][argument] = tensor(7, &[size(2)]);
        module["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    }
    let with = |device: &str| {
        let payload = |path: &str| {
            let mut meta = tensor(7, &[size(2)]);
            meta["device"] = json!({ "type": device, "index": null });
            json!({ "path_name": path, "use_pickle": false, "tensor_meta": meta })
        };
        let weights =
            json!({ "config": { "layer.w": payload("weight_0"), "layer.v": payload("weight_0") } }).to_string();
        let constants = json!({ "config": { "k": payload("tensor_0") } }).to_string();
        let data: &[u8] = if device == "meta" { b"" } else { &[0; 8] };
        archive(&[
            ("m/models/model.json", program.to_string().as_bytes()),
            ("m/data/weights/model_weights_config.json", weights.as_bytes()),
            ("m/data/weights/weight_0", data),
            ("m/data/constants/model_constants_config.json", constants.as_bytes()),
            ("m/data/constants/tensor_0", data),
        ])
    };
    let leaves = |device: &str| {
        let imported = import(&with(device), &Options::default()).unwrap_or_else(|e| panic!("{e}"));
        let parameters: Vec<String> = imported.graph.parameters().map(|(_, name)| name.to_string()).collect();
        (parameters, imported.buffers)
    };
    assert_eq!(leaves("cpu"), (vec!["layer.w".to_string()], vec![]));
    // A constant without values becomes an input.
    assert_eq!(leaves("meta"), (vec!["layer.w".to_string(), "layer.v".to_string()], vec!["k".to_string()]));
    assert_eq!(weights(&with("cpu")).map(|all| all.len()), Ok(3));
    let error = weights(&with("meta")).unwrap_err().to_string();
    assert!(error.contains("'layer.v'") && error.contains("meta device"), "{error}");
}

#[test]
fn complex_numbers_are_pairs() {
    let unary =
        |op: &str, x: &str, output: &str| node(&format!("torch.ops.aten.{op}.default"), &[("self", named(x))], output);
    let product = node("torch.ops.aten.mul.Tensor", &[("self", named("z")), ("other", named("z"))], "square");
    let nodes = vec![unary("view_as_complex", "x", "z"), product, unary("view_as_real", "square", "pairs")];
    let mut program = program(&[size(2), size(2)], nodes, "pairs");
    program["graph_module"]["graph"]["tensor_values"]["z"] = tensor(10, &[size(2)]);
    program["graph_module"]["graph"]["tensor_values"]["square"] = tensor(10, &[size(2)]);
    // The squares of i and of 2 + 3i.
    assert_eq!(values(&program), [-1.0, 0.0, -5.0, 12.0]);
}

#[test]
fn what_follows_from_an_op_that_is_not_supported_is_one_line() {
    let missing = node("torch.ops.custom.mine.default", &[("self", named("x"))], "a");
    let follow = [add("a", "p_w", "b"), add("b", "p_w", "c"), add("c", "c", "d")];
    let nodes = [vec![missing], follow.to_vec()].concat();
    let error = imported(&program(&[size(2)], nodes, "d")).unwrap_err().to_string();
    assert_eq!(
        error,
        "these operations are not supported:\n  torch.ops.custom.mine.default: 1 at a (layer.0/custom)\n\
         3 operations that use their results were not looked at"
    );
}

#[test]
fn all_inputs_of_wrong_types_are_said_and_what_was_guessed() {
    let kron = node("torch.ops.aten.kron.default", &[("self", named("y")), ("other", named("y"))], "k");
    let mut program = program(&[size(2)], vec![add("x", "p_w", "a"), kron], "a");
    let graph = &mut program["graph_module"]["graph"];
    graph["tensor_values"]["p_w"]["dtype"] = json!(20);
    graph["tensor_values"]["x"]["dtype"] = json!(21);
    let mut open = open("s0");
    open["as_expr"]["hint"] = Value::Null;
    graph["inputs"].as_array_mut().unwrap().push(named("y"));
    graph["tensor_values"]["y"] = tensor(7, &[open]);
    let spec = json!({ "user_input": { "arg": named("y") } });
    program["graph_module"]["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    let error = imported(&program).unwrap_err().to_string();
    for part in [
        "input 'p_w': its type",
        "input 'x': its type",
        "aten.kron.default: 1 at k",
        "run_decompositions()",
        "s0 (y.0)=2",
    ] {
        assert!(error.contains(part), "{part}\n{error}");
    }
}

/// `zeros(n.item()) + x` with a data-dependent number, whose symbol is given like an open size.
#[test]
fn sizes_that_data_decides_can_be_given() {
    let mut item = node("torch.ops.aten.item.default", &[("self", named("y"))], "item");
    item["outputs"] = json!([{ "as_sym_int": { "as_name": "item" } }]);
    let zeros = node(
        "torch.ops.aten.zeros.default",
        &[("size", json!({ "as_sym_ints": [{ "as_name": "item" }] })), ("dtype", json!({ "as_scalar_type": 7 }))],
        "zeros",
    );
    let mut program = program(&[size(3)], vec![item, zeros, add("zeros", "x", "sum")], "sum");
    let graph = &mut program["graph_module"]["graph"];
    graph["inputs"].as_array_mut().unwrap().push(named("y"));
    graph["tensor_values"]["y"] = tensor(5, &[]);
    graph["sym_int_values"] = json!({ "item": { "as_expr": { "expr_str": "u0", "hint": null } } });
    let spec = json!({ "user_input": { "arg": named("y") } });
    program["graph_module"]["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    program["range_constraints"]["u0"] = json!({ "min_val": 0, "max_val": 8 });
    let with = |sizes: &[(&str, u64)]| {
        let sizes = sizes.iter().map(|(name, n)| (name.to_string(), *n)).collect();
        import(&packed(&program), &Options { sizes }).map(|i| i.graph.shape(i.graph.outputs[0]).to_vec())
    };
    assert_eq!(with(&[("u0", 3)]), Ok(vec![3]));
    let error = with(&[]).unwrap_err().to_string();
    assert!(error.contains("depends on data") && error.contains("--size u0=N"), "{error}");
    assert!(with(&[("u0", 9)]).unwrap_err().to_string().contains("0 to 8"));
}

/// An archive whose one entry of constants has `count` names, for tensors of `sizes` with stride 0.
fn shared_entry(count: usize, elements: i64, stride: i64, entry: &[u8], how: SimpleFileOptions) -> Vec<u8> {
    let meta = json!({ "dtype": 7, "sizes": [size(elements)], "strides": [size(stride)], "storage_offset": size(0) });
    let payload = json!({ "path_name": "tensor_0", "use_pickle": false, "tensor_meta": meta });
    let config: serde_json::Map<String, Value> = (0..count).map(|i| (format!("k{i}"), payload.clone())).collect();
    let config = json!({ "config": config }).to_string();
    let program = program(&[size(2)], vec![add("x", "p_w", "add")], "add").to_string();
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let folder = "m/data/constants";
    for (name, bytes) in [
        ("m/models/model.json", program.as_bytes()),
        (&format!("{folder}/model_constants_config.json"), config.as_bytes()),
        (&format!("{folder}/tensor_0"), entry),
    ] {
        zip.start_file(name, how).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// Small files of which a reader would make gigabytes.
#[test]
fn files_that_take_memory_out_of_proportion_are_refused() {
    let stored = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let deflated = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    let refused = |bytes: &[u8], most: usize| {
        assert!(bytes.len() < most, "{} bytes", bytes.len());
        let error = weights(bytes).unwrap_err().to_string();
        assert!(error.contains("out of proportion to the"), "{error}");
    };
    // One element, repeated.
    refused(&shared_entry(1, 1 << 34, 0, &[0; 4], stored), 2 << 10);
    // One entry under many names.
    let megabyte = vec![0; 1 << 20];
    refused(&shared_entry(20_000, 1 << 18, 1, &megabyte, deflated), 128 << 10);
    // Text that deflates to a thousandth.
    let program = program(&[size(2)], vec![add("x", "p_w", "add")], "add").to_string();
    let long = format!("{program}{}", " ".repeat(256 << 20));
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file("m/models/model.json", deflated).unwrap();
    zip.write_all(long.as_bytes()).unwrap();
    let bytes = zip.finish().unwrap().into_inner();
    assert!(bytes.len() < 1 << 20, "{} bytes", bytes.len());
    let error = import(&bytes, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("entry 'm/models/model.json'") && error.contains("out of proportion"), "{error}");
    // Repetition in proportion is read: a mask of one row, expanded.
    let all = weights(&shared_entry(2, 1 << 20, 0, &[0, 0, 128, 63], stored)).unwrap();
    assert_eq!(all.len(), 2);
    assert!(all.iter().all(|stored| stored.bytes.len() == 4 << 20 && stored.values().iter().all(|&x| x == 1.0)));
}
