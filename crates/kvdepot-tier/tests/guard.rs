//! P2: a tier that keeps failing is switched off for a while and comes back by a trial; writes can be switched off
//! alone.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::OVERDUE;
use kvdepot_core::{BlockKey, Error, ErrorKind};
use kvdepot_io::faults::{Fault, FaultDevice, FaultOp, Faults};
use kvdepot_io::{Device, DirDevice, DirectUse};
use kvdepot_tier::conformance::{self, Bench, Script, ScriptedTier, listen};
use kvdepot_tier::{
    FakeTier, GuardConfig, Guarded, PosixConfig, PosixTier, Presence, ReadItem, Tier, TierEvents, WriteItem,
    Written,
};
use parking_lot::Mutex;

const CONFIG: GuardConfig =
    GuardConfig { failures_max: 3, off_min: Duration::from_secs(100), off_max: Duration::from_secs(300) };

struct Rig {
    _dir: tempfile::TempDir,
    faults: Faults,
    now: Arc<Mutex<Instant>>,
    tier: Arc<Guarded<PosixTier>>,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::default();
        let plain = Arc::new(DirDevice::open(dir.path(), DirectUse::Never).unwrap());
        let device: Arc<dyn Device> = Arc::new(FaultDevice::new(plain, faults.clone()));
        // Neither how full nor how slow this machine's disk is matters here.
        let config = PosixConfig {
            free_floor_percent: 0,
            capacity_percent: 0,
            open_wait: Duration::from_secs(60),
            ..PosixConfig::new(dir.path())
        };
        let inner = PosixTier::open_on_devices(config, vec![device]).unwrap();
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = Arc::clone(&now);
        let tier = Arc::new(Guarded::with_clock(inner, CONFIG, Arc::new(move || *clock.lock())));
        Self { _dir: dir, faults, now, tier }
    }

    fn bench(&self) -> Bench {
        Bench::new(Arc::clone(&self.tier) as _)
    }

    fn now(&self) -> Instant {
        *self.now.lock()
    }

    fn pass(&self, seconds: u64) {
        *self.now.lock() += Duration::from_secs(seconds);
    }
}

/// A deadline ahead of every clock in these tests.
fn kind_of_read(bench: &Bench) -> Option<ErrorKind> {
    let answer = bench.begin_read(0, bench.slot(), Instant::now() + Duration::from_secs(3600));
    Bench::answer(&answer).err().map(|error| error.kind())
}

fn kind_of_write(bench: &Bench, n: u64) -> Option<ErrorKind> {
    let answer = bench.begin_write(n, bench.filled(n), Instant::now() + Duration::from_secs(3600));
    Bench::answer(&answer).err().map(|error| error.kind())
}

#[test]
fn a_tier_that_fails_to_read_goes_off_and_comes_back() {
    let rig = Rig::new();
    let bench = rig.bench();
    bench.write_all(1);
    rig.faults.chance(FaultOp::Read, Fault::Eio, 1.0);
    for _ in 0..3 {
        assert!(!rig.tier.is_off());
        assert_eq!(kind_of_read(&bench), Some(ErrorKind::Io));
    }
    assert!(rig.tier.is_off() && rig.tier.writes_are_off());
    let reads = rig.faults.count(FaultOp::Read);
    assert_eq!(kind_of_read(&bench), Some(ErrorKind::Unavailable));
    assert_eq!(kind_of_write(&bench, 1), Some(ErrorKind::Unavailable));
    assert_eq!(bench.peek(0), Presence::Absent);
    assert!(rig.tier.is_down(&bench.keys(1)[0]));
    assert_eq!(bench.probe(bench.keys(1)).unwrap(), 0);
    assert_eq!(rig.faults.count(FaultOp::Read), reads, "a tier that is off is left alone");
    rig.pass(101);
    assert_eq!(kind_of_read(&bench), Some(ErrorKind::Io), "the trial fails");
    rig.pass(150);
    assert_eq!(kind_of_read(&bench), Some(ErrorKind::Unavailable), "the second pause is twice as long");
    rig.pass(51);
    rig.faults.set_enabled(false);
    assert_eq!(bench.peek(0), Presence::Present);
    assert_eq!(kind_of_read(&bench), None);
    assert!(!rig.tier.is_off() && !rig.tier.is_down(&bench.keys(1)[0]));
    assert_eq!(kind_of_write(&bench, 1), None);
}

