//! Claims that are to be settled while the depot's own threads are busy. P9.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, unbounded};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockKey, Priority};
use kvdepot_depot::message::{ClaimGroup, Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, Session};
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{FakeTier, Fetched, Presence, ReadItem, Tier, WriteItem};

use crate::blocks::{HANG, depot, hash, open};

/// More than the leases that one step of a claim takes.
const BLOCKS: u32 = 300;

/// A tier that says it has all blocks, leaves reads to the test, and takes writes only when the test lets it.
struct Busy {
    reads: Sender<ReadItem>,
    writing: Sender<()>,
    go_on: Receiver<()>,
}

impl Script for Busy {
    fn peek(&self, _: &Arc<FakeTier>, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        out.extend(keys.iter().map(|_| Presence::Present));
    }

    fn read(&self, _: &Arc<FakeTier>, reads: Vec<ReadItem>, _: Instant) {
        reads.into_iter().for_each(|read| self.reads.send(read).unwrap());
    }

    fn write(&self, inner: &Arc<FakeTier>, writes: Vec<WriteItem>, deadline: Instant) {
        // The test may have ended.
        let _ = self.writing.send(());
        let _ = self.go_on.recv();
        inner.write(writes, deadline);
    }
}

fn hashes(numbers: std::ops::Range<u64>) -> Hashes<'static> {
    Hashes(numbers.flat_map(|n| hash(n).0).collect::<Vec<u8>>().into())
}

/// Stores a block in one request, which leaves its write to the depot's pump.
fn store_one(session: &Session, namespace: u64, number: u64) {
    let hashes = hashes(number..number + 1);
    let reserved = session.handle(Request::Reserve { namespace, hashes, priority: Priority::Normal });
    let Response::Grants(grants) = reserved else { panic!("{reserved:?}") };
    let Grant::Leased { lease, .. } = grants[0] else { panic!("{grants:?}") };
    let sealed = session.handle(Request::Commit { leases: vec![lease], shards: Shards::All });
    assert!(matches!(sealed, Response::Ok), "{sealed:?}");
}

fn gauge(depot: &Depot, name: &str) -> u64 {
    depot.direct().stats()[name].as_u64().unwrap()
}

/// The last block of a large claim arrives while the pump, to which the claim's end is left, is busy.
#[test]
fn a_claim_that_is_full_settles_for_who_asks_although_the_pump_is_busy() {
    for decline in [false, true] {
        let ((reads, read), (writing, entered), (let_go, go_on)) = (unbounded(), unbounded(), unbounded());
        let tier: Arc<dyn Tier> = Arc::new(ScriptedTier::new(Busy { reads, writing, go_on }));
        let depot = depot(PoolKind::Cache, vec![tier], 30_000);
        // Dropped before the depot if the test fails: the depot's end waits for the tier.
        let let_go = let_go;
        let namespace = open(&depot).handle;
        let session = depot.session();
        let group = ClaimGroup { namespaces: vec![namespace], window_blocks: 0, hashes_per_block: 1 };
        let opened = session.handle(Request::ClaimOpen {
            groups: vec![group],
            hashes: hashes(0..u64::from(BLOCKS)),
            skip: 0,
            limit: BLOCKS,
            tiers: None,
            label: "".into(),
        });
        let Response::Claim { claim, settled: false, .. } = opened else { panic!("{opened:?}") };
        let mut last = None;
        for _ in 0..BLOCKS {
            if let Some(read) = last.replace(read.recv_timeout(HANG).unwrap()) {
                read.end(Ok(Fetched::Whole));
            }
        }
        store_one(&session, namespace, 1_000_000);
        entered.recv_timeout(HANG).unwrap();
        last.unwrap().end(Ok(Fetched::Whole));

        let settle = match decline {
            true => Request::ClaimDecline { claim },
            false => Request::ClaimPoll { claim, settle: true },
        };
        let over = session.handle(settle);
        assert!(matches!(over, Response::Claim { settled: true, units: BLOCKS, .. }), "{over:?}");
        let released = session.handle(Request::ClaimRelease { claim, tell_times: false });
        assert!(matches!(released, Response::Ok), "{released:?}");
        drop(let_go);
        // Large claims give their leases back piece by piece.
        let end = Instant::now() + HANG;
        while gauge(&depot, "claims_open") > 0 {
            assert!(Instant::now() < end, "the claim never ends");
            std::thread::yield_now();
        }
    }
}
