//! A machine of one namespace for tests that feed it events one by one.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "every test uses some of it, and fails where it cannot go on"
)]

use std::sync::Arc;

use kvdepot_core::hit::GroupShape;
use kvdepot_core::machine::{
    ClaimGroup, Closed, Command, Effects, Event, Location, Machine, NamespaceHandle, Outcome, Owner,
    PoolConfig, Proof, RemovalId, Reply, Request, Reserve, TierIndex, TierSet,
};
use kvdepot_core::misses::{Gone, Missed};
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, NamespaceSpec, eviction};

const BLOCK: u64 = 4096;
const OWNER: u64 = 1;

/// A machine with one namespace. `located` is what tiers know of every block.
pub(crate) struct Lab {
    pub(crate) machine: Machine,
    pub(crate) now: u64,
    pub(crate) tokens: u64,
    pub(crate) commands: Vec<Command>,
    pub(crate) replies: Vec<(u64, kvdepot_core::Result<Reply>)>,
    pub(crate) located: Location,
    pub(crate) spec: Arc<NamespaceSpec>,
    /// Removals that tiers have not ended.
    pub(crate) removals: Vec<(RemovalId, TierIndex, BlockKey)>,
    /// Parts of tiers that were closed.
    pub(crate) closed: Vec<Closed>,
    /// Changes for a ledger.
    pub(crate) proofs: Vec<Proof>,
    /// Blocks that went.
    pub(crate) gone: Vec<Gone>,
    /// Claims that found less than they asked for.
    pub(crate) missed: Vec<Missed>,
    /// The tiers that questions were about.
    pub(crate) asked: Vec<TierSet>,
}

/// A pool of so many blocks.
pub(crate) fn pool(blocks: u64, policy: &str, keeps: bool) -> PoolConfig {
    let policy = eviction::by_name(policy).unwrap();
    PoolConfig { pool_bytes: blocks * BLOCK, pool_bytes_max: 0, grow_step_bytes: 0, policy, keeps, seed: 7 }
}

/// A namespace whose blocks have one page.
pub(crate) fn spec() -> Arc<NamespaceSpec> {
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    Arc::new(NamespaceSpec::new("{\"model\":\"a\"}", layout).unwrap())
}

/// A claim on all of these blocks of the namespaces, as one group without a window, that nothing hurries.
pub(crate) fn claim(namespaces: &[NamespaceHandle], hashes: Vec<BlockHash>) -> Request {
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    claim_of(vec![ClaimGroup { namespaces: namespaces.to_vec(), shape }], hashes)
}

/// Like [`claim`], of these groups.
pub(crate) fn claim_of(groups: Vec<ClaimGroup>, hashes: Vec<BlockHash>) -> Request {
    let (limit, forever) = (hashes.len(), 1 << 40);
    let (deadline, patience) = (forever, forever);
    let tiers = TierSet::ALL;
    Request::ClaimOpen { groups, hashes, skip: 0, limit, tiers, deadline, patience, label: None }
}

impl Lab {
    pub(crate) fn new(blocks: u64, tiers: usize) -> Self {
        Self::with_machine(blocks, |pool| Machine::new(pool, tiers))
    }

    /// `machine` makes it, over a pool of so many blocks.
    pub(crate) fn with_machine(blocks: u64, machine: impl Fn(PoolConfig) -> Machine) -> Self {
        let spec = spec();
        let mut lab = Self {
            machine: machine(pool(blocks, "lru", true)),
            now: 0,
            tokens: 0,
            commands: Vec::new(),
            replies: Vec::new(),
            located: Location::Absent,
            spec: Arc::clone(&spec),
            removals: Vec::new(),
            closed: Vec::new(),
            proofs: Vec::new(),
            gone: Vec::new(),
            missed: Vec::new(),
            asked: Vec::new(),
        };
        lab.ask(Request::OpenNamespace { spec, epoch: 0 });
        lab
    }

    /// Opens a second namespace, with the layout of the first one.
    pub(crate) fn open_another(&mut self) {
        let spec = NamespaceSpec::new("{\"model\":\"b\"}", self.spec.layout().clone()).unwrap();
        self.ask(Request::OpenNamespace { spec: Arc::new(spec), epoch: 0 });
    }

