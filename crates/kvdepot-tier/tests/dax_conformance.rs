//! The DAX tier passes the suite: on a file, on a mapped file (which takes the code path of a device), and in memory.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::ErrorKind;
use kvdepot_io::mapped::{Access, MemoryMedium};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{DaxConfig, DaxTier, Tier, conformance};

const MIB: u64 = 1 << 20;
/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

fn config(path: &Path) -> DaxConfig {
    DaxConfig { open_wait: HANG, lock_wait: HANG, restore_workers: 2, ..DaxConfig::new(path) }
}

/// New media of this size.
struct Fresh {
    dir: tempfile::TempDir,
    count: Cell<u32>,
}

impl Fresh {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { dir, count: Cell::new(0) }
    }

    fn next(&self, bytes: u64) -> PathBuf {
        self.count.set(self.count.get() + 1);
        let path = self.dir.path().join(self.count.get().to_string());
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

fn open(config: DaxConfig) -> Arc<dyn Tier> {
    Arc::new(DaxTier::open(config).unwrap())
}

#[test]
fn on_a_file() {
    let fresh = Fresh::new();
    conformance::check(&|| open(DaxConfig { async_put: true, ..config(&fresh.next(80 * MIB)) }));
}

#[test]
fn on_a_mapped_file_with_small_waves() {
    let fresh = Fresh::new();
    conformance::check(&|| {
        open(DaxConfig {
            access: Access::Mapped,
            retrieve_staging_slab_bytes: MIB,
            restore_max_regions: 3,
            ..config(&fresh.next(80 * MIB))
        })
    });
}

#[test]
fn in_memory_with_one_thread_of_each_kind() {
    conformance::check(&|| {
        let config = DaxConfig { restore_workers: 1, put_workers: 1, ..config(Path::new("memory")) };
        let medium = MemoryMedium::new(vec![0; 80 << 20]);
        Arc::new(DaxTier::open_on(config, Arc::new(medium)).unwrap())
    });
}

#[test]
fn is_persistent() {
    for access in [Access::Auto, Access::Mapped] {
        let fresh = Fresh::new();
        let path = fresh.next(80 * MIB);
        conformance::check_persistent_alone(&|| open(DaxConfig { access, ..config(&path) }));
    }
}

#[test]
fn is_capped() {
    for access in [Access::Auto, Access::Mapped] {
        let fresh = Fresh::new();
        conformance::check_capped(&|cap| {
            open(DaxConfig { access, capacity_bytes: cap, ..config(&fresh.next(4 * MIB)) })
        });
    }
}

/// P5: the medium itself is the cap, and it is filled.
#[test]
fn a_full_medium_makes_room() {
    let fresh = Fresh::new();
    let tier = open(config(&fresh.next(2 * MIB)));
    let bench = Bench::new(Arc::clone(&tier));
    for n in 0..300 {
        bench.write(n).unwrap();
        assert!(bench.read_is_right(n), "block {n}");
    }
    let usage = tier.usage();
    assert!(usage.bytes <= usage.bytes_max && usage.bytes_max < 2 * MIB, "{usage:?}");
    assert!(usage.bytes * 10 >= usage.bytes_max * 9, "most of it is in use: {usage:?}");
    let held = (0..300).filter(|n| bench.read_is_right(*n)).count() as u64;
    assert_eq!(held, usage.blocks);
}

#[test]
fn a_medium_is_one_depots_own() {
    let fresh = Fresh::new();
    let path = fresh.next(4 * MIB);
    let first = open(config(&path));
    let second = DaxTier::open(DaxConfig { lock_wait: Duration::ZERO, ..config(&path) }).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Busy);
    assert!(second.to_string().contains("another depot uses this medium"), "{second}");
    drop(first);
    open(config(&path));
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let fresh = Fresh::new();
    // A partition table, a file system's superblock, a label at the end; our format in another version; a damaged
    // medium.
    for (what, at, bytes) in [
        ("partition table", 510, &b"\x55\xaa"[..]),
        ("file system", 1080, b"\x53\xef"),
        ("label", 4 * MIB - 100, b"label"),
        ("version", 0, b"KVDEPDAX\x09\0\0\0"),
        ("damage", 0, b"KVDEPDAX\x01\0\0\0"),
    ] {
        let path = fresh.next(4 * MIB);
        let mut content = vec![0; 4 << 20];
        content[at as usize..][..bytes.len()].copy_from_slice(bytes);
        std::fs::write(&path, &content).unwrap();
        let error = DaxTier::open(config(&path)).unwrap_err();
        let kind = match what {
            "version" => ErrorKind::Version,
            "damage" => ErrorKind::Corrupt,
            _ => ErrorKind::Config,
        };
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(error.to_string().contains("zero"), "{what}: it says what to do: {error}");
        assert!(std::fs::read(&path).unwrap() == content, "{what}: nothing was written");
    }
    for (path, kind) in [
        (fresh.dir.path().to_owned(), ErrorKind::Io),
        (fresh.dir.path().join("missing"), ErrorKind::NotFound),
        (PathBuf::from("/dev/null"), ErrorKind::Config),
        (fresh.next(0), ErrorKind::Config),
        (fresh.next(40_000), ErrorKind::Config),
    ] {
        let error = DaxTier::open(config(&path)).unwrap_err();
        assert_eq!(error.kind(), kind, "{}: {error}", path.display());
    }
    let path = fresh.next(4 * MIB);
    let error = DaxTier::open(DaxConfig { max_bytes: 5 * MIB, ..config(&path) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    open(config(&path));
    let error = DaxTier::open(DaxConfig { max_bytes: 3 * MIB, ..config(&path) }).unwrap_err();
    assert!(error.to_string().contains("truncated"), "{error}");
    open(config(&path));
}
