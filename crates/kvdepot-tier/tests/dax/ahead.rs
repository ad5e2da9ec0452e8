//! Pages of blocks are mapped before their first read: of those that a start finds, and of those that are written.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::mapped::{self, Access, HookMedium, MediumCall};
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{DaxConfig, DaxTier};

const BLOCK: u64 = 1 << 20;
const BLOCKS: u64 = 8;

fn open(path: &Path) -> (Arc<DaxTier>, Bench) {
    let tier = Arc::new(DaxTier::open(DaxConfig::new(path)).unwrap());
    let of = spec("dax", BlockLayout::new(vec![vec![BLOCK]]).unwrap());
    let bench = Bench::with(Arc::clone(&tier) as _, of);
    (tier, bench)
}

/// Returns how many bytes of a file's mappings this process has pages for.
fn mapped_bytes(path: &Path) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let name = path.to_str().unwrap();
    let (mut is_ours, mut sum) = (false, 0);
    for line in smaps.lines() {
        if line.split_whitespace().next().is_some_and(|word| word.contains('-') && !word.ends_with(':')) {
            is_ours = line.ends_with(name);
        } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| is_ours) {
            sum += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        }
    }
    sum
}

fn allocated_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// Waits until as many bytes are mapped.
fn are_mapped(path: &Path, bytes: u64) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while mapped_bytes(path) < bytes {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

#[test]
fn blocks_are_mapped_when_they_are_written_and_when_a_start_finds_them() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(64 << 20).unwrap();
    let (tier, bench) = open(file.path());
    bench.write_all(BLOCKS);
    assert!(are_mapped(file.path(), BLOCKS * BLOCK), "after the writes");
    drop((bench, tier));
    assert_eq!(mapped_bytes(file.path()), 0);
    let allocated = allocated_bytes(file.path());
    let (tier, bench) = open(file.path());
    assert!(are_mapped(file.path(), BLOCKS * BLOCK), "after a start");
    assert_eq!(allocated_bytes(file.path()), allocated, "the rest of the file is given no pages");
    assert!((0..BLOCKS).all(|n| bench.read_is_right(n)));
    drop((bench, tier));
}

#[test]
fn a_medium_that_hangs_while_it_is_mapped_does_not_hang_the_end_of_a_tier() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(64 << 20).unwrap();
    let (tier, bench) = open(file.path());
    bench.write_all(BLOCKS);
    drop((bench, tier));
    let inner = mapped::open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap();
    let (begun, begins) = channel();
    let (end, ends) = channel::<()>();
    let (begun, ends) = (Mutex::new(begun), Mutex::new(ends));
    let hook = move |call| {
        if matches!(call, MediumCall::MapAhead { .. }) {
            let _ = begun.lock().unwrap().send(());
            let _ = ends.lock().unwrap().recv();
        }
        Ok(())
    };
    let medium = Arc::new(HookMedium::new(inner, Box::new(hook)));
    let tier = DaxTier::open_on(DaxConfig::new(file.path()), medium).unwrap();
    begins.recv().unwrap();
    drop(tier);
    let busy = mapped::open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy, "its thread still has it");
    drop(end);
    assert!(mapped::open(file.path(), 0, Access::Auto, Duration::from_secs(60)).is_ok());
}
