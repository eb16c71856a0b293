//! Models encoded here, with their expected graphs or error messages.

mod prepare;

use super::proto::{
    Attribute, Dimension, Function, Graph, Model, Node, OperatorSet, Property, Shape, Tensor, Type, TypeOfTensor,
    ValueInfo, kind,
};
use super::*;
use altiplano_ir::dtype::DType;
use altiplano_ir::interpret;
use altiplano_ir::op::{Op, Parameter};
use altiplano_ir::tensor;
use prost::Message;

/// A node such as `Add(a, b) -> y`.
fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> Node {
    let names = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
    Node { op_type: op.into(), input: names(inputs), output: names(outputs), ..Default::default() }
}

fn with(mut node: Node, attribute: Attribute) -> Node {
    node.attribute.push(attribute);
    node
}

fn int(name: &str, value: i64) -> Attribute {
    Attribute { name: name.into(), i: Some(value), kind: kind::INT, ..Default::default() }
}

fn body(name: &str, graph: Graph) -> Attribute {
    Attribute { name: name.into(), g: Some(Box::new(graph)), kind: kind::GRAPH, ..Default::default() }
}

/// An f32 input whose sizes are numbers or names.
fn input(name: &str, dims: &[&str]) -> ValueInfo {
    let dimension = |d: &&str| match d.parse() {
        Ok(value) => Dimension { value: Some(value), param: None },
        Err(_) => Dimension { value: None, param: Some(d.to_string()) },
    };
    let shape = Some(Shape { dim: dims.iter().map(dimension).collect() });
    ValueInfo { name: name.into(), ty: Some(Type { tensor: Some(TypeOfTensor { elem_type: 1, shape }) }) }
}

fn output(name: &str) -> ValueInfo {
    ValueInfo { name: name.into(), ty: None }
}

fn floats(name: &str, dims: &[i64], data: &[f32]) -> Tensor {
    let float_data = data.to_vec();
    Tensor { name: name.into(), dims: dims.to_vec(), data_type: 1, float_data, ..Default::default() }
}

fn integers(name: &str, data: &[i64]) -> Tensor {
    let (dims, int64_data) = (vec![data.len() as i64], data.to_vec());
    Tensor { name: name.into(), dims, data_type: 7, int64_data, ..Default::default() }
}

fn graph(nodes: Vec<Node>, inputs: Vec<ValueInfo>, initializers: Vec<Tensor>, outputs: &[&str]) -> Graph {
    Graph {
        node: nodes,
        input: inputs,
        initializer: initializers,
        output: outputs.iter().map(|name| output(name)).collect(),
        ..Default::default()
    }
}

fn model(graph: Graph) -> Model {
    let opset_import = vec![OperatorSet { domain: String::new(), version: 18 }];
    Model { ir_version: 9, graph: Some(graph), opset_import, ..Default::default() }
}

fn read(model: &Model) -> Result<Imported, OnnxError> {
    import(&model.encode_to_vec(), &Options::default(), &|_, _| None)
}

fn refused(model: Model, expected: &str) {
    match read(&model) {
        Ok(imported) => panic!("'{expected}' was expected of\n{}", imported.graph),
        Err(error) => assert!(error.to_string().contains(expected), "'{error}' has no '{expected}'"),
    }
}

/// The ops of the graph other than leaves.
fn ops(imported: &Imported) -> Vec<&'static str> {
    imported.graph.nodes.iter().filter(|n| !n.op.is_leaf()).map(|n| n.op.name()).collect()
}

/// The first output, if all elements of the leaves are `value`.
fn run(imported: &Imported, value: f64) -> Vec<f64> {
    assert_eq!(imported.graph.verify(), []);
    let leaf = |v| tensor::Tensor::splat(imported.graph.ty(v).clone(), value);
    interpret::run(&imported.graph, leaf).remove(0).data
}

/// 20 MB of empty nodes would become 4 GB.
#[test]
fn files_of_empty_nodes_are_refused_before_they_are_decoded() {
    let nodes = [0x0a, 0].repeat(10_000_000);
    let mut bytes = vec![0x3a];
    prost::encoding::encode_varint(nodes.len() as u64, &mut bytes);
    bytes.extend(nodes);
    let error = import(&bytes, &Options::default(), &|_, _| None).expect_err("it is refused").to_string();
    assert!(error.contains(&format!("out of proportion to the {} bytes", bytes.len())), "{error}");
}

