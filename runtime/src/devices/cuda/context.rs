//! The resources of a GPU's context: memory, streams, events, kernels and graphs, each released with its value.
//!
//! Everything is asynchronous, as in the driver. Functions whose callers must wait, or guarantee valid addresses, are
//! marked `unsafe`. Errors on drop are ignored: the context is then broken, and the next call reports it.

use super::driver::{Driver, Gpu};
use super::error::CudaError;
use super::functions::{DriverFunctions, DriverVersion};
use cudarc::driver::sys::{self, CUstreamCaptureMode};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// The primary context of a GPU, shared by all of its users in this process.
#[derive(Debug)]
pub struct Context {
    functions: DriverFunctions,
    errors: DriverVersion,
    device: c_int,
    raw: sys::CUcontext,
    pub gpu: Gpu,
}

// SAFETY: any thread that has made a context current may use it, even concurrently with others.
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

/// Host memory that the device accesses directly.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is ordinary memory, owned by its value.
unsafe impl Send for Pinned {}

/// A queue of work that runs in order.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: any thread may use the driver's handles.
unsafe impl Send for Stream {}

/// A point in a stream for which others may wait.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}

/// A loaded module of kernels.
#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: as for streams.
unsafe impl Send for Module {}
// SAFETY: it is only used for lookups.
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

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    Address(u64),
    Int(i32),
}

