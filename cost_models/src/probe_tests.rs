//! Machines from the output of their tools, in published forms, and everything that can be wrong with it.

use super::*;
use crate::catalogue::preset;
use crate::collective::best;
use proptest::prelude::*;

/// The output of `nvidia-smi topo -m` for GPUs with the connections of `between`, including cards and affinities.
fn matrix(gpus: usize, nics: usize, between: impl Fn(usize, usize) -> String) -> String {
    let mut out = String::from("\t\u{1b}[4m");
    (0..gpus).for_each(|i| out += &format!("GPU{i}\t"));
    (0..nics).for_each(|i| out += &format!("NIC{i}\t"));
    out += "CPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m\n";
    for i in 0..gpus {
        out += &format!("GPU{i}\t");
        (0..gpus).for_each(|j| out += &if i == j { " X \t".to_string() } else { between(i, j) + "\t" });
        (0..nics).for_each(|j| out += if i == j { "PIX\t" } else { "SYS\t" });
        out += "0-63,128-191\t0\t\tN/A\n";
    }
    for i in 0..nics {
        out += &format!("NIC{i}\t");
        (0..gpus).for_each(|j| out += if i == j { "PIX\t" } else { "SYS\t" });
        (0..nics).for_each(|j| out += if i == j { " X \t" } else { "NODE\t" });
        out += "\n";
    }
    out + "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n  \
           NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
}

/// A DGX-1's links (NVIDIA, "NVIDIA DGX-1 With Tesla V100 System Architecture", figure 4).
fn hybrid_cube(i: usize, j: usize) -> String {
    const LINKS: [[u32; 8]; 8] = [
        [0, 1, 1, 2, 2, 0, 0, 0],
        [1, 0, 2, 1, 0, 2, 0, 0],
        [1, 2, 0, 2, 0, 0, 1, 0],
        [2, 1, 2, 0, 0, 0, 0, 1],
        [2, 0, 0, 0, 0, 1, 1, 2],
        [0, 2, 0, 0, 1, 0, 2, 1],
        [0, 0, 1, 0, 1, 2, 0, 2],
        [0, 0, 0, 1, 2, 1, 2, 0],
    ];
    match LINKS[i][j] {
        0 => "SYS".to_string(),
        n => format!("NV{n}"),
    }
}

fn listing(name: &str, mib: u64, count: usize) -> String {
    format!("{name}, {mib} MiB\n").repeat(count)
}

fn nics(count: usize, gbit_per_s: f64) -> Vec<Nic> {
    (0..count).map(|i| Nic { name: format!("mlx5_{i}"), bytes_per_s: gbit_per_s / 8.0 * 1e9 }).collect()
}

