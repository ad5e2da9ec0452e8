//! A request that finds less than it asked for is counted under the reason of the first block that it missed, and told with it.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{
    BlockHash, BlockKey, BlockLayout, Error, ErrorKind, NamespaceId, NamespaceSpec, Priority,
};
use kvdepot_depot::direct::OpenNamespace;
use kvdepot_depot::message::{ClaimGroup, Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session};
use kvdepot_tier::{Done, FakeTier, Fetched, Presence, ReadItem, Tier, TierEvents, TierUsage, WriteItem};
use serde_json::{Value, json};

/// The smallest pool: 256 blocks.
const POOL: u64 = 1 << 20;
const POOL_BLOCKS: u64 = POOL / 4096;
/// When a test gives up.
const LONG: Duration = Duration::from_secs(120);

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::yield_now();
    }
}

/// A tier in memory that fails as the test says, and says that it gave blocks up.
#[derive(Default)]
struct Moody {
    inner: Option<FakeTier>,
    events: Mutex<Option<Weak<dyn TierEvents>>>,
    fails_reads: Mutex<Option<ErrorKind>>,
    fails_writes: bool,
    /// Reads that nobody ends before the test does.
    held: Option<Mutex<Vec<ReadItem>>>,
    is_down: AtomicBool,
    /// Whether only I/O could tell, and none answers.
    is_mute: AtomicBool,
}

impl Moody {
    fn new() -> Self {
        Self { inner: Some(FakeTier::new(0)), ..Self::default() }
    }

    fn inner(&self) -> &FakeTier {
        self.inner.as_ref().unwrap()
    }

    /// Gives blocks up.
    fn give_up(&self, keys: Vec<BlockKey>, lost: bool) {
        self.inner().remove(keys.clone(), Box::new(|outcome| outcome.unwrap()));
        let events = self.events.lock().unwrap().as_ref().and_then(Weak::upgrade).unwrap();
        if lost { events.lost(&keys) } else { events.evicted(&keys) }
    }
}

impl std::fmt::Debug for Moody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Moody")
    }
}

impl Tier for Moody {
    fn name(&self) -> &'static str {
        "moody"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner().open_namespace(spec, at_least, deadline, done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner().advance_epoch(spec, at_least, deadline, done);
    }

    fn close_namespace(&self, root: NamespaceId) {
        self.inner().close_namespace(root);
    }

    fn is_down(&self, _key: &BlockKey) -> bool {
        self.is_down.load(Ordering::Acquire)
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.inner().peek(keys, out);
        if self.is_down.load(Ordering::Acquire) {
            out.fill(Presence::Absent);
        }
        if self.is_mute.load(Ordering::Acquire) {
            out.fill(Presence::Unknown);
        }
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if self.is_mute.load(Ordering::Acquire) {
            return done(Err(Error::new(ErrorKind::Timeout, "the test says so")));
        }
        self.inner().probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        if let Some(held) = &self.held {
            return held.lock().unwrap().extend(reads);
        }
        let fails = *self.fails_reads.lock().unwrap();
        match fails {
            Some(ErrorKind::NotFound) => reads.into_iter().for_each(|read| read.end(Ok(Fetched::Miss))),
            Some(kind) => reads.into_iter().for_each(|read| {
                // As the Posix tier does, with a block that is damaged.
                if kind == ErrorKind::Corrupt {
                    self.give_up(vec![read.key], true);
                }
                read.end(Err(Error::new(kind, "the test says so")));
            }),
            None => self.inner().read(reads, deadline),
        }
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        if self.fails_writes {
            let full = || Error::new(ErrorKind::NoSpace, "the test says so");
            return writes.into_iter().for_each(|write| write.end(Err(full())));
        }
        self.inner().write(writes, deadline);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.inner().remove(keys, done);
    }

    fn touch(&self, keys: &[BlockKey]) {
        self.inner().touch(keys);
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.inner().drain(deadline)
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        *self.events.lock().unwrap() = Some(events);
    }

    fn usage(&self) -> TierUsage {
        self.inner().usage()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.inner().keys_from(namespace, from)
    }
}

/// A depot, its tier, a session and a namespace of it.
struct Lab {
    session: Session,
    namespace: OpenNamespace,
    depot: Depot,
}

impl Lab {
    fn new(tier: Option<&Arc<Moody>>) -> Self {
        Self::with(tier, json!({}))
    }

