//! Compares predicted memory with the CPU runtime's arenas, over many models and plans, and tests the report of
//! `simulate`.
//!
//! The memory of a device does not depend on timing. So the prediction must be exact, to the byte, at the fullest
//! device. It is an upper bound at the others, which may have smaller parts of uneven splits.

use crate::common::{DEMO, Scratch, altiplano, planned, shared_model, succeeds};
use altiplano::ImportOptions;
use altiplano::inference::infer;
use altiplano::ir::cluster::DeviceKind;
use altiplano::ir::plan::Plan;
use altiplano::planner::predict::memory::{CallKind, Category, LaneMemory, cpu_peaks, cpu_steps};
use altiplano::planner::programs;
use altiplano::simulate::Simulation;
use altiplano::training::{Training, train};
use altiplano_transforms::downscale::Goal;
use serde_json::Value;
use std::path::Path;

const GPT2: &str =
    r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}"#;
const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}"#;
const MIXTRAL: &str = r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2}"#;
const BERT: &str = r#"{"model_type": "bert", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}"#;

/// Plans for every model: a cluster, and words that [`planned`] understands.
const PLANS: [&str; 5] = ["local:1", "local:2 dp2 tp1 pp1", "local:2 dp1 tp2 pp1", "local:2 dp1 tp1 pp2", "local:4"];

/// Additional plans for transformers.
const MORE: [&str; 40] = [
    "local:1 micro8",
    "local:2 dp2 tp1 pp1 zero1",
    "local:2 dp2 tp1 pp1 zero2 micro2",
    "local:2 dp2 tp1 pp1 zero3",
    "local:4 dp2 tp2 pp1 zero3 micro2",
    "local:4 dp2 tp1 pp2 micro4 zero1",
    "local:4 dp1 tp2 pp2 micro8",
    "local:2 dp1 tp1 pp2 micro8 gpipe",
    "local:2 dp1 tp1 pp2 micro8",
    "local:4 dp1 tp1 pp4 micro8",
    "local:2 dp1 tp1 pp2 micro4 virtual2",
    "local:2 dp1 tp1 pp2 micro8 virtual2 zero0 recompute",
    "local:4 dp2 tp1 pp2 micro4 virtual2 zero1",
    "local:2 dp1 tp1 pp2 micro8 zb",
    "local:4 dp1 tp2 pp2 micro4 zb",
    "local:2 dp1 tp1 pp2 micro4 recompute zb",
    "local:2 dp1 tp1 pp2 micro4 pipedream",
    "local:4 dp2 tp1 pp2 micro4 zero1 pipedream stale",
    "local:2 dp2 tp1 pp1 micro2 stale",
    "local:1 recompute",
    "local:2 dp1 tp1 pp2 micro4 recompute",
    "local:2 dp1 tp2 pp1 selective modules",
    "local:2 dp1 tp1 pp2 micro4 selective modules",
    "local:1 bf16",
    "local:2 dp2 tp1 pp1 bf16 zero2",
    "local:2 dp1 tp1 pp2 micro8 bf16",
    "local:2 dp2 tp1 pp1 sgd",
    "local:2 dp1 tp2 pp1 inference micro2",
    "local:1 offload",
    "local:2 dp2 tp1 pp1 zero1 offload",
    "local:2 dp2 tp1 pp1 zero3 bf16 offload",
    "local:2 dp1 tp2 pp1 micro2 offload",
    "local:2 dp1 tp1 pp2 micro8 virtual2 offload",
    "local:2 dp1 tp1 pp2 micro4 pipedream offload",
    "local:2 dp1 tp1 pp2 micro4 recompute zb bf16 offload",
    "local:1 away",
    "local:2 dp2 tp1 pp1 zero3 bf16 micro2 away",
    "local:2 dp1 tp1 pp2 micro8 virtual2 away offload",
    "local:2 dp1 tp1 pp2 micro4 zb away",
    "local:2 dp1 tp1 pp2 micro4 pipedream away",
];