#[test]
fn gpus_and_their_connections() {
    // (driver's name, MiB, GPUs, connection, device, kind, bytes/s)
    type Between = fn(usize, usize) -> String;
    let table: &[(&str, u64, usize, Between, &str, &str, f64)] = &[
        ("NVIDIA A100-SXM4-80GB", 81920, 8, |_, _| "NV12".into(), "A100-SXM-80GB", "nvswitch", 300e9),
        ("NVIDIA A100-SXM4-40GB", 40960, 4, |_, _| "NV4".into(), "A100-SXM-40GB", "nvlink-mesh", 300e9),
        ("NVIDIA A100-SXM4-40GB", 40960, 2, |_, _| "NV4".into(), "A100-SXM-40GB", "nvlink-mesh", 100e9),
        ("NVIDIA H100 80GB HBM3", 81559, 8, |_, _| "NV18".into(), "H100-SXM", "nvswitch", 450e9),
        ("NVIDIA H200", 143771, 8, |_, _| "NV18".into(), "H200", "nvswitch", 450e9),
        ("NVIDIA B200", 183359, 8, |_, _| "NV18".into(), "B200", "nvswitch", 900e9),
        ("Tesla V100-SXM2-16GB", 16160, 8, hybrid_cube, "V100-SXM2-16GB", "nvlink", 150e9),
        ("Tesla V100-SXM3-32GB", 32510, 16, |_, _| "NV6".into(), "V100-SXM3-32GB", "nvswitch", 150e9),
        (
            "NVIDIA L40S",
            46068,
            8,
            |i, j| if i / 4 == j / 4 { "NODE".into() } else { "SYS".into() },
            "L40S",
            "pcie",
            31.5e9,
        ),
        ("NVIDIA GeForce RTX 4090", 24564, 2, |_, _| "PHB".into(), "RTX-4090", "pcie", 31.5e9),
        // Bridges between pairs leave the other connections to PCIe.
        (
            "NVIDIA A100 80GB PCIe",
            81920,
            4,
            |i, j| if i / 2 == j / 2 { "NV12".into() } else { "PXB".into() },
            "A100-PCIe",
            "pcie",
            31.5e9,
        ),
        ("NVIDIA H100 PCIe", 81559, 1, |_, _| String::new(), "H100-PCIe", "pcie", 63e9),
    ];
    for (name, mib, count, between, device, kind, bytes_per_s) in table {
        let gpus = parse_gpus(&listing(name, *mib, *count)).unwrap();
        let connections = parse_topology(&matrix(*count, 2, between)).unwrap();
        let group = gpu_group(1, &gpus, Some(&connections), &[]).unwrap();
        assert_eq!((group.devices_per_node, group.device.name.as_str()), (*count as u32, *device), "{name}");
        assert_eq!((group.intra_node.kind.as_str(), group.intra_node.bytes_per_s), (*kind, *bytes_per_s), "{name}");
        assert_eq!(catalogue::device(device).as_ref(), Some(&group.device), "{name}");
    }
}

#[test]
fn a_probed_machine_is_the_one_of_the_catalogue() {
    let gpus = parse_gpus(&listing("NVIDIA A100-SXM4-80GB", 81920, 8)).unwrap();
    let connections = parse_topology(&matrix(8, 10, |_, _| "NV12".into())).unwrap();
    // Two slower ports for storage.
    let cards: Vec<Nic> = nics(8, 200.0).into_iter().chain(nics(2, 100.0)).collect();
    let mut found = gpu_group(4, &gpus, Some(&connections), &cards).unwrap();
    // The GPUs do not tell the memory of the node itself.
    let known = preset("dgx-a100:4").unwrap().groups.remove(0);
    assert_eq!(found, Group { host_memory_bytes: None, ..known });
    let efa: Vec<Nic> =
        nics(4, 100.0).into_iter().map(|n| Nic { name: n.name.replace("mlx5_", "efa_"), ..n }).collect();
    found = gpu_group(1, &gpus, Some(&connections), &efa).unwrap();
    assert_eq!((found.inter_node.kind.as_str(), found.inter_node.nics), ("efa-p4", 4));
    // Nothing says how they are connected.
    assert_eq!(gpu_group(1, &gpus, None, &[]).unwrap().intra_node.kind, "pcie");
}

#[test]
fn a_card_with_other_memory_is_a_device_of_its_own() {
    let gpus = parse_gpus("NVIDIA A100-SXM4-80GB, 20096 MiB\n").unwrap();
    let device = gpu_group(1, &gpus, None, &[]).unwrap().device;
    assert_eq!((device.name.as_str(), device.memory_bytes), ("A100-SXM-80GB with 20096 MiB", 20096 << 20));
    assert_eq!(device.peak_flops, catalogue::device("A100-SXM-80GB").unwrap().peak_flops);
}

