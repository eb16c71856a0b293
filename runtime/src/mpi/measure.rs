//! Measures the communication between ranks, done as in a plan: collectives and messages within a node and between
//! nodes, over sizes. The first rank times the groups to which it belongs. The other ranks take part, or sleep until
//! they do.

use crate::arena::Arena;
use crate::collective::Member;
use crate::element::Class;
use crate::error::{KernelError, RanksError, RuntimeError};
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::measure::network::{collectives, doublings};
use crate::measure::{Harness, Measurements};
use crate::mpi::sys::Communicator;
use crate::mpi::wire::RankWire;
use crate::ranks::{Carrier, World};
use altiplano_ir::dtype::DType;
use altiplano_ir::reshard::Collective;
use altiplano_ir::work::{MESSAGE, across_nodes};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Measurements of the links between ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    pub nodes: usize,
    pub ranks_on_node: usize,
    /// Present on the first rank only.
    pub found: Option<Measurements>,
}

/// For each of the first nodes, the devices of a group by number in the node's order.
type Group = Vec<usize>;

struct Linked {
    world: World,
    all: Arc<Communicator>,
    mailbox: Mailbox,
    /// The ranks of each node, in order; each list is cut to the size of the smallest node.
    nodes: Vec<Vec<usize>>,
    harness: Harness,
}

/// Approximate seconds per measured point.
const POINT_S: f64 = 0.2;

/// Measures all links; all ranks must take part. `tell` receives the current measurement and the progress.
pub fn measure_links(
    world: World,
    all: Arc<Communicator>,
    quick: bool,
    tell: &mut dyn FnMut(&str, usize, usize),
) -> Result<(Links, World), RuntimeError> {
    let node_of = world.nodes().to_vec();
    let mut nodes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    node_of.iter().enumerate().for_each(|(rank, &node)| nodes.entry(node).or_default().push(rank));
    let least = nodes.values().map(Vec::len).min().unwrap_or(0);
    let nodes: Vec<Vec<usize>> = nodes.into_values().map(|ranks| ranks[..least].to_vec()).collect();
    if node_of.len() < 2 {
        return Err(RuntimeError::Ranks(Box::new(RanksError::NoLinks)));
    }
    let mailbox = Mailbox::of_rank(RankWire::new(all.clone(), false, world.watch()));
    let mut linked = Linked { world, all, mailbox, nodes, harness: Harness::new(quick) };
    let measured = linked.measure(tell);
    let Linked { world, mailbox, nodes, harness, .. } = linked;
    drop(mailbox);
    measured.map_err(RuntimeError::Carrier)?;
    let found = world.leads().then_some(harness.found);
    Ok((Links { nodes: nodes.len(), ranks_on_node: least, found }, world))
}

impl Linked {
    fn measure(&mut self, tell: &mut dyn FnMut(&str, usize, usize)) -> Result<(), KernelError> {
        let (on_node, num_nodes) = (self.nodes[0].len(), self.nodes.len());
        let widths: &[usize] = match self.harness.quick {
            true => &[16, 1 << 16],
            false => &[16, 1 << 10, 1 << 14, 1 << 17, 1 << 20],
        };
        let inside = doublings(2, on_node);
        // By number of devices: the numbers of nodes of a group, and of its devices on each. Every device of a node is
        // in a group.
        let mut between: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for nodes in doublings(2, num_nodes) {
            for of_each in doublings(1, on_node).into_iter().filter(|&m| on_node.is_multiple_of(m)) {
                between.entry(nodes * of_each).or_default().push((nodes, of_each));
            }
        }
        let total = inside.len() + between.len() + 1;
        for (done, &devices) in inside.iter().enumerate() {
            tell("collectives within a node", done, total);
            for (collective, priced) in collectives(devices) {
                let first = &self.nodes[0][..devices];
                let groups = vec![first.to_vec()];
                let seconds = self.collective_of(&groups, &collective, devices, widths)?;
                self.add(collective.name(), devices, vec![bytes_of(widths, devices, priced)], seconds);
            }
        }
        for (done, (&devices, ways)) in between.iter().enumerate() {
            tell("collectives between nodes", inside.len() + done, total);
            for (collective, priced) in collectives(devices) {
                let Some(family) = across_nodes(&collective) else { continue };
                let mut seconds = Vec::new();
                for &(nodes, of_each) in ways {
                    let group = |first: usize| -> Group {
                        let of_node = |ranks: &Vec<usize>| ranks[first..first + of_each].to_vec();
                        self.nodes[..nodes].iter().flat_map(of_node).collect()
                    };
                    let groups: Vec<Group> = (0..on_node).step_by(of_each).map(group).collect();
                    seconds.extend(self.collective_of(&groups, &collective, devices, widths)?);
                }
                let nodes = ways.iter().map(|way| way.0 as f64).collect();
                self.add(family, devices, vec![nodes, bytes_of(widths, devices, priced)], seconds);
            }
        }
        tell("messages", total - 1, total);
        let first = self.nodes[0][0];
        let neighbour = self.nodes[0].get(1).copied();
        let afar = self.nodes.get(1).map(|ranks| ranks[0]);
        for (family, to) in MESSAGE.into_iter().zip([neighbour, afar]) {
            let Some(to) = to else { continue };
            let sizes: &[usize] = match self.harness.quick {
                true => &[64, 1 << 18],
                false => &[64, 1 << 12, 1 << 16, 1 << 20, 1 << 23],
            };
            let mut seconds = Vec::new();
            for &bytes in sizes {
                seconds.push(self.message(first, to, bytes)?);
            }
            self.add(family, 1, vec![sizes.iter().map(|&n| n as f64).collect()], seconds);
        }
        Ok(())
    }

