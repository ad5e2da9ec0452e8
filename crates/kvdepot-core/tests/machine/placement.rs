//! Placement: which tiers get a block, and when.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::collections::BTreeSet;

use crate::lab::{pool, spec};
use kvdepot_core::machine::{
    Adopt, Command, Effects, Event, Fetched, Handed, HandedState, Location, Machine, Outcome, Pace,
    Placement, Proof, Reply, Request, Reserve, ShardSet, Stored, WriteWhen,
};
use kvdepot_core::runs::{Run, Runs};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, LeaseId, Priority};

pub(crate) const BLOCK: u64 = 4096;
pub(crate) const THROUGH: Placement = Placement { write: WriteWhen::Through, promote: false };
pub(crate) const SECOND_USE: Placement = Placement { write: WriteWhen::OnSecondUse, promote: false };
const COLD: Placement = Placement { write: WriteWhen::WhenCold, promote: false };

/// A machine with one namespace over as many tiers as there are placements.
pub(crate) struct Lab {
    pub(crate) machine: Machine,
    pub(crate) now: u64,
    pub(crate) tokens: u64,
    /// Writes in flight: tier, slot and the first byte of the hash.
    pub(crate) writes: Vec<(usize, u32, u8)>,
    pub(crate) reads: Vec<(usize, u32)>,
    /// Reads so far that count as uses of their blocks.
    pub(crate) used_reads: usize,
    pub(crate) in_pool: BTreeSet<u8>,
    /// Blocks for which the ledger wants a checksum.
    pub(crate) wanted: Vec<u8>,
    pub(crate) replies: Vec<(u64, Reply)>,
    pub(crate) location: Location,
}

impl Lab {
    pub(crate) fn new(blocks: u64, policy: &str, keeps: bool, tiers: &[Placement]) -> Self {
        Self::with_budgets(blocks, policy, keeps, tiers, &vec![0; tiers.len()])
    }

    /// `budgets` are blocks an hour; 0 = no limit.
    pub(crate) fn with_budgets(
        blocks: u64,
        policy: &str,
        keeps: bool,
        tiers: &[Placement],
        budgets: &[u64],
    ) -> Self {
        let budgets: Vec<u64> = budgets.iter().map(|blocks| blocks * BLOCK * 24).collect();
        let pool = pool(blocks, policy, keeps);
        let mut lab = Self {
            machine: Machine::new(pool, tiers.len()).with_placements(tiers).with_write_budgets(&budgets),
            now: 1,
            tokens: 0,
            writes: Vec::new(),
            reads: Vec::new(),
            used_reads: 0,
            in_pool: BTreeSet::new(),
            wanted: Vec::new(),
            replies: Vec::new(),
            location: Location::Absent,
        };
        lab.ask(Request::OpenNamespace { spec: spec(), epoch: 0 });
        lab
    }

    pub(crate) fn feed(&mut self, event: Event) {
        let mut todo = vec![event];
        while let Some(event) = todo.pop() {
            let mut out = Effects::default();
            self.machine.step(self.now, event, &mut out);
            for command in out.commands {
                match command {
                    Command::Write { tier, slot, key, .. } => self.writes.push((tier, slot, key.hash.0[0])),
                    Command::Read { tier, slot, is_use, .. } => {
                        self.reads.push((tier, slot));
                        self.used_reads += usize::from(is_use);
                    }
                    _ => {}
                }
            }
            self.wanted.extend(out.proofs.iter().filter_map(|proof| match proof {
                Proof::Wanted(key) => Some(key.hash.0[0]),
                _ => None,
            }));
            for (key, visible) in out.visible {
                if visible {
                    self.in_pool.insert(key.hash.0[0]);
                } else {
                    self.in_pool.remove(&key.hash.0[0]);
                }
            }
            self.replies
                .extend(out.replies.into_iter().map(|(token, reply)| (token, reply.unwrap().listed())));
            todo.extend(out.questions.into_iter().map(|question| Event::Located {
                ask: question.ask,
                locations: vec![self.location; question.keys.len()],
            }));
            todo.extend(out.again.into_iter().map(Event::Continue));
        }
    }

