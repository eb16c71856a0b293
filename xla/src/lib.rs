//! XLA as a target: graphs as StableHLO text, and XLA's compilers and devices through PJRT.
//!
//! [`legal`] rewrites a graph into ops that StableHLO has, and [`text`] prints them.

#![forbid(unsafe_code)]

pub mod legal;
pub mod text;
