//! Matrix products of f32: of slices, with checked bounds, and of pointers, for callers that have checked theirs.

use crate::thread_pool::{PRODUCTS, spreads};
use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

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

/// A matrix in a slice, `&[f32]` or `&mut [f32]`, or at a pointer to its first element.
pub(crate) struct Matrix<S> {
    pub elements: S,
    pub strides: Strides,
}

impl<S> Matrix<S> {
    fn transposed(self) -> Matrix<S> {
        let Strides { row, column } = self.strides;
        Matrix { elements: self.elements, strides: Strides { row: column, column: row } }
    }
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
    let at = |elements: &[f32], strides| Matrix { elements: elements.as_ptr(), strides };
    let to = Matrix { elements: result.as_mut_ptr(), strides: d };
    // SAFETY: the assertion above checks that all elements lie within the slices.
    unsafe { multiply_at([rows, columns, terms], at(lhs, l), at(rhs, r), to, accumulate, parallelism) }
}

/// `result (+)= lhs * rhs`, as [`multiply`] computes it, without its checks.
///
/// # Safety
///
/// Every element that the sizes and strides reach must be valid to read, and to write in the result. No other thread may
/// access the result meanwhile, and its rows and columns must not overlap.
pub(crate) unsafe fn multiply_at(
    [rows, columns, terms]: [usize; 3],
    lhs: Matrix<*const f32>,
    rhs: Matrix<*const f32>,
    result: Matrix<*mut f32>,
    accumulate: bool,
    parallelism: Parallelism,
) {
    // The kernel writes columns: a result whose rows are contiguous is computed as its transpose.
    let ([rows, columns], lhs, rhs, result) = if result.strides.column < result.strides.row {
        ([columns, rows], rhs.transposed(), lhs.transposed(), result.transposed())
    } else {
        ([rows, columns], lhs, rhs, result)
    };
    let (l, r, d) = (lhs.strides, rhs.strides, result.strides);
    // Factors of the result and of the product; only complex numbers have conjugates.
    let (one, conjugate) = (1.0f32, false);
    // SAFETY: the caller guarantees that all elements can be accessed; swapping both operands keeps them the same.
    unsafe {
        get_gemm_fn()(
            rows,
            columns,
            terms,
            result.elements,
            d.column as isize,
            d.row as isize,
            accumulate,
            lhs.elements,
            l.column as isize,
            l.row as isize,
            rhs.elements,
            r.column as isize,
            r.row as isize,
            one,
            one,
            conjugate,
            conjugate,
            conjugate,
            parallelism,
        );
    }
}
