//! Between the pool and the tiers: queues of reads and writes for each tier, and the order of what happens to one key.
//!
//! Blocks never change, but values do: one that is replaced or removed while a tier writes it must not come back. So a
//! key has a *turn* from the moment its slot is displaced during a write, or its removal is sent, until tiers have
//! ended that. What is stored or removed under the key meanwhile comes after it. The latest wins.

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;

use super::catalog::Catalog;
use super::counters::Counters;
use super::event::{Command, Effects, Fetched, Job, Nanos, Stored, TierIndex, Token};
use super::flaw::{Flaw, Flaws};
use super::names::PoolKey;
use super::owed::Owed;
use super::pace::Pace;
use super::placement::{Placement, Placements};
use super::pool::Pool;
use super::queue::Queue;
use super::slots::TierMask;
use super::uses::Uses;

pub(super) const fn bit(tier: TierIndex) -> TierMask {
    1 << tier
}

/// A block that a tier is to read.
#[derive(Clone, Copy, Debug)]
struct Read {
    slot: SlotId,
    deadline: Nanos,
}

/// A block that a tier is to write. Called off when its slot was freed or the tier's bit left `to_write`.
#[derive(Clone, Copy, Debug)]
struct Write {
    slot: SlotId,
    serial: u32,
    /// Whether what the tier has under this key is another value, which must go first.
    replaces: bool,
    /// How often the tier was asked before.
    tries: u32,
    /// The drain that it counts for.
    drain: u64,
    /// Whether the block is not dirty for it.
    late: bool,
}

#[derive(Clone, Debug, Default)]
struct TierFlow {
    reads: Queue<Read>,
    reads_in_flight: HashMap<SlotId, Read>,
    writes: Queue<Write>,
    /// Writes that may come late: after all others.
    late: Queue<Write>,
    writes_in_flight: HashMap<SlotId, Write>,
}

impl TierFlow {
    fn next_write(&mut self) -> Option<Write> {
        self.writes.pop_front().or_else(|| self.late.pop_front())
    }
}

/// What a key waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// Tiers that write a displaced slot.
    Written(SlotId),
    /// So many tiers that are to forget the block.
    Removed(usize),
}

/// What comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Nothing,
    Remove,
    /// `drain`: the drain that it counts for, as a queued write does.
    Write {
        slot: SlotId,
        serial: u32,
        drain: u64,
    },
}

#[derive(Clone, Debug)]
struct Turn {
    until: Until,
    next: Next,
    /// Requests that wait for the removal.
    tokens: Vec<Token>,
    /// Whether a tier could not remove the block.
    failed: bool,
}

impl Turn {
    const fn new(until: Until) -> Self {
        Self { until, next: Next::Nothing, tokens: Vec::new(), failed: false }
    }
}

/// How a read ended, for who waits for the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadEnd {
    /// The next tier is asked.
    GoesOn,
    /// The block is in its slot.
    Whole,
    /// No tier had it.
    Failed,
}

/// Queues, and turns of keys.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    tiers: Vec<TierFlow>,
    turns: HashMap<PoolKey, Turn>,
    /// Removals of predecessors, sent before a write is tried again: how many of each tier have not ended. They belong to
    /// no turn.
    predecessors: HashMap<(PoolKey, TierIndex), usize>,
    /// Writes to be tried again at the next tick.
    delayed: Vec<(TierIndex, Write)>,
    /// Writes of each drain that have not ended, oldest drain first.
    undrained: std::collections::BTreeMap<u64, usize>,
    drain: u64,
    drains: Vec<(u64, Token)>,
    /// Requests whose removals have ended, and whether a tier failed.
    removed: Vec<(Token, bool)>,
    pub(super) owed: Owed,
    /// Spaces of keys that wait for a tier.
    pub(super) uses: Uses,
    pub(super) placements: Placements,
    pub(crate) pace: Pace,
    pub(crate) flaws: Flaws,
}

