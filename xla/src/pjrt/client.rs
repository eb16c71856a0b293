//! Clients, the programs that they compile, and the tensors on their devices.

#![allow(unsafe_code)]

use super::compiled::Compiled;
use super::options::named;
use super::plugin::{Plugin, list, text};
use super::sys::{self, Function, NamedValue};
use super::{ClientOption, Launch, PjrtError};
use altiplano_ir::dtype::DType;
use altiplano_ir::types::TensorType;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// A connection to the devices of a plugin.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    plugin: Arc<Plugin>,
    client: *mut c_void,
    devices: Vec<*mut c_void>,
}

// SAFETY: PJRT's clients, executables and buffers may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut arguments = sys::ClientDestroy { client: self.client, ..Default::default() };
        // An error at the end of a client has nobody to go to.
        let _ = self.plugin.call("end a client", Function::ClientDestroy, &mut arguments);
    }
}

/// Lets XLA's client for CPUs have as many threads as its devices need. Each device waits for the others of a collective
/// on a thread of a pool, which by default has one thread a core: with fewer of them, all wait for ever.
fn widen_thread_pool(options: &[ClientOption]) {
    let devices = options.iter().find_map(|option| match option {
        ClientOption::Number(name, count) if name == "cpu_device_count" => usize::try_from(*count).ok(),
        _ => None,
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if let Some(devices) = devices.filter(|&devices| devices > 1) {
        let threads = devices.saturating_mul(4).max(cores);
        // SAFETY: the plugin reads the variable in the call that follows, and no other code of this program reads the
        // environment once plans are at hand.
        unsafe { std::env::set_var("PJRT_NPROC", threads.to_string()) };
    }
}

impl Client {
    pub(super) fn new(plugin: Arc<Plugin>, options: &[ClientOption]) -> Result<Client, PjrtError> {
        widen_thread_pool(options);
        let options: Vec<NamedValue> = options.iter().map(named).collect();
        let mut arguments =
            sys::ClientCreate { options: options.as_ptr(), num_options: options.len(), ..Default::default() };
        plugin.call("make a client", Function::ClientCreate, &mut arguments)?;
        let mut inner = Inner { plugin, client: arguments.client, devices: Vec::new() };
        let mut arguments = sys::ClientAddressableDevices { client: inner.client, ..Default::default() };
        inner.plugin.call("list devices", Function::ClientAddressableDevices, &mut arguments)?;
        // SAFETY: the list lives as long as the client.
        inner.devices = unsafe { list(arguments.devices, arguments.count) }.to_vec();
        Ok(Client { inner: Arc::new(inner) })
    }

    /// The number of devices that this process can use.
    pub fn num_devices(&self) -> usize {
        self.inner.devices.len()
    }

    /// The name of the platform, such as `cpu` or `cuda`.
    pub fn platform(&self) -> Result<String, PjrtError> {
        self.text(Function::ClientPlatformName)
    }

    /// The version of the platform, in the plugin's own words.
    pub fn platform_version(&self) -> Result<String, PjrtError> {
        self.text(Function::ClientPlatformVersion)
    }

    fn text(&self, function: Function) -> Result<String, PjrtError> {
        let mut arguments = sys::OwnedText { owner: self.inner.client, ..Default::default() };
        self.inner.plugin.call("describe the platform", function, &mut arguments)?;
        Ok(text(arguments.text, arguments.size))
    }

    /// The name of a device.
    pub fn device(&self, device: usize) -> Result<String, PjrtError> {
        self.described(device, Function::DeviceDescriptionToString)
    }

    /// The model of a device, such as `NVIDIA H100 80GB HBM3`.
    pub fn kind(&self, device: usize) -> Result<String, PjrtError> {
        self.described(device, Function::DeviceDescriptionKind)
    }

    fn described(&self, device: usize, function: Function) -> Result<String, PjrtError> {
        let plugin = &self.inner.plugin;
        let mut of = sys::DeviceGetDescription { device: self.handle(device)?, ..Default::default() };
        plugin.call("describe a device", Function::DeviceGetDescription, &mut of)?;
        let mut arguments = sys::OwnedText { owner: of.description, ..Default::default() };
        plugin.call("describe a device", function, &mut arguments)?;
        Ok(text(arguments.text, arguments.size))
    }

    fn handle(&self, device: usize) -> Result<*mut c_void, PjrtError> {
        let devices = self.inner.devices.len();
        self.inner.devices.get(device).copied().ok_or(PjrtError::NoDevice { device, devices })
    }

    /// The ids by which XLA knows devices.
    fn ids(&self, devices: &[usize]) -> Result<Vec<u64>, PjrtError> {
        const ACTION: &str = "describe a device";
        let plugin = &self.inner.plugin;
        let id = |&device: &usize| {
            let mut of = sys::DeviceGetDescription { device: self.handle(device)?, ..Default::default() };
            plugin.call(ACTION, Function::DeviceGetDescription, &mut of)?;
            let mut arguments = sys::DeviceDescriptionId { description: of.description, ..Default::default() };
            plugin.call(ACTION, Function::DeviceDescriptionId, &mut arguments)?;
            Ok(u64::from(arguments.id.unsigned_abs()))
        };
        devices.iter().map(id).collect()
    }

    /// Compiles StableHLO text for devices that XLA chooses, the first ones.
    pub fn compile(&self, module: &str, launch: Launch) -> Result<Executable, PjrtError> {
        self.compile_on(module, launch, &[], &[])
    }

    /// Compiles StableHLO text for these devices, one for each replica, with XLA's own settings.
    pub fn compile_on(
        &self,
        module: &str,
        launch: Launch,
        devices: &[usize],
        settings: &[ClientOption],
    ) -> Result<Executable, PjrtError> {
        let plugin = &self.inner.plugin;
        let options = launch.encoded(settings, &self.ids(devices)?);
        let program = sys::Program::of_text(module);
        let mut arguments = sys::ClientCompile {
            client: self.inner.client,
            program: &program,
            options: options.as_ptr().cast(),
            options_size: options.len(),
            ..Default::default()
        };
        plugin.call("compile the program", Function::ClientCompile, &mut arguments)?;
        self.owned(arguments.executable)
    }

    /// Loads a program that [`Executable::to_bytes`] wrote for these devices, one for each replica, without compiling it
    /// again. The bytes must be those of the same plugin on a machine like this one: they are machine code.
    ///
    /// # Errors
    /// Fails if the plugin cannot read its programs, or keeps the devices for which they were compiled.
    pub fn load(&self, bytes: &[u8], launch: Launch, devices: &[usize]) -> Result<Executable, PjrtError> {
        const ACTION: &str = "load a program";
        let options = launch.encoded(&[], &self.ids(devices)?);
        let mut arguments = sys::ExecutableDeserializeAndLoad {
            client: self.inner.client,
            bytes: bytes.as_ptr(),
            size: bytes.len(),
            options: options.as_ptr().cast(),
            options_size: options.len(),
            ..Default::default()
        };
        self.inner.plugin.call(ACTION, Function::ExecutableDeserializeAndLoad, &mut arguments)?;
        let loaded = self.owned(arguments.executable)?;
        if loaded.devices != devices {
            let message = "the plugin keeps the devices of the first compilation".to_string();
            return Err(PjrtError::Refused { action: ACTION, message });
        }
        Ok(loaded)
    }

    /// The plugin that the client is of.
    pub fn plugin(&self) -> &Plugin {
        &self.inner.plugin
    }

    fn owned(&self, loaded: *mut c_void) -> Result<Executable, PjrtError> {
        let mut executable = Executable { client: self.clone(), loaded, devices: Vec::new(), outputs: 0 };
        executable.outputs = executable.compiled()?.num_outputs()?;
        executable.devices = executable.list_devices()?;
        Ok(executable)
    }

    /// Copies a tensor to a device. The bytes are as [`super::to_bytes`] writes them.
    pub fn buffer(&self, bytes: &[u8], ty: &TensorType, device: usize) -> Result<Buffer, PjrtError> {
        if bytes.len() as u64 != ty.bytes() {
            return Err(PjrtError::Size { found: bytes.len(), expected: ty.bytes() });
        }
        let dims: Vec<i64> = ty.shape.iter().map(|&size| size as i64).collect();
        let mut arguments = sys::ClientBufferFromHostBuffer {
            client: self.inner.client,
            data: bytes.as_ptr().cast(),
            kind: element(ty.dtype).ok_or(PjrtError::ElementType(ty.dtype.name()))?,
            dims: dims.as_ptr(),
            num_dims: dims.len(),
            // The bytes may be gone after this call.
            semantics: 0,
            device: self.handle(device)?,
            ..Default::default()
        };
        self.inner.plugin.call("copy a tensor to a device", Function::ClientBufferFromHostBuffer, &mut arguments)?;
        let buffer = Buffer { client: self.clone(), buffer: arguments.buffer };
        self.inner.plugin.wait("copy a tensor to a device", arguments.done)?;
        Ok(buffer)
    }
}

/// A program that is compiled for the devices of a client.
#[derive(Debug)]
pub struct Executable {
    client: Client,
    loaded: *mut c_void,
    devices: Vec<usize>,
    outputs: usize,
}

// SAFETY: see `Inner`.
unsafe impl Send for Executable {}
// SAFETY: see `Inner`.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        let mut arguments = sys::ExecutableDestroy { executable: self.loaded, ..Default::default() };
        let _ = self.plugin().call("forget a program", Function::LoadedExecutableDestroy, &mut arguments);
    }
}

