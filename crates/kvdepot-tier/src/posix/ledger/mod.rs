//! One cap for directories that several depots share (P5), wherever they run: a ledger in the first directory.
//!
//! `book`, `purse` and `member` decide, without clock or I/O. The tier's state holds `purse` and `leftovers`; `account`
//! notes there what the tier does to its files. `run` is the thread that takes the turns, `chain` keeps the ledger as
//! files, `clearing` removes what failed writes left, and `survey` counts what lies in the directories. `docs/design.md`
//! says why it is built this way, `docs/format.md` shows the bytes.

mod account;
mod book;
mod chain;
mod clearing;
mod codec;
pub(super) mod leftovers;
pub(super) mod member;
#[cfg(test)]
mod model;
pub(super) mod purse;
pub(super) mod run;
mod survey;
pub(super) mod terms;
pub(super) mod times;
