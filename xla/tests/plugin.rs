//! XLA's results for printed graphs, through the PJRT plugin for CPUs that `ALTIPLANO_PJRT_PLUGIN` names. The oracle
//! runs these tests (`tests/oracle/run xla`); they need a plugin from PyPI.

use altiplano_import::stablehlo;
use altiplano_ir::autodiff::differentiate;
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::expand;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::{run, run_mesh};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::sharding::Sharding;
use altiplano_ir::tensor::Tensor;
use altiplano_ir::testing::numbers::{Rng, close, random};
use altiplano_ir::testing::{Case, cases};
use altiplano_ir::types::TensorType;
use altiplano_xla::pjrt::{self, Client, ClientOption, Launch, Platform, Plugin};
use altiplano_xla::text::{Layouts, Options, module};
use std::path::{Path, PathBuf};

/// A client with this many CPU devices.
fn client(devices: i64) -> Client {
    let file = pjrt::find(None, Platform::Cpu).expect("a plugin for CPUs");
    let plugin = Plugin::open(&file).expect("a plugin that opens");
    plugin.client(&[ClientOption::Number("cpu_device_count".into(), devices)]).expect("a client")
}

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

/// The elements as a device stores them.
fn rounded(tensor: Tensor) -> Tensor {
    let dtype = tensor.ty.dtype;
    Tensor::new(tensor.ty, tensor.data.into_iter().map(|x| dtype.round(x)).collect())
}

/// The error that an element type allows, relative to the larger of two numbers and one.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        dtype if dtype.is_float() => 2e-2,
        _ => 0.0,
    }
}

/// The first element that differs.
fn difference(found: &Tensor, expected: &Tensor) -> Option<String> {
    if found.ty != expected.ty || found.data.len() != expected.data.len() {
        return Some(format!("types {} and {}", found.ty, expected.ty));
    }
    let tolerance = tolerance(expected.ty.dtype);
    let at = found.data.iter().zip(&expected.data).position(|(&a, &b)| !close(a, b, tolerance))?;
    Some(format!("element {at}: {} and {}", found.data[at], expected.data[at]))
}

