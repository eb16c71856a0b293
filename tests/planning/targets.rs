//! Plans for other software: what each target runs, what it refuses, and stages of unequal length.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::planner::Silent;
use altiplano::planner::search::fixed_degrees::Degrees;
use altiplano::planner::search::layout::Layout;
use altiplano::planner::search::sweep::{Space, Swept, configured, sweep};
use altiplano::{ImportOptions, load_cluster, load_model, request};
use altiplano_cost_models::Rooflines;
use altiplano_ir::dtype::DType;
use altiplano_ir::plan::Target;
use altiplano_ir::recompute::Recompute;
use serde_json::Value;
use std::path::Path;

fn planned(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeds(&[&["plan"], arguments, &["--json"]].concat())).expect("JSON")
}

fn stages(plan: &Value) -> &[Value] {
    plan["stages"].as_array().expect("stages")
}

fn layers(plan: &Value) -> Vec<u64> {
    let length = |s: &Value| Some(s["layers"]["end"].as_u64()? - s["layers"]["start"].as_u64()?);
    stages(plan).iter().map(|s| length(s).expect("layers")).collect()
}

#[test]
fn what_a_target_lacks_is_refused_with_what_it_runs() {
    let table: [(&str, &[&str], &str); 9] = [
        ("megatron", &["--schedule", "zb-h1"], "--schedule zb-h1: megatron runs 1f1b"),
        ("megatron", &["--pp", "2", "--zero", "3"], "--zero 3: megatron runs ZeRO 0 or 1 in pipelines"),
        ("deepspeed", &["--tp", "2", "--zero", "3"], "--zero 3: deepspeed runs ZeRO 0, 1 or 2 with tensor parallelism"),
        ("deepspeed", &["--virtual-stages", "2"], "--virtual-stages 2: deepspeed runs no stages that share devices"),
        ("deepspeed", &["--cp", "2"], "--cp 2: deepspeed runs no context parallelism"),
        ("fsdp", &["--zero", "1"], "--zero 1: fsdp runs ZeRO 0, 2 or 3"),
        ("fsdp", &["--pp", "2"], "--pp 2 is not 1, which is what fsdp runs"),
        ("torchtitan", &["--zero", "1"], "--zero 1: torchtitan runs ZeRO 0, 2 or 3"),
        ("xla", &["--pp", "2"], "--pp 2 is not 1, which is what xla runs"),
    ];
    for (target, options, message) in table {
        let output = altiplano(&[&["plan", DEMO, "--cluster", "dgx-a100:1", "--target", target], options].concat());
        assert_eq!(output.code, Some(2), "{target} {options:?}: {}", output.stderr);
        assert!(output.stderr.contains(message), "{target} {options:?}: {}", output.stderr);
    }
}

/// Weights of 8 bits take half of the time of 16 where a device has units for them, and only cost conversions elsewhere.
#[test]
fn products_in_8_bits_are_faster_where_devices_have_them() {
    let config = r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096}"#;
    let scratch = Scratch::new();
    let file = scratch.path("llama.json").display().to_string();
    std::fs::write(&file, config).expect("a config");
    let step_s = |cluster: &str, precision: &str| {
        let common = [&file, "--cluster", cluster, "--precision", precision, "--seq", "4096", "--global-batch", "32"];
        let plan = planned(&[&common[..], &["--dp", "8", "--target", "megatron"]].concat());
        let parameters = plan["graph"]["nodes"].as_array().expect("nodes").iter();
        let dtypes = parameters.filter(|node| node["op"].get("parameter").is_some()).map(|node| node["ty"].to_string());
        // Seven products of each layer.
        let eight = dtypes.filter(|dtype| dtype.contains("f8e4m3fn")).count();
        assert_eq!(eight, if precision == "fp8" { 4 * 7 } else { 0 });
        plan["predicted"]["step_time_s"].as_f64().expect("seconds")
    };
    let gain = |cluster: &str| step_s(cluster, "bf16") / step_s(cluster, "fp8");
    let (hopper, ampere) = (gain("dgx-h100:1"), gain("dgx-a100:1"));
    assert!((1.1..2.0).contains(&hopper) && (0.7..1.0).contains(&ampere), "{hopper} {ampere}");
}

