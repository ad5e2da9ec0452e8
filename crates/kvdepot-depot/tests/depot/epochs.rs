//! Pool, tiers and other depots agree on a namespace's epoch, no matter which of them was away when it advanced. P1,
//! P2.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdepot_core::limits::NAMESPACE_OPEN_MS;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{
    BlockHash, BlockKey, BlockLayout, Error, ErrorKind, NamespaceId, NamespaceSpec, Priority,
};
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::recover::LeftLedger;
use kvdepot_depot::values::{Found, Values};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session};
use kvdepot_tier::conformance::Waiting;
use kvdepot_tier::{Done, FakeTier, Presence, ReadItem, Tier, TierUsage, WriteItem};

const POOL: u64 = 1 << 20;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

fn spec() -> NamespaceSpec {
    NamespaceSpec::new("{\"model\":\"epochs\"}", BlockLayout::uniform(1, &[64 << 10]).unwrap()).unwrap()
}

fn depot(tiers: Vec<Arc<dyn Tier>>) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL}).to_string();
    let pool = PoolMapping::create_private(POOL).unwrap();
    Depot::with_tiers(DepotConfig::from_json(&config).unwrap(), PoolKind::Cache, tiers, pool).unwrap()
}

fn on_disk(directory: &Path) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache|Posix", "pool_bytes": POOL,
        "posix": {"directories": [directory]}});
    Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap()
}

fn epoch(depot: &Depot) -> u32 {
    depot.direct().open_namespace(spec().canonical()).unwrap().epoch
}

fn until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + HANG;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

/// A tier that cannot store anything while it is broken.
#[derive(Debug, Default)]
struct Flaky {
    inner: Arc<Fake>,
    held: Held,
    is_broken: AtomicBool,
    calls: AtomicUsize,
    /// Calls that must have come before any of them ends.
    wanted: AtomicUsize,
    /// Blocks that it was given.
    writes: AtomicUsize,
    /// The longest time that a call was given.
    longest: Mutex<Duration>,
}

/// Calls that have not ended.
#[derive(Default)]
struct Held(Mutex<Vec<Box<dyn FnOnce() + Send>>>);

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Held")
    }
}

#[derive(Debug)]
struct Fake(FakeTier);

impl Default for Fake {
    fn default() -> Self {
        Self(FakeTier::new(0))
    }
}

impl Flaky {
    /// Executes the calls once as many as wanted have come: a caller that waits for one before the next waits forever.
    fn when_all_have_come(&self, done: Done<u32>, work: impl FnOnce(&FakeTier, Done<u32>) + Send + 'static) {
        if self.is_broken.load(Ordering::SeqCst) {
            return done(Err(Error::new(ErrorKind::Io, "broken for a test")));
        }
        let inner = Arc::clone(&self.inner);
        self.held.0.lock().unwrap().push(Box::new(move || work(&inner.0, done)));
        if self.calls.fetch_add(1, Ordering::SeqCst) + 1 < self.wanted.load(Ordering::SeqCst) {
            return;
        }
        let held = std::mem::take(&mut *self.held.0.lock().unwrap());
        held.into_iter().for_each(|work| work());
    }

    fn set_broken(&self, is_broken: bool) {
        self.is_broken.store(is_broken, Ordering::SeqCst);
    }
}

impl Tier for Flaky {
    fn name(&self) -> &'static str {
        "Flaky"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        let mut longest = self.longest.lock().unwrap();
        *longest = longest.max(deadline.saturating_duration_since(Instant::now()));
        drop(longest);
        let spec = Arc::clone(spec);
        self.when_all_have_come(done, move |tier, done| tier.open_namespace(&spec, at_least, deadline, done));
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        let spec = Arc::clone(spec);
        self.when_all_have_come(done, move |tier, done| tier.advance_epoch(&spec, at_least, deadline, done));
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.inner.0.peek(keys, out);
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.inner.0.probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.inner.0.read(reads, deadline);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        self.writes.fetch_add(writes.len(), Ordering::SeqCst);
        self.inner.0.write(writes, deadline);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.inner.0.remove(keys, done);
    }

    fn touch(&self, keys: &[BlockKey]) {
        self.inner.0.touch(keys);
    }

    fn usage(&self) -> TierUsage {
        self.inner.0.usage()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.inner.0.keys_from(namespace, from)
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.inner.0.drain(deadline)
    }
}

