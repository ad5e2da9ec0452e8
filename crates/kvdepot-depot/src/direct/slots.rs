//! Slots held by this process: one being filled, and one being read. Each is released when its value is dropped (P4).

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use kvdepot_core::lease::LeaseId;
use kvdepot_core::machine::{Request, ShardSet};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;
use smallvec::SmallVec;

use crate::Session;
use crate::pool::{Readable, Writable};

/// A slot being filled. Dropping it without publishing releases it unseen (P1).
pub struct WriteSlot {
    session: Arc<Session>,
    lease: LeaseId,
    key: BlockKey,
    memory: Writable,
    block_bytes: usize,
    over: bool,
}

impl WriteSlot {
    /// # Safety
    /// The memory must be a slot just made for filling, and `lease` the session's lease on it.
    pub(super) unsafe fn new(
        session: Arc<Session>,
        lease: LeaseId,
        key: BlockKey,
        buf: SlotBuf,
        block_bytes: usize,
    ) -> Self {
        // SAFETY: by the caller's contract the slot is being filled by this session only.
        let memory = unsafe { Writable::new(buf) };
        Self { session, lease, key, memory, block_bytes, over: false }
    }

    /// Returns the size of the block in bytes.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns the block's key.
    pub const fn key(&self) -> BlockKey {
        self.key
    }

    /// Returns bytes `start..end` to receive into, cut at the slot's end.
    pub fn io_slices_mut(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        self.memory.io_slices_mut(start, end)
    }

    /// Returns bytes `start..end`.
    pub fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        self.memory.slices(start, end)
    }

    /// Returns the memory, for devices that write it by address. They must have finished before this value is dropped:
    /// then the memory gets another owner (P4).
    pub const fn memory(&self) -> &SlotBuf {
        self.memory.memory()
    }

    /// Copies bytes to `start`. Fails if they do not fit into the block.
    pub fn write_at(&mut self, start: usize, bytes: &[u8]) -> Result<()> {
        if start.checked_add(bytes.len()).is_none_or(|end| end > self.block_bytes) {
            return Err(Error::new(ErrorKind::Protocol, "bytes do not fit into their block")
                .with("start", start)
                .with("bytes", bytes.len())
                .with("block_bytes", self.block_bytes));
        }
        let mut rest = bytes;
        for mut piece in self.io_slices_mut(start, start + bytes.len()) {
            let (now, later) = rest.split_at(piece.len());
            piece.copy_from_slice(now);
            rest = later;
        }
        Ok(())
    }

    /// Seals the block after all bytes have arrived: it is visible from now on. `crc64` if it is known.
    pub fn seal(mut self, crc64: Option<u64>) -> Result<()> {
        self.over = true;
        let request = Request::Commit { leases: vec![self.lease], shards: ShardSet::All, crc64 };
        let outcome = self.session.runner().ask(self.session.owner(), request).map(drop);
        if outcome.is_err() {
            release(&self.session, self.lease);
        }
        outcome
    }

    /// Publishes the value after all bytes have arrived: it replaces those under its key and under `others` in one
    /// step. Readers of these keep them until they drop them. `others` is called under the machine's lock.
    pub(crate) fn replace(mut self, others: impl FnOnce() -> Vec<BlockKey>) -> Result<()> {
        self.over = true;
        let (lease, runner) = (self.lease, self.session.runner());
        let outcome =
            runner.ask_with(self.session.owner(), || Request::Publish { lease, others: others() }).map(drop);
        if outcome.is_err() {
            release(&self.session, self.lease);
        }
        outcome
    }
}

/// Releases a lease, if it still exists.
fn release(session: &Session, lease: LeaseId) {
    let _ = session.runner().ask(session.owner(), Request::Release { leases: vec![lease] });
}

impl Drop for WriteSlot {
    fn drop(&mut self) {
        if !self.over {
            release(&self.session, self.lease);
        }
    }
}

impl fmt::Debug for WriteSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteSlot({}, {} bytes)", self.key, self.block_bytes)
    }
}

/// A leased block: its bytes do not change while this value lives, whatever is stored or removed meanwhile.
pub struct ReadSlot {
    session: Arc<Session>,
    lease: LeaseId,
    memory: Readable,
    block_bytes: usize,
    crc64: Option<u64>,
}

impl ReadSlot {
    /// # Safety
    /// The memory must be a sealed slot, and `lease` the session's lease on it.
    pub(super) unsafe fn new(
        session: Arc<Session>,
        lease: LeaseId,
        buf: SlotBuf,
        block_bytes: usize,
        crc64: Option<u64>,
    ) -> Self {
        // SAFETY: by the caller's contract nothing writes the slot while the lease lasts.
        let memory = unsafe { Readable::new(buf) };
        Self { session, lease, memory, block_bytes, crc64 }
    }

    /// Returns the size of the block in bytes.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Returns bytes `start..end` to send, cut at the slot's end.
    pub fn io_slices(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        self.memory.io_slices(start, end)
    }

    /// Returns bytes `start..end`.
    pub fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        self.memory.slices(start, end)
    }

    /// Returns the memory, for devices that read it by address. It stays leased only while this value lives.
    pub const fn memory(&self) -> &SlotBuf {
        self.memory.memory()
    }

    /// Returns the CRC-64/NVME of the block: as of when it was stored, if that is known, else computed now.
    pub fn crc64(&self) -> u64 {
        if let Some(crc64) = self.crc64 {
            return crc64;
        }
        let crc64 = kvdepot_io::checksum::crc64_slot(self.memory.memory(), 0, self.block_bytes).unwrap_or(0);
        let request = Request::SetChecksum { lease: self.lease, crc64 };
        let _ = self.session.runner().ask(self.session.owner(), request);
        crc64
    }
}

impl Drop for ReadSlot {
    fn drop(&mut self) {
        release(&self.session, self.lease);
    }
}

impl fmt::Debug for ReadSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadSlot({} bytes)", self.block_bytes)
    }
}
