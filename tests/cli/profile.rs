//! `altiplano profile`, and the commands that take its file, end to end.

use crate::common::{DEMO, Scratch, altiplano, altiplano_with, emulator, succeeds};
use altiplano::ir::plan::Plan;
use altiplano::load_plan;

#[test]
fn a_measured_profile_judges_plans() {
    let scratch = Scratch::new();
    let profile = scratch.path("profile.json").display().to_string();
    let measured = altiplano(&["profile", "--device", "cpu", "--quick", "-o", &profile]);
    assert_eq!(measured.code, Some(0), "{}", measured.stderr);
    assert!(measured.stderr.contains("more than twice the median"), "{}", measured.stderr);

    let plan = scratch.path("plan.json").display().to_string();
    let fixed = ["--cluster", "local:4", "--dp", "2", "--pp", "2", "--tp", "1"];
    let planned = altiplano(&[&["plan", DEMO, "--profile", &profile, "-o", &plan][..], &fixed].concat());
    assert_eq!(planned.code, Some(0), "{}", planned.stderr);
    assert!(planned.stdout.contains("predicted by    measured profile of"), "{}", planned.stdout);
    // The quick profile covers only small sizes, and the output says so.
    assert!(planned.stderr.contains("outside the measured range, where"), "{}", planned.stderr);

    // The plan file names the profile, and is readable without it.
    let inspected = succeeds(&["inspect", &plan]);
    assert!(inspected.contains("predicted by    measured profile of"), "{inspected}");
    let played = succeeds(&["simulate", &plan, "--profile", &profile]);
    assert!(played.contains("figures of cpu-worker: measured profile of"), "{played}");
    let explained = succeeds(&["simulate", &plan, "--profile", &profile, "--explain", "dot_general"]);
    assert!(explained.contains("source profile") && explained.contains("matmul_nn f32 ["), "{explained}");
    let without = altiplano(&["simulate", &plan]);
    assert!(without.stderr.contains("without --profile the cluster's figures simulate it"), "{}", without.stderr);
    assert!(without.stdout.contains("roofline of its datasheet"), "{}", without.stdout);

    let ran = succeeds(&["run", &plan, "--steps", "1", "--profile", &profile]);
    assert!(ran.contains("/step, by the measured profile of"), "{ran}");
}

/// A cluster of the GPUs that g++ emulates, which the catalogue lacks.
const EMULATED: &str = r#"
name = "emulated"
[[group]]
nodes = 1
devices_per_node = 2
device = "Emulated"
intra_node = { kind = "pcie", bytes_per_s = 2.5e10, latency_s = 1e-5 }
[device."Emulated"]
memory_bytes = 1e9
memory_bytes_per_s = 9e11
peak_flops = { f32 = 4e13, f16 = 1.6e14, bf16 = 1.6e14 }
"#;

