//! Collectives by hand, and properties of every price: more bytes or latency never cost less, more bandwidth never
//! costs more, one device is free, and every input has a finite price.

use super::*;
use crate::catalogue::preset;
use crate::link::axis_link;
use crate::node_link::NodeLink;
use altiplano_ir::mesh::{AxisId, Mesh};
use proptest::prelude::*;

const OPERATIONS: [Operation; 6] = [
    Operation::AllReduce,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::AllToAll,
    Operation::Broadcast,
    Operation::SendReceive,
];

const ALGORITHMS: [Algorithm; 8] = [
    Algorithm::Ring,
    Algorithm::DoubleBinaryTree,
    Algorithm::HalvingDoubling,
    Algorithm::Hierarchical,
    Algorithm::Direct,
    Algorithm::BinomialTree,
    Algorithm::ParameterServer,
    Algorithm::Sharp,
];

/// A group of all devices of some nodes of a machine.
fn whole(text: &str) -> AxisLink {
    let group = preset(text).unwrap().groups.remove(0);
    let mesh = Mesh::new(&[("a", group.num_devices())]);
    axis_link(&group, group.nodes, group.devices_per_node, &mesh, &[AxisId(0)])
}

/// Workers with a hop of 1 ms and 1e9 bytes/s, four on each of two nodes, whose network has 0.5e9 and 2 ms.
fn two_nodes() -> AxisLink {
    AxisLink {
        nodes: 2,
        devices_on_node: 4,
        across_bytes_per_s: 0.5e9,
        exchange_bytes_per_s: 0.25e9,
        across_latency_s: 2e-3,
        ..AxisLink::new(8, 1e9, 1e-3)
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * b.abs()
}

#[test]
fn formulas_by_hand() {
    use Algorithm::{BinomialTree, Direct, DoubleBinaryTree, HalvingDoubling, Hierarchical, ParameterServer, Ring};
    use Operation::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, SendReceive};
    let (one, two, three) = (AxisLink::new(4, 1e9, 1e-3), two_nodes(), AxisLink::new(3, 1e9, 1e-3));
    // Shared memory starts in 7 us and reaches 0.8 inside, 0.92 between nodes: 0.8e9 and 0.46e9 bytes/s here.
    // (link, operation, algorithm, hops in ms, seconds on the wires for 1e9 bytes)
    let table = [
        (&one, AllReduce, Ring, 6.0, 1.5 / 0.8),
        (&one, AllGather, Ring, 3.0, 0.75 / 0.8),
        (&one, ReduceScatter, Ring, 3.0, 0.75 / 0.8),
        (&one, AllToAll, Direct, 3.0, 0.75 / 0.8),
        (&one, Broadcast, Ring, 3.0, 1.0 / 0.8),
        (&one, Broadcast, BinomialTree, 2.0, 2.0 / 0.8),
        (&one, SendReceive, Direct, 1.0, 1.0 / 0.8),
        (&one, AllReduce, HalvingDoubling, 4.0, 1.5 / 0.8),
        (&one, AllGather, HalvingDoubling, 2.0, 0.75 / 0.8),
        (&one, AllReduce, ParameterServer, 6.0, 6.0 / 0.8),
        // One device of three gives its data away first: two more hops and twice the bytes more.
        (&three, AllReduce, HalvingDoubling, 6.0, 4.0 / 3.0 / 0.8 + 2.0 / 0.8),
        (&three, AllGather, HalvingDoubling, 2.0, 2.0 / 3.0 / 0.8),
        // 14 hops, of which a quarter leaves a node.
        (&two, AllReduce, Ring, 14.0 * 1.25, 1.75 / 0.46),
        (&two, AllReduce, DoubleBinaryTree, 2.0 * (3.0 + 2.0), 1.45 / (0.92 * 0.46)),
        (&two, AllReduce, HalvingDoubling, 2.0 * (2.0 + 2.0), 1.5 / 0.8 + 1.0 / 0.46),
        (&two, AllReduce, Hierarchical, 2.0 * (3.0 + 2.0), 1.5 / 0.8 + 1.0 / 0.46),
        (&two, AllGather, Hierarchical, 3.0 + 2.0, 0.75 / 0.8 + 0.5 / 0.46),
        (&two, AllToAll, Direct, 7.0 * 2.0, 0.875 / 0.23),
        (&two, Broadcast, BinomialTree, 2.0 + 2.0, 2.0 / 0.8 + 1.0 / 0.46),
    ];
    for (link, operation, algorithm, hops_ms, wire_s) in table {
        let all = candidates(operation, 1_000_000_000, link);
        let found: Vec<&Priced> = all.iter().filter(|p| p.algorithm == algorithm).collect();
        assert_eq!(found.len(), 1, "{operation:?} {algorithm:?}");
        assert!(close(found[0].hops_s, hops_ms * 1e-3), "{operation:?} {algorithm:?}: {}", found[0]);
        assert!(close(found[0].wire_s, wire_s), "{operation:?} {algorithm:?}: {}", found[0]);
        let start_s = if operation == SendReceive { 0.0 } else { 7e-6 };
        assert!(close(found[0].seconds, start_s + hops_ms * 1e-3 + wire_s), "{operation:?} {algorithm:?}");
        assert_ne!(algorithm.formula(operation), "-", "{operation:?} {algorithm:?}");
    }
}

