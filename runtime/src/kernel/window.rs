//! Pooling and its gradient: loops over windows. Trailing dimensions outside the windows (channels last) run innermost.

use super::instruction::{combine, float_reducer, integer_binary};
use crate::arena::Storage;
use crate::element::{Class, Element, integer_from_f64, with_class};
use crate::thread_pool::{VISITED, spreads};
use altiplano_ir::dtype::DType;
use altiplano_ir::op::{Extremum, Reducer, WindowDim};
use altiplano_ir::work::Work;
use rayon::prelude::*;

/// Windows over a row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooling {
    dtype: DType,
    window: Vec<WindowDim>,
    operand: Vec<usize>,
    result: Vec<usize>,
    /// Elements of the trailing dimensions, whose window size is one.
    inner: usize,
    /// Elements of the leading dimensions, whose window size is one: independent parts.
    parts: usize,
}

impl Pooling {
    /// `operand` and `result` are the shapes on either side of the window.
    pub fn new(dtype: DType, window: &[WindowDim], operand: &[usize], result: &[usize]) -> Pooling {
        let first = window.iter().position(|w| !w.is_one()).unwrap_or(window.len());
        let last = window.iter().rposition(|w| !w.is_one()).map_or(first, |l| l + 1);
        Pooling {
            dtype,
            window: window[first..last].to_vec(),
            operand: operand[first..last].to_vec(),
            result: result[first..last].to_vec(),
            inner: operand[last..].iter().product(),
            parts: operand[..first].iter().product(),
        }
    }

    /// The work of a run of either kind, as elements of all windows.
    pub fn work(&self, family: &'static str, threads: usize) -> Work {
        let mut work = Work::new(if self.is_spread(threads) { threads.min(self.parts) } else { 1 });
        let visited = (self.result.iter().product::<usize>() * self.parts * self.positions()) as f64;
        work.once("window", DType::F32, visited);
        work.once(family, Class::of(self.dtype).dtype(), visited * self.inner as f64);
        work
    }

    /// Returns whether parts are spread over threads.
    fn is_spread(&self, threads: usize) -> bool {
        self.parts > 1 && spreads(threads, self.parts * self.part(&self.result) * self.positions(), VISITED)
    }

    /// Number of positions of a window.
    fn positions(&self) -> usize {
        self.window.iter().map(|w| w.size as usize).product()
    }

    /// Calls `visit(result position, operand positions of its window in order)`, both in units of inner runs.
    fn for_each(&self, mut visit: impl FnMut(usize, &[usize])) {
        // For each dimension and result, the operand positions of the window that are not padding.
        let along = |(d, w): (usize, &WindowDim)| -> Vec<Vec<usize>> {
            let n = self.operand[d] as u64;
            let of = |at: usize| (0..w.size).filter_map(|k| w.source(at as u64, k, n)).map(|x| x as usize).collect();
            (0..self.result[d]).map(of).collect()
        };
        let along: Vec<Vec<Vec<usize>>> = self.window.iter().enumerate().map(along).collect();
        let mut at = vec![0; self.window.len()];
        let (mut sources, mut next) = (Vec::new(), Vec::new());
        for r in 0..self.result.iter().product() {
            unravel(r, &self.result, &mut at);
            sources.clear();
            sources.push(0);
            // Combine them with those of the dimensions so far.
            for (d, along) in along.iter().enumerate() {
                next.clear();
                for s in &sources {
                    next.extend(along[at[d]].iter().map(|x| s * self.operand[d] + x));
                }
                std::mem::swap(&mut sources, &mut next);
            }
            visit(r, &sources);
        }
    }

