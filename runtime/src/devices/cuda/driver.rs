//! The driver: the GPUs of the machine, and their properties.

use super::error::CudaError;
use super::functions::{BlasFunctions, DriverFunctions, DriverVersion, NcclFunctions, NvrtcFunctions};
use super::library::{Found, Kind, Opened, Search, Version};
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;

/// A compute capability, such as `sm_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    pub major: u32,
    pub minor: u32,
}

/// A GPU, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Number in the driver's order, from 0.
    pub index: u32,
    pub name: String,
    pub architecture: Architecture,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    /// Memory that other processes leave free; `None` if no context can be created to ask.
    pub free_bytes: Option<u64>,
}

/// The driver, initialised, with at least one GPU.
#[derive(Clone, Debug)]
pub struct Driver {
    functions: DriverFunctions,
    errors: DriverVersion,
    pub found: Found,
}

/// The oldest supported driver: that of CUDA 12, for which kernels and libraries are built.
const OLDEST: Version = Version { major: 12, minor: 0, patch: None };

impl Architecture {
    /// The oldest supported architecture: kernels use 16-bit atomic additions.
    pub(crate) const OLDEST: Architecture = Architecture { major: 7, minor: 0 };
}

impl Driver {
    /// Opens and initialises the driver.
    pub fn open(search: &Search) -> Result<Driver, CudaError> {
        let library = search.open(Kind::Driver)?;
        let errors = DriverVersion::of(&library)?;
        let mut number: c_int = 0;
        // SAFETY: the call writes one number, and needs no initialisation.
        errors.done("cuDriverGetVersion", unsafe { (errors.cuDriverGetVersion)(&mut number) })?;
        let version = Version::of_cuda(number);
        if version < OLDEST {
            return Err(CudaError::DriverTooOld { found: version, needed: OLDEST });
        }
        // SAFETY: the only argument is the flags, which must be 0.
        errors.done("cuInit", unsafe { (errors.cuInit)(0) })?;
        let functions = DriverFunctions::of(&library)?;
        Ok(Driver { functions, errors, found: Found { kind: Kind::Driver, file: library.file, version } })
    }

    /// The function tables of the driver.
    pub(super) fn functions(&self) -> (DriverFunctions, DriverVersion) {
        (self.functions, self.errors)
    }

    /// All GPUs, in the driver's order; there is at least one.
    pub fn gpus(&self) -> Result<Vec<Gpu>, CudaError> {
        let mut count: c_int = 0;
        // SAFETY: the call writes one number.
        self.errors.done("cuDeviceGetCount", unsafe { (self.functions.cuDeviceGetCount)(&mut count) })?;
        if count <= 0 {
            return Err(CudaError::NoDevice { name: "it counts none".to_string() });
        }
        (0..count).map(|index| self.gpu(index)).collect()
    }

    fn gpu(&self, index: c_int) -> Result<Gpu, CudaError> {
        let (f, e) = (&self.functions, &self.errors);
        let mut device = 0;
        // SAFETY: the call writes one handle, which is a number.
        e.done("cuDeviceGet", unsafe { (f.cuDeviceGet)(&mut device, index) })?;
        let mut name = [0 as c_char; 256];
        // SAFETY: the call writes at most as many bytes as given, with a terminating zero.
        e.done("cuDeviceGetName", unsafe { (f.cuDeviceGetName)(name.as_mut_ptr(), 255, device) })?;
        // SAFETY: the last byte is always zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory = 0usize;
        // SAFETY: the call writes one number.
        e.done("cuDeviceTotalMem", unsafe { (f.cuDeviceTotalMem_v2)(&mut memory, device) })?;
        let attribute = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: the call writes one number.
            let status = unsafe { (f.cuDeviceGetAttribute)(&mut value, attribute, device) };
            e.done("cuDeviceGetAttribute", status).map(|()| value.max(0) as u32)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let free_bytes = self.free_bytes(device);
        Ok(Gpu {
            index: index as u32,
            name,
            architecture: Architecture { major, minor },
            multiprocessors,
            memory_bytes: memory as u64,
            free_bytes,
        })
    }

    /// Free memory of a device, if a context can be created to ask.
    fn free_bytes(&self, device: c_int) -> Option<u64> {
        let f = &self.functions;
        let mut context = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        if unsafe { (f.cuDevicePrimaryCtxRetain)(&mut context, device) } != 0 {
            return None;
        }
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the context was just retained. The call writes two numbers. The context is not used after its
        // release.
        let known = unsafe {
            let known = (f.cuCtxSetCurrent)(context) == 0 && (f.cuMemGetInfo_v2)(&mut free, &mut total) == 0;
            (f.cuCtxSetCurrent)(std::ptr::null_mut());
            (f.cuDevicePrimaryCtxRelease_v2)(device);
            known
        };
        known.then_some(free as u64)
    }
}

impl DriverVersion {
    /// Turns a status into a result, with the driver's name for a failure.
    pub(super) fn done(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let text = |of: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut text = std::ptr::null();
            // SAFETY: the call writes a pointer to a text that lasts as long as the library, or null for an unknown
            // code.
            let known = unsafe { of(status, &mut text) } == 0 && !text.is_null();
            // SAFETY: as above.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.cuGetErrorName).unwrap_or_else(|| format!("code {status}"));
        // The driver is installed, but no GPU is visible to this process.
        if status == cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE as u32 {
            return Err(CudaError::NoDevice { name });
        }
        Err(CudaError::Call { call, name, text: text(self.cuGetErrorString).unwrap_or_default() })
    }
}

impl Search {
    /// Opens a library and asks for its version.
    pub fn find(&self, kind: Kind) -> Result<Found, CudaError> {
        let library = self.open(kind)?;
        let version = version(&library)?;
        Ok(Found { kind, file: library.file, version })
    }
}

/// The version that a library reports.
fn version(library: &Opened) -> Result<Version, CudaError> {
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    let unknown = |call, code: u32| Err(CudaError::Call { call, name: format!("code {code}"), text: String::new() });
    Ok(match library.kind {
        Kind::Driver => {
            let driver = DriverVersion::of(library)?;
            // SAFETY: the call writes one number.
            driver.done("cuDriverGetVersion", unsafe { (driver.cuDriverGetVersion)(&mut major) })?;
            Version::of_cuda(major)
        }
        Kind::Nvrtc => {
            // SAFETY: the call writes two numbers.
            match unsafe { (NvrtcFunctions::of(library)?.nvrtcVersion)(&mut major, &mut minor) } {
                0 => Version { major: major.max(0) as u32, minor: minor.max(0) as u32, patch: None },
                code => return unknown("nvrtcVersion", code),
            }
        }
        // SAFETY: the call takes no arguments and returns a number.
        Kind::CublasLt => Version::of_cublas(unsafe { (BlasFunctions::of(library)?.cublasLtGetVersion)() }),
        Kind::Nccl => {
            // SAFETY: the call writes one number.
            match unsafe { (NcclFunctions::of(library)?.ncclGetVersion)(&mut major) } {
                0 => Version::of_nccl(major),
                code => return unknown("ncclGetVersion", code),
            }
        }
    })
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}
