//! A machine described from the output of its own tools: NVIDIA's listing of GPUs and of the connections between them,
//! the kernel's listing of network cards, processors and memory, and the log of a measured collective. Everything here
//! turns text into data; the command line runs the tools and reads the files.

use crate::catalogue;
use crate::collective::{self, Operation};
use crate::error::ClusterError;
use crate::link::axis_link;
use altiplano_ir::cluster::{Device, Group, InterNode, IntraNode};
use altiplano_ir::mesh::{AxisId, Mesh};
use std::collections::{BTreeMap, BTreeSet};

/// A GPU as `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub name: String,
    pub memory_bytes: u64,
}

/// The connection of two GPUs, in the words of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// A GPU and itself.
    Same,
    /// Some links of NVLink, bundled.
    NvLink(u32),
    /// PCIe and everything in between: switches, the processor's bridge, its sockets.
    PciExpress,
}

/// The connection of every GPU to every other.
pub type Connections = Vec<Vec<Connection>>;

/// A port of a network card.
#[derive(Clone, Debug, PartialEq)]
pub struct Nic {
    /// The kernel's name, `mlx5_0`.
    pub name: String,
    pub bytes_per_s: f64,
}

/// A measured collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub operation: Operation,
    pub devices: u32,
    pub nodes: u32,
    pub bytes: u64,
    pub seconds: f64,
}

/// The GPUs of a listing, one per line.
pub fn parse_gpus(text: &str) -> Result<Vec<Gpu>, ClusterError> {
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let gpu = line.rsplit_once(',').and_then(|(name, memory)| {
            let mut words = memory.split_whitespace();
            let number: u64 = words.next()?.parse().ok()?;
            let unit: u64 = match words.next() {
                Some("MiB") | None => 1 << 20,
                Some("GiB") => 1 << 30,
                Some(_) => return None,
            };
            let name = name.trim().to_string();
            let memory_bytes = number.checked_mul(unit).filter(|&b| b > 0)?;
            (!name.is_empty() && words.next().is_none()).then_some(Gpu { name, memory_bytes })
        });
        match gpu {
            Some(gpu) => found.push(gpu),
            // The header of a listing that was requested with one.
            None if found.is_empty() && line.starts_with("name,") => {}
            None => return Err(ClusterError::GpuLine { line: i + 1 }),
        }
    }
    if found.is_empty() { Err(ClusterError::NoGpus) } else { Ok(found) }
}

/// The matrix of `nvidia-smi topo -m`, without its columns of network cards and of affinities.
pub fn parse_topology(text: &str) -> Result<Connections, ClusterError> {
    let is_gpu = |word: &str| word.strip_prefix("GPU").is_some_and(is_number);
    // The heading is underlined for terminals.
    let plain = strip_escapes(text);
    let mut lines = plain.lines().enumerate();
    let gpus = lines
        .by_ref()
        .map(|(_, line)| line.split_whitespace().take_while(|word| is_gpu(word)).count())
        .find(|&count| count > 0)
        .ok_or(ClusterError::NoMatrix)?;
    let mut found: Connections = Vec::new();
    for (i, line) in lines {
        let mut words = line.split_whitespace();
        if found.len() == gpus || !words.next().is_some_and(is_gpu) {
            continue;
        }
        let row = words.take(gpus).map(|word| connection(word, i + 1)).collect::<Result<Vec<_>, _>>()?;
        if row.len() < gpus {
            return Err(ClusterError::MatrixRow { line: i + 1, found: row.len(), expected: gpus });
        }
        found.push(row);
    }
    if found.len() < gpus { Err(ClusterError::MatrixRows { found: found.len(), expected: gpus }) } else { Ok(found) }
}

