//! Tests the restoration of tensors that exporters merge, fold, omit or expand.

use super::*;

/// The exporter's list of these parameters.
fn listing(names: &[&str]) -> Vec<Property> {
    let line = |name: &&str| format!("p_x: PARAMETER target='{name}'\n");
    let value = names.iter().map(line).collect();
    vec![Property { key: "pkg.torch.export.ExportedProgram.graph_signature".into(), value }]
}

fn scoped(mut node: Node, module: &str) -> Node {
    let value = format!("['', '{module}', 'op']");
    node.metadata_props = vec![Property { key: "pkg.torch.onnx.name_scopes".into(), value }];
    node
}

fn perceptron(modules: bool, listed: &[&str], gain: Option<f32>) -> Model {
    let place = |node: Node, module: &str| if modules { scoped(node, module) } else { node };
    let norm = |x: &str, y: &str| node("LayerNormalization", &[x, "a.norm.weight", "a.norm.bias"], &[y]);
    let nodes = vec![
        place(norm("x", "1"), "a.norm"),
        place(node("Gemm", &["1", "a.fc.weight"], &["2"]), "a.fc"),
        place(norm("2", "3"), "b.norm"),
        place(node("Gemm", &["3", "b.fc.weight"], &["4"]), "b.fc"),
        place(node("MatMul", &["4", "a.fc.weight"], &["y"]), "tied"),
    ];
    let vector = |name: &str, value: Option<f32>| match value {
        Some(value) => floats(name, &[4], &[value, value, value, value]),
        None => floats(name, &[4], &[]),
    };
    let matrix = |name: &str| floats(name, &[4, 4], &(0..16).map(|i| i as f32).collect::<Vec<_>>());
    let held = vec![
        vector("a.norm.weight", gain),
        vector("a.norm.bias", Some(0.0)),
        matrix("a.fc.weight"),
        matrix("b.fc.weight"),
    ];
    let mut graph = graph(nodes, vec![input("x", &["8", "4"])], held, &["y"]);
    graph.metadata_props = listing(listed);
    model(graph)
}

const ALL: [&str; 9] = [
    "a.norm.weight",
    "a.norm.bias",
    "a.fc.weight",
    "a.fc.bias",
    "b.norm.weight",
    "b.norm.bias",
    "b.fc.weight",
    "b.fc.bias",
    "tied.weight",
];

fn parameters(imported: &Imported) -> Vec<&str> {
    let mut names: Vec<&str> = imported.graph.parameters().map(|(_, name)| name).collect();
    names.sort();
    names
}

#[test]
fn merged_parameters_are_told_apart_and_tied_ones_are_not() {
    let all_but_the_tied = &ALL[..8];
    // Node scopes give the modules, or else the order of the list. Missing data may be ones.
    for (modules, gain) in [(true, Some(1.0)), (false, Some(1.0)), (true, None), (false, None)] {
        let file = perceptron(modules, &ALL, gain);
        let imported = read(&file).unwrap();
        let mut expected = all_but_the_tied.to_vec();
        expected.sort();
        assert_eq!(parameters(&imported), expected, "{modules} {gain:?}");
        let notes: Vec<String> = imported.notes.iter().map(Note::to_string).collect();
        assert!(notes[0].contains("2 are told apart again") && notes[1].contains("2 biases of zeros"), "{notes:?}");
        // The weights have the same names, and the elements of the tensors that they were merged with.
        let weights = held(&file.encode_to_vec(), &|_, _| None).unwrap();
        let data = |name: &str| weights.iter().find(|t| t.name == name).map(|t| t.data.clone());
        let expected = gain.map_or(HeldData::Missing, |gain| HeldData::Inline(vec![f64::from(gain); 4]));
        assert_eq!(data("b.norm.weight"), Some(expected));
        assert_eq!(data("b.fc.bias"), Some(HeldData::Inline(vec![0.0; 4])));
    }
    // A norm that is applied twice is listed once.
    let shared = read(&perceptron(true, &[&ALL[..4], &ALL[6..7]].concat(), Some(1.0))).unwrap();
    assert_eq!(parameters(&shared), ["a.fc.bias", "a.fc.weight", "a.norm.bias", "a.norm.weight", "b.fc.weight"]);
    // Assignment in order requires as many modules as nodes.
    let fewer = read(&perceptron(false, &ALL[..5], Some(1.0))).unwrap();
    assert!(!parameters(&fewer).contains(&"b.norm.weight"));
}

