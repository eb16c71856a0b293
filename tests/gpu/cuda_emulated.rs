//! Plans on GPUs that g++ emulates: the tapes of real plans run through the executor, the driver layer, kernel texts
//! and matmuls, and train as the CPU runtime does.

use crate::common::{Scratch, emulator, planned};
use altiplano::ImportOptions;
use altiplano::planner::programs;
use altiplano::runtime::devices::cuda::{CudaOptions, Running};
use altiplano::runtime::{Options, RuntimeError, Session};
use altiplano::training::{Training, scalars, start};
use std::path::PathBuf;
use std::process::Command;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 13, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}"#;

/// Devices that share a GPU communicate through the host.
#[test]
fn plans_train_on_a_gpu_as_on_the_cpu() {
    trains_alike(
        1,
        &[
            "local:1 micro2",
            "local:1 offload",
            "local:1 micro2 away",
            "local:2 dp2 tp1 pp1 zero3",
            "local:2 dp1 tp2 pp1",
            "local:2 dp1 tp1 pp2 micro4",
        ],
    );
}

/// Devices with a GPU each communicate through NCCL.
#[test]
fn plans_train_on_gpus_as_on_the_cpu() {
    trains_alike(
        4,
        &[
            "local:2 dp2 tp1 pp1 zero3",
            "local:2 dp1 tp1 pp2 micro4",
            "local:4 dp2 tp2 pp1",
            "local:4 dp2 tp1 pp2 micro2",
            "local:2 dp2 tp1 pp1 zero1 offload",
            "local:2 dp1 tp1 pp2 micro4 offload away",
        ],
    );
}

/// With attention as one fused kernel over tiles.
#[test]
fn plans_with_fused_attention_train_on_a_gpu_as_on_the_cpu() {
    let long = GPT2.replace("\"n_positions\": 4", "\"n_positions\": 24");
    trains(1, (&long, 24), &["dgx-h100/1 micro2", "dgx-h100/1 micro2 away"]);
    // And in a ring, each of whose rounds is one kernel.
    let one_head = GPT2.replace("\"n_positions\": 4", "\"n_positions\": 48").replace("\"n_head\": 2", "\"n_head\": 1");
    trains(2, (&one_head, 48), &["dgx-h100/2 dp1 tp2 pp1 ring2"]);
}

fn trains_alike(gpus: u32, plans: &[&str]) {
    trains(gpus, (GPT2, 4), plans);
}