    fn with(tier: Option<&Arc<Moody>>, more: Value) -> Self {
        let mut config =
            json!({"pipeline": "Cache", "pool_bytes": POOL, "eviction": "lru", "timeout_ms": 60_000});
        let more = more.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(more);
        let pool = PoolMapping::create_private(POOL).unwrap();
        let config = DepotConfig::from_json(&config.to_string()).unwrap();
        let tiers = tier.into_iter().map(|tier| -> Arc<dyn Tier> { Arc::<Moody>::clone(tier) }).collect();
        let depot = Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap();
        let session = depot.session().of_process(77);
        let namespace = depot.direct().open_namespace(spec("a").canonical()).unwrap();
        Self { session, namespace, depot }
    }

    fn reserve(&self, namespace: OpenNamespace, numbers: impl Iterator<Item = u64>) -> Vec<u64> {
        let reserved = self.session.handle(Request::Reserve {
            namespace: namespace.handle,
            hashes: hashes(numbers),
            priority: Priority::Normal,
        });
        let Response::Grants(grants) = reserved else { panic!("{reserved:?}") };
        let leases = grants.iter().filter_map(|grant| match grant {
            Grant::Leased { lease, .. } => Some(*lease),
            _ => None,
        });
        leases.collect()
    }

    /// Stores blocks, and waits until tiers have them or have failed.
    fn dump(&self, namespace: OpenNamespace, numbers: std::ops::Range<u64>) {
        for first in numbers.clone().step_by(64) {
            let leases = self.reserve(namespace, first..numbers.end.min(first + 64));
            let sealed = self.session.handle(Request::Commit { leases, shards: Shards::All });
            assert!(matches!(sealed, Response::Ok), "{sealed:?}");
            let drained = self.session.handle(Request::Drain { wait_ms: 60_000 });
            assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
        }
    }

    /// Makes the pool forget all that it held, as blocks of another namespace come.
    fn flood(&self) {
        let other = self.depot.direct().open_namespace(spec("flood").canonical()).unwrap();
        self.dump(other, 1_000_000..1_000_000 + POOL_BLOCKS);
    }

    fn claim(&self, numbers: std::ops::Range<u64>) -> (u64, bool, u32) {
        claimed(self.open_claim(numbers, None))
    }

    /// Opens a claim that may be loaded from these tiers.
    fn open_claim(&self, numbers: std::ops::Range<u64>, tiers: Option<&[&str]>) -> Response {
        let limit = u32::try_from(numbers.end - numbers.start).unwrap();
        let group =
            ClaimGroup { namespaces: vec![self.namespace.handle], window_blocks: 0, hashes_per_block: 1 };
        let (groups, label) = (vec![group], "cmpl-1".into());
        let tiers = tiers.map(|tiers| tiers.iter().map(ToString::to_string).collect());
        self.session.handle(Request::ClaimOpen {
            groups,
            hashes: hashes(numbers),
            skip: 0,
            limit,
            tiers,
            label,
        })
    }

    /// A claim's hit, when it is known.
    fn hit(&self, numbers: std::ops::Range<u64>) -> u32 {
        let (claim, mut settled, mut units) = self.claim(numbers);
        wait_until("a claim is settled", || {
            if !settled {
                let polled = self.session.handle(Request::ClaimPoll { claim, settle: false });
                (_, settled, units) = claimed(polled);
            }
            settled
        });
        self.session.handle(Request::ClaimRelease { claim, tell_times: false });
        units
    }

    fn lookup(&self, numbers: std::ops::Range<u64>) -> u32 {
        let namespaces = vec![self.namespace.handle];
        match self.session.handle(Request::LookupPrefix { namespaces, hashes: hashes(numbers) }) {
            Response::Prefix(prefix) => prefix,
            other => panic!("{other:?}"),
        }
    }

    fn misses(&self) -> Vec<Value> {
        self.depot.direct().last_misses(100, None)["misses"].as_array().unwrap().clone()
    }

    /// Waits until so many misses are told: another thread may have settled the claim that we polled.
    fn wait_for_misses(&self, count: usize) {
        wait_until("as many misses", || self.misses().len() >= count);
    }

    /// How many misses were counted under each reason that has any.
    fn counts(&self) -> Value {
        let stats = self.depot.direct().stats();
        let counts = stats["misses"].as_object().unwrap().iter().filter(|(_, count)| **count != 0);
        counts.map(|(reason, count)| (reason.clone(), count.clone())).collect()
    }