    pub(crate) fn send(&mut self, request: Request) -> u64 {
        self.tokens += 1;
        self.feed(Event::Request { token: self.tokens, owner: 1, request });
        self.tokens
    }

    pub(crate) fn ask(&mut self, request: Request) -> Reply {
        let token = self.send(request);
        let at = self.replies.iter().position(|(other, _)| *other == token).expect("a reply at once");
        self.replies.remove(at).1
    }

    pub(crate) fn leases(reply: Reply) -> Vec<LeaseId> {
        let Reply::Slots(outcomes) = reply else { panic!("no slots") };
        let lease = |outcome| match outcome {
            Outcome::Leased(leased) => Some(leased.lease),
            _ => None,
        };
        outcomes.into_iter().filter_map(lease).collect()
    }

    /// Dumps one block. Returns whether there was space.
    pub(crate) fn dump(&mut self, hash: u8) -> bool {
        let hashes = vec![BlockHash([hash; 16])];
        let reply =
            self.ask(Request::Reserve { namespace: 0, id: None, hashes, how: Reserve::Block, runs_max: 9 });
        let leases = Self::leases(reply);
        let room = !leases.is_empty();
        self.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
        room
    }

    pub(crate) fn load(&self, hash: u8) -> Request {
        let hashes = vec![BlockHash([hash; 16])];
        Request::Load {
            namespace: 0,
            id: None,
            hashes,
            fetch_deadline: 1 << 40,
            last: true,
            runs_max: 9,
            in_place: false,
        }
    }

    /// Loads a block that is in the pool and releases it.
    pub(crate) fn use_once(&mut self, hash: u8) {
        let leases = Self::leases(self.ask(self.load(hash)));
        assert_eq!(leases.len(), 1, "block {hash} is in the pool");
        self.ask(Request::Release { leases });
    }

    /// Loads a block that a tier has and releases it.
    pub(crate) fn fetch(&mut self, hash: u8, tier: usize) {
        self.location = Location::Tier(tier);
        let token = self.send(self.load(hash));
        let [(from, slot)] = std::mem::take(&mut self.reads)[..] else { panic!("one read") };
        assert_eq!(from, tier);
        self.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        self.location = Location::Absent;
        let at = self.replies.iter().position(|(other, _)| *other == token).unwrap();
        let leases = Self::leases(self.replies.remove(at).1);
        self.ask(Request::Release { leases });
    }

    /// Completes all writes in flight. Returns which tier got which block.
    pub(crate) fn end_writes(
        &mut self,
        outcome: impl Fn() -> kvdepot_core::Result<Stored>,
    ) -> Vec<(usize, u8)> {
        let writes = std::mem::take(&mut self.writes);
        for &(tier, slot, _) in &writes {
            self.feed(Event::WriteEnded { tier, slot, outcome: outcome() });
        }
        writes.into_iter().map(|(tier, _, hash)| (tier, hash)).collect()
    }

    pub(crate) fn unwritten(&self) -> u64 {
        self.machine.gauges().evicted_unwritten
    }

    pub(crate) fn dirty(&self) -> u64 {
        self.machine.gauges().dirty_blocks
    }
}

fn failed() -> kvdepot_core::Result<Stored> {
    Err(Error::new(ErrorKind::Io, "the tier fails"))
}

pub(crate) fn stored() -> kvdepot_core::Result<Stored> {
    Ok(Stored::New)
}

#[test]
fn a_block_is_clean_when_the_tiers_that_are_to_have_it_now_have_it() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, SECOND_USE, COLD]);
    lab.dump(1);
    assert_eq!(lab.dirty(), 1);
    assert_eq!(lab.end_writes(stored), [(0, 1)]);
    assert_eq!((lab.dirty(), lab.machine.gauges().held.pinned), (0, 0));

    let mut lab = Lab::new(16, "lru", true, &[SECOND_USE, COLD]);
    (1..=8).for_each(|hash| assert!(lab.dump(hash)));
    assert_eq!((lab.dirty(), lab.writes.len()), (0, 0));
}

