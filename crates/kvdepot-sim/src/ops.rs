//! The operations of a run. Each derives its actions from its own random numbers and from the current world.

use kvdepot_core::machine::{Event, Location, Request, Reserve, ShardSet};
use kvdepot_core::{BlockHash, BlockKey, Priority};

use crate::asked::Asked;
use crate::client::Client;
use crate::fail::{Fail, Rule, fail};
use crate::memory::pages;
use crate::mistakes::Mistake;
use crate::model::{crc_of, name, tag};
use crate::plan::Feature;
use crate::rng::Rng;
use crate::specs;
use crate::world::World;

type Op = fn(&mut World) -> Result<(), Fail>;

/// Weight of each operation, and the feature that it needs.
const OPS: [(usize, Option<Feature>, Op); 31] = [
    (12, None, World::dump),
    (16, None, World::fill),
    (4, None, World::copy_on),
    (1, None, World::give_up),
    (8, Some(Feature::Loads), World::load),
    (3, None, World::lease_now),
    (10, None, World::release),
    (1, None, World::set_checksum),
    (2, Some(Feature::Prefetches), World::prefetch),
    (4, Some(Feature::Removals), World::remove),
    (5, Some(Feature::Values), World::put),
    (7, Some(Feature::Values), World::publish),
    (6, Some(Feature::Claims), World::claim),
    (5, Some(Feature::Claims), World::poll),
    (4, Some(Feature::Claims), World::release_claim),
    (2, Some(Feature::Evictions), World::evict),
    (1, Some(Feature::Drains), World::drain),
    (2, Some(Feature::Resets), World::reset),
    (3, Some(Feature::Forgetting), World::use_namespace),
    (1, Some(Feature::FullDisk), World::store_epochs),
    (2, Some(Feature::Kills), World::kill),
    (5, None, World::end_killed),
    (28, None, World::execute),
    (26, None, World::end_some),
    (14, None, World::go_on),
    (8, None, World::answer),
    (5, None, World::pass_time),
    (3, Some(Feature::Expiries), World::expire_one),
    (4, None, World::misfortune),
    (2, Some(Feature::TakeOvers), World::take_over),
    (2, Some(Feature::Nonsense), World::nonsense),
];

impl World {
    /// Runs one operation.
    pub(crate) fn op(&mut self, seed: u64) -> Result<(), Fail> {
        let mut rng = Rng::new(seed ^ 0x1E4D_D0E4);
        match rng.below(100) {
            0 => self.switch_lender(rng.below(100))?,
            1 | 2 => self.read_damaged()?,
            3 | 5 => self.remove_claimed(rng.below(100))?,
            4 => self.claim_together(rng.below(100))?,
            6..=11 => self.claim_from_tiers()?,
            _ => {}
        }
        self.rng = Rng::new(seed);
        let total: usize = OPS.iter().map(|op| op.0).sum();
        let mut chosen = self.rng.below(total);
        for (weight, feature, op) in OPS {
            if chosen < weight {
                return if feature.is_none_or(|feature| self.has(feature)) { op(self) } else { Ok(()) };
            }
            chosen -= weight;
        }
        Ok(())
    }

    /// Returns a client that is alive; a new one if there are few.
    pub(crate) fn someone(&mut self) -> usize {
        let alive: Vec<usize> = (0..self.clients.len()).filter(|&n| self.clients[n].alive).collect();
        let chosen = self.rng.below(self.plan.shape.clients);
        if chosen < alive.len() {
            return alive[chosen];
        }
        let owner = self.number();
        self.clients.push(Client::new(owner));
        self.clients.len() - 1
    }

    /// Returns some neighbouring units of a prompt.
    fn units(&mut self) -> Vec<BlockHash> {
        let (prompts, units) = (self.plan.shape.prompts, self.plan.shape.prompt_units);
        let prompt = self.rng.below(prompts);
        let first = if self.rng.chance(60) { 0 } else { self.rng.below(units) };
        let end = self.rng.between(first + 1, units);
        (first..end).map(|unit| specs::hash(prompt, unit)).collect()
    }

    fn keys(&self, space: usize, hashes: &[BlockHash]) -> Vec<BlockKey> {
        hashes.iter().map(|&hash| self.key(space, hash)).collect()
    }

    fn runs_max(&mut self) -> usize {
        if self.rng.chance(10) { self.rng.between(1, 4) } else { usize::MAX }
    }

    fn dump(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let (space, hashes) = (self.space_of_blocks(), self.units());
        let how = if self.rng.chance(25) { Reserve::RemoteBlock } else { self.drawn_priority() };
        self.reserve(client, space, hashes, how)
    }

