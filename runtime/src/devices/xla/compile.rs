//! Programs compiled for devices: each text once, and copied to other devices where the plugin can.

use altiplano_ir::graph::Graph;
use altiplano_ir::literal::Literal;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::types::TensorType;
use altiplano_xla::pjrt::{Client, Executable, Launch, Memory, PjrtError};
use altiplano_xla::program::graph_text;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A program for some devices.
#[derive(Debug)]
pub(super) struct Loaded {
    pub executable: Executable,
    /// The bytes that it takes on each device; zeros if the plugin does not say.
    pub memory: Memory,
}

/// The devices of a client, and the programs that are compiled for them.
pub(super) struct Compiler {
    pub client: Client,
    /// The ids of the plan's devices. The first one is the client's first device, and so on.
    ids: Vec<u32>,
    done: RefCell<BTreeMap<String, Vec<Rc<Loaded>>>>,
}

impl Compiler {
    pub(super) fn new(client: Client, ids: Vec<u32>) -> Compiler {
        Compiler { client, ids, done: RefCell::default() }
    }

    /// The client's devices for devices of the plan.
    pub(super) fn places(&self, devices: &[u32]) -> Vec<usize> {
        devices.iter().filter_map(|device| self.ids.iter().position(|id| id == device)).collect()
    }

    /// Compiles a text for these devices, one for each replica.
    pub(super) fn program(&self, text: String, devices: &[usize]) -> Result<Rc<Loaded>, PjrtError> {
        let mut done = self.done.borrow_mut();
        if let Some(found) = done.get(&text).and_then(|all| all.iter().find(|p| p.executable.devices() == devices)) {
            return Ok(found.clone());
        }
        let launch = Launch { replicas: devices.len() as u32, ..Launch::default() };
        let first = done.get(&text).and_then(|all| all.first());
        let copied = first.and_then(|first| {
            let executable = first.executable.on_other_devices(launch, devices).ok()?;
            Some(Loaded { executable, memory: first.memory })
        });
        // A plugin that cannot copy programs compiles them again.
        let loaded = match copied {
            Some(loaded) => loaded,
            None => {
                let executable = self.client.compile_on(&text, launch, devices)?;
                let none = Memory { arguments: 0, outputs: 0, aliased: 0, temporary: 0, code: 0 };
                let memory = executable.compiled().and_then(|compiled| compiled.memory()).unwrap_or(none);
                Loaded { executable, memory }
            }
        };
        let loaded = Rc::new(loaded);
        done.entry(text).or_default().push(loaded.clone());
        Ok(loaded)
    }

    /// A program without arguments whose results are zeros of these types.
    pub(super) fn zeros(&self, types: &[TensorType], mesh: &Mesh, devices: &[usize]) -> Result<Rc<Loaded>, PjrtError> {
        let mut graph = Graph::new("zeros");
        graph.outputs = types.iter().map(|ty| graph.constant(Literal::splat(ty.clone(), 0.0))).collect();
        self.program(graph_text(graph, mesh, Vec::new()), devices)
    }
}
