//! The machine's answers to single events: a dump and a load, a hit that tiers hold, removal behind a write, a reset.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;

use crate::lab::{claim, pool};
use kvdepot_core::machine::{
    Ask, Command, Effects, Event, Fetched, Job, Location, Machine, Nanos, Outcome, Reply, Request, Reserve,
    ShardSet, Stored,
};
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, NamespaceSpec};

const BLOCK: u64 = 4096;
const OWNER: u64 = 1;

/// A machine whose questions are answered by the test.
struct Lab {
    machine: Machine,
    now: Nanos,
    tokens: u64,
    commands: Vec<Command>,
    replies: Vec<(u64, kvdepot_core::Result<Reply>)>,
    visible: Vec<(BlockKey, bool)>,
    located: fn(&BlockKey) -> Location,
}

impl Lab {
    fn new(blocks: u64, tiers: usize) -> Self {
        let pool = pool(blocks, "lru", true);
        Self {
            machine: Machine::new(pool, tiers),
            now: 0,
            tokens: 0,
            commands: Vec::new(),
            replies: Vec::new(),
            visible: Vec::new(),
            located: |_| Location::Absent,
        }
    }

    fn feed(&mut self, event: Event) {
        let mut todo = vec![event];
        while let Some(event) = todo.pop() {
            let mut out = Effects::default();
            self.machine.step(self.now, event, &mut out);
            self.commands.extend(out.commands);
            self.replies
                .extend(out.replies.into_iter().map(|(token, reply)| (token, reply.map(Reply::listed))));
            self.visible.extend(out.visible);
            let located = self.located;
            todo.extend(out.questions.into_iter().map(|question| Event::Located {
                ask: question.ask,
                locations: question.keys.iter().map(located).collect(),
            }));
            todo.extend(out.again.into_iter().map(Event::Continue));
        }
    }

    /// Sends a request and returns its token.
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

    fn open(&mut self, name: &str) -> u64 {
        let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
        let spec = NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).unwrap();
        let Reply::Namespace(opened) = self.ask(Request::OpenNamespace { spec: Arc::new(spec), epoch: 0 })
        else {
            panic!("not a namespace")
        };
        opened.handle
    }

    fn dump(&mut self, namespace: u64, hashes: &[u8]) -> usize {
        let how = Reserve::Block;
        let reply = self.ask(Request::Reserve {
            namespace,
            id: None,
            hashes: names(hashes),
            how,
            runs_max: usize::MAX,
        });
        let Reply::Slots(outcomes) = reply else { panic!("no slots") };
        let leases: Vec<_> = outcomes
            .iter()
            .filter_map(|outcome| match outcome {
                Outcome::Leased(leased) => Some(leased.lease),
                _ => None,
            })
            .collect();
        let count = leases.len();
        self.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
        count
    }

    fn claim(&mut self, namespace: u64, hashes: &[u8]) -> u64 {
        self.send(claim(&[namespace], names(hashes)))
    }

    fn reads(&mut self) -> Vec<(usize, u32, BlockKey)> {
        let read = |command: &mut Command| match command {
            Command::Read { tier, slot, key, .. } => Some((*tier, *slot, *key)),
            _ => None,
        };
        let mut reads = Vec::new();
        self.commands.retain_mut(|command| read(command).map(|found| reads.push(found)).is_none());
        reads
    }

    fn writes(&mut self) -> Vec<(usize, u32, BlockKey)> {
        let write = |command: &mut Command| match command {
            Command::Write { tier, slot, key, .. } => Some((*tier, *slot, *key)),
            _ => None,
        };
        let mut writes = Vec::new();
        self.commands.retain_mut(|command| write(command).map(|found| writes.push(found)).is_none());
        writes
    }
}

fn names(hashes: &[u8]) -> Vec<BlockHash> {
    hashes.iter().map(|&hash| BlockHash([hash; 16])).collect()
}