impl Flow {
    pub(crate) fn new(tiers: usize) -> Self {
        Self {
            tiers: vec![TierFlow::default(); tiers],
            turns: HashMap::new(),
            predecessors: HashMap::new(),
            delayed: Vec::new(),
            undrained: std::collections::BTreeMap::new(),
            drain: 0,
            drains: Vec::new(),
            removed: Vec::new(),
            owed: Owed::default(),
            uses: Uses::default(),
            placements: Placements::new(&vec![Placement::default(); tiers], true),
            pace: Pace::default(),
            flaws: Flaws::default(),
        }
    }

    pub(crate) fn has_tiers(&self) -> bool {
        !self.tiers.is_empty()
    }

    pub(crate) fn tier_count(&self) -> usize {
        self.tiers.len()
    }

    /// Reads that have not ended.
    pub(crate) fn reads_left(&self) -> usize {
        self.tiers.iter().map(|tier| tier.reads.len() + tier.reads_in_flight.len()).sum()
    }

    /// Writes that have not ended.
    pub(crate) fn writes_left(&self) -> usize {
        self.undrained.values().sum()
    }

    /// Whether a tier reads into a slot now, or a key waits for a tier.
    pub(crate) fn is_unsettled(&self) -> bool {
        !self.turns.is_empty()
            || self.removals_owed() > 0
            || self.tiers.iter().any(|tier| !tier.reads_in_flight.is_empty())
    }

    /// Whether tiers may still show a block under this key that was removed or replaced.
    pub(crate) fn is_leaving(&self, key: &PoolKey) -> bool {
        self.has_turn(key) || self.owed.has(key)
    }

    pub(super) fn has_turn(&self, key: &PoolKey) -> bool {
        self.turns.contains_key(key)
    }

    /// Queues the read of a block into a slot that was inserted for it.
    pub(crate) fn read(&mut self, slot: SlotId, tier: TierIndex, deadline: Nanos) {
        self.tiers[tier].reads.push_back(Read { slot, deadline });
    }

    /// Has tiers write a sealed block, in its key's turn.
    pub(crate) fn write(&mut self, pool: &mut Pool, slot: SlotId, replaces: bool) {
        let (key, serial) = (pool.slot(slot).key, pool.slot(slot).serial);
        if self.turns.contains_key(&key) {
            // Any tier may keep what was under the key, and this write comes in place of its removal.
            pool.edit(slot, |slot| slot.set_value(true));
        }
        let tiers = self.at_seal(pool, slot);
        if tiers == 0 {
            pool.edit(slot, |slot| slot.block.seal_clean());
        } else if self.turns.contains_key(&key) {
            let drain = self.drain;
            *self.undrained.entry(drain).or_default() += 1;
            self.set_next(key, Next::Write { slot, serial, drain });
        } else {
            self.queue_writes(pool, slot, tiers, replaces, self.drain);
        }
    }

    /// Tiers that are to have a block as soon as it is sealed.
    fn at_seal(&self, pool: &Pool, slot: SlotId) -> TierMask {
        let all = pool.slot(slot).is_value() || self.flaws.has(Flaw::PlacementIgnored);
        if all { self.all() } else { self.placements.through }
    }

    /// Every tier's bit.
    pub(crate) const fn all(&self) -> TierMask {
        TierMask::MAX >> (TierMask::BITS as usize - self.tiers.len())
    }

    /// Tiers that are to write a block again that none of them holds.
    pub(crate) fn to_write_again(&self, pool: &Pool, slot: SlotId) -> TierMask {
        self.at_seal(pool, slot) & !pool.slot(slot).to_write
    }

    /// Whether a tier is given this block late, if at all.
    pub(crate) fn is_late(&self, pool: &Pool, slot: SlotId, tier: TierIndex) -> bool {
        self.at_seal(pool, slot) & bit(tier) == 0
    }

