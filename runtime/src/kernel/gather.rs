//! Table lookups and their transpose, with StableHLO's dimension numbers. Both iterate over the index vectors and move
//! one window per vector. The window's dimensions are merged, so that a row of an embedding is one copy.

use crate::arena::Storage;
use crate::element::{Class, Element, with_class, with_width, wrap};
use crate::error::KernelError;
use crate::kernel::instruction::{combine as combined, integer_binary};
use crate::view::row_major;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Binary, Combine, GatherDims, Reducer};
use altiplano_ir::work::Work;

/// The dimensions that both kernels share. `table` is the gather's operand or the scatter's result, `rows` the gather's
/// result or the scatter's updates.
#[derive(Clone, Debug, PartialEq)]
pub struct Lookup {
    table_elements: usize,
    /// Per batch dimension: size, stride in indices, in rows, and in the table (batching dimensions only).
    batches: Vec<(usize, usize, usize, usize)>,
    /// Per component of an index vector: stride in the table, largest start.
    components: Vec<(usize, i64)>,
    component_stride: usize,
    /// Per dimension of the window: size, stride in the table, stride in rows; merged, major first.
    window: Vec<(usize, usize, usize)>,
}

impl Lookup {
    pub fn new(dims: &GatherDims, table: &[usize], indices: &[usize], rows: &[usize]) -> Lookup {
        let (table_strides, index_strides, row_strides) = (row_major(table), row_major(indices), row_major(rows));
        let indices_dims = (0..indices.len()).filter(|&d| d != dims.index_vector_dim);
        let row_dims = (0..rows.len()).filter(|d| !dims.offset_dims.contains(d));
        let batches = indices_dims.zip(row_dims).map(|(i, r)| {
            let batching = dims.indices_batching_dims.iter().position(|&b| b == i);
            let stride = batching.map_or(0, |b| table_strides[dims.operand_batching_dims[b]]);
            (indices[i], index_strides[i], row_strides[r], stride)
        });
        let components =
            dims.start_index_map.iter().map(|&d| (table_strides[d], table[d] as i64 - dims.slice_sizes[d] as i64));
        let gone = |d: &usize| dims.collapsed_slice_dims.contains(d) || dims.operand_batching_dims.contains(d);
        let window_dims = (0..table.len()).filter(|d| !gone(d));
        let mut window: Vec<(usize, usize, usize)> = Vec::new();
        for (d, &r) in window_dims.zip(&dims.offset_dims) {
            let (size, t, s) = (dims.slice_sizes[d] as usize, table_strides[d], row_strides[r]);
            match window.last_mut() {
                _ if size == 1 => {}
                Some(last) if last.1 == t * size && last.2 == s * size => *last = (last.0 * size, t, s),
                _ => window.push((size, t, s)),
            }
        }
        Lookup {
            table_elements: table.iter().product(),
            batches: batches.collect(),
            components: components.collect(),
            component_stride: index_strides.get(dims.index_vector_dim).copied().unwrap_or(0),
            window,
        }
    }

    /// The work of a lookup: a copy of each slice, found by its index.
    pub(crate) fn gather_work(&self, class: Class) -> Work {
        let mut work = Work::new(1);
        let (count, width) = self.slices();
        work.once("index", DType::I32, count as f64);
        work.once("copy", DType::F32, (count * width * class.bytes()) as f64);
        work
    }

    /// The work of adding or writing slices to a tensor, after the tensor has been filled.
    pub(crate) fn scatter_work(&self, dtype: DType) -> Work {
        let mut work = Work::new(1);
        let (count, width) = self.slices();
        work.once("index", DType::I32, count as f64);
        work.once("scatter", Class::of(dtype).dtype(), (count * width) as f64);
        work
    }

    /// Number of slices, and elements of each.
    fn slices(&self) -> (usize, usize) {
        (self.batches.iter().map(|b| b.0).product(), self.window.iter().map(|w| w.0).product())
    }

    /// Calls `visit(row offset, table offset)` for each index vector. The table offset is `None` if the slice is out of
    /// bounds.
    fn for_each<I: Element>(&self, indices: &[I], clamp: bool, mut visit: impl FnMut(usize, Option<usize>)) {
        let count: usize = self.batches.iter().map(|b| b.0).product();
        for b in 0..count {
            let (mut index, mut row, mut table, mut rest) = (0, 0, 0, b);
            for &(size, i, r, t) in self.batches.iter().rev() {
                let at = rest % size;
                rest /= size;
                index += at * i;
                row += at * r;
                table += at * t;
            }
            let mut inside = self.table_elements > 0;
            for (c, &(stride, last)) in self.components.iter().enumerate() {
                let start = indices[index + c * self.component_stride].to_i64();
                inside &= clamp || (0..=last).contains(&start);
                table += start.clamp(0, last.max(0)) as usize * stride;
            }
            visit(row, inside.then_some(table));
        }
    }