#[test]
fn what_was_dumped_is_claimed_and_given_back() {
    let mut lab = Lab::new(8, 0);
    let namespace = lab.open("a");
    assert_eq!(lab.dump(namespace, &[1, 2, 3]), 3);
    assert_eq!(lab.visible.iter().filter(|(_, visible)| *visible).count(), 3);
    let token = lab.claim(namespace, &[1, 2, 3, 4]);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    assert_eq!((progress.settled, progress.units, progress.units_from_tier), (true, 3, 0));
    assert_eq!(lab.machine.gauges().held.leased, 3 * BLOCK);
    lab.ask(Request::ClaimRelease { claim: progress.claim });
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.held.leased, gauges.held.pinned, gauges.claims_open), (0, 0, 0));
}

#[test]
fn a_hit_in_a_tier_is_fetched_and_a_failed_block_cuts_it() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.located = |_| Location::Tier(0);
    let token = lab.claim(namespace, &[1, 2, 3]);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    assert!(!progress.settled && progress.arriving.is_some_and(|arriving| arriving.blocks_left == 3));
    let reads = lab.reads();
    assert_eq!(reads.len(), 3);
    for (tier, slot, key) in reads {
        let outcome = Ok(if key.hash.0[0] == 3 { Fetched::Miss } else { Fetched::Whole });
        lab.feed(Event::ReadEnded { tier, slot, outcome });
    }
    let Reply::Claim(progress) = lab.ask(Request::ClaimPoll { claim: progress.claim, settle: false }) else {
        panic!("no claim")
    };
    assert_eq!((progress.settled, progress.units, progress.units_from_tier), (true, 2, 2));
    assert_eq!(lab.machine.gauges().held.fetching, 0);
}

#[test]
fn a_claim_tells_what_it_would_hit_if_it_were_settled_now() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.located = |_| Location::Tier(0);
    let token = lab.claim(namespace, &[1, 2, 3, 4]);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    let claim = progress.claim;
    assert_eq!(progress.arriving.map(|arriving| (arriving.units, arriving.units_now)), Some((4, 0)));
    let mut reads = lab.reads();
    reads.sort_by_key(|(_, _, key)| key.hash.0[0]);
    // The third comes before the second: a hit is a prefix.
    for (read, now) in [(0, 1), (2, 1), (1, 3)] {
        let (tier, slot, _) = reads[read];
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        let poll = Request::ClaimPoll { claim, settle: false };
        let Reply::Claim(progress) = lab.ask(poll) else { panic!("no claim") };
        assert_eq!(progress.arriving.map(|arriving| arriving.units_now), Some(now), "after read {read}");
    }
    let Reply::Claim(progress) = lab.ask(Request::ClaimPoll { claim, settle: true }) else {
        panic!("no claim")
    };
    assert_eq!((progress.settled, progress.units), (true, 3));
}

#[test]
fn claims_that_do_not_fit_together_take_turns() {
    let mut lab = Lab::new(10, 1);
    let namespace = lab.open("a");
    lab.located = |_| Location::Tier(0);
    let first = lab.claim(namespace, &[1, 2, 3, 4, 5, 6]);
    let Some(Reply::Claim(first)) = lab.reply(first) else { panic!("no claim") };
    let second = lab.claim(namespace, &[11, 12, 13, 14, 15, 16]);
    let Some(Reply::Claim(second)) = lab.reply(second) else { panic!("no claim") };
    assert!(second.arriving.is_none() && lab.machine.gauges().claims_queued == 1);
    for (tier, slot, _) in lab.reads() {
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    }
    assert!(lab.reads().is_empty(), "the first claim's leases hold the room");
    lab.ask(Request::ClaimRelease { claim: first.claim });
    assert_eq!(lab.reads().len(), 6);
    assert_eq!(lab.machine.gauges().claims_queued, 0);
    lab.ask(Request::ClaimRelease { claim: second.claim });
}

