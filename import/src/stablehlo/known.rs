//! Evaluates values that follow from constants alone, such as loop counters, while the text is being read.
//!
//! A flag is set when a node is made if its value follows from constants. Its elements are computed on first
//! use by the ops' reference semantics, and rounded to the element type as in the traced program.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::convert::Converter;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Node, ValueId};
use altiplano_ir::interpret::Allowance;
use altiplano_ir::op::{Op, Operator};
use altiplano_ir::simplify::rounded;
use altiplano_ir::tensor::Tensor;

/// Larger tensors are not evaluated: conditions and positions are small.
const MOST_ELEMENTS: u64 = 4096;

#[derive(Default)]
pub(super) struct Knowledge {
    /// For each node, true if it is small and follows from constants.
    follows: Vec<bool>,
    values: HashMap<ValueId, Rc<Tensor>>,
    allowance: Allowance,
}

impl Knowledge {
    /// Records a node. Must be called for each appended node, in order.
    pub(crate) fn note(&mut self, node: &Node) {
        let small = node.ty.elements() <= MOST_ELEMENTS;
        // Devices differ in their positions, and so do the values that they exchange.
        let of_devices = matches!(node.op, Op::AxisIndex(_) | Op::Collective(_));
        let known = small && !node.op.is_leaf() && !of_devices && node.operands.iter().all(|o| self.follows[o.index()]);
        self.follows.push(known);
    }

    pub(crate) fn follows(&self, value: ValueId) -> bool {
        self.follows[value.index()]
    }

    /// Records the elements of the last node, which cannot be evaluated by its op.
    pub(crate) fn note_value(&mut self, value: ValueId, tensor: Tensor) {
        self.follows[value.index()] = true;
        self.values.insert(value, Rc::new(tensor));
    }
}

impl Converter<'_, '_> {
    /// The elements of a value, if they follow from constants.
    pub fn known(&mut self, value: ValueId) -> Option<Rc<Tensor>> {
        if !self.knowledge.follows(value) {
            return None;
        }
        // Uses a stack instead of recursion, since chains of counters can be as long as loops.
        let mut stack = vec![value];
        while let Some(&last) = stack.last() {
            if self.knowledge.values.contains_key(&last) {
                stack.pop();
                continue;
            }
            let node = self.graph.node(last);
            let before = stack.len();
            let missing = node.operands.iter().filter(|o| !self.knowledge.values.contains_key(o));
            stack.extend(missing.copied());
            if stack.len() > before {
                continue;
            }
            if !self.knowledge.allowance.take(self.graph.work(last)) {
                self.knowledge.follows[value.index()] = false;
                return None;
            }
            let operands: Vec<Rc<Tensor>> = node.operands.iter().map(|o| self.knowledge.values[o].clone()).collect();
            let operands: Vec<&Tensor> = operands.iter().map(|o| &**o).collect();
            let mut tensor = node.op.eval(&operands, &node.ty);
            if node.ty.dtype.is_float() {
                tensor.data.iter_mut().for_each(|x| *x = rounded(*x, DType::F64, node.ty.dtype));
            }
            self.knowledge.values.insert(last, Rc::new(tensor));
            stack.pop();
        }
        self.knowledge.values.get(&value).cloned()
    }

    /// The only element of a known scalar.
    pub(crate) fn known_scalar(&mut self, value: ValueId) -> Option<f64> {
        match self.known(value)?.data.as_slice() {
            [only] => Some(*only),
            _ => None,
        }
    }

    /// Known integers, row major.
    pub(crate) fn known_ints(&mut self, value: ValueId) -> Option<Vec<i64>> {
        if self.graph.ty(value).dtype.is_float() {
            return None;
        }
        Some(self.known(value)?.data.iter().map(|x| *x as i64).collect())
    }

