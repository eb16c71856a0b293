//! A tensor shared by the threads of a collective, each of which works on elements of its own. Every member writes its
//! part of all results in place, so that no byte of a large tensor crosses memory more often than necessary.

use crate::arena::Storage;
use bytemuck::Pod;
use std::ops::Range;

/// A tensor of one device that other threads also write, kept until the last of them drops it.
#[derive(Debug)]
pub struct SharedTensor {
    storage: Storage,
    first: *mut u8,
}

// SAFETY: `first` points into the heap block that `storage` owns, which moves with `SharedTensor`. Only `SharedTensor::part`
// dereferences it, and its callers guarantee that parts in use at the same time do not overlap.
unsafe impl Send for SharedTensor {}
// SAFETY: as above.
unsafe impl Sync for SharedTensor {}

impl SharedTensor {
    pub fn new(mut storage: Storage) -> SharedTensor {
        let first = storage.slice_mut::<u8>().as_mut_ptr();
        SharedTensor { storage, first }
    }

    /// A mutable slice of the elements.
    ///
    /// # Safety
    ///
    /// While the slice is alive, no overlapping part may be alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part<T: Pod>(&self, range: Range<usize>) -> &mut [T] {
        let elements = self.storage.bytes() / size_of::<T>();
        assert!(range.start <= range.end && range.end <= elements, "a part lies within its tensor");
        // SAFETY: the block holds this range, checked above, and the caller has exclusive access to it. The block is
        // aligned to eight bytes, and no element needs more.
        unsafe { std::slice::from_raw_parts_mut(self.first.cast::<T>().add(range.start), range.len()) }
    }

    /// Returns the tensor once no other thread shares it.
    pub(crate) fn take_back(self) -> Storage {
        self.storage
    }
}
