//! A model's pins on the layout of its values are honoured, even if something else would be faster.

use altiplano_cost_models::preset;
use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Pin, PinnedDim, ValueId};
use altiplano_ir::op::{DotGeneral, Input, Op, Parameter, Reducer, Unary};
use altiplano_ir::types::TensorType;
use altiplano_planner::{PlanFailure, Request, Silent, plan};

/// Two layers of a perceptron. Returns the graph, its hidden value and its first weight.
fn perceptron() -> (Graph, ValueId, ValueId) {
    let mut graph = Graph::new("perceptron");
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let x = graph.emit(Op::Input(Input { name: "x".into(), ty: ty(&[64, 256]) }), &[]);
    let w = graph.emit(Op::Parameter(Parameter::new("w", ty(&[256, 512]))), &[]);
    let u = graph.emit(Op::Parameter(Parameter::new("u", ty(&[512, 256]))), &[]);
    let dot = |lhs: usize, rhs: usize| DotGeneral {
        lhs_batch: vec![],
        rhs_batch: vec![],
        lhs_contract: vec![lhs],
        rhs_contract: vec![rhs],
    };
    let hidden = graph.emit(Op::DotGeneral(dot(1, 0)), &[x, w]);
    let hidden = graph.unary(Unary::Tanh, hidden);
    let out = graph.emit(Op::DotGeneral(dot(1, 0)), &[hidden, u]);
    let square = graph.mul(out, out);
    let loss = graph.reduce(square, Reducer::Sum, &[0, 1]);
    graph.outputs = vec![loss];
    (find_batch(&graph, &[Some(0)]).graph, hidden, w)
}

fn pin(value: ValueId, dims: &[(&[&str], bool)]) -> Pin {
    let dim = |(axes, open): &(&[&str], bool)| PinnedDim {
        axes: axes.iter().map(ToString::to_string).collect(),
        open: *open,
    };
    Pin { value, mesh: vec![("x".into(), 2), ("y".into(), 4)], dims: dims.iter().map(dim).collect() }
}

fn request(graph: &Graph, pins: &[Pin], devices: u32) -> Request {
    let mut graph = graph.clone();
    pins.iter().for_each(|p| graph.pin(p.clone()));
    let cluster = preset(&format!("local:{devices}")).expect("a preset");
    let mut request = Request::new("perceptron", graph.with_free_pins(), LossKind::Sum, cluster);
    request.baselines = false;
    request
}

#[test]
fn pinned_values_are_laid_out_as_asked() {
    let (graph, hidden, w) = perceptron();
    let cases: Vec<(Pin, u32)> = vec![
        (pin(hidden, &[(&["x"], false), (&[], false)]), 2),
        (pin(hidden, &[(&[], false), (&["x"], false)]), 2),
        (pin(hidden, &[(&[], false), (&["y"], false)]), 4),
        (pin(hidden, &[(&["x"], false), (&["y"], false)]), 8),
        (pin(hidden, &[(&["x"], true), (&[], true)]), 4),
        (pin(w, &[(&["y"], false), (&[], true)]), 4),
        (pin(w, &[(&[], false), (&["x", "y"], false)]), 8),
    ];
    for (pin, devices) in cases {
        let mut request = request(&graph, std::slice::from_ref(&pin), devices);
        request.degrees.pp = Some(1);
        let plan = plan(&request, &Silent).unwrap_or_else(|e| panic!("{pin}: {e}"));
        let stage = &plan.stages[0];
        let layout = match &plan.graph.node(pin.value).op {
            Op::Parameter(p) => stage.parameters[&p.name].parameter.clone(),
            _ => plan
                .graph
                .rule(pin.value)
                .shardings(&stage.shardings[&pin.value].strategy, &stage.mesh)
                .result
                .reduced(),
        };
        let shown = layout.display(&stage.mesh).to_string();
        assert!(pin.allows(&layout, &stage.mesh), "{pin} became {shown} on {}", stage.mesh);
        assert!(stage.solved.is_some(), "{pin}: what is pinned is forbidden otherwise, and the rest is solved as ever");
    }
}

#[test]
fn axes_of_the_same_name_and_size_are_those_meant() {
    use altiplano_ir::mesh::Mesh;
    use altiplano_ir::sharding::Sharding;
    let mesh = Mesh::new(&[("data", 2), ("tensor", 2)]);
    let layout = |text: &str| Sharding::parse(text, &[8, 8], &mesh).expect("a layout");
    let dim = |axis: &str| PinnedDim { axes: vec![axis.into()], open: false };
    let none = || PinnedDim { axes: vec![], open: false };
    let pin = |mesh: &[(&str, u64)], axis: &str| Pin {
        value: ValueId(0),
        mesh: mesh.iter().map(|(name, size)| (name.to_string(), *size)).collect(),
        dims: vec![none(), dim(axis)],
    };
    let both = [("data", 2), ("tensor", 2)];
    assert!(pin(&both, "tensor").allows(&layout("[{}, {tensor}]"), &mesh));
    assert!(!pin(&both, "tensor").allows(&layout("[{}, {data}]"), &mesh));
    // In a mesh with other axes, only the number of parts counts.
    for axis in ["data", "tensor"] {
        assert!(pin(&[("x", 2)], "x").allows(&layout(&format!("[{{}}, {{{axis}}}]")), &mesh));
    }
}

#[test]
fn pins_that_no_plan_honours_are_named() {
    let (graph, hidden, _) = perceptron();
    let pin = pin(hidden, &[(&["x", "y"], false), (&[], false)]);
    match plan(&request(&graph, std::slice::from_ref(&pin), 4), &Silent) {
        Err(PlanFailure::Pins { pins }) => assert_eq!(pins, [pin.to_string()]),
        other => panic!("{other:?}"),
    }
}
