//! Take-over: a depot hands over its pool to another one at an arbitrary moment.
//!
//! Commands in flight at the tiers complete, clients that have not ended their copies are named, and the old depot
//! exits before the new one begins. In between, another depot may reset a namespace in the tiers.

use std::collections::HashSet;

use kvdepot_core::BlockKey;
use kvdepot_core::machine::{Adopt, Event, Handed, HandedState, HeldBy, HeldFrom, Owner, Request};

use crate::asked::Asked;
use crate::client::NO_LEASE;
use crate::fail::{Fail, Rule, fail};
use crate::mistakes::Mistake;
use crate::plan::Feature;
use crate::work::Work;
use crate::world::World;

/// Number of rounds in which tiers may complete their commands.
const ROUNDS: usize = 40;

impl World {
    /// Another depot takes over the pool, unless a command does not complete: then the old one continues.
    pub(crate) fn take_over(&mut self) -> Result<(), Fail> {
        self.note(|| "TAKE-OVER".to_owned());
        self.feed(Event::Freeze)?;
        self.end_waits()?;
        for client in 0..self.clients.len() {
            if self.clients[client].alive && self.rng.chance(50) {
                self.end_copies(client)?;
            }
        }
        let holders = self.end_connections()?;
        for _ in 0..self.rng.below(ROUNDS) {
            self.execute_one()?;
            self.end_one()?;
            self.go_on()?;
        }
        while !self.jobs.is_empty() {
            self.go_on()?;
        }
        if !self.is_settled(&holders) {
            return self.resume();
        }
        let handed = self.hand_over(&holders)?;
        // Something may have happened meanwhile.
        if !self.is_settled(&holders) {
            return self.resume();
        }
        self.forget_the_old()?;
        let pool_bytes = self.machine.gauges().pool_bytes;
        self.replace_machine();
        self.begin_anew()?;
        self.adopt(handed, &holders, pool_bytes)?;
        // Those that have ended since the list was written hold slots at the new depot nevertheless.
        for owner in holders {
            if self.mistake != Some(Mistake::EndUnnoticed)
                && !self.clients.iter().any(|client| client.owner == owner)
            {
                self.feed_and_answer(Event::OwnerEnded { owner })?;
            }
        }
        self.reached.insert("taken over");
        Ok(())
    }

    fn is_settled(&self, holders: &[Owner]) -> bool {
        let is_touched =
            |work: &Work| matches!(work, Work::Read { .. } | Work::Lease { .. } | Work::Remove { .. });
        !self.running.iter().any(|running| is_touched(&running.work))
            && self.machine.unsettled(holders).is_none()
    }

    /// The old depot continues.
    fn resume(&mut self) -> Result<(), Fail> {
        self.reached.insert("not taken over");
        self.feed_and_answer(Event::Thaw)
    }

    /// What may happen to a frozen depot between two pieces of its list: tiers complete writes, clients end.
    fn between_pieces(&mut self) -> Result<(), Fail> {
        if self.rng.chance(30) {
            self.execute_one()?;
            self.end_one()?;
        }
        if self.rng.chance(20) {
            self.end_killed()?;
        }
        if self.rng.chance(30) {
            self.go_on()?;
        }
        Ok(())
    }

    /// A new machine continues with the pool of the previous one. All numbers of the previous one are void, and the
    /// namespaces are opened in its epochs or later ones.
    pub(crate) fn begin_anew(&mut self) -> Result<(), Fail> {
        let epochs: Vec<u32> = self.spaces.iter().map(|space| space.epoch).collect();
        self.model.leases_begin_anew();
        for client in &mut self.clients {
            client.uses.clear();
            client.fills.iter_mut().for_each(|fill| fill.lease = NO_LEASE);
            client.readings.iter_mut().for_each(|reading| reading.lease = NO_LEASE);
        }
        self.reset_elsewhere();
        let before: Vec<_> = self.spaces.iter().map(|s| (s.id, s.earlier.clone(), s.acknowledged)).collect();
        let known: Vec<bool> = self.spaces.iter().map(|space| space.known).collect();
        let unstored: Vec<bool> = self.spaces.iter().map(|space| space.unstored).collect();
        self.open_spaces(&epochs, |number| known[number])?;
        for (space, (id, mut earlier, acknowledged)) in self.spaces.iter_mut().zip(before) {
            // No tier may have stored a reset that the pool knows.
            space.acknowledged = acknowledged;
            earlier.push(id);
            earlier.retain(|&id| id != space.id);
            space.earlier = earlier;
        }
        self.tell_unstored(&unstored)
    }

    /// Answers waiting requests with what is known.
    fn end_waits(&mut self) -> Result<(), Fail> {
        let tokens: Vec<u64> = self.waiting.keys().copied().collect();
        for token in tokens {
            if self.waiting.contains_key(&token) {
                self.expire(token)?;
            }
        }
        Ok(())
    }

    /// Commits some of a client's dumps.
    fn end_copies(&mut self, client: usize) -> Result<(), Fail> {
        let fills = &self.clients[client].fills;
        let blocks: Vec<usize> = (0..fills.len()).filter(|&fill| !fills[fill].value).collect();
        let some: Vec<usize> = blocks.into_iter().filter(|_| self.rng.chance(60)).collect();
        if some.is_empty() { Ok(()) } else { self.commit(client, &some, &[]) }
    }

