//! Reads StableHLO as JAX prints it, `jax.jit(f).lower(...).as_text()`, with or without debug locations.
//!
//! The import has three steps, each with its own types: `lexer` cuts bytes into tokens, [`parse`] builds the
//! tree of `syntax` from them (`attribute` and `pretty` are its parts), and [`import`] turns the tree into a
//! graph (`lower` lowers the ops, `literal` the constants).

mod attribute;
mod complex;
mod control;
mod convert;
mod function;
mod fused;
mod indexing;
mod known;
mod lexer;
mod literal;
mod lower;
mod open;
mod parse;
mod pretty;
mod product;
mod random;
mod ranks;
mod reduction;
mod report;
mod sharding;
mod solve;
mod sort;
pub(crate) mod syntax;
mod update;
mod window;

#[cfg(test)]
mod convert_tests;
#[cfg(test)]
mod export_tests;
#[cfg(test)]
mod meaning_tests;
#[cfg(test)]
mod parse_tests;
#[cfg(test)]
mod spellings_tests;

pub use convert::{Argument, Imported, Note, import, import_whole, import_with};
pub use lexer::{ParseError, Place};
pub use parse::parse;
pub use ranks::{RankInput, RankOptions, RankOutput, RankProgram, import_ranks};
pub use report::{ImportError, Problem, ProblemKind, Unsupported};
