//! Plans for lost nodes.

use crate::common::{DEMO, Scratch, altiplano, succeeds};
use altiplano::planner::{Request, Silent};
use altiplano::survive::{Loss, losses};
use altiplano::{ImportOptions, load_cluster, load_model, plan, request};

/// The losses of up to `most` nodes of two p3.16xlarge, and the bytes of all weights and optimizer state.
fn lost(most: u32, change: impl Fn(&mut Request)) -> (Vec<Loss>, u64) {
    let model = load_model(DEMO.as_ref(), &ImportOptions::default()).expect("a model");
    let mut request = request(&model, load_cluster("p3.16xlarge:2").expect("a cluster"));
    request.batch.global = Some(64);
    request.fastest = true;
    (request.degrees.tp, request.degrees.pp) = (Some(1), Some(1));
    change(&mut request);
    let found = plan(&request, &Silent).expect("a plan");
    assert_eq!(found.stages[0].devices.len(), 16);
    // Weights and two slots of Adam, all in f32.
    let bytes = found.graph.parameters().map(|(v, _)| 3 * found.graph.ty(v).bytes()).sum();
    (losses(&found, &request, most, &|request| Ok(plan(request, &Silent)?)), bytes)
}

fn step_s(loss: &Loss) -> f64 {
    loss.plan.as_ref().expect("a plan").predicted.step_time_s
}

#[test]
fn copies_of_replicas_survive_and_nothing_moves() {
    let (all, _) = lost(3, |request| request.degrees.zero = Some(0));
    // The last node cannot be lost.
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].nodes, all[0].only_there_bytes, all[0].moved_bytes), (1, 0, 0));
    assert!(step_s(&all[0]) > 0.0);
}

#[test]
fn shards_that_one_device_has_are_lost_with_its_node() {
    let (all, bytes) = lost(1, |request| request.degrees.zero = Some(3));
    // Sizes that 16 devices do not divide stay whole on each.
    let only_there = all[0].only_there_bytes;
    assert!(only_there > bytes * 9 / 10 && only_there <= bytes, "{only_there} of {bytes}");
    // One device alone has a part of its new shard, which is an eighth: a sixteenth of all.
    assert_eq!(all[0].moved_bytes, only_there / 16 * 15);
}

#[test]
fn groups_of_replicas_on_a_node_each_keep_a_copy() {
    let (all, _) = lost(1, |request| (request.degrees.zero, request.degrees.groups) = (Some(3), Some(2)));
    // The group that is left trains alone, with what it has.
    assert_eq!((all[0].only_there_bytes, all[0].moved_bytes), (0, 0));
}

#[test]
fn plans_for_lost_nodes_are_shown_and_written() {
    let scratch = Scratch::new();
    let file = scratch.path("plan.json");
    let name = file.display().to_string();
    let said =
        succeeds(&["plan", DEMO, "--cluster", "p3.16xlarge:3", "--global-batch", "96", "--survive", "2", "-o", &name]);
    let (_, table) =
        said.split_once("\nIf nodes are lost, of 11.2 MB of weights and optimizer state\n").expect("a table");
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].trim_start().starts_with("lost"), "{table}");
    assert!(lines[1].trim_start().starts_with("1 node ") && lines[1].contains("16 devices"), "{table}");
    assert!(lines[2].trim_start().starts_with("2 nodes ") && lines[2].contains("8 devices"), "{table}");
    for (nodes, left) in [(1, 16), (2, 8)] {
        let plan = altiplano::load_plan(&scratch.path(&format!("plan.lost-{nodes}.json"))).expect("a plan");
        assert_eq!(plan.cluster.num_devices(), left);
    }
    // Either kind of node may be lost; with the only node of a kind, the other kind is left.
    let two = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/clusters/two-kinds.toml");
    let said = succeeds(&["plan", DEMO, "--cluster", two, "--survive", "1", "-o", &name]);
    assert_eq!(
        said.split_once("\nIf nodes are lost").expect("a table").1.matches("\n  1 node of ").count(),
        2,
        "{said}"
    );
    assert!(
        scratch.path("plan.lost-1-of-group-1.json").exists() && scratch.path("plan.lost-1-of-group-2.json").exists()
    );
    let refused = |options: &[&str], said: &str| {
        let output = altiplano(&[&["plan", DEMO, "--survive"], options].concat());
        assert_eq!(output.code, Some(2), "{}", output.stderr);
        assert!(output.stderr.contains(said), "{}", output.stderr);
    };
    refused(&["0", "--cluster", "p3.16xlarge:2"], "--survive <K>");
    refused(&["1", "--cluster", "local:2"], "error: --survive: the cluster has one node");
    refused(&["2", "--cluster", "p3.16xlarge:2"], "error: --survive: the cluster has no more nodes than that");
    refused(
        &["1", "--cluster", "p3.16xlarge:2", "--parameter-servers", "4"],
        "error: --survive: does not count copies",
    );
}
