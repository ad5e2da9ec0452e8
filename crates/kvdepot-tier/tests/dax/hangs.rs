//! P2, P8: a DAX medium that hangs or has bad pages blocks nothing but what lies there; and a removal succeeds only if
//! no header names the block.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockKey, BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;
use kvdepot_io::mapped::{HookMedium, MediumCall, MemoryMedium};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::dax::layout::HEADER_BYTES;
use kvdepot_tier::{DaxConfig, DaxTier, Fetched, ReadItem, Tier};

const BLOCK: u64 = 256 << 10;
/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

/// The end of a read.
type End = Receiver<Result<Fetched>>;
/// A medium, its tier, the sender that lets the hung worker go on, and the ends of all reads.
type Hung = (Arc<Scripted>, Bench, Sender<()>, Vec<End>);
type Rule = dyn Fn(MediumCall) -> Result<()> + Send + Sync;

/// A medium in memory whose rule can be changed.
pub(crate) struct Scripted {
    memory: MemoryMedium,
    rule: Arc<Mutex<Option<Arc<Rule>>>>,
}

impl Scripted {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { memory: MemoryMedium::new(vec![0; bytes]), rule: Arc::default() }
    }

    fn medium(&self) -> Arc<HookMedium> {
        let rule = Arc::clone(&self.rule);
        let hook = move |call| {
            let rule = rule.lock().unwrap().clone();
            rule.map_or(Ok(()), |rule| rule(call))
        };
        Arc::new(HookMedium::new(Arc::new(self.memory.clone()), Box::new(hook)))
    }

    fn open_with(&self, change: impl FnOnce(&mut DaxConfig)) -> Arc<DaxTier> {
        let mut config = DaxConfig { open_wait: HANG, ..DaxConfig::new("memory") };
        change(&mut config);
        Arc::new(DaxTier::open_on(config, self.medium()).unwrap())
    }

    pub(crate) fn open(&self) -> Arc<DaxTier> {
        self.open_with(|_| {})
    }

    pub(crate) fn set(&self, rule: impl Fn(MediumCall) -> Result<()> + Send + Sync + 'static) {
        *self.rule.lock().unwrap() = Some(Arc::new(rule));
    }

    pub(crate) fn clear(&self) {
        *self.rule.lock().unwrap() = None;
    }

    /// Makes calls of this kind wait; returns the receiver that reports their beginning, and the sender that lets them
    /// continue.
    pub(crate) fn hold(
        &self,
        is_held: impl Fn(MediumCall) -> bool + Send + Sync + 'static,
    ) -> (Receiver<()>, Sender<()>) {
        let (begun, begins) = channel();
        let (let_go, held) = channel::<()>();
        let (begun, held) = (Mutex::new(begun), Mutex::new(held));
        self.set(move |call| {
            if is_held(call) {
                let _ = begun.lock().unwrap().send(());
                let _ = held.lock().unwrap().recv();
            }
            Ok(())
        });
        (begins, let_go)
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::Io, "a fault for a test")
}

fn bench(tier: Arc<DaxTier>) -> Bench {
    Bench::with(tier, spec("dax", BlockLayout::new(vec![vec![BLOCK]]).unwrap()))
}

fn read_all(bench: &Bench, blocks: &[u64], deadline: Instant) -> Vec<End> {
    let (mut reads, mut ends) = (Vec::new(), Vec::new());
    for n in blocks {
        let (send, receive) = channel();
        let dst: SlotBuf = bench.slot();
        reads.push(ReadItem::new(bench.key(*n), dst, Box::new(move |end| drop(send.send(end)))));
        ends.push(receive);
    }
    bench.tier.read(reads, deadline);
    ends
}

fn begin_remove(tier: &dyn Tier, keys: Vec<BlockKey>) -> Receiver<Result<()>> {
    let (send, receive) = channel();
    tier.remove(keys, Box::new(move |end| drop(send.send(end))));
    receive
}

/// Recognizes a write of a header and returns its unit.
fn is_header(tier: &DaxTier) -> impl Fn(MediumCall) -> Option<u64> + use<> {
    let geometry = tier.geometry();
    move |call| match call {
        MediumCall::Write { at, bytes: HEADER_BYTES } if at >= geometry.headers_at() => {
            Some((at - geometry.headers_at()) / HEADER_BYTES as u64)
        }
        _ => None,
    }
}

