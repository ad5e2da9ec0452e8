//! Replies that come when nobody waits for them any more: their leases must not stay (P4).

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, unbounded};
use kvdepot_core::hit::GroupShape;
use kvdepot_core::machine::{ClaimGroup, Effects, Event, Fetched, NamespaceHandle, Request, TierSet};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_tier::{Presence, ReadItem, Tier};

use crate::{Depot, DepotConfig, PoolMapping};

#[path = "../tests/common/held_reads.rs"]
mod held_reads;

const BLOCKS: u32 = 3;

/// A depot whose tier has every block and completes no read, and a namespace.
fn depot() -> (Depot, NamespaceHandle, Receiver<ReadItem>) {
    let (begun, reads) = unbounded();
    let tier: Arc<dyn Tier> = Arc::new(held_reads::HeldReads { presence: Presence::Present, reads: begun });
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 1 << 20});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.pool_bytes).unwrap();
    let depot = Depot::with_tiers(config, PoolKind::Cache, vec![tier], pool).unwrap();
    let spec = NamespaceSpec::new("{}", BlockLayout::uniform(1, &[4096]).unwrap()).unwrap();
    let namespace = depot.direct().open_namespace(spec.canonical()).unwrap().handle;
    (depot, namespace, reads)
}

fn hashes() -> Vec<BlockHash> {
    (0..BLOCKS).map(|block| BlockHash([block as u8; 16])).collect()
}

/// The tier's reads end. Returns the effects of these steps: the threads that made them get no further for now.
fn blocks_come(depot: &Depot) -> Vec<Effects> {
    let ended = |slot| Event::ReadEnded { tier: 0, slot, outcome: Ok(Fetched::Whole) };
    (0..BLOCKS).map(|slot| depot.runner.step(|| ended(slot))).collect()
}

fn leases(depot: &Depot) -> (u64, u64) {
    let gauges = depot.runner.look(kvdepot_core::machine::Machine::gauges);
    (gauges.leases, gauges.held.leased)
}

#[test]
fn the_leases_of_a_load_that_is_answered_too_late_are_given_back() {
    let (depot, namespace, _reads) = depot();
    let (session, runner) = (depot.session(), &depot.runner);
    let request = Request::Load {
        namespace,
        id: None,
        hashes: hashes(),
        fetch_deadline: runner.deadline(),
        last: true,
        runs_max: usize::MAX,
        in_place: false,
    };
    let asked = runner.begin_within(session.owner(), request, Instant::now());
    let late = blocks_come(&depot);
    assert_eq!(leases(&depot).0, u64::from(BLOCKS), "the load is over");
    assert_eq!(runner.answer_within(asked).unwrap_err().kind(), ErrorKind::Timeout);
    late.into_iter().for_each(|effects| drop(runner.follow(effects, None)));
    assert_eq!(leases(&depot), (0, 0));
}

#[test]
fn a_claim_that_is_answered_too_late_is_released() {
    let (depot, namespace, _reads) = depot();
    let (session, runner) = (depot.session(), &depot.runner);
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    let request = Request::ClaimOpen {
        groups: vec![ClaimGroup { namespaces: vec![namespace], shape }],
        hashes: hashes(),
        skip: 0,
        limit: BLOCKS as usize,
        tiers: TierSet::ALL,
        deadline: runner.deadline(),
        patience: runner.deadline(),
        label: None,
    };
    let token = 1 << 60;
    let waiter = runner.life.waiters.register(token);
    let effects = runner.step(|| Event::Request { token, owner: session.owner(), request });
    assert!(runner.life.waiters.give_up(token, session.owner(), &waiter).is_none());
    runner.follow(effects, None);
    assert_eq!(runner.look(kvdepot_core::machine::Machine::gauges).claims_open, 0);
}
