//! Pool and tier together: write-behind, restart, claims that take turns, reset, faults. P1, P2, P4, P5.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Engine, LONG, Served, config, embedded, hash, spec};
use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_depot::DepotConfig;
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};

const BLOCK: u64 = 64 << 10;

fn on_disk(pool_bytes: u64, directory: &Path, more: serde_json::Value) -> DepotConfig {
    let mut posix = serde_json::json!({"directories": [directory], "read_threads": 4, "write_threads": 2});
    for (key, value) in more.as_object().unwrap() {
        posix[key] = value.clone();
    }
    config(pool_bytes, serde_json::json!({"pipeline": "Cache|Posix", "posix": posix}))
}

fn no() -> serde_json::Value {
    serde_json::json!({})
}

fn layout() -> BlockLayout {
    BlockLayout::uniform(4, &[BLOCK / 4]).unwrap()
}

fn full(spec: &Arc<NamespaceSpec>) -> ClaimGroupSpec {
    ClaimGroupSpec { namespaces: vec![Arc::clone(spec)], window_blocks: 0, hashes_per_block: 1 }
}

fn claim(attachment: &Arc<Attachment>, groups: &[ClaimGroupSpec], names: std::ops::Range<u64>) -> Claim {
    let hashes: Vec<_> = names.map(hash).collect();
    Claim::open(attachment, groups, &hashes, 0, u32::try_from(hashes.len()).unwrap(), "").unwrap()
}

fn dump_all(attachment: &Arc<Attachment>, engine: &Engine, first: u64, count: usize) {
    let names: Vec<u64> = (first..first + count as u64).collect();
    for (names, pages) in names.chunks(8).zip(engine.all_pages().chunks(8)) {
        assert!(engine.dump(names, &pages[..names.len()]).is_empty());
        assert!(attachment.drain(LONG).unwrap());
    }
}

/// Stores `count` blocks on a disk, by a depot that then ends.
fn store_all(directory: &Path, spec: &Arc<NamespaceSpec>, fill: u8, count: usize) {
    let attachment = embedded(on_disk(16 << 20, directory, no()));
    let mut engine = Engine::new(&attachment, spec, count);
    engine.fill(fill);
    dump_all(&attachment, &engine, 0, count);
}

#[test]
fn a_restarted_depot_finds_what_an_earlier_one_wrote() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("restart", layout());
    {
        let attachment = embedded(on_disk(8 << 20, directory.path(), no()));
        let mut engine = Engine::new(&attachment, &spec, 32);
        engine.fill(3);
        dump_all(&attachment, &engine, 0, 32);
    }
    let attachment = embedded(on_disk(8 << 20, directory.path(), no()));
    let mut engine = Engine::new(&attachment, &spec, 32);
    let mut claim = claim(&attachment, &[full(&spec)], 0..40);
    let (settled, units, from_tier) = claim.wait(LONG);
    assert_eq!((settled, units, from_tier), (true, 32, 32), "{}", attachment.stats());
    let names: Vec<u64> = (0..32).collect();
    engine.clear();
    assert!(engine.load(&names, &engine.all_pages()).is_empty());
    assert!((0..32).all(|page| engine.holds(page, page, 3)));
}

#[test]
fn loads_fetch_what_is_not_in_the_pool_and_more_than_fits_it() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("larger", layout());
    let attachment = embedded(on_disk(1 << 20, directory.path(), no()));
    let mut engine = Engine::new(&attachment, &spec, 100);
    engine.fill(8);
    dump_all(&attachment, &engine, 0, 100);
    engine.clear();
    let names: Vec<u64> = (0..100).collect();
    assert_eq!(engine.load(&names, &engine.all_pages()), [0usize; 0], "{}", attachment.stats());
    assert!((0..100).all(|page| engine.holds(page, page, 8)));
}

