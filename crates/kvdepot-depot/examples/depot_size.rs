//! Measures a depot of many blocks in this process: lookups, idle and under load, and how long its lock is held.
//!
//! `cargo run --release -p kvdepot-depot --example depot_size -- [BLOCKS] [LOOKUPS]` (by default 1,000,000 blocks and
//! 20,000 lookups per thread). Blocks have 4 KiB that nobody touches, so the memory in use is what the index takes.
//! Prints one JSON object.
#![allow(clippy::unwrap_used, reason = "a measurement stops where it cannot go on")]

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::message::{ClaimGroup, Grant, Hashes, NamespaceHandle, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, Session};

const BLOCK: u64 = 4096;
/// Blocks per reserve request.
const BATCH: u64 = 1024;
/// Hashes per lookup.
const PREFIX: u64 = 128;
/// Places of the claim.
const PLACES: u64 = 100_000;

fn hashes(first: u64, count: u64) -> Hashes<'static> {
    let mut bytes = Vec::with_capacity(count as usize * 16);
    for n in first..first + count {
        // Spread as an engine's hashes are.
        bytes.extend_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        bytes.extend_from_slice(&n.to_le_bytes());
    }
    Hashes(Cow::Owned(bytes))
}

fn open(session: &Session) -> NamespaceHandle {
    let layout = BlockLayout::uniform(1, &[BLOCK]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"size\"}", layout).unwrap();
    match session.handle(Request::OpenNamespace { canonical: spec.canonical().into() }) {
        Response::Namespace { handle, .. } => handle,
        other => panic!("{other:?}"),
    }
}

fn dump(session: &Session, namespace: NamespaceHandle, first: u64, count: u64) {
    let mut at = first;
    while at < first + count {
        let batch = BATCH.min(first + count - at);
        let Response::Grants(grants) = session.handle(Request::Reserve {
            namespace,
            hashes: hashes(at, batch),
            priority: Priority::Normal,
        }) else {
            panic!("no grants")
        };
        let leases = grants.iter().filter_map(|grant| match grant {
            Grant::Leased { lease, .. } => Some(*lease),
            _ => None,
        });
        let answer = session.handle(Request::Commit { leases: leases.collect(), shards: Shards::All });
        assert!(matches!(answer, Response::Ok), "{answer:?}");
        at += batch;
    }
}

fn load(session: &Session, namespace: NamespaceHandle, first: u64) {
    let grants = acquire(session, namespace, first);
    let leases = grants.iter().filter_map(|grant| match grant {
        Grant::Leased { lease, .. } => Some(*lease),
        _ => None,
    });
    session.handle(Request::Release { leases: leases.collect() });
}

/// Leases blocks, until the session ends or they are released.
fn acquire(session: &Session, namespace: NamespaceHandle, first: u64) -> Vec<Grant> {
    let request = Request::Acquire {
        namespace,
        hashes: hashes(first, PREFIX),
        wait_ms: 1000,
        last: true,
        in_place: false,
    };
    let Response::Grants(grants) = session.handle(request) else { panic!("no grants") };
    grants
}

/// Waits until the blocks of a reset namespace have left the pool; returns the longest time that the lock was held
/// meanwhile.
fn wait_until_empty(depot: &Depot) -> serde_json::Value {
    let mut longest = holds(depot);
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = holds(depot);
        for (us, what) in [("real_us", "real"), ("cpu_us", "cpu")] {
            if now[us].as_u64() > longest[us].as_u64() {
                (longest[us], longest[what]) = (now[us].clone(), now[what].clone());
            }
        }
        if now["blocks"] == 0 {
            return longest;
        }
    }
}

/// The time of each lookup in microseconds, sorted.
fn lookups(depot: &Arc<Depot>, blocks: u64, threads: u64, each: u64) -> (Vec<f64>, f64) {
    let begun = Instant::now();
    let running: Vec<_> = (0..threads)
        .map(|thread| {
            let depot = Arc::clone(depot);
            std::thread::spawn(move || {
                let session = depot.session();
                let namespace = open(&session);
                let mut seed = thread.wrapping_mul(0x2545_F491_4F6C_DD1D) + 1;
                let mut took = Vec::with_capacity(each as usize);
                for _ in 0..each {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let first = (seed >> 33) % (blocks - PREFIX);
                    let hashes = hashes(first, PREFIX);
                    let asked = Instant::now();
                    let answer =
                        session.handle(Request::LookupPrefix { namespaces: vec![namespace], hashes });
                    took.push(asked.elapsed().as_secs_f64() * 1e6);
                    assert!(matches!(answer, Response::Prefix(_)), "{answer:?}");
                }
                took
            })
        })
        .collect();
    let mut all: Vec<f64> = running.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    let rate = all.len() as f64 / begun.elapsed().as_secs_f64();
    all.sort_by(f64::total_cmp);
    (all, rate)
}

