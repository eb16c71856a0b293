//! `altiplano probe`: from the output of other machines' tools, and on this machine.

use crate::common::{Scratch, altiplano, succeeds};

const TOPOLOGY: &str = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPIX\t0-63\t0
GPU1\tNV12\t X \tSYS\t64-127\t1
mlx5_0\tPIX\tSYS\t X

Legend:

  X    = Self
";

const GPUS: &str = "NVIDIA A100-SXM4-80GB, 81920 MiB\nNVIDIA A100-SXM4-80GB, 81920 MiB\n";

const LOG: &str = "# nThread 1 nGpus 2 minBytes 1073741824 maxBytes 1073741824 step: 1048576(bytes)
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1    10886   98.63   98.63      0    10886   98.63   98.63      0
";

/// Two active ports and an inactive one, as the kernel lists them.
fn cards(scratch: &Scratch) -> String {
    for (card, rate, state) in [
        ("mlx5_0", "200 Gb/sec (4X HDR)", "4: ACTIVE"),
        ("mlx5_1", "200 Gb/sec (4X HDR)", "4: ACTIVE"),
        ("mlx5_2", "200 Gb/sec (4X HDR)", "1: DOWN"),
        ("mlx5_3", "25 Gb/sec (1X EDR)", "4: ACTIVE"),
    ] {
        let port = scratch.path("infiniband").join(card).join("ports/1");
        std::fs::create_dir_all(&port).unwrap();
        std::fs::write(port.join("rate"), format!("{rate}\n")).unwrap();
        std::fs::write(port.join("state"), format!("{state}\n")).unwrap();
    }
    scratch.path("infiniband").display().to_string()
}

#[test]
fn a_machine_from_files() {
    let scratch = Scratch::new();
    let (gpus, topology) = (scratch.file("gpus", GPUS), scratch.file("topology", TOPOLOGY));
    let output = scratch.path("cluster.toml").display().to_string();
    let cards = cards(&scratch);
    let described = ["probe", "--gpus", &gpus, "--topology", &topology, "--infiniband", &cards, "--nodes", "2"];
    assert_eq!(succeeds(&[&described[..], &["-o", &output]].concat()), "");
    // The output is a cluster file that other commands accept.
    let shown = succeeds(&["show", &output]);
    for line in [
        "name = \"2 x A100-SXM-80GB\"",
        "nodes = 2",
        "devices_per_node = 2",
        "device = \"A100-SXM-80GB\"",
        "intra_node = { kind = \"nvswitch\", bytes_per_s = 3e11, latency_s = 3e-6 }",
        "inter_node = { kind = \"infiniband\", bytes_per_s = 2.5e10, nics = 2, latency_s = 8e-6 }",
    ] {
        assert!(shown.contains(line), "{shown}");
    }
    // A measurement at half the usual speed halves the bandwidth of the links.
    let log = scratch.file("log", LOG);
    let slow = succeeds(&[&described[..], &["--nccl-tests", &log]].concat());
    assert!(slow.contains("kind = \"nvswitch\", bytes_per_s = 1.5"), "{slow}");
}

#[test]
fn this_machine() {
    let text = succeeds(&["probe"]);
    let scratch = Scratch::new();
    let file = scratch.file("here.toml", &text);
    assert!(succeeds(&["show", &file]).contains("devices_per_node = "));
}

#[test]
fn one_clear_error_each() {
    let scratch = Scratch::new();
    let (gpus, topology) = (scratch.file("gpus", GPUS), scratch.file("topology", TOPOLOGY));
    let odd = scratch.file("odd", TOPOLOGY.replace("NV12\tPIX", "WIFI\tPIX"));
    let (empty, log) = (scratch.file("empty", ""), scratch.file("log", LOG));
    let other = scratch.file("other", "NVIDIA Abacus, 81920 MiB\n");
    let half = scratch.file("half", GPUS.lines().next().unwrap());
    let nowhere = scratch.path("nowhere").display().to_string();
    let table: &[(&[&str], &str)] = &[
        (&["--gpus", &nowhere], "nowhere"),
        (&["--gpus", &empty], "no GPU is listed"),
        (&["--gpus", &topology], "topology:1: expected a GPU's name"),
        (&["--gpus", &other], "`NVIDIA Abacus` is not in the catalogue"),
        (&["--gpus", &gpus, "--topology", &odd], "odd:2: `WIFI` is no connection"),
        (&["--gpus", &gpus, "--topology", &log], "no matrix of GPUs"),
        (&["--gpus", &half, "--topology", &topology], "has 2 GPUs, the list of names 1"),
        (&["--topology", &topology], "--gpus"),
        (&["--gpus", &gpus, "--nodes", "2"], "no network card was found"),
        (&["--gpus", &gpus, "--nodes", "0"], "--nodes"),
        (&["--gpus", &gpus, "--infiniband", &nowhere], "nowhere"),
        (&["--gpus", &gpus, "--nccl-tests", &topology], "no row of measurements"),
        (&["--gpus", &half, "--nccl-tests", &log], "2 devices on 1 nodes"),
    ];
    for (arguments, part) in table {
        let output = altiplano(&[&["probe"], *arguments].concat());
        assert_eq!(output.code, Some(2), "{arguments:?}: {}", output.stderr);
        assert!(output.stderr.contains(part), "{arguments:?}: {} lacks {part}", output.stderr);
        assert_eq!(output.stdout, "", "{arguments:?}");
        assert_eq!(output.stderr.matches("error: ").count(), 1, "{}", output.stderr);
    }
}
