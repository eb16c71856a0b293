//! Seconds of the collectives. Each algorithm of a library is priced with each of its protocols; the answer is the
//! fastest, with its name.
//!
//! A price is `start + hops + bytes on the wire / bandwidth` (the alpha-beta model). The start, a hop's multiple of the
//! link's latency, and the share of the bandwidth depend on the protocol and on the kind of link (`node_link`,
//! fitted to measured tables). Every candidate increases with the bytes and the latencies and decreases with the
//! bandwidths, so their minimum does too.
//!
//! Below, `n` devices lie on `m` nodes with `k` on each. `S` is the bytes of a device's larger side. `B` is the
//! bandwidth of a device's ring inside the node, and `W` the group's share of its node's network. `a` and `b` are the
//! seconds of a hop inside and between nodes.

use crate::link::AxisLink;
use crate::node_link::{Exchange, Library, Protocol, ProtocolFigures};
use std::fmt;

/// The operation to price. Bytes are those of one device's larger side: the operand of a reduce-scatter, the result of
/// an all-gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    /// Every device sends to one neighbour.
    SendReceive,
}

/// An algorithm for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// One device, for which nothing is sent.
    Nothing,
    /// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    Ring,
    /// Two binary trees over the nodes, where each has the other's leaves as inner nodes, and a chain in each node
    /// (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL
    /// since 2.4).
    DoubleBinaryTree,
    /// Recursive halving and doubling, which exchanges with partners at distances of powers of two (Thakur,
    /// Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).
    HalvingDoubling,
    /// Inside the nodes, then between devices of equal position, then inside again.
    Hierarchical,
    /// Every device sends to every other.
    Direct,
    /// A binomial tree, which doubles the number of devices that have the data in every round.
    BinomialTree,
    /// One device receives everything and sends the result to all, one message after the other through its own link.
    /// This incast makes it slow.
    ParameterServer,
    /// The switches of a node reduce and multicast the data that passes through them.
    Sharp,
}

/// The price of an operation with one algorithm and protocol.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    /// Sum of all parts.
    pub seconds: f64,
    pub algorithm: Algorithm,
    pub protocol: Protocol,
    pub start_s: f64,
    pub hops_s: f64,
    pub wire_s: f64,
}

/// The fastest algorithm that the library has for an operation; the first among equals.
///
/// Example: an all-reduce of 1 MiB over eight A100 on one node takes about 73 us (`LowLatency128`: 33.5 of start, 14
/// hops of 2.3, 9 on the wire), one of 1 GiB about 8.3 ms (`Simple`).
pub fn best(operation: Operation, bytes: u64, link: &AxisLink) -> Priced {
    let mut found: Option<Priced> = None;
    each_candidate(operation, bytes, link, &|algorithm| link.kind.has(algorithm), &mut |candidate| {
        if found.is_none_or(|f| candidate.seconds < f.seconds) {
            found = Some(candidate);
        }
    });
    found.unwrap_or_else(Priced::nothing)
}

/// Every algorithm for an operation with every protocol, whether or not the library has it.
pub fn candidates(operation: Operation, bytes: u64, link: &AxisLink) -> Vec<Priced> {
    let mut found = Vec::new();
    each_candidate(operation, bytes, link, &|_| true, &mut |candidate| found.push(candidate));
    found
}

/// Prices every algorithm that is wanted, with every protocol. A search asks for millions of prices, so that nothing is
/// allocated.
fn each_candidate(
    operation: Operation,
    bytes: u64,
    link: &AxisLink,
    is_wanted: &dyn Fn(Algorithm) -> bool,
    take: &mut dyn FnMut(Priced),
) {
    if link.devices <= 1 {
        return take(Priced::nothing());
    }
    let bytes = bytes as f64;
    if operation == Operation::AllToAll && link.nodes <= 1 && !link.kind.exchanges.is_empty() {
        return link.kind.exchanges.iter().for_each(|exchange| take(exchanged(exchange, bytes, link)));
    }
    let carried = |figures: &&ProtocolFigures| link.nodes <= 1 || link.network.protocols.contains(&figures.protocol);
    for figures in link.kind.protocols.iter().filter(carried) {
        let terms = Terms { bytes, link, figures };
        for &algorithm in operation.algorithms().iter().filter(|algorithm| is_wanted(**algorithm)) {
            terms.priced(operation, algorithm).into_iter().for_each(&mut *take);
        }
    }
    if operation == Operation::AllReduce && is_wanted(Algorithm::Sharp) {
        sharp(bytes, link).into_iter().for_each(take);
    }
}