impl Executable {
    fn plugin(&self) -> &Plugin {
        &self.client.inner.plugin
    }

    /// The devices of the client that run the program, in the order of its replicas and partitions.
    pub fn devices(&self) -> &[usize] {
        &self.devices
    }

    fn list_devices(&self) -> Result<Vec<usize>, PjrtError> {
        let mut arguments = sys::LoadedExecutableAddressableDevices { executable: self.loaded, ..Default::default() };
        self.plugin().call("list devices", Function::LoadedExecutableAddressableDevices, &mut arguments)?;
        // SAFETY: the list lives as long as the executable.
        let handles = unsafe { list(arguments.devices, arguments.count) };
        let known = &self.client.inner.devices;
        Ok(handles.iter().filter_map(|handle| known.iter().position(|device| device == handle)).collect())
    }

    /// The program without its devices.
    pub fn compiled(&self) -> Result<Compiled, PjrtError> {
        let mut of = sys::LoadedExecutableGetExecutable { loaded: self.loaded, ..Default::default() };
        self.plugin().call("describe a program", Function::LoadedExecutableGetExecutable, &mut of)?;
        Ok(Compiled::new(self.client.inner.plugin.clone(), of.executable))
    }

    /// The program as bytes, which [`Client::load`] reads.
    ///
    /// # Errors
    /// Fails if the plugin cannot write its programs.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PjrtError> {
        const ACTION: &str = "write a program";
        let plugin = self.plugin();
        let mut of = sys::LoadedExecutableGetExecutable { loaded: self.loaded, ..Default::default() };
        plugin.call(ACTION, Function::LoadedExecutableGetExecutable, &mut of)?;
        let compiled = Compiled::new(self.client.inner.plugin.clone(), of.executable);
        let mut written = sys::ExecutableSerialize { executable: of.executable, ..Default::default() };
        plugin.call(ACTION, Function::ExecutableSerialize, &mut written)?;
        // SAFETY: the plugin gave so many bytes, which last until they are forgotten.
        let bytes = unsafe { list(written.bytes, written.size) }.to_vec();
        if let Some(forget) = written.forget {
            // SAFETY: the plugin gave the function for this text, which nobody uses any more.
            unsafe { forget(written.serialized) };
        }
        drop(compiled);
        Ok(bytes)
    }

    /// Runs the program on all its devices and waits for it, as [`Executable::launch`] does without waiting.
    pub fn execute(&self, arguments: &[Vec<&Buffer>]) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        let (results, mut launched) = self.launch(arguments, &[])?;
        launched.wait().map(|()| results)
    }

    /// Starts the program on all its devices. There is a list of arguments for each device, and the result has a list of
    /// outputs for each, which other programs may use at once. A donated argument cannot be used again, unless its index
    /// is among those to `keep`.
    pub fn launch(&self, arguments: &[Vec<&Buffer>], keep: &[i64]) -> Result<(Vec<Vec<Buffer>>, Launched), PjrtError> {
        if arguments.len() != self.devices.len() {
            return Err(PjrtError::DeviceCount { found: arguments.len(), expected: self.devices.len() });
        }
        let handles: Vec<Vec<*mut c_void>> =
            arguments.iter().map(|list| list.iter().map(|buffer| buffer.buffer).collect()).collect();
        let lists: Vec<*const *mut c_void> = handles.iter().map(|list| list.as_ptr()).collect();
        let mut outputs = vec![vec![std::ptr::null_mut::<c_void>(); self.outputs]; arguments.len()];
        let output_lists: Vec<*mut *mut c_void> = outputs.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut done = vec![std::ptr::null_mut::<c_void>(); arguments.len()];
        let mut options = sys::ExecuteOptions { kept: keep.as_ptr(), num_kept: keep.len(), ..Default::default() };
        let mut call = sys::LoadedExecutableExecute {
            executable: self.loaded,
            options: &mut options,
            arguments: lists.as_ptr(),
            num_devices: arguments.len(),
            num_arguments: handles.first().map_or(0, Vec::len),
            outputs: output_lists.as_ptr(),
            done: done.as_mut_ptr(),
            ..Default::default()
        };
        self.plugin().call("run the program", Function::LoadedExecutableExecute, &mut call)?;
        let owned = |buffer| Buffer { client: self.client.clone(), buffer };
        let results = outputs.into_iter().map(|list| list.into_iter().map(owned).collect()).collect();
        Ok((results, Launched { plugin: self.client.inner.plugin.clone(), events: done }))
    }
}