/// Clients in other processes map the medium of a Dax tier: what they read there takes no room in the pool.
#[test]
fn blocks_in_a_mapped_medium_need_no_pool() {
    let medium = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    medium.as_file().set_len(256 << 20).unwrap();
    let dax = serde_json::json!({"pipeline": "Cache|Dax",
        "dax": {"device_path": medium.path(), "lease_in_place": true}});
    let spec = spec("mapped", layout());
    let mut served = Served::start(config(1 << 20, dax.clone()));
    let names: Vec<u64> = (0..100).collect();
    for life in 0..2 {
        let attachment = served.attach();
        let mut engine = Engine::new(&attachment, &spec, 100);
        if life == 0 {
            engine.fill(5);
            dump_all(&attachment, &engine, 0, 100);
        }
        for round in 0..3 {
            // A claim counts on reads in place once a load has made one.
            let mut claim = claim(&attachment, &[full(&spec)], 0..100);
            let (settled, units, _) = claim.wait(LONG);
            let pool_blocks = (1 << 20) / BLOCK;
            assert!(settled && (round == 0 || u64::from(units) > 5 * pool_blocks), "round {round}: {units}");
            engine.clear();
            assert_eq!(engine.load(&names, &engine.all_pages()), [0usize; 0], "{}", attachment.stats());
            assert!((0..100).all(|page| engine.holds(page, page, 5)), "life {life}, round {round}");
        }
        let in_place = attachment.stats()["depot"]["in_place_blocks"].as_u64().unwrap();
        assert!(in_place > 0, "{}", attachment.stats());
        if life == 0 {
            served.stop();
            served = Served::start(config(1 << 20, dax.clone()));
        }
    }
}

#[test]
fn claims_larger_than_the_pool_take_turns_and_all_get_their_hit() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("turns", layout());
    // Six requests of 12 blocks; the pool holds 40 % of them.
    let attachment = embedded(on_disk(BLOCK * 12 * 6 * 40 / 100, directory.path(), no()));
    let mut engine = Engine::new(&attachment, &spec, 12);
    engine.fill(2);
    for request in 0..6 {
        dump_all(&attachment, &engine, request * 100, 12);
    }
    let before = attachment.stats()["depot"]["fetch_blocks"].as_u64().unwrap();
    let mut waiting: Vec<(u64, Claim)> =
        (0..6).map(|r| (r, claim(&attachment, &[full(&spec)], r * 100..r * 100 + 12))).collect();
    let deadline = Instant::now() + LONG;
    while !waiting.is_empty() {
        assert!(Instant::now() < deadline, "claims starve: {}", attachment.stats());
        waiting.retain_mut(|(request, claim)| {
            let (settled, units, _) = claim.poll();
            if settled {
                assert_eq!(units, 12, "request {request}");
                let names: Vec<u64> = (*request * 100..*request * 100 + 12).collect();
                engine.clear();
                assert!(engine.load(&names, &engine.all_pages()).is_empty());
                assert!((0..12).all(|page| engine.holds(page, page, 2)));
                claim.release();
            }
            !settled
        });
        std::thread::yield_now();
    }
    let fetched = attachment.stats()["depot"]["fetch_blocks"].as_u64().unwrap() - before;
    assert!(fetched <= 72, "blocks were fetched more than once: {fetched}");
}

#[test]
fn a_claim_that_can_never_fit_is_cut_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("cut", layout());
    let attachment = embedded(on_disk(BLOCK * 16, directory.path(), no()));
    let mut engine = Engine::new(&attachment, &spec, 40);
    engine.fill(1);
    dump_all(&attachment, &engine, 0, 40);
    let mut claim = claim(&attachment, &[full(&spec)], 0..40);
    let (settled, units, _) = claim.wait(LONG);
    assert!(settled && (10..=14).contains(&units), "{units} of 16 slots");
    assert_eq!(attachment.stats()["depot"]["claims_cut"], 1);
}

