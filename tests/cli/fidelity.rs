//! `altiplano fidelity`, `calibrate` and `simulate` end to end: accuracy of a table, malformed tables, published steps,
//! and a plan's step in words and as a trace.

use crate::common::{DEMO, Scratch, altiplano, shared, succeeds};
use serde_json::{Value, json};

const HEADER: &str = "group,model,layers,hidden,heads,kv_heads,ffn,seq,vocab,gpus,cluster,tp,pp,dp,cp,virtual_stages,micro_batch,global_batch,schedule,recompute,sharded_optimizer,dtype,measured_step_s,source";

/// Writes rows after the header to a file.
fn table(scratch: &Scratch, rows: &[&str]) -> String {
    let file = scratch.path("table.csv");
    std::fs::write(&file, format!("{HEADER}\n{}\n", rows.join("\n"))).unwrap();
    file.display().to_string()
}

fn document(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeds(arguments)).expect("one JSON document")
}

#[test]
fn a_table_gets_a_prediction_for_each_row_and_its_figures() {
    let scratch = Scratch::new();
    let file = table(
        &scratch,
        &[
            "a,gpt,4,256,8,,,128,1000,4,dgx-a100/4,2,2,1,,,2,8,1f1b,full,0,f16,0.05,made up",
            "a,gpt,4,256,8,,,128,1000,4,dgx-a100/4,1,1,4,,,1,8,1f1b,none,0,f16,0.04,made up",
            "b,llama,8,256,8,2,512,128,1000,4,dgx-h100/4,1,2,2,1,2,best,8,interleaved-1f1b,,1,bf16,0.03,made up",
            "b,nemotron,4,256,8,2,,128,1000,4,dgx-h100/4,2,1,1,2,1,1,8,1f1b,,1,bf16,0.03,made up",
        ],
    );
    let found = document(&["fidelity", &file, "--json"]);
    assert_eq!(found["rows"], 4);
    let judged = found["judged"].as_array().unwrap();
    let mut errors = 0.0;
    for (i, row) in judged.iter().enumerate() {
        assert_eq!(row["line"], i + 2);
        let (measured, predicted) =
            (row["measured_step_s"].as_f64().unwrap(), row["predicted_step_s"].as_f64().unwrap());
        assert!(predicted > 0.0 && predicted.is_finite());
        let error = 100.0 * (predicted / measured - 1.0);
        assert!((error - row["error_percent"].as_f64().unwrap()).abs() < 1e-9);
        errors += error.abs() / 4.0;
    }
    assert!((errors - found["mape_percent"].as_f64().unwrap()).abs() < 1e-9);
    for figure in ["bias_percent", "regret_percent"] {
        assert!(found[figure].as_f64().unwrap().is_finite(), "{figure}");
    }
    // The group has too few rows for a rank correlation.
    assert_eq!(found["spearman"], Value::Null);
    let text = succeeds(&["fidelity", &file]);
    assert!(text.contains("tp1 pp2x2 dp2, microbatches of any size"), "{text}");
}