/// A program that runs.
#[derive(Debug)]
pub struct Launched {
    plugin: Arc<Plugin>,
    /// The event at the end of the program on each device.
    events: Vec<*mut c_void>,
}

// SAFETY: see `Inner`.
unsafe impl Send for Launched {}

impl Launched {
    /// Waits for all devices, and returns the first error.
    pub fn wait(&mut self) -> Result<(), PjrtError> {
        let waited =
            std::mem::take(&mut self.events).into_iter().map(|event| self.plugin.wait("run the program", event));
        waited.fold(Ok(()), Result::and)
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // An error that nobody waited for follows from an earlier one.
        let _ = self.wait();
    }
}

/// A tensor on a device.
#[derive(Debug)]
pub struct Buffer {
    client: Client,
    buffer: *mut c_void,
}

// SAFETY: see `Inner`.
unsafe impl Send for Buffer {}
// SAFETY: see `Inner`.
unsafe impl Sync for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut arguments = sys::BufferDestroy { buffer: self.buffer, ..Default::default() };
        let _ = self.client.inner.plugin.call("free a tensor", Function::BufferDestroy, &mut arguments);
    }
}

impl Buffer {
    /// Copies the tensor to another device, without waiting for it.
    pub fn copy_to(&self, device: usize) -> Result<Buffer, PjrtError> {
        let device = self.client.handle(device)?;
        let mut arguments = sys::BufferCopyToDevice { buffer: self.buffer, device, ..Default::default() };
        self.client.inner.plugin.call(
            "copy a tensor to another device",
            Function::BufferCopyToDevice,
            &mut arguments,
        )?;
        Ok(Buffer { client: self.client.clone(), buffer: arguments.copy })
    }

