//! Printed graphs are read back by the importer and have the same values.

use super::{Layouts, Options, module};
use altiplano_import::stablehlo;
use altiplano_ir::array::matmul;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::run;
use altiplano_ir::mesh::{AxisId, Mesh};

use altiplano_ir::op::{GatherDims, Input, Op, Reducer, ScatterAdd, Unary};
use altiplano_ir::reshard::Collective;
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::testing::numbers::{Rng, difference};
use altiplano_ir::testing::{Case, cases};
use altiplano_ir::types::TensorType;

/// A graph of one op on inputs.
fn graph_of(case: &Case) -> Graph {
    let mut graph = Graph::new("case");
    let mut operands: Vec<ValueId> = Vec::new();
    for (i, ty) in case.operands.iter().enumerate() {
        operands.push(graph.emit(Op::Input(Input { name: format!("x{i}"), ty: ty.clone() }), &[]));
    }
    graph.outputs = vec![graph.emit(case.op.clone(), &operands)];
    graph
}

fn is_local(op: &Op) -> bool {
    matches!(op, Op::Collective(_) | Op::AxisIndex(_))
}

/// The leaves in order, to which values are given.
fn on_leaves(graph: &Graph, given: &[Tensor]) -> Vec<Tensor> {
    let mut given = given.iter();
    run(graph, |_| given.next().expect("a value for each leaf").clone())
}

