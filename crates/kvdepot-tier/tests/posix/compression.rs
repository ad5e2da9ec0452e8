//! Compressed blocks: the suite of all tiers, directories with blocks of both forms, the cap, damage.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::common::{block_file, config, open};
use futures_util::TryStreamExt;
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::{DirectUse, EngineKind, SlotBuf};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::encoding::Encoding;
use kvdepot_tier::format::BlockHeader;
use kvdepot_tier::{Compression, ObjectConfig, ObjectTier, PosixConfig, Tier, Written, conformance};
use object_store::{ObjectStore, ObjectStoreExt};

const PLAIN_BYTES: u64 = 16_384;
const ENCODED_BYTES: u64 = 12_288;

fn temporary() -> tempfile::TempDir {
    let base = std::env::var_os("KVDEPOT_TEST_DIR").unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    tempfile::tempdir_in(base).unwrap()
}

fn compressing(dir: &Path) -> PosixConfig {
    fs::create_dir_all(dir).unwrap();
    PosixConfig { compression: Compression::On, ..config(dir) }
}

fn header(dir: &Path, bench: &Bench, n: u64) -> BlockHeader {
    BlockHeader::parse(&fs::read(block_file(dir, bench, n)).unwrap()).unwrap()
}

fn figure(tier: &dyn Tier, name: &str) -> u64 {
    tier.figures().into_iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("{name}")).1
}

fn write(bench: &Bench, n: u64) {
    bench.write(n).unwrap();
}

/// The length of the file of block `n`: every third one is random.
const fn file_bytes(n: u64) -> u64 {
    if n % 3 == 2 { PLAIN_BYTES } else { ENCODED_BYTES }
}

#[test]
fn the_suite_on_every_engine() {
    let (dir, count) = (temporary(), Cell::new(0));
    let next = || {
        count.set(count.get() + 1);
        dir.path().join(count.get().to_string())
    };
    for (engine, io_direct) in [
        (EngineKind::Psync, DirectUse::ColdReads),
        (EngineKind::Aio, DirectUse::Always),
        (EngineKind::IoUring, DirectUse::Always),
    ] {
        let at = |place: &Path, cap: u64| {
            let config = PosixConfig { engine, io_direct, capacity_bytes: cap, ..compressing(place) };
            open(config) as Arc<dyn Tier>
        };
        conformance::check(&|| at(&next(), 0));
        let place = next();
        conformance::check_persistent(&|| at(&place, 0));
        conformance::check_capped(&|cap| at(&next(), cap));
    }
}

#[test]
fn the_suite_on_a_bucket() {
    let bucket = |compression| {
        let store = Arc::new(object_store::memory::InMemory::new());
        move || {
            let config = ObjectConfig { compression, ..ObjectConfig::new("s3://bucket").unwrap() };
            Arc::new(ObjectTier::open_on(config, Arc::clone(&store) as _).unwrap()) as Arc<dyn Tier>
        }
    };
    conformance::check(&|| bucket(Compression::On)());
    conformance::check_persistent(&bucket(Compression::On));
}

#[test]
fn a_bucket_with_blocks_of_both_forms_is_read_by_either() {
    let store = Arc::new(object_store::memory::InMemory::new());
    let open = |compression| {
        let config = ObjectConfig { compression, ..ObjectConfig::new("s3://bucket").unwrap() };
        Bench::new(Arc::new(ObjectTier::open_on(config, Arc::clone(&store) as _).unwrap()))
    };
    let (plain, compressed) = (open(Compression::Off), open(Compression::On));
    (0..6).for_each(|n| write(&plain, n));
    (6..12).for_each(|n| write(&compressed, n));
    for bench in [&plain, &compressed, &open(Compression::Auto)] {
        (0..12).for_each(|n| assert!(bench.read_is_right(n), "{n}"));
    }
    let usage = compressed.tier.usage();
    assert_eq!(usage.bytes, 6 * PLAIN_BYTES + (6..12).map(file_bytes).sum::<u64>());
    assert_eq!(figure(&*compressed.tier, "compressed_blocks"), 4);
    assert_eq!(figure(&*compressed.tier, "decompressed_blocks"), 4);
    assert_eq!(figure(&*plain.tier, "decompressed_blocks"), 4, "told although it compresses none");
}

