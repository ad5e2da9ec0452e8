//! The stores that can keep the pool beyond a crash: a process, or the service manager's store of descriptors.
//!
//! The manager is used instead of a process where it stores descriptors for this service, because it kills everything
//! else in the service's cgroup, including a keeper. It has these descriptors of a depot, by name:
//!
//! ```text
//!   kvdepot-pool       the pool's memory
//!   kvdepot-ledger     the ledger; without it the pool is of no use
//!   kvdepot-client-N   a client that may copy: its pidfd, or a placeholder if it has none
//! ```
//!
//! It does not report whether it had space. So the ledger counts the clients, and those that did not come back are
//! treated as clients whose exit cannot be watched.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvdepot_core::Result;
use kvdepot_depot::message::encode;
use kvdepot_depot::seqpacket::SeqPacket;
use kvdepot_io::inherited;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

use super::message::ToKeeper;
use crate::systemd::Manager;

const PREFIX: &str = "kvdepot-";
const POOL: &str = "kvdepot-pool";
const LEDGER: &str = "kvdepot-ledger";
const CLIENT: &str = "kvdepot-client-";

/// See the module.
#[derive(Debug)]
pub(super) enum Store {
    Process(SeqPacket),
    Manager(ManagerStore),
}

/// The manager's store, and the clients of this depot in it.
#[derive(Debug)]
pub(super) struct ManagerStore {
    manager: Manager,
    clients: Mutex<BTreeSet<u64>>,
    /// Whether it has the earlier depot's pool: a second descriptor of that name would be stored next to it.
    has_pool: bool,
}

/// The content of a keeper.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) pool: OwnedFd,
    pub(super) ledger: OwnedFd,
    /// Connections whose clients may still copy.
    pub(super) clients: Vec<(u64, Option<OwnedFd>)>,
    pub(super) store: Store,
}

impl Store {
    pub(super) fn send(&self, frame: &ToKeeper, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        match self {
            Self::Process(link) => link.send(&encode(0, frame)?, fd),
            Self::Manager(store) => store.send(frame, fd),
        }
    }

    /// Dismisses it. Returns whether the message was sent.
    pub(super) fn dismiss(&self) -> bool {
        self.send(&ToKeeper::Go, None).is_ok()
    }
}

impl ManagerStore {
    fn send(&self, frame: &ToKeeper, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let client = |number: u64| format!("{CLIENT}{number}");
        match frame {
            ToKeeper::Listener => Ok(()),
            ToKeeper::Pool { .. } if self.has_pool => Ok(()),
            ToKeeper::Pool { .. } => fd.map_or(Ok(()), |fd| self.manager.store(POOL, fd)),
            ToKeeper::Ledger => {
                // One at a time: the earlier depot is over.
                self.manager.forget(LEDGER)?;
                fd.map_or(Ok(()), |fd| self.manager.store(LEDGER, fd))
            }
            ToKeeper::Client { number } => {
                self.clients.lock().insert(*number);
                match fd {
                    Some(pidfd) => self.manager.store(&client(*number), pidfd),
                    None => self.manager.store(&client(*number), no_pidfd()?.as_fd()),
                }
            }
            ToKeeper::ClientEnded { number } => {
                self.clients.lock().remove(number);
                self.manager.forget(&client(*number))
            }
            ToKeeper::Go => {
                let clients = std::mem::take(&mut *self.clients.lock());
                self.manager.forget(LEDGER)?;
                self.manager.forget(POOL)?;
                clients.into_iter().try_for_each(|number| self.manager.forget(&client(number)))
            }
        }
    }
}

/// Makes the placeholder for a client without a pidfd.
fn no_pidfd() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
        .map_err(|e| kvdepot_core::Error::io("cannot make an eventfd", e.into()))
}

/// Returns the manager's store for a new depot, after emptying it.
pub(super) fn empty() -> Option<Store> {
    let manager = Manager::with_store()?;
    forget_stored(&manager);
    Some(Store::Manager(ManagerStore { manager, clients: Mutex::default(), has_pool: false }))
}

/// Makes the manager drop everything stored for an earlier depot that was not taken.
pub(crate) fn forget_all() {
    if let Some(manager) = Manager::of_this_process() {
        forget_stored(&manager);
    }
}

fn forget_stored(manager: &Manager) {
    let mut names: BTreeSet<String> = inherited::take(PREFIX).into_iter().map(|(name, _)| name).collect();
    // Including those not passed to this process: the manager keeps all descriptors of one name, a pool for each crash.
    names.extend([POOL.to_owned(), LEDGER.to_owned()]);
    for name in names {
        if let Err(error) = manager.forget(&name) {
            tracing::warn!("{error}");
        }
    }
}

/// Makes an empty manager's store, for tests.
#[cfg(test)]
pub(super) const fn of(manager: Manager) -> Store {
    Store::Manager(ManagerStore { manager, clients: Mutex::new(BTreeSet::new()), has_pool: false })
}

/// Returns what the manager has of a crashed depot; `None` if anything is missing.
pub(super) fn found() -> Option<Found> {
    let manager = Manager::with_store()?;
    let (mut pool, mut ledger, mut clients) = (None, None, Vec::new());
    let stored = inherited::take(PREFIX);
    let names: BTreeSet<String> = stored.iter().map(|(name, _)| name.clone()).collect();
    for (name, fd) in stored {
        match name.as_str() {
            POOL => pool = Some(fd),
            LEDGER => ledger = Some(fd),
            name => {
                if let Some(number) = name.strip_prefix(CLIENT).and_then(|number| number.parse().ok()) {
                    clients.push((number, Some(fd).filter(|fd| is_pidfd(fd.as_fd()))));
                }
            }
        }
    }
    let (Some(pool), Some(ledger)) = (pool, ledger) else {
        for name in names {
            let _ = manager.forget(&name);
        }
        return None;
    };
    let numbers = clients.iter().map(|(number, _)| *number).collect();
    let store = ManagerStore { manager, clients: Mutex::new(numbers), has_pool: true };
    Some(Found { pool, ledger, clients, store: Store::Manager(store) })
}

fn is_pidfd(fd: BorrowedFd<'_>) -> bool {
    let number = rustix::fd::AsRawFd::as_raw_fd(&fd);
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    text.lines().any(|line| line.starts_with("Pid:"))
}
