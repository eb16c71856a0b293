//! Runs a plan with one MPI rank per device: the same [`crate::device::Device`] as for threads, with messages and
//! collectives over MPI.
//!
//! Every rank holds the plan and compiles its own program. Ranks agree over MPI, and the watch ([`crate::ranks`])
//! handles lost ranks. MPI is located when the crate is built, so all of this is behind the feature `mpi`.
//!
//! One thread makes all calls to MPI. The watch makes none, and ends the process whatever that thread waits for.

pub mod collective;
pub mod measure;
pub mod session;
mod sys;
pub mod wire;

pub use session::{RankOptions, Started};
pub use sys::Communicator;
