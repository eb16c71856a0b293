//! Fused chains: runs of elementwise ops executed in one pass over memory, block by block, with reductions of whole
//! rows at the end. Intermediate values never leave the cache.

use crate::arena::Storage;
use crate::element::{Class, Element, integer_from_f64, round_float, with_class, wrap};
use crate::kernel::instruction::{
    Instruction, Registers, combine, integer_binary, load_floats, load_integers, neutral, reduce_row,
};
use crate::thread_pool::INSTRUCTIONS;
use altiplano_ir::dtype::DType;
use altiplano_ir::op::Reducer;
use altiplano_ir::work::{Term, Work};
use rayon::prelude::*;

/// Elements of a register: 2 KiB of floats, so that a dozen registers fit in the L1 cache.
pub(crate) const BLOCK: usize = 512;

/// The source of a load.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// An input of the step.
    Input(usize),
    /// The storage of an output, taken over from an input that dies here.
    InPlace(usize),
}

/// A value read into a register, at the chain's own linear position or through an index map.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    pub source: Source,
    pub class: Class,
    pub register: u16,
    pub offset: usize,
    /// `(size, stride)` pairs, major first, that visit the elements in the chain's order. If empty, all positions read
    /// one element.
    pub runs: Vec<(usize, usize)>,
}

/// A register written to an output.
#[derive(Clone, Debug, PartialEq)]
pub struct Store {
    pub output: usize,
    pub class: Class,
    pub register: u16,
}

/// A register whose rows are reduced to one element each.
#[derive(Clone, Debug, PartialEq)]
pub struct RowReduction {
    pub output: usize,
    pub class: Class,
    pub dtype: DType,
    pub reducer: Reducer,
    pub register: u16,
}

/// A compiled chain. Loads come first, so that an output may replace an input block by block.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Chain {
    pub elements: usize,
    /// Length of the reduced rows; 1 if there is no reduction.
    pub row: usize,
    pub float_registers: usize,
    pub integer_registers: usize,
    pub float_constants: Vec<(u16, f32)>,
    pub integer_constants: Vec<(u16, i64)>,
    pub loads: Vec<Load>,
    pub instructions: Vec<Instruction>,
    pub stores: Vec<Store>,
    pub reductions: Vec<RowReduction>,
}

/// One thread's part: rows `first..first + rows`, and their bytes in each output.
struct Part<'a> {
    first: usize,
    rows: usize,
    outputs: Vec<&'a mut [u8]>,
}

impl Chain {
    /// Runs the chain; `outputs` are in the order of the output numbers.
    pub fn run(&self, inputs: &[&Storage], outputs: &mut [Storage], threads: usize) {
        if self.elements == 0 {
            return;
        }
        let rows = self.elements / self.row;
        let mut rest: Vec<&mut [u8]> = outputs.iter_mut().map(|o| o.slice_mut::<u8>()).collect();
        if self.parts(threads) == 1 {
            self.run_part(inputs, Part { first: 0, rows, outputs: rest });
            return;
        }
        // If rows are short, each part has whole blocks.
        let unit = if self.row >= BLOCK { 1 } else { BLOCK / self.row };
        let share = rows.div_ceil(threads).div_ceil(unit) * unit;
        let mut parts = Vec::new();
        let mut first = 0;
        while first < rows {
            let count = share.min(rows - first);
            let mut taken = Vec::with_capacity(rest.len());
            for (output, slice) in rest.iter_mut().enumerate() {
                let (head, tail) = std::mem::take(slice).split_at_mut(count * self.bytes_per_row(output));
                taken.push(head);
                *slice = tail;
            }
            parts.push(Part { first, rows: count, outputs: taken });
            first += count;
        }
        parts.into_par_iter().for_each(|part| self.run_part(inputs, part));
    }

    /// Number of threads that a run uses, at most `threads`.
    fn parts(&self, threads: usize) -> usize {
        let rows = self.elements / self.row;
        let work = self.elements.saturating_mul(self.instructions.len() + self.loads.len() + 1);
        if threads == 1 || work < INSTRUCTIONS || rows < 2 { 1 } else { threads }
    }

    /// Number of elements of a register.
    fn block(&self, rows: usize) -> usize {
        if self.row <= BLOCK { (BLOCK / self.row * self.row).min(rows * self.row) } else { BLOCK }
    }

