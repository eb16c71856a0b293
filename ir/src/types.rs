//! Tensor types: an element type and a shape. Shapes are concrete, so shape functions stay arithmetic. The graph's
//! nodes record which dimensions scale with the batch (see [`crate::batch`]).

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The largest number of elements of a tensor (2^48). A file with more is wrong rather than large.
pub const MAX_ELEMENTS: u64 = 1 << 48;

/// The largest number of dimensions of a tensor.
pub(crate) const MAX_RANK: usize = 32;

/// The element type and shape of a tensor. Sizes are global unless a name says `local`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorType {
    pub dtype: DType,
    pub shape: Vec<u64>,
}

impl TensorType {
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Self {
        TensorType { dtype, shape: shape.into() }
    }

    pub fn scalar(dtype: DType) -> Self {
        TensorType { dtype, shape: Vec::new() }
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The number of elements. It cannot overflow for types that passed [`TensorType::check`].
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d))
    }

    /// The bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.bytes())
    }

    /// The same shape with another element type.
    /// The type of the cotangents of values of this type ([`DType::cotangent`]).
    pub fn cotangent(&self) -> TensorType {
        self.with_dtype(self.dtype.cotangent())
    }

    pub fn with_dtype(&self, dtype: DType) -> Self {
        TensorType { dtype, shape: self.shape.clone() }
    }

    /// The same element type with another shape.
    pub fn with_shape(&self, shape: impl Into<Vec<u64>>) -> Self {
        TensorType { dtype: self.dtype, shape: shape.into() }
    }

    /// Returns true if rank and size are within the range of real tensors.
    pub fn check(&self) -> bool {
        let elements = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d.max(1)));
        self.rank() <= MAX_RANK && elements.is_some_and(|n| n <= MAX_ELEMENTS)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { "," })?;
        }
        write!(f, "]")
    }
}

/// The row-major strides of a shape, in elements.
pub fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}
