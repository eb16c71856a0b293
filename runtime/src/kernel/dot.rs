//! Matrix products of any dimension numbers, by strided `gemm` calls without copies. Dimensions that strides can merge
//! become one. The rest, which do not merge into rows, columns or terms, become loops.

use crate::arena::Storage;
use crate::element::{Class, Element, with_class};
use crate::error::KernelError;
use crate::kernel::matrix::{Matrix, Strides, multiply_at};
use crate::thread_pool::{PRODUCTS, spreads};
use crate::view::View;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::DotGeneral;
use altiplano_ir::work::{Term, Work};
use gemm_common::Parallelism;
use rayon::prelude::*;

/// A dimension with its stride in lhs, rhs and result.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    size: usize,
    lhs: usize,
    rhs: usize,
    result: usize,
}

/// A compiled product.
#[derive(Clone, Debug, PartialEq)]
pub struct Dot {
    class: Class,
    lhs_offset: usize,
    rhs_offset: usize,
    lhs_end: usize,
    rhs_end: usize,
    result_elements: usize,
    /// Independent products, major first.
    loops: Vec<Axis>,
    /// Products whose results are summed.
    term_loops: Vec<Axis>,
    rows: Axis,
    columns: Axis,
    terms: Axis,
    /// Adds the product to the existing output.
    pub accumulate: bool,
}

fn matrix<S>(elements: S, row: usize, column: usize) -> Matrix<S> {
    Matrix { elements, strides: Strides { row, column } }
}

/// A pointer shared by threads, each of which writes different elements.
struct Shared<T>(*mut T);
// SAFETY: the only use is `Dot::multiply`, where each thread writes the elements of its own products.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn at(&self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}

impl Dot {
    /// `result_strides` are those of the result's dimensions (batch, lhs free, rhs free) in the stored result.
    pub fn new(op: &DotGeneral, class: Class, lhs: &View, rhs: &View, result_strides: &[usize]) -> Dot {
        let lhs_free = op.lhs_free(lhs.shape.len());
        let rhs_free = op.rhs_free(rhs.shape.len());
        let batch = op.lhs_batch.len();
        let axis = |l: Option<usize>, r: Option<usize>, result: Option<usize>| Axis {
            size: l.map(|d| lhs.shape[d]).or(r.map(|d| rhs.shape[d])).unwrap_or(1),
            lhs: l.map_or(0, |d| lhs.strides[d]),
            rhs: r.map_or(0, |d| rhs.strides[d]),
            result: result.map_or(0, |d| result_strides[d]),
        };
        let batches = (0..batch).map(|i| axis(Some(op.lhs_batch[i]), Some(op.rhs_batch[i]), Some(i)));
        let rows = lhs_free.iter().enumerate().map(|(i, &d)| axis(Some(d), None, Some(batch + i)));
        let first = batch + lhs_free.len();
        let columns = rhs_free.iter().enumerate().map(|(i, &d)| axis(None, Some(d), Some(first + i)));
        let mut terms: Vec<Axis> =
            op.lhs_contract.iter().zip(&op.rhs_contract).map(|(&l, &r)| axis(Some(l), Some(r), None)).collect();
        terms.sort_by_key(|a| std::cmp::Reverse(a.lhs));
        let mut loops = merge(batches);
        let rows = widest(merge(rows), &mut loops);
        let columns = widest(merge(columns), &mut loops);
        let mut term_loops = Vec::new();
        let terms = widest(merge(terms), &mut term_loops);
        Dot {
            class,
            lhs_offset: lhs.offset,
            rhs_offset: rhs.offset,
            lhs_end: lhs.end(),
            rhs_end: rhs.end(),
            result_elements: loops.iter().map(|a| a.size).product::<usize>() * rows.size * columns.size,
            loops,
            term_loops,
            rows,
            columns,
            terms,
            accumulate: false,
        }
    }

    /// Bytes of the single-precision copies that products of other formats need.
    pub fn workspace_bytes(&self) -> u64 {
        if self.class == Class::F32 || self.class.is_integer() {
            return 0;
        }
        4 * (self.lhs_end - self.lhs_offset + self.rhs_end - self.rhs_offset + self.result_elements) as u64
    }

    /// True if whole products are distributed over threads, instead of splitting each one.
    fn spreads_products(&self, threads: usize) -> bool {
        self.is_large(threads) && self.products() >= threads
    }

    fn products(&self) -> usize {
        self.loops.iter().map(|a| a.size).product()
    }