fn trains(gpus: u32, (config, sequence): (&str, u64), plans: &[&str]) {
    let scratch = Scratch::new();
    let Some(search) = emulator(&scratch, gpus) else { return };
    let options = CudaOptions { search, cache: Some(scratch.path("kernels")), ..CudaOptions::default() };
    let file = PathBuf::from(scratch.file("gpt2.json", config));
    let import = ImportOptions { batch: Some(8), sequence: Some(sequence), ..ImportOptions::default() };
    for &words in plans {
        let plan = planned(&file, &import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let programs = programs(&plan).expect("a plan has programs");
        let training = Training { steps: 3, learning_rate: 1e-2, ..Training::default() };
        let (weights, mut batches) = start(&plan, &training).expect("weights and batches");
        let mut cpu = Session::new(&programs, &Options::default()).expect("the programs run");
        let mut gpu = Session::on_gpus(&programs, &options).unwrap_or_else(|error| panic!("{words}: {error}"));
        assert_eq!(gpu.uses_nccl(), gpus > 1, "{words}");
        for (name, tensor) in &weights {
            cpu.load_parameter(name, tensor).expect("a parameter");
            gpu.load_parameter(name, tensor).expect("a parameter");
        }
        for number in 1..=training.steps {
            let (batch, scalars) = (batches.take().expect("a batch"), scalars(training.learning_rate, number));
            let expected = cpu.step(&batch, &scalars).expect("a step").loss;
            let loss = gpu.step(&batch, &scalars).unwrap_or_else(|error| panic!("{words}: {error}")).loss;
            let near = (loss - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(near, "{words}, step {number}: loss {loss}, expected {expected}");
        }
        for name in weights.keys() {
            let expected = cpu.parameter(name).expect("a parameter").to_f64();
            let found = gpu.parameter(name).expect("a parameter").to_f64();
            let most = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
            let worst = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0f64, f64::max);
            assert!(worst <= 1e-4 * most.max(1.0), "{words}: {name} is {worst:e} off");
        }
    }
}

/// A model that is not trained has the same results, whose parts come from all devices.
#[test]
fn models_run_on_gpus_as_on_the_cpu() {
    let scratch = Scratch::new();
    let Some(search) = emulator(&scratch, 2) else { return };
    let options = CudaOptions { search, cache: Some(scratch.path("kernels")), ..CudaOptions::default() };
    let file = PathBuf::from(scratch.file("gpt2.json", GPT2));
    let import = ImportOptions { batch: Some(8), sequence: Some(4), ..ImportOptions::default() };
    for words in ["local:1 inference micro2", "local:2 inference dp2 tp1 pp1 micro2", "local:2 inference dp1 tp2 pp1"] {
        let plan = planned(&file, &import, words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let programs = programs(&plan).expect("a plan has programs");
        let (weights, mut batches) = start(&plan, &Training::default()).expect("weights and batches");
        let mut cpu = Session::new(&programs, &Options::default()).expect("the programs run");
        let mut gpu = Session::on_gpus(&programs, &options).unwrap_or_else(|error| panic!("{words}: {error}"));
        for (name, tensor) in &weights {
            cpu.load_parameter(name, tensor).expect("a parameter");
            gpu.load_parameter(name, tensor).expect("a parameter");
        }
        let batch = batches.take().expect("a batch");
        let (_, expected) = cpu.evaluate(&batch).expect("results");
        let (_, found) = gpu.evaluate(&batch).unwrap_or_else(|error| panic!("{words}: {error}"));
        assert_eq!(expected.len(), found.len(), "{words}");
        for (expected, found) in expected.values().flatten().zip(found.values().flatten()) {
            assert_eq!(expected.ty, found.ty, "{words}");
            let (expected, found) = (expected.to_f64(), found.to_f64());
            let worst = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0f64, f64::max);
            assert!(worst <= 1e-5 && expected.iter().any(|&x| x != 0.0), "{words}: results are {worst:e} off");
        }
    }
}

/// A library that records NVTX calls: `+NAME` and `-`.
const NVTX: &str = r#"
#include <stdio.h>
static void note(const char *sign, const char *name) {
    FILE *f = fopen(LOG, "a");
    fprintf(f, "%s%s\n", sign, name);
    fclose(f);
}
int nvtxRangePushA(const char *name) { note("+", name); return 0; }
int nvtxRangePop(void) { note("-", ""); return 0; }
"#;

/// Ranges are those of the plan's calls, each within its step, and contain the call's commands.
#[test]
fn profilers_are_told_what_runs() {
    let scratch = Scratch::new();
    let Some(search) = emulator(&scratch, 2) else { return };
    let (source, log) = (scratch.file("nvtx.c", NVTX), scratch.path("ranges"));
    let define = format!("-DLOG=\"{}\"", log.display());
    let library = scratch.path("libnvToolsExt.so.1");
    let status = Command::new("gcc").args(["-shared", "-fPIC", &define, "-o"]).arg(&library).arg(&source).status();
    assert!(status.expect("there is gcc").success());
    let options = CudaOptions { search, ..CudaOptions::default() };
    let file = PathBuf::from(scratch.file("gpt2.json", GPT2));
    let import = ImportOptions { batch: Some(8), sequence: Some(4), ..ImportOptions::default() };
    // One device, whose step is recorded once, and two.
    for (words, devices) in [("local:1 micro2", 1), ("local:2 dp2 tp1 pp1 micro2 sgd", 2)] {
        let plan = planned(&file, &import, words).expect("a plan");
        let _ = std::fs::remove_file(&log);
        let mut gpu = Session::on_gpus(&programs(&plan).expect("programs"), &options).expect("it starts");
        let (weights, mut batches) = start(&plan, &Training::default()).expect("weights and batches");
        weights.iter().for_each(|(name, tensor)| gpu.load_parameter(name, tensor).expect("a parameter"));
        let batch = batches.take().expect("a batch");
        for number in 1..=2 {
            gpu.step(&batch, &scalars(1e-3, number)).expect("a step");
        }
        drop(gpu);
        let told = std::fs::read_to_string(&log).expect("ranges");
        let opened = told.lines().filter(|line| line.starts_with('+')).count();
        assert_eq!(opened, told.lines().filter(|line| *line == "-").count(), "{words}: {told}");
        let count = |name: &str| told.lines().filter(|line| line.strip_prefix('+') == Some(name)).count();
        let steps: usize = (0..devices).map(|rank| count(&format!("step of device {rank}"))).sum();
        assert_eq!(steps, 2 * devices, "{words}");
        // The commands of a recorded step are reported once.
        let times = if devices == 1 { 1 } else { 2 * devices };
        for call in ["stage0 forward of microbatch 0", "stage0 backward of microbatch 1", "stage0 update"] {
            assert_eq!(count(call), times, "{words}: {call}\n{told}");
        }
        let named = |part: &str| told.lines().any(|line| line.starts_with("+matmul: ") && line.contains(part));
        assert!(named("(dot_general)"), "{told}");
        if devices == 1 {
            let mut depth = 0;
            for line in told.lines() {
                depth += if line == "-" { -1 } else { 1 };
                let is_step = line.starts_with("+step of device");
                assert!((0..=3).contains(&depth) && is_step == (line != "-" && depth == 1), "{line} at {depth}");
            }
        }
    }
}

#[test]
fn a_nan_on_a_gpu_names_its_command() {
    stops_at_a_nan(1, "local:1 sgd");
}

/// The other devices do not wait for the one that stopped.
#[test]
fn a_nan_on_one_of_two_gpus_stops_both() {
    stops_at_a_nan(2, "local:2 dp2 tp1 pp1 sgd");
}

fn stops_at_a_nan(gpus: u32, plan: &str) {
    let scratch = Scratch::new();
    let Some(search) = emulator(&scratch, gpus) else { return };
    let running = Running { check_nan: true, ..Running::default() };
    let options = CudaOptions { search, running, ..CudaOptions::default() };
    let model = "module @m {\n  func.func public @main(%arg0: tensor<4xf32> loc(\"params\"), %arg1: tensor<2x4xf32> loc(\"x\")) -> tensor<f32> {\n    \
        %c = stablehlo.constant dense<0.0> : tensor<f32>\n    %0 = stablehlo.log %arg0 : tensor<4xf32>\n    \
        %b = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>\n    %2 = stablehlo.multiply %b, %arg1 : tensor<2x4xf32>\n    \
        %9 = stablehlo.reduce(%2 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<2x4xf32>, tensor<f32>) -> tensor<f32>\n    \
        return %9 : tensor<f32>\n  }\n}\n";
    let file = PathBuf::from(scratch.file("log.mlir", model));
    let plan = planned(&file, &ImportOptions::default(), plan).expect("a plan");
    let (weights, mut batches) = start(&plan, &Training::default()).expect("weights and batches");
    let mut gpu = Session::on_gpus(&programs(&plan).expect("programs"), &options).expect("it starts");
    // The logarithm of a negative number.
    for (name, tensor) in &weights {
        let negative = vec![-1.0; tensor.ty.elements() as usize];
        gpu.load_parameter(name, &altiplano::runtime::HostTensor::from_f64(tensor.ty.clone(), &negative))
            .expect("it loads");
    }
    let error = gpu.step(&batches.take().expect("a batch"), &scalars(1e-3, 1)).expect_err("a NaN");
    let text = error.to_string();
    assert!(
        text.contains("made a NaN from inputs without NaN") && text.contains("of rank ") && text.contains("(launch to"),
        "{text}"
    );
    assert!(matches!(gpu.step(&batches.take().expect("a batch"), &scalars(1e-3, 2)), Err(RuntimeError::Stopped)));
}

/// The emulated GPU has one gibibyte.
#[test]
fn too_little_memory_names_tensors_and_the_prediction() {
    let scratch = Scratch::new();
    if emulator(&scratch, 1).is_none() {
        return;
    }
    let large = GPT2.replace("\"vocab_size\": 13", "\"vocab_size\": 13000000");
    let file = scratch.file("large.json", &large);
    let output = Command::new(env!("CARGO_BIN_EXE_altiplano"))
        .args([
            "run",
            &file,
            "--seq",
            "4",
            "--global-batch",
            "1",
            "--cluster",
            "1xA100-80",
            "--steps",
            "1",
            "--device",
            "cuda",
        ])
        .env("ALTIPLANO_CUDA", scratch.path(""))
        .output()
        .expect("the binary starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    for part in ["GPU 0 has too little memory for the arena", "the plan predicts ", "the largest tensors are ", "wte"] {
        assert!(text.contains(part), "'{part}': {text}");
    }
}

/// A strided convolution with padding and a depthwise one, their gradients, and a comparison with a CPU: on one device,
/// and on two that split the samples.
#[test]
fn convolutions_are_verified_on_gpus() {
    let scratch = Scratch::new();
    if emulator(&scratch, 1).is_none() {
        return;
    }
    let (wide, narrow) = ("tensor<2x3x3x8xf32>", "tensor<f32>");
    let convolution = |name: &str, lhs: &str, rhs: &str, window: &str, groups: u32, types: &str| {
        format!(
            "    {name} = stablehlo.convolution({lhs}, {rhs}) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {{{window}}} \
             {{batch_group_count = 1 : i64, feature_group_count = {groups} : i64}} : ({types}) -> {wide}\n"
        )
    };
    let first = "tensor<2x6x6x2xf32>, tensor<3x3x2x8xf32>";
    let second = "tensor<2x3x3x8xf32>, tensor<3x3x1x8xf32>";
    let model = [
        "module @m {\n  func.func public @main(%arg0: tensor<3x3x2x8xf32> loc(\"params['a']\"), %arg1: tensor<3x3x1x8xf32> loc(\"params['b']\"), %arg2: tensor<2x6x6x2xf32> loc(\"x\")) -> tensor<f32> {\n",
        "    %c = stablehlo.constant dense<0.0> : tensor<f32>\n",
        &convolution("%0", "%arg2", "%arg0", "stride = [2, 2], pad = [[1, 1], [1, 1]]", 1, first),
        &format!("    %1 = stablehlo.tanh %0 : {wide}\n"),
        &convolution("%2", "%1", "%arg1", "pad = [[1, 1], [1, 1]]", 8, second),
        &format!("    %3 = stablehlo.multiply %2, %2 : {wide}\n"),
        &format!("    %9 = stablehlo.reduce(%3 init: %c) applies stablehlo.add across dimensions = [0, 1, 2, 3] : ({wide}, {narrow}) -> {narrow}\n"),
        "    return %9 : tensor<f32>\n  }\n}\n",
    ]
    .concat();
    let file = scratch.file("convolutions.mlir", &model);
    for plan in [&["--cluster", "local:1"][..], &["--cluster", "local:2", "--dp", "2"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_altiplano"))
            .args(["verify", &file, "--optimizer", "sgd", "--device", "cuda"])
            .args(plan)
            .env("ALTIPLANO_CUDA", scratch.path(""))
            .env("XDG_CACHE_HOME", scratch.path("cache"))
            .output()
            .expect("the binary starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{plan:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("gradient         agrees") && text.contains("the numbers agree"), "{plan:?}: {text}");
    }
}

#[test]
fn the_command_line_trains_on_gpus() {
    let scratch = Scratch::new();
    if emulator(&scratch, 1).is_none() {
        return;
    }
    let file = scratch.file("gpt2.json", GPT2);
    let run = |device: &str, steps: &str, more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_altiplano"))
            .args(["run", &file, "--seq", "4", "--global-batch", "8", "--dp", "2", "--cluster", "local:2"])
            .args(["--steps", steps, "--lr", "0.01", "--device", device])
            .args(more)
            .env("ALTIPLANO_CUDA", scratch.path(""))
            .env("XDG_CACHE_HOME", scratch.path("cache"))
            .output()
            .expect("the binary starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{device}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let loss = |line: &str| line.split_once("loss ")?.1.split_whitespace().next()?.parse::<f64>().ok();
        text.lines().filter_map(loss).collect::<Vec<f64>>()
    };
    let (cpu, gpu) = (run("cpu", "3", &[]), run("cuda", "3", &[]));
    assert_eq!((cpu.len(), gpu.len()), (3, 3));
    assert!(cpu.iter().zip(&gpu).all(|(a, b)| (a - b).abs() <= 2e-5 * a.abs()), "{cpu:?} {gpu:?}");
    assert!(scratch.path("cache/altiplano/kernels").is_dir(), "kernels are kept");
    // From a checkpoint of a GPU, weights and state, another GPU and the CPU resume seamlessly.
    let folder = scratch.path("checkpoints").display().to_string();
    run("cuda", "2", &["--checkpoint", &folder]);
    let copy = scratch.path("copy").display().to_string();
    let copied = Command::new("cp").args(["-r", &folder, &copy]).status().expect("cp starts");
    assert!(copied.success());
    assert_eq!(run("cuda", "3", &["--checkpoint", &folder, "--resume"]), gpu[2..]);
    let on_cpu = run("cpu", "3", &["--checkpoint", &copy, "--resume"]);
    assert!(on_cpu.len() == 1 && (on_cpu[0] - gpu[2]).abs() <= 2e-5 * gpu[2].abs(), "{on_cpu:?} {gpu:?}");
}
