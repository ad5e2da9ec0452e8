//! Queues of one tier: what it reads and writes, now and next.

use hashbrown::HashMap;

use super::super::event::Nanos;
use super::super::pace::Pace;
use super::super::queue::Queue;
use super::super::tiers::TierSet;
use super::hung::Hung;
use crate::eviction::SlotId;
use crate::limits::WRITES_IN_FLIGHT_MAX;

/// A read of a block by a tier.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) slot: SlotId,
    pub(super) deadline: Nanos,
    /// Whether a request asked for the block.
    pub(super) is_use: bool,
    /// The tiers that whoever began it allows. Those of all that wait for the block may deliver it, too.
    pub(super) tiers: TierSet,
    /// The tiers that were asked so far, and the one that is.
    pub(super) asked: TierSet,
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
    pub(super) reads_hung: Hung<()>,
    pub(super) writes: Queue<Write>,
    /// Late writes: after all others.
    pub(super) late: Queue<Write>,
    pub(super) writes_in_flight: HashMap<SlotId, Begun>,
    /// Bytes of these blocks.
    pub(super) bytes_in_flight: u64,
    /// Hung writes take no turn.
    pub(super) writes_hung: Hung<Write>,
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

    /// Takes a write that is about to end, and returns whether it had hung.
    pub(super) fn take_write(&mut self, slot: SlotId) -> Option<(Write, bool)> {
        if let Some(begun) = self.writes_in_flight.remove(&slot) {
            self.bytes_in_flight -= begun.bytes;
            return Some((begun.write, false));
        }
        self.writes_hung.take(slot).map(|write| (write, true))
    }

    /// Moves the writes that have hung by now out of those in flight. Returns them in the order of their slots.
    pub(super) fn take_hung(&mut self, now: Nanos) -> Vec<Write> {
        let hung = self.writes_in_flight.extract_if(|_, begun| begun.until <= now);
        let mut hung: Vec<Begun> = hung.map(|(_, begun)| begun).collect();
        hung.sort_unstable_by_key(|begun| begun.write.slot);
        for begun in &hung {
            self.bytes_in_flight -= begun.bytes;
            self.writes_hung.add(begun.write.slot, begun.write, begun.bytes);
        }
        hung.into_iter().map(|begun| begun.write).collect()
    }

    pub(super) fn next_write(&mut self) -> Option<Write> {
        self.writes.pop_front().or_else(|| self.late.pop_front())
    }
}
