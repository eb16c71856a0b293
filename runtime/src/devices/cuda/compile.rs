//! Compiles kernels to machine code by NVRTC, which needs no GPU.
//!
//! Each kernel is compiled once per machine and cached in a folder.

use super::super::code_cache::CodeCache;
use super::driver::Architecture;
use super::error::CudaError;
use super::functions::NvrtcFunctions;
use super::library::{Found, Kind, Search};
use crate::loops::cuda::{PRELUDE, Text};
use cudarc::nvrtc::sys::nvrtcProgram;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

/// NVRTC with its cache.
#[derive(Clone, Debug)]
pub struct Compiler {
    functions: NvrtcFunctions,
    pub found: Found,
    /// Nothing is cached without one.
    cache: Option<CodeCache>,
}

/// Kernels as machine code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// Images by kernel name.
    pub images: BTreeMap<String, Vec<u8>>,
    /// Number of kernels that were compiled rather than found in the cache.
    pub compiled: usize,
    /// Number of kernels that could not be cached, for lack of a writable folder.
    pub unkept: usize,
}

/// The origin of an image.
enum Origin {
    Cache,
    Compiler { kept: bool },
}

impl Compiler {
    pub fn open(search: &Search, cache: Option<PathBuf>) -> Result<Compiler, CudaError> {
        let found = search.find(Kind::Nvrtc)?;
        let functions = NvrtcFunctions::of(&search.open(Kind::Nvrtc)?)?;
        let cache = cache.map(|folder| CodeCache { folder, extension: "cubin" });
        Ok(Compiler { functions, found, cache })
    }

    /// Compiles kernels in parallel, equal ones once.
    pub fn compile<'a>(
        &self,
        kernels: impl IntoIterator<Item = &'a Text>,
        architecture: Architecture,
    ) -> Result<Compiled, CudaError> {
        let target = self.target(architecture)?;
        let kernels: BTreeMap<&str, &Text> = kernels.into_iter().map(|text| (text.name.as_str(), text)).collect();
        let made: Vec<(&str, Vec<u8>, Origin)> = kernels
            .into_par_iter()
            .map(|(name, text)| self.image(name, &text.source, target).map(|(image, origin)| (name, image, origin)))
            .collect::<Result<_, CudaError>>()?;
        let mut all = Compiled::default();
        for (name, image, origin) in made {
            if let Origin::Compiler { kept } = origin {
                all.compiled += 1;
                all.unkept += usize::from(!kept);
            }
            all.images.insert(name.to_string(), image);
        }
        Ok(all)
    }

    /// The architecture to compile for, so that the code runs on `device`.
    fn target(&self, device: Architecture) -> Result<Architecture, CudaError> {
        let f = &self.functions;
        let mut count: c_int = 0;
        // SAFETY: the call writes one number.
        self.done("nvrtcGetNumSupportedArchs", unsafe { (f.nvrtcGetNumSupportedArchs)(&mut count) })?;
        let mut numbers: Vec<c_int> = vec![0; count.max(0) as usize];
        // SAFETY: the call writes as many numbers as it just returned.
        self.done("nvrtcGetSupportedArchs", unsafe { (f.nvrtcGetSupportedArchs)(numbers.as_mut_ptr()) })?;
        let known = |number: &c_int| Architecture { major: *number as u32 / 10, minor: *number as u32 % 10 };
        let supported: Vec<Architecture> = numbers.iter().map(known).collect();
        target(device, &supported).ok_or_else(|| CudaError::NoCompilerFor {
            architecture: device,
            version: self.found.version,
            file: self.found.file.clone(),
        })
    }

    /// Compiles one kernel, or finds it in the cache.
    fn image(&self, name: &str, source: &str, target: Architecture) -> Result<(Vec<u8>, Origin), CudaError> {
        let source = format!("{PRELUDE}\n{source}");
        // Without fused multiply-add, so that a value that two kernels compute is the same in both.
        let fixed = ["--std=c++17", "-w", "--fmad=false"].map(String::from);
        let options = [&[format!("--gpu-architecture={target}")], &fixed[..]].concat();
        let key = format!("NVRTC {}\n{}\n{source}", self.found.version, options.join(" "));
        if let Some(image) = self.cache.as_ref().and_then(|cache| cache.find(&key)) {
            return Ok((image, Origin::Cache));
        }
        let image = self.compiled(name, &source, &options)?;
        let kept = self.cache.as_ref().is_some_and(|cache| cache.keep(&key, &image).is_ok());
        Ok((image, Origin::Compiler { kept }))
    }

    fn compiled(&self, name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
        let f = &self.functions;
        let text = |text: &str| {
            // Neither the texts nor the options contain zeros.
            CString::new(text).map_err(|_| CudaError::Compile { kernel: name.to_string(), log: "a zero byte".into() })
        };
        let (source, file) = (text(source)?, text(&format!("{name}.cu"))?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Program { functions: f, handle: std::ptr::null_mut() };
        let none = std::ptr::null();
        // SAFETY: the texts end with zeros and outlive the call; no headers are given; the call writes a handle.
        let status =
            unsafe { (f.nvrtcCreateProgram)(&mut program.handle, source.as_ptr(), file.as_ptr(), 0, none, none) };
        self.done("nvrtcCreateProgram", status)?;
        // SAFETY: the program was just created. The options match their count and outlive the call.
        let status = unsafe { (f.nvrtcCompileProgram)(program.handle, options.len() as c_int, options.as_ptr()) };
        if status != 0 {
            let log = program.bytes(f.nvrtcGetProgramLogSize, f.nvrtcGetProgramLog).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string();
            let log = if log.is_empty() { self.text_of(status) } else { log };
            return Err(CudaError::Compile { kernel: name.to_string(), log });
        }
        program.bytes(f.nvrtcGetCUBINSize, f.nvrtcGetCUBIN).map_err(|status| CudaError::Call {
            call: "nvrtcGetCUBIN",
            name: self.text_of(status),
            text: String::new(),
        })
    }

    fn done(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        match status {
            0 => Ok(()),
            status => Err(CudaError::Call { call, name: self.text_of(status), text: String::new() }),
        }
    }

    fn text_of(&self, status: u32) -> String {
        // SAFETY: the call returns a text that lasts as long as the library, for any number.
        let text = unsafe { (self.functions.nvrtcGetErrorString)(status) };
        match text.is_null() {
            true => format!("code {status}"),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        }
    }
}

