//! Deadlines around an engine whose groups end when the test says so.

use std::time::Duration;

use super::*;
use crate::conformance::Collect;

const HANG: Duration = Duration::from_secs(60);

/// Passes each sink to the test.
#[derive(Debug)]
struct Slow(Sender<Arc<dyn GroupSink>>);

impl CopyEngine for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        batch.check_deadline()?;
        self.0.send(sink).map_err(|_| closed())
    }

    fn numa_node(&self) -> Option<u32> {
        Some(3)
    }
}

#[test]
fn the_node_is_that_of_the_engine_behind() {
    assert_eq!(Lab::new().engine.numa_node(), Some(3));
}

/// Reports its drop.
#[derive(Debug)]
struct Held(Arc<Collect>, Sender<()>);

impl GroupSink for Held {
    fn group_ended(&self, group: usize, outcome: Result<()>) {
        self.0.group_ended(group, outcome);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.1.send(());
    }
}

struct Lab {
    engine: Bounded,
    given: Receiver<Arc<dyn GroupSink>>,
}

struct Batch {
    collect: Arc<Collect>,
    let_go: Receiver<()>,
}

impl Lab {
    fn new() -> Self {
        let (sender, given) = crossbeam_channel::unbounded();
        Self { engine: Bounded::new(Arc::new(Slow(sender))).unwrap(), given }
    }

    /// Runs a batch of two empty groups.
    fn run(&self, direction: Direction, deadline: Option<Duration>) -> Result<Batch> {
        let mut batch = CopyBatch::new(direction);
        batch.deadline = deadline.map(|wait| Instant::now() + wait);
        batch.end_group();
        batch.end_group();
        let (sender, let_go) = crossbeam_channel::bounded(1);
        let collect = Collect::new(2);
        let sink = Arc::new(Held(Arc::clone(&collect), sender));
        // SAFETY: no memory is named.
        unsafe { self.engine.run(batch, sink) }?;
        Ok(Batch { collect, let_go })
    }

    fn given(&self) -> Arc<dyn GroupSink> {
        self.given.recv_timeout(HANG).unwrap()
    }
}

fn kinds(outcomes: &[Result<()>]) -> Vec<Option<ErrorKind>> {
    outcomes.iter().map(|outcome| outcome.as_ref().err().map(Error::kind)).collect()
}

#[test]
fn what_ended_in_time_is_reported_as_the_engine_says() {
    let lab = Lab::new();
    let batch = lab.run(Direction::ToHost, Some(HANG)).unwrap();
    let sink = lab.given();
    sink.group_ended(0, Ok(()));
    sink.group_ended(1, Err(Error::new(ErrorKind::Io, "broken")));
    drop(sink);
    assert_eq!(kinds(&batch.collect.wait()), [None, Some(ErrorKind::Io)]);
    batch.let_go.recv_timeout(HANG).unwrap();
}

#[test]
fn what_did_not_end_fails_at_the_deadline_and_is_kept_until_the_engine_lets_go() {
    let lab = Lab::new();
    let batch = lab.run(Direction::ToHost, Some(HANG)).unwrap();
    let sink = lab.given();
    sink.group_ended(0, Ok(()));
    lab.engine.pass_deadlines();
    assert_eq!(kinds(&batch.collect.wait()), [None, Some(ErrorKind::Timeout)]);
    assert!(batch.let_go.is_empty());
    // Later reports are ignored; `Collect` panics when a group ends twice.
    sink.group_ended(1, Ok(()));
    assert!(batch.let_go.is_empty());
    drop(sink);
    batch.let_go.recv_timeout(HANG).unwrap();
}

