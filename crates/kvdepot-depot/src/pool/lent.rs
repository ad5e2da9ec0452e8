//! A slot's memory in the hands of one writer or of readers, as slices.

use std::io::{IoSlice, IoSliceMut};

use kvdepot_io::SlotBuf;
use smallvec::SmallVec;

/// Memory that nobody else touches until this value is gone: a slot that is being filled.
#[derive(Debug)]
pub(crate) struct Writable(SlotBuf);

/// Memory that nobody writes until this value is gone: a slot that is leased.
#[derive(Debug)]
pub(crate) struct Readable(SlotBuf);

impl Writable {
    /// # Safety
    /// The slot must be in the phase `Filling`, and the caller its only dumper, for as long as the value lives.
    pub(crate) const unsafe fn new(buf: SlotBuf) -> Self {
        Self(buf)
    }

    /// Bytes `start..end` of the slot, to be read into.
    pub(crate) fn io_slices_mut(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        let runs = self.0.slice(start, end);
        // SAFETY: the runs are mapped while `self` lives, do not overlap, and are ours alone by the contract of `new`;
        // the exclusive borrow of `self` keeps other slices away.
        runs.iter()
            .map(|r| IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(r.ptr, r.len) }))
            .collect()
    }

    /// The memory itself, for devices that write it by address.
    pub(crate) const fn memory(&self) -> &SlotBuf {
        &self.0
    }

    /// Bytes `start..end` of the slot.
    pub(crate) fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        let runs = self.0.slice(start, end);
        // SAFETY: as in `io_slices_mut`; the shared borrow allows no writes.
        runs.iter().map(|r| unsafe { std::slice::from_raw_parts(r.ptr, r.len) }).collect()
    }
}

impl Readable {
    /// # Safety
    /// The slot must be sealed and leased for as long as the value lives: then nobody writes it (P1).
    pub(crate) const unsafe fn new(buf: SlotBuf) -> Self {
        Self(buf)
    }

    /// Bytes `start..end` of the slot.
    pub(crate) fn io_slices(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        self.slices(start, end).into_iter().map(IoSlice::new).collect()
    }

    /// Bytes `start..end` of the slot.
    pub(crate) fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        let runs = self.0.slice(start, end);
        // SAFETY: the runs are mapped while `self` lives, and nobody writes them by the contract of `new`.
        runs.iter().map(|r| unsafe { std::slice::from_raw_parts(r.ptr, r.len) }).collect()
    }

    /// The memory itself, for devices that read it by address.
    pub(crate) const fn memory(&self) -> &SlotBuf {
        &self.0
    }
}