#[test]
fn a_layer_keeps_its_names() {
    let mut dense = node("Gemm", &["x", "h.0.fc.weight", "h.0.fc.bias"], &["y"]);
    dense.attribute.push(int("transB", 1));
    let weights = vec![floats("h.0.fc.weight", &[2, 3], &[1.0; 6]), floats("h.0.fc.bias", &[2], &[1.0, 2.0])];
    let imported = read(&model(graph(vec![dense], vec![input("x", &["4", "3"])], weights, &["y"]))).unwrap();
    let names: Vec<&str> = imported.arguments.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(names, ["x", "h.0.fc.weight", "h.0.fc.bias"]);
    assert_eq!(imported.results, ["y"]);
    assert!(imported.graph.nodes.iter().filter(|n| !n.op.is_leaf()).all(|n| n.name == "h.0.fc"));
    assert_eq!(run(&imported, 2.0), [14.0; 8]);
}

#[test]
fn module_paths_are_found() {
    for (name, property, expected) in [
        ("/h/h.0/fc/Relu", None, "h.0.fc"),
        ("relu_7", None, "relu_7"),
        ("n", Some("['', 'h', 'h.0', 'h.0.act', 'relu']"), "h.0.act"),
        ("n", Some("nonsense"), "n"),
    ] {
        let mut relu = node("Relu", &["x"], &["y"]);
        relu.name = name.into();
        let scopes = |value: &str| Property { key: "pkg.torch.onnx.name_scopes".into(), value: value.into() };
        relu.metadata_props.extend(property.map(scopes));
        let imported = read(&model(graph(vec![relu], vec![input("x", &["2"])], vec![], &["y"]))).unwrap();
        assert_eq!(imported.graph.nodes.last().unwrap().name, expected);
    }
}

/// The nodes that exporters write for `x.reshape(x.shape[0], -1)`.
#[test]
fn shapes_are_computed_while_reading() {
    let nodes = vec![
        node("Shape", &["x"], &["shape"]),
        node("Gather", &["shape", "zero"], &["batch"]),
        node("Concat", &["batch", "rest"], &["wanted"]),
        node("Reshape", &["x", "wanted"], &["y"]),
    ];
    let nodes: Vec<Node> =
        nodes.into_iter().map(|n| if n.op_type == "Concat" { with(n, int("axis", 0)) } else { n }).collect();
    let held = vec![integers("zero", &[0]), integers("rest", &[-1])];
    let file = model(graph(nodes, vec![input("x", &["batch", "3", "5"])], held, &["y"]));
    let imported = read(&file).unwrap();
    assert_eq!(ops(&imported), ["reshape"]);
    assert_eq!(imported.graph.shape(imported.graph.outputs[0]), [8, 15]);
    let size = Size { name: "batch".into(), value: 8, said: false, is_batch: true };
    assert_eq!(imported.sizes, [size]);
    let said = |name: &str| Options { sizes: vec![(name.into(), 6)] };
    let imported = import(&file.encode_to_vec(), &said("batch"), &|_, _| None).unwrap();
    assert_eq!(imported.graph.shape(imported.graph.outputs[0]), [6, 15]);
    let error = import(&file.encode_to_vec(), &said("width"), &|_, _| None).unwrap_err();
    assert!(error.to_string().contains("no size 'width'; it has batch"));
}

#[test]
fn what_a_file_holds_is_trained_kept_or_constant() {
    let batch_norm = node("BatchNormalization", &["x", "scale", "bias", "mean", "var"], &["n"]);
    let nodes = vec![batch_norm, node("Mul", &["n", "factor"], &["m"]), node("Add", &["m", "stripped"], &["y"])];
    let mut held: Vec<Tensor> = ["scale", "bias", "mean", "var"].map(|name| floats(name, &[3], &[1.0; 3])).into();
    held.push(floats("factor", &[], &[0.5]));
    held.push(floats("stripped", &[3, 1], &[]));
    held.push(floats("unused", &[7], &[]));
    let imported = read(&model(graph(nodes, vec![input("x", &["2", "3", "4"])], held, &["y"]))).unwrap();
    let trained: Vec<&str> = imported.graph.parameters().map(|(_, name)| name).collect();
    assert_eq!(trained, ["scale", "bias", "stripped"]);
    assert_eq!(imported.buffers, ["mean", "var"]);
}

