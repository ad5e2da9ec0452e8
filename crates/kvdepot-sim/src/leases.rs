//! Blocks that a tier leases in its memory. Every lease has pages of its own there; when it ends, they are overwritten.
//!
//! Some clients can read there and others cannot. A client that still reads when its depot has ended finds out that the
//! memory has another owner, and throws away what it has read.

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::{Command, Event, Gauges, Job, Leased, Nanos, Request, Token};
use kvdepot_core::runs::Run;
use kvdepot_core::{BlockKey, SlotId};

use crate::asked::Asked;
use crate::client::Wish;
use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::plan::Feature;
use crate::world::World;

fn is_in_place(runs: &[Run]) -> bool {
    runs.iter().any(|run| run.in_place().is_some())
}

fn ended_places((_, command): &(u64, Command)) -> Option<&Vec<u64>> {
    match command {
        Command::EndLeases { places, .. } => Some(places),
        _ => None,
    }
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
        (self.lender_off, self.leases_before_loss) = (false, None);
        match self.lender() {
            Some((tier, memory_bytes)) => {
                let unit_bytes = self.unit_bytes();
                self.feed(Event::InPlace { tier, memory_bytes, unit_bytes })
            }
            None => Ok(()),
        }
    }

    /// The unit in which the tier that leases blocks allocates its memory.
    fn unit_bytes(&self) -> u64 {
        self.plan.shape.lender.map_or(1, |lender| lender.unit_pages) as u64 * BLOCK_ALIGN_BYTES
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

    /// A tier is switched off, or comes back; or the one that leases blocks loses its memory. `chance` decides, of 100.
    pub(crate) fn switch_lender(&mut self, chance: usize) -> Result<(), Fail> {
        let Some((tier, _)) = self.lender() else { return Ok(()) };
        match chance {
            0..8 => self.lose_memory(tier),
            8..20 => self.feed(Event::WentDown { tier: tier + 1 }),
            _ => {
                self.lender_off = !self.lender_off;
                self.reached.insert("lender off");
                self.feed(if self.lender_off { Event::WentDown { tier } } else { Event::CameBack { tier } })
            }
        }
    }

    /// The tier that leases blocks loses its memory. Clients ask for what lies there before a walk has got to it.
    fn lose_memory(&mut self, tier: usize) -> Result<(), Fail> {
        self.reached.insert("memory lost");
        // Each reader has a claim that may wait for more than it has leased.
        let readers: Vec<usize> = (0..self.clients.len())
            .filter(|&client| self.clients[client].alive && self.reads_in_place(client))
            .collect();
        for &client in if self.has(Feature::Claims) { &readers[..] } else { &[] } {
            self.claim_as(client)?;
        }
        let keys = self.lent_keys();
        // Claims that have settled lose what lies there.
        keys.iter().for_each(|key| self.model.damaged(*key, self.at));
        self.leases_before_loss.get_or_insert(self.machine.leases_granted());
        self.feed(Event::LostMemory { tier })?;
        for client in readers {
            for chosen in 0..self.clients[client].claims.len() {
                if chosen < self.clients[client].claims.len() {
                    self.poll_claim(client, chosen, true)?;
                }
            }
            if let Some(key) = keys.get(client)
                && let Some(space) = self.known_space(key)
            {
                self.load_block(client, space, *key, true)?;
            }
        }
        Ok(())
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
        let Some(space) = self.known_space(&key) else { return Ok(()) };
        self.tiers[tier].damage_block(&key);
        self.load_block(client, space, key, false)?;
        match (0..self.clients.len())
            .find(|&client| self.clients[client].alive && self.reads_in_place(client))
        {
            Some(client) => self.load_block(client, space, key, true).map(drop),
            None => Ok(()),
        }
    }

    /// A client asks for a block of a current epoch.
    fn load_block(
        &mut self,
        client: usize,
        space: usize,
        key: BlockKey,
        in_place: bool,
    ) -> Result<Token, Fail> {
        let request = Request::Load {
            namespace: self.spaces[space].handle,
            id: None,
            hashes: vec![key.hash],
            fetch_deadline: self.now + (1 << 40),
            last: true,
            runs_max: usize::MAX,
            in_place,
        };
        self.request_of(Some(client), request, Asked::Load { keys: vec![key] })
    }

    /// Returns whether a tier answers reads now: it is neither switched off, nor has it lost its memory.
    pub(crate) fn answers_reads(&self, tier: usize) -> bool {
        let is_down = self.lender_off || self.leases_before_loss.is_some();
        !is_down || self.lender().is_none_or(|(lender, _)| lender != tier)
    }

    /// A client loads what its claim has just settled for: all of it is there (P9).
    pub(crate) fn load_hit(&mut self, client: usize, wish: &Wish, units: usize) -> Result<(), Fail> {
        let in_place = self.reads_in_place(client);
        if self.lender().is_some() && !in_place {
            // It would get copies of what is leased in place.
            return Ok(());
        }
        let before = self.clients[client].readings.len();
        for key in wish.needed(units) {
            let Some(space) = self.known_space(&key) else { continue };
            let (had, comes) = (self.clients[client].readings.len(), self.is_being_read(&key));
            let token = self.load_block(client, space, key, in_place)?;
            // Nothing else happens meanwhile.
            while let Some(at) = self.jobs.iter().position(|job| *job == Job::Load(token)) {
                let job = self.jobs.remove(at);
                self.feed(Event::Continue(job))?;
            }
            if self.clients[client].readings.len() == had && !comes {
                return fail(Rule::Claims, format!("{} of a new hit cannot be loaded", name(&key)));
            }
        }
        let readings = self.clients[client].readings.split_off(before);
        readings.iter().for_each(|reading| self.memory.end_read(&reading.runs));
        let leases = readings.into_iter().map(|reading| reading.lease).collect();
        self.request_of(Some(client), Request::Release { leases }, Asked::Done)?;
        self.reached.insert("hit loaded");
        Ok(())
    }

    /// Checks that no more is leased than the limits allow.
    pub(crate) fn check_lent(&self, gauges: &Gauges) -> Result<(), Fail> {
        let Some((_, memory_bytes)) = self.lender() else { return Ok(()) };
        // The tier ends these before it leases more.
        let ending: Vec<u64> = self.outbox.iter().filter_map(ended_places).flatten().copied().collect();
        let lent = self.memory.leased_places().filter(|(place, _)| !ending.contains(place));
        let lent = lent.map(|(_, pages)| pages as u64 * BLOCK_ALIGN_BYTES);
        let lent: u64 = lent.map(|bytes| bytes.next_multiple_of(self.unit_bytes())).sum();
        let most = lent.max(gauges.in_place.bytes);
        if most > memory_bytes / 2 {
            return fail(Rule::Caps, format!("{most} bytes of {memory_bytes} in a tier's memory are leased"));
        }
        Ok(())
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
        if is_in_place(&leased.runs) && self.leases_before_loss.is_some_and(|before| leased.lease.0 > before)
        {
            return fail(Rule::Claims, format!("{} was leased in memory that is lost", name(key)));
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
        if known > 0 && self.leases_before_loss.is_some() && !self.jobs.contains(&Job::DoomLent) {
            return fail(
                Rule::Leaks,
                format!("{known} blocks are leased in memory that is lost, and nobody reads them"),
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
