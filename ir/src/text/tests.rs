//! Printing and parsing: every op, random graphs, truncated texts, and error messages.

use super::*;
use crate::graph::{Pin, PinnedDim};
use crate::op::{Binary, Concatenate, Convert, Input, Parameter, Reduce, Reducer, Reshape, Transpose, Unary};
use crate::testing::numbers::Rng;
use crate::testing::{Case, cases};
use proptest::prelude::*;

/// A graph of one case: its operands as inputs, the op, and names that need escapes.
pub(crate) fn graph_of(case: &Case) -> Graph {
    let mut graph = Graph::new("case \"one\"\n");
    for (i, ty) in case.operands.iter().enumerate() {
        graph.emit(Op::Input(Input { name: format!("x{i}"), ty: ty.clone() }), &[]);
    }
    let operands: Vec<ValueId> = graph.values().collect();
    let result = graph.emit(case.op.clone(), &operands);
    graph.nodes[result.index()].name = "jit(f)/\u{e9}\\\"quoted\"".to_string();
    graph.outputs = vec![result];
    graph
}

/// A random graph of random ops.
pub(crate) fn random_graph(rng: &mut Rng) -> Graph {
    let names = ["", "mlp", "a \"b\" \\ c", "line\nbreak\ttab", "\u{4e2d}\u{6587} \u{1f600} \u{7f}"];
    let mut graph = Graph::new(rng.choose(&names));
    graph.batch = rng.choose(&[0, 1, 8, u64::MAX]);
    let types = [
        TensorType::new(DType::F32, [4, 6]),
        TensorType::new(DType::F32, [4]),
        TensorType::new(DType::BF16, [2, 3, 4]),
        TensorType::new(DType::I32, []),
        TensorType::new(DType::Bool, [0, 6]),
    ];
    let reals = [0.1, -0.0, 1e300, 5e-324, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0 / 3.0, 123456789.0];
    for _ in 0..rng.below(40) {
        let ty = rng.choose(&types);
        let name = format!("{}{}", rng.choose(&names), graph.len());
        let some = |rng: &mut Rng| ValueId(rng.below(graph.len() as u64) as u32);
        let (x, y) = (some(rng), some(rng));
        let rank = graph.nodes.get(x.index()).map_or(0, |n| n.ty.rank());
        let (op, operands) = match rng.below(if graph.is_empty() { 4 } else { 12 }) {
            0 => {
                (Op::Parameter(Parameter { name, ty, frozen: rng.below(2) == 1, no_decay: rng.below(2) == 1 }), vec![])
            }
            1 => (Op::Input(Input { name, ty }), vec![]),
            2 => {
                let values = (0..ty.elements()).map(|_| rng.choose(&reals)).collect();
                (Op::Constant(crate::literal::Literal::dense(ty, values)), vec![])
            }
            3 => {
                let batch_power = rng.choose(&[0, 1, -1]);
                let splat = crate::literal::Literal::splat(ty, rng.choose(&reals));
                (Op::Constant(crate::literal::Literal { batch_power, ..splat }), vec![])
            }
            4 => (Op::Unary(rng.choose(&Unary::ALL)), vec![x]),
            5 | 6 => (Op::Binary(rng.choose(&Binary::ALL)), vec![x, rng.choose(&[x, y])]),
            7 => (Op::Convert(Convert { dtype: rng.choose(&DType::ALL) }), vec![x]),
            8 => {
                let dims = (0..rank).filter(|_| rng.below(2) == 1).collect();
                (Op::Reduce(Reduce { reducer: rng.choose(&Reducer::ALL), dims }), vec![x])
            }
            9 => (Op::Transpose(Transpose { permutation: (0..rank).rev().collect() }), vec![x]),
            10 => (Op::Reshape(Reshape { shape: vec![graph.ty(x).elements()] }), vec![x]),
            _ => (Op::Concatenate(Concatenate { dim: 0 }), vec![x, x, x]),
        };
        let Ok(value) = graph.push(op, &operands) else { continue };
        let node = &mut graph.nodes[value.index()];
        node.name = rng.choose(&names).to_string();
        node.batch_dims = (rng.draw() & ((1 << node.ty.rank()) - 1)) as u32;
    }
    for _ in 0..rng.below(4).min(graph.len() as u64) {
        graph.outputs.push(ValueId(rng.below(graph.len() as u64) as u32));
    }
    for _ in 0..rng.below(3).min(graph.len() as u64) {
        let value = ValueId(rng.below(graph.len() as u64) as u32);
        let axis = rng.choose(&["data", "a \"b\""]).to_string();
        let rank = graph.ty(value).rank();
        let dim = |d| PinnedDim { axes: if d == 0 { vec![axis.clone()] } else { Vec::new() }, open: d % 2 == 1 };
        graph.pin(Pin { value, mesh: vec![(axis.clone(), 2)], dims: (0..rank).map(dim).collect() });
    }
    graph
}

