//! Groups connections by process: those of one process share a client's quota of the depot's namespaces, and a
//! namespace opened by one of them stays open for the others.

use std::collections::HashMap;

use kvdepot_depot::{Depot, Session, User, WeakUser};
use parking_lot::Mutex;
use rustix::process::Pid;

/// Processes that have connections.
#[derive(Debug, Default)]
pub(crate) struct Users(Mutex<HashMap<Pid, WeakUser>>);

impl Users {
    /// Makes a session for a process, or a separate one if the process is unknown.
    pub(crate) fn session(&self, depot: &Depot, process: Option<Pid>) -> Session {
        let Some(process) = process else { return depot.session() };
        self.session_of(depot, process).of_process(process.as_raw_nonzero().get().unsigned_abs())
    }

    fn session_of(&self, depot: &Depot, process: Pid) -> Session {
        let mut users = self.0.lock();
        if let Some(user) = users.get(&process).and_then(WeakUser::upgrade) {
            drop(users);
            return depot.session_of(&user);
        }
        users.retain(|_, user| user.upgrade().is_some());
        let user: User = depot.user();
        users.insert(process, user.downgrade());
        drop(users);
        depot.session_of(&user)
    }
}
