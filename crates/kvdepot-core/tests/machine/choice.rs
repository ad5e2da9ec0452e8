//! Claims that may be loaded from some tiers only: what they ask, what they share with others, and what they are told.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{Lab, claim};
use kvdepot_core::machine::{
    Command, Event, Fetched, Location, Outcome, Progress, Reply, Request, Reserve, ShardSet, TierIndex,
    TierSet,
};
use kvdepot_core::misses::Short;
use kvdepot_core::{BlockHash, Error, ErrorKind, SlotId};

const FIRST: TierSet = TierSet::NONE.with(0);
const SECOND: TierSet = TierSet::NONE.with(1);

fn names(hashes: &[u8]) -> Vec<BlockHash> {
    hashes.iter().map(|&hash| BlockHash([hash; 16])).collect()
}

/// A machine of so many tiers, all of whose blocks are in this one.
fn lab(tiers: usize, located: TierIndex) -> Lab {
    let mut lab = Lab::new(16, tiers);
    lab.located = Location::Tier(located);
    lab
}

/// Opens a claim that may be loaded from these tiers.
fn open(lab: &mut Lab, hashes: &[u8], among: TierSet) -> Progress {
    let token = send(lab, hashes, among);
    match lab.reply(token) {
        Some(Reply::Claim(progress)) => progress,
        other => panic!("no claim: {other:?}"),
    }
}

fn send(lab: &mut Lab, hashes: &[u8], among: TierSet) -> u64 {
    let mut request = claim(&[0], names(hashes));
    if let Request::ClaimOpen { tiers, .. } = &mut request {
        *tiers = among;
    }
    lab.send(request)
}

fn poll(lab: &mut Lab, claim: u64) -> Progress {
    match lab.ask(Request::ClaimPoll { claim, settle: false }) {
        Reply::Claim(progress) => progress,
        other => panic!("no claim: {other:?}"),
    }
}

fn dump(lab: &mut Lab, hashes: &[u8]) {
    let (hashes, how) = (names(hashes), Reserve::Block);
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 99 });
    let Reply::Slots(outcomes) = reply else { panic!("no slots: {reply:?}") };
    let leases = outcomes.into_iter().map(|outcome| match outcome {
        Outcome::Leased(leased) => leased.lease,
        other => panic!("no slot: {other:?}"),
    });
    let leases = leases.collect();
    lab.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
    lab.take();
}

/// Tier and slot of the reads and leases that were commanded since the last look.
fn reads(lab: &mut Lab) -> Vec<(TierIndex, SlotId)> {
    let commands = lab.take().into_iter();
    commands
        .filter_map(|command| match command {
            Command::Read { tier, slot, .. } | Command::Lease { tier, slot, .. } => Some((tier, slot)),
            _ => None,
        })
        .collect()
}

/// Ends the reads that were commanded since the last look. Returns their tiers.
fn end_reads(lab: &mut Lab, outcome: &kvdepot_core::Result<Fetched>) -> Vec<TierIndex> {
    let reads = reads(lab);
    for &(tier, slot) in &reads {
        lab.feed(Event::ReadEnded { tier, slot, outcome: outcome.clone() });
    }
    lab.machine.check().unwrap();
    reads.into_iter().map(|(tier, _)| tier).collect()
}

/// What was told of claims that found less than they asked for.
fn missed(lab: &mut Lab) -> Vec<(u8, Short)> {
    std::mem::take(&mut lab.missed).iter().map(|missed| (missed.key.hash.0[0], missed.short)).collect()
}

fn failure() -> kvdepot_core::Result<Fetched> {
    Err(Error::new(ErrorKind::Io, "test"))
}

#[test]
fn only_its_tiers_are_asked() {
    let mut lab = lab(2, 1);
    open(&mut lab, &[1], SECOND);
    assert_eq!(lab.asked, [SECOND]);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [1]);
    let other = open(&mut lab, &[2], FIRST);
    assert_eq!((lab.asked[1], other.settled, other.units), (FIRST, true, 0));
    assert!(reads(&mut lab).is_empty());
    assert_eq!((missed(&mut lab), lab.machine.counters().lookup_hit_blocks), (vec![(2, Short::Absent)], 1));
}

#[test]
fn a_claim_of_all_tiers_is_one_without_limits() {
    for (tiers, among) in [(2, FIRST.or(SECOND)), (1, FIRST), (0, TierSet::NONE)] {
        let mut lab = Lab::new(16, tiers);
        open(&mut lab, &[1], among);
        let told = lab.missed.iter().map(|missed| missed.tiers).chain(lab.asked.iter().copied());
        assert!(told.into_iter().all(|told| told == TierSet::ALL));
    }
}

#[test]
fn only_its_tiers_are_probed() {
    let mut lab = Lab::new(16, 3);
    lab.located = Location::Unknown;
    let token = send(&mut lab, &[1, 2], TierSet::NONE.with(2));
    let mut probed = Vec::new();
    while let [Command::Probe { tier, ask, .. }] = lab.take()[..] {
        probed.push(tier);
        lab.feed(Event::Probed { ask, outcome: Ok(0) });
    }
    assert_eq!(probed, [2]);
    assert!(matches!(lab.reply(token), Some(Reply::Claim(Progress { settled: true, units: 0, .. }))));
}