#[test]
fn a_late_write_neither_makes_a_block_dirty_nor_keeps_it_so() {
    let mut lab = Lab::new(16, "lru", true, &[SECOND_USE, THROUGH]);
    lab.dump(1);
    lab.use_once(1);
    assert_eq!(lab.writes.len(), 2, "both are under way");
    let [(1, slot, 1), (0, late, 1)] = lab.writes[..] else { panic!("{:?}", lab.writes) };
    lab.feed(Event::WriteEnded { tier: 1, slot, outcome: stored() });
    assert_eq!(lab.dirty(), 0);
    assert_eq!(lab.machine.gauges().held.pinned, BLOCK, "the other tier reads the slot");
    lab.feed(Event::WriteEnded { tier: 0, slot: late, outcome: stored() });
    assert_eq!(lab.machine.gauges().held.pinned, 0);
}

#[test]
fn a_block_is_written_on_its_second_use_once() {
    let mut lab = Lab::new(16, "lru", true, &[SECOND_USE]);
    lab.dump(1);
    lab.dump(2);
    assert!(lab.writes.is_empty());
    lab.use_once(1);
    assert_eq!((lab.dirty(), lab.end_writes(stored)), (0, vec![(0, 1)]));
    lab.use_once(1);
    assert!(lab.writes.is_empty());
    assert_eq!(lab.machine.counters().late_write_blocks, 1);
}

#[test]
fn a_fetch_is_the_first_use_of_what_a_tier_below_holds() {
    let mut lab = Lab::new(16, "lru", true, &[SECOND_USE, THROUGH]);
    lab.fetch(1, 1);
    assert!(lab.writes.is_empty());
    lab.use_once(1);
    assert_eq!(lab.end_writes(stored), [(0, 1)]);
}

#[test]
fn a_hit_below_is_promoted_where_the_placement_says_so() {
    let promote = Placement { promote: true, ..COLD };
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, promote, THROUGH, promote]);
    lab.fetch(1, 2);
    assert_eq!(lab.dirty(), 0);
    assert_eq!(lab.end_writes(stored), [(1, 1)], "neither tier 0, which does not promote, nor the one below");
    lab.fetch(2, 0);
    assert!(lab.writes.is_empty());
}

#[test]
fn a_pool_that_keeps_nothing_promotes_before_it_gives_a_block_up() {
    let promote = Placement { promote: true, ..THROUGH };
    let mut lab = Lab::new(16, "lru", false, &[promote, THROUGH]);
    lab.fetch(1, 1);
    assert_eq!(lab.end_writes(stored), [(0, 1)]);
    assert_eq!(lab.machine.gauges().pool_blocks, 0);
}

#[test]
fn a_pool_that_keeps_nothing_writes_through() {
    for placement in [SECOND_USE, COLD] {
        let mut lab = Lab::new(16, "lru", false, &[placement]);
        lab.dump(1);
        assert_eq!((lab.dirty(), lab.end_writes(stored)), (1, vec![(0, 1)]));
    }
}

#[test]
fn what_goes_next_is_written_before_room_is_needed() {
    for policy in ["lru", "s3fifo", "lhd"] {
        let mut lab = Lab::new(16, policy, true, &[COLD]);
        (1..=14).for_each(|hash| assert!(lab.dump(hash)));
        assert!(lab.writes.is_empty(), "{policy}: an eighth of the pool is free");
        for hash in 15..=60 {
            assert!(lab.dump(hash));
            assert_eq!(lab.dirty(), 0);
            lab.end_writes(stored);
        }
        assert_eq!(lab.unwritten(), 0, "{policy}");
        assert!(lab.machine.gauges().evicted > 40, "{policy}");
    }
}

#[test]
fn others_go_before_a_block_whose_tier_is_to_have_it_first() {
    let mut lab = Lab::new(8, "lru", true, &[COLD]);
    (1..=8).for_each(|hash| assert!(lab.dump(hash)));
    let (tier, slot, _) = *lab.writes.iter().find(|(_, _, hash)| *hash == 3).expect("3 is cold");
    lab.feed(Event::WriteEnded { tier, slot, outcome: stored() });
    assert!(lab.dump(9));
    assert!(!lab.in_pool.contains(&3) && lab.in_pool.contains(&1) && lab.in_pool.contains(&8));
    assert_eq!(lab.unwritten(), 0);
}

