//! What is hot in the pool stays in the tiers: a block that is never read from disk must not be the first to be evicted
//! there.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::path::Path;

use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
use kvdepot_depot::direct::{Direct, Now, OpenNamespace};
use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::{Depot, DepotConfig};

const BLOCK: u64 = 64 << 10;
/// One header page in addition.
const FILE_BYTES: u64 = BLOCK + 4096;

/// A pool with space for all blocks, over a disk with space for four.
fn open(directory: &Path) -> (Depot, Direct, OpenNamespace) {
    let posix = serde_json::json!({
        "directories": [directory],
        "capacity_bytes": 4 * FILE_BYTES,
        "free_floor_percent": 0,
        "shared": false,
        "read_threads": 1,
        "write_threads": 1
    });
    let config = serde_json::json!({"pipeline": "Cache|Posix", "pool_bytes": 8 << 20, "posix": posix});
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"hot\"}", layout).unwrap();
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    (depot, direct, namespace)
}

/// Stores a block and waits until the disk has it.
fn store(depot: &Depot, direct: &Direct, namespace: OpenNamespace, n: u8) {
    direct.reserve(namespace, BlockHash([n; 16])).unwrap().unwrap().seal(None).unwrap();
    let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
}

#[test]
fn a_block_that_is_hot_in_the_pool_is_on_disk_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (depot, direct, namespace) = open(directory.path());
    (0..4).for_each(|n| store(&depot, &direct, namespace, n));
    // The system prompt: read from the pool over and over.
    let key = kvdepot_core::BlockKey { namespace: namespace.id, hash: BlockHash([0; 16]) };
    for _ in 0..3 {
        assert!(matches!(direct.read_now(&[key])[..], [Now::Here(_)]));
    }
    (4..7).for_each(|n| store(&depot, &direct, namespace, n));
    drop(direct);
    drop(depot);
    let (_depot, direct, namespace) = open(directory.path());
    let keys: Vec<_> = (0..7)
        .map(|n| kvdepot_core::BlockKey { namespace: namespace.id, hash: BlockHash([n; 16]) })
        .collect();
    assert_eq!(direct.exist(&keys), [true, false, false, false, true, true, true]);
}