#[test]
fn mistakes_in_listings() {
    use ClusterError as E;
    let gpus = |text: &str| parse_gpus(text).unwrap_err();
    assert_eq!(gpus(""), E::NoGpus);
    assert_eq!(gpus("name, memory.total [MiB]\n"), E::NoGpus);
    for line in [
        "NVIDIA A100",
        "NVIDIA A100, much",
        "NVIDIA A100, 1 KiB",
        ", 81920 MiB",
        "A, 0 MiB",
        "A, 1 MiB more",
        "A, -5 MiB",
        "A, 99999999999999999 GiB",
    ] {
        assert_eq!(gpus(&format!("NVIDIA L40S, 46068 MiB\n{line}\n")), E::GpuLine { line: 2 }, "{line}");
    }
    let good = listing("NVIDIA H200", 143771, 2);
    let two = parse_gpus(&good).unwrap();
    assert_eq!(parse_gpus(&format!("name, memory.total [MiB]\n{good}")).unwrap(), two);
    let mixed = parse_gpus(&(good + "NVIDIA L40S, 46068 MiB\n")).unwrap();
    assert!(matches!(gpu_group(1, &mixed, None, &[]), Err(E::MixedGpus { .. })));
    let abacus = parse_gpus("NVIDIA Abacus, 1024 MiB\n").unwrap();
    let message = gpu_group(1, &abacus, None, &[]).unwrap_err().to_string();
    assert!(message.contains("`NVIDIA Abacus`") && message.contains("A100-SXM-80GB"), "{message}");
    for name in ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H100 NVL", "NVIDIA H800", "Tesla V100-PCIE-16GB"] {
        let other = parse_gpus(&listing(name, 81920, 1)).unwrap();
        assert!(matches!(gpu_group(1, &other, None, &[]), Err(E::UnknownGpu { .. })), "{name}");
    }
    assert_eq!(gpu_group(2, &two, None, &[]), Err(E::NoNics { nodes: 2 }));
    assert!(gpu_group(2, &two, None, &nics(1, 400.0)).is_ok());
}

#[test]
fn mistakes_in_matrices() {
    use ClusterError as E;
    let good = matrix(4, 1, |_, _| "NV12".into());
    let wrong = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        parse_topology(&good.replacen(from, to, 1)).unwrap_err()
    };
    assert_eq!(parse_topology(""), Err(E::NoMatrix));
    assert_eq!(parse_topology("NVIDIA-SMI has failed"), Err(E::NoMatrix));
    for text in ["NV", "NVx", "NV0", "NV-1", "NV99999999999", "PIXIE", "sys", "0-63"] {
        let error = wrong("NV12", text);
        assert_eq!(error, E::Connection { line: 2, text: text.to_string() }, "{text}");
        assert!(error.to_string().starts_with("line 2: "));
    }
    // A heading with one more GPU takes a card's connection for a GPU's, and then lacks a row.
    assert_eq!(wrong("GPU2\t", "GPU2\tGPU3\t"), E::MatrixRows { found: 4, expected: 5 });
    let cut: Vec<&str> = good.lines().take(3).collect();
    assert_eq!(parse_topology(&cut.join("\n")), Err(E::MatrixRows { found: 2, expected: 4 }));
    let short = good.replacen("GPU1\tNV12\t X \tNV12\tNV12\tSYS\t0-63,128-191\t0\t\tN/A", "GPU1\tNV12\t X ", 1);
    assert_eq!(parse_topology(&short), Err(E::MatrixRow { line: 3, found: 2, expected: 4 }));
    let gpus = parse_gpus(&listing("NVIDIA H200", 143771, 8)).unwrap();
    let four = parse_topology(&good).unwrap();
    assert_eq!(gpu_group(1, &gpus, Some(&four), &[]), Err(E::GpuCount { matrix: 4, listed: 8 }));
}

