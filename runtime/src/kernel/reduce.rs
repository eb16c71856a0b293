//! Reductions over any dimensions of a strided view. Chains reduce contiguous rows (see [`super::chain`]). This kernel
//! does the others, above all sums over leading dimensions (gradients of biases).

use crate::arena::Storage;
use crate::element::{Class, Element, with_class, wrap};
use crate::kernel::chain::integer_neutral;
use crate::kernel::instruction::{combine, float_reducer, integer_binary, neutral, reduce_row};
use crate::thread_pool::{REDUCED, spreads};
use crate::view::View;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use altiplano_ir::work::Work;
use rayon::prelude::*;

/// Result elements summed side by side.
const TILE: usize = 512;

/// Rows summed in f32 before they move to f64.
const ROWS: usize = 16;

/// A compiled reduction; the result is row major over the kept dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduction {
    dtype: DType,
    reducer: Reducer,
    offset: usize,
    /// `(size, stride)` of the kept and of the reduced dimensions, major first.
    kept: Vec<(usize, usize)>,
    reduced: Vec<(usize, usize)>,
}

impl Reduction {
    pub fn new(view: &View, dims: &[usize], reducer: Reducer, dtype: DType) -> Reduction {
        let runs = |keep: bool| {
            let chosen: Vec<usize> = (0..view.shape.len()).filter(|d| dims.contains(d) != keep).collect();
            let part = View { root: view.root, offset: 0, shape: Vec::new(), strides: Vec::new() };
            let shape = chosen.iter().map(|&d| view.shape[d]).collect();
            let strides = chosen.iter().map(|&d| view.strides[d]).collect();
            View { shape, strides, ..part }.runs()
        };
        Reduction { dtype, reducer, offset: view.offset, kept: runs(true), reduced: runs(false) }
    }

    /// The work of a run on at most `threads` threads.
    pub fn work(&self, threads: usize) -> Work {
        let size = |runs: &[(usize, usize)]| runs.iter().map(|r| r.0).product::<usize>();
        let elements = size(&self.kept).saturating_mul(size(&self.reduced));
        let mut work = Work::new(if spreads(threads, elements, REDUCED) { threads } else { 1 });
        let neighbours = self.kept.last().is_some_and(|k| k.1 == 1) && !self.reduced.is_empty();
        let family = if neighbours { "reduce_columns" } else { "reduce_strided" };
        work.once(family, Class::of(self.dtype).dtype(), elements as f64);
        // Short rows have a cost per row, as in copies.
        match self.reduced.as_slice() {
            [_, .., (inner, _)] if !neighbours && *inner < TILE => {
                work.once("copy_run", DType::F32, elements as f64 / (*inner).max(1) as f64);
            }
            _ => {}
        }
        work
    }

    pub fn run(&self, input: &Storage, output: &mut Storage, threads: usize) {
        if self.kept.iter().any(|k| k.0 == 0) {
            return;
        }
        let class = Class::of(self.dtype);
        with_class!(class, T => {
            let input = input.slice::<T>();
            let output = output.slice_mut::<T>();
            let terms: usize = self.reduced.iter().map(|r| r.0).product();
            let spread = spreads(threads, terms.saturating_mul(output.len()), REDUCED);
            match self.kept.split_last() {
                Some((&(columns, 1), outer)) if !self.reduced.is_empty() => {
                    let tile = |i: usize, tile: &mut [T]| {
                        let (row, part) = (i / columns.div_ceil(TILE), i % columns.div_ceil(TILE));
                        self.columns(input, self.offset + position(outer, row) + part * TILE, tile);
                    };
                    let tiles = |(row, out): (usize, &mut [T])| {
                        let first = row * columns.div_ceil(TILE);
                        out.chunks_mut(TILE).enumerate().for_each(|(i, t)| tile(first + i, t));
                    };
                    if spread && output.len() / columns >= threads {
                        output.par_chunks_mut(columns).enumerate().for_each(tiles);
                    } else if spread {
                        for (row, out) in output.chunks_mut(columns).enumerate() {
                            let first = row * columns.div_ceil(TILE);
                            out.par_chunks_mut(TILE).enumerate().for_each(|(i, t)| tile(first + i, t));
                        }
                    } else {
                        output.chunks_mut(columns).enumerate().for_each(tiles);
                    }
                }
                _ => {
                    let some = |(i, part): (usize, &mut [T])| {
                        for (j, out) in part.iter_mut().enumerate() {
                            *out = self.one(input, self.offset + position(&self.kept, i * TILE + j));
                        }
                    };
                    if spread {
                        output.par_chunks_mut(TILE).enumerate().for_each(some);
                    } else {
                        output.chunks_mut(TILE).enumerate().for_each(some);
                    }
                }
            }
        });
    }

