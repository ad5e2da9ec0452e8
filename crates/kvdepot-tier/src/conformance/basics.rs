//! One block, one key, one namespace: the contract of each call.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::SlotBuf;

use super::tools::{Bench, Waiting, spec};
use crate::{Presence, Tier, Written};

pub(super) fn write_then_read(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    assert_eq!(bench.write(1).expect("a write"), Written::New);
    assert_eq!(bench.peek(1), Presence::Present);
    assert_eq!(bench.read(1).expect("a read"), bench.bytes(1));
    assert_eq!(bench.tier.keys(bench.spec.id(bench.epoch)), [bench.key(1)]);
    assert_eq!(bench.probe(vec![bench.key(1), bench.key(2)]).expect("a probe"), 1);
    assert_eq!(bench.tier.usage().blocks, 1);
    assert!(bench.tier.usage().bytes >= bench.spec.layout().block_bytes());
    bench.tier.touch(&[bench.key(1), bench.key(2)]);
    bench.drain();
    assert_eq!(bench.read(1).expect("a read after a touch"), bench.bytes(1));
}

pub(super) fn what_is_not_there_is_not_found(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    assert_ne!(bench.peek(1), Presence::Present);
    assert_eq!(bench.read(1).expect_err("nothing is there").kind(), ErrorKind::NotFound);
    assert_eq!(bench.probe(bench.keys(3)).expect("a probe"), 0);
    assert_eq!(bench.probe(Vec::new()).expect("an empty probe"), 0);
    // The result of a probe is known only for a limited time, which may have passed here.
    let end = Bench::soon();
    while bench.peek(0) != Presence::Absent {
        assert!(std::time::Instant::now() < end, "a peek knows what the probe found");
        assert_eq!(bench.probe(bench.keys(1)).expect("a probe"), 0);
    }
    bench.remove(1).expect("a removal");
    bench.drain();
    assert!(bench.tier.keys(bench.spec.id(bench.epoch)).is_empty());
    assert_eq!(bench.tier.usage().bytes, 0);
}

pub(super) fn removed_is_gone(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(2);
    bench.remove(0).expect("a removal");
    assert_ne!(bench.peek(0), Presence::Present);
    assert_eq!(bench.read(0).expect_err("it was removed").kind(), ErrorKind::NotFound);
    bench.drain();
    assert_eq!(bench.probe(bench.keys(2)).expect("a probe"), 0);
    assert_eq!(bench.read(1).expect("its neighbour"), bench.bytes(1));
    assert_eq!(bench.write(0).expect("a write after a removal"), Written::New);
    assert_eq!(bench.read(0).expect("a read"), bench.bytes(0));
}

pub(super) fn a_second_write_is_already_there(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(1);
    let used = bench.tier.usage();
    assert_eq!(bench.write(0).expect("a second write"), Written::AlreadyThere);
    assert_eq!(bench.tier.usage(), used);
}

pub(super) fn writers_of_one_key_agree(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    let answers: Vec<_> = (0..16).map(|_| bench.begin_write(7, bench.filled(7), Bench::soon())).collect();
    let written: Vec<_> = answers.iter().map(|answer| Bench::answer(answer).expect("a write")).collect();
    assert_eq!(
        written.iter().filter(|&&end| end == Written::New).count(),
        1,
        "one of them wrote: {written:?}"
    );
    assert_eq!(bench.tier.usage().blocks, 1);
    assert_eq!(bench.read(7).expect("a read"), bench.bytes(7));
}

pub(super) fn a_deadline_in_the_past_is_a_timeout(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    bench.write_all(1);
    let past = Instant::now();
    let written = Bench::answer(&bench.begin_write(1, bench.filled(1), past));
    assert_eq!(written.expect_err("too late").kind(), ErrorKind::Timeout);
    let read = Bench::answer(&bench.begin_read(0, bench.slot(), past));
    assert_eq!(read.expect_err("too late").kind(), ErrorKind::Timeout);
    assert_eq!(bench.write(1).expect("a failed write does not stick to its key"), Written::New);
    assert!(bench.read_is_right(0) && bench.read_is_right(1));
}

pub(super) fn a_small_slot_is_refused(tier: Arc<dyn Tier>) {
    let bench = Bench::new(tier);
    let written = Bench::answer(&bench.begin_write(0, SlotBuf::anonymous(4096), Bench::soon()));
    assert_eq!(written.expect_err("a slot of 4096 bytes for 10,000").kind(), ErrorKind::Config);
    bench.write_all(1);
    let read = Bench::answer(&bench.begin_read(0, SlotBuf::anonymous(4096), Bench::soon()));
    assert_eq!(read.expect_err("a slot of 4096 bytes for 10,000").kind(), ErrorKind::Config);
    assert!(bench.read_is_right(0), "what the caller did wrong costs no block");
}

