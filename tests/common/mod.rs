//! Helpers of the end-to-end tests: running the binary, scratch files, and the locations of models.

#![allow(dead_code)] // Each test binary uses its own part.

pub mod offloading;
pub mod processes;
pub mod steps;

use altiplano::ir::dtype::DType;
use altiplano::ir::graph::{Node, Pin, PinnedDim};
use altiplano::ir::op::{Function, Op};
use altiplano::ir::optimizer::Optimizer;
use altiplano::ir::plan::{Goal, Offload, Plan, Schedule, Update};
use altiplano::planner::Silent;
use altiplano::planner::features::rings::Ring;
use altiplano::runtime::devices::cuda::Search;
use altiplano::{ImportOptions, load_cluster, load_model, request};
use altiplano_ir::recompute::{Module, Recompute};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The small GPT that ships with the project.
pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/gpt-small-demo.mlir");

/// A mixed-precision network, as frameworks trace it: weights and loss in f32, products in f16.
pub const MIXED: &str = r#"module @mixed {
  func.func public @main(%arg0: tensor<4x8xf32> loc("params['w1']"), %arg1: tensor<8x4xf32> loc("params['w2']"), %arg2: tensor<8x4xf32> loc("x"), %arg3: tensor<8x4xf32> loc("t")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %two = stablehlo.constant dense<2.0> : tensor<f32>
    %0 = stablehlo.convert %arg0 : (tensor<4x8xf32>) -> tensor<4x8xf16>
    %1 = stablehlo.convert %arg1 : (tensor<8x4xf32>) -> tensor<8x4xf16>
    %2 = stablehlo.convert %arg2 : (tensor<8x4xf32>) -> tensor<8x4xf16>
    %3 = stablehlo.dot_general %2, %0, contracting_dims = [1] x [0] : (tensor<8x4xf16>, tensor<4x8xf16>) -> tensor<8x8xf16>
    %4 = stablehlo.tanh %3 : tensor<8x8xf16>
    %5 = stablehlo.dot_general %4, %1, contracting_dims = [1] x [0] : (tensor<8x8xf16>, tensor<8x4xf16>) -> tensor<8x4xf16>
    %6 = stablehlo.convert %5 : (tensor<8x4xf16>) -> tensor<8x4xf32>
    %7 = stablehlo.subtract %6, %arg3 : tensor<8x4xf32>
    %8 = stablehlo.multiply %7, %7 : tensor<8x4xf32>
    %9 = stablehlo.reduce(%8 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
    %10 = stablehlo.multiply %9, %two : tensor<f32>
    return %10 : tensor<f32>
  }
}
"#;

/// Time limit of a command; only a hang exceeds it.
const PATIENCE: Duration = Duration::from_secs(300);

