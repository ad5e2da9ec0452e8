//! The pool's registration: in the background, in pieces, undone at the end, and never a precondition of copies.

use std::sync::Arc;
use std::time::Duration;

use crate::conformance::StreamDevice;
use crate::conformance::{Collect, DeviceMemory};
use crate::cuda::DeviceSelector;
use crate::cuda::engine::{CudaConfig, CudaEngine, Mode};
use crate::cuda::mutation::{Mistake, Mutation};
use crate::cuda::submit::Method;
use crate::cuda::tests::rig::{Rig, Session};
use crate::pages::{PAGE, Pages};
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};

const OUT_OF_MEMORY: i32 = 2;
const HANG: Duration = Duration::from_secs(60);

#[test]
fn a_pool_is_registered_in_pieces_and_unregistered_with_its_guard() {
    let rig = Rig::standin(13_000);
    let session = rig.session(1);
    let control = session.control.unwrap();
    let engine = session.engine(Mode::Fixed(Method::Kernel), Mutation::default());
    let pages = Pages::new(&[1; 10 * PAGE]);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(pages.address(), pages.len()) }.unwrap();
    assert!(registration.wait(HANG));
    assert_eq!(registration.registered_bytes(), 10 * PAGE as u64);
    assert_eq!(control.left(session.device).registered, 3, "pieces of four pages");
    drop(registration);
    assert_eq!(control.left(session.device).registered, 0);
    drop(engine);
    session.end().unwrap();
}

/// Untouched memory.
struct Untouched {
    base: *mut u8,
    len: usize,
}

impl Untouched {
    fn new(len: usize) -> Self {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: the mapping just made; pages become resident one by one, not 512 at a time.
        unsafe { libc::madvise(base, len, libc::MADV_NOHUGEPAGE) };
        Self { base: base.cast(), len }
    }

    fn touch(&self, at: usize, len: usize) {
        // SAFETY: inside of the mapping.
        unsafe { std::ptr::write_bytes(self.base.add(at), 7, len) };
    }

    fn is_resident(&self, at: usize, len: usize) -> bool {
        // SAFETY: inside of the mapping.
        unsafe { crate::resident::is_resident(self.base as usize + at, len) }
    }
}

impl Drop for Untouched {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A pool may reserve address space for growth that has no memory yet (P5).
#[test]
fn what_is_not_in_memory_is_registered_when_it_is() {
    const PIECE: usize = 4 * PAGE;
    let rig = Rig::standin(13_000);
    let session = rig.session(6);
    let engine = session.engine(Mode::Fixed(Method::Batch), Mutation::default());
    let pages = Untouched::new(8 * PIECE);
    pages.touch(0, 2 * PIECE + PAGE);
    // SAFETY: the mapping outlives the registration.
    let registration = unsafe { engine.register_pool(pages.base, pages.len) }.unwrap();
    assert!(registration.wait(HANG));
    assert_eq!(registration.registered_bytes(), 2 * PIECE as u64);
    assert!(!pages.is_resident(2 * PIECE, PIECE) && !pages.is_resident(7 * PIECE, PIECE));
    pages.touch(5 * PIECE, PIECE);
    let deadline = std::time::Instant::now() + HANG;
    while registration.registered_bytes() < 3 * PIECE as u64 {
        assert!(std::time::Instant::now() < deadline, "what came into memory was not registered");
        std::thread::yield_now();
    }
    assert!(!pages.is_resident(6 * PIECE, PIECE), "another piece came into memory");
    drop(registration);
    // Pages reserved for the pool need no touch.
    // SAFETY: the mapping outlives the registration.
    let registration = unsafe { engine.register_reserved_pool(pages.base, pages.len) }.unwrap();
    assert!(registration.wait(HANG));
    assert_eq!(registration.registered_bytes(), pages.len as u64);
    drop(registration);
    drop(engine);
    session.end().unwrap();
}

/// Pinning memory blocks other driver calls, in other processes too.
#[test]
fn one_call_registers_a_bounded_part() {
    let rig = Rig::standin(13_000);
    let session = rig.session(7);
    let config = CudaConfig::new(DeviceSelector::Ordinal(session.device), Mode::Fixed(Method::Memcpy));
    let engine = CudaEngine::attach(session.driver, &config).unwrap();
    let pages = Pages::new(&vec![1; 160 << 20]);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(pages.address(), pages.len()) }.unwrap();
    assert!(registration.wait(HANG));
    assert_eq!(registration.registered_bytes(), pages.len() as u64);
    assert_eq!(session.control.unwrap().longest_registration(session.device), 64 << 20);
    drop(registration);
    drop(engine);
    session.end().unwrap();
}

#[test]
fn a_registration_outlives_its_engine() {
    let rig = Rig::standin(13_000);
    let session = rig.session(1);
    let engine = session.engine(Mode::Fixed(Method::Memcpy), Mutation::default());
    let pages = Pages::new(&[1; 10 * PAGE]);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(pages.address(), pages.len()) }.unwrap();
    drop(engine);
    drop(registration);
    session.end().unwrap();
}

