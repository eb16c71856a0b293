//! Executes programs on the CPU. Every device is a thread that interprets its program's schedule, with collectives and
//! transfers through memory.
//!
//! [`Session`] is the main entry point; [`evaluate`] runs a bare graph. Each body is compiled once for all devices of
//! its program (see [`compile`]). A [`HostTensor`] is a tensor outside any device.

pub mod arena;
pub mod array_file;
mod async_collectives;
mod check;
pub mod collective;
pub mod compile;
pub mod data;
pub mod device;
pub mod devices;
pub mod element;
pub mod error;
mod evaluate;
pub mod execute;
pub mod files;
mod fuse;
pub mod host;
pub mod init;
pub mod kernel;
pub mod layout;
pub mod loops;
pub mod mailbox;
pub mod math;
pub mod measure;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod random;
pub mod ranks;
pub mod recording;
mod roster;
pub mod session;
pub mod shared_tensor;
pub mod step;
pub mod tape;
mod thread_pool;
pub mod work;

pub use altiplano_ir::storage::view;
pub use compile::body_transient_bytes;
pub use error::RuntimeError;
pub use evaluate::evaluate;
pub use host::{HostData, HostTensor};
pub use session::{Options, Session, StepReport};
