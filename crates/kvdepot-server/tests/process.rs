//! A depot as a process: few descriptors, panics, deleted sockets and locks, and its shutdown.
//!
//! Roles run in child processes: this test binary, started again with `KVDEPOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;
#[path = "../../kvdepot-depot/tests/common/scripted.rs"]
mod scripted;

use std::fs::File;
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Engine, LONG, Served, config, spec};
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::client::Attachment;
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{Depot, PoolMapping};
use kvdepot_server::{DoorLock, Ended, LocalDoor, Place, Serving, WireConfig, logging, serve_depot};
use rustix::process::{Resource, Rlimit, setrlimit};
use scripted::{Act, Scripted};

const ROLE: &str = "KVDEPOT_TEST_ROLE";
const DIRECTORY: &str = "KVDEPOT_TEST_DIRECTORY";
/// Number of turns of the door that a child counts while it cannot accept.
const TURNS: u32 = 30;

fn spec_of_blocks() -> Arc<NamespaceSpec> {
    spec("process", BlockLayout::uniform(1, &[4096]).unwrap())
}

/// A child in a role; killed when dropped.
struct Role {
    child: Child,
    directory: tempfile::TempDir,
}

impl Role {
    fn start(role: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "role_main", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("d.sock")
    }

    fn attach(&self) -> Arc<Attachment> {
        let attachment = Attachment::connect(self.socket(), None, LONG, LONG).unwrap();
        assert!(attachment.attached(), "no depot answers; its log: {}", self.log());
        attachment
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn lines_with(&self, text: &str) -> usize {
        self.log().lines().filter(|line| line.contains(text)).count()
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let directory = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let socket = directory.join("d.sock");
    logging::init("info", Some(&directory.join("log"))).unwrap();
    let posix = serde_json::json!({"directories": [directory], "read_threads": 2, "write_threads": 2});
    let on_disk = config(4 << 20, serde_json::json!({"pipeline": "Cache|Posix", "posix": posix}));
    let limit = |count| {
        setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum: Some(count) }).unwrap();
    };
    match role.as_str() {
        "64 descriptors" => {
            limit(64);
            Serving::new(on_disk, &socket).serve(&mut || true).unwrap();
        }
        "256 descriptors and a wire door" => {
            limit(256);
            let wire = WireConfig::from_json("{\"service_port\": 0}").unwrap();
            let serving = Serving { wire: Some(wire), ..Serving::new(on_disk, &socket) };
            serving.serve(&mut || true).unwrap();
        }
        "no descriptors for a while" => {
            limit(256);
            let (mut hoard, mut turns, begin) = (Vec::new(), 0, directory.join("connected"));
            // Without a tier, which would open and close its own files meanwhile.
            let plain = config(4 << 20, serde_json::json!({}));
            Serving::new(plain, &socket)
                .serve(&mut || {
                    if turns == 0 {
                        hoard.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
                    }
                    turns += u32::from(begin.exists());
                    if turns == TURNS {
                        hoard.clear();
                    }
                    // Once is enough: descriptors that the depot opens meanwhile are its own.
                    turns = turns.max(1);
                    true
                })
                .unwrap();
        }
        "a write panics" => {
            let lock = DoorLock::take(&socket).unwrap().unwrap();
            let depot = scripted_depot(Act::Panic);
            serve_depot(&lock, depot, 8, &mut || true).unwrap();
        }
        "writes never end" => {
            let lock = DoorLock::take(&socket).unwrap().unwrap();
            let (held, _writes) = crossbeam_channel::unbounded();
            let end = directory.join("end");
            serve_depot(&lock, scripted_depot(Act::Hold(held)), 8, &mut || !end.exists()).unwrap();
        }
        other => panic!("no such role: {other}"),
    }
}

fn scripted_depot(write: Act) -> Depot {
    let config = config(4 << 20, serde_json::json!({"pipeline": "Cache|Fake", "drain_timeout_ms": 1}));
    let pool = PoolMapping::create(config.mapped_bytes()).unwrap();
    Depot::with_tiers(config, PoolKind::Cache, vec![Scripted::tier(Act::Pass, write)], pool).unwrap()
}

/// Says hello. Returns the depot's answer, whatever it is.
fn hello(socket: &Path) -> (SeqPacket, Response) {
    let mut socket = SeqPacket::connect(socket).unwrap();
    let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: 1 };
    socket.send(&encode(7, &hello).unwrap(), None).unwrap();
    let mut buffer = FrameBuffer::default();
    socket.recv(&mut buffer, Some(Instant::now() + LONG)).unwrap();
    let (id, response) = decode(&buffer).unwrap();
    assert_eq!(id, 7, "an answer to this hello");
    (socket, response)
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come true");
        std::thread::yield_now();
    }
}

