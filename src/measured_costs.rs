//! Plans and predicts by a measured profile. The runtime lists its kernels, and the profile gives their times. The
//! roofline prices kernels that the profile lacks, and these are counted.
//!
//! Devices share the cores of their own node alone. Traffic between nodes is priced in one place (`Profiled::collective_work` and
//! `message_s`), from measurements of ranks or else from the cluster's figures. A profile changes choices and predictions, and never
//! the programs of a plan, which is lowered by the figures of its cluster.

use crate::error::Error;
use crate::model::read_bytes;
use crate::units::{digits, plural};
use altiplano_cost_models::kernels::{Kernel, KernelKind, Matmul, kernels, of_runtime};
use altiplano_cost_models::probe;
use altiplano_cost_models::profile::{
    self, Lookup, Machine, MeasuredRanks, Outliers, Priced, Profile, ProfileError, Series,
};
use altiplano_cost_models::roofline::OPS_PER_FUSED_KERNEL;
use altiplano_cost_models::timeline::Price;
use altiplano_cost_models::{AxisLink, CostModel, Roofline, Rooflines, Runtime, TransferPath};
use altiplano_ir::cluster::{Cluster, Device, Group};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::leaf;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Body, BufferId, Phase, Program, Programs};
use altiplano_ir::reshard::Collective;
use altiplano_ir::types::TensorType;
use altiplano_ir::work::{MESSAGE, Term, Work, across_nodes};
use altiplano_planner::cache::{Digest, Key};
use altiplano_planner::lower::DedupedPrograms;
use altiplano_planner::predict::{predict, work_of};
use altiplano_planner::search::pareto::{Point, frontier};
use altiplano_planner::{Progress, Request, plan_or_closest, programs};
use altiplano_runtime::Session;
use altiplano_runtime::devices::cuda::{CudaOptions, Survey};
use altiplano_runtime::devices::xla::{OpenedPlugin, XlaOptions};
use altiplano_runtime::measure::gpu::{ATTENTION, BATCHED, INDEXED, MATMUL, Measurable, PASS, measure_devices};
use altiplano_runtime::measure::{Measured, Measurements, Options, measure};
use altiplano_runtime::work::{body_work, preparation, threads_of_device};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Families of terms in which each thread is a device of the group.
const COLLECTIVES: [&str; 6] = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "halo", "shift"];

/// Suffix of the families of collectives between several nodes.
const ACROSS: &str = "_across";

/// Families of terms that a pass over memory has once, however many elementwise ops are fused into it.
const OF_THE_PASS: [&str; 7] = ["dispatch", "registers", "load", "load_repeated", "load_strided", "run", "store"];

/// Prices of a device whose runtime was measured.
#[derive(Clone)]
pub(crate) struct Profiled {
    lookup: Arc<Lookup>,
    /// Prices whatever the profile lacks.
    roofline: Roofline,
    /// Devices per node of the cluster, which share its cores.
    on_node: u32,
    /// Number of the plan's devices on a node, and of those that compute at the same time.
    devices: u32,
    busy: u32,
    /// Cached seconds of single ops, for the search.
    ops: Arc<Mutex<HashMap<String, f64>>>,
    /// Key of the profile's content, for caches of dependent results.
    content: Option<Key>,
}

/// The work of a GPU kernel in measured terms: one term, or none if its kind is not measured.
fn work_of_gpu(kernel: &Kernel) -> Option<Work> {
    let bytes = (kernel.read_bytes + kernel.written_bytes) as f64;
    let term = match kernel.kind {
        KernelKind::Matmul(Matmul { batch, m, n, k, dtype, .. }) => {
            let [batch, m, n, k] = [batch, m, n, k].map(|size| size as f64);
            if batch > 1.0 {
                Term::once(BATCHED, dtype, [batch, m, n, k])
            } else {
                Term::once(MATMUL, dtype, [m, n, k])
            }
        }
        KernelKind::Attention(a) => Term::once(ATTENTION, a.dtype, [a.flop * a.share]),
        KernelKind::Fused { .. } => Term::once(PASS, DType::F32, [bytes]),
        KernelKind::Indexed => Term::once(INDEXED, DType::F32, [bytes]),
        _ => return None,
    };
    let mut work = Work::new(1);
    work.add(term);
    Some(work)
}