    /// The work of a run on at most `threads` threads.
    pub fn work(&self, threads: usize) -> Work {
        let parts = self.parts(threads);
        let mut work = Work::new(parts);
        let (n, rows) = (self.elements as f64, self.elements / self.row.max(1));
        // Each thread has its own registers.
        let registers = (self.float_registers + 2 * self.integer_registers) * self.block(rows) * parts;
        work.once("registers", DType::F32, 4.0 * registers as f64);
        for instruction in &self.instructions {
            let (family, dtype) = instruction.code.family();
            work.once(family, dtype, n);
        }
        for store in &self.stores {
            work.once("store", store.class.dtype(), n * store.class.bytes() as f64);
        }
        for reduction in &self.reductions {
            work.once("reduce_row", reduction.class.dtype(), n);
            work.once("row", reduction.class.dtype(), rows as f64);
        }
        for load in &self.loads {
            let dtype = load.class.dtype();
            let Some(&(inner, stride)) = load.runs.last() else {
                work.once("load_repeated", dtype, n);
                continue;
            };
            if load.runs.len() > 1 || stride != 1 {
                work.once("run", dtype, n / inner as f64);
            }
            match stride {
                0 => work.once("load_repeated", dtype, n),
                1 => {
                    // Elements that are read repeatedly stay in the cache, so they cost as much as loads of that size.
                    let distinct: usize = load.runs.iter().filter(|r| r.1 != 0).map(|r| r.0).product();
                    let times = n / distinct.max(1) as f64;
                    work.add(Term { times, ..Term::once("load", dtype, [(distinct * load.class.bytes()) as f64]) });
                }
                _ => work.once("load_strided", dtype, n),
            }
        }
        work
    }

    fn bytes_per_row(&self, output: usize) -> usize {
        let stored = self.stores.iter().find(|s| s.output == output).map(|s| self.row * s.class.bytes());
        let reduced = || self.reductions.iter().find(|r| r.output == output).map(|r| r.class.bytes());
        stored.or_else(reduced).unwrap_or(0)
    }

    fn run_part(&self, inputs: &[&Storage], part: Part<'_>) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has the features for which the function is compiled.
            unsafe { self.run_part_avx2(inputs, part) };
            return;
        }
        self.run_blocks::<false>(inputs, part);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn run_part_avx2(&self, inputs: &[&Storage], part: Part<'_>) {
        self.run_blocks::<true>(inputs, part);
    }

    #[inline(always)]
    fn run_blocks<const FMA: bool>(&self, inputs: &[&Storage], mut part: Part<'_>) {
        let block = self.block(part.rows);
        let mut registers = Registers {
            floats: vec![vec![0.0; block]; self.float_registers],
            integers: vec![vec![0; block]; self.integer_registers],
        };
        for &(register, value) in &self.float_constants {
            registers.floats[register as usize].fill(value);
        }
        for &(register, value) in &self.integer_constants {
            registers.integers[register as usize].fill(value);
        }
        let base = part.first * self.row;
        let total = part.rows * self.row;
        let mut totals: Vec<Total> = self.reductions.iter().map(Total::new).collect();
        let mut at = 0;
        while at < total {
            // Rows longer than a block are split; no block spans two of them.
            let in_row = at % self.row;
            let n = if self.row <= BLOCK { block.min(total - at) } else { block.min(self.row - in_row) };
            for load in &self.loads {
                self.load(load, inputs, &part.outputs, base, at, n, &mut registers);
            }
            for instruction in &self.instructions {
                registers.execute::<FMA>(instruction, n);
            }
            for store in &self.stores {
                with_class!(store.class, T => {
                    let target = &mut bytemuck::cast_slice_mut::<u8, T>(part.outputs[store.output])[at..at + n];
                    if store.class.is_integer() {
                        let source = &registers.integers[store.register as usize][..n];
                        target.iter_mut().zip(source).for_each(|(t, &x)| *t = T::from_i64(x));
                    } else {
                        let source = &registers.floats[store.register as usize][..n];
                        target.iter_mut().zip(source).for_each(|(t, &x)| *t = T::from_f32(x));
                    }
                });
            }
            for (reduction, total) in self.reductions.iter().zip(&mut totals) {
                let mut done = 0;
                while done < n {
                    let length = (n - done).min(self.row);
                    total.add(reduction, &registers, done, length);
                    done += length;
                    if (at + done) % self.row == 0 {
                        total.finish(reduction, part.outputs[reduction.output], (at + done) / self.row - 1);
                    }
                }
            }
            at += n;
        }
    }