/// Three waves of four blocks; a worker hangs in the first. `None` if the deadline passed before that, on a slow machine.
fn hung_restore(wait: Duration) -> Option<Hung> {
    let script = Arc::new(Scripted::new(16 << 20));
    let tier = script.open_with(|config| {
        config.retrieve_staging_slab_bytes = 4 * BLOCK;
        config.restore_workers = 4;
    });
    let data = tier.geometry().data_at();
    let bench = bench(tier);
    bench.write_all(12);
    let (begins, let_go) = script.hold(move |call| matches!(call, MediumCall::Read { at, .. } if at == data));
    let ends = read_all(&bench, &(0..12).collect::<Vec<_>>(), Instant::now() + wait);
    begins.recv_timeout(wait.min(HANG)).ok()?;
    // The other workers have nothing left to do, so none of them can end the waiting waves.
    for end in &ends[1..4] {
        match end.recv_timeout(HANG).unwrap() {
            Err(error) if error.kind() == ErrorKind::Timeout => return None,
            end => assert!(end.is_ok()),
        }
    }
    Some((script, bench, let_go, ends))
}

#[test]
fn waves_behind_one_that_hangs_end_at_the_deadline() {
    let waits = [5, 15, 45].map(Duration::from_secs);
    let (_script, _bench, let_go, ends) = waits.into_iter().find_map(hung_restore).unwrap();
    for (n, end) in ends.iter().enumerate().skip(4) {
        let end = end.recv_timeout(HANG).unwrap_or_else(|_| panic!("block {n} waits past its deadline (P2)"));
        assert_eq!(end.unwrap_err().kind(), ErrorKind::Timeout, "block {n}");
    }
    assert!(ends[0].try_recv().is_err(), "told while a worker may copy into its memory (P4)");
    drop(let_go);
    ends[0].recv_timeout(HANG).unwrap().unwrap();
}

#[test]
fn waves_behind_one_that_hangs_end_with_the_tier() {
    let (_script, bench, let_go, ends) = hung_restore(HANG * 10).unwrap();
    drop(bench);
    for (n, end) in ends.iter().enumerate().skip(4) {
        let end = end.recv_timeout(HANG).unwrap_or_else(|_| panic!("block {n} outlives the tier (P2)"));
        assert_eq!(end.unwrap_err().kind(), ErrorKind::Closed, "block {n}");
    }
    assert!(ends[0].try_recv().is_err(), "told while a worker may copy into its memory (P4)");
    drop(let_go);
    assert!(ends[0].recv_timeout(HANG).is_ok());
}

/// One region of many runs on a slow medium: it ends in the first run after the deadline.
#[test]
fn a_region_ends_at_the_deadline() {
    let script = Scripted::new(16 << 20);
    let tier = script.open_with(|config| config.restore_max_regions = 1);
    let data = tier.geometry().data_at();
    let bench = bench(tier);
    bench.write_all(12);
    let deadline = Instant::now() + Duration::from_millis(500);
    let copied = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&copied);
    script.set(move |call| {
        if matches!(call, MediumCall::Read { at, .. } if at >= data) {
            count.fetch_add(1, Ordering::SeqCst);
            while Instant::now() < deadline {
                std::thread::yield_now();
            }
        }
        Ok(())
    });
    // Blocks that are not contiguous.
    let ends = read_all(&bench, &[0, 2, 4, 6, 8], deadline);
    let ends: Vec<_> = ends.iter().map(|end| end.recv_timeout(HANG).unwrap()).collect();
    assert!(ends[1..].iter().all(|end| end.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout)));
    assert!(copied.load(Ordering::SeqCst) <= 1);
}

#[test]
fn a_removal_fails_until_its_header_is_cleared() {
    let script = Scripted::new(16 << 20);
    let bench = bench(script.open());
    bench.write_all(2);
    script.set(|call| if matches!(call, MediumCall::Write { .. }) { Err(broken()) } else { Ok(()) });
    for _ in 0..3 {
        assert_eq!(bench.remove(0).unwrap_err().kind(), ErrorKind::Io, "its header is still there (P8)");
    }
    script.clear();
    bench.remove(0).unwrap();
    // No write has come since that would have cleared it.
    drop(bench);
    let bench = self::bench(script.open());
    assert!(bench.read(0).is_err() && bench.read_is_right(1));
}

