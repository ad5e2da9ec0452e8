//! One cap for directories that several depots share (P5), wherever they run: a ledger in the first directory.
//!
//! `book`, `purse` and `member` decide, without clock or I/O. `run` is the thread that carries it out, `chain` keeps the
//! ledger as files, `leftovers` removes what failed writes left, and `survey` counts what lies in the directories. `docs/design.md` says why it is built this way,
//! `docs/format.md` shows the bytes.

mod book;
mod chain;
mod codec;
mod leftovers;
mod member;
#[cfg(test)]
mod model;
mod purse;
mod run;
mod survey;

pub(super) use leftovers::Leftovers;
pub(super) use member::{LEASE_MS, Survey};
pub(super) use purse::{Purse, Refused};
pub(super) use run::{open_purse, start};
