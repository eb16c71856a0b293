//! ONNX models end to end: planned, trained and verified from a file that the test encodes.

use crate::common::{Scratch, succeeds};
use altiplano_import::onnx::proto::{
    Dimension, Graph, Model, Node, OperatorSet, Property, Shape, Tensor, Type, TypeOfTensor, ValueInfo,
};
use prost::Message;

fn node(op: &str, inputs: &[&str], output: &str) -> Node {
    let input = inputs.iter().map(|s| s.to_string()).collect();
    Node { op_type: op.into(), input, output: vec![output.into()], ..Default::default() }
}

/// An input of `batch` samples.
fn input(name: &str, elem_type: i32, more: &[i64]) -> ValueInfo {
    let batch = Dimension { value: None, param: Some("batch".into()) };
    let fixed = more.iter().map(|&size| Dimension { value: Some(size), param: None });
    let shape = Some(Shape { dim: std::iter::once(batch).chain(fixed).collect() });
    ValueInfo { name: name.into(), ty: Some(Type { tensor: Some(TypeOfTensor { elem_type, shape }) }) }
}

/// A weight whose data starts at `offset` of the file `weights.bin`.
fn weight(name: &str, dims: &[i64], offset: i64) -> Tensor {
    let property = |key: &str, value: String| Property { key: key.into(), value };
    let length = dims.iter().product::<i64>() * 4;
    let place = [("location", "weights.bin".into()), ("offset", offset.to_string()), ("length", length.to_string())];
    Tensor {
        name: name.into(),
        dims: dims.to_vec(),
        data_type: 1,
        data_location: 1,
        external_data: place.into_iter().map(|(key, value)| property(key, value)).collect(),
        ..Default::default()
    }
}

/// Two layers and a loss.
fn classifier() -> Vec<u8> {
    let nodes = vec![
        node("MatMul", &["x", "fc1.weight"], "a"),
        node("Add", &["a", "fc1.bias"], "b"),
        node("Gelu", &["b"], "c"),
        node("MatMul", &["c", "fc2.weight"], "scores"),
        node("SoftmaxCrossEntropyLoss", &["scores", "labels"], "loss"),
    ];
    let initializer =
        vec![weight("fc1.weight", &[6, 8], 0), weight("fc1.bias", &[8], 192), weight("fc2.weight", &[8, 4], 224)];
    let graph = Graph {
        node: nodes,
        initializer,
        input: vec![input("x", 1, &[6]), input("labels", 7, &[])],
        output: vec![ValueInfo { name: "loss".into(), ty: None }],
        ..Default::default()
    };
    let opset_import = vec![OperatorSet { domain: String::new(), version: 20 }];
    Model { ir_version: 10, graph: Some(graph), opset_import, ..Default::default() }.encode_to_vec()
}

#[test]
fn a_model_is_planned_trained_and_verified() {
    let scratch = Scratch::new();
    let file = scratch.file("classifier.onnx", classifier());
    let weights: Vec<u8> = (0..88).flat_map(|i| ((i * 37 % 19) as f32 / 19.0 - 0.5).to_le_bytes()).collect();
    scratch.file("weights.bin", weights);
    let shown = succeeds(&["show", &file, "--size", "batch=12"]);
    assert!(
        shown.contains("f32[12b,6] = input \"x\"") && shown.contains("f32[8,4] = parameter \"fc2.weight\""),
        "{shown}"
    );
    for plan in [["--dp", "2"], ["--tp", "2"], ["--pp", "2"]] {
        let arguments = [&["verify", file.as_str(), "--weights", &file], &plan[..]].concat();
        assert!(succeeds(&arguments).contains("the numbers agree"), "{plan:?}");
    }
    // Training starts from the model's weights: with other weights the loss differs.
    let first_loss = |more: &[&str]| {
        let said = succeeds(&[&["run", file.as_str(), "--steps", "1", "--dp", "2"], more].concat());
        said.lines().find(|line| line.contains("loss")).map(str::to_string).expect("a step")
    };
    let loss = |line: &str| line.split_whitespace().nth(3).map(str::to_string);
    assert_ne!(loss(&first_loss(&["--weights", &file])), loss(&first_loss(&[])));
}

/// Two layers whose biases the exporter merged, and a mask that it looked up sample by sample.
fn merged() -> Vec<u8> {
    let property = |key: &str, value: &str| Property { key: key.into(), value: value.into() };
    let scoped = |mut node: Node, module: &str| {
        node.metadata_props = vec![property("pkg.torch.onnx.name_scopes", &format!("['', '{module}', 'op']"))];
        node
    };
    let held = |name: &str, dims: &[i64], data_type: i32, raw_data: Vec<u8>| Tensor {
        name: name.into(),
        dims: dims.to_vec(),
        data_type,
        raw_data,
        ..Default::default()
    };
    let floats = |n: usize, value: f32| (0..n).flat_map(|_| value.to_le_bytes()).collect::<Vec<u8>>();
    let nodes = vec![
        scoped(node("MatMul", &["x", "val_1"], "a"), "fc1"),
        scoped(node("Add", &["a", "fc1.bias"], "b"), "fc1"),
        node("Tanh", &["b"], "c"),
        scoped(node("MatMul", &["c", "val_2"], "d"), "fc2"),
        scoped(node("Add", &["d", "fc1.bias"], "e"), "fc2"),
        node("GatherND", &["e", "places"], "scores"),
        node("SoftmaxCrossEntropyLoss", &["scores", "labels"], "loss"),
    ];
    let places = (0..32i64).flat_map(|i| [i / 4, 3 - i % 4]).flat_map(i64::to_le_bytes).collect();
    let initializer = vec![
        held("val_1", &[6, 4], 1, floats(24, 0.25)),
        held("val_2", &[4, 4], 1, floats(16, -0.5)),
        held("fc1.bias", &[4], 1, floats(4, 0.0)),
        held("places", &[8, 4, 2], 7, places),
    ];
    let fixed = |mut value: ValueInfo| {
        if let Some(dim) = value.ty.as_mut().and_then(|ty| ty.tensor.as_mut()?.shape.as_mut()?.dim.first_mut()) {
            *dim = Dimension { value: Some(8), param: None };
        }
        value
    };
    let listed = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"].map(|n| format!("p: PARAMETER target='{n}'\n"));
    let graph = Graph {
        node: nodes,
        initializer,
        input: vec![fixed(input("x", 1, &[6])), fixed(input("labels", 7, &[]))],
        output: vec![ValueInfo { name: "loss".into(), ty: None }],
        metadata_props: vec![property("pkg.torch.export.ExportedProgram.graph_signature", &listed.concat())],
        ..Default::default()
    };
    let opset_import = vec![OperatorSet { domain: String::new(), version: 20 }];
    Model { ir_version: 10, graph: Some(graph), opset_import, ..Default::default() }.encode_to_vec()
}

#[test]
fn merged_parameters_are_trained_apart() {
    let scratch = Scratch::new();
    let file = scratch.file("merged.onnx", merged());
    let shown = succeeds(&["show", &file]);
    for leaf in ["f32[6,4] = parameter \"fc1.weight.T\"", "f32[4] = parameter \"fc2.bias\"", "f32[8b,6] = input \"x\""]
    {
        assert!(shown.contains(leaf), "{leaf}\n{shown}");
    }
    // The file holds everything that is trained, and the samples are split into microbatches.
    let verified = succeeds(&["verify", &file, "--weights", &file, "--pp", "2", "--num-microbatches", "4"]);
    assert!(verified.contains("the numbers agree") && verified.contains("worst of 4"), "{verified}");
}
