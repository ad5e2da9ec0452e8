//! P1, P2, P4 on a failing DAX medium: regions that fail while others copy, a close in the middle, damage, truncation.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvdepot_core::{BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;
use kvdepot_io::mapped::{Access, HookMedium, Medium, MediumCall, MemoryMedium};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::dax::layout::PAGE_BYTES;
use kvdepot_tier::{DaxConfig, DaxTier, Fetched, ReadItem, Tier, Written};

const BLOCK: u64 = 256 << 10;
/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

fn config() -> DaxConfig {
    DaxConfig { restore_workers: 4, open_wait: HANG, lock_wait: HANG, ..DaxConfig::new("memory") }
}

/// What a test makes the medium do.
type Rule = Box<dyn Fn(MediumCall) -> Result<()> + Send + Sync>;

/// A medium in memory whose rule can be changed.
struct Scripted {
    memory: MemoryMedium,
    rule: Arc<Mutex<Option<Arc<Rule>>>>,
    /// Number of reads of blocks and tables that have begun.
    reads: Arc<AtomicUsize>,
}

impl Scripted {
    fn new() -> Self {
        Self { memory: MemoryMedium::new(vec![0; 16 << 20]), rule: Arc::default(), reads: Arc::default() }
    }

    fn medium(&self) -> Arc<dyn Medium> {
        let (rule, reads) = (Arc::clone(&self.rule), Arc::clone(&self.reads));
        let hook = move |call| {
            let is_block = matches!(call, MediumCall::Read { at, .. } if at >= PAGE_BYTES);
            reads.fetch_add(usize::from(is_block), Ordering::SeqCst);
            let rule = rule.lock().unwrap().clone();
            rule.map_or(Ok(()), |rule| rule(call))
        };
        Arc::new(HookMedium::new(Arc::new(self.memory.clone()), Box::new(hook)))
    }

    fn open(&self) -> Arc<DaxTier> {
        Arc::new(DaxTier::open_on(config(), self.medium()).unwrap())
    }

    fn set(&self, rule: impl Fn(MediumCall) -> Result<()> + Send + Sync + 'static) {
        *self.rule.lock().unwrap() = Some(Arc::new(Box::new(rule)));
    }

    fn clear(&self) {
        *self.rule.lock().unwrap() = None;
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::Io, "a fault for a test")
}

/// Blocks of 256 KiB, each four times the smallest size of a region.
fn bench(tier: Arc<dyn Tier>) -> Bench {
    Bench::with(tier, spec("dax", BlockLayout::new(vec![vec![BLOCK]]).unwrap()))
}

fn read_all(bench: &Bench, count: u64) -> (Vec<SlotBuf>, Vec<Receiver<Result<Fetched>>>) {
    let slots: Vec<SlotBuf> = (0..count).map(|_| bench.slot()).collect();
    let (mut reads, mut ends) = (Vec::new(), Vec::new());
    for (n, slot) in slots.iter().enumerate() {
        let (send, receive) = channel();
        let done = Box::new(move |outcome| drop(send.send(outcome)));
        reads.push(ReadItem::new(bench.key(n as u64), slot.clone(), done));
        ends.push(receive);
    }
    bench.tier.read(reads, Bench::soon());
    (slots, ends)
}

/// Offset of block `n`: blocks are written one after another into an empty medium.
fn at(tier: &DaxTier, n: u64) -> u64 {
    tier.geometry().data_at() + n * BLOCK
}

/// Makes the second region of a read of two blocks wait in the middle of its copy; returns the receiver that reports
/// its beginning, and the sender that lets it continue.
fn hold(script: &Scripted, held_at: u64, fails_at: Option<u64>) -> (Receiver<()>, Sender<()>) {
    let (begun, begins) = channel();
    let (let_go, held) = channel::<()>();
    let (begun, held) = (Mutex::new(begun), Mutex::new(held));
    script.set(move |call| match call {
        MediumCall::Read { at, .. } if at == held_at => {
            let _ = begun.lock().unwrap().send(());
            let _ = held.lock().unwrap().recv();
            Ok(())
        }
        MediumCall::Read { at, .. } if Some(at) == fails_at => Err(broken()),
        _ => Ok(()),
    });
    (begins, let_go)
}

