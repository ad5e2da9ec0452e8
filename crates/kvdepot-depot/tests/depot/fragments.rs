//! A pool in which blocks lie in many pieces: answers that name them fit a frame (P7).
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use kvdepot_core::limits::SLOT_RUNS_MAX;
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::message::{Grant, Hashes, Request, Response, Shards, encode};
use kvdepot_depot::{Depot, DepotConfig, Session};

const PAGE: u64 = 4096;
/// Blocks of `SLOT_RUNS_MAX` pieces: as many as one load asks for at a time.
const BLOCKS: usize = 512;

fn hashes(range: std::ops::Range<usize>) -> Hashes<'static> {
    let hashes = range.map(|n| BlockHash::from_engine(&n.to_le_bytes()).unwrap().0);
    Hashes(hashes.flatten().collect::<Vec<u8>>().into())
}

fn open(session: &Session, name: &str, bytes: u64) -> u64 {
    let layout = BlockLayout::uniform(1, &[bytes]).unwrap();
    let spec = NamespaceSpec::new(&format!("{{\"model\":\"{name}\"}}"), layout).unwrap();
    let answer = session.handle(Request::OpenNamespace { canonical: spec.canonical().into() });
    let Response::Namespace { handle, .. } = answer else { panic!("{answer:?}") };
    handle
}

fn ask(session: &Session, request: Request<'_>) -> Vec<Grant> {
    let answer = session.handle(request);
    encode(1, &answer).expect("the answer fits a frame");
    let Response::Grants(grants) = answer else { panic!("{answer:?}") };
    grants
}

fn leased(grants: &[Grant]) -> Vec<u64> {
    let leases = grants.iter().map(|grant| match grant {
        Grant::Leased { lease, .. } => Some(*lease),
        _ => None,
    });
    leases.flatten().collect()
}

fn store(session: &Session, namespace: u64, mut range: std::ops::Range<usize>) {
    while !range.is_empty() {
        let batch = range.start..range.end.min(range.start + BLOCKS);
        let grants =
            ask(session, Request::Reserve { namespace, hashes: hashes(batch), priority: Priority::Normal });
        let leases = leased(&grants);
        assert!(!leases.is_empty(), "{:?}", grants[0]);
        range.start += leases.len();
        let answer = session.handle(Request::Commit { leases, shards: Shards::All });
        assert!(matches!(answer, Response::Ok), "{answer:?}");
    }
}

fn stat(session: &Session, name: &str) -> u64 {
    let Response::Stats(stats) = session.handle(Request::Stats) else { panic!("no stats") };
    serde_json::from_str::<serde_json::Value>(&stats).unwrap()[name].as_u64().unwrap()
}

#[test]
fn blocks_in_many_pieces_are_acquired_in_as_many_answers_as_it_takes() {
    let pages = 2 * BLOCKS * SLOT_RUNS_MAX;
    // There is space for the last block: dirty blocks may fill only a part of a pool, but without tiers there are none.
    let config = serde_json::json!({
        "pipeline": "Cache", "pool_bytes": pages as u64 * PAGE, "timeout_ms": 10_000, "eviction": "lru",
    });
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let session = depot.session();
    let (keep, hole) = (open(&session, "keep", PAGE), open(&session, "hole", PAGE));
    let large = open(&session, "large", SLOT_RUNS_MAX as u64 * PAGE);
    // Every other page is given back.
    for n in 0..pages / 2 {
        store(&session, keep, n..n + 1);
        store(&session, hole, n..n + 1);
    }
    session.handle(Request::Reset { namespaces: vec![hole] });
    // Its space is freed in the background.
    while stat(&session, "pool_blocks") > pages as u64 / 2 {
        std::thread::yield_now();
    }
    store(&session, large, 0..BLOCKS);
    let (mut rest, mut answers) = (0..BLOCKS, 0);
    while !rest.is_empty() {
        let request = Request::Acquire {
            namespace: large,
            hashes: hashes(rest.clone()),
            wait_ms: 0,
            last: true,
            in_place: false,
        };
        let grants = ask(&session, request);
        let leases = leased(&grants);
        assert!(!leases.is_empty(), "{:?}", grants[0]);
        for (n, grant) in grants.iter().enumerate() {
            match grant {
                Grant::Leased { runs, .. } => {
                    assert_eq!((n < leases.len(), runs.len()), (true, SLOT_RUNS_MAX))
                }
                Grant::Refused { kind } => assert_eq!(kind, "no_space", "asked for again, and not missed"),
                Grant::Have => panic!("an answer to another request"),
            }
        }
        rest.start += leases.len();
        answers += 1;
        session.handle(Request::Release { leases });
    }
    assert!(answers > 1, "the pool is not in pieces");
    assert_eq!((stat(&session, "load_blocks"), stat(&session, "load_blocks_missed")), (BLOCKS as u64, 0));
}