/// A block that is written again has two headers while the old one has not been cleared.
#[test]
fn a_removal_clears_the_header_of_before() {
    let script = Scripted::new(16 << 20);
    let tier = script.open();
    let is_header = is_header(&tier);
    let bench = bench(tier);
    bench.write_all(1);
    script.set(move |call| if is_header(call) == Some(0) { Err(broken()) } else { Ok(()) });
    bench.remove(0).unwrap_err();
    bench.write(0).unwrap();
    assert_eq!(bench.remove(0).unwrap_err().kind(), ErrorKind::Io, "the old header names it (P8)");
    script.clear();
    bench.remove(0).unwrap();
    drop(bench);
    assert!(self::bench(script.open()).read(0).is_err());
}

/// A block evicted to make space can no longer be found before its header is cleared.
#[test]
fn a_removal_waits_for_an_eviction() {
    let script = Scripted::new(4 << 20);
    let tier = script.open();
    let is_header = is_header(&tier);
    let bench = bench(Arc::clone(&tier));
    let count = tier.usage().bytes_max / BLOCK;
    bench.write_all(count);
    let (begins, let_go) = script.hold(move |call| is_header(call) == Some(0));
    let src = bench.filled(100);
    let write = bench.begin_write(100, src, Bench::soon());
    begins.recv_timeout(HANG).unwrap();
    assert!(bench.read(0).is_err(), "the coldest one goes");
    let removal = begin_remove(&*tier, vec![bench.key(0)]);
    assert!(removal.try_recv().is_err(), "its header is still on the medium (P8)");
    drop(let_go);
    removal.recv_timeout(HANG).unwrap().unwrap();
    Bench::answer(&write).unwrap();
    assert!(bench.read_is_right(100));
}

#[test]
fn one_bad_page_stops_no_other_clearing() {
    let script = Scripted::new(16 << 20);
    let tier = script.open();
    let (is_header, per_block) = (is_header(&tier), BLOCK / tier.geometry().unit_bytes);
    let bench = bench(Arc::clone(&tier));
    bench.write_all(5);
    script.set(move |call| if is_header(call) == Some(per_block) { Err(broken()) } else { Ok(()) });
    let ends: Vec<_> = [0, 1].map(|n| begin_remove(&*tier, vec![bench.key(n)])).into();
    assert!(ends[0].recv_timeout(HANG).unwrap().is_ok());
    assert!(ends[1].recv_timeout(HANG).unwrap().is_err());
    let both = begin_remove(&*tier, vec![bench.key(1), bench.key(2), bench.key(3)]);
    assert!(both.recv_timeout(HANG).unwrap().is_err());
    // A write with other victims is not blocked either.
    bench.write(50).unwrap();
    drop((bench, tier));
    script.clear();
    let bench = self::bench(script.open());
    let there: Vec<u64> = (0..5).filter(|n| bench.read(*n).is_ok()).collect();
    assert_eq!(there, [1, 4], "only the one whose page is bad is left");
}

/// Space is freed in pieces after a reset; a tier that is closing frees no more.
#[test]
fn the_end_of_a_tier_ends_what_is_left_of_a_reset() {
    let script = Scripted::new(16 << 20);
    let medium = script.medium();
    let is_alive = Arc::downgrade(&medium);
    let config = DaxConfig { open_wait: HANG, put_workers: 1, ..DaxConfig::new("memory") };
    let tier = Arc::new(DaxTier::open_on(config, medium).unwrap());
    let is_header = is_header(&tier);
    let bench = Bench::new(tier);
    bench.write_all(600);
    let cleared = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&cleared);
    let (begins, let_go) =
        script.hold(move |call| is_header(call).is_some() && count.fetch_add(1, Ordering::SeqCst) == 0);
    bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    begins.recv_timeout(HANG).unwrap();
    drop(bench);
    drop(let_go);
    let end = Instant::now() + HANG;
    while is_alive.strong_count() > 0 {
        assert!(Instant::now() < end, "the tier's threads end");
        std::thread::yield_now();
    }
    assert!(cleared.load(Ordering::SeqCst) <= 256, "{cleared:?} headers were cleared after the close");
}