#[test]
fn functions_are_inlined_with_their_attributes() {
    let mut scaled = with(node("LeakyRelu", &["a"], &["b"]), int("unused", 1));
    scaled.attribute = vec![Attribute {
        name: "alpha".into(),
        ref_attr_name: "slope".into(),
        kind: kind::FLOAT,
        ..Default::default()
    }];
    let function = Function {
        name: "Leak".into(),
        domain: "mine".into(),
        input: vec!["a".into(), "left_out".into()],
        output: vec!["b".into()],
        node: vec![scaled],
        opset_import: vec![OperatorSet { domain: String::new(), version: 16 }],
        ..Default::default()
    };
    let slope = Attribute { name: "slope".into(), f: Some(0.25), kind: kind::FLOAT, ..Default::default() };
    let mut call = with(node("Leak", &["x"], &["y"]), slope);
    call.domain = "mine".into();
    let mut file = model(graph(vec![call], vec![input("x", &["2"])], vec![], &["y"]));
    file.functions.push(function);
    assert_eq!(run(&read(&file).unwrap(), -4.0), [-1.0; 2]);
    // A function that calls itself.
    let mut again = node("Leak", &["a"], &["b"]);
    again.domain = "mine".into();
    file.functions[0].node = vec![again];
    refused(file, "calls itself");
}

#[test]
fn known_branches_are_taken_and_loops_unrolled() {
    let branch = |op: &str| graph(vec![node(op, &["x"], &["r"])], vec![], vec![], &["r"]);
    let choice = |condition: Tensor, inputs: Vec<ValueInfo>| {
        let choose = with(node("If", &["c"], &["y"]), body("then_branch", branch("Neg")));
        let choose = with(choose, body("else_branch", branch("Abs")));
        model(graph(vec![choose], inputs, vec![condition], &["y"]))
    };
    let condition = |value| Tensor { data_type: 9, int32_data: vec![value], ..floats("c", &[], &[]) };
    let x = || vec![input("x", &["2"])];
    assert_eq!(run(&read(&choice(condition(1), x())).unwrap(), 3.0), [-3.0; 2]);
    assert_eq!(run(&read(&choice(condition(0), x())).unwrap(), -3.0), [3.0; 2]);
    // If data decides, both branches are computed and one result is selected. They must have the same shape.
    let open = |model: &Model, other: Option<Graph>| {
        let mut open = model.clone();
        let graph_of = open.graph.as_mut().unwrap();
        graph_of.initializer = vec![floats("zero", &[], &[0.0])];
        graph_of.input.push(input("s", &[]));
        graph_of.node.insert(0, node("Greater", &["s", "zero"], &["c"]));
        if let Some(other) = other {
            graph_of.node[1].attribute[1] = body("else_branch", other);
        }
        open
    };
    let chosen = open(&choice(condition(1), x()), None);
    assert_eq!(run(&read(&chosen).unwrap(), 3.0), [-3.0; 2]);
    assert_eq!(run(&read(&chosen).unwrap(), -3.0), [3.0; 2]);
    let shorter = graph(vec![node("Neg", &["s"], &["r"])], vec![], vec![], &["r"]);
    refused(open(&choice(condition(1), x()), Some(shorter)), "depends on data, with results of different shapes");

    // Doubles its value three times, or as often as a number says.
    let inner = Graph {
        node: vec![node("Add", &["v", "v"], &["w"]), node("Identity", &["going"], &["goes"])],
        input: vec![output("i"), output("going"), output("v")],
        output: vec![output("goes"), output("w")],
        ..Default::default()
    };
    let repeat = |count: i64| {
        let turn = with(node("Loop", &["count", "", "x"], &["y"]), body("body", inner.clone()));
        let count = Tensor { dims: vec![], ..integers("count", &[count]) };
        model(graph(vec![turn], x(), vec![count], &["y"]))
    };
    assert_eq!(run(&read(&repeat(3)).unwrap(), 1.0), [8.0; 2]);
    refused(repeat(i64::MAX), "more than");
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    let one = |n: Node| model(graph(vec![n], vec![input("x", &["2", "3"])], vec![], &["y"]));
    refused(one(node("Relu", &["z"], &["y"])), "node 'y' (Relu): 'z' is not defined before this node");
    refused(one(node("Relu", &["y"], &["y"])), "not defined before");
    refused(one(node("Add", &["x"], &["y"])), "operand 1 is missing");
    refused(one(node("Relu", &["x"], &["other"])), "output 'y' is made by no node");
    refused(one(node("Split", &["x"], &["a", "b", "c", "y"])), "(Split)");
    // A list of all parts would take 32 GB.
    let parts = with(node("Split", &["x"], &["y"]), int("num_outputs", 1 << 32));
    refused(model(graph(vec![parts], vec![input("x", &["4294967296"])], vec![], &["y"])), "num_outputs");
    refused(one(with(node("Flatten", &["x"], &["y"]), int("axis", 9))), "dimension 9 is out of range");
    refused(one(with(node("Softmax", &["x"], &["y"]), int("axis", i64::MIN))), "out of range");
    refused(
        one(with(node("Concat", &["x", "x"], &["y"]), Attribute { name: "axis".into(), ..Default::default() })),
        "'axis'",
    );
    refused(one(node("Reshape", &["x", "x"], &["y"])), "must follow from constants");
    refused(one(with(node("Cast", &["x"], &["y"]), int("to", 8))), "element type 8 is not supported");
    refused(one(node("Conv", &["x", "x"], &["y"])), "(Conv)");
    // All unknown ops are reported at once.
    let mut foreign = node("Frobnicate", &["a"], &["y"]);
    foreign.domain = "their.ops".into();
    let nodes = vec![node("Bernoulli", &["x"], &["a"]), node("Bernoulli", &["x"], &["b"]), foreign];
    let unknown = graph(nodes, vec![input("x", &["2"])], vec![], &["y"]);
    refused(model(unknown), "Bernoulli: 2 at a, b\n  their.ops.Frobnicate: 1 at y");
    let twice = vec![node("Relu", &["x"], &["y"]), node("Neg", &["x"], &["y"])];
    refused(model(graph(twice, vec![input("x", &["2"])], vec![], &["y"])), "'y' is defined twice");
    // Cycles.
    let cycle = vec![node("Neg", &["b"], &["a"]), node("Neg", &["a"], &["b"]), node("Relu", &["b"], &["y"])];
    refused(model(graph(cycle, vec![], vec![], &["y"])), "node 'a' (Neg): 'b' is not defined before");
}

