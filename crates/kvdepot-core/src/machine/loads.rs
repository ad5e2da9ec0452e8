//! Loads: blocks leased for reading, each fetched from a tier where it is not in the pool.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::block::{Block, Phase};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;

use super::catalog::{Catalog, Namespace};
use super::counters::Counters;
use super::event::{Ask, Effects, Leased, Location, Nanos, Outcome, Owner, Question, Reply, Token};
use super::flow::Flow;
use super::names::PoolKey;
use super::pool::Pool;
use super::slots::Waiter;

/// How one block of a load stands.
#[derive(Clone, Debug)]
enum Want {
    /// Not in the pool; the tiers have not been asked.
    Unlocated,
    /// A tier may have it; there was no room in the pool.
    NoRoom(usize),
    /// A tier is reading it.
    Arriving,
    Leased(Leased),
    /// In the pool, but one answer cannot name more runs.
    Unnamed,
    Missed(ErrorKind),
}

#[derive(Debug)]
struct Load {
    owner: Owner,
    namespace: Namespace,
    wants: Vec<(PoolKey, Want)>,
    arriving: usize,
    fetch_deadline: Nanos,
    last: bool,
    runs_left: usize,
}

impl Load {
    fn any(&self, is: impl Fn(&Want) -> bool) -> bool {
        self.wants.iter().any(|(_, want)| is(want))
    }
}

/// What the loads need of the other rooms.
pub(crate) struct Rooms<'a> {
    pub(crate) catalog: &'a Catalog,
    pub(crate) pool: &'a mut Pool,
    pub(crate) flow: &'a mut Flow,
    pub(crate) counters: &'a mut Counters,
}

/// Loads that have not been answered.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    map: HashMap<Token, Load>,
    /// Those that found no room and lease nothing, oldest first.
    starved: VecDeque<Token>,
}

impl Loads {
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Begins a load. Its reply comes when no block can come any more, or its waiter's patience ends.
    #[expect(clippy::too_many_arguments, reason = "the fields of one request")]
    pub(crate) fn begin(
        &mut self,
        rooms: &mut Rooms<'_>,
        token: Token,
        owner: Owner,
        namespace: Namespace,
        hashes: &[crate::BlockHash],
        fetch_deadline: Nanos,
        last: bool,
        runs_max: usize,
        out: &mut Effects,
    ) {
        rooms.pool.uses.hold(namespace.space);
        let mut load = Load {
            owner,
            wants: hashes.iter().map(|&hash| (namespace.pool_key(hash), Want::Unlocated)).collect(),
            namespace,
            arriving: 0,
            fetch_deadline,
            last,
            runs_left: runs_max,
        };
        // What is there first, so that no fetch of this load evicts a block that it wants too.
        for place in 0..load.wants.len() {
            let key = load.wants[place].0;
            if let Some(slot) = rooms.pool.readable(&key) {
                load.wants[place].1 = lease(rooms, &mut load, slot);
            }
        }
        let mut keys = Vec::new();
        for place in 0..load.wants.len() {
            if matches!(load.wants[place].1, Want::Unlocated) {
                let want = look(rooms, token, &mut load, place);
                if matches!(want, Want::Unlocated) {
                    keys.push(rooms.catalog.block_key(&load.wants[place].0));
                }
                load.wants[place].1 = want;
            }
        }
        if !keys.is_empty() {
            out.questions.push(Question { ask: Ask::Load(token), keys });
        }
        self.map.insert(token, load);
        self.finish_if_over(rooms, token, out);
    }

    /// The tiers' answer about the blocks that were not in the pool.
    pub(crate) fn located(
        &mut self,
        rooms: &mut Rooms<'_>,
        token: Token,
        locations: &[Location],
        out: &mut Effects,
    ) {
        let Some(load) = self.map.get_mut(&token) else { return };
        let mut locations = locations.iter();
        for place in 0..load.wants.len() {
            if !matches!(load.wants[place].1, Want::Unlocated) {
                continue;
            }
            let location = locations.next().copied().unwrap_or(Location::Absent);
            let want = match location {
                Location::Absent => Want::Missed(ErrorKind::NotFound),
                Location::Tier(tier) => Want::NoRoom(tier),
                Location::Unknown => Want::NoRoom(0),
            };
            load.wants[place].1 = want;
        }
        self.fetch(rooms, token, out);
    }

    /// Begins fetches as far as the pool has room.
    fn fetch(&mut self, rooms: &mut Rooms<'_>, token: Token, out: &mut Effects) {
        let Some(mut load) = self.map.remove(&token) else { return };
        let mut full = false;
        for place in 0..load.wants.len() {
            let Want::NoRoom(tier) = load.wants[place].1 else { continue };
            let want = match look(rooms, token, &mut load, place) {
                Want::Unlocated if full => Want::NoRoom(tier),
                Want::Unlocated => {
                    let (key, bytes) = (load.wants[place].0, load.namespace.slot_bytes());
                    match rooms.pool.insert(key, Block::fetching(), bytes, true) {
                        Ok(slot) => {
                            rooms.flow.read(slot, tier, load.fetch_deadline);
                            wait_for(rooms, token, &mut load, place, slot)
                        }
                        Err(_) => {
                            full = true;
                            Want::NoRoom(tier)
                        }
                    }
                }
                want => want,
            };
            load.wants[place].1 = want;
        }
        self.map.insert(token, load);
        self.finish_if_over(rooms, token, out);
    }

    /// A fetch that loads waited for has ended.
    pub(crate) fn arrived(&mut self, rooms: &mut Rooms<'_>, token: Token, place: u32, slot: Option<SlotId>) {
        let Some(mut load) = self.map.remove(&token) else { return };
        load.arriving -= 1;
        load.wants[place as usize].1 = match slot {
            Some(slot) => lease(rooms, &mut load, slot),
            None => Want::Missed(ErrorKind::NotFound),
        };
        self.map.insert(token, load);
    }

