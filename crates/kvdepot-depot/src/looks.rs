//! A queue of namespaces for the thread that watches epochs: the tiers should be asked about them soon.

use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use kvdepot_core::machine::NamespaceHandle;

/// Capacity of the queue. All namespaces are checked periodically in any case.
const LOOKS_MAX: usize = 1024;
/// The queue; `None` ends the thread.
#[derive(Debug)]
pub(crate) struct Looks {
    sender: Sender<Option<NamespaceHandle>>,
    asked: Receiver<Option<NamespaceHandle>>,
}

impl Default for Looks {
    fn default() -> Self {
        let (sender, asked) = crossbeam_channel::bounded(LOOKS_MAX);
        Self { sender, asked }
    }
}

impl Looks {
    pub(crate) fn end(&self) {
        let _ = self.sender.try_send(None);
    }

    /// Requests that the thread ask the tiers about a namespace soon.
    pub(crate) fn soon(&self, handle: NamespaceHandle) {
        // If it is full: all namespaces are checked periodically in any case.
        let _ = self.sender.try_send(Some(handle));
    }

    /// Returns the next namespace; `None` if the thread should terminate.
    pub(crate) fn next(&self, until: Instant) -> Result<Option<NamespaceHandle>, RecvTimeoutError> {
        self.asked.recv_deadline(until)
    }
}