fn connection(word: &str, line: usize) -> Result<Connection, ClusterError> {
    let unknown = || ClusterError::Connection { line, text: word.chars().take(40).collect() };
    match word {
        "X" => Ok(Connection::Same),
        "PIX" | "PXB" | "PHB" | "NODE" | "SYS" => Ok(Connection::PciExpress),
        _ => {
            let links = word.strip_prefix("NV").filter(|n| is_number(n)).ok_or_else(unknown)?;
            links.parse().ok().filter(|n| (1..=1000).contains(n)).map(Connection::NvLink).ok_or_else(unknown)
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Text without the control sequences that set a terminal's colours.
fn strip_escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            chars.by_ref().find(|c| c.is_ascii_alphabetic());
        } else {
            out.push(c);
        }
    }
    out
}

/// Bytes/s of a port's `rate` under `/sys/class/infiniband`: `200 Gb/sec (4X HDR)`.
pub fn parse_rate(text: &str) -> Option<f64> {
    let (number, unit) = text.trim().split_once(' ')?;
    let number: f64 = number.parse().ok()?;
    (unit.starts_with("Gb/sec") && number.is_finite() && number > 0.0).then_some(number * 1e9 / 8.0)
}

/// Cores of a `/proc/cpuinfo`: pairs of socket and core, since a core with two threads computes no more. If it does not
/// list cores, the number of processors.
pub fn parse_cores(cpuinfo: &str) -> u32 {
    let mut cores = BTreeSet::new();
    let (mut processors, mut socket) = (0, "");
    for line in cpuinfo.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        match key.trim() {
            "processor" => processors += 1,
            "physical id" => socket = value.trim(),
            "core id" => drop(cores.insert((socket, value.trim()))),
            _ => {}
        }
    }
    if cores.is_empty() { processors } else { cores.len() as u32 }
}

/// Bytes of `MemTotal` in a `/proc/meminfo`.
pub fn parse_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// The largest message in the log of a test of nccl-tests (or rccl-tests), out of place.
pub fn parse_nccl_tests(text: &str) -> Result<Measured, ClusterError> {
    let mut hosts = BTreeSet::new();
    let mut ranks = 0u32;
    let mut single_process = None;
    let mut columns: Option<(usize, usize, usize)> = None;
    let mut largest: Option<(u64, f64, f64, f64)> = None;
    for line in text.lines() {
        // The prefix that mpirun puts before the output of a rank.
        let line = line.split_once("<stdout>:").map_or(line, |(_, rest)| rest).trim();
        let words: Vec<&str> = line.trim_start_matches('#').split_whitespace().collect();
        if line.starts_with('#') {
            let after = |word: &str| words.iter().position(|w| *w == word).and_then(|i| words.get(i + 1)).copied();
            if words.first() == Some(&"Rank") && words.contains(&"device") {
                ranks += 1;
                hosts.extend(after("on").map(str::to_string));
            }
            if let (Some(threads), Some(gpus)) = (after("nThread"), after("nGpus")) {
                single_process = threads.parse::<u32>().ok().zip(gpus.parse::<u32>().ok());
            }
            let at = |word: &str| words.iter().position(|w| *w == word);
            if let (Some(0), Some(time), Some(algbw), Some(busbw)) = (at("size"), at("time"), at("algbw"), at("busbw"))
            {
                columns = Some((time, algbw, busbw));
            }
            continue;
        }
        let Some((time, algbw, busbw)) = columns else { continue };
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<f64>().ok()).filter(|n| n.is_finite() && *n > 0.0);
        let bytes = words.first().and_then(|w| w.parse::<u64>().ok());
        if let (Some(bytes), Some(us), Some(algbw), Some(busbw)) = (bytes, number(time), number(algbw), number(busbw))
            && largest.is_none_or(|l| bytes >= l.0)
        {
            largest = Some((bytes, us / 1e6, algbw, busbw));
        }
    }
    let (bytes, seconds, algbw, busbw) = largest.ok_or(ClusterError::NoMeasurements)?;
    let devices = match ranks {
        0 => single_process.and_then(|(threads, gpus)| threads.checked_mul(gpus)).unwrap_or(0),
        ranks => ranks,
    };
    if devices < 2 {
        return Err(ClusterError::NoMeasurements);
    }
    let nodes = hosts.len().max(1) as u32;
    Ok(Measured { operation: operation(text, f64::from(devices), busbw / algbw), devices, nodes, bytes, seconds })
}

