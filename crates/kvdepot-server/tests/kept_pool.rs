//! P1, P4 and P11: the pool outlives a crash of its depot. The next depot takes in every block whose checksum proves
//! it, and no other.
//!
//! Roles run in child processes: this test binary, started again with `KVDEPOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use common::roles::{ROLE, ROLE_MAIN, Role, attach, log, own_role, proven, socket, until};
use common::{Engine, LONG, config, spec};
use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_depot::client::Attachment;
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_server::{Serving, keeper, logging};
use rustix::process::{Pid, Signal, kill_process};

const POOL: u64 = 64 << 20;
const PAGES: usize = 32;
/// The first name of the traffic's blocks.
const TRAFFIC: u64 = 1_000_000;

fn namespace() -> Arc<NamespaceSpec> {
    spec("kept", BlockLayout::uniform(2, &[64 << 10]).unwrap())
}

/// A directory for depots. Dropping it kills its keeper.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the keeper that was started last.
    fn keeper(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.path().join("keeper")).ok()?;
        Pid::from_raw(text.parse().ok()?)
    }

    /// Returns whether it runs; a zombie does not.
    fn is_kept(&self) -> bool {
        self.keeper().is_some_and(|keeper| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", keeper.as_raw_nonzero()));
            stat.is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
        })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper().filter(|_| self.is_kept()) {
            let _ = kill_process(keeper, Signal::KILL);
        }
    }
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Some((role, directory)) = own_role() else { return };
    let socket = socket(&directory);
    if role == "keeper" {
        std::fs::write(directory.join("keeper"), std::process::id().to_string()).unwrap();
        let _ = keeper::run();
        return;
    }
    if role == "client" {
        // It never attaches to the next depot: as long as it lives, its copies may be into the pool of the one before.
        let mut door = None;
        until("a depot answers", || {
            door = SeqPacket::connect(&socket).ok();
            door.is_some()
        });
        let mut door = door.unwrap();
        let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
        door.send(&encode(1, &hello).unwrap(), None).unwrap();
        drop(door.recv(&mut FrameBuffer::default(), Some(Instant::now() + LONG)).unwrap());
        std::fs::write(directory.join("attached"), "").unwrap();
        loop {
            std::thread::park();
        }
    }
    if role == "traffic" {
        let attachment = attach(&directory);
        let mut engine = Engine::new(&attachment, &namespace(), PAGES);
        engine.fill(7);
        for round in 0.. {
            let names = names(TRAFFIC + round % 8 * 32);
            engine.dump(&names, &engine.all_pages());
            if round == 1 {
                std::fs::write(directory.join("traffic"), "").unwrap();
            }
        }
    }
    logging::init("info", Some(&directory.join("log"))).unwrap();
    let exe = std::env::current_exe().unwrap();
    let mut keeper = vec!["env".to_owned(), format!("{ROLE}=keeper"), exe.to_str().unwrap().to_owned()];
    keeper.extend(ROLE_MAIN.map(str::to_owned));
    let with = |pool, keep_ms: u64| {
        config(pool, serde_json::json!({"pool_keep_ms": keep_ms, "pool_keeper": keeper}))
    };
    let mut keep_on = || !directory.join("end").exists();
    match role.as_str() {
        "depot" => Serving::new(with(POOL, 600_000), &socket).serve(&mut keep_on),
        "depot kept for a moment" => Serving::new(with(POOL, 1), &socket).serve(&mut keep_on),
        "depot of another size" => Serving::new(with(2 * POOL, 600_000), &socket).serve(&mut keep_on),
        "depot that keeps nothing" => Serving::new(with(POOL, 0), &socket).serve(&mut keep_on),
        "heir" => Serving::new(with(POOL, 600_000), &socket).serve_taking_over(&mut keep_on),
        other => panic!("no such role: {other}"),
    }
    .unwrap();
}

/// Dumps blocks of these names, each with its own bytes.
fn dump(attachment: &Arc<Attachment>, names: &[u64], seed: u8) {
    let mut engine = Engine::new(attachment, &namespace(), PAGES);
    engine.fill(seed);
    assert!(engine.dump(names, &engine.all_pages()[..names.len()]).is_empty(), "{}", attachment.stats());
}

