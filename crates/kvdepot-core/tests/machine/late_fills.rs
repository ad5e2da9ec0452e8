//! Blocks that a client has begun to dump and does not complete: after a while others may dump them (P2). The first slot
//! stays its client's until that has filled it or has ended (P4), and what it holds then is nobody's.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::Lab;
use kvdepot_core::lease::LeaseId;
use kvdepot_core::machine::{Event, Leased, Now, Outcome, Owner, Reply, Request, Reserve, ShardSet};
use kvdepot_core::{BlockHash, SlotId};

const SECOND: u64 = 1_000_000_000;
const FIRST: Owner = 7;
const SECOND_OWNER: Owner = 8;
const BLOCK: u64 = 4096;

fn reserve(lab: &mut Lab, owner: Owner) -> Outcome {
    let hashes = vec![BlockHash([1; 16])];
    let request = Request::Reserve { namespace: 0, id: None, hashes, how: Reserve::Block, runs_max: 9 };
    let token = lab.send_as(owner, request);
    let Some(Reply::Slots(mut outcomes)) = lab.reply(token) else { panic!("no slots") };
    outcomes.remove(0)
}

fn leased(outcome: Outcome) -> Leased {
    let Outcome::Leased(leased) = outcome else { panic!("not leased: {outcome:?}") };
    leased
}

fn commit(lab: &mut Lab, owner: Owner, lease: LeaseId) {
    let commit = Request::Commit { leases: vec![lease], shards: ShardSet::All, crc64: None };
    let token = lab.send_as(owner, commit);
    assert!(matches!(lab.reply(token), Some(Reply::Took(1))));
}

/// The slot in which readers find the block.
fn found(lab: &mut Lab) -> Option<SlotId> {
    let keys = vec![lab.key(1)];
    let Reply::Leased(nows) = lab.ask(Request::LeaseNow { keys }) else { panic!("no answer") };
    let Now::Leased(found) = &nows[0] else { return None };
    lab.ask(Request::Release { leases: vec![found.lease] });
    Some(found.slot)
}

#[test]
fn a_block_that_its_client_does_not_complete_is_dumped_by_another() {
    let mut lab = Lab::new(4, 0);
    lab.now = SECOND;
    let first = leased(reserve(&mut lab, FIRST));
    lab.now = 60 * SECOND;
    assert!(matches!(reserve(&mut lab, SECOND_OWNER), Outcome::Have), "a client has its time");
    lab.now = 62 * SECOND;
    let second = leased(reserve(&mut lab, SECOND_OWNER));
    assert_ne!(first.slot, second.slot, "the first one may still be copied to");
    commit(&mut lab, SECOND_OWNER, second.lease);
    assert_eq!(found(&mut lab), Some(second.slot));

    commit(&mut lab, FIRST, first.lease);
    assert_eq!(found(&mut lab), Some(second.slot));
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.held.pinned, gauges.pool_free_bytes), (0, 3 * BLOCK));
}

#[test]
fn a_late_dump_that_ends_before_the_one_in_its_place_leaves_it_alone() {
    let mut lab = Lab::new(4, 1);
    lab.now = SECOND;
    let first = leased(reserve(&mut lab, FIRST));
    lab.now = 62 * SECOND;
    let second = leased(reserve(&mut lab, SECOND_OWNER));
    commit(&mut lab, FIRST, first.lease);
    assert_eq!((found(&mut lab), lab.writes_and_removals().0), (None, Vec::new()));
    commit(&mut lab, SECOND_OWNER, second.lease);
    assert_eq!(found(&mut lab), Some(second.slot));
    assert_eq!(lab.writes_and_removals().0, [(0, second.slot)]);
}

#[test]
fn a_client_that_ends_in_a_late_dump_gives_its_slot_back() {
    let mut lab = Lab::new(4, 0);
    lab.now = SECOND;
    leased(reserve(&mut lab, FIRST));
    lab.now = 62 * SECOND;
    let second = leased(reserve(&mut lab, SECOND_OWNER));
    lab.feed(Event::OwnerEnded { owner: FIRST });
    commit(&mut lab, SECOND_OWNER, second.lease);
    assert_eq!((found(&mut lab), lab.machine.gauges().pool_free_bytes), (Some(second.slot), 3 * BLOCK));
}

#[test]
fn a_late_dump_counts_if_nobody_else_finds_room_for_it() {
    let mut lab = Lab::new(1, 0);
    lab.now = SECOND;
    let first = leased(reserve(&mut lab, FIRST));
    lab.now = 62 * SECOND;
    for _ in 0..2 {
        assert!(
            matches!(reserve(&mut lab, SECOND_OWNER), Outcome::Refused(_)),
            "the first one has the only slot"
        );
    }
    commit(&mut lab, FIRST, first.lease);
    assert_eq!(found(&mut lab), Some(first.slot));
    assert!(matches!(reserve(&mut lab, SECOND_OWNER), Outcome::Have));
    lab.machine.check().unwrap();
}
