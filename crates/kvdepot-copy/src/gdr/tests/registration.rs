//! Registration of the engine's memory: the limits of drivers and adapters, and memory that is replaced under its
//! addresses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;

use crate::conformance::{Collect, DeviceMemory, StreamDevice};
use crate::cuda::tests::rig::{Memory, Session};
use crate::cuda::{CudaEngine, Method, Mode};
use crate::gdr::attach::engine_for;
use crate::gdr::config::{GdrConfig, UseGdr};
use crate::gdr::engine::GdrEngine;
use crate::gdr::mutation::Mutation;
use crate::gdr::tests::rig::Lab;
use crate::pages::Pages;
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};

pub(super) const HANG: Duration = Duration::from_secs(60);
pub(super) const LEN: usize = 64 << 10;

/// Copies all of the device memory to the host.
pub(super) fn dump(engine: &dyn CopyEngine, address: u64, len: usize) -> Vec<u8> {
    try_dump(engine, address, len).unwrap()
}

pub(super) fn try_dump(engine: &dyn CopyEngine, address: u64, len: usize) -> Result<Vec<u8>> {
    let pages = Pages::new(&vec![0; len]);
    let mut batch = CopyBatch::new(Direction::ToHost);
    batch.ops.push(CopyOp { device: address, host: pages.address(), len });
    batch.end_group();
    let collect = Collect::new(1);
    // SAFETY: all memory lives until `wait` has returned.
    unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.unwrap();
    collect.wait().into_iter().collect::<Result<()>>()?;
    Ok(pages.read(0, len))
}

/// An adapter that only takes dma-bufs, as without a peer memory module.
fn dma_buf_only() -> (Lab, Session) {
    let lab = Lab::new();
    let session = lab.session(1);
    lab.standin.set("peer_offset", 0);
    (lab, session)
}

#[test]
fn allocations_that_touch_are_registered_one_by_one() {
    let (lab, session) = dma_buf_only();
    let engine = lab.engine(Mutation::default());
    let both = session.control.unwrap().allocate_touching(session.device, [LEN as u64, LEN as u64 / 2]);
    assert_eq!(both[0] + LEN as u64, both[1]);
    let before = lab.standin.get("regions");
    // SAFETY: the memory is freed below, after the registration.
    let cache = unsafe { engine.register_device(both[0], LEN + LEN / 2) }.unwrap();
    assert_eq!(lab.standin.get("regions"), before + 2);
    let expected: Vec<u8> = (0..LEN + LEN / 2).map(|i| (i * 7 + i / 253) as u8).collect();
    for (address, bytes) in both.into_iter().zip([&expected[..LEN], &expected[LEN..]]) {
        session.write_at(address, bytes);
    }
    assert_eq!(dump(&engine, both[0], expected.len()), expected);
    drop(cache);
    // The dump's pages were registered for the duration of its batch, which ends a moment after the dump.
    let deadline = Instant::now() + Duration::from_secs(60);
    while lab.standin.get("regions") != before {
        assert!(Instant::now() < deadline, "{} regions stay registered", lab.standin.get("regions"));
        std::thread::yield_now();
    }
    both.into_iter().for_each(|address| session.free(address));
    drop(engine);
    lab.end(session).unwrap();
}

#[test]
fn memory_that_several_stores_share_is_registered_once() {
    let (lab, session) = dma_buf_only();
    let engine = lab.engine(Mutation::default());
    let memory = session.memory(LEN);
    let before = lab.standin.get("regions");
    // SAFETY: the memory outlives the registrations.
    let (first, second) = unsafe {
        (
            engine.register_device(memory.address(), LEN).unwrap(),
            engine.register_device(memory.address(), LEN).unwrap(),
        )
    };
    assert_eq!(lab.standin.get("regions"), before + 1);
    drop(first);
    assert_eq!(lab.standin.get("regions"), before + 1);
    drop(second);
    assert_eq!(lab.standin.get("regions"), before);
    drop((engine, memory));
    lab.end(session).unwrap();
}

