//! Loads: requests to lease blocks for reading. Blocks that are not in the pool are fetched from a tier.
//!
//! ```text
//!   Lease ──▶ Look ──▶ (tiers are asked) ──▶ Fetch ──▶ answered, when nothing more can come
//!                                              ▲──────── room came
//! ```
//!
//! A load of many blocks passes each stage in pieces, with other steps in between.

mod ending;
mod line;
mod load;

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashSet;

use crate::error::ErrorKind;
use crate::eviction::SlotId;
use crate::key::BlockHash;

use super::catalog::Namespace;
use super::event::{Ask, Effects, Job, Location, Owner, Question, Reply, TierSet, Token, Want};
use super::flaw::{Flaw, Flaws};
use super::pace::Pace;
use super::pool::NoRoom;
use super::rooms::Rooms;
use line::Line;
use load::{Load, Stage};

pub(crate) use load::{LoadLimits, lease_slot};

/// Loads that have not been answered.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    // An ordered map of boxes: one that grows moves a few entries, however many loads there are.
    map: BTreeMap<Token, Box<Load>>,
    /// The loads of each connection.
    by_owner: BTreeSet<(Owner, Token)>,
    /// Connections that have ended, until their loads have been answered.
    ended: HashSet<Owner>,
    /// Loads that found no space and lease nothing.
    line: Line,
    /// Number of times that space was freed.
    rooms: u64,
    pub(crate) pace: Pace,
    pub(crate) flaws: Flaws,
}

impl Loads {
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Begins a load. Its reply is sent when no block can arrive any more, or when its waiter's patience ends.
    pub(crate) fn begin(
        &mut self,
        rooms: &mut Rooms<'_>,
        (token, owner): (Token, Owner),
        namespace: Namespace,
        hashes: Vec<BlockHash>,
        limits: LoadLimits,
        out: &mut Effects,
    ) {
        rooms.pool.uses.hold(namespace.space);
        let load = Load::new(token, owner, namespace, hashes, limits);
        self.by_owner.insert((owner, token));
        self.map.insert(token, Box::new(load));
        self.go_on(rooms, token, out);
    }

    /// Continues a load's work by one piece.
    pub(crate) fn go_on(&mut self, rooms: &mut Rooms<'_>, token: Token, out: &mut Effects) {
        let Some(load) = open(&mut self.map, &self.ended, self.flaws, token) else {
            // It may have ended when it was its turn to retry.
            self.pass_turn(token, out);
            return;
        };
        if let (Some(turn), Stage::Rest) = (load.turn, &load.stage) {
            // There is space again, and it may be its turn.
            if !self.line.begin_retry(turn, token) {
                return;
            }
            load.rooms_seen = self.rooms;
            load.begin(Stage::Fetch { locations: Vec::new().into_iter(), full: false });
        }
        // A small load passes two stages in one step.
        for _ in 0..2 * self.pace.request_blocks {
            if load.cursor == load.blocks() && load.next_stage(out) {
                self.finish_if_over(rooms, token, out);
                return;
            }
            if load.cursor < load.blocks() && !load.next_block(rooms) {
                break;
            }
        }
        out.again.push(Job::Load(token));
    }

    /// Processes the tiers' answer about the blocks that were not in the pool.
    pub(crate) fn located(
        &mut self,
        rooms: &mut Rooms<'_>,
        token: Token,
        locations: Vec<Location>,
        out: &mut Effects,
    ) {
        let Some(load) = open(&mut self.map, &self.ended, self.flaws, token) else { return };
        if matches!(load.stage, Stage::Rest) && load.count.unlocated > 0 {
            load.rooms_seen = self.rooms;
            load.begin(Stage::Fetch { locations: locations.into_iter(), full: false });
            self.go_on(rooms, token, out);
        }
    }

