//! One load: its blocks, and the state of each.

use super::Rooms;
use crate::block::Phase;
use crate::error::ErrorKind;
use crate::eviction::SlotId;
use crate::key::BlockKey;

use super::super::catalog::Namespace;
use super::super::counters::Counters;
use super::super::event::{Leased, Location, Nanos, Outcome, Owner, Token};
use super::super::names::PoolKey;
use super::super::slots::Waiter;
use super::lease_slot;

/// State of one block of a load.
#[derive(Clone, Debug)]
pub(super) enum Want {
    /// Not in the pool; the tiers were not asked.
    Unlocated,
    /// A tier may have it, but there was no space in the pool.
    NoRoom(usize),
    /// A tier is reading it.
    Arriving,
    Leased(Leased),
    /// In the pool, but one answer cannot name more runs.
    Unnamed,
    Missed(ErrorKind),
}

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

#[derive(Debug)]
pub(super) struct Load {
    pub(super) token: Token,
    pub(super) owner: Owner,
    pub(super) namespace: Namespace,
    wants: Vec<(PoolKey, Want)>,
    pub(super) count: Count,
    pub(super) stage: Stage,
    /// Next block of the stage.
    pub(super) cursor: usize,
    pub(super) fetch_deadline: Nanos,
    pub(super) last: bool,
    pub(super) runs_left: usize,
    /// Whether it found no space and leases nothing.
    pub(super) starved: bool,
    /// Number of times that space was freed before it began to search for some.
    pub(super) rooms_seen: u64,
}

impl Load {
    pub(super) fn new(
        token: Token,
        owner: Owner,
        namespace: Namespace,
        hashes: &[crate::BlockHash],
        (fetch_deadline, last, runs_left): (Nanos, bool, usize),
    ) -> Self {
        let wants = hashes.iter().map(|&hash| (namespace.pool_key(hash), Want::Unlocated));
        let count = Count { unlocated: hashes.len(), ..Count::default() };
        Self {
            token,
            owner,
            wants: wants.collect(),
            namespace,
            count,
            stage: Stage::Lease,
            cursor: 0,
            fetch_deadline,
            last,
            runs_left,
            starved: false,
            rooms_seen: 0,
        }
    }

    pub(super) const fn blocks(&self) -> usize {
        self.wants.len()
    }

    pub(super) fn key(&self, place: usize) -> PoolKey {
        self.wants[place].0
    }

    pub(super) fn want(&self, place: usize) -> &Want {
        &self.wants[place].1
    }

    pub(super) fn set(&mut self, place: usize, want: Want) {
        self.count.of(&want).into_iter().for_each(|count| *count += 1);
        let before = std::mem::replace(&mut self.wants[place].1, want);
        self.count.of(&before).into_iter().for_each(|count| *count -= 1);
    }

    /// Determines the state of a block that is not readable, or was not.
    pub(super) fn look(&mut self, rooms: &mut Rooms<'_>, place: usize) -> Want {
        let key = self.key(place);
        if !rooms.catalog.is_live(key.space) {
            return Want::Missed(ErrorKind::NotFound);
        }
        let Some(slot) = rooms.pool.find(&key) else {
            let hopeless = !rooms.flow.has_tiers() || rooms.flow.is_leaving(&key);
            return if hopeless { Want::Missed(ErrorKind::NotFound) } else { Want::Unlocated };
        };
        match rooms.pool.slot(slot).block.phase() {
            Phase::Fetching => self.wait_for(rooms, place, slot),
            Phase::Sealed if rooms.pool.slot(slot).block.is_readable() => self.lease(rooms, slot),
            // It is being dumped, or was abandoned.
            _ => Want::Missed(ErrorKind::NotFound),
        }
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

    /// Returns the answer. Blocks that have not arrived are refused as `late`.
    pub(super) fn answer(self, counters: &mut Counters, late: ErrorKind) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(self.wants.len());
        for (_, want) in self.wants {
            let (outcome, missed) = match want {
                Want::Leased(leased) => (Outcome::Leased(leased), Some(false)),
                Want::Missed(kind) => (Outcome::Refused(kind), Some(true)),
                // Each block counts once, however often it is requested: when it is leased or missed.
                Want::Unnamed => (Outcome::Refused(ErrorKind::NoSpace), None),
                Want::Unlocated | Want::NoRoom(_) | Want::Arriving => {
                    let missed = late == ErrorKind::Timeout && self.last;
                    (Outcome::Refused(late), missed.then_some(true))
                }
            };
            if let Some(missed) = missed {
                counters.load_blocks += 1;
                counters.load_blocks_missed += u64::from(missed);
            }
            outcomes.push(outcome);
        }
        outcomes
    }
}
