//! One step: passes an event to the modules that it concerns, and does what follows from it.

use super::event::{Ask, Effects, Event, Fetched, Job, Location, Nanos, Owner, Reply, Token};
use super::pool::GoneHere;
use super::rooms::Rooms;
use super::{Machine, split};
use crate::error::{Error, ErrorKind, Result};
use crate::key::BlockKey;
use crate::misses::{Fate, Gone};

impl Machine {
    /// Processes an event, and adds its effects to `out`.
    pub fn step(&mut self, now: Nanos, event: Event, out: &mut Effects) {
        self.now = self.now.max(now);
        self.flow.now = self.now;
        self.pool.begin_step(self.pace.eviction_looks);
        self.pool.set_now(u32::try_from(self.now / 1_000_000_000).unwrap_or(u32::MAX));
        match event {
            Event::Request { token, owner, request } => {
                if let Err(error) = self.request(token, owner, request, out) {
                    out.replies.push((token, Err(error)));
                }
            }
            Event::Expire { token } => self.expire(token, out),
            Event::OwnerEnded { owner } => self.owner_ended(owner, out),
            Event::ReadEnded { tier, slot, outcome } => self.read_ended(tier, slot, &outcome, out),
            Event::LeaseEnded { tier, slot, outcome } => self.lease_ended(tier, slot, outcome, out),
            Event::WriteEnded { tier, slot, outcome } => {
                let Self { flow, pool, catalog, counters, .. } = self;
                flow.write_ended(pool, catalog, counters, tier, slot, &outcome, out);
            }
            Event::Removed { id, tier, key, outcome } => {
                if let Err(error) = &outcome {
                    self.counters.failed("remove", error);
                }
                if let Some(key) = self.catalog.any_pool_key(&key) {
                    let Self { flow, pool, catalog, .. } = self;
                    flow.removal_ended(pool, catalog, tier, id, key, &outcome, out);
                }
            }
            Event::Located { ask, locations } => self.located(ask, locations, out),
            Event::Probed { ask, outcome } => self.probed(ask, outcome, out),
            Event::TierForgot { tier, keys, lost } => self.tier_forgot(tier, &keys, lost, out),
            Event::TierCooling { tier, keys } => self.tier_cooling(tier, keys),
            Event::Continue(job) => self.go_on(job, out),
            Event::Populated { upto_bytes } => self.pool.populated(upto_bytes),
            Event::InPlace { tier, memory_bytes, unit_bytes } => {
                self.pool.set_in_place(tier, memory_bytes, unit_bytes);
            }
            Event::WentDown { tier } => {
                self.demotions.set_down(tier, true);
                self.pool.set_lender_off(tier, true);
            }
            Event::CameBack { tier } => {
                self.demotions.set_down(tier, false);
                self.pool.set_lender_off(tier, false);
            }
            Event::LostMemory { tier } => {
                if self.pool.set_lender_lost(tier) {
                    out.again.push(Job::DoomLent);
                }
            }
            Event::Ending => {
                self.ending = true;
                for token in self.flow.end_drains() {
                    out.replies.push((token, Ok(Reply::Drained(false))));
                }
            }
            Event::Freeze => self.frozen = true,
            Event::Thaw => {
                (self.frozen, self.ending) = (false, false);
                // A load whose turn came in the meantime was answered without passing the turn on.
                self.loads.retry_oldest(out);
            }
            Event::Adopt { pool_bytes, slots } => {
                self.pool.enlarge_to(pool_bytes);
                slots.iter().for_each(|slot| self.adopt(slot));
            }
            Event::Tick => {
                self.flow.tick(&self.catalog, out);
                self.flow.note_hung_writes(&mut self.pool, &mut self.counters);
                for (tier, slot) in self.flow.hung_reads() {
                    self.give_up_read(tier, slot, out);
                }
                self.pool.look_who_stopped();
                let (claims, mut rooms) = split(self);
                claims.tick(&mut rooms, now, out);
            }
        }
        self.follow_up(out);
    }

    /// Does what may follow any event: space for waiting requests, commands, and replies to completed removals and
    /// drains.
    fn follow_up(&mut self, out: &mut Effects) {
        if !self.frozen {
            self.go_on_with_room(out);
        }
        self.tell_uses(out);
        if !self.frozen {
            self.demote(out);
            self.flow.write_cold(&mut self.pool, &mut self.counters);
            self.flow.emit(&mut self.pool, &self.catalog, &mut self.counters, out);
            if self.pool.has_room_come() {
                // A write that a tier does not get keeps its block no longer.
                out.again.push(Job::Emit);
            }
        }
        if self.pool.give_back_idle() {
            out.again.push(Job::Emit);
        }
        self.end_leases(out);
        for (token, failed) in self.flow.take_removed() {
            self.removal_ended(token, failed, out);
        }
        for token in self.flow.take_drained() {
            out.replies.push((token, Ok(Reply::Drained(true))));
        }
        self.tell_visible(&mut out.visible);
        self.tell_gone(&mut out.gone);
        self.prove(&mut out.proofs);
        self.forget_spaces();
    }