    /// Has some tiers write a block again that they do not hold any more.
    pub(crate) fn write_again(&mut self, pool: &mut Pool, slot: SlotId, tiers: TierMask) {
        if !self.is_leaving(&pool.slot(slot).key) {
            let replaces = pool.slot(slot).is_value();
            self.queue_writes(pool, slot, tiers, replaces, self.drain);
        }
    }

    fn queue_writes(&mut self, pool: &mut Pool, slot: SlotId, tiers: TierMask, replaces: bool, drain: u64) {
        let serial = pool.slot(slot).serial;
        pool.edit(slot, |slot| {
            slot.to_write |= tiers;
            slot.saved &= !tiers;
            slot.late &= !tiers;
            slot.block.dirty_again();
        });
        for tier in (0..self.tiers.len()).filter(|&tier| tiers & bit(tier) != 0) {
            let write = Write { slot, serial, replaces, tries: 0, drain, late: false };
            self.tiers[tier].writes.push_back(write);
            *self.undrained.entry(drain).or_default() += 1;
        }
    }

    /// Queues a write that may come late. Whether there was room: blocks that are evicted meanwhile leave entries behind.
    pub(super) fn queue_late(&mut self, tier: TierIndex, slot: SlotId, serial: u32) -> bool {
        let queue = &mut self.tiers[tier].late;
        if queue.len() >= self.pace.late_writes {
            return false;
        }
        let drain = self.drain;
        queue.push_back(Write { slot, serial, replaces: false, tries: 0, drain, late: true });
        *self.undrained.entry(drain).or_default() += 1;
        true
    }

    /// What comes after a key's turn; what was to come before is given up.
    fn set_next(&mut self, key: PoolKey, next: Next) {
        if let Some(turn) = self.turns.get_mut(&key)
            && let Next::Write { drain, .. } = std::mem::replace(&mut turn.next, next)
        {
            self.write_over(drain);
        }
    }

    /// A write that counted for a drain has ended, or was given up.
    fn write_over(&mut self, drain: u64) {
        if let Some(left) = self.undrained.get_mut(&drain) {
            *left -= 1;
            if *left == 0 {
                self.undrained.remove(&drain);
            }
        }
    }

    /// Takes a slot out of the pool's view after the index has ceased to name it: calls off its writes, and waits for
    /// those that are under way.
    pub(crate) fn displace(&mut self, pool: &mut Pool, slot: SlotId) {
        let (key, writing) = (pool.slot(slot).key, pool.slot(slot).writing != 0);
        let writing = writing && !self.flaws.has(Flaw::NoTurnBehindWrite);
        self.set_next(key, Next::Nothing);
        if writing && !self.turns.contains_key(&key) {
            self.begin_turn(key, Turn::new(Until::Written(slot)));
        }
        pool.doom(slot);
    }

    /// Has the tiers forget a key, in its turn. Whether `token` will be told when they have.
    pub(crate) fn remove(
        &mut self,
        catalog: &Catalog,
        key: PoolKey,
        token: Option<Token>,
        out: &mut Effects,
    ) -> bool {
        let Some(turn) = self.turns.get_mut(&key) else {
            return self.send_removal(catalog, key, token, out);
        };
        if matches!(turn.until, Until::Written(_)) {
            // The write may take long: nobody waits for it.
            self.set_next(key, Next::Remove);
            return false;
        }
        turn.tokens.extend(token);
        self.set_next(key, Next::Nothing);
        token.is_some()
    }

    fn begin_turn(&mut self, key: PoolKey, turn: Turn) {
        if self.turns.insert(key, turn).is_none() {
            self.uses.hold(key.space);
        }
    }

    fn send_removal(
        &mut self,
        catalog: &Catalog,
        key: PoolKey,
        token: Option<Token>,
        out: &mut Effects,
    ) -> bool {
        let block_key = catalog.block_key(&key);
        if self.tiers.is_empty() {
            return false;
        }
        for tier in 0..self.tiers.len() {
            out.commands.push(Command::Remove { tier, key: block_key });
        }
        let until = Until::Removed(self.tiers.len());
        self.begin_turn(key, Turn { tokens: token.into_iter().collect(), ..Turn::new(until) });
        token.is_some()
    }

