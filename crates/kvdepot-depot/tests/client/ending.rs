//! Drains, the end of a depot, and its death by a panic (P2): all are bounded, and nothing is lost silently.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::scripted::{Act, Held, Scripted};
use crossbeam_channel::{Receiver, unbounded};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::client::Attachment;
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session, Unwritten};

/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);
const SLOT_BYTES: u64 = 4096;

fn depot(kind: PoolKind, read: Act, write: Act, drain_timeout_ms: u64) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache|Fake", "pool_bytes": 4 << 20, "drain_timeout_ms": drain_timeout_ms});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    Depot::with_tiers(config, kind, vec![Scripted::tier(read, write)], pool).unwrap()
}

fn held(drain_timeout_ms: u64) -> (Depot, Receiver<Held>) {
    let (sender, receiver) = unbounded();
    (depot(PoolKind::Cache, Act::Pass, Act::Hold(sender), drain_timeout_ms), receiver)
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::new("{\"model\":\"ending\"}", BlockLayout::uniform(1, &[SLOT_BYTES]).unwrap()).unwrap()
}

fn open(session: &Session) -> u64 {
    let opened = session.handle(Request::OpenNamespace { canonical: spec().canonical().into() });
    let Response::Namespace { handle, .. } = opened else { panic!("{opened:?}") };
    handle
}

fn hashes(block: u64) -> Hashes<'static> {
    Hashes([block.to_le_bytes(), [7; 8]].concat().into())
}

/// Stores a block with whatever bytes the pool holds.
fn seal(session: &Session, namespace: u64, block: u64) {
    let reserved =
        session.handle(Request::Reserve { namespace, hashes: hashes(block), priority: Priority::Normal });
    let Response::Grants(grants) = reserved else { panic!("{reserved:?}") };
    let [Grant::Leased { lease, .. }] = grants[..] else { panic!("{grants:?}") };
    let committed = session.handle(Request::Commit { leases: vec![lease], shards: Shards::All });
    assert!(matches!(committed, Response::Ok), "{committed:?}");
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come true");
        std::thread::yield_now();
    }
}

fn is_unavailable(response: &Response) -> bool {
    matches!(response, Response::Failed { kind, .. } if kind == "unavailable")
}

/// Under load there is always a write in flight: a block is stored before the previous one has been written.
#[test]
fn a_drain_waits_for_what_was_stored_before_it_only() {
    let (depot, writes) = held(0);
    let (session, draining) = (depot.session(), depot.session());
    let namespace = open(&session);
    seal(&session, namespace, 0);
    std::thread::scope(|scope| {
        let drain = scope.spawn(|| draining.handle(Request::Drain { wait_ms: 30_000 }));
        for block in 1.. {
            if drain.is_finished() {
                break;
            }
            seal(&session, namespace, block);
            writes.recv_timeout(HANG).unwrap().finish();
        }
        let drained = drain.join().unwrap();
        assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
    });
    writes.recv_timeout(HANG).unwrap().finish();
}

#[test]
fn a_drain_waits_for_a_write_under_way() {
    let (depot, writes) = held(0);
    let session = depot.session();
    let namespace = open(&session);
    seal(&session, namespace, 0);
    let write = writes.recv_timeout(HANG).unwrap();
    assert!(matches!(session.handle(Request::Drain { wait_ms: 1 }), Response::Drained(false)));
    write.finish();
    assert!(matches!(session.handle(Request::Drain { wait_ms: 0 }), Response::Drained(true)));
}

/// Blocks of a reset namespace are dropped, including those that a reader still leases.
#[test]
fn a_drain_does_not_wait_for_what_was_given_up() {
    let (depot, writes) = held(0);
    let session = depot.session();
    let namespace = open(&session);
    let blocks = 40;
    (0..blocks).for_each(|block| seal(&session, namespace, block));
    let leased = session.handle(Request::Acquire {
        namespace,
        hashes: hashes(blocks - 1),
        wait_ms: 0,
        last: true,
        in_place: false,
    });
    assert!(matches!(&leased, Response::Grants(grants) if matches!(grants[..], [Grant::Leased { .. }])));
    let under_way: Vec<Held> = (0..32).map(|_| writes.recv_timeout(HANG).unwrap()).collect();
    session.handle(Request::Reset { namespaces: vec![namespace] });
    under_way.into_iter().for_each(Held::finish);
    assert!(matches!(session.handle(Request::Drain { wait_ms: 30_000 }), Response::Drained(true)));
    assert_eq!(depot.finish(), Unwritten::default());
}

