//! Failing driver calls: the group that was hit and all that follow fail, once each, and nothing leaks.

use std::sync::Arc;

use crate::conformance::StreamDevice;
use crate::conformance::draw::{Draw, pattern};
use crate::conformance::work::Work;
use crate::conformance::{Collect, DeviceMemory};
use crate::cuda::engine::Mode;
use crate::cuda::mutation::{Mistake, Mutation};
use crate::cuda::submit::Method;
use crate::cuda::tests::rig::{Rig, Session};
use crate::pages::Pages;
use crate::{CopyEngine, Direction, GroupSink};

const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;

/// Runs a batch of eight groups and returns their outcomes. Groups that succeeded must have their bytes.
fn run(
    session: &Session,
    mode: Mode,
    mutation: Mutation,
    direction: Direction,
    seed: u64,
) -> Option<Vec<bool>> {
    let mut draw = Draw::new(seed);
    let mut work = Work::draw(&mut draw, 8, 3);
    work.groups.iter_mut().for_each(|group| group.retain(|place| place.len > 1));
    let memory = session.memory(work.device_len);
    let (device_bytes, host_bytes) = (pattern(work.device_len, 1), pattern(work.host_len, 2));
    memory.write(&device_bytes);
    let host = Pages::new(&host_bytes);
    let engine = session.engine(mode, mutation);
    // SAFETY: the pages outlive the registration.
    let registration = unsafe { engine.register_pool(host.address(), host.len()) }.unwrap();
    assert!(registration.wait(std::time::Duration::from_secs(60)));
    let collect = Collect::new(8);
    let batch = work.batch(direction, memory.address(), &host);
    session.fail_planned();
    // SAFETY: the memory lives until every group was reported and the engine was dropped.
    let begun = unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) };
    let ended: Option<Vec<bool>> =
        begun.ok().map(|()| collect.wait().into_iter().map(|outcome| outcome.is_ok()).collect());
    if direction == Direction::ToHost {
        for (group, _) in ended.iter().flatten().enumerate().filter(|(_, good)| **good) {
            for place in &work.groups[group] {
                let found = host.read(place.host, place.len);
                assert_eq!(
                    found,
                    device_bytes[place.device..place.device + place.len],
                    "group {group}, seed {seed}"
                );
            }
        }
    }
    drop(registration);
    drop(engine);
    session.settle();
    ended
}

/// Returns whether all successful groups come before the failed ones.
fn is_cut(ended: &[bool]) -> bool {
    ended.windows(2).all(|pair| pair[0] || !pair[1])
}

const MODES: [(Mode, &str); 3] = [
    (Mode::Fixed(Method::Memcpy), "cuMemcpy"),
    (Mode::Fixed(Method::Batch), "cuMemcpyBatchAsync"),
    (Mode::Fixed(Method::Kernel), "cuLaunchKernel"),
];

fn copy_call(name: &str, direction: Direction) -> String {
    match (name, direction) {
        ("cuMemcpy", Direction::ToHost) => "cuMemcpyDtoHAsync_v2".into(),
        ("cuMemcpy", Direction::ToDevice) => "cuMemcpyHtoDAsync_v2".into(),
        _ => name.into(),
    }
}

#[test]
fn a_failed_call_fails_its_group_and_those_that_follow_once_each() {
    let rig = Rig::standin(13_000);
    let (mut failed, mut spared) = (0, 0);
    for seed in 0..120 {
        let (mode, name) = MODES[seed as usize % 3];
        let direction = if seed % 2 == 0 { Direction::ToHost } else { Direction::ToDevice };
        let calls = [copy_call(name, direction), "cuEventRecord".into(), "cuEventCreate".into()];
        let call = &calls[seed as usize / 3 % 3];
        let session = rig.session(seed);
        session.plan_failure(call, seed % 5, 1, OUT_OF_MEMORY);
        let ended = run(&session, mode, Mutation::default(), direction, seed).expect("something was begun");
        assert!(is_cut(&ended), "{mode:?}, {call} fails, seed {seed}: {ended:?}");
        failed += ended.iter().filter(|good| !**good).count();
        spared += ended.iter().filter(|good| **good).count();
        session.end().unwrap_or_else(|what| panic!("{mode:?}, {call} fails, seed {seed}: {what}"));
    }
    assert!(failed > 100 && spared > 100, "{failed} groups failed, {spared} did not");
}