    /// Reduces adjacent columns, row by row.
    fn columns<T: Element>(&self, input: &[T], at: usize, tile: &mut [T]) {
        let terms: usize = self.reduced.iter().map(|r| r.0).product();
        let n = tile.len();
        if Class::of(self.dtype).is_integer() {
            let mut sums = [integer_neutral(self.reducer, self.dtype); TILE];
            let op = self.reducer.combine();
            for r in 0..terms {
                let start = at + position(&self.reduced, r);
                for (s, &x) in sums.iter_mut().zip(&input[start..start + n]) {
                    *s = integer_binary(op, *s, x.to_i64(), self.dtype);
                }
            }
            tile.iter_mut().zip(sums).for_each(|(t, s)| *t = T::from_i64(wrap(s, self.dtype)));
            return;
        }
        let reducer = float_reducer(self.reducer, self.dtype);
        let start = neutral(reducer);
        let mut totals = [start; TILE];
        let mut sums = [start as f32; TILE];
        let rows = if reducer == Reducer::Product { 1 } else { ROWS };
        let mut r = 0;
        while r < terms {
            sums[..n].fill(start as f32);
            for i in r..(r + rows).min(terms) {
                let first = at + position(&self.reduced, i);
                let row = sums.iter_mut().zip(&input[first..first + n]);
                match reducer {
                    Reducer::Sum => row.for_each(|(s, x)| *s += x.to_f32()),
                    Reducer::Product => row.for_each(|(s, x)| *s *= x.to_f32()),
                    _ => row.for_each(|(s, x)| *s = combine(reducer, *s as f64, x.to_f32() as f64) as f32),
                }
            }
            totals.iter_mut().zip(&sums[..n]).for_each(|(t, &s)| *t = combine(reducer, *t, s as f64));
            r += rows;
        }
        tile.iter_mut().zip(totals).for_each(|(t, s)| *t = T::from_f32(s as f32));
    }

    /// Reduces to a single element.
    fn one<T: Element>(&self, input: &[T], at: usize) -> T {
        let (&(inner, stride), outer) = match self.reduced.split_last() {
            Some(split) => split,
            None => (&(1, 1), [].as_slice()),
        };
        let rows: usize = outer.iter().map(|r| r.0).product();
        if Class::of(self.dtype).is_integer() {
            let mut sum = integer_neutral(self.reducer, self.dtype);
            for row in 0..rows {
                let first = at + position(outer, row);
                for i in 0..inner {
                    sum = integer_binary(self.reducer.combine(), sum, input[first + i * stride].to_i64(), self.dtype);
                }
            }
            return T::from_i64(wrap(sum, self.dtype));
        }
        let reducer = float_reducer(self.reducer, self.dtype);
        let mut total = neutral(reducer);
        let (mut block, mut filled) = ([0.0f32; TILE], 0);
        for row in 0..rows {
            let first = at + position(outer, row);
            let mut done = 0;
            while done < inner {
                let n = (TILE - filled).min(inner - done);
                for (i, b) in block[filled..filled + n].iter_mut().enumerate() {
                    *b = input[first + (done + i) * stride].to_f32();
                }
                (filled, done) = (filled + n, done + n);
                // Short rows are collected and reduced together.
                if filled == TILE {
                    total = combine(reducer, total, reduce_row(reducer, &block));
                    filled = 0;
                }
            }
        }
        T::from_f32(combine(reducer, total, reduce_row(reducer, &block[..filled])) as f32)
    }
}

/// Position of the `index`-th element (row major) of a strided nest.
fn position(runs: &[(usize, usize)], mut index: usize) -> usize {
    let mut position = 0;
    for &(size, stride) in runs.iter().rev() {
        position += index % size * stride;
        index /= size;
    }
    position
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use altiplano_ir::graph::ValueId;

    /// As in groups of channels: short rows, far from each other.
    #[test]
    fn short_rows_are_reduced_as_long_ones() {
        let arena = Arena::new(None);
        for (rows, inner) in [(1, 1), (7, 3), (64, 3), (513, 2), (200, 8), (3, 700)] {
            let view = View::whole(ValueId(0), vec![2, rows, 2, inner]);
            let n = 2 * rows * 2 * inner;
            let mut input = arena.allocate(Class::F32, n).unwrap();
            input.slice_mut::<f32>().iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 37) % 101) as f32 - 50.0);
            for reducer in [Reducer::Sum, Reducer::Max, Reducer::Min] {
                let mut output = arena.allocate(Class::F32, 4).unwrap();
                Reduction::new(&view, &[1, 3], reducer, DType::F32).run(&input, &mut output, 1);
                let at = |b: usize, g: usize| {
                    let all = (0..rows).flat_map(|r| (0..inner).map(move |c| ((b * rows + r) * 2 + g) * inner + c));
                    all.map(|i| ((i * 37) % 101) as f64 - 50.0).reduce(|a, b| combine(reducer, a, b)).unwrap()
                };
                let expected = [at(0, 0), at(0, 1), at(1, 0), at(1, 1)].map(|x| x as f32);
                assert_eq!(output.slice::<f32>(), expected, "{rows} rows of {inner}, {reducer:?}");
            }
        }
    }
}
