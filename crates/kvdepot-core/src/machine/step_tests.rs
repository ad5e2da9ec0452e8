//! No step examines more than a bounded number of slots, however large the pool, a request or a claim is.

use std::sync::Arc;

use super::*;
use crate::eviction::by_name;
use crate::hit::GroupShape;
use crate::key::{BlockHash, BlockKey, NamespaceSpec};
use crate::{BlockLayout, LeaseId};

pub(super) const BLOCK: u64 = 4096;
pub(super) const OWNER: Owner = 1;
/// Maximum number of slots that a step may examine, counting repeated ones: a few for each block of a piece of work.
const LOOKS_MAX: u64 = 5_000;
/// Blocks of a small pool here: many times as many as a step may examine.
pub(super) const BLOCKS: u64 = 30_000;

pub(super) struct Lab {
    pub(super) machine: Machine,
    tokens: Token,
    pub(super) namespace: NamespaceHandle,
    replies: Vec<(Token, Result<Reply>)>,
    pub(super) commands: Vec<Command>,
    /// Nanoseconds.
    pub(super) now: u64,
    /// Largest number of slots examined by one step, and its event.
    most: (u64, &'static str),
    /// Largest number of jobs that one step left, and of claims that it freed.
    pub(super) most_left: (usize, usize),
    steps: usize,
}

impl Lab {
    pub(super) fn new(policy: &str, blocks: u64, tiers: usize) -> Self {
        let pool = PoolConfig {
            pool_bytes: blocks * BLOCK,
            pool_bytes_max: 0,
            grow_step_bytes: 0,
            policy: by_name(policy).unwrap(),
            keeps: true,
            seed: 7,
        };
        let machine = Machine::new(pool, tiers);
        let (replies, commands) = (Vec::new(), Vec::new());
        let mut lab = Self {
            machine,
            tokens: 0,
            namespace: 0,
            replies,
            commands,
            now: 0,
            most: (0, ""),
            most_left: (0, 0),
            steps: 0,
        };
        let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
        let spec = Arc::new(NamespaceSpec::new("{\"model\":\"a\"}", layout).unwrap());
        let Reply::Namespace(opened) = lab.ask(Request::OpenNamespace { spec, epoch: 0 }) else {
            panic!("not a namespace")
        };
        lab.namespace = opened.handle;
        lab
    }

    /// Steps until all work that was cut into pieces is done. Tiers have only the blocks that the pool has.
    pub(super) fn feed(&mut self, event: Event) {
        let mut todo = std::collections::VecDeque::from([event]);
        while let Some(event) = todo.pop_front() {
            let (mut out, name) = (Effects::default(), event.name());
            let before = self.machine.pool.slot_looks();
            self.machine.step(self.now, event, &mut out);
            let looks = self.machine.pool.slot_looks() - before;
            assert!(looks <= LOOKS_MAX, "{name} looked at {looks} slots");
            self.most = self.most.max((looks, name));
            self.most_left =
                (self.most_left.0.max(out.again.len()), self.most_left.1.max(out.discarded.len()));
            self.steps += 1;
            self.replies
                .extend(out.replies.drain(..).map(|(token, reply)| (token, reply.map(Reply::listed))));
            self.commands.append(&mut out.commands);
            todo.extend(out.questions.into_iter().map(|question| Event::Located {
                ask: question.ask,
                locations: vec![Location::Absent; question.keys.len()],
            }));
            todo.extend(out.again.into_iter().map(Event::Continue));
        }
    }

    fn send_as(&mut self, owner: Owner, request: Request) -> Token {
        self.tokens += 1;
        let token = self.tokens;
        self.feed(Event::Request { token, owner, request });
        token
    }

    pub(super) fn ask_as(&mut self, owner: Owner, request: Request) -> Reply {
        let mut batch = match Batch::of(request) {
            Ok(batch) => batch,
            Err(request) => return self.ask_one(owner, request).unwrap(),
        };
        loop {
            let reply = self.ask_one(owner, batch.next());
            if let Some(reply) = batch.answered(reply) {
                return reply.unwrap();
            }
        }
    }

