//! What a block costs on its way to a tier and back if the tier itself costs only a copy: a `Staging` pool over `Fake`,
//! with many blocks per request and with one. `cargo run --release -p kvdepot-depot --example tier_cost -- [ROUNDS]`.
#![allow(clippy::unwrap_used, reason = "a measurement stops where it cannot go on")]

use std::borrow::Cow;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::message::{Grant, Hashes, NamespaceHandle, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, Session};

const BLOCK: u64 = 4096;
/// Blocks of one round.
const BLOCKS: u64 = 8192;

fn hashes(first: u64, count: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count as usize * 16);
    for n in first..first + count {
        bytes.extend_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        bytes.extend_from_slice(&n.to_le_bytes());
    }
    bytes
}

/// Dumps blocks, `batch` per request, and waits until the tier has them.
fn dump(session: &Session, namespace: NamespaceHandle, first: u64, batch: u64) -> Duration {
    let began = Instant::now();
    for at in (first..first + BLOCKS).step_by(batch as usize) {
        let hashes = Hashes(Cow::Owned(hashes(at, batch)));
        let Response::Grants(grants) =
            session.handle(Request::Reserve { namespace, hashes, priority: Priority::Normal })
        else {
            panic!("no grants")
        };
        let leases = grants.iter().filter_map(|grant| match grant {
            Grant::Leased { lease, .. } => Some(*lease),
            _ => None,
        });
        let answer = session.handle(Request::Commit { leases: leases.collect(), shards: Shards::All });
        assert!(matches!(answer, Response::Ok), "{answer:?}");
    }
    let drained = session.handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
    began.elapsed()
}

/// Brings the blocks into the pool again.
fn load(depot: &Depot, namespace: NamespaceHandle, first: u64, batch: u64) -> Duration {
    let direct = depot.direct();
    let id = kvdepot_core::NamespaceId(opened(&depot.session()).1);
    let wait = Duration::from_secs(60);
    let began = Instant::now();
    for at in (first..first + BLOCKS).step_by(batch as usize) {
        let bytes = hashes(at, batch);
        let wanted: Vec<_> =
            bytes.chunks_exact(16).map(|hash| kvdepot_core::BlockHash(hash.try_into().unwrap())).collect();
        let slots = direct.read(namespace, id, &wanted, wait).unwrap();
        assert!(slots.iter().all(Result::is_ok));
    }
    began.elapsed()
}

fn opened(session: &Session) -> (NamespaceHandle, [u8; 16]) {
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"cost\"}", layout).unwrap();
    match session.handle(Request::OpenNamespace { canonical: spec.canonical().into() }) {
        Response::Namespace { handle, id, .. } => (handle, id),
        other => panic!("{other:?}"),
    }
}

fn main() {
    let rounds: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(15);
    let config = serde_json::json!({"pipeline": "Staging|Fake", "pool_bytes": 256 << 20});
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let session = depot.session();
    let (namespace, _) = opened(&session);
    let mut next = 0;
    for batch in [1, 256] {
        let (mut dumps, mut loads) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            dumps.push(dump(&session, namespace, next, batch));
            loads.push(load(&depot, namespace, next, batch));
            next += BLOCKS;
        }
        let each = |mut times: Vec<Duration>| {
            times.sort();
            times[times.len() / 2].as_nanos() as f64 / BLOCKS as f64 / 1e3
        };
        println!(
            "{{\"blocks_per_request\": {batch}, \"dump_us_per_block\": {:.2}, \"load_us_per_block\": {:.2}}}",
            each(dumps),
            each(loads)
        );
    }
}
