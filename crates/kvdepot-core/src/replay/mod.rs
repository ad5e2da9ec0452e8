//! Replays a trace of requests against a cache with the depot's own eviction order and placement. It needs no bytes and
//! no clock.
//!
//! A request hits as many blocks as are present without a gap from its first one. The blocks of the hit are used, from
//! the first to the last, and missing blocks are stored, as in the depot.

mod belady;
mod ceiling;
mod engines;
mod fleet;
mod level;
mod levels;
mod meter;
mod parse;
mod record;
mod router;
mod run;
mod servers;
mod simulated;
mod tenants;
mod trace;

pub use belady::belady;
pub use ceiling::Ceiling;
pub use fleet::{Change, Fleet, Window, simulate};
pub use level::{Level, LevelReport};
pub use meter::{Meter, SizeReport};
pub use record::Record;
pub use router::Route;
pub use run::{Report, replay};
pub use simulated::SimulatedCache;
pub use trace::{Request, Trace};

use crate::key::BlockHash;

/// Returns the number that represents a block's hash in a replay. Two blocks share one by chance once in 2^64 pairs,
/// which only causes a wrong count.
pub fn block_number(hash: &BlockHash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = hash.0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
