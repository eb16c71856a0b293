//! Reads programs exported by PyTorch: `torch.export.save(torch.export.export(model, inputs), "model.pt2")`.
//!
//! `archive` reads the zip file and `schema` its JSON. `convert` visits the nodes and looks up each op in
//! `table`; its lowerings (`ops`) take arguments by name from a `call` and write the op with
//! [`altiplano_ir::array`]. `memory` turns changes in place into new values, `sizes` evaluates open sizes, and
//! `promote` finds the common element type of several operands. `complex` represents complex numbers as
//! pairs, `mapped` undoes `vmap`, and `fold` evaluates values that follow from the program alone.

mod archive;
mod call;
mod complex;
mod convert;
mod fold;
mod mapped;
mod memory;
mod ops;
mod promote;
mod report;
mod schema;
mod sizes;
mod table;

#[cfg(test)]
mod tests;

pub use super::OpenSize;
pub use archive::{ArchiveError, Stored};
pub use convert::{Imported, Options, import, weights};
pub use report::{ImportError, Problem, ProblemKind, Unsupported};
pub use schema::NEWEST;