/// The race to avoid: a region fails, the caller is notified, and frees memory into which another worker is still
/// copying.
#[test]
fn nobody_is_told_while_a_worker_copies_into_his_block() {
    let script = Scripted::new();
    let tier = script.open();
    let bench = bench(Arc::clone(&tier) as _);
    bench.write_all(4);
    // One block in four regions: the first fails, the last is held in the middle of its copy.
    let (begins, let_go) = hold(&script, at(&tier, 0) + BLOCK * 3 / 4, Some(at(&tier, 0)));
    let before = script.reads.load(Ordering::SeqCst);
    let (slots, ends) = read_all(&bench, 1);
    begins.recv_timeout(HANG).unwrap();
    // All four have begun, and three have released the memory: left are this test's reference, the block's, and one
    // worker's.
    let is_at_rest = || {
        script.reads.load(Ordering::SeqCst) == before + 4 && format!("{:?}", slots[0]).contains("3 holders")
    };
    let end = Bench::soon();
    while !is_at_rest() {
        assert!(ends[0].try_recv().is_err(), "told while workers still copy into its memory (P4)");
        assert!(std::time::Instant::now() < end, "three of four regions end: {:?}", slots[0]);
        std::thread::yield_now();
    }
    // What the three workers still had to do is done once other reads have run on them.
    (1..4).for_each(|n| assert!(bench.read_is_right(n)));
    assert!(ends[0].try_recv().is_err(), "told while a worker still copies into its memory (P4)");
    drop(let_go);
    let error = ends[0].recv_timeout(HANG).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(format!("{:?}", slots[0]).contains("1 holders"), "the memory is the caller's again");
    script.clear();
    assert!(bench.read_is_right(0), "an error of a read costs no block");
}

#[test]
fn blocks_beside_a_region_that_fails_keep_their_places() {
    let script = Scripted::new();
    let tier = script.open();
    let bench = bench(Arc::clone(&tier) as _);
    bench.write_all(8);
    bench.remove(5).unwrap();
    let bad = at(&tier, 2);
    script.set(move |call| match call {
        MediumCall::Read { at, bytes } if at <= bad && bad < at + bytes as u64 => Err(broken()),
        _ => Ok(()),
    });
    let (slots, ends) = read_all(&bench, 8);
    let ends: Vec<_> = ends.iter().map(|end| end.recv_timeout(HANG).unwrap()).collect();
    let bytes = |n: u64| bench.block_of(&slots[n as usize]);
    for (n, end) in (0..).zip(&ends) {
        match n {
            5 => assert_eq!(*end.as_ref().unwrap(), Fetched::Miss),
            // Blocks that share its region are read again without it.
            2 => assert_eq!(end.as_ref().unwrap_err().kind(), ErrorKind::Io),
            _ => {
                assert_eq!(*end.as_ref().unwrap(), Fetched::Whole, "block {n}");
                assert_eq!(bytes(n), bench.bytes(n));
            }
        }
    }
}

#[test]
fn a_close_in_the_middle_waits_for_the_worker() {
    let script = Scripted::new();
    let tier = script.open();
    let bench = bench(Arc::clone(&tier) as _);
    bench.write_all(2);
    let (begins, let_go) = hold(&script, at(&tier, 1) + BLOCK / 2, None);
    let (slots, ends) = read_all(&bench, 2);
    begins.recv_timeout(HANG).unwrap();
    // Neither the held region nor what waits behind it is reported; the tier goes away in the meantime.
    let closing = std::thread::spawn(move || drop((bench, tier)));
    closing.join().unwrap();
    assert!(ends[1].try_recv().is_err(), "told while a worker still copies into its memory (P4)");
    drop(let_go);
    for end in &ends {
        assert!(matches!(end.recv_timeout(HANG).unwrap(), Ok(Fetched::Whole) | Err(_)));
    }
    let free = |slot: &SlotBuf| format!("{slot:?}").contains("1 holders");
    assert!(slots.iter().all(free), "{slots:?}");
}