    /// `rows[..] = table[indices]`. Out-of-bounds slices become the nearest slice inside (`clamp`) or zeros.
    pub fn gather(
        &self,
        class: Class,
        index: Class,
        clamp: bool,
        table: &Storage,
        indices: &Storage,
        rows: &mut Storage,
    ) {
        with_class!(index, I => with_width!(class, T => {
            let (table, rows) = (table.slice::<T>(), rows.slice_mut::<T>());
            let zero: T = bytemuck::Zeroable::zeroed();
            if self.window.iter().any(|w| w.0 == 0) {
                return;
            }
            self.for_each(indices.slice::<I>(), clamp, |row, start| {
                self.for_each_run(|t, s, n, t_stride, s_stride| match start {
                    Some(start) if t_stride == 1 && s_stride == 1 => {
                        rows[row + s..row + s + n].copy_from_slice(&table[start + t..start + t + n]);
                    }
                    Some(start) => {
                        for i in 0..n {
                            rows[row + s + i * s_stride] = table[start + t + i * t_stride];
                        }
                    }
                    None => {
                        for i in 0..n {
                            rows[row + s + i * s_stride] = zero;
                        }
                    }
                });
            });
        }))
    }

    /// `table = 0; table[indices] += rows`, dropping out-of-bounds slices.
    pub fn scatter_add(
        &self,
        dtype: DType,
        index: Class,
        indices: &Storage,
        rows: &Storage,
        table: &mut Storage,
    ) -> Result<(), KernelError> {
        let class = Class::of(dtype);
        match class {
            Class::F32 => {
                let sums = table.slice_mut::<f32>();
                sums.fill(0.0);
                self.merge(index, indices, rows.slice::<f32>(), sums, |sum, x| sum + x);
            }
            Class::F16 | Class::BF16 | Class::Bool => with_class!(class, T => {
                let mut wide = table.arena().zeros(Class::F32, self.table_elements)?;
                let sums = wide.slice_mut::<f32>();
                self.merge(index, indices, rows.slice::<T>(), sums, |sum, x| sum + Element::to_f32(x));
                let narrow = table.slice_mut::<T>().iter_mut();
                narrow.zip(&*sums).for_each(|(n, &x)| *n = <T as Element>::from_f32(x));
            }),
            Class::I32 | Class::I64 => with_class!(class, T => {
                let sums = table.slice_mut::<T>();
                sums.fill(T::from_i64(0));
                self.merge(index, indices, rows.slice::<T>(), sums, |sum, x| {
                    T::from_i64(wrap(sum.to_i64().wrapping_add(x.to_i64()), dtype))
                });
            }),
        }
        Ok(())
    }

    /// Combines each update with the element at its place, in the order of the index vectors.
    pub fn scatter(
        &self,
        dtype: DType,
        index: Class,
        combine: Combine,
        indices: &Storage,
        rows: &Storage,
        table: &mut Storage,
    ) {
        let class = Class::of(dtype);
        let Some(op) = combine.binary() else {
            return with_width!(class, T => {
                self.merge(index, indices, rows.slice::<T>(), table.slice_mut::<T>(), |_, update| update)
            });
        };
        with_class!(class, T => {
            let (rows, table) = (rows.slice::<T>(), table.slice_mut::<T>());
            if class.is_integer() {
                self.merge(index, indices, rows, table, |x, update| {
                    T::from_i64(integer_binary(op, x.to_i64(), update.to_i64(), dtype))
                });
            } else {
                let reducer = match op {
                    Binary::Multiply => Reducer::Product,
                    Binary::Minimum => Reducer::Min,
                    _ => Reducer::Max,
                };
                self.merge(index, indices, rows, table, |x, update| {
                    T::from_f32(combined(reducer, f64::from(x.to_f32()), f64::from(update.to_f32())) as f32)
                });
            }
        });
    }

    fn merge<S: Copy, T: Copy>(
        &self,
        index: Class,
        indices: &Storage,
        rows: &[T],
        sums: &mut [S],
        merged: impl Fn(S, T) -> S,
    ) {
        if self.window.iter().any(|w| w.0 == 0) {
            return;
        }
        with_class!(index, I => self.for_each(indices.slice::<I>(), false, |row, start| {
            let Some(start) = start else { return };
            self.for_each_run(|t, s, n, t_stride, s_stride| {
                if t_stride == 1 && s_stride == 1 {
                    let target = sums[start + t..start + t + n].iter_mut();
                    target.zip(&rows[row + s..row + s + n]).for_each(|(sum, &x)| *sum = merged(*sum, x));
                } else {
                    for i in 0..n {
                        let at = start + t + i * t_stride;
                        sums[at] = merged(sums[at], rows[row + s + i * s_stride]);
                    }
                }
            });
        }));
    }

    /// Calls `visit(table offset, row offset, length, table stride, row stride)` for each innermost run of a window.
    #[inline(always)]
    fn for_each_run(&self, mut visit: impl FnMut(usize, usize, usize, usize, usize)) {
        let Some((&(n, t_stride, s_stride), outer)) = self.window.split_last() else {
            return visit(0, 0, 1, 1, 1);
        };
        let count: usize = outer.iter().map(|w| w.0).product();
        for i in 0..count {
            let (mut t, mut s, mut rest) = (0, 0, i);
            for &(size, ts, ss) in outer.iter().rev() {
                let at = rest % size;
                rest /= size;
                t += at * ts;
                s += at * ss;
            }
            visit(t, s, n, t_stride, s_stride);
        }
    }
}
