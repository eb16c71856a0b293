//! Compiles kernels to machine code by NVRTC, which needs no GPU.
//!
//! Each kernel is compiled once per machine and cached in a folder, under the hash of everything that it depends on. A
//! cached file also holds that key and a checksum. So neither a hash collision nor a truncated file is taken for code.

use super::driver::Architecture;
use super::error::CudaError;
use super::functions::NvrtcFunctions;
use super::library::{Found, Kind, Search};
use crate::files;
use crate::loops::cuda::{PRELUDE, Text};
use cudarc::nvrtc::sys::nvrtcProgram;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};

/// NVRTC with its cache.
#[derive(Clone, Debug)]
pub struct Compiler {
    functions: NvrtcFunctions,
    pub found: Found,
    /// Folder of the cache, created on demand; nothing is cached without one.
    cache: Option<PathBuf>,
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

/// The first bytes of a cached file, with the version of its format.
const MAGIC: &[u8] = b"altiplano kernel 1\n";

impl Compiler {
    pub fn open(search: &Search, cache: Option<PathBuf>) -> Result<Compiler, CudaError> {
        let found = search.find(Kind::Nvrtc)?;
        let functions = NvrtcFunctions::of(&search.open(Kind::Nvrtc)?)?;
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
        let file = self.cache.as_ref().map(|folder| folder.join(format!("{:032x}.cubin", hash(key.as_bytes()))));
        if let Some(image) = file.as_deref().and_then(|file| kept(file, &key)) {
            return Ok((image, Origin::Cache));
        }
        let image = self.compiled(name, &source, &options)?;
        let kept = file.is_some_and(|file| keep(&file, &key, &image).is_ok());
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

/// The image in a cached file, if the file is complete and has the same key.
fn kept(file: &Path, key: &str) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (checksum, rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<16>()?;
    if u128::from_le_bytes(*checksum) != hash(rest) {
        return None;
    }
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let (found, image) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    (found == key.as_bytes()).then(|| image.to_vec())
}

/// Writes a cached file atomically: a reader sees all of it, or the old content.
fn keep(file: &Path, key: &str, image: &[u8]) -> std::io::Result<()> {
    let rest = [&(key.len() as u64).to_le_bytes(), key.as_bytes(), image].concat();
    let bytes = [MAGIC, &hash(&rest).to_le_bytes(), &rest].concat();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    files::replace(file, &bytes)
}

/// FNV-1a of 128 bits.
fn hash(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
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

    #[test]
    fn hashes_are_those_of_the_reference() {
        // From the test suite of FNV's authors.
        assert_eq!(hash(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
