//! Removals of blocks: each server is asked for its own blocks, and its answer counts only for them.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::limits::BATCH_HASHES_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use parking_lot::Mutex;

use super::everyone::Everyone;
use super::job::{Job, What};
use crate::Done;

/// A removal on several servers, and the caller that waits for all of them.
struct Removal {
    left: usize,
    error: Option<Error>,
    done: Option<Done<()>>,
}

impl Everyone {
    /// Makes servers remove blocks. Until a server has, its block is a miss here.
    pub(super) fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        let mut asks: HashMap<(usize, NamespaceId), Vec<BlockKey>> = HashMap::new();
        self.shared.beliefs.leave(&keys);
        let (doubtful, keys): (Vec<_>, Vec<_>) = {
            let writing = self.shared.beliefs.writing.lock();
            keys.into_iter().partition(|key| writing.is_doubtful(key))
        };
        for key in keys {
            asks.entry((self.shared.places.of(&key), key.namespace)).or_default().push(key);
        }
        let late = doubtful.first().map(|first| {
            self.shared.beliefs.left(&doubtful);
            let what = "a remote server has not ended a write of a block that is to be removed: it is removed after that";
            Error::new(ErrorKind::Busy, what).with("key", first)
        });
        let asks: Vec<(usize, Vec<BlockKey>)> =
            asks.into_iter().flat_map(|((server, _), keys)| in_frames(server, keys)).collect();
        if asks.is_empty() {
            return done(late.map_or(Ok(()), Err));
        }
        let removal = Removal { left: asks.len(), error: late, done: Some(done) };
        let (removal, deadline) =
            (Arc::new(Mutex::new(removal)), Instant::now() + self.shared.config.timeout);
        for (server, keys) in asks {
            self.shared.begun();
            let (shared, removal, asked) = (Arc::clone(&self.shared), Arc::clone(&removal), keys.clone());
            let done = move |outcome: Result<()>| {
                if let Err(error) = &outcome {
                    tracing::debug!(keys = asked.len(), first = ?asked.first(), %error, "remote blocks could not be removed");
                }
                shared.beliefs.left(&asked);
                ended(&removal, outcome.err());
                shared.ended();
            };
            self.servers[server].submit(Job { deadline, what: What::Remove { keys, done: Box::new(done) } });
        }
    }
}

/// Records the answer of one of the servers.
fn ended(removal: &Mutex<Removal>, error: Option<Error>) {
    let mut removal = removal.lock();
    removal.left -= 1;
    removal.error = removal.error.take().or(error);
    if removal.left > 0 {
        return;
    }
    let (done, error) = (removal.done.take(), removal.error.take());
    drop(removal);
    if let Some(done) = done {
        done(error.map_or(Ok(()), Err));
    }
}

/// Splits keys of one server and namespace into groups that fit into a frame.
pub(super) fn in_frames(server: usize, keys: Vec<BlockKey>) -> Vec<(usize, Vec<BlockKey>)> {
    keys.chunks(BATCH_HASHES_MAX).map(|some| (server, some.to_vec())).collect()
}
