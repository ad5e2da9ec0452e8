//! P1, P8: two depots on one medium that no lock kept apart; and epochs whose newest copy is lost.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind};
use kvdepot_io::mapped::{HookMedium, Medium, MediumCall, MemoryMedium};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::dax::layout::{EPOCH_BYTES, Geometry, HEADER_BYTES, Header, PAGE_BYTES};
use kvdepot_tier::{DaxConfig, DaxTier, Presence, Tier, Written};

/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);
const MEDIUM_BYTES: usize = 4 << 20;

fn open_on(medium: Arc<dyn Medium>) -> Arc<DaxTier> {
    let config =
        DaxConfig { restore_workers: 1, put_workers: 1, open_wait: HANG, ..DaxConfig::new("memory") };
    Arc::new(DaxTier::open_on(config, medium).unwrap())
}

fn open(memory: &MemoryMedium) -> Arc<DaxTier> {
    open_on(Arc::new(memory.clone()))
}

fn is_taken(error: &Error) -> bool {
    error.kind() == ErrorKind::Io && error.to_string().contains("another depot")
}

#[test]
fn who_opens_a_medium_last_has_it() {
    let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
    let first = Bench::new(open(&memory));
    first.write_all(4);
    let mut second = Bench::new(open(&memory));
    assert!((0..4).all(|n| second.read_is_right(n)));
    second.epoch = second.tier.advance_and_wait(&second.spec, 0).unwrap();
    second.write(9).unwrap();
    // What the second depot has reset is not served by the first (P1); its first call finds out.
    assert!(first.read(0).is_err());
    assert_eq!(first.read(1).unwrap_err().kind(), ErrorKind::NotFound, "a miss from then on");
    assert_eq!(first.peek(1), Presence::Absent);
    assert!(first.write(20).is_err());
    assert!(is_taken(&first.remove(1).unwrap_err()));
    assert!(is_taken(&first.tier.advance_and_wait(&first.spec, 0).unwrap_err()));
    assert!(second.read_is_right(9));
    let epoch = second.epoch;
    drop((first, second));
    let third = Bench::new(open(&memory));
    assert_eq!(third.epoch, epoch);
    assert!(third.read_is_right(9) && third.read(0).is_err() && third.read(20).is_err());
}

/// Its writes would go where the new owner has put its blocks, and whose clients may read them there without a checksum.
#[test]
fn an_earlier_owner_writes_over_nothing() {
    let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
    let first = Bench::new(open(&memory));
    let second = Bench::new(open(&memory));
    second.write_all(4);
    let before = memory.content();
    // It has not looked at the medium since.
    assert!(is_taken(&first.write(20).unwrap_err()));
    assert!(memory.content() == before, "it has written");
    assert!((0..4).all(|n| second.read_is_right(n)));
}

/// Each call that changes something finds out by itself, before its work is acknowledged.
#[test]
fn nothing_is_acknowledged_on_a_medium_of_another_owner() {
    type Act = fn(&Bench) -> Error;
    let acts: [(&str, Act); 3] = [
        ("write", |bench| bench.write(5).unwrap_err()),
        ("remove", |bench| bench.remove(0).unwrap_err()),
        // Fails at the second copy, after the first has been stored.
        ("reset", |bench| bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err()),
    ];
    for (what, act) in acts {
        let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
        let taken: Arc<Mutex<Option<Arc<DaxTier>>>> = Arc::default();
        // The last flush of each of these calls: another depot opens the medium while it runs.
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let hook = {
            let (memory, taken, left) = (memory.clone(), Arc::clone(&taken), Arc::clone(&left));
            move |call| {
                if call == MediumCall::Persist && left.fetch_sub(1, Ordering::SeqCst) == 1 {
                    *taken.lock().unwrap() = Some(open(&memory));
                }
                Ok(())
            }
        };
        let bench = Bench::new(open_on(Arc::new(HookMedium::new(Arc::new(memory.clone()), Box::new(hook)))));
        bench.write_all(1);
        left.store(if what == "remove" { 1 } else { 2 }, Ordering::SeqCst);
        let error = act(&bench);
        assert!(is_taken(&error), "{what}: {error}");
        assert!(taken.lock().unwrap().is_some(), "{what}");
    }
}

fn line(geometry: &Geometry, copy: u64) -> u64 {
    geometry.epochs_at() + copy * EPOCH_BYTES as u64
}

/// Damage to a copy.
type Loss = fn(&mut [u8]);
const LOSSES: [(&str, Loss); 2] =
    [("zero", |line| line[..EPOCH_BYTES].fill(0)), ("damage", |line| line[30] ^= 1)];