#[test]
fn broken_tensors_are_refused() {
    let of = |w: Tensor| model(graph(vec![node("Neg", &["w"], &["y"])], vec![], vec![w], &["y"]));
    refused(of(floats("w", &[-3], &[])), "initializer 'w': the size -3");
    refused(of(floats("w", &[1 << 40, 1 << 40], &[])), "larger than any tensor");
    let raw = Tensor { raw_data: vec![0; 7], ..floats("w", &[2], &[]) };
    refused(of(raw), "7 elements or bytes, but its shape takes 8");
    refused(of(Tensor { int64_data: vec![1], ..integers("w", &[1, 2]) }), "but its shape takes 2");
    refused(of(Tensor { data_type: 99, ..floats("w", &[2], &[]) }), "element type 99");
    let mut sequence = of(floats("w", &[2], &[]));
    sequence.graph.as_mut().unwrap().input.push(output("s"));
    refused(sequence, "input 's' is no tensor");
    for (dims, said) in [(&["-5"][..], "-5"), (&["9223372036854775807", "4"], "larger than any tensor")] {
        refused(model(graph(vec![node("Neg", &["x"], &["y"])], vec![input("x", dims)], vec![], &["y"])), said);
    }
}

#[test]
fn constants_have_the_bits_of_their_types() {
    for (data_type, raw, expected) in [
        (1, vec![0, 0, 192, 63, 0, 0, 0, 192], vec![1.5, -2.0]),
        (3, vec![255, 7], vec![-1.0, 7.0]),
        (10, vec![0, 60, 0, 192], vec![1.0, -2.0]),
        (16, vec![128, 63, 0, 192], vec![1.0, -2.0]),
        (22, vec![0x2f], vec![-1.0, 2.0]),
        (9, vec![1, 0], vec![1.0, 0.0]),
        (6, vec![255, 255, 255, 255, 5, 0, 0, 0], vec![-1.0, 5.0]),
    ] {
        let held = Tensor { dims: vec![2], data_type, raw_data: raw, ..Default::default() };
        let found = super::tensor::elements_of(&held).unwrap();
        assert_eq!(found.data, expected, "type {data_type}");
    }
    let narrow = Tensor { dims: vec![1], data_type: 10, int32_data: vec![0xC000], ..Default::default() };
    assert_eq!(super::tensor::elements_of(&narrow).unwrap().data, [-2.0]);
    assert_eq!(super::tensor::dtype_of(24), Ok(DType::F8E8M0FNU));
}

