//! Eviction policies. A policy orders slots, and the caller decides which of them may be evicted: not those that are
//! leased, being written, or dirty.

use std::fmt::Debug;

use crate::error::{Error, ErrorKind, Result};

mod chunked;
mod ghosts;
mod lhd;
mod list;
mod lru;
mod s3fifo;
mod walk;

pub use lhd::Lhd;
pub use lru::Lru;
pub use s3fifo::S3Fifo;

/// Number of a slot in the pool. Numbers are dense: policies index their records of slots by number.
pub type SlotId = u32;

/// Names that [`by_name`] knows.
pub const POLICY_NAMES: [&str; 3] = ["lru", "s3fifo", "lhd"];

/// Result of a search for a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// This slot is the next victim.
    Found(SlotId),
    /// No slot may be evicted.
    Nothing,
    /// The search was interrupted, because it met too many slots that may not be evicted.
    Later,
}

/// An eviction order over the slots that hold a block.
pub trait EvictionPolicy: Send + Debug {
    /// Begins a row of inserts and uses of one request, from its first block to its last. A policy may then evict the end
    /// of a prompt before its beginning, because the end is no hit without the beginning. Does nothing by default.
    fn begin_row(&mut self) {}

    /// Adds a slot that the policy does not know yet. `fingerprint` is a hash of its block's key, by which the policy may
    /// recognise a block that returns. A collision only leads to a worse choice of a victim.
    fn insert(&mut self, slot: SlotId, fingerprint: u64);

    /// Records a use of the slot's block. Ignores unknown slots.
    fn touch(&mut self, slot: SlotId);

    /// Removes a slot whose block has left, by eviction or otherwise. Ignores unknown slots.
    fn remove(&mut self, slot: SlotId);

    /// Searches for the next slot to evict among those that `may_evict` allows. Examines at most `looks` slots and
    /// subtracts the number examined. If that is not enough, returns [`Search::Later`], and the next call resumes there. If
    /// some slot may be evicted during the entire search, the search finds one.
    ///
    /// The slot stays until the caller removes it. Slots that may not be evicted keep their places in the order. But if a
    /// search passes over more than `EVICTION_PASSED_OVER_MAX` slots, the further ones count as just used. So only one
    /// search pays for a long run of leased slots.
    fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search;

    /// Announces that the caller evicts this slot before its turn. It must be one that `coldest` reported as evictable,
    /// and its removal must come next, which counts like that of a slot that `victim` found.
    fn choose(&mut self, slot: SlotId);

    /// Walks over the slots without changing their order, the next one to evict first, until `look` returns `false`. The
    /// flag passed to `look` is true if the slot would be evicted at its turn, and false if its uses would spare it.
    fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool);

    /// Returns the number of known slots.
    fn len(&self) -> usize;

    /// Returns whether no slot is known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

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
