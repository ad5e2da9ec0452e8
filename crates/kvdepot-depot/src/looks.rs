//! Namespaces that the tiers are to be asked about soon, by the thread that watches epochs.

use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use kvdepot_core::machine::NamespaceHandle;

/// Most namespaces that wait to be asked about; all are asked about now and then in any case.
const LOOKS_MAX: usize = 1024;
/// A queue; `None` ends the thread that asks.
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

    /// Has the tiers asked about a namespace soon, by another thread.
    pub(crate) fn soon(&self, handle: NamespaceHandle) {
        // Full: all namespaces are looked at now and then in any case.
        let _ = self.sender.try_send(Some(handle));
    }

    /// The next one; `None` when the thread is to end.
    pub(crate) fn next(&self, until: Instant) -> Result<Option<NamespaceHandle>, RecvTimeoutError> {
        self.asked.recv_deadline(until)
    }
}