/// Loads blocks of these names. Returns how many exist; each of them must have its bytes.
fn load(attachment: &Arc<Attachment>, names: &[u64], seed: u8) -> usize {
    let mut engine = Engine::new(attachment, &namespace(), PAGES);
    engine.clear();
    let missed = engine.load(names, &engine.all_pages()[..names.len()]);
    let mut there = 0;
    for (page, name) in names.iter().enumerate() {
        if !missed.contains(&page) {
            assert!(engine.holds(page, page, seed), "wrong bytes for block {name}");
            there += 1;
        }
    }
    there
}

/// Starts a depot and dumps blocks, which it has proven. No client is attached afterwards, and the keeper runs.
fn filled(directory: &Directory, names: &[u64], seed: u8) -> Role {
    let depot = Role::start("depot", directory.path());
    let attachment = attach(directory.path());
    until("the keeper runs", || directory.is_kept());
    dump(&attachment, names, seed);
    proven(&attachment);
    attachment.close();
    depot
}

fn names(from: u64) -> Vec<u64> {
    (from..from + PAGES as u64).collect()
}

#[test]
fn blocks_outlive_a_depot_that_is_killed_and_the_one_after_it() {
    let directory = Directory::new();
    let mut depot = filled(&directory, &names(0), 3);
    for _ in 0..3 {
        depot.kill();
        depot = Role::start("depot", directory.path());
        let attachment = attach(directory.path());
        assert_eq!(load(&attachment, &names(0), 3), PAGES, "{}", log(directory.path()));
        proven(&attachment);
        attachment.close();
    }
}

#[test]
fn a_reset_that_was_answered_holds_for_the_next_depot() {
    let directory = Directory::new();
    let depot = filled(&directory, &names(0), 3);
    let attachment = attach(directory.path());
    attachment.register(&namespace()).unwrap();
    attachment.reset(&[namespace()]).unwrap();
    dump(&attachment, &names(100)[..4], 5);
    proven(&attachment);
    attachment.close();
    depot.kill();
    let _next = Role::start("depot", directory.path());
    let attachment = attach(directory.path());
    assert_eq!(load(&attachment, &names(0), 3), 0);
    assert_eq!(load(&attachment, &names(100)[..4], 5), 4, "{}", log(directory.path()));
}

#[test]
fn a_keeper_ends_when_nobody_comes_and_after_an_orderly_end() {
    let directory = Directory::new();
    for kind in ["depot kept for a moment", "depot"] {
        let depot = Role::start(kind, directory.path());
        attach(directory.path()).close();
        until("the keeper runs", || directory.is_kept());
        if kind == "depot" {
            depot.end(directory.path())
        } else {
            depot.kill()
        }
        until("the keeper has ended", || !directory.is_kept());
        let _ = std::fs::remove_file(directory.path().join("keeper"));
    }
}

#[test]
fn a_depot_of_another_size_or_without_a_keeper_begins_with_an_empty_pool() {
    for kind in ["depot of another size", "depot that keeps nothing"] {
        let directory = Directory::new();
        filled(&directory, &names(0), 3).kill();
        assert!(directory.is_kept(), "{}", log(directory.path()));
        let _next = Role::start(kind, directory.path());
        let attachment = attach(directory.path());
        assert_eq!(load(&attachment, &names(0), 3), 0, "{kind}");
        if kind == "depot that keeps nothing" {
            // It would keep the memory for ten minutes.
            until("the keeper has ended", || !directory.is_kept());
        }
        dump(&attachment, &names(0), 4);
        assert_eq!(load(&attachment, &names(0), 4), PAGES, "{kind}");
        attachment.close();
    }
}

