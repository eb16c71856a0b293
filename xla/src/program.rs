//! Runs the program of a plan's one stage on the devices of a plugin.
//!
//! Every body is compiled once, as a program with one replica for each device of the mesh. Buffers stay on the devices
//! between calls. A body that replaces a buffer takes its memory. Values on the host are global tensors.

use crate::pjrt::{Buffer as Stored, Client, Executable, Launch, PjrtError, from_bytes, to_bytes};
use crate::text::{Options, module};
use altiplano_ir::interpret::{shard, unshard};
use altiplano_ir::program::{ALL_PARAMETERS, Body, Buffer, BufferId, BufferKind, Call, Program, Programs};
use altiplano_ir::tensor::Tensor;
use std::collections::BTreeMap;

/// The reason why a program does not run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    #[error("the plan has {0} programs, and XLA runs plans with one stage; plan with --pp 1")]
    Programs(usize),
    #[error("the plan's steps overlap, which XLA does not run; plan with --schedule 1f1b")]
    Overlap,
    #[error("the plan needs {needed} devices, and the plugin has {found}")]
    Devices { needed: usize, found: usize },
    #[error("the plan pads '{0}', which XLA's devices do not; plan with degrees that divide its sizes")]
    Padding(String),
    #[error("the step needs a value for '{0}'")]
    Missing(String),
    #[error("'{name}' is {found}, and the plan has {expected}")]
    Type { name: String, found: String, expected: String },
    #[error(transparent)]
    Plugin(#[from] PjrtError),
}

/// One buffer on all devices, in the order of the mesh.
type Spread = Vec<Stored>;
/// A buffer and the microbatch of its instance, if it has one for each.
type Instance = (BufferId, Option<u32>);

/// A program that is compiled for the devices of a client, with its state.
pub struct Engine {
    client: Client,
    programs: Programs,
    executables: Vec<Executable>,
    tensors: BTreeMap<Instance, Spread>,
}

impl Engine {
    /// Compiles all bodies. State is zero, and weights must be loaded before the first step.
    pub fn new(client: &Client, programs: &Programs) -> Result<Engine, EngineError> {
        let [program] = programs.programs.as_slice() else {
            return Err(EngineError::Programs(programs.programs.len()));
        };
        let sends = |call: &Call| !matches!(call, Call::Run { .. });
        if program.schedule.iter().any(sends) {
            return Err(EngineError::Programs(1 + programs.transfers.len()));
        }
        if program.runs_ahead() {
            return Err(EngineError::Overlap);
        }
        if let Some(buffer) = program.buffers.iter().find(|buffer| buffer.extents.is_some()) {
            return Err(EngineError::Padding(buffer.name.clone()));
        }
        let (needed, found) = (program.mesh.num_devices() as usize, client.num_devices());
        if needed > found {
            return Err(EngineError::Devices { needed, found });
        }
        let launch = Launch { replicas: program.mesh.num_devices(), ..Launch::default() };
        let compile = |body: &Body| client.compile(&body_text(program, body), launch);
        let executables = program.bodies.iter().map(compile).collect::<Result<Vec<_>, _>>()?;
        let (client, programs) = (client.clone(), programs.clone());
        Ok(Engine { client, programs, executables, tensors: BTreeMap::new() })
    }

    fn program(&self) -> &Program {
        &self.programs.programs[0]
    }

    /// Sets a parameter on all devices, and with it the optimizer's state: masters to the parameter, all else to zero.
    pub fn load(&mut self, name: &str, value: &Tensor) -> Result<(), EngineError> {
        let ours: Vec<(BufferId, Buffer)> = self.buffers(|kind| match kind {
            BufferKind::Parameter { name: of } | BufferKind::State { parameter: of, .. } => of == name,
            _ => false,
        });
        for (id, buffer) in ours {
            let is_value = match &buffer.kind {
                BufferKind::State { slot, .. } => slot == "master",
                _ => true,
            };
            let whole = match is_value {
                true => value.clone(),
                false => Tensor::splat(buffer.ty.clone(), 0.0),
            };
            self.set((id, None), &buffer, name, &whole)?;
        }
        Ok(())
    }

