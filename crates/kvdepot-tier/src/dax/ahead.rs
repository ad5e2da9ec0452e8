//! Maps the pages of blocks into this process before they are read for the first time.
//!
//! A medium that is read from a mapping costs a fault for every few pages that are new to the process: after a restart all
//! are, and a plain file's blocks are written past the mapping. The faults of pages of 4 KiB take about as long as copying
//! them. One thread of low priority spares readers these.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use kvdepot_io::mapped::Medium;
use parking_lot::Mutex;

/// Bytes mapped by one call, until whose end the kernel locks a part of the address space.
const CALL_BYTES: usize = 2 << 20;
/// Blocks that wait for the thread. Further ones are mapped when they are read.
const WAITING_MAX: usize = 4096;

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
    thread: Mutex<Option<JoinHandle<()>>>,
    is_stopping: Arc<AtomicBool>,
}

impl Ahead {
    /// Begins with the blocks that were found on the medium, in this order.
    pub(super) fn begin(medium: &Arc<dyn Medium>, found: Vec<Extent>) -> Self {
        if !medium.is_read_from_memory() {
            return Self::default();
        }
        let (written, waiting) = sync_channel(WAITING_MAX);
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (medium, stopping) = (Arc::clone(medium), Arc::clone(&is_stopping));
        let run = move || run(&*medium, found, &waiting, &stopping);
        match std::thread::Builder::new().name("kvd-dax-map".to_owned()).spawn(run) {
            Ok(thread) => Self { written: Some(written), thread: Mutex::new(Some(thread)), is_stopping },
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

    /// Stops the thread and waits for it: at most for one call.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        // Wakes the thread if nothing is left to map.
        self.written(Extent { at: 0, bytes: 0 });
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that maps a medium's pages has panicked");
        }
    }
}

fn run(medium: &dyn Medium, found: Vec<Extent>, waiting: &Receiver<Extent>, is_stopping: &AtomicBool) {
    // On Linux it applies to the thread.
    let _ = rustix::process::nice(10);
    for extent in found.into_iter().chain(waiting) {
        for from in (0..extent.bytes).step_by(CALL_BYTES) {
            if is_stopping.load(Ordering::Acquire) {
                return;
            }
            medium.map_ahead(extent.at + from as u64, CALL_BYTES.min(extent.bytes - from));
        }
        if is_stopping.load(Ordering::Acquire) {
            return;
        }
    }
}
