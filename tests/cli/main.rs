//! The command line: what it says, writes, keeps and refuses.

#[path = "../common/mod.rs"]
mod common;

mod bad_input;
mod cache;
mod certificates;
mod clusters;
mod command_line;
mod explain;
mod fidelity;
mod page;
mod probe;
mod profile;
mod scale;
mod schemas;
mod serve;
mod survive;
mod traces;
mod trials;
mod untrusted;
