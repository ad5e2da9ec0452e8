//! Hits of which some blocks are still being read: what is reported about them, and loads that begin during the reads.
//! P1, P2.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Engine, LONG, config, embedded, hash, spec};
use kvdepot_core::{BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec, TaskState};

const BLOCK: u64 = 64 << 10;
const BLOCKS: usize = 24;
const SEED: u8 = 5;
/// More readers than blocks, so that hanging reads do not block the others.
const READERS: usize = 2 * BLOCKS;
/// Much longer than any test takes.
const TIMEOUT_MS: u64 = 600_000;

fn depot(directory: &Path, faults: Option<&str>) -> Arc<Attachment> {
    let mut posix = serde_json::json!({"directories": [directory], "read_threads": READERS});
    if let Some(faults) = faults {
        posix["faults"] = faults.into();
    }
    let more = serde_json::json!({"pipeline": "Cache|Posix", "posix": posix, "timeout_ms": TIMEOUT_MS});
    embedded(config(16 << 20, more))
}

/// A depot restarted over the files of `BLOCKS` blocks, which it reads with `faults`, and an empty engine.
fn restarted(directory: &Path, name: &str, faults: &str) -> (Arc<Attachment>, Arc<NamespaceSpec>, Engine) {
    let spec = spec(name, BlockLayout::uniform(4, &[BLOCK / 4]).unwrap());
    let names: Vec<u64> = (0..BLOCKS as u64).collect();
    {
        let attachment = depot(directory, None);
        let mut engine = Engine::new(&attachment, &spec, BLOCKS);
        engine.fill(SEED);
        assert!(engine.dump(&names, &engine.all_pages()).is_empty());
        assert!(attachment.drain(LONG).unwrap());
    }
    let attachment = depot(directory, Some(faults));
    let engine = Engine::new(&attachment, &spec, BLOCKS);
    (attachment, spec, engine)
}

fn claim(attachment: &Arc<Attachment>, spec: &Arc<NamespaceSpec>) -> Claim {
    let group = ClaimGroupSpec { namespaces: vec![Arc::clone(spec)], window_blocks: 0, hashes_per_block: 1 };
    let hashes: Vec<_> = (0..BLOCKS as u64).map(hash).collect();
    Claim::open(attachment, &[group], &hashes, 0, u32::try_from(BLOCKS).unwrap(), "").unwrap()
}

fn load(engine: &Engine, patience: Option<Duration>) -> Arc<TaskState> {
    let hashes = (0..BLOCKS as u64).map(hash).collect();
    // SAFETY: the tensors live in the engine; no code relies on bytes that the task has not copied yet.
    unsafe { engine.store.load_pages_within(hashes, &engine.all_pages(), 0, patience) }.unwrap()
}

fn held(engine: &Engine) -> Vec<usize> {
    (0..BLOCKS).filter(|&page| engine.holds(page, page, SEED)).collect()
}

