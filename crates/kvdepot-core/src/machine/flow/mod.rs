//! Data flow between the pool and the tiers: queues of reads and writes for each tier, and the order of operations
//! under one key.
//!
//! Blocks never change, but values do: a value that is replaced or removed while a tier writes it must not come back.
//! So a key has a *turn* from the moment its slot is displaced during a write, or its removal is sent, until tiers have
//! completed that. Later stores and removals of the key come after it, and the latest wins.

mod hung;
mod late;
mod order;
mod queues;
mod removals;
mod turns;
mod writes;

use hashbrown::HashMap;

use crate::block::Phase;
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::limits::OVERDUE;
use crate::misses::Fate;

use super::budget::Budgets;
use super::catalog::Catalog;
use super::counters::Counters;
use super::event::{Command, Effects, Fetched, Job, Nanos, RemovalId, TierIndex, Token};
use super::flaw::{Flaw, Flaws};
use super::owed::{Owed, Parts};
use super::pace::Pace;
use super::placement::{Placement, Placements};
use super::pool::Pool;
use super::queue::Queue;
use super::tiers::{TierSet, bit};
use super::uses::Uses;
use queues::{Read, TierFlow, Write};
use turns::{Apart, Turns};

/// How long after its deadline a read has hung.
#[expect(clippy::cast_possible_truncation, reason = "a second")]
const OVERDUE_NS: Nanos = OVERDUE.as_nanos() as Nanos;

/// Outcome of a read, for requests that wait for the block.
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
    /// The tier that is to read into each slot. It grows in pieces, however many there are.
    readers: std::collections::BTreeMap<SlotId, TierIndex>,
    turns: Turns,
    /// Removals in flight that belong to no turn.
    apart: HashMap<RemovalId, Apart>,
    removals_ever: RemovalId,
    /// Writes to retry at the next tick.
    delayed: Queue<(TierIndex, Write)>,
    /// Number of uncompleted writes of each drain, oldest drain first.
    undrained: std::collections::BTreeMap<u64, usize>,
    drain: u64,
    drains: Vec<(u64, Token)>,
    /// Requests whose removals have ended, and whether a tier failed.
    removed: Vec<(Token, bool)>,
    owed: Owed,
    pub(super) parts: Parts,
    /// Spaces of keys that wait for a tier.
    pub(super) uses: Uses,
    pub(super) placements: Placements,
    pub(super) budgets: Budgets,
    /// Time after which a write that has not ended has hung.
    pub(super) write_patience: Nanos,
    /// The time of the current step.
    pub(super) now: Nanos,
    pub(crate) pace: Pace,
    pub(crate) flaws: Flaws,
}

impl Flow {
    pub(crate) fn new(tiers: usize) -> Self {
        Self {
            tiers: vec![TierFlow::default(); tiers],
            readers: std::collections::BTreeMap::new(),
            turns: Turns::new(),
            apart: HashMap::new(),
            removals_ever: 0,
            delayed: Queue::default(),
            undrained: std::collections::BTreeMap::new(),
            drain: 0,
            drains: Vec::new(),
            removed: Vec::new(),
            owed: Owed::default(),
            parts: Parts::default(),
            uses: Uses::default(),
            placements: Placements::new(&vec![Placement::default(); tiers], true),
            budgets: Budgets::default(),
            write_patience: Nanos::MAX,
            now: 0,
            pace: Pace::default(),
            flaws: Flaws::default(),
        }
    }

    pub(crate) fn has_tiers(&self) -> bool {
        !self.tiers.is_empty()
    }

    pub(crate) fn set_write_windows(&mut self, bytes: &[u64]) {
        for (tier, bytes) in self.tiers.iter_mut().zip(bytes) {
            tier.write_window_bytes = *bytes;
        }
    }

    pub(crate) fn tier_count(&self) -> usize {
        self.tiers.len()
    }

    /// Returns the number of uncompleted reads.
    pub(crate) fn reads_left(&self) -> usize {
        self.tiers
            .iter()
            .map(|tier| tier.reads.len() + tier.reads_in_flight.len() + tier.reads_hung.len())
            .sum()
    }

