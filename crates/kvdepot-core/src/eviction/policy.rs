//! What an eviction policy is.

use std::fmt::Debug;

/// Number of a slot in the pool. Numbers are dense: policies index their records of slots by number.
pub type SlotId = u32;

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