/// A block of a later version is a miss here, and stays for the depots that can read it.
#[test]
fn an_object_in_an_unknown_encoding_is_a_miss_and_stays() {
    let store = Arc::new(object_store::memory::InMemory::new());
    let config = ObjectConfig { compression: Compression::On, ..ObjectConfig::new("s3://bucket").unwrap() };
    let bench = Bench::new(Arc::new(ObjectTier::open_on(config, Arc::clone(&store) as _).unwrap()));
    write(&bench, 0);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let objects = || runtime.block_on(store.list(None).try_collect::<Vec<_>>()).unwrap();
    let block = objects().into_iter().find(|object| object.size == ENCODED_BYTES).unwrap().location;
    let mut bytes = runtime.block_on(async { store.get(&block).await?.bytes().await }).unwrap().to_vec();
    let mut header = BlockHeader::parse(&bytes).unwrap();
    header.encoding = 3;
    let pages = header.encode();
    bytes[..pages.len()].copy_from_slice(&pages);
    runtime.block_on(store.put(&block, bytes.into())).unwrap();
    assert!(!bench.read_is_right(0));
    assert_eq!(figure(&*bench.tier, "corrupt_blocks"), 0);
    assert!(objects().iter().any(|object| object.location == block), "it is there");
}

#[test]
fn blocks_that_get_smaller_are_stored_compressed_and_counted() {
    let dir = temporary();
    let tier = open(compressing(dir.path()));
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(6);
    for n in 0..6 {
        let (header, path) = (header(dir.path(), &bench, n), block_file(dir.path(), &bench, n));
        assert_eq!(Encoding::of(header.encoding).is_some(), n % 3 != 2, "{n}");
        assert_eq!(header.file_bytes(), file_bytes(n));
        assert_eq!(fs::metadata(path).unwrap().len(), file_bytes(n));
        assert!(bench.read_is_right(n));
    }
    let total: u64 = (0..6).map(file_bytes).sum();
    assert_eq!(tier.usage().bytes, total);
    for (name, expected) in [
        ("compressed_blocks", 4),
        ("uncompressed_blocks", 2),
        ("compression_input_bytes", 6 * (PLAIN_BYTES - 4096)),
        ("compression_output_bytes", total - 6 * 4096),
        ("decompressed_blocks", 4),
        ("decompressed_bytes", 4 * (PLAIN_BYTES - 4096)),
    ] {
        assert_eq!(figure(&*tier, name), expected, "{name}");
    }
    assert!(figure(&*tier, "compression_cpu_us") > 0);
}

#[test]
fn a_tier_that_does_not_compress_tells_nothing() {
    let dir = temporary();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(1);
    assert!(bench.read_is_right(0));
    assert_eq!(bench.tier.figures(), []);
}

/// The slot's bytes after the block belong to an earlier one, and must not be seen after a compressed read either.
#[test]
fn padding_of_a_slot_is_zero_after_a_read() {
    let dir = temporary();
    let bench = Bench::new(open(compressing(dir.path())));
    bench.write_all(1);
    let slot = bench.slot();
    Bench::answer(&bench.begin_read(0, slot.clone(), Bench::soon())).unwrap();
    let mut rest = vec![1; slot.len() - 10_000];
    slot.read_at(10_000, &mut rest);
    assert!(rest.iter().all(|&byte| byte == 0));
}

#[test]
fn the_key_may_change_between_restarts() {
    for shared in [true, false] {
        let dir = temporary();
        let modes = [Compression::On, Compression::Off, Compression::Auto, Compression::On];
        for (round, compression) in modes.into_iter().enumerate() {
            let tier = open(PosixConfig { shared, compression, ..config(dir.path()) });
            let bench = Bench::new(Arc::clone(&tier) as _);
            assert!(tier.wait_scanned(Bench::soon()));
            let (before, after) = (round as u64 * 6, round as u64 * 6 + 6);
            (0..before).for_each(|n| assert!(bench.read_is_right(n), "{round} {n}"));
            assert_eq!(bench.probe(bench.keys(before)).unwrap() as u64, before);
            assert!((before..after).all(|n| bench.write(n).is_ok()));
            let files: u64 = (0..after).map(|n| header(dir.path(), &bench, n).file_bytes()).sum();
            assert_eq!(tier.usage().bytes, files, "{round}");
        }
    }
}

