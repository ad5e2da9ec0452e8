//! A device that hangs: waiting callers are notified in time, and memory that the device may still touch stays
//! unchanged until it has finished (P1, P2).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{ErrorKind, Result};
use kvdepot_standin_cuda::EVERY_STREAM;

use crate::bounded::{Bounded, Mistake};
use crate::conformance::draw::pattern;
use crate::conformance::{Collect, DeviceMemory, StreamDevice};
use crate::cuda::engine::{CudaConfig, CudaEngine, Mode};
use crate::cuda::mutation::Mutation;
use crate::cuda::submit::Method;
use crate::cuda::tests::rig::{Memory, Rig, Session};
use crate::event::DeviceEvent;
use crate::mutation;
use crate::pages::{PAGE, Pages};
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink, PoolRegistration};

/// Detects a hang of the test itself and does not measure speed.
const HANG: Duration = Duration::from_secs(60);
const LEN: usize = 8 * PAGE;
const GROUPS: usize = 4;
/// The byte with which the next owner of a slot fills it.
const NEXT: u8 = 0x4E;

/// The message for a slot that the device touched after it had a new owner. It identifies the mistakes that cause just
/// that.
pub(crate) const USED_AGAIN: &str = "the slot's next owner and the device met";

/// A slot whose lease ends with the sink. After that it has a new owner.
#[derive(Debug)]
struct Slot {
    collect: Arc<Collect>,
    freed: Sender<()>,
    // Dropped before the memory is freed.
    _registration: PoolRegistration,
    pages: Arc<Pages>,
}

impl GroupSink for Slot {
    fn group_submitted(&self, _: usize, _: DeviceEvent) {}

    fn group_ended(&self, group: usize, outcome: Result<()>) {
        self.collect.group_ended(group, outcome);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: inside of the pages. If a device still touches them, the test should find exactly that.
        unsafe { std::ptr::write_bytes(self.pages.address(), NEXT, self.pages.len()) };
        let _ = self.freed.send(());
    }
}

/// A copy of a slot.
pub(crate) struct Copy {
    outcomes: Arc<Collect>,
    freed: Receiver<()>,
    pages: Arc<Pages>,
}

/// Starts a copy between device memory and a slot.
fn begin(
    engine: &dyn CopyEngine,
    direction: Direction,
    memory: &Memory,
    slot: &[u8],
    registered: bool,
    wait_event: u64,
) -> Result<Copy> {
    let pages = Arc::new(Pages::new(slot));
    let registration = if registered {
        // SAFETY: the pages outlive the registration, in the sink.
        let registration = unsafe { engine.register_pool(pages.address(), LEN) }?;
        assert!(registration.wait(HANG));
        match registration.failure() {
            Some(failure) => return Err(failure),
            None => registration,
        }
    } else {
        PoolRegistration::none()
    };
    let mut batch = CopyBatch::new(direction);
    (batch.wait_event, batch.deadline) = (wait_event, Some(Instant::now() + HANG));
    let step = LEN / GROUPS;
    for group in 0..GROUPS {
        let host = pages.address().wrapping_add(group * step);
        batch.ops.push(CopyOp { device: memory.address() + (group * step) as u64, host, len: step });
        batch.end_group();
    }
    let (freed, freeing) = crossbeam_channel::bounded(1);
    let collect = Collect::new(GROUPS);
    let outcomes = Arc::clone(&collect);
    let sink = Slot { collect, freed, _registration: registration, pages: Arc::clone(&pages) };
    // SAFETY: device memory is freed only after the sink was dropped; the sink holds the rest.
    unsafe { engine.run(batch, Arc::new(sink)) }?;
    Ok(Copy { outcomes, freed: freeing, pages })
}

/// Waits until this number of copies have made their stream wait for the event, which means that they have reached the
/// device.
fn begun(session: &Session, copies: u64) {
    let control = session.control.unwrap();
    until("the copies were never begun", || control.calls(session.device, "cuStreamWaitEvent") >= copies);
}

fn until(otherwise: &str, there: impl Fn() -> bool) {
    let waiting = Instant::now();
    while !there() {
        assert!(waiting.elapsed() < HANG, "{otherwise}");
        std::thread::yield_now();
    }
}

impl Copy {
    fn kinds(&self) -> Vec<Option<ErrorKind>> {
        self.outcomes.wait().iter().map(|o| o.as_ref().err().map(kvdepot_core::Error::kind)).collect()
    }
}

