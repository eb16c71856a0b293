//! Pairs of programs that JAX wrote: those that compute the same are proved, and faults are not.

use crate::common::{Scratch, altiplano};
use altiplano::ir::graph::{Graph, Node, ValueId};
use altiplano::ir::literal::Literal;
use altiplano::ir::mesh::AxisId;
use altiplano::ir::op::{Binary, Op, Operator, Reducer, Unary};
use altiplano::ir::reshard::Collective;
use altiplano::pairs::{LoadedPair, PairOptions, load_pair};
use altiplano_prover::pair::{Pair, Part, difference, prove_pair};
use altiplano_prover::{Gap, Kind};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The programs of ranks that compute what the sequential program of the same name does.
const PROVED: [&str; 19] = [
    "mlp.ranks",
    "mlp.shared_bias",
    "mlp.first_bias",
    "linear.ranks",
    "linear.psum",
    "linear.counted",
    "sequence.ranks",
    "norm.ranks",
    "entropy.ranks",
    "attention.ranks",
    "exchange.ranks",
    "positions.ranks",
    "positions.product",
    "positions.sliced",
    "step.ranks",
    "step.automatic",
    "megatron_1446.mended",
    "jax_3970.mended",
    "deepspeed_7773.mended",
];

fn file(name: &str) -> PathBuf {
    format!("{}/tests/proofs/pairs/{name}.mlir", env!("CARGO_MANIFEST_DIR")).into()
}

fn sequential(name: &str) -> PathBuf {
    file(&format!("{}.seq", name.split('.').next().unwrap_or_default()))
}

