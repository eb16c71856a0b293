//! Tests every op at smaller sizes, and the reduction of layers and constants.

use super::*;
use altiplano_ir::graph::Graph;
use altiplano_ir::interpret;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Input, Op};
use altiplano_ir::testing::numbers::{Rng, random};
use altiplano_ir::testing::{Case, cases};
use altiplano_ir::text::parse;
use std::collections::BTreeSet;

const SMALLEST: Goal = Goal { parameters: 0, flop: 0, batch: 2 };

/// A graph with an op on inputs.
fn alone(case: &Case) -> Graph {
    let mut graph = Graph::new("case");
    let operands: Vec<ValueId> = case
        .operands
        .iter()
        .enumerate()
        .map(|(i, ty)| graph.emit(Op::Input(Input { name: format!("x{i}"), ty: ty.clone() }), &[]))
        .collect();
    let result = graph.emit(case.op.clone(), &operands);
    graph.outputs = vec![result];
    graph
}

fn evaluates(graph: &Graph, case: &Case) -> bool {
    let rng = &mut Rng::new(7);
    let outputs = interpret::run(graph, |leaf| random(graph.ty(leaf), case.reals, case.integers, rng));
    outputs.iter().all(|output| output.ty == *graph.ty(graph.outputs[0]))
}

#[test]
fn every_op_can_be_reduced() {
    let mut smaller = BTreeSet::new();
    for case in cases() {
        if matches!(case.op, Op::Collective(_) | Op::AxisIndex(_) | Op::HostCopy(_)) {
            continue;
        }
        let graph = alone(&case);
        let reduced = Sizes::of(&graph).capped(&graph, 2);
        assert_eq!(reduced.verify(), [], "{}", case.label());
        assert!(evaluates(&reduced, &case), "{}", case.label());
        let elements = |g: &Graph| g.nodes.iter().map(|n| n.ty.elements()).sum::<u64>();
        assert!(elements(&reduced) <= elements(&graph), "{}", case.label());
        if elements(&reduced) < elements(&graph) {
            smaller.insert(case.op.name());
        }
    }
    let local = |c: &Case| matches!(c.op, Op::Collective(_) | Op::AxisIndex(_) | Op::HostCopy(_));
    let names: BTreeSet<&str> = cases().iter().filter(|c| !local(c)).map(|c| c.op.name()).collect();
    assert_eq!(smaller, names, "each op has a case with a size that is free");
}

/// The text of a model with `layers` layers, on 4 samples of 12 tokens with 24 features in 3 heads of 8.
fn model(layers: usize) -> String {
    let mut text = String::from("%0: f32[4b,12,24] = input \"x\"\n");
    let mut x = 0;
    let mut at = 1;
    for layer in 0..layers {
        text += &format!(
            "%{at}: f32[24,24] = parameter \"w{layer}\"\n%{}: f32[4b,12,24] = dot_general(%{x}, %{at}) {{\"lhs_contract\":[2],\"rhs_contract\":[0]}}\n%{}: f32[4b,12,3,8] = reshape(%{})\n%{}: f32[4b,12,3,8] = tanh(%{})\n%{}: f32[4b,12,24] = reshape(%{})\n",
            at + 1,
            at + 2,
            at + 1,
            at + 3,
            at + 2,
            at + 4,
            at + 3,
        );
        x = at + 4;
        at += 5;
    }
    text += &format!(
        "%{at}: f32[] = reduce(%{x}) {{\"reducer\":\"sum\",\"dims\":[0,1,2]}}\n%{}: f32[] = constant {{\"value\":1152.0,\"batch_power\":1}}\n%{}: f32[] = divide(%{at}, %{})\n",
        at + 1,
        at + 2,
        at + 1
    );
    format!("graph \"m\" batch=4 {{\n{text}}} -> (%{})", at + 2)
}

fn parsed(text: &str) -> Graph {
    parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn layers_sizes_and_means_shrink_together() {
    let graph = parsed(&model(7));
    let reduced = downscale(&graph, &SMALLEST);
    assert_eq!(reduced.graph.verify(), []);
    assert_eq!(reduced.downscaling, Downscaling { layers: (2, 7), parameters: (2 * 4 + 4 * 4, 7 * 576) });
    let names: Vec<&str> = reduced.graph.parameters().map(|(_, name)| name).collect();
    assert_eq!(names, ["w0", "w1"]);
    // The input's features belong to no heads.
    assert_eq!(reduced.graph.shape(ValueId(0)), [2, 2, 2]);
    assert_eq!(reduced.graph.batch, 2);
    // The mean of the remaining elements is still a mean.
    let divisor = reduced.graph.node(reduced.graph.outputs[0]).operands[1];
    assert!(matches!(&reduced.graph.node(divisor).op, Op::Constant(l) if l.as_splat() == Some(16.0)));
    assert!(rebatch(&reduced.graph, 6).is_ok());
    // Values of removed layers map to those of the last remaining layer.
    assert_eq!(reduced.map[graph.outputs[0].index()], Some(reduced.graph.outputs[0]));
    assert_eq!(reduced.map[12], reduced.map[32]);
    // A model that fits stays unchanged.
    let two = parsed(&model(2));
    assert_eq!(downscale(&two, &Goal::default()).graph, two);
}

/// A causal mask of 6 by 6 becomes one of 2 by 2.
#[test]
fn tables_are_cut() {
    let mut graph = Graph::new("mask");
    let ty = altiplano_ir::testing::ty("f32[6,6]");
    let mask = (0..36).map(|i| f64::from(u8::from(i % 6 <= i / 6))).collect();
    let mask = graph.constant(Literal::dense(ty.clone(), mask));
    let x = graph.emit(Op::Input(Input { name: "x".into(), ty }), &[]);
    let product = graph.mul(x, mask);
    graph.outputs = vec![product];
    let reduced = downscale(&graph, &SMALLEST).graph;
    let Op::Constant(mask) = &reduced.node(ValueId(0)).op else { panic!("{reduced}") };
    assert_eq!(mask.to_tensor().data, [1.0, 0.0, 1.0, 1.0]);
}