/// One hang: the copy fails in time, others continue, and its slot stays reserved until the device has finished.
pub(crate) fn once(
    engine: Arc<dyn CopyEngine>,
    session: &Session,
    mistake: mutation::Mutation<Mistake>,
    (direction, registered): (Direction, bool),
    hang: impl Fn(u64, bool),
) -> std::result::Result<(), String> {
    let engine = Bounded::with(engine, mistake).unwrap();
    let (old, new) = (pattern(LEN, 1), pattern(LEN, 2));
    let (memory, other) = (session.memory(LEN), session.memory(LEN));
    memory.write(&old);
    other.write(&old);
    let compute = session.stream();
    hang(compute, true);
    // The copy waits for this event, which is not reached while the stream hangs.
    let event = session.record(compute);
    let slot = if direction == Direction::ToHost { &vec![0; LEN] } else { &new };
    let copy = begin(&engine, direction, &memory, slot, registered, event).unwrap();
    begun(session, 1);
    engine.pass_deadlines();
    until("the deadline was not kept", || engine.is_late());
    match direction {
        Direction::ToHost if copy.kinds() != [Some(ErrorKind::Timeout); GROUPS] => {
            return Err(format!("a dump that hangs ended as {:?}", copy.kinds()));
        }
        Direction::ToDevice if copy.outcomes.wait_for(Duration::ZERO).is_some() => {
            return Err("a load was reported that the device may still carry out".into());
        }
        _ => {}
    }
    let refused = begin(&engine, direction, &other, &new, false, 0).map(|_| ());
    if refused.as_ref().err().map(kvdepot_core::Error::kind) != Some(ErrorKind::Unavailable) {
        return Err(format!("a second copy of the direction: {refused:?}"));
    }
    hang(compute, false);
    // Whatever a faulty engine has released, the device must finish before the memory is checked.
    until("the engine never let go of the copy", || !engine.is_late());
    copy.freed.recv_timeout(HANG).map_err(|_| "the slot was never given back".to_owned())?;
    session.settle();
    // The slot's new owner must find it as it was left.
    if copy.pages.read(0, LEN) != vec![NEXT; LEN] {
        return Err(format!("{USED_AGAIN}: it was written"));
    }
    let there = memory.read();
    if there != old && there != new {
        return Err(format!("{USED_AGAIN}: the load brought what is not its own"));
    }
    if direction == Direction::ToDevice
        && (there != new || copy.outcomes.wait_for(HANG).is_none_or(|all| all.iter().any(Result::is_err)))
    {
        return Err("a late load was not whole in the end".into());
    }
    // The direction works again.
    let again = begin(&engine, direction, &other, &new, registered, 0).map_err(|e| e.to_string())?;
    if again.kinds() != [None; GROUPS] {
        return Err("the direction did not come back".into());
    }
    again.freed.recv_timeout(HANG).map_err(|_| "a slot was never given back".to_owned())?;
    drop(engine);
    Ok(())
}

const CASES: [(Direction, bool); 4] = [
    (Direction::ToHost, true),
    (Direction::ToHost, false),
    (Direction::ToDevice, true),
    (Direction::ToDevice, false),
];
const METHODS: [Method; 3] = [Method::Memcpy, Method::Batch, Method::Kernel];

/// A compute stream that hangs, so that the copies wait for an event that is not reached.
fn one_stream(rig: &Rig, mistake: mutation::Mutation<Mistake>, seed: u64) -> std::result::Result<(), String> {
    let session = rig.session(seed);
    let method = METHODS[seed as usize % METHODS.len()];
    let engine = Arc::new(session.engine(Mode::Fixed(method), Mutation::default()));
    let control = session.control.unwrap();
    let case = CASES[seed as usize / METHODS.len() % CASES.len()];
    let hang = |stream, hung| control.hang(session.device, stream, hung);
    let outcome = once(engine, &session, mistake, case, hang);
    control.hang(session.device, EVERY_STREAM, false);
    let ended = session.end();
    outcome.and(ended).map_err(|what| format!("{method:?}, {case:?}, seed {seed}: {what}"))
}

#[test]
fn a_copy_that_hangs_fails_in_time_and_keeps_its_slot() {
    let rig = Rig::standin(13_000);
    for seed in 0..48 {
        one_stream(&rig, mutation::Mutation::default(), seed).unwrap();
    }
}

#[test]
fn a_slot_that_is_released_despite_the_hung_copy_is_found() {
    let rig = Rig::standin(13_000);
    let mistake = mutation::Mutation::of(Mistake::LetGoAtDeadline);
    let outcomes: Vec<_> = (0..24).map(|seed| one_stream(&rig, mistake, seed)).collect();
    for way in ["ToHost", "ToDevice"] {
        let by_memory = |what: &String| what.contains(way) && what.contains(USED_AGAIN);
        let caught = outcomes.iter().filter(|outcome| outcome.as_ref().is_err_and(by_memory)).count();
        eprintln!("LetGoAtDeadline, {way}: found in {caught} of 12 schedules");
        assert!(caught > 0, "{way}: {outcomes:?}");
    }
}

