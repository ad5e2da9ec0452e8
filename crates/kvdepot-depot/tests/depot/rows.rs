//! Three tiers in a row: the nearest that has a block serves it, the next one when that fails, all within one deadline. P1, P2.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::blocks::{HANG, depot, dump, hash, open};
use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::pipeline::{PipelineSpec, PoolKind};
use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::Depot;
use kvdepot_depot::direct::OpenNamespace;
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{FakeTier, Fetched, ReadItem, Tier, registry};
use parking_lot::Mutex;

/// Longer than a load without a hang takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a tier makes of a read; it has the block in any case.
#[derive(Clone, Debug)]
enum Read {
    Whole,
    Miss,
    Fail,
    /// Waits for the test.
    Hold(Sender<ReadItem>),
}

type Asked = Arc<Mutex<Vec<(usize, Instant)>>>;

/// One of the tiers, and who was asked until when.
struct InARow {
    place: usize,
    read: Read,
    asked: Asked,
}

impl Script for InARow {
    fn read(&self, inner: &Arc<FakeTier>, reads: Vec<ReadItem>, deadline: Instant) {
        self.asked.lock().extend(reads.iter().map(|_| (self.place, deadline)));
        match &self.read {
            Read::Whole => inner.read(reads, deadline),
            Read::Miss => reads.into_iter().for_each(|read| read.end(Ok(Fetched::Miss))),
            Read::Fail => reads.into_iter().for_each(|read| {
                read.end(Err(Error::new(ErrorKind::Io, "the test has it fail")));
            }),
            Read::Hold(held) => reads.into_iter().for_each(|read| held.send(read).unwrap()),
        }
    }
}

/// A depot over three tiers that all have one block, which its pool has not.
fn over(row: [Read; 3], timeout: Duration) -> (Depot, OpenNamespace, Asked) {
    let asked = Asked::default();
    let tier = |(place, read)| {
        Arc::new(ScriptedTier::new(InARow { place, read, asked: Arc::clone(&asked) })) as Arc<dyn Tier>
    };
    let depot =
        depot(PoolKind::Cache, row.into_iter().enumerate().map(tier).collect(), timeout.as_millis() as u64);
    let namespace = open(&depot);
    dump(&depot, namespace, 1);
    depot.direct().evict_to_percent(0.0);
    (depot, namespace, asked)
}

fn load(depot: &Depot, namespace: OpenNamespace) -> bool {
    let slots = depot.direct().read(namespace.handle, namespace.id, &[hash(0)], HANG).unwrap();
    slots.into_iter().next().unwrap().is_ok()
}

#[test]
fn the_nearest_tier_that_can_serves() {
    let all = [Read::Whole, Read::Miss, Read::Fail];
    for at in 0..3 * 3 * 3 {
        let row = [at / 9, at / 3 % 3, at % 3].map(|n| all[n].clone());
        let nearest = row.iter().position(|read| matches!(read, Read::Whole));
        let (depot, namespace, asked) = over(row.clone(), TIMEOUT);
        let began = Instant::now();
        assert_eq!(load(&depot, namespace), nearest.is_some(), "{row:?}");
        let (places, deadlines): (Vec<_>, Vec<_>) = asked.lock().drain(..).unzip();
        assert_eq!(places, (0..=nearest.unwrap_or(2)).collect::<Vec<_>>(), "{row:?}");
        // The last one may use all the time that is left, each of the others half of it.
        let (now, last) = (Instant::now(), began + TIMEOUT);
        for (place, deadline) in places.iter().zip(deadlines) {
            assert!(
                deadline >= began && deadline <= if *place < 2 { now + TIMEOUT / 2 } else { now + TIMEOUT }
            );
            assert!(*place < 2 || deadline >= last, "{row:?}");
        }
    }
}

#[test]
fn a_tier_that_hangs_costs_the_one_deadline_and_the_next_is_asked_no_more() {
    let (held, holds): (_, Receiver<ReadItem>) = unbounded();
    let (depot, namespace, asked) = over([Read::Miss, Read::Hold(held), Read::Whole], Duration::from_secs(5));
    assert!(!load(&depot, namespace), "a miss at the deadline");
    let read = holds.recv_timeout(HANG).unwrap();
    read.end(Err(Error::new(ErrorKind::Timeout, "late")));
    assert_eq!(asked.lock().iter().map(|(place, _)| *place).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn tiers_may_stand_in_any_order() {
    fn check(row: &mut Vec<&'static str>) -> usize {
        let mut count = 0;
        for name in registry::NAMES {
            if !row.contains(&name) {
                row.push(name);
                let text = format!("Cache|{}", row.join("|"));
                assert_eq!(PipelineSpec::parse(&text, &registry::NAMES).unwrap().tiers, *row, "{text}");
                count += 1 + if row.len() < 4 { check(row) } else { 0 };
                row.pop();
            }
        }
        count
    }
    let n = registry::NAMES.len();
    assert_eq!(check(&mut Vec::new()), n + n * (n - 1) + n * (n - 1) * (n - 2) * (n - 2));
}
