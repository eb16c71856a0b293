//! Importer for ONNX models: `onnx.proto` of opset 7 and later, as exporters of PyTorch, TensorFlow and others write
//! it.
//!
//! [`proto`] has the messages of a file, and [`import`] converts them to a graph. [`convert`](self) walks the nodes,
//! inlines functions and unrolls loops. A table maps each op to the function that expresses it in ops of a graph, with
//! one file per family. Shapes that the model computes are evaluated on the way (`known`), so that all sizes of the
//! graph are numbers.
//!
//! Tensors that the file holds are imported by kind:
//! * Floats are parameters, whether their data is here or in another file, under their name in the file.
//! * The running mean and variance of a batch norm are inputs without a batch, and so are buffers of a PyTorch export.
//! * Integers, booleans, single floats (unless they are called `.weight` or `.bias`) and float settings of an op (the
//!   scales of a resize or a quantisation) are constants. If their data is missing, they are inputs without a batch.
//! * The initial state of a recurrent layer is a constant if it is a single number, and otherwise an input.
//!
//! Exporters optimise. They merge parameters that start out equal, omit biases of zeros, fold parameters into tensors
//! with names such as `val_110`, and expand tensors to the batch. `prepare` undoes this as far as the file shows how
//! (`merged`, `named`, `repeated`), so that a model is the same from every kind of file. Without PyTorch's list of
//! parameters, a table or a mask of floats is indistinguishable from a weight, and counts as one.

mod activation;
mod attention;
mod call;
mod contraction;
mod control;
mod convert;
mod elementwise;
mod files;
mod indexing;
mod known;
mod leaves;
mod listed;
mod loss;
mod merged;
mod movement;
mod named;
mod norm;
mod pool;
mod prepare;
pub mod proto;
mod quantize;
mod recurrent;
mod reduction;
mod repeated;
mod report;
mod resize;
mod sizes;
mod table;
mod tensor;
mod wire;

#[cfg(test)]
mod tests;

pub use convert::{Argument, Imported, Options, import};
pub use files::Files;
pub use leaves::{Held, HeldData, decode, held};
pub use report::{MAX_DEPTH, MAX_NODES, Note, OnnxError, Problem, ProblemKind, Unsupported};
pub use sizes::Size;
pub use tensor::{External, TensorError};
