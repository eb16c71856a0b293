//! Matrix products of slices, with checked bounds.

use crate::thread_pool::{PRODUCTS, spreads};
use gemm::Parallelism;

/// The layout of a matrix in a slice; its first element is at 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strides {
    pub row: usize,
    pub column: usize,
}

/// Distance from the first to past the last element of a matrix.
fn extent(rows: usize, columns: usize, strides: Strides) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * strides.row + (columns - 1) * strides.column + 1 }
}

/// A matrix in a slice, `&[f32]` or `&mut [f32]`.
pub(crate) struct Matrix<S> {
    pub elements: S,
    pub strides: Strides,
}

/// `result (+)= lhs * rhs`, of `rows x terms` and `terms x columns`. The rows and columns of the result must not
/// overlap.
pub(crate) fn multiply(
    [rows, columns, terms]: [usize; 3],
    lhs: Matrix<&[f32]>,
    rhs: Matrix<&[f32]>,
    result: Matrix<&mut [f32]>,
    accumulate: bool,
    threads: usize,
) {
    let (l, r, d) = (lhs.strides, rhs.strides, result.strides);
    let (lhs, rhs, result) = (lhs.elements, rhs.elements, result.elements);
    assert!(
        extent(rows, terms, l) <= lhs.len()
            && extent(terms, columns, r) <= rhs.len()
            && extent(rows, columns, d) <= result.len(),
        "the operands of a product are smaller than their strides say"
    );
    let spread = spreads(threads, rows * columns * terms, PRODUCTS);
    let parallelism = if spread { Parallelism::Rayon(threads) } else { Parallelism::None };
    // SAFETY: the assertion above checks that all elements lie within the slices.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            terms,
            result.as_mut_ptr(),
            d.column as isize,
            d.row as isize,
            accumulate,
            lhs.as_ptr(),
            l.column as isize,
            l.row as isize,
            rhs.as_ptr(),
            r.column as isize,
            r.row as isize,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}