impl Operation {
    /// The algorithms with protocols.
    fn algorithms(self) -> &'static [Algorithm] {
        use Algorithm::{BinomialTree, Direct, DoubleBinaryTree, HalvingDoubling, Hierarchical, ParameterServer, Ring};
        match self {
            Operation::AllReduce => &[Ring, DoubleBinaryTree, HalvingDoubling, Hierarchical, ParameterServer],
            Operation::AllGather | Operation::ReduceScatter => &[Ring, HalvingDoubling, Hierarchical, ParameterServer],
            Operation::AllToAll | Operation::SendReceive => &[Direct],
            Operation::Broadcast => &[Ring, BinomialTree, ParameterServer],
        }
    }
}

impl Priced {
    fn nothing() -> Self {
        let (start_s, hops_s, wire_s) = (0.0, 0.0, 0.0);
        Priced { seconds: 0.0, algorithm: Algorithm::Nothing, protocol: Protocol::Simple, start_s, hops_s, wire_s }
    }

    /// Clamps sums beyond the range of numbers, or over links without bandwidth, to the largest number.
    fn new(algorithm: Algorithm, protocol: Protocol, start_s: f64, hops_s: f64, wire_s: f64) -> Self {
        let seconds = (start_s + hops_s + wire_s).min(f64::MAX);
        Priced { seconds, algorithm, protocol, start_s, hops_s, wire_s }
    }
}

impl fmt::Display for Priced {
    /// `ring (Simple): 54.5 us to start + 35.7 us of hops + 7.8 ms on the wire`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.algorithm == Algorithm::Nothing {
            return f.write_str(self.algorithm.name());
        }
        let [start, hops, wire] = [self.start_s, self.hops_s, self.wire_s].map(|s| s * 1e6);
        let (name, protocol) = (self.algorithm.name(), self.protocol);
        write!(f, "{name} ({protocol:?}): {start:.1} us to start + {hops:.1} us of hops + {wire:.1} us on the wire")
    }
}

impl Algorithm {
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Nothing => "nothing to send",
            Algorithm::Ring => "ring",
            Algorithm::DoubleBinaryTree => "double binary tree",
            Algorithm::HalvingDoubling => "recursive halving and doubling",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Direct => "direct",
            Algorithm::BinomialTree => "binomial tree",
            Algorithm::ParameterServer => "parameter server",
            Algorithm::Sharp => "NVLink SHARP",
        }
    }

    /// The formula behind a price, in the letters of this module's documentation; `-` if the algorithm does not apply.
    pub fn formula(self, operation: Operation) -> &'static str {
        use Operation::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, SendReceive};
        match (self, operation) {
            (Algorithm::Ring, AllReduce) => "start + 2(n-1) hop + (2(n-1) + exposed)/n S / min(B, W)",
            (Algorithm::Ring, AllGather | ReduceScatter) => "start + (n-1) hop + (n-1 + exposed)/n S / min(B, W)",
            (Algorithm::Ring, Broadcast) => "start + (n-1) hop + S / min(B, W)",
            (Algorithm::DoubleBinaryTree, AllReduce) => {
                "start + 2((k-1) a + log2(m) b) + max(2 S / (0.92 B), (2 or for m = 2 1.45) S / (0.92 W))"
            }
            (Algorithm::HalvingDoubling, AllReduce) => {
                "start + 2(log2(k) a + log2(m) b) + 2(k-1)/k S / B + 2(m-1)/m S / W, and S / min(B, W) twice where n is no power of two"
            }
            (Algorithm::HalvingDoubling, AllGather | ReduceScatter) => {
                "start + log2(k) a + log2(m) b + (k-1)/k S / B + (m-1)/m S / W"
            }
            (Algorithm::Hierarchical, AllReduce) => {
                "start + 2(k-1) a + 2(m-1) b + (2(k-1) + exposed)/k S / B + 2(m-1)/m S / W"
            }
            (Algorithm::Hierarchical, AllGather | ReduceScatter) => {
                "start + (k-1) a + (m-1) b + (k-1 + exposed)/k S / B + (m-1)/m S / W"
            }
            (Algorithm::Direct, AllToAll) => "start + hop + (n-1) message + (n-1)/n S / min(B, exchange W)",
            (Algorithm::Direct, SendReceive) => "start + hop + S / min(B, W)",
            (Algorithm::BinomialTree, Broadcast) => "start + log2(k) (a + S / B) + log2(m) (b + S / W)",
            (Algorithm::ParameterServer, AllReduce) => "start + 2(n-1) (hop + S / min(B, W))",
            (Algorithm::ParameterServer, AllGather | ReduceScatter | Broadcast) => {
                "start + (n-1) (hop + S / min(B, W))"
            }
            (Algorithm::Sharp, AllReduce) => "start + (1 + 1/n) S / B",
            _ => "-",
        }
    }
}

