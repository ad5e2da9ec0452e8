//! Blocks that are being written to or removed from a server: one writer per key, and no reader in the meantime.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use kvdepot_core::limits::WRITERS_WAITING_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind};

use crate::{Done, Written};

#[derive(Default)]
pub(crate) struct Writing {
    writers: HashMap<BlockKey, Vec<Done<Written>>>,
    leaving: HashMap<BlockKey, usize>,
    /// Blocks that servers may still store although their writes have failed.
    doubtful: HashMap<BlockKey, usize>,
}

impl std::fmt::Debug for Writing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Writing({}, leaving {})", self.writers.len(), self.leaving.len())
    }
}

fn count_down(counts: &mut HashMap<BlockKey, usize>, key: &BlockKey) {
    if let Entry::Occupied(mut count) = counts.entry(*key) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

impl Writing {
    /// Returns `Some(Ok)` if the caller writes, `None` if another caller writes and will notify this one, `Some(Err)`
    /// if it must not be written now.
    #[expect(clippy::type_complexity, reason = "three ways out, each with what it needs")]
    pub(crate) fn enter(
        &mut self,
        key: BlockKey,
        done: Done<Written>,
    ) -> Option<Result<Done<Written>, (Done<Written>, Error)>> {
        let busy = |what: &str| Error::new(ErrorKind::Busy, what.to_owned()).with("key", key);
        if self.leaving.contains_key(&key) {
            return Some(Err((done, busy("the block is being removed"))));
        }
        match self.writers.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(Vec::new());
                Some(Ok(done))
            }
            Entry::Occupied(mut waiting) if waiting.get().len() < WRITERS_WAITING_MAX => {
                waiting.get_mut().push(done);
                None
            }
            Entry::Occupied(_) => Some(Err((done, busy("too many writers of one block")))),
        }
    }

    /// Ends a write. Returns the callers that waited for it.
    pub(crate) fn written(&mut self, key: &BlockKey) -> Vec<Done<Written>> {
        self.writers.remove(key).unwrap_or_default()
    }

    pub(crate) fn leave(&mut self, key: BlockKey) {
        *self.leaving.entry(key).or_default() += 1;
    }

    pub(crate) fn left(&mut self, key: &BlockKey) {
        count_down(&mut self.leaving, key);
    }

    /// Records failed writes that a server may still carry out.
    pub(crate) fn doubt(&mut self, keys: &[BlockKey]) {
        keys.iter().for_each(|key| *self.doubtful.entry(*key).or_default() += 1);
    }

    /// Records that the server has finished them.
    pub(crate) fn settle(&mut self, keys: &[BlockKey]) {
        keys.iter().for_each(|key| count_down(&mut self.doubtful, key));
    }

    pub(crate) fn is_doubtful(&self, key: &BlockKey) -> bool {
        self.doubtful.contains_key(key)
    }

    pub(crate) fn is_leaving(&self, key: &BlockKey) -> bool {
        self.leaving.contains_key(key)
    }

    /// Returns whether a caller here writes it.
    pub(crate) fn is_written(&self, key: &BlockKey) -> bool {
        self.writers.contains_key(key)
    }

    pub(crate) fn holds(&self, key: &BlockKey) -> bool {
        self.writers.contains_key(key) || self.is_leaving(key)
    }
}
