//! A vector that grows in chunks. Elements never move, so growing holds the depot's lock only briefly and never needs
//! memory for a second copy.

use std::ops::{Index, IndexMut};

use super::policy::SlotId;

/// Number of elements per chunk.
const CHUNK: usize = 4096;

/// A vector in chunks; see the module.
#[derive(Debug)]
pub(super) struct Chunked<T> {
    chunks: Vec<Box<[T]>>,
    fill: T,
}

impl<T: Copy> Chunked<T> {
    /// Makes an empty vector. New elements are `fill`.
    pub(super) const fn new(fill: T) -> Self {
        Self { chunks: Vec::new(), fill }
    }

    /// Grows the vector until it has an element `at`.
    pub(super) fn reach(&mut self, at: SlotId) {
        while self.chunks.len() <= at as usize / CHUNK {
            self.chunks.push(vec![self.fill; CHUNK].into_boxed_slice());
        }
    }

    /// Returns the element if the vector reaches that far.
    pub(super) fn get(&self, at: SlotId) -> Option<T> {
        Some(self.chunks.get(at as usize / CHUNK)?[at as usize % CHUNK])
    }

    /// Returns `len` elements from `at` on. The vector must reach that far, `len` must be a power of two that is not larger
    /// than a chunk, and `at` a multiple of `len`.
    pub(super) fn piece_mut(&mut self, at: SlotId, len: usize) -> &mut [T] {
        &mut self.chunks[at as usize / CHUNK][at as usize % CHUNK..][..len]
    }
}

impl<T> Index<SlotId> for Chunked<T> {
    type Output = T;

    fn index(&self, at: SlotId) -> &T {
        &self.chunks[at as usize / CHUNK][at as usize % CHUNK]
    }
}

impl<T> IndexMut<SlotId> for Chunked<T> {
    fn index_mut(&mut self, at: SlotId) -> &mut T {
        &mut self.chunks[at as usize / CHUNK][at as usize % CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reaches_as_far_as_requested_and_elements_stay_in_place() {
        let mut chunked = Chunked::new(7u8);
        assert_eq!(chunked.get(0), None);
        chunked.reach(0);
        chunked[0] = 1;
        let place = std::ptr::from_ref(&chunked[0]);
        chunked.reach(3 * CHUNK as SlotId);
        assert_eq!((chunked[0], chunked.get(3 * CHUNK as SlotId)), (1, Some(7)));
        assert_eq!((chunked.get(4 * CHUNK as SlotId), std::ptr::from_ref(&chunked[0])), (None, place));
    }
}
