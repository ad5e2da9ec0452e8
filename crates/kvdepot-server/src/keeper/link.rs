//! The depot's side of its keeper.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::decode;
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{Depot, Session};
use parking_lot::Mutex;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Pid;

use super::message::{FromKeeper, ToKeeper, path};
use super::store::{self, Found, Store};
use crate::peer::{Activity, Peer, Process, ensure_own_user};

/// The longest time for the keeper to accept a frame: it does nothing else.
const SEND_WAIT: Duration = Duration::from_secs(1);
/// The longest time for a keeper to answer a next depot: it waits for the exit of the one before.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
/// Pause between attempts to reach it, and between checks whether to keep waiting.
const TICK: Duration = Duration::from_millis(100);
/// Number of depots that may wait for a keeper.
const BACKLOG: i32 = 8;

/// The connection to the keeper of this depot's pool.
#[derive(Debug)]
pub(crate) struct Keeper {
    depot: Arc<Depot>,
    path: PathBuf,
    store: Mutex<Option<Store>>,
    /// A service manager's store that was abandoned. Its content is removed by name when this depot ends.
    given_up: Mutex<Option<Store>>,
    numbers: AtomicU64,
    /// Number of clients that may copy now.
    clients: Mutex<u32>,
    /// Set when this depot ends: from then on the end of a session says nothing about its client.
    is_ending: AtomicBool,
    /// Clients of the earlier depot, by pid.
    earlier: Mutex<Vec<(Pid, Weak<EarlierClient>)>>,
}

/// Everything that a client of the earlier depot holds: the pool, together with the others, and its entry at the
/// keeper. `None` after its copies have ended.
#[derive(Debug)]
pub(super) struct EarlierClient(Mutex<Option<(Arc<Vec<Session>>, KnownClient)>>);

/// The process of a client of the earlier depot.
#[derive(Debug)]
pub(super) struct EarlierPeer {
    pub(super) process: Process,
    pub(super) client: Arc<EarlierClient>,
}

impl Peer for EarlierPeer {
    fn exit(&self) -> Option<BorrowedFd<'_>> {
        self.process.exit()
    }

    fn activity(&self) -> Activity {
        self.process.activity()
    }

    fn copies_ended(&self) -> bool {
        self.client.0.lock().is_none()
    }
}

/// A client registered with the keeper until this value is dropped.
#[derive(Debug)]
pub(crate) struct KnownClient {
    keeper: Arc<Keeper>,
    number: u64,
}

/// Asks the keeper of the earlier depot at `socket`. Returns `None` if there is none.
pub(super) fn ask(socket: &Path, keep_on: &mut dyn FnMut() -> bool) -> Result<Option<Found>> {
    let path = path(socket);
    let mut link = match SeqPacket::connect(&path) {
        Ok(link) => link,
        Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(None),
        Err(error) => return Err(error),
    };
    ensure_own_user(link.as_fd(), "the keeper is another user's")?;
    let mut buffer = FrameBuffer::default();
    let end = Instant::now() + ANSWER_WAIT;
    let mut receive = |link: &mut SeqPacket| loop {
        match link.recv(&mut buffer, Some(Instant::now() + TICK)) {
            Ok(fd) => return Ok((decode::<FromKeeper>(&buffer)?.1, fd)),
            Err(error) if error.kind() == ErrorKind::Timeout && Instant::now() < end && keep_on() => {}
            Err(error) => return Err(error),
        }
    };
    let unexpected = || Error::new(ErrorKind::Protocol, "the keeper gave an unexpected answer");
    let (FromKeeper::Pool { clients: count }, Some(pool)) = receive(&mut link)? else {
        return Err(unexpected());
    };
    let (FromKeeper::Ledger, Some(ledger)) = receive(&mut link)? else { return Err(unexpected()) };
    let mut clients = Vec::new();
    for _ in 0..count {
        let (FromKeeper::Client { number }, pidfd) = receive(&mut link)? else { return Err(unexpected()) };
        clients.push((number, pidfd));
    }
    Ok(Some(Found { pool, ledger, clients, store: Store::Process(link) }))
}