#[test]
fn a_measured_profile_of_gpus_judges_plans() {
    let scratch = Scratch::new();
    let Some(_) = emulator(&scratch, 2) else { return };
    let folder = scratch.path("").display().to_string();
    let profile = scratch.path("profile.json").display().to_string();
    let gpus = [("ALTIPLANO_CUDA", folder.as_str()), ("XDG_CACHE_HOME", folder.as_str())];
    let measured = altiplano_with(&gpus, &["profile", "--device", "cuda", "--quick", "-o", &profile]);
    assert_eq!(measured.code, Some(0), "{}", measured.stderr);
    let text = std::fs::read_to_string(&profile).expect("a profile");
    let families = ["gpu_matmul", "gpu_matmul_batched", "gpu_attention", "gpu_pass", "gpu_indexed", "all_reduce"];
    for family in families.into_iter().chain(["reduce_scatter", "all_gather"]) {
        assert!(text.contains(&format!("\"{family}\"")), "{family}: {text}");
    }

    let cluster = scratch.file("emulated.toml", EMULATED);
    let plan = scratch.path("plan.json").display().to_string();
    let fixed = ["--cluster", &cluster, "--dp", "2", "-o", &plan];
    let planned = altiplano(&[&["plan", DEMO, "--profile", &profile][..], &fixed].concat());
    assert_eq!(planned.code, Some(0), "{}", planned.stderr);
    assert!(planned.stdout.contains("predicted by    measured profile of Emulated, 2 devices"), "{}", planned.stdout);
    let explained = succeeds(&["simulate", &plan, "--profile", &profile, "--explain", "dot_general"]);
    assert!(explained.contains("source profile") && explained.contains("gpu_matmul f32 ["), "{explained}");
    // A profile prices kernels: one that is ten times slower predicts a longer step.
    let slower = text.lines().map(|line| match line.rsplit_once("\"seconds\":[") {
        Some((series, times)) if line.starts_with("{\"family\"") => {
            let (times, rest) = times.split_once(']').expect("a list");
            let times: Vec<String> =
                times.split(',').map(|t| format!("{:e}", 10.0 * t.parse::<f64>().expect("a time"))).collect();
            format!("{series}\"seconds\":[{}]{rest}", times.join(","))
        }
        _ => line.to_string(),
    });
    let slower = scratch.file("slower.json", slower.collect::<Vec<_>>().join("\n"));
    let step = |profile: &str, plan: &str| -> f64 {
        let planned = altiplano(&["plan", DEMO, "--profile", profile, "--cluster", &cluster, "--dp", "2", "-o", plan]);
        assert_eq!(planned.code, Some(0), "{}", planned.stderr);
        let plan: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(plan).expect("a plan")).expect("JSON");
        plan["predicted"]["step_time_s"].as_f64().expect("seconds")
    };
    let (measured, slower) = (step(&profile, &plan), step(&slower, &scratch.path("slow.json").display().to_string()));
    assert!(slower > 5.0 * measured, "{measured} {slower}");
}

#[test]
fn gpus_that_are_not_there_are_not_measured() {
    let scratch = Scratch::new();
    let output = altiplano(&["profile", "--device", "cuda", "--quick"]);
    let run = altiplano(&["run", DEMO, "--cluster", "local:1", "--steps", "1", "--device", "cuda"]);
    // On a machine with a GPU both commands work.
    assert_eq!(output.code, run.code, "{}", output.stderr);
    if run.code != Some(0) {
        assert_eq!(output.stderr, run.stderr);
    }
    drop(scratch);
}

/// The error comes before any measurement or fit.
#[test]
fn a_place_that_cannot_be_written_is_refused_at_once() {
    let scratch = Scratch::new();
    let folder = scratch.path(".").display().to_string();
    for file in [format!("{folder}/none/p.json"), folder.clone()] {
        for arguments in [&["profile", "--quick"][..], &["calibrate", "/no/table.csv"]] {
            let output = altiplano(&[arguments, &["-o", &file]].concat());
            assert!(output.code != Some(0) && output.stderr.contains(&file), "{arguments:?} {}", output.stderr);
            assert!(!output.stderr.contains("measured") && !output.stderr.contains("table.csv"), "{}", output.stderr);
        }
    }
}

/// Collectives of two and four ranks and messages, with bandwidths within a host and between two.
fn links(inside: f64, collectives: f64, messages: f64) -> String {
    let series = |family: &str, threads: u32, nodes: &str, points: usize, bytes_per_s: f64| {
        let sizes = [1e3, 1e8];
        let seconds: Vec<String> = sizes.iter().map(|n| format!("{:e}", 1e-5 + n / bytes_per_s)).collect();
        let seconds = vec![seconds.join(","); points].join(",");
        format!(
            r#"{{"family":"{family}","dtype":"f32","threads":{threads},"load":{threads},"axes":[{nodes}[1e3,1e8]],"seconds":[{seconds}]}}"#
        )
    };
    let mut all = vec![series("message", 1, "", 1, inside), series("message_across", 1, "", 1, messages)];
    for family in ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"] {
        all.extend([2, 4].map(|threads| series(family, threads, "", 1, inside)));
        let across = format!("{family}_across");
        all.extend([2, 4].map(|threads| series(&across, threads, "[2.0],", 1, collectives)));
    }
    format!(
        r#"{{"format":"altiplano.profile","version":1,"device":"cpu-worker","machine":{{"processor":"p","cores":2}},"measured_at":"2026-11-22T01:30:00Z","altiplano":"0.1.0","seconds":1.0,"outliers":{{"samples":1,"outliers":0,"largest":0.0}},"ranks":{{"nodes":2,"on_node":2,"measured_at":"2026-11-22T01:30:00Z"}},"slower_shared":[],"series":[{}]}}"#,
        all.join(",")
    )
}

