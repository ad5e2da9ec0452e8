//! Queues of one tier: what it reads and writes, now and next.

use hashbrown::HashMap;

use super::super::event::Nanos;
use super::super::pace::Pace;
use super::super::queue::Queue;
use crate::eviction::SlotId;
use crate::limits::WRITES_IN_FLIGHT_MAX;

/// A tier is given no writes while hung ones pin more than this part of the pool.
const HUNG_DIVISOR: u64 = 8;

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

/// A write that a tier has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    pub(super) write: Write,
    pub(super) bytes: u64,
    /// It has hung if it has not ended by then.
    pub(super) until: Nanos,
}

/// The queues of one tier.
#[derive(Clone, Debug, Default)]
pub(super) struct TierFlow {
    pub(super) reads: Queue<Read>,
    pub(super) reads_in_flight: HashMap<SlotId, Read>,
    /// Reads that have hung, and the bytes of their slots, which stay pinned until they end (P4).
    pub(super) reads_hung: HashMap<SlotId, u64>,
    /// The total of these bytes.
    pub(super) read_bytes_hung: u64,
    pub(super) writes: Queue<Write>,
    /// Late writes: after all others.
    pub(super) late: Queue<Write>,
    pub(super) writes_in_flight: HashMap<SlotId, Begun>,
    /// Bytes of these blocks.
    pub(super) bytes_in_flight: u64,
    /// Writes that have hung: they count as failed, and take no turn. Their slots stay pinned until they end (P4).
    pub(super) writes_hung: HashMap<SlotId, Begun>,
    /// Bytes of these blocks.
    pub(super) bytes_hung: u64,
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

    /// Returns whether so many writes have hung that the tier is given none: each could pin another slot.
    pub(super) fn is_clogged(&self, pace: &Pace, pool_bytes: u64) -> bool {
        self.writes_hung.len() >= pace.writes_in_flight || self.bytes_hung > pool_bytes / HUNG_DIVISOR
    }

    /// The same for reads.
    pub(super) fn is_clogged_for_reads(&self, pace: &Pace, pool_bytes: u64) -> bool {
        self.reads_hung.len() >= pace.reads_in_flight || self.read_bytes_hung > pool_bytes / HUNG_DIVISOR
    }

    /// Takes a write that is about to end, and returns whether it had hung.
    pub(super) fn take_write(&mut self, slot: SlotId) -> Option<(Write, bool)> {
        if let Some(begun) = self.writes_in_flight.remove(&slot) {
            self.bytes_in_flight -= begun.bytes;
            return Some((begun.write, false));
        }
        let begun = self.writes_hung.remove(&slot)?;
        self.bytes_hung -= begun.bytes;
        Some((begun.write, true))
    }

    /// Moves the writes that have hung by now out of those in flight. Returns them in the order of their slots.
    pub(super) fn take_hung(&mut self, now: Nanos) -> Vec<Write> {
        let hung = self.writes_in_flight.extract_if(|_, begun| begun.until <= now);
        let mut hung: Vec<Begun> = hung.map(|(_, begun)| begun).collect();
        hung.sort_unstable_by_key(|begun| begun.write.slot);
        for begun in &hung {
            self.bytes_in_flight -= begun.bytes;
            self.bytes_hung += begun.bytes;
            self.writes_hung.insert(begun.write.slot, *begun);
        }
        hung.into_iter().map(|begun| begun.write).collect()
    }

    pub(super) fn next_write(&mut self) -> Option<Write> {
        self.writes.pop_front().or_else(|| self.late.pop_front())
    }
}
