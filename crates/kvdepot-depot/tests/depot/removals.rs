//! Removals that a tier cannot carry out are not considered done: the caller is notified, the block is not served, and
//! the tier is asked again (P1).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::blocks::{HANG, hash, key, open};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind};
use kvdepot_depot::Depot;
use kvdepot_depot::direct::OpenNamespace;
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{Done, FakeTier, Tier};
use parking_lot::Mutex;

const BLOCKS: u64 = 8;

/// A tier of two parts that refuses removals when told to.
#[derive(Default)]
struct Stubborn {
    refuses: AtomicBool,
    removals: Mutex<Vec<Vec<BlockKey>>>,
}

impl Stubborn {
    fn set(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::SeqCst);
    }
}

impl Script for Stubborn {
    fn remove(&self, inner: &Arc<FakeTier>, keys: Vec<BlockKey>, done: Done<()>) {
        self.removals.lock().push(keys.clone());
        if self.refuses.load(Ordering::SeqCst) {
            return done(Err(Error::new(
                ErrorKind::Unavailable,
                "a removal failed because the test says so",
            )));
        }
        inner.remove(keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        usize::from(key.hash.0[0] % 2)
    }
}

fn depot() -> (Arc<ScriptedTier<Stubborn>>, Depot) {
    let tier = Arc::new(ScriptedTier::new(Stubborn::default()));
    let depot = crate::blocks::depot(PoolKind::Cache, vec![Arc::clone(&tier) as _], 60_000);
    (tier, depot)
}

fn keys(namespace: OpenNamespace) -> Vec<BlockKey> {
    (0..BLOCKS).map(|n| key(namespace, n)).collect()
}

/// Stores all blocks in the tier and leaves none in the pool.
fn dump(depot: &Depot, namespace: OpenNamespace) {
    crate::blocks::dump(depot, namespace, BLOCKS);
    depot.direct().evict_to_percent(0.0);
}

/// Number of blocks that can be read.
fn readable(depot: &Depot, namespace: OpenNamespace) -> usize {
    let hashes: Vec<BlockHash> = (0..BLOCKS).map(hash).collect();
    let slots = depot.direct().read(namespace.handle, namespace.id, &hashes, HANG).unwrap();
    slots.iter().filter(|slot| slot.is_ok()).count()
}

fn until(what: impl Fn() -> bool) {
    let deadline = Instant::now() + HANG;
    while !what() {
        assert!(Instant::now() < deadline, "it never came to pass");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_removal_that_fails_is_told_and_the_block_is_not_served_until_it_is_made() {
    let (tier, depot) = depot();
    let namespace = open(&depot);
    dump(&depot, namespace);
    tier.script.set(true);
    let removed = depot.direct().remove(&keys(namespace));
    assert_eq!(removed.left, BLOCKS as usize);
    assert_eq!(removed.into_result().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(tier.usage().blocks, BLOCKS, "the tier has all of them");
    assert_eq!(readable(&depot, namespace), 0);
    tier.script.set(false);
    until(|| tier.usage().blocks == 0);
    // Nothing is owed any more: the tier gets what is dumped under the same keys.
    until(|| {
        dump(&depot, namespace);
        tier.usage().blocks == BLOCKS && readable(&depot, namespace) == BLOCKS as usize
    });
}

#[test]
fn what_is_dumped_meanwhile_is_served_from_the_pool_and_not_given_to_the_tier() {
    let (tier, depot) = depot();
    let namespace = open(&depot);
    dump(&depot, namespace);
    tier.script.set(true);
    assert_eq!(depot.direct().remove(&keys(namespace)).left, BLOCKS as usize);
    dump(&depot, namespace);
    assert_eq!(readable(&depot, namespace), 0, "evicted from the pool, and the tier was not given it");
    tier.script.set(false);
    until(|| tier.usage().blocks == 0);
}

#[test]
fn blocks_in_different_parts_of_a_tier_are_removed_by_different_calls() {
    let (tier, depot) = depot();
    let namespace = open(&depot);
    dump(&depot, namespace);
    depot.direct().remove(&keys(namespace)).into_result().unwrap();
    let calls = tier.script.removals.lock();
    let one_part = |keys: &Vec<BlockKey>| keys.iter().all(|key| tier.part(key) == tier.part(&keys[0]));
    assert!(calls.len() >= 2 && calls.iter().all(one_part), "{calls:?}");
    assert_eq!(calls.iter().map(Vec::len).sum::<usize>(), BLOCKS as usize);
}