#[test]
fn a_hit_needs_all_ranks_and_only_the_window_s_end() {
    let directory = tempfile::tempdir().unwrap();
    let attachment = embedded(on_disk(16 << 20, directory.path(), no()));
    let specs: Vec<_> = ["rank0", "rank1", "window"].iter().map(|name| spec(name, layout())).collect();
    let engines: Vec<Engine> = specs.iter().map(|spec| Engine::new(&attachment, spec, 20)).collect();
    dump_all(&attachment, &engines[0], 0, 20);
    dump_all(&attachment, &engines[1], 0, 15);
    // The window's group has blocks 10 to 13 only.
    dump_all(&attachment, &engines[2], 10, 4);
    let both = ClaimGroupSpec { namespaces: specs[..2].to_vec(), window_blocks: 0, hashes_per_block: 1 };
    assert_eq!(claim(&attachment, std::slice::from_ref(&both), 0..20).wait(LONG), (true, 15, 0));
    let window =
        ClaimGroupSpec { namespaces: vec![Arc::clone(&specs[2])], window_blocks: 3, hashes_per_block: 1 };
    assert_eq!(claim(&attachment, &[both.clone(), window.clone()], 0..20).wait(LONG), (true, 14, 0));
    // The same from files only.
    drop(engines);
    attachment.close();
    drop(attachment);
    let attachment = embedded(on_disk(16 << 20, directory.path(), no()));
    specs.iter().for_each(|spec| attachment.register(spec).unwrap());
    let (settled, units, _) = claim(&attachment, &[both, window], 0..20).wait(LONG);
    assert_eq!((settled, units), (true, 14));
}

/// The requesting node knows nothing of it: each window that it may hit has to be queried.
#[test]
fn a_window_s_end_that_another_node_stored_is_found_wherever_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let ours = embedded(on_disk(16 << 20, directory.path(), no()));
    let specs: Vec<_> = ["full", "window"].iter().map(|name| spec(name, layout())).collect();
    specs.iter().for_each(|spec| ours.register(spec).unwrap());
    let theirs = embedded(on_disk(16 << 20, directory.path(), no()));
    let engines: Vec<Engine> = specs.iter().map(|spec| Engine::new(&theirs, spec, 20)).collect();
    dump_all(&theirs, &engines[0], 0, 20);
    dump_all(&theirs, &engines[1], 4, 4);
    dump_all(&theirs, &engines[1], 10, 2);
    dump_all(&theirs, &engines[1], 13, 4);
    let windowed = |window_blocks| {
        let full = ClaimGroupSpec { namespaces: specs[..1].to_vec(), window_blocks: 0, hashes_per_block: 1 };
        [full, ClaimGroupSpec { namespaces: specs[1..].to_vec(), window_blocks, hashes_per_block: 1 }]
    };
    for (window_blocks, units, limit) in [(3, 17, 20), (4, 17, 20), (3, 16, 16), (3, 8, 15), (5, 0, 20)] {
        let (settled, found, _) = claim(&ours, &windowed(window_blocks), 0..limit).wait(LONG);
        assert_eq!((settled, found), (true, units), "a window of {window_blocks}, {limit} at most");
    }
}

#[test]
fn a_reset_makes_everything_before_it_unreachable_for_good() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("reset", layout());
    {
        let attachment = embedded(on_disk(8 << 20, directory.path(), no()));
        let mut engine = Engine::new(&attachment, &spec, 8);
        engine.fill(1);
        dump_all(&attachment, &engine, 0, 8);
        attachment.reset(&[Arc::clone(&spec)]).unwrap();
        let names: Vec<_> = (0..8).map(hash).collect();
        assert_eq!(engine.store.lookup_on_prefix(&names), 0);
        assert_eq!(engine.load(&[0], &[0]), [0]);
        engine.fill(2);
        dump_all(&attachment, &engine, 0, 4);
    }
    let attachment = embedded(on_disk(8 << 20, directory.path(), no()));
    let mut engine = Engine::new(&attachment, &spec, 8);
    let names: Vec<_> = (0..8).map(hash).collect();
    assert_eq!(engine.store.lookup_on_prefix(&names), 4);
    engine.clear();
    assert!(engine.load(&[0, 1, 2, 3], &[0, 1, 2, 3]).is_empty());
    assert!((0..4).all(|page| engine.holds(page, page, 2)), "bytes from before the reset");
}

#[test]
fn a_reset_while_blocks_are_on_their_way_settles_claims_without_them() {
    // A machine that stands still until four threads have read all blocks shows nothing, but not in every try.
    assert!((0..5).any(|_| reset_amid_reads()), "each claim found all blocks of before the reset");
}

