//! A slot's memory as slices, for one writer or for readers.

use std::io::{IoSlice, IoSliceMut};

use kvdepot_io::SlotBuf;
use smallvec::SmallVec;

/// The memory of a slot being filled, which nothing else touches while this value lives.
#[derive(Debug)]
pub(crate) struct Writable(SlotBuf);

/// The memory of a leased slot, which nothing writes while this value lives.
#[derive(Debug)]
pub(crate) struct Readable(SlotBuf);

impl Writable {
    /// # Safety
    /// The slot must be in the phase `Filling`, and the caller its only dumper, while the value lives.
    pub(crate) const unsafe fn new(buf: SlotBuf) -> Self {
        Self(buf)
    }

    /// Returns bytes `start..end` of the slot, to read into.
    pub(crate) fn io_slices_mut(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        let runs = self.0.slice(start, end);
        // SAFETY: the runs are mapped while `self` lives, do not overlap, and are ours alone by the contract of `new`;
        // the exclusive borrow of `self` keeps other slices away.
        runs.iter()
            .map(|r| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(r.ptr, r.len) }))
            .collect()
    }

    /// Returns the memory itself, for devices that write it by address.
    pub(crate) const fn memory(&self) -> &SlotBuf {
        &self.0
    }

    /// Returns bytes `start..end` of the slot.
    pub(crate) fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        let runs = self.0.slice(start, end);
        // SAFETY: as in `io_slices_mut`; the shared borrow allows no writes.
        runs.iter().map(|r| unsafe { std::slice::from_raw_parts(r.ptr, r.len) }).collect()
    }
}

impl Readable {
    /// # Safety
    /// The slot must be sealed and leased while the value lives: then nothing writes it (P1).
    pub(crate) const unsafe fn new(buf: SlotBuf) -> Self {
        Self(buf)
    }

    /// Returns bytes `start..end` of the slot.
    pub(crate) fn io_slices(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        self.slices(start, end).into_iter().map(IoSlice::new).collect()
    }

    /// Returns bytes `start..end` of the slot.
    pub(crate) fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        let runs = self.0.slice(start, end);
        // SAFETY: the runs are mapped while `self` lives, and nothing writes them by the contract of `new`.
        runs.iter().map(|r| unsafe { std::slice::from_raw_parts(r.ptr, r.len) }).collect()
    }

    /// Returns the memory itself, for devices that read it by address.
    pub(crate) const fn memory(&self) -> &SlotBuf {
        &self.0
    }
}