/// The outputs by the interpreter. Leaves get their values in order.
fn interpreted(graph: &Graph, leaves: &[Tensor]) -> Vec<Tensor> {
    let mut given = leaves.iter();
    run(graph, |_| given.next().expect("a value for each leaf").clone())
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn every_op_has_the_values_of_the_interpreter() {
    let client = client(1);
    let (mut seen, mut problems) = (0, Vec::new());
    for (case, mut rng) in cases().into_iter().zip(Rng::sequence(11)) {
        if matches!(case.op, Op::Collective(_) | Op::AxisIndex(_)) {
            continue;
        }
        seen += 1;
        let graph = graph_of(&case);
        let operands: Vec<Tensor> = match case.op.is_leaf() {
            true => vec![Tensor::from_fn(case.result.clone(), |i| i.iter().sum::<u64>() as f64)],
            false => case.random_operands(&mut rng).into_iter().map(rounded).collect(),
        };
        let expected = rounded(interpreted(&graph, &operands).remove(0));
        let problem = match pjrt::run(&client, &graph, &operands) {
            Err(error) => Some(error.to_string()),
            Ok(found) => difference(&found[0], &expected),
        };
        problems.extend(problem.map(|problem| format!("{}: {problem}", case.label())));
    }
    assert!(problems.is_empty(), "{} of {seen}:\n{}", problems.len(), problems.join("\n"));
    assert!(seen > 500, "only {seen} cases");
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn every_collective_has_the_values_of_the_interpreter() {
    let client = client(6);
    let mut seen = 0;
    for (case, mut rng) in cases().into_iter().zip(Rng::sequence(13)) {
        let mesh: Mesh = match &case.op {
            Op::Collective(op) => op.mesh.clone(),
            Op::AxisIndex(op) => op.mesh.clone(),
            _ => continue,
        };
        seen += 1;
        let graph = graph_of(&case);
        let devices = mesh.num_devices() as usize;
        let given: Vec<Vec<Tensor>> =
            (0..devices).map(|_| case.random_operands(&mut rng).into_iter().map(rounded).collect()).collect();
        let expected = run_mesh(&graph, &mesh, |v, device| given[device as usize][v.index()].clone());
        let text = module(&graph, &Options { replicas: Some(&mesh), ..Options::default() });
        let launch = Launch { replicas: mesh.num_devices(), ..Launch::default() };
        let executable = client.compile(&text, launch).unwrap_or_else(|e| panic!("{}: {e}\n{text}", case.label()));
        let mut buffers = Vec::new();
        for (values, &device) in given.iter().zip(executable.devices()) {
            let sent = values.iter().map(|x| client.buffer(&pjrt::to_bytes(x), &x.ty, device).expect("a buffer"));
            buffers.push(sent.collect::<Vec<_>>());
        }
        let arguments: Vec<Vec<_>> = buffers.iter().map(|list| list.iter().collect()).collect();
        let results = executable.execute(&arguments).unwrap_or_else(|e| panic!("{}: {e}\n{text}", case.label()));
        for (device, result) in results.iter().enumerate() {
            let found = pjrt::from_bytes(&case.result, &result[0].to_host().expect("a copy"));
            let expected = rounded(expected[graph.outputs[0].index()][device].clone());
            assert_eq!(difference(&found, &expected), None, "{} on device {device}", case.label());
        }
    }
    assert!(seen >= 8, "only {seen} cases");
}

/// Modules of this repository and, if `ALTIPLANO_SHARED` names them, of others. Large ones are left out.
fn models() -> Vec<PathBuf> {
    const LARGEST: u64 = 3_000_000;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let shared = std::env::var_os("ALTIPLANO_SHARED").map(|folder| PathBuf::from(folder).join("models"));
    let folders = [root.join("tests/models"), root.join("examples/models")].into_iter().chain(shared);
    let files = folders.filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let is_small = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|m| m.len() < LARGEST);
    let is_model = |path: &PathBuf| path.extension().is_some_and(|e| e == "mlir") && is_small(path);
    let mut files: Vec<PathBuf> = files.map(|entry| entry.path()).filter(is_model).collect();
    files.sort();
    files
}

/// The graph of the first scalar result, whose float arguments are parameters, with its gradients.
fn with_gradients(graph: &Graph) -> Option<Graph> {
    let scalar = |v: &&ValueId| graph.ty(**v).rank() == 0 && graph.ty(**v).dtype.is_float();
    let loss = *graph.outputs.iter().find(scalar)?;
    let mut trained = expand(graph).graph;
    for node in &mut trained.nodes {
        if let Op::Input(input) = &node.op
            && input.ty.dtype.is_float()
        {
            node.op = Op::Parameter(Parameter::new(input.name.clone(), input.ty.clone()));
        }
    }
    trained.outputs = vec![loss];
    let of = differentiate(&trained, &[]).ok()?;
    let mut all = of.graph;
    let mut outputs = vec![of.loss];
    for (v, _) in trained.parameters() {
        let contributions: Vec<ValueId> = of.contributions[v.index()].iter().map(|c| c.1).collect();
        outputs.extend(contributions.into_iter().reduce(|a, b| all.add(a, b)));
    }
    all.outputs = outputs;
    Some(all)
}

/// Values for the leaves: floats in this range, small integers.
fn leaves_of(graph: &Graph, reals: (f64, f64), rng: &mut Rng) -> Vec<Tensor> {
    let leaves = graph.nodes.iter().filter(|node| node.op.is_leaf());
    leaves.map(|node| rounded(random(&node.ty, reals, (0, 7), rng))).collect()
}

/// The norm of the difference relative to the norm of the expected tensor, or absolute if that is below one millionth.
fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut found.data.iter().zip(&expected.data).map(|(a, b)| a - b));
    let size = norm(&mut expected.data.iter().copied());
    if size < 1e-6 { apart } else { apart / size }
}