    /// Runs a step. `input` gives the rows of an input for a microbatch, and `scalar` the step's numbers. Returns the
    /// loss: the mean of the microbatches' losses or their sum, as the plan says.
    pub fn step(
        &mut self,
        input: &dyn Fn(&str, u32) -> Option<Tensor>,
        scalar: &dyn Fn(&str) -> Option<f64>,
    ) -> Result<f64, EngineError> {
        self.begin(input, scalar)?;
        let schedule = self.program().schedule.clone();
        let mut losses = Vec::new();
        for call in schedule {
            let Call::Run { body, microbatch } = call else { continue };
            losses.extend(self.run(body as usize, microbatch)?);
        }
        let sum: f64 = losses.iter().sum();
        Ok(if self.programs.loss_is_mean { sum / losses.len().max(1) as f64 } else { sum })
    }

    /// Sets what each step sets anew: inputs, scalars, and sums to zero.
    fn begin(
        &mut self,
        input: &dyn Fn(&str, u32) -> Option<Tensor>,
        scalar: &dyn Fn(&str) -> Option<f64>,
    ) -> Result<(), EngineError> {
        let missing = |name: &str| EngineError::Missing(name.to_string());
        for (id, buffer) in self.buffers(|_| true) {
            match &buffer.kind {
                BufferKind::Input { name } => {
                    for microbatch in 0..self.programs.num_microbatches {
                        let rows = input(name, microbatch).ok_or_else(|| missing(name))?;
                        self.set((id, Some(microbatch)), &buffer, name, &rows)?;
                    }
                }
                BufferKind::Scalar { name } => {
                    let value = scalar(name).ok_or_else(|| missing(name))?;
                    self.set((id, None), &buffer, name, &Tensor::splat(buffer.ty.clone(), value))?;
                }
                BufferKind::Accumulator { parameter } => {
                    self.set((id, None), &buffer, parameter, &Tensor::splat(buffer.ty.clone(), 0.0))?;
                }
                BufferKind::State { parameter, .. } if parameter == ALL_PARAMETERS => {
                    self.set((id, None), &buffer, parameter, &Tensor::splat(buffer.ty.clone(), 0.0))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Runs a body, and returns the loss if it writes one.
    fn run(&mut self, body: usize, microbatch: Option<u32>) -> Result<Option<f64>, EngineError> {
        let program = &self.programs.programs[0];
        let (of, executable) = (&program.bodies[body], &self.executables[body]);
        let devices = executable.devices().len();
        let mut arguments: Vec<Vec<&Stored>> = vec![Vec::new(); devices];
        for (_, id) in ordered(of) {
            let found = self.tensors.get(&(id, microbatch)).or_else(|| self.tensors.get(&(id, None)));
            let spread = found.ok_or_else(|| EngineError::Missing(program.buffer(id).name.clone()))?;
            arguments.iter_mut().zip(spread).for_each(|(list, stored)| list.push(stored));
        }
        let mut results: Vec<_> = executable.execute(&arguments)?.into_iter().map(Vec::into_iter).collect();
        let mut loss = None;
        let written: Vec<BufferId> = of.writes.iter().map(|(id, _)| *id).collect();
        let freed = of.frees.clone();
        for id in written {
            let buffer = program.buffer(id);
            let spread: Spread = results.iter_mut().filter_map(Iterator::next).collect();
            if buffer.kind == BufferKind::Loss {
                let bytes = spread[0].to_host()?;
                loss = from_bytes(&buffer.sharding.local_type(&buffer.ty, &program.mesh), &bytes).data.first().copied();
            }
            let instance = if buffer.kind.is_of_step() { microbatch } else { None };
            self.tensors.insert((id, instance), spread);
        }
        for id in freed {
            self.tensors.remove(&(id, microbatch));
        }
        Ok(loss)
    }

    /// The gradient of a parameter, summed over the microbatches of the last step.
    pub fn accumulator(&self, name: &str) -> Result<Tensor, EngineError> {
        self.whole(name, |kind| matches!(kind, BufferKind::Accumulator { parameter } if parameter == name))
    }

    pub fn parameter(&self, name: &str) -> Result<Tensor, EngineError> {
        self.whole(name, |kind| matches!(kind, BufferKind::Parameter { name: of } if of == name))
    }

    fn whole(&self, name: &str, is_it: impl Fn(&BufferKind) -> bool) -> Result<Tensor, EngineError> {
        let mesh = &self.program().mesh;
        let found = self.buffers(is_it).into_iter().next();
        let (id, buffer) = found.ok_or_else(|| EngineError::Missing(name.to_string()))?;
        let spread = self.tensors.get(&(id, None)).ok_or_else(|| EngineError::Missing(name.to_string()))?;
        let local = buffer.sharding.local_type(&buffer.ty, mesh);
        let parts: Result<Vec<Tensor>, PjrtError> =
            spread.iter().map(|stored| Ok(from_bytes(&local, &stored.to_host()?))).collect();
        Ok(unshard(&parts?, &buffer.ty, &buffer.sharding, mesh))
    }

    fn buffers(&self, is_wanted: impl Fn(&BufferKind) -> bool) -> Vec<(BufferId, Buffer)> {
        let all = self.program().buffers.iter().enumerate().filter(|(_, buffer)| is_wanted(&buffer.kind));
        all.map(|(id, buffer)| (BufferId(id as u32), buffer.clone())).collect()
    }

    /// Copies a global tensor to the devices, each its part.
    fn set(&mut self, instance: Instance, buffer: &Buffer, name: &str, whole: &Tensor) -> Result<(), EngineError> {
        if whole.ty.shape != buffer.ty.shape {
            let (found, expected) = (whole.ty.to_string(), buffer.ty.to_string());
            return Err(EngineError::Type { name: name.to_string(), found, expected });
        }
        let whole = Tensor::new(buffer.ty.clone(), whole.data.clone());
        let mesh = self.program().mesh.clone();
        let mut spread = Vec::new();
        for device in 0..mesh.num_devices() {
            let part = shard(&whole, &buffer.sharding, &mesh, device);
            let at = self.executables[0].devices()[device as usize];
            spread.push(self.client.buffer(&to_bytes(&part), &part.ty, at)?);
        }
        self.tensors.insert(instance, spread);
        Ok(())
    }
}

/// The buffers that a body reads, in the order of the leaves of its graph.
fn ordered(body: &Body) -> Vec<(u32, BufferId)> {
    let mut reads: Vec<(u32, BufferId)> = body.reads.iter().map(|(leaf, id)| (leaf.0, *id)).collect();
    reads.sort_unstable();
    reads
}

/// The text of a body. Results take the memory of the arguments that they replace.
pub(crate) fn body_text(program: &Program, body: &Body) -> String {
    let mut graph = body.graph.clone();
    graph.name = body.name.clone();
    graph.outputs = body.writes.iter().map(|(_, value)| *value).collect();
    let reads = ordered(body);
    let replaces = |(result, (id, _)): (usize, &(BufferId, _))| {
        let argument = reads.iter().position(|(_, read)| read == id)?;
        let once = reads.iter().filter(|(_, read)| read == id).count() == 1;
        (once && !program.buffer(*id).kind.is_of_step()).then_some((argument, result))
    };
    let donated = body.writes.iter().enumerate().filter_map(replaces).collect();
    module(&graph, &Options { replicas: Some(&program.mesh), donated, ..Options::default() })
}