    /// The only miss so far has this reason, hit and place, at block `first`.
    fn ensure_one(&self, reason: &str, hit: u64, first: u64, place: &Value) {
        self.wait_for_misses(1);
        let misses = self.misses();
        let [miss] = &misses[..] else { panic!("not one miss: {misses:?}") };
        assert_eq!((&miss["reason"], &miss["hit"], &miss["place"]), (&json!(reason), &json!(hit), place));
        assert_eq!(miss["hash"], hex(&hash(first).0));
        assert_eq!(miss["namespace"], hex(&spec("a").root().0));
        assert_eq!(miss["client_pid"], 77);
        assert_eq!(self.counts(), json!({reason: 1}));
    }
}

fn claimed(response: Response) -> (u64, bool, u32) {
    match response {
        Response::Claim { claim, settled, units, .. } => (claim, settled, units),
        other => panic!("{other:?}"),
    }
}

fn spec(model: &str) -> NamespaceSpec {
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    NamespaceSpec::new(&format!("{{\"model\":\"{model}\"}}"), layout).unwrap()
}

fn hash(number: u64) -> BlockHash {
    let mut hash = [7; 16];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    BlockHash(hash)
}

fn hashes(numbers: impl Iterator<Item = u64>) -> Hashes<'static> {
    Hashes(Cow::Owned(numbers.flat_map(|number| hash(number).0).collect()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn fails_reads(kind: ErrorKind) -> Arc<Moody> {
    let tier = Arc::new(Moody::new());
    *tier.fails_reads.lock().unwrap() = Some(kind);
    tier
}

#[test]
fn what_was_never_stored_is_told_by_claims_and_by_lookups() {
    let lab = Lab::new(None);
    lab.dump(lab.namespace, 0..2);
    assert_eq!((lab.hit(0..2), lab.lookup(0..2)), (2, 2));
    assert_eq!(lab.counts(), json!({}));
    assert_eq!(lab.hit(0..5), 2);
    lab.wait_for_misses(1);
    assert_eq!(lab.lookup(0..4), 2);
    let told = |miss: &Value| (miss["by"].clone(), miss["asked"].clone(), miss["request"].clone());
    let (misses, nobody) = (lab.misses(), Value::Null);
    let expected = [(json!("lookup"), json!(4), nobody), (json!("claim"), json!(5), json!("cmpl-1"))];
    assert_eq!(misses.iter().map(told).collect::<Vec<_>>(), expected);
    assert!(misses.iter().all(|miss| miss["hash"] == hex(&hash(2).0) && miss["hit"] == 2));
    assert_eq!(lab.counts(), json!({"never_stored": 2}));
    let namespace = lab.namespace.handle;
    lab.session.handle(Request::Lookup { namespace, hashes: hashes(1..3) });
    assert_eq!(lab.counts(), json!({"never_stored": 3}));
    let of_request = lab.depot.direct().last_misses(9, Some("cmpl"));
    assert_eq!(of_request["misses"].as_array().unwrap().len(), 1);
}

#[test]
fn an_eviction_from_the_pool_is_told() {
    let lab = Lab::new(None);
    lab.dump(lab.namespace, 0..1);
    lab.flood();
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("evicted", 0, 0, &json!("pool"));
}

#[test]
fn an_eviction_from_a_tier_is_told() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..1);
    lab.flood();
    tier.give_up(vec![BlockKey { namespace: lab.namespace.id, hash: hash(0) }], false);
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("evicted", 0, 0, &json!("moody"));
}

#[test]
fn what_a_tier_found_missing_is_lost() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..1);
    lab.flood();
    tier.give_up(vec![BlockKey { namespace: lab.namespace.id, hash: hash(0) }], true);
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("lost", 0, 0, &json!("moody"));
}

#[test]
fn the_same_block_in_another_namespace_is_told() {
    let tier = Arc::new(Moody::new());
    for tier in [None, Some(&tier)] {
        let lab = Lab::new(tier);
        let other = lab.depot.direct().open_namespace(spec("b").canonical()).unwrap();
        lab.dump(other, 0..1);
        lab.flood();
        if tier.is_none() {
            lab.dump(other, 0..1);
        }
        assert_eq!(lab.hit(0..1), 0);
        lab.ensure_one("other_namespace", 0, 0, &Value::Null);
        assert_eq!(lab.misses()[0]["other_namespaces"], json!([hex(&spec("b").root().0)]));
    }
}

