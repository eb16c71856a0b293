//! Plugins: shared libraries with PJRT's table of functions.

#![allow(unsafe_code)]

use super::sys::{self, Api, Function, NamedValue};
use super::{Client, ClientOption, PjrtError};
use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A loaded plugin. It stays loaded until the process ends, because XLA's threads may run its code.
#[derive(Debug)]
pub struct Plugin {
    path: PathBuf,
    api: *const Api,
}

// SAFETY: the table is constant, and PJRT's functions may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

/// Functions without which a plugin cannot be used.
const NEEDED: [Function; 3] =
    [Function::BufferToHostBuffer, Function::LoadedExecutableExecute, Function::ClientBufferFromHostBuffer];

impl Plugin {
    /// Opens a plugin and checks its version. Its messages of progress are not shown, unless a variable asks for them.
    pub fn open(path: &Path) -> Result<Arc<Plugin>, PjrtError> {
        set_if_absent("TF_CPP_MIN_LOG_LEVEL", "2");
        let failed = |why: String| PjrtError::Open { path: path.to_path_buf(), why };
        if !path.is_file() {
            return Err(failed("there is no such file".into()));
        }
        // A name without a folder would be searched among the system's libraries.
        let absolute = path.canonicalize().map_err(|error| failed(error.to_string()))?;
        // SAFETY: the user names the library, whose initialisers run as those of any plugin.
        let library = unsafe { libloading::Library::new(absolute) }.map_err(|error| failed(error.to_string()))?;
        // SAFETY: PJRT's header declares the function with this type.
        let entry = unsafe { library.get::<unsafe extern "C" fn() -> *const Api>(b"GetPjrtApi") };
        let Ok(entry) = entry else { return Err(PjrtError::NotAPlugin { path: path.to_path_buf() }) };
        // SAFETY: the function takes nothing and returns the plugin's table, or null.
        let api = unsafe { entry() };
        std::mem::forget(library);
        if api.is_null() {
            return Err(failed("it returns no table of functions".into()));
        }
        let plugin = Plugin { path: path.to_path_buf(), api };
        let found = plugin.version();
        if found.0 != 0 || found.1 < sys::LEAST_MINOR {
            return Err(PjrtError::Version { path: path.to_path_buf(), found, least: sys::LEAST_MINOR });
        }
        for function in NEEDED {
            plugin.address(function)?;
        }
        plugin.call("initialize the plugin", Function::PluginInitialize, &mut sys::PluginInitialize::default())?;
        Ok(Arc::new(plugin))
    }

    /// The file of the plugin.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The major and the minor version of its API.
    pub fn version(&self) -> (i32, i32) {
        // SAFETY: the table is not null and begins with its version in all versions of the API.
        let version = unsafe { &(*self.api).version };
        (version.major, version.minor)
    }

    /// The plugin's own attributes, such as the version of StableHLO that it reads.
    pub fn attributes(&self) -> Result<Vec<(String, String)>, PjrtError> {
        let mut arguments = sys::PluginAttributes::default();
        self.call("describe the plugin", Function::PluginAttributes, &mut arguments)?;
        // SAFETY: the attributes live as long as the process.
        let all = unsafe { list(arguments.attributes, arguments.count) };
        Ok(all.iter().map(|value| (text(value.name, value.name_size), described(value))).collect())
    }

    /// Opens a plugin whose devices are not used, so that it looks for none: TPUs' plugin would ask a cloud for them.
    pub fn open_without_devices(path: &Path) -> Result<Arc<Plugin>, PjrtError> {
        set_if_absent("TPU_SKIP_MDS_QUERY", "1");
        Plugin::open(path)
    }

    /// The plugin in words: the package that brought it, or its file, and its version of PJRT's API.
    pub fn described(&self) -> String {
        let (major, minor) = self.version();
        let name = super::package(&self.path).unwrap_or_else(|| self.path.display().to_string());
        format!("{name}, PJRT {major}.{minor}")
    }

    /// Makes a client with these options.
    pub fn client(self: &Arc<Self>, options: &[ClientOption]) -> Result<Client, PjrtError> {
        Client::new(self.clone(), options)
    }

