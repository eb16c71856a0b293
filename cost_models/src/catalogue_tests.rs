//! Table tests of the catalogue: every preset is sound, some are checked figure by figure, and wrong text is refused
//! for the right reason.

use super::*;
use altiplano_ir::dtype::DType;
use std::collections::BTreeSet;

#[test]
fn every_preset_is_sound() {
    for (name, description) in presets() {
        assert!(!description.is_empty(), "{name}");
        let cluster = preset(&format!("{name}:2")).unwrap();
        assert_eq!(cluster.name, format!("{name}:2"));
        assert_eq!(cluster.groups.len(), 1, "{name}");
        let group = &cluster.groups[0];
        assert_eq!(group.num_devices(), if name == "local" { 2 } else { 2 * group.devices_per_node }, "{name}");
        for positive in [
            group.intra_node.bytes_per_s,
            group.intra_node.latency_s,
            group.inter_node.bytes_per_s,
            group.inter_node.latency_s,
            f64::from(group.inter_node.nics),
        ] {
            assert!(positive.is_finite() && positive > 0.0, "{name}");
        }
        // No machine's network is faster than the links inside it.
        let network = group.inter_node.bytes_per_s * f64::from(group.inter_node.nics);
        let inside = group.intra_node.bytes_per_s * f64::from(group.devices_per_node);
        assert!(network < inside, "{name}");
    }
    let names: BTreeSet<&str> = presets().iter().map(|p| p.0).collect();
    assert_eq!(names.len(), presets().len(), "names are distinct");
}

#[test]
fn every_device_is_sound() {
    for name in device_names() {
        let device = device(&name).unwrap();
        assert!(device.memory_bytes > 1 << 32, "{name}");
        assert!(device.memory_bytes_per_s > 1e9 && device.memory_bytes_per_s < 1e13, "{name}");
        let f32_peak = device.peak_flops[&DType::F32];
        for (dtype, &peak) in &device.peak_flops {
            assert!(peak > 1e10 && peak < 1e16, "{name} {dtype}");
            assert!(dtype.bytes() > 4 || peak >= f32_peak, "{name}: {dtype} is not slower than f32");
        }
        let (cache, units) = (device.l2_bytes.unwrap(), device.multiprocessors.unwrap());
        assert!((1 << 20..1 << 28).contains(&cache) && (1..1000).contains(&units), "{name}");
    }
}

