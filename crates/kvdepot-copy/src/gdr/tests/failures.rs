//! Adapters that fail: every group is reported once, and the next batch gets a new connection.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{ErrorKind, Result};

use crate::bounded;
use crate::conformance::{Collect, DeviceMemory, StreamDevice};
use crate::cuda::tests::hangs;
use crate::gdr::config::GdrConfig;
use crate::gdr::engine::GdrEngine;
use crate::gdr::mutation::{Mistake, Mutation};
use crate::gdr::tests::rig::Lab;
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};

const GROUPS: usize = 8;
const LEN: usize = 3000;
/// Number of schedules for every failure.
const SCHEDULES: u64 = 40;

/// Runs a batch with one copy for each group.
fn run(engine: &GdrEngine, direction: Direction, device: u64, host: &mut [u8]) -> Vec<Result<()>> {
    let mut batch = CopyBatch::new(direction);
    for (group, to) in host.chunks_mut(LEN).enumerate() {
        batch.ops.push(CopyOp { device: device + (group * LEN) as u64, host: to.as_mut_ptr(), len: LEN });
        batch.end_group();
    }
    let collect = Collect::new(GROUPS);
    // SAFETY: all memory lives until `wait` has returned.
    unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.unwrap();
    collect.wait()
}

/// `fail` breaks something. The batch fails from some group on, and the next batch succeeds.
fn recovers(mutation: Mutation, fail: impl Fn(&Lab)) -> std::result::Result<(), String> {
    let lab = Lab::new();
    for seed in 0..SCHEDULES {
        let session = lab.session(seed);
        let engine = lab.engine(mutation);
        let memory = session.memory(GROUPS * LEN);
        let bytes: Vec<u8> = (0..GROUPS * LEN).map(|i| (i * 13 + i / 251) as u8).collect();
        memory.write(&bytes);
        for direction in [Direction::ToHost, Direction::ToDevice] {
            let mut host = match direction {
                Direction::ToHost => vec![0u8; GROUPS * LEN],
                Direction::ToDevice => bytes.clone(),
            };
            fail(&lab);
            let outcomes = run(&engine, direction, memory.address(), &mut host);
            let good = outcomes.iter().take_while(|outcome| outcome.is_ok()).count();
            if good == GROUPS || outcomes[good..].iter().any(Result::is_ok) {
                return Err(format!("seed {seed}, {direction:?}: {outcomes:?}"));
            }
            if direction == Direction::ToHost && host[..good * LEN] != bytes[..good * LEN] {
                return Err(format!("seed {seed}: a group that ended well is not there"));
            }
            if direction == Direction::ToHost {
                host.fill(0);
            } else {
                memory.write(&vec![0; GROUPS * LEN]);
            }
            let outcomes = run(&engine, direction, memory.address(), &mut host);
            if outcomes.iter().any(Result::is_err) || memory.read() != bytes || host != bytes {
                return Err(format!("seed {seed}, {direction:?}: not recovered: {outcomes:?}"));
            }
        }
        drop((memory, engine));
        lab.end(session).map_err(|what| format!("seed {seed}: {what}"))?;
    }
    Ok(())
}

#[test]
fn a_failed_request_fails_its_group_and_those_behind() {
    recovers(Mutation::default(), |lab| lab.standin.fail("completion", 4, 1, 10)).unwrap();
}

#[test]
fn a_refused_post_fails_its_group_and_those_behind() {
    recovers(Mutation::default(), |lab| lab.standin.fail("post_send", 3, 1, libc::EINVAL)).unwrap();
}

#[test]
fn a_cut_link_fails_what_is_under_way() {
    recovers(Mutation::default(), |lab| lab.standin.cut(0)).unwrap();
}

#[test]
fn a_refused_registration_fails_its_group_and_those_behind() {
    recovers(Mutation::default(), |lab| lab.standin.fail("ibv_reg_mr_iova2", 2, 1, libc::ENOMEM)).unwrap();
}

#[test]
fn groups_behind_a_failed_one_that_claim_success_are_found() {
    let mutation = Mutation::of(Mistake::GoOnAfterFailure);
    recovers(mutation, |lab| lab.standin.cut(0)).unwrap_err();
}

/// An adapter that never answers is abandoned after the timeout (P2).
#[test]
fn a_hung_adapter_is_given_up() {
    let lab = Lab::new();
    let session = lab.session(1);
    let config = GdrConfig { timeout: Duration::from_millis(20), ..lab.config() };
    let engine = GdrEngine::attach(lab.rig.driver, &lab.verbs, &config).unwrap();
    let memory = session.memory(GROUPS * LEN);
    let mut host = vec![0u8; GROUPS * LEN];
    lab.standin.set("hung", 1);
    let outcomes = run(&engine, Direction::ToDevice, memory.address(), &mut host);
    lab.standin.set("hung", 0);
    assert!(
        outcomes.iter().all(|o| o.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout)),
        "{outcomes:?}"
    );
    drop((memory, engine));
    lab.end(session).unwrap();
}

/// An event that is never reached blocks the adapter's thread and no other. The slot is kept (P1, P2).
#[test]
fn compute_that_hangs_fails_the_copy_in_time_and_keeps_its_slot() {
    for seed in 0..8 {
        hang(bounded::Mutation::default(), seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn a_slot_that_is_released_despite_the_hung_copy_is_found() {
    let mistake = bounded::Mutation::of(bounded::Mistake::LetGoAtDeadline);
    let by_memory = |seed: &u64| hang(mistake, *seed).is_err_and(|what| what.contains(hangs::USED_AGAIN));
    let caught = (0..8).filter(by_memory).count();
    eprintln!("LetGoAtDeadline: found in {caught} of 8 schedules");
    assert!(caught > 0);
}

fn hang(mistake: bounded::Mutation, seed: u64) -> std::result::Result<(), String> {
    let lab = Lab::new();
    let session = lab.session(seed);
    let control = session.control.unwrap();
    let direction = if seed.is_multiple_of(2) { Direction::ToHost } else { Direction::ToDevice };
    let engine = Arc::new(lab.engine(Mutation::default()));
    let hang = |stream, hung| control.hang(session.device, stream, hung);
    let outcome = hangs::once(engine, &session, mistake, (direction, (seed / 2).is_multiple_of(2)), hang);
    control.hang(session.device, kvdepot_standin_cuda::EVERY_STREAM, false);
    outcome.and(lab.end(session))
}