#[test]
fn a_direction_that_owes_a_copy_takes_no_other_and_the_other_goes_on() {
    let lab = Lab::new();
    let late = lab.run(Direction::ToHost, Some(HANG)).unwrap();
    let sink = lab.given();
    lab.engine.pass_deadlines();
    late.collect.wait();
    let refused = lab.run(Direction::ToHost, Some(HANG)).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("late_ms="), "{refused}");
    let other = lab.run(Direction::ToDevice, Some(HANG)).unwrap();
    let loading = lab.given();
    (0..2).for_each(|group| loading.group_ended(group, Ok(())));
    assert_eq!(kinds(&other.collect.wait()), [None, None]);
    drop(sink);
    late.let_go.recv_timeout(HANG).unwrap();
    assert!(lab.run(Direction::ToHost, Some(HANG)).is_ok(), "the device is back");
}

#[test]
fn a_load_is_reported_when_the_device_is_through_however_late() {
    let lab = Lab::new();
    let batch = lab.run(Direction::ToDevice, Some(HANG)).unwrap();
    let sink = lab.given();
    lab.engine.pass_deadlines();
    let begun = Instant::now();
    while !lab.engine.is_late() {
        assert!(begun.elapsed() < HANG);
        std::thread::yield_now();
    }
    assert!(batch.collect.wait_for(Duration::ZERO).is_none(), "the device may still write");
    let refused = lab.run(Direction::ToDevice, Some(HANG)).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    (0..2).for_each(|group| sink.group_ended(group, Ok(())));
    drop(sink);
    assert_eq!(kinds(&batch.collect.wait()), [None, None]);
    batch.let_go.recv_timeout(HANG).unwrap();
}

#[test]
fn a_deadline_is_kept_by_the_clock() {
    let lab = Lab::new();
    let batch = lab.run(Direction::ToHost, Some(Duration::from_millis(5))).unwrap();
    assert_eq!(kinds(&batch.collect.wait()), [Some(ErrorKind::Timeout); 2]);
}

/// An engine whose `run` blocks, as driver calls may.
#[derive(Debug)]
struct Blocking(Sender<Arc<dyn GroupSink>>, Receiver<()>);

impl CopyEngine for Blocking {
    fn name(&self) -> &'static str {
        "blocking"
    }

    unsafe fn run(&self, _: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        let _ = self.0.send(sink);
        let _ = self.1.recv();
        Err(Error::new(ErrorKind::Io, "blocked"))
    }
}

#[test]
fn a_call_that_blocks_holds_up_nobody_and_what_waits_behind_it_is_not_begun() {
    let (sender, given) = crossbeam_channel::unbounded();
    let (go, wait) = crossbeam_channel::unbounded();
    let lab = Lab { engine: Bounded::new(Arc::new(Blocking(sender, wait))).unwrap(), given };
    let batches = [HANG, HANG].map(|wait| lab.run(Direction::ToDevice, Some(wait)));
    let first = lab.given();
    lab.engine.pass_deadlines();
    // The batch that was not begun can write nothing.
    let outcomes = batches[1].as_ref().unwrap().collect.wait();
    assert_eq!(kinds(&outcomes), [Some(ErrorKind::Timeout); 2]);
    assert!(batches[0].as_ref().unwrap().collect.wait_for(Duration::ZERO).is_none());
    drop(first);
    // Closing does not wait for late batches.
    let Lab { engine, given } = lab;
    drop(engine);
    assert!(batches.iter().flatten().all(|batch| batch.let_go.is_empty()));
    go.send(()).unwrap();
    for batch in batches.into_iter().flatten() {
        batch.let_go.recv_timeout(HANG).unwrap();
    }
    assert!(given.recv().is_err(), "the second batch was begun");
}

#[test]
fn an_engine_that_refuses_fails_every_group() {
    let (sender, given) = crossbeam_channel::bounded(0);
    drop(given);
    let engine = Bounded::new(Arc::new(Slow(sender))).unwrap();
    let lab = Lab { engine, given: crossbeam_channel::never() };
    let batch = lab.run(Direction::ToHost, None).unwrap();
    assert_eq!(kinds(&batch.collect.wait()), [Some(ErrorKind::Closed); 2]);
    batch.let_go.recv_timeout(HANG).unwrap();
}