#[test]
fn the_pool_is_searched_in_any_case_and_without_tiers_nothing_else_is() {
    let mut lab = lab(2, 0);
    open(&mut lab, &[1], TierSet::ALL);
    end_reads(&mut lab, &Ok(Fetched::Whole));
    dump(&mut lab, &[2]);
    lab.asked.clear();
    let found = open(&mut lab, &[1, 2, 3], TierSet::NONE);
    assert_eq!((found.settled, found.units), (true, 2), "wherever they came from");
    assert!(lab.asked.is_empty() && reads(&mut lab).is_empty());
    assert_eq!(missed(&mut lab), [(3, Short::Absent)]);
}

#[test]
fn a_read_of_another_tier_is_not_waited_for() {
    let mut lab = lab(2, 1);
    let free = open(&mut lab, &[1, 2], TierSet::ALL);
    let strict = open(&mut lab, &[1, 2], FIRST);
    assert_eq!((strict.settled, strict.units), (true, 0));
    assert_eq!(missed(&mut lab), [(1, Short::Excluded)]);
    let same = open(&mut lab, &[1, 2], SECOND);
    assert!(!same.settled);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [1, 1], "read once for both");
    assert_eq!([free, same].map(|one| poll(&mut lab, one.claim).units), [2, 2]);
}

/// The claim asks the tiers again when it has waited for room, although it knew the block as another's read then.
#[test]
fn a_block_that_an_excluded_tier_was_reading_is_looked_for_when_the_claim_looks_again() {
    let mut lab = Lab::new(8, 2);
    lab.located = Location::Tier(1);
    let holder = open(&mut lab, &[11, 12, 13, 14, 15], TierSet::ALL);
    end_reads(&mut lab, &Ok(Fetched::Whole));
    open(&mut lab, &[9], TierSet::ALL);
    let [(1, ninth)] = reads(&mut lab)[..] else { panic!("no read") };
    lab.located = Location::Tier(0);
    let strict = open(&mut lab, &[1, 2, 3, 9], FIRST);
    assert!(reads(&mut lab).is_empty(), "it waits for room");
    // It does not come, and no tier below is asked.
    lab.feed(Event::ReadEnded { tier: 1, slot: ninth, outcome: failure() });
    lab.ask(Request::ClaimRelease { claim: holder.claim });
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [0; 4]);
    assert_eq!(poll(&mut lab, strict.claim).units, 4);
}

/// The read begins after the claim has looked, and before it takes its leases.
#[test]
fn a_read_of_another_tier_that_began_meanwhile_is_not_waited_for() {
    let mut lab = lab(2, 0);
    lab.tokens += 1;
    let mut request = claim(&[0], names(&[1]));
    if let Request::ClaimOpen { tiers, .. } = &mut request {
        *tiers = FIRST;
    }
    let token = lab.tokens;
    let answer = lab.step(Event::Request { token, owner: 1, request });
    lab.located = Location::Tier(1);
    open(&mut lab, &[1], TierSet::ALL);
    answer.into_iter().for_each(|event| lab.feed(event));
    let Some(Reply::Claim(strict)) = lab.reply(token) else { panic!("no claim") };
    assert_eq!((strict.settled, strict.units), (true, 0));
}

#[test]
fn a_read_goes_on_only_in_tiers_that_its_claims_allow() {
    let mut lab = lab(3, 0);
    let strict = open(&mut lab, &[1], FIRST);
    assert_eq!(end_reads(&mut lab, &failure()), [0]);
    assert!(reads(&mut lab).is_empty());
    assert_eq!((poll(&mut lab, strict.claim).settled, missed(&mut lab)), (true, vec![(1, Short::Absent)]));
    let skipping = open(&mut lab, &[2], FIRST.with(2));
    assert_eq!(end_reads(&mut lab, &failure()), [0]);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [2]);
    assert_eq!(poll(&mut lab, skipping.claim).units, 1);
}

#[test]
fn who_joins_a_read_brings_its_tiers_along_and_the_others_are_told_that_it_did_not_come() {
    let mut lab = lab(2, 0);
    let strict = open(&mut lab, &[1], FIRST);
    let free = open(&mut lab, &[1], TierSet::ALL);
    assert_eq!(end_reads(&mut lab, &failure()), [0]);
    let told = poll(&mut lab, strict.claim);
    assert_eq!((told.settled, told.units), (true, 0));
    assert_eq!(missed(&mut lab), [(1, Short::Excluded)]);
    let late = open(&mut lab, &[1], FIRST);
    assert_eq!((late.settled, late.units), (true, 0), "another tier reads it now");
    assert!(!poll(&mut lab, free.claim).settled);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [1]);
    assert_eq!(poll(&mut lab, free.claim).units, 1);
    assert_eq!(open(&mut lab, &[1], FIRST).units, 1, "it is in the pool now");
}