#[test]
fn a_claim_at_a_full_pool_evicts_no_more_blocks_than_it_fetches() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.dump(namespace, &[1, 2, 3, 4]);
    for (tier, slot, _) in lab.writes() {
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    }
    lab.dump(namespace, &[5, 6, 7, 8]);
    for (tier, slot, _) in lab.writes() {
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    }
    assert_eq!(lab.machine.gauges().pool_free_bytes, 0);
    lab.located = |_| Location::Tier(0);
    lab.claim(namespace, &[11, 12, 13]);
    assert_eq!((lab.reads().len(), lab.machine.gauges().evicted), (3, 3));
}

/// As when a tier evicts a block between every look and every read.
#[test]
fn a_block_that_every_look_confirms_and_every_read_misses_is_given_up() {
    let mut lab = Lab::new(8, 2);
    let namespace = lab.open("a");
    lab.located = |_| Location::Tier(0);
    for _ in 0..2 {
        let token = lab.claim(namespace, &[1, 2]);
        let Some(Reply::Claim(begun)) = lab.reply(token) else { panic!("no claim") };
        let mut asked = Vec::new();
        loop {
            let reads = lab.reads();
            if reads.is_empty() {
                break;
            }
            for (tier, slot, _) in reads {
                asked.push(tier);
                assert!(asked.len() <= 4, "each tier is asked once for a block");
                lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Miss) });
            }
        }
        asked.sort_unstable();
        assert_eq!(asked, [0, 0, 1, 1]);
        let Reply::Claim(end) = lab.ask(Request::ClaimPoll { claim: begun.claim, settle: false }) else {
            panic!("no claim")
        };
        assert_eq!((end.settled, end.units), (true, 0));
        lab.ask(Request::ClaimRelease { claim: begun.claim });
        assert_eq!(lab.machine.gauges().pool_free_bytes, 8 * BLOCK);
    }
}

/// Ranks agree: what one of them has in the pool stays while another's block is read, whatever comes meanwhile.
#[test]
fn a_claim_over_two_ranks_keeps_what_is_there_while_the_rest_is_read() {
    for outcome in [Fetched::Whole, Fetched::Miss] {
        let mut lab = Lab::new(8, 1);
        let (first, second) = (lab.open("first"), lab.open("second"));
        lab.dump(first, &[1]);
        for (tier, slot, _) in lab.writes() {
            lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
        }
        lab.located = |_| Location::Tier(0);
        let token = lab.send(claim(&[first, second], names(&[1])));
        let Some(Reply::Claim(begun)) = lab.reply(token) else { panic!("no claim") };
        assert!(!begun.settled);
        let [(tier, slot, _)] = lab.reads()[..] else { panic!("one rank's block is read") };
        lab.located = |_| Location::Absent;
        for name in 10..40 {
            lab.dump(second, &[name]);
            for (tier, slot, _) in lab.writes() {
                lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
            }
        }
        assert!(lab.machine.gauges().evicted > 20, "the pool was used up");
        let units = usize::from(outcome == Fetched::Whole);
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(outcome) });
        let Reply::Claim(end) = lab.ask(Request::ClaimPoll { claim: begun.claim, settle: false }) else {
            panic!("no claim")
        };
        assert_eq!((end.settled, end.units), (true, units));
        lab.ask(Request::ClaimRelease { claim: begun.claim });
        let held = lab.machine.gauges().held;
        assert_eq!((held.leased, held.fetching), (0, 0));
    }
}