/// Compares all outputs of a graph. Models whose step takes more than `MOST_FLOP` are run and not compared, because the
/// interpreter would take minutes.
fn compare(client: &Client, name: &str, graph: &Graph, rng: &mut Rng) -> Result<String, String> {
    const MOST_FLOP: u64 = 1_200_000_000;
    let flop: u64 = graph.values().map(|v| graph.flop(v)).fold(0, u64::saturating_add);
    let mut leaves = leaves_of(graph, (-0.3, 0.3), rng);
    let mut expected = Vec::new();
    if flop <= MOST_FLOP {
        expected = interpreted(graph, &leaves);
        if expected.iter().flat_map(|x| &x.data).any(|x| x.is_nan()) {
            // Some leaves, such as second moments, are never negative.
            leaves = leaves_of(graph, (0.06, 0.3), rng);
            expected = interpreted(graph, &leaves);
        }
    }
    let found = pjrt::run(client, graph, &leaves).map_err(|e| format!("{name}: {e}"))?;
    if flop > MOST_FLOP {
        return Ok(format!("{name}: accepted and run, {} outputs, not interpreted ({flop} FLOP)", found.len()));
    }
    let mut worst: f64 = 0.0;
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let allowed = if expected.ty.dtype.is_half() { 5e-2 } else { 1e-4 };
        let error = error(found, &rounded(expected.clone()));
        // NaN is no agreement.
        if error.is_nan() || error > allowed {
            return Err(format!("{name}: output {at} ({}) is {error:.1e} off", expected.ty));
        }
        worst = worst.max(error / allowed);
    }
    Ok(format!("{name}: {} outputs agree, at most {worst:.1e} of what is allowed", found.len()))
}

/// Larger models do not fit the interpreter's memory.
const MOST_ELEMENTS: u64 = 3_000_000;

#[test]
#[ignore = "needs a PJRT plugin"]
fn models_have_the_values_and_gradients_of_the_interpreter() {
    let client = client(1);
    let (mut problems, mut seen) = (Vec::new(), 0);
    for (file, mut rng) in models().iter().zip(Rng::sequence(17)) {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(file).expect("a readable model");
        let graph = stablehlo::import(&text).expect("a model that is imported").graph;
        let elements: u64 = graph.nodes.iter().filter(|n| n.op.is_leaf()).map(|n| n.ty.elements()).sum();
        if elements > MOST_ELEMENTS {
            println!("SKIPPED {name}: {elements} elements of weights and inputs");
            continue;
        }
        let mut all = vec![(format!("{name} forward"), graph.clone())];
        all.extend(with_gradients(&graph).map(|graph| (format!("{name} gradients"), graph)));
        for (name, graph) in all {
            seen += 1;
            match compare(&client, &name, &graph, &mut rng) {
                Ok(said) => println!("{said}"),
                Err(problem) => {
                    println!("FAILED {problem}");
                    problems.push(problem);
                }
            }
        }
    }
    assert!(problems.is_empty(), "{} of {seen}:\n{}", problems.len(), problems.join("\n"));
    assert!(seen > 20, "only {seen} graphs");
}

/// XLA splits a program for one device by Shardy's shardings over four.
#[test]
#[ignore = "needs a PJRT plugin"]
fn layouts_split_a_program_over_devices() {
    let client = client(4);
    let mesh = Mesh::new(&[("data", 2), ("tensor", 2)]);
    let mut graph = Graph::new("product");
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let x = graph.emit(Op::Input(Input { name: "x".into(), ty: ty(&[4, 6]) }), &[]);
    let w = graph.emit(Op::Parameter(Parameter::new("w", ty(&[6, 8]))), &[]);
    let dot = altiplano_ir::op::DotGeneral {
        lhs_batch: vec![],
        rhs_batch: vec![],
        lhs_contract: vec![1],
        rhs_contract: vec![0],
    };
    let y = graph.emit(Op::DotGeneral(dot), &[x, w]);
    graph.outputs = vec![y];
    let (data, tensor) = (AxisId(0), AxisId(1));
    let whole = Sharding::replicated(&[4, 8]);
    let values =
        [(x, Sharding::split(&[4, 6], 0, vec![data])), (w, Sharding::split(&[6, 8], 1, vec![tensor])), (y, whole)];
    let layouts = Layouts { mesh: &mesh, values: values.clone().into_iter().collect() };
    let text = module(&graph, &Options { layouts: Some(layouts), ..Options::default() });
    let executable =
        client.compile(&text, Launch { replicas: 1, partitions: 4 }).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let given = leaves_of(&graph, (-0.3, 0.3), &mut Rng::new(5));
    let expected = interpreted(&graph, &given);
    let mut buffers = Vec::new();
    for (position, &device) in executable.devices().iter().enumerate() {
        let parts = given.iter().zip(&values);
        let parts = parts.map(|(x, (_, layout))| altiplano_ir::interpret::shard(x, layout, &mesh, position as u32));
        let sent = parts.map(|x| client.buffer(&pjrt::to_bytes(&x), &x.ty, device).expect("a buffer"));
        buffers.push(sent.collect::<Vec<_>>());
    }
    let arguments: Vec<Vec<_>> = buffers.iter().map(|list| list.iter().collect()).collect();
    for result in executable.execute(&arguments).expect("it runs") {
        let found = pjrt::from_bytes(graph.ty(y), &result[0].to_host().expect("a copy"));
        assert_eq!(difference(&found, &rounded(expected[0].clone())), None);
    }
}

