//! P1, P4 and P11: a depot process takes over pool and blocks from the running one.
//!
//! Roles run in child processes: this test binary, started again with `KVDEPOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use common::roles::{Role, attach, own_role, socket, until};
use common::{Engine, LONG, config, hash, once_open, spec};
use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use kvdepot_depot::handover::HAND_OVER_VERSION;
use kvdepot_depot::message::{HELLO_MAGIC, Hashes, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_server::{Ended, Serving, logging};

const POOL: u64 = 8 << 20;
const BLOCK: u64 = 128 << 10;

fn namespace() -> Arc<NamespaceSpec> {
    spec("taken", BlockLayout::uniform(2, &[64 << 10]).unwrap())
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Some((role, directory)) = own_role() else { return };
    let socket = socket(&directory);
    let posix = serde_json::json!({"directories": [directory], "read_threads": 2, "write_threads": 2});
    let on_disk = || config(POOL, serde_json::json!({"pipeline": "Cache|Posix", "posix": posix}));
    let plain = || config(POOL, serde_json::json!({}));
    logging::init("info", Some(&directory.join("log"))).unwrap();
    let ended = match role.as_str() {
        "depot" => Serving::new(plain(), &socket).serve(&mut || true),
        "heir" => Serving::new(plain(), &socket).serve_taking_over(&mut || true),
        "depot on disk" => Serving::new(on_disk(), &socket).serve(&mut || true),
        "heir on disk" => Serving::new(on_disk(), &socket).serve_taking_over(&mut || true),
        "heir of another size" => {
            let larger = config(2 * POOL, serde_json::json!({}));
            let refused = Serving::new(larger, &socket).serve_taking_over(&mut || true).unwrap_err();
            assert!(refused.to_string().contains("another size"), "{refused}");
            return;
        }
        "heir that cannot start" => {
            let nothing_kept = config(POOL, serde_json::json!({"pipeline": "Staging"}));
            let refused = Serving::new(nothing_kept, &socket).serve_taking_over(&mut || true).unwrap_err();
            assert!(refused.to_string().contains("needs a tier"), "{refused}");
            return;
        }
        "heir that may grow" => {
            let growing = config(POOL, serde_json::json!({"pool_bytes_max": 4 * POOL}));
            Serving::new(growing, &socket).serve_taking_over(&mut || true)
        }
        "dumper" => {
            let _held = reserve(&socket, &[77, 78, 79]);
            println!("reserved");
            std::thread::park();
            return;
        }
        other => panic!("no such role: {other}"),
    };
    assert_eq!(ended.unwrap(), Ended::HandedOver);
}

fn ask(door: &mut SeqPacket, request: &Request<'_>) -> Response {
    door.send(&encode(1, request).unwrap(), None).unwrap();
    let mut buffer = FrameBuffer::default();
    drop(door.recv(&mut buffer, Some(Instant::now() + LONG)).unwrap());
    decode::<Response>(&buffer).unwrap().1
}

fn hello(socket: &Path) -> SeqPacket {
    let mut door = SeqPacket::connect(socket).unwrap();
    let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
    assert!(matches!(ask(&mut door, &hello), Response::Welcome { .. }));
    door
}

/// Reserves slots, like a client that is about to copy into them.
fn reserve(socket: &Path, blocks: &[u64]) -> SeqPacket {
    let mut door = hello(socket);
    let open = Request::OpenNamespace { canonical: namespace().canonical().to_owned().into() };
    let Response::Namespace { handle, .. } = ask(&mut door, &open) else { panic!("not opened") };
    let hashes: Vec<u8> = blocks.iter().flat_map(|&block| hash(block).0).collect();
    let grants = ask(
        &mut door,
        &Request::Reserve { namespace: handle, hashes: Hashes(hashes.into()), priority: Priority::Normal },
    );
    assert!(matches!(grants, Response::Grants(ref grants) if grants.len() == blocks.len()), "{grants:?}");
    door
}

fn hit(attachment: &Arc<Attachment>, blocks: &[u64]) -> usize {
    let group = ClaimGroupSpec { namespaces: vec![namespace()], window_blocks: 0, hashes_per_block: 1 };
    let wanted: Vec<_> = blocks.iter().map(|&block| hash(block)).collect();
    let mut claim = Claim::open(attachment, &[group], &wanted, 0, blocks.len() as u32, "").unwrap();
    let (settled, units, _) = claim.wait(LONG);
    assert!(settled, "a claim does not settle");
    units as usize
}

fn gauge(attachment: &Arc<Attachment>, name: &str) -> Option<u64> {
    attachment.stats()["depot"][name].as_u64()
}

#[test]
fn blocks_outlive_the_depot_that_hands_them_over() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 8);
    let (old, new) = ((0..8).collect::<Vec<u64>>(), (100..108).collect::<Vec<u64>>());
    engine.fill(1);
    assert!(engine.dump(&old, &engine.all_pages()).is_empty());
    // Blocks that were reset before do not come back.
    attachment.reset(&[namespace()]).unwrap();
    engine.fill(2);
    assert!(engine.dump(&new, &engine.all_pages()).is_empty());
    for generation in 0..2 {
        let heir = Role::start("heir", directory);
        assert!(depot.ends(), "the depot before ends with status 0");
        depot = heir;
        until("the client is attached to the new depot", || {
            attachment.attached() && gauge(&attachment, "pid") == Some(u64::from(depot.0.id()))
        });
        until("the hit", || hit(&attachment, &new) == 8);
        assert_eq!(hit(&attachment, &old), 0, "generation {generation}: blocks from before the reset");
        engine.clear();
        assert!(engine.load(&new, &engine.all_pages()).is_empty());
        assert!((0..8).all(|page| engine.holds(page, page, 2)), "generation {generation}");
    }
}

