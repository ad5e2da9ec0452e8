//! A block's life in the pool: events in, answers out, no clock and no I/O.
//!
//! ```text
//!                 shard_filled (all)            write_begun        write_ended(saved?)
//!   dumping ──▶ Filling ─────────▶ Sealed, dirty ───────▶ writing ───────────▶ Sealed, clean
//!                  │                    └──────────── seal_clean ────────────────▶ │ ▲
//!                  │ abandon                                                       │ │ fill_ended_ok
//!                  ▼                                                               │ │
//!             Quarantined ◀───────── abandon ───────────────────────── Fetching ───┼─┘ ◀── fetching
//!                  │                                                       │       │
//!                  │ quarantine_ended                          fill_failed │       │ evicted by the caller when
//!                  ▼                                                       ▼       ▼ no lease and no write holds it
//!               freeable  ◀────────────────────────────────────────────────┴──── gone
//!
//!   doom, at any point: never readable again, never written again; freeable when the filling has ended (or its
//!   quarantine has), and the last lease and the last write are over.
//! ```
//!
//! What holds at every moment: only a sealed block is readable (P1); bytes that somebody may still write or read
//! are not freeable (P4); a block is evictable only when nothing would be lost that a tier was to have.

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, ErrorKind, Result};
use crate::limits::SHARDS_MAX;

/// Where a block's bytes stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A client is writing shards into the slot.
    Filling,
    /// A tier is reading the block into the slot.
    Fetching,
    /// All bytes are there.
    Sealed,
    /// Given up while bytes may still arrive: nobody else may have the slot yet.
    Quarantined,
}

/// A block of the pool. See the module's diagram.
#[derive(Clone, Debug)]
pub struct Block {
    phase: Phase,
    /// Shards a dumper fills; 0 for a block that a tier fills.
    shard_count: usize,
    /// One bit for each filled shard while filling, empty after.
    filled: SmallVec<[u64; 2]>,
    filled_count: usize,
    leases: u32,
    dirty: bool,
    writing: bool,
    saved: bool,
    doomed: bool,
    quarantine_over: bool,
}

impl Block {
    /// A block that a client is about to dump in `shard_count` shards.
    pub fn dumping(shard_count: usize) -> Self {
        debug_assert!((1..=SHARDS_MAX).contains(&shard_count), "layouts have 1 to SHARDS_MAX shards");
        let filled = smallvec![0; shard_count.div_ceil(64)];
        Self { shard_count, filled, ..Self::new(Phase::Filling) }
    }

    /// A block that a tier is about to fill.
    pub fn fetching() -> Self {
        Self::new(Phase::Fetching)
    }

    /// A block that another depot sealed in this place, and handed over.
    pub fn handed_over(saved: bool) -> Self {
        Self { saved, ..Self::new(Phase::Sealed) }
    }

    fn new(phase: Phase) -> Self {
        Self {
            phase,
            shard_count: 0,
            filled: SmallVec::new(),
            filled_count: 0,
            leases: 0,
            dirty: false,
            writing: false,
            saved: false,
            doomed: false,
            quarantine_over: false,
        }
    }

    /// All bytes of a shard are in the slot. True when it was the last one: the block is sealed, and dirty unless
    /// it was doomed meanwhile. A shard that comes twice changes nothing.
    pub fn shard_filled(&mut self, shard: usize) -> Result<bool> {
        let bad = |what: &str| Err(Error::new(ErrorKind::Protocol, what.to_owned()).with("shard", shard));
        if shard >= self.shard_count {
            return bad("the block has no such shard to fill");
        }
        match self.phase {
            Phase::Filling => {}
            Phase::Sealed => return Ok(false),
            Phase::Fetching | Phase::Quarantined => return bad("the block is not being dumped any more"),
        }
        let (word, bit) = (&mut self.filled[shard / 64], 1u64 << (shard % 64));
        if *word & bit != 0 {
            return Ok(false);
        }
        *word |= bit;
        self.filled_count += 1;
        if self.filled_count < self.shard_count {
            return Ok(false);
        }
        self.phase = Phase::Sealed;
        self.dirty = !self.doomed;
        self.filled = SmallVec::new();
        Ok(true)
    }

    /// All bytes of all shards are in the slot. True when the block is sealed by this.
    pub fn all_filled(&mut self) -> Result<bool> {
        let mut sealed = false;
        for shard in 0..self.shard_count {
            sealed |= self.shard_filled(shard)?;
        }
        Ok(sealed)
    }