#[test]
fn a_disk_that_takes_no_writes_stops_writes_only() {
    let rig = Rig::new();
    let bench = rig.bench();
    bench.write_all(1);
    rig.faults.chance(FaultOp::Write, Fault::Eio, 1.0);
    for n in 1..4 {
        assert_eq!(kind_of_write(&bench, n), Some(ErrorKind::Io));
    }
    assert!(rig.tier.writes_are_off() && !rig.tier.is_off());
    assert_eq!(kind_of_write(&bench, 4), Some(ErrorKind::Unavailable));
    assert_eq!(kind_of_read(&bench), None);
    rig.faults.set_enabled(false);
    rig.pass(101);
    assert_eq!(kind_of_write(&bench, 4), None);
    assert!(!rig.tier.writes_are_off());
}

/// A file system that stays full whatever the tier evicts, and then has space again.
#[test]
fn a_full_disk_stops_writes_until_it_has_room() {
    let rig = Rig::new();
    let bench = rig.bench();
    rig.faults.chance(FaultOp::Write, Fault::NoSpace, 1.0);
    for n in 1..4 {
        assert_eq!(kind_of_write(&bench, n), Some(ErrorKind::NoSpace));
    }
    assert!(rig.tier.writes_are_off() && !rig.tier.is_off());
    rig.faults.set_enabled(false);
    rig.pass(101);
    assert_eq!(kind_of_write(&bench, 4), None);
    assert!(!rig.tier.writes_are_off());
}

