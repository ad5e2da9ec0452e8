//! P7: what a block costs in memory besides its bytes, counted by an allocator.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::borrow::Cow;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::message::{Grant, Hashes, NamespaceHandle, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, Session};

/// The system's allocator, counting bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is the system allocator's, which keeps the contract; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1_000_000;
const BATCH: u64 = 1000;
const INDEX_BYTES_MAX: usize = 128;

fn dump(session: &Session, namespace: NamespaceHandle, blocks: std::ops::Range<u64>) {
    for first in blocks.step_by(BATCH as usize) {
        let mut hashes = Vec::new();
        for n in first..first + BATCH {
            // Spread as an engine's hashes are.
            hashes.extend_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
            hashes.extend_from_slice(&n.to_le_bytes());
        }
        let hashes = Hashes(Cow::Owned(hashes));
        let Response::Grants(grants) =
            session.handle(Request::Reserve { namespace, hashes, priority: Priority::Normal })
        else {
            panic!("no grants")
        };
        let lease = |grant: &Grant| match grant {
            Grant::Leased { lease, .. } => *lease,
            other => panic!("{other:?}"),
        };
        let leases = grants.iter().map(lease).collect();
        let answer = session.handle(Request::Commit { leases, shards: Shards::All });
        assert!(matches!(answer, Response::Ok), "{answer:?}");
    }
}

#[test]
fn a_million_blocks_take_at_most_128_bytes_of_memory_each_also_when_as_many_were_evicted() {
    // The policies that remember evicted blocks.
    ["s3fifo", "lhd"].into_iter().for_each(take_at_most_128_bytes);
}

fn take_at_most_128_bytes(eviction: &str) {
    let config = serde_json::json!({
        "pipeline": "Cache", "pool_bytes": BLOCKS * BLOCK, "populate": false, "eviction": eviction,
    });
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let session = depot.session();
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"size\"}", layout).unwrap();
    let opened = session.handle(Request::OpenNamespace { canonical: spec.canonical().into() });
    let Response::Namespace { handle, .. } = opened else { panic!("{opened:?}") };
    let before = IN_USE.load(Ordering::Relaxed);
    for round in 0..2 {
        dump(&session, handle, round * BLOCKS..(round + 1) * BLOCKS);
        let Response::Stats(stat) = session.handle(Request::Stats) else { panic!("no stats") };
        let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
        assert_eq!(stat["pool_blocks"], BLOCKS, "{stat}");
        let each = (IN_USE.load(Ordering::Relaxed) - before) as f64 / BLOCKS as f64;
        println!("{eviction}, round {round}: {each:.1} bytes a block");
        assert!(each <= INDEX_BYTES_MAX as f64, "{eviction}, round {round}: {each:.1} bytes a block");
    }
}
