//! P11: a depot under a service manager that stores descriptors. Those left by a crash come back at the next start, and
//! the depot notifies the manager when it serves and when it ends. The test plays the manager.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use common::roles::{ROLE_MAIN, Role, attach, log, own_role, proven, socket, until};
use common::{Engine, config, spec};
use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_server::{Serving, logging};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Pid, getpid};

const POOL: u64 = 16 << 20;
const PAGES: usize = 32;

fn namespace() -> Arc<NamespaceSpec> {
    spec("stored", BlockLayout::uniform(2, &[64 << 10]).unwrap())
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Some((role, directory)) = own_role() else { return };
    if role == "client" {
        let _attachment = attach(&directory);
        // A message that a client must not send.
        let manager = UnixDatagram::unbound().unwrap();
        manager.send_to(b"FDSTOREREMOVE=1\nFDNAME=kvdepot-pool", directory.join("notify")).unwrap();
        std::fs::write(directory.join("attached"), "").unwrap();
        loop {
            std::thread::park();
        }
    }
    logging::init("info", Some(&directory.join("log"))).unwrap();
    let keep_ms = if role == "depot that keeps nothing" { 0 } else { 600_000 };
    // No process to keep the pool may be started.
    let more = serde_json::json!({"pool_keep_ms": keep_ms, "pool_keeper": ["/nonexistent/keeper"]});
    Serving::new(config(POOL, more), &socket(&directory))
        .serve(&mut || !directory.join("end").exists())
        .unwrap();
}

/// The state of a manager.
#[derive(Default)]
struct State {
    /// The service's main process. Messages of others are ignored, as with `NotifyAccess=main`.
    main: Option<Pid>,
    stored: Vec<(String, OwnedFd)>,
    said: Vec<String>,
    /// Number of messages from others.
    ignored: usize,
}

/// The service manager of one service.
struct Manager {
    address: PathBuf,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
    marks: usize,
}

impl Manager {
    /// Starts a manager that stores up to `room` descriptors.
    fn start(directory: &Path, room: usize) -> Self {
        let address = directory.join("notify");
        let socket = UnixDatagram::bind(&address).unwrap();
        set_socket_passcred(&socket, true).unwrap();
        let state: Arc<Mutex<State>> = Arc::default();
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || while hear(&socket, &shared, room) {});
        Self { address, state, thread: Some(thread), marks: 0 }
    }

    fn has_heard(&self, what: &str) -> bool {
        self.state.lock().unwrap().said.iter().any(|said| said == what)
    }

    /// Waits until all messages sent before were received.
    fn catch_up(&mut self) {
        self.marks += 1;
        let mark = format!("MARK={}", self.marks);
        UnixDatagram::unbound().unwrap().send_to(mark.as_bytes(), &self.address).unwrap();
        until("the manager has heard all", || self.has_heard(&mark));
    }

    fn stored(&self) -> Vec<String> {
        self.state.lock().unwrap().stored.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Starts a depot with the stored descriptors, and waits until it says that it serves.
    fn depot(&mut self, role: &str, directory: &Path) -> Role {
        self.depot_below("$$", role, directory)
    }

    /// Like `depot`, with the stored descriptors intended for the process with this pid.
    fn depot_below(&mut self, pid: &str, role: &str, directory: &Path) -> Role {
        self.catch_up();
        self.state.lock().unwrap().said.clear();
        let stored: Vec<(String, OwnedFd)> = {
            let state = self.state.lock().unwrap();
            let high = |fd: &OwnedFd| {
                let high = fcntl_dupfd_cloexec(fd, 100).unwrap();
                fcntl_setfd(&high, FdFlags::empty()).unwrap();
                high
            };
            state.stored.iter().map(|(name, fd)| (name.clone(), high(fd))).collect()
        };
        let mut script = format!("export LISTEN_PID={pid}; exec \"$@\"");
        for (number, (_, fd)) in stored.iter().enumerate() {
            script += &format!(" {}<&{}", 3 + number, std::os::fd::AsRawFd::as_raw_fd(fd));
        }
        let names: Vec<&str> = stored.iter().map(|(name, _)| name.as_str()).collect();
        let mut command = Command::new("bash");
        command
            .args(["-c", &script, "bash"])
            .arg(std::env::current_exe().unwrap())
            .args(ROLE_MAIN)
            .env("NOTIFY_SOCKET", &self.address)
            .env("FDSTORE", "512")
            .env("LISTEN_FDS", stored.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"));
        let depot = {
            // It sends nothing before its manager knows it.
            let mut state = self.state.lock().unwrap();
            let depot = Role::spawn(&mut command, role, directory);
            state.main = Some(Pid::from_child(&depot.0));
            depot
        };
        until("the depot says that it serves", || self.has_heard("READY=1"));
        depot
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = UnixDatagram::unbound().unwrap().send_to(b"STOP=1", &self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Receives one datagram. Returns whether to continue.
fn hear(socket: &UnixDatagram, state: &Mutex<State>, room: usize) -> bool {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let heard =
        rustix::net::recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap().bytes;
    let (mut fd, mut sender) = (None, None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fd = fds.next(),
            RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials.pid),
            _ => {}
        }
    }
    let text = String::from_utf8(bytes[..heard].to_vec()).unwrap();
    let mut state = state.lock().unwrap();
    // Messages of this process mark the test's progress.
    if sender != state.main && sender != Some(getpid()) {
        state.ignored += 1;
        return true;
    }
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
    match (text.lines().next().unwrap_or_default(), name, fd) {
        ("STOP=1", ..) => return false,
        ("FDSTORE=1", Some(name), Some(fd)) => {
            // Without space the manager drops it, and reports that only in its log.
            if state.stored.len() < room {
                state.stored.push((name.to_owned(), fd));
            }
        }
        ("FDSTOREREMOVE=1", Some(name), None) => state.stored.retain(|(stored, _)| stored != name),
        (said, None, None) => state.said.push(said.to_owned()),
        other => panic!("a manager does not know this: {other:?}"),
    }
    true
}

fn names(from: u64) -> Vec<u64> {
    (from..from + PAGES as u64).collect()
}

/// Returns whether all blocks of these names exist; each that does has its bytes.
fn holds(directory: &Path, names: &[u64], seed: u8) -> bool {
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), PAGES);
    engine.clear();
    let missed = engine.load(names, &engine.all_pages());
    let whole = (0..PAGES).filter(|page| !missed.contains(page));
    assert!(whole.clone().all(|page| engine.holds(page, page, seed)), "wrong bytes");
    let count = whole.count();
    attachment.close();
    assert!(count == 0 || count == PAGES, "{count} of {PAGES}: {}", log(directory));
    count == PAGES
}