/// A newest copy that reads as zero, as a lost page does, must not bring back the previous epoch.
#[test]
fn a_lost_copy_of_an_epoch_brings_nothing_back() {
    for (what, lose) in LOSSES {
        for resets in 0..3 {
            let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
            let tier = open(&memory);
            let geometry = tier.geometry();
            let mut bench = Bench::new(tier);
            bench.write_all(3);
            let old = memory.content();
            for _ in 0..resets {
                bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
            }
            let epoch = bench.epoch;
            drop(bench);
            // The earlier headers are still there, as when nobody got to clear them.
            let headers = geometry.headers_at() as usize;
            let bytes = geometry.units as usize * HEADER_BYTES;
            memory.damage(headers as u64, |now| now[..bytes].copy_from_slice(&old[headers..headers + bytes]));
            for copy in 0..2 {
                let memory = MemoryMedium::new(memory.content());
                memory.damage(line(&geometry, copy), lose);
                let tier = open(&memory);
                assert_eq!(tier.usage().blocks, 0, "{what} of copy {copy} after {resets} resets (P1)");
                drop(tier);
                // Once more: the first opening cleared what recorded the old numbers.
                let bench = Bench::new(open(&memory));
                assert!(bench.epoch > epoch, "{what} of copy {copy} after {resets} resets: {}", bench.epoch);
                assert!((0..3).all(|n| bench.read(n).is_err()));
            }
        }
    }
}

/// The number of an epoch never goes back to one that may have been used, including one that was skipped to.
#[test]
fn an_epoch_that_was_skipped_to_is_not_used_again() {
    for (what, lose) in LOSSES {
        for lost in [0..1, 1..2, 0..2] {
            let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
            let tier = open(&memory);
            let geometry = tier.geometry();
            let mut bench = Bench::new(tier);
            bench.epoch = bench.tier.advance_and_wait(&bench.spec, 100).unwrap();
            assert_eq!(bench.epoch, 100);
            bench.write_all(2);
            drop(bench);
            lost.clone().for_each(|copy| memory.damage(line(&geometry, copy), lose));
            drop(open(&memory));
            let bench = Bench::new(open(&memory));
            assert!(bench.epoch > 100, "{what} of {lost:?}: {} (P1)", bench.epoch);
            assert!(bench.read(0).is_err());
            assert_eq!(bench.write(0).unwrap(), Written::New);
            let epoch = bench.epoch;
            drop(bench);
            let bench = Bench::new(open(&memory));
            assert_eq!(bench.epoch, epoch, "it is stored now");
            assert!(bench.read_is_right(0));
        }
    }
}

/// No writer of ours creates such a block, but one that cannot be right must not be offered forever.
#[test]
fn a_block_of_another_length_is_put_aside() {
    let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
    let tier = open(&memory);
    let geometry = tier.geometry();
    let bench = Bench::new(tier);
    bench.write_all(2);
    let key = bench.key(0);
    drop(bench);
    let header = Header { key, generation: 50, checksum: 0, bytes: 5000, epoch: 0 };
    let wrong = header.encode(0, &geometry);
    memory.damage(geometry.header_at(0), |line| line[..HEADER_BYTES].copy_from_slice(&wrong));
    let bench = Bench::new(open(&memory));
    assert_eq!(bench.peek(0), Presence::Present);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(bench.peek(0), Presence::Absent);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    bench.drain();
    drop(bench);
    let bench = Bench::new(open(&memory));
    assert!(bench.peek(0) == Presence::Absent && bench.read_is_right(1));
}

/// Following the advice of the error messages gets a medium formatted that is full to its end.
#[test]
fn a_medium_is_given_up_by_hand() {
    let memory = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
    let bench = Bench::new(open(&memory));
    bench.write_all(500);
    drop(bench);
    memory.damage(8, |bytes| bytes[0] = 9);
    let config = || DaxConfig::new("memory");
    let opened = |memory: &MemoryMedium| DaxTier::open_on(config(), Arc::new(memory.clone()));
    let error = opened(&memory).unwrap_err();
    assert!(error.to_string().contains("first and last MiB"), "{error}");
    // Zeros at its beginning alone may be an accident: the end holds data.
    for bytes in [PAGE_BYTES as usize, 1 << 20] {
        memory.damage(0, |medium| medium[..bytes].fill(0));
        let before = memory.content();
        assert_eq!(opened(&memory).unwrap_err().kind(), ErrorKind::Config, "{bytes}");
        assert!(memory.content() == before, "{bytes}: nothing was written");
    }
    memory.damage((MEDIUM_BYTES - (1 << 20)) as u64, |end| end.fill(0));
    assert_eq!(opened(&memory).unwrap().usage().blocks, 0);
}
