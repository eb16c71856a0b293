//! Declarations of PJRT's C API: the functions by their place in the plugin's table, and their arguments.
//!
//! Every function takes a pointer to its arguments, which begin with their own size. A plugin ignores arguments that it
//! does not know, and a caller leaves those that it does not set at zero.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

/// The version of the API that these declarations are of: `0.MINOR`. Plugins from this one on have all functions that
/// are used here.
pub(crate) const LEAST_MINOR: c_int = 40;

/// The head of the plugin's table, which pointers to functions follow.
#[repr(C)]
pub(crate) struct Api {
    pub struct_size: usize,
    pub extension: *mut c_void,
    pub version: Version,
}

#[repr(C)]
pub struct Version {
    pub struct_size: usize,
    pub extension: *mut c_void,
    pub major: c_int,
    pub minor: c_int,
}

/// Functions, each with its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Function {
    ErrorDestroy = 0,
    ErrorMessage = 1,
    PluginInitialize = 3,
    PluginAttributes = 4,
    EventDestroy = 5,
    EventAwait = 8,
    ClientCreate = 10,
    ClientDestroy = 11,
    ClientPlatformName = 12,
    ClientPlatformVersion = 14,
    ClientAddressableDevices = 16,
    ClientCompile = 20,
    ClientBufferFromHostBuffer = 22,
    DeviceDescriptionId = 23,
    DeviceDescriptionKind = 26,
    DeviceDescriptionToString = 28,
    DeviceGetDescription = 29,
    ExecutableDestroy = 40,
    ExecutableNumOutputs = 44,
    ExecutableOptimizedProgram = 48,
    ExecutableSerialize = 49,
    LoadedExecutableDestroy = 50,
    LoadedExecutableGetExecutable = 51,
    LoadedExecutableAddressableDevices = 52,
    LoadedExecutableExecute = 55,
    ExecutableDeserializeAndLoad = 56,
    BufferDestroy = 58,
    BufferDimensions = 60,
    BufferCopyToDevice = 69,
    BufferToHostBuffer = 70,
    TopologyCreate = 82,
    TopologyDestroy = 83,
    TopologyPlatformName = 84,
    TopologyPlatformVersion = 85,
    TopologyGetDevices = 86,
    Compile = 89,
    ExecutableGetCompiledMemoryStats = 96,
}

impl Function {
    /// The place of the function in the table, in bytes.
    pub(crate) fn offset(self) -> usize {
        size_of::<Api>() + self as usize * size_of::<*mut c_void>()
    }
}

