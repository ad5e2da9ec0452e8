//! Leases of blocks in a tier's memory that hang in the tier: nobody waits for them long, and a lease that comes late is
//! given back (P2, P4).

use super::*;
use kvdepot_core::machine::{Reserve, ShardSet};

const SECOND: u64 = 1_000_000_000;
/// When the leases of these tests should have come.
const DEADLINE: u64 = 2 * SECOND;
/// When they have hung.
const OVERDUE: u64 = DEADLINE + SECOND;

fn load_until(deadline: u64, hash: u8) -> Request {
    let hashes = vec![BlockHash([hash; 16])];
    let (last, runs_max) = (true, 99);
    Request::Load { namespace: 0, id: None, hashes, fetch_deadline: deadline, last, runs_max, in_place: true }
}

fn pass_to(lab: &mut Lab, now: u64) {
    lab.now = now;
    lab.feed(Event::Tick);
    lab.machine.check().unwrap();
}

/// A load whose lease hangs. Returns its slot.
fn hang(lab: &mut Lab, hash: u8) -> SlotId {
    let deadline = lab.now + DEADLINE;
    let token = lab.send(load_until(deadline, hash));
    let (leases, _) = commanded(lab);
    let now = lab.now + OVERDUE;
    pass_to(lab, now);
    assert!(leased(lab.reply(token).unwrap()).is_empty(), "a miss");
    leases[0].1
}

#[test]
fn a_lease_that_hangs_is_a_miss_and_given_back_when_it_comes() {
    for comes in [true, false] {
        let mut lab = lab(4, 1);
        let slot = hang(&mut lab, 1);
        assert_eq!(lab.machine.gauges().reads_hung, 1);
        // Others do not wait for it: the tier is asked again.
        let token = lab.send(load(&[1], true));
        let (leases, _) = commanded(&mut lab);
        assert_eq!(leases.len(), 1);
        assert_ne!(leases[0].1, slot);
        grant(&mut lab, leases);
        let found = leased(lab.reply(token).unwrap());
        assert_eq!(found[0].runs[..], runs(1)[..]);
        let outcome = if comes { Ok(Some(place(9))) } else { Ok(None) };
        lab.feed(Event::LeaseEnded { tier: 0, slot, outcome });
        lab.machine.check().unwrap();
        assert_eq!(ended(&mut lab), if comes { vec![place(9)] } else { vec![] });
        assert_eq!((lab.machine.gauges().reads_hung, lab.machine.gauges().in_place.blocks), (0, 1));
        let token = lab.send(load(&[1], true));
        assert!(commanded(&mut lab).0.is_empty(), "the lease that took its place is found");
        release(&mut lab, &found);
        let again = leased(lab.reply(token).unwrap());
        release(&mut lab, &again);
    }
}

#[test]
fn a_block_whose_lease_is_late_is_stored_by_a_dump() {
    let mut lab = lab(4, 1);
    let token = lab.send(load_until(DEADLINE, 1));
    let (leases, _) = commanded(&mut lab);
    pass_to(&mut lab, DEADLINE);
    let (hashes, how) = (vec![BlockHash([1; 16])], Reserve::Block);
    let reserved = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
    let new: Vec<_> = leased(reserved).into_iter().map(|leased| leased.lease).collect();
    assert_eq!(new.len(), 1, "the pool takes it");
    lab.ask(Request::Commit { leases: new, shards: ShardSet::All, crc64: None });
    assert!(lab.reply(token).is_some(), "who waited for the lease is told");
    lab.take();
    grant(&mut lab, leases);
    assert!(ended(&mut lab).contains(&place(1)));
    assert_eq!(lab.machine.gauges().pool_blocks, 1);
}

#[test]
fn hung_leases_pin_none_of_the_pool() {
    let mut lab = lab(4, 1);
    let hung: Vec<SlotId> = (1..5).map(|hash| hang(&mut lab, hash)).collect();
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.pool_free_bytes, gauges.reads_hung), (4 * BLOCK, 4));
    for slot in hung {
        lab.feed(Event::LeaseEnded { tier: 0, slot, outcome: Err(Error::new(ErrorKind::Timeout, "late")) });
    }
    lab.machine.check().unwrap();
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.in_place.blocks, gauges.in_place.coming_bytes, gauges.reads_hung), (0, 0, 0));
}