/// Retries until the answer fits; fails if it never does.
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(found) = ask() {
            return found;
        }
        assert!(Instant::now() < end, "never came: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn what_has_come_is_copied_while_the_rest_is_read_and_what_never_comes_fails_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (attachment, spec, engine) = restarted(directory.path(), "beside", "read_hang=0.25,seed=3");
    let mut claim = claim(&attachment, &spec);
    // Every read has begun, so all that do not hang complete.
    let came = until("all blocks that do not hang", || {
        claim.poll();
        // Not before the tier has reported what it holds.
        let arriving = claim.arriving()?;
        assert_eq!(arriving.blocks_come + arriving.blocks_left, BLOCKS as u32);
        assert_eq!((arriving.units, arriving.units_from_tier), (BLOCKS as u32, BLOCKS as u32));
        let hung = attachment.stats()["depot"]["fetches_queued"].as_u64().unwrap();
        (hung == u64::from(arriving.blocks_left) && arriving.blocks_left < BLOCKS as u32 / 2)
            .then_some(arriving.blocks_come as usize)
    });
    assert!((1..BLOCKS).contains(&came), "the seed makes some blocks hang and not all: {came} came");
    let patient = load(&engine, None);
    until("copies beside hung reads", || (held(&engine).len() >= came).then_some(()));
    assert!(!patient.done(), "a load without an end to its patience waits for what is being read");
    // Another load with little patience gets the same blocks, and ends long before the timeout of the task.
    let other = Engine::new(&attachment, &spec, BLOCKS);
    let hasty = load(&other, Some(Duration::from_millis(30)));
    assert!(hasty.wait(Some(LONG)), "{}", attachment.stats());
    let failed = hasty.failed();
    assert!(failed.iter().all(|&(_, kind)| kind == ErrorKind::Timeout), "{failed:?}");
    let held = held(&other);
    assert!(failed.iter().all(|(block, _)| !held.contains(block)));
    assert!(held.len() >= came && held.len() + failed.len() == BLOCKS, "{held:?} {failed:?}");
    // A device that never answers cannot be waited for: its threads and this depot end with the process.
    std::mem::forget((patient, engine, claim, attachment));
}

#[test]
fn nothing_is_said_to_arrive_once_a_block_has_failed() {
    // A hit that ends before the first hanging block settles immediately and shows nothing. The order of the reads
    // decides which block gets which fault, so several seeds are tried.
    let shown = (0..40).any(|seed| {
        let directory = tempfile::tempdir().unwrap();
        let faults = format!("read_eio=0.5,read_hang=0.5,seed={seed}");
        let (attachment, spec, engine) = restarted(directory.path(), "failing", &faults);
        let mut claim = claim(&attachment, &spec);
        let failed_amid = until("the first failure", || {
            if claim.poll().0 {
                return Some(false);
            }
            // The claim is not settled, so some reads are in flight once the tier has reported what it holds.
            let begun = attachment.stats()["depot"]["fetches_queued"].as_u64().unwrap() > 0;
            let failed = !attachment.stats()["depot"]["failures"]["fetch"].is_null();
            (begun && failed).then_some(true)
        });
        if failed_amid {
            until("nothing arrives", || {
                claim.poll();
                claim.arriving().is_none().then_some(())
            });
            let (settled, units, _) = claim.settle_now();
            assert!(settled && (units as usize) < BLOCKS);
            assert!(claim.arriving().is_none());
        }
        std::mem::forget((engine, claim, attachment));
        failed_amid
    });
    assert!(shown, "no seed made a block fail while others hang");
}

#[test]
fn a_settled_claim_has_nothing_on_its_way() {
    const SLOW: Duration = Duration::from_secs(8);
    const TRIES: usize = 4;
    let faults = format!("read_slow=1,slow_ms={}", SLOW.as_millis());
    // A machine that stands still until all blocks have come shows nothing, but not in every try.
    let shown = (0..TRIES).find_map(|_| {
        let directory = tempfile::tempdir().unwrap();
        let (attachment, spec, engine) = restarted(directory.path(), "whole", &faults);
        let begun = Instant::now();
        let mut claim = claim(&attachment, &spec);
        let seen = until("the tier says what it holds", || {
            let settled = claim.poll().0;
            assert!(!settled || begun.elapsed() >= SLOW, "settled before any block can have come");
            claim.arriving().map(|arriving| Some(arriving.units as usize)).or(settled.then_some(None))
        });
        let seen = seen?;
        Some((directory, attachment, engine, claim, seen))
    });
    let (_directory, _attachment, engine, mut claim, seen) = shown.expect("no try showed what arrives");
    assert_eq!(seen, BLOCKS);
    assert_eq!(claim.wait(LONG).1 as usize, BLOCKS);
    assert!(claim.arriving().is_none());
    // A load that began before its blocks had arrived, with patience for them, is complete.
    let task = load(&engine, Some(LONG));
    assert!(task.wait(Some(LONG)) && task.failed().is_empty());
    assert_eq!(held(&engine).len(), BLOCKS);
}
