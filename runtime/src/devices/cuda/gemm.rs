//! Translates row-major matmuls for cuBLASLt, whose matrices are column major.
//!
//! A row-major matrix has the same memory as the column-major matrix that is its transpose. So `lhs x rhs` is computed
//! as `rhs^T x lhs^T`, the transpose of the result: operands swap, and no data moves.

use crate::tape::{Batch, MatmulCall, Matrix};

/// `c = a x b`, or `c += a x b`, column major: `c` is `m` by `n`, and `k` elements are summed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gemm {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub a: Stored,
    pub b: Stored,
    pub c: Stored,
    /// Number of products, whose matrices are [`Stored::stride`] apart.
    pub count: u64,
    pub accumulate: bool,
}

/// A matrix as stored, before any transposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored {
    pub transposed: bool,
    /// Length of a column, whose elements are contiguous.
    pub rows: u64,
    pub columns: u64,
    /// Distance between columns in elements, at least `rows`.
    pub leading: u64,
    /// Distance between the matrices of consecutive products.
    pub stride: u64,
}

/// Indices of the first elements of the operands and the result of one library call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Starts {
    pub lhs: u64,
    pub rhs: u64,
    pub result: u64,
}

/// Regions begin at multiples of this many bytes.
const REGION_BYTES: u64 = 256;

/// Describes a call and the starts of all library calls. `a` is the right operand, `b` the left one.
pub(crate) fn gemm(call: &MatmulCall) -> (Gemm, Vec<Starts>) {
    let one = Batch { count: 1, lhs: 0, rhs: 0, result: 0 };
    let (outer, last) = match call.batches.split_last() {
        Some((last, outer)) => (outer, *last),
        None => (&[][..], one),
    };
    let description = Gemm {
        m: call.n,
        n: call.m,
        k: call.k,
        a: stored(&call.rhs, call.k, call.n, last.rhs),
        b: stored(&call.lhs, call.m, call.k, last.lhs),
        c: stored(&call.result, call.m, call.n, last.result),
        count: last.count,
        accumulate: call.accumulate,
    };
    let mut starts = vec![Starts { lhs: call.lhs.from, rhs: call.rhs.from, result: call.result.from }];
    for batch in outer {
        let of_each = |s: &Starts| {
            let s = *s;
            (0..batch.count).map(move |i| Starts {
                lhs: s.lhs + i * batch.lhs,
                rhs: s.rhs + i * batch.rhs,
                result: s.result + i * batch.result,
            })
        };
        starts = starts.iter().flat_map(of_each).collect();
    }
    (description, starts)
}

/// The common alignment in bytes of all matrices of an operand, at most that of regions.
pub(crate) fn alignment(starts: impl Iterator<Item = u64>, stride: u64, element_bytes: u64) -> u32 {
    let odd = starts.chain([stride]).fold(REGION_BYTES, |all, elements| all | (elements * element_bytes));
    1 << odd.trailing_zeros()
}