fn stored(tier: &Flaky) -> u32 {
    tier.inner.0.open_and_wait(&spec(), 0).unwrap()
}

/// A depot whose pool outlives a crash, in new memory or in what another depot left.
fn kept(tiers: Vec<Arc<dyn Tier>>, pool: PoolMapping) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "populate": false,
        "pool_keep_ms": 1000, "pool_keeper": ["true"]});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap()
}

/// The depot is gone, as if killed; returns its memory and its ledger.
fn crash(depot: Depot) -> (PoolMapping, LeftLedger) {
    let pool = depot.pool().fd().unwrap().try_clone_to_owned().unwrap();
    let ledger = depot.ledger_fd().unwrap().try_clone_to_owned().unwrap();
    depot.leave();
    (PoolMapping::map(pool, POOL).unwrap(), LeftLedger::open(ledger).unwrap())
}

/// A crashed depot advanced a namespace, its only tier could not store that, and the tier is away when the next depot
/// starts.
#[test]
fn an_epoch_that_only_the_ledger_knew_is_told_to_a_tier_that_comes_back() {
    let tier: Arc<Flaky> = Arc::default();
    let first = kept(vec![Arc::clone(&tier) as _], PoolMapping::create(POOL).unwrap());
    let direct = first.direct();
    let namespace = direct.open_namespace(spec().canonical()).unwrap();
    let hash = BlockHash([1; 16]);
    direct.reserve(namespace, hash).unwrap().unwrap().seal(None).unwrap();
    assert!(matches!(first.session().handle(Request::Drain { wait_ms: 60_000 }), Response::Drained(true)));
    let old = BlockKey { namespace: namespace.id, hash };
    assert_eq!(tier.keys(old.namespace), [old], "the tier has the block");
    tier.set_broken(true);
    direct.reset(&[namespace.handle]).unwrap_err();
    drop(direct);
    let (pool, left) = crash(first);
    // More than one crash before the tier learns of it.
    let second = kept(vec![Arc::clone(&tier) as _], pool);
    assert_eq!(second.recover(&left, false).blocks, 0);
    let (pool, left) = crash(second);
    let third = kept(vec![Arc::clone(&tier) as _], pool);
    third.recover(&left, false);
    assert_eq!(epoch(&third), 1, "without its only tier");
    tier.set_broken(false);
    until("the tier is told", || stored(&tier) == 1);
    assert_eq!(epoch(&third), 1, "the block of the epoch before is not served");
}

/// As without a crash: the tier that does not answer may know of a reset that the other one missed.
#[test]
fn a_namespace_is_not_recovered_without_the_answer_of_every_tier() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    let over = || tiers.iter().map(|tier| Arc::clone(tier) as Arc<dyn Tier>).collect();
    let first = kept(over(), PoolMapping::create(POOL).unwrap());
    assert_eq!(epoch(&first), 0);
    let (pool, left) = crash(first);
    tiers[1].advance_and_wait(&spec(), 5).unwrap();
    tiers[1].set_broken(true);
    let second = kept(over(), pool);
    second.recover(&left, false);
    assert_eq!(second.direct().open_namespace(spec().canonical()).unwrap_err().kind(), ErrorKind::Io);
    tiers[1].set_broken(false);
    assert_eq!(epoch(&second), 5);
}

/// As when a tier is added to a pipeline whose other tier was reset before, above or below it.
#[test]
fn a_tier_that_lags_is_told_when_a_namespace_opens() {
    for ahead in 0..3 {
        let tiers: Vec<Arc<Flaky>> = (0..3).map(|_| Arc::default()).collect();
        tiers[ahead].advance_and_wait(&spec(), 4).unwrap();
        let depot = depot(tiers.iter().map(|tier| Arc::clone(tier) as _).collect());
        assert_eq!(epoch(&depot), 4);
        assert!(tiers.iter().all(|tier| stored(tier) == 4));
    }
}