/// The parts of a plan that a profile does not cover.
#[derive(Clone, Debug, PartialEq, Default)]
pub(crate) struct Uncovered {
    /// Number of priced kernels in a step's bodies.
    pub kernels: usize,
    /// By family and type: the number of kernels outside the measured sizes, and the largest ratio to these.
    pub outside: BTreeMap<(String, DType), (usize, f64)>,
    /// Number of kernels of each family and type that was not measured.
    pub missing: BTreeMap<(String, DType), usize>,
}

/// Reads a profile.
pub fn load_profile(file: &Path) -> Result<Profile, Error> {
    let text = String::from_utf8_lossy(&read_bytes(file)?).into_owned();
    Profile::from_json(&text).map_err(|error| Error::Profile { file: file.to_path_buf(), error: Box::new(error) })
}

/// Plans by a profile, if there is one, and records it in the plan.
pub fn plan_by(request: &Request, profile: Option<&Profile>, progress: &dyn Progress) -> Result<Plan, Error> {
    let Some(profile) = profile else {
        return Ok(plan_or_closest(request, &Rooflines::of(&request.cluster), progress)?);
    };
    let group = measured_group(&request.cluster)?;
    let devices = request.cluster.num_devices();
    let cost = Profiled::new(profile.clone(), group, devices).map_err(Error::profile_option)?;
    let mut found = plan_or_closest(request, &cost, progress)?;
    found.profile = Some(profile.label());
    Ok(found)
}

/// The Pareto frontier of plans, by a profile if there is one.
pub fn frontier_by(request: &Request, profile: Option<&Profile>, progress: &dyn Progress) -> Result<Vec<Point>, Error> {
    let Some(profile) = profile else { return Ok(frontier(request, &Rooflines::of(&request.cluster), progress)?) };
    let group = measured_group(&request.cluster)?;
    let cost = Profiled::new(profile.clone(), group, request.cluster.num_devices()).map_err(Error::profile_option)?;
    let mut points = frontier(request, &cost, progress)?;
    points.iter_mut().for_each(|p| p.plan.profile = Some(profile.label()));
    Ok(points)
}

/// Predicts a plan again by a profile.
pub fn repredict(plan: &mut Plan, profile: &Profile) -> Result<(), Error> {
    let cost = Profiled::of_plan(profile, plan)?;
    let programs = programs(plan)?;
    predict(plan, &DedupedPrograms::whole(&programs), &cost);
    plan.profile = Some(profile.label());
    Ok(())
}

/// The group that a profile can price. One machine was measured, so all nodes must be like it.
fn measured_group(cluster: &Cluster) -> Result<&Group, Error> {
    match cluster.groups.as_slice() {
        [group] => Ok(group),
        _ => Err(Error::Option {
            option: "--profile",
            problem: "covers one kind of machine, and cannot price a cluster of several groups of nodes",
        }),
    }
}

impl Profiled {
    /// Prices of a plan with `devices` devices of a cluster's nodes, all of which compute at the same time.
    pub(crate) fn new(profile: Profile, group: &Group, devices: u32) -> Result<Profiled, ProfileError> {
        let device = &group.device;
        if profile.device != device.name {
            return Err(ProfileError::OtherDevice { profile: profile.device, cluster: device.name.clone() });
        }
        let content = Digest::new("profile").shown(&profile).key();
        let (lookup, roofline) = (Arc::new(Lookup::new(profile)), Roofline::new(device.clone()));
        let on_node = group.devices_per_node.max(1);
        let devices = devices.min(on_node);
        Ok(Profiled { lookup, roofline, on_node, devices, busy: devices, ops: Arc::default(), content })
    }

    /// Prices of a plan's devices.
    pub(crate) fn of_plan(profile: &Profile, plan: &Plan) -> Result<Profiled, Error> {
        let devices = plan.num_devices();
        let group = measured_group(&plan.cluster)?;
        Profiled::new(profile.clone(), group, devices).map_err(Error::profile_option)
    }

    pub(crate) fn profile(&self) -> &Profile {
        self.lookup.profile()
    }

