//! Attaches a loss to a graph without one: the effect of `--loss cross-entropy`, `mse` and `none` on such a model.

use crate::error::Error;
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Input, Op, ShapeError};
use altiplano_ir::types::TensorType;

/// The loss attached to a model that was exported without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    /// The mean cross-entropy of the first float result with a new input `labels` of class numbers.
    CrossEntropy,
    /// The mean squared difference between the first float result and a new input `targets`.
    MeanSquare,
    /// None: the model is run, not trained.
    Nothing,
}

impl Attached {
    /// Parses the three words that `--loss` reserves for this; all others name results.
    pub(crate) fn of(word: &str) -> Option<Attached> {
        match word {
            "cross-entropy" => Some(Attached::CrossEntropy),
            "mse" => Some(Attached::MeanSquare),
            "none" => Some(Attached::Nothing),
            _ => None,
        }
    }
}

/// Makes the loss the graph's only output, or keeps the outputs if nothing is attached.
pub(crate) fn attach(graph: &mut Graph, attached: Attached) -> Result<(), Error> {
    let error = |error: ShapeError| Error::Attach { error };
    let is_float = |v: &ValueId| graph.ty(*v).dtype.is_float();
    let result = graph.outputs.iter().copied().find(is_float);
    let result = || result.ok_or_else(|| error(ShapeError::Attribute("needs a result of floating-point numbers")));
    let first = graph.len();
    let loss = match attached {
        Attached::Nothing => return Ok(()),
        Attached::CrossEntropy => {
            let logits = result()?;
            let dim = class_dim(graph.shape(logits)).map_err(error)?;
            let labels = input_without(graph, "labels", logits, Some(dim));
            array::cross_entropy(graph, logits, labels, dim)
        }
        Attached::MeanSquare => {
            let values = result()?;
            let targets = input_without(graph, "targets", values, None);
            array::mse(graph, values, targets)
        }
    };
    graph.outputs = vec![loss.map_err(error)?];
    for node in graph.nodes[first..].iter_mut().filter(|node| node.name.is_empty()) {
        node.name = "loss".to_string();
    }
    Ok(())
}

/// The dimension of classes. It is the last of `[N, C]` and `[N, S, C]`, and the second if at least two spatial
/// dimensions follow it, as in `[N, C, H, W]`.
fn class_dim(shape: &[u64]) -> Result<usize, ShapeError> {
    match shape.len() {
        0 | 1 => Err(ShapeError::Attribute("needs a result with samples and classes")),
        2 | 3 => Ok(shape.len() - 1),
        _ => Ok(1),
    }
}

/// A new input for `result`: of its type, or class numbers if `without` is its dimension of classes. It scales with the
/// batch as the result does, as far as the graph says so.
fn input_without(graph: &mut Graph, base: &str, result: ValueId, without: Option<usize>) -> ValueId {
    let taken = |name: &str| graph.inputs().chain(graph.parameters()).any(|(_, n)| n == name);
    let candidates = std::iter::once(base.to_string()).chain((2..).map(|n| format!("{base}{n}")));
    let name = candidates.into_iter().find(|name| !taken(name)).unwrap_or_default();
    let node = graph.node(result);
    let mut shape = node.ty.shape.clone();
    let mut dtype = node.ty.dtype;
    let mut marked: Vec<bool> = (0..shape.len()).map(|d| node.batch_dims >> d & 1 == 1).collect();
    if let Some(dim) = without {
        shape.remove(dim);
        marked.remove(dim);
        dtype = DType::I32;
    }
    let ty = TensorType::new(dtype, shape);
    let input = graph.emit(Op::Input(Input { name: name.clone(), ty }), &[]);
    graph.nodes[input.index()].batch_dims = marked.iter().enumerate().map(|(d, &m)| u32::from(m) << d).sum();
    graph.nodes[input.index()].name = name;
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(shape: &[u64], name: &str) -> Graph {
        let mut graph = Graph::new("test");
        let ty = TensorType::new(DType::F32, shape);
        let x = graph.emit(Op::Input(Input { name: name.into(), ty }), &[]);
        graph.outputs = vec![graph.convert(x, DType::I32), x];
        graph
    }

    #[test]
    fn labels_have_the_shape_of_the_result_without_its_classes() {
        let check = |shape: &[u64], attached, name: &str, expected: Option<(&str, &[u64])>| {
            let mut graph = forward(shape, name);
            let done = attach(&mut graph, attached);
            let added = graph.inputs().nth(1).map(|(v, name)| (name, graph.shape(v)));
            assert_eq!(done.is_ok(), expected.is_some(), "{shape:?}");
            if let Some(expected) = expected {
                assert_eq!(added, Some(expected));
                assert_eq!(graph.verify(), []);
                assert_eq!((graph.outputs.len(), graph.ty(graph.outputs[0]).rank()), (1, 0));
            }
        };
        let cross = Attached::CrossEntropy;
        check(&[4, 10], cross, "x", Some(("labels", &[4])));
        check(&[4, 7, 10], cross, "x", Some(("labels", &[4, 7])));
        check(&[4, 10, 5, 6], cross, "x", Some(("labels", &[4, 5, 6])));
        check(&[4, 10], cross, "labels", Some(("labels2", &[4])));
        check(&[4], cross, "x", None);
        check(&[4, 3], Attached::MeanSquare, "x", Some(("targets", &[4, 3])));
    }
}
