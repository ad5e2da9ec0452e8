//! Blocks leased where they lie.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use kvdepot_core::ErrorKind;

use super::tools::{Bench, Waiting};
use crate::{LeaseItem, Tier};

/// Blocks that are several times as large as the tier.
const MANY: u64 = 1500;

pub(super) fn a_lease_shows_the_block(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    let lent = bench.lent();
    bench.write_all(20);
    let (send, receive) = channel();
    // One of them is not there.
    let leases = (0..21).map(|n| {
        let send = send.clone();
        LeaseItem { key: bench.key(n), done: Box::new(move |place| drop(send.send((n, place)))) }
    });
    bench.tier.lease(leases.collect(), Bench::soon());
    for _ in 0..21 {
        let (n, place) = Bench::answer(&receive);
        match place.expect("a lease ends without an error") {
            Some(place) => bench.check_place(&lent, n, place),
            None => assert_eq!(n, 20),
        }
    }
}

pub(super) fn what_cannot_be_leased_ends_like_a_read(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(1);
    assert_eq!(bench.lease(1).expect("a miss is no error"), None);
    bench.tier.lease(Vec::new(), Bench::soon());
    let (send, receive) = channel();
    let done = Box::new(move |outcome| drop(send.send(outcome)));
    bench.tier.lease(vec![LeaseItem { key: bench.key(0), done }], Instant::now());
    let late = Bench::answer(&receive).expect_err("its deadline has passed");
    assert_eq!(late.kind(), ErrorKind::Timeout);
    // Places that hold no lease are ignored.
    bench.tier.end_leases(&[0, 1, u64::MAX]);
    bench.remove(0).expect("it is removed");
    assert_eq!(bench.lease(0).expect("a miss is no error"), None);
}

pub(super) fn a_leased_block_stays_as_it_is(tier: Arc<dyn Tier>) {
    let mut bench = Bench::new(tier);
    let lent = bench.lent();
    bench.write_all(3);
    let places: Vec<u64> =
        (0..3).map(|n| bench.lease(n).expect("it is leased").expect("it is there")).collect();
    let check =
        |bench: &Bench| (0..3).zip(&places).for_each(|(n, place)| bench.check_place(&lent, n, *place));
    for n in 3..MANY {
        bench.write(n).expect("the rest of the tier makes room");
    }
    check(&bench);
    bench.remove(0).expect("a leased block can be removed");
    assert_eq!(bench.lease(0).expect("a miss is no error"), None, "nobody finds it any more");
    bench.write(0).expect("it can be written again");
    (3..MANY).for_each(|n| drop(bench.write(n + MANY)));
    check(&bench);
    let before = bench.epoch;
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).expect("a reset succeeds");
    (3..MANY).for_each(|n| drop(bench.write(n)));
    let now = std::mem::replace(&mut bench.epoch, before);
    check(&bench);
    bench.epoch = now;
    bench.tier.end_leases(&places);
}

pub(super) fn a_place_is_free_after_its_last_lease(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(1);
    let first = bench.lease(0).expect("it is leased").expect("it is there");
    assert_eq!(bench.lease(0).expect("it is leased again"), Some(first), "one place, two leases");
    bench.remove(0).expect("a leased block can be removed");
    bench.drain();
    let used = bench.tier.usage().bytes;
    assert!(used > 0);
    bench.tier.end_leases(&[first]);
    assert_eq!(bench.tier.usage().bytes, used, "one lease is left");
    bench.tier.end_leases(&[first]);
    assert_eq!(bench.tier.usage().bytes, 0);
    for n in 1..MANY {
        bench.write(n).expect("its place is used again");
    }
}
