//! Which slot goes next. Policies order slots; the caller says which of them may go (leases, writes, dirt).

use std::fmt::Debug;

use crate::error::{Error, ErrorKind, Result};

mod chunked;
mod ghosts;
mod list;
mod lru;
mod s3fifo;
mod walk;

pub use lru::Lru;
pub use s3fifo::S3Fifo;

/// Number of a slot in the pool. Numbers are dense: policies keep what they know of one by its number.
pub type SlotId = u32;

/// Names that [`by_name`] knows.
pub const POLICY_NAMES: [&str; 2] = ["lru", "s3fifo"];

/// What a search for a slot that may go has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// This slot is the next to go.
    Found(SlotId),
    /// None may go.
    Nothing,
    /// Not known yet: too many may not go.
    Later,
}

/// An order of eviction over the slots that hold a block.
pub trait EvictionPolicy: Send + Debug {
    /// A block came into a slot that the policy does not know yet. `fingerprint` is a hash of its key, by which the
    /// policy may recognise a block that comes back; a collision costs a worse choice and nothing else.
    fn insert(&mut self, slot: SlotId, fingerprint: u64);

    /// The slot's block was used. A slot that is not known is left alone.
    fn touch(&mut self, slot: SlotId);

    /// The slot's block is gone, by eviction or otherwise. A slot that is not known is left alone.
    fn remove(&mut self, slot: SlotId);

    /// The next slot to go among those that `may_evict` allows. Looks at no more than `looks` slots, and takes off it what it
    /// looked at: a search that has not ended by then is [`Search::Later`], and goes on where it stopped when it is called
    /// again. It finds a slot if there is one that may go all the while.
    ///
    /// The slot stays until the caller removes it. Slots that may not go are passed over and keep their place in
    /// the order; beyond `EVICTION_PASSED_OVER_MAX` in one search they count as used just now, so that a long row
    /// of leased slots is paid for once and not by every search after.
    fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search;

    /// The caller evicts this slot, which `coldest` showed it as one that goes, before its turn. Its removal comes next and counts
    /// as that of a slot which `victim` found.
    fn choose(&mut self, slot: SlotId);

    /// Walks over the slots from those that go next, without changing their order, until `look` returns `false`.
    /// `look` is told whether the slot would go when its turn comes, or is kept for its uses.
    fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool);

    /// How many slots are known.
    fn len(&self) -> usize;

    /// Whether no slot is known.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The policy of that name, without slots. It grows in pieces.
pub fn by_name(name: &str) -> Result<Box<dyn EvictionPolicy>> {
    match name {
        "lru" => Ok(Box::new(Lru::new())),
        "s3fifo" => Ok(Box::new(S3Fifo::new())),
        _ => Err(Error::new(ErrorKind::Config, "unknown eviction policy")
            .with("name", name)
            .with("known", POLICY_NAMES.join(", "))),
    }
}