impl crate::node_link::NodeLink {
    /// Returns true if the library of these nodes has an algorithm. Others are priced only for comparison.
    fn has(&self, algorithm: Algorithm) -> bool {
        match algorithm {
            Algorithm::Nothing | Algorithm::Ring | Algorithm::Direct => true,
            Algorithm::DoubleBinaryTree | Algorithm::Sharp => self.library == Library::Nccl,
            // NCCL's single call never works level by level. A plan that does has an axis for each level.
            Algorithm::HalvingDoubling | Algorithm::BinomialTree | Algorithm::Hierarchical => {
                self.library == Library::Mpi
            }
            Algorithm::ParameterServer => false,
        }
    }
}

/// The share of a ring's bandwidth that NCCL's tuner gives a tree (NVIDIA/nccl, src/graph/tuning.cc, 0.92).
const TREE_EFFICIENCY: f64 = 0.92;

/// Number of times that a byte leaves each of two nodes that are joined by trees. Once is possible, since each sends
/// its sum and receives the other's: 1 GiB over two p3dn.24xlarge takes 134 ms by trees and 268 by rings
/// (NVIDIA/nccl-tests issue 22). Others are as slow as rings (two nodes of A100 and InfiniBand, issue 175). This value
/// lies between, and matches two p4d.24xlarge (57 GB/s by nccl-tests' definition, NVIDIA/nccl issue 527).
const TREE_OF_TWO: f64 = 1.45;

/// Share of a hop that each further message of an exchange takes, which is sent while others are in transit. No table;
/// NCCL's tuner has 0.6 us for the shortest step over NVLink, of the 3 us of a hop.
const MESSAGE: f64 = 0.2;

/// An operation on one link with one protocol.
struct Terms<'a> {
    bytes: f64,
    link: &'a AxisLink,
    figures: &'a ProtocolFigures,
}