    /// Ends all connections. The clients that may still copy are treated like killed ones.
    fn end_connections(&mut self) -> Result<Vec<Owner>, Fail> {
        for client in 0..self.clients.len() {
            self.request_of(Some(client), Request::EndClaims, Asked::Odd)?;
            self.clients[client].claims.clear();
            self.clients[client].alive = false;
        }
        let idle = |client: &crate::client::Client| client.fills.is_empty() && client.readings.is_empty();
        let over: Vec<Owner> =
            self.clients.iter().filter(|client| idle(client)).map(|client| client.owner).collect();
        self.clients.retain(|client| !idle(client));
        for owner in over {
            self.feed_and_answer(Event::OwnerEnded { owner })?;
        }
        Ok(self.clients.iter().map(|client| client.owner).collect())
    }

    fn hand_over(&mut self, holders: &[Owner]) -> Result<Vec<Handed>, Fail> {
        let (mut held_by, mut from) = (HeldBy::default(), Some(HeldFrom::default()));
        while let Some(start) = from {
            let (held, next) = self.machine.held(holders, start, 2);
            held_by.add(&held);
            if next == Some(start) {
                return fail(Rule::Progress, "a walk over leases does not go on");
            }
            from = next;
            self.between_pieces()?;
        }
        let (mut handed, mut from) = (Vec::new(), Some(0));
        while let Some(start) = from {
            let (some, next) = self.machine.handed(&held_by, start, 5);
            handed.extend(some);
            if next.is_some_and(|next| next <= start) {
                return fail(Rule::Progress, "a walk over slots does not go on");
            }
            from = next;
            self.between_pieces()?;
        }
        Ok(handed)
    }

    /// The old depot has exited, and its writes with it: each has happened completely or not at all.
    fn forget_the_old(&mut self) -> Result<(), Fail> {
        let running = std::mem::take(&mut self.running);
        for operation in running {
            let runs = match &operation.work {
                Work::Write { runs, .. } => Some(runs.clone()),
                _ => None,
            };
            self.crash_running(operation);
            if let Some(runs) = runs {
                self.memory.end_read(&runs);
            }
        }
        self.take_memory_away();
        self.ledger.clear();
        self.outbox.clear();
        self.forgotten.clear();
        self.answers.clear();
        self.presence.clear();
        self.opened.clear();
        if let Some(waiting) = self.waiting.values().next() {
            return fail(Rule::Replies, format!("not answered before the take-over: {waiting:?}"));
        }
        Ok(())
    }

    /// Another depot over the same tiers resets a namespace in the meantime.
    fn reset_elsewhere(&mut self) {
        let space = self.rng.below(self.spaces.len());
        if self.luck(Feature::Resets, 30) && !self.tiers.is_empty() {
            let (root, epoch) = (self.spaces[space].root, self.spaces[space].epoch + 1);
            self.tiers.iter_mut().for_each(|tier| {
                tier.set_epoch(root, epoch);
            });
        }
    }

    pub(crate) fn adopt(
        &mut self,
        handed: Vec<Handed>,
        holders: &[Owner],
        pool_bytes: u64,
    ) -> Result<(), Fail> {
        let mut expected: HashSet<BlockKey> = HashSet::new();
        let mut dirty = 0;
        let mut slots = Vec::new();
        for mut handed in handed {
            if self.mistake == Some(Mistake::EpochForgotten)
                && let HandedState::Block { key, .. } = &mut handed.state
                && let Some(space) = self.spaces.iter().find(|space| space.earlier.contains(&key.namespace))
            {
                key.namespace = space.id;
            }
            if let HandedState::Block { key, to_write, value, .. } = handed.state
                && self.live_space(&key).is_some()
            {
                let is_dirty = to_write & self.at_seal(value) != 0;
                dirty += u64::from(is_dirty);
                let stays = self.plan.shape.keeps || !handed.holders.is_empty() || is_dirty;
                if stays && !expected.insert(key) {
                    return fail(Rule::Presence, "a block is handed over twice");
                }
            }
            let owners = match self.mistake {
                Some(Mistake::HoldersForgotten) => Vec::new(),
                _ => handed.holders.iter().map(|&holder| holders[holder as usize]).collect(),
            };
            slots.push(Adopt { handed, owners });
        }
        while !slots.is_empty() {
            let count = self.rng.between(1, slots.len().min(4));
            let some = slots.drain(..count).collect();
            self.adopting = true;
            self.feed_and_answer(Event::Adopt { pool_bytes, slots: some })?;
            self.adopting = false;
        }
        let gauges = self.machine.gauges();
        // Blocks that a tier did not get because its budget was used up are clean, and gone if the pool keeps nothing.
        let given_up = self.machine.counters().over_budget_blocks;
        let least =
            expected.len() - if self.plan.shape.keeps { 0 } else { (given_up as usize).min(expected.len()) };
        let is_right = (least..=expected.len()).contains(&self.presence.len())
            && (dirty.saturating_sub(given_up)..=dirty).contains(&gauges.dirty_blocks);
        if !is_right {
            return fail(
                Rule::Presence,
                format!("{} blocks and {dirty} dirty were handed over: {gauges:?}", expected.len()),
            );
        }
        Ok(())
    }
}
