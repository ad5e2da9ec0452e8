//! P1: when checksums are compared. By default at every read; with `dax_verify: first_read` once for each block that
//! this depot found or wrote.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvdepot_core::{BlockLayout, ErrorKind, Result};
use kvdepot_io::mapped::{Access, Medium, MemoryMedium};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::{DaxConfig, DaxTier, Fetched, ReadItem, Tier, Written};

const BLOCK: u64 = 256 << 10;

struct Lab {
    memory: MemoryMedium,
    tier: Arc<DaxTier>,
    bench: Bench,
}

impl Lab {
    /// A medium with eight blocks.
    fn new(first_read_only: bool) -> Self {
        let memory = MemoryMedium::new(vec![0; 16 << 20]);
        let lab = Self::open(memory, first_read_only);
        lab.bench.write_all(8);
        lab
    }

    fn open(memory: MemoryMedium, first_read_only: bool) -> Self {
        let config = DaxConfig {
            verify_first_read_only: first_read_only,
            lease_in_place: Some(true),
            ..DaxConfig::new("memory")
        };
        let medium: Arc<dyn Medium> = Arc::new(memory.clone());
        let tier = Arc::new(DaxTier::open_on(config, medium).unwrap());
        let of = spec("dax", BlockLayout::new(vec![vec![BLOCK]]).unwrap());
        let bench = Bench::with(Arc::clone(&tier) as _, of);
        Self { memory, tier, bench }
    }

    /// Opens the medium again.
    fn again(self, first_read_only: bool) -> Self {
        let Self { memory, tier, bench } = self;
        drop((bench, tier));
        Self::open(memory, first_read_only)
    }

    /// Flips a bit of a block: they lie one after another.
    fn damage(&self, n: u64) {
        let at = self.tier.geometry().data_at() + n * BLOCK + 77;
        self.memory.damage(at, |bytes| bytes[0] ^= 16);
    }

    fn kind(&self, n: u64) -> ErrorKind {
        self.bench.read(n).unwrap_err().kind()
    }

    /// Reads blocks in one batch.
    fn batch(&self, count: u64) -> Vec<Result<Fetched>> {
        let (send, ends) = channel();
        let reads = (0..count).map(|n| {
            let send = send.clone();
            let done = Box::new(move |outcome| drop(send.send((n, outcome))));
            ReadItem::new(self.bench.key(n), self.bench.slot(), done)
        });
        self.tier.read(reads.collect(), Bench::soon());
        drop(send);
        let mut ended: Vec<(u64, Result<Fetched>)> = ends.iter().collect();
        ended.sort_by_key(|(n, _)| *n);
        ended.into_iter().map(|(_, outcome)| outcome).collect()
    }
}

#[test]
fn every_read_compares_by_default() {
    let lab = Lab::new(false);
    assert!(lab.bench.read_is_right(0));
    lab.damage(0);
    assert_eq!(lab.kind(0), ErrorKind::Corrupt);
    let place = lab.bench.lease(1).unwrap().unwrap();
    lab.tier.end_leases(&[place]);
    lab.damage(1);
    assert_eq!(lab.bench.lease(1).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn the_first_read_compares_and_later_ones_trust_the_medium() {
    let lab = Lab::new(true);
    lab.damage(0);
    assert_eq!(lab.kind(0), ErrorKind::Corrupt, "what this depot wrote is compared once");
    let right = lab.bench.read(1).unwrap();
    lab.damage(1);
    assert!(lab.bench.read(1).unwrap() != right, "that is what the setting means");
    // A new depot has compared nothing.
    let lab = lab.again(true);
    assert_eq!(lab.kind(1), ErrorKind::Corrupt);
    // Nor has this one, of what is written anew. It lies at one of the three places that are free.
    assert!(lab.bench.read_is_right(2));
    lab.bench.tier.remove_and_wait(lab.bench.key(2)).unwrap();
    assert_eq!(lab.bench.write(2).unwrap(), Written::New);
    (0..3).for_each(|place| lab.damage(place));
    assert_eq!(lab.kind(2), ErrorKind::Corrupt);
}

#[test]
fn a_lease_and_a_read_compare_for_each_other() {
    let lab = Lab::new(true);
    let place = lab.bench.lease(0).unwrap().unwrap();
    lab.tier.end_leases(&[place]);
    lab.damage(0);
    assert!(lab.bench.read(0).is_ok());
    assert!(lab.bench.read_is_right(1));
    lab.damage(1);
    assert!(lab.bench.lease(1).unwrap().is_some());
    lab.damage(2);
    assert_eq!(lab.bench.lease(2).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// Neighbours are read by one call, whether they are trusted or not.
#[test]
fn a_block_beside_trusted_ones_is_compared() {
    let lab = Lab::new(true);
    for n in [0, 1, 3] {
        assert!(lab.bench.read_is_right(n));
    }
    lab.damage(2);
    let outcomes = lab.batch(4);
    assert_eq!(outcomes[2].as_ref().unwrap_err().kind(), ErrorKind::Corrupt);
    assert!([0, 1, 3].iter().all(|n| matches!(outcomes[*n], Ok(Fetched::Whole))), "{outcomes:?}");
    // All of these are trusted, and read whole.
    let outcomes = lab.batch(2);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(Fetched::Whole))), "{outcomes:?}");
    assert!(lab.bench.read_is_right(0) && lab.bench.read_is_right(3));
}

/// A disk below a file may return other bytes after an error.
#[test]
fn first_read_is_refused_for_a_file_on_a_disk() {
    for (directory, is_in_memory) in [(env!("CARGO_TARGET_TMPDIR"), None), ("/dev/shm", Some(true))] {
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        file.as_file().set_len(16 << 20).unwrap();
        let medium = kvdepot_io::mapped::open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap();
        // Somebody may build on tmpfs.
        let is_in_memory = is_in_memory.unwrap_or_else(|| medium.rests_in_memory());
        let config = |first_read_only| DaxConfig {
            verify_first_read_only: first_read_only,
            ..DaxConfig::new(file.path())
        };
        let opened = DaxTier::open_on(config(true), medium);
        assert_eq!(
            opened.as_ref().err().map(kvdepot_core::Error::kind),
            (!is_in_memory).then_some(ErrorKind::Config)
        );
        drop(opened);
        assert_eq!(DaxTier::inspect(&config(true)).is_ok(), is_in_memory);
        assert!(DaxTier::open(config(false)).is_ok());
    }
}
