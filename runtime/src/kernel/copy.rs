//! Copies between strided layouts: transposes, slices, concatenation, padding, and the parts of collectives.

use crate::thread_pool::{COPIED, spreads};
use altiplano_ir::dtype::DType;
use altiplano_ir::work::Work;
use bytemuck::Pod;
use rayon::prelude::*;

/// Side of the square tiles of a transposing copy, so that both sides stay within cache lines.
const TILE: usize = 16;

/// A copy of a rectangle: per dimension its size, its stride in the source and its stride in the target.
#[derive(Clone, Debug, PartialEq)]
pub struct Copy {
    pub source_offset: usize,
    pub target_offset: usize,
    /// `(size, source stride, target stride)`, merged and ordered by falling target stride.
    dims: Vec<(usize, usize, usize)>,
    empty: bool,
}

impl Copy {
    pub fn new(
        source_offset: usize,
        target_offset: usize,
        dims: impl IntoIterator<Item = (usize, usize, usize)>,
    ) -> Copy {
        let mut merged: Vec<(usize, usize, usize)> = Vec::new();
        let mut empty = false;
        let mut sorted: Vec<_> = dims.into_iter().inspect(|d| empty |= d.0 == 0).filter(|d| d.0 != 1).collect();
        sorted.sort_by_key(|d| std::cmp::Reverse(d.2));
        for (size, s, t) in sorted {
            match merged.last_mut() {
                Some(last) if last.1 == s * size && last.2 == t * size => *last = (last.0 * size, s, t),
                _ => merged.push((size, s, t)),
            }
        }
        Copy { source_offset, target_offset, dims: merged, empty }
    }

    pub fn run<T: Pod>(&self, source: &[T], target: &mut [T]) {
        if !self.empty {
            copy_dims(&self.dims, &source[self.source_offset..], &mut target[self.target_offset..]);
        }
    }

    /// The work of a run with elements of `bytes` bytes on at most `threads` threads.
    pub fn work(&self, bytes: usize, threads: usize) -> Work {
        let mut work = Work::new(self.parts(threads));
        let elements: usize = self.dims.iter().map(|d| d.0).product();
        let dtype = match bytes {
            1 => DType::Bool,
            2 => DType::F16,
            4 => DType::F32,
            _ => DType::I64,
        };
        let (n, moved) = (elements as f64, (elements * bytes) as f64);
        let Some((&(inner, source, target), outer)) = self.dims.split_last().filter(|_| !self.empty) else {
            return work;
        };
        if target == 1 && source > 1 && outer.iter().any(|d| d.1 == 1) {
            work.once("transpose", dtype, n);
            return work;
        }
        if !outer.is_empty() {
            work.once("copy_run", DType::F32, n / inner as f64);
        }
        match (source, target) {
            (1, 1) => work.once("copy", DType::F32, moved),
            (0, 1) => work.once("fill", DType::F32, moved),
            _ => work.once("copy_strided", dtype, n),
        }
        work
    }

    /// Number of threads that a run uses. It is more than one only if the major dimension covers disjoint runs of the
    /// target.
    fn parts(&self, threads: usize) -> usize {
        let elements: usize = self.dims.iter().map(|d| d.0).product();
        let disjoint = |(&(size, _, t), rest): (&(usize, usize, usize), &[(usize, usize, usize)])| {
            size > 1 && rest.iter().map(|d| (d.0 - 1) * d.2).sum::<usize>() < t
        };
        let large = !self.empty && spreads(threads, elements, COPIED);
        if large && self.dims.split_first().is_some_and(disjoint) { threads } else { 1 }
    }

    /// [`Copy::run`] with the major dimension spread over threads.
    pub(crate) fn run_parallel<T: Pod + Send + Sync>(&self, source: &[T], target: &mut [T], threads: usize) {
        match self.dims.split_first() {
            Some((&(size, s, t), _)) if self.parts(threads) > 1 => {
                let share = size.div_ceil(threads);
                let source = &source[self.source_offset..];
                target[self.target_offset..].par_chunks_mut(share * t).take(size.div_ceil(share)).enumerate().for_each(
                    |(i, part)| {
                        let mut dims = self.dims.clone();
                        dims[0].0 = share.min(size - i * share);
                        copy_dims(&dims, &source[i * share * s..], part);
                    },
                );
            }
            _ => self.run(source, target),
        }
    }
}