#[test]
fn every_candidate_has_a_formula_and_nothing_else_has() {
    for link in [whole("dgx-h100:1"), whole("dgx-h100:2"), two_nodes()] {
        for operation in OPERATIONS {
            for candidate in candidates(operation, 1 << 20, &link) {
                assert_ne!(candidate.algorithm.formula(operation), "-", "{operation:?} {candidate}");
                assert!(candidate.to_string().starts_with(candidate.algorithm.name()));
            }
        }
    }
    let with_formula = |operation| ALGORITHMS.iter().filter(|a| a.formula(operation) != "-").count();
    assert_eq!(OPERATIONS.map(with_formula), [6, 4, 4, 1, 3, 1]);
}

#[test]
fn the_best_algorithm_depends_on_the_message_and_the_machine() {
    use Algorithm::{Direct, DoubleBinaryTree, HalvingDoubling, Hierarchical, Nothing, Ring, Sharp};
    use Operation::{AllGather, AllReduce, AllToAll, SendReceive};
    use Protocol::{LowLatency, LowLatency128, Simple};
    let table = [
        ("dgx-a100/1", AllReduce, 30, Nothing, Simple),
        // NCCL on one node of A100: rings, whose protocol changes with the size.
        ("dgx-a100", AllReduce, 15, Ring, LowLatency),
        ("dgx-a100", AllReduce, 21, Ring, LowLatency128),
        ("dgx-a100", AllReduce, 30, Ring, Simple),
        // In-switch reduction pays from some MiB on, for enough devices, and not for other collectives.
        ("dgx-h100", AllReduce, 15, Ring, LowLatency),
        ("dgx-h100", AllReduce, 27, Sharp, Simple),
        ("dgx-h100/2", AllReduce, 27, Ring, Simple),
        ("dgx-h100", AllGather, 33, Ring, Simple),
        ("dgx-h100", AllToAll, 27, Direct, Simple),
        // Many nodes: trees for short messages, rings for long ones.
        ("dgx-a100:64", AllReduce, 15, DoubleBinaryTree, LowLatency),
        ("dgx-a100:64", AllReduce, 34, Ring, Simple),
        ("p3.16xlarge:4", AllReduce, 30, Ring, Simple),
        ("p4d:2", AllReduce, 30, DoubleBinaryTree, Simple),
        ("dgx-a100:2", SendReceive, 20, Direct, LowLatency128),
        // Workers use no protocols, but powers of two.
        ("local:8", AllReduce, 10, HalvingDoubling, Simple),
        ("local:6", AllReduce, 30, Ring, Simple),
        // If the network is much slower than the node, each byte is sent over it as rarely as possible.
        ("laptop:3", AllReduce, 30, Hierarchical, Simple),
    ];
    for (machine, operation, log_bytes, algorithm, protocol) in table {
        let found = best(operation, 1 << log_bytes, &whole(machine));
        let expect = (algorithm, protocol);
        assert_eq!((found.algorithm, found.protocol), expect, "{machine} {operation:?} 2^{log_bytes}: {found}");
    }
}

