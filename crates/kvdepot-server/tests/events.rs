//! Events over the local door: overruns, restarts and take-overs, as a follower and as a bare connection see them.
//!
//! Roles run in child processes: this test binary, started again with `KVDEPOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;
#[path = "common/pool.rs"]
mod pool;
#[path = "common/wire.rs"]
mod wire;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use common::roles::{Role, attach, own_role, socket, until};
use common::{Engine, LONG, Served, config, embedded, hash, spec};
use kvdepot_core::limits::{EVENTS_KEPT_MAX, EVENTS_LOOKS, FOLLOWED_CHANGES_MAX};
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
use kvdepot_depot::client::{Attachment, Followed, Follower};
use kvdepot_depot::message::{
    HELLO_MAGIC, Hashes, NamespaceHandle, PROTOCOL_VERSION, Request, Response, decode, encode,
};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_server::{Serving, logging};
use serde_json::json;
use wire::Wired;

const POOL: u64 = 8 << 20;
const PAGES: u64 = 512;

fn namespace() -> Arc<NamespaceSpec> {
    spec("followed", BlockLayout::uniform(1, &[4096]).unwrap())
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Some((role, directory)) = own_role() else { return };
    let socket = socket(&directory);
    let posix = serde_json::json!({"directories": [directory], "read_threads": 2, "write_threads": 2});
    let config = config(POOL, serde_json::json!({"pipeline": "Cache|Posix", "posix": posix}));
    logging::init("info", Some(&directory.join("log"))).unwrap();
    match role.as_str() {
        "depot" => Serving::new(config, &socket).serve(&mut || true).unwrap(),
        "heir" => Serving::new(config, &socket).serve_taking_over(&mut || true).unwrap(),
        other => panic!("no such role: {other}"),
    };
}

/// What a follower's caller knows: place and block.
struct Told {
    follower: Follower,
    blocks: BTreeSet<(String, BlockHash)>,
    removed: usize,
}

impl Told {
    fn start(attachment: &Arc<Attachment>, followed: Followed) -> Self {
        let follower = Follower::start(attachment, followed).unwrap();
        Self { follower, blocks: BTreeSet::new(), removed: 0 }
    }

    /// Takes what there is, and returns how much it was.
    fn take(&mut self) -> usize {
        let deltas = self.follower.take(usize::MAX);
        let places = self.follower.places();
        for delta in &deltas {
            let entry = (places[usize::from(delta.place)].clone(), delta.hash);
            let changed =
                if delta.is_stored { self.blocks.insert(entry) } else { self.blocks.remove(&entry) };
            assert!(changed, "told twice: {delta:?}");
            self.removed += usize::from(!delta.is_stored);
        }
        deltas.len()
    }

    fn at(&self, place: &str) -> BTreeSet<BlockHash> {
        self.blocks.iter().filter(|(at, _)| at.eq_ignore_ascii_case(place)).map(|(_, hash)| *hash).collect()
    }

    fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        until(what, || {
            self.take();
            holds(self)
        });
    }
}

fn hashes(blocks: impl IntoIterator<Item = u64>) -> BTreeSet<BlockHash> {
    blocks.into_iter().map(hash).collect()
}

fn ask(door: &mut SeqPacket, request: &Request<'_>) -> Response {
    door.send(&encode(1, request).unwrap(), None).unwrap();
    let mut buffer = FrameBuffer::default();
    drop(door.recv(&mut buffer, Some(Instant::now() + LONG)).unwrap());
    decode::<Response>(&buffer).unwrap().1
}

fn door(socket: &Path) -> (SeqPacket, NamespaceHandle) {
    let mut door = SeqPacket::connect(socket).unwrap();
    let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
    assert!(matches!(ask(&mut door, &hello), Response::Welcome { .. }));
    let open = Request::OpenNamespace { canonical: namespace().canonical().to_owned().into() };
    let Response::Namespace { handle, .. } = ask(&mut door, &open) else { panic!("not opened") };
    (door, handle)
}

/// Returns all blocks of a place, read in pieces.
fn snapshot(door: &mut SeqPacket, namespace: NamespaceHandle, place: u8) -> BTreeSet<BlockHash> {
    let (mut found, mut from) = (BTreeSet::new(), Some(0));
    while let Some(at) = from {
        let answer = ask(door, &Request::Snapshot { namespace, place, from: at });
        let Response::Snapshot { hashes, next, .. } = answer else { panic!("{answer:?}") };
        found.extend(hashes.as_chunks::<16>().0.iter().map(|hash| BlockHash(*hash)));
        from = next;
    }
    found
}

