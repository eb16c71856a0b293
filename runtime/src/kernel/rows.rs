//! Kernels along the last dimension of a tensor: sorting orders, scans, and reversal. Rows are independent and spread
//! over threads. The temporary memory of a row is small and lies outside the arena.

use crate::arena::Storage;
use crate::element::{Class, Element, round_float, with_class, with_width, wrap};
use crate::kernel::chain::integer_neutral;
use crate::kernel::instruction::{combine, float_reducer, integer_binary, neutral};
use crate::thread_pool::{VISITED, spreads};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use rayon::prelude::*;
use std::ops::Range;

/// Number of threads for rows of `length`, with `elements` in all and `visits` of each element.
pub(crate) fn parts(elements: usize, length: usize, visits: usize, threads: usize) -> usize {
    if spreads(threads, elements.saturating_mul(visits), VISITED) && elements > length { threads } else { 1 }
}

/// Calls `work` with the number and the elements of each row.
pub(crate) fn for_each_row<T: Send>(
    elements: &mut [T],
    length: usize,
    visits: usize,
    threads: usize,
    work: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if length == 0 {
        return;
    }
    if parts(elements.len(), length, visits, threads) > 1 {
        elements.par_chunks_mut(length).enumerate().for_each(|(i, row)| work(i, row));
    } else {
        elements.chunks_mut(length).enumerate().for_each(|(i, row)| work(i, row));
    }
}

/// The sorting order of each row by some keys, the most significant first.
#[derive(Clone, Debug, PartialEq)]
pub struct RowOrder {
    pub row: usize,
    /// Element type of each key, and true if its greatest element comes first.
    pub keys: Vec<(DType, bool)>,
}

impl RowOrder {
    /// Approximate number of comparisons per element: the logarithm of a row.
    pub(crate) fn visits(&self) -> usize {
        self.row.max(2).ilog2() as usize
    }

    pub fn run(&self, keys: &[&Storage], order: &mut Storage, threads: usize) {
        for_each_row(order.slice_mut::<i32>(), self.row, self.visits(), threads, |number, order| {
            let part = number * self.row..(number + 1) * self.row;
            let ranks = |(&(dtype, descending), key): (&(DType, bool), &&Storage)| {
                let mut ranks = ranks(key, part.clone(), dtype);
                if descending {
                    ranks.iter_mut().for_each(|rank| *rank = !*rank);
                }
                ranks
            };
            let ranks: Vec<Vec<u64>> = self.keys.iter().zip(keys).map(ranks).collect();
            // Positions break ties, which makes the order stable.
            if let [only] = ranks.as_slice() {
                let mut pairs: Vec<(u64, i32)> = only.iter().copied().zip(0..).collect();
                pairs.sort_unstable();
                order.iter_mut().zip(pairs).for_each(|(o, (_, position))| *o = position);
            } else {
                order.iter_mut().zip(0..).for_each(|(o, position)| *o = position);
                order.sort_unstable_by(|&a, &b| {
                    let by_key = ranks.iter().map(|r| r[a as usize].cmp(&r[b as usize])).find(|o| o.is_ne());
                    by_key.unwrap_or(a.cmp(&b))
                });
            }
        });
    }
}

/// Numbers in the same order as the elements: zeros of either sign are equal, and NaNs come last.
fn ranks(key: &Storage, part: Range<usize>, dtype: DType) -> Vec<u64> {
    let float = |x: f32| match (x + 0.0).to_bits() {
        _ if x.is_nan() => u64::from(u32::MAX),
        bits if bits >> 31 == 1 => u64::from(!bits),
        bits => u64::from(bits | 1 << 31),
    };
    let flip = if dtype == DType::U64 { 0 } else { 1 << 63 };
    let class = Class::of(dtype);
    with_class!(class, T => {
        let elements = key.slice::<T>()[part].iter();
        if class.is_integer() {
            elements.map(|x| x.to_i64() as u64 ^ flip).collect()
        } else {
            elements.map(|x| float(x.to_f32())).collect()
        }
    })
}

/// A scan: combines each element of a row with all before it, or all after it.
#[derive(Clone, Debug, PartialEq)]
pub struct RowScan {
    pub row: usize,
    pub reducer: Reducer,
    pub reverse: bool,
    pub dtype: DType,
}

impl RowScan {
    pub fn run(&self, input: &Storage, output: &mut Storage, threads: usize) {
        with_class!(Class::of(self.dtype), T => {
            let input = input.slice::<T>();
            for_each_row(output.slice_mut::<T>(), self.row, 1, threads, |number, row| {
                let steps = row.iter_mut().zip(&input[number * self.row..]);
                match self.reverse {
                    false => self.scan(steps),
                    true => self.scan(steps.rev()),
                }
            });
        });
    }

    /// Sums and products of floats run in double precision, so that their error does not grow with the row.
    fn scan<'a, T: Element>(&self, steps: impl Iterator<Item = (&'a mut T, &'a T)>) {
        if Class::of(self.dtype).is_integer() {
            let mut total = integer_neutral(self.reducer, self.dtype);
            for (out, x) in steps {
                total = wrap(integer_binary(self.reducer.combine(), total, x.to_i64(), self.dtype), self.dtype);
                *out = T::from_i64(total);
            }
            return;
        }
        let reducer = float_reducer(self.reducer, self.dtype);
        let mut total = neutral(reducer);
        for (out, x) in steps {
            total = combine(reducer, total, f64::from(x.to_f32()));
            *out = T::from_f32(round_float(total as f32, self.dtype));
        }
    }
}

/// Reverses some dimensions of a row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Reversal {
    /// Sizes, major first, and whether each is reversed. Adjacent dimensions that agree are merged: reversing both is
    /// reversing them as one.
    dims: Vec<(usize, bool)>,
}

impl Reversal {
    pub fn new(shape: &[usize], reversed: &[usize]) -> Reversal {
        let mut dims: Vec<(usize, bool)> = Vec::new();
        for (d, &size) in shape.iter().enumerate() {
            let turned = reversed.contains(&d);
            match dims.last_mut() {
                _ if size == 1 => {}
                Some(last) if last.1 == turned => last.0 *= size,
                _ => dims.push((size, turned)),
            }
        }
        Reversal { dims }
    }

    /// Number of elements that stay contiguous.
    pub fn row(&self) -> usize {
        self.dims.last().map_or(1, |d| d.0)
    }

    pub fn run(&self, class: Class, input: &Storage, output: &mut Storage, threads: usize) {
        let (&(row, turned), outer) = self.dims.split_last().unwrap_or((&(1, false), &[]));
        with_width!(class, T => {
            let input = input.slice::<T>();
            for_each_row(output.slice_mut::<T>(), row, 1, threads, |number, target| {
                let (mut from, mut rest, mut pitch) = (0, number, 1);
                for &(size, turned) in outer.iter().rev() {
                    let at = rest % size;
                    from += pitch * if turned { size - 1 - at } else { at };
                    rest /= size;
                    pitch *= size;
                }
                let source = &input[from * row..(from + 1) * row];
                if turned {
                    target.iter_mut().zip(source.iter().rev()).for_each(|(t, &x)| *t = x);
                } else {
                    target.copy_from_slice(source);
                }
            });
        });
    }
}