    /// Returns the numbers of reads and of writes that have hung.
    pub(crate) fn hung(&self) -> (usize, usize) {
        let count = |(reads, writes), tier: &TierFlow| {
            (reads + tier.reads_hung.len(), writes + tier.writes_hung.len())
        };
        self.tiers.iter().fold((0, 0), count)
    }

    /// Returns the number of uncompleted writes.
    pub(crate) fn writes_left(&self) -> usize {
        self.undrained.values().sum()
    }

    /// Returns whether so many writes wait for a tier that those that need not be made now are not made.
    pub(crate) fn is_behind(&self, tier: TierIndex) -> bool {
        self.tiers[tier].writes.len() >= self.pace.late_writes
    }

    /// Returns the number of late writes that a tier has not begun.
    pub(crate) fn late_writes_left(&self, tier: TierIndex) -> usize {
        self.tiers[tier].late.len()
    }

    /// Returns whether a tier is reading into a slot, a key waits for a tier, or a tier may still have a removed block.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.turns.len() > 0
            || !self.apart.is_empty()
            || !self.owed.is_empty()
            || self.tiers.iter().any(|tier| !tier.reads_in_flight.is_empty() || tier.reads_hung.len() > 0)
    }

    /// Queues the read of a block into a slot that was inserted for it.
    pub(crate) fn read(&mut self, slot: SlotId, tier: TierIndex, deadline: Nanos, tiers: TierSet) {
        self.readers.insert(slot, tier);
        let asked = TierSet::NONE.with(tier);
        self.tiers[tier].reads.push_back(Read { slot, deadline, is_use: true, tiers, asked });
    }

    /// Has a tier read a block that no request asked for: the tier is to evict it no later because of that.
    pub(crate) fn read_unused(&mut self, slot: SlotId, tier: TierIndex, deadline: Nanos) {
        self.readers.insert(slot, tier);
        let (tiers, asked) = (TierSet::ALL, TierSet::NONE.with(tier));
        self.tiers[tier].reads.push_back(Read { slot, deadline, is_use: false, tiers, asked });
    }

    /// Returns the tier that is to read into a slot, or to lease its block, if one is.
    pub(crate) fn reader(&self, slot: SlotId) -> Option<TierIndex> {
        self.readers.get(&slot).copied()
    }

    /// Records that a tier has completed a read. `for_nobody`: no request waits for the block, so that no other tier is
    /// asked, and a block that is gone was evicted.
    pub(crate) fn read_ended(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        tier: TierIndex,
        slot: SlotId,
        outcome: &Result<Fetched>,
        for_nobody: bool,
    ) -> ReadEnd {
        let Some(read) = self.tiers[tier].reads_in_flight.remove(&slot) else {
            debug_assert!(false, "a read ends once");
            return ReadEnd::GoesOn;
        };
        self.readers.remove(&slot);
        match outcome {
            Ok(Fetched::Whole) => {
                if pool.slot(slot).is_in_place() {
                    counters.in_place_blocks += 1;
                    counters.in_place_bytes += pool.slot(slot).bytes();
                } else {
                    counters.fetch_blocks += 1;
                    counters.fetch_bytes += pool.slot(slot).bytes();
                }
                pool.edit(slot, |slot| {
                    slot.block.fill_ended_ok();
                    slot.saved |= bit(tier);
                });
                return ReadEnd::Whole;
            }
            Ok(Fetched::Miss) if for_nobody => {}
            Ok(Fetched::Miss) => {
                counters.failed("fetch", &Error::new(ErrorKind::NotFound, "a tier missed"));
                pool.went(pool.slot(slot).key, Fate::Lost, Some(tier));
            }
            Err(error) => {
                counters.failed("fetch", error);
                let fate = match error.kind() {
                    ErrorKind::Corrupt => Fate::Checksum,
                    ErrorKind::Timeout => Fate::TooSlow,
                    ErrorKind::NotFound => Fate::Lost,
                    _ => Fate::ReadFailed,
                };
                pool.went(pool.slot(slot).key, fate, Some(tier));
            }
        }
        let has_memory = |pool: &mut Pool| !pool.slot(slot).is_in_place() || pool.take_into_pool(slot);
        let may_go_on = !for_nobody && self.now < read.deadline;
        if let Some(next) = self.next_reader(pool, &read, tier).filter(|_| may_go_on && has_memory(pool)) {
            self.readers.insert(slot, next);
            self.tiers[next].reads.push_front(Read { asked: read.asked.with(next), ..read });
            return ReadEnd::GoesOn;
        }
        pool.edit(slot, |slot| slot.block.fill_failed());
        ReadEnd::Failed
    }

    /// Returns the tier that is asked for a block that `tier` did not deliver: the next one that is allowed by whoever began
    /// the read, or waits for the block. One above it has only been passed over if the read is limited.
    fn next_reader(&self, pool: &Pool, read: &Read, tier: TierIndex) -> Option<TierIndex> {
        if read.tiers == TierSet::ALL || self.flaws.has(Flaw::ReadGoesOnAnywhere) {
            return TierSet::ALL.next(tier + 1, self.tiers.len());
        }
        let tiers = read.tiers.or(pool.slot(read.slot).waited_for_from());
        (0..self.tiers.len()).find(|&other| tiers.has(other) && !read.asked.has(other))
    }

    /// Returns the reads that have not ended long after their deadline, and the leases of blocks where they lie.
    pub(crate) fn hung_reads(&self) -> Vec<(TierIndex, SlotId)> {
        let mut hung = Vec::new();
        for (tier, flow) in self.tiers.iter().enumerate() {
            let is_late = |read: &Read| read.deadline.saturating_add(OVERDUE_NS) <= self.now;
            hung.extend(
                flow.reads_in_flight.values().filter(|read| is_late(read)).map(|read| (tier, read.slot)),
            );
        }
        hung.sort_unstable();
        hung
    }

    /// Returns the tier that reads into a slot, or leases its block, and has not ended that by its deadline, if any does.
    pub(crate) fn late_reader(&self, pool: &Pool, slot: SlotId) -> Option<TierIndex> {
        if pool.slot(slot).block.phase() != Phase::Fetching {
            return None;
        }
        let is_late =
            |flow: &TierFlow| flow.reads_in_flight.get(&slot).is_some_and(|r| r.deadline <= self.now);
        self.tiers.iter().position(is_late)
    }

    /// Gives up a read that the tier has not ended. The slot is for nobody any more, and stays pinned until
    /// [`Self::hung_read_ended`].
    pub(crate) fn give_up_read(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        tier: TierIndex,
        slot: SlotId,
    ) {
        let found = pool.slot(slot);
        // A block in a tier's memory pins none of the pool's.
        let (key, bytes) = (found.key, if found.is_in_place() { 0 } else { found.bytes() });
        let flow = &mut self.tiers[tier];
        flow.reads_in_flight.remove(&slot);
        self.readers.remove(&slot);
        flow.reads_hung.add(slot, (), bytes);
        counters.failed("fetch", &Error::new(ErrorKind::Timeout, "a read has hung"));
        pool.went(key, Fate::TooSlow, Some(tier));
        pool.edit(slot, |slot| slot.block.abandon());
    }

    /// Records that a tier has ended a read that was given up, if it is one.
    pub(crate) fn hung_read_ended(&mut self, tier: TierIndex, slot: SlotId) -> bool {
        self.tiers[tier].reads_hung.take(slot).is_some()
    }

    /// Queues delayed writes again, the oldest first and a bounded number per tick, and retries failed removals.
    pub(crate) fn tick(&mut self, catalog: &Catalog, out: &mut Effects) {
        self.retry_removals(catalog, out);
        for _ in 0..self.pace.queue_entries {
            let Some((tier, write)) = self.delayed.pop_front() else { return };
            self.tiers[tier].writes.push_back(write);
        }
    }

    /// Registers a request that waits until the current writes have completed. Returns whether they already have.
    pub(crate) fn begin_drain(&mut self, token: Token) -> bool {
        if self.undrained.is_empty() {
            return true;
        }
        self.drains.push((self.drain, token));
        self.drain += 1;
        false
    }

    /// Abandons all drains, because the depot is shutting down. Returns their requests.
    pub(crate) fn end_drains(&mut self) -> Vec<Token> {
        std::mem::take(&mut self.drains).into_iter().map(|(_, token)| token).collect()
    }

    /// Returns the requests of completed drains.
    pub(crate) fn take_drained(&mut self) -> Vec<Token> {
        if self.drains.is_empty() {
            return Vec::new();
        }
        let oldest = self.undrained.keys().next().copied().unwrap_or(u64::MAX);
        self.drains.extract_if(.., |(drain, _)| *drain < oldest).map(|(_, token)| token).collect()
    }

    /// Forgets a request that waits for a drain. Returns whether it did.
    pub(crate) fn forget_token(&mut self, token: Token) -> bool {
        let drains = self.drains.len();
        self.drains.retain(|(_, other)| *other != token);
        self.drains.len() < drains
    }

    /// Sends queued work to the tiers up to their limits: reads before writes.
    pub(crate) fn emit(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        counters: &mut Counters,
        out: &mut Effects,
    ) {
        let last = self.tiers.len().saturating_sub(1);
        let (mut looked_at, now) = (0, self.now);
        for tier in 0..self.tiers.len() {
            while self.tiers[tier].reads_in_flight.len() < self.pace.reads_in_flight
                && let Some(read) = self.tiers[tier].reads.pop_front()
            {
                let slot = pool.slot(read.slot);
                if self.closed(catalog, &slot.key) & bit(tier) != 0 {
                    self.tiers[tier].reads_in_flight.insert(read.slot, read);
                    out.again.push(Job::Miss { tier, slot: read.slot });
                    continue;
                }
                if self.tiers[tier].reads_hung.is_clogged(self.pace.reads_in_flight, pool.bytes()) {
                    self.tiers[tier].reads_in_flight.insert(read.slot, read);
                    out.again.push(Job::ReadHeldBack { tier, slot: read.slot });
                    continue;
                }
                let left = read.deadline.saturating_sub(now);
                // Half of the time is left for the other tiers that may have the block too (P2).
                let has_others = match read.tiers {
                    TierSet::ALL => tier < last,
                    _ => self.next_reader(pool, &read, tier).is_some(),
                };
                let deadline = now + if has_others { left / 2 } else { left };
                let (runs, key, in_place) = (slot.runs(), catalog.block_key(&slot.key), slot.is_in_place());
                let is_use = read.is_use;
                self.tiers[tier].reads_in_flight.insert(read.slot, read);
                out.commands.push(if in_place {
                    Command::Lease { tier, slot: read.slot, key, deadline }
                } else {
                    Command::Read { tier, slot: read.slot, key, runs, deadline, is_use }
                });
            }
            while self.tiers[tier].has_write_turn(&self.pace)
                && looked_at < self.pace.queue_entries
                && let Some(write) = self.tiers[tier].next_write()
            {
                looked_at += 1;
                if !self.begin_write(tier, write, pool, catalog, counters, out) {
                    self.write_over(write.drain);
                }
            }
        }
        if looked_at == self.pace.queue_entries {
            out.again.push(Job::Emit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_queues_some_of_many_delayed_writes_again_and_the_oldest_first() {
        let mut flow = Flow::new(2);
        let some = flow.pace.queue_entries;
        let ticks = 3;
        for slot in 0..(ticks * some) as SlotId {
            let write = Write { slot, serial: 0, replaces: true, tries: 1, drain: 0, late: false };
            flow.delayed.push_back((0, write));
        }
        for tick in 1..=ticks {
            flow.tick(&Catalog::default(), &mut Effects::default());
            assert_eq!((flow.tiers[0].writes.len(), flow.tiers[1].writes.len()), (tick * some, 0));
        }
        assert_eq!(flow.delayed.len(), 0);
        for slot in 0..(ticks * some) as SlotId {
            assert_eq!(flow.tiers[0].writes.pop_front().map(|write| write.slot), Some(slot));
        }
    }
}
