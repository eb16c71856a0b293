//! Clusters of several groups of nodes from the command line, and device counts that are no powers of two.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::cost_models::profile::{self, Machine, Outliers, Profile};
use altiplano::ir::cluster::Cluster;
use altiplano::ir::plan::Plan;
use altiplano::measured_costs::plan_by;
use altiplano::planner::Silent;
use altiplano::{ImportOptions, Model, load_cluster, load_model, plan, report, request};

const TWO_KINDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/two-kinds.toml");

/// Two kinds of workers; the second is half as fast and has less memory.
const WORKERS: &str = r#"
    name = "two kinds of workers"
    [[group]]
    nodes = 1
    devices_per_node = 1
    device = "fast"
    [[group]]
    nodes = 1
    devices_per_node = 2
    device = "slow"
    intra_node = { bytes_per_s = 1e10, latency_s = 1e-6 }
    [between_groups]
    bytes_per_s = 1e10
    latency_s = 1e-5
    [device.fast]
    kind = "cpu"
    memory_bytes = 4e9
    memory_bytes_per_s = 2e10
    peak_flops = { f32 = 1e11 }
    [device.slow]
    kind = "cpu"
    memory_bytes = 2e9
    memory_bytes_per_s = 1e10
    peak_flops = { f32 = 5e10 }
"#;

fn demo() -> Model {
    load_model(DEMO.as_ref(), &ImportOptions::default()).expect("the demo model")
}

fn planned(model: &Model, cluster: Cluster, global_batch: u64) -> Plan {
    let mut request = request(model, cluster);
    request.batch.global = Some(global_batch);
    plan(&request, &Silent).expect("a plan")
}

/// No group alone is predicted to be faster by more than the tolerance, and the report shows the placement.
#[test]
fn the_example_of_two_kinds_is_no_slower_than_either() {
    let model = demo();
    let cluster = load_cluster(TWO_KINDS).expect("the example");
    assert_eq!((cluster.groups.len(), cluster.num_devices()), (2, 24));
    for global_batch in [8, 512] {
        let both = planned(&model, cluster.clone(), global_batch);
        let text = report(&both);
        assert!(
            text.contains("8 x A100-SXM-40GB, 42.4 GB (39.5 GiB) each; 16 x V100-SXM2-32GB, 34.1 GB (31.7 GiB) each"),
            "{text}"
        );
        let stage = &both.stages[0];
        assert!(text.contains(&format!("group{}, {}", stage.group, both.group_of(stage).device.name)), "{text}");
        assert!(text.contains("alone"), "baselines say which group they are on: {text}");
        for group in &cluster.groups {
            let alone =
                Cluster { name: "alone".into(), groups: vec![group.clone()], between_groups: None, storage: None };
            let alone = planned(&model, alone, global_batch);
            let (ours, theirs) = (both.predicted.step_time_s, alone.predicted.step_time_s);
            assert!(ours <= 1.02 * theirs, "{ours} on both, {theirs} on {} alone", group.device.name);
        }
    }
}

#[test]
fn a_plan_over_two_kinds_of_workers_runs() {
    let scratch = Scratch::new();
    let cluster = scratch.file("workers.toml", WORKERS);
    let file = scratch.path("plan.json").display().to_string();
    let said = succeeds(&["plan", DEMO, "--cluster", &cluster, "--dp", "1", "--tp", "1", "--pp", "3", "-o", &file]);
    assert!(said.contains("group0, fast") && said.contains("group1, slow"), "{said}");
    let said = succeeds(&["verify", &file]);
    assert!(said.contains("the numbers agree"), "{said}");
    let said = succeeds(&["run", &file, "--steps", "1"]);
    assert!(said.contains("loss"), "{said}");
    let said = succeeds(&["simulate", &file]);
    assert!(said.contains("figures of fast") && said.contains("figures of slow"), "{said}");
}

/// GPUs of two kinds are not available, so a plan over them is verified on workers.
#[test]
fn a_plan_over_two_kinds_of_gpus_computes_what_one_device_computes() {
    let options = ["--cluster", TWO_KINDS, "--dp", "8", "--tp", "1", "--pp", "3", "--global-batch", "24"];
    let said = succeeds(&[["verify", DEMO].as_slice(), &options].concat());
    assert!(said.contains("3 stages") && said.contains("the numbers agree"), "{said}");
}

#[test]
fn what_several_groups_cannot_be_asked_for() {
    for (options, reason) in [
        (vec!["--dp", "24"], "a stage, which lies in one group of nodes; the groups of the cluster have 8 and 16"),
        (vec!["--dp", "8", "--pp", "2", "--tp", "1"], "is 16 devices, but the cluster has 24"),
        (vec!["--target", "megatron"], "the cluster has 2 groups of nodes"),
        (vec!["--search", "alpa"], "the cluster has 2 groups of nodes"),
    ] {
        let output = altiplano(&[&["plan", DEMO, "--cluster", TWO_KINDS], options.as_slice()].concat());
        assert_eq!(output.code, Some(2), "{options:?}: {}", output.stderr);
        assert!(output.stderr.contains(reason), "{options:?}: {}", output.stderr);
    }
    let profile = Profile {
        format: profile::FORMAT.into(),
        version: profile::VERSION,
        device: "A100-SXM-40GB".into(),
        machine: Machine { processor: "any".into(), cores: 1, gpus: false },
        measured_at: String::new(),
        altiplano: String::new(),
        series: Vec::new(),
        seconds: 0.0,
        outliers: Outliers { samples: 0, outliers: 0, largest: 1.0 },
        ranks: None,
        slower_shared: Vec::new(),
    };
    let request = request(&demo(), load_cluster(TWO_KINDS).expect("the example"));
    let error = plan_by(&request, Some(&profile), &Silent).expect_err("one machine was measured");
    assert!(error.is_usage() && error.to_string().contains("several groups of nodes"), "{error}");
}

#[test]
fn numbers_of_devices_that_are_no_powers_of_two() {
    let three_nodes_of_four = "3x4xA100-40";
    for (cluster, options) in [
        ("local:3", vec![]),
        ("local:6", vec![]),
        ("local:7", vec![]),
        ("local:12", vec![]),
        ("local:6", vec!["--dp", "3", "--tp", "2"]),
        ("local:7", vec!["--dp", "7"]),
        ("local:7", vec!["--tp", "7"]),
        ("local:12", vec!["--dp", "2", "--tp", "3", "--pp", "2"]),
        (three_nodes_of_four, vec![]),
        (three_nodes_of_four, vec!["--pp", "3"]),
        (three_nodes_of_four, vec!["--dp", "6", "--tp", "2"]),
    ] {
        let start = ["verify", DEMO, "--cluster", cluster, "--global-batch", "24"];
        let said = succeeds(&[start.as_slice(), &options].concat());
        assert!(said.contains("the numbers agree"), "{cluster} {options:?}: {said}");
    }
}