/// Checks that every block reaches the disk, so no file was refused a descriptor.
fn stores(attachment: &Arc<Attachment>, engine: &Engine, first: u64) {
    let before = attachment.stats()["depot"]["write_blocks"].as_u64().unwrap();
    assert!(engine.dump(&(first..first + 8).collect::<Vec<_>>(), &engine.all_pages()).is_empty());
    assert!(attachment.drain(LONG).unwrap());
    let stats = attachment.stats();
    assert_eq!(stats["depot"]["write_blocks"], before + 8, "{stats}");
    assert_eq!(stats["depot"]["failures"], serde_json::json!({}), "{stats}");
}

#[test]
fn connections_beyond_the_descriptor_limit_are_refused_with_a_reason() {
    let depot = Role::start("64 descriptors");
    let attachment = depot.attach();
    let engine = Engine::new(&attachment, &spec_of_blocks(), 8);
    stores(&attachment, &engine, 0);
    let answers: Vec<_> = (0..100).map(|_| hello(&depot.socket())).collect();
    let count = |wanted: fn(&Response) -> bool| answers.iter().filter(|(_, answer)| wanted(answer)).count();
    let welcome = count(|answer| matches!(answer, Response::Welcome { .. }));
    let busy = count(|answer| matches!(answer, Response::Failed { kind, .. } if kind == "busy"));
    assert_eq!((welcome + busy, welcome < 32, busy > 0), (100, true, true), "{welcome} welcome, {busy} busy");
    stores(&attachment, &engine, 100);
    assert!(depot.lines_with("was refused") < 10, "{}", depot.log());
    assert_eq!(depot.lines_with("could not be accepted"), 0, "{}", depot.log());
    drop(answers);
    eventually("room for another connection", || {
        matches!(hello(&depot.socket()).1, Response::Welcome { .. })
    });
}

#[test]
fn tcp_peers_beyond_the_descriptor_limit_leave_the_local_door_and_the_disk_alone() {
    let depot = Role::start("256 descriptors and a wire door");
    let attachment = depot.attach();
    let engine = Engine::new(&attachment, &spec_of_blocks(), 8);
    const OPEN: &str = "the network listener is ready at ";
    let log = depot.log();
    let line = log.lines().find_map(|line| line.split_once(OPEN)).unwrap().1;
    assert_eq!(
        line.split_once(", ").unwrap().1.split(" [").next(),
        Some("without TLS, without a token"),
        "{line}"
    );
    let at = line.split(',').next().unwrap().to_owned();
    let peers: Vec<_> = (0..300).map(|_| TcpStream::connect(&at).unwrap()).collect();
    eventually("all of them accepted or refused", || {
        depot.lines_with("was refused") + depot.lines_with("could not be accepted") > 0
    });
    stores(&attachment, &engine, 0);
    let other = depot.attach();
    let engine = Engine::new(&other, &spec_of_blocks(), 8);
    stores(&other, &engine, 100);
    assert!(depot.log().lines().count() < 50, "{}", depot.log());
    drop(peers);
}

#[test]
fn a_door_that_cannot_accept_neither_spins_nor_fills_the_log() {
    let depot = Role::start("no descriptors for a while");
    eventually("a socket", || depot.socket().exists() && SeqPacket::connect(&depot.socket()).is_ok());
    // It waits in the backlog, and can be accepted after the child has had its turns.
    let begin = depot.directory.path().join("connected");
    let (_, answer) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| hello(&depot.socket()));
        File::create(begin).unwrap();
        asking.join().unwrap()
    });
    assert!(matches!(answer, Response::Welcome { .. }), "{answer:?}");
    let lines = depot.lines_with("could not be accepted");
    assert!((1..10).contains(&lines), "{lines} lines in {TURNS} turns: {}", depot.log());
}

#[test]
fn a_panic_in_a_thread_of_a_served_depot_ends_its_process() {
    let mut depot = Role::start("a write panics");
    let attachment = depot.attach();
    let engine = Engine::new(&attachment, &spec_of_blocks(), 8);
    let _ = engine.dump(&[1], &[0]);
    eventually("the end of the process", || depot.child.try_wait().unwrap().is_some());
    let status = depot.child.wait().unwrap();
    assert_eq!(status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{status:?}");
    assert_eq!(depot.lines_with("the depot ends: its thread"), 1, "{}", depot.log());
    eventually("a miss", || !attachment.attached());
}

#[test]
fn a_drain_under_way_does_not_keep_a_depot_from_ending() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let (held, writes) = crossbeam_channel::unbounded();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lock = DoorLock::take(&socket).unwrap().unwrap();
        let depot = scripted_depot(Act::Hold(held));
        let stop = &stop;
        let (ended, over) = crossbeam_channel::bounded(1);
        scope.spawn(move || {
            let outcome = serve_depot(&lock, depot, 8, &mut || !stop.load(Ordering::Acquire));
            ended.send(outcome).unwrap();
        });
        let attachment = Attachment::connect(socket.clone(), None, LONG, LONG).unwrap();
        let engine = Engine::new(&attachment, &spec_of_blocks(), 1);
        assert!(engine.dump(&[1], &[0]).is_empty());
        let write = writes.recv_timeout(LONG).unwrap();
        let (draining, _) = hello(&socket);
        draining.send(&encode(8, &Request::Drain { wait_ms: u32::MAX }).unwrap(), None).unwrap();
        stop.store(true, Ordering::Release);
        let outcome = over.recv_timeout(LONG);
        write.finish();
        assert!(matches!(outcome, Ok(Ok(Ended::Stopped))), "the depot went on: {outcome:?}");
    });
}