#[test]
fn a_removal_comes_after_the_write_that_is_under_way() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.dump(namespace, &[1]);
    let [(tier, slot, key)] = lab.writes()[..] else { panic!("one write") };
    let Reply::Removed { was_there: there, .. } =
        lab.ask(Request::Remove { keys: vec![key], locations: vec![Location::Absent] })
    else {
        panic!("no answer")
    };
    assert_eq!(there, [true]);
    assert!(lab.commands.is_empty(), "the write goes first");
    assert_eq!(lab.dump(namespace, &[1]), 1);
    assert!(lab.writes().is_empty());
    lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    let [(tier, second, again)] = lab.writes()[..] else { panic!("the later block's turn") };
    assert_eq!(again, key);
    // The tier still has the first one: it goes, and the write is tried again.
    lab.feed(Event::WriteEnded { tier, slot: second, outcome: Ok(Stored::AlreadyThere) });
    let [Command::Remove { tier: 0, key: removed, .. }] = std::mem::take(&mut lab.commands)[..] else {
        panic!("the first one is removed")
    };
    assert_eq!(removed, key);
    lab.feed(Event::Tick);
    let [(tier, second, _)] = lab.writes()[..] else { panic!("tried again") };
    lab.feed(Event::WriteEnded { tier, slot: second, outcome: Ok(Stored::New) });
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.held.dirty, gauges.writes_queued), (0, 0));
}

#[test]
fn a_removal_is_answered_when_the_tiers_have_forgotten() {
    let mut lab = Lab::new(8, 2);
    let namespace = lab.open("a");
    lab.dump(namespace, &[1]);
    for (tier, slot, _) in lab.writes() {
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    }
    let key = lab.visible[0].0;
    let token = lab.send(Request::Remove { keys: vec![key], locations: vec![Location::Tier(0)] });
    assert!(lab.reply(token).is_none());
    for command in std::mem::take(&mut lab.commands) {
        let Command::Remove { id, tier, key } = command else { panic!("only removals") };
        lab.feed(Event::Removed { id, tier, key, outcome: Ok(()) });
    }
    assert!(matches!(lab.reply(token), Some(Reply::Removed { was_there, left: 0 }) if was_there == [true]));
}

#[test]
fn nothing_of_an_epoch_that_passed_is_found_written_or_kept() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.dump(namespace, &[1, 2]);
    let writes = lab.writes();
    lab.ask(Request::EnterEpoch { namespace, epoch: 1 });
    let token = lab.claim(namespace, &[1, 2]);
    assert!(matches!(lab.reply(token), Some(Reply::Claim(progress)) if progress.units == 0));
    for (tier, slot, _) in writes {
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    }
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.pool_free_bytes, gauges.pool_blocks, gauges.writes_queued), (8 * BLOCK, 0, 0));
}

#[test]
fn the_end_of_an_owner_gives_back_claims_leases_and_half_filled_slots() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.dump(namespace, &[1]);
    let [(tier, slot, _)] = lab.writes()[..] else { panic!("one write") };
    lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    lab.ask(Request::Reserve {
        namespace,
        id: None,
        hashes: names(&[2]),
        how: Reserve::Block,
        runs_max: usize::MAX,
    });
    lab.located = |_| Location::Tier(0);
    lab.claim(namespace, &[1, 3]);
    lab.feed(Event::OwnerEnded { owner: OWNER });
    let held = lab.machine.gauges().held;
    assert_eq!((held.filling, held.leased, held.fetching), (0, 0, BLOCK), "a fetch goes on for others");
    assert_eq!(lab.machine.gauges().claims_open, 0);
}

#[test]
fn a_load_waits_for_what_a_tier_reads_and_ends_with_its_time() {
    let mut lab = Lab::new(8, 1);
    let namespace = lab.open("a");
    lab.located = |key| if key.hash.0[0] == 9 { Location::Absent } else { Location::Tier(0) };
    let token = lab.send(Request::Load {
        id: None,
        namespace,
        hashes: names(&[1, 2, 9]),
        fetch_deadline: 1 << 40,
        last: true,
        runs_max: usize::MAX,
        in_place: false,
    });
    assert!(lab.reply(token).is_none());
    let reads = lab.reads();
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: Ok(Fetched::Whole) });
    assert!(lab.reply(token).is_none());
    lab.feed(Event::Expire { token });
    let Some(Reply::Slots(outcomes)) = lab.reply(token) else { panic!("no answer") };
    let kinds: Vec<&str> = outcomes
        .iter()
        .map(|outcome| match outcome {
            Outcome::Leased(_) => "leased",
            Outcome::Have => "have",
            Outcome::Refused(kind) => kind.as_str(),
        })
        .collect();
    assert_eq!(kinds, ["leased", "timeout", "not_found"]);
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[1].1, outcome: Ok(Fetched::Whole) });
    assert_eq!(lab.machine.gauges().loads_open, 0);
}