    fn ask_one(&mut self, owner: Owner, request: Request) -> Result<Reply> {
        let token = self.send_as(owner, request);
        let at = self.replies.iter().position(|(other, _)| *other == token).expect("it was answered");
        self.replies.swap_remove(at).1
    }

    pub(super) fn ask(&mut self, request: Request) -> Reply {
        self.ask_as(OWNER, request)
    }

    pub(super) fn reserve(&mut self, first: u64, count: u64) -> Vec<LeaseId> {
        let (namespace, hashes) = (self.namespace, hashes(first, count));
        let request =
            Request::Reserve { namespace, id: None, hashes, how: Reserve::Block, runs_max: usize::MAX };
        leases(self.ask(request))
    }

    pub(super) fn dump(&mut self, first: u64, count: u64) -> usize {
        let leases = self.reserve(first, count);
        let dumped = leases.len();
        self.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
        dumped
    }

    pub(super) fn load(&mut self, owner: Owner, first: u64, count: u64) -> Vec<LeaseId> {
        let (namespace, hashes) = (self.namespace, hashes(first, count));
        let request = Request::Load {
            namespace,
            id: None,
            hashes,
            fetch_deadline: 1 << 40,
            last: true,
            runs_max: usize::MAX,
            in_place: false,
        };
        leases(self.ask_as(owner, request))
    }

    fn keys(&self, first: u64, count: u64) -> Vec<BlockKey> {
        let namespace = self.machine.namespace(self.namespace).unwrap().id;
        hashes(first, count).into_iter().map(|hash| BlockKey { namespace, hash }).collect()
    }

    pub(super) fn blocks(&self) -> u64 {
        self.machine.gauges().pool_blocks as u64
    }
}

pub(super) fn hashes(first: u64, count: u64) -> Vec<BlockHash> {
    let hash = |n: u64| {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&n.to_le_bytes());
        BlockHash(hash)
    };
    (first..first + count).map(hash).collect()
}

pub(super) fn leases(reply: Reply) -> Vec<LeaseId> {
    let Reply::Slots(outcomes) = reply else { panic!("no slots") };
    let leased = outcomes.into_iter().filter_map(|outcome| match outcome {
        Outcome::Leased(leased) => Some(leased.lease),
        Outcome::Have | Outcome::Refused(_) => None,
    });
    leased.collect()
}

#[test]
fn a_request_of_many_blocks_is_taken_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    assert_eq!(lab.dump(0, BLOCKS), BLOCKS as usize);
    // From now on each block replaces another.
    assert_eq!(lab.dump(BLOCKS, 4096), 4096);
    let got = lab.load(OWNER, BLOCKS, 4096);
    assert_eq!(got.len(), 4096);
    assert!(matches!(lab.ask(Request::Release { leases: got }), Reply::Took(4096)));
    assert_eq!(lab.blocks(), BLOCKS);
    lab.machine.check().unwrap();
}

#[test]
fn the_search_for_a_victim_behind_leased_blocks_goes_on_in_steps_to_come() {
    for policy in ["lru", "s3fifo", "lhd"] {
        let mut lab = Lab::new(policy, BLOCKS, 0);
        lab.dump(0, BLOCKS);
        for first in (0..BLOCKS - 10).step_by(1000) {
            lab.load(2, first, 1000.min(BLOCKS - 10 - first));
        }
        // The ten evictable blocks are the most recently used.
        let leases = lab.load(OWNER, BLOCKS - 10, 10);
        lab.ask(Request::Release { leases });
        let steps = lab.steps;
        assert_eq!(lab.dump(BLOCKS, 10), 10, "{policy}: all blocks but ten are leased");
        assert!(lab.steps > steps + 5, "{policy}: it took {} steps", lab.steps - steps);
        let kept = lab.load(2, 0, 1000);
        assert_eq!(kept.len(), 1000, "{policy}: what is leased stayed");
        lab.machine.check().unwrap();
    }
}

