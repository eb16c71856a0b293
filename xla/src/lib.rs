//! XLA as a target: graphs as StableHLO text, and XLA's compilers and devices through PJRT.
//!
//! [`legal`] rewrites a graph into ops that StableHLO has, and [`text`] prints them. [`pjrt`] opens a plugin of XLA,
//! compiles the text and runs it, and [`program`] prints the bodies of plans' programs. Only `pjrt` has unsafe
//! code.

#![deny(unsafe_code)]

pub mod certify;
pub mod hlo;
pub mod join;
pub mod legal;
pub mod pjrt;
pub mod program;
pub mod text;
