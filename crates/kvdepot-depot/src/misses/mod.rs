//! Why requests missed: blocks that went are remembered, misses are counted by reason, and the last ones are kept for who asks.
//!
//! Nothing here is behind the machine's lock, and a lookup that finds all its blocks does not come here.

mod explain;
mod record;
mod why;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::machine::Owner;
use kvdepot_core::misses::{Ghost, Ghosts, Gone, Reason};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use parking_lot::{Mutex, MutexGuard};

use record::Last;

/// Questions about given blocks that are answered at a time: each may have tiers search their media (P7).
const EXPLAINED_AT_A_TIME: usize = 2;

/// What is known of misses.
#[derive(Debug)]
pub(crate) struct Misses {
    ghosts: Mutex<Ghosts>,
    counts: [AtomicU64; Reason::ALL.len()],
    last: Mutex<Last>,
    /// Processes of connections, where they are known.
    clients: Mutex<HashMap<Owner, u32>>,
    /// Explanations under way.
    explaining: AtomicUsize,
    began: Instant,
}

/// What a request did not find, before it is known why.
pub(crate) struct Unfound<'a> {
    pub(crate) owner: Owner,
    /// The first block that it did not find.
    pub(crate) key: BlockKey,
    /// What keys of all its namespaces carry.
    pub(crate) namespaces: &'a [NamespaceId],
    /// Blocks, or hash units, that it asked for.
    pub(crate) asked: usize,
    /// Leading ones of them that it found.
    pub(crate) hit: usize,
    /// Whether a tier did not answer about that block.
    pub(crate) untold: bool,
}

/// The table of lost blocks, locked.
pub(crate) struct Noting<'a> {
    now_s: u32,
    ghosts: MutexGuard<'a, Ghosts>,
}

impl Noting<'_> {
    /// Adds lost blocks.
    pub(crate) fn note(mut self, gone: &[Gone]) {
        self.ghosts.note_all(self.now_s, gone);
    }
}

/// An explanation under way.
#[derive(Debug)]
struct Explaining<'a>(&'a AtomicUsize);

impl Drop for Explaining<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Misses {
    /// Remembers so many blocks that went.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            ghosts: Mutex::new(Ghosts::new(blocks, kvdepot_io::random::number())),
            counts: Default::default(),
            last: Mutex::default(),
            clients: Mutex::default(),
            explaining: AtomicUsize::new(0),
            began: Instant::now(),
        }
    }

    fn now_s(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    /// Locks the table until [`Noting::note`] has added the blocks that a step lost. Call it before other threads can see
    /// that step. The lock is held for a shorter time than the machine's, and is never taken before that one.
    pub(crate) fn begin_noting(&self) -> Noting<'_> {
        Noting { now_s: self.now_s(), ghosts: self.ghosts.lock() }
    }

    /// Records the process of a connection.
    pub(crate) fn client(&self, owner: Owner, pid: u32) {
        self.clients.lock().insert(owner, pid);
    }

    /// Records the end of a connection.
    pub(crate) fn client_went(&self, owner: Owner) {
        self.clients.lock().remove(&owner);
    }

    /// Misses by reason.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let counts = Reason::ALL.iter().zip(&self.counts);
        counts
            .map(|(reason, count)| (reason.as_str().to_owned(), count.load(Ordering::Relaxed)))
            .collect::<serde_json::Value>()
    }

    /// Counts one more question that is being answered. Fails if there are too many.
    fn begin_to_explain(&self) -> Result<Explaining<'_>> {
        let explaining = Explaining(&self.explaining);
        if self.explaining.fetch_add(1, Ordering::AcqRel) >= EXPLAINED_AT_A_TIME {
            return Err(Error::new(ErrorKind::Busy, "too many questions are being answered: ask again"));
        }
        Ok(explaining)
    }

    fn find(&self, key: &BlockKey) -> Option<Ghost> {
        self.ghosts.lock().find(self.now_s(), key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_explained_to_at_a_time() {
        let misses = Misses::new(0);
        let under_way: Vec<Explaining<'_>> =
            (0..EXPLAINED_AT_A_TIME).map(|_| misses.begin_to_explain().expect("a place")).collect();
        assert_eq!(misses.begin_to_explain().expect_err("none left").kind(), ErrorKind::Busy);
        drop(under_way);
        assert!(misses.begin_to_explain().is_ok());
    }
}
