//! Blocks on their way to a server or out of it: one writer a key, and nobody reads meanwhile.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use kvdepot_core::limits::WRITERS_WAITING_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind};

use crate::{Done, Written};

#[derive(Default)]
pub(crate) struct Writing {
    writers: HashMap<BlockKey, Vec<Done<Written>>>,
    leaving: HashMap<BlockKey, usize>,
    /// Blocks that servers may store yet although their writes have failed.
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
    /// `Some(Ok)`: the caller writes. `None`: another one does, and will tell. `Some(Err)`: not now.
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

    /// The write is over: those who waited for it.
    pub(crate) fn written(&mut self, key: &BlockKey) -> Vec<Done<Written>> {
        self.writers.remove(key).unwrap_or_default()
    }

    pub(crate) fn leave(&mut self, key: BlockKey) {
        *self.leaving.entry(key).or_default() += 1;
    }

    pub(crate) fn left(&mut self, key: &BlockKey) {
        count_down(&mut self.leaving, key);
    }

    /// Writes have failed that a server may carry out yet.
    pub(crate) fn doubt(&mut self, keys: &[BlockKey]) {
        keys.iter().for_each(|key| *self.doubtful.entry(*key).or_default() += 1);
    }

    /// The server has ended them.
    pub(crate) fn settle(&mut self, keys: &[BlockKey]) {
        keys.iter().for_each(|key| count_down(&mut self.doubtful, key));
    }

    pub(crate) fn is_doubtful(&self, key: &BlockKey) -> bool {
        self.doubtful.contains_key(key)
    }

    pub(crate) fn is_leaving(&self, key: &BlockKey) -> bool {
        self.leaving.contains_key(key)
    }

    /// Whether somebody here writes it.
    pub(crate) fn is_written(&self, key: &BlockKey) -> bool {
        self.writers.contains_key(key)
    }

    pub(crate) fn holds(&self, key: &BlockKey) -> bool {
        self.writers.contains_key(key) || self.is_leaving(key)
    }
}
