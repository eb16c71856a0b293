//! Index lists that map global tensors to the parts on devices. They cut parts out, join them, and give the messages of
//! transfers, which are cross products of such lists.

use crate::element::Element;
use crate::kernel::instruction::combine;
use crate::view::row_major;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Reducer;
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Call, Program};
use altiplano_ir::sharding::Sharding;
use bytemuck::Pod;

/// The elements of a tensor at the cross product of index lists, as contiguous runs.
pub(crate) struct Selection {
    /// Start and length of each run within the innermost group of dimensions.
    runs: Vec<(usize, usize)>,
    /// Offsets of the outer dimensions' indices.
    outer: Vec<Vec<usize>>,
    elements: usize,
}

impl Selection {
    /// `indices` has one list for each dimension of `shape`; all indices are below the dimension's size.
    pub(crate) fn new(shape: &[usize], indices: &[Vec<u64>]) -> Selection {
        let strides = row_major(shape);
        let elements = indices.iter().map(Vec::len).product();
        // Trailing dimensions that are selected whole belong to one run.
        let mut rank = shape.len();
        let mut length = 1;
        while rank > 0 && indices[rank - 1].len() == shape[rank - 1] && is_increasing(&indices[rank - 1]) {
            rank -= 1;
            length *= shape[rank];
        }
        let mut runs = vec![(0, length)];
        if rank > 0 {
            rank -= 1;
            runs.clear();
            for &i in &indices[rank] {
                let start = i as usize * strides[rank];
                match runs.last_mut() {
                    Some(last) if last.0 + last.1 == start => last.1 += length,
                    _ => runs.push((start, length)),
                }
            }
        }
        let offsets = |d: usize| indices[d].iter().map(|&i| i as usize * strides[d]).collect();
        Selection { runs, outer: (0..rank).map(offsets).collect(), elements }
    }

    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// Calls `visit(position in the tensor, position in the selection, length)` for each run.
    fn for_each(&self, mut visit: impl FnMut(usize, usize, usize)) {
        if self.elements == 0 {
            return;
        }
        let count: usize = self.outer.iter().map(Vec::len).product();
        let mut at = 0;
        for i in 0..count {
            let (mut base, mut rest) = (0, i);
            for offsets in self.outer.iter().rev() {
                base += offsets[rest % offsets.len()];
                rest /= offsets.len();
            }
            for &(start, length) in &self.runs {
                visit(base + start, at, length);
                at += length;
            }
        }
    }

    pub(crate) fn read<T: Pod>(&self, tensor: &[T], target: &mut [T]) {
        self.for_each(|t, s, n| target[s..s + n].copy_from_slice(&tensor[t..t + n]));
    }

    pub(crate) fn write<T: Pod>(&self, source: &[T], tensor: &mut [T]) {
        self.for_each(|t, s, n| tensor[t..t + n].copy_from_slice(&source[s..s + n]));
    }

    /// Like [`Selection::write`], but reduces into the existing elements.
    pub(crate) fn combine<T: Element>(&self, source: &[T], tensor: &mut [T], reducer: Reducer) {
        self.for_each(|t, s, n| {
            for (x, y) in tensor[t..t + n].iter_mut().zip(&source[s..s + n]) {
                *x = T::from_f32(combine(reducer, x.to_f32() as f64, y.to_f32() as f64) as f32);
            }
        });
    }
}

fn is_increasing(list: &[u64]) -> bool {
    list.iter().enumerate().all(|(i, &x)| i as u64 == x)
}

/// Marks the rows along dimension `dim` of a step's input that a device of a program reads. `read` has one entry for
/// each row of the global batch, in which microbatches follow each other.
pub fn mark_rows(program: &Program, position: u32, input: &str, dim: usize, read: &mut [bool]) {
    let coordinates = program.mesh.coordinates(position);
    let is_it = |buffer: &Buffer| matches!(&buffer.kind, BufferKind::Input { name } if name == input);
    for (id, buffer) in (0u32..).map(BufferId).zip(&program.buffers).filter(|(_, buffer)| is_it(buffer)) {
        // This device holds the neutral element; another device reads the rows.
        let Some(layout) = buffer.sharding.dims.get(dim) else { continue };
        if summand_of(&buffer.sharding, &coordinates).is_some() {
            continue;
        }
        let held = layout.global_indices(&program.mesh, &coordinates);
        let size = buffer.ty.shape[dim];
        let reads: Vec<bool> =
            program.bodies.iter().map(|body| body.reads.iter().any(|&(_, read)| read == id)).collect();
        for call in &program.schedule {
            let Call::Run { body, microbatch } = *call else { continue };
            if !reads.get(body as usize).copied().unwrap_or(false) {
                continue;
            }
            let shift = if size == read.len() as u64 { 0 } else { size * u64::from(microbatch.unwrap_or(0)) };
            for row in &held {
                if let Some(read) = read.get_mut((row + shift) as usize) {
                    *read = true;
                }
            }
        }
    }
}

/// The global indices that a device holds, per dimension.
pub(crate) fn held_indices(sharding: &Sharding, mesh: &Mesh, coordinates: &[u32]) -> Vec<Vec<u64>> {
    sharding.dims.iter().map(|d| d.global_indices(mesh, coordinates)).collect()
}

/// Returns whether a device holds a copy of the part of an earlier device along some unused axis.
pub(crate) fn is_replica(sharding: &Sharding, mesh: &Mesh, coordinates: &[u32]) -> bool {
    mesh.axis_ids().any(|a| {
        coordinates[a.0 as usize] != 0
            && !sharding.split_axes().any(|s| s == a)
            && !sharding.partial.iter().any(|p| p.0 == a)
    })
}

/// The reducer of a partial axis along which the device is not the first, if any.
pub(crate) fn summand_of(sharding: &Sharding, coordinates: &[u32]) -> Option<Reducer> {
    sharding.partial.iter().find(|(a, _)| coordinates[a.0 as usize] != 0).map(|&(_, r)| r)
}
