//! Certificates: XLA compiles the bodies of a plan's programs for devices that are not there, and says what they take.
//!
//! A body is one executable with a replica for each device of its stage, as [`crate::program`] runs it. Equal bodies are
//! compiled once. Values between bodies are counted by the program, and all else as the compiler allocates it.

mod memory;
mod targets;

pub use memory::{Peak, peak};
pub use targets::{TARGETS, Target};

use crate::hlo::{self, Collectives, Kind};
use crate::pjrt::{Compiled, Launch, Memory, Order, PjrtError, Platform, Plugin, Topology};
use crate::program::{anonymous, begun_sums, body_text};
use altiplano_ir::attention;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Op;
use altiplano_ir::program::{Body, Call, Program, Programs};
use altiplano_ir::reshard::Collective;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// The reason why nothing can be certified.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CertifyError {
    #[error("--for: there is no target '{name}'; the targets are {known}")]
    Target { name: String, known: String },
    #[error("{}: is a plugin for {found} and does not compile for {target}", path.display())]
    Platform { path: PathBuf, found: String, target: String },
    #[error("{}: the plugin does not compile for {target}: {message}", path.display())]
    Devices { path: PathBuf, target: String, message: String },
    #[error("XLA shows the compiled {0} in a form that cannot be read")]
    Form(String),
    #[error(transparent)]
    Plugin(#[from] PjrtError),
}

/// The compiler's figures for one body.
#[derive(Clone, Debug, PartialEq)]
pub struct Certified {
    /// In the order that holds few bytes.
    pub memory: Memory,
    /// In the order that starts communication early; the same for a body without.
    pub overlapped: Memory,
    /// Collectives that the compiler emitted.
    pub collectives: Collectives,
    /// Seconds of compiling.
    pub seconds: f64,
    /// True if an equal body was compiled before.
    pub again: bool,
}

/// The bodies of one program, each certified or with the compiler's message.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    pub bodies: Vec<Result<Certified, PjrtError>>,
}

/// Compiles programs for one target.
pub struct Certifier {
    plugin: Arc<Plugin>,
    target: Target,
    topologies: BTreeMap<(u32, u32), Topology>,
    done: BTreeMap<String, Result<Certified, PjrtError>>,
}

impl Certifier {
    pub fn new(plugin: Arc<Plugin>, target: Target) -> Certifier {
        Certifier { plugin, target, topologies: BTreeMap::new(), done: BTreeMap::new() }
    }

    /// The compiler and its version, in one line.
    pub fn version(&self) -> Result<String, CertifyError> {
        let mut words = vec![self.plugin.described()];
        // TPUs' plugin tells when it was built, and those for GPUs only the name of the device.
        if self.target.platform == Platform::Tpu {
            let topology = self.topologies.values().next();
            let text = topology.map(Topology::platform_version).transpose()?.unwrap_or_default();
            words.extend(text.lines().map(|line| line.trim().to_string()).filter(|line| !line.is_empty()));
        }
        Ok(words.join("; "))
    }

    fn topology(&mut self, nodes: u32, devices: u32) -> Result<&Topology, CertifyError> {
        if !self.topologies.contains_key(&(nodes, devices)) {
            let topology = self.target.topology(&self.plugin, nodes, devices)?;
            self.topologies.insert((nodes, devices), topology);
        }
        Ok(&self.topologies[&(nodes, devices)])
    }

    /// Compiles the bodies of a program on a `submesh`: so many nodes with so many devices each. `before` is told of each
    /// body before it is compiled.
    pub fn stage(
        &mut self,
        program: &Program,
        submesh: (u32, u32),
        before: &dyn Fn(&Body),
    ) -> Result<Stage, CertifyError> {
        let (nodes, devices) = submesh;
        self.topology(nodes, devices)?;
        let mut bodies = Vec::new();
        let has_kernels = self.target.platform == Platform::Cuda;
        let found = if has_kernels { attention::find(program, self.target.widest_head()) } else { Vec::new() };
        let mut attention = found.into_iter();
        for (body, begun) in program.bodies.iter().zip(begun_sums(program)) {
            let passes = attention.next().unwrap_or_default();
            let text = body_text(program, &anonymous(body), &begun, &passes);
            let key = format!("{nodes} x {devices}\n{text}");
            if let Some(done) = self.done.get(&key) {
                bodies.push(done.clone().map(|certified| Certified { again: true, ..certified }));
                continue;
            }
            before(body);
            let mut certified = self.body(program, body, &text, submesh)?;
            if certified.is_err() && !passes.is_empty() {
                // The compiler has no such kernels for this target.
                let text = body_text(program, &anonymous(body), &begun, &[]);
                certified = self.body(program, body, &text, submesh)?;
            }
            self.done.insert(key, certified.clone());
            bodies.push(certified);
        }
        Ok(Stage { bodies })
    }

