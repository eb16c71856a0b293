//! Tensors of the reference semantics, with `f64` elements in row-major order.
//!
//! Integers up to 2^53 are exact in an `f64`, and booleans are 0 and 1. Floats are not rounded to their type. The
//! interpreter computes the formulas over real numbers, and kernels are compared with it.

use crate::dtype::DType;
use crate::types::TensorType;

/// A value of the reference interpreter.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub ty: TensorType,
    pub data: Vec<f64>,
}

impl Tensor {
    /// A tensor of `data`, which must hold `ty.elements()` values in row-major order.
    pub fn new(ty: TensorType, data: Vec<f64>) -> Self {
        debug_assert_eq!(ty.elements() as usize, data.len());
        Tensor { ty, data }
    }

    pub fn splat(ty: TensorType, value: f64) -> Self {
        let n = ty.elements() as usize;
        Tensor { ty, data: vec![value; n] }
    }

    pub fn scalar(dtype: DType, value: f64) -> Self {
        Tensor { ty: TensorType::scalar(dtype), data: vec![value] }
    }

    pub fn shape(&self) -> &[u64] {
        &self.ty.shape
    }

    /// Builds a tensor from the value at each index.
    pub fn from_fn(ty: TensorType, mut value: impl FnMut(&[u64]) -> f64) -> Self {
        let mut data = Vec::with_capacity(ty.elements() as usize);
        for_each_index(&ty.shape, |index| data.push(value(index)));
        Tensor { ty, data }
    }

    /// The element at `index`, one entry per dimension.
    pub fn at(&self, index: &[u64]) -> f64 {
        self.data[self.offset(index)]
    }

    /// The row-major position of `index`.
    pub fn offset(&self, index: &[u64]) -> usize {
        let mut offset = 0;
        for (i, &d) in index.iter().zip(&self.ty.shape) {
            offset = offset * d + i;
        }
        offset as usize
    }
}

/// Calls `visit` with every index of `shape` in row-major order.
pub fn for_each_index(shape: &[u64], mut visit: impl FnMut(&[u64])) {
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0; shape.len()];
    loop {
        visit(&index);
        let mut dim = shape.len();
        loop {
            if dim == 0 {
                return;
            }
            dim -= 1;
            index[dim] += 1;
            if index[dim] < shape[dim] {
                break;
            }
            index[dim] = 0;
        }
    }
}
