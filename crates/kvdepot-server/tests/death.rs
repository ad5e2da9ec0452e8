//! P4 and P6: processes are killed with -9 or stopped at any moment. Nothing leaks, no other process blocks, and
//! everything continues.
//!
//! Roles run in child processes: this test binary, started again with `KVDEPOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Engine, LONG, Served, config, hash, spec};
use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use kvdepot_depot::message::{HELLO_MAGIC, Hashes, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use rustix::process::{Pid, Signal, kill_process};

const ROLE: &str = "KVDEPOT_TEST_ROLE";
const SOCKET: &str = "KVDEPOT_TEST_SOCKET";

fn kills() -> usize {
    std::env::var("KVDEPOT_KILLS").map_or(12, |text| text.parse().expect("KVDEPOT_KILLS is a number"))
}

fn namespace() -> Arc<NamespaceSpec> {
    spec("death", BlockLayout::uniform(4, &[64 << 10]).unwrap())
}

fn role(name: &str, socket: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "role_main", "--nocapture", "--test-threads=1"])
        .env(ROLE, name)
        .env(SOCKET, socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = std::path::PathBuf::from(std::env::var(SOCKET).unwrap());
    match role.as_str() {
        "depot" => {
            kvdepot_server::Serving::new(config(32 << 20, serde_json::json!({})), &socket)
                .serve(&mut || true)
                .unwrap();
        }
        "client" => busy_client(&socket),
        "depot on disk" => {
            kvdepot_server::Serving::new(on_disk(&socket), &socket).serve(&mut || true).unwrap();
        }
        "writer" => writer(&socket),
        "silent" => silent(&socket),
        other => panic!("no such role: {other}"),
    }
}

/// Reports the end of a round; the test may have stopped reading.
fn say(round: u64) {
    let _ = writeln!(std::io::stdout(), "round {round}");
}

/// Dumps and loads forever in all ways, and reports each round.
fn busy_client(socket: &Path) {
    let attachment = Attachment::connect(socket.to_owned(), None, LONG, LONG).unwrap();
    let spec = namespace();
    let mut engine = Engine::new(&attachment, &spec, 16);
    engine.fill(1);
    for round in 0u64.. {
        let hashes: Vec<u64> = (0..8).map(|i| 1000 + (round * 8 + i) % 200).collect();
        engine.dump(&hashes, &engine.all_pages()[..8]);
        // SAFETY: the engine is never dropped.
        let dump = unsafe {
            engine.store.begin_dump_pages((0..4).map(|i| hash(5000 + round * 4 + i)).collect(), &[0, 1, 2, 3])
        }
        .unwrap();
        dump.submit_shard(0, 0).unwrap();
        let group =
            ClaimGroupSpec { namespaces: vec![Arc::clone(&spec)], window_blocks: 0, hashes_per_block: 1 };
        let wanted: Vec<_> = hashes.iter().map(|&n| hash(n)).collect();
        let _claim = Claim::open(&attachment, &[group], &wanted, 0, 8, "").unwrap();
        engine.load(&hashes, &engine.all_pages()[8..]);
        say(round);
    }
}

/// A depot with files beside its socket. The pool is far smaller than the amount of data written.
fn on_disk(socket: &Path) -> kvdepot_depot::DepotConfig {
    let directory = socket.with_file_name("blocks");
    std::fs::create_dir_all(&directory).unwrap();
    let posix = serde_json::json!({"directories": [directory], "capacity_bytes": 24 << 20, "read_threads": 2, "write_threads": 2});
    config(4 << 20, serde_json::json!({"pipeline": "Cache|Posix", "posix": posix}))
}

/// Writes block `n` always with the bytes of page `n % 16`, in every process.
fn writer(socket: &Path) {
    let attachment = Attachment::connect(socket.to_owned(), None, LONG, LONG).unwrap();
    let mut engine = Engine::new(&attachment, &namespace(), 32);
    engine.fill(1);
    for round in 0u64.. {
        let names: Vec<u64> = (0..16).map(|i| (round * 7 % 50) * 16 + i).collect();
        engine.dump(&names, &engine.all_pages()[..16]);
        engine.load(&names, &engine.all_pages()[16..]);
        say(round);
    }
}