#[test]
fn going_on_after_a_failure_is_found() {
    let rig = Rig::standin(13_000);
    let mut whole = 0;
    for seed in 0..40 {
        let session = rig.session(seed);
        session.plan_failure("cuMemcpyDtoHAsync_v2", 1, 1, OUT_OF_MEMORY);
        let (mode, mistake) = (MODES[0].0, Mutation::of(Mistake::GoOnAfterFailure));
        let ended = run(&session, mode, mistake, Direction::ToHost, seed).unwrap();
        whole += usize::from(is_cut(&ended));
    }
    assert!(whole < 40, "no group after a failed one was reported as good");
}

#[test]
fn a_wait_that_cannot_be_queued_refuses_the_batch() {
    let rig = Rig::standin(13_000);
    for seed in 0..6 {
        let session = rig.session(seed);
        let engine = session.engine(MODES[seed as usize % 3].0, Mutation::default());
        let stream = session.stream();
        let mut work = Work::draw(&mut Draw::new(seed), 2, 2).batch(Direction::ToHost, 0, &Pages::new(&[]));
        work.wait_event = session.record(stream);
        session.fail("cuStreamWaitEvent", 0, 1, OUT_OF_MEMORY);
        // SAFETY: the batch is refused before any memory is touched.
        let refused = unsafe { engine.run(work, Collect::new(2) as Arc<dyn GroupSink>) };
        assert!(refused.unwrap_err().to_string().starts_with("cuStreamWaitEvent failed"));
        drop(engine);
        session.end().unwrap();
    }
}

#[test]
fn a_wait_that_fails_is_made_up_for_before_the_memory_is_given_back() {
    let rig = Rig::standin(13_000);
    for seed in 0..60 {
        let session = rig.session(seed);
        let (mode, _) = MODES[seed as usize % 3];
        session.plan_failure("cuEventSynchronize", seed % 4, 1, OUT_OF_MEMORY);
        let ended = run(&session, mode, Mutation::default(), Direction::ToHost, seed).unwrap();
        assert!(is_cut(&ended) && ended.contains(&false), "{mode:?}, seed {seed}: {ended:?}");
        session.end().unwrap();
    }
}

#[test]
fn a_lost_context_fails_all_that_is_left() {
    let rig = Rig::standin(13_000);
    for seed in 0..60 {
        let session = rig.session(seed);
        let (mode, _) = MODES[seed as usize % 3];
        session.plan_failure("execution", seed % 7, 1, LAUNCH_FAILED);
        let ended = run(&session, mode, Mutation::default(), Direction::ToHost, seed).unwrap_or_default();
        assert!(is_cut(&ended), "{mode:?}, seed {seed}: {ended:?}");
        assert!(session.violations().is_empty(), "seed {seed}: {:?}", session.violations());
    }
}

#[test]
fn an_engine_that_cannot_attach_leaves_nothing() {
    let rig = Rig::standin(13_000);
    let calls = [
        "cuDevicePrimaryCtxRetain",
        "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority",
        "cuModuleLoadData",
        "cuModuleGetFunction",
    ];
    for (seed, call) in calls.into_iter().enumerate() {
        let session = rig.session(seed as u64);
        session.fail(call, 0, 1, OUT_OF_MEMORY);
        let config = session.config(Mode::Fixed(Method::Kernel));
        let error = crate::cuda::CudaEngine::attach(session.driver, &config).unwrap_err();
        assert!(error.to_string().starts_with(call), "{error}");
        assert_eq!(error.kind(), kvdepot_core::ErrorKind::Unavailable);
        session.end().unwrap();
    }
}