#[test]
fn a_dump_that_was_refused_is_told() {
    let lab = Lab::new(None);
    let held = lab.reserve(lab.namespace, 1..1 + POOL_BLOCKS);
    assert_eq!(held.len() as u64, POOL_BLOCKS);
    assert!(lab.reserve(lab.namespace, 0..1).is_empty());
    assert_eq!(lab.lookup(0..1), 0);
    lab.ensure_one("dropped", 0, 0, &json!("pool"));
}

#[test]
fn a_block_that_no_tier_could_write_is_told() {
    let tier = Arc::new(Moody { fails_writes: true, ..Moody::new() });
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..1);
    assert_eq!(lab.lookup(0..1), 1);
    lab.flood();
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("write_failed", 0, 0, &json!("moody"));
}

#[test]
fn reads_that_fail_are_told_apart() {
    for (kind, reason) in [
        (ErrorKind::Io, "read_failed"),
        (ErrorKind::Corrupt, "checksum"),
        (ErrorKind::Timeout, "too_slow"),
        (ErrorKind::NotFound, "lost"),
    ] {
        let tier = fails_reads(kind);
        let lab = Lab::new(Some(&tier));
        lab.dump(lab.namespace, 0..1);
        lab.flood();
        assert_eq!(lab.hit(0..1), 0);
        lab.ensure_one(reason, 0, 0, &json!("moody"));
    }
}

#[test]
fn a_tier_that_is_down_is_told_unless_more_is_known() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..2);
    lab.flood();
    tier.give_up(vec![BlockKey { namespace: lab.namespace.id, hash: hash(1) }], false);
    tier.is_down.store(true, Ordering::Release);
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("unavailable", 0, 0, &json!("moody"));
    assert_eq!((lab.lookup(0..1), lab.lookup(1..2)), (0, 0));
    assert_eq!(lab.counts(), json!({"unavailable": 2, "evicted": 1}));
    let explained = lab.depot.direct().explain(&hex(&spec("a").root().0), &[&hex(&hash(0).0)]).unwrap();
    assert_eq!(explained["blocks"][0]["reason"], "unavailable");
}

#[test]
fn a_tier_that_does_not_tell_what_it_has_was_too_slow() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..1);
    lab.flood();
    tier.is_mute.store(true, Ordering::Release);
    assert_eq!(lab.hit(0..2), 0);
    lab.ensure_one("too_slow", 0, 0, &Value::Null);
    assert_eq!(lab.lookup(0..2), 0);
    let namespace = lab.namespace.handle;
    lab.session.handle(Request::Lookup { namespace, hashes: hashes(0..2) });
    assert_eq!(lab.counts(), json!({"too_slow": 3}));
    let explained = lab.depot.direct().explain(&hex(&spec("a").root().0), &[&hex(&hash(0).0)]).unwrap();
    assert_eq!(explained["blocks"][0]["reason"], "too_slow");
    tier.is_mute.store(false, Ordering::Release);
    assert_eq!(lab.lookup(0..2), 1);
}

#[test]
fn a_claim_that_is_settled_before_its_blocks_came_is_told() {
    for (declines, reason) in [(false, "too_slow"), (true, "not_worth_it")] {
        let tier = Arc::new(Moody { held: Some(Mutex::default()), ..Moody::new() });
        let lab = Lab::new(Some(&tier));
        lab.dump(lab.namespace, 0..1);
        lab.flood();
        let (claim, settled, _) = lab.claim(0..1);
        assert!(!settled);
        let ends = match declines {
            true => Request::ClaimDecline { claim },
            false => Request::ClaimPoll { claim, settle: true },
        };
        assert_eq!(claimed(lab.session.handle(ends)), (claim, true, 0));
        lab.ensure_one(reason, 0, 0, &Value::Null);
        // The depot's end waits for them.
        let held = tier.held.as_ref().unwrap();
        wait_until("the tier has the read", || !held.lock().unwrap().is_empty());
        let held = std::mem::take(&mut *held.lock().unwrap());
        tier.inner().read(held, Instant::now() + Duration::from_secs(60));
    }
}

