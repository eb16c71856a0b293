//! A tensor that the threads of a collective work on at once, each on elements of its own: so every member writes its part of all
//! results where these lie, and no byte of a large tensor goes through memory more often than it must.

use crate::arena::Storage;
use bytemuck::Pod;
use std::ops::Range;

/// A tensor of one device that others write too, kept until the last of them lets go of it.
#[derive(Debug)]
pub struct Lent {
    storage: Storage,
    first: *mut u8,
}

// SAFETY: what `first` points to is the heap block that `storage` owns, which goes wherever `Lent` goes, and is only reached by
// `Lent::part`, whose callers answer for it that parts that are in use at once do not overlap.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Lent {
    pub fn new(mut storage: Storage) -> Lent {
        let first = storage.slice_mut::<u8>().as_mut_ptr();
        Lent { storage, first }
    }

    /// Some of the elements.
    ///
    /// # Safety
    ///
    /// As long as what is returned is used, no other part that overlaps with it may be.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part<T: Pod>(&self, range: Range<usize>) -> &mut [T] {
        let elements = self.storage.bytes() / size_of::<T>();
        assert!(range.start <= range.end && range.end <= elements, "a part of what is lent lies within it");
        // SAFETY: the block holds so many elements, of which the caller has these to itself; it is aligned to eight bytes, as no
        // element needs more.
        unsafe { std::slice::from_raw_parts_mut(self.first.cast::<T>().add(range.start), range.len()) }
    }

    /// The tensor, once nobody else has it.
    pub fn take_back(self) -> Storage {
        self.storage
    }
}
