//! Requests to a server, until a connection takes them.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, NamespaceId, NamespaceSpec};
use kvdepot_io::IoBuf;

use crate::{Done, Written};

/// One request from the tier to one server.
pub(super) struct Job {
    pub(super) deadline: Instant,
    pub(super) what: What,
}

pub(super) enum What {
    /// Which of these blocks of one namespace exist; at most as many as fit into a frame.
    Exists { keys: Vec<BlockKey>, done: Done<Vec<bool>> },
    /// Reads one block into `into`, which is as long as the block. `sure`: its server was not only guessed.
    Get { key: BlockKey, into: IoBuf, sure: bool, done: Done<()> },
    /// Writes one block.
    Put { key: BlockKey, from: IoBuf, done: Done<Written> },
    /// Removes these blocks of one namespace; at most as many as fit into a frame.
    Remove { keys: Vec<BlockKey>, done: Done<()> },
    /// Opens a namespace, and returns the id that its keys carry on the server.
    Open { spec: Arc<NamespaceSpec>, done: Done<Opened> },
    /// Ends this connection's use of a namespace.
    Close { spec: Arc<NamespaceSpec>, done: Done<()> },
    /// Moves a namespace to an epoch; `now` is the id that its keys carry there.
    SetEpoch { spec: Arc<NamespaceSpec>, now: NamespaceId, epoch: u32, done: Done<()> },
}

/// A server's answer about a namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub(super) namespace: NamespaceId,
    pub(super) epoch: u32,
}

impl Job {
    /// Completes it without an answer.
    pub(super) fn fail(self, error: Error) {
        match self.what {
            What::Exists { done, .. } => done(Err(error)),
            What::Get { key, into, done, .. } => {
                drop(into);
                done(Err(error.with("key", key)));
            }
            What::Put { key, from, done } => {
                drop(from);
                done(Err(error.with("key", key)));
            }
            What::Remove { done, .. } | What::SetEpoch { done, .. } | What::Close { done, .. } => {
                done(Err(error))
            }
            What::Open { done, .. } => done(Err(error)),
        }
    }

    /// Returns whether it moves a block to the server; all other requests are sent before it.
    pub(super) const fn is_write(&self) -> bool {
        matches!(self.what, What::Put { .. })
    }

    /// Returns the bytes of blocks that it moves to the server.
    pub(super) fn write_bytes(&self) -> u64 {
        match &self.what {
            What::Put { from, .. } => from.len() as u64,
            _ => 0,
        }
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match &self.what {
            What::Exists { keys, .. } => return write!(f, "Exists({} keys)", keys.len()),
            What::Remove { keys, .. } => return write!(f, "Remove({} keys)", keys.len()),
            What::Get { key, .. } => ("Get", key),
            What::Put { key, .. } => ("Put", key),
            What::Open { .. } => return f.write_str("Open"),
            What::Close { .. } => return f.write_str("Close"),
            What::SetEpoch { epoch, .. } => return write!(f, "SetEpoch({epoch})"),
        };
        write!(f, "{}({})", what.0, what.1)
    }
}
