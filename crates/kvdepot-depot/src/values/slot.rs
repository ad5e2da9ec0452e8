//! A value being stored, and one being read.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use kvdepot_core::{BlockHash, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;
use smallvec::SmallVec;

use super::Shared;
use super::class::{END_BYTES, End};
use crate::direct::{ReadSlot, WriteSlot};

/// A slot to receive a value into. Dropping it without publishing changes nothing (P1).
#[derive(Debug)]
pub struct ValueSlot {
    slot: WriteSlot,
    class: usize,
    end: End,
    shared: Arc<Shared>,
}

impl ValueSlot {
    pub(super) const fn new(slot: WriteSlot, class: usize, end: End, shared: Arc<Shared>) -> Self {
        Self { slot, class, end, shared }
    }

    /// Returns the length of the value.
    pub const fn value_bytes(&self) -> usize {
        self.end.value_bytes as usize
    }

    /// Returns bytes `start..end` of the value, to receive into.
    pub fn io_slices_mut(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        let end = end.min(self.value_bytes());
        self.slot.io_slices_mut(start.min(end), end)
    }

    /// Returns the memory, for devices that write it by address; the value is its first `value_bytes` bytes. A device
    /// must have finished before this value is published or dropped (P4).
    pub const fn memory(&self) -> &SlotBuf {
        self.slot.memory()
    }

    /// Publishes the value after all bytes have arrived: it replaces its predecessor in one step.
    pub fn publish(mut self) -> Result<()> {
        let class_bytes = self.shared.classes[self.class].bytes as usize;
        if self.shared.has_tiers {
            // The slot may be written to a file: the bytes after the value must not be those of another one (P8).
            let start = self.value_bytes();
            self.slot.io_slices_mut(start, class_bytes).iter_mut().for_each(|piece| piece.fill(0));
        }
        self.slot.write_at(class_bytes, &self.end.encode())?;
        let Self { slot, class, end, shared } = self;
        let _move = shared.moves.begin();
        // Looked up at the moment of replacing: everything that became visible earlier has marked its class.
        slot.replace(|| shared.keys(BlockHash(end.hash), shared.classes_to_ask() & !(1 << class)))
    }
}

/// A leased value: it does not change while this lives, whatever is stored under its key meanwhile.
#[derive(Debug)]
pub struct Value {
    slot: ReadSlot,
    end: End,
}

impl Value {
    pub(super) fn new(slot: ReadSlot, class_bytes: u64, hash: BlockHash) -> Result<Self> {
        let mut bytes = [0; END_BYTES as usize];
        let mut at = 0;
        for piece in slot.slices(class_bytes as usize, (class_bytes + END_BYTES) as usize) {
            bytes[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        if at != bytes.len() {
            return Err(Error::new(ErrorKind::Corrupt, "a value's slot is too short"));
        }
        let end = End::decode(&bytes, class_bytes, hash.0)?;
        Ok(Self { slot, end })
    }

    /// Returns the length of the value.
    pub const fn len(&self) -> usize {
        self.end.value_bytes as usize
    }

    /// Returns whether the value has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.end.value_bytes == 0
    }

    pub(super) const fn stamp(&self) -> u64 {
        self.end.stamp
    }

    /// Returns bytes `start..end` of the value, to send.
    pub fn io_slices(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        let end = end.min(self.len());
        self.slot.io_slices(start.min(end), end)
    }

    /// Returns the memory, for devices that read it by address; the value is its first `len` bytes.
    pub const fn memory(&self) -> &SlotBuf {
        self.slot.memory()
    }
}