    /// Copies the tensor to the host, as [`super::to_bytes`] writes it.
    pub fn to_host(&self) -> Result<Vec<u8>, PjrtError> {
        const ACTION: &str = "copy a tensor to the host";
        let plugin = &self.client.inner.plugin;
        let mut of = sys::BufferDimensions { buffer: self.buffer, ..Default::default() };
        plugin.call(ACTION, Function::BufferDimensions, &mut of)?;
        // Row major: the last dimension is the most minor one.
        let minor_to_major: Vec<i64> = (0..of.count as i64).rev().collect();
        let tiled = sys::TiledLayout {
            minor_to_major: minor_to_major.as_ptr(),
            count: minor_to_major.len(),
            ..Default::default()
        };
        let layout = sys::Layout { tiled, ..Default::default() };
        let mut arguments = sys::BufferToHostBuffer { buffer: self.buffer, layout: &layout, ..Default::default() };
        plugin.call(ACTION, Function::BufferToHostBuffer, &mut arguments)?;
        let mut bytes = vec![0u8; arguments.size];
        let mut arguments = sys::BufferToHostBuffer {
            buffer: self.buffer,
            layout: &layout,
            data: bytes.as_mut_ptr().cast(),
            size: bytes.len(),
            ..Default::default()
        };
        plugin.call(ACTION, Function::BufferToHostBuffer, &mut arguments)?;
        plugin.wait(ACTION, arguments.event)?;
        Ok(bytes)
    }
}

/// The API's number of an element type. `None` for types narrower than a byte, which devices pack.
fn element(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::Bool => 1,
        DType::I8 => 2,
        DType::I16 => 3,
        DType::I32 => 4,
        DType::I64 => 5,
        DType::U8 => 6,
        DType::U16 => 7,
        DType::U32 => 8,
        DType::U64 => 9,
        DType::F16 => 10,
        DType::F32 => 11,
        DType::F64 => 12,
        DType::BF16 => 13,
        DType::F8E5M2 => 16,
        DType::F8E4M3FN => 17,
        DType::F8E4M3B11FNUZ => 18,
        DType::F8E5M2FNUZ => 19,
        DType::F8E4M3FNUZ => 20,
        DType::F8E4M3 => 26,
        DType::F8E3M4 => 27,
        DType::F8E8M0FNU => 28,
        DType::I4 | DType::I2 | DType::U4 | DType::U2 => return None,
    })
}