/// Returns whether a claim missed blocks because of a reset during their reads.
fn reset_amid_reads() -> bool {
    const SLOW: Duration = Duration::from_millis(200);
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("race", layout());
    store_all(directory.path(), &spec, 1, 64);
    let faults = format!("read_slow=1.0,slow_ms={},seed=1", SLOW.as_millis());
    let slow = serde_json::json!({"faults": faults});
    let attachment = embedded(on_disk(16 << 20, directory.path(), slow));
    attachment.register(&spec).unwrap();
    let begun = Instant::now();
    let mut waiting = claim(&attachment, &[full(&spec)], 0..64);
    attachment.reset(&[Arc::clone(&spec)]).unwrap();
    let reads_may_be_over = begun.elapsed() >= SLOW * (64 / 4);
    let (settled, units, _) = waiting.wait(LONG);
    assert!(settled && (units < 64 || reads_may_be_over), "{units} blocks of before the reset");
    assert_eq!(claim(&attachment, &[full(&spec)], 0..64).wait(LONG), (true, 0, 0));
    waiting.release();
    units < 64
}

#[test]
fn a_failing_tier_costs_blocks_and_never_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("faults", layout());
    store_all(directory.path(), &spec, 6, 100);
    let attachment =
        embedded(on_disk(16 << 20, directory.path(), serde_json::json!({"faults": "read_eio=0.1,seed=7"})));
    let mut engine = Engine::new(&attachment, &spec, 100);
    engine.clear();
    let names: Vec<u64> = (0..100).collect();
    let failed = engine.load(&names, &engine.all_pages());
    // A block whose read failed before the load asked for it is read again, so it may have come nevertheless.
    let stats = attachment.stats();
    assert!(stats["depot"]["failures"]["fetch"]["io"].as_u64() > Some(0), "{stats}");
    assert!(failed.len() < 60, "{} of 100 failed", failed.len());
    assert!((0..100).all(|page| failed.contains(&page) || engine.holds(page, page, 6)));
}

#[test]
fn files_damaged_between_runs_are_misses() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("damage", layout());
    store_all(directory.path(), &spec, 4, 30);
    let mut blocks = Vec::new();
    let mut folders = vec![directory.path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "kvb") {
                blocks.push(path);
            }
        }
    }
    blocks.sort();
    assert_eq!(blocks.len(), 30);
    for (i, path) in blocks.iter().enumerate().filter(|(i, _)| i % 3 != 0) {
        let mut bytes = std::fs::read(path).unwrap();
        if i % 3 == 1 {
            let at = i * 997 % (BLOCK as usize) + 4096;
            bytes[at] ^= 1 << (i % 8);
        } else {
            bytes.truncate(i * 1013 % bytes.len());
        }
        std::fs::write(path, bytes).unwrap();
    }
    let attachment = embedded(on_disk(16 << 20, directory.path(), no()));
    let mut engine = Engine::new(&attachment, &spec, 30);
    engine.clear();
    let names: Vec<u64> = (0..30).collect();
    let failed = engine.load(&names, &engine.all_pages());
    assert_eq!(failed.len(), 20);
    assert!((0..30).all(|page| failed.contains(&page) || engine.holds(page, page, 4)));
}

#[test]
fn a_tier_that_hangs_delays_nobody_beyond_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("hung", layout());
    store_all(directory.path(), &spec, 1, 8);
    let posix = serde_json::json!({"directories": [directory.path()], "faults": "read_hang=1.0,seed=1"});
    let hung = serde_json::json!({"pipeline": "Cache|Posix", "posix": posix, "timeout_ms": 3_000});
    let attachment = embedded(config(16 << 20, hung));
    let mut engine = Engine::within(&attachment, &spec, 16, Duration::from_secs(10));
    engine.fill(1);
    let mut stuck = claim(&attachment, &[full(&spec)], 0..8);
    let (settled, units, _) = stuck.wait(LONG);
    assert_eq!((settled, units), (true, 0));
    // The pool still serves.
    let names: Vec<u64> = (50..58).collect();
    assert!(engine.dump(&names, &engine.all_pages()[..8]).is_empty());
    assert!(engine.load(&names, &engine.all_pages()[8..]).is_empty());
    assert!((0..8).all(|i| engine.holds(8 + i, i, 1)));
    // SAFETY: all named memory outlives the test.
    let load =
        unsafe { engine.store.load_pages((0..8).map(hash).collect(), &engine.all_pages()[..8], 0) }.unwrap();
    assert!(load.wait(Some(LONG)) && load.failed().len() == 8);
    // A device that never answers cannot be waited for: its threads and this depot end with the process.
    std::mem::forget(attachment);
}

