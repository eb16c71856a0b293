//! Compares single functions with recorded results. The reference interpreter and the CPU kernels run every
//! `NAME.mlir`, `NAME.onnx` and `NAME.pt2` of the given files and folders, and the results are compared with
//! `NAME.safetensors`.
//!
//!     cargo run --release --example evaluate -- FOLDER|FILE.mlir...
//!
//! The recorded file has the arguments as `input/0` and so on, or under their names (inputs as `input/NAME`), and
//! results as `result/0` and so on. Beside each is `tolerance/0`: two factors, one of the expected value and one of the
//! largest expected value, whose sum limits the error. If it has a `loss`, the function is differentiated with respect
//! to the arguments that are named as parameters, and `grad/NAME` is compared. The exit code is 1 if anything differs.

use altiplano::arguments::{Argument, Stated, roles, with_roles};
use altiplano::ir::autodiff::differentiate;
use altiplano::ir::graph::Graph;
use altiplano::ir::interpret;
use altiplano::ir::op::{Input, Op, Parameter};
use altiplano::ir::simplify::simplify;
use altiplano::ir::types::TensorType;
use altiplano::runtime::data::read_safetensors;
use altiplano::runtime::{HostTensor, evaluate};
use altiplano_import::{onnx, stablehlo, torch_export};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

type Tensors = BTreeMap<String, HostTensor>;

/// The failure of a case.
enum Failure {
    /// It cannot be imported or differentiated, so nothing was computed.
    Unsupported(String),
    Differs(String),
}

fn main() -> ExitCode {
    let mut cases = Vec::new();
    let mut limits = BTreeMap::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--limits" {
            limits.extend(known_limits(&arguments.next().unwrap_or_default()));
            continue;
        }
        let argument = PathBuf::from(argument);
        match std::fs::read_dir(&argument) {
            Ok(entries) => cases.extend(entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| is_module(p))),
            Err(_) => cases.push(argument),
        }
    }
    cases.sort();
    let (mut agree, mut unsupported, mut differ, mut known) = (0, 0, 0, 0);
    for case in &cases {
        let name = case.file_stem().unwrap_or_default().to_string_lossy();
        // A case that panics must not hide the results of the others.
        let outcome = std::panic::catch_unwind(|| check(case));
        let outcome = outcome.unwrap_or_else(|_| Err(Failure::Differs("it panics".to_string())));
        match (outcome, limits.get(name.as_ref())) {
            (Ok(()), Some(_)) => {
                differ += 1;
                println!("FAILED       {name}: agrees now, and is still listed as a limit");
            }
            (Err(_), Some(why)) => {
                known += 1;
                println!("known limit  {name}: {why}");
            }
            (Ok(()), None) => {
                agree += 1;
                println!("ok           {name}");
            }
            (Err(Failure::Unsupported(why)), None) => {
                unsupported += 1;
                println!("UNSUPPORTED  {name}: {}", one_line(&why));
            }
            (Err(Failure::Differs(why)), None) => {
                differ += 1;
                println!("FAILED       {name}: {}", one_line(&why));
            }
        }
    }
    println!("{agree} of {} agree, {known} known limits, {unsupported} unsupported, {differ} failed", cases.len());
    if agree + known == cases.len() && agree > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Names of cases with known failures, and the reasons: `name: reason`, one per line.
fn known_limits(file: &str) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(": "));
    lines.map(|(name, why)| (name.to_string(), why.to_string())).collect()
}

fn is_module(file: &Path) -> bool {
    file.extension().is_some_and(|e| e == "mlir" || e == "onnx" || e == "pt2")
}

fn is_onnx(file: &Path) -> bool {
    file.extension().is_some_and(|e| e == "onnx")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn unsupported(error: impl std::fmt::Display) -> Failure {
    Failure::Unsupported(error.to_string())
}

fn differs(error: impl std::fmt::Display) -> Failure {
    Failure::Differs(error.to_string())
}

/// Reads a model by its content. Adds to what was recorded the tensors that an exporter has merged or folded.
fn read(file: &Path, recorded: &mut Tensors) -> Result<(Graph, Vec<Argument>), Failure> {
    let bytes = std::fs::read(file).map_err(differs)?;
    if is_onnx(file) {
        let imported = onnx::import(&bytes, &onnx::Options::default(), &|_, _| None).map_err(unsupported)?;
        for tensor in onnx::held(&bytes, &|_, _| None).map_err(unsupported)? {
            if let onnx::HeldData::Inline(data) = tensor.data {
                recorded.insert(tensor.name, HostTensor::from_f64(tensor.ty, &data));
            }
        }
        let arguments = imported.arguments.into_iter();
        let arguments = arguments.map(|a| Argument { name: Some(a.name), ty: a.ty, value: a.value });
        return Ok((imported.graph, arguments.collect()));
    }
    let Ok(text) = std::str::from_utf8(&bytes) else { return program(&bytes) };
    let imported = stablehlo::import(text).map_err(unsupported)?;
    let arguments = imported.arguments.into_iter();
    Ok((imported.graph, arguments.map(|a| Argument { name: a.name, ty: a.ty, value: a.value }).collect()))
}

/// A recorded value, with its name.
type Expected<'a> = (String, &'a HostTensor);