#[test]
fn every_op_is_read_back() {
    let (mut seen, mut problems) = (0, Vec::new());
    for (case, mut rng) in cases().into_iter().zip(Rng::sequence(7)) {
        if is_local(&case.op) {
            continue;
        }
        let graph = graph_of(&case);
        let text = module(&graph, &Options::default());
        seen += 1;
        let imported = match stablehlo::import(&text) {
            Ok(imported) => imported,
            Err(error) => {
                problems.push(format!("{}: {error}\n{text}", case.label()));
                continue;
            }
        };
        // A leaf has a value of its own.
        let operands = match case.op.is_leaf() {
            true => vec![Tensor::from_fn(case.result.clone(), |i| i.iter().sum::<u64>() as f64)],
            false => case.random_operands(&mut rng),
        };
        let expected = on_leaves(&graph, &operands);
        let found = on_leaves(&imported.graph, &operands);
        if let Some(problem) = difference(&found[0], &expected[0], 1e-9) {
            problems.push(format!("{}: {problem}\n{text}\n{}", case.label(), imported.graph));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(seen > 500, "only {seen} cases");
}

/// Modules of this repository, each with its name and its graph.
fn models() -> Vec<(String, Graph)> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for folder in ["tests/models", "examples/models"] {
        let entries = std::fs::read_dir(root.join(folder)).expect("a folder of models");
        files
            .extend(entries.flatten().map(|entry| entry.path()).filter(|p| p.extension().is_some_and(|e| e == "mlir")));
    }
    files.sort();
    let model = |file: &std::path::PathBuf| {
        let text = std::fs::read_to_string(file).expect("a readable model");
        let imported = stablehlo::import(&text).expect("a model that is imported");
        (file.display().to_string(), imported.graph)
    };
    files.iter().map(model).collect()
}

/// Everything but the layouts that authors ask for, which are not printed.
fn without_pins(mut graph: Graph) -> Graph {
    graph.pins.clear();
    graph
}

#[test]
fn models_are_read_back_to_equal_graphs() {
    let models = models();
    assert!(models.len() > 10, "only {} models", models.len());
    for (name, graph) in models {
        let text = module(&graph, &Options::default());
        let imported = stablehlo::import(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (found, expected) = (without_pins(imported.graph), without_pins(graph));
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn layouts_are_read_back_as_pins() {
    let mesh = Mesh::new(&[("data", 2), ("tensor", 2)]);
    let (data, tensor) = (AxisId(0), AxisId(1));
    let mut graph = Graph::new("layouts");
    let ty = TensorType::new(DType::F32, [4, 6]);
    let x = graph.emit(Op::Input(Input { name: "x['w']".into(), ty }), &[]);
    let y = graph.unary(Unary::Tanh, x);
    graph.outputs = vec![y];
    let both = Sharding { dims: vec![DimLayout::split(4, [data]), DimLayout::split(6, [tensor])], partial: Vec::new() };
    let values = [(x, Sharding::split(&[4, 6], 0, vec![data, tensor])), (y, both)].into_iter().collect();
    let options = Options {
        layouts: Some(Layouts { mesh: &mesh, values }),
        donated: vec![(0, 0)],
        results: vec!["y".into()],
        ..Options::default()
    };
    let text = module(&graph, &options);
    assert!(text.contains("mhlo.num_partitions = 4"), "{text}");
    assert!(text.contains("tf.aliasing_output = 0 : i32"), "{text}");
    let imported = stablehlo::import(&text).expect("it is read back");
    let pins: Vec<String> = imported.graph.pins.iter().map(|pin| pin.to_string()).collect();
    assert_eq!(
        pins,
        ["%0 on mesh<data=2, tensor=2>: [{data, tensor}, {}]", "%1 on mesh<data=2, tensor=2>: [{data}, {tensor}]"]
    );
    assert_eq!(imported.arguments[0].name.as_deref(), Some("x['w']"));
    assert_eq!(imported.results, [Some("y".to_string())]);
}

#[test]
fn arguments_in_turn_stay_behind_what_precedes_their_readers() {
    let mut graph = Graph::new("turns");
    let mut input = |name: &str, rows: u64| {
        graph.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(DType::F32, [rows, 512]) }), &[])
    };
    // The third one is too small to matter, and the fourth is not asked for.
    let [x, late, small, free] = [input("x", 512), input("late", 1024), input("small", 4), input("free", 1024)];
    let early = graph.unary(Unary::Tanh, x);
    let product = matmul(&mut graph, early, x).expect("a product");
    let both = [matmul(&mut graph, product, x), matmul(&mut graph, product, early)].map(|v| v.expect("a product"));
    let rest = [late, small, free].map(|v| graph.unary(Unary::Tanh, v));
    graph.outputs = [both.as_slice(), &rest].concat();
    let text = module(&graph, &Options { in_turn: vec![0, 1, 2], ..Options::default() });
    let barriers: Vec<&str> = text.lines().filter(|line| line.contains("optimization_barrier")).collect();
    assert!(matches!(barriers.as_slice(), [one] if one.contains("optimization_barrier %arg1, %1 :")), "{text}");
    let plain = module(&graph, &Options::default());
    let [found, expected] = [text, plain].map(|text| stablehlo::import(&text).expect("it is read back").graph);
    assert_eq!(found, expected);
}

#[test]
fn gradients_are_there_before_the_next_value_that_products_read() {
    let mut graph = Graph::new("turns");
    let square = TensorType::new(DType::F32, [512, 512]);
    let mut input = |name: &str| graph.emit(Op::Input(Input { name: name.into(), ty: square.clone() }), &[]);
    let [x, w] = ["x", "w"].map(&mut input);
    let mut product = |a: ValueId, b: ValueId| matmul(&mut graph, a, b).expect("a product");
    let first = product(x, w);
    let gradient = product(first, x);
    let next = product(first, w);
    let last = [product(next, x), product(next, w)];
    // A reduction over devices may take as long as it needs, wherever the graph has it.
    let mesh = Mesh::new(&[("data", 2)]);
    let collective = Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Sum };
    let reduced = graph.emit(Op::collective(collective, &mesh), &[gradient]);
    graph.outputs = [[reduced].as_slice(), &last].concat();
    let printed = |in_turn| module(&graph, &Options { replicas: Some(&mesh), in_turn, ..Options::default() });
    let text = printed(vec![0]);
    assert!(text.contains("%3:2 = stablehlo.optimization_barrier %1, %2 :"), "{text}");
    assert_eq!(text.matches("stablehlo.dot_general %3#1").count(), 2, "{text}");
    assert!(text.contains("all_reduce\"(%3#0)"), "{text}");
    assert!(!printed(Vec::new()).contains("optimization_barrier"));
}

