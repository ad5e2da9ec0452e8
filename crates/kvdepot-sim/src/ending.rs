//! The end of a run: everything is released, and nothing may be left. Then come claims without faults, whose hit is
//! known in advance.

use kvdepot_core::BlockKey;
use kvdepot_core::machine::{Event, Request, TierSet};

use crate::asked::Asked;
use crate::client::{Client, Wish};
use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::rng::Rng;
use crate::world::World;

/// Number of rounds by which all work must have ended.
const ROUNDS_MAX: usize = 3_000;
/// Number of ticks by which delayed work must have been retried.
const TICKS_MAX: usize = 300;
/// Maximum share of the pool that a claim may take, in percent.
const CLAIM_SHARE: usize = 90;

impl World {
    /// Ends the run.
    pub(crate) fn finish(&mut self) -> Result<(), Fail> {
        self.calm = true;
        self.at += 1;
        self.rng = Rng::new(self.plan.seed ^ 0xE0D);
        self.tiers.iter_mut().for_each(|tier| tier.full = false);
        self.settle_down()?;
        self.end_clients()?;
        self.check_progress()?;
        self.end_all_claims()?;
        let ends_by_itself = |asked: &Asked| matches!(asked, Asked::Drain { .. } | Asked::Remove { .. });
        if let Some(late) = self.waiting.values().find(|waiting| ends_by_itself(&waiting.asked)) {
            return fail(Rule::Progress, format!("tiers have ended all, and it still waits: {late:?}"));
        }
        let tokens: Vec<u64> = self.waiting.keys().copied().collect();
        for token in tokens {
            if self.waiting.contains_key(&token) {
                self.expire(token)?;
            }
        }
        self.end_clients()?;
        self.settle_down()?;
        self.reset_closed()?;
        self.check_leaks()?;
        self.check_listed()?;
        self.check_tiers()?;
        for round in 0..6 {
            self.calm_claim()?;
            if round == 3 {
                // A step evicts only a few.
                for _ in 0..10_000 {
                    self.request_of(None, Request::EvictTo { bytes: 0 }, Asked::Done)?;
                    if self.machine.gauges().pool_blocks == 0 {
                        break;
                    }
                    // In between, cold blocks are written to the tiers that should get them.
                    self.settle_down()?;
                }
                let gauges = self.machine.gauges();
                if gauges.pool_free_bytes != gauges.pool_bytes {
                    return fail(Rule::Leaks, format!("all was evicted, and {gauges:?}"));
                }
                if !self.presence.is_empty() {
                    return fail(Rule::Presence, "the pool is empty, and lookups find blocks");
                }
            }
        }
        Ok(())
    }

    /// Returns whether nothing is in flight.
    fn is_quiet(&self) -> bool {
        self.outbox.is_empty()
            && self.running.is_empty()
            && self.jobs.is_empty()
            && self.answers.is_empty()
            && self.forgotten.is_empty()
    }

    /// Lets everything in flight complete, including delayed writes.
    pub(crate) fn settle_down(&mut self) -> Result<(), Fail> {
        let mut ticks = 0;
        for _ in 0..ROUNDS_MAX {
            if self.is_quiet() {
                let gauges = self.machine.gauges();
                if gauges.writes_queued == 0 && gauges.removals_owed == 0 {
                    return Ok(());
                }
                // Delayed writes of values and failed removals are retried.
                self.feed_and_answer(Event::Tick)?;
                ticks += 1;
                if self.is_quiet() && ticks > TICKS_MAX {
                    break;
                }
            }
            self.answer()?;
            self.go_on()?;
            self.execute_one()?;
            self.end_one()?;
        }
        let (gauges, jobs) = (self.machine.gauges(), self.jobs.len());
        fail(
            Rule::Progress,
            format!("work does not end: {jobs} jobs, {} commands, {gauges:?}", self.outbox.len()),
        )
    }