/// Fitting recovers the constants with which steps were generated, and a devices file applies them to predictions.
#[test]
fn constants_are_fitted_and_used() {
    let scratch = Scratch::new();
    let made = scratch.path("made.toml").display().to_string();
    let like = "[device.A100-SXM-80GB]\nlike = \"A100-SXM-80GB\"\n[device.A100-SXM-80GB.constants]\n";
    std::fs::write(&made, format!("{like}dispatch_s = 20e-6\nmemory_efficiency = 0.8\n")).unwrap();
    let row = |group: &str, hidden: u32, tp: u32, dp: u32, measured: f64| {
        format!(
            "{group},gpt,2,{hidden},8,,,128,1000,4,dgx-a100/4,{tp},1,{dp},,,8,32,1f1b,none,0,f16,{measured},made up"
        )
    };
    let plans = [("a", 256, 1, 4), ("a", 256, 4, 1), ("b", 2048, 1, 4), ("b", 2048, 2, 2), ("b", 2048, 4, 1)];
    let measured = |steps: &[f64]| -> Vec<String> {
        plans.iter().zip(steps).map(|(&(group, hidden, tp, dp), &s)| row(group, hidden, tp, dp, s)).collect()
    };
    let rows = measured(&[1.0; 5]);
    let file = table(&scratch, &rows.iter().map(String::as_str).collect::<Vec<_>>());
    let predicted = |arguments: &[&str]| -> Vec<f64> {
        let found = document(&[&["fidelity", &file, "--json"], arguments].concat());
        found["judged"].as_array().unwrap().iter().map(|r| r["predicted_step_s"].as_f64().unwrap()).collect()
    };
    let (steps, before) = (predicted(&["--devices", &made]), predicted(&[]));
    let rows = measured(&steps);
    table(&scratch, &rows.iter().map(String::as_str).collect::<Vec<_>>());
    let fitted = scratch.path("fitted.toml").display().to_string();
    let said = succeeds(&["calibrate", &file, "-o", &fitted]);
    let error = |found: Vec<f64>| found.iter().zip(&steps).map(|(p, m)| (p / m - 1.0).abs()).sum::<f64>() / 5.0;
    let (before, after) = (error(before), error(predicted(&["--devices", &fitted])));
    assert!(before > 0.1 && after < 0.01, "{before} {after}\n{said}");
    let text = std::fs::read_to_string(&fitted).unwrap();
    assert!(text.contains("rows = 5") && text.contains("residuals_percent = ["), "{text}");

    let plan = scratch.path("plan.json").display().to_string();
    let planned = |devices: &[&str]| {
        let fixed = ["plan", DEMO, "--cluster", "dgx-a100:1", "--dp", "8", "-o", &plan];
        succeeds(&[&fixed[..], devices].concat());
        let saved: Value = serde_json::from_str(&std::fs::read_to_string(&plan).unwrap()).unwrap();
        saved["predicted"]["step_time_s"].as_f64().unwrap()
    };
    assert!(planned(&["--devices", &fitted]) < planned(&[]), "a faster host makes faster steps");
    planned(&["--devices", &fitted]);
    assert!(succeeds(&["simulate", &plan]).contains("constants that the plan's device has"));

    std::fs::write(&made, "[device.x]\nlike = \"H200\"\nspeed = 1\n").unwrap();
    let output = altiplano(&["plan", DEMO, "--devices", &made]);
    assert!(output.code == Some(2) && output.stderr.contains("made.toml:3:1"), "{}", output.stderr);
}