#[test]
fn what_cannot_be_registered_is_copied_all_the_same() {
    let rig = Rig::standin(13_000);
    for (seed, mode) in [Method::Memcpy, Method::Batch, Method::Kernel].into_iter().enumerate() {
        let session = rig.session(seed as u64);
        session.fail("cuMemHostRegister_v2", 1, 1, OUT_OF_MEMORY);
        let engine = session.engine(Mode::Fixed(mode), Mutation::default());
        let pages = Pages::new(&[0; 10 * PAGE]);
        // SAFETY: the pages outlive the registration.
        let registration = unsafe { engine.register_pool(pages.address(), pages.len()) }.unwrap();
        assert!(registration.wait(HANG));
        assert_eq!(registration.registered_bytes(), 4 * PAGE as u64, "the first piece");
        let failure = registration.failure().unwrap().to_string();
        assert!(failure.starts_with("cuMemHostRegister_v2 failed"), "{failure}");
        let memory = session.memory(pages.len());
        memory.write(&[7; 10 * PAGE]);
        dump_all(&engine, &memory, &pages);
        assert_eq!(pages.read(0, pages.len()), [7; 10 * PAGE]);
        drop((registration, memory));
        drop(engine);
        session.end().unwrap();
    }
}

#[test]
fn memory_that_somebody_else_registered_stays_theirs() {
    let rig = Rig::standin(13_000);
    let session = rig.session(3);
    let engine = session.engine(Mode::Fixed(Method::Kernel), Mutation::default());
    let pages = Pages::new(&[0; 4 * PAGE]);
    // SAFETY: the pages outlive both registrations.
    let (theirs, ours) = unsafe {
        let theirs = engine.register_pool(pages.address(), pages.len()).unwrap();
        assert!(theirs.wait(HANG));
        let other = session.engine(Mode::Fixed(Method::Kernel), Mutation::default());
        (theirs, other.register_pool(pages.address(), pages.len()).unwrap())
    };
    assert!(ours.wait(HANG));
    assert!(ours.failure().is_none());
    drop(ours);
    assert_eq!(session.control.unwrap().left(session.device).registered, 1);
    drop(theirs);
    drop(engine);
    session.end().unwrap();
}

#[test]
fn only_whole_pages_are_registered() {
    let rig = Rig::standin(13_000);
    let session = rig.session(4);
    let engine = session.engine(Mode::Fixed(Method::Memcpy), Mutation::default());
    let pages = Pages::new(&[0; PAGE]);
    for (offset, len) in [(1, PAGE), (0, 100), (0, 0)] {
        // SAFETY: refused, whatever its arguments.
        let refused = unsafe { engine.register_pool(pages.address().wrapping_add(offset), len) };
        assert_eq!(refused.unwrap_err().kind(), kvdepot_core::ErrorKind::Config);
    }
    drop(engine);
    session.end().unwrap();
}

#[test]
fn memory_is_registered_once() {
    let rig = Rig::standin(13_000);
    let session = rig.session(5);
    let engine = session.engine(Mode::Fixed(Method::Memcpy), Mutation::default());
    let pages = Pages::new(&[0; 2 * PAGE]);
    // SAFETY: the pages outlive the registrations.
    unsafe {
        let first = engine.register_pool(pages.address(), PAGE).unwrap();
        assert!(engine.register_pool(pages.address(), 2 * PAGE).is_err());
        let second = engine.register_pool(pages.address().add(PAGE), PAGE).unwrap();
        drop(first);
        drop(second);
        drop(engine.register_pool(pages.address(), 2 * PAGE).unwrap());
    }
    drop(engine);
    session.end().unwrap();
}

/// Dumps registered memory as one copy.
pub(super) fn dump_registered(session: &Session, engine: &dyn CopyEngine, len: usize, decoding: bool) {
    let pages = Pages::new(&vec![0; len]);
    let memory = session.memory(len);
    memory.write(&vec![7; len]);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(pages.address(), len) }.unwrap();
    assert!(registration.wait(HANG));
    dump(engine, &memory, &pages, decoding);
    assert_eq!(pages.read(0, len), vec![7; len]);
}

fn dump_all(engine: &dyn CopyEngine, memory: &impl DeviceMemory, pages: &Pages) {
    dump(engine, memory, pages, false);
}

fn dump(engine: &dyn CopyEngine, memory: &impl DeviceMemory, pages: &Pages, decoding: bool) {
    let mut batch = CopyBatch::new(Direction::ToHost);
    batch.decoding = decoding;
    batch.ops.push(CopyOp { device: memory.address(), host: pages.address(), len: pages.len() });
    batch.end_group();
    let collect = Collect::new(1);
    // SAFETY: the memory lives until the group was reported.
    unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.unwrap();
    collect.wait().into_iter().for_each(|outcome| outcome.unwrap());
}

/// Returns the largest number of dump bytes in flight during a dump eight times as large as its budget.
fn in_flight_at_most(rig: &Rig, mutation: Mutation, seed: u64) -> u64 {
    let session = rig.session(seed);
    let engine = session.engine(Mode::Fixed(Method::Batch), mutation);
    let len = 1 << 20;
    let pages = Pages::new(&vec![0; len]);
    let memory = session.memory(len);
    memory.write(&vec![7; len]);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(pages.address(), len) }.unwrap();
    assert!(registration.wait(HANG));
    dump_all(&engine, &memory, &pages);
    let most = engine.dump_bytes_in_flight_most();
    assert_eq!(pages.read(0, len), vec![7; len]);
    drop((registration, memory));
    drop(engine);
    session.end().unwrap();
    most
}

#[test]
fn dumps_keep_to_their_budget() {
    let rig = Rig::standin(13_000);
    for seed in 0..10 {
        let most = in_flight_at_most(&rig, Mutation::default(), seed);
        assert!((1..=128 << 10).contains(&most), "{most} bytes, seed {seed}");
    }
}

#[test]
fn a_dump_beyond_its_budget_is_found() {
    let rig = Rig::standin(13_000);
    let beyond = |seed| in_flight_at_most(&rig, Mutation::of(Mistake::IgnoreBudget), seed) > 128 << 10;
    assert!((0..40).any(beyond), "no dump of 40 went beyond the budget");
}
