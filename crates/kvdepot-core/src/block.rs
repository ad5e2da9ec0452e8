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

/// A block of the pool. See the module's diagram. There are millions of them, so what only an unsealed block needs lies
/// apart.
#[derive(Clone, Debug)]
pub struct Block {
    /// What a client fills, while it does.
    filling: Option<Box<Filling>>,
    leases: u32,
    phase: Phase,
    /// Of `DIRTY` and the others.
    marks: u8,
    /// Shards that a dumper fills; 0 for a block that a tier fills.
    shard_count: u16,
}

/// Shards that came so far.
#[derive(Clone, Debug)]
struct Filling {
    filled_count: u16,
    /// One bit for each filled shard.
    filled: SmallVec<[u64; 2]>,
}

/// A tier is still to have it.
const DIRTY: u8 = 1;
/// A tier is reading the slot.
const WRITING: u8 = 2;
/// A tier has it.
const SAVED: u8 = 4;
/// No new reader, no new write.
const DOOMED: u8 = 8;
/// No copy into the abandoned slot can run any more.
const QUARANTINE_OVER: u8 = 16;

const _: () = assert!(SHARDS_MAX <= u16::MAX as usize);
const _: () = assert!(size_of::<Block>() == 16);

impl Block {
    /// A block that a client is about to dump in `shard_count` shards.
    pub fn dumping(shard_count: usize) -> Self {
        debug_assert!((1..=SHARDS_MAX).contains(&shard_count), "layouts have 1 to SHARDS_MAX shards");
        let filled = smallvec![0; shard_count.div_ceil(64)];
        let shard_count = u16::try_from(shard_count).unwrap_or(u16::MAX);
        let filling = Some(Box::new(Filling { filled_count: 0, filled }));
        Self { filling, shard_count, ..Self::new(Phase::Filling) }
    }

    /// A block that a tier is about to fill.
    pub fn fetching() -> Self {
        Self::new(Phase::Fetching)
    }

    /// A block that another depot sealed in this place, and handed over.
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