    /// Makes clients end their dumps and release what they read; some clients end.
    fn end_clients(&mut self) -> Result<(), Fail> {
        for client in &mut self.clients {
            if client.claims.is_empty() && self.rng.chance(50) {
                client.alive = false;
            }
        }
        while self.clients.iter().any(|client| !client.alive) {
            self.end_killed()?;
        }
        for client in 0..self.clients.len() {
            let fills = std::mem::take(&mut self.clients[client].fills);
            for fill in fills {
                self.memory.end_write(&fill.runs, fill.version as u64);
                let request = Request::Release { leases: vec![fill.lease] };
                self.request_of(Some(client), request, Asked::Done)?;
            }
            let readings = std::mem::take(&mut self.clients[client].readings);
            for reading in readings {
                if self.memory.tags(&reading.runs) != reading.tags {
                    return fail(Rule::Bytes, format!("{} changed while it was read", name(&reading.key)));
                }
                self.memory.end_read(&reading.runs);
                let request = Request::Release { leases: vec![reading.lease] };
                self.request_of(Some(client), request, Asked::Done)?;
            }
        }
        self.settle_down()
    }

    /// Checks that waiting requests have a reason to wait: something is pinned that will be released.
    fn check_progress(&mut self) -> Result<(), Fail> {
        loop {
            let gauges = self.machine.gauges();
            let idle = gauges.held.pinned == 0;
            if idle && gauges.loads_open > 0 {
                return fail(Rule::Progress, format!("loads wait although nothing is in use: {gauges:?}"));
            }
            let mut unsettled = 0;
            let mut settled = None;
            for client in 0..self.clients.len() {
                let claims: Vec<u64> = self.clients[client].claims.iter().map(|claim| claim.id).collect();
                for claim in claims {
                    self.poll_to_the_end(client, claim)?;
                }
                for (number, claim) in self.clients[client].claims.iter().enumerate() {
                    match claim.settled {
                        Some(_) => settled = Some((client, number)),
                        None => unsettled += 1,
                    }
                }
            }
            // A load that ended in the meantime leased blocks, and a claim may wait for their space.
            let held = |client: &Client| !client.readings.is_empty() || !client.fills.is_empty();
            if unsettled > 0 && settled.is_none() && self.clients.iter().any(held) {
                self.end_clients()?;
                continue;
            }
            if unsettled > 0 && settled.is_none() {
                return fail(
                    Rule::Progress,
                    format!("{unsettled} claims wait, and none is settled: {gauges:?}"),
                );
            }
            let Some((client, claim)) = settled else { return Ok(()) };
            self.end_claim(client, claim)?;
            self.settle_down()?;
            self.end_clients()?;
        }
    }

    fn end_all_claims(&mut self) -> Result<(), Fail> {
        for client in 0..self.clients.len() {
            while !self.clients[client].claims.is_empty() {
                self.end_claim(client, 0)?;
            }
        }
        self.settle_down()
    }

    fn check_leaks(&self) -> Result<(), Fail> {
        let gauges = self.machine.gauges();
        let held = gauges.held;
        if (held.filling, held.fetching, held.dirty, held.leased, held.pinned) != (0, 0, 0, 0, 0)
            || (gauges.claims_open, gauges.claims_queued, gauges.loads_open) != (0, 0, 0)
            || (gauges.reads_queued, gauges.writes_queued) != (0, 0)
        {
            return fail(Rule::Leaks, format!("all was given back, and {gauges:?}"));
        }
        if gauges.spaces != gauges.namespaces {
            return fail(
                Rule::Leaks,
                format!("nothing is left of past epochs, and they are known: {gauges:?}"),
            );
        }
        if gauges.pool_blocks != self.presence.len() {
            return fail(Rule::Presence, format!("{} visible of {gauges:?}", self.presence.len()));
        }
        if !self.waiting.is_empty() {
            return fail(Rule::Replies, format!("requests without a reply: {:?}", self.waiting));
        }
        self.check_leases()?;
        match self.memory.in_use() {
            0 => Ok(()),
            pages => fail(Rule::Leaks, format!("the simulation itself holds {pages} pages")),
        }
    }

