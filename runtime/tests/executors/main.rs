//! What the runtime computes, against the reference semantics.

mod attention;
mod chains;
mod collectives;
mod common;
mod kernels;
mod loops;
mod session;
