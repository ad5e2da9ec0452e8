//! Namespaces that come and go: all can be opened, forgotten ones are found again in the tiers, and those that a client
//! uses stay. P1, P7.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::direct::{Direct, Now, OpenNamespace};
use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session};
use kvdepot_tier::{FakeTier, Tier};

const POOL: u64 = 4 << 20;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

fn depot(tiers: Vec<Arc<dyn Tier>>) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL}).to_string();
    let pool = PoolMapping::create_private(POOL).unwrap();
    Depot::with_tiers(DepotConfig::from_json(&config).unwrap(), PoolKind::Cache, tiers, pool).unwrap()
}

fn spec(name: usize) -> NamespaceSpec {
    NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), BlockLayout::uniform(1, &[4096]).unwrap())
        .unwrap()
}

fn open(session: &Session, name: usize) -> Response {
    session.handle(Request::OpenNamespace { canonical: spec(name).canonical().into() })
}

fn put(direct: &Direct, namespace: OpenNamespace, byte: u8) {
    let mut slot = direct.reserve(namespace, BlockHash([1; 16])).unwrap().unwrap();
    slot.write_at(0, &[byte; 4096]).unwrap();
    slot.seal(None).unwrap();
}

fn first_byte(direct: &Direct, namespace: OpenNamespace) -> Option<u8> {
    let slots = direct.read(namespace.handle, namespace.id, &[BlockHash([1; 16])], HANG).unwrap();
    slots[0].as_ref().ok().map(|slot| slot.slices(0, 1)[0][0])
}

#[test]
fn ten_thousand_namespaces_of_clients_that_come_and_go() {
    let tier = Arc::new(FakeTier::new(0));
    let depot = depot(vec![tier]);
    let long = depot.direct();
    let kept = long.open_namespace(spec(1_000_000).canonical()).unwrap();
    put(&long, kept, 77);
    for name in 0..10_000 {
        let direct = depot.direct();
        let namespace = direct.open_namespace(spec(name).canonical()).unwrap();
        if name % 1000 == 0 {
            put(&direct, namespace, (name / 1000) as u8);
        }
    }
    let stats = long.stats();
    assert_eq!(stats["namespaces"], NAMESPACES_MAX);
    assert!(stats["namespaces_forgotten"].as_u64().unwrap() >= 10_000 - NAMESPACES_MAX as u64, "{stats}");
    assert_eq!(first_byte(&long, kept), Some(77), "who stayed has its blocks");
    for name in (0..10_000).step_by(1000) {
        let direct = depot.direct();
        let again = direct.open_namespace(spec(name).canonical()).unwrap();
        assert_eq!(first_byte(&direct, again), Some((name / 1000) as u8), "namespace {name}");
    }
}

#[test]
fn a_client_that_takes_all_it_can_leaves_room_for_others() {
    let depot = depot(Vec::new());
    let greedy = depot.user();
    let (one, other) = (depot.session_of(&greedy), depot.session_of(&greedy));
    for name in 0..NAMESPACES_MAX / 2 {
        let session = if name % 2 == 0 { &one } else { &other };
        assert!(matches!(open(session, name), Response::Namespace { .. }), "namespace {name}");
    }
    for session in [&one, &other] {
        let Response::Failed { kind, message } = open(session, 9_999) else { panic!("it was not refused") };
        assert!(kind == "no_space" && message.contains("namespaces_per_client_max=2048"), "{message}");
        assert!(matches!(open(session, 0), Response::Namespace { .. }), "it uses this one");
    }
    for name in 10_000..15_000 {
        assert!(matches!(open(&depot.session(), name), Response::Namespace { .. }), "namespace {name}");
    }
    // Its share is given back together with the last of it.
    drop((one, other));
    let session = depot.session_of(&greedy);
    assert!(matches!(open(&session, 9_999), Response::Failed { .. }));
    drop((session, greedy));
    let session = depot.session();
    for name in 20_000..20_000 + NAMESPACES_MAX / 2 {
        assert!(matches!(open(&session, name), Response::Namespace { .. }), "namespace {name}");
    }
}

#[test]
fn an_id_of_a_forgotten_namespace_is_refused_until_it_is_opened_again() {
    let depot = depot(vec![Arc::new(FakeTier::new(0))]);
    let first = depot.direct();
    let old = first.open_namespace(spec(0).canonical()).unwrap();
    put(&first, old, 5);
    // What has not been written yet is not forgotten.
    let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
    drop(first);
    let other = depot.direct();
    for name in 1..=NAMESPACES_MAX {
        depot.direct().open_namespace(spec(name).canonical()).unwrap();
    }
    assert_eq!(other.namespace(old.id).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(other.reserve(old, BlockHash([2; 16])).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(other.prefix(old.handle, &[1; 16]).unwrap_err().kind(), ErrorKind::NotFound);
    let key = kvdepot_core::BlockKey { namespace: old.id, hash: BlockHash([1; 16]) };
    assert!(!matches!(other.read_now(&[key])[0], Now::Here(_)));
    let again = other.open_namespace(spec(0).canonical()).unwrap();
    assert!(again.handle != old.handle && again.id == old.id);
    assert_eq!(first_byte(&other, again), Some(5), "the tier has it");
}

#[test]
fn who_uses_a_namespace_by_its_id_keeps_it() {
    let depot = depot(Vec::new());
    let first = depot.direct();
    let namespace = first.open_namespace(spec(0).canonical()).unwrap();
    let second = depot.direct();
    assert_eq!(second.namespace(namespace.id).unwrap().handle, namespace.handle);
    drop(first);
    for name in 1..=NAMESPACES_MAX {
        depot.direct().open_namespace(spec(name).canonical()).unwrap();
    }
    assert_eq!(second.namespace(namespace.id).unwrap().handle, namespace.handle);
}
