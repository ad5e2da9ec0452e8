//! What a step of the machine asks of a tier reaches it in few calls, in the step's order; a removal ends when the tier says
//! so; a tier that hangs costs one wait for all namespaces. P1, P2.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, ErrorKind, NamespaceId, NamespaceSpec};
use kvdepot_depot::direct::OpenNamespace;
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use kvdepot_tier::{Done, FakeTier, Presence, ReadItem, Tier, TierUsage, WriteItem};

const POOL: u64 = 8 << 20;
const BLOCKS: u64 = 64;
/// Only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// What a tier was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Read(Vec<BlockKey>),
    Write(Vec<BlockKey>),
    Remove(Vec<BlockKey>),
}

/// A tier that keeps what it is asked for in mind, and can be told to end nothing.
struct Recorder {
    inner: FakeTier,
    calls: Mutex<Vec<Call>>,
    /// Where removals go that the test ends.
    removals: Option<Sender<(Vec<BlockKey>, Done<()>)>>,
    /// Namespaces are opened by nobody.
    is_hung: bool,
}

impl Recorder {
    fn new() -> Self {
        Self { inner: FakeTier::new(0), calls: Mutex::default(), removals: None, is_hung: false }
    }

    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

impl Tier for Recorder {
    fn name(&self) -> &'static str {
        "Recorder"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        if self.is_hung {
            // As a tier whose thread is gone: nobody answers.
            return std::mem::forget(done);
        }
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
        self.note(Call::Read(reads.iter().map(|read| read.key).collect()));
        self.inner.read(reads, deadline);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        self.note(Call::Write(writes.iter().map(|write| write.key).collect()));
        self.inner.write(writes, deadline);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.note(Call::Remove(keys.clone()));
        match &self.removals {
            Some(removals) => removals.send((keys, done)).unwrap(),
            None => self.inner.remove(keys, done),
        }
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

fn depot(kind: PoolKind, tier: &Arc<Recorder>, timeout_ms: u64) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": timeout_ms});
    let pool = PoolMapping::create_private(POOL).unwrap();
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    Depot::with_tiers(config, kind, vec![Arc::clone(tier) as _], pool).unwrap()
}

fn spec(model: u64) -> NamespaceSpec {
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    NamespaceSpec::new(&format!("{{\"model\":\"{model}\"}}"), layout).unwrap()
}

fn hash(n: u64) -> BlockHash {
    let mut hash = [7; 16];
    hash[..8].copy_from_slice(&n.to_le_bytes());
    BlockHash(hash)
}

fn key(namespace: OpenNamespace, n: u64) -> BlockKey {
    BlockKey { namespace: namespace.id, hash: hash(n) }
}

/// Stores blocks by one request.
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
}

fn longest(calls: &[Call]) -> (usize, usize) {
    let (mut reads, mut writes) = (0, 0);
    for call in calls {
        match call {
            Call::Read(keys) => reads = reads.max(keys.len()),
            Call::Write(keys) => writes = writes.max(keys.len()),
            Call::Remove(_) => {}
        }
    }
    (reads, writes)
}

#[test]
fn blocks_of_one_request_reach_the_tier_in_batches() {
    let tier = Arc::new(Recorder::new());
    let depot = depot(PoolKind::Staging, &tier, 60_000);
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec(0).canonical()).unwrap();
    dump(&depot, namespace);
    let hashes: Vec<BlockHash> = (0..BLOCKS).map(hash).collect();
    let slots = direct.read(namespace.handle, namespace.id, &hashes, HANG).unwrap();
    assert!(slots.iter().all(Result::is_ok));
    let calls = tier.calls.lock().unwrap().clone();
    let (reads, writes) = longest(&calls);
    assert!(reads > 1 && writes > 1, "{calls:?}");
}

#[test]
fn a_removal_ends_when_the_tier_has_forgotten() {
    let (send, removals): (_, Receiver<(Vec<BlockKey>, Done<()>)>) = unbounded();
    let tier = Arc::new(Recorder { removals: Some(send), ..Recorder::new() });
    let depot = depot(PoolKind::Cache, &tier, 600_000);
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec(0).canonical()).unwrap();
    dump(&depot, namespace);
    std::thread::scope(|scope| {
        let (done, ended) = unbounded();
        scope.spawn(move || done.send(direct.remove(&[key(namespace, 0), key(namespace, 1)])).unwrap());
        let (keys, forget) = removals.recv_timeout(HANG).unwrap();
        assert!(ended.try_recv().is_err(), "the tier still has the block");
        tier.inner.remove(keys.clone(), forget);
        let mut keys = keys;
        while keys.len() < 2 {
            let (more, forget) = removals.recv_timeout(HANG).unwrap();
            tier.inner.remove(more.clone(), forget);
            keys.extend(more);
        }
        keys.sort();
        let mut expected = vec![key(namespace, 0), key(namespace, 1)];
        expected.sort();
        assert_eq!(keys, expected);
        assert_eq!(ended.recv_timeout(HANG).unwrap().into_result().unwrap(), [true, true]);
    });
}

/// One wait, though 40 namespaces are opened; more would be 40 deadlines.
#[test]
fn a_tier_that_hangs_costs_one_wait_for_all_namespaces() {
    let tier = Arc::new(Recorder { is_hung: true, ..Recorder::new() });
    let fine = Arc::new(Recorder::new());
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": 2_000});
    let pool = PoolMapping::create_private(POOL).unwrap();
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let tiers: Vec<Arc<dyn Tier>> = vec![Arc::clone(&tier) as _, Arc::clone(&fine) as _];
    let depot = Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap();
    let specs: Vec<String> = (0..40).map(|n| spec(n).canonical().to_owned()).collect();
    let began = Instant::now();
    let error = depot.direct().open_namespaces(&specs).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(began.elapsed() < HANG, "40 waits of two seconds are 80");
}
