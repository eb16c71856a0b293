//! Reads StableHLO as JAX prints it, `jax.jit(f).lower(...).as_text()`, with or without debug locations.
//!
//! The text goes through three steps, each with its own types: `lexer` cuts bytes into tokens, [`parse`] builds the
//! tree of [`syntax`] from them (`attribute` and `pretty` are its parts), and [`import`] turns the tree into a graph
//! (`lower` knows the ops, `literal` the constants).

mod attribute;
mod convert;
mod lexer;
mod literal;
mod lower;
mod parse;
mod pretty;
pub mod syntax;
mod window;

#[cfg(test)]
mod convert_tests;
#[cfg(test)]
mod parse_tests;

pub use convert::{Argument, ImportError, Imported, MAX_OPERATIONS, Problem, ProblemKind, Unsupported, import};
pub use lexer::{ParseError, Place};
pub use parse::parse;