impl Terms<'_> {
    fn n(&self) -> f64 {
        self.link.devices as f64
    }

    /// Nodes of a group.
    fn m(&self) -> f64 {
        self.link.nodes.max(1) as f64
    }

    /// Devices of a group on a node.
    fn k(&self) -> f64 {
        self.link.devices_on_node.max(1) as f64
    }

    /// Seconds of a hop inside a node.
    fn a(&self) -> f64 {
        self.figures.hop * self.link.inside_latency_s
    }

    /// Seconds of a hop between nodes.
    fn b(&self) -> f64 {
        self.figures.network_hop * self.link.across_latency_s
    }

    /// Average seconds of a hop of a ring: a chunk passes every hop once on its way around.
    fn ring_hop_s(&self) -> f64 {
        let across = if self.m() > 1.0 { self.m().min(self.n()) } else { 0.0 };
        (across * self.b() + (self.n() - across) * self.a()) / self.n()
    }

    fn inside(&self) -> f64 {
        self.figures.efficiency * self.link.inside_bytes_per_s
    }

    /// Share of the network's bandwidth available to data.
    fn network_part(&self) -> f64 {
        self.figures.network_part * self.link.network.efficiency
    }

    fn across(&self) -> f64 {
        self.network_part() * self.link.across_bytes_per_s
    }

    /// Bandwidth of a ring over all devices.
    fn ring(&self) -> f64 {
        if self.m() > 1.0 { self.inside().min(self.across()) } else { self.inside() }
    }

    fn price(&self, algorithm: Algorithm, hops_s: f64, wire_s: f64) -> Priced {
        Priced::new(algorithm, self.figures.protocol, self.figures.start_s, hops_s, wire_s)
    }

    /// A ring of some rounds, in each of which every device sends an n-th of the bytes.
    fn rounds(&self, rounds: f64) -> Priced {
        let wire_s = (rounds + self.link.kind.exposed_rounds) / self.n() * self.bytes / self.ring();
        self.price(Algorithm::Ring, rounds * self.ring_hop_s(), wire_s)
    }

    /// Number of times that all data passes a ring, or both levels.
    fn passes(operation: Operation) -> f64 {
        if operation == Operation::AllReduce { 2.0 } else { 1.0 }
    }

    /// The price with one of the operation's algorithms; `None` if it needs several nodes, or several devices on each.
    fn priced(&self, operation: Operation, algorithm: Algorithm) -> Option<Priced> {
        let (n, m, k) = (self.n(), self.m(), self.k());
        let passes = Self::passes(operation);
        Some(match (algorithm, operation) {
            (Algorithm::Ring, Operation::Broadcast) => {
                self.price(Algorithm::Ring, (n - 1.0) * self.ring_hop_s(), self.bytes / self.ring())
            }
            (Algorithm::Ring, _) => self.rounds(passes * (n - 1.0)),
            (Algorithm::DoubleBinaryTree, _) if m > 1.0 => self.trees(),
            (Algorithm::HalvingDoubling, Operation::AllReduce) => self.halving_doubling(),
            (Algorithm::HalvingDoubling, _) => {
                let hops_s = k.log2().ceil() * self.a() + m.log2().ceil() * self.b();
                self.price(Algorithm::HalvingDoubling, hops_s, self.two_levels(1.0, 0.0))
            }
            (Algorithm::Hierarchical, _) if m > 1.0 && k > 1.0 => {
                let hops_s = passes * ((k - 1.0) * self.a() + (m - 1.0) * self.b());
                self.price(Algorithm::Hierarchical, hops_s, self.two_levels(passes, self.link.kind.exposed_rounds))
            }
            (Algorithm::BinomialTree, _) => self.binomial_tree(),
            (Algorithm::ParameterServer, _) => self.server(passes),
            (Algorithm::Direct, Operation::AllToAll) => self.all_to_all(),
            (Algorithm::Direct, _) => self.send_receive(),
            _ => return None,
        })
    }

    fn trees(&self) -> Priced {
        let (m, k) = (self.m(), self.k());
        let hops_s = 2.0 * ((k - 1.0) * self.a() + m.log2().ceil() * self.b());
        // With more than two nodes, one tree's inner nodes have two children and are the other tree's leaves.
        let crossing = if m > 2.0 { 2.0 } else { TREE_OF_TWO };
        let across = crossing * self.bytes / (TREE_EFFICIENCY * self.across());
        let inside = if k > 1.0 { 2.0 * self.bytes / (TREE_EFFICIENCY * self.inside()) } else { 0.0 };
        self.price(Algorithm::DoubleBinaryTree, hops_s, across.max(inside))
    }

    fn halving_doubling(&self) -> Priced {
        let (n, m, k) = (self.n(), self.m(), self.k());
        let hops_s = 2.0 * (k.log2().ceil() * self.a() + m.log2().ceil() * self.b());
        // Devices beyond a power of two give their data to a partner first, and get the result last.
        let odd = n.log2().fract() != 0.0;
        let extra = if odd { 2.0 } else { 0.0 };
        let extra_hop_s = extra * if m > 1.0 { self.a().max(self.b()) } else { self.a() };
        let wire_s = self.two_levels(2.0, 0.0) + extra * self.bytes / self.ring();
        self.price(Algorithm::HalvingDoubling, hops_s + extra_hop_s, wire_s)
    }

    /// Wire seconds of an algorithm that works inside the nodes and then between them, `passes` times each. A device
    /// keeps a k-th of its bytes for the second level, and the k devices of a node send theirs at the same time.
    fn two_levels(&self, passes: f64, exposed: f64) -> f64 {
        let (m, k) = (self.m(), self.k());
        let inside = if k > 1.0 { (passes * (k - 1.0) + exposed) / k * self.bytes / self.inside() } else { 0.0 };
        let across = if m > 1.0 { passes * (m - 1.0) / m * self.bytes / self.across() } else { 0.0 };
        inside + across
    }

    /// All devices send to one, and in the second pass it sends back.
    fn server(&self, passes: f64) -> Priced {
        let messages = passes * (self.n() - 1.0);
        let hop_s = if self.m() > 1.0 { self.a().max(self.b()) } else { self.a() };
        self.price(Algorithm::ParameterServer, messages * hop_s, messages * self.bytes / self.ring())
    }

    fn all_to_all(&self) -> Priced {
        let n = self.n();
        let hop_s = if self.m() > 1.0 { self.a().max(self.b()) } else { self.a() };
        let exchange = self.network_part() * self.link.exchange_bytes_per_s;
        let rate = if self.m() > 1.0 { self.inside().min(exchange) } else { self.inside() };
        let messages_s = match self.link.kind.library {
            Library::Nccl => hop_s + (n - 1.0) * MESSAGE * self.link.inside_latency_s,
            // Pairs meet one after the other.
            Library::Mpi => (n - 1.0) * hop_s,
        };
        self.price(Algorithm::Direct, messages_s, (n - 1.0) / n * self.bytes / rate)
    }

    fn binomial_tree(&self) -> Priced {
        let (m, k) = (self.m(), self.k());
        let (log_k, log_m) = (k.log2().ceil(), m.log2().ceil());
        let across_s = if m > 1.0 { log_m * self.bytes / self.across() } else { 0.0 };
        let wire_s = log_k * self.bytes / self.inside() + across_s;
        self.price(Algorithm::BinomialTree, log_k * self.a() + log_m * self.b(), wire_s)
    }

    fn send_receive(&self) -> Priced {
        let hop_s = if self.m() > 1.0 { self.a().max(self.b()) } else { self.a() };
        let (protocol, start_s) = (self.figures.protocol, self.link.kind.send_start_s);
        Priced::new(Algorithm::Direct, protocol, start_s, hop_s, self.bytes / self.ring())
    }
}