    /// Returns the kind of slot for a local dump. It uses its own random numbers, so the plan's do not change.
    fn drawn_priority(&self) -> Reserve {
        let mut rng = Rng::new(self.plan.seed ^ (self.at as u64) << 8 ^ 0x9817_0217);
        match rng.below(5) {
            0 | 1 if self.has(Feature::Priorities) => Reserve::Ranked(Priority::Low),
            2 if self.has(Feature::Priorities) => Reserve::Ranked(Priority::High),
            _ => Reserve::Block,
        }
    }

    fn put(&mut self) -> Result<(), Fail> {
        let (client, mut hashes) = (self.someone(), self.units());
        hashes.truncate(2);
        self.reserve(client, specs::VALUES, hashes, Reserve::Value)
    }

    fn reserve(
        &mut self,
        client: usize,
        space: usize,
        hashes: Vec<BlockHash>,
        how: Reserve,
    ) -> Result<(), Fail> {
        if !self.know(Some(client), space)? {
            return self.ask_as_before(client, space, hashes);
        }
        let (keys, pages) = (self.keys(space, &hashes), self.spaces[space].pages);
        let (namespace, runs_max) = (self.spaces[space].handle, self.runs_max());
        let asked = Asked::Reserve { keys, pages, value: how.is_value() };
        self.tell_wish(client)?;
        self.request_of(
            Some(client),
            Request::Reserve { namespace, id: None, hashes, how, runs_max },
            asked,
        )?;
        Ok(())
    }

    /// Copies into a client's slots and commits what was copied.
    fn fill(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let blocks: Vec<usize> =
            (0..self.clients[client].fills.len()).filter(|&n| !self.clients[client].fills[n].value).collect();
        if blocks.is_empty() {
            return Ok(());
        }
        if self.rng.chance(40) {
            let some: Vec<usize> = blocks.into_iter().filter(|_| self.rng.chance(70)).collect();
            return self.commit(client, &some, &[]);
        }
        let fill = blocks[self.rng.below(blocks.len())];
        let count = self.clients[client].fills[fill].committed.len();
        let shards: Vec<usize> = (0..count).filter(|_| self.rng.chance(40)).collect();
        if shards.is_empty() { Ok(()) } else { self.commit(client, &[fill], &shards) }
    }

    /// Copies shards (all, if none are given) of some slots and commits them.
    pub(crate) fn commit(&mut self, client: usize, fills: &[usize], shards: &[usize]) -> Result<(), Fail> {
        let mut leases = Vec::new();
        for &fill in fills {
            leases.push(self.clients[client].fills[fill].lease);
            self.copy(client, fill, shards);
        }
        // A checksum can be given only for one block at a time.
        let crc64 = (fills.len() == 1 && self.rng.chance(30))
            .then(|| crc_of(self.clients[client].fills[fills[0]].version));
        let all = shards.is_empty();
        let set = if all || self.mistake == Some(Mistake::SealedEarly) {
            ShardSet::All
        } else {
            ShardSet::Some(shards.iter().map(|&shard| shard as u32).collect())
        };
        let asked = Asked::Commit { leases: leases.clone(), shards: shards.to_vec(), all };
        self.request_of(Some(client), Request::Commit { leases, shards: set, crc64 }, asked)?;
        Ok(())
    }

    /// Makes the copies of a client, regardless of the depot.
    fn copy(&mut self, client: usize, fill: usize, shards: &[usize]) {
        let fill = &self.clients[client].fills[fill];
        for (shard, page) in pages(&fill.runs).into_iter().enumerate() {
            if !fill.committed[shard] && (shards.is_empty() || shards.contains(&shard)) {
                self.memory.put(page, tag(fill.version, shard));
            }
        }
    }

    /// Continues copies in flight, including those of killed clients.
    fn copy_on(&mut self) -> Result<(), Fail> {
        for client in 0..self.clients.len() {
            for fill in 0..self.clients[client].fills.len() {
                if self.rng.chance(50) {
                    self.copy(client, fill, &[]);
                }
            }
        }
        Ok(())
    }

    /// Makes a client abandon a dump.
    fn give_up(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let fills = &mut self.clients[client].fills;
        if fills.is_empty() {
            return Ok(());
        }
        let fill = fills.swap_remove(self.rng.below(fills.len()));
        self.memory.end_write(&fill.runs, fill.version as u64);
        self.request_of(Some(client), Request::Release { leases: vec![fill.lease] }, Asked::Done)?;
        Ok(())
    }

    fn load(&mut self) -> Result<(), Fail> {
        let (client, space, hashes) = (self.someone(), self.rng.below(self.spaces.len()), self.units());
        if !self.know(Some(client), space)? {
            return self.ask_as_before(client, space, hashes);
        }
        self.load_of(client, space, hashes.clone())?;
        // Others want the same.
        let others =
            if self.has(Feature::Crowds) && self.rng.chance(50) { self.rng.between(2, 6) } else { 0 };
        for _ in 0..others {
            let client = self.someone();
            if self.know(Some(client), space)? {
                self.load_of(client, space, hashes.clone())?;
            }
        }
        Ok(())
    }