fn loaded(name: &str) -> LoadedPair {
    load_pair(&sequential(name), &file(name), &PairOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn programs_that_compute_the_same_are_proved() {
    for name in PROVED {
        let pair = loaded(name);
        pair.prove().unwrap_or_else(|gap| panic!("{name}: {gap}"));
        for seed in 1..4 {
            assert_eq!(difference(&pair.pair(), seed), None, "{name}");
        }
    }
}

/// The line of a program of ranks that a message names.
fn named_line(name: &str, gap: &Gap) -> String {
    let text = std::fs::read_to_string(file(name)).expect("a program");
    let number = gap.text.split("line ").nth(1).and_then(|rest| rest.split(',').next()?.parse::<usize>().ok());
    let line = number.and_then(|number| text.lines().nth(number - 1));
    line.unwrap_or_else(|| panic!("no place in {gap}")).trim().to_string()
}

#[test]
fn faults_of_public_reports_are_found_where_they_are() {
    let cases = [
        // The gradient of the scale is used where its sum over the ranks is missing.
        ("megatron_1446.faulty", "stablehlo.subtract", "adds a summand to a value that every device holds"),
        // The cotangent 1, equal on all devices, is summed over them.
        ("jax_3970.faulty", "stablehlo.all_reduce", "sums equal values of several devices"),
        ("deepspeed_7773.faulty", "stablehlo.subtract", "2 times as much as it should"),
    ];
    for (name, op, text) in cases {
        let gap = loaded(name).prove().expect_err(name);
        assert_eq!(gap.kind, Kind::Differs, "{name}: {gap}");
        assert!(gap.text.contains(text), "{name}: {gap}");
        assert!(named_line(name, &gap).contains(op), "{name}: {gap}");
    }
}

/// Programs that JAX runs to other numbers than the sequential ones.
#[test]
fn programs_that_differ_when_jax_runs_them_differ_here() {
    let folder = file("mlp.seq").parent().map(std::fs::read_dir).expect("a folder").expect("readable");
    let names = folder.flatten().map(|entry| entry.file_name().to_string_lossy().replace(".mlir", ""));
    let names: Vec<String> = names.filter(|name| name.contains(".faulty")).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        let gap = loaded(&name).prove().expect_err(&name);
        assert_eq!(gap.kind, Kind::Differs, "{name}: {gap}");
        assert!(!named_line(&name, &gap).is_empty(), "{name}: {gap}");
    }
}

#[test]
fn parts_in_another_order_of_axes_are_not_proved() {
    let gap = loaded("exchange.faulty").prove().expect_err("exchange.faulty");
    assert_eq!(gap.kind, Kind::Differs, "{gap}");
    assert!(named_line("exchange.faulty", &gap).contains("stablehlo.all_gather"), "{gap}");
}

/// A program of ranks with one fault.
struct Variant {
    what: String,
    graph: Graph,
    inputs: Vec<Part>,
    outputs: Vec<Part>,
}

impl Variant {
    fn pair<'a>(&'a self, of: &Pair<'a>) -> Pair<'a> {
        Pair { ranks: &self.graph, inputs: &self.inputs, outputs: &self.outputs, ..*of }
    }
}

/// Replaces an op by another on the same operands, if the result has the same type.
fn replaced(of: &Pair<'_>, v: ValueId, op: Op) -> Option<Graph> {
    let types = of.ranks.operand_types(v);
    if op.infer(&types).ok()? != of.ranks.node(v).ty {
        return None;
    }
    let mut graph = of.ranks.clone();
    graph.nodes[v.index()].op = op;
    Some(graph)
}

/// Applies an op to a value, given as often as the op takes it, and uses the result wherever the value was used.
fn followed(of: &Pair<'_>, v: ValueId, op: Op, operands: usize) -> Option<Variant> {
    let ty = op.infer(&vec![of.ranks.ty(v); operands]).ok().filter(|ty| ty == of.ranks.ty(v))?;
    let moved = |o: ValueId| ValueId(o.0 + u32::from(o.0 >= v.0));
    let mut graph = of.ranks.clone();
    let name = format!("line 0, after {}", of.ranks.node(v).name);
    let node = Node { op, operands: vec![v; operands], ty, name, ..of.ranks.node(v).clone() };
    for at in v.index() + 1..graph.len() {
        graph.nodes[at].operands.iter_mut().for_each(|o| *o = moved(*o));
    }
    graph.nodes.insert(v.index() + 1, node);
    graph.outputs.iter_mut().for_each(|o| *o = moved(*o));
    let outputs = of.outputs.iter().map(|part| Part { value: moved(part.value), ..part.clone() }).collect();
    let input = |part: &Part| match part.value > v {
        true => Part { value: moved(part.value), ..part.clone() },
        false => part.clone(),
    };
    let inputs = of.inputs.iter().map(input).collect();
    Some(Variant { what: String::new(), graph, inputs, outputs })
}

/// Other collectives in the place of one.
fn other_collectives(of: &Pair<'_>, op: &Collective) -> Vec<(&'static str, Collective)> {
    let mut others = Vec::new();
    let singles = of.mesh.axis_ids().map(|axis| vec![axis]);
    let all: Vec<AxisId> = of.mesh.axis_ids().collect();
    for axes in singles.chain([all]).filter(|axes| axes.as_slice() != op.axes()) {
        let mut other = op.clone();
        match &mut other {
            Collective::AllReduce { axes: of_op, .. }
            | Collective::ReduceScatter { axes: of_op, .. }
            | Collective::AllGather { axes: of_op, .. }
            | Collective::LocalSlice { axes: of_op, .. }
            | Collective::KeepFirst { axes: of_op, .. } => *of_op = axes,
            _ => continue,
        }
        others.push(("a collective over the wrong axis", other));
    }
    match op.clone() {
        Collective::AllReduce { axes, reducer } => {
            let other = if reducer == Reducer::Sum { Reducer::Max } else { Reducer::Sum };
            others.push(("a collective dropped", Collective::AllReduce { axes: Vec::new(), reducer }));
            others.push(("another reduction", Collective::AllReduce { axes: axes.clone(), reducer: other }));
            others.push(("one device's value alone", Collective::KeepFirst { axes, reducer: Reducer::Sum }));
        }
        Collective::ReduceScatter { axes, dim, outer, .. } => {
            others.push(("a reduction dropped", Collective::LocalSlice { axes, dim, outer }));
        }
        Collective::KeepFirst { axes, reducer } => {
            others.push(("a mask dropped", Collective::AllReduce { axes: Vec::new(), reducer }));
            others.push(("a sum of copies", Collective::AllReduce { axes, reducer }));
        }
        _ => {}
    }
    others
}

/// Other ops in the place of one.
fn others(of: &Pair<'_>, v: ValueId) -> Vec<(&'static str, Op)> {
    let node = of.ranks.node(v);
    match &node.op {
        Op::Collective(op) => {
            let all = other_collectives(of, &op.collective);
            all.into_iter().map(|(what, other)| (what, Op::collective(other, of.mesh))).collect()
        }
        Op::Constant(literal) => {
            let Some(value) = literal.as_splat().filter(|x| x.is_finite()) else { return Vec::new() };
            let with = |value| Op::Constant(Literal::splat(node.ty.clone(), value));
            vec![("a constant too large", with(value * 2.0 + 1.0)), ("a constant of another sign", with(-value - 1.0))]
        }
        Op::AxisIndex(index) => {
            let axes = of.mesh.axis_ids().filter(|a| !index.axes.contains(a)).map(|a| vec![a]);
            let other = |axes| {
                let mut other = index.clone();
                other.axes = axes;
                ("an index along the wrong axis", Op::AxisIndex(other))
            };
            axes.map(other).collect()
        }
        Op::Reduce(reduce) => {
            let mut other = reduce.clone();
            other.reducer = if reduce.reducer == Reducer::Sum { Reducer::Max } else { Reducer::Sum };
            vec![("another local reduction", Op::Reduce(other))]
        }
        Op::Binary(binary) => {
            let other = match binary {
                Binary::Add => Binary::Subtract,
                Binary::Subtract => Binary::Add,
                Binary::Multiply => Binary::Divide,
                Binary::Divide => Binary::Multiply,
                _ => Binary::Maximum,
            };
            vec![("another op", Op::Binary(other))]
        }
        Op::Unary(unary) => {
            let other = if *unary == Unary::Tanh { Unary::Exponential } else { Unary::Tanh };
            vec![("another function", Op::Unary(other))]
        }
        _ => Vec::new(),
    }
}

/// All variants of a pair with one fault.
fn variants(of: &Pair<'_>) -> Vec<Variant> {
    let mut all = Vec::new();
    let (inputs, outputs) = (of.inputs.to_vec(), of.outputs.to_vec());
    for v in of.ranks.values() {
        let node = of.ranks.node(v);
        let mut changed = Vec::new();
        for (what, op) in others(of, v) {
            changed.extend(replaced(of, v, op).map(|graph| (what, graph)));
        }
        if let [a, b] = node.operands[..]
            && of.ranks.ty(a) == of.ranks.ty(b)
        {
            let mut graph = of.ranks.clone();
            graph.nodes[v.index()].operands = vec![b, a];
            changed.push(("swapped operands", graph));
            let mut graph = of.ranks.clone();
            graph.nodes[v.index()].operands = vec![a, a];
            changed.push(("an operand for another", graph));
        }
        if let (Op::Select(_), &[p, a, b]) = (&node.op, &node.operands[..]) {
            let mut graph = of.ranks.clone();
            graph.nodes[v.index()].operands = vec![p, b, a];
            changed.push(("an inverted mask", graph));
        }
        all.extend(changed.into_iter().map(|(what, graph)| Variant {
            what: format!("{what} at {v}, {} of {}", node.op.name(), node.name),
            graph,
            inputs: inputs.clone(),
            outputs: outputs.clone(),
        }));
        let mut insert = |what: &str, op: Op, operands: usize| {
            let what = format!("{what} after {v}, {} of {}", node.op.name(), node.name);
            all.extend(followed(of, v, op, operands).map(|variant| Variant { what, ..variant }));
        };
        if let Op::Collective(_) = &node.op {
            insert("a collective doubled", node.op.clone(), 1);
        }
        if node.ty.dtype.is_float() {
            insert("a value doubled", Op::Binary(Binary::Add), 2);
            for axis in of.mesh.axis_ids() {
                let sum = Collective::AllReduce { axes: vec![axis], reducer: Reducer::Sum };
                insert("a collective too many", Op::collective(sum, of.mesh), 1);
            }
        }
    }
    all
}

/// A variant may be proved only if the interpreter cannot tell its results from the right ones.
#[test]
fn no_variant_that_differs_is_proved() {
    let (mut differ, mut kinds) = (0, BTreeMap::new());
    for name in PROVED {
        let pair = loaded(name);
        for variant in variants(&pair.pair()) {
            let changed = variant.pair(&pair.pair());
            match prove_pair(&changed) {
                Ok(_) => {
                    for seed in 11..14 {
                        assert_eq!(difference(&changed, seed), None, "{name}: {} is proved", variant.what);
                    }
                }
                Err(gap) if gap.kind == Kind::Differs => {
                    assert!(gap.text.contains("line "), "{name}: {}: {gap}", variant.what);
                    let kind = variant.what.split(" at %").next().and_then(|w| w.split(" after %").next());
                    *kinds.entry(kind.unwrap_or_default().to_string()).or_insert(0) += 1;
                    differ += 1;
                }
                Err(_) => {}
            }
        }
    }
    println!("{differ} variants differ, and none of them is proved: {kinds:?}");
    assert!(differ > 1000 && kinds.len() > 12, "{differ} {kinds:?}");
}

/// Runs the command on a sequential program and the text of a program of ranks.
fn proves(sequential: &std::path::Path, ranks: &str, options: &[&str]) -> crate::common::Output {
    let scratch = Scratch::new();
    let ranks_file = scratch.path("ranks.mlir");
    std::fs::write(&ranks_file, ranks).expect("a file");
    let mut arguments = vec!["prove".to_string(), sequential.display().to_string(), ranks_file.display().to_string()];
    arguments.extend(options.iter().map(|option| option.to_string()));
    altiplano(&arguments)
}

#[test]
fn the_command_says_what_is_proved_and_where_a_proof_ends() {
    let read = |name: &str| std::fs::read_to_string(file(name)).expect("a program");
    let proved = proves(&sequential("step"), &read("step.ranks"), &[]);
    assert_eq!(proved.code, Some(0), "{}", proved.stderr);
    assert!(proved.stdout.contains("proved: every device of mesh<data=2, model=4>"), "{}", proved.stdout);
    let faulty = proves(&sequential("megatron_1446"), &read("megatron_1446.faulty"), &[]);
    assert_eq!(faulty.code, Some(1), "{}", faulty.stdout);
    assert!(faulty.stderr.contains("the programs differ; the proof ends at line "), "{}", faulty.stderr);
}

/// Texts that are no program of ranks of the sequential one, each refused with its place or its file.
#[test]
fn unusable_programs_of_ranks_are_refused() {
    let text = std::fs::read_to_string(file("mlp.ranks")).expect("a program");
    let groups = "dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>";
    assert!(text.contains(groups), "{text}");
    let cases = [
        (text.replace(groups, "dense<[[0, 1, 2, 4], [3, 5, 6, 7]]>"), "lie along no axes of mesh<data=2, model=4>"),
        (text.replace(groups, "dense<[[0, 1, 2, 3], [4, 5, 6, 9]]>"), "has devices that mesh<data=2, model=4> lacks"),
        (text.replace(", use_global_device_ids", ""), "its groups are of replicas"),
        (
            text.replace("manual_axes={\"data\", \"model\"}", "manual_axes={\"model\"}"),
            "some axes of its mesh are not manual",
        ),
        (
            text.replace("[{\"data\"}, {}]>, <@mesh", "[{\"rows\"}, {}]>, <@mesh"),
            "has an axis that mesh<data=2, model=4> lacks",
        ),
        (text.replace("\"model\"=4", "\"model\"=3"), "does not divide"),
        (
            text.replace("@main(%arg0: tensor<8x12xf32>, ", "@main(%arg0: tensor<8x12xf32>, %more: tensor<f32>, "),
            "has 6 arguments",
        ),
        (text[..text.len() / 2].to_string(), ""),
        ("{}".to_string(), "is no StableHLO text"),
    ];
    for (text, problem) in cases {
        let refused = proves(&sequential("mlp"), &text, &[]);
        assert_eq!(refused.code, Some(2), "{problem}: {}{}", refused.stdout, refused.stderr);
        assert!(refused.stderr.contains(problem), "{problem}: {}", refused.stderr);
        assert!(refused.stderr.contains("ranks.mlir"), "{}", refused.stderr);
    }
}

/// A sum over groups of the other axis is read as such, and not proved.
#[test]
fn groups_of_another_axis_are_not_proved() {
    let text = std::fs::read_to_string(file("mlp.ranks")).expect("a program");
    let other = "dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>";
    let text = text.replace("dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>", other);
    let differs = proves(&sequential("mlp"), &text, &[]);
    assert_eq!(differs.code, Some(1), "{}{}", differs.stdout, differs.stderr);
    assert!(differs.stderr.contains("the programs differ"), "{}", differs.stderr);
}

/// A program of ranks without a region, whose mesh and layouts options give.
const BARE: &str = r#"module {
  func.func public @main(%arg0: tensor<4x3xf32>, %arg1: tensor<3x5xf32>) -> tensor<4x5xf32> {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
    %1 = "stablehlo.all_reduce"(%0) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %2 = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }) : (tensor<4x5xf32>) -> tensor<4x5xf32>
    return %1 : tensor<4x5xf32>
  }
}
"#;

