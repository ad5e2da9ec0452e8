//! A pool that keeps nothing: what several callers wait for, or what was reset on its way, is given back once and
//! completely. P1, P4.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockLayout, Error, ErrorKind, NamespaceSpec};
use kvdepot_depot::message::{ClaimGroup, Hashes, NamespaceHandle, Request, Response};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session};
use kvdepot_tier::{Fetched, Presence, ReadItem};

use crate::held_reads::HeldReads;

const POOL: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

struct Lab {
    depot: Depot,
    namespace: NamespaceHandle,
    reads: Receiver<ReadItem>,
}

impl Lab {
    fn new() -> Self {
        let (send, reads) = unbounded();
        let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": 60_000});
        let config = DepotConfig::from_json(&config.to_string()).unwrap();
        let pool = PoolMapping::create_private(POOL).unwrap();
        let tier = HeldReads { presence: Presence::Present, reads: send };
        let depot = Depot::with_tiers(config, PoolKind::Staging, vec![Arc::new(tier)], pool).unwrap();
        let spec = NamespaceSpec::new("{\"model\":\"staging\"}", BlockLayout::uniform(1, &[BLOCK]).unwrap());
        let namespace = depot.direct().open_namespace(spec.unwrap().canonical()).unwrap().handle;
        Self { depot, namespace, reads }
    }

    /// A claim on blocks 0 and 1.
    fn claim(&self, session: &Session) -> u64 {
        let groups =
            vec![ClaimGroup { namespaces: vec![self.namespace], window_blocks: 0, hashes_per_block: 1 }];
        let hashes = Hashes([[0; 16], [1; 16]].concat().into());
        match session.handle(Request::ClaimOpen {
            groups,
            hashes,
            skip: 0,
            limit: 2,
            tiers: None,
            label: "".into(),
        }) {
            Response::Claim { claim, settled: false, .. } => claim,
            other => panic!("{other:?}"),
        }
    }

    /// The reads of blocks 0 and 1.
    fn both_reads(&self) -> [ReadItem; 2] {
        let mut reads: Vec<_> = (0..2).map(|_| self.reads.recv_timeout(HANG).unwrap()).collect();
        reads.sort_by_key(|read| read.key.hash.0);
        reads.try_into().unwrap()
    }

    fn wait_until_empty(&self, what: &str) {
        let end = Instant::now() + HANG;
        loop {
            let stats = self.depot.direct().stats();
            let count = |name: &str| stats[name].as_u64().unwrap();
            if count("pool_blocks") == 0
                && count("pool_leased_bytes") == 0
                && count("pool_free_bytes") == POOL
            {
                return;
            }
            assert!(Instant::now() < end, "{what}: {stats}");
            std::thread::yield_now();
        }
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Io, "a read that fails")
}

#[test]
fn two_that_wait_for_one_block_settle_without_it_when_the_one_before_it_is_lost() {
    let lab = Lab::new();
    let sessions = [lab.depot.session(), lab.depot.session()];
    let claims = sessions.each_ref().map(|session| lab.claim(session));
    let [first, second] = lab.both_reads();
    first.end(Err(lost()));
    second.end(Ok(Fetched::Whole));
    for (session, claim) in sessions.iter().zip(claims) {
        match session.handle(Request::ClaimPoll { claim, settle: false }) {
            Response::Claim { settled: true, units: 0, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    drop(sessions);
    lab.wait_until_empty("nobody wants the block that was read");
}

#[test]
fn two_that_wait_for_one_block_both_have_it() {
    let lab = Lab::new();
    let sessions = [lab.depot.session(), lab.depot.session()];
    let claims = sessions.each_ref().map(|session| lab.claim(session));
    lab.both_reads().into_iter().for_each(|read| read.end(Ok(Fetched::Whole)));
    for (session, claim) in sessions.into_iter().zip(claims) {
        match session.handle(Request::ClaimPoll { claim, settle: false }) {
            Response::Claim { settled: true, units: 2, .. } => {}
            other => panic!("{other:?}"),
        }
        // The other one still reads it after this one has gone.
        drop(session);
    }
    lab.wait_until_empty("both are through");
}

#[test]
fn what_was_reset_while_it_was_read_gives_its_room_back() {
    let lab = Lab::new();
    let session = lab.depot.session();
    lab.claim(&session);
    let reads = lab.both_reads();
    lab.depot.direct().reset(&[lab.namespace]).unwrap();
    reads.into_iter().for_each(|read| read.end(Ok(Fetched::Whole)));
    drop(session);
    lab.wait_until_empty("blocks of an epoch that has passed");
}
