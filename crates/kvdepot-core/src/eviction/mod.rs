//! Eviction policies. A policy orders slots; the caller decides which of them may be evicted (leases, writes, dirty
//! blocks).

use std::fmt::Debug;

use crate::error::{Error, ErrorKind, Result};

mod age;
mod chunked;
mod density;
mod ghosts;
mod lhd;
mod list;
mod lru;
mod returns;
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
    /// The search has not completed, because it met too many slots that may not be evicted.
    Later,
}

/// An eviction order over the slots that hold a block.
pub trait EvictionPolicy: Send + Debug {
    /// Begins a row of inserts and uses that belong to one request, from its first block to its last. A policy may use
    /// that to evict a prompt's end before its beginning, without which the end cannot be a hit. Does nothing by default.
    fn begin_row(&mut self) {}

    /// Adds a slot that the policy does not know yet, with its block. `fingerprint` is a hash of the block's key, by
    /// which the policy may recognise a block that returns. A collision only causes a worse choice.
    fn insert(&mut self, slot: SlotId, fingerprint: u64);

    /// Records a use of the slot's block. Ignores unknown slots.
    fn touch(&mut self, slot: SlotId);

    /// Removes a slot whose block has left, by eviction or otherwise. Ignores unknown slots.
    fn remove(&mut self, slot: SlotId);

    /// Searches for the next slot to evict among those that `may_evict` allows. It examines at most `looks` slots, and
    /// subtracts the number examined. If the search has not completed by then, it returns [`Search::Later`], and the
    /// next call resumes there. It finds a slot if there is one that may be evicted during the entire search.
    ///
    /// The slot stays until the caller removes it. Slots that may not be evicted are passed over and keep their place
    /// in the order. If one search passes over more than `EVICTION_PASSED_OVER_MAX` slots, the further ones count as
    /// just used, so that only one search pays for a long run of leased slots.
    fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search;

    /// Tells the policy that the caller evicts this slot before its turn, a slot that `coldest` showed as one that
    /// would be evicted. Its removal comes next and counts as that of a slot that `victim` found.
    fn choose(&mut self, slot: SlotId);

    /// Walks over the slots, the next to evict first, without changing their order, until `look` returns `false`. The
    /// flag tells `look` whether the slot would be evicted at its turn, or is kept for its uses.
    fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool);

    /// Returns the number of known slots.
    fn len(&self) -> usize;

    /// Returns whether no slot is known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns an empty policy with that name. It grows in pieces.
pub fn by_name(name: &str) -> Result<Box<dyn EvictionPolicy>> {
    match name {
        "lru" => Ok(Box::new(Lru::new())),
        "s3fifo" => Ok(Box::new(S3Fifo::new())),
        "lhd" => Ok(Box::new(Lhd::new())),
        _ => Err(Error::new(ErrorKind::Config, "unknown eviction policy")
            .with("name", name)
            .with("known", POLICY_NAMES.join(", "))),
    }
}