fn describe((took, rate): &(Vec<f64>, f64)) -> serde_json::Value {
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    serde_json::json!({"p50_us": at(0.5), "p99_us": at(0.99), "per_s": *rate as u64})
}

/// The longest times that the machine's lock was held since the last call, of the last one to two minutes, in microseconds of
/// real and of processor time, and what took them.
fn holds(depot: &Depot) -> serde_json::Value {
    let stats = depot.direct().stats();
    depot.direct().forget_holds();
    serde_json::json!({
        "real_us": stats["lock_hold_max_us"], "real": stats["lock_hold_max_event"],
        "cpu_us": stats["lock_hold_cpu_max_us"], "cpu": stats["lock_hold_cpu_max_event"],
        "blocks": stats["pool_blocks"],
    })
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn claim(session: &Session, namespace: NamespaceHandle) -> f64 {
    let begun = Instant::now();
    let mut at = 0;
    while at + 4096 < PLACES {
        session.handle(Request::ClaimHashes { hashes: hashes(at, 4096) });
        at += 4096;
    }
    let group = ClaimGroup { namespaces: vec![namespace], window_blocks: 0, hashes_per_block: 1 };
    let request = Request::ClaimOpen {
        groups: vec![group],
        hashes: hashes(at, PLACES - at),
        skip: 0,
        limit: PLACES as u32,
        tiers: None,
        label: "".into(),
    };
    let mut answer = session.handle(request);
    let claim = loop {
        let Response::Claim { claim, settled, units, .. } = answer else { panic!("{answer:?}") };
        if settled {
            assert_eq!(u64::from(units), PLACES);
            break claim;
        }
        answer = session.handle(Request::ClaimPoll { claim, settle: false });
    };
    let took = begun.elapsed().as_secs_f64() * 1e3;
    session.handle(Request::ClaimRelease { claim, tell_times: false });
    took
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>().unwrap());
    let blocks = arguments.next().unwrap_or(1_000_000).max(2 * PLACES);
    let each = arguments.next().unwrap_or(20_000);
    let config = serde_json::json!({
        "pipeline": "Cache", "pool_bytes": blocks * BLOCK, "populate": false, "timeout_ms": 60_000,
    });
    let before = resident_bytes();
    let depot = Arc::new(Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap());
    let session = depot.session();
    let namespace = open(&session);
    let begun = Instant::now();
    dump(&session, namespace, 0, blocks);
    let filled_s = begun.elapsed().as_secs_f64();
    let index_bytes = (resident_bytes() - before) as f64 / blocks as f64;
    let mut out = serde_json::json!({
        "blocks": blocks, "fill_s": filled_s, "index_bytes_per_block": index_bytes, "hold_fill": holds(&depot),
    });
    for threads in [1, 16, 64] {
        let each = each / threads;
        out[format!("lookup_idle_{threads}")] = describe(&lookups(&depot, blocks, threads, each));
        let stop = Arc::new(AtomicBool::new(false));
        let loads: Vec<_> = (0..2)
            .map(|kind| {
                let (depot, stop) = (Arc::clone(&depot), Arc::clone(&stop));
                std::thread::spawn(move || {
                    let session = depot.session();
                    let namespace = open(&session);
                    let mut at = blocks + threads * 1_000_000_000;
                    while !stop.load(Ordering::Relaxed) {
                        match kind {
                            0 => dump(&session, namespace, at, BATCH),
                            _ => load(&session, namespace, at % (blocks - PREFIX)),
                        }
                        at += BATCH;
                    }
                })
            })
            .collect();
        out[format!("lookup_loaded_{threads}")] = describe(&lookups(&depot, blocks, threads, each));
        out[format!("hold_traffic_{threads}")] = holds(&depot);
        stop.store(true, Ordering::Relaxed);
        loads.into_iter().for_each(|thread| thread.join().unwrap());
    }
    let begun = Instant::now();
    session.handle(Request::Reset { namespaces: vec![namespace] });
    out["reset_ms"] = (begun.elapsed().as_secs_f64() * 1e3).into();
    let hold_reset = wait_until_empty(&depot);
    out["reset_all_gone_s"] = begun.elapsed().as_secs_f64().into();
    out["hold_reset"] = hold_reset;
    dump(&session, namespace, 0, blocks);
    holds(&depot);
    out["claim_ms"] = claim(&session, namespace).into();
    std::thread::sleep(Duration::from_millis(200));
    out["hold_claim"] = holds(&depot);
    // As many leases as are loaded here, on a connection that ends.
    let ending = depot.session();
    (0..PLACES).step_by(PREFIX as usize).for_each(|first| drop(acquire(&ending, namespace, first)));
    drop(ending);
    std::thread::sleep(Duration::from_millis(500));
    out["hold_end"] = holds(&depot);
    println!("{out:#}");
}
