//! Pool, tasks and pipeline of a depot, and the client of its local door. All decisions of a depot are made by
//! `kvdepot_core::machine`; this crate has the runner that feeds it.

mod advances;
pub mod client;
mod commands;
pub mod config;
mod copies;
mod death;
pub mod depot;
pub mod direct;
mod directory;
mod ending;
mod epochs;
mod events;
mod floors;
#[cfg(test)]
mod fresh_slots_tests;
pub mod handover;
mod history;
mod holds;
mod hops;
mod ledger;
mod listing;
mod locate;
mod looks;
mod memory;
pub mod message;
mod misses;
mod namespaces;
mod openings;
pub mod pool;
mod presence;
mod probers;
mod probes;
mod prover;
pub mod recover;
mod runner;
pub mod seqpacket;
pub mod session;
mod stalls;
pub mod stats;
mod taking_in;
pub mod task_line;
mod tier_events;
mod usage;
mod user;
pub mod values;
mod waiters;

pub use config::DepotConfig;
pub use depot::Depot;
pub use ending::Unwritten;
pub use pool::{PoolMapping, PoolRegion, RegionKind};
pub use session::Session;
pub use user::{User, WeakUser};