/// A row-major matrix of `rows` by `columns`, as the library sees its memory.
fn stored(matrix: &Matrix, rows: u64, columns: u64, stride: u64) -> Stored {
    // The contiguous elements are a row or, in a transposed matrix, a column. The library calls either a column.
    let (side_by_side, runs) = if matrix.transposed { (rows, columns) } else { (columns, rows) };
    // With a single run, the stride between runs has no meaning but must be valid.
    let leading = if runs == 1 { matrix.leading.max(side_by_side) } else { matrix.leading };
    Stored { transposed: matrix.transposed, rows: side_by_side, columns: runs, leading, stride }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::RegionId;
    use altiplano_ir::dtype::DType;
    use proptest::prelude::*;

    /// A call as defined by cuBLASLt's documentation: `op(a) x op(b)`, with element `[i, j]` of a matrix at `i + j *
    /// leading`.
    fn library(g: &Gemm, a: &[f64], b: &[f64], c: &mut [f64], starts: Starts) {
        for matrix in [&g.a, &g.b, &g.c] {
            assert!(matrix.leading >= matrix.rows, "refused by the library: {matrix:?}");
        }
        assert!(!g.c.transposed, "there is no such option");
        let shape = |s: &Stored| if s.transposed { (s.columns, s.rows) } else { (s.rows, s.columns) };
        assert_eq!((shape(&g.a), shape(&g.b), shape(&g.c)), ((g.m, g.k), (g.k, g.n), (g.m, g.n)));
        let at = |s: &Stored, i: u64, j: u64| if s.transposed { j + i * s.leading } else { i + j * s.leading };
        for p in 0..g.count {
            for (i, j) in (0..g.m).flat_map(|i| (0..g.n).map(move |j| (i, j))) {
                let term = |l| {
                    a[(starts.rhs + p * g.a.stride + at(&g.a, i, l)) as usize]
                        * b[(starts.lhs + p * g.b.stride + at(&g.b, l, j)) as usize]
                };
                let sum: f64 = (0..g.k).map(term).sum();
                let place = &mut c[(starts.result + p * g.c.stride + at(&g.c, i, j)) as usize];
                *place = sum + if g.accumulate { *place } else { 0.0 };
            }
        }
    }

    /// A call as defined by [`MatmulCall`].
    fn reference(call: &MatmulCall, lhs: &[f64], rhs: &[f64], result: &mut [f64]) {
        let mut places = vec![(call.lhs.from, call.rhs.from, call.result.from)];
        for b in &call.batches {
            let each = |&(x, y, z): &(u64, u64, u64)| {
                (0..b.count).map(move |i| (x + i * b.lhs, y + i * b.rhs, z + i * b.result)).collect::<Vec<_>>()
            };
            places = places.iter().flat_map(each).collect();
        }
        let at = |m: &Matrix, i: u64, j: u64| if m.transposed { i + j * m.leading } else { i * m.leading + j };
        for (x, y, z) in places {
            for (i, j) in (0..call.m).flat_map(|i| (0..call.n).map(move |j| (i, j))) {
                let term = |l| lhs[(x + at(&call.lhs, i, l)) as usize] * rhs[(y + at(&call.rhs, l, j)) as usize];
                let sum: f64 = (0..call.k).map(term).sum();
                let place = &mut result[(z + at(&call.result, i, j)) as usize];
                *place = sum + if call.accumulate { *place } else { 0.0 };
            }
        }
    }

    /// A matrix with slack between its runs, and the number of elements that it spans.
    fn matrix(transposed: bool, rows: u64, columns: u64, slack: u64, from: u64) -> (Matrix, u64) {
        let (inner, runs) = if transposed { (rows, columns) } else { (columns, rows) };
        let matrix = Matrix { region: RegionId(0), dtype: DType::F32, from, leading: inner + slack, transposed };
        (matrix, (inner + slack) * runs)
    }

    #[test]
    fn the_library_is_told_how_matrices_are_aligned() {
        let check = |starts: &[u64], stride, bytes, expected| {
            assert_eq!(alignment(starts.iter().copied(), stride, bytes), expected, "{starts:?} {stride}");
        };
        check(&[0], 0, 4, 256);
        check(&[0, 64], 1024, 4, 256);
        check(&[0, 3], 0, 2, 2);
        check(&[8], 5, 4, 4);
        check(&[0], 24, 2, 16);
    }

    proptest! {
        #[test]
        fn calls_mean_what_descriptions_say(
            (m, n, k) in (1u64..6, 1u64..6, 1u64..6),
            counts in prop::collection::vec(1u64..4, 0..3),
            (lhs_t, rhs_t, accumulate) in any::<(bool, bool, bool)>(),
            slack in (0u64..3, 0u64..3, 0u64..3),
            from in (0u64..4, 0u64..4, 0u64..4),
            // An operand shared by all batches has no stride.
            shared in any::<[bool; 2]>(),
            // The stride of a single row is arbitrary.
            degenerate in any::<bool>(),
        ) {
            let (mut lhs, lhs_size) = matrix(lhs_t, m, k, slack.0, from.0);
            let (rhs, rhs_size) = matrix(rhs_t, k, n, slack.1, from.1);
            let (result, result_size) = matrix(false, m, n, slack.2, from.2);
            if degenerate && (if lhs_t { k } else { m }) == 1 {
                lhs.leading = 0;
            }
            let (mut sizes, mut batches) = ([lhs_size, rhs_size, result_size], Vec::new());
            for &count in counts.iter().rev() {
                let stride = |i: usize| if i < 2 && shared[i] { 0 } else { sizes[i] };
                let batch = Batch { count, lhs: stride(0), rhs: stride(1), result: stride(2) };
                for (i, size) in sizes.iter_mut().enumerate() {
                    *size *= if i < 2 && shared[i] { 1 } else { count };
                }
                batches.insert(0, batch);
            }
            let call = MatmulCall { m, n, k, lhs, rhs, result, batches, accumulate };
            let values = |size: u64, seed: u64| -> Vec<f64> {
                (0..size + 4).map(|i| ((i * 7 + seed) % 11) as f64 - 5.0).collect()
            };
            let (lhs, rhs, before) = (values(sizes[0], 1), values(sizes[1], 2), values(sizes[2], 3));
            let (mut expected, mut got) = (before.clone(), before);
            reference(&call, &lhs, &rhs, &mut expected);
            let (description, starts) = gemm(&call);
            for at in starts {
                library(&description, &rhs, &lhs, &mut got, at);
            }
            prop_assert_eq!(expected, got);
        }
    }
}
