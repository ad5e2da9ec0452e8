//! What a step of the machine asks of a tier reaches it in few calls, in the step's order; a removal ends when the tier
//! says so; a hung tier costs one wait for all namespaces. P1, P2.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::blocks::{HANG, depot, dump, hash, key, open, spec};
use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockKey, ErrorKind, NamespaceSpec};
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{Done, FakeTier, ReadItem, Tier, WriteItem};

const BLOCKS: u64 = 64;
/// How long a removal waits for a tier.
const REMOVE_WAIT: Duration = Duration::from_secs(2);
/// A machine may stand still during one of them, but not during each.
const TRIES: usize = 5;

/// A request to the tier.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Read(Vec<BlockKey>),
    Write(Vec<BlockKey>),
    Remove(Vec<BlockKey>),
}

/// A tier that records what it is asked for, and can be made to end nothing.
#[derive(Default)]
struct Recorder {
    calls: Mutex<Vec<Call>>,
    /// Receives removals that the test will end.
    removals: Option<Sender<(Vec<BlockKey>, Done<()>)>>,
    /// Whether nobody opens namespaces.
    is_hung: bool,
}

impl Recorder {
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Script for Recorder {
    fn open_namespace(
        &self,
        inner: &Arc<FakeTier>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        if self.is_hung {
            // Like a tier whose thread is gone: nobody answers.
            return std::mem::forget(done);
        }
        inner.open_namespace(spec, at_least, deadline, done);
    }

    fn read(&self, inner: &Arc<FakeTier>, reads: Vec<ReadItem>, deadline: Instant) {
        self.note(Call::Read(reads.iter().map(|read| read.key).collect()));
        inner.read(reads, deadline);
    }

    fn write(&self, inner: &Arc<FakeTier>, writes: Vec<WriteItem>, deadline: Instant) {
        self.note(Call::Write(writes.iter().map(|write| write.key).collect()));
        inner.write(writes, deadline);
    }

    fn remove(&self, inner: &Arc<FakeTier>, keys: Vec<BlockKey>, done: Done<()>) {
        self.note(Call::Remove(keys.clone()));
        match &self.removals {
            Some(removals) => removals.send((keys, done)).unwrap(),
            None => inner.remove(keys, done),
        }
    }
}

fn tier(script: Recorder) -> Arc<ScriptedTier<Recorder>> {
    Arc::new(ScriptedTier::new(script))
}

fn longest(calls: &[Call]) -> (usize, usize) {
    let (mut reads, mut writes) = (0, 0);
    for call in calls {
        match call {
            Call::Read(keys) => reads = reads.max(keys.len()),
            Call::Write(keys) => writes = writes.max(keys.len()),
            Call::Remove(_) => {}
        }
    }
    (reads, writes)
}

#[test]
fn blocks_of_one_request_reach_the_tier_in_batches() {
    let tier = tier(Recorder::default());
    let depot = depot(PoolKind::Staging, vec![Arc::clone(&tier) as _], 60_000);
    let (direct, namespace) = (depot.direct(), open(&depot));
    dump(&depot, namespace, BLOCKS);
    let hashes: Vec<BlockHash> = (0..BLOCKS).map(hash).collect();
    let slots = direct.read(namespace.handle, namespace.id, &hashes, HANG).unwrap();
    assert!(slots.iter().all(Result::is_ok));
    let calls = tier.script.calls.lock().unwrap().clone();
    let (reads, writes) = longest(&calls);
    assert!(reads > 1 && writes > 1, "{calls:?}");
}

/// Removes two blocks while the tier takes its time. Returns whether only the tier can have ended the removal: on a machine
/// that stands still its own limit of time may end it.
fn is_ended_by_the_tier() -> bool {
    let (send, removals): (_, Receiver<(Vec<BlockKey>, Done<()>)>) = unbounded();
    let tier = tier(Recorder { removals: Some(send), ..Recorder::default() });
    let depot = depot(PoolKind::Cache, vec![Arc::clone(&tier) as _], 600_000);
    let (direct, namespace) = (depot.direct(), open(&depot));
    dump(&depot, namespace, BLOCKS);
    let begun = Instant::now();
    let is_late = || begun.elapsed() >= REMOVE_WAIT;
    std::thread::scope(|scope| {
        let (done, ended) = unbounded();
        scope.spawn(move || done.send(direct.remove(&[key(namespace, 0), key(namespace, 1)])).unwrap());
        let (keys, forget) = removals.recv_timeout(HANG).unwrap();
        let is_over = !ended.is_empty();
        assert!(!is_over || is_late(), "the tier still has the block");
        tier.inner.remove(keys.clone(), forget);
        let mut keys = keys;
        while keys.len() < 2 {
            let (more, forget) = removals.recv_timeout(HANG).unwrap();
            tier.inner.remove(more.clone(), forget);
            keys.extend(more);
        }
        keys.sort();
        let mut expected = vec![key(namespace, 0), key(namespace, 1)];
        expected.sort();
        assert_eq!(keys, expected);
        let removed = ended.recv_timeout(HANG).unwrap();
        let in_time = !is_late();
        assert_eq!(removed.was_there, [true, true]);
        assert!(removed.left == 0 || !in_time, "{removed:?}");
        in_time
    })
}

#[test]
fn a_removal_ends_when_the_tier_has_forgotten() {
    assert!((0..TRIES).any(|_| is_ended_by_the_tier()), "each removal took {REMOVE_WAIT:?} or longer");
}

/// One wait, although 40 namespaces are opened; otherwise it would be 40 deadlines.
#[test]
fn a_tier_that_hangs_costs_one_wait_for_all_namespaces() {
    let hung = tier(Recorder { is_hung: true, ..Recorder::default() });
    let depot = depot(PoolKind::Cache, vec![hung as _, tier(Recorder::default()) as _], 2_000);
    let specs: Vec<String> = (0..40).map(|n| spec(n).canonical().to_owned()).collect();
    let began = Instant::now();
    let error = depot.direct().open_namespaces(&specs).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(began.elapsed() < HANG, "40 waits of two seconds are 80");
}