/// Reports of single runs over InfiniBand and EFA, in GB/s by the definition of nccl-tests (`2(n-1)/n bytes / seconds`).
#[test]
fn networks_near_reported_ones() {
    // (machine, bytes, GB/s, relative difference that is accepted)
    let table = [
        // NVIDIA/nccl issue 527, 1 GiB over two nodes with four 100 Gb/s EFA cards each.
        ("p4d:2", 1u64 << 30, 57.2, 0.1),
        // NVIDIA/nccl-tests issue 175, two nodes with 4 x 200 Gb/s; their owner found it slow.
        ("a100-800gbps:2", 1 << 32, 86.0, 0.3),
        // Bekman, ml-engineering, network chapter, 16 GiB over four nodes with 8 x 400 Gb/s EFA.
        ("p6-b200:4", 1 << 34, 381.8, 0.05),
    ];
    for (machine, bytes, gb_per_s, most) in table {
        let link = whole(machine);
        let n = link.devices as f64;
        let found = best(Operation::AllReduce, bytes, &link);
        let modelled = 2.0 * (n - 1.0) / n * bytes as f64 / found.seconds / 1e9;
        assert!(
            (modelled / gb_per_s - 1.0).abs() < most,
            "{machine}: {modelled:.1} GB/s, {gb_per_s} reported; {found}"
        );
    }
}

#[test]
fn a_price_says_what_it_is_made_of() {
    let found = best(Operation::AllReduce, 1 << 30, &whole("dgx-a100"));
    assert!(close(found.seconds, found.start_s + found.hops_s + found.wire_s));
    let text = found.to_string();
    assert!(text.starts_with("ring (Simple): 54.5 us to start + 35.7 us of hops + "), "{text}");
    assert_eq!(best(Operation::AllReduce, 1, &whole("dgx-a100/1")).to_string(), "nothing to send");
}

#[test]
fn a_server_suffers_from_incast() {
    let link = AxisLink::new(16, 1e9, 1e-6);
    let price = |algorithm| {
        let all = candidates(Operation::AllReduce, 1 << 30, &link);
        all.iter().find(|p| p.algorithm == algorithm).map(|p| p.wire_s).unwrap()
    };
    assert!(close(price(Algorithm::ParameterServer) / price(Algorithm::Ring), 16.0));
}

#[test]
fn an_oversubscribed_network_is_slower_in_proportion() {
    let mut group = preset("p3.16xlarge:4").unwrap().groups.remove(0);
    let mesh = Mesh::new(&[("a", 4), ("b", 8)]);
    let wire_s = |group: &altiplano_ir::cluster::Group, axis| {
        best(Operation::AllReduce, 1 << 30, &axis_link(group, 4, 8, &mesh, &[AxisId(axis)])).wire_s
    };
    let (across, inside) = (wire_s(&group, 0), wire_s(&group, 1));
    group.inter_node.oversubscription = 4.0;
    assert!(close(wire_s(&group, 0), 4.0 * across));
    assert_eq!(wire_s(&group, 1), inside);
}

/// Every kind of link, on one node and on several.
fn machines() -> Vec<AxisLink> {
    let names = [
        "p3.16xlarge",
        "dgx-2",
        "dgx-a100",
        "dgx-h100",
        "dgx-b200",
        "polaris",
        "frontier",
        "8xL40S",
        "8xMI300X",
        "laptop",
    ];
    let mut found: Vec<AxisLink> = names.iter().map(|n| whole(n)).collect();
    found.extend(["p3.16xlarge:3", "dgx-a100:2", "dgx-h100:5", "polaris:16", "laptop:2"].map(whole));
    found
}