    /// Records a measurement of the first rank.
    fn add(&mut self, family: &'static str, devices: usize, axes: Vec<Vec<f64>>, seconds: Vec<f64>) {
        self.harness.load = devices;
        self.harness.grid(family, DType::F32, devices, axes, seconds);
    }

    /// Seconds of a collective by width, run by all groups at once.
    fn collective_of(
        &mut self,
        groups: &[Group],
        collective: &Collective,
        devices: usize,
        widths: &[usize],
    ) -> Result<Vec<f64>, KernelError> {
        let me = self.mailbox.rank;
        let group = groups.iter().find(|group| group.contains(&me)).cloned().unwrap_or_default();
        let place = group.iter().position(|&rank| rank == me).unwrap_or(0);
        let arena = Arena::new(None);
        let mut seconds = Vec::with_capacity(widths.len());
        for &width in widths {
            let takes_part = !group.is_empty();
            let tensor = Arc::new(arena.zeros(Class::F32, if takes_part { devices * width } else { 0 })?);
            let shape = [devices, width];
            let once = |mailbox: &mut Mailbox| {
                let mut member = Member { mailbox, ranks: group.clone(), me: place };
                member.run(collective, DType::F32, &shape, tensor.clone(), false).map(drop)
            };
            seconds.push(self.timed(takes_part, once)?);
        }
        Ok(seconds)
    }

    /// Seconds for a message of `bytes` bytes between two ranks: half of a round trip.
    fn message(&mut self, from: usize, to: usize, bytes: usize) -> Result<f64, KernelError> {
        let me = self.mailbox.rank;
        let words = vec![0u64; bytes / 8];
        let once = |mailbox: &mut Mailbox| {
            if me == from {
                mailbox.send(to, Tag::Channel, Payload::Words(words.clone()));
            }
            let other = if me == from { to } else { from };
            let received = mailbox.receive(other, Tag::Channel)?;
            if me == to {
                mailbox.send(from, Tag::Channel, received);
            }
            mailbox.check()
        };
        Ok(self.timed(me == from || me == to, once)? / 2.0)
    }

    /// Seconds of a joint operation of some ranks, as measured by the first. The others wait without using a core.
    ///
    /// The fastest of several runs counts. If another program has the core of one rank, all others wait, which their
    /// clocks cannot tell from waiting for each other.
    fn timed(
        &mut self,
        takes_part: bool,
        once: impl Fn(&mut Mailbox) -> Result<(), KernelError>,
    ) -> Result<f64, KernelError> {
        let all = self.all.clone();
        all.barrier_asleep()?;
        let run = |mailbox: &mut Mailbox, times: u64| {
            let start = Instant::now();
            for _ in 0..if takes_part { times } else { 0 } {
                once(mailbox)?;
            }
            Ok(start.elapsed().as_secs_f64() / times as f64)
        };
        // The first run creates the group and its connections.
        run(&mut self.mailbox, 1)?;
        let first_s = run(&mut self.mailbox, 2)?;
        all.barrier_asleep()?;
        // All repeat as often as the slowest of the first runs suggests.
        let told = all.tell(&[first_s.to_bits()])?;
        let slowest_s = told.iter().filter_map(|words| words.first()).map(|&w| f64::from_bits(w)).fold(1e-7, f64::max);
        let (point_s, most) = if self.harness.quick { (POINT_S / 10.0, 3) } else { (POINT_S, 15) };
        let samples = ((point_s / slowest_s) as usize).clamp(1, most);
        let times = ((point_s / slowest_s / samples as f64) as u64).clamp(1, 64);
        let mut taken = Vec::with_capacity(samples);
        for _ in 0..samples {
            taken.push(run(&mut self.mailbox, times)?);
        }
        if let Some(wire) = self.mailbox.ranks() {
            wire.flush()?;
        }
        all.barrier_asleep()?;
        let least_s = taken.iter().copied().fold(f64::INFINITY, f64::min);
        if self.world.leads() && takes_part {
            self.harness.median(taken);
        }
        Ok(least_s)
    }
}

/// The sizes by which a collective of tensors of these widths is priced.
fn bytes_of(widths: &[usize], devices: usize, priced: f64) -> Vec<f64> {
    widths.iter().map(|&width| 4.0 * (width * devices) as f64 * priced).collect()
}
