//! Depots that share a bucket: one on an empty disk has what another one stored, and their resets hold for both.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::path::Path;
use std::time::Duration;

use crate::bucket_server::{Act, BucketServer, until};
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
use kvdepot_depot::direct::{OpenNamespace, ReadSlot};
use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::{Depot, DepotConfig};

const BLOCK: u64 = 64 << 10;
/// Only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// Starts a depot that packs no blocks: another one sees each as soon as it is stored.
fn start(server: &BucketServer, disk: Option<&Path>) -> (Depot, OpenNamespace) {
    start_with(server, disk, 0)
}

fn start_with(server: &BucketServer, disk: Option<&Path>, pack_mb: u64) -> (Depot, OpenNamespace) {
    let object = server.config("kv");
    let mut config = serde_json::json!({
        "pipeline": "Cache|Object",
        "pool_bytes": 4 << 20,
        "object": {
            "url": format!("s3://{}/{}", object.bucket, object.prefix),
            "endpoint": object.endpoint,
            "credentials_file": object.credentials_file,
            "absent_ttl_ms": 0,
            "timeout_ms": 30_000,
            "pack_mb": pack_mb,
        },
    });
    if let Some(disk) = disk {
        config["pipeline"] = "Cache|Posix|Object".into();
        config["placement"] = serde_json::json!({"Posix": {"promote": true}});
        config["posix"] = serde_json::json!({"directories": [disk], "free_floor_percent": 0});
    }
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let namespace = open(&depot);
    (depot, namespace)
}

fn open(depot: &Depot) -> OpenNamespace {
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"bucket\"}", layout).unwrap();
    depot.direct().open_namespace(spec.canonical()).unwrap()
}

fn bytes(n: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| (at as u8).wrapping_mul(31).wrapping_add(n)).collect()
}

/// Stores blocks, and waits until all tiers have them.
fn store(depot: &Depot, namespace: OpenNamespace, blocks: std::ops::Range<u8>) {
    for n in blocks {
        let mut slot = depot.direct().reserve(namespace, BlockHash([n; 16])).unwrap().unwrap();
        slot.write_at(0, &bytes(n)).unwrap();
        slot.seal(None).unwrap();
    }
    let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
}

/// Which of the first blocks a load brings; what it brings is right (P1).
fn load(depot: &Depot, namespace: OpenNamespace, count: u8) -> Vec<bool> {
    let hashes: Vec<BlockHash> = (0..count).map(|n| BlockHash([n; 16])).collect();
    let slots = depot.direct().read(namespace.handle, namespace.id, &hashes, HANG).unwrap();
    let right = |(n, slot): (u8, Result<ReadSlot, _>)| {
        let Ok(slot) = slot else { return false };
        let read = slot.slices(0, slot.block_bytes()).concat();
        assert!(read == bytes(n), "block {n} came back with other bytes");
        true
    };
    (0..count).zip(slots).map(right).collect()
}

#[test]
fn a_depot_on_an_empty_disk_has_what_another_one_stored() {
    let (server, one, two) =
        (BucketServer::start(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (first, namespace) = start(&server, Some(one.path()));
    store(&first, namespace, 0..5);
    drop(first);
    let (second, namespace) = start(&server, Some(two.path()));
    assert_eq!(load(&second, namespace, 6), [true, true, true, true, true, false]);
    // By now its own disk has them, too: the bucket is not asked any more.
    store(&second, namespace, 5..6);
    server.plan(
        |request| if request.method == "GET" && request.is_block() { Act::Refuse(500) } else { Act::Serve },
    );
    second.direct().evict_to_percent(0.0);
    assert_eq!(load(&second, namespace, 6), [true; 6]);
}

#[test]
fn a_bucket_that_is_away_costs_misses_and_the_disk_serves() {
    let (mut server, disk) = (BucketServer::start(), tempfile::tempdir().unwrap());
    let (depot, namespace) = start(&server, Some(disk.path()));
    store(&depot, namespace, 0..3);
    server.stop();
    depot.direct().evict_to_percent(0.0);
    assert_eq!(load(&depot, namespace, 4), [true, true, true, false]);
    server.come_back();
    assert_eq!(load(&depot, namespace, 4), [true, true, true, false]);
}

#[test]
fn a_reset_of_one_depot_holds_for_the_other() {
    let server = BucketServer::start();
    let ((one, ours), (two, theirs)) = (start(&server, None), start(&server, None));
    store(&one, ours, 0..2);
    assert_eq!(load(&two, theirs, 2), [true, true]);
    one.direct().advance(ours.handle).unwrap();
    // Opening it again has the tiers asked, in the background.
    until("the other one follows", || open(&two).epoch > theirs.epoch);
    let after = open(&two);
    assert_eq!(load(&two, after, 2), [false, false]);
    store(&two, after, 0..1);
    assert_eq!(load(&one, open(&one), 2), [true, false]);
    until("what lay in the past epoch goes", || server.names("/blocks/").len() == 1);
}

#[test]
fn who_follows_is_told_of_blocks_in_the_bucket() {
    for pack_mb in [0, 8] {
        told_of_blocks_in_the_bucket(pack_mb);
    }
}

fn told_of_blocks_in_the_bucket(pack_mb: u64) {
    const STORED_IN_THE_BUCKET: u8 = 0x81;
    let server = BucketServer::start();
    let (depot, namespace) = start_with(&server, None, pack_mb);
    let session = depot.session();
    let begun = session.handle(Request::Events { namespaces: vec![], after: None });
    let Response::Followed { upto, places } = begun else { panic!("{begun:?}") };
    assert_eq!(places.len(), 2, "{places:?}");
    store(&depot, namespace, 0..4);
    let read = session.handle(Request::Events { namespaces: vec![namespace.handle], after: Some(upto) });
    let Response::Events { events, is_gap: false, .. } = read else { panic!("{read:?}") };
    let in_bucket = events.as_chunks::<19>().0.iter().filter(|event| event[0] == STORED_IN_THE_BUCKET);
    let mut told: Vec<u8> = in_bucket.map(|event| event[3]).collect();
    told.sort_unstable();
    assert_eq!(told, [0, 1, 2, 3]);
    let (mut listed, mut from) = (0, Some(0));
    while let Some(at) = from {
        let piece = session.handle(Request::Snapshot { namespace: namespace.handle, place: 1, from: at });
        let Response::Snapshot { hashes, next, .. } = piece else { panic!("{piece:?}") };
        (listed, from) = (listed + hashes.len(), next);
    }
    assert_eq!(listed, 4 * 16);
}