#[test]
fn hostile_numbers_have_finite_prices() {
    for mut link in machines() {
        for bytes in [0, 1, u64::MAX] {
            for (rate, latency_s) in [(f64::MIN_POSITIVE, 0.0), (f64::MAX, f64::MAX), (1e9, 0.0), (0.0, 1e300)] {
                link.inside_bytes_per_s = rate;
                link.across_bytes_per_s = rate;
                link.exchange_bytes_per_s = rate;
                (link.inside_latency_s, link.across_latency_s) = (latency_s, latency_s);
                for devices in [2, u64::MAX] {
                    link.devices = devices;
                    for operation in OPERATIONS {
                        let seconds = best(operation, bytes, &link).seconds;
                        assert!(seconds.is_finite() && seconds >= 0.0, "{operation:?} {bytes} {rate} {latency_s}");
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn prices_are_monotone(
        which in 0usize..15,
        operation in 0usize..6,
        log_bytes in 0.0f64..40.0,
        more in 1u64..1 << 36,
        faster in 1.0f64..10.0,
        later in 0.0f64..1e-3,
    ) {
        let (link, operation) = (machines()[which], OPERATIONS[operation]);
        let bytes = log_bytes.exp2() as u64;
        let seconds = |bytes: u64, link: &AxisLink| best(operation, bytes, link).seconds;
        let base = seconds(bytes, &link);
        prop_assert!(base.is_finite() && base >= 0.0);
        prop_assert!(seconds(bytes + more, &link) >= base);
        for wide in [
            AxisLink { inside_bytes_per_s: link.inside_bytes_per_s * faster, ..link },
            AxisLink { across_bytes_per_s: link.across_bytes_per_s * faster, ..link },
            AxisLink { exchange_bytes_per_s: link.exchange_bytes_per_s * faster, ..link },
        ] {
            prop_assert!(seconds(bytes, &wide) <= base);
        }
        for slow in [
            AxisLink { inside_latency_s: link.inside_latency_s + later, ..link },
            AxisLink { across_latency_s: link.across_latency_s + later, ..link },
        ] {
            prop_assert!(seconds(bytes, &slow) >= base);
        }
        prop_assert_eq!(seconds(bytes, &AxisLink { devices: 1, ..link }), 0.0);
    }

    /// A library's best costs at most as much as any of its algorithms, and is one of the candidates.
    #[test]
    fn the_best_is_the_least_of_what_there_is(which in 0usize..15, operation in 0usize..6, log_bytes in 0u32..40) {
        let (link, operation) = (machines()[which], OPERATIONS[operation]);
        let all = candidates(operation, 1 << log_bytes, &link);
        let found = best(operation, 1 << log_bytes, &link);
        prop_assert!(all.contains(&found));
        let offered = all.iter().filter(|p| NodeLink::has(link.kind, p.algorithm));
        prop_assert_eq!(found.seconds, offered.map(|p| p.seconds).fold(f64::INFINITY, f64::min));
    }
}

/// Collectives in a CUDA graph beside those that a host starts: shorter where the start counts, and about as long where
/// the wires do. No table has exchanges that a host starts, which have the rates of rings.
#[test]
fn captured_collectives_start_sooner_and_send_as_fast() {
    for machine in ["dgx-a100:1", "dgx-h100:1", "dgx-b200:1"] {
        let launched = whole(machine);
        let captured = AxisLink { kind: launched.kind.captured(), ..launched };
        for operation in [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter, Operation::AllToAll] {
            let ratio =
                |bytes: u64| best(operation, bytes, &captured).seconds / best(operation, bytes, &launched).seconds;
            assert!((0.1..0.7).contains(&ratio(1 << 12)), "{machine} {operation:?}: {}", ratio(1 << 12));
            let most = if operation == Operation::AllToAll { 1.4 } else { 1.1 };
            assert!((0.9..most).contains(&ratio(1 << 30)), "{machine} {operation:?}: {}", ratio(1 << 30));
        }
    }
}

/// A device's own part is copied beside the messages, so that more devices never take less, nor do more bytes.
#[test]
fn captured_exchanges_grow_with_bytes_and_devices() {
    for machine in ["dgx-a100:1", "dgx-h100:1", "dgx-b200:1"] {
        let link = whole(machine);
        let price = |devices: u64, bytes: u64| {
            let link = AxisLink { kind: link.kind.captured(), devices, devices_on_node: devices, ..link };
            best(Operation::AllToAll, bytes, &link).seconds
        };
        for bytes in (8..30).map(|power| 1 << power) {
            assert!(price(2, bytes) <= price(4, bytes) && price(4, bytes) <= price(8, bytes), "{machine}: {bytes}");
            assert!(price(8, bytes) < price(8, 2 * bytes), "{machine}: {bytes}");
        }
    }
}
