//! Blocks that outlive a tier, and its cap.

use std::sync::Arc;

use kvdepot_core::ErrorKind;

use super::tools::{Bench, Waiting};
use crate::{Presence, Tier, Written};

pub(super) fn reopening_finds_all(make: &dyn Fn() -> Arc<dyn Tier>) {
    let bench = Bench::new(make());
    bench.write_all(20);
    bench.drain();
    drop(bench);
    let bench = Bench::new(make());
    assert_eq!(bench.probe(bench.keys(21)).expect("a probe"), 20);
    bench.drain();
    assert_eq!(bench.tier.keys(bench.spec.id(bench.epoch)).len(), 20);
    assert!((0..20).all(|n| bench.peek(n) == Presence::Present && bench.read_is_right(n)));
}

pub(super) fn an_epoch_survives(make: &dyn Fn() -> Arc<dyn Tier>) {
    let bench = Bench::new(make());
    let epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 3).expect("a new epoch");
    assert!(epoch >= bench.epoch + 3);
    bench.drain();
    drop(bench);
    let bench = Bench::new(make());
    assert_eq!(bench.epoch, epoch);
    bench.drain();
    assert!(bench.tier.keys(bench.spec.id(epoch)).is_empty());
    assert_eq!(bench.tier.usage().bytes, 0);
}

/// After an orderly end, removed blocks stay removed and their replacements are kept.
pub(super) fn a_removal_survives(make: &dyn Fn() -> Arc<dyn Tier>) {
    let bench = Bench::new(make());
    for n in 30..33 {
        bench.write(n).expect("a write");
    }
    bench.remove(30).expect("a removal");
    bench.remove(31).expect("a removal");
    let again = bench.begin_write(31, bench.filled(99), Bench::soon());
    assert_eq!(Bench::answer(&again).expect("a write"), Written::New);
    bench.drain();
    drop(bench);
    let bench = Bench::new(make());
    assert_eq!(bench.read(30).expect_err("it was removed").kind(), ErrorKind::NotFound);
    assert_eq!(bench.read(31).expect("a block"), bench.bytes(99), "what was written last");
    assert!(bench.read_is_right(32));
}

/// Two tiers on one place, as on two nodes: neither's advance is lost, and the one that lags learns of it.
pub(super) fn a_laggard_follows(make: &dyn Fn() -> Arc<dyn Tier>) {
    let (ahead, mut behind) = (Bench::new(make()), Bench::new(make()));
    let first = ahead.epoch;
    behind.write_all(1);
    // Advances may skip epochs, but never repeat one.
    let once = ahead.tier.advance_and_wait(&ahead.spec, first + 1).expect("a reset");
    let twice = ahead.tier.advance_and_wait(&ahead.spec, first + 1).expect("another one");
    assert!(first < once && once < twice);
    assert_eq!(behind.tier.open_and_wait(&behind.spec, first).expect("a look"), twice);
    assert!(behind.read(0).is_err(), "an old epoch's block");
    let thrice = behind.tier.advance_and_wait(&behind.spec, first + 1).expect("a reset");
    assert!(thrice > twice);
    behind.epoch = thrice;
    behind.write_all(1);
    assert!(behind.read_is_right(0));
    assert_eq!(ahead.tier.open_and_wait(&ahead.spec, twice).expect("a look"), thrice);
}

/// The cap holds at every moment, however many writes run at once (P5).
pub(super) fn the_cap_holds(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    let cap = 10 * 16_384 + 1000;
    let bench = Bench::new(make(cap));
    let end = Bench::soon_for(100);
    let writes: Vec<_> = (0..100).map(|n| bench.begin_write(n, bench.filled(n), end)).collect();
    for write in writes {
        let written = Bench::answer(&write);
        assert!(bench.tier.usage().bytes <= cap, "{:?}", bench.tier.usage());
        written.expect("room is made for every block");
    }
    bench.drain();
    let usage = bench.tier.usage();
    assert!(usage.bytes <= cap && usage.bytes_max == cap && usage.blocks > 0, "{usage:?}");
    let there = (0..100).filter(|&n| bench.read_is_right(n)).count();
    assert_eq!(there as u64, usage.blocks);
}

pub(super) fn the_coldest_goes_first(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    let bench = Bench::new(make(4 * 16_384));
    bench.write_all(4);
    let held: Vec<u64> = (0..4).filter(|&n| bench.peek(n) == Presence::Present).collect();
    assert_eq!(held, [0, 1, 2, 3], "a cap of four files holds four blocks of 10,000 bytes");
    bench.tier.touch(&[bench.key(0)]);
    assert!(bench.read_is_right(2));
    let filled = (4..12).position(|n| {
        bench.write(n).expect("room is made");
        bench.peek(1) != Presence::Present
    });
    assert!(filled.is_some_and(|more| more < 4), "the block that was not used goes soon: {filled:?}");
    assert!(bench.read_is_right(0) && bench.read_is_right(2), "those that were used stay");
}

/// The configuration is wrong, not the tier, which goes on for other namespaces.
pub(super) fn a_block_larger_than_the_cap_is_refused_as_configuration(make: &dyn Fn(u64) -> Arc<dyn Tier>) {
    let bench = Bench::new(make(4096));
    assert_eq!(bench.write(0).expect_err("10,000 bytes into 4096").kind(), ErrorKind::Config);
    assert_eq!(bench.tier.usage().bytes, 0);
}