/// A client that outlives its depot may still copy: no part of the pool is given away, and proven blocks can be read.
#[test]
fn while_a_client_of_the_depot_before_lives_nothing_of_the_pool_is_given_away() {
    let directory = Directory::new();
    let depot = filled(&directory, &names(0)[..4], 3);
    let mut client = Role::start("client", directory.path());
    until("the client is attached", || directory.path().join("attached").exists());
    depot.kill();
    let _next = Role::start("depot", directory.path());
    let attachment = attach(directory.path());
    assert_eq!(load(&attachment, &names(0)[..4], 3), 4, "{}", log(directory.path()));
    let mut engine = Engine::new(&attachment, &namespace(), PAGES);
    engine.fill(9);
    assert_eq!(engine.dump(&names(50), &engine.all_pages()).len(), PAGES, "there is no room");
    client.0.kill().unwrap();
    client.0.wait().unwrap();
    until("there is room", || engine.dump(&[50], &[0]).is_empty());
    attachment.close();
}

/// A client that continues with the next depot, and whose copies have ended, does not hold the pool.
#[test]
fn a_client_that_attaches_to_the_next_depot_lets_the_pool_go() {
    let directory = Directory::new();
    let depot = Role::start("depot", directory.path());
    let attachment = attach(directory.path());
    until("the keeper runs", || directory.is_kept());
    dump(&attachment, &names(0), 3);
    proven(&attachment);
    depot.kill();
    let _next = Role::start("depot", directory.path());
    let mut engine = Engine::new(&attachment, &namespace(), PAGES);
    engine.fill(3);
    until("there is room", || engine.dump(&[50], &[0]).is_empty());
    assert_eq!(load(&attachment, &names(0), 3), PAGES, "{}", log(directory.path()));
    attachment.close();
}

/// The one that gets the place gets the pool, whichever asks first. The other one finds the socket served and
/// terminates.
#[test]
fn of_two_depots_that_start_at_once_after_a_crash_one_gets_the_pool() {
    let directory = Directory::new();
    let mut depot = filled(&directory, &names(0), 3);
    for round in 1..=4 {
        depot.kill();
        let mut both = vec![Role::start("depot", directory.path()), Role::start("depot", directory.path())];
        let mut ended = None;
        until("one of them ends", || {
            ended = both.iter_mut().position(Role::has_ended);
            ended.is_some()
        });
        assert!(both.remove(ended.unwrap()).ends(), "{}", log(directory.path()));
        depot = both.remove(0);
        let attachment = attach(directory.path());
        assert_eq!(load(&attachment, &names(0), 3), PAGES, "{}", log(directory.path()));
        proven(&attachment);
        attachment.close();
        assert!(!depot.has_ended() && directory.is_kept());
        assert_eq!(log(directory.path()).matches("were recovered").count(), round);
    }
}

/// Kills in the middle of traffic; `KVDEPOT_TEST_KILLS` sets their number.
#[test]
fn kills_in_the_middle_of_traffic_never_give_wrong_bytes() {
    let kills: u64 = std::env::var("KVDEPOT_TEST_KILLS").map_or(20, |text| text.parse().unwrap());
    let directory = Directory::new();
    let (mut recorded, mut survived) = (0, 0);
    let mut depot = Role::start("depot", directory.path());
    for kill in 0..kills {
        // Every name has its own bytes, whatever depot it was dumped into.
        let own = names(kill * 1000);
        let attachment = attach(directory.path());
        dump(&attachment, &own, 3);
        proven(&attachment);
        attachment.close();
        let traffic = Role::start("traffic", directory.path());
        until("there is traffic", || directory.path().join("traffic").exists());
        depot.kill();
        drop(traffic);
        std::fs::remove_file(directory.path().join("traffic")).unwrap();
        depot = Role::start("depot", directory.path());
        let attachment = attach(directory.path());
        survived += load(&attachment, &own, 3);
        recorded += own.len();
        // Blocks of the traffic are either complete or absent.
        for from in 0..8 {
            load(&attachment, &names(TRAFFIC + from * 32), 7);
        }
        // The slots of the traffic's client are freed.
        let mut engine = Engine::new(&attachment, &namespace(), PAGES);
        engine.fill(9);
        until("there is room", || engine.dump(&[kill * 1000 + 999], &[0]).is_empty());
        attachment.close();
    }
    println!("{survived} of {recorded} blocks survived {kills} kills");
    assert!(survived > 0, "{}", log(directory.path()));
}