#[test]
fn a_hit_that_the_pool_cannot_hold_is_told() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..POOL_BLOCKS + 50);
    let hit = u64::from(lab.hit(0..POOL_BLOCKS + 50));
    assert!(hit < POOL_BLOCKS, "{hit}");
    lab.ensure_one("no_room", hit, hit, &Value::Null);
}

#[test]
fn a_block_that_is_being_stored_is_told() {
    let lab = Lab::new(None);
    let held = lab.reserve(lab.namespace, 0..1);
    assert_eq!((held.len(), lab.hit(0..1)), (1, 0));
    lab.ensure_one("being_stored", 0, 0, &Value::Null);
}

#[test]
fn a_reset_is_told() {
    let lab = Lab::new(None);
    lab.dump(lab.namespace, 0..1);
    lab.depot.direct().reset(&[lab.namespace.handle]).unwrap();
    // Blocks of earlier epochs leave the pool in steps of their own.
    wait_until("the sweep ends", || lab.depot.direct().stats()["namespace_epochs"] == 1);
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("reset", 0, 0, &json!("pool"));
}

#[test]
fn a_namespace_that_was_forgotten_is_told() {
    let lab = Lab::new(None);
    let user = lab.depot.session();
    let open = |session: &Session, model: &str| {
        let canonical = spec(model).canonical().to_owned().into();
        match session.handle(Request::OpenNamespace { canonical }) {
            Response::Namespace { handle, .. } => handle,
            other => panic!("{other:?}"),
        }
    };
    open(&user, "a");
    lab.dump(lab.namespace, 0..1);
    drop(user);
    let mut passing = lab.depot.session();
    for number in 0..=NAMESPACES_MAX {
        if number % 1000 == 999 {
            passing = lab.depot.session();
        }
        open(&passing, &number.to_string());
    }
    drop(passing);
    // Blocks of forgotten namespaces leave the pool in steps of their own; one that is opened before gets them back.
    wait_until("the sweep ends", || lab.depot.direct().stats()["pool_blocks"] == 0);
    let namespace = lab.depot.direct().open_namespace(spec("a").canonical()).unwrap();
    assert_ne!(namespace.handle, lab.namespace.handle, "it was not forgotten");
    let lab = Lab { namespace, ..lab };
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("forgotten", 0, 0, &json!("pool"));
}

#[test]
fn a_removal_is_told() {
    let lab = Lab::new(None);
    lab.dump(lab.namespace, 0..1);
    lab.depot
        .direct()
        .remove(&[BlockKey { namespace: lab.namespace.id, hash: hash(0) }])
        .into_result()
        .unwrap();
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("removed", 0, 0, &json!("pool"));
}

#[test]
fn a_depot_that_remembers_nothing_still_counts() {
    let lab = Lab::with(None, json!({"evicted_blocks_remembered": 0}));
    lab.dump(lab.namespace, 0..1);
    lab.flood();
    assert_eq!(lab.hit(0..1), 0);
    lab.ensure_one("never_stored", 0, 0, &Value::Null);
}

#[test]
fn given_blocks_are_explained() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    let other = lab.depot.direct().open_namespace(spec("b").canonical()).unwrap();
    lab.dump(lab.namespace, 0..2);
    lab.dump(other, 1..2);
    lab.flood();
    lab.dump(lab.namespace, 2..3);
    tier.give_up(vec![BlockKey { namespace: lab.namespace.id, hash: hash(1) }], false);
    let name = hex(&spec("a").root().0);
    let asked: Vec<String> = (0..4).map(|number| hex(&hash(number).0)).collect();
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    let told = lab.depot.direct().explain(&name[..8], &asked).unwrap();
    assert_eq!(told["namespace"], name);
    let at: Vec<&Value> = told["blocks"].as_array().unwrap().iter().map(|block| &block["at"]).collect();
    assert_eq!(at, [&json!("moody"), &Value::Null, &json!("pool"), &Value::Null]);
    let evicted = &told["blocks"][1];
    assert_eq!((&evicted["reason"], &evicted["place"]), (&json!("evicted"), &json!("moody")));
    assert_eq!(evicted["other_namespaces"], json!([hex(&spec("b").root().0)]));
    assert_eq!(told["namespaces"][hex(&spec("b").root().0)]["facts"], json!({"model": "b"}));
    assert_eq!(told["blocks"][3]["reason"], "never_stored");
    assert_eq!(lab.counts(), json!({}));
    let fails =
        |namespace: &str, hashes: &[&str]| lab.depot.direct().explain(namespace, hashes).unwrap_err().kind();
    assert_eq!(fails("0123456789", &[]), ErrorKind::NotFound);
    assert_eq!(fails("", &[]), ErrorKind::Config);
    for bad in ["", "12", &"g".repeat(32), &"é".repeat(16)] {
        assert_eq!(fails(&name, &[bad]), ErrorKind::Config, "{bad}");
    }
    assert_eq!(fails(&name, &vec![asked[0]; 257]), ErrorKind::Config);
}