#[test]
fn rates_cores_and_memory() {
    for (text, gb_per_s) in
        [("200 Gb/sec (4X HDR)\n", 25.0), ("400 Gb/sec (4X NDR)", 50.0), ("2.5 Gb/sec (1X SDR)", 0.3125)]
    {
        assert_eq!(parse_rate(text), Some(gb_per_s * 1e9), "{text}");
    }
    for text in ["", "200", "fast Gb/sec", "0 Gb/sec", "inf Gb/sec", "200 Mb/sec"] {
        assert_eq!(parse_rate(text), None, "{text}");
    }
    let threads = |ids: &[(u32, u32)]| -> String {
        let one = |(i, (socket, core)): (usize, &(u32, u32))| {
            format!("processor\t: {i}\nmodel name\t: A CPU\nphysical id\t: {socket}\ncore id\t\t: {core}\n\n")
        };
        ids.iter().enumerate().map(one).collect()
    };
    assert_eq!(parse_cores(&threads(&[(0, 0), (0, 1), (0, 0), (0, 1)])), 2);
    assert_eq!(parse_cores(&threads(&[(0, 0), (1, 0), (0, 1), (1, 1)])), 4);
    assert_eq!(parse_cores("processor\t: 0\nBogoMIPS\t: 50\n\nprocessor\t: 1\n"), 2);
    assert_eq!(parse_cores(""), 0);
    assert_eq!(parse_memory("MemTotal:       16384 kB\nMemFree: 1 kB\n"), Some(16 << 20));
    for text in ["", "MemFree: 1 kB", "MemTotal: many kB", "MemTotal: 99999999999999999999 kB"] {
        assert_eq!(parse_memory(text), None, "{text}");
    }
    let group = cpu_group(1, 4, 16 << 30, &[]).unwrap();
    assert_eq!((group.devices_per_node, group.device.memory_bytes), (4, 4 << 30));
    assert_eq!(group.intra_node.kind, "shared-memory");
}

