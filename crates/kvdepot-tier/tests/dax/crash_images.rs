//! P1, P5: after a crash at any write, a DAX medium holds everything that was acknowledged and nothing else.
//!
//! A medium in memory records every write and every flush. Two kinds of crash are tried after each of them: the process
//! dies, which leaves what was written; or the machine loses power, which takes any of the writes since the last flush,
//! or the end of one, at the granularity of a processor's store.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_io::mapped::{MemoryMedium, Recorded};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{DaxConfig, DaxTier, Tier, Written};

/// Space for `FIT` blocks of three units.
const MEDIUM_BYTES: usize = 160 << 10;
const FIT: usize = 12;
const BLOCKS: u64 = 18;
/// Block `n` in version `v` has the bytes of block `n + v * VERSION`.
const VERSION: u64 = 1000;
/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

fn open(medium: &MemoryMedium) -> Arc<DaxTier> {
    let config =
        DaxConfig { restore_workers: 1, put_workers: 1, open_wait: HANG, ..DaxConfig::new("memory") };
    Arc::new(DaxTier::open_on(config, Arc::new(medium.clone())).unwrap())
}

/// What happened, and how many records there were before and after.
#[derive(Clone, Copy, Debug)]
struct Done {
    what: What,
    begun: usize,
    ended: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Write { epoch: u32, n: u64, version: u64 },
    Remove { epoch: u32, n: u64 },
    Reset { epoch: u32 },
}

struct Workload {
    medium: MemoryMedium,
    done: Vec<Done>,
    versions: HashMap<u64, u64>,
}

impl Workload {
    fn note(&mut self, begun: usize, what: What) {
        self.done.push(Done { what, begun, ended: self.medium.recorded() });
    }

    fn write(&mut self, bench: &Bench, n: u64) {
        let begun = self.medium.recorded();
        let version = *self.versions.entry(n).and_modify(|version| *version += 1).or_insert(0);
        let src = bench.filled(n + version * VERSION);
        let written = Bench::answer(&bench.begin_write(n, src, Bench::soon())).unwrap();
        assert_eq!(written, Written::New);
        self.note(begun, What::Write { epoch: bench.epoch, n, version });
    }

    fn remove(&mut self, bench: &Bench, n: u64) {
        let begun = self.medium.recorded();
        bench.remove(n).unwrap();
        self.note(begun, What::Remove { epoch: bench.epoch, n });
    }

    fn reset(&mut self, bench: &mut Bench) {
        let begun = self.medium.recorded();
        bench.epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 1).unwrap();
        self.note(begun, What::Reset { epoch: bench.epoch });
    }

    fn run() -> Self {
        let medium = MemoryMedium::new(vec![0; MEDIUM_BYTES]);
        let mut work = Self { medium: medium.clone(), done: Vec::new(), versions: HashMap::new() };
        let mut bench = Bench::new(open(&medium));
        (0..5).for_each(|n| work.write(&bench, n));
        work.remove(&bench, 2);
        work.write(&bench, 2);
        work.remove(&bench, 4);
        // More than fits: the last ones evict, before and after a restart.
        (5..BLOCKS - 2).for_each(|n| work.write(&bench, n));
        drop(bench);
        bench = Bench::new(open(&medium));
        (BLOCKS - 2..BLOCKS).for_each(|n| work.write(&bench, n));
        work.reset(&mut bench);
        bench.drain();
        (0..4).for_each(|n| work.write(&bench, n));
        work.remove(&bench, 0);
        work.reset(&mut bench);
        (0..3).for_each(|n| work.write(&bench, n));
        bench.drain();
        work
    }

    /// How many other blocks of an epoch may lie on the medium after `at` records that were written after the first
    /// `ended`. The oldest block makes space for a new one, so the newest `FIT` stay.
    fn newer(&self, epoch: u32, ended: usize, at: usize) -> usize {
        let mut newer = HashSet::new();
        for done in self.done.iter().filter(|done| done.begun >= ended && done.begun <= at) {
            match done.what {
                What::Write { epoch: other, n, .. } if other == epoch => drop(newer.insert(n)),
                What::Remove { epoch: other, n } if other == epoch && done.ended <= at => {
                    newer.remove(&n);
                }
                _ => {}
            }
        }
        newer.len()
    }
}

/// What lies on the medium after `at` records; those in `lost` never got there, `torn` got there only in part.
fn image(log: &[Recorded], at: usize, lost: &HashSet<usize>, torn: Option<(usize, usize)>) -> Vec<u8> {
    let mut bytes = vec![0; MEDIUM_BYTES];
    for (number, record) in log[..at].iter().enumerate() {
        if let Recorded::Write { at, bytes: written } = record
            && !lost.contains(&number)
        {
            let length =
                torn.filter(|(which, _)| *which == number).map_or(written.len(), |(_, length)| length);
            let length = length.min(written.len());
            bytes[*at as usize..*at as usize + length].copy_from_slice(&written[..length]);
        }
    }
    bytes
}

