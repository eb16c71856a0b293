//! Cluster files: one that has everything, optional parts, every mistake with its place, and printing.

use super::*;
use crate::catalogue::{preset, presets};
use proptest::prelude::*;

const GROUP: &str = r#"name = "one"
[[group]]
nodes = 4
devices_per_node = 8
device = "A100-SXM-80GB"
intra_node = { kind = "nvswitch", bytes_per_s = 300e9, latency_s = 3e-6 }
inter_node = { bytes_per_s = 25e9, nics = 8, latency_s = 8e-6 }
price_per_hour = 32.8
"#;

const TWO_GROUPS: &str = r#"
name = "two kinds of node"

[[group]]
nodes = 4
devices_per_node = 8
device = "A100-SXM-80GB"
intra_node = { kind = "nvswitch", bytes_per_s = 300e9, latency_s = 3e-6 }
inter_node = { bytes_per_s = 25e9, nics = 8, latency_s = 8e-6 }
price_per_hour = 32.8

[[group]]
nodes = 2
devices_per_node = 4
device = "my card"
intra_node = { bytes_per_s = 32_000_000_000, latency_s = 0 }
inter_node = { bytes_per_s = 12.5e9, latency_s = 1e-5 }

[device."my card"]
memory_bytes = 24e9
memory_bytes_per_s = 1e12
peak_flops = { f32 = 30e12, bf16 = 120e12, f8e4m3fn = 240e12 }

[between_groups]
bytes_per_s = 12.5e9
latency_s = 2e-5
"#;

#[test]
fn a_file_with_everything() {
    let cluster = parse(TWO_GROUPS).unwrap();
    assert_eq!((cluster.name.as_str(), cluster.groups.len(), cluster.num_devices()), ("two kinds of node", 2, 40));
    assert_eq!(cluster.groups[0].device, catalogue::device("A100-SXM-80GB").unwrap());
    assert_eq!(cluster.groups[0].price_per_hour, Some(32.8));
    let own = &cluster.groups[1];
    assert_eq!(own.device.name, "my card");
    assert_eq!(own.device.memory_bytes, 24_000_000_000);
    assert_eq!(own.device.peak_flops, [(DType::F32, 30e12), (DType::BF16, 120e12), (DType::F8E4M3FN, 240e12)].into());
    assert_eq!(own.device.launch_s, GPU_LAUNCH_S);
    assert_eq!((own.intra_node.bytes_per_s, own.intra_node.kind.as_str()), (32e9, ""));
    assert_eq!((own.inter_node.nics, own.price_per_hour), (1, None));
    assert_eq!(cluster.between_groups, Some(BetweenGroups { bytes_per_s: 12.5e9, latency_s: 2e-5 }));
    assert_eq!((cluster.devices_of(0), cluster.devices_of(1)), (0..32, 32..40));
}

#[test]
fn what_a_file_may_say_of_its_network_and_its_caches() {
    let text = GROUP
        .replace("latency_s = 8e-6", "latency_s = 8e-6, kind = \"efa\", oversubscription = 2.5")
        .replace("A100-SXM-80GB", "own")
        + "[device.own]\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e9\npeak_flops = { f32 = 1e9 }\nl2_bytes = 40e6\nmultiprocessors = 108\n";
    let group = parse(&text).unwrap().groups.remove(0);
    assert_eq!((group.inter_node.oversubscription, group.inter_node.kind.as_str()), (2.5, "efa"));
    assert_eq!((group.device.l2_bytes, group.device.multiprocessors), (Some(40_000_000), Some(108)));
    let plain = parse(GROUP).unwrap().groups.remove(0);
    assert_eq!(plain.inter_node.oversubscription, 1.0);
    assert!(!print(&parse(GROUP).unwrap()).contains("oversubscription"), "what is usual is not printed");
}