#[derive(Default)]
struct Heard(Mutex<Vec<&'static str>>);

impl TierEvents for Heard {
    fn evicted(&self, _keys: &[BlockKey]) {
        self.0.lock().push("evicted");
    }

    fn lost(&self, _keys: &[BlockKey]) {
        self.0.lock().push("lost");
    }

    fn went_down(&self) {
        self.0.lock().push("went down");
    }

    fn came_back(&self) {
        self.0.lock().push("came back");
    }

    fn lost_memory(&self) {
        self.0.lock().push("lost its memory");
    }
}

/// Lets something happen on another thread while it hears that the tier is off.
struct Interrupted {
    heard: Heard,
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl TierEvents for Interrupted {
    fn evicted(&self, _keys: &[BlockKey]) {}

    fn lost(&self, _keys: &[BlockKey]) {}

    fn went_down(&self) {
        let meanwhile = self.meanwhile.lock().take();
        meanwhile.into_iter().for_each(|run| std::thread::spawn(run).join().unwrap());
        self.heard.went_down();
    }

    fn came_back(&self) {
        self.heard.came_back();
    }

    fn lost_memory(&self) {}
}

#[test]
fn a_listener_hears_when_the_tier_goes_off_and_on() {
    let rig = Rig::new();
    let bench = rig.bench();
    let heard = Arc::new(Heard::default());
    listen(&*rig.tier, &heard);
    bench.write_all(1);
    rig.faults.chance(FaultOp::Read, Fault::Eio, 1.0);
    assert!((0..3).all(|_| kind_of_read(&bench) == Some(ErrorKind::Io)));
    assert_eq!(*heard.0.lock(), ["went down"]);
    rig.pass(101);
    assert_eq!(kind_of_read(&bench), Some(ErrorKind::Io), "the trial fails");
    assert_eq!(*heard.0.lock(), ["went down"], "it was down before");
    rig.faults.set_enabled(false);
    rig.pass(201);
    assert_eq!(kind_of_read(&bench), None);
    assert_eq!(*heard.0.lock(), ["went down", "came back"]);
}

/// The last news counts, so it must be what is so.
#[test]
fn a_tier_that_comes_back_while_the_listener_is_told_is_told_to_be_back() {
    let rig = Arc::new(Rig::new());
    let bench = rig.bench();
    bench.write_all(1);
    for nth in 0..3 {
        rig.faults.at(FaultOp::Read, nth, Fault::Eio);
    }
    let inner = Arc::clone(&rig);
    let meanwhile = move || {
        inner.pass(101);
        assert_eq!(kind_of_read(&inner.bench()), None, "the trial");
        assert!(!inner.tier.is_off());
    };
    let meanwhile = Mutex::new(Some(Box::new(meanwhile) as Box<dyn FnOnce() + Send>));
    let listener = Arc::new(Interrupted { heard: Heard::default(), meanwhile });
    listen(&*rig.tier, &listener);
    assert!((0..3).all(|_| kind_of_read(&bench) == Some(ErrorKind::Io)));
    assert_eq!(*listener.heard.0.lock(), ["went down", "came back"]);
}

#[test]
fn a_listener_that_comes_late_hears_that_the_tier_is_off() {
    let rig = Rig::new();
    let bench = rig.bench();
    bench.write_all(1);
    rig.faults.chance(FaultOp::Read, Fault::Eio, 1.0);
    assert!((0..3).all(|_| kind_of_read(&bench) == Some(ErrorKind::Io)));
    let heard = Arc::new(Heard::default());
    listen(&*rig.tier, &heard);
    assert_eq!(*heard.0.lock(), ["went down"]);
}

#[test]
fn misses_and_late_callers_do_not_switch_off() {
    let rig = Rig::new();
    let bench = rig.bench();
    for _ in 0..20 {
        assert_eq!(kind_of_read(&bench), Some(ErrorKind::NotFound));
        let late = bench.begin_read(0, bench.slot(), rig.now());
        assert_eq!(Bench::answer(&late).unwrap_err().kind(), ErrorKind::Timeout);
    }
    assert!(!rig.tier.is_off());
}

#[test]
fn only_one_trial_at_a_time_and_a_hung_one_has_failed() {
    let rig = Rig::new();
    let bench = rig.bench();
    bench.write_all(1);
    for nth in 0..3 {
        rig.faults.at(FaultOp::Read, nth, Fault::Eio);
    }
    assert!((0..3).all(|_| kind_of_read(&bench) == Some(ErrorKind::Io)));
    assert!(rig.tier.is_off());
    rig.pass(101);
    rig.faults.hang(FaultOp::Read);
    let trial = bench.begin_read(0, bench.slot(), rig.now() + Duration::from_secs(10));
    assert!(rig.faults.wait_hung(1, Bench::soon()));
    assert_eq!(kind_of_read(&bench), Some(ErrorKind::Unavailable));
    rig.pass(11);
    assert_eq!(kind_of_read(&bench), Some(ErrorKind::Unavailable));
    assert!(rig.tier.is_off(), "the hung trial counts as failed");
    rig.faults.release();
    Bench::answer(&trial).unwrap();
}

#[test]
fn a_guarded_tier_is_a_tier() {
    conformance::check(&|| Arc::new(Guarded::new(FakeTier::new(0), GuardConfig::default())));
}

/// Blocks of one namespace that can never fit do not stop the writes of others.
#[test]
fn blocks_larger_than_the_tier_do_not_stop_writes() {
    let tier = Arc::new(Guarded::new(FakeTier::new(4096), CONFIG));
    let bench = Bench::new(Arc::clone(&tier) as _);
    for n in 0..10 {
        assert_eq!(kind_of_write(&bench, n), Some(ErrorKind::Config), "10,000 bytes into 4096");
    }
}

/// A tier whose reads and writes end when the test says so.
#[derive(Default)]
struct Hanging {
    reads: Mutex<Vec<ReadItem>>,
    writes: Mutex<Vec<WriteItem>>,
}

impl Script for Hanging {
    fn read(&self, _: &Arc<FakeTier>, reads: Vec<ReadItem>, _: Instant) {
        self.reads.lock().extend(reads);
    }

    fn write(&self, _: &Arc<FakeTier>, writes: Vec<WriteItem>, _: Instant) {
        self.writes.lock().extend(writes);
    }
}

struct HangingRig {
    tier: Arc<Guarded<ScriptedTier<Hanging>>>,
    bench: Bench,
    now: Arc<Mutex<Instant>>,
}

impl HangingRig {
    fn new() -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = Arc::clone(&now);
        let inner = ScriptedTier::new(Hanging::default());
        let tier = Arc::new(Guarded::with_clock(inner, CONFIG, Arc::new(move || *clock.lock())));
        Self { bench: Bench::new(Arc::clone(&tier) as _), tier, now }
    }

    /// Begins so many writes, whose deadline is in ten seconds.
    fn begin_writes(&self, count: u64) {
        let deadline = *self.now.lock() + Duration::from_secs(10);
        (0..count).for_each(|n| drop(self.bench.begin_write(n, self.bench.filled(n), deadline)));
    }

    fn begin_reads(&self, count: u64) {
        let deadline = *self.now.lock() + Duration::from_secs(10);
        (0..count).for_each(|n| drop(self.bench.begin_read(n, self.bench.slot(), deadline)));
    }

    fn pass(&self, time: Duration) {
        *self.now.lock() += time;
        self.tier.tick();
    }

    fn end_writes(&self, outcome: &kvdepot_core::Result<Written>) {
        let writes = std::mem::take(&mut *self.tier.inner().script.writes.lock());
        writes.into_iter().for_each(|write| write.end(outcome.clone()));
    }
}

const TEN_SECONDS: Duration = Duration::from_secs(10);

#[test]
fn writes_that_hang_switch_writes_off() {
    let rig = HangingRig::new();
    rig.begin_writes(3);
    rig.pass(TEN_SECONDS + OVERDUE - Duration::from_millis(1));
    assert!(!rig.tier.writes_are_off(), "they may be about to end");
    rig.pass(Duration::from_millis(1));
    assert!(rig.tier.writes_are_off() && !rig.tier.is_off());
    rig.begin_writes(3);
    assert_eq!(rig.tier.inner().script.writes.lock().len(), 3, "no more reach the tier");
    // It comes back by a trial.
    rig.end_writes(&Ok(Written::New));
    rig.pass(Duration::from_secs(101));
    rig.begin_writes(3);
    assert_eq!(rig.tier.inner().script.writes.lock().len(), 1);
    rig.end_writes(&Ok(Written::New));
    rig.begin_writes(3);
    assert_eq!(rig.tier.inner().script.writes.lock().len(), 3);
}

#[test]
fn reads_that_hang_switch_the_tier_off() {
    let rig = HangingRig::new();
    rig.begin_reads(3);
    rig.pass(TEN_SECONDS);
    assert!(!rig.tier.is_off());
    rig.pass(OVERDUE);
    assert!(rig.tier.is_off());
}

#[test]
fn an_operation_that_hangs_fails_once() {
    let rig = HangingRig::new();
    rig.begin_writes(2);
    rig.pass(TEN_SECONDS + OVERDUE);
    rig.end_writes(&Err(Error::new(ErrorKind::Timeout, "late")));
    rig.pass(TEN_SECONDS);
    assert!(!rig.tier.writes_are_off(), "two failures of three");
    rig.begin_writes(1);
    rig.end_writes(&Err(Error::new(ErrorKind::Timeout, "late")));
    assert!(rig.tier.writes_are_off());
}

#[test]
fn operations_that_end_in_time_do_not_hang() {
    let rig = HangingRig::new();
    for outcome in [Ok(Written::New), Ok(Written::AlreadyThere), Err(Error::new(ErrorKind::Busy, "busy"))] {
        rig.begin_writes(3);
        rig.end_writes(&outcome);
        rig.pass(TEN_SECONDS + OVERDUE);
        assert!(!rig.tier.writes_are_off(), "{outcome:?}");
    }
}