    /// The address of a function.
    fn address(&self, function: Function) -> Result<*const c_void, PjrtError> {
        let lacks = || PjrtError::Lacks { path: self.path.clone(), function: name(function) };
        // SAFETY: the table is not null and begins with its size.
        let size = unsafe { (*self.api).struct_size };
        if function.offset() + size_of::<*const c_void>() > size {
            return Err(lacks());
        }
        // SAFETY: the offset lies inside the table, and all its entries are pointers.
        let address = unsafe { *self.api.cast::<u8>().add(function.offset()).cast::<*const c_void>() };
        if address.is_null() { Err(lacks()) } else { Ok(address) }
    }

    /// Calls a function that may fail. `action` says in an error what XLA cannot do.
    pub(super) fn call<T>(&self, action: &'static str, function: Function, arguments: &mut T) -> Result<(), PjrtError> {
        let address = self.address(function)?;
        // SAFETY: the arguments are those of the function, and it returns an error or null.
        let error = unsafe {
            let function: unsafe extern "C" fn(*mut T) -> *mut c_void = std::mem::transmute(address);
            function(arguments)
        };
        if error.is_null() { Ok(()) } else { Err(PjrtError::Refused { action, message: self.message(error) }) }
    }

    /// The text of an error, which is destroyed.
    fn message(&self, error: *mut c_void) -> String {
        let mut arguments = sys::ErrorMessage { error, ..Default::default() };
        self.call_void(Function::ErrorMessage, &mut arguments);
        let message = text(arguments.message, arguments.size);
        self.call_void(Function::ErrorDestroy, &mut sys::ErrorDestroy { error, ..Default::default() });
        // A message of several lines becomes one.
        message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
    }

    fn call_void<T>(&self, function: Function, arguments: &mut T) {
        let Ok(address) = self.address(function) else { return };
        // SAFETY: the arguments are those of the function, which returns nothing.
        unsafe {
            let function: unsafe extern "C" fn(*mut T) = std::mem::transmute(address);
            function(arguments);
        }
    }

    /// Waits for an event and destroys it.
    pub(super) fn wait(&self, action: &'static str, event: *mut c_void) -> Result<(), PjrtError> {
        if event.is_null() {
            return Ok(());
        }
        let waited = self.call(action, Function::EventAwait, &mut sys::EventAwait { event, ..Default::default() });
        let destroyed =
            self.call(action, Function::EventDestroy, &mut sys::EventDestroy { event, ..Default::default() });
        waited.and(destroyed)
    }
}

/// Sets a variable for a plugin, unless the user has set it.
fn set_if_absent(name: &str, value: &str) {
    if std::env::var_os(name).is_none() {
        // SAFETY: the plugin reads the variable in the calls that follow, and no other code of this program reads the
        // environment at that time.
        unsafe { std::env::set_var(name, value) };
    }
}

/// A copy of a text that a plugin owns.
pub(super) fn text(start: *const c_char, size: usize) -> String {
    // SAFETY: the plugin owns that many bytes while it is asked for them.
    let bytes = unsafe { list(start.cast::<u8>(), size) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// A list that a plugin owns, which may be null if it is empty.
///
/// # Safety
/// `start` must point to `count` values that live as long as the result is used.
pub(super) unsafe fn list<'a, T>(start: *const T, count: usize) -> &'a [T] {
    if start.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller says so.
    unsafe { std::slice::from_raw_parts(start, count) }
}

/// The value of an attribute as text.
fn described(value: &NamedValue) -> String {
    match value.kind {
        0 => text(value.value as usize as *const c_char, value.value_size),
        1 => (value.value as i64).to_string(),
        // SAFETY: the value is a list of that many integers.
        2 => unsafe { list(value.value as usize as *const i64, value.value_size) }
            .iter()
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join("."),
        3 => f32::from_bits(value.value as u32).to_string(),
        _ => (value.value & 0xff != 0).to_string(),
    }
}

fn name(function: Function) -> &'static str {
    match function {
        Function::BufferToHostBuffer => "PJRT_Buffer_ToHostBuffer",
        Function::LoadedExecutableExecute => "PJRT_LoadedExecutable_Execute",
        Function::ClientBufferFromHostBuffer => "PJRT_Client_BufferFromHostBuffer",
        Function::ExecutableGetCompiledMemoryStats => "PJRT_Executable_GetCompiledMemoryStats",
        _ => "a function",
    }
}