#[test]
fn figures() {
    // (preset, devices, device, peak f16, memory bytes, intra bytes/s, node's network bytes/s)
    let table = [
        ("p3.16xlarge:8", 64, "V100-SXM2-16GB", 125e12, 16.945e9, 150e9, 3.125e9),
        ("dgx-1:1", 8, "V100-SXM2-32GB", 125e12, 34.09e9, 150e9, 50e9),
        ("p4d.24xlarge:3", 24, "A100-SXM-40GB", 312e12, 42.406e9, 300e9, 50e9),
        ("p4de.24xlarge:1", 8, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 50e9),
        ("dgx-a100:16", 128, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("a100-800gbps:64", 512, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 100e9),
        ("dgx-h100:4", 32, "H100-SXM", 989.5e12, 85.52e9, 450e9, 400e9),
        ("p5.48xlarge:2048", 16384, "H100-SXM", 989.5e12, 85.52e9, 450e9, 400e9),
        ("dgx-a100", 8, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("dgx-a100/8", 8, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("dgx-a100/3", 3, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("dgx-a100:1/2", 2, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("dgx-2:2", 32, "V100-SXM3-32GB", 125e12, 34.09e9, 150e9, 100e9),
        ("dgx-h200:2", 16, "H200", 989.5e12, 150.755e9, 450e9, 400e9),
        ("dgx-b200:2", 16, "B200", 2250e12, 192.266e9, 900e9, 400e9),
        ("p6-b200:4", 32, "B200", 2250e12, 192.266e9, 900e9, 400e9),
        ("p4d:2", 16, "A100-SXM-40GB", 312e12, 42.406e9, 300e9, 50e9),
        ("p4de:1/2", 2, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 50e9),
        ("p5/4", 4, "H100-SXM", 989.5e12, 85.52e9, 450e9, 400e9),
        ("polaris:10", 40, "A100-SXM-40GB", 312e12, 42.406e9, 300e9, 50e9),
        ("perlmutter:10", 40, "A100-SXM-40GB", 312e12, 42.406e9, 300e9, 100e9),
        ("perlmutter:1/3", 3, "A100-SXM-40GB", 312e12, 42.406e9, 200e9, 100e9),
        ("frontier:9", 72, "MI250X-GCD", 191.5e12, 68.703e9, 100e9, 100e9),
        // Counts of devices.
        ("8xA100-80", 8, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("4x8xA100-80", 32, "A100-SXM-80GB", 312e12, 85.098e9, 300e9, 200e9),
        ("2x4xa100-sxm-40gb", 8, "A100-SXM-40GB", 312e12, 42.406e9, 300e9, 100e9),
        ("8xV100-16", 8, "V100-SXM2-16GB", 125e12, 16.945e9, 150e9, 50e9),
        ("16xH100", 16, "H100-SXM", 989.5e12, 85.52e9, 450e9, 800e9),
        ("2x8xL40S", 16, "L40S", 362e12, 47.697e9, 31.5e9, 12.5e9),
        ("1x4090", 1, "RTX-4090", 165.2e12, 25.394e9, 31.5e9, 12.5e9),
        ("8xMI300X", 8, "MI300X", 1307.4e12, 206.142e9, 448e9, 400e9),
        ("4xMI300X", 4, "MI300X", 1307.4e12, 206.142e9, 192e9, 200e9),
    ];
    for (text, devices, device, f16, memory, intra, network) in table {
        let cluster = preset(text).unwrap();
        let group = &cluster.groups[0];
        assert_eq!(cluster.num_devices(), devices, "{text}");
        assert_eq!(group.device.name, device, "{text}");
        assert_eq!(group.device.peak_flops[&DType::F16], f16, "{text}");
        assert_eq!(group.device.memory_bytes as f64, memory, "{text}");
        assert_eq!(group.intra_node.bytes_per_s, intra, "{text}");
        assert_eq!(group.inter_node.bytes_per_s * f64::from(group.inter_node.nics), network, "{text}");
    }
}

#[test]
fn local_workers_are_devices_of_one_node() {
    let cluster = preset("local:7").unwrap();
    let group = &cluster.groups[0];
    assert_eq!((group.nodes, group.devices_per_node), (1, 7));
    assert_eq!(group.device.memory_bytes, 6 << 30);
    assert_eq!(group.device.peak_flops[&DType::F32], 50e9);
    assert_eq!((group.intra_node.bytes_per_s, group.intra_node.latency_s), (4e9, 5e-6));
}

#[test]
fn wrong_text_is_refused() {
    let message = |text: &str| preset(text).unwrap_err().to_string();
    for text in ["", "dgx-a101:2", "Local:4", ":4", "tpu-v4:8", "dgx-a100 :2"] {
        assert!(matches!(preset(text), Err(ClusterError::UnknownPreset { .. })), "{text}");
    }
    assert!(message("dgx-a101:2").contains("did you mean `dgx-a100`"));
    assert!(message("tpu-v4:8").contains("p3.16xlarge"), "the list is given");
    for text in ["local:", "local:0", "local:-1", "local:+1", "local:1.5", "local:x", "local:1000001", "local: 4"] {
        assert!(matches!(preset(text), Err(ClusterError::Count { .. })), "{text}");
    }
    for text in ["8xabacus", "8x", "8xA100-80:2", "4x8xA100-80/2", "4x8x8xA100-80", "8x A100-80"] {
        assert!(matches!(preset(text), Err(ClusterError::UnknownCounted { .. })), "{text}");
    }
    assert!(message("8xH100-81").contains("did you mean `H100-80`"));
    for text in ["0xA100-80", "0x8xA100-80", "8x0xA100-80", "1000001xH100", "1000x1001xH100", "99999999999xH100"] {
        assert!(matches!(preset(text), Err(ClusterError::Count { .. })), "{text}");
    }
    assert!(matches!(preset("xA100-80"), Err(ClusterError::UnknownPreset { .. })));
    for text in ["dgx-a100:125001", "dgx-a100:99999999999999999999", "dgx-a100:2:2", "dgx-a100:/2", "dgx-a100:"] {
        assert!(matches!(preset(text), Err(ClusterError::Count { .. })), "{text}");
    }
    assert!(matches!(preset("dgx-a100:2/2"), Err(ClusterError::PartOfSeveralNodes { .. })));
    for text in ["dgx-a100:1/0", "dgx-a100:1/9", "dgx-a100:1/", "dgx-a100:1/x", "dgx-a100:1/2/2", "local:4/5"] {
        assert!(matches!(preset(text), Err(ClusterError::PartOfNode { .. })), "{text}");
    }
}

/// No device gives tensors more memory than it has. The part that it keeps is small: a few hundredths, and a context.
#[test]
fn tensors_can_use_most_of_a_gpu() {
    for name in device_names() {
        let device = device(&name).unwrap();
        assert_eq!(device.reserved.is_some(), device.kind.is_gpu(), "{name}");
        assert_eq!(device.architecture.is_some(), device.kind.is_gpu(), "{name}");
        let mut cluster = preset("dgx-h100:1").unwrap();
        cluster.groups[0].device = device.clone();
        let usable = cluster.usable_bytes(&cluster.groups[0]) as f64 / device.memory_bytes as f64;
        assert!(usable <= 1.0 && usable > 0.88, "{name}: {usable}");
        // A single device has no peer to communicate with.
        cluster.groups[0].devices_per_node = 1;
        let alone = cluster.usable_bytes(&cluster.groups[0]) as f64 / device.memory_bytes as f64;
        assert!(alone > usable || !device.kind.is_gpu(), "{name}");
    }
}
