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
//! doom, at any point: never readable again, never written again; freeable when the filling (or its quarantine), the
//! last lease and the last write have ended.
//! ```
//!
//! Invariants: only a sealed block is readable (P1). Bytes that a client or tier may still write or read are not
//! freeable (P4). A block is evictable only if nothing is lost that a tier should have.

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, ErrorKind, Result};
use crate::limits::SHARDS_MAX;

/// State of a block's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A client is writing shards into the slot.
    Filling,
    /// A tier is reading the block into the slot.
    Fetching,
    /// All bytes are present.
    Sealed,
    /// Abandoned while bytes may still arrive: the slot must not be reused yet.
    Quarantined,
}

/// A block of the pool; see the module's diagram. There are millions of them, so the data that only unsealed blocks
/// need is stored separately.
#[derive(Clone, Debug)]
pub struct Block {
    /// The shards filled so far, while a client fills the block: `None` before the first one. Most blocks are filled in
    /// one commit and never have it.
    filling: Option<Box<Filling>>,
    leases: u32,
    phase: Phase,
    /// Bit set of `DIRTY` and the other marks.
    marks: u8,
    /// Number of shards that a dumper fills; 0 for a block that a tier fills.
    shard_count: u16,
}

/// Shards filled so far.
#[derive(Clone, Debug)]
struct Filling {
    filled_count: u16,
    /// One bit for each filled shard.
    filled: SmallVec<[u64; 2]>,
}

/// A tier has yet to get the block.
const DIRTY: u8 = 1;
/// A tier is reading the slot.
const WRITING: u8 = 2;
/// A tier has the block.
const SAVED: u8 = 4;
/// No new reader and no new write are allowed.
const DOOMED: u8 = 8;
/// No copy into the abandoned slot can run any more.
const QUARANTINE_OVER: u8 = 16;

const _: () = assert!(SHARDS_MAX <= u16::MAX as usize);
const _: () = assert!(size_of::<Block>() == 16);

impl Block {
    /// Makes a block that a client is about to dump in `shard_count` shards.
    pub fn dumping(shard_count: usize) -> Self {
        debug_assert!((1..=SHARDS_MAX).contains(&shard_count), "layouts have 1 to SHARDS_MAX shards");
        let shard_count = u16::try_from(shard_count).unwrap_or(u16::MAX);
        Self { shard_count, ..Self::new(Phase::Filling) }
    }

    /// Makes a block that a tier is about to fill.
    pub fn fetching() -> Self {
        Self::new(Phase::Fetching)
    }

    /// Makes a block that another depot sealed in this slot and handed over.
    pub fn handed_over(saved: bool) -> Self {
        Self { marks: if saved { SAVED } else { 0 }, ..Self::new(Phase::Sealed) }
    }

    fn new(phase: Phase) -> Self {
        Self { filling: None, leases: 0, phase, marks: 0, shard_count: 0 }
    }