#[test]
fn what_a_target_runs_is_planned() {
    let table: [(&str, &str, &[&str]); 11] = [
        // One replica stores all itself at any level.
        ("megatron", "dgx-a100:1", &["--tp", "8", "--pp", "1", "--zero", "1", "--recompute", "full"]),
        ("megatron", "dgx-a100:1", &["--tp", "4", "--pp", "2", "--zero", "1", "--recompute", "none"]),
        ("megatron", "dgx-a100:1", &["--tp", "2", "--pp", "1", "--zero", "3"]),
        ("megatron", "dgx-a100:1", &["--tp", "2", "--pp", "2", "--cp", "2", "--zero", "1"]),
        ("megatron", "dgx-a100:1", &["--tp", "1", "--pp", "2", "--cp", "4", "--zero", "1"]),
        // Beyond a node only if asked for.
        ("megatron", "dgx-a100:2", &["--tp", "16"]),
        ("torchtitan", "dgx-a100:1", &["--tp", "2", "--pp", "2", "--zero", "3"]),
        ("torchtitan", "dgx-a100:1", &["--pp", "2", "--schedule", "zb-h1", "--virtual-stages", "1"]),
        ("deepspeed", "dgx-a100:1", &["--zero", "3"]),
        ("deepspeed", "dgx-a100:1", &["--tp", "2", "--zero", "2"]),
        ("deepspeed", "dgx-a100:1", &["--pp", "2", "--zero", "1"]),
    ];
    for (target, cluster, options) in table {
        let common = [DEMO, "--cluster", cluster, "--precision", "bf16", "--global-batch", "64", "--target", target];
        let plan = planned(&[&common[..], options].concat());
        assert_eq!(plan["target"], target);
        let given = |name: &str| {
            let at = options.iter().position(|o| *o == name)?;
            options[at + 1].parse::<u64>().ok()
        };
        let axes = stages(&plan)[0]["mesh"]["axes"].as_array().expect("axes");
        let size = |name: &str| axes.iter().find(|axis| axis["name"] == name).and_then(|axis| axis["size"].as_u64());
        if let Some(tp) = given("--tp") {
            assert_eq!(size("tensor"), Some(tp), "{target} {options:?}");
        }
        if let Some(cp) = given("--cp") {
            assert_eq!(size("context"), Some(cp), "{target} {options:?}");
        }
        if let Some(pp) = given("--pp") {
            let lanes = stages(&plan).len() as u64 / plan["virtual_stages"].as_u64().unwrap_or(1);
            assert_eq!(lanes, pp, "{target} {options:?}");
        }
        // Devices that share no work on the same samples and positions.
        let devices: u64 = axes.iter().filter_map(|axis| axis["size"].as_u64()).product();
        let shards = devices > given("--tp").unwrap_or(1);
        if let Some(level) = given("--zero") {
            let level = if shards { level } else { 0 };
            assert!(stages(&plan).iter().all(|s| s["zero"].as_u64() == Some(level)), "{target} {options:?}");
        }
    }
}

/// A sweep leaves out levels of recomputation above the first that fits, and finds what a sweep over all finds.
#[test]
fn configurations_that_are_left_out_of_a_sweep_are_no_faster() {
    let model = load_model(Path::new(DEMO), &ImportOptions::default()).expect("a model");
    let mut request = request(&model, load_cluster("dgx-a100:1").expect("a cluster"));
    (request.target, request.batch.global) = (Target::Megatron, Some(64));
    let costs = Rooflines::of(&request.cluster);
    let space = Space { micro_batches: vec![1, 2, 4], ..Space::default() };
    // The part of a device's memory that no tensor may use.
    let whole = request.cluster.groups[0].device.memory_bytes;
    let reserved = whole - request.cluster.usable_bytes(&request.cluster.groups[0]);
    let with = |for_bytes: bool, usable_bytes: u64| {
        let mut request = request.clone();
        request.cluster.groups[0].device.memory_bytes = reserved + usable_bytes;
        sweep(&request, &Space { for_bytes, ..space.clone() }, &costs, &Silent).expect("plans that fit")
    };
    let most = with(true, whole).iter().flat_map(|s| s.plan.predicted.peak_bytes.clone()).max().expect("bytes");
    let mut repeat_more = 0;
    for bytes in [whole, most * 2 / 3, most / 3] {
        let (all, few) = (with(true, bytes), with(false, bytes));
        assert!(few.len() < all.len(), "{} of {} at {bytes}", few.len(), all.len());
        assert_eq!(few[0].plan.predicted.step_time_s, all[0].plan.predicted.step_time_s, "at {bytes}");
        for left_out in all.iter().filter(|s| few.iter().all(|f| f.degrees != s.degrees)) {
            let keeps_more = |s: &&Swept| {
                let level = s.degrees.recompute;
                level < left_out.degrees.recompute && Degrees { recompute: level, ..left_out.degrees } == s.degrees
            };
            let Some(other) = few.iter().find(keeps_more) else { continue };
            repeat_more += 1;
            let [faster, slower] = [other, left_out].map(|s| s.plan.predicted.step_time_s);
            assert!(faster <= slower, "{faster} {slower}: {:?}", left_out.degrees);
        }
    }
    assert!(repeat_more > 0);
}