/// The measured operation, by the name of the test if the log has it. Otherwise by the ratio that nccl-tests defines
/// for each between its two bandwidths.
fn operation(text: &str, n: f64, ratio: f64) -> Operation {
    let named = [
        ("all_reduce_perf", Operation::AllReduce),
        ("all_gather_perf", Operation::AllGather),
        ("reduce_scatter_perf", Operation::ReduceScatter),
        ("alltoall_perf", Operation::AllToAll),
        ("broadcast_perf", Operation::Broadcast),
        ("sendrecv_perf", Operation::SendReceive),
    ];
    if let Some((_, operation)) = named.iter().find(|(name, _)| text.contains(name)) {
        return *operation;
    }
    let ratios = [
        (2.0 * (n - 1.0) / n, Operation::AllReduce),
        ((n - 1.0) / n, Operation::AllGather),
        (1.0, Operation::Broadcast),
    ];
    let mut nearest = ratios[0];
    for candidate in ratios {
        if (candidate.0 - ratio).abs() < (nearest.0 - ratio).abs() - 1e-3 {
            nearest = candidate;
        }
    }
    nearest.1
}

/// The catalogue's device for a GPU.
pub fn catalogue_device(gpu: &Gpu) -> Option<Device> {
    catalogue_name(gpu).and_then(catalogue::device)
}

/// The catalogue's name for a GPU, from its driver's name.
fn catalogue_name(gpu: &Gpu) -> Option<&'static str> {
    // Parts of the driver's names, specific ones before general ones.
    const NAMES: &[(&[&str], &str)] = &[
        (&["V100-SXM3"], "V100-SXM3-32GB"),
        (&["V100-SXM2", "16GB"], "V100-SXM2-16GB"),
        (&["V100-SXM2", "32GB"], "V100-SXM2-32GB"),
        (&["A100", "PCI", "80GB"], "A100-PCIe"),
        (&["A100", "PCI"], "A100-PCIe-40GB"),
        (&["A100", "40GB"], "A100-SXM-40GB"),
        (&["A100", "80GB"], "A100-SXM-80GB"),
        (&["H100", "PCI"], "H100-PCIe"),
        (&["H100"], "H100-SXM"),
        (&["H200"], "H200"),
        (&["B200"], "B200"),
        (&["L40S"], "L40S"),
        (&["RTX 4090"], "RTX-4090"),
    ];
    // Superchips and paired cards share a part of the name, but not the figures.
    if ["GB200", "GH200", "NVL"].iter().any(|other| gpu.name.contains(other)) {
        return None;
    }
    let is =
        |parts: &&(&[&str], &'static str)| parts.0.iter().all(|p| gpu.name.to_uppercase().contains(&p.to_uppercase()));
    NAMES.iter().find(is).map(|(_, name)| *name)
}

/// A group of nodes that are all like the one with these GPUs.
///
/// Without connections, or if some pair has no NVLink, GPUs are assumed to communicate over PCIe, since a ring is as
/// slow as its slowest hop.
pub fn gpu_group(
    nodes: u32,
    gpus: &[Gpu],
    connections: Option<&Connections>,
    nics: &[Nic],
) -> Result<Group, ClusterError> {
    let first = gpus.first().ok_or(ClusterError::NoGpus)?;
    if let Some(other) = gpus.iter().find(|g| *g != first) {
        let told_apart = |g: &Gpu| format!("{}, {} MiB", g.name, g.memory_bytes >> 20);
        return Err(ClusterError::MixedGpus { first: told_apart(first), other: told_apart(other) });
    }
    if let Some(matrix) = connections.filter(|c| c.len() != gpus.len()) {
        return Err(ClusterError::GpuCount { matrix: matrix.len(), listed: gpus.len() });
    }
    let known = catalogue_device(first);
    let mut device =
        known.ok_or_else(|| ClusterError::UnknownGpu { name: first.name.clone(), known: catalogue::device_names() })?;
    let intra_node = intra_node(&device, gpus.len(), connections);
    // Drivers keep some of the memory. A larger difference means another card, or a part of one.
    let ratio = first.memory_bytes as f64 / device.memory_bytes as f64;
    if !(0.9..1.15).contains(&ratio) {
        device.host_bytes_per_s = Some(catalogue::host_bytes_per_s(&device.name));
        device.name = format!("{} with {} MiB", device.name, first.memory_bytes >> 20);
        device.memory_bytes = first.memory_bytes;
    }
    group(nodes, gpus.len() as u32, device, intra_node, nics)
}