    const fn has(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    const fn mark(&mut self, mark: u8, on: bool) {
        self.marks = if on { self.marks | mark } else { self.marks & !mark };
    }

    /// Records that all bytes of a shard are in the slot. Returns true if it was the last shard: the block is then
    /// sealed, and dirty unless it was doomed in the meantime. Repeating a shard has no effect.
    pub fn shard_filled(&mut self, shard: usize) -> Result<bool> {
        let bad = |what: &str| Err(Error::new(ErrorKind::Protocol, what.to_owned()).with("shard", shard));
        if shard >= usize::from(self.shard_count) {
            return bad("the block has no such shard to fill");
        }
        match self.phase {
            Phase::Filling => {}
            Phase::Sealed => return Ok(false),
            Phase::Fetching | Phase::Quarantined => return bad("the block is not being dumped any more"),
        }
        if self.shard_count > 1 {
            let words = usize::from(self.shard_count).div_ceil(64);
            let none = || Box::new(Filling { filled_count: 0, filled: smallvec![0; words] });
            let filling = self.filling.get_or_insert_with(none);
            let (word, bit) = (&mut filling.filled[shard / 64], 1u64 << (shard % 64));
            if *word & bit != 0 {
                return Ok(false);
            }
            *word |= bit;
            filling.filled_count += 1;
            if filling.filled_count < self.shard_count {
                return Ok(false);
            }
        }
        self.seal();
        Ok(true)
    }

    fn seal(&mut self) {
        self.phase = Phase::Sealed;
        self.filling = None;
        self.mark(DIRTY, !self.has(DOOMED));
    }

    /// Records that all bytes of all shards are in the slot. Returns true if this seals the block.
    pub fn all_filled(&mut self) -> Result<bool> {
        match self.phase {
            Phase::Filling => {
                self.seal();
                Ok(true)
            }
            // A tier fills it, or another depot did: there is no shard to fill.
            _ if self.shard_count == 0 => Ok(false),
            _ => self.shard_filled(0),
        }
    }

    /// Records that a tier has filled the block and that its checksum was correct (P1): the block is sealed and clean.
    pub fn fill_ended_ok(&mut self) {
        debug_assert_eq!(self.phase, Phase::Fetching, "only a fetch ends");
        if self.phase == Phase::Fetching {
            self.phase = Phase::Sealed;
            self.mark(SAVED, true);
        }
    }

    /// Records that a tier could not fill the block and will no longer write into the slot. The block is freeable when
    /// its waiters' leases have ended.
    pub fn fill_failed(&mut self) {
        debug_assert_eq!(self.phase, Phase::Fetching, "only a fetch fails");
        if self.phase == Phase::Fetching {
            self.phase = Phase::Quarantined;
            self.mark(QUARANTINE_OVER, true);
        }
    }

    /// Adds a lease: a client will read the block, now or when its fetch completes.
    pub fn lease(&mut self) {
        debug_assert!(
            !self.has(DOOMED) && matches!(self.phase, Phase::Sealed | Phase::Fetching),
            "nothing to lease"
        );
        self.leases += 1;
    }

    /// Ends a lease.
    pub fn unlease(&mut self) {
        debug_assert!(self.leases > 0, "more leases end than were given");
        self.leases = self.leases.saturating_sub(1);
    }

    /// Records that a tier begins to read the slot.
    pub fn write_begun(&mut self) {
        debug_assert!(self.is_readable() && !self.has(WRITING), "one write at a time, of readable blocks");
        self.mark(WRITING, true);
    }

    /// Records the end of a write. A block that could not be saved is clean, too: endless retries would fill the pool,
    /// so the write counts as dropped and only the pool has the block.
    pub fn write_ended(&mut self, saved: bool) {
        debug_assert!(self.has(WRITING), "no write had begun");
        self.mark(WRITING, false);
        self.mark(DIRTY, false);
        self.mark(SAVED, self.has(SAVED) || saved);
    }

    /// Marks this sealed block dirty: a tier gets it for the first time, or again because it lost it.
    pub fn dirty_again(&mut self) {
        debug_assert_eq!(self.phase, Phase::Sealed, "only a sealed block is written");
        self.mark(DIRTY, !self.has(DOOMED));
    }

    /// Marks this sealed block clean: no tier must have it, or all that must have it do. A late write may still be in
    /// flight.
    pub fn seal_clean(&mut self) {
        debug_assert_eq!(self.phase, Phase::Sealed, "only a sealed block becomes clean");
        self.mark(DIRTY, false);
    }

    /// Dooms the block, because its namespace was reset or its bytes are corrupt: it gets no new reader and no new
    /// write.
    pub fn doom(&mut self) {
        self.mark(DOOMED, true);
        self.mark(DIRTY, false);
    }

    /// Records that the client or tier that fills the slot died or gave up while its copies may still run (P4). A
    /// sealed block is complete and stays as it is.
    pub fn abandon(&mut self) {
        if matches!(self.phase, Phase::Filling | Phase::Fetching) {
            self.phase = Phase::Quarantined;
            self.filling = None;
        }
    }

    /// Records that no copy into an abandoned slot can run any more.
    pub fn quarantine_ended(&mut self) {
        debug_assert_eq!(self.phase, Phase::Quarantined, "the block is not in quarantine");
        self.mark(QUARANTINE_OVER, self.phase == Phase::Quarantined);
    }

    /// Returns the state of the bytes.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns whether a lookup may find the block.
    pub fn is_readable(&self) -> bool {
        self.phase == Phase::Sealed && !self.has(DOOMED)
    }

    /// Returns whether the block may be evicted: it is complete and unused, and no tier is waiting for it.
    pub fn is_evictable(&self) -> bool {
        self.is_readable() && self.leases == 0 && !self.has(WRITING) && !self.has(DIRTY)
    }

    /// Returns whether nobody needs the block or accesses its slot any more.
    pub fn is_freeable(&self) -> bool {
        let given_up = match self.phase {
            Phase::Filling | Phase::Fetching => false,
            Phase::Sealed => self.has(DOOMED),
            Phase::Quarantined => self.has(QUARANTINE_OVER),
        };
        given_up && self.leases == 0 && !self.has(WRITING)
    }

    /// Returns whether the block was doomed.
    pub fn is_doomed(&self) -> bool {
        self.has(DOOMED)
    }

    /// Returns whether a tier has yet to get the block.
    pub fn is_dirty(&self) -> bool {
        self.has(DIRTY)
    }

    /// Returns whether a tier is reading the slot.
    pub fn is_writing(&self) -> bool {
        self.has(WRITING)
    }

    /// Returns whether a tier has the block.
    pub fn saved(&self) -> bool {
        self.has(SAVED)
    }

    /// Returns the number of leases on the block.
    pub fn leases(&self) -> u32 {
        self.leases
    }
}