    /// Returns whether it prices GPUs, which launch kernels one by one, as opposed to workers that share a machine.
    fn is_of_gpus(&self) -> bool {
        self.roofline.device().kind.is_gpu()
    }

    /// The work of a kernel, in terms that may have been measured.
    pub(crate) fn work(&self, kernel: &Kernel) -> Option<Work> {
        if self.is_of_gpus() { work_of_gpu(kernel) } else { kernel.work.clone() }
    }

    fn threads(&self) -> usize {
        threads_of_device(self.profile().machine.cores as usize, self.devices as usize)
    }

    /// The price of a term of some work.
    pub(crate) fn term(&self, term: &Term, work: &Work) -> Option<Priced> {
        // On GPUs and between nodes, all devices of each were measured together, as they run in a step.
        if self.is_of_gpus() || term.family.ends_with(ACROSS) {
            return self.lookup.price(term, term.threads);
        }
        // Each thread of a collective is a device; other kernels have their threads on each device.
        let is_collective = COLLECTIVES.contains(&term.family);
        let of_each = if is_collective { 1 } else { work.parts.max(term.threads) };
        self.lookup.price(term, self.busy.max(1) * of_each)
    }

    /// Seconds of some work; `None` if the profile lacks a part of it.
    fn work_s(&self, work: &Work) -> Option<f64> {
        work.terms.iter().map(|term| self.term(term, work).map(|p| p.seconds)).sum()
    }

    fn once_s(&self, family: &'static str, bytes: u64) -> f64 {
        let mut work = Work::new(1);
        if bytes > 0 {
            work.once(family, DType::F32, bytes as f64);
        }
        self.work_s(&work).unwrap_or_else(|| self.roofline_bytes_s(bytes))
    }

    /// Seconds to read and write a number of bytes, if nothing was measured.
    fn roofline_bytes_s(&self, bytes: u64) -> f64 {
        2.0 * bytes as f64 / self.roofline.device().memory_bytes_per_s
    }

    /// The parts of a plan that the profile does not cover.
    pub(crate) fn uncovered(&self, plan: &Plan, programs: &Programs) -> Uncovered {
        let mut found = Uncovered::default();
        for kernel in
            work_of(plan, &DedupedPrograms::whole(programs), self).iter().flatten().flat_map(|body| &body.kernels)
        {
            found.kernels += 1;
            let Some(work) = self.work(kernel) else { continue };
            let mut worst: Option<(&Term, f64)> = None;
            for term in &work.terms {
                match self.term(term, &work) {
                    None => *found.missing.entry((term.family.to_string(), term.dtype)).or_default() += 1,
                    Some(p) if p.outside > worst.map_or(1.0, |w| w.1) => worst = Some((term, p.outside)),
                    Some(_) => {}
                }
            }
            if let Some((term, outside)) = worst {
                let entry = found.outside.entry((term.family.to_string(), term.dtype)).or_default();
                *entry = (entry.0 + 1, entry.1.max(outside));
            }
        }
        found
    }

    /// Seconds of one op by itself, if it has its own kernel. An op that is fused gets its share of the pass.
    fn op_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType) -> Option<f64> {
        let key = format!("{op:?} {operands:?}");
        let known =
            |ops: &Mutex<HashMap<String, f64>>| ops.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if let Some(seconds) = known(&self.ops) {
            return Some(seconds);
        }
        let mut graph = Graph::new("op");
        let leaves: Vec<ValueId> = operands.iter().map(|&ty| leaf(&mut graph, String::new(), ty.clone())).collect();
        let reads = (0..).map(BufferId).zip(&leaves).map(|(b, &v)| (v, b)).collect();
        let v = graph.push(op.clone(), &leaves).ok()?;
        if graph.ty(v) != result {
            return None;
        }
        if self.is_of_gpus() {
            let of_op = kernels(&graph, &[v].into(), false);
            let seconds = of_op.iter().map(|kernel| self.kernel(kernel).seconds).sum();
            self.ops.lock().unwrap_or_else(PoisonError::into_inner).insert(key, seconds);
            return Some(seconds);
        }
        let writes = vec![(BufferId(u32::MAX), v)];
        let body =
            Body { name: String::new(), stage: 0, phase: Phase::Forward, graph, reads, writes, frees: Vec::new() };
        let mut seconds = 0.0;
        for call in body_work(&body, self.threads()) {
            for term in &call.work.terms {
                let fused = op.is_elementwise() && OF_THE_PASS.contains(&term.family);
                let part = if fused { 1.0 / OPS_PER_FUSED_KERNEL } else { 1.0 };
                seconds += part * self.term(term, &call.work)?.seconds;
            }
        }
        self.ops.lock().unwrap_or_else(PoisonError::into_inner).insert(key, seconds);
        Some(seconds)
    }
}