/// Work of several streams that is recorded once and launched as a whole.
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
        // SAFETY: the call writes a handle.
        errors.done("cuDeviceGet", unsafe { (functions.cuDeviceGet)(&mut device, gpu.index as c_int) })?;
        let mut raw = null_mut();
        // SAFETY: the call writes a handle.
        let status = unsafe { (functions.cuDevicePrimaryCtxRetain)(&mut raw, device) };
        errors.done("cuDevicePrimaryCtxRetain", status)?;
        let context = Arc::new(Context { functions, errors, device, raw, gpu: gpu.clone() });
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current. Every thread must call this before it uses the context.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: this value keeps the context alive.
        self.done("cuCtxSetCurrent", unsafe { (self.functions.cuCtxSetCurrent)(self.raw) })
    }

    /// Free bytes on the device.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the call writes two numbers.
        self.done("cuMemGetInfo", unsafe { (self.functions.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Allocates uninitialised memory. The error for too little memory names `what`.
    pub fn allocate(self: &Arc<Context>, what: &str, bytes: u64) -> Result<Memory, CudaError> {
        let mut address = 0;
        let wanted = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: the call writes an address.
        let status = unsafe { (self.functions.cuMemAlloc_v2)(&mut address, wanted) };
        if status == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32 {
            let (index, free_bytes) = (self.gpu.index, self.free_bytes()?);
            let (what, detail) = (what.to_string(), String::new());
            return Err(CudaError::OutOfMemory { index, what, wanted_bytes: bytes, free_bytes, detail });
        }
        self.done("cuMemAlloc", status)?;
        Ok(Memory { context: self.clone(), address, bytes })
    }

    /// Allocates host memory, filled with zeros.
    pub fn pinned(self: &Arc<Context>, bytes: usize) -> Result<Pinned, CudaError> {
        let mut start = null_mut();
        // SAFETY: the call writes an address.
        self.done("cuMemHostAlloc", unsafe { (self.functions.cuMemHostAlloc)(&mut start, bytes.max(1), 0) })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| CudaError::Call {
            call: "cuMemHostAlloc",
            name: "it gave no memory".to_string(),
            text: String::new(),
        })?;
        // SAFETY: the allocation has this length.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { context: self.clone(), start, bytes })
    }

    /// Creates a stream that does not synchronise with others implicitly.
    pub fn stream(self: &Arc<Context>) -> Result<Stream, CudaError> {
        let mut raw = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the call writes a handle.
        self.done("cuStreamCreate", unsafe { (self.functions.cuStreamCreate)(&mut raw, flags) })?;
        Ok(Stream { context: self.clone(), raw })
    }

    /// Creates an event without a timestamp.
    pub fn event(self: &Arc<Context>) -> Result<Event, CudaError> {
        let mut raw = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: the call writes a handle.
        self.done("cuEventCreate", unsafe { (self.functions.cuEventCreate)(&mut raw, flags) })?;
        Ok(Event { context: self.clone(), raw })
    }

    /// Loads the kernel `name` from an image of [`super::Compiler`]. Each block gets `shared_bytes` of shared memory.
    pub fn function(self: &Arc<Context>, name: &str, image: &[u8], shared_bytes: u32) -> Result<Function, CudaError> {
        // PTX would need a terminating zero, and machine code tolerates one.
        let image = [image, &[0]].concat();
        let mut raw = null_mut();
        // SAFETY: the image is complete, as its checksum or its compiler guarantees, and is copied.
        let status = unsafe { (self.functions.cuModuleLoadData)(&mut raw, image.as_ptr().cast()) };
        self.done("cuModuleLoadData", status)?;
        let module = Arc::new(Module { context: self.clone(), raw });
        let name = CString::new(name).unwrap_or_default();
        let mut raw = null_mut();
        // SAFETY: the name ends with a zero; the call writes a handle.
        let status = unsafe { (self.functions.cuModuleGetFunction)(&mut raw, module.raw, name.as_ptr()) };
        self.done("cuModuleGetFunction", status)?;
        // Every device has this much without a request.
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
        // SAFETY: it was retained once. Everything created in it holds a reference, and so is gone.
        unsafe { (self.functions.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

impl Memory {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of `bytes` bytes at `offset`, if they are in bounds.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then_some(self.address + offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this driver allocated it, and it is freed once. The driver waits for work that uses it.
        unsafe { (self.context.functions.cuMemFree_v2)(self.address) };
    }
}

impl Pinned {
    /// # Safety
    /// No copy from or to these bytes may be in progress.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has this length and is initialised.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// No copy from or to these bytes may be in progress.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// The address of `bytes` bytes at `offset`, if they are in bounds.
    pub fn range(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the result is within the allocation, or one past its end.
        (end <= self.bytes).then(|| unsafe { self.start.as_ptr().add(offset) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: this driver allocated it, and it is freed once.
        unsafe { (self.context.functions.cuMemFreeHost)(self.start.as_ptr().cast()) };
    }
}

impl Stream {
    /// Waits until all work in the stream is done, and returns its error.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream exists.
        self.done("cuStreamSynchronize", unsafe { (self.functions().cuStreamSynchronize)(self.raw) })
    }

    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist.
        self.done("cuEventRecord", unsafe { (self.functions().cuEventRecord)(event.raw, self.raw) })
    }

    /// Makes later work in this stream wait for a recorded event.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist.
        self.done("cuStreamWaitEvent", unsafe { (self.functions().cuStreamWaitEvent)(self.raw, event.raw, 0) })
    }

    /// # Safety
    /// Both ranges must stay allocated, and the host's untouched, until the copy is done.
    pub unsafe fn upload(&self, to: u64, from: *const u8, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: guaranteed by the caller.
        let status = unsafe { (self.functions().cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes as usize, self.raw) };
        self.done("cuMemcpyHtoDAsync", status)
    }

    /// # Safety
    /// Both ranges must stay allocated, and the host's untouched, until the copy is done.
    pub unsafe fn download(&self, to: *mut u8, from: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: guaranteed by the caller.
        let status = unsafe { (self.functions().cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes as usize, self.raw) };
        self.done("cuMemcpyDtoHAsync", status)
    }

    /// # Safety
    /// Both ranges must be on the device, not overlap, and stay allocated until the copy is done.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: guaranteed by the caller.
        let status = unsafe { (self.functions().cuMemcpyDtoDAsync_v2)(to, from, bytes as usize, self.raw) };
        self.done("cuMemcpyDtoDAsync", status)
    }

    /// Sets bytes to zero.
    ///
    /// # Safety
    /// The range must be on the device and stay allocated until this is done.
    pub unsafe fn zero(&self, to: u64, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: guaranteed by the caller.
        self.done("cuMemsetD8Async", unsafe { (self.functions().cuMemsetD8Async)(to, 0, bytes as usize, self.raw) })
    }

    /// # Safety
    /// The arguments must match the kernel's parameters. Addresses among them must hold what it expects until it is
    /// done.
    pub unsafe fn launch(
        &self,
        function: &Function,
        blocks: u32,
        threads: (u32, u32),
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        // The driver reads each argument through a pointer, with the size that it knows.
        let mut words: Vec<u64> = arguments.iter().map(|argument| argument.word()).collect();
        let mut places: Vec<*mut c_void> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let (f, (x, y), no) = (self.functions(), threads, null_mut());
        let (places, shared) = (places.as_mut_ptr(), function.shared_bytes);
        // SAFETY: the call copies the arguments; the caller guarantees the rest.
        let status = unsafe { (f.cuLaunchKernel)(function.raw, blocks, 1, 1, x, y, 1, shared, self.raw, places, no) };
        drop(words);
        self.done("cuLaunchKernel", status)
    }

    /// Records the work that `work` enqueues, instead of running it. This includes other streams that wait for this one
    /// and for which it waits.
    pub(crate) fn capture(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let (f, mode) = (self.functions(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        // SAFETY: the stream exists.
        self.done("cuStreamBeginCapture", unsafe { (f.cuStreamBeginCapture_v2)(self.raw, mode) })?;
        let worked = work();
        let mut recorded = null_mut();
        // The capture must be ended in any case. SAFETY: the call writes a handle.
        let ended = self.done("cuStreamEndCapture", unsafe { (f.cuStreamEndCapture)(self.raw, &mut recorded) });
        worked.and(ended)?;
        let mut raw = null_mut();
        // SAFETY: the recorded graph is used once, then destroyed; the call writes a handle.
        let status = unsafe {
            let status = (f.cuGraphInstantiateWithFlags)(&mut raw, recorded, 0);
            (f.cuGraphDestroy)(recorded);
            status
        };
        self.done("cuGraphInstantiate", status)?;
        Ok(Graph { context: self.context.clone(), raw })
    }

    /// # Safety
    /// Everything that was guaranteed when the graph was recorded must hold again.
    pub(crate) unsafe fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both exist; the caller guarantees the rest.
        self.done("cuGraphLaunch", unsafe { (self.functions().cuGraphLaunch)(graph.raw, self.raw) })
    }

    /// The stream's handle, for other CUDA libraries.
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
        // SAFETY: it is destroyed once; its pending work still runs.
        unsafe { (self.functions().cuStreamDestroy_v2)(self.raw) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once; pending waits still complete.
        unsafe { (self.context.functions.cuEventDestroy_v2)(self.raw) };
    }
}

impl Function {
    /// The context in which it was loaded.
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
    /// The argument's bytes, in the low bytes of a word. All machines with these GPUs are little-endian.
    fn word(self) -> u64 {
        match self {
            Argument::Address(address) => address,
            Argument::Int(number) => u64::from(number as u32),
        }
    }
}
