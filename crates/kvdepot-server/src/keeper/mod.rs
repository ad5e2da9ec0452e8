//! The keeper: a tiny process that holds the pool's memory and its ledger alongside the depot, so that they survive a
//! crash of the depot. It does nothing while its depot lives.
//!
//! ```text
//!   depot                                      keeper, started by the first depot
//!   Pool, Ledger                   ──▶         has both
//!   Client, with its pidfd         ──▶         before that client is given the pool
//!   ClientEnded                    ──▶         its copies have ended
//!   Go                             ──▶         ends: the depot's end is an orderly one
//!
//!   the depot dies: the keeper waits for its exit, then for a next depot at its own socket, for `pool_keep_ms`
//!
//!   next depot                                 keeper
//!   connects                       ──▶         of the same user only; one at a time
//!                                  ◀──         Pool, Ledger, a Client each
//!   Pool, Ledger (its own)         ──▶         when it has recovered; it is the depot now, on this connection
//! ```
//!
//! A service manager that stores descriptors replaces it, see [`store`].
//!
//! The keeper waits for the depot's *exit*: only then do that depot's clients see their connections closed, and nothing
//! of the depot touches the pool.

mod link;
mod process;
pub(crate) mod start;
mod store;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use link::Keeper;
pub use process::run;
pub(crate) use store::forget_all as forget_stored;

/// A message from a depot to its keeper.
#[derive(Debug, Serialize, Deserialize)]
enum ToKeeper {
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
enum FromKeeper {
    /// The pool's memory. With its descriptor.
    Pool { clients: u32 },
    /// The ledger. With its descriptor.
    Ledger,
    /// A connection whose client may still copy. With its pidfd, if it has one.
    Client { number: u64 },
}

/// Returns the path of the socket of a depot's keeper.
fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".keeper");
    path.into()
}