/// The same block hash in two namespaces means two blocks (P8).
pub(super) fn namespaces_do_not_see_each_other(tier: Arc<dyn Tier>) {
    let layout = |bytes| BlockLayout::new(vec![vec![bytes]]).expect("a valid layout");
    let one = Bench::with(Arc::clone(&tier), spec("one", layout(5000)));
    let two = Bench::with(Arc::clone(&tier), spec("two", layout(5000)));
    let wide = Bench::with(tier, spec("one", layout(6000)));
    one.write_all(1);
    for other in [&two, &wide] {
        assert_ne!(other.key(0), one.key(0));
        assert_ne!(other.peek(0), Presence::Present);
        assert_eq!(other.probe(other.keys(1)).expect("a probe"), 0);
        assert_eq!(other.read(0).expect_err("another's block").kind(), ErrorKind::NotFound);
        assert!(other.tier.keys(other.spec.id(0)).is_empty());
    }
    let src = two.filled(99);
    assert_eq!(Bench::answer(&two.begin_write(0, src, Bench::soon())).expect("a write"), Written::New);
    assert_eq!(two.read(0).expect("a read"), two.bytes(99));
    assert_eq!(one.read(0).expect("a read"), one.bytes(0));
}

pub(super) fn an_epoch_hides_what_was(tier: Arc<dyn Tier>) {
    let mut bench = Bench::new(tier);
    bench.write_all(3);
    let epoch = bench.epoch;
    assert_eq!(bench.tier.open_and_wait(&bench.spec, epoch).expect("the current epoch"), epoch);
    assert!(bench.read_is_right(0), "the current epoch changes nothing");
    let next = bench.tier.advance_and_wait(&bench.spec, 0).expect("a new epoch");
    assert!(next > epoch);
    for n in 0..3 {
        assert_eq!(bench.peek(n), Presence::Absent);
        assert_eq!(bench.read(n).expect_err("an old epoch's block").kind(), ErrorKind::NotFound);
    }
    assert_eq!(bench.probe(bench.keys(3)).expect("a probe"), 0);
    assert!(bench.write(9).is_err(), "an old epoch's key is written no more");
    assert!(bench.tier.keys(bench.spec.id(epoch)).is_empty());
    bench.epoch = next;
    assert_eq!(bench.tier.open_and_wait(&bench.spec, 0).expect("it opens again"), next);
    bench.drain();
    assert_eq!(bench.tier.usage().bytes, 0, "an old epoch's space is given back");
    bench.write_all(1);
    assert!(bench.read_is_right(0));
}

pub(super) fn an_epoch_only_grows(tier: Arc<dyn Tier>) {
    let mut bench = Bench::new(tier);
    // An advance may skip epochs: a connection that was just made may have told a server about one.
    let first = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 4).expect("a later epoch");
    assert!(first >= bench.epoch + 4);
    let next = bench.tier.advance_and_wait(&bench.spec, first - 2).expect("the next epoch");
    assert!(next > first);
    assert_eq!(bench.tier.open_and_wait(&bench.spec, first).expect("a laggard learns"), next);
    bench.epoch = next;
    bench.write_all(1);
    let later = bench.tier.open_and_wait(&bench.spec, next + 2).expect("a tier that lags is told");
    assert_eq!(later, next + 2);
    assert!(bench.read(0).is_err(), "an old epoch's block");
    bench.epoch = later;
    bench.write_all(1);
    assert!(bench.read_is_right(0));
    let other = spec("opened later", bench.spec.layout().clone());
    assert_eq!(bench.tier.open_and_wait(&other, 3).expect("a new one"), 3);
    let other = Bench::with(Arc::clone(&bench.tier), other);
    other.write_all(1);
    assert!(other.read_is_right(0) && bench.read_is_right(0));
}

pub(super) fn closed_and_opened_again_all_is_there(tier: Arc<dyn Tier>) {
    let mut bench = Bench::new(tier);
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 2).expect("a new epoch");
    bench.write_all(10);
    bench.drain();
    let usage = bench.tier.usage();
    for _ in 0..2 {
        // Also for a namespace that is closed already.
        bench.tier.close_namespace(bench.spec.root());
    }
    assert_eq!(bench.tier.open_and_wait(&bench.spec, 0).expect("opened again"), bench.epoch);
    assert_eq!(bench.probe(bench.keys(11)).expect("a probe"), 10);
    assert!((0..10).all(|n| bench.read_is_right(n)));
    assert_eq!(bench.tier.usage(), usage, "what is stored stays, and counts");
    bench.tier.close_namespace(bench.spec.root());
    let next = bench.tier.advance_and_wait(&bench.spec, 0).expect("a reset of what is closed");
    assert!(next > bench.epoch);
    assert!(bench.read(0).is_err(), "an old epoch's block");
}
