//! NVIDIA GPUs. The driver, NVRTC, cuBLASLt and NCCL are opened where they are found, and all functions of each looked up before the
//! first is called, so that what is missing, or too old, is an error that says how to get it.
//!
//! Types and signatures are those of `cudarc`; its own loading panics where a library or a function is absent, so it is not used.

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
pub use session::{CudaOptions, CudaSession, CudaStep};
pub use survey::Survey;
