//! Programs for GPUs: their tapes, their kernels, and an emulated GPU that runs them.

#[path = "../common/mod.rs"]
mod common;

mod cuda_emulated;
mod cuda_kernels;
mod tape;
