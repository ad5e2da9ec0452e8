//! Queues of one tier: what it reads and writes, now and next.

use hashbrown::HashMap;

use super::super::event::Nanos;
use super::super::pace::Pace;
use super::super::queue::Queue;
use crate::eviction::SlotId;
use crate::limits::WRITES_IN_FLIGHT_MAX;

/// A read of a block by a tier.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) slot: SlotId,
    pub(super) deadline: Nanos,
    /// Whether a request asked for the block.
    pub(super) is_use: bool,
}

/// A write of a block by a tier. It is cancelled when its slot was freed or the tier's bit left `to_write`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    pub(super) slot: SlotId,
    pub(super) serial: u32,
    /// Whether the tier has another value under this key, which must be removed first.
    pub(super) replaces: bool,
    /// Number of earlier tries.
    pub(super) tries: u32,
    /// The drain that it counts for.
    pub(super) drain: u64,
    /// Whether the block is not dirty for it.
    pub(super) late: bool,
}

/// The queues of one tier.
#[derive(Clone, Debug, Default)]
pub(super) struct TierFlow {
    pub(super) reads: Queue<Read>,
    pub(super) reads_in_flight: HashMap<SlotId, Read>,
    pub(super) writes: Queue<Write>,
    /// Late writes: after all others.
    pub(super) late: Queue<Write>,
    pub(super) writes_in_flight: HashMap<SlotId, Write>,
    /// Bytes of these blocks.
    pub(super) bytes_in_flight: u64,
    /// Bytes up to which more than the usual number of writes are in flight.
    pub(super) write_window_bytes: u64,
}

impl TierFlow {
    /// Returns whether another write may begin.
    pub(super) fn has_write_turn(&self, pace: &Pace) -> bool {
        let count = self.writes_in_flight.len();
        let fits = self.bytes_in_flight < self.write_window_bytes && count < WRITES_IN_FLIGHT_MAX;
        count < pace.writes_in_flight || fits
    }

    pub(super) fn next_write(&mut self) -> Option<Write> {
        self.writes.pop_front().or_else(|| self.late.pop_front())
    }
}
