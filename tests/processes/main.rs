//! Runs of several processes.

#[path = "../common/mod.rs"]
mod common;

#[cfg(feature = "mpi")]
mod mpi;
mod processes;
