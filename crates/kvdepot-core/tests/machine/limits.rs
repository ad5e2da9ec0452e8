//! What one client may have, and what is left when it wants more (P4, P7).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{Lab, claim};
use kvdepot_core::limits::{CLAIMS_PER_CONNECTION_MAX, LEASES_PER_OWNER_MAX};
use kvdepot_core::machine::{
    Ask, Command, Event, Location, Now, Outcome, Owner, REQUEST_BLOCKS, Reply, Request, Reserve, ShardSet,
};
use kvdepot_core::{BlockHash, ErrorKind};

const CLIENT: Owner = 7;
const OTHER: Owner = 8;
/// Leases asked for at a time.
const BATCH: usize = REQUEST_BLOCKS;

fn reserve(lab: &mut Lab, owner: Owner, hash: u8) -> Outcome {
    let hashes = vec![BlockHash([hash; 16])];
    let request = Request::Reserve { namespace: 0, id: None, hashes, how: Reserve::Block, runs_max: 9 };
    let token = lab.send_as(owner, request);
    let Some(Reply::Slots(mut outcomes)) = lab.reply(token) else { panic!("no slots") };
    outcomes.remove(0)
}

#[test]
fn a_slot_whose_lease_is_refused_is_given_back() {
    let mut lab = Lab::new(4, 0);
    lab.put(1);
    let free = lab.machine.gauges().pool_free_bytes;
    let keys = vec![lab.key(1); BATCH];
    let mut last = None;
    for _ in 0..LEASES_PER_OWNER_MAX / BATCH {
        let token = lab.send_as(CLIENT, Request::LeaseNow { keys: keys.clone() });
        let Some(Reply::Leased(leased)) = lab.reply(token) else { panic!("no leases") };
        assert!(leased.iter().all(|now| matches!(now, Now::Leased(_))));
        last = leased.into_iter().last();
    }
    let outcome = reserve(&mut lab, CLIENT, 2);
    assert!(matches!(outcome, Outcome::Refused(ErrorKind::Busy)), "{outcome:?}");
    assert_eq!(lab.machine.gauges().pool_free_bytes, free, "no slot without an owner");
    assert!(
        matches!(reserve(&mut lab, OTHER, 2), Outcome::Leased(_)),
        "nobody else is told that it is there"
    );
    let Some(Now::Leased(leased)) = last else { panic!("no lease") };
    lab.send_as(CLIENT, Request::Release { leases: vec![leased.lease] });
    let outcome = reserve(&mut lab, CLIENT, 3);
    let Outcome::Leased(leased) = outcome else { panic!("there is room for a lease: {outcome:?}") };
    lab.send_as(CLIENT, Request::Commit { leases: vec![leased.lease], shards: ShardSet::All, crc64: None });
}

#[test]
fn claims_are_counted_for_each_client() {
    let mut lab = Lab::new(4, 0);
    for _ in 0..CLAIMS_PER_CONNECTION_MAX {
        lab.send_as(CLIENT, claim(&[0], vec![BlockHash([1; 16])]));
    }
    lab.replies.clear();
    let refused = lab.send_as(CLIENT, claim(&[0], vec![BlockHash([1; 16])]));
    let at = lab.replies.iter().position(|(token, _)| *token == refused).unwrap();
    let error = lab.replies.swap_remove(at).1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let token = lab.send_as(OTHER, claim(&[0], vec![BlockHash([1; 16])]));
    assert!(matches!(lab.reply(token), Some(Reply::Claim(_))), "others are not refused for it");
}

/// What a tier answers afterwards is fetched for nobody.
#[test]
fn a_claim_that_is_settled_while_a_tier_is_asked_stays_settled() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Unknown;
    let opened = lab.send_as(CLIENT, claim(&[0], vec![BlockHash([1; 16]), BlockHash([2; 16])]));
    let [Command::Probe { ask, .. }] = lab.take()[..] else { panic!("the tier is asked") };
    let Ask::Claim(id, _) = ask else { panic!("for the claim") };
    assert!(lab.reply(opened).is_none(), "not known yet");
    let token = lab.send_as(CLIENT, Request::ClaimPoll { claim: id, settle: true });
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no answer") };
    assert_eq!((progress.settled, progress.units), (true, 0));
    lab.feed(Event::Probed { ask, outcome: Ok(2) });
    assert!(lab.take().is_empty(), "nothing is fetched");
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.claims_queued, gauges.held.fetching), (0, 0));
    let token = lab.send_as(CLIENT, Request::ClaimPoll { claim: id, settle: false });
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no answer") };
    assert_eq!((progress.settled, progress.units), (true, 0));
}