/// Declares the arguments of a function. All begin with their size and a list of extensions, and are zero at first.
macro_rules! arguments {
    ($($name:ident { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        #[repr(C)]
        pub struct $name {
            pub struct_size: usize,
            pub extension: *mut c_void,
            $(pub $field: $ty,)*
        }

        impl Default for $name {
            fn default() -> Self {
                // SAFETY: every field is an integer, a float, a pointer, an optional function or a struct of these, for which zero is valid.
                let mut arguments: Self = unsafe { std::mem::zeroed() };
                arguments.struct_size = size_of::<Self>();
                arguments
            }
        }
    )*};
}

arguments! {
    ErrorDestroy { error: *mut c_void }
    ErrorMessage { error: *mut c_void, message: *const c_char, size: usize }
    PluginInitialize {}
    PluginAttributes { attributes: *const NamedValue, count: usize }
    EventDestroy { event: *mut c_void }
    EventAwait { event: *mut c_void }
    NamedValue { name: *const c_char, name_size: usize, kind: c_int, value: u64, value_size: usize }
    ClientCreate {
        options: *const NamedValue,
        num_options: usize,
        get: *mut c_void,
        get_argument: *mut c_void,
        put: *mut c_void,
        put_argument: *mut c_void,
        client: *mut c_void,
        try_get: *mut c_void,
        try_get_argument: *mut c_void,
    }
    ClientDestroy { client: *mut c_void }
    OwnedText { owner: *mut c_void, text: *const c_char, size: usize }
    TopologyCreate {
        name: *const c_char,
        name_size: usize,
        options: *const NamedValue,
        num_options: usize,
        topology: *mut c_void,
    }
    TopologyDestroy { topology: *mut c_void }
    TopologyGetDevices { topology: *mut c_void, devices: *const *mut c_void, count: usize }
    Compile {
        topology: *mut c_void,
        program: *const Program,
        options: *const c_char,
        options_size: usize,
        client: *mut c_void,
        executable: *mut c_void,
    }
    ExecutableOptimizedProgram { executable: *mut c_void, program: *mut Program }
    ClientAddressableDevices { client: *mut c_void, devices: *const *mut c_void, count: usize }
    Program { code: *const c_char, code_size: usize, format: *const c_char, format_size: usize }
    ClientCompile {
        client: *mut c_void,
        program: *const Program,
        options: *const c_char,
        options_size: usize,
        executable: *mut c_void,
    }
    ClientBufferFromHostBuffer {
        client: *mut c_void,
        data: *const c_void,
        kind: c_int,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        semantics: c_int,
        device: *mut c_void,
        memory: *mut c_void,
        layout: *mut c_void,
        done: *mut c_void,
        buffer: *mut c_void,
    }
    DeviceDescriptionId { description: *mut c_void, id: c_int }
    DeviceGetDescription { device: *mut c_void, description: *mut c_void }
    ExecutableDestroy { executable: *mut c_void }
    ExecutableNumOutputs { executable: *mut c_void, count: usize }
    ExecutableMemory {
        executable: *mut c_void,
        code: i64,
        arguments: i64,
        outputs: i64,
        aliased: i64,
        temporary: i64,
        host: [i64; 5],
        peak: i64,
    }
    ExecutableSerialize {
        executable: *mut c_void,
        bytes: *const u8,
        size: usize,
        serialized: *mut c_void,
        forget: Option<unsafe extern "C" fn(*mut c_void)>,
    }
    ExecutableDeserializeAndLoad {
        client: *mut c_void,
        bytes: *const u8,
        size: usize,
        executable: *mut c_void,
        options: *const c_char,
        options_size: usize,
    }
    LoadedExecutableGetExecutable { loaded: *mut c_void, executable: *mut c_void }
    LoadedExecutableAddressableDevices { executable: *mut c_void, devices: *const *mut c_void, count: usize }
    ExecuteOptions {
        send_callbacks: *mut c_void,
        receive_callbacks: *mut c_void,
        num_sends: usize,
        num_receives: usize,
        launch: c_int,
        kept: *const i64,
        num_kept: usize,
        context: *mut c_void,
        call_location: *const c_char,
        num_tasks: usize,
        tasks: *mut c_int,
        incarnations: *mut i64,
    }
    LoadedExecutableExecute {
        executable: *mut c_void,
        options: *mut ExecuteOptions,
        arguments: *const *const *mut c_void,
        num_devices: usize,
        num_arguments: usize,
        outputs: *const *mut *mut c_void,
        done: *mut *mut c_void,
        device: *mut c_void,
    }
    BufferDestroy { buffer: *mut c_void }
    BufferCopyToDevice { buffer: *mut c_void, device: *mut c_void, copy: *mut c_void }
    BufferDimensions { buffer: *mut c_void, dims: *const i64, count: usize }
    TiledLayout {
        minor_to_major: *const i64,
        count: usize,
        tile_dims: *const i64,
        tile_dim_sizes: *const usize,
        num_tiles: usize,
    }
    Layout { tiled: TiledLayout, kind: c_int }
    BufferToHostBuffer {
        buffer: *mut c_void,
        layout: *const Layout,
        data: *mut c_void,
        size: usize,
        event: *mut c_void,
    }
}

impl Program {
    /// StableHLO text as a program. It borrows from the text.
    pub(crate) fn of_text(module: &str) -> Program {
        const FORMAT: &str = "mlir";
        Program {
            code: module.as_ptr().cast(),
            code_size: module.len(),
            format: FORMAT.as_ptr().cast(),
            format_size: FORMAT.len(),
            ..Default::default()
        }
    }
}