    fn body(
        &self,
        program: &Program,
        body: &Body,
        text: &str,
        size: (u32, u32),
    ) -> Result<Result<Certified, PjrtError>, CertifyError> {
        let launch = Launch { replicas: program.mesh.num_devices(), ..Launch::default() };
        let begun = Instant::now();
        let little = match self.compiled(text, launch, size, Order::Memory)? {
            Ok(compiled) => compiled,
            Err(refused) => return Ok(Err(refused)),
        };
        let has_orders = self.target.platform == Platform::Cuda && !planned(body, &program.mesh).is_empty();
        let early = has_orders.then(|| self.compiled(text, launch, size, Order::Overlap)).transpose()?;
        // A program that does not compile in this order runs in the other one.
        let early = early.and_then(Result::ok);
        let taken = early.as_ref().unwrap_or(&little);
        let seconds = begun.elapsed().as_secs_f64();
        let collectives = emitted(taken)?.ok_or_else(|| CertifyError::Form(body.name.clone()))?;
        Ok(Ok(Certified { memory: little.memory()?, overlapped: taken.memory()?, collectives, seconds, again: false }))
    }

    /// Compiles a text, with the first settings of the target that succeed.
    fn compiled(
        &self,
        text: &str,
        launch: Launch,
        size: (u32, u32),
        order: Order,
    ) -> Result<Result<Compiled, PjrtError>, CertifyError> {
        let mut refused = None;
        for mut settings in self.target.settings(self.plugin.path()) {
            if self.target.platform == Platform::Cuda {
                settings.extend(order.settings());
            }
            match self.topologies[&size].compile(text, launch, &settings) {
                Ok(compiled) => return Ok(Ok(compiled)),
                // The last settings are those that most programs compile with.
                Err(error @ PjrtError::Refused { .. }) => refused = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        refused.map(Err).ok_or_else(|| CertifyError::Form("program".to_string()))
    }
}

fn emitted(compiled: &Compiled) -> Result<Option<Collectives>, PjrtError> {
    Ok(hlo::collectives(&compiled.optimized()?))
}

/// The collectives of a body's graph, counted as [`hlo::collectives`] counts those of the compiler.
pub fn planned(body: &Body, mesh: &Mesh) -> Collectives {
    let mut all = Collectives::new();
    for v in body.graph.values() {
        let node = body.graph.node(v);
        let Op::Collective(op) = &node.op else { continue };
        let collective = &op.collective;
        if mesh.product(collective.axes()) == 1 {
            continue;
        }
        let operand = node.operands.first().map_or(0, |&o| body.graph.ty(o).bytes());
        let (kind, bytes) = match collective {
            Collective::AllReduce { .. } => (Kind::AllReduce, operand),
            Collective::ReduceScatter { .. } => (Kind::ReduceScatter, operand),
            Collective::AllGather { .. } => (Kind::AllGather, node.ty.bytes()),
            Collective::AllToAll { .. } => (Kind::AllToAll, operand),
            Collective::Shift { .. } => (Kind::Permute, operand),
            Collective::Halo { .. } => (Kind::Permute, node.ty.bytes().saturating_sub(operand)),
            Collective::LocalSlice { .. } | Collective::KeepFirst { .. } => continue,
        };
        let traffic = all.entry(kind).or_default();
        traffic.count += 1;
        traffic.bytes += bytes;
    }
    all
}

/// How often a step calls each body of a program.
pub fn calls(program: &Program) -> Vec<u64> {
    let mut calls = vec![0; program.bodies.len()];
    for call in &program.schedule {
        if let Call::Run { body, .. } = call {
            calls[*body as usize] += 1;
        }
    }
    calls
}

/// Adds collectives that happen so many times.
pub fn add(all: &mut Collectives, more: &Collectives, times: u64) {
    for (kind, traffic) in more {
        let sum = all.entry(*kind).or_default();
        sum.count += traffic.count * times;
        sum.bytes += traffic.bytes * times;
    }
}

/// The fullest moment of a stage in one of the orders, if all its bodies compile.
pub fn peak_of(programs: &Programs, index: usize, stage: &Stage, order: Order) -> Option<Peak> {
    let memory = |certified: &Certified| match order {
        Order::Memory => certified.memory,
        Order::Overlap => certified.overlapped,
    };
    let memory: Option<Vec<Memory>> = stage.bodies.iter().map(|body| Some(memory(body.as_ref().ok()?))).collect();
    Some(peak(&programs.programs[index], &programs.transfers, &memory?))
}
