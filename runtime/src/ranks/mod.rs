//! Coordination of the processes that run a plan together: they find each other, agree on joint decisions, and notice a
//! lost one.
//!
//! All of it goes through a [`World`]. It uses MPI if the processes are its ranks (`crate::mpi`). Otherwise it uses
//! connections to the first process, found through a shared directory ([`rendezvous`]). The tensors of devices travel
//! separately: over MPI, over NCCL, or over connections between the processes (`post`).
//!
//! No process decides alone what the others must do too: signals, checkpoints and losses are agreed on through the [`World`].

mod call;
pub mod connect;
mod failover;
mod gather;
mod hub;
pub mod place;
pub(crate) mod post;
pub mod rendezvous;
#[cfg(test)]
mod simulated;
pub mod watch;
mod world;

pub use place::Layout;
pub use world::{Carrier, World};
