//! Blocks that a tier leases in its memory. Every lease has pages of its own there; when it ends, they are overwritten.
//!
//! Some clients can read there and others cannot. A client that still reads when its depot has ended finds out that the
//! memory has another owner, and throws away what it has read.

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{Event, Job, Leased, Nanos, Request};
use kvdepot_core::runs::Run;
use kvdepot_core::{BlockKey, SlotId};

use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::plan::Feature;
use crate::replies::Asked;
use crate::world::World;

fn is_in_place(runs: &[Run]) -> bool {
    runs.iter().any(|run| run.in_place().is_some())
}

impl World {
    /// Returns the tier that leases blocks, and the size of its memory.
    pub(crate) fn lender(&self) -> Option<(usize, u64)> {
        let lender = self.plan.shape.lender.filter(|_| self.has(Feature::Leases))?;
        Some((lender.tier, lender.pages as u64 * BLOCK_ALIGN_BYTES))
    }

    /// Returns whether a client can read in a tier's memory.
    pub(crate) fn reads_in_place(&self, client: usize) -> bool {
        self.lender().is_some() && !self.clients[client].owner.is_multiple_of(4)
    }

    pub(crate) fn begin_lending(&mut self) -> Result<(), Fail> {
        (self.lender_down, self.leases_before_down) = (false, None);
        match self.lender() {
            Some((tier, memory_bytes)) => {
                self.feed(Event::InPlace { tier, memory_bytes, unit_bytes: BLOCK_ALIGN_BYTES })
            }
            None => Ok(()),
        }
    }

    /// Ends a lease command as reads end.
    pub(crate) fn end_lease(
        &mut self,
        tier: usize,
        slot: SlotId,
        key: BlockKey,
        deadline: Nanos,
        begun: Option<Vec<u64>>,
    ) -> Result<(), Fail> {
        let (outcome, tags) = self.tier_reads(tier, &key, deadline, begun);
        let place = tags.map(|tags| self.memory.lend(tags));
        if place.is_some() {
            self.reached.insert("leased in place");
        }
        self.feed_and_answer(Event::LeaseEnded { tier, slot, outcome: outcome.map(|_| place) })
    }

    /// Ends leases: what lay there is overwritten at once.
    pub(crate) fn end_leases(&mut self, places: &[u64]) -> Result<(), Fail> {
        for &place in places {
            self.memory.end_lease(place)?;
            self.reached.insert("lease in place ended");
        }
        Ok(())
    }

    /// The tier has found a block damaged. If it is leased, whoever reads it now may go on, and nobody is shown it any more.
    pub(crate) fn note_damaged(&mut self, tier: usize, key: &BlockKey) {
        if self.lender().is_some_and(|(lender, _)| lender == tier) {
            let is_of = |&(tag, _): &(u64, u64)| self.model.key_of(tag) == Some(*key);
            let places = self.memory.lent().filter(is_of).map(|(_, place)| place).collect();
            self.memory.damage(places, self.machine.leases_granted());
        }
    }

    /// Returns the keys of all leased blocks.
    fn lent_keys(&self) -> Vec<BlockKey> {
        self.memory.lent().filter_map(|(tag, _)| self.model.key_of(tag)).collect()
    }

    /// The tier that leases blocks goes down, or comes back.
    pub(crate) fn switch_lender(&mut self) -> Result<(), Fail> {
        let Some((tier, _)) = self.lender() else { return Ok(()) };
        self.lender_down = !self.lender_down;
        self.reached.insert("lender down");
        self.lose_hits();
        self.feed(if self.lender_down { Event::WentDown { tier } } else { Event::CameBack { tier } })
    }