#[test]
fn the_namespaces_that_are_read_most_are_told_with_what_they_hold() {
    let lab = Lab::new(None);
    let other = lab.depot.direct().open_namespace(spec("b").canonical()).unwrap();
    lab.dump(lab.namespace, 0..3);
    lab.dump(other, 0..2);
    let load = |namespace: OpenNamespace, numbers: std::ops::Range<u64>| {
        let (namespace, hashes) = (namespace.handle, hashes(numbers));
        let session = lab.depot.session();
        let loaded =
            session.handle(Request::Acquire { namespace, hashes, wait_ms: 0, last: true, in_place: false });
        assert!(matches!(loaded, Response::Grants(_)), "{loaded:?}");
    };
    load(other, 0..2);
    load(lab.namespace, 2..4);
    assert_eq!(lab.hit(0..4), 3);
    lab.wait_for_misses(1);
    let stats = lab.depot.direct().stats();
    let top = stats["top_namespaces"].as_array().unwrap();
    let [first, second] = &top[..] else { panic!("{top:?}") };
    assert_eq!((&first["facts"], &second["facts"]), (&json!("model=b"), &json!("model=a")));
    assert_eq!(first["namespace"], hex(&spec("b").root().0));
    let fields = ["pool_blocks", "pool_bytes", "load_blocks", "load_blocks_missed", "load_bytes", "misses"];
    let numbers = |one: &Value| fields.map(|field| one[field].as_u64().unwrap());
    assert_eq!(numbers(first), [2, 8192, 2, 0, 8192, 0]);
    assert_eq!(numbers(second), [3, 12288, 1, 1, 4096, 1]);
    assert_eq!((&first["load_bytes_hour"], &second["load_bytes_hour"]), (&json!(8192), &json!(4096)));
}

#[test]
fn what_only_an_excluded_tier_may_have_is_told_as_excluded() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..2);
    lab.flood();
    tier.is_down.store(true, Ordering::Release);
    let (_, settled, units) = claimed(lab.open_claim(0..2, Some(&[])));
    assert_eq!((settled, units), (true, 0));
    lab.ensure_one("excluded", 0, 0, &Value::Null);
    // What is remembered of the pool says more.
    tier.is_down.store(false, Ordering::Release);
    lab.session.handle(Request::Reset { namespaces: vec![lab.namespace.handle] });
    lab.open_claim(0..2, Some(&[]));
    lab.open_claim(7..9, Some(&[]));
    lab.open_claim(7..9, Some(&["MOODY"]));
    lab.wait_for_misses(4);
    assert_eq!(lab.counts(), json!({"excluded": 3, "never_stored": 1}));
}

#[test]
fn what_an_excluded_tier_lost_is_told_as_excluded_and_what_an_allowed_one_lost_as_lost() {
    let tier = Arc::new(Moody::new());
    let lab = Lab::new(Some(&tier));
    lab.dump(lab.namespace, 0..1);
    lab.flood();
    tier.give_up(vec![BlockKey { namespace: lab.namespace.id, hash: hash(0) }], true);
    wait_until("the loss is known", || {
        lab.open_claim(0..1, Some(&["moody"]));
        lab.counts().get("lost").is_some()
    });
    lab.open_claim(0..1, Some(&[]));
    wait_until("the miss is counted", || lab.counts()["excluded"] == 1);
}

#[test]
fn a_claim_that_names_a_tier_that_is_not_there_is_refused() {
    let lab = Lab::new(Some(&Arc::new(Moody::new())));
    match lab.open_claim(0..1, Some(&["moody", "Slab"])) {
        Response::Failed { kind, message } => {
            assert_eq!(kind, "config");
            assert!(message.contains("no such tier") && message.contains("tier=Slab"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}
