//! P1: a medium whose table of namespaces is full forgets those without blocks, at any crash without a block or an epoch
//! coming back.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::HashSet;
use std::sync::Arc;

use kvdepot_core::{BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_io::mapped::{MemoryMedium, Recorded};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::{DaxConfig, DaxTier, Tier};

const BYTES: usize = 1 << 20;
/// Places of a medium of this size.
const PLACES: u64 = 64;
const WITH_BLOCK: u64 = 7;
const WAS_RESET: u64 = 9;

fn open(medium: &MemoryMedium) -> Arc<DaxTier> {
    let config = DaxConfig { put_workers: 1, open_wait: crate::dax_media::HANG, ..DaxConfig::new("memory") };
    Arc::new(DaxTier::open_on(config, Arc::new(medium.clone())).unwrap())
}

fn namespace(n: u64) -> NamespaceSpec {
    spec(&format!("model {n}"), BlockLayout::new(vec![vec![4096]]).unwrap())
}

fn bench(tier: &Arc<DaxTier>, n: u64) -> Bench {
    Bench::with(Arc::clone(tier) as _, namespace(n))
}

/// A medium with a full table. One namespace has a block, and one was reset often and has a block of the epoch before.
fn full() -> MemoryMedium {
    let medium = MemoryMedium::new(vec![0; BYTES]);
    let tier = open(&medium);
    (0..PLACES).for_each(|n| assert_eq!(bench(&tier, n).epoch, 0));
    assert!(tier.open_and_wait(&namespace(PLACES), 0).is_err(), "all of them are open");
    bench(&tier, WITH_BLOCK).write_all(1);
    bench(&tier, WAS_RESET).write_all(1);
    assert_eq!(tier.advance_and_wait(&namespace(WAS_RESET), 5).unwrap(), 5);
    assert!(tier.drain(Bench::soon()));
    drop(tier);
    MemoryMedium::new(medium.content())
}

#[test]
fn new_namespaces_take_the_places_of_those_without_blocks() {
    let medium = full();
    let tier = open(&medium);
    assert!(bench(&tier, WITH_BLOCK).read_is_right(0));
    // One more place holds the epoch with which forgotten namespaces begin.
    let new: Vec<u64> = (100..100 + PLACES - 2).collect();
    let opened: Vec<u32> = new.iter().map(|n| bench(&tier, *n).epoch).collect();
    let error = tier.open_and_wait(&namespace(200), 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    let last = bench(&tier, *new.last().unwrap());
    last.write_all(1);
    drop((last, tier));
    let tier = open(&medium);
    let again = bench(&tier, WAS_RESET);
    assert!(again.epoch > 5, "epoch {} came back from before 5", again.epoch);
    assert!(again.read(0).is_err());
    again.write(1).unwrap();
    let epoch = again.epoch;
    drop((again, tier));
    let tier = open(&medium);
    assert!(bench(&tier, WITH_BLOCK).read_is_right(0));
    assert!(bench(&tier, *new.last().unwrap()).read_is_right(0));
    let again = bench(&tier, WAS_RESET);
    assert!(again.epoch == epoch && again.read_is_right(1));
    for (n, epoch) in new.iter().zip(opened).take(20) {
        assert!(bench(&tier, *n).epoch >= epoch, "namespace {n}");
    }
}

/// However many namespaces come and go, those that are closed and have no blocks take no place.
#[test]
fn closed_namespaces_make_room() {
    let medium = MemoryMedium::new(vec![0; BYTES]);
    let tier = open(&medium);
    let has_block = |n: u64| n.is_multiple_of(50);
    let mut epochs = Vec::new();
    for n in 0..4 * PLACES {
        let bench = bench(&tier, n);
        if has_block(n) {
            bench.write_all(1);
            bench.drain();
        }
        epochs.push(bench.epoch);
        tier.close_namespace(bench.spec.root());
        assert!(bench.read(0).is_err() && bench.write(0).is_err(), "namespace {n} is closed");
    }
    let check = |tier: &Arc<DaxTier>| {
        for (n, epoch) in (0..).zip(&epochs) {
            let bench = bench(tier, n);
            assert!(bench.epoch >= *epoch, "namespace {n}: epoch {} after {epoch}", bench.epoch);
            assert_eq!(bench.read_is_right(0), has_block(n), "namespace {n}");
            assert!(!has_block(n) || bench.epoch == *epoch);
            tier.close_namespace(bench.spec.root());
        }
    };
    check(&tier);
    drop(tier);
    check(&open(&medium));
}

#[test]
fn a_crash_at_any_write_brings_nothing_back() {
    let medium = full();
    let before = medium.content();
    let begun = medium.recorded();
    // What was opened, in which epoch, and how many records there were then.
    let mut opened = vec![(WITH_BLOCK, 0, begun)];
    let tier = open(&medium);
    for n in (100..105).chain([WAS_RESET]).chain(105..110) {
        opened.push((n, bench(&tier, n).epoch, medium.recorded()));
    }
    drop(tier);
    let log = medium.log();
    let image = |at: usize, lost: &HashSet<usize>, torn: Option<usize>| {
        let mut bytes = before.clone();
        for (number, record) in log[..at].iter().enumerate() {
            let Recorded::Write { at, bytes: written } = record else { continue };
            let length = if torn == Some(number) { 40.min(written.len()) } else { written.len() };
            if !lost.contains(&number) {
                bytes[*at as usize..*at as usize + length].copy_from_slice(&written[..length]);
            }
        }
        bytes
    };
    let check = |at: usize, bytes: Vec<u8>, what: &str| {
        let tier = open(&MemoryMedium::new(bytes));
        for (n, epoch, _) in opened.iter().filter(|(_, _, ended)| *ended <= at) {
            let bench = bench(&tier, *n);
            assert!(
                bench.epoch >= *epoch,
                "{what}: namespace {n} is in epoch {}, was in {epoch}",
                bench.epoch
            );
        }
        assert!(bench(&tier, WITH_BLOCK).read_is_right(0), "{what}: a block is gone");
        let reset = bench(&tier, WAS_RESET);
        assert!(reset.epoch >= 5 && reset.read(0).is_err(), "{what}: epoch {}", reset.epoch);
        assert!((300..305).all(|n| tier.open_and_wait(&namespace(n), 0).is_ok()), "{what}: it goes on");
    };
    let none = HashSet::new();
    for at in begun..=log.len() {
        check(at, image(at, &none, None), &format!("killed after {at}"));
        let flushed = log[..at].iter().rposition(|one| *one == Recorded::Persist).map_or(0, |last| last + 1);
        for one in flushed..at {
            check(
                at,
                image(at, &HashSet::from([one]), None),
                &format!("power lost after {at}, without {one}"),
            );
            check(at, image(at, &none, Some(one)), &format!("power lost after {at}, {one} torn"));
        }
    }
    assert!(log.len() - begun > 50, "{}", log.len() - begun);
}