/// A program for one device runs on another without being compiled again. Tensors move between devices, and an argument
/// that is kept survives a program that would take its memory.
#[test]
#[ignore = "needs a PJRT plugin"]
fn programs_and_tensors_move_to_other_devices() {
    let client = client(4);
    let mut graph = Graph::new("doubled");
    let ty = TensorType::new(DType::F32, [4]);
    let x = graph.emit(Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[]);
    graph.outputs = vec![graph.add(x, x)];
    let text = module(&graph, &Options { donated: vec![(0, 0)], ..Options::default() });
    let first = client.compile_on(&text, Launch::default(), &[2], &[]).expect("it compiles");
    assert_eq!(first.devices(), [2]);
    let other = client.load(&first.to_bytes().expect("bytes"), Launch::default(), &[3]).expect("it moves");
    assert_eq!(other.devices(), [3]);
    let tensor = Tensor::splat(ty.clone(), 1.5);
    let buffer = client.buffer(&pjrt::to_bytes(&tensor), &ty, 0).expect("a buffer").copy_to(2).expect("a copy");
    let value = |buffer: &pjrt::Buffer| pjrt::from_bytes(&ty, &buffer.to_host().expect("a copy")).data;
    // Nothing waits for the first program before the second uses its result.
    let (results, _first) = first.launch(&[vec![&buffer]], &[0]).expect("it starts");
    let moved = results[0][0].copy_to(3).expect("a copy");
    let (results, mut second) = other.launch(&[vec![&moved]], &[]).expect("it starts");
    second.wait().expect("it runs");
    assert_eq!((value(&buffer), value(&results[0][0])), (vec![1.5; 4], vec![6.0; 4]));
    assert!(moved.to_host().is_err(), "its memory was taken");
}

/// A donated argument is gone, and XLA says so. A program that XLA refuses, and one for too many devices, give errors.
#[test]
#[ignore = "needs a PJRT plugin"]
fn errors_are_said_once_and_nothing_is_lost() {
    let client = client(2);
    let refused = client.compile("module { not stablehlo }", Launch::default()).expect_err("no program");
    assert!(refused.to_string().starts_with("XLA cannot compile the program: "), "{refused}");
    let mut graph = Graph::new("donated");
    let x = graph.emit(Op::Input(Input { name: "x".into(), ty: TensorType::new(DType::F32, [4]) }), &[]);
    graph.outputs = vec![graph.add(x, x)];
    let plain = module(&graph, &Options::default());
    let many = client.compile(&plain, Launch { replicas: 3, partitions: 1 }).expect_err("two devices");
    assert!(many.to_string().starts_with("XLA cannot compile the program: "), "{many}");
    let text = module(&graph, &Options { donated: vec![(0, 0)], ..Options::default() });
    let executable = client.compile(&text, Launch::default()).expect("it compiles");
    assert_eq!(executable.compiled().and_then(|c| c.memory()).expect("its memory").aliased, 16);
    let ty = TensorType::new(DType::F32, [4]);
    let one = Tensor::splat(ty.clone(), 1.5);
    let buffer = client.buffer(&pjrt::to_bytes(&one), &ty, 0).expect("a buffer");
    let results = executable.execute(&[vec![&buffer]]).expect("it runs");
    assert_eq!(pjrt::from_bytes(&ty, &results[0][0].to_host().expect("a copy")).data, [3.0; 4]);
    let gone = executable.execute(&[vec![&buffer]]).expect_err("it is donated");
    assert!(gone.to_string().starts_with("XLA cannot run the program: "), "{gone}");
    let few = executable.execute(&[]).expect_err("no arguments").to_string();
    assert_eq!(few, "the program runs on 1 devices, and there are arguments for 0");
    assert!(client.buffer(&[0; 3], &ty, 0).expect_err("too short").to_string().contains("3 bytes"));
    assert!(client.buffer(&[0; 16], &ty, 7).expect_err("no device").to_string().contains("device 7"));
}