/// A client that looks blocks up, and claims them, again and again. Both must find all of them.
#[derive(Default)]
struct Looker {
    /// The depot that the last rounds began and ended at, and how many rounds those were.
    at: AtomicU64,
    rounds: AtomicU64,
    missed_lookups: AtomicU64,
    missed_claims: AtomicU64,
}

impl Looker {
    fn look(&self, directory: &Path, blocks: &[u64], over: &AtomicBool) {
        let attachment = attach(directory);
        let engine = Engine::new(&attachment, &namespace(), blocks.len());
        let hashes: Vec<_> = blocks.iter().map(|&block| hash(block)).collect();
        while !over.load(Ordering::Acquire) {
            let before = gauge(&attachment, "pid").unwrap_or(0);
            let looked_up = engine.store.lookup_on_prefix(&hashes) == blocks.len();
            self.missed_lookups.fetch_add(u64::from(!looked_up), Ordering::AcqRel);
            let claimed = hit(&attachment, blocks) == blocks.len();
            self.missed_claims.fetch_add(u64::from(!claimed), Ordering::AcqRel);
            if self.at.swap(before, Ordering::AcqRel) != before {
                self.rounds.store(0, Ordering::Release);
            }
            self.rounds.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn has_looked_at(&self, pid: u32) -> bool {
        self.at.load(Ordering::Acquire) == u64::from(pid) && self.rounds.load(Ordering::Acquire) >= 3
    }
}

#[test]
fn a_client_misses_at_most_one_lookup_in_a_take_over() {
    const TAKE_OVERS: u64 = 3;
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 8);
    let blocks: Vec<u64> = (0..8).collect();
    engine.fill(1);
    assert!(engine.dump(&blocks, &engine.all_pages()).is_empty());
    let (over, lookers) = (AtomicBool::new(false), <[Looker; 4]>::default());
    std::thread::scope(|scope| {
        for looker in &lookers {
            scope.spawn(|| looker.look(directory, &blocks, &over));
        }
        let all_at = |depot: &Role| lookers.iter().all(|looker| looker.has_looked_at(depot.0.id()));
        until("all look at the first depot", || all_at(&depot));
        for _ in 0..TAKE_OVERS {
            let heir = Role::start("heir", directory);
            assert!(depot.ends());
            depot = heir;
            until("all look at the new depot", || all_at(&depot));
        }
        over.store(true, Ordering::Release);
    });
    let missed = lookers.each_ref().map(|looker| {
        (looker.missed_lookups.load(Ordering::Acquire), looker.missed_claims.load(Ordering::Acquire))
    });
    println!("missed lookups and claims in {TAKE_OVERS} take-overs, by client: {missed:?}");
    assert!(missed.iter().all(|&(lookups, claims)| lookups + claims <= TAKE_OVERS), "{missed:?}");
}

#[test]
fn a_dump_under_way_is_never_served_and_its_space_is_kept_until_the_client_has_exited() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 8);
    engine.fill(1);
    assert!(engine.dump(&[1, 2], &[1, 2]).is_empty());
    let mut dumper = Role::start("dumper", directory);
    dumper.says("reserved");
    let heir = Role::start("heir", directory);
    assert!(depot.ends());
    until("the client is attached to the new depot", || {
        attachment.attached() && gauge(&attachment, "pid") == Some(u64::from(heir.0.id()))
    });
    until("the hit", || hit(&attachment, &[1, 2]) == 2);
    assert_eq!(hit(&attachment, &[77]), 0, "nobody has committed it");
    assert_eq!(gauge(&attachment, "pool_leased_bytes"), Some(3 * BLOCK));
    // More than the pool holds: the dumper's slots are not given to others.
    for round in 0..16 {
        let blocks: Vec<u64> = (0..8).map(|block| 1000 + round * 8 + block).collect();
        assert!(engine.dump(&blocks, &engine.all_pages()).is_empty());
    }
    assert_eq!(gauge(&attachment, "pool_leased_bytes"), Some(3 * BLOCK));
    drop(dumper);
    until("its space is free", || gauge(&attachment, "pool_leased_bytes") == Some(0));
}