/// A group of nodes that are all like the one with these cores. Each core is a worker with its share of the memory.
pub fn cpu_group(nodes: u32, cores: u32, memory_bytes: u64, nics: &[Nic]) -> Result<Group, ClusterError> {
    let cores = cores.max(1);
    let worker = catalogue::device("cpu-worker").ok_or(ClusterError::NoGpus)?;
    let memory_bytes = (memory_bytes / u64::from(cores)).max(1);
    let device = Device { name: "cpu-core".to_string(), memory_bytes, ..worker };
    let intra_node = IntraNode { kind: "shared-memory".to_string(), bytes_per_s: 4e9, latency_s: 5e-6 };
    group(nodes, cores, device, intra_node, nics)
}

fn group(
    nodes: u32,
    devices_per_node: u32,
    device: Device,
    intra_node: IntraNode,
    nics: &[Nic],
) -> Result<Group, ClusterError> {
    let inter_node = match inter_node(nics) {
        Some(link) => link,
        None if nodes > 1 => return Err(ClusterError::NoNics { nodes }),
        // Never crossed.
        None => InterNode {
            kind: String::new(),
            bytes_per_s: intra_node.bytes_per_s,
            nics: 1,
            latency_s: intra_node.latency_s,
            oversubscription: 1.0,
        },
    };
    Ok(Group {
        nodes,
        devices_per_node,
        device,
        intra_node,
        inter_node,
        host_memory_bytes: None,
        price_per_hour: None,
        dispatch: None,
    })
}

/// Number of NVLink links of each GPU, and bytes/s of one in each direction, by generation (NVIDIA's datasheets: 300,
/// 600, 900 and 1800 GB/s per GPU for both directions).
fn nvlink(generation: u32) -> (u32, f64) {
    match generation {
        0..=2 => (6, 25e9),
        3 => (12, 25e9),
        4 => (18, 25e9),
        _ => (18, 50e9),
    }
}

fn intra_node(device: &Device, gpus: usize, connections: Option<&Connections>) -> IntraNode {
    let generation = catalogue::nvlink_generation(&device.name).unwrap_or(0);
    let (links, link_bytes_per_s) = nvlink(generation);
    let others = gpus.saturating_sub(1).max(1) as u32;
    let rows = connections.map_or(&[] as &[_], Vec::as_slice);
    // Links of each pair; 0 for a pair without NVLink.
    let pairs: Vec<u32> = rows
        .iter()
        .flatten()
        .filter(|c| **c != Connection::Same)
        .map(|c| if let Connection::NvLink(n) = c { *n } else { 0 })
        .collect();
    let (least, most) = (pairs.iter().min().copied().unwrap_or(0), pairs.iter().max().copied().unwrap_or(0));
    let of_each =
        |row: &Vec<Connection>| -> u32 { row.iter().map(|c| if let Connection::NvLink(n) = c { *n } else { 0 }).sum() };
    let (kind, bytes_per_s, latency_s) = if least > 0 && least == most {
        // If each peer has more links than a GPU could give to all of them, the links lead to switches.
        let switched = least >= links || u64::from(least) * u64::from(others) > u64::from(links);
        let count = if switched { least } else { least * others };
        (if switched { "nvswitch" } else { "nvlink-mesh" }, f64::from(count) * link_bytes_per_s, 3e-6)
    } else if gpus == 8 && generation == 2 && rows.iter().all(|row| of_each(row) == links) {
        ("nvlink", f64::from(links) * link_bytes_per_s, 3e-6)
    } else {
        ("pcie", pci_express_bytes_per_s(&device.name), 5e-6)
    };
    IntraNode { kind: kind.to_string(), bytes_per_s, latency_s }
}