    /// A tier has ended a removal.
    pub(crate) fn removal_ended(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        tier: TierIndex,
        key: PoolKey,
        outcome: &Result<()>,
        out: &mut Effects,
    ) {
        // Those of one tier and key end in the order in which they were sent.
        if let Some(left) = self.predecessors.get_mut(&(key, tier)) {
            *left -= 1;
            if *left == 0 {
                self.predecessors.remove(&(key, tier));
                self.uses.let_go(key.space);
            }
            return;
        }
        if self.retry_ended(key, tier, outcome.is_ok()) {
            return;
        }
        self.note_removal(key, tier, outcome.is_ok());
        let is_owed = self.owed.has(&key);
        let Some(turn) = self.turns.get_mut(&key) else { return };
        if let Until::Removed(left) = &mut turn.until {
            turn.failed |= is_owed;
            *left -= 1;
            if *left == 0 {
                self.end_turn(pool, catalog, key, out);
            }
        }
    }

    fn end_turn(&mut self, pool: &mut Pool, catalog: &Catalog, key: PoolKey, out: &mut Effects) {
        let Some(turn) = self.turns.remove(&key) else { return };
        self.uses.let_go(key.space);
        self.removed.extend(turn.tokens.into_iter().map(|token| (token, turn.failed)));
        match turn.next {
            Next::Nothing => {}
            Next::Remove => {
                self.send_removal(catalog, key, None, out);
            }
            Next::Write { slot, serial, drain } => {
                if pool.get(slot).is_some_and(|slot| slot.serial == serial && slot.block.is_readable()) {
                    self.queue_writes(pool, slot, self.at_seal(pool, slot), true, drain);
                }
                self.write_over(drain);
            }
        }
    }

    /// Requests whose removals have ended since the last call.
    pub(crate) fn take_removed(&mut self) -> Vec<(Token, bool)> {
        std::mem::take(&mut self.removed)
    }

    /// A tier ended a read.
    pub(crate) fn read_ended(
        &mut self,
        now: Nanos,
        pool: &mut Pool,
        counters: &mut Counters,
        tier: TierIndex,
        slot: SlotId,
        outcome: &Result<Fetched>,
    ) -> ReadEnd {
        let Some(read) = self.tiers[tier].reads_in_flight.remove(&slot) else {
            debug_assert!(false, "a read ends once");
            return ReadEnd::GoesOn;
        };
        match outcome {
            Ok(Fetched::Whole) => {
                counters.fetch_blocks += 1;
                counters.fetch_bytes += pool.slot(slot).bytes();
                pool.edit(slot, |slot| {
                    slot.block.fill_ended_ok();
                    slot.saved |= bit(tier);
                });
                return ReadEnd::Whole;
            }
            Ok(Fetched::Miss) => counters.failed("fetch", &Error::new(ErrorKind::NotFound, "a tier missed")),
            Err(error) => counters.failed("fetch", error),
        }
        if tier + 1 < self.tiers.len() && now < read.deadline {
            self.tiers[tier + 1].reads.push_front(read);
            return ReadEnd::GoesOn;
        }
        pool.edit(slot, |slot| slot.block.fill_failed());
        ReadEnd::Failed
    }