/// As when the machine let the running depot grow less far than both configurations say.
#[test]
fn a_pool_that_may_grow_less_far_is_taken_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 8);
    engine.fill(1);
    let blocks: Vec<u64> = (0..8).collect();
    assert!(engine.dump(&blocks, &engine.all_pages()).is_empty());
    let heir = Role::start("heir that may grow", directory);
    assert!(depot.ends());
    until("the heir serves", || {
        attachment.attached() && gauge(&attachment, "pid") == Some(u64::from(heir.0.id()))
    });
    once_open(&attachment, "claim", || hit(&attachment, &blocks) == 8);
}

#[test]
fn a_depot_that_cannot_hand_over_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let depot = Role::start("depot on disk", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 8);
    engine.fill(1);
    let blocks: Vec<u64> = (0..8).collect();
    assert!(engine.dump(&blocks, &engine.all_pages()).is_empty());
    assert!(Role::start("heir of another size", directory).ends(), "it is told why");
    assert!(Role::start("heir that cannot start", directory).ends(), "it finds out before it asks");
    // A depot of another version; then one that dies after it has received everything.
    let asked = |version| Request::HandOver { version, pool_bytes: POOL };
    let refused = ask(&mut hello(&socket(directory)), &asked(HAND_OVER_VERSION + 1));
    assert!(matches!(refused, Response::Failed { ref kind, .. } if kind == "version"), "{refused:?}");
    assert!(attachment.attached(), "a refusal costs nobody the depot");
    let mut heir = hello(&socket(directory));
    let handed = ask(&mut heir, &asked(HAND_OVER_VERSION));
    assert!(matches!(handed, Response::HandOver { holders: 0 }), "{handed:?}");
    drop(heir);
    let more: Vec<u64> = (100..108).collect();
    until("the depot goes on", || {
        attachment.attached() && engine.dump(&more, &engine.all_pages()).is_empty()
    });
    assert_eq!(gauge(&attachment, "pid"), Some(u64::from(depot.0.id())));
    assert_eq!((hit(&attachment, &blocks), hit(&attachment, &more)), (8, 8));
    assert!(attachment.drain(LONG).unwrap(), "its tiers go on, too");
}

#[test]
fn blocks_that_no_tier_had_are_written_by_the_depot_that_takes_over() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot on disk", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 8);
    engine.fill(3);
    let blocks: Vec<u64> = (0..8).collect();
    assert!(engine.dump(&blocks, &engine.all_pages()).is_empty());
    let heir = Role::start("heir on disk", directory);
    assert!(depot.ends());
    until("the client is attached to the new depot", || {
        attachment.attached() && gauge(&attachment, "pid") == Some(u64::from(heir.0.id()))
    });
    assert!(attachment.drain(LONG).unwrap());
    drop(heir);
    let depot = Role::start("depot on disk", directory);
    until("a depot with an empty pool", || {
        attachment.attached() && gauge(&attachment, "pid") == Some(u64::from(depot.0.id()))
    });
    until("all blocks on disk", || hit(&attachment, &blocks) == 8);
    engine.clear();
    assert!(engine.load(&blocks, &engine.all_pages()).is_empty());
    assert!((0..8).all(|page| engine.holds(page, page, 3)));
}

#[test]
fn without_a_depot_there_is_nothing_to_take_over() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _depot = Role::start("heir", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), 2);
    engine.fill(1);
    assert!(engine.dump(&[1, 2], &[0, 1]).is_empty());
    assert_eq!(hit(&attachment, &[1, 2]), 2);
}