/// The graph of the values that were recorded: the loss and its gradients, or the results.
fn of_recorded<'a>(
    file: &Path,
    mut graph: Graph,
    arguments: &[Argument],
    recorded: &'a Tensors,
) -> Result<(Graph, Vec<Expected<'a>>), Failure> {
    let missing = |name: &str| differs(format!("{name} is not recorded"));
    let mut expected = Vec::new();
    let Some(loss) = recorded.get("loss") else {
        for i in 0..graph.outputs.len() {
            let name = format!("result/{i}");
            let result = recorded.get(&name).ok_or_else(|| missing(&name))?;
            expected.push((name, result));
        }
        return Ok((graph, expected));
    };
    // Some formats state which arguments are trained.
    if graph.parameters().next().is_none() {
        let roles = roles(arguments, None, Stated::default()).map_err(unsupported)?;
        graph = with_roles(&graph, arguments, &roles);
    }
    graph = with_gradients(&graph).map_err(unsupported)?;
    expected.push(("loss".to_string(), loss));
    // An exporter may have merged weights, whose gradients are then not recorded; most others are.
    let names: Vec<String> = graph.trained_parameters().map(|(_, name)| format!("grad/{name}")).collect();
    let mut outputs = vec![graph.outputs[0]];
    for (name, &output) in names.into_iter().zip(&graph.outputs[1..]) {
        match recorded.get(&name) {
            Some(gradient) => {
                outputs.push(output);
                expected.push((name, gradient));
            }
            None if !is_onnx(file) => return Err(missing(&name)),
            None => {}
        }
    }
    if outputs.len() < 2 {
        return Err(differs("no gradient is recorded"));
    }
    graph.outputs = outputs;
    Ok((graph, expected))
}

fn check(file: &Path) -> Result<(), Failure> {
    let mut recorded = read_safetensors(&file.with_extension("safetensors")).map_err(differs)?;
    let (graph, arguments) = read(file, &mut recorded)?;
    let leaves = leaves(&graph, &arguments, &recorded).map_err(Failure::Differs)?;
    let (graph, expected) = of_recorded(file, graph, &arguments, &recorded)?;
    if let Some(error) = graph.verify().first() {
        return Err(differs(error));
    }
    let reference = interpret::run(&graph, |v| leaves[leaf(&graph, v).0].to_reference());
    let mut problems = Vec::new();
    let mut compare = |by: &str, results: &[(TensorType, Vec<f64>)]| {
        for ((name, expected), (ty, found)) in expected.iter().zip(results) {
            let tolerance = recorded.get(&format!("tolerance/{}", name.trim_start_matches("result/")));
            let tolerance = tolerance.or_else(|| recorded.get("tolerance")).map_or(vec![], HostTensor::to_f64);
            if let Some(problem) = difference(ty, found, expected, &tolerance) {
                problems.push(format!("{by}, {name}: {problem}"));
            }
        }
    };
    // The interpreter computes with reals; only results are rounded to their type.
    let rounded = reference.iter().map(HostTensor::from_reference);
    compare("interpreter", &rounded.map(|t| (t.ty.clone(), t.to_f64())).collect::<Vec<_>>());
    // Kernels are compiled from the simplified graph, as in training.
    match evaluate(&simplify(&graph), &leaves) {
        Ok(results) => compare("kernels", &results.into_iter().map(|t| (t.ty.clone(), t.to_f64())).collect::<Vec<_>>()),
        Err(error) => problems.push(format!("kernels: {error}")),
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::Differs(problems.join("; "))) }
}

