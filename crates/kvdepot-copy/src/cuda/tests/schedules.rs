//! Every engine under many schedules, and every engine with a deliberate mistake, which the same suite must find.

use crate::conformance::{check, check_streams};
use crate::cuda::engine::Mode;
use crate::cuda::mutation::{Mistake, Mutation};
use crate::cuda::submit::Method;
use crate::cuda::tests::rig::Rig;

/// Number of random schedules that each engine must pass.
const SCHEDULES: u64 = 1000;
/// Number of schedules within which a mistake must show.
const SCHEDULES_OF_A_MISTAKE: u64 = 100;
/// Number of rounds on a real device, whose order cannot be controlled.
const ROUNDS_OF_A_DEVICE: u64 = 20;

fn once(rig: &Rig, mode: Mode, mutation: Mutation, seed: u64) -> Result<(), String> {
    let session = rig.session(seed);
    let engine = session.engine(mode, mutation);
    let outcome = check_streams(&engine, &session, seed);
    drop(engine);
    let ended = session.end().map_err(|what| format!("seed {seed}: {what}"));
    outcome.and(ended)
}

fn passes(rig: &Rig, mode: Mode, seeds: u64) {
    for seed in 0..seeds {
        once(rig, mode, Mutation::default(), seed).unwrap();
    }
    let session = rig.session(seeds);
    let engine = session.engine(mode, Mutation::default());
    check(&engine, |len| crate::conformance::StreamDevice::memory(&session, len));
    drop(engine);
    session.end().unwrap();
}

fn passes_on_a_device(mode: Mode) {
    if let Some(rig) = Rig::real() {
        if mode == Mode::Fixed(Method::Batch) && !rig.driver.has_batch() {
            eprintln!("SKIPPED: the driver is older than CUDA 12.8");
            return;
        }
        passes(&rig, mode, ROUNDS_OF_A_DEVICE);
    }
}

#[test]
fn memcpy_passes_every_schedule() {
    passes(&Rig::standin(12_000), Mode::Fixed(Method::Memcpy), SCHEDULES);
}

#[test]
fn batch_of_cuda_12_passes_every_schedule() {
    passes(&Rig::standin(12_080), Mode::Fixed(Method::Batch), SCHEDULES);
}

#[test]
fn batch_of_cuda_13_passes_every_schedule() {
    passes(&Rig::standin(13_000), Mode::Fixed(Method::Batch), SCHEDULES);
}

#[test]
fn kernel_passes_every_schedule() {
    passes(&Rig::standin(13_000), Mode::Fixed(Method::Kernel), SCHEDULES);
}

#[test]
fn auto_passes_every_schedule() {
    passes(&Rig::standin(13_000), Mode::Auto, SCHEDULES);
}

#[test]
fn memcpy_passes_on_a_device() {
    passes_on_a_device(Mode::Fixed(Method::Memcpy));
}

#[test]
fn batch_passes_on_a_device() {
    passes_on_a_device(Mode::Fixed(Method::Batch));
}

#[test]
fn kernel_passes_on_a_device() {
    passes_on_a_device(Mode::Fixed(Method::Kernel));
}

#[test]
fn auto_passes_on_a_device() {
    passes_on_a_device(Mode::Auto);
}

/// Checks that the suite finds the mistake in some of the schedules.
fn found(mode: Mode, mistake: Mistake) {
    let rig = Rig::standin(13_000);
    let mut caught = 0;
    for seed in 0..SCHEDULES_OF_A_MISTAKE {
        caught += u64::from(once(&rig, mode, Mutation::of(mistake), seed).is_err());
    }
    eprintln!("{mode:?} with {mistake:?}: found in {caught} of {SCHEDULES_OF_A_MISTAKE} schedules");
    assert!(caught > 0, "{mode:?} with {mistake:?} passes {SCHEDULES_OF_A_MISTAKE} schedules");
}

const FIXED: [Mode; 3] =
    [Mode::Fixed(Method::Memcpy), Mode::Fixed(Method::Batch), Mode::Fixed(Method::Kernel)];

#[test]
fn copying_before_compute_has_ended_is_found() {
    FIXED.into_iter().for_each(|mode| found(mode, Mistake::SkipComputeWait));
}

#[test]
fn reporting_before_the_copies_have_ended_is_found() {
    FIXED.into_iter().for_each(|mode| found(mode, Mistake::ReportAtOnce));
}

#[test]
fn a_group_without_its_event_is_found() {
    FIXED.into_iter().for_each(|mode| found(mode, Mistake::SkipGroupRecord));
}

#[test]
fn a_batch_that_reads_early_is_found() {
    found(Mode::Fixed(Method::Batch), Mistake::ReadSourcesAnyTime);
}

#[test]
fn descriptors_that_are_used_again_too_early_are_found() {
    found(Mode::Fixed(Method::Kernel), Mistake::ReuseDescriptors);
}

#[test]
fn a_kernel_on_unregistered_memory_is_found() {
    found(Mode::Fixed(Method::Kernel), Mistake::KernelOnUnregistered);
}