    fn is_large(&self, threads: usize) -> bool {
        spreads(threads, self.products() * self.rows.size * self.columns.size * self.terms.size, PRODUCTS)
    }

    /// The work of a run on at most `threads` threads.
    pub fn work(&self, threads: usize) -> Work {
        let whole = self.spreads_products(threads);
        let mut work = Work::new(if whole { threads } else { 1 });
        let repeats: usize = self.term_loops.iter().map(|a| a.size).product();
        let sides = Sides {
            by_terms: (self.terms.lhs, self.rows.lhs),
            by_columns: (self.columns.rhs, self.terms.rhs),
            result: (self.columns.result, self.rows.result),
        };
        let sizes = [self.rows.size, self.columns.size, self.terms.size];
        let within = if self.is_large(threads) && !whole { threads } else { 1 };
        let term = product_term(sizes, sides, within);
        work.add(Term { dtype: self.class.dtype(), times: (self.products() * repeats) as f64, ..term });
        work
    }

    pub fn run(&self, lhs: &Storage, rhs: &Storage, result: &mut Storage, threads: usize) -> Result<(), KernelError> {
        match self.class {
            Class::F32 => {
                let (l, r) = (&lhs.slice::<f32>()[self.lhs_offset..], &rhs.slice::<f32>()[self.rhs_offset..]);
                self.multiply(l, r, result.slice_mut(), threads);
            }
            Class::I32 => self.multiply_integers::<i32>(lhs, rhs, result),
            Class::I64 => self.multiply_integers::<i64>(lhs, rhs, result),
            Class::F16 | Class::BF16 | Class::Bool => with_class!(self.class, T => {
                let arena = result.arena().clone();
                let widen = |from: &Storage, start: usize, end: usize| -> Result<Storage, KernelError> {
                    let mut wide = arena.allocate(Class::F32, end - start)?;
                    let part = &from.slice::<T>()[start..end];
                    wide.slice_mut::<f32>().iter_mut().zip(part).for_each(|(w, &x)| *w = Element::to_f32(x));
                    Ok(wide)
                };
                let l = widen(lhs, self.lhs_offset, self.lhs_end)?;
                let r = widen(rhs, self.rhs_offset, self.rhs_end)?;
                let mut wide = if self.accumulate {
                    widen(result, 0, self.result_elements)?
                } else {
                    arena.allocate(Class::F32, self.result_elements)?
                };
                self.multiply(l.slice(), r.slice(), wide.slice_mut(), threads);
                let narrow = result.slice_mut::<T>().iter_mut();
                narrow.zip(wide.slice::<f32>()).for_each(|(n, &x)| *n = <T as Element>::from_f32(x));
            }),
        }
        Ok(())
    }

    /// All products in f32; the slices start at the views' offsets.
    fn multiply(&self, lhs: &[f32], rhs: &[f32], result: &mut [f32], threads: usize) {
        if self.terms.size == 0 || self.term_loops.iter().any(|a| a.size == 0) {
            if !self.accumulate {
                result.fill(0.0);
            }
            return;
        }
        let count = self.products();
        if self.result_elements == 0 {
            return;
        }
        assert!(
            self.lhs_end - self.lhs_offset <= lhs.len()
                && self.rhs_end - self.rhs_offset <= rhs.len()
                && self.result_elements <= result.len(),
            "the operands of a product are smaller than their views"
        );
        let spread = self.is_large(threads);
        let result = Shared(result.as_mut_ptr());
        let one = |i: usize, parallelism: Parallelism| {
            let (mut l, mut r, mut d, mut rest) = (0, 0, 0, i);
            for axis in self.loops.iter().rev() {
                let at = rest % axis.size;
                rest /= axis.size;
                l += at * axis.lhs;
                r += at * axis.rhs;
                d += at * axis.result;
            }
            let repeats: usize = self.term_loops.iter().map(|a| a.size).product();
            for j in 0..repeats {
                let (mut lj, mut rj, mut rest) = (l, r, j);
                for axis in self.term_loops.iter().rev() {
                    let at = rest % axis.size;
                    rest /= axis.size;
                    lj += at * axis.lhs;
                    rj += at * axis.rhs;
                }
                // SAFETY: the strides are those of views whose last elements lie within the slices, as asserted
                // above; products of different `i` write different elements, since the result's strides are
                // those of a contiguous tensor.
                unsafe {
                    multiply_at(
                        [self.rows.size, self.columns.size, self.terms.size],
                        matrix(lhs.as_ptr().wrapping_add(lj), self.rows.lhs, self.terms.lhs),
                        matrix(rhs.as_ptr().wrapping_add(rj), self.terms.rhs, self.columns.rhs),
                        matrix(result.at(d), self.rows.result, self.columns.result),
                        self.accumulate || j > 0,
                        parallelism,
                    );
                }
            }
        };
        if self.spreads_products(threads) {
            (0..count)
                .into_par_iter()
                .with_min_len(count.div_ceil(4 * threads))
                .for_each(|i| one(i, Parallelism::None));
        } else {
            let parallelism = if spread { Parallelism::Rayon(threads) } else { Parallelism::None };
            (0..count).for_each(|i| one(i, parallelism));
        }
    }

