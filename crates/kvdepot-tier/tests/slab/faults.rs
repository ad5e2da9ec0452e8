//! A Slab tier on a medium that fails, hangs, is full or belongs to somebody else. P1, P2, P5, P10.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{ErrorKind, NamespaceSpec};
use kvdepot_io::faults::{Fault, FaultOp, FaultVolume, Faults, MemoryVolume};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{Presence, SlabConfig, SlabTier, Tier, Written};

const HANG: Duration = Duration::from_secs(60);
const SEGMENT_BYTES: u64 = 256 << 10;
const BYTES: usize = 2 << 20;

fn config(path: impl Into<std::path::PathBuf>) -> SlabConfig {
    SlabConfig {
        segment_bytes: SEGMENT_BYTES,
        read_threads: 1,
        write_threads: 1,
        open_wait: HANG,
        lock_wait: Duration::ZERO,
        ..SlabConfig::new(path)
    }
}

fn open(memory: &MemoryVolume, faults: &Faults, config: SlabConfig) -> Arc<SlabTier> {
    let volume = FaultVolume::new(Arc::new(memory.clone()), faults.clone());
    Arc::new(SlabTier::open_on(config, Arc::new(volume)).unwrap())
}

fn bench(memory: &MemoryVolume, faults: &Faults) -> Bench {
    Bench::new(open(memory, faults, config("/memory")) as _)
}

fn medium() -> MemoryVolume {
    MemoryVolume::new(vec![0; BYTES])
}

#[test]
fn a_write_that_fails_is_an_error_and_no_block() {
    for fault in [Fault::Eio, Fault::NoSpace, Fault::Short] {
        let (memory, faults) = (medium(), Faults::default());
        let bench = self::bench(&memory, &faults);
        bench.write_all(2);
        faults.at(FaultOp::Write, 0, fault);
        let kind = if fault == Fault::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Io };
        assert_eq!(bench.write(2).unwrap_err().kind(), kind);
        assert_eq!(bench.peek(2), Presence::Absent);
        assert_eq!(bench.tier.usage().blocks, 2);
        assert_eq!(bench.write(2).unwrap(), Written::New, "a failed write does not stick to its key");
        drop(bench);
        let bench = self::bench(&memory, &faults);
        assert!((0..3).all(|n| bench.read_is_right(n)));
    }
}

#[test]
fn a_medium_that_fails_for_long_is_written_again_when_it_works() {
    let (memory, faults) = (medium(), Faults::default());
    let bench = self::bench(&memory, &faults);
    bench.write_all(3);
    faults.chance(FaultOp::Write, Fault::Eio, 1.0);
    for n in 3..10 {
        assert_eq!(bench.write(n).unwrap_err().kind(), ErrorKind::Io);
    }
    bench.remove(0).unwrap();
    faults.set_enabled(false);
    (3..10).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
    bench.drain();
    drop(bench);
    let bench = self::bench(&memory, &faults);
    assert!((3..10).all(|n| bench.read_is_right(n)), "what was written after the failures");
    assert!(!bench.read_is_right(0), "the removal that met the failures was stored");
}

#[test]
fn a_sync_that_fails_fails_the_writes_that_wait_for_it() {
    let (memory, faults) = (medium(), Faults::default());
    let bench = self::bench(&memory, &faults);
    bench.write_all(1);
    faults.at(FaultOp::Flush, 0, Fault::Eio);
    assert_eq!(bench.write(1).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.peek(1), Presence::Absent);
    assert_eq!(bench.write(1).unwrap(), Written::New);
    assert!(bench.read_is_right(0) && bench.read_is_right(1));
}

#[test]
fn a_flipped_bit_is_an_error_once() {
    let (memory, faults) = (medium(), Faults::default());
    let bench = self::bench(&memory, &faults);
    bench.write_all(2);
    faults.at(FaultOp::Read, 0, Fault::Flip);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound, "and never served again");
    assert!(bench.read_is_right(1));
    bench.drain();
    drop(bench);
    let bench = self::bench(&memory, &faults);
    assert_eq!(bench.peek(0), Presence::Absent, "nor after a restart");
    assert!(bench.read_is_right(1));
}

#[test]
fn a_read_that_fails_costs_no_block() {
    let (memory, faults) = (medium(), Faults::default());
    let bench = self::bench(&memory, &faults);
    bench.write_all(1);
    faults.at(FaultOp::Read, 0, Fault::Eio);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Io);
    assert!(bench.read_is_right(0));
}