impl CostModel for Profiled {
    fn device(&self) -> &Device {
        self.roofline.device()
    }

    fn identity(&self) -> Option<String> {
        Some(format!("{:?}", (self.content?, &self.roofline, self.on_node, self.devices, self.busy)))
    }

    fn compute_s(&self, op: &Op, operands: &[&TensorType], result: &TensorType) -> f64 {
        match op {
            // These run nothing: they are present, folded or views.
            op if op.is_leaf() => 0.0,
            Op::Constant(_) | Op::Iota(_) | Op::AxisIndex(_) | Op::Collective(_) | Op::Microbatches(_) => 0.0,
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) => 0.0,
            Op::Composite(composite) => composite.body(operands).map_or(0.0, |body| {
                let graph = &body.graph;
                let inside = graph.values().filter(|&v| !body.is_constant(v));
                inside.map(|v| self.compute_s(&graph.node(v).op, &graph.operand_types(v), graph.ty(v))).sum()
            }),
            // The share of a fused op in its pass is an estimate, measured or not.
            op if self.is_of_gpus() && !matches!(op, Op::DotGeneral(_)) => {
                self.roofline.compute_s(op, operands, result)
            }
            _ => {
                let seconds = self.op_s(op, operands, result);
                seconds.unwrap_or_else(|| self.roofline.compute_s(op, operands, result))
            }
        }
    }

    fn kernel(&self, kernel: &Kernel) -> Price {
        let measured = self.work(kernel).and_then(|work| self.work_s(&work));
        let by_roofline = self.roofline.kernel(kernel);
        let issue_s = if self.is_of_gpus() { by_roofline.issue_s } else { 0.0 };
        Price { seconds: measured.unwrap_or(by_roofline.seconds), issue_s }
    }

    fn issue_s(&self, op: &Op, operands: &[&TensorType]) -> f64 {
        if self.is_of_gpus() { self.roofline.issue_s(op, operands) } else { 0.0 }
    }

    /// Measured with the collective itself.
    fn waiting_s(&self, devices: u64) -> f64 {
        if self.is_of_gpus() { self.roofline.waiting_s(devices) } else { 0.0 }
    }

    fn collective_s(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> f64 {
        let roofline = || self.roofline.collective_s(collective, operand_bytes, result_bytes, link);
        // One machine was measured, with its own GPUs.
        let was_measured = link.nodes <= 1 && link.devices <= u64::from(self.profile().machine.cores);
        if self.is_of_gpus() && !(was_measured && collective.communicates()) {
            return roofline();
        }
        if !collective.communicates() {
            return self.once_s("copy", result_bytes);
        }
        if link.devices < 2 {
            return 0.0;
        }
        let work = self.collective_work(collective, operand_bytes, result_bytes, link);
        self.work_s(&work).unwrap_or_else(roofline)
    }

    fn transfer_s(&self, bytes: u64, path: &TransferPath) -> f64 {
        if self.is_of_gpus() {
            return self.roofline.transfer_s(bytes, path);
        }
        self.send_s(bytes) + self.message_s(bytes, path) + self.receive_s(bytes)
    }

    fn runtime(&self) -> Option<&dyn Runtime> {
        (!self.is_of_gpus()).then_some(self as &dyn Runtime)
    }
}