    fn load_of(&mut self, client: usize, space: usize, hashes: Vec<BlockHash>) -> Result<(), Fail> {
        let keys = self.keys(space, &hashes);
        let request = Request::Load {
            id: None,
            namespace: self.spaces[space].handle,
            hashes,
            fetch_deadline: self.now + self.rng.below(4_000_000_000) as u64,
            last: self.rng.chance(50),
            runs_max: self.runs_max(),
            in_place: self.reads_in_place(client),
        };
        self.request_of(Some(client), request, Asked::Load { keys })?;
        Ok(())
    }

    fn lease_now(&mut self) -> Result<(), Fail> {
        let (client, space, hashes) = (self.someone(), self.rng.below(self.spaces.len()), self.units());
        let keys = self.keys(space, &hashes);
        self.request_of(Some(client), Request::LeaseNow { keys: keys.clone() }, Asked::LeaseNow { keys })?;
        Ok(())
    }

    /// Checks that blocks which a client has read did not change, and releases them.
    pub(crate) fn release(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let mut leases = Vec::new();
        let readings = std::mem::take(&mut self.clients[client].readings);
        for reading in readings {
            if self.memory.tags(&reading.runs) != reading.tags {
                return fail(Rule::Bytes, format!("{} changed while it was read", name(&reading.key)));
            }
            if self.rng.chance(70) {
                self.memory.end_read(&reading.runs);
                leases.push(reading.lease);
            } else {
                self.clients[client].readings.push(reading);
            }
        }
        if !leases.is_empty() {
            self.request_of(Some(client), Request::Release { leases }, Asked::Done)?;
        }
        Ok(())
    }

    fn set_checksum(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let Some(reading) = self.clients[client].readings.first() else { return Ok(()) };
        let request =
            Request::SetChecksum { lease: reading.lease, crc64: crc_of((reading.tags[0] >> 8) as usize) };
        self.request_of(Some(client), request, Asked::Done)?;
        Ok(())
    }

    fn prefetch(&mut self) -> Result<(), Fail> {
        let (client, space, hashes) = (self.someone(), self.rng.below(self.spaces.len()), self.units());
        if !self.know(Some(client), space)? {
            return self.ask_as_before(client, space, hashes);
        }
        let locations = self.locate(&self.keys(space, &hashes));
        let located = hashes.into_iter().zip(locations).filter_map(|(hash, location)| match location {
            Location::Tier(tier) => Some((hash, tier)),
            _ => None,
        });
        let request = Request::Prefetch {
            namespace: self.spaces[space].handle,
            blocks: located.collect(),
            deadline: self.now + 1_000_000_000,
        };
        self.request_of(Some(client), request, Asked::Done)?;
        Ok(())
    }

    fn remove(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let space = if self.rng.chance(60) { specs::VALUES } else { self.rng.below(specs::VALUES) };
        let mut hashes = self.units();
        hashes.truncate(3);
        if !self.know(Some(client), space)? {
            return Ok(());
        }
        let keys = self.keys(space, &hashes);
        self.remove_keys(client, keys)
    }

    /// A client removes blocks whose namespaces the depot knows.
    pub(crate) fn remove_keys(&mut self, client: usize, keys: Vec<BlockKey>) -> Result<(), Fail> {
        let locations = self.locate(&keys);
        let leases = self.machine.leases_granted();
        let mut gone = Vec::new();
        let mut asked = Vec::new();
        for key in &keys {
            asked.push((*key, self.writes_ordered().any(|(_, other)| other == *key)));
            gone.extend(self.model.forget(*key, leases, self.at));
        }
        let asked = Asked::Remove { keys: asked, gone };
        self.request_of(Some(client), Request::Remove { keys, locations }, asked)?;
        Ok(())
    }

    fn publish(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        // A block may be published, too.
        let blocks = self.rng.chance(20);
        let fills = &self.clients[client].fills;
        let values: Vec<usize> = (0..fills.len()).filter(|&n| fills[n].value || blocks).collect();
        if values.is_empty() {
            return Ok(());
        }
        let fill = values[self.rng.below(values.len())];
        self.copy(client, fill, &[]);
        let (lease, key) = (self.clients[client].fills[fill].lease, self.clients[client].fills[fill].key);
        let others =
            if self.rng.chance(30) && self.spaces[specs::VALUES].known { self.units() } else { Vec::new() };
        let mut others = self.keys(specs::VALUES, &others);
        others.truncate(2);
        others.retain(|&other| other != key);
        let asked = Asked::Publish { lease, others: others.clone() };
        self.request_of(Some(client), Request::Publish { lease, others }, asked)?;
        Ok(())
    }