#[test]
fn blocks_that_are_all_hot_are_looked_at_in_pieces() {
    let mut lab = Lab::new("s3fifo", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    for _ in 0..3 {
        for first in (0..BLOCKS).step_by(1000) {
            let leases = lab.load(OWNER, first, 1000);
            lab.ask(Request::Release { leases });
        }
    }
    assert_eq!(lab.dump(BLOCKS, 100), 100);
    lab.machine.check().unwrap();
}

#[test]
fn a_reset_forgets_the_blocks_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    lab.ask(Request::EnterEpoch { namespace: lab.namespace, epoch: 5 });
    assert_eq!(lab.blocks(), 0);
    assert_eq!(lab.machine.gauges().pool_free_bytes, BLOCKS * BLOCK);
}

#[test]
fn the_end_of_a_connection_with_many_leases_goes_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS - 5000);
    for first in (0..BLOCKS - 5000).step_by(1000) {
        lab.load(2, first, 1000);
    }
    lab.reserve(BLOCKS, 5000);
    lab.feed(Event::OwnerEnded { owner: 2 });
    lab.feed(Event::OwnerEnded { owner: OWNER });
    assert_eq!(lab.machine.gauges().held, Held::default());
    lab.machine.check().unwrap();
}

#[test]
fn the_writes_that_removals_call_off_go_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 1);
    let dumped = lab.dump(0, BLOCKS) as u64;
    assert!(dumped > BLOCKS / 2, "{dumped} blocks wait for a tier that writes none");
    for first in (0..dumped).step_by(REMOVE_BLOCKS) {
        let keys = lab.keys(first, (REMOVE_BLOCKS as u64).min(dumped - first));
        lab.send_as(OWNER, Request::Remove { keys, locations: Vec::new() });
    }
    assert_eq!(lab.blocks(), 0);
    // The tier completes its commands; then it reaches the entries of blocks that have left.
    for command in std::mem::take(&mut lab.commands) {
        if let Command::Write { tier, slot, .. } = command {
            lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
        }
    }
    assert_eq!(lab.machine.gauges().writes_queued, 0);
}

pub(super) fn claim_of(namespace: NamespaceHandle, first: u64, count: u64) -> Request {
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    Request::ClaimOpen {
        groups: vec![ClaimGroup { namespaces: vec![namespace], shape }],
        hashes: hashes(first, count),
        skip: 0,
        limit: count as usize,
        tiers: TierSet::ALL,
        deadline: 1 << 40,
        patience: 1 << 40,
        label: None,
    }
}

#[test]
fn a_claim_of_many_places_goes_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    let count = BLOCKS * 8 / 10;
    let Reply::Claim(progress) = lab.ask(claim_of(lab.namespace, 0, count)) else { panic!("no claim") };
    assert_eq!((progress.settled, progress.units), (true, count as usize));
    lab.ask(Request::ClaimRelease { claim: progress.claim });
    assert_eq!(lab.machine.gauges().held.leased, 0);
    lab.machine.check().unwrap();
}

