//! Devices other than the CPU. Each is always compiled in and looks for its libraries on first use, so that one binary
//! serves machines with and without it.

mod code_cache;
pub mod cuda;
pub mod xla;