/// Reserves blocks, closes its connection without a goodbye, and keeps running: to the depot it looks like a process
/// whose exit takes long.
fn silent(socket: &Path) {
    let mut door = SeqPacket::connect(socket).unwrap();
    let mut ask = |request: &Request<'_>| {
        door.send(&encode(1, request).unwrap(), None).unwrap();
        let mut buffer = FrameBuffer::default();
        door.recv(&mut buffer, Some(Instant::now() + LONG)).unwrap();
        decode::<Response>(&buffer).unwrap().1.into_result().unwrap()
    };
    ask(&Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() });
    let spec = namespace();
    let open = Request::OpenNamespace { canonical: spec.canonical().into() };
    let Response::Namespace { handle, .. } = ask(&open) else { panic!("not opened") };
    ask(&Request::Reserve {
        namespace: handle,
        hashes: Hashes(vec![7; 16].into()),
        priority: Priority::Normal,
    });
    drop(door);
    say(0);
    // Until the test ends it, or the test itself ends.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Counts temporary files of writers below a directory.
fn temporaries(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.path() {
            path if path.is_dir() => temporaries(&path),
            path => {
                usize::from(path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".tmp")))
            }
        })
        .sum()
}

fn gauge(attachment: &Arc<Attachment>, name: &str) -> u64 {
    attachment.stats()["depot"][name].as_u64().unwrap_or(u64::MAX)
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not come true");
        std::thread::yield_now();
    }
}

#[test]
fn killed_clients_leak_nothing() {
    let served = Served::start(config(32 << 20, serde_json::json!({})));
    let attachment = served.attach();
    for kill in 0..kills() {
        let mut child = role("client", &served.socket);
        // It dies at some point after its n-th round, at another moment each time.
        let words = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert_eq!(words.filter(|line| line.starts_with("round")).take(1 + kill % 5).count(), 1 + kill % 5);
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("everything held by the dead given back", || {
            ["pool_filling_bytes", "pool_leased_bytes", "claims_open"]
                .iter()
                .all(|name| gauge(&attachment, name) == 0)
        });
    }
    let mut engine = Engine::new(&attachment, &namespace(), 128);
    engine.fill(9);
    let all: Vec<u64> = (0..128).map(|i| 90_000 + i).collect();
    assert!(
        engine.dump(&all, &engine.all_pages()).is_empty(),
        "the whole pool is usable: {}",
        attachment.stats()
    );
    engine.clear();
    assert!(engine.load(&all, &engine.all_pages()).is_empty());
    assert!((0..128).all(|page| engine.holds(page, page, 9)));
}