/// The graph of an exported program, and its arguments. Those that are neither parameters nor buffers come first, so
/// that they can be recorded by number.
fn program(bytes: &[u8]) -> Result<(Graph, Vec<Argument>), Failure> {
    let imported = torch_export::import(bytes, &Default::default());
    let imported = imported.map_err(|e| Failure::Unsupported(e.to_string()))?;
    let graph = imported.graph;
    let given = &imported.user_inputs;
    let others = graph.values().filter(|v| graph.node(*v).op.is_leaf() && !given.contains(v));
    let argument = |v| {
        let (name, ty) = leaf(&graph, v);
        Argument { name: Some(name.to_string()), ty: ty.clone(), value: v }
    };
    let arguments = given.iter().copied().chain(others).map(argument).collect();
    Ok((graph, arguments))
}

fn leaf(graph: &Graph, v: altiplano::ir::graph::ValueId) -> (&str, &TensorType) {
    match &graph.node(v).op {
        Op::Parameter(Parameter { name, ty, .. }) | Op::Input(Input { name, ty }) => (name, ty),
        op => unreachable!("{op:?} is no leaf"),
    }
}

/// The values of arguments by the names of the leaves, in the leaves' types, some of which files lack.
fn leaves(graph: &Graph, arguments: &[Argument], recorded: &Tensors) -> Result<Tensors, String> {
    let mut leaves = Tensors::new();
    for (i, argument) in arguments.iter().enumerate() {
        let (name, ty) = leaf(graph, argument.value);
        let names = [name.to_string(), format!("input/{name}"), format!("input/{i}")];
        let found = names.iter().find_map(|name| recorded.get(name));
        let found = found.ok_or_else(|| format!("argument {i} ('{name}') is not recorded"))?;
        if found.ty.shape != ty.shape {
            return Err(format!("argument {i} ('{name}') is {ty}, but {} is recorded", found.ty));
        }
        leaves.insert(name.to_string(), found.cast(ty.dtype));
    }
    Ok(leaves)
}

/// The graph whose outputs are the loss and the gradient of each parameter. If the loss does not depend on a parameter,
/// its gradient is zero.
fn with_gradients(graph: &Graph) -> Result<Graph, altiplano::ir::autodiff::AutodiffError> {
    let differentiated = differentiate(graph, &[])?;
    let parameters: Vec<_> = graph.trained_parameters().map(|(v, _)| v).collect();
    let mut all = differentiated.graph;
    let mut outputs = vec![differentiated.loss];
    for v in parameters {
        let contributions = differentiated.contributions[v.index()].iter().map(|c| c.1).collect::<Vec<_>>();
        let sum = contributions.into_iter().reduce(|a, b| all.add(a, b));
        outputs.push(sum.unwrap_or_else(|| all.splat_like(v, 0.0)));
    }
    all.outputs = outputs;
    Ok(all)
}

/// Describes the error of a result, if any. Integers and booleans must be equal.
fn difference(ty: &TensorType, found: &[f64], expected: &HostTensor, tolerance: &[f64]) -> Option<String> {
    // A scalar may be recorded as one element.
    if ty.shape != expected.ty.shape && ty.elements().max(expected.ty.elements()) != 1 {
        return Some(format!("is {ty}, but {} is recorded", expected.ty));
    }
    let is_float = ty.dtype.is_float();
    if is_float != expected.ty.dtype.is_float() {
        return Some(format!("is {ty}, but {} is recorded", expected.ty));
    }
    let expected = expected.to_f64();
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0, |m: f64, x| m.max(x.abs()));
    let (relative, absolute) = if let (true, [relative, absolute]) = (is_float, tolerance) {
        (*relative, absolute * largest)
    } else {
        (0.0, 0.0)
    };
    let allowed = |e: f64| relative * e.abs() + absolute;
    // An infinity matches only itself.
    let near = |f: f64, e: f64| e.is_finite() && (f - e).abs() <= allowed(e);
    let differs = |(f, e): (f64, f64)| !(f == e || f.is_nan() && e.is_nan() || near(f, e));
    let differing: Vec<usize> = (0..expected.len()).filter(|&i| differs((found[i], expected[i]))).collect();
    let &first = differing.first()?;
    let (count, all) = (differing.len(), expected.len());
    let (f, e) = (found[first], expected[first]);
    Some(format!(
        "{count} of {all} elements differ; the {first}th of {ty} is {f:e}, expected {e:e} +- {:.1e}",
        allowed(e)
    ))
}
