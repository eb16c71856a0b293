//! NVIDIA GPUs. The driver, NVRTC, cuBLASLt and NCCL are opened at run time. All functions of a library are looked up
//! before the first call, so that a missing or old one is an error that says how to get it.
//!
//! Types and signatures are those of `cudarc`. Its own loading panics if a library or a function is missing, so it is
//! not used.

mod blas;
mod bytes;
mod compile;
mod context;
mod driver;
mod error;
mod executor;
mod functions;
mod gather;
mod gemm;
mod library;
mod nccl;
mod nvtx;
mod session;
mod survey;

pub use blas::SinglePrecision;
pub use compile::{Compiled, Compiler};
pub use context::{Argument, Context};
pub use driver::{Architecture, Driver, Gpu};
pub use error::CudaError;
pub use executor::{Executor, ExecutorError, Running};
pub use library::{Found, Kind, Search, Version};
pub use nccl::{Channel, GroupId, Nccl, Watchdog};
pub use session::CudaOptions;
pub use survey::Survey;
