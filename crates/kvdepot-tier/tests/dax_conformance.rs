//! The DAX tier passes the suite: on a file, on a mapped file (which takes the code path of a device), and in memory. With
//! `KVDEPOT_TEST_DAX` on a DAX device instead of files (`make test-dax`: one in a virtual machine).
#![allow(clippy::unwrap_used)] // a failing test panics

mod dax_media;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::ErrorKind;
use kvdepot_io::mapped::{Access, MemoryMedium};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{DaxConfig, DaxTier, Tier, conformance};

use dax_media::{MIB, Media, accesses, config, raw};

fn open(config: DaxConfig) -> Arc<dyn Tier> {
    dax_media::open(config)
}

#[test]
fn with_positional_calls() {
    let media = Media::new();
    conformance::check(&|| open(DaxConfig { async_put: true, ..media.next(80 * MIB) }));
}

#[test]
fn mapped_with_small_waves() {
    let media = Media::new();
    conformance::check(&|| {
        open(DaxConfig {
            access: Access::AsDevice,
            retrieve_staging_slab_bytes: MIB,
            restore_max_regions: 3,
            ..media.next(80 * MIB)
        })
    });
}

#[test]
fn in_memory_with_one_thread_of_each_kind() {
    conformance::check(&|| {
        let config = DaxConfig { restore_workers: 1, put_workers: 1, ..config(Path::new("memory"), 0) };
        let medium = MemoryMedium::new(vec![0; 80 << 20]);
        Arc::new(DaxTier::open_on(config, Arc::new(medium)).unwrap())
    });
}

#[test]
fn leases_blocks_in_place() {
    for &access in accesses() {
        let media = Media::new();
        let leasing = || DaxConfig { access, lease_in_place: Some(true), ..media.next(3 * MIB) };
        conformance::check_leases(&|| open(leasing()));
    }
}

#[test]
fn is_persistent() {
    for &access in accesses() {
        let media = Media::new();
        let medium = media.next(80 * MIB);
        conformance::check_persistent_alone(&|| open(DaxConfig { access, ..medium.clone() }));
    }
}

#[test]
fn is_capped() {
    for &access in accesses() {
        let media = Media::new();
        conformance::check_capped(&|cap| {
            open(DaxConfig { access, capacity_bytes: cap, ..media.next(4 * MIB) })
        });
    }
}

#[test]
fn reports_what_it_will_evict() {
    let media = Media::new();
    conformance::check_cooling(&|blocks| open(media.next(blocks * (12 << 10))));
}

/// P5: the medium itself is the cap, and it is filled.
#[test]
fn a_full_medium_makes_room() {
    let media = Media::new();
    let tier = open(media.next(2 * MIB));
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
    let media = Media::new();
    let medium = media.next(4 * MIB);
    let first = open(medium.clone());
    let second = DaxTier::open(DaxConfig { lock_wait: Duration::ZERO, ..medium.clone() }).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Busy);
    assert!(second.to_string().contains("another depot uses this medium"), "{second}");
    drop(first);
    open(medium);
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let media = Media::new();
    // A partition table, a file system's superblock, a label at the end; our format in another version; a damaged
    // medium.
    for (what, at, bytes) in [
        ("partition table", 510, &b"\x55\xaa"[..]),
        ("file system", 1080, b"\x53\xef"),
        ("label", 4 * MIB - 100, b"label"),
        ("version", 0, b"KVDEPDAX\x09\0\0\0"),
        ("damage", 0, b"KVDEPDAX\x01\0\0\0"),
    ] {
        let medium = media.next(4 * MIB);
        let content = || {
            let mut bytes = vec![0; 4 << 20];
            raw(&medium).read(0, &mut bytes).unwrap();
            bytes
        };
        raw(&medium).write(at, bytes).unwrap();
        let before = content();
        let error = DaxTier::open(medium.clone()).unwrap_err();
        let kind = match what {
            "version" => ErrorKind::Version,
            "damage" => ErrorKind::Corrupt,
            _ => ErrorKind::Config,
        };
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(error.to_string().contains("zero"), "{what}: it says what to do: {error}");
        assert!(content() == before, "{what}: nothing was written");
    }
    for (path, kind) in [
        (media.dir.path().to_owned(), ErrorKind::Io),
        (media.dir.path().join("missing"), ErrorKind::NotFound),
        (PathBuf::from("/dev/null"), ErrorKind::Config),
        (media.file(0), ErrorKind::Config),
        (media.file(40_000), ErrorKind::Config),
    ] {
        let error = DaxTier::open(config(&path, 0)).unwrap_err();
        assert_eq!(error.kind(), kind, "{}: {error}", path.display());
    }
    let medium = media.next(4 * MIB);
    let error = DaxTier::open(DaxConfig { max_bytes: 1 << 50, ..medium.clone() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    open(medium.clone());
    let error = DaxTier::open(DaxConfig { max_bytes: 3 * MIB, ..medium.clone() }).unwrap_err();
    assert!(error.to_string().contains("truncated"), "{error}");
    open(medium);
}
