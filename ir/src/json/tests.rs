//! The JSON form must read back its own output, agree with its schema, and explain errors.

use super::schema::violations;
use super::*;
use crate::testing::cases;
use crate::testing::numbers::Rng;
use crate::text::attributes::op_names;
use crate::text::tests::{graph_of, random_graph};
use proptest::prelude::*;

fn schema() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/graph.schema.json");
    let text = std::fs::read_to_string(path).expect("the schema");
    serde_json::from_str(&text).expect("the schema is JSON")
}

fn broken_rules(schema: &Value, text: &str) -> Vec<String> {
    violations(schema, schema, &serde_json::from_str(text).expect("JSON"), "$")
}

#[test]
fn every_op_reads_back_and_agrees_with_the_schema() {
    let schema = schema();
    for case in cases() {
        let graph = graph_of(&case);
        let text = write(&graph);
        let read = read(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(read, graph, "{text}");
        assert_eq!(write(&read), text);
        assert_eq!(broken_rules(&schema, &text), Vec::<String>::new(), "{text}");
    }
}

#[test]
fn the_schema_knows_all_ops_and_element_types() {
    let schema = schema();
    let names = schema["$defs"]["node"]["properties"]["op"]["enum"].clone();
    assert_eq!(names, Value::from(op_names()));
    let dtypes: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
    assert_eq!(schema["$defs"]["dtype"]["enum"], Value::from(dtypes));
    let reducers: Vec<&str> = crate::op::Reducer::ALL.iter().map(|r| r.name()).collect();
    assert_eq!(schema["$defs"]["reducer"]["enum"], Value::from(reducers));
    assert_eq!(schema["properties"]["version"]["const"], Value::from(VERSION));
    // Each op has exactly one rule for its attributes.
    let rules = schema["$defs"]["node"]["allOf"].as_array().expect("rules");
    for name in op_names() {
        let applies = |rule: &&Value| {
            let node = serde_json::json!({ "op": name });
            violations(&rule["if"], &schema, &node, "$").is_empty()
        };
        assert_eq!(rules.iter().filter(applies).count(), 1, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_read_back(seed in any::<u64>()) {
        let mut graph = random_graph(&mut Rng::new(seed));
        let text = write(&graph);
        if graph.outputs.is_empty() {
            prop_assert!(matches!(read(&text), Err(JsonError::NoOutputs)));
            if graph.is_empty() {
                return Ok(());
            }
            graph.outputs.push(ValueId(0));
        }
        let text = write(&graph);
        match read(&text) {
            Ok(read) => prop_assert_eq!(read, graph, "{}", text),
            Err(error) => prop_assert!(false, "{}\n{}", error, text),
        }
    }

    /// Replaces a random leaf of a document. The reader must return, and must only accept documents that verify.
    #[test]
    fn changed_documents_are_read_or_refused(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let graph = graph_of(&rng.choose(&cases()));
        let mut document: Value = serde_json::from_str(&write(&graph)).expect("JSON");
        let mut place = &mut document;
        loop {
            let n = match &place { Value::Array(a) => a.len(), Value::Object(o) => o.len(), _ => 0 };
            if n == 0 || rng.below(6) == 0 {
                break;
            }
            let at = rng.below(n as u64) as usize;
            place = match place {
                Value::Array(items) => &mut items[at],
                Value::Object(map) => map.values_mut().nth(at).expect("a value"),
                _ => break,
            };
        }
        *place = rng.choose(&[
            Value::Null, Value::from(-1), Value::from(u64::MAX), Value::from(0), Value::from(1e308), Value::from("x"),
            Value::from(Vec::<u64>::new()), Value::from(vec![u64::MAX; 40]), Value::from(vec![0, 0]), Value::from(true),
            Value::from(i64::MIN), Value::from(1_000_000_007),
        ]);
        if let Ok(read) = read(&document.to_string()) {
            prop_assert_eq!(read.verify(), []);
            // An accepted graph can be planned, because rules and costs are arithmetic on its sizes.
            for v in read.values() {
                read.rule(v);
                read.flop(v);
            }
        }
    }
}

/// The graph of the module's documentation, as Python would write it, without types that follow from operands.
#[test]
fn a_graph_written_by_hand_is_read() {
    let text = r#"{"format": "altiplano.graph", "version": 1, "name": "mlp", "batch": 8,
     "nodes": [
      {"op": "input", "attributes": {"name": "x"}, "type": {"dtype": "f32", "shape": [8, 64]}, "batch_dims": [0]},
      {"op": "parameter", "attributes": {"name": "w"}, "type": {"dtype": "f32", "shape": [64, 128]}},
      {"op": "dot_general", "operands": [0, 1], "attributes": {"lhs_contract": [1], "rhs_contract": [0]}},
      {"op": "constant", "attributes": {"value": 0}, "type": {"dtype": "f32", "shape": []}},
      {"op": "broadcast_in_dim", "operands": [3], "attributes": {"shape": [8, 128], "dims": []}},
      {"op": "maximum", "operands": [2, 4]},
      {"op": "convert", "operands": [5], "attributes": {"dtype": "f64"}},
      {"op": "slice", "operands": [6], "attributes": {"start": [0, 0], "limit": [8, 64]}},
      {"op": "reduce", "operands": [7], "attributes": {"reducer": "sum", "dims": [0, 1]}, "name": "jit(mlp)/sum"}],
     "outputs": [8]}"#;
    assert_eq!(broken_rules(&schema(), text), Vec::<String>::new());
    let graph = read(text).unwrap_or_else(|e| panic!("{e}"));
    let expected = r#"graph "mlp" batch=8 {
  %0: f32[8b,64] = input "x"
  %1: f32[64,128] = parameter "w"
  %2: f32[8,128] = dot_general(%0, %1) {"lhs_contract":[1],"rhs_contract":[0]}
  %3: f32[] = constant {"value":0.0}
  %4: f32[8,128] = broadcast_in_dim(%3) {"dims":[]}
  %5: f32[8,128] = maximum(%2, %4)
  %6: f64[8,128] = convert(%5)
  %7: f64[8,64] = slice(%6) {"start":[0,0],"limit":[8,64]}
  %8: f64[] = reduce(%7) {"reducer":"sum","dims":[0,1]} @"jit(mlp)/sum"
} -> (%8)
"#;
    assert_eq!(graph.to_string(), expected);
}

#[test]
fn errors_lead_to_what_is_wrong() {
    let x = r#"{"op":"input","attributes":{"name":"x"},"type":{"dtype":"f32","shape":[4,6]}}"#;
    let graph =
        |nodes: &str| format!(r#"{{"format":"altiplano.graph","version":1,"nodes":[{x},{nodes}],"outputs":[1]}}"#);
    let abs = r#"{"op":"abs","operands":[0]}"#;
    assert!(read(&graph(abs)).is_ok());
    let huge = r#"{"op":"iota","attributes":{"dim":0},"type":{"dtype":"f32","shape":[1000000000000000000]}}"#;
    let cases: Vec<(String, &str)> = vec![
        (
            graph(abs).replace("altiplano.graph", "x"),
            "format: expected \"altiplano.graph\"; this file is something else",
        ),
        ("[]".to_string(), "format: expected \"altiplano.graph\"; this file is something else"),
        (
            graph(abs).replace("\"version\":1", "\"version\":7"),
            "version: this file has version 7, but only versions up to 1 can be read",
        ),
        (graph(abs).replace("outputs", "output"), "the file: there is no key 'output' here; did you mean 'outputs'?"),
        (graph(abs).replace(",\"outputs\":[1]", ""), "the file: 'outputs' is missing"),
        (graph(abs).replace("\"outputs\":[1]", "\"outputs\":[]"), "outputs: the graph has no outputs"),
        (
            graph(abs).replace("\"outputs\":[1]", "\"outputs\":[0,2]"),
            "outputs[1]: there is no node 2; the last one is 1",
        ),
        (graph("7"), "nodes[1]: expected a node"),
        (graph("{}"), "nodes[1]: 'op' is missing"),
        (graph(r#"{"op":"ad","operands":[0,0]}"#), "nodes[1].op: there is no op 'ad'; the nearest is 'add'"),
        (
            graph(r#"{"op":"add","operand":[0,0]}"#),
            "nodes[1]: there is no key 'operand' here; did you mean 'operands'?",
        ),
        (graph(r#"{"op":"add","operands":[0]}"#), "nodes[1]: 'add' takes 2 operands, found 1"),
        (
            graph(r#"{"op":"add","operands":[0,1]}"#),
            "nodes[1].operands[1]: node 1 does not come before node 1; nodes must be listed after their operands",
        ),
        (
            graph(r#"{"op":"add","operands":[0,18446744073709551615]}"#),
            "nodes[1].operands[1]: node 18446744073709551615 does not come before node 1; nodes must be listed after \
             their operands",
        ),
        (
            graph(r#"{"op":"add","operands":[0,-1]}"#),
            "nodes[1].operands[1]: expected a whole number that is not negative",
        ),
        (
            graph(r#"{"op":"abs","operands":[0],"type":{"dtype":"f32","shape":[4,5]}}"#),
            "nodes[1].type: 'abs' gives f32[4,6], but the type says f32[4,5]",
        ),
        (
            graph(r#"{"op":"abs","operands":[0],"batch_dims":[2]}"#),
            "nodes[1].batch_dims[0]: expected a dimension of the result",
        ),
        (graph(r#"{"op":"reshape","operands":[0]}"#), "nodes[1]: 'reshape' needs a type, or the attribute 'shape'"),
        (graph(r#"{"op":"constant","attributes":{"value":1}}"#), "nodes[1]: 'constant' needs a type"),
        (
            graph(r#"{"op":"reduce","operands":[0],"attributes":{"reducer":"sum"}}"#),
            "nodes[1].attributes: 'reduce' needs the attribute 'dims'",
        ),
        (
            graph(r#"{"op":"reduce","operands":[0],"attributes":{"reducer":"sum","dims":[0],"dimz":[]}}"#),
            "nodes[1].attributes: 'reduce' has no attribute 'dimz'; did you mean 'dims'?",
        ),
        (
            graph(r#"{"op":"reduce","operands":[0],"attributes":{"reducer":"sum","dims":[0,"1"]}}"#),
            "nodes[1].attributes.dims[1]: attribute 'dims[1]' must be a dimension",
        ),
        (
            graph(r#"{"op":"constant","attributes":{"value":1,"values":[]},"type":{"dtype":"f32","shape":[0]}}"#),
            "nodes[1].attributes.values: attribute 'values' must be absent where 'value' is given",
        ),
        (graph(huge), "nodes[1].type: f32[1000000000000000000] is larger than any tensor can be"),
        (
            graph(
                r#"{"op":"broadcast_in_dim","operands":[0],"attributes":{"dims":[1,2],"shape":[1000000000000,4,6]}}"#,
            )
            .replace("1000000000000,", "1000000000000000,"),
            "nodes[1]: 'broadcast_in_dim' result of shape [1000000000000000, 4, 6] is larger than any tensor can be",
        ),
        (
            graph(x),
            "nodes[1].attributes.name: node 0 is named 'x' too; names of parameters and inputs must be distinct",
        ),
        (graph(abs).replace("\"f32\"", "\"float32\""), "nodes[0].type.dtype: expected an element type such as \"f32\""),
    ];
    for (text, expected) in cases {
        match read(&text) {
            Ok(_) => panic!("{text} was read"),
            Err(error) => assert_eq!(error.to_string(), expected, "{text}"),
        }
    }
}

#[test]
fn syntax_errors_have_a_line_and_a_column() {
    let error = |text: &str| read(text).map(|_| ()).map_err(|e| e.to_string()).unwrap_err();
    assert_eq!(error("{\n  \"format\": nope\n}"), "not JSON: expected ident at line 2 column 14");
    assert!(error("").contains("line 1 column 0"), "{}", error(""));
    assert!(error(&"[".repeat(1_000_000)).contains("recursion limit exceeded at line 1 column 128"));
    // Python's form of an infinity is not JSON.
    assert!(error("{\"a\": Infinity}").starts_with("not JSON: expected value at line 1"));
}

#[test]
fn truncated_files_are_errors() {
    let text = write(&random_graph(&mut Rng::new(5)));
    for (end, _) in text.trim_end().char_indices() {
        assert!(read(&text[..end]).is_err(), "{}", &text[..end]);
    }
}
