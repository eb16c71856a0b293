//! The weights that become 8-bit floats, and those that stay.

use super::*;
use altiplano_ir::autodiff::differentiate;
use altiplano_ir::graph::{Pin, PinnedDim};
use altiplano_ir::op::{DotGeneral, Gather, GatherDims, Input, OutOfBounds};
use altiplano_ir::types::TensorType;

fn parameter(graph: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    graph.emit(Op::Parameter(Parameter::new(name, TensorType::new(DType::BF16, shape))), &[])
}

fn input(graph: &mut Graph, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
    graph.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(dtype, shape) }), &[])
}

fn matmul(graph: &mut Graph, x: ValueId, w: ValueId) -> ValueId {
    let last = graph.shape(x).len() - 1;
    let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![last], rhs_contract: vec![0] };
    graph.emit(Op::DotGeneral(dot), &[x, w])
}

fn dtype_of(graph: &Graph, name: &str) -> DType {
    graph.parameters().find(|(_, of)| *of == name).map(|(v, _)| graph.ty(v).dtype).expect("a parameter")
}

/// Experts of a layer between an embedding and a head: `up` and `gate` read the same value, `down` is used transposed, the
/// router chooses among 16 experts, and `odd` has 20 columns.
fn model() -> Graph {
    let g = &mut Graph::new("experts");
    let ids = input(g, "ids", DType::I32, &[8]);
    let labels = input(g, "labels", DType::I32, &[8]);
    let wte = parameter(g, "wte", &[64, 32]);
    let dims = GatherDims::rows(&[64, 32], 1);
    let x = g.emit(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[wte, ids]);
    let (up, gate) = (parameter(g, "up", &[32, 48]), parameter(g, "gate", &[32, 48]));
    let down = parameter(g, "down", &[32, 48]);
    let (a, b) = (matmul(g, x, up), matmul(g, x, gate));
    let hidden = g.mul(a, b);
    let turned = g.transpose(down, &[1, 0]);
    let y = matmul(g, hidden, turned);
    let router = parameter(g, "router", &[32, 16]);
    let scores = matmul(g, y, router);
    let gates = g.emit(Function::Gates { chosen: 2, normalised: true }.into(), &[scores]);
    let most = g.reduce(gates, altiplano_ir::op::Reducer::Sum, &[1]);
    let most = g.broadcast(most, &[8, 32], &[0]);
    let y = g.mul(y, most);
    let odd = parameter(g, "odd", &[32, 20]);
    let z = matmul(g, y, odd);
    let back = parameter(g, "back", &[20, 32]);
    let y = matmul(g, z, back);
    let head = parameter(g, "head", &[32, 64]);
    let logits = matmul(g, y, head);
    let losses = g.emit(Function::CrossEntropy { dim: 1 }.into(), &[logits, labels]);
    let loss = g.emit(Function::Mean { dims: vec![0] }.into(), &[losses]);
    g.outputs = vec![loss];
    g.clone()
}

#[test]
fn weights_that_only_multiply_activations_have_8_bits() {
    let mut before = model();
    let up = before.parameters().find(|(_, name)| *name == "up").map(|(v, _)| v).unwrap();
    let open = PinnedDim { axes: Vec::new(), open: true };
    before.pin(Pin { value: up, mesh: Vec::new(), dims: vec![open.clone(), open] });
    let graph = in_eight_bits(&before).unwrap().expect("products in 8 bits");
    assert_eq!(graph.verify(), []);
    for name in ["up", "gate", "down"] {
        assert_eq!(dtype_of(&graph, name), DType::F8E4M3FN, "{name}");
    }
    // Tables that are looked up, products that a choice or a loss reads, and sizes that no tensor core takes.
    for name in ["wte", "router", "odd", "back", "head"] {
        assert_eq!(dtype_of(&graph, name), DType::BF16, "{name}");
    }
    // `up` and `gate` read one conversion, and `down` another.
    let conversions = graph.nodes.iter().filter(|node| matches!(node.op, Op::Convert(_))).count();
    assert_eq!(conversions, 2);
    assert!(matches!(&graph.node(graph.pins[0].value).op, Op::Parameter(p) if p.name == "up"));
}

#[test]
fn a_weight_with_another_reader_keeps_16_bits() {
    let mut graph = model();
    let up = graph.parameters().find(|(_, name)| *name == "up").map(|(v, _)| v).unwrap();
    let norm = graph.mul(up, up);
    let norm = graph.reduce(norm, altiplano_ir::op::Reducer::Sum, &[0, 1]);
    let loss = graph.add(graph.outputs[0], norm);
    graph.outputs = vec![loss];
    let after = in_eight_bits(&graph).unwrap().expect("products in 8 bits");
    assert_eq!([dtype_of(&after, "up"), dtype_of(&after, "gate")], [DType::BF16, DType::F8E4M3FN]);
}

#[test]
fn models_in_single_precision_have_no_products_in_8_bits() {
    let g = &mut Graph::new("single");
    let x = input(g, "x", DType::F32, &[16, 32]);
    let w = g.emit(Op::Parameter(Parameter::new("w", TensorType::new(DType::F32, [32, 32]))), &[]);
    let y = matmul(g, x, w);
    g.outputs = vec![y];
    assert_eq!(in_eight_bits(g), Ok(None));
}

#[test]
fn gradients_multiply_8_bits_and_are_16_bits_wide() {
    let graph = in_eight_bits(&model()).unwrap().expect("products in 8 bits");
    let differentiated = differentiate(&graph, &[]).unwrap();
    let all = &differentiated.graph;
    assert_eq!(all.verify(), []);
    for (v, name) in graph.parameters() {
        for (_, gradient) in &differentiated.contributions[v.index()] {
            assert_eq!(all.ty(*gradient).dtype, DType::BF16, "{name}");
        }
    }
    // Three products forward, and two backward of each.
    let in_eight_bits = |v: &ValueId| {
        matches!(all.node(*v).op, Op::DotGeneral(_))
            && all.operand_types(*v).iter().all(|ty| ty.dtype.is_eight_bit_float())
    };
    assert_eq!(all.values().filter(in_eight_bits).count(), 9);
    let scaled = all.nodes.iter().filter(|node| node.ty.dtype == DType::F8E5M2).count();
    assert_eq!(scaled, 3, "each cotangent is converted once");
}
