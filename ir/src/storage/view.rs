//! Strided views. They make broadcasts, transposes, slices and most reshapes free. A view refers to a stored tensor and
//! gives the position in it of the element at each index.

use crate::graph::ValueId;
use crate::op::Op;

/// Element `[i0, i1, ..]` lies at `offset + sum(i * stride)` of the storage of `root`.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    pub root: ValueId,
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

/// The row-major strides of a shape.
pub fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// Sizes as `usize`. Those of a verified graph fit.
pub fn sizes(shape: &[u64]) -> Vec<usize> {
    shape.iter().map(|&d| d as usize).collect()
}

impl View {
    /// A view of a whole stored tensor.
    pub fn whole(root: ValueId, shape: Vec<usize>) -> View {
        let strides = row_major(&shape);
        View { root, offset: 0, shape, strides }
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if the elements are contiguous in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.shape.contains(&0)
            || self.shape.iter().zip(row_major(&self.shape)).zip(&self.strides).all(|((&n, r), &s)| n == 1 || r == s)
    }

    /// Returns true if the view is all of a stored tensor of `elements` elements, in order.
    pub fn is_all_of(&self, elements: usize) -> bool {
        self.offset == 0 && self.elements() == elements && self.is_contiguous()
    }

    pub fn broadcast(&self, shape: &[u64], dims: &[usize]) -> View {
        let mut strides = vec![0; shape.len()];
        for (i, &d) in dims.iter().enumerate() {
            strides[d] = if self.shape[i] == 1 { 0 } else { self.strides[i] };
        }
        View { root: self.root, offset: self.offset, shape: sizes(shape), strides }
    }

    pub fn transpose(&self, permutation: &[usize]) -> View {
        View {
            root: self.root,
            offset: self.offset,
            shape: permutation.iter().map(|&d| self.shape[d]).collect(),
            strides: permutation.iter().map(|&d| self.strides[d]).collect(),
        }
    }

    pub fn slice(&self, start: &[u64], stride: &[u64], shape: &[u64]) -> View {
        let skipped: usize = start.iter().zip(&self.strides).map(|(&s, &t)| s as usize * t).sum();
        View {
            root: self.root,
            offset: self.offset + skipped,
            shape: sizes(shape),
            strides: stride.iter().zip(&self.strides).map(|(&s, &t)| s as usize * t).collect(),
        }
    }

    /// The view after an op that moves no data, in the shape of its result. `None` if strides cannot express it.
    pub fn through(&self, op: &Op, shape: &[u64]) -> Option<View> {
        Some(match op {
            Op::BroadcastInDim(op) => self.broadcast(&op.shape, &op.dims),
            Op::Transpose(op) => self.transpose(&op.permutation),
            Op::Slice(op) => self.slice(&op.start, &op.stride, shape),
            Op::Reshape(_) => self.reshape(shape)?,
            _ => return None,
        })
    }

    /// The same elements in another shape, if strides can express it.
    pub fn reshape(&self, shape: &[u64]) -> Option<View> {
        let shape = sizes(shape);
        let mut strides = vec![0; shape.len()];
        if self.elements() == 0 {
            return Some(View { root: self.root, offset: self.offset, strides: row_major(&shape), shape });
        }
        // Walk both shapes from the minor side. Each run of the old shape is divided into whole new dimensions.
        let mut runs = self.runs();
        let (mut left, mut stride) = runs.pop().unwrap_or((1, 0));
        for d in (0..shape.len()).rev() {
            if shape[d] == 1 {
                continue;
            }
            if left == 1 {
                (left, stride) = runs.pop()?;
            }
            if left % shape[d] != 0 {
                return None;
            }
            strides[d] = stride;
            stride *= shape[d];
            left /= shape[d];
        }
        Some(View { root: self.root, offset: self.offset, shape, strides })
    }

    /// The shortest list of `(size, stride)` pairs, major first, that visits the same elements in the same order.
    pub fn runs(&self) -> Vec<(usize, usize)> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            if size == 1 {
                continue;
            }
            match runs.last_mut() {
                Some(last) if last.1 == stride * size => *last = (last.0 * size, stride),
                _ => runs.push((size, stride)),
            }
        }
        runs
    }

    /// The position after the last stored element of the view.
    pub fn end(&self) -> usize {
        if self.elements() == 0 {
            return self.offset;
        }
        self.offset + 1 + self.shape.iter().zip(&self.strides).map(|(n, s)| (n - 1) * s).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(view: &View) -> Vec<usize> {
        let mut all = Vec::new();
        let shape: Vec<u64> = view.shape.iter().map(|&d| d as u64).collect();
        crate::tensor::for_each_index(&shape, |index| {
            all.push(view.offset + index.iter().zip(&view.strides).map(|(&i, s)| i as usize * s).sum::<usize>());
        });
        all
    }

    #[test]
    fn reshapes_keep_the_order_of_elements_or_are_refused() {
        let base = View::whole(ValueId(0), vec![4, 6, 10]);
        let cases = [
            (base.clone(), vec![24, 10], true),
            (base.clone(), vec![2, 2, 60], true),
            (base.transpose(&[1, 0, 2]), vec![6, 2, 2, 1, 5, 2], true),
            (base.transpose(&[1, 0, 2]), vec![24, 10], false),
            (base.broadcast(&[4, 3, 6, 10], &[0, 2, 3]), vec![2, 2, 3, 60], true),
            (base.broadcast(&[4, 3, 6, 10], &[0, 2, 3]), vec![12, 60], false),
            (base.slice(&[1, 2, 0], &[1, 2, 1], &[3, 2, 10]), vec![3, 1, 2, 2, 5], true),
            (base.slice(&[1, 2, 0], &[1, 2, 1], &[3, 2, 10]), vec![6, 10], false),
        ];
        for (view, shape, possible) in cases {
            match view.reshape(&shape) {
                Some(reshaped) => assert_eq!(elements(&reshaped), elements(&view), "{view:?} to {shape:?}"),
                None => assert!(!possible, "{view:?} to {shape:?}"),
            }
            assert_eq!(view.reshape(&shape).is_some(), possible, "{view:?} to {shape:?}");
        }
    }
}