    /// The common value of all elements, if known: from a constant, or from a broadcast constant.
    pub fn splat(&self, mut value: ValueId) -> Option<f64> {
        loop {
            let node = self.graph.node(value);
            match &node.op {
                Op::Constant(literal) => return literal.as_splat(),
                Op::BroadcastInDim(_) | Op::Reshape(_) => value = *node.operands.first()?,
                _ => return None,
            }
        }
    }
}

/// Evaluates functions on given values in place of the leaves.
impl Converter<'_, '_> {
    /// All values that `value` is computed from.
    pub fn reached(&self, value: ValueId) -> BTreeMap<ValueId, ()> {
        let mut reached = BTreeMap::new();
        let mut stack = vec![value];
        while let Some(value) = stack.pop() {
            if reached.insert(value, ()).is_none() {
                stack.extend(&self.graph.node(value).operands);
            }
        }
        reached
    }

    /// The elements of `value` if the leaves have the `given` ones. Each tensor of shape `shape` is replaced
    /// with one of `n` elements. This needs ops that compute each element by itself; other ops give `None`. A
    /// single element also replaces tensors that are repeated to `shape`. If `shape` is empty, tensors keep
    /// their shapes.
    pub(crate) fn elements_of(
        &self,
        value: ValueId,
        given: &BTreeMap<ValueId, Vec<f64>>,
        shape: &[u64],
        n: usize,
    ) -> Option<Vec<f64>> {
        let mut tensors: BTreeMap<ValueId, Tensor> = BTreeMap::new();
        let mut allowance = Allowance::default();
        let is_replaced = |o: &ValueId| {
            let ty = self.graph.ty(*o);
            let repeated = n == 1 && ty.elements() > 1 && repeats_to(&ty.shape, shape);
            !shape.is_empty() && (ty.shape == shape || repeated)
        };
        for v in self.reached(value).into_keys() {
            let node = self.graph.node(v);
            let replaced = is_replaced(&v);
            let ty = if replaced { node.ty.with_shape([n as u64]) } else { node.ty.clone() };
            if let Some(data) = given.get(&v) {
                if data.len() as u64 != ty.elements() {
                    return None;
                }
                tensors.insert(v, Tensor::new(ty, data.clone()));
                continue;
            }
            if ty.elements() > MOST_ELEMENTS.max(n as u64) || node.op.is_leaf() {
                return None;
            }
            let operands: Vec<&Tensor> = node.operands.iter().map(|o| &tensors[o]).collect();
            let spread = !node.operands.iter().any(is_replaced);
            let mut tensor = match &node.op {
                _ if !replaced && spread && !allowance.take(self.graph.work(v)) => return None,
                op if !replaced && spread => op.eval(&operands, &ty),
                Op::Constant(literal) => Tensor::splat(ty, literal.as_splat()?),
                Op::BroadcastInDim(_) if spread && operands[0].data.len() == 1 => {
                    Tensor::splat(ty, operands[0].data[0])
                }
                Op::BroadcastInDim(op) if replaced && !spread && op.dims.iter().copied().eq(0..shape.len()) => {
                    Tensor::new(ty, operands[0].data.clone())
                }
                op if op.is_elementwise() && node.operands.iter().all(is_replaced) => op.eval(&operands, &ty),
                Op::BitcastConvert(_) | Op::ReducePrecision(_) | Op::Threefry(_)
                    if node.operands.iter().all(is_replaced) && replaced =>
                {
                    node.op.eval(&operands, &ty)
                }
                _ => return None,
            };
            if node.ty.dtype.is_float() {
                tensor.data.iter_mut().for_each(|x| *x = rounded(*x, DType::F64, node.ty.dtype));
            }
            tensors.insert(v, tensor);
        }
        tensors.remove(&value).map(|tensor| tensor.data)
    }
}

/// True if repeating dimensions of one element turns `shape` into `to`.
pub(super) fn repeats_to(shape: &[u64], to: &[u64]) -> bool {
    shape.len() == to.len() && shape.iter().zip(to).all(|(&own, &size)| own == size || own == 1)
}
