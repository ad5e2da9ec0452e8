//! Slots in the hands of this process: one that is being filled, and one that is read. Both end with their value (P4).

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

/// A slot that is being filled. Dropping it without publishing gives it back: nobody ever saw it (P1).
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
    /// The memory must be a slot that was made for filling just now, and `lease` the session's lease on it.
    pub(super) unsafe fn new(
        session: Arc<Session>,
        lease: LeaseId,
        key: BlockKey,
        buf: SlotBuf,
        block_bytes: usize,
    ) -> Self {
        // SAFETY: by the caller's word the slot is being filled by this session only.
        let memory = unsafe { Writable::new(buf) };
        Self { session, lease, key, memory, block_bytes, over: false }
    }

    /// Bytes of the block.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The block's key.
    pub const fn key(&self) -> BlockKey {
        self.key
    }

    /// Bytes `start..end`, to be received into; cut at the slot's end.
    pub fn io_slices_mut(&mut self, start: usize, end: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
        self.memory.io_slices_mut(start, end)
    }

    /// Bytes `start..end`.
    pub fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        self.memory.slices(start, end)
    }

    /// The memory by address, for devices that write it themselves. They must have ended before this value does: then
    /// the memory is somebody else's (P4).
    pub const fn memory(&self) -> &SlotBuf {
        self.memory.memory()
    }

    /// Copies bytes to `start`; what does not fit into the block is an error.
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

    /// All bytes are there: the block is visible from now on. `crc64` where it is known.
    pub fn seal(mut self, crc64: Option<u64>) -> Result<()> {
        self.over = true;
        let request = Request::Commit { leases: vec![self.lease], shards: ShardSet::All, crc64 };
        let outcome = self.session.runner().ask(self.session.owner(), request).map(drop);
        if outcome.is_err() {
            release(&self.session, self.lease);
        }
        outcome
    }

    /// All bytes are there: the value takes the place of what was under its key and under `others`, at once; who reads
    /// that keeps it until they let go. `others` is called under the machine's lock.
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

/// Gives a lease back, if it is still there.
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

/// A block that is leased: its bytes stay as they are for as long as this value lives, whatever is stored or removed
/// meanwhile.
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
        // SAFETY: by the caller's word nobody writes the slot while the lease lasts.
        let memory = unsafe { Readable::new(buf) };
        Self { session, lease, memory, block_bytes, crc64 }
    }

    /// Bytes of the block.
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes `start..end`, to be sent; cut at the slot's end.
    pub fn io_slices(&self, start: usize, end: usize) -> SmallVec<[IoSlice<'_>; 4]> {
        self.memory.io_slices(start, end)
    }

    /// Bytes `start..end`.
    pub fn slices(&self, start: usize, end: usize) -> SmallVec<[&[u8]; 4]> {
        self.memory.slices(start, end)
    }

    /// The memory by address, for devices that read it themselves; it stays leased only while this value lives.
    pub const fn memory(&self) -> &SlotBuf {
        self.memory.memory()
    }

    /// CRC-64/NVME of the block: as it was when the block was stored, where that is known, else computed now.
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
