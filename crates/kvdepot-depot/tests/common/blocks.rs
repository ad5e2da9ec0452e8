//! Depots over a test's own tiers, and blocks of one page in them.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::direct::OpenNamespace;
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use kvdepot_tier::Tier;

const POOL: u64 = 8 << 20;
/// Reached only by a hang.
pub(crate) const HANG: Duration = Duration::from_secs(60);

pub(crate) fn depot(kind: PoolKind, tiers: Vec<Arc<dyn Tier>>, timeout_ms: u64) -> Depot {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": timeout_ms});
    let pool = PoolMapping::create_private(POOL).unwrap();
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    Depot::with_tiers(config, kind, tiers, pool).unwrap()
}

pub(crate) fn spec(model: u64) -> NamespaceSpec {
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    NamespaceSpec::new(&format!("{{\"model\":\"{model}\"}}"), layout).unwrap()
}

pub(crate) fn open(depot: &Depot) -> OpenNamespace {
    depot.direct().open_namespace(spec(0).canonical()).unwrap()
}

pub(crate) fn hash(n: u64) -> BlockHash {
    let mut hash = [7; 16];
    hash[..8].copy_from_slice(&n.to_le_bytes());
    BlockHash(hash)
}

pub(crate) fn key(namespace: OpenNamespace, n: u64) -> BlockKey {
    BlockKey { namespace: namespace.id, hash: hash(n) }
}

/// Stores this many blocks in one request, and waits until the tiers have them.
pub(crate) fn dump(depot: &Depot, namespace: OpenNamespace, blocks: u64) {
    let session = depot.session();
    let hashes = Hashes(Cow::Owned((0..blocks).flat_map(|n| hash(n).0).collect()));
    let reserved =
        session.handle(Request::Reserve { namespace: namespace.handle, hashes, priority: Priority::Normal });
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