#[test]
fn options_give_the_mesh_and_layouts_of_bare_programs() {
    let scratch = Scratch::new();
    let one = scratch.path("one.mlir");
    let text = "module {
  func.func public @main(%arg0: tensor<4x6xf32>, %arg1: tensor<6x5xf32>) -> tensor<4x5xf32> {
    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<4x6xf32>, tensor<6x5xf32>) -> tensor<4x5xf32>
    return %0 : tensor<4x5xf32>
  }
}
";
    std::fs::write(&one, text).expect("a file");
    let layouts = ["--mesh", "m=2", "--layout", "arg0=[{}, {m}]", "--layout", "arg1=[{m}, {}]"];
    let proved = proves(&one, BARE, &layouts);
    assert_eq!(proved.code, Some(0), "{}", proved.stderr);
    let refused = [
        (&layouts[..2], "arg0: the layout"),
        (&layouts[..0], "a mesh must be given"),
        (&["--mesh", "m=2,m=2"][..], "--mesh"),
        (&["--mesh", "m=2", "--layout", "arg0=[{k}, {}]"][..], "is no layout of"),
        (
            &["--mesh", "m=2", "--layout", "arg0=[{}, {m}]", "--layout", "arg1=[{m}, {}]", "--layout", "arg9=[{m}]"][..],
            "no such argument",
        ),
        (
            &["--mesh", "m=2", "--layout", "arg0=[{}, {m}]", "--layout", "arg1=[{m}, {}]", "--layout", "result1=[]"][..],
            "no such argument",
        ),
    ];
    for (options, problem) in refused {
        let output = proves(&one, BARE, options);
        assert_eq!(output.code, Some(2), "{options:?}: {}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(problem), "{problem}: {}", output.stderr);
    }
}

#[test]
fn regions_in_the_older_form_are_read_with_a_given_mesh() {
    let load = |mesh: &str| {
        let options = PairOptions { mesh: Some(mesh.to_string()), layouts: Vec::new() };
        load_pair(&sequential("mlp.older"), &file("mlp.older"), &options)
    };
    let pair = load("data=2,model=4").unwrap_or_else(|error| panic!("{error}"));
    pair.prove().unwrap_or_else(|gap| panic!("{gap}"));
    let layouts: Vec<_> = pair.ranks.inputs.iter().map(|i| i.sharding.display(&pair.ranks.mesh).to_string()).collect();
    assert_eq!(layouts, ["[{data}, {}]", "[{}, {model}]", "[{model}]", "[{model}, {}]", "[{}]"]);
    let refused = load("data=4,model=2").err().map(|error| error.to_string()).unwrap_or_default();
    assert!(refused.contains("follows from no axes of mesh<data=4, model=2>"), "{refused}");
}