#[test]
fn a_depot_that_ends_says_what_it_could_not_write() {
    let mut depot = Role::start("writes never end");
    let attachment = depot.attach();
    let engine = Engine::new(&attachment, &spec_of_blocks(), 8);
    assert!(engine.dump(&[1, 2, 3], &[0, 1, 2]).is_empty());
    File::create(depot.directory.path().join("end")).unwrap();
    eventually("the end of the process", || depot.child.try_wait().unwrap().is_some());
    assert!(depot.child.wait().unwrap().success());
    assert_eq!(
        depot.lines_with("3 blocks (12288 bytes) are written before the depot ends"),
        1,
        "{}",
        depot.log()
    );
    assert_eq!(depot.lines_with("loses 3 blocks (12288 bytes)"), 1, "{}", depot.log());
}

#[test]
fn a_socket_that_was_deleted_is_made_anew() {
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    drop(served.attach());
    std::fs::remove_file(&served.socket).unwrap();
    eventually("the socket", || SeqPacket::connect(&served.socket).is_ok());
    // The answer means that the depot has noted which socket is its own.
    assert!(matches!(hello(&served.socket).1, Response::Welcome { .. }));
    // Moved there by another process: clients could not reach the depot either.
    let other = served.socket.with_file_name("other.sock");
    let listener = SeqPacket::listen(&other, 1).unwrap();
    std::fs::rename(&other, &served.socket).unwrap();
    drop(listener);
    eventually("the socket", || SeqPacket::connect(&served.socket).is_ok());
    assert!(matches!(hello(&served.socket).1, Response::Welcome { .. }));
    assert_eq!(std::fs::metadata(&served.socket).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_lock_that_was_deleted_is_taken_anew() {
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    drop(served.attach());
    let lock = served.socket.with_file_name("depot.sock.lock");
    std::fs::remove_file(&lock).unwrap();
    eventually("the lock", || lock.exists());
    // The thread that takes the lock answers, too.
    assert!(matches!(hello(&served.socket).1, Response::Welcome { .. }));
    assert!(DoorLock::take(&served.socket).unwrap().is_none(), "it is held");
}

#[test]
fn a_depot_whose_place_was_taken_ends_and_leaves_the_other_socket() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let thread = std::thread::spawn({
        let socket = at("d.sock");
        move || {
            kvdepot_server::Serving::new(config(2 << 20, serde_json::json!({})), &socket).serve(&mut || true)
        }
    });
    eventually("a depot", || SeqPacket::connect(&at("d.sock")).is_ok());
    assert!(matches!(hello(&at("d.sock")).1, Response::Welcome { .. }));
    // Another depot arrives in one step, as if the lock file had been deleted before it started.
    let lock = DoorLock::take(&at("other.sock")).unwrap().unwrap();
    let door = LocalDoor::open(&lock).unwrap();
    std::fs::rename(at("other.sock.lock"), at("d.sock.lock")).unwrap();
    std::fs::rename(at("other.sock"), at("d.sock")).unwrap();
    eventually("the end of the first depot", || thread.is_finished());
    assert_eq!(thread.join().unwrap().unwrap(), Ended::Replaced);
    assert!(SeqPacket::connect(&at("d.sock")).is_ok(), "the other depot's socket was removed");
    drop(door);
}

#[test]
fn lock_files_that_others_could_hold_or_that_would_hang_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let socket = |name: &str| directory.path().join(name);
    let lock = |name: &str| directory.path().join(format!("{name}.lock"));
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, lock("fifo"), fifo, 0o600.into(), 0).unwrap();
    assert_eq!(DoorLock::take(&socket("fifo")).unwrap_err().kind(), ErrorKind::Config);
    std::fs::write(socket("precious"), "bytes").unwrap();
    symlink(socket("precious"), lock("link")).unwrap();
    assert_eq!(DoorLock::take(&socket("link")).unwrap_err().kind(), ErrorKind::Config);
    symlink(socket("nothing"), lock("dangling")).unwrap();
    assert_eq!(DoorLock::take(&socket("dangling")).unwrap_err().kind(), ErrorKind::Config);
    assert!(!socket("nothing").exists());
    File::create(lock("open")).unwrap().set_permissions(PermissionsExt::from_mode(0o666)).unwrap();
    let taken = DoorLock::take(&socket("open")).unwrap();
    assert_eq!(std::fs::metadata(lock("open")).unwrap().permissions().mode() & 0o777, 0o600);
    drop(taken);
    // Only root can give a file away.
    if rustix::process::geteuid().is_root() {
        File::create(lock("theirs")).unwrap();
        std::os::unix::fs::chown(lock("theirs"), Some(12_345), None).unwrap();
        assert_eq!(DoorLock::take(&socket("theirs")).unwrap_err().kind(), ErrorKind::Permission);
    }
}

