//! Removes the files of failed writes.
//!
//! A file system that hangs, hangs whoever removes a file there. So each directory has a thread of its own for that, which
//! exists only while there is something to remove, and the turns with the ledger go on.

use std::sync::Arc;

use super::leftovers::Leftover;
use crate::posix::shared::Shared;
use crate::posix::threads::start_thread;

/// Begins to remove the files of failed writes, except in directories where a thread does so already.
pub(super) fn clear(shared: &Arc<Shared>) {
    let directories = shared.lock().leftovers.begin_to_clear();
    for directory in directories {
        let run = move |shared: &Arc<Shared>| clear_directory(shared, directory);
        if let Err(error) = start_thread(shared, "kvd-posix-clear", run) {
            tracing::debug!(%error, "files of failed writes stay for now");
            shared.lock().leftovers.end_clearing(directory, Vec::new());
        }
    }
}

fn clear_directory(shared: &Arc<Shared>, directory: usize) {
    let mine = shared.lock().leftovers.take(directory);
    let mut stuck = Vec::new();
    for leftover in mine {
        let was_there = match shared.device(directory).unlink(&leftover.temporary) {
            Ok(was_there) => was_there,
            Err(error) => {
                tracing::debug!(%error, "a file of a failed write stays for now");
                stuck.push(Leftover { is_stuck: true, ..leftover });
                continue;
            }
        };
        if let Some(purse) = &mut shared.lock().purse {
            if leftover.in_doubt && !was_there {
                purse.leave_written(leftover.bytes, leftover.membership);
            } else {
                purse.undo(leftover.bytes, leftover.membership);
            }
        }
    }
    shared.lock().leftovers.end_clearing(directory, stuck);
    shared.changed.notify_all();
    shared.ledger.notify_all();
}
