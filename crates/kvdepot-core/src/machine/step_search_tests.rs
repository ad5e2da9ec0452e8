//! Searches for space that take several steps: what other steps do in between must not mislead them.

use std::sync::Arc;

use super::step_tests::*;
use super::*;
use crate::BlockLayout;
use crate::key::NamespaceSpec;

/// Opens another namespace, with blocks of `bytes` bytes.
fn namespace_of(lab: &mut Lab, model: &str, bytes: u64) -> NamespaceHandle {
    let layout = BlockLayout::uniform(1, &[bytes]).unwrap();
    let spec = Arc::new(NamespaceSpec::new(&format!("{{\"model\":\"{model}\"}}"), layout).unwrap());
    let Reply::Namespace(opened) = lab.ask(Request::OpenNamespace { spec, epoch: 0 }) else {
        panic!("not a namespace")
    };
    opened.handle
}

fn reserve_in(namespace: NamespaceHandle, first: u64, count: u64) -> Request {
    let hashes = hashes(first, count);
    Request::Reserve { namespace, id: None, hashes, how: Reserve::Block, runs_max: usize::MAX }
}

#[test]
fn blocks_released_behind_a_search_are_found() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    let mut held = Vec::new();
    for first in (0..BLOCKS - 10).step_by(1000) {
        held.push(lab.load(2, first, 1000.min(BLOCKS - 10 - first)));
    }
    // The ten evictable blocks are the most recently used.
    let leases = lab.load(OWNER, BLOCKS - 10, 10);
    lab.ask(Request::Release { leases });
    // A request searches for space, and has passed over many leased blocks when its step ends.
    let (out, _) = step(
        &mut lab.machine,
        Event::Request { token: 1 << 40, owner: OWNER, request: reserve_in(lab.namespace, BLOCKS, 1) },
    );
    assert!(
        matches!(&out.replies[..], [(_, Ok(Reply::Slots(none)))] if none.is_empty()),
        "{:?}",
        out.replies
    );
    // Some of them become evictable, and none of those that it has yet to reach.
    lab.load(2, BLOCKS - 10, 10);
    let released = held[0].split_off(500);
    lab.ask_as(2, Request::Release { leases: released });
    assert_eq!(lab.dump(BLOCKS + 1, 1), 1);
    lab.machine.check().unwrap();
}

/// Returns a full pool in which every other block is leased, and a namespace of large blocks. No evictions make space
/// for such a block, which would need a hundred pieces of memory.
fn scattered() -> (Lab, NamespaceHandle) {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    let namespace = lab.namespace;
    for first in (0..BLOCKS).step_by(2000) {
        let hashes = hashes(first, 2000).into_iter().step_by(2).collect();
        let request = Request::Load {
            namespace,
            id: None,
            hashes,
            fetch_deadline: 1 << 40,
            last: true,
            runs_max: usize::MAX,
            in_place: false,
        };
        lab.ask_as(2, request);
    }
    let large = namespace_of(&mut lab, "large", 100 * BLOCK);
    (lab, large)
}

#[test]
fn an_allocation_evicts_no_more_blocks_in_many_steps_than_in_one() {
    let (mut lab, large) = scattered();
    let got = leases(lab.ask(reserve_in(large, 0, 1)));
    assert_eq!(got.len(), 0, "it does not fit");
    assert_eq!(lab.blocks(), BLOCKS - 1024);
    lab.machine.check().unwrap();
}

#[test]
fn an_allocation_that_was_given_up_takes_no_evictions_from_the_next_one() {
    let (mut lab, large) = scattered();
    // Its client ends after the first step.
    step(&mut lab.machine, Event::Request { token: 1 << 40, owner: 3, request: reserve_in(large, 0, 1) });
    let left = lab.blocks();
    assert!(left < BLOCKS, "it has evicted some");
    lab.now = 60_000_000_000;
    assert_eq!(leases(lab.ask(reserve_in(large, 0, 1))).len(), 0, "it does not fit");
    assert_eq!(lab.blocks(), left - 1024);
    lab.machine.check().unwrap();
}

#[test]
fn a_load_of_no_blocks_is_answered_at_once() {
    let mut lab = Lab::new("lru", 10, 1);
    assert_eq!(lab.load(OWNER, 0, 0).len(), 0);
    assert_eq!(lab.machine.gauges().loads_open, 0);
}

#[test]
fn a_starved_load_that_ends_leaves_its_turn_to_a_smaller_one() {
    for expires in [true, false] {
        let mut lab = Lab::new("lru", 4, 1);
        let large = namespace_of(&mut lab, "large", 2 * BLOCK);
        let small = lab.namespace;
        let held = lab.reserve(0, 2);
        // Reads that do not complete take the rest of the space.
        let blocks = hashes(100, 2).into_iter().map(|hash| (hash, 0)).collect();
        lab.ask(Request::Prefetch { namespace: small, blocks, deadline: 1 << 40 });
        assert_eq!(lab.machine.gauges().pool_free_bytes, 0);
        for (token, owner, namespace) in [(1000, 3, large), (1001, 4, small)] {
            let request = Request::Load {
                namespace,
                id: None,
                hashes: hashes(10 * token, 1),
                fetch_deadline: 1 << 40,
                last: true,
                runs_max: usize::MAX,
                in_place: false,
            };
            step(&mut lab.machine, Event::Request { token, owner, request });
            let located = Event::Located { ask: Ask::Load(token), locations: vec![Location::Tier(0)] };
            assert_eq!(step(&mut lab.machine, located).1, 0, "there is no room");
        }
        // There is space for the second, but not for the first, which was requested before it.
        lab.ask(Request::Release { leases: held[..1].to_vec() });
        assert_eq!(lab.machine.gauges().pool_free_bytes, BLOCK);
        lab.commands.clear();
        lab.feed(if expires { Event::Expire { token: 1000 } } else { Event::OwnerEnded { owner: 3 } });
        let reads = lab.commands.iter().filter(|command| matches!(command, Command::Read { .. })).count();
        assert_eq!(reads, 1, "expires: {expires}");
    }
}