    fn evict(&mut self) -> Result<(), Fail> {
        let bytes = self.rng.below(8) as u64 * 4096;
        self.request_of(None, Request::EvictTo { bytes }, Asked::Done)?;
        Ok(())
    }

    fn drain(&mut self) -> Result<(), Fail> {
        let writes = self.writes_ordered().map(|write| write.0).collect();
        self.request_of(None, Request::Drain { last: false }, Asked::Drain { writes })?;
        Ok(())
    }

    /// Kills a client. Its copies may continue until `end_killed`.
    fn kill(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        self.clients[client].alive = false;
        if self.mistake == Some(Mistake::NoQuarantine) {
            let owner = self.clients[client].owner;
            self.feed_and_answer(Event::OwnerEnded { owner })?;
        }
        Ok(())
    }

    /// Ends the copies of a killed client, and tells the depot.
    pub(crate) fn end_killed(&mut self) -> Result<(), Fail> {
        let Some(at) = self.clients.iter().position(|client| !client.alive) else { return Ok(()) };
        let client = self.clients.remove(at);
        for fill in &client.fills {
            self.memory.end_write(&fill.runs, fill.version as u64);
        }
        for reading in &client.readings {
            if self.memory.tags(&reading.runs) != reading.tags {
                return fail(Rule::Bytes, format!("{} changed under a killed client", name(&reading.key)));
            }
            self.memory.end_read(&reading.runs);
        }
        self.reached.insert("killed");
        match self.mistake {
            Some(Mistake::LeaseKept) => {}
            _ => self.feed_and_answer(Event::OwnerEnded { owner: client.owner })?,
        }
        self.let_go(client.owner)
    }

    fn execute(&mut self) -> Result<(), Fail> {
        for _ in 0..self.rng.between(1, 4) {
            self.execute_one()?;
        }
        Ok(())
    }

    fn end_some(&mut self) -> Result<(), Fail> {
        for _ in 0..self.rng.between(1, 3) {
            self.end_one()?;
        }
        Ok(())
    }

    /// Continues some work that was cut into pieces.
    pub(crate) fn go_on(&mut self) -> Result<(), Fail> {
        for _ in 0..self.rng.between(1, 3) {
            if !self.jobs.is_empty() {
                let job = self.jobs.remove(self.rng.below(self.jobs.len()));
                self.feed_and_answer(Event::Continue(job))?;
            }
        }
        Ok(())
    }

    /// Delivers a delayed answer, or reports blocks that a tier has forgotten.
    pub(crate) fn answer(&mut self) -> Result<(), Fail> {
        if !self.answers.is_empty() {
            let answer = self.answers.remove(self.rng.below(self.answers.len()));
            self.feed_and_answer(Event::Located { ask: answer.ask, locations: answer.locations })?;
        }
        self.tell_cooling()?;
        self.tell_forgotten()
    }

    fn pass_time(&mut self) -> Result<(), Fail> {
        let mut ms = [1, 100, 1_000, 3_000, 40_000][self.rng.below(5)];
        let has_budget = self.plan.shape.tiers.iter().any(|tier| tier.write_bytes_per_day > 0);
        if has_budget && self.rng.chance(20) {
            // A part of a budget's hour, or some hours.
            ms = self.rng.between(600, 10_000) as u64 * 1_000;
        }
        self.now += ms * 1_000_000;
        if self.rng.chance(70) {
            return self.feed_and_answer(Event::Tick);
        }
        // Each tick ends a bounded number of claims.
        for _ in 0..=self.machine.gauges().claims_open {
            self.feed_and_answer(Event::Tick)?;
        }
        self.check_deadlines()
    }

    fn expire_one(&mut self) -> Result<(), Fail> {
        let chosen = self.rng.below(self.waiting.len());
        match self.waiting.keys().nth(chosen).copied() {
            Some(token) => self.expire(token),
            None => Ok(()),
        }
    }

    /// Makes something fail in a tier or in the depot.
    fn misfortune(&mut self) -> Result<(), Fail> {
        if self.luck(Feature::Crashes, 6) {
            return self.crash();
        }
        if self.keeps_pool() {
            return self.crash_keeping_pool();
        }
        let tier = self.rng.below(self.tiers.len());
        if tier >= self.tiers.len() {
            return Ok(());
        }
        match self.rng.below(3) {
            0 if self.has(Feature::FullDisk) => self.tiers[tier].full = self.rng.chance(40),
            1 if self.has(Feature::LostBlocks) => {
                if let Some(key) = self.tiers[tier].lose(&mut self.rng)
                    && self.rng.chance(60)
                {
                    self.forgotten.push((tier, vec![key], true));
                }
            }
            2 if self.has(Feature::CorruptReads) => {
                self.tiers[tier].damage(&mut self.rng);
            }
            _ => {}
        }
        Ok(())
    }
}