/// Peak memory of each worker of a plan over three steps: overlapping ones, and one before them.
fn held(plan: &Plan) -> Vec<u64> {
    let training = Training { steps: 3, learning_rate: 1e-4, ..Training::default() };
    let ran = match plan.schedule.trains() {
        true => train(plan, &training, |_| Ok(())),
        false => infer(plan, &training, |_| Ok(())).map(|(ran, _)| ran),
    };
    ran.expect("the plan runs").peak_bytes
}

#[test]
fn what_is_predicted_is_what_is_held() {
    let scratch = Scratch::new();
    let own = |name: &str| format!("{}/tests/models/{name}", env!("CARGO_MANIFEST_DIR"));
    let config = ImportOptions { batch: Some(8), sequence: Some(16), ..ImportOptions::default() };
    let plain = ImportOptions::default();
    let small = ImportOptions { reduce: Some(Goal { parameters: 60_000, ..Goal::default() }), ..plain.clone() };
    let with_loss = ImportOptions { loss: Some("cross-entropy".into()), ..small.clone() };
    let mut models: Vec<(String, ImportOptions, bool)> = vec![
        (DEMO.to_string(), small.clone(), true),
        (own("flax-dropout.mlir"), plain.clone(), false),
        (own("moe-sorted.mlir"), plain.clone(), false),
        (own("resnet.mlir"), plain.clone(), false),
        (own("scanned-remat.mlir"), plain.clone(), false),
        (own("scanned-step.mlir"), plain.clone(), false),
        (own("state-space.mlir"), plain.clone(), false),
        (own("unet.mlir"), plain.clone(), false),
        (scratch.file("gpt2.json", GPT2), config.clone(), true),
        (scratch.file("llama.json", LLAMA), config.clone(), true),
        (scratch.file("mixtral.json", MIXTRAL), config.clone(), false),
        (scratch.file("bert.json", BERT), config.clone(), false),
    ];
    for name in ["gpt2-tiny.mlir", "moe-tiny.mlir", "wresnet-tiny.mlir", "resnet50.onnx", "resnet50.pt2"] {
        let import = if name.contains("tiny") { &small } else { &with_loss };
        models.extend(shared_model(name).map(|file| (file, import.clone(), false)));
    }
    let mut table = vec![format!("{:18} {:38} {:>11} {:>11} {:>7}", "model", "plan", "held", "predicted", "above")];
    let mut wrong = Vec::new();
    for (file, import, more) in &models {
        let name = Path::new(file).file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let more: &[&str] = if *more { &MORE } else { &[] };
        for words in PLANS.iter().chain(more) {
            // Some models cannot be split in some ways.
            let Ok(plan) = planned(file.as_ref(), import, words) else { continue };
            let held = held(&plan);
            let predicted = cpu_peaks(&altiplano::programs(&plan).expect("programs"));
            assert_eq!(
                predicted,
                plan.predicted.peak_bytes[..plan.num_lanes()],
                "{name} {words}: a plan for CPU workers predicts this runtime"
            );
            let both = plan.lanes().iter().zip(&predicted);
            let both = both.flat_map(|(s, &p)| s.devices.iter().map(move |&d| (d, p)));
            let both: Vec<(u64, u64)> = both.map(|(d, predicted)| (held[d as usize], predicted)).collect();
            let &(most, above) = both.iter().max().expect("a device");
            let excess = above as f64 / most as f64 - 1.0;
            let line = format!("{name:18} {words:38} {most:>11} {above:>11} {:>6.2}%", 100.0 * excess);
            if above != most || both.iter().any(|(held, predicted)| predicted < held) {
                wrong.push(format!("{line}  {both:?}"));
            }
            table.push(line);
        }
    }
    println!("{}", table.join("\n"));
    let pairs = table.len() - 1;
    assert!(wrong.is_empty(), "{} of {pairs} pairs:\n{}", wrong.len(), wrong.join("\n"));
    assert!(pairs >= 50, "only {pairs} pairs ran");
}