#[test]
fn a_lock_that_is_held_without_a_depot_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let mut held = Some(DoorLock::take(&socket).unwrap().unwrap());
    let error = Place::take(&socket, Duration::ZERO, &mut || true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(matches!(Place::take(&socket, LONG, &mut || false), Ok(Place::Stopped)));
    // The holder has gone before it served: the place is taken over.
    let free = Place::take(&socket, LONG, &mut || {
        held = None;
        true
    });
    assert!(matches!(free, Ok(Place::Free(_))), "{free:?}");
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    drop(served.attach());
    assert!(matches!(Place::take(&served.socket, LONG, &mut || true), Ok(Place::Served)));
}

#[test]
fn a_depot_that_waits_for_its_turn_serves_when_the_other_one_has_ended() {
    let mut first = Served::start(config(4 << 20, serde_json::json!({})));
    drop(first.attach());
    let socket = first.socket.clone();
    let (mut asked, mut after) = (0, 0);
    let second = Place::wait(&socket, &mut || {
        asked += 1;
        if asked == 3 {
            first.stop();
        }
        true
    });
    assert!(matches!(second, Ok(Place::Free(_))), "{second:?}");
    assert_eq!(asked, 3, "it neither ends beside a depot that answers, nor waits after its end");
    drop(second);
    let ended = Serving::new(config(4 << 20, serde_json::json!({})), &socket).serve_in_turn(&mut || {
        after += 1;
        after < 3
    });
    assert_eq!(ended.unwrap(), Ended::Stopped);
}

#[test]
fn a_depot_that_waits_for_its_turn_leaves_a_deleted_lock_to_the_depot_that_answers() {
    let first = Served::start(config(4 << 20, serde_json::json!({})));
    drop(first.attach());
    let mut lock = first.socket.clone().into_os_string();
    lock.push(".lock");
    let mut asked = 0;
    let second = Place::wait(&first.socket, &mut || {
        asked += 1;
        if asked == 1 {
            std::fs::remove_file(&lock).unwrap();
        }
        asked < 4
    });
    assert!(matches!(second, Ok(Place::Stopped)), "{second:?}");
    drop(first.attach());
}

/// As if it got no processor: a busy machine is no reason to take its place.
#[test]
fn a_depot_that_waits_for_its_turn_leaves_a_deleted_lock_to_a_depot_that_answers_late() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let _held = DoorLock::take(&socket).unwrap().unwrap();
    let _listener = SeqPacket::listen(&socket, 8).unwrap();
    let mut asked = 0;
    let second = Place::wait(&socket, &mut || {
        asked += 1;
        if asked == 1 {
            std::fs::remove_file(socket.with_file_name("d.sock.lock")).unwrap();
        }
        asked < 3
    });
    assert!(matches!(second, Ok(Place::Stopped)), "{second:?}");
}

#[test]
fn a_depot_that_waits_for_its_turn_can_be_told_to_stop_and_says_its_mistakes_at_once() {
    let served = Served::start(config(4 << 20, serde_json::json!({})));
    drop(served.attach());
    let wait = |config| Serving::new(config, &served.socket).serve_in_turn(&mut || false);
    assert_eq!(wait(config(4 << 20, serde_json::json!({}))).unwrap(), Ended::Stopped);
    let wrong = config(4 << 20, serde_json::json!({"eviction": "oldest"}));
    assert_eq!(wait(wrong).unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn a_client_knows_why_it_has_no_depot() {
    let mut served = Served::start(config(4 << 20, serde_json::json!({})));
    let attachment = served.attach();
    assert_eq!(attachment.trouble(), "");
    served.stop();
    eventually("the client notices", || !attachment.attached());
    assert!(!attachment.trouble().is_empty());
    let nobody = served.socket.with_extension("nobody");
    let nobody = Attachment::connect(nobody, None, Duration::ZERO, LONG).unwrap();
    eventually("the first try fails", || !nobody.trouble().is_empty());
}
