//! What a device is used through: memory, streams, events, kernels and graphs of a GPU's context, each of which goes with its value.
//!
//! Everything is asynchronous as in the driver: what reads or writes host memory, and what a kernel does with addresses, is for the
//! caller to wait for and to have right, and is marked `unsafe`. What fails while something is dropped is passed over: the context
//! is broken then, and the next call says so.

use super::driver::{Driver, Gpu};
use super::error::CudaError;
use super::functions::{DriverFunctions, DriverVersion};
use cudarc::driver::sys::{self, CUstreamCaptureMode};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// The primary context of a GPU, which all who use the GPU in this process share.
#[derive(Debug)]
pub struct Context {
    functions: DriverFunctions,
    errors: DriverVersion,
    device: c_int,
    raw: sys::CUcontext,
    pub gpu: Gpu,
}

// SAFETY: a context may be used by any thread, and by several at once, that has made it current.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Memory of the device.
#[derive(Debug)]
pub struct Memory {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

/// Memory of the host that the device reads and writes directly.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is memory like any other, owned by its value.
unsafe impl Send for Pinned {}

/// A queue of work, which runs in order.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Stream {}

/// A point in a stream that others may wait for.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}

/// Kernels as they were loaded.
#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: as for streams.
unsafe impl Send for Module {}
// SAFETY: it is only looked up in.
unsafe impl Sync for Module {}

/// A kernel that can be launched.
#[derive(Clone, Debug)]
pub struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
    shared_bytes: u32,
}

// SAFETY: as for streams.
unsafe impl Send for Function {}

/// A kernel's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    Address(u64),
    Int(i32),
}

/// Work of several streams, recorded once, that is launched as a whole.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
}

// SAFETY: as for streams.
unsafe impl Send for Graph {}

impl Context {
    pub fn new(driver: &Driver, gpu: &Gpu) -> Result<Arc<Context>, CudaError> {
        let (functions, errors) = driver.functions();
        let mut device = 0;
        // SAFETY: it writes a handle.
        errors.done("cuDeviceGet", unsafe { (functions.cuDeviceGet)(&mut device, gpu.index as c_int) })?;
        let mut raw = null_mut();
        // SAFETY: it writes a handle.
        let status = unsafe { (functions.cuDevicePrimaryCtxRetain)(&mut raw, device) };
        errors.done("cuDevicePrimaryCtxRetain", status)?;
        let context = Arc::new(Context { functions, errors, device, raw, gpu: gpu.clone() });
        context.make_current()?;
        Ok(context)
    }