#[test]
fn the_text_of_every_op_reads_back() {
    for case in cases() {
        let graph = graph_of(&case);
        let text = graph.to_string();
        let read = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(read, graph, "{text}");
        assert_eq!(read.to_string(), text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_read_back(seed in any::<u64>()) {
        let graph = random_graph(&mut Rng::new(seed));
        let text = graph.to_string();
        match parse(&text) {
            Ok(read) => prop_assert_eq!(read, graph, "{}", text),
            Err(error) => prop_assert!(false, "{}\n{}", error, text),
        }
    }

    /// A damaged text gives a graph, or an error with a place inside the text.
    #[test]
    fn damaged_texts_are_refused_in_order(seed in any::<u64>()) {
        let rng = &mut Rng::new(seed);
        let mut text: Vec<char> = random_graph(rng).to_string().chars().collect();
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(text.len() as u64) as usize;
            match rng.below(3) {
                0 => { text.remove(at); }
                1 => text[at] = rng.choose(&['%', '{', '"', '9', 'b', '-', '\u{e9}', '\n', ']']),
                _ => text.insert(at, rng.choose(&['(', '}', '\\', '0', ',', '@', '\u{1f600}'])),
            }
        }
        let text: String = text.into_iter().collect();
        if let Err(error) = parse(&text) {
            prop_assert!(error.line >= 1 && error.line <= text.matches('\n').count() + 1, "{}", error);
            prop_assert!(error.column >= 1, "{}", error);
        }
    }
}

#[test]
fn truncated_texts_are_errors() {
    let text = random_graph(&mut Rng::new(5)).to_string();
    assert!(text.len() > 400, "{text}");
    for (end, _) in text.trim_end().char_indices() {
        assert!(parse(&text[..end]).is_err(), "{}", &text[..end]);
    }
}

#[test]
fn the_form_is_the_documented_one() {
    let text = r#"graph "mlp" batch=8 {
  %0: f32[8b,64] = input "x"
  %1: f32[64,128] = parameter "params['w']"
  %2: f32[8b,128] = dot_general(%0, %1) {"lhs_contract":[1],"rhs_contract":[0]} @"jit(mlp)/dot_general"
  %3: f32[] = constant {"value":0.1}
  %4: f32[8b,128] = broadcast_in_dim(%3) {"dims":[]}
  %5: f32[8b,128] = add(%2, %4)
  %6: bf16[8b,128] = convert(%5)
  %7: bf16[8b,2,64] = reshape(%6)
  %8: bf16[] = reduce(%7) {"reducer":"sum","dims":[0,1,2]}
  %9: i32[3] = constant {"values":[1.0,-2.0,3.0]}
} -> (%8, %9)
"#;
    let graph = parse(text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(graph.to_string(), text);
    assert_eq!(graph.verify(), []);
    assert_eq!(graph.node(ValueId(0)).batch_dims, 1);
    // Whitespace is free, and an empty graph has an empty list of outputs.
    assert_eq!(parse(&text.replace('\n', " ")).map(|g| g.to_string()).unwrap_or_default(), text);
    assert_eq!(parse("graph\"\"{}->()").map(|g| g.to_string()).unwrap_or_default(), "graph \"\" {\n} -> ()\n");
}

#[test]
fn errors_say_what_and_where() {
    let body = |lines: &str| format!("graph \"g\" {{\n  %0: f32[4] = input \"x\"\n{lines}}} -> (%0)\n");
    let cases = [
        ("".to_string(), "line 1, column 1: expected graph"),
        ("graph g".to_string(), "line 1, column 7: expected a quoted string"),
        (body("  %2: f32[4] = abs(%0)\n"), "line 3, column 3: expected %1: nodes are numbered in order"),
        (body("  %1: f33[4] = abs(%0)\n"), "line 3, column 7: expected a type such as f32[8,64]"),
        (body("  %1: f32[4] = abz(%0)\n"), "line 3, column 16: there is no op 'abz'; the nearest is 'abs'"),
        (body("  %1: f32[4] = abs(%1)\n"), "line 3, column 20: node %1: operand %1 is not defined before it"),
        (body("  %1: f32[4] = abs(%0, %0)\n"), "line 3, column 16: node %1 (abs): takes 1 operands, found 2"),
        (
            body("  %1: f32[5] = abs(%0)\n"),
            "line 3, column 16: node %1 (abs): declared f32[5], but the op gives f32[4]",
        ),
        (body("  %1: f32[4] = abs(%0) {\"dim\":1}\n"), "line 3, column 16: 'abs' has no attribute 'dim'"),
        (
            body("  %1: f32[] = reduce(%0) {\"reducer\":\"sum\",\"dim\":[0]}\n"),
            "line 3, column 15: 'reduce' needs the attribute 'dims'",
        ),
        (
            body("  %1: f32[] = reduce(%0) {\"reducer\":\"mean\",\"dims\":[0]}\n"),
            "line 3, column 15: attribute 'reducer' must be \"sum\", \"product\", \"max\", \"min\", \"and\" or \"or\"",
        ),
        (
            body("  %1: f32[1000000000,1000000000] = broadcast_in_dim(%0) {\"dims\":[1]}\n"),
            "line 3, column 36: node %1 (broadcast_in_dim): broadcast: sizes 4 and 1000000000 must be equal",
        ),
        (
            body("  %1: f32[1000000000,1000000000] = iota {\"dim\":1}\n"),
            "line 3, column 36: node %1 (iota): result of shape [1000000000, 1000000000] is larger than any tensor \
             can be",
        ),
        (body("") + "x", "line 4, column 1: expected the end of the text"),
        ("graph \"g\" {\n} -> (%0)".to_string(), "line 2, column 7: output %0 is not defined"),
    ];
    for (text, expected) in cases {
        match parse(&text) {
            Ok(_) => panic!("{text} was read"),
            Err(error) => assert_eq!(error.to_string(), expected, "{text}"),
        }
    }
    let json = parse(&body("  %1: f32[] = reduce(%0) {\"reducer\" \"sum\"}\n"));
    let error = json.map_err(|e| (e.line, e.column, e.to_string()));
    assert!(matches!(&error, Err((3, 37, text)) if text.contains("expected `:`")), "{error:?}");
    let deep = parse(&body(&format!("  %1: f32[] = reduce(%0) {{\"a\":{}\n", "[".repeat(100_000))));
    assert!(deep.is_err_and(|e| e.line == 3 && e.to_string().contains("recursion limit")));
}