#[test]
fn a_reset_reaches_the_epoch_of_the_tier_that_is_ahead() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    let depot = depot(tiers.iter().map(|tier| Arc::clone(tier) as _).collect());
    assert_eq!(epoch(&depot), 0);
    // By another depot, before this one checks again.
    tiers[1].advance_and_wait(&spec(), 6).unwrap();
    let direct = depot.direct();
    direct.reset(&[direct.open_namespace(spec().canonical()).unwrap().handle]).unwrap();
    assert_eq!(epoch(&depot), 7);
    assert!(tiers.iter().all(|tier| stored(tier) == 7));
}

#[test]
fn a_tier_that_missed_a_reset_is_told_when_it_works_again() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    let depot = depot(tiers.iter().map(|tier| Arc::clone(tier) as _).collect());
    let direct = depot.direct();
    let handle = direct.open_namespace(spec().canonical()).unwrap().handle;
    tiers[0].set_broken(true);
    assert_eq!(direct.reset(&[handle]).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!((epoch(&depot), stored(&tiers[0]), stored(&tiers[1])), (1, 0, 1));
    tiers[0].set_broken(false);
    until("the tier that was broken is told", || stored(&tiers[0]) == 1);
}

#[test]
fn a_tier_that_cannot_open_a_namespace_is_tried_again_and_followed() {
    let tier: Arc<Flaky> = Arc::default();
    tier.advance_and_wait(&spec(), 5).unwrap();
    tier.set_broken(true);
    let depot = depot(vec![Arc::clone(&tier) as _]);
    assert_eq!(epoch(&depot), 0, "the pool serves without its tier");
    tier.set_broken(false);
    until("the depot follows its tier", || epoch(&depot) == 5);
}

/// Whatever the tier is and however patient the depot: the client that waits would give the depot up (P2, P6).
#[test]
fn a_tier_that_never_answers_about_a_namespace_is_not_waited_for_like_a_read() {
    let config =
        serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": 600_000}).to_string();
    let pool = PoolMapping::create_private(POOL).unwrap();
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    tiers[1].wanted.store(usize::MAX, Ordering::SeqCst);
    let over = tiers.iter().map(|tier| Arc::clone(tier) as Arc<dyn Tier>).collect();
    let depot =
        Depot::with_tiers(DepotConfig::from_json(&config).unwrap(), PoolKind::Cache, over, pool).unwrap();
    let began = Instant::now();
    assert_eq!(depot.direct().open_namespace(spec().canonical()).unwrap_err().kind(), ErrorKind::Timeout);
    assert!(began.elapsed() < HANG, "the client has given the depot up long ago");
    let most = Duration::from_millis(NAMESPACE_OPEN_MS);
    assert!(tiers.iter().all(|tier| *tier.longest.lock().unwrap() <= most), "a tier had more time");
    tiers[1].wanted.store(0, Ordering::SeqCst);
    assert_eq!(epoch(&depot), 0, "it answers again");
}

/// The tier that does not answer may know of a reset that the other one missed.
#[test]
fn one_tier_is_not_believed_while_another_cannot_answer() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    tiers[1].advance_and_wait(&spec(), 5).unwrap();
    tiers[1].set_broken(true);
    let depot = depot(tiers.iter().map(|tier| Arc::clone(tier) as _).collect());
    assert_eq!(depot.direct().open_namespace(spec().canonical()).unwrap_err().kind(), ErrorKind::Io);
    tiers[1].set_broken(false);
    assert_eq!(epoch(&depot), 5);
}

/// A client opens a namespace, as an engine does.
fn opened_by_client(session: &Session) -> (u64, NamespaceId, u32) {
    match session.handle(Request::OpenNamespace { canonical: spec().canonical().into() }) {
        Response::Namespace { handle, id, epoch } => (handle, NamespaceId(id), epoch),
        other => panic!("{other:?}"),
    }
}

fn one_hash() -> Hashes<'static> {
    Hashes(vec![1; 16].into())
}

