//! The keeper: a process of a few lines that has the pool's memory and its ledger beside the depot, so that they outlive a
//! crash of it. It does nothing while its depot lives.
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
//! A service manager that stores descriptors takes its place, see [`store`].
//!
//! The keeper waits for the depot's *exit*: only then clients of that depot see their connections closed, and nothing of it
//! touches the pool.

mod link;
mod process;
pub(crate) mod start;
mod store;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use link::Keeper;
pub use process::run;
pub(crate) use store::forget_all as forget_stored;

/// What a depot tells its keeper.
#[derive(Debug, Serialize, Deserialize)]
enum ToKeeper {
    /// Its socket, where the next depot asks. With a descriptor.
    Listener,
    /// The pool's memory, and for how long to keep it after a crash. With its descriptor; `Ledger` follows.
    Pool { keep_ms: u64 },
    /// The ledger. With its descriptor.
    Ledger,
    /// A connection's client is to be given the pool. With its pidfd, where it has one.
    Client { number: u64 },
    /// None of its copies can be under way any more.
    ClientEnded { number: u64 },
    /// An orderly end.
    Go,
}

/// What a keeper tells the next depot.
#[derive(Debug, Serialize, Deserialize)]
enum FromKeeper {
    /// The pool's memory. With its descriptor.
    Pool { clients: u32 },
    /// The ledger. With its descriptor.
    Ledger,
    /// A connection whose client may still copy. With its pidfd, where it has one.
    Client { number: u64 },
}

/// Where the keeper of the depot at `socket` listens.
fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".keeper");
    path.into()
}