/// Kernels timed by a profiler: elementwise ones at 0.7 of the bandwidth, and products at half of the peak.
#[test]
fn constants_are_fitted_on_a_profilers_trace() {
    let scratch = Scratch::new();
    let mut events = Vec::new();
    let mut ran = |name: &str, shapes: Value, seconds: f64| {
        let types = vec!["c10::BFloat16"; shapes.as_array().unwrap().len()];
        let id = events.len();
        let of_op = json!({"External id": id, "Input Dims": shapes, "Input type": types});
        events.push(json!({"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 9, "args": of_op}));
        events.push(json!({"ph": "X", "cat": "kernel", "ts": 0, "dur": 1e6 * seconds, "args": {"External id": id}}));
    };
    for rows in [1024u64, 4096, 16384] {
        let bytes = 2.0 * 3.0 * (rows * 4096) as f64;
        ran("aten::add", json!([[rows, 4096], [rows, 4096], []]), 3e-6 + bytes / (0.7 * 2039e9));
        ran("aten::mm", json!([[rows, 4096], [4096, 8192]]), 2.0 * (rows * 4096 * 8192) as f64 / (0.5 * 312e12));
    }
    let file = scratch.path("trace.json").display().to_string();
    let device = json!([{"name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85e9 as u64}]);
    let trace = json!({"deviceProperties": device, "traceEvents": events});
    std::fs::write(&file, trace.to_string()).unwrap();
    let said = succeeds(&["calibrate", &file]);
    let constant = |name: &str| -> f64 {
        let line = said.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {said}"));
        line.split(" = ").nth(1).unwrap().parse().unwrap()
    };
    assert!((constant("memory_efficiency") - 0.7).abs() < 0.01, "{said}");
    assert!((0.45..0.65).contains(&constant("matmul_efficiency")), "{said}");
    assert!(said.contains("6 rows") && said.contains("aten::mm bf16[1024, 4096] bf16[4096, 8192]"), "{said}");
    std::fs::write(&file, "{}").unwrap();
    let output = altiplano(&["calibrate", &file]);
    assert!(output.code == Some(2) && output.stderr.contains("trace.json: 1:2: missing field"), "{}", output.stderr);
}

#[test]
fn what_is_wrong_with_a_table_is_said_with_its_line() {
    let good = "a,gpt,4,256,8,,,128,1000,4,dgx-a100/4,1,1,4,,,1,8,1f1b,none,0,f16,0.04,x";
    let cases = [
        (good.replace(",1,1,4,,,", ",1,1,3,,,"), ":3: tp 1 x pp 1 x dp 3 x cp 1 is not gpus 4"),
        (good.replace(",,,1,8,", ",,,3,8,"), ":3: global_batch 8 is not divided by micro_batch 3 x dp 4"),
        (good.replace(",1,1,4,,,", ",,1,4,,,"), ":3: tp: expected a degree"),
        (good.replace(",,,1,8,", ",,,1,4000000,"), ":3: global_batch: expected at most 65536 microbatches"),
        (good.replace("0.04", "-1"), ":3: measured_step_s: expected seconds above 0"),
        (good.replace("f16", "f8"), ":3: dtype: expected f32, f16 or bf16, found 'f8'"),
        (good.replace("gpt,4", "gpt,four"), ":3: layers: invalid digit found in string 'four'"),
        (good.replace("dgx-a100/4", "dgx-b100/4"), ":3: "),
        (good.replace(",8,,,128", ",7,,,128"), ":3: "),
        (good.replace("gpt,4,256", "gpt,99999999999,256"), ":3: layers"),
        ("a,b".to_string(), ":3: "),
    ];
    for (row, expect) in cases {
        let scratch = Scratch::new();
        let file = table(&scratch, &[good, &row]);
        let output = altiplano(&["fidelity", &file]);
        assert_eq!(output.code, Some(2), "{row}\n{}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(expect) && output.stderr.lines().count() == 1, "{row}\n{}", output.stderr);
    }
    let scratch = Scratch::new();
    let none = altiplano(&["fidelity", &table(&scratch, &[])]);
    assert!(none.code == Some(2) && none.stderr.contains("no rows"), "{}", none.stderr);
}

/// Tables of kernels: products at 0.8 of an H100's peak, collectives at the rate of a link, and what is wrong with them.
#[test]
fn kernels_are_compared_with_their_prices() {
    let scratch = Scratch::new();
    let file = scratch.path("kernels.csv");
    let name = file.display().to_string();
    let ms = |m: u64, n: u64, k: u64| 2e3 * (m * n * k) as f64 / (0.8 * 989.5e12);
    let product = |m: u64, n: u64, k: u64| format!("h100_sxm,TRTLLM,bfloat16,{m},{n},{k},{:.6}", ms(m, n, k));
    let header = "system,framework,gemm_dtype,m,n,k,latency_ms";
    let rows = [product(8192, 8192, 8192), product(16384, 8192, 4096), "b300_sxm,x,fp8,256,256,256,1".to_string()];
    std::fs::write(&file, format!("{header}\n{}\n", rows.join("\n"))).unwrap();
    let found = document(&["fidelity", &name, "--json"]);
    let of = &found[0];
    assert_eq!((of["device"].as_str(), of["subject"].as_str()), (Some("H100-SXM"), Some("bf16 products")));
    assert!(of["rows"] == 2 && of["tenth_percent"].as_f64().unwrap() < 10.0, "{found}");
    let said = succeeds(&["fidelity", &name]);
    assert!(said.contains("1 rows of b300_sxm") && said.contains("bf16 products"), "{said}");
    // A product at half of that rate is predicted twice as fast.
    let slow = format!("{header}\nh100_sxm,x,bfloat16,8192,8192,8192,{}\n", 2.0 * ms(8192, 8192, 8192));
    std::fs::write(&file, slow).unwrap();
    let bias = document(&["fidelity", &name, "--json"])[0]["bias_percent"].as_f64().unwrap();
    assert!((-55.0..-45.0).contains(&bias), "{bias}");

    let links = "system,op,dtype,gpus,message,latency_ms\na100_sxm,all_reduce,half,8,268435456,4.2259\n";
    std::fs::write(&file, links).unwrap();
    let found = document(&["fidelity", &name, "--json"]);
    assert!(found[0]["subject"] == "all_reduce" && found[0]["median_percent"].as_f64().unwrap() < 10.0, "{found}");

    for (text, expect) in [
        ("system,m,n,k,latency_ms\n", ":1: missing columns: gemm_dtype"),
        ("system,gemm_dtype,m,n,k,latency_ms,color\n", ":1: unknown columns: color"),
        ("system,color,latency_ms\n", ":1: no column says what was measured"),
        ("system,gemm_dtype,m,n,k,latency_ms\nh100_sxm,bfloat16,8,0,8,1\n", ":2: n: expected a whole number"),
        ("system,gemm_dtype,m,n,k,latency_ms\nh100_sxm,bfloat16,8,8,8,-1\n", ":2: latency_ms: expected"),
        ("system,gemm_dtype,m,n,k,latency_ms\nh100_sxm,bf15,8,8,8,1\n", ":2: gemm_dtype: expected"),
        ("system,op,dtype,gpus,message,latency_ms\nh100_sxm,all_reduce,half,64,8,1\n", ":2: gpus: expected at most"),
        ("system,op,dtype,gpus,message,latency_ms\nb300_sxm,all_reduce,half,8,8,1\n", ":1: the table has no rows"),
    ] {
        std::fs::write(&file, text).unwrap();
        let output = altiplano(&["fidelity", &name]);
        assert!(output.code == Some(2) && output.stderr.contains(expect), "{text}: {}", output.stderr);
    }
}

/// Rows whose model is a config beside the table: experts over replicas and over a part of them, and shared parameters.
#[test]
fn rows_may_name_a_config_and_split_experts() {
    let scratch = Scratch::new();
    let config = json!({
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_hidden_layers": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 1024, "max_position_embeddings": 256
    });
    std::fs::write(scratch.path("moe.json"), config.to_string()).unwrap();
    let file = scratch.path("experts.csv");
    let name = file.display().to_string();
    let header = "group,config,layers,seq,gpus,cluster,tp,pp,dp,cp,ep,virtual_stages,micro_batch,global_batch,schedule,recompute,sharding,dtype,measured_step_s,capacity";
    let row = |layers: &str, dp: u32, ep: u32, sharding: &str, capacity: &str| {
        let gpus = 2 * dp;
        format!(
            "a,moe.json,{layers},256,{gpus},dgx-h100/{gpus},2,1,{dp},,{ep},,1,8,1f1b,,{sharding},bf16,0.05,{capacity}"
        )
    };
    let predicted = |rows: &[String]| -> Vec<f64> {
        std::fs::write(&file, format!("{header}\n{}\n", rows.join("\n"))).unwrap();
        let found = document(&["fidelity", &name, "--json"]);
        found["judged"].as_array().unwrap().iter().map(|r| r["predicted_step_s"].as_f64().unwrap()).collect()
    };
    let steps = predicted(&[
        row("2", 4, 4, "optimizer", ""),
        row("2", 4, 2, "optimizer", ""),
        row("4", 4, 4, "optimizer", ""),
        row("2", 4, 4, "parameters", ""),
        row("2", 4, 4, "optimizer", "2"),
    ]);
    assert!(steps.iter().all(|s| s.is_finite() && *s > 0.0), "{steps:?}");
    assert!(steps[2] > 1.2 * steps[0], "twice the layers: {steps:?}");
    assert!(steps[4] > steps[0], "twice the tokens of each expert: {steps:?}");
    for (row, expect) in [
        (row("2", 4, 3, "optimizer", ""), "does not divide the number of experts"),
        (row("2", 4, 4, "all", ""), "sharding: expected none"),
        (row("2", 4, 4, "optimizer", "0"), "capacity: expected a number above 0"),
    ] {
        std::fs::write(&file, format!("{header}\n{row}\n")).unwrap();
        let output = altiplano(&["fidelity", &name]);
        assert!(output.code == Some(2) && output.stderr.contains(expect), "{row}: {}", output.stderr);
    }
}

/// Published steps of Megatron-LM and Alpa. A defect would raise their errors far above these limits.
#[test]
fn published_steps_are_predicted() {
    for (name, most, rows) in [("megatron-sc21.csv", 8.0, 10), ("alpa/gpt-throughput.csv", 15.0, 20)] {
        let Some(file) = shared(&format!("reference/{name}")) else { continue };
        let found = document(&["fidelity", &file.display().to_string(), "--json"]);
        assert_eq!(found["rows"], rows);
        let error = found["mape_percent"].as_f64().unwrap();
        assert!(error <= most, "{name}: {error} %");
    }
}

/// The tables of kernels measured alone: the median error in percent of each kind on each device, at most.
#[test]
fn published_kernels_are_predicted() {
    let devices = ["A100-SXM-80GB", "H100-SXM", "B200"];
    for (name, subjects, most) in [
        ("kernels-gemm", &["bf16 products"][..], 7.5),
        ("kernels-attention", &["attention, heads of 128"], 9.0),
        ("nccl-within-node", &["all_reduce", "all_gather", "reduce_scatter", "alltoall"], 7.0),
    ] {
        let Some(file) = shared(&format!("reference/measured/{name}.csv.gz")) else { continue };
        let found = document(&["fidelity", &file.display().to_string(), "--json"]);
        for (device, subject) in devices.iter().flat_map(|d| subjects.iter().map(move |s| (*d, *s))) {
            let of = |row: &&serde_json::Value| row["device"] == device && row["subject"] == subject;
            let row = found.as_array().unwrap().iter().find(of).unwrap_or_else(|| panic!("{device} {subject}"));
            let error = row["median_percent"].as_f64().unwrap();
            assert!(error <= most, "{device} {subject}: {error} %");
        }
    }
}

/// Steps that PyTorch's FSDP was published to take: by torchtitan (docs/performance.md, 2024: tokens a second of each of eight H100 within
/// 500 W; at commit 3faaa1a0d, of 64 A100), by fms-fsdp on 128 A100, and by llm-foundry (scripts/train/benchmarking, 2023) on eight H100.
#[test]
fn published_steps_of_fsdp_are_predicted() {
    let scratch = Scratch::new();
    let llama = |vocab: u64, ffn: u64, kv_heads: u64| {
        json!({
            "model_type": "llama", "vocab_size": vocab, "hidden_size": 4096, "intermediate_size": ffn,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": kv_heads,
            "max_position_embeddings": 8192,
        })
    };
    let mpt = json!({
        "model_type": "gpt2", "vocab_size": 50368, "n_positions": 2048, "n_embd": 4096, "n_layer": 32, "n_head": 32,
    });
    let rows = [
        // (config, cluster and its devices, samples of each and their length, recomputation, tokens a second of a device, part
        // that predictions are off at most)
        (llama(128_256, 14336, 8), ("examples/clusters/h100-500w.toml", 8), (2, 8192), "selective", 6667, 0.2),
        (llama(128_256, 14336, 8), ("dgx-a100:8", 64), (1, 8192), "selective", 2973, 0.1),
        (llama(32000, 11008, 32), ("dgx-a100:16", 128), (2, 4096), "none", 3760, 0.1),
        (mpt, ("dgx-h100:1", 8), (6, 2048), "none", 10643, 0.25),
    ];
    for (config, (cluster, devices), (samples, length), recompute, tokens, tolerance) in rows {
        let file = scratch.path("config.json");
        std::fs::write(&file, config.to_string()).unwrap();
        let [seq, batch, dp] = [length, samples * devices, devices].map(|n: u32| n.to_string());
        let (file, seconds) = (file.display().to_string(), f64::from(samples * length) / f64::from(tokens));
        let options = format!(
            "--seq {seq} --global-batch {batch} --num-microbatches 1 --zero 3 --dp {dp} --tp 1 --pp 1 --recompute {recompute} \
             --precision bf16 --target fsdp --json"
        );
        let arguments: Vec<&str> =
            ["plan", &file, "--cluster", cluster].into_iter().chain(options.split_whitespace()).collect();
        let predicted = document(&arguments)["predicted"]["step_time_s"].as_f64().unwrap();
        let off = (predicted / seconds - 1.0).abs();
        assert!(off < tolerance, "{cluster} {config}: {predicted} s, published {seconds}");
    }
}

#[test]
fn a_step_is_played_explained_and_traced() {
    let scratch = Scratch::new();
    let (plan, trace) = (scratch.path("plan.json"), scratch.path("trace.json"));
    let (plan, trace) = (plan.display().to_string(), trace.display().to_string());
    succeeds(&[
        "plan",
        DEMO,
        "--cluster",
        "dgx-a100:1",
        "--dp",
        "2",
        "--tp",
        "2",
        "--pp",
        "2",
        "--virtual-stages",
        "1",
        "--schedule",
        "1f1b",
        "--num-microbatches",
        "4",
        "--global-batch",
        "32",
        "-o",
        &plan,
    ]);
    let text = succeeds(&["simulate", &plan, "--trace", &trace]);
    assert!(text.contains("stage0") && text.contains("calibrated on published steps"), "{text}");

    let drawn: Value = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let step_us = 1e6 * drawn["otherData"]["step_s"].as_f64().unwrap();
    let events = drawn["traceEvents"].as_array().unwrap();
    let calls: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X" && e["tid"] == 0).collect();
    // Two stages with four microbatches forward and backward, and an update each.
    assert_eq!(calls.len(), 2 * (2 * 4 + 1));
    let end = |e: &Value| e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap();
    let last = calls.iter().map(|e| end(e)).fold(0.0, f64::max);
    assert!((last / step_us - 1.0).abs() < 1e-6, "{last} {step_us}");
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(&plan).unwrap()).unwrap();
    let planned_us = 1e6 * saved["predicted"]["step_time_s"].as_f64().unwrap();
    assert!((planned_us / step_us - 1.0).abs() < 1e-9, "the plan says {planned_us}, the simulator {step_us}");

    let why = succeeds(&["simulate", &plan, "--explain", "dot_general"]);
    assert!(why.contains("FLOP in tiles") && why.contains("bound by"), "{why}");
    let sent = succeeds(&["simulate", &plan, "--explain", "all_gather"]);
    assert!(sent.contains("on the wire"), "{sent}");
    let nothing = altiplano(&["simulate", &plan, "--explain", "no such thing"]);
    assert!(nothing.code == Some(2) && nothing.stderr.contains("no such thing"), "{}", nothing.stderr);
}
