//! Reads programs as PyTorch exports them: `torch.export.save(torch.export.export(model, inputs), "model.pt2")`.
//!
//! [`archive`] reads the zip file and [`schema`] its JSON; [`convert`] goes through the nodes and looks each one's op up in
//! [`table`], whose lowerings ([`ops`]) take arguments by name from a [`call`] and write the op with [`altiplano_ir::array`].
//! [`memory`] turns changes in place into new values, [`sizes`] evaluates what the program leaves open, [`promote`] finds the
//! element type that several operands are computed in, [`complex`] makes pairs of complex numbers, [`mapped`] undoes `vmap`, and [`fold`] finds what
//! follows from the program alone.

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
pub use convert::{Imported, MAX_OPERATIONS, Options, import, weights};
pub use report::{ImportError, Problem, ProblemKind, Unsupported};
pub use schema::NEWEST;