fn is_there(session: &Session, namespace: u64) -> bool {
    match session.handle(Request::Lookup { namespace, hashes: one_hash() }) {
        Response::Present(there) => there == [1],
        other => panic!("{other:?}"),
    }
}

fn dump(session: &Session, namespace: u64) {
    let Response::Grants(grants) =
        session.handle(Request::Reserve { namespace, hashes: one_hash(), priority: Priority::Normal })
    else {
        panic!("no space")
    };
    let [Grant::Leased { lease, .. }] = grants[..] else { panic!("{grants:?}") };
    let sealed = session.handle(Request::Commit { leases: vec![lease], shards: Shards::All });
    assert!(matches!(sealed, Response::Ok), "{sealed:?}");
    let drained = session.handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
}

/// An engine that starts while the bucket below the disk is away reuses what it computes itself. The disk serves nothing,
/// since the bucket may know of a reset that the disk missed (P1, P2).
#[test]
fn a_new_namespace_has_the_pool_while_one_of_its_tiers_does_not_answer() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    let over = |tiers: &[Arc<Flaky>]| depot(tiers.iter().map(|tier| Arc::clone(tier) as _).collect());
    let before = over(&tiers[..1]);
    let session = before.session();
    dump(&session, opened_by_client(&session).0);
    assert_eq!(tiers[0].keys(spec().id(0)).len(), 1, "a block from before the reset");
    drop((session, before));
    tiers[1].advance_and_wait(&spec(), 5).unwrap();
    tiers[1].set_broken(true);

    let depot = over(&tiers);
    let session = depot.session();
    let writes = || tiers.iter().map(|tier| tier.writes.load(Ordering::SeqCst)).sum::<usize>();
    let missed = |reason: &str| depot.direct().stats()["misses"][reason].as_u64().unwrap();
    let (namespace, id, epoch) = opened_by_client(&session);
    assert!(epoch == 0 && (0..9).all(|epoch| spec().id(epoch) != id), "an id that no epoch has");
    assert!(!is_there(&session, namespace), "the tier's block is not served");
    assert_eq!((missed("too_slow"), missed("never_stored")), (1, 0), "a tier has not answered");
    dump(&session, namespace);
    assert!(is_there(&session, namespace), "the pool serves");
    assert_eq!(opened_by_client(&depot.session()), (namespace, id, 0), "also other engines");
    assert_eq!(writes(), 1, "no tier is given it");
    let provisional = || depot.direct().stats()["namespaces_provisional"].as_u64().unwrap();
    assert_eq!(provisional(), 1);
    // Others name its epoch, or may find an earlier value: to them it is not open.
    assert_eq!(depot.direct().open_namespace(spec().canonical()).unwrap_err().kind(), ErrorKind::Io);
    // A reset while the tier is away fails, and drops what the pool has.
    assert!(matches!(
        session.handle(Request::Reset { namespaces: vec![namespace] }),
        Response::Failed { .. }
    ));
    let (_, again, _) = opened_by_client(&session);
    assert!(again != id && !is_there(&session, namespace), "what was dumped before it is gone");

    tiers[1].set_broken(false);
    until("all tiers have answered", || provisional() == 0);
    let (same, id, epoch) = opened_by_client(&session);
    assert_eq!((same, id), (namespace, spec().id(epoch)));
    assert!(epoch >= 5 && tiers.iter().all(|tier| stored(tier) == epoch));
    assert!(!is_there(&session, namespace));
    dump(&session, namespace);
    let one = BlockKey { namespace: id, hash: BlockHash([1; 16]) };
    assert!(tiers.iter().all(|tier| tier.keys(id) == [one]), "tiers get what came after");
}

/// There a provisional namespace would lose every dump, and say that it has stored it.
#[test]
fn a_pool_that_keeps_nothing_opens_no_namespace_provisionally() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    tiers[1].set_broken(true);
    let config = serde_json::json!({"pipeline": "Staging", "pool_bytes": POOL}).to_string();
    let over = tiers.iter().map(|tier| Arc::clone(tier) as Arc<dyn Tier>).collect();
    let pool = PoolMapping::create_private(POOL).unwrap();
    let depot =
        Depot::with_tiers(DepotConfig::from_json(&config).unwrap(), PoolKind::Staging, over, pool).unwrap();
    let opened = depot.session().handle(Request::OpenNamespace { canonical: spec().canonical().into() });
    assert!(matches!(opened, Response::Failed { .. }), "{opened:?}");
}