/// What one depot has compressed, another one finds that does not compress, and the other way round, also before it has
/// scanned.
#[test]
fn two_depots_with_different_settings_share_a_directory() {
    let dir = temporary();
    let compressed = Bench::new(open(compressing(dir.path())));
    let plain = Bench::new(open(config(dir.path())));
    compressed.write_all(3);
    (3..6).for_each(|n| write(&plain, n));
    for bench in [&compressed, &plain] {
        assert_eq!(bench.probe(bench.keys(6)).unwrap(), 6);
        (0..6).for_each(|n| assert!(bench.read_is_right(n), "{n}"));
        // Written by the other one.
        (0..6).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::AlreadyThere));
        let files: u64 = (0..6).map(|n| header(dir.path(), bench, n).file_bytes()).sum();
        assert_eq!(bench.tier.usage().bytes, files);
    }
}

/// The length that is charged follows a file that another depot has written anew.
#[test]
fn a_read_corrects_the_charged_length() {
    for (first, second, bytes) in
        [(Compression::On, Compression::Off, PLAIN_BYTES), (Compression::Off, Compression::On, ENCODED_BYTES)]
    {
        let dir = temporary();
        let open = |compression| {
            let tier = open(PosixConfig { compression, ..config(dir.path()) });
            let bench = Bench::new(Arc::clone(&tier) as _);
            assert!(tier.wait_scanned(Bench::soon()));
            bench
        };
        let bench = open(first);
        bench.write_all(1);
        fs::remove_file(block_file(dir.path(), &bench, 0)).unwrap();
        open(second).write_all(1);
        assert_ne!(bench.tier.usage().bytes, bytes);
        assert!(bench.read_is_right(0));
        assert_eq!(bench.tier.usage().bytes, bytes);
        bench.remove(0).unwrap();
        bench.drain();
        assert_eq!(bench.tier.usage().bytes, 0);
    }
}

#[test]
fn a_cap_holds_more_blocks_that_are_compressed() {
    let dir = temporary();
    let tier =
        open(PosixConfig { capacity_bytes: 8 * ENCODED_BYTES, shared: false, ..compressing(dir.path()) });
    let bench = Bench::new(Arc::clone(&tier) as _);
    let compressible: Vec<u64> = (0..30).filter(|n| n % 3 != 2).take(8).collect();
    compressible.iter().for_each(|n| write(&bench, *n));
    assert_eq!((tier.usage().blocks, tier.usage().bytes), (8, 8 * ENCODED_BYTES));
    // A plain one needs the space of two.
    bench.write(2).unwrap();
    assert_eq!((tier.usage().blocks, tier.usage().bytes), (7, 6 * ENCODED_BYTES + PLAIN_BYTES));
    // And two of them find space in the place of one.
    for n in 30..90 {
        bench.write(n).unwrap();
        assert!(tier.usage().bytes <= 8 * ENCODED_BYTES, "P5");
    }
    bench.drain();
    assert!(bench.read_is_right(89));
}

/// A checkpoint has the lengths of compressed files.
#[test]
fn a_start_from_a_checkpoint_charges_what_files_have() {
    let dir = temporary();
    let config = PosixConfig { shared: false, ..compressing(dir.path()) };
    let expected: u64 = (0..12).map(file_bytes).sum();
    {
        let tier = open(config.clone());
        let bench = Bench::new(Arc::clone(&tier) as _);
        bench.write_all(12);
        assert!(tier.wait_scanned(Bench::soon()));
        tier.checkpoint().unwrap();
    }
    let tier = open(config);
    let bench = Bench::new(Arc::clone(&tier) as _);
    assert!(tier.wait_scanned(Bench::soon()));
    assert_eq!((tier.usage().blocks, tier.usage().bytes), (12, expected));
    (0..12).for_each(|n| assert!(bench.read_is_right(n)));
}