#[test]
fn a_tier_that_fails_stops_no_eviction_and_is_asked_again_after_the_next_use() {
    let mut lab = Lab::new(8, "lru", true, &[COLD]);
    (1..=8).for_each(|hash| assert!(lab.dump(hash)));
    assert_eq!(lab.end_writes(failed).len(), 7);
    assert!(lab.dump(9));
    assert!(!lab.in_pool.contains(&1));
    assert_eq!((lab.unwritten(), lab.machine.counters().late_write_blocks_dropped), (1, 7));
    assert!(lab.writes.iter().all(|(_, _, hash)| *hash == 8), "{:?}", lab.writes);
    lab.use_once(2);
    assert!(lab.dump(10));
    assert!(lab.writes.iter().any(|(_, _, hash)| *hash == 2), "{:?}", lab.writes);
}

#[test]
fn a_tier_that_is_slow_stops_no_eviction_and_is_not_given_what_went() {
    let mut lab = Lab::new(64, "lru", true, &[COLD]);
    (1..=64).for_each(|hash| assert!(lab.dump(hash)));
    assert_eq!(lab.writes.len(), 32, "as many as a tier is given at a time");
    (65..=80).for_each(|hash| assert!(lab.dump(hash)));
    let evicted: Vec<u8> = (1..=80).filter(|hash| !lab.in_pool.contains(hash)).collect();
    assert_eq!((lab.unwritten(), evicted.len()), (16, 16));
    let mut written = Vec::new();
    while !lab.writes.is_empty() {
        written.extend(lab.end_writes(stored));
    }
    assert!(evicted.iter().all(|hash| !written.contains(&(0, *hash))), "{evicted:?} {written:?}");
    assert_eq!((lab.machine.gauges().writes_queued, lab.machine.gauges().held.pinned), (0, 0));
}

#[test]
fn values_are_written_through_to_every_tier() {
    let mut lab = Lab::new(16, "lru", true, &[SECOND_USE, COLD]);
    let hashes = vec![BlockHash([1; 16])];
    let how = Reserve::Value;
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
    let [lease] = Lab::leases(reply)[..] else { panic!("one lease") };
    lab.ask(Request::Publish { lease, others: Vec::new() });
    assert_eq!((lab.dirty(), lab.end_writes(stored)), (1, vec![(0, 1), (1, 1)]));
    assert_eq!(lab.dirty(), 0);
}

const HOUR: u64 = 3_600_000_000_000;

#[test]
fn a_block_beyond_a_tier_s_budget_is_clean_and_written_when_it_is_used_later() {
    let mut lab = Lab::with_budgets(16, "lru", true, &[THROUGH, THROUGH], &[0, 2]);
    (1..=4).for_each(|hash| assert!(lab.dump(hash)));
    assert_eq!(lab.writes.iter().filter(|(tier, ..)| *tier == 1).count(), 2, "{:?}", lab.writes);
    assert_eq!(lab.machine.counters().over_budget_blocks, 2);
    assert_eq!(lab.end_writes(stored).len(), 6);
    assert_eq!((lab.dirty(), lab.machine.gauges().held.pinned), (0, 0));
    lab.use_once(3);
    assert!(lab.writes.is_empty(), "the budget is still used up");
    lab.now += HOUR;
    lab.use_once(1);
    assert!(lab.writes.is_empty(), "the tier has it");
    lab.use_once(4);
    assert_eq!((lab.dirty(), lab.end_writes(stored)), (0, vec![(1, 4)]));
    assert_eq!(lab.machine.counters().over_budget_blocks, 3);
}

#[test]
fn a_budget_holds_for_late_writes_and_a_cold_block_goes_without_its_tier() {
    let mut lab = Lab::with_budgets(16, "lru", true, &[SECOND_USE], &[1]);
    (1..=2).for_each(|hash| assert!(lab.dump(hash)));
    (1..=2).for_each(|hash| lab.use_once(hash));
    assert_eq!(lab.end_writes(stored), [(0, 1)]);

    let mut lab = Lab::with_budgets(8, "lru", true, &[COLD], &[1]);
    (1..=20).for_each(|hash| assert!(lab.dump(hash), "{hash}"));
    assert_eq!(lab.end_writes(stored).len(), 1);
    assert!(lab.unwritten() > 0);
}