    /// A tier ended a write.
    #[expect(clippy::too_many_arguments, reason = "rooms are passed one by one, so that each borrow is seen")]
    pub(crate) fn write_ended(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        counters: &mut Counters,
        tier: TierIndex,
        slot: SlotId,
        outcome: &Result<Stored>,
        out: &mut Effects,
    ) {
        let Some(write) = self.tiers[tier].writes_in_flight.remove(&slot) else {
            debug_assert!(false, "a write ends once");
            return;
        };
        let key = pool.slot(slot).key;
        let wanted = !pool.slot(slot).block.is_doomed();
        if self.try_again(pool, catalog, tier, &write, key, wanted, outcome, out) {
            return;
        }
        self.write_over(write.drain);
        match outcome {
            Ok(Stored::New) => {
                counters.write_blocks += 1;
                counters.write_bytes += pool.slot(slot).bytes();
                counters.late_write_blocks += u64::from(write.late);
            }
            Ok(Stored::AlreadyThere) => {}
            Err(error) => {
                counters.failed("write", error);
                counters.late_write_blocks_dropped += u64::from(write.late);
            }
        }
        let stored = matches!(outcome, Ok(Stored::New))
            || (matches!(outcome, Ok(Stored::AlreadyThere))
                && (!write.replaces || self.flaws.has(Flaw::AlreadyThereIsStored)));
        let dropped = pool.edit(slot, |slot| {
            slot.writing &= !bit(tier);
            slot.to_write &= !bit(tier);
            slot.late &= !bit(tier);
            if stored {
                slot.saved |= bit(tier);
            } else if write.late {
                slot.refused |= bit(tier);
            }
            slot.set_unreplaced(slot.is_unreplaced() || (write.replaces && !stored));
            slot.settle_writes();
            !write.late && !slot.is_pressing() && slot.saved == 0
        });
        counters.write_blocks_dropped += u64::from(dropped);
        if pool.slot(slot).writing == 0
            && self.turns.get(&key).is_some_and(|turn| turn.until == Until::Written(slot))
        {
            self.end_turn(pool, catalog, key, out);
        } else if wanted {
            self.remove_unreplaced(pool, catalog, slot, out);
        }
        pool.free_if_over(slot);
    }

    /// Better nothing under a key than the value before (P1). Not before all tiers have ended: a write under way at another
    /// one could land after the removal, and the next removal would take this one for its own.
    fn remove_unreplaced(&mut self, pool: &mut Pool, catalog: &Catalog, slot: SlotId, out: &mut Effects) {
        let found = pool.slot(slot);
        if found.is_unreplaced() && found.to_write == 0 {
            let key = found.key;
            pool.edit(slot, |slot| {
                slot.set_unreplaced(false);
                slot.saved = 0;
            });
            self.remove(catalog, key, None, out);
        }
    }

    /// Whether the write of a value waits for its predecessor to be gone from the tier.
    #[expect(clippy::too_many_arguments, reason = "rooms are passed one by one, so that each borrow is seen")]
    fn try_again(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        tier: TierIndex,
        write: &Write,
        key: PoolKey,
        wanted: bool,
        outcome: &Result<Stored>,
        out: &mut Effects,
    ) -> bool {
        if !write.replaces || !wanted || write.tries >= self.pace.replace_tries {
            return false;
        }
        match outcome {
            // What the tier has is the value before this one.
            Ok(Stored::AlreadyThere) if !self.flaws.has(Flaw::AlreadyThereIsStored) => {
                out.commands.push(Command::Remove { tier, key: catalog.block_key(&key) });
                let left = self.predecessors.entry((key, tier)).or_default();
                *left += 1;
                if *left == 1 {
                    self.uses.hold(key.space);
                }
            }
            Err(error) if error.kind() == ErrorKind::Busy => {}
            _ => return false,
        }
        pool.edit(write.slot, |slot| slot.writing &= !bit(tier));
        self.delayed.push((tier, Write { tries: write.tries + 1, ..*write }));
        true
    }

    /// Queues delayed writes again, and has removals that failed tried again.
    pub(crate) fn tick(&mut self, catalog: &Catalog, out: &mut Effects) {
        self.retry_removals(catalog, out);
        for (tier, write) in std::mem::take(&mut self.delayed) {
            self.tiers[tier].writes.push_back(write);
        }
    }