/// A pool server, or a depot for values, has opened what an engine opened provisionally before.
#[test]
fn whoever_needs_all_tiers_makes_them_answer_about_a_provisional_namespace() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    tiers[1].set_broken(true);
    let depot = depot(tiers.iter().map(|tier| Arc::clone(tier) as _).collect());
    let session = depot.session();
    let (handle, _, _) = opened_by_client(&session);
    tiers[1].set_broken(false);
    let opened = depot.direct().open_namespace(spec().canonical()).unwrap();
    assert_eq!((opened.handle, opened.id), (handle, spec().id(0)));
}

/// What was dumped under an id that no epoch has is not taken over after a crash.
#[test]
fn a_provisional_namespace_does_not_outlive_its_depot() {
    let tiers: Vec<Arc<Flaky>> = (0..2).map(|_| Arc::default()).collect();
    let over = || tiers.iter().map(|tier| Arc::clone(tier) as Arc<dyn Tier>).collect();
    tiers[1].set_broken(true);
    let first = kept(over(), PoolMapping::create(POOL).unwrap());
    let session = first.session();
    dump(&session, opened_by_client(&session).0);
    drop(session);
    until("the block has a record", || first.direct().stats()["ledger_unproven_blocks"] == 0);
    let (pool, left) = crash(first);
    tiers[1].set_broken(false);
    let second = kept(over(), pool);
    assert_eq!(second.recover(&left, false).blocks, 0);
    assert_eq!(epoch(&second), 0);
}

#[test]
fn depots_with_unequal_counts_of_resets_stay_together() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (on_disk(directory.path()), on_disk(directory.path()));
    let reset = |depot: &Depot| {
        let direct = depot.direct();
        direct.reset(&[direct.open_namespace(spec().canonical()).unwrap().handle])
    };
    assert_eq!((epoch(&one), epoch(&two)), (0, 0));
    reset(&one).unwrap();
    reset(&one).unwrap();
    reset(&two).unwrap();
    assert!(epoch(&two) >= 3, "a reset of its own, above those of the other depot");
    until("the other depot follows", || epoch(&one) == epoch(&two));
}

/// Another depot on the same directory purges the values: values are found again afterwards.
#[test]
fn values_follow_another_depots_purge() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (on_disk(directory.path()), on_disk(directory.path()));
    let values = |depot: &Depot| Values::open(depot.direct(), POOL, 0).unwrap();
    let (here, there) = (values(&one), values(&two));
    let hash = Values::hash(b"key");
    let put = || here.reserve(hash, 100).unwrap().publish();
    let is_found = || matches!(here.get_now(hash), Found::Here(_));
    put().unwrap();
    assert!(is_found());
    there.purge().unwrap();
    // Makes the depot check each of its namespaces again, as the start of an engine does.
    values(&one);
    until("the value goes with the purge", || !is_found());
    put().unwrap();
    assert!(is_found(), "a value put after the purge");
}

#[test]
fn all_classes_of_values_are_opened_and_reset_at_once() {
    let counted = Arc::new(Flaky::default());
    let first = depot(vec![Arc::clone(&counted) as _]);
    let values = Values::open(first.direct(), POOL, 0).unwrap();
    // Opening asks for stamps too; a purge is one call per class.
    counted.calls.store(0, Ordering::SeqCst);
    values.purge().unwrap();
    let classes = counted.calls.load(Ordering::SeqCst);
    assert!(classes > 8, "{classes}");
    // If they came one after another, the first would wait for the others.
    let tier = Arc::new(Flaky::default());
    tier.wanted.store(classes, Ordering::SeqCst);
    let second = depot(vec![Arc::clone(&tier) as _]);
    let values = Values::open(second.direct(), POOL, 0).unwrap();
    tier.calls.store(0, Ordering::SeqCst);
    values.purge().unwrap();
}