/// Dumps blocks of these names and waits for their records.
fn fill(directory: &Path, names: &[u64], seed: u8) {
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), PAGES);
    engine.fill(seed);
    assert!(engine.dump(names, &engine.all_pages()).is_empty(), "{}", log(directory));
    proven(&attachment);
    attachment.close();
}

#[test]
fn blocks_come_back_from_the_managers_store_after_each_kill() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut manager = Manager::start(directory, 512);
    let mut depot = manager.depot("depot", directory);
    fill(directory, &names(0), 3);
    for _ in 0..3 {
        depot.kill();
        manager.catch_up();
        let stored = manager.stored();
        for name in ["kvdepot-pool", "kvdepot-ledger"] {
            assert_eq!(stored.iter().filter(|stored| *stored == name).count(), 1, "{stored:?}");
        }
        depot = manager.depot("depot", directory);
        assert!(holds(directory, &names(0), 3), "{}", log(directory));
    }
    depot.end(directory);
    manager.catch_up();
    assert!(manager.has_heard("STOPPING=1"));
    assert_eq!(manager.stored(), [] as [String; 0], "an orderly end leaves nothing");
    let _depot = manager.depot("depot", directory);
    assert!(!holds(directory, &names(0), 3));
}

#[test]
fn a_client_of_the_depot_before_holds_the_pool_until_it_exits() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut manager = Manager::start(directory, 512);
    let depot = manager.depot("depot", directory);
    fill(directory, &names(0), 3);
    let client = Role::start("client", directory);
    until("the client is attached", || directory.join("attached").exists());
    manager.catch_up();
    assert_eq!(manager.state.lock().unwrap().ignored, 1, "what the client says of the depot's pool");
    depot.kill();
    let _next = manager.depot("depot", directory);
    let attachment = attach(directory);
    let mut engine = Engine::new(&attachment, &namespace(), PAGES);
    engine.fill(9);
    assert!(log(directory).contains("clients that may still copy"), "{}", log(directory));
    client.kill();
    until("there is room", || engine.dump(&[50], &[0]).is_empty());
    attachment.close();
    manager.catch_up();
    // Only the depot's current clients remain; the earlier ones are removed.
    until("the manager has forgotten the client", || {
        manager.stored().iter().filter(|name| name.starts_with("kvdepot-client-")).count() == 0
    });
}

/// A client whose pidfd found no space may copy nevertheless.
#[test]
fn clients_that_the_manager_had_no_room_for_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut manager = Manager::start(directory, 2);
    let depot = manager.depot("depot", directory);
    fill(directory, &names(0), 3);
    let _client = Role::start("client", directory);
    until("the client is attached", || directory.join("attached").exists());
    depot.kill();
    manager.catch_up();
    assert_eq!(manager.stored(), ["kvdepot-pool", "kvdepot-ledger"]);
    let _next = manager.depot("depot", directory);
    assert!(log(directory).contains("clients that may still copy"), "{}", log(directory));
    assert!(holds(directory, &names(0), 3), "{}", log(directory));
}

/// With a shell between manager and depot, the manager's main process is the shell. Otherwise it would keep a pool for
/// each crash.
#[test]
fn what_the_manager_gave_to_another_process_is_dropped_and_not_stored_twice() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut manager = Manager::start(directory, 512);
    let depot = manager.depot("depot", directory);
    fill(directory, &names(0), 3);
    depot.kill();
    let _next = manager.depot_below("1", "depot", directory);
    manager.catch_up();
    let stored = manager.stored();
    for name in ["kvdepot-pool", "kvdepot-ledger"] {
        assert_eq!(stored.iter().filter(|stored| *stored == name).count(), 1, "{stored:?}");
    }
    assert!(!holds(directory, &names(0), 3));
}

#[test]
fn a_depot_that_keeps_nothing_empties_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut manager = Manager::start(directory, 512);
    let depot = manager.depot("depot", directory);
    fill(directory, &names(0), 3);
    depot.kill();
    let _next = manager.depot("depot that keeps nothing", directory);
    manager.catch_up();
    assert_eq!(manager.stored(), [] as [String; 0]);
    assert!(!holds(directory, &names(0), 3));
}