    /// Every thread calls this once before it uses anything of the context.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context is held as long as this value.
        self.done("cuCtxSetCurrent", unsafe { (self.functions.cuCtxSetCurrent)(self.raw) })
    }

    /// Bytes that are free on the device, of all.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: two numbers are written.
        self.done("cuMemGetInfo", unsafe { (self.functions.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Memory with anything in it. `what` is said where there is not enough.
    pub fn allocate(self: &Arc<Context>, what: &str, bytes: u64) -> Result<Memory, CudaError> {
        let mut address = 0;
        let wanted = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: an address is written.
        let status = unsafe { (self.functions.cuMemAlloc_v2)(&mut address, wanted) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32 {
            let (index, free_bytes) = (self.gpu.index, self.free_bytes()?);
            let (what, detail) = (what.to_string(), String::new());
            return Err(CudaError::OutOfMemory { index, what, wanted_bytes: bytes, free_bytes, detail });
        }
        self.done("cuMemAlloc", status)?;
        Ok(Memory { context: self.clone(), address, bytes })
    }

    /// Memory of the host, all zeros.
    pub fn pinned(self: &Arc<Context>, bytes: usize) -> Result<Pinned, CudaError> {
        let mut start = null_mut();
        // SAFETY: an address is written.
        self.done("cuMemHostAlloc", unsafe { (self.functions.cuMemHostAlloc)(&mut start, bytes.max(1), 0) })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| CudaError::Call {
            call: "cuMemHostAlloc",
            name: "it gave no memory".to_string(),
            text: String::new(),
        })?;
        // SAFETY: it is as long as was asked for.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { context: self.clone(), start, bytes })
    }

    /// A stream that waits for no other.
    pub fn stream(self: &Arc<Context>) -> Result<Stream, CudaError> {
        let mut raw = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: a handle is written.
        self.done("cuStreamCreate", unsafe { (self.functions.cuStreamCreate)(&mut raw, flags) })?;
        Ok(Stream { context: self.clone(), raw })
    }

    /// An event without a time.
    pub fn event(self: &Arc<Context>) -> Result<Event, CudaError> {
        let mut raw = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: a handle is written.
        self.done("cuEventCreate", unsafe { (self.functions.cuEventCreate)(&mut raw, flags) })?;
        Ok(Event { context: self.clone(), raw })
    }

    /// The kernel of this name in an image that a [`super::Compiler`] made, each block of which gets so many bytes of shared memory.
    pub fn function(self: &Arc<Context>, name: &str, image: &[u8], shared_bytes: u32) -> Result<Function, CudaError> {
        // PTX would have to end with a zero; machine code does not mind one.
        let image = [image, &[0]].concat();
        let mut raw = null_mut();
        // SAFETY: the image is whole, as its checksum or its compiler said, and is copied.
        let status = unsafe { (self.functions.cuModuleLoadData)(&mut raw, image.as_ptr().cast()) };
        self.done("cuModuleLoadData", status)?;
        let module = Arc::new(Module { context: self.clone(), raw });
        let name = CString::new(name).unwrap_or_default();
        let mut raw = null_mut();
        // SAFETY: the name ends with a zero; a handle is written.
        let status = unsafe { (self.functions.cuModuleGetFunction)(&mut raw, module.raw, name.as_ptr()) };
        self.done("cuModuleGetFunction", status)?;
        // What any device has need not be asked for.
        if shared_bytes > 48 << 10 {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the kernel exists.
            let status = unsafe { (self.functions.cuFuncSetAttribute)(raw, most, shared_bytes as i32) };
            self.done("cuFuncSetAttribute", status)?;
        }
        Ok(Function { module, raw, shared_bytes })
    }

    fn done(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        self.errors.done(call, status)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once; everything made in it holds it, and so is gone.
        unsafe { (self.functions.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

impl Memory {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of `bytes` bytes from `offset` on, where they are within it.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then_some(self.address + offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated by this driver and is freed once; the driver waits for work that uses it.
        unsafe { (self.context.functions.cuMemFree_v2)(self.address) };
    }
}

impl Pinned {
    /// # Safety
    /// No copy from or to these bytes is under way.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: it is as long as was asked for, and initialised.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// No copy from or to these bytes is under way.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only one who has it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// The address of `bytes` bytes from `offset` on, where they are within it.
    pub fn range(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the result is within what was allocated, or just behind it.
        (end <= self.bytes).then(|| unsafe { self.start.as_ptr().add(offset) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated by this driver and is freed once.
        unsafe { (self.context.functions.cuMemFreeHost)(self.start.as_ptr().cast()) };
    }
}

impl Stream {
    /// Waits until all that was put into it is done, and says what failed of it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream exists.
        self.done("cuStreamSynchronize", unsafe { (self.functions().cuStreamSynchronize)(self.raw) })
    }

    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist.
        self.done("cuEventRecord", unsafe { (self.functions().cuEventRecord)(event.raw, self.raw) })
    }

    /// What is put into the stream from now on waits for what was recorded of another.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist.
        self.done("cuStreamWaitEvent", unsafe { (self.functions().cuStreamWaitEvent)(self.raw, event.raw, 0) })
    }

    /// # Safety
    /// Both ranges stay, and the host's is not touched, until this is done.
    pub unsafe fn upload(&self, to: u64, from: *const u8, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions().cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes as usize, self.raw) };
        self.done("cuMemcpyHtoDAsync", status)
    }

    /// # Safety
    /// Both ranges stay, and the host's is not touched, until this is done.
    pub unsafe fn download(&self, to: *mut u8, from: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions().cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes as usize, self.raw) };
        self.done("cuMemcpyDtoHAsync", status)
    }

    /// # Safety
    /// Both ranges are on the device, stay until this is done, and do not overlap.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.functions().cuMemcpyDtoDAsync_v2)(to, from, bytes as usize, self.raw) };
        self.done("cuMemcpyDtoDAsync", status)
    }

    /// Sets bytes to zero.
    ///
    /// # Safety
    /// The range is on the device and stays until this is done.
    pub unsafe fn zero(&self, to: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.done("cuMemsetD8Async", unsafe { (self.functions().cuMemsetD8Async)(to, 0, bytes as usize, self.raw) })
    }

    /// # Safety
    /// The arguments are those that the kernel takes, and the addresses among them hold what it expects until it is done.
    pub unsafe fn launch(
        &self,
        function: &Function,
        blocks: u32,
        threads: (u32, u32),
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        // The driver reads each argument, of the size that it knows, at an address of its own.
        let mut words: Vec<u64> = arguments.iter().map(|argument| argument.word()).collect();
        let mut places: Vec<*mut c_void> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let (f, (x, y), no) = (self.functions(), threads, null_mut());
        // SAFETY: the arguments are copied before this returns; the rest is the caller's promise.
        let (places, shared) = (places.as_mut_ptr(), function.shared_bytes);
        let status = unsafe { (f.cuLaunchKernel)(function.raw, blocks, 1, 1, x, y, 1, shared, self.raw, places, no) };
        drop(words);
        self.done("cuLaunchKernel", status)
    }

    /// Records what `work` puts into this stream, and into those that wait for it and that it waits for, instead of running it.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let (f, mode) = (self.functions(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        // SAFETY: the stream exists.
        self.done("cuStreamBeginCapture", unsafe { (f.cuStreamBeginCapture_v2)(self.raw, mode) })?;
        let worked = work();
        let mut recorded = null_mut();
        // It must be ended whatever happened.
        // SAFETY: a handle is written.
        let ended = self.done("cuStreamEndCapture", unsafe { (f.cuStreamEndCapture)(self.raw, &mut recorded) });
        worked.and(ended)?;
        let mut raw = null_mut();
        // SAFETY: what was recorded is used once, then destroyed; a handle is written.
        let status = unsafe {
            let status = (f.cuGraphInstantiateWithFlags)(&mut raw, recorded, 0);
            (f.cuGraphDestroy)(recorded);
            status
        };
        self.done("cuGraphInstantiate", status)?;
        Ok(Graph { context: self.context.clone(), raw })
    }

    /// # Safety
    /// What was promised of everything in the graph when it was recorded holds again.
    pub unsafe fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both exist; the rest is the caller's promise.
        self.done("cuGraphLaunch", unsafe { (self.functions().cuGraphLaunch)(graph.raw, self.raw) })
    }

    /// The stream as other libraries of CUDA's take it.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    fn functions(&self) -> &DriverFunctions {
        &self.context.functions
    }

    fn done(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        self.context.done(call, status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once; what is in it still runs.
        unsafe { (self.functions().cuStreamDestroy_v2)(self.raw) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once; who waits for it still does.
        unsafe { (self.context.functions.cuEventDestroy_v2)(self.raw) };
    }
}

impl Function {
    /// Where it was loaded.
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: it is unloaded once, after all its functions.
        unsafe { (self.context.functions.cuModuleUnload)(self.raw) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once.
        unsafe { (self.context.functions.cuGraphExecDestroy)(self.raw) };
    }
}

impl Argument {
    /// As bytes that begin with the argument's own, on machines with the least significant byte first, as all with these GPUs are.
    fn word(self) -> u64 {
        match self {
            Argument::Address(address) => address,
            Argument::Int(number) => u64::from(number as u32),
        }
    }
}