    /// Checks that a walk over the pool finds the blocks that lookups find.
    fn check_listed(&mut self) -> Result<(), Fail> {
        self.listed.clear();
        let mut from = Some(0);
        while let Some(start) = from {
            let known = self.spaces.iter().filter(|space| space.known);
            let namespaces = known.map(|space| space.handle).collect();
            let request = Request::Keys { namespaces, from: start };
            self.request_of(None, request, Asked::Keys { from: start })?;
            from = self.next_listed.take();
        }
        match (self.listed.len(), self.presence.len()) {
            (listed, present) if listed == present => Ok(()),
            (listed, present) => {
                fail(Rule::Presence, format!("{listed} blocks are listed of {present} visible"))
            }
        }
    }

    /// Checks that the blocks of current epochs in tiers, which may be served at any time, are complete and current.
    fn check_tiers(&self) -> Result<(), Fail> {
        for (number, tier) in self.tiers.iter().enumerate() {
            for (key, tags) in tier.kept().filter(|(key, _)| self.live_space(key).is_some()) {
                let version = self.model.version(key, tags)?;
                if self.model.is_gone(version) {
                    return fail(
                        Rule::Stale,
                        format!("tier {number} keeps {} version {version}, removed or replaced", name(key)),
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns whether the pool or one of these tiers has a block.
    fn is_there(&self, key: &BlockKey, among: TierSet) -> bool {
        let tiers = self.tiers.iter().enumerate().filter(|(tier, _)| among.has(*tier));
        let mut tiers = tiers.filter(|(tier, _)| self.answers_reads(*tier));
        self.presence.contains(key) || tiers.any(|(_, tier)| tier.holds(key))
    }

    /// Makes a claim without other activity: its hit must be the longest possible.
    fn calm_claim(&mut self) -> Result<(), Fail> {
        let wish = self.wish();
        self.know_all(&wish)?;
        // What is leased in a tier's memory is that tier's, and is seen like what is in the pool.
        let tiers = if self.lender().is_some() { TierSet::ALL } else { wish.tiers };
        let wish = Wish { spaces: self.ids_of(&wish.groups), tiers, ..wish };
        let damaged = wish.needed_all().iter().any(|key| self.tiers.iter().any(|tier| tier.is_damaged(key)));
        let best = wish.hit(|key| self.is_there(key, tiers));
        let fits = wish.pages(best) * 100 <= self.plan.shape.pool_pages_max * CLAIM_SHARE;
        let written_late = self.machine.counters().late_write_blocks;
        let mut owner = self.number();
        while self.lender().is_some() && owner.is_multiple_of(4) {
            // One that can read what the claim finds, wherever it lies.
            owner = self.number();
        }
        self.clients.push(Client::new(owner));
        let client = self.clients.len() - 1;
        let endless = Wish { patience: 1 << 50, deadline: self.now + (1 << 50), ..wish.clone() };
        self.open_claim(client, endless)?;
        self.settle_down()?;
        let Some(claim) = self.clients[client].claims.first() else {
            return fail(Rule::Claims, "a calm claim is not there");
        };
        let id = claim.id;
        self.poll_to_the_end(client, id)?;
        let settled = self.clients[client].claims.first().and_then(|claim| claim.settled);
        let Some(units) = settled else {
            return fail(Rule::Progress, "a calm claim does not settle");
        };
        // Blocks that the claim fetches push cold blocks down, and a full tier evicts for them, possibly blocks of the
        // claim.
        let still = wish.hit(|key| self.is_there(key, tiers)).min(best);
        // While cold blocks are written they take space, and the claim gets the rest.
        let shared = self.machine.counters().late_write_blocks != written_late;
        if units > best || (fits && !damaged && !shared && units < still) {
            return fail(Rule::Claims, format!("a hit of {units} units where {still} are there: {wish:?}"));
        }
        let keys = wish.needed(units);
        if self.reads_in_place(client) {
            self.lease_everywhere(client, &keys)?;
        } else {
            let request = Request::LeaseNow { keys: keys.clone() };
            self.request_of(Some(client), request, Asked::LeaseNow { keys: keys.clone() })?;
        }
        if self.clients[client].readings.len() != keys.len() {
            return fail(Rule::Claims, "blocks of a settled hit cannot be leased");
        }
        self.end_claim(client, 0)?;
        self.clients[client].alive = false;
        self.end_killed()?;
        self.settle_down()
    }
}