impl Runtime for Profiled {
    fn at(&self, devices: u32, busy: u32) -> Box<dyn Runtime + '_> {
        let (devices, busy) = (devices.min(self.on_node), busy.min(self.on_node));
        let ops = if devices == self.devices && busy == self.busy { self.ops.clone() } else { Arc::default() };
        Box::new(Profiled { devices, busy, ops, ..self.clone() })
    }

    fn as_cost(&self) -> &dyn CostModel {
        self
    }

    fn kernels(&self, body: &Body) -> Vec<Kernel> {
        body_work(body, self.threads()).into_iter().map(|call| of_runtime(&body.graph, call)).collect()
    }

    fn collective_work(&self, collective: &Collective, operand_bytes: u64, result_bytes: u64, link: &AxisLink) -> Work {
        // The cost of a move does not depend on the element type.
        let bytes = operand_bytes.max(result_bytes) as f64;
        let term = match across_nodes(collective).filter(|_| link.nodes > 1) {
            Some(family) => Term::once(family, DType::F32, [link.nodes as f64, bytes]),
            None => Term::once(collective.name(), DType::F32, [bytes]),
        };
        let mut work = Work::new(1);
        work.add(Term { threads: link.devices as u32, ..term });
        work
    }

    /// Messages between threads of one process arrive at once. Between nodes, the cluster's figures cover what was not
    /// measured.
    fn message_s(&self, bytes: u64, path: &TransferPath) -> f64 {
        let term = Term::once(MESSAGE[usize::from(path.across)], DType::F32, [bytes as f64]);
        let unmeasured = || if path.across { path.transfer_s(bytes) } else { 0.0 };
        self.lookup.price(&term, 1).map_or_else(unmeasured, |p| p.seconds)
    }

    fn send_s(&self, bytes: u64) -> f64 {
        self.once_s("send", bytes)
    }

    fn receive_s(&self, bytes: u64) -> f64 {
        self.once_s("receive", bytes)
    }

    fn preparation_s(&self, program: &Program, stage: u32, each_microbatch: bool) -> f64 {
        self.work_s(&preparation(program, stage, each_microbatch)).unwrap_or(0.0)
    }
}

impl Uncovered {
    /// Warnings: a line on sizes outside the measured ones, and one on kernels that were not measured.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut outside: Vec<_> = self.outside.iter().collect();
        outside.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        if let Some((_, (_, most))) = outside.first() {
            let list: Vec<String> = outside
                .iter()
                .map(|((family, dtype), (n, most))| format!("{n} of {family} {dtype} by up to {} times", digits(*most)))
                .collect();
            lines.push(format!(
                "sizes among {} are up to {} times outside the measured range, where the roofline extrapolates the profile ({})",
                plural(self.kernels as u64, "kernel"),
                digits(*most),
                shortened(&list)
            ));
        }
        if !self.missing.is_empty() {
            let list: Vec<String> =
                self.missing.iter().map(|((family, dtype), n)| format!("{n} of {family} {dtype}")).collect();
            lines.push(format!(
                "of {}, the profile lacks some, which the roofline prices ({})",
                plural(self.kernels as u64, "kernel"),
                shortened(&list)
            ));
        }
        lines
    }
}

/// The first few entries of a list, and the number of the others.
fn shortened(list: &[String]) -> String {
    const FEW: usize = 4;
    let more = if list.len() > FEW { format!(", and {} kinds more", list.len() - FEW) } else { String::new() };
    format!("{}{more}", list[..list.len().min(FEW)].join(", "))
}

/// Describes the parts of a plan that a profile does not cover.
pub fn uncovered(plan: &Plan, profile: &Profile) -> Result<Vec<String>, Error> {
    Ok(Profiled::of_plan(profile, plan)?.uncovered(plan, &programs(plan)?).lines())
}

/// Measures this machine with the runtime's kernels; `tell` receives the current measurement and the progress.
///
/// # Errors
/// Fails if the system cannot start threads for devices.
pub fn measured_profile(quick: bool, tell: &mut (dyn FnMut(&str, usize, usize) + Send)) -> Result<Profile, Error> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let start = Instant::now();
    let found = measure(&Options { cores, quick }, tell)?;
    let machine = Machine { processor: processor(), cores: cores as u32, gpus: false };
    Ok(profile_of("cpu-worker".to_string(), machine, found, start))
}

