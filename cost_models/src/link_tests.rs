//! Links of meshes on known machines, worked out by hand, and properties of every mesh on every machine.

use super::*;
use crate::catalogue::{preset, presets};
use altiplano_ir::cluster::Routing;
use proptest::prelude::*;

fn group(text: &str) -> Group {
    preset(text).unwrap().groups.remove(0)
}

fn link(text: &str, axes: &[(&str, u32)], over: &[&str]) -> AxisLink {
    let group = group(text);
    let mesh = Mesh::new(axes);
    let over: Vec<AxisId> = over.iter().map(|name| mesh.find(name).unwrap()).collect();
    axis_link(&group, group.nodes, group.devices_per_node, &mesh, &over)
}

#[test]
fn rings_by_hand() {
    // (cluster, mesh, axes, bytes/s)
    type Case = (&'static str, &'static [(&'static str, u32)], &'static [&'static str], f64);
    let table: &[Case] = &[
        // The example of the documentation.
        ("p3.16xlarge:2", &[("data", 2), ("tensor", 8)], &["tensor"], 150e9),
        ("p3.16xlarge:2", &[("data", 2), ("tensor", 8)], &["data"], 3.125e9 / 8.0),
        ("p3.16xlarge:2", &[("data", 16)], &["data"], 3.125e9),
        ("p3.16xlarge:2", &[("data", 2), ("tensor", 8)], &["data", "tensor"], 3.125e9),
        // Four rings of two nodes with two devices on each.
        ("p3.16xlarge:2", &[("data", 4), ("tensor", 4)], &["data"], 3.125e9 / 4.0),
        // Wired NVLink: a part of the node's devices finds only a part of the links.
        ("p3.16xlarge:2", &[("data", 4), ("tensor", 4)], &["tensor"], 100e9),
        ("p3.16xlarge", &[("data", 4), ("tensor", 2)], &["tensor"], 25e9),
        // Switched NVLink gives all of it. Eight NICs serve eight rings, or one.
        ("dgx-a100:4", &[("data", 16), ("tensor", 2)], &["tensor"], 300e9),
        ("dgx-a100:4", &[("data", 4), ("tensor", 8)], &["data"], 25e9),
        ("dgx-a100:4", &[("data", 32)], &["data"], 200e9),
        // The network of this node is faster than one device's link inside it.
        ("local:4", &[("data", 2), ("tensor", 2)], &["data"], 4e9),
        // Groups that do not fill whole nodes: 4 x 6 devices on three nodes of eight. Node 1 holds parts of groups 1 and 2.
        ("dgx-a100:3", &[("data", 4), ("tensor", 6)], &["tensor"], 100e9),
    ];
    for (cluster, mesh, axes, expect) in table {
        let found = link(cluster, mesh, axes).ring_bytes_per_s();
        assert!((found / expect - 1.0).abs() < 1e-12, "{cluster} {mesh:?} {axes:?}: {found} not {expect}");
    }
}

#[test]
fn a_link_says_what_it_spans() {
    // (cluster, mesh, axes, devices, nodes, devices on a node)
    type Case = (&'static str, &'static [(&'static str, u32)], &'static [&'static str], [u64; 3]);
    let table: &[Case] = &[
        ("dgx-a100:4", &[("data", 32)], &["data"], [32, 4, 8]),
        ("dgx-a100:4", &[("data", 4), ("tensor", 8)], &["data"], [4, 4, 1]),
        ("dgx-a100:4", &[("data", 4), ("tensor", 8)], &["tensor"], [8, 1, 8]),
        ("dgx-a100:4", &[("data", 16), ("tensor", 2)], &["data"], [16, 4, 4]),
        ("dgx-a100:3", &[("data", 4), ("tensor", 6)], &["tensor"], [6, 2, 6]),
    ];
    for (cluster, mesh, axes, expect) in table {
        let found = link(cluster, mesh, axes);
        assert_eq!([found.devices, found.nodes, found.devices_on_node], *expect, "{cluster} {mesh:?} {axes:?}");
        assert_eq!(found.inside_latency_s, 3e-6);
        assert_eq!(found.across_latency_s, if found.nodes > 1 { 8e-6 } else { 0.0 });
    }
}

#[test]
fn exchanges_share_the_network_among_all_pairs() {
    // 16 devices on two nodes: each of a node's 8 sends 8 of its 15 parts out through 200e9 bytes/s.
    let found = link("dgx-a100:2", &[("expert", 16)], &["expert"]);
    assert!((found.all_to_all_bytes_per_s() - 200e9 * 15.0 / 64.0).abs() < 1.0);
    assert_eq!(found.ring_bytes_per_s(), 200e9);
    // One device per node: a ring and an exchange send equally much.
    let found = link("dgx-a100:2", &[("data", 2), ("tensor", 8)], &["data"]);
    assert_eq!(found.all_to_all_bytes_per_s(), found.ring_bytes_per_s());
    // Inside a node, the switch carries both alike.
    let found = link("dgx-a100:1", &[("expert", 8)], &["expert"]);
    assert_eq!(found.all_to_all_bytes_per_s(), 300e9);
}

#[test]
fn a_part_of_each_node_gets_its_part_of_the_network() {
    let group = group("dgx-a100:2");
    let mesh = Mesh::new(&[("data", 2), ("tensor", 4)]);
    // Four of eight devices a node: half of 200e9 for four rings.
    assert_eq!(axis_link(&group, 2, 4, &mesh, &[AxisId(0)]).ring_bytes_per_s(), 25e9);
    assert_eq!(axis_link(&group, 2, 4, &mesh, &[AxisId(0), AxisId(1)]).ring_bytes_per_s(), 100e9);
}

#[test]
fn transfers_by_hand() {
    let (v100, a100, h100) = (group("p3.16xlarge:2"), group("dgx-a100:2"), group("p5.48xlarge:2"));
    // (machine, source, target, on one node, bytes/s, seconds)
    let table = [
        (&v100, (1, 1), (1, 1), false, 3.125e9, 30e-6),
        (&v100, (1, 8), (1, 8), false, 3.125e9, 30e-6),
        (&v100, (2, 8), (2, 8), false, 6.25e9, 30e-6),
        (&v100, (2, 8), (1, 8), false, 3.125e9, 30e-6),
        (&a100, (1, 1), (1, 1), false, 25e9, 8e-6),
        (&a100, (1, 8), (1, 4), false, 100e9, 8e-6),
        (&a100, (1, 8), (1, 8), false, 200e9, 8e-6),
        (&a100, (1, 4), (1, 2), true, 600e9, 3e-6),
        (&v100, (1, 4), (1, 4), true, 100e9, 3e-6),
        (&h100, (1, 1), (1, 1), false, 50e9, 15e-6),
    ];
    for (group, source, target, same_node, bytes_per_s, latency_s) in table {
        let path = transfer_path(group, source, target, same_node);
        assert_eq!((path.bytes_per_s, path.latency_s), (bytes_per_s, latency_s), "{source:?} to {target:?}");
        assert_eq!(path.across, !same_node);
    }
}

/// Every way to write `devices` as sizes of up to three axes.
fn meshes(devices: u32) -> Vec<Mesh> {
    let divisors = |n: u32| (1..=n).filter(move |&d| n.is_multiple_of(d));
    let mut found = Vec::new();
    for a in divisors(devices) {
        for b in divisors(devices / a) {
            found.push(Mesh::new(&[("a", a), ("b", b), ("c", devices / a / b)]));
        }
    }
    found
}

fn subsets(mesh: &Mesh) -> Vec<Vec<AxisId>> {
    let axes: Vec<AxisId> = mesh.axis_ids().collect();
    (0..1u32 << axes.len()).map(|bits| axes.iter().copied().filter(|a| bits >> a.0 & 1 == 1).collect()).collect()
}

#[test]
fn links_of_all_meshes_on_all_presets_are_finite_and_positive() {
    for (name, _) in presets() {
        for count in ["1", "2", "3", "1/3"] {
            let group = group(&format!("{name}:{}", if name == "local" && count == "1/3" { "5/3" } else { count }));
            let inside = group.intra_node.bytes_per_s;
            for mesh in meshes(group.num_devices()) {
                for axes in subsets(&mesh) {
                    let link = axis_link(&group, group.nodes, group.devices_per_node, &mesh, &axes);
                    assert_eq!(link.devices, mesh.product(&axes), "{name}:{count} {mesh} {axes:?}");
                    for rate in [link.ring_bytes_per_s(), link.all_to_all_bytes_per_s()] {
                        assert!(
                            rate.is_finite() && rate > 0.0 && rate <= inside,
                            "{name}:{count} {mesh} {axes:?}: {rate}"
                        );
                    }
                    assert!(
                        link.all_to_all_bytes_per_s() <= link.ring_bytes_per_s() * (1.0 + 1e-12),
                        "{name}:{count} {mesh} {axes:?}"
                    );
                    assert!(
                        link.inside_latency_s.is_finite() && link.inside_latency_s > 0.0,
                        "{name}:{count} {mesh} {axes:?}"
                    );
                }
            }
        }
    }
}

proptest! {
    /// Groups that leave a node, counted from the groups themselves.
    #[test]
    fn leaving_groups_are_those_of_the_mesh(
        sizes in (1u32..5, 1u32..5, 1u32..5),
        devices_per_node in 1u32..9,
        bits in 1usize..8,
    ) {
        let mesh = Mesh::new(&[("a", sizes.0), ("b", sizes.1), ("c", sizes.2)]);
        let axes = subsets(&mesh)[bits].clone();
        let node = |position: &u32| position / devices_per_node;
        let mut leaving = std::collections::BTreeMap::<u32, std::collections::BTreeSet<Vec<u32>>>::new();
        for position in 0..mesh.num_devices() {
            let members = mesh.group(&axes, position);
            if members.iter().any(|m| node(m) != node(&position)) {
                leaving.entry(node(&position)).or_default().insert(members);
            }
        }
        let expect = leaving.values().map(|groups| groups.len() as u64).max().unwrap_or(0);
        prop_assert_eq!(crossings(&mesh, &axes, devices_per_node).max_groups_leaving, expect);
    }

    #[test]
    fn a_faster_machine_has_no_slower_link(
        network in 1e8f64..1e12,
        inside in 1e9f64..1e12,
        faster in 1.0f64..10.0,
        bits in 0usize..8,
        wired in any::<bool>(),
    ) {
        let mut slow = group("dgx-a100:3");
        slow.inter_node.bytes_per_s = network;
        slow.intra_node.bytes_per_s = inside;
        slow.intra_node.kind = if wired { "nvlink" } else { "nvswitch" }.to_string();
        for mesh in [Mesh::new(&[("a", 3), ("b", 2), ("c", 4)]), Mesh::new(&[("a", 2), ("b", 6), ("c", 2)])] {
            let axes = subsets(&mesh)[bits].clone();
            let before = axis_link(&slow, 3, 8, &mesh, &axes);
            let mut fast = slow.clone();
            fast.inter_node.bytes_per_s *= faster;
            fast.intra_node.bytes_per_s *= faster;
            fast.inter_node.nics += 1;
            let after = axis_link(&fast, 3, 8, &mesh, &axes);
            prop_assert!(after.ring_bytes_per_s() >= before.ring_bytes_per_s());
            prop_assert!(after.all_to_all_bytes_per_s() >= before.all_to_all_bytes_per_s());
            for same_node in [false, true] {
                let path = |group: &Group| transfer_path(group, (1, 4), (1, 8), same_node).bytes_per_s;
                prop_assert!(path(&fast) >= path(&slow));
            }
        }
    }
}

/// The bandwidth of the link between groups, or of the slower of the two sides.
#[test]
fn paths_between_groups_by_hand() {
    let (fast, slow) = (group("dgx-a100:1"), group("p3.16xlarge:2"));
    for (source, target, between, expect) in [
        // One NIC of a V100 node, whatever the A100 have.
        ((&fast, (1, 8)), (&slow, (1, 8)), 1e12, 3.125e9),
        ((&slow, (1, 1)), (&fast, (1, 8)), 1e12, 3.125e9),
        ((&fast, (1, 8)), (&slow, (2, 8)), 1e12, 6.25e9),
        ((&fast, (1, 8)), (&slow, (2, 8)), 1e9, 1e9),
        ((&fast, (1, 1)), (&fast, (1, 8)), 1e12, 25e9),
    ] {
        let between = BetweenGroups { bytes_per_s: between, latency_s: 2e-5 };
        let path = path_between_groups(source, target, &between);
        assert_eq!(
            (path.bytes_per_s, path.latency_s, path.across),
            (expect, 2e-5, true),
            "{:?} {:?}",
            source.1,
            target.1
        );
    }
}

/// The mean number of nodes that a token's experts are on, over all ways to choose the groups and then an expert of them for
/// each choice, relative to the choices.
fn sent_once_by_counting(routing: Routing, nodes: usize, experts: usize) -> f64 {
    let (groups, chosen_groups) = (routing.groups as usize, routing.chosen_groups as usize);
    let (mut reached, mut ways) = (0, 0);
    for kept in (0..1_u32 << groups).filter(|kept| kept.count_ones() as usize == chosen_groups) {
        let allowed: Vec<usize> = (0..experts).filter(|e| kept >> (e / (experts / groups)) & 1 == 1).collect();
        for mut way in 0..allowed.len().pow(routing.chosen as u32) {
            let mut on = 0_u32;
            for _ in 0..routing.chosen {
                on |= 1 << (allowed[way % allowed.len()] / (experts / nodes));
                way /= allowed.len();
            }
            reached += u64::from(on.count_ones());
            ways += 1;
        }
    }
    reached as f64 / ways as f64 / routing.chosen as f64
}

#[test]
fn tokens_sent_once_reach_the_nodes_of_their_experts() {
    let of = |chosen, groups, chosen_groups| Routing { chosen, groups, chosen_groups };
    let even =
        [(of(1, 1, 1), 4), (of(2, 1, 1), 2), (of(3, 1, 1), 4), (of(3, 8, 2), 8), (of(3, 4, 4), 4), (of(2, 4, 1), 8)];
    // Nodes with several groups, of which any number is kept.
    let several = [(of(3, 8, 4), 4), (of(3, 4, 2), 2), (of(4, 8, 3), 2)];
    for (routing, nodes) in even.into_iter().chain(several) {
        let (found, counted) = (routing.sent_once(nodes), sent_once_by_counting(routing, nodes as usize, 8));
        assert!((found - counted).abs() < 1e-12, "{routing:?} on {nodes} nodes: {found}, not {counted}");
    }
}

/// Any numbers of a file give a part.
#[test]
fn tokens_sent_once_are_a_part_of_all_copies() {
    const NUMBERS: [u64; 10] = [0, 1, 2, 3, 8, 255, 256, 257, 1 << 40, u64::MAX];
    for (chosen, groups) in NUMBERS.iter().flat_map(|&chosen| NUMBERS.map(|groups| (chosen, groups))) {
        for chosen_groups in NUMBERS {
            let routing = Routing { chosen, groups, chosen_groups };
            for nodes in [1, 2, 3, 8, 255, 256, 257, 1 << 20, u64::from(u32::MAX)] {
                let part = routing.sent_once(nodes);
                assert!(part > 0.0 && part <= 1.0, "{routing:?} on {nodes} nodes: {part}");
            }
        }
    }
}

/// Software that sends tokens once makes exchanges between nodes faster, and changes nothing else.
#[test]
fn only_exchanges_between_nodes_are_sent_once() {
    let plain = group("dgx-h100:4");
    let routing = Routing { chosen: 8, groups: 1, chosen_groups: 1 };
    let once = Group { dispatch: Some(routing), ..plain.clone() };
    for axes in [[("data", 4), ("tensor", 8)], [("data", 8), ("tensor", 4)]] {
        let mesh = Mesh::new(&axes);
        for axis in mesh.axis_ids() {
            let [before, after] = [&plain, &once].map(|group| axis_link(group, 4, 8, &mesh, &[axis]));
            if before.nodes > 1 {
                let faster = after.exchange_bytes_per_s / before.exchange_bytes_per_s;
                assert!((faster * routing.sent_once(before.nodes) - 1.0).abs() < 1e-12, "{faster}");
            } else {
                assert_eq!(after, before);
            }
            assert_eq!(AxisLink { exchange_bytes_per_s: before.exchange_bytes_per_s, ..after }, before);
        }
    }
}
