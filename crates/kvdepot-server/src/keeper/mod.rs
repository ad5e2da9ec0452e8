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
mod message;
mod process;
pub(crate) mod start;
mod store;

pub(crate) use link::Keeper;
pub use process::run;
pub(crate) use store::forget_all as forget_stored;