#[test]
fn slots_of_a_killed_client_come_back_when_it_has_exited_and_not_when_its_connection_ends() {
    let served = Served::start(config(32 << 20, serde_json::json!({})));
    let attachment = served.attach();
    let mut child = role("silent", &served.socket);
    let mut words = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(words.any(|line| line.ends_with("round 0")));
    for _ in 0..500 {
        assert_eq!(gauge(&attachment, "pool_filling_bytes"), 256 << 10, "given away before the exit");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the slot is given back", || gauge(&attachment, "pool_filling_bytes") == 0);
}

/// Its process keeps running, so the depot frees them only because the client says that it has finished with them.
#[test]
fn slots_of_a_lane_that_a_living_client_closes_are_free_at_once() {
    let served = Served::start(config(32 << 20, serde_json::json!({})));
    let attachment = served.attach();
    let engine = Engine::new(&attachment, &namespace(), 1);
    // SAFETY: the engine outlives the dump.
    let dump = unsafe { engine.store.begin_dump_pages(vec![hash(1)], &[0]) }.unwrap();
    dump.submit_shard(0, 0).unwrap();
    eventually("a slot is reserved", || gauge(&attachment, "pool_filling_bytes") == 256 << 10);
    drop(dump);
    // Long before SILENT_CLOSE_WAIT_MS.
    eventually("the slot is free", || gauge(&attachment, "pool_filling_bytes") == 0);
}

#[test]
fn killed_depots_are_misses_until_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let mut child = role("depot", &socket);
    let attachment = Attachment::connect(socket.clone(), None, LONG, LONG).unwrap();
    assert!(attachment.attached());
    let mut engine = Engine::new(&attachment, &namespace(), 16);
    for kill in 0..kills().div_ceil(2) {
        engine.fill(kill as u8);
        let hashes: Vec<u64> = (0..8).collect();
        engine.dump_once_open(&hashes, &engine.all_pages()[..8]);
        let wanted: Vec<_> = hashes.iter().map(|&n| hash(n)).collect();
        // SAFETY: the engine outlives the task.
        let load = unsafe { engine.store.load_pages(wanted.clone(), &engine.all_pages()[8..], 0) }.unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // Loaded in time or missed, but never wrong.
        assert!(load.wait(Some(LONG)));
        let failed: Vec<usize> = load.failed().into_iter().map(|(block, _)| block).collect();
        assert!((0..8).all(|i| failed.contains(&i) || engine.holds(8 + i, i, kill as u8)));
        assert_eq!(engine.store.lookup_on_prefix(&wanted), 0);
        assert!(!engine.load(&hashes, &engine.all_pages()[..8]).is_empty());
        child = role("depot", &socket);
        eventually("attached again", || attachment.attached());
        assert_eq!(engine.store.lookup_on_prefix(&wanted), 0, "a new depot is empty");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Like a rank that only loads: its first load from the next depot must not be the call that notices the loss of the
/// last one.
#[test]
fn who_asks_nothing_notices_a_killed_depot_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let mut depot = role("depot on disk", &socket);
    let [busy, quiet] = [(); 2].map(|()| Attachment::connect(socket.clone(), None, LONG, LONG).unwrap());
    let mut writer = Engine::new(&busy, &namespace(), 8);
    writer.fill(3);
    assert!(writer.dump(&[1, 2], &[0, 1]).is_empty());
    assert!(busy.drain(LONG).unwrap());
    let reader = Engine::new(&quiet, &namespace(), 8);
    depot.kill().unwrap();
    depot.wait().unwrap();
    eventually("a killed depot noticed", || !quiet.attached());
    depot = role("depot on disk", &socket);
    eventually("attached again", || quiet.attached());
    assert!(reader.load(&[1, 2], &[4, 5]).is_empty(), "the next depot has the files: {}", quiet.stats());
    assert!(reader.holds(4, 0, 3) && reader.holds(5, 1, 3));
    depot.kill().unwrap();
    depot.wait().unwrap();
}

#[test]
fn whoever_is_killed_the_files_stay_right() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let mut depot = role("depot on disk", &socket);
    let attachment = Attachment::connect(socket.clone(), None, LONG, LONG).unwrap();
    let mut engine = Engine::new(&attachment, &namespace(), 16);
    let mut loaded = 0;
    for kill in 0..kills() {
        let mut client = role("writer", &socket);
        let words = BufReader::new(client.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert_eq!(words.filter(|line| line.starts_with("round")).take(1 + kill % 7).count(), 1 + kill % 7);
        if kill % 3 != 1 {
            depot.kill().unwrap();
            depot.wait().unwrap();
        }
        if kill % 3 != 0 || kill % 2 == 0 {
            client.kill().unwrap();
        }
        if kill % 3 != 1 {
            depot = role("depot on disk", &socket);
        }
        client.kill().unwrap();
        client.wait().unwrap();
        eventually("a depot", || attachment.attached() && gauge(&attachment, "pid") == u64::from(depot.id()));
        for first in (0..800).step_by(16) {
            engine.clear();
            let names: Vec<u64> = (first..first + 16).collect();
            let missing = engine.load(&names, &engine.all_pages());
            loaded += 16 - missing.len();
            let wrong = (0..16).find(|page| !missing.contains(page) && !engine.holds(*page, *page, 1));
            assert_eq!(wrong, None, "wrong bytes in block {first} + n after kill {kill}");
        }
        eventually("everything given back", || {
            let gauges = ["pool_filling_bytes", "pool_leased_bytes", "pool_fetching_bytes", "claims_open"];
            gauges.iter().all(|name| gauge(&attachment, name) == 0)
        });
        assert!(attachment.drain(LONG).unwrap());
        eventually("temporaries of the dead swept", || temporaries(directory.path()) == 0);
        let tier = &attachment.stats()["depot"]["tiers"][0];
        assert!(tier["bytes"].as_u64().unwrap() <= 24 << 20, "the cap is kept: {tier}");
    }
    assert!(loaded > 0, "nothing was ever found");
    depot.kill().unwrap();
    depot.wait().unwrap();
}

#[test]
fn a_hung_depot_costs_one_bounded_wait() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let mut child = role("depot", &socket);
    let pid = Pid::from_child(&child);
    let call_timeout = Duration::from_millis(200);
    let attachment = Attachment::connect(socket, None, LONG, call_timeout).unwrap();
    let spec = namespace();
    let engine = Engine::new(&attachment, &spec, 8);
    eventually("the dump, on a busy machine", || engine.dump(&[1, 2], &[0, 1]).is_empty());
    let group =
        || ClaimGroupSpec { namespaces: vec![Arc::clone(&spec)], window_blocks: 0, hashes_per_block: 1 };
    let claim = || Claim::open(&attachment, &[group()], &[hash(1), hash(2)], 0, 2, "").unwrap();
    // A claim that a busy machine answers late is a miss.
    eventually("the hit", || claim().wait(LONG) == (true, 2, 0));
    kill_process(pid, Signal::STOP).unwrap();
    let stopped =
        rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(stopped.1.stopped());
    assert_eq!(claim().poll(), (true, 0, 0), "a hung depot is a miss");
    assert!(!attachment.attached());
    // From the second call on it costs nothing: no request is made at all.
    let has_waited = || {
        let begun = Instant::now();
        assert_eq!(claim().poll(), (true, 0, 0));
        begun.elapsed() >= call_timeout
    };
    let waited = (0..1000).filter(|_| has_waited()).count();
    // This machine may stand still during some of them.
    assert!(waited < 50, "{waited} of a thousand claims waited");
    kill_process(pid, Signal::CONT).unwrap();
    eventually("attached again", || attachment.attached());
    eventually("what it held is still there", || claim().wait(LONG) == (true, 2, 0));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A lookup may wait long for tiers, but only at a depot that answers.
#[test]
fn lookups_at_a_stopped_depot_wait_for_call_timeout_and_not_for_the_task_s() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let mut child = role("depot", &socket);
    let pid = Pid::from_child(&child);
    let attachment = Attachment::connect(socket, None, LONG, Duration::from_millis(100)).unwrap();
    let engine = Engine::new(&attachment, &namespace(), 8);
    eventually("the dump, on a busy machine", || engine.dump(&[1, 2], &[0, 1]).is_empty());
    let wanted = [hash(1), hash(2)];
    let lookups: [&dyn Fn() -> usize; 2] =
        [&|| engine.store.lookup(&wanted).iter().filter(|&&byte| byte != 0).count(), &|| {
            engine.store.lookup_on_prefix(&wanted)
        }];
    for lookup in lookups {
        eventually("found", || lookup() == 2);
        kill_process(pid, Signal::STOP).unwrap();
        let stopped = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED);
        assert!(stopped.unwrap().unwrap().1.stopped());
        let begun = Instant::now();
        assert_eq!(lookup(), 0, "a stopped depot is a miss");
        // A task of the engine may take twice as long.
        assert!(begun.elapsed() < LONG / 2, "the lookup took {:?}", begun.elapsed());
        assert!(!attachment.attached());
        kill_process(pid, Signal::CONT).unwrap();
        eventually("attached again", || attachment.attached());
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn racing_starters_start_one_depot() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("d.sock");
    let test = std::env::current_exe().unwrap().display().to_string();
    let script =
        format!("{ROLE}=depot {SOCKET}={} exec {test} --exact role_main --nocapture", socket.display());
    let command = vec!["sh".to_owned(), "-c".to_owned(), script];
    let threads: Vec<_> = (0..6)
        .map(|_| {
            let (socket, command) = (socket.clone(), command.clone());
            std::thread::spawn(move || Attachment::connect(socket, Some(command), LONG, LONG).unwrap())
        })
        .collect();
    let attachments: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let pids: Vec<u64> = attachments.iter().map(|attachment| gauge(attachment, "pid")).collect();
    assert!(pids.iter().all(|&pid| pid == pids[0] && pid != u64::MAX), "one depot for all: {pids:?}");
    // After a kill, whichever client notices starts it again.
    let pid = Pid::from_raw(i32::try_from(pids[0]).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    eventually("another depot", || {
        let now = gauge(&attachments[0], "pid");
        now != pids[0] && now != u64::MAX
    });
    for attachment in &attachments {
        attachment.close();
    }
    let last = Attachment::connect(socket, None, LONG, LONG).unwrap();
    let pid = Pid::from_raw(i32::try_from(gauge(&last, "pid")).unwrap()).unwrap();
    last.close();
    kill_process(pid, Signal::KILL).unwrap();
}
