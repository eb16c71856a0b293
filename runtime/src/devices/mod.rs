//! Devices other than the CPU. Each is always compiled in and looks for its libraries when it is first asked for, so that one binary
//! serves machines with and without it.

pub mod cuda;