fn copy_dims<T: Pod>(dims: &[(usize, usize, usize)], source: &[T], target: &mut [T]) {
    match dims {
        [] => target[0] = source[0],
        [(n, 1, 1)] => target[..*n].copy_from_slice(&source[..*n]),
        [(n, 0, 1)] => target[..*n].fill(source[0]),
        [(n, s, 1)] => {
            target[..*n].iter_mut().zip(source.iter().step_by(*s)).for_each(|(t, &x)| *t = x);
        }
        [(n, s, t)] => {
            for i in 0..*n {
                target[i * t] = source[i * s];
            }
        }
        [(m, 1, t), (n, s, 1)] if *s > 1 => transpose(*m, *t, *n, *s, source, target),
        [(m, s, t), rest @ ..] => {
            // A dimension that is contiguous in the source goes next to the innermost one, for the tiles above.
            let inward = rest.len() > 1 && *s == 1 && rest[rest.len() - 1].1 > 1;
            if inward {
                let mut dims = rest.to_vec();
                dims.insert(dims.len() - 1, (*m, *s, *t));
                return copy_dims(&dims, source, target);
            }
            for i in 0..*m {
                copy_dims(rest, &source[i * s..], &mut target[i * t..]);
            }
        }
    }
}

/// `target[i * t + j] = source[i + j * s]` for `i < m`, `j < n`.
///
/// Tiles go through a small buffer, so that each line of either side is touched once. Otherwise, columns at a distance
/// of a power of two would evict each other.
fn transpose<T: Pod>(m: usize, t: usize, n: usize, s: usize, source: &[T], target: &mut [T]) {
    let mut buffer = [T::zeroed(); TILE * TILE];
    for i0 in (0..m).step_by(TILE) {
        let rows = TILE.min(m - i0);
        for j0 in (0..n).step_by(TILE) {
            let columns = TILE.min(n - j0);
            if rows == TILE && columns == TILE {
                // The same loops with constant lengths, for the compiler.
                for j in 0..TILE {
                    let from = i0 + (j0 + j) * s;
                    buffer[j * TILE..(j + 1) * TILE].copy_from_slice(&source[from..from + TILE]);
                }
                for i in 0..TILE {
                    let row = &mut target[(i0 + i) * t + j0..][..TILE];
                    (0..TILE).for_each(|j| row[j] = buffer[j * TILE + i]);
                }
                continue;
            }
            for j in 0..columns {
                let from = i0 + (j0 + j) * s;
                buffer[j * TILE..j * TILE + rows].copy_from_slice(&source[from..from + rows]);
            }
            for i in 0..rows {
                let row = &mut target[(i0 + i) * t + j0..][..columns];
                row.iter_mut().zip(buffer[i..].iter().step_by(TILE)).for_each(|(t, &x)| *t = x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_follow_the_strides() {
        // Permutations of [5, 33, 18] read from the source, written row major.
        let shape = [5usize, 33, 18];
        let strides = [33 * 18, 18, 1];
        let source: Vec<u32> = (0..shape.iter().product::<usize>() as u32).collect();
        for permutation in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let to: Vec<usize> = permutation.iter().map(|&d| shape[d]).collect();
            let target_strides = [to[1] * to[2], to[2], 1];
            let dims = permutation.iter().zip(target_strides).map(|(&d, t)| (shape[d], strides[d], t));
            let mut target = vec![0; source.len()];
            Copy::new(0, 0, dims).run_parallel(&source, &mut target, 2);
            let mut expected = Vec::new();
            for i in 0..to[0] {
                for j in 0..to[1] {
                    for k in 0..to[2] {
                        let at =
                            i * strides[permutation[0]] + j * strides[permutation[1]] + k * strides[permutation[2]];
                        expected.push(source[at]);
                    }
                }
            }
            assert_eq!(target, expected, "{permutation:?}");
        }
    }
}
