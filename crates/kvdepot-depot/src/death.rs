//! Handles a panic in a thread of the depot. The machine may be half changed then, so nothing relies on it any more:
//! every request fails immediately, which clients treat as a miss (P2). `kvdepot serve` aborts its process instead.

use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};

use crate::waiters::Waiters;

/// Whether the depot still works, and the requests that wait for it.
#[derive(Debug, Default)]
pub(crate) struct Life {
    dead: AtomicBool,
    pub(crate) waiters: Waiters,
}

impl Life {
    /// Fails if the depot is dead.
    pub(crate) fn ensure_alive(&self) -> Result<()> {
        if self.is_dead() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the depot is dead: one of its threads panicked; restart this process",
            ));
        }
        Ok(())
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}

/// Marks the depot dead if it is dropped by a panic.
pub(crate) struct DeathGuard<'a>(pub(crate) &'a Life);

impl Drop for DeathGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.0.dead.swap(true, Ordering::AcqRel) {
            let thread = std::thread::current();
            tracing::error!(
                "the depot of this process is dead: its thread {} panicked. All blocks are misses from now on; restart the \
                 process, and report the panic",
                thread.name().unwrap_or("unnamed")
            );
            // Nothing else will answer them.
            self.0.waiters.fail_all();
        }
    }
}
