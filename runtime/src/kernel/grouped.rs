//! Grouped products: the rows of each group are packed, multiplied by the group's matrix, and scattered back.

use crate::arena::Storage;
use crate::element::{Class, Element, with_class};
use crate::error::KernelError;
use crate::kernel::dot::{Sides, product_term};
use crate::kernel::matrix::{Matrix, Strides, multiply};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{GroupedDot, GroupedOuter};
use altiplano_ir::types::TensorType;
use altiplano_ir::work::{Term, Work};

/// Sizes of a grouped product: the op's matrices are `[groups, terms, columns]`, or `[groups, columns, terms]` if `transposed`.
/// The sum of outer products has matrices `[groups, terms, columns]` as its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Grouped {
    class: Class,
    index: Class,
    rows: usize,
    groups: usize,
    terms: usize,
    columns: usize,
    transposed: bool,
    /// Share of the rows that are multiplied if groups are chosen evenly.
    share: f64,
}

impl Grouped {
    pub(crate) fn dot_of(op: &GroupedDot, class: Class, index: Class, matrices: &[u64], group: &TensorType) -> Grouped {
        let [groups, terms, columns] = [0, op.contract, 3 - op.contract].map(|d| matrices[d] as usize);
        let (rows, transposed) = (group.elements() as usize, op.contract == 2);
        Grouped { class, index, rows, groups, terms, columns, transposed, share: share(groups, op.of) }
    }

    pub(crate) fn outer_of(
        op: &GroupedOuter,
        class: Class,
        index: Class,
        result: &[usize],
        group: &TensorType,
    ) -> Grouped {
        let (rows, groups) = (group.elements() as usize, result[0]);
        let (terms, columns) = (result[1], result[2]);
        Grouped { class, index, rows, groups, terms, columns, transposed: false, share: share(groups, op.of) }
    }

    /// The work of [`Self::dot`] on at most `threads` threads.
    pub(crate) fn dot_work(&self, threads: usize) -> Work {
        let by_columns = if self.transposed { (self.terms, 1) } else { (1, self.columns) };
        let sides = Sides { by_terms: (1, self.terms), by_columns, result: (1, self.columns) };
        self.work([self.rows_of_group(), self.columns, self.terms], sides, threads)
    }

    /// The work of [`Self::outer`] on at most `threads` threads.
    pub(crate) fn outer_work(&self, threads: usize) -> Work {
        let sides = Sides { by_terms: (self.terms, 1), by_columns: (1, self.columns), result: (1, self.columns) };
        self.work([self.terms, self.columns, self.rows_of_group()], sides, threads)
    }

    fn rows_of_group(&self) -> usize {
        ((self.rows as f64 * self.share / self.groups.max(1) as f64).ceil() as usize).max(1)
    }

    fn work(&self, sizes: [usize; 3], sides: Sides, threads: usize) -> Work {
        let mut work = Work::new(1);
        let spread = crate::thread_pool::spreads(threads, sizes.iter().product(), crate::thread_pool::PRODUCTS);
        let term = product_term(sizes, sides, if spread { threads } else { 1 });
        work.add(Term { dtype: self.class.dtype(), times: self.groups as f64, ..term });
        let moved = self.rows as f64 * self.share * (self.terms + self.columns) as f64;
        work.once("index", DType::I32, self.rows as f64);
        work.once("copy", DType::F32, moved * self.class.bytes() as f64);
        work
    }

    /// The rows of each group, in order.
    fn by_group(&self, index: &Storage) -> Vec<Vec<usize>> {
        let mut rows = vec![Vec::new(); self.groups];
        with_class!(self.index, I => {
            for (r, g) in index.slice::<I>().iter().enumerate() {
                let group = usize::try_from(Element::to_i64(*g)).ok().and_then(|g| rows.get_mut(g));
                if let Some(group) = group {
                    group.push(r);
                }
            }
        });
        rows
    }