    pub(crate) fn feed(&mut self, event: Event) {
        let mut todo = vec![event];
        while let Some(event) = todo.pop() {
            todo.extend(self.step(event));
        }
    }

    /// Feeds one event only. Returns the events that are to follow.
    pub(crate) fn step(&mut self, event: Event) -> Vec<Event> {
        let mut out = Effects::default();
        self.machine.step(self.now, event, &mut out);
        self.removals.extend(out.commands.iter().filter_map(|command| match command {
            Command::Remove { id, tier, key } => Some((*id, *tier, *key)),
            _ => None,
        }));
        self.commands.extend(out.commands);
        self.closed.extend(out.closed);
        self.proofs.extend(out.proofs);
        self.gone.extend(out.gone);
        self.missed.extend(out.missed);
        self.replies.extend(out.replies.into_iter().map(|(token, reply)| (token, reply.map(Reply::listed))));
        self.asked.extend(out.questions.iter().map(|question| question.tiers));
        let answered = out.questions.into_iter().map(|question| {
            let is_left_out = matches!(self.located, Location::Tier(tier) if !question.tiers.has(tier));
            let located = if is_left_out { Location::Absent } else { self.located };
            Event::Located { ask: question.ask, locations: vec![located; question.keys.len()] }
        });
        answered.chain(out.again.into_iter().map(Event::Continue)).collect()
    }

    pub(crate) fn send(&mut self, request: Request) -> u64 {
        self.send_as(OWNER, request)
    }

    pub(crate) fn send_as(&mut self, owner: Owner, request: Request) -> u64 {
        self.tokens += 1;
        self.feed(Event::Request { token: self.tokens, owner, request });
        self.tokens
    }

    pub(crate) fn ask(&mut self, request: Request) -> Reply {
        let token = self.send(request);
        self.reply(token).unwrap_or_else(|| panic!("no reply yet"))
    }

    pub(crate) fn reply(&mut self, token: u64) -> Option<Reply> {
        let at = self.replies.iter().position(|(other, _)| *other == token)?;
        Some(self.replies.remove(at).1.unwrap())
    }

    pub(crate) fn key(&self, hash: u8) -> BlockKey {
        BlockKey { namespace: self.spec.id(0), hash: BlockHash([hash; 16]) }
    }

    /// Stores a value under a key, in place of what is there.
    pub(crate) fn put(&mut self, hash: u8) {
        let how = Reserve::Value;
        let hashes = vec![BlockHash([hash; 16])];
        let reply = self.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
        let Reply::Slots(outcomes) = reply else { panic!("no slots") };
        let [Outcome::Leased(leased)] = &outcomes[..] else { panic!("no slot: {outcomes:?}") };
        self.ask(Request::Publish { lease: leased.lease, others: Vec::new() });
    }

    pub(crate) fn remove(&mut self, hash: u8, location: Location) -> u64 {
        let keys = vec![self.key(hash)];
        self.send(Request::Remove { keys, locations: vec![location] })
    }

    pub(crate) fn take(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Tiers and slots of the writes among what was commanded since the last look; removals by tier.
    pub(crate) fn writes_and_removals(&mut self) -> (Vec<(usize, u32)>, Vec<usize>) {
        let (mut writes, mut removals) = (Vec::new(), Vec::new());
        for command in self.take() {
            match command {
                Command::Write { tier, slot, .. } => writes.push((tier, slot)),
                Command::Remove { tier, .. } => removals.push(tier),
                _ => {}
            }
        }
        (writes, removals)
    }

    /// A tier ends the removal that it was told of first.
    pub(crate) fn end_removal(&mut self, tier: TierIndex, outcome: kvdepot_core::Result<()>) {
        let at = self.removals.iter().position(|removal| removal.1 == tier).unwrap();
        self.end_removal_at(at, outcome);
    }

    pub(crate) fn end_removal_at(&mut self, at: usize, outcome: kvdepot_core::Result<()>) {
        let (id, tier, key) = self.removals.remove(at);
        self.feed(Event::Removed { id, tier, key, outcome });
    }
}