/// An all-to-all inside a node. A device copies its own part beside the messages to the others.
fn exchanged(exchange: &Exchange, bytes: f64, link: &AxisLink) -> Priced {
    let n = link.devices as f64;
    let messages_s = (n - 1.0) * exchange.message * link.inside_latency_s;
    let wire_s = (n - 1.0 + exchange.exposed) / n * bytes / (exchange.efficiency * link.inside_bytes_per_s);
    Priced::new(Algorithm::Direct, exchange.protocol, exchange.start_s, messages_s, wire_s)
}

/// Reduction in the switches of one node. A device sends its bytes once and gets its n-th of the sum. It then sends
/// that part and gets the whole, multicast by the switches. Between nodes a library continues with trees, which no
/// table here covers.
fn sharp(bytes: f64, link: &AxisLink) -> Option<Priced> {
    let sharp = link.kind.sharp?;
    if link.nodes > 1 {
        return None;
    }
    let wire_s = (1.0 + 1.0 / link.devices as f64) * bytes / (sharp.efficiency * link.inside_bytes_per_s);
    Some(Priced::new(Algorithm::Sharp, Protocol::Simple, sharp.start_s, 0.0, wire_s))
}

#[cfg(test)]
#[path = "collective_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "collective_measured_tests.rs"]
mod measured;