#[test]
fn power_and_storage_are_read_and_printed() {
    let own = "[device.own]\nlike = \"A100-SXM-80GB\"\nwatts = 350\n";
    let storage =
        "[storage]\nbytes_per_s = 1e11\nmetadata_ops_per_s = 5e4\nnode_disk = { bytes = 7e12, bytes_per_s = 2e10 }\n";
    let cluster = parse(&format!("{}{own}{storage}", GROUP.replace("A100-SXM-80GB", "own"))).unwrap();
    assert_eq!(cluster.groups[0].device.watts, Some(350.0));
    let read = cluster.storage.unwrap();
    assert_eq!((read.bytes_per_s, read.node_bytes_per_s, read.metadata_ops_per_s), (1e11, 1e11, Some(5e4)));
    assert_eq!(read.node_disk, Some(NodeDisk { bytes: 7_000_000_000_000, bytes_per_s: 2e10 }));
    assert_eq!(parse(&print(&cluster)), Ok(cluster));
    assert_eq!(parse(GROUP).unwrap().groups[0].device.watts, Some(400.0), "the catalogue's");
    assert_eq!(parse(GROUP).unwrap().storage, None);
    for (bad, key) in
        [("bytes_per_s = 0", "storage.bytes_per_s"), ("bytes_per_s = 1\nnode_bytes_per_s = -1", "node_bytes_per_s")]
    {
        let error = parse(&format!("{GROUP}\n[storage]\n{bad}\n")).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("line"), "{error}");
    }
}

#[test]
fn links_that_nothing_crosses_may_be_left_out() {
    let one = |rest: &str| {
        parse(&format!("name = \"x\"\n[[group]]\ndevice = \"H100-SXM\"\n{rest}")).map(|mut c| c.groups.remove(0))
    };
    let alone = one("nodes = 1\ndevices_per_node = 1").unwrap();
    assert!(alone.intra_node.bytes_per_s > 0.0 && alone.inter_node.bytes_per_s > 0.0);
    let node = one("nodes = 1\ndevices_per_node = 2\nintra_node = { bytes_per_s = 1e9, latency_s = 1e-6 }").unwrap();
    assert_eq!((node.inter_node.bytes_per_s, node.inter_node.latency_s), (1e9, 1e-6));
    let thin = one("nodes = 2\ndevices_per_node = 1\ninter_node = { bytes_per_s = 1e9, nics = 2, latency_s = 1e-6 }");
    assert_eq!(thin.unwrap().intra_node.bytes_per_s, 2e9);
    assert!(matches!(one("nodes = 1\ndevices_per_node = 2"), Err(ClusterError::NoLink { key: "intra_node", .. })));
    let inside_only = "nodes = 2\ndevices_per_node = 2\nintra_node = { bytes_per_s = 1e9, latency_s = 1e-6 }";
    assert!(matches!(one(inside_only), Err(ClusterError::NoLink { key: "inter_node", .. })));
}

