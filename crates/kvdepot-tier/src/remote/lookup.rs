//! Name resolution of servers. The system's lookup has no deadline, so it runs on a separate thread that is never
//! joined (P2).

use std::fmt;
use std::io::Result as IoResult;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

/// Resolves `host:port`; may take any time.
pub(super) type Lookup = Arc<dyn Fn(&str) -> IoResult<Vec<SocketAddr>> + Send + Sync>;

/// Returns the system's lookup.
pub(super) fn of_the_system() -> Lookup {
    Arc::new(|address| address.to_socket_addrs().map(Iterator::collect))
}

/// Resolves one server's address by one lookup at a time, so that hanging lookups do not pile up.
pub(super) struct Addresses {
    lookup: Lookup,
    state: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    is_under_way: bool,
    waiting: usize,
    found: Option<Result<Vec<SocketAddr>>>,
    is_closed: bool,
}

impl State {
    /// The result, for all who wait for it and for no later caller, because addresses change.
    fn take(&mut self) -> Option<Result<Vec<SocketAddr>>> {
        if self.waiting == 0 { self.found.take() } else { self.found.clone() }
    }
}

impl Addresses {
    pub(super) fn new(lookup: Lookup) -> Self {
        Self { lookup, state: Arc::default() }
    }

    /// Returns the addresses of `host:port`, or an error by `deadline`. An abandoned lookup continues, and its result
    /// goes to the next caller, so names whose lookup always takes longer than a deadline are found, too.
    pub(super) fn find(&self, address: &str, deadline: Instant) -> Result<Vec<SocketAddr>> {
        if let Ok(literal) = address.parse() {
            return Ok(vec![literal]);
        }
        let (state, changed) = &*self.state;
        let mut state = state.lock();
        if let Some(found) = state.take() {
            return found;
        }
        if !state.is_under_way {
            self.start(address)?;
            state.is_under_way = true;
        }
        state.waiting += 1;
        let mut is_late = false;
        // The result stays until the last waiter has taken it.
        while state.found.is_none() && !state.is_closed && !is_late {
            is_late = changed.wait_until(&mut state, deadline).timed_out();
        }
        state.waiting -= 1;
        if let Some(found) = state.take() {
            return found;
        }
        Err(if state.is_closed {
            Error::new(ErrorKind::Closed, "the tier is closing")
        } else {
            late(address)
        })
    }

    fn start(&self, address: &str) -> Result<()> {
        let (lookup, state, address) =
            (Arc::clone(&self.lookup), Arc::clone(&self.state), address.to_owned());
        let thread = std::thread::Builder::new().name("kvdepot-remote-n".to_owned()).spawn(move || {
            let found = lookup(&address)
                .map_err(|e| Error::io("a remote server's name was not found", e).with("server", &address));
            let (state, changed) = &*state;
            let mut state = state.lock();
            (state.is_under_way, state.found) = (false, Some(found));
            drop(state);
            changed.notify_all();
        });
        thread.map(drop).map_err(|e| Error::io("cannot start a thread", e))
    }

    /// Stops all waiting.
    pub(super) fn close(&self) {
        self.state.0.lock().is_closed = true;
        self.state.1.notify_all();
    }
}

fn late(address: &str) -> Error {
    Error::new(ErrorKind::Timeout, "a remote server's name was not found in time: is the name service there?")
        .with("server", address)
}

impl fmt::Debug for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Addresses").finish_non_exhaustive()
    }
}