    /// Integer products are rare and small (counts and masks): plain wrapping loops.
    fn multiply_integers<T: Element>(&self, lhs: &Storage, rhs: &Storage, result: &mut Storage) {
        let (lhs, rhs) = (&lhs.slice::<T>()[self.lhs_offset..], &rhs.slice::<T>()[self.rhs_offset..]);
        let result = result.slice_mut::<T>();
        let mut outer = self.loops.clone();
        outer.extend([self.rows, self.columns]);
        let mut inner = self.term_loops.clone();
        inner.push(self.terms);
        for_each(&outer, |l, r, d| {
            let mut sum = if self.accumulate { result[d].to_i64() } else { 0 };
            for_each(&inner, |lk, rk, _| {
                sum = sum.wrapping_add(lhs[l + lk].to_i64().wrapping_mul(rhs[r + rk].to_i64()));
            });
            result[d] = T::from_i64(sum);
        });
    }
}

/// Strides of a product's operands and result: along the inner dimension of the row-major form (terms, columns,
/// columns), and along the other.
pub(crate) struct Sides {
    pub by_terms: (usize, usize),
    pub by_columns: (usize, usize),
    pub result: (usize, usize),
}

/// A product of `[rows, columns, terms]` as a term. Its family says for either operand whether it is row major (`n`) or
/// transposed (`t`), since their packing costs differ.
pub(crate) fn product_term([rows, columns, terms]: [usize; 3], sides: Sides, threads: usize) -> Term {
    // An operand that is contiguous along neither dimension counts as transposed. A dimension of size one says nothing.
    let written = |(inner, _): (usize, usize), size: usize| size == 1 || inner == 1;
    let (mut lhs, mut rhs) = (written(sides.by_terms, terms), written(sides.by_columns, columns));
    let mut size = [rows, columns, terms];
    // A transposed result is the product of the transposed operands.
    if sides.result.0 > 1 && sides.result.1 == 1 {
        (lhs, rhs) = (!rhs || terms == 1, !lhs || rows == 1);
        size.swap(0, 1);
    }
    let family = match (lhs, rhs) {
        (true, true) => "matmul_nn",
        (true, false) => "matmul_nt",
        (false, true) => "matmul_tn",
        (false, false) => "matmul_tt",
    };
    Term { threads: threads as u32, ..Term::once(family, DType::F32, size.map(|n| n as f64)) }
}

/// Visits all positions of a loop nest.
fn for_each(axes: &[Axis], mut visit: impl FnMut(usize, usize, usize)) {
    let count: usize = axes.iter().map(|a| a.size).product();
    for i in 0..count {
        let (mut l, mut r, mut d, mut rest) = (0, 0, 0, i);
        for axis in axes.iter().rev() {
            let at = rest % axis.size;
            rest /= axis.size;
            l += at * axis.lhs;
            r += at * axis.rhs;
            d += at * axis.result;
        }
        visit(l, r, d);
    }
}

/// Merges adjacent dimensions that all three tensors stride through alike.
fn merge(axes: impl IntoIterator<Item = Axis>) -> Vec<Axis> {
    let mut merged: Vec<Axis> = Vec::new();
    for a in axes {
        if a.size == 1 {
            continue;
        }
        match merged.last_mut() {
            Some(last)
                if last.lhs == a.lhs * a.size && last.rhs == a.rhs * a.size && last.result == a.result * a.size =>
            {
                *last = Axis { size: last.size * a.size, ..a };
            }
            _ => merged.push(a),
        }
    }
    merged
}

/// Takes the largest dimension and turns the others into loops.
fn widest(mut axes: Vec<Axis>, loops: &mut Vec<Axis>) -> Axis {
    match (0..axes.len()).max_by_key(|&i| (axes[i].size, i)) {
        Some(i) => {
            let widest = axes.remove(i);
            loops.extend(axes);
            widest
        }
        None => Axis { size: 1, lhs: 0, rhs: 0, result: 0 },
    }
}