    /// Answers a load that waits for nothing any more. Where the pool was too small for all while some blocks are leased,
    /// the answer comes at once: asked again after those were copied, the others find room.
    pub(crate) fn finish_if_over(&mut self, rooms: &mut Rooms<'_>, token: Token, out: &mut Effects) {
        let Some(load) = self.map.get(&token) else { return };
        if load.any(|want| matches!(want, Want::Unlocated)) {
            return;
        }
        if load.any(|want| matches!(want, Want::Unnamed)) {
            // Asked for again after what was leased has been copied.
            self.answer(rooms, token, ErrorKind::NoSpace, out);
            return;
        }
        let starved = load.any(|want| matches!(want, Want::NoRoom(_)));
        let leases = load.any(|want| matches!(want, Want::Leased(_)));
        if starved && !leases {
            if load.arriving == 0 && !self.starved.contains(&token) {
                self.starved.push_back(token);
            }
        } else if starved || load.arriving == 0 {
            self.answer(rooms, token, ErrorKind::NoSpace, out);
        }
    }

    /// The time of a load is over.
    pub(crate) fn expire(&mut self, rooms: &mut Rooms<'_>, token: Token, out: &mut Effects) -> bool {
        let known = self.map.contains_key(&token);
        self.starved.retain(|other| *other != token);
        self.answer(rooms, token, ErrorKind::Timeout, out);
        known
    }

    fn answer(&mut self, rooms: &mut Rooms<'_>, token: Token, late: ErrorKind, out: &mut Effects) {
        let Some(load) = self.map.remove(&token) else { return };
        rooms.pool.uses.let_go(load.namespace.space);
        let mut outcomes = Vec::with_capacity(load.wants.len());
        for (_, want) in load.wants {
            let (outcome, missed) = match want {
                Want::Leased(leased) => (Outcome::Leased(leased), Some(false)),
                Want::Missed(kind) => (Outcome::Refused(kind), Some(true)),
                // Each block counts once, however often it is asked for: when it is leased or missed.
                Want::Unnamed => (Outcome::Refused(ErrorKind::NoSpace), None),
                Want::Unlocated | Want::NoRoom(_) | Want::Arriving => {
                    let missed = late == ErrorKind::Timeout && load.last;
                    (Outcome::Refused(late), missed.then_some(true))
                }
            };
            if let Some(missed) = missed {
                rooms.counters.load_blocks += 1;
                rooms.counters.load_blocks_missed += u64::from(missed);
            }
            outcomes.push(outcome);
        }
        out.replies.push((token, Ok(Reply::Slots(outcomes))));
    }

    /// Room came back: the loads that found none try again, oldest first, as long as it lasts.
    pub(crate) fn room_came(&mut self, rooms: &mut Rooms<'_>, out: &mut Effects) {
        for _ in 0..self.starved.len().min(64) {
            let Some(token) = self.starved.pop_front() else { return };
            self.fetch(rooms, token, out);
            if self.starved.back() == Some(&token) {
                self.starved.rotate_right(1);
                return;
            }
        }
    }

    /// Forgets the loads of an owner that ended; its leases end with it.
    pub(crate) fn end_owner(&mut self, pool: &mut Pool, owner: Owner, out: &mut Effects) {
        let of_owner = self.map.extract_if(|_, load| load.owner == owner);
        let mut ended: Vec<Token> = of_owner
            .map(|(token, load)| {
                pool.uses.let_go(load.namespace.space);
                token
            })
            .collect();
        // A table's order differs from one run to the next.
        ended.sort_unstable();
        self.starved.retain(|token| !ended.contains(token));
        for token in ended {
            let closed = Error::new(ErrorKind::Closed, "the connection has ended");
            out.replies.push((token, Err(closed)));
        }
    }
}

/// What the pool says of a block that is not readable, or was not.
fn look(rooms: &mut Rooms<'_>, token: Token, load: &mut Load, place: usize) -> Want {
    let key = load.wants[place].0;
    if !rooms.catalog.is_live(key.space) {
        return Want::Missed(ErrorKind::NotFound);
    }
    let Some(slot) = rooms.pool.find(&key) else {
        let hopeless = !rooms.flow.has_tiers() || rooms.flow.is_leaving(&key);
        return if hopeless { Want::Missed(ErrorKind::NotFound) } else { Want::Unlocated };
    };
    match rooms.pool.slot(slot).block.phase() {
        Phase::Fetching => wait_for(rooms, token, load, place, slot),
        Phase::Sealed if rooms.pool.slot(slot).block.is_readable() => lease(rooms, load, slot),
        // Being dumped, or given up.
        _ => Want::Missed(ErrorKind::NotFound),
    }
}

fn wait_for(rooms: &mut Rooms<'_>, token: Token, load: &mut Load, place: usize, slot: SlotId) -> Want {
    load.arriving += 1;
    let place = u32::try_from(place).expect("a load's blocks are bounded");
    rooms.pool.edit(slot, |slot| slot.add_waiter(Waiter::Load { token, place }));
    Want::Arriving
}

fn lease(rooms: &mut Rooms<'_>, load: &mut Load, slot: SlotId) -> Want {
    let runs = rooms.pool.slot(slot).runs();
    if runs.len() > load.runs_left {
        // The next answer names it.
        return Want::Unnamed;
    }
    match lease_slot(rooms.pool, &load.namespace, load.owner, slot) {
        Ok(leased) => {
            load.runs_left -= runs.len();
            Want::Leased(leased)
        }
        Err(error) => Want::Missed(error.kind()),
    }
}

/// A reader's lease on a readable slot; loads are what recency is made of.
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