/// Damaged bytes give an error, never a panic.
#[test]
fn files_that_are_cut_off_or_garbled_are_refused() {
    let weights = vec![floats("w", &[3], &[1.0, 2.0, 3.0]), integers("shape", &[2, 3])];
    let nodes = vec![node("Mul", &["x", "w"], &["m"]), node("Reshape", &["m", "shape"], &["y"])];
    let bytes = model(graph(nodes, vec![input("x", &["2", "3"])], weights, &["y"])).encode_to_vec();
    assert!(import(&bytes, &Options::default(), &|_, _| None).is_ok());
    for end in 0..bytes.len() {
        assert!(import(&bytes[..end], &Options::default(), &|_, _| None).is_err(), "{end} bytes");
    }
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut garbled = bytes.clone();
            garbled[at] ^= flip;
            // It may still be a model, but then its graph must verify.
            if let Ok(imported) = import(&garbled, &Options::default(), &|_, _| None) {
                assert_eq!(imported.graph.verify(), []);
            }
        }
    }
}

#[test]
fn tensors_in_other_files_keep_to_the_folder() {
    let at = |location: &str| Tensor {
        data_location: 1,
        external_data: vec![Property { key: "location".into(), value: location.into() }],
        ..floats("w", &[3], &[])
    };
    for (location, fine) in
        [("weights.data", true), ("a/b", true), ("../b", false), ("/b", false), ("a/../../b", false)]
    {
        let file = model(graph(vec![node("Neg", &["w"], &["y"])], vec![], vec![at(location)], &["y"]));
        // The graph does not need the data.
        let imported = read(&file).unwrap();
        assert!(matches!(&imported.graph.nodes[0].op, Op::Parameter(Parameter { name, .. }) if name == "w"));
        assert_eq!(held(&file.encode_to_vec(), &|_, _| None).is_ok(), fine, "{location}");
    }
}

/// For an exporter that writes all weights as nodes, floats that layers use are parameters, and integers are not.
#[test]
fn weights_in_nodes_are_parameters_where_there_are_no_others() {
    let held = |tensor: Tensor| {
        let name = tensor.name.clone();
        let value = Attribute { name: "value".into(), t: Some(tensor), kind: kind::TENSOR, ..Default::default() };
        with(node("Constant", &[], &[&name]), value)
    };
    let of = |initializers: Vec<Tensor>| {
        let nodes = vec![
            held(floats("fc.w", &[3, 2], &[1.0; 6])),
            held(integers("shape", &[2, 2, 1])),
            node("MatMul", &["x", "fc.w"], &["h"]),
            node("Reshape", &["h", "shape"], &["y"]),
        ];
        let inputs = vec![input("x", &["2", "3"])];
        let imported = read(&model(graph(nodes, inputs, initializers, &["y"]))).unwrap();
        imported.graph.parameters().map(|(_, name)| name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(of(vec![]), ["fc.w"]);
    // If there are initializers, a constant stays a constant.
    assert_eq!(of(vec![floats("other", &[2], &[1.0; 2])]), Vec::<String>::new());
}

/// Two samples of one and two steps. After its end, a sample has zero results, and its last state is that at the end.
#[test]
fn recurrent_layers_end_where_samples_do() {
    let layer = |outputs: &[&str]| {
        let layer = with(node("RNN", &["x", "w", "r", "", "lengths"], outputs), int("hidden_size", 1));
        let lengths =
            Tensor { data_type: 6, int32_data: vec![1, 2], int64_data: vec![], ..integers("lengths", &[1, 2]) };
        let inputs = vec![input("x", &["2", "2", "1"]), input("w", &["1", "1", "1"]), input("r", &["1", "1", "1"])];
        let result = outputs.iter().find(|name| !name.is_empty()).copied().unwrap_or_default();
        run(&read(&model(graph(vec![layer], inputs, vec![lengths], &[result]))).unwrap(), 1.0)
    };
    let first = 1f64.tanh();
    let second = (1.0 + first).tanh();
    let near = |found: Vec<f64>, expected: &[f64]| {
        assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6), "{found:?} {expected:?}");
    };
    near(layer(&["y"]), &[first, first, 0.0, second]);
    near(layer(&["", "h"]), &[first, second]);
}
