//! `run` and `verify` with `--device xla`.

use crate::common::{DEMO, Output, Scratch, altiplano, altiplano_with, succeeds};

/// The losses that a run prints.
fn losses(text: &str) -> Vec<f64> {
    let loss = |line: &str| line.strip_prefix("step")?.split_whitespace().nth(2)?.parse().ok();
    text.lines().filter_map(loss).collect()
}

/// Adam's first steps have the size of the learning rate however small a gradient is, so that rounding shows later.
fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs())
}

/// A run is interrupted and resumed on XLA's devices and on CPU workers, with all that beginners and others use.
#[test]
#[ignore = "needs a PJRT plugin"]
fn a_run_trains_evaluates_and_resumes_as_on_cpu_workers() {
    let scratch = Scratch::new();
    let plan = scratch.path("plan.json").display().to_string();
    succeeds(&[
        "plan",
        DEMO,
        "--cluster",
        "local:4",
        "--dp",
        "2",
        "--pp",
        "2",
        "--microbatch",
        "4",
        "--clip-norm",
        "0.5",
        "-o",
        &plan,
    ]);
    let ids: Vec<u8> = (0..40_000u32).flat_map(|i| ((i * i + i / 7) % 64).to_le_bytes()[..2].to_vec()).collect();
    let data = scratch.file("data.u16", &ids);
    let run = |device: &str, folder: &str, steps: &str, more: &[&str]| {
        let folder = scratch.path(folder).display().to_string();
        let metrics = format!("{folder}.jsonl");
        let mut arguments =
            vec!["run", &plan, "--device", device, "--data", &data, "--token-type", "u16", "--steps", steps];
        arguments.extend(["--eval-data", &data, "--eval-every", "2", "--eval-steps", "1", "--metrics", &metrics]);
        arguments.extend(["--checkpoint", &folder, "--lr", "0.003", "--lr-schedule", "cosine", "--lr-steps", "6"]);
        arguments.extend(more);
        (succeeds(&arguments), std::fs::read_to_string(&metrics).expect("metrics"))
    };
    let (cpu, metrics_of_cpu) = run("cpu", "cpu", "6", &[]);
    let (first, metrics_of_first) = run("xla:cpu", "xla", "4", &[]);
    let (second, metrics) = run("xla:cpu", "xla", "6", &["--resume"]);
    let expected = losses(&cpu);
    assert_eq!(expected.len(), 6, "{cpu}");
    assert!(close(&losses(&first), &expected[..4]), "{first}{metrics_of_first}\n{cpu}{metrics_of_cpu}");
    assert!(close(&losses(&second), &expected[4..]), "{second}\n{cpu}");
    // The loss on held-out data and the gradient's norm.
    let numbers = |text: &str, name: &str| -> Vec<f64> {
        let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?.get(name)?.as_f64();
        text.lines().filter_map(value).collect()
    };
    for name in ["eval_loss", "gradient_norm", "learning_rate"] {
        let (found, expected) = (numbers(&metrics, name), numbers(&metrics_of_cpu, name));
        assert!(!expected.is_empty() && close(&found, &expected), "{name}: {found:?}, expected {expected:?}");
    }
    // Checkpoints are the same files: CPU workers go on with that of XLA's devices.
    let (onward, _) = run("cpu", "xla", "6", &["--resume"]);
    assert!(onward.contains("nothing to do"), "{onward}");
}

#[test]
#[ignore = "needs a PJRT plugin"]
fn verify_runs_a_pipeline() {
    let text = succeeds(&["verify", DEMO, "--cluster", "local:4", "--pp", "2", "--device", "xla"]);
    assert!(text.contains("the numbers agree"), "{text}");
}

/// Every body of a pipeline is in the trace, one after another on its devices, as on CPU workers.
#[test]
#[ignore = "needs a PJRT plugin"]
fn a_trace_has_every_call() {
    let scratch = Scratch::new();
    let calls = |device: &str| {
        let trace = scratch.path(&format!("trace-{device}.json")).display().to_string();
        let plan = [DEMO, "--cluster", "local:4", "--dp", "2", "--pp", "2", "--num-microbatches", "4", "--steps", "2"];
        succeeds(&[&["run"], &plan[..], &["--device", device, "--trace", &trace]].concat());
        let text = std::fs::read_to_string(&trace).expect("a trace");
        let trace: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let mut calls: Vec<(u64, String, f64, f64)> = Vec::new();
        for event in trace["traceEvents"].as_array().expect("events") {
            let name = event["name"].as_str().unwrap_or_default();
            let is_call = ["forward ", "backward ", "reduce and update"].iter().any(|call| name.starts_with(call));
            if let (true, Some(at), Some(for_us)) = (is_call, event["ts"].as_f64(), event["dur"].as_f64()) {
                calls.push((event["pid"].as_u64().expect("a lane"), name.to_string(), at, for_us));
            }
        }
        let named: std::collections::BTreeSet<(u64, String)> = calls.iter().map(|c| (c.0, c.1.clone())).collect();
        (calls, named)
    };
    let ((calls, named), (_, expected)) = (calls("xla:cpu"), calls("cpu"));
    assert_eq!(named, expected);
    assert_eq!(named.len(), 2 * (4 + 4 + 1), "{named:?}");
    for lane in [calls[0].0, calls[calls.len() - 1].0] {
        let mut of_lane: Vec<_> = calls.iter().filter(|call| call.0 == lane).collect();
        of_lane.sort_by(|a, b| a.2.total_cmp(&b.2));
        assert!(of_lane.windows(2).all(|two| two[0].2 + two[0].3 <= two[1].2 + 1e-3), "{of_lane:?}");
        assert!(of_lane.iter().all(|call| call.3 > 0.0), "{of_lane:?}");
    }
}