/// P2: what has not begun ends by its deadline, and what has begun ends when the medium responds.
#[test]
fn a_medium_that_hangs_ends_what_waits_by_its_deadline() {
    let (memory, faults) = (medium(), Faults::default());
    let tier = open(&memory, &faults, SlabConfig { pending_bytes_max: 1, ..config("/memory") });
    let bench = Bench::new(Arc::clone(&tier) as Arc<dyn Tier>);
    bench.write_all(1);
    faults.hang(FaultOp::Write);
    let begun = bench.begin_write(1, bench.filled(1), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()));
    let soon = Instant::now() + Duration::from_millis(50);
    let waiting: Vec<_> = (2..6).map(|n| bench.begin_write(n, bench.filled(n), soon)).collect();
    for write in &waiting {
        assert_eq!(Bench::answer(write).unwrap_err().kind(), ErrorKind::Timeout);
    }
    assert!(bench.read_is_right(0), "reads go on");
    assert!(!tier.drain(Instant::now()) && begun.try_recv().is_err());
    faults.release();
    assert_eq!(Bench::answer(&begun).unwrap(), Written::New);
    assert!(bench.read_is_right(1) && (2..6).all(|n| bench.peek(n) == Presence::Absent));
}

/// A reset fails closed: nothing old is served while it is not stored, and it is stored as soon as that is possible.
#[test]
fn a_reset_that_cannot_be_stored_hides_all_and_is_tried_again() {
    let (memory, faults) = (medium(), Faults::default());
    let mut bench = self::bench(&memory, &faults);
    bench.write_all(2);
    faults.chance(FaultOp::Write, Fault::Eio, 1.0);
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(bench.tier.open_and_wait(&bench.spec, 0).is_err(), "it stays closed");
    faults.set_enabled(false);
    let end = Bench::soon();
    let next = NamespaceSpec::id(&bench.spec, 1);
    bench.epoch = 1;
    while bench.write(7).is_err() {
        assert!(Instant::now() < end, "{next} is opened without being asked");
        std::thread::yield_now();
    }
    bench.drain();
    drop(bench);
    let bench = self::bench(&memory, &faults);
    assert!(bench.epoch == 1 && bench.read_is_right(7) && bench.tier.usage().blocks == 1);
}

