//! `auto` and an adapter that cannot serve: the CUDA engine takes over. If the adapter was requested, errors name why.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::ErrorKind;

use crate::conformance::{Collect, DeviceMemory, StreamDevice};
use crate::cuda::tests::rig::Session;
use crate::cuda::{CudaEngine, Method, Mode};
use crate::gdr::attach::engine_for;
use crate::gdr::config::{GdrConfig, UseGdr};
use crate::gdr::engine::GdrEngine;
use crate::gdr::tests::registration::{HANG, LEN, dump, try_dump};
use crate::gdr::tests::rig::Lab;
use crate::pages::Pages;
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink, PoolRegistration};

/// Returns an engine that copies by an adapter, or else by plain calls.
fn engine(lab: &Lab, session: &Session, use_gdr: UseGdr, config: &GdrConfig) -> Arc<dyn CopyEngine> {
    let (driver, cuda) = (session.driver, session.config(Mode::Fixed(Method::Memcpy)));
    let without = move || Ok(Arc::new(CudaEngine::attach(driver, &cuda)?) as Arc<dyn CopyEngine>);
    let with = || GdrEngine::attach(lab.rig.driver, &lab.verbs, config);
    let engine = engine_for(use_gdr, with, without).unwrap();
    assert_eq!(engine.name(), "gdr");
    engine
}

fn register(engine: &dyn CopyEngine, pool: &Pages) -> kvdepot_core::Result<PoolRegistration> {
    // SAFETY: every test drops the registration before the pages.
    unsafe { engine.register_pool(pool.address(), LEN) }
}

#[test]
fn a_pool_above_the_limit_on_locked_memory_is_refused_at_once() {
    let lab = Lab::new();
    let session = lab.session(1);
    let config = GdrConfig { locked_bytes_max: Some(LEN as u64 - 1), ..lab.config() };
    let pool = Pages::new(&vec![1; LEN]);
    let requested = engine(&lab, &session, UseGdr::Yes, &config);
    let text = register(&*requested, &pool).unwrap_err().to_string();
    assert!(text.contains("RLIMIT_MEMLOCK") && text.contains("locked_bytes_max=65535"), "{text}");
    drop(requested);
    let auto = engine(&lab, &session, UseGdr::Auto, &config);
    let registration = register(&*auto, &pool).unwrap();
    assert_eq!(auto.name(), "memcpy");
    assert!(registration.wait(HANG));
    assert_eq!(registration.registered_bytes(), LEN as u64);
    drop((registration, auto));
    lab.end(session).unwrap();
}

/// Limits that are known only to the kernel, such as what other memory of the process has taken of it.
#[test]
fn a_pool_of_which_the_kernel_refuses_a_part_is_copied_without_the_adapter() {
    let lab = Lab::new();
    let session = lab.session(1);
    let memory = session.memory(LEN);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * 11 + i / 251) as u8).collect();
    memory.write(&bytes);
    let pool = Pages::new(&vec![1; LEN]);
    for use_gdr in [UseGdr::Yes, UseGdr::Auto] {
        let engine = engine(&lab, &session, use_gdr, &lab.config());
        // SAFETY: the memory outlives the registration.
        let cache = unsafe { engine.register_device(memory.address(), LEN) }.unwrap();
        lab.standin.set("region_bytes_max", LEN as u64 * 3 / 2);
        let registration = register(&*engine, &pool).unwrap();
        assert!(registration.wait(HANG));
        let text = registration.failure().unwrap().to_string();
        assert!(text.contains("RLIMIT_MEMLOCK") && text.contains("pool_bytes=65536"), "{text}");
        if use_gdr == UseGdr::Yes {
            let error = try_dump(&*engine, memory.address(), LEN).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Permission, "a full pool is another failure: {error}");
        } else {
            assert!(dump(&*engine, memory.address(), LEN) == bytes);
            assert_eq!(engine.name(), "memcpy");
            assert!(registration.wait(HANG));
            assert_eq!(
                (registration.registered_bytes(), registration.failure().is_none()),
                (LEN as u64, true)
            );
        }
        drop((registration, cache, engine));
        lab.standin.set("region_bytes_max", u64::MAX);
    }
    drop(memory);
    lab.end(session).unwrap();
}

/// `fail` breaks each of the first `batches`. The one after them is copied without the adapter.
fn leaves(batches: usize, timeout: Duration, fail: impl Fn(&Lab)) {
    let lab = Lab::new();
    let session = lab.session(1);
    let memory = session.memory(LEN);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * 11 + i / 251) as u8).collect();
    memory.write(&bytes);
    let engine = engine(&lab, &session, UseGdr::Auto, &GdrConfig { timeout, ..lab.config() });
    // SAFETY: the memory outlives the registration.
    let cache = unsafe { engine.register_device(memory.address(), LEN) }.unwrap();
    for batch in 0..batches {
        fail(&lab);
        try_dump(&*engine, memory.address(), LEN).unwrap_err();
        assert_eq!(engine.name(), "gdr", "after {} failures", batch + 1);
    }
    assert!(dump(&*engine, memory.address(), LEN) == bytes);
    assert_eq!(engine.name(), "memcpy");
    lab.standin.set("hung", 0);
    drop((cache, engine, memory));
    lab.end(session).unwrap();
}

#[test]
fn an_adapter_that_fails_batches_in_a_row_is_left() {
    leaves(3, HANG, |lab| lab.standin.fail("completion", 0, 1, 10));
}

#[test]
fn an_adapter_that_cannot_connect_again_is_left() {
    leaves(3, HANG, |lab| {
        lab.standin.cut(0);
        lab.standin.fail("ibv_create_qp", 0, 1, libc::ENOMEM);
    });
}

#[test]
fn an_adapter_that_does_not_answer_is_left() {
    leaves(1, Duration::from_millis(20), |lab| lab.standin.set("hung", 1));
}

/// What a task does with its time is not the adapter's doing.
#[test]
fn an_adapter_is_not_left_for_batches_past_their_deadline() {
    let lab = Lab::new();
    let session = lab.session(1);
    let memory = session.memory(LEN);
    let engine = engine(&lab, &session, UseGdr::Auto, &lab.config());
    let pages = Pages::new(&vec![0; LEN]);
    for _ in 0..4 {
        let mut batch = CopyBatch::new(Direction::ToHost);
        batch.deadline = Some(Instant::now());
        batch.ops.push(CopyOp { device: memory.address(), host: pages.address(), len: LEN });
        batch.end_group();
        let collect = Collect::new(1);
        // SAFETY: all memory lives until `wait` has returned.
        unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.unwrap();
        assert_eq!(collect.wait().remove(0).unwrap_err().kind(), ErrorKind::Timeout);
    }
    dump(&*engine, memory.address(), LEN);
    assert_eq!(engine.name(), "gdr");
    drop((engine, memory));
    lab.end(session).unwrap();
}

#[test]
fn copies_of_memory_that_is_not_there_do_not_count_against_the_adapter() {
    let lab = Lab::new();
    let session = lab.session(1);
    let memory = session.memory(LEN);
    memory.write(&vec![5; LEN]);
    let engine = engine(&lab, &session, UseGdr::Auto, &lab.config());
    for _ in 0..5 {
        let error = try_dump(&*engine, memory.address() + (1 << 40), LEN).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    assert!(dump(&*engine, memory.address(), LEN) == vec![5; LEN]);
    assert_eq!(engine.name(), "gdr");
    drop((engine, memory));
    lab.end(session).unwrap();
}