/// Reads events on: up to where, whether there is a gap, whether there are more, and the bytes of what was read.
fn read(door: &mut SeqPacket, namespace: NamespaceHandle, after: u64) -> (u64, bool, bool, usize) {
    match ask(door, &Request::Events { namespaces: vec![namespace], after: Some(after) }) {
        Response::Events { upto, is_gap, has_more, events, .. } => (upto, is_gap, has_more, events.len()),
        other => panic!("{other:?}"),
    }
}

/// Dumps new blocks until at least this many became readable, and returns the number behind the last.
fn churn(engine: &Engine, first: u64, changes: usize) -> u64 {
    let end = first + (changes as u64).next_multiple_of(PAGES);
    for from in (first..end).step_by(PAGES as usize) {
        let names: Vec<u64> = (from..from + PAGES).collect();
        assert!(engine.dump(&names, &engine.all_pages()).is_empty());
    }
    end
}

/// Returns which of these blocks lookups find.
fn found(engine: &Engine, blocks: std::ops::Range<u64>) -> BTreeSet<BlockHash> {
    let hashes: Vec<BlockHash> = blocks.map(hash).collect();
    let pieces = hashes.chunks(1024);
    let present = pieces.flat_map(|piece| engine.store.lookup(piece));
    hashes.iter().zip(present).filter(|(_, present)| *present == 1).map(|(hash, _)| *hash).collect()
}

#[test]
fn who_was_overrun_finds_everything_in_a_snapshot() {
    let served = Served::start(config(POOL, serde_json::json!({})));
    let attachment = served.attach();
    let (mut reader, namespace) = door(&served.socket);
    let answer = ask(&mut reader, &Request::Events { namespaces: vec![], after: None });
    let Response::Followed { upto, places } = answer else { panic!("{answer:?}") };
    assert_eq!(places, ["pool"]);
    let engine = Engine::new(&attachment, &self::namespace(), PAGES as usize);

    let end = churn(&engine, 0, PAGES as usize);
    let read = |reader: &mut SeqPacket, after| read(reader, namespace, after);
    let (after, is_gap, has_more, bytes) = read(&mut reader, upto);
    assert_eq!((after - upto, is_gap, has_more, bytes), (PAGES, false, false, 19 * PAGES as usize));

    let end = churn(&engine, end, EVENTS_KEPT_MAX);
    let (now, is_gap, has_more, bytes) = read(&mut reader, after);
    assert!(now > after + EVENTS_KEPT_MAX as u64);
    assert_eq!((is_gap, has_more, bytes), (true, false, 0));
    let in_pool = snapshot(&mut reader, namespace, 0);
    assert!(!in_pool.is_empty() && in_pool.len() < end as usize / 2, "{}", in_pool.len());
    assert!(in_pool == found(&engine, 0..end), "the snapshot differs from what lookups find");
    assert_eq!(read(&mut reader, now), (now, false, false, 0));

    let answer = ask(&mut reader, &Request::Snapshot { namespace, place: 1, from: 0 });
    assert!(matches!(answer, Response::Failed { .. }), "a place that is not there: {answer:?}");
    let answer = ask(&mut reader, &Request::Events { namespaces: vec![77], after: Some(now) });
    assert!(matches!(answer, Response::Failed { .. }), "a namespace that is not there: {answer:?}");
    let Response::Namespaces(known) = ask(&mut reader, &Request::Namespaces { after: None }) else {
        panic!("not listed")
    };
    assert_eq!(known.iter().map(|known| known.handle).collect::<Vec<_>>(), [namespace]);
    let last = ask(&mut reader, &Request::Namespaces { after: Some(namespace) });
    assert!(matches!(last, Response::Namespaces(known) if known.is_empty()));
}

#[test]
fn nothing_is_kept_for_who_does_not_follow() {
    let served = Served::start(config(POOL, serde_json::json!({})));
    let attachment = served.attach();
    let (mut reader, namespace) = door(&served.socket);
    let engine = Engine::new(&attachment, &self::namespace(), PAGES as usize);
    churn(&engine, 0, PAGES as usize);
    let read = |reader: &mut SeqPacket, after| {
        let (upto, is_gap, _, bytes) = read(reader, namespace, after);
        (upto, is_gap, bytes)
    };
    assert_eq!(read(&mut reader, 0), (0, false, 0), "nobody has followed yet");
    let (mut follower, _) = door(&served.socket);
    let answer = ask(&mut follower, &Request::Events { namespaces: vec![], after: None });
    assert!(matches!(answer, Response::Followed { upto: 1, .. }), "{answer:?}");
    drop(follower);
    // The depot notices the end of the connection, and everything recorded is gone.
    until("the end of the last follower", || read(&mut reader, 1).1);
    let (before, ..) = read(&mut reader, 1);
    churn(&engine, 1_000_000, PAGES as usize);
    assert_eq!(read(&mut reader, before), (before, false, 0));
}

