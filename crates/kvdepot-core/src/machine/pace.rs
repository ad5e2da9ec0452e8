//! Limits of the work of one step, and of the commands in flight per tier.

use crate::limits::REMOVALS_OWED_MAX;

use super::batch::REQUEST_BLOCKS;

/// Limits of the work of one step and of the commands in flight. Together they keep a step below a few hundred
/// microseconds, if each slot, key and lease is a miss of the processor's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Blocks of one request that a step takes.
    pub(crate) request_blocks: usize,
    /// Slots that a step examines in search of a victim; an eviction counts as a few.
    pub(crate) eviction_looks: usize,
    /// Slots examined in one step of a walk over all of them.
    pub(crate) walk_slots: usize,
    /// Blocks removed in one step of a sweep.
    pub(crate) sweep_dooms: usize,
    /// Leases of an ended owner that end in one step.
    pub(crate) owner_leases: usize,
    /// Claims of an ended owner that are released in one step.
    pub(crate) owner_claims: usize,
    /// Loads of an ended owner that are answered in one step.
    pub(crate) owner_loads: usize,
    /// Requests that learn in one step of the arrival of a block that they wait for.
    pub(crate) waiters: usize,
    /// Places of a claim searched in the pool in one step.
    pub(crate) survey_places: usize,
    /// Places of a claim weighed in one step, by what is already known about them.
    pub(crate) weigh_places: usize,
    /// Leases of a claim taken or released in one step.
    pub(crate) claim_leases: usize,
    /// Pieces of a claim's work in one step, if one piece covers all of its places.
    pub(crate) small_pieces: usize,
    /// Claims that expire in one step.
    pub(crate) claims_expired: usize,
    /// Reads in flight per tier.
    pub(crate) reads_in_flight: usize,
    /// Writes in flight per tier.
    pub(crate) writes_in_flight: usize,
    /// Late writes queued per tier.
    pub(crate) late_writes: usize,
    /// Blocks that tiers are about to evict and that wait for their demotion.
    pub(crate) demotions_queued: usize,
    /// Of these, blocks read at a time, and written at a time by each tier.
    pub(crate) demotions_in_flight: usize,
    /// Slots next in the eviction order that are checked for tiers that get cold blocks.
    pub(crate) cold_slots: usize,
    /// Queue entries examined in one step: cancelled writes are dropped in pieces, and delayed ones queued again in pieces.
    pub(crate) queue_entries: usize,
    /// Ticks that the write of a replaced value waits for its predecessor's removal.
    pub(crate) replace_tries: u32,
    /// Ticks between two retries of removals that failed.
    pub(crate) removal_retry_ticks: u32,
    /// Removals that one part of a tier may owe before it is closed for the space that has the most of them.
    pub(crate) removals_owed: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            request_blocks: REQUEST_BLOCKS,
            eviction_looks: 2048,
            walk_slots: 2048,
            sweep_dooms: 128,
            owner_leases: 128,
            owner_claims: 128,
            owner_loads: 128,
            waiters: 32,
            survey_places: 512,
            weigh_places: 32_768,
            claim_leases: 256,
            small_pieces: 8,
            claims_expired: 16,
            reads_in_flight: 256,
            writes_in_flight: 32,
            late_writes: 4096,
            demotions_queued: 16_384,
            demotions_in_flight: 16,
            cold_slots: 256,
            queue_entries: 512,
            replace_tries: 100,
            removal_retry_ticks: 10,
            removals_owed: REMOVALS_OWED_MAX,
        }
    }
}

#[cfg(any(test, feature = "model"))]
impl Pace {
    /// Returns limits so small that work on a few blocks is cut into pieces, too.
    #[must_use]
    pub const fn small(seed: u64) -> Self {
        const fn pick(seed: u64, shift: u32, max: u64) -> usize {
            1 + ((seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> shift) % max) as usize
        }
        Self {
            request_blocks: pick(seed, 10, 4),
            eviction_looks: pick(seed, 14, 24),
            walk_slots: pick(seed, 8, 6),
            sweep_dooms: pick(seed, 12, 3),
            owner_leases: pick(seed, 16, 3),
            owner_claims: pick(seed, 18, 3),
            owner_loads: pick(seed, 20, 3),
            waiters: pick(seed, 22, 3),
            survey_places: pick(seed, 24, 6),
            weigh_places: pick(seed, 28, 6),
            claim_leases: pick(seed, 32, 5),
            small_pieces: pick(seed, 36, 8),
            claims_expired: pick(seed, 40, 2),
            reads_in_flight: pick(seed, 44, 6),
            writes_in_flight: pick(seed, 48, 4),
            late_writes: pick(seed, 38, 8),
            demotions_queued: pick(seed, 26, 6),
            demotions_in_flight: pick(seed, 46, 3),
            cold_slots: pick(seed, 42, 8),
            queue_entries: pick(seed, 52, 4),
            replace_tries: pick(seed, 56, 4) as u32,
            removal_retry_ticks: pick(seed, 34, 3) as u32,
            removals_owed: pick(seed, 30, 3),
        }
    }
}
