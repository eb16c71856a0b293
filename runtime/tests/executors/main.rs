//! Compares the runtime's results with the reference semantics.

mod attention;
mod chains;
mod collectives;
mod common;
mod kernels;
mod loops;
mod session;
