//! Media in files, beside a depot that has them open.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::ErrorKind;
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::scan::Scan;
use kvdepot_tier::{DaxConfig, DaxTier, SlabConfig, SlabTier, Tier};

use crate::tools::checked;

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

fn slab(path: &Path) -> Arc<dyn Tier> {
    let config = SlabConfig {
        capacity_bytes: 4 * MIB,
        segment_bytes: MIB / 4,
        open_wait: LONG,
        lock_wait: LONG,
        ..SlabConfig::new(path)
    };
    Arc::new(SlabTier::open(config).unwrap())
}

fn dax(path: &Path) -> Arc<dyn Tier> {
    if !path.exists() {
        std::fs::File::create(path).unwrap().set_len(4 * MIB).unwrap();
    }
    Arc::new(DaxTier::open(DaxConfig { open_wait: LONG, lock_wait: LONG, ..DaxConfig::new(path) }).unwrap())
}

#[test]
fn a_file_is_read_beside_its_depot_and_left_as_it_is() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, open) in [("Slab", slab as fn(&Path) -> Arc<dyn Tier>), ("Dax", dax)] {
        let path = dir.path().join(name);
        let bench = Bench::new(open(&path));
        bench.write_all(20);
        let before = std::fs::read(&path).unwrap();
        let changed = path.metadata().unwrap().modified().unwrap();
        let scan = Scan::open(&path).unwrap();
        let (stored, findings) = checked(&scan);
        assert_eq!((scan.tier(), stored.blocks.len(), findings.len()), (name, 20, 0));
        assert!(bench.read_is_right(7), "the depot goes on");
        drop(bench);
        assert!(std::fs::read(&path).unwrap() == before);
        assert_eq!(path.metadata().unwrap().modified().unwrap(), changed);
        // A depot starts beside a reader, and a reader finds its new blocks.
        let bench = Bench::new(open(&path));
        bench.write(30).unwrap();
        assert_eq!(checked(&scan).0.blocks.len(), 21);
        // A block that the reader finds broken is broken for the depot, too.
        let block = stored.blocks[11];
        let mut file = std::fs::read(&path).unwrap();
        file[block.offset_bytes as usize + 5000] ^= 4;
        std::os::unix::fs::FileExt::write_all_at(
            &std::fs::File::options().write(true).open(&path).unwrap(),
            &file[block.offset_bytes as usize..(block.offset_bytes + 8192) as usize],
            block.offset_bytes,
        )
        .unwrap();
        drop(bench);
        let findings = checked(&scan).1;
        assert_eq!((findings.len(), findings[0].hash), (1, Some(block.key.hash)));
        let bench = Bench::new(open(&path));
        let number = (0..20).find(|n| bench.key(*n) == block.key).unwrap();
        assert!(!bench.read_is_right(number));
    }
}

/// Ends a writer, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Every state of a busy medium is read: groups on their way, recycled segments, reused places, epochs that change.
#[test]
fn a_depot_that_writes_all_the_time_has_no_broken_blocks() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, open) in [("Slab", slab as fn(&Path) -> Arc<dyn Tier>), ("Dax", dax)] {
        let path = dir.path().join(name);
        let mut bench = Bench::new(open(&path));
        bench.write_all(50);
        let scan = Scan::open(&path).unwrap();
        let (is_over, written) = (AtomicBool::new(false), AtomicU64::new(50));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    let n = written.load(Ordering::Acquire);
                    let writes: Vec<_> =
                        (n..n + 8).map(|n| bench.begin_write(n, bench.filled(n), Bench::soon())).collect();
                    bench.remove(n - 3).unwrap();
                    writes.iter().for_each(|write| drop(Bench::answer(write)));
                    if n % 400 < 8 {
                        bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
                    }
                    written.store(n + 8, Ordering::Release);
                }
            });
            let _over = Over(&is_over);
            let (mut checks, mut blocks) = (0, 0);
            // Each group of writes has its own time: their syncs may take any, all together.
            let (mut seen, mut end) = (0, Bench::soon());
            while checks < 40 || written.load(Ordering::Acquire) < 600 {
                let (stored, findings) = checked(&scan);
                assert_eq!(findings, [], "{name}, check {checks}");
                assert_eq!(
                    (stored.namespaces.len(), stored.namespaces[0].problem, stored.problem),
                    (1, None, None)
                );
                (checks, blocks) = (checks + 1, blocks + stored.blocks.len());
                let now = written.load(Ordering::Acquire);
                if now > seen {
                    (seen, end) = (now, Bench::soon());
                }
                assert!(Instant::now() < end, "{name}: {checks} checks, {written:?} writes");
            }
            assert!(blocks > 500, "{name}: {blocks} blocks were read");
        });
    }
}

#[test]
fn what_cannot_be_read_says_why() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("medium");
    assert_eq!(Scan::open(&path).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(Scan::open(dir.path()).unwrap_err().kind(), ErrorKind::Config);
    assert_eq!(Scan::open(Path::new("/dev/null")).unwrap_err().kind(), ErrorKind::Config);
    for content in [vec![], vec![0; 5000], vec![7; 100_000], vec![0; 100_000]] {
        std::fs::write(&path, content).unwrap();
        let error = Scan::open(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("neither a Slab nor a Dax"), "{error}");
    }
    for (open, kind) in [(slab as fn(&Path) -> Arc<dyn Tier>, ErrorKind::Corrupt), (dax, ErrorKind::Config)] {
        std::fs::remove_file(&path).unwrap();
        drop(open(&path));
        std::fs::File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
        let error = Scan::open(&path).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains("medium"), "{error}");
    }
}
