//! Orders of events that the simulation found the machine wrong about, one test each.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;

use kvdepot_core::machine::{
    ClaimGroup, Command, Effects, Event, Location, Machine, Outcome, PoolConfig, Reply, Request, Reserve,
    Stored,
};
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, Error, ErrorKind, GroupShape, NamespaceSpec, eviction};

const BLOCK: u64 = 4096;
const OWNER: u64 = 1;

/// A machine with one namespace. `located` is what tiers know of every block.
struct Lab {
    machine: Machine,
    now: u64,
    tokens: u64,
    commands: Vec<Command>,
    replies: Vec<(u64, kvdepot_core::Result<Reply>)>,
    located: Location,
    spec: Arc<NamespaceSpec>,
}

impl Lab {
    fn new(blocks: u64, tiers: usize) -> Self {
        let pool = PoolConfig {
            pool_bytes: blocks * BLOCK,
            pool_bytes_max: 0,
            grow_step_bytes: 0,
            policy: eviction::by_name("lru").unwrap(),
            keeps: true,
            seed: 7,
        };
        let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
        let spec = Arc::new(NamespaceSpec::new("{\"model\":\"a\"}", layout).unwrap());
        let mut lab = Self {
            machine: Machine::new(pool, tiers),
            now: 0,
            tokens: 0,
            commands: Vec::new(),
            replies: Vec::new(),
            located: Location::Absent,
            spec: Arc::clone(&spec),
        };
        lab.ask(Request::OpenNamespace { spec, epoch: 0 });
        lab
    }

    fn feed(&mut self, event: Event) {
        let mut todo = vec![event];
        while let Some(event) = todo.pop() {
            let mut out = Effects::default();
            self.machine.step(self.now, event, &mut out);
            self.commands.extend(out.commands);
            self.replies.extend(out.replies);
            todo.extend(out.questions.into_iter().map(|question| Event::Located {
                ask: question.ask,
                locations: vec![self.located; question.keys.len()],
            }));
            todo.extend(out.again.into_iter().map(Event::Continue));
        }
    }

    fn send(&mut self, request: Request) -> u64 {
        self.tokens += 1;
        self.feed(Event::Request { token: self.tokens, owner: OWNER, request });
        self.tokens
    }

    fn ask(&mut self, request: Request) -> Reply {
        let token = self.send(request);
        self.reply(token).unwrap_or_else(|| panic!("no reply yet"))
    }

    fn reply(&mut self, token: u64) -> Option<Reply> {
        let at = self.replies.iter().position(|(other, _)| *other == token)?;
        Some(self.replies.remove(at).1.unwrap())
    }

    fn key(&self, hash: u8) -> BlockKey {
        BlockKey { namespace: self.spec.id(0), hash: BlockHash([hash; 16]) }
    }

    /// Stores a value under a key, in place of what is there.
    fn put(&mut self, hash: u8) {
        let how = Reserve::Value;
        let hashes = vec![BlockHash([hash; 16])];
        let reply = self.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
        let Reply::Slots(outcomes) = reply else { panic!("no slots") };
        let [Outcome::Leased(leased)] = &outcomes[..] else { panic!("no slot: {outcomes:?}") };
        self.ask(Request::Publish { lease: leased.lease, others: Vec::new() });
    }

    fn remove(&mut self, hash: u8, location: Location) -> u64 {
        let keys = vec![self.key(hash)];
        self.send(Request::Remove { keys, locations: vec![location] })
    }