/// Sums over categories equal the peak, and the peak equals the plan's prediction, on CPU workers and on GPUs.
#[test]
fn the_timeline_adds_up_to_the_peak() {
    let plans = [
        "local:1",
        "local:4 dp2 tp1 pp2 micro4 zero1",
        "p3.16xlarge:1 dp2 tp2 pp2 micro8",
        "p3.16xlarge:1 dp2 tp1 pp4 micro8 recompute",
        "p3.16xlarge:1 dp2 tp2 pp2 micro8 virtual2",
        "p3.16xlarge:1 dp2 tp1 pp4 micro8 zb",
        "p3.16xlarge:1 dp8 tp1 pp1 zero3",
        "p3.16xlarge:1 dp8 tp1 pp1 zero1 offload",
        "p3.16xlarge:1 dp2 tp1 pp4 micro8 offload",
        "p3.16xlarge:1 dp2 tp1 pp4 micro8 away",
        "local:2 dp1 tp1 pp2 recompute",
    ];
    for words in plans {
        let plan = planned(DEMO.as_ref(), &ImportOptions::default(), words).expect("a plan");
        let predicted = plan.predicted.peak_bytes.clone();
        let step_s = plan.predicted.step_time_s;
        for (memory, peak) in Simulation::new(plan, None).expect("programs").memory().iter().zip(predicted) {
            assert_eq!(memory.peak_bytes, peak, "{words}");
            assert_eq!(memory.by_category().values().sum::<u64>(), peak, "{words}");
            let most = memory.points.iter().map(|p| p.1).max();
            assert_eq!(most, Some(peak), "{words}");
            assert!(memory.points.is_sorted_by(|a, b| a.0 <= b.0 + 1e-12), "{words}: time runs forward");
            for tensor in &memory.held {
                let alive = tensor.from_s <= memory.peak_s + 1e-12 && memory.peak_s <= tensor.to_s + 1e-12;
                assert!(alive && tensor.to_s <= step_s * 1.0001, "{words}: {tensor:?} at {}", memory.peak_s);
            }
        }
    }
}

/// A stage holds the activations of as many microbatches as its schedule has in flight.
#[test]
fn microbatches_in_flight_are_counted() {
    let check = |words: &str, expected: [u64; 2]| {
        let plan = planned(DEMO.as_ref(), &ImportOptions::default(), words).expect("a plan");
        let memory = Simulation::new(plan, None).expect("programs").memory();
        for (memory, expected) in memory.iter().zip(expected) {
            let activations = memory.held.iter().filter(|t| t.category.name() == "activations");
            assert_eq!(activations.map(|t| t.count).max(), Some(expected), "{words}");
        }
    };
    check("local:2 dp1 tp1 pp2 micro4", [2, 1]);
    check("local:2 dp1 tp1 pp2 micro4 gpipe", [4, 4]);
    check("local:2 dp1 tp1 pp2 micro2", [2, 1]);
}

