//! Reads ONNX models: `onnx.proto` of opset 7 and later, as exporters of PyTorch, TensorFlow and others write it.
//!
//! [`proto`] has the messages of a file, [`import`] makes a graph of them: [`convert`](self) walks the nodes, inlines
//! functions and unrolls loops, and a table maps each op to the function that writes it in ops of a graph, one file a family.
//! Shapes that the model computes are evaluated on the way (`known`), so that all sizes of the graph are numbers.
//!
//! What becomes of a tensor that the file holds:
//! * floats are parameters, whether their data is here or in another file, and under the name that they have in the file;
//! * the running mean and variance of a batch norm are inputs without a batch, and so is what a PyTorch export calls a buffer;
//! * integers, booleans, single floats (unless they are called `.weight` or `.bias`) and floats that set how an op works (the
//!   scales of a resize or a quantisation) are constants; where their data is gone, they are inputs without a batch;
//! * what a recurrent layer starts from is a constant if it is one number, and else an input.
//!
//! Exporters optimise: they merge parameters that start out equal, leave out biases of zeros, fold parameters into tensors with
//! names such as `val_110`, and expand tensors to the batch. `prepare` undoes that as far as the file says how (`merged`,
//! `named`, `repeated`), so that a model is the same one whatever file it came in. A table or a mask of floats cannot be told
//! from a weight where PyTorch's list of parameters is missing, and counts as one then.

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

#[cfg(test)]
mod tests;

pub use convert::{Argument, Imported, Options, import};
pub use files::Files;
pub use leaves::{Held, HeldData, decode, held};
pub use report::{LAST_OPSET, MAX_DEPTH, MAX_NODES, MAX_TABLES, Note, OnnxError, Problem, ProblemKind, Unsupported};
pub use sizes::Size;
pub use tensor::{External, TensorError};
