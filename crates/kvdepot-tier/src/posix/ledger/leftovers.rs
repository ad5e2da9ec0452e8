//! Files of failed writes: their bytes count as used in the ledger until the file is known to be gone.
//!
//! A file system that hangs, hangs whoever removes a file there. So each directory has a thread of its own for that, which
//! exists only while there is something to remove, and the turns with the ledger go on.

use std::path::PathBuf;
use std::sync::Arc;

use hashbrown::HashSet;

use crate::posix::maintenance::start_thread;
use crate::posix::shared::Shared;
use crate::posix::state::State;

/// Failed writes that are remembered until their files are known to be gone; what is forgotten counts as used until
/// the next survey.
const LEFTOVERS_MAX: usize = 4096;

/// A write that failed: its bytes are free once its temporary file is known to be gone.
#[derive(Debug)]
struct Leftover {
    directory: usize,
    temporary: PathBuf,
    bytes: u64,
    /// The membership in which they were spent.
    membership: u64,
    /// Whether its file could not be removed: tried again in every turn with the ledger.
    is_stuck: bool,
}

/// Failed writes whose bytes still count as used.
#[derive(Debug, Default)]
pub(in crate::posix) struct Leftovers {
    all: Vec<Leftover>,
    /// Directories in which a thread removes some of them now.
    clearing: HashSet<usize>,
}

impl Leftovers {
    fn push(&mut self, leftover: Leftover) {
        if self.all.len() < LEFTOVERS_MAX {
            self.all.push(leftover);
        }
    }

    /// Returns whether there are some that nobody has tried to remove, and can now.
    pub(in crate::posix) fn has_new(&self) -> bool {
        self.all.iter().any(|leftover| !leftover.is_stuck && !self.clearing.contains(&leftover.directory))
    }

    /// Returns the directories for other threads to clear.
    fn begin_to_clear(&mut self) -> Vec<usize> {
        let directories = self.all.iter().map(|leftover| leftover.directory);
        let mut begun = Vec::new();
        for directory in directories {
            if self.clearing.insert(directory) {
                begun.push(directory);
            }
        }
        begun
    }
}

/// Begins to remove the files of failed writes, except in directories where a thread does so already.
pub(super) fn clear(shared: &Arc<Shared>) {
    let directories = shared.lock().leftovers.begin_to_clear();
    for directory in directories {
        let run = move |shared: &Arc<Shared>| clear_directory(shared, directory);
        if let Err(error) = start_thread(shared, "kvd-posix-clear", run) {
            tracing::debug!(%error, "files of failed writes stay for now");
            shared.lock().leftovers.clearing.remove(&directory);
        }
    }
}

fn clear_directory(shared: &Arc<Shared>, directory: usize) {
    let is_here = |leftover: &mut Leftover| leftover.directory == directory;
    let mine: Vec<Leftover> = shared.lock().leftovers.all.extract_if(.., is_here).collect();
    let mut stuck = Vec::new();
    for leftover in mine {
        if let Err(error) = shared.device(directory).unlink(&leftover.temporary) {
            tracing::debug!(%error, "a file of a failed write stays for now");
            stuck.push(Leftover { is_stuck: true, ..leftover });
            continue;
        }
        if let Some(purse) = &mut shared.lock().purse {
            purse.undo(leftover.bytes, leftover.membership);
        }
    }
    let mut state = shared.lock();
    state.leftovers.clearing.remove(&directory);
    stuck.into_iter().for_each(|leftover| state.leftovers.push(leftover));
    drop(state);
    shared.changed.notify_all();
    shared.ledger.notify_all();
}

impl State {
    /// Notes that a write failed whose bytes were spent.
    pub(in crate::posix) fn leave_over(&mut self, directory: usize, temporary: PathBuf, bytes: u64) {
        let Some(purse) = &mut self.purse else { return };
        let membership = purse.fail(bytes);
        self.leftovers.push(Leftover { directory, temporary, bytes, membership, is_stuck: false });
    }
}
