//! One load: its blocks, and the state of each.

use crate::block::Phase;
use crate::error::{ErrorKind, Result};
use crate::eviction::SlotId;
use crate::key::{BlockHash, BlockKey};

use super::super::catalog::Namespace;
use super::super::counters::Counters;
use super::super::event::{Leased, Loaded, Location, Nanos, Owner, Token, Want};
use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::pool::Pool;
use super::super::rooms::Rooms;
use super::super::slots::Waiter;
use super::super::tiers::TierIndex;

/// Number of a load's blocks in each state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    pub(super) unlocated: usize,
    pub(super) no_room: usize,
    pub(super) arriving: usize,
    pub(super) leased: usize,
    pub(super) unnamed: usize,
}

impl Count {
    fn of(&mut self, want: &Want) -> Option<&mut usize> {
        Some(match want {
            Want::Unlocated => &mut self.unlocated,
            Want::NoRoom(_) => &mut self.no_room,
            Want::Arriving => &mut self.arriving,
            Want::Leased(_) => &mut self.leased,
            Want::Unnamed => &mut self.unnamed,
            Want::Missed(_) => return None,
        })
    }
}

/// Stage of a load's work, which is done in pieces.
#[derive(Debug)]
pub(super) enum Stage {
    /// Leases the blocks in the pool, so that no fetch of this load evicts a block that it needs too.
    Lease,
    /// Examines the others, and collects those that the tiers must be asked about.
    Look(Vec<BlockKey>),
    /// Processes the tiers' answer, and begins fetches as far as the pool has space. `full`: it had none for one block.
    Fetch { locations: std::vec::IntoIter<Location>, full: bool },
    /// Nothing to do until something happens.
    Rest,
}

/// What a load's caller allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadLimits {
    pub(crate) fetch_deadline: Nanos,
    /// The caller will not ask again for late blocks.
    pub(crate) last: bool,
    pub(crate) runs_max: usize,
    /// The caller can read blocks in a tier's memory.
    pub(crate) in_place: bool,
}

#[derive(Debug)]
pub(super) struct Load {
    pub(super) token: Token,
    pub(super) owner: Owner,
    pub(super) namespace: Namespace,
    hashes: Vec<BlockHash>,
    /// State of the blocks that the first stage has reached. The others are not located.
    wants: Vec<Want>,
    pub(super) count: Count,
    pub(super) stage: Stage,
    /// Next block of the stage.
    pub(super) cursor: usize,
    pub(super) limits: LoadLimits,
    pub(super) runs_left: usize,
    /// Its turn among the loads that found no space and lease nothing, if it is one of them.
    pub(super) turn: Option<u64>,
    /// Number of times that space was freed before it began to search for some.
    pub(super) rooms_seen: u64,
}

impl Load {
    pub(super) fn new(
        token: Token,
        owner: Owner,
        namespace: Namespace,
        hashes: Vec<BlockHash>,
        limits: LoadLimits,
    ) -> Self {
        let count = Count { unlocated: hashes.len(), ..Count::default() };
        Self {
            token,
            owner,
            wants: Vec::with_capacity(hashes.len()),
            hashes,
            namespace,
            count,
            stage: Stage::Lease,
            cursor: 0,
            limits,
            runs_left: limits.runs_max,
            turn: None,
            rooms_seen: 0,
        }
    }

    pub(super) const fn blocks(&self) -> usize {
        self.hashes.len()
    }

    pub(super) fn key(&self, place: usize) -> PoolKey {
        self.namespace.pool_key(self.hashes[place])
    }

    /// Makes room for the state of the next block, if the first stage has got there.
    pub(super) fn reach(&mut self, place: usize) {
        if place == self.wants.len() {
            self.wants.push(Want::Unlocated);
        }
    }

    pub(super) fn want(&self, place: usize) -> &Want {
        &self.wants[place]
    }

    pub(super) fn set(&mut self, place: usize, want: Want) {
        self.count.of(&want).into_iter().for_each(|count| *count += 1);
        let before = std::mem::replace(&mut self.wants[place], want);
        self.count.of(&before).into_iter().for_each(|count| *count -= 1);
    }