#[test]
fn several_restores_go_on_side_by_side() {
    let script = Scripted::new();
    let tier = script.open();
    let bench = bench(Arc::clone(&tier) as _);
    bench.write_all(6);
    let (begins, let_go) = hold(&script, at(&tier, 0), None);
    let (_slots, held) = read_all(&bench, 1);
    begins.recv_timeout(HANG).unwrap();
    (1..6).for_each(|n| assert!(bench.read_is_right(n), "block {n} beside one that hangs"));
    assert!(held[0].try_recv().is_err());
    drop(let_go);
    assert_eq!(held[0].recv_timeout(HANG).unwrap().unwrap(), Fetched::Whole);
}

/// P4: the place of a block that is removed and reset while it is being read is given to nobody.
#[test]
fn a_place_that_is_read_is_not_used_again() {
    let script = Scripted::new();
    let tier = script.open();
    let mut bench = bench(Arc::clone(&tier) as _);
    bench.write_all(2);
    let (begins, let_go) = hold(&script, at(&tier, 1), None);
    let old = bench.bytes(1);
    let slot = bench.slot();
    let read = bench.begin_read(1, slot.clone(), Bench::soon());
    begins.recv_timeout(HANG).unwrap();
    bench.remove(1).unwrap();
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    // More than the medium holds: every other place is reused, some of them twice.
    for n in 100..250 {
        assert_eq!(bench.write(n).unwrap(), Written::New);
    }
    drop(let_go);
    Bench::answer(&read).expect("it began before the removal");
    assert_eq!(bench.block_of(&slot), old, "its place was written over while it was read (P4)");
}

#[test]
fn a_write_that_fails_anywhere_leaves_nothing_to_be_found() {
    // Calls of one write: the payload, a flush, the header, a flush.
    for failing in 0..4 {
        let script = Scripted::new();
        let bench = bench(script.open());
        bench.write_all(1);
        let left = Mutex::new(failing);
        script.set(move |call| {
            if matches!(call, MediumCall::Read { .. }) {
                return Ok(());
            }
            let mut left = left.lock().unwrap();
            *left -= 1;
            if *left == -1 { Err(broken()) } else { Ok(()) }
        });
        assert_eq!(bench.write(1).unwrap_err().kind(), ErrorKind::Io, "call {failing}");
        script.clear();
        assert!(bench.read(1).is_err() && bench.read_is_right(0));
        let used = bench.tier.usage().bytes;
        assert_eq!(bench.write(1).expect("a failed write does not stick to its key"), Written::New);
        assert!(bench.read_is_right(1));
        assert!(bench.tier.usage().bytes <= used.max(2 * BLOCK), "what failed gives its place back");
        drop(bench);
        let bench = self::bench(script.open());
        assert!(bench.read_is_right(0) && bench.read_is_right(1), "call {failing}: after a restart");
    }
}

#[test]
fn a_removal_that_fails_says_so_and_is_made_up_for() {
    let script = Scripted::new();
    let bench = bench(script.open());
    bench.write_all(2);
    script.set(|call| if matches!(call, MediumCall::Write { .. }) { Err(broken()) } else { Ok(()) });
    assert_eq!(bench.remove(0).unwrap_err().kind(), ErrorKind::Io);
    assert!(bench.read(0).is_err(), "out of reach all the same");
    script.clear();
    // The next write clears what was left.
    bench.write(7).unwrap();
    drop(bench);
    let bench = self::bench(script.open());
    assert!(bench.read(0).is_err() && bench.read_is_right(1) && bench.read_is_right(7));
}