    /// Tells which blocks lookups find from now on, or no longer find, by the names that they know.
    fn tell_visible(&mut self, out: &mut Vec<(BlockKey, bool)>) {
        let mut block_key = self.catalog.block_keys();
        out.extend(self.pool.take_changes().map(|(key, visible)| (block_key(&key), visible)));
    }

    /// Tells what went in this step, by the names that lookups know.
    fn tell_gone(&mut self, out: &mut Vec<Gone>) {
        let mut block_key = self.catalog.block_keys();
        out.reserve(self.pool.gone.len());
        for gone in self.pool.gone.drain(..) {
            let GoneHere { key, mut fate, tier, kept_s } = gone;
            let mut name = block_key(&key);
            if fate == Fate::Reset {
                match self.catalog.root(key.space) {
                    // Whoever asks has another epoch's key.
                    Some((root, true)) => name.namespace = root,
                    _ => fate = Fate::Forgotten,
                }
            }
            out.push(Gone { key: name, fate, tier, kept_s });
        }
    }

    /// Who waits for room, or for its turn, gets it.
    fn go_on_with_room(&mut self, out: &mut Effects) {
        let room = self.pool.take_room() | self.pool.take_in_place_room();
        let turn = self.claims.take_turn();
        if room || turn {
            let Self { catalog, pool, flow, counters, loads, claims, .. } = self;
            let mut rooms = Rooms { catalog, pool, flow, counters };
            if room {
                loads.room_came(&mut rooms, out);
            }
            claims.room_came(&mut rooms, out);
        }
    }

    /// Expires a request.
    fn expire(&mut self, token: Token, out: &mut Effects) {
        if self.claims.expire_waiter(token, out) {
            return;
        }
        if let Some(removal) = self.removals.remove(&token) {
            out.replies.push((token, Ok(removal.reply())));
            return;
        }
        let Self { catalog, pool, flow, counters, loads, .. } = self;
        let mut rooms = Rooms { catalog, pool, flow, counters };
        if !loads.expire(&mut rooms, token, out) && self.flow.forget_token(token) {
            out.replies.push((token, Ok(Reply::Drained(false))));
        }
    }

    fn go_on(&mut self, job: Job, out: &mut Effects) {
        match job {
            Job::Claim(id) => {
                let (claims, mut rooms) = split(self);
                claims.go_on(&mut rooms, id, out);
            }
            // A request that waits while the pool is handed over is answered with what is known.
            Job::Load(token) if self.frozen => self.expire(token, out),
            Job::Load(token) => {
                let Self { catalog, pool, flow, counters, loads, .. } = self;
                loads.go_on(&mut Rooms { catalog, pool, flow, counters }, token, out);
            }
            Job::Sweep => self.sweep(out),
            Job::DoomLent => {
                if self.pool.doom_lent(self.pace.walk_slots, self.pace.sweep_dooms) {
                    out.again.push(Job::DoomLent);
                }
            }
            Job::EndOwner(owner) => {
                if !self.pool.end_owner(owner, self.pace.owner_leases).1 {
                    out.again.push(Job::EndOwner(owner));
                }
            }
            Job::EndClaims(owner) => {
                let (claims, mut rooms) = split(self);
                claims.release_ended(&mut rooms, owner, out);
            }
            Job::EndLoads(owner) => self.loads.close_ended(&mut self.pool, owner, out),
            Job::Arrival(arrival) => self.tell_waiters(arrival, out),
            // Every step emits.
            Job::Emit => {}
            Job::Miss { tier, slot } => self.read_over(tier, slot, &Ok(Fetched::Miss), out),
            Job::ReadHeldBack { tier, slot } => {
                let outcome = Err(Error::new(ErrorKind::Unavailable, "too many reads hang in the tier"));
                self.read_over(tier, slot, &outcome, out);
            }
        }
    }

    /// Ends all leases, claims and loads of an owner (P4).
    fn owner_ended(&mut self, owner: Owner, out: &mut Effects) {
        self.users.end_owner(owner);
        self.pool.forget_near(owner);
        self.loads.end_owner(&mut self.pool, owner, out);
        let (claims, mut rooms) = split(self);
        let claims = claims.end_owner(&mut rooms, owner, out);
        let (ended, all) = self.pool.end_owner(owner, self.pace.owner_leases);
        if !all {
            out.again.push(Job::EndOwner(owner));
        }
        self.counters.owners_ended_holding += u64::from(claims || ended > 0);
    }

    fn located(&mut self, ask: Ask, locations: Vec<Location>, out: &mut Effects) {
        let Self { catalog, pool, flow, counters, loads, claims, .. } = self;
        let mut rooms = Rooms { catalog, pool, flow, counters };
        match ask {
            Ask::Load(token) if self.frozen => self.expire(token, out),
            Ask::Load(token) => loads.located(&mut rooms, token, locations, out),
            Ask::Claim(id, part) => claims.located(&mut rooms, id, part, &locations, out),
        }
    }

    fn probed(&mut self, ask: Ask, outcome: Result<usize>, out: &mut Effects) {
        let count = outcome.inspect_err(|error| self.counters.failed("probe", error)).ok();
        let (claims, mut rooms) = split(self);
        if let Ask::Claim(id, run) = ask {
            claims.probed(&mut rooms, id, run, count, out);
        }
    }
}