    /// Determines the state of a block that is not readable, or was not.
    pub(super) fn look(&mut self, rooms: &mut Rooms<'_>, place: usize) -> Want {
        let key = self.key(place);
        if !rooms.catalog.is_live(key.space) {
            return Want::Missed(ErrorKind::NotFound);
        }
        let Some(slot) = rooms.pool.find_kept(&key) else {
            let may_come = rooms.may_be_in_tiers(&key);
            return if may_come { Want::Unlocated } else { Want::Missed(ErrorKind::NotFound) };
        };
        if !self.can_read(rooms, slot) {
            // Until a tier has leased it, other readers wait for it.
            let is_there = rooms.pool.slot(slot).block.is_readable();
            return if is_there { Want::Unlocated } else { Want::Missed(ErrorKind::Busy) };
        }
        match rooms.pool.slot(slot).block.phase() {
            Phase::Fetching => self.wait_for(rooms, place, slot),
            Phase::Sealed if rooms.pool.slot(slot).block.is_readable() => self.lease(rooms, slot),
            // It is being dumped, or was abandoned.
            _ => Want::Missed(ErrorKind::NotFound),
        }
    }

    /// Returns whether the caller can read what is in a slot, or will be.
    pub(super) fn can_read(&self, rooms: &Rooms<'_>, slot: SlotId) -> bool {
        let flawed = rooms.pool.flaws.has(Flaw::LeasedToAnyReader);
        self.limits.in_place || flawed || !rooms.pool.slot(slot).is_in_place()
    }

    /// Returns whether a block that this tier has is leased in place, and needs no memory of the pool.
    pub(super) fn leases_in_place(&self, rooms: &Rooms<'_>, tier: TierIndex) -> bool {
        self.limits.in_place && rooms.pool.in_place_tier() == Some(tier)
    }

    pub(super) fn wait_for(&self, rooms: &mut Rooms<'_>, place: usize, slot: SlotId) -> Want {
        let (token, place) = (self.token, u32::try_from(place).expect("a load's blocks are bounded"));
        rooms.pool.edit(slot, |slot| slot.add_waiter(Waiter::Load { token, place }));
        Want::Arriving
    }

    pub(super) fn lease(&mut self, rooms: &mut Rooms<'_>, slot: SlotId) -> Want {
        let runs = rooms.pool.slot(slot).runs().len();
        if runs > self.runs_left {
            // The next answer names it.
            return Want::Unnamed;
        }
        match lease_slot(rooms.pool, &self.namespace, self.owner, slot) {
            Ok(leased) => {
                self.runs_left -= runs;
                Want::Leased(leased)
            }
            Err(error) => Want::Missed(error.kind()),
        }
    }

    /// Counts the blocks of a load that is answered; those that have not arrived are refused as `late`. Each block counts
    /// once, however often it is requested: when it is leased or missed.
    pub(super) fn count_answer(&self, counters: &mut Counters, late: ErrorKind) {
        let Count { unlocated, no_room, arriving, leased, unnamed } = self.count;
        let pending = unlocated + no_room + arriving;
        let late = if late == ErrorKind::Timeout && self.limits.last { pending } else { 0 };
        let missed = self.blocks() - pending - leased - unnamed + late;
        counters.load_blocks += (leased + missed) as u64;
        counters.load_blocks_missed += missed as u64;
    }

    /// Returns the answer. Blocks that have not arrived are refused as `late`.
    pub(super) fn answer(self, late: ErrorKind) -> Loaded {
        Loaded::new(self.wants, self.hashes.len(), late)
    }
}

/// Gives a reader a lease on a readable slot. Loads are the uses that recency counts.
pub(crate) fn lease_slot(
    pool: &mut Pool,
    namespace: &Namespace,
    owner: Owner,
    slot: SlotId,
) -> Result<Leased> {
    pool.touch(slot);
    let lease = pool.lease(owner, slot)?;
    let (runs, crc64) = (pool.slot(slot).runs(), pool.slot(slot).crc64());
    Ok(Leased { lease, slot, runs, block_bytes: namespace.spec.layout().block_bytes(), crc64 })
}