/// An NVRTC program, destroyed with its value.
struct Program<'a> {
    functions: &'a NvrtcFunctions,
    handle: nvrtcProgram,
}

impl Program<'_> {
    /// Reads bytes whose size one function returns and another writes. Returns the status of the one that fails.
    fn bytes(
        &self,
        size_of: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32,
        write: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32,
    ) -> Result<Vec<u8>, u32> {
        let mut size = 0usize;
        // SAFETY: the program exists; the call writes one number.
        let status = unsafe { size_of(self.handle, &mut size) };
        if status != 0 {
            return Err(status);
        }
        let mut bytes = vec![0u8; size];
        // SAFETY: the call writes as many bytes as `size_of` returned.
        let status = unsafe { write(self.handle, bytes.as_mut_ptr().cast()) };
        if status == 0 { Ok(bytes) } else { Err(status) }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: NVRTC created it, and it is not used again.
            unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.handle) };
        }
    }
}

/// The newest supported architecture that runs on a device. Code runs on later versions of the same generation.
fn target(device: Architecture, supported: &[Architecture]) -> Option<Architecture> {
    supported.iter().copied().filter(|a| a.major == device.major && a.minor <= device.minor).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_made_for_the_same_generation() {
        let a = |major, minor| Architecture { major, minor };
        let supported = [a(7, 5), a(8, 0), a(8, 6), a(9, 0), a(12, 1)];
        let check = |device, expected| assert_eq!(target(device, &supported), expected, "{device}");
        check(a(9, 0), Some(a(9, 0)));
        check(a(8, 9), Some(a(8, 6)));
        check(a(7, 0), None);
        check(a(12, 0), None);
        check(a(10, 0), None);
    }
}