/// A NaN is found where it is made.
#[test]
#[ignore = "needs a PJRT plugin"]
fn check_nan_names_the_op() {
    let scratch = Scratch::new();
    let model = scratch.file(
        "root.mlir",
        r#"module @root {
  func.func public @main(%arg0: tensor<4xf32> loc("params['w']"), %arg1: tensor<8x4xf32> loc("x")) -> tensor<f32> {
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %arg0, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
    %1 = stablehlo.multiply %0, %arg1 : tensor<8x4xf32>
    %2 = stablehlo.sqrt %1 : tensor<8x4xf32>
    %3 = stablehlo.reduce(%2 init: %c) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
    return %3 : tensor<f32>
  }
}
"#,
    );
    let said = |device: &str| {
        let Output { code, stderr, .. } =
            altiplano(&["run", &model, "--cluster", "local:2", "--check-nan", "--device", device]);
        assert_eq!(code, Some(1), "{stderr}");
        stderr
    };
    let (cpu, xla) = (said("cpu"), said("xla:cpu"));
    assert!(xla.contains("step 1: ") && xla.contains("sqrt") && xla.contains("made a NaN"), "{xla}\n{cpu}");
}

/// The arguments of a short run.
fn run<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["run", DEMO, "--cluster", "local:2", "--steps", "1"], more].concat()
}

/// Refusals are one message and exit code 2.
#[test]
#[ignore = "needs a PJRT plugin"]
fn refusals_are_one_message() {
    let scratch = Scratch::new();
    let text = scratch.file("text.so", "no library");
    let missing = scratch.path("missing.so").display().to_string();
    let cases: [(Vec<&str>, &str); 6] = [
        (run(&["--device", "xla", "--plugin", &missing]), "there is no such file"),
        (run(&["--device", "xla:cpu", "--plugin", &text]), "cannot be opened as a PJRT plugin"),
        (run(&["--device", "xla:tpu"]), "is a plugin for cpu, not for tpu"),
        (run(&["--device", "cpu", "--plugin", &text]), "--plugin: applies only to XLA's devices"),
        (run(&["--device", "xla", "--engine", "mpi"]), "--engine mpi: "),
        (vec!["verify", DEMO, "--cluster", "local:2", "--device", "xla:cuda"], "is a plugin for cpu, not for cuda"),
    ];
    for (arguments, expected) in cases {
        let Output { code, stderr, stdout } = altiplano(&arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}{stdout}");
        let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error")).collect();
        assert!(errors.len() == 1 && errors[0].contains(expected), "{arguments:?}: {stderr}");
    }
    // Without any plugin the message says how to get one.
    let none = [("ALTIPLANO_PJRT_PLUGIN", ""), ("VIRTUAL_ENV", "")];
    let Output { code, stderr, .. } = altiplano_with(&none, &run(&["--device", "xla:cpu"]));
    assert!(code == Some(2) && stderr.contains("there is no PJRT plugin for cpu"), "{stderr}");
}

/// XLA's devices are measured by the programs that XLA compiles for them, and plans and runs are predicted by that.
#[test]
#[ignore = "needs a PJRT plugin"]
fn a_profile_of_xlas_devices_prices_plans_for_them() {
    let scratch = Scratch::new();
    let file = |name: &str| scratch.path(name).display().to_string();
    let (profile, plan) = (file("profile.json"), file("plan.json"));
    succeeds(&["profile", "--device", "xla:cpu", "--quick", "-o", &profile]);
    let measured = std::fs::read_to_string(&profile).expect("a profile");
    let measured: serde_json::Value = serde_json::from_str(&measured).expect("JSON");
    let times = |family: &str| -> Vec<f64> {
        let series = measured["series"].as_array().expect("series");
        let of_family = series.iter().filter(|series| series["family"] == family);
        of_family.flat_map(|s| s["seconds"].as_array().expect("times")).filter_map(|s| s.as_f64()).collect()
    };
    for family in ["gpu_matmul", "gpu_matmul_batched", "gpu_attention", "gpu_pass", "gpu_indexed"] {
        assert!(!times(family).is_empty() && times(family).iter().all(|&seconds| seconds > 0.0), "{family}");
    }
    let devices = measured["machine"]["cores"].as_u64().expect("a number");
    assert_eq!(times("all_reduce").is_empty(), devices < 2);
    succeeds(&["plan", DEMO, "--cluster", "local:2", "--dp", "2", "--profile", &profile, "-o", &plan]);
    let said = succeeds(&["run", &plan, "--device", "xla:cpu", "--steps", "2"]);
    assert!(said.contains("predicted: ") && said.contains("by XLA"), "{said}");
    let plugin = altiplano(&["profile", "--plugin", "plugin.so"]);
    assert!(plugin.code == Some(2) && plugin.stderr.contains("--device"), "{}", plugin.stderr);
}
