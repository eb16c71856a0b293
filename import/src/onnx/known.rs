//! Values that follow only from constants and sizes, known during the construction of the graph. They are the shapes
//! that a model computes and the iterations of its loops.
//!
//! Their nodes are in the graph like all others. The elements are computed on first use by the reference semantics of
//! ops, and rounded to the element type.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::Allowance;
use altiplano_ir::op::{Op, Operator};
use altiplano_ir::tensor::Tensor;
use std::collections::HashMap;
use std::rc::Rc;

/// The largest number of elements of a tensor that is evaluated. Shapes and conditions are smaller.
pub(crate) const MOST_ELEMENTS: u64 = 1 << 16;

#[derive(Default)]
pub(crate) struct Known {
    /// For each node so far, true if it is small and follows from constants.
    follows: Vec<bool>,
    values: HashMap<ValueId, Rc<Tensor>>,
    allowance: Allowance,
}

impl Known {
    /// Returns true if the elements of a value follow from constants.
    pub(crate) fn follows(&mut self, graph: &Graph, value: ValueId) -> bool {
        for v in self.follows.len()..=value.index() {
            let node = &graph.nodes[v];
            let small = node.ty.elements() <= MOST_ELEMENTS;
            let follows = small && !node.op.is_leaf() && node.operands.iter().all(|o| self.follows[o.index()]);
            self.follows.push(follows);
        }
        self.follows[value.index()]
    }

    /// The elements of a value, if they follow from constants.
    pub(crate) fn elements(&mut self, graph: &Graph, value: ValueId) -> Option<Rc<Tensor>> {
        if !self.follows(graph, value) {
            return None;
        }
        // Chains of counters can be as long as loops, so use a stack instead of recursion.
        let mut stack = vec![value];
        while let Some(&last) = stack.last() {
            if self.values.contains_key(&last) {
                stack.pop();
                continue;
            }
            let node = graph.node(last);
            let before = stack.len();
            stack.extend(node.operands.iter().filter(|o| !self.values.contains_key(o)).copied());
            if stack.len() > before {
                continue;
            }
            if !self.allowance.take(graph.work(last)) {
                self.follows[value.index()] = false;
                return None;
            }
            let operands: Vec<Rc<Tensor>> = node.operands.iter().map(|o| self.values[o].clone()).collect();
            let operands: Vec<&Tensor> = operands.iter().map(|o| &**o).collect();
            let mut tensor = match &node.op {
                Op::Constant(literal) => literal.to_tensor(),
                op => op.eval(&operands, &node.ty),
            };
            tensor.data.iter_mut().for_each(|x| *x = node.ty.dtype.round(*x));
            self.values.insert(last, Rc::new(tensor));
            stack.pop();
        }
        self.values.get(&value).cloned()
    }
}