#[test]
fn a_pool_that_keeps_nothing_gives_up_what_its_tier_may_not_be_given() {
    let mut lab = Lab::with_budgets(16, "lru", false, &[THROUGH], &[1]);
    (1..=3).for_each(|hash| assert!(lab.dump(hash)));
    assert_eq!(lab.end_writes(stored), [(0, 1)]);
    assert_eq!((lab.machine.gauges().pool_blocks, lab.dirty()), (0, 0));
}

/// A tier without the new value could return the earlier one (P1).
#[test]
fn values_are_written_beyond_a_budget_and_count() {
    let mut lab = Lab::with_budgets(16, "lru", true, &[THROUGH], &[1]);
    for _ in 0..3 {
        let hashes = vec![BlockHash([1; 16])];
        let reply =
            lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how: Reserve::Value, runs_max: 9 });
        let [lease] = Lab::leases(reply)[..] else { panic!("one lease") };
        lab.ask(Request::Publish { lease, others: Vec::new() });
        assert_eq!(lab.end_writes(stored), [(0, 1)]);
    }
    lab.now += HOUR;
    lab.dump(2);
    assert!(lab.writes.is_empty(), "three blocks were spent, one has come back");
    assert_eq!(lab.dirty(), 0);
}

/// As after a crash, a next depot does not know which tiers have a block. It must not give the block to all of them for
/// that reason.
#[test]
fn a_block_that_is_taken_in_goes_where_a_block_that_is_sealed_goes() {
    let mut lab = Lab::new(8, "lru", true, &[THROUGH, SECOND_USE, COLD]);
    let id = lab.machine.namespace(0).unwrap().id;
    let slot = |page: u64, value| {
        let key = BlockKey { namespace: id, hash: BlockHash([page as u8 + 1; 16]) };
        let runs = Runs::from_slice(&[Run { offset: page * BLOCK, len: BLOCK }]);
        let state = HandedState::Block {
            key,
            saved: 0,
            to_write: u8::MAX,
            value,
            crc64: None,
            priority: Priority::Normal,
        };
        Adopt { handed: Handed { runs, state, holders: Vec::new() }, owners: Vec::new() }
    };
    lab.feed(Event::Adopt { pool_bytes: 8 * BLOCK, slots: vec![slot(0, false)] });
    assert_eq!(lab.end_writes(|| Ok(Stored::New)), [(0, 1)]);
    lab.use_once(1);
    assert_eq!(lab.end_writes(|| Ok(Stored::New)), [(1, 1)], "its second use here");
    // A tier without the new value could return the earlier one.
    lab.feed(Event::Adopt { pool_bytes: 8 * BLOCK, slots: vec![slot(1, true)] });
    assert_eq!(lab.end_writes(|| Ok(Stored::New)), [(0, 2), (1, 2), (2, 2)]);
}

/// Another tier has it, so nothing else would remember that this one lacks it.
#[test]
fn a_block_that_a_tier_lost_while_much_was_unwritten_is_written_at_its_next_use() {
    let mut lab = Lab::new(10, "lru", true, &[THROUGH, THROUGH]);
    assert!(lab.dump(1));
    assert_eq!(lab.end_writes(stored).len(), 2);
    (2..=8).for_each(|hash| assert!(lab.dump(hash)));
    let namespace = lab.machine.namespace(0).unwrap().id;
    let keys = vec![BlockKey { namespace, hash: BlockHash([1; 16]) }];
    lab.feed(Event::TierForgot { tier: 0, keys, lost: true });
    assert_eq!((lab.dirty(), lab.end_writes(stored).len()), (7, 14), "those seven are enough");
    lab.now += HOUR;
    lab.use_once(1);
    assert_eq!((lab.dirty(), lab.end_writes(stored)), (0, vec![(0, 1)]));
}