#[test]
fn trained_vectors_that_are_equal_are_tied() {
    let mut file = perceptron(true, &ALL, Some(1.0));
    let graph = file.graph.as_mut().unwrap();
    graph.initializer[0].float_data[2] = 1.5;
    let imported = read(&file).unwrap();
    assert!(!parameters(&imported).contains(&"b.norm.weight") && parameters(&imported).contains(&"b.norm.bias"));
}

/// The older exporter copies a merged parameter under the name of each parameter.
#[test]
fn copies_are_parameters() {
    let nodes = vec![
        node("Identity", &["0.bias"], &["1.bias"]),
        node("Add", &["x", "0.bias"], &["h"]),
        node("Add", &["h", "1.bias"], &["y"]),
    ];
    let imported =
        read(&model(graph(nodes, vec![input("x", &["2", "3"])], vec![floats("0.bias", &[3], &[0.0; 3])], &["y"])));
    assert_eq!(parameters(&imported.unwrap()), ["0.bias", "1.bias"]);
    // It also names nodes after modules. One of these must be the tensor's own.
    for (first, expected) in [("/a/Add", ["a.bias", "b.bias"].as_slice()), ("/c/Add", &["a.bias"])] {
        let add = |name: &str, x: &str, y: &str| Node { name: name.into(), ..node("Add", &[x, "a.bias"], &[y]) };
        let nodes = vec![add(first, "x", "h"), add("/b/Add", "h", "y")];
        let held = vec![floats("a.bias", &[3], &[0.0; 3])];
        let imported = read(&model(graph(nodes, vec![input("x", &["2", "3"])], held, &["y"]))).unwrap();
        assert_eq!(parameters(&imported), expected);
    }
}

#[test]
fn made_up_names_become_those_of_modules() {
    let nodes = vec![
        scoped(node("MatMul", &["x", "val_1"], &["1"]), "m.fc"),
        scoped(node("Add", &["1", "val_2"], &["2"]), "m.embeddings"),
        scoped(node("Mul", &["2", "val_3"], &["y"]), "m.rotary"),
    ];
    let held = ["val_1", "val_2", "val_3"].map(|name| {
        let data: Vec<f32> = (0..9).map(|i| i as f32).collect();
        floats(name, &[3, 3], &data)
    });
    let mut graph = graph(nodes, vec![input("x", &["2", "3", "3"])], held.to_vec(), &["y"]);
    graph.metadata_props = listing(&["m.fc.weight", "m.embeddings.position.weight"]);
    let imported = read(&model(graph)).unwrap();
    assert_eq!(parameters(&imported), ["m.embeddings.val_2", "m.fc.weight.T"]);
    assert_eq!(imported.buffers, ["m.rotary.val_3"]);
}

/// A tensor whose data is in another file.
fn beside(name: &str, data_type: i32, dims: &[i64]) -> Tensor {
    let external_data = vec![Property { key: "location".into(), value: name.into() }];
    let dims = dims.to_vec();
    Tensor { name: name.into(), dims, data_type, data_location: 1, external_data, ..Default::default() }
}