/// Bytes/s of sixteen lanes of the PCIe generation of a GPU of the catalogue: 3.0, 4.0 or 5.0.
fn pci_express_bytes_per_s(device: &str) -> f64 {
    match device {
        name if name.starts_with("V100") => 15.75e9,
        name if name.starts_with('H') || name.starts_with('B') => 63e9,
        _ => 31.5e9,
    }
}

/// The fastest ports. Slower ones are for storage and logins.
fn inter_node(nics: &[Nic]) -> Option<InterNode> {
    let mut by_rate: BTreeMap<u64, Vec<&Nic>> = BTreeMap::new();
    for nic in nics {
        by_rate.entry(nic.bytes_per_s as u64).or_default().push(nic);
    }
    let (_, fastest) = by_rate.pop_last()?;
    let is_efa = fastest.iter().all(|n| n.name.starts_with("efa") || n.name.starts_with("rdmap"));
    let (kind, latency_s) = match is_efa {
        // A P4 has four cards of 100 Gb/s.
        true if fastest.len() <= 4 && fastest[0].bytes_per_s <= 12.5e9 => ("efa-p4", 15e-6),
        true => ("efa", 15e-6),
        false => ("infiniband", 8e-6),
    };
    Some(InterNode {
        kind: kind.to_string(),
        bytes_per_s: fastest[0].bytes_per_s,
        nics: fastest.len() as u32,
        latency_s,
        oversubscription: 1.0,
    })
}

/// Sets the bandwidth of the links that a measured collective used, so that the cost model gives the measured time.
/// These are the links between nodes if it ran on several, otherwise those inside the node. The value is rounded to
/// three digits.
pub fn fit(group: &mut Group, measured: &Measured) -> Result<(), ClusterError> {
    let Measured { operation, devices, nodes, bytes, seconds } = *measured;
    let on_node = devices / nodes.max(1);
    if !devices.is_multiple_of(nodes.max(1)) || on_node > group.devices_per_node {
        return Err(ClusterError::OtherDevices { devices, nodes, devices_per_node: group.devices_per_node });
    }
    let mesh = Mesh::new(&[("a", devices)]);
    let modelled_s = |bytes_per_s: f64| {
        let mut trial = group.clone();
        trial.nodes = nodes;
        match nodes {
            1 => trial.intra_node.bytes_per_s = bytes_per_s,
            _ => trial.inter_node.bytes_per_s = bytes_per_s,
        }
        let link = axis_link(&trial, nodes, on_node, &mesh, &[AxisId(0)]);
        collective::best(operation, bytes, &link).seconds
    };
    // Seconds fall with the bandwidth, so bisection finds it between 1 byte/s and 1e15.
    let (mut slow, mut fast) = (0.0f64, 15.0f64);
    if modelled_s(10f64.powf(fast)) > seconds {
        return Err(ClusterError::TooFast { bytes, seconds });
    }
    for _ in 0..60 {
        let middle = (slow + fast) / 2.0;
        if modelled_s(10f64.powf(middle)) > seconds { slow = middle } else { fast = middle }
    }
    let digits = 10f64.powf(fast.floor() - 2.0);
    let bytes_per_s = (10f64.powf(fast) / digits).round() * digits;
    match nodes {
        1 => group.intra_node.bytes_per_s = bytes_per_s,
        _ => group.inter_node.bytes_per_s = bytes_per_s,
    }
    Ok(())
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