#[test]
fn a_reset_that_is_not_stored_hides_all_and_is_tried_again() {
    let script = Scripted::new();
    let mut bench = bench(script.open());
    bench.write_all(2);
    script.set(|call| if matches!(call, MediumCall::Write { .. }) { Err(broken()) } else { Ok(()) });
    bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err();
    assert!(bench.read(0).is_err() && bench.write(5).is_err(), "closed until it is stored");
    script.clear();
    // Stored by the retry thread or by this opening: in any case a new epoch.
    let epoch = bench.tier.open_and_wait(&bench.spec, 0).unwrap();
    assert!(epoch > bench.epoch);
    assert!(bench.read(0).is_err());
    bench.epoch = epoch;
    bench.write_all(1);
    drop(bench);
    let bench = self::bench(script.open());
    assert_eq!(bench.epoch, epoch);
    assert!(bench.read_is_right(0) && bench.read(1).is_err());
}

#[test]
fn damage_is_an_error_once_and_then_a_miss() {
    let script = Scripted::new();
    let tier = script.open();
    let bench = bench(Arc::clone(&tier) as _);
    bench.write_all(3);
    // In each of the four regions of a block.
    for (n, part) in [(0, 0), (1, 3)] {
        script.memory.damage(at(&tier, n) + part * BLOCK / 4 + 17, |bytes| bytes[0] ^= 4);
        assert_eq!(bench.read(n).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(bench.read(n).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(bench.write(n).unwrap(), Written::New);
        assert!(bench.read_is_right(n));
    }
    drop((bench, tier));
    // A damaged header is ignored; an epoch with a damaged copy is assumed to be over.
    let geometry = script.open().geometry();
    script.memory.damage(geometry.header_at((2 * BLOCK / geometry.unit_bytes) as u32), |line| line[33] ^= 1);
    let bench = self::bench(script.open());
    assert!(bench.read_is_right(0) && bench.read_is_right(1) && bench.read(2).is_err());
    let epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    drop(bench);
    script.memory.damage(geometry.epochs_at(), |table| {
        let newest = table[..128].chunks(64).position(|copy| copy[4] == epoch as u8).unwrap();
        table[newest * 64 + 30] ^= 1;
    });
    let bench = self::bench(script.open());
    assert!(bench.epoch >= epoch, "epoch {} came back from before {epoch} (P1)", bench.epoch);
    assert_eq!(bench.tier.usage().bytes, 0);
}

/// A truncated medium is an error and never a signal, with any way of access.
#[test]
fn a_truncated_medium_is_an_error() {
    for access in [Access::Pread, Access::Mapped, Access::AsDevice] {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().set_len(16 << 20).unwrap();
        let open = |path: &Path| {
            DaxTier::open(DaxConfig { access, ..DaxConfig { device_path: path.into(), ..config() } })
        };
        let bench = bench(Arc::new(open(file.path()).unwrap()));
        bench.write_all(20);
        file.as_file().set_len(3 << 20).unwrap();
        let mut failed = 0;
        for n in 0..20 {
            match bench.read(n) {
                Ok(bytes) => assert_eq!(bytes, bench.bytes(n), "{access:?}: block {n} (P1)"),
                Err(error) => {
                    failed += 1;
                    assert_eq!(error.kind(), ErrorKind::Io, "{access:?}: {error}");
                    assert!(error.to_string().contains("truncated"), "{error}");
                }
            }
        }
        assert!(failed > 5, "{access:?}: {failed}");
        assert_eq!(bench.write(50).unwrap_err().kind(), ErrorKind::Io, "{access:?}: a flush tells it");
        drop(bench);
        let error = open(file.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{access:?}: {error}");
        file.as_file().set_len(16 << 20).unwrap();
        let bench = self::bench(Arc::new(open(file.path()).unwrap()));
        assert!((0..20).filter(|n| bench.read_is_right(*n)).count() > 5, "what lies below the cut is whole");
    }
}

#[test]
fn a_medium_that_was_removed_takes_no_more_writes() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("medium");
    for access in [Access::Pread, Access::Mapped] {
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        let config = DaxConfig { access, device_path: path.clone(), ..config() };
        let bench = bench(Arc::new(DaxTier::open(config).unwrap()));
        bench.write_all(1);
        std::fs::remove_file(&path).unwrap();
        assert!(bench.read_is_right(0), "{access:?}");
        assert!(bench.write(1).unwrap_err().to_string().contains("removed"), "{access:?}");
    }
}
