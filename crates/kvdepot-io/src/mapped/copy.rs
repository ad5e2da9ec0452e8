//! Copies in steps that stay in the processor's caches until their checksum is computed.

use crc_fast::{CrcAlgorithm, Digest};
use kvdepot_core::{Error, ErrorKind, Result};

use super::Piece;
use crate::buf::MemRun;

/// Number of bytes copied before their checksum is computed.
pub(super) const STEP_BYTES: usize = 128 << 10;

/// Splits the memory of a piece into runs no longer than a step.
pub(super) fn steps(piece: Piece<'_>) -> Result<Vec<MemRun>> {
    let runs = piece.slot.slice(piece.from, piece.from + piece.bytes);
    if runs.iter().map(|run| run.len).sum::<usize>() != piece.bytes {
        return Err(Error::new(ErrorKind::Config, "a piece ends behind its slot")
            .with("slot_bytes", piece.slot.len())
            .with("from", piece.from)
            .with("bytes", piece.bytes));
    }
    let cut = |run: MemRun| {
        (0..run.len)
            .step_by(STEP_BYTES)
            .map(move |from| MemRun { ptr: run.ptr.wrapping_add(from), len: STEP_BYTES.min(run.len - from) })
    };
    Ok(runs.into_iter().flat_map(cut).collect())
}

/// The checksum of a piece, computed step by step in order.
pub(super) struct Sum(Digest);

impl Sum {
    pub(super) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    pub(super) fn add(&mut self, step: MemRun) {
        // SAFETY: the run lies in a slot, readable by the contract of `SlotBuf::new`, or in the mapping of the caller.
        self.0.update(unsafe { std::slice::from_raw_parts(step.ptr, step.len) });
    }

    pub(super) fn add_bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn end(self) -> u64 {
        self.0.finalize()
    }
}

/// Checks that `bytes` from `at` on lie within a medium of `size` bytes.
pub(super) fn within(size: u64, at: u64, bytes: usize) -> Result<()> {
    if at.checked_add(bytes as u64).is_some_and(|end| end <= size) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Config, "an access lies behind a medium's end")
        .with("offset_bytes", at)
        .with("bytes", bytes)
        .with("medium_bytes", size))
}