/// P1: whatever is changed in a compressed file, it is a miss, and kept aside as any other.
#[test]
fn a_damaged_compressed_file_is_a_miss_and_set_aside() {
    let dir = temporary();
    let tier = open(compressing(dir.path()));
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(1);
    assert!(tier.wait_scanned(Bench::soon()));
    let path = block_file(dir.path(), &bench, 0);
    let whole = fs::read(&path).unwrap();
    let stored = 4096 + usize::try_from(header(dir.path(), &bench, 0).stored_bytes).unwrap();
    let damage = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Corrupt, "{what}");
        assert!(path.with_extension("bad").exists() && !path.exists(), "{what}");
        bench.write(0).unwrap();
        assert!(bench.read_is_right(0), "{what}");
    };
    for at in [4096, 4099, 4100, 4105, 6000, stored - 1, stored, whole.len() - 1] {
        damage(&format!("a bit of byte {at}"), &|bytes| bytes[at] ^= 1);
    }
    for length in [8192, stored / 4096 * 4096] {
        damage(&format!("{length} bytes"), &|bytes| bytes.truncate(length));
    }
    damage("another encoding of ours", &|bytes| {
        let mut header = BlockHeader::parse(bytes).unwrap();
        header.encoding = 3 - header.encoding;
        let pages = header.encode();
        bytes[..pages.len()].copy_from_slice(&pages);
    });
    damage("zeros", &|bytes| bytes[4096..].fill(0));
}

/// A truncated file is not taken for a compressed one: a write replaces it.
#[test]
fn a_truncated_file_is_written_again() {
    for compression in [Compression::On, Compression::Off] {
        let dir = temporary();
        let tier = open(compressing(dir.path()));
        let bench = Bench::new(Arc::clone(&tier) as _);
        assert!(tier.wait_scanned(Bench::soon()));
        let other = Bench::new(open(PosixConfig { compression, ..config(dir.path()) }));
        other.write_all(1);
        let file = fs::File::options().write(true).open(block_file(dir.path(), &other, 0)).unwrap();
        file.set_len(8192).unwrap();
        assert_eq!(bench.probe(bench.keys(1)).unwrap(), 0);
        assert_eq!(bench.write(0).unwrap(), Written::New);
        assert!(bench.read_is_right(0));
    }
}

/// `auto` compresses the blocks of a namespace that pay, and measures others without delay for their writers.
#[test]
fn auto_decides_by_namespace() {
    let dir = temporary();
    let tier = open(PosixConfig { compression: Compression::Auto, ..config(dir.path()) });
    let layout = || BlockLayout::new(vec![vec![1 << 20]]).unwrap();
    let zeros = Bench::with(Arc::clone(&tier) as _, spec("zeros", layout()));
    let random = Bench::with(Arc::clone(&tier) as _, spec("random", layout()));
    for n in 0..8 {
        let slot = SlotBuf::anonymous(1 << 20);
        Bench::answer(&zeros.begin_write(100 + n, slot, Bench::soon())).unwrap();
        // Every third block has random bytes.
        random.write(3 * n + 2).unwrap();
    }
    let encoded = |bench: &Bench, n| header(dir.path(), bench, n).encoding != 0;
    let count = (0..8).filter(|n| encoded(&zeros, 100 + n)).count();
    assert!(count >= 5, "all after the samples: {count}");
    assert!((0..8).all(|n| !encoded(&random, 3 * n + 2)));
    assert_eq!(random.epoch, zeros.epoch);
    assert!((0..8).all(|n| random.read_is_right(3 * n + 2)));
    let epoch = zeros.tier.advance_and_wait(&zeros.spec, zeros.epoch + 1).unwrap();
    let again = Bench { tier: Arc::clone(&zeros.tier), spec: zeros.spec.clone(), epoch };
    let slot = SlotBuf::anonymous(usize::try_from(again.spec.layout().slot_bytes()).unwrap());
    Bench::answer(&again.begin_write(200, slot, Bench::soon())).unwrap();
    assert!(encoded(&again, 200), "the choice outlives a reset");
}