#[test]
fn a_hung_medium_holds_up_a_reset_no_longer_than_its_wait() {
    let (memory, faults) = (medium(), Faults::default());
    let wait = Duration::from_millis(50);
    let tier = open(&memory, &faults, SlabConfig { open_wait: HANG, ..config("/memory") });
    let bench = Bench::new(Arc::clone(&tier) as Arc<dyn Tier>);
    bench.write_all(1);
    faults.hang(FaultOp::Write);
    let (send, receive) = std::sync::mpsc::channel();
    let spec = Arc::new(bench.spec.clone());
    tier.advance_epoch(&spec, 0, Instant::now() + wait, Box::new(move |end| drop(send.send(end))));
    assert_eq!(bench.peek(0), Presence::Absent, "before it is done");
    assert_eq!(Bench::answer(&receive).unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    faults.release();
}

fn refusal(config: SlabConfig) -> (ErrorKind, String) {
    let error = SlabTier::open(config).map(drop).unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn what_is_not_ours_is_refused_and_left_alone() {
    // On the disk of the build, where O_DIRECT works.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let mut late = vec![0; 1 << 20];
    late[65_536] = 1;
    for (name, bytes) in [("text", &b"not a medium"[..]), ("image", &[7; 9000]), ("late", &late)] {
        let path = file(name, bytes);
        let (kind, text) = refusal(SlabConfig { capacity_bytes: 2 << 20, ..config(&path) });
        assert_eq!(kind, ErrorKind::Config, "{text}");
        assert!(text.contains("something else") && text.contains(name), "{text}");
        assert!(std::fs::read(&path).unwrap() == bytes, "{name} was written to");
    }
    // The only description of some arrays and partition tables lies at the end, in the last sector or 64 KiB before it.
    for (bytes, before_end) in
        [(4 << 20, 1), (4 << 20, 512), (4 << 20, 1 << 16), (4 << 20, 1 << 20), ((4 << 20) + 700, 1)]
    {
        let mut content = vec![0; bytes];
        content[bytes - before_end] = 1;
        let path = file("end", &content);
        for capacity_bytes in [0, 2 << 20] {
            let (kind, text) = refusal(SlabConfig { capacity_bytes, ..config(&path) });
            assert_eq!(kind, ErrorKind::Config, "{text}");
            assert!(
                text.contains("something else") && text.contains("zero its first and last MiB"),
                "{text}"
            );
        }
        assert!(
            std::fs::read(&path).unwrap() == content,
            "{before_end} bytes before the end: it was written to"
        );
        content[bytes - before_end] = 0;
        std::fs::write(&path, &content).unwrap();
        drop(SlabTier::open(config(&path)).unwrap());
    }
    let path = dir.path().join("medium");
    let ours = || SlabConfig { capacity_bytes: 2 << 20, ..config(&path) };
    let tier = SlabTier::open(ours()).unwrap();
    let (kind, text) = refusal(ours());
    assert!(kind == ErrorKind::Busy && text.contains("another process"), "{text}");
    drop(tier);
    drop(SlabTier::open(SlabConfig { capacity_bytes: 0, lock_wait: HANG, ..config(&path) }).unwrap());
    let (kind, text) = refusal(SlabConfig { capacity_bytes: 3 << 20, lock_wait: HANG, ..config(&path) });
    assert!(kind == ErrorKind::Config && text.contains("another size"), "{text}");
    // A later version, in both superblocks.
    let mut bytes = std::fs::read(&path).unwrap();
    for at in [0, 4096] {
        bytes[at + 8] = 9;
        let sum = kvdepot_io::checksum::crc64(&bytes[at..at + 56]).to_le_bytes();
        bytes[at + 56..at + 64].copy_from_slice(&sum);
    }
    std::fs::write(&path, &bytes).unwrap();
    let (kind, text) = refusal(SlabConfig { lock_wait: HANG, ..ours() });
    assert!(kind == ErrorKind::Version && text.contains("version=9"), "{text}");
    assert!(std::fs::read(&path).unwrap() == bytes, "it was written to");
}

#[test]
fn a_start_that_cannot_work_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let new = |name: &str| config(dir.path().join(name));
    let (kind, text) = refusal(new("no-size"));
    assert!(kind == ErrorKind::Config && text.contains("slab_capacity_gb"), "{text}");
    let (kind, text) = refusal(SlabConfig { capacity_bytes: 1 << 19, ..new("small") });
    assert!(kind == ErrorKind::Config && text.contains("three segments"), "{text}");
    let (kind, text) = refusal(SlabConfig { capacity_bytes: 1 << 59, segment_bytes: 1 << 31, ..new("huge") });
    assert!(matches!(kind, ErrorKind::NoSpace | ErrorKind::Io), "{kind:?} {text}");
    assert!(text.contains("smaller capacity"), "{text}");
    assert_eq!(refusal(config(dir.path())).0, ErrorKind::Config, "a directory");
    assert_eq!(refusal(config(dir.path().join("not/there"))).0, ErrorKind::Config);
    assert_eq!(refusal(config("relative")).0, ErrorKind::Config);
    assert_eq!(refusal(config(Path::new("/dev/null"))).0, ErrorKind::Config);
}

#[test]
fn damaged_tables_of_namespaces_are_refused_and_one_is_enough() {
    let (memory, faults) = (medium(), Faults::default());
    let bench = self::bench(&memory, &faults);
    let epoch = bench.tier.advance_and_wait(&bench.spec, 5).unwrap();
    drop(bench);
    let image = memory.crash(memory.operations(), |_| kvdepot_io::faults::Kept::All);
    let damaged = |at: &[usize]| {
        let mut image = image.clone();
        at.iter().for_each(|at| image[*at] ^= 1);
        MemoryVolume::new(image)
    };
    let (first, second) = (8192 + 40, 8192 + 65_536 + 40);
    for one in [first, second] {
        assert_eq!(self::bench(&damaged(&[one]), &faults).epoch, epoch, "the other one knows");
    }
    let both = damaged(&[first, second]);
    let error = SlabTier::open_on(config("/memory"), Arc::new(both)).map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("tables"), "{error}");
}

/// P5, and the order in which blocks go.
#[test]
fn the_oldest_segment_goes_and_blocks_in_use_stay() {
    let (memory, faults) = (medium(), Faults::default());
    let tier = open(&memory, &faults, config("/memory"));
    let bench = Bench::new(Arc::clone(&tier) as Arc<dyn Tier>);
    bench.write_all(4);
    for n in 4..300 {
        tier.touch(&[bench.key(0)]);
        assert!(bench.read_is_right(2));
        assert_eq!(bench.write(n).unwrap(), Written::New, "room is made for every block");
        let usage = tier.usage();
        assert!(usage.bytes <= usage.bytes_max && usage.bytes_max <= BYTES as u64, "{usage:?}");
    }
    bench.drain();
    assert!(bench.read_is_right(0) && bench.read_is_right(2), "those that were used stay");
    assert!(!bench.read_is_right(1) && !bench.read_is_right(4), "the oldest go");
    let there = (0..300).filter(|&n| bench.read_is_right(n)).count() as u64;
    assert_eq!(there, tier.usage().blocks);
    assert!(there > 50, "{there} blocks: most of the medium is used");
    let stats = tier.stats();
    assert_eq!(stats.accepted_bytes, 300 * 16_384);
    assert!(stats.rewritten_bytes >= 2 * 16_384 && stats.blocks_evicted > 100, "{stats:?}");
    let written = stats.accepted_bytes + stats.rewritten_bytes;
    assert!(stats.written_bytes > written && stats.written_bytes < 2 * written, "{stats:?}");
}