fn check(work: &Workload, at: usize, image: Vec<u8>, what: &str) {
    let medium = MemoryMedium::new(image);
    let tier = open(&medium);
    let bench = Bench::new(Arc::clone(&tier) as _);
    let ended = |done: &&Done| done.ended <= at;
    let begun = |done: &&Done| done.begun <= at;
    let epochs = |done: &Done| if let What::Reset { epoch } = done.what { Some(epoch) } else { None };
    let least = work.done.iter().filter(ended).filter_map(epochs).max().unwrap_or(0);
    assert!(bench.epoch >= least, "{what}: epoch {} came back (P1)", bench.epoch);
    let mut found = 0;
    for n in 0..BLOCKS {
        // What was done to this block in this epoch, from the last acknowledged operation on.
        let mine = |done: &&Done| match done.what {
            What::Write { epoch, n: other, .. } | What::Remove { epoch, n: other } => {
                epoch == bench.epoch && other == n
            }
            What::Reset { .. } => false,
        };
        let all: Vec<&Done> = work.done.iter().filter(mine).filter(begun).collect();
        let sure = all.iter().rposition(|done| done.ended <= at);
        let may: Vec<What> = all[sure.unwrap_or(0)..].iter().map(|done| done.what).collect();
        let is_there = bench.peek(n) == kvdepot_tier::Presence::Present;
        match bench.read(n) {
            Ok(bytes) => {
                found += 1;
                let is_right = may.iter().any(|what| match what {
                    What::Write { version, .. } => bytes == bench.bytes(n + version * VERSION),
                    _ => false,
                });
                assert!(is_right, "{what}: block {n} is none of {may:?} (P1)");
            }
            Err(error) => {
                // A header is written after its payload has been flushed, so what is found is complete.
                assert!(!is_there, "{what}: block {n} was found, and is not whole: {error}");
                let last = sure.map(|sure| all[sure]);
                let was_kept = last.is_some_and(|last| matches!(last.what, What::Write { .. }));
                let is_changing = may.len() > 1;
                let newer = last.map_or(0, |last| work.newer(bench.epoch, last.ended, at));
                assert!(
                    !was_kept || is_changing || newer >= FIT,
                    "{what}: block {n} is gone, and only {newer} are newer: {may:?}"
                );
            }
        }
    }
    assert_eq!(tier.keys(bench.spec.id(bench.epoch)).len(), found, "{what}");
    // The tier goes on: everything can be written, and is found after another restart.
    for n in 100..112 {
        bench.write(n).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    let usage = tier.usage();
    assert!(usage.bytes <= usage.bytes_max, "{what}: {usage:?}");
    let held: Vec<u64> = (100..112).filter(|n| bench.read_is_right(*n)).collect();
    assert!(held.len() >= 8, "{what}: {held:?}");
    let epoch = bench.epoch;
    drop((bench, tier));
    let bench = Bench::new(open(&medium));
    assert_eq!(bench.epoch, epoch, "{what}");
    assert!(held.iter().all(|n| bench.read_is_right(*n)), "{what}: after another restart");
}

#[test]
fn every_crash_is_survived() {
    let work = Workload::run();
    let log = work.medium.log();
    assert!(log.len() > 100, "{}", log.len());
    let none = HashSet::new();
    let mut images = 0;
    for at in 0..=log.len() {
        check(&work, at, image(&log, at, &none, None), &format!("killed after {at}"));
        images += 1;
        // Power loss: what was written since the last flush.
        let flushed =
            log[..at].iter().rposition(|record| *record == Recorded::Persist).map_or(0, |at| at + 1);
        let open: Vec<usize> = (flushed..at).collect();
        if open.is_empty() {
            continue;
        }
        // Subsets: all, each one, all but each one, and every other one.
        let mut subsets = vec![open.iter().copied().collect::<HashSet<usize>>()];
        for one in &open {
            subsets.push(HashSet::from([*one]));
            subsets.push(open.iter().copied().filter(|other| other != one).collect());
        }
        subsets.push(open.iter().copied().step_by(2).collect());
        for lost in subsets {
            check(
                &work,
                at,
                image(&log, at, &lost, None),
                &format!("power lost after {at}, without {lost:?}"),
            );
            images += 1;
        }
        for one in &open {
            for length in [8, 24, 32, 48, 56, 4096] {
                let torn = Some((*one, length));
                check(
                    &work,
                    at,
                    image(&log, at, &none, torn),
                    &format!("power lost after {at}, {one} torn at {length}"),
                );
                images += 1;
            }
        }
    }
    println!("{} boundaries, {images} images", log.len() + 1);
}