    /// Fills a register with the elements `base + at ..` of a load.
    #[inline(always)]
    fn load(
        &self,
        load: &Load,
        inputs: &[&Storage],
        outputs: &[&mut [u8]],
        base: usize,
        at: usize,
        n: usize,
        registers: &mut Registers,
    ) {
        with_class!(load.class, T => {
            let (source, first): (&[T], usize) = match load.source {
                Source::Input(i) => (inputs[i].slice(), base + at),
                Source::InPlace(o) => (bytemuck::cast_slice(&*outputs[o]), at),
            };
            if load.class.is_integer() {
                let target = &mut registers.integers[load.register as usize][..n];
                read(target, source, load, first, load_integers, |x: T| x.to_i64());
            } else {
                let target = &mut registers.floats[load.register as usize][..n];
                read(target, source, load, first, load_floats, |x: T| x.to_f32());
            }
        })
    }
}

/// Reads `target.len()` elements from linear position `first` of a load.
#[inline(always)]
fn read<R: Copy, T: Element>(
    target: &mut [R],
    source: &[T],
    load: &Load,
    first: usize,
    many: impl Fn(&mut [R], &[T]),
    one: impl Fn(T) -> R,
) {
    match load.runs.as_slice() {
        [] => target.fill(one(source[load.offset])),
        [(_, 1)] => many(target, &source[load.offset + first..]),
        runs => {
            let (&(inner, stride), outer) = match runs.split_last() {
                Some(split) => split,
                None => return,
            };
            let mut within = first % inner;
            let mut row = first / inner;
            let mut done = 0;
            while done < target.len() {
                let mut position = load.offset;
                let mut index = row;
                for &(size, stride) in outer.iter().rev() {
                    position += index % size * stride;
                    index /= size;
                }
                let n = (inner - within).min(target.len() - done);
                let part = &mut target[done..done + n];
                let start = position + within * stride;
                match stride {
                    0 => part.fill(one(source[start])),
                    1 => many(part, &source[start..start + n]),
                    _ => {
                        let strided = source[start..].iter().step_by(stride);
                        part.iter_mut().zip(strided).for_each(|(t, &x)| *t = one(x));
                    }
                }
                done += n;
                within = 0;
                row += 1;
            }
        }
    }
}

/// The running reduction of a row.
struct Total {
    float: f64,
    integer: i64,
}

impl Total {
    fn new(reduction: &RowReduction) -> Total {
        Total { float: neutral(reduction.reducer), integer: integer_neutral(reduction.reducer, reduction.dtype) }
    }

    #[inline(always)]
    fn add(&mut self, reduction: &RowReduction, registers: &Registers, first: usize, length: usize) {
        let register = reduction.register as usize;
        if reduction.class.is_integer() {
            for &x in &registers.integers[register][first..first + length] {
                self.integer = integer_binary(reduction.reducer.combine(), self.integer, x, reduction.dtype);
            }
        } else {
            let row = reduce_row(reduction.reducer, &registers.floats[register][first..first + length]);
            self.float = combine(reduction.reducer, self.float, row);
        }
    }

    #[inline(always)]
    fn finish(&mut self, reduction: &RowReduction, output: &mut [u8], row: usize) {
        with_class!(reduction.class, T => {
            let target = &mut bytemuck::cast_slice_mut::<u8, T>(output)[row];
            *target = if reduction.class.is_integer() {
                T::from_i64(wrap(self.integer, reduction.dtype))
            } else {
                T::from_f32(round_float(self.float as f32, reduction.dtype))
            };
        });
        *self = Total::new(reduction);
    }
}

/// The neutral element of an integer reduction, as a stored integer.
pub(crate) fn integer_neutral(reducer: Reducer, dtype: DType) -> i64 {
    if dtype.is_integer() { integer_from_f64(reducer.neutral(dtype), dtype) } else { 0 }
}