/// Dismisses the keeper that listens at this path, if any. It reads that when it has nothing else to wait for.
pub(super) fn dismiss_at(path: &Path) {
    let told = SeqPacket::connect(path).map(|link| Store::Process(link).dismiss());
    match told {
        Ok(true) => {}
        Err(error) if error.kind() == ErrorKind::Unavailable => {}
        // It does not have to be trusted: its pool is useless without a valid ledger.
        Ok(false) | Err(_) => tracing::warn!(
            "the process that keeps a pool does not answer: it exits on its own after pool_keep_s ({})",
            path.display()
        ),
    }
    let _ = std::fs::remove_file(path);
}

impl Keeper {
    /// Gives a depot's pool to the service manager if that stores descriptors, else to a new process.
    pub(super) fn start(socket: &Path, depot: &Arc<Depot>) -> Result<Arc<Self>> {
        if let Some(store) = store::empty() {
            tracing::info!("the service manager keeps the pool beyond a crash of this process");
            return Self::over(store, path(socket), depot, 0);
        }
        let failed = |what: &'static str| move |e: rustix::io::Errno| Error::io(what, e.into());
        let path = path(socket);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("cannot remove a dead keeper's socket", e).with("path", path.display()));
            }
            _ => {}
        }
        let listener = SeqPacket::listen(&path, BACKLOG)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(|e| {
            Error::io("cannot restrict the keeper's socket to its user", e).with("path", path.display())
        })?;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(failed("cannot make the keeper's socket"))?;
        let link = SeqPacket::from_fd(ours);
        set_socket_timeout(link.as_fd(), Timeout::Send, Some(SEND_WAIT))
            .map_err(failed("cannot set a deadline"))?;
        let command = &depot.config().pool_keeper;
        let cannot = |e| {
            Error::io("cannot start the process that keeps the pool (pool_keep_s)", e)
                .with("command", format!("{command:?}"))
        };
        let (program, arguments) =
            command.split_first().ok_or_else(|| cannot(std::io::ErrorKind::NotFound.into()))?;
        // A separate process group: a signal that ends the depot's group must not end the keeper. The standard output
        // is closed, so that readers of the depot's output do not wait for the keeper's end.
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env_remove("NOTIFY_SOCKET")
            .process_group(0)
            .spawn();
        let mut child = child.map_err(cannot)?;
        tracing::info!("a process keeps the pool beyond a crash of this one (pid {})", child.id());
        // Reaped when it ends.
        let _ = std::thread::Builder::new().name("kvdepot-keeper".to_owned()).spawn(move || child.wait());
        let store = Store::Process(link);
        store.send(&ToKeeper::Listener, Some(listener.as_fd()))?;
        Self::over(store, path, depot, 0)
    }

    /// Continues with the keeper of the earlier depot's pool. It has `clients` clients of that depot, with numbers
    /// below `from`.
    pub(super) fn go_on(
        store: Store,
        socket: &Path,
        depot: &Arc<Depot>,
        clients: u32,
        from: u64,
    ) -> Result<Arc<Self>> {
        if let Store::Process(link) = &store {
            set_socket_timeout(link.as_fd(), Timeout::Send, Some(SEND_WAIT))
                .map_err(|e| Error::io("cannot set a deadline", e.into()))?;
        }
        depot.set_ledger_clients(clients);
        let keeper = Self::over(store, path(socket), depot, from)?;
        *keeper.clients.lock() = clients;
        Ok(keeper)
    }

    fn over(store: Store, path: PathBuf, depot: &Arc<Depot>, from: u64) -> Result<Arc<Self>> {
        let pool = depot.pool();
        let keep_ms = depot.config().pool_keep_ms;
        store.send(&ToKeeper::Pool { keep_ms }, pool.fd())?;
        store.send(&ToKeeper::Ledger, depot.ledger_fd())?;
        let (store, numbers) = (Mutex::new(Some(store)), AtomicU64::new(from));
        Ok(Arc::new(Self {
            depot: Arc::clone(depot),
            path,
            store,
            given_up: Mutex::default(),
            numbers,
            clients: Mutex::default(),
            is_ending: AtomicBool::new(false),
            earlier: Mutex::default(),
        }))
    }

    /// Sends a message. If that fails the keeper is abandoned, because its data can no longer be relied on.
    fn tell(&self, frame: &ToKeeper, fd: Option<BorrowedFd<'_>>) {
        let mut store = self.store.lock();
        let Some(open) = store.as_ref() else { return };
        if let Err(error) = open.send(frame, fd) {
            self.depot.close_ledger();
            *self.given_up.lock() = store.take().filter(|store| matches!(store, Store::Manager(_)));
            tracing::error!(
                "the pool will not outlive a crash of this depot: its keeper does not answer: {error}"
            );
        }
    }

    /// Registers a client before it is given the pool. It counts as copying until the returned value is dropped.
    pub(crate) fn client(self: &Arc<Self>, peer: &dyn Peer) -> KnownClient {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.count(1);
        self.tell(&ToKeeper::Client { number }, peer.exit());
        self.known(number)
    }

    /// Counts clients in the ledger, too, because the keeper of the pool may not have all of them.
    fn count(&self, more: i32) {
        let mut clients = self.clients.lock();
        *clients = clients.saturating_add_signed(more);
        self.depot.set_ledger_clients(*clients);
    }

    /// Represents a client that the keeper has registered already.
    pub(super) fn known(self: &Arc<Self>, number: u64) -> KnownClient {
        KnownClient { keeper: Arc::clone(self), number }
    }

    /// Adds a client of the earlier depot. It holds the pool until it exits or says that its copies have ended.
    pub(super) fn add_earlier(
        self: &Arc<Self>,
        number: u64,
        pid: Option<Pid>,
        holds: &Arc<Vec<Session>>,
    ) -> Arc<EarlierClient> {
        let client = Arc::new(EarlierClient(Mutex::new(Some((Arc::clone(holds), self.known(number))))));
        self.earlier.lock().extend(pid.map(|pid| (pid, Arc::downgrade(&client))));
        client
    }

    /// Notes that none of a process's copies concerns an earlier depot.
    pub(crate) fn copies_ended(&self, pid: Pid) {
        let ended: Vec<_> = {
            // One critical section, because others of the same process report it at the same time.
            let mut earlier = self.earlier.lock();
            let (ended, left) = std::mem::take(&mut *earlier).into_iter().partition(|(of, _)| *of == pid);
            *earlier = left;
            ended
        };
        for (_, client) in ended {
            let held = client.upgrade().and_then(|client| client.0.lock().take());
            drop(held);
        }
    }

    /// Notes that this depot ends, or never serves: sessions end from here on whether their clients still copy or not.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    /// Dismisses the keeper, because this depot ends in an orderly way and has no successor.
    pub(crate) fn dismiss(&self) {
        self.depot.close_ledger();
        let store = self.store.lock().take();
        // A store that was abandoned because it did not answer for a while is removed by name, or dismissed at its
        // socket.
        let store = store.or_else(|| self.given_up.lock().take());
        if store.is_some_and(|store| store.dismiss()) {
            let _ = std::fs::remove_file(&self.path);
        } else {
            dismiss_at(&self.path);
        }
    }
}