#[test]
fn a_load_that_waits_for_a_claims_read_is_served_by_any_tier() {
    let mut lab = lab(2, 0);
    open(&mut lab, &[1], FIRST);
    let (fetch_deadline, last, runs_max) = (1 << 40, true, 99);
    let load = Request::Load {
        namespace: 0,
        id: None,
        hashes: names(&[1]),
        fetch_deadline,
        last,
        runs_max,
        in_place: false,
    };
    let token = lab.send(load);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Miss)), [0]);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [1]);
    let Some(Reply::Slots(outcomes)) = lab.reply(token) else { panic!("no slots") };
    assert!(matches!(outcomes[..], [Outcome::Leased(_)]), "{outcomes:?}");
}

/// Who joins a read that began below gets the block from a tier above, which the read has passed over.
#[test]
fn a_limited_read_that_fails_goes_on_in_tiers_above_for_those_who_joined_it() {
    let mut lab = lab(3, 1);
    let strict = open(&mut lab, &[1], SECOND);
    let free = open(&mut lab, &[1], TierSet::ALL);
    assert_eq!(end_reads(&mut lab, &failure()), [1]);
    assert_eq!(poll(&mut lab, strict.claim).units, 0);
    assert_eq!(end_reads(&mut lab, &failure()), [0]);
    assert_eq!(end_reads(&mut lab, &Ok(Fetched::Whole)), [2], "each is asked once");
    assert_eq!(poll(&mut lab, free.claim).units, 1);
    open(&mut lab, &[2], TierSet::ALL);
    assert_eq!(end_reads(&mut lab, &failure()), [1]);
    assert_eq!(end_reads(&mut lab, &failure()), [2], "the locator knows that it is in none above");
    assert!(reads(&mut lab).is_empty());
}

#[test]
fn a_read_leaves_time_only_for_tiers_that_may_be_asked_after_it() {
    let mut lab = lab(2, 0);
    let mut deadline = |hash: u8, tiers| {
        open(&mut lab, &[hash], tiers);
        let [Command::Read { deadline, .. }] = lab.take()[..] else { panic!("no read") };
        deadline
    };
    let (strict, free) = (deadline(1, FIRST), deadline(2, TierSet::ALL));
    assert!(strict > free, "{strict} {free}");
}

#[test]
fn claims_beyond_a_step_are_told_that_a_read_went_on_without_them() {
    let mut lab = lab(2, 0);
    let strict: Vec<u64> = (0..3000).map(|_| open(&mut lab, &[1], FIRST).claim).collect();
    open(&mut lab, &[1], TierSet::ALL);
    end_reads(&mut lab, &failure());
    assert!(strict.iter().all(|&claim| poll(&mut lab, claim).settled));
}

const BLOCK: u64 = 4096;

/// A lab whose first tier leases blocks in its memory, and has leased this one there.
fn lab_with_a_lease(hash: u8) -> Lab {
    let mut lab = lab(2, 0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: 16 * BLOCK, unit_bytes: BLOCK });
    lab.ask(Request::ReadsInPlace { namespace: 0 });
    let first = open(&mut lab, &[hash], TierSet::ALL);
    let [(0, slot)] = reads(&mut lab)[..] else { panic!("no lease") };
    lab.feed(Event::LeaseEnded { tier: 0, slot, outcome: Ok(Some(BLOCK)) });
    assert_eq!(poll(&mut lab, first.claim).units, 1);
    assert_eq!(lab.machine.gauges().in_place.blocks, 1);
    lab
}

#[test]
fn a_block_leased_in_a_tiers_memory_counts_as_that_tiers() {
    let mut lab = lab_with_a_lease(1);
    assert_eq!(open(&mut lab, &[1], FIRST).units, 1);
    for tiers in [SECOND, TierSet::NONE] {
        let strict = open(&mut lab, &[1], tiers);
        assert_eq!((strict.settled, strict.units), (true, 0));
        assert_eq!(missed(&mut lab), [(1, Short::Excluded)]);
    }
}

/// A copy of it is being read into the pool for a reader that cannot read there, and does not come.
#[test]
fn a_claim_that_waits_for_a_copy_is_not_given_what_the_copy_is_of() {
    let mut lab = lab_with_a_lease(1);
    lab.located = Location::Tier(1);
    let load = Request::Load {
        namespace: 0,
        id: None,
        hashes: names(&[1]),
        fetch_deadline: 1 << 40,
        last: true,
        runs_max: 99,
        in_place: false,
    };
    lab.send(load);
    let [(1, slot)] = reads(&mut lab)[..] else { panic!("no read") };
    let strict = open(&mut lab, &[1], SECOND);
    assert!(!strict.settled, "the second tier reads it");
    lab.feed(Event::ReadEnded { tier: 1, slot, outcome: Err(Error::new(ErrorKind::Timeout, "test")) });
    let told = poll(&mut lab, strict.claim);
    assert_eq!((told.settled, told.units), (true, 0));
    assert_eq!(open(&mut lab, &[1], FIRST).units, 1, "it is still there");
}