#[test]
fn a_full_bucket_of_collectives_is_done_two_values_after_its_operands() {
    // Lines of a program whose matrices have `size` rows and columns.
    let printed = |size: u64| {
        let mut graph = Graph::new("turns");
        let square = TensorType::new(DType::F32, [size, size]);
        let mut input = |name: &str| graph.emit(Op::Input(Input { name: name.into(), ty: square.clone() }), &[]);
        let [x, w] = ["x", "w"].map(&mut input);
        let product = |graph: &mut Graph, a: ValueId, b: ValueId| matmul(graph, a, b).expect("a product");
        let first = product(&mut graph, x, w);
        let gradient = product(&mut graph, first, x);
        let mesh = Mesh::new(&[("data", 2)]);
        let collective = Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Sum };
        let reduced = graph.emit(Op::collective(collective, &mesh), &[gradient]);
        let sum = graph.unary(Unary::Negate, reduced);
        let next = product(&mut graph, first, w);
        let other = product(&mut graph, next, x);
        let third = product(&mut graph, next, w);
        let last = [product(&mut graph, third, x), product(&mut graph, third, w)];
        graph.outputs = [[sum, other].as_slice(), &last].concat();
        let text = module(&graph, &Options { replicas: Some(&mesh), in_turn: vec![0], ..Options::default() });
        text.lines().map(str::to_string).collect::<Vec<String>>()
    };
    for (size, is_full) in [(512, false), (2816, true)] {
        let text = printed(size);
        let at = |what: &str| text.iter().position(|line| line.contains(what)).expect("it is printed");
        // The collective reads the gradient behind the barrier, and so does not keep the next products waiting.
        let barriers: Vec<usize> = (0..text.len()).filter(|i| text[*i].contains("optimization_barrier")).collect();
        assert!(barriers[0] < at("all_reduce") && text[at("all_reduce")].contains("#0)"), "{}", text.join("\n"));
        let sum = text[at("negate")].trim().split(' ').next().expect("a name").to_string();
        let ties = |i: &usize| {
            let (_, operands) = text[*i].split_once("optimization_barrier ").expect("a barrier");
            operands.split(" : ").next().is_some_and(|names| names.split(", ").any(|name| name == sum))
        };
        let tied: Vec<usize> = barriers.into_iter().filter(ties).collect();
        assert_eq!(!tied.is_empty(), is_full, "{}", text.join("\n"));
        assert!(tied.iter().all(|i| *i > at("negate")));
    }
}

#[test]
fn values_of_several_collectives_are_printed_last_unless_a_product_follows() {
    let mut graph = Graph::new("turns");
    let square = TensorType::new(DType::F32, [512, 512]);
    let x = graph.emit(Op::Input(Input { name: "x".into(), ty: square }), &[]);
    let mesh = Mesh::new(&[("data", 2)]);
    let reduce = |graph: &mut Graph, v: ValueId| {
        let collective = Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Sum };
        graph.emit(Op::collective(collective, &mesh), &[v])
    };
    let [tanh, exponential] = [Unary::Tanh, Unary::Exponential].map(|op| graph.unary(op, x));
    let both = [tanh, exponential].map(|v| reduce(&mut graph, v));
    let late = graph.mul(both[0], both[1]);
    let summed = reduce(&mut graph, x);
    let product = matmul(&mut graph, summed, summed).expect("a product");
    graph.outputs = vec![late, product];
    let text = module(&graph, &Options { replicas: Some(&mesh), in_turn: vec![0], ..Options::default() });
    let at = |what: &str| text.find(what).expect("it is printed");
    assert_eq!(text.matches("all_reduce").count(), 3, "{text}");
    assert!(at("all_reduce") < at("dot_general") && at("dot_general") < at("stablehlo.multiply %"), "{text}");
}

#[test]
fn zeros_of_large_sums_wait_behind_a_product_whatever_its_shape() {
    let mut graph = Graph::new("turns");
    let mut input = |name: &str, dtype: DType, shape: [u64; 2]| {
        graph.emit(Op::Input(Input { name: name.into(), ty: TensorType::new(dtype, shape) }), &[])
    };
    let (x, indices) = (input("x", DType::F32, [512, 512]), input("indices", DType::I32, [1024, 1]));
    let early = matmul(&mut graph, x, x).expect("a product");
    let turned = graph.transpose(early, &[1, 0]);
    let flat = graph.reshape(turned, &[1024, 256]);
    let again = graph.reshape(flat, &[512, 512]);
    let both = [matmul(&mut graph, again, x), matmul(&mut graph, x, again)].map(|v| v.expect("a product"));
    let dims = GatherDims {
        offset_dims: vec![1],
        collapsed_slice_dims: vec![0],
        start_index_map: vec![0],
        index_vector_dim: 1,
        operand_batching_dims: Vec::new(),
        indices_batching_dims: Vec::new(),
        slice_sizes: vec![1, 256],
    };
    let sum = graph.emit(Op::ScatterAdd(ScatterAdd { dims, shape: vec![2048, 256] }), &[indices, flat]);
    graph.outputs = [both.as_slice(), &[sum]].concat();
    let text = module(&graph, &Options { in_turn: vec![0], ..Options::default() });
    let barrier = text.lines().find(|line| line.contains("optimization_barrier")).unwrap_or_default();
    assert!(barrier.contains(" : tensor<f32>, tensor<512x512xf32>") && barrier.contains(", %0 :"), "{text}");
    let zeros = text.lines().find(|line| line.contains("dims = [] :")).unwrap_or_default();
    assert!(zeros.contains("#0, dims = [] : (tensor<f32>) -> tensor<2048x256xf32>"), "{text}");
    // Programs without arguments that wait are as they were.
    assert!(!module(&graph, &Options::default()).contains("optimization_barrier"));
}
