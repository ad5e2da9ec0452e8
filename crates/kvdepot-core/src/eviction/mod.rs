//! Eviction policies. A policy orders slots, and the caller decides which of them may be evicted: not those that are
//! leased, being written, or dirty.

use crate::error::{Error, ErrorKind, Result};

mod chunked;
mod ghosts;
mod lane;
mod lhd;
mod list;
mod lru;
mod policy;
mod ranked;
mod s3fifo;
mod walk;

pub use lhd::Lhd;
pub use lru::Lru;
pub use policy::{EvictionPolicy, Search, SlotId};
pub(crate) use ranked::Ranked;
pub use s3fifo::S3Fifo;

/// Names that [`by_name`] knows.
pub const POLICY_NAMES: [&str; 3] = ["lru", "s3fifo", "lhd"];

/// Returns an empty policy with this name. It allocates memory in chunks as slots are added.
pub fn by_name(name: &str) -> Result<Box<dyn EvictionPolicy>> {
    match name {
        "lru" => Ok(Box::new(Lru::new())),
        "s3fifo" => Ok(Box::new(S3Fifo::new())),
        "lhd" => Ok(Box::new(Lhd::new())),
        _ => Err(Error::new(ErrorKind::Config, "no such eviction policy: use one of the known ones")
            .with("name", name)
            .with("known", POLICY_NAMES.join(", "))),
    }
}
