//! Maps the pages of blocks into this process before they are read for the first time.
//!
//! A medium that is read from a mapping costs a fault for every few pages that are new to the process: after a restart all
//! are, and a plain file's blocks are written past the mapping. The faults of pages of 4 KiB take about as long as copying
//! them. One thread of low priority spares readers these.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use kvdepot_io::mapped::Medium;
use parking_lot::Mutex;

/// Bytes mapped by one call, until whose end the kernel locks a part of the address space.
const CALL_BYTES: usize = 2 << 20;
/// Blocks that wait for the thread. Further ones are mapped when they are read.
const WAITING_MAX: usize = 4096;
/// How long the end of a tier waits for the thread. A medium may hang in the middle of a call.
const STOP_MAX: Duration = Duration::from_secs(1);

/// An extent of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) at: u64,
    pub(super) bytes: usize,
}

/// The thread that maps pages, if the medium is read from a mapping.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    written: Option<SyncSender<Extent>>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Option<Receiver<()>>>,
    is_stopping: Arc<AtomicBool>,
}

impl Ahead {
    /// Begins with the blocks that were found on the medium, each with its generation: the newest ones first.
    pub(super) fn begin(medium: &Arc<dyn Medium>, found: impl Iterator<Item = (u64, Extent)>) -> Self {
        if !medium.is_read_from_memory() {
            return Self::default();
        }
        let mut found: Vec<_> = found.collect();
        let (written, waiting) = sync_channel(WAITING_MAX);
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (medium, stopping) = (Arc::clone(medium), Arc::clone(&is_stopping));
        let (end, ended) = sync_channel(0);
        let run = move || {
            found.sort_unstable_by_key(|(generation, _)| std::cmp::Reverse(*generation));
            run(&*medium, found, &waiting, &stopping);
            drop(medium);
            drop(end);
        };
        match std::thread::Builder::new().name("kvd-dax-map".to_owned()).spawn(run) {
            Ok(_) => Self { written: Some(written), ended: Mutex::new(Some(ended)), is_stopping },
            Err(error) => {
                tracing::warn!(%error, "no thread maps a medium's pages ahead of their first read, which will take longer");
                Self::default()
            }
        }
    }

    /// Has a block mapped that was written past the mapping.
    pub(super) fn written(&self, extent: Extent) {
        if let Some(written) = &self.written
            && let Err(TrySendError::Full(_)) = written.try_send(extent)
        {
            tracing::debug!("too many blocks wait to be mapped: one more will be when it is read");
        }
    }

    /// Stops the thread and waits for it: for the end of a call, or a second.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        // Wakes the thread if nothing is left to map.
        self.written(Extent { at: 0, bytes: 0 });
        if let Some(ended) = self.ended.lock().take()
            && ended.recv_timeout(STOP_MAX) == Err(RecvTimeoutError::Timeout)
        {
            tracing::warn!("a medium hangs while its pages are mapped: it stays open until that ends");
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(medium: &dyn Medium, found: Vec<(u64, Extent)>, waiting: &Receiver<Extent>, is_stopping: &AtomicBool) {
    // On Linux it applies to the thread.
    let _ = rustix::process::nice(10);
    for extent in found.into_iter().map(|(_, extent)| extent).chain(waiting) {
        for from in (0..extent.bytes).step_by(CALL_BYTES) {
            if is_stopping.load(Ordering::Acquire) {
                return;
            }
            if !medium.map_ahead(extent.at + from as u64, CALL_BYTES.min(extent.bytes - from)) {
                return;
            }
        }
        if is_stopping.load(Ordering::Acquire) {
            return;
        }
    }
}
