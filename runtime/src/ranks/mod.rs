//! What processes that run a plan together need beside its tensors: to find each other, to agree on what none must decide alone, and
//! to notice that one is lost.
//!
//! All of it goes through a [`World`], over MPI where the processes are its ranks ([`crate::mpi`]), and else over connections to the
//! first one, which is found through a directory that all see ([`rendezvous`]). What devices exchange goes other ways: over MPI, or
//! through NCCL.
//!
//! No process decides alone what the others must do too: signals, checkpoints and losses are agreed on through the [`World`].

pub mod connect;
mod deputy;
pub mod place;
pub mod rendezvous;
mod star;
pub mod watch;
mod world;

pub use place::Layout;
pub use world::{Carrier, World};