/// A log of nccl-tests; `version` 0 has no `redop`, 1 no `root`, 2 both and the test's name.
fn log(version: usize, hosts: &[&str], per_host: usize, rows: &[(u64, f64)], bus: f64) -> String {
    let mut out = format!(
        "# nThread 1 nGpus {} minBytes 8 maxBytes 1073741824 step: 2(factor)\n",
        if hosts.is_empty() { per_host } else { 1 }
    );
    if version == 2 {
        out = "# Collective test starting: all_gather_perf\n".to_string() + &out;
    }
    out += "#\n# Using devices\n";
    for (i, host) in hosts.iter().flat_map(|h| std::iter::repeat_n(h, per_host)).enumerate() {
        out += &format!("#  Rank {i:2} Group  0 Pid   1887 on {host:>10} device  0 [0x8d] NVIDIA A100-SXM4-80GB\n");
    }
    let columns = ["", "   redop", "   redop    root"][version];
    out += &format!(
        "#\n#    out-of-place      in-place\n#       size         count      type{columns}     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    );
    out += "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)\n";
    for (bytes, us) in rows {
        let extra = ["", "     sum", "    none      -1"][version];
        let algbw = *bytes as f64 / us / 1e3;
        out += &format!(
            "  {bytes:>12} {:>12}     float{extra}   {us:.2} {algbw:.2} {:.2}      0   {us:.2} {algbw:.2} {:.2}      0\n",
            bytes / 4,
            algbw * bus,
            algbw * bus
        );
    }
    out + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100.0\n#\n"
}

#[test]
fn logs_of_nccl_tests() {
    let rows = [(8, 40.0), (1 << 20, 93.0), (1 << 30, 8193.0)];
    let at = |operation, devices, nodes| Measured { operation, devices, nodes, bytes: 1 << 30, seconds: 8193e-6 };
    let ring = 1.75;
    assert_eq!(parse_nccl_tests(&log(1, &["a"], 8, &rows, ring)), Ok(at(Operation::AllReduce, 8, 1)));
    assert_eq!(parse_nccl_tests(&log(0, &["a", "b"], 8, &rows, 1.875)), Ok(at(Operation::AllReduce, 16, 2)));
    assert_eq!(parse_nccl_tests(&log(2, &["a", "b"], 4, &rows, 0.875)), Ok(at(Operation::AllGather, 8, 2)));
    // One process that drives all devices, and the prefix of mpirun before each line.
    assert_eq!(parse_nccl_tests(&log(1, &[], 8, &rows, ring)), Ok(at(Operation::AllReduce, 8, 1)));
    let prefixed: String = log(1, &["a"], 8, &rows, ring).lines().map(|l| format!("[1,0]<stdout>:{l}\n")).collect();
    assert_eq!(parse_nccl_tests(&prefixed), Ok(at(Operation::AllReduce, 8, 1)));
    // Without a name, the ratio of the bandwidths identifies the operation.
    assert_eq!(parse_nccl_tests(&log(1, &["a"], 8, &rows, 0.875)), Ok(at(Operation::AllGather, 8, 1)));
    assert_eq!(parse_nccl_tests(&log(1, &["a"], 8, &rows, 1.0)), Ok(at(Operation::Broadcast, 8, 1)));
    assert_eq!(parse_nccl_tests(&log(1, &["a"], 2, &rows, 1.0)), Ok(at(Operation::AllReduce, 2, 1)));
    for text in [
        String::new(),
        "1 2 3 4 5 6 7 8".into(),
        log(1, &["a"], 8, &[], ring),
        log(1, &["a"], 1, &rows, 0.0),
        log(1, &["a"], 1, &rows, 1.0),
    ] {
        assert_eq!(parse_nccl_tests(&text), Err(ClusterError::NoMeasurements), "{text}");
    }
}

#[test]
fn a_measurement_sets_the_bandwidth_that_explains_it() {
    let explains = |group: &Group, m: &Measured| {
        let link = axis_link(group, m.nodes, m.devices / m.nodes, &Mesh::new(&[("a", m.devices)]), &[AxisId(0)]);
        (best(m.operation, m.bytes, &link).seconds / m.seconds - 1.0).abs() < 0.01
    };
    let node = preset("dgx-a100").unwrap().groups.remove(0);
    let measured = |operation, devices, nodes, seconds| Measured { operation, devices, nodes, bytes: 1 << 30, seconds };
    // As fast as the table that the constants were fitted to, and half as fast.
    for (seconds, most, least) in [(8193e-6, 310e9, 290e9), (16300e-6, 155e9, 145e9)] {
        let mut group = node.clone();
        let m = measured(Operation::AllReduce, 8, 1, seconds);
        fit(&mut group, &m).unwrap();
        assert!(explains(&group, &m));
        assert!((least..most).contains(&group.intra_node.bytes_per_s), "{}", group.intra_node.bytes_per_s);
        assert_eq!(group.inter_node, node.inter_node);
    }
    let mut group = node.clone();
    let m = measured(Operation::AllGather, 16, 2, 0.05);
    fit(&mut group, &m).unwrap();
    group.nodes = 2;
    assert!(explains(&group, &m));
    assert_eq!(group.intra_node, node.intra_node);
    let refused = |m: Measured| fit(&mut node.clone(), &m).unwrap_err();
    assert!(matches!(refused(measured(Operation::AllReduce, 8, 1, 1e-6)), ClusterError::TooFast { .. }));
    assert!(matches!(refused(measured(Operation::AllReduce, 16, 1, 1.0)), ClusterError::OtherDevices { .. }));
    assert!(matches!(refused(measured(Operation::AllReduce, 15, 2, 1.0)), ClusterError::OtherDevices { .. }));
}

proptest! {
    #[test]
    fn any_text_is_answered(text in "\\PC*", number in any::<u64>()) {
        let _ = (parse_gpus(&text), parse_topology(&text), parse_nccl_tests(&text));
        let _ = (parse_rate(&text), parse_cores(&text), parse_memory(&text));
        let _ = parse_gpus(&format!("{text}, {number} GiB"));
        let _ = parse_topology(&format!("\tGPU0\tGPU1\nGPU0\t{text}\nGPU1\tNV{number}\tX\n"));
        let _ = parse_nccl_tests(&format!("# nThread {number} nGpus {number}\n# size count type time algbw busbw\n{text}\n"));
    }
}
