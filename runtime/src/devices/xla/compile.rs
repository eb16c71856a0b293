//! Programs compiled for devices: each text once, and copied to other devices where the plugin can. A folder keeps them
//! for later runs.

use super::super::code_cache::CodeCache;
use altiplano_ir::graph::Graph;
use altiplano_ir::literal::Literal;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::types::TensorType;
use altiplano_xla::pjrt::{Client, Executable, Launch, Memory, Order, PjrtError, Platform};
use altiplano_xla::program::{Printing, graph_text};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

/// A program for some devices.
#[derive(Debug)]
pub(super) struct Loaded {
    pub executable: Executable,
    /// The bytes that it takes on each device; zeros if the plugin does not say.
    pub memory: Memory,
    /// False if it was loaded. XLA's plugin for CPUs writes such programs without their code.
    is_compiled: bool,
}

/// The devices of a client, and the programs that are compiled for them.
pub(super) struct Compiler {
    pub client: Client,
    /// The ids of the plan's devices. The first one is the client's first device, and so on.
    ids: Vec<u32>,
    /// Programs by order and text.
    done: RefCell<BTreeMap<(Order, String), Vec<Rc<Loaded>>>>,
    /// Programs of earlier runs.
    cache: Option<CodeCache>,
    /// True if XLA has kernels for attention on these devices.
    pub has_attention: bool,
    /// True if XLA compiles programs in either order for these devices.
    pub has_orders: bool,
    /// The plugin and the machine, on which compiled code depends beside its text.
    machine: String,
}

impl Compiler {
    /// Keeps compiled programs in a folder, if there is one.
    pub(super) fn new(client: Client, ids: Vec<u32>, cache: Option<PathBuf>) -> Result<Compiler, PjrtError> {
        let machine = machine(&client)?;
        let platform = client.platform()?;
        let has_attention = platform == Platform::Cuda.name();
        let has_orders = platform != Platform::Tpu.name();
        let cache = cache.filter(|_| machine.is_some()).map(|folder| CodeCache { folder, extension: "pjrt" });
        Ok(Compiler {
            client,
            ids,
            done: RefCell::default(),
            cache,
            has_attention,
            has_orders,
            machine: machine.unwrap_or_default(),
        })
    }

    /// The client's devices for devices of the plan.
    pub(super) fn places(&self, devices: &[u32]) -> Vec<usize> {
        devices.iter().filter_map(|device| self.ids.iter().position(|id| id == device)).collect()
    }

    /// Compiles a text for these devices, one for each replica. Equal texts are compiled once, here and in earlier runs.
    pub(super) fn program(&self, text: String, devices: &[usize], order: Order) -> Result<Rc<Loaded>, PjrtError> {
        let mut done = self.done.borrow_mut();
        let settings = if self.has_orders { order.settings() } else { Vec::new() };
        let text = (order, text);
        if let Some(found) = done.get(&text).and_then(|all| all.iter().find(|p| p.executable.devices() == devices)) {
            return Ok(found.clone());
        }
        let launch = Launch { replicas: devices.len() as u32, ..Launch::default() };
        let key = format!("{}\n{} replicas, {settings:?}\n{}", self.machine, devices.len(), text.1);
        let copied = || {
            let first = done.get(&text)?.iter().find(|program| program.is_compiled)?;
            let executable = self.client.load(&first.executable.to_bytes().ok()?, launch, devices).ok()?;
            Some(Loaded { executable, memory: first.memory, is_compiled: false })
        };
        // A plugin that cannot copy programs compiles them again.
        let loaded = match self.cached(&key, launch, devices).or_else(copied) {
            Some(loaded) => loaded,
            None => {
                let executable = self.client.compile_on(&text.1, launch, devices, &settings)?;
                let none = Memory { arguments: 0, outputs: 0, aliased: 0, temporary: 0, code: 0 };
                let memory = executable.compiled().and_then(|compiled| compiled.memory()).unwrap_or(none);
                let loaded = Loaded { executable, memory, is_compiled: true };
                self.keep(&key, &loaded);
                loaded
            }
        };
        let loaded = Rc::new(loaded);
        done.entry(text).or_default().push(loaded.clone());
        Ok(loaded)
    }

    /// A program that an earlier run compiled, and the memory that it takes.
    fn cached(&self, key: &str, launch: Launch, devices: &[usize]) -> Option<Loaded> {
        let bytes = self.cache.as_ref()?.find(key)?;
        let (memory, program) = bytes.split_first_chunk::<40>()?;
        let (numbers, _) = memory.as_chunks::<8>();
        let [arguments, outputs, aliased, temporary, code] = numbers else { return None };
        let [arguments, outputs, aliased, temporary, code] =
            [arguments, outputs, aliased, temporary, code].map(|bytes| u64::from_le_bytes(*bytes));
        let executable = self.client.load(program, launch, devices).ok()?;
        Some(Loaded { executable, memory: Memory { arguments, outputs, aliased, temporary, code }, is_compiled: false })
    }

    /// Keeps a program for later runs. One that cannot be kept is compiled again.
    fn keep(&self, key: &str, loaded: &Loaded) {
        let Some(cache) = &self.cache else { return };
        let Ok(program) = loaded.executable.to_bytes() else { return };
        let Memory { arguments, outputs, aliased, temporary, code } = loaded.memory;
        let memory = [arguments, outputs, aliased, temporary, code].map(u64::to_le_bytes).concat();
        let _ = cache.keep(key, &[memory, program].concat());
    }

    /// A program without arguments whose results are zeros of these types.
    pub(super) fn zeros(&self, types: &[TensorType], mesh: &Mesh, devices: &[usize]) -> Result<Rc<Loaded>, PjrtError> {
        let mut graph = Graph::new("zeros");
        graph.outputs = types.iter().map(|ty| graph.constant(Literal::splat(ty.clone(), 0.0))).collect();
        self.program(graph_text(graph, mesh, &Printing::default()), devices, Order::Memory)
    }
}

/// All that compiled code depends on beside its text. `None` if the processor is not known, for which a plugin for CPUs
/// compiles.
fn machine(client: &Client) -> Result<Option<String>, PjrtError> {
    let plugin = client.plugin();
    let file = std::fs::metadata(plugin.path()).ok();
    let (size, time) = (file.as_ref().map(|file| file.len()), file.and_then(|file| file.modified().ok()));
    let (platform, version) = (client.platform()?, client.platform_version()?);
    let processor = match platform == Platform::Cpu.name() {
        false => String::new(),
        true => match processor() {
            Some(processor) => processor,
            None => return Ok(None),
        },
    };
    let (devices, first, kind) = (client.num_devices(), client.device(0)?, client.kind(0)?);
    Ok(Some(format!(
        "{} {size:?} {time:?}\n{platform} {version}\n{devices} devices, {first}, {kind}\n{processor}",
        plugin.described()
    )))
}

/// The first processor's model and instruction sets, and the number of cores.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let of_first = text.lines().take_while(|line| !line.trim().is_empty());
    let is_fixed = |line: &&str| ["model", "flags", "Features", "CPU "].iter().any(|name| line.starts_with(name));
    let lines: Vec<&str> = of_first.filter(is_fixed).collect();
    let cores = std::thread::available_parallelism().ok()?;
    (!lines.is_empty()).then(|| format!("{cores} cores\n{}", lines.join("\n")))
}