/// After the report of a load its pages are reused.
#[test]
fn a_load_that_is_reported_while_the_device_may_write_is_found() {
    let rig = Rig::standin(13_000);
    let mistake = mutation::Mutation::of(Mistake::ReportLoadAtDeadline);
    let outcome = one_stream(&rig, mistake, 6);
    assert!(outcome.as_ref().is_err_and(|what| what.contains("may still carry out")), "{outcome:?}");
}

/// A dump hangs behind its compute event: loads continue, and so does everything on other devices.
#[test]
fn other_streams_and_the_other_direction_go_on() {
    let rig = Rig::standin(13_000);
    for seed in 0..12 {
        let session = rig.session(seed);
        let method = METHODS[seed as usize % METHODS.len()];
        let raw = Arc::new(session.engine(Mode::Fixed(method), Mutation::default()));
        let engine = Bounded::new(raw).unwrap();
        let control = session.control.unwrap();
        let (memory, other) = (session.memory(LEN), session.memory(LEN));
        let bytes = pattern(LEN, seed);
        let compute = session.stream();
        control.hang(session.device, compute, true);
        let event = session.record(compute);
        let dump = begin(&engine, Direction::ToHost, &memory, &[0; LEN], seed % 2 == 0, event).unwrap();
        let load = begin(&engine, Direction::ToDevice, &other, &bytes, seed % 2 == 0, 0).unwrap();
        assert_eq!(load.kinds(), [None; GROUPS], "seed {seed}");
        assert_eq!(other.read(), bytes, "seed {seed}");
        begun(&session, 1);
        engine.pass_deadlines();
        assert_eq!(dump.kinds(), [Some(ErrorKind::Timeout); GROUPS], "seed {seed}");
        control.hang(session.device, compute, false);
        dump.freed.recv_timeout(HANG).unwrap();
        drop((engine, memory, other));
        session.end().unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

/// The complete device hangs: copies fail, closing returns, and when the device recovers everything is released.
#[test]
fn closing_does_not_wait_for_a_device_that_hangs() {
    let rig = Rig::standin(13_000);
    for seed in 0..8 {
        let session = rig.session(seed);
        let raw = Arc::new(session.engine(Mode::Fixed(Method::Batch), Mutation::default()));
        let alive = Arc::downgrade(&raw);
        let engine = Bounded::new(raw).unwrap();
        let control = session.control.unwrap();
        let memory = session.memory(LEN);
        let compute = session.stream();
        control.hang(session.device, EVERY_STREAM, true);
        let event = session.record(compute);
        let copies = [Direction::ToHost, Direction::ToDevice]
            .map(|way| begin(&engine, way, &memory, &[0; LEN], seed % 2 == 0, event).unwrap());
        begun(&session, 2);
        engine.pass_deadlines();
        assert_eq!(copies[0].kinds(), [Some(ErrorKind::Timeout); GROUPS]);
        until("the deadline was not kept", || engine.is_late());
        drop(engine);
        assert!(copies[1].outcomes.wait_for(Duration::ZERO).is_none(), "the device may still write");
        assert!(control.left(session.device).streams > 1, "what the device works for is gone");
        assert!(copies.iter().all(|copy| copy.freed.is_empty()));
        control.hang(session.device, EVERY_STREAM, false);
        for copy in &copies {
            copy.freed.recv_timeout(HANG).unwrap();
        }
        // All except the test's own.
        let streams = || control.left(session.device).streams - 1;
        let begun = Instant::now();
        while alive.strong_count() > 0 || streams() > 0 || control.left(session.device).retained > 1 {
            assert!(begun.elapsed() < HANG, "the engine was never closed");
            std::thread::yield_now();
        }
        drop(memory);
        session.end().unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn a_test_that_hangs_leaves_plain_copies() {
    let rig = Rig::standin(13_000);
    let session = rig.session(1);
    let control = session.control.unwrap();
    let config = CudaConfig { measure_wait: Duration::from_millis(20), ..session.config(Mode::Auto) };
    control.hang(session.device, EVERY_STREAM, true);
    let engine = CudaEngine::attach(session.driver, &config).unwrap();
    let calibration = engine.calibration().unwrap();
    let problem = calibration.problem.as_deref().unwrap();
    assert!(problem.contains("did not answer in time") && calibration.points.is_empty(), "{problem}");
    assert_eq!(calibration.choose(Direction::ToDevice, 4096, 100, false), Method::Memcpy);
    control.hang(session.device, EVERY_STREAM, false);
    drop(engine);
    let begun = Instant::now();
    while control.left(session.device).device > 0 || control.left(session.device).retained > 1 {
        assert!(begun.elapsed() < HANG, "the measurement never ended");
        std::thread::yield_now();
    }
    session.end().unwrap();
}
