//! Discrete Fourier transforms as products with matrices of cosines and sines.
//!
//! A transform of `n = a b` numbers is a transform of `a`, a rotation of each number, and a transform of `b` (Cooley
//! and Tukey 1965). So the work is `n (a + b + ..)` instead of `n^2`. Each factor is a matrix product, which can be
//! split like any other.

use super::complex::{BuiltPair, Operand, Pair, bilinear, complex_multiply, conjugate, of_real};
use super::{Built, ShapeError, binary, concat, contract, convert, flip, iota, move_dim, permute, reshape, slice_dim};
use super::{unary, with_number};
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Unary};
use std::f64::consts::TAU;

/// The largest transform that is computed as a single product.
const DIRECT: u64 = 64;

/// The largest prime factor of a size. Larger ones would make impractical matrices.
const LARGEST_PRIME: u64 = 4096;

/// `cos` and `sin` of `2 pi j k / n` for `j` below `rows` and `k` below `columns`.
fn circle(g: &mut Graph, n: u64, [rows, columns]: [u64; 2], dtype: DType) -> BuiltPair {
    let (row, column) = (iota(g, &[rows, columns], 0, DType::I32)?, iota(g, &[rows, columns], 1, DType::I32)?);
    // The product is less than n^2. Removing whole turns before rounding keeps the angle exact.
    let product = binary(g, Binary::Multiply, row, column)?;
    let rest = with_number(g, Binary::Remainder, product, n as f64)?;
    let rest = convert(g, rest, dtype)?;
    let angle = with_number(g, Binary::Multiply, rest, TAU / n as f64)?;
    Ok([unary(g, Unary::Cosine, angle)?, unary(g, Unary::Sine, angle)?])
}

/// The largest divisor that is at most the square root, or 1 for primes.
fn divisor(n: u64) -> u64 {
    (1..=n.isqrt()).rev().find(|d| n.is_multiple_of(*d)).unwrap_or(1)
}

/// The unscaled transform along a dimension: `sum_j x_j exp(-2 pi i j k / n)`, or with `+` for the inverse.
///
/// # Errors
/// [`ShapeError::TooLarge`] if the size has a prime factor above `LARGEST_PRIME`.
pub fn fourier(g: &mut Graph, x: impl Into<Operand>, dim: usize, inverse: bool) -> BuiltPair {
    let x = x.into();
    let shape = g.shape(x.re).to_vec();
    let n = shape.get(dim).copied().ok_or(ShapeError::DimOutOfRange { dim: dim as u64, rank: shape.len() })?;
    if n <= 1 {
        return match x.im {
            Some(im) => Ok([x.re, im]),
            None => of_real(g, x.re),
        };
    }
    let a = divisor(n);
    if n <= DIRECT || a == 1 {
        if n > LARGEST_PRIME {
            return Err(ShapeError::TooLarge { shape: vec![n, n] });
        }
        let dtype = g.ty(x.re).dtype;
        let mut matrix = circle(g, n, [n, n], dtype)?;
        if !inverse {
            matrix = conjugate(g, matrix)?;
        }
        return bilinear(g, x, matrix, |g, x, m| along(g, x, m, dim));
    }
    let b = n / a;
    let mut split = shape.clone();
    split.splice(dim..=dim, [a, b]);
    let im = x.im.map(|im| reshape(g, im, &split)).transpose()?;
    let x = Operand { re: reshape(g, x.re, &split)?, im };
    let first = fourier(g, x, dim, inverse)?;
    let dtype = g.ty(first[0]).dtype;
    let mut turn = circle(g, n, [a, b], dtype)?;
    if !inverse {
        turn = conjugate(g, turn)?;
    }
    // The rotation is the same for all dimensions after these two.
    let mut wide = vec![a, b];
    wide.resize(split.len() - dim, 1);
    let turn = [reshape(g, turn[0], &wide)?, reshape(g, turn[1], &wide)?];
    let turned = complex_multiply(g, first, turn)?;
    let [re, im] = fourier(g, turned, dim + 1, inverse)?;
    let mut order: Vec<usize> = (0..split.len()).collect();
    order.swap(dim, dim + 1);
    let mut joined = |part: ValueId| {
        let part = permute(g, part, &order)?;
        reshape(g, part, &shape)
    };
    Ok([joined(re)?, joined(im)?])
}

/// Contracts `dim` of `x` with the rows of a matrix, whose columns take its place.
fn along(g: &mut Graph, x: ValueId, matrix: ValueId, dim: usize) -> Built {
    let y = contract(g, x, matrix, dim, 0)?;
    let last = g.shape(y).len() - 1;
    move_dim(g, y, last, dim)
}

/// [`fourier`] of real numbers. Only the first `n / 2 + 1` results are computed, because they determine the others.
pub fn real_fourier(g: &mut Graph, x: ValueId, dim: usize) -> BuiltPair {
    let n = g.shape(x).get(dim).copied().unwrap_or(0);
    let kept = n / 2 + 1;
    if n > 1 && n <= DIRECT {
        let dtype = g.ty(x).dtype;
        let matrix = circle(g, n, [n, kept], dtype)?;
        let matrix = conjugate(g, matrix)?;
        return Ok([along(g, x, matrix[0], dim)?, along(g, x, matrix[1], dim)?]);
    }
    let [re, im] = fourier(g, x, dim, false)?;
    Ok([slice_dim(g, re, dim, 0, kept as i64, 1)?, slice_dim(g, im, dim, 0, kept as i64, 1)?])
}

/// The inverse of [`real_fourier`], times `n`: the `n` real numbers with these `n / 2 + 1` results.
pub fn real_inverse(g: &mut Graph, x: Pair, dim: usize, n: u64) -> Built {
    // The other results are the conjugates of these, in reverse order.
    let others = n.saturating_sub(n / 2 + 1) as i64;
    let [re, im] = x;
    let mut whole = [re, im];
    if others > 0 {
        let mirrored = |g: &mut Graph, part: ValueId| {
            let part = slice_dim(g, part, dim, 1, 1 + others, 1)?;
            flip(g, part, &[dim])
        };
        let (behind_re, behind_im) = (mirrored(g, re)?, mirrored(g, im)?);
        let [behind_re, behind_im] = conjugate(g, [behind_re, behind_im])?;
        whole = [concat(g, &[re, behind_re], dim)?, concat(g, &[im, behind_im], dim)?];
    }
    let [re, _] = fourier(g, whole, dim, true)?;
    Ok(re)
}