    /// A leased block is damaged in its tier, and a client that cannot read there asks for it; then another client does.
    pub(crate) fn read_damaged(&mut self) -> Result<(), Fail> {
        let Some((tier, _)) = self.lender().filter(|_| self.has(Feature::CorruptReads)) else {
            return Ok(());
        };
        let keys = self.lent_keys();
        let others: Vec<usize> = (0..self.clients.len())
            .filter(|&client| self.clients[client].alive && !self.reads_in_place(client))
            .collect();
        if keys.is_empty() || others.is_empty() {
            return Ok(());
        }
        let (key, client) = (keys[self.rng.below(keys.len())], others[self.rng.below(others.len())]);
        let known = self.live_space(&key).filter(|&space| self.spaces[space].known);
        let Some(space) = known else { return Ok(()) };
        self.tiers[tier].damage_block(&key);
        self.load_block(client, space, key, false)?;
        match (0..self.clients.len())
            .find(|&client| self.clients[client].alive && self.reads_in_place(client))
        {
            Some(client) => self.load_block(client, space, key, true),
            None => Ok(()),
        }
    }

    /// A client asks for a block of a current epoch.
    fn load_block(&mut self, client: usize, space: usize, key: BlockKey, in_place: bool) -> Result<(), Fail> {
        let request = Request::Load {
            namespace: self.spaces[space].handle,
            id: None,
            hashes: vec![key.hash],
            fetch_deadline: self.now + (1 << 40),
            last: true,
            runs_max: usize::MAX,
            in_place,
        };
        self.request_of(Some(client), request, Asked::Load { keys: vec![key] })?;
        Ok(())
    }

    /// Claims lose what a tier has leased that goes down.
    fn lose_hits(&mut self) {
        for key in self.lent_keys() {
            self.model.damaged(key, self.at);
        }
    }

    /// Notes after a step whether the machine has forgotten what a tier that is down has leased.
    pub(crate) fn note_lender(&mut self) {
        if !self.lender_down {
            self.leases_before_down = None;
        } else if self.leases_before_down.is_none() && !self.jobs.contains(&Job::DoomLent) {
            self.leases_before_down = Some(self.machine.leases_granted());
            self.lose_hits();
        }
    }

    /// Checks that a client can read where a block was leased to it.
    pub(crate) fn check_place(
        &self,
        client: usize,
        key: &BlockKey,
        leased: &Leased,
        in_pool: bool,
    ) -> Result<(), Fail> {
        if is_in_place(&leased.runs) && (in_pool || !self.reads_in_place(client)) {
            return fail(
                Rule::Bytes,
                format!("{} was leased in memory that its reader does not have", name(key)),
            );
        }
        if self.memory.is_damaged(&leased.runs, leased.lease.0) {
            return fail(
                Rule::Bytes,
                format!("{} was leased where its tier has found it damaged", name(key)),
            );
        }
        if is_in_place(&leased.runs) && self.leases_before_down.is_some_and(|before| leased.lease.0 > before)
        {
            return fail(Rule::Claims, format!("{} was leased in memory of a tier that is down", name(key)));
        }
        Ok(())
    }

    /// The depot has ended, and the tier's memory belongs to the next one: what clients read there does not count.
    pub(crate) fn take_memory_away(&mut self) {
        for client in &mut self.clients {
            client.readings.retain(|reading| !is_in_place(&reading.runs));
        }
        self.memory.forget_lent();
    }

    /// Checks that every lease of the tier is one that the machine knows.
    pub(crate) fn check_leases(&self) -> Result<(), Fail> {
        let (given, known) = (self.memory.leases(), self.machine.gauges().in_place.blocks);
        if known > 0 && self.leases_before_down.is_some() {
            return fail(
                Rule::Leaks,
                format!("a tier that is down has {known} blocks leased, and nobody reads them"),
            );
        }
        if given as u64 == known {
            return Ok(());
        }
        fail(Rule::Leaks, format!("the tier has {given} blocks leased, and the depot {known}"))
    }

    /// Leases blocks of current epochs for a client that can read them everywhere.
    pub(crate) fn lease_everywhere(&mut self, client: usize, keys: &[BlockKey]) -> Result<(), Fail> {
        for key in keys {
            let Some(space) = self.live_space(key) else { continue };
            self.load_block(client, space, *key, true)?;
        }
        self.settle_down()
    }
}