    fn take(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Tiers and slots of the writes among what was commanded since the last look; removals by tier.
    fn writes_and_removals(&mut self) -> (Vec<(usize, u32)>, Vec<usize>) {
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
}

#[test]
fn a_hit_of_nothing_needs_no_whole_blocks() {
    let mut lab = Lab::new(8, 0);
    let shape = GroupShape { window_blocks: 0, units_per_block: 3 };
    let reply = lab.ask(Request::ClaimOpen {
        groups: vec![ClaimGroup { namespaces: vec![0], shape }],
        hashes: (0..6).map(|hash| BlockHash([hash; 16])).collect(),
        skip: 4,
        limit: 6,
        deadline: 1 << 40,
        patience: 1 << 40,
    });
    assert!(matches!(reply, Reply::Claim(progress) if progress.settled && progress.units == 4));
}

#[test]
fn a_value_removed_while_a_tier_writes_it_is_removed_after_that_write() {
    for removed_during_the_write in [true, false] {
        let mut lab = Lab::new(8, 2);
        let key = lab.key(1);
        lab.put(1);
        let slot = lab.writes_and_removals().0[0].1;
        // The first tier may have the value before this one, and is to forget it.
        let outcome = Err(Error::new(ErrorKind::Io, "a write failed"));
        lab.feed(Event::WriteEnded { tier: 0, slot, outcome });
        let (_, early) = lab.writes_and_removals();
        if early.contains(&1) {
            lab.feed(Event::Removed { tier: 1, key, outcome: Ok(()) });
        }
        if removed_during_the_write {
            lab.remove(1, Location::Absent);
        }
        lab.feed(Event::WriteEnded { tier: 1, slot, outcome: Ok(Stored::New) });
        if !removed_during_the_write {
            lab.remove(1, Location::Tier(1));
        }
        if early.contains(&0) {
            lab.feed(Event::Removed { tier: 0, key, outcome: Ok(()) });
        }
        let (_, removals) = lab.writes_and_removals();
        assert!(removals.contains(&1), "the second tier keeps what it wrote");
    }
}

#[test]
fn a_removal_is_not_ended_by_that_of_the_value_before() {
    let mut lab = Lab::new(8, 2);
    lab.put(1);
    let (writes, _) = lab.writes_and_removals();
    let slot = writes[0].1;
    lab.feed(Event::WriteEnded { tier: 1, slot, outcome: Ok(Stored::New) });
    // The first tier has the value before: it goes, and the write is tried again.
    lab.feed(Event::WriteEnded { tier: 0, slot, outcome: Ok(Stored::AlreadyThere) });
    assert_eq!(lab.writes_and_removals().1, [0]);
    let token = lab.remove(1, Location::Tier(0));
    assert_eq!(lab.writes_and_removals().1, [0, 1]);
    let key = lab.key(1);
    for tier in [0, 0] {
        lab.feed(Event::Removed { tier, key, outcome: Ok(()) });
        assert!(lab.reply(token).is_none(), "the second tier has not forgotten it");
    }
    lab.feed(Event::Removed { tier: 1, key, outcome: Ok(()) });
    assert!(matches!(lab.reply(token), Some(Reply::Removed { was_there, left: 0 }) if was_there == [true]));
}

#[test]
fn a_claim_goes_ahead_when_the_one_before_it_needs_no_room_after_all() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Tier(0);
    let claim = |lab: &mut Lab, hashes: &[u8]| {
        let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
        let reply = lab.ask(Request::ClaimOpen {
            groups: vec![ClaimGroup { namespaces: vec![0], shape }],
            hashes: hashes.iter().map(|&hash| BlockHash([hash; 16])).collect(),
            skip: 0,
            limit: hashes.len(),
            deadline: 1 << 40,
            patience: 1 << 40,
        });
        let Reply::Claim(progress) = reply else { panic!("no claim") };
        progress.claim
    };
    let first = claim(&mut lab, &[1, 2, 3]);
    let second = claim(&mut lab, &[4, 5, 6]);
    claim(&mut lab, &[7]);
    claim(&mut lab, &[8]);
    assert_eq!(lab.machine.gauges().claims_queued, 3);
    // The third fits, but waits its turn. It comes when the second has gone, without new room in the pool.
    lab.take();
    lab.ask(Request::ClaimRelease { claim: second });
    assert_eq!(
        (lab.take().len(), lab.machine.gauges().claims_queued),
        (1, 1),
        "the pool has room for one more"
    );
    lab.ask(Request::ClaimRelease { claim: first });
}

#[test]
fn a_claim_whose_numbers_make_no_sense_is_refused() {
    for (skip, units_per_block) in [(0, 0), (3, 1), (usize::MAX, 1)] {
        let mut lab = Lab::new(4, 1);
        let shape = GroupShape { window_blocks: 0, units_per_block };
        let token = lab.send(Request::ClaimOpen {
            groups: vec![ClaimGroup { namespaces: vec![0], shape }],
            hashes: vec![BlockHash([1; 16]); 2],
            skip,
            limit: usize::MAX,
            deadline: 1 << 40,
            patience: 1 << 40,
        });
        let refused = |reply: &kvdepot_core::Result<Reply>| {
            reply.as_ref().is_err_and(|error| error.kind() == ErrorKind::Protocol)
        };
        assert!(matches!(&lab.replies[..], [(other, reply)] if *other == token && refused(reply)));
    }
}

#[test]
fn claims_that_have_ended_do_not_delay_the_deadlines_of_others() {
    let mut lab = Lab::new(4, 1);
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    let claim = |lab: &mut Lab, deadline: u64| {
        let reply = lab.ask(Request::ClaimOpen {
            groups: vec![ClaimGroup { namespaces: vec![0], shape }],
            hashes: vec![BlockHash([1; 16])],
            skip: 0,
            limit: 1,
            deadline,
            patience: 1 << 40,
        });
        let Reply::Claim(progress) = reply else { panic!("no claim") };
        progress
    };
    for _ in 0..1_000 {
        let ended = claim(&mut lab, 10);
        lab.ask(Request::ClaimRelease { claim: ended.claim });
    }
    lab.located = Location::Tier(0);
    let waits = claim(&mut lab, 20);
    assert!(!waits.settled);
    lab.now = 30;
    lab.feed(Event::Tick);
    let reply = lab.ask(Request::ClaimPoll { claim: waits.claim, settle: false });
    assert!(matches!(reply, Reply::Claim(progress) if progress.settled), "{reply:?}");
}

#[test]
fn a_value_that_tiers_were_told_to_forget_is_written_again_when_it_is_used() {
    let mut lab = Lab::new(8, 2);
    lab.put(1);
    let slot = lab.writes_and_removals().0[0].1;
    lab.feed(Event::WriteEnded { tier: 1, slot, outcome: Ok(Stored::New) });
    lab.feed(Event::WriteEnded { tier: 0, slot, outcome: Err(Error::new(ErrorKind::Io, "a write failed")) });
    let key = lab.key(1);
    for tier in lab.writes_and_removals().1 {
        lab.feed(Event::Removed { tier, key, outcome: Ok(()) });
    }
    lab.now = 60_000_000_000;
    lab.ask(Request::LeaseNow { keys: vec![key] });
    assert_eq!(lab.writes_and_removals().0, [(0, slot), (1, slot)], "the pool has the only copy");
}

#[test]
fn a_removal_that_a_tier_could_not_carry_out_is_owed_and_tried_again() {
    const TICKS: usize = 10;
    let failed = || Err(Error::new(ErrorKind::Unavailable, "a removal failed"));
    let mut lab = Lab::new(8, 2);
    lab.put(1);
    for (tier, slot) in lab.writes_and_removals().0 {
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    }
    let key = lab.key(1);
    let token = lab.remove(1, Location::Tier(0));
    assert_eq!(lab.writes_and_removals().1, [0, 1]);
    lab.feed(Event::Removed { tier: 0, key, outcome: Ok(()) });
    assert!(lab.reply(token).is_none(), "the second tier has not answered");
    lab.feed(Event::Removed { tier: 1, key, outcome: failed() });
    assert!(
        matches!(lab.reply(token), Some(Reply::Removed { was_there, left: 1 }) if was_there == [true]),
        "whoever asked is told"
    );
    // What is stored under the key is not for the tier that may have the value before.
    lab.put(1);
    let (writes, removals) = lab.writes_and_removals();
    assert_eq!(writes.iter().map(|(tier, _)| *tier).collect::<Vec<_>>(), [0]);
    assert!(removals.is_empty());
    lab.feed(Event::WriteEnded { tier: 0, slot: writes[0].1, outcome: Ok(Stored::New) });
    for outcome in [failed(), Ok(())] {
        assert_eq!(lab.machine.gauges().removals_owed, 1);
        (0..TICKS).for_each(|_| lab.feed(Event::Tick));
        assert_eq!(lab.writes_and_removals().1, [1], "asked again");
        lab.feed(Event::Removed { tier: 1, key, outcome });
    }
    assert_eq!(lab.machine.gauges().removals_owed, 0);
    (0..TICKS).for_each(|_| lab.feed(Event::Tick));
    assert!(lab.writes_and_removals().1.is_empty(), "it is made");
}

#[test]
fn a_removal_that_is_owed_ends_with_the_epoch_of_its_block() {
    let mut lab = Lab::new(8, 1);
    let key = lab.key(1);
    lab.remove(1, Location::Tier(0));
    let outcome = Err(Error::new(ErrorKind::Unavailable, "a removal failed"));
    lab.feed(Event::Removed { tier: 0, key, outcome });
    assert_eq!(lab.machine.gauges().removals_owed, 1);
    lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 });
    (0..10).for_each(|_| lab.feed(Event::Tick));
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.removals_owed, gauges.spaces), (0, gauges.namespaces), "nothing is left of it");
}