impl Drop for KnownClient {
    fn drop(&mut self) {
        if !self.keeper.is_ending.load(Ordering::Acquire) {
            self.keeper.tell(&ToKeeper::ClientEnded { number: self.number }, None);
            self.keeper.count(-1);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_depot::DepotConfig;

    use super::*;

    /// Returns the next message to a keeper.
    fn next(keeper: &mut SeqPacket) -> ToKeeper {
        let mut buffer = FrameBuffer::default();
        keeper.recv(&mut buffer, Some(Instant::now() + Duration::from_secs(60))).unwrap();
        decode::<ToKeeper>(&buffer).unwrap().1
    }

    /// Sessions also end because the depot ends, while their clients keep copying (P1).
    #[test]
    fn the_end_of_a_depot_is_not_taken_for_the_end_of_copies() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let config = serde_json::json!({
            "pipeline": "Cache", "pool_bytes": 2 << 20, "populate": false, "pool_keep_ms": 1000,
            "pool_keeper": ["true"],
        });
        let depot = Depot::start(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let mut told = SeqPacket::from_fd(theirs);
        let socket = directory.path().join("d.sock");
        let keeper =
            Keeper::go_on(Store::Process(SeqPacket::from_fd(ours)), &socket, &Arc::new(depot), 0, 7).unwrap();
        assert!(matches!(next(&mut told), ToKeeper::Pool { .. }));
        assert!(matches!(next(&mut told), ToKeeper::Ledger));
        let [gone, copying] = [(); 2].map(|()| keeper.client(&Process::watched(None)));
        assert!(matches!(next(&mut told), ToKeeper::Client { number: 7 }));
        assert!(matches!(next(&mut told), ToKeeper::Client { number: 8 }));
        drop(gone);
        assert!(matches!(next(&mut told), ToKeeper::ClientEnded { number: 7 }));
        keeper.end();
        drop(copying);
        keeper.dismiss();
        assert!(matches!(next(&mut told), ToKeeper::Go));
    }

    /// Otherwise descriptors of a depot that abandoned its manager would stay as long as the service exists.
    #[test]
    fn a_manager_s_store_that_was_given_up_is_emptied_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let address = directory.path().join("notify");
        let manager = std::os::unix::net::UnixDatagram::bind(&address).unwrap();
        let config = serde_json::json!({
            "pipeline": "Cache", "pool_bytes": 2 << 20, "populate": false, "pool_keep_ms": 1000,
        });
        let depot = Depot::start(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let store = store::of(crate::systemd::Manager::at(address.as_os_str()).unwrap());
        let socket = directory.path().join("d.sock");
        let keeper = Keeper::over(store, path(&socket), &Arc::new(depot), 0).unwrap();
        // It accepts nothing any more, so its queue fills up.
        let mut clients = Vec::new();
        while keeper.store.lock().is_some() {
            clients.push(keeper.client(&Process::watched(None)));
        }
        manager.set_nonblocking(true).unwrap();
        let heard = || {
            let mut heard = Vec::new();
            let mut bytes = [0; 256];
            while let Ok(count) = manager.recv(&mut bytes) {
                heard.push(String::from_utf8_lossy(&bytes[..count]).into_owned());
            }
            heard
        };
        assert!(heard().iter().any(|said| said.starts_with("FDSTORE=1")));
        // In pieces: its queue is short, and this thread reads it, too.
        std::thread::scope(|scope| {
            let dismissed = scope.spawn(|| keeper.dismiss());
            let mut said = Vec::new();
            while !dismissed.is_finished() {
                said.extend(heard());
                std::thread::yield_now();
            }
            said.extend(heard());
            for name in ["kvdepot-pool", "kvdepot-ledger", "kvdepot-client-0"] {
                assert!(said.contains(&format!("FDSTOREREMOVE=1\nFDNAME={name}")), "{name}: {said:?}");
            }
        });
    }

    /// A keeper that was stopped for longer than a depot waits is abandoned, but still has the pool's memory.
    #[test]
    fn a_keeper_that_was_given_up_is_dismissed_where_it_listens() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let config = serde_json::json!({
            "pipeline": "Cache", "pool_bytes": 2 << 20, "populate": false, "pool_keep_ms": 1000,
            "pool_keeper": ["true"],
        });
        let depot = Depot::start(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let socket = directory.path().join("d.sock");
        let listener = SeqPacket::listen(&path(&socket), BACKLOG).unwrap();
        let keeper =
            Keeper::go_on(Store::Process(SeqPacket::from_fd(ours)), &socket, &Arc::new(depot), 0, 0).unwrap();
        drop(theirs);
        drop(keeper.client(&Process::watched(None)));
        assert!(keeper.store.lock().is_none(), "it does not answer");
        keeper.dismiss();
        set_socket_timeout(listener.as_fd(), Timeout::Recv, Some(Duration::from_secs(60))).unwrap();
        let mut told = SeqPacket::from_fd(rustix::net::accept(listener.as_fd()).unwrap());
        assert!(matches!(next(&mut told), ToKeeper::Go));
        assert!(!path(&socket).exists());
    }
}