#[test]
fn loads_that_wait_for_room_try_again_one_after_another() {
    let mut lab = Lab::new("lru", 64, 1);
    let held = lab.reserve(0, 44);
    assert!(!held.is_empty());
    let namespace = lab.namespace;
    // The rest of the pool is taken by blocks that the tier is reading.
    let prefetch = |lab: &mut Lab, first, count| {
        let blocks = hashes(first, count).into_iter().map(|hash| (hash, 0)).collect();
        lab.ask(Request::Prefetch { namespace, blocks, deadline: 1 << 40 });
    };
    prefetch(&mut lab, 1000, 64);
    assert_eq!(lab.machine.gauges().pool_free_bytes, 0);
    let loads: Vec<Token> = (0..100)
        .map(|n| {
            let request = Request::Load {
                namespace,
                id: None,
                hashes: hashes(10_000 + n * 100, 100),
                fetch_deadline: 1 << 40,
                last: true,
                runs_max: usize::MAX,
                in_place: false,
            };
            lab.tokens += 1;
            let (token, mut out) = (lab.tokens, Effects::default());
            lab.machine.step(0, Event::Request { token, owner: OWNER, request }, &mut out);
            let mut jobs = out.again;
            while let Some(job) = jobs.pop() {
                let mut out = Effects::default();
                lab.machine.step(0, Event::Continue(job), &mut out);
                jobs.extend(out.again);
            }
            lab.feed(Event::Located { ask: Ask::Load(token), locations: vec![Location::Tier(0); 100] });
            token
        })
        .collect();
    assert_eq!(lab.machine.gauges().loads_open, loads.len());
    lab.most = (0, "");
    lab.ask(Request::Release { leases: held });
    assert!(lab.most.0 < 2_000, "{:?}", lab.most);
    assert!(lab.machine.gauges().pool_free_bytes == 0, "the oldest load took the room");
}

/// Makes one step. Returns the remaining work, and how many reads a tier gets.
pub(super) fn step(machine: &mut Machine, event: Event) -> (Effects, usize) {
    let mut out = Effects::default();
    machine.step(0, event, &mut out);
    let reads = out.commands.iter().filter(|command| matches!(command, Command::Read { .. })).count();
    (out, reads)
}

#[test]
fn the_turn_of_a_starved_load_that_ends_goes_to_the_next() {
    let mut lab = Lab::new("lru", 2, 1);
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    let spec = Arc::new(NamespaceSpec::new("{\"model\":\"b\"}", layout).unwrap());
    let Reply::Namespace(other) = lab.ask(Request::OpenNamespace { spec, epoch: 0 }) else {
        panic!("not a namespace")
    };
    let (namespace, other, machine) = (lab.namespace, other.handle, &mut lab.machine);
    let begin = |machine: &mut Machine, owner: Owner, namespace, hashes: Vec<BlockHash>| {
        let (token, count) = (100 + owner, hashes.len());
        let request = Request::Load {
            namespace,
            id: None,
            hashes,
            fetch_deadline: 1 << 40,
            last: true,
            runs_max: usize::MAX,
            in_place: false,
        };
        let (out, _) = step(machine, Event::Request { token, owner, request });
        assert_eq!(out.questions.len(), 1);
        let locations = vec![Location::Tier(0); count];
        step(machine, Event::Located { ask: Ask::Load(token), locations })
    };
    // One client has leased the entire pool.
    let (out, reads) = begin(machine, 2, namespace, hashes(0, 2));
    assert_eq!(reads, 2);
    for command in out.commands {
        let Command::Read { tier, slot, .. } = command else { continue };
        step(machine, Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    }
    for (owner, namespace) in [(3, other), (4, other), (5, namespace)] {
        assert_eq!(begin(machine, owner, namespace, hashes(10 * owner, 1)).1, 0, "there is no room");
    }
    // The blocks that the first two request cannot be served any more. The second ends before its turn.
    let advance = Request::BeginAdvance { namespace: other, provisional: crate::key::NamespaceId([9; 16]) };
    step(machine, Event::Request { token: 200, owner: 9, request: advance });
    let (mut out, reads) = step(machine, Event::OwnerEnded { owner: 2 });
    assert_eq!((out.replies.len(), reads), (1, 0), "{:?}", out.replies);
    assert_eq!(step(machine, Event::OwnerEnded { owner: 4 }).1, 0);
    let mut reads = 0;
    while let Some(job) = out.again.pop() {
        let (more, read) = step(machine, Event::Continue(job));
        out.again.extend(more.again);
        reads += read;
    }
    assert_eq!(reads, 1, "the third has its turn");
}