/// If collectives are slow on the link between hosts, none uses it. If messages are slow too, one host is left out.
#[test]
fn links_between_hosts_choose_the_plan() {
    let scratch = Scratch::new();
    let planned = |name: &str, profile: &str| {
        let (profile, plan) = (scratch.file(name, profile), scratch.path(&format!("{name}.plan")));
        let file = plan.display().to_string();
        let cluster = "docs/cluster/two-hosts.toml";
        let said =
            succeeds(&["plan", DEMO, "--cluster", cluster, "--global-batch", "64", "--profile", &profile, "-o", &file]);
        assert!(said.contains("with links of 2 x 2 ranks"), "{said}");
        load_plan(&plan).expect("the plan")
    };
    let stages = |plan: &Plan| plan.stages.iter().map(|stage| stage.devices.clone()).collect::<Vec<_>>();
    let fast = planned("fast", &links(1e10, 1e10, 1e10));
    assert_eq!(stages(&fast), [vec![0, 1, 2, 3]]);
    let slow_collectives = planned("slow-collectives", &links(1e10, 1e6, 1e10));
    assert_eq!(stages(&slow_collectives), [vec![0, 1], vec![2, 3]]);
    let slow = planned("slow", &links(1e10, 1e4, 1e4));
    assert_eq!(stages(&slow), [vec![0, 1]]);
    let seconds: Vec<f64> = [&fast, &slow_collectives, &slow].map(|plan| plan.predicted.step_time_s).to_vec();
    assert!(seconds.is_sorted(), "{seconds:?}");
}

#[test]
fn profiles_that_do_not_fit_are_refused() {
    let scratch = Scratch::new();
    let series = r#"{"family":"load","dtype":"f32","threads":1,"load":1,"axes":[[1.0]],"seconds":[1e-6]}"#;
    let text = |series: &str| {
        format!(
            r#"{{"format":"altiplano.profile","version":1,"device":"cpu-worker","machine":{{"processor":"p","cores":2}},"measured_at":"2026-11-22T01:30:00Z","altiplano":"0.1.0","seconds":1.0,"outliers":{{"samples":1,"outliers":0,"largest":0.0}},"slower_shared":[],"series":[{series}]}}"#
        )
    };
    let check = |name: &str, text: &str, more: &[&str], expected: &str| {
        let file = scratch.file(name, text);
        let output = altiplano(&[&["plan", DEMO, "--profile", &file][..], more].concat());
        assert_eq!(output.code, Some(2), "{name}: {}{}", output.stdout, output.stderr);
        assert!(output.stderr.contains(expected), "{name}: {}", output.stderr);
    };
    check("negative", &text(&series.replace("1e-6", "-1e-6")), &[], "negative: series[0].seconds[0]: must be positive");
    check("empty", &text(""), &[], "empty: series: must hold at least one series");
    check("unknown", &text(&series.replace("load\":1", "loud\":1")), &[], "unknown:1:");
    check(
        "other",
        &text(series),
        &["--cluster", "dgx-a100:1"],
        "--profile: the profile is of cpu-worker, the cluster has A100",
    );
    check("plan", "{}", &[], "plan:1:2: missing field `format`");
}