/// Measures the GPUs of this machine with the kernels and libraries that plans run on them. The first GPU stands for
/// all.
///
/// # Errors
/// Fails if nothing can run on a GPU, or if a kernel fails.
pub fn measured_gpu_profile(
    options: &CudaOptions,
    quick: bool,
    tell: &mut dyn FnMut(&str, usize, usize),
) -> Result<Profile, Error> {
    let survey = Survey::of(&options.search);
    let gpus = survey.usable()?;
    let start = Instant::now();
    let start_session = |programs: &Programs| Session::on_gpus(programs, options);
    let measurable = Measurable { devices: gpus.len() as u32, are_cpus: false, start: &start_session };
    let found = measure_devices(measurable, quick, tell)?;
    let (name, memory_bytes) = gpus.first().map_or((String::new(), 0), |gpu| (gpu.name.clone(), gpu.memory_bytes));
    let known = probe::catalogue_device(&probe::Gpu { name: name.clone(), memory_bytes });
    // A cluster file may describe a device that the catalogue lacks, under the name from its driver.
    let device = known.map_or(name.clone(), |device| device.name);
    let machine = Machine { processor: name, cores: gpus.len() as u32, gpus: true };
    Ok(profile_of(device, machine, found, start))
}

/// Measures the devices of a PJRT plugin with the programs that XLA compiles for them. The first one stands for all.
///
/// # Errors
/// Fails if the plugin does, or if there is no room for what is measured.
pub fn measured_xla_profile(
    options: &XlaOptions,
    quick: bool,
    tell: &mut dyn FnMut(&str, usize, usize),
) -> Result<Profile, Error> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let start = Instant::now();
    let opened = OpenedPlugin::new(options, cores)?;
    let devices = opened.num_devices() as u32;
    let are_cpus = opened.is_cpu();
    let start_session = |programs: &Programs| opened.session(programs);
    let found = measure_devices(Measurable { devices, are_cpus, start: &start_session }, quick, tell)?;
    let kind = opened.kind()?;
    let device = match are_cpus {
        true => "cpu-worker".to_string(),
        false => {
            let known = probe::catalogue_device(&probe::Gpu { name: kind.clone(), memory_bytes: 0 });
            known.map_or(kind.clone(), |device| device.name)
        }
    };
    let processor = if are_cpus { format!("{} by XLA", processor()) } else { format!("{kind} by XLA") };
    Ok(profile_of(device, Machine { processor, cores: devices, gpus: true }, found, start))
}

fn profile_of(device: String, machine: Machine, found: Measurements, start: Instant) -> Profile {
    Profile {
        format: profile::FORMAT.into(),
        version: profile::VERSION,
        device,
        machine,
        measured_at: utc(SystemTime::now()),
        altiplano: env!("CARGO_PKG_VERSION").into(),
        series: found.measured.into_iter().map(series_of).collect(),
        seconds: start.elapsed().as_secs_f64(),
        outliers: Outliers { samples: found.samples, outliers: found.outliers, largest: found.largest },
        ranks: None,
        slower_shared: found.slower_shared,
    }
}

/// Replaces series of a profile by measurements of the links between ranks, on a number of nodes and ranks per node.
/// `seconds` is the time that the measurement took.
pub fn with_links(mut profile: Profile, found: Measurements, [nodes, on_node]: [usize; 2], seconds: f64) -> Profile {
    let is_new = |series: &Series| found.measured.iter().any(|m| m.family == series.family);
    profile.series.retain(|series| !is_new(series));
    profile.series.extend(found.measured.into_iter().map(series_of));
    profile.seconds += seconds;
    profile.outliers.samples += found.samples;
    profile.outliers.outliers += found.outliers;
    profile.outliers.largest = profile.outliers.largest.max(found.largest);
    let measured_at = utc(SystemTime::now());
    profile.ranks = Some(MeasuredRanks { nodes: nodes as u32, on_node: on_node as u32, measured_at });
    profile
}

fn series_of(m: Measured) -> Series {
    let (threads, load, family) = (m.threads as u32, m.load as u32, m.family.to_string());
    let mut series = Series { family, dtype: m.dtype, threads, load, axes: m.axes, seconds: m.seconds };
    series.make_monotone();
    series
}

/// The processor's name, from Linux.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    named.map_or(std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// A time such as `2026-11-22T01:20:00Z`, by the proleptic Gregorian calendar, counted in eras of 400 years from March.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, of_day) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (date, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = 400 * era + year + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_have_their_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_311_000, "2026-11-22T01:30:00Z"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }
}
