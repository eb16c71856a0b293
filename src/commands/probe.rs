//! `altiplano probe`: writes the cluster file of this machine.

use crate::commands::say;
use altiplano::cost_models::probe::{
    Connections, Gpu, Measured, Nic, cpu_group, fit, gpu_group, parse_cores, parse_gpus, parse_memory,
    parse_nccl_tests, parse_rate, parse_topology,
};
use altiplano::cost_models::{ClusterError, toml_file::print};
use altiplano::ir::cluster::Cluster;
use altiplano::{Error, write_file};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Describe this machine as a cluster file, from nvidia-smi and the kernel
#[derive(Args)]
pub(crate) struct Probe {
    /// Write the cluster to this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Number of nodes like this one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    nodes: u32,
    /// Set the bandwidth of the links from a log of nccl-tests, such as all_reduce_perf
    #[arg(long, value_name = "LOG")]
    nccl_tests: Option<PathBuf>,
    /// Read the output of `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader`, possibly of another machine
    #[arg(long, value_name = "FILE")]
    gpus: Option<PathBuf>,
    /// Read the output of `nvidia-smi topo -m`
    #[arg(long, value_name = "FILE", requires = "gpus")]
    topology: Option<PathBuf>,
    /// The kernel's directory of network cards [default: /sys/class/infiniband, unless --gpus is given]
    #[arg(long, value_name = "DIR")]
    infiniband: Option<PathBuf>,
}

impl Probe {
    pub(crate) fn run(self) -> Result<(), Error> {
        let nics = match (&self.infiniband, &self.gpus) {
            (Some(directory), _) => network_cards(directory, true)?,
            (None, None) => network_cards(Path::new("/sys/class/infiniband"), false)?,
            (None, Some(_)) => Vec::new(),
        };
        let found = match &self.gpus {
            Some(file) => {
                let gpus = parsed(file, parse_gpus)?;
                let connections = self.topology.as_deref().map(|file| parsed(file, parse_topology)).transpose()?;
                Some((gpus, connections))
            }
            None => local_gpus()?,
        };
        let here = |error| Error::Cluster { text: "of this machine".to_string(), error: Box::new(error) };
        let mut group = match &found {
            Some((gpus, connections)) => gpu_group(self.nodes, gpus, connections.as_ref(), &nics).map_err(here)?,
            None => {
                let (cores, memory_bytes) = processors()?;
                cpu_group(self.nodes, cores, memory_bytes, &nics).map_err(here)?
            }
        };
        if found.is_some() && self.gpus.is_none() {
            // A listing in a file describes another machine, whose host memory is unknown.
            group.host_memory_bytes = Some(processors()?.1);
        }
        if let Some(file) = &self.nccl_tests {
            let measured: Measured = parsed(file, parse_nccl_tests)?;
            fit(&mut group, &measured).map_err(|error| of_file(file, error))?;
        }
        let name = format!("{} x {}", group.devices_per_node, group.device.name);
        let cluster = Cluster { name, groups: vec![group], between_groups: None, storage: None };
        let text = format!("# Detected values; latencies are typical ones.\n{}", print(&cluster));
        match &self.output {
            Some(file) => write_file(file, &text),
            None => say(text.trim_end()),
        }
    }
}

fn of_file(file: &Path, error: ClusterError) -> Error {
    Error::Cluster { text: file.display().to_string(), error: Box::new(error) }
}

fn read(file: &Path) -> Result<String, Error> {
    let bytes =
        altiplano::runtime::files::read(file).map_err(|error| Error::Read { file: file.to_path_buf(), error })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn parsed<T>(file: &Path, parse: fn(&str) -> Result<T, ClusterError>) -> Result<T, Error> {
    parse(&read(file)?).map_err(|error| of_file(file, error))
}

/// The local GPUs and their connections, from NVIDIA's driver; `None` without a driver or GPU.
fn local_gpus() -> Result<Option<(Vec<Gpu>, Option<Connections>)>, Error> {
    let Some(listed) = nvidia_smi(&["--query-gpu=name,memory.total", "--format=csv,noheader"]) else {
        return Ok(None);
    };
    let said = |error| Error::Cluster { text: "as nvidia-smi prints it".to_string(), error: Box::new(error) };
    if listed.trim().is_empty() {
        return Ok(None);
    }
    let gpus = parse_gpus(&listed).map_err(said)?;
    let connections = nvidia_smi(&["topo", "-m"]).map(|text| parse_topology(&text)).transpose().map_err(said)?;
    Ok(Some((gpus, connections)))
}

/// The output of nvidia-smi, if it is installed and succeeds. If it fails, the driver fails, and stderr shows its
/// message.
fn nvidia_smi(arguments: &[&str]) -> Option<String> {
    let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Some(text);
    }
    let reason = text.lines().chain(String::from_utf8_lossy(&output.stderr).lines()).next().unwrap_or("").to_string();
    complain!("warning: nvidia-smi {} failed and is ignored: {reason}", arguments[0]);
    None
}

/// The active ports in the kernel's directory of network cards. A directory given by the user must exist.
fn network_cards(directory: &Path, named: bool) -> Result<Vec<Nic>, Error> {
    let entries = |path: &Path| -> std::io::Result<Vec<PathBuf>> {
        let mut found = std::fs::read_dir(path)?.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?;
        found.sort();
        Ok(found)
    };
    let cards = match entries(directory) {
        Ok(cards) => cards,
        Err(error) if named => return Err(Error::Read { file: directory.to_path_buf(), error }),
        Err(_) => return Ok(Vec::new()),
    };
    let mut found = Vec::new();
    for card in cards {
        let name = card.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        for port in entries(&card.join("ports")).unwrap_or_default() {
            let is_up = std::fs::read_to_string(port.join("state")).is_ok_and(|state| state.contains("ACTIVE"));
            let rate = std::fs::read_to_string(port.join("rate")).ok().and_then(|rate| parse_rate(&rate));
            if let Some(bytes_per_s) = rate.filter(|_| is_up) {
                found.push(Nic { name: name.clone(), bytes_per_s });
            }
        }
    }
    Ok(found)
}

/// Number of cores, and bytes of memory.
pub(super) fn processors() -> Result<(u32, u64), Error> {
    let cores = std::fs::read_to_string("/proc/cpuinfo").map_or(0, |text| parse_cores(&text));
    // On systems other than Linux, the standard library knows the number of threads, if not of cores.
    let threads = || std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let cores = if cores == 0 { threads() } else { cores };
    let meminfo = Path::new("/proc/meminfo");
    let memory = parse_memory(&read(meminfo)?);
    let memory = memory.ok_or(Error::Option { option: "probe", problem: "/proc/meminfo has no MemTotal" })?;
    Ok((cores, memory))
}