/// A kernel of 64 KiB pages exports whole pages of that size. With another page size the error says so, and does not
/// only name a missing module.
#[test]
fn memory_is_exported_in_pages_of_the_kernel() {
    const PAGE: u64 = 64 << 10;
    let (lab, session) = dma_buf_only();
    session.control.unwrap().set_page_bytes(session.device, PAGE);
    let memory = session.memory(2 * LEN);
    let inside = memory.address() + 4096;
    for (page_bytes, works) in [(PAGE, true), (4096, false)] {
        let config = GdrConfig { page_bytes, ..lab.config() };
        let engine = GdrEngine::attach(lab.rig.driver, &lab.verbs, &config).unwrap();
        // SAFETY: the memory outlives the registration.
        match unsafe { engine.register_device(inside, LEN) } {
            Ok(_) => assert!(works),
            Err(error) => {
                let text = error.to_string();
                assert!(!works && text.contains("modprobe nvidia-peermem"), "{text}");
                assert!(text.contains("by_dma_buf=cuMemGetHandleForAddressRange failed"), "{text}");
            }
        }
    }
    drop(memory);
    lab.end(session).unwrap();
}

#[test]
fn auto_goes_without_an_adapter_that_cannot_reach_the_cache() {
    const WINDOW: usize = 3 << 20;
    let (lab, session) = dma_buf_only();
    let control = session.control.unwrap();
    lab.standin.set("peer_bytes_max", WINDOW as u64);
    let memory = session.memory(WINDOW + LEN);
    let bytes: Vec<u8> = (0..WINDOW + LEN).map(|i| (i * 11 + i / 4091) as u8).collect();
    memory.write(&bytes);
    let with = || GdrEngine::attach(lab.rig.driver, &lab.verbs, &lab.config());
    let (driver, config) = (session.driver, session.config(Mode::Fixed(Method::Memcpy)));
    let without = move || Ok(Arc::new(CudaEngine::attach(driver, &config)?) as Arc<dyn CopyEngine>);
    let asked_for = engine_for(UseGdr::Yes, with, without.clone()).unwrap();
    // SAFETY: the memory outlives the registration.
    assert!(unsafe { asked_for.register_device(memory.address(), WINDOW + LEN) }.is_err());
    drop(asked_for);
    let engine = engine_for(UseGdr::Auto, with, without).unwrap();
    assert_eq!(engine.name(), "gdr");
    let pool = Pages::new(&vec![1; LEN]);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(pool.address(), LEN) }.unwrap();
    assert!(registration.wait(HANG));
    assert_eq!(control.left(session.device).registered, 0);
    // SAFETY: the memory outlives the registration.
    let cache = unsafe { engine.register_device(memory.address(), WINDOW + LEN) }.unwrap();
    assert_eq!(engine.name(), "memcpy");
    assert!(registration.wait(HANG));
    assert!(
        control.left(session.device).registered > 0,
        "the pool is not registered with the engine that copies"
    );
    assert!(dump(&*engine, memory.address(), WINDOW + LEN) == bytes);
    drop((cache, registration));
    assert_eq!(control.left(session.device).registered, 0);
    drop((engine, memory));
    lab.end(session).unwrap();
}

/// A registration refers to memory, not to addresses: an engine that sleeps drops it, and registers again after it
/// wakes up.
#[test]
fn memory_that_was_replaced_is_registered_again() {
    let (lab, session) = dma_buf_only();
    let engine = lab.engine(Mutation::default());
    let memory: Memory = session.memory(LEN);
    // SAFETY: the memory outlives the registrations.
    let register = || unsafe { engine.register_device(memory.address(), LEN) }.unwrap();
    let before_sleep = register();
    memory.write(&[1; LEN]);
    assert_eq!(dump(&engine, memory.address(), LEN), [1; LEN]);
    assert!(session.control.unwrap().remap(session.device, memory.address()));
    memory.write(&[2; LEN]);
    assert_eq!(dump(&engine, memory.address(), LEN), [1; LEN], "the stand-in kept what a real adapter keeps");
    drop(before_sleep);
    let after_sleep = register();
    assert_eq!(dump(&engine, memory.address(), LEN), [2; LEN]);
    drop((after_sleep, engine, memory));
    lab.end(session).unwrap();
}