    /// Records the end of a fetch that loads waited for.
    pub(crate) fn arrived(&mut self, rooms: &mut Rooms<'_>, token: Token, place: u32, slot: Option<SlotId>) {
        let Some(load) = open(&mut self.map, &self.ended, self.flaws, token) else { return };
        let want = match slot {
            Some(slot) if load.can_read(rooms, slot) => load.lease(rooms, slot),
            _ => Want::Missed(ErrorKind::NotFound),
        };
        load.set(place as usize, want);
    }

    /// Answers a load that waits for nothing any more. If the pool was too small for all of its blocks and some are
    /// leased, the answer is sent immediately: if the client asks again after copying those, the others find space.
    pub(crate) fn finish_if_over(&mut self, rooms: &mut Rooms<'_>, token: Token, out: &mut Effects) {
        let Some(load) = open(&mut self.map, &self.ended, self.flaws, token) else { return };
        if !matches!(load.stage, Stage::Rest) {
            return;
        }
        let retried = self.line.end_retry(token);
        let count = load.count;
        let waits_for_room = count.no_room > 0 && count.leased == 0 && count.unnamed == 0;
        if waits_for_room && count.arriving == 0 && count.unlocated == 0 {
            let is_new = load.turn.is_none();
            let turn = *load.turn.get_or_insert_with(|| self.line.next_turn());
            if is_new || retried {
                self.line.wait(turn, token);
                // Space was freed between the steps of its search.
                if load.rooms_seen != self.rooms {
                    self.line.retry_oldest(out);
                }
            }
            return;
        }
        load.turn = None;
        // The client requests unnamed blocks again after it has copied the leased ones.
        let over = count.unnamed > 0 || (count.no_room > 0 && !waits_for_room) || count.arriving == 0;
        if count.unlocated == 0 && over {
            self.answer(rooms, token, ErrorKind::NoSpace, out);
        }
        if retried {
            self.line.retry_oldest(out);
        }
    }

    /// Ends a load whose time is up.
    pub(crate) fn expire(&mut self, rooms: &mut Rooms<'_>, token: Token, out: &mut Effects) -> bool {
        let Some(load) = self.map.get(&token) else { return false };
        let waited = self.line.leave(load.turn, token);
        self.answer(rooms, token, ErrorKind::Timeout, out);
        if waited {
            // The next one may need less.
            self.line.retry_oldest(out);
        }
        true
    }

    fn answer(&mut self, rooms: &mut Rooms<'_>, token: Token, late: ErrorKind, out: &mut Effects) {
        let Some(load) = self.map.remove(&token) else { return };
        if self.ended.contains(&load.owner) {
            self.close(rooms.pool, load, out);
            return;
        }
        self.forget(rooms.pool, &load);
        load.count_answer(rooms.counters, late);
        out.replies.push((token, Ok(Reply::Loaded(load.answer(late)))));
    }

    /// Records freed space: the oldest load that found none retries and, when it has found some, the next.
    pub(crate) fn room_came(&mut self, rooms: &mut Rooms<'_>, out: &mut Effects) {
        self.rooms += 1;
        if let Some(token) = self.line.next() {
            self.go_on(rooms, token, out);
        }
    }

    /// Makes the oldest load that found no space retry, unless one is retrying now.
    pub(crate) fn retry_oldest(&self, out: &mut Effects) {
        self.line.retry_oldest(out);
    }
}

/// Returns a load that goes on: not one whose connection has ended.
fn open<'a>(
    map: &'a mut BTreeMap<Token, Box<Load>>,
    ended: &HashSet<Owner>,
    flaws: Flaws,
    token: Token,
) -> Option<&'a mut Box<Load>> {
    map.get_mut(&token).filter(|load| !ended.contains(&load.owner) || flaws.has(Flaw::EndedLoadGoesOn))
}

impl Load {
    /// Begins a stage.
    fn begin(&mut self, stage: Stage) {
        (self.stage, self.cursor) = (stage, 0);
    }

