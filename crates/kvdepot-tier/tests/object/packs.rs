//! Packs: what they cost, how depots find those of others, and how they go.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::bucket_server::{Act, BucketServer, in_every_dialect, until};
use crate::heard::Heard;
use kvdepot_core::{BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_tier::conformance::{Bench, Waiting, listen, spec};
use kvdepot_tier::{Fetched, ObjectConfig, ObjectTier, Presence, ReadItem, Tier, WriteItem, Written};

const COUNT: u64 = 16;

fn open_as(server: &BucketServer, of: NamespaceSpec, change: impl FnOnce(&mut ObjectConfig)) -> Bench {
    let mut config = server.config("kv");
    // A batch of `COUNT` small blocks is a pack, whatever the speed of this machine.
    let slot_bytes = small().layout().slot_bytes();
    (config.pack_bytes, config.pack_linger) = (COUNT * slot_bytes, Duration::from_secs(15));
    config.pack_list_pause = Duration::ZERO;
    change(&mut config);
    Bench::with(Arc::new(ObjectTier::open(config).unwrap()), of)
}

fn small() -> NamespaceSpec {
    spec("small", BlockLayout::new(vec![vec![4096, 904], vec![5000]]).unwrap())
}

fn open(server: &BucketServer) -> Bench {
    open_as(server, small(), |_| {})
}

fn figure(bench: &Bench, name: &str) -> u64 {
    bench.tier.figures().into_iter().find(|(known, _)| *known == name).unwrap().1
}

fn served(server: &BucketServer, line: &str) -> u64 {
    server.with(|bucket| bucket.served.get(line).copied().unwrap_or(0))
}

/// Writes blocks as a depot does: many with one call.
fn write_batch(bench: &Bench, blocks: impl Iterator<Item = u64>) -> Vec<kvdepot_core::Result<Written>> {
    let (send, receive) = std::sync::mpsc::channel();
    let writes = blocks.enumerate().map(|(at, n)| {
        let send = send.clone();
        let done = Box::new(move |outcome| send.send((at, outcome)).unwrap());
        WriteItem { key: bench.key(n), src: bench.filled(n), done }
    });
    bench.tier.write(writes.collect(), Bench::soon());
    drop(send);
    let mut outcomes: Vec<_> = receive.iter().collect();
    outcomes.sort_by_key(|(at, _)| *at);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

fn write_pack(bench: &Bench, blocks: impl Iterator<Item = u64>) {
    for outcome in write_batch(bench, blocks) {
        assert_eq!(outcome.unwrap(), Written::New);
    }
}

/// Reads blocks with one call. Returns those that came whole and right.
fn read_batch(bench: &Bench, blocks: impl Iterator<Item = u64>) -> Vec<u64> {
    let (send, receive) = std::sync::mpsc::channel();
    let mut slots = Vec::new();
    let reads = blocks.map(|n| {
        let (send, slot) = (send.clone(), bench.slot());
        slots.push((n, slot.clone()));
        let done = Box::new(move |outcome: kvdepot_core::Result<Fetched>| {
            send.send((n, matches!(outcome, Ok(Fetched::Whole)))).unwrap();
        });
        ReadItem::new(bench.key(n), slot, done)
    });
    bench.tier.read(reads.collect(), Bench::soon());
    drop(send);
    let whole: Vec<u64> = receive.iter().filter(|(_, is_whole)| *is_whole).map(|(n, _)| n).collect();
    let is_right = |(n, slot): &&(u64, kvdepot_io::SlotBuf)| {
        whole.contains(n) && { bench.block_of(slot) == bench.bytes(*n) }
    };
    let right: Vec<u64> = slots.iter().filter(is_right).map(|(n, _)| *n).collect();
    assert_eq!(right.len(), whole.len(), "what is reported as whole is right");
    right
}

in_every_dialect! {
    a_dump_is_one_request_and_a_hit_is_one_request
    a_depot_that_begins_finds_the_packs_of_others
    a_running_depot_finds_new_packs_of_others
    blocks_that_are_alone_have_objects_of_their_own
    values_and_large_blocks_are_not_packed
    a_pack_that_a_lifecycle_rule_took_is_lost_as_a_whole
    a_damaged_block_costs_its_pack_and_all_can_be_written_again
    a_pack_that_is_too_short_is_a_miss
    a_pack_with_a_damaged_head_is_not_used
    a_removed_block_is_gone_from_the_packs_of_others
    packs_of_past_epochs_are_deleted
    a_pack_whose_answer_was_lost_is_written_once
    a_refused_pack_fails_all_its_blocks
    known_packs_are_in_the_list_of_keys
    a_list_that_failed_begins_anew
    objects_that_are_no_packs_stop_nothing
    a_pack_of_unknown_state_is_asked_for_before_its_blocks_are_written_again
    packs_of_a_depot_whose_clock_is_ahead_hide_no_others
}

fn a_dump_is_one_request_and_a_hit_is_one_request() {
    let server = BucketServer::start();
    let bench = open(&server);
    let puts = served(&server, "put_requests");
    write_pack(&bench, 0..COUNT);
    assert_eq!(served(&server, "put_requests"), puts + 1);
    assert_eq!((figure(&bench, "written_packs"), figure(&bench, "packed_blocks")), (1, COUNT));
    assert_eq!(server.names("/packs/").len(), 1);
    let before = (served(&server, "head_requests"), served(&server, "get_requests"));
    assert_eq!(bench.probe(bench.keys(COUNT)).unwrap(), COUNT as usize);
    assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
    let after = (served(&server, "head_requests"), served(&server, "get_requests"));
    assert_eq!(after, (before.0, before.1 + 1), "adjacent blocks are read together");
    // Two runs: a block between them is not wanted.
    assert_eq!(read_batch(&bench, (0..COUNT).filter(|n| *n != 5)).len(), COUNT as usize - 1);
    assert_eq!(served(&server, "get_requests"), after.1 + 2);
    assert_eq!(write_batch(&bench, 3..4)[0].as_ref().unwrap(), &Written::AlreadyThere);
    assert_eq!(bench.tier.usage().blocks, COUNT);
}

fn a_depot_that_begins_finds_the_packs_of_others() {
    let server = BucketServer::start();
    let writer = open(&server);
    write_pack(&writer, 0..COUNT);
    write_pack(&writer, COUNT..2 * COUNT);
    let other = open(&server);
    until("the packs are listed", || {
        other.peek(0) == Presence::Present && other.peek(COUNT) == Presence::Present
    });
    let gets = served(&server, "get_requests");
    assert_eq!(other.probe(other.keys(2 * COUNT)).unwrap(), 2 * COUNT as usize);
    assert_eq!(read_batch(&other, 0..2 * COUNT).len(), 2 * COUNT as usize);
    assert_eq!(served(&server, "get_requests"), gets + 2, "one for each pack");
    assert_eq!(figure(&other, "head_requests"), 0, "the lists say what is there");
}

fn a_running_depot_finds_new_packs_of_others() {
    let server = BucketServer::start();
    let (writer, other) = (open(&server), open(&server));
    assert_eq!(other.probe(other.keys(COUNT)).unwrap(), 0);
    for round in 0..3 {
        write_pack(&writer, round * COUNT..(round + 1) * COUNT);
        let first = round * COUNT;
        until("a lookup has led to a list", || {
            let keys = (first..first + COUNT).map(|n| other.key(n)).collect();
            other.probe(keys).unwrap() == COUNT as usize
        });
        assert_eq!(read_batch(&other, first..first + COUNT).len(), COUNT as usize);
    }
    // With its own pause, there is no list for every lookup.
    let calm = open_as(&server, small(), |config| config.pack_list_pause = Duration::from_secs(3600));
    for n in 0..20 {
        assert_eq!(calm.probe(vec![calm.key(1000 + n)]).unwrap(), 0);
    }
    // Opening lists packs and past epochs.
    assert!(figure(&calm, "list_requests") <= 2);
}

fn blocks_that_are_alone_have_objects_of_their_own() {
    let server = BucketServer::start();
    let bench = open_as(&server, small(), |config| config.pack_linger = Duration::from_millis(1));
    assert_eq!(bench.write(7).unwrap(), Written::New);
    assert!(bench.read_is_right(7));
    assert!(server.names("/packs/").is_empty() && server.names("/blocks/").len() == 1);
    let other = open_as(&server, small(), |config| config.pack_bytes = 0);
    assert_eq!(other.probe(vec![other.key(7)]).unwrap(), 1, "and depots without packs find them");
}

fn values_and_large_blocks_are_not_packed() {
    let server = BucketServer::start();
    let layout = || BlockLayout::new(vec![vec![5000]]).unwrap();
    let values = NamespaceSpec::new("{\"kind\": \"kvdepot value\"}", layout()).unwrap();
    assert!(values.holds_values());
    write_pack(&open_as(&server, values, |_| {}), 0..4);
    let large = small().layout().slot_bytes() * 4 - 1;
    write_pack(&open_as(&server, small(), |config| config.pack_bytes = large), 0..4);
    assert_eq!((server.names("/packs/").len(), server.names("/blocks/").len()), (0, 8));
}

fn a_pack_that_a_lifecycle_rule_took_is_lost_as_a_whole() {
    let server = BucketServer::start();
    let bench = open(&server);
    let heard = Arc::new(Heard::default());
    listen(&*bench.tier, &heard);
    write_pack(&bench, 0..COUNT);
    server.lose(&server.names("/packs/")[0]);
    assert_eq!(bench.peek(3), Presence::Present, "nobody told it");
    assert_eq!(bench.read(3).unwrap_err().kind(), ErrorKind::NotFound);
    let mut lost = heard.0.lock().clone();
    lost.sort_by_key(|key| key.hash.0);
    let mut all = bench.keys(COUNT);
    all.sort_by_key(|key| key.hash.0);
    assert_eq!(lost, all, "each once");
    assert!((0..COUNT).all(|n| bench.peek(n) != Presence::Present));
    assert_eq!(bench.tier.usage().blocks, 0);
    write_pack(&bench, 0..COUNT);
    assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
}

fn a_damaged_block_costs_its_pack_and_all_can_be_written_again() {
    let server = BucketServer::start();
    let bench = open(&server);
    let heard = Arc::new(Heard::default());
    listen(&*bench.tier, &heard);
    write_pack(&bench, 0..COUNT);
    let pack = server.names("/packs/")[0].clone();
    // In the payload of a block in the middle.
    server.change(&pack, |bytes| {
        let at = bytes.len() / 2 + 5000;
        bytes[at] ^= 4;
    });
    let right = read_batch(&bench, 0..COUNT);
    assert_eq!(right.len(), COUNT as usize - 1, "the others are right");
    until("the pack is deleted", || server.names("/packs/").is_empty());
    until("nothing of it is served", || (0..COUNT).all(|n| bench.peek(n) != Presence::Present));
    until("all are reported as lost", || {
        let lost = heard.0.lock();
        bench.keys(COUNT).iter().all(|key| lost.contains(key))
    });
    assert_eq!(figure(&bench, "corrupt_blocks"), 1);
    bench.drain();
    write_pack(&bench, 0..COUNT);
    assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
}

fn a_pack_that_is_too_short_is_a_miss() {
    let server = BucketServer::start();
    let bench = open(&server);
    write_pack(&bench, 0..COUNT);
    for (kept, wanted) in [(-100_i64, 0..COUNT), (10_000, COUNT - 1..COUNT), (0, 3..5)] {
        server.change(&server.names("/packs/")[0].clone(), |bytes| {
            bytes.truncate(kept.rem_euclid(bytes.len() as i64) as usize);
        });
        assert!(read_batch(&bench, wanted).is_empty());
        until("the pack is deleted", || server.names("/packs/").is_empty());
        until("none of it is present", || (0..COUNT).all(|n| bench.peek(n) != Presence::Present));
        write_pack(&bench, 0..COUNT);
        assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
    }
    assert_eq!(figure(&bench, "failures"), 0, "it is not a failure of the store");
}

fn a_pack_with_a_damaged_head_is_not_used() {
    let server = BucketServer::start();
    write_pack(&open(&server), 0..COUNT);
    let pack = server.names("/packs/")[0].clone();
    server.change(&pack, |bytes| bytes[50] ^= 1);
    let other = open(&server);
    until("the head was read", || figure(&other, "corrupt_blocks") == 1);
    let gets = served(&server, "get_requests");
    for n in 0..20 {
        assert_eq!(other.probe(vec![other.key(n)]).unwrap(), 0);
    }
    // One after another: those before the last have ended.
    until("further lists have ended", || {
        other.probe(vec![other.key(0)]).unwrap();
        figure(&other, "list_requests") >= 5
    });
    assert_eq!(served(&server, "get_requests"), gets, "its head is not read again");
    write_pack(&other, 0..COUNT);
    assert_eq!(read_batch(&other, 0..COUNT).len(), COUNT as usize);
}

fn a_removed_block_is_gone_from_the_packs_of_others() {
    let server = BucketServer::start();
    let (writer, other) = (open(&server), open(&server));
    write_pack(&other, 0..COUNT);
    write_pack(&writer, 0..COUNT);
    assert_eq!(server.names("/packs/").len(), 2, "neither knew of the other's");
    other.remove(3).unwrap();
    assert!(server.names("/packs/").is_empty(), "both packs have it");
    assert_ne!(other.peek(3), Presence::Present);
    assert_eq!(writer.read(3).unwrap_err().kind(), ErrorKind::NotFound);
    let third = open(&server);
    assert_eq!(third.probe(third.keys(COUNT)).unwrap(), 0);
    write_pack(&third, 0..COUNT);
    assert_eq!(read_batch(&third, 0..COUNT).len(), COUNT as usize);
}

fn packs_of_past_epochs_are_deleted() {
    let server = BucketServer::start();
    let mut bench = open(&server);
    write_pack(&bench, 0..COUNT);
    let next = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    assert!((0..COUNT).all(|n| bench.peek(n) == Presence::Absent));
    assert!(read_batch(&bench, 0..COUNT).is_empty());
    until("past epochs are deleted", || server.names("/packs/").is_empty());
    assert_eq!(bench.tier.usage().blocks, 0);
    bench.epoch = next;
    write_pack(&bench, 0..COUNT);
    assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
}

fn a_pack_whose_answer_was_lost_is_written_once() {
    let server = BucketServer::start();
    let bench = open(&server);
    let puts = AtomicU64::new(0);
    server.plan(move |request| {
        let is_first = request.line() == "put_requests" && puts.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first { Act::ServeAndClose } else { Act::Serve }
    });
    write_pack(&bench, 0..COUNT);
    server.serve_all();
    assert_eq!(server.names("/packs/").len(), 1);
    assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
    bench.remove(0).unwrap();
    assert!(server.names("/packs/").is_empty(), "nothing is left to be carried out");
}

fn a_refused_pack_fails_all_its_blocks() {
    let server = BucketServer::start();
    let bench = open(&server);
    server.plan(|request| if request.line() == "put_requests" { Act::Refuse(403) } else { Act::Serve });
    let outcomes = write_batch(&bench, 0..COUNT);
    assert_eq!(outcomes.len(), COUNT as usize);
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    server.serve_all();
    assert!((0..COUNT).all(|n| bench.peek(n) != Presence::Present));
    write_pack(&bench, 0..COUNT);
    assert_eq!(read_batch(&bench, 0..COUNT).len(), COUNT as usize);
}

fn known_packs_are_in_the_list_of_keys() {
    let server = BucketServer::start();
    let bench = open_as(&server, small(), |config| config.pack_linger = Duration::from_millis(1));
    write_pack(&bench, 0..COUNT);
    write_pack(&bench, COUNT..2 * COUNT);
    bench.write(100).unwrap();
    let mut keys = bench.tier.keys(bench.spec.id(bench.epoch));
    keys.sort_by_key(|key| key.hash.0);
    let mut all = bench.keys(2 * COUNT);
    all.push(bench.key(100));
    all.sort_by_key(|key| key.hash.0);
    assert_eq!(keys, all);
}

fn a_list_that_failed_begins_anew() {
    let server = BucketServer::start();
    let writer = open(&server);
    for first in 0..3 {
        write_pack(&writer, first * COUNT..(first + 1) * COUNT);
    }
    let heads = AtomicU64::new(0);
    server.plan(move |request| {
        let is_head = request.line() == "get_requests" && request.path.contains("/packs/");
        // The oldest packs are asked for last.
        if is_head && heads.fetch_add(1, Ordering::Relaxed) > 0 { Act::Refuse(403) } else { Act::Serve }
    });
    let other = open(&server);
    until("a head was refused", || figure(&other, "failures") > 0);
    server.serve_all();
    until("all are found in the end", || other.probe(other.keys(3 * COUNT)).unwrap() == 3 * COUNT as usize);
}

fn packs_of_a_depot_whose_clock_is_ahead_hide_no_others() {
    let server = BucketServer::start();
    let writer = open(&server);
    write_pack(&writer, 0..COUNT);
    let name = server.names("/packs/")[0].clone();
    let (dir, last) = name.rsplit_once('/').unwrap();
    // In the year 2150.
    let ahead = format!("{dir}/052b9c80f800{}", &last[12..]);
    server.rename(&name, &ahead);
    let other = open(&server);
    until("the pack is found", || other.probe(other.keys(COUNT)).unwrap() == COUNT as usize);
    write_pack(&writer, COUNT..2 * COUNT);
    until("and a new one", || other.probe(other.keys(2 * COUNT)).unwrap() == 2 * COUNT as usize);
}

fn objects_that_are_no_packs_stop_nothing() {
    let server = BucketServer::start();
    let writer = open(&server);
    write_pack(&writer, 0..COUNT);
    write_pack(&writer, COUNT..2 * COUNT);
    let names = server.names("/packs/");
    server.change(&names[0], Vec::clear);
    server.change(&names[1], |bytes| bytes.truncate(100));
    write_pack(&writer, 2 * COUNT..3 * COUNT);
    let other = open(&server);
    let last = || (2 * COUNT..3 * COUNT).map(|n| other.key(n)).collect();
    until("the pack among them is found", || other.probe(last()).unwrap() == COUNT as usize);
    // It lists first, and that ends well.
    other.remove(2 * COUNT).unwrap();
    assert_eq!(server.names("/packs/").len(), 2);
    assert_eq!(figure(&other, "failures"), 0, "none of them is a failure of the store");
}

fn a_pack_of_unknown_state_is_asked_for_before_its_blocks_are_written_again() {
    let server = BucketServer::start();
    let bench = open_as(&server, small(), |config| config.present_ttl = Duration::ZERO);
    write_pack(&bench, 0..COUNT);
    assert_eq!(bench.peek(0), Presence::Unknown);
    let puts = served(&server, "put_requests");
    for outcome in write_batch(&bench, 0..COUNT) {
        assert_eq!(outcome.unwrap(), Written::AlreadyThere);
    }
    assert_eq!(served(&server, "put_requests"), puts);
    server.lose(&server.names("/packs/")[0].clone());
    write_pack(&bench, 0..COUNT);
}

#[test]
fn blocks_that_wait_during_a_reset_are_not_written() {
    let server = BucketServer::start();
    let mut bench = open_as(&server, small(), |config| config.pack_linger = Duration::from_secs(5));
    let waiting = bench.begin_write(0, bench.filled(0), Bench::soon());
    let next = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    assert_eq!(Bench::answer(&waiting).unwrap_err().kind(), ErrorKind::NotFound);
    bench.epoch = next;
    write_pack(&bench, 0..COUNT);
    assert!(server.names("/blocks/").iter().all(|name| name.contains("/e1/")));
}

#[test]
fn blocks_that_wait_when_the_tier_ends_are_answered() {
    let server = BucketServer::start();
    let bench = open(&server);
    let waiting = bench.begin_write(0, bench.filled(0), Bench::soon());
    // On a thread of some runtime, a tier waits for nothing.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { drop(bench) });
    assert_eq!(Bench::answer(&waiting).unwrap_err().kind(), ErrorKind::Closed);
}