    /// `inputs` are rows, matrices and the group of each row. Rows without a group become zeros.
    pub fn dot(&self, inputs: &[&Storage], result: &mut Storage, threads: usize) -> Result<(), KernelError> {
        let (terms, columns, size) = (self.terms, self.columns, self.terms * self.columns);
        let arena = result.arena().clone();
        let mut packed = arena.allocate(Class::F32, self.rows * terms)?;
        let mut made = arena.allocate(Class::F32, self.rows * columns)?;
        let widened = self.class != Class::F32;
        let mut wide = arena.allocate(Class::F32, if widened { size } else { 0 })?;
        let strides = if self.transposed { (1, terms) } else { (columns, 1) };
        let strides = Strides { row: strides.0, column: strides.1 };
        let by_group = self.by_group(inputs[2]);
        with_class!(self.class, T => {
            result.slice_mut::<T>().fill(bytemuck::Zeroable::zeroed());
            for (g, rows) in by_group.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                pack(inputs[0].slice::<T>(), rows, terms, packed.slice_mut());
                let matrix = g * size..(g + 1) * size;
                if widened {
                    widen(&inputs[1].slice::<T>()[matrix.clone()], wide.slice_mut());
                }
                let weights = if widened { wide.slice::<f32>() } else { &inputs[1].slice::<f32>()[matrix] };
                let (lhs, by_row) = (Strides { row: terms, column: 1 }, Strides { row: columns, column: 1 });
                let made = made.slice_mut::<f32>();
                if terms == 0 {
                    made.fill(0.0);
                } else {
                    let lhs = Matrix { elements: packed.slice(), strides: lhs };
                    let (rhs, to) = (Matrix { elements: weights, strides }, Matrix { elements: &mut *made, strides: by_row });
                    multiply([rows.len(), columns, terms], lhs, rhs, to, false, threads);
                }
                let to = result.slice_mut::<T>();
                for (i, r) in rows.iter().enumerate() {
                    let row = to[r * columns..(r + 1) * columns].iter_mut();
                    row.zip(&made[i * columns..]).for_each(|(to, &x)| *to = <T as Element>::from_f32(x));
                }
            }
        });
        Ok(())
    }

    /// `inputs` are rows, other rows and the group of each. Groups without rows become zeros.
    pub fn outer(&self, inputs: &[&Storage], result: &mut Storage, threads: usize) -> Result<(), KernelError> {
        let (terms, columns, size) = (self.terms, self.columns, self.terms * self.columns);
        let arena = result.arena().clone();
        let mut left = arena.allocate(Class::F32, self.rows * terms)?;
        let mut right = arena.allocate(Class::F32, self.rows * columns)?;
        let mut wide = arena.allocate(Class::F32, if self.class == Class::F32 { 0 } else { size })?;
        let by_group = self.by_group(inputs[2]);
        with_class!(self.class, T => {
            result.slice_mut::<T>().fill(bytemuck::Zeroable::zeroed());
            for (g, rows) in by_group.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                pack(inputs[0].slice::<T>(), rows, terms, left.slice_mut());
                pack(inputs[1].slice::<T>(), rows, columns, right.slice_mut());
                let matrix = g * size..(g + 1) * size;
                let (lhs, rhs) = (Strides { row: 1, column: terms }, Strides { row: columns, column: 1 });
                let shape = [terms, columns, rows.len()];
                let lhs = Matrix { elements: left.slice(), strides: lhs };
                let (rhs, by_row) = (Matrix { elements: right.slice(), strides: rhs }, rhs);
                if self.class == Class::F32 {
                    let to = Matrix { elements: &mut result.slice_mut::<f32>()[matrix], strides: by_row };
                    multiply(shape, lhs, rhs, to, false, threads);
                } else {
                    let to = Matrix { elements: wide.slice_mut(), strides: by_row };
                    multiply(shape, lhs, rhs, to, false, threads);
                    let to = result.slice_mut::<T>()[matrix].iter_mut();
                    to.zip(wide.slice::<f32>()).for_each(|(to, &x)| *to = <T as Element>::from_f32(x));
                }
            }
        });
        Ok(())
    }
}

/// The fraction of `of` groups that `groups` make up.
fn share(groups: usize, of: Option<u64>) -> f64 {
    of.map_or(1.0, |of| (groups as f64 / of.max(1) as f64).min(1.0))
}

/// Packs the given rows of `width` elements one after the other, in single precision.
fn pack<T: Element>(from: &[T], rows: &[usize], width: usize, to: &mut [f32]) {
    for (i, r) in rows.iter().enumerate() {
        widen(&from[r * width..(r + 1) * width], &mut to[i * width..(i + 1) * width]);
    }
}

fn widen<T: Element>(from: &[T], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
}