/// No configuration of a grid that fits is faster than what a sweep finds, which predicts few of them.
#[test]
fn sweeps_find_the_best_of_all_configurations() {
    let scratch = Scratch::new();
    let dense = r#"{"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 1024}"#;
    let experts = r#"{"model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 4096, "max_position_embeddings": 1024}"#;
    let import = || ImportOptions { precision: Some(DType::BF16), ..ImportOptions::default() };
    let of_config = || ImportOptions { sequence: Some(1024), ..import() };
    let models = [
        (DEMO.to_string(), ImportOptions::default()),
        (scratch.file("dense.json", dense), of_config()),
        (scratch.file("experts.json", experts), of_config()),
    ];
    let space = Space { micro_batches: vec![1, 2, 4], ..Space::default() };
    for ((file, import), cluster) in models.iter().zip(["dgx-a100:1", "dgx-h100:1", "dgx-a100:1"]) {
        let model = load_model(Path::new(file), import).expect("a model");
        let mut request = request(&model, load_cluster(cluster).expect("a cluster"));
        (request.target, request.batch.global) = (Target::Megatron, Some(64));
        let costs = Rooflines::of(&request.cluster);
        let mut all: Vec<(u64, f64, Degrees)> = Vec::new();
        for (tp, pp) in
            [1, 2, 4, 8].into_iter().flat_map(|tp| [1, 2, 4].map(|pp| (tp, pp))).filter(|(tp, pp)| tp * pp <= 8)
        {
            let dp = 8 / tp / pp;
            for (micro, virtual_stages) in [1, 2, 4].into_iter().flat_map(|micro| [(micro, 1), (micro, 2)]) {
                if virtual_stages > 1 && pp == 1 {
                    continue;
                }
                for (zero, recompute) in [0, 1].into_iter().flat_map(|zero| Recompute::ALL.map(|level| (zero, level))) {
                    let degrees = Degrees {
                        dp,
                        tp,
                        cp: 1,
                        stages: pp * virtual_stages,
                        virtual_stages,
                        num_microbatches: 64 / dp / micro,
                        zero: if dp == 1 { 0 } else { zero },
                        recompute,
                        layout: Layout::Even,
                        experts: 1,
                        groups: 1,
                        sequence: false,
                    };
                    let Ok(plan) = configured(&request, &degrees, &costs) else { continue };
                    let bytes = plan.predicted.peak_bytes.iter().copied().max().expect("bytes");
                    all.push((bytes, plan.predicted.step_time_s, degrees));
                }
            }
        }
        let device = request.cluster.groups[0].device.memory_bytes;
        let reserved = device - request.cluster.usable_bytes(&request.cluster.groups[0]);
        let most = all.iter().map(|known| known.0).max().expect("plans");
        assert!(all.len() > 100, "{file}: {}", all.len());
        for usable in [most, most / 2, most / 4] {
            request.cluster.groups[0].device.memory_bytes = reserved + usable;
            let fitting = all.iter().filter(|known| known.0 <= usable);
            let best = fitting.min_by(|a, b| a.1.total_cmp(&b.1));
            let Ok(swept) = sweep(&request, &space, &costs, &Silent) else {
                assert_eq!(best, None, "{file} at {usable}");
                continue;
            };
            let found = (swept[0].plan.predicted.step_time_s, swept[0].degrees);
            assert!(best.is_none_or(|best| found.0 <= best.1), "{file} at {usable}: {found:?}, {best:?} of all");
            assert!(swept.len() < all.len() / 2, "{file} at {usable}: {} of {}", swept.len(), all.len());
        }
    }
}

/// Seven blocks and a head with the work of two: four even stages are two blocks with the head at the end.
#[test]
fn the_stage_with_the_loss_has_fewer_layers() {
    let scratch = Scratch::new();
    let config = r#"{"model_type": "gpt2", "n_layer": 7, "n_embd": 1024, "n_head": 16, "n_positions": 1024, "vocab_size": 32768}"#;
    let file = scratch.file("gpt.json", config);
    let common = [&file, "--cluster", "dgx-a100:1", "--precision", "bf16", "--global-batch", "64", "--pp", "4"];
    let step_s = |plan: &Value| plan["predicted"]["step_time_s"].as_f64().expect("seconds");
    for target in ["megatron", "torchtitan"] {
        let with =
            |more: &[&str]| planned(&[&common[..], &["--target", target, "--virtual-stages", "1"], more].concat());
        let plan = with(&[]);
        let found = layers(&plan);
        // The stage with the loss has the head and at most one block; the first one also has the embedding.
        assert!(found[3] <= 2 && found.iter().sum::<u64>() == 9, "{target}: {found:?}");
        assert!(stages(&plan).iter().all(|s| s["mesh"] == stages(&plan)[0]["mesh"]));
        let deepspeed = planned(&[&common[..], &["--target", "deepspeed"]].concat());
        assert!(
            layers(&deepspeed).iter().zip([3, 2, 2, 2]).all(|(found, even)| *found == even),
            "{:?}",
            layers(&deepspeed)
        );
        assert!(step_s(&plan) > 0.0);
    }
}