#[test]
fn the_end_of_a_depot_ends_drains() {
    let (depot, writes) = held(0);
    let session = depot.session();
    let namespace = open(&session);
    seal(&session, namespace, 0);
    std::thread::scope(|scope| {
        let drain = scope.spawn(|| session.handle(Request::Drain { wait_ms: u32::MAX }));
        depot.end_waits();
        let end = Instant::now() + HANG;
        while !drain.is_finished() && Instant::now() < end {
            std::thread::yield_now();
        }
        let ended = drain.is_finished();
        writes.recv_timeout(HANG).unwrap().finish();
        let drained = drain.join().unwrap();
        assert!(ended && matches!(drained, Response::Drained(false)), "{ended}, {drained:?}");
    });
}

#[test]
fn what_could_not_be_written_is_counted() {
    let (depot, writes) = held(1);
    let session = depot.session();
    let namespace = open(&session);
    (0..3).for_each(|block| seal(&session, namespace, block));
    writes.recv_timeout(HANG).unwrap().finish();
    let lost = depot.finish();
    assert_eq!(lost, Unwritten { blocks: 2, bytes: 2 * SLOT_BYTES, refused: 0 });
    assert_eq!(depot.finish(), Unwritten::default(), "said once");
    (0..2).for_each(|_| writes.recv_timeout(HANG).unwrap().finish());
}

#[test]
fn what_is_written_in_time_is_not_lost() {
    let (depot, writes) = held(u64::from(u32::MAX));
    let session = depot.session();
    let namespace = open(&session);
    (0..3).for_each(|block| seal(&session, namespace, block));
    std::thread::scope(|scope| {
        scope.spawn(|| (0..3).for_each(|_| writes.recv_timeout(HANG).unwrap().finish()));
        assert_eq!(depot.finish(), Unwritten::default());
    });
}

/// The depot is dead then, and no call in its process waits for it or fails in any other way.
#[test]
fn a_panic_in_a_write_makes_every_call_a_miss() {
    let depot = depot(PoolKind::Cache, Act::Pass, Act::Panic, u64::from(u32::MAX));
    let session = depot.session();
    let namespace = open(&session);
    seal(&session, namespace, 0);
    eventually("the depot's death", || depot.is_dead());
    let requests = [
        Request::Lookup { namespace, hashes: hashes(0) },
        Request::Acquire { namespace, hashes: hashes(0), wait_ms: 10_000, last: true, in_place: false },
        Request::Reserve { namespace, hashes: hashes(1), priority: Priority::Normal },
        Request::Drain { wait_ms: u32::MAX },
        Request::Reset { namespaces: vec![namespace] },
        Request::Stats,
    ];
    for request in requests {
        let response = session.handle(request.clone());
        assert!(is_unavailable(&response), "{request:?}: {response:?}");
    }
    drop(session);
    let attachment = Attachment::embedded(depot).unwrap();
    assert!(!attachment.attached());
    assert!(attachment.drain(HANG).is_err());
    // Waits neither for writes that nobody will do any more, nor for the thread that panicked.
    drop(attachment);
}

#[test]
fn a_panic_in_a_read_makes_every_call_a_miss() {
    let depot = depot(PoolKind::Staging, Act::Panic, Act::Pass, u64::from(u32::MAX));
    let session = Arc::new(depot.session());
    let namespace = open(&session);
    seal(&session, namespace, 0);
    assert!(matches!(session.handle(Request::Drain { wait_ms: u32::MAX }), Response::Drained(true)));
    let asking = Arc::clone(&session);
    // It is unspecified whether the read begins on this thread or on the depot's.
    let _ = std::thread::spawn(move || {
        asking.handle(Request::Acquire {
            namespace,
            hashes: hashes(0),
            wait_ms: 1,
            last: true,
            in_place: false,
        })
    })
    .join();
    eventually("the depot's death", || depot.is_dead());
    assert!(is_unavailable(&session.handle(Request::Lookup { namespace, hashes: hashes(0) })));
}