    /// A tier has filled the block and its checksum was right (P1): sealed, clean.
    pub fn fill_ended_ok(&mut self) {
        debug_assert_eq!(self.phase, Phase::Fetching, "only a fetch ends");
        if self.phase == Phase::Fetching {
            self.phase = Phase::Sealed;
            self.saved = true;
        }
    }

    /// A tier could not fill the block, and will write no more into the slot: freeable once the leases of those
    /// who wait for it are over.
    pub fn fill_failed(&mut self) {
        debug_assert_eq!(self.phase, Phase::Fetching, "only a fetch fails");
        if self.phase == Phase::Fetching {
            self.phase = Phase::Quarantined;
            self.quarantine_over = true;
        }
    }

    /// Somebody will read the block, now or when its fetch ends.
    pub fn lease(&mut self) {
        debug_assert!(
            !self.doomed && matches!(self.phase, Phase::Sealed | Phase::Fetching),
            "nothing to lease"
        );
        self.leases += 1;
    }

    /// A lease is over.
    pub fn unlease(&mut self) {
        debug_assert!(self.leases > 0, "more leases end than were given");
        self.leases = self.leases.saturating_sub(1);
    }

    /// A tier begins to read the slot.
    pub fn write_begun(&mut self) {
        debug_assert!(self.is_readable() && !self.writing, "one write at a time, of readable blocks");
        self.writing = true;
    }

    /// The write is over. A block that could not be saved is clean all the same: trying for ever would fill the
    /// pool, so the write counts as dropped and the pool holds the only copy.
    pub fn write_ended(&mut self, saved: bool) {
        debug_assert!(self.writing, "no write had begun");
        self.writing = false;
        self.dirty = false;
        self.saved |= saved;
    }

    /// A tier is to have this sealed block, for the first time or again because it does not hold it any more.
    pub fn dirty_again(&mut self) {
        debug_assert_eq!(self.phase, Phase::Sealed, "only a sealed block is written");
        self.dirty = !self.doomed;
    }

    /// No tier is to have this sealed block.
    pub fn seal_clean(&mut self) {
        debug_assert!(self.phase == Phase::Sealed && !self.writing, "only a sealed block becomes clean");
        self.dirty = false;
    }

    /// The namespace was reset, or the bytes were found corrupt: no new reader and no new write.
    pub fn doom(&mut self) {
        self.doomed = true;
        self.dirty = false;
    }

    /// Whoever fills the slot died or gave up, but its copies may still run (P4). A sealed block is whole and
    /// stays as it is.
    pub fn abandon(&mut self) {
        if matches!(self.phase, Phase::Filling | Phase::Fetching) {
            self.phase = Phase::Quarantined;
            self.filled = SmallVec::new();
        }
    }

    /// No copy into an abandoned slot can run any more.
    pub fn quarantine_ended(&mut self) {
        debug_assert_eq!(self.phase, Phase::Quarantined, "the block is not in quarantine");
        self.quarantine_over = self.phase == Phase::Quarantined;
    }

    /// Where the bytes stand.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether a lookup may find it.
    pub fn is_readable(&self) -> bool {
        self.phase == Phase::Sealed && !self.doomed
    }

    /// Whether it may go to make room: whole, unused, and no tier still waits for it.
    pub fn is_evictable(&self) -> bool {
        self.is_readable() && self.leases == 0 && !self.writing && !self.dirty
    }

    /// Whether it is of no use to anybody, and nobody touches its slot.
    pub fn is_freeable(&self) -> bool {
        let given_up = match self.phase {
            Phase::Filling | Phase::Fetching => false,
            Phase::Sealed => self.doomed,
            Phase::Quarantined => self.quarantine_over,
        };
        given_up && self.leases == 0 && !self.writing
    }

    /// Whether it was doomed.
    pub fn is_doomed(&self) -> bool {
        self.doomed
    }

    /// Whether a tier is still to have it.
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Whether a tier is reading the slot.
    pub fn is_writing(&self) -> bool {
        self.writing
    }

    /// Whether a tier has it.
    pub fn saved(&self) -> bool {
        self.saved
    }

    /// How many leases hold it.
    pub fn leases(&self) -> u32 {
        self.leases
    }
}