    pub fn reduce(&self, reducer: Reducer, operand: &Storage, result: &mut Storage, threads: usize) {
        let class = Class::of(self.dtype);
        let (from, to) = (self.part(&self.operand), self.part(&self.result));
        if to == 0 {
            return;
        }
        with_class!(class, T => {
            let operand = operand.slice::<T>();
            let part = |(p, target): (usize, &mut [T])| {
                let source = &operand[p * from..(p + 1) * from];
                let neutral = reducer.neutral(self.dtype);
                if class.is_integer() {
                    let op = reducer.combine();
                    let neutral = integer_from_f64(neutral, self.dtype);
                    self.for_each(|r, sources| for c in 0..self.inner {
                        let values = sources.iter().map(|s| source[s * self.inner + c].to_i64());
                        let value = values.fold(neutral, |x, y| integer_binary(op, x, y, self.dtype));
                        target[r * self.inner + c] = T::from_i64(value);
                    });
                } else {
                    let n = self.inner;
                    let mut values = vec![neutral; n];
                    // A constant reducer lets the compiler specialise the inner loop.
                    macro_rules! pool {
                        ($reducer:expr) => {
                            self.for_each(|r, sources| {
                                values.fill(neutral);
                                for s in sources {
                                    let run = &source[s * n..(s + 1) * n];
                                    let each = values.iter_mut().zip(run);
                                    each.for_each(|(x, y)| *x = combine($reducer, *x, y.to_f32() as f64));
                                }
                                let run = target[r * n..(r + 1) * n].iter_mut().zip(&values);
                                run.for_each(|(to, x)| *to = T::from_f32(*x as f32));
                            })
                        };
                    }
                    match float_reducer(reducer, self.dtype) {
                        Reducer::Sum => pool!(Reducer::Sum),
                        Reducer::Product => pool!(Reducer::Product),
                        Reducer::Max | Reducer::Or => pool!(Reducer::Max),
                        Reducer::Min | Reducer::And => pool!(Reducer::Min),
                    }
                }
            };
            let result = &mut result.slice_mut::<T>()[..self.parts * to];
            if self.is_spread(threads) { result.par_chunks_mut(to).enumerate().for_each(part) }
            else { result.chunks_mut(to).enumerate().for_each(part) }
        });
    }

    /// `target = 0`; then adds each element of `updates` at the extremum of its window of `operand`.
    pub fn scatter(
        &self,
        select: Extremum,
        operand: &Storage,
        updates: &Storage,
        target: &mut Storage,
        threads: usize,
    ) {
        let (from, to) = (self.part(&self.operand), self.part(&self.result));
        if from == 0 {
            return;
        }
        with_class!(Class::of(self.dtype), T => {
            let (operand, updates) = (operand.slice::<T>(), updates.slice::<T>());
            let part = |(p, target): (usize, &mut [T])| {
                let source = &operand[p * from..(p + 1) * from];
                let updates = &updates[p * to..(p + 1) * to];
                target.fill(T::from_i64(0));
                let n = self.inner;
                let is_integer = Class::of(self.dtype).is_integer();
                let stays = |x: T, y: T| match (is_integer, select == Extremum::Max) {
                    (true, true) => x.to_i64() >= y.to_i64(),
                    (true, false) => x.to_i64() <= y.to_i64(),
                    (false, true) => x.to_f32() >= y.to_f32(),
                    (false, false) => x.to_f32() <= y.to_f32(),
                };
                // The source of each element's extremum so far.
                let mut best = vec![0usize; n];
                self.for_each(|r, sources| {
                    let Some((&first, rest)) = sources.split_first() else { return };
                    best.fill(first);
                    for &s in rest {
                        for (c, best) in best.iter_mut().enumerate() {
                            if !stays(source[*best * n + c], source[s * n + c]) {
                                *best = s;
                            }
                        }
                    }
                    for (c, (best, &update)) in best.iter().zip(&updates[r * n..(r + 1) * n]).enumerate() {
                        let sum = &mut target[best * n + c];
                        *sum = if is_integer {
                            T::from_i64(sum.to_i64().wrapping_add(update.to_i64()))
                        } else {
                            T::from_f32(sum.to_f32() + update.to_f32())
                        };
                    }
                });
            };
            let target = &mut target.slice_mut::<T>()[..self.parts * from];
            if self.is_spread(threads) { target.par_chunks_mut(from).enumerate().for_each(part) }
            else { target.chunks_mut(from).enumerate().for_each(part) }
        });
    }

    fn part(&self, shape: &[usize]) -> usize {
        shape.iter().product::<usize>() * self.inner
    }
}

fn unravel(mut position: usize, shape: &[usize], index: &mut [usize]) {
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        *i = position % n;
        position /= n;
    }
}