/// The message for `GROUP` with `from` replaced by `to`.
fn message(from: &str, to: &str) -> String {
    assert!(GROUP.contains(from), "{from}");
    match parse(&GROUP.replace(from, to)) {
        Ok(_) => format!("{from} -> {to} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn mistakes_are_told_with_their_place() {
    // (text of the good file, what stands there instead, parts of the message)
    let table: &[(&str, &str, &[&str])] = &[
        ("nodes = 4", "nodes = 0", &["line 3, column 9", "`nodes` must be at least 1"]),
        ("nodes = 4", "nodes = -4", &["line 3, column 9"]),
        ("nodes = 4", "nodes = 4.5", &["line 3, column 9"]),
        ("nodes = 4", "nodes = \"4\"", &["line 3, column 9"]),
        ("nodes = 4", "nodes = 125001", &["line 2", "more than 1000000 devices"]),
        ("nodes = 4", "nodes = 9223372036854775807", &["line 3, column 9", "more than 1000000 devices"]),
        ("nodes = 4", "nodes = 99999999999999999999", &["line 3"]),
        ("nodes = 4\n", "", &["line 2", "nodes"]),
        ("nodes = 4", "nodes = 4\nnodes = 4", &["line 4", "duplicate"]),
        ("nodes = 4", "node = 4", &["line 3, column 1", "node"]),
        ("nodes = 4", "nodes =", &["line 3"]),
        ("devices_per_node = 8", "devices_per_node = 0", &["line 4, column 20"]),
        ("A100-SXM-80GB", "A100-SXM-80G", &["line 5, column 10", "did you mean `A100-SXM-80GB`"]),
        ("A100-SXM-80GB", "abacus", &["line 5, column 10", "V100-SXM2-16GB", "[device.\"abacus\"]"]),
        ("300e9", "0.0", &["line 6", "`intra_node.bytes_per_s` is 0"]),
        ("300e9", "-1e9", &["line 6, column 49", "above 0"]),
        ("300e9", "nan", &["line 6", "finite"]),
        ("300e9", "inf", &["line 6", "finite"]),
        ("3e-6", "-3e-6", &["line 6", "`intra_node.latency_s` is -0.000003"]),
        ("3e-6", "inf", &["line 6", "0 or more"]),
        ("kind =", "sort =", &["line 6", "sort"]),
        ("25e9", "-0.0", &["line 7", "`inter_node.bytes_per_s`"]),
        ("nics = 8", "nics = 0", &["line 7", "`inter_node.nics` must be at least 1"]),
        ("8e-6", "-8e-6", &["line 7", "`inter_node.latency_s`"]),
        ("latency_s = 8e-6", "latency_s = 8e-6, oversubscription = 0.5", &["line 7", "`inter_node.oversubscription`"]),
        ("latency_s = 8e-6", "latency_s = 8e-6, oversubscription = nan", &["line 7", "1 or more"]),
        ("32.8", "-1.0", &["line 8", "`price_per_hour`"]),
        ("name = \"one\"\n", "", &["line 1", "name"]),
        ("name = \"one\"", "name = 1", &["line 1, column 8"]),
        ("[[group]]", "[group]", &["line 2"]),
        ("[[group]]", "[[groups]]", &["line 2", "groups"]),
    ];
    for (from, to, parts) in table {
        let message = message(from, to);
        for part in *parts {
            assert!(message.contains(part), "{to:?}: {message:?} lacks {part:?}");
        }
    }
}

#[test]
fn mistakes_in_device_tables() {
    // (memory_bytes, memory_bytes_per_s, peak_flops, rest, parts of the message)
    let table = [
        ("0", "1e12", "{ f32 = 1e13 }", "", "`memory_bytes` is 0"),
        ("1e9", "-1", "{ f32 = 1e13 }", "", "`memory_bytes_per_s` is -1"),
        ("1e9", "1e12", "{ bf16 = 1e13 }", "", "`spare` needs `f32`"),
        ("1e9", "1e12", "{ f32 = 0 }", "", "`peak_flops` is 0"),
        ("1e9", "1e12", "{ f32 = 1e13, fp8 = 1e14 }", "", "fp8"),
        ("1e9", "1e12", "{ f32 = 1e13 }", "launch_s = -1e-6", "`launch_s`"),
        ("1e9", "1e12", "{ f32 = 1e13 }", "cores = 5", "cores"),
        ("1e9", "1e12", "{ f32 = 1e13 }", "l2_bytes = -5", "`l2_bytes`"),
        ("1e9", "1e12", "{ f32 = 1e13 }", "multiprocessors = 0", "`multiprocessors`"),
    ];
    for (memory, rate, peaks, rest, part) in table {
        // No group uses the table, but it is checked all the same.
        let text = format!(
            "{GROUP}[device.spare]\nmemory_bytes = {memory}\nmemory_bytes_per_s = {rate}\npeak_flops = {peaks}\n{rest}"
        );
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("line "), "{error:?} lacks {part:?}");
    }
}

#[test]
fn groups_are_counted_together_and_need_a_link() {
    assert_eq!(parse("name = \"none\""), Err(ClusterError::NoGroup));
    assert_eq!(parse("name = \"none\"\ngroup = []"), Err(ClusterError::NoGroup));
    let cut = TWO_GROUPS.split("[between_groups]").next().unwrap();
    assert_eq!(parse(cut), Err(ClusterError::NoLinkBetweenGroups));
    let slow = TWO_GROUPS.replace("[between_groups]\nbytes_per_s = 12.5e9", "[between_groups]\nbytes_per_s = 0");
    assert!(matches!(parse(&slow), Err(ClusterError::NotPositive { key: "bytes_per_s", .. })));
    let many = TWO_GROUPS.replace("nodes = 4", "nodes = 124999").replace("nodes = 2", "nodes = 3");
    assert!(matches!(parse(&many), Err(ClusterError::TooManyDevices { .. })));
}

#[test]
fn a_table_of_the_file_comes_before_the_catalogue() {
    let text = GROUP.to_string()
        + "[device.\"A100-SXM-80GB\"]\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e9\npeak_flops = { f32 = 1e9 }\n";
    let file = parse(&text).unwrap();
    assert_eq!(file.groups[0].device.memory_bytes, 1_000_000_000);
    assert_eq!(parse(&print(&file)), Ok(file));
}

/// A device may be like one of the catalogue except for its own figures, under that name or another.
#[test]
fn a_device_is_like_another() {
    let text = "[device.A100-SXM-80GB]\nlike = \"A100-SXM-80GB\"\nmemory_bytes = 64e9\n[device.A100-SXM-80GB.constants]\nskew_s = 0\n\
                [[device.A100-SXM-80GB.fit]]\ntable = \"x.csv\"\n[device.other]\nlike = \"H200\"\n";
    let devices = parse_devices(text).unwrap();
    let mut cluster = preset("dgx-a100:1").unwrap();
    let catalogued = cluster.groups[0].device.clone();
    assert!(devices.apply(&mut cluster));
    let constants = Constants { skew_s: 0.0, ..catalogue::constants("A100-SXM-80GB") };
    // The reserved memory is known only for the catalogue's own memory size.
    let expect = Device { memory_bytes: 64_000_000_000, reserved: None, constants: Some(constants), ..catalogued };
    assert_eq!(cluster.groups[0].device, expect);
    let mut other = preset("dgx-h200:1").unwrap();
    assert!(!devices.apply(&mut other));
    assert_eq!(other, preset("dgx-h200:1").unwrap(), "a device of another name changes nothing");

    let wrong = |text: &str, says: &str| {
        let error = parse_devices(text).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    wrong("", "at least one [device] table");
    wrong("[device.x]\nlike = \"A100\"", "line 2, column 8: there is no device `A100` to be like; did you mean `A100-");
    wrong("[device.x]\nmemory_bytes = 1", "device `x` needs `peak_flops`, or `like`");
    wrong(
        "[device.x]\nlike = \"H200\"\nconstants = { speed = 1 }",
        "there is no constant `speed`; known: matmul_efficiency",
    );
    wrong("[device.x]\nlike = \"H200\"\nconstants = { memory_efficiency = 0 }", "`memory_efficiency` is 0");
    wrong("[device.x]\nlike = \"H200\"\nconstants = { skew_s = nan }", "`skew_s` is NaN");
    wrong("[device.x]\nlike = \"H200\"\nconstants = { memory_efficiency = 3 }", "is 3, but must be at most 1");
    wrong("[device.x]\nlike = \"H200\"\nconstants = { dispatch_s = 1e300 }", "must be at most 1");
}

#[test]
fn what_is_printed_reads_back_the_same() {
    let two = parse(TWO_GROUPS).unwrap();
    assert_eq!(parse(&print(&two)).as_ref(), Ok(&two));
    for (name, _) in presets() {
        let cluster = preset(&format!("{name}:3")).unwrap();
        let text = print(&cluster);
        assert!(!text.contains("[device"), "devices of the catalogue are named only");
        assert_eq!(parse(&text), Ok(cluster), "{name}");
    }
}

proptest! {
    #[test]
    fn any_text_is_answered(text in "\\PC*") {
        // A random string is refused as a preset and as a file, without a panic.
        prop_assert!(preset(&text).is_err());
        prop_assert!(parse(&text).is_err());
    }

    #[test]
    fn any_cluster_reads_back_the_same(
        name in any::<String>(),
        device in any::<String>(),
        nodes in 1u32..1000,
        devices_per_node in 1u32..100,
        rates in prop::collection::vec(1e-3f64..1e18, 5),
        latency_s in 0.0f64..1.0,
        price in prop::option::of(0.0f64..1e6),
        memory_bytes in 1u64..1 << 53,
        oversubscription in prop_oneof![Just(1.0), 1.0f64..100.0],
        l2_bytes in prop::option::of(1u64..1 << 53),
        multiprocessors in prop::option::of(1u32..1000),
        kind in prop_oneof![Just(DeviceKind::Gpu), Just(DeviceKind::Cpu)],
        constants in prop::option::of(0.01f64..1.0),
    ) {
        let constants = constants.map(|part| Constants { memory_efficiency: part, skew_s: part, ..Constants::default() });
        let device = Device {
            name: device,
            kind,
            memory_bytes,
            memory_bytes_per_s: rates[0],
            peak_flops: [(DType::F32, rates[1]), (DType::F16, rates[2])].into(),
            launch_s: latency_s,
            l2_bytes,
            multiprocessors,
            watts: price.filter(|&p| p > 0.0),
            power_limit_watts: price.filter(|&p| p > 1.0),
            architecture: multiprocessors.map(|n| if n % 2 == 0 { Architecture::Nvidia(n) } else { Architecture::Amd(n) }),
            fused_attention: multiprocessors.filter(|n| n % 3 > 0).map(|n| n % 3 == 1),
            reserved: l2_bytes.map(|bytes| Reserved {
                context_bytes: bytes,
                communication_bytes: bytes / 2,
                allocator_bytes: bytes / 3,
            }),
            host_bytes_per_s: price.filter(|&p| p > 0.0),
            constants,
        };
        let group = Group {
            nodes,
            devices_per_node,
            device,
            intra_node: IntraNode { kind: name.clone(), bytes_per_s: rates[3], latency_s },
            inter_node: InterNode { kind: name.chars().rev().collect(), bytes_per_s: rates[4], nics: nodes, latency_s, oversubscription },
            host_memory_bytes: l2_bytes,
            price_per_hour: price,
            dispatch: None,
        };
        let storage = price.filter(|&p| p > 0.0).map(|p| DataStorage {
            bytes_per_s: rates[0],
            node_bytes_per_s: rates[1],
            metadata_ops_per_s: Some(p),
            node_disk: Some(NodeDisk { bytes: memory_bytes, bytes_per_s: rates[2] }),
        });
        let cluster = Cluster { name, groups: vec![group], between_groups: None, storage };
        prop_assert_eq!(parse(&print(&cluster)), Ok(cluster));
    }
}

/// A device's table says what its software and owner make of it.
#[test]
fn a_device_says_its_architecture_its_attention_and_its_power_limit() {
    let group = GROUP.replace("A100-SXM-80GB", "own");
    let table =
        "\n[device.own]\nlike = \"H100-SXM\"\nwatts = 700.0\npower_limit_watts = 500.0\nfused_attention = false\n";
    let cluster = parse(&format!("{group}{table}")).unwrap();
    let device = &cluster.groups[0].device;
    assert_eq!((device.architecture, device.fused_attention), (Some(Architecture::Nvidia(90)), Some(false)));
    assert_eq!((device.power_limit_watts, device.watts), (Some(500.0), Some(700.0)));
    assert_eq!(device.reserved, catalogue::device("H100-SXM").unwrap().reserved);
    // Nothing is reserved of a stated memory.
    let stated = parse(&format!("{group}{table}memory_bytes = 96e9\n")).unwrap();
    assert_eq!(stated.usable_bytes(&stated.groups[0]), 96_000_000_000);

    let limited = parse(include_str!("../../examples/clusters/h100-500w.toml")).unwrap();
    let device = &limited.groups[0].device;
    assert!(device.clock_part() < 0.9 && device.generation() == Some(Architecture::Nvidia(90)));

    let own = "\n[device.own]\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e9\npeak_flops = { f32 = 1e9, bf16 = 2e9 }\n";
    let read = |more: &str| parse(&format!("{group}{own}{more}")).map(|c| c.groups[0].device.generation());
    assert_eq!(read(""), Ok(Some(Architecture::Nvidia(80))));
    assert_eq!(read("architecture = \"gfx90a\"\n"), Ok(Some(Architecture::Amd(0x90a))));
    assert_eq!(read("kind = \"cpu\"\n"), Ok(None));
    let wrong = read("architecture = \"hopper\"\n").unwrap_err().to_string();
    assert!(wrong.contains("'hopper' is no architecture") && wrong.contains("sm_90"), "{wrong}");
}