    /// All bytes of a shard are in the slot. True when it was the last one: the block is sealed, and dirty unless
    /// it was doomed meanwhile. A shard that comes twice changes nothing.
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
        let Some(filling) = &mut self.filling else { return bad("the block is not being dumped any more") };
        let (word, bit) = (&mut filling.filled[shard / 64], 1u64 << (shard % 64));
        if *word & bit != 0 {
            return Ok(false);
        }
        *word |= bit;
        filling.filled_count += 1;
        if filling.filled_count < self.shard_count {
            return Ok(false);
        }
        self.phase = Phase::Sealed;
        self.filling = None;
        self.mark(DIRTY, !self.has(DOOMED));
        Ok(true)
    }

    /// All bytes of all shards are in the slot. True when the block is sealed by this.
    pub fn all_filled(&mut self) -> Result<bool> {
        match (self.phase, &mut self.filling) {
            (Phase::Filling, Some(filling)) => {
                // All but the last, which seals the block.
                let last = usize::from(self.shard_count) - 1;
                filling.filled.iter_mut().for_each(|word| *word = u64::MAX);
                filling.filled[last / 64] &= !(1 << (last % 64));
                filling.filled_count = self.shard_count - 1;
                self.shard_filled(last)
            }
            // A tier fills it, or another depot has: there is no shard to fill.
            _ if self.shard_count == 0 => Ok(false),
            _ => self.shard_filled(0),
        }
    }

    /// A tier has filled the block and its checksum was right (P1): sealed, clean.
    pub fn fill_ended_ok(&mut self) {
        debug_assert_eq!(self.phase, Phase::Fetching, "only a fetch ends");
        if self.phase == Phase::Fetching {
            self.phase = Phase::Sealed;
            self.mark(SAVED, true);
        }
    }

    /// A tier could not fill the block, and will write no more into the slot: freeable once the leases of those
    /// who wait for it are over.
    pub fn fill_failed(&mut self) {
        debug_assert_eq!(self.phase, Phase::Fetching, "only a fetch fails");
        if self.phase == Phase::Fetching {
            self.phase = Phase::Quarantined;
            self.mark(QUARANTINE_OVER, true);
        }
    }

    /// Somebody will read the block, now or when its fetch ends.
    pub fn lease(&mut self) {
        debug_assert!(
            !self.has(DOOMED) && matches!(self.phase, Phase::Sealed | Phase::Fetching),
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
        debug_assert!(self.is_readable() && !self.has(WRITING), "one write at a time, of readable blocks");
        self.mark(WRITING, true);
    }

    /// The write is over. A block that could not be saved is clean all the same: trying for ever would fill the
    /// pool, so the write counts as dropped and the pool holds the only copy.
    pub fn write_ended(&mut self, saved: bool) {
        debug_assert!(self.has(WRITING), "no write had begun");
        self.mark(WRITING, false);
        self.mark(DIRTY, false);
        self.mark(SAVED, self.has(SAVED) || saved);
    }

    /// A tier is to have this sealed block, for the first time or again because it does not hold it any more.
    pub fn dirty_again(&mut self) {
        debug_assert_eq!(self.phase, Phase::Sealed, "only a sealed block is written");
        self.mark(DIRTY, !self.has(DOOMED));
    }

    /// No tier must have this sealed block, or those that must have it now. A write that may come late can be under way.
    pub fn seal_clean(&mut self) {
        debug_assert_eq!(self.phase, Phase::Sealed, "only a sealed block becomes clean");
        self.mark(DIRTY, false);
    }

    /// The namespace was reset, or the bytes were found corrupt: no new reader and no new write.
    pub fn doom(&mut self) {
        self.mark(DOOMED, true);
        self.mark(DIRTY, false);
    }

    /// Whoever fills the slot died or gave up, but its copies may still run (P4). A sealed block is whole and
    /// stays as it is.
    pub fn abandon(&mut self) {
        if matches!(self.phase, Phase::Filling | Phase::Fetching) {
            self.phase = Phase::Quarantined;
            self.filling = None;
        }
    }

    /// No copy into an abandoned slot can run any more.
    pub fn quarantine_ended(&mut self) {
        debug_assert_eq!(self.phase, Phase::Quarantined, "the block is not in quarantine");
        self.mark(QUARANTINE_OVER, self.phase == Phase::Quarantined);
    }

    /// Where the bytes stand.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether a lookup may find it.
    pub fn is_readable(&self) -> bool {
        self.phase == Phase::Sealed && !self.has(DOOMED)
    }

    /// Whether it may go to make room: whole, unused, and no tier still waits for it.
    pub fn is_evictable(&self) -> bool {
        self.is_readable() && self.leases == 0 && !self.has(WRITING) && !self.has(DIRTY)
    }

    /// Whether it is of no use to anybody, and nobody touches its slot.
    pub fn is_freeable(&self) -> bool {
        let given_up = match self.phase {
            Phase::Filling | Phase::Fetching => false,
            Phase::Sealed => self.has(DOOMED),
            Phase::Quarantined => self.has(QUARANTINE_OVER),
        };
        given_up && self.leases == 0 && !self.has(WRITING)
    }

    /// Whether it was doomed.
    pub fn is_doomed(&self) -> bool {
        self.has(DOOMED)
    }

    /// Whether a tier is still to have it.
    pub fn is_dirty(&self) -> bool {
        self.has(DIRTY)
    }

    /// Whether a tier is reading the slot.
    pub fn is_writing(&self) -> bool {
        self.has(WRITING)
    }

    /// Whether a tier has it.
    pub fn saved(&self) -> bool {
        self.has(SAVED)
    }

    /// How many leases hold it.
    pub fn leases(&self) -> u32 {
        self.leases
    }
}