/// The output of the binary.
pub struct Output {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs `altiplano` with these arguments, and kills it if it hangs.
pub fn altiplano<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Output {
    altiplano_with(&[], arguments)
}

/// As [`altiplano`], with these environment variables.
pub fn altiplano_with<S: AsRef<std::ffi::OsStr>>(variables: &[(&str, &str)], arguments: &[S]) -> Output {
    let scratch = Scratch::new();
    // Output goes to files, since a full pipe would block the process.
    let (out, err) = (scratch.path("stdout"), scratch.path("stderr"));
    let file = |path: &Path| std::fs::File::create(path).expect("a file in the scratch directory");
    let mut child = Command::new(env!("CARGO_BIN_EXE_altiplano"))
        .args(arguments)
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(file(&out))
        .stderr(file(&err))
        .spawn()
        .expect("the binary starts");
    let start = Instant::now();
    let code = loop {
        match child.try_wait().expect("the process can be waited for") {
            Some(status) => break status.code(),
            None if start.elapsed() > PATIENCE => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("altiplano hangs");
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let read = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    Output { code, stdout: read(&out), stderr: read(&err) }
}

/// As [`altiplano`], but it must succeed; returns stdout.
pub fn succeeds<S: AsRef<std::ffi::OsStr> + std::fmt::Debug>(arguments: &[S]) -> String {
    let output = altiplano(arguments);
    assert_eq!(output.code, Some(0), "{arguments:?}\n{}{}", output.stdout, output.stderr);
    output.stdout
}

/// A directory that is removed with its value.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("altiplano-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        Scratch(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file and returns its path as an argument.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).expect("a file in the scratch directory");
        path.display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file of the collection of models and tables, which is not part of the project: `ALTIPLANO_SHARED` or `../shared`.
/// Prints a notice if it is missing, so that a skipped test is visible.
pub fn shared(name: &str) -> Option<PathBuf> {
    let root = std::env::var_os("ALTIPLANO_SHARED").map(PathBuf::from);
    let root = root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"));
    let path = root.join(name);
    if path.is_file() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} is not there (set ALTIPLANO_SHARED)", path.display());
    None
}

/// An exported model of the collection.
pub fn shared_model(name: &str) -> Option<String> {
    shared(&format!("models/{name}")).map(|path| path.display().to_string())
}

/// The folder of the collection, if it is present.
pub fn shared_models() -> Option<PathBuf> {
    shared_model("gpt2-tiny.mlir").and_then(|file| Path::new(&file).parent().map(Path::to_path_buf))
}

/// Compares a text with the golden of that name in `tests/goldens`; `UPDATE_GOLDENS=1` rewrites it. Paths in scratch
/// folders must be removed from the text first.
pub fn golden(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let text = format!("{}\n", text.trim_end());
    if std::env::var_os("UPDATE_GOLDENS").is_some_and(|v| v == "1") {
        std::fs::write(&file, &text).expect("the golden is written");
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    let at = text.lines().zip(expected.lines()).position(|(a, b)| a != b);
    let at = at.unwrap_or(text.lines().count().min(expected.lines().count()));
    let line = |text: &str| text.lines().nth(at).unwrap_or("(the end)").to_string();
    assert!(
        text == expected,
        "{} differs in line {} (UPDATE_GOLDENS=1 cargo test rewrites it)\n  golden: {}\n  now:    {}",
        file.display(),
        at + 1,
        line(&expected),
        line(&text)
    );
}

/// The plan of a model under a list of words, or the reason why there is none.
pub fn planned(model: &Path, import: &ImportOptions, words: &str) -> Result<Plan, String> {
    let mut words = words.split_whitespace();
    let cluster = words.next().expect("a cluster");
    let words: Vec<&str> = words.collect();
    let has = |word: &str| words.contains(&word);
    let number = |prefix: &str| words.iter().find_map(|w| w.strip_prefix(prefix)?.parse::<u32>().ok());
    let import = ImportOptions {
        precision: has("bf16").then_some(DType::BF16).or(has("f16").then_some(DType::F16)),
        loss: if has("inference") { Some("none".into()) } else { import.loss.clone() },
        ..import.clone()
    };
    let model = load_model(model, &import).map_err(|e| e.to_string())?;
    let mut request = request(&model, load_cluster(cluster).expect("a cluster"));
    request.baselines = false;
    (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (number("dp"), number("tp"), number("pp"));
    // One stage on each block of devices, unless stated otherwise, in the stated schedule, if any.
    request.degrees.virtual_stages = number("virtual").or(Some(1));
    if !has("inference") {
        request.schedule = Some(Schedule::OneFOneB);
    }
    request.degrees.zero = number("zero").map(|zero| zero as u8);
    request.batch.num_microbatches = number("micro");
    request.recompute = match (has("recompute"), has("selective")) {
        (true, _) => Some(Recompute::Full),
        (_, true) => Some(Recompute::Selective),
        _ => None,
    };
    request.recompute_modules = has("modules").then(|| Module::ALL.into_iter().collect());
    if has("gpipe") {
        request.schedule = Some(Schedule::GPipe);
    }
    if let Some(blocks) = number("ring") {
        request.ring = Ring::Blocks(blocks.into());
        // Positions are split even if that gains little.
        let attends =
            |n: &Node| matches!(&n.op, Op::Composite(op) if matches!(op.function, Function::Attention { .. }));
        let graph = &mut request.graph;
        for value in graph.values().filter(|v| attends(graph.node(*v))).collect::<Vec<_>>() {
            let dim = |axes: &[&str]| PinnedDim { axes: axes.iter().map(ToString::to_string).collect(), open: false };
            let dims = vec![dim(&[]), dim(&["ring"]), dim(&[]), dim(&[])];
            std::sync::Arc::make_mut(graph).pin(Pin { value, mesh: vec![("ring".into(), blocks.into())], dims });
        }
    }
    let offload = Offload { optimizer: has("offload"), activations: has("away") };
    if !offload.is_none() {
        request.offload = Some(offload);
    }
    if has("zb") {
        request.schedule = Some(Schedule::ZbH1);
    }
    if has("pipedream") {
        request.schedule = Some(Schedule::PipeDream);
    }
    if has("stale") {
        request.training.update = Update::Stale;
    }
    if has("sgd") {
        request.training.optimizer = Optimizer::sgd();
    }
    if has("throughput") {
        request.goal = Goal::Throughput;
    }
    request.batch.global = number("batch").map(u64::from);
    request.training.clip_norm = has("clip").then_some(0.1);
    altiplano::plan(&request, &Silent).map_err(|e| e.to_string())
}

/// An emulator with this number of GPUs, under the names of all libraries. Without g++ it prints a notice and returns
/// `None`.
pub fn emulator(scratch: &Scratch, gpus: u32) -> Option<Search> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("runtime/tests/cuda/emulated.cpp");
    let library = scratch.path("libcuda.so.1");
    let compiled = Command::new("g++")
        .args(["-w", "-std=c++17", "-O1", "-shared", "-fPIC", &format!("-DGPUS={gpus}"), "-o"])
        .arg(&library)
        .arg(&source)
        .status();
    match compiled {
        Ok(status) => assert!(status.success(), "{} compiles", source.display()),
        Err(error) => {
            eprintln!("SKIPPED: there is no g++: {error}");
            return None;
        }
    }
    for name in ["libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"] {
        std::os::unix::fs::symlink(&library, scratch.path(name)).expect("a link");
    }
    Some(Search { folders: vec![scratch.path("")] })
}
