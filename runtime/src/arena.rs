//! Memory of one device. Every tensor on a device is a [`Storage`] of its [`Arena`], which counts the bytes.
//!
//! The arena keeps freed blocks for the next tensor of the same size. A fresh block of megabytes costs a page fault
//! every 4 KiB, often more than the kernel that fills it.

use crate::element::Class;
use crate::error::KernelError;
use bytemuck::Pod;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts the bytes that a device holds and recycles freed blocks.
#[derive(Debug)]
pub struct Arena {
    held_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    limit_bytes: u64,
    pool: Mutex<Pool>,
}

#[derive(Debug, Default)]
struct Pool {
    /// Free blocks by length in words.
    free: BTreeMap<usize, Vec<Vec<u64>>>,
    free_bytes: u64,
}

/// The elements of one tensor, row major, in words of eight bytes so that every format is aligned.
#[derive(Debug)]
pub struct Storage {
    words: Vec<u64>,
    bytes: usize,
    arena: Arc<Arena>,
}

impl Arena {
    pub fn new(limit_bytes: Option<u64>) -> Arc<Arena> {
        Arc::new(Arena {
            held_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            limit_bytes: limit_bytes.unwrap_or(u64::MAX),
            pool: Mutex::default(),
        })
    }

    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Peak of the bytes held so far.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes that are held outside any [`Storage`].
    pub fn charge(&self, bytes: u64) -> Result<(), KernelError> {
        let held_bytes = self.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        if held_bytes.saturating_add(bytes) > self.limit_bytes {
            self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(KernelError::MemoryLimit { wanted_bytes: bytes, held_bytes, limit_bytes: self.limit_bytes });
        }
        self.peak_bytes.fetch_max(held_bytes + bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The inverse of [`Arena::charge`].
    fn discharge(&self, bytes: u64) {
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Allocates `elements` of a format. The memory is not cleared: it may hold the data of an earlier tensor.
    pub fn allocate(self: &Arc<Self>, class: Class, elements: usize) -> Result<Storage, KernelError> {
        let Some(bytes) = elements.checked_mul(class.bytes()) else {
            return Err(KernelError::OutOfMemory { wanted_bytes: u64::MAX });
        };
        self.charge(bytes as u64)?;
        let length = bytes.div_ceil(8);
        let recycled = {
            let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
            let block = pool.free.get_mut(&length).and_then(Vec::pop);
            if block.is_some() {
                pool.free_bytes -= 8 * length as u64;
            }
            block
        };
        let words = match recycled {
            Some(words) => words,
            None => {
                let mut words = Vec::new();
                if words.try_reserve_exact(length).is_err() {
                    self.discharge(bytes as u64);
                    return Err(KernelError::OutOfMemory { wanted_bytes: bytes as u64 });
                }
                words.resize(length, 0);
                words
            }
        };
        Ok(Storage { words, bytes, arena: self.clone() })
    }

    /// Makes a tensor of `bytes` bytes from words that already hold its elements.
    pub fn adopt(self: &Arc<Self>, words: Vec<u64>, bytes: usize) -> Result<Storage, KernelError> {
        if words.len() != bytes.div_ceil(8) {
            return Err(KernelError::MessageSize { expected: bytes.next_multiple_of(8), found: 8 * words.len() });
        }
        self.charge(bytes as u64)?;
        Ok(Storage { words, bytes, arena: self.clone() })
    }

    pub fn zeros(self: &Arc<Self>, class: Class, elements: usize) -> Result<Storage, KernelError> {
        let mut storage = self.allocate(class, elements)?;
        storage.words.fill(0);
        Ok(storage)
    }
}

impl Storage {
    /// The elements, viewed as `T`, which must have the format's size.
    pub fn slice<T: Pod>(&self) -> &[T] {
        &bytemuck::cast_slice(&self.words)[..self.bytes / size_of::<T>()]
    }

    pub(crate) fn slice_mut<T: Pod>(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes / size_of::<T>()]
    }

    /// The tensor's memory in words of eight bytes.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Copies the tensor into a new allocation.
    pub fn duplicate(&self, class: Class) -> Result<Storage, KernelError> {
        let mut copy = self.arena.allocate(class, self.bytes / class.bytes())?;
        copy.words.copy_from_slice(&self.words);
        Ok(copy)
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.arena.discharge(self.bytes as u64);
        let words = std::mem::take(&mut self.words);
        let bytes = 8 * words.len() as u64;
        let mut pool = self.arena.pool.lock().unwrap_or_else(PoisonError::into_inner);
        // The pool never grows beyond the peak of the bytes in use.
        if !words.is_empty() && pool.free_bytes + bytes <= self.arena.peak_bytes() {
            pool.free_bytes += bytes;
            pool.free.entry(words.len()).or_default().push(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An allocator that gives up would end the process, and a run with it.
    #[test]
    fn memory_that_the_system_has_not_is_an_error() {
        let arena = Arena::new(None);
        for elements in [1 << 60, usize::MAX] {
            let refused = arena.allocate(Class::F32, elements);
            assert!(matches!(refused, Err(KernelError::OutOfMemory { .. })), "{elements} elements");
        }
        assert_eq!(arena.held_bytes(), 0);
        assert_eq!(arena.allocate(Class::F32, 4).map(|storage| storage.slice::<f32>().len()), Ok(4));
    }
}
