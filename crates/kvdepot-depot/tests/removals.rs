//! Removals that a tier cannot carry out are not taken for done: the caller is told, the block is not served, and the tier
//! is asked again (P1).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, Error, ErrorKind, NamespaceId, NamespaceSpec};
use kvdepot_depot::direct::OpenNamespace;
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use kvdepot_tier::{Done, FakeTier, Presence, ReadItem, Tier, TierUsage, WriteItem};
use parking_lot::Mutex;

const POOL: u64 = 8 << 20;
const BLOCKS: u64 = 8;
/// Only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// A tier of two parts that refuses removals when it is told to.
#[derive(Debug)]
struct Stubborn {
    inner: FakeTier,
    refuses: AtomicBool,
    removals: Mutex<Vec<Vec<BlockKey>>>,
}

impl Tier for Stubborn {
    fn name(&self) -> &'static str {
        "stubborn"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner.open_namespace(spec, at_least, deadline, done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner.advance_epoch(spec, at_least, deadline, done);
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.inner.peek(keys, out);
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.inner.probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.inner.read(reads, deadline);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        self.inner.write(writes, deadline);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.removals.lock().push(keys.clone());
        if self.refuses.load(Ordering::SeqCst) {
            return done(Err(Error::new(
                ErrorKind::Unavailable,
                "a removal failed because the test says so",
            )));
        }
        self.inner.remove(keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        usize::from(key.hash.0[0] % 2)
    }

    fn touch(&self, keys: &[BlockKey]) {
        self.inner.touch(keys);
    }

    fn usage(&self) -> TierUsage {
        self.inner.usage()
    }

    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.inner.keys(namespace)
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.inner.drain(deadline)
    }
}

fn depot() -> (Arc<Stubborn>, Depot) {
    let tier = Arc::new(Stubborn {
        inner: FakeTier::new(0),
        refuses: AtomicBool::new(false),
        removals: Mutex::default(),
    });
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": 60_000});
    let pool = PoolMapping::create_private(POOL).unwrap();
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let depot = Depot::with_tiers(config, PoolKind::Cache, vec![Arc::clone(&tier) as _], pool).unwrap();
    (tier, depot)
}

fn open(depot: &Depot) -> OpenNamespace {
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"removals\"}", layout).unwrap();
    depot.direct().open_namespace(spec.canonical()).unwrap()
}

fn hash(n: u64) -> BlockHash {
    let mut hash = [7; 16];
    hash[..8].copy_from_slice(&n.to_le_bytes());
    BlockHash(hash)
}

fn keys(namespace: OpenNamespace) -> Vec<BlockKey> {
    (0..BLOCKS).map(|n| BlockKey { namespace: namespace.id, hash: hash(n) }).collect()
}

/// Stores all blocks in the tier, and leaves none in the pool.
fn dump(depot: &Depot, namespace: OpenNamespace) {
    let session = depot.session();
    let hashes = Hashes(Cow::Owned((0..BLOCKS).flat_map(|n| hash(n).0).collect()));
    let reserved = session.handle(Request::Reserve { namespace: namespace.handle, hashes });
    let Response::Grants(grants) = reserved else { panic!("{reserved:?}") };
    let leases = grants.iter().filter_map(|grant| match grant {
        Grant::Leased { lease, .. } => Some(*lease),
        _ => None,
    });
    let sealed = session.handle(Request::Commit { leases: leases.collect(), shards: Shards::All });
    assert!(matches!(sealed, Response::Ok), "{sealed:?}");
    let drained = session.handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
    depot.direct().evict_to_percent(0.0);
}

/// How many of the blocks can be read.
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
    tier.refuses.store(true, Ordering::SeqCst);
    let removed = depot.direct().remove(&keys(namespace));
    assert_eq!(removed.left, BLOCKS as usize);
    assert_eq!(removed.into_result().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(tier.usage().blocks, BLOCKS, "the tier has all of them");
    assert_eq!(readable(&depot, namespace), 0);
    tier.refuses.store(false, Ordering::SeqCst);
    until(|| tier.usage().blocks == 0);
    // Nothing is owed any more: the tier is given what is dumped under the same keys.
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
    tier.refuses.store(true, Ordering::SeqCst);
    assert_eq!(depot.direct().remove(&keys(namespace)).left, BLOCKS as usize);
    dump(&depot, namespace);
    assert_eq!(readable(&depot, namespace), 0, "evicted from the pool, and the tier was not given it");
    tier.refuses.store(false, Ordering::SeqCst);
    until(|| tier.usage().blocks == 0);
}

#[test]
fn blocks_in_different_parts_of_a_tier_are_removed_by_different_calls() {
    let (tier, depot) = depot();
    let namespace = open(&depot);
    dump(&depot, namespace);
    depot.direct().remove(&keys(namespace)).into_result().unwrap();
    let calls = tier.removals.lock();
    let one_part = |keys: &Vec<BlockKey>| keys.iter().all(|key| tier.part(key) == tier.part(&keys[0]));
    assert!(calls.len() >= 2 && calls.iter().all(one_part), "{calls:?}");
    assert_eq!(calls.iter().map(Vec::len).sum::<usize>(), BLOCKS as usize);
}
