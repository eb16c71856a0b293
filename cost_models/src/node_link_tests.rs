//! The constants that groups get, and properties of all constants.

use super::*;
use crate::catalogue::preset;

fn of(text: &str) -> &'static NodeLink {
    NodeLink::of(&preset(text).unwrap().groups[0])
}

#[test]
fn kinds_by_name_and_device() {
    let table = [
        ("p3.16xlarge", "NVLink 2, hybrid cube mesh"),
        ("dgx-2", "NVLink 2, switched"),
        ("dgx-a100:4", "NVLink 3, switched"),
        ("polaris", "NVLink, full mesh"),
        ("dgx-h100", "NVLink 4, switched"),
        ("dgx-h200", "NVLink 4, switched"),
        ("p6-b200", "NVLink 5, switched"),
        ("8xMI300X", "xGMI, full mesh"),
        ("frontier", "Infinity Fabric"),
        ("4x8xL40S", "PCIe"),
        ("local:4", "shared memory"),
    ];
    for (text, name) in table {
        assert_eq!(of(text).name, name, "{text}");
    }
    // An unknown kind says nothing, but the device may.
    for (text, name) in [("dgx-h100", "NVLink 4, switched"), ("8xL40S", "PCIe"), ("local:2", "shared memory")] {
        let mut group = preset(text).unwrap().groups.remove(0);
        group.intra_node.kind = "string and cups".to_string();
        assert_eq!(NodeLink::of(&group).name, name, "{text}");
    }
    let mut unknown = preset("dgx-a100").unwrap().groups.remove(0);
    unknown.device.name = "abacus".to_string();
    assert_eq!(NodeLink::of(&unknown).name, "NVLink 3, switched");
}

#[test]
fn rings_of_wired_devices() {
    let parts = |text: &str, in_node: u64| (2..=in_node).map(|n| of(text).ring_part(n, in_node)).collect::<Vec<_>>();
    assert_eq!(parts("p3.16xlarge", 8).map_six(), [1.0, 2.0, 4.0, 1.65, 2.0, 4.0, 6.0]);
    assert_eq!(parts("polaris", 4), [1.0 / 3.0, 2.0 / 3.0, 1.0]);
    assert_eq!(parts("dgx-a100", 8), [1.0; 7]);
    // Two of four devices have a third of the links, even if the other two belong to somebody else.
    let pair = preset("polaris:1/2").unwrap().groups.remove(0);
    assert_eq!((pair.intra_node.bytes_per_s, NodeLink::of(&pair).ring_part(2, 2)), (100e9, 1.0));
}

#[test]
fn networks_by_name() {
    let of = |text: &str| Network::of(&preset(text).unwrap().groups[0]);
    for (text, name) in
        [("p4d", "EFA of P4"), ("p4de", "EFA of P4"), ("p5", "EFA"), ("p6-b200", "EFA"), ("dgx-a100", INFINIBAND.name)]
    {
        assert_eq!(of(text).name, name, "{text}");
    }
    for network in [&EFA, &EFA_OF_P4, &INFINIBAND] {
        assert!(network.protocols.contains(&Protocol::Simple) && network.efficiency < 1.0, "{}", network.name);
    }
}

trait MapSix {
    fn map_six(self) -> [f64; 7];
}

impl MapSix for Vec<f64> {
    fn map_six(self) -> [f64; 7] {
        std::array::from_fn(|i| (self[i] * 600.0).round() / 100.0)
    }
}

#[test]
fn constants_are_sound() {
    for kind in [
        &HYBRID_CUBE,
        &SWITCH_2,
        &SWITCH_3,
        &MESH_3,
        &SWITCH_4,
        &SWITCH_5,
        &XGMI,
        &INFINITY_FABRIC,
        &PCI_EXPRESS,
        &MEMORY,
    ] {
        let name = kind.name;
        assert!(!kind.protocols.is_empty() && kind.exposed_rounds >= 0.0 && kind.send_start_s >= 0.0, "{name}");
        for figures in kind.protocols {
            assert!(figures.efficiency > 0.0 && figures.efficiency < 1.0, "{name} {:?}", figures.protocol);
            assert!(figures.network_part > 0.0 && figures.network_part <= 1.0, "{name} {:?}", figures.protocol);
            assert!(figures.start_s > 0.0 && figures.hop > 0.0 && figures.network_hop > 0.0, "{name}");
        }
        // A protocol that reaches more of the bandwidth must have longer hops, or the others would be useless.
        for pair in kind.protocols.windows(2) {
            assert!(pair[0].efficiency < pair[1].efficiency && pair[0].hop < pair[1].hop, "{name}");
        }
        // The one protocol that every network carries.
        assert!(kind.protocols.iter().any(|f| f.protocol == Protocol::Simple), "{name}");
        if let Some(sharp) = kind.sharp {
            assert!(sharp.efficiency > 0.0 && sharp.efficiency < 1.0 && sharp.start_s > 0.0, "{name}");
        }
    }
}