#[test]
fn a_caller_who_takes_nothing_holds_up_no_depot_and_is_in_step_again_later() {
    let served = Served::start(config(POOL, serde_json::json!({})));
    let attachment = served.attach();
    let engine = Engine::new(&attachment, &namespace(), PAGES as usize);
    let mut told = Told::start(&attachment, Followed::All);
    until("the follower follows", || !told.follower.places().is_empty());

    let end = churn(&engine, 0, EVENTS_KEPT_MAX + FOLLOWED_CHANGES_MAX);
    let waiting = told.take();
    assert!(waiting <= FOLLOWED_CHANGES_MAX + EVENTS_LOOKS, "{waiting}");
    let in_pool = found(&engine, 0..end);
    told.until("the follower has told all", |told| told.at("pool") == in_pool);
    assert!(told.follower.state().gaps > 0, "{:?}", told.follower.state());
}

#[test]
fn a_depot_that_is_killed_has_nothing_and_the_next_one_what_is_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let depot = Role::start("depot", directory);
    let attachment = attach(directory);
    let engine = Engine::new(&attachment, &namespace(), 8);
    let mut followers = [Followed::All, Followed::Groups(vec![vec![namespace()]])]
        .map(|followed| Told::start(&attachment, followed));
    let blocks: Vec<u64> = (0..8).collect();
    assert!(engine.dump(&blocks, &engine.all_pages()).is_empty());
    let all = hashes(0..8);
    for told in &mut followers {
        told.until("pool and disk have them", |told| told.at("pool") == all && told.at("posix") == all);
    }
    depot.kill();
    for told in &mut followers {
        told.until("everything is told as removed", |told| told.blocks.is_empty());
    }
    let _next = Role::start("depot", directory);
    for told in &mut followers {
        told.until("the disk has them", |told| told.at("posix") == all);
    }
    assert!(engine.dump(&[8], &[0]).is_empty());
    for told in &mut followers {
        told.until("the new block is told", |told| told.at("posix") == hashes(0..9));
    }
}

#[test]
fn nothing_is_told_as_removed_when_another_depot_takes_the_pool_over() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot", directory);
    let attachment = attach(directory);
    let engine = Engine::new(&attachment, &namespace(), 8);
    let mut told = Told::start(&attachment, Followed::Groups(vec![vec![namespace()]]));
    for generation in 0..3_u64 {
        let block = generation;
        until("the dump", || engine.dump(&[block], &[0]).is_empty());
        let all = hashes(0..=generation);
        told.until("pool and disk have them", |told| told.at("pool") == all && told.at("posix") == all);
        let walks = told.follower.state().walks;
        let heir = Role::start("heir", directory);
        assert!(depot.ends());
        depot = heir;
        told.until("the follower has compared", |told| {
            told.follower.state().walks > walks && told.follower.state().is_in_step
        });
        assert_eq!((told.at("pool"), told.at("posix"), told.removed), (all.clone(), all, 0));
    }
}

#[test]
fn hashes_of_a_lookup_and_of_events_are_the_same_bytes() {
    let served = Served::start(config(POOL, serde_json::json!({})));
    let attachment = served.attach();
    let (mut reader, namespace) = door(&served.socket);
    let engine = Engine::new(&attachment, &self::namespace(), 8);
    assert!(engine.dump(&[5], &[0]).is_empty());
    let hashes = Hashes(hash(5).0.to_vec().into());
    let answer = ask(&mut reader, &Request::Lookup { namespace, hashes });
    assert!(matches!(answer, Response::Present(ref present) if **present == [1]), "{answer:?}");
    assert_eq!(snapshot(&mut reader, namespace, 0), BTreeSet::from([hash(5)]));
}

#[test]
fn blocks_at_a_pool_server_are_told_by_the_depots_that_know_of_them() {
    let server = Wired::open(config(64 << 20, json!({})), json!({}));
    let spec = spec("pooled", pool::layout());
    let over = || embedded(pool::over(server.at, "Cache|Remote", 32 << 20, &json!({}), &json!({})));
    let (producer, consumer) = (over(), over());
    let mut followers = [&producer, &consumer].map(|depot| {
        depot.register(&spec).unwrap();
        Told::start(depot, Followed::Groups(vec![vec![Arc::clone(&spec)]]))
    });
    pool::hand_over(&producer, &consumer, &spec);
    let all = hashes(0..32);
    for told in &mut followers {
        told.until("pool and server have them", |told| told.at("pool") == all && told.at("remote") == all);
    }
    producer.reset(&[spec]).unwrap();
    followers[0].until("nothing is left", |told| told.blocks.is_empty());
}
