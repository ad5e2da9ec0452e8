//! The engine under many schedules, and with deliberate mistakes, which the same suite must find.

use crate::conformance::{DeviceMemory, StreamDevice, check, check_streams};
use crate::gdr::mutation::{Mistake, Mutation};
use crate::gdr::tests::rig::Lab;

/// Number of random schedules that the engine must pass.
const SCHEDULES: u64 = 1000;
/// Number of schedules within which a mistake must show.
const SCHEDULES_OF_A_MISTAKE: u64 = 100;

fn once(lab: &Lab, mutation: Mutation, seed: u64) -> Result<(), String> {
    let session = lab.session(seed);
    let engine = lab.engine(mutation);
    let outcome = check_streams(&engine, &session, seed);
    drop(engine);
    let ended = lab.end(session).map_err(|what| format!("seed {seed}: {what}"));
    outcome.and(ended)
}

#[test]
fn gdr_passes_every_schedule() {
    let lab = Lab::new();
    for seed in 0..SCHEDULES {
        once(&lab, Mutation::default(), seed).unwrap();
    }
}

#[test]
fn gdr_copies_what_every_engine_copies() {
    let lab = Lab::new();
    for seed in 0..4 {
        let session = lab.session(seed);
        let engine = lab.engine(Mutation::default());
        check(&engine, |len| session.memory(len));
        drop(engine);
        lab.end(session).unwrap();
    }
}

/// With pool and KV cache registered in advance, a batch registers nothing and rings few doorbells.
#[test]
fn registered_memory_is_not_registered_again() {
    use crate::conformance::Collect;
    use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};
    const LEN: usize = 256 << 10;
    const PAGE: usize = 1 << 10;
    let lab = Lab::new();
    let session = lab.session(1);
    let engine = lab.engine(Mutation::default());
    let memory = session.memory(LEN);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * 7 + i / 4093) as u8).collect();
    memory.write(&bytes);
    let mut host = vec![0u8; LEN];
    // SAFETY: memory and host memory outlive the registrations, which are dropped below.
    let (cache, pool) = unsafe {
        (
            engine.register_device(memory.address(), LEN).unwrap(),
            engine.register_pool(host.as_mut_ptr(), LEN).unwrap(),
        )
    };
    assert!(pool.wait(std::time::Duration::from_secs(60)) && pool.failure().is_none());
    assert_eq!(pool.registered_bytes(), LEN as u64);
    let (regions, doorbells) = (lab.standin.get("regions"), lab.standin.get("doorbells"));
    lab.standin.fail("ibv_reg_mr_iova2", 0, u64::MAX, libc::ENOMEM);
    lab.standin.fail("ibv_reg_dmabuf_mr", 0, u64::MAX, libc::EOPNOTSUPP);
    let mut batch = CopyBatch::new(Direction::ToHost);
    for at in (0..LEN).step_by(PAGE) {
        // SAFETY: inside of the host memory.
        let to = unsafe { host.as_mut_ptr().add(at) };
        batch.ops.push(CopyOp { device: memory.address() + at as u64, host: to, len: PAGE });
    }
    batch.end_group();
    let collect = Collect::new(1);
    // SAFETY: all memory lives until `wait` has returned.
    unsafe { engine.run(batch, std::sync::Arc::clone(&collect) as std::sync::Arc<dyn GroupSink>) }.unwrap();
    collect.wait().into_iter().for_each(|outcome| outcome.unwrap());
    assert_eq!(host, bytes);
    assert_eq!(lab.standin.get("regions"), regions);
    let rung = lab.standin.get("doorbells") - doorbells;
    assert!(rung <= 12, "{rung} doorbells for {} copies", LEN / PAGE);
    drop((cache, pool, engine, memory));
    lab.end(session).unwrap();
}

/// Checks that the suite finds the mistake in some of the schedules.
fn found(mistake: Mistake) {
    let lab = Lab::new();
    let mut caught = 0;
    for seed in 0..SCHEDULES_OF_A_MISTAKE {
        caught += u64::from(once(&lab, Mutation::of(mistake), seed).is_err());
    }
    eprintln!("gdr with {mistake:?}: found in {caught} of {SCHEDULES_OF_A_MISTAKE} schedules");
    assert!(caught > 0, "gdr with {mistake:?} passes {SCHEDULES_OF_A_MISTAKE} schedules");
}

#[test]
fn copying_before_compute_has_ended_is_found() {
    found(Mistake::SkipComputeWait);
}

#[test]
fn reporting_when_posted_is_found() {
    found(Mistake::ReportAtOnce);
}

#[test]
fn submitting_when_posted_is_found() {
    found(Mistake::SubmitAtOnce);
}

#[test]
fn waiting_for_one_queue_pair_of_several_is_found() {
    found(Mistake::OneQueuePairIsEnough);
}

#[test]
fn a_report_of_the_first_request_instead_of_the_last_is_found() {
    found(Mistake::SignalFirst);
}

#[test]
fn writes_that_nothing_pushes_are_found() {
    found(Mistake::SkipFlush);
}

#[test]
fn regions_that_end_early_are_found() {
    found(Mistake::RegionsEndEarly);
}