#[test]
fn dumps_go_on_while_a_tier_hangs_in_its_writes() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("hung", layout());
    let posix = serde_json::json!({"directories": [directory.path()], "faults": "write_hang=1.0,seed=1",
        "write_threads": 32, "capacity_percent": 0, "free_floor_percent": 0});
    let hung = serde_json::json!({"pipeline": "Cache|Posix", "posix": posix, "timeout_ms": 300});
    let attachment = embedded(config(16 << 20, hung));
    let mut engine = Engine::within(&attachment, &spec, 16, LONG);
    engine.fill(1);
    let mut names = (0..16).map(|n| n * 16..(n + 1) * 16).map(Iterator::collect::<Vec<u64>>);
    assert!(names.any(|names| !engine.dump(&names, &engine.all_pages()).is_empty()), "too much is dirty");
    // The writes count as failed after a while, and dumps are taken again, for as long as they hang.
    let until = Instant::now() + LONG;
    let mut next = 10_000;
    let mut taken = 0;
    while taken < 64 {
        assert!(Instant::now() < until, "{}", attachment.stats()["depot"]);
        let names: Vec<u64> = (next..next + 16).collect();
        next += 16;
        let refused = engine.dump(&names, &engine.all_pages()).len();
        taken = if refused == 0 { taken + 1 } else { 0 };
        if refused == 0 {
            assert!(engine.load(&names, &engine.all_pages()).is_empty(), "the pool serves them");
        }
    }
    // A device that never answers cannot be waited for: its threads and this depot end with the process.
    std::mem::forget(attachment);
}

#[test]
fn a_block_whose_read_hangs_is_missed_at_once_and_stored_by_a_dump() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec("hung", layout());
    store_all(directory.path(), &spec, 1, 8);
    let posix = serde_json::json!({"directories": [directory.path()], "faults": "read_hang=1.0,seed=1"});
    let hung = serde_json::json!({"pipeline": "Cache|Posix", "posix": posix, "timeout_ms": 1_000});
    let attachment = embedded(config(16 << 20, hung));
    let mut engine = Engine::within(&attachment, &spec, 16, LONG);
    engine.fill(1);
    let mut stuck = claim(&attachment, &[full(&spec)], 0..8);
    let (settled, units, _) = stuck.wait(LONG);
    assert_eq!((settled, units), (true, 0));
    stuck.release();
    // The engine has computed the first half meanwhile, and dumps it.
    let names: Vec<u64> = (0..4).collect();
    assert!(engine.dump(&names, &engine.all_pages()[..4]).is_empty());
    assert!(engine.load(&names, &engine.all_pages()[8..12]).is_empty());
    assert!((0..4).all(|i| engine.holds(8 + i, i, 1)));
    // Nobody waits for the second half once the reads count as hung: the tier is off, or in a trial.
    let until = Instant::now() + LONG;
    loop {
        let mut later = claim(&attachment, &[full(&spec)], 0..8);
        let (settled, units, _) = later.wait(LONG);
        later.release();
        assert_eq!((settled, units), (true, 4));
        let names: Vec<u64> = (4..8).collect();
        if engine.dump(&names, &engine.all_pages()[4..8]).is_empty()
            && engine.load(&names, &engine.all_pages()[12..]).is_empty()
        {
            break;
        }
        assert!(Instant::now() < until, "{}", attachment.stats()["depot"]);
    }
    assert!((4..8).all(|i| engine.holds(8 + i, i, 1)));
    // A device that never answers cannot be waited for: its threads and this depot end with the process.
    std::mem::forget(attachment);
}