    /// Records that a stage has examined every block. Returns whether there is nothing more to do now.
    fn next_stage(&mut self, out: &mut Effects) -> bool {
        match std::mem::replace(&mut self.stage, Stage::Rest) {
            Stage::Lease => {
                self.begin(Stage::Look(Vec::new()));
                return false;
            }
            Stage::Look(keys) if !keys.is_empty() => {
                out.questions.push(Question { ask: Ask::Load(self.token), keys, tiers: TierSet::ALL });
            }
            Stage::Look(_) | Stage::Fetch { .. } | Stage::Rest => {}
        }
        true
    }

    /// Processes the next block of the stage. Returns false if this step has searched long enough for space.
    fn next_block(&mut self, rooms: &mut Rooms<'_>) -> bool {
        let place = self.cursor;
        self.reach(place);
        let went = match self.want(place) {
            Want::Unlocated => match &mut self.stage {
                Stage::Lease => {
                    self.lease_if_readable(rooms, place);
                    true
                }
                Stage::Look(_) => {
                    self.look_and_collect(rooms, place);
                    true
                }
                Stage::Fetch { locations, .. } => {
                    let want = match locations.next().unwrap_or(Location::Absent) {
                        Location::Absent => Want::Missed(ErrorKind::NotFound),
                        Location::Tier(tier) => Want::NoRoom(tier),
                        Location::Unknown => Want::NoRoom(0),
                    };
                    self.set(place, want);
                    self.fetch(rooms, place)
                }
                Stage::Rest => true,
            },
            _ => self.fetch(rooms, place),
        };
        self.cursor += usize::from(went);
        went
    }

    fn lease_if_readable(&mut self, rooms: &mut Rooms<'_>, place: usize) {
        let key = self.key(place);
        if rooms.catalog.is_live(key.space)
            && let Some(slot) = rooms.pool.readable(&key).filter(|&slot| self.can_read(rooms, slot))
            && rooms.pool.is_shown(slot)
        {
            let want = self.lease(rooms, slot);
            self.set(place, want);
        }
    }

    fn look_and_collect(&mut self, rooms: &mut Rooms<'_>, place: usize) {
        let want = self.look(rooms, place);
        let key = self.key(place);
        if let (Want::Unlocated, Stage::Look(keys)) = (&want, &mut self.stage) {
            keys.push(rooms.catalog.block_key(&key));
        }
        self.set(place, want);
    }

    /// Begins the fetch of a block that a tier may have. Returns false if this step has searched long enough for space.
    fn fetch(&mut self, rooms: &mut Rooms<'_>, place: usize) -> bool {
        let (Want::NoRoom(tier), Stage::Fetch { full, .. }) = (self.want(place), &self.stage) else {
            return true;
        };
        let (tier, full) = (*tier, *full);
        let want = match self.look(rooms, place) {
            Want::Unlocated if full && !self.leases_in_place(rooms, tier) => Want::NoRoom(tier),
            Want::Unlocated => {
                let (key, bytes) = (self.key(place), self.namespace.slot_bytes());
                // A reader that cannot read in place gets a copy in the pool of what is leased to others.
                let inserted = match rooms.pool.find(&key) {
                    Some(leased) => rooms.pool.insert_copy(leased, bytes, self.namespace.near),
                    None => {
                        let how = (tier, self.limits.in_place);
                        rooms.pool.insert_fetching(key, bytes, self.namespace.near, how)
                    }
                };
                match inserted {
                    Ok(slot) => {
                        rooms.flow.read(slot, tier, self.limits.fetch_deadline, TierSet::ALL);
                        self.wait_for(rooms, place, slot)
                    }
                    Err(NoRoom::Later) => return false,
                    Err(NoRoom::Full(_)) => {
                        if let Stage::Fetch { full, .. } = &mut self.stage {
                            *full = true;
                        }
                        Want::NoRoom(tier)
                    }
                }
            }
            want => want,
        };
        self.set(place, want);
        true
    }
}
