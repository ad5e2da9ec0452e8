//! The messages between a depot and a keeper, and the socket at which the keeper listens.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A message from a depot to its keeper.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToKeeper {
    /// The keeper's socket, at which the next depot asks. With a descriptor.
    Listener,
    /// The pool's memory, and how long to keep it after a crash. With its descriptor; `Ledger` follows.
    Pool { keep_ms: u64 },
    /// The ledger. With its descriptor.
    Ledger,
    /// The client of a connection is about to be given the pool. With its pidfd, if it has one.
    Client { number: u64 },
    /// None of its copies can be in flight any more.
    ClientEnded { number: u64 },
    /// Shut down: the depot ends in an orderly way.
    Go,
}

/// A message from a keeper to the next depot.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromKeeper {
    /// The pool's memory. With its descriptor.
    Pool { clients: u32 },
    /// The ledger. With its descriptor.
    Ledger,
    /// A connection whose client may still copy. With its pidfd, if it has one.
    Client { number: u64 },
}

/// Returns the path of the socket of a depot's keeper.
pub(super) fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".keeper");
    path.into()
}