#[test]
fn small_integers_beside_the_file_are_constants() {
    let nodes = vec![
        node("Gather", &["table", "ids"], &["rows"]),
        node("Add", &["x", "rows"], &["sum"]),
        node("Less", &["index", "other"], &["less"]),
        node("Where", &["less", "sum", "x"], &["y"]),
    ];
    let held = vec![
        floats("table", &[5, 3], &[]),
        beside("ids", 7, &[1, 5]),
        beside("index", 7, &[4, 5, 1]),
        beside("other", 7, &[4, 1, 3]),
    ];
    let file = model(graph(nodes, vec![input("x", &["4", "5", "3"])], held, &["y"]));
    let numbers = |numbers: &[i64]| Some(numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
    let files = |place: &External, most: u64| match place.location.as_str() {
        "ids" => numbers(&[4, 3, 2, 1, 0]),
        "index" => numbers(&(0..20).map(|i| i % 5).collect::<Vec<_>>()),
        // A length that does not match the shape.
        _ => numbers(&[1; 11]).filter(|bytes| bytes.len() as u64 <= most + 1),
    };
    let read = |files: Files| import(&file.encode_to_vec(), &Options::default(), files).unwrap();
    let imported = read(&files);
    assert_eq!(imported.buffers, ["other"]);
    let inputs: Vec<(&str, &[u64])> =
        imported.graph.inputs().map(|(v, name)| (name, imported.graph.shape(v))).collect();
    assert_eq!(inputs, [("x", [4, 5, 3].as_slice()), ("other", &[1, 1, 3])]);
    assert!(ops(&imported).contains(&"iota") && imported.notes.len() == 1);
    // Without the files, unknown data counts as the same for every sample, and positions are counted.
    let imported = read(&|_, _| None);
    let notes: Vec<String> = imported.notes.iter().map(Note::to_string).collect();
    assert!(notes[0].contains("'index', 'other'") && notes[0].contains("same for every sample"), "{notes:?}");
    assert!(notes[1].contains("'ids'") && notes[1].contains("count rows or positions"), "{notes:?}");
    assert_eq!(imported.buffers, ["index", "other"]);
}

/// The mask of a packed batch, as exporters write it: positions see those before them in the same document.
#[test]
fn a_mask_of_documents_without_its_data_is_the_causal_one() {
    let nodes = vec![
        node("Equal", &["document", "other_document"], &["same"]),
        node("LessOrEqual", &["key", "query"], &["before"]),
        node("And", &["same", "before"], &["seen"]),
        node("Where", &["seen", "x", "low"], &["y"]),
    ];
    let mask = |name: &str, dims: [i64; 3]| beside(name, 7, &dims);
    let held = vec![
        mask("document", [1, 5, 1]),
        mask("other_document", [1, 1, 5]),
        mask("query", [1, 5, 1]),
        mask("key", [1, 1, 5]),
        floats("low", &[1], &[-1e30]),
    ];
    let file = model(graph(nodes, vec![input("x", &["4", "5", "5"])], held, &["y"]));
    let imported = import(&file.encode_to_vec(), &Options::default(), &|_, _| None).unwrap();
    let notes: Vec<String> = imported.notes.iter().map(Note::to_string).collect();
    assert!(notes[0].contains("'query', 'key'") && notes[0].contains("count rows or positions"), "{notes:?}");
    assert!(notes[1].contains("'document', 'other_document'") && notes[1].contains("one document"), "{notes:?}");
    assert!(imported.buffers.is_empty());
}

#[test]
fn what_was_expanded_to_a_fixed_batch_is_held_once() {
    let nodes =
        vec![with(node("Concat", &["token", "x"], &["all"]), int("axis", 1)), node("Mul", &["all", "w"], &["y"])];
    let token: Vec<f32> = (0..8).map(|i| (i % 2) as f32).collect();
    let held =
        vec![floats("token", &[4, 1, 2], &token), floats("w", &[4, 2], &(0..8).map(|i| i as f32).collect::<Vec<_>>())];
    let mut graph = graph(nodes, vec![input("x", &["4", "3", "2"])], held, &["y"]);
    graph.metadata_props = listing(&["w", "class_token"]);
    let file = model(graph);
    let imported = read(&file).unwrap();
    let types: Vec<String> =
        imported.graph.parameters().map(|(v, name)| format!("{name}: {}", imported.graph.ty(v))).collect();
    assert_eq!(types, ["token: f32[1,1,2]", "w: f32[4,2]"]);
    assert_eq!(held_data(&file, "token"), HeldData::Inline(vec![0.0, 1.0]));
}

fn held_data(file: &Model, name: &str) -> HeldData {
    let weights = held(&file.encode_to_vec(), &|_, _| None).unwrap();
    weights.into_iter().find(|t| t.name == name).map(|t| t.data).unwrap()
}

/// The initial state of a recurrent layer is a constant, or an input.
#[test]
fn first_states_are_not_trained() {
    for (value, buffers) in [(Some(0.0), vec![]), (None, vec!["h".to_string()])] {
        let gru = with(node("GRU", &["x", "w", "r", "", "", "h"], &["y"]), int("hidden_size", 2));
        let state = value.map_or(vec![], |value| vec![value; 6]);
        let held = vec![floats("w", &[1, 6, 5], &[]), floats("r", &[1, 6, 2], &[]), floats("h", &[1, 3, 2], &state)];
        let imported = read(&model(graph(vec![gru], vec![input("x", &["4", "3", "5"])], held, &["y"]))).unwrap();
        assert_eq!((parameters(&imported), &imported.buffers), (vec!["r", "w"], &buffers));
    }
}

/// `mask[arange(batch)[:, None], positions]`, as exporters write it.
#[test]
fn lookups_in_step_with_the_batch_stay_in_each_sample() {
    let columns = with(node("Concat", &["sample", "place"], &["index"]), int("axis", 2));
    let nodes = vec![columns, node("GatherND", &["x", "index"], &["y"])];
    let sample = Tensor { dims: vec![4, 3, 1], ..integers("sample", &(0..12).map(|i| i / 3).collect::<Vec<_>>()) };
    for (place, expected) in [(0, "broadcast_in_dim"), (1, "gather")] {
        let place = (0..12).map(|i| if place == 0 { i % 3 } else { 2 - i % 3 }).collect::<Vec<_>>();
        let place = Tensor { dims: vec![4, 3, 1], ..integers("place", &place) };
        let held = vec![sample.clone(), place.clone()];
        let imported = read(&model(graph(nodes.clone(), vec![input("x", &["4", "3"])], held, &["y"]))).unwrap();
        assert!(ops(&imported).contains(&expected), "{}", imported.graph);
        let batched = altiplano_ir::batch::find_batch(&imported.graph, &[Some(0)]);
        assert_eq!((batched.doubt, batched.graph.node(batched.graph.outputs[0]).batch_dims), (None, 1));
        // The results equal those of the complete index vectors.
        let x: Vec<f64> = (0..12).map(f64::from).collect();
        let at = |i: usize| x[i / 3 * 3 + place.int64_data[i] as usize];
        let leaf = |v| tensor::Tensor::new(imported.graph.ty(v).clone(), x.clone());
        assert_eq!(interpret::run(&imported.graph, leaf).remove(0).data, (0..12).map(at).collect::<Vec<_>>());
    }
}

#[test]
fn tables_are_bounded_in_all_and_new_opsets_are_told() {
    let window = |i: usize| node("HannWindow", &["n"], &[&format!("w{i}")]);
    let mut nodes: Vec<Node> = (0..600).map(window).collect();
    nodes.push(node("Add", &["x", "w0"], &["y"]));
    let file = |count: usize| {
        let kept = nodes.iter().take(count).chain(nodes.last()).cloned().collect();
        let size = Tensor { dims: vec![], ..integers("n", &[65536]) };
        model(graph(kept, vec![input("x", &["65536"])], vec![size], &["y"]))
    };
    assert!(read(&file(3)).is_ok());
    refused(file(600), "have more than");
    let mut newer = file(1);
    newer.opset_import[0].version = report::LAST_OPSET + 1;
    assert_eq!(read(&newer).unwrap().notes, [Note::NewerOpset { version: report::LAST_OPSET + 1 }]);
}