/// As after a restart of a pool server. Dumps need the room, too.
#[test]
fn of_many_lost_blocks_a_tier_is_given_few_at_once_and_the_others_at_their_next_use() {
    let mut lab = Lab::new(64, "lru", true, &[THROUGH]);
    for hash in 1..=30 {
        assert!(lab.dump(hash));
        lab.end_writes(stored);
    }
    // At most eight writes wait then.
    lab.machine.set_pace(Pace::small(1));
    let namespace = lab.machine.namespace(0).unwrap().id;
    let keys: Vec<_> = (1..=30).map(|hash| BlockKey { namespace, hash: BlockHash([hash; 16]) }).collect();
    lab.feed(Event::TierForgot { tier: 0, keys, lost: true });
    let mut written: Vec<u8> = Vec::new();
    assert!((1..=8).contains(&lab.dirty()), "{} blocks are dirty", lab.dirty());
    while !lab.writes.is_empty() {
        written.extend(lab.end_writes(stored).into_iter().map(|(_, hash)| hash));
    }
    assert!((1..=8).contains(&written.len()), "{written:?}");
    lab.now += HOUR;
    for hash in 1..=30 {
        lab.use_once(hash);
        while !lab.writes.is_empty() {
            written.extend(lab.end_writes(stored).into_iter().map(|(_, hash)| hash));
        }
    }
    written.sort_unstable();
    assert_eq!(written, (1..=30).collect::<Vec<_>>(), "each once");
}

/// It would wait behind writes in flight only to be declined.
#[test]
fn a_late_write_beyond_a_budget_is_not_queued() {
    const IN_FLIGHT: u8 = 32;
    let mut lab = Lab::with_budgets(64, "lru", true, &[SECOND_USE], &[u64::from(IN_FLIGHT)]);
    (1..=IN_FLIGHT + 1).for_each(|hash| assert!(lab.dump(hash)));
    (1..=IN_FLIGHT).for_each(|hash| lab.use_once(hash));
    assert_eq!(lab.machine.gauges().writes_queued, usize::from(IN_FLIGHT));
    lab.use_once(IN_FLIGHT + 1);
    assert_eq!(lab.machine.gauges().writes_queued, usize::from(IN_FLIGHT), "no other one waits");
    assert_eq!(lab.machine.counters().over_budget_blocks, 1);
    lab.end_writes(stored);
    lab.now += HOUR;
    lab.use_once(IN_FLIGHT + 1);
    assert_eq!(lab.end_writes(stored), vec![(0, IN_FLIGHT + 1)], "its next use asks again");
}

/// A pool that keeps nothing is rid of a block as soon as its tier does not get it.
#[test]
fn room_that_a_declined_write_frees_is_noticed_at_once() {
    let mut lab = Lab::with_budgets(4, "lru", false, &[THROUGH], &[1]);
    assert!(lab.dump(1));
    assert_eq!(lab.writes.len(), 1, "the budget is used up now");
    let hashes = vec![BlockHash([2; 16])];
    let how = Reserve::Block;
    let leases = Lab::leases(lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 }));
    assert_eq!(leases.len(), 1);
    lab.location = Location::Tier(0);
    for hash in [20, 21, 22] {
        lab.send(lab.load(hash));
    }
    assert_eq!(
        (lab.reads.len(), lab.machine.gauges().pool_free_bytes),
        (2, 0),
        "the third load waits for room"
    );
    lab.send(Request::Commit { leases, shards: ShardSet::All, crc64: None });
    assert_eq!(lab.machine.counters().over_budget_blocks, 1);
    assert_eq!(lab.reads.len(), 3, "without another event");
}

/// A tier that combines small blocks needs many of them at a time.
#[test]
fn a_write_window_lets_more_small_writes_begin() {
    let (usual, window) = (32, 40 * BLOCK);
    for (bytes, begun) in [(0, usual), (window, 40), (8 * BLOCK, usual)] {
        let mut lab = Lab::new(100, "lru", true, &[THROUGH]);
        let machine = std::mem::replace(&mut lab.machine, Machine::new(pool(1, "lru", true), 0));
        lab.machine = machine.with_write_windows(&[bytes]);
        for hash in 1..=60 {
            assert!(lab.dump(hash));
        }
        assert_eq!(lab.writes.len(), begun, "with a window of {bytes} bytes");
        let mut written = 0;
        while !lab.writes.is_empty() {
            assert!(lab.writes.len() <= begun);
            written += lab.writes.len();
            lab.end_writes(stored);
        }
        assert_eq!((written, lab.dirty()), (60, 0), "the window is free again");
    }
}
