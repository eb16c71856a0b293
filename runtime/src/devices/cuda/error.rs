//! Errors between a program and a GPU. Each is one line that names what is missing or has failed, and the remedy.

use super::driver::Architecture;
use super::library::{Kind, Version};
use std::path::PathBuf;

/// Errors of CUDA devices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CudaError {
    #[error("{} is missing ({}): {}", kind.title(), kind.purpose(), kind.remedy())]
    MissingLibrary { kind: Kind },
    #[error("{}: cannot load this library: {problem}; {} is needed ({}): {}", file.display(), kind.title(), kind.purpose(), kind.remedy())]
    Unloadable { kind: Kind, file: PathBuf, problem: String },
    #[error("{}: it has no function {function}, so it is too old or not {}: {}", file.display(), kind.title(), kind.remedy())]
    MissingFunction { kind: Kind, file: PathBuf, function: String },
    #[error("the driver is for CUDA {found}, but {needed} or newer is needed: install a newer one (nvidia-driver)")]
    DriverTooOld { found: Version, needed: Version },
    #[error("{}: it is built for CUDA {library}, but the driver is for CUDA {driver}: install a newer driver (nvidia-driver), or a library of CUDA {}", file.display(), driver.major)]
    LibraryTooNew { file: PathBuf, library: Version, driver: Version },
    #[error("the driver is installed, but it finds no GPU ({name}): is one installed, and passed to this container?")]
    NoDevice { name: String },
    #[error("GPU {index} ({name}) has architecture {found}; kernels are made for {needed} and newer")]
    UnsupportedArchitecture { index: u32, name: String, found: Architecture, needed: Architecture },
    #[error("NVRTC {version} ({}) does not compile for {architecture}: another version of it does", file.display())]
    NoCompilerFor { architecture: Architecture, version: Version, file: PathBuf },
    #[error("kernel {kernel} does not compile: {log}")]
    Compile { kernel: String, log: String },
    #[error("GPU {index} has too little memory for {what}: {wanted_bytes} bytes are needed, {free_bytes} are free{}", largest(.detail))]
    OutOfMemory { index: u32, what: String, wanted_bytes: u64, free_bytes: u64, detail: String },
    #[error("cuBLASLt has no algorithm for this product of {types}")]
    UnsupportedMatmul { types: String },
    #[error("rank {rank}, {op} in the group of ranks {ranks:?}: {problem}")]
    Group { rank: u32, ranks: Vec<u32>, op: &'static str, problem: String },
    #[error("NCCL does not support {what}")]
    UnsupportedExchange { what: String },
    #[error("{call} failed: {name}{}", explained(.text))]
    Call { call: &'static str, name: String, text: String },
}

impl CudaError {
    /// Returns whether the machine or its installation is at fault, as opposed to work that failed.
    pub fn is_setup(&self) -> bool {
        !matches!(
            self,
            CudaError::Call { .. }
                | CudaError::Compile { .. }
                | CudaError::OutOfMemory { .. }
                | CudaError::UnsupportedMatmul { .. }
                | CudaError::UnsupportedExchange { .. }
                | CudaError::Group { .. }
        )
    }
}

/// `; the largest are ...`, or nothing.
fn largest(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!("; {detail}") }
}

/// ` (out of memory)`, or nothing.
fn explained(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}