#[test]
fn simulate_says_what_is_held() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json").display().to_string();
    succeeds(&["plan", DEMO, "--dp", "2", "--pp", "2", "--virtual-stages", "1", "-o", &file]);
    let text = succeeds(&["simulate", &file, "--memory"]);
    for part in ["stage0: ", "stage1: ", "parameters ", "optimizer state ", "microbatches", "params['wte']"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let one = succeeds(&["simulate", &file, "--memory", "--stage", "1"]);
    assert!(!one.contains("stage0: ") && one.contains("stage1: "), "{one}");
    let output = altiplano(&["simulate", &file, "--memory", "--stage", "2"]);
    assert!(output.code == Some(2) && output.stderr.contains("--stage"), "{}", output.stderr);

    let trace = scratch.path("trace.json").display().to_string();
    let said: Value = serde_json::from_str(&succeeds(&["simulate", &file, "--json", "--trace", &trace])).expect("JSON");
    let plan: Value = serde_json::from_str(&std::fs::read_to_string(&file).expect("the plan")).expect("JSON");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(&trace).expect("a trace")).expect("JSON");
    assert_eq!(said["step_s"], plan["predicted"]["step_time_s"]);
    for (stage, predicted) in plan["predicted"]["peak_bytes"].as_array().expect("stages").iter().enumerate() {
        let memory = &said["stages"][stage]["memory"];
        assert_eq!(&memory["peak_bytes"], predicted);
        let sums = memory["categories"].as_object().expect("sums").values().filter_map(Value::as_u64).sum::<u64>();
        assert_eq!(Some(sums), predicted.as_u64());
        let counters = trace["traceEvents"].as_array().expect("events").iter();
        let counters = counters.filter(|e| e["ph"] == "C" && e["pid"] == stage);
        assert_eq!(counters.filter_map(|e| e["args"]["bytes"].as_u64()).max(), predicted.as_u64());
    }
}

#[test]
fn a_run_says_what_each_worker_held() {
    let said = succeeds(&["run", DEMO, "--pp", "2", "--dp", "2", "--virtual-stages", "1", "--steps", "1"]);
    let lines: Vec<&str> = said.lines().skip_while(|l| !l.starts_with("peak memory")).collect();
    assert!(lines.len() >= 4, "{said}");
    // The table ends at the heading of the next one.
    for line in lines[2..].iter().take_while(|l| !l.starts_with("seconds of")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[2..4], words[4..6], "held is predicted: {line}");
    }
}

/// XLA keeps the arguments of a body to its end, and has its results from its start.
#[test]
fn values_between_bodies_of_xla_last_for_all_of_each() {
    let scratch = Scratch::new();
    let file = scratch.file("gpt2.json", GPT2);
    let import = ImportOptions { batch: Some(8), sequence: Some(16), ..ImportOptions::default() };
    let words = "local:2 dp1 tp1 pp2 micro4";
    let plan = planned(Path::new(&file), &import, words).unwrap_or_else(|error| panic!("{error}"));
    let programs = programs(&plan).expect("programs");
    for program in &programs.programs {
        let of = |whole| {
            let steps = cpu_steps(program);
            LaneMemory::of([program, program], &programs.transfers, &steps, DeviceKind::Cpu, whole)
        };
        let (ours, whole) = (of(false), of(true));
        let mut changed = 0;
        for (before, tensor) in ours.tensors.iter().zip(&whole.tensors) {
            changed += usize::from(before != tensor);
            let [born, gone] = [tensor.born, tensor.gone].map(|moment| moment.map(|moment| moment.kind));
            let is_body = |kind: u32| matches!(whole.kinds[kind as usize].call, CallKind::Run(_));
            if tensor.category != Category::Activations || born == gone {
                continue;
            }
            let born = tensor.born.filter(|born| is_body(born.kind));
            assert!(born.is_none_or(|born| born.point == 0), "{tensor:?}");
            let gone = tensor.gone.filter(|gone| is_body(gone.kind));
            assert!(gone.is_none_or(|gone| gone.point > whole.kinds[gone.kind as usize].points), "{tensor:?}");
        }
        assert!(changed > 0);
        // Bytes, summed over the points of each kind of call.
        let held = |memory: &LaneMemory, kind: usize| {
            memory.course(kind as u32).remove(&Category::Activations).unwrap_or_default().into_iter().sum::<i64>()
        };
        let kinds: Vec<[i64; 2]> = (0..whole.kinds.len()).map(|kind| [held(&ours, kind), held(&whole, kind)]).collect();
        assert!(kinds.iter().all(|[ours, whole]| whole >= ours), "{kinds:?}");
        assert!(kinds.iter().any(|[ours, whole]| whole > ours), "{kinds:?}");
        assert_eq!(whole.lasting_bytes, ours.lasting_bytes);
    }
}