    /// A request that waits until the writes of this moment have ended. Whether they have already.
    pub(crate) fn begin_drain(&mut self, token: Token) -> bool {
        if self.undrained.is_empty() {
            return true;
        }
        self.drains.push((self.drain, token));
        self.drain += 1;
        false
    }

    /// Drains that are given up: the depot ends.
    pub(crate) fn end_drains(&mut self) -> Vec<Token> {
        std::mem::take(&mut self.drains).into_iter().map(|(_, token)| token).collect()
    }

    /// Drains that are over.
    pub(crate) fn take_drained(&mut self) -> Vec<Token> {
        if self.drains.is_empty() {
            return Vec::new();
        }
        let oldest = self.undrained.keys().next().copied().unwrap_or(u64::MAX);
        self.drains.extract_if(.., |(drain, _)| *drain < oldest).map(|(_, token)| token).collect()
    }

    /// Forgets who waits for a drain: whether it did.
    pub(crate) fn forget_token(&mut self, token: Token) -> bool {
        let drains = self.drains.len();
        self.drains.retain(|(_, other)| *other != token);
        self.drains.len() < drains
    }

    /// Hands queued work to the tiers until their bounds are reached: reads before writes.
    pub(crate) fn emit(&mut self, now: Nanos, pool: &mut Pool, catalog: &Catalog, out: &mut Effects) {
        let last = self.tiers.len().saturating_sub(1);
        let mut looked_at = 0;
        for tier in 0..self.tiers.len() {
            while self.tiers[tier].reads_in_flight.len() < self.pace.reads_in_flight
                && let Some(read) = self.tiers[tier].reads.pop_front()
            {
                let slot = pool.slot(read.slot);
                let left = read.deadline.saturating_sub(now);
                // The tiers below, which may hold the block too, are left half of the time (P2).
                let deadline = now + if tier < last { left / 2 } else { left };
                let (runs, key) = (slot.runs(), catalog.block_key(&slot.key));
                self.tiers[tier].reads_in_flight.insert(read.slot, read);
                out.commands.push(Command::Read { tier, slot: read.slot, key, runs, deadline });
            }
            while self.tiers[tier].writes_in_flight.len() < self.pace.writes_in_flight
                && looked_at < self.pace.queue_entries
                && let Some(write) = self.tiers[tier].next_write()
            {
                looked_at += 1;
                if !self.begin_write(tier, write, pool, catalog, out) {
                    self.write_over(write.drain);
                }
            }
        }
        if looked_at == self.pace.queue_entries {
            out.again.push(Job::Emit);
        }
    }

    fn begin_write(
        &mut self,
        tier: TierIndex,
        write: Write,
        pool: &mut Pool,
        catalog: &Catalog,
        out: &mut Effects,
    ) -> bool {
        let wanted =
            |slot: &super::slots::Slot| slot.serial == write.serial && slot.to_write & bit(tier) != 0;
        let Some(slot) = pool.get(write.slot).filter(|slot| wanted(slot)) else { return false };
        let (key, runs) = (slot.key, slot.runs());
        if self.owed.tiers(&key) & bit(tier) != 0 {
            // It may have what was removed under the key, and could take that for this (P1).
            pool.edit(write.slot, |slot| {
                slot.to_write &= !bit(tier);
                slot.late &= !bit(tier);
                slot.settle_writes();
            });
            self.remove_unreplaced(pool, catalog, write.slot, out);
            pool.free_if_over(write.slot);
            return false;
        }
        if !catalog.is_live(key.space) {
            // The sweep has not come by yet.
            pool.doom(write.slot);
            return false;
        }
        let key = catalog.block_key(&key);
        pool.edit(write.slot, |slot| {
            if !slot.block.is_writing() {
                slot.block.write_begun();
            }
            slot.writing |= bit(tier);
        });
        self.tiers[tier].writes_in_flight.insert(write.slot, write);
        out.commands.push(Command::Write { tier, slot: write.slot, key, runs });
        true
    }
}
