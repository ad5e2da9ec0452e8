//! What a cache would do with a trace of requests, by the depot's own order of eviction and placement. No bytes, no clock.
//!
//! A request hits as far as its blocks are there without a gap from its first one. The hit's blocks are used, from the first to the
//! last, and blocks that are missing are stored, as in the depot.

mod belady;
mod ceiling;
mod meter;
mod parse;
mod record;
mod run;
mod simulated;
mod trace;

pub use belady::belady;
pub use ceiling::Ceiling;
pub use meter::{Meter, SizeReport};
pub use record::Record;
pub use run::{Level, LevelReport, Report, replay};
pub use simulated::SimulatedCache;
pub use trace::{Request, Trace};

use crate::key::BlockHash;

/// What stands for a block's hash in a replay. Two blocks share one by chance once in 2^64 pairs, which costs a wrong count.
pub fn block_number(hash: &BlockHash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = hash.0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