#[test]
fn blocks_that_only_io_can_tell_of_are_probed_front_to_back() {
    let mut lab = Lab::new(8, 2);
    let namespace = lab.open("a");
    lab.located = |_| Location::Unknown;
    let token = lab.claim(namespace, &[1, 2, 3, 4]);
    // The first tier holds one block, the second the next two.
    for held in [1, 2, 0, 0] {
        let Some(Command::Probe { ask: Ask::Claim(claim, run), .. }) = lab.commands.pop() else {
            panic!("a question")
        };
        lab.feed(Event::Probed { ask: Ask::Claim(claim, run), outcome: Ok(held) });
    }
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    assert_eq!(progress.arriving.map(|arriving| arriving.units), Some(3));
    let tiers: Vec<usize> = lab.reads().iter().map(|read| read.0).collect();
    assert_eq!(tiers, [0, 1, 1]);
}

#[test]
fn work_on_a_claim_of_many_places_is_cut_into_pieces() {
    let mut lab = Lab::new(8, 0);
    let namespace = lab.open("a");
    let hashes: Vec<BlockHash> =
        (0..100_000u32).map(|n| BlockHash([n.to_le_bytes(); 4].concat().try_into().unwrap())).collect();
    let (mut events, mut out) = (0, Effects::default());
    let request = claim(&[namespace], hashes);
    lab.machine.step(0, Event::Request { token: 900, owner: OWNER, request }, &mut out);
    while let Some(job) = out.again.pop() {
        assert!(matches!(job, Job::Claim(_)));
        events += 1;
        lab.machine.step(0, Event::Continue(job), &mut out);
    }
    assert!(events >= 40, "{events} pieces");
    assert!(matches!(&out.replies[..], [(900, Ok(Reply::Claim(progress)))] if progress.settled));
}

/// A client that SIGSTOP or a debugger holds in the middle of its dumps keeps its slots, but not the share of others.
#[test]
fn a_stopped_dumper_leaves_the_rest_of_the_pool_to_others() {
    const STOPPED: u64 = 2;
    let mut lab = Lab::new(20, 1);
    let namespace = lab.open("a");
    let reserve = |hashes: &[u8]| Request::Reserve {
        namespace,
        id: None,
        hashes: names(hashes),
        how: Reserve::Block,
        runs_max: usize::MAX,
    };
    let hashes: Vec<u8> = (1..=20).collect();
    lab.feed(Event::Request { token: 500, owner: STOPPED, request: reserve(&hashes) });
    assert_eq!(lab.machine.gauges().held.filling, 14 * BLOCK, "70 % of the pool");
    assert_eq!(lab.dump(namespace, &[30]), 0);
    lab.now = 11_000_000_000;
    lab.feed(Event::Tick);
    assert_eq!(lab.dump(namespace, &[30, 31, 32, 33, 34, 35]), 4, "70 % of what is left");
    assert_eq!(lab.machine.gauges().held.filling, 14 * BLOCK, "its slots are still its own");
    // It goes on: its bytes count again.
    lab.feed(Event::Request { token: 501, owner: STOPPED, request: reserve(&[1]) });
    let Some(Reply::Slots(outcomes)) = lab.reply(500) else { panic!("no answer") };
    let Outcome::Leased(leased) = &outcomes[0] else { panic!("no lease") };
    let commit = Request::Commit { leases: vec![leased.lease], shards: ShardSet::All, crc64: None };
    lab.feed(Event::Request { token: 502, owner: STOPPED, request: commit });
    assert_eq!(lab.dump(namespace, &[36]), 0);
}
